"""The doctor's findings on a running stack."""

import http.server
import socket
import ssl
import threading
from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.tools.client_config import ChatConfig, tls_files
from pagewire.tools.doctor import live
from pagewire.tools.doctor.finding import Level
from pagewire.wire.tls import Files
from tests.makers.certificates import Authority

_QUIET = """\
# TYPE pagewire:num_requests_running gauge
pagewire:num_requests_running 4
pagewire:num_requests_waiting {waiting}
pagewire:num_preemptions_total {preemptions}
pagewire:kv_cache_usage_perc{{address="a"}} {usage}
pagewire:kv_cache_usage_perc{{address="b"}} 0.1
pagewire:prefix_cache_queries_total {queries}
pagewire:prefix_cache_hits_total {hits}
pagewire:request_queue_time_seconds_sum {queue}
pagewire:request_queue_time_seconds_count {ended}
pagewire:request_inference_time_seconds_sum {inference}
pagewire:request_inference_time_seconds_count {ended}
pagewire:steps_total {steps}
pagewire:late_steps_total {late}
pagewire:tokenizer_pool_workers 2
pagewire:tokenizer_pool_busy_seconds_total {busy}
pagewire:tokenizer_pool_wait_seconds_sum {waited}
pagewire:tokenizer_pool_wait_seconds_count {ended}
pagewire:requests_refused_total{{reason="queue_full"}} {refused}
pagewire:recoveries_total {recoveries}
"""
_NAMES = "waiting preemptions usage queries hits queue ended inference steps late busy waited refused recoveries"
_START = dict.fromkeys(_NAMES.split(), 0)
_BUSY = _START | {"ended": 10, "inference": 20, "queue": 1, "steps": 1000, "queries": 50_000, "hits": 40_000}


def _change(**values: float) -> live.Change:
    first, last = _QUIET.format(**_START), _QUIET.format(**(_BUSY | values))
    return live.Change(live.parse(first, 0.0), live.parse(last, 10.0))


def _found(change: live.Change) -> dict[str, Level]:
    findings = [check(change) for check in live._CHECKS]
    assert all(f.remedy for f in findings if f.level > Level.OK)
    return {f.check: f.level for f in findings if f.level > Level.OK}


def test_a_stack_that_keeps_up_has_no_findings() -> None:
    assert _found(_change()) == {}


@pytest.mark.parametrize(
    "check, values",
    [
        ("preemptions", {"preemptions": 20}),
        ("KV cache", {"usage": 0.97}),
        ("prefix cache", {"hits": 100}),
        ("queue", {"waiting": 50}),
        ("waiting", {"queue": 100}),
        ("late steps", {"late": 300}),
        ("tokenizer pool", {"busy": 19.5}),
        ("tokenizer pool", {"waited": 5}),
        ("refused", {"refused": 3}),
        ("recoveries", {"recoveries": 1}),
    ],
)
def test_each_fault_has_its_finding(check, values) -> None:
    assert list(_found(_change(**values))) == [check]


@pytest.mark.parametrize(
    "roles, level, said",
    [
        (["prefill", "decode"], Level.OK, "executor-0 prefill, executor-1 decode"),
        (["both", "decode"], Level.OK, "executor-0 both, executor-1 decode"),
        (["prefill", "prefill"], Level.WARNING, "start one with --role decode"),
        (["decode"], Level.WARNING, "start one with --role prefill"),
        (["both", "both"], None, ""),
    ],
)
def test_roles_are_shown(roles: list[str], level: Level | None, said: str) -> None:
    replicas: list[object] = [{"name": f"executor-{i}", "role": role, "attached": True} for i, role in enumerate(roles)]
    found = list(live._roles({"replicas": [*replicas, {"name": "executor-9", "role": "", "attached": False}]}))
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(said in f"{finding.found} {finding.remedy}" for finding in found)


@pytest.mark.parametrize("url", ["nonsense", "", "127.0.0.1:8000", "http://[::1", "file:///etc", "http://:x"])
def test_what_is_no_address_is_said_so(url: str) -> None:
    with pytest.raises(StartupError, match=r"--url: .*http://127.0.0.1:8000"):
        live.scrape(url, None)


@pytest.mark.parametrize(
    "answer, reason",
    [
        (b"\0\0\x12\4\0\0\0\0\0\0\3\x7f\xff\xff\xff\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>{</html>", "has no metrics"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe", "has no metrics|codec"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "give the gateway's REST address"),
    ],
)
def test_what_is_no_gateway_is_said_so(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StartupError, match=reason):
            live.scrape(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        thread.join()


def test_a_gateway_with_tls_and_a_key(tmp_path: Path) -> None:
    """The CA is that of the flags; without the key, the remedy names the variable before the flag."""
    issued = Authority(tmp_path).issue("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certfile, issued.keyfile)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer secret" else 401)
            self.end_headers()
            self.wfile.write(b"pagewire:steps_total 3\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"https://localhost:{server.server_port}"
        files = Files(ca_certs=str(issued.ca_certs))
        assert live.scrape(url, "secret", files).of("pagewire:steps_total") == 3
        with pytest.raises(StartupError, match="set PAGEWIRE_API_KEY to its key"):
            live.scrape(url, None, files)
        with pytest.raises(StartupError, match="its CA is not trusted here: set --ssl-ca-certs"):
            live.scrape(url, "secret")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_tls_files_of_a_client_come_from_flags_then_from_the_environment() -> None:
    environ = {"PAGEWIRE_SSL_CA_CERTS": "ca.pem", "PAGEWIRE_SSL_CERTFILE": "env.pem"}
    found = tls_files(ChatConfig(ssl_certfile="flag.pem"), environ)
    assert found == Files(certfile="flag.pem", ca_certs="ca.pem")
