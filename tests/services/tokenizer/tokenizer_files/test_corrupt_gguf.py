"""Tokenizers of damaged GGUF files: a tokenizer, or an error that names the file; never a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.limited_memory import address_space
from tests.makers.gguf_bytes import header, number_fields

MEMORY = 1 << 30  # of address space
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "▁", "▁a", "Ġ", "Ġa", "<0x41>"]
SOUND: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
    },
    "llama": {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))]},
    "bert": {"tokenizer.ggml.model": "bert", "general.architecture": "bert"},
    "t5": {
        "tokenizer.ggml.model": "t5",
        "general.architecture": "bert",
        "tokenizer.ggml.scores": [-float(i) for i in range(len(TOKENS))],
    },
    "gemma": {"tokenizer.ggml.model": "llama", "general.architecture": "gemma"},
}
OPTIONAL = ("add_eos_token", "add_space_prefix", "precompiled_charsmap", "padding_token_id", "scores", "merges", "pre")
WRONG: tuple[Any, ...] = ("", "gpt2", "a b", -1, 0, 3, 2**40, 1.5, float("nan"), True)
WRONG_LISTS: tuple[list[Any], ...] = ([], [1], [1.5], [""], ["a b"] * 3, ["\0"], [[1]], [["a"]], ["a"] * 11, [9] * 11)


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


def loads_or_names_the_file(path: Path) -> None:
    with address_space(MEMORY):
        try:
            load_tokenizer(path).encode("a ab b", add_special_tokens=True)
        except ValueError as error:
            assert path.name in str(error)
            assert len(str(error)) < 3000


@pytest.mark.parametrize("model", MODELS)
def test_sound_files_load(tmp_path: Path, model: str) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(header(SOUND | MODELS[model], []))
    assert load_tokenizer(path).encode("ab", add_special_tokens=False)


@fuzz(120)
@given(data=st.data())
def test_metadata_of_wrong_types(tmp_path: Path, data: st.DataObject) -> None:
    metadata = SOUND | MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    keys = [*metadata, *(f"tokenizer.ggml.{key}" for key in OPTIONAL)]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        metadata[key] = data.draw(st.sampled_from((*WRONG, *WRONG_LISTS)))
    path = tmp_path / "wrong.gguf"
    path.write_bytes(header(metadata, []))
    loads_or_names_the_file(path)


@fuzz(100)
@given(data=st.data())
def test_numbers_and_bits(tmp_path: Path, data: st.DataObject) -> None:
    sound = header(SOUND | MODELS[data.draw(st.sampled_from(sorted(MODELS)))], [])
    damaged = bytearray(sound)
    if data.draw(st.booleans()):
        position, size = data.draw(st.sampled_from(number_fields(sound)))
        damaged[position : position + size] = data.draw(st.binary(min_size=size, max_size=size))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=10)):
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    loads_or_names_the_file(path)


@pytest.mark.parametrize("merge", ["zz b", "a zz", "b b"])
def test_a_merge_of_or_into_a_token_that_does_not_exist(tmp_path: Path, merge: str) -> None:
    path = tmp_path / "merge.gguf"
    path.write_bytes(header(SOUND | MODELS["gpt2"] | {"tokenizer.ggml.merges": ["a b", merge]}, []))
    with pytest.raises(ValueError, match=rf"merge\.gguf: tokenizer\.ggml\.merges\[1\] '{merge}' needs tokens"):
        load_tokenizer(path)


@pytest.mark.timeout(60)
def test_a_token_of_a_megabyte(tmp_path: Path) -> None:
    """Every cut of a token is looked up where merges follow from scores: that would take hours."""
    path = tmp_path / "long.gguf"
    path.write_bytes(header(SOUND | MODELS["gemma"] | {"tokenizer.ggml.tokens": [*TOKENS[:-1], "a" * (1 << 20)]}, []))
    with pytest.raises(ValueError, match=r"long\.gguf: tokenizer\.ggml\.tokens\[10\] has 1048576 characters"):
        load_tokenizer(path)
