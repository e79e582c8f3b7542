"""Prompts with a suffix: the special tokens of each family of code models, their order, and the ends."""

import json
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire.files.tokenizer_files.fill_in_middle import find_fill_in_middle
from pagewire.files.tokenizer_files.gguf_tokenizer import build_gguf_tokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.services.tokenizer import tiny_tokenizers
from tests.services.tokenizer.service_line import FakeScheduler, TokenizerLine

Save = Callable[..., Path]


def _save(save: Save, path: Path, *special: str, **config: object) -> Path:
    """Saves a tiny tokenizer with more special tokens."""
    save(path, **config)
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(list(special))
    backend.save(str(path / "tokenizer.json"))
    return path


def _line(directory: Path, tokenizer: Path, output: list[int]) -> TokenizerLine:
    return TokenizerLine(directory, FakeScheduler(lambda request: output), tokenizer, tokenizer=str(tokenizer))


QWEN = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>")
STARCODER = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODE_LLAMA = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")
GEMMA = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>")

FAMILIES = [
    # In CodeLlama's form, the prefix begins with a space as every text does, and the suffix continues it.
    (
        tiny_tokenizers.save_sentencepiece,
        CODE_LLAMA,
        ["<s>", "▁<PRE>", "▁", "he", "▁<SUF>", "t", "he", "▁<MID>"],
        ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
    ),
    (
        tiny_tokenizers.save_byte_level,
        QWEN,
        ["<|fim_prefix|>", "h", "e", "<|fim_suffix|>", "t", "h", "e", "<|fim_middle|>"],
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|endoftext|>", "<|file_sep|>"],
    ),
    (
        tiny_tokenizers.save_byte_level,
        STARCODER,
        ["<fim_prefix>", "h", "e", "<fim_suffix>", "t", "h", "e", "<fim_middle>"],
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<|endoftext|>"],
    ),
    (
        tiny_tokenizers.save_byte_level,
        DEEPSEEK,
        ["<｜fim▁begin｜>", "h", "e", "<｜fim▁hole｜>", "t", "h", "e", "<｜fim▁end｜>"],
        list(DEEPSEEK),
    ),
    (
        tiny_tokenizers.save_sentencepiece,
        GEMMA,
        ["<s>", "<|fim_prefix|>", "▁", "he", "<|fim_suffix|>", "t", "he", "<|fim_middle|>"],
        list(GEMMA),
    ),
]


@pytest.mark.parametrize(
    ("save", "special", "prompt", "ends"), FAMILIES, ids=["llama", "qwen", "star", "deepseek", "gemma"]
)
async def test_the_model_reads_prefix_and_suffix_and_stops_after_the_middle(
    tmp_path: Path, save: Save, special: tuple[str, ...], prompt: list[str], ends: list[str]
) -> None:
    model = _save(save, tmp_path / "model", *special)
    tokenizer = load_tokenizer(model)
    to_id = tokenizer.backend.token_to_id
    output = [to_id("h"), to_id(ends[-1])]
    async with _line(tmp_path, model, output).running() as line:
        await line.scheduler.until(lambda: line.link.is_available)
        given = {"stop_token_ids": [77]}
        result = await line.generate(text="he", suffix="the", sampling_params=given)
        bare = await line.generate(text="he", suffix="the", add_special_tokens=False)
        resumed = await line.generate(
            token_ids={"ids": result.prompt_token_ids}, suffix="the", resume_token_ids=output[:1], sampling_params=given
        )
        ignoring = await line.generate(text="he", suffix="the", sampling_params={"ignore_eos": True})
        plain = await line.generate(text="he")
    read = [tokenizer.vocabulary_entries(one.prompt_token_ids) for one in (result, bare, resumed, plain)]
    assert read[0] == read[2] == prompt
    assert read[1] == [piece for piece in prompt if piece != "<s>"]
    assert not set(special) & set(read[3])
    stops = [list(request.sampling_params.stop_token_ids) for request in line.scheduler.requests]
    assert stops == [[77, *map(to_id, ends)], [*map(to_id, ends)], [77, *map(to_id, ends)], [], []]
    assert result.text == "h" and ignoring.prompt_token_ids == result.prompt_token_ids


async def test_what_cannot_be_filled_in_is_refused(tmp_path: Path, pool) -> None:
    coder = _save(tiny_tokenizers.save_byte_level, tmp_path / "coder", *QWEN)
    async with _line(tmp_path, coder, [5]).running() as line:
        for fields, message in (
            ({"token_ids": {"ids": [1]}}, "suffix needs the prompt as a text"),
            ({"chat": {"messages": [{"role": "user", "content": "x"}]}}, "suffix needs the prompt as a text"),
            ({"text": "a", "truncate_prompt_tokens": 3}, "cannot be combined with truncate_prompt_tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
                await line.generate(suffix="b", **fields)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="1000"):
            await line.generate(text="a", suffix="b " * 200_000)
        assert not (await line.generate(text="", suffix="b")).error
    (tmp_path / "other").mkdir()
    plain = tiny_tokenizers.save_byte_level(tmp_path / "plain")
    async with _line(tmp_path / "other", plain, [5]).running() as line:
        with pytest.raises(grpc.aio.AioRpcError, match="plain has no tokens for filling in the middle of a text"):
            await line.generate(text="a", suffix="b")
        assert (await line.generate(text="a", suffix="")).text


def test_a_gguf_file_names_the_tokens_by_id() -> None:
    tokens = ["a", "b", "[P]", "[S]", "[M]"]
    metadata = {
        "general.architecture": "gpt2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 3],
        "tokenizer.ggml.merges": [],
    }
    assert find_fill_in_middle(*build_gguf_tokenizer(metadata)) is None
    for names in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        ids = {f"tokenizer.ggml.{name}_token_id": 2 + index for index, name in enumerate(names)}
        found = find_fill_in_middle(*build_gguf_tokenizer(metadata | ids))
        assert found is not None
        assert (found.prefix_id, found.suffix_id, found.middle_id) == (2, 3, 4)


def test_a_config_names_the_tokens(tmp_path: Path) -> None:
    named = {"prefix_token": "[P]", "suffix_token": "[S]", "middle_token": "[M]"}
    path = _save(tiny_tokenizers.save_sentencepiece, tmp_path, "[P]", "[S]", "[M]", **named)
    assert json.loads((path / "tokenizer_config.json").read_text())["prefix_token"] == "[P]"
    fill = load_tokenizer(path).fill_in_middle
    assert fill is not None
    assert load_tokenizer(path).vocabulary_entries(fill.end_token_ids) == ["[P]", "[S]", "[M]"]
