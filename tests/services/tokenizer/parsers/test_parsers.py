"""Every parser, of whole outputs and of all ways to cut them."""

import itertools
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config import TokenizerConfig
from pagewire.services.tokenizer.output.reading import Parsed
from pagewire.services.tokenizer.parsers.calls.forced import ArgumentsReader, ListedCallReader
from pagewire.services.tokenizer.parsers.calls.tool_calls import ToolCallReader
from pagewire.services.tokenizer.parsers.output_parser import OutputParser
from pagewire.services.tokenizer.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParsers,
    detect_reasoning_parser,
    detect_tool_call_parser,
)
from pagewire.v1.inference_pb2 import OutputParsing
from tests.services.tokenizer.chat_templates import FAMILIES
from tests.services.tokenizer.parsers.outputs import (
    HARD,
    PLAIN,
    REASONING,
    SCHEMAS,
    TIME,
    TOOL_CALLS,
    WEATHER,
    Said,
    gpt_oss,
    hermes,
)
from tests.sweep import examples

NAMES = ("f", "now", "get_weather", "get_wind", "run")
FORCED: dict[str, Callable[[], ToolCallReader]] = {
    "listed": lambda: ListedCallReader(names=NAMES),
    "named": lambda: ArgumentsReader("f"),
}
MARKED = [name for name in TOOL_CALLS if name not in FORCED]  # text to them is what has no marks
Make = Callable[[], OutputParser]


def tool_calls_of(name: str, *, first_call_only: bool = False) -> Make:
    def make() -> OutputParser:
        reader = {**TOOL_CALL_PARSERS, **FORCED}[name.removeprefix("nearly ")]()
        reader.schemas = SCHEMAS
        return OutputParser(None, reader, first_call_only=first_call_only)

    return make


def reasoning_of(name: str, prompt_end: str) -> Make:
    return lambda: OutputParser(REASONING_PARSERS[name](prompt_end), None, first_call_only=False)


class Collected:
    """The output that a client has received so far."""

    def __init__(self) -> None:
        self.reasoning = self.text = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []

    def add(self, parsed: Parsed) -> "Collected":
        self.reasoning += parsed.reasoning
        self.text += parsed.text
        for delta in parsed.tool_calls:
            if delta.index == len(self.calls):
                assert delta.id and delta.name
                self.calls.append([delta.name, ""])
                self.ids.append(delta.id)
            else:
                assert delta.index == len(self.calls) - 1 and not delta.id and not delta.name
            self.calls[delta.index][1] += delta.arguments
        return self

    @property
    def said(self) -> Said:
        return Said(self.text, tuple((name, arguments) for name, arguments in self.calls), self.reasoning)


def read(make: Make, pieces: Iterable[str]) -> tuple[Said, list[Said]]:
    """Returns the whole output, and the output after each piece."""
    parser, collected, after = make(), Collected(), []
    for piece in pieces:
        after.append(collected.add(parser.push(piece)).said)
    assert len(set(collected.ids)) == len(collected.ids)
    return collected.add(parser.finish("")).said, after


CORPUS: list[tuple[str, Make, str, Said]] = [
    *((name, tool_calls_of(name), output, said) for name, cases in TOOL_CALLS.items() for output, said in cases),
    *(
        (name, tool_calls_of(name), output, Said(output))
        for name in TOOL_CALLS
        if name not in FORCED
        for output in PLAIN
    ),
    *(
        (f"{name} {end!r}", reasoning_of(name, end), output, said)
        for (name, end), cases in REASONING.items()
        for output, said in cases
    ),
]


def named(case: object) -> str | None:
    return case if isinstance(case, str) and len(case) < 40 else None


@pytest.mark.parametrize(("name", "make", "output", "said"), CORPUS, ids=named)
def test_however_an_output_is_cut_it_says_the_same(name: str, make: Make, output: str, said: Said) -> None:
    assert read(make, [output])[0] == said
    whole, after_each = read(make, output)
    assert whole == said
    for cut in range(len(output) + 1):
        whole, after = read(make, [output[:cut], output[cut:]])
        assert whole == said, (output[:cut], output[cut:])
        # Not only at the end: an output that is cut off in the middle has the same parts.
        if cut:
            assert after[0] == after_each[cut - 1], output[:cut]


FRAGMENTS = sorted(
    {
        " " * 90,
        "\n" * 200,
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ",",
        ":",
        ";",
        "=",
        " ",
        "\n",
        "a",
        "1",
        "é",
        "```",
        "to=",
        '"name": "f"',
        '"arguments": {}',
        '"parameters": {"a": 1}',
        "f(a=1)",
        "functions.f",
        "function",
        "json",
        *(mark for reader in (*TOOL_CALL_PARSERS.values(), *REASONING_PARSERS.values()) for mark in reader.marks),
        *(opening for reader in TOOL_CALL_PARSERS.values() for opening in reader.opening),
    }
)
ANY_PARSER = st.sampled_from(
    [tool_calls_of(name) for name in TOOL_CALLS] + [reasoning_of(name, end) for name, end in REASONING]
)


@given(make=ANY_PARSER, pieces=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=25))
@settings(max_examples=examples(600), deadline=None)
def test_any_output_in_any_pieces(make: Make, pieces: list[str]) -> None:
    output = "".join(pieces)
    said, after = read(make, pieces)
    assert said == read(make, [output])[0]
    by_character = [Said(), *read(make, output)[1]]
    size = 0
    for piece, collected in zip(pieces, after, strict=True):
        size += len(piece)
        assert collected == by_character[size]


@given(
    case=st.sampled_from(CORPUS),
    cuts=st.lists(st.floats(0, 1), max_size=8),
    cut_off=st.floats(0, 1),
)
@settings(max_examples=examples(400), deadline=None)
def test_outputs_that_end_too_early_in_random_pieces(
    case: tuple[str, Make, str, Said], cuts: list[float], cut_off: float
) -> None:
    _, make, output, _ = case
    output = output[: int(cut_off * len(output))]
    at = sorted({0, len(output), *(int(cut * len(output)) for cut in cuts)})
    pieces = [output[start:end] for start, end in itertools.pairwise(at)]
    assert read(make, pieces)[0] == read(make, [output])[0]


@given(values=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
).map(lambda value: {"value": value}), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_arguments_are_the_models_character_for_character(values: dict, ascii_only: bool, indent: int | None) -> None:
    written = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    output = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    said, _ = read(tool_calls_of("hermes"), output)
    assert said == Said("", (("f", written),))
    said, _ = read(tool_calls_of("pythonic"), [f"[f(value={values['value']!r})]"])
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [("f", values)]


def test_arguments_are_returned_as_they_arrive() -> None:
    parser, collected = tool_calls_of("hermes")(), []
    for piece in ('<tool_call>{"name": "f", "arg', 'uments": {"a', '": [1', ", 2]", "}", "}</tool_call>"):
        collected.append("".join(delta.arguments for delta in parser.push(piece).tool_calls))
    assert collected == ["", '{"a', '": [1', ", 2]", "}", ""]


def test_strings_of_python_are_returned_as_they_arrive() -> None:
    parser, collected = tool_calls_of("pythonic")(), []
    for piece in ("[f(n=[1, 2", "], a=", "'x y", " \\", 'n"', "'", ", b=tr", "ue", ")]"):
        collected.append("".join(delta.arguments for delta in parser.push(piece).tool_calls))
    assert collected == ["", '{"n": [1, 2]', ', "a": "x y', " ", '\\n\\"', '"', "", "", ', "b": true}']


@given(text=st.text(), quoted=st.sampled_from([repr, json.dumps]))
@settings(max_examples=examples(100), deadline=None)
def test_strings_of_python_are_what_they_stand_for(text: str, quoted: Callable[[str], str]) -> None:
    said, _ = read(tool_calls_of("pythonic"), f"[f(value={quoted(text)})]")
    [(name, arguments)] = said.calls
    assert (name, json.loads(arguments), said.text) == ("f", {"value": text}, "")


def test_text_is_held_back_only_while_it_may_become_a_mark() -> None:
    parser = tool_calls_of("hermes")()
    assert [parser.push(piece).text for piece in ("a", " b <", "i", " \n", "c", "<tool", "s>")] == [
        "a", " b", " <i", "", " \nc", "", "<tools>",
    ]  # fmt: skip


def test_only_the_first_call_if_so_asked() -> None:
    said, _ = read(tool_calls_of("hermes", first_call_only=True), [hermes(WEATHER, TIME) + " bye"])
    assert said == Said(" bye", (WEATHER,))


def test_calls_behind_reasoning() -> None:
    def make() -> OutputParser:
        return OutputParser(REASONING_PARSERS["qwen3"](""), TOOL_CALL_PARSERS["hermes"](), first_call_only=False)

    output = f"<think>\nPerhaps {hermes(TIME)}?\n</think>\n\n{hermes(WEATHER)}"
    expected = Said("", (WEATHER,), f"Perhaps {hermes(TIME)}?")
    assert read(make, [output])[0] == read(make, output)[0] == expected


@pytest.mark.parametrize("call", [WEATHER, HARD])
def test_harmony_has_calls_between_its_messages(call: tuple[str, str]) -> None:
    def make() -> OutputParser:
        return OutputParser(REASONING_PARSERS["gpt_oss"](""), TOOL_CALL_PARSERS["gpt_oss"](), first_call_only=False)

    preamble = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    )
    to_first = f"<|start|>assistant to=functions.{call[0]}<|channel|>commentary json<|message|>{call[1]}"
    for output in (
        f"{preamble}<|start|>assistant{gpt_oss(call)}",
        f"{preamble}{to_first}<|call|>",
        f"{preamble}{to_first}",  # its end is a token that ends the generation
    ):
        said = [read(make, pieces)[0] for pieces in ([output], output)]
        assert said == [Said("I look.", (call,), "Hm.")] * 2


def test_ids_are_of_the_kind_that_the_models_templates_take() -> None:
    for name in TOOL_CALL_PARSERS:
        first, second = (TOOL_CALL_PARSERS[name].new_id() for _ in range(2))
        assert first != second
        assert (len(first) == 9 and first.isalnum()) if name == "mistral" else first.startswith("call_")


DETECTED = {
    "qwen3": ("hermes", "qwen3"),
    "llama3_json": ("llama3_json", "none"),
    "llama4_pythonic": ("pythonic", "none"),
    "mistral": ("mistral", "none"),
    "deepseek_v3": ("deepseek_v3", "none"),
    "deepseek_r1": ("deepseek_v3", "qwen3"),
    "deepseek_v31": ("deepseek_v31", "qwen3"),
    "gpt_oss": ("gpt_oss", "gpt_oss"),
    "qwen3_coder": ("qwen3_coder", "none"),
    "glm45": ("glm45", "qwen3"),
    "kimi_k2": ("kimi_k2", "none"),
    "granite": ("granite", "none"),
    "minimax_m2": ("minimax_m2", "qwen3"),
}


def test_templates_say_which_parsers_they_need(smollm2) -> None:
    assert {
        name: (detect_tool_call_parser(template), detect_reasoning_parser(template))
        for name, template in FAMILIES.items()
    } == DETECTED
    assert detect_tool_call_parser(smollm2.chat_template) == detect_reasoning_parser(smollm2.chat_template) == "none"


def test_the_flags_take_every_name() -> None:
    fields = TokenizerConfig.__dataclass_fields__
    assert fields["tool_call_parser"].metadata["choices"] == ("auto", "none", *TOOL_CALL_PARSERS)
    assert fields["reasoning_parser"].metadata["choices"] == ("auto", "none", *REASONING_PARSERS)


def test_forced_calls_are_read_whatever_the_model_knows() -> None:
    def read_forced(output: str, tool_call_parser: str, parsing: OutputParsing) -> Collected:
        parsers = OutputParsers(
            tool_call_parser, "none", templates=[], decode=lambda token_ids: "", encode=lambda mark: []
        )
        parser = parsers.make(parsing, [1])
        assert parser is not None
        collected = Collected().add(parser.finish(output))
        assert parser.has_called == parsing.required
        return collected

    for name in ("none", "hermes", "mistral"):
        listed = read_forced('[{"name": "now", "arguments": {}}]', name, OutputParsing(required=True))
        named = read_forced("{}", name, OutputParsing(named="now"))
        assert listed.said == named.said == Said("", (TIME,))
        # The next prompt's template must take them.
        assert all((len(call_id) == 9) == (name == "mistral") for call_id in (*listed.ids, *named.ids))


def test_parts_that_are_not_requested_are_not_parsed() -> None:
    def parsers(tool_calls: str, reasoning: str) -> OutputParsers:
        return OutputParsers(
            tool_calls, reasoning, templates=[FAMILIES["mistral"]], decode=lambda token_ids: "", encode=lambda mark: []
        )

    assert parsers("auto", "auto").make(OutputParsing(), [1]) is None
    assert parsers("auto", "auto").make(OutputParsing(reasoning=True), [1]) is None
    assert parsers("none", "none").make(OutputParsing(reasoning=True, tool_calls=True), [1]) is None
    assert parsers("auto", "none").marks(OutputParsing(tool_calls=True)) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert parsers("auto", "none").marks(OutputParsing(reasoning=True)) == set()


@pytest.mark.parametrize(
    ("name", "prompt_end", "tokens", "expected"),
    [
        ("qwen3", "", ["<think>", "\n", "a", "b", "\n", "</think>", "\n", "c"], 4),
        ("qwen3", "<think>\n", ["a", "b", "</think>", "c"], 2),
        ("qwen3", "", ["a", "b"], 0),
        ("qwen3", "<think>\n\n</think>\n\n", ["a", "<think>", "b"], 0),
        ("deepseek_r1", "", ["a", "b", "</think>", "c", "d"], 2),
        ("deepseek_r1", "", ["<think>", "a", "</think>", "c"], 1),
        ("deepseek_r1", "", ["</think>", "c"], 0),
        ("deepseek_r1", "", ["a", "", "b"], 3),  # cut off; a character of several tokens
        ("gpt_oss", "", ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>", "assistant",
                         "<|channel|>", "final", "<|message|>", "c"], 2),
        ("gpt_oss", "", ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant",
                         "<|channel|>", "analysis", "<|message|>", "b", "c"], 3),
    ],
)  # fmt: skip
def test_tokens_of_the_reasoning_are_counted(name: str, prompt_end: str, tokens: list[str], expected: int) -> None:
    one_by_one, at_once = reasoning_of(name, prompt_end)(), reasoning_of(name, prompt_end)()
    for token in tokens:
        one_by_one.push(token)
    one_by_one.finish()
    at_once.finish(*tokens)
    assert one_by_one.num_reasoning_tokens == at_once.num_reasoning_tokens == expected
