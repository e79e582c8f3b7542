"""The objects that the Helm chart renders, and the schemas that they are checked against."""

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "pagewire"
# Kinds of other makers: recorded from their repositories, which each file names.
_CRDS = {
    kind: Path(__file__).parent / "crds" / f"{kind.lower()}.json"
    for kind in ("LeaderWorkerSet", "ServiceMonitor", "ScaledObject")
}
_VERSION = "1.34"
Object = dict[str, Any]


def helm() -> str | None:
    """Returns the path of helm, which may lie in the Python environment, or None."""
    return shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")


def template(*arguments: str) -> str:
    """Returns what `helm template` renders with these arguments. Raises CalledProcessError."""
    command = [helm() or "helm", "template", "pagewire", str(CHART), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@functools.cache
def charted(*arguments: str) -> tuple[Object, ...]:
    return tuple(filter(None, yaml.safe_load_all(template(*arguments))))


def validate(one: Mapping[str, Any]) -> None:
    """Raises kubernetes_validate.ValidationError or jsonschema.ValidationError, also for keys that are unknown."""
    if one["kind"] not in _CRDS:
        kubernetes_validate.validate(one, _VERSION, strict=True)
        return
    jsonschema.validate(one, json.loads(_CRDS[one["kind"]].read_text()))
    if one["kind"] == "LeaderWorkerSet":
        for pod in pods_of(one):
            whole = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "x", **pod["metadata"]},
                "spec": pod["spec"],
            }
            kubernetes_validate.validate(whole, _VERSION, strict=True)


def pods_of(one: Mapping[str, Any]) -> list[Object]:
    """The templates of the pods that an object makes; those of a group's leader first."""
    if one["kind"] == "LeaderWorkerSet":
        template = one["spec"]["leaderWorkerTemplate"]
        return [template["leaderTemplate"], template["workerTemplate"]]
    return [one["spec"]["template"]] if one["kind"] in ("Deployment", "StatefulSet") else []


def pods(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Yields (component, template)."""
    for one in objects:
        for pod in pods_of(one):
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [one for one in objects if one["kind"] == kind]


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    # LeaderWorkerSet gives its pods their numbers.
    wanted = {key: value for key, value in selector.items() if not key.startswith("leaderworkerset.")}
    return wanted.items() <= labels.items()
