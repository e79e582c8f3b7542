import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pagewire.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINE_STATE_UNSPECIFIED: _ClassVar[LineState]
    LINE_STATE_LOADING: _ClassVar[LineState]
    LINE_STATE_READY: _ClassVar[LineState]
    LINE_STATE_ASLEEP: _ClassVar[LineState]
LINE_STATE_UNSPECIFIED: LineState
LINE_STATE_LOADING: LineState
LINE_STATE_READY: LineState
LINE_STATE_ASLEEP: LineState

class Line(_message.Message):
    __slots__ = ("name", "served_names", "aliases", "state", "tokenizer_address", "pinned", "problem", "retry_time", "memory_bytes", "memory_measured", "rest_time", "model", "size_bytes", "progress", "sleeps_until_woken", "num_loads", "num_failures", "num_withdrawals")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    RETRY_TIME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_MEASURED_FIELD_NUMBER: _ClassVar[int]
    REST_TIME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SLEEPS_UNTIL_WOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    name: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    state: LineState
    tokenizer_address: str
    pinned: bool
    problem: str
    retry_time: _timestamp_pb2.Timestamp
    memory_bytes: int
    memory_measured: bool
    rest_time: _timestamp_pb2.Timestamp
    model: _inference_pb2.Model
    size_bytes: int
    progress: str
    sleeps_until_woken: bool
    num_loads: int
    num_failures: int
    num_withdrawals: int
    def __init__(self, name: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., aliases: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[LineState, str]] = ..., tokenizer_address: _Optional[str] = ..., pinned: _Optional[bool] = ..., problem: _Optional[str] = ..., retry_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., memory_measured: _Optional[bool] = ..., rest_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., size_bytes: _Optional[int] = ..., progress: _Optional[str] = ..., sleeps_until_woken: _Optional[bool] = ..., num_loads: _Optional[int] = ..., num_failures: _Optional[int] = ..., num_withdrawals: _Optional[int] = ...) -> None: ...

class WatchLinesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLinesResponse(_message.Message):
    __slots__ = ("lines", "default_line", "memory_bytes")
    LINES_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LINE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[Line]
    default_line: str
    memory_bytes: int
    def __init__(self, lines: _Optional[_Iterable[_Union[Line, _Mapping]]] = ..., default_line: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class RequestLineRequest(_message.Message):
    __slots__ = ("name", "idle_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    idle_seconds: float
    def __init__(self, name: _Optional[str] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class RequestLineResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: Line
    def __init__(self, line: _Optional[_Union[Line, _Mapping]] = ...) -> None: ...

class RestLineRequest(_message.Message):
    __slots__ = ("name", "end_processes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    END_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    name: str
    end_processes: bool
    def __init__(self, name: _Optional[str] = ..., end_processes: _Optional[bool] = ...) -> None: ...

class RestLineResponse(_message.Message):
    __slots__ = ("line",)
    LINE_FIELD_NUMBER: _ClassVar[int]
    line: Line
    def __init__(self, line: _Optional[_Union[Line, _Mapping]] = ...) -> None: ...

class PutLineRequest(_message.Message):
    __slots__ = ("name", "settings_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings_json: str
    def __init__(self, name: _Optional[str] = ..., settings_json: _Optional[str] = ...) -> None: ...

class PutLineResponse(_message.Message):
    __slots__ = ("line", "created")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    line: Line
    created: bool
    def __init__(self, line: _Optional[_Union[Line, _Mapping]] = ..., created: _Optional[bool] = ...) -> None: ...

class DeleteLineRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteLineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
