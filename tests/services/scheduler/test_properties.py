"""Whatever arrives in whatever order on however small a pool: everybody ends once, with exactly the right tokens."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.request import FinishReason, Request
from pagewire.services.scheduler.suspicion import MAX_LOSSES
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
        num_prefix_tokens=draw(st.sampled_from([0, 3, 8, 8, 16, 20])),
        own_tokens=tuple(draw(st.lists(tokens, min_size=1, max_size=8))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        num_resumed=draw(st.sampled_from([0, 0, 0, 1, 5, 20])),
        stop_token_ids=frozenset(draw(st.lists(tokens, max_size=2))),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.integers(0, 2)),
    )


# What happens, one after the other; "arrive" takes the next arrival, ("abort", i) the i-th live request.
events = st.lists(
    st.one_of(
        st.sampled_from(["arrive", "arrive", "schedule", "schedule", "schedule", "receive", "receive", "receive"]),
        st.sampled_from(["arrive", "schedule", "receive", "death", ("abort", 0), ("abort", 3), ("abort", 5)]),
    ),
    min_size=20,
    max_size=80,
)
quiet_events = st.lists(st.sampled_from(["arrive", "schedule", "schedule", "receive"]), min_size=20, max_size=60)
many_arrivals = st.lists(arrivals(), min_size=4, max_size=10)


@st.composite
def lines(draw: st.DrawFn) -> PureLine:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    min_blocks = -(-30 // block_size)  # the longest prompt and one token fit
    executor = FakeExecutor(
        num_blocks=min_blocks + draw(st.integers(0, 2 * min_blocks)),
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


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=lines(), to_come=many_arrivals, script=events)
def test_every_request_ends_once_with_its_tokens(line: PureLine, to_come: list[Arrival], script: list) -> None:
    to_come = to_come[::-1]
    expected: dict[int, list[int]] = {}
    requests: list[Request] = []
    aborted: set[int] = set()
    for event in [*script, *["arrive"] * len(to_come)]:
        if event == "arrive" and to_come:
            request, expected[len(requests) + 1] = add(line, to_come.pop())
            requests.append(request)
        elif event == "schedule":
            line.schedule()
        elif event == "receive" and line.num_in_flight:
            line.receive()
        elif event == "death":
            line.die()
        elif isinstance(event, tuple) and (live := [r for r in requests if not r.is_finished]):
            request = live[event[1] % len(live)]
            line.abort(request)
            assert not request.block_table
            aborted.add(request.request_id)
    line.run()

    for request_id, tokens_to_come in expected.items():
        assert len(line.ends[request_id]) == 1, "a request must end exactly once"
        if request_id in aborted:
            assert line.outputs[request_id] == tokens_to_come[: len(line.outputs[request_id])]
            assert line.ends[request_id] == [FinishReason.ABORT]
        elif requests[request_id - 1] in line.condemned:
            assert line.outputs[request_id] == tokens_to_come[: len(line.outputs[request_id])]
            assert line.ends[request_id] == [FinishReason.ERROR] and script.count("death") >= MAX_LOSSES
        else:
            assert line.outputs[request_id] == tokens_to_come
            assert line.ends[request_id][0] in (FinishReason.STOP, FinishReason.LENGTH)
    assert line.scheduler.num_free_blocks == line.executor.num_blocks
    for step in line.steps:
        assert sum(step.num_scheduled_tokens) <= line.executor.max_num_batched_tokens


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=lines(), to_come=many_arrivals, script=quiet_events)
def test_no_step_schedules_a_token_too_many(line: PureLine, to_come: list[Arrival], script: list) -> None:
    to_come = to_come[::-1]
    requests: list[Request] = []
    for event in [*script, *["arrive"] * len(to_come)]:
        if event == "arrive" and to_come:
            requests.append(add(line, to_come.pop())[0])
        elif event == "schedule":
            line.schedule()
        elif event == "receive" and line.num_in_flight:
            line.receive()
    line.run()
    if line.scheduler.num_preemptions:
        return

    # Each request computes all its tokens but the last, which is only sampled, and but its prefix hits.
    ran = [request for request in requests if request.num_computed_tokens]
    needed = sum(request.num_tokens - 1 for request in ran) - line.scheduler.num_prefix_hits
    # Only an end that could not be foreseen costs a token, and only with a second step in flight.
    num_stopped = sum(line.ends[request.request_id] == [FinishReason.STOP] for request in ran)
    num_overrun = line.executor.num_executed_tokens - needed
    assert 0 <= num_overrun <= num_stopped * (line.config.pipeline_depth - 1)
