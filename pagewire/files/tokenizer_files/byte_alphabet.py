"""The alphabet of byte-level BPE vocabularies: one printable character per byte.

Bytes that are printable in Latin-1 represent themselves; the others are mapped, in order, to 256 and up (GPT-2's rule).
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_MOVED = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_TO_CHAR: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_MOVED)
}
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}
