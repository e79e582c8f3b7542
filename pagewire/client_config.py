"""Flags of the command-line clients: `pagewire chat` and `pagewire generate`."""

from dataclasses import dataclass

from pagewire.fields import NOT_NEGATIVE, Range, flag


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What the command-line clients of the public gRPC API have in common."""

    address: str = flag("localhost:8001", "public gRPC address of a running stack", group="connection")
    model: str = flag("", "served model name (default: the only one)", group="connection")
    max_tokens: int | None = flag(
        None,
        "most tokens to generate (default: what the model's length allows)",
        group="generation",
        valid=Range(minimum=1, maximum=2**31 - 1),
    )
    temperature: float | None = flag(
        None, "0 = always the most probable token (default: 1)", group="generation", valid=NOT_NEGATIVE
    )
    top_p: float | None = flag(
        None,
        "sample from the most probable tokens with this total probability (default: 1)",
        group="generation",
        valid=Range(above=0, maximum=1),
    )
    seed: int | None = flag(
        None,
        "same seed, same text (default: a random one)",
        group="generation",
        valid=Range(minimum=-(2**63), maximum=2**63 - 1),
    )


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ClientConfig):
    """`pagewire chat`."""

    system: str | None = flag(None, "system message that opens the conversation", group="generation")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ClientConfig):
    """`pagewire generate`."""

    prompt: str | None = flag(None, "text to continue (default: standard input)", group="generation")
    chat: bool = flag(False, "send PROMPT as a chat message instead of text to continue", group="generation")
