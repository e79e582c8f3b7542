"""The generated stubs are those of the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(REPOSITORY) for path in REPOSITORY.glob("protos/pagewire/v1/*.proto"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    options = ["-I", "protos", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *map(str, PROTOS)], cwd=REPOSITORY, check=True)
    return out


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_stubs_are_fresh(generated: Path, proto: Path) -> None:
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        stub = proto.with_name(proto.stem + suffix)
        assert (REPOSITORY / stub).read_text() == (generated / stub.relative_to("protos")).read_text(), (
            f"{stub} is stale: run `make protos`"
        )


def test_protos_follow_the_style() -> None:
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("buf is not installed beside this Python (pip install buf-bin)")
    linted = subprocess.run([buf, "lint"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_no_stub_without_its_proto() -> None:
    stubs = {path.name.partition("_pb2")[0] for path in (REPOSITORY / "protos/pagewire/v1").glob("*_pb2*")}
    assert stubs == {proto.stem for proto in PROTOS}
