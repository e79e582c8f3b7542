"""BERT's tokenizer, which divides words into the longest pieces that fit."""

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors


def word_piece_tokenizer(
    vocab: dict[str, int], normalizer: normalizers.Normalizer, named: Mapping[str, str]
) -> Tokenizer:
    """Returns a WordPiece tokenizer. vocab: pieces that continue a word begin with ##. named: the tokens that are
    `unk_token`, `cls_token` and `sep_token`."""
    backend = Tokenizer(models.WordPiece(vocab, unk_token=named["unk_token"]))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    separator, first = ((token, vocab[token]) for token in (named["sep_token"], named["cls_token"]))
    backend.post_processor = processors.BertProcessing(separator, first)
    return backend
