"""The server: this machine only, read-only, exact names, and updates while runs continue."""

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.files import SERVED, ExperimentReport
from ghostnoise.lab.report.page import Provenance
from ghostnoise.lab.report.server import CachedFiles, Server, state
from support.readings import convolutional, record
from support.run_folders import experiment, points, write

PROVENANCE = Provenance("ghostnoise watch tiny", datetime(2030, 1, 2, tzinfo=UTC))


@pytest.fixture
def served(tmp_path):
    made = experiment(tmp_path)
    folder = tmp_path / "tiny"
    files = CachedFiles(folder, SERVED, lambda: ExperimentReport(made, folder, PROVENANCE, lambda line: None).file)
    with Server(0, files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server, made, tmp_path
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for each in [f"127.0.0.1:{server.server_port}"] if host is None else host:
        connection.putheader("Host", each)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_listens_on_this_machine_only(served):
    server, *_ = served
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: is in use; give another port, or 0"):
            Server(port, None)


@pytest.mark.parametrize("name", sorted(SERVED))
def test_serves_its_files(served, name):
    server, *_ = served
    answer, content = ask(server, f"/{name}")
    assert answer.status == 200
    assert int(answer.headers["Content-Length"]) == len(content) > 0
    head, nothing = ask(server, f"/{name}", "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.headers["Content-Length"] == answer.headers["Content-Length"]


@pytest.mark.parametrize(
    "path",
    [
        "/tiny.toml", "/../tiny.toml", "/..%2ftiny.toml", "/%2e%2e/tiny.toml", "/tiny/", "//etc/passwd", "/etc/passwd",
        "/table.md/../../tiny.toml", "/./table.md", "/table.md/", "/TABLE.MD", "/table.md%00", "\\..\\tiny.toml",
        "http://127.0.0.1/table.md", "table.md", "/runs", "*",
    ],
)  # fmt: skip
def test_everything_else_is_not_found(served, path):
    server, *_ = served
    answer, content = ask(server, path)
    assert answer.status == 404
    assert content == b"not found\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_allowed(served, method):
    server, *_ = served
    assert ask(server, "/", method, Content_Length="0")[0].status == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (["localhost"], 200), (["LOCALHOST:81"], 200), (["127.0.0.1"], 200), (["evil.example"], 403),
        (["127.0.0.1.evil.example"], 403), (["localhost.evil.example:80"], 403), ([], 403), ([""], 403),
        (["localhost", "evil.example"], 403),
    ],
)  # fmt: skip
def test_foreign_names_are_refused(served, host, status):
    server, *_ = served
    assert ask(server, "/table.md", host=host)[0].status == status


def test_updates_while_a_run_continues(served):
    server, made, tmp_path = served
    answer, content = ask(server, "/data.json")
    tag = answer.headers["ETag"]
    assert f'data-tag="{tag.replace(chr(34), "&quot;")}"' in ask(server, "/")[1].decode()
    assert ask(server, "/data.json", If_None_Match=tag)[0].status == 304
    assert json.loads(content)["plots"]["training"]["groups"] == []
    folder = write(tmp_path, points(made)[0], 91.25)
    answer, content = ask(server, "/data.json", If_None_Match=tag)
    assert answer.status == 200
    assert "91.25" in json.loads(content)["main"]
    newer = answer.headers["ETag"]
    assert newer != tag
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "accuracy": 92.0}\n{"epoch": 5, "acc')
    answer, content = ask(server, "/data.json", If_None_Match=newer)
    assert answer.status == 200
    assert json.loads(content)["plots"]["training"]["groups"][0]["curves"]["accuracy"]["x"] == [1, 2, 3, 4]


def test_concurrent_requests_get_the_same_contents(served):
    server, *_ = served
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(ask(server, "/data.json")[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 8


def test_the_tag_changes_when_noise_is_recorded(tmp_path):
    folder = write(tmp_path, points(experiment(tmp_path))[0])
    before = state(tmp_path / "tiny")
    assert state(tmp_path / "tiny") == before
    record(folder, e1=convolutional())
    assert state(tmp_path / "tiny") != before


def test_the_page_has_a_policy_for_its_scripts(served):
    server, *_ = served
    policy = ask(server, "/")[0].headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize(
    "error", [RecursionError("deep"), OverflowError("\x1b[31mlarge\nmore"), KeyError(), MemoryError()]
)
def test_any_error_is_answered_and_the_server_continues(served, error, monkeypatch):
    server, *_ = served

    def fail(name):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(server.files, "get", fail)
        answer, content = ask(server, "/")
    assert answer.status == 500
    assert content.startswith(type(error).__name__.encode())
    assert content.count(b"\n") == 1
    assert b"\x1b" not in content
    assert ask(server, "/")[0].status == 200


def test_slow_connections_block_nobody_and_are_cut(served, monkeypatch):
    """Forty of them, each with another byte from time to time."""
    server, *_ = served
    monkeypatch.setattr("ghostnoise.lab.report.server.DEADLINE", 0.5)
    before, slow = threading.active_count(), []
    try:
        for _ in range(40):
            slow.append(socket.create_connection(("127.0.0.1", server.server_port)))
            slow[-1].sendall(b"GET / HT")
        began = time.monotonic()
        assert ask(server, "/table.md")[0].status == 200
        for each in slow:
            with suppress(OSError):
                each.sendall(b"T")
        ends = []
        for each in slow:
            each.settimeout(30)
            with suppress(ConnectionError):
                while each.recv(1000):
                    pass
            ends.append(time.monotonic() - began)
    finally:
        for each in slow:
            each.close()
    assert len(ends) == 40
    for _ in range(100):
        if threading.active_count() <= before:
            return
        time.sleep(0.1)
    pytest.fail("threads were kept")
