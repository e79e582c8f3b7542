"""Forms of outputs: every parameter that sets one arrives upstream as a Grammar."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from pagewire.v1.common_pb2 import Grammar
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
# Properties are in an order of their own, and stay in it.
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "ä": {"type": "integer"}}, "required": ["z"]}
OBJECT = {"type": "object"}
TAGS = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]}

FORMS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar(json_schema=json.dumps(OBJECT))),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False)),
    ),
    (
        {"response_format": {"type": "structural_tag"} | TAGS},
        Grammar(structural_tag=json.dumps(TAGS, ensure_ascii=False)),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "ä"}}},
        Grammar(structural_tag='{"type": "structural_tag", "format": {"type": "const_string", "value": "ä"}}'),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False))),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, Grammar(json_schema='{"type": "null"}')),
    ({"structured_outputs": {"json_object": True}}, Grammar(json_schema=json.dumps(OBJECT))),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar(choice=Grammar.Choice(texts=["a", "b"]))),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(ebnf='root ::= "a"')),
    ({"structured_outputs": {"structural_tag": "{}"}}, Grammar(structural_tag="{}")),
    (
        {"structured_outputs": {"json": True, "whitespace_pattern": " ?"}},
        Grammar(json_schema="true", whitespace_pattern=" ?"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        Grammar(json_schema=json.dumps(OBJECT), disable_any_whitespace=True),
    ),
    ({"guided_json": SCHEMA}, Grammar(json_schema=json.dumps(SCHEMA, ensure_ascii=False))),
    ({"guided_regex": "a+"}, Grammar(regex="a+")),
    ({"guided_choice": ["a", "b"]}, Grammar(choice=Grammar.Choice(texts=["a", "b"]))),
    ({"guided_grammar": 'root ::= "a"'}, Grammar(ebnf='root ::= "a"')),
    ({"response_format": {"type": "json_object", "schema": {"a": 1}}}, Grammar(json_schema='{"a": 1}')),
    (
        {"structured_outputs": {"json": True, "disable_additional_properties": False}},
        Grammar(json_schema="true", disable_additional_properties=False),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}},
        Grammar(json_schema="{}", disable_additional_properties=True),
    ),
]


@pytest.mark.parametrize(("body", "grammar"), FORMS)
async def test_forms_reach_the_tokenizer(
    client: httpx.AsyncClient, fake: FakeTokenizer, body: dict[str, Any], grammar: Grammar
) -> None:
    for path, prompt in ((CHAT, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "p"})):
        assert (await client.post(path, json=prompt | body | {"n": 2, "max_tokens": 2})).status_code == 200
    assert [request.sampling_params.grammar for request in fake.received] == [grammar] * 4


async def test_text_and_null_ask_for_nothing(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for extra in ({"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}):
        answer = await client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2} | extra)
        assert answer.status_code == 200
    assert not any(request.sampling_params.HasField("grammar") for request in fake.received)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {}} | TAGS}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]


@pytest.mark.parametrize(("extra", "param"), WRONG)
async def test_wrong_forms_are_named(
    client: httpx.AsyncClient, fake: FakeTokenizer, extra: dict[str, Any], param: str
) -> None:
    answer = await client.post(CHAT, json={"messages": MESSAGES} | extra)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param), answer.json()
    assert not fake.received


async def test_the_forms_are_listed_by_the_names_of_the_parameter(client: httpx.AsyncClient) -> None:
    forms = "json, regex, choice, grammar, structural_tag and json_object"
    for given, found in (({}, "none of them"), ({"regex": "a", "grammar": "b"}, "regex and grammar")):
        answer = await client.post(CHAT, json={"messages": MESSAGES, "structured_outputs": given})
        message = f"structured_outputs must have exactly one of {forms}; it has {found}"
        assert answer.json()["error"]["message"] == message


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_the_schema_of_a_pydantic_model_arrives(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    with pytest.raises((openai.LengthFinishReasonError, pydantic.ValidationError)):  # the fake knows no grammar
        await ai.chat.completions.parse(model="fake", messages=MESSAGES, response_format=Person, max_tokens=3)
    schema = json.loads(fake.received[0].sampling_params.grammar.json_schema)
    assert list(schema["properties"]) == ["name", "age"] and schema["additionalProperties"] is False
