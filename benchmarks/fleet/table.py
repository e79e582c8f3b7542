"""Reports as lines of text."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fleet.simulation import Report

# Title, width, format, value.
_COLUMNS: tuple[tuple[str, int, str, Callable[[Report], float]], ...] = (
    ("hit", 6, ".2f", lambda r: r.hit_rate),
    ("load", 6, ".2f", lambda r: r.load_rate),
    ("best", 6, ".2f", lambda r: r.best_hit_rate),
    ("busy", 6, ".2f", lambda r: r.utilization),
    ("jain", 7, ".3f", lambda r: r.jain),
    ("cv", 6, ".2f", lambda r: r.cv),
    ("cv run", 7, ".2f", lambda r: r.cv_running),
    ("ttft50", 8, ".0f", lambda r: 1e3 * r.ttft_p50),
    ("ttft99", 8, ".0f", lambda r: 1e3 * r.ttft_p99),
    ("tpot50", 7, ".1f", lambda r: 1e3 * r.tpot_p50),
    ("tpot99", 7, ".1f", lambda r: 1e3 * r.tpot_p99),
    ("run", 7, ".1f", lambda r: r.mean_running),
    ("us/req", 8, ".0f", lambda r: r.cpu_us["all"]["request"]),
    ("us/step", 8, ".0f", lambda r: r.cpu_us["all"]["step"]),
    ("us/run", 7, ".2f", lambda r: r.cpu_us["all"]["running"]),
    ("cores", 7, ".2f", lambda r: r.cores),
    ("max", 7, ".2f", lambda r: r.max_cores),
    ("MiB", 7, ".0f", lambda r: r.max_rss_mib),
    ("wall s", 7, ".0f", lambda r: r.wall_seconds),
)
HEADER = f"{'replicas':>8}{'sched.':>7} {'placement':>11} {'front':>12}" + "".join(
    f"{title:>{width}}" for title, width, *_ in _COLUMNS
)


def row(report: Report, placement: str, front: str) -> str:
    values = "".join(f"{format(value(report), spec):>{width}}" for _, width, spec, value in _COLUMNS)
    return f"{report.num_replicas:8}{report.num_schedulers:7} {placement:>11} {front:>12}{values}"


def parts(reports: Sequence[dict[str, Any]]) -> str:
    """Returns the parts of the processor time per running request and step."""
    names = list(reports[0]["cpu_us"])
    lines = [f"\nus per running request and step\n{'replicas':>8}{'sched.':>7}" + "".join(f"{n:>10}" for n in names)]
    for report in reports:
        columns = "".join(f"{report['cpu_us'][name]['running']:10.2f}" for name in names)
        lines.append(f"{report['num_replicas']:8}{report['num_schedulers']:7}{columns}")
    return "\n".join(lines)
