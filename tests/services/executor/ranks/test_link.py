"""The handshake between ranks and their leader, over all kinds of sockets."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.ranks import link as links
from pagewire.services.executor.ranks.formation import secret_of
from pagewire.services.executor.ranks.link import Link, Refused
from pagewire.services.executor.ranks.tls_link import followers_link, leaders_link
from pagewire.v1.rank_link_pb2 import RankChallenge, RankCommand, RankReport, RankWelcome
from tests.e2e.line import free_port
from tests.makers.certificates import Authority

FLAGS = {"--dtype": "float32", "--block-size": "16"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> dict[str, Any]:
    return dict(authority.issue("ranks").flags)


@pytest.fixture(params=["unix", "tcp", "tls"])
def config(request: pytest.FixtureRequest) -> Iterator[ExecutorConfig]:
    """Returns the links of all ranks."""
    if request.param == "unix":
        with tempfile.TemporaryDirectory(prefix="pw-") as directory:
            yield ExecutorConfig(leader=f"unix:{directory}/leader.sock")
        return
    tls = request.getfixturevalue("tls") if request.param == "tls" else {}
    yield ExecutorConfig(leader=f"127.0.0.1:{free_port()}", **tls)


@contextmanager
def connected(leaders: ExecutorConfig, followers: ExecutorConfig) -> Iterator[tuple[Link, Link]]:
    """The leader's end and the follower's. Raises what the follower raises."""
    with links.listen(leaders.leader) as listening, ThreadPoolExecutor(1) as pool:
        secured = partial(followers_link, followers)
        connecting = pool.submit(links.connect, followers.leader, threading.Event(), secured)
        sock, _ = listening.accept()
        sock.settimeout(10)
        try:
            leader = leaders_link(leaders, sock)
        except OSError:
            sock.close()
            connecting.result()
            raise
        follower = connecting.result()
    yield leader, follower
    leader.close()
    follower.close()


@pytest.fixture
def ends(config: ExecutorConfig) -> Iterator[tuple[Link, Link]]:
    with connected(config, config) as ends:
        yield ends


def join(
    ends: tuple[Link, Link], *, rank: int = 1, secret: str = "right", flags: dict[str, str] = FLAGS
) -> tuple[RankWelcome, int | None]:
    leader, follower = ends
    with ThreadPoolExecutor(1) as pool:
        introducing = pool.submit(links.introduce, follower, secret, rank, flags)
        try:
            hello = links.let_in(leader, "right", FLAGS, 3)
        except Refused as refusal:
            links.refuse(leader, str(refusal))
        else:
            assert hello.rank == rank and hello.pid == os.getpid()
            links.welcome(leader, "right", hello, "host:1", None)
        return introducing.result()


def test_a_rank_with_the_secret_joins(ends: tuple[Link, Link]) -> None:
    welcome, descriptor = join(ends)
    assert welcome.store == "host:1" and descriptor is None


@pytest.mark.parametrize(
    ("rank", "secret", "flags", "message"),
    [
        (1, "wrong", FLAGS, "another --group-secret"),
        (3, "right", FLAGS, "--rank 3 is not within 1 to 2"),
        (0, "right", FLAGS, "--rank 0 is not within 1 to 2"),
        (2, "right", FLAGS | {"--dtype": "auto"}, r"--dtype auto \(the leader's: float32\)"),
        (2, "right", FLAGS | {"--new": "1"}, r"--new 1 \(the leader's: None\)"),
    ],
)
def test_a_rank_that_does_not_fit_receives_the_reason(
    ends: tuple[Link, Link], rank: int, secret: str, flags: dict[str, str], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        join(ends, rank=rank, secret=secret, flags=flags)


def test_a_leader_that_does_not_know_the_secret_is_not_followed(ends: tuple[Link, Link]) -> None:
    leader, follower = ends
    with ThreadPoolExecutor(1) as pool:
        introducing = pool.submit(links.introduce, follower, "mine", 1, FLAGS)
        with pytest.raises(Refused):
            links.let_in(leader, "yours", FLAGS, 3)
        leader.send(RankWelcome(proof=b"forged"))
        with pytest.raises(StartupError, match="the process that listens at --leader has another --group-secret"):
            introducing.result()


def test_frames_arrive_whole_and_in_order(ends: tuple[Link, Link]) -> None:
    leader, follower = ends
    reasons = ["", "a", "b" * 3_000_000]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [*map(follower.send, (RankReport(failed=reason) for reason in reasons))])
        assert [leader.receive(RankReport).failed for _ in reasons] == reasons
        sending.result()
    assert not leader.has_something(0)
    follower.close()
    assert leader.has_gone(5) and leader.has_something(5)
    with pytest.raises(EOFError):
        leader.receive(RankReport)


def test_a_link_sends_while_it_waits_to_receive(ends: tuple[Link, Link]) -> None:
    """The leader's device thread sends steps while another one waits for signs of life."""
    leader, follower = ends
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(leader.receive, RankReport), pool.submit(follower.receive, RankCommand)
        leader.send(RankCommand(reset=True))
        assert waiting[1].result(10).reset
        follower.send(RankReport(alive=True))
        assert waiting[0].result(10).alive
    leader.send(RankCommand(reset=True))
    leader.send(RankCommand(end=True))
    assert follower.receive(RankCommand).reset
    assert follower.has_something(10) and follower.receive(RankCommand).end


def test_a_rank_without_a_certificate_of_the_ca_is_refused(tls: dict[str, Any], tmp_path: Path) -> None:
    """A client of TLS 1.3 learns only from its first message that it was refused."""
    leaders = ExecutorConfig(leader=f"127.0.0.1:{free_port()}", **tls)
    other: dict[str, Any] = Authority(tmp_path, "other").issue("stranger").flags
    followers = replace(leaders, **other | {"ssl_ca_certs": tls["ssl_ca_certs"]})
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"), connected(leaders, followers):
        pass


def test_a_rank_that_expects_tls_of_a_leader_without_it_is_refused(tls: dict[str, Any]) -> None:
    leaders = ExecutorConfig(leader=f"127.0.0.1:{free_port()}")
    with links.listen(leaders.leader) as listening, ThreadPoolExecutor(1) as pool:
        secured = partial(followers_link, replace(leaders, **tls))
        connecting = pool.submit(links.connect, leaders.leader, threading.Event(), secured)
        sock, _ = listening.accept()
        Link(sock).send(RankChallenge(nonce=b"n"))
        with pytest.raises(StartupError, match="it does not use TLS"):
            connecting.result(10)
        sock.close()


def test_the_leader_has_to_be_the_host_of_the_address(authority: Authority) -> None:
    elsewhere: dict[str, Any] = authority.issue("elsewhere", "DNS:example.org").flags
    leaders = ExecutorConfig(leader=f"127.0.0.1:{free_port()}", **elsewhere)
    with (
        pytest.raises(StartupError, match="its certificate has expired, or its CA is not trusted"),
        connected(leaders, leaders),
    ):
        pass


def test_over_tcp_something_has_to_be_proved(tls: dict[str, Any]) -> None:
    config = ExecutorConfig(leader="10.0.0.1:50060")
    with pytest.raises(StartupError, match=r"--group-secret .* or certificates"):
        secret_of(config)
    assert secret_of(replace(config, **tls)) == ""
    assert secret_of(replace(config, leader="unix:/leader.sock")) == ""


def test_what_is_no_frame_ends_the_link(ends: tuple[Link, Link]) -> None:
    leader, follower = ends
    follower.send_frame(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(EOFError, match="not a rank of Pagewire"):
        leader.receive(RankReport)


def test_a_file_is_handed_over(tmp_path: Path) -> None:
    ours, theirs = map(Link, socket.socketpair())
    path = tmp_path / "memory"
    path.write_bytes(b"shared")
    with path.open("rb") as file:
        ours.send(RankCommand(reset=True), file.fileno())
    command, descriptor = theirs.receive_with_descriptor(RankCommand)
    assert command.reset and descriptor is not None
    with os.fdopen(descriptor, "rb") as file:
        assert file.read() == b"shared"
    ours.close()
    theirs.close()


@pytest.mark.parametrize("wrong", ["host", "host:port", "1234"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(StartupError, match="expected host:port or unix:/path"):
        links.connect(wrong, threading.Event())
    with pytest.raises(StartupError, match="expected host:port or unix:/path"):
        links.listen(wrong)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"--leader {address}: cannot listen there"):
            links.listen(address)


def test_waiting_for_a_leader_can_be_given_up() -> None:
    gives_up = threading.Event()
    gives_up.set()
    with pytest.raises(StartupError, match="stopped before the leader was found"):
        links.connect("127.0.0.1:9", gives_up)
