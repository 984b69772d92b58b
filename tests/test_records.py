"""python records: a small repository with a stand-in for the trainer, which writes logs as the real one does, is planned, run and verified;
then every way to tamper with a record must be found."""

import csv
import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
import resource
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import codediff  # noqa: E402
import lanes  # noqa: E402
import record  # noqa: E402
import report  # noqa: E402
import runlog  # noqa: E402
import runner  # noqa: E402
import starts  # noqa: E402
import stats  # noqa: E402
import tracks  # noqa: E402
from verify import verify  # noqa: E402

pytestmark = pytest.mark.fast

QUERY_GPUS = record.query_gpus  # before a fixture replaces it

FAKE = '''"""Stand-in: writes the log of a run whose loss and time follow from the seed."""
# ====================================================================================
# 1. Imports, constants
# ====================================================================================
import argparse, datetime, hashlib, json, os, random, sys, time
from pathlib import Path

LOSS, MS = 5.0, 100.0

# ====================================================================================
# 2. Configuration
# ====================================================================================
STAGES = [{"steps": 40, "batch_tokens": 512}, {"steps": 40, "batch_tokens": 1024}]

# ====================================================================================
# 8. Model
# ====================================================================================
# ====================================================================================
# 9. Data
# ====================================================================================
# ====================================================================================
# 10. Schedule: pure functions
# ====================================================================================
RATE = 1.0

# ====================================================================================
# 14. Main
# ====================================================================================
def sums(paths):
    text = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\\n" for p in paths)
    return hashlib.sha256(text.encode()).hexdigest()

parser = argparse.ArgumentParser()
for name in ("preset", "data", "seed", "log-dir", "length", "stop-after"):
    parser.add_argument("--" + name, default=argparse.SUPPRESS)
options = parser.parse_args()
chance, chain = random.Random(options.seed + str(LOSS)), ""
state = hashlib.sha256(Path(__file__).read_bytes() + options.seed.encode()).hexdigest()[:16]
last = int(vars(options).get("stop_after", 80))
folder = Path(options.log_dir)
folder.mkdir(parents=True, exist_ok=True)
file = (folder / f"{options.preset}-w1-s{options.seed}-{chance.randrange(16**6):06x}.jsonl").open("x")

# The time that the logs tell is longer than what this takes: each run starts where the one before on the same GPUs ended.
visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("FAKE_GPUS") or "none").split(",")
clocks = [folder.parent / f"clock-{gpu}" for gpu in visible] if folder.parent.name == "running" else []
began = max(time.time(), *(float(clock.read_text()) for clock in clocks if clock.exists()), 0)

def line(kind, **fields):
    global chain
    text = json.dumps({"kind": kind, **fields})
    chain = hashlib.sha256((chain + text).encode()).hexdigest()[:16]
    file.write(text[:-1] + ', "chain": "' + chain + '"}\\n')
    file.flush()

data = Path(options.data)
train = sorted(data.glob("*_train_*.bin"))
line("head", started=datetime.datetime.fromtimestamp(began, datetime.UTC).isoformat(), preset={"name": options.preset, "val_tokens": 8192, "stages": STAGES, "log_every_steps": 10}, seed=int(options.seed), world=1,
     script=sums([Path(__file__)]), data=sums([*train, *data.glob("*_val_*.bin")]), shards=[p.name for p in train],
     settings=vars(options), parameters={"dense": 1234567, "sparse": 4567890123}, machine="m1", gpus=[], device="fake", torch="2", triton=None, python="3")
cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "compiled"
start = 10000.0 if cache.exists() else 70000.0
cache.parent.mkdir(parents=True, exist_ok=True)
cache.touch()
line("warm", seconds=start / 1000 - 1, graphs=12, state=state)
# a noise of each script's own: with one for all, the differences of pairs could be equal, which no test can judge
ms, step = MS * (1 + 0.001 * random.Random(f"{options.seed} {MS}").random()), 0
tokens = 0
for stage in STAGES:
    line("stage", step=step, **stage, short_window_tokens=64, long_window_tokens=128, extension=False)
    begin = step
    for step in [*([] if begin else [1]), *range(begin + 10, min(begin + stage["steps"], last) + 1, 10)]:
        done = tokens + (step - begin) * stage["batch_tokens"]
        line("step", step=step, train_loss=LOSS + 4 * 0.95**step + 1e-9 * int(options.seed), tokens=done, ms_per_step=round(ms * stage["batch_tokens"] / 1024, 3))
    tokens += stage["steps"] * stage["batch_tokens"]
loss = round(LOSS + 0.002 * chance.random(), 6)
total = round(sum(s["steps"] * s["batch_tokens"] for s in STAGES) * ms / 1024, 1)
middle = start + total / 4
if LOSS != LOSS:
    line("end", state="failed: training loss", code=3)
    sys.exit(3)
line("val", step=80, loss=loss, final=True)
for clock in clocks:
    clock.write_text(str(began + (start + total) / 1000))
line("clock", on=True, reason="training", start_ms=start, end_ms=middle)
line("clock", on=True, reason="training", start_ms=middle, end_ms=start + total)
line("end", state="ok", loss=loss, ms=total, peak_memory_mib=None, train_hash="t1", val_hash="v1", recompiled=0)
'''


def shard(tokens):
    return struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + np.array(tokens, dtype="<u2").tobytes()


def plain_command(folder, key, data, *lane):
    """The planned command without torchrun, which needs seconds to start."""
    words = REAL_COMMAND(folder, key, data, *lane)
    return [sys.executable, *words[words.index("--preset") - 1:]]


REAL_COMMAND, REAL_DAY = runner.command, record.PARENTS_SINCE


def make_quick(patch, folder):
    patch.setattr(starts, "CACHES", folder / "caches")
    for name in (*starts.VARIABLES, *starts.CPU_SETTINGS):
        patch.delenv(name, raising=False)
    patch.setattr(runner, "command", plain_command)
    patch.setattr(runner, "POLL_SECONDS", 0.02)
    for module in (runner, record, starts, lanes):
        patch.setattr(module, "query_gpus", lambda query, *ids: [])
    for module in (starts, record):
        patch.setattr(module, "hardware_here", lambda world: f"{world} x fake")
    patch.setattr(record, "PARENTS_SINCE", "2000-01-01")  # whatever day it is


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    make_quick(monkeypatch, tmp_path)


def make_repository(path):
    """A root with the stand-in, its data and an empty records/."""
    (path / "records").mkdir(parents=True)
    (path / "train_gpt.py").write_text(FAKE)
    (path / "data/sample").mkdir(parents=True)
    (path / "data/sample/sample_train_000001.bin").write_bytes(shard([50256, 1, 2, 3]))
    (path / "data/sample/sample_val_000000.bin").write_bytes(shard([50256, 4, 5]))
    return path


def make(root, name, **options):
    return record.new(name, **{"track_name": "smoke", "n": 3, **options}, home=root / "records")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A repository with a baseline and a child that is 2 % faster, both run."""
    patch = pytest.MonkeyPatch()
    root = make_repository(tmp_path_factory.mktemp("finished"))
    make_quick(patch, root)
    base = make(root, "start")
    runner.run_plan(base, None)
    (root / "train_gpt.py").write_text(FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 98.0"))
    child = make(root, "child", parent=base.name)
    runner.run_plan(child, None)
    patch.undo()
    return root, base, child


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the child to tamper with, its parent beside it."""
    root, base, child = finished
    shutil.copytree(root / "records", tmp_path / "records")
    return tmp_path / "records" / child.name


def failed(path):
    return {check.name for check in verify(path) if not check.ok}


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rewrite_log(path, change):
    """Change the events of a log and cover the tracks: a new chain, the new hash and the new means in record.json and README."""
    events = [json.loads(row) for row in path.read_text().splitlines()]
    for event in events:
        del event["chain"]
    change(events)
    chain, rows = "", []
    for event in events:
        text = json.dumps(event)
        chain = hashlib.sha256((chain + text).encode()).hexdigest()[:16]
        rows.append(f'{text[:-1]}, "chain": "{chain}"}}\n')
    path.write_text("".join(rows))
    folder = record.load(path.parents[1])
    folder.record["runs"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if all(run.ok for arm in "ab" for run in folder.runs(arm)):
        folder.record["means"] = report.means(folder)
    record.write_record(folder.path, folder.record)
    report.write_numbers(folder)


def first_log(path, arm="a"):
    return sorted((path / "runs").glob(f"{arm}-*"))[0]


def event(events, kind):
    return next(e for e in events if e["kind"] == kind)


# ---------------------------------------------------------------------------------------------------------------------
# new, run, verify
# ---------------------------------------------------------------------------------------------------------------------
def test_new_writes_the_plan_before_any_run(tmp_path):
    root = make_repository(tmp_path)
    path = make(root, "idea", n=4)
    made = json.loads((path / "record.json").read_text())
    assert not record.schema_errors(made) and made["parent"] is None and made["kind"] == "baseline" and made["runs"] == made["means"] == {}
    assert made["scripts"]["a"] == hashlib.sha256(FAKE.encode()).hexdigest() == hashlib.sha256((path / "train_gpt.py").read_bytes()).hexdigest()
    assert len(set(made["plan"]["seeds"])) == 4 and made["plan"]["id"] == record.plan_id(made, path.name)
    assert made["schema"] == 2 and made["abandoned"] is None and made["plan"]["margin"] is None
    assert failed(path) == {"runs"}
    assert not list((root / "records").glob(".*"))


def test_arms_are_interleaved(finished):
    plan = record.load(finished[2]).record["plan"]
    arms, seeds = zip(*(key.split("-s") for key in plan["order"]))
    assert "".join(arms) == "abbaab" and list(map(int, seeds)) == [s for s in plan["seeds"] for _ in "ab"]
    started = [runlog.read_run(finished[2] / "runs" / f"{key}.jsonl").head["started"] for key in plan["order"]]
    assert started == sorted(started)


@pytest.mark.parametrize("options, words", [
    ({"name": "Bad Name"}, "record name"), ({"track_name": None}, "track"), ({"n": 2, "track_name": "sprint-webtext", "kind": "ml"}, "runs an arm"),
    ({"length": 0.0}, "length"), ({"length": math.nan}, "length"), ({"n": 0}, "runs an arm"), ({"n": 2_000_000}, "runs an arm"),
    ({"data": Path("nowhere")}, "data"), ({"parent": "missing"}, "record"), ({"kind": "systems"}, "parent of kind systems"),
])
def test_new_refuses_in_one_line_and_leaves_nothing(tmp_path, options, words):
    root = make_repository(tmp_path)
    with pytest.raises(runlog.Failure, match=rf"^{words}.*: expected .*, found .*; fix: ") as caught:
        make(root, **{"name": "idea", **options})
    assert caught.value.code == 2 and "\n" not in str(caught.value) and not list((root / "records").iterdir())


def grow(finished, copy, script=FAKE):
    """The repository of the copy, ready for further records, with a root script."""
    root = copy.parent.parent
    (root / "train_gpt.py").write_text(script)
    shutil.copytree(finished[0] / "data", root / "data")
    return root


def test_new_takes_the_best_record_of_the_hardware_as_parent(finished, copy, monkeypatch):
    root = grow(finished, copy, FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 120.0"))
    slow = make(root, "slow")
    assert record.load(slow).record["parent"] == copy.name
    assert record.load(make(root, "fourth")).record["parent"] == copy.name  # the third has no runs yet
    runner.run_plan(slow, None)
    assert record.load(make(root, "fifth")).record["parent"] == copy.name  # the third is newer, but slower
    monkeypatch.setitem(record.TRACKS, "smoke", record.TRACKS["smoke"]._replace(target_loss=4.99))
    lowest = min((copy, slow, copy.parent / finished[1].name), key=lambda path: record.load(path).record["means"]["a"]["loss"])
    (root / "train_gpt.py").write_text(FAKE + "# another script\n")  # whichever of them is the lowest
    assert record.load(make(root, "sixth")).record["parent"] == lowest.name  # where none meets the target, the lowest loss


def test_new_refuses_a_record_without_parent_where_there_is_one(finished, copy):
    """But the first on other hardware has none, and a retime has the parent, or none, of the record it repeats."""
    root = grow(finished, copy, FAKE + "# another script\n")
    for options in ({"parent": "none"}, {"kind": "baseline"}):
        words = rf"^parent: expected a record to beat, since {copy.name} is one of smoke on 1 x fake, found none; fix: "
        with pytest.raises(runlog.Failure, match=words) as caught:
            make(root, "alone", **options)
        assert caught.value.code == 2 and "\n" not in str(caught.value)
    assert record.load(make(root, "elsewhere", world=8)).record["parent"] is None
    assert record.load(make(root, "again", track_name=None, retime=copy.parent / finished[1].name)).record["parent"] is None
    (copy.parent / "2026-01-01_damaged").mkdir()
    (copy.parent / "2026-01-01_damaged/record.json").write_text("{")  # is for verify to name
    assert record.load(make(root, "child-of-child")).record["parent"] == copy.name


def test_a_record_has_a_parent_from_a_day_on(finished, copy, monkeypatch):
    """What `new` refuses, verify refuses too, if it began on that day or later: by the logs, whatever date the record states."""
    root = grow(finished, copy, FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 95.0"))
    with monkeypatch.context() as before_the_rule:
        before_the_rule.setattr(record, "PARENTS_SINCE", "9999-01-01")
        alone = make(root, "alone", parent="none")
        runner.run_plan(alone, None)
        assert failed(alone) == set()
    checks = {check.name: check for check in verify(alone)}
    assert failed(alone) == {"parent"} and f"expected a record to beat, since {copy.name} is one" in checks["parent"].text
    edit_json(alone / "record.json", lambda r: r.update(date="2020-01-01"))
    back = alone.rename(alone.with_name("2020-01-01_alone"))
    assert failed(back) == {"parent", "name", "plan"}, "a day that is set back changes neither what the logs say nor the plan's id"
    edit_json(back / "record.json", lambda r: r.update(date=alone.name[:10]))
    back.rename(alone)
    for path in (copy, copy.parent / finished[1].name):  # what began earlier, and the first of all
        assert failed(path) == set()
    for path in [p for p in copy.parent.iterdir() if p.name.endswith(("_child", "_start"))]:
        for log in (path / "runs").iterdir():
            rewrite_log(log, lambda e: e[0].update(device="another"))
    assert failed(alone) == set()  # then it is the first on its hardware


def test_run_refuses_a_plan_that_needs_a_parent_here(finished, copy, monkeypatch):
    """It was made where this track had no record, and comes to hardware where it has one."""
    root = grow(finished, copy, FAKE + "# another script\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(record, "hardware_here", lambda world: "1 x other")
        path = make(root, "idea")
    assert record.load(path).record["parent"] is None
    monkeypatch.setattr(runner, "begin", lambda *arguments: pytest.fail("nothing may run"))
    with pytest.raises(runlog.Failure, match="^parent: expected a record to beat"):
        runner.run_plan(path, None)


def test_a_length_is_part_of_the_plan(finished, copy, monkeypatch):
    """Fixed before the first run and passed to every run of both arms; a child and a retime inherit it."""
    root = grow(finished, copy, FAKE + "# another script\n")
    monkeypatch.setattr(record, "PARENTS_SINCE", "9999-01-01")
    base = make(root, "long", parent="none", n=1, length=1.5)
    runner.run_plan(base, None)
    (root / "train_gpt.py").write_text(FAKE + "# a third script\n")
    child = make(root, "longer-child", parent=base.name, n=1)
    runner.run_plan(child, None)
    assert failed(base) == set() and failed(child) <= {"gain"}
    assert [runlog.read_run(path).head["settings"]["length"] for path in sorted((child / "runs").iterdir())] == ["1.5", "1.5"]
    assert record.load(make(root, "again", track_name=None, retime=base)).record["plan"]["length"] == 1.5
    assert "length" not in record.load(make(root, "usual", parent="none", length=1.0)).record["plan"]

    edit_json(base / "record.json", lambda r: r["plan"].update(length=2.0))
    assert {"plan", "settings"} <= failed(base)
    edit_json(base / "record.json", lambda r: r["plan"].pop("length"))
    assert {"plan", "settings"} <= failed(base)


def test_every_track_and_its_preset_agree():
    """The trainer validates on as many tokens as the track says, opens no more shards, and looks for them in the same place."""
    import train_gpt
    for name, track in record.TRACKS.items():
        preset = train_gpt.PRESETS[track.preset]
        assert preset.val_tokens == track.val_tokens and preset.train_tokens <= track.shard_tokens, name
        assert track.corpus == "webtext" or preset.data == track.data, "one preset serves both tracks of a sprint"


def test_the_small_sprint_has_the_data_and_the_target_of_the_sprint():
    for corpus in ("fineweb", "webtext"):
        sprint, small = record.TRACKS[f"sprint-{corpus}"], record.TRACKS[f"sprint-small-{corpus}"]
        assert small == sprint._replace(preset="sprint-small", loss_sd=small.loss_sd)
    rules = (ROOT / "records/README.md").read_text()
    assert all(f"| `{name}` | {track.preset} |" in rules for name, track in record.TRACKS.items())


def test_the_track_of_webmix(tmp_path):
    """One pass over 24 shards of 10.13 M tokens each; no further shard is listed."""
    track = record.TRACKS["speedrun-webmix"]
    assert (track.corpus, track.target_loss, track.loss_sd, track.practice) == ("webmix", 3.0924, 0.0029, False)
    free = record.TRACKS["speedrun-webmix-free"]
    assert free == track._replace(preset="speedrun-webmix-free", target_loss=3.2257) and tracks.EARLIER["speedrun-webmix"].target_loss == 3.1029
    header = struct.pack("<3i", 20240520, 1, 10_133_000)
    for number in range(1, 27):
        (tmp_path / f"webmix_train_{number:06d}.bin").write_bytes(header)
    (tmp_path / "webmix_val_000000.bin").write_bytes(header)
    assert list(record.data_manifest(track, tmp_path)) == [*(f"webmix_train_{number:06d}.bin" for number in range(1, 25)), "webmix_val_000000.bin"]


def test_a_baseline_has_no_parent(finished):
    root, base, child = finished
    with pytest.raises(runlog.Failure, match="parent of kind baseline: expected none, found "):
        make(root, "other-start", parent=child.name, kind="baseline")
    assert record.load(base).record["kind"] == "baseline"


def test_retime_repeats_the_plan(finished, copy):
    root = copy.parent.parent
    shutil.copytree(finished[0] / "data", root / "data")
    again = make(root, "elsewhere", track_name=None, retime=copy)
    old, new = record.load(copy).record, record.load(again).record
    assert all(old[key] == new[key] for key in ("track", "parent", "kind", "scripts", "data")) and new["runs"] == {}
    assert all(old["plan"][key] == new["plan"][key] for key in ("seeds", "order")) and new["plan"]["retimes"] == copy.name
    assert failed(again) == {"runs"}


def test_finished_records_verify(finished):
    for path in finished[1:]:
        assert failed(path) == set(), verify(path)
    made = record.load(finished[2]).record
    assert made["means"]["a"]["ms"] == pytest.approx(0.98 * made["means"]["b"]["ms"], rel=2e-3)
    assert "faster than the parent" in {c.name: c.text for c in verify(finished[2])}["gain"]
    assert not (finished[2] / "running").exists()
    assert str(finished[0]) not in first_log(finished[2]).read_text()  # logs do not tell where they were made


@pytest.mark.slow
def test_run_continues_after_an_interruption(tmp_path, monkeypatch, capsys):
    root = make_repository(tmp_path)
    path = make(root, "idea")
    keys, real = record.load(path).record["plan"]["order"], runner.follow

    def interrupted(attempts, *rest):
        if attempts[0].number == 2:
            while not runner.newest_log(attempts[0].directory):
                time.sleep(0.01)
            raise KeyboardInterrupt
        real(attempts, *rest)

    slow = FAKE.replace('file.flush()', 'file.flush()\n    time.sleep(0.05)')
    for script in (root / "train_gpt.py", path / "train_gpt.py"):
        script.write_text(slow)
    shutil.rmtree(path)
    path = make(root, "idea")
    keys = record.load(path).record["plan"]["order"]
    monkeypatch.setattr(runner, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run_plan(path, None)
    assert list(record.load(path).record["runs"]) == [f"{keys[0]}.jsonl"]
    before = (path / "runs" / f"{keys[0]}.jsonl").read_bytes()
    monkeypatch.setattr(runner, "follow", real)
    runner.run_plan(path, None)
    said = capsys.readouterr().out
    assert "3 runs: how long they take is not known" in said and "2 of 3 runs left: 1 cold start of about" in said and "going by its own runs\n" in said
    assert "done before" in said and (path / "runs" / f"{keys[0]}.jsonl").read_bytes() == before
    assert failed(path) == set()
    assert len(list((path / "unfinished").glob("*.jsonl"))) == 1  # the attempt stays visible
    assert "1 unfinished" in {c.name: c.text for c in verify(path)}["runs"]


def test_run_files_a_log_that_was_finished_when_the_tool_died(tmp_path, monkeypatch):
    path = make(make_repository(tmp_path), "idea", n=1)
    folder = record.load(path)
    key = folder.record["plan"]["order"][0]
    subprocess.run(plain_command(folder, key, path.parents[1] / "data/sample"), check=True, cwd=path.parents[1], env=starts.environment(folder, key))
    monkeypatch.setattr(runner, "begin", lambda *arguments: pytest.fail("it was finished"))
    runner.run_plan(path, None)
    assert failed(path) == set()


def test_a_diverged_run_is_a_result(tmp_path):
    root = make_repository(tmp_path)
    (root / "train_gpt.py").write_text(FAKE.replace("LOSS, MS = 5.0", "LOSS, MS = float('nan')"))
    path = make(root, "idea")
    for _ in range(2):  # it is kept, and a second start does not repeat it
        with pytest.raises(runlog.Failure, match="finite loss") as caught:
            runner.run_plan(path, None)
        assert caught.value.code == 3
    assert len(list((path / "runs").iterdir())) == 1 and {"end", "runs"} <= failed(path)


def test_run_stops_at_the_first_log_that_cannot_verify(tmp_path):
    root = make_repository(tmp_path)
    (root / "train_gpt.py").write_text(FAKE.replace('machine="m1"', 'machine=None'))
    path = make(root, "idea")
    with pytest.raises(runlog.Failure, match="machine.*expected which machine") as caught:
        runner.run_plan(path, None)
    assert caught.value.code == 2 and len(list((path / "runs").iterdir())) == 1


def test_a_crash_names_its_cause_and_can_be_continued(tmp_path):
    root = make_repository(tmp_path)
    crash = "if Path('crash').exists(): sys.exit('train_gpt: GPU: expected 8, found 7; fix: reboot')"
    (root / "train_gpt.py").write_text(FAKE.replace("chance, chain =", f"{crash}\nchance, chain ="))
    path = make(root, "idea")
    (root / "crash").touch()
    with pytest.raises(runlog.Failure, match="expected 8, found 7") as caught:
        runner.run_plan(path, None)
    assert caught.value.code == 4
    (root / "crash").unlink()
    runner.run_plan(path, None)
    assert failed(path) == set()


def test_one_run_at_a_time(tmp_path):
    path = make(make_repository(tmp_path), "idea", n=1)
    with runner.only_one(path), pytest.raises(runlog.Failure, match="expected one `run` at a time, found another") as caught:
        runner.run_plan(path, None)
    assert caught.value.code == 2
    abandon = runpy.run_path(str(ROOT / "records/__main__.py"), run_name="records")["main"]
    with runner.only_one(path):
        assert abandon(["abandon", str(path), "it diverges"]) == 2, "the run would write over it"
    assert record.load(path).record["abandoned"] is None
    runner.run_plan(path, None)
    assert failed(path) == set()


def test_a_training_that_outlives_the_tool_keeps_the_record(tmp_path, monkeypatch):
    """The tool is killed: the training, in a session of its own, goes on, and a second `run` would start another beside it."""
    path = make(make_repository(tmp_path), "idea", n=1)
    left = []

    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(runner, "follow", killed)
    monkeypatch.setattr(runner, "stop", left.append)
    try:
        with pytest.raises(SystemExit):
            runner.run_plan(path, None)
        with pytest.raises(runlog.Failure, match="found another that is under way"):
            runner.run_plan(path, None)
    finally:
        left[0].kill()
        left[0].wait()


def test_a_plan_that_cannot_verify_is_not_run(tmp_path, monkeypatch):
    """Its runs would cost time, and their record would be refused."""
    root = make_repository(tmp_path)
    make_quick(monkeypatch, root)
    path = make(root, "idea")
    plan = (path / "record.json").read_text()
    seeds = [1, 2, 3]
    edit_json(path / "record.json", lambda r: r["plan"].update(seeds=seeds, order=record.plan_order(seeds, "a")))
    with pytest.raises(runlog.Failure, match="^plan .*: expected one that verifies, found .*seeds that follow"):
        runner.run_plan(path, None)
    (path / "record.json").write_text(plan)
    monkeypatch.setattr(runner.time, "gmtime", lambda: datetime.datetime(2099, 1, 1).timetuple())
    with pytest.raises(runlog.Failure, match="expected one of the last 30 days, by this machine's clock"):
        runner.run_plan(path, None)
    assert not (path / "runs").exists() and not (path / "running").exists()


def test_a_result_that_was_lost_or_edited_is_named(copy):
    log = first_log(copy)
    log.write_text(log.read_text().replace("5.0", "4.0", 1))
    with pytest.raises(runlog.Failure, match="as in record.json, found another: edited or cut since; fix: restore"):
        runner.check_result(record.load(copy), log.stem)
    log.unlink()
    with pytest.raises(runlog.Failure, match="as in record.json, found no file; fix: restore"):
        runner.check_result(record.load(copy), log.stem)


def start_ups(path, arm):
    """In seconds, in the order of the runs: the stand-in says 70 where it has to compile, else 10."""
    order = record.load(path).record["plan"]["order"]
    return [starts.start_up(runlog.read_run(path / "runs" / f"{key}.jsonl")) for key in order if key[0] == arm]


def test_two_cold_caches_an_arm(finished):
    """One for each half of the seeds, apart from those of other plans and scripts and outside of the record; removed in the end."""
    _, base, child = finished
    assert start_ups(base, "a") == start_ups(child, "a") == start_ups(child, "b") == [70, 10, 70]
    assert not list((base.parents[1] / "caches").glob("*"))
    folder = record.load(child)
    assert [record.cache_number(folder, key) for key in folder.record["plan"]["order"]] == [1, 1, 1, 1, 2, 2]
    assert {path.name for path in child.iterdir()} == {"README.md", "record.json", "runs", "train_gpt.py"}


def test_caches_of_the_user_are_respected(finished, monkeypatch, tmp_path):
    """In folders of the plan's own below them, which are empty in the beginning: others would draw what the user's runs drew."""
    folder = record.load(finished[2])
    first, *_, last = folder.record["plan"]["order"]
    ours, others = (starts.environment(folder, key) for key in (first, last))
    assert all(str(starts.CACHES) in ours[name] and ours[name] != others[name] for name in starts.VARIABLES)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    theirs = starts.environment(folder, first)
    assert Path(theirs["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path / "mine" and theirs["TRITON_CACHE_DIR"] == ours["TRITON_CACHE_DIR"]
    assert theirs["PATH"] == ours["PATH"], "else the environment is that of `run`"
    (tmp_path / "mine/other").mkdir()
    starts.remove_caches(folder)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["other"]


def test_settings_of_the_compilers_do_not_reach_a_run(finished, monkeypatch):
    """The rules forbid them, but for places."""
    folder = record.load(finished[2])
    key = folder.record["plan"]["order"][0]
    for name, value in {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TRITON_PTXAS_PATH": "/opt/ptxas", "TRITON_DEBUG": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCH_COMPILE_DEBUG", "ENABLE_PERSISTENT_TMA_MATMUL"):
        monkeypatch.setenv(name, "1")
    found = starts.environment(folder, key)
    assert not {"TORCH_COMPILE_DEBUG", "ENABLE_PERSISTENT_TMA_MATMUL"} & found.keys()
    assert {name for name in found if name.startswith(("TRITON_", "TORCHINDUCTOR_"))} == {"TRITON_PTXAS_PATH", *starts.VARIABLES}
    assert found["PYTHONSAFEPATH"] == "1"


def test_a_filed_run_is_not_repeated(finished, copy, capsys):
    """`run` may be killed between the two writes; and whoever takes a run out of record.json gets the same one back."""
    before = record.load(copy).record
    shutil.copytree(finished[0] / "data", copy.parents[1] / "data")
    edit_json(copy / "record.json", lambda r: (r["runs"].popitem(), r.update(means={})))
    runner.run_plan(copy, None)
    assert record.load(copy).record == before and capsys.readouterr().out.count("done before") == len(before["runs"])


def test_a_run_without_gpu_has_the_settings_of_run_sh(finished, monkeypatch):
    """Those that its function sets, unless the user has set another; with a GPU none."""
    script = (ROOT / "run.sh").read_text()
    function = script[script.index("cpu_settings() {"):]
    function = function[:function.index("\n}") + 2]
    shown = subprocess.run(["bash", "-c", f"{function}\ncpu_settings; env"], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True).stdout
    exported = dict(row.split("=", 1) for row in shown.splitlines())
    assert starts.CPU_SETTINGS == {name: value for name, value in exported.items() if name.startswith(("MALLOC_", "OMP_"))}

    folder = record.load(finished[2])
    key = folder.record["plan"]["order"][0]
    assert starts.environment(folder, key).items() >= starts.CPU_SETTINGS.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert starts.environment(folder, key)["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(starts, "query_gpus", lambda query: ["NVIDIA H200"])
    assert not starts.environment(folder, key).keys() & starts.CPU_SETTINGS.keys()


def test_a_plan_tells_its_duration(finished, copy, monkeypatch):
    """By the logs of the parent, or of the record's own runs; the stand-in trains 6 s and starts in 70 or 10."""
    root = grow(finished, copy, FAKE + "# another script\n")
    path = make(root, "idea")
    text = "6 runs: 4 cold starts of about 70 s, 2 warm starts of about 10 s, training 6 s each: about 5.6 minutes, going by "
    assert starts.duration(record.load(path)) == f"{text}{copy.name}, 1 x fake"
    folder = record.load(path)
    compiled = starts.caches(folder, folder.record["plan"]["order"][0])["TRITON_CACHE_DIR"] / "kernel"
    compiled.mkdir(parents=True)
    assert "6 runs: 3 cold starts of about 70 s, 3 warm starts" in starts.duration(folder)
    twice = make(root, "twice", length=2.0)
    assert "training 12 s each: about 6.2 minutes" in starts.duration(record.load(twice))

    monkeypatch.setattr(starts, "hardware_here", lambda world: "1 x other")  # then that hardware is named, as no better is known
    assert starts.duration(record.load(path)).endswith(f"{copy.name}, 1 x fake")
    runner.run_plan(path, None)
    assert starts.duration(record.load(path)) == "0 of 6 runs left: no device time"
    edit_json(path / "record.json", lambda r: [r["runs"].pop(f"{key}.jsonl") for key in r["plan"]["order"][2:]])
    for key in record.load(path).record["plan"]["order"][2:]:
        (path / f"runs/{key}.jsonl").unlink()
    edit_json(path / "record.json", lambda r: r.update(means={}))
    assert starts.duration(record.load(path)) == \
        f"4 of 6 runs left: 4 cold starts of about 70 s, training 6 s each: about 5.1 minutes, going by its own runs and {copy.name}, 1 x fake"


@pytest.mark.parametrize("change", [
    lambda e: [line.pop("start_ms") for line in e if line["kind"] == "clock"],
    lambda e: e[0].update(started=e[0]["started"][:19])])
def test_a_log_without_times_tells_no_duration(finished, copy, monkeypatch, change):
    """`run` guesses by logs that nobody has verified here."""
    log = first_log(copy)
    events = [json.loads(row) for row in log.read_text().splitlines()]
    change(events)
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert starts.began(runlog.read_run(log)) is None


def test_where_nothing_compiles_every_start_is_warm(finished, copy):
    root = grow(finished, copy, FAKE + "# another script\n")
    for log in (copy / "runs").glob("a-*"):
        rewrite_log(log, lambda e: event(e, "warm").update(graphs=0))
    assert starts.duration(record.load(make(root, "idea"))).startswith("6 runs: 6 warm starts of about 10 s, training")


def test_a_log_that_tells_no_times_is_no_guide(finished, copy):
    root = grow(finished, copy, FAKE + "# another script\n")
    for log in (copy / "runs").glob("a-*"):
        rewrite_log(log, lambda e: e[0].update(started="at noon"))
    assert "not known" in starts.duration(record.load(make(root, "idea", parent=copy.name)))


def test_the_usual_rest_of_a_run_counts_as_start():
    """Validation, end and torchrun: the median between runs that followed each other; an interruption does not count."""
    seconds = (0, 20, 50, 5000)  # each takes 10 of start-up and 6 of training
    heads = [f"2026-01-01T{int(s // 3600):02d}:{s // 60 % 60:02d}:{s % 60:02d}+00:00" for s in seconds]
    made = [runlog.Run(Path(), "ok", {"started": head}, 5.0, 6000.0, lines=({"kind": "clock", "start_ms": 10000.0},)) for head in heads]
    assert starts.closing(made) == [4, 14]


def test_a_run_of_the_other_arm_is_no_rest_of_a_run(finished, copy):
    """The parent's arms took turns, each run 4 s after the end of the one before: a start takes these 4 s more, and not another run."""
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for key in record.load(copy).record["plan"]["order"]:
        path = copy / "runs" / f"{key}.jsonl"
        run = runlog.read_run(path)
        rewrite_log(path, lambda events: events[0].update(started=moment.isoformat()))
        moment += datetime.timedelta(seconds=starts.start_up(run) + run.ms / 1e3 + 4)
    root = grow(finished, copy, FAKE + "# another script\n")
    text = starts.duration(record.load(make(root, "idea", parent=copy.name)))
    assert text.startswith("6 runs: 4 cold starts of about 74 s, 2 warm starts of about 14 s, training 6 s each"), text


@pytest.mark.parametrize("visible, asked", [("1", [["--id=1"]]), ("", []), (None, [[]])])
def test_only_the_gpus_of_a_run_have_to_be_idle(monkeypatch, visible, asked):
    """With an empty list a run sees none."""
    commands = []
    monkeypatch.setattr(record.subprocess, "run", lambda command, **_: commands.append(command) or SimpleNamespace(stdout="NVIDIA H200\n", returncode=0))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert QUERY_GPUS("--query-gpu=name") == ["NVIDIA H200"] * len(asked)
    assert [command[3:] for command in commands] == asked


def test_run_refuses_busy_gpus_and_changed_inputs(tmp_path, monkeypatch):
    root = make_repository(tmp_path)
    path = make(root, "idea")
    monkeypatch.setattr(runner, "query_gpus", lambda query: ["4711, python, 900 MiB"])
    with pytest.raises(runlog.Failure, match="4711") as caught:
        runner.check_idle(patience_s=0)
    assert caught.value.code == 4
    monkeypatch.setattr(runner, "check_idle", lambda lane: runlog.fail("GPUs", "idle ones", "others", "wait"))
    with pytest.raises(runlog.Failure, match="found others"):
        runner.run_plan(path, None)
    shards = root / "data/sample/sample_train_000001.bin"
    shards.write_bytes(shard([50256, 1, 2, 4]))
    with pytest.raises(runlog.Failure, match="sample_train_000001.bin"):
        runner.run_plan(path, None)
    shards.write_bytes(shard([50256, 1, 2, 3]))
    (path / "train_gpt.py").write_text(FAKE + "#")
    with pytest.raises(runlog.Failure, match="script of arm a"):
        runner.run_plan(path, None)


def test_progress_tells_run_step_loss_and_time_left(finished):
    run = runlog.read_run(first_log(finished[1]))
    text = runner.progress(run, 2, 6, "a-s1", 90.0, 5.0)
    assert re.fullmatch(r"run 2/6  a-s1 +step 80/80  loss 5\.\d+  left 0:00, all runs 6:00", text)
    assert "preparing, 0:05" in runner.progress(runlog.Run(Path(), "incomplete"), 1, 6, "a-s1", None, 5.0)


# ---------------------------------------------------------------------------------------------------------------------
# Tampering. A careless forger is caught by hashes; one who repairs the hashes is caught by what the log must say.
# ---------------------------------------------------------------------------------------------------------------------
def test_edited_script(copy):
    (copy / "train_gpt.py").write_text((copy / "train_gpt.py").read_text() + "# a harmless comment\n")
    assert "script" in failed(copy)
    edit_json(copy / "record.json", lambda r: r["scripts"].update(a=hashlib.sha256((copy / "train_gpt.py").read_bytes()).hexdigest()))
    assert {"plan", "settings"} <= failed(copy)


def test_edited_parent_script(finished, copy):
    parent = copy.parent / finished[1].name / "train_gpt.py"
    parent.write_text(parent.read_text() + "\n")
    assert "script" in failed(copy)


def test_removed_run(copy):
    first_log(copy).unlink()
    assert "runs" in failed(copy)


def test_extra_run(copy):
    shutil.copy(first_log(copy), copy / "runs" / "a-s99.jsonl")
    assert failed(copy) == {"runs"}
    edit_json(copy / "record.json", lambda r: r["runs"].update({"a-s99.jsonl": hashlib.sha256((copy / "runs/a-s99.jsonl").read_bytes()).hexdigest()}))
    assert failed(copy) == {"runs"}


def test_another_seed_in_place_of_a_bad_run(copy):
    """The plan grows or changes after a look at the results: its id no longer follows from it, and the logs carry the old one."""
    def shorten(r):
        r["plan"]["seeds"] = r["plan"]["seeds"][:2]
        r["plan"]["order"] = record.plan_order(r["plan"]["seeds"], "ab")
    edit_json(copy / "record.json", shorten)
    assert {"plan", "runs"} <= failed(copy)
    edit_json(copy / "record.json", lambda r: r["plan"].update(id=record.plan_id(r)))
    assert "settings" in failed(copy)


@pytest.mark.parametrize("old, new", [('"loss": 5.0', '"loss": 4.0'), ('"machine": "m1"', '"machine": "m2"'), ('"step": 80', '"step": 81')])
def test_edited_line(copy, old, new):
    path = first_log(copy)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert {"files", "chain"} <= failed(copy)
    edit_json(copy / "record.json", lambda r: r["runs"].update({path.name: hashlib.sha256(path.read_bytes()).hexdigest()}))
    assert "chain" in failed(copy)


def test_a_copy_under_another_name(copy):
    """It is refused, and the first is not: the plan's id was made with the name."""
    other = copy.parent / copy.name.replace("child", "twin")
    shutil.copytree(copy, other)
    assert failed(other) == {"plan", "files"} and failed(copy) == set()


def test_a_run_that_is_gone(copy):
    first_log(copy).unlink()
    told = {check.name: check.text for check in verify(copy) if not check.ok}
    assert "fix: restore it" in told["runs"] and "as many of arm a as of arm b" in told["gain"] and "zip" not in str(told)


def change_end(events, **fields):
    events[-1].update(fields)


def pause(events, reason):
    """Between both intervals of the clock, so that they still join and sum to the total."""
    first, second = [e for e in events if e["kind"] == "clock"]
    start = first["end_ms"]
    events.insert(events.index(second), {"kind": "clock", "on": False, "reason": reason, "start_ms": start, "end_ms": start + 7.25})
    second.update(start_ms=start + 7.25, end_ms=second["end_ms"] + 7.25)


@pytest.mark.parametrize("name, change", [
    ("tokens", lambda e: change_end(e, train_hash="t2")),
    ("tokens", lambda e: change_end(e, val_hash="v2")),
    ("tokens", lambda e: e[0].update(data="0" * 64)),
    ("tokens", lambda e: e[0].update(shards=["sample_train_000002.bin"])),
    ("clock", lambda e: event(e, "clock").update(end_ms=event(e, "clock")["end_ms"] - 500)),
    ("clock", lambda e: event(e, "clock").update(on=False)),
    ("clock", lambda e: pause(e, "validation")),
    ("clock", lambda e: pause(e, "a rest")),
    ("clock", lambda e: [e.remove(x) for x in e if x["kind"] == "clock"]),
    ("clock", lambda e: (e[-1].update(ms=e[-1]["ms"] / 2), [e.remove(x) for x in e if x["kind"] == "clock"][1:], e.insert(
        -1, {"kind": "clock", "on": True, "reason": "training", "start_ms": 0.0, "end_ms": e[-1]["ms"]}))),
    ("end", lambda e: e.pop()),
    ("end", lambda e: change_end(e, state="interrupted")),
    ("end", lambda e: change_end(e, recompiled=1)),
    ("end", lambda e: change_end(e, loss=4.9)),
    ("end", lambda e: e.remove([x for x in e if x["kind"] == "step"][-1])),
    ("end", lambda e: [x for x in e if x["kind"] == "step"][2].update(step=10)),
    ("settings", lambda e: e[0]["settings"].update(muon="True")),
    ("settings", lambda e: e[0]["settings"].update(length="0.5")),
    ("settings", lambda e: e[0]["settings"].update(val_every="10")),
    ("settings", lambda e: e[0].update(seed=1)),
    ("settings", lambda e: e[0].update(world=8)),
    ("settings", lambda e: e[0].update(nodes=2)),
    ("settings", lambda e: e[0].update(script="0" * 64)),
    ("settings", lambda e: e[0]["preset"].update(val_tokens=4096)),
    ("settings", lambda e: e[0]["settings"].update(log_dir="elsewhere")),
    *(("machine", lambda e, name=name: e[0].update({name: "other"}))
      for name in ("machine", "gpus", "device", "world", "torch", "triton", "cuda", "driver", "python")),
    ("order", lambda e: e[0].update(started="0")),
    ("order", lambda e: e[0].pop("started")),
])
def test_repaired_logs_still_fail(copy, name, change):
    last = copy / f"runs/{record.load(copy).record['plan']['order'][-1]}.jsonl"
    rewrite_log(last if name == "order" else first_log(copy), change)
    found = failed(copy)
    assert name in found and not found & {"files", "chain"}, found


def test_an_arm_may_not_validate_on_tokens_of_its_own(copy):
    for path in (copy / "runs").glob("a-*"):
        rewrite_log(path, lambda e: change_end(e, val_hash="v2"))
    assert "tokens" in failed(copy)


def test_chosen_seeds(tmp_path):
    """Before any run, and consistently: order and id follow from the seeds, but the seeds not from the script."""
    path = make(make_repository(tmp_path), "idea")

    def choose(r):
        r["plan"].update(seeds=[1, 2, 3], order=record.plan_order([1, 2, 3], "a"))
        r["plan"]["id"] = record.plan_id(r)
    edit_json(path / "record.json", choose)
    assert "plan" in failed(path)


@pytest.mark.parametrize("change", [lambda r: r["data"].update({"sample_train_000001.bin": "0" * 64}), lambda r: r.update(track="speedrun")])
def test_a_parent_of_other_data_or_another_track(finished, copy, change):
    edit_json(copy.parent / finished[1].name / "record.json", change)
    assert "parent" in failed(copy)


def test_a_repaired_log_without_change_verifies(copy):
    rewrite_log(first_log(copy), lambda events: None)
    assert failed(copy) == set()


@pytest.mark.parametrize("change, name", [
    (lambda r: r["means"]["a"].update(ms=1.0), "means"), (lambda r: r.update(extra=1), "schema"), (lambda r: r.update(track="fast"), "schema"),
    (lambda r: r.pop("date"), "schema"), (lambda r: r["plan"].update(more=1), "schema"), (lambda r: r.update(date="2020-01-01"), "name"),
    (lambda r: r.update(parent=None), "schema"), (lambda r: r.update(kind="systems"), "plan"), (lambda r: r["plan"].update(world=8), "plan"),
    (lambda r: r["plan"].update(world=True), "schema"), (lambda r: r["means"]["a"].update(ms=math.nan), "schema"),
])
def test_edited_record(copy, change, name):
    edit_json(copy / "record.json", change)
    assert name in failed(copy)


def test_edited_numbers_in_the_readme(copy):
    path = copy / "README.md"
    path.write_text(path.read_text().replace("| b: ", "| B: "))
    assert failed(copy) == {"means"}


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"schema": 1, "plan": 3}'])
def test_broken_record_json_is_one_failed_check(copy, content):
    (copy / "record.json").write_text(content)
    assert failed(copy) == {"schema"}


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}\n", b'{"kind": 5}\n[1]\n', b'{"kind": "step", "chain": "x"}\n'])
def test_broken_logs_fail_and_do_not_raise(copy, content):
    first_log(copy).write_bytes(content)
    assert {"files", "end"} <= failed(copy)


# ---------------------------------------------------------------------------------------------------------------------
# What a claim needs
# ---------------------------------------------------------------------------------------------------------------------
def claim(copy, track, kind="ml", monkeypatch=None):
    """The copy's checks as if the track were another one."""
    monkeypatch.setitem(record.TRACKS, "smoke", record.TRACKS["smoke"]._replace(practice=False, loss_sd=0.001, **track))
    edit_json(copy / "record.json", lambda r: r.update(kind=kind))
    return {check.name: check for check in verify(copy)}


@pytest.mark.parametrize("option", ["no_fp8", "eager", "reference", "no_graphs", "save", "stop_after"])
def test_no_option_but_those_of_the_plan(copy, option):
    rewrite_log(first_log(copy), lambda e: e[0]["settings"].update({option: "True"}))
    assert f"options: expected [], found ['{option}']" in {check.name: check.text for check in verify(copy)}["settings"]


def test_no_run_is_validated_along_the_way(finished):
    """Verification refuses --val-every and any pause of the clock; `run` asks for neither."""
    folder = record.load(finished[2])
    assert not [word for key in folder.record["plan"]["order"] for word in REAL_COMMAND(folder, key, Path("data")) if "val" in word]


def test_a_gain_in_the_mean_is_not_enough(copy, monkeypatch):
    for path, factor in zip(sorted((copy / "runs").glob("a-*")), (1.03, 0.98, 1.0)):
        rewrite_log(path, lambda e: e[-1].update(ms=e[-1]["ms"] * factor))  # noqa: B023
    gain = report.gain(record.load(copy))
    assert gain.difference < 0 < gain.high and not claim(copy, {}, monkeypatch=monkeypatch)["gain"].ok


def test_gain_must_be_shown(copy, monkeypatch):
    assert claim(copy, {}, monkeypatch=monkeypatch)["gain"].ok
    for path in (copy / "runs").glob("a-*"):
        rewrite_log(path, lambda e: e[-1].update(ms=e[-1]["ms"] * 1.05))
    assert not claim(copy, {}, monkeypatch=monkeypatch)["gain"].ok


@pytest.mark.slow
def test_systems_leaves_the_training_alone(tmp_path):
    """The sections that say what is trained, the tokens and the loss are the parent's; a better loss is as suspect as a worse one."""
    root = make_repository(tmp_path)
    base = make(root, "base")
    runner.run_plan(base, None)
    rule, fast = "\n# " + "=" * 84 + "\n", FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 90.0")
    cheats = {"cheat-" + title.split()[1].lower().strip(":"): fast.replace(title + rule, f"{title}{rule}X = 1\n")
              for title in ("2. Configuration", "8. Model", "9. Data", "10. Schedule: pure functions")}
    assert all("X = 1" in script for script in cheats.values())
    cheats |= {"worse": fast.replace("LOSS, MS = 5.0", "LOSS, MS = 5.02"), "better": fast.replace("LOSS, MS = 5.0", "LOSS, MS = 4.98")}
    for name, script in {"fast": fast, **cheats}.items():
        (root / "train_gpt.py").write_text(script)
        path = make(root, name, parent=base.name, kind="systems")
        runner.run_plan(path, None)
        assert ("kind" not in failed(path)) == (name == "fast"), name
        if name == "fast":
            for log in (path / "runs").glob("a-*"):
                rewrite_log(log, lambda e: change_end(e, train_hash="t2"))
            assert "kind" in failed(path)


# ---------------------------------------------------------------------------------------------------------------------
# Logs
# ---------------------------------------------------------------------------------------------------------------------
PUBLIC = """# -----------------------------------------------------------------------------
# Muon optimizer
import torch
{code}
# -----------------------------------------------------------------------------
# int main
print(1)
""" + "=" * 100 + """
Running Python 3.12 (main)
Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:61:00.0 Off |                    0 |
|   1  NVIDIA H100 80GB HBM3          On  |   00000000:62:00.0 Off |                    0 |
""" + "=" * 100 + """
Compiling model and warming up kernels
step:0/300 val_loss:10.8258 train_time:0ms step_avg:0.02ms
{steps}
step:150/300 val_loss:4.1 train_time:{half}ms step_avg:1ms
step:300/300 val_loss:{loss} train_time:{total}ms step_avg:1ms
peak memory allocated: 1 MiB reserved: 2 MiB
"""


def public_log(path, loss, ms_per_step, code="x = 1"):
    steps = "\n".join(f"step:{s}/300 train_time:{s * ms_per_step:.0f}ms step_avg:{ms_per_step:.2f}ms" for s in range(1, 301))
    path.write_text(PUBLIC.format(steps=steps, half=150 * ms_per_step, total=300 * ms_per_step, loss=loss, code=code))
    return path


def test_public_logs_are_read(tmp_path):
    run = runlog.read_run(public_log(tmp_path / "a.txt", 3.2785, 20))
    assert run.ok and (run.loss, run.ms, run.total_steps) == (3.2785, 6000, 300)
    assert run.head["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2 and run.head["world"] == 2
    assert runlog.stage_times(run) == pytest.approx([20, 20, 20]) and len(run.vals) == 3
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "b.txt").write_text(text[:text.index("step:300/300 val")])
    assert runlog.read_run(tmp_path / "b.txt").state == "incomplete"
    assert codediff.read_script(tmp_path / "a.txt").endswith("print(1)")
    (tmp_path / "c.txt").write_text(text.replace("step:7/300 train_time", "step:7/300 train_loss:9.5 train_time"))  # as the oldest ones have it
    assert runlog.read_run(tmp_path / "c.txt").train[6, 2] == 9.5


def test_our_logs_are_read(finished):
    run = runlog.read_run(first_log(finished[1]))
    assert run.ok and run.broken is None and run.total_steps == 80 and len(run.stages) == 2
    assert runlog.stage_times(run) == pytest.approx([50, 100], rel=2e-3) and run.train[-1, 1] == pytest.approx(run.ms / 1e3, rel=1e-4)


def test_a_resumed_log_begins_where_it_went_on(copy):
    """Else the steps before would make its first ones look shorter."""
    log = first_log(copy)
    run = runlog.read_run(log)
    begin = int(run.train[1, 0])
    resumed = dataclasses.replace(run, train=run.train[2:] - [0, run.train[1, 1], 0], head=run.head | {"first_step": begin})
    assert runlog.stage_times(resumed)[-1] == pytest.approx(runlog.stage_times(run)[-1])
    assert runlog.stage_times(resumed)[0] > 40


def test_runs_with_and_without_validations_have_no_common_curve(finished):
    run = runlog.read_run(first_log(finished[1]))
    followed = dataclasses.replace(run, vals=np.array([[step, step / 10, 6.0] for step in (20, 40, 60, 80)]))
    assert len(report.mean_curve([run, run])[0])
    with pytest.raises(runlog.Failure, match="expected runs that all have validations along the way, or none, found"):
        report.mean_curve([run, followed])


def test_a_log_without_its_end_is_incomplete_everywhere(copy, tmp_path):
    path = first_log(copy)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert runlog.read_run(path).state == "incomplete" and runlog.read_run(path).broken is None
    label, runs = report.load_runs(str(copy))
    assert len(runs) == 2 and "1 unfinished left out" in label


# ---------------------------------------------------------------------------------------------------------------------
# compare, diff
# ---------------------------------------------------------------------------------------------------------------------
def test_compare_a_record_with_its_parent_uses_its_own_pairs(finished):
    text = report.compare(str(finished[2]), str(finished[1]))
    assert "paired by seed" in text and "times comparable:  yes" in text and "verdict: A is better: time lower; loss no difference shown" in text
    assert f"B  {finished[2].name}:b" in text and "tokens a step, windows 64/128" in text
    assert "verdict: B is better" in report.compare(f"{finished[2]}:b", f"{finished[2]}:a")


def test_compare_takes_names_and_the_arm_as_paths(finished, copy, monkeypatch):
    """However the record is named, its parent means its own arm b."""
    for module in (report, record):
        monkeypatch.setattr(module, "HOME", copy.parent)
    monkeypatch.chdir(copy.parents[1])
    parent = finished[1].name
    relative = f"./records/{copy.name}"
    for a, b in ((str(copy), str(copy.parent / parent)), (copy.name, parent), (f"{copy}:a", parent), (f"{relative}/", parent), (f"{relative}:b", copy.name),
                 (f"{copy.name}:a", f"{relative}/:b")):
        *_, paired = report.load_pair(a, b)
        assert paired, (a, b)
    assert [label for label, _ in report.load_all([copy.name, parent, f"{parent}:a"])] == [copy.name, f"{copy.name}:b", parent]
    assert not report.load_pair(copy.name, copy.name)[2]


def test_compare_refuses_edited_logs_and_mixed_runs(copy):
    path = first_log(copy)
    log = path.read_text()
    before, end = log.rstrip("\n").rsplit("\n", 1)
    path.write_text(before + "\n" + end.replace('"loss": 5', '"loss": 4') + "\n")
    with pytest.raises(runlog.Failure, match="expected an unbroken chain of lines"):
        report.compare(str(copy), str(copy))
    path.write_text(log.replace('"step": 80', '"step": 81'))  # before the end: it is no unfinished run
    with pytest.raises(runlog.Failure, match="expected an unbroken chain of lines, found line .* edited"):
        report.load_runs(str(copy))
    path.write_text(log)
    stated = (copy / "record.json").read_text()
    rewrite_log(path, lambda events: events[-1].update(ms=events[-1]["ms"] - 1))
    (copy / "record.json").write_text(stated)
    with pytest.raises(runlog.Failure, match="expected sha256 .* as in record.json, found"):
        report.load_runs(str(copy))
    path.write_text(log)
    runs = [runlog.read_run(path), runlog.read_run(path)]
    assert not report.differing(runs, runs, {"preset": lambda run: "x"})
    names = iter("xyxy")
    assert report.differing(runs, runs, {"preset": lambda run: next(names)}) == ["preset x, y against x, y"]


def test_time_at_equal_loss_is_at_the_worse_one(finished, monkeypatch):
    """Which both have reached; at the better one a side would be extrapolated."""
    curves = iter((np.array([[1.0, 5.0], [2.0, 4.0]]), np.array([[1.0, 5.0], [3.0, 3.0]])))
    monkeypatch.setattr(report, "mean_curve", lambda runs: (next(curves), 0, "training loss"))
    assert "training loss 4.0000 after 2.00 s (A) and 2.00 s (B)" in report.equal_loss([], [])


def test_a_single_point_says_no_moment_of_a_higher_loss(monkeypatch):
    """Nobody knows when a public run, of which the end alone is known, passed it."""
    curves = iter((np.array([[181.6, 3.09]]), np.array([[113.4, 3.23]])))
    monkeypatch.setattr(report, "mean_curve", lambda runs: (next(curves), 0, "validation loss"))
    assert "not to be had, one side's log begins below 3.2300" in report.equal_loss([], [])
    assert report.seconds_to(np.array([[181.6, 3.09]]), 3.09) == 181.6


def test_other_stages_have_no_row_together(finished, copy):
    for path in (copy / "runs").glob("a-*"):
        rewrite_log(path, lambda e: [line.update(batch_tokens=2048) for line in e if line["kind"] == "stage" and line["batch_tokens"] == 1024])
    rows = [row for row in report.compare(str(copy), str(finished[1])).splitlines() if "2,048 tokens a step" in row]
    assert len(rows) == 1 and rows[0].split()[-2:] == ["-", "-"]


def test_training_losses_of_other_softmaxes_are_not_compared(finished, copy):
    assert "time at equal loss: training loss" in report.compare(str(copy), str(finished[1]))
    for path in (copy / "runs").glob("a-*"):
        rewrite_log(path, lambda e: e[0]["preset"].update(model={"importance_weights": False}))
    assert "time at equal loss: not to be had, the training losses are of other classes" in report.compare(str(copy), str(finished[1]))


def test_the_times_of_pairs_compare_if_each_stayed_on_one_machine(finished, copy):
    """As with --at-once: a machine's name in a log depends on the GPU."""
    for number, path in enumerate(sorted((copy / "runs").glob("?-*"), key=lambda path: path.name[1:])):
        rewrite_log(path, lambda e: e[0].update(machine=f"m{number // 2}"))
    assert "times comparable:  yes" in report.compare(f"{copy}:a", f"{copy}:b")
    rewrite_log(path, lambda e: e[0].update(machine="another"))
    assert re.search("times comparable:  no, machine (m2 against another|another against m2)\n", report.compare(f"{copy}:a", f"{copy}:b"))


def test_compare_says_why_not(finished, copy):
    for path in (copy / "runs").glob("a-*"):
        rewrite_log(path, lambda e: (e[0]["preset"].update(val_tokens=1), e[0].update(device="other", nodes=2)))
    text = report.compare(str(copy), str(finished[1]))
    assert "losses comparable: no, validation tokens 1 against 8192" in text and "times comparable:  no, hardware other against fake" in text
    assert "nodes 2 against 1" in text and "x other on 2 nodes\n" in text
    assert "verdict: none, the losses" in text


def test_compare_public_logs(tmp_path):
    for name, ms in (("a", 20), ("b", 21)):
        (tmp_path / name).mkdir()
        for i in range(4):
            public_log(tmp_path / name / f"{i}.txt", 3.2785 + 0.001 * i, ms + 0.01 * i)
    text = report.compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "4 runs, loss 3.28000 ± 0.00129, time 6.005 ± 0.004 s, 2 x NVIDIA H100" in text
    assert "A is better: time lower" in text and "time at equal loss: validation loss 3.2800 after 6.00 s (A) and 6.30 s (B)" in text


@pytest.mark.parametrize("loss, time, word", [
    ((-2, -1), (-2, -1), "A is better"), ((-2, 1), (-2, -1), "A is better"), ((-2, 1), (-1, 2), "undecided"), ((1, 2), (-1, 2), "B is better"),
    ((1, 2), (-2, -1), "a trade"), ((-2, -1), (1, 2), "a trade"), ((1, 2), (1, 2), "B is better"), ((-math.inf, math.inf),) * 2 + ("undecided",),
])
def test_verdict(loss, time, word):
    assert report.verdict(*(stats.Interval(0.0, *bounds, 3) for bounds in (loss, time)), ("n", "n")).startswith(word)


def test_a_single_run_an_arm_is_undecided_and_says_how_many(tmp_path):
    text = report.compare(str(public_log(tmp_path / "a.txt", 3.278, 20)), str(public_log(tmp_path / "b.txt", 3.280, 20)))
    assert "verdict: undecided" in text and re.search(r"loss no difference shown, n = \d+ an arm would show", text)


def test_a_thousand_runs_compare_quickly(finished, tmp_path, monkeypatch):
    """By the work, not the clock: each log is read once, and each line parsed once."""
    source = first_log(finished[1]).read_bytes()
    (tmp_path / "many").mkdir()
    for i in range(1000):
        (tmp_path / "many" / f"{i}.jsonl").write_bytes(source)
    read, loads, parsed = [], json.loads, []
    monkeypatch.setattr(report, "read_run", lambda path: (read.append(path), runlog.read_run(path))[1])
    monkeypatch.setattr(json, "loads", lambda text, **options: (parsed.append(None), loads(text, **options))[1])
    report.compare(str(tmp_path / "many"), str(finished[1]))
    lines = sum(len(path.read_text().splitlines()) for path in read)
    assert len(read) == len(set(read)) == 1000 and lines <= len(parsed) < 1.1 * lines, "with those of the other arm"


OLD = '''"""Doc."""
# ==============================
# 1. Imports
# ==============================
import math  # why

# ==============================
# 2. Model: attention
# ==============================
# A comment of the section, which is no title
def f(x):
    """What."""
    return "# no comment"  # but this is
'''


def test_diff_by_section_and_code_only():
    new = OLD.replace("# why", "# because").replace('"""What."""', '"""What else?\n\n    More."""').replace("# 2. Model: attention", "# 2. Model")
    found = codediff.changes(new, OLD)
    assert [(c.title, c.added, c.removed) for c in found if c.lines] == [("Imports", 1, 1), ("Model", 4, 2)]
    assert not any(c.lines for c in codediff.changes(new, OLD, code_only=True))
    one_line = re.sub(r"# =+\n# (.*)\n# =+\n", r"# ==== \1 ====\n", OLD)  # the other style of banner
    assert [*codediff.sections(one_line)] == [*codediff.sections(OLD)] == ["top", "Imports", "Model"]
    changed = codediff.changes(OLD.replace("# no comment", "# none"), OLD, code_only=True)
    assert [c.title for c in changed if c.lines] == ["Model"] and '-    return "# no comment"' in changed[-1].lines
    assert codediff.summary(changed).splitlines()[-1].split() == ["+1", "-1", "10", "+0", "in", "1", "of", "3", "sections"]


def test_one_pair_is_compared_with_the_usual_noise(tmp_path):
    """It has no standard deviation of its own."""
    root = make_repository(tmp_path)
    first = make(root, "first", n=1)
    runner.run_plan(first, None)
    (root / "train_gpt.py").write_text(FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 50.0"))
    second = make(root, "second", n=1, parent=first.name)
    runner.run_plan(second, None)
    assert "pairs would show" in report.compare(str(second), f"{second}:b")


def test_diff_names_what_it_needs(tmp_path, finished):
    with pytest.raises(runlog.Failure, match="parses"):
        codediff.changes("def f(:", "", code_only=True)
    with pytest.raises(runlog.Failure, match="only its hash"):
        codediff.read_script(first_log(finished[1]))
    assert codediff.read_script(Path("pointer-keys")).startswith('"""'), "a record's name is enough"
    a, b = (codediff.read_script(public_log(tmp_path / f"{code}.txt", 3.2, 1, f"x = {code}")) for code in "12")
    assert [c.title for c in codediff.changes(a, b) if c.lines] == ["Muon optimizer"]


# ---------------------------------------------------------------------------------------------------------------------
# The command line, as a user has it
# ---------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def clone(copy):
    """The finished repository with the tool in it, ranked: its practice track counts as one with a leaderboard."""
    for path in (*(ROOT / "records").glob("*.py"), *(ROOT / "records").glob("*.csv"), *(ROOT / "records").glob("*.sha256")):
        shutil.copy(path, copy.parent)
    shutil.copy(copy / "train_gpt.py", copy.parents[1])
    (copy.parent / "README.md").write_text("# Records\n\n<!-- leaderboard -->\nnothing\n<!-- /leaderboard -->\n")
    for name, practice, ranked in (("tracks.py", "0.01, 2, practice=True", "0.01, 3"),
                                   ("record.py", "LEAST_RUNS, HIGH_END = 5,", "LEAST_RUNS, HIGH_END = 3,")):
        tool = copy.parent / name
        assert practice in tool.read_text()
        tool.write_text(tool.read_text().replace(practice, ranked))
    return copy.parents[1]


def call(root, *words, file_bytes=None):
    """`file_bytes`: what any file may hold at most, as on a full disk."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))) if file_bytes else None
    return subprocess.run([sys.executable, "records", *words], cwd=root, capture_output=True, text=True, timeout=120, preexec_fn=limit)


def named(root, name):
    return next(root.glob(f"records/*_{name}"))


@pytest.mark.slow
def test_verify_command(clone):
    done = call(clone, "verify")
    assert done.returncode == 0 and "2 of 2 records verify" in done.stdout and "FAIL" not in done.stdout
    child = named(clone, "child")
    first_log(child).unlink()
    done = call(clone, "verify", str(child), "--json")
    assert done.returncode == 1
    assert {c["name"] for c in json.loads(done.stdout)[str(child)] if not c["ok"]} >= {"runs"}
    assert call(clone, "verify", "nowhere").returncode == 1 and call(clone, "compare", "nowhere", "nowhere").returncode == 2


@pytest.mark.slow
def test_a_folder_of_a_records_name_is_no_record(clone, monkeypatch):
    """What stands in the working folder, as docs/ does. Nor is a link to a record one."""
    monkeypatch.chdir(clone)
    (clone / "child").mkdir()
    found = record.find(Path("child"), clone / "records")
    assert found.parent == clone / "records" and found.name.endswith("_child")
    (clone / "linked").symlink_to(found)
    with pytest.raises(runlog.Failure, match="expected a folder, found a link to one"):
        record.load(clone / "linked")


def test_a_name_may_lack_its_date(clone, finished):
    child, start = (named(clone, name).name for name in ("child", "start"))
    short, whole = (call(clone, "compare", a, b) for a, b in (("child", "start"), (child, start)))
    assert short.returncode == whole.returncode and short.stdout == whole.stdout != "" and not short.stderr
    assert "1 of 1 records verify" in call(clone, "verify", "child").stdout
    shutil.copytree(finished[0] / "data", clone / "data")
    assert "expected another than that of" in call(clone, "new", "idea", "--parent", "child").stderr
    (clone / "train_gpt.py").write_text(FAKE + "# another script\n")
    assert call(clone, "new", "idea", "--parent", "child").returncode == 0
    assert record.load(named(clone, "idea")).record["parent"] == child
    shutil.copytree(named(clone, "child"), clone / "records/2020-01-01_child")
    assert "record child: expected the name of one record, found 2020-01-01_child and" in call(clone, "verify", "child").stdout


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(clone):
    process = subprocess.Popen([sys.executable, "-u", "records", "verify"], cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (128 + signal.SIGPIPE, "")


@pytest.mark.slow
def test_what_cannot_be_written_is_said_in_a_line(clone):
    """Also of the little that Python would write at its exit only."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for words in (["compare", "child", "start"], ["export", str(first_log(named(clone, "child"))), "--csv"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "records", *words], cwd=clone, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered)
        assert done.returncode == 2 and re.fullmatch(r"records: No space left on device; fix: .*\n", done.stderr)
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, "records", *words], cwd=clone, stdout=writer, stderr=subprocess.PIPE, text=True, env=buffered)
        os.close(writer)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("change", [
    lambda e: [line.pop("tokens") for line in e if line["kind"] == "step"],
    lambda e: event(e, "step").update(step=0.5),
    lambda e: event(e, "step").update(ms_per_step=math.inf),
])
def test_a_log_of_odd_steps_is_refused_in_one_line(copy, change):
    import export
    import plots
    log = first_log(copy)
    rewrite_log(log, change)
    for use in (lambda: export.csv_text(log), lambda: plots.plot_log(log, copy / "plot.svg")):
        with pytest.raises(runlog.Failure, match="expected .* step"):
            use()


def test_a_name_is_no_pattern():
    for name in ("**", "*", "record-9?"):
        with pytest.raises(runlog.Failure, match="expected a readable file"):
            report.load_runs(name)


@pytest.mark.slow
def test_a_retime_has_the_plan_of_its_record(clone):
    done = call(clone, "new", "again", "--retime", named(clone, "child").name, "--n", "9")
    assert done.returncode == 2 and "found --n too; fix: leave those options out" in done.stderr


@pytest.mark.slow
def test_run_can_only_tell_how_long(clone, finished):
    shutil.copytree(finished[0] / "data", clone / "data")
    (clone / "train_gpt.py").write_text(FAKE + "# another script\n")
    assert call(clone, "new", "idea", "--track", "smoke", "--parent", named(clone, "child").name).returncode == 0
    done = call(clone, "run", f"records/{named(clone, 'idea').name}", "--dry-run")
    assert done.returncode == 0 and re.fullmatch(r"6 runs: .*: about \d+\.\d minutes, going by .*_child, 1 x fake\n", done.stdout)
    assert not (named(clone, "idea") / "runs").exists()


@pytest.mark.slow
def test_leaderboard_command(clone):
    readme = clone / "records/README.md"
    assert call(clone, "leaderboard", "--check").returncode == 1 and "nothing" in readme.read_text()
    before = readme.read_text()
    done = call(clone, "leaderboard", file_bytes=100)
    assert done.returncode == 2 and done.stderr.startswith("records: ") and done.stderr.count("\n") == 1 and "; fix: " in done.stderr
    assert readme.read_text() == before and not list(readme.parent.glob(".README*"))
    assert call(clone, "leaderboard").returncode == 0
    done = call(clone, "leaderboard", "--check")
    assert done.returncode == 0 and "distance of train_gpt.py from" in done.stdout and "in 0 of" in done.stdout
    script = record.load(named(clone, "child")).record["scripts"]["a"][:8]
    between = r"-[12]\.\d\d % \(-\d\.\d\d to [+-]\d\.\d\d\), at equal loss -[12]\.\d\d % against \S+_start"
    row = rf"\[child\]\(.*_child/\) \| 5\.\d\d \| 5\.00\d\d \| 0\.00\d\d \| 3 \|  \| {between} \| 1\.23 M \| 4\.57 B \| `{script}` \| 1 x fake \| ml \|"
    assert re.search(row, readme.read_text()), readme.read_text()
    readme.write_text(re.sub(r"\| 5\.\d\d \|", "| 4.00 |", readme.read_text()))
    assert call(clone, "leaderboard", "--check").returncode == 1
    whole = readme.read_text()
    readme.write_text(whole.replace("<!-- /leaderboard -->", ""))
    assert call(clone, "leaderboard", "--check").returncode == 1, "a marker is missing"
    readme.write_text(whole)
    first_log(named(clone, "child")).unlink()
    done = call(clone, "leaderboard")
    assert done.returncode == 0 and "_child does not verify" in done.stdout and "child" not in readme.read_text()


def test_the_readme_shows_the_best_of_each_class():
    """Of each track and hardware the fastest that meets its target; none where none does; one under the rule before one that is not."""
    from leaderboard import best_of_each_class

    def folder(loss, seconds, target=5.0, gpu="A", under_rule=True, abandoned=None):
        means = {"a": {"loss": loss, "ms": 1e3 * seconds}}
        return SimpleNamespace(record={"track": "t", "kind": "ml", "means": means, "abandoned": abandoned},
                               target=target, hardware=f"1 x {gpu}", under_rule=under_rule, repeated=None)

    slow, fast, missed, other = folder(4.9, 20), folder(5.0, 10), folder(5.1, 5), folder(6.0, 1, gpu="B")
    assert best_of_each_class([slow, fast, missed, other]) == [fast]
    assert best_of_each_class([missed]) == [], "nothing above its target is the fastest verified"
    early = folder(5.4, 5, target=5.5, under_rule=False)
    assert best_of_each_class([early, slow]) == [slow] and best_of_each_class([early, missed]) == [early]
    assert best_of_each_class([slow, folder(4.9, 1, abandoned="why")]) == [slow]
    without_means = folder(4.9, 1, abandoned="after the first run")
    without_means.record["means"] = {}
    assert best_of_each_class([slow, without_means]) == [slow]


def cells(table, name):
    """{column: cell} of a record in a table of the leaderboard."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("|")]
    return dict(zip(rows[0], next(row for row in rows if any(f"[{name}]" in cell for cell in row)), strict=True))


def test_leaderboard_columns(finished, copy, monkeypatch):
    """All of them of a record without parent, of one with it, and of a retime; p where there is a target, sizes where they are known."""
    from leaderboard import COLUMNS, SHORT, leaderboard_table
    monkeypatch.setitem(record.TRACKS, "smoke", record.TRACKS["smoke"]._replace(practice=False, target_loss=5.0, loss_sd=0.001))
    folders = [record.load(path) for path in (copy, copy.parent / finished[1].name)]
    child, start = (cells(leaderboard_table(folders, "", COLUMNS), name) for name in ("child", "start"))
    losses = [run.loss for run in folders[0].runs("a")]
    time, z = report.gain(folders[0]), stats.z_below(losses, 5.0, 0.001)
    assert float(child["sd"]) == pytest.approx(stats.sd(losses), abs=1e-4)
    assert child["margin"] == f"{z:+.1f} se, p = {stats.normal_cdf(-z):.2g}" and start["margin"].endswith(" se"), "a baseline has no test"
    assert child["n"] == "3" and child["script"] == f"`{folders[0].record['scripts']['a'][:8]}`" and child["hardware"] == "1 x fake"
    percent = " to ".join(f"{100 * ms / folders[0].record['means']['b']['ms']:+.2f}" for ms in (time.low, time.high))
    assert f" % ({percent}), at equal loss " in child["gain"] and f" against {finished[1].name}" in child["gain"]
    assert start["gain"] == "" and (child["dense"], child["sparse"]) == ("1.23 M", "4.57 B")
    assert child["kind"] == "ml, above the target" and start["kind"] == "baseline, above the target"

    short, short_start = (cells(leaderboard_table(folders, "records/", SHORT), name) for name in ("child", "start"))
    assert short_start["rule"] == "rule of 2026-11-28"
    assert short.keys() == set(SHORT) and short["record"] == f"[child](records/{copy.name}/)"
    for log in (copy / "runs").glob("a-*"):
        rewrite_log(log, lambda e: e[0].pop("parameters"))
    unknown = cells(leaderboard_table([record.load(copy)], "", COLUMNS), "child")
    assert unknown["dense"] == unknown["sparse"] == "", "nobody has counted them"
    assert "No record yet: speedrun, sprint-fineweb, sprint-small-fineweb, sprint-webtext, sprint-small-webtext, speedrun-webmix, speedrun-webmix-free." in leaderboard_table(folders, "", COLUMNS)


@pytest.mark.parametrize("count, text", [(None, ""), (0, "0"), (999, "999"), (33_325_433, "33.3 M"), (172_180_049, "172 M"), (6_558_375_936, "6.56 B")])
def test_sizes_in_words(count, text):
    from leaderboard import size_text
    assert size_text(count) == text


def test_diff_command(clone):
    assert call(clone, "diff", "x" * 300, "x").stderr.count("\n") == 1
    done = call(clone, "diff", str(named(clone, "child")), str(named(clone, "start")))
    assert done.returncode == 0 and re.search(r"\+1     -1 +\d+     \+0  Imports\n", done.stdout) and "-LOSS, MS = 5.0, 100.0" in done.stdout


@pytest.mark.slow
def test_plot_command(clone):
    pytest.importorskip("matplotlib")
    for name, runs in (("plot.svg", []), ("plot.png", [str(named(clone, "child")), str(named(clone, "start"))])):
        done = call(clone, "plot", *runs, "--out", name)
        assert done.returncode == 0, done.stderr
        assert (clone / name).stat().st_size > 5000
    assert call(clone, "plot", "--out", "nowhere/plot.svg").returncode == 2
    (clone / "plot.svg").unlink()
    assert call(clone, "plot", "--out", "plot.svg", file_bytes=4000).returncode == 2 and not list(clone.glob("*plot.svg"))


# ---------------------------------------------------------------------------------------------------------------------
# This repository
# ---------------------------------------------------------------------------------------------------------------------
def test_history_is_complete():
    with (ROOT / "records/history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["number"]) for row in rows] == list(range(1, 93))
    dates = [row["date"] for row in rows]
    assert dates == sorted(dates) and (dates[0], dates[-1]) == ("2024-05-28", "2026-08-30")
    assert float(rows[0]["seconds"]) == 2700 and float(rows[91]["seconds"]) == 39.9 and all(3 < len(row["change"]) < 100 for row in rows)


# But plans that are not finished, which one may have while one tests. `.ci/run` verifies every folder.
@pytest.mark.parametrize("path", [path for path in record.all_folders() if json.loads((path / "record.json").read_text())["means"]] or [None])
def test_every_record_verifies(path, monkeypatch):
    monkeypatch.setattr(record, "PARENTS_SINCE", REAL_DAY)
    assert path is None or failed(path) == set()


def test_the_example_in_the_readme_is_a_record():
    text = (ROOT / "records/README.md").read_text()
    example = json.loads(re.search(r"```json\n(.*?)```", text, re.DOTALL)[1])
    assert record.schema_errors(example) == []
    name = re.search(r"    records/(2026-\S+)/\n      record.json", text)[1]
    assert example["plan"]["seeds"] == record.plan_seeds(example["plan"]["id"], len(example["plan"]["seeds"]))
    assert example["plan"]["id"] == record.plan_id(example, name) and example["plan"]["order"] == record.plan_order(example["plan"]["seeds"], "ab")


@pytest.mark.slow
def test_parameters_are_what_the_scripts_build():
    """Those of the records whose logs do not tell them, counted again on a device without memory."""
    import importlib.util

    import torch

    from leaderboard import counted_parameters
    folders = {folder.record["scripts"]["a"]: folder for folder in map(record.load, record.all_folders())
               if folder.runs("a")}  # a plan has none yet
    for script, counts in counted_parameters().items():
        folder = folders[script]
        spec = importlib.util.spec_from_file_location(f"script_{script[:8]}", folder.script("a"))
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        preset = module.PRESETS[folder.track.preset]
        model = module.GPT(preset.model, module.select_ops(torch.device("cpu")), torch.device("meta"))
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        sparse = sizes.pop("ngram", 0)
        assert counts == {"dense": sum(sizes.values()), "sparse": sparse}, folder.path.name
        del sys.modules[spec.name]
    logged = {script for script, folder in folders.items() if "parameters" in folder.runs("a")[0].head}
    assert folders.keys() == logged | counted_parameters().keys()
