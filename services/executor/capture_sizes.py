"""Which steps are captured as CUDA graphs: numbers of requests, and of tokens where there are drafts."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.errors import StartupError
from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.limits import Limits

# Larger steps keep the device busy for so long that launching kernels one by one costs nothing.
DEFAULT_MAX_SIZE = 512


def capture_sizes(sizes: Sequence[int] | None, max_size: int | None, max_num_reqs: int) -> tuple[int, ...]:
    """Rising sizes, from what the flags say.

    sizes: --cudagraph-capture-sizes, in any order. max_size: --max-cudagraph-capture-size. max_num_reqs: of the largest
    decode step there can be. Without sizes: 1, 2, 4, multiples of 8 up to 256, multiples of 16 beyond, and the maximum
    itself. Raises StartupError for sizes that no step reaches and for flags that contradict each other.
    """
    largest = max(sizes) if sizes else max_size
    flag = "--cudagraph-capture-sizes" if sizes else "--max-cudagraph-capture-size"
    if largest is not None and largest > max_num_reqs:
        raise StartupError(
            f"{flag} {largest}: a step has at most {max_num_reqs} requests (--max-num-seqs, --max-num-batched-tokens); "
            "lower it"
        )
    if sizes:
        if max_size is not None and max_size != largest:
            raise StartupError(
                f"--max-cudagraph-capture-size {max_size} contradicts --cudagraph-capture-sizes, whose largest is "
                f"{largest}: give one of them"
            )
        return tuple(sorted(set(sizes)))
    return _up_to(largest or min(max_num_reqs, DEFAULT_MAX_SIZE))


def graph_shapes(sizes: Sequence[int], limits: Limits, max_draft_tokens: int) -> list[BatchShape]:
    """Of the steps that are captured, falling in tokens: of these numbers of requests, and with drafts."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, max_draft_tokens, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, num_tokens, 1 + max_draft_tokens, limits))
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def drafter_shapes(sizes: Sequence[int], limits: Limits, longest: int) -> list[BatchShape]:
    """Likewise of a model that drafts: rounds of one token each, and what it has left out, at most `longest` tokens of
    each request, of which one has the next."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, longest - 1, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, min(num_tokens - 1, limits.max_num_seqs), longest, limits))
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _by_tokens(num_tokens: int, num_sampled: int, max_query_len: int, limits: Limits) -> BatchShape:
    """As many requests as there may be, and one that has the padding."""
    return BatchShape(min(num_tokens, limits.max_num_seqs) + 1, num_tokens, num_sampled, max_query_len)


def draft_sizes(sizes: Sequence[int], max_draft_tokens: int, max_num_tokens: int) -> tuple[int, ...]:
    """Tokens of the steps with drafts that are captured beside these sizes, rising, as far as so many requests can have
    them. max_draft_tokens: of a request. max_num_tokens: of a step."""
    if not sizes or not max_draft_tokens:
        return ()
    largest = max(sizes)
    most = min(largest * (1 + max_draft_tokens), max(largest, DEFAULT_MAX_SIZE), max_num_tokens)
    return tuple(size for size in _up_to(most) if size > 1)


def _up_to(maximum: int) -> tuple[int, ...]:
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)]
    return (*(size for size in steps if size < maximum), maximum)
