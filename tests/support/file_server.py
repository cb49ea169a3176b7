"""A local web server that can simulate failures of real servers."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves `contents` by name, and records (name, Range) of every request."""

    def __init__(self, contents):
        self.contents = dict(contents)
        self.requests = []
        self.ranges = True  # whether it supports range requests
        self.cut_after = None  # bytes of a response after which the connection is closed
        self.stall_after = None  # bytes of a response after which no data is sent
        self.address = ""
        self.closing = threading.Event()

    def respond(self, handler):
        name, wanted = handler.path.removeprefix("/"), handler.headers.get("Range")
        self.requests.append((name, wanted))
        if name not in self.contents:
            handler.send_error(404)
            return
        data, first = self.contents[name], int(wanted[6:-1]) if wanted and self.ranges else 0
        if first and first >= len(data):
            handler.send_error(416)
            return
        handler.send_response(206 if first else 200)
        if first:
            handler.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - first))
        handler.end_headers()
        end = next((first + count for count in (self.cut_after, self.stall_after) if count is not None), len(data))
        handler.wfile.write(data[first:end])
        handler.wfile.flush()
        if self.stall_after is not None:
            self.closing.wait(20)


@contextmanager
def serving(contents):
    server = Server(contents)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.respond(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.address = f"http://127.0.0.1:{http.server_address[1]}/"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        http.shutdown()
        http.server_close()
        thread.join()
