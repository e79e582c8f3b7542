"""Generates the reference of the REST API from the OpenAPI document; `make docs` writes it to docs/api.md."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pagewire.gateway.app import with_routes
from pagewire.gateway.schema.field import HANDLED_BY
from pagewire.gateway.schema.unsupported import REFUSED

Schema = Mapping[str, Any]

_PAGE = """\
# API

This page is generated from the declared types by `make docs`. A running server shows the same at `/docs` and
`/openapi.json`. [usage.md](usage.md) has examples.

- A parameter that a body does not list is refused with 400 and its name. `null` means unset.
- "Default" is the value of an unset parameter. The server's defaults override it: those of `/v1/models`.
- "Where" is the service that applies a parameter.
- Members of an answer marked with "?" are left out if they have no value; all others are always present.
- Every error is an [ErrorResponse](#errorresponse), unless an API has its own: Anthropic's, Ollama's and TGI's do.

{routes}

# Bodies

{bodies}

# Queries and forms

{inline}

# Objects in bodies

{objects}

# Answers

{answers}

# Objects in answers

{parts}
"""

_BOUNDS = {"minimum": "≥ ", "exclusiveMinimum": "> ", "maximum": "≤ ", "exclusiveMaximum": "< "}
# Bounds that only state the size of an integer type are left out.
_INT32_MAX = 2**31 - 1


class Route(NamedTuple):
    """One route: the call, its description, the name of its body ("" without one), and those of its answers."""

    call: str
    does: str
    body: str
    answers: list[str]
    inline: Schema  # parameters of a query or a form; empty without any


def page(document: Schema) -> str:
    schemas = document["components"]["schemas"]
    routes = list(_routes(document["paths"]))
    bodies = dict.fromkeys(route.body for route in routes if route.body)
    answers = dict.fromkeys(["ErrorResponse", *(answer for route in routes for answer in route.answers)])
    asked = _reachable(bodies, schemas)
    return _PAGE.format(
        routes=_table(("route", "what it does", "body", "answer"), map(_route, routes)),
        bodies="\n\n".join(_request(name, schemas[name]) for name in bodies),
        inline="\n\n".join(_request(route.call, route.inline) for route in routes if route.inline),
        objects="\n\n".join(_request(name, schemas[name]) for name in sorted(asked - bodies.keys())),
        answers="\n\n".join(_answer(name, schemas[name]) for name in answers),
        parts="\n\n".join(_answer(name, schemas[name]) for name in sorted(schemas.keys() - asked - answers.keys())),
    )


def _routes(paths: Schema) -> Iterator[Route]:
    for path, methods in paths.items():
        for method, route in methods.items():
            contents = route["responses"].get("200", {}).get("content", {})
            answers = list(dict.fromkeys(ref for content in contents.values() for ref in _references(content)))
            body = next(_references(route.get("requestBody", {})), "")
            call = f"{method.upper()} {path}"
            yield Route(call, route.get("description", route["summary"]), body, answers, _inline(route))


def _inline(route: Schema) -> Schema:
    query = [one for one in route.get("parameters", ()) if one["in"] == "query"]
    if query:
        return {
            "properties": {one["name"]: one["schema"] | {"description": one.get("description", "")} for one in query},
            "required": [one["name"] for one in query if one["required"]],
        }
    contents = route.get("requestBody", {}).get("content", {})
    return next((content["schema"] for content in contents.values() if "properties" in content["schema"]), {})


def _route(route: Route) -> tuple[str, str, str, str]:
    inline = ", ".join(f"`{name}`" for name in route.inline.get("properties", ()))
    return f"`{route.call}`", route.does, _link(route.body) or inline, ", ".join(map(_link, route.answers))


def _references(value: Any) -> Iterator[str]:
    """Names of the schemas that a value refers to."""
    if isinstance(value, Mapping):
        if isinstance(ref := value.get("$ref"), str):
            yield ref.rpartition("/")[2]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _references(one)


def _reachable(names: Iterable[str], schemas: Schema) -> set[str]:
    reached: set[str] = set()
    pending = list(names)
    while pending:
        if (name := pending.pop()) not in reached:
            reached.add(name)
            pending += _references(schemas[name])
    return reached


def _request(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    members = sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required)
    rows = [
        (
            f"`{member}`",
            _type(value),
            "required" if member in required else _default(value),
            value.get(HANDLED_BY, ""),
            value.get("description", ""),
        )
        for member, value in members
    ]
    parts = [_head(name, schema)]
    parts.append(_table(("parameter", "type", "default", "where", ""), rows) if rows else f"Either {_type(schema)}.")
    if refused := schema.get(REFUSED):
        parts += ["Refused by name:", _table(("parameter", "why"), [(f"`{one}`", why) for one, why in refused.items()])]
    return "\n\n".join(parts)


def _answer(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        (f"`{member}`" + ("" if member in required else "?"), _type(value, "null"), value.get("description", ""))
        for member, value in schema.get("properties", {}).items()
    ]
    return "\n\n".join((_head(name, schema), _table(("member", "type", ""), rows)))


def _head(name: str, schema: Schema) -> str:
    words = " ".join(schema.get("description", "").split())
    return f"## {name}\n\n{words}" if words else f"## {name}"


def _default(value: Schema) -> str:
    default = value.get("default")
    return "" if default is None else f"`{json.dumps(default)}`"


def _type(value: Schema, null: str = "") -> str:
    """Returns the type in words. null: the word for null; "" leaves it out."""
    if "$ref" in value:
        return _link(value["$ref"].rpartition("/")[2])
    if options := value.get("anyOf") or value.get("oneOf"):
        return " or ".join(dict.fromkeys(words for one in options if (words := _type(one, null))))
    if "enum" in value or "const" in value:
        texts = [
            "null" if one is None else f"`{one if isinstance(one, str) else json.dumps(one)}`"
            for one in value.get("enum", [value.get("const")])
        ]
        return " or ".join(text for text in texts if text != "null" or null)
    kind = value.get("type", "any")
    if kind == "array":
        if "prefixItems" in value:
            return f"({', '.join(_type(item, null) for item in value['prefixItems'])})"
        return f"list of {_type(value.get('items', {}), null)}"
    if kind == "null":
        return null
    limits = {key: value[key] for key in _BOUNDS if abs(value.get(key, math.inf)) < _INT32_MAX}
    return " ".join([kind, ", ".join(_BOUNDS[key] + str(limit) for key, limit in limits.items())]).strip()


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})" if name else ""


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


if __name__ == "__main__":
    sys.stdout.write(page(with_routes().openapi()))
