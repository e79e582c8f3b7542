"""`pagewire.LLM` against a small InferenceService: order, bounds, errors."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import pytest

import pagewire
from pagewire import LLM, BeamSearchParams, LoRARequest, PoolingParams, SamplingParams
from pagewire.errors import StartupError
from pagewire.tools.llm.outputs import PromptError
from pagewire.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Repeats the prompt once for each output, the later prompts sooner than the earlier ones."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.live = self.most = 0
        self.refused: set[str] = set()
        self.admin = Admin()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        text = request.text or "".join(message.content for message in request.chat.messages)
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

    async def Classify(self, request: Any, context: Any) -> inference_pb2.ClassifyResponse:
        scores = [common_pb2.Vector(values=[0.25, 0.75]) for _ in request.inputs]
        return inference_pb2.ClassifyResponse(scores=scores, labels=["no", "yes"])

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        messages = [f"<{message.content}>" for message in request.chat.messages]
        ids = [ord(letter) for letter in "".join(messages) + request.text]
        return inference_pb2.TokenizeResponse(token_ids=[1, *ids] if request.add_special_tokens else ids)

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetTokenizerInfo(self, request: Any, context: Any) -> inference_pb2.GetTokenizerInfoResponse:
        special = {"eos_token": "E", "bos_token": "BOS"}
        return inference_pb2.GetTokenizerInfoResponse(chat_template="{}", vocab_size=256, special_tokens=special)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        defaults = common_pb2.SamplingParams(temperature=0.2, top_k=20)
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="m", default_sampling_params=defaults)])


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Notes the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def LoadAdapter(self, request: Any, context: Any) -> admin_pb2.AdminServiceLoadAdapterResponse:
        self.calls.append((request.name, request.path))
        return admin_pb2.AdminServiceLoadAdapterResponse()

    async def SleepModel(self, request: Any, context: Any) -> admin_pb2.SleepModelResponse:
        self.calls.append((request.level, request.mode))
        return admin_pb2.SleepModelResponse()

    async def WakeModel(self, request: Any, context: Any) -> admin_pb2.WakeModelResponse:
        self.calls.append("wake")
        return admin_pb2.WakeModelResponse()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Server, str]]:
    address, servicer = f"unix:{tmp_path}/s.sock", Server()
    listening = rpc.Server([address])
    name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    listening.add(servicer, inference_pb2_grpc.add_InferenceServiceServicer_to_server, name)
    of_admins = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
    listening.add(servicer.admin, admin_pb2_grpc.add_AdminServiceServicer_to_server, of_admins)
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
    assert [o.outputs[0].text for o in await asyncio.to_thread(lambda: llm.chat(messages=one))] == ["hi"]
    assert len(await asyncio.to_thread(lambda: llm.chat([one, one], tools=tools, tool_choice="f"))) == 2
    assert server[0].requests[-1].chat.tools[0].name == server[0].requests[-1].output_parsing.named == "f"
    assert [o.outputs.embedding for o in await asyncio.to_thread(llm.embed, ["a", "bcd"])] == [[1.0], [3.0]]
    assert [o.outputs.score for o in await asyncio.to_thread(llm.score, "ab", ["c", "def"])] == [3.0, 5.0]
    with pytest.raises(ValueError, match="2 queries and 1 documents"):
        llm.score(["a", "b"], ["c"])


async def test_a_model_that_the_stack_does_not_serve_is_refused(server: tuple[Server, str]) -> None:
    with pytest.raises(StartupError, match="does not serve other, but "):
        await asyncio.to_thread(LLM, "other", address=server[1])


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


async def test_options_of_vllm_belong_to_all_prompts_or_to_each(server: tuple[Server, str], llm: LLM) -> None:
    one, other = LoRARequest("one", 1, "/adapters/one"), LoRARequest("other", 2)
    outputs = await asyncio.to_thread(
        lambda: llm.generate(["a", {"prompt": "b"}, [7]], lora_request=[one, other, None], priority=[3, 2, 1])
    )
    sent = {request.text: request for request in server[0].requests}
    assert [sent[text].model for text in ("a", "b", "")] == ["one", "other", ""]
    assert [sent[text].sampling_params.priority for text in ("a", "b", "")] == [3, 2, 1]
    assert [output.lora_request for output in outputs] == [one, other, None]
    await asyncio.to_thread(lambda: llm.embed(prompts=["a", "b"], lora_request=one))
    assert server[0].admin.calls == [("one", "/adapters/one")], "it is loaded once"
    with pytest.raises(ValueError, match="2 prompts and 1 priority"):
        llm.generate(["a", "b"], priority=[1])


async def test_progress_is_shown_by_tqdm_if_the_caller_wants_it(llm: LLM) -> None:
    class Bar:
        seen: ClassVar[list[Any]] = []

        def __init__(self, **options: Any) -> None:
            self.seen.append(options["total"])

        def update(self, count: int) -> None:
            self.seen.append(count)

        def close(self) -> None:
            self.seen.append("closed")

    await asyncio.to_thread(lambda: llm.generate(["a", "b"], use_tqdm=Bar))
    assert Bar.seen == [2, 1, 1, "closed"]


async def test_text_is_left_out_if_only_tokens_are_wanted(llm: LLM) -> None:
    [output] = await asyncio.to_thread(llm.generate, "hello", SamplingParams(detokenize=False))
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("", [1, 2], True)


async def test_a_search_returns_what_it_does_in_vllm(server: tuple[Server, str], llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5, length_penalty=0.5, ignore_eos=True)
    [found] = await asyncio.to_thread(llm.beam_search, [{"prompt": "hello"}], params)
    [sent] = server[0].requests
    assert (sent.n, sent.beam_search.length_penalty, sent.sampling_params.logprobs) == (2, 0.5, 4)
    assert (sent.sampling_params.max_tokens, sent.sampling_params.ignore_eos) == (5, True)
    sequence = found.sequences[0]
    assert len(found.sequences) == 2 and (sequence.tokens, sequence.text) == ([7, 1, 2], "\x07\x01\x02")
    assert sequence.orig_prompt == "hello" and sequence.cum_logprob == -0.5
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "!")
    assert sequence.logprobs[0][2].decoded_token == "x"


async def test_numbers_of_texts(llm: LLM) -> None:
    [vector] = await asyncio.to_thread(lambda: llm.encode("abc", pooling_task="embed"))
    assert vector.outputs.data.tolist() == [3.0]
    [scores] = await asyncio.to_thread(lambda: llm.encode(["abc"], PoolingParams(), pooling_task="classify"))
    assert scores.outputs.data.tolist() == [0.25, 0.75]
    [classes] = await asyncio.to_thread(llm.classify, "abc")
    assert (classes.outputs.probs, classes.outputs.labels, classes.outputs.num_classes) == (
        [0.25, 0.75],
        ["no", "yes"],
        2,
    )
    assert [o.outputs.score for o in await asyncio.to_thread(llm.score, ["ab"], ["c", "def"])] == [3.0, 5.0]
    for task in (None, "token_embed"):
        with pytest.raises(ValueError, match=f"pooling_task is {task!r}; it must be 'embed' or 'classify'"):
            llm.encode("abc", pooling_task=task)


async def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    def use() -> None:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.encode("ab") == [1, 97, 98] and tokenizer("ab", add_special_tokens=False) == {
            "input_ids": [97, 98],
            "attention_mask": [1, 1],
        }
        assert tokenizer(["a", "bc"])["input_ids"] == [[1, 97], [1, 98, 99]]
        assert tokenizer.encode("abc", truncation=True, max_length=2) == [1, 97]
        assert tokenizer.decode([97, 98]) == "ab" and tokenizer.batch_decode([[97], [98]]) == ["a", "b"]
        assert tokenizer.tokenize("ab") == ["a", "b"] and tokenizer.convert_tokens_to_ids(["a", "ab"]) == [97, None]
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("E", ord("E"))
        assert (tokenizer.bos_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (None, None, None)
        assert (len(tokenizer), tokenizer.vocab_size, tokenizer.chat_template) == (256, 256, "{}")
        chat = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "<hi>"
        assert tokenizer.apply_chat_template([chat, chat]) == [[60, 104, 105, 62]] * 2
        with pytest.raises(TypeError, match="return_tensors: the result is a list of ids or a text"):
            tokenizer.apply_chat_template(chat, return_tensors="pt")
        with pytest.raises(AttributeError, match=r"has no get_vocab; .*transformers\.AutoTokenizer"):
            tokenizer.get_vocab()

    await asyncio.to_thread(use)


async def test_sleep_and_wake(server: tuple[Server, str], llm: LLM) -> None:
    await asyncio.to_thread(llm.sleep)
    await asyncio.to_thread(llm.wake_up, ["weights"])
    assert server[0].admin.calls == [(1, admin_pb2.SLEEP_MODE_WAIT), "wake"]
    with pytest.raises(ValueError, match="level is 1 or 2, and mode wait, keep or abort"):
        llm.sleep(level=0)
    with pytest.raises(ValueError, match="tags has all; there are kv_cache and weights"):
        llm.wake_up(["all"])


async def test_what_is_not_served_says_why(llm: LLM) -> None:
    for name, why in (("collective_rpc", "do not run in the executors"), ("enqueue", "take all prompts at once")):
        with pytest.raises(AttributeError, match=f"LLM has no {name}: .*{why}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"LLM has no nothing$"):
        llm.nothing  # noqa: B018
