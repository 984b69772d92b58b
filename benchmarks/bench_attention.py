"""Windowed document attention on one GPU:
times, errors, and the sweep that chose the tiles in train_gpt.attention_tiles.

    python benchmarks/bench_attention.py                the fixed tiles, beside torch's varlen_attn and FlashAttention-3
    python benchmarks/bench_attention.py --sweep        also times every tile of TILES on every cell and ranks them
    python benchmarks/bench_attention.py --sprint       heads as that preset has them, q and k narrower; also --speedrun
    python benchmarks/bench_attention.py --cpu-dry-run  both, tiny, in Triton's interpreter: proves that the script runs

Times are microseconds, medians over replays of a CUDA graph of several calls (operands of a big cell exceed the L2, so
calls do not warm it for each other); backward is delta plus all three gradients. Width 128 and 6 heads unless a preset
is named, normalised q and k, scale 0.12. Ours includes the gates of the heads' outputs and their gradient, as in
training; the others know none, and their errors are beside outputs without.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest.mock import patch

import torch
import torch.nn.functional as F

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg

SCALE = 0.12
MODELS = {"--sprint": tg.GPT_SPRINT, "--speedrun": tg.GPT_SMALL}
# also in the processes that compile
MODEL = next((model for option, model in MODELS.items() if option in sys.argv), None)
SHAPE = (MODEL.heads, MODEL.key_width, MODEL.head_width) if MODEL else (6, 128, 128)  # heads, width of q and k, of v
# tokens, documents (all of one length, or "<" their cap), window,
# FlashAttention-3 forward / backward as measured on an H200
CELLS = [
    (16384, "896", 128, 68, 147), (16384, "896", 384, 68, 173), (16384, "896", 768, 68, 196),
    (32768, "<2048", 384, 114, 338), (32768, "<2048", 896, 131, 419),
    (49152, "<2048", 128, 117, 404), (49152, "<2048", 384, 148, 482), (49152, "<2048", 640, 162, 514),
    (49152, "<2048", 768, 168, 532), (49152, "<2048", 1408, 170, 554),
]  # fmt: skip
DRY_CELLS = [(96, "40", 20, 1, 1), (150, "<64", 50, 1, 1)]


# Tokens a program owns x tokens a step, warps, stages. Compiled for sm_90 at width 128 (Triton 3.6.0 and 3.7.1) none of
# these spills more than 16 bytes. Left out because they spill hundreds: 64x128w4 and 128x128w8 for the backward,
# 128x64w4 everywhere.
TILES = {
    "forward": (
        "64x128w4s2 64x64w4s1 64x64w4s2 64x64w4s3 64x32w4s2 64x32w4s3 "
        "128x64w8s2 128x64w8s3 128x32w8s2 128x128w8s2"
    ).split(),
    "backward": "64x64w4s1 64x64w4s2 64x32w4s2 64x32w4s3 128x64w8s2 128x32w8s2".split(),
}
DRY_TILES = {name: ["32x32w4s2", "16x32w4s2"] for name in TILES}


def with_tile(word, call):
    """A call that takes this tile instead of the fixed one:
    64x32w4s2 is 64 tokens a program, 32 a step, 4 warps, 2 stages."""
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), map(int, re.split("[xws]", word))))

    def run():
        with patch.object(tg, "attention_tiles", lambda *_: (tile, tile)):
            return call()

    return run


class Context:
    """Stands in for autograd's, so that one pass can be called without the other."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


def distances(tokens, documents, device):
    """(positions, remaining) as in Documents, and the number, of documents of one length,
    or log-normal (median 391, mean 570, 32 to the cap)."""
    generator = torch.Generator().manual_seed(tokens)
    cap = int(documents.lstrip("<"))
    lengths = torch.full((tokens // 32 + 1,), float(cap))
    if documents.startswith("<"):
        spread = (2 * torch.tensor(570 / 391).log()).sqrt()
        lengths = (
            (torch.randn(len(lengths), generator=generator) * spread + torch.tensor(391.0).log())
            .exp()
            .clamp(32, cap)
        )
    ends = lengths.long().cumsum(0).clamp(max=tokens).unique()
    lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.long))
    at = torch.arange(tokens)
    ends = ends.repeat_interleave(lengths)
    return [
        x.to(device, torch.int32) for x in (at - ends + lengths.repeat_interleave(lengths), ends - 1 - at)
    ], len(lengths)


class Cell:
    """Operands of one cell, and calls that run one pass of it, with a given tile or the fixed one."""

    def __init__(self, tokens, documents, window, device):
        heads, keys, values = SHAPE
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16  # the interpreter's bf16 products are wrong
        normal = lambda width: torch.randn(tokens, heads, width, generator=generator, device=device)
        self.q, self.k = (F.rms_norm(normal(keys), (keys,)).to(dtype) for _ in range(2))
        self.v = normal(values).to(dtype)
        self.dout = normal(values).to(dtype)
        self.gates = torch.rand(tokens, heads, generator=generator, device=device).to(dtype) / 2 + 2.0**-8
        self.distances, self.documents = distances(tokens, documents, device)
        self.tokens = tokens
        self.window = window
        self.device = device
        self.context = Context()
        self.forward(self.context)

    def forward(self, context):
        return tg.PackedAttention.forward(
            context, self.q, self.k, self.v, *self.distances, self.window, SCALE, self.gates
        )

    def call(self, name, tile=None):
        call = (
            (lambda: self.forward(Context()))
            if name == "forward"
            else lambda: tg.PackedAttention.backward(self.context, self.dout)
        )
        return with_tile(tile, call) if tile else call

    def ceilings(self):
        """Least microseconds of (forward, backward):
        the products of visible scores at 790 TFLOP/s, or the operands at 4.27 TB/s."""
        visible = int((self.distances[0].clamp(max=self.window) + 1).sum())
        k = self.k[0].numel()
        v = self.v[0].numel()
        # The backward pass also reads the output, for delta.
        return [max(2 * visible * products / 790e6, self.tokens * operands * self.v.itemsize / 4.27e6)
                for products, operands in ((k + v, 2 * k + 2 * v), (3 * k + 2 * v, 4 * k + 4 * v))]

    def leaves(self, dtype=None):
        return [x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.q, self.k, self.v)]


def varlen(cell):
    """torch's varlen_attn as (forward, backward) calls, or None where it is missing.
    Its times include autograd's launches."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        leaves = cell.leaves()
        positions = cell.distances[0]
        ends = torch.cat(
            [(positions == 0).nonzero()[:, 0], torch.tensor([len(positions)], device=positions.device)]
        ).int()
        longest = int(positions.max()) + 1
        attend = lambda: varlen_attn(*leaves, ends, ends, longest, longest, scale=SCALE, window_size=(cell.window, 0))
        out = attend()
        back = lambda: torch.autograd.grad(out, leaves, cell.dout, retain_graph=True)
        back()
        return attend, back
    except (ImportError, RuntimeError, NotImplementedError, TypeError):
        return None


def errors(cell, rival):
    """Relative RMS errors of out, dq, dk, dv against float64, of ours and of the rival."""
    def exact(*gates):
        leaves = cell.leaves(torch.float64)
        out = tg.attention_reference(*leaves, cell.distances[0], cell.window, SCALE, *gates)
        return out.detach(), *torch.autograd.grad(out, leaves, cell.dout.double())

    leaves = cell.leaves()
    out = tg.PackedAttention.apply(*leaves, *cell.distances, cell.window, SCALE, cell.gates)
    # In this thread: autograd's own has no CUDA context yet, which the descriptors of the first kernel there need.
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(out, leaves, cell.dout)
    rows = {"ours": ((out.detach(), *gradients), exact(cell.gates.double()))}
    if rival:
        rows["varlen_attn"] = (rival[0]().detach(), *rival[1]()), exact()
    relative = lambda x, y: float((x.double() - y).norm() / y.norm())
    return {name: [relative(x, y) for x, y in zip(row, want, strict=True)] for name, (row, want) in rows.items()}


def compile_one(name, tile):
    """In a process of its own: compiles one tile into Triton's cache on disk, and says what failed."""
    try:
        cell = Cell(1024, "<512", 128, "cuda")
        cell.call(name, tile)()
        torch.cuda.synchronize()
    except Exception as error:  # e.g. too much shared memory: the tile is left out
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"


def compile_all(table, workers):
    """Compiles all tiles in parallel; returns the table without those that failed."""
    start = time.perf_counter()
    jobs = [(name, tile) for name, found in table.items() for tile in found]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(compile_one, *zip(*jobs)))
    for (name, tile), failure in zip(jobs, failures):
        if failure:
            print(f"left out: {name} {tile}: {failure}")
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - start:.0f} s with {workers} processes", flush=True)
    good = {job for job, failure in zip(jobs, failures) if not failure}
    return {name: [tile for tile in found if (name, tile) in good] for name, found in table.items()}


def report_fixed(cells, device):
    print(
        "tokens docs window | forward: ours  ceiling  varlen  FA3  ours/FA3 "
        "| backward: ours  ceiling  varlen  FA3  ours/FA3"
    )
    for tokens, documents, window, *flash in cells:
        cell = Cell(tokens, documents, window, device)
        rival = varlen(cell)
        rivals = [1e3 * timing.eager_milliseconds(call) for call in rival] if rival else [float("nan")] * 2
        ours = [1e3 * timing.milliseconds(cell.call(name), calls=6) for name in TILES]
        columns = [
            f"{own:7.1f} {floor:7.1f} {other:7.1f} {fa3:4.0f} {own / fa3:6.2f}"
            for own, floor, other, fa3 in zip(
                ours, cell.ceilings(), rivals, [float("nan")] * 2 if MODEL else flash, strict=True
            )
        ]
        print(f"{tokens:6d} {cell.documents:3d} {window:5d} | {' | '.join(columns)}", flush=True)
    print("fixed tiles:", *tg.attention_tiles(torch.device(device), SHAPE[1]))


def report_errors(cells, device):
    print("relative RMS error against float64    out      dq      dk      dv")
    last_of_each_size = {tokens: (tokens, documents, window) for tokens, documents, window, *_ in cells}
    for arguments in last_of_each_size.values():
        cell = Cell(*arguments, device)
        for name, row in errors(cell, varlen(cell)).items():
            print(
                f"{arguments[0]:6d} window {arguments[2]:5d} {name:>12}   "
                + " ".join(f"{x:.1e}" for x in row),
                flush=True,
            )


def sweep(cells, table, device):
    """Times every tile on every cell; prints the best three a cell, then the best by geometric mean over the cells."""
    logs = {(name, tile): 0.0 for name, found in table.items() for tile in found}
    for tokens, documents, window, *_ in cells:
        cell = Cell(tokens, documents, window, device)
        print(f"{tokens} tokens, window {window}")
        for name, found in table.items():
            times = {tile: 1e3 * timing.milliseconds(cell.call(name, tile), calls=4, replays=5) for tile in found}
            for tile, value in times.items():
                logs[name, tile] += torch.tensor(value).log().item() / len(cells)
            best = sorted(times, key=times.get)[:3]
            print(f"  {name:8} " + " | ".join(f"{tile} {times[tile]:.1f}" for tile in best), flush=True)
    print("geometric mean over the cells, us")
    for name, found in table.items():
        mean = {tile: torch.tensor(logs[name, tile]).exp().item() for tile in found}
        print(f"  {name:8} " + " | ".join(f"{tile} {mean[tile]:.1f}" for tile in sorted(mean, key=mean.get)[:6]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time every tile of TILES")
    for option in MODELS:
        parser.add_argument(
            option, action="store_true", help="heads as that preset has them (no figures of FlashAttention-3)"
        )
    timing.add_options(parser)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    arguments = parser.parse_args()
    timing.require_gpu()
    device = timing.DEVICE
    cells, table = (DRY_CELLS, DRY_TILES) if timing.DRY else (CELLS, TILES)
    print(f"{timing.machine()}, triton {tg.triton.__version__}", flush=True)
    report_fixed(cells, device)
    report_errors(cells, device)
    if arguments.sweep or arguments.cpu_dry_run:
        sweep(cells, compile_all(table, arguments.workers) if device == "cuda" else table, device)


if __name__ == "__main__":
    main()
