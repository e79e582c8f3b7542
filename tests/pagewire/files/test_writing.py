"""Disks that are full or read-only, as mounts where the tests may mount, and files in place of directories."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.cli import main
from pagewire.errors import StartupError
from pagewire.files.writing import check_writable

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}\n'


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("tests may not mount here")
    yield place
    subprocess.run(["umount", place], check=True)


def read_only(place: Path) -> Path:
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    return place


def full(place: Path) -> Path:
    try:
        (place / "fill").write_bytes(bytes(1 << 20))
    except OSError:
        return place
    raise AssertionError("it has room")


READ_ONLY = "cannot be written (Read-only file system): name one that can be written"
FULL = "cannot be written (No space left on device): free some space, or name one on another disk"


@pytest.mark.parametrize(("spoil", "said"), [(read_only, READ_ONLY), (full, FULL)])
def test_commands_say_so_before_they_begin(
    spoil, said: str, mounted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text(LINE)
    out = spoil(mounted) / "out"
    for argv in (
        ["batch", str(requests), str(out)],
        ["keys", "add", str(out), "bob"],
        ["quantize", "m", "--out", str(out)],
        ["tune", "--out", str(out)],
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert (ended.value.code, capsys.readouterr().err) == (1, f"pagewire: error: {out} {said}\n"), argv


def test_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"cannot be written \(Not a directory\): name one that can be written"):
        check_writable(tmp_path / "file" / "out")
    check_writable(tmp_path / "new" / "folder" / "out")
    check_writable(tmp_path / "file")
