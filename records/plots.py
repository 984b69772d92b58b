"""Figures 900 pixels wide, the width of a README: loss against time and step times of some runs, one run that may go on, or the history of the records."""

from __future__ import annotations

import csv
import datetime
import math
import os
from pathlib import Path

import numpy as np

from record import HOME, Folder, all_folders, load
from report import hardware, load_all, mean_curve
from runlog import fail, read_run, stage_times

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
    if path.suffix not in (".svg", ".png"):  # matplotlib would add one to a name without
        fail(f"plot {path}", "a path ending in .svg or .png", path.suffix or "no ending", "choose another --out")
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
    for number, (spec, (label, runs)) in enumerate(zip(specs, load_all(specs))):
        colour = COLOURS[number % len(COLOURS)]
        curve, band, kind = mean_curve(runs)
        if not len(curve) or len({len(run.stages) for run in runs}) > 1:
            fail(f"runs of {spec}", "losses along the run, and as many stages in each", f"{len(curve)} losses and "
                 f"{', '.join(sorted({str(len(run.stages)) for run in runs}))} stages", "name runs of one track")
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


def newest_log(place: Path) -> Path:
    """`place` itself if it is a log, else the log in that folder which was written to last."""
    if place.is_file():
        return place
    logs = sorted(place.rglob("*.jsonl"), key=lambda log: log.stat().st_mtime)
    if not logs:
        fail(f"logs in {place}", "a .jsonl file", "none", "start a run, or name its log or folder")
    return logs[-1]


def schedule_rates(preset: dict) -> list[float]:
    """The learning rate of each step, relative to its highest base, as `learning_rate` in train_gpt.py has it; the preset as in the head of a log."""
    optimizer, stages = preset["optimizer"], preset["stages"]
    scheduled, final = sum(stage["steps"] for stage in stages if not stage["extension"]), optimizer["final_learning_rate"]
    rates: list[float] = []
    for stage in stages:
        for step in range(len(rates), len(rates) + stage["steps"]):
            share = 0.0 if stage["extension"] else min((1 - step / scheduled) / optimizer["cooldown_fraction"], 1.0)
            rates.append(stage["learning_rate_multiplier"] * share + final * (1 - share))
    return rates


def plot_log(place: Path, path: Path) -> None:
    """Loss, ms a step and learning rate of one run, finished or not, by step; dotted lines are the borders of stages."""
    run = read_run(newest_log(place))
    if not len(run.train):
        fail(f"log {run.path}", "at least one step", "none yet", "wait for the first steps, or name another log")
    (steps, seconds, losses), colour = run.train.T, COLOURS[0]
    figure, ((loss_axes, step_axes, rate_axes),) = canvas(3, (1.3, 1, 1))
    loss_axes.plot(steps, losses, color=colour, label="training")
    if len(run.vals):
        loss_axes.plot(run.vals[:, 0], run.vals[:, 2], "o", color=COLOURS[1], label="validation")
    top = 1.02 * max(np.interp(0.1 * steps[-1], steps, losses), losses[-1], *run.vals[-1:, 2])
    loss_axes.set(ylabel="loss (nats a token)", ylim=(None, top if math.isfinite(top) else None))
    loss_axes.legend()

    times = np.diff(seconds, prepend=0) / np.diff(steps, prepend=0) * 1e3
    step_axes.step(steps, times, where="pre", color=colour)
    step_axes.set(ylabel="ms a step", ylim=(0, 1.1 * times.max()))

    try:
        rates = schedule_rates(run.head["preset"])
    except (KeyError, TypeError):  # a public log, or one of another version
        rates = []
    done = int(steps[-1])
    rate_axes.plot(range(1, len(rates) + 1), rates, color=colour, alpha=0.3)
    rate_axes.plot(range(1, done + 1)[:len(rates)], rates[:done], color=colour)
    rate_axes.set(ylabel="relative learning rate" if rates else "learning rate: not in this log")
    for axes in (loss_axes, step_axes, rate_axes):
        axes.set(xlabel="step", xlim=(0, max(run.total_steps, done)))
        for first, _ in run.stages:
            axes.axvline(first, color="grey", linewidth=0.8, linestyle=":")
    state = "in progress or killed" if run.state == "incomplete" else run.state[:60]
    figure.suptitle(f"{run.path.name}: step {done} of {run.total_steps}, {seconds[-1]:.1f} s, {state}", fontsize=10)
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
