"""The kernels of an executor on the CPU: where they are, or why plain torch would compute instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewire.config import ServeConfig
from pagewire.tools.doctor.finding import Findings, absent, ok, warning
from pagewire.tools.doctor.gpu import gpus
from pagewire.tools.doctor.host import Host

if TYPE_CHECKING:
    from pagewire.kernels.cpu.runtime.build import Outlook

_CHECK = "CPU kernels"


def _outlook() -> Outlook:
    from pagewire.kernels.cpu.runtime.build import outlook

    return outlook()


def check_kernels(host: Host, config: ServeConfig, outlook: Callable[[], Outlook] = _outlook) -> Findings:
    """Checks what a CPU executor would compute with. outlook: where it would find its kernels; raises BuildError."""
    if config.device == "cuda" or (config.device == "auto" and gpus(host)):
        yield absent(_CHECK, "models run on the GPU")
        return
    try:
        from pagewire.kernels.backends import SLOWDOWN, BuildError
    except ModuleNotFoundError:
        yield absent(_CHECK, "no executor is installed here")
        return
    meaning = f"plain torch computes instead: {SLOWDOWN}; quantized weights take the memory of 16 bits"
    if os.environ.get("PAGEWIRE_CPU_KERNELS") == "torch":
        yield warning(_CHECK, "turned off by PAGEWIRE_CPU_KERNELS=torch", meaning, "unset PAGEWIRE_CPU_KERNELS")
        return
    try:
        found = outlook()
    except BuildError as error:
        yield warning(_CHECK, error.cause, meaning, error.remedy)
        return
    if found.library is None:
        yield ok(_CHECK, f"the first start compiles them, in about a minute: {found.compiler}")
    else:
        yield ok(_CHECK, str(found.library))
