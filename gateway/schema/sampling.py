"""The fields of a body that come from the table of `pagewire.config.sampling_params`."""

from typing import Any

from pagewire.config.sampling_params import PARAMETERS
from pagewire.gateway.schema.field import field

# The cost of a parameter on a GPU.
EAGER = "Its steps sample outside of CUDA graphs."


def sampling_fields() -> dict[str, Any]:
    """Returns types and fields, as pydantic's `create_model` takes them."""
    fields = {}
    for parameter in PARAMETERS:
        words = f"{parameter.help} {EAGER}" if parameter.is_eager else parameter.help
        bounds = {"ge": parameter.valid.minimum, "le": parameter.valid.maximum, "gt": parameter.valid.above}
        fields[parameter.name] = (parameter.type | None, field(parameter.service, words, parameter.default, **bounds))
    return fields
