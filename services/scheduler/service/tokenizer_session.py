"""The multiplexed stream of one tokenizer service: its requests, and their outputs."""

from collections.abc import Callable
from functools import partial

from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.engine import Engine
from pagewire.services.scheduler.service.request_output import RequestOutput, is_last, merged, size_of
from pagewire.services.scheduler.values.request import FinishReason
from pagewire.v1.scheduler_link_pb2 import (
    SchedulerLinkServiceConnectRequest,
    SchedulerLinkServiceConnectResponse,
    TokenSubmission,
)
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import Session


class TokenizerSession(
    Session[TokenSubmission, RequestOutput, SchedulerLinkServiceConnectRequest, SchedulerLinkServiceConnectResponse]
):
    def __init__(self, engine: Engine) -> None:
        super().__init__(merged, size_of, is_last, engine.draining)
        self._engine = engine
        engine.availability.on_model_change.add(self.greet_again)

    async def greet(self) -> SchedulerLinkServiceConnectResponse:
        info = await self._engine.availability.wait_for_model()
        hello = convert.from_info(info, self._engine.adapters.listed)
        hello.sleep_level = self._engine.sleep.status.level
        return SchedulerLinkServiceConnectResponse(hello=hello, draining=self._engine.draining.has_begun)

    def on_message(self, message: SchedulerLinkServiceConnectRequest) -> None:
        for submission in message.requests:
            self.start(submission.request_id, submission)
        for number in message.abort_request_ids:
            self.abort(number)

    def begin(self, number: int, submission: TokenSubmission) -> Callable[[], None]:
        try:
            return partial(self._engine.abort, self._engine.submit(submission, self.outbox, number))
        except RpcError as error:
            num_tokens = len(submission.request.prompt_token_ids)
            self.outbox.put(number, RequestOutput([], num_tokens, 0, 0, FinishReason.ERROR, error=error))
            return lambda: None

    def build_message(self, outputs: dict[int, RequestOutput]) -> SchedulerLinkServiceConnectResponse:
        return convert.from_outputs(outputs)

    def close(self) -> None:
        self._engine.availability.on_model_change.discard(self.greet_again)
        if self._live:
            self._engine.weights.on_client_lost()
        super().close()

    def greet_again(self) -> None:
        self.outbox.put(None, RequestOutput([], 0, 0, 0))
