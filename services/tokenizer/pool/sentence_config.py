"""Settings of sentence-transformers for the texts of a model: prompts, and lower case."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.files.json_file import read_json_object


@dataclass(frozen=True)
class SentenceConfig:
    """The settings; by default those of a model without such files."""

    prompts: dict[str, str] = field(default_factory=dict)  # name -> text to put before an input
    default_prompt_name: str | None = None
    lowercases: bool = False


def read_sentence_config(path: Path) -> SentenceConfig:
    """Reads the files of a model's directory. Raises ValueError naming the file that is wrong."""
    texts, reading = _read(path / "config_sentence_transformers.json"), _read(path / "sentence_bert_config.json")
    prompts, default = texts.get("prompts") or {}, texts.get("default_prompt_name")
    are_named = isinstance(prompts, dict) and all(isinstance(prompt, str) for prompt in prompts.values())
    if not are_named or (default and not (isinstance(default, str) and default in prompts)):
        raise ValueError(
            f"{path}/config_sentence_transformers.json: prompts must be an object of strings, and "
            "default_prompt_name the name of one of them"
        )
    return SentenceConfig(prompts, default, bool(reading.get("do_lower_case")))


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}
