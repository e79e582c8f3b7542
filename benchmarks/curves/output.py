"""Writes the curves of this folder's scripts for `pagewire bench plot`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.tools.bench import curves


class CurveOutput:
    """The flags --json-out and --label."""

    def __init__(self, parser: argparse.ArgumentParser, label: str) -> None:
        """Parses the command line, and ends the process if the file cannot be written later. label: the default."""
        parser.add_argument("--json-out", type=Path, help="file of curves to add to, for `pagewire bench plot`")
        parser.add_argument("--label", default=label, help=f"name of the curves (default: {label})")
        self.args = parser.parse_args()
        self._path: Path | None = self.args.json_out
        self._command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
        if self._path:
            try:
                curves.put(self._path)
            except StartupError as error:
                parser.error(str(error))

    def put(self, kind: str, model: str, points: Sequence[curves.Point], series: str = "") -> None:
        """Nothing without --json-out. series: what tells this curve from others of the same kind and label."""
        if self._path:
            label = f"{self.args.label}, {series}" if series else self.args.label
            curves.put(self._path, curves.Curve.taken_now(kind, label, model, self._command, points))
