"""A whole training step with the fast operators, in Triton's interpreter, is the step of the reference operators.

The kernels' own tests compare each alone. This one holds what lies between: what select_ops hands to each kernel, gradients that go to
the optimizer past autograd, and that nothing reads memory which nothing has written."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

pytest.importorskip("triton")
import helpers  # noqa: E402
from helpers import CPU, tg  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="compiled kernels: tests/test_training_gpu.py")


def one_step(ops, corpus):
    """Loss and state after one step of 128 tokens with several targets, sampled classes, pointer and n-grams."""
    stage = replace(helpers.PRESET.stages[0], steps=1, batch_tokens=128, sampled_classes=64)
    preset = replace(helpers.PRESET, stages=(stage,), val_tokens=128, val_window_tokens=128)
    ranks = tg.Ranks(0, 1, CPU)
    trainer = tg.Trainer(preset, ranks, ops, tg.Clock(CPU), corpus)
    trainer.initialise(helpers.SEED)
    helpers.randomise(trainer.model, size=0.15)  # else projections of zero leave most gradients zero
    batches = tg.training_batches(trainer.stream, preset.stages, trainer.micro_chunks, preset.model, ranks)
    loss = trainer.training_step(0, [next(batches)])
    return loss, trainer.optimizer.state()


def test_a_step_with_fast_operators_is_the_reference_step(tiny, corpus, monkeypatch):
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tg, "multiprocessors", lambda device: 4)
    fast = tg.select_ops(torch.device("cuda"), compile=False, fp8=[], graphs=False)
    fast = replace(fast, orthogonalize=tg.orthogonalize_reference)  # in bfloat16, which the interpreter multiplies wrongly
    want_loss, want = one_step(tg.select_ops(CPU), corpus)

    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nothing has written holds NaN
    try:
        loss, got = one_step(fast, corpus)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        if not name.endswith("low_bits"):
            error = (tensor - want[name]).norm() / want[name].norm().clamp_min(1e-6)
            assert error < 1e-4, f"{name}: {float(error)}"
