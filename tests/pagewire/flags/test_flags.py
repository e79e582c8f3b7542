import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagewire import config, flags
from pagewire.config import ExecutorConfig, GatewayConfig, SchedulerConfig, ServeConfig, TokenizerConfig
from pagewire.config.fields import Range
from pagewire.config.values.texts import FORM_OF
from pagewire.tools.batch.config import BatchCommandConfig
from pagewire.tools.doctor.command import DoctorConfig
from pagewire.tools.terminal.run import RunConfig
from pagewire.tools.tune.config import TuneConfig
from tests.pagewire.flags.parsing import parse, refusal

CONFIGS = [GatewayConfig, TokenizerConfig, SchedulerConfig, ExecutorConfig, ServeConfig]


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1\nmax-num-seqs: 1\nblock_size: 32\n")
    environ = {"PAGEWIRE_PORT": "2", "PAGEWIRE_MAX_NUM_SEQS": "2", "PAGEWIRE_CONFIG": str(file)}
    for given_config in (parse("--port", "3", environ=environ), parse("--port=3", f"--config={file}", environ=environ)):
        assert (given_config.port, given_config.max_num_seqs) == (3, 2)
        assert (given_config.block_size, given_config.grpc_port) == (32, 8001)


@pytest.mark.parametrize("argv", [["dir", "--port", "3"], ["--port", "3", "dir"], ["--model=dir", "--port=3"]])
def test_model_is_positional_or_a_flag(argv: list[str]) -> None:
    assert parse(*argv).model == "dir"


def test_model_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give one of them" in refusal(capsys, "a", "--model=b")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "4"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--max-num=4"], "unknown flag --max-num"),
        (["--enable-prefix-cachin"], "did you mean --enable-prefix-caching?"),
        (["--port", "70000"], "--port: expected a whole number (at least 0, at most 65535), got '70000'"),
        (["--block-size", "24"], "--block-size: expected a whole number (at least 8, at most 256, a power of two)"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: expected a number (above 0, at most 1)"),
        (["--gpu-memory-utilization", "0"], "above 0"),
        (["--pipeline-depth", "3"], "at most 2"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--api-key="], "--api-key: expected a value that is not empty"),
        (["--api-key", "key "], "no spaces around it"),
        (["--max-model-len", "1"], "--max-model-len: expected a size (at least 2), got '1'"),
        (["--num-threads", "100000"], "--num-threads: expected a whole number (at least 1, at most 1024)"),
        (["--max-model-len", "12q"], "--max-model-len: expected a size"),
        (["--dtype", "int3"], "--dtype: expected one of auto, bfloat16, float16, float32, got 'int3'"),
        (["--attention-split-size", "100"], "expected a size (at least 0, a multiple of 64), got '100'"),
        (["--cudagraph-capture-sizes", "1,b"], "expected whole numbers separated by commas (at least 1), got '1,b'"),
        (["--cudagraph-capture-sizes", "4,0"], "--cudagraph-capture-sizes: expected whole numbers"),
        (["--cudagraph-capture-sizes="], "--cudagraph-capture-sizes: expected whole numbers"),
        (["--port"], "--port"),
        (["--host", "a..b"], "--host: expected the name or the address of a host, got 'a..b'"),
        (["--admin-host", "a" * 64], "--admin-host: expected the name or the address of a host, got 'aaa"),
        (["--hf-overrides", "{"], "--hf-overrides: expected a JSON object, got '{'"),
        (["--override-generation-config", "[1]"], "--override-generation-config: expected a JSON object, got '[1]'"),
        (["--speculative-config", '{"a": {"b": 1, "b": 2}}'], "--speculative-config: key 'b' is given twice"),
        (["--hf-overrides.a", '{"b": 1, "b": 2}'], "--hf-overrides.a: key 'b' is given twice"),
        (["--api-key", "key other"], "--api-key: expected values separated by commas, without spaces"),
        (["--api-key", "a,,b"], "--api-key: expected a value that is not empty"),
        (["--api-key", "a", "smollm2-135m-instruct"], "--api-key: is the last word a key or the MODEL? Put MODEL"),
    ],
)
def test_bad_flags_are_named(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refusal(capsys, *argv)


def test_bad_files_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for content, message in [
        ("max-num-seq: 4", "unknown key max-num-seq; did you mean max-num-seqs?"),
        ("port: many", f"{file}: port: expected a whole number"),
        ("enable-prefix-caching: maybe", "expected true or false, got 'maybe'"),
        ("- 4", "expected keys and values"),
        ("a: [", "cannot be read as YAML"),
        ("port: 1\n\nport: 2", f"{file}: port is given on line 1 and line 3: remove one"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max-num-seqs and max_num_seqs are the same, given on line 1 and line 2"),
        ("speculative-config:\n  method: ngram\n  method: suffix", "method is given on line 2 and line 3"),
        ('speculative-config: \'{"method": 1, "method": 2}\'', "speculative-config: key 'method' is given twice"),
    ]:
        file.write_text(content)
        assert message in refusal(capsys, f"--config={file}")
    assert "cannot be read" in refusal(capsys, f"--config={tmp_path / 'none.yaml'}")


def test_yaml_values_have_their_natural_types(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "enable-prefix-caching: false\nkv-cache-memory-bytes: 2GiB\nserved-model-name: [a, b]\n"
        "gpu-memory-utilization: 0.5\nmax-model-len:\n"
    )
    parsed = parse(f"--config={file}")
    assert parsed.enable_prefix_caching is False
    assert parsed.kv_cache_memory_bytes == 2 * 1024**3
    assert parsed.served_model_name == "a,b"
    assert (parsed.gpu_memory_utilization, parsed.max_model_len) == (0.5, None)


def test_anchors_of_yaml_are_no_keys_given_twice(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("hf-overrides: &a {x: 1}\nspeculative-config: {<<: *a, x: 2}\n")
    assert parse(f"--config={file}").speculative_config == '{"x": 2}'


def test_several_keys(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("api-key: [a, b]\n")
    for parsed in (
        parse("m", "--api-key", "a", "b"),
        parse("m", "--api-key=a,b"),
        parse("m", environ={"PAGEWIRE_API_KEY": "a,b"}),
        parse("m", f"--config={file}"),
    ):
        assert (parsed.model, parsed.api_keys, parsed.own_key) == ("m", ("a", "b"), "a")
    # Where files follow, a word behind a key is one of them.
    batch = parse("--api-key", "a", "in", "out", config_class=BatchCommandConfig,
                  positional=("input_file", "output_file"))  # fmt: skip
    assert (batch.api_keys, batch.input_file, batch.output_file) == (("a",), "in", "out")


def test_lists_of_numbers_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for content in ("[4, 2, 1]", "4,2,1", "'4, 2, 1'"):
        file.write_text(f"cudagraph-capture-sizes: {content}\n")
        assert parse(f"--config={file}").cudagraph_capture_sizes == (4, 2, 1)
    assert parse("--cudagraph-capture-sizes", "8").cudagraph_capture_sizes == (8,)
    assert parse(environ={"PAGEWIRE_CUDAGRAPH_CAPTURE_SIZES": "8,16"}).cudagraph_capture_sizes == (8, 16)
    assert parse().cudagraph_capture_sizes is None


def test_environment_is_checked_but_leaves_room_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    misspelt = refusal(capsys, environ={"PAGEWIRE_MAX_NUM_SEQ": "1"})
    assert "unknown variable PAGEWIRE_MAX_NUM_SEQ; did you mean PAGEWIRE_MAX_NUM_SEQS?" in misspelt
    assert "PAGEWIRE_PORT: expected a whole number" in refusal(capsys, environ={"PAGEWIRE_PORT": "x"})
    parsed = parse(
        config_class=GatewayConfig,
        environ={
            "PAGEWIRE_MAX_NUM_SEQS": "4",  # the scheduler's
            "PAGEWIRE_CACHE_DIR": "/tmp",
            "PAGEWIRE_CPU_KERNELS": "torch",
            "PAGEWIRE_SOMETHING_ELSE": "1",
            "PAGEWIRE_API_KEY": "",  # empty is unset
            "PAGEWIRE_PORT": "tcp://10.0.0.1:8000",  # Kubernetes, for a service named pagewire
        },
    )
    assert parsed == GatewayConfig()


def test_flags_only_ignores_the_environment() -> None:
    assert parse(environ={"PAGEWIRE_PORT": "1", "PAGEWIRE_CONFIG": "none"}, flags_only=True) == ServeConfig()


def test_fields_left_out_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --listen" in refusal(capsys, "--listen=x", without=config.SET_BY_STACK)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("2048", 2048), ("2k", 2000), ("2K", 2048), ("2Ki", 2048), ("2KiB", 2048), ("3m", 3 * 10**6),
        ("4GiB", 4 * 2**30), ("4 GiB", 4 * 2**30), ("0.5G", 2**29), ("1.5k", 1500), ("1t", 10**12),
    ],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert flags.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1kb", "1kiB", "1.0001k2", "1e3", "0.3", "4 G iB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        flags.parse_size(text)


def test_an_address_may_be_in_the_brackets_of_a_url() -> None:
    assert parse("--host", "[::1]").host == "::1"


LEAST, MOST = -(2**63) + 1, 2**63 - 1


def field_values(field: dataclasses.Field[Any], type_: Any) -> st.SearchStrategy[Any]:
    """Valid values of a field."""
    base = next((t for t in typing.get_args(type_) if t is not type(None)), type_)
    valid = field.metadata["valid"] or Range()
    if field.metadata["choices"]:
        values: st.SearchStrategy[Any] = st.sampled_from(field.metadata["choices"])
    elif base is bool:
        values = st.booleans()
    elif base is int:
        low = LEAST if valid.minimum is None else int(valid.minimum)
        high = (MOST if valid.maximum is None else int(valid.maximum)) // valid.multiple_of
        values = st.sampled_from([8, 16, 64, 256]) if valid.power_of_two else st.integers(low, high)
        values = values.map(lambda value: value * valid.multiple_of)
    elif base is float:
        values = st.floats(0, valid.maximum, allow_nan=False, allow_infinity=False).filter(valid.__contains__)
    elif typing.get_origin(base) is tuple:
        values = st.lists(st.integers(int(valid.minimum or 0), MOST), min_size=1).map(tuple)
    else:
        values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
        if field.metadata["secret"]:
            values = values.map(lambda text: ",".join(filter(None, "".join(text.split()).split(","))))
        if field.metadata["kind"] == "json":
            values = st.dictionaries(values, values).map(json.dumps)
        if field.metadata["kind"] == "host":
            values = st.sampled_from(["0.0.0.0", "::", "::1", "localhost", "a.example", "bücher.example"])
        if field.metadata["secret"]:
            values = values.filter(str.isprintable)
        elif form := FORM_OF.get(field.name):
            values = st.sampled_from(VALUES[form])
        else:
            values = values.filter(str.strip)
    return values | st.just(field.default)


# Texts by form.
VALUES = {
    "path": ["/a b/ü", "a.gguf", "owner/name", "-", "a,b"],
    "addresses": ["unix:/a/b", "[::1]:1", "a.example:80,b:81"],
    "url": ["http://a:1/b", "https://a", "a:4317"],
    "hosts": ["*", "a.example,b"],
    "cluster": ["local", "a:1"],
    "name": ["a", "-x", "a=b c", "0-3|4"],
}


@st.composite
def configurations(draw: st.DrawFn) -> Any:
    config_class = draw(st.sampled_from(CONFIGS))
    types = typing.get_type_hints(config_class)
    chosen = draw(st.sets(st.sampled_from(dataclasses.fields(config_class)), max_size=8))
    return config_class(**{f.name: draw(field_values(f, types[f.name])) for f in chosen})


@given(configurations())
@example(ServeConfig(models="a.yaml"))
@example(ServeConfig(models="a.yaml", model=""))
def test_configuration_survives_the_command_line(value: Any) -> None:
    argv = flags.to_argv(value)
    environ = flags.secrets(value)
    parsed = flags.parse(type(value), argv, prog="p", description="", positional=(), environ=environ)
    # An empty variable counts as unset.
    secrets = {f.name: getattr(value, f.name) or None for f in dataclasses.fields(value) if f.metadata["secret"]}
    assert parsed == dataclasses.replace(value, **secrets)


def test_secrets_stay_off_the_command_line() -> None:
    value = GatewayConfig(api_key="hunter2")
    assert not any("hunter2" in argument for argument in flags.to_argv(value))
    assert flags.secrets(value) == {"PAGEWIRE_API_KEY": "hunter2"}


def test_child_environment_has_no_configuration() -> None:
    environ = {"PAGEWIRE_PORT": "1", "PAGEWIRE_CONFIG": "f", "PAGEWIRE_CACHE_DIR": "d", "PATH": "p"}
    assert flags.without_configuration(environ) == {"PAGEWIRE_CACHE_DIR": "d", "PATH": "p"}


@pytest.mark.parametrize("config_class", CONFIGS)
def test_help_shows_every_flag(capsys: pytest.CaptureFixture[str], config_class: type) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse("--help=all", config_class=config_class, without=())
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(config_class):
        name = flags.flag_name(field.name)[2:]
        assert f"--[no-]{name}" in text if field.type is bool else f"--{name} " in text


@pytest.mark.parametrize("topic", ["memory", "=memory"])
def test_help_of_a_group_is_that_group_in_full(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    with pytest.raises(SystemExit):
        parse(*(["--help", topic] if topic == "memory" else [f"--help{topic}"]))
    text = capsys.readouterr().out
    assert "--kv-cache-memory-bytes" in text and "--num-gpu-blocks-override" in text and "--port" not in text


def test_help_of_serve_fits_two_screens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert text.count("\n") <= 90 and "--max-model-len" in text and "--fault-injection" not in text
    assert "`pagewire serve --help=all` shows every flag in full" in " ".join(text.split())


@pytest.mark.parametrize("config_class", [BatchCommandConfig, DoctorConfig, RunConfig, TuneConfig])
def test_help_of_commands_with_a_stack_has_their_own_flags(
    capsys: pytest.CaptureFixture[str], config_class: type
) -> None:
    with pytest.raises(SystemExit):
        parse("--help", config_class=config_class, prog="pagewire this")
    text = " ".join(capsys.readouterr().out.split())
    own = {field.name for field in dataclasses.fields(config_class)} - {f.name for f in dataclasses.fields(ServeConfig)}
    assert own and all(flags.flag_name(name)[2:] in text for name in own)
    assert "--max-num-seqs N" not in text and "`pagewire serve --help` shows the common ones" in text


def test_help_of_something_unknown_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help=memroy")
    assert capsys.readouterr().out.startswith("No flag or group is named memroy; did you mean memory?\n")
