"""The size of all choices of a request, each with its own copy of the prompt and of the parameters, and of an answer,
in which each choice repeats what is known of its prompt."""

from collections.abc import Iterable

from pagewire.config.sampling_checks import MAX_VALUES, num_values
from pagewire.gateway.core.errors import ApiError
from pagewire.v1.inference_pb2 import GenerateRequest

# All choices of a request; each carries the prompt, including images.
MAX_CHOICES_BYTES = 128 * 1024 * 1024
# Of an answer that is not streamed, in the services' form; JSON has several times as many.
MAX_ANSWER_BYTES = 16 * 1024 * 1024
# What PromptLogprobs has at least: for each entry its id, log probability and text, for each token its rank and place.
_ENTRY_BYTES, _TOKEN_BYTES = 1 + 4 + 2, 1 + 1


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


def check_answer(size: int) -> None:
    """Raises ApiError 400 if an answer that is not streamed is too large."""
    if size > MAX_ANSWER_BYTES:
        raise ApiError(
            400,
            f"the answer has {size} bytes before it is written as JSON; at most {MAX_ANSWER_BYTES} are possible if it"
            " is not streamed: ask for fewer choices or fewer log probabilities, or stream it",
        )


def check_prompt_logprobs(num_alternatives: int, prompts: Iterable[str | list[int]], num_choices: int) -> None:
    """Raises ApiError 400 if the log probabilities of prompts surely make the answer too large, before any is computed.
    Counts prompts of token ids alone: the length of a text is known when it is encoded.

    Args:
        num_alternatives: those of each token of the prompts.
        num_choices: the choices of each prompt.
    """
    num_tokens = sum(len(prompt) - 1 for prompt in prompts if not isinstance(prompt, str))
    check_answer(num_choices * num_tokens * ((1 + num_alternatives) * _ENTRY_BYTES + _TOKEN_BYTES))
