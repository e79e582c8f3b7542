"""The build hook of wheels: compiles the C++ kernels for each kind of processor of this machine's architecture.

Such a wheel starts without a compiler. The libraries depend on neither Python nor torch: one wheel per architecture
serves all versions of both, and its tag names the oldest Linux that has all that the libraries use.
PAGEWIRE_WHEEL_KERNELS=none builds a wheel without kernels, for services that run no model; it is also what a machine
without a compiler builds. Editable installations compile at their first start, for their own processor only.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# manylinux_2_17 is the oldest that pip knows by this form of name.
_OLDEST_GLIBC = 17
# The C++ runtime comes with the system, as for torch. GLIBCXX_3.4.N is in manylinux_2_M, by the policies of auditwheel.
_MANYLINUX_OF_CXX = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to a wheel, and tags it. Raises BuildError if a compiler is there but fails."""
        if version == "editable" or os.environ.get("PAGEWIRE_WHEEL_KERNELS") == "none":
            return
        sys.path.insert(0, self.root)
        from pagewire.kernels.backends import BuildError
        from pagewire.kernels.cpu.runtime import build, variants
        from pagewire.kernels.cpu.runtime.compiler import Compiler

        try:
            compiler = Compiler.find()
        except BuildError as error:
            self.app.display_warning(f"the wheel has no CPU kernels: {error}")
            return
        self._folder = tempfile.TemporaryDirectory(prefix="pagewire-wheel-")
        libraries = []
        for variant in variants.of_machine():
            self.app.display_info(f"compiling the CPU kernels: {variant.name}")
            path = Path(self._folder.name) / build.shipped_name(variant)
            compiler.compile(variant.flags, path)
            build_data["force_include"][str(path)] = f"pagewire/kernels/cpu/{build.SHIPPED_DIR.name}/{path.name}"
            libraries.append(path)
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def platform_tag(libraries: list[Path]) -> str:
    """Returns the tag of a wheel with these libraries: the oldest manylinux that has the symbols which they need, or
    this very system's, where there is no glibc or a C++ runtime that no manylinux has."""
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{platform.machine()}"
    said = subprocess.run(["objdump", "-T", *map(str, libraries)], capture_output=True, text=True, check=True).stdout
    newest_cxx = max((int(minor) for minor in re.findall(r"GLIBCXX_3\.4\.(\d+)", said)), default=0)
    of_cxx = next((minor for cxx, minor in _MANYLINUX_OF_CXX.items() if newest_cxx <= cxx), None)
    if of_cxx is None:
        return f"linux_{platform.machine()}"
    minors = [int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", said)]
    return f"manylinux_2_{max([_OLDEST_GLIBC, of_cxx, *minors])}_{platform.machine()}"
