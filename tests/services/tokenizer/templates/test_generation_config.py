"""Sampling defaults of the model and of the operator."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import TokenizerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.errors import StartupError
from pagewire.services.tokenizer.templates.generation_config import read_generation_defaults
from pagewire.v1 import common_pb2
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

OF_THE_MODEL = {
    "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 7,
    "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5.0",
}  # fmt: skip
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")


def save(directory: Path, content: Any = OF_THE_MODEL) -> Path:
    model = save_byte_level(directory)
    (model / "config.json").write_text("{}")
    (model / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return model


def read(model: Path, **config: Any) -> dict[str, float]:
    params = read_generation_defaults(TokenizerConfig(model=str(model), **config), model)
    return {field.name: value for field, value in params.ListFields()}


async def test_requests_get_the_models_values_where_they_name_none(tmp_path: Path) -> None:
    given = common_pb2.SamplingParams(temperature=0, top_k=0, max_tokens=3, seed=5)
    many = common_pb2.SamplingParams(min_tokens=9)
    beyond = common_pb2.SamplingParams(max_tokens=100)
    async with TokenizerLine(
        tmp_path, FakeScheduler(lambda request: [50, EOS]), save(tmp_path / "m")
    ).running() as line:
        for params in (None, given, many, beyond):
            await line.generate(text="a", sampling_params=params)
    sent = [request.sampling_params for request in line.scheduler.requests]
    reported = [tuple(getattr(params, name) for name in NAMES) for params in sent]
    assert reported[0] == (0.5, 20, 0.75, 0.25, 1.5, 7)
    assert reported[1] == (0, 0, 0.75, 0.25, 1.5, 3)
    assert reported[2] == (0.5, 20, 0.75, 0.25, 1.5, 9)  # a default does not contradict what is asked for
    assert reported[3][-1] == 7, "it limits all requests, as in vLLM"
    # Only what the client itself asks for has to fit into the context.
    assert [request.clamp_max_tokens for request in line.scheduler.requests] == [True, False, True, True]
    assert all(resolve(params) for params in sent)


def test_where_the_values_come_from(tmp_path: Path) -> None:
    model, other = save(tmp_path / "model"), save(tmp_path / "other", {"temperature": 0.25, "top_p": None})
    assert read(model)["temperature"] == 0.5
    assert read(model, generation_config="vllm") == {}
    assert read(model, generation_config=str(other)) == {"temperature": 0.25}
    assert read(model, generation_config=str(other / "generation_config.json")) == {"temperature": 0.25}
    override = '{"temperature": 2, "max_new_tokens": 4}'
    both = read(model, override_generation_config=override)
    assert (both["temperature"], both["max_tokens"], both["top_k"]) == (2, 4, 20)
    assert read(model, generation_config="vllm", override_generation_config=override) == {
        "temperature": 2,
        "max_tokens": 4,
    }
    (model / "generation_config.json").unlink()
    assert read(model) == {}
    assert read(Path("/models/model.gguf")) == {}


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        ("{", {}, "generation_config.json: cannot be read as JSON"),
        ("[]", {}, "generation_config.json: expected a JSON object"),
        ({"temperature": -1}, {}, "temperature is -1; it must be >= 0 and finite; .*--generation-config vllm"),
        ({"temperature": "hot"}, {}, "temperature is 'hot'"),
        ({"top_k": 1.5}, {}, "top_k is 1.5"),
        ('{"top_k": Infinity}', {}, "generation_config.json: "),
        ({"max_new_tokens": 0}, {}, "max_new_tokens is 0"),
        ({}, {"generation_config": "/nowhere"}, "--generation-config /nowhere: there is no such file"),
        ({}, {"override_generation_config": "x"}, "--override-generation-config is not valid JSON"),
        ({}, {"override_generation_config": "[]"}, "--override-generation-config must be a JSON object"),
        ({}, {"override_generation_config": '{"temprature": 1}'}, "unknown keys: temprature; known are"),
        ({}, {"override_generation_config": '{"top_p": 0}'}, "--override-generation-config: top_p is 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, config: dict[str, str], message: str) -> None:
    model = save(tmp_path, content)
    with pytest.raises(StartupError, match=message):
        read(model, **config)
