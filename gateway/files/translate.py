"""The fields of an upload as an `UploadForm`."""

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.files.bodies import UploadForm


def upload_form(fields: Mapping[str, str]) -> UploadForm:
    """Returns the form of these fields. `expires_after[seconds]` is a member of `expires_after`.

    Raises RequestValidationError, and ApiError 400.
    """
    nested: dict[str, object] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and outer == "expires_after" and inner.endswith("]"):
            members = nested.setdefault(outer, {})
            if not isinstance(members, dict):
                raise ApiError(400, f"{outer} and {name} exclude each other; send {name} alone", param=name)
            members[inner[:-1]] = value
        else:
            nested[name] = value
    try:
        form = UploadForm.model_validate(nested)
    except ValidationError as error:
        located = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(located, body=nested) from None
    if form.purpose != "batch":
        message = f"purpose: {form.purpose!r} is not supported; send `batch`"
        raise ApiError(400, message, param="purpose")
    return form
