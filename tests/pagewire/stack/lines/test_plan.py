"""Plans of memory, as functions of sizes: properties that hold for all of them, and the order of a few."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pagewire.stack.lines.plan import Occupant, Place, Plan, Room, Step, plan

SIZES = st.integers(0, 20)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[Occupant], Room, str]:
    """Draws lines, a room and the wanted line, which is absent or asleep."""
    lines = []
    for number in range(draw(st.integers(1, 6))):
        ready = draw(SIZES)
        place = draw(st.sampled_from((Place.ABSENT, Place.ASLEEP) if number == 0 else tuple(Place)))
        lines.append(
            Occupant(
                f"m{number}",
                place,
                ready,
                draw(st.integers(0, ready)),
                used_at=draw(st.integers(0, 3)),
                is_busy=place is Place.READY and draw(st.booleans()),
                can_move=draw(st.booleans()),
            )
        )
    return lines, Room(draw(st.integers(0, 60)), draw(st.none() | st.integers(1, 4))), "m0"


def after(lines: list[Occupant], steps: tuple[Step, ...], wanted: str) -> list[Occupant]:
    by_name = {line.name: line for line in lines}
    for step in steps:
        by_name[step.name] = replace(by_name[step.name], place=Place.ABSENT if step.ends else Place.ASLEEP)
    by_name[wanted] = replace(by_name[wanted], place=Place.READY)
    return list(by_name.values())


@given(stacks(), st.booleans())
def test_a_plan_makes_room_with_no_more_than_it_needs(stack: tuple[list[Occupant], Room, str], drains: bool) -> None:
    lines, room, wanted = stack
    found = plan(lines, room, wanted, drains=drains)
    assert (bool(found.refusal) + bool(found.waits_for) + bool(found.steps)) <= 1
    if found.refusal or found.waits_for:
        return
    assert room.fits(after(lines, found.steps, wanted))
    moved = [next(line for line in lines if line.name == step.name) for step in found.steps]
    assert len({line.name for line in moved}) == len(moved)
    assert all(line.can_move and line.name != wanted for line in moved)
    assert all(line.place in (Place.READY, Place.ASLEEP) and (drains or not line.is_busy) for line in moved)
    for step in found.steps:
        rest = tuple(other for other in found.steps if other != step)
        assert not room.fits(after(lines, rest, wanted)), "a step that is not needed"
        if step.ends and next(line for line in moved if line.name == step.name).place is Place.READY:
            assert not room.fits(after(lines, (*rest, Step(step.name)), wanted)), "to sleep would have been enough"


@given(stacks(), st.booleans())
def test_a_refusal_is_final_and_a_wait_ends(stack: tuple[list[Occupant], Room, str], drains: bool) -> None:
    lines, room, wanted = stack
    found = plan(lines, room, wanted, drains=drains)
    everything = tuple(Step(line.name, ends=True) for line in lines if line.can_move and line.name != wanted)
    assert bool(found.refusal) == (not room.fits(after(lines, everything, wanted)))
    waited_for = [line for line in lines if line.name in found.waits_for]
    assert all(line.is_busy or line.place is Place.LOADING for line in waited_for)
    if drains:
        assert not found.waits_for or any(line.place is Place.LOADING for line in waited_for)
    if found.waits_for:  # once they are ready and idle, there is a plan
        later = [replace(one, is_busy=False, place=Place.READY) if one in waited_for else one for one in lines]
        assert not plan(later, room, wanted).waits_for and not plan(later, room, wanted).refusal


def test_who_was_used_last_stays_and_sleep_comes_before_the_end() -> None:
    old, new = Occupant("old", Place.READY, 4, 1, used_at=1), Occupant("new", Place.READY, 4, 1, used_at=2)
    wanted = Occupant("wanted", Place.ABSENT, 4, 1)
    lines = [new, old, wanted]
    assert plan(lines, Room(12), "wanted") == Plan()
    assert plan(lines, Room(9), "wanted") == Plan((Step("old"),))
    assert plan(lines, Room(8), "wanted") == Plan((Step("old"), Step("new"))), "both sleep before one ends"
    assert plan(lines, Room(5), "wanted") == Plan((Step("old", ends=True), Step("new")))
    assert plan(lines, Room(4), "wanted") == Plan((Step("old", ends=True), Step("new", ends=True)))
    assert plan(lines, Room(12, count=2), "wanted") == Plan((Step("old"),))


def test_a_refusal_says_what_is_in_the_way() -> None:
    pinned = Occupant("A", Place.READY, 800 * 2**20, 2**20, can_move=False)
    wanted = Occupant("B", Place.ABSENT, 5 * 2**30, 2**20)
    assert plan([pinned, wanted], Room(4 * 2**30), "B").refusal == (
        "needs 5.00 GiB, but even with all other models asleep or ended only 3.22 GiB of --models-memory 4.00 GiB is "
        "free: pinned A 0.78 GiB"
    )
    assert "--max-loaded-models 1" in plan([pinned, wanted], Room(9 * 2**30, count=1), "B").refusal
