"""uvicorn's HTTP/1.1, with a bound on what is kept of a request before the application sees it.

The parser takes heads, and trailers of a body in chunks, of any size, and tells of them once they are complete: without the bound
a client could have this process keep as much as it sends.
"""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

UNTOLD_BYTES_MAX: Final = 64 << 10  # the guard's limits are lower, and said in the service's own words
_REFUSAL: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection (431, where an answer can be given) that sends more than UNTOLD_BYTES_MAX, and what is read at a time,
    without completing a head, a body or a part of a body."""

    _untold = 0

    def data_received(self, data: bytes) -> None:
        self._untold += len(data)
        super().data_received(data)
        if self._untold > UNTOLD_BYTES_MAX and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._untold = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._untold = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._untold = 0
        super().on_body(body)
