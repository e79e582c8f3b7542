"""Prints what pyproject.toml requires for the extras named: the packages of one image, without the project itself.

python deploy/requirements.py gateway > gateway.txt
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The dependencies every service has, then those of each extra. Raises KeyError for an extra that is not there."""
    project = tomllib.loads(pyproject.read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
