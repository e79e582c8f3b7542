"""Whatever arrives in whatever order on however small a pool: everybody ends once, with exactly the right tokens."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.scheduler.request import FinishReason, Request
from tests.fakes import FakeExecutor, expected_output
from tests.services.scheduler.pure_line import PureLine

VOCAB_SIZE = 50
EOS = 7


@dataclass(frozen=True)
class Arrival:
    prefix: int
    num_prefix_tokens: int
    own_tokens: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    num_resumed: int
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    priority: int

    @property
    def prompt(self) -> list[int]:
        prefix = [(self.prefix * 13 + 5 * i) % VOCAB_SIZE for i in range(self.num_prefix_tokens)]
        return [*prefix, *self.own_tokens]

    def expected(self, max_num_tokens: int) -> list[int]:
        return expected_output(
            self.prompt,
            min(self.max_tokens, max_num_tokens - len(self.prompt)),
            vocab_size=VOCAB_SIZE,
            end_token_ids=self.stop_token_ids | (set() if self.ignore_eos else {EOS}),
            min_tokens=self.min_tokens,
        )


tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    max_tokens = draw(st.integers(1, 20))
    return Arrival(
        prefix=draw(st.integers(0, 2)),
        num_prefix_tokens=draw(st.integers(0, 20)),
        own_tokens=tuple(draw(st.lists(tokens, min_size=1, max_size=8))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        num_resumed=draw(st.sampled_from([0, 0, 0, 1, 5, 20])),
        stop_token_ids=frozenset(draw(st.lists(tokens, max_size=2))),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.integers(0, 2)),
    )


# What happens next: an arrival, an abort of the i-th live request, a result, a death.
events = st.one_of(
    arrivals(),
    arrivals(),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.just("schedule"),
    st.just("schedule"),
    st.just("receive"),
    st.just("receive"),
    st.just("death"),
)


@st.composite
def lines(draw: st.DrawFn) -> PureLine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    min_blocks = -(-30 // block_size)  # the longest prompt and one token fit
    executor = FakeExecutor(
        num_blocks=draw(st.integers(min_blocks, 3 * min_blocks)),
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 40)),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
    )
    return PureLine(
        executor,
        max_model_len=draw(st.integers(30, 60)),
        pipeline_depth=draw(st.sampled_from([1, 2])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        # Without chunks, only prompts up to the budget are accepted.
        enable_chunked_prefill=executor.max_num_batched_tokens < 28 or draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 5])),
    )


def add(line: PureLine, arrival: Arrival) -> tuple[Request, list[int]]:
    """Adds the request; returns it with the tokens it must still deliver."""
    expected = arrival.expected(line.info.max_num_tokens)
    resumed = expected[: arrival.num_resumed]
    request = line.add(
        arrival.prompt,
        resumed,
        max_tokens=arrival.max_tokens,
        min_tokens=arrival.min_tokens,
        stop_token_ids=arrival.stop_token_ids,
        ignore_eos=arrival.ignore_eos,
        priority=arrival.priority,
    )
    return request, expected[len(resumed) :]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(line=lines(), script=st.lists(events, max_size=60))
def test_every_request_ends_once_with_its_tokens(line: PureLine, script: list) -> None:
    expected: dict[int, list[int]] = {}
    live: dict[int, Request] = {}
    aborted: set[int] = set()
    num_deaths = 0
    for event in script:
        live = {request_id: request for request_id, request in live.items() if not request.is_finished}
        if isinstance(event, Arrival):
            request, expected[len(expected) + 1] = add(line, event)
            live[request.request_id] = request
        elif isinstance(event, tuple) and live:
            request = list(live.values())[event[1] % len(live)]
            if not request.is_finished:
                num_free_before = line.scheduler.num_free_blocks
                line.abort(request)
                assert line.scheduler.num_free_blocks >= num_free_before
                aborted.add(request.request_id)
        elif event == "schedule":
            line.schedule()
        elif event == "receive" and line.num_in_flight:
            line.receive()
        elif event == "death":
            line.die()
            num_deaths += 1
    line.run()

    for request_id, tokens_to_come in expected.items():
        assert len(line.ends[request_id]) == 1, "a request must end exactly once"
        if request_id in aborted:
            assert line.outputs[request_id] == tokens_to_come[: len(line.outputs[request_id])]
            assert line.ends[request_id] == [FinishReason.ABORT]
        else:
            assert line.outputs[request_id] == tokens_to_come
            assert line.ends[request_id][0] in (FinishReason.STOP, FinishReason.LENGTH)
    assert line.scheduler.num_free_blocks == line.executor.num_blocks
    for step in line.steps:
        assert sum(step.num_scheduled_tokens) <= line.executor.max_num_batched_tokens


@settings(max_examples=150, deadline=None)
@given(line=lines(), script=st.lists(st.one_of(arrivals(), st.just("schedule"), st.just("receive")), max_size=40))
def test_no_step_schedules_a_token_too_many(line: PureLine, script: list) -> None:
    requests: list[Request] = []
    for event in script:
        if isinstance(event, Arrival):
            requests.append(add(line, event)[0])
        elif event == "schedule":
            line.schedule()
        elif line.num_in_flight:
            line.receive()
    line.run()

    # Each request computes all its tokens but the last, which is sampled only, and but its prefix hits.
    ran = [request for request in requests if request.num_computed_tokens]
    needed = sum(request.num_tokens - 1 for request in ran) - line.scheduler.num_prefix_hits
    num_overrun = line.executor.num_executed_tokens - needed
    if line.scheduler.num_preemptions == 0:
        # Only an end that could not be foreseen costs a token, and only with a second step in flight.
        num_stopped = sum(line.ends[request.request_id] == [FinishReason.STOP] for request in ran)
        assert 0 <= num_overrun <= num_stopped * (line.scheduler._config.pipeline_depth - 1)
