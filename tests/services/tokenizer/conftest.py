from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool


@pytest.fixture(scope="session")
def pool(smollm2_gguf: Path) -> Iterator[TokenizerPool]:
    """A pool for the built-in model, which tests share: each leaves it idle."""
    pool = TokenizerPool(FileSource(str(smollm2_gguf)), size=2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def detokenizers(smollm2: LoadedTokenizer) -> Detokenizers:
    return Detokenizers(smollm2)
