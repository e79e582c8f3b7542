"""The imports of the repository: which file imports which, deferred imports included."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# What lies at the top of the repository and is imported as `pagewire.<name>`; `pagewire/` links to it.
LINKED = ("gateway", "kernels", "quantize", "services")
ROOTS = ("pagewire", *LINKED, "benchmarks", "tests")


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the file of each module, by the name that it is imported under."""
    found = {}
    for root in ROOTS:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            if relative.parts[0] == "pagewire" and (REPOSITORY / "pagewire" / relative.parts[1]).is_symlink():
                continue
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            found[f"pagewire.{name}" if root in LINKED else name] = path
    return found


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Returns the names of all modules that a file imports: ours and those of others, at the top or later."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """Returns our files that a file imports. A package counts only where none of its modules is meant."""
    ours = modules()
    names = imports(path) & ours.keys()
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return frozenset(ours[name] for name in names - packages)
