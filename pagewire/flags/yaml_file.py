"""Reads the files of `--config` and `--models` as YAML, in which a key that occurs twice is an error."""

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
    return _read(path, "--config")[0]


def read_list(path: Path, key: str, flag: str) -> tuple[Any, list[int]]:
    """Returns the content of a YAML file, and the lines on which the items of the list at `key` begin. Raises
    UsageError.

    flag: names the file.
    """
    content, root = _read(path, flag)
    pairs = root.value if isinstance(root, yaml.MappingNode) else ()
    lists = [value for name, value in pairs if name.value == key and isinstance(value, yaml.SequenceNode)]
    return content, [item.start_mark.line + 1 for one in lists for item in one.value]


def _read(path: Path, flag: str) -> tuple[Any, yaml.Node | None]:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return None, None
        if isinstance(root, yaml.MappingNode):
            _check(root, lambda key: key.replace("-", "_"))
        return loader.construct_document(root), root
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{flag} {path}: cannot be read as YAML: {error}") from error


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
