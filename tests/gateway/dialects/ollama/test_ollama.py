"""Ollama's API, as its clients call it."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.gateway.dialects.ollama.options import idle_seconds
from pagewire.gateway.dialects.ollama.requests import OllamaTurn
from pagewire.gateway.dialects.ollama.translate import messages_of
from pagewire.v1 import common_pb2
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import Model, running_gateway, wait_ready
from tests.gateway.core.test_keys import new
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.pagewire.tools.hub_server import hub

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = {"role": "user", "content": "hi"}
ASKED: dict[str, Any] = {"model": "fake", "messages": [USER], "options": {"seed": 3, "num_predict": 9}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
COUNTS = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
}  # fmt: skip


@pytest.fixture
async def fake(fake: FakeTokenizer) -> FakeTokenizer:
    """A tokenizer service, the model of which generates text."""
    fake.kind = common_pb2.MODEL_KIND_UNSPECIFIED
    return fake


async def test_a_model_for_vectors_generates_no_text(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.kind = common_pb2.MODEL_KIND_EMBED
    for path, prompt in ((CHAT, {"messages": [USER]}), (GENERATE, {"prompt": "hi"})):
        answer = await client.post(path, json={"model": "fake", **prompt})
        assert answer.status_code == 400 and "'fake' does not generate text" in answer.json()["error"]


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return lines(answer) if body.get("stream") is not False and path in (CHAT, GENERATE) else answer.json()


# -- outputs -----------------------------------------------------------------------------------------------------------


async def test_a_chat_is_lines_or_one_object(client: httpx.AsyncClient) -> None:
    text = expected_text("<user>hi<assistant>", 3, 9)
    *parts, last = await post(client, CHAT, ASKED)
    assert "".join(part["message"]["content"] for part in parts) == text
    assert {part["done"] for part in parts} == {False}
    assert (last["done"], last["done_reason"], last["message"]) == (
        True,
        "length",
        {"role": "assistant", "content": ""},
    )
    whole = await post(client, CHAT, ASKED | {"stream": False})
    assert (whole["message"]["content"], whole["done_reason"], whole["model"]) == (text, "length", "fake")
    for one in (last, whole):
        assert one.keys() >= COUNTS and all(isinstance(one[name], int) for name in COUNTS)
        assert (one["eval_count"], one["prompt_eval_count"]) == (9, len("<user>hi<assistant>"))
        assert one["total_duration"] >= one["eval_duration"] > 0
        assert one["created_at"].endswith("Z")


async def test_clients_need_not_say_that_a_body_is_json(client: httpx.AsyncClient) -> None:
    body = json.dumps(ASKED | {"stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post(CHAT, content=body, headers=form)).status_code == 200
    # A page of another site may not: a browser would send it without asking.
    refused = await client.post(CHAT, content=body, headers=form | {"origin": "https://elsewhere.example"})
    assert (refused.status_code, refused.json()) == (
        400, {"error": "send a JSON object with the header Content-Type: application/json"},
    )  # fmt: skip


async def test_options_are_parameters_of_a_chat(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.25, "seed": 11, "stop": ["x", "y"],
        "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repeat_last_n": -1,
        "num_thread": 4, "num_gpu": 1, "num_batch": 512, "num_keep": 4, "use_mmap": True, "numa": False, "mirostat": 0,
        "typical_p": 1.0, "tfs_z": 1.0,
    }  # fmt: skip
    await post(client, CHAT, ASKED | {"options": options})
    request = fake.received[-1]
    params = request.sampling_params
    assert (params.max_tokens, params.seed, params.top_k, params.temperature) == (7, 11, 4, 0.5)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert list(request.stop) == ["x", "y"] and request.clamp_max_tokens
    await post(client, CHAT, ASKED | {"options": options | {"repeat_last_n": 0, "num_predict": -1}})
    params = fake.received[-1].sampling_params
    assert not any(params.HasField(name) for name in ("max_tokens", "repetition_penalty", "frequency_penalty"))


async def test_a_form_is_json_or_a_schema(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, expected in (("json", {"type": "object"}), (schema, schema), ("", None), (None, None)):
        for path, body in ((CHAT, ASKED), (GENERATE, {"model": "fake", "prompt": "p", "options": {"num_predict": 3}})):
            await post(client, path, body | {"format": form})
            params = fake.received[-1].sampling_params
            assert (json.loads(params.grammar.json_schema) if params.HasField("grammar") else None) == expected


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_log_probabilities(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "fake", "prompt": "p", "messages": [USER], "options": {"num_predict": 4, "seed": 1}}
    body.pop("prompt" if path == CHAT else "messages")
    whole = await post(client, path, body | {"logprobs": True, "top_logprobs": 2, "stream": False})
    text = whole["message"]["content"] if path == CHAT else whole["response"]
    assert "".join(entry["token"] for entry in whole["logprobs"]) == text
    assert [len(entry["top_logprobs"]) for entry in whole["logprobs"]] == [2] * 4
    parts = await post(client, path, body | {"logprobs": True})
    assert [entry["token"] for part in parts for entry in part.get("logprobs", ())] == list(text)
    assert "logprobs" not in await post(client, path, body | {"stream": False})


async def test_a_prompt_of_a_base_model_is_continued(client: httpx.AsyncClient) -> None:
    body = {"model": "fake", "prompt": "abc", "options": {"seed": 2, "num_predict": 5}}
    *parts, last = await post(client, GENERATE, body)
    assert "".join(part["response"] for part in parts) == expected_text("abc", 2, 5)
    assert (last["response"], last["done_reason"]) == ("", "length") and "context" not in last


async def test_without_a_prompt_the_model_is_loaded_or_put_away(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for keep_alive, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
        loaded = (await client.post(GENERATE, json={"model": "fake", "keep_alive": keep_alive})).json()
        assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, reason)
        loaded = (await client.post(CHAT, json={"model": "fake", "messages": [], "keep_alive": keep_alive})).json()
        assert (loaded["message"], loaded["done_reason"]) == ({"role": "assistant", "content": ""}, reason)
    assert not fake.received
    assert [one["name"] for one in (await client.get("/api/ps")).json()["models"]] == ["fake:latest", "alias:latest"]
    fake.sleep_level = 1
    assert (await client.get("/api/ps")).json() == {"models": []}


async def test_a_name_may_have_the_tag_latest(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    whole = await post(client, CHAT, ASKED | {"model": "alias:latest", "stream": False})
    assert (whole["model"], fake.received[-1].model) == ("alias:latest", "alias")
    for path in (CHAT, GENERATE, "/api/show", "/api/embed"):
        for name in ("nobody", "fake:7b"):
            body = {"model": name, "prompt": "p", "messages": [USER], "input": "i"}
            known = {CHAT: ("messages",), GENERATE: ("prompt",), "/api/embed": ("input",), "/api/show": ()}[path]
            answer = await client.post(path, json={"model": name, **{key: body[key] for key in known}})
            assert answer.status_code == 404 and name in answer.json()["error"]


async def test_a_service_that_dies_is_not_noticed(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.break_at = 4
    parts = await post(client, CHAT, ASKED)
    assert "".join(part["message"]["content"] for part in parts) == expected_text("<user>hi<assistant>", 3, 9)


async def test_an_error_within_a_stream_is_its_last_line(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (4, RpcError(grpc.StatusCode.INTERNAL, "it broke"))
    parts = await post(client, CHAT, ASKED)
    assert "message" in parts[0] and parts[-1] == {"error": "it broke"}


async def test_a_whole_answer_can_be_kept_and_lines_cannot(client: httpx.AsyncClient) -> None:
    key, body = {"idempotency-key": "k"}, ASKED | {"options": {"num_predict": 5}}
    answers = [await client.post(CHAT, json=body | {"stream": False}, headers=key) for _ in range(2)]
    assert len({answer.json()["message"]["content"] for answer in answers}) == 1
    refused = await client.post(CHAT, json=body, headers={"idempotency-key": "other"})
    assert refused.status_code == 400 and "lines of JSON cannot be resumed" in refused.json()["error"]


async def test_keys_and_streams_that_are_kept(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="secret", resumable_streams=True) as client:
        answer = await client.post(CHAT, json=ASKED)
        assert answer.status_code == 401 and answer.json()["error"].startswith("missing or wrong API key")
        client.headers["authorization"] = "Bearer secret"
        await wait_ready(client)
        assert (await post(client, CHAT, ASKED))[-1]["done"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"messages": [USER]}, "model: field required"),
        (CHAT, {"model": "fake", "messages": [USER], "options": {"mirostat": 1}}, "options.mirostat"),
        (CHAT, {"model": "fake", "messages": [USER], "options": {"tfs_z": 0.5}}, "options.tfs_z"),
        (CHAT, {"model": "fake", "messages": [USER], "options": {"num_ctxx": 1}}, "did you mean 'num_ctx'?"),
        (CHAT, {"model": "fake", "messages": [USER], "options": {"top_p": 2}}, "options.top_p: "),
        (CHAT, {"model": "fake", "messages": [USER], "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
         "options.repeat_last_n: penalties look at all tokens (-1) or are off (0)"),
        (CHAT, {"model": "fake", "messages": [USER], "shift": True}, "shift"),
        (CHAT, {"model": "fake", "messages": [USER], "keep_alive": "5 minutes"}, "keep_alive: "),
        (CHAT, {"model": "fake", "messages": [USER], "format": "yaml"}, "format: "),
        (GENERATE, {"model": "m", "prompt": "p", "context": [1, "2"]}, "context[1]: input should be a valid integer"),
        (GENERATE, {"model": "m", "prompt": "p", "context": [2**70]}, "context[0]: input should be less than"),
        (CHAT, {"model": "fake", "messages": [USER], "top_logprobs": 2}, "top_logprobs needs logprobs: true"),
        (CHAT, {"model": "fake", "messages": [USER], "tools": [ADD]}, "'fake' does not support tools"),
        (CHAT, {"model": "fake", "messages": [USER], "think": True}, "'fake' does not support thinking"),
        (CHAT, {"model": "fake", "messages": [USER], "think": "very"}, "think: "),
        (CHAT, {"model": "fake", "messages": [{"content": "x"}]}, "messages[0].role: field required"),
        (GENERATE, {"model": "fake", "prompt": "p", "template": "{{ .Prompt }}"}, "parameter 'template' is not"),
        (GENERATE, {"model": "fake", "prompt": "p", "width": 512}, "parameter 'width' is not"),
        (GENERATE, {"model": "fake", "prompt": "p", "suffix": "s"}, "'fake' does not support insert"),
        (GENERATE, {"model": "fake", "prompt": "p", "raw": True, "system": "s"}, "raw excludes system"),
        (GENERATE, {"model": "fake", "prompt": "p", "system": "s"}, "system needs a chat template"),
        ("/api/embed", {"model": "fake"}, "input: field required"),
        ("/api/show", {}, "model: field required"),
        ("/api/pull", {"model": "x", "insecure": True}, "insecure: "),
    ],
)  # fmt: skip
async def test_refusals_name_what_is_wrong(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"} and words in answer.json()["error"]


async def test_models_are_not_made_here(client: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("POST", "/api/create", 501),
        ("POST", "/api/copy", 501),
        ("DELETE", "/api/delete", 501),
        ("POST", "/api/push", 501),
        ("POST", "/api/blobs/sha256:1", 501),
        ("HEAD", "/api/blobs/sha256:1", 501),
        ("GET", "/api/nothing", 404),
        ("POST", "/api/version", 405),
    ):
        answer = await client.request(method, path, json={"model": "m"})
        assert answer.status_code == status
        assert method == "HEAD" or isinstance(answer.json()["error"], str)


# -- models ------------------------------------------------------------------------------------------------------------


async def test_models_are_listed_as_their_files_say(http: httpx.AsyncClient) -> None:
    [tag], [loaded] = [(await http.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")]
    size = 98_362_432
    details = {
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"], "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }  # fmt: skip
    for one in (tag, loaded):
        assert (one["name"], one["model"], one["details"]) == ("m:latest", "m:latest", details)
        assert one["size"] == size and len(one["digest"]) == 64
    assert loaded["expires_at"] > "2300"
    shown = (await http.post("/api/show", json={"model": "m"})).json()
    assert shown["details"] == details and shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["general.parameter_count"] == 134515008
    assert shown["model_info"]["llama.context_length"] == loaded["context_length"]


# -- conversations -----------------------------------------------------------------------------------------------------


async def test_reasoning_and_calls_are_members_of_the_message(http: httpx.AsyncClient, model: Model) -> None:
    calls = [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in (1, 2)]
    model.output = "<think>\nHm.\n</think>\n\nNow. " + "\n".join(calls)
    body = {"model": "m", "messages": [USER], "tools": [ADD], "options": {"num_predict": 200}}
    whole = await post(http, CHAT, body | {"stream": False})
    parts = await post(http, CHAT, body)
    found = [part["message"] for part in parts]
    assert whole["message"]["thinking"] == "".join(part.get("thinking", "") for part in found) == "Hm."
    assert whole["message"]["content"].strip() == "".join(part["content"] for part in found).strip() == "Now."
    for called in (whole["message"]["tool_calls"], [call for part in found for call in part.get("tool_calls", ())]):
        assert [call["function"] for call in called] == [
            {"index": 0, "name": "add", "arguments": {"a": 1}}, {"index": 1, "name": "add", "arguments": {"a": 2}},
        ]  # fmt: skip
    assert whole["done_reason"] == parts[-1]["done_reason"] == "stop"


async def test_thinking_is_as_long_as_asked(http: httpx.AsyncClient, model: Model) -> None:
    model.output = "Yes."
    empty = "<think>\n\n</think>\n\n"
    for think, is_off in ((False, True), ("none", True), (True, False), ("high", False), (None, False)):
        await post(http, CHAT, {"model": "m", "messages": [USER], "think": think})
        assert model.prompt.endswith(empty) == is_off


async def test_a_prompt_is_a_message_with_a_context(http: httpx.AsyncClient, model: Model) -> None:
    model.output = "Yes."
    first = await post(http, GENERATE, {"model": "m", "prompt": "One?", "system": "Be brief.", "stream": False})
    assert model.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?")
    before = model.prompt
    assert first["response"] == "Yes." and first["context"][: len(model.encode(before))] == model.encode(before)
    await post(http, GENERATE, {"model": "m", "prompt": "Two?", "context": first["context"], "stream": False})
    assert model.prompt.startswith(f"{before}Yes.") and "user\nTwo?" in model.prompt[len(before) :]
    raw = await post(http, GENERATE, {"model": "m", "prompt": "Two?", "raw": True, "stream": False})
    assert model.prompt == "Two?" and "context" not in raw


async def test_the_oldest_messages_are_dropped(http: httpx.AsyncClient, model: Model) -> None:
    model.output = "Yes."
    turns = [{"role": "system", "content": "Be brief."}]
    for number in range(40):
        turns += [
            {"role": "user", "content": f"Question {number}? " + "word " * 20},
            {"role": "assistant", "content": "No."},
        ]
    turns.append({"role": "user", "content": "The last question?"})
    body = {"model": "m", "messages": turns, "stream": False, "options": {"num_ctx": 200}}
    answer = await post(http, CHAT, body)
    assert answer["prompt_eval_count"] <= 200
    assert "Be brief." in model.prompt and "The last question?" in model.prompt and "Question 0?" not in model.prompt
    await post(http, CHAT, body | {"options": {}, "truncate": False})
    assert "Question 0?" in model.prompt


def test_results_name_the_call_that_they_answer() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    other = {"id": "own", "function": {"name": "now", "arguments": None}}
    turns = [
        {"role": "assistant", "tool_calls": [call, call, other]},
        {"role": "tool", "content": "noon", "tool_name": "now"},
        {"role": "tool", "content": "2", "tool_name": "add"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "?", "tool_name": "unknown"},
    ]
    asked, now, first, second, unknown = messages_of([OllamaTurn.model_validate(turn) for turn in turns])
    assert asked.tool_calls is not None
    ids = [one.id for one in asked.tool_calls]
    assert len(set(ids)) == 3 and ids[2] == "own"
    assert [one.tool_call_id for one in (now, first, second, unknown)] == ["own", ids[0], ids[1], None]
    assert [one.function.arguments for one in asked.tool_calls] == ['{"a": 1}', '{"a": 1}', "{}"]


async def test_images_precede_the_text(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    image = base64.b64encode(b"\x89PNG").decode()
    await post(client, CHAT, ASKED | {"messages": [USER | {"images": [image]}]})
    [message] = fake.received[-1].chat.messages
    assert [part.image.url or part.text for part in message.parts] == [f"data:;base64,{image}", "hi"]


# -- vectors -----------------------------------------------------------------------------------------------------------


async def test_vectors_of_texts(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    ours = (await client.post("/v1/embeddings", json={"input": ["a", "bc"]})).json()["data"]
    answer = await post(client, "/api/embed", {"model": "fake", "input": ["a", "bc"], "keep_alive": "5m"})
    assert answer["embeddings"] == [one["embedding"] for one in ours]
    assert answer["prompt_eval_count"] == 3 and answer["total_duration"] > 0
    assert fake.vector_calls[-1].options.truncate_prompt_tokens == -1
    one = await post(client, "/api/embeddings", {"model": "fake", "prompt": "bc"})
    assert one == {"embedding": ours[1]["embedding"]}
    await post(client, "/api/embed", {"model": "fake", "input": "a", "truncate": False, "dimensions": 2})
    call = fake.vector_calls[-1]
    assert not call.options.HasField("truncate_prompt_tokens") and call.dimensions == 2
    for empty in ("", []):
        assert (await post(client, "/api/embed", {"model": "fake", "input": empty}))["embeddings"] == []
    assert (await post(client, "/api/embeddings", {"model": "fake", "prompt": ""})) == {"embedding": []}


# -- durations ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_idle_times_are_durations_of_go(hours: int, minutes: int, seconds: int) -> None:
    text = f"{hours}h{minutes}m{seconds}s"
    assert idle_seconds(text) == 3600 * hours + 60 * minutes + seconds
    assert idle_seconds(f"-{text}") == -(3600 * hours + 60 * minutes + seconds)


@pytest.mark.parametrize(("text", "seconds"), [("1.5h", 5400), ("300ms", 0.3), ("0", 0), ("-1s", -1)])
def test_short_forms(text: str, seconds: float) -> None:
    assert idle_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5 m", "m", "1d", "h1", "--1s", "9" * 40 + "s"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        idle_seconds(text)


# -- downloads ---------------------------------------------------------------------------------------------------------


async def test_a_model_of_the_hub_is_pulled(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"it-Q8_0.gguf": bytes(200_000), "it-Q4_0.gguf": b"GGUF"}
    with hub("me/it", files) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        answer = await client.post("/api/pull", json={"model": "hf.co/me/it:Q8_0"})
        first, *pulling, verifying, writing, last = lines(answer)
        assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
        assert (verifying["status"], writing["status"]) == ("verifying sha256 digest", "writing manifest")
        assert (pulling[-1]["completed"], pulling[-1]["total"]) == (200_000, 200_000)
        assert pulling[-1]["digest"].startswith("sha256:")
        again = await client.post("/api/pull", json={"name": "hf.co/me/it:q8_0", "stream": False})
        assert (again.status_code, again.json()) == (200, {"status": "success"})
        missing = await client.post("/api/pull", json={"model": "hf.co/me/it:Q9"})
        assert lines(missing)[-1] == {"error": "pull model manifest: me/it has no GGUF file 'Q9'; it has Q4_0, Q8_0"}
        whole = await client.post("/api/pull", json={"model": "me/private", "stream": False})
        assert whole.status_code == 500 and "hf auth login" in whole.json()["error"]
    assert [path.name for path in (tmp_path / "hub").glob("models--*/snapshots/*/*")] == ["it-Q8_0.gguf"]


async def test_a_served_model_is_there(client: httpx.AsyncClient) -> None:
    for name in ("fake", "fake:latest"):
        answer = await client.post("/api/pull", json={"model": name})
        assert [one["status"] for one in lines(answer)][::3] == ["pulling manifest", "success"]


@pytest.mark.parametrize("name", ["llama3.2", "/etc/passwd", "../x", "library/llama3:8b:1"])
async def test_only_known_names_are_pulled(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post("/api/pull", json={"model": name})
    assert answer.status_code == 404 and "is neither hf.co/ORG/REPO:QUANT nor one of" in answer.json()["error"]


async def test_a_pull_needs_the_key_of_an_operator(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = new(keys, "client")
    async with running_gateway(address, api_key="admin", api_key_file=str(keys)) as client:
        for headers, status in ((key, 403), ({"authorization": "Bearer admin"}, 200)):
            answer = await client.post("/api/pull", json={"model": "fake"}, headers=headers)
            assert answer.status_code == status
