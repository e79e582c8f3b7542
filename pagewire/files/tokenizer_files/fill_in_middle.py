"""The special tokens by which a model of code fills in the middle between a prefix and a suffix."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True)
class FillInMiddle:
    """Tokens of a prompt, which are read in this order: prefix, its text, suffix, its text, middle."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    # The output ends with them, as with the model's own end tokens.
    end_token_ids: tuple[int, ...]


_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
)
# What comes after the middle: its end, padding, or another file.
_ENDS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "▁<EOT>",
    "<EOT>",
    "<|endoftext|>",
    "<|file_separator|>",
    "<|file_sep|>",
    "<file_sep>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
)
# Names of a GGUF file, tokenizer.ggml.fim_pre_token_id, and older ones.
GGUF_NAMES = (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle"))


def find_fill_in_middle(backend: Tokenizer, config: Mapping[str, object]) -> FillInMiddle | None:
    """Returns the tokens; None if the vocabulary has none. config: may name them, as `fim_pre_token`."""
    named = (tuple(config.get(f"{name}_token") for name in names) for names in GGUF_NAMES)
    for texts in (*named, *_FAMILIES):
        ids = [backend.token_to_id(text) for text in texts if isinstance(text, str)]
        prefix_id, suffix_id, middle_id = ids if len(ids) == len(texts) else (None, None, None)
        if prefix_id is None or suffix_id is None or middle_id is None:
            continue
        ends = [token_id for text in _ENDS if (token_id := backend.token_to_id(text)) is not None]
        return FillInMiddle(prefix_id, suffix_id, middle_id, (prefix_id, suffix_id, middle_id, *ends))
    return None
