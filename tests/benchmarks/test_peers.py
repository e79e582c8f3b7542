"""The table beside other engines, with engines that have no model."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.peers import __main__ as command
from benchmarks.peers import models, table
from benchmarks.peers.contest import Cell, Contest, Runner
from benchmarks.peers.contestants import Contestant, ContestantError, Process, Pythons, field_of
from benchmarks.peers.engines.server import Server
from benchmarks.peers.engines.worker import InBatches, Times, Unfinished, Work
from benchmarks.peers.models import MODELS, Files
from benchmarks.peers.rows import PREFIXES, ROWS, measured_by
from pagewire.errors import StartupError
from pagewire.services.executor.adapters.checkpoint import read_adapter
from pagewire.tools.bench.prompts import RandomWords

TAKEN = table.Taken("a machine", "2026-11-30", {"Pagewire": "1"}, "python -m benchmarks.peers", 2, 2.5)
FAKE = [sys.executable, "-m", "tests.benchmarks.peers_fake"]


def contest_of(tmp_path: Path, engines: dict[str, dict[str, Any]], rows: Sequence[str], rounds: int) -> Contest:
    """Returns the contest of fake engines. engines: their settings, by key."""
    contestants = []
    for key, settings in engines.items():
        known = {"name": key, "diary": str(tmp_path / "diary")}
        can = frozenset([PREFIXES]) if "llamacpp" not in key else frozenset[str]()
        contestants.append(Contestant(key, f"the {key}", FAKE, known | settings, f"run {key}", can))
    contest = Contest(contestants, left_out={})
    runner = Runner(contest, RandomWords(random.Random(0), 1.0, 0.0), str.upper, TAKEN.limit, tmp_path)
    runner.run([ROWS[key] for key in rows], rounds)
    return contest


def diary(tmp_path: Path, load: str) -> list[str]:
    """Returns the engines that got a load, "requests output_len", in order."""
    lines = (tmp_path / "diary").read_text().splitlines()
    return [line.partition(" ")[0] for line in lines if line.partition(" ")[2] == load]


def cells(contest: Contest, begin: str) -> list[str]:
    """Returns the last line of the tables that begins like this."""
    page = table.page(TAKEN, {"a model": contest})
    line = [line for line in page.splitlines() if line.startswith(f"| {begin}")][-1]
    return line.strip("| ").split(" | ")


def test_all_work_in_turn_and_another_one_begins_each_round(tmp_path: Path) -> None:
    engines = {"pagewire-bf16": {"token_s": 0.005}, "openvino": {}, "llamacpp": {"token_s": 0.008}}
    contest = contest_of(tmp_path, engines, ["streams-8", "prefix"], rounds=2)
    ours, openvino, llamacpp = engines
    assert diary(tmp_path, "8 128") == [ours, openvino, llamacpp, openvino, llamacpp, ours]
    # The shared prefix is sent first; an engine that keeps none is not asked.
    assert diary(tmp_path, "1 1") == [ours, openvino, openvino, ours]
    heads = "bf16 | the openvino | the llamacpp | the pagewire-bf16 | ours / the best other | asked"
    assert cells(contest, "bf16") == heads.split(" | ")
    rates = ["800 (800-800)", "1,000 (1,000-1,000)", "1,600 (1,600-1,600)"]
    assert cells(contest, "8 streams") == ["8 streams, output tok/s", *rates, "**1.60**", "≥ 1.2"]
    times = ["10.0 (10.0-10.0)", "-", "5.0 (5.0-5.0)"]
    assert cells(contest, "first token of 1,024") == [ROWS["prefix"].title, *times, "**0.50**", "≤ 0.75"]


def test_four_bits_are_compared_with_our_own_bf16(tmp_path: Path) -> None:
    engines = {"pagewire-bf16": {}, "pagewire": {"token_s": 0.0095}, "llamacpp-q4_0": {"token_s": 0.02}}
    contest = contest_of(tmp_path, engines, ["streams-8"], rounds=1)
    assert cells(contest, "4 bits")[1:4] == ["the llamacpp-q4_0", "the pagewire-bf16", "the pagewire"]
    assert cells(contest, "8 streams")[1:] == ["400", "800", "842", "2.11", "1.05", "≥ 1.1"]


def test_an_engine_that_takes_too_long_is_given_up_once(tmp_path: Path) -> None:
    engines = {"pagewire-bf16": {}, "openvino": {"token_s": 0.03}}
    contest = contest_of(tmp_path, engines, ["streams-32", "first-2048"], rounds=3)
    assert diary(tmp_path, "32 128") == ["pagewire-bf16", "openvino", "pagewire-bf16", "pagewire-bf16"]
    # 32 x 128 tokens in 2.5 times as long as 1.28 s.
    assert cells(contest, "32 streams")[1:4] == ["< 1280", "3,200 (3,200-3,200)", "**2.50**"]
    assert cells(contest, "first token of a prompt")[1] == "30.0 (30.0-30.0)"


def test_an_engine_that_fails_is_left_out_with_its_reason(tmp_path: Path) -> None:
    engines: dict[str, dict[str, Any]] = {
        "pagewire-bf16": {},
        "openvino": {"refuses": "no weights"},
        "vllm": {"fails_at": 1},
        "llamacpp": {"is_short": True},
    }
    contest = contest_of(tmp_path, engines, ["streams-1", "first-2048"], rounds=2)
    assert contest.left_out == {
        "the openvino": "ValueError: no weights",
        "the vllm": "ValueError: no such length",
        "the llamacpp": "not all answers had 128 tokens",
    }
    assert cells(contest, "1 stream,")[1:5] == ["-", "failed", "100", "100 (100-100)"]
    assert cells(contest, "first token of a prompt")[3] == "failed"
    assert "Left out: the vllm: ValueError: no such length." in table.page(TAKEN, {"a model": contest})


def test_an_engine_that_hangs_is_ended_with_a_clear_message(tmp_path: Path) -> None:
    silent = Contestant("vllm", "the vllm", [sys.executable, "-c", "import time; time.sleep(600)"], {}, "")
    process = Process(silent, tmp_path / "log", timeout_s=0.05)
    try:
        with pytest.raises(ContestantError, match=r"it gave no answer within 0\.05 s and was ended"):
            process.await_ready()
    finally:
        process.close()


def test_rounds_that_differ_are_marked() -> None:
    found = Contest([Contestant("pagewire-bf16", "ours", [], {}, ""), Contestant("vllm", "vLLM", [], {}, "")], {})
    found.cells = {("short", "pagewire-bf16"): Cell([200.0, 210.0]), ("short", "vllm"): Cell([100.0, 112.0])}
    line = f"{ROWS['short'].title} * | 106 (100-112) | 205 (200-210) | 1.93 | ≥ 2"
    assert cells(found, "requests/s") == line.split(" | ")


def test_figures() -> None:
    requests = [Times(1.0, 1.5, 3.0, 10), Times(2.0, 2.25, 5.0, 10)]
    figures = {key: ROWS[key].value(requests) for key in ("streams-8", "first-8x128", "short")}
    assert figures == {"streams-8": 5.0, "first-8x128": 375.0, "short": 0.5}


def test_an_engine_in_process_gets_batches() -> None:
    class Batches:
        def generate(self, work: Work, deadline: float) -> list[Times]:
            if deadline < 1e9:
                raise Unfinished
            return [Times(0.0, 1.0, 2.0, len(work.prompts))] * len(work.prompts)

    found = InBatches(Batches()).run(Work(["a"] * 5, 1, concurrency=2))
    assert [one.num_tokens for one in found] == [2, 2, 2, 2, 1]
    with pytest.raises(Unfinished):
        InBatches(Batches()).run(Work(["a"], 1, limit_s=0.0))


# Answers each request with as many chunks as tokens were asked for, the first after 1 ms, then one per 20 ms.
SERVER = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(os.environ["MODELS"], "a") as models:
            print(body["model"], file=models)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(0.02 if i else 0.001)
            usage = {"prompt_tokens": 1, "completion_tokens": i + 1}
            chunk = {"choices": [{"text": "x", "finish_reason": None}], "usage": usage}
            self.wfile.write(f"data: {json.dumps(chunk)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("adapters", [[], ["a0", "a1"]])
def test_a_server_is_started_loaded_given_up_and_ended(tmp_path: Path, adapters: list[str]) -> None:
    command, env = [sys.executable, "-c", SERVER, "{port}"], {"MODELS": str(tmp_path / "models")}
    server = Server({"command": command, "env": env, "adapters": adapters})
    try:
        server.await_ready()
        times = server.run(Work(["a", "b", "c"], 5, concurrency=3))
        assert [one.num_tokens for one in times] == [5, 5, 5]
        assert all(one.start < one.first < one.last for one in times)
        named = (tmp_path / "models").read_text().split()[-3:]
        assert sorted(named) == (["a0", "a0", "a1"] if adapters else ["bench"] * 3)
        with pytest.raises(Unfinished):
            server.run(Work(["a"], 5, limit_s=0.02))
    finally:
        server.close()
    with pytest.raises(StartupError, match="ended with status 3"):
        Server({"command": [sys.executable, "-c", "raise SystemExit(3)"], "env": {}}).await_ready()


def test_missing_peers_are_named(tmp_path: Path) -> None:
    found = field_of(
        Files(MODELS["default"], tmp_path),
        Pythons(vllm=sys.executable),
        lambda key: key not in ("pagewire-bf16", "pagewire-lora"),
    )
    assert [one.key for one in found.contestants] == ["pagewire", "pagewire-default"]
    # Streams are compared with those of engines without drafts, texts with our default flags.
    assert ["--spec-method none" in one.command for one in found.contestants] == [True, False]
    assert measured_by("pagewire-default") == {"chat", "code", "quotes"} and "chat" not in measured_by("pagewire")
    assert found.left_out["OpenVINO GenAI"] == "no --openvino PYTHON"
    assert found.left_out["llama.cpp Q4_0"] == "no --llamacpp PYTHON"
    assert f"{sys.executable}: no package vllm there" in found.left_out["vLLM"]


def test_a_model_has_the_rows_that_it_can_have() -> None:
    def keys(model: str, names: list[str] | None) -> list[str]:
        return [row.key for row in command.rows_of(MODELS[model], names)]

    assert keys("default", None) == [key for key in ROWS if not key.startswith("lora")]
    assert keys("default", ["lora-8"]) == keys("qwen3-0.5b", ["lora-8"]) == ["lora-8"]
    assert keys("qwen3-0.5b", None) == ["streams-1", "streams-8", "first-2048", "first-8x128", "prefix", "short"]
    assert keys("qwen3-0.5b", ["streams-64", "code"]) == ["streams-64"]


def test_the_gguf_file_and_adapters_are_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "num_attention_heads": 2}
    monkeypatch.setattr(models, "QWEN3_SHAPE", models.QWEN3_SHAPE | small | {"num_key_value_heads": 1, "head_dim": 32})
    files = Files(MODELS["qwen3-0.5b"], tmp_path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(files.gguf("BF16", sys.executable)).tensors}
    weights = Qwen3ForCausalLM.from_pretrained(files.checkpoint(), dtype=torch.float32).model
    pairs = {
        "token_embd.weight": weights.embed_tokens.weight,
        "blk.0.attn_k.weight": weights.layers[0].self_attn.k_proj.weight,
        "blk.0.attn_q_norm.weight": weights.layers[0].self_attn.q_norm.weight,
        "blk.0.ffn_down.weight": weights.layers[0].mlp.down_proj.weight,
    }
    assert len(stored) == 13
    for name, weight in pairs.items():
        values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        assert np.array_equal(values, weight.detach().numpy()), name
    paths = files.adapters()
    read = [read_adapter(path) for path in paths]
    assert [path.name for path in paths] == [f"a{number}" for number in range(8)]
    assert len({one.digest for one in read}) == 8
    assert {(len(one.modules), module.rank) for one in read for module in one.modules.values()} == {(7, 16)}


def test_the_files_of_a_table_name_no_path_of_the_machine(tmp_path: Path) -> None:
    args = command.arguments().parse_args(
        [f"--out={tmp_path}/t.md", f"--json-out={tmp_path}/t.json", f"--cache={tmp_path}/c", "--vllm=/home/x/python"]
    )
    contest = Contest([Contestant("vllm", "vLLM 1", [], {}, f"vllm serve {tmp_path}/c/m")], {"OpenVINO": "none"})
    contest.cells = {("streams-1", "vllm"): Cell([30.0, 31.0])}
    command.write(args, TAKEN, {"a model": contest})
    assert "vllm serve CACHE/m" in (tmp_path / "t.md").read_text()
    figures = json.loads((tmp_path / "t.json").read_text())["models"]["a model"]
    assert figures["figures"][0] | {"bound": None} == {
        "row": "streams-1",
        "contestant": "vllm",
        "values": [30.0, 31.0],
        "bound": None,
        "failure": "",
    }


@pytest.mark.parametrize("flag", ["--rows=streams-1,streams-2", "--models=gpt"])
def test_unknown_names_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments().parse_args([flag])
    assert "none of" in capsys.readouterr().err
