"""A local web server that can simulate failures of real servers."""

import ssl
import subprocess
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves `contents` by name, and records (name, Range) of every request."""

    def __init__(self, contents):
        self.contents = dict(contents)
        self.requests = []
        self.ranges = True  # whether it supports range requests
        self.cut_after = None  # bytes of a response after which the connection is closed
        self.stall_after = None  # bytes of a response after which no data is sent
        self.drip = None  # bytes of a response after which the rest is sent one byte at a time
        self.kind = None  # the type of all contents
        self.redirect = None  # the address to which all requests are redirected
        self.address = ""
        self.closing = threading.Event()

    def respond(self, handler):
        name, wanted = handler.path.removeprefix("/"), handler.headers.get("Range")
        self.requests.append((name, wanted))
        if self.redirect is not None:
            handler.send_response(302)
            handler.send_header("Location", self.redirect + name)
            handler.end_headers()
            return
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
        if self.kind is not None:
            handler.send_header("Content-Type", self.kind)
        handler.send_header("Content-Length", str(len(data) - first))
        handler.end_headers()
        bounds = (self.cut_after, self.stall_after, self.drip)
        end = next((first + count for count in bounds if count is not None), len(data))
        handler.wfile.write(data[first:end])
        handler.wfile.flush()
        if self.drip is not None:
            with suppress(OSError):  # the client has closed the connection
                for at in range(end, len(data)):
                    handler.wfile.write(data[at : at + 1])
                    handler.wfile.flush()
                    if self.closing.wait(0.02):
                        break
        if self.stall_after is not None:
            self.closing.wait(20)


def certificate(folder):
    """Make a key and a certificate for 127.0.0.1 with the program openssl, and return their file."""
    file = folder / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", str(folder / "certificate.pem")]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + (folder / "certificate.pem").read_text())
    return file


@contextmanager
def serving(contents, certified=None):
    """Serve `contents`; over TLS if `certified` is a file with a key and a certificate."""
    server = Server(contents)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.respond(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certified is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certified)
        http.socket = context.wrap_socket(http.socket, server_side=True)
        http.handle_error = lambda request, address: None  # clients that do not trust the certificate
    server.address = f"http{'s' if certified else ''}://127.0.0.1:{http.server_address[1]}/"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        http.shutdown()
        http.server_close()
        thread.join()
