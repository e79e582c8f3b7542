"""Flags that say which model, and how its files are read."""

import json
from typing import Any

from pagewire.config.legacy.entries import becomes, ignored, refused


def _rope(text: str) -> str:
    """Of `--rope-scaling`, for `--hf-overrides`. Raises ValueError."""
    scaling: Any = json.loads(text)
    if not isinstance(scaling, dict):
        raise ValueError("expected a JSON object")
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    return json.dumps({"rope_parameters": scaling})


_POOLING = {"runner": "pooling"}
_CODE = "code from outside is not loaded"
_NO_LORA = "LoRA adapters are not served; merge the adapter into the model's weights"
_WITH_LORA = "it says how LoRA adapters are served, and none are"
_PROMPT_ADAPTER = "prompt adapters are gone from vLLM, too; serve a model that has been tuned"

FLAGS = [
    *ignored(
        "code in a checkpoint is never run; its model is served if Pagewire or transformers implements the"
        " architecture (docs/models.md)",
        "trust-remote-code",
        takes="switch",
    ),
    *ignored("code in a checkpoint is never run", "code-revision"),
    becomes(
        "task",
        "runner",
        values={
            "auto": {"runner": "auto"},
            "generate": {"runner": "generate"},
            "embed": {**_POOLING, "convert": "embed"},
            "embedding": {**_POOLING, "convert": "embed"},
            "classify": {**_POOLING, "convert": "classify"},
            "score": _POOLING,
            "reward": _POOLING,
        },
    ),
    *refused(
        "config.json is read from the model's directory; change single keys with --hf-overrides", "hf-config-path"
    ),
    *refused("config.json is the format that is read", "config-format", harmless=("auto", "hf")),
    *refused(
        "other tokenizers than those of files are code from outside; name files with --tokenizer",
        "tokenizer-mode",
        harmless=("auto", "hf", "slow", "mistral"),
    ),
    *ignored(
        "the tokenizer is part of the line; who sends tokens asks the scheduler: --scheduler-grpc-port",
        "skip-tokenizer-init",
        "tokens-only",
        takes="switch",
    ),
    becomes("rope-scaling", "hf_overrides", "it changes config.json, as --hf-overrides does", convert=_rope),
    *refused(
        'config.json says where the base is: --hf-overrides \'{"rope_parameters": {"rope_theta": X}}\', or'
        " '{\"rope_theta\": X}' beside an older rope_scaling",
        "rope-theta",
    ),
    *ignored("only a model's safetensors and its small files are downloaded", "ignore-patterns", takes="words"),
    *ignored(
        "weights are mapped from their files; `pagewire pull` fetches them beforehand",
        "model-loader-extra-config",
        "pt-load-map-location",
        "safetensors-load-strategy",
        "safetensors-prefetch-num-threads",
        "safetensors-prefetch-block-size",
    ),
    *ignored("the log says how far loading is", "use-tqdm-on-load", takes="switch"),
    *ignored("set the variable HF_TOKEN, or log in with `hf auth login`", "hf-token"),
    *refused("weights and config.json are in one place", "model-weights", harmless=("",)),
    *refused("models that diffuse text are not served", "diffusion-config", short=("-dc",)),
    *ignored("windows of attention are computed as the model has them", "disable-sliding-window", takes="switch"),
    *refused("the model's own pooling is used (modules.json)", "pooler-config", "override-pooler-config"),
    *refused(_CODE, "logits-processors", "model-class-overrides", "io-processor-plugin", takes="words"),
    *ignored("requests name no logits processors", "logits-processor-pattern"),
    *refused(
        "a quantized checkpoint says itself how it is quantized", "quantization-config", "quantization-param-path"
    ),
    *ignored("no format is deprecated here", "allow-deprecated-quantization", takes="switch"),
    *refused("a QLoRA adapter is served after it was merged into the weights", "qlora-adapter-name-or-path"),
    *refused(_NO_LORA, "enable-lora", takes="switch"),
    *refused(_NO_LORA, "lora-modules", "default-mm-loras", takes="words"),
    *ignored(
        _WITH_LORA,
        "max-loras",
        "max-lora-rank",
        "lora-extra-vocab-size",
        "lora-dtype",
        "long-lora-scaling-factors",
        "max-cpu-loras",
        "lora-target-modules",
    ),
    *ignored(
        _WITH_LORA,
        "enable-lora-bias",
        "fully-sharded-loras",
        "enable-tower-connector-lora",
        "specialize-active-lora",
        "enable-mixed-moe-lora-format",
        "enable-moe-shared-loras",
        takes="switch",
    ),
    *refused(_PROMPT_ADAPTER, "enable-prompt-adapter", takes="switch"),
    *refused(_PROMPT_ADAPTER, "prompt-adapters", takes="words"),
    *ignored("it says how prompt adapters are served, and none are", "max-prompt-adapters", "max-prompt-adapter-token"),
    *refused("prompts are text or tokens", "enable-prompt-embeds", "enable-mm-embeds", takes="switch"),
    becomes(
        "language-model-only",
        "limit_mm_per_prompt",
        values={"True": {"limit_mm_per_prompt": "image=0"}, "False": {}},
        takes="switch",
    ),
    *refused("images are read as transformers' processor does", "interleave-mm-strings", takes="switch"),
    *ignored("images are read as transformers' processor does", "media-io-kwargs", "mm-processor-device"),
    *ignored("no videos are read", "video-pruning-rate", "video-pruning-method"),
    *ignored(
        "embeddings of images are kept for the next prompt with them: --mm-encoder-cache-bytes",
        "mm-processor-cache-gb",
        "mm-processor-cache-type",
        "mm-shm-cache-max-object-size-mb",
        "mm-hasher-algorithm",
        "mm-tensor-ipc",
        "mm-ipc-gpu-memory-gb",
    ),
    *ignored(
        "embeddings of images are kept for the next prompt with them: --mm-encoder-cache-bytes",
        "disable-mm-preprocessor-cache",
        takes="switch",
    ),
    *ignored(
        "images are part of what is measured at the start",
        "skip-mm-profiling",
        "mm-device-do-normalize",
        takes="switch",
    ),
    *ignored(
        "image encoders run as the model's dtype says",
        "mm-encoder-attn-dtype",
        "mm-encoder-fp8-scale-path",
        "mm-encoder-fp8-scale-save-path",
        "mm-encoder-fp8-scale-save-margin",
    ),
    *refused("one executor does both, encoder and language model", "mm-encoder-only", takes="switch"),
    *ignored("there are no Neuron devices here", "override-neuron-config"),
    *ignored("it is for plugins of platforms, which there are none of", "additional-config"),
]
