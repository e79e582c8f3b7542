"""Files of curves, and their pictures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire.errors import StartupError
from pagewire.tools.bench import curves, plot
from pagewire.tools.bench.curves import KINDS, Curve
from tests.pagewire.test_imports import run
from tests.pagewire.tools.openai_server import run_bench


def a_curve(kind: str, label: str, factor: float = 1) -> Curve:
    names = [quantity.name for quantity in KINDS[kind].quantities]
    points = [{KINDS[kind].x: x} | dict.fromkeys(names, factor * x) for x in (1, 4, 16)]
    return Curve.taken_now(kind, label, "m", "pagewire bench sweep", points)


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    ours, theirs, prompts = (
        a_curve("concurrency", "ours"),
        a_curve("concurrency", "theirs"),
        a_curve("prompt-length", "ours"),
    )
    again = replace(ours, time="later")
    curves.put(path)
    assert not path.exists()
    curves.put(path, ours, theirs)
    curves.put(path, prompts)
    curves.put(path, again)
    assert curves.read(path) == [theirs, prompts, again]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


CURVE = {
    "kind": "prompt-length",
    "label": "a",
    "model": "m",
    "time": "2026-11-21T22:00:00Z",
    "machine": "x",
    "command": "c",
    "points": [{"prompt_tokens": 128, "ttft_p50_ms": 3.5}],
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ({"summary": {}}, "not a file of curves"),
        ([CURVE], "not a file of curves"),
        ({"curves": [{"kind": "prompt-length"}]}, "a curve has kind, label"),
        ({"curves": [CURVE | {"label": 3}]}, "are text"),
        ({"curves": [CURVE | {"kind": "speed"}]}, "unknown kind of curve 'speed'; known kinds: concurrency"),
        ({"curves": [CURVE | {"points": []}]}, "has no points"),
        ({"curves": [CURVE | {"points": [{"ttft_p50_ms": 3}]}]}, "no number 'prompt_tokens' above 0"),
        ({"curves": [CURVE | {"points": [{"prompt_tokens": 0, "ttft_p50_ms": 3}]}]}, "no number 'prompt_tokens'"),
        ({"curves": [CURVE | {"points": [{"prompt_tokens": 8}]}]}, "no numbers as ttft_p50_ms"),
        ({"curves": [CURVE | {"points": [{"prompt_tokens": 8, "ttft_p50_ms": "3"}]}]}, "no numbers as ttft_p50_ms"),
        (json.dumps({"curves": [CURVE]}).replace("3.5", "NaN"), "no numbers as ttft_p50_ms"),
        (json.dumps({"curves": [CURVE]}).replace("3.5", "Infinity"), "no numbers as ttft_p50_ms"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(StartupError, match=f"c.json: .*{message}"):
        curves.read(path)
    before = path.read_text()
    with pytest.raises(StartupError):
        curves.put(path, a_curve("concurrency", "ours"))
    assert path.read_text() == before


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot write .*; name another file with --json-out"):
        curves.put(tmp_path / "none" / "c.json")


def test_labels_of_several_files_are_distinct(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    curves.put(a, a_curve("concurrency", "ours"), a_curve("prompt-length", "ours"))
    curves.put(b, a_curve("concurrency", "ours"), a_curve("concurrency", "theirs"))
    labels = [(curve.kind, curve.label) for curve in plot.distinct([a, b, a])]
    assert labels == [
        ("concurrency", f"ours ({a})"),
        ("prompt-length", "ours"),
        ("concurrency", f"ours ({b})"),
        ("concurrency", "theirs"),
    ]


def test_a_panel_per_quantity_and_a_line_per_label() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'pagewire[bench]'")
    drawn = [a_curve(kind, label, f) for kind in KINDS for label, f in (("ours", 1), ("theirs", 2))]
    without_ttft = replace(drawn[1], label="no TTFT", points=[{"concurrency": 2, "output_tok_per_s": 5}])
    panels = plot.draw([*drawn, without_ttft], "all").axes
    quantities = [quantity for kind in KINDS.values() for quantity in kind.quantities]
    assert [panel.get_ylabel() for panel in panels] == [quantity.title for quantity in quantities]
    for panel, quantity in zip(panels, quantities, strict=True):
        labels = [text.get_text() for text in panel.get_legend().get_texts()]
        more = ["no TTFT"] if panel is panels[0] else []
        assert labels == ["ours", "theirs", *more, *([f"target: {quantity.target:g}"] if quantity.target else [])]
        ours = panel.get_lines()[0]
        assert list(ours.get_xdata()) == list(ours.get_ydata()) == [1, 4, 16]
    colors = {(line.get_label(), line.get_color()) for panel in panels for line in panel.get_lines()}
    assert len(colors) == len({label for label, _ in colors}) == len({color for _, color in colors}) == 4


def test_many_labels_look_different() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'pagewire[bench]'")
    (panel,) = plot.draw([a_curve("model-size", f"number {index}") for index in range(23)]).axes
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in panel.get_lines()}
    assert len(looks) == 23


def test_curves_of_nothing_but_zeros_are_refused() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'pagewire[bench]'")
    with pytest.raises(StartupError, match="nothing to draw: all values of ours are 0"):
        plot.draw([a_curve("model-size", "ours", 0)])


async def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'pagewire[bench]'")
    path, picture = tmp_path / "c.json", tmp_path / "c.png"
    curves.put(path, a_curve("concurrency", "ours"), a_curve("concurrency", "theirs"))
    code, text = await run_bench("plot", str(path), "--out", str(picture))
    assert code == 0 and "ours; theirs" in text, text
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    code, text = await run_bench("plot", str(path), "--out", str(picture.with_suffix(".what")))
    assert code == 2 and ".png" in text
    code, text = await run_bench("plot", str(path), "--kind", "model-size", "--out", str(picture))
    assert code == 1 and "no curve to draw" in text


def test_without_matplotlib(tmp_path: Path) -> None:
    curves.put(tmp_path / "c.json", a_curve("concurrency", "ours"))
    argv = ["bench", "plot", str(tmp_path / "c.json")]
    result = run(f"import pagewire.cli; pagewire.cli.main({argv!r})", ["matplotlib"])
    assert result.returncode == 1 and "pip install 'pagewire[bench]'" in result.stderr
    assert "Traceback" not in result.stderr
