"""Makes one account of a request of what each service knows."""

from collections.abc import Iterable, Sequence

from pagewire.gateway.explain.schema import ExplainedOutput, ExplainedPhase, Explanation
from pagewire.v1.admin_pb2 import RequestAccount

# The tokenizer service's own part; the scheduler's phases are the rest of it.
_ENCODE = "encode"


def explain(request_id: str, accounts: Sequence[RequestAccount]) -> Explanation | None:
    """None: nobody knows the request. Of several attempts, and of an id that was used again, it is the last."""
    latest = {(one.service, one.request_id): one for one in accounts}
    whole = latest.get(("gateway", request_id))
    ids = list(dict.fromkeys(one.request_id for one in accounts if one.service != "gateway"))
    outputs = [
        _output(one, whole, latest.get(("tokenizer", one)), latest.get(("scheduler", one)))
        for one in sorted(ids, key=lambda one: (len(one), one))
    ]
    if not outputs:
        return None
    seconds = max(output.seconds for output in outputs)
    trace_id = next((one.trace_id for one in accounts if one.trace_id), None)
    explanation = Explanation("request.explanation", request_id, trace_id, seconds, outputs, "")
    explanation.text = _text(explanation)
    return explanation


def _output(
    request_id: str, whole: RequestAccount | None, text: RequestAccount | None, tokens: RequestAccount | None
) -> ExplainedOutput:
    """whole: what the gateway knows, text: the tokenizer service, tokens: the scheduler. Each is within the one before;
    what they measure are durations, so their clocks need not agree."""
    known = [one for one in (whole, text, tokens) if one is not None]
    seconds = [one.seconds for one in known]
    parts: list[tuple[str, float, RequestAccount | None]] = []
    if whole is not None and len(known) > 1:
        parts.append(("gateway", seconds[0] - seconds[1], None))
    encode = 0.0
    if text is not None:
        encode = sum(phase.seconds for phase in text.phases if phase.name == _ENCODE)
        parts.append(("tokenize", encode, None))
    phases = [ExplainedPhase(name, max(0.0, taken), 0.0, 0, None, None) for name, taken, _ in parts]
    if tokens is not None:
        phases += [
            ExplainedPhase(one.name, one.seconds, 0.0, one.num_tokens, one.num_chunks or None, one.executor or None)
            for one in tokens.phases
        ]
    if text is not None:
        within = tokens.seconds if tokens is not None else 0.0
        phases.append(ExplainedPhase("between services", max(0.0, text.seconds - encode - within), 0.0, 0, None, None))
    for phase in phases:
        phase.share = phase.seconds / seconds[0] if seconds[0] else 0.0
    outer, inner = known[0], known[-1]
    before = seconds[0] - text.seconds if text is not None and whole is not None else 0.0
    first_token = next((one.first_token_seconds for one in (text, tokens) if one and one.first_token_seconds), None)
    usage = next((one.usage for one in (text, tokens) if one is not None and one.usage.prompt_tokens), inner.usage)
    return ExplainedOutput(
        request_id,
        outer.seconds,
        None if first_token is None else before + first_token,
        phases,
        (text or inner).finish_reason or None,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )


def _text(explanation: Explanation) -> str:
    lines = [f"request {explanation.id}: {explanation.seconds:.3f} s"]
    if explanation.trace_id:
        lines[0] += f", trace {explanation.trace_id}"
    for output in explanation.outputs:
        lines += _lines(output, is_one=len(explanation.outputs) == 1)
    return "\n".join(lines) + "\n"


def _lines(output: ExplainedOutput, *, is_one: bool) -> Iterable[str]:
    yield (
        f"{'' if is_one else f'{output.id}: {output.seconds:.3f} s, '}{output.prompt_tokens} tokens of prompt"
        f" ({output.cached_tokens} cached), {output.output_tokens} of output, ended by {output.finish_reason}"
    )
    for phase in output.phases:
        said = [f"{phase.tokens} tokens"] if phase.tokens else []
        said += [f"in {phase.steps} steps" if phase.steps > 1 else "in one step"] if phase.steps else []
        said += [f"on {phase.executor}"] if phase.executor else []
        yield f"  {phase.name:<16} {phase.seconds:8.3f} s {phase.share:6.1%}  {' '.join(said)}".rstrip()
    if output.first_token_seconds is not None:
        yield f"  first token after {output.first_token_seconds:.3f} s"
