"""The request and the tokens of a program, found on the device: grids depend on no request's length.

Requests are cut into tiles of equal numbers of tokens, and all tiles are numbered. There are at most `most_tiles`; a
program beyond the last tile finds none.
"""

from __future__ import annotations

import triton
import triton.language as tl


def most_tiles(num_tokens: int, num_reqs: int, tile: int) -> int:
    """Returns a bound on the tiles of num_tokens tokens of num_reqs requests, each of which may have one that is not
    full."""
    return num_tokens // tile + min(num_reqs, num_tokens)


def requests_padded(num_reqs: int) -> int:
    """Returns REQS for num_reqs: few different values, because each is another compilation; at 128 a thread holds a
    request."""
    padded = 128
    while padded < num_reqs:
        padded *= 4
    return padded


@triton.jit
def find_tile(query_start_loc_ptr, num_reqs, TILE: tl.constexpr, REQS: tl.constexpr):
    """Returns (request, place of its tile's first token in the request) of program_id(0); request >= num_reqs: no tile.

    REQS: num_reqs or more, a power of two.
    """
    program = tl.program_id(0)
    requests = tl.arange(0, REQS)
    in_batch = requests < num_reqs
    start = tl.load(query_start_loc_ptr + requests, mask=in_batch, other=0)
    end = tl.load(query_start_loc_ptr + requests + 1, mask=in_batch, other=0)
    ends = tl.cumsum(tl.cdiv(end - start, TILE))
    request = tl.sum((ends <= program).to(tl.int32))
    return request, (program - tl.max(tl.where(ends <= program, ends, 0))) * TILE
