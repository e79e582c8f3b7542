"""The route of accounts of requests."""

import asyncio
import re
from itertools import chain

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.answering import GENERATIONS
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.explain.bodies import Explanation
from pagewire.gateway.operation.explain.report import explain
from pagewire.gateway.operation.siblings import SIBLINGS
from pagewire.v1.admin_pb2 import ExplainRequestRequest
from pagewire.wire import tenants
from pagewire.wire.admin import accounts_behind

router = APIRouter(route_class=JsonRoute, tags=["operation"])

# Prefixes of the ids of answers.
_PREFIX = re.compile(r"(chatcmpl-|cmpl-|msg_|resp_)")


@router.get("/v1/requests/{request_id}/explain", responses={200: openapi.response(Explanation)})
async def explain_request(request: Request, request_id: str) -> Response:
    """Explains where the time of a running or recent generation goes, by the id of its answer or by X-Request-Id; as
    text if the header Accept has text/plain. With an admin key or without tenants, also those of others."""
    name, tenant = _PREFIX.sub("", request_id, count=1), tenants.caller_scope()
    wanted = ExplainRequestRequest(request_id=name, tenant=tenant)
    behind = await asyncio.gather(*(accounts_behind(one, wanted) for one in MODELS.of(request).neighbours()))
    # Last, so that the gateway's time of a running request is not less than theirs.
    own = GENERATIONS.of(request).accounts.find(name, tenant) or await SIBLINGS.of(request).accounts(wanted)
    accounts = [*own, *chain.from_iterable(behind)]
    explanation = explain(name, accounts)
    if explanation is None:
        message = (
            f"no service has an account of generation {request_id!r}: it is not among the last thousand, or the"
            " services have restarted"
        )
        raise ApiError(404, message, code="request_not_found")
    if "text/plain" in request.headers.get("accept", ""):
        return PlainTextResponse(explanation.text)
    return json_response(explanation)
