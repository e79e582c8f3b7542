"""A replica as a place for waiting requests: what they would find there."""

from collections.abc import Callable, Sequence

from pagewire.services.scheduler.core.request import Request
from pagewire.services.scheduler.core.rows import Rows
from pagewire.services.scheduler.memory.prefix_index import IndexedBlocks
from pagewire.services.scheduler.placement.replica_load import Load, Newcomer

# Tokens of prompts in a step beside so many decodes, where so many short prompts of so many tokens are computed.
Room = Callable[[float, float, float], float]


class Place:
    """Except for `share_index` and `has_room_for`, there must be an executor."""

    def __init__(self, rows: Rows, room: Room) -> None:
        self._rows = rows
        self._room = room

    @property
    def load(self) -> Load:
        rows = self._rows
        assert rows.kv is not None
        if rows.load is None:
            prefills = [(one, one.num_tokens - one.num_computed_tokens) for one in rows.running if one.is_prefilling]
            prefills = [(one, missing) for one, missing in prefills if missing > 0]
            num, backlog = len(prefills), sum(missing for _, missing in prefills)
            num_short = sum(not one.is_long for one, _ in prefills)
            rows.load = Load(
                num_running=len(rows.running),
                num_open_rows=rows.num_open,
                num_free_blocks=rows.kv.indexed.num_admissible if rows.kv.indexed else 0,
                blocks_per_request=(rows.kv.num_blocks - rows.kv.num_free_blocks) / max(1, len(rows.running)),
                backlog_tokens=backlog,
                backlog_pairs=sum(missing * (one.num_computed_tokens + missing / 2) for one, missing in prefills),
                room=self._room(len(rows.running) - num, num_short, backlog / max(1, num)),
            )
        return rows.load

    def newcomer(self, request: Request, hashes: Sequence[bytes], output_tokens: float) -> Newcomer:
        """A waiting request, as it would be here. hashes: of those of its blocks that are found here, as the index
        tells."""
        kv = self._rows.kv
        assert kv is not None
        if kv.indexed is None:
            return Newcomer(request.num_tokens, 0, 0, output_tokens)
        num_cached = len(hashes) * kv.indexed.block_size
        # If nobody holds the last one of them, they are among the free ones, or most of them.
        num_held = num_cached if hashes and kv.indexed.is_held(hashes[-1]) else 0
        num_lacking = kv.indexed.num_lacking(request.num_tokens, num_held)
        return Newcomer(request.num_tokens, num_cached, num_lacking, output_tokens)

    def has_room_for(self, request: Request) -> bool:
        """Whether the request could be admitted to a step that is decided now: there is a row, there are blocks, and
        those that run leave some of the token budget."""
        rows = self._rows
        if (
            rows.kv is None
            or not rows.suits(request)
            or not rows.num_open
            or not rows.quarantine.admits(request, not rows.running)
        ):
            return False
        computed = rows.find_room(request)
        if computed is None:
            return False
        outstanding = sum(max(1, running.num_tokens - running.num_computed_tokens) for running in rows.running)
        budget = rows.limits.max_num_batched_tokens - outstanding
        return budget > 0 and rows.limits.chunk(request.num_tokens - computed.num_tokens, budget, False) > 0

    def share_index(self, index: IndexedBlocks) -> None:
        """From now on the index knows which blocks are here."""
        if self._rows.index is None:
            self._rows.index = index
            if self._rows.kv is not None and self._rows.kv.indexed is not None:
                self._rows.kv.indexed.share(index)

    def indexed_hashes(self, request: Request) -> Sequence[bytes]:
        """Under which the index has blocks of a request's tokens but the last."""
        assert self._rows.kv is not None
        return self._rows.kv.indexed_hashes(request)
