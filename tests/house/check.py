"""Prints the tests that belong to files or folders: `python -m tests.house.check services/scheduler/core ...`.

A test file belongs to a product file if it imports that file, or if it lies in the folder of tests that mirrors the
product file's folder: `tests/gateway/messages` for `gateway/messages`, or the innermost one above: `tests/gateway`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from tests.house.graph import REPOSITORY, imported, modules

TESTS = REPOSITORY / "tests"


def tests_of(paths: Iterable[Path]) -> list[Path]:
    """Returns the test files and folders that belong to `paths`, without those inside of another one.

    Raises SystemExit if a path does not exist.
    """
    wanted: set[Path] = set()
    # Tests of the repository itself belong to every file.
    found = {TESTS / "house"}
    for path in paths:
        if not path.exists():
            raise SystemExit(f"{path} does not exist: name a file or a folder of the repository")
        path = path.resolve()
        if TESTS in (path, *path.parents):
            found.add(path)
        else:
            wanted |= {path} if path.is_file() else set(path.rglob("*.py"))
            found |= _mirror(path if path.is_dir() else path.parent)
    tests = (path for path in modules().values() if path.name.startswith("test_") and TESTS in path.parents)
    found |= {test for test in tests if wanted & imported(test)}
    return sorted(path for path in found if not set(path.parents) & found)


def _mirror(folder: Path) -> set[Path]:
    """Returns the folder of tests that mirrors a product folder or, if there is none, the innermost one above it."""
    relative = folder.relative_to(REPOSITORY)
    above = [TESTS / name for name in (relative, *relative.parents) if name != Path()]
    return set([mirror for mirror in above if mirror.is_dir()][:1])


def main() -> None:
    """Prints one path a line, relative to the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders")
    print("\n".join(str(path.relative_to(REPOSITORY)) for path in tests_of(parser.parse_args().paths)))


if __name__ == "__main__":
    main()
