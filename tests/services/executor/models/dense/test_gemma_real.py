"""Gemma 3 270M from its K-quants against transformers on the weights that these stand for."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.kernels.quantized import PackedGrouped
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.dense.gemma3 import Gemma3Model
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.models.tiny import CPU

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a village by the sea,",
    "日本の首都は",
    "La receta de la tortilla de patatas:\n\n1.",
    "Q: Why is the sky blue?\nA:",
    '{"name": "Ada", "age": 36, "languages": [',
    "В начале было слово,",
    "SELECT name FROM users WHERE",
    "The three laws of thermodynamics are",
    "عاصمة مصر هي",
    "<html>\n  <body>\n    <h1>",
    "Roses are red,\nviolets are blue,\n",
    "प्रकाश की गति",
    "import numpy as np\n\ndef softmax(x):",
    "In 1969, the first humans",
    "서울은 대한민국의",
    "To be, or not to be, that is",
]


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def expected(gemma3_gguf: Path) -> Gemma3ForCausalLM:
    """The numbers of Gemma 3 270M as published; what the file leaves to llama.cpp is transformers' default."""
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    weights = {}
    for tensor in gguf.GGUFReader(gemma3_gguf).tensors:
        *block, module, _ = tensor.name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        one = 1 if module.endswith("norm") else 0  # which llama.cpp adds to norms
        weights[f"{prefix}{NAMES[module]}.weight"] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type) - one)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return model.eval()


@torch.inference_mode()
def greedy(model: Gemma3Model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """All prompts together, over paged KV."""
    batch = PagedBatch(model, len(prompts), max(map(len, prompts)) + num_tokens)
    outputs: list[list[int]] = [[] for _ in prompts]
    steps = dict(enumerate(prompts))
    for _ in range(num_tokens):
        steps = {request: [int(logits[-1].argmax())] for request, logits in batch.step(steps).items()}
        for request, token_ids in steps.items():
            outputs[request] += token_ids
    return outputs


def check_greedy_text(file: Path, expected: Gemma3ForCausalLM, texts: list[str], num_tokens: int) -> None:
    """Checks that transformers finds the next token likeliest after each token: then its greedy text is the same."""
    tokenizer = load_tokenizer(file)
    model = load_model(file, dtype="float32", device=CPU, max_model_len=256)
    assert isinstance(model, Gemma3Model)
    assert all(isinstance(part, PackedGrouped) for module in model.modules() for part in module.parts)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert all(prompt[0] == 2 for prompt in prompts)
    for text, prompt, output in zip(texts, prompts, greedy(model, prompts, num_tokens), strict=True):
        with torch.inference_mode():
            logits = expected(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == output, text


@pytest.mark.slow
def test_greedy_text(gemma3_gguf: Path, expected: Gemma3ForCausalLM) -> None:
    check_greedy_text(gemma3_gguf, expected, PROMPTS[:3], num_tokens=10)


@pytest.mark.slow
def test_greedy_text_of_twenty_prompts(gemma3_gguf: Path, expected: Gemma3ForCausalLM) -> None:
    check_greedy_text(gemma3_gguf, expected, PROMPTS, num_tokens=32)
