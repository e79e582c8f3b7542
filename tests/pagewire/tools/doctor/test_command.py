"""`pagewire doctor` as a user runs it."""

import json
import re
import socket

import pytest

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.tools.doctor import command
from pagewire.tools.doctor.finding import Finding, Level, note, ok, problem, warning
from pagewire.tools.doctor.model import check_model
from pagewire.tools.doctor.network import check_network
from pagewire.tools.doctor.settings import check_settings
from tests.pagewire.tools.doctor.machines import RecordedHost, good, smi

_FREE = ["--port", "0", "--grpc-port", "0"]


def test_on_this_machine(smollm2_gguf, capsys) -> None:
    code = command.main([str(smollm2_gguf), "--json", *_FREE])
    said = json.loads(capsys.readouterr().out)
    by_check = {finding["check"]: finding for finding in said["findings"]}
    assert code == int(said["worst"] == "problem")
    assert "LlamaForCausalLM" in by_check["model"]["found"]
    assert "tokens" in by_check["context"]["found"]
    assert by_check["disk speed"]["level"] in ("ok", "absent", "warning")


def test_a_context_that_does_not_fit(smollm2_gguf, capsys) -> None:
    assert command.main([str(smollm2_gguf), "--kv-cache-memory-bytes", "1MiB", *_FREE]) == 1
    assert "--max-model-len 32" in capsys.readouterr().out


def test_flags_that_contradict_each_other(capsys) -> None:
    flags = ["--max-num-seqs", "256", "--max-num-batched-tokens", "64", "--enforce-eager", "--json", *_FREE]
    command.main(flags)
    said = [f["found"] for f in json.loads(capsys.readouterr().out)["findings"] if f["area"] == "flags"]
    assert said == ["--max-num-batched-tokens 64 is less than --max-num-seqs 256", "--enforce-eager"]


def test_offloaded_weights_are_not_on_the_gpu(smollm2_gguf, tmp_path) -> None:
    host = RecordedHost(tmp_path, good(), commands=smi({}))
    whole, offloaded = (
        next(f.found for f in check_model(host, ServeConfig(model=str(smollm2_gguf), cpu_offload_gb=gb), smollm2_gguf))
        for gb in (0, 0.04)
    )
    of_gpu = [float(re.match(r"([\d.]+) MiB of weights", found)[1]) for found in (whole, offloaded)]  # type: ignore[index]
    kept = float(re.search(r"without ([\d.]+) MiB in host memory \(--cpu-offload-gb\)", offloaded)[1])  # type: ignore[index]
    assert of_gpu[0] - of_gpu[1] == pytest.approx(kept, abs=1.5) and 0 < kept < 41 and "without" not in whole


def test_roles_of_executors_are_shown(tmp_path) -> None:
    config = ServeConfig(data_parallel_size=2, prefill_executors=1, device="cpu")
    assert "executor-0 prefill, executor-1 decode" in [
        f.found for f in check_settings(RecordedHost(tmp_path, good()), config)
    ]


@pytest.mark.parametrize(
    "finding, code, strict",
    [
        (ok("a", "b"), 0, 0),
        (note("a", "b", "c"), 0, 0),
        (warning("a", "b", "c", "d"), 0, 1),
        (problem("a", "b", "c", "d"), 1, 1),
    ],
)
def test_exit_code_and_text(monkeypatch, capsys, finding: Finding, code, strict) -> None:
    monkeypatch.setattr(command, "examine", lambda settings, host: {"area": [finding]})
    assert (command.main([]), command.main(["--strict"])) == (code, strict)
    shown = capsys.readouterr().out
    assert ("so: c" in shown) == (finding.level > Level.OK)


@pytest.mark.parametrize("model", ["no-such-model", "./no/such/path"])
def test_a_missing_model_is_reported_with_suggestions(model: str) -> None:
    with pytest.raises(
        StartupError, match=r"no model .*a hub id \(owner/name or owner/name:Q4_K_M\), or one of smollm2"
    ):
        command.main([model, *_FREE])


def test_the_ports_of_the_stack_that_is_examined_are_not_asked_for(tmp_path) -> None:
    host = RecordedHost(tmp_path, good())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = command.DoctorConfig(port=taken.getsockname()[1], grpc_port=0)
        levels = [{f.check: f.level for f in check_network(host, config, is_running=running)}["REST port"]
                  for running in (False, True)]  # fmt: skip
    assert levels == [Level.NOTE, Level.ABSENT]


def test_a_stack_that_is_not_there() -> None:
    with pytest.raises(StartupError, match=r"does not answer.*pagewire ps"):
        command.main(["--url", "http://127.0.0.1:9", *_FREE])
