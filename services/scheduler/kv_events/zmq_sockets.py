"""The sockets of vLLM's protocol: PUB for batches, ROUTER to replay them."""

import asyncio
from typing import Any

from pagewire.config.values.kv_events import FLAG, KvEventsConfig
from pagewire.errors import StartupError
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.kv_events.vllm_publisher import Frames, Publisher, RankStream


def make_publisher(config: KvEventsConfig, caches: PrefixCaches) -> Publisher:
    """Raises StartupError if packages are missing or an endpoint cannot be used."""
    try:
        import msgspec
        import zmq.asyncio
    except ImportError as error:
        raise StartupError(
            f'{FLAG} needs the package {error.name}: pip install "pagewire[kv-events]", or set "publisher": "null" for '
            "gRPC alone"
        ) from error
    context = zmq.asyncio.Context()
    try:
        return Publisher(
            config, caches, msgspec.msgpack.encode, lambda rank, stream: ZmqSockets(context, config, rank, stream)
        )
    except OSError as error:
        raise StartupError(f"{FLAG}: {error}") from error


class ZmqSockets:
    """The sockets of one replica."""

    def __init__(self, context: Any, config: KvEventsConfig, rank: int, stream: RankStream) -> None:
        """context: of zmq.asyncio. Raises OSError."""
        import zmq

        self._zmq = zmq
        self._stream = stream
        self._pub = context.socket(zmq.PUB, socket_class=zmq.Socket)
        self._pub.set_hwm(config.hwm)
        self._router = context.socket(zmq.ROUTER) if config.replay_endpoint is not None else None
        self._replaying: asyncio.Task[None] | None = None
        try:
            self._attach(self._pub, config.of_rank(config.endpoint, rank), binds=config.binds)
            if config.replay_endpoint is not None:
                self._attach(self._router, config.of_rank(config.replay_endpoint, rank), binds=True)
                self._replaying = asyncio.create_task(self._replay(), name="replay KV events")
        except OSError:
            self.close()
            raise

    def _attach(self, socket: Any, endpoint: str, *, binds: bool) -> None:
        """Binds or connects a socket. Raises OSError."""
        socket.setsockopt(self._zmq.IPV6, int("[" in endpoint))
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            raise OSError(f"cannot {'bind' if binds else 'connect to'} {endpoint}: {error}; use another one") from error

    def publish(self, frames: Frames) -> None:
        self._pub.send_multipart(frames)  # a PUB socket drops what a slow subscriber has no room for

    async def _replay(self) -> None:
        assert self._router is not None
        while True:
            for frames in self._stream.replay(await self._router.recv_multipart()):
                await self._router.send_multipart(frames)

    def close(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
