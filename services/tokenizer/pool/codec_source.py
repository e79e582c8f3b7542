"""The files that the workers of a pool load."""

from dataclasses import dataclass

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.templates.chat import Fit, as_they_are


@dataclass(frozen=True)
class FileSource:
    """A CodecSource from files."""

    # Directory or .gguf file.
    path: str
    # Instead of the model's own; None = the model's own.
    chat_template: str | None = None
    # Whether templates of requests are rendered; the pool does it, in other processes.
    trust_request_chat_template: bool = False
    # Fits conversations to templates.
    fit: Fit = as_they_are

    def load(self) -> LoadedTokenizer:
        """Raises what load_tokenizer raises."""
        return load_tokenizer(self.path)
