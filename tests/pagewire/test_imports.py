"""What each service may import: no line of its code names the rest, and it loads where the rest is missing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

_BLOCKER = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r} or name in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""


# folder -> what nothing in it imports, at module level or later.
FENCES = {
    "quantize": ["gateway", "services.scheduler"],
    "pagewire": ["services", "gateway", "kernels", "torch", "transformers"],
    "gateway": ["services", "kernels", "torch", "transformers", "tokenizers"],
    "services/tokenizer": [
        "gateway",
        "kernels",
        "torch",
        "transformers",
        "gguf",
        "numpy",
        "services.scheduler",
        "services.executor",
    ],
    "services/scheduler": ["gateway", "kernels", "torch", "transformers", "services.tokenizer", "services.executor"],
    "services/executor": ["gateway", "services.scheduler", "services.tokenizer"],
    "kernels": ["gateway", "services", "pagewire", "protos"],
}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


@pytest.mark.parametrize("folder", FENCES)
def test_no_line_imports_across_the_fence(folder: str) -> None:
    files = list((REPOSITORY / folder).rglob("*.py"))
    assert files
    for path in files:
        for module in imported_modules(path):
            crossed = [name for name in FENCES[folder] if module == name or module.startswith(f"{name}.")]
            assert not crossed, f"{path} imports {module}"


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
        ("gateway.main", ["torch", "transformers", "tokenizers", "numpy", "opentelemetry.sdk", "services", "kernels"]),
        (
            "services.scheduler.main",
            ["torch", "transformers", "tokenizers", "numpy", "opentelemetry", "fastapi", "gateway", "kernels"],
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
                "services.scheduler",
            ],
        ),
        ("services.executor.main", ["opentelemetry", "fastapi", "gateway", "services.scheduler", "services.tokenizer"]),
        ("services.scheduler.scheduler", ["grpc", "torch", "prometheus_client"]),
        ("pagewire.stack", ["torch", "transformers", "grpc", "opentelemetry", "services", "gateway", "kernels"]),
        ("pagewire.gateways", ["torch", "transformers", "grpc", "opentelemetry", "services", "gateway", "kernels"]),
        ("pagewire.client", ["torch", "transformers", "fastapi", "services", "gateway", "kernels"]),
        ("pagewire.bench.serve", ["grpc", "torch", "httpx", "fastapi", "services", "gateway", "kernels"]),
    ],
)
def test_imports_stay_inside_the_fence(module: str, missing: list[str]) -> None:
    result = run(f"import {module}", missing)
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
