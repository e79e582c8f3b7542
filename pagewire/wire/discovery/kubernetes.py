"""The ready pods of Kubernetes services, from a watch of EndpointSlices at the API server.

`NAME[.NAMESPACE]:PORT` is a service, `LABEL=VALUE[&LABEL=VALUE]:PORT` all services in the pod's namespace with these
labels. PORT is the port of the pods, or its name in the service.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import httpx

from pagewire.errors import StartupError
from pagewire.wire.discovery.kubernetes_api import Api, Gone, Refused
from pagewire.wire.discovery.listed import Listed, changes, with_port

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 2.0
RENEWAL_S = 0.1  # between two watches
_SERVICE_LABEL = "kubernetes.io/service-name"


class Kubernetes:
    """The ready pods of some services."""

    def __init__(self, flag: str, addresses: Sequence[str], api: Api) -> None:
        """Raises StartupError."""
        self._api = api
        self._changed = asyncio.Event()
        self._services = [_Slices(api, self._changed, *_parse(flag, one, api.namespace)) for one in addresses]

    async def lists(self) -> AsyncIterator[Sequence[Listed]]:
        try:
            async for listed in changes(self._changed, self._list, [one.follow() for one in self._services]):
                yield listed
        finally:
            await self._api.close()

    def _list(self) -> list[Listed] | None:
        if not any(one.is_known for one in self._services):
            return None
        return list(dict.fromkeys(found for one in self._services for found in one.listed()))


class _Slices:
    """The EndpointSlices that a selector chooses."""

    def __init__(self, api: Api, changed: asyncio.Event, namespace: str, selector: str, port: str) -> None:
        """changed: is set when the list may have changed."""
        self._api = api
        self._changed = changed
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._namespace = namespace
        self._selector = selector
        self._port = port
        self._slices: dict[str, dict[str, Any]] = {}
        self.is_known = False

    def __str__(self) -> str:
        return f"{self._selector} in namespace {self._namespace}"

    def listed(self) -> list[Listed]:
        """Returns one address of each ready pod, sorted; IPv4 if the pod has both."""
        by_pod: dict[str, Listed] = {}
        ipv4_first = sorted(self._slices.values(), key=lambda one: (one["addressType"], one["metadata"]["name"]))
        for one in ipv4_first:
            port = self._port_of(one)
            if one["addressType"] not in ("IPv4", "IPv6") or port is None:
                continue
            service = one["metadata"].get("labels", {}).get(_SERVICE_LABEL, "")
            for endpoint in one.get("endpoints") or ():
                if (endpoint.get("conditions") or {}).get("ready") is False:
                    continue
                found = Listed(with_port(endpoint["addresses"][0], port), f"{service}.{self._namespace}.svc")
                by_pod.setdefault((endpoint.get("targetRef") or {}).get("uid") or found.address, found)
        return sorted(by_pod.values())

    def _port_of(self, one: dict[str, Any]) -> int | None:
        if self._port.isdecimal():
            return int(self._port)
        return next((port["port"] for port in one.get("ports") or () if port.get("name") == self._port), None)

    async def follow(self) -> None:
        """Follows the services until cancelled. While the server does not answer, the last list counts."""
        backoff, logged = FIRST_BACKOFF_S, ""
        while True:
            try:
                version = await self._list()
                if logged:
                    logger.info("Kubernetes lists %s again", self)
                backoff, logged = FIRST_BACKOFF_S, ""
                while True:
                    version = await self._watch(version)
                    await asyncio.sleep(RENEWAL_S)
            except Gone as gone:  # this process was away for long, or the server has lost its history
                logger.debug("%s is listed again: %s", self, gone)
            except (httpx.HTTPError, Refused, OSError, ValueError, KeyError) as error:
                reason = str(error) or type(error).__name__
                if not logged:
                    logger.warning("Kubernetes does not list %s (%s); its last pods stay in use", self, reason)
                logged = reason
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    async def _list(self) -> str:
        items, version = await self._api.list(self._path, self._selector)
        self._slices = {one["metadata"]["name"]: one for one in items}
        self.is_known = True
        self._changed.set()
        return version

    async def _watch(self, version: str) -> str:
        """Watches for changes, and returns the last resource version."""
        async with aclosing(self._api.watch(self._path, self._selector, version)) as events:
            async for kind, one in events:
                version = one["metadata"]["resourceVersion"]
                if kind == "BOOKMARK":
                    continue
                name = one["metadata"]["name"]
                if kind == "DELETED":
                    self._slices.pop(name, None)
                else:
                    self._slices[name] = one
                self._changed.set()
        return version


def _parse(flag: str, address: str, own_namespace: str) -> tuple[str, str, str]:
    """Returns namespace, label selector and port. Raises StartupError."""
    what, _, port = address.rpartition(":")
    if not what or not port or ":" in what or "/" in what:
        raise StartupError(
            f"{flag}: {address!r} is not a service of Kubernetes; write NAME:PORT, NAME.NAMESPACE:PORT or "
            "LABEL=VALUE:PORT"
        )
    if "=" in what:
        return own_namespace, ",".join(what.split("&")), port
    name, _, rest = what.partition(".")
    namespace = rest.partition(".")[0] or own_namespace  # also of NAME.NAMESPACE.svc
    return namespace, f"{_SERVICE_LABEL}={name}", port
