"""The result of a check."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Level(enum.IntEnum):
    """The severity of a finding."""

    ABSENT = 0  # not applicable
    OK = 1
    NOTE = 2  # worth knowing
    WARNING = 3  # costs speed, or may fail under load
    PROBLEM = 4  # prevents serving, or safe serving


@dataclass(frozen=True)
class Finding:
    """One result. check: a short name, the same for every outcome. found: the facts. meaning: their effects. remedy:
    what to do, in commands or flags."""

    level: Level
    check: str
    found: str
    meaning: str = ""
    remedy: str = ""


Findings = Iterator[Finding]


def ok(check: str, found: str) -> Finding:
    return Finding(Level.OK, check, found)


def absent(check: str, found: str) -> Finding:
    return Finding(Level.ABSENT, check, found)


def note(check: str, found: str, meaning: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, check, found, meaning, remedy)


def warning(check: str, found: str, meaning: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, check, found, meaning, remedy)


def problem(check: str, found: str, meaning: str, remedy: str) -> Finding:
    return Finding(Level.PROBLEM, check, found, meaning, remedy)
