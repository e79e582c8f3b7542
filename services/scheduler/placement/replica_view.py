"""A replica as placement sees it: its load, and the needs of a waiting request on it."""

from collections.abc import Sequence

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.placement.replica_load import Fit, Load
from pagewire.services.scheduler.values.request import Request


class ReplicaView:
    """The load of a replica with an executor, and the fit of requests."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._load: tuple[tuple[object, int], Load] | None = None  # (version of the replica, its load)

    @property
    def load(self) -> Load:
        version = self.replica.version
        if self._load is None or self._load[0] != version:
            self._load = version, self._measure()
        return self._load[1]

    def _measure(self) -> Load:
        replica = self.replica
        kv, running = replica.kv, replica.running
        prefills = [(one, one.num_tokens - one.num_computed_tokens) for one in running if one.is_prefilling]
        prefills = [(one, missing) for one, missing in prefills if missing > 0]
        num, backlog = len(prefills), sum(missing for _, missing in prefills)
        num_short = sum(not one.is_long for one, _ in prefills)
        return Load(
            num_running=len(running),
            num_open_rows=replica.num_open_rows,
            num_free_blocks=kv.indexed.num_admissible if kv.indexed else 0,
            blocks_per_request=(kv.num_blocks - kv.num_free_blocks) / max(1, len(running)),
            backlog_tokens=backlog,
            backlog_pairs=sum(missing * (one.num_computed_tokens + missing / 2) for one, missing in prefills),
            room=replica.prompt_room(len(running) - num, num_short, backlog / max(1, num)),
        )

    def fit(self, request: Request, hashes: Sequence[bytes], output_tokens: float) -> Fit:
        """Returns the needs of a waiting request on this replica. hashes: those of its blocks that the index has for
        the replica. output_tokens: the expected length of the output."""
        indexed, has_adapter = self.replica.kv.indexed, self.replica.slots.holds(request)
        if indexed is None:
            return Fit(request.num_tokens, 0, 0, output_tokens, has_adapter)
        num_cached = len(hashes) * indexed.block_size
        # If the last of these blocks is free, so are all or most of them.
        num_held = num_cached if hashes and indexed.is_held(hashes[-1]) else 0
        num_lacking = indexed.num_lacking(request.num_tokens, num_held)
        return Fit(request.num_tokens, num_cached, num_lacking, output_tokens, has_adapter)

    @property
    def indexed_block_size(self) -> int:
        """The number of tokens for which a hash in the index stands."""
        return self.replica.kv.indexed.block_size if self.replica.kv.indexed else 0

    def indexed_hashes(self, request: Request) -> Sequence[bytes]:
        """Returns the hashes under which the index has blocks of a request's tokens but the last."""
        return self.replica.kv.indexed_hashes(request)
