"""Runs of one to four processes in which something breaks:
who says what, with which exit code, what the log keeps, and that all end."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import helpers
import sample
from helpers import ROOT, only, read_log, tg

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_network  # noqa: E402

DEADLINE_S = 300  # of the harness; a guard against hanging, far above what any case takes


def at_step(number, action):
    """Do something right before step `number` of the timed loop."""
    tg.Trainer.training_step = helpers.step_after(number, action)


def in_warm_up(action):
    """Do something in the warm-up, after its first stage, before a step in which other ranks exchange gradients."""
    step_of = tg.Trainer.training_step

    def step(trainer, step, *arguments):
        if not trainer.clock.intervals and step:
            action(trainer)
        return step_of(trainer, step, *arguments)

    tg.Trainer.training_step = step


def at_close(action):
    """Do something while the log gets its end."""
    close_of = tg.RunLog.close

    def close(log):
        action(log)
        close_of(log)

    tg.RunLog.close = close


def at_read(number, action):
    """Do something in the prefetch thread right before it reads from the shards for the `number`-th time,
    some steps into the run."""
    read_of = tg.TokenStream.read
    reads = []

    def read(stream, *arguments):
        if threading.current_thread().name.startswith("prefetch"):
            reads.append(arguments)
            if len(reads) == number:
                action(stream)
        return read_of(stream, *arguments)

    tg.TokenStream.read = read


def send(number):
    return lambda _: os.kill(os.getpid(), number)


def bug(_):
    raise RuntimeError("a bug")


def stand(_):
    threading.Event().wait()


def spin(_):
    """Stand still in one call that keeps a core busy, as a collective may."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def terminated_and_deaf(_):
    """Be sent SIGTERM by torchrun, in a call of a library that returns to no handler of Python's."""
    tg.STOP_LIMIT_S = 1.0
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    spin(_)


def terminated_and_slow(_):
    """Be sent SIGTERM in a step that takes minutes."""
    tg.STOP_LIMIT_S = 1.0
    os.kill(os.getpid(), signal.SIGTERM)
    stand(_)


def host_the_store():
    """Be torchrun, whose store is there while a rank is not."""
    store = tg.dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    stand(store)


def on(broken, fault, *arguments):
    """A fault of one rank only."""
    return lambda rank: fault(*arguments) if rank == broken else None


def full_disk(limit_bytes):
    return lambda rank: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def slow_disk(seconds):
    """Models take so long to write."""
    def write(*arguments):
        threading.Event().wait(seconds)
        return write_of(*arguments)

    write_of = sample.write_model
    sample.write_model = write


def data_of_its_own(change):
    """Another folder of shards than the other node's: a copy of its folder after `change`."""
    def open_other(preset, folder):
        shutil.copytree(folder, other := folder.with_name("other"))
        change(other)
        return open_of(preset, other)

    open_of = tg.open_corpus
    tg.open_corpus = open_other


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def one_more_shard(folder):
    helpers.write_shard(folder / "tiny_train_000000.bin", helpers.documents(4000, seed=77))


def network(rank, slow):
    """Instead of a training, benchmarks/bench_network.py with exchanges of 20 ms, or of 300 with the peers that `slow`
    names for this rank.

    It warns of what takes more than five times as long as the best exchange. Without the 20 ms that would
    be a few milliseconds, which a busy core can take too.
    """
    def exchange(operations):
        threading.Event().wait(0.3 if operations[0].peer in slow.get(rank, ()) else 0.02)
        return exchange_of(operations)

    exchange_of = tg.dist.batch_isend_irecv
    tg.dist.batch_isend_irecv = exchange

    def report(_, ranks):
        print(bench_network.report(ranks), flush=True)
        sys.exit()

    tg.build_trainer = report


def other_start():
    """Initial weights of its own: GPUs of two kinds draw other numbers from one seed."""
    reset_of = tg.GPT.reset
    tg.GPT.reset = lambda model, seed: reset_of(model, seed + 1)


TORCHRUN = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
# their rank 1 does not end by itself
STANDING = ("stands still", "stands still in the warm-up", "never comes to torchrun")
FAULTS = {  # number of processes ("2x1": 1 on each of 2 nodes), further options, what happens to a rank
    "killed": (2, (), on(1, at_step, 2, send(signal.SIGKILL))),
    "main rank killed": (2, (), on(0, at_step, 2, send(signal.SIGKILL))),
    "stands still": (2, ("--stall-limit", "5"), on(1, at_step, 2, send(signal.SIGSTOP))),
    "stands still in the warm-up": (2, ("--stall-limit", "1.5"), on(1, in_warm_up, send(signal.SIGSTOP))),
    "deadlock in the warm-up": (2, ("--stall-limit", "1.5"), on(1, in_warm_up, stand)),
    "spins in the warm-up": (1, ("--stall-limit", "1.5"), on(0, in_warm_up, spin)),
    "never comes": (2, ("--stall-limit", "1.5"), on(1, os._exit, 0)),
    "main rank never comes": (2, ("--stall-limit", "1.5"), on(0, os._exit, 0)),
    "never comes to torchrun": (
        2,
        ("--stall-limit", "1.5"),
        lambda rank: host_the_store() if rank else os.environ.update(TORCHRUN),
    ),
    "node never comes": ("2x2", ("--stall-limit", "1.5"), lambda rank: os._exit(0) if rank > 1 else None),
    "nodes of two sizes": (4, (), on(3, os.environ.update, {"GROUP_RANK": "1"})),
    "node with other options": ("2x1", (), on(1, sys.argv.append, "--length=2")),
    "node without shards": ("2x1", (), on(1, data_of_its_own, empty)),
    "node with other shards": ("2x1", (), on(1, data_of_its_own, one_more_shard)),
    "node is killed": ("2x1", (), on(1, at_step, 2, send(signal.SIGKILL))),
    "node is interrupted": ("2x1", (), on(1, at_step, 2, send(signal.SIGINT))),
    "node with a slow network": ("4x1", (), lambda rank: network(rank, {2: (0, 1, 3)})),
    "slow link": ("4x1", (), lambda rank: network(rank, {1: (2,)})),
    "a bug": (2, (), on(1, at_step, 2, bug)),
    "nan": (2, (), on(1, at_step, 2, lambda trainer: trainer.model.embedding.data.fill_(math.nan))),
    "other start": (2, (), on(1, other_start)),
    "interrupted": (2, (), on(1, at_step, 2, send(signal.SIGINT))),
    "terminated": (2, (), on(1, at_step, 2, send(signal.SIGTERM))),
    "terminated in the warm-up": (2, (), lambda rank: in_warm_up(send(signal.SIGTERM))),
    "terminated in a slow step": (2, (), lambda rank: at_step(2, terminated_and_slow)),
    "terminated where it waits": (1, ("--stall-limit", "1000"), on(0, at_step, 2, terminated_and_deaf)),
    "no shards": (4, ("--data", "nowhere"), lambda rank: None),
    "no place for the model": (4, ("--save", "."), lambda rank: None),
    "interrupted twice": (1, (), lambda rank: (at_step(2, send(signal.SIGINT)), at_close(send(signal.SIGINT)))),
    "interrupted alone": (1, (), on(0, at_step, 2, send(signal.SIGINT))),
    "shard cut": (2, (), on(1, at_read, 12, lambda stream: os.truncate(stream.paths[0], 1100))),
    "disk stands still": (
        1,
        ("--stall-limit", "5"),
        on(0, at_read, 30, lambda stream: threading.Event().wait()),
    ),
    "disk full for the log": (1, (), full_disk(2500)),
    "a slow disk for the model": (2, ("--save", "model.pt", "--stall-limit", "1.5"), on(0, slow_disk, 11)),
    "disk full for the model": (1, ("--save", "model.pt"), full_disk(30_000)),
    "two launches: first": (1, (), lambda rank: None),
    "two launches: second": (1, (), lambda rank: None),
}


def break_runs(corpus, folder):
    """All cases, a few at a time; writes the exit codes of their ranks, "hangs" for one that had to be killed."""
    codes = {}
    waiting = list(FAULTS)
    timer = threading.Timer(DEADLINE_S, lambda: os._exit(1))
    timer.daemon = True
    timer.start()
    while waiting:
        batch = waiting[-4:]
        waiting = waiting[:-4]
        ranks = {}
        for name in batch:
            place = folder / name.partition(":")[0]
            copy = place / "corpus"
            if not copy.exists():
                shutil.copytree(corpus, copy)
            size, options, prepare = FAULTS[name]
            nodes, world = helpers.nodes_and_world(size)
            ranks[name] = helpers.start_world(
                world,
                copy,
                place,
                [str(place / o) if o == "model.pt" else o for o in options],
                prepare,
                False,
                nodes,
            )
        for name in batch:
            for process in ranks[name]:
                process.join(1 if name in STANDING and process is ranks[name][1] else 60)
            codes[name] = ["hangs" if process.exitcode is None else process.exitcode for process in ranks[name]]
            for process in ranks[name]:
                process.kill()
    (folder / "codes.json").write_text(json.dumps(codes))


@pytest.fixture(scope="module")
def broken(corpus, tmp_path_factory):
    """broken(name) -> exit codes, what each rank said, its logs, the folder.
    One process imports torch and forks them all."""
    folder = tmp_path_factory.mktemp("broken")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, __file__, str(corpus), str(folder)],
        env=environment,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + "".join(
        f"{path}:\n{path.read_text()}" for path in sorted(folder.rglob("*.out"))
    )
    codes = json.loads((folder / "codes.json").read_text())

    def outcome(name):
        place = folder / name
        size = FAULTS[name][0]
        said = [(place / f"{size}-{rank}.out").read_text() for rank in range(helpers.nodes_and_world(size)[1])]
        logs = [] if "full" in name else list((place / f"logs-{size}").glob("*.jsonl"))
        log = read_log(logs[0]) if logs else None
        return types.SimpleNamespace(codes=codes[name], said=said, log=log, place=place)
    return outcome


def last_line(text):
    return text.splitlines()[-1]


def only_line(run):
    """The line of a run that only one rank says."""
    (line,) = [line for said in run.said for line in said.splitlines() if line.startswith("train_gpt: ")]
    assert not any("Traceback" in said for said in run.said)
    return line


def test_a_rank_is_killed(broken):
    """The other one ends at once and names it."""
    run = broken("killed")
    assert run.codes == [4, -signal.SIGKILL]
    assert re.fullmatch(
        r"train_gpt: rank 0: other ranks: expected an answer \(rank 1 has ended or stands still\), found '.*'; fix: .*",
        last_line(run.said[0]),
    )
    assert run.log[-1]["kind"] == "end"
    assert run.log[-1]["state"].startswith("failed: other ranks")
    assert run.log[-1]["code"] == 4


def test_the_main_rank_is_killed(broken):
    run = broken("main rank killed")
    assert run.codes == [-signal.SIGKILL, 4]
    assert "(rank 0 has ended or stands still)" in last_line(run.said[1])
    assert run.log[-1]["kind"] != "end", "an incomplete log"


def test_a_rank_stands_still(broken):
    """No collective fails then: the watchdog sees that nothing progresses."""
    run = broken("stands still")
    assert run.codes[0] == 4
    assert re.fullmatch(
        r"train_gpt: rank 0: expected progress within 5 s, found none since step [23] "
        r"\(rank 1 has ended or stands still\); fix: .*",
        last_line(run.said[0]),
    )
    assert run.log[-1]["state"].startswith("failed: rank 0: expected progress")
    assert run.log[-1]["code"] == 4


def test_a_rank_stands_still_in_the_warm_up(broken):
    """The host compiles there, without a heartbeat: five times the limit."""
    run = broken("stands still in the warm-up")
    assert run.codes[0] == 4
    assert re.fullmatch(
        r"train_gpt: rank 0: expected progress within 7.5 s, found none since the warm-up of stage 1 "
        r"\(rank 1 has ended or stands still\); fix: .*",
        last_line(run.said[0]),
    )
    assert run.log[-1]["state"].startswith("failed: rank 0: expected progress")
    assert run.log[-1]["code"] == 4
    assert not only(run.log, "warm")


def test_a_deadlock_in_the_warm_up(broken):
    """The rank that waits for nothing and the one that waits for it;
    one may end first, and the other names it or its connection."""
    run = broken("deadlock in the warm-up")
    assert run.codes == [4, 4]
    assert any(
        "expected progress within 7.5 s, found none since the warm-up of stage 1" in last_line(said)
        for said in run.said
    )
    assert all(
        "expected progress" in last_line(said) or "other ranks: expected an answer" in last_line(said)
        for said in run.said
    )
    assert run.log[-1]["state"].startswith("failed: ")
    assert run.log[-1]["code"] == 4


def test_a_busy_core_is_no_progress(broken):
    run = broken("spins in the warm-up")
    assert run.codes == [4]
    assert "expected progress within 7.5 s, found none since the warm-up of stage 1; fix: " in last_line(run.said[0])


@pytest.mark.parametrize(
    "name, rank, found",
    [
        ("never comes", 0, ".*1/2 clients joined.*"),
        ("main rank never comes", 1, ".*"),
        ("never comes to torchrun", 0, ".*process 1.*"),
    ],
)
def test_a_rank_never_comes(broken, name, rank, found):
    """Twice the limit after the start, in one line; where the store is there already it names the rank that is not."""
    run = broken(name)
    assert run.codes[rank] == 4
    assert re.fullmatch(
        f"train_gpt: other ranks: expected an answer, found '{found}'; "
        "fix: start all of them, and see what they said first",
        last_line(run.said[rank]),
    )
    assert "Traceback" not in run.said[rank]
    assert not list(run.place.glob("logs*"))


def test_a_node_never_comes(broken):
    """The same limit, and the line says what to start;
    under torchrun its own limit comes first, see docs/troubleshooting.md."""
    run = broken("node never comes")
    assert run.codes == [4, 4, 0, 0]
    assert re.fullmatch(
        r"train_gpt: other ranks: expected an answer, found '.*2/4 clients joined.*'; fix: start all of them, .*",
        last_line(run.said[0]),
    )
    assert not list(run.place.glob("logs*"))


NODES = r"on \S+ \(node 0\), '(.*)' on rank \d on \S+ \(node 1\)"


@pytest.mark.parametrize("name, world, what, first, other", [
    ("nodes of two sizes", 4, "nodes", "3 processes, .*", "1 processes, .*"),
    ("node with other options", 2, "nodes", "1 processes, .*", "1 processes, .* --length=2, torch .*"),
    ("node with other shards", 2, "data", "[0-9a-f]{64}", "[0-9a-f]{64}")])
def test_nodes_differ(broken, name, world, what, first, other):
    """Both are told, in one line of their first rank, which node has what; nothing is trained."""
    run = broken(name)
    assert run.codes == [2] * world
    assert run.log is None
    assert not any("train_gpt" in said for said in run.said[1:world - 1])
    for rank in (0, world - 1):
        said = run.said[rank]
        pattern = rf"train_gpt: rank {rank} on \S+ \(node \d\): {what}: expected the same on every rank, "
        pattern += rf"found '{first}' on rank 0 {NODES}; fix: .*"
        found = re.fullmatch(pattern, last_line(said))
        assert found, said
        assert re.fullmatch(other, found[1]), said


def test_a_node_has_no_shards(broken):
    """It says so itself, and the other node which one it is."""
    run = broken("node without shards")
    theirs, mine = map(last_line, run.said)
    assert run.codes == [2, 2]
    assert run.log is None
    assert re.fullmatch(r"train_gpt: rank 1 on \S+ \(node 1\): train shards: expected .*, found none; fix: .*", mine)
    assert re.fullmatch(rf".*data: expected the same on every rank, found '.*' on rank 0 {NODES}; fix: .*", theirs)
    assert "train shards: expected" in theirs


# Which nodes start, and what they say in the end: nothing where all come.
MEETINGS = {
    (0,): ["no node 1; fix: start ./run.sh there with MASTER_ADDR=127.0.0.1"],
    (1,): ["no answer from 127.0.0.1:"],
    (0, 0): ["taken or not of this node", "no node 1"],
    (0, 1): [],
}


def meeting_limit(numbers):
    """--stall-limit of a meeting, in seconds: where there is a second process, it may be slow to start."""
    return 20 if len(numbers) > 1 else 5


@pytest.fixture(scope="module")
def met():
    """What run.sh said and how it ended, by MEETINGS, on each node. Most of it is waiting, so they start together."""
    started = {}
    for numbers in MEETINGS:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "PYTHON": sys.executable,
            "NNODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = ["bash", "run.sh", "--check", "--preset", "smoke", "--stall-limit", str(meeting_limit(numbers))]
        started[numbers] = [
            subprocess.Popen(command, cwd=ROOT, env=environment | {"NODE_RANK": str(number)}, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for number in numbers]
    return {
        numbers: [(node.communicate(timeout=180)[1], node.returncode) for node in nodes]
        for numbers, nodes in started.items()
    }


@pytest.mark.parametrize("numbers", MEETINGS, ids=str)
def test_nodes_meet(met, numbers):
    """run.sh on each of two nodes:
    who does not come is named in one line instead of torchrun's tracebacks, after which torchrun starts as usual."""
    told = MEETINGS[numbers]
    said, codes = zip(*met[numbers])
    if not told:
        assert codes == (0, 0), said
        return
    ends = sorted(text.splitlines()[-1] for text in said)
    assert all(code == 2 for code in codes), said
    assert all(text.count("\n") == 2 for text in said), said
    for end, part in zip(ends, told, strict=True):
        assert end.startswith(f"run.sh: nodes: expected 2 within {meeting_limit(numbers)} s, found ")
        assert part in end
        assert "; fix: " in end


def test_a_node_is_killed(broken):
    """Nobody claims to know its processes: numbers of processes mean nothing on another node."""
    run = broken("node is killed")
    assert run.codes == [4, -signal.SIGKILL]
    assert re.fullmatch(
        r"train_gpt: rank 0 on \S+ \(node 0\): other ranks: expected an answer, found '.*'; fix: .*",
        last_line(run.said[0]),
    )
    assert run.log[-1]["state"].startswith("failed: other ranks")


def test_ctrl_c_on_one_node_stops_both(broken):
    run = broken("node is interrupted")
    assert run.codes == [130, 130]
    assert run.log[-1]["state"] == "interrupted"


@pytest.mark.parametrize("name, places", [("node with a slow network", [2]), ("slow link", [1, 2])])
def test_a_slow_network_is_named(broken, name, places):
    """The node whose every exchange is slow, or the two ends of a slow link; a warning, and the run would go on."""
    run = broken(name)
    assert run.codes == [0, 0, 0, 0]
    (warning,) = [line for line in run.said[0].splitlines() if "far slower" in line]
    names = ", ".join(rf"rank {place} on \S+ \(node {place}\)" for place in places)
    assert re.fullmatch(f"WARNING: network far slower at {names}; fix: .*", warning)
    assert re.search(r"4 nodes: 4 MB both ways in [\d.]+ to \d{3,}\.\d\d ms\n", run.said[0])


def test_a_rank_has_a_bug(broken):
    """Its traceback is kept, and the other rank does not wait for it."""
    run = broken("a bug")
    assert run.codes == [4, 1]
    assert last_line(run.said[1]) == "RuntimeError: a bug"
    assert "Traceback" in run.said[1]
    assert run.log[-1]["state"].startswith("failed: other ranks")


def test_all_ranks_stop_for_a_nan(broken):
    run = broken("nan")
    assert run.codes == [3, 3]
    assert re.fullmatch(
        r"train_gpt: rank 0: training loss: expected a finite number, found nan at step 4; fix: .*",
        only_line(run),
    )
    assert "nan at step 4" in run.log[-1]["state"]
    assert run.log[-1]["state"].startswith("failed: ")
    assert not only(run.log, "val")


def test_ranks_that_start_differently(broken):
    """Before the clock starts, and on all of them."""
    run = broken("other start")
    assert run.codes == [4, 4]
    pattern = r"train_gpt: rank 0: initial state: expected the same on every rank, "
    pattern += r"found '\w{16}' on rank 0, '\w{16}' on rank 1; fix: .*"
    assert re.fullmatch(pattern, only_line(run))
    assert [event["kind"] for event in run.log] == ["head", "end"]
    assert run.log[-1]["state"].startswith("failed: initial state")


def test_all_ranks_stop_for_one_ctrl_c(broken):
    run = broken("interrupted")
    assert run.codes == [130, 130]
    assert only_line(run) == "train_gpt: rank 0: interrupted"
    assert run.log[-1]["state"] == "interrupted"
    assert run.log[-1]["code"] == 130
    assert not only(run.log, "val")


def test_all_ranks_stop_where_one_is_terminated(broken):
    """All end as that one does, with a log that says so."""
    run = broken("terminated")
    assert run.codes == [143, 143]
    assert only_line(run) == "train_gpt: rank 0: interrupted by SIGTERM"
    assert run.log[-1]["state"] == "interrupted"
    assert run.log[-1]["code"] == 143


def test_terminated_in_the_warm_up(broken):
    """No rank goes on to the first step, where they would agree to stop."""
    run = broken("terminated in the warm-up")
    assert run.codes == [143, 143]
    assert only_line(run) == "train_gpt: rank 0: interrupted by SIGTERM"
    assert [event["kind"] for event in run.log] == ["head", "end"]
    assert run.log[-1]["state"] == "interrupted"


def test_terminated_in_a_slow_step(broken):
    """The ranks do not wait for the next logged step, where they would agree, until torchrun kills them."""
    run = broken("terminated in a slow step")
    assert 143 in run.codes
    assert set(run.codes) <= {143, 4}, "the one that ends later may meet the end of the other first"
    assert run.log[-1]["kind"] == "end"
    assert not any("Traceback" in said for said in run.said)


def test_terminated_where_no_handler_runs(broken):
    """In a collective that waits for a dead rank: the stall limit is short then, so that the log gets its end before
    torchrun or docker kill the process."""
    run = broken("terminated where it waits")
    assert run.codes == [4]
    assert only_line(run).startswith("train_gpt: rank 0: expected progress within 2 s, found none since step 2; fix: ")
    assert run.log[-1]["state"].startswith("failed: rank 0: expected progress")


@pytest.mark.parametrize("name, told", [
    ("no shards", "train shards: expected .*, found none; fix: "),
    ("no place for the model", "saving .: expected a new file, found a folder or a device; fix: ")])
def test_four_ranks_say_it_once(broken, name, told):
    run = broken(name)
    assert run.codes == [2] * 4
    assert re.match(f"train_gpt: rank 0: {told}", only_line(run))


def test_ctrl_c_twice(broken):
    """The second one does not break into the ending: the log gets its end, and there is no traceback."""
    run = broken("interrupted twice")
    assert run.codes == [130]
    assert only_line(run) == "train_gpt: interrupted"
    assert run.log[-1]["state"] == "interrupted"


def test_ctrl_c_with_one_rank(broken):
    run = broken("interrupted alone")
    assert run.codes == [130]
    assert run.log[-1]["state"] == "interrupted"


def test_a_shard_is_cut_while_it_is_read(broken):
    """In the prefetch thread, of a file that was whole when the run started; a memory map would die of a signal."""
    run = broken("shard cut")
    assert run.codes in ([4, 2], [2, 4], [2, 2]), "they read one file: either or both meet its end"
    assert re.fullmatch(
        r"train_gpt: rank \d: .*tiny_train_000000.bin: reading at token [\d,]+: "
        r"expected [\d,]+ tokens as when it was checked, found its end; fix: fetch this file again",
        last_line(run.said[run.codes.index(2)]),
    )
    assert run.log[-1]["state"].startswith("failed: ")


def test_the_disk_stands_still(broken):
    run = broken("disk stands still")
    assert run.codes == [4]
    assert re.search(r"expected progress within 5 s, found none since step [123]; fix: ", last_line(run.said[0]))
    assert run.log[-1]["state"].startswith("failed: ")


def test_the_disk_is_full_for_the_log(broken):
    run = broken("disk full for the log")
    assert run.codes == [0]
    assert run.said[0].count("run log: expected to write") == 1
    assert last_line(run.said[0]).endswith("log: none, UNLOGGED")


def test_the_disk_is_full_for_the_model(broken):
    run = broken("disk full for the model")
    assert run.codes == [2]
    assert re.search(r"train_gpt: saving .*model.pt: expected .*, found .*; fix: ", last_line(run.said[0]))
    assert sorted(path.name for path in run.place.iterdir()) == ["1-0.out", "corpus", "logs-1"], "no part of a model"


def test_a_disk_is_slow(broken):
    """The first rank writes for longer than the other would wait in a collective, nine seconds here."""
    run = broken("a slow disk for the model")
    assert run.codes == [0, 0]
    assert (run.place / "model.pt").is_file()


def test_two_launches_in_one_folder(broken):
    place = broken("killed").place.parent / "two launches"
    codes = json.loads((place.parent / "codes.json").read_text())
    logs = [read_log(path) for path in (place / "logs-1").glob("*.jsonl")]
    assert codes["two launches: first"] == codes["two launches: second"] == [0]
    assert len(logs) == 2
    assert all(log[-1]["state"] == "ok" for log in logs)
    assert logs[0][-1]["loss"] == logs[1][-1]["loss"]


if __name__ == "__main__":
    break_runs(Path(sys.argv[1]), Path(sys.argv[2]))
