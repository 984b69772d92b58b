"""What a node of several GPUs is asked once it is there: whole runs, scaling, traces, nodes, a killed rank; not a test.

    python benchmarks/whole_node.py --webmix FOLDER --webtext FOLDER --out FOLDER           on all GPUs of this node
    python benchmarks/whole_node.py --webmix FOLDER --out FOLDER --only speedrun scaling    some of the tasks
    python benchmarks/whole_node.py --webmix data/sample --preset smoke --processes 2 --out FOLDER --only scaling killed
                                                                      on a CPU: proves that it runs through

Tasks run one after the other, unattended, and each says how long it took. At the end stands a table of all runs, and
the same in FOLDER/table.md. In order:

    speedrun   two runs with different seeds, the first with empty compiler caches and the second with warm ones
    scaling    a fifth of the schedule on 1, 2, 4 ... GPUs: ms a step by stage, and memory
    trace      a trace of the last three steps of each stage, for the time in which communication is not hidden
    sprint     one run, if there is webtext
    nodes      the halves of this node as two nodes over the loopback, with the preset smoke-gpu
    killed     a rank is killed in the midst of a run: the seconds until all have ended, and the line that says why

--dry-run prints the commands alone. A task that fails leaves the others to run; then the exit code is 1.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
TASKS = "speedrun", "scaling", "trace", "sprint", "nodes", "killed"
SHORT = 0.2  # of the schedule: on eight GPUs some seconds, on one half a minute


def ended(process: subprocess.Popen, limit_s: float) -> int | str:
    """Its exit code, if it has one by then."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "none within the limit"


@contextlib.contextmanager
def running(command: list[str], output: Path, environment: dict) -> Iterator[subprocess.Popen]:
    """A process with its output in a file. At the end it is asked to end, if it has not yet: torchrun then ends its
    ranks, which have sessions of their own, so that neither the next command nor who comes later runs beside them."""
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        if isinstance(ended(process, 60), str):
            process.kill()


class Node:
    """The commands of a node, and what their logs say."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.failed = []  # the names of commands that did not end with exit code 0
        self.logs = options.out / "logs"
        # Both caches are this script's own: the first run finds them empty.
        self.environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(options.out / "inductor"),
            "TRITON_CACHE_DIR": str(options.out / "triton"),
        }

    def training(self, processes: int, *arguments: str, script: str = "train_gpt.py", first: tuple = ()) -> list[str]:
        """A command that trains with so many processes. `first` are arguments before those of train_gpt.py."""
        launcher = [sys.executable]
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [*launcher, script, *first, *arguments, "--log-dir", str(self.logs)]

    def run(self, name: str, command: list[str]) -> None:
        """Run a command with its output in a file, within the time limit, and say how it ended."""
        print(f"{name}: {shlex.join(command)}", flush=True)
        if self.options.dry_run:
            return
        started = time.monotonic()
        with running(command, self.options.out / f"{name}.txt", self.environment) as process:
            code = ended(process, self.options.limit)
        self.note(name, code, f" after {time.monotonic() - started:.0f} s")

    def note(self, name: str, code: int | str, more: str = "") -> None:
        self.failed += [name] if code else []
        print(f"{name}: exit code {code}{more}", flush=True)


# ---- tasks -----------------------------------------------------------------------------------------------------------
def speedrun(node: Node) -> None:
    options = node.options
    for seed in (1, 2):
        preset = "--preset", options.preset, "--data", str(options.webmix), "--seed", str(seed)
        node.run(f"speedrun-{seed}", node.training(options.processes, *preset))


def scaling(node: Node) -> None:
    options = node.options
    processes = 1
    while processes <= options.processes:
        preset = "--preset", options.preset, "--data", str(options.webmix), "--length", str(SHORT)
        node.run(f"scaling-{processes}", node.training(processes, *preset, "--seed", "1"))
        processes *= 2


def trace(node: Node) -> None:
    sys.path.insert(0, str(ROOT))
    import train_gpt as tg  # here, because it imports torch

    options = node.options
    preset = tg.scaled_preset(tg.PRESETS[options.preset], SHORT)
    end = 0
    for number, stage in enumerate(preset.stages):
        begin = end
        end += stage.steps
        steps = f"{max(end - 3, begin)}:{end - 1}"
        arguments = (
            "--preset", options.preset, "--data", str(options.webmix), "--length", str(SHORT),
            "--stop-after", str(end), "--seed", "1",
        )
        command = node.training(
            options.processes, *arguments, script="benchmarks/bench_trace.py", first=(steps,)
        )
        started = time.time() - 1  # the clock of files is coarser
        node.run(f"trace-{number}", command)
        place = options.out / f"trace-{number}"
        for path in sorted(ROOT.glob("trace-rank*.trace.json")):
            if path.stat().st_mtime >= started:  # not one that somebody has left there
                place.mkdir(exist_ok=True)
                shutil.move(path, place / path.name)  # where it is written, the next stage's would replace it


def sprint(node: Node) -> None:
    options = node.options
    if options.webtext is None:
        print("sprint: left out, as there is no --webtext", flush=True)
        return
    preset = "--preset", "sprint", "--data", str(options.webtext), "--seed", "1"
    node.run("sprint", node.training(options.processes, *preset))


def nodes(node: Node) -> None:
    """Two run.sh at once, each of which sees a half of the GPUs."""
    options = node.options
    half = options.processes // 2
    if not half:
        print("nodes: left out, as there is one process", flush=True)
        return
    command = ["./run.sh", "--preset", "smoke-gpu", "--seed", "1", "--log-dir", str(node.logs)]
    environments = []
    for rank in range(2):
        visible = ",".join(str(gpu) for gpu in range(rank * half, (rank + 1) * half))
        here = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": visible}
        here["PYTHON"] = sys.executable  # else run.sh looks for one, and installs where it finds none
        print(f"nodes: {' '.join(f'{name}={value}' for name, value in here.items())} {shlex.join(command)}", flush=True)
        environments.append(node.environment | here)
    if options.dry_run:
        return
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(running(command, options.out / f"nodes-{rank}.txt", environment))
                  for rank, environment in enumerate(environments)]
        for rank, process in enumerate(halves):
            node.note(f"nodes: node {rank}", ended(process, options.limit))


def killed(node: Node) -> None:
    """Kill the last rank once a step is in the log, and wait for the others."""
    options = node.options
    preset = "--preset", options.preset, "--data", str(options.webmix), "--seed", "3"
    command = node.training(max(options.processes, 2), *preset)
    print(f"killed: {shlex.join(command)}", flush=True)
    if options.dry_run:
        return
    output = options.out / "killed.txt"
    with running(command, output, node.environment) as process:
        deadline = time.monotonic() + options.limit
        while " s left" not in output.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if process.poll() is not None:
            node.note("killed", f"{process.returncode}, by itself", f"; {output} says why")
            return
        if " s left" not in output.read_text():
            node.note("killed", "none", f", and no step within the limit; {output} says why")
            return
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        started = time.monotonic()
        code = ended(process, options.limit)
        print(f"killed: all had ended {time.monotonic() - started:.1f} s later, exit code {code}", flush=True)
        if isinstance(code, str):
            node.note("killed", code)
    for line in output.read_text().splitlines():
        if line.startswith("train_gpt: "):
            print(f"killed: {line}", flush=True)


# ---- what came of them -----------------------------------------------------------------------------------------------
def whole_lines(path: Path) -> list[dict]:
    """The log of a run, of which the last line may be cut."""
    texts = path.read_text().splitlines(keepends=True)
    return [json.loads(text) for text in texts if text.endswith("}\n")]


def row(lines: list[dict]) -> str:
    """A line of the table from the log of a run."""
    head = lines[0]
    end = next((line for line in lines if line["kind"] == "end"), {})
    starts = [line["step"] for line in lines if line["kind"] == "stage"]
    times = [[] for _ in starts]
    for line in lines:
        if line["kind"] == "step" and line["step"] > 1:  # the first one waits for data
            # A stage's last step is logged after the next has begun.
            stage = sum(start < line["step"] for start in starts) - 1
            times[stage].append(line["ms_per_step"])
    stages = " / ".join(f"{statistics.median(own):.1f}" if own else "-" for own in times)
    cells = (
        head["preset"]["name"], head["world"], head.get("nodes", 1), head["seed"], end.get("state", "no end"),
        end.get("loss", "-"), f"{end['ms'] / 1e3:.2f}" if "ms" in end else "-", stages, end.get("peak_memory_mib", "-"),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def table(logs: Path) -> str:
    titles = "preset", "ranks", "nodes", "seed", "state", "val loss", "s", "ms a step by stage", "MiB"
    paths = sorted(logs.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    logs_of_runs = filter(None, map(whole_lines, paths))  # a run that ended at once may leave an empty one
    return "\n".join(["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|", *map(row, logs_of_runs)])


def refuse(expected: str, found: str, fix: str) -> NoReturn:
    print(f"whole_node: expected {expected}, found {found}; fix: {fix}", file=sys.stderr)
    sys.exit(2)


def count_gpus() -> int:
    """As many as nvidia-smi lists, which a node without a driver lacks."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return 0 if listed.returncode else len(listed.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--webmix", type=Path, required=True, help="the data of the speedrun")
    parser.add_argument("--webtext", type=Path, help="the data of the sprint")
    parser.add_argument("--out", type=Path, required=True, help="for logs, traces' output, caches and the table")
    parser.add_argument("--preset", default="speedrun-webmix")
    parser.add_argument("--processes", type=int, help="by default as many as there are GPUs")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one command")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    options = parser.parse_args()
    for name in ("webmix", "webtext", "out"):
        path = getattr(options, name)
        setattr(options, name, path and path.resolve())
    if options.processes is None:
        gpus = count_gpus()
        if not gpus:
            refuse("GPUs", "none", "--processes says how many processes to start without them")
        options.processes = 1 << (min(gpus, 8).bit_length() - 1)  # the trainer takes 1, 2, 4 or 8

    if options.out.exists() and not options.out.is_dir():
        refuse("a folder", f"the file {options.out}", "another --out")
    options.out.mkdir(parents=True, exist_ok=True)
    node = Node(options)
    if node.logs.exists() and not options.dry_run:
        refuse("a new --out", f"logs in {node.logs}", "another folder")
    for task in options.only:
        try:
            globals()[task](node)
        except Exception as error:  # the other tasks and the table are worth more
            node.note(task, repr(error))
    if not options.dry_run:
        text = table(node.logs)
        (options.out / "table.md").write_text(text + "\n")
        print(text)
    if node.failed:
        print(f"failed: {', '.join(node.failed)}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    main()
