"""Flags of vLLM, of today and of the tutorials, that Pagewire has not or spells otherwise: what becomes of each.

`FLAGS` has the flags, `VALUES` the values of flags that both have. They are data: `pagewire.flags` acts on them, and
`python -m pagewire.flags.from_vllm` makes docs/from-vllm.md of them. A flag that means something here becomes that; one
whose absence changes no answer is ignored, which a line says; one that asks for something else than would be served is
refused.
"""

from pagewire.config.legacy import api, distribution, memory, model, observability, scheduling, speculation
from pagewire.config.legacy.entries import BECOMES, IGNORED, REFUSED, Legacy
from pagewire.config.legacy.values import VALUES, Value

FLAGS: dict[str, Legacy] = {
    entry.name: entry
    for part in (model, memory, scheduling, distribution, speculation, api, observability)
    for entry in part.FLAGS
}

__all__ = ["BECOMES", "FLAGS", "IGNORED", "REFUSED", "VALUES", "Legacy", "Value"]
