"""The steps that are captured as CUDA graphs: by requests, or by tokens where there are prompts or drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagewire.errors import StartupError
from pagewire.kernels.ops import SHORT_QUERY
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.step.limits import Limits

# Larger steps keep the device busy for so long that launching kernels one by one costs nothing.
DEFAULT_MAX_SIZE = 512
# So many tokens of a model of 1B parameters take a GPU longer than Python takes to launch their kernels; a larger model
# takes longer still.
DEFAULT_MAX_PROMPT_TOKENS = 2048
# Tokens of a step with prompts, up to the second number in multiples of the first. Products compute 64 or 128 tokens at
# once, so that padding to these costs little.
_PROMPT_STEPS = ((8, 32), (16, 64), (32, 256), (64, 512), (128, None))


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
                f"--max-cudagraph-capture-size {max_size} contradicts --cudagraph-capture-sizes with a largest "
                f"size of {largest}; give one of the two flags"
            )
        return tuple(sorted(set(sizes)))
    return _up_to(largest or min(max_num_reqs, DEFAULT_MAX_SIZE))


def prompt_sizes(max_tokens: int | None, max_num_tokens: int) -> tuple[int, ...]:
    """Rising numbers of tokens of the steps with prompts that are captured.

    max_tokens: --max-cudagraph-prompt-tokens. max_num_tokens: of a step.
    """
    largest = min(DEFAULT_MAX_PROMPT_TOKENS if max_tokens is None else max_tokens, max_num_tokens)
    sizes, size = list[int](), 0
    while size < largest:
        size += next(step for step, end in _PROMPT_STEPS if end is None or size < end)
        sizes.append(min(size, largest))
    return tuple(size for size in sizes if size > 2)  # two tokens may be two decodes, which have graphs of their own


def graph_shapes(
    sizes: Sequence[int], limits: Limits, max_draft_tokens: int, prompts: Sequence[int] = ()
) -> list[BatchShape]:
    """Returns the shapes of captured steps, falling in tokens: of these numbers of requests, and with drafts; prompts:
    of these numbers of tokens."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, max_draft_tokens, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, num_tokens, 1 + max_draft_tokens, limits))
    shapes += _prompt_shapes(prompts, limits)
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _prompt_shapes(sizes: Sequence[int], limits: Limits) -> Iterator[BatchShape]:
    """Steps that may have decodes and chunks of prompts beside each other, and those of long queries alone, which need
    no kernel for short ones, for any sampled requests."""
    longest = min(limits.max_model_len - 1, limits.max_num_batched_tokens)
    for size in sizes:
        if size <= SHORT_QUERY or (limits.max_num_seqs > 1 and min(size - 1, longest) > SHORT_QUERY):
            yield _by_tokens(size, 0, size, limits)
        if min(size, longest) > SHORT_QUERY:
            num_reqs = min(size // (SHORT_QUERY + 1), limits.max_num_seqs) + 1
            yield BatchShape(num_reqs, size, 0, size, SHORT_QUERY + 1)


def drafter_shapes(sizes: Sequence[int], limits: Limits, longest: int, prompts: Sequence[int] = ()) -> list[BatchShape]:
    """Returns the same for a model that drafts: rounds of one token each, and steps over tokens that it has left out,
    at most `longest` of each request; prompts: steps with prompts of these numbers of tokens."""
    shapes = [BatchShape.uniform(size) for size in sizes]
    for num_tokens in draft_sizes(sizes, longest - 1, limits.max_num_batched_tokens):
        shapes.append(_by_tokens(num_tokens, min(num_tokens - 1, limits.max_num_seqs), longest, limits))
    shapes += _prompt_shapes([size for size in prompts if size > longest], limits)
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
