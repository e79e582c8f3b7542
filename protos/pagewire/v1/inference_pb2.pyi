import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pagewire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: ImageSource
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[ImageSource, _Mapping]] = ...) -> None: ...

class ImageSource(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "parts", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs_json", "tools", "documents_json", "reasoning_effort")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    chat_template_kwargs_json: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    documents_json: _containers.RepeatedScalarFieldContainer[str]
    reasoning_effort: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template: _Optional[str] = ..., chat_template_kwargs_json: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., documents_json: _Optional[_Iterable[str]] = ..., reasoning_effort: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "token_ids", "add_special_tokens", "sampling_params", "stop", "include_stop_str_in_output", "skip_special_tokens", "request_id", "output_parsing", "cache_salt", "truncate_prompt_tokens", "truncate_end", "bad_words", "n", "best_of", "beam_search", "thinking_token_budget", "suffix", "clamp_max_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PARSING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_END_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    CLAMP_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    token_ids: TokenIds
    add_special_tokens: bool
    sampling_params: _common_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    request_id: str
    output_parsing: OutputParsing
    cache_salt: str
    truncate_prompt_tokens: int
    truncate_end: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    n: int
    best_of: int
    beam_search: BeamSearch
    thinking_token_budget: int
    suffix: str
    clamp_max_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., request_id: _Optional[str] = ..., output_parsing: _Optional[_Union[OutputParsing, _Mapping]] = ..., cache_salt: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., truncate_end: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., thinking_token_budget: _Optional[int] = ..., suffix: _Optional[str] = ..., clamp_max_tokens: _Optional[bool] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("length_penalty", "early_stopping")
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    length_penalty: float
    early_stopping: bool
    def __init__(self, length_penalty: _Optional[float] = ..., early_stopping: _Optional[bool] = ...) -> None: ...

class OutputParsing(_message.Message):
    __slots__ = ("reasoning", "tool_calls", "first_tool_call_only", "required", "named", "tools")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOOL_CALL_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    reasoning: bool
    tool_calls: bool
    first_tool_call_only: bool
    required: bool
    named: str
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    def __init__(self, reasoning: _Optional[bool] = ..., tool_calls: _Optional[bool] = ..., first_tool_call_only: _Optional[bool] = ..., required: _Optional[bool] = ..., named: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token", "token_bytes", "top_logprobs", "text_offset")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token: str
    token_bytes: bytes
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    text_offset: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token: _Optional[str] = ..., token_bytes: _Optional[bytes] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., text_offset: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "tokens", "first_token", "text", "text_offsets")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _common_pb2.Logprobs
    tokens: _containers.RepeatedScalarFieldContainer[str]
    first_token: str
    text: str
    text_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., tokens: _Optional[_Iterable[str]] = ..., first_token: _Optional[str] = ..., text: _Optional[str] = ..., text_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "usage", "finish_reason", "stop_string", "stop_token_id", "prompt_token_ids", "reasoning", "tool_calls", "prompt_logprobs", "index", "request_id", "weights_version", "adapter_digest")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    usage: _common_pb2.Usage
    finish_reason: _common_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    prompt_logprobs: PromptLogprobs
    index: int
    request_id: str
    weights_version: str
    adapter_digest: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., index: _Optional[int] = ..., request_id: _Optional[str] = ..., weights_version: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class InputText(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "text_pair")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_PAIR_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    text_pair: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., text_pair: _Optional[str] = ...) -> None: ...

class InputOptions(_message.Message):
    __slots__ = ("add_special_tokens", "truncate_prompt_tokens", "first_index", "cache_salt", "truncate_start")
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_START_FIELD_NUMBER: _ClassVar[int]
    add_special_tokens: bool
    truncate_prompt_tokens: int
    first_index: int
    cache_salt: str
    truncate_start: bool
    def __init__(self, add_special_tokens: _Optional[bool] = ..., truncate_prompt_tokens: _Optional[int] = ..., first_index: _Optional[int] = ..., cache_salt: _Optional[str] = ..., truncate_start: _Optional[bool] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "options", "prompt_name", "dimensions", "request_id", "preferred_prompt_names")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_PROMPT_NAMES_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[InputText]
    options: InputOptions
    prompt_name: str
    dimensions: int
    request_id: str
    preferred_prompt_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[InputText, _Mapping]]] = ..., options: _Optional[_Union[InputOptions, _Mapping]] = ..., prompt_name: _Optional[str] = ..., dimensions: _Optional[int] = ..., request_id: _Optional[str] = ..., preferred_prompt_names: _Optional[_Iterable[str]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "num_tokens", "request_id")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[_common_pb2.Vector]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, embeddings: _Optional[_Iterable[_Union[_common_pb2.Vector, _Mapping]]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "inputs", "options", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[InputText]
    options: InputOptions
    request_id: str
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[InputText, _Mapping]]] = ..., options: _Optional[_Union[InputOptions, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ClassifyResponse(_message.Message):
    __slots__ = ("scores", "num_tokens", "labels", "request_id")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[_common_pb2.Vector]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    labels: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    def __init__(self, scores: _Optional[_Iterable[_Union[_common_pb2.Vector, _Mapping]]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., labels: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "pairs", "options", "request_id", "max_tokens_per_query", "max_tokens_per_doc")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_QUERY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_DOC_FIELD_NUMBER: _ClassVar[int]
    model: str
    pairs: _containers.RepeatedCompositeFieldContainer[InputText]
    options: InputOptions
    request_id: str
    max_tokens_per_query: int
    max_tokens_per_doc: int
    def __init__(self, model: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[InputText, _Mapping]]] = ..., options: _Optional[_Union[InputOptions, _Mapping]] = ..., request_id: _Optional[str] = ..., max_tokens_per_query: _Optional[int] = ..., max_tokens_per_doc: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "num_tokens", "request_id")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "return_token_strs", "output_parsing")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PARSING_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool
    output_parsing: OutputParsing
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., return_token_strs: _Optional[bool] = ..., output_parsing: _Optional[_Union[OutputParsing, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "token_strs", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_strs: _containers.RepeatedScalarFieldContainer[str]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., token_strs: _Optional[_Iterable[str]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids", "all")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., all: _Optional[bool] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class CountRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CountRequestsResponse(_message.Message):
    __slots__ = ("num_requests", "idle_seconds", "sleep_level")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    idle_seconds: float
    sleep_level: int
    def __init__(self, num_requests: _Optional[int] = ..., idle_seconds: _Optional[float] = ..., sleep_level: _Optional[int] = ...) -> None: ...

class GetTokenizerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerInfoResponse(_message.Message):
    __slots__ = ("chat_template", "tool_chat_template", "vocab_size", "special_tokens", "max_model_len")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    chat_template: str
    tool_chat_template: str
    vocab_size: int
    special_tokens: _containers.ScalarMap[str, str]
    max_model_len: int
    def __init__(self, chat_template: _Optional[str] = ..., tool_chat_template: _Optional[str] = ..., vocab_size: _Optional[int] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "root", "max_model_len", "create_time", "has_chat_template", "kind", "default_sampling_params", "default_sampling_source", "parent", "files", "calls_tools", "reasons", "reads_images", "fills_in_middle", "sleep_level")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CALLS_TOOLS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    READS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    FILLS_IN_MIDDLE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    root: str
    max_model_len: int
    create_time: _timestamp_pb2.Timestamp
    has_chat_template: bool
    kind: _common_pb2.ModelKind
    default_sampling_params: _common_pb2.SamplingParams
    default_sampling_source: str
    parent: str
    files: ModelFiles
    calls_tools: bool
    reasons: bool
    reads_images: bool
    fills_in_middle: bool
    sleep_level: int
    def __init__(self, id: _Optional[str] = ..., root: _Optional[str] = ..., max_model_len: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., has_chat_template: _Optional[bool] = ..., kind: _Optional[_Union[_common_pb2.ModelKind, str]] = ..., default_sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., default_sampling_source: _Optional[str] = ..., parent: _Optional[str] = ..., files: _Optional[_Union[ModelFiles, _Mapping]] = ..., calls_tools: _Optional[bool] = ..., reasons: _Optional[bool] = ..., reads_images: _Optional[bool] = ..., fills_in_middle: _Optional[bool] = ..., sleep_level: _Optional[int] = ...) -> None: ...

class ModelFiles(_message.Message):
    __slots__ = ("format", "architecture", "size_bytes", "digest", "num_parameters", "quantization", "modify_time", "trained_len", "hidden_size", "num_layers")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MODIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    TRAINED_LEN_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    format: str
    architecture: str
    size_bytes: int
    digest: str
    num_parameters: int
    quantization: str
    modify_time: _timestamp_pb2.Timestamp
    trained_len: int
    hidden_size: int
    num_layers: int
    def __init__(self, format: _Optional[str] = ..., architecture: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., num_parameters: _Optional[int] = ..., quantization: _Optional[str] = ..., modify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., trained_len: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...
