"""docs/first_model.ipynb: its cells as a script, from the data to a text, with the smoke preset on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from helpers import ROOT, read_log

NOTEBOOK = ROOT / "docs/first_model.ipynb"


def code_cells():
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.fast
def test_six_cells_without_outputs():
    """An output that is kept would be of another machine, and make every change of the file unreadable."""
    cells = code_cells()
    assert [cell["id"] for cell in cells] == ["settings", "clone", "data", "train", "plot", "sample"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    assert all(len(line) <= 121 for cell in cells for line in cell["source"])


@pytest.fixture
def clone(tmp_path):
    """What the notebook needs of the repository, without logs of this one."""
    for name in ("run.sh", "train_gpt.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("data", "records", "benchmarks"):
        files = (path for path in (ROOT / name).glob("*.*") if path.is_file())
        (tmp_path / name).mkdir()
        for path in files:
            shutil.copy(path, tmp_path / name)
    shutil.copytree(ROOT / "data/sample", tmp_path / "data/sample")
    return tmp_path


def test_runs_as_a_script(clone):
    """All cells in order, as a kernel would run them, in a folder that looks like a clone."""
    pytest.importorskip("matplotlib")
    cells = code_cells()
    script = clone / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) + "\n" for cell in cells), encoding="utf-8")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "SPEEDRUN_PRESET": "smoke",
        "SPEEDRUN_OPTIONS": "--stop-after 4 --eager",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, script], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    assert "2 of 2 shards good" in done.stdout
    (log,) = (clone / "logs").glob("*.jsonl")
    end = read_log(log)[-1]
    assert (end["kind"], end["state"]) == ("end", "no record: shortened")
    assert (clone / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (clone / "model.safetensors").stat().st_size > 1e6
    _, _, answer = done.stdout.rpartition("$ ")
    assert "Once upon a time" in answer.partition("\n")[2], "the text and what follows it"


def test_outside_of_a_clone_it_says_what_is_missing(tmp_path):
    cells = code_cells()[:2]
    script = "\n".join("".join(cell["source"]) + "\n" for cell in cells)
    environment = os.environ | {"SPEEDRUN_REPOSITORY": "", "SPEEDRUN_PRESET": "smoke"}
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("set REPOSITORY in the first cell to the address of the repository\n")
