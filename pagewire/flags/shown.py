"""The output of `--show-config`: every value with its source and what it costs or saves."""

import dataclasses
import json
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagewire.config.profiles import runs_on_cuda
from pagewire.config.speculation import AUTO, Speculation, SpeculationConfig
from pagewire.files.models import default_served_name
from pagewire.flags.costs import phrase, size_text
from pagewire.flags.given import Given
from pagewire.flags.help import IN_BYTES, place_of
from pagewire.flags.model_facts import ModelFacts, facts_of
from pagewire.flags.names import fields_of, flag_name
from pagewire.flags.values import UsageError

# The default in a help text, for a field with the default None.
_DEFAULT = re.compile(r"\(default: (.*)\)$")
_BY_DEVICE = re.compile(r"(\S+) on CPU, (\S+) on CUDA")
# Flag -> field of the settings that the flags of speculation result in.
_DRAFTING = {"speculative_config": "", "spec_method": "method", "spec_tokens": "num_speculative_tokens"}
_FORMATS = ("text", "json")
_VALUE_WIDTH = 36


@dataclasses.dataclass(frozen=True)
class Row:
    """A setting. source: flag, environment, file, profile, model or default; origin: the flag, variable or file."""

    name: str
    value: Any
    source: str
    origin: str
    effect: str
    group: str
    in_bytes: bool


def format_of(given: Given | None) -> str | None:
    """Returns the format of `--show-config`, text or json; None if it is absent or off. Raises UsageError."""
    if given is None or given.text is False:
        return None
    if given.text is True or str(given.text).lower() in ("", "true"):
        return "text"
    if str(given.text) not in _FORMATS:
        raise UsageError(f"{given.source}: expected one of {', '.join(_FORMATS)}, got {given.text!r}")
    return str(given.text)


def text(config: Any, settled: Mapping[str, Given], names: Sequence[str], format: str) -> str:
    """Returns the output for the fields of these names. settled: the settings of all sources."""
    shown = rows(config, settled, names)
    if format == "json":
        listed = {
            row.name: {"value": row.value, "source": row.source, "origin": row.origin, "effect": row.effect}
            for row in shown
        }
        return json.dumps(listed, indent=2)
    return _table(shown)


def rows(config: Any, settled: Mapping[str, Given], names: Sequence[str]) -> list[Row]:
    """Returns rows in the order of `--help`. Unused older names of flags are left out."""
    facts = _facts(config)
    fields = [
        field
        for field in fields_of(type(config))
        if field.name in names and (field.name in settled or not field.metadata["help"].startswith("older name of"))
    ]
    fields.sort(key=lambda field: place_of(field.metadata["group"]))
    return [_row(field, config, settled.get(field.name), facts) for field in fields]


def _facts(config: Any) -> ModelFacts | None:
    if not hasattr(config, "model"):
        return None
    return facts_of(config.model, *(getattr(config, name, None) for name in ("download_dir", "revision", "gguf")))


def _row(field: dataclasses.Field[Any], config: Any, given: Given | None, facts: ModelFacts | None) -> Row:
    value = getattr(config, field.name)
    source = origin = "default"
    if given is not None:
        source, origin = given.kind, given.source
    elif facts is not None and (of_model := _of_model(field.name, facts)):
        value, source, origin = of_model, "model", str(facts.path)
    elif value is None and field.name not in _DRAFTING:
        value = _stated_default(field, config)
    elif field.name in _DRAFTING:
        value = _of_drafts(field.name, config)
    if field.metadata["secret"] and getattr(config, field.name) is not None:
        value = "(secret)"
    in_bytes = field.metadata["kind"] == "size" and (field.name.endswith(IN_BYTES))
    return Row(field.name, value, source, origin, phrase(field.name, config, facts), field.metadata["group"], in_bytes)


def _of_drafts(name: str, config: SpeculationConfig) -> Any:
    """Returns the value of a flag of speculation that follows from the others; None if there is none."""
    drafts = Speculation.of(config)
    if name == "spec_method" and drafts is not None and drafts.if_possible:
        return AUTO
    if drafts is None:
        return "no drafts" if name == "speculative_config" else None
    return None if name == "speculative_config" else getattr(drafts, _DRAFTING[name])


def _of_model(name: str, facts: ModelFacts) -> Any:
    """Returns a value from the model's files, for a field that no source sets."""
    return {"max_model_len": facts.max_len, "dtype": facts.dtype, "quantization": facts.quantization}.get(name)


def _stated_default(field: dataclasses.Field[Any], config: Any) -> Any:
    """Returns the value that None stands for, in the words of the help text, or for this device."""
    if field.name == "served_model_name" and hasattr(config, "model"):
        return default_served_name(config.model)
    if (stated := _DEFAULT.search(field.metadata["help"])) is None:
        return None
    if by_device := _BY_DEVICE.fullmatch(stated[1]):
        return int(by_device[2 if runs_on_cuda(getattr(config, "device", "auto")) else 1])
    return stated[1]


def _table(shown: Sequence[Row]) -> str:
    width = max(100, shutil.get_terminal_size((160, 0)).columns)
    name_width = max(len(flag_name(row.name)) for row in shown)
    source_width = max(len(_source_text(row)) for row in shown)
    lines: list[str] = []
    for group in dict.fromkeys(row.group for row in shown):
        lines.append(("" if not lines else "\n") + group)
        for row in (row for row in shown if row.group == group):
            value = _cut(_value_text(row))
            line = f"  {flag_name(row.name):{name_width}}  {value:{_VALUE_WIDTH}}  {_source_text(row):{source_width}}  "
            lines.append(
                textwrap.fill(row.effect, width, initial_indent=line, subsequent_indent=" " * len(line)).rstrip()
            )
            if not row.effect:
                lines[-1] = line.rstrip()
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else text[: _VALUE_WIDTH - 4] + " ..."


def _source_text(row: Row) -> str:
    """Returns the source, with its origin if the name of the setting does not imply it."""
    if row.source == "flag" and row.origin not in (flag_name(row.name), row.name.upper()):
        return f"flag {row.origin.partition('=')[0]}"
    if row.source == "file":
        return f"file {Path(row.origin.rpartition(': ')[0]).name}"
    return row.origin if row.source == "profile" else row.source


def _value_text(row: Row) -> str:
    value = row.value
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if row.in_bytes and isinstance(value, int):
        return size_text(value)
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
