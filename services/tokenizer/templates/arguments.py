"""Arguments of earlier calls that were cut off or are no JSON, as objects: some templates take nothing else."""

import re

from pagewire.services.tokenizer.templates.chat_messages import Arguments, object_of

# The member that holds arguments of which nothing can be read.
UNREADABLE = "arguments"

# Brackets deeper than this are not closed.
_MAX_DEPTH = 256
# A string, whole or cut off; or a mark outside of strings.
_TOKEN = re.compile(r'"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*(?P<end>")?|[{}\[\],]')
_CLOSING = {"{": "}", "[": "]"}


def recovered(text: str) -> Arguments:
    """Returns an object for templates that take nothing else: what is whole of arguments that were cut off, or one
    member with the text."""
    for candidate in _completions(text):
        if values := object_of(candidate):
            return Arguments(values, text)
    return Arguments({UNREADABLE: text}, text)


def _completions(text: str) -> list[str]:
    """Returns texts that close what is open: with the last value, and without it."""
    closing, cut_string = "", None
    whole = 0, ""  # the end of the last whole value, and what closes the text there
    for token in _TOKEN.finditer(text):
        mark, cut_string = token[0][0], None
        if mark in _CLOSING:
            if len(closing) == _MAX_DEPTH:
                return []
            closing = _CLOSING[mark] + closing
            whole = token.end(), closing
        elif mark == ",":
            whole = token.start(), closing
        elif mark != '"':
            closing = closing[1:]
            if not closing:
                return [text[: token.end()]]  # more text follows
        elif token["end"] is None:
            cut_string = token.end()  # before an escape that is cut off, too
    with_value = text if cut_string is None else text[:cut_string] + '"'
    return [with_value + closing, text[: whole[0]] + whole[1]]
