"""Settings of all sources as settings of fields; acts on the tables of `pagewire.config.vllm_flags`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pagewire.config import json_object, vllm_flags
from pagewire.flags.given import Given
from pagewire.flags.names import flag_name
from pagewire.flags.values import UsageError, json_value, parse_switch


class Answers:
    """Converts settings to settings of fields; `lines` report to the user how flags of vLLM were handled."""

    def __init__(self, fields: Mapping[str, dataclasses.Field[Any]]) -> None:
        self._fields = fields
        self.lines: list[str] = []

    def settle(self, given: Iterable[Given]) -> dict[str, Given]:
        """Returns the last setting of each field, or of "profile". Raises UsageError for a refused flag or value."""
        settled: dict[str, Given] = {}
        for setting in given:
            for meant in self._of(setting):
                settled[meant.name] = _joined(settled.get(meant.name), meant)
        return settled

    def _of(self, given: Given) -> list[Given]:
        if given.name in self._fields:
            return self._of_value(given)
        if given.name == "profile":
            return [given]
        return self._of_flag(given, vllm_flags.FLAGS[given.name.replace("_", "-")])

    def _of_value(self, given: Given) -> list[Given]:
        value = vllm_flags.VALUES.get(given.name, {}).get(str(given.text))
        if value is None:
            return [given]
        if value.refused:
            raise UsageError(f"{given.source} {given.text}: {value.why}")
        if value.why:
            self._say(f"{given.source} {given.text}: " + ("" if value.means else "ignored: ") + value.why)
        return [] if value.means is None else [dataclasses.replace(given, text=value.means)]

    def _of_flag(self, given: Given, entry: vllm_flags.VllmFlag) -> list[Given]:
        is_off = entry.takes == "switch" and not parse_switch(given.text, given.source)
        if entry.verdict == vllm_flags.REFUSED:
            if is_off or str(given.text) in entry.harmless:
                self._say(f"{given.source}{'' if is_off else f' {given.text}'}: has no effect")
                return []
            raise UsageError(f"{given.source} is not supported: {entry.why}")
        if entry.verdict == vllm_flags.IGNORED:
            self._say(f"{given.source}: ignored: {entry.why}")
            return []
        return self._of_renamed(given, entry)

    def _of_renamed(self, given: Given, entry: vllm_flags.VllmFlag) -> list[Given]:
        text = str(parse_switch(given.text, given.source)) if entry.takes == "switch" else str(given.text)
        if text in entry.refused:
            raise UsageError(f"{given.source} {text}: {entry.refused[text]}")
        if entry.values and text not in entry.values:
            raise UsageError(f"{given.source}: expected one of {', '.join(entry.values)}, got {text!r}")
        try:
            becomes = entry.values.get(text, {entry.to: entry.convert(text) if entry.convert else text})
        except ValueError as error:
            raise UsageError(f"{given.source}: {error}, got {text!r}") from error
        if missing := [name for name in becomes if name not in self._fields and name != "profile"]:
            raise UsageError(f"{given.source}: {flag_name(missing[0])} belongs to another service")
        now = " ".join(f"{flag_name(name)} {value}" for name, value in becomes.items())
        meaning = f"now {now}" if now else "is the case anyway"
        self._say(f"{given.source}: {meaning}" + (f": {entry.why}" if entry.why else ""))
        return [dataclasses.replace(given, name=name, text=value, path=()) for name, value in becomes.items()]

    def _say(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)


def _joined(before: Given | None, after: Given) -> Given:
    """Returns `after`, or both merged if they are JSON objects that are given piece by piece."""
    pieces = after.path or (after.name == "hf_overrides" and before is not None and before.source != after.source)
    if not pieces:
        return after
    value = _nested(after) if after.path else json_value(str(after.text), after.source)
    if before is not None:
        value = _merged(json_value(str(before.text), before.source), value)
    return dataclasses.replace(after, text=json.dumps(value), path=())


def _nested(given: Given) -> dict[str, Any]:
    """Returns {"a": {"b": 4}} for `.a.b 4`; text that is not JSON is a string."""
    try:
        value = json_object.loads(str(given.text))
    except json.JSONDecodeError:
        value = given.text
    except ValueError as error:
        raise UsageError(f"{given.source}: {error}") from error
    for key in reversed(given.path):
        value = {key: value}
    return value


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(under[key], value) if isinstance(value, dict) and isinstance(under.get(key), dict) else value
        for key, value in over.items()
    }
    return under | both
