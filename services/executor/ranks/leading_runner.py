"""The leader's runner: it sends each call to its followers before it executes it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pagewire.services.executor.parallel.group import REASON_S, Group
from pagewire.services.executor.parallel.pipe import PeerLost
from pagewire.services.executor.ranks.leader import Leader
from pagewire.services.executor.ranks.outcomes import MOST_PENDING, num_unknown
from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.runner import Begun, Runner
from pagewire.services.executor.runner.wrapping_runner import WrappingRunner
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.v1.rank_link_pb2 import RankCommand

logger = logging.getLogger(__name__)


class LeadingRunner(WrappingRunner):
    """The `Runner` of rank 0. Each call raises RankLost once a rank is lost, or if only some ranks can execute a step.
    Any other error occurs on all ranks: they continue after a reset, as a single rank does."""

    def __init__(self, runner: Runner, leader: Leader, group: Group, sends: bool = True) -> None:
        """sends: whether to send calls to the followers; if not, they have received the calls already (`ahead.py`)."""
        super().__init__(runner)
        self._leader, self._group = leader, group
        self._sends = sends
        self._outputs: deque[StepOutput] = deque(maxlen=MOST_PENDING + 1)  # of the last steps

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        if self._sends:
            unknown = num_unknown(self._outputs)
            self._leader.send(RankCommand(step=step_to_proto(step), num_unknown=unknown))
        begun = Begun(launching)
        try:
            output = super().execute(step, begun)
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
        super().reset()
        self._outputs.clear()

    def rest(self) -> ModelRunner:
        self._outputs.clear()
        return super().rest()

    def record_missing(self) -> bool:
        return False  # all ranks record a step when it first occurs
