"""The sampling parameters that a request gets where it names none."""

from dataclasses import dataclass

from pagewire.config.sampling_params import MIN_TEMPERATURE
from pagewire.v1.common_pb2 import SamplingParams


@dataclass(frozen=True)
class RequestDefaults:
    """Defaults of requests. of_greedy: those of requests for the most probable tokens. source: in words for users."""

    params: SamplingParams
    of_greedy: SamplingParams
    source: str

    def of(self, given: SamplingParams) -> SamplingParams:
        """Returns the defaults of a request with these parameters."""
        named = given if given.HasField("temperature") else self.params
        is_greedy = named.HasField("temperature") and named.temperature < MIN_TEMPERATURE
        return self.of_greedy if is_greedy else self.params
