"""Replacements of weights and crashes at any time: each request gets all its tokens, of one version."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.services.scheduler.values.executor_info import Weights
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.weights.target import WeightsPlan, may_switch
from tests.fakes import FakeExecutor, FakeTier, expected_output
from tests.services.scheduler.pure_line import PureLine
from tests.sweep import examples

VOCAB_SIZE = 50
MAX_ROUNDS = 2000
EVENTS = ["step", "step", "step", "step", "arrive", "arrive", "replace", "die"]


def weights(number: int) -> Weights:
    return Weights(f"v{number}", number)


@dataclass
class Rollout:
    """The decisions of `rollout.py`, without waiting."""

    line: PureLine
    plan: WeightsPlan = field(default_factory=WeightsPlan)
    requests: list[tuple[Request, int]] = field(default_factory=list)  # with max_tokens
    num_deaths: int = 0

    def come(self, index: int, present: Weights) -> None:
        """An executor with these weights connects."""
        scheduler = self.line.scheduler
        self.plan.note(present, scheduler.replicas)
        wanted = self.plan.wanted(present, scheduler.waiting, scheduler.replicas)
        self.line.executors[index].weights_version = wanted.version
        self.line.attach(index)

    def arrive(self, seed: int) -> None:
        prompt = [seed % 3 * 7 + i for i in range(4 + seed % 17)]
        max_tokens = 1 + seed % 23
        self.requests.append((self.line.add(prompt, max_tokens=max_tokens), max_tokens))

    def replace(self) -> None:
        if self._behind() is None:
            self.plan.replace(weights(self.plan.next_number))

    def die(self, index: int) -> None:
        # Its requests are suspects. One that has lost two executors is the cause of the third loss.
        if self.num_deaths < 2:
            self.num_deaths += 1
            self.line.lose(index, Loss.SILENT)
            self.come(index, weights(0))

    def turn(self, index: int) -> None:
        """A step of a replica is decided, or a result arrives, or a load ends; and the next replica drains, or
        switches."""
        self.line.tell_tiers()
        if self.line.schedule(index) is None and self.line.num_in_flight(index):
            self.line.receive(index)
        elif self.line.executors[index].loads:
            self.line.end_load(index)
        behind = self._behind()
        if behind is None:
            return
        replica = self.line.scheduler.replicas[behind]
        assert replica.info is not None
        replica.drain()
        if may_switch(replica, self.line.scheduler):
            present = replica.info.weights
            self.line.lose(behind)
            self.come(behind, present)

    def _behind(self) -> int | None:
        infos = [replica.info for replica in self.line.scheduler.replicas]
        target = self.plan.target
        return next((i for i, info in enumerate(infos) if info is not None and info.weights != target), None)

    @property
    def is_over(self) -> bool:
        return self._behind() is None and all(request.is_finished for request, _ in self.requests)


@given(
    num_replicas=st.integers(1, 3),
    num_blocks=st.integers(12, 30),
    max_num_seqs=st.integers(1, 4),
    depth=st.integers(1, 2),
    has_tier=st.booleans(),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 1000)), min_size=60, max_size=160),
)
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tokens_are_of_one_version_and_none_is_lost(
    num_replicas: int,
    num_blocks: int,
    max_num_seqs: int,
    depth: int,
    has_tier: bool,
    events: list[tuple[str, int]],
) -> None:
    tier = FakeTier() if has_tier else None
    executors = [
        FakeExecutor(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            vocab_size=VOCAB_SIZE,
            tier=tier,
        )
        for _ in range(num_replicas)
    ]
    line = PureLine(*executors, attach=False, pipeline_depth=depth)
    rollout = Rollout(line)
    for index in range(num_replicas):
        rollout.come(index, weights(0))
    for event, number in events:
        index = number % num_replicas
        if event == "arrive":
            rollout.arrive(number)
        elif event == "replace":
            rollout.replace()
        elif event == "die":
            rollout.die(index)
        else:
            rollout.turn(index)
    for round_ in range(MAX_ROUNDS):
        if rollout.is_over:
            break
        rollout.turn(round_ % num_replicas)
    assert rollout.is_over, "a request waits for ever"
    for request, max_tokens in rollout.requests:
        assert line.ends[request.request_id] == [FinishReason.LENGTH]
        prompt, version = request.token_ids[: request.num_prompt_tokens], request.weights_version
        expected = expected_output(prompt, max_tokens, vocab_size=VOCAB_SIZE, weights_version=version)
        assert line.outputs[request.request_id] == expected
