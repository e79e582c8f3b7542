"""Hashes of blocks: equal ones mean equal contents."""

import array
import hashlib
from collections.abc import Sequence

ROOT_HASH = bytes(32)


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """Returns the next hash of a sha256 chain: equal hashes mean equal tokens in this block and in all blocks before
    it.

    extra_keys: everything else that the KV depends on, such as images, an adapter or a cache salt.
    """
    return hashlib.sha256(parent + array.array("i", token_ids).tobytes() + extra_keys).digest()


def root_hash(cache_salt: str, owner: str = "", adapter_digest: str = "") -> bytes:
    """Returns the root of the chains of all requests of this owner with this salt and adapter; no hash of a block can
    equal it."""
    root = _root_of(cache_salt, owner)
    return hashlib.sha256(b"pagewire adapter: " + root + adapter_digest.encode()).digest() if adapter_digest else root


def _root_of(cache_salt: str, owner: str) -> bytes:
    # The hash of a block is computed from a 32-byte hash and more, and no 32-byte hash that begins with this text can
    # be found.
    if owner:
        of_owner = hashlib.sha256(owner.encode()).digest()  # constant length, so that a salt cannot continue the name
        return hashlib.sha256(b"pagewire cache owner: " + of_owner + cache_salt.encode()).digest()
    return hashlib.sha256(b"pagewire cache salt: " + cache_salt.encode()).digest() if cache_salt else ROOT_HASH


def computed_root(root: bytes, weights_version: str) -> bytes:
    """Returns the root of the chains of blocks that weights of this version compute."""
    return hashlib.sha256(b"pagewire weights: " + root + weights_version.encode()).digest() if weights_version else root
