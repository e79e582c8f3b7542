"""A tiny model with random weights and a tokenizer that covers every byte, for outputs with a grammar."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.limits import Limits
from pagewire.v1.common_pb2 import Grammar
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, tiny_llama
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

# More than the tokenizer has, as in models with a padded embedding.
VOCAB_SIZE = 420
EOS = 1
MAX_MODEL_LEN = 640
LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_model_len=MAX_MODEL_LEN,
    block_size=BLOCK_SIZE,
    state_tokens=BLOCK_SIZE,
)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "Gäst", "użytkownik 🙂"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/boss"}]},
    },
    "required": ["name", "age", "role", "tags", "boss"],
    "additionalProperties": False,
    "$defs": {
        "boss": {
            "type": "object",
            "properties": {"since": {"type": "string", "format": "date"}},
            "required": ["since"],
            "additionalProperties": False,
        }
    },
}
DIGITS = r"[0-9]{3}-[0-9]{4}( ext\. [0-9]{1,2})?"
CHOICES = ["yes", "no", 'perhaps "so"\n', "да 🙂"]
EBNF = """
root ::= expr
expr ::= term ([-+] term)?
term ::= "x" | [0-9] | "(" [a-c] ")"
"""
LARK = """
start: expr
expr: term (SIGN term)?
term: "x" | /[0-9]/ | "(" /[a-c]/ ")"
SIGN: "+" | "-"
"""
EXPRESSION = r"(x|[0-9]|\([a-c]\))([-+](x|[0-9]|\([a-c]\)))?"


def save_constrained(path: Path) -> LoadedTokenizer:
    """Writes the tokenizer that a runner finds there."""
    save_byte_level(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.backend.token_to_id("<|im_end|>") == EOS
    assert tokenizer.backend.get_vocab_size() < VOCAB_SIZE
    return tokenizer


def constrained_runner(
    path: Path, num_blocks: int = 320, proposer: Proposer | None = None
) -> tuple[ModelRunner, ExecutorInfo]:
    """Returns the runner and the info of an executor. Weights are always the same, in a separate model: its layers have
    the runner's KV cache."""
    model = tiny_llama(path, vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_position_embeddings=MAX_MODEL_LEN)
    info = ExecutorInfo(
        incarnation=5,
        model="tiny",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        kv_groups=(KVGroup(num_blocks, 0),),
        block_size=BLOCK_SIZE,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        device="cpu",
        dtype="float32",
        weight_bytes=1,
        kv_cache_bytes=1,
        max_draft_tokens=0 if proposer is None else proposer.max_draft_tokens,
    )
    return assemble(model, LIMITS, num_blocks, CPU, proposer=proposer), info


def fits(grammar: Grammar, text: str) -> bool:
    """Returns whether the output matches the grammar, as far as independent libraries can decide."""
    form = grammar.WhichOneof("form")
    if form == "json_schema":
        return _is_valid(grammar.json_schema, text)
    if form == "choice":
        return text in grammar.choice.texts
    return re.fullmatch(EXPRESSION if form == "ebnf" else grammar.regex, text) is not None


def _is_valid(schema: str, text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), json.loads(schema), format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def one_of(texts: Sequence[str]) -> Grammar:
    return Grammar(choice=Grammar.Choice(texts=texts))
