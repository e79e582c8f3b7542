from pagewire.v1 import common_pb2 as _common_pb2
from pagewire.v1 import executor_pb2 as _executor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankChallenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "version", "flags", "proof", "nonce", "pid", "host")
    class FlagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    version: str
    flags: _containers.ScalarMap[str, str]
    proof: bytes
    nonce: bytes
    pid: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., version: _Optional[str] = ..., flags: _Optional[_Mapping[str, str]] = ..., proof: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class RankWelcome(_message.Message):
    __slots__ = ("refusal", "proof", "store")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    proof: bytes
    store: str
    def __init__(self, refusal: _Optional[str] = ..., proof: _Optional[bytes] = ..., store: _Optional[str] = ...) -> None: ...

class RankCommand(_message.Message):
    __slots__ = ("step", "reset", "load", "install", "drop", "end", "load_adapter", "drop_adapter", "open_tiers", "forget_blocks", "sleep", "wake", "num_unknown")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DROP_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    OPEN_TIERS_FIELD_NUMBER: _ClassVar[int]
    FORGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_FIELD_NUMBER: _ClassVar[int]
    NUM_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    step: _executor_pb2.StepRequest
    reset: bool
    load: _executor_pb2.Weights
    install: bool
    drop: bool
    end: bool
    load_adapter: _common_pb2.Adapter
    drop_adapter: str
    open_tiers: str
    forget_blocks: _executor_pb2.ForgetBlocksRequest
    sleep: int
    wake: bool
    num_unknown: int
    def __init__(self, step: _Optional[_Union[_executor_pb2.StepRequest, _Mapping]] = ..., reset: _Optional[bool] = ..., load: _Optional[_Union[_executor_pb2.Weights, _Mapping]] = ..., install: _Optional[bool] = ..., drop: _Optional[bool] = ..., end: _Optional[bool] = ..., load_adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., drop_adapter: _Optional[str] = ..., open_tiers: _Optional[str] = ..., forget_blocks: _Optional[_Union[_executor_pb2.ForgetBlocksRequest, _Mapping]] = ..., sleep: _Optional[int] = ..., wake: _Optional[bool] = ..., num_unknown: _Optional[int] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("alive", "ready", "failed", "refused", "loaded", "has_forgotten")
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    HAS_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    ready: bool
    failed: str
    refused: str
    loaded: _executor_pb2.KVLoaded
    has_forgotten: bool
    def __init__(self, alive: _Optional[bool] = ..., ready: _Optional[bool] = ..., failed: _Optional[str] = ..., refused: _Optional[str] = ..., loaded: _Optional[_Union[_executor_pb2.KVLoaded, _Mapping]] = ..., has_forgotten: _Optional[bool] = ...) -> None: ...
