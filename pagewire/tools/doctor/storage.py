"""The disk with the models."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from pagewire.config import ServeConfig
from pagewire.tools.doctor.finding import Finding, Findings, absent, note, ok, warning
from pagewire.tools.doctor.host import Host, size

_READ_BYTES, _READ_SECONDS, _PIECE = 256 << 20, 1.0, 4 << 20
_SLOW_LOAD_S = 60.0
_REMOTE = ("nfs", "nfs4", "cifs", "fuse.sshfs", "ceph", "lustre", "fuse.gcsfuse", "9p")
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def check_storage(host: Host, config: ServeConfig, model: Path | None) -> Findings:
    """Checks storage. model: its files, if they are on this machine."""
    yield _space(model)
    if model is None:
        yield absent("disk speed", "the model is not here yet")
        return
    yield _file_system(host, model)
    yield _scheduler(host, model)
    yield _speed(model)


def weight_files(model: Path) -> list[Path]:
    files = [model] if model.is_file() else [path for path in model.iterdir() if path.suffix in _WEIGHTS]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def _space(model: Path | None) -> Finding:
    from pagewire.files.models import cache_directory

    place = cache_directory() if model is None else model
    while not place.exists():
        place = place.parent
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    if free > 1 << 30:
        return ok("disk space", f"{size(free)} free where models are kept")
    return warning(
        "disk space",
        f"{size(free)} free where models are kept ({place})",
        "downloads, the weights cache and stored responses need room",
        "free some, or name another disk in PAGEWIRE_CACHE_DIR and --data-dir",
    )


def _file_system(host: Host, model: Path) -> Finding:
    """Checks the file system: that of the longest mount point above the model; fields as in proc(5)."""
    path, best, kind = str(model), "", "unknown"
    for line in (host.read("/proc/mounts") or "").splitlines():
        words = line.split()
        inside = path == words[1] or path.startswith(words[1].rstrip("/") + "/")
        if len(words) > 2 and inside and len(words[1]) >= len(best):
            best, kind = words[1], words[2]
    if kind not in _REMOTE:
        return ok("file system", f"{kind} at {best or '/'}")
    return note(
        "file system",
        f"{kind} at {best}",
        "every start reads the model over the network",
        "copy it to a local disk once (an init container), or --weights-cache on one",
    )


def _scheduler(host: Host, model: Path) -> Finding:
    """Checks the I/O scheduler. `none` is blk-mq's name for noop in guides."""
    number = model.stat().st_dev
    device = host.real(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    text = None
    while text is None and device.count("/") > 2:
        text = host.read(device.removeprefix(str(host.root).rstrip("/")) + "/queue/scheduler")
        folder, device = device, device.rpartition("/")[0]
    if text is None:
        return absent("I/O scheduler", "this system does not control the disk")
    rotating = host.number(folder.removeprefix(str(host.root).rstrip("/")) + "/queue/rotational")
    chosen = next((word.strip("[]") for word in text.split() if word.startswith("[")), text)
    if rotating and folder.rpartition("/")[2].startswith("sd"):  # virtual disks report this without knowing it
        return note(
            "I/O scheduler",
            f"{chosen}, on a rotating disk",
            "a rotating disk reads a model at about 150 MB/s",
            "an SSD for models",
        )
    if chosen in ("none", "mq-deadline", "kyber"):
        return ok("I/O scheduler", chosen)
    return note(
        "I/O scheduler",
        chosen,
        "it orders requests for rotating disks, which costs time on others",
        f"echo none > /sys/block/{folder.rpartition('/')[2]}/queue/scheduler",
    )


def _speed(model: Path) -> Finding:
    """Measures the rate of reading the largest file past the page cache (O_DIRECT), for at most a second."""
    files = weight_files(model)
    if not files:
        return absent("disk speed", "the model has no weights on disk")
    total = sum(path.stat().st_size for path in files)
    try:
        rate = _read_rate(files[0])
    except OSError as error:
        return absent("disk speed", f"{files[0].name} cannot be read past the page cache ({error.strerror})")
    found = f"{rate / 2**20:.0f} MiB/s: {size(total)} of weights in {total / rate:.1f} s"
    if total / rate <= _SLOW_LOAD_S:
        return ok("disk speed", found)
    return warning(
        "disk speed",
        found,
        "a start takes this long unless the files are in the page cache, and so does replacing an executor that "
        "has died",
        "a faster disk; or keep the files in memory (pagewire pull --warm reads them once; vmtouch -l holds them)",
    )


def _read_rate(path: Path) -> float:
    """Returns bytes per second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PIECE) as buffer:  # O_DIRECT requires aligned memory
            start, num_bytes = time.perf_counter(), 0
            while num_bytes < _READ_BYTES and time.perf_counter() - start < _READ_SECONDS:
                got = os.preadv(descriptor, [buffer], num_bytes)
                num_bytes += got
                if got < _PIECE:
                    break
            return num_bytes / max(1e-9, time.perf_counter() - start)
    finally:
        os.close(descriptor)
