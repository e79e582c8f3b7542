"""The base of all parsers: a state machine that reads held text from its front."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from pagewire.services.tokenizer.output.reading import Parsed

# White space that may belong to a mark, in characters. A model may write endless white space, and held text is
# read again at every token.
MAX_SPACE = 255


class Reader(ABC):
    """A parser of one output.

    A state is a method that reads from the front of `_held`, adds to the result, and returns whether reading can
    continue. A state that needs more text to decide reads nothing and returns False; once `_ended`, no text follows.
    """

    # All of its marks. It sees them even if they are special tokens.
    marks: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._held = ""
        self._ended = False
        self._state = self._start

    def push(self, text: str, parsed: Parsed) -> None:
        """Adds to `parsed` the parts that are certain after this text."""
        self._held += text
        while self._state(parsed):
            pass

    def flush(self, parsed: Parsed) -> None:
        """Adds to `parsed` what was held back, as no text follows."""
        self._ended = True
        while self._state(parsed):
            pass

    @abstractmethod
    def _start(self, parsed: Parsed) -> bool:
        """The state at the beginning of the output."""

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _take_certain(self, marks: Iterable[str]) -> str:
        """Takes held text without a whole mark, except an end that may begin one, and white space before it."""
        if self._ended:
            return self._take(len(self._held))
        size = len(self._held) - max(len_of_beginning(self._held, mark) for mark in marks)
        return self._take(len(self._held[:size]) - len_of_space(self._held[:size]))


class ReasoningReader(Reader):
    """A parser that separates reasoning from the rest of an output, and counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons = False  # the next text belongs to the reasoning
        self.may_reason = True  # now or later
        self.num_tokens = 0  # of the reasoning, without those that end its marks

    @classmethod
    @abstractmethod
    def thinking_marks(cls) -> dict[str, str]:
        """Returns the marks by their names in `common_pb2.Thinking`."""

    def push_token(self, text: str, parsed: Parsed) -> None:
        """Pushes the text of one token, and counts it. States subtract tokens that turn out to be marks."""
        self.num_tokens += self.reasons
        self.push(text, parsed)


def len_of_space(text: str) -> int:
    """Returns the length of the white space at the end of `text` that may belong to a mark after it."""
    return (len(text) - len(text.rstrip())) % (MAX_SPACE + 1)


def len_of_beginning(text: str, mark: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `mark`, but not all of it."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start != -1 and not mark.startswith(text[start:]):
        start = text.find(mark[0], start + 1)
    return 0 if start == -1 else len(text) - start
