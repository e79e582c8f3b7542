"""SentencePiece's model file: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto

It is read without generated stubs, because those of the `sentencepiece` package register the same message names.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceError(ValueError):
    """Raised for a file that is not a SentencePiece model or cannot be converted; the message states the reason."""


@dataclass(frozen=True)
class SentencePieceFile:
    """The used fields, with the defaults of the format."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    whitespace_is_suffix: bool = False
    charsmap: bytes = b""
    adds_dummy_prefix: bool = True
    removes_extra_whitespace: bool = True
    escapes_whitespace: bool = True


# Field number -> field here
_TRAINER_FLAGS = {24: "whitespace_is_suffix", 35: "byte_fallback"}
_TRAINER_NUMBERS = {3: "model_type", 40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
_NORMALIZER_FLAGS = {3: "adds_dummy_prefix", 4: "removes_extra_whitespace", 5: "escapes_whitespace"}


def parse(data: bytes) -> SentencePieceFile:
    """Raises SentencePieceError."""
    values: dict[str, int | bytes | bool] = {}
    pieces = []
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                inner = dict(_fields(value))
                values |= {name: bool(inner[key]) for key, name in _TRAINER_FLAGS.items() if key in inner}
                values |= {name: _signed(inner[key]) for key, name in _TRAINER_NUMBERS.items() if key in inner}
            elif number == 3 and isinstance(value, bytes):
                inner = dict(_fields(value))
                values |= {name: bool(inner[key]) for key, name in _NORMALIZER_FLAGS.items() if key in inner}
                values["charsmap"] = inner.get(2, b"")
        found = SentencePieceFile(pieces=pieces, **values)  # type: ignore[arg-type]
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise SentencePieceError(f"it is not a SentencePiece model ({error})") from error
    if not pieces:
        raise SentencePieceError("it is not a SentencePiece model: it has no pieces")
    return found


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, int(PieceType.NORMAL)
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) of each field of a message; a value that is not an int is bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire_type = key & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type} at byte {position}")
        if position + length > len(data):
            raise ValueError(f"the file ends within a field, at byte {position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns (value, position after it)."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {position}")


def _signed(value: int | bytes) -> int:
    """Returns a signed value; a negative int32 is written as 64 bits."""
    if isinstance(value, bytes):
        raise TypeError("an id is not a number")
    return value - (1 << 64) if value >> 63 else value
