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
import curve
import plots
import runlog
import train_gpt as tg

WHOLE = (ROOT / "records/curves/sprint_webtext_1xH200.jsonl").read_text()


def plot(*arguments, cwd=ROOT, modules=""):
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    return subprocess.run([sys.executable, str(ROOT / "records"), "plot", *map(str, arguments)], cwd=cwd,
                          env=environment, capture_output=True, text=True)


def chained(events):
    """A log of events, with the chain of hashes that a trainer would give them."""
    chain, rows = "", []
    for event in events:
        text = json.dumps({name: value for name, value in event.items() if name != "chain"})
        chain = runlog.sha256(chain + text)[:16]
        rows.append(f'{text[:-1]}, "chain": "{chain}"}}\n')
    return "".join(rows)


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
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{name}\n", done.stderr
        assert done.stderr == "", done.stderr
        assert (tmp_path / name).stat().st_size > 5000
    assert plots.newest_log(logs).stem == "going-on"
    assert plots.newest_log(logs / "finished.jsonl").stem == "finished"


@pytest.mark.parametrize("kinds", [("head", "stage"), ()], ids=["", "without its schedule"])
def test_a_run_that_diverged_is_drawn(tmp_path, kinds):
    pytest.importorskip("matplotlib")
    lines = [json.loads(line) for line in WHOLE.splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    steps[-1]["train_loss"] = float("nan")
    log = tmp_path / "nan.jsonl"
    log.write_text(chained([line for line in lines if line["kind"] in kinds] + steps))
    assert runlog.read_run(log).broken is None
    assert len(runlog.read_run(log).train) == len(steps)
    plots.plot_log(log, tmp_path / "nan.png")
    assert (tmp_path / "nan.png").exists()


@pytest.mark.fast
def test_a_log_that_repeats_a_step_is_not_drawn(tmp_path):
    """It has no time of a step there. The readers for records refuse it by other rules."""
    head, *rest = map(json.loads, WHOLE.splitlines())
    step = next(line for line in rest if line["kind"] == "step")
    log = tmp_path / "x.jsonl"
    log.write_text(chained([head, step, step]))
    done = plot("--log", log, "--out", tmp_path / "x.svg")
    assert done.returncode == 2
    assert "expected steps that ascend, found one that repeats" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.fast
@pytest.mark.parametrize("text, found", [(None, "a .jsonl file, found none"), (WHOLE.splitlines(keepends=True)[0],
                                                                               "at least one step, found none yet")])
def test_what_cannot_be_drawn(tmp_path, text, found):
    if text:
        (tmp_path / "x.jsonl").write_text(text)
    done = plot("--log", tmp_path, "--out", tmp_path / "x.svg")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert found in done.stderr
    assert "; fix: " in done.stderr


def test_one_log_or_runs_but_not_both(tmp_path):
    (tmp_path / "x.jsonl").write_text(WHOLE)
    done = plot("--log", tmp_path, tmp_path / "x.jsonl", "--out", tmp_path / "x.svg")
    assert done.returncode == 2
    assert "found 1 other runs too; fix: leave out either" in done.stderr


def test_a_file_of_another_kind(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "x.jsonl").write_text(WHOLE)
    done = plot("--log", tmp_path, "--out", tmp_path / "x.pdf")
    assert done.returncode == 2
    assert "expected a path ending in .svg or .png, found .pdf" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.fast
@pytest.mark.parametrize("out", ["x.png", "x.svg"])
def test_without_matplotlib(tmp_path, out):
    """Both kinds of files need it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    (tmp_path / "x.jsonl").write_text(WHOLE)
    for what in (["--log", tmp_path], [], [tmp_path]):
        done = plot(*what, "--out", tmp_path / out, modules=tmp_path)
        assert done.returncode == 2
        fix = "pip install -r requirements-dev.txt"
        assert done.stderr == f"records: plot: expected matplotlib, found none; fix: {fix}\n"
    assert not (tmp_path / out).exists()


FIGURES = {
    "history": lambda: plots.history_figure(),
    "README": lambda: curve.readme_figure(),
    "curve": lambda: curve.curve_figure(["sprint", "record-89"]),
    "near ends": lambda: curve.curve_figure(
        ["2026-11-21_target-reached-1gpu", "2026-11-21_target-reached-4gpu"]
    ),
    "two runs": lambda: plots.runs_figure(["2026-11-26_shorter-1gpu", "2026-11-25_lean-1gpu"]),
    "other batches": lambda: plots.runs_figure(["2026-11-27_leaner-1gpu", "2026-11-25_two-thirds-1gpu",
                                                "2026-11-25_full-size-1gpu"]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_lies_over_another(name):
    """Nor over the legend, nor outside of the picture."""
    pytest.importorskip("matplotlib")
    figure = FIGURES[name]()
    assert plots.overlapping_texts(figure) == []
    whole = figure.bbox.padded(1)
    hidden = plots.hidden_ticks(figure)
    from matplotlib.text import Text
    drawn = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()
             and id(text) not in hidden]
    outside = [text.get_text() for text in drawn if not (whole.contains(*plots.text_box(figure, text).min)
                                                         and whole.contains(*plots.text_box(figure, text).max))]
    assert len(drawn) > 10
    assert outside == []


def test_two_labels_at_one_point_are_seen_and_moved():
    pytest.importorskip("matplotlib")
    figure, ((axes,),) = plots.canvas(1, (1,))
    axes.plot([0, 1, 2], [0, 1, 2])
    written = [axes.text(1, 1, word) for word in ("first", "second")]
    assert plots.overlapping_texts(figure) == [("first", "second")]
    for text in written:
        text.remove()
    plots.place_labels(figure, axes, [("first", (1, 1), "black"), ("second", (1, 1), "black")])
    assert plots.overlapping_texts(figure) == []
    assert len(axes.texts) == 2


def test_classes_are_told_apart_and_no_legend_hides_data():
    pytest.importorskip("matplotlib")
    figure = plots.history_figure()
    figure.canvas.draw()
    ours = plots.our_records()
    looks = set()
    legend = figure.legends[0]
    for handle in legend.legend_handles:
        looks.add((handle.get_color(), handle.get_marker()))
    assert len(looks) == len(ours) >= 8
    assert len({colour for colour, _ in looks}) >= 8
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert not any(axes.get_legend() for axes in figure.axes)


def test_what_was_computed_is_not_drawn_as_measured():
    """Record 89's line is dashed with a hollow end; record 92's two ends are points, and full."""
    pytest.importorskip("matplotlib")
    left, right = curve.readme_figure().axes
    lines = {line.get_label(): line for line in left.get_lines() if not line.get_label().startswith("_")}
    styles = [lines[name].get_linestyle() for name in ("record 89 (times computed)", "a sprint of ours (n = 1)")]
    assert styles == ["--", "-"]
    points = [line for line in left.get_lines() if line.get_marker() == "o"]
    assert [point.get_fillstyle() for point in points] == ["full", "none"]
    ends = {tuple(round(float(value[0]), 2) for value in line.get_data()) for line in right.get_lines()
            if line.get_marker() == "o"}
    assert ends == {(181.57, 3.09), (113.35, 3.23)} and all(line.get_fillstyle() == "full"
                                                            for line in right.get_lines())
    words = " ".join(text.get_text() for text in (*left.texts, *right.texts))
    assert "3.220 in 137 s (computed)" in words
    assert "3.0924 in 181.6 s" in words
    assert "3.2257 in 113.4 s" in words


def test_bars_stand_side_by_side_for_equal_batches():
    """A stage of 131 k tokens a step beside another of 131 k, and none beside a stage that has other batches."""
    pytest.importorskip("matplotlib")
    figure = plots.runs_figure(["2026-11-27_leaner-1gpu", "2026-11-25_two-thirds-1gpu", "2026-11-25_full-size-1gpu"])
    _, axes = figure.axes
    names = [text.get_text() for text in axes.get_xticklabels()]
    assert names == ["66 k", "131 k", "197 k", "197 k (2)", "262 k", "393 k", "393 k (2)"]
    counts = [sum(abs(bar.get_x() + bar.get_width() / 2 - place) < 0.5 for bar in axes.patches)
              for place in range(len(names))]
    assert counts == [2, 3, 2, 2, 1, 1, 1]


def test_the_picture_of_the_readme_is_this_one(tmp_path):
    """docs/curve.svg is what `plot --readme` draws: the same words in it."""
    pytest.importorskip("matplotlib")
    import re
    curve.draw_readme(tmp_path / "curve.svg")
    words = [re.findall(r"<!-- (.*?) -->", path.read_text())
             for path in (tmp_path / "curve.svg", ROOT / "docs/curve.svg")]
    assert words[0] == words[1] and any("record 92" in word for word in words[0])
