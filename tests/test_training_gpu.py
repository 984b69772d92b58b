"""What only a GPU can show of a training step:
its CUDA graphs replay what eager steps do, its fast operators train as the reference does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import helpers
import sample
from helpers import MODEL, PRESET, tg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = replace(
    PRESET,
    model=replace(
        MODEL,
        width=256,
        heads=2,
        key_width=64,
        head_width=128,
        mlp_width=512,
        pointer_width=128,
        dtype="bfloat16",
    ),
)


def trained(corpus, **options):
    """Losses of every step and the state's hash after it."""
    ranks = tg.Ranks.start()
    trainer = helpers.make_trainer(corpus, SMALL, tg.select_ops(ranks.device, **options), ranks)
    trainer.initialise(3)
    trainer.warm_up()
    trainer.initialise(3)
    compiled = tg.compiled_graphs()
    losses = []
    for step, batches in enumerate(helpers.all_batches(trainer)):
        losses.append(float(trainer.training_step(step, batches)))
    assert tg.compiled_graphs() == compiled
    assert bool(trainer.graphs) == trainer.ops.graphs
    losses.append(trainer.validate(trainer.final_geometry))
    found = losses, tg.state_hash(trainer.optimizer.state())
    trainer.graphs.clear()
    return found


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(tg, "BOS", helpers.BOS)


def test_graphs_replay_what_eager_steps_do(corpus):
    assert trained(corpus, graphs=True) == trained(corpus, graphs=False)


def test_fast_operators_train_as_the_reference_does(corpus):
    """bf16 and FP8 against plain PyTorch in bf16: losses within 1 % after every step."""
    losses = trained(corpus)[0]
    expected = trained(corpus, fast=False)[0]
    assert losses == pytest.approx(expected, rel=1e-2)


def test_a_saved_model_is_the_same_on_a_cpu(corpus, tmp_path):
    """Its stored rows are unpacked on the device of the model."""
    trainer = helpers.make_trainer(corpus, PRESET)
    trainer.model.ngram.data.normal_(generator=torch.Generator().manual_seed(1))
    sample.save_model(tmp_path / "model", trainer, 1.0, seed=3)
    models = [sample.load_model(tmp_path / "model", torch.device(name)) for name in ("cuda", "cpu")]
    on_gpu, on_cpu = (sample.evaluate_model(*model, corpus)[0] for model in models)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)


SHARING = """
import torch
import share_gpu
import train_gpt as tg

if torch.cuda.device_count() < tg.torchrun_number("WORLD_SIZE"):
    share_gpu.share_gpu(tg.torchrun_number("RANK"))
ranks = tg.Ranks.start()
assert ranks.copy_stream, "GPUs that do not share memory"

def shared():  # while what is queued will write to memory that the allocator has back already
    square = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=ranks.device)
    for _ in range(50):
        square @ square
    torch.full((64,), -1, device=ranks.device)
    return ranks.shared(torch.zeros(3 * ranks.world, 40_000, dtype=torch.bfloat16, device=ranks.device), 3)

grads, weights = shared(), shared()
received = torch.empty(ranks.world, 3, 1, 40_000, dtype=torch.bfloat16, device=ranks.device)  # of three groups
given = torch.arange(3.0 * ranks.world, device=ranks.device)[:, None]
step = torch.zeros((), device=ranks.device)
mean_rank = (ranks.world - 1) / 2

def train():  # the mean over ranks of row + rank + step, sent round
    grads.copy_((given + ranks.rank + step).expand_as(grads))
    waits = [ranks.reduce_scatter(group, to) for group, to in zip(grads.chunk(3), received.unbind(1))]
    for index, group in enumerate(weights.chunk(3)):
        waits[index]()
        ranks.shard(group).copy_(tg.mean_gradient(received[:, index]))
    for wait in [ranks.all_gather(group, barrier=not index) for index, group in enumerate(weights.chunk(3))]:
        wait()
    step.add_(1)

def check(steps):
    assert float(step) == steps, ranks.rank
    expected = (given + mean_rank + steps - 1).bfloat16().expand_as(weights)
    assert torch.equal(weights, expected), (ranks.rank, steps)

for steps in range(1, 4):
    train()
    check(steps)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
    train()
for _ in range(50):  # ranks may be a step apart
    graph.replay()
check(53)
assert (tg.peak_memory_mib(ranks) << 20) >= grads.nbytes + weights.nbytes
print("shared and equal", flush=True)
del graph
ranks.finish(0)
"""


def test_ranks_fetch_from_each_other(tmp_path):
    """On as many GPUs as there are, or two ranks on one."""
    ranks = max(2, 1 << min(torch.cuda.device_count(), 8).bit_length() - 1)
    root = os.path.dirname(tg.__file__)
    (tmp_path / "sharing.py").write_text(SHARING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "sharing.py"]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((root, os.path.join(root, "benchmarks")))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("shared and equal") == ranks, found.stderr[-3000:]
