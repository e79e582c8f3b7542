"""The values of a JSON text, counted before any of them is made: each takes a hundred bytes, and time; its faults."""

# The values of a body, such as the ids of a prompt; the objects among them, such as messages; the lists; the members of
# objects, such as the tokens of a bias. More would hold up an event loop, which makes all of them in one piece.
MAX_VALUES = 500_000
MAX_OBJECTS = 25_000
MAX_LISTS = 100_000
MAX_MEMBERS = 200_000
# Larger texts are counted: json.loads() takes some 3 ms for one of this size.
COUNTED_BYTES = 256 * 1024


class TooManyValues(ValueError):
    """A JSON text has more values than are read."""


def check_counts(text: bytes) -> None:
    """Raises TooManyValues for a JSON text in UTF-8 that has too many values. A text that is not JSON may pass."""
    if len(text) <= COUNTED_BYTES:
        return
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    _check(plain.count(b'"') // 2, MAX_VALUES + MAX_MEMBERS, "texts")
    outside = b"".join(plain.split(b'"')[::2])
    objects, lists = outside.count(b"{"), outside.count(b"[")
    _check(objects, MAX_OBJECTS, "objects")
    _check(lists, MAX_LISTS, "lists")
    _check(outside.count(b":"), MAX_MEMBERS, "members of objects")
    _check(objects + lists + outside.count(b","), MAX_VALUES, "values")


def json_fault(error: ValueError | RecursionError) -> str:
    """Returns what is wrong with a text for which json.loads() raised the error, without Python's own advice."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "an integer has too many digits" if type(error) is ValueError else str(error)


def _check(count: int, limit: int, things: str) -> None:
    if count > limit:
        raise TooManyValues(f"{count} {things}; at most {limit} are possible")
