"""Reads the defaults of requests once, when the service starts."""

import logging
from pathlib import Path

from pagewire.config import TokenizerConfig
from pagewire.files.models import local_model
from pagewire.files.sampling_defaults.defaults import sampling_defaults
from pagewire.services.tokenizer.generation.request_defaults import RequestDefaults
from pagewire.v1.common_pb2 import SamplingParams

logger = logging.getLogger(__name__)


def read_request_defaults(config: TokenizerConfig, tokenizer_path: Path) -> RequestDefaults:
    """Reads the defaults and logs them. tokenizer_path: where to look if the model is not on this machine, but its
    tokenizer is. Raises StartupError."""
    path = local_model(config.model, config.download_dir, config.revision, config.gguf) or tokenizer_path
    defaults = sampling_defaults(config, path)
    if defaults.ignored:
        logger.warning("%s: %s have no counterpart here and are ignored", path, ", ".join(defaults.ignored))
    if defaults.values:
        off = "; --generation-config vllm switches the model's off" if config.generation_config == "auto" else ""
        logger.info("sampling defaults: %s, from %s%s", defaults, defaults.source, off)
    else:
        logger.info("sampling defaults: %s; --override-generation-config sets others", defaults)
    params = SamplingParams(**defaults.values)  # type: ignore[arg-type]  # the fields' types are those of the table
    of_greedy = SamplingParams()
    of_greedy.CopyFrom(params)
    for name in defaults.unless_greedy:
        of_greedy.ClearField(name)  # type: ignore[arg-type]  # as above
    return RequestDefaults(params, of_greedy, defaults.source)
