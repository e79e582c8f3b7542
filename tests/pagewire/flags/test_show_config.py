import json
from pathlib import Path
from typing import Any

import pytest

from pagewire import config, flags
from pagewire.config import ExecutorConfig, SchedulerConfig, ServeConfig, TokenizerConfig
from pagewire.config.profiles import PROFILES
from pagewire.config.speculation import Speculation
from pagewire.flags import names
from pagewire.flags.costs import _PHRASES
from pagewire.flags.model_facts import facts_of
from pagewire.tools.doctor.command import DoctorConfig
from pagewire.tools.tune.config import TuneConfig
from tests.makers.gguf_bytes import header
from tests.pagewire.flags.parsing import parse, refusal


def show(capsys: pytest.CaptureFixture[str], *argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv, environ=environ)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def checkpoint(directory: Path, **keys: Any) -> Path:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (directory / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096, **keys}))
    return directory


def test_every_value_has_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("block-size: 32\nmax-num-seqs: 1\ntask: generate\n")
    model = checkpoint(tmp_path, torch_dtype="float16")
    argv = [
        str(model),
        f"--config={file}",
        "--port=1",
        "--max_queue_time",
        "9",
        "--profile=latency",
        "--api-key=hunter2",
    ]
    environ = {"PAGEWIRE_MAX_NUM_SEQS": "2"}
    shown = json.loads(show(capsys, "--show-config", "json", *argv, environ=environ))
    sources = {name: (row["value"], row["source"]) for name, row in shown.items()}
    assert sources["port"] == (1, "flag") and sources["max_queue_time"] == (9.0, "flag")
    assert sources["max_num_seqs"] == (2, "environment") and sources["block_size"] == (32, "file")
    assert sources["runner"] == ("generate", "file") and shown["runner"]["origin"] == f"{file}: task"
    assert sources["spec_method"] == ("auto", "default")
    assert sources["max_model_len"] == (4096, "model") and sources["dtype"] == ("float16", "model")
    assert sources["grpc_port"] == (8001, "default") and sources["max_waiting_requests"] == (4096, "default")
    assert sources["api_key"] == ("(secret)", "flag")
    parsed = parse(*argv, environ=environ)
    offered = {field.name for field in names.fields_of(ServeConfig)} - set(config.SET_BY_STACK)
    older = {name for name in offered if name.startswith(("speculative_", "ngram_", "num_speculative"))}
    assert offered - older - {"speculative_config"} <= shown.keys() <= offered
    assert all(getattr(parsed, name) == value for name, (value, source) in sources.items() if name != "api_key" and
               source in ("flag", "environment", "file", "profile"))  # fmt: skip


def test_the_table_is_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = checkpoint(tmp_path)
    table = show(
        capsys, str(model), "--show-config", "--device=cpu", "--kv-cache-memory-bytes", "1GiB", "--task=generate"
    )
    lines = {line.split()[0]: " ".join(line.split()) for line in table.splitlines() if line.startswith("  --")}
    assert lines["--model"] == f"--model {str(model)[:32]} ... flag" or str(model) in lines["--model"]
    # 2 layers x 2 heads x 16 elements x keys and values x 2 bytes
    assert lines["--max-model-len"] == "--max-model-len 4096 model 1 MiB of KV cache for one request of this length"
    assert lines["--kv-cache-memory-bytes"].startswith(
        "--kv-cache-memory-bytes 1 GiB flag 256 B a token: 4,194,304 tokens"
    )
    assert lines["--max-num-seqs"].startswith("--max-num-seqs 128 default more: more tokens per second in all")
    assert lines["--runner"] == "--runner generate flag --task"
    assert lines["--enable-prefix-caching"].startswith("--enable-prefix-caching on default saves the common beginnings")
    assert "hunter2" not in show(capsys, "--api-key", "hunter2", "--show-config")


@pytest.mark.parametrize("config_class", [DoctorConfig, TuneConfig])
def test_commands_that_take_its_flags_show_theirs_first(
    capsys: pytest.CaptureFixture[str], config_class: type[ServeConfig]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--show-config=json", "--max-num-seqs=3", config_class=config_class)
    assert exit_.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    own = {field.name for field in names.fields_of(config_class)} - {
        field.name for field in names.fields_of(ServeConfig)
    }
    assert set(list(shown)[: len(own)]) == own and shown["max_num_seqs"]["value"] == 3


def test_files_may_have_objects(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("speculative-config: {method: ngram}\ncompilation_config: {level: 3}\nserved-model-name: [a, b]\n")
    parsed = parse(f"--config={file}", "--speculative-config.num_speculative_tokens=3")
    assert Speculation.of(parsed) == Speculation("ngram", num_speculative_tokens=3)
    assert parsed.served_model_name == "a,b"
    assert f"{file}: compilation_config: ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--speculative-config", '{"method": "guess"}'], "unknown method 'guess'; choose one of"),
        (["--spec-method", "draft_model"], "needs a draft model"),
        (["--cpu-bind", "foo"], "--cpu-bind foo: expected auto, or numbers of processors"),
        (["--numa-bind", "999"], "--numa-bind 999: node 999 has no usable processor"),
        (["--port", "7", "--grpc-port", "7"], "--port and --grpc-port are both 7"),
        (["--distributed-executor-backend", "external"], "`pagewire serve` starts its executors itself"),
    ],
)
def test_what_serve_refuses_is_not_shown(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert said in refusal(capsys, "--show-config", *argv)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "cache", "drafts"),
    [
        ({}, "half the memory", "right drafts save steps"),
        ({"kv_lora_rank": 8}, "same as auto: this model stores no keys and values", "right drafts save steps"),
        ({"num_attention_heads": None, "state_size": 16}, "as auto", "no drafts: layers with a state"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "half the memory", "no drafts"),
    ],
)
def test_a_profile_leaves_out_what_the_model_cannot_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: dict[str, Any], cache: str, drafts: str
) -> None:
    model = str(checkpoint(tmp_path, **keys))
    shown = json.loads(show(capsys, model, "--profile=cost", "--show-config=json"))
    assert cache in shown["kv_cache_dtype"]["effect"] and drafts in shown["spec_method"]["effect"]
    assert shown["kv_cache_dtype"]["source"] == "profile"
    shown = json.loads(show(capsys, model, "--profile=cost", "-pp=2", "--show-config=json"))
    assert "no drafts" in shown["spec_method"]["effect"]


def test_nothing_is_shown_unless_asked_and_formats_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--no-show-config") == ServeConfig()
    with pytest.raises(SystemExit):
        parse("--show-config=xml")
    assert "--show-config: expected one of text, json, got 'xml'" in capsys.readouterr().err


def test_what_files_of_models_say(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    keys = {"context_length": 2048, "block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in keys.items()}}
    gguf.write_bytes(header(metadata, []))
    facts = facts_of(str(gguf))
    assert facts is not None
    assert (facts.max_len, facts.quantization, facts.kv_elements) == (2048, "gguf", 2 * 2 * 64)
    for differing in ({"attention.sliding_window": 512}, {"attention.head_count_kv": [4, 2]}):
        gguf.write_bytes(header(metadata | {f"llama.{key}": value for key, value in differing.items()}, []))
        facts = facts_of(str(gguf))
        assert facts is not None and facts.kv_elements == 0, "layers differ"
    quantized = facts_of(str(checkpoint(tmp_path, quantization_config={"quant_method": "awq"}, sliding_window=8)))
    assert quantized is not None
    assert (quantized.quantization, quantized.kv_elements) == ("awq", 0)
    gguf.write_bytes(b"GGUF")
    assert facts_of(str(gguf)) is None
    assert facts_of("nobody/has-this") is None and facts_of("no such thing at all") is None


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_profiles_are_valid_and_yield_to_every_other_source(name: str, device: str) -> None:
    chosen = parse(f"--profile={name}", f"--device={device}")
    values = PROFILES[name].values(device)
    assert chosen != parse(f"--device={device}") and values.keys() <= {f.name for f in names.fields_of(ServeConfig)}
    assert parse(f"--device={device}", environ={"PAGEWIRE_PROFILE": name}) == chosen
    Speculation.of(chosen)
    assert (
        parse(f"--profile={name}", f"--device={device}", "--max-num-seqs=7", "--spec-method=suffix").max_num_seqs == 7
    )
    # A child that receives the result does not apply the profile again.
    again = parse(
        *(word for word in flags.to_argv(chosen)), environ=flags.without_configuration({"PAGEWIRE_PROFILE": name})
    )
    assert again == chosen


def test_services_take_of_a_profile_what_is_theirs() -> None:
    assert parse("--profile=latency", config_class=SchedulerConfig).max_queue_time == 5
    assert parse("--profile=latency", config_class=ExecutorConfig, environ={}).max_num_batched_tokens == 512
    assert parse("--profile=latency", config_class=TokenizerConfig) == TokenizerConfig()
    # The scheduler may be without the device of its executors: limits of devices are theirs.
    assert parse("--profile=throughput", config_class=SchedulerConfig).max_num_seqs is None
    assert parse("--profile=throughput", "--device=cuda", config_class=ExecutorConfig).max_num_seqs == 512


def test_help_of_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help", "memory"], ["--help=memory"]):
        with pytest.raises(SystemExit) as exit_:
            parse(*argv)
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert "--kv-cache-dtype" in text and "--max-queue-time" not in text


def test_help_is_short_unless_more_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def described(*topic: str) -> str:
        with pytest.raises(SystemExit):
            parse("--help", *topic)
        return capsys.readouterr().out

    short, whole = described(), described("all")
    assert len(short) < 0.7 * len(whole)
    assert "gptq_marlin" in whole and "gptq_marlin" not in short
    one = described("--max-num-seqs")
    assert "maximum number of requests that run at once" in one and "fewer for each" in one and "--port" not in one
    assert described("preemption-mode").startswith("--preemption-mode (vLLM's): ignored: the blocks of a preempted")
    assert described("task") == "--task (vLLM's): becomes --runner\n"


def test_phrases_are_of_settings_that_there_are() -> None:
    assert _PHRASES.keys() <= {field.name for field in names.fields_of(ServeConfig)}
