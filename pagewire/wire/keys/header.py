"""The header, or gRPC metadata, that carries an API key."""


def metadata(api_key: str) -> list[tuple[str, str]]:
    """Returns the metadata with which a client sends its key."""
    return [("authorization", f"Bearer {api_key}")]


def bearer(authorization: bytes) -> bytes:
    """Returns the key in the value of a header; b"" if there is none."""
    scheme, _, key = authorization.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""
