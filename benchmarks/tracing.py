"""What tracing every request costs: `python -m benchmarks.tracing [--streams 16] [--turns 5] [FLAGS OF serve]`.

Two stacks take the same load in turns, one of which traces all requests and sends its spans to a receiver here. Printed
are microseconds of processor time per output token of the services, medians over the turns, and what tracing adds, also
as a share of all that the stack takes, the executor's computing included.
"""

import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.services import AROUND, Run, ServicesConfig, measure_server
from benchmarks.serving import drive, server
from pagewire import flags
from pagewire.config.fields import POSITIVE, flag


@dataclass(frozen=True, kw_only=True)
class TracingConfig(ServicesConfig):
    """The stack, and the load."""

    streams: tuple[int, ...] = flag((16,), "requests in flight", group="load", valid=POSITIVE)
    output_len: int = flag(64, "tokens generated for each prompt", group="load", valid=POSITIVE)
    turns: int = flag(5, "measurements of each stack", group="load", valid=POSITIVE)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.num_spans = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.num_spans += sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiver() -> Iterator[tuple[Receiver, int]]:
    """And its port."""
    service, grpc_server = Receiver(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(service, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    yield service, port
    grpc_server.stop(None).wait()


def main() -> None:
    config = flags.parse(
        TracingConfig, sys.argv[1:], prog="python -m benchmarks.tracing", description="What tracing costs."
    )
    plain = replace(config, log_level="warning")
    with receiver() as (received, port):
        traced = replace(plain, otlp_traces_endpoint=f"http://127.0.0.1:{port}")
        with server(plain) as first, server(traced) as second:
            stacks = {"off": first, "on": second}
            for _, port in stacks.values():
                drive(
                    f"http://127.0.0.1:{port}", num_requests=1, concurrency=1, input_len=config.input_len, output_len=2
                )
            for num_streams in config.streams:
                measure(config, stacks, num_streams)
        print(f"{received.num_spans} spans arrived")


def measure(config: TracingConfig, stacks: dict[str, tuple[psutil.Process, int]], num_streams: int) -> None:
    runs: dict[str, list[Run]] = {name: [] for name in stacks}
    for turn in range(config.turns):
        for name, (process, port) in list(stacks.items())[:: -1 if turn % 2 else 1]:
            runs[name].append(measure_server(config, process, f"http://127.0.0.1:{port}", num_streams))
    print(f"{num_streams} streams, us of processor time per token")
    everything = statistics.median(run.per_token(*AROUND, "compute") for run in runs["off"])
    for what in (*((one,) for one in AROUND), AROUND):
        off, on = (statistics.median(run.per_token(*what) for run in runs[name]) for name in ("off", "on"))
        name = what[0] if len(what) == 1 else "services"
        print(f"{name:>10} {off:8.1f}, traced {on:8.1f}: {on - off:+.1f}, {(on - off) / everything:+.1%} of all")


if __name__ == "__main__":
    main()
