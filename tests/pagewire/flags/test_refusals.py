"""Command lines that `pagewire serve` refuses before it starts anything, and `--show-config` with the same sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.errors import StartupError
from pagewire.stack import stack
from tests.makers.gguf_bytes import header
from tests.pagewire.flags.parsing import parse, refusal

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": 576,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
AWQ = DENSE | {"quantization_config": {"quant_method": "awq", "bits": 4}}
EXPERTS = DENSE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_attention_heads": 12}
GGUF = {"general.architecture": "llama", "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the models of the table, in the current directory."""
    monkeypatch.chdir(tmp_path)
    for name, config in {"dense": DENSE, "awq": AWQ, "experts": EXPERTS}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "early" / "quant_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "m.gguf").write_bytes(header(GGUF, []))


REFUSED = [
    ("m.gguf --quantization awq", "--quantization awq: the checkpoint is quantized with gguf; leave the flag out"),
    ("m.gguf --quantization fp8", "--quantization fp8: the checkpoint is quantized with gguf; leave the flag out"),
    ("dense -q gptq", "--quantization gptq: the checkpoint is not quantized; leave the flag out"),
    ("awq -q gptq_marlin", "--quantization gptq_marlin: the checkpoint is quantized with awq; leave the flag out"),
    (
        "dense -tp 4",
        "-size 4: 9 heads with 3 of keys and values cannot be split; possible are 1, 3, 9",
    ),
    (
        "m.gguf -tp 2",
        "-size 2: 9 heads with 3 of keys and values cannot be split; possible are 1, 3, 9",
    ),
    ("dense -tp 3 -ep", "--enable-expert-parallel: LlamaForCausalLM has no experts; leave it out"),
    ("dense --max-model-len 4096", "--max-model-len 4096 exceeds the model's 2048 positions; lower it"),
    ("dense --limit-mm-per-prompt video=1", "prompts may have images, but no video; leave it out, or set it to 0"),
    ("dense --limit-mm-per-prompt nine", "expected a number of images; write image=4"),
    ("dense --allowed-local-media-path nix", "--allowed-local-media-path nix is not a directory: name one"),
    ("dense --spec-tokens 4", "--spec-tokens has no effect without a method: add --spec-method ngram"),
    ("dense --spec-method draft_model", "method draft_model needs a draft model"),
    ("dense --chat-template nix", "--chat-template 'nix' is neither a file nor a jinja template: correct the path"),
    (
        "dense --generation-config nix",
        "--generation-config nix: there is no such file, and no directory with generation_config.json",
    ),
    ("dense --tokenizer-revision main", "--tokenizer-revision needs --tokenizer"),
    ("dense --ssl-keyfile key.pem", "--ssl-keyfile needs --ssl-certfile: set both"),
    ("dense --ssl-certfile cert.pem", "cert.pem"),
    ("dense --api-key-file keys.yaml", "--api-key-file keys.yaml: cannot be read"),
    ("dense --cpu-bind 99999", "--cpu-bind 99999: processor 99999 is not usable"),
    ("dense --distributed-executor-backend external", "`pagewire serve` starts its executors itself"),
    ("dense --port 9 --grpc-port 9", "--port and --grpc-port are both 9: give each its own port"),
    ("dense --revision main", "only hub ids have revisions"),
    ("empty", "empty: not a model directory, without config.json and .gguf file: name one"),
    ("nix.gguf", "there is no such file or directory; name an existing one"),
    ("gemma-3-270m", "if you accept them, add --accept-license gemma"),
]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("line", "sentence"), REFUSED, ids=[line for line, _ in REFUSED])
def test_serve_and_show_config_refuse_alike(
    line: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack.logs, "setup", lambda *args: None)  # it would outlive the test
    shown = refusal(capsys, *line.split(), "--show-config")
    with pytest.raises(StartupError) as raised:
        stack.run(parse(*line.split()))
    assert sentence in shown and shown == str(raised.value)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    "line",
    [
        "awq -q awq_marlin",
        "early -q awq",
        "m.gguf -q gguf",
        "awq -q none",
        "dense -tp 3",
        "experts -tp 3 -ep",
        "dense --limit-mm-per-prompt image=2,video=0",
        'dense --limit-mm-per-prompt {"video":0}',
        'dense -tp 4 --hf-overrides {"num_attention_heads":8,"num_key_value_heads":4}',
        'dense --max-model-len 4096 --hf-overrides {"max_position_embeddings":4096}',
        "dense --chat-template {{messages}}",
        "dense --spec-method none --spec-tokens 4",
        "owner/not-downloaded -tp 5",
    ],
)
def test_what_serve_accepts_is_shown(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*line.split(), "--show-config=json")
    assert exit_.value.code == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["tensor_parallel_size"]["value"] > 0


@pytest.mark.usefixtures("models")
def test_what_drafts_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("dense", "--spec-model", "small", "--show-config=json")
    shown = json.loads(capsys.readouterr().out)
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    assert [shown[name]["value"] for name in names] == [None, "draft_model", "small", 5]
