"""Facts of a machine: files of /proc and /sys, and the output of a few programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from pagewire.process import binding, cgroup

_TIMEOUT_S = 20.0


class Host:
    """A machine. root: the parent of /proc and /sys; another directory for the record of another machine."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._said: dict[tuple[str, ...], str | None] = {}

    def read(self, path: str) -> str | None:
        """Returns the file's text without surrounding blanks; None if it is missing or not readable."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        text = self.read(path)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def glob(self, pattern: str) -> list[str]:
        """Returns sorted paths relative to the root."""
        return sorted(f"/{path.relative_to(self.root)}" for path in self.root.glob(pattern.lstrip("/")))

    def real(self, path: str) -> str:
        """Returns the target of a link."""
        return str((self.root / path.lstrip("/")).resolve())

    def run(self, *command: str) -> str | None:
        """Returns the output of a command, which runs once; None if there is no such program, or it fails."""
        if command not in self._said:
            self._said[command] = self._run(command)
        return self._said[command]

    def _run(self, command: tuple[str, ...]) -> str | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    def usable_cpus(self) -> set[int]:
        """The processors on which a process that is started from here may run."""
        return set(os.sched_getaffinity(0))

    def nodes(self) -> dict[int, tuple[int, ...]]:
        """The processors of each NUMA node that has some."""
        return binding.nodes(self.root / binding.NODES.relative_to("/"))

    def cpu_quota(self) -> float | None:
        return cgroup.cpu_quota()

    def of_groups(self, controller: str, *files: str) -> list[tuple[str, ...]]:
        """Returns the contents of these files for this process's control group and those above, innermost first, if all
        files exist."""
        mount, own = self.root / "sys/fs/cgroup", self.root / "proc/self/cgroup"
        found = []
        for place in dict.fromkeys([*cgroup.groups(controller, mount, own), mount, mount / controller]):
            texts = [self.read("/" + str((place / file).relative_to(self.root))) for file in files]
            if None not in texts:
                found.append(tuple(text or "" for text in texts))
        return found

    def descriptor_limit(self) -> int:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def size_of(self, mount: str) -> int | None:
        """Returns the bytes of the file system at a mount point."""
        try:
            status = os.statvfs(self.root / mount.lstrip("/"))
        except OSError:
            return None
        return status.f_blocks * status.f_frsize

    def meminfo(self) -> dict[str, int]:
        """Returns the values of /proc/meminfo: bytes, and counts of huge pages."""
        fields = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
        return fields


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
