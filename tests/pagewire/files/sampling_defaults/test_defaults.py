"""The defaults of requests: which source counts, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from pagewire.config import TokenizerConfig
from pagewire.errors import StartupError
from pagewire.files.sampling_defaults.defaults import SamplingDefaults, sampling_defaults
from pagewire.files.wheel_models import WHEEL_MODELS

OF_THE_MODEL = {
    "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "max_new_tokens": 7,
    "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5.0",
}  # fmt: skip
LLAMA = {"temperature": 0.6, "top_p": 0.9}
SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
BUILT_IN = SMOLLM2 | {"frequency_penalty": 0.3}
THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}


def save(directory: Path, content: Any = OF_THE_MODEL, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / "generation_config.json").write_text(text)
    return directory


def save_gguf(path: Path, name: str = "", **sampling: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    if name:
        writer.add_name(name)
    for key, value in sampling.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def defaults(model: Path | str, path: Path | None = None, **config: Any) -> SamplingDefaults:
    return sampling_defaults(TokenizerConfig(model=str(model), **config), Path(model) if path is None else path)


def read(model: Path | str, path: Path | None = None, **config: Any) -> dict[str, Any]:
    return {name: pytest.approx(value) for name, value in defaults(model, path, **config).values.items()}


def test_where_the_values_come_from(tmp_path: Path) -> None:
    model, other = save(tmp_path / "model"), save(tmp_path / "other", {"temperature": 0.25, "top_p": None})
    assert read(model)["temperature"] == 0.5 and defaults(model).source == "generation_config.json"
    assert read(model, generation_config="vllm") == {}
    assert read(model, generation_config=str(other)) == {"temperature": 0.25}
    assert read(model, generation_config=str(other / "generation_config.json")) == {"temperature": 0.25}
    override = '{"temperature": 2, "max_new_tokens": 4}'
    both = defaults(model, override_generation_config=override)
    assert (both.values["temperature"], both.values["max_tokens"], both.values["top_k"]) == (2, 4, 20)
    assert both.source == "--override-generation-config and generation_config.json"
    assert read(model, generation_config="vllm", override_generation_config=override) == {
        "temperature": 2,
        "max_tokens": 4,
    }
    (model / "generation_config.json").unlink()
    assert defaults(model) == SamplingDefaults()
    assert defaults("/models/model.gguf", Path("/models")) == SamplingDefaults()


def test_a_gguf_file_has_the_values_that_its_converter_wrote(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "temp": 0.75,
        "top_k": 20,
        "top_p": 0.5,
        "min_p": 0.25,
        "penalty_repeat": 1.5,
        "mirostat": 0,
    }
    found = defaults(save_gguf(tmp_path / "Llama-3.2-1B.gguf", **keys))
    assert found.values == {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5}
    assert found.source == "general.sampling.* of the GGUF file" and found.ignored == ("general.sampling.mirostat",)
    assert read(tmp_path) == read(tmp_path / "Llama-3.2-1B.gguf"), "a directory with the file alone"
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.25}')
    assert read(tmp_path) == {"temperature": 1.25}
    broken = save_gguf(tmp_path / "b" / "broken.gguf", temp=-1.0)
    with pytest.raises(StartupError, match=r"broken\.gguf: general\.sampling\.temp is -1; .* >= 0 and finite; .*vllm"):
        defaults(broken)
    broken.write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"broken\.gguf: "):
        defaults(broken)


def test_advice_is_for_files_that_name_no_sampling(tmp_path: Path) -> None:
    model = save(tmp_path / "Llama-3.2-1B-Instruct", {"max_new_tokens": 5, "eos_token_id": 2})
    assert read(model) == LLAMA | {"max_tokens": 5}
    assert "meta-llama" in defaults(model).source
    assert read(save(model, {"top_k": 3})) == {"top_k": 3}, "not half of each"
    assert read(model, generation_config="vllm") == {}


def test_a_model_is_recognized_by_each_of_its_names(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "12fd25f"
    assert read(save(snapshot, None)) == BUILT_IN
    assert read("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path) == BUILT_IN
    assert read(save(tmp_path / "mine", None, _name_or_path="HuggingFaceTB/SmolLM2-360M-Instruct")) == SMOLLM2
    assert read(save_gguf(tmp_path / "x.gguf", "Llama 3.2 1B Instruct")) == LLAMA
    blob = tmp_path / "blob"
    save_gguf(blob)
    (tmp_path / "smollm2-1.7b-instruct-q4_k_m.gguf").symlink_to(blob)
    assert read(tmp_path / "smollm2-1.7b-instruct-q4_k_m.gguf") == SMOLLM2


def test_what_is_not_the_authors_is_named_and_gives_way() -> None:
    ours = defaults("smollm2-135m-instruct", Path("/nowhere"))
    assert ours.values == BUILT_IN and ours.unless_greedy == {"frequency_penalty"}
    assert ours.source.endswith("(frequency_penalty: Pagewire's)")
    chosen = defaults("smollm2-135m-instruct", Path("/nowhere"), override_generation_config='{"frequency_penalty": 0}')
    assert chosen.values == SMOLLM2 | {"frequency_penalty": 0} and not chosen.unless_greedy


@pytest.mark.parametrize("name", [name for name in WHEEL_MODELS if name != "all-minilm-l6-v2"])
def test_models_from_wheels_have_advice(name: str) -> None:
    assert defaults(name, Path("/nowhere")).values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("unsloth/SmolLM3-3B-GGUF", {"temperature": 0.6, "top_p": 0.95}),
        ("Qwen/Qwen3-0.6B", THINKING),
        ("Qwen3-30B-A3B-Thinking-2507-Q4_K_M.gguf", THINKING),
        ("Qwen/Qwen3-4B-Instruct-2507", {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}),
        (
            "Qwen2.5-Coder-7B-Instruct-AWQ",
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", {"temperature": 0.6, "top_p": 0.95}),
        ("DeepSeek-R1-Distill-Llama-8B-Q4_K_M.gguf", {"temperature": 0.6, "top_p": 0.95}),
        ("meta-llama/Meta-Llama-3-8B-Instruct", LLAMA),
        ("llama3.2", LLAMA),
        ("google/gemma-3-1b-it", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", {"temperature": 0.15}),
        ("mistralai/Mistral-Nemo-Instruct-2407", {"temperature": 0.3}),
        ("microsoft/Phi-3.5-mini-instruct", {"temperature": 0.0}),
        ("microsoft/phi-4", {"temperature": 0.0}),
        ("microsoft/Phi-4-reasoning-plus", {"temperature": 0.8, "top_p": 0.95, "top_k": 50}),
        ("openai/gpt-oss-20b", {"temperature": 1.0, "top_p": 1.0}),
        ("zai-org/GLM-4.5-Air", {"temperature": 0.6, "top_p": 0.95}),
        ("zai-org/GLM-4.6", {"temperature": 1.0, "top_p": 0.95}),
        # Base models, other models with such a word in their names, and models without advice.
        ("HuggingFaceTB/SmolLM2-135M", {}),
        ("Qwen/Qwen3-0.6B-Base", {}),
        ("Qwen/Qwen3-Embedding-0.6B", {}),
        ("Qwen/Qwen2.5-0.5B", {}),
        ("google/embeddinggemma-300m", {}),
        ("mistralai/Mistral-7B-Instruct-v0.3", {}),
        ("meta-llama/Llama-Guard-3-8B", {}),
        ("gpt2", {}),
    ],
)
def test_what_authors_advise(name: str, values: dict[str, float]) -> None:
    assert defaults(name, Path("/nowhere")).values == values


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
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, config: dict[str, Any], message: str) -> None:
    model = save(tmp_path, content)
    with pytest.raises(StartupError, match=message):
        defaults(model, **config)
