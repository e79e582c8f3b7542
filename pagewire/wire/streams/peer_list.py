"""The list of peers, which changes with discovery."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.streams.peer import Peer

logger = logging.getLogger(__name__)


class PeerList:
    """The listed peers, and peers that have left the list but are up and still have requests or calls.

    `peers` changes in place.
    """

    def __init__(self, discovery: Discovery, make_peer: Callable[[Listed], Peer[Any, Any]]) -> None:
        self._discovery = discovery
        self._make_peer = make_peer
        self.peers: list[Peer[Any, Any]] = []
        self._tasks: dict[Listed, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()  # a peer may have to be started or removed

    @property
    def has_starting(self) -> bool:
        return any(peer.is_starting for peer in self.peers)

    def follow(self, listed: Sequence[Listed]) -> None:
        """Applies a new list."""
        present = set(listed)
        for peer in self.peers:
            if peer.is_listed != (peer.listed in present):
                peer.is_listed = not peer.is_listed
                logger.info("%s %s", peer.address, "is listed again" if peer.is_listed else "has left the list")
        known = {peer.listed for peer in self.peers}
        self.peers += [self._make_peer(one) for one in dict.fromkeys(listed) if one not in known]
        self._changed.set()

    def on_progress(self) -> None:
        """Handles the end of a request, or of a peer."""
        if not all(peer.is_listed for peer in self.peers):
            self._changed.set()

    async def run(self) -> None:
        """Follows discovery, and runs the peers, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_all(), name="discovery")
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    for peer in self.peers:
                        if peer.listed not in self._tasks:
                            self._tasks[peer.listed] = tasks.create_task(peer.run(), name=f"peer {peer.address}")
                    while (over := next(filter(_is_over, self.peers), None)) is not None:
                        await self._let_go(over)
        finally:
            for peer in self.peers:
                await peer.channel.close()

    async def _follow_all(self) -> None:
        async for listed in self._discovery.lists():
            self.follow(listed)

    async def _let_go(self, peer: Peer[Any, Any]) -> None:
        # If it is listed again meanwhile, it becomes a new peer.
        self.peers.remove(peer)
        task = self._tasks.pop(peer.listed)
        task.cancel()
        await asyncio.wait([task])
        await peer.channel.close()


def _is_over(peer: Peer[Any, Any]) -> bool:
    return not peer.is_listed and not (peer.is_up and peer.load)
