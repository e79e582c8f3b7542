"""Reads the file of `--config` as YAML, in which a key that occurs twice is an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pagewire.flags.values import UsageError

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Raises UsageError for an object that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _check(node, lambda key: key)
        return super().construct_mapping(node, deep)


def read(path: Path) -> Any:
    """Returns the content of a YAML file. Raises UsageError."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return None
        if isinstance(root, yaml.MappingNode):
            _check(root, lambda key: key.replace("-", "_"))
        return loader.construct_document(root)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: cannot be read as YAML: {error}") from error


def _check(node: yaml.MappingNode, name_of: Callable[[str], str]) -> None:
    """Raises UsageError for a key that occurs twice. name_of: maps keys with the same meaning to the same name."""
    seen: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        first = seen.setdefault(name_of(key.value), key)
        if first is not key:
            lines = f"line {first.start_mark.line + 1} and line {key.start_mark.line + 1}"
            both = f"{key.value} is" if first.value == key.value else f"{first.value} and {key.value} are the same,"
            raise UsageError(f"{both} given on {lines}: remove one")
