"""What the route answers."""

from typing import Literal

from pagewire.gateway.core.body import Body

Service = Literal["gateway", "tokenizer", "scheduler"]


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
    detokenize_seconds: float | None  # that making text of tokens took, beside the executor's steps
    finish_reason: str | None  # null: it has not ended
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Explanation(Body):
    """A request that goes on, or has ended lately: every service keeps the last thousand."""

    object: Literal["request.explanation"]
    id: str
    trace_id: str | None
    is_running: bool  # then it is told so far
    seconds: float
    outputs: list[ExplainedOutput]
    silent: list[Service]  # which do not know it: not reached yet, started again since, or a gateway of elsewhere
    text: str  # the same for people
