"""Chat templates and conversations, and stop strings in outputs."""

from typing import Any

from pagewire.services.tokenizer.output.stop import StopChecker, StopHit
from pagewire.services.tokenizer.templates.chat import Chat, ChatError, render_chat
from pagewire.services.tokenizer.templates.turns import fit_turns
from tests.chaos.fuzz.line import Finding
from tests.chaos.fuzz.mutation import WORDS, Mutator
from tests.services.tokenizer.chat_templates import FAMILIES

# None of them loops for long: what a template may take of time is bounded elsewhere.
_TEMPLATE_PARTS = (
    "{{",
    "}}",
    "{%",
    "%}",
    "{% endif %}",
    "{% endfor %}",
    "{% else %}",
    "{{ messages }}",
    "{{ messages[99] }}",
    "{{ self }}",
    "{{ ''.__class__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__ }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('x') }}",
    "{{ messages | tojson }}",
    "{{ tools | tojson(indent=-1) }}",
    "{{ undefined.x.y }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ strftime_now('%') }}",
    "{% break %}",
    "{% set x = namespace(a=1) %}{% set x.b = 2 %}",
    "{{ messages | map(attribute='role') | list }}",
    "{% raw %}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "{{ '%s%s' % 1 }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '\\ud800' }}",
    "{% generation %}x{% endgeneration %}",
    "{{ messages | sort }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ [] | first }}",
    "{{ {} | dictsort }}",
    "{{ -1 | string | int(base=99) }}",
)
_MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "4", "tool_call_id": "c", "name": "f"},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def fuzz_templates(seed: int) -> None:
    """One case: a text, or a ChatError. Raises Finding."""
    mutator = Mutator(seed)
    template = mutator.random.choice([*FAMILIES.values()])
    for _ in range(mutator.random.choice((0, 1, 1, 3))):
        place = mutator.random.randrange(len(template) + 1)
        cut = mutator.random.choice((0, 0, 1, 8))
        template = template[:place] + mutator.random.choice((*_TEMPLATE_PARTS, *WORDS)) + template[place + cut :]
    messages = _MESSAGES[: mutator.random.randrange(1, len(_MESSAGES) + 1)]
    chat = Chat(
        messages=[_message(mutator, message) for message in messages],
        add_generation_prompt=mutator.is_so(0.7),
        continue_final_message=mutator.is_so(0.2),
        tools=[mutator.json(tool) for tool in _TOOLS] if mutator.is_so(0.5) else (),
        documents=[{"title": mutator.text(), "text": mutator.text()}] if mutator.is_so(0.2) else (),
        template_kwargs={"enable_thinking": mutator.json_value()} if mutator.is_so(0.3) else {},
    )
    try:
        text = render_chat(chat, template, {"bos_token": "<s>", "eos_token": "</s>"}, "<image>", fit_turns)
        text.encode()
    except ChatError as error:
        if not str(error):
            raise Finding(f"{template!r}: refused without a reason") from error
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}: {chat} with {template!r}") from error


def _message(mutator: Mutator, message: dict[str, Any]) -> dict[str, Any]:
    """As a client may send it: the types of role and content are checked before."""
    changed: dict[str, Any] = dict(message)
    if mutator.is_so(0.3):
        changed["role"] = mutator.random.choice(WORDS) or "user"
    if isinstance(changed["content"], str) and mutator.is_so(0.5):
        changed["content"] = mutator.text()
    if "tool_calls" in changed and mutator.is_so(0.5):
        call = changed["tool_calls"][0]
        changed["tool_calls"] = [{**call, "function": {**call["function"], "arguments": mutator.json_value()}}]
    return changed


def fuzz_stops(seed: int) -> None:
    """One case: what is returned is the text up to the first stop string, however it is cut. Raises Finding."""
    mutator = Mutator(seed)
    alphabet = mutator.random.choice(("ab", "aé漢\U0001f469\u200d", "\n\r \t", "abcdefgh"))
    stops = ["".join(mutator.random.choices(alphabet, k=mutator.random.choice((1, 2, 3, 40)))) for _ in range(4)]
    text = "".join(mutator.random.choices(alphabet, k=mutator.random.choice((0, 5, 60, 600))))
    if mutator.is_so(0.5):
        text += mutator.random.choice(stops) + text
    includes = mutator.is_so(0.5)
    returned, found = _push_all(StopChecker(stops, include_stop_str_in_output=includes), _pieces(mutator, text))
    by_character = _push_all(StopChecker(stops, include_stop_str_in_output=includes), list(text))
    said = f"stops {stops}, text {text!r}: returned {returned!r}, found {found!r}"
    if found is None and (returned != text or any(stop in text for stop in stops)):
        raise Finding(said)
    if found is not None and not (text.startswith(returned) and found in text):
        raise Finding(said)
    if (found is None) != (by_character[1] is None):
        raise Finding(f"{said}; character by character {by_character}")


def _pieces(mutator: Mutator, text: str) -> list[str]:
    places = sorted(mutator.random.randrange(len(text) + 1) for _ in range(mutator.random.randrange(12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _push_all(checker: StopChecker, pieces: list[str]) -> tuple[str, str | None]:
    returned = ""
    for piece in pieces:
        out = checker.push(piece)
        if isinstance(out, StopHit):
            return returned + out.text, out.stop_string
        returned += out
    return returned + checker.flush(), None
