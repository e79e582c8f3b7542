"""The flags of `pagewire bench serve` and `pagewire bench sweep`."""

from dataclasses import dataclass

from pagewire.config.fields import NOT_NEGATIVE, POSITIVE, Range, flag
from pagewire.tools.client_config import ClientTlsFlags


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ClientTlsFlags):
    """The server, and the options of every request."""

    base_url: str = flag("http://127.0.0.1:8000", "server to measure, any that speaks the OpenAI API", group="server")
    endpoint: str = flag(
        "/v1/completions", "what to call", group="server", choices=("/v1/completions", "/v1/chat/completions")
    )
    model: str | None = flag(None, "model name (default: the first that the server lists)", group="server")
    api_key: str | None = flag(
        None,
        "sent as `Authorization: Bearer KEY` (default: $PAGEWIRE_API_KEY, else $OPENAI_API_KEY)",
        group="server",
        secret=True,
    )
    timeout: float = flag(900.0, "seconds after which a request counts as failed", group="server", valid=Range(above=0))
    ignore_eos: bool = flag(
        True, "generate the full length; turn off for servers that refuse the parameter", group="prompts"
    )
    temperature: float = flag(0.0, "0 = greedy", group="prompts", valid=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ServerFlags):
    """`pagewire bench serve`."""

    num_prompts: int = flag(64, "requests to measure", group="load", valid=POSITIVE)
    concurrency: int | None = flag(
        None, "requests in flight (default: 8; unlimited if --request-rate is given)", group="load", valid=POSITIVE
    )
    request_rate: float | None = flag(
        None, "requests started per second, whether or not earlier ones have ended", group="load", valid=Range(above=0)
    )
    burstiness: float = flag(
        1.0,
        "shape of the gaps between starts: 1 = Poisson arrivals, lower = bursts, higher = more regular",
        group="load",
        valid=Range(above=0),
    )
    max_retries: int = flag(
        0,
        "how often a refused request (429, 503) is repeated, each time after the delay that the server gives"
        " (Retry-After); its times are those of the answered attempt",
        group="load",
        valid=NOT_NEGATIVE,
    )
    warmup: int = flag(1, "requests sent one by one before the measurement", group="load", valid=NOT_NEGATIVE)
    seed: int = flag(0, "seed of the random prompts and of the arrivals", group="load")

    input_len: int = flag(
        128, "tokens of each random prompt, as the server counts them", group="prompts", valid=POSITIVE
    )
    output_len: int = flag(128, "tokens to generate for each prompt", group="prompts", valid=POSITIVE)
    prompts_file: str | None = flag(
        None, 'JSON lines {"prompt": "...", "tokens": N} instead of random prompts', group="prompts"
    )
    prompt_tokens: int | None = flag(
        None, "take only prompts of this many tokens from the file", group="prompts", valid=POSITIVE
    )
    prompt_offset: int = flag(
        0, "skip this many prompts of the file, to use new ones in each repeat", group="prompts", valid=NOT_NEGATIVE
    )

    json_out: str | None = flag(None, "write summary and single requests to this file", group="output")
    label: str = flag("", "name of this run in the output", group="output")


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """The loads of a sweep, and the file of its curves."""

    only: str | None = flag(
        None,
        "one of the two curves (default: both)",
        group="load",
        choices=("concurrency", "prompt-length"),
    )
    concurrency: tuple[int, ...] = flag(
        tuple(2**n for n in range(9)),
        "requests in flight, all sent at once (default: 1 to 256, doubling)",
        group="load",
        valid=POSITIVE,
    )
    prompt_lens: tuple[int, ...] | None = flag(
        None,
        "tokens of prompts that are sent one by one, for one token each (default: 128, doubling up to 8192 or to what"
        " the model's length allows)",
        group="load",
        valid=POSITIVE,
    )
    num_prompts: int = flag(
        4, "requests of each point, or as many as are in flight if these are more", group="load", valid=POSITIVE
    )
    seed: int | None = flag(
        None,
        "seed of the random prompts (default: a different one each time, to avoid hits in prefix caches)",
        group="load",
    )
    input_len: int = flag(128, "tokens of each prompt, against concurrency", group="prompts", valid=POSITIVE)
    output_len: int = flag(
        128, "tokens to generate for each prompt, against concurrency", group="prompts", valid=POSITIVE
    )
    json_out: str = flag(
        "curves.json",
        "file of curves; those already in it are kept unless they are measured again",
        group="output",
    )
    label: str | None = flag(None, "name of the curves in pictures (default: the model's)", group="output")


@dataclass(frozen=True, kw_only=True)
class SweepConfig(SweepFlags, ServerFlags):
    """`pagewire bench sweep`."""
