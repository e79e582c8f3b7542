"""Outputs that wait are merged, few or many, and their size is known."""

from collections.abc import Sequence

import pytest

from pagewire.wire.streams import Outbox
from pagewire.wire.streams.outbox import MAX_PARTS


def joined(outputs: Sequence[str]) -> str:
    return "".join(outputs)


@pytest.mark.parametrize("count", [1, 2, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS + 2, 3 * MAX_PARTS])
async def test_what_waits_is_taken_as_one(count: int) -> None:
    outbox = Outbox[int, str](joined, len)
    outputs = [str(index) for index in range(count)]
    sizes = [outbox.put(7, output) for output in outputs]
    assert sizes == [len(joined(outputs[1:end])) for end in range(1, count + 1)]
    assert outbox.put(8, "x") == 0
    assert outbox.num_unread == sizes[-1]
    assert list((await outbox.take()).items()) == [(7, joined(outputs)), (8, "x")]
    assert outbox.num_unread == 0 and outbox.put(7, "y") == 0


async def test_a_discarded_key_leaves_nothing() -> None:
    outbox = Outbox[int, str](joined, len)
    for key in (1, 2, 1, 1):
        outbox.put(key, str(key))
    outbox.discard(1)
    assert outbox.put(1, "error") == 0
    outbox.close()
    assert [taken async for taken in outbox] == [{2: "2", 1: "error"}]
