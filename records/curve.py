"""Loss against time of two sides: how much lower at equal time, how much earlier at equal loss, and the picture of
both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

import stats
from plots import COLOURS, canvas, place_labels, save
from record import HOME, finished
from report import VALIDATION, differing, load_all, load_runs, mean_curve, seconds_to, training_objective
from runlog import Run, fail


class Side(NamedTuple):
    label: str
    # rows of seconds and loss, averaged over the runs; one row where only the final validation can be compared
    curve: np.ndarray
    runs: list[Run]
    kind: str  # what the losses are


def final_validation(side: Side) -> Side:
    """What is left of a side whose curve cannot be compared: a curve of one row."""
    seconds, losses = [run.ms / 1e3 for run in side.runs], [run.loss for run in side.runs]
    return side._replace(curve=np.array([[stats.mean(seconds), stats.mean(losses)]]), kind="validation loss")


def load_curves(specs: list[str]) -> list[Side]:
    """Each side, all with losses of one kind.

    Beside a side that was validated along the way, or trained on another objective, a record has only its final
    validation.
    """
    loaded = load_all(specs)
    for _, runs in loaded[1:]:
        if different := differing(loaded[0][1], runs, VALIDATION):
            fail("curves", "the same validation tokens on every side", "; ".join(different), "name runs of one track")

    sides = []
    for label, runs in loaded:
        curve, _, kind = mean_curve(runs)
        if not len(curve):
            fail(f"curve of {label}", "losses along the run", "none in its logs", "name another log")
        sides.append(Side(label.removesuffix(".txt").removesuffix(".jsonl").removesuffix(".json"), curve, runs, kind))
    if len({(side.kind, side.kind == "training loss" and training_objective(run))
            for side in sides for run in side.runs}) == 1:
        return sides
    return [final_validation(side) if side.kind == "training loss" else side for side in sides]


def describe(side: Side) -> str:
    """What the losses of a side are and how far they go."""
    stages = side.runs[0].head.get("preset", {}).get("stages", ())
    further = any(len(weights) > 1 for stage in stages for weights in stage.get("targets") or ())
    high = (" (high at first, with the second and third next token as targets)" if further
            and side.kind == "training loss" else "")
    (begin, first), (end, last) = side.curve[0], side.curve[-1]
    span = f"from {first:.4f} after {begin:.1f} s to" if len(side.curve) > 1 else "only at the end,"
    computed = ", times computed" if is_computed(side) else ""
    return f"{side.kind}{high}, {span} {last:.4f} after {end:.1f} s{computed}"


def is_computed(side: Side) -> bool:
    """Whether its times were not measured."""
    return any(run.head.get("times") == "computed" for run in side.runs)


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
    """Both comparisons as text;

    A and B are the two sides in the order given. A side of one row is compared where it is, and nowhere else.
    """
    sides = load_curves(specs)
    a, b = (side.curve for side in sides)
    end = min(a[-1, 0], b[-1, 0])
    points = [curve[0] for curve in (a, b) if len(curve) == 1]
    times = [point[0] for point in points] or np.linspace(end / 6, end, 6)
    levels = [point[1] for point in points] or common_levels(a, b)

    known = all(VALIDATION["validation hash"](run) for side in sides for run in side.runs)
    rows = [f"{letter}  {side.label} (n = {len(side.runs)})\n   {describe(side)}" for letter, side in zip("AB", sides)]
    rows += [f"validation tokens: "
             f"{'the same' if known else 'perhaps not the same, as some logs do not have their hash'}", ""]

    rows.append(f"{'seconds':>10} {'loss A':>9} {'loss B':>9} {'A - B':>9}")
    for seconds in times:
        of_a, of_b = loss_after(a, seconds), loss_after(b, seconds)
        rows.append(f"{seconds:>10.1f} {column(of_a, '.4f', '-')} {column(of_b, '.4f', '-')} "
                    f"{column(of_a - of_b, '+.4f', '-')}")

    rows += ["", f"{'loss':>10} {'s of A':>9} {'s of B':>9} {'A / B':>9}"]
    for level in levels:
        of_a, of_b = seconds_to(a, level), seconds_to(b, level)
        missing_a, missing_b = ("never" if curve[:, 1].min() > level else "-" for curve in (a, b))
        rows.append(f"{level:>10.4f} {column(of_a, '.1f', missing_a)} {column(of_b, '.1f', missing_b)} "
                    f"{column(of_a / of_b, '.3f', '-')}")
    return "\n".join(rows)


def draw_sides(figure, axes, sides: list[Side]) -> None:
    """Loss against seconds, one line a side with a point at its end.

    Only the point where only the final validation can be compared. What was computed is dashed and ends in a hollow
    point.
    """
    top = max(np.interp(0.1 * side.curve[-1, 0], *side.curve.T) for side in sides)
    labels = []
    for number, side in enumerate(sides):
        colour, (seconds, loss) = COLOURS[number % len(COLOURS)], side.curve[-1]
        computed = is_computed(side)
        name = f"{side.label.replace('_', ' ')} ({'times computed' if computed else f'n = {len(side.runs)}'})"
        axes.plot(*side.curve.T, "--" if computed else "-", color=colour, label=name)
        axes.plot(seconds, loss, "o", color=colour, fillstyle="none" if computed else "full")
        labels.append((f"{loss:.3f} in {seconds:.0f} s{' (computed)' if computed else ''}", (seconds, loss), colour))
    axes.set(xlabel="seconds on the clock", ylabel=f"{sides[0].kind} (nats a token)", xlim=(0, None), ylim=(None, top))
    axes.margins(y=0.12)
    axes.legend(fontsize=8, loc="upper right")
    place_labels(figure, axes, labels)


def curve_figure(specs: list[str]):
    """The curves of two sides."""
    figure, ((axes,),) = canvas(1, (1,))
    draw_sides(figure, axes, load_curves(specs))
    return figure


def draw(specs: list[str], path: Path) -> None:
    save(curve_figure(specs), path)


WEBMIX_TRACKS = "speedrun-webmix", "speedrun-webmix-free"
ONE_GPU = "1 x NVIDIA H200"


def ends_on_webmix() -> list[tuple[str, float, float, str]]:
    """(words, seconds, loss, marker) of whole runs on webmix and one H200: our records, and the public ones in curves/.
    Of a track the first and the newest record have words."""
    found = []
    for track in WEBMIX_TRACKS:
        ours = [folder for folder in finished(HOME, track) if folder.hardware == ONE_GPU]
        for folder in ours:
            mean, n = folder.record["means"]["a"], len(folder.runs("a"))
            named = folder in (ours[0], ours[-1])
            words = f"{folder.path.name.partition('_')[2]} (n = {n})" if named else ""
            found.append((words, mean["ms"] / 1e3, mean["loss"], "s"))
    for name, words in (("record-92", "record 92, 800 steps (n = 1)"),
                        ("record-92-short", "record 92, 500 steps (n = 1)")):
        (run,) = load_runs(name)[1]
        found.append((words, run.ms / 1e3, run.loss, "o"))
    return found


def draw_ends(figure, axes) -> None:
    """Final validations on webmix by time: ours as squares, record 92's two measured runs as circles."""
    labels = []
    for words, seconds, loss, marker in ends_on_webmix():
        colour = COLOURS[0] if marker == "s" else COLOURS[1]
        axes.plot(seconds, loss, marker, color=colour, alpha=1.0 if words else 0.4)
        if words:
            labels.append((f"{words}:\n{loss:.4f} in {seconds:.1f} s", (seconds, loss), colour))
    axes.set(xlabel="seconds on the clock", ylabel="final validation loss", title="webmix, one H200: measured ends")
    axes.margins(0.3)
    axes.title.set_fontsize(9)
    place_labels(figure, axes, labels, 7.5)


def readme_figure():
    """The sprint's curve beside record 89's on webtext, and whole runs on webmix beside record 92's."""
    figure, ((left, right),) = canvas(2, (1.25, 1), 4.0)
    left.set_title("webtext, one H200", fontsize=9)
    right.set_title(" ", fontsize=9)
    sides = load_curves(["sprint", "record-89"])
    named = [side._replace(label=label) for side, label in zip(sides, ("a sprint of ours", "record 89"))]
    draw_sides(figure, left, named)
    draw_ends(figure, right)
    return figure


def draw_readme(path: Path) -> None:
    save(readme_figure(), path)
