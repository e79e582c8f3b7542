"""The seams of the servicer: grammars of requests, and replacement of the model's weights."""

from __future__ import annotations

from typing import Protocol

from pagewire.services.executor.step.step import Step
from pagewire.v1.common_pb2 import Grammar
from pagewire.v1.executor_pb2 import Weights


class Grammars(Protocol):
    """Compiles grammars. Used on the event loop."""

    async def check(self, grammar: Grammar) -> None:
        """Compiles a grammar that requests will have. Raises RpcError INVALID_ARGUMENT if it is wrong."""

    async def attach(self, step: Step) -> Step:
        """Returns the step with a matcher, or a failure, for each new request with restricted tokens."""

    def close(self) -> None:
        """Ends threads and processes."""


class WeightVersions(Protocol):
    """The weights in force, and their possible replacement. Used on the event loop. All calls may raise RpcError."""

    async def in_force(self) -> Weights:
        """Returns the weights in force, after any running replacement."""

    async def load(self, wanted: Weights) -> Weights:
        """Makes weights ready to be installed, and returns their full description."""

    async def install(self, wanted: Weights) -> float:
        """Puts the loaded weights in force; returns the seconds in which no step could run."""

    def drop(self) -> None:
        """Forgets the loaded weights."""

    def close(self) -> None:
        """Ends threads."""
