"""Refusals of `--cpu-offload-gb`: sentences as in `values.executor`."""

from pagewire.config.executor import ExecutorConfig
from pagewire.config.speculation import Speculation


def of_offload(config: ExecutorConfig, *, on_cuda: bool) -> str | None:
    """Refuses --cpu-offload-gb where host and device share memory, and with copies of the model that draft."""
    flag = f"--cpu-offload-gb {config.cpu_offload_gb:g}"
    if config.cpu_offload_gb and not on_cuda:
        return (
            f"{flag}: weights on a CPU are in the memory of the host already, so there is nothing to move; leave the "
            "flag out"
        )
    speculation = Speculation.of(config) if config.cpu_offload_gb else None
    if speculation is not None and (speculation.method == "self" or speculation.with_copy):
        return f"{flag}: a model with weights in host memory has no copy that drafts; use --spec-method ngram"
    return None


def of_offloaded_transformers(architecture: str) -> str:
    return (
        f"--cpu-offload-gb: {architecture} runs in transformers' code, which keeps its weights on the device; "
        f"leave the flag out, or use one of Pagewire's own models (docs/models.md)"
    )


def of_replaced_offload() -> str:
    """Refuses to replace weights that are in host memory."""
    return (
        "--cpu-offload-gb: weights in host memory are not replaced while requests run; restart the executor with the "
        "other model"
    )
