"""The scheduler process."""

import asyncio
from functools import partial

from pagewire.config import SchedulerConfig
from pagewire.config.values.kv_events import kv_events_config
from pagewire.services.scheduler.compose import make_engine
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.kv_events.zmq_sockets import make_publisher
from pagewire.services.scheduler.observed import log_line
from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.link_servicer import SchedulerLinkServicer
from pagewire.services.scheduler.service.servicer import SchedulerServicer
from pagewire.services.scheduler.service.status import describe
from pagewire.telemetry.metrics import serve_metrics
from pagewire.v1 import scheduler_link_pb2, scheduler_link_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.admin import Neighbour
from pagewire.wire.discovery import discover
from pagewire.wire.key_interceptors import interceptors
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls
from pagewire.wire.tenants import ClientTenants

# The largest message of a client on the public address: parameters, and two million tokens of up to five bytes each.
MAX_PUBLIC_BYTES = 16 * 1024 * 1024

_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
_LINK_NAME = scheduler_link_pb2.DESCRIPTOR.services_by_name["SchedulerLinkService"].full_name


async def serve(config: SchedulerConfig) -> None:
    """Serves until a signal arrives, and is not ready at first; after SIGTERM, requests in flight may finish."""
    executors = discover(config.executor_discovery, "--executor-address", config.executor_address)
    tls = ServiceTls(config, [*config.listen.split(","), *config.executor_address.split(",")])
    serve_metrics(config)
    caches, kv_events = PrefixCaches(), kv_events_config(config.kv_events_config)
    engine = make_engine(config, executors, tls.listed_channel, caches)
    if kv_events.enable_kv_cache_events:
        caches.start()
    publisher = make_publisher(kv_events, caches) if kv_events.uses_zmq else None
    servers = [make_server(config, engine, tls, caches)]
    if config.public_listen:
        servers.append(make_public_server(config, engine, tls))
    await rpc.start(servers)
    tasks = [
        signalled := asyncio.create_task(rpc.wait_for_signal(), name="signal"),
        asyncio.create_task(engine.run(), name="engine"),
        asyncio.create_task(report_availability(engine, *servers), name="availability"),
    ]
    if publisher is not None:
        tasks.append(asyncio.create_task(publisher.run(), name="publish KV events"))
    if not config.disable_log_stats:
        tasks.append(asyncio.create_task(log_line.log_load(engine.scheduler), name="log-line"))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()  # raises an error for a defect, so that the supervisor restarts the process
    engine.draining.begin()
    drained = engine.drained if signalled.result() else None
    links, *others = servers
    finish = engine.draining.finish_streams
    await asyncio.gather(links.stop(drained, finish), *(server.stop(drained) for server in others))
    await rpc.cancel(tasks)


def make_server(
    config: SchedulerConfig, engine: Engine, tls: ServiceTls = NO_TLS, caches: PrefixCaches | None = None
) -> rpc.Server:
    """Returns the gRPC server of the other services; metrics and status include those of the executors. caches: those
    of the engine, if the server offers them."""
    server = rpc.Server(config.listen.split(","), config.shutdown_timeout, credentials=tls.of_services())
    server.add(SchedulerServicer(engine, config.seed), scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, _NAME)
    link = SchedulerLinkServicer(engine)
    server.add(link, scheduler_link_pb2_grpc.add_SchedulerLinkServiceServicer_to_server, _LINK_NAME, is_link=True)

    def executors() -> list[Neighbour]:
        return [Neighbour("executor", one.address, one.channel) for one in engine.executors.drivers.values()]

    server.add_admin(
        "scheduler",
        executors,
        partial(describe, engine),
        engine.weights.replace,
        engine.accounts,
        engine.adapters,
        caches,
        engine.sleep,
    )
    return server


def make_public_server(config: SchedulerConfig, engine: Engine, tls: ServiceTls = NO_TLS) -> rpc.Server:
    """Returns the gRPC server for clients, without the link, which trusts tokenizer services."""
    door = [*interceptors(config), ClientTenants(config.tenant_header)]
    addresses = config.public_listen.split(",")
    server = rpc.Server(
        addresses, config.shutdown_timeout, MAX_PUBLIC_BYTES, door, config.drain_delay, credentials=tls.of_clients()
    )
    server.add(SchedulerServicer(engine, config.seed), scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, _NAME)
    return server


async def report_availability(engine: Engine, *servers: rpc.Server) -> None:
    """Sets the health of the servers whenever the availability of executors changes."""
    while True:
        is_available = await engine.availability.changes.get()
        for server in servers:
            await server.set_serving(is_available)
