"""Chat messages to prompt text, as transformers' apply_chat_template renders them.

Templates are the model's (or a client's) code: they run in jinja's immutable sandbox and see plain data only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox

from pagewire.files.chat_template import EXTENSIONS

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# What a template may raise, apart from jinja's own errors.
FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)
Turn = dict[str, Any]


class ChatError(ValueError):
    """The conversation cannot be rendered; the message gives the client the reason."""


class TemplateError(ChatError):
    """The chat template is at fault, or refuses the conversation."""


@dataclass(frozen=True)
class Chat:
    """A conversation to render. Plain data, as it is sent to worker processes."""

    # {"role": ..., "content": str or [{"type": "text", "text": ...}, {"type": "image"}], ...}; keys without a value are
    # absent.
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # "" = the model's.
    chat_template: str = ""
    # {"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}.
    tools: Sequence[Mapping[str, Any]] = ()
    # {"title": ..., "text": ...}, or other keys that the template knows.
    documents: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # The tools of which one must be called, in words, for a template that shows none.
    tools_in_words: str = ""

    @property
    def num_chars(self) -> int:
        """The characters of the messages' texts."""
        contents = [message.get("content") for message in self.messages]
        return sum(
            len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content or ())
            for content in contents
        )


@dataclass(frozen=True)
class Compiled:
    """A template."""

    source: str
    template: jinja2.Template
    # Whether the template itself iterates over a message's content parts.
    takes_parts: bool
    # Whether it tests if content is a string.
    tests_strings: bool


# (messages, template, their chat) -> messages that the template takes. Raises ChatError.
Fit = Callable[[list[Turn], Compiled, Chat], list[Turn]]


def as_they_are(turns: list[Turn], template: Compiled, chat: Chat) -> list[Turn]:
    return turns


def render_chat(
    chat: Chat,
    template: str | None,
    special_tokens: Mapping[str, str],
    image_token: str = "",
    fit: Fit = as_they_are,
) -> str:
    """Returns the prompt text. template: the model's own, None if it has none. image_token: stands for an image if the
    template only knows strings. fit: what is done to the messages first. Raises ChatError.
    """
    template = chat.chat_template or template
    if not template:
        raise ChatError(
            "the model has no chat template: send a prompt (REST: /v1/completions; `pagewire generate`), or give the "
            "server a template with --chat-template"
        )
    if not chat.messages:
        raise ChatError("a chat needs at least one message")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ChatError(
            "continue_final_message and add_generation_prompt exclude each other: the first continues the last "
            "message, the second begins a new one; set one of them to false"
        )
    try:
        compiled = _compile(template)
        turns = fit(list(map(dict, chat.messages)), compiled, chat)
        messages = _messages_for(compiled, turns, image_token)
        final_text = _mark_final_message(messages) if chat.continue_final_message else ""
        # None if there are none, as in transformers: templates test for that.
        lists = {"tools": list(chat.tools) or None, "documents": list(chat.documents) or None}
        variables = {**lists, **special_tokens, **chat.template_kwargs}
        text = compiled.template.render(variables, messages=messages, add_generation_prompt=chat.add_generation_prompt)
        text.encode()  # half a surrogate pair, from an escape in the template or its variables, is not text
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid jinja, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refused the messages: {error}") from error
    except FAULTS as error:
        if isinstance(error, ChatError):
            raise
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return _cut_at_mark(text, final_text) if chat.continue_final_message else text


@lru_cache(maxsize=32)
def _compile(source: str) -> Compiled:
    tree = environment().parse(source)
    tests_strings = any(test.name == "string" for test in tree.find_all(jinja2.nodes.Test))
    return Compiled(source, environment().from_string(source), _takes_parts(tree), tests_strings)


@lru_cache(maxsize=1)
def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns what all templates run in."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=lambda format: datetime.now().strftime(format)
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON. Jinja's own filter escapes HTML characters, which prompts must contain as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    """Whether the template loops over a message's content, or looks at a part's type.

    Found in its syntax tree: a `for` over `….content` / `…['content']` or over a variable set from it.
    """
    aliases = {
        node.target.name
        for node in tree.find_all(jinja2.nodes.Assign)
        if isinstance(node.target, jinja2.nodes.Name) and _is_content(node.node)
    }
    for loop in tree.find_all(jinja2.nodes.For):
        source = loop.iter
        while isinstance(source, jinja2.nodes.Filter) and source.node is not None:
            source = source.node
        if _is_content(source) or (isinstance(source, jinja2.nodes.Name) and source.name in aliases):
            return True
    return False


def _is_content(node: Any) -> bool:
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.arg, jinja2.nodes.Const)
        and node.arg.value == "content"
    )


def expand_images(text: str, image_token: str, image_texts: Sequence[str]) -> str:
    """Replaces each placeholder of a prompt. Raises ChatError if there are not as many as texts."""
    pieces = text.split(image_token)
    if (found := len(pieces) - 1) != len(image_texts):
        raise ChatError(
            f"the prompt has {image_token!r} {found} times for {len(image_texts)} images: the chat template must show "
            "each image once, and no text may contain the placeholder"
        )
    return pieces[0] + "".join(image + piece for image, piece in zip(image_texts, pieces[1:], strict=True))


def _messages_for(compiled: Compiled, copies: list[Turn], image_token: str) -> list[Turn]:
    """Changes and returns copies. For templates that only know strings, parts become one string, joined by newlines.
    For those of models that read images, which may only know parts, strings become one part."""
    for copy in copies:
        content = copy.get("content")
        if isinstance(content, str) and image_token and compiled.takes_parts and not compiled.tests_strings:
            copy["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            copy["content"] = (
                [dict(part) for part in content]
                if compiled.takes_parts
                else "\n".join(part.get("text", image_token) for part in content)
            )
    return copies


def _mark_final_message(messages: list[Turn]) -> str:
    """Appends the mark, where the prompt is cut later, to the text of the last message. Returns that text."""
    content = messages[-1].get("content")
    if content is None:
        raise ChatError("continue_final_message is set, but the last message has no content to continue")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_TAG
        return content
    if not content or "text" not in content[-1]:  # the text continues after an image
        content.append({"type": "text", "text": ""})
    text: str = content[-1]["text"]
    content[-1]["text"] = text + _CONTINUE_TAG
    return text


def _cut_at_mark(text: str, final_text: str) -> str:
    mark = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or mark not in text:
        raise ChatError("continue_final_message is set, but the chat template does not show the last message whole")
    cut = text.rindex(mark)
    kept = text[:cut]
    # A template that trims messages has cut the mark's own trailing space: then the message's is gone as well.
    return kept if text[cut:].startswith(_CONTINUE_TAG) else kept.rstrip()
