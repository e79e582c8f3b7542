"""Copies Python, what it loads and what it reads to a directory: the whole file system of a small image.

python slim_root.py /slim      # in an image of Debian with Python; no shell and no package manager come along
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# Of the standard library, what no service runs.
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "config-*", "*-packages")
# Certificates, users, where libraries lie, and which packages all this is from, for scanners.
_READ = ("/etc/ssl", "/usr/lib/ssl", "/usr/share/ca-certificates", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf")
_READ += ("/etc/ld.so.cache", "/etc/os-release", "/usr/lib/os-release", "/var/lib/dpkg/status")
# Wheels expect them besides what Python needs.
_OF_WHEELS = ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")
_PATH = re.compile(r"(/\S+\.so\S*)")


def libraries(programs: Iterable[Path]) -> Iterator[Path]:
    """The shared libraries that programs and extensions are linked with, and the loader itself."""
    for program in programs:
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        yield from (Path(found) for found in _PATH.findall(listed))
    cached = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in _OF_WHEELS:
        yield from (Path(path) for path in re.findall(rf"^\s*{re.escape(name)} .*=> (\S+)$", cached, re.MULTILINE)[:1])


def copy(path: Path, root: Path) -> None:
    """A file or folder to the same place below `root`; of a link also what it leads to."""
    path = path.parent.resolve() / path.name  # /lib is /usr/lib
    target = root / path.relative_to("/")
    if target.exists() or target.is_symlink():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        target.symlink_to(path.readlink())
        copy(path.parent / path.readlink(), root)
    elif path.is_dir():
        shutil.copytree(path, target, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    elif path.exists():
        shutil.copy2(path, target)


def main(root: Path) -> None:
    for link in ("bin", "lib", "lib64", "sbin"):
        if Path("/", link).is_symlink():
            root.mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(Path("/", link).readlink())
    names = ("python", "python3", Path(sys.executable).resolve().name)
    programs = [Path(sys.base_prefix, "bin", name) for name in names]
    standard = Path(os.__file__).parent
    extensions = list((standard / "lib-dynload").glob("*.so"))
    for path in [*programs, standard, *map(Path, _READ), *libraries([programs[-1], *extensions])]:
        copy(path, root)
    for folder in ("tmp", "app", "proc", "sys", "dev"):
        (root / folder).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
