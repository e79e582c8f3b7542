"""Rendering must give what transformers' apply_chat_template gives."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pagewire.errors import StartupError
from pagewire.files.chat_template import read_template
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.templates.chat import Chat, ChatError, render_chat
from tests.services.tokenizer import tiny_tokenizers

CONVERSATIONS = [
    [{"role": "user", "content": "Hi <b>there</b> & 'you'"}],
    [
        {"role": "system", "content": " be brief \n"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2  "},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
]
LLAMA_LIKE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- bos_token }}[SYS]{{ system }}[/SYS]
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '[' + message.role + ']' + message.content | trim + eos_token }}
    {%- generation %}{{ loop.index }}{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
{%- endif %}
"""
TOJSON = "{# content too #}{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ bos_token }}{{ flavour }}"
BLOCKS = """
{% for message in messages %}
  {% if message['role'] == 'user' %}
USER {{ message['content'] }}
  {% else %}
BOT {{ message['content'] }}
  {% endif %}
{% endfor %}
{{ tools is none }}{{ documents is none }}{{ undefined_thing }}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tiny_tokenizers.save_byte_level(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def transformers_tokenizer(directory: Path) -> Iterator[PreTrainedTokenizerFast]:
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "system", "three"])
@pytest.mark.parametrize(
    "template", [tiny_tokenizers.CHATML, LLAMA_LIKE, TOJSON, BLOCKS], ids=["chatml", "llama", "tojson", "blocks"]
)
@pytest.mark.parametrize("mode", ["plain", "generation", "continue"])
def test_equals_transformers(directory: Path, transformers_tokenizer, messages, template, mode) -> None:
    special_tokens = load_tokenizer(directory).special_tokens
    chat = Chat(
        messages,
        add_generation_prompt=mode == "generation",
        continue_final_message=mode == "continue",
        template_kwargs={"flavour": "mint"},
    )
    expected = transformers_tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=mode == "generation",
        continue_final_message=mode == "continue",
        flavour="mint",
    )
    assert render_chat(chat, template, special_tokens) == expected


def test_real_template(smollm2, smollm2_gguf) -> None:
    text = render_chat(Chat([{"role": "user", "content": "Hi"}]), smollm2.chat_template, smollm2.special_tokens)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}{% for p in c %}<{{ p['text'] }}>{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for p in m.content|list %}<{{ p['text'] }}>{% endfor %}{% endfor %}",
    ],
)
def test_templates_that_loop_over_parts_get_parts(template) -> None:
    assert render_chat(Chat(PARTS), template, {}) == "<one><two>"


def test_templates_that_know_strings_get_one_string() -> None:
    assert render_chat(Chat(PARTS), "{{ messages[0].content }}", {}) == "one\ntwo"


def test_continuing_the_last_part() -> None:
    chat = Chat(PARTS, add_generation_prompt=False, continue_final_message=True)
    template = "{% for p in messages[0].content %}<{{ p.text }}>{% endfor %}END"
    assert render_chat(chat, template, {}) == "<one><two"


def test_continuing_behind_an_image() -> None:
    parts: list[dict[str, str]] = [{"type": "text", "text": "look: "}, {"type": "image"}]
    template = (
        "{% for p in messages[0].content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}END"
    )
    for content, expected in ((parts, "look: <image>"), (parts[1:], "<image>")):
        chat = Chat(
            [{"role": "assistant", "content": content}], add_generation_prompt=False, continue_final_message=True
        )
        assert render_chat(chat, template, {}, "<image>") == expected
        assert render_chat(chat, "{{ messages[0].content }}END", {}, "<image>") == expected.replace(": ", ": \n")


def test_a_request_may_bring_its_template() -> None:
    assert render_chat(Chat(PARTS, chat_template="mine"), "model's", {}) == "mine"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "--chat-template"),
        ("", "--chat-template"),
        ("{% if %}", "line 1"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.upper() }}", "failed|refused"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_errors_say_what_is_wrong(template, message) -> None:
    with pytest.raises(ChatError, match=message):
        render_chat(Chat([{"role": "user", "content": "x"}]), template, {})


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (Chat([]), "at least one message"),
        (Chat(CONVERSATIONS[0], continue_final_message=True), "exclude each other"),
        (Chat([{"role": "user"}], add_generation_prompt=False, continue_final_message=True), "no content"),
    ],
)
def test_contradictory_requests(chat, message) -> None:
    with pytest.raises(ChatError, match=message):
        render_chat(chat, tiny_tokenizers.CHATML, {})


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    chat = Chat(CONVERSATIONS[0], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatError, match="does not show"):
        render_chat(chat, "{{ messages[0].role }}", {})


def test_override_is_a_file_or_a_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert read_template(str(file)) == "{{ messages }}"
    assert read_template("{% for m in messages %}x{% endfor %}") == "{% for m in messages %}x{% endfor %}"
    with pytest.raises(StartupError, match="neither a file"):
        read_template(str(tmp_path / "missing.jinja"))
    file.write_text("a\n{% for")
    for broken in (str(file), "a\n{% for"):
        with pytest.raises(StartupError, match="--chat-template is not valid jinja, line 2"):
            read_template(broken)
