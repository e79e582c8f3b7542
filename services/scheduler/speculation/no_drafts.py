"""The plan of an executor that drafts nothing."""

from collections.abc import Mapping, Sequence

from pagewire.services.scheduler.core.seams import DraftPlan
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult


class NoDrafts:
    """No request drafts."""

    is_empty = True
    methods: Mapping[int, int] = {}

    def plan(self, runners: Sequence[Request]) -> DraftPlan:
        return self

    def of(self, request: Request) -> int:
        return 0

    def expected(self, step: ScheduledStep) -> float:
        return 0.0

    def learn(self, step: ScheduledStep, result: StepResult, seconds: float) -> None:
        pass


NO_DRAFTS = NoDrafts()
