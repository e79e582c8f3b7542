"""`--show-config`: every value, where it comes from, and what it costs or saves."""

import dataclasses
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.config.profiles import has_nvidia_driver
from pagewire.flags.costs import phrase
from pagewire.flags.given import Given
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.flags.names import fields_of, flag_name
from pagewire.flags.values import UsageError

# What a default is, where help says so of a field without one.
_DEFAULT = re.compile(r"\(default: (.*)\)$")
_BY_DEVICE = re.compile(r"(\S+) on CPU, (\S+) on CUDA")
_FORMATS = ("text", "json")


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting. source: flag, environment, file, profile, model or default, with which."""

    name: str
    value: Any
    source: str
    effect: str
    group: str


def format_of(given: Given | None) -> str | None:
    """What `--show-config` asks for: text or json; None without it, or switched off. Raises UsageError."""
    if given is None or given.text is False:
        return None
    if given.text is True or str(given.text).lower() in ("", "true"):
        return "text"
    if str(given.text) not in _FORMATS:
        raise UsageError(f"{given.source}: expected one of {', '.join(_FORMATS)}, got {given.text!r}")
    return str(given.text)


def text(config: Any, settled: Mapping[str, Given], names: Sequence[str], format: str) -> str:
    """The fields of these names; settled: those that some source has given."""
    shown = rows(config, settled, names)
    if format == "json":
        listed = {row.name: {"value": row.value, "source": row.source, "effect": row.effect} for row in shown}
        return json.dumps(listed, indent=2)
    return _table(shown)


def rows(config: Any, settled: Mapping[str, Given], names: Sequence[str]) -> list[Row]:
    facts = _facts(config)
    fields = [field for field in fields_of(type(config)) if field.name in names]
    return [_row(field, config, settled.get(field.name), facts) for field in fields]


def _facts(config: Any) -> ModelFacts | None:
    if not hasattr(config, "model"):
        return None
    return facts_of(config.model, getattr(config, "download_dir", None), getattr(config, "revision", None))


def _row(field: dataclasses.Field[Any], config: Any, given: Given | None, facts: ModelFacts | None) -> Row:
    value = getattr(config, field.name)
    source = "default"
    if given is not None:
        source = given.source if given.kind == "profile" else f"{given.kind} {given.source}"
    elif facts is not None and (of_model := _of_model(field.name, facts)):
        value, source = of_model, f"model {facts.path.name}"
    elif value is None:
        value = _stated_default(field, config)
    if field.metadata["secret"] and getattr(config, field.name) is not None:
        value = "(secret)"
    return Row(field.name, value, source, phrase(field.name, config, facts), field.metadata["group"])


def _of_model(name: str, facts: ModelFacts) -> Any:
    """What the model's files say where no source does."""
    return {"max_model_len": facts.max_len, "dtype": facts.dtype, "quantization": facts.quantization}.get(name)


def _stated_default(field: dataclasses.Field[Any], config: Any) -> Any:
    """What stands for None, in the words of the help, or for this device."""
    if (stated := _DEFAULT.search(field.metadata["help"])) is None:
        return None
    if by_device := _BY_DEVICE.fullmatch(stated[1]):
        device = getattr(config, "device", "auto")
        on_cuda = device == "cuda" or (device == "auto" and has_nvidia_driver())
        return int(by_device[2 if on_cuda else 1])
    return stated[1]


def _table(shown: Sequence[Row]) -> str:
    width = max(100, shutil.get_terminal_size((140, 0)).columns)
    name_width = max(len(flag_name(row.name)) for row in shown)
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in shown):
        lines.append(("" if not lines else "\n") + group)
        for row in (row for row in shown if row.group == group):
            value = textwrap.shorten(_value_text(row.value), 34, placeholder=" ...")
            line = f"  {flag_name(row.name):{name_width}}  {value:34}  {row.source:28}  "
            lines.append(
                textwrap.fill(row.effect, width, initial_indent=line, subsequent_indent=" " * len(line)).rstrip()
            )
            if not row.effect:
                lines[-1] = line.rstrip()
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
