"""Which replica takes a waiting request.

Requests wait at the scheduler, never at a replica, and are placed when a replica decides a step that has room for them:
so late that nobody waits behind a decision that was wrong. It looks at a few replicas only: those that hold most of the
request's prefix, by an index of all blocks (`prefix_index.py`), those on which the fewest run, and itself. If another
of them is the better place (`replica_load.py`), it leaves the request to that one. Each leaves a request only to a
better place, so the best one takes it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.request import Request
from pagewire.services.scheduler.core.step import ScheduledStep
from pagewire.services.scheduler.core.suspicion import is_suspect
from pagewire.services.scheduler.memory.prefix_index import IndexedBlocks, PrefixIndex
from pagewire.services.scheduler.placement.left_behind import NO_LEFT, Left, LeftBehind
from pagewire.services.scheduler.placement.replica_load import NOBODY, Newcomer, OutputLengths, Queued, UnknownCosts

# Replicas that are looked at: of those with the longest prefix, and of those with the fewest requests.
_NUM_HOLDERS = 4
_NUM_LEAST_LOADED = 4
_MAX_NEAR = 16
# Replicas to which others were left of late, and of each so many of these, that a request may share its beginning with.
_NUM_LEFT = 8
_UNKNOWN_COSTS = UnknownCosts()

# Whether no row is open, how many run, when it last took somebody, its id.
_Rank = tuple[bool, int, int, int]


class Placement:
    """The replicas in the order of their loads, and where the blocks are. The rule: the place where a request costs all
    of them the least time, prefixes included."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.wanted: set[Replica] = set()  # to whom somebody was left; see `take_wanted`
        self._replicas: dict[int, Replica] = {}
        self._order: list[_Rank] = []  # of those with an executor
        self._ranks: dict[int, _Rank] = {}
        self._num_steps = 0  # with newcomers
        self._last_taken: dict[int, int] = {}  # the last of these, of each replica
        self._outputs = OutputLengths()
        self.best_known: Replica | None = None  # whose steps are known best
        self.left_behind = LeftBehind()

    # -- replicas ----------------------------------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica
        if self._is_by_prefix and len(self._replicas) > 1:
            for one in self._replicas.values():
                one.place.share_index(IndexedBlocks(self.index, one.replica_id))
        self.note(replica)

    def remove(self, replica: Replica) -> None:
        """It has no executor any more."""
        self.note(replica)
        del self._replicas[replica.replica_id]
        self._last_taken.pop(replica.replica_id, None)
        self.left_behind.remove(replica.replica_id)
        self.wanted.discard(replica)
        if self.best_known is replica:
            self.best_known = None

    def note(self, replica: Replica) -> None:
        """Who runs there may be others than before."""
        rank, before = self._rank(replica) if replica.info else None, self._ranks.get(replica.replica_id)
        if rank == before:
            return
        if before is not None:
            del self._order[bisect_left(self._order, before)]
            del self._ranks[replica.replica_id]
        if rank is not None:
            insort(self._order, rank)
            self._ranks[replica.replica_id] = rank

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        """It has decided, what may have been nothing."""
        if step is not None and step.admitted:
            self._num_steps += 1
            self._last_taken[replica.replica_id] = self._num_steps
        self.note(replica)

    def on_result(self, replica: Replica, outputs: Outputs) -> None:
        self._outputs.on_step(len(outputs.token_ids), len(outputs.ends))
        if self.best_known is None or replica.costs.num_steps > self.best_known.costs.num_steps:
            self.best_known = replica
        self.note(replica)

    # -- places ------------------------------------------------------------------------------------------------------

    def look(self, replica: Replica) -> "Look":
        """For one decision of a replica. Who was left to it, it sees for itself; whom it leaves again, others do."""
        self.left_behind.forget(replica.replica_id)
        return Look(self, replica)

    def choice(self, request: Request) -> Replica | None:
        """Whose a waiting request is, if all decided now; None: nobody has room for it."""
        return self.kept_for(request) or Look(self, None).place(request)

    def leave(self, request: Request, replica: Replica, newcomer: Newcomer) -> None:
        """It is this replica's, until that has decided: one look at a request is enough for all others."""
        self.left_behind.leave(request, replica.replica_id, newcomer)
        self.wanted.add(replica)

    def kept_for(self, request: Request) -> Replica | None:
        """To whom a waiting request was left that can still take it, and has not decided since."""
        replica = self._replicas.get(self.left_behind.holder(request))
        if replica is None or replica.info is None or replica.is_leaving or not replica.suits(request):
            return None
        return replica

    def least_loaded(self, num: int = _NUM_LEAST_LOADED) -> list[Replica]:
        """Replicas with an executor, the least busy first."""
        return [self._replicas[rank[-1]] for rank in self._order[:num]]

    @property
    def num_present(self) -> int:
        """Replicas with an executor."""
        return len(self._order)

    def near(self, request: Request) -> list[Replica]:
        """Those that hold most of its prefix, and those with the fewest requests."""
        return [self._replicas[replica_id] for replica_id in self.candidates(request, None)]

    def take_wanted(self) -> set[Replica]:
        """To whom somebody was left since this was last asked."""
        wanted, self.wanted = self.wanted, set()
        return wanted

    def candidates(self, request: Request, decider: Replica | None, left: Left = NO_LEFT) -> dict[int, Newcomer]:
        """Places for a waiting request, by replica: what it would be there. Those with other weights than it needs are
        none; nor are those whose executors are about to end, or that run a suspect, as long as there are others.

        left: who is to be computed where, so that what they share with it will be found there.
        """
        near: list[Replica] = []
        num_fresh = 0  # to whom nobody is left; the others may be the least busy still
        for replica in self._by_load():
            if num_fresh == _NUM_LEAST_LOADED or len(near) == _MAX_NEAR:
                break
            if replica.suits(request) and not replica.is_leaving and not replica.has_suspect:
                near.append(replica)
                num_fresh += replica.replica_id not in left
        if not near:
            near = [replica for replica in self._by_load() if replica.suits(request)][:_NUM_LEAST_LOADED]
            staying = [replica for replica in near if not replica.is_leaving]
            near = staying or near
        takers = {replica.replica_id: replica for replica in near}
        if decider is not None and (not decider.is_leaving or all(one.is_leaving for one in near)):
            takers[decider.replica_id] = decider
        depths: dict[int, int] = {}
        hashes: Sequence[bytes] = ()
        if self._is_by_prefix and (asked := decider or next(iter(near), None)) is not None:
            hashes = asked.place.indexed_hashes(request)
            depths = self.index.depths(hashes, takers, _NUM_HOLDERS)
            for replica_id, others in islice(reversed(left.items()), _NUM_LEFT) if hashes else ():
                shared = max(_num_shared(hashes, asked.place.indexed_hashes(other)) for other in others[-_NUM_LEFT:])
                depths[replica_id] = max(depths.get(replica_id, 0), shared)
        for replica_id in depths.keys() - takers.keys():
            holder = self._replicas[replica_id]
            if holder.info and holder.suits(request) and not holder.is_leaving and not holder.has_suspect:
                takers[replica_id] = holder
        output_tokens = min(self._outputs.mean, max(1.0, request.max_num_tokens - request.num_tokens))
        return {
            replica_id: replica.place.newcomer(request, hashes[: depths.get(replica_id, 0)], output_tokens)
            for replica_id, replica in takers.items()
        }

    def rank(self, replica_id: int, newcomer: Newcomer, queued: Queued) -> tuple[float, ...]:
        """The smaller, the better a place."""
        replica = self._replicas[replica_id]
        load, costs = replica.place.load, replica.costs
        if not costs.are_known and self.best_known is not None:
            costs = self.best_known.costs
        seconds = load.seconds(newcomer, queued, costs if costs.are_known else _UNKNOWN_COSTS)
        return seconds, load.num_running + queued.num, self._last_taken.get(replica_id, 0), replica_id

    def has_place(self, replica_id: int, newcomer: Newcomer, queued: Queued = NOBODY) -> bool:
        """Whether there are a row and blocks for it."""
        return self._replicas[replica_id].place.load.places_missing(newcomer, queued) <= 0

    def replica(self, replica_id: int) -> Replica:
        return self._replicas[replica_id]

    def place_suspect(self, request: Request) -> Replica | None:
        """The least busy one takes a suspect, for which others have to pause: of those with room, or without another
        suspect, if there are some."""
        present = [replica for replica in self._by_load() if replica.suits(request)]
        staying = [replica for replica in present if not replica.is_leaving] or present
        able = [replica for replica in staying if replica.place.has_room_for(request)]
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
    """Blocks that two begin with; equal hashes mean that all before them are equal, too."""
    return bisect_left(range(min(len(ours), len(theirs))), True, key=lambda i: ours[i] != theirs[i])


class Look:
    """Goes through the waiting requests in their turns, for one decision, and leaves some to others."""

    def __init__(self, placement: Placement, replica: Replica | None) -> None:
        self._placement = placement
        self._replica = replica
        self._verdicts: dict[Request, bool] = {}

    def is_anothers(self, request: Request) -> bool:
        """Whether it was left to another replica, which is still to decide."""
        return request.left_to is not None and self._placement.kept_for(request) not in (None, self._replica)

    def takes(self, request: Request) -> bool:
        """Whether the replica that decides is to take this request, whose turn it is."""
        if len(self._placement) == 1:
            return True
        verdict = self._verdicts.get(request)
        if verdict is None:
            verdict = self._verdicts[request] = self._verdict(request)
        return verdict

    def _verdict(self, request: Request) -> bool:
        placement, replica = self._placement, self._replica
        assert replica is not None
        if is_suspect(request):
            best = placement.place_suspect(request)
            if best is not None and best is not replica:
                placement.wanted.add(best)
            return best is replica
        places = placement.candidates(request, replica, placement.left_behind.requests)
        own = places.get(replica.replica_id)
        if own is None:
            return False
        if not placement.has_place(replica.replica_id, own):
            # It could make room. So could each of the others, unless one need not.
            return not any(placement.has_place(replica_id, one) for replica_id, one in places.items())
        queue_of = placement.left_behind.queue_of
        # It is not worth waiting for a place, unless more is cached there.
        better = {
            replica_id: one
            for replica_id, one in places.items()
            if one.num_cached > own.num_cached or placement.has_place(replica_id, one, queue_of(replica_id))
        }
        best_id = self._best(better | {replica.replica_id: own})
        if best_id == replica.replica_id:
            return True
        placement.leave(request, placement.replica(best_id), places[best_id])
        return False

    def place(self, request: Request) -> Replica | None:
        """The best place among those with room."""
        if is_suspect(request):
            return self._placement.place_suspect(request)
        places = self._placement.candidates(request, None)
        if not any(self._placement.has_place(replica_id, one) for replica_id, one in places.items()):
            return None
        return self._placement.replica(self._best(places))

    def _best(self, places: dict[int, Newcomer]) -> int:
        rank, queue_of = self._placement.rank, self._placement.left_behind.queue_of
        return min(places, key=lambda replica_id: rank(replica_id, places[replica_id], queue_of(replica_id)))
