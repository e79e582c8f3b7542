"""The names that clients know for the fields at fault.

Services name a field by its path in the gRPC request, and the bodies of some APIs are translated to those of chats and
completions. A route records its client's names for these fields in the context of the request (`names`);
an error is phrased with them when it is sent.

A field is given as data: the path of a `Violation`, or the `param` of an ApiError. Descriptions begin with the name of
their field; the rest of their text is not examined.
"""

from collections.abc import Mapping

from pagewire.gateway.core.errors import CONTAINERS, ApiError, parameter_of

# Paths of gRPC's requests -> parameters of chats and completions.
_OF_GRPC = {
    "logit_bias_ids": "logit_bias",
    "logit_bias_values": "logit_bias",
    "beam_search": "use_beam_search",
}
# To the services, a form and the calls of tools are both a grammar.
GRAMMAR, TOOLS = "grammar", "tools"
_ENDS = ("", ".", "[")  # after a name in a path that begins with it: a, a.b, a[0]


def rename(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Phrases an error with the names that its client knows, and returns it.

    names: parameter of chats and completions, or path of gRPC -> what the client calls it.
    """
    names = _OF_GRPC | dict(names)
    if not error.violations:
        if error.param is not None:
            own = _own_name(error.param, names)
            error.message, error.param = _led_by(own, error.message, error.param), own
        return error
    found = [_named(path, description, names) for path, description in error.violations]
    error.violations, error.param = (), found[0][0]
    error.message = "; ".join(dict.fromkeys(description for _, description in found))
    return error


def _named(path: str, description: str, names: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns the parameter of a violation, None if each API has another one, and the description of what is wrong."""
    inner = path.partition(".")[2] if path.partition(".")[0] in CONTAINERS else path
    if inner == GRAMMAR:
        own = names.get(GRAMMAR, GRAMMAR)
        if own == TOOLS:
            return own, f"{own}: the schema of a tool's parameters cannot be used: {description}"
        return own, description if own in description else f"{own}: {description}"
    parameter = inner if inner in names else parameter_of(path)
    if parameter is None:
        return None, description
    own = _own_name(parameter, names)
    return own, _led_by(own, description, path, inner, parameter)


def _own_name(parameter: str, names: Mapping[str, str]) -> str:
    heads = [name for name in names if parameter.startswith(name) and parameter[len(name) : len(name) + 1] in _ENDS]
    head = max(heads, key=len, default=None)
    return parameter if head is None else names[head] + parameter[len(head) :]


def _led_by(own: str, description: str, *names: str) -> str:
    """Returns a description that begins with `own` if it began with one of the names."""
    for name in names:
        rest = description.removeprefix(name)
        if rest != description and rest[:1] in ("", " ", ":", ","):
            return own + rest
    return description
