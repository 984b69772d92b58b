"""`run`: carries a plan out on this machine, arms interleaved, and closes the record when the last run is in.

Where several runs go at once this one process starts, watches and files them all, so that nothing else writes
record.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lanes import EVERYTHING, Lane, Schedule, require_lanes
from record import (
    Folder,
    data_manifest,
    load,
    log_name,
    query_gpus,
    require_parent_here,
    retime_problem,
    write_record,
)
from report import means, write_numbers
from runlog import EXIT_HARDWARE, EXIT_NUMERICS, Run, fail, read_run, sha256
from starts import duration, environment, remove_caches
from verify import BEFORE_RUNS, EACH_RUN, WAIT_DAYS, Context, day, evaluate

PLAN_ANEW = "python records abandon DIR WHY, then new NAME --restart DIR"
POLL_SECONDS = 2.0  # a glance at an 8 KB file; the training must not feel it
LOOK_SECONDS = 0.05  # whether a process has ended, which costs nothing


def check_idle(lane: Lane = EVERYTHING, patience_s: float = 20.0) -> None:
    """Refuse while another process holds a GPU of the lane. A run that has just ended may take seconds to let go."""
    deadline = time.monotonic() + patience_s
    while busy := query_gpus("--query-compute-apps=pid,process_name,used_memory", *lane.ids):
        if time.monotonic() > deadline:
            fail("GPUs", "no other process", "; ".join(busy[:3]),
                 "wait for it or stop it: a shared machine gives no valid times", EXIT_HARDWARE)
        time.sleep(2)


def check_ready(folder: Folder, data: Path) -> None:
    """Before a GPU second is spent: scripts and data must still be those of the plan, which must have a parent if this
    hardware asks for one, and verify as far as a plan can."""
    for arm, expected in folder.record["scripts"].items():
        path = folder.script(arm)
        found = sha256(path.read_bytes()) if path.exists() else "no file"
        if found != expected:
            fail(f"script of arm {arm}, {path}", expected[:16], found[:16], "restore the file, or plan anew with `new`")
    planned, found = folder.record["data"], data_manifest(folder.track, data)
    if found != planned:
        wrong = sorted(name for name in {*planned, *found} if planned.get(name) != found.get(name))
        fail(f"data in {data}", f"{len(planned)} shards as in record.json",
             f"{', '.join(wrong[:3])} missing, added or different",
             "fetch those shards, or --data FOLDER")
    if folder.parent and (why_not := retime_problem(load(folder.parent))):
        fail(f"parent {folder.parent.name}", "a finished record", why_not, "plan anew with another --parent")
    require_parent_here(folder)
    runs = {run.path.stem: run for arm in folder.record["scripts"] for run in folder.runs(arm)}
    today, planned_on = time.strftime("%Y-%m-%d", time.gmtime()), folder.record["date"]
    if not runs and not 0 <= (day(today) - day(planned_on)).days <= WAIT_DAYS:
        fail(f"plan {folder.path.name}", f"one of the last {WAIT_DAYS} days, by this machine's clock", planned_on,
             "plan anew with `new`, or set the clock")
    for check in evaluate(BEFORE_RUNS, Context(folder, runs)):
        if not check.ok:
            fail(f"plan {folder.path.name}, {check.name}", "one that verifies", check.text,
                 "restore record.json, for example with git, or plan anew with `new`")


def local(folder: Folder, path: Path) -> str:
    """`path` as seen from the repository's root, where runs start: logs need not tell where that is."""
    root = folder.path.parents[1]
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def command(folder: Folder, key: str, data: Path, lane: Lane = EVERYTHING) -> list[str]:
    """One process a run, so that each has its own start and warm-up; kept caches save most of the start."""
    arm, _, seed = key.partition("-s")
    plan = folder.record["plan"]
    length = ["--length", str(plan["length"])] if "length" in plan else []
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan['world']}",
            local(folder, folder.script(arm)), "--preset", folder.track.preset, "--seed", seed, "--data",
            local(folder, data),
            "--log-dir", local(folder, log_dir(folder, key, lane)), *length]


def log_dir(folder: Folder, key: str, lane: Lane = EVERYTHING) -> Path:
    """The log notes this path as a setting, which ties it to plan, arm and lane."""
    return folder.path / "running" / log_name(folder, key, lane.name)


def log_dirs(folder: Folder, key: str) -> list[Path]:
    """Where attempts at a run may have left logs: on any lane."""
    on_lanes = folder.path.glob(f"running/{folder.record['plan']['id']}-{key}-g*")
    return [log_dir(folder, key), *sorted(on_lanes)]


def newest_log(directory: Path) -> Path | None:
    return max(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Attempt(NamedTuple):
    """A training under way."""

    key: str
    number: int  # its place in the plan, from 1
    lane: Lane
    process: subprocess.Popen
    directory: Path  # of its log
    output: Path
    started: float

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


def heading(key: str, number: int, count: int, lane: Lane = EVERYTHING) -> str:
    """What a line about a run begins with; its GPUs come first, where there are lanes."""
    place = f"{lane.label}  " if lane.name else ""
    return f"{place}run {number}/{count}  {key:<12}"


def progress(run: Run, number: int, count: int, key: str, typical_s: float | None, since_s: float,
             lane: Lane = EVERYTHING, at_once: int = 1) -> str:
    """One status line: which run, where it is, and how long this run and all runs still take."""
    text = heading(key, number, count, lane)
    if not len(run.train):
        return f"{text}  preparing, {minutes(since_s)}"
    step, seconds, loss = run.train[-1]
    left = seconds / step * (run.total_steps - step)
    text += f"  step {step:.0f}/{run.total_steps}  loss {loss:.4f}  left {minutes(left)}"
    return text + (f", all runs {minutes(left + (count - number) * typical_s / at_once)}" if typical_s else "")


class Status:
    """What the runs under way say, a line each: in a terminal in place, else a new line for each new step in a log."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.drawn = 0  # lines of a terminal, the last of which has no end
        self.steps = {}  # of each run, when it was last shown

    def show(self, key: str, steps: int, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be taken back
            print("\n" * (self.drawn > 0) + text[:width], end="", flush=True)
            self.drawn += 1
        elif steps != self.steps.get(key):
            self.steps[key] = steps
            print(text, flush=True)

    def clear(self) -> None:
        if self.drawn:
            print("\r\033[K" + "\033[A\033[K" * (self.drawn - 1), end="", flush=True)
        self.drawn = 0


def follow(attempts: list[Attempt], status: Status, count: int, typical_s: float | None) -> None:
    """Show progress until one of these trainings ends."""
    while not any(attempt.ended for attempt in attempts):
        status.clear()
        for attempt in attempts:
            path = newest_log(attempt.directory)
            run = read_run(path) if path else Run(attempt.directory, "incomplete")
            since_s = time.monotonic() - attempt.started
            text = progress(run, attempt.number, count, attempt.key, typical_s, since_s, attempt.lane, len(attempts))
            status.show(attempt.key, len(run.train), text)
        again = time.monotonic() + POLL_SECONDS
        while time.monotonic() < again and not any(attempt.ended for attempt in attempts):
            time.sleep(min(LOOK_SECONDS, POLL_SECONDS))
    status.clear()


def stop(*processes: subprocess.Popen) -> None:
    """End runs and their ranks: ask all, wait for the logs to be closed, then insist. Who asks once more, as with a
    second Ctrl-C, does not wait."""
    for number, patience in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            for process in left:
                process.wait(max(0.0, deadline - time.monotonic()))


def collect(folder: Folder, key: str) -> Run | None:
    """File the log of an attempt: a result goes to runs/, anything else to unfinished/, where it stays visible.

    Returns the last one. A run that diverged is a result. Otherwise one could repeat a script until it does not.
    """
    directories, run = log_dirs(folder, key), None
    for path in [path for directory in directories for path in sorted(directory.glob("*.jsonl"))]:
        run = read_run(path)
        result = run.ok or exit_code(run) == EXIT_NUMERICS
        aside = folder.path / "unfinished" / f"{key}-{path.stem.rpartition('-')[2]}.jsonl"
        target = folder.path / "runs" / f"{key}.jsonl" if result else aside
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        if result:
            folder.record["runs"][target.name] = sha256(target.read_bytes())
            write_record(folder.path, folder.record)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    return run


def exit_code(run: Run | None) -> int | None:
    """What the trainer says it ended with, when it failed."""
    return run.lines[-1].get("code") if run and run.lines and run.lines[-1]["kind"] == "end" else None


def begin(folder: Folder, key: str, lane: Lane, data: Path, lock: int) -> Attempt:
    """Start one training."""
    check_idle(lane)
    directory = log_dir(folder, key, lane)
    output = folder.path / "running" / (f"output-g{lane.name}.txt" if lane.name else "output.txt")
    directory.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        process = subprocess.Popen(command(folder, key, data, lane), cwd=folder.path.parents[1],
                                   env=environment(folder, key, lane),
                                   stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   pass_fds=[lock])  # so that a training that outlives this process keeps the lock
    number = folder.record["plan"]["order"].index(key) + 1
    return Attempt(key, number, lane, process, directory, output, time.monotonic())


def finish(folder: Folder, attempt: Attempt) -> None:
    """File the log of a training that has ended, and refuse what is no result, or can be part of no record."""
    key, lane, output, count = attempt.key, attempt.lane, attempt.output, len(folder.record["plan"]["order"])
    run = collect(folder, key)
    if f"{key}.jsonl" not in folder.record["runs"]:
        said = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("train_gpt: ")]
        fail(f"run {key}" + (f" on {lane.label}" if lane.name else ""), "a log that ends with ok",
             said[-1] if said else run.state if run else "no log",
             f"see {output}, then run this command again: it continues here", exit_code(run) or EXIT_HARDWARE)
    print(f"{heading(key, attempt.number, count, lane)}  loss {run.loss:.4f}  {run.ms / 1e3:.2f} s  {run.state}",
          flush=True)
    check_result(folder, key)


def check_result(folder: Folder, key: str) -> None:
    """A run that can never be part of a record ends the plan now, not after the last run."""
    runs = {run.path.stem: run for arm in folder.record["scripts"] for run in folder.runs(arm)}
    path, stated = folder.path / "runs" / f"{key}.jsonl", folder.record["runs"][f"{key}.jsonl"]
    if key not in runs or sha256(path.read_bytes()) != stated:
        fail(f"run {key}, {path}", f"sha256 {stated[:16]} as in record.json", "another: edited or cut since"
             if key in runs else "no file",
             f"restore the file, for example with git, or {PLAN_ANEW}")
    if not runs[key].ok:
        fail(f"run {key}", "a finite loss", runs[key].state,
             "python records abandon DIR WHY, then change the script and plan anew with `new`", EXIT_NUMERICS)
    for check in evaluate(EACH_RUN, Context(folder, runs)):
        if not check.ok:
            fail(f"run {key}, {check.name}", "a log that verifies", check.text,
                 f"mend the cause, and {PLAN_ANEW}")


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[int]:
    """Two `run`s of one record would file each other's logs."""
    place = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"record {path}", "one `run` at a time", "another that is under way", "wait for it, or stop it")
        yield place
    finally:
        os.close(place)


def run_plan(path: Path, data: Path | None, at_once: int = 1) -> None:
    """All runs of the plan that are not there yet, then the means and the numbers of the README."""
    with only_one(load(path).path) as lock:
        carry_out(load(path), data, lock, at_once)


def carry_out(folder: Folder, data: Path | None, lock: int, at_once: int) -> None:
    if folder.record.get("abandoned"):
        fail(f"record {folder.path.name}", "a plan to carry out", "one that was abandoned",
             "plan anew, once with --restart")
    data = (data or folder.path.parents[1] / folder.track.data).resolve()
    check_ready(folder, data)
    here = require_lanes(folder, at_once)
    order = folder.record["plan"]["order"]
    gather(folder)
    print(duration(folder, at_once), flush=True)
    if not (folder.track.practice or folder.record["runs"] or committed(folder)):
        print(f"WARNING: the plan of {folder.path.name} is not committed. CI refuses a record whose plan was not "
              "committed before its first run: stop here, commit it, and start again.", flush=True)
    for number, key in enumerate(order, 1):
        if f"{key}.jsonl" in folder.record["runs"]:
            print(f"{heading(key, number, len(order))}  done before", flush=True)
            check_result(folder, key)
    make_runs(folder, Schedule(folder, at_once, here), data, lock)
    close(folder)
    folder.record["means"] = means(folder)
    write_record(folder.path, folder.record)
    write_numbers(folder)
    print(json.dumps(folder.record["means"]))


def gather(folder: Folder) -> None:
    """File what an interruption left, whole or to be repeated, and list what is filed."""
    if (folder.path / "running").exists():
        for key in folder.record["plan"]["order"]:
            collect(folder, key)
    adopt(folder)


def close(folder: Folder) -> None:
    """Nothing more runs."""
    shutil.rmtree(folder.path / "running", ignore_errors=True)
    remove_caches(folder)


def adopt(folder: Folder) -> None:
    """List runs that are filed and not listed: `run` was killed in between. No run that is there is repeated."""
    names = [f"{key}.jsonl" for key in folder.record["plan"]["order"]]
    paths = [folder.path / "runs" / name for name in names if name not in folder.record["runs"]]
    for path in filter(Path.exists, paths):
        folder.record["runs"][path.name] = sha256(path.read_bytes())
        write_record(folder.path, folder.record)


def committed(folder: Folder) -> bool:
    """Whether git has the plan as it is; outside of a repository nobody asks."""
    def git(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(folder.path), *words], capture_output=True, text=True)

    try:
        if git("rev-parse", "--git-dir").returncode:
            return True
        return git("show", "HEAD:./record.json").stdout == (folder.path / "record.json").read_text()
    except FileNotFoundError:  # no git
        return True


def make_runs(folder: Folder, schedule: Schedule, data: Path, lock: int) -> None:
    """Those that are left. The first failure, or an interruption, ends all that are under way and files their logs."""
    under_way, durations, status, count = [], [], Status(), len(folder.record["plan"]["order"])
    try:
        while schedule.unfinished:
            for lane, key in schedule.due():
                under_way.append(begin(folder, key, lane, data, lock))
            follow(under_way, status, count, sum(durations) / len(durations) if durations else None)
            for attempt in [attempt for attempt in under_way if attempt.ended]:
                under_way.remove(attempt)
                finish(folder, attempt)
                schedule.ended(attempt.lane)
                durations.append(time.monotonic() - attempt.started)
    except BaseException:
        status.clear()
        stop(*(attempt.process for attempt in under_way))
        with contextlib.suppress(OSError):  # the next call files what this one cannot
            for attempt in under_way:
                collect(folder, attempt.key)
        raise
