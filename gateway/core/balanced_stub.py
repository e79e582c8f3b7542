"""Calls of their own, beside the link's streams: each goes to the tokenizer that has least to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from pagewire.gateway.core.errors import ApiError
from pagewire.wire.streams import ResubmittingLink

AWAY = "the tokenizer service cannot be reached; try again"


class BalancedStub:
    """Has the methods of a gRPC stub. They raise ApiError 503 as long as no tokenizer service is known."""

    def __init__(self, link: ResubmittingLink[Any, Any, Any], make_stub: Callable[[grpc.aio.Channel], Any]) -> None:
        self._link = link
        self._make_stub = make_stub

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, request: object, **options: Any) -> Any:
        peer = self._link.choose() or next(iter(self._link.peers), None)
        if peer is None:
            raise ApiError(503, AWAY)
        call = getattr(self._make_stub(peer.channel), name)(request, **options)
        peer.num_calls += 1

        def ended(_: object) -> None:
            peer.num_calls -= 1

        call.add_done_callback(ended)
        return call
