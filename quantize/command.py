"""`pagewire quantize`: from flags to a directory that `pagewire serve` serves."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from pagewire.errors import StartupError
from pagewire.files.models import find_model
from pagewire.process.process import usable_cores
from pagewire.quantize.config import QuantizeConfig
from pagewire.quantize.model.decoder import Decoder
from pagewire.quantize.model.sampling import sample_sequences
from pagewire.quantize.model.source import Source
from pagewire.quantize.model.texts import bundled_documents, encode, held_out, read_documents, sequences
from pagewire.quantize.output import check_free, new_directory
from pagewire.quantize.pipeline import Text, TuneSteps, quantize
from pagewire.quantize.progress import Progress
from pagewire.quantize.rounding.gptq import GptqOptions
from pagewire.quantize.rounding.grid import Grid
from pagewire.quantize.rounding.layer import Method
from pagewire.quantize.rounding.layouts import LAYOUTS
from pagewire.quantize.training import tune, tune_layer
from pagewire.quantize.training.training import steps_that_fit
from pagewire.services.executor.start.startup import resolve_device

logger = logging.getLogger(__name__)

_MUCH = 0.1  # relative rise of perplexity
_GROUP_SIZES = (32, 64, 128, -1)


def run(config: QuantizeConfig) -> int:
    """Runs the command. Raises StartupError if it cannot be done; then no files are left."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    transformers_logging.set_verbosity_error()
    method = method_of(config)
    if config.out is None:
        raise StartupError("--out is missing; name the directory to create")
    out = Path(config.out).expanduser().absolute()
    check_free(out)
    torch.set_num_threads(config.num_threads or usable_cores())
    path = find_model(config)
    logger.info("reading %s", path)
    source = Source(path)
    check_shapes(source, method)
    decoder = Decoder(source, resolve_device(config.device))
    _check_space(out, decoder.weight_bytes())
    # Like Ctrl-C, it leaves no half-written files.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    with Progress(source.config.num_layers) as progress, new_directory(out) as directory:
        calibration, evaluation = texts(config, decoder, progress)
        steps = tune_steps(config, decoder, calibration)
        progress.quantizing()
        report = quantize(decoder, method, calibration, evaluation, steps, directory, _settings(config), progress)
    print(report.table())
    if (warning := costly(config, *report.perplexity)) is not None:
        logger.warning(warning)
    print(f"written to {out}; serve it with: pagewire serve {config.out}")
    return 0


def costly(config: QuantizeConfig, before: float, after: float) -> str | None:
    """Returns a warning with remedies if perplexity rises by more than a tenth, otherwise None."""
    rise = after / before - 1
    if rise <= _MUCH:
        return None
    remedies = ["--method awq or gptq, which calibrate"] if config.method == "rtn" else []
    if config.group_size != _GROUP_SIZES[0]:
        remedies.append(f"smaller groups (--group-size {_GROUP_SIZES[0]})")
    if config.bits == 4:
        remedies.append("--bits 8")
    if config.calibration is None and config.method != "rtn":
        remedies.append("text like that of your users (--calibration)")
    better = f". Less is lost with {', or '.join(remedies)}" if remedies else ""
    return f"perplexity rises by {rise:.0%}: answers will be noticeably worse{better}"


def method_of(config: QuantizeConfig) -> Method:
    """Raises StartupError for values that do not go together."""
    layout = LAYOUTS[config.method]
    if config.bits not in layout.bits:
        raise StartupError(f"--bits {config.bits}: {config.method} takes {' or '.join(map(str, layout.bits))} bits")
    if config.group_size not in _GROUP_SIZES:
        raise StartupError(f"--group-size {config.group_size}: expected one of {', '.join(map(str, _GROUP_SIZES))}")
    if config.method == "awq" and config.sym:
        raise StartupError("--sym: AutoAWQ's layout is asymmetric; use --method gptq, or leave it out")
    for flag, steps in (("--tune-steps", config.tune_steps), ("--tune-layer-steps", config.tune_layer_steps)):
        if config.method == "rtn" and steps:
            raise StartupError(f"{flag} {steps}: rtn reads no text to tune on; use --method awq or gptq")
    return Method(
        config.method,
        Grid(config.bits, config.group_size, config.sym, layout.min_zero),
        GptqOptions(config.desc_act, config.static_groups, config.clip, config.damp),
    )


def check_shapes(source: Source, method: Method) -> None:
    """Raises StartupError for a model with weights that do not fill the words of the layout."""
    config, per_word = source.config, 32 // method.grid.bits
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
        "num_key_value_heads * head_dim": config.num_kv_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % per_word:
            raise StartupError(f"{source.path}: {name} is {size}, not a multiple of the {per_word} codes in a word")
    group_size = method.grid.group_size
    if group_size > 0 and (uneven := [str(size) for size in sizes.values() if size % group_size]):
        logger.warning(
            "%s inputs are not a multiple of the group size %d; some programs cannot read the smaller last group",
            " and ".join(dict.fromkeys(uneven)),
            group_size,
        )


def texts(config: QuantizeConfig, decoder: Decoder, progress: Progress) -> tuple[Text | None, Text]:
    """Returns the texts to calibrate on (None for rtn) and to measure on. The latter is never calibrated on."""
    source, length = decoder.source, config.calibration_length
    if length > source.config.max_supported_len:
        raise StartupError(
            f"--calibration-length {length} exceeds the model's {source.config.max_supported_len} positions; lower it"
        )
    separator = source.eos_token_id()
    tokens: list[int] = []
    held: list[int] = []
    if config.calibration is not None:
        tokens = encode(source.tokenizer, read_documents(Path(config.calibration)), separator)
        if config.eval is None:
            tokens, held = held_out(tokens)
    evaluation = _evaluation(config, source, held, separator)
    if config.method == "rtn":
        return None, evaluation
    count = config.calibration_samples
    if config.calibration is not None:
        return Text(sequences(tokens, count, length, config.calibration), config.calibration), evaluation
    logger.info("no --calibration: sampling %d sequences of %d tokens from the model itself", count, length)
    progress.sampling(count * (length - 1))
    with torch.no_grad():
        sampled = sample_sequences(decoder, count, length, config.seed, progress.sampled)
    return Text(sampled, "sampled from the model"), evaluation


def _evaluation(config: QuantizeConfig, source: Source, held: list[int], separator: int | None) -> Text:
    if config.eval is not None:
        tokens, name = encode(source.tokenizer, read_documents(Path(config.eval)), separator), config.eval
    elif held:
        tokens, name = held, f"the end of {config.calibration}"
    else:
        tokens, name = encode(source.tokenizer, bundled_documents(), separator), "the text that comes with Pagewire"
    if len(tokens) < 2:
        raise StartupError(f"{name} has too few tokens to measure perplexity on; name another text with --eval")
    # A short text is one sequence.
    length = min(config.calibration_length, len(tokens))
    return Text(sequences(tokens, config.eval_samples, length, name), name)


def tune_steps(config: QuantizeConfig, decoder: Decoder, calibration: Text | None) -> TuneSteps:
    """Returns the requested steps, or as many as suit the method and the available memory."""
    # With 8 bits, a model is already as close to the original as its own rounding allows.
    if calibration is None or config.bits == 8:
        return TuneSteps(config.tune_layer_steps or 0, config.tune_steps or 0)
    layer, model = config.tune_layer_steps, config.tune_steps
    shape = calibration.tokens.shape
    if layer is None:
        needed = tune_layer.needed_bytes(decoder, *shape)
        layer = steps_that_fit(tune_layer.STEPS, decoder, needed, "--tune-layer-steps", "layers")
    if model is None:
        needed = tune.needed_bytes(decoder, *shape)
        model = steps_that_fit(tune.STEPS, decoder, needed, "--tune-steps", "the whole model")
    return TuneSteps(layer, model)


def _check_space(out: Path, weight_bytes: int) -> None:
    """Checks the disk: weights take at most half of 16 bits, the embedding stays as it is, a shard is written twice."""
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < weight_bytes:
        raise StartupError(
            f"--out {out}: {free / 1e9:.1f} GB are free there, up to {weight_bytes / 1e9:.1f} GB are needed; free "
            "space, or name another directory"
        )


def _settings(config: QuantizeConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "out"}
