"""Twenty-five forgeries: each is refused, or shown, or passes because only a rerun can tell. records/README.md lists
which."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "records"), str(ROOT / "tests")]
import audit  # noqa: E402
import guard  # noqa: E402
import record  # noqa: E402
import runlog  # noqa: E402
import runner  # noqa: E402
import tracks  # noqa: E402
import verify  # noqa: E402
from test_records import FAKE, claim, copy, edit_json, event, failed, finished, first_log, make, quick, rewrite_log  # noqa: F401


def logs(path, arm="a"):
    """The logs of an arm in the order of its seeds."""
    return [path / "runs" / f"{arm}-s{seed}.jsonl" for seed in record.load(path).record["plan"]["seeds"]]


def on_track(path, name, monkeypatch, **changes):
    """The record as if it were of a track, with everything else of that track but its preset and number of tokens."""
    monkeypatch.setitem(record.TRACKS, name, record.TRACKS[name]._replace(preset="smoke", val_tokens=8192, **changes))
    edit_json(path / "record.json", lambda r: r.update(track=name))
    return {check.name: check for check in verify.verify(path)}


def said(path, name):
    return {check.name: check for check in verify.verify(path)}[name].text


# ---- the tokens ------------------------------------------------------------------------------------------------------
def test_webtext_runs_relabelled_as_the_fineweb_speedrun(copy, monkeypatch):  # noqa: F811
    """With files of FineWeb's names too: other records hold the same bytes as webtext's, and the validation hash is
    known."""
    assert not on_track(copy, "speedrun", monkeypatch)["tokens"].ok
    real = record.load(ROOT / "records/2026-11-26_shorter-1gpu").record["data"]
    renamed = {name.replace("webtext", "fineweb"): digest for name, digest in real.items()}
    parent = copy.parent / record.load(copy).record["parent"]
    edit_json(parent / "record.json", lambda r: r.update(track="sprint-webtext", data=real))
    edit_json(copy / "record.json", lambda r: r.update(data=renamed))
    assert "expected shards of fineweb, found some of webtext" in said(copy, "tokens")
    edit_json(copy / "record.json", lambda r: r.update(data={name: "0" * 64 for name in renamed}))
    for path in logs(copy):
        rewrite_log(path, lambda e: e[-1].update(val_hash="74f9a92a3c857c45"))
    found = list(verify.token_problems(verify.Context(record.load(copy), {}), "a", runlog.read_run(logs(copy)[0])))
    assert "tokens" in failed(copy) and found == ["a: expected validation tokens of fineweb, found those of webtext"]


def test_a_corpus_has_the_same_shards_in_all_records(copy):  # noqa: F811
    """Also one that is not pinned, as FineWeb before its first record."""
    edit_json(copy.parent / record.load(copy).record["parent"] / "record.json",
              lambda r: r["data"].update({"sample_val_000000.bin": "1" * 64}))
    assert {"tokens", "parent"} <= failed(copy) and "expected shards as in" in said(copy, "tokens")


def test_a_plan_of_other_shards_blames_no_finished_record(finished, copy):  # noqa: F811
    """Neither before its runs nor after it was given up."""
    root = copy.parents[1]
    shutil.copytree(finished[0] / "data", root / "data")
    (root / "train_gpt.py").write_text(FAKE + "# another\n")
    plan = make(root, "plan")
    edit_json(plan / "record.json", lambda r: r["data"].update({"sample_val_000000.bin": "1" * 64}))
    assert failed(copy) == set()
    record.abandon(plan, "a faulty copy")
    assert failed(copy) == set()


def test_another_validation_shard(copy, monkeypatch):  # noqa: F811
    """Pinned by its SHA-256 and by what the runs hash of it."""
    context = verify.Context(record.load(ROOT / "records/2026-11-26_shorter-1gpu"), {})
    run = runlog.read_run(first_log(context.folder.path))
    assert list(verify.corpus_problems(context)) == list(verify.token_problems(context, "a", run)) == []
    context.folder.record["data"]["webtext_val_000000.bin"] = "0" * 64
    assert next(verify.corpus_problems(context)) == "expected the pinned shards of webtext, found others"
    run.lines[-1]["val_hash"] = "0" * 16
    assert "expected validation tokens 74f9a92a3c857c45, found 0000" in next(verify.token_problems(context, "a", run))
    assert not on_track(copy, "sprint-webtext", monkeypatch)["tokens"].ok


def test_more_tokens_than_the_track_allows(copy):  # noqa: F811
    """A log of 282 M tokens where 243 M are the most."""
    context = verify.Context(record.load(ROOT / "records/2026-11-27_leaner-1gpu"), {})
    run = runlog.read_run(first_log(context.folder.path))
    assert list(verify.token_problems(context, "a", run)) == []
    run.of("step")[-1]["tokens"] = 282_000_000
    assert list(verify.token_problems(context, "a",
                                      run)) == ["a: expected at most 243,200,000 training tokens, found 282,000,000"]
    run.of("step")[-1]["tokens"] = 230_000_000
    run.head["consumed_tokens"] = 281_000_000  # with those that were skipped
    assert "found 281,000,000" in next(verify.token_problems(context, "a", run))


def test_the_pins_are_those_of_the_records():
    """Every record of a pinned corpus has its manifest and validation hash, and stays below the track's cap."""
    for path in record.all_folders():
        folder = record.load(path)
        pins = tracks.PINS.get(folder.track.corpus)
        if not pins:  # as FineWeb
            continue
        assert record.manifest_hash(folder.record["data"], list(folder.record["data"])) == pins.manifest
        for run in (run for run in folder.runs("a") if run.ok):
            assert run.lines[-1]["val_hash"] == pins.val_hash[folder.track.val_tokens]
            assert run.of("step")[-1]["tokens"] <= folder.track.most_tokens


# ---- the runs --------------------------------------------------------------------------------------------------------
def adopt(log, plan_of):
    """Make a log say that it is the run of another seed: the seed and the name of its folder."""
    seed = int(plan_of.stem.partition("-s")[2])
    own = runlog.read_run(plan_of).head["settings"]
    rewrite_log(log, lambda e: (e[0].update(seed=seed), e[0]["settings"].update(log_dir=own["log_dir"],
                                                                                seed=str(seed))))


def test_the_best_run_copied_over_all_seeds(copy):  # noqa: F811
    best, *others = sorted(logs(copy), key=lambda path: runlog.read_run(path).loss)
    for path in others:
        own = runlog.read_run(path).head
        kept = {name: own[name] for name in ("seed", "settings", "started")}
        seconds = runlog.read_run(path).of("warm")[0]["seconds"]  # or one may not have ended before the next started
        path.write_bytes(best.read_bytes())
        rewrite_log(path, lambda e: (e[0].update(kept), event(e, "warm").update(seconds=seconds)))  # noqa: B023
    assert failed(copy) == {"starts"} and "expected 3 seeds with start of their own, found 1" in said(copy, "starts")
    for number, path in enumerate(others):  # with starts invented, the losses still are those of one run
        rewrite_log(path, lambda e: event(e, "warm").update(state=f"{number:016x}"))  # noqa: B023
    assert failed(copy) == {"starts"} and "with losses of their own, found 1" in said(copy, "starts")


@pytest.mark.parametrize("known_by", ["start and losses", "losses", "start"])
def test_runs_of_another_record_under_other_seeds(copy, known_by):  # noqa: F811
    """The parent's own runs as those of its script beside the child."""
    parent = copy.parent / record.load(copy).record["parent"]
    for path, source in zip(logs(copy, "b"), logs(parent)):
        own = runlog.read_run(path).head
        kept = {name: own[name] for name in ("seed", "settings", "started")}
        seconds = runlog.read_run(path).of("warm")[0]["seconds"]
        state = runlog.read_run(path).of("warm")[0]["state"] if known_by == "losses" else None
        path.write_bytes(source.read_bytes())

        def relabel(e):
            e[0].update(kept)  # noqa: B023
            event(e, "warm").update({"seconds": seconds} | ({"state": state} if state else {}))  # noqa: B023
            if known_by == "start":
                event(e, "step")["train_loss"] += 0.001

        rewrite_log(path, relabel)
    assert "starts" in failed(copy)
    assert re.search(rf"expected a run of its own, found what {parent.name} has as a-s\d+", said(copy, "starts"))


def test_one_script_and_seed_starts_alike_in_all_records(finished, copy):  # noqa: F811
    """Here of a retime and the record that it repeats; on another torch or device it is not compared."""
    root = copy.parent.parent
    shutil.copytree(finished[0] / "data", root / "data")
    again = make(root, "again", track_name=None, n=None, retime=copy)
    runner.run_plan(again, None)
    assert failed(again) == set() and "6 starts as in other records" in said(again, "starts")
    log = logs(again)[0]
    rewrite_log(log, lambda e: event(e, "warm").update(state="0" * 16))
    assert failed(again) == {"starts"} and "expected the start of" in said(again, "starts")
    for path in (*logs(again), *logs(again, "b")):
        rewrite_log(path, lambda e: e[0].update(device="another"))
    assert "starts" not in failed(again)


def test_the_worst_run_dropped_and_the_others_renumbered(copy):  # noqa: F811
    """Fewer runs are another plan, with other seeds."""
    worst = max(logs(copy), key=lambda path: runlog.read_run(path).loss)
    seed = int(worst.stem.partition("-s")[2])
    for arm in "ab":
        (copy / "runs" / f"{arm}-s{seed}.jsonl").unlink()

    def drop(r):
        kept = [s for s in r["plan"]["seeds"] if s != seed]
        r["plan"].update(seeds=kept, order=record.plan_order(kept, "ab"))
        r["runs"] = {name: digest for name, digest in r["runs"].items() if f"-s{seed}." not in name}
        r["plan"]["id"] = record.plan_id(r, copy.name)

    edit_json(copy / "record.json", drop)
    folder = record.load(copy)
    for path in (copy / "runs").iterdir():
        name = f"running/{record.log_name(folder, path.stem)}"
        rewrite_log(path, lambda e: e[0]["settings"].update(log_dir=name))  # noqa: B023
    assert "plan" in failed(copy) and "expected the seeds that follow from the plan" in said(copy, "plan")


def test_n_grown_after_a_look(copy):  # noqa: F811
    def grow(r):
        more = [*r["plan"]["seeds"], 7]
        r["plan"].update(seeds=more, order=record.plan_order(more, "ab"))
        r["plan"]["id"] = record.plan_id(r, copy.name)

    edit_json(copy / "record.json", grow)
    assert {"plan", "settings", "runs"} <= failed(copy), "other seeds follow, and the logs carry the old id"


def test_a_date_set_back(copy):  # noqa: F811
    edit_json(copy / "record.json", lambda r: r.update(date="2020-01-01"))
    back = copy.rename(copy.with_name("2020-01-01_child"))
    assert failed(back) == {"name", "plan"}
    edit_json(back / "record.json", lambda r: r["plan"].update(id=record.plan_id(r, back.name)))
    assert {"name", "plan", "settings"} <= failed(back)


def test_an_early_clock(copy):  # noqa: F811
    """.4 s less than the steps took; 5 ms and .3 % are allowed."""
    def stop_early(e, ms):
        last = [line for line in e if line["kind"] == "clock"][-1]
        last["end_ms"] -= ms
        e[-1]["ms"] -= ms

    log = first_log(copy)
    rewrite_log(log, lambda e: stop_early(e, 10))
    assert "clock" not in failed(copy)
    rewrite_log(log, lambda e: stop_early(e, 20))  # 30 ms of 6 s in all, where 23 are allowed
    assert "clock" in failed(copy) and "expected steps that take about" in said(copy, "clock")
    rewrite_log(log, lambda e: stop_early(e, 370))
    assert "clock" in failed(copy)


def test_the_steps_of_real_logs_take_what_the_clock_says():
    """Far within the tolerance: .02 % and 4 ms at most."""
    for path in record.all_folders():
        for run in (run for run in record.load(path).runs("a") if run.ok):
            assert abs(1e3 * run.train[-1, 1] - run.ms) < 2e-4 * run.ms + 1 or abs(1e3 * run.train[-1, 1] - run.ms) < 5


@pytest.mark.parametrize("more, ok", [(0.05, True), (0.1, False), (-0.1, False)])
def test_the_intervals_sum_to_the_total(copy, more, ok):  # noqa: F811
    """Within the rounding of both to .1 ms."""
    rewrite_log(first_log(copy), lambda e: e[-1].update(ms=e[-1]["ms"] + more))
    assert ("clock" not in failed(copy)) == ok


@pytest.mark.parametrize("end", [math.nan, math.inf])
def test_a_clock_without_a_number(copy, end):  # noqa: F811
    """What is no number differs from nothing, so that it would hide half of the time."""
    def stop(e):
        [line for line in e if line["kind"] == "clock"][-1]["end_ms"] = end
        e[-1]["ms"] /= 2

    rewrite_log(first_log(copy), stop)
    assert "clock" in failed(copy)


@pytest.mark.parametrize("gap", [5.0, -5.0])
def test_intervals_join(copy, gap):  # noqa: F811
    """A pause without a name, or time that counts twice, with a total that fits."""
    def move(e):
        second = [line for line in e if line["kind"] == "clock"][1]
        second["start_ms"] += gap
        e[-1]["ms"] -= gap

    rewrite_log(first_log(copy), move)
    assert "clock" in failed(copy)
    assert "expected intervals that join" in said(copy, "clock")


def test_a_log_that_lacks_its_last_newline(copy):  # noqa: F811
    """Its lines say all that they said, but it was cut."""
    log = first_log(copy)
    log.write_text(log.read_text()[:-1])
    assert runlog.read_run(log).broken == runlog.CUT_OFF
    assert {"chain", "files"} <= failed(copy)


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_without_end(copy, loss):  # noqa: F811
    """A log may hold it, and is no run of a record."""
    log = first_log(copy)
    rewrite_log(log, lambda e: [line.update(loss=loss) for line in e if line["kind"] in ("val", "end")])
    assert not runlog.read_run(log).ok and "end" in failed(copy)


def test_the_first_validation_shard_is_the_tracks(finished):  # noqa: F811
    """Not the last one of the folder."""
    folder = finished[0] / "data/sample"
    other = folder / "sample_val_000001.bin"
    other.write_bytes((folder / "sample_val_000000.bin").read_bytes())
    try:
        assert list(record.data_manifest(record.TRACKS["smoke"], folder)) == ["sample_train_000001.bin", "sample_val_000000.bin"]
    finally:
        other.unlink()


def test_a_slowed_parent_is_shown(copy):  # noqa: F811
    """It makes a gain, and the record stands; the warning leads to a retime."""
    assert "WARNING" not in said(copy, "gain")

    def slow(e):
        for line in e:
            for name in {"ms_per_step", "ms"} & line.keys():
                line[name] = round(line[name] * 1.2, 3)
        first, second = [line for line in e if line["kind"] == "clock"]
        middle = first["start_ms"] + 1.2 * (first["end_ms"] - first["start_ms"])
        end = first["start_ms"] + 1.2 * (second["end_ms"] - first["start_ms"])
        first["end_ms"] = second["start_ms"] = middle
        second["end_ms"] = end
        event(e, "warm")["seconds"] -= 2  # or the next run would have started before this one's end

    for path in logs(copy, "b"):
        rewrite_log(path, slow)
    assert failed(copy) == set() and re.search(r"WARNING: arm b took \+(19.9|20.0|20.1)% beside the time of its own record",
                                               said(copy, "gain"))


# ---- the record ------------------------------------------------------------------------------------------------------
def old_record(tmp_path):
    """A copy of a record before the rule."""
    source = ROOT / "records/2026-11-21_recall-1gpu"
    (tmp_path / "records").mkdir()
    return Path(shutil.copytree(source, tmp_path / "records" / source.name))


def test_an_old_record_rewritten(tmp_path):
    """Its losses lowered and every hash repaired: the list of records before the rule has another SHA-256.

    Nor can one be added.
    """
    path = old_record(tmp_path)
    assert "schema" not in failed(path)
    rewrite_log(first_log(path), lambda e: (e[-1].update(loss=3.1), event([x for x in e if x.get("final")],
                                                                          "val").update(loss=3.1)))
    assert failed(path) == {"schema"}
    assert "expected schema 2, or a record as before-the-rule.sha256 lists it" in said(path, "schema")
    other = path.rename(path.with_name("2026-11-21_other"))
    assert failed(other) == {"schema"}


def test_a_script_edited_after_its_runs(copy):  # noqa: F811
    script = copy / "train_gpt.py"
    script.write_text(script.read_text() + "# a harmless comment\n")
    assert "script" in failed(copy)
    edit_json(copy / "record.json", lambda r: r["scripts"].update(a=hashlib.sha256(script.read_bytes()).hexdigest()))
    assert {"plan", "settings"} <= failed(copy)


def test_seeds_that_were_chosen(copy):  # noqa: F811
    def choose(r):
        r["plan"].update(seeds=[1, 2, 3], order=record.plan_order([1, 2, 3], "ab"))
        r["plan"]["id"] = record.plan_id(r, copy.name)

    edit_json(copy / "record.json", choose)
    assert "plan" in failed(copy) and "expected the seeds that follow from the plan" in said(copy, "plan")


def test_a_record_copied_under_another_name(copy):  # noqa: F811
    twin = Path(shutil.copytree(copy, copy.with_name(copy.name.replace("child", "twin"))))
    assert failed(twin) == {"plan", "files"} and failed(copy) == set()


def test_a_copy_of_a_record_before_the_rule(tmp_path):
    """The id of its plan does not count the name: the list tells which of the two is the first."""
    first = tmp_path / "2026-11-25_lean-1gpu"
    shutil.copytree(ROOT / "records" / first.name, first)
    shutil.copytree(first, tmp_path / "2026-11-25_copied-1gpu")
    assert failed(tmp_path / "2026-11-25_copied-1gpu") == {"schema"} and "files" not in failed(first)


@pytest.mark.parametrize("change",
                         [lambda e: e[0]["settings"].update(length="0.5"),
                          lambda e: e[0]["settings"].update(val_every="10"),
                                    lambda e: e[0]["settings"].update(no_fp8="True")])
def test_a_shortened_run_or_other_options(copy, change):  # noqa: F811
    rewrite_log(first_log(copy), change)
    assert failed(copy) == {"settings"}


def test_a_systems_record_that_changes_the_model(copy):  # noqa: F811
    edit_json(copy / "record.json", lambda r: r.update(kind="systems"))
    assert verify.evaluate((verify.check_kind,), verify.Context(record.load(copy), {}))[0].ok
    script = copy / "train_gpt.py"
    script.write_text(script.read_text().replace("# 8. Model\n", "# 8. Model\n", 1).replace("RATE = 1.0", "RATE = 1.1"))
    assert "kind" in failed(copy) and "found changes of RATE" in said(copy, "kind")


@pytest.mark.parametrize("change", [
    "if RATE:\n    RATE = 1.1\n",
    "for RATE in (1.1,):\n    pass\n",
    "from math import pi as RATE\n",
    "print(RATE := 1.1)\n",
    "try:\n    def RATE():\n        pass\nfinally:\n    pass\n",
])
def test_a_systems_record_that_hides_a_change(copy, change):  # noqa: F811
    """In another section, and in what is no definition by itself."""
    edit_json(copy / "record.json", lambda r: r.update(kind="systems"))
    script = copy / "train_gpt.py"
    script.write_text(script.read_text().replace("def sums(paths):", f"{change}\ndef sums(paths):"))
    assert "found changes of RATE" in said(copy, "kind")


def test_a_systems_record_whose_loss_takes_back_its_gain(copy, monkeypatch):  # noqa: F811
    """As where the optimizer or the validation was changed. The stand-in is 2 % faster, worth .004."""
    for log in logs(copy):
        loss = runlog.read_run(log).loss + 0.0045
        # noqa: B023
        rewrite_log(log, lambda e: [line.update(loss=loss) for line in e if line["kind"] in ("val", "end")])
    assert not claim(copy, {}, "systems", monkeypatch)["gain"].ok
    assert "at the parent's loss +" in said(copy, "gain")


def halve(events):
    for line in events:
        if line["kind"] == "step":
            line["tokens"] //= 2


def begin_late(events):
    """As a run that went on from a checkpoint would log it, with all the time in its steps."""
    steps = [line for line in events if line["kind"] == "step"]
    events[0]["first_step"] = 40
    for line in steps[:5]:
        events.remove(line)
    for line in steps[5:]:
        line["ms_per_step"] *= 80 / 40


@pytest.mark.parametrize("change, text", [
    (halve, "expected 512 tokens up to step 1, found 256"),
    (lambda e: e[0]["preset"]["stages"][0].update(batch_tokens=5120), "expected a line for each stage"),
    (lambda e: event(e, "stage").update(batch_tokens=5120), "expected a line for each stage"),
    (lambda e: e.remove(event(e, "stage")), "expected a line for each stage"),
    (begin_late, "expected a log from the first step on, found one that goes on after step 40"),
    (lambda e: e.remove(event(e, "step")), "expected the first step and every 10th in the log, found none between 0"),
    (lambda e: e.remove([line for line in e if line["kind"] == "step"][3]), "found none between 20 and 40"),
    (lambda e: e.insert(-3, {"kind": "val", "step": 60, "loss": 5.1, "final": False}), "found 2"),
])
def test_a_log_that_contradicts_its_schedule(copy, change, text):  # noqa: F811
    rewrite_log(first_log(copy), change)
    assert "end" in failed(copy)
    run = runlog.read_run(first_log(copy))
    assert any(text in problem for problem in verify.schedule_problems(run))


# ---- what only a rerun tells -----------------------------------------------------------------------------------------
def test_invented_losses_pass_verification_and_not_an_audit(copy, capsys):  # noqa: F811
    data = ROOT / "data/sample"
    shutil.copytree(data, copy.parents[1] / "data/sample", dirs_exist_ok=True)
    log = logs(copy)[0]
    seed = int(log.stem.partition("-s")[2])

    def invent(e):
        for line in e:
            if line["kind"] == "step":
                line["train_loss"] -= 0.06

    real = log.read_bytes()
    rewrite_log(log, invent)
    assert failed(copy) == set()
    log.write_bytes(real)
    rewrite_log(log, lambda e: None)
    assert failed(copy) == set()
    assert audited(copy, seed) == 1, "other shards than the log's"
    assert "expected the shards that the log names, found others" in capsys.readouterr().out


def audited(path, seed, **options):
    return audit.audit(path, options.get("data"), seed, options.get("arm", "a"), 50)


def test_audit_compares_what_the_script_logs_now(finished, copy, capsys):  # noqa: F811
    """To the last digit on equal GPUs, else within a tolerance, and it says so."""
    shutil.copytree(finished[0] / "data", copy.parents[1] / "data")
    log = logs(copy)[0]
    seed = int(log.stem.partition("-s")[2])
    assert audited(copy, seed) == 0
    text = capsys.readouterr().out
    assert "6 losses as logged" in text and "not to the digit (a CPU, whose sums depend on its threads)" in text
    rewrite_log(log,
                lambda e: [line.update(train_loss=line["train_loss"] - 0.06) for line in e if line["kind"] == "step"])
    assert failed(copy) == set() and audited(copy, seed) == 1, "invented, all rechained: only a rerun tells"
    assert "DIFFERS" in capsys.readouterr().out
    assert audited(copy, record.load(copy).record["plan"]["seeds"][1], arm="b") == 0
    with pytest.raises(runlog.Failure, match="expected one of arm a and seed 5, found none"):
        audited(copy, 5)
    assert not (copy / "running").exists() and failed(copy) == set(), "the record is as it was"


def test_audit_wants_the_log_that_the_record_has(finished, copy):  # noqa: F811
    """Whole, and as it was when it was filed."""
    shutil.copytree(finished[0] / "data", copy.parents[1] / "data")
    log = logs(copy)[0]
    seed = int(log.stem.partition("-s")[2])
    log.write_text(log.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(runlog.Failure, match="expected sha256 .* as in record.json"):
        audited(copy, seed)
    edit_json(copy / "record.json",
              lambda r: r["runs"].update({log.name: hashlib.sha256(log.read_bytes()).hexdigest()}))
    with pytest.raises(runlog.Failure, match="expected an unbroken chain of lines"):
        audited(copy, seed)


def test_audit_tells_seeds_apart_by_their_start(finished, copy, capsys):  # noqa: F811
    """On a CPU too, where losses need not be equal; not on another device, or on several."""
    shutil.copytree(finished[0] / "data", copy.parents[1] / "data")
    log = logs(copy)[0]
    seed = int(log.stem.partition("-s")[2])
    rewrite_log(log, lambda e: event(e, "warm").update(state="0" * 16))
    assert audited(copy, seed) == 1
    assert "start: expected the weights of which the log has the hash, found others" in capsys.readouterr().out
    rewrite_log(log, lambda e: e[0].update(world=2))
    assert audited(copy, seed) == 0
    rewrite_log(log, lambda e: e[0].update(world=1, device="another"))
    assert audited(copy, seed) == 0


def test_audit_runs_the_script_that_ran(copy):  # noqa: F811
    (copy / "train_gpt.py").write_text(FAKE + "# edited\n")
    with pytest.raises(runlog.Failure, match="^script of arm a, .*; fix: restore the script that ran"):
        audit.audit(copy, None, None, "a", 50)
    (copy / "train_gpt.py").unlink()
    with pytest.raises(runlog.Failure, match="^script of arm a, .*found no file"):
        audit.audit(copy, None, None, "a", 50)


def test_what_ends_audit_stops_its_training(copy, monkeypatch):  # noqa: F811
    """A closed terminal too: the training is in a session of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(audit, "audit", lambda *_: int(signal.getsignal(signal.SIGTERM) != signal.default_int_handler))
    main = runpy.run_path(str(ROOT / "records/__main__.py"), run_name="records")["main"]
    try:
        assert main(["audit", str(copy)]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("output, told", [
    ("", "no output"), ("\nTraceback ...\nKeyError: 3\n", "KeyError: 3"),
    ("train_gpt: data: expected shards, found none\n\n====\nRoot cause\n====\n",
     "train_gpt: data: expected shards, found none")])
def test_audit_says_what_the_trainer_said(output, told):
    """And not the last line of what torchrun says about it."""
    assert audit.last_words(output) == told


@pytest.mark.parametrize("gpus, processes", [(0, 4), (1, 1), (3, 2), (4, 4), (8, 4)])
def test_audit_takes_the_gpus_that_there_are(monkeypatch, gpus, processes):
    """Of a record on four; without a GPU, four processes of a CPU."""
    monkeypatch.setattr(audit, "query_gpus", lambda query: ["a GPU"] * gpus)
    words = ["torchrun", "--nproc_per_node=4", "train_gpt.py"]
    assert audit.on_gpus_here(words, 4) == ["torchrun", f"--nproc_per_node={processes}", "train_gpt.py"]


@pytest.mark.parametrize("gpus, shift, ok", [
    (["x"], 0, True), (["x"], 1e-6, False), ([], 1e-6, True), ([], 0.06, False), (["x", "y"], 0.002, True),
    (["x", "y"], 0.06, False)])
def test_one_gpu_repeats_to_the_digit(gpus, shift, ok):
    import numpy as np
    head = {"device": "H200", "world": len(gpus) or 1, "torch": "2", "triton": "3", "cuda": "13", "gpus": gpus}
    logged, found = (runlog.Run(Path(), "ok", head, train=np.array([(1, 1.0, 10.0), (25, 2.0, 9.0 + more)]))
                     for more in (0, shift))
    exact = not audit.differences(logged.head, found.head)
    rows = audit.compared(logged, found, exact)
    assert exact == (len(gpus) == 1) and [row.step for row in rows] == [1, 25] and all(row.ok for row in rows) == ok
    assert audit.differences(head, head | {"device": "H100"})[0] == "device H100 for H200"


def test_the_tolerance_holds_between_numbers_of_gpus():
    """Records that ran one script and seed on one, two and four GPUs: unequal hardware, as an audit compares it."""
    found = {}
    for path in record.all_folders():
        folder = record.load(path)
        for run in folder.runs("a"):
            found.setdefault((folder.record["scripts"]["a"], run.head["seed"]), []).append(run)
    pairs = [runs for runs in found.values() if len(runs) == 2]
    rows = [row for a, b in pairs for row in audit.compared(a, b, False) if row.step <= 50]
    assert len(pairs) > 8 and len(rows) > 24 and all(row.ok for row in rows)
    assert max(abs(row.logged - row.found) for row in rows) > 1e-3, "and is needed"


def test_invented_times_pass_verification(copy):  # noqa: F811
    """All of a run's times shortened alike. Only a retime tells, and the README says so."""
    def hurry(e):
        for line in e:
            for name in {"ms_per_step", "ms"} & line.keys():
                line[name] = round(line[name] * 0.9, 4)
        first, second = [line for line in e if line["kind"] == "clock"]
        middle = first["start_ms"] + 0.9 * (first["end_ms"] - first["start_ms"])
        first["end_ms"] = second["start_ms"] = middle
        second["end_ms"] = first["start_ms"] + e[-1]["ms"]

    for path in logs(copy):
        rewrite_log(path, hurry)
    assert failed(copy) == set()
    text = (ROOT / "records/README.md").read_text()
    assert "| invented times, all rechained | passes `verify`; needs a retime |" in text


# ---- the base --------------------------------------------------------------------------------------------------------
def git(root, *words, when=None):
    date = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when} if when else {}
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(root), "GIT_CONFIG_GLOBAL": "/dev/null", **date}
    for name in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{name}_NAME": "a", f"GIT_{name}_EMAIL": "a@b"}
    subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, env=environment)


@pytest.fixture
def repository(copy):  # noqa: F811
    """The finished records in git, on a branch main."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    root = copy.parents[1]
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-qm", "base")
    git(root, "checkout", "-qb", "work")
    return root


def guarded(root, capsys):
    status = guard.guard("main", root)
    return status, capsys.readouterr().out


def test_guard_lets_unchanged_records_pass(repository, copy, capsys):  # noqa: F811
    readme = copy / "README.md"
    readme.write_text(readme.read_text() + "\nMore of what failed.\n")
    assert guarded(repository, capsys) == (0,
                                           f"2 records as in {head_of(repository)}, 0 new ones planned before they "
                                           f"ran\n")


def test_guard_in_a_folder_of_a_repository(copy, tmp_path, capsys):  # noqa: F811
    """As where the project is part of a larger one."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    root = tmp_path / "larger" / "speedrun"
    root.mkdir(parents=True)
    shutil.move(copy.parent, root / "records")
    git(tmp_path / "larger", "init", "-q", "-b", "main")
    git(tmp_path / "larger", "add", ".")
    git(tmp_path / "larger", "commit", "-qm", "base")
    assert guarded(root, capsys)[0] == 0
    (root / "records" / copy.name / "train_gpt.py").write_text("x")
    status, text = guarded(root, capsys)
    assert status == 1 and "train_gpt.py as in the base" in text


def head_of(root):
    return subprocess.run(["git", "rev-parse", "main"], cwd=root, capture_output=True, text=True,
                          check=True).stdout[:12]


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("rewrite, words", [
    (lambda path: rewrite_log(first_log(path), lambda e: e[-1].update(ms=e[-1]["ms"] - 1)),
     "expected its runs and means as in the base"),
    (lambda path: (path / "runs/a-s1.jsonl").write_text("{}\n"), "runs/a-s1.jsonl as in the base, found it added"),
    (lambda path: first_log(path).unlink(), "as in the base, found it changed or removed"),
    (lambda path: edit_json(path / "record.json", lambda r: r.update(runs=[])), "found it removed or unreadable"),
    (lambda path: (path / "record.json").write_text("[" * 100_000), "found it removed or unreadable"),
    (lambda path: edit_json(path / "record.json", lambda r: r["plan"].update(seeds=[1, 2])),
     "expected the plan of the base"),
    (lambda path: edit_json(path / "record.json", lambda r: r.update(date="2020-01-01")),
     "expected the plan of the base"),
    (lambda path: (path / "train_gpt.py").write_text("x"), "train_gpt.py as in the base"),
    (lambda path: record.abandon(path, "it was a fluke"), "expected a finished record to stay one"),
    (shutil.rmtree, "expected the record, found it removed or unreadable: abandoned plans stay"),
])
def test_guard_refuses_a_rewritten_record(repository, copy, capsys, rewrite, words, committed):  # noqa: F811
    """What `verify` cannot see once every hash is repaired, the base branch shows: committed or not."""
    rewrite(copy)
    if committed:
        git(repository, "add", "-A", "-f", ".")
        git(repository, "commit", "-qm", "a small correction")
    status, text = guarded(repository, capsys)
    assert status == 1 and words in text and copy.name in text


def planned(repository, finished):  # noqa: F811
    """A plan in the repository, without runs and not yet committed."""
    if not (repository / "data").exists():
        shutil.copytree(finished[0] / "data", repository / "data")
    (repository / "train_gpt.py").write_text(FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 96.0"))
    return make(repository, "idea")


LONG_AGO, LATER = "2020-01-01T00:00:00+00:00", "2099-01-01T00:00:00+00:00"


def test_guard_wants_the_plan_before_the_runs(repository, finished, copy, capsys):  # noqa: F811
    path = planned(repository, finished)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan", when=LONG_AGO)
    assert guarded(repository, capsys)[0] == 0
    runner.run_plan(path, None)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "runs")
    assert guarded(repository, capsys)[0] == 0 and failed(path) == set()


@pytest.mark.parametrize("practice", [True, False])
def test_run_warns_of_a_plan_without_a_commit(repository, finished, monkeypatch, capsys, practice):  # noqa: F811
    """But not in practice, whose folders nobody submits."""
    def end(*_):
        raise InterruptedError

    path = planned(repository, finished)
    monkeypatch.setattr(runner, "make_runs", end)
    monkeypatch.setattr(runner, "check_ready", lambda *_: None)
    monkeypatch.setitem(record.TRACKS, "smoke", record.TRACKS["smoke"]._replace(practice=practice))
    with pytest.raises(InterruptedError):
        runner.run_plan(path, None)
    assert ("is not committed" in capsys.readouterr().out) != practice
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan")
    with pytest.raises(InterruptedError):
        runner.run_plan(path, None)
    assert "is not committed" not in capsys.readouterr().out


@pytest.mark.parametrize("when, together, words", [
    (None, True, "expected the plan's commit before its runs, found both in"),
    (LATER, False, "expected the plan's commit before its first run, found 2099"),
    (None, None, "expected its plan in a commit of its own, found runs and no commit"),
])
def test_guard_refuses_a_plan_that_came_later(repository, finished, copy, capsys, when, together, words):  # noqa: F811
    path = planned(repository, finished)
    if together is False:
        git(repository, "add", "records")
        git(repository, "commit", "-qm", "plan", when=when)
    runner.run_plan(path, None)
    if together is not None:
        git(repository, "add", "records")
        git(repository, "commit", "-qm", "runs")
    status, text = guarded(repository, capsys)
    assert status == 1 and words in text


def test_guard_refuses_runs_that_join_a_later_plan_of_the_base(repository, finished, copy, capsys):  # noqa: F811
    """The plan comes to the base first, and then the runs, which had been made before it."""
    path = planned(repository, finished)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan", when=LATER)
    git(repository, "branch", "-f", "main")
    runner.run_plan(path, None)
    status, text = guarded(repository, capsys)
    assert status == 1 and "expected the plan's commit before its first run, found 2099" in text


def test_code_beside_a_script(copy):  # noqa: F811
    """Python would look there first for a module of that name."""
    (copy / "secrets.py").write_text("")
    assert failed(copy) == {"script"} and "expected no code but train_gpt.py, and its runs, found secrets.py" in said(copy, "script")
    (copy / "secrets.py").unlink()
    (copy / "secrets").mkdir()
    assert failed(copy) == {"script"}
    (copy / "secrets").rmdir()
    (copy / "unfinished").mkdir()
    (copy / "unfinished" / "secrets.py").write_text("")
    assert failed(copy) == {"script"}


@pytest.mark.parametrize("name", ["train_gpt.py", "runs"])
def test_what_a_record_only_links_to(copy, tmp_path, name):  # noqa: F811
    """It would change with what is elsewhere."""
    (copy / name).rename(tmp_path / name)
    (copy / name).symlink_to(tmp_path / name)
    assert failed(copy) == {"script"} and f"found a link {name}" in said(copy, "script")


def test_a_start_in_nobodys_time_zone(copy):  # noqa: F811
    """The reader's would decide whether runs were at once."""
    rewrite_log(first_log(copy), lambda e: e[0].update(started=e[0]["started"][:19]))
    assert runlog.span(runlog.read_run(first_log(copy))) is None


def test_a_log_that_cannot_be_read_is_one_records_failure(copy):  # noqa: F811
    log = first_log(copy)
    log.unlink()
    log.mkdir()
    assert failed(copy) == {"schema"} and "expected a readable file" in said(copy, "schema")


def test_a_script_of_another_python_is_no_systems_record(copy):  # noqa: F811
    edit_json(copy / "record.json", lambda r: r.update(kind="systems"))
    (copy / "train_gpt.py").write_text("def\n")
    assert "kind" in failed(copy)


def test_a_readme_in_another_encoding(copy):  # noqa: F811
    readme = copy / "README.md"
    readme.write_bytes(readme.read_bytes() + "Größe".encode("latin-1"))
    assert failed(copy) == {"means"} and "expected text in UTF-8" in said(copy, "means")


def test_what_new_left_behind_is_no_record(copy):  # noqa: F811
    shutil.copytree(copy, copy.with_name(".new-1"))
    assert copy.with_name(".new-1") not in record.all_folders(copy.parent)


def test_a_field_that_is_there_twice(copy):  # noqa: F811
    """Of which json takes the last one, and a reader the first."""
    file = copy / "record.json"
    file.write_text(file.read_text().replace("{", '{"track": "speedrun", ', 1))
    assert failed(copy) == {"schema"} and "the field track twice" in said(copy, "schema")


def test_a_parent_that_was_given_up(copy):  # noqa: F811
    edit_json(copy.parent / record.load(copy).record["parent"] / "record.json", lambda r: r.update(abandoned="too slow"))
    assert failed(copy) == {"parent"} and "expected a finished parent" in said(copy, "parent")


def test_a_retime_of_something_else(finished, copy):  # noqa: F811
    """It is judged by the target of what it repeats, so it may not choose that."""
    root = copy.parents[1]
    shutil.copytree(finished[0] / "data", root / "data")
    again = make(root, "again", track_name=None, n=None, retime=copy)
    assert failed(again) == {"runs"}

    def to_another_kind(r):
        r["kind"] = "systems"
        r["plan"]["id"] = record.plan_id(r, again.name)

    edit_json(again / "record.json", to_another_kind)
    assert f"expected the kind of {copy.name}, found others" in said(again, "plan")
    record.abandon(copy, "no gain")
    assert "expected the retime of a finished record, found one that was abandoned" in said(again, "plan")
    with pytest.raises(runlog.Failure, match="expected a finished record, found one that was abandoned"):
        make(root, "twice", track_name=None, n=None, retime=copy)


def test_an_abandoned_script_tried_again(finished, copy):  # noqa: F811
    """Without saying so, at the whole level."""
    root = copy.parents[1]
    shutil.copytree(finished[0] / "data", root / "data")
    shutil.copy(copy / "train_gpt.py", root)
    parent = record.load(copy).record["parent"]
    second = make(root, "second", parent=parent)
    assert failed(second) == {"runs"}
    record.abandon(copy, "no gain")
    assert f"expected the restart of {copy.name}" in said(second, "plan")
    with pytest.raises(runlog.Failure, match=f"abandoned plan whose runs were seen, found {copy.name}; fix: --restart"):
        make(root, "third", parent=parent)


def test_a_restart_of_another_plan_is_none_of_this_script(finished, copy):  # noqa: F811
    """Nor may a plan be restarted twice, however the file of the first restart is written."""
    root = copy.parents[1]
    shutil.copytree(finished[0] / "data", root / "data")
    parent = record.load(copy).record["parent"]
    (root / "train_gpt.py").write_text(FAKE.replace("RATE = 1.0", "RATE = 1.2"))
    other = make(root, "other", parent=parent)
    record.abandon(other, "no time")
    record.abandon(copy, "no gain")
    shutil.copy(copy / "train_gpt.py", root)
    with pytest.raises(runlog.Failure, match=f"abandoned plan whose runs were seen, found {copy.name}; fix: --restart"):
        make(root, "third", parent=parent, restart=other.name)

    again = make(root, "again", parent=parent, restart=copy.name)
    file = again / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":")))
    with pytest.raises(runlog.Failure, match=f"one that {again.name} restarts"):
        make(root, "once-more", parent=parent, restart=copy.name)


def test_a_plan_that_was_given_up_later_leaves_the_record_before(copy):  # noqa: F811
    """As one for more GPUs, of the same script and on the same day."""
    later = copy.with_name(f"{copy.name}-again")
    shutil.copytree(copy, later)
    for log in logs(later):
        rewrite_log(log, lambda e: e[0].update(started="2099-01-01T00:00:00.000Z"))
    record.abandon(later, "the machine was given back")
    assert "plan" not in failed(copy)
    record.abandon(copy, "no gain")
    second = record.load(later)
    assert record.must_restart(copy.parent, second.record, later.name, second.started) == copy.name


@pytest.mark.parametrize("shards", [
    {"sample_train_000000.bin": "2" * 64, "sample_train_000001.bin": None, "sample_val_000000.bin": None},
    {"sample_train_000001.bin": None, "sample_val_000001.bin": "1" * 64},
])
def test_shards_of_other_names_than_the_first_records(copy, shards):  # noqa: F811
    """A further one in front, or another validation shard, on a corpus that is not pinned."""
    data = record.load(copy).record["data"]
    context = verify.Context(record.load(copy), {})
    context.folder.record["data"] = {name: digest or data[name] for name, digest in shards.items()}
    assert "expected shards as in" in next(verify.corpus_problems(context))


@pytest.mark.parametrize("parent", ["..", ".slow"])
def test_a_parent_that_nobody_lists(copy, parent):  # noqa: F811
    edit_json(copy / "record.json", lambda r: r.update(parent=parent))
    with pytest.raises(runlog.Failure, match="parent"):
        record.load(copy)


def test_a_parent_without_runs(copy):  # noqa: F811
    edit_json(copy.parent / record.load(copy).record["parent"] / "record.json", lambda r: r.update(runs={}))
    assert "expected a finished parent" in said(copy, "parent")


def test_a_record_under_the_rule_from_before_it(copy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(verify, "RULE_SINCE", "2999-01-01")
    assert "expected a date from 2999-01-01 on" in said(copy, "name")


def test_an_abandoned_retime_leaves_what_it_repeats(finished, copy):  # noqa: F811
    root = copy.parents[1]
    shutil.copytree(finished[0] / "data", root / "data")
    again = make(root, "again", track_name=None, n=None, retime=copy)
    shutil.copytree(copy / "runs", again / "runs")
    edit_json(again / "record.json", lambda r: r.update(runs=record.load(copy).record["runs"]))
    record.abandon(again, "another GPU")
    assert "plan" not in failed(copy)


@pytest.mark.parametrize("names, words", [
    (("val_000000", "train_000050", "train_000051"), "numbered from 0 or 1 on, found 50 to 51"),
    (("val_000000", "train_000001", "train_000003"), "numbered from 0 or 1 on, found 1 to 3"),
])
def test_shards_from_the_first_on(copy, names, words):  # noqa: F811
    """Of a corpus that is not pinned, as FineWeb before its first record; and no shard counts twice."""
    context = verify.Context(record.load(copy), {})
    context.folder.record["data"] = {f"sample_{name}.bin": f"{number:064x}" for number, name in enumerate(names)}
    assert words in next(verify.corpus_problems(context))
    context.folder.record["data"] = {f"sample_{name}.bin": "0" * 64 for name in ("val_000000", "train_000001")}
    assert "found one twice" in next(verify.corpus_problems(context))


def test_guard_refuses_a_plan_changed_between_its_commit_and_its_runs(repository, finished, copy, capsys):  # noqa: F811
    path = planned(repository, finished)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan", when=LONG_AGO)
    shutil.rmtree(path)
    runner.run_plan(make(repository, "idea", n=2), None)
    status, text = guarded(repository, capsys)
    assert status == 1 and "expected the plan of" in text


def test_a_dropped_plan(repository, finished, copy, capsys):  # noqa: F811
    """A plan that the base has must stay, and be abandoned in sight; then its runs stay too."""
    path = planned(repository, finished)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan", when=LONG_AGO)
    git(repository, "branch", "-f", "main")
    record.abandon(path, "it diverges")
    assert guarded(repository, capsys)[0] == 0 and failed(path) == set()
    git(repository, "commit", "-qam", "abandoned")
    git(repository, "branch", "-f", "main")
    edit_json(path / "record.json", lambda r: r.update(abandoned=None))
    assert "expected it abandoned as in the base" in guarded(repository, capsys)[1]
    shutil.rmtree(path)
    assert "found it removed or unreadable" in guarded(repository, capsys)[1]


def test_a_name_that_git_quotes(repository, copy, capsys, monkeypatch):  # noqa: F811
    """`new` makes none, so `verify` lets none pass; and `guard` sees that one is dropped."""
    path = copy.parent / f"{copy.name}-größer"
    shutil.copytree(copy, path)
    edit_json(path / "record.json", lambda r: r["plan"].update(id=record.plan_id(r, path.name)))
    assert "name" in failed(path) and f"expected {copy.name[:10]}_NAME" in said(path, "name")
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "one more")
    git(repository, "branch", "-f", "main")
    shutil.rmtree(path)
    status, text = guarded(repository, capsys)
    assert status == 1 and f"{path.name}: expected the record, found it removed" in text


def test_guard_needs_the_whole_history_and_git(repository, finished, copy, tmp_path, monkeypatch):  # noqa: F811
    """The first commit of a shallow clone seems to add all that it has: the plan would seem to come after its runs."""
    path = planned(repository, finished)
    git(repository, "add", "records")
    git(repository, "commit", "-qm", "plan", when=LONG_AGO)
    git(repository, "commit", "-q", "--allow-empty", "-m", "later", when=LATER)
    shallow = tmp_path / "shallow"
    git(repository, "clone", "-q", "--depth", "1", f"file://{repository}", str(shallow))
    assert guard.guard("HEAD", shallow) == 0
    runner.run_plan(path, None)
    shutil.copytree(path, shallow / "records" / path.name, dirs_exist_ok=True)
    with pytest.raises(runlog.Failure, match="^repository: .*found a shallow clone; fix: git fetch --unshallow"):
        guard.guard("HEAD", shallow)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(runlog.Failure, match="^git: expected it installed, found none; fix: install git"):
        guard.guard("main", repository)


def test_guard_keeps_the_list_of_records_before_the_rule(repository, copy, capsys):  # noqa: F811
    """A record in the old schema could join it otherwise."""
    listed = repository / "records" / "before-the-rule.sha256"
    listed.write_text("0  2026-11-27_late\n")
    git(repository, "add", "records")
    status, text = guarded(repository, capsys)
    assert status == 1 and "before-the-rule.sha256: expected it as in the base" in text


def test_guard_reads_names_that_are_no_utf_8(repository, copy, capsys):  # noqa: F811
    Path(os.fsdecode(os.fsencode(copy) + b"/caf\xe9.txt")).write_text("x")
    git(repository, "add", "-A", "-f", "records")
    git(repository, "commit", "-qm", "a name")
    git(repository, "branch", "-f", "main")
    assert guarded(repository, capsys)[0] == 0


def test_guard_names_a_base_that_is_not_there(repository):
    with pytest.raises(runlog.Failure,
                       match="^git merge-base .*expected a repository with that commit, found .*; fix: fetch the base"):
        guard.guard("nowhere", repository)


def test_ci_calls_guard():
    text = (ROOT / ".ci/run").read_text()
    assert re.search(r'records guard "\$base"', text)


def test_the_readme_lists_them():
    text = (ROOT / "records/README.md").read_text()
    table = text.partition("| forgery | found |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 25 and all(re.search("refused|shown|passes", row) for row in table)
