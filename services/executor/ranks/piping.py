"""The pipes between the ranks of a pipeline, and how ranks receive their ends."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.services.executor.parallel.group import LEADER
from pagewire.services.executor.parallel.pipe import Pipe, PipeEnd, Pipes, SharedPipe, make_memory
from pagewire.services.executor.parallel.torch_pipe import TorchPipe
from pagewire.services.executor.ranks.link import Link
from pagewire.v1.rank_link_pb2 import RankWelcome

# (from rank, to rank, content)
_Plan = list[tuple[int, int, str]]
# Descriptors of a socket and of memory for each pipe that a rank has an end of, by the pipe's place in the plan.
Ends = dict[int, tuple[int, int]]


def plan(tensor: int, stages: int, drafts: bool = False) -> _Plan:
    """Returns the pipes of a pipeline. Ranks count from the last stage, which begins with the leader, to the first.

    tensor: ranks per stage. drafts: whether tokens are drafted; then all stages need the known tokens.
    """
    streams = [(rank, rank - tensor, "stream") for stage in range(stages - 1, 0, -1) for rank in _ranks(stage, tensor)]
    informed = range(1 if drafts else max(1, stages - 1), stages)
    return streams + [(LEADER, rank, "tokens") for place in informed for rank in _ranks(place, tensor)]


def _ranks(place: int, tensor: int) -> range:
    return range(place * tensor, (place + 1) * tensor)


def _plan_of(config: ExecutorConfig) -> _Plan:
    speculation = Speculation.of(config)
    drafts = speculation is not None and not speculation.if_possible  # auto drafts nothing with stages
    return plan(config.tensor_parallel_size, config.pipeline_parallel_size, drafts)


def make_ends(config: ExecutorConfig) -> dict[int, Ends]:
    """Returns, by rank, the ends of all pipes between processes of one machine."""
    ends: dict[int, Ends] = {}
    for index, (sender, receiver, _) in enumerate(_plan_of(config)):
        memory, pair = make_memory(), socket.socketpair()
        for rank, end in zip((sender, receiver), pair, strict=True):
            ends.setdefault(rank, {})[index] = (end.detach(), memory)
    return ends


def give_ends(link: Link, ends: Mapping[int, Ends], rank: int) -> None:
    """Sends a joined follower its ends, and closes them in this process. Raises OSError."""
    for _, (connection, memory) in sorted(ends.get(rank, {}).items()):
        link.send(RankWelcome(), connection)
        link.send(RankWelcome(), memory)
        socket.socket(fileno=connection).close()  # so that the other end sees when the follower dies


def take_ends(link: Link, config: ExecutorConfig) -> dict[int, Ends]:
    """Receives the ends of this rank from the leader, in the form of `make_ends`. Raises EOFError, OSError."""
    mine = [index for index, (*ranks, _) in enumerate(_plan_of(config)) if config.rank in ranks]
    return {config.rank: {index: (_descriptor(link), _descriptor(link)) for index in mine}}


def _descriptor(link: Link) -> int:
    descriptor = link.receive_with_descriptor(RankWelcome)[1]
    if descriptor is None:
        raise EOFError("the leader sent no pipe")
    return descriptor


def pipes_of(ends: Mapping[int, Ends], rank: int, config: ExecutorConfig) -> Pipes:
    """Returns the pipes of a rank to processes of the same machine."""
    places = config.pipeline_parallel_size + 3  # a step in each stage, a waiting one, and spare room
    made = {
        index: partial(_shared, connection, memory, places)
        for index, (connection, memory) in ends.get(rank, {}).items()
    }
    return _arranged(_plan_of(config), rank, made)


def _shared(connection: int, memory: int, num_places: int, most_bytes: Sequence[int]) -> Pipe:
    return SharedPipe(socket.socket(fileno=connection), memory, num_places, most_bytes)


def pipes_through_torch(config: ExecutorConfig, rank: int) -> Pipes:
    """Returns the pipes of a rank through torch.distributed. Each pipe has a separate process group, so that the
    stream, which goes forward, never waits for tokens, which go back."""
    made: dict[int, PipeEnd] = {}
    planned = _plan_of(config)
    for index, (sender, receiver, _) in enumerate(planned):
        group = dist.new_group([sender, receiver])  # every rank must make every group
        if rank in (sender, receiver):
            made[index] = _through(group, receiver if rank == sender else sender)
    return _arranged(planned, rank, made)


def _through(group: dist.ProcessGroup, peer: int) -> Callable[[Sequence[int]], Pipe]:
    return lambda most_bytes: TorchPipe(group, peer)


def _arranged(planned: _Plan, rank: int, made: Mapping[int, PipeEnd]) -> Pipes:
    kept = {index: _kept(end) for index, end in made.items()}
    streams = {planned[index][:2].index(rank): end for index, end in kept.items() if planned[index][2] == "stream"}
    tokens = [end for index, end in sorted(kept.items()) if planned[index][2] == "tokens"]
    return Pipes(before=streams.get(1), behind=streams.get(0), tokens=tokens)


def _kept(end: PipeEnd) -> PipeEnd:
    """Makes the pipe once: a runner that comes back from sleep continues where the one before it has stopped."""
    made: list[Pipe] = []

    def make(most_bytes: Sequence[int]) -> Pipe:
        if not made:
            made.append(end(most_bytes))
        return made[0]

    return make
