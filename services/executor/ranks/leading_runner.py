"""The leader's runner: it sends each call to its followers before it executes it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch

from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.models.pooling import Pooling
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import REASON_S, Group
from pagewire.services.executor.parallel.pipe import PeerLost
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.outcomes import MOST_PENDING, num_unknown
from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.runner.adapters import Adapters
from pagewire.services.executor.runner.runner import Begun, Runner
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.v1.rank_link_pb2 import RankCommand

logger = logging.getLogger(__name__)


class LeadingRunner:
    """The `Runner` of rank 0. Each call raises RankLost once a rank is lost, or if only some ranks can execute a step.
    Any other error occurs on all ranks: they continue after a reset, as a single rank does."""

    def __init__(self, runner: Runner, leader: Leader, group: Group, sends: bool = True) -> None:
        """sends: whether to send calls to the followers; if not, they have received the calls already (`ahead.py`)."""
        self._runner, self._leader, self._group = runner, leader, group
        self._sends = sends
        self._outputs: deque[StepOutput] = deque(maxlen=MOST_PENDING + 1)  # of the last steps

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        if self._sends:
            unknown = num_unknown(self._outputs)
            self._leader.send(RankCommand(step=step_to_proto(step), num_unknown=unknown))
        begun = Begun(launching)
        try:
            output = self._runner.execute(step, begun)
        except PeerLost as error:
            self._leader.failure.set(f"the connection to another stage is lost: {error}", after=REASON_S)
            self._group.check()
            raise
        except Exception as error:
            if self._sends:
                self._agree_on(error, begun.is_true)
            raise
        self._group.check()
        self._outputs.append(output)
        return output

    def _agree_on(self, error: Exception, has_begun: bool) -> None:
        """Returns if no rank can execute the step. Raises RankLost if some ranks can: they wait for this one."""
        why = f"{type(error).__name__}: {error}"
        if not has_begun:
            self._leader.all_refuse(why)
            return
        self._group.check()  # a lost rank may be the cause
        logger.error("a step failed", exc_info=error)
        self._leader.failure.set(f"rank 0 of the executor failed: {why}", in_a_step=True)
        self._group.check()

    def reset(self) -> None:
        if self._sends:
            self._leader.send(RankCommand(reset=True))
        self._runner.reset()
        self._outputs.clear()

    def on_other_weights(self) -> None:
        self._runner.on_other_weights()  # the followers do this on their own

    def record_missing(self) -> bool:
        return False  # all ranks record a step when it first occurs

    @property
    def model(self) -> Model:
        return self._runner.model

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def pooling(self) -> Pooling:
        return self._runner.pooling

    @property
    def limits(self) -> Limits:
        return self._runner.limits

    @property
    def kv_groups(self) -> Sequence[KVGroup]:
        return self._runner.kv_groups

    @property
    def num_requests(self) -> int:
        return self._runner.num_requests

    @property
    def smallest_image(self) -> int:
        return self._runner.smallest_image

    @property
    def adapters(self) -> Adapters:
        return self._runner.adapters
