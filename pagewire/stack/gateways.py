"""Several gateway processes behind one REST port: `pagewire gateway --api-server-count N`, N > 1."""

import asyncio
import logging
from dataclasses import replace
from functools import partial

from pagewire.config import GatewayConfig
from pagewire.flags.ports import available_ports
from pagewire.process.supervisor import Service, Supervisor
from pagewire.process.watchdog import watched
from pagewire.stack import launch
from pagewire.telemetry import logs

logger = logging.getLogger(__name__)


def run(config: GatewayConfig) -> int:
    """Runs config.api_server_count gateways until a signal, and returns the exit code. Raises StartupError."""
    logs.setup("gateway", config)
    config = replace(config, **available_ports(config))
    supervisor = Supervisor(
        services(config),
        shutdown_timeout=config.time_to_end,
        stop_together=True,
        hang_timeout=config.hang_timeout,
    )

    def announce() -> None:
        logger.info("%d gateway processes are ready", config.api_server_count)

    async def serve() -> int:
        return await watched(supervisor.run(announce), config.hang_timeout)

    return asyncio.run(serve())


def services(config: GatewayConfig) -> list[Service]:
    """Returns the gateway processes. They share the port and readiness: the system gives connections only to processes
    that listen."""
    one = replace(config, api_server_count=1, reuse_port=True)
    ready = partial(launch.http_ready, config)
    return [launch.service("gateway", one, ready, name=f"gateway-{i}") for i in range(config.api_server_count)]
