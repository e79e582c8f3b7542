"""Flags of `pagewire quantize`."""

from dataclasses import dataclass

from pagewire.config import ModelConfigFlags
from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, Range, flag


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(ModelConfigFlags):
    """`pagewire quantize`."""

    out: str | None = flag(None, "directory to create (required); must be empty if it exists", group="output")
    method: str = flag(
        "awq",
        "awq: scales inputs by their activations; gptq: compensates for each column's error in the next ones; rtn: "
        "rounds to nearest, without calibration",
        group="quantization",
        choices=("awq", "gptq", "rtn"),
    )
    bits: int = flag(4, "4; gptq and rtn also 8", group="quantization")
    group_size: int = flag(128, "inputs that share a scale: 32, 64, 128, or -1 for a whole row", group="quantization")
    sym: bool = flag(False, "gptq, rtn: the same zero for all groups", group="quantization")
    desc_act: bool = flag(True, "awq, gptq: round the columns with the largest inputs first", group="quantization")
    static_groups: bool = flag(
        True,
        "gptq with --desc-act: groups of neighboring inputs; otherwise groups follow the order of columns, which "
        "makes serving slower",
        group="quantization",
    )
    clip: bool = flag(
        True,
        "awq, gptq: search for the best range of each group instead of spanning its values",
        group="quantization",
    )
    damp: float = flag(
        0.01,
        "awq, gptq: added to the Hessian's diagonal, relative to its mean",
        group="quantization",
        valid=Range(above=0),
    )
    tune_layer_steps: int | None = flag(
        None,
        "awq, gptq: steps in which each layer's codes, scales and norms are trained to give the original's output; 0 = "
        "none (default: 100 for 4 bits, if half of the free memory is enough)",
        group="quantization",
        valid=NOT_NEGATIVE,
    )
    tune_steps: int | None = flag(
        None,
        "awq, gptq: steps in which scales and norms are trained to predict what the original does; 0 = none (default: "
        "60 for 4 bits, if half of the free memory is enough)",
        group="quantization",
        valid=NOT_NEGATIVE,
    )
    calibration: str | None = flag(
        None, 'text file, or .jsonl with "text" (default: text sampled from the model)', group="text"
    )
    calibration_samples: int = flag(128, "sequences to calibrate on", group="text", valid=POSITIVE)
    calibration_length: int = flag(512, "tokens of each sequence", group="text", valid=Range(minimum=2))
    eval: str | None = flag(
        None,
        "text to measure perplexity on (default: the last tenth of --calibration, or a text included with Pagewire)",
        group="text",
    )
    eval_samples: int = flag(32, "sequences to measure perplexity on", group="text", valid=POSITIVE)
    seed: int = flag(0, "seed of sampled text", group="text")
    device: str = flag(
        "auto", "where to compute; auto uses CUDA if available", group="compute", choices=("auto", "cpu", "cuda")
    )
    num_threads: int | None = flag(
        None,
        "CPU threads that compute (default: the cores this process may use)",
        group="compute",
        valid=Range(minimum=1, maximum=1024),
    )
