"""A scheduler of a few lines that drives a model runner step by step, and a tiny model for it to run."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagewire.config.sampling_params import with_defaults
from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor import stats
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import Blocks, HostTokens, Image, NewRequest, SlotChange, Step, StepOutput
from pagewire.v1.common_pb2 import SamplingParams, TokenSequence

CPU = torch.device("cpu")
BLOCK_SIZE = 8
VOCAB_SIZE = 200
LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=128, max_model_len=96, block_size=BLOCK_SIZE, state_tokens=BLOCK_SIZE
)


def sampling_params(logit_bias: Sequence[tuple[int, float]] = (), **fields: Any) -> SamplingParams:
    """Returns parameters as they reach the rows of the executor. logit_bias: (token id, bias)s."""
    ids, values = [token_id for token_id, _ in logit_bias], [bias for _, bias in logit_bias]
    return with_defaults(SamplingParams(logit_bias_ids=ids, logit_bias_values=values, **fields))


def changed(params: SamplingParams, **fields: Any) -> SamplingParams:
    result = SamplingParams()
    result.CopyFrom(params)
    result.MergeFrom(SamplingParams(**fields))
    return result


GREEDY = sampling_params(temperature=0)


def write_tiny_llama(directory: Path, **changes: Any) -> Path:
    """A directory that `load_format="dummy"` makes a model of. changes: of its config."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


# What a Mixtral's config has beside the tiny Llama's, dense and with experts in 4 bits.
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
}
MIXTRAL_4_BITS = MIXTRAL | {
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "modules_to_not_convert": ["self_attn", "gate"],
    },
}


def tiny_llama(directory: Path, *, dtype: str = "float32", **changes: Any) -> DecoderModel:
    """Makes a tiny Llama with weights large enough that tokens depend on the whole context. changes: of its config."""
    model = load_model(write_tiny_llama(directory, **changes), dtype=dtype, device=CPU, load_format="dummy")
    assert isinstance(model, DecoderModel)
    generator = torch.Generator().manual_seed(1)
    for name, target in model.load_targets().items():
        if not name.endswith("norm.weight"):
            target.normal_(0.0, 0.5, generator=generator)
    with torch.inference_mode():
        for part in (part for module in model.modules() for part in module.parts):
            if isinstance(part, PackedGrouped):
                part.scales.mul_(16)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@dataclass
class Driver:
    """Knows token and block counts, as a scheduler does, and no tensors. A request has equal blocks in every group."""

    runner: ModelRunner
    num_blocks: int
    tokens: dict[int, list[int]] = field(default_factory=dict)  # output by request id
    _step_id: int = 0
    _blocks_of: dict[int, list[int]] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _drafted: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> drafts by request id
    _new: list[NewRequest] = field(default_factory=list)
    _finished: list[int] = field(default_factory=list)
    slot_changes: list[SlotChange] = field(default_factory=list)  # of the next step

    def __post_init__(self) -> None:
        # Neighbouring blocks of a request must not be neighbours in memory.
        self._free = np.random.default_rng(7).permutation(self.num_blocks).tolist()

    def add(
        self,
        request_id: int,
        token_ids: list[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_prompt_tokens: int | None = None,
        shared_blocks: Iterable[int] = (),
        yields_vector: bool = False,
        images: Sequence[Image] = (),
        matcher: Matcher | None = None,
        adapter_slot: int = 0,
    ) -> None:
        """Enters with the next step. shared_blocks hold the KV of the first tokens (prefix hit)."""
        shared = list(shared_blocks)
        blocks = shared + [self._free.pop() for _ in range(len(shared), -(-len(token_ids) // BLOCK_SIZE))]
        computed = len(shared) * BLOCK_SIZE
        self._blocks_of[request_id], self._computed[request_id] = blocks, computed
        self.tokens[request_id] = []
        self._new.append(
            NewRequest(
                request_id=request_id,
                token_ids=np.array(token_ids, dtype=np.int32),
                num_prompt_tokens=num_prompt_tokens or len(token_ids),
                num_computed_tokens=computed,
                blocks=[Blocks(0, np.array(blocks, dtype=np.int32))] * self.num_groups,
                sampling=sampling,
                yields_vector=yields_vector,
                images=images,
                matcher=matcher,
                adapter_slot=adapter_slot,
            )
        )

    def finish(self, request_id: int) -> list[int]:
        """Leaves with the next step; its blocks are free at once."""
        self._finished.append(request_id)
        blocks = self._blocks_of.pop(request_id)
        self._free.extend(blocks)
        return blocks

    @property
    def num_groups(self) -> int:
        return len(self.runner.kv_groups)

    def blocks(self, request_id: int) -> list[int]:
        return self._blocks_of[request_id]

    @property
    def num_steps(self) -> int:
        return self._step_id

    def launch(self, scheduled: Mapping[int, int], drafts: Mapping[int, int] | None = None) -> StepOutput:
        """Executes one step with num_scheduled_tokens by request id, without looking at what it samples.

        drafts: how many of them are drafts, by request id.
        """
        self._step_id += 1
        self._drafted[self._step_id] = dict(drafts or {})
        new_blocks, groups = {}, self.num_groups
        for request_id, count in scheduled.items():
            self._computed[request_id] += count
            needed = -(-self._computed[request_id] // BLOCK_SIZE) - len(self._blocks_of[request_id])
            new_blocks[request_id] = [self._free.pop() for _ in range(max(0, needed))]
            self._blocks_of[request_id] += new_blocks[request_id]
        step = Step(
            step_id=self._step_id,
            request_ids=list(scheduled),
            num_scheduled_tokens=np.array(list(scheduled.values()), dtype=np.int64),
            num_new_blocks=np.array(
                [[len(new_blocks[request_id])] * groups for request_id in scheduled], dtype=np.int64
            ).reshape(len(scheduled), groups),
            new_block_ids=np.array(
                [b for request_id in scheduled for b in new_blocks[request_id] * groups], dtype=np.int32
            ),
            finished_request_ids=self._finished,
            new_requests=self._new,
            num_draft_tokens=np.array([drafts.get(id, 0) for id in scheduled]) if drafts else None,
            slot_changes=self.slot_changes,
        )
        self._new, self._finished, self.slot_changes = [], [], []
        return self.runner.execute(step)

    def collect(self, output: StepOutput) -> HostTokens:
        host = output.wait()
        gained = np.split(host.token_ids, host.num_tokens.cumsum())
        for request_id, tokens in zip(output.request_ids, gained, strict=False):
            if request_id in self.tokens:
                self.tokens[request_id] += tokens.tolist()
                refused = self._drafted[output.step_id].get(request_id, 0) + 1 - len(tokens)
                self._computed[request_id] -= refused
        return host

    def step(self, scheduled: Mapping[int, int], drafts: Mapping[int, int] | None = None) -> HostTokens:
        return self.collect(self.launch(scheduled, drafts))

    def generate(self, request_id: int, num_tokens: int, first: int) -> list[int]:
        """Steps one request alone: `first` tokens, then one by one."""
        self.step({request_id: first})
        while len(self.tokens[request_id]) < num_tokens:
            self.step({request_id: 1})
        return self.tokens[request_id]


def make_driver(
    model: Model, num_blocks: int = 64, limits: Limits = LIMITS, proposer: Proposer | None = None
) -> Driver:
    return Driver(assemble(model, limits, num_blocks, CPU, proposer=proposer), num_blocks)


def alone(model: Model, token_ids: list[int], num_tokens: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """The reference: a runner of its own, the prompt in one piece, then token by token."""
    driver = make_driver(model)
    driver.add(0, token_ids, sampling)
    return driver.generate(0, num_tokens, first=len(token_ids))


class BrokenRunner(ModelRunner):
    """A runner with a device that fails at the second step of a stream, and at all later ones."""

    is_broken = False

    def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
        self.is_broken |= step.step_id == 2
        if self.is_broken:
            raise RuntimeError("unspecified launch failure")
        return super().execute(step, launching)


SEEDED = sampling_params(seed=11, temperature=0.9, top_p=0.9, top_k=40, min_p=0.01)
# One pair of tokens in four is forbidden.
EVEN = range(20, 40, 2)
RESTRICTED = sampling_params(
    seed=13,
    allowed_token_ids=range(20, 40),
    bad_words=[TokenSequence(token_ids=[first, second]) for first in EVEN for second in EVEN],
)
PENALIZED = sampling_params(seed=12, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=6)
WITH_LOGPROBS = changed(SEEDED, logprobs=2)


def check_random_steps(model: Model, driver: Driver, seed: int) -> None:
    """Requests of all kinds come, decode in every number and order, and leave; each has the tokens it has alone."""
    kinds = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]
    samplings: dict[int, SamplingParams] = {}
    lengths: dict[int, int] = {}
    rng = np.random.default_rng(seed)
    for _ in range(25):
        scheduled = {}
        if len(samplings) < LIMITS.max_num_seqs and rng.random() < 0.5:
            request_id, length = len(samplings), int(rng.integers(1, 30))
            samplings[request_id] = kinds[request_id % len(kinds)]
            driver.add(request_id, prompt(length, seed=request_id), samplings[request_id])
            lengths[request_id] = length
            scheduled[request_id] = length
        for request_id in rng.permutation(list(samplings)).tolist():
            if request_id not in scheduled and rng.random() < 0.8:
                scheduled[request_id] = 1
        if scheduled:
            driver.step(scheduled)
    for request_id, sampling in samplings.items():
        tokens = driver.tokens[request_id]
        assert tokens == alone(model, prompt(lengths[request_id], seed=request_id), len(tokens), sampling)


def graph_steps(mode: str) -> float:
    """Steps that were captured, replayed or eager, in this process so far."""
    return sum(stats.GRAPH_STEPS.labels(mode, kind)._value.get() for kind in ("decode", "mixed", "prefill"))
