"""`verify`: every check a record must pass, one line each.

Most checks see only the folder, its parent and the logs. Those for a parent, a plan, files, starts and tokens look for
others like it among all records.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import stats
from codediff import training_changes
from lanes import Place, most_at_once, places
from record import (
    CACHES_AN_ARM,
    LIST_BEFORE_THE_RULE,
    NAME_FORM,
    SCRIPT,
    Folder,
    cache_part,
    claims,
    hardware,
    lane_name,
    least_runs,
    listed_before_the_rule,
    load,
    log_name,
    manifest_hash,
    must_restart,
    plan_id,
    plan_order,
    plan_seeds,
    readable,
    require_parent,
    restart_problem,
    retime_problem,
    text_of_records,
)
from report import gain, means, numbers_block, read_block
from rule import NO_WORSE, ended_high, equal_loss, losses, reached
from runlog import Failure, Run, first_step, read_run, sha256, span
from tracks import EARLIER, PINS, RULE_SINCE

# Command-line options that may differ from their defaults in a record; a length must be the plan's. --val-every is none
# of them: while the clock pauses for a validation, batches are prefetched and the GPU cools down.
FREE_SETTINGS = {"preset", "data", "seed", "log_dir", "length"}
CODE = {".py", ".pyc", ".pth", ".so", ".zip"}  # a script could import it, and it has no hash
FOLDERS = {"runs", "unfinished", "running"}  # of a record
SAME_EVERYWHERE = ("device", "world", "torch", "triton", "cuda", "driver", "python")
SAME_ON_A_LANE = ("machine", "gpus")  # which tell the GPUs that a run saw; without lanes all runs are on one
WAIT_DAYS = 30  # from a plan to its first run at most
# Runs that share these, script and seed start from the same state; its hash is of what the first rank holds.
USUAL_STATE = "device", "world", "torch"
# by how much the steps' times may differ from the clock's: a share, and ms. Logs differ by .02 % and 4 ms
STEP_TOLERANCE = 0.003, 5.0
SLOWER_PARENT = 0.05  # beyond this arm b is said to differ from its own record


class Check(NamedTuple):
    name: str
    ok: bool
    text: str


class Context(NamedTuple):
    folder: Folder
    runs: dict[str, Run]  # "a-s123" -> run, for the planned runs that are there


Findings = tuple[list[str], str]  # what is wrong, and what to say if nothing is


def day(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text[:10])


def check_name(c: Context) -> Findings:
    """The folder is named after the record's day, on which it was planned: not after its first run, and not long
    before."""
    name, date = c.folder.path.name, c.folder.record["date"]
    bad = [] if re.fullmatch(f"{date}_{NAME_FORM}", name) else [f"expected {date}_NAME, found {name}"]
    if c.folder.under_rule and date < RULE_SINCE:
        bad.append(f"expected a date from {RULE_SINCE} on, found {date}")
    if c.runs and not 0 <= (day(c.folder.started) - day(date)).days <= WAIT_DAYS:
        bad.append(f"expected a date up to {WAIT_DAYS} days before the first run of {c.folder.started[:10]}, found "
                   f"{date}")
    return bad, name


def check_script(c: Context) -> Findings:
    scripts, bad = c.folder.record["scripts"], []
    for arm, expected in scripts.items():
        path = c.folder.script(arm)
        found = sha256(path.read_bytes()) if path.exists() else "no file"
        bad += [] if found == expected else [f"{path}: expected sha256 {expected[:16]}, found {found[:16]}; fix: "
                                             f"restore the script that ran"]
    root = c.folder.path
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            bad.append(f"expected files of its own, found a link {name}")
        elif path.suffix in CODE and name != SCRIPT or path.is_dir() and path.parent == root and name not in FOLDERS:
            bad.append(f"expected no code but {SCRIPT}, and its runs, found {name}")
    return bad, ", ".join(f"arm {arm} {digest[:16]}" for arm, digest in scripts.items())


def check_parent(c: Context) -> Findings:
    """A parent where the rules ask for one, which needs the first log: it says when and on which hardware the record
    was made."""
    if c.folder.parent is None:
        if c.runs:
            require_parent(c.folder.path.parent, c.folder.record, c.folder.hardware, c.folder.started)
        return [], "none, arm a only"
    parent, record = load(c.folder.parent).record, c.folder.record
    bad = []
    if parent["track"] != record["track"]:
        bad.append(f"expected a record of {record['track']}, found {parent['track']}")
    if parent.get("abandoned") or not parent["means"] or not parent["runs"]:
        bad.append("expected a finished parent, found one that was abandoned or has runs to come")
    bad += [f"{name}: expected the parent's content, found another"
            for name in sorted(parent["data"].keys() & record["data"].keys())
            if parent["data"][name] != record["data"][name]]
    return bad, record["parent"]


def seeds_of(folder: Folder) -> list[int]:
    """Those that the plan should have: its own follow from its id, before the rule from the script, and a retime has
    the repeated record's."""
    plan = folder.record["plan"]
    if repeated := folder.repeated if folder.under_rule else None:
        return repeated.record["plan"]["seeds"]
    return plan_seeds(plan["id"] if folder.under_rule else folder.record["scripts"]["a"], len(plan["seeds"]))


def retime_problems(folder: Folder) -> Iterator[str]:
    """A retime repeats another record's plan, and chooses nothing but the machine."""
    first, record = folder.repeated.record, folder.record
    if why_not := retime_problem(folder.repeated):
        yield f"expected the retime of a finished record, found {why_not}"
    differing = [name for name in ("track", "kind", "parent", "scripts", "data") if first[name] != record[name]]
    differing += [name for name in ("length", "margin") if first["plan"].get(name) != record["plan"].get(name)]
    if differing:
        yield f"expected the {', '.join(differing)} of {folder.repeated.path.name}, found others"


def check_plan(c: Context) -> Findings:
    record, plan, name = c.folder.record, c.folder.record["plan"], c.folder.path.name
    n, least, bad = len(plan["seeds"]), least_runs(c.folder), []
    if plan["id"] != plan_id(record, name):
        bad.append(f"expected id {plan_id(record, name)} from its content, found {plan['id']}: changed after `new`")
    if plan["seeds"] != seeds_of(c.folder):
        bad.append("expected the seeds that follow from the plan, found others")
    if plan["order"] != plan_order(plan["seeds"], "".join(sorted(record["scripts"]))):
        bad.append("expected every seed once an arm, interleaved, found another order")
    if n < least:
        bad.append(f"expected at least {least} runs an arm, found {n}")
    if c.folder.under_rule and claims(c.folder.track, record["kind"]) and not plan["margin"] and "retimes" not in plan:
        bad.append("expected the margin that n is for, found none")
    if "restarts" in plan:
        first = load(c.folder.path.parent / plan["restarts"])
        if problem := restart_problem(first, record["track"], name):
            bad.append(f"expected the restart of an abandoned plan, found {problem}")
    if "retimes" in plan:
        bad += retime_problems(c.folder)
    started = c.folder.started if c.runs else "9999"  # a plan comes after all that there is
    if c.folder.under_rule and (first := must_restart(c.folder.path.parent, record, name, started)):
        bad.append(f"expected the restart of {first}, which has this script and was abandoned, found a plan of its own")
    return bad, f"{n} runs an arm, {plan['id']}"


def check_runs(c: Context) -> Findings:
    planned = {f"{key}.jsonl" for key in c.folder.record["plan"]["order"]}
    listed, found = set(c.folder.record["runs"]), {path.name for path in (c.folder.path / "runs").glob("*")}
    missing = planned & listed - found if c.folder.record.get("abandoned") else planned - found
    bad = [f"expected {name}, found none; fix: "
           f"{'restore it' if name in listed else f'python records run {c.folder.path}'}"
           for name in sorted(missing)]
    bad += [f"expected the planned runs only, found {name} too" for name in sorted(found - planned)]
    bad += [f"expected {name} in record.json, found no hash" for name in sorted((found & planned) - listed)]
    bad += [f"expected the runs of the plan in record.json, found {name} too" for name in sorted(listed - planned)]
    aside = len(list((c.folder.path / "unfinished").glob("*.jsonl")))
    done = f"{len(found & planned)} of " if c.folder.record.get("abandoned") else ""
    return bad, f"{done}{len(planned)} as planned" + (f", {aside} unfinished attempts kept" if aside else "")


def is_the_copy(folder: Folder, other: Path) -> bool:
    """Whether of two records with the same runs `folder` is to blame: the one whose plan was not made under its name,
    else both."""
    try:
        first = load(other)
    except Failure:
        return False
    own, others = (f.record["plan"]["id"] == plan_id(f.record, f.path.name)
                   and (f.under_rule or listed_before_the_rule(f)) for f in (folder, first))
    return own == others or not own


def check_files(c: Context) -> Findings:
    hashes = c.folder.record["runs"]
    bad = [f"{key}: expected sha256 {hashes[run.path.name][:16]}, found another: edited after the run"
           for key, run in c.runs.items()
           if run.path.name in hashes and sha256(run.path.read_bytes()) != hashes[run.path.name]]
    for other, text in text_of_records(c.folder.path.parent).items():
        shared = other != c.folder.path and any(digest in text for digest in hashes.values())
        if shared and is_the_copy(c.folder, other):
            bad.append(f"expected runs of its own, found some of {other.name} too; fix: remove the copy of the two")
    return bad, "every run file has the recorded SHA-256 and is of this record alone"


def start_state(run: Run) -> str | None:
    """The hash of all weights and optimizer states before the first step."""
    return next((line.get("state") for line in run.of("warm")), None)


class Start(NamedTuple):
    """What a run of any record began with, and what it then logged."""
    conditions: tuple[str, ...]  # the values of USUAL_STATE
    state: str | None
    losses: tuple[float, ...]


def start_of_run(run: Run) -> Start:
    conditions = tuple(str(run.head.get(name)) for name in USUAL_STATE)
    return Start(conditions, start_state(run), tuple(run.train[:, 2]))


@functools.lru_cache(maxsize=2048)
def start_of_log(path: Path, changed_ns: int) -> Start:
    """That of a run of another record. `changed_ns` renews the entry of a changed file."""
    return start_of_run(read_run(path))


def relabelled_runs(c: Context) -> Iterator[str]:
    """Runs that another record has too, as those of another seed."""
    own: dict[str | tuple, str] = {}
    for key, run in c.runs.items():
        start = start_of_run(run)
        own |= dict.fromkeys((value for value in (start.state, start.losses) if value), key)
    for folder in readable(c.folder.path.parent):
        if folder.path == c.folder.path:
            continue
        for path in sorted((folder.path / "runs").glob("*.jsonl")):
            other = start_of_log(path, path.stat().st_mtime_ns)
            key = own.get(other.state) or own.get(other.losses)
            if key and key.partition("-")[2] != path.stem.partition("-")[2]:
                yield f"{key}: expected a run of its own, found what {folder.path.name} has as {path.stem}"


def check_starts(c: Context) -> Findings:
    """Seeds must differ in the weights they start from and in what they train; one script and seed always start alike.
    """
    bad, compared = [], 0
    for arm in sorted(c.folder.record["scripts"]):
        runs = {key: run for key, run in c.runs.items() if key.startswith(arm)}
        for what, values in (("start", [start_state(run) for run in runs.values()]),
                             ("losses", [tuple(run.train[:, 2]) for run in runs.values()])):
            if len(set(values)) < len(values) or None in values:
                bad.append(f"arm {arm}: expected {len(values)} seeds with {what} of their own, found "
                           f"{len(set(values) - {None})}")
    for folder in readable(c.folder.path.parent):
        shared = [(own, arm) for own in c.folder.record["scripts"].items()
                  for arm, digest in folder.record["scripts"].items()
                  if digest == own[1] and (folder.path, arm) != (c.folder.path, own[0])]
        for (own, _), arm in shared:
            for seed in set(folder.record["plan"]["seeds"]) & set(c.folder.record["plan"]["seeds"]):
                path, run = folder.path / "runs" / f"{arm}-s{seed}.jsonl", c.runs.get(f"{own}-s{seed}")
                if run is None or not path.exists():
                    continue
                other, start = start_of_log(path, path.stat().st_mtime_ns), start_of_run(run)
                if other.conditions == start.conditions:
                    compared += 1
                    if other.state != start.state:
                        bad.append(f"{own}-s{seed}: expected the start of {folder.path.name}'s run, found another")
    bad += relabelled_runs(c)
    also = f"; {compared} starts as in other records" if compared else ""
    return bad, f"every seed starts and trains in its own way{also}"


def check_chain(c: Context) -> Findings:
    return [f"{key}: expected an unbroken chain of lines, found {run.broken}" for key, run in c.runs.items()
            if run.broken], \
        "every line carries the hash of the one before"


def ending_problems(run: Run) -> Iterator[str]:
    """What keeps a run from being whole: the right lines in the right number, ended well, not shortened, nothing
    compiled on the clock."""
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
        found = [line.get("step") for line in final]
        yield f"expected one final validation at step {run.total_steps} with the loss of the end, found {found}"
    if not len(run.train) or run.train[-1, 0] != run.total_steps or (run.train[1:, 0] <= run.train[:-1, 0]).any():
        yield f"expected steps up to {run.total_steps}, found {run.train[-1, 0] if len(run.train) else 0:.0f}"


def schedule_problems(run: Run) -> Iterator[str]:
    """Where the log contradicts the schedule in its head: a part of the run is missing, or its steps are others."""
    preset = run.head["preset"]
    steps, batches = zip(*((stage["steps"], stage["batch_tokens"]) for stage in preset["stages"]))
    begins = [0, *itertools.accumulate(steps)]
    if first_step(run) != 0:
        yield f"expected a log from the first step on, found one that goes on after step {first_step(run)}"
    stages = [(line["step"], line["steps"], line["batch_tokens"]) for line in run.of("stage")]
    if stages != list(zip(begins, steps, batches)):
        yield "expected a line for each stage of the preset in the head, found others"

    before = 0
    for line in run.of("step"):
        step = line["step"]
        tokens = sum(min(max(step - begin, 0), count) * batch for begin, count, batch in zip(begins, steps, batches))
        if line["tokens"] != tokens:
            yield f"expected {tokens:,} tokens up to step {step}, found {line['tokens']:,}"
            return
        if step - before > (preset["log_every_steps"] if before else 1):
            yield f"expected the first step and every {preset['log_every_steps']}th in the log, found none between " \
                  f"{before} and {step}"
            return
        before = step
    if len(run.of("val")) != 1:
        yield f"expected one validation, the final one, found {len(run.of('val'))}"


def check_end(c: Context) -> Findings:
    return [f"{key}: {text}" for key, run in c.runs.items()
            for text in list(ending_problems(run)) or schedule_problems(run)], \
        "every run is whole, as its schedule says"


def check_settings(c: Context) -> Findings:
    """Each log is the planned run: script, seed, world, preset, length, default options, and the plan's id in its log
    folder."""
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
            ("plan", log_name(c.folder, key, lane_name(run)), Path(settings.get("log_dir", "")).name),
            ("length", plan.get("length", 1), float(settings.get("length", 1))),
            ("options", [], sorted(set(settings) - FREE_SETTINGS)),
        ):
            bad += [] if found == expected else [f"{key}: {name}: expected {expected}, found {found}"]
    return bad + cache_problems(c), "scripts, seeds and options as planned"


def cache_problems(c: Context) -> list[str]:
    """An arm whose runs are all there had two caches at least, by the names of its log folders."""
    bad, seeds = [], len(c.folder.record["plan"]["seeds"])
    for arm in sorted(c.folder.record["scripts"]) if c.folder.under_rule else ():
        runs = {key: run for key, run in c.runs.items() if key[0] == arm}
        found = {cache_part(c.folder, key, lane_name(run)) for key, run in runs.items()}
        if len(runs) == seeds and len(found) < min(CACHES_AN_ARM, seeds):
            bad.append(f"arm {arm}: expected {CACHES_AN_ARM} caches at least, found {len(found)}")
    return bad


def pair_is_there(c: Context, key: str) -> bool:
    """Whether both arms of a run's seed are in: while `run` works, one is."""
    return all(f"{arm}{key[1:]}" in c.runs for arm in c.folder.record["scripts"])


def order_problem(c: Context, before: str, after: str, where: dict[str, Place]) -> str | None:
    """What is wrong with two runs, the first of which is the earlier in the plan. They may overlap, or be in another
    order, only if the logs show that they shared no GPU. Of an older script's run its seed's other arm shows that."""
    (start, end), (next_start, _) = span(c.runs[before]), span(c.runs[after])
    one, other = where[before], where[after]
    if start < next_start >= end or one.apart(other):
        return None
    unknown = any(not where[key].gpus and not pair_is_there(c, key) for key in (before, after))
    if unknown and one.machine != other.machine:
        return None
    if next_start <= start:
        return f"expected {before} before {after}, found it after"
    return f"expected {before} to end before {after} starts, or on other GPUs of one host, found them at once"


def check_order(c: Context) -> Findings:
    """On each GPU one run after the other, as planned; and both arms of a seed on the same GPUs."""
    keys = [key for key in c.folder.record["plan"]["order"] if key in c.runs]
    bad = [f"{key}: expected when it started, found {c.runs[key].head.get('started', 'nothing')}" for key in keys
           if span(c.runs[key]) is None]
    if bad:
        return bad, ""
    where = places(c.runs)
    bad = [problem for pair in itertools.combinations(keys, 2) if (problem := order_problem(c, *pair, where))]
    lanes = {}
    for key in keys:
        lanes.setdefault(key.partition("-s")[2], set()).add(lane_name(c.runs[key]))
    bad += [f"seed {seed}: expected both arms on the same GPUs, found GPUs {' and '.join(sorted(names))}"
            for seed, names in lanes.items() if len(names) > 1]
    times = [c.runs[key].head["started"] for key in sorted(keys, key=lambda key: span(c.runs[key]))]
    count = most_at_once(list(c.runs.values()))
    return bad, f"as planned, from {times[0]} to {times[-1]}" + (f", up to {count} at once" if count > 1 else "")


def check_machine(c: Context) -> Findings:
    """One environment. Each lane has one machine value, which counts the GPUs in, and all lanes show the same host."""
    head = next(iter(c.runs.values())).head
    bad = [] if head.get("machine") else ["expected which machine it was, found nothing"]
    bad += [f"{name}: expected one value in all runs, found {len(values)}" for name in SAME_EVERYWHERE
            if len(values := {str(run.head.get(name)) for run in c.runs.values()}) > 1]
    lanes = sorted(set(map(lane_name, c.runs.values())))
    for lane, name in itertools.product(lanes, SAME_ON_A_LANE):
        values = {str(run.head.get(name)) for run in c.runs.values() if lane_name(run) == lane}
        where = f"all runs on GPU {lane}" if lane else "all runs"
        bad += [f"{name}: expected one value in {where}, found {len(values)}"] if len(values) > 1 else []
    if len(lanes) > 1:
        hosts = {str(place.host) for key, place in places(c.runs).items() if place.host or pair_is_there(c, key)}
        kinds = {gpu for run in c.runs.values() for gpu in run.head.get("gpus", ())}
        bad += [f"{what}: expected one in all runs, found {' and '.join(sorted(found))}"
                for what, found in (("host", hosts), ("kind of GPU", kinds)) if len(found) > 1]
        bad += ["host: expected it in the logs of runs at once, found none"] if "None" in hosts else []
    place = f"{head.get('machine')}: {head.get('world')} x {head.get('device')}"
    return bad, f"{place}, torch {head.get('torch')}, triton {head.get('triton')}"


def same_shards(known: dict[str, str], manifest: dict[str, str]) -> bool:
    """Whether two records of a corpus have one validation shard, and training shards that begin alike."""
    def shards(found, kind):
        return [(name, digest) for name, digest in found.items() if f"_{kind}_" in name]

    pairs = zip(shards(known, "train"), shards(manifest, "train"))
    return shards(known, "val") == shards(manifest, "val") and all(one == other for one, other in pairs)


def corpus_problems(c: Context) -> Iterator[str]:
    """The tokens must be those of the track, whatever the files are called: by pins, and by what other corpora are
    known to hold."""
    track, manifest = c.folder.track, c.folder.record["data"]
    foreign = [name for name in manifest if not name.startswith(track.corpus + "_")]
    if foreign:
        yield f"expected shards of {track.corpus}, found {foreign[0]}"
    numbers = [int(name[-10:-4]) for name in manifest if "_train_" in name]
    first = min(numbers, default=0)
    if first > 1 or numbers != list(range(first, first + len(numbers))):
        yield f"expected training shards numbered from 0 or 1 on, found {numbers[0]} to {numbers[-1]}"
    if len(set(manifest.values())) < len(manifest):
        yield "expected shards that differ, found one twice"
    pins = PINS.get(track.corpus)
    if pins and manifest_hash(manifest, list(manifest)) != pins.manifest:
        yield f"expected the pinned shards of {track.corpus}, found others"
    for other in readable(c.folder.path.parent):
        known = other.record["data"]
        if not other.record["means"] or other.record.get("abandoned"):  # it may have been planned on a faulty copy
            continue
        if other.track.corpus != track.corpus and set(known.values()) & set(manifest.values()):
            yield f"expected shards of {track.corpus}, found some of {other.track.corpus}"
            return
        if other.track.corpus == track.corpus and not same_shards(known, manifest):
            yield f"expected shards as in {other.path.name}, found others"
            return


def token_problems(c: Context, key: str, run: Run) -> Iterator[str]:
    """One run: as many tokens as the track allows, and its validation tokens."""
    track, end = c.folder.track, (run.of("end") or [{}])[-1]
    used = max((line["tokens"] for line in run.of("step")), default=0)
    used = max(used, run.head.get("consumed_tokens", 0))  # those that were skipped count as used
    if used > track.most_tokens:
        yield f"{key}: expected at most {track.most_tokens:,} training tokens, found {used:,}"
    known = {digest: corpus for corpus, pins in PINS.items() for digest in pins.val_hash.values()}
    expected = PINS[track.corpus].val_hash.get(track.val_tokens) if track.corpus in PINS else None
    found = end.get("val_hash")
    if expected and found != expected:
        yield f"{key}: expected validation tokens {expected}, found {found}"
    elif known.get(found, track.corpus) != track.corpus:
        yield f"{key}: expected validation tokens of {track.corpus}, found those of {known[found]}"


def check_tokens(c: Context) -> Findings:
    """The same tokens everywhere: the track's shards, as planned and in order, one validation set, one training stream
    an arm."""
    manifest, bad, hashes = c.folder.record["data"], list(corpus_problems(c)), {}
    train, val = ([name for name in manifest if f"_{kind}_" in name] for kind in ("train", "val"))
    for key, run in c.runs.items():
        shards, end = run.head.get("shards", []), (run.of("end") or [{}])[-1]
        if not shards or shards != train[:len(shards)]:
            bad.append(f"{key}: expected shards from {train[0]} on, found {', '.join(shards[:3])}")
        elif run.head.get("data") != (expected := manifest_hash(manifest, shards + val)):
            bad.append(f"{key}: expected data {expected[:16]}, found {str(run.head.get('data'))[:16]}")
        bad += token_problems(c, key, run)
        hashes.setdefault("validation", set()).add(end.get("val_hash"))
        hashes.setdefault(f"training, arm {key[0]}", set()).add(end.get("train_hash"))
    bad += [f"tokens of {name}: expected one hash, found {len(found)}" for name, found in hashes.items()
            if len(found) > 1 or None in found]
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
    if not intervals or not abs(total - run.ms) <= 0.06:  # `> 0.06` would let NaN pass
        yield f"expected intervals that sum to {run.ms:.1f} ms, found {total:.1f} ms"
    elif len(run.train) and abs(1e3 * run.train[-1, 1] - total) > STEP_TOLERANCE[0] * total + STEP_TOLERANCE[1]:
        yield f"expected steps that take about {total:.0f} ms, found {1e3 * run.train[-1, 1]:.0f} ms"


def check_clock(c: Context) -> Findings:
    bad = [f"{key}: {text}" for key, run in c.runs.items() for text in clock_problems(run)]
    return bad, "intervals and steps sum to the totals"


def check_means(c: Context) -> Findings:
    expected, found = means(c.folder), c.folder.record["means"]
    if c.folder.record.get("abandoned") and not found:
        return [], "abandoned before the last run"
    bad = [] if expected == found else [f"expected {expected} from the runs, found {found}"]
    if read_block(c.folder.path / "README.md", "numbers") != numbers_block(c.folder):
        bad.append("README.md: expected the numbers of the runs, found others")
    return bad, "record.json and README.md say what the runs say"


def practice_target(c: Context) -> Findings:
    """A loss that fell is all that practice asks for."""
    first = min(run.train[0, 2] for run in c.folder.runs("a"))
    value = stats.mean(losses(c.folder))
    text = f"practice: loss fell from {first:.2f} to {value:.4f}"
    return [] if value < first - 0.5 else [text], text


def earlier_target(c: Context) -> Findings:
    """As records before the rule were judged: by the mean or a t-test, as the track had it."""
    rule, kind, values = EARLIER[c.folder.record["track"]], c.folder.record["kind"], losses(c.folder)
    value = stats.mean(values)
    p, waived = stats.p_below(values, rule.target_loss), rule.alpha is None or kind == "systems"
    text = f"mean loss {value:.4f} against {rule.target_loss}, n = {len(values)}, one-sided p = {p:.2g}"
    text += ", the mean decides" if waived else f", needs < {rule.alpha}"
    reached_it = value <= rule.target_loss and (waived or p < rule.alpha)
    text += f"; before the rule of {RULE_SINCE}"
    if reached_it or kind != "baseline":
        return [] if reached_it else [text], text
    return [], text + "; a baseline, so no claim"


def check_target(c: Context) -> Findings:
    """Does the claim reach the track's loss? For practice it must only fall; a baseline may miss."""
    if c.folder.track.practice:
        return practice_target(c)
    if not c.folder.under_rule:
        return earlier_target(c)
    values = losses(c.folder)
    high = f"{ended_high(values)} of {len(values)} ended high"
    if c.folder.target is None:
        return [], f"loss {stats.mean(values):.4f}, {high}; this track has no target yet"
    test = reached(c.folder)
    text = (f"mean loss {stats.mean(values):.4f}, {test.standard_errors:+.1f} standard errors below {c.folder.target}, "
            f"p = {test.p:.2g}, needs < {test.level}; {high}")
    if c.folder.record["kind"] == "baseline":
        return [], text + "; a baseline, so no claim"
    return [] if test.ok else [text], text


def parents_time(folder: Folder) -> str:
    """A warning where arm b took another time than its own record did on such hardware; empty where it did not."""
    own = load(folder.parent)
    lengths = {record.record["plan"].get("length") for record in (own, folder)}
    if own.hardware != hardware(folder.runs("b")[0]) or len(lengths) > 1:
        return ""
    change = stats.mean([run.ms for run in folder.runs("b")]) / stats.mean([run.ms for run in own.runs("a")]) - 1
    return f"; WARNING: arm b took {change:+.1%} beside the time of its own record" if abs(change) > SLOWER_PARENT else ""


def check_gain(c: Context) -> Findings:
    """Faster than the parent, and at no higher loss; or faster at the parent's loss.

    Of a `systems` record, whose loss check_kind compares, the mean must be faster at the parent's loss.
    """
    if c.folder.parent is None:
        return [], "no parent to gain on"
    time, practice = gain(c.folder), c.folder.track.practice
    sign, word = (1, "slower") if time.difference > 0 else (-1, "faster")
    low, high = sorted(sign * edge / 1e3 for edge in (time.low, time.high))
    text = f"{abs(time.difference) / 1e3:.3f} s {word} than the parent, 99 % interval {low:.3f} to {high:.3f} s, paired"
    ok = time.high < 0
    if c.folder.under_rule and not practice:
        at = equal_loss(c.folder, time)
        # A systems record's loss is within chance (check_kind), which must not take back what it gains.
        ok = ok and (at.no_worse or c.folder.record["kind"] == "systems" and at.ms < 0) or at.gained
        text += f"; loss {at.loss:+.4f}, upper 95 % limit {at.loss_limit:+.4f} (same below {NO_WORSE:+}); " \
                f"at the parent's loss {at.ms / 1e3:+.3f} s, upper limit {at.ms_limit / 1e3:+.3f} s"
    text += parents_time(c.folder)
    return [] if ok or practice else [text], text + ("; practice, so no claim" if practice else "")


def check_kind(c: Context) -> Findings:
    """`systems` says that what is trained is the parent's: the same code where that is defined, the same tokens, and no
    other loss by more than chance. Optimizer and training loop may change: there speed is to be had, too."""
    kind, parent = c.folder.record["kind"], c.folder.parent
    if kind == "ml":
        return [], kind
    if (kind == "systems") == (parent is None):
        wanted = "a" if kind == "systems" else "no"
        return [f"{kind}: expected {wanted} parent, found {c.folder.record['parent']}"], kind
    if kind == "baseline":
        return [], "baseline, a place to start from"
    changed = training_changes(*(c.folder.script(arm).read_text() for arm in "ab"))
    bad = [f"expected the parent's code, found changes of {', '.join(changed)}"] if changed else []
    if len({run.lines[-1].get("train_hash") for run in c.runs.values()}) > 1:
        bad.append("expected the parent's training tokens, found others")
    loss = stats.welch(losses(c.folder), losses(c.folder, "b"))
    same = loss.contains_zero or losses(c.folder) == losses(c.folder, "b")
    bad += [] if same else [f"expected the parent's loss, found {loss.difference:+.4f}, 99 % interval {loss.low:+.4f} "
                            f"to {loss.high:+.4f}"]
    return bad, "systems: model, data, schedule and configuration are the parent's; the loss is not told apart from its"


BEFORE_RUNS = check_name, check_script, check_parent, check_plan
PLANNED = *BEFORE_RUNS, check_runs
# `run` asks these after every run, so that a log that can never verify ends the plan.
EACH_RUN = (check_chain, check_end, check_settings, check_order, check_machine, check_tokens, check_clock, check_starts)
TOGETHER = (check_files, check_means)
CLAIM = (check_target, check_gain, check_kind)
# What is asked of a plan that was given up: it claims nothing, and why it was given up may be what its logs are.
GIVEN_UP = (check_chain, check_files, check_means)


def evaluate(checks: tuple[Callable[[Context], Findings], ...], context: Context) -> list[Check]:
    """A check that cannot even be evaluated has failed."""
    results = []
    for check in checks:
        try:
            bad, text = check(context)
        except Failure as failure:
            bad, text = [str(failure)], ""
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, ZeroDivisionError, SyntaxError,
                RecursionError) as error:
            bad, text = [f"expected data that can be checked, found {type(error).__name__}: {error}"], ""
        text = bad[0] + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "") if bad else text
        results.append(Check(check.__name__.removeprefix("check_"), not bad, text))
    return results


def schema_problem(folder: Folder) -> str | None:
    """The first schema is for the records before the rule, which are listed; everything later stands under the rule."""
    if folder.under_rule:
        return None
    if listed_before_the_rule(folder):
        return None
    digest = sha256((folder.path / "record.json").read_bytes())
    return (f"expected schema 2, or a record as {LIST_BEFORE_THE_RULE.name} lists it, found schema 1 and SHA-256 "
            f"{digest[:16]}")


def verify(path: Path) -> list[Check]:
    """All checks of a folder."""
    try:
        folder = load(path)
        problem = schema_problem(folder)
        runs = {run.path.stem: run for arm in folder.record["scripts"] for run in folder.runs(arm)}
    except Failure as failure:
        return [Check("schema", False, str(failure))]
    record = folder.record
    if problem:
        return [Check("schema", False, problem)]
    text = f"{record['track']}, {record['kind']}, {record['date']}"
    if record.get("abandoned"):
        text += f", abandoned: {record['abandoned']}"
    checks = PLANNED
    if runs:
        checks += GIVEN_UP if record.get("abandoned") else EACH_RUN + TOGETHER + CLAIM
    return [Check("schema", True, text), *evaluate(checks, Context(folder, runs))]
