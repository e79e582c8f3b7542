"""Publishes the events in vLLM's protocol: a numbered stream for each replica, of which the latest part is kept."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc

from pagewire.config.values.kv_events import KvEventsConfig
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.kv_events.vllm_format import batch_of, rank_of
from pagewire.v1.admin_pb2 import SubscribeKvEventsRequest, SubscribeKvEventsResponse
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
Frames = Sequence[bytes]


class Sockets(Protocol):
    """The sockets of one replica. They never wait for a subscriber."""

    def publish(self, frames: Frames) -> None: ...

    def close(self) -> None: ...


class RankStream:
    """The batches of one replica."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_batches = 0

    def add(self, payload: bytes) -> Frames:
        """Numbers a batch and keeps it; returns what subscribers receive."""
        number, self._num_batches = self._num_batches, self._num_batches + 1
        self._kept.append((number, payload))
        return self._topic, number.to_bytes(8, "big"), payload

    def replay(self, request: Frames) -> Iterator[Frames]:
        """Yields the answers to a request, which names the first number that is wanted; none if it is malformed."""
        if len(request) != 3:
            logger.warning("a request to replay KV events has %d frames instead of 3 and is ignored", len(request))
            return
        client, _, start = request
        for number, payload in list(self._kept):
            if number >= int.from_bytes(start, "big"):
                yield client, b"", self._topic, number.to_bytes(8, "big"), payload
        yield client, b"", b"", _END, b""


# Opens the sockets of a replica; raises OSError.
OpenSockets = Callable[[int, RankStream], Sockets]


class Publisher:
    def __init__(
        self, config: KvEventsConfig, caches: PrefixCaches, encode: Callable[[Any], bytes], open_sockets: OpenSockets
    ) -> None:
        """encode: to msgpack. Raises OSError if the sockets of the first replica cannot be opened."""
        self._config = config
        self._caches = caches
        self._encode = encode
        self._open_sockets = open_sockets
        self._streams: dict[int, tuple[RankStream, Sockets | None]] = {}
        self._streams[0] = self._open(0)

    async def run(self) -> None:
        """Publishes until cancelled."""
        try:
            while True:
                try:
                    async for message in self._caches.subscribe(SubscribeKvEventsRequest()):
                        self._publish(message)
                except RpcError as error:
                    # It begins again with what is there, so that subscribers' copies are right again.
                    if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
        finally:
            for _, sockets in self._streams.values():
                if sockets is not None:
                    sockets.close()

    def _publish(self, message: SubscribeKvEventsResponse) -> None:
        if not message.HasField("executor"):
            return
        rank = rank_of(message)
        if rank not in self._streams:
            try:
                self._streams[rank] = self._open(rank)
            except OSError as error:
                logger.error("the KV events of replica %d are not published: %s", rank, error)
                self._streams[rank] = RankStream(self._config), None
        stream, sockets = self._streams[rank]
        if sockets is not None:
            sockets.publish(stream.add(self._encode(batch_of(message))))

    def _open(self, rank: int) -> tuple[RankStream, Sockets]:
        stream = RankStream(self._config)
        return stream, self._open_sockets(rank, stream)
