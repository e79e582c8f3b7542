"""The sampling parameters that a request gets where it names none."""

from dataclasses import dataclass

from pagewire.v1.common_pb2 import SamplingParams


@dataclass(frozen=True)
class RequestDefaults:
    """Defaults of requests. source: where they come from, in words for users; "" if no source names any."""

    params: SamplingParams
    source: str
