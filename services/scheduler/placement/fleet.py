"""The replicas in the order of their loads, and the candidates among them for a waiting request."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from math import inf

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.costs.output_lengths import OutputLengths
from pagewire.services.scheduler.placement.deferrals import NONE_DEFERRED, Deferrals, DeferredRequests
from pagewire.services.scheduler.placement.prefix_index import IndexedBlocks, PrefixIndex
from pagewire.services.scheduler.placement.replica_load import NOTHING_DEFERRED, Deferred, Fit, UnknownCosts
from pagewire.services.scheduler.placement.replica_view import ReplicaView
from pagewire.services.scheduler.roles.roles import Roles
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.step import ScheduledStep

# The numbers of replicas that are compared: those with the longest prefix, and those with the fewest requests.
_NUM_HOLDERS = 4
_NUM_LEAST_LOADED = 4
_MAX_NEAR = 16
# The numbers of recent replicas with deferred requests, and of requests of each, that are searched for a common prefix.
_NUM_DEFERRED = 8
_UNKNOWN_COSTS = UnknownCosts()

# (no row is open, number of running requests, step in which it last admitted one, id)
_Rank = tuple[bool, int, int, int]


class Fleet:
    """All replicas, and an index of their blocks."""

    def __init__(
        self, is_suspect: Callable[[Request], bool], output_lengths: OutputLengths, roles: Roles | None = None
    ) -> None:
        self.index = PrefixIndex()
        self.tier_index = PrefixIndex()  # of blocks that replicas can load
        # Returns the expected seconds in which a replica, by its id, loads blocks with these hashes.
        self.load_seconds: Callable[[int, Sequence[bytes]], float] = lambda replica_id, hashes: inf
        self.roles = roles or Roles()
        self._suits: Callable[[Replica, Request], bool] = Replica.suits
        self.is_suspect = is_suspect
        self.deferrals = Deferrals()
        self.best_known: Replica | None = None
        self._wanted: set[Replica] = set()
        self._replicas: dict[int, Replica] = {}
        self._views: dict[int, ReplicaView] = {}
        self._order: list[_Rank] = []  # replicas with an executor
        self._ranks: dict[int, _Rank] = {}
        self._num_steps = 0  # steps that admitted requests
        self._last_taken: dict[int, int] = {}  # the last such step of each replica
        self._output_lengths = output_lengths

    # -- replicas ----------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica
        self._views[replica.replica_id] = ReplicaView(replica)
        if self._is_by_prefix and len(self._replicas) > 1:
            for one in self._replicas.values():
                one.share_index(IndexedBlocks(self.index, one.replica_id))
        self.note(replica)

    def remove(self, replica: Replica) -> None:
        self.note(replica)
        del self._replicas[replica.replica_id], self._views[replica.replica_id]
        self._last_taken.pop(replica.replica_id, None)
        self.deferrals.forget(replica.replica_id)
        self._wanted.discard(replica)
        if self.best_known is replica:
            self.best_known = None

    def note(self, replica: Replica) -> None:
        rank, before = self._rank(replica) if replica.info else None, self._ranks.get(replica.replica_id)
        if rank == before:
            return
        if before is not None:
            del self._order[bisect_left(self._order, before)]
            del self._ranks[replica.replica_id]
        if rank is not None:
            insort(self._order, rank)
            self._ranks[replica.replica_id] = rank
        if rank is None or before is None:
            self._follow_roles()

    def _follow_roles(self) -> None:
        """Takes in that executors came or went, or may have begun to leave."""
        self.roles.follow(self._replicas.values())
        self._suits = self.roles.suits if self.roles.are_apart else Replica.suits
        if self.best_known is not None and not self.roles.computes_prompts(self.best_known):
            self.best_known = None

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        if step is not None and step.admitted:
            self._num_steps += 1
            self._last_taken[replica.replica_id] = self._num_steps
        if self.roles.are_apart:
            self.roles.on_step(replica, step)
            self._wanted |= self.roles.take_wanted()
        self.note(replica)

    def on_result(self, replica: Replica, outputs: Outputs) -> Sequence[Request]:
        if self.best_known is None or replica.costs.num_steps > self.best_known.costs.num_steps:
            self.best_known = replica if self.roles.computes_prompts(replica) else self.best_known
        if outputs.ends or outputs.refused:
            self.note(replica)
        return ()

    # -- places ------------------------------------------------------------------------------------------------------

    def defer(self, request: Request, replica_id: int, fit: Fit) -> None:
        """Leaves a request to a replica until it has decided, so that the others need not look the request up again."""
        self.deferrals.add(request, replica_id, fit)
        # A replica at which the request waits for blocks decides once they are there: two such replicas would wake each
        # other without end.
        kv = self._replicas[replica_id].kv
        if not kv.keeps_waiting(request) and (kv.tiers is None or kv.tiers.are_known):
            self.want(self._replicas[replica_id])

    def want(self, replica: Replica) -> None:
        self._wanted.add(replica)

    def kept_for(self, request: Request) -> Replica | None:
        """Returns the replica that a waiting request was left to, if the replica can still take it and has not decided
        since."""
        holder = self.deferrals.holder(request)
        replica = None if holder is None else self._replicas.get(holder)
        if replica is None or replica.info is None or replica.is_leaving or not self._suits(replica, request):
            return None
        return replica

    def least_loaded(self, num: int = _NUM_LEAST_LOADED) -> list[Replica]:
        if not self.roles.are_apart:
            return [self._replicas[rank[-1]] for rank in self._order[:num]]
        return list(islice(filter(self.roles.computes_prompts, self._by_load()), num))

    @property
    def num_present(self) -> int:
        return len(self.least_loaded(len(self._order))) if self.roles.are_apart else len(self._order)

    @property
    def kinds_before_new(self) -> Collection[bool]:
        return self.roles.kinds_before_new

    def take_wanted(self) -> set[Replica]:
        wanted, self._wanted = self._wanted, set()
        return wanted

    def candidates(
        self,
        request: Request,
        decider: Replica | None,
        deferred: DeferredRequests = NONE_DEFERRED,
        suits: Callable[[Replica, Request], bool] | None = None,
    ) -> dict[int, Fit]:
        """Returns the replicas that may take a waiting request, and its needs there. Leaves out replicas with other
        weights than it needs and, while there are others, replicas that run a suspect or have an executor that is about
        to end.

        deferred: requests that were left to replicas, where a prefix that they share with this request will be found.
        suits: returns whether a replica may take it; by default, those that may now.
        """
        suits = suits or self._suits
        near: list[Replica] = []
        num_fresh = 0  # without deferred requests, which make a replica busier than it looks
        for replica in self._by_load():
            if num_fresh == _NUM_LEAST_LOADED or len(near) == _MAX_NEAR:
                break
            if suits(replica, request) and not replica.is_leaving and not replica.has_suspect:
                near.append(replica)
                num_fresh += replica.replica_id not in deferred
        if not near:
            near = [replica for replica in self._by_load() if suits(replica, request)][:_NUM_LEAST_LOADED]
            staying = [replica for replica in near if not replica.is_leaving]
            near = staying or near
        takers = {replica.replica_id: replica for replica in near}
        if decider is not None and (not decider.is_leaving or all(one.is_leaving for one in near)):
            takers[decider.replica_id] = decider
        depths: dict[int, int] = {}
        tier_depths: dict[int, int] = {}
        hashes: Sequence[bytes] = ()
        if self._is_by_prefix and (asked := decider or next(iter(near), None)) is not None:
            hashes = self._views[asked.replica_id].indexed_hashes(request)
            depths = self.index.depths(hashes, takers, _NUM_HOLDERS)
            if len(self.tier_index):
                tier_depths = self.tier_index.depths(hashes, takers, _NUM_HOLDERS)
            hashes_of = self._views[asked.replica_id].indexed_hashes
            for replica_id, others in islice(reversed(deferred.items()), _NUM_DEFERRED) if hashes else ():
                shared = max(_num_shared(hashes, hashes_of(other)) for other in others[-_NUM_DEFERRED:])
                depths[replica_id] = max(depths.get(replica_id, 0), shared)
        for replica_id in (depths.keys() | tier_depths.keys()) - takers.keys():
            holder = self._replicas[replica_id]
            if holder.info and suits(holder, request) and not holder.is_leaving and not holder.has_suspect:
                takers[replica_id] = holder
        # While lengths are unknown, a request is expected to reach its own limit.
        output_tokens = min(self._output_lengths.mean(inf), max(1.0, request.max_num_tokens - request.num_tokens))
        fits: dict[int, Fit] = {}
        for replica_id, one in takers.items():
            depth, tier_depth = depths.get(replica_id, 0), tier_depths.get(replica_id, 0)
            fits[replica_id] = fit = self._views[replica_id].fit(request, hashes[:depth], output_tokens)
            if self.roles.are_apart and not self.roles.stays(one, request):
                fit.output_tokens = 1.0
            if tier_depth > depth:
                loadable = hashes[depth:tier_depth]
                fit.num_loadable = len(loadable) * self._views[replica_id].indexed_block_size
                fit.load_seconds = self.load_seconds(replica_id, loadable)
        return fits

    def rank(self, replica_id: int, fit: Fit, deferred: Deferred) -> tuple[float, ...]:
        """Returns a sort key, best first: the time that the request would cost all requests together on this
        replica."""
        load, costs = self._views[replica_id].load, self._replicas[replica_id].costs
        if not costs.are_known and self.best_known is not None:
            costs = self.best_known.costs
        seconds = load.seconds(fit, deferred, costs if costs.are_known else _UNKNOWN_COSTS)
        return seconds, load.num_running + deferred.num, self._last_taken.get(replica_id, 0), replica_id

    def has_place(self, replica_id: int, fit: Fit, deferred: Deferred = NOTHING_DEFERRED) -> bool:
        """Returns whether there are a row and blocks for the request in addition to deferred ones."""
        return self._views[replica_id].load.places_missing(fit, deferred) <= 0

    def replica(self, replica_id: int) -> Replica:
        return self._replicas[replica_id]

    def choose_for_suspect(self, request: Request) -> Replica | None:
        """Returns the least busy replica, as other requests have to pause for a suspect. Prefers replicas with room,
        then those without another suspect."""
        present = [replica for replica in self._by_load() if self._suits(replica, request)]
        staying = [replica for replica in present if not replica.is_leaving] or present
        able = [replica for replica in staying if replica.has_room_for(request)]
        able = able or [replica for replica in staying if not replica.has_suspect] or staying
        return min(able, key=lambda replica: (replica.num_running, replica.replica_id), default=None)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def _is_by_prefix(self) -> bool:
        return True

    def _by_load(self) -> Iterator[Replica]:
        return (self._replicas[rank[-1]] for rank in self._order)

    def _rank(self, replica: Replica) -> _Rank:
        replica_id = replica.replica_id
        return replica.num_open_rows <= 0, replica.num_running, self._last_taken.get(replica_id, 0), replica_id

    def check_integrity(self) -> None:
        """Raises AssertionError unless the order and the index agree with the replicas."""
        present = {replica_id for replica_id, replica in self._replicas.items() if replica.info}
        assert {rank[-1] for rank in self._order} == present == self._ranks.keys(), "one is missing"
        assert self._order == sorted(self._order), "replicas are out of order"
        for replica_id, rank in self._ranks.items():
            assert rank == self._rank(self._replicas[replica_id]), "a load is another"


def _num_shared(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Returns the number of common leading blocks; equal hashes mean that all earlier ones are equal, too."""
    return bisect_left(range(min(len(ours), len(theirs))), True, key=lambda i: ours[i] != theirs[i])
