"""`pagewire keys add FILE NAME`: a new key for --api-key-file."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from pagewire import flags
from pagewire.config.fields import NOT_NEGATIVE, Range, flag
from pagewire.errors import StartupError
from pagewire.files.writing import unwritable
from pagewire.wire.keys.entry import Key, digest_of, is_name, new_key, parse_keys

_USAGE = "usage: pagewire keys add FILE NAME [flags]\nsee `pagewire keys add --help`"


@dataclass(frozen=True, kw_only=True)
class KeysAddConfig:
    """`pagewire keys add`."""

    file: str = flag("", "file of --api-key-file, created if it is missing", group="key")
    name: str = flag("", "the owner of the key: the tenant in scheduling and in the log", group="key")
    weight: float = flag(1.0, "share of the tenant among others", group="key", valid=Range(above=0, maximum=1000))
    requests_per_minute: int = flag(
        0, "limit in each process that clients reach; 0 = no limit", group="key", valid=NOT_NEGATIVE
    )
    tokens_per_minute: int = flag(
        0, "limit of prompts and outputs together, over all APIs; 0 = no limit", group="key", valid=NOT_NEGATIVE
    )
    max_running: int = flag(
        0, "requests that may run at once in each process; 0 = no limit", group="key", valid=NOT_NEGATIVE
    )
    admin: bool = flag(
        False,
        "its owner may change the service for all tenants: /v1/admin over REST, AdminService over gRPC",
        group="key",
    )


def main(argv: list[str]) -> int:
    """Prints the key, which is not stored, and returns the exit code. Raises StartupError."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if argv[:1] != ["add"]:
        print(_USAGE, file=sys.stderr)
        return 2
    config = flags.parse(
        KeysAddConfig,
        argv[1:],
        prog="pagewire keys add",
        description="Makes a key, writes its hash to FILE, and prints the key, which is not stored. Servers with"
        " --api-key-file FILE know it within a second. To revoke a key, remove its line.",
        positional=("file", "name"),
        flags_only=True,
    )
    if not config.file or not is_name(config.name):
        raise StartupError("name a FILE, and as NAME up to 64 letters, digits and ._@-: pagewire keys add FILE NAME")
    print(add(Path(config.file).expanduser(), config))
    print("shown only once: give it to its owner", file=sys.stderr)
    return 0


def add(path: Path, config: KeysAddConfig) -> str:
    """Adds a key to the file, and returns it. Raises StartupError for a file that already has the name or cannot be
    written."""
    secret = new_key()
    key = Key(
        name=config.name,
        digest=digest_of(secret.encode()),
        weight=config.weight,
        requests_per_minute=config.requests_per_minute,
        tokens_per_minute=config.tokens_per_minute,
        max_running=config.max_running,
        admin=config.admin,
    )
    try:
        before = path.read_text("utf-8-sig") if path.exists() else ""
        if any(known.name == key.name for known in parse_keys(before).values()):
            raise ValueError(f"{key.name} already has a key: remove its line, or choose another name")
        newline = "" if not before or before.endswith("\n") else "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{newline}{key.line()}\n")
    except OSError as error:
        raise unwritable(path, error) from error
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from error
    return secret
