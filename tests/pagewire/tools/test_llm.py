"""`pagewire.LLM` against a small InferenceService: order, bounds, errors."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import pagewire
from pagewire import LLM, SamplingParams
from pagewire.errors import StartupError
from pagewire.tools.llm.outputs import PromptError
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Repeats the prompt once for each output, the later prompts sooner than the earlier ones."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.live = self.most = 0
        self.refused: set[str] = set()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        text = request.text or request.chat.messages[0].content
        if "wrong" in text:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "wrong, as it says")
        if "full" in text and text not in self.refused:
            self.refused.add(text)
            raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
        self.live += 1
        self.most = max(self.most, self.live)
        await asyncio.sleep(0.02 if len(self.requests) % 2 else 0)
        self.live -= 1
        for index in range(max(1, request.n)):
            yield inference_pb2.GenerateResponse(text=text[:2], token_ids=[1], index=index, prompt_token_ids=[7])
            logprob = inference_pb2.TokenLogprob(token_id=2, logprob=-0.5, token="x")
            yield inference_pb2.GenerateResponse(
                text=text[2:],
                token_ids=[2],
                logprobs=[logprob] if request.sampling_params.HasField("logprobs") else [],
                index=index,
                finish_reason=common_pb2.FINISH_REASON_STOP,
                stop_string="!",
            )

    async def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:
        return inference_pb2.EmbedResponse(
            embeddings=[common_pb2.Vector(values=[len(text.text)]) for text in request.inputs]
        )

    async def Score(self, request: Any, context: Any) -> inference_pb2.ScoreResponse:
        return inference_pb2.ScoreResponse(scores=[len(pair.text) + len(pair.text_pair) for pair in request.pairs])

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        defaults = common_pb2.SamplingParams(temperature=0.2, top_k=20)
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m", default_sampling_params=defaults)])


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Server, str]]:
    address, servicer = f"unix:{tmp_path}/s.sock", Server()
    listening = rpc.Server([address])
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    listening.add(servicer, inference_pb2_grpc.add_InferenceServiceServicer_to_server, name)
    await listening.start()
    yield servicer, address
    await listening.stop()


@pytest.fixture
async def llm(server: tuple[Server, str]) -> AsyncIterator[LLM]:
    llm = await asyncio.to_thread(LLM, address=server[1], max_concurrency=8)
    yield llm
    await asyncio.to_thread(llm.close)


async def test_outputs_have_the_order_of_the_prompts(server: tuple[Server, str], llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(100)]
    taken: list[str] = []

    def reading() -> Iterator[str]:
        for prompt in prompts:
            assert len(taken) - len(server[0].requests) <= 8 + 1, "prompts are read as there is room"
            taken.append(prompt)
            yield prompt

    outputs = await asyncio.to_thread(llm.generate, reading())
    assert [output.outputs[0].text for output in outputs] == prompts == [output.prompt for output in outputs]
    assert 1 < server[0].most <= 8


async def test_an_output_has_what_it_has_in_vllm(server: tuple[Server, str], llm: LLM) -> None:
    params = SamplingParams(n=2, logprobs=0, temperature=0, stop="!", logit_bias={3: 1.5})
    [output] = await asyncio.to_thread(llm.generate, "hello", params)
    assert output.prompt_token_ids == [7] and [o.index for o in output.outputs] == [0, 1]
    second = output.outputs[1]
    assert (second.text, second.token_ids, second.finish_reason, second.stop_reason) == ("hello", [1, 2], "stop", "!")
    assert second.logprobs is not None and second.logprobs[0][2].logprob == second.cumulative_logprob == -0.5
    sent = server[0].requests[0]
    assert (list(sent.stop), sent.n, sent.sampling_params.max_tokens) == (["!"], 2, 16)
    assert list(sent.sampling_params.logit_bias_ids) == [3] and not sent.sampling_params.HasField("top_p")


async def test_a_prompt_may_name_an_adapter(server: tuple[Server, str], llm: LLM) -> None:
    await asyncio.to_thread(llm.generate, ["a", "b"], model="x")
    await asyncio.to_thread(llm.chat, [{"role": "user", "content": "hi"}], model="x")
    assert [request.model for request in server[0].requests] == ["x"] * 3


async def test_each_prompt_may_have_its_own_parameters(server: tuple[Server, str], llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=None)]
    await asyncio.to_thread(llm.generate, ["a", "b"], params)
    sent = {request.text: request.sampling_params for request in server[0].requests}
    assert sent["a"].max_tokens == 1 and not sent["b"].HasField("max_tokens")
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        await asyncio.to_thread(llm.generate, ["a", "b", "c"], params)


async def test_a_wrong_prompt_is_named_and_the_others_are_answered(server: tuple[Server, str], llm: LLM) -> None:
    prompts = ["one", "wrong", "three"]
    with pytest.raises(PromptError, match=r"prompt 1: wrong, as it says \(INVALID_ARGUMENT\)"):
        await asyncio.to_thread(llm.generate, prompts)
    outputs = await asyncio.to_thread(lambda: llm.generate(prompts, return_errors=True))
    assert [bool(output.error) for output in outputs] == [False, True, False]
    assert [output.prompt for output in outputs] == prompts
    assert outputs[2].outputs[0].text == "three"


async def test_a_full_server_is_asked_again(server: tuple[Server, str], llm: LLM) -> None:
    [output] = await asyncio.to_thread(llm.generate, ["full"])
    assert output.outputs[0].text == "full" and len(server[0].requests) == 2


async def test_chats_vectors_and_scores(server: tuple[Server, str], llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert [o.outputs[0].text for o in await asyncio.to_thread(llm.chat, one)] == ["hi"]
    assert len(await asyncio.to_thread(lambda: llm.chat([one, one], tools=tools, tool_choice="f"))) == 2
    assert server[0].requests[-1].chat.tools[0].name == server[0].requests[-1].output_parsing.named == "f"
    assert [o.outputs.embedding for o in await asyncio.to_thread(llm.embed, ["a", "bcd"])] == [[1.0], [3.0]]
    assert [o.outputs.score for o in await asyncio.to_thread(llm.score, "ab", ["c", "def"])] == [3.0, 5.0]
    with pytest.raises(ValueError, match="2 queries and 1 documents"):
        llm.score(["a", "b"], ["c"])


async def test_a_closed_one_says_so(llm: LLM) -> None:
    await asyncio.to_thread(llm.close)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("a")


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="no flag max_model_ln; did you mean max_model_len"):
        LLM(max_model_ln=3)
    with pytest.raises(TypeError, match="block_size: only for a new stack"):
        LLM(address="127.0.0.1:1", block_size=16)
    with pytest.raises(StartupError, match="nothing answers at 127"):
        LLM(address="127.0.0.1:1")
    with pytest.raises(StartupError, match="--block-size: expected"):
        LLM(block_size=7)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        pagewire.nothing_like_it  # noqa: B018


async def test_the_models_default_sampling_is_known(llm: LLM) -> None:
    assert await asyncio.to_thread(llm.get_default_sampling_params) == SamplingParams(temperature=0.2, top_k=20)
