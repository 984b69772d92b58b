"""The scripts benchmarks/bench_*.py and whole_node.py: help is no error, and a mistake is a line before any work."""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import types

import pytest
import torch

import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))

USAGE = helpers.tg.EXIT_USAGE
SHORT = ["--preset", "smoke", "--stop-after=2"]


def exit_code(monkeypatch, name, *arguments):
    """Of the main function of a script that ends at once."""
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as error:
        script.main()
    return error.value.code


@pytest.mark.parametrize("name", ["bench_memory", "bench_ranks", "bench_trace", "bench_network", "share_gpu"])
def test_help_is_no_error(name, monkeypatch, capsys):
    assert exit_code(monkeypatch, name, "--help") == 0
    assert "python benchmarks" in capsys.readouterr().out or name == "bench_network"


@pytest.mark.parametrize(
    "name, arguments, line",
    [
        ("bench_memory", ["x", "8.6"], "gib: "),
        ("bench_memory", ["1", "x"], "capability: "),
        ("bench_ranks", ["3", *SHORT], "world: "),
        ("bench_ranks", ["8", "--preset", "smoke"], "expected --stop-after N, at most 59, found none; fix: "),
        ("bench_trace", ["x", *SHORT], "A:B: "),
        ("bench_trace", ["1:2", "--preset", "smoke"], "expected --stop-after N, at most 59, found none; fix: "),
        ("bench_trace", ["1:3", *SHORT], "expected 0 <= A <= B <= 1, found 1:3; fix: "),
        ("bench_trace", ["1:1", *SHORT, "--length", "auto"], "--length: expected a number, found auto; fix: "),
        ("share_gpu", ["3", *SHORT], "world: "),
        ("share_gpu", ["8", "--preset", "smoke"], "expected --stop-after N, at most 59, found none; fix: "),
        ("share_gpu", ["8", "--preset", "smoke", "--stop-after", "60"], "--stop-after N, at most 59, found 60; fix: "),
        ("share_gpu", ["8", "--preset", "smoke", "--length", "0.5", "--stop-after", "59"], ", found 59; fix: "),
        ("bench_network", ["x"], "unrecognized arguments: x"),
        ("bench_loss", ["--tokens", "7"], "--tokens: expected a multiple of 16, at least 16, found 7"),
        ("bench_loss", ["--ho"], "unrecognized arguments: --ho"),
        ("bench_loss", ["--tokens", "0"], "--tokens: expected a multiple of 16, at least 16, found 0"),
        ("bench_mlp", ["--tokens", "7"], "--tokens: expected a multiple of 16, at least 16, found 7"),
        ("bench_ngram", ["--pieces", "0"], "--pieces: "),
        ("bench_ngram", ["--pieces", "5"], "--pieces: "),
        ("bench_ngram", ["--rows", "0"], "--rows: "),
        ("repeats", ["0"], "step: expected at least 1, found 0"),
        ("repeats", ["--times", "0", "1"], "times: expected at least 1, found 0"),
        ("repeats", ["60", "--preset", "smoke"], "expected --stop-after N, at most 59, found 60; fix: "),
        ("repeats", ["2", "--preset", "smoke", "--check"], "--check: trains nothing; fix: leave it out"),
        ("machine_code", ["--capability", "x"], "--capability: expected two numbers as in 9.0, found x"),
        ("compile_ahead", ["--capability", "9"], "--capability: expected two numbers as in 9.0, found 9"),
    ],
)
def test_a_mistake_is_a_line(name, arguments, line, monkeypatch, capsys):
    if name == "machine_code":
        pytest.importorskip("triton")
    assert exit_code(monkeypatch, name, *arguments) == USAGE
    assert line in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("wrong", [0.0, 1e-9])
def test_what_a_repeated_step_leaves_is_compared_to_the_bit(wrong, capsys):
    """A step that adds 1 to what it finds: once set back, it finds the same. And one that adds more each time."""
    repeats = importlib.import_module("repeats")
    weights = torch.tensor([0.0, 5.0], dtype=torch.float64)
    moment = torch.tensor([3.0])
    steps = 0
    events = []

    def step():
        nonlocal steps
        weights.add_(1)
        weights[1] += wrong * steps
        steps += 1
        events.append("step")
        return weights[:1]

    trainer = types.SimpleNamespace(
        ranks=types.SimpleNamespace(rank=3, on_gpu=False, gather_objects=lambda _: events.append("meet")),
        optimizer=types.SimpleNamespace(gather=lambda: events.append("gather")), device=torch.device("cpu"),
        state=lambda: {"weights": weights, "moment": moment}, model=torch.nn.Linear(1, 1))
    before = helpers.tg.state_hash(trainer.state())
    assert repeats.repeat(trainer, step, times=2) == (wrong == 0)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"rank 3, before: {before}"
    after = helpers.tg.state_hash({"loss": torch.tensor([1.0], dtype=torch.float64), "moment": moment,
                                   "weights": torch.tensor([1.0, 6.0], dtype=torch.float64)})
    assert lines.pop(0) == f"rank 3, after: {after}"
    assert len(lines) == steps == 2 * repeats.REPETITIONS["alone"]
    assert lines[0] == "rank 3, alone: the same"
    assert lines[1].startswith("rank 3, alone: weights " if wrong else "rank 3, alone: the same")
    assert weights.tolist() == [0, 5]
    assert events == ["gather", "meet", *["meet", "step", "gather", "meet"] * steps, "meet"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_beside_a_step_works_before_it_and_ends_after_it(monkeypatch, fails):
    repeats = importlib.import_module("repeats")
    started = []

    def start(*arguments, **options):
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(repeats, "OTHER_PROCESS", "print('at work', flush=True)\nwhile True: pass  # on {index}")
    monkeypatch.setattr(repeats, "subprocess", types.SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        with repeats.load("process", torch.device("cuda", 0)) as queue:
            queue()
            assert started[0].poll() is None
            if fails:
                raise KeyError
    assert started[0].poll() is not None


def test_a_shorter_schedule_may_run_to_its_end():
    """whole_node.py traces the last stage of one. Its log looks like no record's."""
    shortened = importlib.import_module("shortened")
    steps = helpers.tg.scaled_preset(helpers.tg.PRESETS["smoke"], 0.5).steps
    training = ["--preset", "smoke", "--length", "0.5", "--stop-after", str(steps)]
    assert shortened.shortened_steps(argparse.ArgumentParser(), training) == steps


def test_a_hot_time_is_taken_after_a_second(monkeypatch):
    """Calls take 4 ms while the clock is high, and 5 ms after a second."""
    timing = importlib.import_module("timing")
    now_ms = 0.0

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = now_ms

        def elapsed_time(self, end):
            return end.at_ms - self.at_ms

    def run():
        nonlocal now_ms
        now_ms += 4.0 if now_ms < 1000 else 5.0

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    assert timing.hot_milliseconds(run, short_ms=4.0) == 5.0
    assert now_ms == 1000 + 5.0 * 125


def test_ranks_take_an_option_spelt_with_its_value(monkeypatch):
    monkeypatch.setattr(helpers.tg.Ranks, "start", helpers.tg.Ranks.start)  # the script replaces all three
    monkeypatch.setattr(helpers.tg.SparseTable, "all_gather", helpers.tg.SparseTable.all_gather)
    monkeypatch.setattr(helpers.tg, "symmetric_memory", helpers.tg.symmetric_memory)
    monkeypatch.setattr(helpers.tg, "main", lambda argv: argv)
    assert exit_code(monkeypatch, "bench_ranks", "8", *SHORT) == SHORT


def test_ranks_that_share_a_gpu_are_started_and_told(monkeypatch):
    """Each uses the first GPU, and has a name for NCCL that no other has."""
    script = importlib.import_module("share_gpu")
    started = []
    monkeypatch.setattr(script.run, "main", started.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["share_gpu.py", "4", *SHORT])
    script.main()
    assert started == [["--standalone", "--nproc_per_node=4", "share_gpu.py", "4", *SHORT]]

    monkeypatch.setattr(script.tg, "main", lambda argv: argv)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    names = set()
    for rank in range(4):
        environment = {"TORCHELASTIC_RUN_ID": "one", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        monkeypatch.setattr(script.os, "environ", environment)
        assert exit_code(monkeypatch, "share_gpu", "4", *SHORT) == SHORT
        assert environment["LOCAL_RANK"] == "0"
        names.add(environment["NCCL_HOSTID"])
    assert len(names) == 4


TWO_OF_EIGHT = """
import os, sys
from pathlib import Path
sys.path[:0] = {tests!r}, {benchmarks!r}
import helpers, bench_ranks, torch
empty = torch.empty
def poisoned(*shape, **options):
    tensor = empty(*shape, **options)
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor
torch.empty = poisoned
if {share}:
    helpers.FileMemory(Path({folder!r}), int(os.environ["RANK"])).install()
seen = []
fill = bench_ranks.fill
def filled(table, full):
    fill(table, full)
    if full.any():  # nothing was looked up before the first step
        seen.append(len({{tuple(part.tolist()) for part in full.view(8, -1)}}))
bench_ranks.fill = filled
try:
    bench_ranks.main()
finally:
    os.write(1, f"different lookups: {{min(seen, default=0)}}\\n".encode())  # at once, for both processes do
"""


def test_one_gpu_is_the_home_of_all_others(monkeypatch):
    script = importlib.import_module("bench_ranks")
    monkeypatch.setattr(script.dist, "get_rank", lambda: 1)
    memory = script.PairMemory(types.SimpleNamespace(barrier=None, get_buffer=lambda *where: where))
    assert [memory.get_buffer(rank, "place") for rank in range(4)] == [(rank, "place") for rank in (0, 1, 0, 0)]


REFUSED = "processes: expected one, or for more than two ranks two on GPUs that share memory, found 2; fix: "


@pytest.mark.parametrize("share, line", [(True, "different lookups: 8\n"), (False, REFUSED)])
def test_two_ranks_of_eight(tmp_path, share, line):
    script = tmp_path / "two.py"
    folders = {name: str(helpers.ROOT / name) for name in ("tests", "benchmarks")}
    script.write_text(TWO_OF_EIGHT.format(folder=str(tmp_path), share=share, **folders))
    data = str(helpers.ROOT / "data" / "sample")
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script,
         "8", *SHORT, "--data", data, "--log-dir", tmp_path / "logs"],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    assert line in run.stdout + run.stderr, run.stderr
    assert (run.returncode == 0) == share


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["--nonsense"], USAGE), (["--data", "/none"], USAGE)])
def test_no_profile_of_a_start_that_was_none(arguments, code):
    script = helpers.ROOT / "benchmarks/bench_startup.py"
    run = subprocess.run([sys.executable, script, "--preset", "smoke", *arguments], capture_output=True, text=True)
    assert run.returncode == code
    assert "milestone" not in run.stdout


def test_a_node_without_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    assert exit_code(monkeypatch, "whole_node", "--webmix", "x", "--out", str(tmp_path), "--dry-run") == USAGE
    assert "whole_node: expected GPUs, found none; fix: " in capsys.readouterr().err


def test_a_node_takes_no_file_for_a_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    options = "--webmix", "x", "--processes", "1", "--out", str(tmp_path / "file")
    assert exit_code(monkeypatch, "whole_node", *options) == USAGE
    assert "whole_node: expected a folder, found the file " in capsys.readouterr().err


def test_a_nodes_table_leaves_out_a_log_without_a_whole_line(tmp_path):
    whole_node = importlib.import_module("whole_node")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.jsonl").write_text('{"kind": "sta')
    start = {"kind": "start", "preset": {"name": "smoke"}, "world": 2, "seed": 7}
    (tmp_path / "begun.jsonl").write_text(json.dumps(start) + '\n{"kind": "st')
    *_, row = whole_node.table(tmp_path).splitlines()
    assert row.startswith("| smoke | 2 | 1 | 7 | no end |")
    assert len(whole_node.table(tmp_path).splitlines()) == 3


def node_of(tmp_path):
    whole_node = importlib.import_module("whole_node")
    options = {"out": tmp_path, "dry_run": False, "limit": 2, "processes": 1, "preset": "smoke", "webmix": tmp_path}
    return whole_node, whole_node.Node(types.SimpleNamespace(**options))


def test_a_node_says_that_nobody_was_killed_in_time(tmp_path, monkeypatch):
    """A training without a step, and one whose ranks outlive the one that was killed."""
    whole_node, node = node_of(tmp_path)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(whole_node.Node, "training", lambda *_: sleeper)
    whole_node.killed(node)
    assert node.failed == ["killed"]

    parent = "import subprocess, sys, time; print(' s left', flush=True); " \
             "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    whole_node, node = node_of(tmp_path)
    monkeypatch.setattr(whole_node.Node, "training", lambda *_: [sys.executable, "-c", parent])
    whole_node.killed(node)
    assert node.failed == ["killed"]


def test_a_node_leaves_the_traces_of_others_where_they_are(tmp_path, monkeypatch):
    whole_node, node = node_of(tmp_path)
    monkeypatch.setattr(whole_node, "ROOT", tmp_path)
    old = tmp_path / "trace-rank0.trace.json"
    old.touch()
    os.utime(old, (1, 1))
    monkeypatch.setattr(whole_node.Node, "run", lambda node, name, command: name[-1] == "0" or
                        (tmp_path / "trace-rank1.trace.json").touch())
    whole_node.trace(node)
    assert old.exists()
    assert {path.parent.name for path in tmp_path.glob("trace-*/*")} == {"trace-1", "trace-2"}
