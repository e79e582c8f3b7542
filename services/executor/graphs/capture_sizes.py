"""Sizes of the steps that are captured as CUDA graphs: in requests, or in tokens for steps with prompts or drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pagewire.config.values import executor as values
from pagewire.errors import StartupError
from pagewire.kernels.ops import SHORT_QUERY
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.step.limits import Limits

# Larger steps keep the device busy for long enough that launching kernels one by one costs nothing.
DEFAULT_MAX_SIZE = 512
# At this many tokens, a GPU computes a model of 1B parameters for longer than Python takes to launch its kernels; a
# larger model takes longer still.
DEFAULT_MAX_PROMPT_TOKENS = 2048
# (Granularity, limit) of the tokens of a step with prompts. Products compute 64 or 128 tokens at once, so padding to
# these multiples costs little.
_PROMPT_STEPS = ((8, 32), (16, 64), (32, 256), (64, 512), (128, None))


def capture_sizes(sizes: Sequence[int] | None, max_size: int | None, max_num_reqs: int) -> tuple[int, ...]:
    """Returns the sizes that the flags ask for, in ascending order.

    sizes: --cudagraph-capture-sizes, in any order. max_size: --max-cudagraph-capture-size. max_num_reqs: requests of
    the largest possible decode step. Without sizes: 1, 2, 4, multiples of 8 up to 256, multiples of 16 beyond, and
    the maximum itself. Raises StartupError for sizes that no step reaches and for flags that contradict each other.
    """
    if refused := values.of_capture_sizes(sizes, max_size, max_num_reqs):
        raise StartupError(refused)
    if sizes:
        return tuple(sorted(set(sizes)))
    return _up_to(max_size or min(max_num_reqs, DEFAULT_MAX_SIZE))


def prompt_sizes(max_tokens: int | None, max_num_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of tokens of the captured steps with prompts, in ascending order.

    max_tokens: --max-cudagraph-prompt-tokens. max_num_tokens: the limit of a step.
    """
    largest = min(DEFAULT_MAX_PROMPT_TOKENS if max_tokens is None else max_tokens, max_num_tokens)
    sizes, size = list[int](), 0
    while size < largest:
        size += next(step for step, end in _PROMPT_STEPS if end is None or size < end)
        sizes.append(min(size, largest))
    return tuple(size for size in sizes if size > 2)  # two tokens may be two decodes, which have separate graphs


def graph_shapes(
    sizes: Sequence[int],
    limits: Limits,
    max_draft_tokens: int,
    prompts: Sequence[int] = (),
    *,
    with_adapters: bool = False,
) -> list[BatchShape]:
    """Returns the shapes of captured steps by descending tokens: steps of these numbers of requests, also with drafts.
    prompts: numbers of tokens of steps with prompts. with_adapters: each shape is captured with adapters, which take
    more memory, and then without."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, max_draft_tokens, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, num_tokens, 1 + max_draft_tokens, limits))
    shapes += _prompt_shapes(prompts, limits)
    if with_adapters:
        shapes += [replace(shape, has_adapters=True) for shape in shapes]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.has_adapters), reverse=True)


def _prompt_shapes(sizes: Sequence[int], limits: Limits) -> Iterator[BatchShape]:
    """Shapes that mix decodes with chunks of prompts, and shapes of long queries alone, which need no kernel for short
    queries. Either may sample any of its requests."""
    longest = min(limits.max_model_len - 1, limits.max_num_batched_tokens)
    for size in sizes:
        if size <= SHORT_QUERY or (limits.max_num_seqs > 1 and min(size - 1, longest) > SHORT_QUERY):
            yield _by_tokens(size, 0, size, limits)
        if min(size, longest) > SHORT_QUERY:
            num_reqs = min(size // (SHORT_QUERY + 1), limits.max_num_seqs) + 1
            yield BatchShape(num_reqs, size, 0, size, SHORT_QUERY + 1)


def drafter_shapes(sizes: Sequence[int], limits: Limits, longest: int, prompts: Sequence[int] = ()) -> list[BatchShape]:
    """Returns the same for a model that drafts: rounds of one token each, and steps that catch up on skipped tokens,
    at most `longest` per request. prompts: numbers of tokens of steps with prompts."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, longest - 1, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, min(num_tokens - 1, limits.max_num_seqs), longest, limits))
    shapes += _prompt_shapes([size for size in prompts if size > longest], limits)
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _by_tokens(num_tokens: int, num_sampled: int, max_query_len: int, limits: Limits) -> BatchShape:
    """Returns the largest number of requests, plus one that takes the padding."""
    return BatchShape(min(num_tokens, limits.max_num_seqs) + 1, num_tokens, num_sampled, max_query_len)


def draft_sizes(sizes: Sequence[int], max_draft_tokens: int, max_num_tokens: int) -> tuple[int, ...]:
    """Returns the tokens of the captured steps with drafts, in ascending order, up to what this many requests can have.
    max_draft_tokens: the limit of a request. max_num_tokens: the limit of a step."""
    if not sizes or not max_draft_tokens:
        return ()
    largest = max(sizes)
    most = min(largest * (1 + max_draft_tokens), max(largest, DEFAULT_MAX_SIZE), max_num_tokens)
    return tuple(size for size in _up_to(most) if size > 1)


def _up_to(maximum: int) -> tuple[int, ...]:
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)]
    return (*(size for size in steps if size < maximum), maximum)
