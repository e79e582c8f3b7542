"""The base of parsers of tool calls: text up to a mark, then calls with arguments that are returned as they arrive.

A call opens once its name is known and the object of its arguments begins. Until then it may still become text. From
then on its arguments are what the model writes, up to the brace that ends them, repaired where they are nearly JSON.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.shared.formats import (
    CallableTool,
    Format,
    FormatError,
    amid_text,
    listed,
    one_of,
)
from pagewire.services.tokenizer.parsers.shared.json_repair import JsonRepair
from pagewire.services.tokenizer.parsers.shared.nesting import ObjectEnd
from pagewire.services.tokenizer.parsers.shared.reader import MAX_SPACE, Reader, len_of_space
from pagewire.v1.inference_pb2 import ToolCallDelta

# Characters from a call's mark to its arguments; a longer header is text.
MAX_HEADER = 512

# The pattern of a function's name.
NAME = r"""[^\s{}\[\]<>|｜"'`]{1,128}"""


class ToolCallReader(Reader):
    """A parser of tool calls. Subclasses have a state `_call` for the text after one of their opening marks."""

    # Marks that begin a call, or a list of calls.
    opening: ClassVar[tuple[str, ...]]
    # What begins a call, too, if an opening mark is missing: the call's own first mark.
    bare_opening: ClassVar[str] = ""
    # Marks that may follow a call, in this order; each is optional.
    closing: ClassVar[tuple[str, ...]] = ()
    # Whether it needs the schemas of the tools' arguments.
    reads_schemas: ClassVar[bool] = False
    # Text that models write between two calls.
    between: ClassVar[str] = ""
    # Whether calls are an output's reason to end. As in OpenAI's API, they are not if a call was required.
    is_reason_to_end: ClassVar[bool] = True
    # Whether `output_format` describes the reasoning too.
    format_has_reasoning: ClassVar[bool] = False

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        """new_id: makes the id of a call; the model's templates may refuse others."""
        super().__init__()
        self._new_id = new_id or self.new_id
        # Schemas by names of tools and arguments; set if `reads_schemas`.
        self.schemas: Mapping[str, dict[str, Any]] = {}
        self._num_calls = 0
        self._unopened = ""  # the part read of a call that is not open yet
        self._after_call = False  # only white space has followed the last call
        self._arguments_end = ObjectEnd()
        self._repair = JsonRepair()  # of the arguments
        self._closing_index = 0  # the next of the closing marks
        self._opening = re.compile("|".join(map(re.escape, self._openings)))

    @property
    def _openings(self) -> tuple[str, ...]:
        return (*self.opening, self.bare_opening) if self.bare_opening else self.opening

    @staticmethod
    def new_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    def output_format(
        cls,
        tools: Sequence[CallableTool],
        *,
        only_one: bool,
        answer: Format | None = None,
        excludes: Sequence[str] = (),
    ) -> Format:
        """Returns the format of outputs: calls of the tools amid text, each as this parser reads it.

        only_one: at most one call. answer: the format of outputs without calls. excludes: marks of reasoning, which are
        not part of text.

        Raises FormatError.
        """
        tags = cls.call_tags(tools, only_one=only_one)
        if answer is None:
            return amid_text(cls.opening, tags, only_one=only_one, excludes=excludes)
        return one_of(listed(tags, cls.between, only_one=only_one), answer)

    @classmethod
    def call_tags(cls, tools: Sequence[CallableTool], *, only_one: bool) -> list[Format]:
        """Returns the tags of a call, each of which begins with an opening mark. Raises FormatError."""
        raise NotImplementedError

    def _start(self, parsed: Parsed) -> bool:
        return self._text(parsed)

    def _text(self, parsed: Parsed) -> bool:
        self._state = self._text
        mark = self._opening.search(self._held)
        if mark is None:
            if self._ended and self._after_call and self._held.isspace():
                self._held = ""
            self._emit(parsed, self._take_certain(self._openings))
            return False
        space = len_of_space(self._held[: mark.start()])
        self._emit(parsed, self._take(mark.start() - space))
        self._unopened = self._take(space + len(mark[0]))
        self._state = self._call
        return True

    def _emit(self, parsed: Parsed, text: str) -> None:
        if text:
            parsed.text += text
            self._after_call = False

    def _call(self, parsed: Parsed) -> bool:
        raise NotImplementedError

    def _read(self, size: int) -> str:
        """Takes text of a call that is not open yet."""
        read = self._take(size)
        self._unopened += read
        return read

    def _no_call(self, parsed: Parsed) -> bool:
        """Returns to text, which includes the part of the call that was read."""
        parsed.text += self._unopened
        self._unopened, self._after_call = "", False
        self._state = self._text
        return True

    def _open(self, parsed: Parsed, name: str, call_id: str = "") -> None:
        parsed.tool_calls.append(ToolCallDelta(index=self._num_calls, id=call_id or self._new_id(), name=name))
        self._num_calls += 1
        self._unopened = ""

    def _emit_arguments(self, parsed: Parsed, arguments: str) -> None:
        if arguments:
            parsed.tool_calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=arguments))

    def _headed_call(self, parsed: Parsed, header: re.Pattern[str]) -> bool:
        """A state: the text up to the object of the arguments is a header, with the name as group 1."""
        brace = self._held.find("{")
        if brace == -1 and len(self._held) <= MAX_HEADER and not self._ended:
            return False
        match = header.fullmatch(self._held, 0, brace) if 0 <= brace <= MAX_HEADER else None
        if match is None:
            return self._no_call(parsed)
        self._take(brace)
        self._open_headed(parsed, match)
        self._state = self._arguments
        return True

    def _open_headed(self, parsed: Parsed, header: re.Match[str]) -> None:
        self._open(parsed, header[1])

    def _arguments(self, parsed: Parsed) -> bool:
        """A state: arguments of an open call."""
        piece = self._take(self._arguments_end.find(self._held))
        if self._arguments_end.found or self._ended:
            self._emit_arguments(parsed, self._repair.flush(piece))
            self._repair = JsonRepair()
        else:
            self._emit_arguments(parsed, self._repair.push(piece))
        if not self._arguments_end.found:
            return False
        self._arguments_end = ObjectEnd()
        self._state = self._after_arguments
        return True

    def _after_arguments(self, parsed: Parsed) -> bool:
        return self._close()

    def _close(self) -> bool:
        """Continues after a call."""
        self._closing_index = 0
        self._state = self._closing
        return True

    def _closing(self, parsed: Parsed) -> bool:
        while self._closing_index < len(self.closing):
            rest, mark = self._held.lstrip(), self.closing[self._closing_index]
            if len(self._held) - len(rest) > MAX_SPACE:
                break
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
            elif mark.startswith(rest) and not self._ended:
                return False
            elif mark.startswith(rest):
                self._held = ""  # it was cut off
            self._closing_index += 1
        self._after_call = True
        self._state = self._text
        return True


def check_names(tools: Sequence[CallableTool]) -> None:
    """Raises FormatError for a name that no header can have."""
    for tool in tools:
        if not re.fullmatch(NAME, tool.name):
            raise FormatError(
                f"the name of tool {tool.name!r} cannot be written between the marks of this model's calls"
            )


class HeadedCallReader(ToolCallReader):
    """Calls with the name in a header and the object of the arguments after it."""

    # The text from the opening mark to the object; group 1 is the name.
    header: ClassVar[re.Pattern[str]]

    def _call(self, parsed: Parsed) -> bool:
        return self._headed_call(parsed, self.header)
