"""Tokenizers of directories without a tokenizer.json, which are converted once and kept in the user's cache
directory."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from pagewire.files.models import cache_directory
from pagewire.files.tokenizer_files.byte_level_tokenizer import (
    build_tekken_tokenizer,
    build_tiktoken_tokenizer,
    build_vocab_tokenizer,
)
from pagewire.files.tokenizer_files.sentencepiece_tokenizer import build_sentencepiece_tokenizer
from pagewire.files.tokenizer_files.word_pieces import word_piece_tokenizer

logger = logging.getLogger(__name__)

# (contents of the files, tokenizer_config.json) -> tokenizer, and settings that tokenizer_config.json may lack
Build = Callable[[list[bytes], dict[str, Any]], tuple[Tokenizer, dict[str, Any]]]


@dataclass(frozen=True)
class Convertible:
    """Files from which a tokenizer can be made."""

    files: tuple[str, ...]  # patterns, one for each file
    build: Build


def _build_model_file(contents: list[bytes], config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads `tokenizer.model`: SentencePiece's, which begins with a tag, or tiktoken's as of Llama 3, which is text."""
    is_text = contents[0][:1] not in (b"\n", b"")  # the tag of field 1, a message
    return (build_tiktoken_tokenizer if is_text else build_sentencepiece_tokenizer)(contents[0], config)


def _build_vocab_and_merges(contents: list[bytes], config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    vocab, merges = contents
    return build_vocab_tokenizer(vocab, merges, config)


def _build_word_pieces(contents: list[bytes], config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads BERT's vocab.txt, which has one piece per line."""
    tokens = contents[0].decode().split("\n")
    vocab = {token.rstrip("\r"): index for index, token in enumerate(tokens) if token}
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    if missing := [token for token in named.values() if token not in vocab]:
        raise ValueError(f"it is not BERT's: {', '.join(missing)} is not in it")
    normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
    )
    return word_piece_tokenizer(vocab, normalizer, named), named


# The first format with all its files is used.
CONVERTIBLE = (
    Convertible(("tekken.json",), lambda contents, config: build_tekken_tokenizer(contents[0], config)),
    Convertible(("tokenizer.model",), _build_model_file),
    Convertible(("spiece.model",), _build_model_file),
    Convertible(("*.tiktoken",), _build_model_file),
    Convertible(("tiktoken.model",), _build_model_file),
    Convertible(
        ("vocab.json", "merges.txt"), lambda contents, config: build_vocab_tokenizer(contents[0], contents[1], config)
    ),
    Convertible(("vocab.txt",), _build_word_pieces),
)


def convert(directory: Path, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Returns the tokenizer, and settings in the files that `config` (tokenizer_config.json) may lack; None without
    such files.

    Raises ValueError, which names the file.
    """
    for convertible in CONVERTIBLE:
        found = [sorted(directory.glob(pattern))[:1] for pattern in convertible.files]
        if all(found):
            return _converted([path for paths in found for path in paths], convertible.build, config)
    return None


def _converted(paths: list[Path], build: Build, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    contents = [path.read_bytes() for path in paths]
    kept = cache_directory() / "tokenizers" / f"{_digest(contents, config)}.json"
    try:
        entry = json.loads(kept.read_text(encoding="utf-8"))
        return Tokenizer.from_str(entry["tokenizer"]), entry["config"]
    except FileNotFoundError:
        pass
    except Exception as error:  # the library raises plain Exception; after any error, the file is made again
        logger.warning("%s cannot be used (%s); the tokenizer is converted again", kept, error)
    names = " and ".join(path.name for path in paths)
    try:
        backend, defaults = build(contents, config)
    except ValueError as error:
        raise ValueError(f"{paths[0].parent}: {names} cannot be converted to a tokenizer: {error}") from error
    logger.info("tokenizer converted from %s", names)
    _keep(kept, {"tokenizer": backend.to_str(), "config": defaults})
    return backend, defaults


def _digest(contents: list[bytes], config: dict[str, Any]) -> str:
    """Returns the digest of everything that a conversion depends on, including its code."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    code = sorted(Path(__file__).parent.glob("*.py"))
    for content in (*contents, *(path.read_bytes() for path in code)):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def _keep(path: Path, entry: dict[str, Any]) -> None:
    """Writes an entry atomically; if the cache cannot be written, the next start converts again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(entry, file)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("the converted tokenizer cannot be kept: %s", error)
