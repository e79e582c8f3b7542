"""Tokenizers of encoders from the metadata of GGUF files: BERT's WordPiece ("bert") and XLM-RoBERTa's unigrams ("t5").

The positions of special tokens are not in the file; they are those of the models' own `tokenizer.json`.
"""

import math
from collections.abc import Sequence
from itertools import starmap
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagewire.files.tokenizer_files.gguf_unstated import spaces_of
from pagewire.files.tokenizer_files.gguf_vocabulary import GgufTokenizerError, TokenType, add_special_tokens, unique
from pagewire.files.tokenizer_files.word_pieces import word_piece_tokenizer

_SPACE = "▁"


def _word_pieces(metadata: dict[str, Any], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, dict[str, Any]]:
    """Builds a WordPiece tokenizer. The file marks pieces that begin a word, BERT's own vocabulary those that do not.

    The file does not state whether case matters: it does if there are pieces with capitals.
    """

    def spelled(token: str, token_type: int) -> str:
        if token_type == TokenType.CONTROL or (token.startswith("[") and token.endswith("]")):
            return token
        return token.removeprefix(_SPACE) if token.startswith(_SPACE) else f"##{token}"

    pieces = list(starmap(spelled, zip(tokens, types, strict=True)))
    is_cased = any("A" <= char <= "Z" for piece in pieces if not piece.startswith("[") for char in piece)
    named = {
        "unk_token": _named(metadata, pieces, "[UNK]", "unknown"),
        "cls_token": _named(metadata, pieces, "[CLS]", "cls", "bos"),
        "sep_token": _named(metadata, pieces, "[SEP]", "seperator", "eos"),  # as llama.cpp spells it
    }
    backend = word_piece_tokenizer(unique(pieces), normalizers.BertNormalizer(lowercase=not is_cased), named)
    add_special_tokens(backend, pieces, types, spaces_of(metadata), is_normalized=False)
    return backend, named


def _unigrams(metadata: dict[str, Any], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, dict[str, Any]]:
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise GgufTokenizerError(
            f"tokenizer.ggml.scores: expected {len(tokens)} finite numbers, found {len(scores)} entries; give the "
            "model's original tokenizer with --tokenizer DIRECTORY"
        )
    named = {
        "bos_token": _named(metadata, tokens, "<s>", "bos"),
        "eos_token": _named(metadata, tokens, "</s>", "eos"),
        "unk_token": _named(metadata, tokens, "<unk>", "unknown"),
    }
    vocab = unique(tokens)
    pieces = list(zip(vocab, scores, strict=True))
    backend = Tokenizer(models.Unigram(pieces, unk_id=vocab[named["unk_token"]], byte_fallback=False))
    if charsmap := metadata.get("tokenizer.ggml.precompiled_charsmap"):
        backend.normalizer = _normalizer(charsmap)
    scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces: pre_tokenizers.PreTokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        spaces = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.pre_tokenizer = spaces
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    bos, eos = named["bos_token"], named["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(token, vocab[token]) for token in dict.fromkeys((bos, eos))],
    )
    add_special_tokens(backend, tokens, types, spaces_of(metadata), is_normalized=False)
    return backend, named


def _normalizer(charsmap: list[int]) -> normalizers.Normalizer:
    """Returns the normalizer. charsmap: bytes, which are signed in some files."""
    try:
        return normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap))
    except Exception as error:  # the library raises plain Exception
        raise GgufTokenizerError(
            f"tokenizer.ggml.precompiled_charsmap cannot be read ({error}); give the model's original tokenizer with "
            "--tokenizer DIRECTORY"
        ) from error


def _named(metadata: dict[str, Any], tokens: list[str], spelled: str, *keys: str) -> str:
    """Returns a special token by the first of `keys` in the file, else by the spelling of the model family."""
    for key in (f"tokenizer.ggml.{key}_token_id" for key in keys):
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise GgufTokenizerError(f"{key} is {token_id!r:.60}, but there are {len(tokens)} tokens")
        return tokens[token_id]
    if spelled in tokens:
        return spelled
    raise GgufTokenizerError(
        f"tokenizer.ggml.{keys[0]}_token_id is missing, and there is no {spelled}; give the model's original tokenizer "
        "with --tokenizer DIRECTORY"
    )


# tokenizer.ggml.model -> (metadata, tokens, their types) -> the results of `build_gguf_tokenizer`
ENCODERS = {"bert": _word_pieces, "t5": _unigrams}
