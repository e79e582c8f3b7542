from pagewire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_STATE_UNSPECIFIED: _ClassVar[ServiceState]
    SERVICE_STATE_SERVING: _ClassVar[ServiceState]
    SERVICE_STATE_NOT_SERVING: _ClassVar[ServiceState]
    SERVICE_STATE_UNREACHABLE: _ClassVar[ServiceState]

class RankState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_STATE_UNSPECIFIED: _ClassVar[RankState]
    RANK_STATE_STARTING: _ClassVar[RankState]
    RANK_STATE_READY: _ClassVar[RankState]
    RANK_STATE_LOST: _ClassVar[RankState]

class KVBlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_BLOCK_STATE_UNSPECIFIED: _ClassVar[KVBlockState]
    KV_BLOCK_STATE_FREE: _ClassVar[KVBlockState]
    KV_BLOCK_STATE_CACHED: _ClassVar[KVBlockState]
    KV_BLOCK_STATE_USED: _ClassVar[KVBlockState]
    KV_BLOCK_STATE_SHARED: _ClassVar[KVBlockState]

class SleepMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLEEP_MODE_UNSPECIFIED: _ClassVar[SleepMode]
    SLEEP_MODE_WAIT: _ClassVar[SleepMode]
    SLEEP_MODE_KEEP: _ClassVar[SleepMode]
    SLEEP_MODE_ABORT: _ClassVar[SleepMode]
SERVICE_STATE_UNSPECIFIED: ServiceState
SERVICE_STATE_SERVING: ServiceState
SERVICE_STATE_NOT_SERVING: ServiceState
SERVICE_STATE_UNREACHABLE: ServiceState
RANK_STATE_UNSPECIFIED: RankState
RANK_STATE_STARTING: RankState
RANK_STATE_READY: RankState
RANK_STATE_LOST: RankState
KV_BLOCK_STATE_UNSPECIFIED: KVBlockState
KV_BLOCK_STATE_FREE: KVBlockState
KV_BLOCK_STATE_CACHED: KVBlockState
KV_BLOCK_STATE_USED: KVBlockState
KV_BLOCK_STATE_SHARED: KVBlockState
SLEEP_MODE_UNSPECIFIED: SleepMode
SLEEP_MODE_WAIT: SleepMode
SLEEP_MODE_KEEP: SleepMode
SLEEP_MODE_ABORT: SleepMode

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("num_blocks", "num_executors")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_executors: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_executors: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: _containers.RepeatedCompositeFieldContainer[KvEventsPosition]
    def __init__(self, after: _Optional[_Iterable[_Union[KvEventsPosition, _Mapping]]] = ...) -> None: ...

class KvEventsPosition(_message.Message):
    __slots__ = ("source", "number")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    source: int
    number: int
    def __init__(self, source: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("source", "number", "snapshot_parts_left", "time", "executor", "events")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_PARTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    source: int
    number: int
    snapshot_parts_left: int
    time: float
    executor: KvEventsExecutor
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, source: _Optional[int] = ..., number: _Optional[int] = ..., snapshot_parts_left: _Optional[int] = ..., time: _Optional[float] = ..., executor: _Optional[_Union[KvEventsExecutor, _Mapping]] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEventsExecutor(_message.Message):
    __slots__ = ("name", "address", "incarnation", "weights_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    incarnation: int
    weights_version: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., weights_version: _Optional[str] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlocksStored
    removed: KvBlocksRemoved
    cleared: KvBlocksCleared
    def __init__(self, stored: _Optional[_Union[KvBlocksStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlocksRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvBlocksCleared, _Mapping]] = ...) -> None: ...

class KvBlocksStored(_message.Message):
    __slots__ = ("hashes", "parent_hash", "token_ids", "block_size", "group", "adapter_digest", "adapter_name", "namespace", "extra_keys", "window", "is_state")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    IS_STATE_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    group: int
    adapter_digest: str
    adapter_name: str
    namespace: bytes
    extra_keys: _containers.RepeatedScalarFieldContainer[bytes]
    window: int
    is_state: bool
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., parent_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., group: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., adapter_name: _Optional[str] = ..., namespace: _Optional[bytes] = ..., extra_keys: _Optional[_Iterable[bytes]] = ..., window: _Optional[int] = ..., is_state: _Optional[bool] = ...) -> None: ...

class KvBlocksRemoved(_message.Message):
    __slots__ = ("hashes", "group")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    group: int
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., group: _Optional[int] = ...) -> None: ...

class KvBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdminServiceLoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replaces: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replaces: _Optional[bool] = ...) -> None: ...

class AdminServiceLoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class AdminServiceUnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdminServiceUnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplaceWeightsRequest(_message.Message):
    __slots__ = ("model", "revision", "version", "max_wait_seconds", "request_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    version: str
    max_wait_seconds: float
    request_id: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., version: _Optional[str] = ..., max_wait_seconds: _Optional[float] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReplaceWeightsResponse(_message.Message):
    __slots__ = ("version", "previous_version", "num_executors")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    version: str
    previous_version: str
    num_executors: int
    def __init__(self, version: _Optional[str] = ..., previous_version: _Optional[str] = ..., num_executors: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("accounts",)
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[RequestAccount]
    def __init__(self, accounts: _Optional[_Iterable[_Union[RequestAccount, _Mapping]]] = ...) -> None: ...

class RequestAccount(_message.Message):
    __slots__ = ("service", "address", "request_id", "trace_id", "seconds", "phases", "finish_reason", "usage", "first_token_seconds", "detokenize_seconds", "is_running")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    service: str
    address: str
    request_id: str
    trace_id: str
    seconds: float
    phases: _containers.RepeatedCompositeFieldContainer[RequestPhase]
    finish_reason: str
    usage: _common_pb2.Usage
    first_token_seconds: float
    detokenize_seconds: float
    is_running: bool
    def __init__(self, service: _Optional[str] = ..., address: _Optional[str] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., seconds: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[RequestPhase, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., first_token_seconds: _Optional[float] = ..., detokenize_seconds: _Optional[float] = ..., is_running: _Optional[bool] = ...) -> None: ...

class RequestPhase(_message.Message):
    __slots__ = ("name", "start_seconds", "seconds", "num_tokens", "num_chunks", "executor")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_seconds: float
    seconds: float
    num_tokens: int
    num_chunks: int
    executor: str
    def __init__(self, name: _Optional[str] = ..., start_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., executor: _Optional[str] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceMetrics]
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceMetrics, _Mapping]]] = ...) -> None: ...

class ServiceMetrics(_message.Message):
    __slots__ = ("service", "exposition", "address")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    service: str
    exposition: str
    address: str
    def __init__(self, service: _Optional[str] = ..., exposition: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("with_kv_maps",)
    WITH_KV_MAPS_FIELD_NUMBER: _ClassVar[int]
    with_kv_maps: bool
    def __init__(self, with_kv_maps: _Optional[bool] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[ServiceStatus]
    def __init__(self, services: _Optional[_Iterable[_Union[ServiceStatus, _Mapping]]] = ...) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("service", "address", "state", "detail", "pid", "uptime_seconds", "tokenizer", "scheduler", "executor", "cpus")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    service: str
    address: str
    state: ServiceState
    detail: str
    pid: int
    uptime_seconds: float
    tokenizer: TokenizerStatus
    scheduler: SchedulerStatus
    executor: ExecutorStatus
    cpus: str
    def __init__(self, service: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[ServiceState, str]] = ..., detail: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., tokenizer: _Optional[_Union[TokenizerStatus, _Mapping]] = ..., scheduler: _Optional[_Union[SchedulerStatus, _Mapping]] = ..., executor: _Optional[_Union[ExecutorStatus, _Mapping]] = ..., cpus: _Optional[str] = ...) -> None: ...

class ExecutorStatus(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "stage", "state", "wait_seconds", "process")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    stage: int
    state: RankState
    wait_seconds: float
    process: str
    def __init__(self, rank: _Optional[int] = ..., stage: _Optional[int] = ..., state: _Optional[_Union[RankState, str]] = ..., wait_seconds: _Optional[float] = ..., process: _Optional[str] = ...) -> None: ...

class TokenizerStatus(_message.Message):
    __slots__ = ("num_clients", "num_requests", "time_to_first_token", "inter_token_latency")
    NUM_CLIENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_LATENCY_FIELD_NUMBER: _ClassVar[int]
    num_clients: int
    num_requests: int
    time_to_first_token: RecentLatency
    inter_token_latency: RecentLatency
    def __init__(self, num_clients: _Optional[int] = ..., num_requests: _Optional[int] = ..., time_to_first_token: _Optional[_Union[RecentLatency, _Mapping]] = ..., inter_token_latency: _Optional[_Union[RecentLatency, _Mapping]] = ...) -> None: ...

class RecentLatency(_message.Message):
    __slots__ = ("count", "p50_seconds", "p95_seconds")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P95_SECONDS_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_seconds: float
    p95_seconds: float
    def __init__(self, count: _Optional[int] = ..., p50_seconds: _Optional[float] = ..., p95_seconds: _Optional[float] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("num_running", "num_waiting", "generation_tokens_per_second", "prompt_tokens_per_second", "num_generation_tokens", "num_prompt_tokens", "num_prefix_queries", "num_prefix_hits", "num_preemptions", "replicas", "sleep")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    num_generation_tokens: int
    num_prompt_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    sleep: ModelSleepStatus
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., generation_tokens_per_second: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., num_generation_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., sleep: _Optional[_Union[ModelSleepStatus, _Mapping]] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("address", "is_attached", "num_running", "max_num_seqs", "kv_groups", "weights_version", "is_replacing_weights", "name", "is_leaving", "num_prefix_queries", "num_prefix_hits", "num_generation_tokens", "role")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_REPLACING_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    address: str
    is_attached: bool
    num_running: int
    max_num_seqs: int
    kv_groups: _containers.RepeatedCompositeFieldContainer[KVGroupStatus]
    weights_version: str
    is_replacing_weights: bool
    name: str
    is_leaving: bool
    num_prefix_queries: int
    num_prefix_hits: int
    num_generation_tokens: int
    role: str
    def __init__(self, address: _Optional[str] = ..., is_attached: _Optional[bool] = ..., num_running: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_groups: _Optional[_Iterable[_Union[KVGroupStatus, _Mapping]]] = ..., weights_version: _Optional[str] = ..., is_replacing_weights: _Optional[bool] = ..., name: _Optional[str] = ..., is_leaving: _Optional[bool] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class KVGroupStatus(_message.Message):
    __slots__ = ("num_blocks", "block_size", "num_free", "num_cached", "num_used", "num_shared", "window", "is_state", "map", "blocks_per_cell")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    IS_STATE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    window: int
    is_state: bool
    map: _containers.RepeatedCompositeFieldContainer[KVRun]
    blocks_per_cell: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_used: _Optional[int] = ..., num_shared: _Optional[int] = ..., window: _Optional[int] = ..., is_state: _Optional[bool] = ..., map: _Optional[_Iterable[_Union[KVRun, _Mapping]]] = ..., blocks_per_cell: _Optional[int] = ...) -> None: ...

class KVRun(_message.Message):
    __slots__ = ("state", "num_cells")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_CELLS_FIELD_NUMBER: _ClassVar[int]
    state: KVBlockState
    num_cells: int
    def __init__(self, state: _Optional[_Union[KVBlockState, str]] = ..., num_cells: _Optional[int] = ...) -> None: ...

class SleepModelRequest(_message.Message):
    __slots__ = ("level", "mode")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: SleepMode
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[SleepMode, str]] = ...) -> None: ...

class SleepModelResponse(_message.Message):
    __slots__ = ("num_executors",)
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    num_executors: int
    def __init__(self, num_executors: _Optional[int] = ...) -> None: ...

class WakeModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeModelResponse(_message.Message):
    __slots__ = ("num_executors",)
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    num_executors: int
    def __init__(self, num_executors: _Optional[int] = ...) -> None: ...

class ModelSleepStatus(_message.Message):
    __slots__ = ("level", "wakes_on_request", "problem")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    WAKES_ON_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    level: int
    wakes_on_request: bool
    problem: str
    def __init__(self, level: _Optional[int] = ..., wakes_on_request: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...
