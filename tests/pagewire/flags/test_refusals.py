"""Command lines that `pagewire serve` refuses before it starts anything, and `--show-config` with the same sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import profiles
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
LATENT = DENSE | {"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 32}
MAMBA = {"architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 2, "state_size": 16, "dtype": "bfloat16"}
GGUF = {"general.architecture": "llama", "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the models of the table, in the current directory."""
    monkeypatch.chdir(tmp_path)
    # With a driver, as on a machine with a GPU.
    monkeypatch.setattr(profiles, "_DRIVERS", (tmp_path,))
    made = {"dense": DENSE, "awq": AWQ, "experts": EXPERTS, "latent": LATENT, "mamba": MAMBA}
    for name, config in made.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "early" / "quant_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "m.gguf").write_bytes(header(GGUF, []))


REFUSED = [
    (
        "dense --enable-lora --lora-modules ../x=/ad/x",
        "--lora-modules: the name '../x' cannot be used: use up to 255 letters, digits and ._:+@/-, with a letter or "
        "digit first and no parts . or ..",
    ),
    ("dense --enable-lora --lora-modules a/../x=/ad/x", "--lora-modules: the name 'a/../x' cannot be used: use up to"),
    (f"dense --enable-lora --lora-modules {'x' * 1000}=/ad/x", f"the name '{'x' * 99} cannot be used: use up to 255"),
    ("dense --enable-lora --lora-modules dense=/ad/x", "--lora-modules: dense is the name of the model; give the"),
    (
        "dense --enable-lora --served-model-name a,b --lora-modules b=/ad/x",
        "--lora-modules: b is the name of the model; give the adapter another one, or the model with",
    ),
    ("dense --enable-lora --lora-dir nothing", "--lora-dir nothing: there is no such directory; make it, or leave"),
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
    # Of the gateway.
    ("dense --allowed-origins page.example", "--allowed-origins: 'page.example' is not an origin: give scheme, host"),
    ("dense --allowed-origins https://a.example/", "https://example.org, without a path"),
    ('dense --allowed-methods ["GET-POST;"]', "--allowed-methods: 'GET-POST;' cannot be a name; give names as in HTTP"),
    ("dense --allowed-headers X(Y)", "--allowed-headers: 'X(Y)' cannot be a name; give names as in HTTP, or *"),
    ("dense --fingerprint-value fp_mine", "--fingerprint-mode custom and --fingerprint-value belong together: give"),
    ("dense --fingerprint-mode custom", "--fingerprint-mode custom and --fingerprint-value belong together: give"),
    ("dense --generation-store tape", "--generation-store: give disk, memory or a URL as redis://HOST:PORT"),
    ("dense --generation-store redis://host:port", "--generation-store is not a Redis URL: Port could not be cast"),
    ("dense --tenant-header Host", "--tenant-header 'Host' cannot name tenants: use letters, digits, - and _"),
    ("dense --data-dir m.gguf", "--data-dir m.gguf cannot be written (Not a directory): name one that can be written"),
    ("dense --uds-dir m.gguf", "m.gguf cannot be written (Not a directory): name one that can be written"),
    ("dense --uds-dir open", "other users may write to it and replace the sockets (mode 777); run `chmod 700"),
    ("dense --host 192.0.2.1", "--port: cannot listen on 192.0.2.1:8000 (Cannot assign requested address): choose"),
    ("dense --admin-host 192.0.2.1 --admin-port 9", "--admin-port: cannot listen on 192.0.2.1:9 (Cannot assign"),
    # Of the tokenizer.
    ('dense --structured-outputs-config {"a":1}', "--structured-outputs-config has unknown keys: a; known are disable"),
    ('dense --structured-outputs-config {"reasoning_parser":"x"}', "name the parser with --reasoning-parser"),
    ("dense --served-model-name ,", "--served-model-name is empty; name the model, or leave the flag out"),
    ("dense --chat-template {{x", "--chat-template is not valid jinja, line 1"),
    ("dense --tokenizer nix/", "no model 'nix/': there is no such file or directory; name an existing one"),
    # Of the scheduler.
    ('dense --kv-events-config {"a":1}', "--kv-events-config has unknown keys: a; known are enable_kv_cache_events"),
    ('dense --kv-events-config {"hwm":0}', "--kv-events-config: hwm is 0; it must be an integer from 1 to 2147483647"),
    ('dense --kv-events-config {"publisher":"x"}', "--kv-events-config: publisher 'x' is none of zmq, null"),
    ('dense --kv-events-config {"endpoint":"tcp://*:70000"}', "with a port from 1 to 65535"),
    ('dense --kv-events-config {"endpoint":"5557"}', "endpoint is '5557'; it must be tcp://HOST:PORT, tcp://*:PORT or"),
    # Of the executor.
    ("experts -ep", "--enable-expert-parallel divides experts among devices, and --tensor-parallel-size is 1: say how"),
    ("dense --block-size 16 --state-block-size 8", "--state-block-size 8 is not a multiple of --block-size 16; use"),
    ("dense --kv-offloading-dir-size 1", "--kv-offloading-dir-size 1: no directory is bounded by it; add --kv-offload"),
    ("dense --device cuda --block-size 8", "--block-size 8: the CUDA kernels take 16, 32, 64, 128; use one of them"),
    ("dense --device cpu --cudagraph-capture-sizes 129", "--cudagraph-capture-sizes 129: a step has at most 128 req"),
    (
        "dense --cudagraph-capture-sizes 2 --max-cudagraph-capture-size 4",
        "--max-cudagraph-capture-size 4 contradicts --cudagraph-capture-sizes with a largest size of 2; give one",
    ),
    ("dense --kv-cache-dtype float16", "--kv-cache-dtype float16: keys and values are stored as the model computes"),
    ("m.gguf --kv-cache-dtype float16", "the model computes (bfloat16) or in 8 bits; use --kv-cache-dtype auto, int8"),
    ("latent --kv-cache-dtype fp8", "--kv-cache-dtype fp8: the model stores a latent or a state in place of keys"),
    ("latent --kv-cache-dtype int8", "--kv-cache-dtype int8: the model stores a latent or a state in place of keys"),
    ("dense --batch-invariant --device cuda", "--batch-invariant: only the C++ kernels of CPUs compute a token alike"),
    ("dense --batch-invariant --dtype float16 --device cpu", "products of float16 depend on the batch; use --dtype"),
    ("dense --fault-injection 7:explode", "--fault-injection: '7:explode' is not ID:KIND or ID:KIND@OUTPUT"),
    ("dense --runner generate --convert embed", "--convert embed: not with --runner generate; add --runner pooling"),
    ("dense --runner pooling --convert classify", "--convert classify: LlamaForCausalLM has no classification head"),
    (
        "dense --prefill-executors 1",
        "--prefill-executors 1: of --data-parallel-size 1 executors, none is left to decode",
    ),
    ("dense -dp 2 --prefill-executors 2", "--prefill-executors 2: of --data-parallel-size 2 executors, none is left"),
    (
        "dense -dp 2 --prefill-executors 1 --no-enable-prefix-caching --device cpu",
        "--prefill-executors 1: keys and values are found by the prefix cache; leave out --no-enable-prefix-caching",
    ),
    (
        'dense --kv-transfer-config {"kv_role":"kv_producer"}',
        "--kv-transfer-config: `pagewire serve` starts executors of all roles: say how many compute prompts with",
    ),
    (
        'dense --kv-transfer-config {"kv_connector":"NixlConnector"}',
        "--kv-transfer-config: kv_connector 'NixlConnector' is not there: the scheduler connects executors by their",
    ),
    (
        'dense --kv-transfer-config {"kv_connector":"OffloadingConnector"}',
        "'OffloadingConnector' is not there: --kv-offloading-size keeps blocks in host memory, --kv-offloading-dir on",
    ),
    ('dense --kv-transfer-config {"kv_role":"x"}', "kv_role 'x' is none of kv_producer, kv_consumer, kv_both; use"),
    ('dense --kv-transfer-config {"a":1}', "--kv-transfer-config has unknown keys: a; known are kv_connector, kv_role"),
    (
        'dense --kv-transfer-config {"kv_load_failure_policy":"fail"}',
        "kv_load_failure_policy 'fail': what cannot be loaded is computed again; leave it out, or set recompute",
    ),
    ('dense --kv-transfer-config {"kv_connector_module_path":"m"}', "code from outside is not loaded; leave it out"),
    ('dense --kv-transfer-config {"kv_connector_extra_config":{"a":1}}', "PagewireConnector has no options; leave it"),
    ("dense -pp 3", "--pipeline-parallel-size 3: the model has 2 layers, and a stage needs one; lower it"),
    ("dense --model-impl transformers -tp 3", "--tensor-parallel-size 3: the model runs in transformers' code, which"),
    ("dense --model-impl transformers -pp 2", "--pipeline-parallel-size 2: the model runs in transformers' code"),
    ("awq --model-impl transformers -q awq", "--quantization awq: LlamaForCausalLM runs in transformers' code, with"),
    ('m.gguf --hf-overrides {"a":1}', "m.gguf: --hf-overrides: a .gguf file has no config.json; leave the flag out"),
    ("m.gguf --load-format safetensors", "m.gguf: --load-format safetensors needs a directory with config.json"),
    ("dense --spec-model self:q5", "model 'self:q5': a copy of the model itself is one of self:q4, self:q3, self:q2"),
    ("dense --spec-model nix.gguf", "no model 'nix.gguf': there is no such file or directory; name an existing one"),
    ("dense --spec-method mtp -pp 2", "method mtp is not supported with --pipeline-parallel-size: what drafts needs"),
    ("dense --spec-method ngram -pp 2 --device cuda", "--speculative-config with --pipeline-parallel-size on GPUs"),
    ("dense --spec-method suffix --device cuda", "method suffix looks outputs up on the host, which would wait for a"),
    ("dense --spec-method ngram --runner pooling", "the model returns vectors, for which no token is drafted; leave"),
    ("mamba --spec-method ngram", "its layers have a state, from which drafted tokens that turn out wrong"),
    (
        'dense --speculative-config {"model":"early","draft_tensor_parallel_size":3}',
        "draft_tensor_parallel_size 3: with --tensor-parallel-size 1, method draft_model takes 1; leave it out",
    ),
    (
        "owner/not-here --distributed-executor-backend ray --ray-address ray://head:10001",
        "--ray-address ray://head:10001: executors are reached directly, not through a Ray client: serve on a machine",
    ),
    ("owner/not-here --download-dir m.gguf", "--download-dir m.gguf cannot be written (Not a directory): name one"),
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
def test_cuda_needs_a_driver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_DRIVERS", ())
    error = refusal(capsys, "dense", "--device", "cuda", "--show-config")
    assert error == "--device cuda: this machine has no NVIDIA driver; use --device cpu, or install the driver"


@pytest.mark.parametrize("flag", ["--request-timeout", "--shutdown-timeout", "--hang-timeout", "--max-queue-time"])
@pytest.mark.parametrize("text", ["inf", "nan", "1e400"])
def test_a_number_is_finite(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag}: expected a number" in refusal(capsys, flag, text)


@pytest.mark.parametrize("flag", ["--seed", "--max-num-seqs", "--max-file-bytes"])
def test_a_whole_number_fits_a_message(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{flag}: expected a " in refusal(capsys, flag, str(2**63))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    "line",
    [
        "awq -q awq_marlin",
        "early -q awq",
        "m.gguf -q gguf",
        "awq -q none",
        "dense -dp 2 --prefill-executors 1 --device cpu",
        'dense --kv-transfer-config {"kv_connector":"PagewireConnector","kv_role":"kv_both","kv_port":14579}',
        'dense --kv-transfer-config {"kv_load_failure_policy":"recompute","kv_connector_extra_config":{}}',
        "dense -tp 3",
        "experts -tp 3 -ep",
        "dense --limit-mm-per-prompt image=2,video=0",
        'dense --limit-mm-per-prompt {"video":0}',
        'dense -tp 4 --hf-overrides {"num_attention_heads":8,"num_key_value_heads":4}',
        'dense --max-model-len 4096 --hf-overrides {"max_position_embeddings":4096}',
        'dense --kv-cache-memory-bytes 1MiB --hf-overrides {"max_position_embeddings":256} --device cpu',
        "dense --chat-template {{messages}}",
        "dense --chat-template {%generation%}{%break%}{%endgeneration%}",
        "dense --allowed-origins * --allowed-methods GET --allowed-headers [] --allow-credentials",
        "dense --fingerprint-mode custom --fingerprint-value fp_mine",
        "dense --generation-store redis://:key@host:6379/1",
        "dense --data-dir new/data --uds-dir sockets",
        "dense --tokenizer empty",
        "dense --kv-cache-dtype float16 --dtype float16",
        "dense --kv-cache-dtype fp8",
        "latent --kv-cache-dtype smallest",
        "mamba --spec-method auto",
        "mamba",
        "dense -pp 2 --device cuda",
        "dense --runner pooling --spec-tokens 4",
        "dense -pp 2 --spec-method ngram --device cpu",
        "dense --block-size 8 --device cpu",
        "dense --model-impl transformers -q none",
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
        parse("dense", "--spec-model", "early", "--show-config=json")
    shown = json.loads(capsys.readouterr().out)
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    assert [shown[name]["value"] for name in names] == [None, "draft_model", "early", 5]
