"""Texts that are too long are refused before they are encoded, and the others are encoded as ever."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from pagewire.services.tokenizer.pool.codec import Codec
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.input_encoding import Cuts
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import MIN_BYTES, PIECE, Room, TextTooLong
from pagewire.services.tokenizer.templates.chat import Chat
from pagewire.wire.rpc import RpcError
from tests.services.tokenizer.tiny_tokenizers import save_byte_level
from tests.sweep import examples

ENGLISH = "Ordinary words of a language, 12 of them, and a line's end.\n"
# Loops forever within the sandbox, which limits ranges to 100,000 numbers.
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def codec(smollm2_gguf: Path) -> Codec:
    return Codec(FileSource(str(smollm2_gguf)))


def test_the_limit_is_what_the_longest_tokens_are(codec) -> None:
    assert codec.limit.max_bytes(10) == MIN_BYTES
    assert codec.limit.max_bytes(100_000) == 100_000 * 81
    longest = "\n" + 80 * " "
    assert len(codec.encode_text(longest * 3, add_special_tokens=False)) == 3
    # Long tokens make a text that fits although hardly any text of its length does.
    many = (longest + "x") * 1500
    assert codec.encode_text(many, False, Room(8192)) == codec.encode_text(many, False)


def test_a_text_that_is_too_long_is_refused_after_a_piece_of_it(codec, monkeypatch) -> None:
    sizes = []
    encode = type(codec.tokenizer).encode

    def measured(self, text: str, **kwargs) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, **kwargs)

    monkeypatch.setattr(type(codec.tokenizer), "encode", measured)
    with pytest.raises(TextTooLong, match="context length is 8192 tokens, but the prompt has more than 8192 tokens"):
        codec.encode_text(ENGLISH * 10_000, False, Room(8192))
    assert sizes == [PIECE]
    with pytest.raises(TextTooLong, match="30000000 bytes of text, of which at most 1048576 are possible"):
        codec.encode_text("x" * 30_000_000, False, Room(8192))
    with pytest.raises(TextTooLong, match="30000000 bytes"):
        codec.encode_text("ä" * 15_000_000, False, Room(8192))
    with pytest.raises(TextTooLong, match="bytes of text"):
        codec.encode_chat(Chat([{"role": "user", "content": "x" * 2_000_000}]), False, room=Room(8192))
    assert sizes == [PIECE]


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(1, 3000), st.sampled_from(["start", "end"]), st.sampled_from([ENGLISH, "äöü ", "x", "    \n", "1 2"])
)
def test_the_wanted_end_of_a_long_text_is_that_of_the_whole(codec, most: int, keeps: str, words: str) -> None:
    text = "The beginning. " + words * (200_000 // len(words)) + " The end."
    cuts = Cuts(whole=most, from_start=keeps == "end", max_tokens=8192)
    ((token_ids, _),) = codec.encode_inputs([(text, None)], False, cuts)
    whole = _whole(codec, text)
    assert token_ids == (whole[:most] if keeps == "start" else whole[-most:])


_KNOWN: dict[str, list[int]] = {}


def _whole(codec: Codec, text: str) -> list[int]:
    return _KNOWN.get(text) or _KNOWN.setdefault(text, codec.encode_text(text, False))


async def test_a_full_queue_lets_no_request_in(tmp_path) -> None:
    pool = TokenizerPool(FileSource(str(save_byte_level(tmp_path))), size=1, max_queued=3)
    try:
        calls = [asyncio.create_task(pool.encode_text(ENGLISH, add_special_tokens=False)) for _ in range(4)]
        pool.check_room()
        await asyncio.sleep(0)
        with pytest.raises(RpcError, match=r"3 texts .* \(--max-queued-prompts\)") as refusal:
            pool.check_room()
        assert refusal.value.code.name == "RESOURCE_EXHAUSTED"
        await asyncio.gather(*calls)
        pool.check_room()
    finally:
        pool.close()


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_a_template_that_never_ends_is_given_up(tmp_path, kind) -> None:
    template = f"{{% if endless %}}{ENDLESS}{{% endif %}}{{{{ messages[0].content }}}}"
    source = FileSource(str(save_byte_level(tmp_path)), chat_template=template)
    pool = TokenizerPool(source, size=1, kind=kind, timeout=2.0)
    messages = [{"role": "user", "content": "Hi"}]
    try:
        await pool.encode_text("A worker that has started", add_special_tokens=False)
        before = [worker.pid for worker in pool.workers]
        chat = Chat(messages, template_kwargs={"endless": True})
        endless = asyncio.create_task(pool.encode_chat(chat, add_special_tokens=False))
        behind = asyncio.create_task(pool.encode_chat(Chat(messages), add_special_tokens=False))
        with pytest.raises(RpcError, match=r"within 2 seconds \(--prompt-timeout\).* chat template") as refusal:
            await endless
        assert refusal.value.code.name == "INVALID_ARGUMENT"
        assert await behind == pool.codec.encode_chat(Chat(messages), False)
        assert not before or [worker.pid for worker in pool.workers] != before
        left = asyncio.create_task(pool.encode_chat(chat, add_special_tokens=False))
        while not REGISTRY.get_sample_value("pagewire:tokenizer_pool_busy_workers"):  # noqa: ASYNC110 (threads change it)
            await asyncio.sleep(0.005)
    finally:
        pool.close()  # which waits for none that never ends
    left.cancel()
