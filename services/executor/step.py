"""One step as the model runner sees it: what to execute, and what came of it. `convert` maps both to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.services.executor.sampler import LogprobsTensors, SampledTokens
from pagewire.v1.common_pb2 import SamplingParams

# Most alternatives that a request may ask log probabilities of.
MAX_LOGPROBS = 20


class ProtocolError(ValueError):
    """A step that contradicts what the executor was told before; the scheduler has to start a new stream."""


@dataclass(frozen=True)
class NewRequest:
    request_id: int
    token_ids: np.ndarray  # int32 [num_tokens], prompt, then output known so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: np.ndarray  # int32 [n]
    sampling: SamplingParams  # with defaults
    traceparent: str = ""


@dataclass(frozen=True)
class Step:
    """Applied in this order: finished, new, blocks, run."""

    step_id: int
    request_ids: Sequence[int]  # [n], batch order
    num_scheduled_tokens: np.ndarray  # int64 [n]
    num_new_blocks: np.ndarray  # int64 [n]
    new_block_ids: np.ndarray  # int32 [sum(num_new_blocks)]
    finished_request_ids: Sequence[int] = ()
    new_requests: Sequence[NewRequest] = ()


@dataclass(frozen=True)
class HostTokens:
    """What a step sampled, on the host."""

    token_ids: np.ndarray  # int64 [S]
    logprob_token_ids: np.ndarray | None = None  # int64 [L, 1 + num_top]
    logprobs: np.ndarray | None = None  # fp32 [L, 1 + num_top]
    ranks: np.ndarray | None = None  # int64 [L]


@dataclass(frozen=True)
class StepOutput:
    """A step that was launched. Its tokens may still be on their way: `wait()` for them, on any thread.

    `logprobs_of[i]` = (index into request_ids, alternatives wanted) for row i of the logprobs columns.
    """

    step_id: int
    request_ids: list[int]  # [S], those sampled
    logprobs_of: list[tuple[int, int]]
    num_tokens: int
    pending: PendingTokens | None

    def wait(self) -> HostTokens:
        if self.pending is None:
            return HostTokens(np.empty(0, dtype=np.int64))
        return self.pending.wait()


@dataclass
class PendingTokens:
    """Sampled tokens on their way to the host.

    On CUDA a stream of their own carries them to pinned memory, behind the step and beside the next one.
    """

    _host: dict[str, torch.Tensor]
    _copied: torch.cuda.Event | None
    # Device memory must outlive the copy that reads it.
    _device: SampledTokens | None = field(repr=False)

    @classmethod
    def fetch(cls, sampled: SampledTokens, copy_stream: torch.cuda.Stream | None) -> PendingTokens:
        tensors = {"token_ids": sampled.token_ids}
        if isinstance(sampled.logprobs, LogprobsTensors):
            tensors["logprob_token_ids"] = sampled.logprobs.token_ids
            tensors["logprobs"] = sampled.logprobs.logprobs
            tensors["ranks"] = sampled.logprobs.ranks
        if copy_stream is None:
            return cls(tensors, None, None)
        copy_stream.wait_stream(torch.cuda.current_stream())
        host = {}
        with torch.cuda.stream(copy_stream):
            for name, tensor in tensors.items():
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(copy_stream)
            # A blocking event sleeps in synchronize() where the default one would spin.
            copied = torch.cuda.Event(blocking=True)
            copied.record(copy_stream)
        return cls(host, copied, sampled)

    def wait(self) -> HostTokens:
        if self._copied is not None:
            self._copied.synchronize()
            self._device = None
        return HostTokens(**{name: tensor.numpy() for name, tensor in self._host.items()})
