"""A tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece BPE ("llama"); those of
encoders are in `gguf_encoder_tokenizers.py`.

Vocabulary, merges and special tokens are the file's; parts that a file only names (pre-tokenizer, normalizer, decoder)
are those of the model family's own `tokenizer.json`.
"""

from collections.abc import Sequence
from itertools import starmap
from types import NoneType
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagewire.files.tokenizer_files.byte_alphabet import BYTE_TO_CHAR, CHAR_TO_BYTE
from pagewire.files.tokenizer_files.fill_in_middle import GGUF_NAMES
from pagewire.files.tokenizer_files.gguf_encoder_tokenizers import ENCODERS
from pagewire.files.tokenizer_files.gguf_pre_tokenizers import (
    ADDS_BOS,
    IGNORES_MERGES,
    normalizer_for,
    pre_tokenizer_for,
)
from pagewire.files.tokenizer_files.gguf_unstated import pre_tokenizer_name, spaces_of, true_types
from pagewire.files.tokenizer_files.gguf_vocabulary import GgufTokenizerError, TokenType, add_special_tokens, unique
from pagewire.files.tokenizer_files.merges import merges_by_rank

_GEMMA = frozenset(("gemma", "gemma2", "gemma3"))
_SPACE = "▁"
_MAX_TOKEN_LENGTH = 1024  # in characters; if merges follow from scores, every split of every token is looked up

# key -> type of the value, or of the items of a list (a GGUF array has items of one type)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "general.architecture": str,
    "tokenizer.chat_template": str,
    "tokenizer.chat_template.tool_use": str,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool,
    "tokenizer.ggml.remove_extra_whitespaces": bool,
}
_ITEM_TYPES: dict[str, type | tuple[type, ...]] = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.scores": (int, float),
    "tokenizer.ggml.precompiled_charsmap": int,
}
_TOKEN_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"} | {
    name: name for names in GGUF_NAMES for name in names
}


def build_gguf_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer, and the content of its `tokenizer_config.json` (special tokens, add_bos_token, template).

    metadata: the result of pagewire.files.gguf.read_metadata. Raises GgufTokenizerError.
    """
    _check_types(metadata)
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not model or not tokens:
        raise GgufTokenizerError("the GGUF file holds no tokenizer; give one with --tokenizer DIRECTORY")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    _check_tokens(metadata, tokens)
    if len(types) != len(tokens):
        raise GgufTokenizerError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    types = true_types(tokens, types)
    is_gemma = model == "llama" and metadata.get("general.architecture") in _GEMMA
    if is_gemma:
        # Runs of spaces are stored unchanged, but text arrives with every space replaced.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    if model == "gpt2":
        backend = _build_byte_level(metadata, tokens, types)
    elif model == "llama":
        backend = _build_sentencepiece(metadata, tokens, types)
    elif model in ENCODERS:
        return ENCODERS[model](metadata, tokens, types)
    else:
        raise GgufTokenizerError(
            f"tokenizer.ggml.model {model!r} is not supported (gpt2, llama, bert and t5 are); give the model's "
            "original tokenizer with --tokenizer DIRECTORY"
        )
    add_special_tokens(backend, tokens, types, spaces_of(metadata), is_normalized=is_gemma)
    return backend, _config(metadata, tokens, model)


def _check_types(metadata: dict[str, Any]) -> None:
    for key, expected in _TYPES.items():
        if not isinstance(value := metadata.get(key), (expected, NoneType)):
            raise GgufTokenizerError(f"{key} has the wrong type: {value!r:.60}")
    for key, expected in _ITEM_TYPES.items():
        value = metadata.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, expected) for item in value)):
            raise GgufTokenizerError(f"{key} has the wrong type: {value!r:.60}")


def _check_tokens(metadata: dict[str, Any], tokens: list[str]) -> None:
    for index, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_LENGTH:
            raise GgufTokenizerError(f"tokenizer.ggml.tokens[{index}] has {len(token)} characters: {token[:20]!r}...")
    for key in _TOKEN_IDS.values():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise GgufTokenizerError(
                f"tokenizer.ggml.{key}_token_id is {token_id!r:.60}, but there are {len(tokens)} tokens"
            )


def _build_byte_level(metadata: dict[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    pre = pre_tokenizer_name(metadata)
    if pre is None:
        raise GgufTokenizerError(
            "tokenizer.ggml.pre does not name the rule by which this model splits text; give the model's original "
            "tokenizer with --tokenizer DIRECTORY, or a newer GGUF file"
        )
    vocab = unique(starmap(_byte_level_spelling, zip(tokens, types, strict=True)))
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise GgufTokenizerError("tokenizer.ggml.merges is missing; give a tokenizer with --tokenizer DIRECTORY")
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_split_merges(merges, vocab),
            dropout=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
            ignore_merges=pre in IGNORES_MERGES,
        )
    )
    backend.pre_tokenizer = pre_tokenizer_for(pre)
    if (normalizer := normalizer_for(pre)) is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_level_spelling(token: str, token_type: int) -> str:
    """Spells a vocabulary entry in the byte alphabet; some files have a few ordinary entries as plain text."""
    if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED) or all(char in CHAR_TO_BYTE for char in token):
        return token
    return "".join(BYTE_TO_CHAR[byte] for byte in token.encode())


def _build_sentencepiece(metadata: dict[str, Any], tokens: list[str], types: Sequence[int]) -> Tokenizer:
    architecture = metadata.get("general.architecture", "")
    gemma = architecture in _GEMMA
    vocab = unique(tokens)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is not None:
        pairs = _split_merges(merges, vocab)
    else:
        text = {token: id_ for token, id_ in vocab.items() if types[id_] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
        pairs = _merges_from_scores(text, None if gemma else metadata.get("tokenizer.ggml.scores"))
    unk_id = metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unk_id] if gemma and unk_id is not None else None
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, fuse_unk=True, byte_fallback=True, dropout=None, unk_token=unk_token)
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    add_space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    if gemma:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous")
    elif architecture == "phi3":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if add_space_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    if add_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Returns the merges. vocab: only text, as merges never produce control tokens or bytes. Without scores, its order
    counts."""
    if scores is None:
        return merges_by_rank(vocab)
    if len(scores) <= max(vocab.values(), default=-1):
        raise GgufTokenizerError(f"tokenizer.ggml.scores has {len(scores)} entries, fewer than tokens")
    return merges_by_rank({token: -scores[token_id] for token, token_id in vocab.items()})


def _split_merges(merges: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise GgufTokenizerError(f"tokenizer.ggml.merges[{index}] {merge!r:.100} needs tokens that do not exist")
        pairs.append((left, right))
    return pairs


def _config(metadata: dict[str, Any], tokens: list[str], model: str) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    config: dict[str, Any] = {
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", model == "llama" or pre in ADDS_BOS),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tool_chat_template": metadata.get("tokenizer.chat_template.tool_use"),
    }
    for name, key in _TOKEN_IDS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    return config
