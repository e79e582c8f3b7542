"""Wrong bodies and their errors, word for word: the place at fault, and what belongs there."""

import json
from typing import Any

import httpx
import pytest

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBEDDINGS, RERANK, BATCHES, GENERATE = "/v1/embeddings", "/v1/rerank", "/v1/batches", "/generate"
USER = {"role": "user", "content": "a"}
BATCH = {"input_file_id": "file-a", "endpoint": CHAT, "completion_window": "24h"}
NUMBER = "9" * 5000  # Python reads no integer of so many digits


def said(*content: Any) -> dict[str, Any]:
    """The messages of a user."""
    return {"messages": [{"role": "user", "content": [*content]}]}


def claude(**body: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [USER]} | body


def items(*content: Any) -> dict[str, Any]:
    return {"input": [{"type": "message", "role": "user", "content": [*content]}]}


def unknown(place: str) -> tuple[str, str]:
    return place, f"unknown parameter {place!r}"


def at(place: str, words: str) -> tuple[str, str]:
    return place, f"{place}: {words}"


WRONG: list[tuple[str, dict[str, Any], tuple[str, str]]] = [
    # A member beside the one that has the name of its object's type.
    (CHAT, said({"type": "text", "text": "a", "cache": {}}), unknown("messages[0].content[0].cache")),
    (CHAT, said({"type": "text", "text": 1}), at("messages[0].content[0].text", "input should be a valid string")),
    (CHAT, said({"type": "text"}), at("messages[0].content[0].text", "field required")),
    (CHAT, said({"type": "image_url", "image_url": {"url": "u"}, "x": 1}), unknown("messages[0].content[0].x")),
    (
        CHAT,
        said({"type": "image_url", "image_url": "u"}),
        at("messages[0].content[0].image_url", "input should be a valid object"),
    ),
    (CHAT, said({"text": "a"}), at("messages[0].content[0].type", "field required")),
    (CHAT, said({"type": 1}), at("messages[0].content[0].type", "input should be one of 'text', 'image_url', not '1'")),
    (CHAT, said("a"), at("messages[0].content[0]", "input should be a valid object")),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 1}]},
        at("messages[0].content", "input should be a valid string, or a valid list"),
    ),
    (CHAT, {"messages": [{"role": "user"}]}, at("messages[0].content", "required in a message of role 'user'")),
    (CHAT, {"messages": [USER | {"x": 1}]}, unknown("messages[0].x")),
    (CHAT, {"messages": ["a"]}, at("messages[0]", "input should be a valid object")),
    (CHAT, {"messages": []}, at("messages", "list should have at least 1 item, not 0")),
    (CHAT, {"messages": [USER], "stream_options": {"x": 1}}, unknown("stream_options.x")),
    (CHAT, {"messages": [USER], "response_format": {"type": "text", "text": 1}}, unknown("response_format.text")),
    (
        CHAT,
        {"messages": [USER], "response_format": {"type": "json_schema"}},
        at("response_format.json_schema", "field required"),
    ),
    (
        CHAT,
        {"messages": [USER], "response_format": {"type": "x"}},
        at(
            "response_format.type",
            "input should be one of 'text', 'json_object', 'json_schema', 'structural_tag', not 'x'",
        ),
    ),
    (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
        unknown("tools[0].function.x"),
    ),
    (CHAT, {"messages": [USER], "tool_choice": "x"}, at("tool_choice", "input should be 'none', 'auto' or 'required'")),
    (
        CHAT,
        {"messages": [USER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        at("tool_choice.allowed_tools.mode", "field required"),
    ),
    (
        CHAT,
        {"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
        unknown("tool_choice.x"),
    ),
    (CHAT, {"messages": [USER], "stop": ["a", ""]}, at("stop[1]", "string should have at least 1 character")),
    # Numbers.
    (
        CHAT,
        {"messages": [USER], "temperature": 1e39},
        at("temperature", "input should be less than or equal to 3.4028235e+38, not 1e+39"),
    ),
    (
        CHAT,
        {"messages": [USER], "repetition_penalty": 1e-60},
        at("repetition_penalty", "input should be greater than 7.0064923e-46, not 1e-60"),
    ),
    (CHAT, {"messages": [USER], "n": 0}, at("n", "input should be greater than or equal to 1, not 0")),
    (
        CHAT,
        {"messages": [USER], "seed": 1e300},
        at(
            "seed",
            "input should be less than or equal to 9223372036854775807, not 1.0000000000000000525... * 10**300",
        ),
    ),
    (
        CHAT,
        {"messages": [USER], "logit_bias": {NUMBER: 1}},
        at("logit_bias", f"keys are token ids in decimal, not {'9' * 20!r}"),
    ),
    (CHAT, {"messages": [USER], "logit_bias": {"1": "a"}}, at("logit_bias.1", "input should be a valid number")),
    # Unions of lists: the place where the intended one ends.
    (TEXT, {"prompt": ["a", 1]}, at("prompt[1]", "input should be a valid string")),
    (TEXT, {"prompt": [1, "a"]}, at("prompt[1]", "input should be a valid integer")),
    (TEXT, {"prompt": [[1], []]}, at("prompt[1]", "list should have at least 1 item, not 0")),
    (TEXT, {"prompt": [[1, 2], [3, "a"]]}, at("prompt[1][1]", "input should be a valid integer")),
    (TEXT, {"prompt": [-1]}, at("prompt[0]", "input should be greater than or equal to 0, not -1")),
    (TEXT, {"prompt": "a", "str": 1}, ("str", "unknown parameter 'str'; did you mean 'store'?")),
    (RESPONSES, items({"type": "input_text", "text": "a", "x": 1}), unknown("input[0].content[0].x")),
    (
        RESPONSES,
        items({"type": "refusal", "refusal": 1}),
        at("input[0].content[0].refusal", "input should be a valid string"),
    ),
    (RESPONSES, {"input": [USER | {"x": 1}]}, unknown("input[0].x")),
    (
        RESPONSES,
        {"input": [{"type": "reasoning", "encrypted_content": "a"}]},
        (
            "input[0].encrypted_content",
            "parameter 'input[0].encrypted_content' is not supported: only the server that wrote it can read it",
        ),
    ),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "text", "text": 1}}}, unknown("text.format.text")),
    (
        RESPONSES,
        {"input": "a", "tool_choice": {"type": "allowed_tools", "tools": []}},
        at("tool_choice.mode", "field required"),
    ),
    (
        MESSAGES,
        claude(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]),
        unknown("messages[0].content[0].x"),
    ),
    (
        MESSAGES,
        claude(
            messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u", "x": 1}}]}]
        ),
        unknown("messages[0].content[0].source.x"),
    ),
    (
        MESSAGES,
        claude(messages=[{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]),
        at("messages[0].content[0].type", "a message of role 'user' can have text, image, tool_result, not thinking"),
    ),
    (
        MESSAGES,
        claude(tool_choice={"type": "x"}),
        at("tool_choice.type", "input should be one of 'auto', 'any', 'tool', 'none', not 'x'"),
    ),
    (EMBEDDINGS, {"input": ["a", 1]}, at("input[1]", "input should be a valid string")),
    (EMBEDDINGS, {"input": "a", "x": 1}, unknown("x")),
    (RERANK, {"query": "a", "documents": [{"text": "a", "x": 1}]}, unknown("documents[0].x")),
    (RERANK, {"query": 1, "documents": ["a"]}, at("query", "input should be a valid string, or a valid object")),
    (BATCHES, BATCH | {"metadata": {"a": 1}}, at("metadata.a", "input should be a valid string")),
    (
        BATCHES,
        BATCH | {"output_expires_after": {"anchor": "created_at", "seconds": 9e9, "x": 1}},
        unknown("output_expires_after.x"),
    ),
    (GENERATE, {"text": "a", "sampling_params": {"x": 1}}, unknown("sampling_params.x")),
]


async def test_an_error_names_the_place_at_fault(client: httpx.AsyncClient) -> None:
    for path, body, (param, message) in WRONG:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["message"] == message, body
        assert error.get("param", param) == param, body  # Anthropic's errors have none


async def test_null_under_any_name_is_nothing(client: httpx.AsyncClient) -> None:
    for path, body in [
        (CHAT, {"messages": [USER | {"x": None}], "x": None, "stream": True, "stream_options": {"x": None}}),
        (CHAT, said({"type": "text", "text": "a", "x": None})),
        (TEXT, {"prompt": "a", "tools": None, "x": None}),
        (RESPONSES, items({"type": "input_text", "text": "a", "x": None}) | {"x": None}),
        (RESPONSES, {"input": [USER | {"x": None}]}),
        (MESSAGES, claude(x=None, messages=[USER | {"x": None}], system=[{"type": "text", "text": "a", "x": None}])),
        (EMBEDDINGS, {"input": "a", "x": None}),
        (RERANK, {"query": "a", "documents": [{"text": "a", "x": None}], "x": None}),
        (GENERATE, {"text": "a", "sampling_params": {"x": None}, "x": None}),
    ]:
        assert (await client.post(path, json=body)).status_code == 200, body


@pytest.mark.parametrize("place", ["seed", "temperature", "stop_token_ids", "x"])
async def test_an_integer_of_any_length_is_one_clear_error(client: httpx.AsyncClient, place: str) -> None:
    body = json.dumps({"prompt": "a", place: "NUMBER"}).replace('"NUMBER"', NUMBER)
    answer = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the body has an integer of more than 640 digits; write it as text, or as a decimal number"
    )
