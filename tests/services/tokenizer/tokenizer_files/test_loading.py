"""Loading must give transformers' results; transformers itself is only asked here, in the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import TokenizerLoadError, load_tokenizer
from tests.services.tokenizer import tiny_tokenizers
from tests.services.tokenizer.texts import SPACES_BEFORE_DIGITS, TEXTS

SAVERS = [
    tiny_tokenizers.save_byte_level,
    tiny_tokenizers.save_sentencepiece,
    tiny_tokenizers.save_unigram,
    tiny_tokenizers.save_word_level,
]


def assert_same(ours: LoadedTokenizer, theirs, texts) -> None:
    for text in texts:
        for add_special_tokens in (False, True):
            expected = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens=add_special_tokens) == expected, text
            for skip in (False, True):
                decoded = theirs.decode(expected, skip_special_tokens=skip)
                assert ours.decode(expected, skip_special_tokens=skip) == decoded, text


@pytest.mark.parametrize("save", SAVERS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"clean_up_tokenization_spaces": True},
        {"extra_special_tokens": ["<|extra|>"]},
        {"added_tokens_decoder": {"5000": {"content": "<|late|>", "special": True, "normalized": False}}},
    ],
    ids=["plain", "clean-up", "extra", "added"],
)
def test_directory_equals_transformers(tmp_path: Path, save, config) -> None:
    path = save(tmp_path, **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    texts = [*TEXTS, "a <|extra|> b", "a<|late|>b", "Isn 't it , really ?", "a <think> b</s>"]
    assert_same(load_tokenizer(path), theirs, texts)


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_json_says_where_bos_goes(tmp_path: Path, add_bos: bool) -> None:
    path = tiny_tokenizers.save_sentencepiece(tmp_path, add_bos_token=add_bos, add_eos_token=True)
    ours = load_tokenizer(path)
    assert_same(ours, PreTrainedTokenizerFast.from_pretrained(path), TEXTS)
    ids = ours.encode("this", add_special_tokens=True)
    assert (ids[0] == 1, ids[-1] == 2) == (True, False)


def test_template_file_wins_over_config(tmp_path: Path) -> None:
    path = tiny_tokenizers.save_byte_level(tmp_path)
    assert load_tokenizer(path).chat_template == tiny_tokenizers.CHATML
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(path).chat_template == "{{ messages }}"


def test_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    path = tiny_tokenizers.save_byte_level(tmp_path, chat_template=templates)
    assert load_tokenizer(path).chat_template == "yes"


def test_errors_name_file_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json cannot be read .*; download it again"):
        load_tokenizer(tmp_path)
    path = tiny_tokenizers.save_byte_level(tmp_path / "config")
    (path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerLoadError, match="JSON object"):
        load_tokenizer(path)


@pytest.fixture(scope="module")
def transformers_smollm2(smollm2_gguf: Path):
    """The conversion of the real file by transformers."""
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


def test_real_gguf_against_transformers(smollm2: LoadedTokenizer, transformers_smollm2) -> None:
    """The conversion by transformers omits the model's rule that digits are split off first; the rest is right."""
    ours, theirs = smollm2, transformers_smollm2
    without_digits = [text for text in TEXTS if not any(char.isnumeric() for char in text)]
    assert len(without_digits) >= 20
    assert_same(ours, theirs, without_digits)
    assert theirs.chat_template == ours.chat_template
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(theirs, name) == ours.special_tokens[name]


def test_real_gguf_splits_digits_as_the_original_model(
    smollm2: LoadedTokenizer, transformers_smollm2, tmp_path: Path
) -> None:
    """The reference is the model's own tokenizer.json: Digits(individual), then ByteLevel."""
    transformers_smollm2.save_pretrained(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, description["pre_tokenizer"]],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    original = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert_same(smollm2, original, [*TEXTS, *SPACES_BEFORE_DIGITS])


def test_torch_is_never_imported(smollm2_gguf: Path) -> None:
    """The whole service is imported and the real tokenizer loaded in a process where torch cannot be imported."""
    program = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
import pagewire.services.tokenizer.main
from pagewire.files.tokenizer_files.loading import load_tokenizer
print(load_tokenizer(sys.argv[1]).decode([504, 3575], skip_special_tokens=True))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(smollm2_gguf)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[4],
        env={"PATH": os.environ["PATH"]},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital\n"
