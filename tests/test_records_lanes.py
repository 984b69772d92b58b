"""Several runs of a plan at once, each on GPUs of its own: which run goes where, what an interruption or a failure
leaves, and what verify says of runs beside each other. The GPUs are names; the stand-in of test_records.py trains."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "records"), str(ROOT / "tests")]
import lanes  # noqa: E402
import record  # noqa: E402
import report  # noqa: E402
import runlog  # noqa: E402
import runner  # noqa: E402
import starts  # noqa: E402
import verify  # noqa: E402
from test_records import (  # noqa: E402, F401
    FAKE,
    QUERY_GPUS,
    copy,
    event,
    failed,
    finished,
    make,
    make_repository,
    quick,
    rewrite_log,
)

GPUS = ["GPU-00", "GPU-11", "GPU-22", "GPU-33"]
NO_GPU = 'machine="m1", gpus=[]'
OLD_FACTS = 'machine="m" + "-".join(visible), gpus=["fake"] * len(visible)'
FACTS = f'{OLD_FACTS}, host="h1", gpu_ids=visible'
# What the child does on a GPU, or with a seed, for which there is a file: crash, lose its loss, or train on until it is
# interrupted. The first two happen when the third has begun.
TROUBLE = """
def wanted(what):
    return any(Path(f"{what}-{name}").exists() for name in (*visible, options.seed))

def wait_for_others():
    while not Path("lingers").exists():
        time.sleep(0.01)

if wanted("crash"):
    wait_for_others()
    sys.exit("train_gpt: GPU: expected 8, found 7; fix: reboot")
if wanted("diverge"):
    wait_for_others()
    line("end", state="failed: training loss", code=3)
    sys.exit(3)
if wanted("linger"):
    try:
        Path("lingers").touch()
        Path(f"lingers-{options.seed}").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(0.2)
        line("end", state="interrupted", code=130)
        sys.exit(130)
"""


def with_gpus(facts=FACTS, more=""):
    """The stand-in on a machine with GPUs."""
    assert NO_GPU in FAKE
    return FAKE.replace(NO_GPU, facts).replace("ms, step = MS", f"{more}\nms, step = MS")


@pytest.fixture
def gpus(monkeypatch):
    """Four of them, as nvidia-smi lists them, and whose ids it was asked for."""
    asked = []

    def query(words, *ids):
        asked.append((words, ids))
        if "compute-apps" in words:
            return []
        return [f"{number}, {uuid}" for number, uuid in enumerate(GPUS)] if "index" in words else ["fake"] * len(GPUS)

    for module in (lanes, runner, starts, record):
        monkeypatch.setattr(module, "query_gpus", query)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_GPUS", ",".join(GPUS))
    return asked


def plan(tmp_path, n=4, child_facts=FACTS, parent_facts=FACTS, more=""):
    """A plan of a child and its parent that nobody has carried out, and the root."""
    root = make_repository(tmp_path / "repository")
    (root / "train_gpt.py").write_text(with_gpus(parent_facts))
    base = make(root, "start", n=1, world=1)
    runner.run_plan(base, None)
    (root / "train_gpt.py").write_text(with_gpus(child_facts, more).replace("MS = 5.0, 100.0", "MS = 5.0, 98.0"))
    return make(root, "child", parent=base.name, n=n, world=1), root


def logged(path):
    """The runs of a record by their keys, in the order of the plan."""
    order = record.load(path).record["plan"]["order"]
    files = {key: path / "runs" / f"{key}.jsonl" for key in order}
    return {key: runlog.read_run(file) for key, file in files.items() if file.exists()}


def lane_of_seeds(path):
    """{seed: lanes of its runs}"""
    found = {}
    for key, run in logged(path).items():
        found.setdefault(key.partition("-s")[2], set()).add(record.lane_name(run))
    return found


def texts(path):
    return {check.name: check.text for check in verify.verify(path)}


# ---- a plan on lanes -------------------------------------------------------------------------------------------------
def test_a_plan_is_carried_out_on_lanes(tmp_path, gpus, capsys):
    path, _ = plan(tmp_path, n=5)
    runner.run_plan(path, None, 2)
    said = capsys.readouterr().out
    assert failed(path) == set(), texts(path)

    runs = logged(path)
    seeds = lane_of_seeds(path)
    assert all(len(names) == 1 for names in seeds.values()), "a pair is on one lane"
    assert set.union(*seeds.values()) == {"0", "1"}
    for name, gpu in (("0", GPUS[0]), ("1", GPUS[1])):
        own = {key: run for key, run in runs.items() if record.lane_name(run) == name}
        assert {run.head["machine"] for run in own.values()} == {f"m{gpu}"}
        times = [runlog.span(run) for run in own.values()]
        assert all(end <= start for (_, end), (start, _) in zip(times, times[1:])), "in the plan's order, one by one"
        for arm in "ab":
            firsts = [starts.start_up(run) for key, run in own.items() if key[0] == arm]
            assert firsts == [70, *[10] * (len(firsts) - 1)], "each arm has a cache of its own on each lane"
    assert lanes.most_at_once(list(runs.values())) == 2
    numbers = report.read_block(path / "README.md", "numbers")
    assert "Up to 2 runs at once, each on a GPU of its own: these are times of runs beside others." in numbers
    assert texts(path)["order"].endswith(", up to 2 at once")
    for number, key in enumerate(runs, 1):
        name = record.lane_name(runs[key])
        assert re.search(rf"^GPU {name}  run {number}/10  {key} .*  ok$", said, re.MULTILINE)
    assert not list(starts.CACHES.glob("*"))
    assert not (path / "running").exists()


def test_without_the_option_all_is_as_before(tmp_path, gpus, capsys):
    """One run after the other, with every GPU visible, and no word of lanes."""
    path, _ = plan(tmp_path, n=2)
    runner.run_plan(path, None)
    assert failed(path) == set()
    assert lane_of_seeds(path).popitem()[1] == {""}
    assert {run.head["machine"] for run in logged(path).values()} == {"m" + "-".join(GPUS)}
    assert all(re.search(r"-c[12]$", run.head["settings"]["log_dir"]) for run in logged(path).values())
    assert "at once" not in report.read_block(path / "README.md", "numbers")
    assert "GPU " not in capsys.readouterr().out


def test_a_parent_that_names_no_gpu(tmp_path, gpus):
    """Its runs have the `machine` of the other arm's on the same lane, which tells the GPU."""
    path, _ = plan(tmp_path, parent_facts=OLD_FACTS)
    runner.run_plan(path, None, 3)
    assert failed(path) == set()
    assert lanes.most_at_once(list(logged(path).values())) == 3
    assert not any("gpu_ids" in run.head for key, run in logged(path).items() if key[0] == "b")


def test_scripts_that_name_no_gpu_do_not_run_at_once(tmp_path, gpus):
    path, _ = plan(tmp_path, child_facts=OLD_FACTS, parent_facts=OLD_FACTS)
    with pytest.raises(runlog.Failure, match="^scripts: expected one whose log names its GPUs"):
        runner.run_plan(path, None, 2)
    assert not (path / "runs").exists()


def test_more_runs_at_once_than_there_are_gpus_for(tmp_path, gpus):
    path, _ = plan(tmp_path)
    words = "^visible GPUs: expected 5 for 5 runs at once, found enough for 4"
    with pytest.raises(runlog.Failure, match=words) as caught:
        runner.run_plan(path, None, 5)
    assert caught.value.code == 4
    assert not (path / "runs").exists()


def test_lanes_are_groups_of_the_visible_gpus(gpus, monkeypatch):
    assert [lane.name for lane in lanes.lanes_here(1)] == ["0", "1", "2", "3"]
    pair = lanes.lanes_here(2)
    assert pair == [lanes.Lane("0.1", ("GPU-00", "GPU-11")), lanes.Lane("2.3", ("GPU-22", "GPU-33"))]
    assert pair[1].label == "GPUs 2, 3"
    assert pair[1].shares("1.2")
    assert not pair[1].shares("0.1")
    assert pair[1].shares("")
    assert lanes.lanes_here(8) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lanes.lanes_here(1) == []


def test_visible_devices_are_respected(monkeypatch):
    """nvidia-smi is asked for those that the user has made visible, and for a lane by the ids of its GPUs."""
    commands = []
    done = subprocess.CompletedProcess([], 0, "2, GPU-22\n3, GPU-33\n")
    monkeypatch.setattr(record.subprocess, "run", lambda command, **_: commands.append(command) or done)
    monkeypatch.setattr(lanes, "query_gpus", QUERY_GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [lane.name for lane in lanes.lanes_here(1)] == ["2", "3"]
    QUERY_GPUS("--query-compute-apps=pid", "GPU-22", "GPU-33")
    assert [command[-1] for command in commands] == ["--id=2,3", "--id=GPU-22,GPU-33"]


def test_a_run_sees_the_gpus_of_its_lane(tmp_path, gpus, monkeypatch):
    path, _ = plan(tmp_path)
    folder = record.load(path)
    key = folder.record["plan"]["order"][0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    lane = lanes.Lane("0.1", ("GPU-00", "GPU-11"))
    assert starts.environment(folder, key, lane)["CUDA_VISIBLE_DEVICES"] == "GPU-00,GPU-11"
    assert starts.environment(folder, key)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_only_the_gpus_of_a_lane_have_to_be_idle(gpus, monkeypatch):
    monkeypatch.setattr(runner, "query_gpus", lambda words, *ids: ["4711, python"] if "GPU-11" in ids else [])
    runner.check_idle(lanes.Lane("0", ("GPU-00",)), patience_s=0)
    with pytest.raises(runlog.Failure, match="4711") as caught:
        runner.check_idle(lanes.Lane("1", ("GPU-11",)), patience_s=0)
    assert caught.value.code == 4


def test_every_run_waits_for_its_own_gpus(tmp_path, gpus):
    path, _ = plan(tmp_path, n=2)
    del gpus[:]
    runner.run_plan(path, None, 2)
    assert sorted(ids for words, ids in gpus if "compute-apps" in words) == [("GPU-00",)] * 2 + [("GPU-11",)] * 2


@pytest.mark.slow
def test_a_log_tells_its_gpus_apart(monkeypatch):
    """What the trainer notes: a GPU has the same id whatever else a run sees, and none of it tells which it is."""
    sys.path.insert(0, str(ROOT))
    import train_gpt as tg
    on_cpu = tg.machine_facts()
    assert (on_cpu["gpu_ids"], on_cpu["host"]) == ([], on_cpu["machine"])

    found = [SimpleNamespace(uuid=uuid, name="fake") for uuid in GPUS]
    monkeypatch.setattr(tg.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tg.torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(tg.torch.cuda, "get_device_properties", lambda index: found[index])
    facts = tg.machine_facts()
    assert facts["host"] == on_cpu["host"] != facts["machine"]
    assert len(set(facts["gpu_ids"])) == len(GPUS)
    assert not any(uuid in str(facts) for uuid in GPUS)
    del found[0]
    fewer = tg.machine_facts()
    assert fewer["gpu_ids"] == facts["gpu_ids"][1:]
    assert fewer["machine"] != facts["machine"]


# ---- which run goes where --------------------------------------------------------------------------------------------
def schedule(path, at_once, here=None):
    return lanes.Schedule(record.load(path), at_once, lanes.lanes_here(1) if here is None else here)


def test_a_new_seed_starts_on_the_lane_that_is_free_first(tmp_path, gpus):
    path, _ = plan(tmp_path, n=3)
    order = record.load(path).record["plan"]["order"]
    turns = schedule(path, 2)
    first, second = lanes.lanes_here(1)[:2]
    assert turns.due() == [(first, order[0]), (second, order[2])]
    assert turns.due() == []
    turns.ended(second)
    assert turns.due() == [(second, order[3])], "the other arm of its seed comes first"
    turns.ended(second)
    assert turns.due() == [(second, order[4])]
    turns.ended(first)
    assert turns.due() == [(first, order[1])]
    for lane in (first, second):
        turns.ended(lane)
    assert turns.due() == [(second, order[5])]
    assert turns.unfinished
    turns.ended(second)
    assert not turns.unfinished


def pretend(path, **lane_names):
    """Runs that were made, as far as a schedule looks at them: {key: lane}."""
    (path / "runs").mkdir(exist_ok=True)
    folder = record.load(path)
    for key, name in lane_names.items():
        head = f'{{"kind": "head", "settings": {{"log_dir": "running/{record.log_name(folder, key, name)}"}}}}\n'
        (path / "runs" / f"{key}.jsonl").write_text(head)
        folder.record["runs"][f"{key}.jsonl"] = "0" * 64
    record.write_record(path, folder.record)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_after_an_interruption_each_gpu_keeps_the_order(tmp_path, gpus, at_once):
    """The second seed has no run; the third has one of its two, on GPU 1, and must go on there. The second may not
    follow it there, and takes the GPU of the first."""
    path, _ = plan(tmp_path)
    order = record.load(path).record["plan"]["order"]
    pretend(path, **{order[0]: "0", order[1]: "0", order[4]: "1"})
    turns = schedule(path, at_once)
    made = {}
    while turns.unfinished:
        for lane, key in turns.due():
            made[key] = lane.name
        turns.ended(next(iter(turns.running)))
    assert made[order[5]] == "1"
    assert made[order[2]] == made[order[3]] != "1"
    assert made[order[6]] == made[order[7]]


def test_a_run_without_lanes_has_all_gpus_to_itself(tmp_path, gpus):
    """What was begun without the option ends without: its pair first, alone."""
    path, _ = plan(tmp_path)
    order = record.load(path).record["plan"]["order"]
    pretend(path, **{order[0]: ""})
    turns = schedule(path, 4)
    assert turns.due() == [(lanes.EVERYTHING, order[1])]
    assert turns.due() == []
    turns.ended(lanes.EVERYTHING)
    assert [key for _, key in turns.due()] == [order[2], order[4], order[6]]


def test_the_gpu_of_a_pair_has_to_be_there(tmp_path, gpus):
    path, _ = plan(tmp_path)
    order = record.load(path).record["plan"]["order"]
    pretend(path, **{order[0]: "7"})
    with pytest.raises(runlog.Failure, match="expected GPU 7, where the other arm of its seed ran, found others"):
        schedule(path, 4).due()


def test_a_late_seed_takes_a_cache_of_its_own(tmp_path, gpus):
    """One of two seeds is done: the other goes to the other lane, so that its arm has two caches."""
    path, _ = plan(tmp_path, n=2)
    order = record.load(path).record["plan"]["order"]
    pretend(path, **{order[0]: "0", order[1]: "0"})
    assert schedule(path, 2).due() == [(lanes.lanes_here(1)[1], order[2])]


def test_lanes_have_caches_of_their_own(tmp_path, gpus):
    path, _ = plan(tmp_path, n=2)
    folder = record.load(path)
    keys = folder.record["plan"]["order"]
    here = [lanes.EVERYTHING, *lanes.lanes_here(1)]
    found = {place for key in keys for lane in here for place in starts.caches(folder, key, lane).values()}
    assert len(found) == 2 * 2 * (2 + 4), "of two compilers and two arms: two without lanes, and one on each"


# ---- interruptions, failures -----------------------------------------------------------------------------------------
def left_over(monkeypatch):
    """The trainings that are started from now on, to see whether one outlives its `run`."""
    begun = []
    begin = runner.begin
    monkeypatch.setattr(runner, "begin", lambda *arguments: begun.append(begin(*arguments)) or begun[-1])
    return begun


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_run_continues_with_any_number_of_lanes(tmp_path, gpus, monkeypatch, at_once):
    """Interrupted in the middle of two trainings: the whole runs are filed, both attempts lie aside, none goes on."""
    path, root = plan(tmp_path, more=TROUBLE)
    begun = left_over(monkeypatch)
    folder = record.load(path)
    order, seeds = folder.record["plan"]["order"], folder.record["plan"]["seeds"]
    flags = [root / f"linger-{seed}" for seed in seeds[1:3]]  # whose runs of the child are the third and the sixth
    for flag in flags:
        flag.touch()

    def interrupted(attempts, *rest):
        while not any(attempt.ended for attempt in attempts):
            if all((root / f"lingers-{seed}").exists() for seed in seeds[1:3]):
                raise KeyboardInterrupt
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "follow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.run_plan(path, None, 2)
    before = {file: file.read_bytes() for file in (path / "runs").iterdir()}
    assert {file.stem for file in before} == {*order[:2], order[2]}
    assert {file.name for file in before} == set(record.load(path).record["runs"])
    assert all(attempt.ended for attempt in begun)
    assert not list((path / "running").glob("*/*.jsonl"))
    aside = sorted(file.name.rpartition("-")[0] for file in (path / "unfinished").iterdir())
    assert aside == sorted(order[3:5])

    for flag in flags:
        flag.unlink()
    runner.run_plan(path, None, at_once)
    assert failed(path) == set(), texts(path)
    assert all(file.read_bytes() == content for file, content in before.items())
    assert all(len(names) == 1 for names in lane_of_seeds(path).values())


def test_logs_of_a_killed_runner_are_filed_from_all_lanes(tmp_path, gpus):
    """Nobody could file them then: one is whole, one not."""
    path, root = plan(tmp_path, more=TROUBLE)
    folder = record.load(path)
    order = folder.record["plan"]["order"]
    data = root / "data/sample"
    whole, cut = lanes.lanes_here(1)[1:3]
    for key, lane in ((order[0], whole), (order[2], cut)):
        words = runner.command(folder, key, data, lane)
        subprocess.run(words, check=True, cwd=root, env=starts.environment(folder, key, lane))
    log = runner.newest_log(runner.log_dir(folder, order[2], cut))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    runner.run_plan(path, None, 2)
    assert failed(path) == set(), texts(path)
    assert record.lane_name(logged(path)[order[1]]) == record.lane_name(logged(path)[order[0]]) == "1"
    assert len(list((path / "unfinished").iterdir())) == 1


@pytest.mark.parametrize("trouble, code, words", [
    ("crash", 4, "run .* on GPU 1: expected .*, found .*expected 8, found 7"),
    ("diverge", 3, "run .*: expected a finite loss"),
])
def test_a_failed_run_stops_the_other_lanes(tmp_path, gpus, monkeypatch, trouble, code, words):
    """They are asked, may close their logs, and lie aside; the failure is what `run` ends with."""
    path, root = plan(tmp_path, more=TROUBLE)
    begun = left_over(monkeypatch)
    (root / f"{trouble}-{GPUS[1]}").touch()
    (root / f"linger-{GPUS[0]}").touch()
    order = record.load(path).record["plan"]["order"]
    began = time.monotonic()
    with pytest.raises(runlog.Failure, match=words) as caught:
        runner.run_plan(path, None, 2)
    assert caught.value.code == code
    assert time.monotonic() - began < 50
    assert len(begun) >= 2
    assert all(attempt.ended for attempt in begun)
    aside = [runlog.read_run(file) for file in (path / "unfinished").iterdir() if file.name.startswith(order[0])]
    assert [run.state for run in aside] == ["interrupted"], "asked, and waited for its log"
    with runner.only_one(path):
        pass
    assert not list((path / "running").glob("*/*.jsonl"))


def test_who_asks_twice_does_not_wait(tmp_path):
    """A training that does not hear is ended at a second Ctrl-C."""
    words = "import signal, time; signal.signal(2, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    deaf = [subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, start_new_session=True)
            for _ in "ab"]
    for process in deaf:
        process.stdout.readline()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    runner.stop(*deaf)
    assert time.monotonic() - began < 30
    assert [process.returncode for process in deaf] == [-signal.SIGKILL] * 2


def test_one_run_of_a_record_at_a_time(tmp_path, gpus):
    path, _ = plan(tmp_path)
    with runner.only_one(path), pytest.raises(runlog.Failure, match="expected one `run` at a time"):
        runner.run_plan(path, None, 2)


# ---- what is said ----------------------------------------------------------------------------------------------------
def test_a_plan_tells_its_duration_on_lanes(tmp_path, gpus):
    """Each lane compiles for each arm; the longest lane counts."""
    path, _ = plan(tmp_path, n=5)
    folder = record.load(path)
    assert re.match(r"10 runs: 4 cold starts of about 76 s, 6 warm starts of", starts.duration(folder))
    found = starts.timing(folder)._replace(cold=70.0, warm=10.0, training={"a": 6.0, "b": 6.0})
    two = starts.forecast(folder, 2, found)
    assert (two.cold, two.warm) == (4, 6)
    assert two.seconds == 2 * 76 + 4 * 16
    five = starts.forecast(folder, 5, found)  # one GPU more than there are here
    assert (five.cold, five.warm) == (10, 0)
    assert five.seconds == 2 * 76
    compiled = starts.caches(folder, "a" + folder.record["plan"]["order"][0][1:], lanes.lanes_here(1)[0])
    (compiled["TRITON_CACHE_DIR"] / "kernel").mkdir(parents=True)
    assert starts.forecast(folder, 2, found).cold == 3
    assert re.match(r"10 runs, 5 at once: 9 cold starts of about 76 s, 1 warm start of", starts.duration(folder, 5))


class Terminal:
    """Standard output that is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_terminal_has_a_line_for_each_lane(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    status = runner.Status()
    status.show("a-s1", 0, "GPU 0  run 1/4")
    status.show("a-s2", 0, "GPU 1  run 3/4  and more than fits")
    status.clear()
    assert terminal.text == "GPU 0  run 1/4\nGPU 1  run 3/4  and\r\033[K\033[A\033[K"
    status.clear()
    assert terminal.text.endswith("\033[K"), "nothing is taken back twice"
    assert terminal.text.count("\r") == 1, "nothing is taken back twice"


def test_a_file_has_a_line_for_each_step(capsys):
    status = runner.Status()
    for steps in (0, 0, 1):
        status.show("a-s1", steps, f"GPU 0  step {steps}")
        status.show("a-s2", 0, "GPU 1  step 0")
        status.clear()
    assert capsys.readouterr().out.splitlines() == ["GPU 0  step 0", "GPU 1  step 0", "GPU 0  step 1"]


def test_progress_names_the_lane(finished):  # noqa: F811
    run = logged(finished[1]).popitem()[1]
    text = runner.progress(run, 2, 6, "a-s1", 90.0, 5.0, lanes.Lane("2", ("GPU-22",)), 2)
    assert re.fullmatch(r"GPU 2  run 2/6  a-s1 +step 80/80  loss 5\.\d+  left 0:00, all runs 3:00", text)


# ---- verify ----------------------------------------------------------------------------------------------------------
def file_of(path, key):
    return path / "runs" / f"{key}.jsonl"


def by_lane(path):
    """{lane: keys in the plan's order}"""
    found = {}
    for key, run in logged(path).items():
        found.setdefault(record.lane_name(run), []).append(key)
    return found


def start_of(path, key):
    return logged(path)[key].head["started"]


@pytest.fixture
def on_lanes(tmp_path, gpus):
    """A record of four seeds, carried out on two lanes."""
    path, _ = plan(tmp_path)
    runner.run_plan(path, None, 2)
    assert failed(path) == set()
    return path


def move(path, key, started):
    rewrite_log(file_of(path, key), lambda e: e[0].update(started=started))


def test_runs_at_once_on_one_gpu(on_lanes):
    """The second run of a lane starts a moment after the first, which is a fault; two lanes may start so."""
    first, second, *_ = by_lane(on_lanes)["0"]
    other = by_lane(on_lanes)["1"][0]
    time_of_first = start_of(on_lanes, first)
    move(on_lanes, other, time_of_first)
    assert failed(on_lanes) == set()
    move(on_lanes, second, later(time_of_first, 1))
    assert failed(on_lanes) == {"order"}
    assert f"expected {first} to end before {second} starts" in texts(on_lanes)["order"]


def later(text, seconds):
    moment = datetime.datetime.fromisoformat(text)
    return (moment + datetime.timedelta(seconds=seconds)).isoformat()


def test_runs_at_once_without_lanes(copy):  # noqa: F811
    first, second, *_ = record.load(copy).record["plan"]["order"]
    move(copy, second, later(start_of(copy, first), 30))
    assert failed(copy) == {"order"}
    assert "found them at once" in texts(copy)["order"]


def test_another_order_on_a_lane(on_lanes):
    """All but the last run of a lane go to an hour later, not the last to an hour before: soon after midnight that
    would be the day before the plan's."""
    *others, last = by_lane(on_lanes)["1"]
    for key in others:
        move(on_lanes, key, later(start_of(on_lanes, key), 3600))
    assert failed(on_lanes) == {"order"}
    assert f" before {last}, found it after" in texts(on_lanes)["order"]


def test_arms_in_another_order(on_lanes):
    """Both runs of a lane's last seed change places."""
    *_, first, second = by_lane(on_lanes)["0"]
    moments = start_of(on_lanes, first), start_of(on_lanes, second)
    move(on_lanes, first, later(moments[1], 100))
    assert failed(on_lanes) == {"order"}


@pytest.mark.parametrize("change, names", [
    (lambda head: head.update(gpu_ids=["GPU-00"]), {"order"}),  # both lanes are one GPU
    (lambda head: head.update(host="h2"), {"order", "machine"}),  # another machine
    (lambda head: (head.pop("gpu_ids"), head.pop("host")), {"order", "machine"}),  # nothing shows which GPU it was
    (lambda head: head.update(gpus=["other"]), {"machine"}),
    (lambda head: head.update(device="other"), {"machine"}),
])
def test_a_lane_that_is_not_shown_to_be_apart(on_lanes, change, names):
    for key in by_lane(on_lanes)["1"]:
        rewrite_log(file_of(on_lanes, key), lambda e: change(e[0]))
    assert failed(on_lanes) == names


def test_two_machines_on_one_lane(on_lanes):
    rewrite_log(file_of(on_lanes, by_lane(on_lanes)["1"][0]), lambda e: e[0].update(machine="m2", gpu_ids=["GPU-99"]))
    assert failed(on_lanes) == {"machine"}
    assert "in all runs on GPU 1, found 2" in texts(on_lanes)["machine"]


def rename_lane(path, key, name):
    """A log that says another lane, and has all that it has."""
    folder = record.load(path)
    donor = logged(path)[next(iter(by_lane(path)[name]))].head
    facts = {what: donor[what] for what in ("machine", "gpu_ids")}
    log_dir = f"running/{record.log_name(folder, key, name)}"
    rewrite_log(file_of(path, key), lambda e: (e[0].update(facts), e[0]["settings"].update(log_dir=log_dir)))


def test_a_pair_on_two_lanes(on_lanes):
    """Of the last seed, at a time when the other lane has nothing else to do."""
    last = record.load(on_lanes).record["plan"]["order"][-1]
    own = record.lane_name(logged(on_lanes)[last])
    move(on_lanes, last, later(start_of(on_lanes, last), 3600))
    assert failed(on_lanes) == set()
    rename_lane(on_lanes, last, "1" if own == "0" else "0")
    assert failed(on_lanes) == {"order"}
    assert "expected both arms on the same GPUs" in texts(on_lanes)["order"]


def test_one_cache_for_all_runs_of_an_arm(on_lanes):
    order = record.load(on_lanes).record["plan"]["order"]
    for number, key in enumerate(order):
        if record.lane_name(logged(on_lanes)[key]) == "1":
            rename_lane(on_lanes, key, "0")
        move(on_lanes, key, later("2026-11-28T08:00:00+00:00", 100 * number))
    assert "settings" in failed(on_lanes)
    assert "arm a: expected 2 caches at least, found 1" in texts(on_lanes)["settings"]


def test_another_name_of_a_lane_is_another_plan(on_lanes):
    key = by_lane(on_lanes)["1"][0]
    rewrite_log(file_of(on_lanes, key), lambda e: e[0]["settings"].update(log_dir="running/else-g1"))
    assert "settings" in failed(on_lanes)


def test_an_unfinished_plan_on_lanes(tmp_path, gpus):
    """While a run of an older script is the only one of its lane nothing is known of its GPU: no reason to stop."""
    path, _ = plan(tmp_path, parent_facts=OLD_FACTS)
    runner.run_plan(path, None, 2)
    order = record.load(path).record["plan"]["order"]
    only = next(key for key in order if key[0] == "b" and record.lane_name(logged(path)[key]) == "1")
    keys = [*by_lane(path)["0"], only]
    context = verify.Context(record.load(path), {key: logged(path)[key] for key in order if key in keys})
    found = {check.name: check for check in verify.evaluate(verify.EACH_RUN, context)}
    assert found["order"].ok, found
    assert found["machine"].ok, found
