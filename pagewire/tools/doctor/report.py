"""The doctor's reports, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence

from pagewire.tools.doctor.finding import Finding, Level

_WIDTH, _INDENT = 118, 32
_NAMES = {
    Level.ABSENT: "-",
    Level.OK: "ok",
    Level.NOTE: "note",
    Level.WARNING: "warning",
    Level.PROBLEM: "PROBLEM",
}


def text(areas: Mapping[str, Sequence[Finding]], *, verbose: bool) -> str:
    """Formats findings as text. verbose: includes checks without a problem."""
    lines = []
    for area, findings in areas.items():
        shown = [finding for finding in findings if verbose or finding.level > Level.OK]
        lines.append(f"{area}: {_summary(findings)}")
        for finding in shown:
            lines += _lines(finding)
    worst = [finding for findings in areas.values() for finding in findings]
    counts = {level: sum(finding.level is level for finding in worst) for level in Level}
    lines.append(
        f"{counts[Level.PROBLEM]} problems, {counts[Level.WARNING]} warnings, {counts[Level.NOTE]} notes, "
        f"{counts[Level.OK]} in order, {counts[Level.ABSENT]} that do not apply"
        + ("" if verbose else " (--verbose shows all)")
    )
    return "\n".join(lines) + "\n"


def _summary(findings: Sequence[Finding]) -> str:
    worst = max((finding.level for finding in findings), default=Level.ABSENT)
    if worst is Level.ABSENT:
        return "; ".join(finding.found for finding in findings)
    return "in order" if worst is Level.OK else f"{sum(f.level > Level.OK for f in findings)} to look at"


def _lines(finding: Finding) -> list[str]:
    head = f"  {_NAMES[finding.level]:<8} {finding.check:<{_INDENT - 12}} "
    first, *rest = textwrap.wrap(finding.found, _WIDTH - _INDENT) or [""]
    lines = [head + first, *(" " * _INDENT + line for line in rest)]
    for label, said in (("so:", finding.meaning), ("do:", finding.remedy)):
        lines += textwrap.wrap(
            said,
            _WIDTH,
            initial_indent=f"{' ' * (_INDENT - 4)}{label} ",
            subsequent_indent=" " * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def as_json(areas: Mapping[str, Sequence[Finding]]) -> str:
    """Returns {"worst": LEVEL, "findings": [{"area", "check", "level", "found", "meaning", "remedy"}]}"""
    findings = [
        {
            "area": area,
            "check": finding.check,
            "level": finding.level.name.lower(),
            "found": finding.found,
            "meaning": finding.meaning,
            "remedy": finding.remedy,
        }
        for area, found in areas.items()
        for finding in found
    ]
    return json.dumps({"worst": worst(areas).name.lower(), "findings": findings}, indent=1, ensure_ascii=False) + "\n"


def worst(areas: Mapping[str, Sequence[Finding]]) -> Level:
    return max((finding.level for found in areas.values() for finding in found), default=Level.OK)
