"""Conversations in the form that a chat template takes: roles, ids of calls and arguments that it does not know become
those that it does."""

import hashlib
import re
import string
from collections.abc import Sequence
from typing import Any

from pagewire.services.tokenizer.templates.arguments import recovered
from pagewire.services.tokenizer.templates.chat import Chat, ChatError, Compiled, Turn
from pagewire.services.tokenizer.templates.traits import Traits, traits_of

_USUAL = frozenset({"system", "developer", "user", "assistant", "tool"})
_INSTRUCTING = ("system", "developer")
_MAX_SHOWN = 64  # characters of a role in an error
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID_CHARS = string.digits + string.ascii_letters

Turns = list[Turn]


def fit_turns(turns: Turns, template: Compiled, chat: Chat) -> Turns:
    """Returns messages that the template takes; changes the given ones, which are those of the chat. One that is
    continued stays as it is.

    Raises ChatError for a message that the model would not see.
    """
    traits = traits_of(template)
    roles = {turn["role"]: index for index, turn in reversed(list(enumerate(turns)))}
    for role, index in roles.items():
        _check_role(role, index, traits)
    _fit_calls(turns, traits)
    if chat.tools_in_words and not traits.shows_tools:
        turns.insert(0, {"role": "system", "content": chat.tools_in_words})
    elif roles.keys().isdisjoint(_INSTRUCTING):
        return turns
    kept = turns[-1:] if chat.continue_final_message else []
    return _fit_instructions(turns[: len(turns) - len(kept)], traits) + kept


def _check_role(role: str, index: int, traits: Traits) -> None:
    where = f"messages[{index}].role"
    if role == "tool":
        if not traits.shows_results:
            raise ChatError(
                f"{where} is 'tool', but the model's chat template does not show the results of tools; send them in a "
                "user message, or start the server with a --chat-template that shows them"
            )
    elif role not in _USUAL and not traits.shows(role):
        raise ChatError(
            f"{where} is {role[:_MAX_SHOWN]!r}, which the model's chat template does not show; use system, developer, "
            "user, assistant or tool"
        )


# -- instructions: messages of the system or the developer ----------------------------------------------------------


def _fit_instructions(turns: Turns, traits: Traits) -> Turns:
    """A developer's message becomes the system's where the template does not know it. Those that the template would not
    show at their place join the first one, and a first one that it does not show joins the user's message."""
    leading = next((i for i, turn in enumerate(turns) if turn["role"] not in _INSTRUCTING), len(turns))
    is_renamed = False
    for index, turn in enumerate(turns):
        if turn["role"] == "developer" and not traits.knows_developer:
            turn["role"] = "system"
            is_renamed = is_renamed or index < leading
    joining: Turns = turns[:1] if leading else []
    rest: Turns = []
    for index, turn in enumerate(turns[len(joining) :], len(joining)):
        role = turn["role"]
        place = "second" if index < leading else "later"
        moves = role in _INSTRUCTING and not _has_image(turn) and (
            (is_renamed and index < leading) or not traits.shows_instructions(role, place)
        )  # fmt: skip
        (joining if moves else rest).append(turn)
    if not joining:
        return rest
    first = joining[0] | {"content": _joined([turn.get("content") or "" for turn in joining])}
    if _has_image(first) or traits.shows_instructions(first["role"], "first"):
        return [first, *rest]
    return _shown_by_user(first, rest)


def _shown_by_user(first: dict[str, Any], rest: Turns) -> Turns:
    for index, turn in enumerate(rest):
        if turn["role"] == "user":
            rest[index] = turn | {"content": _joined([first["content"], turn.get("content") or ""])}
            return rest
    return [first, *rest]


def _joined(contents: Sequence[Any]) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
    return [part for content in parts for part in content]


def _has_image(turn: dict[str, Any]) -> bool:
    """Returns whether a message has images: their order in the prompt must not change."""
    content = turn.get("content")
    return isinstance(content, list) and any("text" not in part for part in content)


# -- calls ------------------------------------------------------------------------------------------------------------


def _fit_calls(turns: Turns, traits: Traits) -> None:
    waiting: list[str] = []  # ids of calls without a result
    for index, turn in enumerate(turns):
        if turn["role"] == "tool":
            id = turn.setdefault("tool_call_id", waiting[0] if waiting else f"call{index:05}")
            waiting = [one for one in waiting if one != id]
            turn["tool_call_id"] = _fit_id(id, traits)
        elif turn.get("tool_calls"):
            waiting = [call["id"] for call in turn["tool_calls"]]
            turn["tool_calls"] = [_fit_call(call, traits) for call in turn["tool_calls"]]


def _fit_call(call: dict[str, Any], traits: Traits) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str) and traits.needs_objects:
        function = function | {"arguments": recovered(function["arguments"])}
    return call | {"id": _fit_id(call["id"], traits), "function": function}


def _fit_id(id: str, traits: Traits) -> str:
    """Returns an id that the template takes: the same for the same id in every turn, as prefixes are cached."""
    if _SHORT_ID.fullmatch(id) or not traits.needs_short_ids:
        return id
    number = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8])
    return "".join(_ID_CHARS[number // len(_ID_CHARS) ** place % len(_ID_CHARS)] for place in range(9))
