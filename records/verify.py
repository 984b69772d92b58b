"""`verify`: every check a record must pass, one line each. A check sees only the folder, its parent and the logs; that for a parent, all records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import stats
from codediff import sections
from record import SCRIPT, Folder, load, least_runs, manifest_hash, plan_id, plan_order, plan_seeds, require_parent
from report import gain, means, numbers_block, read_block
from runlog import Failure, Run, sha256

# Command-line options that may differ from their defaults in a record; a length must be the plan's. --val-every is none of them: while the
# clock pauses for a validation, batches are prefetched and the GPU cools down.
FREE_SETTINGS = {"preset", "data", "seed", "log_dir", "length"}
SAME_EVERYWHERE = ("machine", "gpus", "device", "world", "torch", "triton", "cuda", "driver", "python")
UNTOUCHED = ("Configuration", "Model", "Data", "Schedule")  # sections that a systems record leaves as they are


class Check(NamedTuple):
    name: str
    ok: bool
    text: str


class Context(NamedTuple):
    folder: Folder
    runs: dict[str, Run]  # "a-s123" -> run, for the planned runs that are there


Findings = tuple[list[str], str]  # what is wrong, and what to say if nothing is


def check_name(c: Context) -> Findings:
    name = c.folder.path.name
    return [] if name.startswith(c.folder.record["date"] + "_") else [f"expected {c.folder.record['date']}_NAME, found {name}"], name


def check_script(c: Context) -> Findings:
    scripts, bad = c.folder.record["scripts"], []
    for arm, expected in scripts.items():
        path = c.folder.script(arm)
        found = sha256(path.read_bytes()) if path.exists() else "no file"
        bad += [] if found == expected else [f"{path}: expected sha256 {expected[:16]}, found {found[:16]}; fix: restore the script that ran"]
    return bad, ", ".join(f"arm {arm} {digest[:16]}" for arm, digest in scripts.items())


def check_parent(c: Context) -> Findings:
    """A parent where the rules ask for one, which needs the first log: it says when and on which hardware the record was made."""
    if c.folder.parent is None:
        if c.runs:
            require_parent(c.folder.path.parent, c.folder.record, c.folder.hardware, c.folder.started)
        return [], "none, arm a only"
    parent, record = load(c.folder.parent).record, c.folder.record
    bad = [] if parent["track"] == record["track"] else [f"expected a record of {record['track']}, found {parent['track']}"]
    bad += [f"{name}: expected the parent's content, found another" for name in sorted(parent["data"].keys() & record["data"].keys())
            if parent["data"][name] != record["data"][name]]
    return bad, record["parent"]


def check_plan(c: Context) -> Findings:
    record, plan = c.folder.record, c.folder.record["plan"]
    least = least_runs(c.folder.track, record["kind"])
    n, bad = len(plan["seeds"]), []
    if plan["id"] != plan_id(record):
        bad.append(f"expected id {plan_id(record)} from its content, found {plan['id']}: changed after `new`")
    if plan["seeds"] != plan_seeds(record["scripts"]["a"], n):
        bad.append("expected the seeds that follow from the script, found others")
    if plan["order"] != plan_order(plan["seeds"], "".join(sorted(record["scripts"]))):
        bad.append("expected every seed once an arm, interleaved, found another order")
    if n < least:
        bad.append(f"expected at least {least} runs an arm, found {n}")
    return bad, f"{n} runs an arm, {plan['id']}"


def check_runs(c: Context) -> Findings:
    planned = {f"{key}.jsonl" for key in c.folder.record["plan"]["order"]}
    listed, found = set(c.folder.record["runs"]), {path.name for path in (c.folder.path / "runs").glob("*")}
    bad = [f"expected {name}, found none; fix: {'restore it' if name in listed else f'python records run {c.folder.path}'}"
           for name in sorted(planned - found)]
    bad += [f"expected the planned runs only, found {name} too" for name in sorted(found - planned)]
    bad += [f"expected {name} in record.json, found no hash" for name in sorted((found & planned) - listed)]
    bad += [f"expected the runs of the plan in record.json, found {name} too" for name in sorted(listed - planned)]
    aside = len(list((c.folder.path / "unfinished").glob("*.jsonl")))
    return bad, f"{len(planned)} as planned" + (f", {aside} unfinished attempts kept" if aside else "")


def check_files(c: Context) -> Findings:
    hashes = c.folder.record["runs"]
    bad = [f"{key}: expected sha256 {hashes[run.path.name][:16]}, found another: edited after the run" for key, run in c.runs.items()
           if run.path.name in hashes and sha256(run.path.read_bytes()) != hashes[run.path.name]]
    for other in c.folder.path.parent.glob("*/record.json"):
        if other.parent != c.folder.path and any(digest in other.read_text() for digest in hashes.values()):
            bad.append(f"expected runs of its own, found some of {other.parent.name} too; fix: remove the copy of the two")
    return bad, "every run file has the recorded SHA-256 and is of this record alone"


def check_chain(c: Context) -> Findings:
    return [f"{key}: expected an unbroken chain of lines, found {run.broken}" for key, run in c.runs.items() if run.broken], \
        "every line carries the hash of the one before"


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


def check_end(c: Context) -> Findings:
    return [f"{key}: {text}" for key, run in c.runs.items() for text in ending_problems(run)], "every run is whole"


def check_settings(c: Context) -> Findings:
    """Each log is the planned run: script, seed, world, preset, length, default options, and the plan's id in its log folder."""
    plan, bad = c.folder.record["plan"], []
    for key, run in c.runs.items():
        arm, _, seed = key.partition("-s")
        preset, settings = run.head.get("preset", {}), run.head.get("settings", {})
        for name, expected, found in (
            ("script", manifest_hash({SCRIPT: c.folder.record["scripts"][arm]}, [SCRIPT]), run.head.get("script")),
            ("seed", int(seed), run.head.get("seed")),
            ("processes", plan["world"], run.head.get("world")),
            ("nodes", 1, run.head.get("nodes", 1)),
            ("preset", c.folder.track.preset, preset.get("name")),
            ("validation tokens", c.folder.track.val_tokens, preset.get("val_tokens")),
            ("plan", f"{plan['id']}-{key}", Path(settings.get("log_dir", "")).name),
            ("length", plan.get("length", 1), float(settings.get("length", 1))),
            ("options", [], sorted(set(settings) - FREE_SETTINGS)),
        ):
            bad += [] if found == expected else [f"{key}: {name}: expected {expected}, found {found}"]
    return bad, "scripts, seeds and options as planned"


def check_order(c: Context) -> Findings:
    started = [(key, c.runs[key].head.get("started")) for key in c.folder.record["plan"]["order"] if key in c.runs]
    bad = [f"{key}: expected when it started, found nothing" for key, time in started if not time]
    return bad or [f"expected {a} before {b}, found it after" for (a, x), (b, y) in zip(started, started[1:]) if x >= y], \
        f"as planned, from {started[0][1]} to {started[-1][1]}"


def check_machine(c: Context) -> Findings:
    head = next(iter(c.runs.values())).head
    bad = [] if head.get("machine") else ["expected which machine it was, found nothing"]
    bad += [f"{name}: expected one value in all runs, found {len(values)}" for name in SAME_EVERYWHERE
            if len(values := {str(run.head.get(name)) for run in c.runs.values()}) > 1]
    return bad, f"{head.get('machine')}: {head.get('world')} x {head.get('device')}, torch {head.get('torch')}, triton {head.get('triton')}"


def check_tokens(c: Context) -> Findings:
    """The same tokens everywhere: shards as planned and in order, one validation set, one training stream an arm."""
    manifest, bad, hashes = c.folder.record["data"], [], {}
    train, val = ([name for name in manifest if f"_{kind}_" in name] for kind in ("train", "val"))
    for key, run in c.runs.items():
        shards, end = run.head.get("shards", []), (run.of("end") or [{}])[-1]
        if not shards or shards != train[:len(shards)]:
            bad.append(f"{key}: expected shards from {train[0]} on, found {', '.join(shards[:3])}")
        elif run.head.get("data") != (expected := manifest_hash(manifest, shards + val)):
            bad.append(f"{key}: expected data {expected[:16]}, found {str(run.head.get('data'))[:16]}")
        hashes.setdefault("validation", set()).add(end.get("val_hash"))
        hashes.setdefault(f"training, arm {key[0]}", set()).add(end.get("train_hash"))
    bad += [f"tokens of {name}: expected one hash, found {len(found)}" for name, found in hashes.items() if len(found) > 1 or None in found]
    return bad, "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in hashes.items())


def clock_problems(run: Run) -> Iterator[str]:
    """Intervals must join without gap or pause and sum to the total; the step times must tell the same."""
    intervals, total = run.of("clock"), 0.0
    for before, line in zip([None, *intervals], intervals):
        if line["end_ms"] < line["start_ms"] or before and before["end_ms"] != line["start_ms"]:
            yield f"expected intervals that join, found one from {line['start_ms']:.1f} to {line['end_ms']:.1f} ms"
        if not line["on"]:
            yield f"expected a clock without pauses, found one for '{line['reason']}'"
        total += (line["end_ms"] - line["start_ms"]) if line["on"] else 0
    if not intervals or abs(total - run.ms) > 0.06:
        yield f"expected intervals that sum to {run.ms:.1f} ms, found {total:.1f} ms"
    elif len(run.train) and not total * 0.97 - 50 < 1e3 * run.train[-1, 1] < total * 1.01 + 50:
        yield f"expected steps that take about {total:.0f} ms, found {1e3 * run.train[-1, 1]:.0f} ms"


def check_clock(c: Context) -> Findings:
    return [f"{key}: {text}" for key, run in c.runs.items() for text in clock_problems(run)], "intervals and steps sum to the totals"


def check_means(c: Context) -> Findings:
    expected, found = means(c.folder), c.folder.record["means"]
    bad = [] if expected == found else [f"expected {expected} from the runs, found {found}"]
    if read_block(c.folder.path / "README.md", "numbers") != numbers_block(c.folder):
        bad.append("README.md: expected the numbers of the runs, found others")
    return bad, "record.json and README.md say what the runs say"


def check_target(c: Context) -> Findings:
    """Does the claim reach the track's loss? For practice it must only fall; a baseline may miss."""
    track, kind, losses = c.folder.track, c.folder.record["kind"], [run.loss for run in c.folder.runs("a")]
    value = stats.mean(losses)
    if track.practice:
        text = f"practice: loss fell from {(first := min(run.train[0, 2] for run in c.folder.runs('a'))):.2f} to {value:.4f}"
        return [] if value < first - 0.5 else [text], text
    if track.target_loss is None:
        return [], f"loss {value:.4f}; this track has no target yet"
    p, waived = stats.p_below(losses, track.target_loss), track.alpha is None or kind == "systems"
    text = f"mean loss {value:.4f} against {track.target_loss}, n = {len(losses)}, one-sided p = {p:.2g}"
    text += ", the mean decides" if waived else f", needs < {track.alpha}"
    reached = value <= track.target_loss and (waived or p < track.alpha)
    return [] if reached or kind == "baseline" else [text], text + ("" if reached else "; a baseline, so no claim")


def check_gain(c: Context) -> Findings:
    if c.folder.parent is None:
        return [], "no parent to gain on"
    time = gain(c.folder)
    sign, word = (1, "slower") if time.difference > 0 else (-1, "faster")
    low, high = sorted(sign * edge / 1e3 for edge in (time.low, time.high))
    text = f"{abs(time.difference) / 1e3:.3f} s {word} than the parent, 99 % interval {low:.3f} to {high:.3f} s, paired"
    return [] if time.high < 0 or c.folder.track.practice else [text], text + ("; practice, so no claim" if c.folder.track.practice else "")


def check_kind(c: Context) -> Findings:
    """`systems` says that the training itself is the parent's: same code where it is defined, same tokens, same loss."""
    kind, parent = c.folder.record["kind"], c.folder.parent
    if kind == "ml" or (kind == "systems") == (parent is None):
        return [] if kind == "ml" else [f"{kind}: expected {'a' if kind == 'systems' else 'no'} parent, found {c.folder.record['parent']}"], kind
    if kind == "baseline":
        return [], "baseline, a place to start from"
    a, b = (sections(c.folder.script(arm).read_text(), code_only=True) for arm in "ab")
    bad = [f"section {name}: expected the parent's code, found changes" for name in UNTOUCHED if name not in a or a[name] != b.get(name)]
    bad += ["expected the parent's training tokens, found others"] if len({run.lines[-1].get("train_hash") for run in c.runs.values()}) > 1 else []
    loss = stats.welch(*([run.loss for run in c.folder.runs(arm)] for arm in "ab"))
    bad += [] if loss.contains_zero else [f"expected the parent's loss, found {loss.difference:+.4f}, 99 % interval {loss.low:+.4f} to {loss.high:+.4f}"]
    return bad, "systems: model, data, schedule and configuration are the parent's, and so is the loss"


PLANNED = (check_name, check_script, check_parent, check_plan, check_runs)
EACH_RUN = (check_chain, check_end, check_settings, check_order, check_machine, check_tokens, check_clock)  # `run` asks them after every run
TOGETHER = (check_files, check_means, check_target, check_gain, check_kind)


def evaluate(checks: tuple[Callable[[Context], Findings], ...], context: Context) -> list[Check]:
    """A check that cannot even be evaluated has failed."""
    results = []
    for check in checks:
        try:
            bad, text = check(context)
        except Failure as failure:
            bad, text = [str(failure)], ""
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, ZeroDivisionError) as error:
            bad, text = [f"expected data that can be checked, found {type(error).__name__}: {error}"], ""
        text = bad[0] + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "") if bad else text
        results.append(Check(check.__name__.removeprefix("check_"), not bad, text))
    return results


def verify(path: Path) -> list[Check]:
    """All checks of a folder."""
    try:
        folder = load(path)
    except Failure as failure:
        return [Check("schema", False, str(failure))]
    record = folder.record
    runs = {run.path.stem: run for arm in record["scripts"] for run in folder.runs(arm)}
    return [Check("schema", True, f"{record['track']}, {record['kind']}, {record['date']}"),
            *evaluate(PLANNED + (EACH_RUN + TOGETHER if runs else ()), Context(folder, runs))]
