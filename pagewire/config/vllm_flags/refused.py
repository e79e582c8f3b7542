"""Flags of vLLM that are refused: without them, something else would be served than the user asked for."""

from pagewire.config.vllm_flags.entries import REFUSED, VllmFlag
from pagewire.config.vllm_flags.ignored import NODES, REPLICAS

_CODE = "code from outside is not loaded"
_PROMPT_ADAPTER = "prompt adapters are not served (vLLM dropped them, too); serve a tuned model"
_ENCODERS = "one executor runs both the image encoder and the language model"


def _refused(
    why: str, *names: str, harmless: tuple[str, ...] = (), takes: str = "value", short: tuple[str, ...] = ()
) -> list[VllmFlag]:
    """Returns the entries of flags with the same reason."""
    return [VllmFlag(name, REFUSED, why, harmless=harmless, takes=takes, short=short) for name in names]


FLAGS = [
    # The model and its files
    *_refused(
        "config.json is read from the model's directory; change single keys with --hf-overrides", "hf-config-path"
    ),
    *_refused("config.json is the only format that is read", "config-format", harmless=("auto", "hf")),
    *_refused(
        "tokenizers are loaded from files only; name files with --tokenizer",
        "tokenizer-mode",
        harmless=("auto", "hf", "slow", "mistral"),
    ),
    *_refused(
        'set the base in config.json: --hf-overrides \'{"rope_parameters": {"rope_theta": X}}\', or'
        " '{\"rope_theta\": X}' beside an older rope_scaling",
        "rope-theta",
    ),
    *_refused("weights and config.json are in one directory", "model-weights", harmless=("",)),
    *_refused("models that diffuse text are not served", "diffusion-config", short=("-dc",)),
    *_refused("the pooling of the model is used (modules.json)", "pooler-config", "override-pooler-config"),
    *_refused(_CODE, "logits-processors", "model-class-overrides", "io-processor-plugin", takes="words"),
    *_refused("a quantized checkpoint contains its own settings", "quantization-config", "quantization-param-path"),
    *_refused("merge a QLoRA adapter into the weights to serve it", "qlora-adapter-name-or-path"),
    *_refused("no adapter is applied unless a request names it", "default-mm-loras", takes="words"),
    *_refused(_PROMPT_ADAPTER, "enable-prompt-adapter", takes="switch"),
    *_refused(_PROMPT_ADAPTER, "prompt-adapters", takes="words"),
    *_refused("prompts are text or token ids", "enable-prompt-embeds", "enable-mm-embeds", takes="switch"),
    *_refused("images are read as transformers' processor reads them", "interleave-mm-strings", takes="switch"),
    *_refused(_ENCODERS, "mm-encoder-only", takes="switch"),
    # Memory
    *_refused(
        "the scales of an fp8 cache are the checkpoint's k_scale and v_scale, or 1",
        "calculate-kv-scales",
        takes="switch",
    ),
    *_refused("all layers store keys and values in the same type", "kv-cache-dtype-skip-layers", takes="words"),
    *_refused(
        "states are kept in the dtype of the model", "mamba-cache-dtype", "mamba-ssm-cache-dtype", harmless=("auto",)
    ),
    # Scheduling and devices
    *_refused("code from outside is not loaded; choose a policy with --scheduling-policy", "scheduler-cls"),
    *_refused(_CODE, "worker-cls", "worker-extension-cls", harmless=("auto", "")),
    *_refused(NODES, "nnodes", harmless=("1",), short=("-n",)),
    *_refused(NODES, "node-rank", harmless=("0",), short=("-r",)),
    *_refused(NODES, "headless", takes="switch"),
    *_refused("set CUDA_VISIBLE_DEVICES for the process", "device-ids"),
    *_refused(REPLICAS, "data-parallel-rank", harmless=("0",), short=("-dpn",)),
    *_refused(REPLICAS, "data-parallel-start-rank", harmless=("0",), short=("-dpr",)),
    *_refused(REPLICAS, "data-parallel-size-local", short=("-dpl",)),
    *_refused(
        "Pagewire's own tiers hold the blocks that left the cache: --kv-offloading-size and --kv-offloading-dir",
        "kv-offloading-backend",
        harmless=("native",),
    ),
    *_refused(_ENCODERS, "ec-transfer-config", "ec-manager-config"),
    *_refused("weights are replaced from a directory: POST /update_weights_from_disk", "weight-transfer-config"),
    *_refused(
        "drafts are accepted by rejection sampling, which keeps the distribution of tokens",
        "spec-decoding-acceptance-method",
        harmless=("rejection_sampler",),
    ),
    # The API
    *_refused(
        "a request gets at most 20 log probabilities for each token",
        "max-logprobs",
        harmless=tuple(str(number) for number in range(21)),
    ),
    *_refused("a request sets it: return_tokens_as_token_ids", "return-tokens-as-token-ids", takes="switch"),
    *_refused("a request sets it: chat_template_kwargs", "default-chat-template-kwargs"),
    *_refused("answers have the role assistant", "response-role", harmless=("assistant",)),
    *_refused(_CODE, "tool-parser-plugin", "reasoning-parser-plugin", "middleware", harmless=("",)),
    *_refused("clients call the tools", "tool-server"),
    *_refused(
        "answers do not contain it",
        "enable-return-routed-experts",
        "return-sampling-mask",
        "per-request-spec-decode-metrics",
        takes="switch",
    ),
    *_refused("REST listens on --host and --port", "uds"),
    *_refused("TLS 1.2 and 1.3 are served with the ciphers that Python chooses", "ssl-ciphers"),
]
