"""Writes base/pagewire.yaml and overlays/group/executor.yaml as the Helm chart renders them: it is the one source.

python -m deploy.kustomize.render      # needs helm
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHART = HERE.parent / "helm" / "pagewire"


def helm() -> str | None:
    """The program, also of the environment that runs this."""
    return shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")


def template(*arguments: str) -> str:
    """What the chart makes of these values, with the namespace left open. Raises CalledProcessError."""
    command = [helm() or "helm", "template", "pagewire", str(CHART), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def files() -> Iterator[tuple[Path, str]]:
    yield HERE / "base" / "pagewire.yaml", template()
    group = template("-f", str(CHART / "values-gpu.yaml"), "-f", str(CHART / "values-group.yaml"))
    (executor,) = [one for one in group.split("---\n") if "kind: LeaderWorkerSet" in one]
    yield HERE / "overlays" / "group" / "executor.yaml", executor


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
