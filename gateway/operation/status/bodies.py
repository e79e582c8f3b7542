"""What the status routes answer."""

from typing import Literal

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.body import Body


class ServiceHealth(Body):
    """One process. `unreachable`: it does not answer the service before it, and `detail` says why; what is behind it is
    not listed then, as nobody else knows."""

    service: Literal["gateway", "tokenizer", "scheduler", "executor"]
    state: Literal["serving", "not_serving", "unreachable"]
    address: str  # where the service before it looks for it
    detail: str
    pid: int
    uptime_seconds: float
    cpus: str = ""  # processors that its threads may run on, as "0-3,8"


class RequestCounts(Body):
    running: int  # these hold a row
    waiting: int


class Throughput(Body):
    """Means of the last five seconds, and totals since the scheduler began."""

    generation_tokens_per_second: float
    prompt_tokens_per_second: float
    generation_tokens: int
    prompt_tokens: int


class RecentLatencies(Body):
    """Of the last half minute, at most the latest thousand. Seconds; null if there were none."""

    count: int
    p50: float | None
    p95: float | None


class Latency(Body):
    time_to_first_token: RecentLatencies
    inter_token: RecentLatencies


class PrefixCache(Body):
    """Tokens looked up and found, since the scheduler began."""

    queries: int
    hits: int


class PageMap(Body):
    """Cells in the order of block ids, each for so many blocks, of which it shows the first."""

    blocks_per_cell: int
    # State and number of cells, in turns; states: 1 free, 2 cached, 3 used, 4 shared.
    runs: list[int]


class PageGroup(Body):
    """KV blocks of one group of layers: free + cached + used = blocks; the shared are among the used."""

    blocks: int
    block_size: int  # tokens
    free: int
    cached: int  # free, with contents that a request with the same prefix would find
    used: int
    shared: int  # by several requests
    window: int  # tokens that a query sees; 0 = all
    kind: Literal["kv", "state"]
    # In a stream: not there if it is what it was in the last event.
    map: PageMap | UnsetType = UNSET


class RankState(Body):
    """A process of an executor that consists of several. `lost`: all others end, too, and start anew."""

    rank: int  # from 0, the leader
    stage: int  # of a pipeline; 0 has the first layers
    state: Literal["starting", "ready", "lost"]
    wait_seconds: float | None  # for others, since it began; null where ranks do not share memory
    process: str  # its id and host; "" for one that is awaited


class ReplicaState(Body):
    """An executor as the scheduler sees it."""

    address: str
    attached: bool
    running: int
    max_num_seqs: int
    weights_version: str  # as `system_fingerprint`
    replacing_weights: bool  # it lets its requests end before it gets others
    name: str  # as in metrics; another one may have it when this one is gone
    leaving: bool  # it takes no requests as long as there are others
    prefix_cache: PrefixCache
    generation_tokens: int
    ranks: list[RankState]  # none: it is one process, or cannot be asked now
    groups: list[PageGroup]


class Status(Body):
    """Everything at one moment. What nobody answers for is 0 or empty; `services` tells whom to look at."""

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
    replicas: list[ReplicaState]
