"""python records plot --log: a run in progress or the last one, and what is said where it cannot be drawn."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "records")]
import plots
import runlog
import train_gpt as tg

WHOLE = (ROOT / "records/curves/sprint_webtext_1xH200.jsonl").read_text()


def plot(*arguments, cwd=ROOT, modules=""):
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    return subprocess.run([sys.executable, str(ROOT / "records"), "plot", *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True)


def steps_only(count):
    """A log up to a step that is half written."""
    lines = WHOLE.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "step")
    return "".join(lines[:first + count]) + lines[first + count][:20]


@pytest.mark.fast
@pytest.mark.parametrize("name", tg.PRESETS)
def test_rates_are_the_trainers(name):
    preset = tg.PRESETS[name]
    rates = plots.schedule_rates(json.loads(json.dumps(dataclasses.asdict(preset))))
    assert rates == pytest.approx([tg.learning_rate(preset, step) for step in range(preset.steps)])


@pytest.mark.slow
def test_the_newest_log_is_drawn(tmp_path):
    """Of a folder, by default logs/: a run in progress, after a finished one."""
    pytest.importorskip("matplotlib")
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, (name, text) in enumerate((("finished", WHOLE), ("going-on", steps_only(5)))):
        (logs / f"{name}.jsonl").write_text(text)
        os.utime(logs / f"{name}.jsonl", (number, number))
    for name in ("plot.svg", "plot.png"):
        done = plot("--log", "--out", name, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout == f"{name}\n" and done.stderr == "", done.stderr
        assert (tmp_path / name).stat().st_size > 5000
    assert plots.newest_log(logs).stem == "going-on" and plots.newest_log(logs / "finished.jsonl").stem == "finished"


@pytest.mark.parametrize("kinds", [("head", "stage"), ()], ids=["", "without its schedule"])
def test_a_run_that_diverged_is_drawn(tmp_path, kinds):
    pytest.importorskip("matplotlib")
    lines = [json.loads(line) for line in WHOLE.splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    steps[-1]["train_loss"] = float("nan")
    log = tmp_path / "nan.jsonl"
    chain, rows = "", []
    for event in [line for line in lines if line["kind"] in kinds] + steps:
        del event["chain"]
        text = json.dumps(event)
        chain = runlog.sha256(chain + text)[:16]
        rows.append(f'{text[:-1]}, "chain": "{chain}"}}\n')
    log.write_text("".join(rows))
    assert runlog.read_run(log).broken is None and len(runlog.read_run(log).train) == len(steps)
    plots.plot_log(log, tmp_path / "nan.png")
    assert (tmp_path / "nan.png").exists()


@pytest.mark.fast
@pytest.mark.parametrize("text, found", [(None, "a .jsonl file, found none"), (WHOLE.splitlines(keepends=True)[0], "at least one step, found none yet")])
def test_what_cannot_be_drawn(tmp_path, text, found):
    if text:
        (tmp_path / "x.jsonl").write_text(text)
    done = plot("--log", tmp_path, "--out", tmp_path / "x.svg")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and found in done.stderr and "; fix: " in done.stderr


def test_one_log_or_runs_but_not_both(tmp_path):
    (tmp_path / "x.jsonl").write_text(WHOLE)
    done = plot("--log", tmp_path, tmp_path / "x.jsonl", "--out", tmp_path / "x.svg")
    assert done.returncode == 2 and "found 1 other runs too; fix: leave out either" in done.stderr


def test_a_file_of_another_kind(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "x.jsonl").write_text(WHOLE)
    done = plot("--log", tmp_path, "--out", tmp_path / "x.pdf")
    assert done.returncode == 2 and "expected a path ending in .svg or .png, found .pdf" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.fast
@pytest.mark.parametrize("out", ["x.png", "x.svg"])
def test_without_matplotlib(tmp_path, out):
    """Both kinds of files need it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    (tmp_path / "x.jsonl").write_text(WHOLE)
    for what in (["--log", tmp_path], [], [tmp_path]):
        done = plot(*what, "--out", tmp_path / out, modules=tmp_path)
        assert done.returncode == 2 and done.stderr == "records: plot: expected matplotlib, found none; fix: pip install -r requirements-dev.txt\n"
    assert not (tmp_path / out).exists()
