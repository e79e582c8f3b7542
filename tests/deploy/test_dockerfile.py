import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.kernels.cpu.runtime.build import cache_dir
from tests.deploy.stack_files import CONFIGURATIONS, DOCKERFILE, ROOT, targets

SERVICES = sorted(CONFIGURATIONS)
requirements = runpy.run_path(str(ROOT / "deploy" / "requirements.py"))["requirements"]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_hadolint_is_content():
    finished = hadolint(DOCKERFILE)
    assert finished.returncode == 0, finished.stdout


def test_hadolint_finds_a_shell_form_entrypoint(tmp_path):
    careless = tmp_path / "Dockerfile"
    careless.write_text(DOCKERFILE.read_text() + "ENTRYPOINT python -m pagewire.cli executor\n")
    finished = hadolint(careless)
    assert finished.returncode != 0
    assert "DL3025" in finished.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_process_one_as_an_ordinary_user(name):
    target = targets()[name]
    assert target.last("USER") == "10001:10001"
    assert target.instructions[-1][0] == "ENTRYPOINT"
    assert target.command("ENTRYPOINT") == ["python", "-m", "pagewire.cli", name]
    assert target.last("STOPSIGNAL") == "SIGTERM"


@pytest.mark.parametrize("name", SERVICES)
def test_image_holds_the_packages_of_its_extra_only(name):
    stages = targets()
    (source,) = [copy for copy in stages[name].all("COPY") if "-packages " in copy]
    stage = stages[source.split()[0].removeprefix("--from=")]
    extras = re.findall(r"requirements\.py ([\w ]+) >", " ".join(stage.all("RUN")))
    # The tokenizer prepares images, too.
    own = "tokenizer images" if name == "tokenizer" else name
    assert extras == [own]


def test_gateway_and_scheduler_need_neither_torch_nor_transformers():
    for name in ("gateway", "scheduler"):
        needed = " ".join(requirements(ROOT / "pyproject.toml", [name]))
        assert "grpcio" in needed
        assert "torch" not in needed
        assert "transformers" not in needed
    assert "torch==" in " ".join(requirements(ROOT / "pyproject.toml", ["executor"]))


def test_an_extra_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError):
        requirements(ROOT / "pyproject.toml", ["gatewya"])


START = """
import importlib, pathlib, sys
app, root = map(pathlib.Path, sys.argv[1:3])
sys.path = [str(app), *(path for path in sys.path if path and pathlib.Path(path).resolve() != root)]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
module = importlib.import_module(sys.argv[3])
assert app in pathlib.Path(module.__file__).parents, module.__file__
"""


@pytest.mark.parametrize("name", SERVICES)
def test_image_holds_the_folders_that_its_service_imports(name, tmp_path):
    for source, destination in targets()[name].copied():
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / destination, symlinks=True, ignore=ignored)
        else:
            (tmp_path / destination).mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / destination)
    folder = "gateway" if name == "gateway" else f"services/{name}"
    assert (tmp_path / folder).is_dir()
    module = f"pagewire.{folder.replace('/', '.')}.main"
    finished = subprocess.run(
        [sys.executable, "-P", "-c", START, tmp_path, ROOT, module],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PAGEWIRE_CACHE_DIR": str(cache_dir()), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_build_context_holds_what_the_dockerfile_copies():
    kept = {
        line.removeprefix("!").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    sources = {source for target in targets().values() for source, _ in target.copied()}
    assert all(any(source.rstrip("/").startswith(path) for path in kept) for source in sources)
    assert all(any(source.startswith(path) for source in sources) for path in kept), "copied by no stage"


@pytest.mark.parametrize("name", SERVICES)
def test_each_image_holds_the_bill_of_its_packages(name):
    (source,) = [copy for copy in targets()[name].all("COPY") if "-packages " in copy]
    stage = targets()[source.split()[0].removeprefix("--from=")]
    assert "--output-file /opt/venv/sbom.cdx.json /opt/venv" in stage.all("RUN")[-1], "after the last package"


@pytest.mark.parametrize("name", ["gateway", "scheduler"])
def test_images_of_plain_python_have_no_shell_and_try_their_imports(name):
    assert targets()["slim"].base == "scratch"
    target = targets()[name]
    assert target.command("RUN")[:2] == ["python", "-c"], "without a shell"
    assert "pagewire.wire.health" in target.command("RUN")[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot is root's")
def test_the_small_root_is_enough_for_python(tmp_path):
    root = tmp_path / "root"
    subprocess.run([sys.executable, str(ROOT / "deploy" / "slim_root.py"), str(root)], check=True, timeout=60)
    python = Path(sys.base_prefix, "bin", "python")
    code = "import asyncio, ctypes, socket, sqlite3, ssl, zlib; print(len(ssl.create_default_context().get_ca_certs()))"
    command = ["chroot", str(root), str(python), "-c", code]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) > 0, "certificates of the host"
    assert not (root / "bin" / "sh").exists()
