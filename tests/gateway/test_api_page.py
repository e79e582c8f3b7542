"""The generated reference of the REST API (`make docs`) has every route and explains every parameter."""

import re
from typing import Any

from pagewire.gateway.api_table import page
from pagewire.gateway.schema.field import HANDLED_BY


def test_the_page_has_every_route_and_every_type(document: dict[str, Any]) -> None:
    generated = page(document)
    routes = {f"`{method.upper()} {path}`" for path, methods in document["paths"].items() for method in methods}
    assert len(routes) > 50
    assert all(f"| {route} |" in generated for route in routes)
    headings = {heading.lower() for heading in re.findall(r"^#+ (.+)$", generated, re.MULTILINE)}
    assert {name.lower() for name in document["components"]["schemas"]} <= headings
    assert set(re.findall(r"\]\(#([^)]+)\)", generated)) <= headings


def test_every_parameter_is_explained(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        contents = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in contents:
            continue
        schemas = document["components"]["schemas"]
        named = schemas[contents["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        for body in (
            (schemas[one["$ref"].rpartition("/")[2]] for one in named.get("oneOf", ()))
            if "oneOf" in named
            else (named,)
        ):
            for parameter, schema in body["properties"].items():
                explained = schema.get("description") and schema.get(HANDLED_BY)
                assert explained, f"{path}: declare {parameter} with field() or required() of gateway/schema/field.py"
