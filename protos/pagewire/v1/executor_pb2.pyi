from pagewire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVTierKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_KIND_UNSPECIFIED: _ClassVar[KVTierKind]
    KV_TIER_KIND_HOST: _ClassVar[KVTierKind]
    KV_TIER_KIND_DISK: _ClassVar[KVTierKind]

class ExecutorRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_ROLE_UNSPECIFIED: _ClassVar[ExecutorRole]
    EXECUTOR_ROLE_PREFILL: _ClassVar[ExecutorRole]
    EXECUTOR_ROLE_DECODE: _ClassVar[ExecutorRole]
KV_TIER_KIND_UNSPECIFIED: KVTierKind
KV_TIER_KIND_HOST: KVTierKind
KV_TIER_KIND_DISK: KVTierKind
EXECUTOR_ROLE_UNSPECIFIED: ExecutorRole
EXECUTOR_ROLE_PREFILL: ExecutorRole
EXECUTOR_ROLE_DECODE: ExecutorRole

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierChanges(_message.Message):
    __slots__ = ("kind", "cleared", "stored", "removed", "is_complete")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    kind: KVTierKind
    cleared: bool
    stored: _containers.RepeatedCompositeFieldContainer[BlockHashes]
    removed: _containers.RepeatedCompositeFieldContainer[BlockHashes]
    is_complete: bool
    def __init__(self, kind: _Optional[_Union[KVTierKind, str]] = ..., cleared: _Optional[bool] = ..., stored: _Optional[_Iterable[_Union[BlockHashes, _Mapping]]] = ..., removed: _Optional[_Iterable[_Union[BlockHashes, _Mapping]]] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class BlockHashes(_message.Message):
    __slots__ = ("group", "hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class ForgetBlocksRequest(_message.Message):
    __slots__ = ("blocks", "reset_at")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESET_AT_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockHashes]
    reset_at: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockHashes, _Mapping]]] = ..., reset_at: _Optional[int] = ...) -> None: ...

class ForgetBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("kv_format", "blocks")
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kv_format: str
    blocks: _containers.RepeatedCompositeFieldContainer[BlockHashes]
    def __init__(self, kv_format: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[BlockHashes, _Mapping]]] = ...) -> None: ...

class BlockContents(_message.Message):
    __slots__ = ("group", "hashes", "contents", "checksums")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    contents: bytes
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., contents: _Optional[bytes] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class KVTier(_message.Message):
    __slots__ = ("kind", "bytes", "store", "load_rate", "load_latency")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    LOAD_RATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_LATENCY_FIELD_NUMBER: _ClassVar[int]
    kind: KVTierKind
    bytes: int
    store: str
    load_rate: float
    load_latency: float
    def __init__(self, kind: _Optional[_Union[KVTierKind, str]] = ..., bytes: _Optional[int] = ..., store: _Optional[str] = ..., load_rate: _Optional[float] = ..., load_latency: _Optional[float] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _common_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest", "name")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    digest: str
    name: str
    def __init__(self, digest: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompileGrammarRequest(_message.Message):
    __slots__ = ("grammar",)
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    grammar: _common_pb2.Grammar
    def __init__(self, grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version", "number", "model", "revision", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: str
    number: int
    model: str
    revision: str
    digest: str
    def __init__(self, version: _Optional[str] = ..., number: _Optional[int] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: Weights
    def __init__(self, weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: Weights
    def __init__(self, weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class InstallWeightsRequest(_message.Message):
    __slots__ = ("weights", "term")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    weights: Weights
    term: int
    def __init__(self, weights: _Optional[_Union[Weights, _Mapping]] = ..., term: _Optional[int] = ...) -> None: ...

class InstallWeightsResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class DropWeightsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("num_blocks", "window", "state_tokens", "block_bytes")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    window: int
    state_tokens: int
    block_bytes: int
    def __init__(self, num_blocks: _Optional[int] = ..., window: _Optional[int] = ..., state_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("incarnation", "model_info", "block_size", "max_num_seqs", "max_num_batched_tokens", "device", "dtype", "weight_bytes", "kv_cache_bytes", "max_draft_tokens", "whole_prompts", "kv_groups", "weights", "predecessor_failed", "pipeline_stages", "num_ranks", "decode_costs", "draft_methods", "draft_bounds", "max_adapters", "adapters", "adapter_directory", "found_adapters", "kv_tiers", "kv_format", "role", "sleep", "sleep_decision", "reset_at")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_INFO_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FAILED_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_COSTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_METHODS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FOUND_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    KV_TIERS_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    SLEEP_DECISION_FIELD_NUMBER: _ClassVar[int]
    RESET_AT_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    model_info: _common_pb2.ModelInfo
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    weight_bytes: int
    kv_cache_bytes: int
    max_draft_tokens: int
    whole_prompts: bool
    kv_groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    weights: Weights
    predecessor_failed: bool
    pipeline_stages: int
    num_ranks: int
    decode_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    draft_methods: _containers.RepeatedCompositeFieldContainer[DraftMethod]
    draft_bounds: _containers.RepeatedCompositeFieldContainer[DraftBound]
    max_adapters: int
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.Adapter]
    adapter_directory: str
    found_adapters: _containers.RepeatedCompositeFieldContainer[FoundAdapter]
    kv_tiers: _containers.RepeatedCompositeFieldContainer[KVTier]
    kv_format: str
    role: ExecutorRole
    sleep: SleepState
    sleep_decision: SleepDecision
    reset_at: int
    def __init__(self, incarnation: _Optional[int] = ..., model_info: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., whole_prompts: _Optional[bool] = ..., kv_groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., predecessor_failed: _Optional[bool] = ..., pipeline_stages: _Optional[int] = ..., num_ranks: _Optional[int] = ..., decode_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., draft_methods: _Optional[_Iterable[_Union[DraftMethod, _Mapping]]] = ..., draft_bounds: _Optional[_Iterable[_Union[DraftBound, _Mapping]]] = ..., max_adapters: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_common_pb2.Adapter, _Mapping]]] = ..., adapter_directory: _Optional[str] = ..., found_adapters: _Optional[_Iterable[_Union[FoundAdapter, _Mapping]]] = ..., kv_tiers: _Optional[_Iterable[_Union[KVTier, _Mapping]]] = ..., kv_format: _Optional[str] = ..., role: _Optional[_Union[ExecutorRole, str]] = ..., sleep: _Optional[_Union[SleepState, _Mapping]] = ..., sleep_decision: _Optional[_Union[SleepDecision, _Mapping]] = ..., reset_at: _Optional[int] = ...) -> None: ...

class FoundAdapter(_message.Message):
    __slots__ = ("name", "path", "digest", "problem", "changed_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    problem: str
    changed_at: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., problem: _Optional[str] = ..., changed_at: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("num_tokens", "seconds")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    seconds: float
    def __init__(self, num_tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DraftMethod(_message.Message):
    __slots__ = ("name", "rounds", "comes_later")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    COMES_LATER_FIELD_NUMBER: _ClassVar[int]
    name: str
    rounds: _containers.RepeatedCompositeFieldContainer[StepCost]
    comes_later: bool
    def __init__(self, name: _Optional[str] = ..., rounds: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., comes_later: _Optional[bool] = ...) -> None: ...

class DraftBound(_message.Message):
    __slots__ = ("num_requests", "max_draft_tokens")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    max_draft_tokens: int
    def __init__(self, num_requests: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("first", "ids")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    first: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class NewRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_prompt_tokens", "num_computed_tokens", "sampling_params", "yields_vector", "second_text_start", "images", "blocks", "draft_domain", "adapter_slot")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    YIELDS_VECTOR_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXT_START_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling_params: _common_pb2.SamplingParams
    yields_vector: bool
    second_text_start: int
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptImage]
    blocks: _containers.RepeatedCompositeFieldContainer[Blocks]
    draft_domain: int
    adapter_slot: int
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., yields_vector: _Optional[bool] = ..., second_text_start: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_common_pb2.PromptImage, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ..., draft_domain: _Optional[int] = ..., adapter_slot: _Optional[int] = ...) -> None: ...

class AdapterSlot(_message.Message):
    __slots__ = ("slot", "digest")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    slot: int
    digest: str
    def __init__(self, slot: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class BlockSet(_message.Message):
    __slots__ = ("group", "ids", "hashes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    group: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: bytes
    def __init__(self, group: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class KVLoad(_message.Message):
    __slots__ = ("load_id", "blocks", "source")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[BlockSet]
    source: str
    def __init__(self, load_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[BlockSet, _Mapping]]] = ..., source: _Optional[str] = ...) -> None: ...

class KVLoaded(_message.Message):
    __slots__ = ("load_id", "missing", "seconds", "bytes")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    missing: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    bytes: _containers.RepeatedCompositeFieldContainer[KVTierBytes]
    def __init__(self, load_id: _Optional[int] = ..., missing: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., bytes: _Optional[_Iterable[_Union[KVTierBytes, _Mapping]]] = ...) -> None: ...

class KVTierBytes(_message.Message):
    __slots__ = ("kind", "bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: KVTierKind
    bytes: int
    def __init__(self, kind: _Optional[_Union[KVTierKind, str]] = ..., bytes: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("step_id", "finished_request_ids", "new_requests", "request_ids", "num_scheduled_tokens", "num_new_blocks", "new_block_ids", "traceparents", "num_draft_tokens", "draft_methods", "term", "tracestates", "adapter_slots", "saves", "loads")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_METHODS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TRACESTATES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    finished_request_ids: _containers.RepeatedScalarFieldContainer[int]
    new_requests: _containers.RepeatedCompositeFieldContainer[NewRequest]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    num_scheduled_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_block_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    draft_methods: _containers.RepeatedScalarFieldContainer[int]
    term: int
    tracestates: _containers.RepeatedScalarFieldContainer[str]
    adapter_slots: _containers.RepeatedCompositeFieldContainer[AdapterSlot]
    saves: _containers.RepeatedCompositeFieldContainer[BlockSet]
    loads: _containers.RepeatedCompositeFieldContainer[KVLoad]
    def __init__(self, step_id: _Optional[int] = ..., finished_request_ids: _Optional[_Iterable[int]] = ..., new_requests: _Optional[_Iterable[_Union[NewRequest, _Mapping]]] = ..., request_ids: _Optional[_Iterable[int]] = ..., num_scheduled_tokens: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_block_ids: _Optional[_Iterable[int]] = ..., traceparents: _Optional[_Iterable[str]] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., draft_methods: _Optional[_Iterable[int]] = ..., term: _Optional[int] = ..., tracestates: _Optional[_Iterable[str]] = ..., adapter_slots: _Optional[_Iterable[_Union[AdapterSlot, _Mapping]]] = ..., saves: _Optional[_Iterable[_Union[BlockSet, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[KVLoad, _Mapping]]] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "request_ids", "num_tokens", "token_ids", "logprobs", "execute_ns", "queue_ns", "idle_ns", "vectors", "errors", "prompt_logprobs", "num_drafted", "loaded")
    class LogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Logprobs
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...
    class VectorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Vector
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Vector, _Mapping]] = ...) -> None: ...
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.RequestError
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.RequestError, _Mapping]] = ...) -> None: ...
    class PromptLogprobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _common_pb2.Logprobs
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.MessageMap[int, _common_pb2.Logprobs]
    execute_ns: int
    queue_ns: int
    idle_ns: int
    vectors: _containers.MessageMap[int, _common_pb2.Vector]
    errors: _containers.MessageMap[int, _common_pb2.RequestError]
    prompt_logprobs: _containers.MessageMap[int, _common_pb2.Logprobs]
    num_drafted: _containers.RepeatedScalarFieldContainer[int]
    loaded: _containers.RepeatedCompositeFieldContainer[KVLoaded]
    def __init__(self, step_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Mapping[int, _common_pb2.Logprobs]] = ..., execute_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., idle_ns: _Optional[int] = ..., vectors: _Optional[_Mapping[int, _common_pb2.Vector]] = ..., errors: _Optional[_Mapping[int, _common_pb2.RequestError]] = ..., prompt_logprobs: _Optional[_Mapping[int, _common_pb2.Logprobs]] = ..., num_drafted: _Optional[_Iterable[int]] = ..., loaded: _Optional[_Iterable[_Union[KVLoaded, _Mapping]]] = ...) -> None: ...

class SleepState(_message.Message):
    __slots__ = ("level", "wakes_on_request")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    WAKES_ON_REQUEST_FIELD_NUMBER: _ClassVar[int]
    level: int
    wakes_on_request: bool
    def __init__(self, level: _Optional[int] = ..., wakes_on_request: _Optional[bool] = ...) -> None: ...

class SleepDecision(_message.Message):
    __slots__ = ("state", "decided_at")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    state: SleepState
    decided_at: int
    def __init__(self, state: _Optional[_Union[SleepState, _Mapping]] = ..., decided_at: _Optional[int] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("state", "term", "decided_at")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    state: SleepState
    term: int
    decided_at: int
    def __init__(self, state: _Optional[_Union[SleepState, _Mapping]] = ..., term: _Optional[int] = ..., decided_at: _Optional[int] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("term", "decided_at")
    TERM_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AT_FIELD_NUMBER: _ClassVar[int]
    term: int
    decided_at: int
    def __init__(self, term: _Optional[int] = ..., decided_at: _Optional[int] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...
