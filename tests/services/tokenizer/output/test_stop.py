import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.tokenizer.output.stop import StopChecker, StopHit
from tests.sweep import examples


def run(stops, pieces, *, include=False, unchecked=0) -> tuple[list[str], str | None]:
    """Returns the pieces of text, and the stop string that was found."""
    checker = StopChecker(stops, include_stop_str_in_output=include)
    returned = []
    for index, piece in enumerate(pieces):
        out = checker.push(piece, check=index >= unchecked)
        if isinstance(out, StopHit):
            return [*returned, out.text], out.stop_string
        returned.append(out)
    return [*returned, checker.flush()], None


@pytest.mark.parametrize("include", [False, True])
def test_across_token_borders(include) -> None:
    returned, stop = run(["END"], ["one E", "N", "D two"], include=include)
    assert stop == "END"
    assert returned == ["one ", "", "END" if include else ""]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    returned, stop = run(["</s>", "\n\n"], ["a<", "/", "b", "\n", "c", "</s"])
    assert stop is None
    assert returned == ["a", "", "</b", "", "\nc", "", "</s"]


def test_the_first_in_the_text_wins_then_the_first_listed() -> None:
    assert run(["b", "a"], ["xab"]) == (["x"], "a")
    assert run(["ab", "abc"], ["xabc"]) == (["x"], "ab")
    assert run(["abc", "ab"], ["xabc"]) == (["x"], "abc")
    # One that is complete wins over a longer one that has only begun.
    assert run(["abcd", "bc"], ["ab", "c", "d"]) == (["", "a"], "bc")


def test_overlapping_beginnings() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_text_before_min_tokens_does_not_stop() -> None:
    assert run(["stop"], ["stop", " go ", "stop"], unchecked=1) == (["stop", " go ", ""], "stop")
    # It began too early but ends late enough.
    assert run(["stop"], ["st", "op"], unchecked=1) == (["", ""], "stop")


alphabet = st.text("ab.", max_size=4)


@given(
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(alphabet, max_size=12),
    include=st.booleans(),
)
@settings(max_examples=examples(500), deadline=None)
def test_returned_text_is_the_text_up_to_the_first_stop_string(stops, pieces, include) -> None:
    returned, stop = run(stops, pieces, include=include)
    text = "".join(pieces)
    ends = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
    expected, expected_stop = text, None
    for end in ends:
        found = [(text[:end].find(s), stops.index(s)) for s in stops if s in text[:end]]
        if found:
            start, index = min(found)
            expected_stop = stops[index]
            expected = text[: start + len(expected_stop) * include]
            break
    assert ("".join(returned), stop) == (expected, expected_stop)
    # Nothing is held back beyond what may still become a stop string.
    longest = max((len(s) for s in stops), default=1)
    shown = 0
    for piece_end, out in zip(ends, returned[:-1], strict=False):
        shown += len(out)
        if stop is None:
            assert piece_end - shown < longest


@given(stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), text=st.text("abc", max_size=20))
def test_held_back_text_always_begins_a_stop_string(stops, text) -> None:
    checker = StopChecker(stops)
    shown = ""
    for char in text:
        out = checker.push(char)
        if isinstance(out, StopHit):
            return
        shown += out
        seen = text[: len(shown)] + checker._held
        assert text.startswith(seen)
        assert not checker._held or any(s.startswith(checker._held) for s in stops)
