"""What the trainer's tests share:
a tiny preset with every feature on, shards to train it on, runs in one or many processes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as tg

BOS, VOCABULARY = 508, 509
CPU = torch.device("cpu")
L = tg.Layer
# An empty layer, every feature at least once, and the three kinds of layers: both halves, attention only, MLP only.
MODEL = tg.ModelConfig(
    width=32,
    heads=2,
    key_width=16,
    head_width=16,
    mlp_width=64,
    value_embeddings=2,
    ngram_rows=1024,
    ngram_pieces=2,
    pointer_width=16,
    vocabulary=VOCABULARY,
    padded_vocabulary=512,
    mlp_taps=True,
    final_values=True,
    dtype="float32",
    layers=(
        L(attention=False, mlp=False),
        L(value_embedding=1),
        L(value_embedding=0, window="long", key_offset=True),
        L(attention=False, skip_from=1),
        L(mlp=False),
        L(value_embedding=1, skip_from=2, attention_from=3, window="long"),
        L(value_embedding=tg.NGRAMS),
    ),
)
PRESET = tg.Preset(
    "tiny",
    MODEL,
    (
        tg.Stage(2, 512, 48, 8, 16, targets=((1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), sampled_classes=128),
        tg.Stage(2, 1024, 48, 12, 32, 1.5, targets=((1.0, 0.5), (1.0, 0.0)), sampled_classes=192),
        tg.Stage(1, 1024, 48, 16, 40, 1.5, extension=True),
    ),
    # Adam moves an entry by its rate whatever the gradient's size: one that is only rounding noise must not count
    # (epsilon). And a cautious decay jumps where rounding decides whether an update shrinks an entry: with a tenth of
    # Muon's that does not count either.
    tg.OptimizerConfig(
        muon_weight_decay=0.24,
        momentum_warmup_fraction=0.6,
        momentum_cooldown_fraction=0.4,
        adam_epsilon=1e-4,
        averaging_fraction=0.6,
        averaging_interval_steps=2,
        averaging_lookback=4 / 3,
        drift_factor=0.5,
        drift_start_fraction=0.2,
        drift_cooldown_fraction=0.4,
    ),
    "nowhere",
    train_tokens=8000,
    val_tokens=1280,
    val_window_tokens=256,
    val_attention_windows=(16, 48),
    status="tiny: for tests",
    log_every_steps=2,
)
SEED = 9


def inductor_lacks():
    """What torch's compilation of C++ misses on this machine, if anything. It quotes no path in its commands."""
    if not shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        return "a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers"
    if re.search(r"[\s'\"\\]", torch.__file__ + tempfile.gettempdir()):
        return "an environment and a TMPDIR without spaces and quotes in their paths"
    return ""


INDUCTOR_LACKS = inductor_lacks()


def three_stages(
    steps,
    extension_steps,
    batch_tokens=(131_072, 262_144, 393_216),
    rates=(1.0, 1.51, 1.93),
    sampled_classes=None,
):
    """The trainer's stages with values that were worked out by hand."""
    stages = tg.three_stages(*steps, extension_steps)
    values = zip(stages, (*batch_tokens, batch_tokens[-1]), (*rates, rates[-1]))
    return tuple(
        replace(stage, batch_tokens=tokens, learning_rate_multiplier=rate, sampled_classes=sampled_classes)
        for stage, tokens, rate in values
    )


def check_grad_views(backward, parameters):
    """A backward pass writes gradients to the bit where the optimizer wants them,
    all of them, and a second one adds to them."""
    def gradients():
        for parameter in parameters:
            parameter.grad = None
        backward()
        return [parameter.grad for parameter in parameters]

    want = gradients()
    for parameter in parameters:
        parameter.info = tg.ParamInfo("any", None, grad_view=torch.full_like(parameter.detach(), torch.nan))
    assert all(
        a.equal(b) and a.data_ptr() == p.info.grad_view.data_ptr()
        for a, b, p in zip(gradients(), want, parameters, strict=True)
    )
    for parameter in parameters:
        parameter.grad.mul_(2)  # or one that is overwritten and then added to itself would be as good
    backward()
    assert all(
        p.info.grad_view.equal(3 * g) and p.grad.data_ptr() == p.info.grad_view.data_ptr()
        for g, p in zip(want, parameters)
    )


def write_shard(path, tokens, magic=tg.SHARD_MAGIC, version=tg.SHARD_VERSION, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())


def chunk_starts(stream, stages):
    """Where in the stream the batch chunks of each stage begin, [steps, CHUNKS]:
    one after the other from the first BOS on."""
    return [
        stream.consumed(stages[:index])
        + stage.chunk_tokens * np.arange(stage.steps * tg.CHUNKS).reshape(-1, tg.CHUNKS)
        for index, stage in enumerate(stages)
    ]


def documents(tokens, seed):
    """About `tokens` tokens of documents of 2 to 90 tokens, where a token tells something about the next one,
    and which repeat themselves."""
    random = np.random.default_rng(seed)
    pieces = []
    while sum(map(len, pieces)) < tokens:
        length = int(np.clip(random.lognormal(3.0, 0.8), 1, 89))
        steps = random.integers(1, 5, length)
        pieces.append(np.concatenate([[BOS], (random.integers(BOS) + np.cumsum(steps) % 25) % BOS]))
    return np.concatenate(pieces)


def write_corpus(folder):
    for number in range(3):
        lead = [7, 8, 9] * number  # the rest of a document that began in the shard before
        write_shard(folder / f"tiny_train_{number:06d}.bin", [*lead, *documents(5000, seed=number)])
    write_shard(folder / "tiny_val_000000.bin", documents(1500, seed=9))
    return folder


def make_trainer(corpus, preset=PRESET, ops=None, ranks=None):
    ranks = ranks or tg.Ranks(0, 1, CPU)
    return tg.Trainer(preset, ranks, ops or tg.select_ops(CPU), tg.Clock(ranks.device), corpus)


def update_rows(trainer, step):
    """What the step after `step` would do to rows of n-grams, whose updates are a step late."""
    (table,) = trainer.optimizer.sparse
    _, micro_batches = trainer.inputs[tg.stage_index(trainer.preset, step)]
    table.start_step([documents.ngrams for documents in micro_batches])
    with torch.no_grad():
        table.compute_(dict(zip(trainer.rate_names, trainer.rates[step].unbind())))


def step_after(number, action):
    """Trainer.training_step as it is now, after something that is done to the trainer before step `number` of the timed
    loop."""
    step_of = tg.Trainer.training_step

    def step(trainer, step, *arguments):
        if trainer.clock.intervals and step == number:
            action(trainer)
        return step_of(trainer, step, *arguments)

    return step


def hand_turned(monkeypatch, **seconds):
    """A clock that only these methods of the trainer turn on, by so many seconds a call."""
    now = [100.0]

    def turning(more, function):
        def turned(*arguments):
            now[0] += more
            return function(*arguments)
        return turned

    monkeypatch.setattr(tg.Clock, "since_start", lambda clock: now[0])
    for name, more in seconds.items():
        monkeypatch.setattr(tg.Trainer, name, turning(more, getattr(tg.Trainer, name)))


def all_batches(trainer):
    """Every micro-batch of the schedule, grouped by step."""
    flat = tg.training_batches(trainer.stream, trainer.preset, trainer.micro_chunks, trainer.ranks)
    counts = [
        tg.CHUNKS // trainer.ranks.world // trainer.micro_chunks[s]
        for s in trainer.preset.stages
        for _ in range(s.steps)
    ]
    return [[next(flat) for _ in range(count)] for count in counts]


@torch.no_grad()
def randomise(model, seed=0, size=0.3):
    """Weights away from the zeros of the initialisation, so that every path carries a signal and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
        if name.endswith(".scalars"):
            # resid_lambda multiplies all that enters a layer: near 0 little but rounding would be left
            parameter[0] += 1


def gradient(parameter):
    """What the backward pass has left for the optimizer:
    in .grad or, of a matrix, where those of its group come together."""
    if parameter.grad is not None or not isinstance(parameter.info.owner, tg.MatrixGroup):
        return parameter.grad
    start = parameter.storage_offset() - parameter.info.owner.weights.storage_offset()
    return parameter.info.owner.grads.view(-1)[start:][:parameter.numel()].view_as(parameter)


def relative(found, expected):
    """|found - expected| / |expected| in float64, over all elements; 0 where both are zero."""
    found = found.detach().double()
    expected = expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def read_safetensors(path):
    """Header and data of a file as the format's description has them: not by the reader of train_gpt.py."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8:8 + size]), content[8 + size:]


def edit_model(path, change, signed=True):
    """Change the header of a model file, and its hash with it, as the file of a fork would have it."""
    header, data = read_safetensors(path)
    metadata = header["__metadata__"]
    content = json.loads(metadata["content"])
    digest = metadata.pop("sha256")
    change(header, content)
    metadata["content"] = json.dumps(content)
    metadata["sha256"] = hashlib.sha256(json.dumps(header).encode()).hexdigest() if signed else digest
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_log(path):
    """The events of a log whose chain of hashes is intact."""
    chain, events = "", []
    for line in path.read_text().splitlines():
        text, mark, rest = line.rpartition(', "chain": "')
        assert mark, line
        assert rest.endswith('"}'), line
        chain = hashlib.sha256((chain + text + "}").encode()).hexdigest()[:16]
        assert rest == chain + '"}', f"the chain breaks at {line}"
        events.append(json.loads(line))
    return events


def only(events, kind):
    return [event for event in events if event["kind"] == kind]


def own_threads():
    """The threads of runs that are alive; none may outlive its run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(("prefetch", "run log"))]


@contextlib.contextmanager
def time_limit(processor_seconds=240, seconds=1800):
    """Ends a test that computes for too long, or that waits for what never comes. A busy machine is no failure: others
    take what a test needs minutes of several times as long, so only its own processor time is held to four minutes."""
    def too_late(number, _):
        limit = f"{processor_seconds} s of processor time" if number == signal.SIGPROF else f"{seconds} s"
        raise TimeoutError(f"still running after {limit}")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, processor_seconds), signal.SIGALRM: (signal.ITIMER_REAL, seconds)}
    previous = {number: signal.signal(number, too_late) for number in timers}
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, previous[number])


# ---- several processes -----------------------------------------------------------------------------------------------
def with_lookups(ops):
    """What makes these operators, but for lookups of embeddings, which are a GPU's: their gradients bypass autograd."""
    def embed(table, documents):
        return tg.EmbeddingLookup.apply(
            torch.nn.functional.embedding, table, documents.tokens, documents.order, documents.starts
        )
    return lambda: replace(ops, embed=embed)


class FileMemory:
    """torch.distributed._symmetric_memory by files that all processes map. What waits for streams returns at once, as
    all is in order anyway, but for what torch does on a stream of its own (see Ranks.shared): that happens at the next
    synchronise."""

    def __init__(self, folder, rank):
        self.folder = folder
        self.rank = rank
        self.made = 0
        self.queue = []

    def empty(self, shape, dtype, device):
        self.made += 1
        memory = self.mapped(self.made, self.rank, shape, dtype, 0)
        self.queue.append(memory.zero_)
        return memory

    def mapped(self, number, rank, shape, dtype, start):
        size = torch.Size(shape).numel()
        return torch.from_file(
            str(self.folder / f"shared-{number}-{rank}"), shared=True, size=start + size, dtype=dtype
        )[start:].view(shape)

    def rendezvous(self, tensor, group):
        assert not self.queue, "kernels that are queued write where the addresses come"
        number = self.made
        addresses = []

        def barrier():
            assert addresses, "a barrier before the addresses are there"
            tg.dist.barrier()

        self.queue.append(lambda: addresses.append(number))
        tg.dist.barrier()
        return SimpleNamespace(get_buffer=lambda *where: self.mapped(number, *where), barrier=barrier)

    def synchronize(self, device):
        while self.queue:
            self.queue.pop()()

    def install(self):
        start = tg.Ranks.start
        nothing = lambda *_: None

        def start_sharing(*arguments):
            ranks = start(*arguments)
            ranks.copy_stream = SimpleNamespace(wait_stream=nothing, record_event=lambda: SimpleNamespace(wait=nothing))
            return ranks

        tg.Ranks.start = staticmethod(start_sharing)
        tg.reference_ops = with_lookups(tg.reference_ops())
        tg.symmetric_memory = self
        torch.cuda.current_stream = nothing
        torch.cuda.stream = lambda _: contextlib.nullcontext()
        torch.cuda.synchronize = self.synchronize


def nodes_and_world(size):
    """How many nodes and processes a size of a run means: 4, or "2x4" for 4 processes on each of 2 nodes."""
    nodes, _, local = str(size).rpartition("x")
    return int(nodes or 1), int(nodes or 1) * int(local)


def train_rank(world, rank, port, corpus, folder, options=(), prepare=None, share=False, nodes=1):
    """One process of a run, as torchrun would start it;
    leaves what it said and, unless `prepare` breaks it, its final state in `folder`."""
    local = world // nodes
    name = world if nodes == 1 else f"{nodes}x{local}"
    out = os.open(folder / f"{name}-{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    tg.BOS = BOS
    tg.PRESETS[PRESET.name] = PRESET
    train = tg.train
    if share:
        FileMemory(folder, rank).install()

    def train_and_keep(trainer, *arguments):
        loss = train(trainer, *arguments)
        torch.save({"loss": loss, "state": trainer.optimizer.state()}, folder / f"{name}-{rank}.pt")
        return loss

    if prepare is None:
        tg.train = train_and_keep
    else:
        prepare(rank)
    logs = str(folder / f"logs-{name}")
    arguments = ["--preset", "tiny", "--seed", str(SEED), "--data", str(corpus), "--log-dir", logs, *options]
    sys.exit(tg.main(arguments))


def launch(corpus, folder, worlds, share=False):
    """Train PRESET once with each number of processes, "2x4" on 2 nodes.
    They fork from one fresh process, which imports torch once. `share`: see FileMemory."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(corpus), str(folder), "share" if share else "", *map(str, worlds)]
    result = subprocess.run(command, env=environment, timeout=1800, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr + "".join(path.read_text() for path in sorted(folder.glob("*.out")))
    return folder


def start_world(world, *arguments):
    """Fork the ranks of one run; `arguments` are train_rank's from `corpus` on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    importlib.import_module("torch._dynamo")  # or each rank imports it, which takes seconds of a busy core
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train_rank, args=(world, rank, port, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    return ranks


def fork_worlds(corpus, folder, share, worlds):
    for name in worlds:
        nodes, world = nodes_and_world(name)
        options = "--val-every", "3", "--save", str(folder / f"{name}.safetensors")
        ranks = start_world(world, corpus, folder, options, None, bool(share), nodes)
        for process in ranks:
            process.join(600)  # a busy machine takes many times as long as a quiet one
        if codes := [process.exitcode for process in ranks if process.exitcode != 0]:
            for process in ranks:
                process.kill()
            return f"{name} processes ended with {codes}"


if __name__ == "__main__":
    sys.exit(fork_worlds(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
