"""`verify`: every check a record must pass, one line each. A check sees only the folder, its parent and the logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import stats
from codediff import sections
from record import SCRIPT, Folder, load, manifest_hash, plan_id, plan_order, plan_seeds
from report import MEANS_DIGITS, gain, means, numbers_block, read_block
from runlog import Failure, Run, sha256

FREE_SETTINGS = {"preset", "data", "seed", "log_dir", "val_every"}  # command-line options that may differ from their defaults in a record
SAME_EVERYWHERE = ("machine", "gpus", "device", "world", "torch", "triton", "cuda", "driver", "python")


class Check(NamedTuple):
    name: str
    ok: bool
    text: str


class Context(NamedTuple):
    folder: Folder
    runs: dict[str, Run]  # "a-s123" -> run, for the planned runs that are there


def wrong(problems: list[str]) -> tuple[bool, str] | None:
    """The first problem and how many more there are; None if there is none."""
    return (False, problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")) if problems else None


def check_script(c: Context) -> tuple[bool, str]:
    found = {arm: sha256(c.folder.script(arm).read_bytes()) if c.folder.script(arm).exists() else "no file" for arm in c.folder.record["scripts"]}
    bad = [f"{c.folder.script(arm)}: expected sha256 {digest[:16]}, found {found[arm][:16]}; fix: restore the script that ran"
           for arm, digest in c.folder.record["scripts"].items() if found[arm] != digest]
    return wrong(bad) or (True, ", ".join(f"arm {arm} {digest[:16]}" for arm, digest in found.items()))


def check_parent(c: Context) -> tuple[bool, str]:
    if c.folder.parent is None:
        return True, "none, arm a only"
    try:
        parent = load(c.folder.parent).record
    except Failure as failure:
        return False, str(failure)
    bad = [] if parent["track"] == c.folder.record["track"] else [f"expected a record of {c.folder.record['track']}, found {parent['track']}"]
    shared = parent["data"].keys() & c.folder.record["data"].keys()
    bad += [f"{name}: expected the parent's content, found another" for name in sorted(shared) if parent["data"][name] != c.folder.record["data"][name]]
    return wrong(bad) or (True, c.folder.record["parent"])


def check_plan(c: Context) -> tuple[bool, str]:
    record, plan = c.folder.record, c.folder.record["plan"]
    n = len(plan["seeds"])
    bad = [] if plan["id"] == plan_id(record) else [f"expected id {plan_id(record)} from its content, found {plan['id']}: changed after `new`"]
    bad += [] if plan["seeds"] == plan_seeds(record["scripts"]["a"], n) else ["expected the seeds that follow from the script, found others"]
    bad += [] if plan["order"] == plan_order(plan["seeds"], "".join(sorted(record["scripts"]))) else ["expected every seed once an arm, interleaved"]
    bad += [] if n >= c.folder.track.least_runs else [f"expected at least {c.folder.track.least_runs} runs an arm, found {n}"]
    return wrong(bad) or (True, f"{n} runs an arm, {plan['id']}")


def check_runs(c: Context) -> tuple[bool, str]:
    planned = {f"{key}.jsonl" for key in c.folder.record["plan"]["order"]}
    listed, found = set(c.folder.record["runs"]), {path.name for path in (c.folder.path / "runs").glob("*")}
    bad = [f"expected {name}, found none; fix: python records run {c.folder.path}" for name in sorted(planned - found)]
    bad += [f"expected the planned runs only, found {name} too" for name in sorted(found - planned)]
    bad += [f"expected {name} in record.json, found no hash" for name in sorted((found & planned) - listed)]
    bad += [f"expected the runs of the plan in record.json, found {name} too" for name in sorted(listed - planned)]
    aside = len(list((c.folder.path / "unfinished").glob("*.jsonl")))
    return wrong(bad) or (True, f"{len(planned)} as planned" + (f", {aside} unfinished attempts kept" if aside else ""))


def check_files(c: Context) -> tuple[bool, str]:
    hashes = c.folder.record["runs"]
    bad = [f"{run.path.name}: expected sha256 {hashes[run.path.name][:16]}, found another: edited after the run" for run in c.runs.values()
           if run.path.name in hashes and sha256(run.path.read_bytes()) != hashes[run.path.name]]
    return wrong(bad) or (True, "every run file has the recorded SHA-256")


def check_chain(c: Context) -> tuple[bool, str]:
    return wrong([f"{run.path.name}: expected an unbroken chain of lines, found {run.broken}" for run in c.runs.values() if run.broken]) or (
        True, "every line carries the hash of the one before")


def ending_problems(run: Run) -> Iterator[str]:
    """What keeps a run from being whole: the right lines in the right number, ended well, not shortened, nothing compiled on the clock."""
    counts = [len(run.of(kind)) for kind in ("head", "end")]
    if counts != [1, 1] or run.lines[0]["kind"] != "head" or run.lines[-1]["kind"] != "end":
        yield f"expected one head first and one end last, found {counts[0]} and {counts[1]}: incomplete"
        return
    end, final = run.lines[-1], [line for line in run.of("val") if line.get("final")]
    if not run.ok:
        yield f"expected end ok with loss and time, found {run.state}"
    if end.get("recompiled") != 0:
        yield f"expected 0 compilations on the clock, found {end.get('recompiled')}"
    if [(line.get("step"), line.get("loss")) for line in final] != [(run.total_steps, run.loss)]:
        yield f"expected one final validation at step {run.total_steps} with the loss of the end, found {[line.get('step') for line in final]}"
    if not len(run.train) or run.train[-1, 0] != run.total_steps or (run.train[1:, 0] <= run.train[:-1, 0]).any():
        yield f"expected steps up to {run.total_steps}, found {run.train[-1, 0] if len(run.train) else 0:.0f}"


def check_end(c: Context) -> tuple[bool, str]:
    return wrong([f"{run.path.name}: {text}" for run in c.runs.values() for text in ending_problems(run)]) or (True, "every run is whole")


def check_settings(c: Context) -> tuple[bool, str]:
    """Each log is the planned run: script, seed, world, preset, default options, and the plan's id in its log folder."""
    plan, bad = c.folder.record["plan"], []
    for key, run in c.runs.items():
        arm, _, seed = key.partition("-s")
        settings = run.head.get("settings", {})
        expected = {"script": manifest_hash({SCRIPT: c.folder.record["scripts"][arm]}, [SCRIPT]), "seed": int(seed), "world": plan["world"], "preset": c.folder.track.preset,
                    "val_tokens": c.folder.track.val_tokens, "plan": f"{plan['id']}-{key}", "options": []}
        preset = run.head.get("preset", {})
        found = {"script": run.head.get("script"), "seed": run.head.get("seed"), "world": run.head.get("world"), "preset": preset.get("name"),
                 "val_tokens": preset.get("val_tokens"), "plan": Path(settings.get("log_dir", "")).name, "options": sorted(set(settings) - FREE_SETTINGS)}
        bad += [f"{run.path.name} {name}: expected {expected[name]}, found {found[name]}" for name in expected if expected[name] != found[name]]
    return wrong(bad) or (True, "scripts, seeds and options as planned")


def check_order(c: Context) -> tuple[bool, str]:
    started = [(key, c.runs[key].head.get("started")) for key in c.folder.record["plan"]["order"] if key in c.runs]
    bad = [f"{key}: expected when it started, found nothing" for key, time in started if not time]
    bad = bad or [f"expected {a} before {b}, found it after" for (a, x), (b, y) in zip(started, started[1:]) if x >= y]
    return wrong(bad) or (True, f"interleaved from {started[0][1]} to {started[-1][1]}")


def check_machine(c: Context) -> tuple[bool, str]:
    runs = list(c.runs.values())
    bad = [f"{name}: expected one value in all runs, found {len(values)}" for name in SAME_EVERYWHERE
           if len(values := {str(run.head.get(name)) for run in runs}) > 1]
    bad += [] if runs[0].head.get("machine") else ["expected which machine it was, found nothing"]
    head = runs[0].head
    return wrong(bad) or (True, f"{head['machine']}: {head['world']} x {head['device']}, torch {head['torch']}, triton {head['triton']}")


def check_tokens(c: Context) -> tuple[bool, str]:
    """The same tokens everywhere: shards as planned and in order, one validation set, one training stream an arm."""
    manifest, bad, hashes = c.folder.record["data"], [], {}
    train = [name for name in manifest if "_train_" in name]
    for key, run in c.runs.items():
        shards, end = run.head.get("shards", []), (run.of("end") or [{}])[-1]
        if shards != train[:len(shards)] or not shards:
            bad.append(f"{run.path.name}: expected the first of {train[0]} ..., found {', '.join(shards[:3])}")
        elif run.head.get("data") != (expected := manifest_hash(manifest, [*shards, *(name for name in manifest if "_val_" in name)])):
            bad.append(f"{run.path.name}: expected data {expected[:16]}, found {str(run.head.get('data'))[:16]}")
        hashes.setdefault("validation", set()).add(end.get("val_hash"))
        hashes.setdefault(f"training, arm {key[0]}", set()).add(end.get("train_hash"))
    bad += [f"tokens of {name}: expected one hash, found {len(found)}" for name, found in hashes.items() if len(found) > 1 or None in found]
    return wrong(bad) or (True, "; ".join(f"{name} {found.pop()}" for name, found in hashes.items()))


def clock_problems(run: Run) -> Iterator[str]:
    """Intervals must join without gap, be off for validation only, and sum to the total; the step times must tell the same."""
    intervals, total = run.of("clock"), 0.0
    for before, line in zip([None, *intervals], intervals):
        if line["end_ms"] < line["start_ms"] or before and before["end_ms"] != line["start_ms"]:
            yield f"expected intervals that join, found one from {line['start_ms']:.1f} to {line['end_ms']:.1f} ms"
        if not line["on"] and line["reason"] != "validation":
            yield f"expected pauses for validation only, found '{line['reason']}'"
        total += (line["end_ms"] - line["start_ms"]) if line["on"] else 0
    if not intervals or abs(total - run.ms) > 0.06:
        yield f"expected intervals that sum to {run.ms:.1f} ms, found {total:.1f} ms"
    elif len(run.train) and not total * 0.97 - 50 < 1e3 * run.train[-1, 1] < total * 1.01 + 50:
        yield f"expected steps that take about {total:.0f} ms, found {1e3 * run.train[-1, 1]:.0f} ms"


def check_clock(c: Context) -> tuple[bool, str]:
    return wrong([f"{run.path.name}: {text}" for run in c.runs.values() for text in clock_problems(run)]) or (True, "intervals and steps sum to the totals")


def check_means(c: Context) -> tuple[bool, str]:
    expected, found = means(c.folder), c.folder.record["means"]
    if expected != found:
        return False, f"expected {expected} from the runs, found {found}"
    return read_block(c.folder.path / "README.md", "numbers") == numbers_block(c.folder), "record.json and README.md say what the runs say"


def check_target(c: Context) -> tuple[bool, str]:
    """Does the claim reach the track's loss? For practice and for a baseline this informs and does not fail."""
    track, losses = c.folder.track, [run.loss for run in c.folder.runs("a")]
    value, informs = stats.mean(losses), track.practice or c.folder.record["kind"] == "baseline"
    if track.practice:
        first = min(run.train[0, 2] for run in c.folder.runs("a"))
        return value < first - 0.5, f"practice: loss fell from {first:.2f} to {value:.4f}"
    if track.target_loss is None:
        return True, f"loss {value:.4f}; this track has no target yet"
    p = stats.p_below(losses, track.target_loss)
    waived = track.alpha is None or c.folder.record["kind"] == "systems"
    reached = value <= track.target_loss and (waived or p < track.alpha)
    text = f"mean loss {value:.4f} against {track.target_loss}, n = {len(losses)}, one-sided p = {p:.2g}" + (", the mean decides" if waived else f", needs < {track.alpha}")
    return reached or informs, text + ("; a baseline, so no claim" if informs and not reached else "")


def check_gain(c: Context) -> tuple[bool, str]:
    if c.folder.parent is None:
        return True, "no parent to gain on"
    time = gain(c.folder)
    text = f"{-time.difference / 1e3:.3f} s faster than the parent, 99 % interval {-time.high / 1e3:.3f} to {-time.low / 1e3:.3f} s, paired"
    return time.high < 0 or c.folder.track.practice, text + ("; practice, so no claim" if c.folder.track.practice else "")


def check_kind(c: Context) -> tuple[bool, str]:
    """`systems` says that the training itself is the parent's: same code where it is defined, same tokens, same loss."""
    kind = c.folder.record["kind"]
    if kind != "systems":
        return kind != "baseline" or c.folder.parent is None, f"{kind}" + ("" if kind == "ml" else ": only for a record without a parent")
    if c.folder.parent is None:
        return False, "systems: expected a parent, found none"
    a, b = (sections(c.folder.script(arm).read_text(), code_only=True) for arm in "ab")
    bad = [f"section {name}: expected the parent's code, found changes" for name in ("Configuration", "Model", "Data", "Schedule")
           if name not in a or a[name] != b.get(name)]
    tokens = {run.lines[-1].get("train_hash") for run in c.runs.values()}
    bad += ["expected the parent's training tokens, found others"] if len(tokens) > 1 else []
    loss = stats.welch(*([run.loss for run in c.folder.runs(arm)] for arm in "ab"))
    bad += [] if loss.contains_zero else [f"expected the parent's loss, found a difference of {loss.difference:+.4f}, 99 % interval {loss.low:+.4f} to {loss.high:+.4f}"]
    return wrong(bad) or (True, "systems: model, data, schedule and configuration are the parent's, and so is the loss")


ALONE: list[Callable[[Context], tuple[bool, str]]] = [check_script, check_parent, check_plan, check_runs]
WITH_RUNS = [check_files, check_chain, check_end, check_settings, check_order, check_machine, check_tokens, check_clock, check_means, check_target,
             check_gain, check_kind]


def verify(path: Path) -> list[Check]:
    """All checks of a folder. A check that cannot even be evaluated has failed."""
    try:
        folder = load(path)
    except Failure as failure:
        return [Check("schema", False, str(failure))]
    record, checks = folder.record, [Check("schema", True, f"{folder.record['track']}, {folder.record['kind']}, {folder.record['date']}")]
    dated = folder.path.resolve().name.startswith(record["date"] + "_")
    checks.append(Check("name", dated, folder.path.name if dated else f"expected {record['date']}_NAME, found {folder.path.name}"))
    runs = {run.path.stem: run for arm in record["scripts"] for run in folder.runs(arm)}
    for check in ALONE + (WITH_RUNS if runs else []):
        checks.append(Check(check.__name__.removeprefix("check_"), *evaluate(check, Context(folder, runs))))
    return checks


def evaluate(check: Callable[[Context], tuple[bool, str]], context: Context) -> tuple[bool, str]:
    try:
        return check(context)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, ZeroDivisionError) as error:
        return False, f"cannot be evaluated: {type(error).__name__}: {error}"
