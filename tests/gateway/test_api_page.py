"""docs/api.md says what the types declare."""

from pathlib import Path

from pagewire.gateway.app import with_routes
from pagewire.gateway.core.api_table import page
from pagewire.gateway.schema.field import HANDLED_BY

COMMAND = "python -m pagewire.gateway.core.api_table > docs/api.md"
PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    # assert would print two long texts
    if PAGE.read_text() != page(with_routes().openapi()):
        raise AssertionError(f"docs/api.md is not what the types declare: {COMMAND}")


def test_every_parameter_is_explained() -> None:
    document = with_routes().openapi()
    for path, methods in document["paths"].items():
        contents = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in contents:
            continue
        name = contents["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for parameter, schema in document["components"]["schemas"][name]["properties"].items():
            explained = schema.get("description") and schema.get(HANDLED_BY)
            assert explained, f"{path}: declare {parameter} with field() or required() of gateway/schema/field.py"
