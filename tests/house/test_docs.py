"""The documentation stays short, and every path, module, link and heading that it names exists."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Written by `make docs`: not counted, and not there in a fresh checkout (api.md).
GENERATED = {ROOT / "docs" / name for name in ("api.md", "models.md", "from-vllm.md")}
# reading.md is a list of files, which has bounds of its own.
HAND_WRITTEN = sorted({ROOT / "README.md", *ROOT.glob("docs/**/*.md")} - GENERATED - {ROOT / "docs/reading.md"})
DESIGN = sorted(ROOT.glob("docs/design/*.md"))
PAGES = [
    *sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {ROOT / "docs/api.md"}),
    *sorted(ROOT.glob("examples/**/README.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
# The changelog and results name what there was at their time.
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md" and "results" not in page.parts]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FOLDERS = "benchmarks|deploy|docs|examples|gateway|kernels|pagewire|protos|quantize|services|tests"
PATH = re.compile(rf"(?<![\w./:$-])((?:{FOLDERS})/[\w./*<>-]*|docker-compose[\w.]*\.yml)")
MODULE = re.compile(r"-m ((?:pagewire|benchmarks|deploy|tests)(?:\.\w+)*)")
# Written when they are needed.
MADE = ("docs/api.md", "benchmarks/gpu/peers")


def lines(page: Path) -> int:
    return len(page.read_text().splitlines())


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(path: str) -> bool:
    """Returns whether a path of the repository exists; <name> stands for any name."""
    path = re.sub(r"<[^>]*>", "*", path.rstrip("/."))
    return path.startswith(MADE) or any(ROOT.glob(path))


def module_exists(module: str) -> bool:
    """Returns whether a module exists, also where a link makes its folder a part of pagewire."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_the_documentation_is_short() -> None:
    assert sum(map(lines, HAND_WRITTEN)) <= 2500
    assert lines(ROOT / "docs/architecture.md") <= 150
    assert max(map(lines, DESIGN)) <= 80
    assert lines(ROOT / "CHANGELOG.md") <= 60
    assert lines(ROOT / "CONTRIBUTING.md") <= 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(CODE.sub("", page.read_text())):
        target = page.parent / path if path else page
        assert target.exists(), f"{path}: no such file"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}: no such heading"


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_modules_that_are_named_exist(page: Path) -> None:
    text = LINK.sub("", page.read_text())
    assert [path for path in PATH.findall(text) if not exists(path)] == []
    assert [module for module in MODULE.findall(text) if not module_exists(module)] == []


def test_commands_of_the_makefile_and_pages_named_in_code_exist() -> None:
    assert [module for module in MODULE.findall((ROOT / "Makefile").read_text()) if not module_exists(module)] == []
    named = {
        page
        for folder in FOLDERS.split("|")
        for path in (ROOT / folder).rglob("*.py")
        if folder != "pagewire" or not path.is_symlink()
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", path.read_text())
    }
    assert [page for page in named if not exists(page)] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        if (page := pending.pop()) not in reached:
            reached.add(page)
            links = LINK.findall(CODE.sub("", page.read_text()))
            pending += [page.parent.joinpath(path).resolve() for path, _ in links if path.endswith(".md")]
    assert set(PAGES) - reached - {page for page in PAGES if "results" in page.parts} == set()
