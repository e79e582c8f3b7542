from pagewire.v1 import common_pb2 as _common_pb2
from pagewire.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("requests", "abort_numbers")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ABORT_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[GenerateSubmission]
    abort_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[GenerateSubmission, _Mapping]]] = ..., abort_numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateSubmission(_message.Message):
    __slots__ = ("number", "request", "context", "resume_token_ids", "resubmitted", "weights_version", "adapter_digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUBMITTED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: _inference_pb2.GenerateRequest
    context: _common_pb2.RequestContext
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    resubmitted: bool
    weights_version: str
    adapter_digest: str
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., context: _Optional[_Union[_common_pb2.RequestContext, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., resubmitted: _Optional[bool] = ..., weights_version: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("responses", "numbers", "texts", "num_tokens", "token_ids", "draining", "model")
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[NumberedResponse]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draining: bool
    model: str
    def __init__(self, responses: _Optional[_Iterable[_Union[NumberedResponse, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., draining: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class NumberedResponse(_message.Message):
    __slots__ = ("number", "response", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: _inference_pb2.GenerateResponse
    error: _common_pb2.RequestError
    def __init__(self, number: _Optional[int] = ..., response: _Optional[_Union[_inference_pb2.GenerateResponse, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.RequestError, _Mapping]] = ...) -> None: ...
