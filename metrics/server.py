"""HTTP for people and scrapers: `/healthz` and `/metrics`, GET and HEAD only.

A hand-written HTTP/1.1 answerer on asyncio streams: two fixed pages without bodies to read need no routing, no
keep-alive and no framework, and the engine keeps a dependency less. What a framework would guard is bounded here:
header bytes, connections, and the seconds one connection may take.

Invariants: every connection is answered once and closed; garbage gets a 4xx or nothing, never an exception in the
engine's loop; /metrics is rendered in a thread, one rendering at a time; construction does no I/O.
Consumes: requests. Waits for: a request head. Unblocked by: bytes, end of stream, the deadline. Ends when: closed.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 64
_REQUEST_DEADLINE_S = 10.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_INDEX = "/healthz  state of the run (JSON)\n/metrics  Prometheus text\n"


@dataclass(frozen=True, slots=True)
class Health:
    """What /healthz says."""

    status: Literal["ok", "starting", "stalled"]
    """`ok` answers 200, the others 503."""
    version: int
    """Published policy version."""
    seconds_since_step: float | None
    """Since the last optimizer step; None before the first."""


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    content_type: str
    body: bytes


class MetricsServer:
    """Serves one engine's health and metrics while the context is open.

    Args:
        render: body of /metrics; runs in a thread.
        health: called in the loop, must be cheap.
        host: interface to bind.
        port: 0 = any free port; the bound one is `port` once the context is open.
        request_deadline_s: longest life of one connection.
    """

    def __init__(
        self,
        render: Callable[[], bytes],
        health: Callable[[], Health],
        host: str = "127.0.0.1",
        port: int = 0,
        request_deadline_s: float = _REQUEST_DEADLINE_S,
    ) -> None:
        self.port = port
        self._render = render
        self._health = health
        self._host = host
        self._deadline_s = request_deadline_s
        self._rendering = asyncio.Lock()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """`http://host:port` of the open server."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    async def __aenter__(self) -> Self:
        """Bind and serve.

        Raises:
            OSError: the address cannot be bound; the text names host, port and the remedy.
        """
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self.port, limit=_MAX_HEAD_BYTES)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            text = (
                f"cannot serve metrics on {self._host}:{self.port}: {reason}; set server.http_port to a free port or 0"
            )
            raise OSError(exc.errno, text) from exc
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and end open connections."""
        if self._server is not None:
            self._server.close()
            # Ended by their transports, not cancelled: asyncio.streams of Python 3.11 reports a cancelled connection
            # as an error of the loop.
            for writer in self._connections.values():
                writer.transport.abort()
            if self._connections:
                await asyncio.wait(self._connections, timeout=self._deadline_s)
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_server runs each connection in a task"
        crowded = len(self._connections) >= _MAX_CONNECTIONS
        self._connections[task] = writer
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._answer_one(reader, writer, crowded)
        except TimeoutError:
            writer.transport.abort()  # close would wait for a peer that does not read
        except (ConnectionError, asyncio.IncompleteReadError) as exc:
            log.debug("a peer left before its answer: %s", exc)
        finally:
            del self._connections[task]
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, crowded: bool) -> None:
        method = "GET"
        if crowded:
            answer = _text(503, "too many connections\n")
        else:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                answer = _text(431, f"a request head has at most {_MAX_HEAD_BYTES} bytes\n")
            else:
                method, target = _parse(head)
                answer = await self._page(method, target)
        body = b"" if method == "HEAD" else answer.body
        writer.write(_head(answer) + body)
        await writer.drain()

    async def _page(self, method: str, target: str) -> _Answer:
        if not method:
            return _text(400, "not an HTTP request\n")
        if method not in ("GET", "HEAD"):
            return _text(405, "only GET and HEAD\n")
        path = target.partition("?")[0]
        if path == "/metrics":
            async with self._rendering:
                return _Answer(200, _METRICS_TYPE, await asyncio.to_thread(self._render))
        if path == "/healthz":
            return _health_page(self._health())
        if path == "/":
            return _text(200, _INDEX)
        return _text(404, _INDEX)


def _parse(head: bytes) -> tuple[str, str]:
    """Method and target of a request head; two empty strings when it is none."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    is_request = len(words) == 3 and words[0].isalpha() and words[1].startswith("/") and words[2].startswith("HTTP/1.")
    return (words[0], words[1]) if is_request else ("", "")


def _health_page(health: Health) -> _Answer:
    since = health.seconds_since_step
    fields = {
        "status": health.status,
        "version": health.version,
        "seconds_since_step": None if since is None else round(since, 3),
    }
    return _Answer(200 if health.status == "ok" else 503, "application/json", json.dumps(fields).encode() + b"\n")


def _text(code: int, body: str) -> _Answer:
    return _Answer(code, "text/plain; charset=utf-8", body.encode())


def _head(answer: _Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.code} {_REASONS[answer.code]}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if answer.code == 405:
        lines.append("Allow: GET, HEAD")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
