"""Figures 900 pixels wide, the width of a README: loss against time and step times of some runs, or the history of the records."""

from __future__ import annotations

import csv
import datetime
import math
import os
from pathlib import Path

import numpy as np

from record import HOME, Folder, all_folders, load
from report import hardware, load_runs, mean_curve
from runlog import fail, stage_times

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct for the colour-blind too (Okabe and Ito)
LANDMARKS = {1: "llm.c", 3: "Muon", 8: "untied head", 12: "FlexAttention", 19: "FP8 head", 29: "FA3", 40: "backout", 46: "batch schedule",
             53: "multi-token", 62: "bigram hash", 81: "MUDD", 89: "FP8 MLP", 92: "n-gram table"}


def canvas(panels: int, ratios: tuple[float, ...], height: float = 3.8):
    try:
        import matplotlib
    except ImportError:
        fail("plot", "matplotlib", "none", "pip install -r requirements-dev.txt")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "records", "axes.grid": True,
                                "axes.axisbelow": True, "grid.alpha": 0.3, "legend.frameon": False})
    from matplotlib import pyplot
    return pyplot.subplots(1, panels, figsize=(9, height), width_ratios=ratios, layout="constrained", squeeze=False)


def save(figure, path: Path) -> None:
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # ends as the path does: that decides the format
    try:
        figure.savefig(aside, dpi=200 if path.suffix == ".png" else None, metadata={"Date": None} if path.suffix == ".svg" else None)
        os.replace(aside, path)
    except (OSError, ValueError) as error:
        aside.unlink(missing_ok=True)
        fail(f"plot {path}", "a writable path ending in .svg or .png", error, "choose another --out")


def plot_runs(specs: list[str], path: Path) -> None:
    """Left: loss against time on the clock, mean and standard deviation over runs, the final validation as a point. Right: ms a step by stage."""
    figure, ((loss_axes, step_axes),) = canvas(2, (1.5, 1))
    top, width = 0.0, 0.8 / len(specs)
    for number, spec in enumerate(specs):
        (label, runs), colour = load_runs(spec), COLOURS[number % len(COLOURS)]
        curve, band, kind = mean_curve(runs)
        loss_axes.plot(curve[:, 0], curve[:, 1], color=colour, label=f"{label.partition('_')[2] or label} (n = {len(runs)})")
        loss_axes.fill_between(curve[:, 0], curve[:, 1] - band, curve[:, 1] + band, color=colour, alpha=0.25, linewidth=0)
        loss_axes.errorbar([np.mean([r.ms for r in runs]) / 1e3], [np.mean([r.loss for r in runs])], np.std([r.loss for r in runs]), fmt="o", color=colour)
        top = max(top, np.interp(0.15 * curve[-1, 0], curve[:, 0], curve[:, 1]))
        times = np.array([stage_times(run) for run in runs])
        places = np.arange(times.shape[1]) + (number - (len(specs) - 1) / 2) * width
        bars = step_axes.bar(places, times.mean(0), width, color=colour)
        step_axes.bar_label(bars, [f"{t:.{0 if t >= 100 else 1}f}" if math.isfinite(t) else "" for t in times.mean(0)], fontsize=8 if len(specs) < 3 else 6)
    loss_axes.set(xlabel="seconds on the clock", ylabel=f"{kind}; point: final validation", ylim=(None, top))
    loss_axes.legend()
    stages = len(runs[0].stages)
    step_axes.set(xlabel="stage", ylabel="ms a step", xticks=range(stages), xticklabels=range(1, stages + 1), xlim=(-0.6, stages - 0.4))
    step_axes.grid(False, axis="x")
    save(figure, path)


def read_history() -> list[tuple[int, datetime.date, float, str]]:
    with (HOME / "history.csv").open(newline="") as file:
        return [(int(row["number"]), datetime.date.fromisoformat(row["date"]), float(row["seconds"]), row["change"]) for row in csv.DictReader(file)]


def our_records() -> dict[str, list[Folder]]:
    """Finished records by track and hardware, oldest first."""
    found: dict[str, list[Folder]] = {}
    for folder in sorted(map(load, all_folders()), key=lambda folder: folder.started):
        if folder.record["means"] and not folder.track.practice:
            found.setdefault(f"{folder.record['track']}, {hardware(folder.runs('a')[0])}", []).append(folder)
    return found


def plot_history(path: Path) -> None:
    """The public records on 8 x H100, minutes on a logarithmic scale; beside them our own, which run other tracks or hardware."""
    ours = our_records()
    figure, axes = canvas(2 if ours else 1, (2, 1) if ours else (1,), 4.2)
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    history, axis = read_history(), axes[0, 0]
    dates, times = [date for _, date, _, _ in history], [seconds / 60 for *_, seconds, _ in history]
    axis.step(dates, times, where="post", color=COLOURS[0], label="public records, 8 x H100")
    for side, (number, date, seconds, _) in enumerate(row for row in history if row[0] in LANDMARKS):
        axis.plot(date, seconds / 60, "o", color=COLOURS[0], markersize=4)
        axis.annotate(f"{number} {LANDMARKS[number]}", (date, seconds / 60), (6, 16) if side % 2 else (-6, -16), textcoords="offset points", fontsize=8,
                      ha="left" if side % 2 else "right", arrowprops={"arrowstyle": "-", "alpha": 0.3})
    axis.set(yscale="log", ylabel="minutes to 3.28", yticks=(1, 2, 5, 10, 20, 45), yticklabels=("1", "2", "5", "10", "20", "45"), ylim=(0.4, 60))
    axis.minorticks_off()
    axis.legend()
    for number, (label, folders) in enumerate(ours.items()):
        dates = [datetime.date.fromisoformat(folder.record["date"]) for folder in folders]
        axes[0, 1].plot(dates, [folder.record["means"]["a"]["ms"] / 1e3 for folder in folders], "o-", color=COLOURS[1 + number % 5], label=label)
        axes[0, 1].set(ylabel="seconds")
    for panel in axes[0]:
        locator = AutoDateLocator(minticks=3, maxticks=7)
        panel.xaxis.set(major_locator=locator, major_formatter=ConciseDateFormatter(locator))
        panel.margins(x=0.12)
    if ours:
        axes[0, 1].set_ylim(0, 1.25 * max(folder.record["means"]["a"]["ms"] / 1e3 for folders in ours.values() for folder in folders))
        axes[0, 1].legend(fontsize=8)
    save(figure, path)
