"""Prints the schema of the Helm chart's values, so that Helm refuses what would not reach a service.

python -m deploy.values_schema > deploy/helm/pagewire/values.schema.json
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from deploy.env_example import SERVICES
from pagewire import flags
from pagewire.tools.terminal.models import PullConfig

_VALUES = Path(__file__).resolve().parent / "helm" / "pagewire" / "values.yaml"
# What the chart says itself, by arguments, which win over flags of the values.
_OF_ALL = ("listen", "metrics-port", "admin-host")
FIXED = {
    "gateway": {"host", "port", "metrics-port", "admin-host", "data-dir", "tokenizer-address", "tokenizer-discovery"},
    "tokenizer": {*_OF_ALL, "model", "public-listen", "scheduler-address"},
    "scheduler": {*_OF_ALL, "executor-address", "executor-discovery"},
    "executor": {*_OF_ALL, "model"},
}
# Of a group of executors, by arguments and variables of its pods.
_OF_GROUP = {"distributed-executor-backend", "rank", "leader", "group-secret"}
# Whatever Kubernetes has.
_FREE = ("resources", "nodeSelector", "labels", "monitoring")


def flags_of(service: str) -> set[str]:
    """Returns the flags that reach a service from its values."""
    own = {flags.flag_name(field.name)[2:] for field in dataclasses.fields(SERVICES[service])}
    return (own | {"profile"}) - FIXED[service] - _OF_GROUP


def schema() -> dict[str, Any]:
    values = _object(yaml.safe_load(_VALUES.read_text()))
    services = {name: flags_of(name) for name in SERVICES}
    for name, known in services.items():
        values["properties"][name]["properties"]["flags"] = _only(known)
    pulled = {flags.flag_name(field.name)[2:] for field in dataclasses.fields(PullConfig)}
    of_model = pulled & services["tokenizer"] & services["executor"]
    values["properties"]["model"]["properties"]["flags"] = _only(of_model)
    values["properties"]["flags"] = _only(set.union(*services.values()))
    values["properties"]["global"] = {"type": "object"}  # of a chart that has this one among its own
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of Pagewire's chart", **values}


def _object(value: dict[str, Any]) -> dict[str, Any]:
    """With these keys and no others."""
    properties = {
        key: _object(one) if isinstance(one, dict) and key not in _FREE else _like(one) for key, one in value.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _like(value: Any) -> dict[str, Any]:
    """A switch stays a switch, and a count a count: what is none, only the cluster would refuse."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer", "minimum": 0} if isinstance(value, int) else {}


def _only(names: set[str]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {name: {} for name in sorted(names)}}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
