"""The cases of several modules of Triton kernels in one process, which has to import torch and Triton once only:

    TRITON_INTERPRET=1 python -m tests.kernels.triton.modules attention elementwise ...

Prints "module <name>" before the lines of each module.
"""

from __future__ import annotations

import importlib
import sys

from tests.kernels.triton.interpreted import run_cases


def main() -> int:
    status = 0
    for name in sys.argv[1:]:
        print(f"module {name}", flush=True)
        status |= run_cases(importlib.import_module(f"tests.kernels.triton.{name}").CASES)
    return status


if __name__ == "__main__":
    sys.exit(main())
