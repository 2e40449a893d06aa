"""The HTTP answerer over real loopback sockets."""

import asyncio
import json
import threading

import pytest

from metrics.server import Health, MetricsServer

OK = Health("ok", 7, 1.25)


def server(render=lambda: b"adastream_x 1\n", health=lambda: OK, **keywords):
    return MetricsServer(render, health, **keywords)


async def ask(port: int, raw: bytes, end: bool = False) -> bytes:
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        if end:
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer


async def get(port: int, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    head, _, body = (await ask(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


async def test_metrics_are_the_rendered_body_with_the_prometheus_content_type():
    async with server() as running:
        code, head, body = await get(running.port, "/metrics?x=1")
    assert code == 200
    assert "Content-Type: text/plain; version=0.0.4" in head
    assert body == b"adastream_x 1\n"


async def test_health_answers_200_only_when_ok():
    now = OK
    async with server(health=lambda: now) as running:
        code, _, body = await get(running.port, "/healthz")
        assert code == 200
        assert json.loads(body) == {"status": "ok", "version": 7, "seconds_since_step": 1.25}
        now = Health("starting", 0, None)
        code, _, body = await get(running.port, "/healthz")
        assert code == 503
        assert json.loads(body) == {"status": "starting", "version": 0, "seconds_since_step": None}
        now = Health("stalled", 3, 900.0)
        assert (await get(running.port, "/healthz"))[0] == 503


async def test_unknown_paths_and_methods_are_refused_by_name():
    async with server() as running:
        code, _, body = await get(running.port, "/metric")
        assert code == 404
        assert b"/metrics" in body
        code, head, _ = await get(running.port, "/metrics", "POST")
        assert code == 405
        assert "Allow: GET, HEAD" in head
        assert (await get(running.port, "/"))[0] == 200


async def test_head_has_the_length_and_no_body():
    async with server() as running:
        code, head, body = await get(running.port, "/metrics", "HEAD")
    assert (code, body) == (200, b"")
    assert "Content-Length: 14" in head


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/9\r\n\r\n", b"400"),
        (b"\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_garbage_is_answered_and_the_server_goes_on(raw, code):
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    async with server() as running:
        assert (await ask(running.port, raw)).split()[1] == code
        assert (await get(running.port, "/metrics"))[0] == 200
    assert faults == []


async def test_a_peer_that_leaves_half_way_is_no_fault():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    async with server() as running:
        assert await ask(running.port, b"GET /met", end=True) == b""
        assert (await get(running.port, "/metrics"))[0] == 200
    assert faults == []


async def test_a_silent_peer_is_dropped_at_the_deadline():
    async with server(request_deadline_s=0.05) as running:
        assert await ask(running.port, b"") == b""


async def test_closing_ends_open_connections_without_waiting_for_them():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
    async with asyncio.timeout(5):
        async with server() as running:
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(b"GET /")
            assert (await get(running.port, "/healthz"))[0] == 200
        assert await reader.read() == b""
        writer.close()
    assert faults == []


async def test_more_than_the_allowed_connections_are_turned_away():
    async with server() as running:
        held = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(64)]
        assert (await ask(running.port, b"")).split()[1] == b"503"
        held.pop()[1].close()
        for _, writer in held:
            writer.close()


async def test_rendering_leaves_the_event_loop_free():
    release = threading.Event()

    def slow_render() -> bytes:
        assert release.wait(10)
        return b"done\n"

    async with server(render=slow_render) as running, asyncio.TaskGroup() as tasks:
        metrics = tasks.create_task(get(running.port, "/metrics"))
        assert (await get(running.port, "/healthz"))[0] == 200
        release.set()
        assert (await metrics)[2] == b"done\n"


async def test_a_taken_port_is_named_with_its_remedy():
    async with server() as first:
        with pytest.raises(OSError, match=rf"127\.0\.0\.1:{first.port}.*server\.http_port"):
            async with server(port=first.port):
                pass


async def test_port_zero_gives_each_server_its_own_port():
    async with server() as first, server() as second:
        assert first.port != second.port
        assert first.url == f"http://127.0.0.1:{first.port}"
