"""Merges the accounts of all services of a request into one."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.operation.explain.bodies import ExplainedOutput, ExplainedPhase, Explanation, Service
from pagewire.v1.admin_pb2 import RequestAccount

# The tokenizer service's own phase; the scheduler has the others.
_ENCODE = "encode"


def explain(request_id: str, accounts: Sequence[RequestAccount]) -> Explanation | None:
    """Returns the explanation of a request: of its last attempt, or of the last request with this id.

    None: no service has an account.
    """
    latest = {(one.service, one.request_id): one for one in accounts}
    whole = latest.get(("gateway", request_id))
    ids = list(dict.fromkeys(one.request_id for one in accounts if one.service != "gateway"))
    if not ids and whole is not None:  # it has not reached another service
        ids = [request_id]
    outputs = [
        _output(one, whole, latest.get(("tokenizer", one)), latest.get(("scheduler", one)))
        for one in sorted(ids, key=lambda one: (len(one), one))
    ]
    if not outputs:
        return None
    seconds = max(output.seconds for output in outputs)
    trace_id = next((one.trace_id for one in accounts if one.trace_id), None)
    is_running = any(one.is_running for one in latest.values())
    known = {one.service for one in accounts}
    silent: list[Service] = [one for one in ("gateway", "tokenizer", "scheduler") if one not in known]
    explanation = Explanation("request.explanation", request_id, trace_id, is_running, seconds, outputs, silent, "")
    explanation.text = _text(explanation)
    return explanation


def _output(
    request_id: str, whole: RequestAccount | None, text: RequestAccount | None, tokens: RequestAccount | None
) -> ExplainedOutput:
    """
    Args:
        whole: the account of the gateway.
        text: the account of the tokenizer service, a part of `whole`.
        tokens: the account of the scheduler, a part of `text`. All values are durations, so clocks need not agree.
    """
    known = [one for one in (whole, text, tokens) if one is not None]
    outer, inner = known[0], known[-1]
    seconds = [one.seconds for one in known]
    parts: list[tuple[str, float]] = []
    if whole is not None:
        parts.append(("gateway", seconds[0] - (seconds[1] if len(known) > 1 else 0.0)))
    encode = 0.0
    if text is not None:
        encode = sum(phase.seconds for phase in text.phases if phase.name == _ENCODE)
        parts.append(("tokenize", encode))
    phases = [ExplainedPhase(name, max(0.0, taken), 0.0, 0, None, None) for name, taken in parts]
    if tokens is not None:
        phases += [
            ExplainedPhase(one.name, one.seconds, 0.0, one.num_tokens, one.num_chunks or None, one.executor or None)
            for one in tokens.phases
        ]
    if text is not None:
        within = tokens.seconds if tokens is not None else 0.0
        phases.append(ExplainedPhase("between services", max(0.0, text.seconds - encode - within), 0.0, 0, None, None))
    for phase in phases:
        phase.share = phase.seconds / outer.seconds if outer.seconds else 0.0
    before = seconds[0] - text.seconds if text is not None and whole is not None else 0.0
    first_token = next((one.first_token_seconds for one in (text, tokens) if one and one.first_token_seconds), None)
    usage = next((one.usage for one in (text, tokens) if one is not None and one.usage.prompt_tokens), inner.usage)
    return ExplainedOutput(
        request_id,
        outer.seconds,
        None if first_token is None else before + first_token,
        phases,
        None if text is None else text.detokenize_seconds,
        (text or inner).finish_reason or None,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )


def _text(explanation: Explanation) -> str:
    lines = [f"request {explanation.id}: {explanation.seconds:.3f} s{' so far' if explanation.is_running else ''}"]
    if explanation.trace_id:
        lines[0] += f", trace {explanation.trace_id}"
    for output in explanation.outputs:
        lines += _lines(output, is_one=len(explanation.outputs) == 1)
    if "gateway" in explanation.silent:
        lines.append("without the gateway's part: another gateway answered the request")
    return "\n".join(lines) + "\n"


def _lines(output: ExplainedOutput, *, is_one: bool) -> Iterable[str]:
    end = f"ended by {output.finish_reason}" if output.finish_reason else "not ended"
    yield (
        f"{'' if is_one else f'{output.id}: {output.seconds:.3f} s, '}{output.prompt_tokens} tokens of prompt"
        f" ({output.cached_tokens} cached), {output.output_tokens} of output, {end}"
    )
    for phase in output.phases:
        said = [f"{phase.tokens} tokens"] if phase.tokens else []
        said += [f"in {phase.steps} steps" if phase.steps > 1 else "in one step"] if phase.steps else []
        said += [f"on {phase.executor}"] if phase.executor else []
        yield f"  {phase.name:<16} {phase.seconds:8.3f} s {phase.share:6.1%}  {' '.join(said)}".rstrip()
    if output.first_token_seconds is not None:
        yield f"  first token after {output.first_token_seconds:.3f} s"
    if output.detokenize_seconds:
        yield f"  text of tokens   {output.detokenize_seconds:8.3f} s, in parallel to the executor's steps"
