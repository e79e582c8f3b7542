import os
import subprocess
from pathlib import Path

from tests.deploy.stack_files import ROOT

SCRIPT = ROOT / "deploy" / "podman-up.sh"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_unknown_command_explains_the_usage(tmp_path):
    finished = run("upp", STATE_DIR=str(tmp_path / "state"))
    assert finished.returncode == 2
    assert "podman-up.sh down" in finished.stdout
    assert not (tmp_path / "state").exists()


def test_missing_tools_are_named_before_anything_is_done(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "dirname", "id", "mkdir"):
        (folder / tool).symlink_to(next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / tool).exists()) / tool)
    finished = run("build", PATH=str(folder), STATE_DIR=str(tmp_path / "state"))
    assert finished.returncode == 1
    assert "apt-get install podman" in finished.stderr or "run this as root" in finished.stderr
    assert not (tmp_path / "state").exists()
