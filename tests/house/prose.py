"""Measures the prose of the code and the docs: `python -m tests.house.prose [--list] [PATH ...]`.

Prose is comments, docstrings, strings of several words (help, errors, log lines) and Markdown outside code blocks.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# Words for persons. Requests, replicas, steps and blocks are things: "it" and "which".
PERSONS = re.compile(r"\b(who|whom|whose|whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
# With one of these, a docstring begins as a fragment that needs its name, or the line before it, to be understood.
FRAGMENT = re.compile(
    r"(what|whether|who|whom|whose|as|of|if|for|in|with|without|by|from|to|on|at|so|and|or|but|those|that|which|where"
    r"|when|while|how|why|also|again|it|its|they|their|then|until|unless|because|since|than|not|beside|besides|under"
    r"|above|below|before|after|like|once|only|also|even|too|such|likewise)\b",
    re.IGNORECASE,
)
# Shapes stand alone: `hidden [S, hidden_size] -> logits [S, vocab_size]`, `int64 [num_tokens]`.
SHAPE = re.compile(r"[\w, ]*\[[^\]]+\]|\(.*\) ?->|.* -> ")
_COMMENT = re.compile(r"(?:^|\s)#+\s?(.*)")
LEFT_OUT = ("gateway/page/static/vendor/", "protos/pagewire/v1/", "docs/api.md", "CHANGELOG.md", "LICENSE")
SUFFIXES = {".py", ".md", ".proto", ".cpp", ".h", ".toml", ".yaml", ".yml", ".sh"}


@dataclass(frozen=True)
class Prose:
    """Some words of one file. `line` counts from 1."""

    path: Path
    line: int
    text: str


def tracked(paths: Iterable[str] = ()) -> Iterator[Path]:
    """Yields the files below `paths`, or all of them, that git tracks or would track."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", *paths], cwd=REPOSITORY, text=True
    )
    for name in sorted(set(listed.splitlines())):
        path = REPOSITORY / name
        if path.is_file() and not path.is_symlink():
            yield path


def files(paths: Iterable[str] = ()) -> Iterator[Path]:
    """Yields the files below `paths`, or all of them, that hold prose of ours."""
    for path in tracked(paths):
        name = str(path.relative_to(REPOSITORY))
        if path.suffix in SUFFIXES and (path.suffix == ".proto" or not name.startswith(LEFT_OUT)):
            yield path


def prose_of(path: Path) -> Iterator[Prose]:
    """Yields the prose of a file."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _python(path, text)
    elif path.suffix == ".md":
        yield from _markdown(path, text)
    else:
        mark = r"//+|^\s*\*|/\*" if path.suffix in {".proto", ".cpp", ".h"} else r"#"
        for number, line in enumerate(text.splitlines(), 1):
            if (found := re.search(rf"(?:^|\s)(?:{mark})\s?(.*)", line)) is not None:
                yield Prose(path, number, found.group(1))


def _python(path: Path, text: str) -> Iterator[Prose]:
    # A string of one line with " # " in it counts, too: the tokenizer is right, and takes ten times as long.
    strings = {
        line
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno is not None
        for line in range(node.lineno, node.end_lineno)
    }
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line and number not in strings and (found := _COMMENT.search(line)) is not None:
            yield Prose(path, number, found.group(1))
    for node in _nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(WORD.findall(node.value)) >= 3:
            yield Prose(path, node.lineno, node.value)


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _markdown(path: Path, text: str) -> Iterator[Prose]:
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield Prose(path, number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line))


def fragments(path: Path) -> Iterator[Prose]:
    """Yields the docstrings of public modules, classes and functions that begin as a fragment."""
    for node in _nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if getattr(node, "name", "").startswith("_") or (docstring := ast.get_docstring(node)) is None:
                continue
            first = docstring.splitlines()[0]
            stands_alone = first[:1].isupper() or first.startswith(("`", '"')) or SHAPE.match(first) is not None
            if FRAGMENT.match(first) or not stands_alone:
                yield Prose(path, getattr(node, "lineno", 1), first)


def rate(pieces: Iterable[Prose]) -> tuple[int, int, list[Prose]]:
    """Returns how many words there are, how many of them are words for persons, and where those are."""
    words, persons, found = 0, 0, []
    for piece in pieces:
        words += len(WORD.findall(piece.text))
        if (here := len(PERSONS.findall(piece.text))) > 0:
            persons += here
            found.append(piece)
    return words, persons, found


def main() -> None:
    """Prints a line for each folder and, with --list, each place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--list", action="store_true", help="print each place, not only each folder's rate")
    options = parser.parse_args()
    found = list(files(options.paths))
    folders = sorted({path.parent for path in found})
    total = [0, 0, 0]
    for folder in folders:
        mine = [path for path in found if path.parent == folder]
        words, persons, places = rate(piece for path in mine for piece in prose_of(path))
        broken = [piece for path in mine if path.suffix == ".py" for piece in fragments(path)]
        total = [total[0] + words, total[1] + persons, total[2] + len(broken)]
        name = folder.relative_to(REPOSITORY)
        print(f"{1000 * persons / max(words, 1):6.2f} per 1,000 words, {len(broken):4} fragments  {name}")
        if options.list:
            for piece in places:
                line = next(line for line in piece.text.splitlines() if PERSONS.search(line))
                print(f"    {piece.path.relative_to(REPOSITORY)}:{piece.line}: {line.strip()}")
            for piece in broken:
                print(f"    {piece.path.relative_to(REPOSITORY)}:{piece.line}: fragment: {piece.text}")
    print(f"{1000 * total[1] / max(total[0], 1):6.2f} per 1,000 of {total[0]:,} words, {total[2]} fragments  in all")


if __name__ == "__main__":
    main()
