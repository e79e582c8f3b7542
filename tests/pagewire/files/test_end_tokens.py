"""The end tokens that the files of a tokenizer name."""

import json
from pathlib import Path

import pytest

from pagewire.files.tokenizer_files.end_tokens import directory_eos_token_id, end_token_ids_by_text


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>"], ["</s>", "<|end|>", "<|endoftext|>"]),
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<|im_end|>", "<|endoftext|>"]),
        (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"]),
        (["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"], ["<|eot_id|>", "<|eom_id|>"]),
        (["▁<PRE>", "▁<EOT>"], ["▁<EOT>"]),
        # OpenAI's Harmony and Solar: <|end|> ends a message, after which others follow.
        (["<|return|>", "<|end|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|flush|>", "<|end|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
        (["<turn|>", "</s>", "<|tool_response>"], ["<turn|>", "<|tool_response>"]),
        (["the", "end", "EOT"], []),
    ],
)
def test_end_tokens_are_known_by_their_text(tokens: list[str], ends: list[str]) -> None:
    assert [tokens[token_id] for token_id in end_token_ids_by_text(tokens)] == ends


ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0}}, "normalizer": None}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}, "tokenizer": ADDED}, 7),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "special": True}}, "tokenizer": ADDED}, 7),
        ({"tokenizer_config": {"eos_token": "</e>", "added_tokens_decoder": {"9": {"content": "</e>"}}}}, 9),
        ({"tokenizer_config": {"eos_token": "</e>"}, "added_tokens": {"</e>": 5}}, 5),
        ({"special_tokens_map": {"eos_token": "</e>"}, "added_tokens": {"</e>": 5}}, 5),
        ({"tokenizer_config": {"eos_token": "</e>"}, "tokenizer": ADDED}, None),
        ({"tokenizer_config": {"eos_token": None}, "tokenizer": ADDED}, None),
        ({"tokenizer": ADDED}, None),
        ({}, None),
    ],
)
def test_the_end_token_of_a_directory_is_its_tokenizers(tmp_path: Path, files: dict, found: int | None) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert directory_eos_token_id(tmp_path) == found


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": 3}', '{"added_tokens": [1]}'])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*; download it again"):
        directory_eos_token_id(tmp_path)
