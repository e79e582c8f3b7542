"""Model shapes that the engine benchmark runs with random weights, and their rooflines."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.measure import Ceilings

PROMPT_WORDS_SEED = 0


@dataclass(frozen=True)
class Targets:
    """Per batch size: the share of the roofline that is asked of the executor."""

    must: dict[int, float]
    stretch: dict[int, float]
    graphs_over_eager: float | None  # at batch 1
    depth_2_over_1: dict[int, float]
    over_dense: tuple[float, float] | None = None  # at batch 1, times the model's in 16 bits: must, stretch


@dataclass(frozen=True)
class BenchModel:
    """A model's config.json, and what is asked of it. dense: of a quantized one, the name of the same in 16 bits."""

    name: str
    config: dict[str, Any]
    targets: Targets | None = None
    dense: str | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def _head_dim(self) -> int:
        return int(self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def num_weights(self) -> int:
        """The weights that every step reads: all matrices, the output projection too, but not the embedding."""
        return self._num_layer_weights + int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def _num_layer_weights(self) -> int:
        c = self.config
        attention = 2 * (c["num_attention_heads"] + c["num_key_value_heads"]) * self._head_dim
        return int(c["num_hidden_layers"] * c["hidden_size"] * (attention + 3 * c["intermediate_size"]))

    def weight_bytes(self, itemsize: int) -> float:
        """Returns the bytes of `num_weights`. Layers are quantized, with a 16-bit scale and a zero point per group."""
        if (quantization := self.config.get("quantization_config")) is None:
            return self.num_weights * itemsize
        bits = quantization["bits"] + (16 + quantization["bits"]) / quantization["group_size"]
        return self._num_layer_weights * bits / 8 + (self.num_weights - self._num_layer_weights) * itemsize

    def kv_bytes_per_token(self, itemsize: int) -> int:
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * self._head_dim * itemsize)

    def roofline_seconds(
        self, ceilings: Ceilings, num_reqs: int, context_len: float, itemsize: int, kv_itemsize: int
    ) -> float:
        """Returns the least time of a decode step: weights read or multiplied, then keys and values read."""
        weights = max(self.weight_bytes(itemsize) / ceilings.copy, 2 * self.num_weights * num_reqs / ceilings.matmul)
        return weights + num_reqs * context_len * self.kv_bytes_per_token(kv_itemsize) / ceilings.copy

    def write(self, directory: Path) -> Path:
        """Writes config.json and a tokenizer for it: one word per token, `w0` to the last."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        vocab = {f"w{index}": index for index in range(self.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        return directory

    def prompts(self, count: int, length: int) -> list[list[int]]:
        draw = random.Random(PROMPT_WORDS_SEED)
        return [[draw.randrange(1, self.vocab_size) for _ in range(length)] for _ in range(count)]


def _llama(architecture: str, model_type: str, **shape: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | shape


MODELS = {
    "qwen2.5-0.5b": BenchModel(
        "qwen2.5-0.5b",
        _llama(
            "Qwen2ForCausalLM", "qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True,
        ),
        Targets(
            must={1: 0.40, 64: 0.35, 256: 0.35},
            stretch={1: 0.55, 64: 0.50, 256: 0.50},
            graphs_over_eager=3.0,
            depth_2_over_1={256: 1.25},
        ),
    ),
    "qwen2.5-7b": BenchModel(
        "qwen2.5-7b",
        _llama(
            "Qwen2ForCausalLM", "qwen2", hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, vocab_size=152_064, tie_word_embeddings=False,
        ),
        Targets(
            must={1: 0.82, 64: 0.72, 256: 0.65},
            stretch={1: 0.90, 64: 0.85, 256: 0.80},
            graphs_over_eager=1.5,
            depth_2_over_1={},
        ),
    ),
    "llama-3.1-8b": BenchModel(
        "llama-3.1-8b",
        _llama(
            "LlamaForCausalLM", "llama", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False,
            rope_theta=500_000.0,
        ),
        Targets(
            must={1: 0.82, 64: 0.75, 256: 0.70},
            stretch={1: 0.90, 64: 0.85, 256: 0.80},
            graphs_over_eager=1.5,
            depth_2_over_1={64: 1.05},
        ),
    ),
}  # fmt: skip

INT4 = Targets(
    must={1: 0.50, 64: 0.55, 256: 0.60},
    stretch={1: 0.65, 64: 0.70, 256: 0.72},
    graphs_over_eager=None,
    depth_2_over_1={},
    over_dense=(1.9, 2.3),
)


def _awq(dense: BenchModel, group_size: int, targets: Targets | None) -> BenchModel:
    """The same in 4 bits, as AutoAWQ writes it; the output projection stays as it is."""
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    config = dense.config | {"quantization_config": quantization}
    return replace(dense, name=f"{dense.name}-int4", config=config, targets=targets, dense=dense.name)


MODELS |= {f"{name}-int4": _awq(MODELS[name], 128, INT4) for name in ("llama-3.1-8b", "qwen2.5-7b")}
DENSE_MODELS = [name for name, model in MODELS.items() if model.dense is None]

SMALL_MODEL = BenchModel(
    "small",
    _llama(
        "LlamaForCausalLM", "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, tie_word_embeddings=False,
    ),
)  # fmt: skip
SMALL_INT4_MODEL = _awq(SMALL_MODEL, 32, None)
