"""What only a GPU can show of a training step: its CUDA graphs replay what eager steps do, its fast operators train as the reference does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import helpers
from helpers import MODEL, PRESET, tg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = replace(PRESET, model=replace(MODEL, width=256, heads=2, head_width=128, mlp_width=512, pointer_width=128, dtype="bfloat16"))


def trained(corpus, **options):
    """Losses of every step and the state's hash after it."""
    ranks = tg.Ranks.start()
    trainer = helpers.make_trainer(corpus, SMALL, tg.select_ops(ranks.device, **options), ranks)
    trainer.initialise(3)
    trainer.warm_up()
    trainer.initialise(3)
    compiled, losses = tg.compiled_graphs(), []
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
    losses, expected = trained(corpus)[0], trained(corpus, fast=False)[0]
    assert losses == pytest.approx(expected, rel=1e-2)
