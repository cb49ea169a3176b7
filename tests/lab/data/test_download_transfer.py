import io
import random
import shutil

import pytest
from rich.console import Console
from rich.progress import Progress

from ghostnoise.lab.data import download
from ghostnoise.lab.errors import UserError
from support.datasets import described
from support.file_server import certificate, serving

DATA = random.Random(0).randbytes(300_000)
FILE = described("set.bin", DATA)


@pytest.fixture
def server(server):
    server.contents["set.bin"] = DATA
    return server


def quiet():
    return Console(file=io.StringIO())


def fetch(server, target, addresses=None):
    with Progress(console=quiet()) as bar:
        download.fetch(FILE, addresses or (server.address,), target, bar)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "set.bin"


@pytest.fixture
def part(tmp_path):
    return tmp_path / "set.bin.part"


def test_a_file_is_downloaded_once(server, target, part):
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert not part.exists()
    fetch(server, target)  # already downloaded
    assert server.requests == [("set.bin", None)]


def test_an_interrupted_transfer_is_resumed(server, target, part):
    server.cut_after = 120_000
    with pytest.raises(UserError) as raised:
        fetch(server, target)
    text = str(raised.value)
    assert f"120000 of 300000 bytes are kept in {part}; run the command again to resume" in text
    assert "\n" not in text
    assert part.read_bytes() == DATA[:120_000]
    assert not target.exists()
    with pytest.raises(UserError, match="240000 of 300000 bytes are kept"):
        fetch(server, target)
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert [wanted for _, wanted in server.requests] == [None, "bytes=120000-", "bytes=240000-"]
    assert not part.exists()


def test_a_server_without_ranges_starts_over(server, target, part):
    part.write_bytes(DATA[:50_000])
    server.ranges = False
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize("kept", [50_000, 120_000, 200_000])
def test_a_server_without_ranges_never_shortens_what_was_downloaded(server, target, part, kept):
    """The rest may come from another server, or after another interruption."""
    part.write_bytes(DATA[:kept])
    server.ranges, server.cut_after = False, 120_000
    with pytest.raises(UserError, match=f"{max(kept, 120_000)} of 300000 bytes are kept"):
        fetch(server, target)
    assert part.read_bytes() == DATA[: max(kept, 120_000)]
    server.ranges, server.cut_after = True, None
    fetch(server, target)
    assert server.requests[-1][1] == f"bytes={max(kept, 120_000)}-"
    assert target.read_bytes() == DATA
    assert [path.name for path in target.parent.iterdir()] == ["set.bin"]


def test_a_page_instead_of_the_file_discards_nothing(server, target, part):
    """Networks that need a login answer every request with their own page."""
    part.write_bytes(DATA[:50_000])
    server.contents["set.bin"], server.ranges = b"<html>log in</html>", False
    with pytest.raises(UserError, match="ended after 19 of 300000 bytes; 50000 of 300000 bytes are kept"):
        fetch(server, target)
    assert part.read_bytes() == DATA[:50_000]


def test_a_server_that_sends_another_range_starts_over(server, target, part, monkeypatch):
    part.write_bytes(DATA[:50_000])
    request = download._request

    def elsewhere(url, have):
        response = request(url, 0)
        response.status = 206
        response.headers["Content-Range"] = f"bytes 0-{len(DATA) - 1}/{len(DATA)}"
        return response

    monkeypatch.setattr(download, "_request", elsewhere)
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert len(server.requests) == 1


@pytest.mark.parametrize("left", [b"x" * 50_000, b"x" * len(DATA), DATA + b"more", DATA[:-1] + b"x", b""])
def test_a_wrong_partial_file_is_discarded(server, target, part, left):
    part.write_bytes(left)
    fetch(server, target)
    assert target.read_bytes() == DATA
    assert not part.exists()


def test_a_complete_partial_file_needs_no_server(target, part):
    part.write_bytes(DATA)
    with Progress(console=quiet()) as bar:
        download.fetch(FILE, ("http://127.0.0.1:1/",), target, bar)
    assert target.read_bytes() == DATA


@pytest.mark.parametrize("served", [DATA[:-1] + bytes([DATA[-1] ^ 1]), DATA + b"more", b"<html>" * 50_000])
def test_wrong_bytes_are_never_moved_into_place(server, target, part, served):
    server.contents["set.bin"] = served
    with pytest.raises(
        UserError, match=f"provides a different file, with md5 [0-9a-f]+ instead of {FILE.md5}; nothing was downloaded"
    ):
        fetch(server, target)
    assert not target.exists()
    assert not part.exists()
    assert len(server.requests) == 1


def test_a_file_that_is_too_short_is_kept_as_partial(server, target):
    server.contents["set.bin"] = DATA[:10]
    with pytest.raises(UserError, match="ended after 10 of 300000 bytes; 10 of 300000 bytes are kept"):
        fetch(server, target)
    with pytest.raises(UserError, match="ended after 10 of"):  # 416: range not satisfiable
        fetch(server, target)
    server.contents["set.bin"] = DATA
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_the_next_address_is_tried(server, target):
    fetch(server, target, ("http://127.0.0.1:1/", f"{server.address}nothing/", server.address))
    assert target.read_bytes() == DATA


def test_no_network(server, target):
    with pytest.raises(UserError) as raised:
        fetch(server, target, ("http://127.0.0.1:1/", f"{server.address}nothing/"))
    text = str(raised.value)
    assert "http://127.0.0.1:1/set.bin: cannot be reached (" in text
    assert "nothing/set.bin: responded 404 Not Found" in text
    assert "nothing was downloaded; run the command again to retry" in text


def test_a_stalled_transfer_times_out(server, target, part, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    server.stall_after = 100_000
    with pytest.raises(UserError, match=r"connection lost \(timed out\); 100000 of 300000 bytes are kept"):
        fetch(server, target)
    assert part.read_bytes() == DATA[:100_000]


def test_a_transfer_that_is_too_slow_fails_and_is_kept(server, target, part, monkeypatch):
    monkeypatch.setattr(download, "RATE_WINDOW", 0.3)
    server.drip = 100_000
    with pytest.raises(
        UserError, match=r"sends [\d,]+ bytes per second, which is less than 2,000; \d+ of 300000"
    ) as raised:
        fetch(server, target)
    kept = part.read_bytes()
    assert len(kept) > 100_000
    assert DATA.startswith(kept)
    assert f"{len(kept)} of 300000 bytes are kept" in str(raised.value)
    server.drip = None
    fetch(server, target)
    assert target.read_bytes() == DATA


def test_the_next_address_continues_after_one_that_is_too_slow(server, target, monkeypatch):
    monkeypatch.setattr(download, "RATE_WINDOW", 0.3)
    server.drip = 100_000
    with serving({"set.bin": DATA}) as other:
        fetch(server, target, (server.address, other.address))
        (request,) = other.requests
    assert int(request[1].removeprefix("bytes=").removesuffix("-")) > 100_000
    assert target.read_bytes() == DATA


@pytest.fixture
def encrypted(tmp_path, monkeypatch):
    """Return a server over TLS whose certificate is trusted, and one without encryption; only https is allowed."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with serving({"set.bin": DATA}, certificate(tmp_path)) as tls, serving({"set.bin": DATA}) as plain:
        yield tls, plain


def test_only_https_is_used(encrypted, target):
    tls, plain = encrypted
    with pytest.raises(UserError, match=r"http://.*/set.bin, which is not https, and only https is used"):
        fetch(plain, target)
    fetch(tls, target, (plain.address, tls.address))
    assert target.read_bytes() == DATA
    assert plain.requests == []


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_a_redirect_to_anything_but_https_is_not_followed(encrypted, target, scheme):
    tls, plain = encrypted
    tls.redirect = plain.address.replace("http", scheme, 1)
    with pytest.raises(UserError, match=f"redirects to {scheme}:.*, which is not https"):
        fetch(tls, target)
    assert plain.requests == []
    assert not target.exists()


def test_a_certificate_that_is_not_trusted_is_refused(encrypted, target, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UserError, match=r"cannot be reached \(.*certificate verify failed"):
        fetch(encrypted[0], target)
    assert not target.exists()


def test_a_full_disk(server, target, part):
    part.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        fetch(server, target)
    assert not target.exists()
