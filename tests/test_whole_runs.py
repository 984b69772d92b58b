"""Whole runs through main(): the log, the clock, seeds, saved models, and what happens when something goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pickle
import pprint
import re
import signal
import sys
import textwrap
import threading
import types

import numpy as np
import pytest
import torch

import helpers
from helpers import CPU, MODEL, PRESET, ROOT, only, read_log, tg

sys.path += [str(helpers.ROOT / "records"), str(helpers.ROOT / "benchmarks")]
import bench_trace
import record


@pytest.fixture
def run(corpus, tiny, tmp_path, capsys):
    """run(options...) -> exit code, logs in the order of their runs, standard output, standard error."""
    def call(*options):
        folder = tmp_path / "logs"
        before = set(folder.glob("*"))
        code = tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(folder), *map(str, options)])
        logs = [read_log(path) for path in set(folder.glob("*.jsonl")) - before]
        out, err = capsys.readouterr()
        assert not helpers.own_threads()
        return types.SimpleNamespace(code=code, logs=sorted(logs, key=lambda log: log[0]["seed"]), out=out, err=err)
    return call


def at_step(monkeypatch, number, action):
    """Do something to the trainer right before step `number` of the timed loop."""
    step_of = tg.Trainer.training_step

    def step(trainer, step, *arguments):
        if trainer.clock.intervals and step == number:
            action(trainer)
        return step_of(trainer, step, *arguments)

    monkeypatch.setattr(tg.Trainer, "training_step", step)


# ---- the log ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_log_is_complete(run, corpus):
    result = run("--seed", 3)
    (log,) = result.logs
    assert result.code == 0 and result.err == ""
    kinds = [e["kind"] for e in log]
    assert kinds[:3] == ["head", "warm", "stage"] and kinds[-3:] == ["val", "clock", "end"] and set(kinds[3:-3]) == {"step", "stage"}
    head, warm, end = log[0], log[1], log[-1]
    assert head["seed"] == 3 and head["world"] == 1 and head["preset"]["name"] == "tiny"
    assert head["preset"] == json.loads(json.dumps(dataclasses.asdict(PRESET)))
    assert all(re.fullmatch(r"[0-9a-f]{64}", head[key]) for key in ("script", "data")) and head["script"] != head["data"]
    assert head["ops"] == tg.select_ops(CPU).names
    sparse = PRESET.model.table_rows * PRESET.model.width
    shapes = [p.shape for name, p in tg.GPT(PRESET.model, tg.select_ops(CPU), torch.device("meta")).named_parameters() if name != "ngram"]
    assert head["parameters"] == {"dense": sum(shape.numel() for shape in shapes), "sparse": sparse} and f" {sparse:,} in rows of" in result.out
    assert head["settings"].keys() == {"preset", "data", "log_dir", "seed"}
    assert head["shards"] == ["tiny_train_000000.bin", "tiny_train_000001.bin"]
    assert head["torch"] == torch.__version__ and {"python", "numpy", "platform", "device"} <= head.keys()
    assert head["consumed_tokens"] == 2 * 512 + 3 * 1024, "the stream begins with a BOS"
    assert warm["seconds"] > 0 and re.fullmatch(r"[0-9a-f]{16}", warm["state"]) and warm["variants"] == 3
    assert [(s["step"], s["batch_tokens"], s["long_window_tokens"]) for s in only(log, "stage")] == [(0, 512, 16), (2, 1024, 32), (4, 1024, 40)]
    steps = only(log, "step")
    assert [(s["step"], s["tokens"]) for s in steps] == [(1, 512), (2, 1024), (4, 3072), (5, 4096)]
    assert all(0 < s["train_loss"] < 6.5 * (1.75, 1.75, 1.5, 1.0)[i] and s["ms_per_step"] > 0 for i, s in enumerate(steps)), "summed over the targets"
    (val,) = only(log, "val")
    assert val["final"] and val["step"] == 5 and val["loss"] == end["loss"] == round(val["loss"], 6)
    assert end["state"] == "ok" and end["recompiled"] == 0 and end["ms"] > 0
    assert all(re.fullmatch(r"[0-9a-f]{16}", end[key]) for key in ("train_hash", "val_hash"))
    assert "val loss" in result.out and "step     5/5" in result.out


def test_hashes_follow_from_the_data(run, corpus):
    """What a log says of its tokens, computed anew: all slots of all steps, all of the validation, and the files as records name them."""
    (log,) = run("--seed", 3).logs
    head, end = log[0], log[-1]
    stream, shard = tg.TokenStream(corpus, 8000, helpers.VOCABULARY), corpus / "tiny_val_000000.bin"
    spans = [(int(start), stage.chunk_tokens + 1) for stage, starts in zip(PRESET.stages, helpers.chunk_starts(stream, PRESET.stages)) for start in starts.ravel()]
    assert end["train_hash"] == f"{sum(tg.chunk_digest(i, stream.read(*span)) for i, span in enumerate(spans)) % 2**64:016x}"
    tokens = shard.read_bytes()[tg.SHARD_HEADER_BYTES:][:2 * (PRESET.val_tokens + 1)]
    assert end["val_hash"] == hashlib.sha256(tokens).hexdigest()[:16]
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (*(corpus / name for name in head["shards"]), shard)}
    assert head["data"] == record.manifest_hash(files, list(files))


def test_the_chain_detects_an_edit(run, tmp_path):
    run("--seed", 3)
    path = next((tmp_path / "logs").glob("*.jsonl"))
    text = path.read_text()
    read_log(path)
    for edited in (text.replace('"tokens": 1024', '"tokens": 1025'), "".join(text.splitlines(True)[:3] + text.splitlines(True)[4:])):
        assert edited != text
        path.write_text(edited)
        with pytest.raises(AssertionError, match="chain breaks"):
            read_log(path)


def test_clock_intervals_sum_to_the_time(run):
    (log,) = run("--seed", 3, "--val-every", 2).logs
    intervals = only(log, "clock")
    assert [(i["on"], i["reason"]) for i in intervals] == [(True, "training"), (False, "validation")] * 2 + [(True, "training")]
    assert all(a["end_ms"] == b["start_ms"] for a, b in zip(intervals, intervals[1:])), "no gaps"
    assert sum(i["end_ms"] - i["start_ms"] for i in intervals if i["on"]) == pytest.approx(log[-1]["ms"], abs=0.06)
    assert [(v["step"], v["final"]) for v in only(log, "val")] == [(2, False), (4, False), (5, True)]
    on_the_clock = sum(s["ms_per_step"] * n for s, n in zip(only(log, "step"), (1, 1, 2, 1)))
    assert on_the_clock <= log[-1]["ms"] + 0.1, "the steps' times leave the pauses out"


def test_windows_of_validations(run, monkeypatch):
    """In between those of the moment, at the end the preset's, with the frequencies and the scale of the last stage."""
    seen, validate = [], tg.Trainer.validate
    monkeypatch.setattr(tg.Trainer, "validate", lambda trainer, geometry: (seen.append((trainer, geometry)), validate(trainer, geometry))[1])
    assert run("--seed", 3, "--val-every", 2).code == 0
    assert [geometry.windows for _, geometry in seen] == [{"short": 8, "long": 16}, {"short": 12, "long": 32}, {"short": 16, "long": 48}]
    trainer, final = seen[-1]
    last = trainer.geometries[-1]
    assert last.windows == {"short": 16, "long": 40} and final.scale == last.scale and final.cos.equal(last.cos) and final.sin.equal(last.sin)
    helpers.randomise(trainer.model)
    assert abs(validate(trainer, final) - validate(trainer, last)) > 1e-5, "it makes a difference"


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_step_takes_what_it_takes_wherever_validations_fall(run, monkeypatch, every):
    """Steps of one second, validations of seven, by a hand-turned clock."""
    now, step_of, validate = [100.0], tg.Trainer.training_step, tg.Trainer.validate

    def later(seconds, function):
        return lambda *arguments: (now.__setitem__(0, now[0] + seconds), function(*arguments))[1]

    monkeypatch.setattr(tg.Clock, "since_start", lambda clock: now[0])
    monkeypatch.setattr(tg.Trainer, "training_step", later(1.0, step_of))
    monkeypatch.setattr(tg.Trainer, "validate", later(7.0, validate))
    (log,) = run("--seed", 3, "--val-every", every).logs
    assert [s["ms_per_step"] for s in only(log, "step")] == pytest.approx([1000.0] * len(only(log, "step")))
    assert only(log, "step")[-1]["step"] == PRESET.steps and log[-1]["ms"] == pytest.approx(1000 * PRESET.steps)


def test_the_clock_encloses_all_steps_and_the_last_exchange(corpus, tiny, tmp_path, monkeypatch):
    seen, switch, step_of, gather = [], tg.Clock.switch, tg.Trainer.training_step, tg.Optimizer.gather
    monkeypatch.setattr(tg.Clock, "switch", lambda clock, reason: (switch(clock, reason), seen.append(reason)))
    monkeypatch.setattr(tg.Trainer, "training_step", lambda trainer, *a: (trainer.clock.intervals and seen.append("step"), step_of(trainer, *a))[1])
    monkeypatch.setattr(tg.Optimizer, "gather", lambda optimizer: (seen.append("gather"), gather(optimizer)))
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    assert seen == ["training", *["step"] * PRESET.steps, "gather", None]


@pytest.mark.fast
def test_the_clock(monkeypatch):
    """Against a hand-turned time: pauses do not count, the running interval does."""
    now = [100.0]
    monkeypatch.setattr(tg.time, "perf_counter", lambda: now[0])
    clock = tg.Clock(CPU)
    for reason, seconds in (("training", 2.0), ("validation", 5.0), ("training", 1.5)):
        clock.switch(reason)
        now[0] += seconds
    assert clock.milliseconds() == pytest.approx(3500)
    clock.switch(None)
    now[0] += 10
    assert clock.milliseconds() == pytest.approx(3500)
    assert [i["on"] for i in clock.intervals] == [True, False, True] and all("end_ms" in i for i in clock.intervals)


def test_nothing_is_read_or_written_on_the_clock(run, monkeypatch):
    """No validation, no warm-up and no log file inside: the main thread opens nothing between start and stop."""
    opened, live = [], [True]
    switch, inside = tg.Clock.switch, []
    monkeypatch.setattr(tg.Clock, "switch", lambda clock, reason: (inside.clear(), switch(clock, reason), reason == "training" and inside.append(1)))
    main = threading.get_ident()
    sys.addaudithook(lambda event, arguments: event == "open" and live and inside and threading.get_ident() == main and opened.append(arguments[0]))
    assert run("--seed", 3).code == 0
    live.clear()
    assert opened == []


def test_an_unwritable_log_folder(run, corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code = tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path / "file" / "logs")])
    out, err = capsys.readouterr()
    assert code == 0 and "val loss" in out
    assert err.count("\n") == 1 and re.match(r"run log: expected to write .*, found '.*Not a directory.*'; fix: .* UNLOGGED", err)


@pytest.mark.fast
def test_a_disk_that_fills_up(tmp_path, capsys):
    """The file fails in the middle of a run: one message, and the run's later lines go nowhere without harm."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    log = tg.RunLog(tmp_path / "run.jsonl")
    log.file.close()
    log.file = open("/dev/full", "w")
    for number in range(3):
        log.line("step", step=number)
    log.say("still here")
    log.close()
    out, err = capsys.readouterr()
    assert out == "still here\n" and err.count("No space left") == 1 and err.count("\n") == 1


@pytest.mark.fast
def test_a_log_is_never_overwritten(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text("a result\n")
    log = tg.RunLog(path)
    log.line("head")
    log.close()
    assert path.read_text() == "a result\n" and "UNLOGGED" in capsys.readouterr().err


# ---- seeds and repeated runs -----------------------------------------------------------------------------------------
def essence(log):
    """What a seed fixes: all of a log but times, memory and where its files lie."""
    return [{k: v for k, v in e.items() if k not in ("ms", "ms_per_step", "seconds", "settings", "chain", "start_ms", "end_ms", "graphs", "started")}
            for e in log if e["kind"] != "warm"]


def test_a_seed_fixes_the_run(run):
    (first,), (again,), (other,) = (run("--seed", seed).logs for seed in (3, 3, 4))
    assert essence(first) == essence(again)
    assert other[-1]["loss"] != first[-1]["loss"] and other[-1]["train_hash"] == first[-1]["train_hash"], "a seed never changes the data"
    assert only(other, "warm")[0]["state"] != only(first, "warm")[0]["state"]


def test_a_seed_is_drawn_and_logged(run):
    logs = [run().logs[0] for _ in range(2)]
    assert logs[0][0]["seed"] != logs[1][0]["seed"] and "seed" not in logs[0][0]["settings"]


def test_a_training_averages(corpus, tiny, tmp_path, monkeypatch):
    """The warm-up once, then from step 2 of 5 on every other; only the last step of a whole schedule moves the weights."""
    calls, average = [], tg.Optimizer.average
    monkeypatch.setattr(tg.Optimizer, "average", lambda self, *shares: (calls.append(shares), average(self, *shares)))
    begun = [(1.0, 0.5), (1.0, 0.0)]
    for options, expected in (((), [*begun, (pytest.approx(0.3), 0.65)]), (("--stop-after", "4"), begun)):
        calls.clear()
        assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path), *options]) == 0
        assert calls == expected


@pytest.mark.fast
def test_warm_up_changes_nothing(corpus, tiny, monkeypatch):
    """It really trains, on none of the training data, and the state after it is the state before it, generator included."""
    trainer = helpers.make_trainer(corpus)
    monkeypatch.setattr(tg.TokenStream, "read", lambda *_: pytest.fail("warm-up read training data"))
    before, generator = trainer.initialise(7), torch.get_rng_state()
    weights = {name: t.clone() for name, t in trainer.optimizer.state().items()}
    variants = trainer.warm_up()
    assert variants == 3, "one a stage"
    assert tg.state_hash(trainer.optimizer.state()) != before
    assert trainer.initialise(7) == before and torch.get_rng_state().equal(generator)
    assert all(t.equal(weights[name]) for name, t in trainer.optimizer.state().items())


@pytest.mark.fast
def test_warm_up_that_leaves_a_trace_ends_the_run(run, monkeypatch):
    def draw_only(trainer, seed):  # the optimizer's state stays as the warm-up has left it
        trainer.model.reset(seed)
        return tg.state_hash(trainer.optimizer.state())

    monkeypatch.setattr(tg.Trainer, "initialise", draw_only)
    with pytest.raises(AssertionError, match="warm-up changed the training state"):
        run("--seed", 3)


@pytest.mark.fast
def test_compiling_in_the_timed_run_is_no_record(run, monkeypatch):
    counts = iter(range(10, 100))
    monkeypatch.setattr(tg, "compiled_graphs", lambda: next(counts))
    end = run("--seed", 3).logs[0][-1]
    assert end["recompiled"] > 0 and end["state"] == "no record: compiled in the timed run"


# ---- options ---------------------------------------------------------------------------------------------------------
def test_a_shortened_run_is_no_record(run):
    result = run("--seed", 3, "--stop-after", 3)
    (log,) = result.logs
    assert re.search(r"step +3/3 .* 0\.0 s left\n", result.out)
    assert log[-1]["state"].startswith("no record") and only(log, "step")[-1]["step"] == 3
    assert only(log, "val")[0]["step"] == 3 and log[0]["settings"]["stop_after"] == "3"


def test_stopping_after_more_than_everything(run):
    (log,) = run("--seed", 3, "--stop-after", 50).logs
    assert only(log, "val")[0]["step"] == 5


def test_a_trace_of_some_steps(corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "timed_loop", tg.timed_loop)  # the script replaces it, and the next one
    monkeypatch.setattr(tg.AdamTable, "reduce_", tg.AdamTable.reduce_)
    options = ["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path), "--seed", "3", "--stop-after", "9"]
    monkeypatch.setattr(sys, "argv", ["bench_trace.py", "1:2", *options])
    assert bench_trace.main() == 0
    trace = json.loads((tmp_path / "trace-rank0.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("reduce lm_head") == 2 and any("Backward" in str(name) for name in names)
    assert "Self CPU" in capsys.readouterr().out
    for span in ("2:1", "3:5", "x"):  # the preset has 5 steps
        monkeypatch.setattr(sys, "argv", ["bench_trace.py", span, *options])
        with pytest.raises(SystemExit):
            bench_trace.main()


def test_a_longer_and_a_shorter_schedule(run):
    """--length 2 and 0.5 of 2, 2 and 1 steps; the log has the option and the scaled steps, and the run may be a record."""
    for length, steps in (("2", [4, 4, 2]), ("0.5", [1, 1, 1])):
        (log,) = run("--seed", 3, "--length", length).logs
        head, end = log[0], log[-1]
        assert float(head["settings"]["length"]) == float(length) and [stage["steps"] for stage in head["preset"]["stages"]] == steps
        assert only(log, "step")[-1]["step"] == sum(steps) and end["state"] == "ok"
        assert head["consumed_tokens"] == 512 * steps[0] + 1024 * (steps[1] + steps[2])
    assert "length" not in run("--seed", 3, "--length", 1).logs[0][0]["settings"]


def test_a_schedule_that_is_too_long_for_the_corpus(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tg, "memory_plan", lambda *_: pytest.fail("the tokens come first"))
    result = run("--seed", 3, "--length", 10)
    assert result.code == 2 and not (tmp_path / "logs").exists()
    assert re.fullmatch(r"train_gpt: training tokens: expected 40,961 for the schedule, found 15,\d{3} in 3 shards; fix: .*\n", result.err)


@pytest.mark.parametrize("options", [["--preset", "huge"], ["--val-every", "0"], ["--stop-after", "-1"], ["--sed", "1"],
                                     ["--length", "0"], ["--length", "101"], ["--length", "nan"], ["--length", "x"],
                                     ["--stall-limit", "inf"], ["--eval", "a", "--check"], ["--export", "a", "b", "--eval", "c"]])
def test_wrong_options_exit_with_2(tiny, capsys, options):
    with pytest.raises(SystemExit) as caught:
        tg.main(options)
    assert caught.value.code == 2 and "error" in capsys.readouterr().err


# ---- when something goes wrong ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", ["3", "5", "16"])
@pytest.mark.fast
def test_impossible_world_sizes(corpus, tiny, monkeypatch, capsys, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    assert tg.main(["--preset", "tiny", "--data", str(corpus)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"train_gpt: number of processes: expected 1, 2, 4 or 8, found {world}; fix: .*\n", said)


@pytest.mark.fast
def test_ranks_that_are_no_numbers(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert tg.main([]) == 2 and "WORLD_SIZE: expected a number, as torchrun sets it, found x; fix: " in capsys.readouterr().err


def test_a_rank_beyond_the_world_and_a_port_that_is_none(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "5")
    assert tg.main([]) == 2 and "RANK: expected below WORLD_SIZE, 1, found 5; fix: unset both" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "x")):
        monkeypatch.setenv(name, value)
    assert tg.main([]) == 2 and "MASTER_PORT: expected a number, as torchrun sets it, found x; fix: " in capsys.readouterr().err


def test_variables_left_over_from_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert tg.main([]) == 2 and "MASTER_ADDR: expected an address, as WORLD_SIZE is 2, found none; fix: unset RANK" in capsys.readouterr().err


def test_ctrl_c(run, monkeypatch):
    at_step(monkeypatch, 3, lambda trainer: os.kill(os.getpid(), signal.SIGINT))
    result = run("--seed", 3)
    assert result.code == 130 and "interrupted" in result.err
    (log,) = result.logs
    assert log[-1]["kind"] == "end" and log[-1]["state"] == "interrupted" and not only(log, "val")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.fast
def test_numerical_failure(run, monkeypatch, tmp_path, value):
    """Seen at the next flush, two logged steps later at most; the log says at which step, and is kept."""
    at_step(monkeypatch, 2, lambda trainer: trainer.model.embedding.data.fill_(value))
    result = run("--seed", 3, "--save", tmp_path / "never" / "model.pt")
    assert result.code == 3 and not (tmp_path / "never").exists()
    assert re.fullmatch(r"train_gpt: training loss: expected a finite number, found nan at step 4; fix: .*\n", result.err)
    (log,) = result.logs
    assert log[-1]["kind"] == "end" and log[-1]["state"].startswith("failed") and "nan at step 4" in log[-1]["state"]
    assert not only(log, "val")


def test_a_model_ruined_by_the_last_step_fails_too(run, monkeypatch):
    """The last training loss is computed before the last update: only the validation sees what that update did."""
    step_of = tg.Optimizer.step
    steps = []

    def last_step_ruins(optimizer, rates):
        step_of(optimizer, rates)
        steps.append(rates)
        if len(steps) == 3 + PRESET.steps:  # after the warm-up's
            optimizer.dense[-1].weights.fill_(math.nan)

    monkeypatch.setattr(tg.Optimizer, "step", last_step_ruins)
    result = run("--seed", 3)
    assert result.code == 3 and result.logs[0][-1]["state"].startswith("failed")


def test_a_broken_device_does_not_end_the_watchdog(monkeypatch):
    def query():
        raise RuntimeError("an illegal memory access was encountered")

    ended = threading.Event()
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.2, tg.RunLog(None))
    watchdog.events.append(types.SimpleNamespace(query=query))
    assert ended.wait(20)
    watchdog.done.set()


def test_python_that_goes_on_is_progress_in_the_warm_up(monkeypatch, capsys):
    """Many looks of the watchdog at a thread that works, far more than its limit; then the thread stands still."""
    ended, looks = threading.Event(), []
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.4, tg.RunLog(None))
    done = watchdog.done
    watchdog.done = types.SimpleNamespace(wait=lambda seconds: looks.append(seconds) or done.wait(seconds))
    watchdog.heartbeat("warm-up", 1.5)
    while sum(looks) < 2 and not ended.is_set():
        pprint.pformat([{"a": [index] * 9, "b": {"c": str(index)}} for index in range(30)])
    assert not ended.is_set()
    assert ended.wait(20)
    done.set()
    assert "expected progress within 0.6 s, found none since warm-up" in capsys.readouterr().err


def test_a_crash_is_logged(run, monkeypatch, tmp_path):
    def crash(trainer):
        raise RuntimeError("a bug")

    at_step(monkeypatch, 1, crash)
    with pytest.raises(RuntimeError, match="a bug"):
        run("--seed", 3)
    (log,) = [read_log(path) for path in (tmp_path / "logs").glob("*.jsonl")]
    assert log[-1]["state"] == "failed: a bug"


def test_the_log_outlives_who_watches(tmp_path, monkeypatch):
    """As `train_gpt.py | head` or a full disk under its output: no event is lost."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        log = tg.RunLog(tmp_path / "run.jsonl")
        log.say("to nobody")
        log.line("end", state="ok")
        log.say("again")
        log.close()
        monkeypatch.undo()
    assert read_log(tmp_path / "run.jsonl")[-1]["state"] == "ok" and not helpers.own_threads()


# ---- saved models ----------------------------------------------------------------------------------------------------
class Stub:
    """A tokenizer that needs no files: bytes are tokens. It writes a token as its number."""

    def encode_ordinary(self, text):
        return list(text.encode())

    def decode_single_token_bytes(self, token):
        assert isinstance(token, int) and 0 <= token < helpers.VOCABULARY
        return f" {token}".encode()


@pytest.fixture(scope="module")
def kept():
    """What one training has left for all tests of saved models."""
    return {}


@pytest.fixture
def saved(kept, run, tmp_path):
    """A saved model, which a test may change, and the log of its training."""
    path = tmp_path / "model.pt"
    if not kept:
        result = run("--seed", 3, "--save", path)
        assert result.code == 0
        kept |= {"model": path.read_bytes(), "log": result.logs[0]}
    path.write_bytes(kept["model"])
    return path, kept["log"]


@pytest.mark.fast
def test_a_saved_model_evaluates_to_its_loss(saved, corpus, capsys):
    path, log = saved
    assert tg.main(["--eval", str(path), "--data", str(corpus)]) == 0
    assert float(re.fullmatch(r"val loss (\d\.\d{6})\n", capsys.readouterr().out)[1]) == pytest.approx(log[-1]["loss"], rel=1e-5)
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == ["model.pt"], "nothing is left beside it"
    model, content = tg.load_model(path, CPU)
    assert content["provenance"]["seed"] == 3 and content["provenance"]["val_loss"] == pytest.approx(log[-1]["loss"], abs=1e-6)
    assert model.config == MODEL and not any(p.requires_grad for p in model.parameters())


def test_sampling(saved, monkeypatch, capsys):
    path, _ = saved
    monkeypatch.setitem(sys.modules, "tiktoken", types.SimpleNamespace(get_encoding=lambda name: Stub()))
    outputs = []
    for _ in range(2):
        assert tg.main(["--sample", str(path), "Once"]) == 0
        outputs.append(capsys.readouterr())
    out = outputs[0].out
    assert out == outputs[1].out and re.fullmatch(r"Once( \d+){1,256}\n", out)
    assert re.fullmatch(rf"{len(out.split()) - 1} tokens, \d+\.\d a second\n", outputs[0].err)
    drawn, shown = iter([5, 6, helpers.BOS, 7]), []

    def draw(*_, **__):
        shown.append(capsys.readouterr().out)
        return torch.tensor([next(drawn)])

    monkeypatch.setattr(torch, "multinomial", draw)
    assert tg.main(["--sample", str(path), "Once"]) == 0
    assert [*shown, capsys.readouterr().out] == ["Once", " 5", " 6", f" {helpers.BOS}\n"], "each as it is drawn, and a sample ends with its document"


def unpacked(rows, scales):
    """What stored bytes mean: the numbers of a row's first half, then of its second, times the scale of their group."""
    numbers = np.concatenate([rows.numpy() % 16, rows.numpy() // 16], axis=1).astype("float32") - 8
    return torch.from_numpy(numbers) * scales.float().repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


@pytest.mark.fast
def test_rows_that_were_not_trained_are_not_saved(saved):
    """The others are, in the order of their ids: all that the optimizer has ever updated."""
    path, _ = saved
    header, data = helpers.read_safetensors(path)
    ids, rows, scales = (header[f"ngram.{name}"]["shape"] for name in ("ids", "rows", "scales"))
    assert ids == rows[:1] == scales[:1] and (rows[1], scales[1]) == (MODEL.width / 4, 1) and 0 < rows[0] < 0.9 * 2 * MODEL.table_rows
    model, _, ids, rows, scales = tg.read_model_file(path)
    assert (ids.diff() > 0).all() and unpacked(rows, scales).any(1).all() and model.ngram.is_meta
    assert len(data) == sum(p.nbytes for p in [*model.parameters(), ids, rows, scales] if p is not model.ngram)


def test_stored_rows_are_those_of_the_table(saved):
    """Of any ids, those below, between and above the stored ones included."""
    _, _, ids, rows, scales = tg.read_model_file(saved[0])
    ids, rows, scales = ids[5:-5], rows[5:-5], scales[5:-5]
    wanted = torch.arange(2 * MODEL.table_rows, dtype=torch.int32).flip(0).view(-1, 4)
    table = torch.zeros(2 * MODEL.table_rows, MODEL.width // 2)
    table[ids.long()] = unpacked(rows, scales)
    found = tg.sum_stored_rows(ids, rows, scales, wanted, torch.empty(0, device="meta"))
    assert found.dtype == torch.float32 and found.allclose(torch.nn.functional.embedding(wanted.long(), table).sum(1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_rows_are_rounded_to_four_bits(corpus, tiny, tmp_path, dtype):
    """Each number to the nearest of 15: within half a seventh of the largest of its 16; the rows of many parts are in their places."""
    trainer = helpers.make_trainer(corpus, dataclasses.replace(PRESET, model=dataclasses.replace(MODEL, dtype=dtype, ngram_rows=2**16)))
    table = trainer.model.ngram.detach()
    table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 1, len(table))[:, None])
    table[::3] = 0
    table[7, 3] = -100
    tg.save_model(tmp_path / "model", trainer, 1.0, seed=0)
    _, _, ids, rows, scales = tg.read_model_file(tmp_path / "model")
    assert (rows.dtype, scales.dtype) == (torch.uint8, torch.bfloat16) and ids.tolist() == [i for i in range(len(table)) if i % 3]
    want = table[ids.long()].float().unflatten(1, (-1, 16))
    largest = want.abs().amax(2, keepdim=True)
    found = unpacked(rows, scales).view_as(want)
    assert found.isfinite().all() and ((found - want).abs() <= 1.02 * largest / 14 + 7 * largest * 2**-9).all()
    assert len(found.unique()) > 1000 and set(rows.flatten().tolist()) <= {low + 16 * high for low in range(1, 16) for high in range(1, 16)}


@pytest.mark.fast
def test_a_row_has_a_scale_for_each_32_numbers():
    """A group of zeros among others stays so; the largest of a group is itself but for the scale's rounding to bfloat16."""
    rows = torch.randn(9, 192, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-30, 1e-4, 1e-2, 1.0, 1e2, 1e4]).repeat_interleave(32)
    rows[3, 64:96] = 0
    packed, scales = tg.quantize_rows(rows)
    assert packed.shape == (9, 96) and scales.shape == (9, 6)
    groups, found = rows.view(9, 6, 32), unpacked(packed, scales).view(9, 6, 32)
    assert (found[3, 2] == 0).all() and (found[:, 0] == 0).all(), "numbers too small for a scale are zero"
    largest = groups[:, 1:].abs().amax(2)
    assert found[:, 1:].abs().amax(2).allclose(largest, rtol=2**-8)
    assert ((found[:, 1:] - groups[:, 1:]).abs() <= 0.52 * largest[..., None] / 7 + 2**-8 * largest[..., None]).all()


def test_exported_weights(saved, tmp_path):
    """Every dense tensor to the bit, of the table only the suffix matches; the file is a safetensors file."""
    path, _ = saved
    assert tg.main(["--export", str(path), str(tmp_path / "out" / "dense.safetensors")]) == 0
    before = path.read_bytes()
    assert tg.main(["--export", str(path), str(path)]) == 2 and path.read_bytes() == before, "never onto itself"
    header, data = helpers.read_safetensors(tmp_path / "out" / "dense.safetensors")
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    model, _, ids, rows, scales = tg.read_model_file(path)
    suffixes = ids >= 2 * MODEL.ngram_rows
    expected = dict(model.state_dict()) | {"ngram.ids": ids[suffixes], "ngram.rows": rows[suffixes], "ngram.scales": scales[suffixes]}
    assert header.keys() == expected.keys() - {"ngram"} and suffixes.any() and not suffixes.all()
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        tensor = torch.frombuffer(bytearray(data[start:stop]), dtype={"F32": torch.float32, "I32": torch.int32, "U8": torch.uint8, "BF16": torch.bfloat16}[entry["dtype"]])
        assert start == end and tensor.view(entry["shape"]).float().equal(expected[name].float()), name
        end = stop
    assert end == len(data)


def test_the_safetensors_library_reads_it(saved, tmp_path, monkeypatch):
    """With the example of docs/options.md, to the letter."""
    pytest.importorskip("safetensors")
    tg.export_model(saved[0], tmp_path / "dense.safetensors")
    monkeypatch.chdir(tmp_path)
    example = re.search(r"((?:    .*\n)*    .*safe_open.*\n(?:    .*\n)*)", (ROOT / "docs/options.md").read_text())[1]
    found = {}
    exec(textwrap.dedent(example), found)
    model, _, ids, rows, scales = tg.read_model_file(saved[0])
    first = MODEL.ngram_pieces * MODEL.ngram_rows
    assert found["head"].equal(model.lm_head) and found["content"]["model"]["width"] == MODEL.width
    assert found["ids"].equal(ids[ids >= first] - first) and found["ids"].min() >= 0 and found["rows"].equal(unpacked(rows, scales)[ids >= first])


def test_a_mapped_model_keeps_its_dtype_on_disk_only(corpus, tiny, tmp_path):
    """A bfloat16 model computes in float32 on a CPU, its rows too; its file stays as it is."""
    trainer = helpers.make_trainer(corpus, dataclasses.replace(PRESET, model=dataclasses.replace(MODEL, dtype="bfloat16")))
    helpers.randomise(trainer.model, size=0.1)
    tg.save_model(tmp_path / "model", trainer, 1.0, seed=0)
    header, _ = helpers.read_safetensors(tmp_path / "model")
    assert [header[name]["dtype"] for name in ("lm_head", "ngram.rows", "final_gate")] == ["BF16", "U8", "F32"]
    model, content = tg.load_model(tmp_path / "model", CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.lm_head.equal(trainer.model.lm_head.float())
    wide = tg.GPT(MODEL, tg.reference_ops(), CPU)
    wide.load_state_dict(trainer.model.state_dict())
    _, _, ids, rows, scales = tg.read_model_file(tmp_path / "model")
    wide.ngram.detach()[ids.long()] = unpacked(rows, scales)
    piece = torch.randint(508, (50,)).numpy().astype("uint16")
    batch, geometry = tg.pack({0: [piece]}, MODEL, pin=False).to(CPU), tg.saved_geometry(content, model, 50)
    assert float(model.evaluate(batch, geometry)) == pytest.approx(float(wide.evaluate(batch, geometry)), rel=1e-6)


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def edit(change, signed=True):
    return lambda path: helpers.edit_model(path, change, signed)


def cut(stop):
    return lambda path: path.write_bytes(path.read_bytes()[:stop])


def foreign(path):
    """Another program's safetensors file."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_whole_numbers_in_the_softcap(saved):
    """As a fork may write them; JSON keeps them whole."""
    path, _ = saved
    helpers.edit_model(path, lambda header, content: content["model"].update(softcap=[30, 5, 7.5]))
    assert tg.load_model(path, CPU)[0].config.softcap == (30, 5, 7.5)


@pytest.mark.parametrize("name", tg.PRESETS)
def test_saving_asks_for_the_room_that_it_takes(monkeypatch, tmp_path, name):
    monkeypatch.setattr(tg, "check_folder", lambda folder, needed_mb: needed_mb)
    model = tg.PRESETS[name].model
    weights = tg.GPT(model, tg.select_ops(CPU), torch.device("meta"))
    size = (sum(p.nbytes for p in weights.parameters() if p is not weights.ngram) + weights.ngram.numel() * 9 / 16 + 4 * len(weights.ngram)) / 1e6
    assert size < tg.check_model_file(tmp_path / "m.pt", model) < 1.1 * size + 1100


BAD_MODELS = {  # the fault, and what the message tells of it
    "code": (lambda path: path.write_bytes(pickle.dumps({"model": Code()})), "no whole header"),
    "code in a torch file": (lambda path: torch.save({"model": Code()}, path), "no whole header"),
    "of an older version": (lambda path: torch.save({"weights": {"lm_head": torch.zeros(3)}, "model": "{}"}, path), "an older version"),
    "of the version before": (edit(lambda header, content: header["__metadata__"].update(format="train_gpt model 2")), "format train_gpt model 2"),
    "of a newer version": (edit(lambda header, content: header["__metadata__"].update(format="train_gpt model 4")), "format train_gpt model 4"),
    "a dense part": (lambda path: (tg.export_model(path, path.with_name("part")), path.with_name("part").replace(path)), "format dense part of train_gpt model 3"),
    "cut in its header": (cut(1000), "no whole header"),
    "cut in its tensors": (cut(-1000), "bytes: cut"),
    "cut in its length": (cut(5), "found"),
    "empty": (cut(0), "cannot mmap an empty file"),
    "missing": (lambda path: path.unlink(), "No such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "text": (lambda path: path.write_bytes((5).to_bytes(8, "little") + b"hello" * 9), "JSONDecodeError"),
    "a list": (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "TypeError"),
    "another program's": (foreign, "KeyError('__metadata__')"),
    "missing a weight": (edit(lambda header, content: header.pop("lm_head")), "state_dict"),
    "of another shape": (edit(lambda header, content: header["lm_head"]["shape"].reverse()), "state_dict"),
    "claiming another size": (edit(lambda header, content: header["lm_head"].update(shape=[512, 10**12])), "RuntimeError(\"shape"),
    "of another dtype": (edit(lambda header, content: header["lm_head"].update(dtype="Q4")), "KeyError('Q4')"),
    "without ids": (edit(lambda header, content: header.pop("ngram.ids")), "KeyError('ngram.ids')"),
    "with other n-grams": (edit(lambda header, content: content.update(lookups=content["lookups"].replace("17351", "17353"))), "rows of other n-grams"),
    "without a setting": (edit(lambda header, content: content["model"].pop("pointer_scale")), "settings missing"),
    "without a setting of a layer": (edit(lambda header, content: content["model"]["layers"][3].pop("skip_from")), "settings missing"),
    "with a setting too many": (edit(lambda header, content: content["model"].update(depth=3)), "TypeError"),
    **{f"changed: {path} = {value}": (edit(lambda header, content, path=path, value=value: content[path[0]].update({path[1]: value}), signed=False), "a header that was changed")
       for path, value in ((("model", "pointer_window_tokens"), 3), (("model", "value_embeddings"), 10**9), (("model", "ngram_rows"), 2), (("attention", "scale"), math.nan),
                           (("attention", "windows"), (0, 8)), (("validation", "window"), -4), (("provenance", "val_loss"), 3.0))},
}


@pytest.mark.parametrize("name", BAD_MODELS)
@pytest.mark.fast
def test_bad_model_files(saved, corpus, capsys, monkeypatch, tmp_path, name):
    path, _ = saved
    monkeypatch.chdir(tmp_path)
    fault, told = BAD_MODELS[name]
    fault(path)
    assert tg.main(["--eval", str(path), "--data", str(corpus)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.match(r"train_gpt: model file .*: expected .*, found .*; fix: ", said) and told in said
    assert not (tmp_path / "executed").exists()


@pytest.mark.fast
def test_wrong_weights_are_named(saved, corpus, capsys):
    path, _ = saved
    helpers.edit_model(path, lambda header, content: header.pop("lm_head"))
    assert tg.main(["--eval", str(path), "--data", str(corpus)]) == 2 and 'Missing key(s) in state_dict: "lm_head"' in capsys.readouterr().err


def test_sampling_without_tiktoken(saved, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert tg.main(["--sample", str(saved[0]), "Once"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"train_gpt: tiktoken: expected the package and its gpt2 vocabulary, found ModuleNotFoundError; fix: pip install .*\n", said)


@pytest.mark.parametrize("option, value", [("--seed", "9" * 20), ("--seed", "-1"), ("--stall-limit", "0"), ("--stall-limit", "nan"), ("--val-every", "0")])
@pytest.mark.fast
def test_numbers_out_of_range_are_usage_errors(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        tg.main([option, value])
    assert caught.value.code == 2 and re.search(rf"argument {option}: expected a number from [\d.]+ to (\d+|inf), found {value}\n", capsys.readouterr().err)


def test_saving_failed_after_the_run(run, tmp_path, monkeypatch):
    """The run itself has ended well, and its log says so, once."""
    monkeypatch.setattr(tg.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    result = run("--seed", 3, "--save", tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert result.code == 2 and result.err.startswith("train_gpt: saving ") and [e["state"] for e in result.logs[0] if e["kind"] == "end"] == ["ok"]


def test_saving_onto_a_folder(run, tmp_path):
    result = run("--seed", 3, "--save", tmp_path)
    assert result.code == 2 and not result.logs
    assert result.err == f"train_gpt: saving {tmp_path}: expected the name of a file, found a folder or a device; fix: add a name\n"


def test_saving_where_one_cannot(run, tmp_path):
    """Found before the training that it would waste."""
    (tmp_path / "file").write_text("")
    result = run("--seed", 3, "--save", tmp_path / "file" / "nowhere" / "model.pt")
    assert result.code == 2 and re.fullmatch(r"train_gpt: saving in .*nowhere: expected a writable folder .*; fix: choose another place\n", result.err)
    assert not result.logs
