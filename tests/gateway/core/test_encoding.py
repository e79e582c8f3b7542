"""JSON as clients read it, line by line."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pagewire.gateway.core import encoding


@given(st.text() | st.lists(st.sampled_from("a\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\r\n")).map("".join))
def test_what_is_encoded_is_one_line_however_lines_are_split(text: str) -> None:
    encoded = encoding.encode({"text": text}).decode()
    assert encoded.splitlines() == [encoded]
    assert json.loads(encoded) == {"text": text}
