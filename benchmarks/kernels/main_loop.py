"""The loop of a compiled product over its inputs, as machine instructions."""

from __future__ import annotations

import re

from benchmarks.kernels.compiler import Specialization, _compile, _dump


def main_loop(specialization: Specialization, capability: int) -> list[str]:
    """The shortest loop with matrix products: instructions with operands, as "LDG.E R4, desc[UR6][R2.64]".

    Of those with asynchronous copies, if there are such: others are of edges.
    """
    listing = _dump("-sass", _compile(specialization, capability).asm["cubin"])
    # /*0250*/  @!P0 LDG.E R1, desc[UR8][R2.64] ;
    code = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*?)\s*;", listing, re.MULTILINE)
    places = [int(place, 16) for place, _ in code]
    loops = []
    for place, (_, text) in zip(places, code, strict=True):
        target = re.match(r"BRA.*\b0x([0-9a-f]+)", text)
        if target and (first := int(target[1], 16)) < place:
            body = [text for at, (_, text) in zip(places, code, strict=True) if first <= at <= place]
            if any(re.match(r"\w*MMA", text) for text in body):
                loops.append(body)
    copying = [loop for loop in loops if count(loop, "LDGSTS", "UTMALDG")]
    return min(copying or loops, key=len)


def count(loop: list[str], *prefixes: str) -> int:
    """Returns how many instructions begin so."""
    return sum(text.startswith(prefixes) for text in loop)
