"""OpenVINO GenAI's continuous batching: `python -m benchmarks.peers.openvino MODEL_DIR`.

MODEL_DIR as `optimum-cli export openvino --task text-generation-with-past --weight-format fp16` makes it. Needs the
package openvino-genai.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openvino_genai

from benchmarks.peers.in_process import PeerFlags, Times, main
from pagewire.config.fields import POSITIVE, flag


@dataclass(frozen=True, kw_only=True)
class Flags(PeerFlags):
    kv_cache_gib: int = flag(2, "size of the KV cache, GiB", group="load", valid=POSITIVE)
    max_num_batched_tokens: int = flag(2048, "tokens that one step may compute", group="load", valid=POSITIVE)


class OpenVino:
    def __init__(self, flags: Flags) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = flags.kv_cache_gib
        scheduler.max_num_seqs = max(flags.concurrency)
        scheduler.max_num_batched_tokens = flags.max_num_batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": flags.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(flags.model, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._request_ids = itertools.count()

    def count_tokens(self, text: str) -> int:
        return int(self._tokenizer.encode(text).input_ids.shape[1])

    def generate(self, prompts: Sequence[str], output_len: int) -> list[Times]:
        generation = openvino_genai.GenerationConfig()
        generation.max_new_tokens = generation.min_new_tokens = output_len
        generation.ignore_eos = True
        generation.do_sample = False
        generation.apply_chat_template = False
        started = time.perf_counter()
        handles = [self._pipeline.add_request(next(self._request_ids), prompt, generation) for prompt in prompts]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - started
            for index, handle in enumerate(handles):
                if handle.can_read() and any(output.generated_ids for output in handle.read().values()):
                    first.setdefault(index, now)
                    last[index] = now
        return [Times(first[index], last[index]) for index in range(len(prompts))]


if __name__ == "__main__":
    sys.exit(main("benchmarks.peers.openvino", Flags, "OpenVINO GenAI in process: curves as of a server.", OpenVino))
