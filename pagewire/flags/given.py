"""Settings of a configuration as text, before they are converted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """A setting in one source."""

    name: str  # of a field, or of a flag of vLLM; with underscores, without leading dashes
    text: str | bool
    source: str  # for messages: `--port`, `PAGEWIRE_PORT`, `config.yaml: port`
    kind: str  # flag, environment, file or profile
    path: tuple[str, ...] = ()  # keys within a JSON object, as in `--hf-overrides.rope_parameters.factor 4`
