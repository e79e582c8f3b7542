"""Runs OpenVINO GenAI's continuous batching for `python -m benchmarks.peers`; needs the package openvino-genai."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from typing import Any

import openvino_genai

from benchmarks.peers.engines.worker import InBatches, Times, Unfinished, Work, main


class OpenVino:
    """A pipeline with paged attention, chunked prompts and prefix caching."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: model (a folder), threads, kv_cache_gib, max_num_seqs, max_num_batched_tokens."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["kv_cache_gib"]
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._request_ids = itertools.count()

    def generate(self, work: Work, deadline: float) -> list[Times]:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = work.output_len
        if work.exact:
            generation.min_new_tokens = work.output_len
            generation.ignore_eos = True
        else:
            generation.set_eos_token_id(self._pipeline.get_tokenizer().get_eos_token_id())
        generation.do_sample = False
        generation.apply_chat_template = False
        started = time.perf_counter()
        handles = [self._pipeline.add_request(next(self._request_ids), prompt, generation) for prompt in work.prompts]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        counts = dict.fromkeys(range(len(handles)), 0)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for index, handle in enumerate(handles):
                if handle.can_read() and (count := sum(len(one.generated_ids) for one in handle.read().values())):
                    first.setdefault(index, now)
                    last[index] = now
                    counts[index] += count
            if now > deadline and self._pipeline.has_non_finished_requests():
                self._give_up(handles)
                raise Unfinished
        return [Times(started, first[index], last[index], counts[index]) for index in range(len(handles))]

    def _give_up(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


if __name__ == "__main__":
    sys.exit(main(lambda settings: InBatches(OpenVino(settings))))
