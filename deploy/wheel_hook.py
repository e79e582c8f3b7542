"""The build hook of wheels: compiles the C++ kernels for each kind of processor of this machine's architecture.

Such a wheel starts without a compiler. The libraries depend on neither Python nor torch, only on glibc: one wheel per
architecture serves all versions of both; its tag names the oldest glibc that has all that the libraries use.
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

# Wheels hold the C++ runtime; what they need of glibc 2.17 and older is in every manylinux.
_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc")
_OLDEST_GLIBC = 17


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to a wheel, and tags it. Raises BuildError if a compiler is there but fails."""
        if version == "editable" or os.environ.get("PAGEWIRE_WHEEL_KERNELS") == "none":
            return
        sys.path.insert(0, self.root)
        from pagewire.kernels.cpu.runtime import build, variants
        from pagewire.kernels.cpu.runtime.compiler import BuildError, Compiler

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
            compiler.compile(variant.flags, path, _LINK_FLAGS)
            build_data["force_include"][str(path)] = f"pagewire/kernels/cpu/{build.SHIPPED_DIR.name}/{path.name}"
            libraries.append(path)
        if libraries:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def platform_tag(libraries: list[Path]) -> str:
    """Returns the tag of a wheel with these libraries: the oldest manylinux that has the glibc which they need, or this
    very system's, where there is no glibc."""
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{platform.machine()}"
    said = subprocess.run(["objdump", "-T", *map(str, libraries)], capture_output=True, text=True, check=True).stdout
    minors = [int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", said)]
    return f"manylinux_2_{max([_OLDEST_GLIBC, *minors])}_{platform.machine()}"
