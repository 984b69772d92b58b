"""`audit DIR`: runs the first steps of one seed again with the record's script and compares the losses with the log."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import runner
from record import Folder, load, query_gpus, require_stated
from runlog import EXIT_HARDWARE, Run, fail, read_run, sha256
from starts import environment, remove_caches
from verify import start_of_run

# Runs on one GPU repeat to the last digit where these agree. Elsewhere sums round otherwise: one, two and four H200
# differ by 2e-6 in the first step's loss and by up to .013 within 50 steps. Two runs on the same two H200 differed by
# 9e-6 in the second step's loss and by .002 in the 25th's, as warps of a kernel raced. Since that is mended they agree
# in every digit (records/LOG.md, 2026-11-30), but older scripts are audited too, and more GPUs have not been tried.
EQUAL_HARDWARE = ("device", "world", "torch", "triton", "cuda")
FIRST_TOLERANCE, TOLERANCE = 0.002, 0.05


class Compared(NamedTuple):
    """One step's training loss in the log and in the run of now."""

    step: int
    logged: float
    found: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return abs(self.logged - self.found) <= self.tolerance  # false for a loss that is not a number


def differences(logged: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What keeps two runs from repeating each other to the digit: hardware and versions, and where nothing repeats."""
    found_differences = [f"{name} {found.get(name)} for {logged.get(name)}" for name in EQUAL_HARDWARE
                         if logged.get(name) != found.get(name)]
    if not logged.get("gpus"):
        found_differences.append("a CPU, whose sums depend on its threads")
    elif logged.get("world", 1) > 1:
        found_differences.append("several GPUs, where scripts before 2026-11-30 do not repeat")
    return found_differences


def compared(logged: Run, found: Run, exact: bool) -> list[Compared]:
    """The steps that both logs have, first to last."""
    again = {int(step): loss for step, _, loss in found.train}
    return [Compared(int(step), loss, again[int(step)], 0.0 if exact else FIRST_TOLERANCE if step == 1 else TOLERANCE)
            for step, _, loss in logged.train if int(step) in again]


def choose_run(folder: Folder, arm: str, seed: int | None) -> Run:
    """The run of a seed, or of one drawn now, which whoever made the record could not foresee."""
    runs = folder.runs(arm) if arm in folder.record["scripts"] else []
    if seed is not None:
        runs = [run for run in runs if run.head.get("seed") == seed]
    if not runs:
        fail(f"runs of {folder.path.name}", f"one of arm {arm}" + (f" and seed {seed}" if seed is not None else ""),
             "none", "name another --arm or --seed")
    return random.choice(runs)


def last_words(output: str) -> str:
    """Why a training ended: the trainer's own line, above what torchrun says about it, or else the last one."""
    lines = [line for line in output.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("train_gpt: ")]
    return (own[:1] or lines[-1:] or ["no output"])[0]


def on_gpus_here(words: list[str], world: int) -> list[str]:
    """A record's command on as many of its `world` GPUs as this machine has: fewer train on the same tokens."""
    gpus = len(query_gpus("--query-gpu=name")) or world  # a CPU runs as many processes
    fitting = max(count for count in (1, 2, 4, 8) if count <= min(gpus, world))
    return [f"--nproc_per_node={fitting}" if word == f"--nproc_per_node={world}" else word for word in words]


def run_again(folder: Folder, key: str, data: Path, steps: int) -> Run:
    """Train `steps` steps of a planned run in a folder of its own. The record is not touched."""
    with tempfile.TemporaryDirectory(prefix="audit-") as place:
        words = on_gpus_here(runner.command(folder, key, data), folder.record["plan"]["world"])
        words[words.index("--log-dir") + 1] = place
        output = Path(place) / "output.txt"
        with output.open("w") as file:
            process = subprocess.Popen([*words, "--stop-after", str(steps)], cwd=folder.path.parents[1],
                                       env=environment(folder, key),
                                       stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait()
            finally:
                runner.stop(process)
        log = runner.newest_log(Path(place))
        run = read_run(log) if log else Run(Path(place), "incomplete")
        if not len(run.train):
            fail(f"audit of {key}", "steps", last_words(output.read_text(errors="replace")),
                 "see what the trainer needs: ./run.sh --check; --data FOLDER", EXIT_HARDWARE)
    return run


def audit(path: Path, data: Path | None, seed: int | None, arm: str, steps: int) -> int:
    """Print what was compared and the verdict.

    Returns the exit status: 1 if the log cannot be of this script, seed and data.
    """
    folder = load(path)
    logged = choose_run(folder, arm, seed)
    key, script, stated = logged.path.stem, folder.script(arm), folder.record["scripts"][arm]
    require_stated(logged.path, folder.record["runs"].get(logged.path.name))
    if logged.broken:
        fail(f"run {key}", "an unbroken chain of lines", logged.broken, "restore the file, for example with git")
    content = sha256(script.read_bytes()) if script.exists() else "no file"
    if content != stated:
        fail(f"script of arm {arm}, {script}", stated[:16], content[:16], "restore the script that ran")
    place = (data or folder.path.parents[1] / folder.track.data).resolve()
    print(f"{folder.path.name}, {key}: {steps} steps with script {folder.record['scripts'][arm][:8]} on "
          f"{os.path.relpath(place)}", flush=True)
    with runner.only_one(folder.path):  # the caches are those of a plan that may be under way
        found = run_again(folder, key, place, steps)
        remove_caches(folder)

    unequal = differences(logged.head, found.head)
    rows = compared(logged, found, not unequal)
    for row in rows:
        print(f"step {row.step:>5}: logged {row.logged:.6f}, now {row.found:.6f}, "
              f"{row.found - row.logged:+.6f}{'' if row.ok else '  DIFFERS'}")
    if unequal:
        print(f"not to the digit ({'; '.join(unequal)}): compared within {FIRST_TOLERANCE} at the first step and "
              f"{TOLERANCE} after it")
    same_data = logged.head.get("data") == found.head.get("data")
    if not same_data:
        print("data: expected the shards that the log names, found others; fix: --data FOLDER")
    now, then = start_of_run(found), start_of_run(logged)
    # Of several, the first rank's part of the state depends on whether they share memory, too.
    comparable = logged.head.get("world") == 1 and now.conditions == then.conditions
    same_start = now.state == then.state or not comparable
    if not same_start:
        print("start: expected the weights of which the log has the hash, found others")
    good = same_data and same_start and len(rows) > 0 and all(row.ok for row in rows)
    print(f"{len(rows)} losses " + ("as logged" if good else "compared: the log is not confirmed"))
    return int(not good)
