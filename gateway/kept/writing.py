"""Generating into a log: a generation continues after its last entry, and each of its outputs becomes an entry."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.kept.entries import by_choice, encode_entry
from pagewire.gateway.store import Lease, Leases
from pagewire.v1.inference_pb2 import GenerateResponse


class Source(Protocol):
    """The outputs of one generation; mostly a `Reply`."""

    choices: list[PendingChoice]

    @property
    def has_ended(self) -> bool:
        """No output comes after those that were taken."""

    async def next(self) -> ChoiceOutputs:
        """Raises RpcError or ApiError."""

    def abort(self) -> None: ...


# Starts the generation after these outputs of each choice. Raises RpcError.
Start = Callable[[Sequence[Sequence[GenerateResponse]]], Source]


async def written(
    leases: Leases,
    lease: Lease,
    values: Sequence[bytes],
    start: Start,
    *,
    num_choices: int,
    pace_s: float,
    ends_job: bool,
) -> AsyncGenerator[bytes, None]:
    """Continues a generation to its end, and yields each entry once it is in the log.

    values: the entries that are already in the log.
    pace_s: the least time between two entries; outputs that arrive meanwhile are one entry.
    ends_job: whether the job ends with the last entry.

    Raises LeaseLost, RpcError or ApiError.
    """
    earlier, number = by_choice(values, num_choices), len(values)
    with_prompt = {index for index, outputs in enumerate(earlier) if outputs}
    reply = start(earlier)
    try:
        while outputs := await reply.next():
            value, is_last = encode_entry(reply.choices, outputs, with_prompt), reply.has_ended
            await leases.append(lease, number, value, is_last=is_last and ends_job)
            number += 1
            yield value
            if pace_s and not is_last:
                await asyncio.sleep(pace_s)
    finally:
        reply.abort()
