"""`pagewire bench plot`: files of curves as one picture, a panel per quantity and a line per label."""

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagewire.errors import StartupError
from pagewire.tools.bench.curves import KINDS, Curve, Kind, Quantity, read

COLUMNS = 3
PANEL_INCHES = (5.2, 4.0)
FOOT_CHARACTERS = 120
COLORS, MARKERS = 10, "osD^vPX*<>"
LINES = ("-", "--", ":", "-.")  # the next one when colors repeat


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pagewire bench plot",
        description="Draws curves that `pagewire bench sweep` and the scripts under benchmarks/ have written: one panel"
        " per quantity, one line per label, for any server or library.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="file of curves")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write (default: curves.png)")
    parser.add_argument("--kind", choices=tuple(KINDS), help="only this kind of curve (default: all in the files)")
    parser.add_argument("--title", default="", help="title above the picture")
    args = parser.parse_args(argv)
    curves = [curve for curve in distinct(args.files) if args.kind in (None, curve.kind)]
    if not curves:
        raise StartupError(f"no curve to draw in {', '.join(map(str, args.files))}")
    figure = draw(curves, args.title)
    formats = figure.canvas.get_supported_filetypes()
    if args.out.suffix[1:] not in formats:
        parser.error(f"--out {args.out}: the name must end in one of .{', .'.join(sorted(formats))}")
    try:
        figure.savefig(args.out, dpi=120)
    except OSError as error:
        raise StartupError(f"cannot write {args.out}: {error}") from error
    print(f"{args.out}: {'; '.join(dict.fromkeys(curve.label for curve in curves))}")
    return 0


def distinct(paths: Sequence[Path]) -> list[Curve]:
    """Returns all curves; if several files have the same kind and label, labels include the file's name."""
    found = [(path, curve) for path in dict.fromkeys(paths) for curve in read(path)]
    count = Counter((curve.kind, curve.label) for _, curve in found)
    return [
        curve if count[curve.kind, curve.label] == 1 else replace(curve, label=f"{curve.label} ({path})")
        for path, curve in found
    ]


def draw(curves: Sequence[Curve], title: str = "") -> Any:
    """Returns a matplotlib Figure. Raises StartupError if matplotlib is missing, or all values are 0."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise StartupError(
            f"the Python package {error.name!r} is not installed: pip install 'pagewire[bench]'"
        ) from error
    panels = [
        (kind, quantity, shown)
        for name, kind in KINDS.items()
        for quantity in kind.quantities
        if (shown := [c for c in curves if c.kind == name and any(p.get(quantity.name) for p in c.points)])
    ]
    if not panels:
        raise StartupError(f"nothing to draw: all values of {', '.join(curve.label for curve in curves)} are 0")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 0.6), layout="constrained")
    styles = {label: index for index, label in enumerate(dict.fromkeys(curve.label for curve in curves))}
    for index, (kind, quantity, shown) in enumerate(panels):
        _draw_panel(figure.add_subplot(rows, columns, index + 1), kind, quantity, shown, styles)
    if title:
        figure.suptitle(title)
    figure.supxlabel(_foot(curves), fontsize=8, color="0.35")
    return figure


def _draw_panel(axes: Any, kind: Kind, quantity: Quantity, curves: Sequence[Curve], styles: dict[str, int]) -> None:
    from matplotlib import ticker

    for curve in curves:
        points = sorted((p[kind.x], p[quantity.name]) for p in curve.points if p.get(quantity.name) is not None)
        style = styles[curve.label]
        axes.plot(
            *zip(*points, strict=True),
            label=curve.label,
            color=f"C{style % COLORS}",
            marker=MARKERS[style % len(MARKERS)],
            linestyle=LINES[style // COLORS % len(LINES)],
            markersize=4,
        )
    if quantity.target is not None:
        axes.axhline(quantity.target, label=f"target: {quantity.target:g}", color="0.4", linestyle="--")
    axes.set_xlabel(kind.x_title)
    axes.set_ylabel(quantity.title)
    axes.set_xscale("log", base=2)
    if quantity.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.set_ylim(bottom=0)
    ticks = _ticks({point[kind.x] for curve in curves for point in curve.points})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _ticks(values: Iterable[float]) -> list[float]:
    """Returns at most ten ticks, including the largest value, none too close to another."""
    ticks: list[float] = []
    for value in sorted(values, reverse=True):
        if not ticks or value < ticks[-1] / 1.5:
            ticks.append(value)
    return ticks[:: -(-len(ticks) // 10)][::-1]


def _short(value: float) -> str:
    """Formats a number as 12, 8192, 135M or 1.2B."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"


def _foot(curves: Sequence[Curve]) -> str:
    """Returns the machines and times: curves are comparable if they come from one machine and one day."""
    days = sorted({curve.time[:10] for curve in curves})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    machines = "; ".join(sorted({curve.machine for curve in curves}))
    return textwrap.fill(f"{machines}. {when}", FOOT_CHARACTERS)
