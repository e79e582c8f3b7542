"""The served model as ListModels describes it: what its files, its tokenizer and the parsers of its outputs say."""

import logging
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from pagewire.files.model_files import describe_files
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.v1 import inference_pb2

logger = logging.getLogger(__name__)


def described_model(
    root: str, path: Path | None, tokenizer: LoadedTokenizer, parsers: tuple[str, str], *, reads_images: bool
) -> inference_pb2.Model:
    """Returns what stays the same of the model while the service runs.

    Args:
        root: the name of the model that was loaded.
        path: of its files; None if they are not on this machine.
        parsers: the names of the parsers of tool calls and of reasoning, or "none".
    """
    model = inference_pb2.Model(
        root=root,
        create_time=Timestamp(),
        calls_tools=parsers[0] != "none",
        reasons=parsers[1] != "none",
        reads_images=reads_images,
        fills_in_middle=tokenizer.fill_in_middle is not None,
    )
    model.create_time.GetCurrentTime()
    model.create_time.nanos = 0
    try:
        found = None if path is None else describe_files(path)
    except (OSError, ValueError) as error:  # a folder with the tokenizer alone, or random weights
        logger.info("the files of %s are not described: %s", root, error)
        found = None
    if found is not None:
        model.files.format, model.files.architecture = found.format, found.architecture
        model.files.size_bytes, model.files.digest = found.size, found.digest
        model.files.num_parameters, model.files.quantization = found.num_parameters, found.quantization
        model.files.trained_len = found.trained_len
        model.files.hidden_size, model.files.num_layers = found.hidden_size, found.num_layers
        model.files.modify_time.seconds = int(found.modified)
    return model
