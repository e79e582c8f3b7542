"""What clients of these routes call the inputs and pairs of the tokenizer's calls."""

from typing import Any

from pagewire.gateway.vectors.bodies.requests import SIDES, InputParameters, RerankRequest, ScoreRequest


def names_of(body: Any) -> dict[str, str]:
    """gRPC's names -> the body's."""
    if hasattr(body, "texts"):  # Cohere's, whose module imports those that import this one
        return {"inputs": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
    if isinstance(body, RerankRequest):
        return {"pairs": "documents"}
    if isinstance(body, ScoreRequest):
        second = next(name for _, name in SIDES if getattr(body, name) is not None)
        return {"pairs": second} | ({} if isinstance(getattr(body, second), list) else {"pairs[0]": second})
    if not isinstance(body, InputParameters):
        return {}
    if body.input is None:
        return {"inputs[0].chat": "messages", "inputs[0]": "messages"}
    is_list = isinstance(body.input, list) and not isinstance(body.input[0], int)
    return {"inputs": "input"} | ({} if is_list else {"inputs[0]": "input"})
