"""Sampling defaults of the model and of the operator, as requests get them."""

import json
import logging
from pathlib import Path

import pytest

from pagewire.config.sampling_checks import resolve
from pagewire.v1 import common_pb2, inference_pb2
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

OF_THE_MODEL = {
    "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 7,
}  # fmt: skip
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")


def save(directory: Path, generation_config: dict[str, float] | None = None) -> Path:
    model = save_byte_level(directory)
    (model / "config.json").write_text("{}")
    if generation_config is not None:
        (model / "generation_config.json").write_text(json.dumps(generation_config))
    return model


def line(directory: Path, model: Path | str, **config: object) -> TokenizerLine:
    return TokenizerLine(directory, FakeScheduler(lambda request: [50, EOS]), Path(model), **config)


async def test_requests_get_the_models_values_where_they_name_none(tmp_path: Path) -> None:
    given = common_pb2.SamplingParams(temperature=0, top_k=0, max_tokens=3, seed=5)
    many = common_pb2.SamplingParams(min_tokens=9)
    async with line(tmp_path, save(tmp_path / "m", OF_THE_MODEL)).running() as running:
        for params in (None, given, many):
            await running.generate(text="a", sampling_params=params)
    sent = [request.sampling_params for request in running.scheduler.requests]
    reported = [tuple(getattr(params, name) for name in NAMES) for params in sent]
    assert reported[0] == (0.5, 20, 0.75, 0.25, 1.5, 7)
    assert reported[1] == (0, 0, 0.75, 0.25, 1.5, 3)
    assert reported[2] == (0.5, 20, 0.75, 0.25, 1.5, 9)  # a default does not contradict what is asked for
    assert all(resolve(params) for params in sent)


async def test_a_request_for_the_most_probable_tokens_gets_them(tmp_path: Path) -> None:
    async with line(tmp_path, save(tmp_path / "SmolLM2-135M-Instruct")).running() as running:
        for params in ({}, {"temperature": 0.9}, {"temperature": 0}, {"temperature": 1e-9, "frequency_penalty": 0.5}):
            await running.generate(text="a", sampling_params=common_pb2.SamplingParams(**params))
    sent = [resolve(request.sampling_params) for request in running.scheduler.requests]
    assert [round(params.frequency_penalty, 3) for params in sent] == [0.3, 0.3, 0, 0.5]


async def test_clients_and_the_log_say_which_apply(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with line(tmp_path, save(tmp_path / "Llama-3.2-1B-Instruct")).running() as running:
        model = (await running.stub.ListModels(inference_pb2.ListModelsRequest())).models[0]
    assert model.default_sampling_params == common_pb2.SamplingParams(temperature=0.6, top_p=0.9)
    assert "the authors of Llama, huggingface.co/meta-llama" in model.default_sampling_source
    [logged] = [record.getMessage() for record in caplog.records if "sampling defaults" in record.getMessage()]
    assert logged.startswith("sampling defaults: temperature 0.6, top_p 0.9, from the authors of Llama")
    assert logged.endswith("; --generation-config vllm switches the model's off")


@pytest.mark.parametrize(
    ("flags", "source", "logged"),
    [
        ({}, "", "sampling defaults: OpenAI's (temperature 1); --override-generation-config sets others"),
        (
            {"generation_config": "vllm"},
            "--generation-config vllm",
            "sampling defaults: OpenAI's (temperature 1); --override-generation-config sets others",
        ),
        (
            {"override_generation_config": '{"top_k": 3}'},
            "--override-generation-config",
            "sampling defaults: top_k 3, from --override-generation-config; --generation-config vllm",
        ),
    ],
)
async def test_a_model_without_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, str], source: str, logged: str
) -> None:
    caplog.set_level(logging.INFO)
    async with line(tmp_path, save(tmp_path / "m"), **flags).running() as running:
        assert running.generator.defaults.source == source
    assert logged in caplog.text


async def test_a_tokenizer_stands_in_for_a_model_that_is_elsewhere(tmp_path: Path) -> None:
    tokenizer = save(tmp_path / "t", {"temperature": 0.25})
    async with line(tmp_path, "Org/Elsewhere", tokenizer=str(tokenizer)).running() as running:
        assert running.generator.defaults.params.temperature == 0.25
