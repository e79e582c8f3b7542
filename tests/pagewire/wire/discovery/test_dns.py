"""Services that are found by name, over resolvers that say something else each time, or nothing."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from pagewire.errors import StartupError
from pagewire.wire.discovery import discover
from pagewire.wire.discovery.dns import Dns, resolve
from tests.pagewire.wire.discovery.following import followed


class Resolver:
    """Answers from a table. A name that is not in it does not resolve."""

    def __init__(self, **hosts: str) -> None:
        """hosts: addresses by name, separated by spaces."""
        self.hosts = hosts
        self.num_asked = 0
        self.slow: set[str] = set()

    async def __call__(self, host: str) -> Sequence[str]:
        self.num_asked += 1
        if host in self.slow:
            await asyncio.sleep(600)
        if host not in self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.hosts[host].split()

    async def until_asked_again(self) -> None:
        async with asyncio.timeout(10):
            before = self.num_asked
            while self.num_asked < before + 3:  # noqa: ASYNC110 - the state of the other side
                await asyncio.sleep(0.002)


def found_by(resolver: Resolver, *addresses: str) -> Dns:
    return Dns("--executor-address", addresses, resolver, interval=0.01)


async def test_each_address_of_a_name_is_a_service_as_they_come_and_go() -> None:
    resolver = Resolver(executor="10.0.0.1")
    async with followed(found_by(resolver, "executor:50053")) as seen:
        await seen.until("10.0.0.1:50053")
        resolver.hosts["executor"] = "10.0.0.2 10.0.0.1 fd00::7"
        await seen.until("10.0.0.1:50053", "10.0.0.2:50053", "[fd00::7]:50053")
        resolver.hosts["executor"] = "fd00::7 10.0.0.2"
        await seen.until("10.0.0.2:50053", "[fd00::7]:50053")
        assert {one.host for one in seen.lists[-1]} == {"executor"}, "the name on their certificates"


async def test_an_answer_in_another_order_is_no_other_list() -> None:
    resolver = Resolver(executor="10.0.0.1 10.0.0.2")
    async with followed(found_by(resolver, "executor:50053")) as seen:
        await seen.until("10.0.0.1:50053", "10.0.0.2:50053")
        resolver.hosts["executor"] = "10.0.0.2 10.0.0.1"
        await resolver.until_asked_again()
        assert len(seen.lists) == 1


@pytest.mark.parametrize("answer", [None, ""])
async def test_what_was_known_last_stays_while_a_name_does_not_resolve(
    answer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver(executor="10.0.0.1")
    async with followed(found_by(resolver, "executor:50053")) as seen:
        await seen.until("10.0.0.1:50053")
        if answer is None:
            del resolver.hosts["executor"]
        else:
            resolver.hosts["executor"] = answer
        await resolver.until_asked_again()
        assert len(seen.lists) == 1
        assert caplog.text.count("executor does not resolve") == 1, "said once"
        assert "stay in use" in caplog.text
        resolver.hosts["executor"] = "10.0.0.2"
        await seen.until("10.0.0.2:50053")


async def test_a_name_that_does_not_resolve_or_takes_long_keeps_no_other_out(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver(good="10.0.0.1", slow="10.0.0.9")
    resolver.slow.add("slow")
    async with followed(found_by(resolver, "bad:1", "slow:1", "good:1", "unix:/e.sock", "10.1.1.1:1")) as seen:
        await seen.until("10.0.0.1:1", "unix:/e.sock", "10.1.1.1:1")
        assert caplog.text.count("bad does not resolve") == 1
        resolver.hosts["bad"] = "10.0.0.3"
        await seen.until("10.0.0.3:1", "10.0.0.1:1", "unix:/e.sock", "10.1.1.1:1")


async def test_a_service_with_two_names_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    resolver = Resolver(one="10.0.0.1", other="10.0.0.1 10.0.0.2")
    async with followed(found_by(resolver, "one:1", "other:1")) as seen:
        await seen.until("10.0.0.1:1", "10.0.0.2:1")
        await resolver.until_asked_again()
        assert caplog.text.count("10.0.0.1:1 has two names") == 1


async def test_the_system_resolves() -> None:
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(OSError):
        await resolve("no-such-host.invalid")


@pytest.mark.parametrize("address", ["executor", "executor:", "executor:x", "executor:70000", "a:1,,b:1", "a:1,a:1"])
def test_addresses_are_names_with_ports(address: str) -> None:
    with pytest.raises(StartupError, match="--executor-address"):
        discover("dns", "--executor-address", address)
