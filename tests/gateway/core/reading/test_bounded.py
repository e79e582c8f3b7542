"""Bodies that are wrong in many places: what is reported does not grow with them."""

from typing import Any, get_type_hints

import httpx
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from pagewire.gateway.app import with_routes
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading import bounded
from pagewire.gateway.core.reading.bounded import MAX_OBJECT_MEMBERS, MAX_OBJECTS_IN_LIST, BoundedModel
from pagewire.gateway.core.reading.json_route import JsonRoute
from tests.chaos.fuzz.places import Place, places

NUM_WRONG = 3000
WRONG: tuple[Any, ...] = ({}, 0.5, "x", None, [], True, {"type": "text"}, {"role": "user"}, {"type": "function"})
# An error for each branch of a union, and of unions in these; the same for any number of items.
MOST_ERRORS = 20


def bodies() -> list[type[BaseModel]]:
    """The body of every route."""
    routers = [route.original_router for route in with_routes().routes if hasattr(route, "original_router")]
    routes = [route for router in routers for route in router.routes if isinstance(route, JsonRoute)]
    hints = [get_type_hints(route.endpoint) for route in routes]
    return [*dict.fromkeys(each["body"] for each in hints if "body" in each)]


def num_errors(model: type[BaseModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except ApiError:
        return 1
    return 0


def filled(place: Place, wrong: Any, count: int) -> Any:
    return place.body([wrong] * count if place.kind == "array" else {str(i): wrong for i in range(count)})


@pytest.mark.parametrize("model", bodies(), ids=lambda model: model.__name__)
def test_wrong_items_are_reported_once_in_every_list_and_map(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    long = [one for one in places(schema, schema.get("$defs", {})) if one.kind in ("array", "map")]
    for place in long:
        for wrong in WRONG:
            assert num_errors(model, filled(place, wrong, NUM_WRONG)) <= MOST_ERRORS, f"{place}: {wrong}"


def test_there_are_bodies_with_lists() -> None:
    schemas = [(model.model_json_schema(), model) for model in bodies()]
    found = [str(place) for schema, _ in schemas for place in places(schema, schema.get("$defs", {}))]
    assert {"messages", "messages[].content", "stop_token_ids", "logit_bias", "tools", "input"} <= set(found)
    assert all(issubclass(model, BoundedModel) for _, model in schemas)


class Item(BoundedModel):
    name: str


class Order(BoundedModel):
    items: list[Item] | None = None
    ids: list[int] | None = None
    prices: dict[str, float] | None = None
    metadata: dict[str, str] | None = None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"items": [{"name": "a"}] * (MAX_OBJECTS_IN_LIST + 1)}, f"at most {MAX_OBJECTS_IN_LIST} items"),
        ({f"k{i}": 1 for i in range(MAX_OBJECT_MEMBERS + 1)}, f"at most {MAX_OBJECT_MEMBERS} members"),
        ({"items": [{f"k{i}": 1 for i in range(MAX_OBJECT_MEMBERS + 1)}]}, f"at most {MAX_OBJECT_MEMBERS} members"),
    ],
)
def test_what_has_no_end_is_refused(body: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Order.model_validate(body)


def test_what_is_right_stays_so() -> None:
    body = {
        "items": [{"name": str(i)} for i in range(MAX_OBJECTS_IN_LIST)],
        "ids": list(range(100_000)),
        "prices": {str(i): 0.5 * i for i in range(10_000)},
        "metadata": {"metadata": "type"},
    }
    assert Order.model_validate(body).model_dump() == body


def test_the_schema_of_a_class_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each application that has a route with the body asks for it."""
    monkeypatch.setattr(bounded, "_bounded", pytest.fail)
    assert TypeAdapter(list[Order]).validate_python([{"ids": [1]}]) == [Order(ids=[1])]


async def test_an_error_repeats_a_bounded_part_of_a_name(client: httpx.AsyncClient) -> None:
    for name in ("." * 300_000, "[" * 300_000, "x" * 300_000, "stop_token_id" + "s" * 300_000):
        answer = await client.post("/v1/completions", json={"prompt": "p", name: 1})
        assert answer.status_code == 400
        assert "unknown parameter" in answer.text and len(answer.text) < 5000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a"] * 1024, "guided_regex": "a" * 200_000}, "the 1024 choices of this request, each with its"),
        ({"prompt": ["a"] * 512, "logit_bias": {str(i): 1 for i in range(20_000)}}, "10240000 token ids and texts"),
        ({"prompt": "a", "n": 128, "stop_token_ids": [*range(10_000)]}, "1280000 token ids and texts"),
        ({"prompt": "a", "n": 128, "guided_choice": [str(i) for i in range(10_000)]}, "1280000 token ids and texts"),
        ({"prompt": "a", "guided_regex": "a" * 2_000_000}, "guided_regex has 2000"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(65_537)}}, "at most 65536 items"),
        ({"prompt": "a", "stop": ["a"] * 1025}, "at most 1024 items"),
        ({"prompt": "a", "bad_words": ["a"] * 1025}, "at most 1024 items"),
    ],
)
async def test_what_each_choice_of_each_prompt_repeats_is_bounded(
    client: httpx.AsyncClient, body: Any, words: str
) -> None:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


async def test_many_inputs_of_token_ids_are_taken(client: httpx.AsyncClient) -> None:
    body = {"input": [[1, 2]] * 20_000}
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    body = {"query": "q", "documents": ["a"] * 20_000}
    assert (await client.post("/v1/rerank", json=body)).status_code == 200


async def test_half_a_surrogate_pair_in_bytes_is_not_utf_8(client: httpx.AsyncClient) -> None:
    content, headers = b'{"prompt": "\xed\xa0\x80"}', {"content-type": "application/json"}
    answer = await client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400 and "not UTF-8 at byte" in answer.text
