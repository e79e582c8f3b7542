"""Checks the PTX of kernels that begin before the previous kernel has ended (`kernels/triton/common/launch.py`).

Run by test_compiled.py as `python -m tests.kernels.compiled.launches` in a process of its own (not the interpreter's).
Prints a line per kernel and architecture; the exit status is 0 if all is right.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from benchmarks.kernels.compiler import Specialization, ptx
from tests.kernels.compiled.ahead_of_time import representatives

# They run in prefill steps or once, and begin when all before them have ended.
IN_TURN = {
    "prefill_attention", "dequantize", "grouped_dequantize", "encoder_attention", "rotate", "tiled_state_scan",
}  # fmt: skip
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def faults(capability: int, form: Specialization) -> Iterator[str]:
    found = re.findall(rf"{WAIT}|{LAUNCH}|\b(?:st\.global|atom\.|red\.|ret;)", ptx(form, capability))
    early = capability >= 90 and form.name.removesuffix("_kernel") not in IN_TURN
    # Before anything is written, counted or left off, all programs have waited; then the next kernel may begin.
    if early and (found[:2] != [WAIT, LAUNCH] or found.count(WAIT) != 1):
        yield f"it does not wait before all else: {found}"
    if not early and (WAIT in found or LAUNCH in found):
        yield "it waits, and is not launched early"


def main() -> int:
    failed = 0
    forms = {(capability, form.name): form for capability, form in representatives()}  # of a kernel's one is enough
    for (capability, name), form in forms.items():
        wrong = list(faults(capability, form))
        failed += len(wrong)
        print("\n".join(f"FAILED {name} sm_{capability}: {fault}" for fault in wrong) or f"ok {name} sm_{capability}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
