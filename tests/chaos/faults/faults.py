"""Does to a line what a schedule says, and mends it."""

from __future__ import annotations

import asyncio
import signal

from tests.chaos.faults.chaos_line import ChaosLine
from tests.chaos.faults.schedule import Fault

STUTTER_S = 0.02
# Of every piece that passes a slow way.
DELAY_S = 0.03


async def inflict(line: ChaosLine, fault: Fault) -> None:
    """Returns when it is mended."""
    if fault.kind == "disk":
        await line.fill_disk(True)
        await asyncio.sleep(fault.seconds)
        await line.fill_disk(False)
        return
    await asyncio.gather(*(_inflict_on(line, fault, target) for target in fault.targets))


async def _inflict_on(line: ChaosLine, fault: Fault, target: str) -> None:
    match fault.kind:
        case "kill" | "restart":
            await line.end(target, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
            await asyncio.sleep(fault.seconds)
            await line.start(target)
        case "stop" | "hang":
            pid = line.pids.get(target)
            line.signal(target, signal.SIGSTOP, pid)
            await asyncio.sleep(fault.seconds)
            if fault.kind == "hang":
                await line.end(target, signal.SIGKILL)
            line.signal(target, signal.SIGCONT, pid)
            await line.start(target)
        case "stutter":
            await _stutter(line, target, fault.seconds)
        case _:
            await _spoil_way(line, fault, target)


async def _stutter(line: ChaosLine, target: str, seconds: float) -> None:
    pid = line.pids.get(target)
    for _ in range(round(seconds / (2 * STUTTER_S))):
        line.signal(target, signal.SIGSTOP, pid)
        await asyncio.sleep(STUTTER_S)
        line.signal(target, signal.SIGCONT, pid)
        await asyncio.sleep(STUTTER_S)


async def _spoil_way(line: ChaosLine, fault: Fault, target: str) -> None:
    proxy = line.proxies[target]
    match fault.kind:
        case "cut":
            proxy.cut()
            return
        case "refuse":
            proxy.refuse()
        case "partition":
            proxy.block(fault.direction)
        case "slow":
            proxy.slow(DELAY_S)
        case _:
            raise ValueError(f"no such fault: {fault.kind}")
    await asyncio.sleep(fault.seconds)
    proxy.mend()
