"""Plans of which lines make room for another one. They are computed from sizes, without a try and without I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

_GIB = 2**30


class Place(Enum):
    """The place of a line in memory."""

    ABSENT = auto()  # it has no processes
    LOADING = auto()
    READY = auto()
    ASLEEP = auto()  # its processes have no weights


@dataclass(frozen=True)
class Occupant:
    """A line, as a plan sees it.

    ready, asleep: bytes of its memory in these places. is_busy: requests run. used_at: when it was last used, by any
    clock. can_move: it makes room for others.
    """

    name: str
    place: Place
    ready: int
    asleep: int
    used_at: float = 0.0
    is_busy: bool = False
    can_move: bool = True

    @property
    def memory(self) -> int:
        """The bytes that it takes now."""
        if self.place is Place.ABSENT:
            return 0
        return self.asleep if self.place is Place.ASLEEP else self.ready


@dataclass(frozen=True)
class Step:
    """A step of a plan: a line falls asleep, or with `ends` its processes end."""

    name: str
    ends: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps before the wanted line may start.

    steps: in their order. waits_for: lines with requests that have to end before there is a plan with steps. refusal:
    why there will never be room; "": there may be.
    """

    steps: tuple[Step, ...] = ()
    waits_for: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Room:
    """The limits of all lines together. memory: bytes. count: of lines that are awake; None: any number. flag: names
    the limit of memory."""

    memory: int
    count: int | None = None
    flag: str = "--models-memory"

    def fits(self, lines: Iterable[Occupant]) -> bool:
        """Returns whether there is room for all of these."""
        memory = number = 0
        for line in lines:
            memory += line.memory
            number += line.place in (Place.READY, Place.LOADING)
        return memory <= self.memory and (self.count is None or number <= self.count)


def plan(lines: Sequence[Occupant], room: Room, wanted: str, *, drains: bool = False) -> Plan:
    """Returns the plan that makes a line ready.

    Lines that have not been used for longest fall asleep first, then end: no more of them than needed. Those with
    running requests stay; with `drains` they may fall asleep, too, which they do when these requests have ended.
    """
    after = {line.name: replace(line, place=Place.READY) if line.name == wanted else line for line in lines}
    movable = [line for line in lines if line.can_move and line.name != wanted and line.place in _MOVABLE]
    idle = [line for line in movable if not line.is_busy]
    if (steps := _steps(after, room, idle)) is not None:
        return Plan(steps)
    if drains and (steps := _steps(after, room, movable)) is not None:
        return Plan(steps)
    later = [line for line in lines if line.can_move and line.name != wanted]
    if room.fits(_with_steps(after, [Step(line.name, ends=True) for line in later])):
        blocking = (line for line in later if line.is_busy or line.place is Place.LOADING)
        return Plan(waits_for=tuple(line.name for line in blocking))
    return Plan(refusal=_refusal(list(after.values()), room, wanted))


def overtakes(lines: Sequence[Occupant], room: Room, first: str, other: str) -> bool:
    """Returns whether there is room for `other` now, and the plan for `first`, which waits, stays as it is."""
    with_other = [replace(line, place=Place.LOADING) if line.name == other else line for line in lines]
    found, found_with = (plan(some, room, first, drains=True) for some in (lines, with_other))
    return room.fits(with_other) and found_with == found


_MOVABLE = (Place.READY, Place.ASLEEP)


def _steps(after: dict[str, Occupant], room: Room, movable: Collection[Occupant]) -> tuple[Step, ...] | None:
    """Returns the steps after which there is room; None if these lines do not suffice."""
    # Requests that wait for a line which sleeps are not lost with its processes, but they come last. One that is busy
    # ends only after it fell asleep.
    order = sorted(movable, key=lambda line: (line.is_busy, line.used_at, line.name))
    sleeps = [Step(line.name) for line in order if line.place is Place.READY]
    ends = [Step(line.name, ends=True) for line in order]
    found: dict[str, Step] = {}
    for step in itertools.chain(sleeps, ends):
        if room.fits(_with_steps(after, found.values())):
            break
        found[step.name] = step
    if not room.fits(_with_steps(after, found.values())):
        return None
    return tuple(_only_needed(found, lambda steps: room.fits(_with_steps(after, steps)), order))


def _only_needed(
    found: dict[str, Step], fits: Callable[[Iterable[Step]], bool], order: Sequence[Occupant]
) -> Iterable[Step]:
    """Leaves out steps without which there is room, too, of lines that were used last first; a sleep is enough where an
    end is not needed."""
    for line in reversed(order):
        step = found.get(line.name)
        if step is None:
            continue
        without = {name: one for name, one in found.items() if name != line.name}
        if fits(without.values()):
            found = without
        elif (
            step.ends
            and line.place is Place.READY
            and fits((lesser := without | {line.name: Step(line.name)}).values())
        ):
            found = lesser
    return found.values()


def _with_steps(lines: dict[str, Occupant], steps: Iterable[Step]) -> Iterable[Occupant]:
    changed = dict(lines)
    for step in steps:
        changed[step.name] = replace(lines[step.name], place=Place.ABSENT if step.ends else Place.ASLEEP)
    return changed.values()


def _refusal(after: Sequence[Occupant], room: Room, wanted: str) -> str:
    """Returns why there will never be room, with numbers."""
    (line,) = (one for one in after if one.name == wanted)
    fixed = [one for one in after if not one.can_move and one.name != wanted and one.place is not Place.ABSENT]
    if room.count is not None and room.memory >= line.ready + sum(one.memory for one in fixed):
        return f"--max-loaded-models {room.count}: pinned models take all places: {', '.join(o.name for o in fixed)}"
    left = max(0, room.memory - sum(one.memory for one in fixed))
    pinned = f": pinned {', '.join(f'{one.name} {gib(one.memory)}' for one in fixed)}" if fixed else ""
    return (
        f"needs {gib(line.ready)}, but even with all other models asleep or ended only {gib(left)} of {room.flag} "
        f"{gib(room.memory)} is free{pinned}"
    )


def gib(size: int) -> str:
    """Returns a size in words, for instance "1.5 GiB"."""
    return f"{size / _GIB:.2f} GiB" if size < 10 * _GIB else f"{size / _GIB:.1f} GiB"
