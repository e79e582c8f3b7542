"""Schemathesis against all routes of /openapi.json: answers are as documented, whatever is asked. Needs schemathesis.

What a schema cannot say (that two parameters exclude each other, that a regular expression is one) is known here:
rivals are removed from generated bodies, and why a body may be refused that its schema allows is listed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import GenerationMode

# At most one of each is left in a body.
RIVALS = (
    ("request_id", "rid"),
    ("include_stop_str_in_output", "no_stop_trim"),
    ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    ("input", "messages", "prompt"),
    ("input_ids", "text"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("continue_final_message", "add_generation_prompt"),
    ("stream", "prompt_logprobs", "best_of", "use_beam_search"),
    ("json", "regex", "choice", "grammar", "structural_tag", "json_object"),
    (
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "json_schema", "regex", "ebnf", "allowed_token_ids",
    ),
)  # fmt: skip
# Parameters that need another one.
NEEDS = {
    "top_logprobs": "logprobs",
    "stream_options": "stream",
    "tool_choice": "tools",
    "function_call": "functions",
    "min_tokens": "max_tokens",
    "early_stopping": "use_beam_search",
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "min_tokens", "min_new_tokens")
SMALL = {"n": 2, "thinking_token_budget": 2, "truncate_prompt_tokens": 64} | dict.fromkeys(LENGTHS, 3)
GENERATES = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
REPLACES_WEIGHTS = ("/v1/admin/weights", "/update_weights_from_disk")
# Why a body may be refused that its schema allows.
REASONS = re.compile(
    "|".join(
        (
            # Two parameters that exclude or need each other.
            "give either", "give one", "give text_1", "give request_ids", "exactly one form", "are the same",
            r"\bneeds?\b", "excludes", "cannot be combined", "cannot be streamed", "cannot stream", "less than n",
            "greater than max_tokens", "are for json_schema", "the conversation is empty",
            "the prompt is empty", "at least one message", "message is required", "unless echo is true",
            r"content\[\d+\] is", "not among the (tools|functions)", "of a 'function' message",
            "no earlier function_call",
            # The model, its vocabulary and its template, and the server's flags.
            "the model generates text", "is served for embeddings", "for models that embed", "prompt_name",
            "has no tokens", "leaves no room", "computed from text", "the model's vectors have", "reads no images",
            "the vocabulary is", "returns at most", r"within -?\d+\.\.\d+", "the chat template", "has no chat template",
            "--[a-z]+-[a-z]+", "too long", "exceed", r"at most \d+",
            # What is no form: a schema, a regular expression, a grammar.
            "^(json_schema|json|regex|ebnf|grammar|structural_tag|choice)( at [^:]*)?[: ]", "cannot be followed",
            "is not JSON", "thinking_token_budget",
            # What is not stored, and numbers that float32 rounds to others.
            "no response ", "no item ", "is not available to batches", r"is (inf|-?[0-9.e+-]+); it must be",
        )
    )
)  # fmt: skip


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if case.meta.generation.mode == GenerationMode.POSITIVE:
        without_rivals(body)
        for message in body.get("messages") or ():
            if message.get("content") is None:
                message["content"] = "x"
    keep_short(body, case.operation.path)


def without_rivals(body: dict[str, Any]) -> None:
    for names in RIVALS:
        for name in [name for name in names if body.get(name) is not None][1:]:
            del body[name]
    for name, needed in NEEDS.items():
        if not body.get(needed):
            body.pop(name, None)
    for part in ("structured_outputs", "sampling_params"):
        if isinstance(body.get(part), dict):
            without_rivals(body[part])


def keep_short(body: dict[str, Any], path: str) -> None:
    """Bounds the output of any mode; otherwise the model writes for minutes."""
    for name, greatest in SMALL.items():
        if isinstance(body.get(name), int | float):
            body[name] = min(body[name], greatest)
    if path == "/generate" and isinstance(body.setdefault("sampling_params", {}), dict):
        keep_short(body["sampling_params"], "")
        body["sampling_params"].setdefault("max_new_tokens", 3)
    elif (length := GENERATES.get(path)) and all(body.get(name) is None for name in LENGTHS):
        body[length] = 3


@schemathesis.check
def refused_for_a_reason(context: Any, response: Any, case: Any) -> None:
    if case.operation.path in REPLACES_WEIGHTS:
        return  # by names of files that are not there
    if response.status_code == 400 and case.meta.generation.mode == GenerationMode.POSITIVE:
        message = response.json()["error"]["message"]
        assert REASONS.search(message), f"refused though its schema allows it: {message}"


def main() -> int:
    here = Path(__file__)
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": here.stem, "PYTHONPATH": str(here.parent)}
    options = ["--continue-on-failure", "--exclude-checks", "positive_data_acceptance", *sys.argv[1:]]
    command = [
        str(Path(sys.executable).with_name("st")),
        "run",
        "--warnings",
        "off",
        "--request-timeout",
        "60",
        *options,
    ]
    named = [os.environ.get(f"PAGEWIRE_{name}", "") for name in ("CHAT", "EMBED")]
    urls = [url.removesuffix("/v1") for url in named if url]
    return max(subprocess.run([*command, f"{url}/openapi.json"], env=environment).returncode for url in urls)


if __name__ == "__main__":
    sys.exit(main())
