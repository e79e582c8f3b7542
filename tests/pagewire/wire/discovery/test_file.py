from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.stack.ray_executors.addresses import AddressFile
from pagewire.wire.discovery import Listed, discover
from pagewire.wire.discovery.file import AddressesInFile


async def test_the_list_is_that_of_the_file_whenever_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "executors.txt"
    lists = AddressesInFile(path, interval=0.001).lists()
    assert await anext(lists) == [], "a file that is not there yet"
    path.write_text("# here\nunix:/a.sock\n\n10.0.0.1:50053 executor-1  # another\nunix:/a.sock\n")
    assert await anext(lists) == [Listed("unix:/a.sock"), Listed("10.0.0.1:50053", "executor-1")]
    path.write_text("unix:/a.sock\n")
    assert await anext(lists) == [Listed("unix:/a.sock")]
    path.unlink()
    assert await anext(lists) == []


async def test_a_file_that_cannot_be_read_is_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "executors.txt"
    path.write_text("unix:/a.sock\n")
    source = AddressesInFile(path, interval=0.001)
    lists = source.lists()
    assert await anext(lists) == [Listed("unix:/a.sock")]
    path.write_bytes(b"\xff\xfe")
    assert source._read() is None and source._read() is None
    assert len(caplog.records) == 1 and str(path) in caplog.text
    path.write_text("unix:/b.sock\n")
    assert await anext(lists) == [Listed("unix:/b.sock")]


async def test_writer_and_reader_agree(tmp_path: Path) -> None:
    path = tmp_path / "executors.txt"
    path.write_text("left:1\n")
    file = AddressFile(path)
    lists = AddressesInFile(path, interval=0.001).lists()
    assert await anext(lists) == [], "those of an earlier process are gone"
    file.put("executor-0", "unix:/a.sock")
    assert await anext(lists) == [Listed("unix:/a.sock")]
    file.put("executor-1", "10.0.0.1:50053")
    assert await anext(lists) == [Listed("unix:/a.sock"), Listed("10.0.0.1:50053")]
    file.remove("executor-0")
    assert await anext(lists) == [Listed("10.0.0.1:50053")]


def test_one_file_is_named() -> None:
    with pytest.raises(StartupError, match="use one file"):
        discover("file", "--executor-address", "a.txt,b.txt")
