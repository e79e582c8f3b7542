"""A tokenizer from SentencePiece's `tokenizer.model`: its normalization, and its BPE or unigram model."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagewire.files.tokenizer_files.merges import merges_by_rank
from pagewire.files.tokenizer_files.sentencepiece_file import (
    BPE,
    UNIGRAM,
    PieceType,
    SentencePieceError,
    SentencePieceFile,
    parse,
)

_SPACE = "▁"
_MERGED = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.UNUSED)
_ENDS_WITH_EOS = ("T5Tokenizer", "UMT5Tokenizer")
# Tokenizer classes with other ids than those of the file.
_REORDERED = ("Barthez", "Camembert", "DebertaV2", "MBart", "NllbTokenizer", "Pegasus", "XGLM", "XLMRoberta", "XLNet")


def build_sentencepiece_tokenizer(data: bytes, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer, and the content of a `tokenizer_config.json` (named tokens, add_bos_token).

    config: tokenizer_config.json of the directory. Raises SentencePieceError.
    """
    file = parse(data)
    tokenizer_class = str(config.get("tokenizer_class") or "")
    if tokenizer_class.startswith(_REORDERED):
        raise SentencePieceError(f"{tokenizer_class} numbers the pieces in its own order")
    if file.whitespace_is_suffix or not file.escapes_whitespace:
        raise SentencePieceError("it was trained with treat_whitespace_as_suffix or without escape_whitespaces")
    backend = Tokenizer(_model(file))
    _set_spaces(backend, file, first_only=config.get("legacy") is False)
    added = [
        AddedToken(text, normalized=False, special=kind == PieceType.CONTROL)
        for text, _, kind in file.pieces
        if kind in (PieceType.CONTROL, PieceType.USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend, _config(file, tokenizer_class)


def _model(file: SentencePieceFile) -> models.Model:
    if not 0 <= file.unk_id < len(file.pieces):
        raise SentencePieceError(f"unk_id is {file.unk_id}, but there are {len(file.pieces)} pieces")
    if file.model_type == UNIGRAM:
        vocab = [(text, score) for text, score, _ in file.pieces]
        return models.Unigram(vocab, unk_id=file.unk_id, byte_fallback=file.byte_fallback)
    if file.model_type != BPE:
        raise SentencePieceError(f"model_type is {file.model_type}: only unigram (1) and BPE (2) are supported")
    ranks = {text: -score for text, score, kind in file.pieces if kind in _MERGED}
    return models.BPE(
        vocab={text: index for index, (text, _, _) in enumerate(file.pieces)},
        merges=merges_by_rank(ranks),
        unk_token=file.pieces[file.unk_id][0],
        fuse_unk=True,
        byte_fallback=file.byte_fallback,
    )


def _set_spaces(backend: Tokenizer, file: SentencePieceFile, *, first_only: bool) -> None:
    """Sets how spaces are replaced. first_only: adds a space only before the text, not also after each special
    token."""
    steps: list[normalizers.Normalizer] = []
    if file.charsmap:
        steps.append(normalizers.Precompiled(file.charsmap))
    if file.removes_extra_whitespace:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if file.adds_dummy_prefix and first_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    elif file.adds_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    undo = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.adds_dummy_prefix:
        undo.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(undo)


def _config(file: SentencePieceFile, tokenizer_class: str) -> dict[str, Any]:
    ends_with_eos = tokenizer_class.startswith(_ENDS_WITH_EOS)
    ids = {"bos": file.bos_id, "eos": file.eos_id, "unk": file.unk_id, "pad": file.pad_id}
    named = {f"{name}_token": file.pieces[id_][0] for name, id_ in ids.items() if 0 <= id_ < len(file.pieces)}
    return {**named, "add_bos_token": not ends_with_eos and "bos_token" in named, "add_eos_token": ends_with_eos}
