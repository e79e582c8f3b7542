"""The slots of one executor: the adapter that lies in each, and the running requests that compute with it.

A slot gets another adapter only while no request computes with it. So that an adapter with one request is not starved
by one with a hundred, the first request that finds no slot reserves the one that is going to be free soonest: until it
has entered, no other request enters with that slot's adapter.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pagewire.services.scheduler.core.seams import Slots
from pagewire.services.scheduler.values.request import FinishReason, Request, RequestStatus


@dataclass(slots=True, eq=False)
class _Slot:
    number: int  # from 1
    digest: str = ""  # of its adapter; empty: it has none
    users: set[Request] = field(default_factory=set)
    used_at: int = 0  # when a request last entered or left
    latest: Request | None = None  # that left

    @property
    def is_doubtful(self) -> bool:
        """True if the last request failed: the executor may have been unable to read the adapter."""
        return not self.users and self.latest is not None and self.latest.finish_reason is FinishReason.ERROR

    @property
    def num_remaining(self) -> int:
        """The most tokens that one of its requests can still gain."""
        return max((user.max_num_tokens - user.num_tokens for user in self.users), default=0)


class AdapterSlots:
    """Gives requests the slots of their adapters; without slots, no request with an adapter enters."""

    def __init__(self, num_slots: int, loaded: Iterable[str] = ()) -> None:
        """loaded: digests of the adapters that the executor can put into a slot."""
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        self._loaded = set(loaded)
        self._changes: list[tuple[int, str]] = []
        self._waiter: Request | None = None  # has reserved a slot
        self._reserved: _Slot | None = None
        self._now = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def digests(self) -> list[str]:
        """The adapters in the slots that running requests use."""
        return [slot.digest for slot in self._slots if slot.users]

    # -- what the executor has ---------------------------------------------------------------------------------------

    def has_loaded(self, digest: str) -> bool:
        return digest in self._loaded

    def on_loaded(self, digest: str) -> None:
        """Takes in that the executor can put the adapter into a slot from now on."""
        self._loaded.add(digest)

    def on_lacking(self, digest: str) -> None:
        """Takes in that the executor cannot put the adapter into a slot any longer."""
        self._loaded.discard(digest)

    def forget(self, digest: str) -> None:
        """Takes in that the executor is told to forget an adapter, with which no request computes."""
        self._loaded.discard(digest)
        if (slot := self._slot_of(digest)) is not None and not slot.users:
            slot.digest = ""

    # -- requests ----------------------------------------------------------------------------------------------------

    def take(self, request: Request) -> bool:
        """Returns whether a waiting request could enter now, as far as its adapter is concerned."""
        if not request.adapter_digest:
            return True
        return request.adapter_digest in self._loaded and self._find(request) is not None

    def holds(self, request: Request) -> bool:
        """Returns whether a request finds its adapter in a slot, or has none."""
        return not request.adapter_digest or self._slot_of(request.adapter_digest) is not None

    def reserve(self, request: Request) -> None:
        """Takes in that a request is passed over. If it lacks a slot and is the first one, a slot is reserved for
        it."""
        if self._is_reserved() or request.adapter_digest not in self._loaded or self.take(request):
            return
        if self._slots:
            self._waiter, self._reserved = request, min(self._slots, key=lambda slot: slot.num_remaining)

    def enter(self, request: Request) -> int:
        """Gives a request that enters the slot of its adapter, and returns its number; 0: it has no adapter."""
        if not request.adapter_digest:
            return 0
        # Its slot may have been reserved after its turn was decided.
        slot = self._slot_of(request.adapter_digest) or self._find(request)
        assert slot is not None, "a request enters without a slot for its adapter"
        if slot.digest != request.adapter_digest or slot.is_doubtful:
            assert not slot.users, "a slot is in use"
            slot.digest = request.adapter_digest
            slot.latest = None
            self._changes.append((slot.number, slot.digest))
        slot.users.add(request)
        self._touch(slot)
        return slot.number

    def leave(self, request: Request) -> None:
        """Takes in that a running request has ended or was preempted."""
        if request.adapter_digest and (slot := self._slot_of(request.adapter_digest)) is not None:
            slot.users.discard(request)
            slot.latest = request
            self._touch(slot)

    def take_changes(self) -> list[tuple[int, str]]:
        """Returns the slots that got another adapter since the last call, with its digest."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def _find(self, request: Request) -> _Slot | None:
        """Returns the slot with which a waiting request would enter now."""
        digest = request.adapter_digest
        reserved = self._reserved if self._is_reserved() else None
        if (own := self._slot_of(digest)) is not None:
            # With the adapter of the request that waits for the slot, others may enter behind it.
            return None if own is reserved and request is not self._waiter else own
        is_waiter = request is self._waiter
        free = [slot for slot in self._slots if not slot.users and (slot is not reserved or is_waiter)]
        return min(free, key=lambda slot: (bool(slot.digest), slot.used_at), default=None)

    def _slot_of(self, digest: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.digest == digest), None) if digest else None

    def _is_reserved(self) -> bool:
        """Returns whether a request still waits for the slot that it has reserved."""
        waiter = self._waiter
        if waiter is None:
            return False
        if waiter.status is not RequestStatus.WAITING or waiter.adapter_digest not in self._loaded:
            self._waiter = self._reserved = None
        return self._waiter is not None

    def _touch(self, slot: _Slot) -> None:
        self._now += 1
        slot.used_at = self._now


def has_adapter(slots: Slots, digest: str) -> bool:
    """Returns whether an executor with these slots can put an adapter into one."""
    return isinstance(slots, AdapterSlots) and slots.has_loaded(digest)
