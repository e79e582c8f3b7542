"""`pagewire serve`: the four services as processes of this machine, joined by unix sockets."""

import asyncio
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pagewire
from pagewire import flags, health, logs
from pagewire.config import (
    ExecutorConfig,
    GatewayConfig,
    SchedulerConfig,
    ServeConfig,
    ServiceConfig,
    TokenizerConfig,
)
from pagewire.errors import StartupError
from pagewire.models import default_served_name, resolve_model
from pagewire.supervisor import Service, Supervisor

logger = logging.getLogger(__name__)

_FULL_NAMES = {
    "tokenizer": "pagewire.v1.InferenceService",
    "scheduler": "pagewire.v1.SchedulerService",
    "executor": "pagewire.v1.ExecutorService",
}
# A unix socket's path has at most 104 bytes on macOS, 108 on Linux.
_MAX_SOCKET_PATH = 100


def run(config: ServeConfig) -> int:
    """Serves until a signal; the exit code. Raises StartupError for what is wrong before or while starting."""
    started = time.monotonic()
    logs.setup("serve", config)
    config = replace(
        config,
        served_model_name=config.served_model_name or default_served_name(config.model),
        model=str(resolve_model(config.model)),
        port=_available_port(config.host, config.port, "--port"),
        grpc_port=_available_port(config.host, config.grpc_port, "--grpc-port"),
    )

    def announce() -> None:
        print(banner(config, time.monotonic() - started), flush=True)

    with _sockets(config.uds_dir) as directory:
        supervisor = Supervisor(services(config, directory), shutdown_timeout=config.shutdown_timeout)
        return asyncio.run(supervisor.run(announce))


def services(config: ServeConfig, directory: Path) -> list[Service]:
    """Every process of the stack, in the order in which they are stopped."""
    address = {name: f"unix:{directory}/{name}.sock" for name in _FULL_NAMES}
    public = _endpoint(config.host, config.grpc_port)
    gateway = config.part(GatewayConfig, tokenizer_address=address["tokenizer"])
    tokenizer = config.part(
        TokenizerConfig,
        listen=f"{address['tokenizer']},{public}",
        scheduler_address=address["scheduler"],
        metrics_port=None,
    )
    scheduler = config.part(
        SchedulerConfig, listen=address["scheduler"], executor_address=address["executor"], metrics_port=None
    )
    executor = config.part(ExecutorConfig, listen=address["executor"], metrics_port=None)

    def grpc_service(name: str, part: ServiceConfig) -> Service:
        ready = partial(_grpc_ready, address[name], _FULL_NAMES[name])
        return Service(name, _command(name, part), ready, _environment(name, part))

    http_ready = partial(_http_ready, f"http://{_endpoint(_reachable(config.host), config.port)}/readyz")
    count = config.api_server_count
    gateways = [
        Service(
            "gateway" if count == 1 else f"gateway-{index}",
            _command("gateway", gateway),
            http_ready,
            _environment("gateway", gateway),
        )
        for index in range(count)
    ]
    return [
        *gateways,
        grpc_service("tokenizer", tokenizer),
        grpc_service("scheduler", scheduler),
        grpc_service("executor", executor),
    ]


async def _grpc_ready(address: str, service: str) -> bool:
    # Asked only once its socket exists: until then gRPC need not be imported, and the processor is the services'.
    if not Path(address.removeprefix("unix:")).exists():  # noqa: ASYNC240
        return False
    return await asyncio.to_thread(health.grpc_problem, address, service) is None


async def _http_ready(url: str) -> bool:
    return await asyncio.to_thread(health.http_problem, url) is None


def _command(name: str, config: ServiceConfig) -> list[str]:
    # -P: a folder named "services" where the user happens to stand must not hide ours.
    return [sys.executable, "-P", "-m", "pagewire.cli", name, *flags.to_argv(config)]


def _environment(name: str, config: ServiceConfig) -> dict[str, str]:
    """The environment of a service's process: thread counts and the like of each service belong here."""
    home = str(Path(pagewire.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return {**flags.without_configuration(os.environ), **flags.secrets(config), "PYTHONPATH": path}


def banner(config: ServeConfig, seconds: float) -> str:
    model = (config.served_model_name or "").split(",")[0]
    host = _reachable(config.host)
    rest, grpc = f"http://{_endpoint(host, config.port)}", _endpoint(host, config.grpc_port)
    key = ' -H "Authorization: Bearer $PAGEWIRE_API_KEY"' if config.api_key else ""
    address = "" if config.grpc_port == ServeConfig.grpc_port else f" --address {grpc}"
    return f"""
Pagewire {pagewire.__version__} serves {model}, ready after {seconds:.1f} s

  REST  {rest}/v1  (try it in a browser: {rest}/docs)
  gRPC  {grpc}

  curl {rest}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
  pagewire chat{address}

Ctrl-C stops it.
"""


@contextmanager
def _sockets(given: str | None) -> Iterator[Path]:
    """The directory for the unix sockets, for this user's eyes only; a fresh one unless one is given."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="pagewire-", ignore_cleanup_errors=True) as name:
            _check_sockets(Path(name))
            yield Path(name)
        return
    directory = Path(given).expanduser().resolve()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--uds-dir {directory}: cannot be created: {error}") from error
    _check_sockets(directory)
    yield directory


def _check_sockets(directory: Path) -> None:
    for name in _FULL_NAMES:
        path = directory / f"{name}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise StartupError(f"the path {path} is too long for a unix socket: name a shorter directory in --uds-dir")
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(str(path)) == 0:
                raise StartupError(f"--uds-dir {directory}: another stack is running there; give each its own")


def _available_port(host: str, port: int, flag: str) -> int:
    """The port itself, or a free one for 0. Raises StartupError when it is taken or the host is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            return int(sock.getsockname()[1])
    except OSError as error:
        raise StartupError(
            f"cannot listen on {_endpoint(host, port)} ({error.strerror or error}): stop what is using it,"
            f" or choose another with {flag} or --host"
        ) from error


def _reachable(host: str) -> str:
    """Where clients on this machine find a server that listens on `host`."""
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
