"""A read-only HTTP server of the report of an experiment that is still running, for this machine only."""

import errno
import hashlib
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import page
from ghostnoise.lab.report.noise import FOLDER
from ghostnoise.lab.store.folder import PARTS, RUN
from ghostnoise.lab.store.record import one_line

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
DEADLINE = 5.0  # seconds in which a request must arrive, however slowly its parts do
TYPES = {
    "html": "text/html; charset=utf-8", "json": "application/json", "md": "text/markdown; charset=utf-8",
    "csv": "text/csv; charset=utf-8", "tex": "text/plain; charset=utf-8", "png": "image/png", "pdf": "application/pdf",
}  # fmt: skip

MakeFile = Callable[[str, str], bytes]
"""Makes a file of the report from its name and the tag of the runs' state."""


@dataclass
class CachedFiles:
    """The files of the report, made on request, and made again after the runs have changed."""

    folder: Path
    names: frozenset[str]
    read: Callable[[], MakeFile]
    """Reads the run folders and returns a function that makes the files."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _tag: str = ""
    _make: MakeFile | None = None
    _contents: dict[str, bytes] = field(default_factory=dict)

    def get(self, name: str) -> tuple[str, bytes]:
        """Return the tag of the runs' state, and the contents of a file."""
        with self._lock:
            tag = state(self.folder)
            if self._make is None or tag != self._tag:
                self._make, self._tag, self._contents = self.read(), tag, {}
            if name not in self._contents:
                self._contents[name] = self._make(name, tag)
            return tag, self._contents[name]


def state(folder: Path) -> str:
    """Return a tag that changes when any file that the report reads changes."""
    seen = hashlib.sha256()
    try:
        runs = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    except OSError:
        runs = []
    for run in runs:
        for name in (RUN, *PARTS, *_noise_files(run)):
            try:
                found = os.lstat(os.path.join(run, name))
                seen.update(f"{run}/{name} {found.st_mtime_ns} {found.st_size}\n".encode(errors="surrogateescape"))
            except OSError:
                continue
    return f'"{seen.hexdigest()[:16]}"'


def _noise_files(run: str) -> list[str]:
    try:
        return [os.path.join(FOLDER, name) for name in sorted(os.listdir(os.path.join(run, FOLDER)))]
    except OSError:
        return []


class Server(ThreadingHTTPServer):
    """An HTTP server that listens on the loopback address only."""

    allow_reuse_address = os.name == "posix"  # elsewhere it would let two servers share a port
    allow_reuse_port = False
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, files: CachedFiles) -> None:
        self.files = files
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"--port {port}: is in use; give another port, or 0 for any free port") from None
            raise UserError(f"--port {port}: {error.strerror}; give another port, or 0 for any free port") from None

    def server_bind(self) -> None:
        """Bind without looking up the name of this machine, which may wait for the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that were closed by the other side; requests that fail are answered with code 500."""

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD requests for the exact names of the report's files, and refuses everything else."""

    server: Server
    server_version, sys_version = "ghostnoise", ""
    timeout = 30

    def setup(self) -> None:
        """Start the deadline: each connection has a thread of its own, which a slow one must not keep."""
        super().setup()
        self.deadline = threading.Timer(DEADLINE, self._cut)
        self.deadline.daemon = True
        self.deadline.start()

    def finish(self) -> None:
        """Stop the deadline."""
        self.deadline.cancel()
        super().finish()

    def _cut(self) -> None:
        with suppress(OSError):  # the connection has just been closed
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Send a file."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a file."""
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page asks every few seconds."""

    def _answer(self, body: bool) -> None:
        self.deadline.cancel()  # making a file may take longer
        if not self._local():
            self._send(HTTPStatus.FORBIDDEN, b"only for 127.0.0.1 and localhost\n", body=body)
            return
        path = self.path.partition("?")[0]
        name = "index.html" if path == "/" else path.removeprefix("/")
        if not path.startswith("/") or name not in self.server.files.names:
            self._send(HTTPStatus.NOT_FOUND, b"not found\n", body=body)
            return
        try:
            tag, content = self.server.files.get(name)
        except Exception as error:  # whatever the files contain, the server continues
            reason = f"{type(error).__name__}: {one_line(error)}"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{reason}\n".encode(errors="replace"), body=body)
            return
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
            return
        headers = {"Content-Type": TYPES[name.rpartition(".")[2]], "ETag": tag}
        if name == "index.html":
            headers["Content-Security-Policy"] = page.served_policy()
        self._send(HTTPStatus.OK, content, headers, body=body)

    def _local(self) -> bool:
        """Return whether the request names this machine; any other name may be a DNS rebinding attack."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0].partition(":")[0].lower() in NAMES

    def _send(self, status: HTTPStatus, content: bytes, more: dict[str, str] | None = None, body: bool = True) -> None:
        headers = {
            "Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(content)),
            "Cache-Control": "no-cache",
        } | (more or {})  # fmt: skip
        if status == HTTPStatus.NOT_MODIFIED:
            headers = {name: value for name, value in headers.items() if not name.startswith("Content-")}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and content:
            self.wfile.write(content)
