"""The flags of `pagewire bench spec`: how to measure, and all flags of `pagewire serve`."""

from dataclasses import dataclass

from pagewire.config import ServeConfig
from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, Range, flag
from pagewire.config.speculation import MOST_TOKENS


@dataclass(frozen=True, kw_only=True)
class SpecFlags:
    """The flags for the measurement."""

    methods: str = flag(
        "auto",
        "what to compare with no drafts, separated by commas: auto (the default of `pagewire serve`), ngram, suffix,"
        " mtp, self:q4, or a draft model, as for --spec-model",
        group="bench",
    )
    draft_tokens: tuple[int, ...] = flag(
        (5,),
        "maximum numbers of tokens to draft at once, each tried with every method (default: 5)",
        group="bench",
        valid=Range(minimum=1, maximum=MOST_TOKENS),
    )
    also_fixed: bool = flag(
        False,
        "also measure each method with its maximum number of drafts in every step, in addition to as many as pay off",
        group="bench",
    )
    prompts: str = flag(
        "code,quotes,chat",
        "kinds of prompts, separated by commas: code = edits of a file, quotes = summaries with quotes of a text, chat,"
        " random = outputs that no draft foresees: random words, drawn at temperature 2; or a file of JSON lines"
        ' {"prompt": "..."}',
        group="bench",
    )
    num_prompts: int = flag(
        3,
        "requests of each kind, in each round, or as many as --streams if these are more",
        group="bench",
        valid=POSITIVE,
    )
    output_len: int = flag(128, "maximum number of tokens to generate for each prompt", group="bench", valid=POSITIVE)
    rounds: int = flag(
        3,
        "how often each server is started and measured, in turns; the ratios are medians over rounds",
        group="bench",
        valid=POSITIVE,
    )
    side_by_side: bool = flag(
        False,
        "start all servers once and let them take turns for each kind of prompts, so that a ratio compares moments that"
        " are close together; takes the memory of all of them",
        group="bench",
    )
    streams: tuple[int, ...] = flag(
        (1,), "numbers of requests in flight, each measured with every kind (default: 1)", group="bench", valid=POSITIVE
    )
    temperature: float = flag(0.0, "0 = greedy", group="bench", valid=NOT_NEGATIVE)
    ignore_eos: bool = flag(False, "generate the full length, whether or not the model ends", group="bench")
    json_out: str = flag(
        "spec.json",
        "file of curves for `pagewire bench plot`; those already in it are kept unless they are measured again",
        group="bench",
    )


@dataclass(frozen=True, kw_only=True)
class SpecConfig(SpecFlags, ServeConfig):
    """`pagewire bench spec`."""
