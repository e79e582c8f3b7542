"""The size of all choices of a request: each has its own copy of the prompt and of the parameters."""

from pagewire.config.sampling_checks import MAX_VALUES, num_values
from pagewire.gateway.core.errors import ApiError
from pagewire.v1.inference_pb2 import GenerateRequest

# All choices of a request; each carries the prompt, including images.
MAX_CHOICES_BYTES = 128 * 1024 * 1024


def check_choices(request: GenerateRequest, num_choices: int, param: str, prompt_bytes: int = 0) -> None:
    """Raises ApiError 400 if all choices of prompts together are too large. request: one of them. prompt_bytes: of all
    prompts, where request has none."""
    if (size := request.ByteSize() * num_choices + prompt_bytes) > MAX_CHOICES_BYTES:
        raise ApiError(
            400,
            f"the {num_choices} choices of this request, each with its prompt and parameters, have {size} bytes; at"
            f" most {MAX_CHOICES_BYTES} are possible: ask for fewer choices or prompts, or shorten them",
            param=param,
        )
    if (count := num_choices * num_values(request.sampling_params)) > MAX_VALUES:
        raise ApiError(
            400,
            f"the {num_choices} choices of this request have {count} token ids and texts in their parameters; at most"
            f" {MAX_VALUES} are possible: ask for fewer choices, or give fewer stop_token_ids, allowed_token_ids,"
            " logit_bias or choices of structured output",
            param=param,
        )
