"""Keys: their file, its changes, limits, and the command that makes them."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire import cli
from pagewire.errors import StartupError
from pagewire.tools.keys import KeysAddConfig, add
from pagewire.wire.keys import Door
from pagewire.wire.keys.entry import parse_keys
from pagewire.wire.rpc import RpcError

HASH = "sha256:" + "ab" * 32


def new(path: Path, name: str, **settings: float) -> bytes:
    return add(path, KeysAddConfig(name=name, **settings)).encode()  # type: ignore[arg-type]


def test_a_key_that_is_made_opens_and_the_file_has_only_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = new(path, "a", weight=2.5, requests_per_minute=60, tokens_per_minute=900, max_running=3, admin=True)
    second = new(path, "b")
    assert path.stat().st_mode & 0o777 == 0o600
    assert first.decode() not in path.read_text() and second.decode() not in path.read_text()
    door = Door(key_file=str(path))
    key = door.find([b"", first])
    assert key is not None
    assert (key.name, key.weight, key.requests_per_minute, key.max_running) == ("a", 2.5, 60, 3)
    assert key.tokens_per_minute == 900 and key.admin
    found = door.find([second])
    assert found is not None and found.name == "b" and not found.admin
    assert door.find([first + b"x", first[:-1], b"a", b""]) is None


def test_the_one_key_is_taken_beside_those_of_the_file(tmp_path: Path) -> None:
    secret = new(tmp_path / "keys", "a")
    door = Door(["sésame", "other"], str(tmp_path / "keys"))
    found = [door.find([given]) for given in ("sésame".encode(), b"other", secret, "sésame,other".encode())]
    assert [key and key.name for key in found] == ["", "", "a", None]
    assert Door().is_open and not Door(["x"]).is_open and not door.is_open


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("a/b " + HASH, "not a name"),
        ("a", "second word"),
        ("a my-secret-key", "second word"),
        ("a sha256:abc", "second word"),
        (f"a {HASH} wieght=2", "weight, requests_per_minute, tokens_per_minute, max_running once"),
        (f"a {HASH} weight=0", "above 0"),
        (f"a {HASH} weight=nan", "above 0"),
        (f"a {HASH} max_running=2 max_running=3", "once"),
        (f"a {HASH} max_running=1.5", "not a whole number"),
        (f"a sha256:{'cd' * 32}\na {HASH}", "line 4: 'a'"),
        (f"b {HASH}\na {HASH}", "twice"),
    ],
)
def test_wrong_lines_are_named_and_not_quoted(line: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        parse_keys(f"# a comment\n\n{line}")
    assert "line " in str(caught.value) and "my-secret-key" not in str(caught.value)


def test_a_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--api-key-file .*keys: cannot be read: No such file"):
        Door(key_file=str(tmp_path / "keys"))
    (tmp_path / "keys").write_text("a")
    with pytest.raises(StartupError, match="line 1: the second word"):
        Door(key_file=str(tmp_path / "keys"))


def test_a_file_without_keys_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.touch()
    door = Door(key_file=str(path), check_interval=0)
    key = new(path, "a")
    assert door.find([key]) is not None
    path.write_text("")
    assert door.find([key]) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and all("every request is refused" in line for line in warnings)


def test_files_of_editors_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = new(path, "a")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    second = new(path, "b")
    door = Door(key_file=str(path))
    assert door.find([key]) is not None and door.find([second]) is not None


def test_changes_are_seen_and_a_wrong_or_missing_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    first = new(path, "a")
    door = Door(key_file=str(path), check_interval=0)
    second = new(path, "b")
    assert door.find([second]) is not None
    good = path.read_text()

    path.write_text(good + "nonsense\n")
    for _ in range(3):
        assert door.find([first]) is not None
    path.unlink()
    for _ in range(3):
        assert door.find([second]) is not None
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2 and "line 3" in errors[0] and "cannot be read" in errors[1]

    path.write_text(good.splitlines()[1] + "\n")  # the first key is revoked
    assert door.find([first]) is None and door.find([second]) is not None
    path.write_text("# nobody\n")
    assert door.find([second]) is None


def test_a_key_has_as_many_requests_a_minute_as_it_allows(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    secret, free = new(path, "a", requests_per_minute=2), new(path, "b")
    door = Door(key_file=str(path))
    key, other = door.find([secret]), door.find([free])
    assert key is not None and other is not None
    for _ in range(2):
        with door.admit(key):
            pass
    with pytest.raises(RpcError, match="a has sent 2 requests a minute") as refused, door.admit(key):
        pass
    assert refused.value.retry_delay is not None and 0 < refused.value.retry_delay <= 30
    with door.admit(other):
        pass


def test_a_key_has_as_many_requests_at_once_as_it_allows(tmp_path: Path) -> None:
    secret = new(tmp_path / "keys", "a", max_running=1)
    door = Door(key_file=str(tmp_path / "keys"))
    key = door.find([secret])
    assert key is not None
    with (
        door.admit(key),
        pytest.raises(RpcError, match="a has as many running requests as its key allows"),
        door.admit(key),
    ):
        pass
    with pytest.raises(ZeroDivisionError), door.admit(key):  # one that fails has ended, too
        _ = 1 / 0
    with door.admit(key):
        pass


def test_the_command_prints_the_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    command = [sys.executable, "-m", "pagewire", "keys", "add", str(path), "team", "--max-running=4"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = Door(key_file=str(path)).find([made.stdout.encode()])
    assert found is not None and (found.name, found.max_running) == ("team", 4)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 1 and "team already has a key" in again.stderr
    assert again.stdout == "" and len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("argv", [["keys"], ["keys", "remove"]])
def test_other_uses_of_the_command_are_reported(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2 and "keys add FILE NAME" in capsys.readouterr().err


def test_a_file_that_others_wrote_to_without_a_last_newline_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a {HASH}")
    path.chmod(0o640)
    new(path, "b")
    assert [key.name for key in parse_keys(path.read_text()).values()] == ["a", "b"]
    assert path.stat().st_mode & 0o777 == 0o640
