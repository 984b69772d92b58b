"""Loss against time of two sides: how much lower at equal time, how much earlier at equal loss, and the picture of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

import stats
from plots import COLOURS, canvas, save
from report import VALIDATION, differing, load_all, mean_curve, seconds_to
from runlog import Run, fail


class Side(NamedTuple):
    label: str
    curve: np.ndarray  # rows of seconds and loss, averaged over the runs; one row where only the final validation can be compared
    runs: list[Run]
    kind: str  # what the losses are


def final_validation(side: Side) -> Side:
    """What is left of a side whose curve cannot be compared: a curve of one row."""
    seconds, losses = [run.ms / 1e3 for run in side.runs], [run.loss for run in side.runs]
    return side._replace(curve=np.array([[stats.mean(seconds), stats.mean(losses)]]), kind="validation loss")


def load_curves(specs: list[str]) -> list[Side]:
    """Each side, all with losses of one kind. Beside a side that was validated along the way a record has only its final validation."""
    loaded = load_all(specs)
    for _, runs in loaded[1:]:
        if different := differing(loaded[0][1], runs, VALIDATION):
            fail("curves", "the same validation tokens on every side", "; ".join(different), "name runs of one track")

    sides = []
    for label, runs in loaded:
        curve, _, kind = mean_curve(runs)
        if not len(curve):
            fail(f"curve of {label}", "losses along the run", "none in its logs", "name another log")
        sides.append(Side(label.removesuffix(".txt").removesuffix(".jsonl"), curve, runs, kind))
    if len({side.kind for side in sides}) == 1:
        return sides
    return [final_validation(side) if side.kind == "training loss" else side for side in sides]


def describe(side: Side) -> str:
    """What the losses of a side are and how far they go."""
    stages = side.runs[0].head.get("preset", {}).get("stages", ())
    further = any(len(weights) > 1 for stage in stages for weights in stage.get("targets") or ())
    high = " (high at first, with the second and third next token as targets)" if further and side.kind == "training loss" else ""
    (begin, first), (end, last) = side.curve[0], side.curve[-1]
    span = f"from {first:.4f} after {begin:.1f} s to" if len(side.curve) > 1 else "only at the end,"
    return f"{side.kind}{high}, {span} {last:.4f} after {end:.1f} s"


def loss_after(curve: np.ndarray, seconds: float) -> float:
    """The loss of a curve at a time, between its rows linearly; nan before its first row and after its last."""
    return float(np.interp(seconds, curve[:, 0], curve[:, 1], left=math.nan, right=math.nan))


def common_levels(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Losses that both curves pass: the lowest of them, and others ever further above it."""
    lowest = max(a[:, 1].min(), b[:, 1].min())
    highest = min(a[0, 1], b[0, 1])
    return [lowest + above for above in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6) if lowest + above <= highest]


def column(value: float, form: str, absent: str) -> str:
    return f"{format(value, form) if math.isfinite(value) else absent:>9}"


def table(specs: list[str]) -> str:
    """Both comparisons as text; A and B are the two sides in the order given. A side of one row is compared where it is, and nowhere else."""
    sides = load_curves(specs)
    a, b = (side.curve for side in sides)
    end = min(a[-1, 0], b[-1, 0])
    points = [curve[0] for curve in (a, b) if len(curve) == 1]
    times = [point[0] for point in points] or np.linspace(end / 6, end, 6)
    levels = [point[1] for point in points] or common_levels(a, b)

    known = all(VALIDATION["validation hash"](run) for side in sides for run in side.runs)
    rows = [f"{letter}  {side.label} (n = {len(side.runs)})\n   {describe(side)}" for letter, side in zip("AB", sides)]
    rows += [f"validation tokens: {'the same' if known else 'perhaps not the same, as some logs do not have their hash'}", ""]

    rows.append(f"{'seconds':>10} {'loss A':>9} {'loss B':>9} {'A - B':>9}")
    for seconds in times:
        of_a, of_b = loss_after(a, seconds), loss_after(b, seconds)
        rows.append(f"{seconds:>10.1f} {column(of_a, '.4f', '-')} {column(of_b, '.4f', '-')} {column(of_a - of_b, '+.4f', '-')}")

    rows += ["", f"{'loss':>10} {'s of A':>9} {'s of B':>9} {'A / B':>9}"]
    for level in levels:
        of_a, of_b = seconds_to(a, level), seconds_to(b, level)
        rows.append(f"{level:>10.4f} {column(of_a, '.1f', 'never')} {column(of_b, '.1f', 'never')} {column(of_a / of_b, '.3f', '-')}")
    return "\n".join(rows)


def draw(specs: list[str], path: Path) -> None:
    """Loss against seconds, one line a side with a point at its end; only the point where only the final validation can be compared."""
    sides = load_curves(specs)
    figure, ((axes,),) = canvas(1, (1,))
    top = 0.0
    for number, (label, curve, runs, _) in enumerate(sides):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(curve[:, 0], curve[:, 1], "-" if len(curve) > 1 else "o", color=colour, label=f"{label.replace('_', ' ')} (n = {len(runs)})")
        axes.plot(*curve[-1], "o", color=colour)
        axes.annotate(f"{curve[-1, 1]:.3f} in {curve[-1, 0]:.0f} s", curve[-1], (0, 8), textcoords="offset points", ha="right", color=colour)
        top = max(top, np.interp(0.1 * curve[-1, 0], curve[:, 0], curve[:, 1]))
    axes.set(xlabel="seconds on the clock", ylabel=f"{sides[0].kind} (nats a token)", xlim=(0, None), ylim=(None, top))
    axes.legend()
    save(figure, path)
