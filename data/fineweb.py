"""Fetch, check and make the token shards that train_gpt.py reads.

    python data/fineweb.py fetch [--shards 9] [--dir DIR]      FineWeb, already tokenised, from the Hugging Face hub
    python data/fineweb.py verify [--dir DIR]                  every shard of a folder: header, tokens, SHA-256
    python data/fineweb.py tokenize INPUT... --out DIR         text, JSON lines, parquet, folders of them -> shards

A shard is a 1024-byte header, 256 little-endian int32 [20240520, 1, token count, 0 ...], then that many little-endian
uint16 tokens of the GPT-2 BPE, with 50256 before each document. data/README.md says more.

Exit codes: 0 all is well; 2 usage or data, with one line that says what, expected, found and the fix; 130 interrupted.
Importing does nothing. huggingface_hub, tiktoken and pyarrow are imported only where they are used.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

INSTALL = ("expected it installed; fix: ./run.sh --check, then . .venv/bin/activate if it made that, "
           "or pip install -r requirements.txt")

try:
    import numpy as np
except ImportError:  # in another Python than run.sh uses, the first that a newcomer would see
    if __name__ != "__main__":
        raise
    print(f"error: numpy: {INSTALL}", file=sys.stderr)
    sys.exit(2)

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4
VOCAB_SIZE = 50257  # GPT-2: 50256 byte pairs and one special token
BOS = 50256  # <|endoftext|>, used as the first token of a document

DATASET = "kjj0/fineweb10B-gpt2"
TRAIN_SHARDS = 103  # of about 100 M tokens (200 MB) each
DEFAULT_FOLDER = Path(__file__).resolve().parent / "fineweb10B"
# Longer documents are cut. This is about 4,000 tokens of English, more than a training reads in one piece: the caps of
# its stages end at 3,072.
DOCUMENT_CHARACTERS = 16_384
VAL_TOKENS = 10_485_760  # what the speedrun validates on; of a text shorter than ten times as many, a tenth
LEAST_VAL_TOKENS = 10_000  # the smoke preset validates on 8,192
TEXTS = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")  # what a folder is searched for, also with .gz but for parquet
# the two files of GPT-2's, under the names that tiktoken gives them
VOCABULARY = Path(__file__).resolve().parent / "sample"
SUMS = "SHA256SUMS"  # in the format of sha256sum, so that `sha256sum -c SHA256SUMS` works too


class DataError(Exception):
    """One line for the person at the terminal: what is wrong, what was expected and found, how to fix it."""

    def __init__(self, what, expected, found, fix):
        super().__init__(f"{what}: expected {expected}, found {found}; fix: {fix}")
        self.parts = what, expected, found, fix


# ---------------------------------------------------------------------------------------------------------------------
# What is said, as train_gpt.py says it, which needs torch


def open_streams() -> None:
    """In the place of standard streams that a shell has closed (`>&-`), some that lead nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def say(text: object, stream: TextIO | None = None) -> None:
    """A line, on stdout if no other stream is given, with what its encoding lacks escaped.

    Where nobody reads any more, or the disk is full, the stream leads nowhere from then on: the work goes on."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    line = f"{text}\n".encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(line)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def shard_header(tokens: int) -> bytes:
    """The 1024 bytes in front of `tokens` tokens."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


def open_shard(path: Path) -> BinaryIO:
    """A shard for reading. A pipe is refused before it is opened: that would wait for somebody who writes into it."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open() says of a folder what it is
        fix = "remove it from the folder, then fetch or tokenize again"
        raise DataError(path, "a file", "a pipe, socket or device", fix)
    return open(path, "rb")


def read_header(path: Path) -> int:
    """Token count of a shard whose header and size agree. Nothing is allocated by what the header claims.

    Raises DataError for a short file, another magic number or version, or a size that is not 1024 + 2 * count bytes.
    """
    again = f"delete {path} and fetch or tokenize it again"
    with open_shard(path) as file:
        raw = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path} header", f"{HEADER_BYTES} bytes", f"{len(raw)}", again)
    magic, version, tokens = (int(word) for word in np.frombuffer(raw, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataError(f"{path} magic number", MAGIC, magic, "this is not a token shard; remove it from the folder")
    if version != VERSION:
        raise DataError(f"{path} version", VERSION, version, "tokenize the text again with this repository's tool")
    if tokens < 1:
        raise DataError(f"{path} size", "a token count above 0", tokens, again)
    whole = HEADER_BYTES + 2 * tokens
    if size != whole:
        raise DataError(f"{path} size", f"{whole:,} bytes for {tokens:,} tokens", f"{size:,} bytes", again)
    return tokens


@dataclass(frozen=True)
class Shard:
    """What reading a whole shard has shown."""

    tokens: int
    documents: int  # = number of 50256s
    sha256: str


def scan_shard(path: Path) -> Shard:
    """Reads all of a shard once, 16 MiB at a time, and returns what is in it.

    Raises DataError where read_header does, for a token id that GPT-2 does not have, and for a shard without a document
    start. A shard may begin in the middle of a document, as FineWeb's do: its publisher cut them at a fixed length.
    """
    tokens = read_header(path)
    digest = hashlib.sha256()
    documents = 0
    position = 0
    with open(path, "rb") as file:
        digest.update(file.read(HEADER_BYTES))
        while chunk := file.read(1 << 24):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype="<u2")
            if ids.max() >= VOCAB_SIZE:
                worst = int(np.argmax(ids >= VOCAB_SIZE))
                found = f"{ids[worst]} at position {position + worst:,}"
                raise DataError(f"{path} token id", f"below {VOCAB_SIZE}", found, "tokenize with the GPT-2 BPE")
            documents += int(np.count_nonzero(ids == BOS))
            position += len(ids)
    if not documents:
        fix = "tokenize the text again with this tool"
        raise DataError(f"{path} documents", f"token {BOS} before each", "none", fix)
    return Shard(tokens, documents, digest.hexdigest())


def sha256_of(path: Path) -> str:
    with open_shard(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_sums(folder: Path) -> dict[str, str]:
    """{file name: SHA-256} as written beside the shards; empty where there is no such file.

    Raises DataError for a line of another kind: what it names would pass for a shard that was compared."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    sums = {}
    for number, line in enumerate(lines, 1):
        if match := re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line):
            sums[match[2]] = match[1].lower()
        elif line.strip():
            what = f"{folder / SUMS} line {number}"
            raise DataError(what, "64 hexadecimal digits and a name", repr(line[:80]), "repair or remove the line")
    return sums


def write_sums(folder: Path, sums: dict[str, str]) -> None:
    part = folder / f"{SUMS}.part"
    part.write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)), encoding="utf-8")
    part.replace(folder / SUMS)


# ---------------------------------------------------------------------------------------------------------------------
# fetch
#
# huggingface_hub finds the file, follows redirects, retries and continues a broken stream, but what it downloads goes
# to a file that it deletes when the process ends (hf_hub_download of 1.33 and 2.4: no resume across runs). So we hand
# its http_get a file of our own, NAME.part, which stays. A stale or damaged .part cannot hurt: the SHA-256 decides.


@contextlib.contextmanager
def hub_errors(name: str, dataset: str = DATASET) -> Iterator[None]:
    """Turns what huggingface_hub and the disk raise into a DataError."""
    # HTTPError is the base of the HTTP client's errors (httpx or httpx2, by version); the hub's own ones are OSErrors.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    again = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then run the same command: it resumes"
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        fix = f"{dataset} or HF_ENDPOINT is wrong, or the file has gone" if status in (401, 404) else again
        raise DataError(f"{name} on the hub", "HTTP 200", f"HTTP {status} from {error.response.url}", fix) from error
    except (HTTPError, OSError, ValueError) as error:  # the last one of an HF_ENDPOINT that is no address
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space and run the same command: it resumes"
            raise DataError(f"disk space for {name}", "enough", "disk full", fix) from error
        if getattr(error, "filename", None):  # the local folder, not the hub: main says it better
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{name} on the hub", "an answer", f"{type(error).__name__} ({reason})", again) from error


def find_on_hub(name: str, dataset: str = DATASET) -> tuple[str, int, str]:
    """(address, bytes, SHA-256) of a large file: one HEAD request.
    The hub's entity tag of such a file is its SHA-256."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(dataset, name, repo_type="dataset")
    with hub_errors(name, dataset):
        # token=False: the data set is public, and an expired token would be refused where none is needed
        metadata = get_hf_file_metadata(url, token=False)
    if not re.fullmatch(r"[0-9a-f]{64}", metadata.etag or "") or not metadata.size:
        found = f"etag {metadata.etag}, size {metadata.size}"
        raise DataError(f"{name} on the hub", "a SHA-256 and a size", found, "unset HF_ENDPOINT, or use another mirror")
    return url, metadata.size, metadata.etag


def download(part: Path, name: str, url: str, size: int, sha256: str) -> None:
    """Fills `part` until its SHA-256 is right:
    continues what an earlier run left, and starts over once if that was bad.

    Raises DataError when the disk is too small, the network fails (then `part` stays, for the next run) or the complete
    file has another hash (then `part` is deleted).
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=False) | {"Accept-Encoding": "identity"}  # byte ranges count uncompressed bytes
    while True:
        with hub_errors(name), open(part, "ab") as file:
            lock(file, name)
            have = file.tell() if file.tell() <= size else 0
            file.truncate(have)
            free = shutil.disk_usage(part.parent).free
            if free < size - have:
                fix = f"free some space or choose another --dir than {part.parent}"
                raise DataError(f"disk space for {name}", f"{size - have:,} bytes", f"{free:,} free", fix)
            http_get(url, file, resume_size=have, headers=headers, expected_size=size, displayed_filename=name)
            file.flush()
            os.fsync(file.fileno())
        found = sha256_of(part)
        if found == sha256:
            return
        part.unlink()
        if not have:
            fix = "run the same command again; if it stays, the mirror or a proxy changes the file"
            raise DataError(f"{name} SHA-256", sha256, found, fix)
        say(f"{name}: the part left by an earlier run does not fit, starting over")


def lock(file: BinaryIO, name: str) -> None:
    """Keeps two fetches from appending to one file. A file system without locks is let through: the hash decides."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fix = "wait for it, or stop it"
        raise DataError(f"{name} download", "one at a time", "another fetch in the same folder", fix) from None
    except OSError:
        pass


def fetch(folder: Path, shards: int) -> None:
    """Makes `folder` hold the validation shard and the first `shards` training shards of FineWeb, verified.

    A file whose SHA-256 is already right is left alone; where SHA256SUMS knows it, without asking the network.
    Raises DataError; what was finished before stays, and a shard has its final name only when everything is right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = read_sums(folder)
    tokens = 0
    names = ["fineweb_val_000000.bin"] + [f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1)]
    for name in names:
        path = folder / name
        here = sha256_of(path) if path.exists() else None
        if here and here == sums.get(name):
            say(f"{name}: already here, SHA-256 right")
        else:
            url, size, sha256 = find_on_hub(name)
            if here == sha256:
                say(f"{name}: already here, SHA-256 as on the hub")
            else:
                why = "another SHA-256 than on the hub, " if here else ""
                say(f"{name}: {why}fetching {size:,} bytes")
                part = folder / f"{name}.part"
                download(part, name, url, size, sha256)
                read_header(part)
                part.replace(path)
            sums[name] = sha256
            write_sums(folder, sums)
        tokens += read_header(path)
    say(f"{len(names)} shards, {tokens:,} tokens in {folder}")


# ---------------------------------------------------------------------------------------------------------------------
# verify


def verify_shard(path: Path, stated: str | None) -> Shard:
    """What is in a shard, whose SHA-256 is to be as `stated` where that is known. Raises DataError."""
    if stated and not path.exists():
        fix = "fetch it again, or remove its line if you do not want it"
        raise DataError(path, f"a shard, {SUMS} names it", "none", fix)
    try:
        shard = scan_shard(path)
    except OSError as error:
        fix = "see to its permissions or the disk, or fetch it again"
        raise DataError(path, "a file that can be read", error.strerror, fix) from None
    if stated and shard.sha256 != stated:
        fix = f"fetch it again, or remove its line from {SUMS} if you changed it on purpose"
        raise DataError(f"{path} SHA-256", f"{stated} as in {SUMS}", shard.sha256, fix)
    return shard


def missing_shards(names: Iterable[str]) -> Iterator[DataError]:
    """An error for each text whose training shards are not 000001, 000002 and so on:
    a training would skip tokens unseen."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+)_train_(\d{6})\.bin", name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
        elif "_train_" in name:
            fix = "rename it: shards have an order"
            yield DataError(name, "six digits after _train_, as in 000001", "others", fix)
    for text, found in sorted(numbers.items()):
        absent = sorted(set(range(1, max(found) + 1)) - found)
        if absent:
            expected = f"{text}_train_000001.bin to {max(found):06d}"
            listed = ", ".join(f"{number:06d}" for number in absent[:5]) + (" ..." if len(absent) > 5 else "")
            fix = "fetch or tokenize those too, or rename what is here"
            yield DataError("training shards", expected, f"all but {listed}", fix)


def verify(folder: Path) -> None:
    """Checks every *.bin in `folder`, one line each: header, tokens, SHA256SUMS where present, and that none is there
    twice or missing.

    Raises DataError at the end when any shard was bad, so that every shard is reported.
    """
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        fix = "python data/fineweb.py fetch, or tokenize, first"
        raise DataError(f"shards in {folder}", "*.bin files", "none", fix)
    sums = read_sums(folder)
    paths += [folder / name for name in sorted(sums) if folder / name not in paths]
    first: dict[str, str] = {}  # SHA-256 -> the shard that has it
    tokens = good = bad = 0
    for path in paths:
        try:
            shard = verify_shard(path, sums.get(path.name))
            if (other := first.setdefault(shard.sha256, path.name)) != path.name:
                fix = "remove one of the two: a training would read its tokens twice"
                raise DataError(path, "another shard than the others", f"the same as {other}", fix)
        except DataError as error:
            bad += 1
            say(f"error: {error}")
            continue
        good += 1
        tokens += shard.tokens
        say(f"{path.name}  {shard.tokens:,} tokens  {shard.documents:,} documents  sha256 {shard.sha256}")
    say(f"{good} of {len(paths)} shards good, {tokens:,} tokens")
    for error in missing_shards(path.name for path in paths):
        bad += 1
        say(f"error: {error}")
    if bad:
        raise DataError(folder, "only good shards", f"{bad} bad", "see the lines above")


# ---------------------------------------------------------------------------------------------------------------------
# tokenize: documents in


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds: .jsonl of a.jsonl and of a.jsonl.gz."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def find_inputs(paths: Iterable[Path]) -> list[Path]:
    """The files that are named, and of folders those of the kinds in TEXTS,
    sorted by path, but for hidden ones. Raises DataError."""
    found = []
    for path in paths:
        if path.is_file():
            found.append(path)
            continue
        if not path.is_dir():
            what = "a pipe, socket or device" if path.exists() else "nothing there"
            raise DataError(path, "a file or a folder", what, "check the path")
        refuse_unreadable(path)
        files = [inner for inner in sorted(path.rglob("*")) if inner.is_file() and not is_hidden(inner, path)]
        texts = [inner for inner in files if kind_of(inner) in TEXTS and not inner.name.endswith(".parquet.gz")]
        if not texts:
            expected = f"files that end in {', '.join(TEXTS)}"
            raise DataError(path, expected, f"none among {len(files)}", "name the files themselves")
        links = sum(inner.is_symlink() and inner.is_dir() for inner in path.rglob("*"))
        linked = f", {links} linked folder(s) not entered" if links else ""
        say(f"{path}: {len(texts)} files, {len(files) - len(texts)} of other kinds left out{linked}")
        found += texts
    refuse_twice(found)
    return found


def refuse_unreadable(folder: Path) -> None:
    """A folder that may not be read would leave its texts out without a word. Of hidden ones nothing is read."""
    def fail(error: OSError) -> None:
        raise DataError(Path(error.filename), "a folder that can be read", error.strerror, "permit it, or name others")

    for _, inner, _ in os.walk(folder, onerror=fail):
        inner[:] = [name for name in inner if not name.startswith(".")]


def refuse_twice(paths: Iterable[Path]) -> None:
    """A text that is read twice would validate on what was trained on."""
    seen = set()
    for path in paths:
        file = path.resolve()
        if file in seen:
            raise DataError(path, "each input once", f"{file} twice", "name it once, and no link to it beside it")
        seen.add(file)


def cut_long(documents: Iterable[str], most: int) -> Iterator[str]:
    """Documents of at most `most` characters; 0 leaves all whole.

    A cut is made at the last end of a paragraph in the second half of what is allowed; without one at the end of a
    line, then between words, then anywhere. The line ends at a cut are dropped, everything else stays.
    """
    for text in documents:
        start = 0
        while most and len(text) - start > most:
            limit = start + most
            ends = (text.rfind(border, start + most // 2, limit) for border in ("\n\n", "\n", " "))
            end = next((end for end in ends if end > start), limit)
            yield text[start:end].strip("\n")
            start = end
        yield text[start:].strip("\n") if start else text


def read_documents(paths: Iterable[Path], separator: str | None, key: str) -> Iterator[str]:
    """The documents of the input files in order. What a file holds follows from its name:

    *.jsonl, *.ndjson (also .gz): one JSON object a line, the text under `key`; *.parquet: the column `key`;
    all else (also .gz): UTF-8 text, one document, or several with a line equal to `separator` between them.
    """
    for path in paths:
        kind = kind_of(path)
        try:
            if kind == ".parquet":
                yield from read_parquet(path, key)
                continue
            with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
                json_lines = kind in (".jsonl", ".ndjson")
                yield from read_json_lines(file, path, key) if json_lines else read_text(file, separator)
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x}"
            raise DataError(f"{path}", "UTF-8 text", found, "convert it first, for example with iconv") from None
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(f"{path}", "a complete gzip file", error, "compress or copy it again") from None


def read_text(lines: Iterable[str], separator: str | None) -> Iterator[str]:
    """Documents without the empty lines around them: those belong to the file, not to the text."""
    document: list[str] = []
    for line in lines:
        if separator is not None and line.rstrip("\n") == separator:
            yield "".join(document).strip("\n")
            document = []
        else:
            document.append(line)
    yield "".join(document).strip("\n")


def read_json_lines(lines: Iterable[str], path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            found = f"{type(error).__name__} ({error})"
            expected = f'an object with the text under "{key}"'
            fix = "correct the line, or name the key with --key"
            raise DataError(f"{path} line {number}", expected, found, fix) from None
        if not isinstance(text, str):
            raise DataError(f"{path} line {number}", f'text under "{key}"', type(text).__name__, "name another --key")
        yield text


def read_parquet(path: Path, key: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path}", "pyarrow, to read parquet", "not installed", "pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as table:
            if key not in table.schema_arrow.names:
                found = ", ".join(table.schema_arrow.names)
                raise DataError(f"{path}", f'a column "{key}"', found, "name the column with --key")
            for batch in table.iter_batches(batch_size=1024, columns=[key]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        fix = "name another column with --key"
                        raise DataError(f"{path}", f'text in column "{key}"', type(text).__name__, fix)
                    yield text or ""
    except (ArrowException, OSError) as error:  # the latter for damaged pages too
        raise DataError(f"{path}", "a parquet file", str(error).splitlines()[0], "write or copy it again") from None


# ---------------------------------------------------------------------------------------------------------------------
# tokenize: text to tokens, in several processes

encode = None  # text -> list of token ids; set once in each process by start_encoder


def read_ranks(spec: str) -> bytes:
    """A file of merge ranks. Raises DataError, OSError."""
    path = Path(spec)
    if path.exists() and not path.is_file():  # to read a pipe would wait for ever
        raise DataError(path, "a file of merge ranks", "a folder, pipe, socket or device", "name another")
    return path.read_bytes()


def load_encoding(spec: str):
    """tiktoken's "gpt2", or an encoding with GPT-2's word pattern and the merge ranks of the file `spec`.

    A ranks file has a line "<base64 of the bytes> <rank>" for each token, as tiktoken's *.tiktoken files do.
    """
    import tiktoken

    if spec == "gpt2":
        # tiktoken reads its two files from here, where it would download them, and compares their SHA-256.
        cache = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = str(VOCABULARY)
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            fix = "git checkout data/sample, or give a ranks file with --encoding"
            raise DataError("GPT-2 vocabulary", f"its two files in {VOCABULARY}", type(error).__name__, fix) from error
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if cache is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = cache
    from tiktoken_ext.openai_public import r50k_pat_str  # GPT-2's pattern under the name of its successor's

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_ranks(spec).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            fix = "give a *.tiktoken file"
            raise DataError(f"{spec} line {number}", "base64 and a rank", repr(line[:40]), fix) from None
    different = set(ranks.values())
    complete = all(bytes([byte]) in ranks for byte in range(256))
    if not complete or not all(0 <= rank < BOS for rank in different) or len(different) < len(ranks):
        found = f"{len(ranks)} tokens, {len(different)} ranks, the highest {max(different, default=None)}"
        expected = f"all 256 bytes, different ranks from 0 to {BOS - 1}"
        raise DataError(spec, expected, found, "use ranks of the GPT-2 kind")
    special = {"<|endoftext|>": BOS}
    return tiktoken.Encoding("ranks", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)


def start_encoder(spec: str) -> None:
    global encode
    encode = load_encoding(spec).encode_ordinary  # "<|endoftext|>" inside a text is text, never a document boundary


@contextlib.contextmanager
def silent_panic() -> Iterator[None]:
    """Descriptor 2 leads nowhere meanwhile: where tiktoken panics, Rust writes lines and a stack there by itself."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def encode_text(encode: Callable[[str], list[int]], text: str, fix: str = "a shorter one") -> list[int]:
    """Tokens of a text. Raises DataError where tiktoken panics, which is no Exception: on a million blanks before a
    word, as it tries every number of them."""
    if len(text) <= DOCUMENT_CHARACTERS:
        return encode(text)
    try:
        with silent_panic():
            return encode(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a module that cannot be imported
            raise
        found = f"{len(text):,} characters that it cannot"
    raise DataError("document", "a text that tiktoken can split", found, fix)


def encode_batch(texts: list[str]) -> list[np.ndarray]:
    """uint16 tokens of each document, 50256 first."""
    fix = f"--document-characters {DOCUMENT_CHARACTERS}"
    return [np.array([BOS, *encode_text(encode, text, fix)], dtype="<u2") for text in texts]


def make_batches(documents: Iterable[str], characters: int = 1 << 18) -> Iterator[list[str]]:
    """Lists of documents, large enough that passing them between processes costs little.
    Blank documents are left out."""
    batch, size = [], 0
    for text in documents:
        if not text.strip():
            continue
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes that start meanwhile never hear it, not even while they import: it is the parent's to handle."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve(pipe, spec: str) -> None:
    """A worker process: batches in, tokens or the parts of a DataError out, until the parent closes the pipe or is
    gone."""
    open_streams()
    start_encoder(spec)
    with contextlib.suppress(EOFError, OSError):  # the latter if it is killed in the midst of a message
        while True:
            texts = pipe.recv()
            try:
                answer = encode_batch(texts)
            except DataError as error:
                answer = error.parts
            pipe.send(answer)


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        fix = "use fewer --procs, or split very long documents"
        raise DataError("tokenizer process", "an answer", "killed, perhaps out of memory", fix) from None


def answer_of(pipe) -> list[np.ndarray]:
    """A worker's answer. Raises DataError if it is one, or none comes."""
    with worker_errors():
        answer = pipe.recv()
    if isinstance(answer, tuple):
        raise DataError(*answer)
    return answer


def encode_documents(documents: Iterable[str], spec: str, processes: int) -> Iterator[np.ndarray]:
    """Tokens of every document in input order, whatever the number of processes.

    Each worker has a pipe and at most one batch, and is asked in turn: memory stays bounded (Pool.imap would read all
    of the input ahead), a killed worker is an end of file (a Pool would wait for it), and Ctrl-C meets no helper
    thread.
    """
    start_encoder(spec)  # with several processes only for its errors, which are readable here
    if processes == 1:
        for batch in make_batches(documents):
            yield from encode_batch(batch)
        return
    spawn = multiprocessing.get_context("spawn")  # the same on every Python and platform, and safe beside threads
    idle = deque()
    busy = deque()
    workers = []
    try:
        with ctrl_c_ignored():
            for _ in range(processes):
                ours, theirs = spawn.Pipe()
                worker = spawn.Process(target=serve, args=(theirs, spec), daemon=True)
                worker.start()
                workers.append(worker)
                theirs.close()
                idle.append(ours)
        for batch in make_batches(documents):
            if idle:
                pipe, done = idle.popleft(), []
            else:
                pipe = busy.popleft()
                done = answer_of(pipe)
            with worker_errors():
                pipe.send(batch)
            busy.append(pipe)
            yield from done
        while busy:
            yield from answer_of(busy.popleft())
    finally:
        for worker in workers:
            worker.terminate()


# ---------------------------------------------------------------------------------------------------------------------
# tokenize: tokens out


class ShardWriter:
    """Cuts a stream of documents into NAME_val_000000.bin and NAME_train_000001.bin, 000002 ...

    Documents stay whole: the validation shard ends with the document that brings it above `val_tokens`, so that its
    first `val_tokens` tokens and the target of the last one exist, and no training document begins in it; a training
    shard ends before `shard_tokens` would be passed. `ranks`, the content of the tokenizer's file, goes beside them as
    NAME.tiktoken, if it is not GPT-2's. Everything is written as *.PID.part; finish() gives all files their names,
    abort() deletes them.
    """

    def __init__(self, folder: Path, name: str, val_tokens: int, shard_tokens: int, ranks: bytes | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.name = name
        self.val_tokens = val_tokens
        self.shard_tokens = shard_tokens
        self.ranks = ranks
        self.finished: list[tuple[Path, int]] = []  # (final path, tokens)
        self.file: BinaryIO | None = None
        self.tokens = 0  # in the open shard
        self.documents = 0  # in all
        self.train = 0  # number of the open training shard; 0 = validation
        self.refuse_others()

    def refuse_others(self) -> None:
        """No file is ever replaced, and no shard mixed with those of another text, or of another tokenizer."""
        old = sorted(path.name for kind in ("train", "val") for path in self.folder.glob(f"*_{kind}_*.bin"))
        if old:
            fix = "delete them, or give another --out"  # a training reads one corpus a folder
            raise DataError(f"{self.folder}", "no shards", old[0], fix)
        for path in sorted(self.folder.glob("*.tiktoken")):  # a training takes any for its tokenizer
            if path.read_bytes() != self.ranks:
                expected = "no ranks but GPT-2's" if self.ranks is None else "only the ranks of --encoding"
                fix = "move that file elsewhere, or give another --out"
                raise DataError(f"{self.folder}", expected, path.name, fix)

    def path(self) -> Path:
        return self.folder / f"{self.name}_{'train' if self.train else 'val'}_{self.train:06d}.bin"

    def encoding(self) -> Path:
        return self.folder / f"{self.name}.tiktoken"

    @staticmethod
    def part(path: Path) -> Path:
        """Where a file is written; with the process's number, so that two at once do not write into one file."""
        return Path(f"{path}.{os.getpid()}.part")

    def add(self, document: np.ndarray) -> None:
        if self.train == 0:
            full = self.tokens > self.val_tokens or not self.val_tokens  # the last target follows them
        else:
            full = self.tokens > 0 and self.tokens + len(document) > self.shard_tokens
        if full:
            self.close_shard()
            self.train += 1
        if self.file is None:
            self.file = open(self.part(self.path()), "wb")
            self.file.write(shard_header(0))
        self.file.write(document.tobytes())
        self.tokens += len(document)
        self.documents += 1

    def close_shard(self) -> None:
        if self.file is None:
            return
        if self.tokens > np.iinfo(np.int32).max:
            fix = "split very long documents"
            raise DataError(f"{self.path()}", "at most 2^31 - 1 tokens", f"{self.tokens:,}", fix)
        self.file.seek(0)
        self.file.write(shard_header(self.tokens))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        say(f"{self.path().name}  {self.tokens:,} tokens")
        self.finished.append((self.path(), self.tokens))
        self.file, self.tokens = None, 0

    def finish(self) -> None:
        """Give the files their names."""
        self.close_shard()
        if self.train == 0:
            self.refuse_short()
        self.refuse_others()  # another process may have finished meanwhile
        # Before the shards have their names, so that nobody takes the tokens for those of another tokenizer.
        if self.ranks is not None:
            self.part(self.encoding()).write_bytes(self.ranks)
            os.replace(self.part(self.encoding()), self.encoding())
        for path, _ in self.finished:
            os.replace(self.part(path), path)

    def refuse_short(self) -> None:
        """Says why nothing is left for training:
        too little text, or a document that is too long, since documents stay whole."""
        tokens = sum(tokens for _, tokens in self.finished)
        characters = min(DOCUMENT_CHARACTERS, max(1, tokens))  # a token is some four: a quarter of the text at most
        cut = f"--document-characters {characters} or fewer, to cut at paragraphs"
        if tokens <= self.val_tokens:
            expected = f"more than the {self.val_tokens:,} for validation"
            found = f"{tokens:,} in all"
            fix = "give more text or a smaller --val-tokens" if tokens else "give more text"
            raise DataError("tokens in the input", expected, found, fix)
        if self.documents == 1:
            expected = "at least two: validation and training share none"
            raise DataError("documents in the input", expected, f"one, of {tokens:,} tokens", cut)
        expected = f"some after the one that completes the {self.val_tokens:,} tokens for validation"
        found = f"none: all {self.documents:,} with {tokens:,} tokens are needed for that"
        raise DataError("documents in the input", expected, found, f"a smaller --val-tokens, or {cut}")

    def abort(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # a full disk, while the rest is written
                self.file.close()
            self.part(self.path()).unlink(missing_ok=True)
        self.part(self.encoding()).unlink(missing_ok=True)
        for path, _ in self.finished:
            self.part(path).unlink(missing_ok=True)


def validation_share(stream: Iterator[np.ndarray]) -> tuple[int, Iterator[np.ndarray]]:
    """(tokens for validation, the same documents):
    VAL_TOKENS, or a tenth of a text that has less than ten times as many, but LEAST_VAL_TOKENS where it has twice that.

    To know, it keeps that much of the text in memory: 210 MB.
    """
    kept, tokens = [], 0
    for document in stream:
        kept.append(document)
        tokens += len(document)
        if tokens >= 10 * VAL_TOKENS:
            return VAL_TOKENS, itertools.chain(kept, stream)
    return max(tokens // 10, min(LEAST_VAL_TOKENS, tokens // 2)), iter(kept)


def tokenize(
    inputs: list[Path],
    folder: Path,
    name: str = "text",
    val_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    encoding: str = "gpt2",
    processes: int = 1,
    separator: str | None = None,
    key: str = "text",
    document_characters: int = DOCUMENT_CHARACTERS,
) -> list[Path]:
    """Writes the documents of `inputs`, files and folders, as shards into `folder`, in input order;
    returns the shards' paths.

    The bytes written depend on the inputs, the encoding and the three sizes only. Without `val_tokens` validation_share
    chooses. Raises DataError, OSError; on any error or interruption no new file is left under a final name.
    """
    paths = find_inputs(inputs)
    ranks = None if encoding == "gpt2" else read_ranks(encoding)
    writer = ShardWriter(folder, name, val_tokens or 0, shard_tokens, ranks)
    documents = cut_long(read_documents(paths, separator, key), document_characters)
    stream = encode_documents(documents, encoding, processes)
    try:
        with contextlib.closing(stream):
            ordered: Iterator[np.ndarray] = stream
            if val_tokens is None:
                writer.val_tokens, ordered = validation_share(stream)
            for document in ordered:
                writer.add(document)
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    tokens = sum(tokens for _, tokens in writer.finished)
    say(f"{len(writer.finished)} shards, {writer.documents:,} documents, {tokens:,} tokens in {folder}")
    return [path for path, _ in writer.finished]


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def whole_number(low: int, high: int | None = None):
    """An argparse type: 10, 10_000 or 10,000, between `low` and `high`."""

    def parse(text: str) -> int:
        number = int(text.replace(",", "").replace("_", ""))
        if number < low or (high is not None and number > high):
            limit = "or more" if high is None else f"to {high}"
            raise argparse.ArgumentTypeError(f"{number}: expected {low} {limit}")
        return number

    parse.__name__ = "whole number"  # argparse names the type in its error
    return parse


def shard_name(text: str) -> str:
    """An argparse type: a name by which nothing takes a validation shard for a training shard,
    and no pattern means other files."""
    if not re.fullmatch(r"\w[\w.-]*", text) or re.search(r"_(train|val)(_|$)", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits, - . and _, without _train or _val")
    return text


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)

    fetching = commands.add_parser("fetch", help="download FineWeb shards; run it again to resume")
    shards = whole_number(0, TRAIN_SHARDS)
    fetching.add_argument("--shards", type=shards, default=9, help="training shards (default 9 = 900 M tokens)")
    verifying = commands.add_parser("verify", help="check every shard of a folder")
    for command in fetching, verifying:
        folder = "folder of the shards (default %(default)s)"
        command.add_argument("--dir", type=Path, default=DEFAULT_FOLDER, help=folder)

    making = commands.add_parser("tokenize", help="make shards of your own text")
    add = making.add_argument
    count = whole_number(0)
    add("inputs", nargs="+", type=Path, metavar="INPUT",
        help="text, *.jsonl (both also .gz), *.parquet, or a folder of *.txt, *.md, *.jsonl and *.parquet")
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the shards")
    add("--name", type=shard_name, default="text",
        help="files are NAME_val_000000.bin, NAME_train_000001.bin ... (default text)")
    add("--val-tokens", type=count,
        help="first tokens, for validation (default: a tenth of the text, 10,000 to 10,485,760)")
    size = whole_number(1, 2**31 - 1)
    add("--shard-tokens", type=size, default=100_000_000, help="most tokens in a shard (default 100,000,000)")
    add("--encoding", default="gpt2", help="gpt2, or a *.tiktoken ranks file (default gpt2)")
    cores = len(os.sched_getaffinity(0))
    add("--procs", type=whole_number(1, 1024), default=cores, help="processes (default: one a core)")
    add("--separator", metavar="LINE", help="line between documents in text files, as --separator=--- (default: none)")
    add("--key", default="text", help="JSON key or parquet column of the text (default text)")
    add("--document-characters", type=count, default=DOCUMENT_CHARACTERS, metavar="N",
        help="longer documents are cut, at paragraphs where there are some (default 16,384; 0: none is)")
    return top


def stop_as_by_ctrl_c() -> None:
    """So that what ends this process lets it remove what it has begun."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            signal.signal(number, signal.default_int_handler)


def exit_status(
    work: Callable[[], None],
    interrupted: str = "interrupted",
    errors: tuple[type[Exception], ...] = (DataError,),
) -> int:
    """Runs a tool: 0; 2 after one line that says what, found and the fix,
    as `errors` already do; 130 when interrupted."""
    stop_as_by_ctrl_c()
    try:
        work()
    except (*errors, ImportError, OSError) as error:
        if isinstance(error, ImportError):
            message = f"{error.name}: {INSTALL}"
        elif isinstance(error, OSError):
            where = f"{error.filename or 'file'}: expected to be read or written"
            fix = "check the path, its permissions and the free space"
            message = f"{where}, found {error.strerror or error}; fix: {fix}"
        else:
            message = str(error)
        say(f"error: {message}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        say(interrupted, sys.stderr)
        return 130
    return 0


def main(argv: list[str] | None = None) -> int:
    open_streams()
    arguments = parser().parse_args(argv)

    def work() -> None:
        if arguments.command == "fetch":
            fetch(arguments.dir, arguments.shards)
        elif arguments.command == "verify":
            verify(arguments.dir)
        else:
            tokenize(
                arguments.inputs, arguments.out, arguments.name, arguments.val_tokens, arguments.shard_tokens,
                arguments.encoding, arguments.procs, arguments.separator, arguments.key, arguments.document_characters,
            )  # fmt: skip

    return exit_status(work, "interrupted: no unfinished shard has a final name; run the same command again")


if __name__ == "__main__":
    sys.exit(main())
