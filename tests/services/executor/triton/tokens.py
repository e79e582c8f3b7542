"""Tokens of the whole executor on the GPU's kernels, in Triton's interpreter. Run by test_triton_executor.py as

    TRITON_INTERPRET=1 PAGEWIRE_CPU_KERNELS=triton python -m tests.services.executor.triton.tokens DIRECTORY NAME ...

in a process of its own. Prints as JSON the backend and, by name, the tokens: of "states", "grammars" or a key of
`executor.MODELS`. Each has a folder of its own in the directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pagewire.kernels.ops import cpu_backend
from tests.kernels.triton.interpreted import quick_interpreter
from tests.services.executor.triton import executor, grammars, states


def generate(directory: Path, name: str) -> Any:
    """Returns the tokens as JSON has them."""
    folder = directory / name.replace(" ", "-")
    folder.mkdir()
    if name in executor.MODELS:
        tokens: Any = executor.generate(folder, name)
    else:
        tokens = {"states": states, "grammars": grammars}[name].generate(folder)
    return json.loads(json.dumps(tokens))


def main() -> None:
    directory = Path(sys.argv[1])
    with quick_interpreter():
        tokens = {name: generate(directory, name) for name in sys.argv[2:]}
    print(json.dumps({"backend": cpu_backend(), "tokens": tokens}))


if __name__ == "__main__":
    main()
