"""Prompts in which the model fills in the middle: a prefix and a suffix, between special tokens."""

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer

# How vocabularies spell a space: SentencePiece and Metaspace, byte-level BPE.
SPACES = ("▁", "Ġ")
_OTHER = "☺"  # no token has it and more


def infill_ids(tokenizer: LoadedTokenizer, prefix: str, suffix: str, add_special_tokens: bool) -> list[int]:
    """Returns the tokens of the prompt. Raises ValueError if the model cannot fill in."""
    fill = tokenizer.fill_in_middle
    if fill is None:
        raise ValueError("the vocabulary has no tokens for filling in the middle")
    first = tokenizer.leading_ids() if add_special_tokens else []
    before = tokenizer.encode(prefix, add_special_tokens=False)
    return [*first, fill.prefix_id, *before, fill.suffix_id, *_continued(tokenizer, suffix), fill.middle_id]


def _continued(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    """Returns the tokens of a text that continues another, without the space that the tokenizer may add."""
    first = tokenizer.encode("x", add_special_tokens=False)[:1]
    if not any(entry.startswith(SPACES) for entry in tokenizer.vocabulary_entries(first)):
        return tokenizer.encode(text, add_special_tokens=False)
    num_others = len(tokenizer.encode(_OTHER, add_special_tokens=False))
    return tokenizer.encode(_OTHER + text, add_special_tokens=False)[num_others:]
