"""The list of mutants, and the command that tries them, on a small repository of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import mutants

SOURCE = """def double(x):
    return 2 * x


def half(x):
    return x / 2
"""
TESTS = """import train_gpt


def test_double():
    assert train_gpt.double(3) == 6


def test_half():
    assert train_gpt.half(0) == 0
"""
LIST = """
["double is thrice"]
old = "return 2 * x"
new = "return 3 * x"
tests = ["test_small.py::test_double"]

["half is a third"]
old = "return x / 2"
new = "return x / 3"
tests = ["test_small.py"]
"""
OTHER = """
["half is a third, once more"]
old = "return x / 2"
new = "return x / 3"
tests = ["test_other.py"]
"""
# What the command imports before it forks, and these tests do not need: stand-ins for it spare seconds a call.
PRELOADED = "numpy", "torch"
CONFTEST = """import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
"""


@pytest.fixture
def repository(tmp_path):
    """Two functions, a test of each of which one sees little, and a mutant of each."""
    for name, text in {
        "train_gpt.py": SOURCE,
        "tests/test_small.py": TESTS,
        "tests/mutants.toml": LIST,
        "tests/conftest.py": CONFTEST,
        "tests/helpers.py": "",
        ".gitignore": "logs/\n",
        **{f"modules/{name}.py": "" for name in PRELOADED},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(mutants.__file__, tmp_path / "tests")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def call(repository, *options):
    return subprocess.run(
        [sys.executable, "tests/mutants.py", *options], env=os.environ | {"PYTHONPATH": str(repository / "modules")},
        cwd=repository, capture_output=True, text=True, timeout=600)


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


# ---- the list --------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_list_fits_the_source():
    """An edit of the source may leave some mutants behind, which the command names; but no more than a tenth."""
    listed = mutants.read_list()
    assert len(listed) >= 100
    left_behind = {mutant.name: problem for mutant in listed if (problem := mutants.misfit(mutant))}
    assert len(left_behind) <= len(listed) / 10, left_behind


@pytest.mark.fast
def test_what_does_not_fit(repository):
    fitting = mutants.Mutant("thrice", "return 2 * x", "return 3 * x", ("test_small.py::test_double",))
    assert mutants.misfit(fitting, repository) is None
    for change, problem in (
        ({"old": "return"}, "expected its old text once in train_gpt.py, found it 2 times"),
        ({"old": "return 7"}, "expected its old text once in train_gpt.py, found it 0 times"),
        ({"new": "return 2 * x"}, "it changes nothing"),
        ({"file": "sample.py"}, "sample.py is no more"),
        ({"tests": ("test_small.py::test_treble",)}, "there is no test test_small.py::test_treble"),
        ({"tests": ("test_large.py",)}, "there is no test test_large.py"),
    ):
        assert mutants.misfit(replace(fitting, **change), repository) == problem
    with pytest.raises(mutants.Unfit, match="'thrice': expected Python, found"):
        replace(fitting, new="return (").apply(SOURCE)


# ---- the command -----------------------------------------------------------------------------------------------------
def test_caught_and_survived(repository):
    """The source stays as it is; what is known is not tried again, until something changes."""
    results = repository / "logs/mutants.jsonl"
    first = call(repository)
    assert first.returncode == 1, first.stderr
    assert first.stdout.endswith("1 of 2 mutants caught, 50.0%\n  SURVIVED: half is a third \n")
    assert "double is thrice  test_small.py::test_double" in first.stdout
    assert (repository / "train_gpt.py").read_text() == SOURCE
    known = results.read_text()
    assert known.count("\n") == 3, "the tests without a mutant, and two mutants"

    again = call(repository, "--jobs", "2")
    assert again.stdout.endswith(first.stdout.partition("\n\n")[2])
    assert results.read_text() == known

    edit(repository / "tests/test_small.py", "half(0) == 0", "half(3) == 1.5")
    assert call(repository, "half").stdout.endswith("1 of 1 mutants caught, 100.0%\n")
    assert results.read_text().count("\n") == 5


def test_what_has_to_be_mended_first(repository):
    """A name that no mutant has, and a text that is no more."""
    found = call(repository, "treble")
    assert found.returncode == 2
    assert found.stderr == "mutants: expected a mutant with treble in its name, found none; fix: --list\n"

    edit(repository / "train_gpt.py", "x / 2", "0.5 * x")
    found = call(repository, "double")
    assert found.returncode == 2
    assert "'half is a third': expected its old text once in train_gpt.py, found it 0 times" in found.stderr
    assert found.stdout == ""


def test_what_takes_too_long_is_ended(repository):
    edit(repository / "tests/test_small.py", "== 6", "== 6; import time; time.sleep(600)")
    result = mutants.run_pytest(repository, ["test_small.py"], limit_s=1.0)
    assert (result.outcome, result.by) == (mutants.TOO_LONG, "test_small.py")


def test_tests_that_do_not_pass_without_a_mutant(repository):
    """Nothing can be said of it then; the others are tried all the same."""
    edit(repository / "tests/test_small.py", "== 6", "== 7")
    with (repository / "tests/mutants.toml").open("a") as file:
        file.write(OTHER)
    (repository / "tests/test_other.py").write_text(TESTS.replace("half(0) == 0", "half(3) == 1.5"))
    found = call(repository)
    assert found.returncode == 1
    assert "1 of 3 mutants caught, 33.3%\n" in found.stdout
    assert "NOT JUDGED: double is thrice test_small.py without it: caught test_small.py::test_double" in found.stdout
