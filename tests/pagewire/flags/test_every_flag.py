"""Values that no flag takes: each is refused by the command and by `--show-config` alike, in one sentence that names
the flag, or is accepted by both."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pagewire import config
from pagewire.config.values import memory as of_memory
from pagewire.flags import refusals
from pagewire.flags.names import base_type, fields_of, flag_name
from tests.pagewire.flags.parsing import parse, refusal

SERVICES: dict[str, tuple[type, tuple[str, ...]]] = {
    "serve": (config.ServeConfig, config.SET_BY_STACK),
    "gateway": (config.GatewayConfig, ()),
    "tokenizer": (config.TokenizerConfig, ()),
    "scheduler": (config.SchedulerConfig, ()),
    "executor": (config.ExecutorConfig, ()),
}
FLAGS = [
    pytest.param(service, field, id=f"{service}-{field.name}")
    for service, (config_class, without) in SERVICES.items()
    for field in fields_of(config_class)
    if field.name not in without and base_type(field) is not bool
]
WRONG = {"large": "9" * 30, "long": "x" * 5000, "empty": "", "blank": " ", "malformed": "\x01::[%"}
# Texts that are names, or directories that are made, and secrets of any length.
TAKES_DIGITS = {
    "admin_host",
    "api_key",
    "group_secret",
    "tenant_header",
    "served_model_name",
    "allowed_media_domains",
    "allowed_methods",
    "allowed_headers",
    "download_dir",
    "weights_cache",
    "data_dir",
    "uds_dir",
    "kv_offloading_dir",
}
TAKES = {
    "large": TAKES_DIGITS,
    "long": {"api_key", "group_secret", "allowed_methods", "allowed_headers"},
    "empty": {"public_listen", "leader"},
    "blank": set[str](),
    "malformed": set[str](),
}


@pytest.mark.parametrize(("service", "field"), FLAGS)
def test_what_is_too_large_long_empty_or_malformed_is_refused_by_name(
    service: str,
    field: dataclasses.Field[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    config_class, without = SERVICES[service]
    positional = "model" if "model" in {one.name for one in fields_of(config_class)} else ()
    for kind, value in WRONG.items():
        line = (f"{flag_name(field.name)}={value}", "--show-config")
        if field.name in TAKES[kind]:
            continue
        said = refusal(capsys, *line, config_class=config_class, without=without, positional=positional)
        assert flag_name(field.name) in said and len(said) < 600 and "\n" not in said, (kind, said)
        assert not (field.metadata["secret"] and value.strip()) or value not in said, "a secret is not shown"


REFUSED = [
    ("--max-num-seqs 100000000", "--max-num-seqs: expected a whole number (at least 1, at most 65536)"),
    ("--max-num-batched-tokens 4Gi", "--max-num-batched-tokens: expected a size (at least 1, at most 1048576)"),
    ("--kv-cache-memory-bytes 900Ti", "the KV cache would be 943,718,400.0 MiB, this machine has "),
    ("--shutdown-timeout 1e12", "--shutdown-timeout: expected a number (at least 0, at most 31536000)"),
    ("--host=", "--host: expected the name or the address of a host, got ''"),
    ("--otlp-traces-endpoint banana", "--otlp-traces-endpoint: expected a URL such as http://localhost:4317"),
    ("--otlp-traces-endpoint http://", "--otlp-traces-endpoint: expected a URL such as http://localhost:4317"),
    ('--structured-outputs-config {"backend":"x"}', "backend 'x' is none of vLLM's (auto, xgrammar, guidance, "),
    ("--data-dir=", "--data-dir: expected a value that is not empty, got ''; leave it out for the default"),
    ("--model=", "--model: expected a value that is not empty"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_serve_cannot_start_with_is_refused(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refusal(capsys, *line.split(), "--show-config")


@pytest.mark.parametrize(
    "line",
    [
        "--otlp-traces-endpoint localhost:4317",
        "--otlp-traces-endpoint http://collector",
        "--otlp-traces-endpoint https://[::1]:4317/v1/traces",
        "--served-model-name a,a",
        "--allowed-media-domains a.example,*",
        "--host ::",
        "--ray-address local",
        '--structured-outputs-config {"backend":"xgrammar"}',
        "--served-model-name größe\u202f7",
    ],
)
def test_what_is_right_is_accepted(line: str) -> None:
    refusals.check(parse(*line.split(), "--port=0", "--grpc-port=0"))


@pytest.mark.parametrize("address", ["executors:grpc", "pool=a&tier=1:50053", f"a={'x' * 40}&b={'y' * 40}:1"])
def test_services_of_kubernetes_have_addresses_of_their_own(address: str) -> None:
    line = ("--executor-discovery=kubernetes", f"--executor-address={address}", "--listen=localhost:0")
    refusals.check(parse(*line, config_class=config.SchedulerConfig, positional=()))


def test_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--download-dir: expected a path in UTF-8" in refusal(capsys, "--download-dir=/a/\udcff")


def test_buffers_that_cannot_fit_are_refused_with_their_bytes() -> None:
    assert of_memory.of_rows(128, 2048, 8192, available=2**30) is None
    assert of_memory.of_rows(65536, 2048, 8192, available=2**30) == (
        "--max-num-seqs 65536: the rows of so many requests of up to 8192 tokens need at least 2,048.1 MiB, and "
        "1,024.0 MiB are free; lower it, or --max-model-len"
    )
    assert of_memory.of_rows(8, 2**20, 8192, available=2**20) == (
        "--max-num-batched-tokens 1048576: so large a step needs at least 32.2 MiB, and 1.0 MiB are free; lower it"
    )
    assert of_memory.of_small_cache(2**20, 1024, 2048) == (
        "--kv-cache-memory-bytes 1048576: the KV cache would be 1.0 MiB, 1024 tokens, but one request of 2048 tokens "
        "needs 2.0 MiB; lower --max-model-len to 1024 or less, or raise it"
    )
    assert of_memory.of_small_cache(2**20, 1024, 1024) is None
    assert of_memory.of_small_cache(2**20, 0, 1024) is None


def test_a_refused_command_line_ends_with_2() -> None:
    with pytest.raises(refusals.StartupError) as raised:
        refusals.check(parse("--served-model-name", ","))
    assert raised.value.exit_code == 2
