"""Times and errors of the pointer on one GPU.

    python benchmarks/bench_pointer.py                 the fixed tiles: kernels alone, and what a step adds to the head
    python benchmarks/bench_pointer.py --sweep         other tiles too
    python benchmarks/bench_pointer.py --cpu-dry-run   toy sizes in Triton's interpreter: proves that the script runs

Medians over replays of a CUDA graph, ms. Documents as in bench_attention.py (mean 570 tokens, cap 3072), Zipf-like ids;
width, window and scale of the sprint (in LOG.md the figures to 2026-11-23 are of window 2048 and scale 128^-.5).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F

import bench_attention as attention
import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY, milliseconds

SPRINT = tg.GPT_SPRINT
WIDTH = 16 if DRY else SPRINT.pointer_width
WINDOW = 24 if DRY else SPRINT.pointer_window_tokens
MODEL_WIDTH = 32 if DRY else SPRINT.width
SIZES, CAP = ((48, 100), "<40") if DRY else ((16_384, 65_536, 196_608), "<3072")
SCALE = SPRINT.pointer_scale
DTYPE = torch.float32 if DRY else torch.bfloat16


def pointer_in(h, weight):
    return tg.pointer_in(F.linear(h, weight))


class Cell:
    """Operands of one size: states h and the pointer's matrix, from them qk; ids, documents, incoming gradient."""

    def __init__(self, tokens):
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)
        self.h = tg.norm(normal(tokens, MODEL_WIDTH)).to(DTYPE)
        self.weight = (normal(3 * WIDTH, MODEL_WIDTH) * 0.02).to(DTYPE)
        self.qk = pointer_in(self.h, self.weight)
        self.omega = normal(tokens)
        self.ids = torch.from_numpy((50_257 * np.random.default_rng(0).power(0.28, tokens)).astype(np.int32)).to(DEVICE)
        self.distances, self.documents = attention.distances(tokens, CAP, DEVICE)
        self.seen = float(self.distances[0].clamp(max=WINDOW).float().mean())

    def log_copy(self, qk):
        return tg.PointerLogCopy.apply(qk, self.ids, *self.distances, WINDOW, SCALE)

    def both(self, function, *operands):
        leaves = [x.detach().requires_grad_() for x in operands]
        log_copy = function(*leaves)
        return log_copy.detach(), *torch.autograd.grad(log_copy, leaves, self.omega.to(log_copy.dtype))

    def milliseconds(self, function, *operands):
        """Of the forward pass, and of what the backward adds."""
        with torch.no_grad():
            forward = milliseconds(lambda: function(*operands), calls=6)
        return forward, milliseconds(lambda: self.both(function, *operands), calls=6) - forward

    def errors(self):
        """Relative RMS errors of log_copy, where it is anything, and of dqk."""
        wide = lambda qk: tg.pointer_reference(qk, self.ids, self.distances[0], WINDOW, SCALE)
        log_copy, dqk = self.both(self.log_copy, self.qk)
        exact, exact_dqk = self.both(wide, self.qk.double())
        found = exact > tg.NEG_INF
        return [
            float((x.double() - y).norm() / y.norm())
            for x, y in ((log_copy[found], exact[found]), (dqk, exact_dqk))
        ], float(found.float().mean())


def report(cell, whole):
    forward, backward = cell.milliseconds(cell.log_copy, cell.qk)
    path = cell.milliseconds(lambda h, weight: cell.log_copy(whole(h, weight)), cell.h, cell.weight)
    floors = [products * 2 * cell.seen * len(cell.qk) * WIDTH / 790e9 for products in (1, 4)]
    found = errors = "-"
    if len(cell.qk) <= 65_536:
        (error, grad_error), share = cell.errors()
        found = f"{share:.1%}"
        errors = f"{error:.1e} {grad_error:.1e}"
    columns = [f"{len(cell.qk):7d} {cell.documents:5d} {cell.seen:6.0f} {found:>6}"]
    columns += [f"{ms:7.3f} {floor:7.3f}" for ms, floor in zip((forward, backward), floors)]
    print(" | ".join([*columns, f"{path[0]:7.3f} {path[1]:7.3f}", errors]), flush=True)


def sweep(cell):
    """Other tiles for both passes, in one go:
    each call takes the first for the forward and the second for the backward."""
    words = (
        "32x32w4s2"
        if DRY
        else "64x64w4s1 64x64w4s2 64x64w4s3 64x32w4s3 64x128w4s2 128x64w8s2 128x64w8s3 128x128w8s2"
    )
    for word in words.split():
        try:
            forward, backward = attention.with_tile(word, lambda: cell.milliseconds(cell.log_copy, cell.qk))()
            print(f"{len(cell.qk):7d} {word:>12} forward {forward:7.3f}  backward {backward:7.3f}", flush=True)
        except Exception as error:  # e.g. too much shared memory
            print(f"left out: {word}: {type(error).__name__}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    timing.add_options(parser)
    options = parser.parse_args()
    timing.require_gpu()
    print(f"{timing.machine()}, triton {tg.triton.__version__}", flush=True)
    print(
        " tokens  docs   seen  found | forward ceiling | backward ceiling "
        "| with the projection: forward, backward | errors of log_copy, dqk"
    )
    whole = pointer_in if DRY else tg.compile_dynamic(pointer_in)
    for tokens in SIZES:
        cell = Cell(tokens)
        report(cell, whole)
        if options.sweep or DRY:
            sweep(cell)


if __name__ == "__main__":
    main()
