"""Prints deploy/.env.example: every variable that the compose files read, with what it means.

python -m deploy.env_example > deploy/.env.example
"""

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from pagewire import config, flags

_ROOT = Path(__file__).resolve().parents[1]
_COMPOSE = _ROOT / "docker-compose.yml"
_OVERRIDES = (_ROOT / "docker-compose.gpu.yml", _ROOT / "docker-compose.secrets.yml")
SERVICES: dict[str, type[config.ServiceConfig]] = {
    "gateway": config.GatewayConfig,
    "tokenizer": config.TokenizerConfig,
    "scheduler": config.SchedulerConfig,
    "executor": config.ExecutorConfig,
}
# What has no flag, or means something else in compose than its flag does.
_OF_COMPOSE = {
    "PAGEWIRE_HOST": "address of this host that the ports are published on; 0.0.0.0 lets other machines in",
    "PAGEWIRE_PORT": "REST is published on this port",
    "PAGEWIRE_GRPC_PORT": "public gRPC of text; a range as 8011-8014 for several tokenizers",
    "PAGEWIRE_SCHEDULER_GRPC_PORT": "public gRPC of token ids",
    "PAGEWIRE_TAG": "tag of the images",
    "PAGEWIRE_PROFILE": "values for a purpose: latency, throughput or cost; what is set beside it wins",
    "MODEL_DIR": "directory with models, mounted at /models and never written to; default: an empty volume",
    "BASE_IMAGE": "base of the images: Debian with python and pip",
    "TORCH_INDEX": "package index for torch; empty for the CUDA build of PyPI",
    "PROMETHEUS_PORT": "Prometheus is published on this port (--profile observability)",
    "GRAFANA_PORT": "Grafana is published on this port (--profile observability)",
    "GRAFANA_WITHOUT_LOGIN": "false: dashboards want a login (--profile observability)",
    "JAEGER_PORT": "traces are shown on this port (--profile observability)",
    "STOP_GRACE_PERIOD": "how long a container has to end: more than drain delay and shutdown timeout together",
    "TOKENIZER_REPLICAS": "tokenizers; also `docker compose up --scale tokenizer=2`",
    "EXECUTOR_GPUS": "GPUs of each executor (docker-compose.gpu.yml), as many as its ranks",
    "SECRETS_DIR": "directory with keys, certificates and the Hub's token (docker-compose.secrets.yml)",
    "EXECUTOR_REPLICAS": "executors, each with the whole model and a KV cache of its own",
    **{f"{name.upper()}_CPUS": f"cores that the {name} may use; 0 = all" for name in SERVICES},
    **{f"{name.upper()}_MEMORY": f"memory that the {name} may use, as 8g; 0 = all" for name in SERVICES},
    "HF_TOKEN": "token for models of the Hub that want one",
    "HF_ENDPOINT": "a mirror in place of https://huggingface.co",
    "HF_HUB_OFFLINE": "1: only what is in the cache, nothing is fetched from the Hub",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "where traces and metrics go, as http://collector:4317",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc or http/protobuf",
    "OTEL_EXPORTER_OTLP_HEADERS": "headers for the collector: name=value, comma separated",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "where traces go, if not with the metrics",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "where metrics go, if not with the traces",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "seconds that sending may take",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "certificate, in PEM, of the CA that the collector's is of; mount it",
    "OTEL_TRACES_EXPORTER": "none: no traces are sent",
    "OTEL_METRICS_EXPORTER": "none: no metrics are sent; Prometheus reads them all the same",
    "OTEL_METRIC_EXPORT_INTERVAL": "milliseconds between two sendings of metrics; default: 60000",
    "OTEL_BSP_SCHEDULE_DELAY": "milliseconds between two sendings of spans; default: 5000",
    "OTEL_BSP_MAX_QUEUE_SIZE": "spans that wait to be sent, of which more are dropped; default: 2048",
    "OTEL_TRACES_SAMPLER": "which traces are kept, as parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "how many of them, as 0.1",
    "OTEL_RESOURCE_ATTRIBUTES": "attributes of everything that is sent: name=value, comma separated",
    "OTEL_SDK_DISABLED": "true: nothing is sent",
}
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


def variables() -> dict[str, str]:
    """Each variable of the compose files with the default that they state for it, if any."""
    text = _COMPOSE.read_text()
    found: dict[str, str] = {}
    for each in (text, *(path.read_text() for path in _OVERRIDES)):
        stated = dict(_REFERENCE.findall(re.sub(r"^\s*#.*", "", each, flags=re.MULTILINE)))
        found |= {name: default for name, default in stated.items() if name not in found}
    for service in yaml.safe_load(text)["services"].values():
        found |= {name: found.get(name, "") for name, value in service.get("environment", {}).items() if value is None}
    return found


def _fields() -> dict[str, tuple[dataclasses.Field[Any], list[str]]]:
    """By variable: the flag, and the services that have it."""
    found: dict[str, tuple[dataclasses.Field[Any], list[str]]] = {}
    for service, config_class in SERVICES.items():
        for field in dataclasses.fields(config_class):
            found.setdefault(flags.environment_name(field.name), (field, []))[1].append(service)
    return found


def text() -> str:
    known, fields = variables(), _fields()
    sections: dict[str, list[str]] = {"compose": []}
    for name, default in known.items():
        if name in _OF_COMPOSE:
            sections["compose"].append(f"{_comment(_OF_COMPOSE[name])}\n#{name}={default}")
        else:
            field, services = fields[name]
            of = "all services" if len(services) == len(SERVICES) else ", ".join(services)
            shown = default or ("" if field.default is None else _text(field.default))
            sections.setdefault(of, []).append(f"{_comment(field.metadata['help'])}\n#{name}={shown}")
    head = _comment(
        "Copy this file to `.env` beside docker-compose.yml and remove the # before what you set. What is not set has"
        " the default shown, or one that the service works out. A PAGEWIRE_ variable is a flag of the services named."
    )
    return head + "\n" + "".join(f"\n## {title}\n\n" + "\n\n".join(lines) + "\n" for title, lines in sections.items())


def _comment(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="# ", subsequent_indent="#   ")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(text(), end="")
