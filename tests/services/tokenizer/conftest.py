from pathlib import Path

import pytest

from pagewire.files.tokenizer_files.loading import LoadedTokenizer, load_tokenizer
from pagewire.services.tokenizer.output.detokenizer import Detokenizers


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> LoadedTokenizer:
    return load_tokenizer(smollm2_gguf)


@pytest.fixture(scope="session")
def detokenizers(smollm2: LoadedTokenizer) -> Detokenizers:
    return Detokenizers(smollm2)
