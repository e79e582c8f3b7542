"""Metrics as text, parsed just enough to add labels. The client library takes ten times as long to parse them, while
tokens wait for the interpreter."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families as parse_older

from pagewire.telemetry.metrics import openmetrics

_SAMPLE = re.compile(r'([^\s{]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)(.*)')
_LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')
# In the older format, the name contains the type.
_OLDER = {"counter": ("_total", "counter"), "info": ("_info", "gauge"), "stateset": ("", "gauge")}
_OLDER |= {"unknown": ("", "untyped"), "gaugehistogram": ("", "histogram")}


class Sample(NamedTuple):
    name: str
    labels: str  # as they are written, without the braces
    value: str
    exemplar: str  # with its separator; "" if there is none


@dataclass
class Family:
    name: str
    kind: str = "unknown"
    documentation: str = ""  # as it is written
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class _Families:
    """A registry for the client library."""

    families: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        return iter(self.families)


def parsed(exposition: str) -> list[Family]:
    """Parses OpenMetrics, or the older format of an older service. Raises ValueError."""
    if not exposition.endswith("# EOF\n"):
        exposition = openmetrics(_Families(parse_older(exposition))).decode()
    families: dict[str, Family] = {}
    family = Family("")
    for line in filter(None, exposition.split("\n")):
        if line.startswith("# "):
            keyword, _, said = line.removeprefix("# ").partition(" ")
            name, _, text = said.partition(" ")
            if keyword in ("HELP", "TYPE"):
                family = families.setdefault(name, Family(name))
            if keyword == "HELP":
                family.documentation = text
            elif keyword == "TYPE":
                family.kind = text
        elif (match := _SAMPLE.fullmatch(line)) is not None:
            name, labels, value, exemplar = match.groups()
            family.samples.append(Sample(name, labels or "", value, exemplar))
        else:
            raise ValueError(f"no sample of a metric: {line!r}")
    return list(families.values())


def labels_of(text: str) -> dict[str, str]:
    """Returns the labels by name, with quoted values."""
    return dict(_LABEL.findall(text))


def labels_text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def quoted(value: str) -> str:
    """Returns a label's value in quotes."""
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'"{escaped}"'


def written(families: Iterable[Family], *, as_openmetrics: bool) -> str:
    """Returns the text of metrics; the older format has no exemplars."""
    lines: list[str] = []
    for one in families:
        suffix, kind = ("", one.kind) if as_openmetrics else _OLDER.get(one.kind, ("", one.kind))
        documentation = one.documentation if as_openmetrics else one.documentation.replace(r"\"", '"')
        lines += (f"# HELP {one.name}{suffix} {documentation}", f"# TYPE {one.name}{suffix} {kind}")
        for name, labels, value, exemplar in one.samples:
            head = f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
            lines.append(head + exemplar if as_openmetrics else head)
    return "\n".join([*lines, *(["# EOF"] if as_openmetrics else []), ""])
