"""Banned words, in the forms in which a model writes them."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.pool.bad_words import token_sequences
from tests.services.tokenizer import tiny_tokenizers


def _gemma(path: Path) -> Path:
    """Saves SentencePiece without a space in front."""
    tiny_tokenizers.save_sentencepiece(path)
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.save(str(path / "tokenizer.json"))
    return path


def _prefixed_bytes(path: Path) -> Path:
    """Saves byte-level BPE that adds a space in front, as RoBERTa's does."""
    tiny_tokenizers.save_byte_level(path)
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.save(str(path / "tokenizer.json"))
    return path


def _unigram(path: Path) -> Path:
    """Saves T5's kind, which divides at spaces."""
    pieces = ["<unk>", "▁", "▁he", "he", "h", "e", "l", "ll", "▁is", "is", "i", "s"]
    backend = Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_tokens([AddedToken("<mark>", normalized=False)])
    backend.save(str(path / "tokenizer.json"))
    return path


CASES = [
    (tiny_tokenizers.save_sentencepiece, "he", [["he"], ["▁", "he"]]),
    (tiny_tokenizers.save_sentencepiece, "the", [["t", "he"], ["▁t", "he"]]),
    (tiny_tokenizers.save_sentencepiece, "  is", [["is"], ["▁is"]]),
    (tiny_tokenizers.save_sentencepiece, "is he", [["is", "▁", "he"], ["▁is", "▁", "he"]]),
    (tiny_tokenizers.save_sentencepiece, "ç", [["<0xC3>", "<0xA7>"], ["▁", "<0xC3>", "<0xA7>"]]),
    (tiny_tokenizers.save_sentencepiece, "</s>", [["</s>"], ["▁▁", "</s>"]]),
    (_gemma, "is", [["is"], ["▁is"]]),
    (_unigram, "he", [["he"], ["▁he"]]),
    (_unigram, "is he", [["is", "▁he"], ["▁is", "▁he"]]),
    (_unigram, "<mark>", [["<mark>"], ["▁", "<mark>"]]),
    (tiny_tokenizers.save_word_pieces, "is", [["is"], ["##is"]]),
    (tiny_tokenizers.save_word_pieces, "hellois", [["##he", "##llo", "##is"]]),
    (tiny_tokenizers.save_word_pieces, "he is.", [["he", "is", "."], ["##he", "is", "."]]),
    (_prefixed_bytes, "is", [["is"], ["Ġis"]]),
    (tiny_tokenizers.save_byte_level, "is", [["is"], ["Ġis"]]),
    (tiny_tokenizers.save_word_level, "hello", [["hello"]]),
]


@pytest.mark.parametrize(("save", "word", "forms"), CASES)
def test_a_word_has_a_form_with_a_space_and_one_without(tmp_path: Path, save, word, forms) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    assert _spelled(tokenizer, token_sequences(tokenizer, [word, word])) == forms


def test_long_words_cost_what_their_length_does(tmp_path: Path) -> None:
    """WordPiece divides no word of this length; the token of unknown words is not banned in its place."""
    tokenizer = load_tokenizer(tiny_tokenizers.save_word_pieces(tmp_path))
    assert _spelled(tokenizer, token_sequences(tokenizer, ["is" * 50_000])) == []


def _spelled(tokenizer: LoadedTokenizer, sequences: list[list[int]]) -> list[list[str]]:
    return [tokenizer.vocabulary_entries(token_ids) for token_ids in sequences]
