"""The value of --kv-events-config, an object with vLLM's keys."""

import re
from dataclasses import dataclass, fields
from typing import Any

from pagewire.config import json_object
from pagewire.config.sampling_params import INT32_MAX
from pagewire.errors import StartupError

FLAG = "--kv-events-config"
# Without an endpoint, only this machine is served, as there are no keys.
_DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})|ipc://.+")
_MAX_PORT = 65_535
_PUBLISHERS = ("zmq", "null")


@dataclass(frozen=True)
class KvEventsConfig:
    """Publishing what the prefix caches hold."""

    enable_kv_cache_events: bool = False  # record from the start
    publisher: str = "zmq"  # null: only gRPC's SubscribeKvEvents has the events
    endpoint: str = _DEFAULT_ENDPOINT  # of the first replica; others have the next ports
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that can be replayed
    hwm: int = 100_000  # batches that wait for a slow subscriber
    max_queue_size: int = 100_000  # ignored: a queue of the publisher is bounded by its bytes
    topic: str = ""

    @property
    def uses_zmq(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """True if subscribers connect to the endpoint; otherwise, as in vLLM, it is the address of one that listens."""
        wildcard = "*" in self.endpoint or "::" in self.endpoint
        return wildcard or self.endpoint == _DEFAULT_ENDPOINT or self.endpoint.startswith("ipc://")

    def of_rank(self, endpoint: str, rank: int) -> str:
        """Returns the endpoint of the replica with this number."""
        if endpoint.startswith("ipc://"):
            return f"{endpoint}_dp{rank}" if rank else endpoint
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"


def kv_events_config(text: str | None) -> KvEventsConfig:
    """Reads the value. Raises StartupError."""
    content: dict[str, Any] = json_object.loads(text) if text else {}
    types: dict[str, type] = {
        field.name: str if field.name == "replay_endpoint" else type(field.default) for field in fields(KvEventsConfig)
    }
    if unknown := sorted(content.keys() - types.keys()):
        raise StartupError(f"{FLAG} has unknown keys: {', '.join(unknown)}; known are {', '.join(types)}")
    given: dict[str, Any] = {key: value for key, value in content.items() if value is not None}
    for key, value in given.items():
        is_of_type = type(value) is types[key]
        if not is_of_type or (types[key] is int and not 1 <= value <= INT32_MAX):
            kind = {bool: "true or false", str: "a text", int: f"an integer from 1 to {INT32_MAX}"}[types[key]]
            raise StartupError(f"{FLAG}: {key} is {value!r:.200}; it must be {kind}")
    config = KvEventsConfig(**given)
    if config.publisher not in _PUBLISHERS:
        raise StartupError(f"{FLAG}: publisher {config.publisher!r:.200} is none of {', '.join(_PUBLISHERS)}")
    for key in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, key)
        found = None if endpoint is None else _ENDPOINT.fullmatch(endpoint)
        if endpoint is not None and (found is None or not 1 <= int(found[2] or 1) <= _MAX_PORT):
            raise StartupError(
                f"{FLAG}: {key} is {endpoint!r:.200}; it must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH, with a "
                f"port from 1 to {_MAX_PORT}"
            )
    return config
