"""The directory of adapters: what is found there, when, and what became of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagewire.services.executor.adapters import directory as module
from pagewire.services.executor.adapters.directory import Directory

LONG_AGO = 1_000_000_000


def write(path: Path, tensors: str = "tensors", modified: int | None = LONG_AGO) -> None:
    """Writes an adapter. modified: when, in seconds; None: now."""
    path.mkdir(exist_ok=True)
    for name, text in (("adapter_config.json", "{}"), ("adapter_model.safetensors", tensors)):
        (path / name).write_text(text)
        if modified is not None:
            os.utime(path / name, (modified, modified))


def found(directory: Directory) -> dict[str, tuple[str, str]]:
    """Returns digest and problem of what is found, by name."""
    return {one.name: (one.digest, one.problem) for one in directory.look()}


def test_adapters_are_found_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "x")
    (tmp_path / "y.gguf").write_text("gguf")
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("")
    (tmp_path / "linked").symlink_to(tmp_path / "x")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "adapter_config.json")
    for name in ("two words", "äöü", "-x", "a\nb", "x" * 255):
        write(tmp_path / name)
    os.utime(tmp_path / "y.gguf", (LONG_AGO, LONG_AGO))
    assert list(found(Directory(str(tmp_path)))) == ["linked", "x", "x" * 255, "y.gguf"]


def test_a_directory_that_cannot_be_read_keeps_its_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, away = tmp_path / "adapters", tmp_path / "away"
    path.mkdir()
    write(path / "x")
    directory = Directory(str(path))
    assert list(found(directory)) == ["x"]
    path.rename(away)
    assert [*found(directory), *found(directory)] == ["x", "x"]
    assert len(caplog.messages) == 1 and "No such file or directory" in caplog.messages[0]
    away.rename(path)
    (path / "x").rename(tmp_path / "x")
    assert found(directory) == {}


def test_an_adapter_that_is_being_written_is_found_once_it_is_complete(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x", "part", modified=None)
    assert found(directory) == {}
    write(tmp_path / "x", "part and part", modified=None)
    assert found(directory) == {}
    assert found(directory) == {"x": ("", "")}


def test_contents_that_change_lose_their_digest(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    directory.on_read("x", directory.stamp("x"), "digest")
    assert found(directory) == {"x": ("digest", "")}
    write(tmp_path / "x", "others", modified=None)
    assert found(directory) == {"x": ("digest", "")}  # they are still being written
    assert found(directory) == {"x": ("", "")}


def test_contents_that_change_while_they_are_read_are_read_again(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    before = directory.stamp("x")
    write(tmp_path / "x", "others", modified=LONG_AGO + 1)
    directory.on_read("x", before, "mixed")
    assert found(directory) == {"x": ("", "")}


def test_a_problem_lasts_until_the_files_change(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    directory.on_read("x", directory.stamp("x"), problem="damaged")
    assert found(directory) == found(directory) == {"x": ("", "damaged")}
    write(tmp_path / "x", "mended", modified=LONG_AGO + 1)
    assert found(directory) == {"x": ("", "")}


@pytest.mark.parametrize("is_read", [False, True])
def test_what_was_taken_away_is_found_again_once_its_files_change(tmp_path: Path, is_read: bool) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    if is_read:
        directory.on_read("x", directory.stamp("x"), "digest")
    else:
        directory.look()
    directory.hide("x")
    assert found(directory) == found(directory) == {}
    write(tmp_path / "x", "others", modified=LONG_AGO + 1)
    assert found(directory) == {"x": ("", "")}
    directory.hide("x")
    assert found(directory) == {}
    directory.show("x")
    assert found(directory) == {"x": ("", "")}


def test_a_name_that_is_used_again_is_read_again(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    directory.on_read("x", directory.stamp("x"), "digest")
    (tmp_path / "x").rename(tmp_path / "old")
    assert list(found(directory)) == ["old"]
    write(tmp_path / "x")
    assert found(directory)["x"] == ("", "")


def test_a_large_directory_is_looked_at_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    for index in range(5):
        write(tmp_path / str(index))
    directory = Directory(str(tmp_path))
    assert len(found(directory)) == 3 == len(found(directory))
    assert [record.getMessage() for record in caplog.records] == [
        f"--lora-dir {tmp_path} has too many entries: some are not found; move some elsewhere"
    ]


def test_other_files_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    for index in range(20):
        (tmp_path / f"{index}.txt").touch()
    for index in range(3):
        write(tmp_path / f"x{index}")
    assert len(found(Directory(str(tmp_path)))) == 3


def test_a_directory_that_is_missing_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory(str(tmp_path / "nothing"))
    assert found(directory) == found(directory) == {}
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text
    write(tmp_path / "nothing")
    (tmp_path / "nothing" / "x").mkdir()
    write(tmp_path / "nothing" / "x")
    assert list(found(directory)) == ["x"]
