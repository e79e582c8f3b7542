"""What the leader knows of another rank."""

from __future__ import annotations

import contextlib
import subprocess
import time
from dataclasses import dataclass

from pagewire.services.executor.ranks.link import Link
from pagewire.v1.admin_pb2 import RankState
from pagewire.v1.rank_link_pb2 import RankReport

REFUSAL_S = 5.0  # for the other ranks to find, too, that they cannot do a step
_EXIT_CODE_S = 1.0  # for a process whose connection is gone to have ended


@dataclass
class Member:
    """A follower."""

    rank: int
    process: subprocess.Popen[bytes] | None  # None: somebody else has started it
    link: Link | None = None
    name: str = ""  # for the log
    is_ready: bool = False
    is_lost: bool = False
    failed: str = ""  # why, by its own words
    refused: str = ""  # why it cannot do the step that it was told last
    _refused_at: float = 0.0

    def take(self, report: RankReport) -> None:
        kind = report.WhichOneof("report")
        if kind == "failed":
            self.failed = report.failed
        elif kind == "refused":
            self.refused, self._refused_at = report.refused, time.monotonic()
        elif kind == "ready":
            self.is_ready = True

    @property
    def refuses_alone(self) -> bool:
        """Whether the leader would have found by now, too, that the step cannot be done."""
        return bool(self.refused) and time.monotonic() - self._refused_at > REFUSAL_S

    @property
    def state(self) -> RankState:
        if self.is_lost:
            return RankState.RANK_STATE_LOST
        return RankState.RANK_STATE_READY if self.is_ready else RankState.RANK_STATE_STARTING

    def exit_code(self) -> int | None:
        """Once its connection is gone. None: it goes on without, or is somebody else's."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(_EXIT_CODE_S)
        return None
