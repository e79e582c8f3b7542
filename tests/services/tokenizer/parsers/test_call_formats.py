"""Every parser's grammar: what it admits is what the parser reads, and the arguments follow the schemas."""

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from pagewire.services.tokenizer.parsers.output_parser import OutputParser
from pagewire.services.tokenizer.parsers.registry import REASONING_PARSERS, TOOL_CALL_PARSERS
from pagewire.services.tokenizer.parsers.shared.formats import CallableTool, Format, FormatError, json_of
from pagewire.services.tokenizer.parsers.shared.untyped_values import resolved
from tests.services.executor.grammar.vocabulary import Vocabulary, vocabulary_with
from tests.services.tokenizer.parsers import outputs
from tests.services.tokenizer.parsers.outputs import TIME, WEATHER
from tests.services.tokenizer.parsers.test_parsers import read

# What a call begins with.
BEGINS = {
    "hermes": "<tool_call>",
    "llama3_json": "{",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "pythonic": "<|python_start|>[",
    "gpt_oss": "<|channel|>commentary to=",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "granite": "<|tool_call|>",
    "qwen3_coder": "<tool_call>",
    "glm45": "<tool_call>",
    "minimax_m2": "<minimax:tool_call>",
}
NAMES = list(BEGINS)
# Those that write arguments one by one, without quotes.
TAGGED = [name for name in NAMES if TOOL_CALL_PARSERS[name].reads_schemas]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "city": {"$ref": "#/$defs/place"},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "exact": {"type": ["boolean", "null"]},
            "at": {"type": "array", "items": {"type": "number", "maximum": 9}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "maxLength": 5}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "sometimes": {
        "type": "object",
        "properties": {"x": {"type": "integer", "maximum": 9}, "y": {"const": "y"}},
        "additionalProperties": False,
    },
}
MARKS = sorted(
    {mark for name in NAMES for mark in TOOL_CALL_PARSERS[name].marks} | {"<think>", "</think>", "<|start|>"}
)
ENDS = ["<|call|>"]


@pytest.fixture(scope="module", params=["tokens", "text"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Vocabularies with marks as tokens, and with marks as text."""
    marks = MARKS if request.param == "tokens" else []
    return vocabulary_with(tmp_path_factory.mktemp("tokenizer"), marks, ends=ENDS if marks else [])


def tools_for(name: str) -> list[CallableTool]:
    """A model that writes strings without quotes can only guarantee a choice."""
    weather = SCHEMAS["get_weather"] | {"$defs": {"place": {"enum": ["Paris", "Rom"]}}}
    schemas = SCHEMAS | {"get_weather": weather} if name in TAGGED else SCHEMAS
    return [CallableTool(called, schema) for called, schema in schemas.items()]


def said_by(name: str, output: str) -> outputs.Said:
    def make() -> OutputParser:
        reasoning = REASONING_PARSERS["gpt_oss"]("") if name == "gpt_oss" else None
        reader = TOOL_CALL_PARSERS[name]()
        reader.schemas = {tool.name: {key: resolved(one, tool.schema) for key, one in tool.schema["properties"].items()}
                          for tool in tools_for(name)}  # fmt: skip
        return OutputParser(reasoning, reader, first_call_only=False)

    return read(make, [output])[0]


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_called_follows_its_schema(vocabulary: Vocabulary, name: str) -> None:
    choose = random.Random(name)
    calls: list[tuple[str, str]] = []
    for only_one, begin in itertools.product((False, True), ("", BEGINS[name])):
        format = TOOL_CALL_PARSERS[name].output_format(tools_for(name), only_one=only_one)
        for _ in range(12):
            if (output := vocabulary.any_output(format, begin, choose)) is not None:
                said = said_by(name, output)
                assert len(said.calls) <= 1 or not only_one, output
                calls += said.calls
    assert {called for called, _ in calls} == set(SCHEMAS)
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])


SPOKEN = {"unit": "C", "city": "Paris", "days": "2", "exact": "null", "at": "[1, 2.5]"}
WHAT_MODELS_WRITE = {
    "hermes": [outputs.hermes(WEATHER), "I look.\n" + outputs.hermes(WEATHER, TIME), "<think>\n?</think>\n\nNo < yes."],
    "llama3_json": [outputs.object_of(WEATHER, "parameters"), "It is [fine] {now}.",
                    "<|python_tag|>" + "; ".join(outputs.object_of(call, "parameters") for call in (TIME, WEATHER))],
    "mistral": [f"[TOOL_CALLS] [{outputs.object_of(WEATHER)}, {outputs.object_of(TIME)}]", "Yes [TOOL", "",
                f"Well. [TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}"],
    "deepseek_v3": ["Let me see.\n" + outputs.deepseek_v3(TIME, WEATHER), outputs.deepseek_v3(WEATHER), "<｜tool no"],
    "deepseek_v31": ["Let me see." + outputs.deepseek_v31(TIME, WEATHER), outputs.deepseek_v31(WEATHER), "<｜tool no"],
    "pythonic": ['[get_weather(city="Paris", days=2)]', "[now(), sometimes(y=\"y\")]", "I [now] see", "[1, 2]",
                 "Ok <|python_start|>[get_weather(unit=\"C\", city=\"Paris\", days=2, at=[1, 2])]<|python_end|>"],
    "gpt_oss": ["<|channel|>analysis<|message|>Hm < 1.<|end|><|start|>assistant" + outputs.gpt_oss(WEATHER)[:-8],
                "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
                "<|start|>assistant<|channel|>final<|message|>Yes < no."],
    "kimi_k2": ["Let me see." + outputs.kimi_k2(TIME, WEATHER), outputs.kimi_k2(WEATHER), "<|tool no"],
    "granite": [f"<|tool_call|>[{outputs.object_of(WEATHER)}, {outputs.object_of(TIME)}]", "a < b",
                f"Well. <tool_call>[{outputs.object_of(WEATHER)}]"],
    "qwen3_coder": ["I look.\n" + outputs.qwen3_coder("get_weather", **SPOKEN), outputs.qwen3_coder("now"), "<tool",
                    outputs.qwen3_coder("get_weather", city="Paris", days="2") + "\n" + outputs.qwen3_coder("now")],
    "glm45": ["I look." + outputs.glm45("get_weather", **SPOKEN), outputs.glm45("now") + outputs.glm45("now", line=""),
              outputs.glm45("get_weather", line="", city="Paris", days="2")],
    "minimax_m2": ["I look.\n" + outputs.minimax_m2(("get_weather", SPOKEN), ("now", {})),
                   outputs.minimax_m2(("get_weather", {"city": "Paris", "days": "2"})), "<minimax:"],
}  # fmt: skip
WRONG = {name: [text.replace('"Paris"' if name not in TAGGED else "2", "A5"), text.replace("get_weather", "get_it")]
         for name, texts in WHAT_MODELS_WRITE.items() for text in texts if "get_weather" in text}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_models_write_is_admitted_and_what_is_wrong_is_not(vocabulary: Vocabulary, name: str) -> None:
    format = TOOL_CALL_PARSERS[name].output_format(tools_for(name), only_one=False)
    assert [text for text in WHAT_MODELS_WRITE[name] if not vocabulary.admits(format, text)] == []
    assert [text for text in WRONG[name] if vocabulary.admits(format, text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_a_form_or_calls(vocabulary: Vocabulary, name: str) -> None:
    answer = json_of({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    format = TOOL_CALL_PARSERS[name].output_format(tools_for(name), only_one=False, answer=answer)
    called = next(text for text in WHAT_MODELS_WRITE[name] if not said_by(name, text).text and "get_weather" in text)
    before = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    for text, admitted in ((f'{before}{{"ok": true}}', True), (called, True), (f"{before}Yes.", False), ("", False)):
        assert vocabulary.admits(format, text) == admitted, text


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_that_is_not_strict_takes_any_arguments(vocabulary: Vocabulary, name: str) -> None:
    tools = [CallableTool(called, {"type": "object"}) for called in SCHEMAS]
    format = TOOL_CALL_PARSERS[name].output_format(tools, only_one=False)
    written = [text.replace('"Paris"', '{"a": [null, 1.5]}') for text in WHAT_MODELS_WRITE[name]]
    assert [text for text in written if not vocabulary.admits(format, text)] == []


def test_every_parser_has_a_grammar() -> None:
    assert {TOOL_CALL_PARSERS[name] for name in NAMES} == set(TOOL_CALL_PARSERS.values())


WITH_KEYWORDS = ["pythonic", *TAGGED]
UNSAYABLE: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}}, "'anyOf'"),
    ({"properties": {"a": {"$ref": "#"}}}, "the reference '#'"),
    ({"properties": {"a": {}}, "required": ["b"]}, "'required'"),
]


@pytest.mark.parametrize("name", WITH_KEYWORDS)
@pytest.mark.parametrize(("schema", "message"), UNSAYABLE)
def test_what_marks_cannot_say_is_refused(name: str, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=f"'f' is strict, .*{message}"):
        format_of(name, CallableTool("f", schema))


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("schema", "text", "admitted"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 'any "<b>\n', True),
        ({"type": ["string", "null"], "description": "x"}, "null", True),
        ({"enum": ["a b", "c"]}, "a b", True),
        ({"enum": ["a b", "c"]}, "a", False),
        ({"const": "a"}, "a", True),
        ({"type": "array", "items": {"type": "string", "maxLength": 2}}, '["ab"]', True),
        ({"type": "array", "items": {"type": "string", "maxLength": 2}}, '["abc"]', False),
    ],
)
def test_values_without_quotes(
    vocabulary: Vocabulary, name: str, schema: dict[str, Any], text: str, admitted: bool
) -> None:
    format = format_of(name, CallableTool("f", {"properties": {"x": schema}}))
    write = {"qwen3_coder": outputs.qwen3_coder, "glm45": outputs.glm45}
    output = write[name]("f", x=text) if name in write else outputs.minimax_m2(("f", {"x": text}))
    assert vocabulary.admits(format, output) == admitted


@pytest.mark.parametrize("name", TAGGED)
def test_strings_that_are_more_than_text_cannot_be_promised_without_quotes(name: str) -> None:
    for schema in (
        {"type": "string", "maxLength": 3},
        {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]},
    ):
        with pytest.raises(FormatError, match=r"'f' is strict, .*'x'"):
            format_of(name, CallableTool("f", {"properties": {"x": schema}}))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hermes", "llama3_json", "granite")])
def test_names_that_no_header_can_have(name: str) -> None:
    with pytest.raises(FormatError, match="a <b>"):
        format_of(name, CallableTool("a <b>", {"type": "object"}))


def format_of(name: str, tool: CallableTool) -> Format:
    return TOOL_CALL_PARSERS[name].output_format([tool], only_one=False)
