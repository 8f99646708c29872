"""Small HTTP servers in threads of this process."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Replies, and logs nothing."""

    def reply(self, status, content=b"", headers=(), *, missing=0):
        """`missing` more bytes are announced than sent; a HEAD request gets none."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content) + missing), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    """The address of a server that lives as long as the block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
