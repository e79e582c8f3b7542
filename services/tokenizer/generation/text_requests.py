"""Checks of requests for text, and their conversion for the text stream and the scheduler."""

import secrets
from collections.abc import Sequence
from functools import partial

from pagewire.config.sampling_checks import resolve
from pagewire.config.sampling_params import MAX_BAD_WORDS
from pagewire.errors import InvalidRequest, check_all
from pagewire.services.tokenizer.errors import invalid, invalid_request
from pagewire.services.tokenizer.output.text_stream import OutputOptions
from pagewire.services.tokenizer.prompts.prompts import Prompt
from pagewire.services.tokenizer.received import Received
from pagewire.services.tokenizer.templates.chat_messages import check_messages, image_urls
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.scheduler_link_pb2 import TokenSubmission

# Each is searched for at every token, on the event loop that serves all requests.
MAX_STOP_STRINGS = 1024
# They are encoded twice, with and without a space before them.
MAX_BAD_WORDS_CHARS = 128 * 1024
# The limit of prompt and resumed output: more than any model reads. At up to five bytes each, they fit into a message
# to the scheduler along with its other fields.
MAX_TOKENS = 2_000_000


def check_parameters(received: Received, params: common_pb2.SamplingParams) -> None:
    """Checks everything that needs neither the prompt's tokens nor the model. The error names all faults.

    params: the request's parameters, with defaults. Raises RpcError (INVALID_ARGUMENT).
    """
    request = received.request
    if received.resume_token_ids and request.WhichOneof("prompt") != "token_ids" and not image_urls(request.chat):
        raise invalid("resume_token_ids needs the prompt as token_ids, as the earlier attempt reported them", "prompt")
    try:
        check_all(
            (
                partial(_check_texts, "stop", request.stop, MAX_STOP_STRINGS, "strings"),
                partial(_check_texts, "bad_words", request.bad_words, MAX_BAD_WORDS, "words"),
                partial(_check_bad_words, request.bad_words),
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


def _check_bad_words(words: Sequence[str]) -> None:
    if (size := sum(map(len, words))) > MAX_BAD_WORDS_CHARS:
        message = f"bad_words have {size} characters together; at most {MAX_BAD_WORDS_CHARS} are possible"
        raise InvalidRequest(message, "bad_words")


def prompt_field(request: inference_pb2.GenerateRequest) -> str:
    """Returns the field of the prompt in the client's request."""
    kind = request.WhichOneof("prompt")
    return "token_ids.ids" if kind == "token_ids" else kind or "prompt"


def output_options(received: Received, marks: frozenset[str], adapter_digest: str) -> OutputOptions:
    """Returns how the output becomes text. marks: special tokens that stay in it. adapter_digest: is reported."""
    request = received.request
    return OutputOptions(
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        marks=marks,
        min_tokens=received.given.min_tokens,
        has_logprobs=received.given.HasField("logprobs"),
        adapter_digest=adapter_digest,
    )


def sampling_params(given: common_pb2.SamplingParams, defaults: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """Returns the client's values over the defaults. The seed is resolved, as it must survive a resubmission."""
    params = common_pb2.SamplingParams()
    params.CopyFrom(defaults)
    params.MergeFrom(given)
    if defaults.HasField("max_tokens"):  # a limit of all requests, as in vLLM
        limit = max(defaults.max_tokens, given.min_tokens)
        params.max_tokens = min(given.max_tokens, limit) if given.HasField("max_tokens") else limit
    if not params.HasField("seed"):
        params.seed = secrets.randbits(63)
    return params


def check_prompt(received: Received, prompt: Prompt) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for a prompt that no executor takes.

    Whether the present one takes it is the scheduler's decision: it alone knows whether an executor was just replaced
    by another with more room.
    """
    prompt_token_ids, resume_token_ids = prompt.token_ids, received.resume_token_ids
    field = prompt_field(received.request)
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
    received: Received,
    prompt: Prompt,
    params: common_pb2.SamplingParams,
    adapter: common_pb2.Adapter | None,
    trace: Trace,
) -> TokenSubmission:
    """Returns the request at token level. trace: of this service's own span."""
    message = TokenSubmission(
        context=received.context,
        resume_token_ids=received.resume_token_ids,
        resubmitted=received.resubmitted,
        images=prompt.images,
        weights_version=received.weights_version,
    )
    trace.attach_to(message.context)
    request = message.request  # filled in place: a message given to a constructor is copied
    request.prompt_token_ids.extend(prompt.token_ids)
    request.sampling_params.CopyFrom(params)
    request.external_id = received.request.request_id
    request.cache_salt = received.request.cache_salt
    request.clamp_max_tokens = received.clamps(params)
    if adapter is not None:
        request.adapter, message.adapter_digest = adapter.name, adapter.digest
    return message
