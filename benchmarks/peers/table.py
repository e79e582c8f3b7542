"""The table of a contest as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.peers.contest import STEADY, Cell, Contest
from benchmarks.peers.rows import COMPARISONS, ROWS, Comparison, Row


@dataclass(frozen=True)
class Taken:
    """The place, time and way in which the figures were taken."""

    machine: str
    date: str
    versions: Mapping[str, str]
    command: str
    rounds: int
    limit: float


def page(taken: Taken, contests: Mapping[str, Contest]) -> str:
    """Returns the Markdown page. contests: by title of the model."""
    versions = ", ".join(f"{name} {version}" for name, version in taken.versions.items())
    lines = [
        f"# Beside others: {taken.machine}",
        "",
        f"{taken.date}; {versions}. Whole requests of 128 tokens in and 128 out, greedy, unless a row says otherwise;"
        " Pagewire and vLLM through HTTP, OpenVINO GenAI and llama.cpp in process. All run, and work in turn within"
        f" each row of each round ({taken.rounds}): the median (least-greatest). `*`: rounds differ by more than"
        f" {STEADY:.0%}. `<`: given up after {taken.limit:g} times the fastest one's time. `-`: not measured.",
    ]
    for title, contest in contests.items():
        lines += ["", f"## {title}", ""]
        for one in COMPARISONS:
            lines += _comparison(one, contest)
        lines += _summary(taken, contest)
        lines += [f"Left out: {name}: {reason}." for name, reason in contest.left_out.items()]
        lines += ["", f"Taken in {contest.seconds:.0f} s, of:", "", "```"]
        lines += [one.command for one in contest.contestants]
        lines += ["```"]
    return "\n".join([*lines, "", "```", taken.command, "```", ""])


def _comparison(one: Comparison, contest: Contest) -> list[str]:
    titles = {contestant.key: contestant.title for contestant in contest.contestants}
    rows = [ROWS[key] for key in one.asked if any((key, name) in contest.cells for name in (one.ours, *one.others))]
    columns = [key for key in (*one.others, one.own, one.ours) if key in titles]
    if not rows or not columns:
        return []
    heads = [one.title, *(titles[key] for key in columns), "ours / the best other"]
    heads += [f"ours / {titles.get(one.own, one.own)}"] if one.own else []
    lines = [_line([*heads, "asked"]), _line(["---"] * (len(heads) + 1))]
    for row in rows:
        cells = {key: contest.cell(row.key, key) for key in columns}
        best = _best(row, [cells[key] for key in one.others if key in cells])
        ours = contest.cell(row.key, one.ours)
        asked = f"{'≥' if row.more_is_better else '≤'} {one.asked[row.key]:g}"
        ratios = [(ours.median, best)] + ([(ours.median, contest.cell(row.key, one.own).median)] if one.own else [])
        shown = [_ratio(*pair) for pair in ratios]
        shown[-1] = _marked(shown[-1], *ratios[-1], row, one.asked[row.key])
        mark = "" if all(cell.is_steady for cell in cells.values()) else " *"
        lines.append(_line([row.title + mark, *(_cell(cells[key]) for key in columns), *shown, asked]))
    return [*lines, ""]


def _summary(taken: Taken, contest: Contest) -> list[str]:
    """Returns the table of a processor in docs/performance.md: a line per contestant. Bold: ours / the best other."""
    rows = [ROWS[key] for key in COMPARISONS[0].asked if any(key == row for row, _ in contest.cells)]
    if not rows:
        return []
    head = [f"{taken.machine.partition(' (')[0]}, {taken.date}", *(row.short_title for row in rows)]
    lines = [_line(head), _line(["---"] * len(head))]
    for contestant in contest.contestants:
        cells = [_range(contest.cell(row.key, contestant.key)) for row in rows]
        if contestant.key == COMPARISONS[0].ours:
            cells = [f"{cell}{_bold_ratio(row, contest)}" for cell, row in zip(cells, rows, strict=True)]
        lines.append(_line([contestant.title, *cells]))
    return ["As one table:", "", *lines, ""]


def _bold_ratio(row: Row, contest: Contest) -> str:
    one = COMPARISONS[0]
    best = _best(row, [contest.cell(row.key, key) for key in one.others])
    ratio = _ratio(contest.cell(row.key, one.ours).median, best)
    return "" if ratio == "-" else f" **{ratio}**"


def _range(cell: Cell) -> str:
    if cell.median is None or cell.bound is not None:
        return "" if cell.median is None else _cell(cell)
    least, greatest = _number(min(cell.values)), _number(max(cell.values))
    return least if least == greatest else f"{least}-{greatest}"


def _best(row: Row, cells: Sequence[Cell]) -> float | None:
    values = [cell.median for cell in cells if cell.median is not None]
    return (max if row.more_is_better else min)(values, default=None)


def _ratio(ours: float | None, other: float | None) -> str:
    return f"{ours / other:.2f}" if ours is not None and other else "-"


def _marked(shown: str, ours: float | None, other: float | None, row: Row, asked: float) -> str:
    """Returns the ratio in bold if it is as asked."""
    if ours is None or not other:
        return shown
    is_met = ours / other >= asked if row.more_is_better else ours / other <= asked
    return f"**{shown}**" if is_met else shown


def _cell(cell: Cell) -> str:
    if cell.failure:
        return "failed"
    if cell.bound is not None:
        return f"< {cell.bound:.0f}"
    if cell.median is None:
        return "-"
    spread = f" ({_number(min(cell.values))}-{_number(max(cell.values))})" if len(cell.values) > 1 else ""
    return f"{_number(cell.median)}{spread}"


def _number(value: float) -> str:
    return f"{value:,.1f}" if round(value, 1) < 100 else f"{value:,.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
