"""What may follow the question mark of the routes for stored responses."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# All that could be included is there anyway. The official client writes the brackets.
Include = Annotated[str | None, Field(None, alias="include[]", description="Changes nothing.")]


class InputItemsQuery(BaseModel):
    """Which page of the items; `after` is the last id of the page before."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: str | None = None
    include_list: Include


class RetrieveQuery(BaseModel):
    """With `stream` the events of a response in the background, from the one after number `starting_after` on."""

    model_config = ConfigDict(extra="forbid")

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None
    include: str | None = None
    include_list: Include
    include_obfuscation: Literal["false"] | None = None
