"""What the route answers."""

from typing import Literal

from pagewire.gateway.schema.responses import Body


class ExplainedPhase(Body):
    """A part of the time. `gateway`: reading the request and writing the answer. `tokenize`: from the arrival at the
    tokenizer service until the prompt is tokens. `grammar`: until an executor has compiled it. `queue`: until its first
    step. `prefill`: until the first token, or the next one after an interruption. `decode`: until the last token.
    `preempted`: others have its KV blocks. `recovery`: its executor was lost. `between services`: all else, messages on
    their way and tokens that are made text."""

    name: str
    seconds: float
    share: float  # of the whole, 0 to 1
    tokens: int  # computed in it
    steps: int | None  # that computed parts of its prompt
    executor: str | None


class ExplainedOutput(Body):
    """One output. The phases add up to `seconds`."""

    id: str
    seconds: float  # from the request's head to the end of the answer
    first_token_seconds: float | None
    phases: list[ExplainedPhase]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Explanation(Body):
    """A request that has ended lately. Every service keeps the last thousand."""

    object: Literal["request.explanation"]
    id: str
    trace_id: str | None
    seconds: float
    outputs: list[ExplainedOutput]
    text: str  # the same for people
