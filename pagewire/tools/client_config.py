"""Flags of the command-line clients: `pagewire chat` and `pagewire generate`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pagewire.config.fields import flag
from pagewire.config.sampling_params import BY_NAME
from pagewire.wire.tls import Files


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The flags for sampling."""

    max_tokens: int | None = flag(
        None,
        "maximum number of tokens to generate (default: what the model's length allows; in chats a quarter of it)",
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


# The remedy for an answer that asks for a key.
KEY_HINT = "set PAGEWIRE_API_KEY to its key (or give --api-key, which other users of this machine can read)"


class HasTlsFlags(Protocol):
    """A configuration with the flags of TLS."""

    @property
    def ssl_certfile(self) -> str | None: ...

    @property
    def ssl_keyfile(self) -> str | None: ...

    @property
    def ssl_ca_certs(self) -> str | None: ...


def tls_files(config: HasTlsFlags, environ: Mapping[str, str] = os.environ) -> Files:
    """Returns the TLS files for a URL: those of the flags, else those of the environment."""
    return Files(
        certfile=config.ssl_certfile or environ.get("PAGEWIRE_SSL_CERTFILE"),
        keyfile=config.ssl_keyfile or environ.get("PAGEWIRE_SSL_KEYFILE"),
        ca_certs=config.ssl_ca_certs or environ.get("PAGEWIRE_SSL_CA_CERTS"),
    )


@dataclass(frozen=True, kw_only=True)
class ClientTlsFlags:
    """The TLS files of a client; $PAGEWIRE_SSL_CA_CERTS and its siblings are their defaults."""

    ssl_ca_certs: str | None = flag(
        None,
        "CAs that sign the server's certificate, in PEM (default: $PAGEWIRE_SSL_CA_CERTS, else those of the system)",
        group="connection",
    )
    ssl_certfile: str | None = flag(
        None, "certificate for a server that requires one, in PEM (default: none)", group="connection"
    )
    ssl_keyfile: str | None = flag(
        None, "private key of --ssl-certfile, in PEM (default: in the same file)", group="connection"
    )

    @property
    def tls_files(self) -> Files:
        return tls_files(self)


@dataclass(frozen=True, kw_only=True)
class ClientConfig(SamplingFlags, ClientTlsFlags):
    """The flags that the command-line clients of the public gRPC API share."""

    address: str = flag(
        "localhost:8001",
        "public gRPC address of a running stack, grpcs://host:port for TLS; or the REST URL that `pagewire ps` shows",
        group="connection",
    )
    api_key: str | None = flag(
        None, "key of a stack that requires one (default: $PAGEWIRE_API_KEY)", group="connection", secret=True
    )
    model: str = flag("", "served model name (default: the first one)", group="connection")
    seed: int | None = flag(
        None,
        "same seed, same random numbers (default: a random one)",
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
