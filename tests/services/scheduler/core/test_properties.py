"""Properties: whatever arrives in whatever order on however small a pool, each request ends once, with exactly the
right tokens."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.suspicion.suspects import MAX_SILENT_LOSSES
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1.common_pb2 import Logprobs
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.strategies import Arrival, add, arrivals, expected_prompt_logprobs, lines
from tests.sweep import examples

# What happens, one after the other, and on which replica, modulo their number; "arrive" takes the next arrival,
# "abort 3" ends the third live request, "loss" takes an executor away, which "return" or the end brings back.
kinds = st.one_of(
    st.sampled_from(["arrive", "arrive", "schedule", "schedule", "schedule", "receive", "receive", "receive"]),
    st.sampled_from(["arrive", "schedule", "receive", "death", "loss", "return", "abort 0", "abort 3", "abort 5"]),
)
events = st.lists(st.tuples(kinds, st.integers(0, 2)), min_size=20, max_size=80)
quiet_events = st.lists(
    st.tuples(st.sampled_from(["arrive", "schedule", "schedule", "receive"]), st.just(0)), min_size=20, max_size=60
)
many_arrivals = st.lists(arrivals(), min_size=4, max_size=10)


class Story:
    """Plays a script on a line and knows what every request must deliver."""

    def __init__(self, line: PureLine, to_come: list[Arrival]) -> None:
        self.line = line
        self.to_come = to_come[::-1]
        self.expected: dict[int, list[int]] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.requests: list[Request] = []
        self.aborted: set[int] = set()
        self.num_deaths = 0

    def play(self, script: list[tuple[str, int]]) -> None:
        for kind, number in script:
            index = number % len(self.line.executors)
            is_there = self.line.scheduler.replicas[index].info is not None
            if kind == "arrive" and self.to_come:
                request, tokens_to_come = add(self.line, self.to_come.pop())
                self.requests.append(request)
                self.expected[request.request_id] = tokens_to_come
                self.prompt_logprobs[request.request_id] = expected_prompt_logprobs(request)
            elif kind == "schedule":
                self.line.schedule(index)
            elif kind == "receive" and self.line.num_in_flight(index):
                self.line.receive(index)
            elif kind in ("death", "loss") and is_there:
                self.num_deaths += 1
                self.line.lose(index)
                if kind == "death":
                    self.line.attach(index)
            elif kind == "return" and not is_there:
                self.line.attach(index)
            elif kind.startswith("abort") and (live := [r for r in self.requests if not r.is_finished]):
                request = live[int(kind[-1]) % len(live)]
                self.line.abort(request)
                assert not request.blocks.held
                self.aborted.add(request.request_id)

    def finish(self) -> None:
        """Lets all requests arrive, starts every executor, and runs all requests to their end, which must be the right
        one."""
        line = self.line
        self.play([("arrive", 0)] * len(self.to_come))
        self.play([("return", index) for index in range(len(line.executors))])
        line.run()
        for request_id, tokens_to_come in self.expected.items():
            assert len(line.ends[request_id]) == 1, "a request must end exactly once"
            if request_id in self.aborted:
                assert line.outputs[request_id] == tokens_to_come[: len(line.outputs[request_id])]
                assert line.ends[request_id] == [FinishReason.ABORT]
            elif self.requests[request_id - 1] in line.crashers:
                assert line.outputs[request_id] == tokens_to_come[: len(line.outputs[request_id])]
                assert line.ends[request_id] == [FinishReason.ERROR] and self.num_deaths >= MAX_SILENT_LOSSES
            else:
                assert line.outputs[request_id] == tokens_to_come
                assert line.ends[request_id][0] in (FinishReason.STOP, FinishReason.LENGTH)
                assert line.prompt_logprobs.get(request_id, []) == self.prompt_logprobs[request_id]
        for replica, executor in zip(line.scheduler.replicas, line.executors, strict=True):
            assert replica.kv.num_free_blocks == sum(group.num_blocks for group in executor.kv_groups)
        most = max(executor.max_num_batched_tokens for executor in line.executors)
        for step in line.steps:
            assert sum(step.num_scheduled_tokens) <= most


PROPERTY = settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))


@PROPERTY
@given(line=lines(), to_come=many_arrivals, script=events)
def test_every_request_ends_once_with_its_tokens(line: PureLine, to_come: list[Arrival], script: list) -> None:
    story = Story(line, to_come)
    story.play(script)
    story.finish()


@PROPERTY
@given(line=lines(max_draft_tokens=st.integers(1, 6)), to_come=many_arrivals, script=events)
def test_a_step_may_gain_several_tokens(line: PureLine, to_come: list[Arrival], script: list) -> None:
    """However many of its drafts are accepted, a request gets the tokens of plain decoding."""
    story = Story(line, to_come)
    story.play(script)
    story.finish()


@PROPERTY
@given(
    line=lines(
        max_draft_tokens=st.sampled_from([0, 0, 3]),
        windows=st.lists(st.integers(1, 12), min_size=1, max_size=2, unique=True),
    ),
    to_come=many_arrivals,
    script=events,
)
def test_groups_with_windows_keep_what_is_still_read(line: PureLine, to_come: list[Arrival], script: list) -> None:
    story = Story(line, to_come)
    story.play(script)
    story.finish()


@PROPERTY
@given(
    line=lines(
        windows=st.lists(st.integers(1, 12), max_size=1),
        states=st.sampled_from([1, 2, 3, -1, -2]),
    ),
    to_come=many_arrivals,
    script=events,
)
def test_a_state_is_written_by_one_request_and_found_again_by_others(
    line: PureLine, to_come: list[Arrival], script: list
) -> None:
    """Alone, or beside layers that see all tokens or a window."""
    story = Story(line, to_come)
    story.play(script)
    story.finish()


@PROPERTY
@given(
    line=lines(num_replicas=st.integers(2, 3), max_draft_tokens=st.sampled_from([0, 0, 3])),
    to_come=many_arrivals,
    script=events,
)
def test_replicas_share_the_requests_and_take_over_from_each_other(
    line: PureLine, to_come: list[Arrival], script: list
) -> None:
    story = Story(line, to_come)
    story.play(script)
    story.finish()


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(line=lines(), to_come=many_arrivals, script=quiet_events)
def test_no_step_schedules_a_token_too_many(line: PureLine, to_come: list[Arrival], script: list) -> None:
    story = Story(line, to_come)
    story.play(script)
    story.finish()
    if line.replica.counts.num_preemptions:
        return

    # Each request computes all its tokens but the last, which is only sampled, and but its prefix hits.
    ran = [request for request in story.requests if request.num_computed_tokens]
    needed = sum(request.num_tokens - 1 for request in ran) - line.replica.counts.num_prefix_hits
    # Only an end that could not be foreseen costs a token, and only with a second step in flight.
    num_stopped = sum(line.ends[request.request_id] == [FinishReason.STOP] for request in ran)
    num_overrun = line.executor.num_executed_tokens - needed
    assert 0 <= num_overrun <= num_stopped * (line.config.pipeline_depth - 1)
