"""Whatever is written under a schema validates, and every number of a range can be written."""

import json
import math
import random
import re
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.options import Options
from tests.services.executor.grammar.schema.outputs import admits, any_output
from tests.services.executor.grammar.schemas import SCHEMAS
from tests.sweep import examples

NAMES = ["a", "b", "a\u00e9", 'q"', "x1", ""]
PATTERNS = ["^a", "b$", "^x[0-9]+$", "q|1", "[^a]"]
INTEGERS = st.integers(-30, 30) | st.integers(-(2**70), 2**70)
FLOATS = st.floats(-100, 100).map(lambda value: round(value, 2)) | st.floats(allow_nan=False, allow_infinity=False)
NUMBERS = INTEGERS | FLOATS
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | st.sampled_from([*NAMES, "\n", "a\\", "x\x7f"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
)
BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
    },
)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def a_type(name: str, fields: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(fields, st.booleans()).map(lambda both: both[0] | ({"type": name} if both[1] else {}))


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names, some = st.sampled_from(NAMES), st.lists(inner, min_size=1, max_size=2)
    small = st.integers(0, 3)
    objects = optional(
        properties=st.dictionaries(names, inner, max_size=3),
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
        additionalProperties=inner,
        required=st.lists(names, max_size=2, unique=True),
        minProperties=small,
        maxProperties=small,
        propertyNames=st.sampled_from([True, {}, {"type": "string"}, {"maxLength": 2}, {"enum": ["a", "x1"]}]) | inner,
        dependentRequired=st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
        unevaluatedProperties=st.booleans(),
    )
    arrays = optional(
        items=inner,
        prefixItems=some,
        minItems=small,
        maxItems=small,
        uniqueItems=st.booleans(),
        contains=inner,
        minContains=small,
    )
    together = optional(
        allOf=some, anyOf=some, oneOf=some, enum=st.lists(SCALARS, min_size=1, max_size=3), const=VALUES
    )
    conditional = st.fixed_dictionaries({"if": inner}, optional={"then": inner, "else": inner})
    negated = st.fixed_dictionaries({"not": inner})
    return (
        a_type("object", objects)
        | a_type("array", arrays)
        | together
        | conditional
        | negated
        | st.tuples(inner, together).map(lambda both: (both[0] if isinstance(both[0], dict) else {}) | both[1])
        | st.sampled_from([{"type": "array", "items": {"$ref": "#"}}, {"properties": {"a": {"$ref": "#"}}}])
    )


LEAVES = (
    st.booleans()
    | a_type("number", BOUNDS)
    | a_type("integer", BOUNDS)
    | a_type(
        "string",
        optional(
            minLength=st.integers(0, 3), maxLength=st.integers(0, 4), pattern=st.sampled_from([*PATTERNS, "^.$", r"\n"])
        ),
    )
    | st.sampled_from([{"type": "null"}, {"type": ["boolean", "integer"]}, {"const": 2**60 + 1}, {"enum": ["a", 1]}])
)
ANY_SCHEMA = st.recursive(LEAVES, composed, max_leaves=8)


@settings(max_examples=examples(250), deadline=None)
@given(schema=ANY_SCHEMA, seed=st.integers(0, 2**32), closes=st.booleans())
def test_every_output_validates(schema: Any, seed: int, closes: bool) -> None:
    choose = random.Random(seed)
    try:
        outputs = [any_output(schema, choose, Options(closes=closes)) for _ in range(3)]
    except SchemaError as refused:
        assert len(str(refused)) < 1000
        assume(False)
        return
    validator = jsonschema.Draft202012Validator(schema)
    for output in outputs:
        if output is not None:
            error = next(validator.iter_errors(json.loads(output)), None)
            assert error is None, (output, schema, error)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_people(name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    choose = random.Random(name)
    for output in filter(None, (any_output(SCHEMAS[name], choose, length=600) for _ in range(3))):
        validator.validate(json.loads(output))


def spellings(number: float) -> list[str]:
    return [repr(number), *({f"{number:e}", f"{number:.3f}"} if abs(number) < 1e15 else ())]


@settings(max_examples=examples(800), deadline=None)
@given(schema=BOUNDS, data=st.data())
def test_a_number_is_admitted_exactly_if_it_validates(schema: dict[str, Any], data: st.DataObject) -> None:
    """Bounds are what numbers are near to, so that they are on both sides of a bound and upon it."""
    kind = data.draw(st.sampled_from(["integer", "number"]))
    schema = schema | {"type": kind}
    near = data.draw(st.sampled_from([*[value for key, value in schema.items() if key != "type"], 0]))
    as_integer = data.draw(st.booleans())
    if as_integer:
        number: float | int = int(near) + data.draw(st.integers(-2, 2))
        texts = [str(number)] if len(str(abs(number))) <= 20 else []
    else:
        number = float(near) * data.draw(st.sampled_from([1, 1, 0.5, -1]))
        number = math.nextafter(number, data.draw(st.sampled_from([number, math.inf, -math.inf])))
        number = data.draw(st.sampled_from([number, round(number, 1)]))
        assume(math.isfinite(number))
        texts = spellings(number)
    validator = jsonschema.Draft202012Validator(schema)
    for text in texts:
        value = json.loads(text)
        if kind == "integer" and isinstance(value, float):
            continue
        try:
            is_admitted, is_valid = admits(schema, text), validator.is_valid(value)
        except SchemaError:
            assert not validator.is_valid(value)
            continue
        assert is_valid or not is_admitted, (schema, text)
        # Of a double that is a bound, not every longer spelling is admitted.
        assert is_admitted or not is_valid or text not in (repr(number), str(number)), (schema, text)


MULTIPLES = st.sampled_from(
    ["1", "2", "3", "7", "10", "64", "125", "12345", "0.5", "0.01", "0.25", "2.5", "0.1", "0.3"]
)


@settings(max_examples=examples(300), deadline=None)
@given(multiple=MULTIPLES, count=st.integers(-50, 50), off=st.sampled_from([0, 0, 1]), low=st.integers(-300, 300))
def test_multiples(multiple: str, count: int, off: int, low: int) -> None:
    """Compares with exact arithmetic; jsonschema divides doubles."""
    places = len(multiple.partition(".")[2])
    schema = f'{{"type": "number", "multipleOf": {multiple}, "minimum": {low}, "maximum": {low + 100}}}'
    value = count * Fraction(multiple) + Fraction(off, 10**places)
    text = f"{float(value):.{places}f}"
    expected = low <= value <= low + 100 and (value / Fraction(multiple)).denominator == 1
    try:
        assert admits(schema, text) == expected
    except SchemaError as error:
        assert not expected, error


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "number"}, {"minimum": 10**30}, {}])
def test_numbers_end(schema: Any) -> None:
    """A model that repeats a digit comes to an end."""
    assert not admits(schema, "1" * 60)
    assert not admits(schema, "0." + "3" * 60)
    assert not admits(schema, "1e" + "1" * 10)


def test_keys_have_one_spelling() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    assert admits(schema, '{"a":1,"b":"x","\\n":null}')
    for text in ('{"\\u0061":"x"}', '{"a":1,"a":2}', '{"b":1,"\\u0061":2}', '{"a":1,"\\u0062":2}'):
        assert not admits(schema, text), text
    patterned = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
    assert admits(patterned, '{"ab":1,"b":"x"}')
    assert not admits(patterned, '{"\\u0061b":"x"}') and not admits(patterned, '{"ab":"x"}')
    two = {"type": "object", "minProperties": 2}
    with pytest.raises(SchemaError, match="minProperties: 2 different properties"):
        admits(two, "{}")
    named = {"properties": {"a": {}, "b": {}}, "type": "object", "minProperties": 2, "additionalProperties": True}
    assert admits(named, '{"a":1,"c":2}') and not admits(named, '{"c":1,"c":2}') and not admits(named, '{"a":1}')


def test_text_of_all_kinds_is_escaped_once() -> None:
    text = 'é 🙂 "\\/\n\t\x00\x1f\x7f'
    for schema in ({"const": text}, {"type": "object", "properties": {text: True}, "required": [text]}):
        found = any_output(schema, random.Random(1), Options(whitespace=None), length=600)
        assert found is None or text in (json.loads(found), *json.loads(found))
    assert re.search(r"\\u0000\\u001f\\u007f", any_output({"const": text}, random.Random(1)) or "")
