"""The directory of adapters: what is found there, when, and what became of it."""

from __future__ import annotations

import os
import time
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


def test_a_file_that_cannot_be_looked_at_keeps_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("x", "y", "new"):
        write(tmp_path / name)
    directory = Directory(str(tmp_path))
    directory.on_read("y", directory.stamp("y"), "digest")
    directory.look()
    write(tmp_path / "late")
    status, failing = module._status, {"x", "y", "late"}

    def failing_status(path: Path) -> os.stat_result | None:
        if failing & {*path.parts}:
            raise PermissionError(13, "Permission denied")
        return status(path)

    monkeypatch.setattr(module, "_status", failing_status)
    why = "it cannot be looked at (Permission denied); see to its permissions and the disk"
    for _ in range(2):
        assert found(directory) == {"late": ("", why), "new": ("", ""), "x": ("", ""), "y": ("digest", "")}
    assert caplog.messages == [
        f"--lora-dir {tmp_path}: {name!r}, which is as it was last seen: {why}" for name in ("late", "x", "y")
    ]
    directory.hide("y")
    assert list(found(directory)) == ["late", "new", "x"]
    failing.clear()
    assert found(directory) == {"late": ("", ""), "new": ("", ""), "x": ("", "")}
    failing.add("x")
    found(directory)
    assert len(caplog.messages) == 4, "it is logged again once it had passed"


def test_each_name_that_requests_cannot_use_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for index in range(30):
        write(tmp_path / f"no {index:02}")
    (tmp_path / "no adapter").mkdir()
    directory = Directory(str(tmp_path))
    for _ in range(4):
        assert not directory.look()
    assert caplog.messages == [
        f"--lora-dir {tmp_path}: requests cannot name 'no {index:02}'; use letters, digits and ._:+@-"
        for index in range(30)
    ]


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


def test_a_problem_that_may_pass_is_looked_into_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    for _ in range(2):
        directory.on_read("x", directory.stamp("x"), problem="stale handle", may_pass=True)
        assert found(directory) == {"x": ("", "stale handle")}
    with monkeypatch.context() as later:
        later.setattr(module.time, "monotonic", lambda: float("inf"))
        assert found(directory) == {"x": ("", "")}
    assert caplog.messages == ["the adapter x in --lora-dir cannot be served now: stale handle"]


def test_a_file_that_may_be_read_from_now_on_has_changed(tmp_path: Path) -> None:
    directory = Directory(str(tmp_path))
    write(tmp_path / "x")
    (tmp_path / "x" / "adapter_model.safetensors").chmod(0o000)
    directory.on_read("x", directory.stamp("x"), problem="cannot be read (Permission denied)")
    assert found(directory) == {"x": ("", "cannot be read (Permission denied)")}
    (tmp_path / "x" / "adapter_model.safetensors").chmod(0o644)
    assert found(directory) == {"x": ("", "")}


def test_a_look_tells_when_files_changed_and_not_what_their_times_were_set_to(tmp_path: Path) -> None:
    before = (time.time() - 1) * 1e9  # clocks of files are coarser
    write(tmp_path / "x")
    (tmp_path / "y.gguf").write_text("gguf")
    os.utime(tmp_path / "y.gguf", (LONG_AGO, LONG_AGO))
    changed = {one.name: one.changed_at for one in Directory(str(tmp_path)).look()}
    assert all(before < at <= time.time_ns() for at in changed.values()) and len(changed) == 2


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
