"""data/fineweb.py: fetch against a local imitation of the hub, verify, tokenize; and the sample in data/sample.

No test needs the internet or reads outside the repository.
Fetches run in a process of their own, because huggingface_hub reads HF_ENDPOINT when it is imported.
"""

import base64
import errno
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "data"))
import fineweb
import make_sample

BOS = 50256
VAL = "fineweb_val_000000.bin"
TRAIN = "fineweb_train_000001.bin"


def shard(tokens, magic=20240520, version=1, count=None):
    """Bytes of a shard, written without the module under test."""
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count)
    return header.ljust(1024, b"\0") + np.array(tokens, dtype="<u2").tobytes()


def read(path):
    """Token array of a good shard."""
    raw = Path(path).read_bytes()
    assert struct.unpack("<3i", raw[:12]) == (20240520, 1, len(raw) // 2 - 512)
    assert not any(raw[12:1024])
    return np.frombuffer(raw[1024:], dtype="<u2")


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# fetch


HUB_FOLDERS = ("/datasets/kjj0/fineweb10B-gpt2/resolve/main", "/datasets/Rowan/hellaswag/resolve/main/data")


class Hub:
    """The hub's two requests for a large file:
    HEAD with its size and SHA-256, GET redirected to a store with ranges."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.files = {name: shard([BOS, *random.integers(0, BOS, 4000)]) for name in (VAL, TRAIN)}
        self.stated = {}  # name -> another SHA-256 or entity tag than the right one
        self.requests = []  # (method, name, Range header or None)
        self.cut_once = False  # break the next stream in the middle
        self.stall = False  # send half, then nothing
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, headers=(), content=b""):
                self.send_response(status)
                for key, value in dict(headers).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_HEAD(self):
                self.resolve()

            def do_GET(self):
                if not self.path.startswith("/store/"):
                    return self.resolve()
                content = hub.files[Path(self.path).name]
                span = self.headers["Range"]
                start = int(span.removeprefix("bytes=").removesuffix("-")) if span else 0
                hub.requests.append(("GET", Path(self.path).name, span))
                if hub.cut_once or hub.stall:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) // 2])
                    self.wfile.flush()
                    while hub.stall:
                        time.sleep(0.05)
                    hub.cut_once = False
                    self.close_connection = True
                elif span:
                    place = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
                    self.answer(206, place, content[start:])
                else:
                    self.answer(200, content=content)

            def resolve(self):
                folder, _, name = self.path.rpartition("/")
                if folder not in HUB_FOLDERS or name not in hub.files:
                    return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
                if self.command == "HEAD":
                    hub.requests.append(("HEAD", name, None))
                tag = hub.stated.get(name, sha256(hub.files[name]))
                facts = {"X-Repo-Commit": "0" * 40, "X-Linked-Size": str(len(hub.files[name]))}
                self.answer(302, facts | {"X-Linked-Etag": f'"{tag}"', "Location": f"{hub.store}/store/{name}"})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.store = f"http://localhost:{self.server.server_port}"  # another host, as the hub's store is
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def gets(self):
        return [(name, span) for method, name, span in self.requests if method == "GET"]


@pytest.fixture
def hub():
    pytest.importorskip("huggingface_hub")
    hub = Hub()
    yield hub
    hub.stall = False
    hub.server.shutdown()
    hub.server.server_close()


def start_fetch(folder, endpoint, shards=1):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder.parent / "hf"), "NO_PROXY": "127.0.0.1,localhost"}
    command = [sys.executable, ROOT / "data/fineweb.py", "fetch", "--shards", str(shards), "--dir", folder]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fetch(folder, endpoint, shards=1):
    """(exit code, stdout, the error line or "")"""
    process = start_fetch(folder, endpoint, shards)
    out, err = process.communicate(timeout=60)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err, err
    assert len(errors) == (process.returncode == 2), err
    return process.returncode, out, errors[0] if errors else ""


def test_fetch_and_fetch_again(hub, tmp_path):
    folder = tmp_path / "new" / "folder"
    code, out, _ = fetch(folder, hub.url)
    assert code == 0
    assert "2 shards, 8,002 tokens" in out
    assert names(folder) == ["SHA256SUMS", TRAIN, VAL]
    for name, content in hub.files.items():
        assert (folder / name).read_bytes() == content
        assert f"{sha256(content)}  {name}\n" in (folder / "SHA256SUMS").read_text()
    hub.requests.clear()
    code, out, _ = fetch(folder, hub.url)
    assert code == 0
    assert out.count("already here") == 2
    assert hub.requests == []
    (folder / "SHA256SUMS").unlink()  # then the hub is asked what is right, and nothing is transferred
    code, out, _ = fetch(folder, hub.url)
    assert code == 0
    assert out.count("already here") == 2
    assert len(hub.requests) == 2
    assert not hub.gets()


def test_fetch_resumes_repairs_and_replaces(hub, tmp_path):
    good = hub.files[TRAIN]
    (tmp_path / f"{VAL}.part").write_bytes(b"stale" * 300)  # not a beginning of the file: the hash finds out
    (tmp_path / f"{TRAIN}.part").write_bytes(good[:5000])
    code, out, _ = fetch(tmp_path, hub.url)
    assert code == 0
    assert "starting over" in out
    assert hub.gets() == [(VAL, "bytes=1500-"), (VAL, None), (TRAIN, "bytes=5000-")]
    hub.requests.clear()
    (tmp_path / TRAIN).write_bytes(good[:-1] + b"x")
    hub.cut_once = True  # the library continues the broken stream by itself
    code, out, _ = fetch(tmp_path, hub.url)
    assert code == 0
    assert "another SHA-256" in out
    assert [name for name, _ in hub.gets()] == [TRAIN, TRAIN]
    assert (tmp_path / TRAIN).read_bytes() == good
    assert names(tmp_path) == ["SHA256SUMS", TRAIN, VAL]


def test_fetch_refuses_another_hash(hub, tmp_path):
    hub.stated[TRAIN] = "f" * 64
    (tmp_path / f"{TRAIN}.part").write_bytes(hub.files[TRAIN][:1500])
    code, _, error = fetch(tmp_path, hub.url)
    assert code == 2
    assert f"expected {'f' * 64}, found {sha256(hub.files[TRAIN])}; fix: " in error
    assert names(tmp_path) == ["SHA256SUMS", VAL]  # what was right stays
    hub.stated[TRAIN] = "not-a-sha256"
    code, _, error = fetch(tmp_path, hub.url)
    assert code == 2
    assert "expected a SHA-256 and a size, found etag not-a-sha256" in error


def test_fetch_refuses_what_is_not_a_shard(hub, tmp_path):
    hub.files[VAL] = shard([BOS, 1, 2], magic=7)
    code, _, error = fetch(tmp_path, hub.url)
    assert code == 2
    assert "magic number: expected 20240520, found 7" in error
    assert not (tmp_path / VAL).exists()


def test_fetch_without_the_file_or_the_hub(hub, tmp_path):
    code, _, error = fetch(tmp_path, hub.url, shards=2)
    assert code == 2
    assert "fineweb_train_000002.bin on the hub: expected HTTP 200, found HTTP 404" in error
    assert (tmp_path / TRAIN).exists()
    assert "train_000002" not in "".join(names(tmp_path))
    code, _, error = fetch(tmp_path / "empty", "http://127.0.0.1:9")
    assert code == 2
    assert "expected an answer, found ConnectError" in error
    assert "it resumes" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_fetch_interrupted_and_one_at_a_time(hub, tmp_path, number):
    hub.stall = True
    process = start_fetch(tmp_path, hub.url)
    deadline = time.monotonic() + 30
    while not hub.gets() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    hub.stall = False
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert names(tmp_path) == [f"{VAL}.part"]
    with open(tmp_path / f"{VAL}.part", "ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        code, _, error = fetch(tmp_path, hub.url)
    assert code == 2
    assert "expected one at a time, found another fetch" in error
    assert fetch(tmp_path, hub.url)[0] == 0


def test_workers_hear_no_ctrl_c_from_their_first_moment():
    """Else each would print where it was in its imports."""
    before = signal.getsignal(signal.SIGINT)
    with fineweb.ctrl_c_ignored():
        command = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert signal.getsignal(signal.SIGINT) == before
    assert worker.communicate(timeout=30)[0] == "True\n"


def test_fetch_disk_full(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fineweb.shutil, "disk_usage", lambda _: usage(100, 90, 10))
    with pytest.raises(
        fineweb.DataError, match="disk space for a.bin: expected 200 bytes, found 10 free; fix: free some"
    ):
        fineweb.download(tmp_path / "a.bin.part", "a.bin", "http://127.0.0.1:9/a.bin", 200, "0" * 64)
    with pytest.raises(fineweb.DataError, match="expected enough, found disk full; fix: .* it resumes"):
        with fineweb.hub_errors("a.bin"):
            raise OSError(errno.ENOSPC, "No space left on device")


# ---------------------------------------------------------------------------------------------------------------------
# verify


@pytest.mark.fast
def test_verify_good_shards(tmp_path, capsys):
    (tmp_path / "a_val_000000.bin").write_bytes(shard([BOS, 1, 2, BOS, 3]))
    (tmp_path / "a_train_000001.bin").write_bytes(shard([4, 5, BOS, 6]))  # from the middle of a document: as FineWeb's
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"a_val_000000.bin  5 tokens  2 documents  sha256 {sha256(shard([BOS, 1, 2, BOS, 3]))}\n" in out
    assert out.endswith("2 of 2 shards good, 9 tokens\n")


BAD = {
    "short header": (b"x" * 1023, "header: expected 1024 bytes, found 1023"),
    "magic": (shard([BOS, 1], magic=20240521), "magic number: expected 20240520, found 20240521"),
    "version": (shard([BOS, 1], version=2), "version: expected 1, found 2"),
    "truncated": (shard([BOS, 1, 2])[:-1], "size: expected 1,030 bytes for 3 tokens, found 1,029 bytes"),
    "too long": (shard([BOS, 1, 2]) + b"xx", "size: expected 1,030 bytes for 3 tokens, found 1,032 bytes"),
    "claims much": (shard([BOS], count=2**31 - 1), "size: expected 4,294,968,318 bytes for 2,147,483,647 tokens"),
    "negative": (shard([BOS], count=-1), "size: expected a token count above 0, found -1"),
    "empty": (shard([]), "size: expected a token count above 0, found 0"),
    "token id": (shard([BOS, 1, 50257, 65535]), "token id: expected below 50257, found 50257 at position 2"),
    "no BOS": (shard([1, 2, 3]), "documents: expected token 50256 before each, found none"),
}


@pytest.mark.parametrize("content, message", BAD.values(), ids=BAD)
@pytest.mark.fast
def test_verify_bad_shard(tmp_path, capsys, content, message):
    (tmp_path / "bad.bin").write_bytes(content)
    (tmp_path / "good.bin").write_bytes(shard([BOS, 7]))
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    line = out.splitlines()[0]
    assert line.startswith(f"error: {tmp_path}/bad.bin {message}")
    assert "; fix: " in line
    assert "good.bin  2 tokens" in out
    assert "1 of 2 shards good, 2 tokens" in out
    assert err == f"error: {tmp_path}: expected only good shards, found 1 bad; fix: see the lines above\n"


def test_verify_goes_on_after_a_shard_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "bad.bin").mkdir()
    (tmp_path / "good.bin").write_bytes(shard([BOS, 7]))
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert f"error: {tmp_path}/bad.bin: expected a file that can be read, found Is a directory; fix: " in out
    assert "1 of 2 shards good" in out


@pytest.mark.fast
def test_verify_refuses_a_shard_that_is_there_twice(tmp_path, capsys):
    for name in ("a_train_000001.bin", "a_train_000002.bin"):
        (tmp_path / name).write_bytes(shard([BOS, 7]))
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "a_train_000002.bin: expected another shard than the others, found the same as a_train_000001.bin" in out
    assert "1 of 2 shards good, 2 tokens" in out
    assert "found 1 bad" in err


@pytest.mark.fast
@pytest.mark.parametrize("numbers, message", [
    ([3, 4], "expected a_train_000001.bin to 000004, found all but 000001, 000002;"),
    ([1, 2, 9], "expected a_train_000001.bin to 000009, found all but 000003, 000004, 000005, 000006, 000007 ...;"),
    ([1, 2], None),
])
def test_verify_misses_shards(tmp_path, capsys, numbers, message):
    (tmp_path / "a_val_000000.bin").write_bytes(shard([BOS, 0]))
    for number in numbers:
        (tmp_path / f"a_train_{number:06d}.bin").write_bytes(shard([BOS, number]))
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == (2 if message else 0)
    out, err = capsys.readouterr()
    assert (f"error: training shards: {message}" in out) if message else (err == "")


@pytest.mark.fast
@pytest.mark.parametrize("number", ["1", "abc", "0000001"])
def test_verify_wants_numbers_that_give_an_order(tmp_path, capsys, number):
    """A training refuses these names, or reads such shards in another order than the numbers'."""
    (tmp_path / f"a_train_{number}.bin").write_bytes(shard([BOS, 1]))
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    assert f"a_train_{number}.bin: expected six digits after _train_, as in 000001, found " in capsys.readouterr().out


@pytest.mark.fast
def test_a_pipe_is_no_shard(tmp_path, capsys):
    """Opening one would wait for somebody who writes into it."""
    os.mkfifo(tmp_path / "a.bin")
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    assert "a.bin: expected a file, found a pipe, socket or device; fix: remove it" in capsys.readouterr().out
    assert fineweb.main(["tokenize", str(tmp_path / "a.bin"), "--out", str(tmp_path / "out")]) == 2
    assert "a.bin: expected a file or a folder, found a pipe" in capsys.readouterr().err
    with pytest.raises(fineweb.DataError, match="found a pipe"):
        fineweb.sha256_of(tmp_path / "a.bin")
    with pytest.raises(fineweb.DataError, match="expected a file of merge ranks, found a folder, pipe"):
        fineweb.load_encoding(str(tmp_path / "a.bin"))
    (tmp_path / "text.txt").write_text("text")
    encoding = "--encoding", str(tmp_path / "a.bin")
    assert fineweb.main(["tokenize", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *encoding]) == 2
    assert "a.bin: expected a file of merge ranks, found a folder, pipe" in capsys.readouterr().err


def test_verify_knows_the_sums_and_the_empty_folder(tmp_path, capsys):
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    assert "expected *.bin files, found none; fix: python data/fineweb.py fetch" in capsys.readouterr().err
    (tmp_path / "a.bin").write_bytes(shard([BOS, 7]))
    fineweb.write_sums(tmp_path, {"a.bin": sha256(shard([BOS, 8]))})
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    assert f"expected {sha256(shard([BOS, 8]))} as in SHA256SUMS" in capsys.readouterr().out
    fineweb.write_sums(tmp_path, {"a.bin": sha256(shard([BOS, 7])), "b.bin": "0" * 64})
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == 2
    assert "b.bin: expected a shard, SHA256SUMS names it, found none; fix: fetch it again" in capsys.readouterr().out


UNREAD = "SHA256SUMS line 2: expected 64 hexadecimal digits and a name, found '"


@pytest.mark.parametrize("line, said", [
    (sha256(shard([BOS, 7])).upper().encode() + b" *a.bin\n\n", ""),
    (sha256(shard([BOS, 8])).upper().encode() + b"  a.bin", "found 1 bad"),
    (sha256(shard([BOS, 7])).encode()[:63] + b"  a.bin", UNREAD),
    (b"\xff\xfe no text\n", UNREAD),
])
def test_verify_reads_every_line_of_the_sums(tmp_path, capsys, line, said):
    """A shard whose line is skipped would pass for one that was compared."""
    (tmp_path / "a.bin").write_bytes(shard([BOS, 7]))
    (tmp_path / "SHA256SUMS").write_bytes(b"\n" + line)
    assert fineweb.main(["verify", "--dir", str(tmp_path)]) == (2 if said else 0)
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == bool(said)


# ---------------------------------------------------------------------------------------------------------------------
# tokenize

TEXTS = [
    f"The {i}th whale said: <|endoftext|> that the then-other théorie, {i * i} ☃!\n\n  Bye."
    for i in range(300)
]


MERGES = [b"th", b"the", b" t", b" th", b" the", b"at", b" that", b"wh", b"al", b"ale", b"\n\n"]
SMALL = [bytes([byte]) for byte in range(256)] + MERGES  # token id -> bytes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The ranks file of a small byte-pair encoding: SMALL."""
    pytest.importorskip("tiktoken")
    path = tmp_path_factory.mktemp("bpe") / "small.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(SMALL)))
    return path


def tokenize(ranks, inputs, out, *more):
    inputs = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    return fineweb.main(["tokenize", *inputs, "--out", str(out), "--encoding", str(ranks), *map(str, more)])


def decode(tokens):
    """Documents of a token array, which has to begin with 50256."""
    assert tokens[0] == BOS
    starts = np.flatnonzero(tokens == BOS)
    pieces = [tokens[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(tokens)])]
    return [b"".join(SMALL[token] for token in piece).decode() for piece in pieces]


def as_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_json_lines_into_shards_any_number_of_processes(ranks, tmp_path, monkeypatch, capsys):
    source = as_jsonl(tmp_path / "a.jsonl", TEXTS)
    batches = fineweb.make_batches
    monkeypatch.setattr(fineweb, "make_batches", lambda documents: batches(documents, characters=500))
    for processes in 1, 3:
        out = tmp_path / str(processes)
        sizes = ["--val-tokens", 2000, "--shard-tokens", 3000, "--procs", processes]
        assert tokenize(ranks, source, out, *sizes) == 0
    one = tmp_path / "1"
    three = tmp_path / "3"
    files = names(one)
    assert (one / files.pop(0)).read_bytes() == ranks.read_bytes(), "so that nobody takes the tokens for GPT-2's"
    assert files[:2] == ["text_train_000001.bin", "text_train_000002.bin"]
    assert files[-1] == "text_val_000000.bin"
    assert names(three) == ["text.tiktoken", *files]
    assert all((one / f).read_bytes() == (three / f).read_bytes() for f in files)

    validation, *training = [read(one / f) for f in [files[-1], *files[:-1]]]
    documents = [document for tokens in [validation, *training] for document in decode(tokens)]
    assert documents == TEXTS  # nothing lost, nothing moved, <|endoftext|> in a text is text
    last = len(validation) - np.flatnonzero(validation == BOS)[-1]
    assert 2000 <= len(validation) < 2000 + last  # whole documents until the wish is met
    assert all(len(tokens) <= 3000 for tokens in training)
    assert all(len(tokens) > 2700 for tokens in training[:-1])
    assert fineweb.main(["verify", "--dir", str(one)]) == 0
    out = capsys.readouterr().out
    assert "300 documents" in out, "in all, but they are spread over shards"
    assert "  300 documents" not in out, "in all, but they are spread over shards"
    used = np.unique(np.concatenate([validation, *training]))
    # merges were applied
    assert used.max() == BOS
    assert (used[:-1] >= 256).sum() >= 8


def test_killed_worker_is_an_error_and_none_stays(ranks):
    stream = fineweb.encode_documents((text * 5000 for text in TEXTS), str(ranks), processes=2)
    assert decode(next(stream)) == [TEXTS[0] * 5000]
    multiprocessing.active_children()[0].kill()
    with pytest.raises(fineweb.DataError, match="expected an answer, found killed.*fix: use fewer --procs"):
        list(stream)
    stream = fineweb.encode_documents((text * 5000 for text in TEXTS), str(ranks), processes=2)
    next(stream)
    stream.close()  # what Ctrl-C or a full disk comes down to
    for worker in multiprocessing.active_children():
        worker.join(10)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("blank", [" ", "\n"])
def test_a_text_that_tiktoken_cannot_split(ranks, tmp_path, capfd, blank, processes):
    """It panics, with a stack on descriptor 2 and an error that is no Exception."""
    (tmp_path / "blank.txt").write_text("a" + blank * 1_100_000 + " b")
    whole = ["--document-characters", 0, "--procs", processes]
    assert tokenize(ranks, tmp_path / "blank.txt", tmp_path / "out", *whole) == 2
    said = "document: expected a text that tiktoken can split, found 1,100,003 characters that it cannot; fix: "
    assert capfd.readouterr().err == f"error: {said}--document-characters 16384\n"
    assert names(tmp_path / "out") == []


@pytest.mark.fast
def test_plain_text_and_empty_documents(ranks, tmp_path):
    (tmp_path / "one.txt").write_text("\nfirst\n\n----\nstays\n\n", encoding="utf-8")
    (tmp_path / "two.txt").write_text("", encoding="utf-8")
    (tmp_path / "three.txt").write_text(" \n\t\n", encoding="utf-8")
    with gzip.open(tmp_path / "four.TXT.GZ", "wt", encoding="utf-8", newline="") as file:
        file.write("fourth\r\nline")
    inputs = [tmp_path / name for name in ("one.txt", "two.txt", "three.txt", "four.TXT.GZ")]
    assert tokenize(ranks, inputs, tmp_path / "a", "--val-tokens", 0, "--procs", 1) == 0
    assert names(tmp_path / "a") == ["text.tiktoken", "text_train_000001.bin"]
    assert decode(read(tmp_path / "a/text_train_000001.bin")) == ["first\n\n----\nstays", "fourth\nline"]

    arguments = ["--separator=----", "--val-tokens", 1, "--name", "cut", "--procs", 1]
    assert tokenize(ranks, inputs, tmp_path / "c", *arguments) == 0
    assert decode(read(tmp_path / "c/cut_val_000000.bin")) == ["first"]
    assert decode(read(tmp_path / "c/cut_train_000001.bin")) == ["stays", "fourth\nline"]


BOOK = "\n\n".join(
    f"Paragraph {number} of the book.\n" + "The whale swam on. " * (number % 9) for number in range(2000)
)


def test_one_long_text_is_cut_at_paragraphs(ranks, tmp_path, capsys):
    """A book in one file trains and validates, without a word about its documents."""
    (tmp_path / "book.txt").write_text(BOOK)
    assert tokenize(ranks, tmp_path / "book.txt", tmp_path / "out", "--procs", 1) == 0
    assert names(tmp_path / "out") == ["text.tiktoken", "text_train_000001.bin", "text_val_000000.bin"]

    validation = read(tmp_path / "out/text_val_000000.bin")
    training = read(tmp_path / "out/text_train_000001.bin")
    pieces = [*decode(validation), *decode(training)]
    assert "\n\n".join(pieces) == BOOK, "nothing is lost but the line ends at a cut"
    assert all(8192 <= len(piece) <= 16_384 for piece in pieces[:-1])
    assert all(piece.startswith("Paragraph ") for piece in pieces)
    share = len(validation) / (len(validation) + len(training))
    assert 0.1 <= share < 0.2, "a tenth validates, and the rest of its last piece"


@pytest.mark.fast
@pytest.mark.parametrize("documents, share", [(2, 100), (100, 5000), (300, 10_000), (2000, 20_000), (30_000, 200_000)])
def test_how_much_validates(monkeypatch, documents, share):
    """Of documents of 100 tokens:
    a tenth, enough for the smoke preset where that leaves as much, at most the speedrun's."""
    monkeypatch.setattr(fineweb, "VAL_TOKENS", 200_000)
    stream = [np.full(100, number % 7, "<u2") for number in range(documents)]
    found, same = fineweb.validation_share(iter(stream))
    assert found == share
    assert all(a is b for a, b in zip(same, stream, strict=True)), "all documents come through, in order"


@pytest.mark.fast
def test_cuts_where_there_is_no_paragraph():
    def cut(text, most=20):
        return list(fineweb.cut_long([text], most))

    assert cut("short") == ["short"]
    assert cut("\nas it was\n") == ["\nas it was\n"]
    assert cut("a line of words\nand a second line\nend") == ["a line of words", "and a second line", "end"]
    assert cut("many words in one line without end") == ["many words in one", " line without end"]
    assert cut("x" * 45) == ["x" * 20, "x" * 20, "x" * 5]
    assert cut("y" * 45, most=0) == ["y" * 45]
    assert cut("a b\nc", most=1) == ["a", " ", "b", "", "c"], "it comes to an end"


@pytest.mark.fast
def test_documents_too_long_for_two_shards(ranks, tmp_path, capsys):
    """The message names the cause, which is not too little text."""
    (tmp_path / "book.txt").write_text(BOOK)
    whole = ["--document-characters", 0, "--val-tokens", 1000, "--procs", 1]
    assert tokenize(ranks, tmp_path / "book.txt", tmp_path / "out", *whole) == 2
    error = capsys.readouterr().err
    assert "documents in the input: expected at least two: validation and training share none, found one, of" in error
    said = re.search(r"found one, of ([\d,]+) tokens; fix: --document-characters (\d+) or fewer", error)
    tokens, characters = said.groups()
    assert int(characters) == min(16_384, int(tokens.replace(",", ""))), "less than the text has"

    source = as_jsonl(tmp_path / "two.jsonl", ["a" * 10, "b" * 1000])
    assert tokenize(ranks, source, tmp_path / "out", *whole) == 2
    assert "after the one that completes the 1,000 tokens for validation, found none: all 2" in capsys.readouterr().err
    assert names(tmp_path / "out") == []


def test_a_folder_is_searched_for_texts(ranks, tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.TXT").write_text("second")
    (folder / "a.md").write_text("first")
    (folder / "inner/c.txt.gz").write_bytes(gzip.compress(b"third"))
    as_jsonl(folder / "inner/d.jsonl", ["fourth", "fifth"])
    for left_out in ("picture.png", "inner/e.bin", ".git/config.txt", ".hidden.txt"):
        (folder / left_out).write_text("left out")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")

    assert tokenize(ranks, folder, tmp_path / "out", "--val-tokens", 0, "--procs", 1) == 0
    assert decode(read(tmp_path / "out/text_train_000001.bin")) == ["first", "second", "third", "fourth", "fifth"]
    out = capsys.readouterr().out
    assert f"{folder}: 4 files, 2 of other kinds left out, 1 linked folder(s) not entered" in out
    assert "5 documents" in out

    assert tokenize(ranks, folder / ".git", tmp_path / "b", "--val-tokens", 0, "--procs", 1) == 0, (
        "if it is named itself"
    )
    (tmp_path / "empty").mkdir()
    assert tokenize(ranks, tmp_path / "empty", tmp_path / "b") == 2
    assert (
        "empty: expected files that end in .txt, .md, .jsonl, .ndjson, .parquet, found none among 0"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("redirection", ["| true", ">/dev/full", ">&-"])
def test_a_closed_or_full_stdout_ends_nothing(ranks, tmp_path, redirection):
    source = as_jsonl(tmp_path / "good.jsonl", TEXTS)
    command = [sys.executable, ROOT / "data/fineweb.py", "tokenize", source, "--out", tmp_path / "out"]
    options = ["--encoding", ranks, "--val-tokens", "100", "--shard-tokens", "2000", "--procs", "1"]
    script = f'"$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script, "bash", *command, *options], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "out").glob("*_train_*.bin"))) > 1


@pytest.mark.parametrize("inputs", [["own.txt", "./own.txt"], ["own.txt", "."], ["linked.txt", "own.txt"]])
def test_an_input_named_twice_is_refused(tmp_path, monkeypatch, inputs):
    """Its text would be in the validation and in the training."""
    monkeypatch.chdir(tmp_path)
    Path("own.txt").touch()
    if "linked.txt" in inputs:
        Path("linked.txt").symlink_to("own.txt")
    said = f"own.txt: expected each input once, found {tmp_path}/own.txt twice; fix: "
    with pytest.raises(fineweb.DataError, match=said):
        fineweb.find_inputs(map(Path, inputs))


def test_parquet(ranks, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"content": TEXTS[:5] + [None, ""] + TEXTS[5:9], "number": list(range(11))})
    parquet.write_table(table, tmp_path / "a.parquet")
    options = ["--val-tokens", 0, "--procs", 1]
    assert tokenize(ranks, tmp_path / "a.parquet", tmp_path / "out", "--key", "content", *options) == 0
    assert decode(read(tmp_path / "out/text_train_000001.bin")) == TEXTS[:9]
    assert tokenize(ranks, tmp_path / "a.parquet", tmp_path / "b", *options) == 2
    assert 'expected a column "text", found content, number' in capsys.readouterr().err
    assert tokenize(ranks, tmp_path / "a.parquet", tmp_path / "b", "--key", "number", *options) == 2
    assert 'expected text in column "number", found int' in capsys.readouterr().err
    (tmp_path / "b.parquet").write_bytes(b"no parquet at all")
    assert tokenize(ranks, tmp_path / "b.parquet", tmp_path / "b", *options) == 2
    assert "b.parquet: expected a parquet file, found" in capsys.readouterr().err


def test_parquet_without_pyarrow(ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    assert tokenize(ranks, tmp_path / "a.parquet", tmp_path / "out", "--procs", 1) == 2
    assert "expected pyarrow, to read parquet, found not installed; fix: pip install pyarrow" in capsys.readouterr().err


@pytest.mark.fast
def test_bad_input_leaves_nothing(ranks, tmp_path, capsys):
    good = as_jsonl(tmp_path / "good.jsonl", TEXTS)
    packed = gzip.compress("".join(TEXTS).encode())
    contents = {
        "broken.jsonl": (
            b'{"text": "a"}\n\n{"text": \n',
            "broken.jsonl line 3: expected an object with the text under",
        ),
        "key.jsonl": (b'{"body": "a"}\n', "key.jsonl line 1: expected an object"),
        "list.jsonl": (b"[1, 2]\n", "list.jsonl line 1: expected an object"),
        "number.jsonl": (b'{"text": 5}\n', 'number.jsonl line 1: expected text under "text", found int'),
        "latin1.txt": ("caf\xe9 noir".encode("latin-1"), "latin1.txt: expected UTF-8 text, found byte 0xe9"),
        "cut.txt.gz": (gzip.compress(b"a" * 1000)[:-9], "cut.txt.gz: expected a complete gzip file"),
        "no.txt.gz": (b"plain", "no.txt.gz: expected a complete gzip file"),
        "hole.txt.gz": (
            packed[:30] + bytes(300) + packed[330:],
            "hole.txt.gz: expected a complete gzip file",
        ),
    }
    out = tmp_path / "out"
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        sizes = ["--val-tokens", 100, "--shard-tokens", 1000, "--procs", 1]
        assert tokenize(ranks, [good, tmp_path / name], out, *sizes) == 2, name
        assert message in capsys.readouterr().err
        assert names(out) == [], name  # neither a shard nor a part, although several had been filled
    assert tokenize(ranks, tmp_path / "missing.txt", out) == 2
    assert "missing.txt: expected a file or a folder, found nothing there" in capsys.readouterr().err
    assert tokenize(ranks, good, out, "--val-tokens", "10,485,760", "--procs", 1) == 2
    assert "expected more than the 10,485,760 for validation, found 19," in capsys.readouterr().err
    (out / "text_train_000001.bin").write_bytes(b"mine")
    for name in ("text", "zzz"):  # a training reads one corpus a folder
        assert tokenize(ranks, good, out, "--val-tokens", 0, "--procs", 1, "--name", name) == 2
        assert "expected no shards, found text_train_000001.bin" in capsys.readouterr().err
    assert (out / "text_train_000001.bin").read_bytes() == b"mine"


def test_the_last_validation_token_has_a_target(tmp_path):
    """A preset's own number is what people give as --val-tokens."""
    writer = fineweb.ShardWriter(tmp_path, "text", 8, 100)
    for _ in range(4):
        writer.add(np.full(4, BOS, "<u2"))
    writer.finish()
    assert len(read(tmp_path / "text_val_000000.bin")) == 12


@pytest.mark.parametrize("name, text", [("a.txt", "hello\r\n"), ("a.jsonl", '{"text": "hello"}\n')])
def test_a_byte_order_mark_is_no_text(tmp_path, name, text):
    """As Windows editors write one."""
    (tmp_path / name).write_text(text, encoding="utf-8-sig", newline="")
    assert list(fineweb.read_documents([tmp_path / name], None, "text")) == ["hello"]


def test_the_ranks_beside_shards_are_theirs(tmp_path):
    """Those of shards that somebody has deleted would be taken for the tokenizer of new ones. Nobody's are lost."""
    beside = tmp_path / "text.tiktoken"
    for number in range(2):
        writer = fineweb.ShardWriter(tmp_path, "text", 0, 100, b"ranks")
        writer.add(np.array([BOS, number], "<u2"))
        writer.finish()
        assert beside.read_bytes() == b"ranks"
        assert names(tmp_path) == ["text.tiktoken", "text_train_000001.bin"]
        (tmp_path / "text_train_000001.bin").unlink()

    for name, ranks in (("text", None), ("text", b"others"), ("more", None)):
        with pytest.raises(fineweb.DataError, match="expected .* ranks .*, found text.tiktoken; fix: move that file"):
            fineweb.ShardWriter(tmp_path, name, 0, 100, ranks)
        assert beside.read_bytes() == b"ranks"


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Else its texts would be left out without a word."""
    def scandir(path):
        if os.fspath(path).endswith(("closed", ".hidden")):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    scan = os.scandir
    for name in ("closed", "open", "open/.hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "open/a.txt").touch()
    monkeypatch.setattr(os, "scandir", scandir)
    fineweb.refuse_unreadable(tmp_path / "open")
    with pytest.raises(fineweb.DataError, match="closed: expected a folder that can be read, found Permission denied"):
        fineweb.find_inputs([tmp_path])


def test_packed_parquet_is_left_out(tmp_path):
    for name in ("a.txt", "b.parquet.gz", "c.jsonl.gz"):
        (tmp_path / name).touch()
    assert [path.name for path in fineweb.find_inputs([tmp_path])] == ["a.txt", "c.jsonl.gz"]


def test_two_tokenizers_in_one_folder(tmp_path, monkeypatch):
    """The second to finish gives way; neither writes into the other's shards."""
    writers = []
    for process in (1, 2):
        monkeypatch.setattr(fineweb.os, "getpid", lambda process=process: process)
        writers.append(fineweb.ShardWriter(tmp_path, "text", 0, 100))
        writers[-1].add(np.array([BOS, process], "<u2"))
    writers[1].finish()
    monkeypatch.setattr(fineweb.os, "getpid", lambda: 1)
    writers[0].add(np.array([BOS, 7], "<u2"))
    with pytest.raises(fineweb.DataError, match="expected no shards, found text_train_000001.bin"):
        writers[0].finish()
    writers[0].abort()
    assert names(tmp_path) == ["text_train_000001.bin"]
    assert read(tmp_path / "text_train_000001.bin").tolist() == [BOS, 2]


def test_a_full_disk_leaves_no_parts(tmp_path):
    writer = fineweb.ShardWriter(tmp_path, "text", 0, 3)
    for token in (1, 2):
        writer.add(np.array([BOS, token], "<u2"))
    descriptor = writer.file.fileno()
    os.close(descriptor)  # what is still buffered cannot be written
    writer.abort()
    assert names(tmp_path) == []


def test_bad_encoding(ranks, tmp_path, monkeypatch, capsys):
    good = as_jsonl(tmp_path / "good.jsonl", TEXTS)
    for lines, message in [
        (["no ranks here"], "bad.tiktoken line 1: expected base64 and a rank"),
        (
            ranks.read_text().splitlines()[1:],
            "expected all 256 bytes, different ranks from 0 to 50255, found 266 tokens",
        ),
        ([*ranks.read_text().splitlines(), "YWFh 50256"], "found 268 tokens, 268 ranks, the highest 50256"),
        ([*ranks.read_text().splitlines(), "YWFh 5"], "found 268 tokens, 267 ranks"),
    ]:
        (tmp_path / "bad.tiktoken").write_text("\n".join(lines))
        assert tokenize(tmp_path / "bad.tiktoken", good, tmp_path / "out", "--procs", 2) == 2
        assert message in capsys.readouterr().err

    import tiktoken

    def offline(_):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    assert tokenize("gpt2", good, tmp_path / "out") == 2
    assert "fix: git checkout data/sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["fetch", "--shards", "104"],
        ["fetch", "--shards", "x"],
        ["tokenize", "a"],
        [],
        *(
            ["tokenize", "a", "--out", "b", "--name", name]
            for name in ("a[b]", "my_train_set", "x_val", "../x", "")
        ),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        fineweb.main(arguments)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize("command", [["data/fineweb.py", "fetch"], ["records", "verify"]])
def test_another_python_without_the_packages(command):
    """As after run.sh has made .venv: -S hides what is installed. One line, not a traceback."""
    done = subprocess.run([sys.executable, "-S", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "numpy: expected it installed; fix: ./run.sh --check, then . .venv/bin/activate" in done.stderr


def test_import_is_light():
    code = "import sys, fineweb, make_sample; "
    code += "print({'huggingface_hub', 'tiktoken', 'pyarrow', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "data", capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    assert done.stderr == ""


# ---------------------------------------------------------------------------------------------------------------------
# data/sample


@pytest.mark.fast
def test_sample(capsys):
    folder = ROOT / "data/sample"
    assert fineweb.main(["verify", "--dir", str(folder)]) == 0
    paths = sorted(folder.glob("*.bin"))
    assert [path.name for path in paths] == ["sample_train_000001.bin", "sample_val_000000.bin"]
    assert sorted(fineweb.read_sums(folder)) == [path.name for path in paths]  # so verify compared them
    training, validation = (read(path) for path in paths)
    assert 1_000_000 < len(training) + len(validation) < 2_100_000
    assert 100_000 <= len(validation) <= 150_000
    assert sum(path.stat().st_size for path in paths) <= 4_000_000
    for tokens in training, validation:
        assert tokens[0] == BOS
        assert np.diff(np.flatnonzero(tokens == BOS), append=len(tokens)).min() >= 30
    assert "public domain" in (folder / "LICENSE.md").read_text(encoding="utf-8")


def r_object(texts):
    """An R character vector as a package's lazy-load file holds it."""
    data = b"X\n" + struct.pack(">4i", 3, 262657, 197888, 5) + b"UTF-8" + struct.pack(">ii", 16, len(texts))
    for text in texts:
        data += struct.pack(">ii", 0x40009, len(text.encode())) + text.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_make_sample_reads_its_sources(tmp_path):
    (tmp_path / "Rdata.rdb").write_bytes(r_object(["a", "", "é"]) + r_object(["b\r\nc"]))
    assert list(make_sample.r_strings(tmp_path / "Rdata.rdb")) == [["a", "", "é"], ["b\r\nc"]]

    text = "about\n" + "word\n n.\n\n    A {cross\n    } reference.\n\n    B\n"
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d.index").write_text("00-database-info\tA\tG\nword\tG\tu\nother\tG\tu\n")
    entries = [make_sample.entry(entry) for entry in make_sample.dict_entries(tmp_path / "d")]
    assert entries == ["word n.\n\nA {cross} reference."]


def test_make_sample_cuts_books_between_paragraphs():
    lines = "The quick brown fox jumps over the lazy dog again and\nagain, until _dusk_."
    book = "\n\n".join(
        ["CHAPTER I", *[lines] * 40, "* * *", "    Roses\n    and violets", "Chapter 2", lines, "THE END"]
    )
    cut = list(make_sample.passages(book))
    prose = lines.replace("\n", " ").replace("_", "")
    assert cut[-1] == prose
    assert cut[-2].endswith(f"{prose}\n\nRoses\nand violets")
    assert "\n\n".join(cut).count(prose) == 41
    assert "CHAPTER" not in "".join(cut).upper()
    assert "*" not in "".join(cut)
    assert [len(passage) > 1500 for passage in cut] == [True, False, False]
