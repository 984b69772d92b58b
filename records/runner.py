"""`run`: carries a plan out on this machine, arms interleaved, and closes the record when the last run is in."""

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

from record import Folder, data_manifest, load, log_name, query_gpus, require_parent_here, write_record
from report import means, write_numbers
from runlog import EXIT_HARDWARE, EXIT_NUMERICS, Run, fail, read_run, sha256
from starts import duration, environment, remove_caches
from verify import EACH_RUN, Context, evaluate

POLL_SECONDS = 2.0  # a glance at an 8 KB file; the training must not feel it


def check_idle(patience_s: float = 20.0) -> None:
    """Refuse while another process holds a GPU. A run that has just ended may take seconds to let go."""
    deadline = time.monotonic() + patience_s
    while busy := query_gpus("--query-compute-apps=pid,process_name,used_memory"):
        if time.monotonic() > deadline:
            fail("GPUs", "no other process", "; ".join(busy[:3]),
                 "wait for it or stop it: a shared machine gives no valid times", EXIT_HARDWARE)
        time.sleep(2)


def check_ready(folder: Folder, data: Path) -> None:
    """Scripts and data must still be those of the plan, and it must have a parent if this hardware asks for one, before
    a GPU second is spent."""
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
    require_parent_here(folder)


def local(folder: Folder, path: Path) -> str:
    """`path` as seen from the repository's root, where runs start: logs need not tell where that is."""
    root = folder.path.parents[1]
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def command(folder: Folder, key: str, data: Path) -> list[str]:
    """One process a run, so that each has its own start and warm-up; kept caches save most of the start."""
    arm, _, seed = key.partition("-s")
    plan = folder.record["plan"]
    length = ["--length", str(plan["length"])] if "length" in plan else []
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={plan['world']}",
            local(folder, folder.script(arm)), "--preset", folder.track.preset, "--seed", seed, "--data",
            local(folder, data),
            "--log-dir", local(folder, log_dir(folder, key)), *length]


def log_dir(folder: Folder, key: str) -> Path:
    """The log notes this path as a setting, which ties it to plan and arm."""
    return folder.path / "running" / log_name(folder, key)


def newest_log(directory: Path) -> Path | None:
    return max(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def progress(run: Run, number: int, count: int, key: str, typical_s: float | None, since_s: float) -> str:
    """One status line: which run, where it is, and how long this run and all runs still take."""
    text = f"run {number}/{count}  {key:<12}"
    if not len(run.train):
        return f"{text}  preparing, {minutes(since_s)}"
    step, seconds, loss = run.train[-1]
    left = seconds / step * (run.total_steps - step)
    text += f"  step {step:.0f}/{run.total_steps}  loss {loss:.4f}  left {minutes(left)}"
    return text + (f", all runs {minutes(left + (count - number) * typical_s)}" if typical_s else "")


def follow(process: subprocess.Popen, directory: Path, number: int, count: int, key: str,
           typical_s: float | None) -> None:
    """Show progress until the process ends: on one line of a terminal, else a line for each new step in the log."""
    terminal, started, shown = sys.stdout.isatty(), time.monotonic(), None
    while process.poll() is None:
        path = newest_log(directory)
        run = read_run(path) if path else Run(directory, "incomplete")
        text = progress(run, number, count, key, typical_s, time.monotonic() - started)
        if terminal or len(run.train) != shown:
            print(f"\r{text}\033[K" if terminal else text, end="" if terminal else "\n", flush=True)
            shown = len(run.train)
        try:
            process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    if terminal:
        print("\r\033[K", end="")


def stop(process: subprocess.Popen) -> None:
    """End a run and its ranks: ask, wait for the log to be closed, then insist."""
    for number, patience in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
        if process.poll() is None:
            try:
                os.killpg(process.pid, number)
                process.wait(patience)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                pass


def collect(folder: Folder, key: str) -> Run | None:
    """File the log of an attempt: a result goes to runs/, anything else to unfinished/, where it stays visible.

    Returns the last one. A run that diverged is a result. Otherwise one could repeat a script until it does not.
    """
    directory, run = log_dir(folder, key), None
    for path in sorted(directory.glob("*.jsonl")):
        run = read_run(path)
        result = run.ok or exit_code(run) == EXIT_NUMERICS
        aside = folder.path / "unfinished" / f"{key}-{path.stem.rpartition('-')[2]}.jsonl"
        target = folder.path / "runs" / f"{key}.jsonl" if result else aside
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        if result:
            folder.record["runs"][target.name] = sha256(target.read_bytes())
            write_record(folder.path, folder.record)
    shutil.rmtree(directory, ignore_errors=True)
    return run


def exit_code(run: Run | None) -> int | None:
    """What the trainer says it ended with, when it failed."""
    return run.lines[-1].get("code") if run and run.lines and run.lines[-1]["kind"] == "end" else None


def attempt(folder: Folder, key: str, number: int, data: Path, typical_s: float | None, lock: int) -> None:
    """One training run, from start to a filed log."""
    check_idle()
    directory, count, output = log_dir(folder,
                                       key), len(folder.record["plan"]["order"]), folder.path / "running" / "output.txt"
    directory.mkdir(parents=True, exist_ok=True)
    with output.open("w") as file:
        process = subprocess.Popen(command(folder, key, data), cwd=folder.path.parents[1], env=environment(folder, key),
                                   stdout=file,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   pass_fds=[lock])  # so that a training that outlives this process keeps the lock
        try:
            follow(process, directory, number, count, key, typical_s)
        finally:
            stop(process)
    run = collect(folder, key)
    if f"{key}.jsonl" not in folder.record["runs"]:
        said = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("train_gpt: ")]
        fail(f"run {key}", "a log that ends with ok", said[-1] if said else run.state if run else "no log",
             f"see {output}, then run this command again: it continues here", exit_code(run) or EXIT_HARDWARE)
    print(f"run {number}/{count}  {key:<12}  loss {run.loss:.4f}  {run.ms / 1e3:.2f} s  {run.state}", flush=True)


def check_result(folder: Folder, key: str) -> None:
    """A run that can never be part of a record ends the plan now, not after the last run."""
    runs = {run.path.stem: run for arm in folder.record["scripts"] for run in folder.runs(arm)}
    path, stated = folder.path / "runs" / f"{key}.jsonl", folder.record["runs"][f"{key}.jsonl"]
    if key not in runs or sha256(path.read_bytes()) != stated:
        fail(f"run {key}, {path}", f"sha256 {stated[:16]} as in record.json", "another: edited or cut since"
             if key in runs else "no file",
             "restore the file, for example with git, or plan anew with `new`")
    if not runs[key].ok:
        fail(f"run {key}", "a finite loss", runs[key].state,
             "python records abandon DIR WHY, then change the script and plan anew with `new`", EXIT_NUMERICS)
    for check in evaluate(EACH_RUN, Context(folder, runs)):
        if not check.ok:
            fail(f"run {key}, {check.name}", "a log that verifies", check.text,
                 "mend the cause and plan anew with `new`")


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


def run_plan(path: Path, data: Path | None) -> None:
    """All runs of the plan that are not there yet, then the means and the numbers of the README."""
    with only_one(load(path).path) as lock:
        carry_out(load(path), data, lock)


def carry_out(folder: Folder, data: Path | None, lock: int) -> None:
    if folder.record.get("abandoned"):
        fail(f"record {folder.path.name}", "a plan to carry out", "one that was abandoned",
             "plan anew, once with --restart")
    data = (data or folder.path.parents[1] / folder.track.data).resolve()
    check_ready(folder, data)
    order, durations = folder.record["plan"]["order"], []
    if (folder.path / "running").exists():
        for key in order:  # left by an interruption: whole, or to be repeated
            collect(folder, key)
    print(duration(folder), flush=True)
    for number, key in enumerate(order, 1):
        if f"{key}.jsonl" in folder.record["runs"]:
            print(f"run {number}/{len(order)}  {key:<12}  done before", flush=True)
        else:
            started = time.monotonic()
            attempt(folder, key, number, data, sum(durations) / len(durations) if durations else None, lock)
            durations.append(time.monotonic() - started)
        check_result(folder, key)
    shutil.rmtree(folder.path / "running", ignore_errors=True)
    remove_caches(folder)
    folder.record["means"] = means(folder)
    write_record(folder.path, folder.record)
    write_numbers(folder)
    print(json.dumps(folder.record["means"]))
