"""The bounds that keep the repository fit for one person: sizes of folders and files, a fenced core, plain English."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house import prose
from tests.house.graph import REPOSITORY, imported, imports, modules

MAX_ENTRIES = 20
PROSE = ("benchmarks", "deploy", "gateway", "kernels", "pagewire", "protos", "quantize", "services", "tests")
MAX_LINES = 350  # of a product file
MAX_CORE_FILES, MAX_CORE_LINES = 80, 12_000
MAX_PERSONS = 0.5  # per 1,000 words
# Of the core's files and of all that they import, directly or not.
MAX_LOADED_FILES, MAX_LOADED_LINES = 320, 33_700

# Folders with entries that are one kind of thing and grow by design.
GROWING = {
    "benchmarks/results": "a file for each figure that is kept",
    "gateway/page/static": "the page as browsers load it",
    "protos/pagewire/v1": "generated stubs beside the contracts",
}

# What joins the core by seams; no file of the core imports one of these folders or files.
FEATURES = (
    "gateway.kept",
    "gateway.store",
    "gateway.batches",
    "gateway.files",
    "gateway.responses",
    "gateway.messages",
    "gateway.dialects",
    "gateway.vectors",
    "gateway.operation",
    "gateway.page",
    "gateway.generation.searches",
    "services.tokenizer.vectors",
    "services.tokenizer.images",
    "services.tokenizer.parsers",
    "services.tokenizer.generation.choices",
    "services.scheduler.speculation",
    "services.scheduler.fairness",
    "services.scheduler.suspicion",
    "services.scheduler.placement",
    "services.scheduler.weights",
    "services.scheduler.admission",
    "services.scheduler.grammars",
    "services.scheduler.adapters",
    "services.scheduler.kv_events",
    "services.scheduler.tiers",
    "services.scheduler.roles",
    "services.executor.speculation",
    "services.executor.ranks",
    "services.executor.grammar",
    "services.executor.adapters",
    "services.executor.tiers",
    "services.executor.batch.images",
    "services.executor.runner.pipeline",
    "services.executor.service.replacement",
    "services.executor.start.fault_injection",
    "pagewire.tools",
    "pagewire.stack",
)


def entries() -> Counter[Path]:
    """Returns how many files and folders each folder of the repository holds, `__init__.py` not counted."""
    counted: Counter[Path] = Counter()
    folders = set()
    for path in prose.tracked():
        if path.name != "__init__.py":
            counted[path.parent] += 1
        folders |= {folder for folder in path.parents if REPOSITORY in folder.parents}
    for folder in folders:
        counted[folder.parent] += 1
    return counted


def test_a_folder_holds_what_fits_on_a_screen() -> None:
    held = {str(folder.relative_to(REPOSITORY)): count for folder, count in entries().items()}
    too_full = {name: n for name, n in held.items() if n > MAX_ENTRIES and not name.startswith((*GROWING, "."))}
    assert not too_full


def test_a_file_is_read_in_one_sitting() -> None:
    product = [path for path in modules().values() if REPOSITORY / "tests" not in path.parents]
    lengths = {path: path.read_text().count("\n") for path in product}
    too_long = {str(path.relative_to(REPOSITORY)): n for path, n in lengths.items() if n > MAX_LINES}
    assert not too_long


def core() -> list[Path]:
    """Returns the files that docs/reading.md names, in its order."""
    text = (REPOSITORY / "docs" / "reading.md").read_text()
    return [REPOSITORY / name for name in re.findall(r"^- `([^`]+\.\w+)`", text, re.MULTILINE)]


def test_the_core_is_read_in_a_day() -> None:
    files = core()
    assert len(files) == len(set(files)) and all(path.is_file() for path in files)
    lines = sum(path.read_text().count("\n") for path in files)
    assert (len(files) <= MAX_CORE_FILES, lines <= MAX_CORE_LINES) == (True, True), (len(files), lines)


def test_the_core_imports_no_feature() -> None:
    fenced = tuple(name if name.startswith("pagewire.") else f"pagewire.{name}" for name in FEATURES)
    known = modules()
    assert all(any(module == name or module.startswith(f"{name}.") for module in known) for name in fenced)
    crossing = {}
    for path in core():
        name = str(path.relative_to(REPOSITORY))
        if path.suffix == ".py":
            names = imports(path) & known.keys()
            crossing[name] = sorted(n for n in names if any(n == one or n.startswith(f"{one}.") for one in fenced))
    assert not {name: found for name, found in crossing.items() if found}


def test_the_core_imports_a_bounded_part_of_the_rest() -> None:
    loaded, unseen = set[Path](), {path for path in core() if path.suffix == ".py"}
    while unseen:
        loaded |= unseen
        unseen = {other for path in unseen for other in imported(path)} - loaded
    lines = sum(path.read_text().count("\n") for path in loaded)
    assert (len(loaded) <= MAX_LOADED_FILES, lines <= MAX_LOADED_LINES) == (True, True), (len(loaded), lines)


@pytest.mark.parametrize("folder", ["gateway", "services"])
def test_a_service_imports_no_tool(folder: str) -> None:
    tools = REPOSITORY / "pagewire" / "tools"
    for path in (REPOSITORY / folder).rglob("*.py"):
        assert not [other for other in imported(path) if tools in other.parents], path


@pytest.mark.parametrize("folder", [*PROSE, "docs README.md CONTRIBUTING.md"])
def test_prose_speaks_of_things_as_things(folder: str) -> None:
    words, persons, places = prose.rate(piece for path in prose.files(folder.split()) for piece in prose.prose_of(path))
    assert 1000 * persons / words < MAX_PERSONS, [f"{one.path.name}:{one.line}" for one in places[:40]]


def test_nothing_steers_the_formatter() -> None:
    starred = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]
    assert not starred, "a literal is unpacked into another: write its items"


def test_public_docstrings_stand_alone() -> None:
    broken = [one for path in prose.files() if path.suffix == ".py" for one in prose.fragments(path)]
    assert not broken, [f"{one.path.relative_to(REPOSITORY)}:{one.line}: {one.text}" for one in broken[:40]]
