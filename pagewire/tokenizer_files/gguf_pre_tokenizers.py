"""How text is split before BPE, by the `tokenizer.ggml.pre` of a GGUF file.

A GGUF file names its pre-tokenizer instead of carrying it. The names are llama.cpp's; the splits are those of the
models' own `tokenizer.json` files, which llama.cpp reproduces with regular expressions of its own. Where transformers'
GGUF conversion knows a name only as "some GPT-2", the model's own rule wins: "smollm", for instance, splits every
digit off first, so that "  12" begins with one token of two spaces.
"""

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{suffix}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{suffix}"
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED.replace("{suffix}", "") + rf"|\p{{N}}|{_CASED_TAIL}"
_GPT4O = _CASED.replace("{suffix}", _CONTRACTIONS + "?") + rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The name in the file -> regular expressions that split one after the other; the pieces are then byte-encoded.
_REGEXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
# Every numeric character by itself, then GPT-2's own rule.
_DIGITS_THEN_GPT2 = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum", "mellum2")
)
_GPT2 = frozenset(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"))

# Vocabularies that hold whole words their merges do not reach; such a word is one token.
IGNORES_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))
# Begin with BOS unless the file says otherwise.
ADDS_BOS = IGNORES_MERGES
_NFC = frozenset(("qwen2", "qwen35"))


class UnknownPreTokenizerError(ValueError):
    """`tokenizer.ggml.pre` names a rule that is not known here."""


def is_default(name: str | None) -> bool:
    """Whether the file does not say: GPT-2's rule is taken, which may not be the model's."""
    return name in (None, "", "default")


def pre_tokenizer_for(name: str | None) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a byte-level BPE vocabulary. Raises UnknownPreTokenizerError."""
    if is_default(name) or name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name not in _REGEXES:
        raise UnknownPreTokenizerError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that is not known; give the model's original tokenizer "
            "with --tokenizer DIRECTORY"
        )
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in _REGEXES[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer_for(name: str | None) -> normalizers.Normalizer | None:
    """The Unicode normalization the model's own tokenizer begins with, if any."""
    return normalizers.NFC() if name in _NFC else None
