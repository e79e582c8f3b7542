"""The leader's record of another rank."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass, field

from pagewire.services.executor.ranks.link import Link
from pagewire.v1.admin_pb2 import RankState
from pagewire.v1.rank_link_pb2 import RankReport

REFUSAL_S = 5.0  # for the other ranks to report that they cannot execute the step either
_EXIT_CODE_S = 1.0  # for a process to end after its connection is lost


@dataclass
class Member:
    """A follower."""

    rank: int
    process: subprocess.Popen[bytes] | None  # None: started from outside
    link: Link | None = None
    name: str = ""  # for the log
    is_ready: bool = False
    is_lost: bool = False
    failed: str = ""  # the reason that it reported
    refused: str = ""  # why it cannot execute the last step
    num_answers: int = 0  # to commands to forget blocks
    unforgotten: set[int] = field(default_factory=set)  # numbers of the commands, from 1, that it could not follow
    _refused_at: float = 0.0

    def take(self, report: RankReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "failed":
            self.failed = report.failed
        elif kind == "refused":
            self.refused, self._refused_at = report.refused, time.monotonic()
        elif kind == "ready":
            self.is_ready = True
        elif kind == "has_forgotten":
            self.num_answers += 1
            if not report.has_forgotten:
                self.unforgotten.add(self.num_answers)

    @property
    def refuses_alone(self) -> bool:
        """True if the leader has executed a step that this rank refused: otherwise it would have reported by now."""
        return bool(self.refused) and time.monotonic() - self._refused_at > REFUSAL_S

    @property
    def state(self) -> RankState:
        if self.is_lost:
            return RankState.RANK_STATE_LOST
        return RankState.RANK_STATE_READY if self.is_ready else RankState.RANK_STATE_STARTING

    def exit_code(self) -> int | None:
        """Returns the exit code after the connection is lost; None: the process is alive, or started from outside."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(_EXIT_CODE_S)
        return None
