"""What clients call a field of which an error speaks.

Services name fields as gRPC has them, and the bodies of other APIs become those of chats and completions. A client
reads the name that it has sent: its route notes in the request's context what stands for what.
"""

import re
from collections.abc import Mapping

from pagewire.gateway.core.errors import ApiError

# Of gRPC's requests -> of chats and completions.
OF_GRPC = {
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "token_ids.ids": "prompt",
    "prompt_token_ids": "prompt",
    "beam_search": "use_beam_search",
}
# What the services know of whoever asked for a grammar.
GRAMMAR, TOOLS = "grammar", "tools"
# Where a tool's schema lies in the grammar of its calls.
_TOOL_SCHEMA = re.compile(r"structural_tag at #/format\S*?/json_schema(\S*?):")


def rename(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same, which speaks of fields by their names in `names`."""
    names = OF_GRPC | dict(names)
    if error.param == GRAMMAR:
        own = names.get(GRAMMAR, GRAMMAR)
        message = _TOOL_SCHEMA.sub(r"the schema of a tool's parameters, at #\1:", error.message)
        error.message = message if own in message else f"{own}: {message}"
        error.param = own
        return error
    error.message = _renamed_in(error.message, names)
    if error.param is not None:
        head = next((name for name in _heads(error.param) if name in names), None)
        if head is not None:
            error.param = names[head] + error.param[len(head) :]
    return error


def _heads(param: str) -> list[str]:
    """a.b[0].c: itself, a.b[0], a.b, a."""
    places = [match.start() for match in re.finditer(r"[.\[]", param)]
    return [param, *(param[:place] for place in reversed(places))]


def _renamed_in(message: str, names: Mapping[str, str]) -> str:
    """Names that are words of English, too, where one would write a field's: first, and in lists of fields."""
    for name, own in sorted(names.items(), key=lambda item: -len(item[0])):  # inputs[0] before inputs
        before = r"(?<![\w.])" if re.search(r"[._]", name) else r"(?:^|(?<=together with )|(?<=, ))"
        message = re.sub(rf"{before}{re.escape(name)}(?![\w.])", own, message)
    return message
