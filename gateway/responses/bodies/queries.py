"""The query parameters of the routes for stored responses."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from pagewire.gateway.core.reading.bounded import BoundedModel

# Everything that could be included always is. The official client writes the brackets.
Include = Annotated[str | None, Field(None, alias="include[]", description="Ignored.")]


class InputItemsQuery(BoundedModel):
    """A page of the items; `after` is the last id of the previous page."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: str | None = None
    include_list: Include


class RetrieveQuery(BoundedModel):
    """The form of a stored response. `stream`: the events of a background response, after number `starting_after`."""

    model_config = ConfigDict(extra="forbid")

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None
    include: str | None = None
    include_list: Include
    include_obfuscation: Literal["false"] | None = None
