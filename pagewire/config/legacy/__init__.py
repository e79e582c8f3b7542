"""Flags of current and earlier versions of vLLM that Pagewire lacks or calls by other names, with an answer to each.

`FLAGS` has the flags, `VALUES` the values of flags that both have. They are data: `pagewire.flags` acts on them, and
`python -m pagewire.flags.from_vllm` makes docs/from-vllm.md from them. A flag with a meaning here is renamed; a flag
whose absence changes no answer is ignored, and a line reports that; any other flag is refused.
"""

from pagewire.config.legacy import ignored, refused, renamed
from pagewire.config.legacy.entries import BECOMES, IGNORED, REFUSED, Legacy
from pagewire.config.legacy.values import VALUES, Value

FLAGS: dict[str, Legacy] = {entry.name: entry for part in (renamed, ignored, refused) for entry in part.FLAGS}

__all__ = ["BECOMES", "FLAGS", "IGNORED", "REFUSED", "VALUES", "Legacy", "Value"]
