"""Embeddings and scores through tokenizer, scheduler and executor, of a tiny model, in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pagewire.config import ExecutorConfig
from pagewire.services.executor.startup import start_runner
from pagewire.v1.inference_pb2 import EmbedRequest, InputOptions, InputText, ScoreRequest
from tests.e2e.test_scheduler_and_executor import scheduler
from tests.services.executor.models.test_encoders import inputs, save
from tests.services.executor.test_servicer import serving
from tests.services.tokenizer.service_line import FakeScheduler, TokenizerLine
from tests.services.tokenizer.test_vectors import word_pieces

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
