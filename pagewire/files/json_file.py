"""The JSON files of a model."""

import json
from pathlib import Path
from typing import Any

from pagewire.files.damaged_file import remedy


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ValueError, which names the file, what is wrong with it and the
    remedy."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as JSON ({error}); {remedy(file)}") from error
    except RecursionError as error:
        raise ValueError(f"{file}: cannot be read as JSON (nested too deeply); {remedy(file)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object; {remedy(file)}")
    return value
