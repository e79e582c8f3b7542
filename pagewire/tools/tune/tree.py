"""Candidates: flags that may help a goal, by the usual decision tree of tuning guides.

The branches of the guides: time to first token (long prompts, waiting), time per token (long outputs, others' prompts),
throughput (rows, memory), memory. Flags that cost exactness (an fp8 cache) are only tried if memory is the goal or runs
out. Weights in 4 bits and more devices are not tried: they need another checkpoint or machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.config import ServeConfig
from pagewire.config.profiles import runs_on_cuda
from pagewire.config.speculation import AUTO
from pagewire.flags.model_advice import FEW_BITS, smaller_weights
from pagewire.flags.model_facts import ModelFacts
from pagewire.tools.tune.measure import Figures

_LONG_PROMPT, _LONG_OUTPUT = 512, 32
_WAITING = 0.2
_UNKNOWN = ModelFacts(Path())


@dataclass(frozen=True)
class Candidate:
    """A candidate. flags: changes of the configuration. why: the reason why they may help."""

    flags: Mapping[str, Any]
    why: str


def candidates(
    goal: str,
    config: ServeConfig,
    seen: Figures,
    *,
    mean_output: float,
    cores: int,
    model: ModelFacts | None = None,
) -> list[Candidate]:
    """Returns candidates, most promising first. seen: the figures without changes. model: None if its files are not
    known."""
    return list(_TREE[goal](config, seen, mean_output, cores, model or _UNKNOWN))


def what_else(config: ServeConfig, model: ModelFacts | None) -> str:
    """Returns what helps beyond flags that can be tried, for this model on this device."""
    return f"{smaller_weights(config, model)}, {'more devices' if _on_cuda(config) else 'more cores, or a GPU'}"


def _on_cuda(config: ServeConfig) -> bool:
    return runs_on_cuda(config.device)


def _rows(config: ServeConfig) -> int:
    return config.max_num_seqs or (256 if _on_cuda(config) else 128)


def _tokens(config: ServeConfig) -> int:
    return config.max_num_batched_tokens or (8192 if _on_cuda(config) else 2048)


def _ngrams(config: ServeConfig, mean_output: float, model: ModelFacts) -> Iterator[Candidate]:
    if mean_output >= _LONG_OUTPUT and _on_cuda(config) and not _drafts(config) and not model.has_state:
        yield Candidate({"spec_method": "ngram", "spec_tokens": 5}, "outputs that repeat texts gain tokens per step")


def _fp8(model: ModelFacts, why: str) -> Iterator[Candidate]:
    if model.can_be_8_bits:
        yield Candidate({"kv_cache_dtype": "fp8"}, why)


def _ttft(config: ServeConfig, seen: Figures, output: float, cores: int, model: ModelFacts) -> Iterator[Candidate]:
    if config.target_itl_ms != 0:
        yield Candidate({"target_itl_ms": 0.0}, "prompts are computed at once, though others' tokens wait for them")
    if seen.waited > _WAITING:
        yield Candidate({"max_num_seqs": 2 * _rows(config)}, "requests wait for a row")
    if seen.prompt_tokens > _LONG_PROMPT:
        yield Candidate({"max_num_batched_tokens": 2 * _tokens(config)}, "long prompts take fewer steps")
        yield Candidate({"max_num_partial_prefills": 1}, "one long prompt after the other, each sooner done")
    else:
        yield Candidate({"max_num_batched_tokens": _tokens(config) // 4}, "short steps let short prompts in sooner")
    yield from _threads(config, cores)


def _tpot(config: ServeConfig, seen: Figures, output: float, cores: int, model: ModelFacts) -> Iterator[Candidate]:
    yield from _ngrams(config, output, model)
    is_dense = config.quantization == "none" or model.bits > FEW_BITS
    if is_dense and output >= _LONG_OUTPUT and not _drafts(config) and not model.has_state:
        yield Candidate({"spec_model": "self:q4", "spec_tokens": 4}, "a copy in 4 bits drafts any text")
    if config.target_itl_ms != 0:
        yield Candidate({"target_itl_ms": 20.0}, "less of others' prompts in each step")
    yield Candidate({"max_num_batched_tokens": _tokens(config) // 4}, "no step takes long for prompts")
    yield Candidate({"max_num_seqs": max(1, _rows(config) // 16)}, "fewer requests share a step")
    yield from _threads(config, cores)


def _throughput(
    config: ServeConfig, seen: Figures, output: float, cores: int, model: ModelFacts
) -> Iterator[Candidate]:
    if config.target_itl_ms != 0:
        yield Candidate({"target_itl_ms": 0.0}, "steps are filled with prompts, though tokens of others wait")
    if seen.preempted:
        yield Candidate({"max_num_seqs": max(1, _rows(config) // 2)}, "nothing is computed twice")
        yield from _fp8(model, "twice as many tokens fit into the cache (less exact)")
    if seen.waited > _WAITING:
        yield Candidate({"max_num_seqs": 2 * _rows(config)}, "more requests share the reading of weights")
    yield Candidate({"max_num_batched_tokens": 2 * _tokens(config)}, "more prompt tokens share the reading of weights")
    yield from _ngrams(config, output, model)
    yield from _threads(config, cores)


def _memory(config: ServeConfig, seen: Figures, output: float, cores: int, model: ModelFacts) -> Iterator[Candidate]:
    yield Candidate({"max_num_batched_tokens": _tokens(config) // 4}, "activations of a step are smaller")
    yield from _fp8(model, "half the cache for as many tokens (less exact)")
    yield Candidate({"kv_cache_memory_bytes": 512 << 20}, "a smaller cache keeps fewer prefixes")
    yield Candidate({"max_num_seqs": max(1, _rows(config) // 4)}, "fewer rows")
    yield Candidate({"tokenizer_pool_size": 1}, "one tokenizer worker")
    yield Candidate({"enforce_eager": True}, "no recorded steps or graphs are kept, though steps launch slower")


def _threads(config: ServeConfig, cores: int) -> Iterator[Candidate]:
    if cores > 2 and config.num_threads is None and config.cpu_bind is None:
        yield Candidate({"cpu_bind": "auto"}, "executor and other services do not share cores")


def _drafts(config: ServeConfig) -> bool:
    return bool(config.speculative_config or config.spec_method != AUTO or config.spec_model)


_TREE = {"ttft": _ttft, "tpot": _tpot, "throughput": _throughput, "memory": _memory}
