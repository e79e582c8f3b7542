"""Schemathesis over the line with the fake executor, as `tests/clients/fuzz.py` runs it over whole stacks."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chaos.fuzz.line import Finding, FuzzLine

SCRIPT = Path(__file__).parents[2] / "clients" / "fuzz.py"
_SHOWN = 12000  # characters of its report


async def fuzz(line: FuzzLine, num_examples: int, seed: int) -> None:
    """Runs that many examples of each operation. Installs Schemathesis for as long as it takes. Raises Finding."""
    with tempfile.TemporaryDirectory(prefix="pw-st-") as folder:
        python = await asyncio.to_thread(install, Path(folder))
        process = await asyncio.create_subprocess_exec(
            python,
            SCRIPT,
            "--no-color",
            "--max-examples",
            str(num_examples),
            "--seed",
            str(seed),
            cwd=folder,
            env={**os.environ, "PAGEWIRE_CHAT": str(line.http.base_url), "PAGEWIRE_EMBED": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        report, _ = await process.communicate()
        if process.returncode:
            raise Finding(report.decode(errors="replace")[-_SHOWN:])
    await line.check()


def install(folder: Path) -> Path:
    """The interpreter of a new environment."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "schemathesis"], check=True
    )
    return python
