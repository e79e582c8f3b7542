"""The imports that each service may have: no line of its code names the rest, and it loads where the rest is
missing."""

import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.house.graph import REPOSITORY, imported, imports

_BLOCKER = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r} or name in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


# The features of the scheduler, which join its core by seams.
_FEATURES = [
    f"services.scheduler.{room}"
    for room in ("admission", "fairness", "grammars", "placement", "speculation", "suspicion", "tiers", "weights")
]
_NO_IO = ["services.scheduler.service", "services.scheduler.observed", "grpc", "prometheus_client"]
_GATEWAY_FEATURES = [
    f"gateway.{name}"
    for name in (
        "batches",
        "chat",
        "completions",
        "dialects",
        "files",
        "kept",
        "messages",
        "models",
        "operation",
        "page",
    )
] + ["gateway.responses", "gateway.vectors"]
# folder -> what nothing in it imports, at module level or later; our own names without `pagewire.`
FENCES = {
    "pagewire": ["services", "gateway", "kernels", "torch", "transformers"],
    "gateway": ["services", "kernels", "quantize", "pagewire.tools", "torch", "transformers", "tokenizers"],
    # The base of all APIs, and the part that runs a generation: neither imports an API or another feature.
    "gateway/core": ["gateway.generation", "gateway.http", "gateway.schema", "gateway.store", *_GATEWAY_FEATURES],
    "gateway/generation": ["gateway.http", "gateway.store", *_GATEWAY_FEATURES],
    "services/tokenizer": [
        "gateway",
        "kernels",
        "quantize",
        "services.scheduler",
        "services.executor",
        "pagewire.tools",
        "torch",
        "transformers",
        "gguf",
        "numpy",
    ],
    "services/scheduler": [
        "gateway",
        "kernels",
        "quantize",
        "services.tokenizer",
        "services.executor",
        "pagewire.tools",
        "torch",
        "transformers",
        "numpy",
    ],
    **{f"services/scheduler/{room}": [*_FEATURES, *_NO_IO] for room in ("values", "memory", "costs", "core")},
    "services/scheduler/observed": [*_FEATURES, "services.scheduler.service", "grpc"],
    "services/scheduler/service": _FEATURES,
    "services/executor": ["pagewire.tools", "gateway", "quantize", "services.scheduler", "services.tokenizer"],
    # What is built of what: layers, models of layers, loading of all.
    "services/executor/layers": ["services.executor.models", "services.executor.loading"],
    "services/executor/models": ["services.executor.loading"],
    "services/executor/loading/weights": ["services.executor.loading.quantization"],
    "quantize": ["gateway", "services.scheduler"],
    "kernels": ["gateway", "services", "quantize", "v1", "grpc"],
    "kernels/reference": ["kernels.ops", "kernels.triton", "kernels.cpu", "triton"],
    "kernels/fallback": ["kernels.ops", "kernels.triton", "triton"],
    "kernels/triton": ["kernels.cpu"],
    "kernels/cpu": ["triton"],
}
# What runs in processes of its own, which import what their service does not; and the doctor, which asks the executor's
# own arithmetic what fits, and for its kernels, where that is installed.
EXEMPT = {
    "services/tokenizer/images/image_processor.py": {"transformers", "numpy"},
    "pagewire/tools/doctor/model.py": {"services", "torch"},
    "pagewire/tools/doctor/gpu.py": {"torch"},
    "pagewire/tools/doctor/kernels.py": {"kernels"},
}
# The rooms of `pagewire/`, from the ground up: each imports only what stands above it in this list. `__init__.py` and
# the command import tools when they are used, so they come last.
FLOORS = [
    {"errors.py", "progress_line.py", "version.py"},
    {"config"},
    {"process"},
    {"telemetry"},
    {"files"},
    {"wire"},
    {"client.py"},
    {"flags"},
    {"stack"},
    {"batch"},
    {"tools"},
    {"__init__.py", "cli.py"},
    {"__main__.py"},
]
# What lies at the top of the repository; `pagewire/` only links to it.
OURS = {"gateway", "kernels", "quantize", "services", "v1"}


def full_name(name: str) -> str:
    return f"pagewire.{name}" if name.partition(".")[0] in OURS else name


@pytest.mark.parametrize("folder", FENCES)
def test_no_line_imports_across_the_fence(folder: str) -> None:
    root = REPOSITORY / folder
    files = [path for path in root.rglob("*.py") if not (root / path.relative_to(root).parts[0]).is_symlink()]
    assert files
    for path in files:
        for module in imports(path):
            exempt = EXEMPT.get(str(path.relative_to(REPOSITORY)), set())
            fenced = [full_name(name) for name in FENCES[folder] if name not in exempt]
            assert not [name for name in fenced if module == name or module.startswith(f"{name}.")], f"{path}: {module}"


def edges(folder: str) -> Iterator[tuple[Path, Path]]:
    """Yields (file, file that it imports) for the imports anywhere in the files of a folder."""
    root = REPOSITORY / folder
    own = [path for path in root.rglob("*.py") if not (root / path.relative_to(root).parts[0]).is_symlink()]
    for path in own:
        for other in imported(path) & set(own):
            yield path, other


@pytest.mark.parametrize(
    "folder",
    ["gateway", "kernels", "pagewire", "quantize", "services/executor", "services/scheduler", "services/tokenizer"],
)
def test_nothing_imports_what_imports_it(folder: str) -> None:
    """Neither a file, nor the folder that a file lies in."""
    files, folders = TopologicalSorter[Path](), TopologicalSorter[Path]()
    found = list(edges(folder))
    assert found
    for importer, other in found:
        files.add(importer, other)
        # Files that lie in the folder itself stand for themselves.
        parts = [path if path.parent == REPOSITORY / folder else path.parent for path in (importer, other)]
        if parts[0] != parts[1]:
            folders.add(*parts)
    files.prepare()
    folders.prepare()


def test_floors() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for importer, other in edges("pagewire"):
        upper, lower = (floor[path.relative_to(REPOSITORY / "pagewire").parts[0]] for path in (importer, other))
        assert upper >= lower, f"{importer} imports {other}, which is on a higher floor"


def test_every_folder_is_fenced() -> None:
    services = {f"services/{path.name}" for path in (REPOSITORY / "services").iterdir() if path.is_dir()}
    folders = services - {"services/__pycache__"} | {path.name for path in REPOSITORY.iterdir() if path.name in OURS}
    assert folders - {"services"} | {"pagewire"} <= FENCES.keys()


def test_kernels_import_nothing_else_of_ours() -> None:
    for path in (REPOSITORY / "kernels").rglob("*.py"):
        ours = {module for module in imports(path) if module.partition(".")[0] == "pagewire"}
        # `from pagewire import kernels` would be "pagewire" and "pagewire.kernels".
        assert all(module.startswith("pagewire.kernels") for module in ours), f"{path}: {ours}"


def run(code: str, missing: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BLOCKER.format(missing=missing) + code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        (
            "gateway.main",
            ["torch", "transformers", "tokenizers", "numpy", "opentelemetry.sdk", "services", "kernels", "quantize"],
        ),
        (
            "services.scheduler.main",
            [
                "torch",
                "transformers",
                "tokenizers",
                "numpy",
                "opentelemetry",
                "fastapi",
                "gateway",
                "kernels",
                "quantize",
                "services.tokenizer",
                "services.executor",
            ],
        ),
        (
            "services.tokenizer.main",
            [
                "torch",
                "transformers",
                "gguf",
                "tqdm",
                "opentelemetry",
                "fastapi",
                "gateway",
                "kernels",
                "quantize",
                "services.scheduler",
                "services.executor",
            ],
        ),
        (
            "services.executor.main",
            ["opentelemetry", "fastapi", "gateway", "quantize", "services.scheduler", "services.tokenizer"],
        ),
        ("services.scheduler.core.scheduler", ["grpc", "torch", "prometheus_client"]),
        # An op's definition comes before all of its implementations, which load on first use.
        ("kernels.ops kernels.quantized", ["triton", "kernels.triton", "kernels.cpu", "kernels.reference"]),
        pytest.param("quantize.command", ["fastapi", "gateway", "services.scheduler"], marks=pytest.mark.slow),
        *(
            (module, ["torch", "transformers", *missing, "services", "gateway", "kernels", "quantize"])
            for module, missing in {
                "pagewire.stack.stack pagewire.stack.gateways": ["grpc", "opentelemetry"],
                "pagewire.client": ["fastapi"],
                "pagewire.tools.bench.serve": ["grpc", "httpx", "fastapi"],
            }.items()
        ),
    ],
)
def test_imports_stay_inside_the_fence(module: str, missing: list[str]) -> None:
    result = run("\n".join(f"import {full_name(name)}" for name in module.split()), list(map(full_name, missing)))
    assert result.returncode == 0, result.stderr


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import pagewire.cli\n"
        "try: pagewire.cli.main(['executor', '--help'])\n"
        "except SystemExit as e: assert e.code == 0"
    )
    result = run(code, ["torch", "grpc", "yaml", "opentelemetry", "uvloop", "transformers"])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("service", "missing"), [("gateway", "fastapi"), ("executor", "torch")])
def test_missing_extra_is_named(service: str, missing: str) -> None:
    result = run(f"import pagewire.cli; pagewire.cli.main([{service!r}])", [missing])
    assert result.returncode == 1
    assert f"'{missing}' is not installed: pip install 'pagewire[{service}]'" in result.stderr
    assert "Traceback" not in result.stderr
