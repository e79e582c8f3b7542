"""The directory of blocks: its bound, which executors share, and what they learn of each other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from pagewire.services.executor.tiers import block_files as module
from pagewire.services.executor.tiers.block_files import Damaged
from pagewire.services.executor.tiers.contents import Key
from pagewire.services.executor.tiers.directory import Directory

FORMAT, OTHER_FORMAT = "a" * 64, "b" * 64
SIZE = 936  # with the header, 1000 bytes


def key(number: int) -> Key:
    return number % 2, number.to_bytes(32, "big")


def contents(number: int) -> np.ndarray:
    return np.full(SIZE, number % 251, dtype=np.uint8)


def opened(path: Path, num_blocks: int = 100, kv_format: str = FORMAT) -> Directory:
    made = Directory(str(path), 1000 * num_blocks, [SIZE, SIZE])
    made.open(kv_format)
    return made


def write(directory: Directory, number: int, kv_format: str = FORMAT) -> None:
    block = contents(number)
    directory.write(kv_format, key(number), block, xxhash.xxh3_64_intdigest(block.data))


def holds(directory: Directory, number: int) -> bool:
    into = np.zeros(SIZE, dtype=np.uint8)
    try:
        directory.read(key(number), into)
    except FileNotFoundError:
        return False
    assert into.tobytes() == contents(number).tobytes()
    return True


def test_executors_see_what_others_write_and_delete(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert one.store_id() == other.store_id() and len(one.store_id()) == 32
    (tmp_path / FORMAT / "store").write_bytes(b"\xff")
    assert one.store_id() == other.store_id()
    for number in range(5):
        write(one, number)
    other.look()
    assert all(key(number) in other.contents for number in range(5)) and other.num_bytes == 5000
    other.forget(key(3))
    one.look()
    assert key(3) not in one.contents and not holds(one, 3) and one.num_bytes == 4000
    other.clear()
    one.look()
    assert len(one.contents) == 0 and one.num_bytes == 0 and other.num_bytes == 0


def test_what_is_no_file_is_no_block(tmp_path: Path) -> None:
    directory = opened(tmp_path, 3)
    write(directory, 0)
    block = next(tmp_path.rglob("*-0"))
    names = [block.with_name(f"{number:064x}-0") for number in range(1, 6)]
    names[0].symlink_to(names[0])
    names[1].symlink_to("/nowhere")
    names[2].mkdir()
    names[3].symlink_to(block)
    os.mkfifo(names[4])
    directory.look()
    assert key(0) in directory.contents and len(directory.contents) == 1 and directory.num_bytes == 1000
    for number in range(2, 8, 2):
        write(directory, number)
    assert directory.num_bytes <= 3000 and holds(directory, 6)


def test_a_pipe_in_the_place_of_a_block_does_not_stall_readers(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    write(directory, 0)
    path = next(tmp_path.rglob("*-0"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="seek"):
        directory.read(key(0), np.zeros(SIZE, dtype=np.uint8))


def test_a_directory_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    directory = opened(tmp_path / "kv", 10)
    for number in range(9):
        write(directory, number)
    shutil.rmtree(tmp_path / "kv")
    directory.look()
    assert len(directory.contents) == 0 and directory.num_bytes == 0
    write(directory, 20)
    assert holds(directory, 20)


def test_the_oldest_blocks_of_all_formats_make_room(tmp_path: Path) -> None:
    foreign, one, other = opened(tmp_path, kv_format=OTHER_FORMAT), opened(tmp_path, 10), opened(tmp_path, 10)
    write(foreign, 50, OTHER_FORMAT)
    for number in range(9):
        write(one if number % 2 else other, number)
    for age, path in enumerate(sorted(tmp_path.rglob("*-[01]"), key=lambda path: path.name)):
        os.utime(path, ns=(age * 10**9, age * 10**9))  # the foreign one is the last
    assert holds(one, 0), "that it is read makes it new"
    one.look()
    write(one, 9)
    write(one, 10)
    one.look()
    other.look()
    for directory in (one, other):
        assert directory.num_bytes <= 10_000
        assert key(0) in directory.contents and key(10) in directory.contents and key(1) not in directory.contents
    assert sum(path.stat().st_size for path in tmp_path.rglob("*-[01]")) == one.num_bytes == other.num_bytes


def test_a_block_that_is_forgotten_while_it_is_written_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(tmp_path)
    write_file = module._write

    def forgetting(*arguments: object) -> None:
        write_file(*arguments)  # type: ignore[arg-type]
        directory.forget(key(1))

    monkeypatch.setattr(module, "_write", forgetting)
    write(directory, 1)
    assert key(1) not in directory.contents and not holds(directory, 1) and directory.num_bytes == 0


def test_other_weights_have_a_folder_of_their_own(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    write(directory, 1)
    directory.open(OTHER_FORMAT)
    assert not holds(directory, 1) and directory.num_bytes == 1000
    write(directory, 2)  # begun before
    assert not holds(directory, 2)
    directory.open(FORMAT)
    assert holds(directory, 1) and holds(directory, 2)


def test_what_a_killed_writer_left_is_deleted(tmp_path: Path) -> None:
    opened(tmp_path)
    left = tmp_path / FORMAT / "new" / "left"
    left.write_bytes(b"x")
    opened(tmp_path)
    assert left.exists(), "its writer may be alive"
    os.utime(left, (0, 0))
    opened(tmp_path)
    assert not left.exists()


def test_files_of_others_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    (tmp_path / FORMAT / "00").mkdir(parents=True)
    (tmp_path / FORMAT / "00" / "notes.txt").write_text("keep")
    directory = opened(tmp_path, 2)
    for number in range(5):
        write(directory, number)
    assert len(list(tmp_path.rglob("notes.txt"))) == 2 and directory.num_bytes <= 2000


def test_a_damaged_file_is_deleted_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = opened(tmp_path)
    write(directory, 1)
    (path,) = tmp_path.rglob("*-1")
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def refusing(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "read only")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refusing)
        with pytest.raises(Damaged):
            directory.read(key(1), np.zeros(SIZE, dtype=np.uint8))
    with pytest.raises(Damaged):
        directory.read(key(1), np.zeros(SIZE, dtype=np.uint8))
    assert not holds(directory, 1)


def test_the_latest_reset_is_kept_for_all(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    assert directory.reset_at() == 0
    directory.keep_reset(7)
    directory.keep_reset(5)
    assert directory.reset_at() == opened(tmp_path).reset_at() == 7, "also after a restart, and for other executors"
    directory.open(OTHER_FORMAT)
    assert directory.reset_at() == 0, "blocks of other weights may be there from before"
    (tmp_path / OTHER_FORMAT / "reset").write_text("7x")
    assert directory.reset_at() == 0
