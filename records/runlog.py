"""Reading logs: our chained JSON lines and the plain text logs of the public project, both into one `Run`."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

EXIT_USAGE, EXIT_NUMERICS, EXIT_HARDWARE = 2, 3, 4
RULE = "=" * 100  # the public logs put one before and after the facts about the machine
TEXT_STEP = re.compile(r"^step:(\d+)/(\d+) (?:(val|train)_loss:(-?\d+\.?\d*|nan|inf) )?train_time:(\d+\.?\d*)ms",
                       re.MULTILINE)
TEXT_CORPUS = re.compile(r"^corpus: (\w+)$", re.MULTILINE)
TEXT_TIMES = re.compile(r"^times: (\w+)$", re.MULTILINE)
TEXT_GPU = re.compile(r"^\|\s+\d+\s+(NVIDIA .*?)\s+(?:On|Off)\s*\|", re.MULTILINE)


class Failure(Exception):
    """An error the user can act on: one line that says what, expected, found and the fix; `code` is the exit status."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def fail(what: str, expected: Any, found: Any, fix: str, code: int = EXIT_USAGE) -> None:
    raise Failure(f"{what}: expected {expected}, found {found}; fix: {fix}", code)


def no_curve() -> np.ndarray:
    return np.empty((0, 3))


@dataclass(frozen=True)
class Run:
    """One training run.

    Curves are rows of (step, seconds on the clock, loss); `stages` are (first step, what it is).
    """
    path: Path
    state: str  # "ok", what the end line says, or "incomplete"
    head: dict[str, Any] = field(default_factory=dict)
    loss: float = math.nan  # of the final validation, nats a token
    ms: float = math.nan  # on the clock
    total_steps: int = 0
    train: np.ndarray = field(default_factory=no_curve)
    vals: np.ndarray = field(default_factory=no_curve)
    stages: tuple[tuple[int, str], ...] = ()
    lines: tuple[dict[str, Any], ...] = ()
    broken: str | None = None  # where the chain of hashes breaks

    @property
    def ok(self) -> bool:
        return self.state == "ok" and math.isfinite(self.loss) and math.isfinite(self.ms)

    @property
    def diverged(self) -> bool:
        """Ended because a loss was no number, as the trainer says: a result, for which a plan may be given up."""
        return not self.ok and bool(self.lines) and self.lines[-1]["kind"] == "end" and \
            self.lines[-1].get("code") == EXIT_NUMERICS

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def span(run: Run) -> tuple[float, float] | None:
    """Between which times a run certainly used its GPUs, by its log, in seconds since 1970: from its start over its
    warm-up to its last step. None if the log does not say when it started."""
    try:
        when = datetime.datetime.fromisoformat(run.head["started"])
        if when.tzinfo is None:  # it would be the time of whoever reads it
            return None
        started = when.timestamp()
        preparing = sum(float(line["seconds"]) for line in run.of("warm"))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return started, started + (preparing + run.ms / 1e3 if run.ok else 0.0)


def sha256(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


CUT_OFF = "the last line is cut off"  # as of a training that was killed; any other break of the chain is an edit


def chained_lines(text: str) -> tuple[list[dict[str, Any]], str | None]:
    """The events of a log and the first place where a line is not the one that was written, None if all are."""
    lines, chain = [], ""
    for number, row in enumerate(text.splitlines(), 1):
        body, _, mark = row.rpartition(', "chain": "')
        chain = sha256(f"{chain}{body}}}")[:16]  # the writer hashed the line before it appended the chain
        try:
            lines.append(json.loads(row))
            lines[-1]["kind"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return [line for line in lines if isinstance(line, dict) and "kind" in line], f"line {number} is no event"
        if mark != f'{chain}"}}':
            return lines, f"line {number} or the one before it was edited"
    return lines, None if text.endswith("\n") else CUT_OFF


def describe_stage(line: dict[str, Any]) -> str:
    windows = f"{line['short_window_tokens']}/{line['long_window_tokens']}"
    extension = ", extension" if line.get("extension") else ""
    return f"{line['batch_tokens']:,} tokens a step, windows {windows}{extension}"


def read_json_log(path: Path, text: str) -> Run:
    lines, broken = chained_lines(text)
    try:
        head = next((line for line in lines if line["kind"] == "head"), {})
        end = lines[-1] if lines and lines[-1]["kind"] == "end" else {}
        rows, before, ms = [], head.get("first_step", 0), 0.0
        for line in lines:
            if line["kind"] == "step":
                ms += (line["step"] - before) * line["ms_per_step"]
                before = line["step"]
                rows.append((before, ms / 1e3, line["train_loss"]))
                whole = {type(before), type(line["tokens"])} == {int}
                if not whole or not 0 <= before < 2**31 or not math.isfinite(ms):
                    raise ValueError(f"step {before}")
        train = np.array(rows, float).reshape(-1, 3)
        vals = [(line["step"] or 0, line["loss"], line["final"]) for line in lines if line["kind"] == "val"]
        at = [end.get("ms", math.nan) / 1e3 if final else np.interp(step, [0, *train[:, 0]], [0, *train[:, 1]])
              for step, _, final in vals]
        stages = tuple((int(float(line["step"])), describe_stage(line)) for line in lines if line["kind"] == "stage")
        total = sum(stage["steps"] for stage in head.get("preset", {}).get("stages", ()))
        rows = [(step, seconds, loss) for (step, loss, _), seconds in zip(vals, at)]
        loss, ms = (float(end.get(name, math.nan)) for name in ("loss", "ms"))
        return Run(path, str(end.get("state", "incomplete")), head, loss, ms, total, train,
                   np.array(rows, float).reshape(-1, 3), stages, tuple(lines), broken)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return Run(path, "incomplete",
                   broken=broken or f"an event lacks or mistypes a field ({type(error).__name__}: {error})")


def read_text_log(path: Path, text: str) -> Run:
    """A public log: script, rule, machine, rule, step lines.

    Times are a host clock's; the last validation ends the run.
    """
    parts = text.split(f"\n{RULE}\n")
    rows = [(int(step), int(total), kind or "train", float(ms) / 1e3, float(loss or "nan"))
            for step, total, kind, loss, ms in TEXT_STEP.findall(parts[-1])]
    gpus = TEXT_GPU.findall(parts[1]) if len(parts) > 2 else []
    head = {"script": sha256(parts[0]), "gpus": gpus, "world": len(gpus) or None, "device": gpus[0] if gpus
            else "unknown"}
    for name, pattern in (("corpus", TEXT_CORPUS), ("times", TEXT_TIMES)):  # we add both where we made such a log
        if named := pattern.search(parts[1] if len(parts) > 2 else ""):
            head[name] = named[1]
    train, vals = (np.array([(step, seconds, loss) for step, _, found, seconds, loss in rows if found == kind],
                            float).reshape(-1, 3)
                   for kind in ("train", "val"))
    total = rows[-1][1] if rows else 0
    done = len(vals) > 0 and vals[-1, 0] == total
    loss, ms = (vals[-1, 2], 1e3 * vals[-1, 1]) if done else (math.nan, math.nan)
    # stages are not in the log
    stages = tuple((total * third // 3, f"third {third + 1} of the steps") for third in range(3)) if total else ()
    return Run(path, "ok" if done else "incomplete", head, float(loss), float(ms), total, train, vals, stages)


def read_peer_result(path: Path, text: str) -> Run:
    """A raw result in curves/: a public script that we ran on our data.

    Its training loss counts other targets, so only its end is a curve.
    """
    try:
        result = json.loads(text)
        steps, seconds, val = int(result["steps"]), float(result["train_s"]), result["val"]
        corpus = str(val["file"]).partition("_val_")[0]
        head = {"corpus": corpus, "world": 1, "device": "NVIDIA H200", "preset": {"val_tokens": val["tokens"]},
                "seed": result["seed"]}
        end = np.array([(steps, seconds, float(val["loss"]))])
        return Run(path, "ok", head, float(val["loss"]), 1e3 * seconds, steps, vals=end)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        return Run(path, "incomplete", broken=f"no result of a public script ({type(error).__name__}: {error})")


def read_run(path: Path) -> Run:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        fail(f"log {path}", "a readable file", error, "check the path")
    readers = {".jsonl": read_json_log, ".json": read_peer_result}
    return readers.get(path.suffix, read_text_log)(path, text)


def first_step(run: Run) -> int:
    """How many steps were done when this run began: above 0 where it went on from a checkpoint."""
    return run.head.get("first_step", 0)


def stage_times(run: Run) -> list[float]:
    """Mean ms a step of each stage, from the log intervals that lie wholly inside it; nan where none does."""
    edges = [first for first, _ in run.stages] + [run.total_steps]
    steps, ms = np.array([first_step(run), *run.train[:, 0]]), 1e3 * np.array([0, *run.train[:, 1]])
    times = []
    for begin, end in zip(edges, edges[1:]):
        inside = np.flatnonzero((steps[:-1] >= begin) & (steps[1:] <= end))
        count = (steps[inside + 1] - steps[inside]).sum()
        times.append(float((ms[inside + 1] - ms[inside]).sum() / count) if count else math.nan)
    return times


def loss_curve(run: Run) -> tuple[np.ndarray, str]:
    """(seconds, loss) rows and what they are: validation where it was followed, else training loss averaged over three
    log lines."""
    if len(run.vals) > 2 or len(run.train) < 3 or np.isnan(run.train[:, 2]).all():
        return run.vals[:, 1:], "validation loss"
    three = np.ones(3) / 3  # both columns, so that the average does not lag behind
    return np.column_stack([np.convolve(run.train[:, column], three, "valid") for column in (1, 2)]), "training loss"
