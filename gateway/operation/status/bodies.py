"""The answers of the status routes."""

from typing import Literal

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.body import Body


class ServiceHealth(Body):
    """One process. `unreachable`: it does not answer the service before it, for the reason in `detail`; the services
    behind it are then not listed."""

    service: Literal["gateway", "tokenizer", "scheduler", "executor"]
    state: Literal["serving", "not_serving", "unreachable"]
    address: str  # that the service before it uses
    detail: str
    pid: int
    uptime_seconds: float
    model: str  # that it serves; "" of a gateway, and while it is not known
    cpus: str = ""  # processors that its threads may run on, such as "0-3,8"


class RequestCounts(Body):
    running: int  # requests that hold a row
    waiting: int


class Throughput(Body):
    """Means of the last five seconds, and totals since the scheduler started."""

    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    generation_tokens: int
    prompt_tokens: int


class RecentLatencies(Body):
    """Percentiles in seconds over the last half minute, at most the latest thousand values; null if there were none."""

    count: int
    p50: float | None
    p95: float | None


class Latency(Body):
    time_to_first_token: RecentLatencies
    inter_token: RecentLatencies


class PrefixCache(Body):
    """Tokens looked up and found, since the scheduler started."""

    queries: int
    hits: int


class PageMap(Body):
    """Cells in the order of block ids. Each stands for `blocks_per_cell` blocks and shows the first."""

    blocks_per_cell: int
    # State and number of cells, alternating; states: 1 free, 2 cached, 3 used, 4 shared.
    runs: list[int]


class PageGroup(Body):
    """KV blocks of one group of layers: free + cached + used = blocks; shared blocks are part of the used ones."""

    blocks: int
    block_size: int  # tokens
    free: int
    cached: int  # free, with contents that a request with the same prefix reuses
    used: int
    shared: int  # by several requests
    window: int  # tokens that a query attends to; 0 = all
    kind: Literal["kv", "state"]
    # In a stream, absent if it has not changed since the last event.
    map: PageMap | UnsetType = UNSET


class RankState(Body):
    """One of several processes of an executor. `lost`: all of them end and restart."""

    rank: int  # from 0, the leader
    stage: int  # of a pipeline; 0 has the first layers
    state: Literal["starting", "ready", "lost"]
    wait_seconds: float | None  # for other ranks, since the start; null if ranks do not share memory
    process: str  # its id and host; "" if it has not started


class ReplicaState(Body):
    """An executor, as the scheduler knows it."""

    address: str
    model: str
    attached: bool
    running: int
    max_num_seqs: int
    weights_version: str  # as `system_fingerprint`
    replacing_weights: bool  # its requests finish before it gets new weights
    name: str  # as in metrics; reused when this executor is gone
    role: str  # both, prefill or decode, as --role; "" while it is not attached
    leaving: bool  # it gets no requests while there are other executors
    prefix_cache: PrefixCache
    generation_tokens: int
    ranks: list[RankState]  # empty: one process, or no answer
    groups: list[PageGroup]


class ModelSleep(Body):
    """The sleep of the model. `level`: 0 while it is awake."""

    level: int
    wakes_on_request: bool  # no operator put it to sleep
    problem: str  # why it could not be woken


class LineStatus(Body):
    """A model. A request for one that is `asleep` or `absent` loads it, unless it `sleeps_until_woken`."""

    model: str
    state: Literal["ready", "asleep", "loading", "absent"]
    problem: str  # why it could not be loaded; "" = it could
    progress: str  # of loading, in words
    pinned: bool  # it stays in memory
    sleeps_until_woken: bool
    memory_bytes: int  # while ready; 0 = unknown
    memory_measured: bool  # else estimated
    loads: int  # since the start
    rest_time: float | None  # seconds since 1970, when it rests without requests; null: not by itself


class Status(Body):
    """The state of all services at one moment. Values of a service that does not answer are 0 or empty."""

    object: Literal["status"]
    time: float  # seconds since 1970
    version: str
    ready: bool
    reason: str  # why it is not ready
    num_gateways: int  # connected to the tokenizer service
    services: list[ServiceHealth]
    requests: RequestCounts
    throughput: Throughput
    latency: Latency
    prefix_cache: PrefixCache
    preemptions: int
    sleep: ModelSleep  # of the default model
    models: list[LineStatus]  # the default one first
    memory_bytes: int  # that all models may use; 0 = unknown
    replicas: list[ReplicaState]
