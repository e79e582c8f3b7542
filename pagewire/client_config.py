"""Flags of the command-line clients: `pagewire chat` and `pagewire generate`."""

from dataclasses import dataclass

from pagewire.fields import flag
from pagewire.sampling_params import BY_NAME


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """How tokens are chosen."""

    max_tokens: int | None = flag(
        None,
        "maximum number of tokens to generate (default: what the model's length allows)",
        group="generation",
        valid=BY_NAME["max_tokens"].valid,
    )
    temperature: float | None = flag(
        None,
        "0 = always the most probable token (default: the model's, or 1; in chats 0.6)",
        group="generation",
        valid=BY_NAME["temperature"].valid,
    )
    top_p: float | None = flag(
        None,
        "sample from the most probable tokens with this total probability (default: the model's, or 1; in chats 0.9)",
        group="generation",
        valid=BY_NAME["top_p"].valid,
    )


@dataclass(frozen=True, kw_only=True)
class ClientConfig(SamplingFlags):
    """What the command-line clients of the public gRPC API have in common."""

    address: str = flag("localhost:8001", "public gRPC address of a running stack", group="connection")
    api_key: str | None = flag(
        None, "key of a stack that asks for one (default: $PAGEWIRE_API_KEY)", group="connection", secret=True
    )
    model: str = flag("", "served model name (default: the only one)", group="connection")
    seed: int | None = flag(
        None,
        "same seed, same text (default: a random one)",
        group="generation",
        valid=BY_NAME["seed"].valid,
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
