"""Services of Pagewire as processes of this machine: command line, environment, readiness, addresses."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagewire import flags
from pagewire.config import GatewayConfig, ServeConfig, ServiceConfig
from pagewire.process.supervisor import Service
from pagewire.telemetry import logs
from pagewire.wire import health
from pagewire.wire.addresses import endpoint, reachable


def service(command: str, config: ServiceConfig, ready: Callable[[], Awaitable[bool]], *, name: str = "") -> Service:
    """Returns `pagewire <command>` with this configuration. name: distinguishes several services of one command."""
    # -P: a folder named "services" in the current directory must not hide Pagewire's.
    argv = [sys.executable, "-P", "-m", "pagewire.cli", command, *flags.to_argv(config)]
    return Service(name or command, argv, ready, {**environment(config), logs.NAME: name or command})


def environment(config: ServiceConfig) -> dict[str, str]:
    """Returns the environment of a child: that of this process, with secrets in place of other settings."""
    home = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return {**flags.without_configuration(os.environ), **flags.secrets(config), "PYTHONPATH": path}


async def grpc_ready(address: str, service: str) -> bool:
    """Returns whether the service at a unix:/path address is SERVING."""
    # Until the socket exists, importing gRPC would only take processor time from the services.
    if not Path(address.removeprefix("unix:")).exists():  # noqa: ASYNC240
        return False
    return await asyncio.to_thread(health.grpc_problem, address, service) is None


async def http_ready(config: GatewayConfig) -> bool:
    """Returns whether the gateway is ready."""
    return await asyncio.to_thread(health.http_problem, f"{rest_url(config)}/readyz") is None


def rest_url(config: GatewayConfig) -> str:
    """Returns the REST URL for clients on this machine."""
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{endpoint(reachable(config.host), config.port)}"


def grpc_address(config: ServeConfig) -> str:
    """Returns the public gRPC address of the tokenizer for clients on this machine."""
    scheme = "" if config.ssl_certfile is None else "grpcs://"
    return scheme + endpoint(reachable(config.host), config.grpc_port)
