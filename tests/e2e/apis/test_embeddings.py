"""Embeddings and scores through all services, of a tiny model, in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
import torch
from torch.nn import functional

from pagewire.config import ExecutorConfig
from pagewire.services.executor.start.startup import start_runner
from pagewire.v1.inference_pb2 import EmbedRequest, InputOptions, InputText, ScoreRequest
from tests.e2e.line import NO_CERTIFICATES, http_client
from tests.e2e.stack.test_scheduler_and_executor import scheduler
from tests.gateway.conftest import running_gateway, wait_ready
from tests.services.executor.models.test_encoders import inputs, save
from tests.services.executor.service.test_servicer import serving
from tests.services.tokenizer.service_line import FakeScheduler, TokenizerLine
from tests.services.tokenizer.vectors.test_vectors import word_pieces

TEXTS = ["a b c", "", "g", " ".join("abcdefg" * 8), "f? 你 é", "e e e e"] * 5


@asynccontextmanager
async def line(model: Path, sockets: Path) -> AsyncIterator[TokenizerLine]:
    word_pieces().save(str(model / "tokenizer.json"))
    config = ExecutorConfig(model=str(model), device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=70)
    executor = f"unix:{sockets}/executor.sock"
    async with (
        serving(executor, lambda: start_runner(config, str(model), lambda fraction, text: None)),
        scheduler(sockets, "scheduler", executor),
        TokenizerLine(sockets, FakeScheduler(lambda request: []), model).running(with_scheduler=False) as running,
    ):
        while running.link.model_info is None:  # noqa: ASYNC110 (what is awaited happens behind a socket)
            await asyncio.sleep(0.01)
        yield running


async def test_many_texts_in_many_steps(tmp_path: Path, sockets: Path) -> None:
    """Long and short, more than there are rows; each is computed whole, the longest as long as the model takes."""
    reference = save(tmp_path, "Bert", "Model").requires_grad_(False)
    async with line(tmp_path, sockets) as running:
        options = InputOptions(truncate_prompt_tokens=-1)
        request = EmbedRequest(inputs=[InputText(text=text) for text in TEXTS], options=options)
        answer = await running.stub.Embed(request)
    assert max(answer.num_tokens) == 58
    for text, vector in zip(TEXTS, answer.embeddings, strict=True):
        states = reference(**inputs(word_pieces().encode(text).ids, 0)).last_hidden_state[0]
        expected = functional.normalize(states.mean(0), dim=-1)
        torch.testing.assert_close(torch.tensor(list(vector.values)), expected, atol=1e-4, rtol=1e-4)


async def test_pairs_have_token_types(tmp_path: Path, sockets: Path) -> None:
    reference = save(tmp_path, "Bert", "ForSequenceClassification", num_labels=1).requires_grad_(False)
    pairs = [("a b", "c"), ("", "d e f"), ("g", "")]
    async with line(tmp_path, sockets) as running:
        given = [InputText(text=first, text_pair=second) for first, second in pairs]
        answer = await running.stub.Score(ScoreRequest(pairs=given))
    for pair, score in zip(pairs, answer.scores, strict=True):
        encoding = word_pieces().encode(*pair)
        logits = reference(**inputs(encoding.ids, encoding.type_ids.index(1))).logits
        assert score == pytest.approx(float(logits.sigmoid()), abs=1e-5)


async def test_rest_of_a_model_that_embeds(tmp_path: Path, sockets: Path) -> None:
    reference = save(tmp_path, "Bert", "Model").requires_grad_(False)
    texts = ["a b c", "d", "a b c"]
    ids = [word_pieces().encode(text).ids for text in texts]
    states = [reference(**inputs(one, 0)).last_hidden_state[0].mean(0) for one in ids]
    expected = functional.normalize(torch.stack(states), dim=-1)
    async with line(tmp_path, sockets) as running, running_gateway(running.config.listen) as http:
        await wait_ready(http)
        base_url = f"{http.base_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0, http_client=http_client()) as ai:
            answers = [await ai.embeddings.create(model="", input=texts, encoding_format="float")]
        with openai.OpenAI(
            base_url=base_url, api_key="any", max_retries=0, http_client=httpx.Client(verify=NO_CERTIFICATES)
        ) as sync:
            for given in (texts, ids):  # it asks for base64
                answers.append(await asyncio.to_thread(sync.embeddings.create, model="", input=given))
        ranked = (await http.post("/v2/rerank", json={"query": "a b c", "documents": ["d", "a b c"]})).json()
        refused = await http.post("/v1/classify", json={"input": "a"})
        chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    for answer in answers:
        vectors = torch.tensor([one.embedding for one in answer.data])
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert [one["index"] for one in ranked["results"]] == [1, 0]
    scores = [one["relevance_score"] for one in ranked["results"]]
    assert scores == pytest.approx([1, float(expected[0] @ expected[1])], abs=1e-4)
    for response in (refused, chat):
        assert response.status_code == 400
        assert "/v1/embeddings, /pooling, /score, /rerank" in response.json()["error"]["message"]


async def test_rest_of_a_cross_encoder(tmp_path: Path, sockets: Path) -> None:
    reference = save(tmp_path, "Bert", "ForSequenceClassification", num_labels=1).requires_grad_(False)
    documents = ["c", "d e f", "g"]
    encodings = [word_pieces().encode("a b", document) for document in documents]
    expected = [float(reference(**inputs(one.ids, one.type_ids.index(1))).logits.sigmoid()) for one in encodings]
    async with line(tmp_path, sockets) as running, running_gateway(running.config.listen) as http:
        await wait_ready(http)
        scored = (await http.post("/score", json={"text_1": "a b", "text_2": documents})).json()
        ranked = (await http.post("/rerank", json={"query": "a b", "documents": documents, "top_n": 2})).json()
        classes = (await http.post("/classify", json={"input": "a b"})).json()
        pooled = (await http.post("/pooling", json={"input": "a b"})).json()
        refused = await http.post("/v1/embeddings", json={"input": "a"})
    assert [one["score"] for one in scored["data"]] == pytest.approx(expected, abs=1e-5)
    best = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [(one["index"], one["document"]["text"]) for one in ranked["results"]] == [(i, documents[i]) for i in best]
    assert scored["usage"]["prompt_tokens"] == sum(len(one.ids) for one in encodings)
    assert classes["data"][0]["num_classes"] == 1 and classes["data"][0]["probs"] == pooled["data"][0]["data"]
    assert "/classify, /pooling, /score, /rerank" in refused.json()["error"]["message"]
