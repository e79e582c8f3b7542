import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import health, rpc

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


async def exit_status(*arguments: str) -> int:
    return await asyncio.to_thread(health.main, list(arguments))


async def test_grpc_service_is_healthy_while_it_serves(tmp_path, capsys):
    address = f"unix:{tmp_path}/scheduler.sock"
    server = rpc.Server([address])
    server.add(
        scheduler_pb2_grpc.SchedulerServiceServicer(),
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
        SERVICE,
    )
    await server.start()
    try:
        assert await exit_status(address) == 0, "the process is alive"
        assert await exit_status(address, SERVICE) == 1
        assert f"{SERVICE} is NOT_SERVING" in capsys.readouterr().err
        await server.set_serving(True)
        assert await exit_status(address, SERVICE) == 0
        assert await exit_status(address, "pagewire.v1.Misspelt") == 1
        assert "NOT_FOUND" in capsys.readouterr().err
    finally:
        await server.stop()
    assert await exit_status(address, SERVICE) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
async def test_url_is_healthy_when_it_answers_with_success(status, expected):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/readyz"
    try:
        assert await exit_status(url) == expected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert await exit_status(url) == 1


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_usage_exits_with_two(arguments, capsys):
    assert health.main(arguments) == 2
    assert "usage:" in capsys.readouterr().err
