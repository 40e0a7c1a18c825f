"""A client that costs next to nothing, so that what is measured is the service: ready bytes on plain sockets, kept open.

An answer is read to its end by its Content-Length, and its status is compared; its text isn't parsed.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from collections.abc import Sequence

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Line:
    """One connection. A request is sent when the answer to the one before is there."""

    def __init__(self, port: int, status: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expected = f"HTTP/1.1 {status} ".encode()
        self._got = b""

    def send(self, message: bytes) -> None:
        self._got = b""
        self.socket.sendall(message)

    def answered(self) -> bool:
        """Reads what is there; whether that completes the answer."""
        more = self.socket.recv(1 << 18)
        assert more, "the service closed the connection"
        self._got += more
        head, found, body = self._got.partition(_HEAD_END)
        length = _LENGTH.search(head + b"\r\n")
        if not found or length is None or len(body) < int(length[1]):
            return False
        assert head.startswith(self._expected), self._got
        return True


def one_by_one(port: int, messages: Sequence[bytes], status: int) -> list[float]:
    """Seconds that each answer took, on one connection."""
    line, took = Line(port, status), []
    for message in messages:
        began = time.perf_counter()
        line.send(message)
        while not line.answered():
            pass
        took.append(time.perf_counter() - began)
    line.socket.close()
    return took


def at_once(port: int, messages: Sequence[bytes], connections: int, status: int) -> float:
    """Answers a second, with a request under way on every connection all the time."""
    waiting = list(reversed(messages))
    open_lines = selectors.DefaultSelector()
    for line in [Line(port, status) for _ in range(connections)]:
        open_lines.register(line.socket, selectors.EVENT_READ, line)
    began = time.perf_counter()
    for key in list(open_lines.get_map().values()):
        key.data.send(waiting.pop())
    left = len(messages)
    while left:
        for key, _ in open_lines.select():
            line = key.data
            if line.answered():
                left -= 1
                if waiting:
                    line.send(waiting.pop())
    took = time.perf_counter() - began
    for key in list(open_lines.get_map().values()):
        key.data.socket.close()
    return len(messages) / took
