"""Dashboards as tables become the JSON that Grafana (10 or later) reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT, _PER_ROW = 24, 8, 3
# What a table abbreviates: the model chosen above, and a window that fits the interval of scrapes and the zoom.
ABBREVIATIONS = {"$m": 'model_name=~"$model"', "$w": "$__rate_interval"}


@dataclass(frozen=True)
class Panel:
    """One graph. Queries: PromQL by legend, which may name labels as {{label}}.

    unit: one of Grafana's, `s`, `percentunit`, `bytes`, `reqps` ... now: the last value in large digits, no graph.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    text: str = ""  # what the reader learns from it
    now: bool = False
    threshold: float | None = None  # a line from which on it is bad

    def expressions(self) -> list[str]:
        found = []
        for query in self.queries.values():
            for short, long in ABBREVIATIONS.items():
                query = query.replace(short, long)
            found.append(query)
        return found


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    rows: Mapping[str, list[Panel]]

    def panels(self) -> Iterator[Panel]:
        for panels in self.rows.values():
            yield from panels

    def json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["pagewire"],
            "schemaVersion": 39,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "graphTooltip": 1,  # a cursor through all graphs
            "links": [{"type": "dashboards", "title": "Pagewire", "tags": ["pagewire"], "asDropdown": True}],
            "templating": {"list": [_datasource(), _model()]},
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        number, top = 1, 0
        for title, panels in self.rows.items():
            place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
            yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
            number, top = number + 1, top + 1
            height = _HEIGHT // 2 if all(panel.now for panel in panels) else _HEIGHT
            per_row = len(panels) if height < _HEIGHT else _PER_ROW
            width = _COLUMNS // per_row
            for index, panel in enumerate(panels):
                line, column = divmod(index, per_row)
                place = {"x": column * width, "y": top + line * height, "w": width, "h": height}
                yield _panel(panel, number, place)
                number += 1
            top += -(-len(panels) // per_row) * height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.threshold is not None:
        steps.append({"color": "red", "value": panel.threshold})
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    options: dict[str, Any] = {"legend": {"showLegend": len(panel.queries) > 1 or "{{" in "".join(panel.queries)}}
    if panel.now:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    return {
        "id": number,
        "type": "stat" if panel.now else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for index, (legend, expression) in enumerate(zip(panel.queries, panel.expressions(), strict=True))
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(pagewire:num_executors, model_name)",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
