"""GGUF files: the same model as the weights they were made from, and clear errors for broken ones."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewire.files.model_files import describe_files
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights import gguf as gguf_weights
from pagewire.services.executor.loading.weights.gguf_file import GgufFile, GgufTensor
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.gemma3 import Gemma3Config
from pagewire.services.executor.models.protocol import Model
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.dense_weights import padding_bytes
from tests.services.executor.models.test_models import CPU, ROPE, TINY, assert_same_logits
from tests.sweep import examples

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def load(path: Path, *, dtype: str = "float32", **options: Any) -> Model:
    return load_model(path, dtype=dtype, device=CPU, **options)


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(TINY | SIZES | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model


GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str = "") -> str:
    for ours, theirs in (GEMMA_NAMES if arch.startswith("gemma") else {}).items():
        name = name.replace(ours, theirs)
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items():
        name = name.replace(ours, theirs)
    return name


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores q and k of the llama architecture."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    arch: str,
    extra: Mapping[str, float | int | str] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, Type] | None = None,
    split: int = 0,
) -> Path:
    """Writes the model in fp32; `tensors` replaces, adds or (None) removes tensors by their GGUF name.

    types: of those in `tensors` that are given as blocks. split: the most tensors of a file; 0: all.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    values: dict[str, np.ndarray | None] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = interleave(array, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        values[gguf_name(name, arch)] = array
    for name, array in (values | dict(tensors or {})).items():
        if array is not None:
            writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", {}),
    "llama tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", "Llama", {"attention_bias": True}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
}


def test_gemma2(tmp_path: Path) -> None:
    """The window and caps of Gemma 2 are metadata."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 10.0}
    expected = tiny_model("Gemma2", head_dim=32, query_pre_attn_scalar=32, sliding_window=5, **caps)
    extra = {f"gemma2.{name}": cap for name, cap in caps.items()} | {"gemma2.attention.sliding_window": 5}
    assert_same_logits(load(write_gguf(tmp_path / "tiny.gguf", expected, arch="gemma2", extra=extra)), expected)


def test_gemma3(tmp_path: Path) -> None:
    """Scaling applies to the layers without a window; the others' base is 10000 unless the file has another."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
    }
    shape = {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7, "sliding_window": 5}
    expected = tiny_model("Gemma3Text", rope_parameters=ropes, **shape)
    extra: dict[str, float | int | str] = {
        "gemma3.attention.sliding_window": 5,
        "gemma3.rope.freq_base_swa": 10.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 4.0,
    }
    model = load(write_gguf(tmp_path / "tiny.gguf", expected, arch="gemma3", extra=extra))
    assert_same_logits(model, expected)
    assert [layer.kv_spec().window for layer in model.attention_layers] == [5, 5, 5, 5, 5, 0, 5]
    del extra["gemma3.rope.freq_base_swa"]
    config = load(write_gguf(tmp_path / "default.gguf", expected, arch="gemma3", extra=extra)).config
    assert isinstance(config, Gemma3Config)
    assert config.local_rope.rope_theta == 10000


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_round_trip(tmp_path: Path, case: str) -> None:
    arch, family, overrides = ARCHITECTURES[case]
    expected = tiny_model(family, **overrides)
    model = load(write_gguf(tmp_path / "tiny.gguf", expected, arch=arch))
    assert_same_logits(model, expected)
    assert model.config.eos_token_ids == (2, 5)
    assert model.weight_bytes == 4 * expected.num_parameters()


EOM = "tokenizer.ggml.eom_token_id"


def test_parts_are_one_model(tmp_path: Path) -> None:
    model = tiny_model("Llama")
    write_gguf(tmp_path / "m.gguf", model, arch="llama", split=8)
    first, *others = parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(others) > 1
    whole = GgufFile(write_gguf(tmp_path / "whole.gguf", model, arch="llama"))
    for path in (*parts, tmp_path):
        if path == tmp_path:
            (tmp_path / "whole.gguf").unlink()
        assert_same_logits(load(path), model)
    assert GgufFile(first).tensors.keys() == whole.tensors.keys()
    files = describe_files(first)
    assert files.size == sum(part.stat().st_size for part in parts) and files.num_parameters == sum(
        math.prod(tensor.shape) for tensor in whole.tensors.values()
    )
    others[0].rename(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match=others[0].name):
        GgufFile(first)
    (tmp_path / others[0].name).write_bytes(others[1].read_bytes())
    with pytest.raises(ModelLoadError, match="is in another part of the model"):
        GgufFile(first)


def test_end_tokens_that_the_file_does_not_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("Llama"), arch="llama", extra={EOM: 9})
    data = path.read_bytes()
    tokens = b"".join(len(token).to_bytes(8, "little") + token for token in (b"<11>", b"<12>", b"<13>", b"<14>"))
    assert data.count(tokens) == 1
    # They become others of the same size together.
    texts = (b"<EOT>", b"</s>", b"<eos>", b"14")
    others = b"".join(len(token).to_bytes(8, "little") + token for token in texts)
    assert len(others) == len(tokens)
    path.write_bytes(data.replace(tokens, others))
    assert load(path).config.eos_token_ids == (2, 5, 9, 11, 12, 13)


def test_through_transformers(tmp_path: Path) -> None:
    expected = tiny_model("Qwen2")
    path = write_gguf(tmp_path / "tiny.gguf", expected, arch="qwen2")
    model = load(path, model_impl="transformers")
    assert_same_logits(model, expected)
    assert model.config.eos_token_ids == (2, 5)


def test_rope_scaling_from_metadata(tmp_path: Path) -> None:
    expected = tiny_model("Llama", rope_parameters=dict(ROPE["linear"]))
    extra: dict[str, float | int | str] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert_same_logits(load(write_gguf(tmp_path / "linear.gguf", expected, arch="llama", extra=extra)), expected)

    expected = tiny_model("Qwen2", rope_parameters=dict(ROPE["yarn"]))
    extra = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 16,
    }
    assert_same_logits(load(write_gguf(tmp_path / "yarn.gguf", expected, arch="qwen2", extra=extra)), expected)

    extra["qwen2.rope.scaling.attn_factor"] = 0.5
    scale = 0.5 * (1 + 0.1 * math.log(4.0))
    expected = tiny_model("Qwen2", rope_parameters=ROPE["yarn"] | {"attention_factor": scale})
    assert_same_logits(load(write_gguf(tmp_path / "scaled.gguf", expected, arch="qwen2", extra=extra)), expected)


def test_rope_metadata_that_is_not_implemented(tmp_path: Path) -> None:
    tiny = tiny_model("Llama")
    scaled = write_gguf(tmp_path / "a.gguf", tiny, arch="llama", extra={"llama.rope.scaling.attn_factor": 0.5})
    with pytest.raises(ModelLoadError, match=r"attn_factor is 0.5: only supported with yarn"):
        load(scaled)
    half = write_gguf(
        tmp_path / "b.gguf", tiny, arch="llama", tensors={"rope_freqs.weight": np.ones(8, dtype=np.float16)}
    )
    with pytest.raises(ModelLoadError, match=r"rope_freqs.weight is F16; only F32"):
        load(half)


def test_llama3_rope_from_its_factor_tensor(tmp_path: Path) -> None:
    expected = tiny_model("Llama", rope_parameters=dict(ROPE["llama3"]))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](expected.config)
    unscaled = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (unscaled / scaled).numpy().astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(tmp_path / "tiny.gguf", expected, arch="llama", tensors={"rope_freqs.weight": factors})
    assert_same_logits(load(path), expected)


DEQUANTIZABLE = [type_ for type_ in Type if type_ in gguf.quants._type_traits] + [Type.F32, Type.F16]


@pytest.mark.parametrize("type_", DEQUANTIZABLE, ids=lambda type_: type_.name)
def test_every_tensor_type_is_read_in_pieces(tmp_path: Path, type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dequantized a few at a time, and permuted for q; the values are the gguf package's."""
    monkeypatch.setattr(gguf_weights, "_CHUNK_ELEMENTS", 3 * 256)
    sizes = {"hidden_size": 256, "head_dim": 8, "num_hidden_layers": 1}
    tiny = tiny_model("Llama", **sizes)
    shape = gguf.quant_shape_to_byte_shape((4 * 8, 256), type_)
    raw = np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)  # small bytes: no scale is inf or NaN
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny, arch="llama", tensors={"blk.0.attn_q.weight": None, "blk.0.attn_output.weight": None})
    file = GgufFile(path)
    stored = GgufTensor("t", (32, 256), type_, raw)
    file.tensors |= {"blk.0.attn_q.weight": stored, "token_embd.weight": stored}
    source = gguf_weights.GgufSource(file)
    expected = gguf.dequantize(raw, type_).astype(np.float32)
    plain, permuted = torch.empty(32, 256), torch.empty(32, 256)
    source.read_into("model.embed_tokens.weight", plain)
    source.read_into("model.layers.0.self_attn.q_proj.weight", permuted)
    np.testing.assert_array_equal(plain.numpy(), expected)
    np.testing.assert_array_equal(interleave(permuted.numpy(), 4), expected)


@pytest.mark.slow  # transformers takes 15 s to read the file
@torch.inference_mode()
def test_real_model_equals_transformers(smollm2_gguf: Path, reference_checkpoint: Path) -> None:
    fractions: list[float] = []
    model = load(smollm2_gguf, progress=lambda fraction, text: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0)
    assert model.weight_bytes < 0.45 * 2 * 134515008  # of the memory in bfloat16, tied embedding counted once
    assert model.config.eos_token_ids == (2, 0, 4)  # <|im_end|> of the file; by their text <|endoftext|> and <reponame>
    expected = AutoModelForCausalLM.from_pretrained(reference_checkpoint, dtype=torch.float32)
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198, 504, 3575, 282]
    batch = PagedBatch(model, num_requests=1, max_len=len(ids))
    logits = torch.cat([batch.step({0: ids[:11]})[0], batch.step({0: ids[11:]})[0]])
    torch.testing.assert_close(logits, expected(torch.tensor([ids])).logits[0], atol=5e-4, rtol=1e-4)


def test_bfloat16_is_the_default(tmp_path: Path) -> None:
    expected = tiny_model("Llama")
    model = load(write_gguf(tmp_path / "tiny.gguf", expected, arch="llama"), dtype="auto")
    assert isinstance(model, DecoderModel)
    assert model.config.dtype == torch.bfloat16
    norms = sum(parameter.numel() for parameter in expected.parameters() if parameter.dim() == 1)  # in fp32
    assert model.weight_bytes == 2 * expected.num_parameters() + 2 * norms + padding_bytes(model)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("Llama"), arch="llama")


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere(whole_file: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.gguf"
    data = whole_file.read_bytes()
    path.write_bytes(data[: int(share * (len(data) - 32))])  # 32: the last tensor may end in padding
    with pytest.raises(ModelLoadError, match=r"cut\.gguf: truncated or not a GGUF file"):
        load(path)


def test_a_whole_file_that_there_is_no_memory_for_is_not_called_damaged(
    whole_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", no_memory)  # as under `ulimit -v`
    with pytest.raises(ModelLoadError, match="Cannot allocate memory") as raised:
        load(whole_file)
    assert "ulimit -v" in str(raised.value) and "download" not in str(raised.value)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 3000), value=st.integers(0, 255))
def test_damaged_header_never_fails_without_naming_the_file(
    whole_file: Path, tmp_path: Path, offset: int, value: int
) -> None:
    damaged = bytearray(whole_file.read_bytes())
    damaged[offset] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        load(path, max_model_len=32)
    except ModelLoadError as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize(
    ("arch", "tensors", "message"),
    [
        ("llama", {"blk.1.ffn_up.weight": None}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
        ("llama", {"blk.0.extra.weight": np.zeros(4, np.float32)}, r"unexpected: blk\.0\.extra\.weight"),
        (
            "llama",
            {"blk.2.attn_v.weight": np.zeros((32, 32), np.float32)},
            r"layers\.2\.self_attn\.v_proj\.weight: expected shape \[32, 64\], found \[32, 32\]",
        ),
        ("mamba", {}, r"architecture mamba|gguf"),
        ("qwen2", {"token_embd.weight": None}, r"token_embd\.weight is missing"),
    ],
)
def test_wrong_contents(tmp_path: Path, arch: str, tensors: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "wrong.gguf", tiny_model("Llama"), arch=arch, tensors=tensors)
    with pytest.raises(ModelLoadError, match=message):
        load(path, model_impl="pagewire")


def test_experts_without_their_keys_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "moe.gguf", tiny_model("Llama"), arch="llama", extra={"llama.expert_count": 8})
    with pytest.raises(ModelLoadError, match=r"moe\.gguf: .*llama\.expert_used_count"):
        load(path)
