"""The seam for adapters: slots of the device that steps fill, and that products read."""

from __future__ import annotations

from torch import Tensor

from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.step.step import InvalidStep, Step


class Adapters:
    """No adapters. `adapters.slots` overrides it."""

    num_slots = 0
    nbytes = 0  # of all slots

    def update(self, step: Step, state: RequestState) -> None:
        """Fills the slots that the step changes; the state is without its finished and its new requests. Raises
        InvalidStep for slots that are in use, empty or unknown."""
        if step.slot_changes or any(request.adapter_slot for request in step.new_requests):
            raise InvalidStep("the step has adapters; this executor serves none (--enable-lora)")

    def use(self, slots: Tensor | None) -> None:
        """Lets products add the adapters in these slots of tokens until the next call (`StepContext.adapter_slots`)."""

    def on_all(self, step: Step) -> Step:
        """Returns a dummy step with an adapter for each of its requests, if there are slots."""
        return step

    def reset(self) -> None:
        """Empties all slots."""


NO_ADAPTERS = Adapters()
