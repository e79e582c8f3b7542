"""Chat templates of requests: whatever they do, they end, and the service does not halt meanwhile."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.templates import request_templates
from pagewire.services.tokenizer.templates.chat import Chat, ChatError
from pagewire.services.tokenizer.templates.request_templates import RequestTemplates
from pagewire.wire.rpc import RpcError
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD = "{{ bos_token }}{% for m in messages %}{{ m.content }}!{% endfor %}"
# What they are refused with, in part.
TOO_SLOW = "within 1 seconds"
TOO_LARGE = "MemoryError|crashed its process|OverflowError|characters"
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": TOO_SLOW,
    "{{ 10 ** (10 ** 9) }}": TOO_SLOW,  # one operation, which no thread is let between
    "{{ 'a' * 10 ** 9 }}": TOO_LARGE,
    "{{ 'a' * 10 ** 10 }}": TOO_LARGE,
    "{{ [0] * 10 ** 9 }}": TOO_LARGE,
    "{{ range(10 ** 9) | list }}": "OverflowError",
    "{{ '%1000000000d' % 1 }}": TOO_LARGE,
    "{{ '{:>1000000000}'.format(1) }}": TOO_LARGE,
    "{{ 'a'.ljust(10 ** 9) }}": TOO_LARGE,
    "{{ 'a' | center(10 ** 9) }}": TOO_LARGE,
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}": TOO_LARGE,
    "{% for i in range(20000) %}{{ 'a' * 1000 }}{% endfor %}": "20000000 characters; at most 16777216 are possible",
    "{{ raise_exception('a' * 10 ** 6) }}": "a{900}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}": "RecursionError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe|refused",
    "{{ messages.append(1) }}": "unsafe|refused",
    "{{ cycler.__init__.__globals__ }}": "unsafe|refused",
}


def start(timeout: float) -> Iterator[RequestTemplates]:
    templates = RequestTemplates({"bos_token": "<s>"}, timeout, memory_bytes=256 * 2**20)
    yield templates
    templates.close()


@pytest.fixture(scope="module")
def templates() -> Iterator[RequestTemplates]:
    yield from start(1.0)


@pytest.fixture(scope="module")
def patient_templates() -> Iterator[RequestTemplates]:
    """Templates that a busy machine ends by their memory, too, and not by their time."""
    yield from start(60.0)


async def render(templates: RequestTemplates, template: str) -> str:
    return await templates.render(Chat(MESSAGES, chat_template=template), "")


@pytest.mark.parametrize("template", HOSTILE)
async def test_no_template_takes_all_time_or_memory(
    templates: RequestTemplates, patient_templates: RequestTemplates, template: str
) -> None:
    if HOSTILE[template] != TOO_SLOW:
        templates = patient_templates
    with pytest.raises(ChatError, match=HOSTILE[template]) as refused:
        await render(templates, template)
    assert len(str(refused.value)) < 1200
    assert await render(templates, GOOD) == "<s>Hi!", "the next one is rendered"


async def test_others_are_served_during_one_long_operation(templates: RequestTemplates) -> None:
    rendering = asyncio.create_task(render(templates, "{{ 10 ** (10 ** 9) }}"))
    num_turns = 0
    while not rendering.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    with pytest.raises(ChatError, match=TOO_SLOW):
        await rendering
    assert num_turns > 5


async def test_those_that_wait_are_bounded(templates: RequestTemplates, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "MAX_WAITING", 3)
    good = [asyncio.create_task(render(templates, GOOD)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RpcError, match="3 chat templates of requests wait") as refused:
        await render(templates, GOOD)
    assert refused.value.code.name == "RESOURCE_EXHAUSTED"
    assert await asyncio.gather(*good) == ["<s>Hi!"] * 3


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[TokenizerPool]:
    path = str(save_byte_level(tmp_path))
    pool = TokenizerPool(FileSource(path, chat_template="{{ pid }}", trust_request_chat_template=True), size=1)
    yield pool
    pool.close()


async def test_the_models_own_template_starts_no_process(pool: TokenizerPool) -> None:
    assert await pool.encode_chat(Chat(MESSAGES, template_kwargs={"pid": os.getpid()}), add_special_tokens=False)
    assert pool._request_templates is not None and not pool._request_templates._processes
    chat = Chat(MESSAGES, chat_template="{{ messages[0].content }}!")
    given = await pool.encode_chat(chat, add_special_tokens=False)
    assert given == await pool.encode_text("Hi!", add_special_tokens=False)
