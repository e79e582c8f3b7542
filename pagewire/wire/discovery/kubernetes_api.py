"""The part of Kubernetes' API that follows a list of objects, over HTTPS with the pod's service account."""

import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from pagewire.errors import StartupError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A watch is renewed after this time, so that a dead connection is noticed.
WATCH_S = 30


class Gone(Exception):
    """The server no longer knows the changes after this resource version (410); read the list again."""


class Refused(Exception):
    """The server answered with an error."""


class Api:
    """The API server."""

    def __init__(self, url: str, account: Path, watch_seconds: int = WATCH_S) -> None:
        """account: directory with token, ca.crt and namespace. Raises StartupError."""
        self._account = account
        self._watch_seconds = watch_seconds
        try:
            self.namespace = (account / "namespace").read_text().strip()
            context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            (account / "token").read_text()
        except OSError as error:
            raise StartupError(
                f"the service account of the pod cannot be read ({error}); Kubernetes mounts it unless "
                "automountServiceAccountToken is false"
            ) from error
        timeout = httpx.Timeout(5.0, read=watch_seconds + 5.0)
        self._client = httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=timeout)

    @classmethod
    def of_pod(cls, flag: str) -> "Api":
        """Returns the API server of this pod. Raises StartupError outside of a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise StartupError(
                f"{flag} needs Kubernetes, but this process is not in a pod: KUBERNETES_SERVICE_HOST is not set"
            )
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{port}", ACCOUNT)

    async def list(self, path: str, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Returns all objects with these labels, and the version of the list.

        Raises Refused, Gone and httpx.HTTPError.
        """
        async with self._get(path, {"labelSelector": selector}) as response:
            found = json.loads(await response.aread())
        return found["items"], found["metadata"]["resourceVersion"]

    async def watch(self, path: str, selector: str, version: str) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields the changes after this version: ADDED, MODIFIED, DELETED or BOOKMARK with the object.

        It ends from time to time. Raises the errors of `list`.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(self._watch_seconds)}
        query |= {"labelSelector": selector, "resourceVersion": version}
        async with self._get(path, query) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 500), event["object"].get("message", ""))
                yield event["type"], event["object"]

    @asynccontextmanager
    async def _get(self, path: str, query: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        token = (self._account / "token").read_text().strip()  # it is renewed every hour
        request = self._client.stream("GET", path, params=query, headers={"Authorization": f"Bearer {token}"})
        async with request as response:
            if response.status_code != httpx.codes.OK:
                raise _error(response.status_code, (await response.aread()).decode(errors="replace"))
            yield response

    async def close(self) -> None:
        await self._client.aclose()


def _error(code: int, message: str) -> Exception:
    if code == httpx.codes.GONE:
        return Gone(message)
    try:
        message = json.loads(message)["message"]  # of a Status
    except (ValueError, KeyError, TypeError):
        pass
    hint = ""
    if code == httpx.codes.FORBIDDEN:
        hint = "; give its service account a role that may list and watch endpointslices of discovery.k8s.io"
    return Refused(f"{code}: {message}{hint}")
