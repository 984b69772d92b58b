"""Whole runs through main(): the log, the clock, seeds, saved models, and what happens when something goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import types

import numpy as np
import pytest
import torch

import helpers
import sample
from helpers import CPU, PRESET, only, read_log, tg

sys.path[:0] = [str(helpers.ROOT / "records"), str(helpers.ROOT / "benchmarks")]
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
    monkeypatch.setattr(tg.Trainer, "training_step", helpers.step_after(number, action))


# ---- the log ---------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_log_is_complete(run, corpus):
    result = run("--seed", 3)
    (log,) = result.logs
    assert result.code == 0
    assert result.err == ""
    kinds = [e["kind"] for e in log]
    assert kinds[:3] == ["head", "warm", "stage"]
    assert kinds[-3:] == ["val", "clock", "end"]
    assert set(kinds[3:-3]) == {"step", "stage"}
    head = log[0]
    warm = log[1]
    end = log[-1]
    assert head["seed"] == 3
    assert head["world"] == 1
    assert head["preset"]["name"] == "tiny"
    assert head["preset"] == json.loads(json.dumps(dataclasses.asdict(PRESET)))
    assert all(re.fullmatch(r"[0-9a-f]{64}", head[key]) for key in ("script", "data"))
    assert head["script"] != head["data"]
    assert head["ops"] == tg.select_ops(CPU).names
    sparse = PRESET.model.table_rows * PRESET.model.width
    shapes = [
        p.shape
        for name, p in tg.GPT(PRESET.model, tg.select_ops(CPU), torch.device("meta")).named_parameters()
        if name != "ngram"
    ]
    assert head["parameters"] == {"dense": sum(shape.numel() for shape in shapes), "sparse": sparse}
    assert f" {sparse:,} in rows of" in result.out
    assert head["settings"].keys() == {"preset", "data", "log_dir", "seed"}
    assert head["shards"] == ["tiny_train_000000.bin", "tiny_train_000001.bin"]
    assert head["torch"] == torch.__version__
    assert {"python", "numpy", "platform", "device"} <= head.keys()
    assert head["consumed_tokens"] == 2 * 512 + 3 * 1024, "the stream begins with a BOS"
    assert warm["seconds"] > 0
    assert re.fullmatch(r"[0-9a-f]{16}", warm["state"])
    assert warm["variants"] == 3
    assert [(s["step"], s["batch_tokens"], s["long_window_tokens"]) for s in only(log, "stage")] == [
        (0, 512, 16),
        (2, 1024, 32),
        (4, 1024, 40),
    ]
    steps = only(log, "step")
    assert [(s["step"], s["tokens"]) for s in steps] == [(1, 512), (2, 1024), (4, 3072), (5, 4096)]
    assert all(
        0 < s["train_loss"] < 6.5 * (1.75, 1.75, 1.5, 1.0)[i] and s["ms_per_step"] > 0
        for i, s in enumerate(steps)
    ), "summed over the targets"
    (val,) = only(log, "val")
    assert val["final"]
    assert val["step"] == 5
    assert val["loss"] == end["loss"] == round(val["loss"], 6)
    assert end["state"] == "ok"
    assert end["recompiled"] == 0
    assert end["ms"] > 0
    assert all(re.fullmatch(r"[0-9a-f]{16}", end[key]) for key in ("train_hash", "val_hash"))
    assert "val loss" in result.out
    assert "step     5/5" in result.out


def test_hashes_follow_from_the_data(run, corpus):
    """What a log says of its tokens, computed anew:
    all batch chunks of all steps, all of the validation, and the files as records name them."""
    (log,) = run("--seed", 3).logs
    head = log[0]
    end = log[-1]
    stream = tg.TokenStream(corpus, 8000, helpers.VOCABULARY)
    shard = corpus / "tiny_val_000000.bin"
    spans = [
        (int(start), stage.chunk_tokens + 1)
        for stage, starts in zip(PRESET.stages, helpers.chunk_starts(stream, PRESET.stages))
        for start in starts.ravel()
    ]
    assert (
        end["train_hash"]
        == f"{sum(tg.chunk_digest(i, stream.read(*span)) for i, span in enumerate(spans)) % 2**64:016x}"
    )
    tokens = shard.read_bytes()[tg.SHARD_HEADER_BYTES:][:2 * (PRESET.val_tokens + 1)]
    assert end["val_hash"] == hashlib.sha256(tokens).hexdigest()[:16]
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (*(corpus / name for name in head["shards"]), shard)
    }
    assert head["data"] == record.manifest_hash(files, list(files))


def test_the_chain_detects_an_edit(run, tmp_path):
    run("--seed", 3)
    path = next((tmp_path / "logs").glob("*.jsonl"))
    text = path.read_text()
    read_log(path)
    for edited in (
        text.replace('"tokens": 1024', '"tokens": 1025'),
        "".join(text.splitlines(True)[:3] + text.splitlines(True)[4:]),
    ):
        assert edited != text
        path.write_text(edited)
        with pytest.raises(AssertionError, match="chain breaks"):
            read_log(path)


def test_clock_intervals_sum_to_the_time(run):
    (log,) = run("--seed", 3, "--val-every", 2).logs
    intervals = only(log, "clock")
    assert [(i["on"], i["reason"]) for i in intervals] == [(True, "training"), (False, "validation")] * 2 + [
        (True, "training")
    ]
    assert all(a["end_ms"] == b["start_ms"] for a, b in zip(intervals, intervals[1:])), "no gaps"
    assert sum(i["end_ms"] - i["start_ms"] for i in intervals if i["on"]) == pytest.approx(log[-1]["ms"], abs=0.06)
    assert [(v["step"], v["final"]) for v in only(log, "val")] == [(2, False), (4, False), (5, True)]
    on_the_clock = sum(s["ms_per_step"] * n for s, n in zip(only(log, "step"), (1, 1, 2, 1)))
    assert on_the_clock <= log[-1]["ms"] + 0.1, "the steps' times leave the pauses out"


def test_windows_of_validations(run, monkeypatch):
    """In between those of the moment, at the end the preset's, with the frequencies and the scale of the last stage."""
    seen = []
    validate = tg.Trainer.validate
    monkeypatch.setattr(
        tg.Trainer,
        "validate",
        lambda trainer, geometry: (seen.append((trainer, geometry)), validate(trainer, geometry))[1],
    )
    assert run("--seed", 3, "--val-every", 2).code == 0
    assert [geometry.windows for _, geometry in seen] == [
        {"short": 8, "long": 16},
        {"short": 12, "long": 32},
        {"short": 16, "long": 48},
    ]
    trainer, final = seen[-1]
    last = trainer.geometries[-1]
    assert last.windows == {"short": 16, "long": 40}
    assert final.scale == last.scale
    assert final.cos.equal(last.cos)
    assert final.sin.equal(last.sin)
    helpers.randomise(trainer.model)
    assert validate(trainer, final) == validate(trainer, final) != validate(trainer, last), "it makes a difference"


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_step_takes_what_it_takes_wherever_validations_fall(run, monkeypatch, every):
    """Steps of one second, validations of seven, by a hand-turned clock."""
    now = [100.0]
    step_of = tg.Trainer.training_step
    validate = tg.Trainer.validate

    def later(seconds, function):
        return lambda *arguments: (now.__setitem__(0, now[0] + seconds), function(*arguments))[1]

    monkeypatch.setattr(tg.Clock, "since_start", lambda clock: now[0])
    monkeypatch.setattr(tg.Trainer, "training_step", later(1.0, step_of))
    monkeypatch.setattr(tg.Trainer, "validate", later(7.0, validate))
    (log,) = run("--seed", 3, "--val-every", every).logs
    assert [s["ms_per_step"] for s in only(log, "step")] == pytest.approx([1000.0] * len(only(log, "step")))
    assert only(log, "step")[-1]["step"] == PRESET.steps
    assert log[-1]["ms"] == pytest.approx(1000 * PRESET.steps)


def test_the_clock_encloses_all_steps_and_the_last_exchange(corpus, tiny, tmp_path, monkeypatch):
    seen = []
    switch = tg.Clock.switch
    step_of = tg.Trainer.training_step
    gather = tg.Optimizer.gather
    monkeypatch.setattr(tg.Clock, "switch", lambda clock, reason: (switch(clock, reason), seen.append(reason)))
    monkeypatch.setattr(
        tg.Trainer,
        "training_step",
        lambda trainer, *a: (trainer.clock.intervals and seen.append("step"), step_of(trainer, *a))[1],
    )
    monkeypatch.setattr(tg.Optimizer, "gather", lambda optimizer: (seen.append("gather"), gather(optimizer)))
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    assert seen == ["training", *["step"] * PRESET.steps, "gather", None]


@pytest.mark.fast
def test_every_batch_is_made_on_the_clock(run, monkeypatch):
    """The first one too: the thread that makes batches begins when the clock runs."""
    clocks = []
    running = []
    created = tg.Clock.__init__
    read = tg.TokenStream.read

    def create(clock, device):
        created(clock, device)
        clocks.append(clock)

    def watched(stream, *where):
        running.append(bool(clocks[-1].intervals))
        return read(stream, *where)

    monkeypatch.setattr(tg.Clock, "__init__", create)
    monkeypatch.setattr(tg.TokenStream, "read", watched)
    assert run("--seed", 3).code == 0
    assert len(running) >= tg.CHUNKS * PRESET.steps
    assert all(running)


@pytest.mark.fast
def test_no_clock_starts_before_the_last_rank_has_compiled(run, monkeypatch):
    """The ranks meet between the end of the warm-up and the start of the clock."""
    order = []
    warm_up = tg.Trainer.warm_up
    gather = tg.Ranks.gather_objects
    switch = tg.Clock.switch

    def noted(name, function):
        def call(*arguments):
            found = function(*arguments)
            order.append(name)
            return found
        return call

    monkeypatch.setattr(tg.Trainer, "warm_up", noted("warm-up", warm_up))
    monkeypatch.setattr(tg.Ranks, "gather_objects", noted("meet", gather))
    monkeypatch.setattr(tg.Clock, "switch", noted("clock", switch))
    assert run("--seed", 3).code == 0
    assert "meet" in order[order.index("warm-up"):order.index("clock")]


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
    assert [i["on"] for i in clock.intervals] == [True, False, True]
    assert all("end_ms" in i for i in clock.intervals)


def test_nothing_is_read_or_written_on_the_clock(run, monkeypatch):
    """No validation, no warm-up and no log file inside: the main thread opens nothing between start and stop."""
    opened = []
    live = [True]
    switch = tg.Clock.switch
    inside = []
    monkeypatch.setattr(
        tg.Clock,
        "switch",
        lambda clock, reason: (
            inside.clear(),
            switch(clock, reason),
            reason == "training" and inside.append(1),
        ),
    )
    main = threading.get_ident()
    sys.addaudithook(
        lambda event, arguments: (
            event == "open"
            and live
            and inside
            and threading.get_ident() == main
            and opened.append(arguments[0])
        )
    )
    assert run("--seed", 3).code == 0
    live.clear()
    assert opened == []


def test_an_unwritable_log_folder(run, corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = [
        "--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir",
        str(tmp_path / "file" / "logs"),
    ]
    code = tg.main(arguments)
    out, err = capsys.readouterr()
    assert code == 0
    assert "val loss" in out
    assert err.count("\n") == 1
    assert re.match(r"run log: expected to write .*, found '.*Not a directory.*'; fix: .* UNLOGGED", err)

    assert tg.main([*arguments, "--check"]) == 0
    err = capsys.readouterr().err
    assert re.match(r"train_gpt: saving .*: expected permission to write in .*/file, found none; .* UNLOGGED", err)


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
    assert out == "still here\n"
    assert err.count("No space left") == 1
    assert err.count("\n") == 1


@pytest.mark.fast
def test_a_terminal_that_lacks_a_character(tmp_path, monkeypatch):
    """It gets it escaped, and what is said later too."""
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    log = tg.RunLog(tmp_path / "run.jsonl")
    log.say("log: logs\u2019\udcff")
    log.say("still here")
    log.close()
    assert out.buffer.getvalue() == b"log: logs\\u2019\\udcff\nstill here\n"


def test_nobody_reads_from_the_start_on(run, corpus, tmp_path, monkeypatch, capsys):
    """Standard output is on a full disk; or a shell has closed it, for which Python has None."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    for number, out in enumerate((open("/dev/full", "w"), None)):
        monkeypatch.setattr(sys, "stdout", out)
        place = tmp_path / str(number)
        arguments = ["--preset", "tiny", "--eager", "--data", str(corpus), "--length", "auto", "--log-dir", str(place)]
        assert tg.main(arguments) == 0
        (log,) = place.glob("*.jsonl")
        assert read_log(log)[-1]["state"] == "ok"
    assert capsys.readouterr().err == ""


@pytest.mark.fast
def test_a_log_is_never_overwritten(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text("a result\n")
    log = tg.RunLog(path)
    log.line("head")
    log.close()
    assert path.read_text() == "a result\n"
    assert "UNLOGGED" in capsys.readouterr().err


# ---- seeds and repeated runs -----------------------------------------------------------------------------------------
def essence(log):
    """What a seed fixes: all of a log but times, memory and where its files lie."""
    return [
        {
            k: v
            for k, v in e.items()
            if k
            not in (
                "ms", "ms_per_step", "seconds", "settings", "chain", "start_ms", "end_ms",
                "graphs", "started",
            )
        }
        for e in log
        if e["kind"] != "warm"
    ]


def test_a_seed_fixes_the_run(run):
    (first,), (again,), (other,) = (run("--seed", seed).logs for seed in (3, 3, 4))
    assert essence(first) == essence(again)
    assert other[-1]["loss"] != first[-1]["loss"], "a seed never changes the data"
    assert other[-1]["train_hash"] == first[-1]["train_hash"], "a seed never changes the data"
    assert only(other, "warm")[0]["state"] != only(first, "warm")[0]["state"]


@pytest.mark.fast
def test_the_first_rank_draws_the_seed_of_all(tiny, tmp_path, monkeypatch):
    """Here it has drawn 7; this is the second of two ranks, and all but its seed is left out."""
    ranks = tg.Ranks(1, 2, CPU)
    ranks.gather_objects = lambda own: [7, own]
    ranks.finish = lambda code: None
    trainer = types.SimpleNamespace(preset=PRESET, graphs={})
    seeds = []
    monkeypatch.setattr(tg.Ranks, "start", lambda limit: ranks)
    monkeypatch.setattr(tg, "build_trainer", lambda *_: trainer)
    monkeypatch.setattr(tg, "watched_log", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(tg, "train", lambda trainer, seed, *_: seeds.append(seed))
    assert tg.main(["--preset", "tiny", "--log-dir", str(tmp_path)]) == 0
    assert seeds == [7]


def test_a_seed_is_drawn_and_logged(run):
    logs = [run().logs[0] for _ in range(2)]
    assert logs[0][0]["seed"] != logs[1][0]["seed"]
    assert "seed" not in logs[0][0]["settings"]


def test_a_training_averages(corpus, tiny, tmp_path, monkeypatch):
    """The warm-up once, then from step 2 of 5 on every other;
    only the last step of a whole schedule moves the weights."""
    calls = []
    average = tg.Optimizer.average
    monkeypatch.setattr(tg.Optimizer, "average", lambda self, *shares: (calls.append(shares), average(self, *shares)))
    begun = [(1.0, 0.5), (1.0, 0.0)]
    for options, expected in (((), [*begun, (pytest.approx(0.3), 0.65)]), (("--stop-after", "4"), begun)):
        calls.clear()
        arguments = [
            "--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir",
            str(tmp_path), *options,
        ]
        assert tg.main(arguments) == 0
        assert calls == expected


@pytest.mark.fast
def test_the_last_step_moves_the_weights_whatever_its_rate(run, monkeypatch):
    """In sprint and webmix no weights enter the averages at the last step: it moves the weights all the same."""
    optimizer = dataclasses.replace(PRESET.optimizer, averaging_interval_steps=4)
    monkeypatch.setitem(tg.PRESETS, "tiny", dataclasses.replace(PRESET, optimizer=optimizer))
    calls = []
    average = tg.Optimizer.average
    monkeypatch.setattr(tg.Optimizer, "average", lambda self, *shares: (calls.append(shares), average(self, *shares)))
    assert run("--seed", 3).code == 0
    assert calls[1:] == [(1.0, 0.0), (0.0, 0.65)]


@pytest.mark.fast
def test_warm_up_changes_nothing(corpus, tiny, monkeypatch):
    """It really trains, on none of the training data,
    and the state after it is the state before it, generator included."""
    trainer = helpers.make_trainer(corpus)
    monkeypatch.setattr(tg.TokenStream, "read", lambda *_: pytest.fail("warm-up read training data"))
    before = trainer.initialise(7)
    generator = torch.get_rng_state()
    weights = {name: t.clone() for name, t in trainer.optimizer.state().items()}
    variants = trainer.warm_up()
    assert variants == 3, "one a stage"
    assert tg.state_hash(trainer.optimizer.state()) != before
    assert trainer.initialise(7) == before
    assert torch.get_rng_state().equal(generator)
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
    assert end["recompiled"] > 0
    assert end["state"] == "no record: compiled in the timed run"


# ---- options ---------------------------------------------------------------------------------------------------------
def test_a_shortened_run_is_no_record(run):
    result = run("--seed", 3, "--stop-after", 3)
    (log,) = result.logs
    assert re.search(r"step +3/3 .* 0\.0 s left\n", result.out)
    assert log[-1]["state"].startswith("no record")
    assert only(log, "step")[-1]["step"] == 3
    assert only(log, "val")[0]["step"] == 3
    assert log[0]["settings"]["stop_after"] == "3"


def test_a_run_that_would_stop_after_its_end_is_whole(run):
    (log,) = run("--seed", 3, "--stop-after", 99).logs
    assert log[-1]["state"] == "ok"


def test_every_option_that_is_given_is_a_setting(run, tmp_path):
    """A record's settings are what its log says of them: none may be missing there, but a price."""
    given = {
        "eager": "True", "no_graphs": "True", "no_fp8": "['head']", "reference": "True", "stall_limit": "100.0",
        "micro_batch_tokens": "128", "length": "0.5", "val_every": "2", "stop_after": "3",
        "save": str(tmp_path / "model.pt"), "checkpoint": str(tmp_path / "state.pt"), "checkpoint_every": "2",
    }
    words = []
    for option, value in given.items():
        words += [f"--{option.replace('_', '-')}", *[value.strip("[']")] * (value != "True")]
    (log,) = run("--seed", 3, *words).logs
    settings = log[0]["settings"]
    assert {option: settings.get(option) for option in given} == given
    always = {"preset", "data", "log_dir", "seed"}
    assert settings.keys() == given.keys() | always
    # The last three need a file, GPT-2's tokens and a package. test_sample_every.py has the second among the settings.
    others = {"check", "gpu_hour_price", "resume", "sample_every", "tensorboard"}
    assert vars(tg.parse_arguments([])).keys() == settings.keys() | others, "an option that this test does not know"


def test_stopping_after_more_than_everything(run):
    (log,) = run("--seed", 3, "--stop-after", 50).logs
    assert only(log, "val")[0]["step"] == 5


def test_a_trace_of_some_steps(corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tg, "timed_loop", tg.timed_loop)  # the script replaces it, and the next one
    for kind in (tg.LookupTable, tg.AdamTable):
        monkeypatch.setattr(kind, "reduce_", kind.reduce_)
    options = [
        "--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path), "--seed", "3",
        "--stop-after", "4",
    ]
    monkeypatch.setattr(sys, "argv", ["bench_trace.py", "1:2", *options])
    assert bench_trace.main() == 0
    trace = json.loads((tmp_path / "trace-rank0.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("reduce lm_head") == 2
    assert any("Backward" in str(name) for name in names)
    assert "Self CPU" in capsys.readouterr().out
    for span in ("2:1", "3:4", "x"):
        monkeypatch.setattr(sys, "argv", ["bench_trace.py", span, *options])
        with pytest.raises(SystemExit):
            bench_trace.main()


def test_a_longer_and_a_shorter_schedule(run):
    """--length 2 and 0.5 of 2, 2 and 1 steps;
    the log has the option and the scaled steps, and the run may be a record."""
    for length, steps in (("2", [4, 4, 2]), ("0.5", [1, 1, 1])):
        (log,) = run("--seed", 3, "--length", length).logs
        head = log[0]
        end = log[-1]
        assert float(head["settings"]["length"]) == float(length)
        assert [stage["steps"] for stage in head["preset"]["stages"]] == steps
        assert only(log, "step")[-1]["step"] == sum(steps)
        assert end["state"] == "ok"
        assert head["consumed_tokens"] == 512 * steps[0] + 1024 * (steps[1] + steps[2])
    assert "length" not in run("--seed", 3, "--length", 1).logs[0][0]["settings"]


def test_a_schedule_as_long_as_the_corpus(run, corpus):
    """--length auto: one pass over the shards that are there, said in a line; the log has the number, as a record
    needs it, and nothing longer by a ten-thousandth would do."""
    result = run("--seed", 3, "--length", "auto")
    (told,) = re.findall(r"^--length auto: here --length ([\d.]+)$", result.out, re.MULTILINE)
    (log,) = result.logs
    head = log[0]
    assert head["settings"]["length"] == told
    assert log[-1]["state"] == "ok"
    stream = tg.TokenStream(corpus, math.inf, helpers.VOCABULARY)
    stream.require(tg.scaled_preset(PRESET, float(told)))
    assert head["consumed_tokens"] == stream.consumed(tg.scaled_preset(PRESET, float(told)).stages)
    with pytest.raises(tg.Failure, match="training tokens: .*; fix: --length auto "):
        stream.require(tg.scaled_preset(PRESET, float(told) + 1e-4))


@pytest.mark.parametrize("shard_tokens, steps", [(870, [1, 1, 1]), (850, None)])
def test_the_shortest_schedule(run, corpus, tmp_path, shard_tokens, steps):
    """At least one step a stage, 2,560 tokens; with fewer --length auto is no help, and is not named."""
    for path in shutil.copytree(corpus, tmp_path / "short").glob("*_train_*"):
        helpers.write_shard(path, np.fromfile(path, "<u2", offset=1024)[:shard_tokens])
    result = run("--seed", 3, "--length", "auto", "--data", tmp_path / "short")
    if steps:
        assert [stage["steps"] for stage in result.logs[0][0]["preset"]["stages"]] == steps
    else:
        assert result.code == 2
        assert re.fullmatch(r"train_gpt: training tokens: expected 2,561 for the schedule, found 2,550 in 3 shards; "
                            r"fix: python data/fineweb.py fetch .*, or tokenize more text\n", result.err)


def test_a_schedule_that_is_too_long_for_the_corpus(run, monkeypatch, tmp_path):
    monkeypatch.setattr(tg, "memory_plan", lambda *_: pytest.fail("the tokens come first"))
    result = run("--seed", 3, "--length", 10)
    assert result.code == 2
    assert not (tmp_path / "logs").exists()
    assert re.fullmatch(
        r"train_gpt: training tokens: expected 40,961 for the schedule, found 15,\d{3} in 3 shards; fix: .*\n",
        result.err,
    )


@pytest.mark.parametrize("options", [["--preset", "huge"], ["--val-every", "0"], ["--stop-after", "-1"], ["--sed", "1"],
                                     ["--length", "0"], ["--length", "101"], ["--length", "nan"], ["--length", "x"],
                                     ["--stall-limit", "inf"], ["--micro-batch-tokens", "0"], ["--eval", "a"]])
def test_wrong_options_exit_with_2(tiny, capsys, options):
    with pytest.raises(SystemExit) as caught:
        tg.main(options)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


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
    assert tg.main([]) == 2
    assert "WORLD_SIZE: expected a number, as torchrun sets it, found x; fix: " in capsys.readouterr().err


def test_a_rank_beyond_the_world_and_a_port_that_is_none(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "5")
    assert tg.main([]) == 2
    assert "RANK: expected below WORLD_SIZE, 1, found 5; fix: unset both" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "x")):
        monkeypatch.setenv(name, value)
    assert tg.main([]) == 2
    assert "MASTER_PORT: expected a number, as torchrun sets it, found x; fix: " in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", "99999")
    assert tg.main([]) == 2
    assert "MASTER_PORT: expected 1 to 65535, found 99999; fix: " in capsys.readouterr().err


def test_the_exchange_before_a_pause_is_on_the_clock(run, monkeypatch):
    """Exchanges of two seconds, before two validations and after the last step."""
    helpers.hand_turned(monkeypatch, training_step=1.0, gather=2.0)
    (log,) = run("--seed", 3, "--val-every", 2).logs
    assert log[-1]["ms"] == pytest.approx(1000 * PRESET.steps + 3 * 2000)


def test_time_left(run, monkeypatch):
    """By tokens: at 512 a second 7 and 6 seconds of 4096 are left, then at 1024 one and none."""
    helpers.hand_turned(monkeypatch, training_step=1.0)
    assert re.findall(r"([\d.]+) s left\n", run("--seed", 3).out) == ["7.0", "6.0", "1.0", "0.0"]


def test_no_validation_beside_the_last(run):
    (log,) = run("--seed", 3, "--val-every", PRESET.steps).logs
    assert [(line["step"], line["final"]) for line in only(log, "val")] == [(PRESET.steps, True)]
    assert [line["reason"] for line in only(log, "clock")] == ["training"]


def test_consumed_tokens_hold_those_before_the_first_document(run, tmp_path):
    helpers.write_shard(tmp_path / "tiny_train_000000.bin", [7, 8, 9, *helpers.documents(9000, seed=0)])
    helpers.write_shard(tmp_path / "tiny_val_000000.bin", helpers.documents(1500, seed=9))
    (log,) = run("--seed", 3, "--data", tmp_path).logs
    assert log[0]["consumed_tokens"] == 3 + 2 * 512 + 3 * 1024


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("empty", [False, True])
def test_variables_left_over_from_torchrun(monkeypatch, capsys, missing, empty):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    if empty and missing != "RANK":
        monkeypatch.setenv(missing, "")
    else:
        monkeypatch.delenv(missing)
    assert tg.main([]) == 2
    assert f"{missing}: expected a value, as WORLD_SIZE is 2, found none; fix: unset RANK" in capsys.readouterr().err


@pytest.mark.fast
def test_a_second_ctrl_c_acts_at_once():
    """With several ranks in the timed loop the first one only asks."""
    ranks = tg.Ranks(0, 2, CPU)
    ranks.stop_together = True
    ranks.ask_to_stop(signal.SIGINT, None)
    assert ranks.stop_signal == signal.SIGINT
    with pytest.raises(tg.Interrupted):
        ranks.ask_to_stop(signal.SIGINT, None)


def test_ctrl_c(run, monkeypatch):
    at_step(monkeypatch, 3, lambda trainer: os.kill(os.getpid(), signal.SIGINT))
    result = run("--seed", 3)
    assert result.code == 130
    assert "interrupted" in result.err
    (log,) = result.logs
    assert log[-1]["kind"] == "end"
    assert log[-1]["state"] == "interrupted"
    assert not only(log, "val")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.fast
def test_numerical_failure(run, monkeypatch, tmp_path, value):
    """Seen at the next flush, two logged steps later at most; the log says at which step, and is kept."""
    at_step(monkeypatch, 2, lambda trainer: trainer.model.embedding.data.fill_(value))
    result = run("--seed", 3, "--save", tmp_path / "never" / "model.pt")
    assert result.code == 3
    assert not (tmp_path / "never").exists()
    assert re.fullmatch(
        r"train_gpt: training loss: expected a finite number, found nan at step 4; fix: .*\n", result.err
    )
    (log,) = result.logs
    assert log[-1]["kind"] == "end"
    assert log[-1]["state"].startswith("failed")
    assert "nan at step 4" in log[-1]["state"]
    assert not only(log, "val")


@pytest.mark.fast
def test_an_infinite_training_loss(corpus, tiny):
    """It is no NaN, and as little a loss."""
    log = types.SimpleNamespace(line=lambda *_, **__: None, say=lambda *_: None)
    meter = tg.Meter(log, helpers.make_trainer(corpus), 4)
    meter.pending = 2, PRESET.stages[0], 0.0, 6.0, torch.tensor([math.inf, 0.0])
    with pytest.raises(tg.Failure, match="training loss: expected a finite number, found inf at step 2") as caught:
        meter.flush()
    assert caught.value.code == tg.EXIT_NUMERICS


@pytest.mark.parametrize("loss", [math.inf, math.nan])
@pytest.mark.fast
def test_a_validation_without_a_finite_loss(run, monkeypatch, loss):
    monkeypatch.setattr(tg.Trainer, "validate", lambda *_: loss)
    result = run("--seed", 3)
    assert result.code == 3
    assert f"validation loss: expected a finite number, found {loss}; fix: " in result.err
    assert result.logs[0][-1]["state"].startswith("failed")


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
    assert result.code == 3
    assert result.logs[0][-1]["state"].startswith("failed")


def test_a_broken_device_does_not_end_the_watchdog(monkeypatch):
    def query():
        raise RuntimeError("an illegal memory access was encountered")

    ended = threading.Event()
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.2, tg.RunLog(None))
    watchdog.events.append(types.SimpleNamespace(query=query))
    assert ended.wait(20)
    watchdog.done.set()


def test_a_heartbeat_that_grows_old_ends_the_run(monkeypatch, capsys):
    """Its age is counted in looks: none passes while it is renewed, and with patience it may be older."""
    ended = threading.Event()
    looks = []
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.2, tg.RunLog(None))
    done = watchdog.done
    watchdog.done = types.SimpleNamespace(wait=lambda seconds: looks.append(seconds) or done.wait(seconds))
    while len(looks) < 40:
        watchdog.heartbeat("a step")
    assert not ended.is_set(), "five times the limit, and always young"
    looks.clear()
    watchdog.heartbeat("the warm-up", 3.0)
    assert ended.wait(20), "three times 0.2 s in looks of 0.025 s"
    assert 23 <= len(looks) <= 27, "three times 0.2 s in looks of 0.025 s"
    assert "rank 0: expected progress within 0.6 s, found none since the warm-up; fix: " in capsys.readouterr().err


def test_who_was_asked_to_stop_gets_no_patience(monkeypatch):
    """As in the warm-up or while a checkpoint is written: docker waits ten seconds, and not five times as long."""
    ended = threading.Event()
    looks = []
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(tg, "STOP_LIMIT_S", 0.1)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.8, tg.RunLog(None))
        done = watchdog.done
        watchdog.done = types.SimpleNamespace(wait=lambda seconds: looks.append(seconds) or done.wait(seconds))
        watchdog.heartbeat("the warm-up", 5.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(20)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    assert len(looks) <= 6, "0.2 s in looks of 0.1 s, not five times 0.2 s"


def test_a_point_that_the_device_reaches_is_progress(monkeypatch):
    """The host may be far ahead: while the device passes queued heartbeats, none is too old."""
    ended = threading.Event()
    monkeypatch.setattr(tg.os, "_exit", lambda code: ended.set())
    watchdog = tg.Watchdog(tg.Ranks(0, 1, CPU), 0.2, tg.RunLog(None))
    reached = threading.Event()
    queries = []

    def query():
        queries.append(len(queries))
        return len(queries) % 5 == 0  # every fifth look, before the eighth, which would be too late

    watchdog.events.extend(types.SimpleNamespace(query=query) for _ in range(6))
    watchdog.events.append(types.SimpleNamespace(query=lambda: reached.set() or False))
    assert reached.wait(20)
    assert not ended.is_set()
    assert ended.wait(20), "and then it stands still"


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
    assert read_log(tmp_path / "run.jsonl")[-1]["state"] == "ok"
    assert not helpers.own_threads()


# ---- options and saving
# -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "option, value",
    [
        ("--seed", "9" * 20),
        ("--seed", "-1"),
        ("--stall-limit", "0"),
        ("--stall-limit", "nan"),
        ("--val-every", "0"),
    ],
)
@pytest.mark.fast
def test_numbers_out_of_range_are_usage_errors(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        tg.main([option, value])
    assert caught.value.code == 2
    assert re.search(
        rf"argument {option}: expected a number from [\d.]+ to (\d+|inf), found {value}\n",
        capsys.readouterr().err,
    )


def test_saving_failed_after_the_run(run, tmp_path, monkeypatch):
    """The run itself has ended well, and its log says so, once."""
    for name in ("link", "replace"):
        monkeypatch.setattr(tg.os, name, lambda *_: (_ for _ in ()).throw(OSError("no space")))
    result = run("--seed", 3, "--save", tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert result.code == 2
    assert result.err.startswith("train_gpt: saving ")
    assert [e["state"] for e in result.logs[0] if e["kind"] == "end"] == ["ok"]


@pytest.mark.parametrize("kind, found", [("file", "one that exists"), ("folder", "a folder or a device")])
def test_saving_onto_what_exists(run, tmp_path, kind, found):
    """Found before the training that it would waste; no model is lost to the next one."""
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()
    result = run("--seed", 3, "--save", path)
    assert result.code == 2
    assert not result.logs
    assert kind == "folder" or path.read_text() == "precious"
    assert (
        result.err
        == f"train_gpt: saving {path}: expected a new file, found {found}; fix: remove it, or choose another name\n"
    )


def test_saving_where_one_cannot(run, tmp_path, monkeypatch):
    """A file in place of a folder, a folder that is read-only, too little room:
    each in its words, before the training."""
    (tmp_path / "file").write_text("")
    result = run("--seed", 3, "--save", tmp_path / "file" / "nowhere" / "model.pt")
    assert result.code == 2
    assert not result.logs
    assert re.fullmatch(
        r"train_gpt: saving .*: expected permission to write in .*/file, found none; fix: .*\n", result.err
    )

    with monkeypatch.context() as patch:
        patch.setattr(tg.os, "access", lambda place, mode: place != tmp_path)  # root may write everywhere
        result = run("--seed", 3, "--save", tmp_path / "new" / "model.pt")
    assert result.err == (f"train_gpt: saving {tmp_path}/new/model.pt: expected permission to write in {tmp_path}, "
                          "found none; fix: choose another place\n")

    monkeypatch.setattr(sample.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=3_000_000))
    result = run("--seed", 3, "--save", tmp_path / "new" / "model.pt")
    pattern = rf"train_gpt: saving .*: expected 1,\d\d\d MB free, found 3 MB in {tmp_path}; fix: choose another place\n"
    assert result.code == 2
    assert re.fullmatch(pattern, result.err)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", tg.PRESETS)
def test_saving_asks_for_the_room_that_it_takes(monkeypatch, tmp_path, name):
    """At most so much: all rows of the table and their numbers, and the dense weights."""
    model = tg.PRESETS[name].model
    weights = tg.GPT(model, tg.select_ops(CPU), torch.device("meta"))
    rows = 0 if weights.ngram is None else len(weights.ngram)
    size = (sum(p.nbytes for p in weights.parameters()) + 4 * rows) // 1_000_000
    monkeypatch.setattr(sample.shutil, "disk_usage", lambda place: types.SimpleNamespace(free=1_000_000 * free_mb))
    for free_mb in (size - 1, size):
        with pytest.raises(tg.Failure, match="MB free"):
            sample.check_place(tmp_path / "m.pt", model)
    free_mb = 1.1 * size + 1100
    sample.check_place(tmp_path / "m.pt", model)
