"""Drives a model runner as the scheduler would, without services: prompts, then decode steps at a given depth."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.graphs.capture_sizes import prompt_sizes
from pagewire.services.executor.graphs.cuda_graphs import Graph
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Blocks, NewRequest, Step, StepOutput
from pagewire.tools.bench.report import percentile
from pagewire.v1.common_pb2 import SamplingParams

BLOCK_SIZE = 16
GREEDY = with_defaults(SamplingParams(temperature=0.0, ignore_eos=True))
SCORED = with_defaults(SamplingParams(temperature=0.0, ignore_eos=True, logprobs=1))
WARM_UP_STEPS = 8


@dataclass(frozen=True)
class Decoded:
    """Decode steps of one batch; seconds are the host's, from result to result."""

    num_reqs: int
    context_len: float  # tokens of context of each request, in the middle of the measurement
    step_seconds: float
    gaps: list[float]
    token_ids: np.ndarray  # [num_steps, num_reqs]

    @property
    def tokens_per_second(self) -> float:
        return self.num_reqs / self.step_seconds

    def gap(self, q: float) -> float:
        """Percentile of the inter-token latency, seconds."""
        return percentile(self.gaps, q) or math.nan


@dataclass(frozen=True)
class Scores:
    """The tokens that a model chose greedily, and their logits: [num_steps, num_reqs]."""

    token_ids: np.ndarray
    logits: np.ndarray

    def _of_first(self, num_reqs: int) -> Scores:
        return Scores(self.token_ids[:, :num_reqs], self.logits[:, :num_reqs])

    def difference(self, other: Scores) -> float:
        """The largest between their logits / the largest logit, as long as both have had the same tokens.

        Where these part, two tokens were as good as equal, or one of both is wrong: that step still counts.
        Of requests that one of both lacks, nothing is said.
        """
        common = min(self.token_ids.shape[1], other.token_ids.shape[1])
        return self._of_first(common)._difference(other._of_first(common))

    def _difference(self, other: Scores) -> float:
        same_before = np.logical_and.accumulate(self.token_ids == other.token_ids, axis=0)
        comparable = np.vstack([np.ones_like(same_before[:1]), same_before[:-1]])
        differences = np.abs(self.logits - other.logits)[comparable]
        return float(differences.max() / np.abs(self.logits).max())


class Driver:
    """One runner, and prompts that `prefill` brings into its cache."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        device: torch.device,
        make_proposer: Callable[[Target], Proposer] | None = None,
    ) -> None:
        self._device = device
        self._prompts = [np.array(prompt, dtype=np.int32) for prompt in prompts]
        self._max_len = max(len(prompt) for prompt in prompts) + max_new_tokens
        num_blocks = -(-self._max_len // BLOCK_SIZE)
        # Block 0 stays free: dummy runs write to it. Pages in random order, as after some time of service.
        order = 1 + np.random.default_rng(0).permutation(len(prompts) * num_blocks).astype(np.int32)
        self._blocks = order.reshape(len(prompts), num_blocks)
        limits = Limits(len(prompts), max(8192, len(prompts)), self._max_len, BLOCK_SIZE)
        target = Target(model, limits, order.size + 1, device)
        proposer = make_proposer(target) if make_proposer is not None else None
        self.runner = assemble(
            model, limits, target.num_blocks, device, proposer=proposer, logprobs_mode=LogprobsMode.RAW_LOGITS
        )
        self._step_id = 0

    def capture_graphs(self, sizes: Sequence[int], with_prompts: Sequence[int] = ()) -> None:
        """Captures decode steps of these numbers of requests, and steps with prompts of these numbers of tokens.

        Prompts are padded to the next of `prompt_sizes`. All other steps run eagerly from now on."""
        record = None if self._device.type == "cuda" else _Rerun
        known = prompt_sizes(None, self.runner.limits.max_num_batched_tokens)
        prompts = sorted({next(size for size in known if size >= num_tokens) for num_tokens in with_prompts})
        capture_graphs(self.runner, sizes, lambda fraction, text: None, record, prompts)

    def prompt_len(self, index: int) -> int:
        return len(self._prompts[index])

    def prefill(self) -> float:
        """Fills the cache with the prompts' keys and values; prompt tokens per second."""
        per_step = max(1, self.runner.limits.max_num_batched_tokens // max(map(len, self._prompts)))
        self._prefill(per_step, per_step)  # compiles
        started = time.perf_counter()
        self._prefill(len(self._prompts), per_step)
        return sum(map(len, self._prompts)) / (time.perf_counter() - started)

    def _prefill(self, num_reqs: int, per_step: int) -> None:
        self.runner.reset()
        previous = list[int]()
        for first in range(0, num_reqs, per_step):
            requests = list(range(first, min(first + per_step, len(self._prompts))))
            new = [self._request(index, len(self._prompts[index]), computed=0) for index in requests]
            output = self._run(requests, _lens(new), new, finished=previous)
            previous = requests
        output.wait()

    def scores(self, num_reqs: int, num_steps: int) -> Scores:
        """Greedy tokens of the first requests and their logits, one step at a time."""
        self.runner.reset()
        length = len(self._prompts[0])
        new = [self._request(index, length, computed=length - 1, sampling=SCORED) for index in range(num_reqs)]
        requests, one_each = list(range(num_reqs)), np.ones(num_reqs, dtype=np.int64)
        steps = [self._run(requests, one_each, [] if index else new).wait() for index in range(num_steps)]
        logits = [step.logprobs[:, 0] for step in steps if step.logprobs is not None]
        return Scores(np.stack([step.token_ids for step in steps]), np.stack(logits))

    def mixed_scores(self, num_reqs: int, num_steps: int) -> Scores:
        """Returns `scores` of prompts that enter one after the other, each beside the decodes of the earlier ones."""
        self.runner.reset()
        for index in range(num_reqs):
            new = self._request(index, len(self._prompts[index]), computed=0, sampling=SCORED)
            self._run(list(range(index + 1)), np.array([1] * index + [len(new.token_ids)]), [new]).wait()
        requests, one_each = list(range(num_reqs)), np.ones(num_reqs, dtype=np.int64)
        steps = [self._run(requests, one_each, []).wait() for _ in range(num_steps)]
        logits = [step.logprobs[:, 0] for step in steps if step.logprobs is not None]
        return Scores(np.stack([step.token_ids for step in steps]), np.stack(logits))

    def decode(
        self,
        num_reqs: int,
        num_steps: int,
        depth: int,
        *,
        context_len: int | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> Decoded:
        """Runs num_steps steps of the first requests, all at the same context, `depth` of them in flight.

        context_len: of the first step; by default all of the prompt. A longer one attends to pages never written.
        """
        self.runner.reset()
        context_len = context_len or len(self._prompts[0])
        new = [self._request(index, context_len, context_len - 1, sampling) for index in range(num_reqs)]
        requests, one_each = list(range(num_reqs)), np.ones(num_reqs, dtype=np.int64)
        running: deque[StepOutput] = deque()
        token_ids, times = [], []
        for index in range(WARM_UP_STEPS + num_steps):
            running.append(self._run(requests, one_each, new if index == 0 else []))
            if len(running) == depth:
                token_ids.append(running.popleft().wait().token_ids)
                times.append(time.perf_counter())
        while running:
            token_ids.append(running.popleft().wait().token_ids)
            times.append(time.perf_counter())
        # The last results of a pipeline that runs dry come faster than the others: steps - depth gaps count.
        end = len(times) - depth + 1
        measured = times[WARM_UP_STEPS - 1 : end]
        gaps = [later - earlier for earlier, later in itertools.pairwise(measured)]
        middle = context_len + WARM_UP_STEPS + num_steps / 2
        return Decoded(num_reqs, middle, (measured[-1] - measured[0]) / len(gaps), gaps, np.stack(token_ids))

    def idle_seconds(self, num_reqs: int, depth: int, num_steps: int = 24) -> tuple[float, float]:
        """Per step, from a profile: (device idle in all, the longest gap), in seconds.

        A step's longest gap is the one between it and the next, unless the device waits even longer inside a step.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.decode(num_reqs, num_steps, depth)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            # Results on their way to the host are beside the step.
            if event.device_type == torch.autograd.DeviceType.CUDA and "DtoH" not in event.name
        )
        # The first steps warm up.
        spans = spans[len(spans) * WARM_UP_STEPS // (WARM_UP_STEPS + num_steps) :]
        gaps, busy_until = [], spans[0][1]
        for start, end in spans[1:]:
            gaps.append(max(0.0, start - busy_until))
            busy_until = max(busy_until, end)
        longest = sorted(gaps, reverse=True)[: num_steps - 1]
        return sum(gaps) / num_steps * 1e-6, statistics.mean(longest) * 1e-6

    def generate(self, num_reqs: int, num_tokens: int) -> np.ndarray:
        """Greedy tokens [num_tokens, num_reqs] of the first prompts, which are computed in the first step."""
        self.runner.reset()
        requests, one_each = list(range(num_reqs)), np.ones(num_reqs, dtype=np.int64)
        new = [self._request(index, len(self._prompts[index]), computed=0) for index in requests]
        outputs = [self._run(requests, _lens(new), new)]
        # Launched without reading results in between.
        outputs += [self._run(requests, one_each, []) for _ in range(num_tokens - 1)]
        return np.stack([output.wait().token_ids for output in outputs])

    def _request(self, index: int, num_tokens: int, computed: int, sampling: SamplingParams = GREEDY) -> NewRequest:
        return NewRequest(
            request_id=index,
            token_ids=np.resize(self._prompts[index], num_tokens),
            num_prompt_tokens=num_tokens,
            num_computed_tokens=computed,
            blocks=[Blocks(0, self._blocks[index])],
            sampling=sampling,
        )

    def _run(
        self,
        requests: list[int],
        num_tokens: np.ndarray,
        new: list[NewRequest],
        finished: Sequence[int] = (),
        drafts: np.ndarray | None = None,
        is_fixed: bool = False,
    ) -> StepOutput:
        self._step_id += 1
        return self.runner.execute(
            Step(
                step_id=self._step_id,
                request_ids=requests,
                num_scheduled_tokens=num_tokens,
                num_new_blocks=np.zeros((len(requests), 1), dtype=np.int64),
                new_block_ids=np.empty(0, dtype=np.int32),
                new_requests=new,
                finished_request_ids=finished,
                num_draft_tokens=drafts,
                has_fixed_drafts=is_fixed,
            )
        )


def _lens(requests: list[NewRequest]) -> np.ndarray:
    return np.array([len(request.token_ids) for request in requests], dtype=np.int64)


class _Rerun(Graph):
    """Where there are no CUDA graphs, to prove the script: a replay runs the function again, into the same memory."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._output: Tensor | None = None

    @property
    def output(self) -> Tensor:
        assert self._output is not None, "read before the first replay"
        return self._output

    def replay(self) -> None:
        result = self._function()
        self._output = result if self._output is None else self._output.copy_(result)
