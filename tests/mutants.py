"""Faults that are put into the source one at a time, to see whether the tests that should notice each of them fail.

    python tests/mutants.py --jobs 2 >mutants.out &     all of tests/mutants.toml, in the background
    python tests/mutants.py pointer "last digit"        those whose name has one of these texts
    python tests/mutants.py --whole                     every test of the named files, not only the named tests
    python tests/mutants.py --list                      names only; like each call, it checks that all mutants still fit

A mutant replaces a text that occurs exactly once in its file. It is caught if a test fails that passes without it. All
happens in temporary copies of the repository, with what is not committed yet. Results go to a file, line by line, and
are not made again until a mutant, its file or its tests change: so a run that was broken off goes on where it was.

Exit codes: 0 all caught; 1 some were not; 2 the list has to be mended first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
RESULTS = ROOT / "logs" / "mutants.jsonl"
SHARED = "tests/helpers.py", "tests/conftest.py"  # what all tests read

CAUGHT = "caught"
SURVIVED = "SURVIVED"
TOO_LONG = "TOO LONG"
BROKEN = "BROKEN OFF"
UNJUDGED = "NOT JUDGED"  # its tests do not pass without it either


# Tests are forked from a process that has imported torch. Not Triton: Triton's interpreter is chosen at its import.
SERVER = multiprocessing.get_context("forkserver")
# Of a test: on a CPU, with one thread. Nothing that is compiled is kept, since it outlives an edit of equal size.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Unfit(Exception):
    """The list has to be mended before anything can be said."""


@dataclass(frozen=True)
class Mutant:
    name: str  # what is wrong, in words
    old: str
    new: str
    tests: tuple[str, ...]  # files of tests/, or FILE::TEST in them, cheapest first
    file: str = "train_gpt.py"

    def apply(self, text: str) -> str:
        """The faulty text. Unfit if it is no Python: whatever test there is would fail."""
        faulty = text.replace(self.old, self.new)
        try:
            compile(faulty, self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise Unfit(f"{self.name!r}: expected Python, found {error}; fix: tests/mutants.toml") from None
        return faulty


class Result(NamedTuple):
    outcome: str
    by: str = ""  # the first test that failed
    seconds: float = 0.0


# ---- the list --------------------------------------------------------------------------------------------------------
def read_list(path: Path = LIST) -> list[Mutant]:
    """All mutants of a list, in its order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutant(name, **fields | {"tests": tuple(fields["tests"])}) for name, fields in entries.items()]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def misfit(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant says nothing about the present source; None if it does."""
    path = root / mutant.file
    if not path.exists():
        return f"{mutant.file} is no more"
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    if count != 1:
        return f"expected its old text once in {mutant.file}, found it {count} times"
    if mutant.old == mutant.new:
        return "it changes nothing"

    for test in mutant.tests:
        file, _, name = test.partition("::")
        place = root / "tests" / file
        if not place.exists() or name and f"def {name}(" not in place.read_text(encoding="utf-8"):
            return f"there is no test {test}"
    return None


def require_fit(mutants: Iterable[Mutant], root: Path = ROOT):
    """Raise Unfit, with a line for each mutant that does not fit the source any more."""
    lines = [f"{mutant.name!r}: {problem}" for mutant in mutants if (problem := misfit(mutant, root))]
    if lines:
        told = "\n  ".join(lines)
        raise Unfit(f"expected mutants that fit the source, found {len(lines)} that do not; fix: tests/mutants.toml\n"
                    f"  {told}")


# ---- copies of the repository ----------------------------------------------------------------------------------------
def copy_repository(folder: Path, root: Path = ROOT) -> Path:
    """Copy what git tracks or does not ignore. Returns the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source = root / name
        if not source.is_file():
            continue  # removed, but not committed yet
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    return folder


def child(copy: Path, tests: list[str], output: Path):
    """The process of some tests, which has torch already: it leads a session, and what it says goes to `output`."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True  # an edit of equal size within a second would go unnoticed
    sys.path = [place for place in sys.path if Path(place or ".").resolve() != LIST.parent]
    command = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    sys.exit(int(pytest.main(command)))


def run_pytest(copy: Path, tests: list[str], limit_s: float) -> Result:
    """Run tests of one file up to the first that fails."""
    started = time.monotonic()
    output = copy / "pytest.out"
    process = SERVER.Process(target=child, args=(copy, tests, output))
    process.start()
    process.join(limit_s)
    code = process.exitcode
    end_session(process.pid)
    process.join()
    seconds = time.monotonic() - started

    if code is None:
        return Result(TOO_LONG, tests[0], seconds)
    if code == 0:
        return Result(SURVIVED, "", seconds)
    if code not in range(1, 6):  # pytest's own; else a signal, such as that of a machine without memory
        return Result(BROKEN, f"exit code {code}", seconds)
    said = output.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", said, re.MULTILINE)
    return Result(CAUGHT, failed[1] if failed else said.strip().rpartition("\n")[2], seconds)


def end_session(leader: int):
    """End a process that led a session, and whatever its tests have left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run_tests(copy: Path, tests: Iterable[str], limit_s: float, whole: bool = False) -> Result:
    """Run tests up to the first that fails: each file in a process of its own, as some turn on Triton's interpreter."""
    by_file = collections.defaultdict(list)
    for test in tests:
        by_file[file_of(test)].append(test)

    seconds = 0.0
    for file, chosen in by_file.items():
        result = run_pytest(copy, [file] if whole else chosen, limit_s)
        seconds += result.seconds
        if result.outcome != SURVIVED:
            break
    return result._replace(seconds=seconds)


# ---- results ---------------------------------------------------------------------------------------------------------
def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@functools.cache
def content(name: str) -> str:
    """A file as the run began with it, like the copies."""
    return (ROOT / name).read_text(encoding="utf-8")


def key_of(mutant: Mutant, whole: bool) -> str:
    """What a result depends on: the mutant, its file, and the tests."""
    files = sorted({f"tests/{file_of(test)}" for test in mutant.tests})
    sources = map(content, [mutant.file, *files, *SHARED])
    return digest(mutant.old, mutant.new, *mutant.tests, str(whole), *sources)


class Results:
    """What is known already, by key; what is new is appended to the file at once."""

    def __init__(self, path: Path):
        self.path = path
        self.lock = threading.Lock()
        self.known: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.known[entry["key"]] = Result(entry["outcome"], entry["by"], entry["seconds"])

    def add(self, name: str, key: str, result: Result):
        entry = {"name": name, "key": key, **result._asdict()}
        with self.lock:
            self.known[key] = result
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


# ---- the run ---------------------------------------------------------------------------------------------------------
class Workers:
    """Copies of the repository, in each of which one mutant at a time is tried."""

    def __init__(self, folder: Path, mutants: list[Mutant], options: argparse.Namespace):
        self.limit_s = options.limit
        self.whole = options.whole
        self.results = Results(options.results)
        self.copies = queue.SimpleQueue()
        for number in range(options.jobs):
            self.copies.put(copy_repository(folder / str(number)))

        # What has to pass without any mutant: all that is named of a file, once.
        self.sources = [content(name) for name in sorted({mutant.file for mutant in mutants} | set(SHARED))]
        self.named = collections.defaultdict(set)
        for test in (test for mutant in mutants for test in mutant.tests):
            self.named[file_of(test)].add(test)
        self.locks = {file: threading.Lock() for file in self.named}
        self.without: dict[str, Result] = {}
        self.keys = {mutant: key_of(mutant, self.whole) for mutant in mutants}

    def attempt(self, name: str, key: str, tests: Iterable[str], mutant: Mutant | None = None) -> Result:
        """Run tests with a mutant, or without any. Only an outcome that is sure is kept."""
        copy = self.copies.get()
        original = None
        try:
            if mutant:
                path = copy / mutant.file
                original = path.read_text(encoding="utf-8")
                path.write_text(mutant.apply(original), encoding="utf-8")
            result = run_tests(copy, tests, self.limit_s, self.whole)
        finally:
            if original is not None:
                path.write_text(original, encoding="utf-8")
            self.copies.put(copy)
        if result.outcome in (CAUGHT, SURVIVED):
            self.results.add(name, key, result)
        return result

    def without_mutant(self, file: str) -> Result:
        """How the named tests of a file end as the source is; the first worker that asks runs them."""
        with self.locks[file]:
            if file not in self.without:
                tests = sorted(self.named[file])
                key = digest("no mutant", str(self.whole), *tests, content(f"tests/{file}"), *self.sources)
                result = self.results.known.get(key)
                if result is None or result.outcome != SURVIVED:  # a failure may have had another cause
                    result = self.attempt(f"none, {file}", key, tests)
                self.without[file] = result
                print(f"{'':18}  no mutant: {file} {result.outcome} {result.by}", flush=True)
            return self.without[file]

    def asked(self) -> list[str]:
        """The files of tests that the mutants without a result name."""
        new = [mutant for mutant, key in self.keys.items() if key not in self.results.known]
        return sorted({file_of(test) for mutant in new for test in mutant.tests})

    def try_mutant(self, mutant: Mutant) -> Result:
        key = self.keys[mutant]
        result = self.results.known.get(key)
        for file in sorted(set(map(file_of, mutant.tests))) if result is None else ():
            plain = self.without_mutant(file)
            if plain.outcome != SURVIVED:
                result = Result(UNJUDGED, f"{file} without it: {plain.outcome} {plain.by}")
        result = result or self.attempt(mutant.name, key, mutant.tests, mutant)
        print(f"{result.outcome:10} {result.seconds:5.0f} s  {mutant.name}  {result.by}", flush=True)
        return result


def report(found: dict[str, Result]) -> int:
    """Print the score, and the others by name. Returns the exit code."""
    caught = sum(result.outcome == CAUGHT for result in found.values())
    print(f"\n{caught} of {len(found)} mutants caught, {caught / max(len(found), 1):.1%}")
    for name, result in found.items():
        if result.outcome != CAUGHT:
            print(f"  {result.outcome}: {name} {result.by}")
    return int(caught < len(found))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Which faults do the tests notice?", allow_abbrev=False)
    add = parser.add_argument
    add("names", nargs="*", metavar="TEXT", help="only mutants whose name has one of these texts")
    add("--jobs", type=int, default=1, help="how many mutants at a time (1)")
    add("--limit", type=float, default=600, metavar="SECONDS", help="for the tests of one file (600)")
    add("--whole", action="store_true", help="every test of the named files, not only the named tests")
    add("--list", action="store_true", help="print the names and stop")
    add("--results", type=Path, default=RESULTS, help="file of results (logs/mutants.jsonl)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TRITON_INTERPRET", None)
    SERVER.set_forkserver_preload(["numpy", "pytest", "torch"])
    mutants = read_list()
    try:
        require_fit(mutants)
        if options.names:
            mutants = [each for each in mutants if any(text in each.name for text in options.names)]
        if not mutants:
            raise Unfit(f"expected a mutant with {' or '.join(options.names)} in its name, found none; fix: --list")
        if options.list:
            print("\n".join(mutant.name for mutant in mutants))
            return 0

        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            workers = Workers(Path(folder), mutants, options)
            with ThreadPoolExecutor(options.jobs) as pool:
                for file in workers.asked():  # first, so that no worker waits for another
                    pool.submit(workers.without_mutant, file)
                results = list(pool.map(workers.try_mutant, mutants))
        return report({mutant.name: result for mutant, result in zip(mutants, results)})
    except Unfit as problem:
        print(f"mutants: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
