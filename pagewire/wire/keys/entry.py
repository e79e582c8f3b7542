"""An API key: a line `NAME sha256:HEX [weight=2] [requests_per_minute=60] [tokens_per_minute=90000] [max_running=8]
[admin]` of a file.

Keys are random and as long as their hash, so a fast hash is as safe as a slow one.
"""

import hashlib
import re
import secrets
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")
_ADMIN = "admin"
_WHOLE = ("requests_per_minute", "tokens_per_minute", "max_running")


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key.

    name: that of the tenant, "" for --api-key. digest: SHA-256. weight: share of the tenant among others.
    requests_per_minute, max_running: limits in each process that clients reach; 0: no limit. tokens_per_minute: of
    prompts and outputs together. admin: may change the service.
    """

    name: str
    digest: bytes
    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_running: int = 0
    admin: bool = False

    def line(self) -> str:
        """Returns the line that parse_keys() reads."""
        limits = [f"{name}={value}" for name in _WHOLE if (value := getattr(self, name))]
        weight = [] if self.weight == 1 else [f"weight={self.weight:g}"]
        return " ".join([self.name, f"sha256:{self.digest.hex()}", *weight, *limits, *([_ADMIN] if self.admin else [])])


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> str:
    return f"pw-{secrets.token_urlsafe(32)}"


def parse_keys(text: str) -> dict[bytes, Key]:
    """Returns keys by digest, without empty lines and comments (#). Raises ValueError naming the line."""
    keys: dict[bytes, Key] = {}
    names = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.split()) or words[0].startswith("#"):
            continue
        try:
            key = _parse(words)
            if key.name in names or key.digest in keys:
                raise ValueError(f"{key.name!r}, or its hash, occurs twice; remove one of them")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        names.add(key.name)
        keys[key.digest] = key
    return keys


def _parse(words: list[str]) -> Key:
    """Parses a line. Raises ValueError; its message never quotes a possible key."""
    name, hash, settings = words[0], _HASH.fullmatch(words[1]) if len(words) > 1 else None, words[2:]
    if not is_name(name):
        raise ValueError("the first word is not a name of up to 64 letters, digits and ._@-")
    if hash is None:
        raise ValueError("the second word is not sha256: and 64 hexadecimal digits; `pagewire keys add` writes it")
    values: dict[str, float] = {}
    if admin := _ADMIN in settings:
        settings.remove(_ADMIN)
    for setting in settings:
        what, _, value = setting.partition("=")
        if what not in ("weight", *_WHOLE) or what in values or not _NUMBER.fullmatch(value) or not float(value):
            names = ", ".join(("weight", *_WHOLE))
            raise ValueError(
                f"after the hash, only {_ADMIN} and NAME=NUMBER are allowed, with each of {names} once and above 0"
            )
        if what in _WHOLE and "." in value:
            raise ValueError(f"{what} is not a whole number")
        values[what] = float(value)
    return Key(
        name=name,
        digest=bytes.fromhex(hash[1]),
        weight=values.get("weight", 1.0),
        admin=admin,
        **{what: int(values[what]) for what in _WHOLE if what in values},
    )


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None
