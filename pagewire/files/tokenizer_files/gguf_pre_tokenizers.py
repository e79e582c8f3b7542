"""Rules that split text before BPE, by `tokenizer.ggml.pre` of a GGUF file.

A GGUF file only names its pre-tokenizer. The names are llama.cpp's; the splits are those of the models' own
`tokenizer.json` files, which llama.cpp reproduces with its own regular expressions. If transformers' GGUF conversion
treats a name as GPT-2's, the model's own rule wins: "smollm", for instance, splits off every digit first, so
that "  12" begins with one token of two spaces.
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

# Code points of the cased letters that form pieces of words in DeepSeek's first tokenizer.
_CASED_LETTERS = """
    00b5 00c0-00d6 00d8-00f6 00f8-01ba 01bc-01bf 01c4-0293 0295-02af 0370-0373 0376 0377 037b-037d 037f 0386
    0388-038a 038c 038e-03a1 03a3-03f5 03f7-0481 048a-052f 0531-0556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba
    1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d
    1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc
    2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183
    2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf
    fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2
    118a0-118df 1e900-1e943
"""


def _characters(code_points: str) -> str:
    r"""Returns the character class of "0370-0373 0376": \x{0370}-\x{0373}\x{0376}."""
    return "".join("-".join(rf"\x{{{code}}}" for code in part.split("-")) for part in code_points.split())


_DEEPSEEK_CJK = f"[{_characters('4e00-9fa5 0800-4e00 ac00-d7ff')}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_characters(_CASED_LETTERS)}]+",
    rf"\s?[!-/:-~{_characters('ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Kimi's rule; && intersects character classes.
_KIMI_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_CASED[0]}*{_KIMI_CASED[1]}+{_CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_CASED[0]}+{_KIMI_CASED[1]}*{_CONTRACTIONS}?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

# Name in the file -> regular expressions that split one after the other; the pieces are then byte-encoded.
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
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": (_SEED,),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}
# Splits off every numeric character, then applies GPT-2's own rule.
_DIGITS_THEN_GPT2 = frozenset(
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum", "mellum2")
)
_GPT2 = frozenset(
    (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "exaone4",
        "granite-docling",
        "gigachat",
        "roberta-bpe",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v2-code",
    )
)

# Vocabularies with whole words that merges do not produce; such a word is one token.
IGNORES_MERGES = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"))
# Names for which text begins with BOS unless the file states otherwise.
ADDS_BOS = IGNORES_MERGES
_NFC = frozenset(("qwen2", "qwen35"))


class UnknownPreTokenizerError(ValueError):
    """Raised when `tokenizer.ggml.pre` names an unknown rule."""


def pre_tokenizer_for(name: str) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of a byte-level BPE vocabulary. Raises UnknownPreTokenizerError."""
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name == "falcon":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(behavior="contiguous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
            ]
        )
    if name not in _REGEXES:
        raise UnknownPreTokenizerError(
            f"tokenizer.ggml.pre is {name!r}, an unknown pre-tokenizer; give the model's original tokenizer "
            "with --tokenizer DIRECTORY"
        )
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in _REGEXES[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def normalizer_for(name: str | None) -> normalizers.Normalizer | None:
    """Returns the Unicode normalization with which the model's own tokenizer begins, if any."""
    return normalizers.NFC() if name in _NFC else None
