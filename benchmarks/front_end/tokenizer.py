"""A tokenizer service that says what a script says: `python -m benchmarks.front_end.tokenizer ADDRESS STEP_MS`.

Every STEP_MS each live request gets a token, all in one message, as the real one sends them; with 0, a request gets all
of its tokens in one message at once. It says text, log probabilities or the arguments of a tool call, whatever the
request asks for.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

from pagewire.v1 import common_pb2, inference_link_pb2_grpc, inference_pb2_grpc
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse, NumberedResponse
from pagewire.v1.inference_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    Model,
    TokenLogprob,
    ToolCallDelta,
)
from pagewire.wire import rpc

TEXT = " token"
TOKEN_ID = 1234
PROMPT_TOKENS = 16


class ScriptedTokenizer(
    inference_pb2_grpc.InferenceServiceServicer, inference_link_pb2_grpc.InferenceLinkServiceServicer
):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def ListModels(self, request: object, context: object) -> ListModelsResponse:
        return ListModelsResponse(models=[Model(id="m", root="m", max_model_len=4096)])

    async def Connect(self, requests: AsyncIterator[ConnectRequest], context: object) -> AsyncIterator[ConnectResponse]:
        live: dict[int, Scripted] = {}
        wake = asyncio.Event()

        async def read() -> None:
            async for message in requests:
                for number in message.abort_numbers:
                    live.pop(number, None)
                for one in message.requests:
                    live[one.number] = Scripted(one.request)
                wake.set()

        reader = asyncio.create_task(read())
        try:
            yield ConnectResponse()
            while True:
                if not live:
                    wake.clear()
                    await wake.wait()
                await asyncio.sleep(self._step_s)
                yield step(live, whole=not self._step_s)
        finally:
            reader.cancel()


class Scripted:
    """A request that is being answered."""

    def __init__(self, request: GenerateRequest) -> None:
        self.left = request.sampling_params.max_tokens
        self.told = 0
        self.top = request.sampling_params.logprobs if request.sampling_params.HasField("logprobs") else None
        self.calls = request.output_parsing.tool_calls and bool(request.chat.tools)

    def advance(self, num_tokens: int) -> GenerateResponse | None:
        """None: what columns can say."""
        first = not self.told
        self.told += num_tokens
        self.left -= num_tokens
        if not (first or self.top is not None or self.calls or not self.left):
            return None
        response = GenerateResponse(token_ids=[TOKEN_ID] * num_tokens)
        response.usage.prompt_tokens, response.usage.completion_tokens = PROMPT_TOKENS, self.told
        if first:
            response.prompt_token_ids.extend(range(PROMPT_TOKENS))
        if self.calls:
            start = {"id": "call-0", "name": "f"} if first else {}
            response.tool_calls.append(ToolCallDelta(index=0, arguments=TEXT * num_tokens, **start))
        else:
            response.text = TEXT * num_tokens
        if self.top is not None:
            response.logprobs.extend([logprob(self.top)] * num_tokens)
        if not self.left:
            response.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return response


def logprob(top: int) -> TokenLogprob:
    others = [TokenLogprob(token_id=i, token=TEXT, token_bytes=TEXT.encode(), logprob=-1.5) for i in range(top)]
    return TokenLogprob(token_id=TOKEN_ID, token=TEXT, token_bytes=TEXT.encode(), logprob=-1.5, top_logprobs=others)


def step(live: dict[int, Scripted], *, whole: bool) -> ConnectResponse:
    """A token of each, or all of them."""
    message = ConnectResponse()
    for number, one in list(live.items()):
        num_tokens = one.left if whole else 1
        response = one.advance(num_tokens)
        if response is not None:
            message.responses.append(NumberedResponse(number=number, response=response))
        else:
            message.numbers.append(number)
            message.texts.append(TEXT * num_tokens)
            message.num_tokens.append(num_tokens)
            message.token_ids.extend([TOKEN_ID] * num_tokens)
        if not one.left:
            del live[number]
    return message


async def serve(address: str, step_s: float) -> None:
    server = rpc.Server([address], shutdown_timeout=0.1)
    service = ScriptedTokenizer(step_s)
    server.add(service, inference_pb2_grpc.add_InferenceServiceServicer_to_server, "pagewire.v1.InferenceService")
    add_link = inference_link_pb2_grpc.add_InferenceLinkServiceServicer_to_server
    server.add(service, add_link, "pagewire.v1.InferenceLinkService")
    await server.start()
    await server.set_serving(True)
    await rpc.wait_for_signal()


if __name__ == "__main__":
    rpc.run(serve(sys.argv[1], float(sys.argv[2]) / 1000))
