"""Summary, table and JSON of the records of a run."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewire.tools.bench.config import BenchConfig
from pagewire.tools.bench.request import Record


def percentile(values: Sequence[float], q: float) -> float | None:
    """Returns a percentile by linear interpolation; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(config: BenchConfig, model: str, records: Sequence[Record], client_cpu_s: float) -> dict[str, Any]:
    """Returns the summary. Throughput includes prefill: all output tokens / (last end - first start)."""
    ok = [record for record in records if record.error is None]
    wall = max(r.end for r in records) - min(r.start - r.waited for r in records)
    output_tokens = sum(r.completion_tokens for r in ok)
    prompt_tokens = [r.prompt_tokens for r in ok if r.prompt_tokens is not None]
    summary: dict[str, Any] = {
        "label": config.label,
        "url": config.base_url,
        "endpoint": config.endpoint,
        "model": model,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "concurrency": config.concurrency,
        "request_rate": config.request_rate,
        "burstiness": config.burstiness,
        "num_requests": len(records),
        "max_tokens": config.output_len,
        "wall_s": round(wall, 4),
        "completed": len(ok),
        "failures": len(records) - len(ok),
        "retries": sum(r.retries for r in records),
        "errors": dict(Counter(r.error for r in records if r.error is not None).most_common(5)),
        "not_full_length": sum(r.completion_tokens != config.output_len for r in ok),
        "usage_reported": sum(r.usage_reported for r in ok),
        "prompt_tokens_min": min(prompt_tokens, default=None),
        "prompt_tokens_max": max(prompt_tokens, default=None),
        "prompt_tokens": sum(prompt_tokens),
        "output_tokens": output_tokens,
        "req_per_s": round(len(ok) / wall, 3),
        "output_tok_per_s": round(output_tokens / wall, 2),
        "chunks_per_token": round(sum(r.chunks for r in ok) / output_tokens, 3) if output_tokens else None,
        "waited_max_s": round(max(r.waited for r in records), 3),
        "client_cpu_s": round(client_cpu_s, 3),
    }
    series = {
        "ttft": [r.ttft for r in ok if r.ttft is not None],
        "tpot": [r.tpot for r in ok if r.tpot is not None],
        "itl": [gap for r in ok for gap in r.itl],
        "latency": [r.end - r.start for r in ok],
    }
    for name, values in series.items():
        for q in (50, 99):
            value = percentile(values, q)
            summary[f"{name}_p{q}_ms"] = None if value is None else round(value * 1e3, 3)
    return summary


def table(summary: dict[str, Any]) -> str:
    load = f"{summary['request_rate']:g} requests/s" if summary["request_rate"] else f"{summary['concurrency']} at once"
    low, high = summary["prompt_tokens_min"], summary["prompt_tokens_max"]
    prompt = "?" if low is None else f"{low}" if low == high else f"{low}-{high}"
    lines = [
        f"{summary['label'] or summary['url']}: {summary['num_requests']} requests, {load},"
        f" {prompt} tokens in, {summary['max_tokens']} out",
        f"  {summary['output_tok_per_s']:.1f} output tok/s   {summary['req_per_s']:.2f} requests/s"
        f"   {summary['wall_s']:.1f} s   failed {summary['failures']}   not full length {summary['not_full_length']}"
        f"   client CPU {summary['client_cpu_s']:.1f} s",
        f"  {'ms':<8}{'p50':>10}{'p99':>10}",
    ]
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("latency", "total")):
        cells = (summary[f"{name}_p50_ms"], summary[f"{name}_p99_ms"])
        lines.append(f"  {title:<8}" + "".join("         -" if c is None else f"{c:>10.1f}" for c in cells))
    if summary["retries"]:
        waited = f"the last attempt was up to {summary['waited_max_s']:.1f} s after the first"
        lines.append(f"  {summary['retries']} retries of refused requests; {waited}")
    lines += [f"  {count} x {error}" for error, count in summary["errors"].items()]
    return "\n".join(lines)


def write_json(path: Path, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """Writes the summary and the records, with starts relative to the first request and only the longest gap."""
    origin = min(record.start - record.waited for record in records)
    requests = []
    for record in records:
        row = dataclasses.asdict(record)
        gaps = row.pop("itl")
        row |= {"start": record.start - origin, "end": record.end - origin, "itl_max": max(gaps, default=None)}
        requests.append({name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()})
    path.write_text(json.dumps({"summary": summary, "requests": requests}, indent=1) + "\n")
