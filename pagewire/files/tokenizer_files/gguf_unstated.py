"""Facts about a tokenizer that its GGUF file does not state, by the model.

Special tokens of some models take the spaces beside them, which a file does not state; llama.cpp knows these models by
name. A model that is not here has no such tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.files.tokenizer_files.end_tokens import END_TEXTS
from pagewire.files.tokenizer_files.gguf_vocabulary import Spaces, TokenType

_ARCHITECTURE, _MODEL, _PRE = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"


@dataclass(frozen=True)
class _Rule:
    """Spaces that tokens take. tokens: which; None: all special and user-defined ones, except for `but`."""

    applies: Callable[[Mapping[str, Any]], bool]
    spaces: Spaces
    tokens: frozenset[str] | None = None
    but: frozenset[str] = frozenset()


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether it is Phi-3 or 3.5. Phi-4-mini has the same architecture and another tokenizer."""
    return metadata.get(_ARCHITECTURE) == "phi3" and metadata.get(_MODEL) == "llama"


def _is_roberta(metadata: Mapping[str, Any]) -> bool:
    """Whether it is a descendant of RoBERTa or XLM-RoBERTa."""
    if metadata.get(_MODEL) == "t5":
        return metadata.get(_ARCHITECTURE) in ("bert", "nomic-bert-moe", "jina-bert-v3")
    return metadata.get(_PRE) in ("roberta-bpe", "jina-v2-es", "jina-v2-de", "jina-v2-code")


_RULES = (
    # A newline after <|user|> or <|end|>, which its chat template writes, is no token.
    _Rule(_is_phi3, Spaces(after=True), but=frozenset(("<unk>", "<s>", "<|endoftext|>"))),
    _Rule(_is_roberta, Spaces(before=True), tokens=frozenset(("<mask>",))),
)


def spaces_of(metadata: Mapping[str, Any]) -> Callable[[str], Spaces]:
    """Returns a function that says which spaces an added token takes."""
    rule = next((rule for rule in _RULES if rule.applies(metadata)), None)

    def of(token: str) -> Spaces:
        if rule is None or token in rule.but or (rule.tokens is not None and token not in rule.tokens):
            return Spaces()
        return rule.spaces

    return of


def true_types(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Returns the types of tokens. Some files call tokens that end an output plain text, which they never are."""
    pairs = zip(tokens, types, strict=True)
    return [TokenType.CONTROL if kind == TokenType.NORMAL and token in END_TEXTS else kind for token, kind in pairs]


# The rules that split text for files from before these were named, if the architecture has only one.
_PRE_OF_ARCHITECTURE = {
    "gpt2": "gpt-2",
    "gptj": "gpt-2",
    "gptneox": "olmo",
    "phi2": "phi-2",
    "mpt": "mpt",
    "falcon": "falcon",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
    "refact": "refact",
    "codeshell": "codeshell",
    "command-r": "command-r",
}


def pre_tokenizer_name(metadata: Mapping[str, Any]) -> str | None:
    """Returns the name of the rule that splits text, from the file or by its architecture; None if it is unknown."""
    name = metadata.get(_PRE)
    return name if name not in (None, "", "default") else _PRE_OF_ARCHITECTURE.get(metadata.get(_ARCHITECTURE, ""))
