"""Rebuilds data/sample: public-domain English from Debian packages, as GPT-2 tokens.

    python data/make_sample.py [--out DIR] [--debs DIR] [--encoding FILE]

Needs apt-get and dpkg of Debian 12 with its package lists (apt-get update), and the GPT-2 vocabulary of tiktoken. The
bytes written are always the same; the SHA-256 of each file is printed and compared with data/sample/SHA256SUMS.
data/sample/LICENSE.md says why each text may be used.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import string
import struct
import subprocess
import sys
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import fineweb

PACKAGES = {  # name: version; pinned, so that the sample cannot change under those who compare losses on it
    "r-cran-janeaustenr": "1.0.0-1",
    "r-cran-tokenizers": "0.3.0-1",
    "dict-devil": "1.0-13.1",
    "dict-jargon": "4.4.7-3.1",
}
VAL_TOKENS = 120_000
FEWEST_CHARACTERS = 160  # of a document: more than 30 tokens
PASSAGES = (1500, 5000, 900, 2600, 3800, 1200, 7000, 2000)  # characters of book passages, in rotation: 200-1600 tokens


def unpack(folder: Path, debs: Path | None) -> None:
    """Unpacks PACKAGES into `folder`, from `debs` if given, else from the Debian archive."""
    for name, version in PACKAGES.items():
        source = debs or folder
        if debs is None:
            as_root = "APT::Sandbox::User=root"  # apt's own user may not write into a temporary folder
            subprocess.run(["apt-get", "download", "-qq", "-o", as_root, f"{name}={version}"], cwd=folder, check=True)
        archive = next(source.glob(f"{name}_{version}_*.deb"), None)
        if archive is None:
            raise fineweb.DataError(f"{source}", f"{name}_{version}_*.deb", "none", "download it with apt-get download")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)


def r_strings(path: Path) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load file: "R Internals", section 1.8 (serialization).

    Each object is a big-endian length, then a zlib stream of that many bytes: the mark "X\\n", three int32 versions,
    the name of the encoding, the type (16 in the low byte: character vector), the count, and a flag, a length (-1:
    missing) and the bytes of each string.
    """
    raw = path.read_bytes()
    while raw:
        (size,) = struct.unpack(">I", raw[:4])
        stream = zlib.decompressobj()
        data = stream.decompress(raw[4:])
        raw = stream.unused_data
        (encoding_length,) = struct.unpack(">I", data[14:18])
        kind, count = struct.unpack_from(">II", data, at := 18 + encoding_length)
        if len(data) != size or data[:2] != b"X\n" or kind & 255 != 16:
            raise fineweb.DataError(f"{path}", "R character vectors", f"type {kind & 255}", "use the pinned packages")
        texts = []
        at = at + 8
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, at + 4)
            at += 8
            texts.append(data[at : at + max(length, 0)].decode("utf-8"))
            at += max(length, 0)
        yield texts


def dict_entries(stem: Path) -> Iterator[str]:
    """The entries of a dictd dictionary: a line of the index is headword, offset and length, both in base 64."""
    digits = {c: i for i, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")}
    text = gzip.decompress(stem.with_suffix(".dict.dz").read_bytes())
    places = set()
    for line in stem.with_suffix(".index").read_text(encoding="utf-8").splitlines():
        headword, *place = line.split("\t")
        if not headword.startswith("00"):  # the dictionary's description of itself
            places.add(tuple(sum(digits[c] << 6 * i for i, c in enumerate(reversed(number))) for number in place))
    for offset, length in sorted(places):
        yield text[offset : offset + length].decode("utf-8")


def clean(paragraph: str) -> str:
    """One paragraph of prose on one line, as web text has it; verse and lists keep their lines. Empty for ornaments."""
    paragraph = paragraph.translate({0xA0: " ", 0xAD: None}).expandtabs()  # no-break space, soft hyphen
    paragraph = textwrap.dedent(paragraph).strip("\n")
    if not re.search(r"[A-Za-z]", paragraph) or re.search(r"[\u2500-\u257f]", paragraph):
        return ""
    lines = [line.rstrip() for line in paragraph.split("\n")]
    filled = sum(len(line.strip()) for line in lines[:-1]) >= 45 * (len(lines) - 1)
    text = " ".join(line.strip() for line in lines) if filled else "\n".join(lines)
    return re.sub(r"\{\s*([^{}]*?)\s*\}", r"{\1}", text)  # cross references broken at a line's end


def paragraphs(text: str) -> list[str]:
    parts = re.split(r"\n\s*?\n", text.replace("\r\n", "\n"))
    return [cleaned for part in parts if (cleaned := clean(part))]


def passages(book: str) -> Iterator[str]:
    """A novel as passages of whole paragraphs, 900 to 7000 characters, never across a chapter's end."""
    passage: list[str] = []
    number = 0
    for paragraph in [*paragraphs(book), "CHAPTER"]:
        heading = re.match(r"(CHAPTER|VOLUME|EPILOGUE)\b", paragraph, re.IGNORECASE) and len(paragraph) < 100
        if passage and (heading or sum(map(len, passage)) >= PASSAGES[number % len(PASSAGES)]):
            yield "\n\n".join(passage)
            passage = []
            number += 1
        if not heading and not re.match(r"\[End |THE END$|FINIS$", paragraph, re.IGNORECASE):
            passage.append(re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", paragraph))  # _emphasis_


def novels(folder: Path) -> Iterator[str]:
    """The seven novels from their first chapter on, without title pages and editors' notes."""
    library = folder / "usr/lib/R/site-library"
    for package in "janeaustenr", "tokenizers":
        for lines in r_strings(library / package / "data/Rdata.rdb"):
            book = "\n".join(lines).replace("\r\n", "\n")
            first = re.search(r"^CHAPTER (1|I)\b.*$", book, re.IGNORECASE | re.MULTILINE)
            last = re.search(r"^(End of Project Gutenberg|A NOTE ON THE TEXT)", book, re.MULTILINE)
            yield book[first.start() : last.start() if last else None]


def entry(text: str) -> str:
    """A dictionary entry: headword and word class on one line,
    and no heading of the next letter behind the last one."""
    first, *rest = paragraphs(text)
    if rest and re.fullmatch("[A-Z]", rest[-1]):
        rest.pop()
    return "\n\n".join([" ".join(first.split("\n ")), *rest])


def documents(folder: Path) -> list[str]:
    """All documents, in the order of their SHA-256: shuffled, and the same on every machine."""
    found = {passage for book in novels(folder) for passage in passages(book)}
    for name in "devil", "jargon":
        found |= {entry(text) for text in dict_entries(folder / "usr/share/dictd" / name)}
    kept = [text for text in found if len(text) >= FEWEST_CHARACTERS]
    return sorted(kept, key=lambda text: hashlib.sha256(text.encode()).digest())


def build(out: Path, debs: Path | None, encoding: str) -> dict[str, str]:
    """Writes the sample into `out`; {file name: SHA-256}."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        unpack(folder, debs)
        texts = folder / "sample.jsonl"
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(folder)), encoding="utf-8")
        sizes = {"val_tokens": VAL_TOKENS, "document_characters": 0}
        shards = fineweb.tokenize([texts], folder / "out", name="sample", encoding=encoding, **sizes)
        out.mkdir(parents=True, exist_ok=True)
        for path in (folder / "out").iterdir():  # with them the ranks of another tokenizer than GPT-2's
            (out / path.name).write_bytes(path.read_bytes())
        sums = {path.name: fineweb.sha256_of(path) for path in shards}
    fineweb.write_sums(out, sums)
    return sums


def main() -> int:
    fineweb.open_streams()
    here = Path(__file__).resolve().parent / "sample"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=here, help="default %(default)s, whose shards are replaced")
    parser.add_argument("--debs", type=Path, help="folder with the .deb files, instead of downloading them")
    parser.add_argument("--encoding", default="gpt2", help="as for fineweb.py tokenize")
    arguments = parser.parse_args()

    try:
        before = fineweb.read_sums(here)
        sums = build(arguments.out, arguments.debs, arguments.encoding)
    except (fineweb.DataError, OSError, subprocess.CalledProcessError) as error:
        known = isinstance(error, fineweb.DataError)
        fix = "" if known else "; fix: run on Debian 12 after apt-get update, or give --debs"
        fineweb.say(f"error: {error}{fix}", sys.stderr)
        return 2
    for name, digest in sums.items():
        known = before.get(name)
        fineweb.say(f"{digest}  {name}  {'new' if known is None else 'unchanged' if known == digest else 'CHANGED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
