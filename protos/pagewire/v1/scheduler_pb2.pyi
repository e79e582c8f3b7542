from pagewire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling_params", "external_id", "yields_vector", "second_text_start", "cache_salt", "clamp_max_tokens", "adapter")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    YIELDS_VECTOR_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CLAMP_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _common_pb2.SamplingParams
    external_id: str
    yields_vector: bool
    second_text_start: int
    cache_salt: str
    clamp_max_tokens: bool
    adapter: str
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., external_id: _Optional[str] = ..., yields_vector: _Optional[bool] = ..., second_text_start: _Optional[int] = ..., cache_salt: _Optional[str] = ..., clamp_max_tokens: _Optional[bool] = ..., adapter: _Optional[str] = ...) -> None: ...

class SchedulerServiceGenerateRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: TokenRequest
    def __init__(self, request: _Optional[_Union[TokenRequest, _Mapping]] = ...) -> None: ...

class SchedulerServiceGenerateResponse(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "stop_token_id", "usage", "vector", "prompt_logprobs", "request_id", "weights_version")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _common_pb2.Logprobs
    finish_reason: _common_pb2.FinishReason
    stop_token_id: int
    usage: _common_pb2.Usage
    vector: _common_pb2.Vector
    prompt_logprobs: _common_pb2.Logprobs
    request_id: str
    weights_version: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., vector: _Optional[_Union[_common_pb2.Vector, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., request_id: _Optional[str] = ..., weights_version: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("external_ids",)
    EXTERNAL_IDS_FIELD_NUMBER: _ClassVar[int]
    external_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, external_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_blocks", "num_free_blocks", "block_size", "max_num_seqs", "model_info", "num_executors", "executors")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    max_num_seqs: int
    model_info: _common_pb2.ModelInfo
    num_executors: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorLoad]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., model_info: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., num_executors: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorLoad, _Mapping]]] = ...) -> None: ...

class ExecutorLoad(_message.Message):
    __slots__ = ("name", "num_running", "max_num_seqs", "num_blocks", "num_free_blocks", "is_leaving", "num_ranks", "pipeline_stages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_running: int
    max_num_seqs: int
    num_blocks: int
    num_free_blocks: int
    is_leaving: bool
    num_ranks: int
    pipeline_stages: int
    def __init__(self, name: _Optional[str] = ..., num_running: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., is_leaving: _Optional[bool] = ..., num_ranks: _Optional[int] = ..., pipeline_stages: _Optional[int] = ...) -> None: ...
