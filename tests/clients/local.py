"""Clients of Ollama's and of TGI's API, each where it is installed; see README.md."""

import asyncio
import base64
import importlib.util
import os
from typing import Any

from pydantic import BaseModel

CHAT, EMBED, SCRIPTED = (os.environ[f"PAGEWIRE_{name}"].removesuffix("/v1") for name in ("CHAT", "EMBED", "SCRIPTED"))
MODEL, EMBEDS = "smollm2-135m-instruct", "all-minilm-l6-v2"
QUESTION = "What is the capital of France? Answer in one sentence."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 40, "num_ctx": 2048}
PIXEL = base64.b64encode(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;").decode()


class City(BaseModel):
    name: str
    country: str


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def ollama() -> None:
    import ollama

    client, scripted, embed = (ollama.Client(url) for url in (CHAT, SCRIPTED, EMBED))
    whole = client.chat(MODEL, MESSAGES, options=OPTIONS, keep_alive="10m")
    assert whole.message.content and "Paris" in whole.message.content and whole.done_reason == "stop"
    assert whole.eval_count and whole.eval_duration and whole.prompt_eval_count and whole.total_duration
    parts = list(client.chat(MODEL, MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content and parts[-1].done
    shaped = client.chat(MODEL, MESSAGES, format=City.model_json_schema(), options=OPTIONS)
    City.model_validate_json(shaped.message.content or "")
    scored = client.chat(MODEL, MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert scored.logprobs and len(scored.logprobs[0].top_logprobs or ()) == 2
    first = client.generate(MODEL, QUESTION, system="Be brief.", options=OPTIONS)
    assert first.response and first.context
    assert client.generate(MODEL, "And of Italy?", context=first.context, options=OPTIONS).response
    assert client.generate(MODEL, "The capital of France is", raw=True, options=OPTIONS).response
    assert client.generate(MODEL, "", keep_alive=0).done_reason == "unload"
    [listed] = client.list().models
    assert listed.model == f"{MODEL}:latest" and listed.size and listed.details and listed.digest
    assert [one.model for one in client.ps().models] == [listed.model]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion"] and shown.modelinfo and shown.modelinfo["llama.context_length"] == 4096
    tools = scripted.show("scripted").capabilities
    assert tools == ["completion", "tools", "thinking"]
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    for stream in (False, True):
        answer: Any = scripted.chat("scripted", messages, tools=[add], think=True, stream=stream)
        found = list(answer) if stream else [answer]
        [call] = [call for one in found for call in one.message.tool_calls or ()]
        assert call.function.arguments == {"a": 2, "b": 3}
        assert "".join(one.message.thinking or "" for one in found).strip() == "A tool."
        reply = [*messages, {"role": "assistant", "tool_calls": [call]}]
        reply.append({"role": "tool", "content": str(add(**call.function.arguments)), "tool_name": call.function.name})
        assert scripted.chat("scripted", reply, tools=[add]).message.content == "It is 5."
    vectors = embed.embed(EMBEDS, ["a", "b"])
    assert [len(vector) for vector in vectors.embeddings] == [384, 384]
    assert list(embed.embeddings(EMBEDS, "a").embedding) == list(vectors.embeddings[0])
    assert [one.status for one in client.pull(MODEL, stream=True)][-1] == "success"
    for wrong, status in (
        (lambda: client.chat("nobody", MESSAGES), 404),
        (lambda: client.chat(MODEL, MESSAGES, tools=[add]), 400),
        (lambda: client.chat(MODEL, [MESSAGES[0] | {"images": [PIXEL]}]), 400),
        (lambda: client.create("mine", from_=MODEL), 501),
    ):
        try:
            wrong()
        except ollama.ResponseError as error:
            assert error.status_code == status, error
        else:
            raise AssertionError("it was taken")

    async def asynchronously() -> None:
        client = ollama.AsyncClient(CHAT)
        text = ""
        async for part in await client.chat(MODEL, MESSAGES, options=OPTIONS, stream=True):
            text += part.message.content or ""
        assert text == whole.message.content

    asyncio.run(asynchronously())


def langchain_ollama() -> None:
    from langchain_core.messages import ToolMessage
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    common: Any = {"temperature": 0, "num_predict": 40, "num_ctx": 2048}
    model = ChatOllama(model=MODEL, base_url=CHAT, validate_model_on_init=True, **common)
    whole = model.invoke(QUESTION)
    assert "Paris" in whole.content and whole.usage_metadata and whole.usage_metadata["output_tokens"]
    assert whole.response_metadata["done_reason"] == "stop"
    assert "".join(str(part.content) for part in model.stream(QUESTION)) == whole.content
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(QUESTION), City)
    caller = ChatOllama(model="scripted", base_url=SCRIPTED, reasoning=True).bind_tools([add])
    called = caller.invoke("What is 2 + 3?")
    [call] = called.tool_calls
    assert call["args"] == {"a": 2, "b": 3} and called.additional_kwargs["reasoning_content"].strip() == "A tool."
    answer = caller.invoke(["What is 2 + 3?", called, ToolMessage("5", tool_call_id=call["id"])])
    assert answer.content == "It is 5."
    text = OllamaLLM(model=MODEL, base_url=CHAT, **common)
    assert "".join(text.stream(QUESTION)) == text.invoke(QUESTION)
    assert [len(one) for one in OllamaEmbeddings(model=EMBEDS, base_url=EMBED).embed_documents(["a", "b"])] == [
        384,
        384,
    ]


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.ollama import OllamaEmbedding
    from llama_index.llms.ollama import Ollama

    model = Ollama(model=MODEL, base_url=CHAT, temperature=0, additional_kwargs={"num_predict": 40})
    assert model.get_context_window() == 4096
    whole = model.chat([ChatMessage(role="user", content=QUESTION)])
    assert "Paris" in str(whole.message.content)
    *_, last = model.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert last.message.content == whole.message.content
    assert model.complete("The capital of France is").text
    *_, last_text = model.stream_complete("The capital of France is")
    assert last_text.text
    assert isinstance(model.as_structured_llm(City).complete(QUESTION).raw, City)
    caller = Ollama(model="scripted", base_url=SCRIPTED, context_window=4096)
    from llama_index.core.tools import FunctionTool

    response = caller.chat_with_tools([FunctionTool.from_defaults(add)], user_msg="What is 2 + 3?")
    [call] = caller.get_tool_calls_from_response(response)
    assert call.tool_kwargs == {"a": 2, "b": 3}
    vectors = OllamaEmbedding(model_name=EMBEDS, base_url=EMBED).get_text_embedding_batch(["a", "b"])
    assert [len(vector) for vector in vectors] == [384, 384]


def litellm() -> None:
    import litellm

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    common: Any = {"api_base": CHAT, "temperature": 0, "max_tokens": 40, "num_retries": 0}
    for provider in ("ollama", "ollama_chat"):
        whole = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **common)
        assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens
        parts = list(litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **common))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        shaped = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, response_format=City, **common)
        City.model_validate_json(shaped.choices[0].message.content)
    scripted = common | {"api_base": SCRIPTED}
    called = litellm.completion(model="ollama_chat/scripted", messages=MESSAGES, tools=[tool], **scripted)
    [call] = called.choices[0].message.tool_calls
    assert call.function.name == "add"
    vectors = litellm.embedding(model=f"ollama/{EMBEDS}", input=["a", "b"], api_base=EMBED)
    assert [len(one["embedding"]) for one in vectors.data] == [384, 384]


def huggingface_hub() -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import ValidationError

    for path in ("", "/generate"):
        client = InferenceClient(model=CHAT + path)
        whole = client.text_generation("The capital of France is", max_new_tokens=8)
        assert "Paris" in whole
        detailed = client.text_generation("The capital of France is", max_new_tokens=8, details=True)
        assert detailed.generated_text == whole and detailed.details and len(detailed.details.tokens) == 8
        parts = list(client.text_generation("The capital of France is", max_new_tokens=8, stream=True))
        assert "".join(parts) == whole
        *_, last = client.text_generation("The capital of France is", max_new_tokens=8, stream=True, details=True)
        assert last.generated_text == whole and last.details and last.details.finish_reason == "length"
        try:
            client.text_generation("x", watermark=True)
        except ValidationError:
            pass
        else:
            raise AssertionError("a watermark was taken")
    chat = InferenceClient(base_url=CHAT).chat_completion(MESSAGES, model=MODEL, max_tokens=20, temperature=0)
    assert "Paris" in (chat.choices[0].message.content or "")


for run in (ollama, langchain_ollama, llama_index, litellm, huggingface_hub):
    packages = {"llama_index": "llama_index.llms.ollama"}
    try:
        found = importlib.util.find_spec(packages.get(run.__name__, run.__name__)) is not None
    except ModuleNotFoundError:
        found = False
    if found:
        run()
        print(f"{run.__name__}: ok")
