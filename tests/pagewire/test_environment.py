import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def start_gateway(first_on_path: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.argv[1:] = ['gateway'];"
        f"sys.path[:0] = [{str(first_on_path)!r}, {str(REPOSITORY)!r}];"
        "import pagewire.cli; pagewire.cli.main()"
    )
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["kernels", "gateway", "services", "protos"])
def test_foreign_package_is_named_with_its_cure(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    result = start_gateway(tmp_path)
    assert result.returncode == 1
    assert f"the Python package {name!r} in {tmp_path / name} hides Pagewire's own" in result.stderr
    assert f"pip uninstall {name}" in result.stderr and "Traceback" not in result.stderr


def test_hugging_faces_kernels_is_found_even_behind_ours(tmp_path: Path) -> None:
    metadata = tmp_path / "kernels-0.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9\n")
    result = start_gateway(tmp_path)
    assert result.returncode == 1
    assert "'kernels' 0.9 is installed" in result.stderr and "pip uninstall kernels" in result.stderr
