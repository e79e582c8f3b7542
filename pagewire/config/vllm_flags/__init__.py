"""Flags of current and earlier versions of vLLM that Pagewire lacks or calls by other names, with an answer to each.

`FLAGS` has the flags, `VALUES` the values of flags that both have. They are data: `pagewire.flags` acts on them, and
`python -m pagewire.flags.vllm_flags_page` makes docs/from-vllm.md from them. A flag with a meaning here is renamed; a
flag that changes no answer is ignored, and a log line reports that; any other flag is refused.
"""

from pagewire.config.vllm_flags import ignored, refused, renamed
from pagewire.config.vllm_flags.entries import BECOMES, IGNORED, REFUSED, VllmFlag
from pagewire.config.vllm_flags.values import VALUES, Value

FLAGS: dict[str, VllmFlag] = {entry.name: entry for part in (renamed, ignored, refused) for entry in part.FLAGS}

__all__ = ["BECOMES", "FLAGS", "IGNORED", "REFUSED", "VALUES", "Value", "VllmFlag"]
