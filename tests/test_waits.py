"""Every wait for another stream or another rank is needed and there:
on a CPU, where nothing happens beside anything else.

A double of what runs beside the main stream does its work only when it is waited for, the latest that a GPU may be. A
CPU without it does the work at once, the earliest. Both must train alike, to the bit. Then each wait is removed from
the source in turn, and that must be seen."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import helpers
from helpers import CPU, MODEL, PRESET, ROOT, L, tg

# Two layers with everything and two MLPs between them, in sizes that give every parameter of a group but `down` the
# first place in one. The first table of values is gathered at once, the second when a step starts. No layer reads the
# third, and the final states do only if values enter them.
STEPS = 3
WAITING = replace(
    PRESET,
    stages=(replace(PRESET.stages[0], steps=STEPS),),
    train_tokens=2000,
    val_tokens=512,
    model=replace(
        MODEL,
        key_width=8,
        mlp_width=16,
        pointer_width=8,
        value_embeddings=3,
        layers=(
            L(value_embedding=1),
            L(attention=False),
            L(attention=False, skip_from=0),
            L(value_embedding=0, window="long", key_offset=True),
        ),
    ),
)
UNREAD = replace(WAITING, model=replace(WAITING.model, final_values=False))


# ---- the double ------------------------------------------------------------------------------------------------------
def poison(tensor):
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


def same(a, b):
    """To the bit, so that NaN equals itself."""
    return a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))


class Later:
    """Side streams and exchanges between ranks that happen only when they are waited for.
    `open` lists those still to come.

    Until then what they will write holds NaN (integers: the least one), so whoever reads it too early spoils the
    training; and nobody may write to what they read or write, which is looked at when they happen. Each needs its own
    wait: that NCCL works in order helps nobody here."""

    def __init__(self, ranks):
        self.open = []
        self.ranks = ranks
        self.plain = tg.Ranks(ranks.rank, ranks.world, CPU)
        self.plain.peers = ranks.peers
        self.plain.copy_stream = ranks.copy_stream
        for name in ("on_side_stream", "all_gather", "reduce_scatter", "all_reduce_mean", "meet"):
            setattr(ranks, name, getattr(self, name))

    def later(self, name, work):
        self.open.append(name)

        def wait():
            assert name in self.open, f"{name}: waited for after its step"
            self.open.remove(name)
            work()
        return wait

    def on_side_stream(self, work, side=0):
        return self.later(f"side stream {side}", work)

    def exchange(self, name, used, written, work):
        """`work`, which returns a wait of its own, reads and writes the tensors `used`;
        of them it writes all of `written`."""
        kept = [tensor.clone() for tensor in written]
        for tensor in written:
            poison(tensor)
        seen = [tensor.clone() for tensor in used]

        def at_last():
            assert all(map(same, used, seen)), f"{name}: somebody wrote to it before the wait"
            for tensor, values in zip(written, kept):
                tensor.copy_(values)
            work()()
        return self.later(name, at_last)

    def all_gather(self, full, barrier=True):
        """A rank may read its own part meanwhile.
        There is always a barrier, since the first to be waited for need not be the one that had it."""
        if self.ranks.world == 1:
            return self.later("all_gather", lambda: None)
        others = [part for rank, part in enumerate(full.view(self.ranks.world, -1)) if rank != self.ranks.rank]
        return self.exchange("all_gather", [full], others, lambda: self.plain.all_gather(full))

    def reduce_scatter(self, full, received):
        """Shared memory: others may still read `full`. Else it is averaged in place, and `received` is a part of it."""
        written = received if full.data_ptr() in self.ranks.peers else full
        return self.exchange(
            "reduce_scatter", [full, received], [written], lambda: self.plain.reduce_scatter(full, received)
        )

    def meet(self, tensor):
        return self.later("meet", lambda: self.plain.meet(tensor)())

    def rows_of_all(self, *operands):
        assert "meet" not in self.open, "rows of other ranks were read before these had updated them"
        return tg.peer_rows_reference(*operands)

    def all_reduce_mean(self, tensor):
        return self.exchange("all_reduce_mean", [tensor], [tensor], lambda: self.plain.all_reduce_mean(tensor))


def checked_adam(grad, lookup, *state, **options):
    """The reference reads no more than the row numbers; the kernel also reads how they are sorted."""
    assert all(map(same, lookup, tg.group_ids(lookup[0]))), "rows were sorted before they were there"
    tg.sparse_adam_reference(grad, lookup, *state, **options)


def train(corpus, ranks, double=None, preset=WAITING):
    """STEPS steps of two micro-batches from random weights, averages between them.
    Returns all losses and the state and, in words, what a step left under way: a captured one must not."""
    rows_of_all = double.rows_of_all if double else tg.peer_rows_reference
    ops = replace(tg.select_ops(CPU), sparse_adam=checked_adam, peer_rows=rows_of_all)
    trainer = helpers.make_trainer(corpus, preset, ops, ranks)
    trainer.micro_chunks = {stage: tg.CHUNKS // ranks.world // 2 for stage in preset.stages}
    helpers.randomise(trainer.model)
    losses = []
    left = set()

    def end():
        if double:
            left.update(double.open)
            double.open.clear()

    for step, batches in enumerate(helpers.all_batches(trainer)):
        losses.append(trainer.training_step(step, batches))
        end()
        trainer.optimizer.average(0.5)
    trainer.optimizer.gather()
    end()
    losses.append(torch.tensor(trainer.validate(trainer.final_geometry)))
    return {"losses": torch.stack(losses), **trainer.optimizer.state()}, left


def differences(corpus, ranks, want, preset=WAITING):
    """What training with the double does otherwise than the state `want` says; "" if nothing."""
    try:
        found, left = train(corpus, ranks, Later(ranks), preset)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    other = sum(not same(found[name], want[name]) for name in want)
    return f"{other} tensors differ; under way after a step: {sorted(left)}" if other or left else ""


# ---- mutants ---------------------------------------------------------------------------------------------------------
# What is wrong -> function, {its source: what stands there instead}. Each wait is removed; then some come too late.
MUTANTS = {
    "gathers are not waited for": ("Owner.wait_gather", {"self.pending_gather()": "pass"}),
    "nor when the model reads weights": ("gathered", {"parameter.info.owner.wait_gather()": "pass"}),
    "qkv": ("Block.forward", {"gathered(self.qkv)": "self.qkv"}),
    "out": ("Block.forward", {"gathered(self.out)": "self.out"}),
    "up and down, which are in one group": (
        "Block.forward",
        {"gathered(self.up), gathered(self.down)": "self.up, self.down"},
    ),
    "value embeddings": (
        "GPT.features",
        {
            "gathered(self.value_embeddings[layer.value_embedding])": "self.value_embeddings[layer.value_embedding]"
        },
    ),
    "value embedding of the final states": ("GPT.features", {"gathered(table)": "table"}),
    "pointer": ("GPT.predictions", {"gathered(self.pointer)": "self.pointer"}),
    "head": ("GPT.predictions", {"gathered(self.lm_head)": "self.lm_head"}),
    "gradients of matrices": ("MatrixBank.compute_", {"group.pending_reduce()": "pass"}),
    "gradients of tables and scalars": ("Adam.compute_", {"wait()": "pass"}),
    "gradients of scalars": (
        "AdamScalars.reduce_",
        {
            "self.ranks.all_reduce_mean(self.grads), ": "(self.ranks.all_reduce_mean(self.grads), lambda: None)[1], "
        },
    ),
    "row numbers": ("SparseTable.start_step", {"wait()": "pass"}),
    "gradients of rows": ("SparseTable.compute_", {"\n    wait()": "\n    pass"}),
    "sorted rows": ("SparseTable.compute_", {"self.under_way.wait_sorted()": "pass"}),
    "side stream 0": ("Optimizer.step", {"in waits:\n        wait()": "in waits[1:]:\n        wait()"}),
    "side stream 1": ("Optimizer.step", {"in waits:\n        wait()": "in waits[:1]:\n        wait()"}),
    "embedding": ("Optimizer.step", {"table.wait_gather()": "pass"}),
    "the last gather": ("Optimizer.gather", {"owner.wait_gather()": "pass"}),
    "late: gradients of matrices": (
        "MatrixBank.compute_",
        {
            "group.pending_reduce()": "pass",
            '"next drift"])': '"next drift"])\n    for group in self.groups:\n        group.pending_reduce()',
        },
    ),
    "late: gradients of tables and scalars": (
        "Adam.compute_",
        {"wait()": "pass", "cautious_decay)": "cautious_decay)\n    wait()"},
    ),
    "late: row numbers": (
        "SparseTable.start_step",
        {"wait()": "pass", "group_ids(full)": "group_ids(full)\n        wait()"},
    ),
    "late: gradients of rows": (
        "SparseTable.compute_",
        {"\n    wait()": "", "cautious_decay)": "cautious_decay)\n    wait()"},
    ),
    "overwritten: gradients of matrices": (
        "MatrixGroup.reduce_",
        {"self.received)": "self.received); self.grads.zero_()"},
    ),
    "overwritten: gradients of tables": (
        "AdamTable.reduce_",
        {"received), received": "received), received; grad.zero_()"},
    ),
    "overwritten: gradients of scalars": (
        "AdamScalars.reduce_",
        {"self.grads[None]": "self.grads[None]; self.grads.zero_()"},
    ),
    "overwritten: own weights": (
        "Owner.gather_",
        {"barrier)": "barrier); self.ranks.shard(self.weights).mul_(2)"},
    ),
}
# The same, where nothing reads the third table.
MUTANTS_OF_UNREAD = {"weights that nothing reads": ("Optimizer.step", {"owner.wait_gather()": "pass"})}
# The same, where memory is shared.
MUTANTS_OF_SHARED_MEMORY = {
    "rows of other ranks": ("GPT.features", {"gathered(self.ngram)": "self.ngram"}),
    "rows of other ranks at the validation": ("Optimizer.gather", {"owner.gather_()": "pass"}),
    "gradients where other ranks have them": ("Adam.compute_", {"wait()": "pass"}),
}
# The one call that waits for nothing: Optimizer.step has waited for the embedding, which gathers at once.
NEEDLESS = "GPT.features", "gathered(self.embedding)"


def find(name):
    """(what holds a function of train_gpt.py, its own name, the function)."""
    *path, last = name.split(".")
    holder = getattr(tg, path[0]) if path else tg
    return holder, last, getattr(holder, last)


def mutated(name, edits):
    """The function with its edits, in the module's namespace."""
    source = textwrap.dedent(inspect.getsource(find(name)[2]))
    for old, new in edits.items():
        assert source.count(old) == 1, f"{name} has {source.count(old)} of {old!r}"
        source = source.replace(old, new)
    space = {}
    exec("from __future__ import annotations\n" + source, vars(tg), space)
    return space.popitem()[1]


def run_rank(rank, corpus, folder):
    """One of two processes: what the double and each mutant do otherwise. Rank 0 writes it."""
    sys.stdout = sys.stderr = open(folder / f"{rank}.out", "w", buffering=1)
    torch.set_num_threads(1)
    tg.BOS = helpers.BOS
    tg.dist.init_process_group(
        "gloo", init_method=f"file://{folder}/join", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    ranks = tg.Ranks(rank, 2, CPU)
    want, _ = train(corpus, ranks)
    found = {"two ranks": differences(corpus, ranks, want)}

    def try_mutants(mutants, start, want, preset=WAITING):
        for name, (function, edits) in mutants.items():
            holder, last, original = find(function)
            setattr(holder, last, mutated(function, edits))
            found[name] = differences(corpus, start(), want, preset)
            setattr(holder, last, original)

    try_mutants(MUTANTS, lambda: tg.Ranks(rank, 2, CPU), want)
    want, _ = train(corpus, ranks, preset=UNREAD)
    try_mutants(MUTANTS_OF_UNREAD, lambda: tg.Ranks(rank, 2, CPU), want, UNREAD)
    found["one rank"] = differences(corpus, tg.Ranks(0, 1, CPU), train(corpus, tg.Ranks(0, 1, CPU))[0])
    tg.Ranks.start = staticmethod(lambda: tg.Ranks(rank, 2, CPU))
    helpers.FileMemory(folder, rank).install()
    want, _ = train(corpus, tg.Ranks.start())
    found["two ranks that share memory"] = differences(corpus, tg.Ranks.start(), want)
    try_mutants(MUTANTS_OF_SHARED_MEMORY, tg.Ranks.start, want)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(corpus, tmp_path_factory):
    """What goes otherwise with the double, in words; "" if nothing. One process imports torch and forks both ranks."""
    folder = tmp_path_factory.mktemp("waits")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, __file__, str(corpus), str(folder)],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    said = result.stderr + "".join(path.read_text() for path in sorted(folder.glob("*.out")))
    assert (folder / "found.json").exists(), said
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", ["one rank", "two ranks", "two ranks that share memory"])
def test_late_is_early(found, case):
    """Losses, validation and the whole state, to the bit."""
    assert found[case] == ""


@pytest.mark.parametrize("name", [*MUTANTS, *MUTANTS_OF_UNREAD, *MUTANTS_OF_SHARED_MEMORY])
def test_a_missing_wait_is_seen(found, name):
    assert found[name]


@pytest.mark.fast
def test_every_wait_has_a_mutant():
    """Each call of the model and the optimizer that waits stands in the source that some mutant replaces."""
    holders = r"(self|self\.under_way|group|owner|table)"
    waits = re.compile(holders + r"\.(wait_\w+|pending_\w+)\(\)|\bwait\w*\(\)|gathered\(.*\)")
    missing = []
    for top in ast.parse((ROOT / "train_gpt.py").read_text()).body:
        for function in top.body if isinstance(top, ast.ClassDef) else [top]:
            if not isinstance(function, ast.FunctionDef) or getattr(top, "name", "") in ("Ranks", "Watchdog"):
                continue
            name = function.name if function is top else f"{top.name}.{function.name}"
            mutants = (MUTANTS | MUTANTS_OF_UNREAD | MUTANTS_OF_SHARED_MEMORY).values()
            replaced = " ".join(old for place, edits in mutants if place == name for old in edits)
            calls = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
            missing += [(name, call) for call in calls if waits.fullmatch(call) and call not in replaced]
    assert missing == [NEEDLESS]


# ---- streams ---------------------------------------------------------------------------------------------------------
class Stream:
    """Knows what happened before the next thing that it does."""

    def __init__(self):
        self.before = set()

    def wait_stream(self, other):
        self.before |= other.before

    def record_event(self):
        before = set(self.before)
        return SimpleNamespace(wait=lambda: torch.cuda.current_stream().before.update(before))


@pytest.fixture
def streams(monkeypatch):
    """streams.happen(name, *after): something happens on the current stream, after all these things."""
    current = [Stream()]

    @contextlib.contextmanager
    def stream(other):
        current.append(other)
        yield
        current.pop()

    def happen(name, *after):
        assert current[-1].before >= set(after), f"{name} does not wait for {set(after) - current[-1].before}"
        current[-1].before.add(name)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return SimpleNamespace(happen=happen)


def side_work(streams):
    ranks = tg.Ranks(0, 1, CPU)
    ranks.side_streams = [Stream(), Stream()]
    streams.happen("a gradient")
    wait = ranks.on_side_stream(lambda: streams.happen("an update", "a gradient"), side=1)
    assert ranks.side_streams[1].before
    assert not ranks.side_streams[0].before
    with pytest.raises(AssertionError):
        streams.happen("the next step", "an update")
    wait()
    streams.happen("the next step", "an update")


def fetching(streams, reduce):
    """Rank 2 of four fetches: each version behind the barrier, one's own too when it reduces."""
    class Memory(SimpleNamespace):
        view = property(lambda self: lambda *_: self)

        def copy_(self, source, non_blocking):
            streams.happen(f"{source.name} to {self.name}", "a gradient", "barrier")

    ranks = tg.Ranks(2, 4, CPU)
    full = torch.zeros(4)
    ranks.copy_stream = Stream()
    versions = [[Memory(name=f"{part} of {rank}") for part in range(4)] for rank in range(4)]
    ranks.peers[full.data_ptr()] = SimpleNamespace(barrier=lambda: streams.happen("barrier", "a gradient")), versions
    received = [Memory(name=f"from {rank}") for rank in range(4)]
    wanted = (
        {f"2 of {rank} to from {rank}" for rank in range(4)}
        if reduce
        else {f"{rank} of {rank} to {rank} of 2" for rank in (0, 1, 3)}
    )
    streams.happen("a gradient")
    wait = ranks.fetch(full, received if reduce else None)
    assert ranks.copy_stream.before == {"a gradient", "barrier", *wanted}
    wait()
    streams.happen("the next step", *wanted)


STREAMS = {"side stream": (side_work,), "all-gather": (fetching, False), "reduce-scatter": (fetching, True)}


@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.fast
def test_streams_wait_for_each_other(streams, case):
    check, *arguments = STREAMS[case]
    check(streams, *arguments)


@pytest.mark.parametrize(
    "case, function, edits",
    [
        ("side stream", "Ranks.on_side_stream", {"stream.wait_stream(torch.cuda.current_stream())": "pass"}),
        ("side stream", "Ranks.on_side_stream", {"stream.record_event().wait": "(lambda: None)"}),
        *(
            (case, "Ranks.fetch", edits)
            for case in ("all-gather", "reduce-scatter")
            for edits in (
                {"self.copy_stream.wait_stream(torch.cuda.current_stream())": "pass"},
                {"self.copy_stream.record_event().wait": "(lambda: None)"},
                {"handle.barrier()": "pass"},
            )
        ),
    ],
)
@pytest.mark.fast
def test_a_missing_wait_of_streams_is_seen(streams, monkeypatch, case, function, edits):
    holder, last, _ = find(function)
    monkeypatch.setattr(holder, last, mutated(function, edits))
    check, *arguments = STREAMS[case]
    with pytest.raises(AssertionError, match="does not wait"):
        check(streams, *arguments)


@pytest.mark.fast
def test_one_barrier_for_all_gathers_of_a_step(corpus, tiny):
    """The first of them has it, as all share one stream; what is gathered beside them has its own."""
    trainer = helpers.make_trainer(corpus, WAITING)
    barriers = []
    trainer.ranks.all_gather = lambda full, barrier=True: barriers.append(barrier) or (lambda: None)
    trainer.optimizer.start_step([torch.zeros(4, 3, dtype=torch.int32)])
    waiting = [owner for owner in trainer.optimizer.sharded if not owner.gathers_at_once]
    assert barriers == [True, *[False] * (len(waiting) - 1), True, True], "the last two: rows and their gradients"


@pytest.mark.parametrize(
    "edits", [{}, {"[table.parameter.grad for table in by_side[1]]": "[]"}], ids=["as it is", "mutant"]
)
@pytest.mark.fast
def test_a_side_streams_gradient_stays_allocated(corpus, tiny, monkeypatch, edits):
    """The host drops it at once; until the wait the allocator must not give its memory to others."""
    monkeypatch.setattr(tg.Optimizer, "step", mutated("Optimizer.step", edits))
    trainer = helpers.make_trainer(corpus, WAITING)
    alive = []

    def on_side_stream(work, side=0):
        reference = weakref.ref(trainer.model.embedding.grad) if side else None
        work()
        return lambda: alive.append(reference() is not None) if side else None

    trainer.ranks.on_side_stream = on_side_stream
    trainer.training_step(0, helpers.all_batches(trainer)[0])
    assert alive == [not edits]


@pytest.mark.fast
def test_the_host_reads_what_the_device_has_finished(corpus, tiny, monkeypatch):
    """The meter reads losses once their copy is there, and the clock reads the time once the device is idle."""
    log = SimpleNamespace(line=lambda kind, **fields: lines.append(fields), say=lambda *_: None)
    meter = tg.Meter(log, helpers.make_trainer(corpus), 4)
    values = torch.full((2,), torch.nan)
    lines = []
    meter.ranks.on_gpu = True
    end = SimpleNamespace(synchronize=lambda: values.copy_(torch.tensor([1024.0, 0.0])))
    meter.pending = 2, PRESET.stages[0], SimpleNamespace(elapsed_time=lambda _: 6.0), end, values
    meter.flush()
    assert lines == [{"step": 2, "train_loss": 2.0, "tokens": 1024, "ms_per_step": 3.0}]

    clock = tg.Clock(torch.device("cuda"))
    finished = []
    monkeypatch.setattr(torch.cuda, "synchronize", finished.append)
    monkeypatch.setattr(clock, "since_start", lambda: float(len(finished)))
    clock.switch("training")
    clock.switch(None)
    assert clock.milliseconds() == 1000.0
    assert clock.intervals[0]["start_ms"] == 1000.0


# ---- batches from the host -------------------------------------------------------------------------------------------
def test_batches_arrive_beside_the_last_step(monkeypatch):
    """Streams that run as late as they may: a copy from the host happens when the step's stream waits for it, and by
    then nothing may still have to read the memory that it writes."""
    queue = []  # what the upload stream has still to do
    unread = set()  # buffers that the step's stream was given and has not read

    def wait_event(event):
        queue.append(lambda: unread.difference_update(event.read))

    def wait_stream(stream):
        while queue:
            queue.pop(0)()

    class Event:
        read = frozenset()

        def record(self):
            self.read = frozenset(unread)

    class Buffer:
        def copy_(self, source, non_blocking):
            assert non_blocking
            queue.append(functools.partial(self.write, source))

        def write(self, source):
            assert self not in unread, "the step before has not read it yet"
            self.values = source
            unread.add(self)

    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_event=wait_event))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=wait_stream))
    monkeypatch.setattr(torch, "empty_like", lambda like: Buffer())
    uploads = tg.Uploads()
    uploads.allocate(0, ["first", "second"])
    for batch in ("ab", "cd", "ef"):
        buffers = uploads.bring(0, list(batch))
        assert "".join(buffer.values for buffer in buffers) == batch
        uploads.done()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, *map(Path, sys.argv[1:]))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
