"""What text-level requests say, checked, and as the scheduler and the text stream are to be told it."""

import secrets
from collections.abc import Sequence
from functools import partial

from pagewire.config.sampling_params import MAX_BAD_WORDS, InvalidRequest, check_all, resolve
from pagewire.services.tokenizer.errors import invalid, invalid_request
from pagewire.services.tokenizer.output.text_stream import OutputOptions
from pagewire.services.tokenizer.prompts.prompts import Prompt
from pagewire.services.tokenizer.templates.chat_messages import check_messages
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.v1.scheduler_pb2 import TokenRequest

# Each is looked for at every token, on the event loop that serves all requests.
MAX_STOP_STRINGS = 1024
# Of prompt and resumed output: more than any model reads. Beside what else a message to the scheduler may hold they fit
# into it, at up to five bytes each.
MAX_TOKENS = 2_000_000


def check_parameters(request: inference_pb2.GenerateRequest, params: common_pb2.SamplingParams) -> None:
    """What can be checked without the prompt's tokens and the model, all of it at once, so that the client is told all
    that is wrong. params: of the request, with defaults. Raises RpcError (INVALID_ARGUMENT)."""
    try:
        check_all(
            (
                partial(_check_texts, "stop", request.stop, MAX_STOP_STRINGS, "strings"),
                partial(_check_texts, "bad_words", request.bad_words, MAX_BAD_WORDS, "words"),
                partial(resolve, params),
                partial(check_messages, request.chat),
            )
        )
    except InvalidRequest as error:
        raise invalid_request(error) from error


def _check_texts(field: str, texts: Sequence[str], most: int, noun: str) -> None:
    if len(texts) > most:
        raise InvalidRequest(f"{field} has {len(texts)} {noun}; at most {most} are possible", field)
    for index, text in enumerate(texts):
        if not text:
            message = f"{field} contains an empty string; each must have at least one character"
            raise InvalidRequest(message, f"{field}[{index}]")


def prompt_field(request: inference_pb2.GenerateRequest) -> str:
    """Where the client's request has its prompt."""
    kind = request.WhichOneof("prompt")
    return "token_ids.ids" if kind == "token_ids" else kind or "prompt"


def output_options(request: inference_pb2.GenerateRequest, marks: frozenset[str] = frozenset()) -> OutputOptions:
    """marks: special tokens that stay in the text."""
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


def check_prompt(prompt_token_ids: Sequence[int], resume_token_ids: Sequence[int], field: str) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for what no executor takes.

    What the present one takes is the scheduler's to say: it alone knows whether an executor was just replaced by
    another with more room.
    """
    if not prompt_token_ids:
        raise invalid("the prompt is empty; it must have at least one token", field)
    if (num_tokens := len(prompt_token_ids) + len(resume_token_ids)) > MAX_TOKENS:
        raise invalid(
            f"the prompt has {num_tokens} tokens; at most {MAX_TOKENS} are possible. Please shorten it.", field
        )
    for name, token_ids in ((field, prompt_token_ids), ("resume_token_ids", resume_token_ids)):
        if (lowest := min(token_ids, default=0)) < 0:
            raise invalid(f"{name} contains {lowest}; ids are >= 0", name)


def token_submission(
    submission: GenerateSubmission, prompt: Prompt, params: common_pb2.SamplingParams, trace: Trace
) -> TokenSubmission:
    """The request at token level. trace: of this service's own span."""
    request = submission.request
    told = TokenSubmission(
        request=TokenRequest(
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            external_id=request.request_id,
            cache_salt=request.cache_salt,
        ),
        context=submission.context,
        resume_token_ids=submission.resume_token_ids,
        resubmitted=submission.resubmitted,
        images=prompt.images,
        weights_version=submission.weights_version,
    )
    trace.tell(told.context)
    return told
