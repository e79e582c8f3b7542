"""The leader's side of an executor group: starts the followers, admits them, sends them commands, and notices when one
is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.process.watchdog import BEAT_S, Silence
from pagewire.services.executor import stats
from pagewire.services.executor.parallel.group import Failure, Group, RankLost
from pagewire.services.executor.ranks import link as links
from pagewire.services.executor.ranks.formation import (
    common_flags,
    group_with_memory,
    group_with_torch,
    make_memory,
    make_store,
    secret_of,
    shares_memory,
    stage_of_rank,
    waited,
)
from pagewire.services.executor.ranks.link import Link, Refused
from pagewire.services.executor.ranks.member import REFUSAL_S, Member
from pagewire.services.executor.ranks.piping import give_ends, make_ends, pipes_of
from pagewire.services.executor.ranks.tls_link import leaders_link
from pagewire.stack import followers
from pagewire.stack.followers import ending
from pagewire.v1.admin_pb2 import RankState, ServiceStatus
from pagewire.v1.common_pb2 import Adapter
from pagewire.v1.executor_pb2 import ForgetBlocksRequest, KVLoaded, Weights
from pagewire.v1.rank_link_pb2 import RankCommand, RankHello, RankReport
from pagewire.wire.tls import failed_handshake

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_LOOK_EVERY_S = 0.2
_END_S = 3.0  # for followers to end without a signal


class Leader:
    """Made, started and stopped on the main thread; `gather` and `send` are the device thread's."""

    def __init__(self, config: ExecutorConfig, on_lost: Callable[[RankLost], None]) -> None:
        """on_lost: called once, on any thread, when a rank is lost after all were ready."""
        self._local = followers.started(config) if config.starts_followers else None
        if self._local is not None:
            config = replace(config, leader=self._local.address, group_secret=self._local.secret)
        elif not config.leader:
            raise StartupError("--distributed-executor-backend external: --leader says where rank 0 listens; add it")
        self._config = config
        self._on_lost = on_lost
        self._secret = secret_of(config)
        self._memory = make_memory(config) if shares_memory(config) else None
        self._store = make_store(config) if self._memory is None else None
        self._ends = make_ends(config) if self._memory is not None else {}
        self.failure = Failure(self._memory)
        processes = {} if self._local is None else self._local.processes
        self._followers = {rank: Member(rank, processes.get(rank)) for rank in range(1, config.num_ranks)}
        self._changed = threading.Condition()
        self._stopping = False
        self._is_ready = False  # like all other ranks
        self._was_killed = False  # a rank, from outside of the group
        self.on_loaded: Callable[[KVLoaded], None] = lambda loaded: None  # receives reports of loads, on any thread
        self._forgetting, self._num_forgets = threading.Lock(), 0  # the latter: commands to forget blocks

    def start(self) -> None:
        """Listens. Raises StartupError."""
        self._listening = links.listen(self._config.leader)
        if self._local is None:
            logger.info("waiting for %d other ranks on %s", len(self._followers), self._config.leader)
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    def gather(self) -> Group:
        """Waits until all ranks have joined. Raises StartupError if one cannot."""
        with self._changed:
            while any(follower.link is None for follower in self._followers.values()):
                self._check_processes()
                self.check_start()
                self._changed.wait(_LOOK_EVERY_S)
        if self._memory is not None:
            pipes = pipes_of(self._ends, 0, self._config)
            group = group_with_memory(self._config, 0, self._memory, self.failure, pipes)
            stats.RANK_WAIT_SECONDS.set_function(lambda: self._waited(0) or 0.0)
            return group
        assert self._store is not None
        return group_with_torch(self._config, 0, self._store, self.failure)

    def wait_ready(self) -> None:
        """Waits until all ranks can execute steps. Raises StartupError."""
        with self._changed:
            while not all(follower.is_ready for follower in self._followers.values()):
                self.check_start()
                self._changed.wait(_LOOK_EVERY_S)
        stats.RANKS.set(1 + len(self._followers))
        self._is_ready = True

    def send(self, command: RankCommand) -> None:
        """Sends a command to all followers. Raises RankLost."""
        self.failure.check()
        frame = links.frame_of(command)
        for follower in self._followers.values():
            assert follower.link is not None
            try:
                follower.link.send_frame(frame)
            except OSError:
                self._lost(follower, "the connection to it broke")
                self.failure.check()

    def all_refuse(self, why: str) -> None:
        """Returns once all followers report that, like this rank, they cannot execute the step. Raises RankLost if one
        can."""
        others = self._followers.values()
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure.reason is not None or all(other.refused for other in others), REFUSAL_S
            )
            for other in others:
                if not other.refused:
                    self.failure.set(
                        f"rank 0 of the executor failed, and rank {other.rank} did not: {why}", in_a_step=True
                    )
                other.refused = ""
        self.failure.check()

    def forget(self, request: ForgetBlocksRequest, timeout: float) -> bool:
        """Makes the tiers of all followers forget blocks; returns whether they have in time. Raises RankLost."""
        others = self._followers.values()
        with self._forgetting:
            self._num_forgets += 1
            number = self._num_forgets
            self.send(RankCommand(forget_blocks=request))
        with self._changed:
            self._changed.wait_for(
                lambda: self.failure.reason is not None or all(other.num_answers >= number for other in others),
                timeout,
            )
        self.failure.check()
        return all(other.num_answers >= number and number not in other.unforgotten for other in others)

    def load(self, weights: Weights) -> None:
        self.send(RankCommand(load=weights))

    def load_adapter(self, adapter: Adapter) -> None:
        self.send(RankCommand(load_adapter=adapter))

    def drop_adapter(self, digest: str) -> None:
        with contextlib.suppress(RankLost):  # the device thread notices
            self.send(RankCommand(drop_adapter=digest))

    def install(self) -> None:
        self.send(RankCommand(install=True))

    def drop(self) -> None:
        with contextlib.suppress(RankLost):  # the device thread notices
            self.send(RankCommand(drop=True))

    def describe(self, status: ServiceStatus, with_kv_maps: bool) -> None:
        """Fills in the states of all ranks. Called on any thread."""
        own = RankState.RANK_STATE_READY if self._is_ready else RankState.RANK_STATE_STARTING
        ranks = [(0, own, f"process {os.getpid()} on {socket.gethostname()}")]
        ranks += [(rank, follower.state, follower.name) for rank, follower in self._followers.items()]
        for rank, state, process in ranks:
            stage = stage_of_rank(self._config, rank).index
            waited = self._waited(rank)
            status.executor.ranks.add(rank=rank, stage=stage, state=state, wait_seconds=waited, process=process)

    def _waited(self, rank: int) -> float | None:
        """Returns the seconds that a rank has waited for others, if known."""
        return None if self._memory is None else waited(self._config, self._memory, rank)

    def stop(self) -> None:
        """Ends the followers."""
        self._stopping = True
        self._listening.close()
        for follower in self._followers.values():
            if follower.link is not None:
                with contextlib.suppress(OSError):
                    follower.link.send(RankCommand(end=True))
        self.failure.set("the executor stops")
        if self._local is not None:
            self._local.stop()
        for follower in self._followers.values():
            if follower.link is not None:
                follower.link.close()

    def end_as_it_was_ended(self) -> None:
        """Ends this process by SIGKILL if a rank was killed from outside, so that the supervisor blames no request."""
        if self._was_killed:
            logging.shutdown()
            os.kill(os.getpid(), signal.SIGKILL)

    def _check_processes(self) -> None:
        for follower in self._followers.values():
            code = None if follower.process is None else follower.process.poll()
            if code is not None:
                self._raise_reason(follower)
                raise StartupError(f"rank {follower.rank} ended while it started ({ending(code)}); see its log above")

    def _raise_reason(self, follower: Member) -> None:
        if follower.failed:
            raise StartupError(f"rank {follower.rank} cannot start: {follower.failed}")

    def check_start(self) -> None:
        """Raises StartupError, with the reason, if a rank is lost or cannot start."""
        for follower in self._followers.values():
            self._raise_reason(follower)
        try:
            self.failure.check()
        except RankLost as error:
            raise StartupError(str(error)) from error

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return  # stopped
            threading.Thread(target=self._let_in, args=(sock,), name="rank-joins", daemon=True).start()

    def _let_in(self, sock: socket.socket) -> None:
        sock.settimeout(_HANDSHAKE_S)
        try:
            link = leaders_link(self._config, sock)
            hello = links.let_in(link, self._secret, common_flags(self._config), self._config.num_ranks)
            follower = self._followers[hello.rank]
            with self._changed:
                if follower.link is not None:
                    raise Refused(
                        f"rank {hello.rank} has joined already ({follower.name}); give each rank its own --rank"
                    )
                self._welcome(link, hello)
                sock.settimeout(None)
                follower.name = f"process {hello.pid} on {hello.host}"
                follower.link = link
                self._changed.notify_all()
        except Refused as refusal:
            logger.error("a rank was refused: %s", refusal)
            with contextlib.suppress(OSError):
                links.refuse(link, str(refusal))
        except (EOFError, OSError) as error:
            cause = failed_handshake(str(error)) or error
            logger.warning("a connection to %s does not come from a rank: %s", self._config.leader, cause)
        else:
            logger.info("rank %d has joined: %s", follower.rank, follower.name)
            threading.Thread(target=self._listen, args=(follower,), name=f"rank-{follower.rank}", daemon=True).start()

    def _welcome(self, link: Link, hello: RankHello) -> None:
        descriptor = None if self._memory is None else self._memory.descriptor
        store = "" if self._store is None else f"{self._store.host}:{self._store.port}"
        links.welcome(link, self._secret, hello, store, descriptor)
        give_ends(link, self._ends, hello.rank)

    def _listen(self, follower: Member) -> None:
        """Reads the reports of a follower until it ends."""
        link, timeout = follower.link, self._config.hang_timeout
        assert link is not None
        # Earlier than the waiting step is found to hang: the cause is the stopped process, not the step.
        silence = Silence(max(timeout - 2 * BEAT_S, timeout / 2))
        try:
            while not self._stopping:
                if link.has_something(silence.step):
                    silence.broken()
                    self._take(follower, link.receive(RankReport))
                    self._check_refusal(follower)
                elif timeout and follower.is_ready and silence.lasts():
                    self._was_killed = True  # like a hanging process that the supervisor kills
                    self._lost(
                        follower, f"hangs: no sign of life for {silence.timeout:g} s (--hang-timeout {timeout:g})"
                    )
                    if follower.process is not None:
                        follower.process.kill()
                    link.close()  # a thread that sends to it may be waiting
                    return
        except (EOFError, OSError):
            self._lost(follower, self._how_it_ended(follower))

    def _take(self, follower: Member, report: RankReport) -> None:
        if report.HasField("loaded"):
            self.on_loaded(report.loaded)
            return
        with self._changed:
            follower.take(report)
            self._changed.notify_all()

    def _check_refusal(self, follower: Member) -> None:
        """Ends the group if this rank has begun a step that the follower cannot execute."""
        with self._changed:
            is_alone = follower.refuses_alone
            if is_alone:
                follower.failed = follower.refused
        if is_alone:
            self._lost(follower, f"failed: {follower.failed}")

    def _how_it_ended(self, follower: Member) -> str:
        if follower.failed:
            return f"failed: {follower.failed}"
        code = follower.exit_code()
        if code is None or code in (-signal.SIGKILL, -signal.SIGTERM):  # a rank that fails reports it
            self._was_killed = True
        return "ended" if code is None else f"ended ({ending(code)})"

    def _lost(self, follower: Member, how: str) -> None:
        reason = f"rank {follower.rank} of the executor ({follower.name}) {how}"
        follower.is_lost = True
        in_a_step = bool(follower.failed)
        if self._stopping or not self.failure.set(reason, in_a_step=in_a_step):
            return
        logger.error("%s; all ranks restart", reason)
        with self._changed:
            self._changed.notify_all()
        if all(other.is_ready for other in self._followers.values()):
            self._on_lost(RankLost(reason, in_a_step))
