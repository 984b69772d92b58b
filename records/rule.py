"""The rule of all tracks for records since RULE_SINCE: when a loss reaches its target, and when a time is a gain."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import stats
from record import (
    HIGH_END,
    HOME,
    RUNS_FACTOR,
    Folder,
    listed_before_the_rule,
    readable,
    require_runs,
    runs_for,
)
from tracks import RULE_SINCE, TRACKS

LEVEL = 0.01  # of the one-sided z-test; a restarted idea has half of it
NO_WORSE = 0.001  # an upper limit of the loss difference below this counts as the same loss
UPPER_95 = 1.6448536269514722
# What a loss is worth in time: .001 is half a percent (LOG, "What a loss is worth in time"). It holds for small
# differences.
TIME_OF_LOSS, FURTHEST = 5.0, 0.03


class Reached(NamedTuple):
    """The test of a mean loss against the target."""

    standard_errors: float  # that the mean lies below the target
    p: float
    level: float

    @property
    def ok(self) -> bool:
        return self.p < self.level


def losses(folder: Folder, arm: str = "a") -> list[float]:
    return [run.loss for run in folder.runs(arm)]


def reached(folder: Folder) -> Reached:
    """One-sided z-test of arm a; all of its runs count."""
    z = stats.z_below(losses(folder), folder.target, folder.track.loss_sd)
    planned = (folder.repeated or folder).record["plan"]
    return Reached(z, stats.normal_cdf(-z), LEVEL / 2 if "restarts" in planned else LEVEL)


def ended_high(values: list[float]) -> int:
    """How many runs ended more than HIGH_END above the median."""
    middle = statistics.median(values)
    return sum(value > middle + HIGH_END for value in values)


class EqualLoss(NamedTuple):
    """Arm a beside arm b: the loss, and the time if both had ended at b's loss."""

    loss: float  # a - b
    loss_limit: float  # the upper 95 % limit of that
    ms: float  # a - b at the loss of b
    ms_limit: float  # the upper limit of that
    same_training: bool  # every pair ended with one loss, to the last digit

    @property
    def no_worse(self) -> bool:
        return self.same_training or self.loss_limit < NO_WORSE

    @property
    def gained(self) -> bool:
        return abs(self.loss) <= FURTHEST and self.ms_limit < 0


def equal_loss(folder: Folder, time: stats.Interval) -> EqualLoss:
    """`time` is the paired difference in ms. A loss counts by TIME_OF_LOSS a nat; both uncertainties add as squares."""
    a, b = losses(folder), losses(folder, "b")
    difference = stats.mean(a) - stats.mean(b)
    error = folder.track.loss_sd * math.sqrt(1 / len(a) + 1 / len(b))
    ms_a_nat = TIME_OF_LOSS * stats.mean([run.ms for run in folder.runs("b")])
    ms = time.difference + ms_a_nat * difference
    reach = math.hypot(time.high - time.difference, UPPER_95 * ms_a_nat * error)
    return EqualLoss(difference, difference + UPPER_95 * error, ms, ms + reach, a == b)


def rule_lines(folder: Folder, time: stats.Interval | None) -> list[str]:
    """What the rule says of a record, for its README."""
    values, lines = losses(folder), []
    high = f"{ended_high(values)} of {len(values)} ended more than {HIGH_END} above the median."
    if folder.target is None or folder.track.practice:
        lines.append(high)
    else:
        test = reached(folder)
        lines.append(f"Target {folder.target:.4f}: {test.standard_errors:+.1f} standard errors below it (sd fixed at "
                     f"{folder.track.loss_sd}), one-sided p = {test.p:.2g}, needs < {test.level}; {high}")
    if time is not None:
        at = equal_loss(folder, time)
        lines.append(f"At the parent's loss: time {at.ms / 1e3:+.3f} s, upper limit {at.ms_limit / 1e3:+.3f} s; "
                     f"loss difference's upper 95 % limit {at.loss_limit:+.4f}.")
    return lines


def before_the_rule() -> list[Folder]:
    """Those that are listed, with all their runs."""
    found = [folder for folder in readable(HOME) if not folder.under_rule and listed_before_the_rule(folder)]
    for folder in found:
        require_runs(folder)
    return sorted(found, key=lambda f: f.started)


def sd_table(folders: list[Folder]) -> str:
    """The standard deviation of each track: what the logged runs say, and what is fixed."""
    rows = ["| track | runs | arms | degrees of freedom | pooled sd | fixed | n for a margin of .003, .004, .006 |",
            "|---|---|---|---|---|---|---|"]
    for name, track in TRACKS.items():
        if track.practice:
            continue
        arms = [losses(f, arm) for f in folders if f.record["track"] == name for arm in f.record["scripts"]]
        found, degrees = stats.pooled_sd(arms)
        needed = ", ".join(str(runs_for(margin, track.loss_sd)) for margin in (0.003, 0.004, 0.006))
        pooled = f"{found:.4f}" if degrees else ""
        rows.append(f"| `{name}` | {sum(map(len, arms))} | {len(arms)} | {degrees} | {pooled} | {track.loss_sd} | "
                    f"{needed} |")
    return "\n".join(rows)


def verdict(folder: Folder) -> str:
    """What the rule would have said of a record before it, at the target of its time."""
    track, values = folder.track, losses(folder)
    z = stats.z_below(values, folder.target, track.loss_sd)
    needed = f"{runs_for(folder.target - stats.mean(values), track.loss_sd)}" if z > 0 else "none"
    passed = "yes" if stats.normal_cdf(-z) < LEVEL else "no"
    gained = ""
    if folder.parent is not None:
        time = stats.paired(*([run.ms for run in folder.runs(arm)] for arm in "ab"))
        at = equal_loss(folder, time)
        counts = at.gained or at.no_worse and time.high < 0
        gained = f"{'yes' if counts else 'no'}, {at.ms / 1e3:+.2f} s (limit {at.ms_limit / 1e3:+.2f})"
    name = folder.path.name
    return f"| {name} | {len(values)} | {z:+.1f} | {stats.normal_cdf(-z):.2g} | {passed} | {needed} | {gained} |"


def rule_tables(folders: list[Folder] | None = None) -> str:
    """Both tables of records/README.md, of these records before the rule, by default of all."""
    folders = before_the_rule() if folders is None else sorted(folders, key=lambda f: f.started)
    head = ["| record before the rule | n | standard errors below its target | p (z-test) | below by the rule | n for "
            "this margin "
            "| gain at the parent's loss |", "|---|---|---|---|---|---|---|"]
    said = (f"n = ceil({RUNS_FACTOR} sd^2 / margin^2), at least 5. Runs, arms and pooled sd are those of the records "
            f"before {RULE_SINCE}.")
    return "\n".join([sd_table(folders), "", said, "", *head, *map(verdict, folders)])
