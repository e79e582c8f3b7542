"""Small tokenizers of each kind, saved in Hugging Face layout."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, this is a tiny corpus. It's 12345 and 67 89!",
    "def f(x):\n    return x + 1  # café déjà vu",
    "北京 is 中国的首都。 こんにちは 안녕 Привет мир 👍🏽 🎉 naïve",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_byte_level(path: Path, **config: object) -> Path:
    """Qwen2-like: byte-level BPE, special and plain added tokens."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return _save(
        path,
        backend,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHATML,
        }
        | config,
    )


def sentencepiece_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted({char for text in CORPUS[:2] for char in text.replace(" ", "▁")} | {"▁"})
    merges = [("h", "e"), ("l", "l"), ("▁", "t"), ("▁t", "h"), ("▁", "▁"), ("▁▁", "▁▁"), ("i", "s"), ("▁", "is")]
    pieces += characters + ["".join(pair) for pair in merges]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}, merges


def save_sentencepiece(path: Path, **config: object) -> Path:
    """Llama-2-like: SentencePiece BPE with byte fallback, a space in front, BOS added."""
    vocab, merges = sentencepiece_vocabulary()
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(path, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config)


def save_unigram(path: Path, **config: object) -> Path:
    """T5-like: Unigram with Metaspace."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _save(path, backend, {"eos_token": "</s>", "unk_token": "<unk>"} | config)


def save_word_pieces(path: Path, **config: object) -> Path:
    """BERT-like: WordPiece."""
    words = ["[UNK]", "[CLS]", "[SEP]", "he", "is", "hell", ".", "'", "t", "do", "##llo", "##is", "##t", "##he", "##n"]
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return _save(path, backend, {"unk_token": "[UNK]"} | config)


def save_word_level(path: Path, **config: object) -> Path:
    """Words without a decoder: tokens are joined by spaces."""
    words = ["[UNK]", "hello", "world", "."]
    vocab = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _save(path, backend, {"unk_token": "[UNK]"} | config)


def _save(path: Path, backend: Tokenizer, config: dict[str, object]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
