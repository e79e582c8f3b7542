"""Loading as a list of jobs for a few threads, with one progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from pagewire.services.executor.device.progress import Progress


@dataclass(frozen=True)
class Job:
    """A part of a model that is read at once: rows of a tensor, or a layer with a packed weight."""

    name: str
    num_bytes: int  # its share of the work
    run: Callable[[], None]


def run_jobs(jobs: Sequence[Job], num_threads: int, progress: Progress) -> None:
    """Returns when all are done; the first error ends the rest and is raised.

    Copying, dequantizing and packing release the interpreter lock.
    """
    total, done = max(1, sum(job.num_bytes for job in jobs)), 0

    @torch.inference_mode()  # the mode is a thread's own: the caller may have allocated the weights in it
    def run(job: Job) -> None:
        job.run()

    with ThreadPoolExecutor(num_threads, thread_name_prefix="load") as pool:
        running = {pool.submit(run, job): job for job in jobs}
        try:
            for finished in as_completed(running):
                finished.result()
                done += running[finished].num_bytes
                progress(done / total, running[finished].name)
        finally:
            pool.shutdown(cancel_futures=True)
