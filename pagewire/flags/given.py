"""What the sources of a configuration say, as text, before anybody knows what it means."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """What one source says of one setting."""

    name: str  # as spelled, with underscores and without dashes before it: of a field, or of a flag of vLLM's
    text: str | bool
    source: str  # for messages: `--port`, `PAGEWIRE_PORT`, `config.yaml: port`
    kind: str  # flag, environment, file or profile
    path: tuple[str, ...] = ()  # keys within its JSON object, of `--hf-overrides.rope_parameters.factor 4`
