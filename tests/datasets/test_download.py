"""Downloads from a server on the loopback: kept files, refused files, and error messages."""

import gzip
import io
import json
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from dejax._files import cache_folder
from dejax.datasets import DataUnavailableError, load
from dejax.datasets.files import _downloads
from dejax.datasets.graphs import rdf
from tests.test_files import small_drive

needs_rdflib = pytest.mark.skipif(find_spec("rdflib") is None, reason="no rdflib")
TRIPLES = b"<http://x.org/a> <http://x.org/knows> <http://x.org/b> .\n"
MEMBERS = {
    "mutag/mutag_stripped.nt.gz": gzip.compress(TRIPLES, mtime=0),
    "mutag/trainingSet.tsv": b"bond\tid\tlabel_mutagenic\nhttp://x.org/a\t1.0\t0.0\n",
    "mutag/testSet.tsv": b"bond\tid\tlabel_mutagenic\nhttp://x.org/b\t2.0\t1.0\n",
    "mutag/completeDataset.tsv": b"not needed",
}


def tgz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Server(ThreadingHTTPServer):
    """Answers with `body`. `declared` is its Content-Length: the true one by default, None for no header."""

    body = b""
    declared: int | str | None = "true"
    status = 200
    requests = 0

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/mutag.tgz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        declared = len(self.server.body) if self.server.declared == "true" else self.server.declared
        if declared is not None:
            self.send_header("Content-Length", str(declared))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "DEJAX_DATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as http:
        http.body = tgz(MEMBERS)
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def kept(cache: Path) -> list[str]:
    """Everything below the folder of downloads, including hidden work folders."""
    home = cache / "datasets"
    return sorted(str(path.relative_to(home)) for path in home.rglob("*")) if home.exists() else []


@needs_rdflib
def test_one_download_then_the_cache(server, tmp_path, capsys):
    data = load("mutag", url=server.url(), cache=tmp_path, progress=True)
    assert (data.num_edges, data.num_nodes, data.class_names) == (1, 2, ("0", "1"))
    bar = capsys.readouterr().err
    assert "download mutag" in bar and "100%" in bar
    names = ["digests.json", "graph.nt.gz", "testSet.tsv", "trainingSet.tsv"]
    assert kept(tmp_path) == ["mutag", *(f"mutag/{name}" for name in names)]
    again = load("mutag", url=server.url(), cache=tmp_path)
    assert server.requests == 1 and again.num_edges == 1


@needs_rdflib
def test_the_first_digests_are_recorded_and_checked_later(server, tmp_path):
    load("mutag", url=server.url(), cache=tmp_path)
    home = tmp_path / "datasets" / "mutag"
    recorded = json.loads((home / "digests.json").read_text())
    assert recorded["url"] == server.url()
    assert recorded["testSet.tsv"] == _downloads.sha256(home / "testSet.tsv")
    load("mutag", url=server.url(), cache=tmp_path, force_download=True)  # the same archive is accepted
    assert server.requests == 2
    server.body = tgz({**MEMBERS, "mutag/testSet.tsv": MEMBERS["mutag/testSet.tsv"].replace(b"1.0\n", b"0.0\n")})
    with pytest.raises(ValueError, match=r"archive must have the SHA-256 digest .* nothing was kept"):
        load("mutag", url=server.url(), cache=tmp_path, force_download=True)
    assert json.loads((home / "digests.json").read_text()) == recorded
    (home / "testSet.tsv").write_bytes(MEMBERS["mutag/trainingSet.tsv"])
    with pytest.raises(ValueError, match=r"testSet.tsv must have the SHA-256 digest .* delete .* to download it again"):
        load("mutag", url=server.url(), cache=tmp_path)


def test_a_known_digest_must_match(server, tmp_path, monkeypatch):
    monkeypatch.setitem(rdf._DIGESTS, "mutag", {"graph.nt.gz": "0" * 64})
    with pytest.raises(ValueError, match=f"graph.nt.gz must have the SHA-256 digest {'0' * 64}, got [0-9a-f]{{64}}"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []
    home = tmp_path / "datasets" / "x"
    archive = _downloads.Archive(server.url(), {"testSet.tsv": ("testSet.tsv",)}, {"archive": "1" * 64})
    with pytest.raises(ValueError, match=f"archive must have the SHA-256 digest {'1' * 64}"):
        _downloads.fetch("x", archive, cache=tmp_path)
    assert not home.exists()


def test_the_digests_of_aifb_are_those_of_its_three_files():
    archive = rdf.archive("aifb")
    assert archive.url == "https://data.dgl.ai/dataset/aifb.tgz"
    assert set(archive.digests) == set(archive.files)
    assert all(len(digest) == 64 for digest in archive.digests.values())


@pytest.mark.parametrize("cut", [10, 200])
def test_a_download_that_breaks_off(server, tmp_path, cut):
    server.declared, server.body = len(server.body), server.body[:-cut]
    with pytest.raises(DataUnavailableError, match=r"cannot download 'mutag' .* the download broke off"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("nbytes", [64, 2000])
def test_a_full_drive_is_no_fault_of_the_server(server, tmp_path, nbytes):
    """Neither as the archive is written nor as it is unpacked."""
    server.body = tgz({**MEMBERS, "mutag/testSet.tsv": bytes(10_000)})
    with small_drive(nbytes), pytest.raises(OSError, match=r"make room on the drive: '.*/datasets/mutag'"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


def test_a_truncated_archive_of_undeclared_length(server, tmp_path):
    server.declared, server.body = None, server.body[: len(server.body) // 2]
    with pytest.raises(ValueError, match=r"is not a whole \.tgz archive|has no"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("body", [b"<html>moved</html>", b""])
def test_a_file_that_is_no_archive(server, tmp_path, body):
    server.body = body
    with pytest.raises(ValueError, match=r"is not a whole \.tgz archive"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


def test_an_archive_without_a_file(server, tmp_path):
    server.body = tgz({name: content for name, content in MEMBERS.items() if "testSet" not in name})
    with pytest.raises(ValueError, match=r"has no testSet\.tsv"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


@needs_rdflib
def test_members_stay_inside_the_folder(server, tmp_path):
    server.body = tgz({"../../" + name: content for name, content in MEMBERS.items()} | {"../evil": b"x"})
    assert load("mutag", url=server.url(), cache=tmp_path / "cache").num_edges == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("status", [404, 500])
def test_the_server_answers_with_an_error(server, tmp_path, status):
    server.status = status
    with pytest.raises(DataUnavailableError, match=rf"the server answered {status} .*folder=.*DEJAX_DATA"):
        load("mutag", url=server.url(), cache=tmp_path)
    assert kept(tmp_path) == []


def test_offline(server, tmp_path):
    with socket.socket() as free:  # a port that nothing listens on
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mutag.tgz"
        with pytest.raises(DataUnavailableError) as caught:
            load("mutag", url=url, cache=tmp_path)
    for part in (url, "refused", "load('mutag', folder=...)", "DEJAX_DATA", "need no download"):
        assert part in str(caught.value)
    assert kept(tmp_path) == []


def test_the_cache_is_where_the_variables_say(monkeypatch, tmp_path):
    """One folder for downloads, parsed graphs and kernels."""
    monkeypatch.setenv("DEJAX_CACHE_DIR", str(tmp_path / "own"))
    with pytest.raises(DataUnavailableError):
        load("mutag", url="file:///nowhere.tgz")
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["datasets"]
    monkeypatch.delenv("DEJAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "dejax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "dejax"
