"""The report of benchmarks on drafts: from a server's metrics, and from several servers in turns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.config.speculation import Speculation, SpeculationConfig
from pagewire.errors import StartupError
from pagewire.tools.bench import curves, drafts, spec
from pagewire.tools.bench.drafts import Drafts
from pagewire.tools.bench.processor_time import await_idle, processor_seconds
from pagewire.tools.bench.request import Record
from pagewire.tools.bench.spec import BASELINE, Load, Measured, Method, Sample
from pagewire.tools.bench.spec_config import SpecConfig
from tests.pagewire.tools.openai_server import listening, run_bench

PAGE = """\
# TYPE pagewire:spec_decode_num_drafts_total counter
pagewire:spec_decode_num_drafts_total{service="executor",replica="a"} 10.0
pagewire:spec_decode_num_drafts_total{service="executor",replica="b"} 30.0
pagewire:spec_decode_num_drafts_created{service="executor"} 1.7e+09
pagewire:spec_decode_num_draft_tokens_total{service="executor"} 100.0
pagewire:spec_decode_num_accepted_tokens_total{service="executor"} 50.0
pagewire:spec_decode_num_accepted_tokens_per_pos_total{position="1",service="executor"} 20.0
pagewire:spec_decode_num_accepted_tokens_per_pos_total{position="0",service="executor"} 30.0
"""


def test_drafts_of_all_executors_count() -> None:
    assert drafts.parsed(PAGE) == Drafts(40.0, 100.0, 50.0, (30.0, 20.0))
    assert drafts.parsed(PAGE.replace("pagewire:", "vllm:").replace("service", "engine")) == drafts.parsed(PAGE)
    assert drafts.parsed("pagewire:steps_total 3.0\n") == Drafts()


def test_positions_may_come_up_later() -> None:
    assert Drafts(4, 9, 5, (3, 2)).since(Drafts(1, 2, 1, (1,))) == Drafts(3, 7, 4, (2, 2))
    assert Drafts(1, 2, 1, (1,)) + Drafts(3, 7, 4, (2, 2)) == Drafts(4, 9, 5, (3, 2))


async def test_bench_serve_reports_drafts_where_there_are_some(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    async with listening() as server:
        argv = ("serve", "--base-url", server.base_url, "--json-out", str(out), "--num-prompts=2", "--output-len=4")
        _, text = await run_bench(*argv)
        assert "drafted" not in text and "speculation" not in json.loads(out.read_text())["summary"]
        server.metrics = PAGE
        _, text = await run_bench(*argv)
    assert "drafted nothing" in text, "none of the server's were drafted meanwhile"
    assert json.loads(out.read_text())["summary"]["speculation"]["drafted_tokens"] == 0


def test_a_line_says_what_was_accepted() -> None:
    line = Drafts(40.0, 100.0, 50.0, (30.0, 20.0)).line()
    assert line == "drafted 100 tokens, 2.5 at once; accepted 50, 50 % (75 50 % by position)"


def record(start: float, seconds: float, num_tokens: int) -> Record:
    return Record(
        start, start + seconds, ttft=0.1, tpot=(seconds - 0.1) / (num_tokens - 1), completion_tokens=num_tokens
    )


def test_ratios_are_those_within_a_round(tmp_path: Path) -> None:
    """The machine is three times as slow in the second round."""
    ngram = Method("ngram", 5)
    load = Load("code", 1)
    measured = {(load, BASELINE): Measured(), (load, ngram): Measured()}
    for start, slowness in ((0.0, 1.0), (100.0, 3.0)):
        measured[load, BASELINE].add(Sample([record(start, 2.0 * slowness, 101)], Drafts(), 4.0))
        drafted = Drafts(40, 200, 60, (40, 20))
        measured[load, ngram].add(Sample([record(start + 10, 1.0 * slowness, 101)], drafted, 3.0))
    figures = measured[load, ngram].figures(measured[load, BASELINE])
    assert (figures["ratio"], figures["cpu_ratio"]) == (2.0, 0.75)
    assert figures["tokens_per_step"] == pytest.approx(202 / 82, abs=1e-3), "some steps had no drafts"
    beyond = Measured(records=[record(0.0, 1.0, 10)], rates=[10.0], drafts=Drafts(3, 12, 9, (3, 2, 2, 2)))
    assert beyond.figures(beyond)["tokens_per_step"] == 4.0, "also drafts behind the end were accepted"
    assert figures["acceptance"] == 0.3 and figures["accepted_by_position"] == [1.0, 0.5]
    header, *rows = (line.split() for line in spec.table([load], [BASELINE, ngram], measured))
    assert header[:6] == ["prompts", "method", "drafts", "tok/s", "ratio", "CPU"]
    assert rows[0] == ["code", "none", "-", "33.7", "1.00", "1.00", "-", "1.00", "100.0", "39.0"]
    assert rows[1][:7] == ["ngram", "5", "67.3", "2.00", "0.75", "30", "%"]
    config = SpecConfig(json_out=str(tmp_path / "spec.json"), draft_tokens=(5, 8))
    spec._write(config, measured)
    by_label = {curve.label: curve for curve in curves.read(tmp_path / "spec.json")}
    assert [point["draft_tokens"] for point in by_label["none, code"].points] == [5, 8], "a level line"
    assert [point["ratio"] for point in by_label["ngram, code"].points] == [2.0]


def test_each_method_is_taken_with_each_number() -> None:
    assert spec.methods(SpecConfig(methods="ngram, self:q4", draft_tokens=(5, 3))) == [
        BASELINE,
        *(Method(name, size) for name in ("ngram", "self:q4") for size in (3, 5)),
    ]
    fixed = Method("ngram", 5, is_fixed=True)
    assert spec.methods(SpecConfig(methods="ngram", also_fixed=True))[1:] == [Method("ngram", 5), fixed]
    speculation = Speculation.of(SpeculationConfig(**fixed.flags()))
    assert speculation is not None and not speculation.adaptive and fixed.label == "ngram, fixed"
    assert Method("ngram", 3).flags() == {"spec_method": "ngram", "spec_tokens": 3}
    assert Method("mtp", 3).flags() == {"spec_method": "mtp", "spec_tokens": 3}
    assert Method("self:q4", 3).flags() == {"spec_model": "self:q4", "spec_tokens": 3}
    assert Method("auto", 5).flags() == {"spec_method": "auto", "spec_tokens": 5}
    assert BASELINE.flags() == {"spec_method": "none"}


def test_the_processor_time_of_a_server_counts_its_processes() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdout.readline()
        seconds = processor_seconds(parent.pid)
        parent.stdin.close()
    assert seconds is not None and seconds >= 0.18
    assert processor_seconds(parent.pid) is None, "it has ended"


def test_a_server_is_measured_once_it_has_nothing_to_do() -> None:
    work = "import time\nwhile time.process_time() < 0.5: pass\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE) as server:
        assert server.stdin is not None
        await_idle(server.pid)
        seconds = processor_seconds(server.pid)
        server.stdin.close()
    assert seconds is not None and seconds >= 0.48
    await_idle(server.pid)  # one that has ended does nothing


def test_requests_of_more_streams_than_texts_differ() -> None:
    assert [spec._numbered(["a", "b"], number) for number in range(4)] == ["a", "b", "2. a", "2. b"]
    texts = spec._prompts(SpecConfig(prompts="random", streams=(1, 8)))["random"]
    assert len(set(texts)) == 9


def test_prompts_are_kinds_or_files(tmp_path: Path) -> None:
    chosen = spec._prompts(SpecConfig(prompts="chat,code", num_prompts=2))
    assert [(kind, len(texts)) for kind, texts in chosen.items()] == [("chat", 3), ("code", 3)]
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert spec._prompts(SpecConfig(prompts=str(path))) == {"mine": ["a", "b"]}
    path.write_text('{"text": "a"}\n')
    with pytest.raises(StartupError, match="expected JSON lines"):
        spec._prompts(SpecConfig(prompts=str(path)))
    with pytest.raises(StartupError, match="neither a kind"):
        spec._prompts(SpecConfig(prompts="poems"))
