"""Messages that a template does not know reach the model in a form that it does, or are refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.tokenizer.templates.arguments import recovered
from pagewire.services.tokenizer.templates.chat import ChatError, render_chat
from pagewire.services.tokenizer.templates.chat_messages import to_chat
from pagewire.services.tokenizer.templates.turns import fit_turns
from pagewire.v1.inference_pb2 import ChatMessage, ChatPrompt, ContentPart, OutputParsing, Tool, ToolCall
from tests.services.tokenizer.chat_templates import FAMILIES
from tests.sweep import examples

# What further families do with roles, in their own words.
GEMMA2 = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}"""
QWEN35 = """{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- raise_exception('Unexpected message role.') }}{%- endif %}
{%- endfor %}"""
PHI3 = """{% for m in messages %}{% if m['role'] == 'system' %}{{'<|system|>\n' + m['content'] + '<|end|>\n'}}
{%- elif m['role'] == 'user' %}{{'<|user|>\n' + m['content'] + '<|end|>\n'}}
{%- elif m['role'] == 'assistant' %}{{'<|assistant|>\n' + m['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"""
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
TEMPLATES = FAMILIES | {"gemma2": GEMMA2, "qwen35": QWEN35, "phi3": PHI3, "chatml": CHATML}


def render(
    template: str, *turns: tuple[str, str] | ChatMessage, parsing: OutputParsing | None = None, **prompt: Any
) -> str:
    messages = [turn if isinstance(turn, ChatMessage) else ChatMessage(role=turn[0], content=turn[1]) for turn in turns]
    chat = to_chat(ChatPrompt(messages=messages, **prompt), parsing)
    return render_chat(chat, template, {"bos_token": "", "eos_token": "</s>"}, fit=fit_turns)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name != "gpt_oss"])
@pytest.mark.parametrize("tools", [[], [Tool(name="f", parameters_json="{}")]], ids=["no tools", "tools"])
def test_a_developer_is_the_system(family: str, tools: list[Tool]) -> None:
    template, user = TEMPLATES[family], ("user", "Hi.")
    answered = (user, ("assistant", "Yes?"))
    for turns, same in (
        ([("developer", "Be brief."), user], [("system", "Be brief."), user]),
        ([("system", "A."), ("developer", "B."), user], [("system", "A.\n\nB."), user]),
        ([("developer", "A."), ("system", "B."), user], [("system", "A.\n\nB."), user]),
        ([*answered, ("developer", "C."), user], [*answered, ("system", "C."), user]),
    ):
        text = render(template, *turns, tools=tools)
        assert text == render(template, *same, tools=tools)
        assert "developer" not in text and all(said in text for role, said in turns)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("system", [[], [("system", "Be brief.")]], ids=["no system", "system"])
def test_a_model_that_must_call_is_told_what(family: str, system: list[tuple[str, str]]) -> None:
    """The template tells it, else the system does, in front of what the client says as the system."""
    template, turns = TEMPLATES[family], [*system, ("user", "Hi.")]
    tools = [Tool(name=name, description=f"{name}s", parameters_json='{"title": "é"}') for name in ("look", "list")]
    functions = [
        f'{{"name": "{name}", "description": "{name}s", "parameters": {{"title": "é"}}}}' for name in ("look", "list")
    ]
    may = render(template, *turns, tools=tools, parsing=OutputParsing(tool_calls=True))
    one = render(template, *turns, tools=tools, parsing=OutputParsing(named="list"))
    some = render(template, *turns, tools=tools, parsing=OutputParsing(required=True))
    other = render(template, *turns, tools=tools, parsing=OutputParsing(named="ls"))
    assert may == other == render(template, *turns, tools=tools)
    if family in FAMILIES and not family.startswith("deepseek"):
        assert one == some == may
        return
    says = lambda words: render(template, ("system", words), *turns)  # noqa: E731
    assert one == says(f"Call this function: {functions[1]}")
    assert some == says(f"You call functions. Functions: [{', '.join(functions)}]")
    assert all(said in some for _, said in turns)


def test_a_template_that_knows_developers_gets_them() -> None:
    turns = [("developer", "Be brief."), ("user", "Hi.")]
    assert "# Instructions\n\nBe brief." in render(FAMILIES["gpt_oss"], *turns)
    text = render(FAMILIES["gpt_oss"], ("system", "A."), *turns, ("assistant", "Yes?"), ("developer", "C."), turns[1])
    assert "# Instructions\n\nA.\n\nBe brief.\n\nC.\n\n<|end|>" in text


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", ["<|im_start|>system\nA.<|im_end|>", "<|im_start|>system\nB.<|im_end|>\n<|im_start|>user"]),
        ("qwen35", ["<|im_start|>system\nA.\n\nB.<|im_end|>"]),
        ("deepseek_v3", ["A.\n\nB.<｜User｜>"]),
        ("mistral", ["[INST] A.\n\nB.\n\nAnd?[/INST]"]),
        ("gemma2", ["<start_of_turn>user\nA.\n\nB.\n\nHi.<end_of_turn>"]),
        ("glm45", ["<|system|>\nA.", "<|system|>\nB.<|user|>"]),
    ],
)
def test_instructions_are_where_the_template_shows_them(family: str, expected: list[str]) -> None:
    turns = [("system", "A."), ("user", "Hi."), ("assistant", "Yes?"), ("developer", "B."), ("user", "And?")]
    if family == "mistral":
        turns[3:4] = []
        turns.insert(1, ("developer", "B."))
    text = render(TEMPLATES[family], *turns)
    assert [part for part in expected if part not in text] == [], text
    assert "A." in text and text.count("B.") == 1


def test_an_image_stays_at_its_place() -> None:
    look = ChatMessage(role="developer", parts=[ContentPart(text="Like this:"), ContentPart(image={"url": "x"})])
    template = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}"
    )
    assert render(template, look, ChatMessage(role="user", parts=[ContentPart(text="Hi.")])) == (
        "[system]Like this:<image>[user]Hi."
    )


@pytest.mark.parametrize("role", ["critic", "function", "ipython2", "x" * 1000])
def test_a_role_that_the_template_does_not_show_is_refused(role: str) -> None:
    for family in ("qwen3", "deepseek_v3", "mistral", "glm45", "gpt_oss", "qwen35", "phi3"):
        with pytest.raises(
            ChatError, match=r"messages\[1\].role is '.{,64}', which the model's chat template does not"
        ):
            render(TEMPLATES[family], ("user", "Hi."), (role, "No."), ("user", "And?"))
    assert f"<|im_start|>{role}\nNo." in render(CHATML, ("user", "Hi."), (role, "No."))


def test_results_that_the_template_does_not_show_are_refused() -> None:
    result = ChatMessage(role="tool", content="21 C", tool_call_id="abcdefghi")
    call = ChatMessage(role="assistant", tool_calls=[ToolCall(id="abcdefghi", name="f", arguments="{}")])
    for family in TEMPLATES.keys() - {"phi3", "gemma2"}:
        assert "21 C" in render(TEMPLATES[family], ("user", "Hi."), call, result)
    with pytest.raises(ChatError, match=r"messages\[2\].role is 'tool', but .* send them in a user message"):
        render(PHI3, ("user", "Hi."), call, result)


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("id", ["call_0123456789abcdef01234567", "toolu_01", "a", "é" * 9, "functions.f:0", ""])
def test_ids_of_other_servers(family: str, id: str) -> None:
    turns = [
        ChatMessage(role="user", content="Hi."),
        ChatMessage(role="assistant", tool_calls=[ToolCall(id=id, name="f", arguments='{"a": 1}')]),
        ChatMessage(role="tool", content="21 C", tool_call_id=id),
    ]
    text = render(FAMILIES[family], *turns)
    assert "21 C" in text
    later = render(FAMILIES[family], *turns, ("assistant", "Warm."), ("user", "And now?"))
    assert later.startswith(text.removesuffix("<|im_start|>assistant\n")) or family not in ("mistral", "qwen3")
    if family == "mistral":
        shown = text.partition('"id": "')[2][:9]
        assert shown.isascii() and shown.isalnum() and f'"call_id": "{shown}"' in text


def test_ids_of_different_calls_stay_different() -> None:
    calls = [ToolCall(id=f"call_{index}", name="f", arguments="{}") for index in range(50)]
    text = render(FAMILIES["mistral"], ("user", "Hi."), ChatMessage(role="assistant", tool_calls=calls))
    assert len({part[:9] for part in text.split('"id": "')[1:]}) == 50


def test_results_without_an_id_answer_the_calls_in_turn() -> None:
    calls = [ToolCall(id=id, name="f", arguments="{}") for id in ("aaaaaaaa1", "aaaaaaaa2")]
    results = [ChatMessage(role="tool", content=content) for content in ("one", "two")]
    text = render(FAMILIES["kimi_k2"], ("user", "Hi."), ChatMessage(role="assistant", tool_calls=calls), *results)
    assert "Return of aaaaaaaa1\none" in text and "Return of aaaaaaaa2\ntwo" in text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "arguments", ['{"city": "Par', '{"city": "Par", "days', "", "[1]", "city=Par", '{"city": NaN}']
)
def test_arguments_that_were_cut_off_do_not_end_the_conversation(family: str, arguments: str) -> None:
    call = ChatMessage(role="assistant", tool_calls=[ToolCall(id="abcdefghi", name="f", arguments=arguments)])
    result = ChatMessage(role="tool", content="No.", tool_call_id="abcdefghi")
    text = render(FAMILIES[family], ("user", "Hi."), call, result)
    assert "No." in text and ("Par" not in arguments or "Par" in text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("said", [{}, {"reasoning": "Hm."}, {"content": ""}])
def test_an_assistant_that_says_nothing(family: str, said: dict[str, str]) -> None:
    turns = [("user", "Hi."), ChatMessage(role="assistant", **said), ("user", "And?")]
    assert render(FAMILIES[family], *turns) == render(
        FAMILIES[family], turns[0], ChatMessage(role="assistant", **said | {"content": ""}), turns[2]
    )
    assert "None" not in render(FAMILIES[family], *turns)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_without_output(family: str) -> None:
    call = ChatMessage(role="assistant", tool_calls=[ToolCall(id="abcdefghi", name="f", arguments="{}")])
    assert "None" not in render(
        FAMILIES[family], ("user", "Hi."), call, ChatMessage(role="tool", tool_call_id="abcdefghi")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": 12, "b":', {"a": 12}),
        ('{"a": 12, "b": tr', {"a": 12}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "\\\\\\', {"a": "\\"}),
        ('{"a": ["b", {"c": "d"', {"a": ["b", {"c": "d"}]}),
        ('{"a": 1}}', {"a": 1}),
        ("{", {"arguments": "{"}),
        ('{"a": "b"c', {"arguments": '{"a": "b"c'}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a":' + "[" * 1000, {"arguments": '{"a":' + "[" * 1000}),
    ],
)
def test_what_is_whole_is_recovered(text: str, expected: dict[str, Any]) -> None:
    assert dict(recovered(text)) == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(values=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_every_beginning_of_arguments_becomes_an_object(values: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(values, ensure_ascii=data.draw(st.booleans()))
    begun = text[: data.draw(st.integers(0, len(text)))]
    found = dict(recovered(begun))
    json.dumps(found, ensure_ascii=False)
    assert found == {"arguments": begun} or found.keys() <= values.keys()
