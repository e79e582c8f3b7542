"""The deployment files as values: compose files with their variables resolved, the Dockerfile as its targets."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from pagewire import config

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
GPU_OVERRIDE = ROOT / "docker-compose.gpu.yml"
SECRETS_OVERRIDE = ROOT / "docker-compose.secrets.yml"
ENV_EXAMPLE = ROOT / "deploy" / ".env.example"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

CONFIGURATIONS: dict[str, type[config.ServiceConfig]] = {
    "gateway": config.GatewayConfig,
    "tokenizer": config.TokenizerConfig,
    "scheduler": config.SchedulerConfig,
    "executor": config.ExecutorConfig,
}

_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?-)([^}]*))?\}")


def interpolate(value: Any, environ: Mapping[str, str]) -> Any:
    """`value` with compose's ${NAME}, ${NAME:-default} and ${NAME-default} replaced, at any depth."""
    if isinstance(value, dict):
        return {key: interpolate(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, environ) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, operator, default = match.groups()
        found = environ.get(name)
        return (default or "") if found is None or (found == "" and operator == ":-") else found

    return _VARIABLE.sub(replace, value)


def services(environ: Mapping[str, str] = MappingProxyType({}), path: Path = COMPOSE) -> dict[str, dict[str, Any]]:
    """The services of a compose file as an engine sees them when these variables are set."""
    return interpolate(yaml.safe_load(path.read_text()), environ)["services"]


def container_environment(service: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the container's processes; a name without a value passes on a variable that is set."""
    given = {name: environ.get(name) if value is None else str(value) for name, value in service["environment"].items()}
    return {name: value for name, value in given.items() if value is not None}


@dataclass
class Target:
    """One stage of the Dockerfile, with the instructions of the stages it is built on."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        return self.all(name)[-1]

    def command(self, name: str) -> list[str]:
        """The exec-form command of ENTRYPOINT or HEALTHCHECK."""
        text = self.last(name)
        return json.loads(text[text.index("[") :])

    def copied(self) -> list[tuple[str, str]]:
        """The (source, destination) of every COPY from the build context."""
        words = [shlex.split(text) for text in self.all("COPY") if "--from=" not in text]
        return [(source, copy[-1]) for copy in words for source in copy[:-1]]


def targets() -> dict[str, Target]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Target] = {}
    stage = Target(base="")
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Target(base, list(stages[base].instructions) if base in stages else [])
        else:
            stage.instructions.append((instruction, rest.strip()))
    return stages
