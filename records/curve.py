"""Loss against time of two sides: how much lower at equal time, how much earlier at equal loss, and the picture of both."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from plots import COLOURS, canvas, save
from report import load_runs, mean_curve, seconds_to
from runlog import fail


def load_curves(specs: list[str]) -> list[tuple[str, np.ndarray, int]]:
    """(label, rows of seconds and loss averaged over the runs, number of runs) of each side; all are losses of one kind."""
    sides, kinds = [], {}
    for spec in specs:
        label, runs = load_runs(spec)
        curve, _, kind = mean_curve(runs)
        sides.append((label.removesuffix(".txt").removesuffix(".jsonl"), curve, len(runs)))
        kinds[spec] = kind
    if len(set(kinds.values())) > 1:
        fail("curves", "validation losses on every side, or training losses on every side", kinds, "train with --val-every N")
    return sides


def loss_after(curve: np.ndarray, seconds: float) -> float:
    """The loss of a curve at a time, between its rows linearly; nan before its first row and after its last."""
    return float(np.interp(seconds, curve[:, 0], curve[:, 1], left=math.nan, right=math.nan))


def common_levels(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Losses that both curves pass: the lowest of them, and others ever further above it."""
    lowest = max(a[:, 1].min(), b[:, 1].min())
    highest = min(a[0, 1], b[0, 1])
    return [lowest + above for above in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6) if lowest + above <= highest]


def table(specs: list[str]) -> str:
    """Both comparisons as text; A and B are the two sides in the order given."""
    (name_a, a, n_a), (name_b, b, n_b) = load_curves(specs)
    rows = [f"A  {name_a} (n = {n_a})", f"B  {name_b} (n = {n_b})", "", f"{'seconds':>10} {'loss A':>9} {'loss B':>9} {'A - B':>9}"]
    end = min(a[-1, 0], b[-1, 0])
    for seconds in np.linspace(end / 6, end, 6):
        of_a, of_b = loss_after(a, seconds), loss_after(b, seconds)
        rows.append(f"{seconds:>10.1f} {of_a:>9.4f} {of_b:>9.4f} {of_a - of_b:>+9.4f}")

    rows += ["", f"{'loss':>10} {'s of A':>9} {'s of B':>9} {'A / B':>9}"]
    for level in common_levels(a, b):
        of_a, of_b = seconds_to(a, level), seconds_to(b, level)
        rows.append(f"{level:>10.4f} {of_a:>9.1f} {of_b:>9.1f} {of_a / of_b:>9.3f}")
    return "\n".join(rows)


def draw(specs: list[str], path: Path) -> None:
    """Loss against seconds, one line a side; the point at its end is the final validation."""
    figure, ((axes,),) = canvas(1, (1,))
    top = 0.0
    for number, (label, curve, n) in enumerate(load_curves(specs)):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(curve[:, 0], curve[:, 1], color=colour, label=f"{label.replace('_', ' ')} (n = {n})")
        axes.plot(*curve[-1], "o", color=colour)
        axes.annotate(f"{curve[-1, 1]:.3f} in {curve[-1, 0]:.0f} s", curve[-1], (0, 8), textcoords="offset points", ha="right", color=colour)
        top = max(top, np.interp(0.1 * curve[-1, 0], curve[:, 0], curve[:, 1]))
    axes.set(xlabel="seconds on the clock", ylabel="validation loss (nats a token)", xlim=(0, None), ylim=(None, top))
    axes.legend()
    save(figure, path)
