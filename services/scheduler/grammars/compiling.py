"""Compilation of grammars on the executors, before a request with a grammar waits for a step; the scheduler itself does
not read grammars."""

import asyncio
from collections.abc import Mapping

import grpc

from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.suspicion.suspects import MAX_SILENT_LOSSES
from pagewire.v1.common_pb2 import Grammar
from pagewire.wire.rpc import RpcError

_RETRY_SECONDS = 0.1
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


async def compile_grammar(grammar: Grammar, drivers: Mapping[int, ReplicaDriver]) -> None:
    """Compiles the grammar on all attached executors, and waits until at least one has succeeded.

    Args:
        drivers: those of all replicas, a live view.

    Raises:
        RpcError: INVALID_ARGUMENT if the grammar cannot be used, INTERNAL if each executor that compiles it is lost.
    """
    num_losses = 0
    while num_losses < MAX_SILENT_LOSSES:
        attached = [driver.client for driver in drivers.values() if driver.has_executor]
        outcomes = await asyncio.gather(*(one.compile(grammar) for one in attached), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, grpc.aio.AioRpcError):
                if outcome.code() in _FINAL:
                    message = outcome.details() or "the grammar was refused"
                    raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, [("sampling_params.grammar", message)])
            elif outcome is not None and not isinstance(outcome, asyncio.CancelledError):  # its channel was closed
                raise outcome
        if None in outcomes:
            return
        num_losses += bool(outcomes)
        await asyncio.sleep(_RETRY_SECONDS)
    raise RpcError(
        grpc.StatusCode.INTERNAL,
        f"the executor was lost {MAX_SILENT_LOSSES} times in a row while it compiled the grammar of this request; see "
        "the executor's log for the cause",
    )
