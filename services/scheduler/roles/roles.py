"""The requests that a replica may run, where some executors only compute prompts and others only continue them.

A request without output belongs to a replica that computes prompts. With its first token it leaves that replica as if
it were preempted, and waits for one that decodes, which loads its blocks. Both kinds of replicas stand in for each
other: without a replica of one kind, the other kind takes all requests. Pure.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from pagewire.services.scheduler.adapters.slots import has_adapter
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.roles.transfers import Transfers
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.request import Request, RequestStatus
from pagewire.services.scheduler.values.step import ScheduledStep

logger = logging.getLogger(__name__)

# Returns the replica that would decode a request that still has no output; None if none has room.
ChooseDecoder = Callable[[Request], Replica | None]
_ALL, _WITHOUT_OUTPUT, _WITH_OUTPUT, _NONE = (False, True), (False,), (True,), ()
# The share of what an executor that computes prompts keeps which handed-over requests may fill while they wait: beyond
# that no prompt begins, because the blocks of those that wait would be evicted before they are loaded.
_MAX_BACKLOG = 0.5


class Roles:
    """Knows which replicas compute prompts and which decode; `follow` keeps that up to date."""

    def __init__(self, transfers: Transfers | None = None) -> None:
        """transfers: None: no executor has a role, whatever it reports."""
        self._transfers = transfers
        self.are_apart = False  # an executor has a role
        self._are_strict = False  # each executor has one
        self._prompters: list[Replica] = []  # that compute prompts and take new requests
        self._decoders: dict[str, list[Replica]] = {}  # that take new requests, by the version of their weights
        self._max_backlog = 0.0  # tokens
        self._waiting: set[Request] = set()  # that were handed over, and perhaps have ended since
        self._warnings: set[str] = set()
        self._blocked: set[Replica] = set()  # that begin no prompt because these are too many

    def follow(self, replicas: Iterable[Replica]) -> None:
        """Takes in the present replicas, those that are about to end or to get other weights included."""
        present = [(replica, replica.info) for replica in replicas if replica.info is not None]
        were_apart = self.are_apart
        self.are_apart = self._transfers is not None and any(info.role != "both" for _, info in present)
        if self._transfers is None and any(info.role != "both" for _, info in present):
            self._warn(
                "roles of executors mean nothing with --no-enable-prefix-caching: each computes all of a request"
            )
        if self._transfers is None or not (were_apart or self.are_apart):
            return
        self._transfers.follow([replica for replica, _ in present] if self.are_apart else ())
        able = [(one, info) for one, info in present if not (one.is_leaving or one.is_draining)]
        self._prompters = [one for one, info in able if info.role != "decode"]
        self._are_strict = bool(able) and {"prefill", "decode"} == {info.role for _, info in able}
        self._decoders = {}
        for replica, info in able:
            if info.role != "prefill":
                self._decoders.setdefault(info.weights.version, []).append(replica)
        for replica, info in able:
            others = self._decoders.get(info.weights.version, ()) if info.role == "prefill" else ()
            if others and not any(self._decodes_for(one, info) for one in others):
                self._warn(
                    f"{replica.name} computes prompts, but no executor can load its KV blocks, so it decodes, too: "
                    "give all of them the same model, --dtype, --kv-cache-dtype and kind of device"
                )
        self._max_backlog = _MAX_BACKLOG * min(
            (_kept_tokens(info) for _, info in able if info.role == "prefill"), default=0
        )

    def _warn(self, text: str) -> None:
        """Logs a warning, once."""
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning(text)

    # -- which replica -----------------------------------------------------------------------------------------------

    def suits(self, replica: Replica, request: Request) -> bool:
        """Returns whether a replica may compute a waiting request."""
        return self.allow(replica, request) and replica.suits(request)

    def allow(self, replica: Replica, request: Request) -> bool:
        """Returns whether a replica may compute a waiting request as far as its role is concerned."""
        role = _role(replica)
        if role == "both":
            return True
        if request.num_output_tokens:
            return role == "decode" or not self._decoders_of(request, request.weights_version)
        return role == "prefill" or not _with_adapter(self._prompters, request)

    def kinds(self, replica: Replica) -> Collection[bool]:
        """Returns whether the replica takes requests with output (True), without (False), or both."""
        role = _role(replica)
        if role == "decode" and self._prompters and not (replica.info and replica.info.max_adapters):
            return _WITH_OUTPUT
        if role != "prefill" or replica.info is None or not self._decoders.get(replica.info.weights.version):
            return _ALL
        # A request may need weights, or an adapter, that only this replica has.
        may_stay = len(self._decoders) > 1 or replica.info.max_adapters
        without_output = not self._has_backlog()
        if not without_output:
            self._blocked.add(replica)
        return (
            (_ALL if without_output else _WITH_OUTPUT) if may_stay else (_WITHOUT_OUTPUT if without_output else _NONE)
        )

    def stays(self, replica: Replica, request: Request) -> bool:
        """Returns whether a running request has further tokens on its replica."""
        info = replica.info
        if info is None or info.role != "prefill":
            return True
        return not any(self._decodes_for(one, info) for one in self._decoders_of(request, info.weights.version))

    def decodes(self, replica: Replica, request: Request) -> bool:
        """Returns whether a request without output can go on at this replica when it has some."""
        return replica in self._decoders_of(request, request.weights_version) and replica.slots.take(request)

    def _decodes_for(self, replica: Replica, info: ExecutorInfo) -> bool:
        """Returns whether a replica can load what an executor has computed."""
        return replica.info is not None and replica.info.kv_format == info.kv_format != ""

    def computes_prompts(self, replica: Replica) -> bool:
        """Returns whether new requests may begin on a replica."""
        return _role(replica) != "decode" or not self._prompters

    @property
    def kinds_before_new(self) -> Collection[bool]:
        """The kinds of waiting requests that may have their turn before a new one where it runs, as in `kinds`."""
        return _WITHOUT_OUTPUT if self.are_apart and self._are_strict else _ALL

    def _decoders_of(self, request: Request, version: str) -> list[Replica]:
        """Returns the replicas that can continue a request with tokens of weights of this version; empty: of any."""
        found = (
            self._decoders.get(version, []) if version else [one for some in self._decoders.values() for one in some]
        )
        return _with_adapter(found, request)

    # -- the handover ------------------------------------------------------------------------------------------------

    def before_decision(self, replica: Replica) -> None:
        """Takes in that a replica is about to decide."""
        assert self._transfers is not None
        self._transfers.before_decision(replica)

    def on_step(self, replica: Replica, step: ScheduledStep | None) -> None:
        """Takes in a decision of a replica."""
        assert self._transfers is not None
        if step is not None and _role(replica) == "prefill":
            self._transfers.on_step(replica)
        if step is None and not replica.running and any(one.blocks.awaited is None for one in self._handed_over()):
            self._transfers.release_all(replica)

    def on_result(self, replica: Replica, outputs: Outputs, choose: ChooseDecoder) -> Sequence[Request]:
        """Takes in a result; returns the requests that leave the replica with the tokens that they gained. choose:
        finds the replica that would decode a request."""
        assert self._transfers is not None
        if _role(replica) != "prefill":
            return ()
        leaving = [one for one in outputs.requests if not one.is_finished and not self.stays(replica, one)]
        for request in leaving:
            self._transfers.on_leaving(replica, request)
            request.is_long = False
            request.num_preemptions -= 1  # it leaves as if it were preempted, but loses nothing
        self._waiting.update(leaving)
        self._transfers.on_result(replica, choose)
        return leaving

    def take_wanted(self) -> set[Replica]:
        """Returns the replicas that have a reason to decide since the last call."""
        assert self._transfers is not None
        wanted, self._transfers.wanted = self._transfers.wanted, set()
        if self._blocked and not self._has_backlog():
            wanted |= self._blocked
            self._blocked = set()
        return wanted

    def _handed_over(self) -> Collection[Request]:
        """Returns the requests that wait for a replica that decodes."""
        self._waiting = {one for one in self._waiting if one.status is RequestStatus.WAITING}
        return self._waiting

    def _has_backlog(self) -> bool:
        """Returns whether so many requests wait for a replica that decodes that no prompt should begin."""
        return sum(request.num_tokens for request in self._handed_over()) > self._max_backlog > 0


def _with_adapter(replicas: list[Replica], request: Request) -> list[Replica]:
    """Returns those of the replicas with the adapter of a request, if it has one."""
    digest = request.adapter_digest
    return [replica for replica in replicas if has_adapter(replica.slots, digest)] if digest else replicas


def _role(replica: Replica) -> str:
    return "both" if replica.info is None else replica.info.role


def _kept_tokens(info: ExecutorInfo) -> int:
    """Returns about how many tokens have blocks that others can load from the executor."""
    num_blocks, block_bytes = info.num_blocks, sum(group.block_bytes for group in info.kv_groups)
    if info.kv_tiers and block_bytes:
        num_blocks = min(num_blocks, sum(tier.bytes for tier in info.kv_tiers) // block_bytes)
    return num_blocks * info.block_size
