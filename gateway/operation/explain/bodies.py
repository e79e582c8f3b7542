"""The answer of the route."""

from typing import Literal

from pagewire.gateway.core.body import Body

Service = Literal["gateway", "tokenizer", "scheduler"]


class ExplainedPhase(Body):
    """A part of the time.

    `gateway`: reading the request and writing the answer. `tokenize`: from the arrival at the tokenizer service until
    the prompt is encoded. `grammar`: until an executor has compiled it. `queue`: until the first step. `load`: until KV
    blocks are loaded that were computed before. `prefill`: until the first token, or the next one after an
    interruption. `handover`: until another executor has the KV blocks of the prompt. `decode`: until the last token.
    `preempted`: other requests have its KV blocks. `recovery`: its executor was lost. `between services`: the rest,
    transfer and detokenization.
    """

    name: str
    seconds: float
    share: float  # of the whole, 0 to 1
    tokens: int  # computed in this phase
    steps: int | None  # with a part of the prompt
    executor: str | None


class ExplainedOutput(Body):
    """One output. The phases add up to `seconds`."""

    id: str
    seconds: float  # from the request's head to the end of the answer
    first_token_seconds: float | None
    phases: list[ExplainedPhase]
    detokenize_seconds: float | None  # of detokenization, parallel to the executor's steps
    finish_reason: str | None  # null: still running
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Explanation(Body):
    """A running request, or one of the last thousand that have ended."""

    object: Literal["request.explanation"]
    id: str
    trace_id: str | None
    is_running: bool  # if true, all values cover the time until now
    seconds: float
    outputs: list[ExplainedOutput]
    silent: list[Service]  # have no account: not reached yet, restarted since, or a gateway elsewhere
    text: str  # the same as readable text
