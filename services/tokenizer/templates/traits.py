"""Traits of chat templates: what they do with roles, ids and arguments, found by rendering small conversations.

Templates of some families drop a message with a role that they do not know, or show it as the assistant's. Their text
does not tell; what they render does.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.nodes

from pagewire.services.tokenizer.templates.chat import FAULTS, Compiled
from pagewire.services.tokenizer.templates.chat_messages import Arguments

Message = Mapping[str, Any]

# Found again in what is rendered.
_MARK = "qzvxkwj"
_ID = "abcdefghi"
_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
# Templates join these with text, so they must be there.
_SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"), "")
_PLACES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "first": ((), ("user",)),
    "second": (("system",), ("user",)),
    "later": (("system", "user", "assistant"), ("user",)),
}
_ANY_PLACE = ((), ("user",), ("user", "assistant"), ("user", "assistant", "user"))


class Traits:
    """Describes what one template takes. Each trait is found when a conversation needs it."""

    def __init__(self, template: Compiled) -> None:
        self._template = template.template
        self._compared = _compared(self._template.environment.parse(template.source))
        self._as_parts = template.takes_parts and not template.tests_strings
        self._shown: dict[tuple[str, str], bool] = {}

    @cached_property
    def knows_developer(self) -> bool:
        """Tells whether the template distinguishes a developer's messages. One that shows any role does not: the
        model has never seen it."""
        return "developer" in self._compared

    def shows_instructions(self, role: str, place: str) -> bool:
        """Returns whether a system's or a developer's message is shown at a place: "first", "second" behind another
        one, or "later"."""
        if (key := (role, place)) not in self._shown:
            before, after = _PLACES[place]
            first = "system" if place == "first" or role == "system" else role
            roles = [first if one == "system" else one for one in before]
            self._shown[key] = self._shows(list(map(self._turn, roles)), role, list(map(self._turn, after)))
        return self._shown[key]

    def shows(self, role: str) -> bool:
        """Returns whether a message of an unusual role is shown: the template has its name, or shows any."""
        return role in self._compared or self._shows_any_role

    @cached_property
    def _shows_any_role(self) -> bool:
        return any(self._shows(list(map(self._turn, before)), _MARK, []) for before in _ANY_PLACE)

    @cached_property
    def shows_tools(self) -> bool:
        """Tells whether the tools that may be called are shown."""
        return self._rendered([self._turn("user")]) != self._rendered([self._turn("user")], tools=None)

    @cached_property
    def shows_results(self) -> bool:
        """Tells whether the messages of tools are shown."""
        calling = self._turn("assistant") | {"content": "", "tool_calls": [self._call({})]}
        return any(self._shows([self._turn("user"), last], "tool", []) for last in (calling, self._turn("assistant")))

    @cached_property
    def needs_short_ids(self) -> bool:
        """Tells whether ids of calls must be nine letters and digits (Mistral)."""
        return self._called({"a": _MARK}, f"call_{_ID}{_ID}") is None and self._called({"a": _MARK}) is not None

    @cached_property
    def needs_objects(self) -> bool:
        """Tells whether arguments must be an object, as text is not shown."""
        return _MARK not in (self._called(_MARK) or "") and _MARK in (self._called({"a": _MARK}) or "")

    def _called(self, arguments: Any, id: str = _ID) -> str | None:
        calling = self._turn("assistant") | {"content": "", "tool_calls": [self._call(arguments, id)]}
        result = self._turn("tool") | {"tool_call_id": id}
        return self._rendered([self._turn("user"), calling, result])

    def _call(self, arguments: Any, id: str = _ID) -> dict[str, Any]:
        if isinstance(arguments, dict):
            arguments = Arguments(arguments, str(arguments))
        return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}

    def _shows(self, before: list[Message], role: str, after: list[Message]) -> bool:
        marked = {"content": self._content(_MARK), "name": "f", "tool_call_id": _ID}
        text, as_assistant = (self._rendered([*before, {"role": one, **marked}, *after]) for one in (role, "assistant"))
        return text is not None and _MARK in text and text != as_assistant

    def _turn(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self._content("x")}

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._as_parts else text

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message] | None = (_TOOL,)) -> str | None:
        """Returns the prompt; None if the template refuses it."""
        variables = {"tools": tools and list(tools), "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render(_SPECIAL_TOKENS | variables, messages=messages)
        except (jinja2.TemplateError, *FAULTS):
            return None


@lru_cache(maxsize=32)
def traits_of(template: Compiled) -> Traits:
    return Traits(template)


def _compared(tree: jinja2.nodes.Template) -> set[str]:
    """Returns the texts with which a template compares values, roles among them."""
    found: set[str] = set()
    for comparison in tree.find_all(jinja2.nodes.Compare):
        for side in (comparison.expr, *(operand.expr for operand in comparison.ops)):
            items = side.items if isinstance(side, jinja2.nodes.Tuple | jinja2.nodes.List) else [side]
            found.update(item.value for item in items if isinstance(item, jinja2.nodes.Const))
    return found
