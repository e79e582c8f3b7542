"""What the PTX of kernels shows of how they begin before the one before them has ended (`kernels/triton/launch.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from benchmarks.kernels.compiler import Specialization, ptx

# They run in prefill steps or once, and begin when all before them have ended; the last two, still.
IN_TURN = {
    "prefill_attention", "dequantize", "grouped_dequantize", "encoder_attention", "rotate", "tiled_state_scan",
    "decode_attention", "step_inputs",
}  # fmt: skip
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def launch_faults(forms: Iterable[tuple[int, Specialization]]) -> Iterator[str]:
    """What would be wrong with a kernel that begins before the one before it has ended (`kernels/triton/launch.py`)."""
    seen = set()
    for capability, form in forms:
        if (capability, form.name) in seen:
            continue
        seen.add((capability, form.name))
        found = re.findall(rf"{WAIT}|{LAUNCH}|\b(?:st\.global|atom\.|red\.|ret;)", ptx(form, capability))
        early = capability >= 90 and form.name.removesuffix("_kernel") not in IN_TURN
        # Before anything is written, counted or left off, all programs have waited; then the next kernel may begin.
        if early and (found[:2] != [WAIT, LAUNCH] or found.count(WAIT) != 1):
            yield f"{form.name} sm_{capability}: it does not wait before all else, but {found}"
        if not early and (WAIT in found or LAUNCH in found):
            yield f"{form.name} sm_{capability}: it waits for what is not launched early"
