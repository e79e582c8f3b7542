"""The values of flags of the gateway that a configuration alone does not check."""

import re
from importlib.util import find_spec

from pagewire.config.gateway import GatewayConfig
from pagewire.config.json_object import texts
from pagewire.errors import StartupError

REDIS = ("redis://", "rediss://", "unix://")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def origins(text: str) -> list[str]:
    """Reads the value of --allowed-origins. Raises StartupError."""
    found = texts(text)
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            raise StartupError(
                f"--allowed-origins: {origin!r:.200} is not an origin: give scheme, host and port as browsers do"
                " (https://example.org, without a path and in lower case), or *"
            )
    return found


def names(flag: str, text: str) -> list[str]:
    """Reads the value of --allowed-methods or --allowed-headers. Raises StartupError."""
    found = texts(text)
    if wrong := [name for name in found if not _TOKEN.fullmatch(name)]:
        raise StartupError(f"{flag}: {wrong[0]!r:.200} cannot be a name; give names as in HTTP, or *")
    return found


def check_pages(config: GatewayConfig) -> None:
    """Checks the flags for pages of other origins. Raises StartupError."""
    origins(config.allowed_origins)
    names("--allowed-methods", config.allowed_methods)
    names("--allowed-headers", config.allowed_headers)


def check_fingerprint(config: GatewayConfig) -> None:
    """Raises StartupError for a mode without its value, or a value without its mode."""
    if (config.fingerprint_mode == "custom") != (config.fingerprint_value is not None):
        raise StartupError(
            "--fingerprint-mode custom and --fingerprint-value belong together: give both, or none of them"
        )


def check_generation_store(choice: str) -> None:
    """Checks the value of --generation-store. Raises StartupError."""
    if choice.startswith(REDIS):
        if find_spec("redis") is None:
            raise StartupError("--generation-store redis://…: run `pip install 'pagewire[redis]'`")
        from redis.connection import parse_url  # deferred: most gateways have no Redis

        try:
            parse_url(choice)
        except ValueError as error:
            raise StartupError(f"--generation-store is not a Redis URL: {error}") from error
    elif choice not in ("disk", "memory"):
        # Without the value: a mistyped URL may have a password.
        raise StartupError("--generation-store: give disk, memory or a URL as redis://HOST:PORT")
