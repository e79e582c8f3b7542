"""Tools, calls, documents and reasoning reach the model as transformers' apply_chat_template would have it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.pool.codec import Codec
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.templates.chat import ChatError, render_chat
from pagewire.services.tokenizer.templates.chat_messages import to_chat
from pagewire.v1.inference_pb2 import ChatMessage, ChatPrompt, Tool, ToolCall
from pagewire.wire.rpc import RpcError
from tests.services.tokenizer import tiny_tokenizers
from tests.services.tokenizer.chat_templates import FAMILIES

# Neither sorted nor of doubles: what a protobuf Struct would have changed.
SCHEMA = {
    "type": "object",
    "properties": {"zip": {"type": "integer", "minimum": 1, "maximum": 9007199254740993}, "city": {"type": "string"}},
    "required": ["zip", "city"],
}
TOOL = Tool(name="get_weather", description="Weather of a <place> & time", parameters_json=json.dumps(SCHEMA))
ARGUMENTS = '{"zip": 1, "scale": 1.0, "city": "Zürich"}'
CALL_ID = "abcdefgh1"
TURNS = [
    ChatMessage(role="user", content="How is it?"),
    ChatMessage(
        role="assistant", tool_calls=[ToolCall(id=CALL_ID, name="get_weather", arguments=ARGUMENTS)], reasoning="Hm.\n"
    ),
    ChatMessage(role="tool", content='{"sky": "grey"}', tool_call_id=CALL_ID),
    ChatMessage(role="user", content="And now?"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tiny_tokenizers.save_byte_level(tmp_path_factory.mktemp("chat"))


def render(prompt: ChatPrompt, template: str) -> str:
    return render_chat(to_chat(prompt), template, {"bos_token": "<s>", "eos_token": "</s>"})


def plain_messages(arguments: Any) -> list[dict[str, Any]]:
    """The conversation as a user of transformers would write it."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    thought = {"reasoning_content": "Hm.\n", "thinking": "Hm.\n"}
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]} | thought,
        {"role": "tool", "content": '{"sky": "grey"}', "tool_call_id": CALL_ID},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
def test_equals_transformers(directory: Path, family: str, tools: list[Tool]) -> None:
    template = FAMILIES[family]
    function = {"name": TOOL.name, "description": TOOL.description, "parameters": SCHEMA}
    theirs = PreTrainedTokenizerFast.from_pretrained(directory).apply_chat_template(
        # DeepSeek's templates take arguments as text only.
        plain_messages(ARGUMENTS if "deepseek" in family else json.loads(ARGUMENTS)),
        chat_template=template,
        tools=[{"type": "function", "function": function}] if tools else None,
        tokenize=False,
        add_generation_prompt=True,
    )
    ours = render_chat(
        to_chat(ChatPrompt(messages=TURNS, tools=tools)), template, load_tokenizer(directory).special_tokens
    )
    assert ours == theirs


def test_arguments_are_an_object_or_text_as_the_template_takes_them() -> None:
    chat = to_chat(ChatPrompt(messages=TURNS))
    assert '"arguments": {"zip": 1, "scale": 1.0, "city": "Zürich"}}' in render(
        ChatPrompt(messages=TURNS), FAMILIES["qwen3"]
    )
    for copy in (chat, pickle.loads(pickle.dumps(chat))):  # to a worker process
        assert f"```json\n{ARGUMENTS}\n```" in render_chat(copy, FAMILIES["deepseek_v3"], {})


def test_arguments_that_are_no_object_do_not_end_the_conversation() -> None:
    for text in ('{"zip": 1', "[1]", "zip=1"):
        turns = [ChatMessage(role="assistant", tool_calls=[ToolCall(id=CALL_ID, name="f", arguments=text)])]
        assert f'"arguments": {text}}}' in render(ChatPrompt(messages=turns), FAMILIES["qwen3"])
    turns = [ChatMessage(role="assistant", tool_calls=[ToolCall(id=CALL_ID, name="f")])]
    assert '"arguments": {}}' in render(ChatPrompt(messages=turns), FAMILIES["qwen3"])
    assert "```json\n{}\n```" in render(ChatPrompt(messages=turns), FAMILIES["deepseek_v3"])


def test_documents_are_shown_by_templates_that_know_them() -> None:
    documents = ['{"title": "T", "text": "x", "page": 7}', '{"title": "U", "text": "y"}']
    prompt = ChatPrompt(messages=TURNS[:1], documents_json=documents)
    template = (
        "{{ documents is none }}{% for d in documents or [] %}[{{ d.title }}|{{ d.text }}|{{ d.page }}]{% endfor %}"
    )
    assert render(prompt, template) == "False[T|x|7][U|y|]"
    assert render(ChatPrompt(messages=TURNS[:1]), template) == "True"


def test_reasoning_is_shown_where_a_template_reads_it() -> None:
    turns = [TURNS[0], ChatMessage(role="assistant", content="Grey.", reasoning="Hm."), TURNS[3]]
    assert "<think>\nHm.\n</think>\n\nGrey.<|im_end|>" in render(ChatPrompt(messages=turns), FAMILIES["qwen3"])
    with_call = ChatMessage(role="assistant", content="Wait.", reasoning="Hm.", tool_calls=[TURNS[1].tool_calls[0]])
    assert "analysis<|message|>Wait.<|end|>" in render(ChatPrompt(messages=[TURNS[0], with_call]), FAMILIES["gpt_oss"])


@pytest.mark.parametrize(
    ("effort", "kwargs", "expected"),
    [
        (None, "", "--"),
        ("high", "", "high-True-True"),
        ("none", "", "none-False-False"),
        ("none", '{"enable_thinking": true}', "none-True-False"),
    ],
)
def test_effort_is_what_templates_call_it(effort: str | None, kwargs: str, expected: str) -> None:
    prompt = ChatPrompt(messages=TURNS[:1], reasoning_effort=effort, chat_template_kwargs_json=kwargs)
    assert render(prompt, "{{ reasoning_effort }}-{{ enable_thinking }}-{{ thinking }}") == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"tools": [Tool(name="f", parameters_json="{")]}, "schema of the parameters of 'f' is not valid JSON"),
        ({"tools": [Tool(name="f", parameters_json='{"a": "\\ud83d"}')]}, "parameters of 'f' is not valid JSON"),
        ({"tools": [Tool(name="f", parameters_json="[]")]}, "must be a JSON object, not list"),
        ({"documents_json": ["{}", "1"]}, r"documents\[1\] must be a JSON object"),
    ],
)
def test_what_is_no_object_is_refused_by_name(prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(RpcError, match=message):
        to_chat(ChatPrompt(messages=TURNS[:1], **prompt))


def test_a_template_may_refuse_calls() -> None:
    call = TURNS[1].tool_calls[0]
    turns = [TURNS[0], ChatMessage(role="assistant", tool_calls=[call, call])]
    with pytest.raises(ChatError, match="single tool-calls at once"):
        render(ChatPrompt(messages=turns), FAMILIES["llama3_json"])


def test_chats_with_tools_have_the_template_that_is_named_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path = tiny_tokenizers.save_byte_level(tmp_path, chat_template=named)

    def rendered(source: FileSource, *tools: Tool) -> str:
        codec = Codec(source)
        token_ids = codec.encode_chat(to_chat(ChatPrompt(messages=TURNS[:1], tools=tools)), False)
        return codec.decode(token_ids, False)

    source = FileSource(str(path))
    assert (rendered(source), rendered(source, TOOL)) == ("plain", "tools")
    assert rendered(FileSource(str(path), chat_template="mine"), TOOL) == "mine"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("from a file")
    assert rendered(source, TOOL) == "from a file"
