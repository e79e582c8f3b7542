"""Hypothesis strategies: requests, and lines with limits so tight that they get in each other's way."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from pagewire.services.scheduler.values.images import NO_IMAGES, PromptImages
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import Logprobs
from tests.fakes import FakeExecutor, FakeTier, expected_output, fake_prompt_logprobs
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.values.test_images import image

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
    prompt_logprobs: int | None
    has_image: bool
    tenant: str

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
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
        has_image=draw(st.booleans()),
        tenant=draw(st.sampled_from(["", "", "a", "b"])),
    )


ONE, NONE = st.just(1), st.just(0)
NO_WINDOWS = st.just(list[int]())
NO_STATES = st.just(0)
NO_LIMIT = st.just(4096)
NEVER = st.just(False)
NO_ROLES = st.just(("both", "both"))
ROLES = st.sampled_from([("both", "both"), ("prefill", "decode"), ("decode", "prefill"), ("prefill", "both")])


@st.composite
def executors(
    draw: st.DrawFn,
    block_size: int,
    max_draft_tokens: st.SearchStrategy[int],
    windows: st.SearchStrategy[list[int]] = NO_WINDOWS,
    states: st.SearchStrategy[int] = NO_STATES,
) -> FakeExecutor:
    """Draws an executor. states: the number of blocks of tokens that one state is for; 0: there are no states,
    negative: there is nothing else."""
    min_blocks = -(-30 // block_size)  # the longest prompt and one token fit
    ratio = draw(states)
    state_tokens = abs(ratio) * block_size
    gains = random.Random(draw(st.integers(0, 1000)))
    max_tokens = draw(st.integers(1, 40))
    return FakeExecutor(
        num_blocks=0 if ratio < 0 else min_blocks + draw(st.integers(0, 2 * min_blocks)),
        # A window and the tokens of a step behind it fit.
        windows={
            window: -(-(window + max_tokens) // block_size) + 1 + draw(st.integers(0, min_blocks))
            for window in draw(windows)
        },
        # The state that a step goes on from, and those of its tokens.
        states={state_tokens: -(-max_tokens // state_tokens) + 2 + draw(st.integers(0, 6))} if ratio else None,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=max_tokens,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS],
        max_draft_tokens=draw(max_draft_tokens),
        pipeline_stages=draw(st.sampled_from([1, 1, 2, 4])),
        draw_gain=lambda most: gains.randint(1, most),
    )


@st.composite
def lines(
    draw: st.DrawFn,
    num_replicas: st.SearchStrategy[int] = ONE,
    max_draft_tokens: st.SearchStrategy[int] = NONE,
    windows: st.SearchStrategy[list[int]] = NO_WINDOWS,
    states: st.SearchStrategy[int] = NO_STATES,
    max_waiting: st.SearchStrategy[int] = NO_LIMIT,
    has_tier: st.SearchStrategy[bool] = NEVER,
    roles: st.SearchStrategy[tuple[str, str]] = NO_ROLES,
) -> PureLine:
    """Draws a line. has_tier: its executors share a tier, if their groups of layers are of the same kinds. roles: of
    two executors."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    replicas = [draw(executors(block_size, max_draft_tokens, windows, states)) for _ in range(draw(num_replicas))]
    for replica, role in zip(replicas, draw(roles), strict=False):
        replica.role = role
    if draw(has_tier):
        max_blocks, tiers = draw(st.sampled_from([5, 20, 1000])), dict[object, FakeTier]()
        for replica in replicas:
            kinds = tuple((group.window, group.state_tokens) for group in replica.kv_groups)
            replica.tier = tiers.setdefault(kinds, FakeTier(max_blocks))
            replica.kv_format = f"fake {kinds}"
    # Without chunks, only prompts up to the budget are accepted.
    must_chunk = min(executor.max_num_batched_tokens for executor in replicas) < 28
    return PureLine(
        *replicas,
        # Every replica holds the longest request: only such executors mix.
        max_model_len=30 if len(replicas) > 1 else draw(st.integers(30, 60)),
        pipeline_depth=draw(st.sampled_from([1, 2])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=must_chunk or draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 5])),
        max_num_partial_prefills=draw(st.integers(1, 3)),
        max_long_partial_prefills=draw(st.integers(1, 2)),
        max_running_per_tenant=draw(st.sampled_from([None, None, 1])),
        max_waiting_requests=draw(max_waiting),
        target_itl_ms=draw(st.sampled_from([None, None, 0, 1, 50])),
    )


def add(
    line: PureLine, arrival: Arrival, delivered: Sequence[int] = (), *, is_resubmitted: bool = False
) -> tuple[Request, list[int]]:
    """Adds the request; returns it with the tokens it must still deliver. delivered: by an earlier attempt, the first
    of which may have brought some along."""
    expected = arrival.expected(line.max_num_tokens())
    resumed = expected[: arrival.num_resumed + len(delivered)]
    request = line.add(
        arrival.prompt,
        resumed,
        is_resubmitted=is_resubmitted,
        max_tokens=arrival.max_tokens,
        min_tokens=arrival.min_tokens,
        stop_token_ids=arrival.stop_token_ids,
        ignore_eos=arrival.ignore_eos,
        priority=arrival.priority,
        prompt_logprobs=arrival.prompt_logprobs,
        tenant=arrival.tenant,
        images=PromptImages([image(1, 0, 1)], len(arrival.prompt)) if arrival.has_image else NO_IMAGES,
    )
    return request, expected[len(resumed) :]


def expected_prompt_logprobs(request: Request) -> list[Logprobs]:
    """Returns the log probabilities of the whole prompt, which come once; an arrival with output had them before."""
    params, prompt = request.sampling_params, request.token_ids[: request.num_prompt_tokens]
    if not params.HasField("prompt_logprobs") or request.num_output_tokens:
        return []
    return [fake_prompt_logprobs(prompt, params.prompt_logprobs, VOCAB_SIZE)]
