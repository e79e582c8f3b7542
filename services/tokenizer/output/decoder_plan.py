"""Plans of decoders: streaming steps that are equivalent to a tokenizer's decoder."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagewire.files.tokenizer_files.byte_alphabet import CHAR_TO_BYTE
from pagewire.files.tokenizer_files.loaded_tokenizer import CLEAN_UPS
from pagewire.services.tokenizer.output.decoding_steps import (
    ByteFallbackJoiner,
    ByteLevelJoiner,
    FirstPieceJoiner,
    Joiner,
    StripStart,
    TextStep,
    replace_all,
)


class UnsupportedDecoderError(ValueError):
    """The tokenizer's decoder has a step that cannot be streamed."""


@dataclass
class Plan:
    """A tokenizer's decoder as streaming steps."""

    joiner: Callable[[Any], Joiner]
    # A token as the vocabulary spells it -> the piece that the joiner takes.
    to_piece: Callable[[str], Any]
    steps: list[Callable[[], TextStep]] = field(default_factory=list)
    # The same for the first token of a text, which some decoders show differently.
    to_first_piece: Callable[[str], str] | None = None


def plan_of(description: dict[str, Any] | None) -> Plan:
    """Returns the plan for a decoder, from its own JSON description. None: without a decoder, spaces join tokens."""
    if description is None:
        return Plan(FirstPieceJoiner, lambda token: " " + token, to_first_piece=str)
    steps = _flatten(description)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Plan(ByteLevelJoiner, byte_level_bytes)
    if kinds == ["Metaspace"]:
        return _metaspace_plan(steps[0])
    if kinds == ["WordPiece"]:
        return _word_piece_plan(steps[0])
    return _sentencepiece_plan(steps)


def _flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description["type"] == "Sequence":
        return [step for inner in description["decoders"] for step in _flatten(inner)]
    return [description]


def _metaspace_plan(step: dict[str, Any]) -> Plan:
    """The mark becomes a space. In the first token, it may be dropped."""
    mark = step["replacement"]
    in_first = " " if step["prepend_scheme"] == "never" else ""

    return Plan(
        FirstPieceJoiner,
        lambda token: token.replace(mark, " "),
        to_first_piece=lambda token: token.replace(mark, in_first),
    )


# What the WordPiece decoder cleans up in each token, in this order.
_WORD_PIECE_CLEAN_UPS = (*CLEAN_UPS[:6], (" 'm", "'m"), (" do not", " don't"), *CLEAN_UPS[7:])


def _word_piece_plan(step: dict[str, Any]) -> Plan:
    """A space precedes each token except the first and those that continue a word, which have a prefix."""
    prefix, cleans_up = step["prefix"], step["cleanup"]

    def shown(piece: str) -> str:
        for pattern, content in _WORD_PIECE_CLEAN_UPS if cleans_up else ():
            piece = piece.replace(pattern, content)
        return piece

    def to_piece(token: str) -> str:
        return shown(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}")

    return Plan(FirstPieceJoiner, to_piece, to_first_piece=shown)


def _sentencepiece_plan(steps: list[dict[str, Any]]) -> Plan:
    """[Replace...] [ByteFallback] Fuse [Strip | Replace...]: per token before Fuse, over the whole text after it."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    plan = Plan(ByteFallbackJoiner, str)
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if fused:
                plan.steps.append(replace_all(pattern, content))
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not byte_fallback:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"} if not byte_fallback and not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": char, "start": count, "stop": 0} if fused:
                plan.steps.append(lambda char=char, count=count: StripStart(char, count))  # type: ignore[misc]
            case _:
                raise UnsupportedDecoderError(
                    f"the tokenizer's decoder cannot be streamed because of its step {json.dumps(step)}; supported "
                    "are ByteLevel, Metaspace, WordPiece, and SentencePiece's Replace, ByteFallback, Fuse, Strip"
                )

    def to_piece(token: str) -> str | int:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        byte = fallback_byte(token) if byte_fallback else None
        return token if byte is None else byte

    plan.to_piece = to_piece
    return plan


def fallback_byte(token: str) -> int | None:
    """Returns the byte that "<0xE2>" stands for; None for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a token: its own UTF-8 if a character is outside the byte alphabet, as in special tokens."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode()
