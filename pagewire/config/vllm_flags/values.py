"""Values of vLLM for flags that Pagewire has, too."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """The meaning of a value in Pagewire. With neither `means` nor `refused`, the flag counts as not given."""

    means: str | None = None
    why: str = ""  # for the user; "" if there is nothing to add to the meaning
    refused: bool = False


REWARD = (
    "a reward model with one score for a text is served as a classifier, use --runner pooling --convert classify; those"
    " with a score for each token are not served"
)
_NOT_GIVEN = Value()
_NOT_READ = Value(
    why="checkpoints of this format cannot be read; use one of AWQ, GPTQ, compressed-tensors, FP8, bitsandbytes, MXFP4"
    " or GGUF, or make one of AWQ or GPTQ with `pagewire quantize`",
    refused=True,
)
_NOT_AT_LOAD = Value(
    why="weights are not quantized while they are loaded; make a quantized checkpoint with `pagewire quantize`",
    refused=True,
)
_MAPPED = Value("auto", "weights are mapped from their files, so no other loader is needed")
_PICKLED = Value(why="reading pickled weights may run code; convert them to safetensors", refused=True)
_NO_DEVICE = Value(why="steps run on CPUs and on CUDA devices", refused=True)

# Field -> value as it is spelled -> what it means.
VALUES: dict[str, dict[str, Value]] = {
    "dtype": {"half": Value("float16"), "float": Value("float32")},
    "max_model_len": {
        "auto": _NOT_GIVEN,  # without the flag: the length of the model, or as much as fits into memory
        "-1": _NOT_GIVEN,
    },
    "quantization": {
        "None": _NOT_GIVEN,
        "null": _NOT_GIVEN,
        "auto_awq": Value("awq"),
        "auto_gptq": Value("gptq"),
        "gpt_oss_mxfp4": Value("mxfp4"),
        "ipex": Value(why="it names kernels; a checkpoint runs in its own format"),
        "moe_wna16": Value(why="it names kernels; a checkpoint runs in its own format"),
        "humming": Value(why="it names kernels; a checkpoint runs in its own format"),
        **dict.fromkeys(
            (
                "aqlm",
                "deepspeedfp",
                "gptq_marlin_24",
                "hqq",
                "marlin",
                "modelopt",
                "modelopt_fp4",
                "modelopt_mixed",
                "modelopt_mxfp8",
                "nvfp4",
                "qqq",
                "quark",
                "squeezellm",
                "torchao",
                "inc",
                "deepseek_v4_fp8",
                "fp_quant",
                "neuron_quant",
            ),
            _NOT_READ,
        ),
        **dict.fromkeys(
            (
                "ptpc_fp8",
                "tpu_int8",
                "experts_int8",
                "fp8_per_tensor",
                "fp8_per_block",
                "fp8_per_channel",
                "int8_per_channel_weight_only",
                "nvfp4_per_token",
                "mxfp8",
            ),
            _NOT_AT_LOAD,
        ),
    },
    "kv_cache_dtype": {
        "fp8_e5m2": Value(why="fp8 means fp8_e4m3, which is more exact; use fp8", refused=True),
        **dict.fromkeys(
            ("int4_per_token_head", "fp8_per_token_head", "nvfp4", "fp8_inc", "fp8_ds_mla"),
            Value(why="keys and values are stored in 16 bits, as int8 or as fp8; use int8 or fp8", refused=True),
        ),
        "int8_per_token_head": Value("int8"),
    },
    "load_format": {
        "hf": Value("auto"),
        "mistral": Value("auto"),
        "bitsandbytes": Value("auto"),
        **dict.fromkeys(
            ("fastsafetensors", "instanttensor", "modelexpress", "runai_streamer", "runai_streamer_sharded"), _MAPPED
        ),
        **dict.fromkeys(("pt", "npcache"), _PICKLED),
        **dict.fromkeys(
            ("tensorizer", "sharded_state", "ipc_cache"),
            Value(why="weights are read from safetensors and GGUF; convert them", refused=True),
        ),
    },
    "model_impl": {"vllm": Value("pagewire")},
    "device": dict.fromkeys(("neuron", "openvino", "tpu", "xpu", "hpu"), _NO_DEVICE),
    "distributed_executor_backend": {"uni": Value("mp"), "external_launcher": Value("external")},
    "tokenizer_pool_size": {"0": Value(why="there is always a pool; its size follows from the number of cores")},
    "tokenizer_pool_type": {"ray": Value("process", "workers are processes of the tokenizer service, not of Ray")},
    "generation_config": {"None": Value("vllm")},
    "runner": {"draft": Value(why="name a draft model with --spec-model", refused=True)},
    "convert": {"reward": Value(why=REWARD, refused=True)},
}
