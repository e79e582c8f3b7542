"""Embed, Classify and Score: how texts become tokens, what is refused, and that nothing is lost with the scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.pool.input_encoding import Cuts, encode_inputs
from pagewire.services.tokenizer.pool.sentence_config import read_sentence_config
from pagewire.services.tokenizer.vectors import vector_batch
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import (
    ChatMessage,
    ChatPrompt,
    ClassifyRequest,
    ContentPart,
    EmbedRequest,
    GenerateRequest,
    ImageSource,
    InputOptions,
    InputText,
    ListModelsRequest,
    ScoreRequest,
    TokenIds,
)
from tests.services.tokenizer.service_line import FakeScheduler, TokenizerLine
from tests.sweep import examples

EMBED, CLASSIFY = common_pb2.MODEL_KIND_EMBED, common_pb2.MODEL_KIND_CLASSIFY
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", ":", *"abcdefg", "##b", "##,", "do", "not", "'", "s", ".", "n't"]
CLS, SEP = 2, 3


def word_pieces() -> Tokenizer:
    """BERT's kind."""
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return backend


def save(path: Path, **files: Any) -> Path:
    word_pieces().save(str(path / "tokenizer.json"))
    (path / "config.json").write_text("{}")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@asynccontextmanager
async def line(path: Path, kind: int, labels: tuple[str, ...] = (), **options: Any) -> AsyncIterator[TokenizerLine]:
    scheduler = FakeScheduler(lambda request: [7, 7], kind=kind, labels=labels, **options)
    async with TokenizerLine(path, scheduler, path).running() as running:
        await running.scheduler.until(lambda: running.link.model_info is not None)
        yield running


def texts(*given: str) -> list[InputText]:
    return [InputText(text=text) for text in given]


async def test_a_request_before_the_scheduler_waits_for_it(tmp_path: Path) -> None:
    """Replaces both at once."""
    scheduler = FakeScheduler(lambda request: [7, 7], kind=EMBED)
    async with TokenizerLine(tmp_path, scheduler, save(tmp_path)).running(with_scheduler=False) as running:
        call = running.stub.Embed(EmbedRequest(inputs=texts("a")))
        await asyncio.sleep(0.05)  # it has arrived, or waits all the same
        await running.start_scheduler()
        assert len((await call).embeddings) == 1


async def test_texts_are_embedded_in_order(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED) as running:
        inputs = [*texts("a b", "c"), InputText(token_ids=TokenIds(ids=[CLS, 9, 9, SEP]))]
        answer = await running.stub.Embed(EmbedRequest(inputs=inputs))
        assert list(answer.num_tokens) == [4, 3, 4]
        assert [list(vector.values) for vector in answer.embeddings] == [pytest.approx([0.6, 0, 0.8])] * 3
        seen = {tuple(request.prompt_token_ids) for request in running.scheduler.requests}
        assert seen == {(CLS, 6, 7, SEP), (CLS, 8, SEP), (CLS, 9, 9, SEP)}
        assert all(request.yields_vector for request in running.scheduler.requests)
        shorter = await running.stub.Embed(EmbedRequest(inputs=texts("a"), dimensions=2))
        assert list(shorter.embeddings[0].values) == pytest.approx([1, 0])


async def test_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """Clients send such ids that count with OpenAI's tokenizer: their vectors would be wrong."""
    async with line(save(tmp_path), EMBED) as running:
        for ids, message in (([9, 9], "without the model's special tokens"), ([CLS, 99_999, SEP], "token id 99999")):
            with pytest.raises(grpc.aio.AioRpcError, match=rf"inputs\[0\] has .*{message}.*check_embedding_ctx_length"):
                await running.stub.Embed(EmbedRequest(inputs=[InputText(token_ids=TokenIds(ids=ids))]))
        as_they_are = InputOptions(add_special_tokens=False)
        await running.stub.Embed(EmbedRequest(inputs=[InputText(token_ids=TokenIds(ids=[9]))], options=as_they_are))


async def test_prompts_and_lower_case_of_sentence_transformers(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "document"}
    save(tmp_path, config_sentence_transformers=prompts, sentence_bert_config={"do_lower_case": True})
    async with line(tmp_path, EMBED) as running:
        await running.stub.Embed(EmbedRequest(inputs=texts("A"), prompt_name="query"))
        await running.stub.Embed(EmbedRequest(inputs=texts("A")))
        await running.stub.Embed(EmbedRequest(inputs=texts("A"), preferred_prompt_names=["code", "query", "document"]))
        await running.stub.Embed(EmbedRequest(inputs=texts("A"), preferred_prompt_names=["code"]))
        ids = [list(request.prompt_token_ids) for request in running.scheduler.requests]
        with_query, with_default = [CLS, 4, 5, 6, SEP], [CLS, 6, SEP]
        assert ids == [with_query, with_default, with_query, with_default]
        with pytest.raises(grpc.aio.AioRpcError, match="'code' is not one of the model's: query, document"):
            await running.stub.Embed(EmbedRequest(inputs=texts("A"), prompt_name="code"))


@pytest.mark.parametrize(
    "content",
    [{"prompts": ["a"]}, {"prompts": {"a": 1}}, {"default_prompt_name": "a"}, {"default_prompt_name": ["a"]}],
)
def test_wrong_prompts_are_named(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="prompts must be an object of strings, and default_prompt_name the name"):
        read_sentence_config(tmp_path)


async def test_pairs_are_scored_and_classified(tmp_path: Path) -> None:
    async with line(save(tmp_path), CLASSIFY, ("relevant",)) as running:
        pair = InputText(text="a b", text_pair="c")
        answer = await running.stub.Score(ScoreRequest(pairs=[pair, InputText(text="a", text_pair="b")]))
        assert list(answer.scores) == [6, 5]
        assert running.scheduler.requests[0].second_text_start == 4
        classes = await running.stub.Classify(ClassifyRequest(inputs=[pair, *texts("a")]))
        assert [list(scores.values) for scores in classes.scores] == [[6], [3]]
        assert list(classes.labels) == ["relevant"]
        with pytest.raises(grpc.aio.AioRpcError, match=r"pairs\[0\] must have text and text_pair"):
            await running.stub.Score(ScoreRequest(pairs=texts("a")))


async def test_each_text_of_a_pair_has_a_limit_of_its_own(tmp_path: Path) -> None:
    async with line(save(tmp_path), CLASSIFY, ("relevant",)) as running:
        pair = InputText(text="a b c d", text_pair="e f g")
        await running.stub.Score(ScoreRequest(pairs=[pair], max_tokens_per_query=2, max_tokens_per_doc=1))
        assert list(running.scheduler.requests[0].prompt_token_ids) == [CLS, 6, 7, SEP, 10, SEP]
        with pytest.raises(grpc.aio.AioRpcError, match="must be at least 0"):
            await running.stub.Score(ScoreRequest(pairs=[pair], max_tokens_per_doc=-1))


async def test_a_model_that_embeds_scores_by_cosine(tmp_path: Path) -> None:
    """A text of several pairs is computed once."""
    async with line(save(tmp_path), EMBED, max_model_len=6) as running:
        pairs = [InputText(text="a b", text_pair=text) for text in ("c", "d e f g", "c")]
        running.scheduler.vectors = {(CLS, 6, 7, SEP): [3.0, 0, 4], (CLS, 8, SEP): [0, 2.0, 0]}
        answer = await running.stub.Score(ScoreRequest(pairs=pairs))
        assert list(answer.scores) == pytest.approx([0, 1, 0])
        assert list(answer.num_tokens) == [7, 10, 7]
        assert len(running.scheduler.requests) == 3
        await running.stub.Score(ScoreRequest(pairs=pairs, max_tokens_per_query=1, max_tokens_per_doc=2))
        assert {len(request.prompt_token_ids) for request in running.scheduler.requests[3:]} == {3, 4}
        long = InputText(text="a", text_pair="a b c d e")
        with pytest.raises(grpc.aio.AioRpcError, match=r"pairs\[3\] has 7 tokens, the model takes 6"):
            await running.stub.Score(ScoreRequest(pairs=[*pairs, long, long]))


async def test_a_chat_is_embedded_as_its_template_writes_it(tmp_path: Path) -> None:
    save(tmp_path, tokenizer_config={"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}"})
    async with line(tmp_path, EMBED) as running:
        messages = [ChatMessage(role="user", content=text) for text in "abc"]
        given = [InputText(chat=ChatPrompt(messages=messages)), *texts("d")]
        end, start = (InputOptions(truncate_prompt_tokens=2, truncate_start=start) for start in (False, True))
        for options in (None, end, start):
            await running.stub.Embed(EmbedRequest(inputs=given[:1], options=options))
        assert [list(r.prompt_token_ids) for r in running.scheduler.requests] == [[6, 7, 8], [6, 7], [7, 8]]
        assert list((await running.stub.Embed(EmbedRequest(inputs=given))).num_tokens) == [3, 3]
        part = ContentPart(image=ImageSource(url="data:,"))
        shown = InputText(chat=ChatPrompt(messages=[ChatMessage(role="user", parts=[part])]))
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[0\] has images"):
            await running.stub.Embed(EmbedRequest(inputs=[shown]))
        with pytest.raises(grpc.aio.AioRpcError, match="chat_template is not accepted in requests"):
            chat = ChatPrompt(messages=messages, chat_template="{{ 1 }}")
            await running.stub.Embed(EmbedRequest(inputs=[InputText(chat=chat)]))


async def test_too_long_an_input_is_refused_or_cut(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED, max_model_len=5) as running:
        long = texts("a", "a b c d e f")
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[1\] has 8 tokens, the model takes 5") as caught:
            await running.stub.Embed(EmbedRequest(inputs=long))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for limit, lengths in ((-1, [3, 5]), (4, [3, 4])):
            options = InputOptions(truncate_prompt_tokens=limit)
            answer = await running.stub.Embed(EmbedRequest(inputs=long, options=options))
            assert list(answer.num_tokens) == lengths
        for limit, cause in ((6, "within 1..5"), (2, "leaves no room")):
            options = InputOptions(truncate_prompt_tokens=limit)
            with pytest.raises(grpc.aio.AioRpcError, match=cause):
                await running.stub.Embed(EmbedRequest(inputs=long, options=options))


async def test_more_vectors_than_an_answer_holds_are_refused_at_once(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED, vector_size=100_000) as running:
        many = texts(*["a"] * 163)
        with pytest.raises(grpc.aio.AioRpcError, match="163 entries; one answer holds at most 162 vectors"):
            await running.stub.Embed(EmbedRequest(inputs=many))
        assert not running.scheduler.requests
        answer = await running.stub.Embed(EmbedRequest(inputs=many, dimensions=2))
        assert len(answer.embeddings) == 163


async def test_calls_that_the_model_does_not_answer(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="served for embeddings: call Embed or Score") as caught:
            await anext(aiter(running.stub.Generate(GenerateRequest(text="a"))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="call Embed"):
            await running.stub.Classify(ClassifyRequest(inputs=texts("a")))
        models = (await running.stub.ListModels(ListModelsRequest())).models
        assert [model.kind for model in models] == [EMBED]
        for wrong, cause in (([], "inputs has 0 entries"), ([InputText()], r"inputs\[0\] must have text")):
            with pytest.raises(grpc.aio.AioRpcError, match=cause):
                await running.stub.Embed(EmbedRequest(inputs=wrong))


async def test_a_model_for_text_embeds_nothing(tmp_path: Path) -> None:
    async with line(save(tmp_path), common_pb2.MODEL_KIND_UNSPECIFIED) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="start the server with --runner pooling"):
            await running.stub.Embed(EmbedRequest(inputs=texts("a")))


async def test_vectors_outlive_the_scheduler(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED, auto=False) as running:
        call = asyncio.create_task(_embed(running, "a", "b"))
        await running.scheduler.until(lambda: running.scheduler.num_running == 2)
        await running.kill_scheduler()
        await running.start_scheduler()
        await running.scheduler.until(lambda: len(running.scheduler.requests) == 4)
        assert [submission.resubmitted for submission in running.scheduler.submissions] == [False, False, True, True]
        running.scheduler.step()
        assert len((await call).embeddings) == 2


async def test_a_client_that_disconnects_or_fails_ends_all_its_requests(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED, auto=False) as running:
        call = asyncio.create_task(_embed(running, "a", "b", "c"))
        await running.scheduler.until(lambda: running.scheduler.num_running == 3)
        call.cancel()
        await running.scheduler.until(lambda: running.scheduler.num_running == 0)
        running.scheduler.errors[4] = common_pb2.RequestError(code=13, message="broken")
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await _embed(running, "a", "b", "c")
        await running.scheduler.until(lambda: running.scheduler.num_running == 0)


async def test_a_call_of_many_texts_leaves_the_scheduler_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_batch, "MAX_IN_FLIGHT", 2)
    async with line(save(tmp_path), EMBED, auto=False) as running:
        call = asyncio.create_task(_embed(running, *"abcdefg"))
        for num_seen in (2, 4, 6, 7):
            await running.scheduler.until(lambda: len(running.scheduler.requests) == num_seen)  # noqa: B023
            assert running.scheduler.num_running <= 2
            running.scheduler.step()
        assert len((await call).embeddings) == 7
        # One that fails ends the call before the others are submitted.
        running.scheduler.errors[8] = common_pb2.RequestError(code=13, message="broken")
        call = asyncio.create_task(_embed(running, *"abcdefg"))
        await running.scheduler.until(lambda: len(running.scheduler.requests) == 9)
        running.scheduler.step()
        with pytest.raises(grpc.aio.AioRpcError, match="broken"):
            await call
        assert len(running.scheduler.requests) <= 10


async def test_a_call_is_refused_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """The scheduler lets so many wait, but for those that it has let in before."""
    async with line(save(tmp_path), EMBED, auto=False, max_running=2) as running:
        call = asyncio.create_task(_embed(running, *"abcdefg"))
        await running.scheduler.until(lambda: len(running.scheduler.requests) == 7)
        assert running.scheduler.num_running == 2
        with pytest.raises(grpc.aio.AioRpcError, match="too many wait") as caught:
            await _embed(running, "a", "b")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.scheduler.auto = True
        running.scheduler.step()
        assert len((await call).embeddings) == 7


async def test_the_later_part_of_a_list_waits_for_its_turn(tmp_path: Path) -> None:
    async with line(save(tmp_path), EMBED, auto=False, max_running=0) as running:
        request = EmbedRequest(inputs=texts("a", "b"), options=InputOptions(first_index=40, cache_salt="secret"))
        call = asyncio.ensure_future(running.stub.Embed(request))
        await running.scheduler.until(lambda: running.scheduler.num_running == 1)
        assert not call.done()
        running.scheduler.max_running = 9
        running.scheduler.auto = True
        running.scheduler.step()
        assert len((await call).embeddings) == 2
        assert {one.cache_salt for one in running.scheduler.requests} == {"secret"}
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[41\] must have text"):
            await running.stub.Embed(EmbedRequest(inputs=[*texts("a"), InputText()], options=request.options))


async def _embed(running: TokenizerLine, *given: str) -> Any:
    return await running.stub.Embed(EmbedRequest(inputs=texts(*given)))


@settings(max_examples=examples(100), deadline=None)
@given(
    first=st.integers(0, 9), second=st.none() | st.integers(0, 9), limit=st.integers(4, 22), from_start=st.booleans()
)
def test_cutting_is_that_of_the_library(first: int, second: int | None, limit: int, from_start: bool) -> None:
    ours, theirs = word_pieces(), word_pieces()
    theirs.enable_truncation(limit, direction="left" if from_start else "right")
    text, pair = " ".join("abcdefg"[i % 7] for i in range(first)), None if second is None else "g " * second
    cuts = Cuts(limit, from_start=from_start)
    ((token_ids, start),) = encode_inputs(ours, [(text, pair)], add_special_tokens=True, cuts=cuts)
    expected = theirs.encode(text, pair)
    assert token_ids == expected.ids
    assert start == (expected.type_ids.index(1) if 1 in expected.type_ids else 0)


@given(token_ids=st.lists(st.integers(0, len(WORDS) - 1)), skip=st.booleans())
def test_word_pieces_are_streamed_as_they_are_decoded(token_ids: list[int], skip: bool) -> None:
    backend = word_pieces()
    tokenizer = LoadedTokenizer(backend, {}, None, clean_up_spaces=False)
    detokenizer = Detokenizers(tokenizer).make(skip_special_tokens=skip)
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
