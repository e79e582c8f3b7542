from pagewire.v1 import common_pb2 as _common_pb2
from pagewire.v1 import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenSubmission(_message.Message):
    __slots__ = ("request_id", "request", "context", "resume_token_ids", "resubmitted", "images", "weights_version", "adapter_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUBMITTED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    request: _scheduler_pb2.TokenRequest
    context: _common_pb2.RequestContext
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resubmitted: bool
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptImage]
    weights_version: str
    adapter_digest: str
    def __init__(self, request_id: _Optional[int] = ..., request: _Optional[_Union[_scheduler_pb2.TokenRequest, _Mapping]] = ..., context: _Optional[_Union[_common_pb2.RequestContext, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., resubmitted: _Optional[bool] = ..., images: _Optional[_Iterable[_Union[_common_pb2.PromptImage, _Mapping]]] = ..., weights_version: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class SchedulerLinkServiceConnectRequest(_message.Message):
    __slots__ = ("requests", "abort_request_ids")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[TokenSubmission]
    abort_request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[TokenSubmission, _Mapping]]] = ..., abort_request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SchedulerLinkServiceConnectResponse(_message.Message):
    __slots__ = ("hello", "request_ids", "num_tokens", "token_ids", "finish_reasons", "cached_tokens", "stop_token_ids", "logprobs", "errors", "vectors", "prompt_logprobs", "weights_versions", "draining")
    class StopTokenIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class LogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Logprobs
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.RequestError
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.RequestError, _Mapping]] = ...) -> None: ...
    class VectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Vector
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Vector, _Mapping]] = ...) -> None: ...
    class PromptLogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Logprobs
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...
    class WeightsVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.ModelInfo
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reasons: _containers.RepeatedScalarFieldContainer[_common_pb2.FinishReason]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.ScalarMap[int, int]
    logprobs: _containers.MessageMap[int, _common_pb2.Logprobs]
    errors: _containers.MessageMap[int, _common_pb2.RequestError]
    vectors: _containers.MessageMap[int, _common_pb2.Vector]
    prompt_logprobs: _containers.MessageMap[int, _common_pb2.Logprobs]
    weights_versions: _containers.ScalarMap[int, str]
    draining: bool
    def __init__(self, hello: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., request_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reasons: _Optional[_Iterable[_Union[_common_pb2.FinishReason, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Mapping[int, int]] = ..., logprobs: _Optional[_Mapping[int, _common_pb2.Logprobs]] = ..., errors: _Optional[_Mapping[int, _common_pb2.RequestError]] = ..., vectors: _Optional[_Mapping[int, _common_pb2.Vector]] = ..., prompt_logprobs: _Optional[_Mapping[int, _common_pb2.Logprobs]] = ..., weights_versions: _Optional[_Mapping[int, str]] = ..., draining: _Optional[bool] = ...) -> None: ...
