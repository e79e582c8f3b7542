"""Adapters in host memory: those that were given, and the most recently used of them in the form of the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from pagewire.services.executor.adapters import metrics
from pagewire.services.executor.step.step import Step
from pagewire.v1.common_pb2 import Adapter


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The adapter of one layer, in the model's dtype: a rank's share of it. A linear layer has one expert."""

    down: Tensor  # [num_experts, num_parts, rank, num_inputs]
    up: Tensor  # [num_experts, rank, num_outputs], with the scale
    ranks: Tensor  # int32 [num_experts, num_parts], 0 = nothing is added

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter that fits the model."""

    digest: str
    rank: int  # the largest
    base_model: str  # as its files say
    layers: Mapping[int, LayerWeights]  # by index of the layer in `Fitting.layers`
    has_experts: bool = False  # on any rank

    @property
    def nbytes(self) -> int:
        return sum(weights.nbytes for weights in self.layers.values())


class HostAdapters:
    """The adapters that an executor was given, and those of them that are in memory.

    Adapters are awaited from their loading, for a request, to the step that puts them into a slot. They leave memory
    after all others, the last loaded first; as others are put into slots, `absent` says what to read ahead of its step.
    """

    def __init__(self, most: int | None = None) -> None:
        """most: adapters in memory; those that were not used for longest are read again; None: all are kept."""
        self._most = most
        self._given: dict[tuple[str, str], Adapter] = {}  # by name and digest
        self._held: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest, the least recently used first
        self._awaited: dict[str, None] = {}  # digests, the first loaded first

    def given(self) -> list[Adapter]:
        return list(self._given.values())

    def origin(self, digest: str) -> Adapter | None:
        """Returns what was given with these contents, if anything was."""
        return next((adapter for adapter in self._given.values() if adapter.digest == digest), None)

    def get(self, digest: str) -> HostAdapter | None:
        """Returns an adapter in memory, and counts as its use."""
        if (adapter := self._held.get(digest)) is not None:
            self._held.move_to_end(digest)
        return adapter

    def held(self, digest: str) -> HostAdapter:
        """Returns an adapter that must be in memory."""
        return self._held[digest]

    def give(self, given: Adapter) -> None:
        """Remembers what a name stands for."""
        self._given[given.name, given.digest] = given

    def keep(self, adapter: HostAdapter) -> list[HostAdapter]:
        """Takes an adapter into memory; returns those that have to leave."""
        self._held[adapter.digest] = adapter
        self._held.move_to_end(adapter.digest)
        most = len(self._held) if self._most is None else self._most
        left = [self._held.pop(self._next_to_leave()) for _ in range(len(self._held) - most)]
        self._report()
        return left

    def _next_to_leave(self) -> str:
        others = (digest for digest in self._held if digest not in self._awaited)
        last = (digest for digest in reversed(self._awaited) if digest in self._held)
        return next(others, None) or next(last)

    def expect(self, digest: str) -> None:
        """Takes in that a request with these contents is going to enter."""
        self._awaited.setdefault(digest)

    def on_placed(self, digest: str) -> None:
        """Takes in that a step puts these contents into a slot."""
        if digest in self._awaited and digest not in self._held:
            # Requests with adapters that were loaded before, and kept instead of this one, may have ended.
            before = list(self._awaited)
            self._awaited = dict.fromkeys(before[before.index(digest) :])
        self._awaited.pop(digest, None)

    def absent(self) -> Adapter | None:
        """Returns the first awaited adapter that is not in memory, though there would be room for it."""
        if self._most is None or (len(self._held) >= self._most and self._held.keys() <= self._awaited.keys()):
            return None
        return next((self.origin(digest) for digest in self._awaited if digest not in self._held), None)

    def forget(self, digest: str, name: str = "") -> list[HostAdapter]:
        """Forgets contents under a name, by default under all; returns them if they were in memory and have no other
        name."""
        forgotten = {key for key in self._given if key[1] == digest and name in ("", key[0])}
        self._given = {key: adapter for key, adapter in self._given.items() if key not in forgotten}
        if name and self.origin(digest) is not None:
            return []
        self._awaited.pop(digest, None)
        held = self._held.pop(digest, None)
        self._report()
        return [] if held is None else [held]

    def forget_name(self, name: str) -> None:
        """Takes a name away. What it stood for stays, without a name."""
        named = [adapter for key, adapter in self._given.items() if key[0] == name]
        self._given = {key: adapter for key, adapter in self._given.items() if key[0] != name}
        for adapter in named:
            if self.origin(adapter.digest) is None:
                nameless = Adapter()
                nameless.CopyFrom(adapter)
                nameless.name = ""
                self.give(nameless)

    def _report(self) -> None:
        metrics.ADAPTERS.set(len(self._held))
        metrics.ADAPTER_HOST_BYTES.set(sum(adapter.nbytes for adapter in self._held.values()))


def with_adapters(step: Step, host: HostAdapters) -> Step:
    """Returns the step of a leader with this rank's share of its adapters; all ranks have loaded the same."""
    changes = [
        replace(change, adapter=host.held(change.digest) if change.digest else None) for change in step.slot_changes
    ]
    return replace(step, slot_changes=changes)
