"""The base of every JSON object that the server answers with, and the shape of errors.

A `Body` is encoded by encoding.py and documented by openapi.py. To add an answer, declare a subclass and name it in the
return annotation of an endpoint.

Answers are msgspec's, requests pydantic's: an answer is encoded for each token, while a request is read once and is
refused by name, with every violation of the parameter at fault. msgspec reports the first violation only, and does not
distinguish [1, 2] from ["a", "b"] in a union.

A field that may be UNSET is left out of the JSON where it is; all others are always present, None as null.
"""

from msgspec import Struct


# No value refers back to one that holds it, so the garbage collector need not follow them.
class Body(Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object. Field order is the order of the members."""


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Body):
    """The shape of every error."""

    error: ErrorDetail
