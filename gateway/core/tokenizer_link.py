"""The streams to the tokenizers that carry every generation of this gateway."""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

import grpc

from pagewire.gateway.core.outputs import ChoiceDelta
from pagewire.gateway.core.reply import PendingChoice, Reply, Submission
from pagewire.v1 import inference_link_pb2
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse
from pagewire.v1.inference_link_pb2_grpc import InferenceLinkServiceStub
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse
from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import OpenCall, Peer, Pings, ResubmittingLink

TOKEN_BYTES = 4
LINK_NAME = inference_link_pb2.DESCRIPTOR.services_by_name["InferenceLinkService"].full_name


class TokenizerLink(ResubmittingLink[PendingChoice, ConnectRequest, ConnectResponse]):
    """Submits the choices of replies and gives them their outputs; `run()` keeps the streams up."""

    def __init__(
        self,
        discovery: Discovery,
        connect: Callable[[Listed], grpc.aio.Channel],
        recovery_timeout: float,
        hang_timeout: float = 0.0,
    ) -> None:
        """
        Args:
            recovery_timeout: seconds without a tokenizer service after which generations end with UNAVAILABLE.
            hang_timeout: seconds of silence after which a service counts as hung; 0 = never.
        """
        super().__init__("tokenizer service", discovery, connect, recovery_timeout)
        self._hang_timeout = hang_timeout
        self.model = ""  # of the services; others are not used

    def open(self, channel: grpc.aio.Channel) -> tuple[OpenCall[ConnectRequest, ConnectResponse], Pings]:
        return InferenceLinkServiceStub(channel).Connect, Pings(channel, LINK_NAME, self._hang_timeout)

    def check_greeting(self, peer: Peer[ConnectRequest, ConnectResponse], message: ConnectResponse) -> None:
        if self.model and message.model not in ("", self.model):
            raise RpcError(grpc.StatusCode.UNAVAILABLE, f"it serves {message.model} now, not {self.model}")

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        context: RequestContext | None = None,
        earlier: Sequence[Sequence[GenerateResponse]] = (),
    ) -> Reply:
        """Starts one generation for each request; they wait for a tokenizer service that restarts.

        Args:
            context: the context of all requests.
            earlier: for each request, all outputs of an earlier attempt; the generation continues after them.

        Raises RpcError UNAVAILABLE if there has been no service for recovery_timeout seconds, or none yet.
        """
        if not self.is_available:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "the tokenizer service cannot be reached; try again")
        reply = Reply(self._abort_all, requests, streaming=streaming, context=context)
        for choice, outputs in zip(reply.choices, earlier or repeat(()), strict=False):
            for output in outputs:
                choice.add_earlier(output)
            if outputs and outputs[-1].finish_reason:
                reply.ended_earlier()
            else:
                self.submit(choice)
        return reply

    def _abort_all(self, choices: Iterable[PendingChoice]) -> None:
        for choice in choices:
            self.abort(choice)

    def build_message(self, submits: list[Submission], aborts: list[int]) -> ConnectRequest:
        message = ConnectRequest(abort_numbers=aborts)
        for submission in submits:
            submission.write(message.requests.add())
        return message

    def on_response(self, message: ConnectResponse) -> None:
        for numbered in message.responses:
            choice = self.answered(numbered.number)
            if choice is None:
                continue
            if numbered.HasField("error"):
                self.finish(choice)
                choice.fail(RpcError.from_message(numbered.error))
            else:
                self._on_generated(choice, numbered.response)
        token_ids, start = message.token_ids[:], 0
        for number, text, num_tokens in zip(message.numbers[:], message.texts[:], message.num_tokens[:], strict=True):
            delta = ChoiceDelta(text, token_ids[start : start + num_tokens])
            start += num_tokens
            if (choice := self.answered(number)) is not None:
                choice.add_delta(delta)
                choice.reply.push(choice, delta, len(text) + TOKEN_BYTES * num_tokens)
        if start != len(token_ids):
            raise ValueError(f"the tokenizer announced {start} tokens and sent {len(token_ids)}")

    def _on_generated(self, choice: PendingChoice, response: GenerateResponse) -> None:
        choice.add_response(response)
        if response.finish_reason:
            self.finish(choice)
        choice.reply.push(choice, response, response.ByteSize())
