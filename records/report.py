"""What the runs say: the numbers of a record, and `compare`."""

from __future__ import annotations

import glob
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

import stats
from lanes import most_at_once
from record import HOME, Folder, find, hardware, load, require_stated, write_whole
from rule import rule_lines
from runlog import CUT_OFF, Run, fail, loss_curve, read_run, stage_times


def means(folder: Folder) -> dict[str, dict[str, float]]:
    """{arm: {loss, ms}} over the finished runs."""
    return {arm: {"loss": round(stats.mean([run.loss for run in runs]), 6),
                  "ms": round(stats.mean([run.ms for run in runs]), 1)}
            for arm in sorted(folder.record["scripts"]) if (runs := folder.runs(arm))}


def gain(folder: Folder) -> stats.Interval:
    """Time of arm a minus time of its parent in ms, paired by seed: negative is faster."""
    if len(folder.runs("a")) != len(folder.runs("b")):
        fail(f"runs of {folder.path}", "as many of arm a as of arm b",
             f"{len(folder.runs('a'))} and {len(folder.runs('b'))}", "restore the missing run")
    return stats.paired(*([run.ms for run in folder.runs(arm)] for arm in "ab"))


def spread(values: list[float], digits: int) -> str:
    return f"{stats.mean(values):.{digits}f}" + (f" ± {stats.sd(values):.{digits}f}" if len(values) > 1 else "")


def numbers_block(folder: Folder) -> str:
    """The generated part of a record's README: both arms, and the gain."""
    rows = ["| arm | runs | val loss | time (s) |", "|---|---|---|---|"]
    for arm, name in (("a", "this record"), ("b", folder.record["parent"])):
        if arm in folder.record["scripts"]:
            runs = folder.runs(arm)
            rows.append(f"| {arm}: {name} | {len(runs)} | {spread([r.loss for r in runs], 4)} | "
                        f"{spread([r.ms / 1e3 for r in runs], 3)} |")
    first = folder.runs("a")[0]
    place = f"{folder.record['track']}, {hardware(first)}, torch {first.head.get('torch')}"
    rows += ["", f"{place}, mean ± standard deviation."]
    at_once = most_at_once([run for arm in folder.record["scripts"] for run in folder.runs(arm)])
    if at_once > 1:
        own = "a GPU" if folder.record["plan"]["world"] == 1 else f"{folder.record['plan']['world']} GPUs"
        rows.append(f"Up to {at_once} runs at once, each on {own} of its own: these are times of runs beside others.")
    if folder.parent:
        time, loss = gain(folder), stats.welch(*([run.loss for run in folder.runs(arm)] for arm in "ab"))
        rows.append(f"Against the parent: time {time.difference / 1e3:+.3f} s ({time.low / 1e3:+.3f} to "
                    f"{time.high / 1e3:+.3f}, paired), "
                    f"loss {loss.difference:+.4f} ({loss.low:+.4f} to {loss.high:+.4f}); 99 % intervals.")
    if folder.under_rule:
        rows += rule_lines(folder, gain(folder) if folder.parent else None)
    return "\n".join(rows)


def block_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}\b[^>]*-->\n)(.*?)(\n<!-- /{name} -->)", re.DOTALL)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"{path}", "text in UTF-8", error, "save it as UTF-8")


def read_block(path: Path, name: str) -> str | None:
    """The text between <!-- name ... --> and <!-- /name -->, None where there is none."""
    match = block_pattern(name).search(text_of(path)) if path.exists() else None
    return match[2] if match else None


def write_block(path: Path, name: str, content: str) -> None:
    if read_block(path, name) is None:
        fail(f"{path}", f"<!-- {name} --> and <!-- /{name} -->, each on a line", "no such pair",
             "put them back where the table belongs")
    write_whole(path, block_pattern(name).sub(lambda match: match[1] + content + match[3], text_of(path), count=1))


def write_numbers(folder: Folder) -> None:
    write_block(folder.path / "README.md", "numbers", numbers_block(folder))


def names_record(path: Path) -> bool:
    """Whether `load` finds one."""
    return (find(path) / "record.json").exists()


def split_arm(spec: str) -> tuple[Path, str]:
    """`DIR:b` as (DIR, "b"); without an arm it is arm a."""
    return (Path(spec[:-2]), spec[-1]) if spec.endswith((":a", ":b")) else (Path(spec), "a")


def load_runs(spec: str) -> tuple[str, list[Run]]:
    """Label and finished runs behind `DIR`, `DIR:a`, `DIR:b` (a record's arm), a folder of logs, one log, or
    `record-92`, one of curves/."""
    path, arm = split_arm(spec)
    stated = {}
    if names_record(path):
        folder = load(path)
        stated = folder.record["runs"]
        runs, label = folder.runs(arm), folder.path.name + (":b" if arm == "b" else "")
    else:
        if not path.exists():
            path = next((HOME / "curves").glob(f"{glob.escape(path.name)}_*"), path)
        files = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".txt")) if path.is_dir() else [path]
        runs, label = [read_run(file) for file in files], path.name
    if broken := next((run for run in runs if run.broken and (run.ok or run.broken != CUT_OFF)), None):
        fail(f"log {broken.path}", "an unbroken chain of lines", broken.broken, "restore the log that was written")
    if not (done := [run for run in runs if run.ok]):
        why = next((f", {run.path.name}: {run.broken}" for run in runs if run.broken), "")
        fail(f"runs of {spec}", "at least one that ended well", f"{len(runs)} logs, none of a whole training{why}",
             "name a record, a folder of logs or a log")
    for run in done:
        require_stated(run.path, stated.get(run.path.name))
    return label + (f" ({len(runs) - len(done)} unfinished left out)" if len(done) < len(runs) else ""), done


def load_pair(a: str, b: str) -> tuple[tuple[str, list[Run]], tuple[str, list[Run]], bool]:
    """Both sides, and whether they are the arms of one plan.

    A record against its parent means its own arm b: same machine, interleaved.
    """
    path = Path(a.removesuffix(":a"))
    if names_record(path) and load(path).record["parent"] == find(Path(b)).resolve().name:
        b = f"{path}:b"
    left, right = load_runs(a), load_runs(b)
    seeds = [[run.head.get("seed") for run in runs] for _, runs in (left, right)]
    places, arms = zip(*map(split_arm, (a, b)))
    records = all(map(names_record, places))
    arms_of_one = records and len({load(place).path for place in places}) == 1 and len(set(arms)) == 2
    return left, right, arms_of_one and seeds[0] == seeds[1]


def load_all(specs: list[str]) -> list[tuple[str, list[Run]]]:
    """Label and runs of each side; the first one's parent is its own arm b, see load_pair."""
    return [load_runs(specs[0]), *(load_pair(specs[0], spec)[1] for spec in specs[1:])]


def differing(a: list[Run], b: list[Run], facts: dict[str, Callable[[Run], object]]) -> list[str]:
    """The facts in which the runs of both sides differ, where both know them, in words."""
    values = {name: [{str(fact(run)) for run in runs} - {"None"} for runs in (a, b)] for name, fact in facts.items()}
    return [f"{name} {', '.join(sorted(x))} against {', '.join(sorted(y))}" for name, (x, y) in values.items() if x
            and y and (x != y or len(x) > 1)]


def corpus(run: Run) -> str | None:
    """What a run's shards are named after. Of the public logs only that in curves/ says it."""
    shards = run.head.get("shards")
    return str(shards[0]).partition("_train_")[0] if shards else run.head.get("corpus")


# What the validation tokens of two runs must share. A log that lacks one of them shows no difference.
VALIDATION = {"validation tokens": lambda run: run.head.get("preset", {}).get("val_tokens"),
              "validation hash": lambda run: run.lines[-1].get("val_hash") if run.lines else None,
              "corpus": corpus}


def training_objective(run: Run) -> str:
    """What the training loss of a run's last stage is of: the targets, and the classes of the softmax unless they have
    importance weights, as all once had: these make the losses of different samples comparable."""
    preset = run.head.get("preset", {})
    model = preset.get("model", {})
    # They were a setting for some days, which began with that of the final values and ended before it.
    weighted = model.get("importance_weights", "final_values" not in model)
    last = (preset.get("stages") or [{}])[-1]
    return str((weighted or last.get("sampled_classes"), last.get("targets")))


def incomparable(a: list[Run], b: list[Run], pairs: bool = False) -> tuple[list[str], list[str]]:
    """Why the losses and why the times of two sides cannot be compared; empty lists if they can. The `pairs` of a plan
    may be spread over the GPUs of a machine if each stays on one."""
    loss = differing(a, b, {"preset": lambda r: r.head.get("preset", {}).get("name"), **VALIDATION})
    time = differing(a, b, {"hardware": lambda r: r.head.get("device"), "GPUs": lambda r: r.head.get("world"),
                            "nodes": lambda r: r.head.get("nodes", 1)})
    machine = {"machine": lambda r: r.head.get("machine")}
    if not pairs:
        return loss, time + differing(a, b, machine)
    apart = [differing([x], [y], machine) for x, y in zip(a, b)]
    return loss, time + sorted(set(itertools.chain(*apart)))


def mean_curve(runs: list[Run]) -> tuple[np.ndarray, np.ndarray, str]:
    """(seconds, loss) rows averaged over runs, the standard deviation of the loss at each, and what the loss is."""
    curves, kinds = zip(*map(loss_curve, runs))
    if len(set(kinds)) > 1:
        fail("logs", "runs that all have validations along the way, or none", " and ".join(sorted(set(kinds))),
             "name them apart")
    shortest = min(map(len, curves))
    stack = np.stack([curve[:shortest] for curve in curves])
    return stack.mean(0), stack[..., 1].std(0, ddof=1) if len(runs) > 1 else np.zeros(shortest), kinds[0]


def seconds_to(curve: np.ndarray, level: float) -> float:
    """When a curve first reaches `level`, between its rows linearly; nan if never, or before its first row."""
    best = np.minimum.accumulate(curve[:, 1])
    if not len(best) or best[-1] > level:
        return math.nan
    i = int(np.argmax(best <= level))
    if i == 0:
        return float(curve[0, 0]) if best[0] == level else math.nan
    (t0, _), (t1, _) = curve[i - 1], curve[i]
    return float(t0 + (t1 - t0) * (best[i - 1] - level) / (best[i - 1] - best[i]))


def stage_table(a: list[Run], b: list[Run]) -> list[str]:
    """ms a step of each stage of A beside B's, where that has the same one; nothing where a side has no stages."""
    if not a[0].stages or not b[0].stages:
        return []
    rows = [f"{'stage':<52} {'A ms/step':>10} {'B ms/step':>10} {'A - B':>8}"]
    times = [np.mean([stage_times(run) for run in runs if len(run.stages) == len(runs[0].stages)], axis=0)
             for runs in (a, b)]
    for i, (_, text) in enumerate(a[0].stages):
        same = i < len(b[0].stages) and b[0].stages[i][1] == text
        x, y = times[0][i], times[1][i] if same else math.nan
        cells = [f"{value:.2f}" if math.isfinite(value) else "-" for value in (x, y)]
        change = f"{100 * (x / y - 1):+.2f}%" if math.isfinite(x - y) else "-"
        rows.append(f"{f'{i + 1}  {text}':<52} {cells[0]:>10} {cells[1]:>10} {change:>8}")
    return rows if len(rows) > 1 else []


def outcome(interval: stats.Interval, needed: str) -> str:
    return "lower" if interval.high < 0 else "higher" if interval.low > 0 else f"no difference shown, {needed}"


def verdict(loss: stats.Interval, time: stats.Interval, needed: tuple[str, str]) -> str:
    """One sentence. Shown means: the 99 % interval excludes 0."""
    lower, higher = time.high < 0 or loss.high < 0, time.low > 0 or loss.low > 0
    word = {(False, False): "undecided", (True, False): "A is better", (False, True): "B is better",
            (True, True): "a trade of time for loss"}[lower, higher]
    return f"{word}: time {outcome(time, needed[1])}; loss {outcome(loss, needed[0])}"


def needed_text(difference: float, spread: float, samples: int) -> str:
    """How many runs would show what was seen, at level 0.01 with power 0.9."""
    n = stats.runs_needed(difference / spread, samples=samples) if spread > 0 and difference else None
    return (f"n = {n} {'an arm' if samples == 2 else 'pairs'} would show one of this size" if n
            else "too small to show with any n")


def equal_loss(a: list[Run], b: list[Run]) -> str:
    """When both reach the worse of the two last losses of their mean curves."""
    (curve_a, _, kind_a), (curve_b, _, kind_b) = mean_curve(a), mean_curve(b)
    if not len(curve_a) or not len(curve_b) or kind_a != kind_b:
        return "time at equal loss: the logs hold no common curve"
    if kind_a == "training loss" and {training_objective(run) for run in a} != {training_objective(run) for run in b}:
        return "time at equal loss: not to be had, the training losses are of other classes or targets"
    level = max(curve_a[-1, 1], curve_b[-1, 1])
    time_a, time_b = seconds_to(curve_a, level), seconds_to(curve_b, level)
    if math.isnan(time_a + time_b):
        return f"time at equal loss: not to be had, one side's log begins below {level:.4f}"
    return (f"time at equal loss: {kind_a} {level:.4f} after {time_a:.2f} s (A) and {time_b:.2f} s (B), "
            f"{time_a - time_b:+.2f} s. "
            "A guide: the end of a schedule lowers the loss by itself")


def pooled(arms: tuple[list[float], list[float]]) -> float:
    """Standard deviation common to both arms; 0 where no arm has two runs."""
    squares = [(len(values) - 1) * stats.sd(values) ** 2 for values in arms if len(values) > 1]
    return math.sqrt(sum(squares) / sum(len(values) - 1 for values in arms)) if squares else 0.0


def beside_one_public_run(a: list[Run], b: list[Run]) -> str | None:
    """The words for our runs beside a single one of others, which no test can judge;

    None where that is not what the sides are.
    """
    ours, theirs = (a, b) if a[0].head.get("machine") else (b, a)
    if len(theirs) != 1 or theirs[0].head.get("machine") or not ours[0].head.get("machine"):
        return None
    losses, times = [run.loss for run in ours], [run.ms / 1e3 for run in ours]
    lower = theirs[0].loss - stats.mean(losses)
    several = f"n = {len(losses)}, sd {stats.sd(losses):.4f}" if len(losses) > 1 else "n = 1"
    computed = " (computed)" if theirs[0].head.get("times") == "computed" else ""
    return (f"one run of theirs: {theirs[0].loss:.4f} in {theirs[0].ms / 1e3:.1f} s{computed}; "
            f"ours is {abs(lower):.4f} {'lower' if lower > 0 else 'higher'} ({several}) in {stats.mean(times):.1f} s; "
            f"no test")


def compare(a_spec: str, b_spec: str) -> str:
    """The report on two sets of runs. A single run an arm borrows the usual noise to say how many are needed."""
    (a_name, a), (b_name, b), pairs = load_pair(a_spec, b_spec)
    losses = [run.loss for run in a], [run.loss for run in b]
    times = [run.ms / 1e3 for run in a], [run.ms / 1e3 for run in b]
    no_loss, no_time = incomparable(a, b, pairs)
    loss, time = stats.welch(*losses), (stats.paired if pairs else stats.welch)(*times)
    usual = stats.mean(times[1])
    loss_sd = pooled(losses) or 0.0015
    several_pairs = pairs and len(times[0]) > 1
    time_sd = (stats.sd([x - y for x, y in zip(*times)]) if several_pairs else pooled(times)) or 0.001 * usual
    needed = needed_text(loss.difference, loss_sd, 2), needed_text(time.difference, time_sd, 1 if pairs else 2)
    if no_loss:
        conclusion = "none, the losses are not comparable"
    else:
        conclusion = beside_one_public_run(a, b)
    if not conclusion and no_time:
        conclusion = f"loss {outcome(loss, needed[0])}; the times are not comparable"
    elif not conclusion:
        conclusion = verdict(loss, time, needed)
    known = ("yes" if a[0].head.get("machine") and b[0].head.get("machine")
             else "perhaps, the logs do not name their machine")
    return "\n".join([
        *(f"{side}  {name}\n   {len(runs)} run{'s' * (len(runs) > 1)}, loss {spread(x, 5)}, time {spread(t, 3)} s, "
          f"{hardware(runs[0])}"
          for side, name, runs, x, t in zip("AB", (a_name, b_name), (a, b), losses, times)),
        f"losses comparable: {'no, ' + '; '.join(no_loss) if no_loss else 'yes'}",
        f"times comparable:  {'no, ' + '; '.join(no_time) if no_time else known}",
        f"loss A - B  {loss.difference:+.5f}  99 % interval {loss.low:+.5f} to {loss.high:+.5f} (Welch)",
        f"time A - B  {time.difference:+.3f} s = {100 * time.difference / usual if usual else 0:+.2f} %  99 % interval "
        f"{time.low:+.3f} to {time.high:+.3f} s "
        f"({'paired by seed' if pairs else 'Welch'})",
        *stage_table(a, b), *([] if no_loss else [equal_loss(a, b)]), f"verdict: {conclusion}"])
