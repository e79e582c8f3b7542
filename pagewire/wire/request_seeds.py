"""Seeds of requests that have none, on a server with `--seed`: they follow from that seed and from the request alone.

So the same request draws the same random numbers after each start of the server, whatever other requests arrive.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire.v1.inference_pb2 import GenerateRequest
    from pagewire.v1.scheduler_pb2 import TokenRequest

# Names that clients give to requests.
_LABELS = ("request_id", "external_id")


def seed_of(server_seed: int, content: bytes) -> int:
    """Returns a seed of 63 bits. content: what the output of the request depends on."""
    digest = hashlib.blake2b(f"{server_seed}\n".encode() + content, digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def fill_seed(request: GenerateRequest | TokenRequest, server_seed: int | None) -> None:
    """Sets the seed of a request without one, unless the server has none."""
    if server_seed is None or request.sampling_params.HasField("seed"):
        return
    bare = type(request)()
    bare.CopyFrom(request)  # type: ignore[arg-type]
    for name in _LABELS:
        if name in bare.DESCRIPTOR.fields_by_name:
            bare.ClearField(name)  # type: ignore[arg-type]
    request.sampling_params.seed = seed_of(server_seed, bare.SerializeToString(deterministic=True))
