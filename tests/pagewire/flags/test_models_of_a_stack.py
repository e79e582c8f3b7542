"""Several models on one command line and in one file: what they mean, and one clear error for each that is wrong."""

import json
from pathlib import Path

import pytest

from pagewire import config as of_config
from pagewire import flags
from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.lines import base_of, line_of_entry, models_of


def serve(*argv: str) -> ServeConfig:
    return flags.parse(
        ServeConfig, argv, prog="serve", description="", positional="model", without=of_config.SET_BY_STACK, environ={}
    )


def test_models_of_the_command_line_are_pinned_and_the_first_is_the_default() -> None:
    config = serve("all-minilm-l6-v2", "smollm2-135m-instruct", "--max-model-len", "128", "--grpc-port", "9001")
    first, second = models_of(config).lines
    assert (first.name, second.name) == ("all-minilm-l6-v2", "smollm2-135m-instruct")
    assert first.is_pinned and second.is_pinned
    assert (first.config.max_model_len, second.config.max_model_len) == (128, 128)
    assert (first.config.grpc_port, first.has_grpc, second.has_grpc) == (9001, True, False)
    assert first.config.other_models is None, "a line has one model"
    (alone,) = models_of(serve()).lines
    assert alone.config.model == ServeConfig.model and alone.is_pinned


def test_the_example_of_a_file_is_valid() -> None:
    small, gemma, embed = models_of(serve("--models", str(Path(__file__).parents[3] / "examples/models.yaml"))).lines
    assert (small.is_pinned, gemma.is_pinned, embed.name) == (True, False, "all-minilm-l6-v2")
    assert (gemma.names, gemma.memory, gemma.config.max_model_len) == (("gemma", "gpt-4o-mini"), 2**31, 4096)


def test_a_file_gives_models_flags_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        """
models:
  - model: smollm2-135m-instruct
    name: small
    aliases: [gpt-4o-mini]
    pinned: true
    memory: 2GiB
    idle_timeout: 300
    flags: {max-model-len: 4096, quantization: none, kv_cache_dtype: int8}
  - model: all-minilm-l6-v2
default_model: gpt-4o-mini
"""
    )
    config = serve("--models", str(file), "--max-num-seqs", "7", "--model-alias", "embed=all-minilm-l6-v2")
    models = models_of(config)
    small, embed = models.lines
    assert (small.names, embed.names) == (("small", "gpt-4o-mini"), ("all-minilm-l6-v2", "embed"))
    assert (small.is_pinned, small.memory, small.config.idle_timeout) == (True, 2**31, 300.0)
    assert (small.config.max_model_len, small.config.quantization, small.config.kv_cache_dtype) == (
        4096,
        "none",
        "int8",
    )
    assert (embed.is_pinned, embed.memory, embed.config.max_model_len) == (False, None, None)
    assert small.config.max_num_seqs == embed.config.max_num_seqs == 7
    assert models.default == "small" and small.has_grpc and not embed.has_grpc
    assert [line.name for line in models_of(serve("gemma-3-270m", "--models", str(file))).lines] == [
        "gemma-3-270m",
        "small",
        "all-minilm-l6-v2",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a list `models:`"),
        ("models: 3", "expected a list `models:`"),
        ("models: []", "expected a list `models:`"),
        ("modles: [{model: a}]\nmodels: [{model: a}]", "unknown key modles"),
        ("models:\n- name: a", "line 2: model: expected a path or an id"),
        ("models:\n- model: m\n- 7", "line 3: expected keys and values"),
        ("models:\n- model: m\n  pined: true", "line 2: unknown key pined; .*did you mean pinned"),
        ("models:\n- model: m\n  max-model-len: 5", r"line 2: unknown key max_model_len.*keys of `flags:`"),
        ("models:\n- model: m\n  pinned: 1", "line 2: pinned: expected true or false, got 1"),
        ("models:\n- model: m\n  memory: much", "line 2: memory: expected a size such as 2GiB, got 'much'"),
        ("models:\n- model: m\n  memory: 0", "line 2: memory: expected a size"),
        ("models:\n- model: m\n  idle_timeout: -1", "line 2: idle_timeout: expected seconds"),
        ("models:\n- model: m\n  aliases: [a b]", "line 2: aliases: expected a name of at most 255"),
        ("models:\n- model: m\n  name: {}", "line 2: name: expected a name"),
        ("models:\n- model: m\n  flags: {max-model-len: x}", "line 2: max-model-len: expected a size"),
        ("models:\n- model: m\n  flags: {max-modle-len: 5}", "line 2: flags: unknown key max-modle-len; did you mean"),
        ("models:\n- model: m\n  flags: {port: 80}", "line 2: flags: port is not a flag of one model"),
        ("models:\n- model: m\n  flags: [1]", "line 2: flags: expected keys and values"),
        ("models:\n- {model: m, name: a}\n- {model: n, aliases: [a]}", "two models are named 'a': m and n"),
        ("models: [{model: m}]\ndefault_model: n", "default_model: the model 'n' does not exist; served here: m"),
        ("models: [{model: m}]\ndefault_model: [n]", "default_model: expected a name"),
        ("models: [{model: m}]\nmodels: [{model: n}]", "models is given on line 1 and line 2"),
        ("models: [", "--models .*: cannot be read as YAML"),
    ],
)
def test_a_wrong_file_has_one_error_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(StartupError, match=message):
        models_of(serve("--models", str(file)))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--models", "/no/such.yaml"), "--models /no/such.yaml: cannot be read"),
        (("m", "m"), "two models are named 'm'"),
        (("m", "--model-alias", "n"), "--model-alias: expected NAME=MODEL, got 'n'"),
        (("m", "--model-alias", "n=o"), "--model-alias n=o: the model 'o' does not exist; served here: m"),
        (("m", "--default-model", "o"), "--default-model: the model 'o' does not exist; served here: m"),
    ],
)
def test_wrong_flags_have_one_error(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        models_of(serve(*argv))


def test_a_model_with_a_comma_and_sizes_without_a_number_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (("a", "b,c"), "several models are words, without commas"),
        (("--models-memory", "much"), "--models-memory: expected a size"),
        (("--max-loaded-models", "0"), "--max-loaded-models: expected a whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            serve(*argv)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        flags.parse(ExecutorConfig, ["a", "b"], prog="executor", description="", positional="model", environ={})
    assert "unexpected argument 'b'" in capsys.readouterr().err, "an executor has one model"


def test_an_entry_that_is_added_later_has_the_flags_of_the_stack(tmp_path: Path) -> None:
    base = base_of(serve("m", "--gguf", "Q8_0", "--max-num-seqs", "7", "--served-model-name", "x"))
    entry = json.loads('{"model": "owner/name", "idle_timeout": 5, "flags": {"max-model-len": 99}}')
    line = line_of_entry(entry, base, "model 'new'", "new")
    assert (line.names, line.is_pinned, line.config.idle_timeout, line.config.max_model_len) == (("new",), False, 5, 99)
    assert (line.config.gguf, line.config.max_num_seqs, line.config.model) == (None, 7, "owner/name")
    with pytest.raises(StartupError, match="model 'new': unknown key modle; expected name, model"):
        line_of_entry({"modle": "m"}, base, "model 'new'", "new")
