"""The bodies of the routes for files, of requests and of answers."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.reading.bounded import BoundedModel

MAX_LISTED_FILES = 10_000
# The least and the greatest lifetime of files, also of the answers of batches.
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000

Purpose = Literal["batch", "batch_output"]


class FileQuery(BoundedModel):
    """A page of the files. `after` is the last id of the previous page."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class ExpiresAfter(BoundedModel):
    """The seconds for which a file is kept."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class UploadForm(BoundedModel):
    """The fields of an upload besides the file."""

    model_config = ConfigDict(extra="forbid")

    purpose: Annotated[str, StringConstraints(min_length=1)]
    expires_after: ExpiresAfter | None = None


class File(Body, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Body, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_EXPIRY_S,
                            "maximum": MAX_EXPIRY_S,
                            "default": MAX_EXPIRY_S,
                        },
                    },
                    "dependentRequired": {
                        "expires_after[anchor]": ["expires_after[seconds]"],
                        "expires_after[seconds]": ["expires_after[anchor]"],
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
"""The description of an upload in /openapi.json, as it is not JSON."""
