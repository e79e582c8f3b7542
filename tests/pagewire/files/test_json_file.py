"""The JSON files of a model, which anything may be in."""

from pathlib import Path

import pytest

from pagewire.files.json_file import read_json_object


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read as JSON"),
    ],
)
def test_what_is_wrong_is_named_with_the_file_and_the_remedy(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}.*; download it again"):
        read_json_object(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read as JSON"):
        read_json_object(tmp_path / "absent.json")
