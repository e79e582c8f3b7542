"""What text-level requests say, checked, and as the scheduler and the text stream are to be told it."""

import secrets
from collections.abc import Sequence

from pagewire.sampling_params import MAX_BAD_WORDS
from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.prompts import Prompt
from pagewire.services.tokenizer.text_stream import OutputOptions
from pagewire.v1 import common_pb2, inference_pb2, scheduler_pb2

# Each is looked for at every token, on the event loop that serves all requests.
MAX_STOP_STRINGS = 1024
# Of prompt and resumed output: more than any model reads. Beside what else a message to the scheduler may hold they fit
# into it, at up to five bytes each.
MAX_TOKENS = 2_000_000


def output_options(request: inference_pb2.GenerateRequest, marks: frozenset[str] = frozenset()) -> OutputOptions:
    """marks: special tokens that stay in the text. Raises RpcError (INVALID_ARGUMENT) for empty stop strings, and for
    too many.
    """
    if len(request.stop) > MAX_STOP_STRINGS:
        raise invalid(f"stop has {len(request.stop)} strings; at most {MAX_STOP_STRINGS} are possible")
    if len(request.bad_words) > MAX_BAD_WORDS:
        raise invalid(f"bad_words has {len(request.bad_words)} words; at most {MAX_BAD_WORDS} are possible")
    if "" in request.bad_words:
        raise invalid("bad_words contains an empty string; every word must have at least one character")
    if "" in request.stop:
        raise invalid("stop contains an empty string; every stop string must have at least one character")
    return OutputOptions(
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        marks=marks,
        min_tokens=request.sampling_params.min_tokens,
        has_logprobs=request.sampling_params.HasField("logprobs"),
    )


def sampling_params(given: common_pb2.SamplingParams, defaults: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """What is given over the defaults, with what must survive a resubmission resolved: the seed."""
    params = common_pb2.SamplingParams()
    params.CopyFrom(defaults)
    params.MergeFrom(given)
    if defaults.HasField("max_tokens") and not given.HasField("max_tokens"):
        params.max_tokens = max(defaults.max_tokens, given.min_tokens)
    if not params.HasField("seed"):
        params.seed = secrets.randbits(63)
    return params


def check_prompt(prompt_token_ids: Sequence[int], resume_token_ids: Sequence[int]) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for what no executor takes.

    What the present one takes is the scheduler's to say: it alone knows whether an executor was just replaced by
    another with more room.
    """
    if not prompt_token_ids:
        raise invalid("the prompt is empty; it must have at least one token")
    if (num_tokens := len(prompt_token_ids) + len(resume_token_ids)) > MAX_TOKENS:
        raise invalid(f"the prompt has {num_tokens} tokens; at most {MAX_TOKENS} are possible. Please shorten it.")
    for name, token_ids in (("token_ids", prompt_token_ids), ("resume_token_ids", resume_token_ids)):
        if (lowest := min(token_ids, default=0)) < 0:
            raise invalid(f"{name} contains {lowest}; ids are >= 0")


def token_request(
    request: inference_pb2.GenerateRequest,
    prompt: Prompt,
    params: common_pb2.SamplingParams,
    traceparent: str,
) -> scheduler_pb2.TokenRequest:
    """The request at token level."""
    return scheduler_pb2.TokenRequest(
        prompt_token_ids=prompt.token_ids,
        images=prompt.images,
        resume_token_ids=request.resume_token_ids,
        sampling_params=params,
        traceparent=traceparent,
        external_id=request.request_id,
        resubmitted=request.resubmitted,
        cache_salt=request.cache_salt,
    )
