"""The tokens that end an output, as far as the files of a tokenizer name them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewire.files.damaged_file import remedy
from pagewire.files.json_file import read_json_object

# A GGUF file names few of its model's end tokens by id. llama.cpp recognizes others by their text, and users of these
# files rely on that (`special_eog_ids` of llama-vocab.cpp).
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<EOT>",
        "_<EOT>",
        "▁<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "</s>",
        # What comes between files in code that a model fills in.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
# Tokens that end an output unless all of the others exist: then these only end a part of it.
_UNLESS = (
    ("<|end|>", ("<|return|>", "<|call|>")),
    ("<|end|>", ("<|calls|>", "<|flush|>")),
    ("</s>", ("<|tool_response>",)),
)
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))


def end_token_ids_by_text(tokens: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of the tokens of a GGUF file that end an output by their text. tokens: all of the vocabulary."""
    found = {token: token_id for token_id, token in enumerate(tokens) if token in END_TEXTS}
    inner = {token for token, others in _UNLESS if found.keys() >= {*others}}
    return tuple(token_id for token, token_id in found.items() if token not in inner)


def directory_eos_token_id(path: Path) -> int | None:
    """Returns the id of the `eos_token` that the tokenizer of a directory names; None if it names none, or a token
    without an id of its own in these files.

    Fine-tuned models often change it without changing config.json. Raises ValueError for a damaged file.
    """
    named = _read(path / "special_tokens_map.json") | _read(path / "tokenizer_config.json")
    token = named.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    listed = named.get("added_tokens_decoder")
    for token_id, added in listed.items() if isinstance(listed, dict) else ():
        if isinstance(added, dict) and added.get("content") == text and token_id.isdecimal():
            return int(token_id)
    by_text = {added.get("content"): added.get("id") for added in _added_tokens(path / "tokenizer.json")}
    found = by_text.get(text, _read(path / "added_tokens.json").get(text))
    return found if isinstance(found, int) else None


def _added_tokens(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    added = read_json_object(file).get("added_tokens", [])
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{file}: added_tokens is not a list of objects; {remedy(file)}")
    return added


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}
