"""Sockets, descriptors and ports."""

from __future__ import annotations

import errno
import socket

from pagewire.config import ServeConfig
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, problem, warning
from pagewire.tools.doctor.host import Host

_ENOUGH_DESCRIPTORS = 16384
_ENOUGH_BACKLOG = 1024
_DEFAULT_BUFFER = 212_992  # bytes; the kernel's default of net.core.rmem_max
_BUFFER_BETWEEN_NODES = 16 << 20


def check_network(host: Host, config: ServeConfig, *, is_running: bool = False) -> Findings:
    """Checks the network. is_running: whether the stack already runs and has its ports."""
    yield _descriptors(host)
    yield _backlog(host)
    yield _buffers(host, config)
    for check, port in (("REST port", config.port), ("gRPC port", config.grpc_port)):
        yield absent(check, "a running stack has it") if is_running else _port(check, config.host, port)
    yield _exposure(config)
    if config.distributed_executor_backend == "ray" and config.num_ranks > 1:
        yield _fabric(host)


def _descriptors(host: Host) -> Finding:
    limit = host.descriptor_limit()
    if limit >= _ENOUGH_DESCRIPTORS:
        return ok("descriptors", f"{limit} for a process")
    return warning(
        "descriptors",
        f"{limit} for a process",
        "each client takes one: further connections are not accepted",
        f"ulimit -n {_ENOUGH_DESCRIPTORS * 4}, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container",
    )


def _backlog(host: Host) -> Finding:
    backlog = host.number("/proc/sys/net/core/somaxconn")
    if backlog is None or backlog >= _ENOUGH_BACKLOG:
        return ok("backlog", "unknown" if backlog is None else f"{backlog} connections may wait to be accepted")
    return note(
        "backlog",
        f"{backlog} connections may wait to be accepted",
        "in a larger burst, clients' systems retry after a second",
        "sysctl net.core.somaxconn=4096",
    )


def _buffers(host: Host, config: ServeConfig) -> Finding:
    """Checks socket buffers. Guides recommend 128 MiB, but only ranks on several nodes send large messages; tokens are
    small."""
    sizes = [host.number(f"/proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")]
    least = min((size for size in sizes if size is not None), default=None)
    if least is None:
        return absent("socket buffers", "the kernel does not report them (a container)")
    needed = _BUFFER_BETWEEN_NODES if config.distributed_executor_backend == "ray" else _DEFAULT_BUFFER
    if least >= needed:
        return ok("socket buffers", f"up to {least >> 10} KiB, enough: tokens are small messages")
    return note(
        "socket buffers",
        f"up to {least >> 10} KiB",
        "ranks on other nodes send hidden states of whole steps, which wait for the buffer",
        f"sysctl net.core.rmem_max={needed} net.core.wmem_max={needed}",
    )


def _fabric(host: Host) -> Finding:
    """Checks the network between nodes. With NCCL_DEBUG=INFO, NCCL logs its choice: NET/Socket is TCP,
    NET/IB/.../GDRDMA a card that reads the GPU's memory directly."""
    states = [host.read(path) or "" for path in host.glob("/sys/class/infiniband/*/ports/*/state")]
    if not states:
        return note(
            "fabric",
            "no card for InfiniBand or RoCE",
            "ranks on other nodes are reached by TCP: sums over all of them in each layer wait for it",
            "--tensor-parallel-size within a node, --pipeline-parallel-size over nodes",
        )
    active = sum("ACTIVE" in state for state in states)
    if not active:
        return warning(
            "fabric",
            f"{len(states)} ports for InfiniBand or RoCE, none is active",
            "NCCL uses TCP instead, and logs it with NCCL_DEBUG=INFO (NET/Socket)",
            "ibstat; the cable, the switch, the subnet manager",
        )
    found = f"{active} of {len(states)} ports for InfiniBand or RoCE are active"
    loaded = (host.read("/proc/modules") or "").split()
    if "nvidia_peermem" in loaded or "nvidia" not in loaded:
        return ok("fabric", found)
    return note(
        "fabric",
        f"{found}; the module nvidia_peermem is not loaded",
        "unless the driver exports GPU memory itself (dma-buf), data between GPUs of two nodes passes through the host",
        "modprobe nvidia_peermem; NCCL_DEBUG=INFO then logs GDRDMA",
    )


def _port(check: str, host: str, port: int) -> Finding:
    if not port:
        return ok(check, "chosen at start")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return note(
                check,
                f"{port} is in use",
                "perhaps by a running stack (pagewire ps); another cannot start on it",
                "--port, --grpc-port; or --url to examine the running stack",
            )
        return problem(
            check,
            f"{host}:{port}: {error.strerror}",
            "the stack could not listen there",
            "--host, and a port above 1023",
        )
    return ok(check, f"{host}:{port} is free")


def _exposure(config: ServeConfig) -> Finding:
    is_local = config.host in ("127.0.0.1", "::1", "localhost")
    has_key = config.api_key is not None or config.api_key_file is not None
    if is_local or (has_key and config.ssl_certfile):
        return ok("exposure", f"listens on {config.host}" + ("" if is_local else ", with keys and TLS"))
    missing = " and ".join(["no key"] * (not has_key) + ["no TLS"] * (not config.ssl_certfile))
    return (note if has_key else warning)(
        "exposure",
        f"listens on {config.host} with {missing}",
        "every client that reaches this machine may use the model" if not has_key else "keys can be read on the way",
        "--api-key-file FILE (pagewire keys add), --ssl-certfile; or a proxy with both",
    )
