"""Simulated executors: a formula gives the time of their steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.scheduling.simulation import cpu_seconds
from pagewire.services.scheduler.values.executor_info import ExecutorInfo, KVGroup
from pagewire.services.scheduler.values.step import StepWork
from pagewire.v1.executor_pb2 import KVTier

BLOCK_SIZE = 16

# An 8B model (Llama-3.1-8B, bf16) on an H100 SXM, stated and not measured here.
_WEIGHT_BYTES = 15.01e9  # streamed per step: all but the embedding
_WEIGHTS = _WEIGHT_BYTES / 2
_KV_BYTES = 131_072  # per token: 2 x 32 layers x 8 heads x 128 x 2 bytes
_BYTES_PER_SECOND = 2.95e12  # 88 % of 3.35 TB/s: what a published decode step of 5.1 ms reaches
_OPERATIONS_PER_SECOND = 6e14  # of large bf16 products: 60 % of the data sheet
_OPERATIONS_PER_PAIR = 4 * 32 * 4096  # attention: two products over 32 layers of 32 heads x 128
_ATTENTION_PER_SECOND = 4e14
_LAUNCH_SECONDS = 0.0003  # of a captured step, sampling included


def h100_seconds(work: StepWork, kv_tokens: float) -> float:
    """Roofline of a step: weights or products, whichever takes longer, then the KV cache, then attention of prompts.

    kv_tokens: in the contexts of those that decode.
    """
    num_tokens = work.num_decodes + work.num_prompt_tokens
    products = max(_WEIGHT_BYTES / _BYTES_PER_SECOND, 2 * _WEIGHTS * num_tokens / _OPERATIONS_PER_SECOND)
    reading = kv_tokens * _KV_BYTES / _BYTES_PER_SECOND
    return _LAUNCH_SECONDS + products + reading + work.num_pairs * _OPERATIONS_PER_PAIR / _ATTENTION_PER_SECOND


def _cpu_seconds(work: StepWork, kv_tokens: float) -> float:
    return cpu_seconds(work)


@dataclass(frozen=True)
class Device:
    """The hardware of one replica."""

    name: str
    step_seconds: Callable[[StepWork, float], float]  # work, tokens in the contexts of those that decode
    latency: float  # seconds from the scheduler to the device, and back
    rate: float  # requests per second that load it to about two thirds
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: int  # per token

    @property
    def block_bytes(self) -> int:
        return self.kv_bytes * BLOCK_SIZE

    def with_blocks(self, num_blocks: int | None) -> "Device":
        return replace(self, num_blocks=num_blocks) if num_blocks else self

    def info(self, incarnation: int, role: str = "both", tiers: tuple[KVTier, ...] = ()) -> ExecutorInfo:
        return ExecutorInfo(
            incarnation=incarnation,
            model=self.name,
            max_model_len=8192,
            vocab_size=1 << 17,
            eos_token_ids=frozenset(),
            max_logprobs=0,
            kv_groups=(KVGroup(self.num_blocks, block_bytes=self.block_bytes),),
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            role=role,
            kv_tiers=tiers,
            kv_format=self.name,
        )


DEVICES = {
    device.name: device
    for device in (
        # 80 GB x 0.9 less weights and activations leave 53 GB for 25,000 blocks.
        Device("h100-8b", h100_seconds, 0.0002, 40.0, 25_000, 256, 8192, _KV_BYTES),
        Device("cpu", _cpu_seconds, 0.0003, 5.0, 8192, 128, 2048, 23_040),
    )
}
