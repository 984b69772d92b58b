"""Figures 900 pixels wide, the width of a README: loss against time and step times of some runs, one run that may go
on, or the history of the records."""

from __future__ import annotations

import csv
import datetime
import math
import os
from pathlib import Path

import numpy as np

from record import HOME, Folder, all_folders, load, rank, require_runs
from report import hardware, load_all, mean_curve
from runlog import Run, fail, first_step, read_run, stage_times

# Distinct for the colour-blind too (Okabe and Ito), with black and grey in place of yellow. Beyond the eighth, markers
# tell classes apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#888888")
MARKERS = "osD^vP*Xh"  # one more than colours, so that the pairs differ
LANDMARKS = {1: "llm.c", 3: "Muon", 8: "untied head", 12: "FlexAttention", 19: "FP8 head", 29: "FA3", 40: "backout",
             46: "batch schedule",
             53: "multi-token", 62: "bigram hash", 81: "MUDD", 89: "FP8 MLP", 92: "n-gram table"}


def canvas(panels: int, ratios: tuple[float, ...], height: float = 3.8):
    try:
        import matplotlib
    except ImportError:
        fail("plot", "matplotlib", "none", "pip install -r requirements-dev.txt")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
                                "svg.hashsalt": "records", "axes.grid": True,
                                "axes.axisbelow": True, "grid.alpha": 0.3, "legend.frameon": False})
    from matplotlib import pyplot
    return pyplot.subplots(1, panels, figsize=(9, height), width_ratios=ratios, layout="constrained", squeeze=False)


# Where a label may go, in points from what it names: near it first, to either side, above and below.
OFFSETS = [(dx * distance, dy * distance) for distance in (8, 14, 22, 32, 44, 58, 74, 92)
           for dx, dy in ((-1, 1), (1, 1), (-1, -1), (1, -1), (0, 1), (0, -1), (-1, 0), (1, 0))]


def boxes_of(axes, renderer) -> list:
    """What labels must not cover: the texts of a panel that are drawn already, its legend, and its data as small
    squares."""
    from matplotlib.transforms import Bbox
    boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
    boxes += [legend.get_window_extent(renderer) for legend in [axes.get_legend()] if legend]
    for line in axes.get_lines():
        path = line.get_path().interpolated(8).transformed(line.get_transform())  # between the rows of a curve too
        boxes += [Bbox.from_bounds(x - 2, y - 2, 4, 4) for x, y in path.vertices if math.isfinite(x + y)]
    return boxes


def place_labels(figure, axes, labels: list[tuple[str, tuple[float, float], str]], size: float = 8) -> None:
    """Write (text, point, colour) beside its point, where it covers neither data nor another label; above the point
    where no place is free."""
    figure.canvas.draw()
    taken, inside = boxes_of(axes, figure.canvas.get_renderer()), axes.get_window_extent()
    for text, point, colour in labels:
        made = axes.annotate(text, point, (0, 0), textcoords="offset points", fontsize=size, color=colour, ha="center",
                             va="center",
                             arrowprops={"arrowstyle": "-", "alpha": 0.4, "color": colour, "shrinkB": 3})
        made.set_in_layout(False)
        made.set_position(free_offset(figure, made, taken, inside) or (0, 16))
        taken.append(text_box(figure, made))


def text_box(figure, text):
    """Where a text lies, without the line that leads to its point."""
    from matplotlib.text import Annotation, Text
    renderer = figure.canvas.get_renderer()
    if isinstance(text, Annotation):
        text.update_positions(renderer)
    return Text.get_window_extent(text, renderer)


def free_offset(figure, label, taken: list, inside) -> tuple[float, float] | None:
    """The first of OFFSETS at which a label lies inside of its panel and over nothing; half its own size is added."""
    label.set_position((0, 0))
    own, scale = text_box(figure, label), figure.dpi / 72
    for dx, dy in OFFSETS:
        x = dx * scale + (math.copysign(own.width / 2, dx) if dx else 0)
        y = dy * scale + (math.copysign(own.height / 2, dy) if dy else 0)
        moved = own.translated(x, y)
        within = inside.x0 <= moved.x0 and moved.x1 <= inside.x1 and inside.y0 <= moved.y0 and moved.y1 <= inside.y1
        if within and not any(moved.overlaps(other) for other in taken):
            return x / scale, y / scale
    return None


def hidden_ticks(figure) -> set[int]:
    """The labels of ticks beyond an axis' ends, by their id: they exist and are not drawn."""
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


def overlapping_texts(figure) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other, of labels, bars, ticks and legends alike: none in a good picture."""
    from matplotlib.text import Text
    figure.canvas.draw()
    hidden = hidden_ticks(figure)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
             and id(text) not in hidden]
    boxes = [text_box(figure, text) for text in texts]
    return [(a.get_text(), b.get_text()) for i, (a, box) in enumerate(zip(texts, boxes))
            for b, other in zip(texts[i + 1:], boxes[i + 1:]) if box.width and other.width and box.overlaps(other)]


def save(figure, path: Path) -> None:
    if path.suffix not in (".svg", ".png"):  # matplotlib would add one to a name without
        fail(f"plot {path}", "a path ending in .svg or .png", path.suffix or "no ending", "choose another --out")
    aside = path.with_name(f".{os.getpid()}-{path.name}")  # ends as the path does: that decides the format
    try:
        figure.savefig(aside, dpi=200 if path.suffix == ".png" else None, metadata={"Date": None}
                       if path.suffix == ".svg" else None)
        os.replace(aside, path)
    except (OSError, ValueError) as error:
        fail(f"plot {path}", "a writable path ending in .svg or .png", error, "choose another --out")
    finally:
        aside.unlink(missing_ok=True)


def stage_keys(run: Run) -> list[str]:
    """A name for each stage of a run: its tokens a step, with a number where several have as many.

    So stages compare across schedules.
    """
    sizes = [text.partition(" tokens a step")[0] for _, text in run.stages]
    names = []
    for number, size in enumerate(sizes):
        tokens = size.replace(",", "")
        name = f"{int(tokens) / 1e3:.0f} k" if tokens.isdigit() else size.replace(" of the steps", "")
        again = sizes[:number].count(size)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def stage_order(keys: list[list[str]]) -> list[str]:
    """All stages of some runs, by their tokens and then their number; those of public logs as they come."""
    def place(name: str) -> tuple:
        tokens, _, again = name.partition(" k")
        return (0, int(tokens), again) if tokens.isdigit() else (1, 0, name)
    return sorted(dict.fromkeys(key for own in keys for key in own), key=place)


def draw_bars(axes, sides: list[tuple[str, list[Run]]]) -> None:
    """ms a step. Bars stand side by side where the stages have as many tokens a step; elsewhere one stands alone."""
    keys = [stage_keys(runs[0]) for _, runs in sides]
    order, width = stage_order(keys), 0.8 / len(sides)
    for number, ((_, runs), own) in enumerate(zip(sides, keys)):
        times = np.array([stage_times(run) for run in runs]).mean(0)
        owners = [[side for side, names in enumerate(keys) if key in names] for key in own]
        shifts = [sides_here.index(number) - (len(sides_here) - 1) / 2 for sides_here in owners]
        places = [order.index(key) + shift * width for key, shift in zip(own, shifts)]
        bars = axes.bar(places, times, width, color=COLOURS[number % len(COLOURS)])
        texts = [f"{time:.{0 if time >= 100 else 1}f}" if math.isfinite(time) else "" for time in times]
        crowded = len(order) * len(sides) > 6
        axes.bar_label(bars, texts, fontsize=6 if crowded else 8, rotation=90 if crowded else 0, padding=2)
    axes.set(xlabel="tokens a step, by stage", ylabel="ms a step", xticks=range(len(order)),
             xlim=(-0.6, len(order) - 0.4))
    axes.set_xticklabels(order, fontsize=8 if len(order) < 5 else 6, rotation=0 if len(order) < 5 else 35)
    axes.margins(y=0.15)
    axes.grid(False, axis="x")


def runs_figure(specs: list[str]):
    """Left: loss against time on the clock, mean and standard deviation over runs, the final validation as a point.

    Right: ms a step by stage.
    """
    sides = load_all(specs)
    for spec, (_, runs) in zip(specs, sides):
        if not len(mean_curve(runs)[0]) or len({len(run.stages) for run in runs}) > 1:
            fail(f"runs of {spec}", "losses along the run, and as many stages in each",
                 f"{len(mean_curve(runs)[0])} losses and "
                 f"{', '.join(sorted({str(len(run.stages)) for run in runs}))} stages", "name runs of one track")
    figure, ((loss_axes, step_axes),) = canvas(2, (1.5, 1), 4.2)
    top = 0.0
    for number, (label, runs) in enumerate(sides):
        colour = COLOURS[number % len(COLOURS)]
        curve, band, kind = mean_curve(runs)
        loss_axes.plot(curve[:, 0], curve[:, 1], color=colour,
                       label=f"{label.partition('_')[2] or label} (n = {len(runs)})")
        loss_axes.fill_between(curve[:, 0], curve[:, 1] - band, curve[:, 1] + band, color=colour, alpha=0.25,
                               linewidth=0)
        losses = [run.loss for run in runs]
        loss_axes.errorbar([np.mean([run.ms for run in runs]) / 1e3], [np.mean(losses)], np.std(losses), fmt="o",
                           color=colour)
        top = max(top, np.interp(0.15 * curve[-1, 0], curve[:, 0], curve[:, 1]))
    loss_axes.set(xlabel="seconds on the clock", ylabel=f"{kind}; point: final validation", ylim=(None, top))
    draw_bars(step_axes, sides)
    figure.legend(loc="outside upper left", ncols=min(len(sides), 3), fontsize=8)
    return figure


def plot_runs(specs: list[str], path: Path) -> None:
    save(runs_figure(specs), path)


def newest_log(place: Path) -> Path:
    """`place` itself if it is a log, else the log in that folder which was written to last."""
    if place.is_file():
        return place
    logs = sorted(place.rglob("*.jsonl"), key=lambda log: log.stat().st_mtime)
    if not logs:
        fail(f"logs in {place}", "a .jsonl file", "none", "start a run, or name its log or folder")
    return logs[-1]


def schedule_rates(preset: dict) -> list[float]:
    """The learning rate of each step, relative to its highest base, as `learning_rate` in train_gpt.py has it; the
    preset as in the head of a log."""
    optimizer, stages = preset["optimizer"], preset["stages"]
    scheduled, final = sum(stage["steps"] for stage in stages
                           if not stage["extension"]), optimizer["final_learning_rate"]
    rates: list[float] = []
    for stage in stages:
        for step in range(len(rates), len(rates) + stage["steps"]):
            share = 0.0 if stage["extension"] else min((1 - step / scheduled) / optimizer["cooldown_fraction"], 1.0)
            rates.append(stage["learning_rate_multiplier"] * share + final * (1 - share))
    return rates


def plot_log(place: Path, path: Path) -> None:
    """Loss, ms a step and learning rate of one run, finished or not, by step; dotted lines are the borders of stages.
    """
    run = read_run(newest_log(place))
    if not len(run.train):
        fail(f"log {run.path}", "at least one step", "none yet", "wait for the first steps, or name another log")
    (steps, seconds, losses), colour = run.train.T, COLOURS[0]
    counts = np.diff(steps, prepend=first_step(run))
    if counts.min() < 1:
        fail(f"log {run.path}", "steps that ascend", "one that repeats or goes back", "name a log as it was written")
    figure, ((loss_axes, step_axes, rate_axes),) = canvas(3, (1.3, 1, 1))
    loss_axes.plot(steps, losses, color=colour, label="training")
    if len(run.vals):
        loss_axes.plot(run.vals[:, 0], run.vals[:, 2], "o", color=COLOURS[1], label="validation")
    top = 1.02 * max(np.interp(0.1 * steps[-1], steps, losses), losses[-1], *run.vals[-1:, 2])
    loss_axes.set(ylabel="loss (nats a token)", ylim=(None, top if math.isfinite(top) else None))
    loss_axes.legend()

    times = np.diff(seconds, prepend=0) / counts * 1e3
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
        return [(int(row["number"]), datetime.date.fromisoformat(row["date"]), float(row["seconds"]), row["change"])
                for row in csv.DictReader(file)]


def our_records() -> dict[str, list[Folder]]:
    """Finished records by track and hardware, oldest first."""
    found: dict[str, list[Folder]] = {}
    for folder in sorted(map(load, all_folders()), key=lambda folder: folder.started):
        if folder.record["means"] and not folder.track.practice and not folder.record.get("abandoned"):
            require_runs(folder)
            place = hardware(folder.runs("a")[0]).replace("NVIDIA ", "").replace(" 80GB HBM3", "")
            found.setdefault(f"{folder.record['track']}, {place}", []).append(folder)
    return dict(sorted(found.items()))


def draw_public(figure, axis) -> None:
    """The public records as a staircase, the best known of them with their names."""
    history = read_history()
    dates, times = [date for _, date, _, _ in history], [seconds / 60 for *_, seconds, _ in history]
    axis.step(dates, times, where="post", color="#444444", linewidth=1)
    named = [(number, date, seconds / 60) for number, date, seconds, _ in history if number in LANDMARKS]
    axis.plot([date for _, date, _ in named], [minutes for *_, minutes in named], "o", color="#444444", markersize=4)
    axis.set(yscale="log", ylabel="minutes to 3.28", yticks=(1, 2, 5, 10, 20, 45),
             yticklabels=("1", "2", "5", "10", "20", "45"), ylim=(0.4, 70))
    axis.set_title("public records, 8 x H100", fontsize=9)
    axis.minorticks_off()


def draw_ours(axis, ours: dict[str, list[Folder]]) -> None:
    """Each class of ours with a colour and a marker of its own; what misses its target is hollow."""
    for number, (label, folders) in enumerate(ours.items()):
        begun = [datetime.datetime.fromisoformat(folder.started) for folder in folders]
        seconds = [folder.record["means"]["a"]["ms"] / 1e3 for folder in folders]
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axis.plot(begun, seconds, "-", color=colour, linewidth=1)
        for missed in (False, True):
            chosen = [(x, y) for x, y, folder in zip(begun, seconds, folders) if rank(folder)[0] is missed]
            axis.plot(*zip(*chosen or [(math.nan, math.nan)]), marker, color=colour, markersize=5, fillstyle="none"
                      if missed else "full")
        axis.plot([], [], f"{marker}-", color=colour, label=label)
    axis.set(yscale="log", ylabel="seconds", yticks=(10, 20, 50, 100, 200),
             yticklabels=("10", "20", "50", "100", "200"))
    axis.set_title("ours, other tracks (hollow: above target)", fontsize=9)
    axis.minorticks_off()


def history_figure():
    """The public records on 8 x H100, minutes on a logarithmic scale; beside them our own, which run other tracks or
    hardware."""
    ours = our_records()
    figure, axes = canvas(2 if ours else 1, (1.6, 1) if ours else (1,), 4.8)
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    draw_public(figure, axes[0, 0])
    if ours:
        draw_ours(axes[0, 1], ours)
        figure.legend(loc="outside lower center", ncols=min(len(ours), 4), fontsize=8)
    for panel in axes[0]:
        locator = AutoDateLocator(minticks=3, maxticks=7)
        panel.xaxis.set(major_locator=locator, major_formatter=ConciseDateFormatter(locator))
        panel.margins(x=0.12)
    labels = [(f"{number} {LANDMARKS[number]}", (mdate(date), seconds / 60), "#222222")
              for number, date, seconds, _ in read_history() if number in LANDMARKS]
    place_labels(figure, axes[0, 0], labels)
    return figure


def mdate(date: datetime.date) -> float:
    """A day as matplotlib counts it."""
    from matplotlib.dates import date2num
    return date2num(date)


def plot_history(path: Path) -> None:
    save(history_figure(), path)
