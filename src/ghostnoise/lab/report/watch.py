"""The page of an experiment that is still running, served to this machine alone, and read-only."""

import errno
import hashlib
import os
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.noise import FOLDER

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
READ = ("settings.json", "result.json", "failure.json", "metrics.jsonl", "environment.json")
TYPES = {
    "html": "text/html; charset=utf-8", "json": "application/json", "md": "text/markdown; charset=utf-8",
    "csv": "text/csv; charset=utf-8", "tex": "text/plain; charset=utf-8", "png": "image/png", "pdf": "application/pdf",
}  # fmt: skip

Make = Callable[[str, str], bytes]
"""Makes a file of the report by its name, of the state with this tag."""


@dataclass
class Files:
    """The files of the report, made when asked for, and again when the runs have changed."""

    folder: Path
    names: frozenset[str]
    make: Callable[[], Make]
    """Reads the run folders, and returns what makes the files of what was read."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _tag: str = ""
    _maker: Make | None = None
    _made: dict[str, bytes] = field(default_factory=dict)

    def get(self, name: str) -> tuple[str, bytes]:
        """The tag of the runs' state, and the file."""
        with self._lock:
            tag = state(self.folder)
            if self._maker is None or tag != self._tag:
                self._maker, self._tag, self._made = self.make(), tag, {}
            if name not in self._made:
                self._made[name] = self._maker(name, tag)
            return tag, self._made[name]


def state(folder: Path) -> str:
    """A tag that is another one when any file that the report reads is another one."""
    seen = hashlib.sha256()
    try:
        runs = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        runs = []
    for run in runs:
        for name in (*READ, *_noise(run)):
            try:
                found = os.stat(os.path.join(run, name))
                seen.update(f"{run}/{name} {found.st_mtime_ns} {found.st_size}\n".encode(errors="surrogateescape"))
            except OSError:
                continue
    return f'"{seen.hexdigest()[:16]}"'


def _noise(run: str) -> list[str]:
    try:
        return [os.path.join(FOLDER, name) for name in sorted(os.listdir(os.path.join(run, FOLDER)))]
    except OSError:
        return []


class Server(ThreadingHTTPServer):
    """Listens on this machine's own address only."""

    allow_reuse_address = os.name == "posix"  # elsewhere it would let two servers have one port
    allow_reuse_port = False
    daemon_threads = True

    def __init__(self, port: int, files: Files) -> None:
        self.files = files
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"--port {port}: is in use; give another one, or 0 for any that is free") from None
            raise UserError(f"--port {port}: {error.strerror}; give another one, or 0 for any that is free") from None

    def server_bind(self) -> None:
        """Bind without asking for this machine's name, which may wait for a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the files of the report by their exact names, and refuses everything else."""

    server: Server
    server_version, sys_version = "ghostnoise", ""
    timeout = 30

    def do_GET(self) -> None:
        """Send a file."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Send a file's head."""
        self._answer(body=False)

    def refuse(self) -> None:
        """Say what is allowed."""
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"GET and HEAD only\n", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = refuse

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the page asks every few seconds."""

    def _answer(self, body: bool) -> None:
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
        except (UserError, OSError, ValueError) as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode(), body=body)
            return
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag})
            return
        kind = TYPES[name.rpartition(".")[2]]
        self._send(HTTPStatus.OK, content, {"Content-Type": kind, "ETag": tag}, body=body)

    def _local(self) -> bool:
        """Whether the request names this machine: a foreign name that resolves to it is another site's doing."""
        hosts = self.headers.get_all("Host") or []
        return len(hosts) == 1 and hosts[0].partition(":")[0].lower() in NAMES

    def _send(self, status: HTTPStatus, content: bytes, more: dict[str, str] | None = None, body: bool = True) -> None:
        headers = {
            "Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(content)),
            "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
        } | (more or {})  # fmt: skip
        if status == HTTPStatus.NOT_MODIFIED:
            headers = {name: value for name, value in headers.items() if not name.startswith("Content-")}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body and content:
            self.wfile.write(content)
