"""Orders of steps, saves and loads: in any of them, whatever can be found is what its hash says, and a load fills its
blocks with that or reports them missing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.tiers import saves
from pagewire.services.executor.tiers import tiers as module
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.copies import HostCopies
from pagewire.services.executor.tiers.directory import Directory
from pagewire.services.executor.tiers.disk import DiskTier
from pagewire.services.executor.tiers.host import HostBlocks, Slot
from pagewire.services.executor.tiers.loads import Load, Loaded
from pagewire.services.executor.tiers.shared import Memory, OtherMemory
from pagewire.services.executor.tiers.tiers import Tiers

NUM_BLOCKS, BLOCK_BYTES, NUM_SLOTS = 6, 64, 3

BLOCK = st.integers(0, NUM_BLOCKS - 1)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), BLOCK, st.integers(0, 9)),
        st.tuples(st.just("save"), BLOCK, st.none()),
        st.tuples(st.just("load"), BLOCK, st.integers(0, 9)),
        st.tuples(st.just("cancel"), BLOCK, st.none()),
    ),
    max_size=40,
)


def contents(number: int) -> np.ndarray:
    return np.frombuffer(hashlib.sha512(b"%d" % number).digest(), dtype=np.uint8)


def key(number: int) -> Key:
    return 0, hashlib.sha256(contents(number).tobytes()).digest()


class SlowCopies(HostCopies):
    """Copies in two halves, so that what is overwritten meanwhile shows."""

    def save(self, group: int, block: int, target: np.ndarray, after: object) -> None:
        half = BLOCK_BYTES // 2
        target[:half] = self._blocks[group][block][:half]
        threading.Event().wait(0.0002)
        target[half:] = self._blocks[group][block][half:]


@pytest.fixture(scope="module")
def cache() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, 1, BLOCK_BYTES, dtype=torch.uint8)


@pytest.fixture(scope="module")
def tiers(cache: torch.Tensor) -> Iterator[Tiers]:
    host = HostBlocks(Memory([NUM_SLOTS], [BLOCK_BYTES]), is_tier=True)
    made = Tiers(SlowCopies([cache]), host, None, [BLOCK_BYTES])
    made.open("0" * 64)
    yield made
    made.close()


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_no_order_mixes_blocks(actions: list[tuple[str, int, int | None]], tiers: Tiers, cache: torch.Tensor) -> None:
    held: list[int | None] = [None] * NUM_BLOCKS  # what the scheduler knows of each block
    loading: dict[int, tuple[threading.Event, list[Loaded], int]] = {}

    def end(block: int) -> None:
        if block in loading:
            ended, reports, number = loading.pop(block)
            assert ended.wait(10)
            held[block] = None if reports[0].missing else number
            if not reports[0].missing:
                assert cache[block].numpy().tobytes() == contents(number).tobytes()

    for action, block, number in actions:
        if action == "cancel":
            tiers.loads.cancel()
            for other in loading:
                held[other] = None
            loading.clear()
            continue
        end(block)
        if action == "write" and number is not None:
            tiers.saves.release([(0, block)])
            cache[block].numpy()[:] = contents(number)
            held[block] = number
        elif action == "save" and (known := held[block]) is not None:
            tiers.save([(key(known), block)])
        elif action == "load" and number is not None:
            tiers.saves.release([(0, block)])
            ended, reports = threading.Event(), list[Loaded]()

            def report(loaded: Loaded, ended: threading.Event = ended, reports: list[Loaded] = reports) -> None:
                reports.append(loaded)
                ended.set()

            tiers.load(Load(1, [(key(number), block)], report))
            loading[block] = ended, reports, number
    for block in list(loading):
        end(block)
    tiers.saves.wait(None, 10)
    reader = OtherMemory(tiers.host.name)
    places = reader.places(map(key, range(10)))
    for number in range(10):
        into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        if (slot := tiers.host.find(key(number))) is not None:
            assert slot.contents.tobytes() == contents(number).tobytes()
            found = reader.copy(key(number), places[key(number)], into)
            assert found == slot.checksum and into.tobytes() == contents(number).tobytes()
            tiers.host.release(slot)
        else:
            assert key(number) not in places
            assert all(reader.copy(key(number), place, into) is None for place in places.values())
    assert len(tiers.host.contents) <= NUM_SLOTS


class Gate:
    """Lets one call begin, and waits with it."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(20)


class GatedCopies(HostCopies):
    """Copies that are done when the gate opens."""

    def __init__(self, cache: torch.Tensor, gate: Gate) -> None:
        super().__init__([cache])
        self._gate = gate

    def wait(self, until: object) -> None:
        self._gate.pass_through()


class HungCopies(HostCopies):
    """Copies of which one hangs until the gate opens, and one fails."""

    def __init__(self, cache: torch.Tensor, gate: Gate, fails: int) -> None:
        """fails: the number of a block."""
        super().__init__([cache])
        self._gate, self._fails = gate, fails

    def save(self, group: int, block: int, target: np.ndarray, after: object) -> None:
        if block == self._fails:
            raise RuntimeError("the device has lost it")
        if not self._gate.may_end.is_set():
            self._gate.pass_through()
        super().save(group, block, target, after)


def test_a_copy_that_hangs_or_fails_holds_up_nothing(cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrites a block during its copy; later ones are saved as ever."""
    monkeypatch.setattr(saves, "_STARTING_S", 0.01)
    gate = Gate()
    host = HostBlocks(Memory([NUM_SLOTS], [BLOCK_BYTES]), is_tier=True)
    tiers = Tiers(HungCopies(cache, gate, fails=1), host, None, [BLOCK_BYTES])
    tiers.open("0" * 64)
    cache[0].numpy()[:] = contents(1)
    tiers.save([(key(1), 0), (key(2), 1)])
    assert gate.has_begun.wait(20)
    tiers.saves.release([(0, 0)])
    cache[0].numpy()[:] = contents(3)
    tiers.save([(key(3), 0)])
    gate.may_end.set()
    tiers.saves.wait(None, 20)
    assert [number for number in (1, 2, 3) if key(number) in host.contents] == [3]
    slots = [host.acquire(0) for _ in range(NUM_SLOTS)]
    assert all(slots), "no memory is lost"
    tiers.close()


def test_a_model_that_falls_asleep_leaves_out_a_copy_that_hangs(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAVING_S", 0.01)
    gate = Gate()
    host = HostBlocks(Memory([NUM_SLOTS], [BLOCK_BYTES]), is_tier=True)
    tiers = Tiers(HungCopies(cache, gate, fails=-1), host, None, [BLOCK_BYTES])
    tiers.open("0" * 64)
    tiers.save([(key(1), 0), (key(2), 1)])
    assert gate.has_begun.wait(20)
    tiers.rest()
    tiers.copies.bind([cache])
    gate.may_end.set()
    tiers.saves.wait(None, 20)
    assert key(1) not in host.contents and key(2) not in host.contents
    tiers.save([(key(1), 0)])
    tiers.saves.wait(None, 20)
    assert key(1) in host.contents
    tiers.close()


class GatedDirectory(Directory):
    """Holds back writes to the directory until the gate opens."""

    gate: Gate

    def write(self, kv_format: str, key: Key, contents: np.ndarray, checksum: int) -> int:
        self.gate.pass_through()
        return super().write(kv_format, key, contents, checksum)


@pytest.mark.parametrize("all_blocks", [False, True])
def test_a_block_that_is_forgotten_while_it_is_copied_is_not_found(all_blocks: bool, cache: torch.Tensor) -> None:
    gate = Gate()
    host = HostBlocks(Memory([NUM_SLOTS], [BLOCK_BYTES]), is_tier=True)
    tiers = Tiers(GatedCopies(cache, gate), host, None, [BLOCK_BYTES])
    tiers.open("0" * 64)
    tiers.save([(key(1), 0)])
    assert gate.has_begun.wait(20)
    tiers.saves.release([(0, 0)])  # a step overwrites it
    tiers.forget([] if all_blocks else [key(1)])
    gate.may_end.set()
    tiers.saves.wait(None, 20)
    assert key(1) not in host.contents
    tiers.save([(key(1), 0)])
    tiers.saves.wait(None, 20)
    assert key(1) in host.contents, "later ones are saved"
    tiers.close()


@pytest.mark.parametrize("all_blocks", [False, True])
def test_a_block_that_is_forgotten_while_it_is_written_is_not_found(
    all_blocks: bool, cache: torch.Tensor, tmp_path: Path
) -> None:
    host = HostBlocks(Memory([NUM_SLOTS], [BLOCK_BYTES]), is_tier=False)
    directory = GatedDirectory(str(tmp_path), 1 << 20, [BLOCK_BYTES])
    directory.gate = Gate()
    disk = DiskTier(directory, host, max_queued=1 << 20)
    tiers = Tiers(HostCopies([cache]), host, disk, [BLOCK_BYTES])
    tiers.open("0" * 64)
    tiers.save([(key(1), 0)])
    assert directory.gate.has_begun.wait(20)
    tiers.forget([] if all_blocks else [key(1)])
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    assert disk.read(key(1), into) is None
    directory.gate.may_end.set()
    tiers.close()
    assert not list(tmp_path.rglob("*-0")) and key(1) not in directory.contents


def test_memory_is_waited_for_as_long_as_is_said() -> None:
    """Releases memory meanwhile that is of another group."""
    host = HostBlocks(Memory([1, 1], [BLOCK_BYTES, BLOCK_BYTES]), is_tier=False)
    first, other = host.acquire(0), host.acquire(1)
    assert first is not None and other is not None
    found: list[Slot | None] = []

    def wait() -> None:
        found.append(host.acquire(0, 20))

    waiting = threading.Thread(target=wait)
    waiting.start()
    for _ in range(100):
        host.release(other)
        other = host.acquire(1)
        assert other is not None
    assert not found
    host.release(first)
    waiting.join(20)
    assert found == [first]
