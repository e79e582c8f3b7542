"""The cores and the memory that a process may use, read from files as the kernel writes them."""

import ctypes
import os
from pathlib import Path

import pytest

from pagewire.process import cgroup, process

MIB, GIB = 2**20, 2**30


class Groups:
    """A tree of control groups and what /proc/self/cgroup says."""

    def __init__(self, directory: Path) -> None:
        self.mount, self.own = directory / "cgroup", directory / "self"

    def write(self, group: str, **files: str) -> None:
        directory = self.mount / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text + "\n")

    def cpu_quota(self) -> float | None:
        return cgroup.cpu_quota(self.mount, self.own)

    def available_memory(self) -> int | None:
        return cgroup.available_memory(self.mount, self.own)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_version_2_in_a_container(groups: Groups) -> None:
    groups.own.write_text("0::/\n")
    groups.write("", cpu__max="150000 100000", memory__max=str(4 * GIB), memory__current=str(3 * GIB))
    groups.write("", memory__stat=f"anon 1\nfile 2\ninactive_file {GIB // 2}")
    assert groups.cpu_quota() == 1.5
    assert groups.available_memory() == 1.5 * GIB


def test_version_2_the_tightest_group_above_counts(groups: Groups) -> None:
    groups.own.write_text("0::/a/b\n")
    groups.write("a", cpu__max="200000 100000", memory__max=str(2 * GIB), memory__current=str(GIB))
    groups.write("a/b", cpu__max="max 100000", memory__max="max", memory__current=str(GIB // 2))
    assert groups.cpu_quota() == 2
    assert groups.available_memory() == GIB


def test_version_1_where_proc_has_the_hosts_path(groups: Groups) -> None:
    groups.own.write_text("5:memory:/docker/1234\n3:cpu,cpuacct:/docker/1234\n0::/docker/1234\n")
    groups.write("cpu", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    groups.write(
        "memory",
        memory__limit_in_bytes=str(GIB),
        memory__usage_in_bytes=str(GIB // 2),
        memory__stat="inactive_file 1\ntotal_inactive_file 4096",
    )
    assert groups.cpu_quota() == 3
    assert groups.available_memory() == GIB // 2 + 4096


@pytest.mark.parametrize("own", ["5:memory:/x\n3:cpu:/x\n0::/\n", "0::/\n", ""])
def test_no_limit(groups: Groups, own: str) -> None:
    groups.own.write_text(own)
    groups.write("cpu/x", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    groups.write("memory/x", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="1")
    assert groups.cpu_quota() is None
    assert groups.available_memory() is None


def test_nothing_is_known_outside_linux(groups: Groups) -> None:
    assert groups.cpu_quota() is None
    assert groups.available_memory() is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (0.5, 1), (2.0, 2), (2.1, 3), (64.0, 8)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    assert process.usable_cores() == cores


def test_usable_cores_where_affinity_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    assert process.usable_cores() == 4


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what it keeps")
def test_freed_memory_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    size = 64 << 10  # too small to be mapped on its own
    blocks = [libc.malloc(size) for _ in range(2048)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(ctypes.c_void_p(block))
    before = own_rss()
    process.release_unused_memory()
    assert before - own_rss() > 100 * MIB
    libc.free(ctypes.c_void_p(blocks[-1]))


def own_rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("code", "failed"), [(0, False), (1, True), (70, True), (-9, False), (-15, False), (-11, True)]
)
def test_a_successor_knows_whether_the_one_before_ended_by_its_own_doing(
    code: int, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(process.PREDECESSOR, str(code))
    assert process.predecessor_failed() is failed


def test_without_a_supervisor_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process.PREDECESSOR, raising=False)
    assert not process.predecessor_failed()
