import dataclasses
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pagewire import config, flags
from pagewire.config import ExecutorConfig, ServeConfig, vllm_flags
from pagewire.flags import vllm_flags_page
from tests.pagewire.flags import vllm_tutorials
from tests.pagewire.flags.parsing import parse, refusal

REPOSITORY = Path(__file__).parents[3]
FIELDS = {f.name: f for f in dataclasses.fields(ServeConfig) if f.name not in config.SET_BY_STACK}


def usage() -> list[list[str]]:
    """Every flag of the tutorials with each of its values."""
    lines = []
    for line in vllm_tutorials.USAGE.splitlines():
        flag, _, value = line.partition(" ")
        is_choice = value.startswith("{") and not value.startswith(('{"', "{}"))
        lines += (
            [[flag, each] for each in value[1:-1].split(",")] if is_choice else [[flag, value] if value else [flag]]
        )
    return lines


def test_the_tutorials_have_113_flags() -> None:
    assert len({argv[0] for argv in usage()}) == 113


@pytest.mark.parametrize("argv", usage(), ids=" ".join)
def test_every_flag_of_the_tutorials_is_taken_or_answered(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    try:
        parsed = parse(*argv)
    except SystemExit as exit_:
        assert exit_.code == 2
        message = capsys.readouterr().err.splitlines()[0]
        assert argv[0] in message and not re.search(r"unknown|did you mean", message), message
        return
    said = capsys.readouterr().err.splitlines()
    name = argv[0][2:].removeprefix("no-").replace("-", "_")
    assert name in FIELDS or len(said) == 1, "what is no flag here is answered in one line"
    assert all(line.startswith(f"pagewire serve: {argv[0]}") for line in said)
    assert isinstance(parsed, ServeConfig)


def current() -> list[list[str]]:
    words = vllm_tutorials.CURRENT.split()
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    return [words[start:end] for start, end in itertools.pairwise([*starts, len(words)])]


def test_every_flag_of_vllm_today_is_taken_or_answered(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for argv in current():
        try:
            parse(*argv)
        except SystemExit:
            message = capsys.readouterr().err.splitlines()[0]
            if argv[0] not in message or "unknown flag" in message or "expected" in message:
                wrong.append(message)
        said = capsys.readouterr().err.splitlines()
        wrong += said[1:] if len(said) > 1 else []
    assert not wrong


@pytest.mark.parametrize(("command", "fields", "expected"), vllm_tutorials.COMMANDS, ids=lambda value: str(value)[-60:])
def test_command_lines_of_the_tutorials(
    capsys: pytest.CaptureFixture[str], command: str, fields: dict[str, Any], expected: list[str]
) -> None:
    words = shlex.split(command)
    program = words.index("serve" if "serve" in words else "vllm.entrypoints.openai.api_server")
    parsed = parse(*words[program + 1 :])
    assert {name: getattr(parsed, name) for name in fields} == fields
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == expected


@pytest.mark.parametrize("name", vllm_tutorials.FILES)
def test_files_of_the_tutorials(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    content, fields, expected = vllm_tutorials.FILES[name]
    file = tmp_path / "config.yaml"
    file.write_text(content)
    parsed = parse(f"--config={file}")
    assert {field: getattr(parsed, field) for field in fields} == fields
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in said] == expected
    assert parse(f"--config={file}", "--max-num-seqs=7", "--profile=latency").max_num_seqs == 7


@pytest.mark.parametrize(("keywords", "fields"), vllm_tutorials.CALLS, ids=str)
def test_calls_of_the_tutorials(keywords: dict[str, Any], fields: dict[str, Any]) -> None:
    values, lines = flags.of_keywords(FIELDS, keywords)
    assert fields.items() <= values.items()
    assert len(lines) == len(keywords.keys() - FIELDS.keys())


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--max-model-len", "auto"], {"max_model_len": None}),
        (["--max-model-len", "-1"], {"max_model_len": None}),
        (["--max-model-len=8k"], {"max_model_len": 8000}),
        (["--quantization", "AWQ"], {"quantization": "awq"}),
        (["-q", "gptq"], {"quantization": "gptq"}),
        (["--quantization", "None"], {"quantization": None}),
        (["--enable-chunked-prefill", "True", "m"], {"enable_chunked_prefill": True, "model": "m"}),
        (["--enable-chunked-prefill=False", "m"], {"enable_chunked_prefill": False, "model": "m"}),
        (["--no-enable-chunked-prefill", "m"], {"enable_chunked_prefill": False, "model": "m"}),
        (["m", "--served-model-name", "a", "b"], {"served_model_name": "a,b", "model": "m"}),
        (["--served-model-name", "a", "b", "--port", "1"], {"served_model_name": "a,b", "port": 1}),
        (["--cudagraph-capture-sizes", "1", "2", "4", "m"], {"cudagraph_capture_sizes": (1, 2, 4), "model": "m"}),
        (["--max_num_seqs=3", "--gpu_memory_utilization", "0.5"], {"max_num_seqs": 3, "gpu_memory_utilization": 0.5}),
        (["-tp", "2", "-pp=2", "-asc", "3"], {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        (["--model-impl", "vllm"], {"model_impl": "pagewire"}),
        (["--distributed-executor-backend", "uni"], {"distributed_executor_backend": "mp"}),
        (["--speculative-config.method", "ngram"], {"speculative_config": '{"method": "ngram"}'}),
        (
            ["--hf-overrides.rope_parameters.factor", "4", "--hf-overrides.a", "x"],
            {"hf_overrides": '{"rope_parameters": {"factor": 4}, "a": "x"}'},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_spellings_that_mean_the_same_are_taken_without_a_word(
    capsys: pytest.CaptureFixture[str], argv: list[str], fields: dict[str, Any]
) -> None:
    parsed = parse(*argv)
    assert {name: getattr(parsed, name) for name in fields} == fields
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fields", "line"),
    [
        (["--task", "embed"], {"runner": "pooling", "convert": "embed"}, "now --runner pooling --convert embed"),
        (["--device-memory-utilization=0.5"], {"gpu_memory_utilization": 0.5}, "now --gpu-memory-utilization 0.5"),
        (["--no-async-scheduling"], {"pipeline_depth": 1}, "now --pipeline-depth 1"),
        (["--performance-mode", "interactivity"], {"max_num_seqs": 64}, "now --profile latency"),
        (["--max-num-queued-reqs=9"], {"max_waiting_requests": 9}, "waiting requests, not running ones"),
        (["--worker-use-ray"], {"distributed_executor_backend": "ray"}, "now --distributed-executor-backend ray"),
        (
            ["--rope-scaling", '{"type": "yarn"}', "--hf-overrides", '{"a": 1}'],
            {"hf_overrides": '{"rope_parameters": {"rope_type": "yarn"}, "a": 1}'},
            "now --hf-overrides",
        ),
        (["-O3"], {}, "-O3: ignored: models are not compiled"),
        (["--no-enable-log-requests"], {}, "--no-enable-log-requests: ignored: the log has one line for each request"),
        (["--guided-decoding-backend=xgrammar"], {}, "ignored: grammars are compiled by the executor"),
        (["--preemption-mode", "swap"], {}, "--preemption-mode: ignored: the blocks of a preempted request are loaded"),
        (["--trust-remote-code"], {}, "--trust-remote-code: ignored: code in a checkpoint is never run"),
        (["--tokenizer-pool-size", "0"], {"tokenizer_pool_size": None}, "ignored: there is always a pool"),
    ],
)
def test_what_means_something_else_here_is_said(
    capsys: pytest.CaptureFixture[str], argv: list[str], fields: dict[str, Any], line: str
) -> None:
    parsed = parse(*argv)
    assert {name: getattr(parsed, name) for name in fields} == fields
    [said] = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--default-mm-loras", "{}"], "--default-mm-loras is not supported: no adapter is applied unless"),
        (["--quantization", "aqlm"], "--quantization aqlm: checkpoints of this format cannot be read"),
        (["--kv-cache-dtype=fp8_e5m2"], "--kv-cache-dtype fp8_e5m2: fp8 means fp8_e4m3"),
        (["--rope-theta", "1e6"], "--rope-theta is not supported: set the base in config.json"),
        (["--rope-scaling", "[]"], "--rope-scaling: expected a JSON object, got '[]'"),
        (["--task", "reward"], "--task reward: a reward model with one score for a text is served as a classifier"),
        (["--task", "draft"], "--task: expected one of auto, generate"),
        (["--spec-decoding-acceptance-method", "typical_acceptance_sampler"], "keeps the distribution of tokens"),
        (["--nnodes", "2"], "--nnodes is not supported: start processes on several machines"),
        (
            ["--max-logprobs", "21"],
            "--max-logprobs is not supported: a request gets at most 20 log probabilities for each token",
        ),
        (
            ["--max-logprobs", "-1"],
            "--max-logprobs is not supported: a request gets at most 20 log probabilities for each token",
        ),
        (["--tensor-paralel-size=1"], "unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        (["--swap-spce", "1"], "unknown flag --swap-spce; did you mean --swap-space?"),
        (["--hopeless-flag"], "unknown flag --hopeless-flag"),
        (["--served-model-name", "a", "org/model"], "is 'org/model' a name or the MODEL? Put MODEL first"),
        (["--profile", "fastest"], "--profile: expected one of latency, throughput, cost"),
        (
            ["--no-enable-prefix-caching=true"],
            "unknown flag --no-enable-prefix-caching; did you mean --enable-prefix-caching?",
        ),
        (["--hf-overrides", "x", "--hf-overrides.a", "1"], "--hf-overrides: expected a JSON object, got 'x'"),
    ],
)
def test_refusals_name_the_cause(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    said = refusal(capsys, *argv)
    assert message in said
    assert ("did you mean" in said) == ("did you mean" in message)


def test_what_asks_for_nothing_is_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["--max-logprobs", "20"],
        ["--nnodes", "1"],
        ["--config-format=hf"],
    ):
        assert parse(*argv) == ServeConfig()
        assert "has no effect" in capsys.readouterr().err


def test_a_service_takes_its_own_flags_and_reports_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = parse("--preemption-mode=swap", "--dtype=half", config_class=ExecutorConfig)
    assert parsed.dtype == "float16"
    assert "--preemption-mode: ignored" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("--renderer-num-workers=4", config_class=ExecutorConfig)
    assert "--tokenizer-pool-size belongs to another service" in capsys.readouterr().err


def test_the_page_for_users_of_vllm_is_what_is_done() -> None:
    assert (REPOSITORY / "docs/from-vllm.md").read_text() == vllm_flags_page.page() + "\n", (
        "run: python -m pagewire.flags.vllm_flags_page > docs/from-vllm.md"
    )


def test_answers_point_to_flags_that_there_are() -> None:
    known = set(FIELDS) | {"rank", "leader", "executor_discovery", "profile"}
    texts = [entry.why for entry in vllm_flags.FLAGS.values()]
    texts += [value.why for values in vllm_flags.VALUES.values() for value in values.values()]
    for text in texts:
        for flag in re.findall(r"--([a-z][a-z-]+)", text):
            assert flag.replace("-", "_") in known, text
    for entry in vllm_flags.FLAGS.values():
        assert entry.name.replace("-", "_") not in FIELDS, f"{entry.name} is a flag: no answer is needed"
        for name in [entry.to, *(name for values in entry.values.values() for name in values)]:
            assert name == "" or name in known
    assert vllm_flags.VALUES.keys() <= FIELDS.keys()
