"""Byte-level BPE from its file formats: tiktoken's ranks, Mistral's tekken.json, vocab.json."""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagewire.files.tokenizer_files.byte_alphabet import BYTE_TO_CHAR
from pagewire.files.tokenizer_files.gguf_pre_tokenizers import normalizer_for, pre_tokenizer_for
from pagewire.files.tokenizer_files.merges import merges_by_rank

_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}
_NUM_LLAMA3, _NUM_QWEN_EXTRA = 256, 205


class ByteLevelError(ValueError):
    """Raised for a file that cannot be converted; the message states the reason."""


def build_tiktoken_tokenizer(data: bytes, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads lines with a token in base64 and its rank. The rule that splits text follows from `tokenizer_class`, as it
    is not in the file. Results and errors are those of `build_sentencepiece_tokenizer`.
    """
    ranks = _tiktoken_ranks(data)
    tokenizer_class = config.get("tokenizer_class")
    if tokenizer_class == "QWenTokenizer":
        extra = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(_NUM_QWEN_EXTRA))]
        backend = _from_ranks(ranks, pre_tokenizer_for("qwen2"))
        backend.normalizer = normalizers.NFC()
        return _with_special(backend, extra, config), {"eos_token": "<|endoftext|>"}
    if tokenizer_class == "TikTokenTokenizer":
        backend = _from_ranks(ranks, pre_tokenizer_for("kimi-k2"))
        return _with_special(backend, [], config), {"add_bos_token": False, "add_eos_token": False}
    if tokenizer_class in (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"):
        backend = _from_ranks(ranks, pre_tokenizer_for("llama3"))
        backend = _with_special(backend, _llama3_special(), config)
        named = {"bos_token": _LLAMA3_NAMED[0], "eos_token": _LLAMA3_NAMED[1]}
        return backend, {**named, "add_bos_token": True, "add_eos_token": False}
    raise ByteLevelError(f"the rule by which {tokenizer_class} splits text is unknown")


def build_tekken_tokenizer(data: bytes, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads Mistral's tekken.json: special tokens come first, ranks follow. Results and errors are as above."""
    try:
        file = json.loads(data)
        settings, num_special = file["config"], int(file["config"]["default_num_special_tokens"])
        count = int(settings["default_vocab_size"]) - num_special
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in file["vocab"][:count]}
        special = {int(entry["rank"]): str(entry["token_str"]) for entry in file.get("special_tokens") or []}
        pattern = str(settings["pattern"])
    except (ValueError, KeyError, TypeError) as error:
        raise ByteLevelError(f"it is not in the format of tekken.json ({error!r})") from error
    special = {0: "<unk>", 1: "<s>", 2: "</s>", **special}
    names = [special.get(index, f"<SPECIAL_{index}>") for index in range(num_special)]
    backend = _from_ranks(ranks, _split_by(pattern), dict(zip(names, range(num_special), strict=True)))
    named = {"bos_token": names[1], "eos_token": names[2], "unk_token": names[0]}
    return _with_special(backend, names, {}), {**named, "add_bos_token": True, "add_eos_token": False}


def build_vocab_tokenizer(vocab: bytes, merges: bytes, config: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads vocab.json and merges.txt, like those of GPT-2. Results and errors are as above."""
    try:
        ids = json.loads(vocab)
        lines = [line for line in merges.decode().split("\n") if line and not line.startswith("#version")]
        pairs = [(left, right) for left, right in (line.split(" ") for line in lines)]
        model = models.BPE(ids, pairs)
    except Exception as error:  # the library raises plain Exception for any bad argument
        raise ByteLevelError(f"they do not fit each other ({error})") from error
    tokenizer_class = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    if tokenizer_class not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise ByteLevelError(f"the rule by which {tokenizer_class} splits text is unknown")
    backend = Tokenizer(model)
    name = "qwen2" if tokenizer_class == "Qwen2Tokenizer" else "gpt-2"
    backend.pre_tokenizer = pre_tokenizer_for(name)
    if (normalizer := normalizer_for(name)) is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return _with_special(backend, [], config), {"eos_token": "<|endoftext|>"}


def _tiktoken_ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ByteLevelError(f"line {number} is not a token in base64 and its rank") from error
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ByteLevelError("it is not a file of tiktoken: not every byte is a token")
    return ranks


def _from_ranks(
    ranks: Mapping[bytes, int], pre_tokenizer: pre_tokenizers.PreTokenizer, first: dict[str, int] | None = None
) -> Tokenizer:
    """Builds a tokenizer. first: tokens with ids before the ranks. Added tokens follow the ranks without a gap."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ByteLevelError(f"its {len(ranks)} ranks are not the numbers from 0 to {len(ranks) - 1}")
    vocab = dict(first or {})
    offset = len(vocab)
    vocab |= {_spelled(token): rank + offset for token, rank in ranks.items()}
    merges = [(_spelled(left), _spelled(right)) for left, right in merges_by_rank(ranks)]
    # A word that is a token becomes one even if merges do not produce it: tiktoken looks it up first.
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _spelled(token: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in token)


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3_special() -> list[str]:
    """Returns the 256 special tokens of Llama 3.0, in the order of their ids."""
    names = []
    for index in range(_NUM_LLAMA3):
        name = _LLAMA3_NAMED.get(index)
        names.append(name or f"<|reserved_special_token_{index - sum(known <= index for known in _LLAMA3_NAMED)}|>")
    return names


def _with_special(backend: Tokenizer, names: list[str], config: dict[str, Any]) -> Tokenizer:
    """Adds the special tokens that the directory does not list with ids in `added_tokens_decoder`."""
    if not config.get("added_tokens_decoder"):
        backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return backend
