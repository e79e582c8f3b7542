"""What the loops of a compiled kernel consist of: machine instructions, counted per loop."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from benchmarks.kernels.compiler import Specialization, listing

# /*0250*/  @!P0 LDG.E R1, desc[UR8][R2.64] ;
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16")


@dataclass(frozen=True)
class Product:
    """One wgmma of 64 rows: its columns, and whether the 64 rows are read from shared memory."""

    columns: int
    from_shared: bool


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop from its first to the jump back, in the order of one warp: (name, operands)."""

    body: tuple[tuple[str, str], ...]

    def count(self, *prefixes: str) -> int:
        """How many have a name that begins so."""
        return sum(name.startswith(prefixes) for name, _ in self.body)

    @cached_property
    def products(self) -> list[Product]:
        """Those of a warp group. Rows in registers show as a register before the descriptor of the columns."""
        found = []
        for name, operands in self.body:
            if match := _PRODUCT.match(name):
                _, source, *_ = operands.split(",")
                found.append(Product(int(match[1]), "gdesc" in source))
        return found

    @property
    def product_waits(self) -> int:
        """How often a warp group waits for all of its products."""
        return self.count("WARPGROUP.DEPBAR")

    @property
    def names(self) -> Counter[str]:
        return Counter(name for name, _ in self.body)


def loops(specialization: Specialization, capability: int) -> list[Loop]:
    """Each jump back and what it repeats, in the order of the code; inner loops are part of outer ones, too."""
    code = [
        (int(at, 16), name, operands)
        for at, name, operands in _INSTRUCTION.findall(listing(specialization, capability))
    ]
    found = []
    for at, name, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            first = int(target[1], 16)
            found.append(Loop(tuple((name, operands) for place, name, operands in code if first <= place <= at)))
    return found
