"""Times and errors of the head, the loss and the embedding gradient on one GPU, as markdown tables.

    python benchmarks/bench_loss.py                       under 40 s on an H200
    python benchmarks/bench_loss.py --compiled            also torch.compile of the plain formula, 15 s more
    python benchmarks/bench_loss.py --tokens 16384        one size
    python benchmarks/bench_loss.py --cpu-dry-run         tiny sizes, interpreted kernels: proves that it runs through

Medians over replays of a CUDA graph. Ceilings: 4.27 TB/s for kernels, 790 TFLOP/s for bf16 products, 1500 for FP8; of a
whole path the products and the bytes of its elementwise kernels. Errors are Frobenius norms relative to a float64
result of the same bf16 operands.
"""

import argparse
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY, host_milliseconds, milliseconds

V, D = (160, 48) if DRY else (50304, 768)
CAP = tg.Softcap()
TOKENS = [32, 64] if DRY else [16_384, 32_768, 49_152]
SCALES = tg.HeadScales()
CEILINGS = {"GB/s": 4270.0, "bf16 TFLOP/s": 790.0, "fp8 TFLOP/s": 1500.0}
# One batch chunk of each of the sprint's last stages, the extension aside: tokens, candidates, weights of the targets.
CHUNKS = (
    [(32, 64, (1.0, 0.5))]
    if DRY
    else [
        (stage.chunk_tokens, stage.sampled_classes, stage.targets[0])
        for stage in tg.PRESETS["sprint"].stages[-4:-1]
    ]
)


def plain_loss(x, weight, targets, scales=None):
    """What a compiler has to work with: no chunks, no custom function."""
    return F.cross_entropy(tg.softcapped((x @ weight.T).float(), CAP), targets.class_index.long(), reduction="sum")


def head_loss(x, weight, targets, scales=None):
    return tg.HeadLoss.apply(x, weight, targets.log_copy, targets, CAP, scales)


def zipf(T):
    """Ids of tokens, the commonest a few percent of all."""
    return (V * np.random.default_rng(0).power(0.28, T)).astype(np.int64)


def make_operands(T, count=None, weights=(1.0,)):
    """x as RMS-normed features that know a little about their target,
    so that probabilities are not all tiny; weight; targets."""
    generator = torch.Generator(DEVICE).manual_seed(T)
    weight = torch.randn(V, D, device=DEVICE, generator=generator) * 0.08
    ids = columns = zipf(T)
    x = torch.randn(T, D, device=DEVICE, generator=generator) + 2 * weight[torch.from_numpy(ids).to(DEVICE)]
    to = lambda array: torch.from_numpy(np.array(array, np.int32)).to(DEVICE)
    sampled = ()
    if count:
        candidates, certain, columns = tg.sample_classes(ids, count, V, chunk_number=3)
        sampled = to(candidates[None]), to([certain])
    targets = tg.Targets(to(columns), to(np.arange(T) % 391), torch.tensor(weights, device=DEVICE), *sampled)
    return F.rms_norm(x, (D,)).bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


def exact_head(x, weight, targets):
    """(loss, dx, dW) of one part by the float64 reference."""
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    loss = tg.head_loss_reference(*wide, targets, CAP, 2048)
    return loss.detach(), *torch.autograd.grad(loss, wide)


def time_pieces(T, x, weight, targets):
    """{name: (ms, work, unit)} of every kernel and matrix product; work in 10^9 bytes or 10^12 operations."""
    x = x.detach()
    weight = weight.detach()
    one = torch.ones((), device=DEVICE)
    logits = x @ weight.T
    _, *rows = tg.row_losses(logits, targets, CAP)
    table = {}

    def piece(name, run, gigabytes=None):
        unit = "GB/s" if gigabytes else "fp8 TFLOP/s" if "fp8" in name else "bf16 TFLOP/s"
        table[name] = milliseconds(run), gigabytes or 2 * T * V * D / 1e12, unit

    x8, x8_t = tg.quantize_both(x, SCALES.x)
    w8, w8_t = tg.quantize_both(weight, SCALES.weight)
    piece("quantise x, both layouts", lambda: tg.quantize_both(x, SCALES.x), 4 * T * D / 1e9)
    piece("quantise W, both layouts", lambda: tg.quantize_both(weight, SCALES.weight), 4 * V * D / 1e9)
    piece("logits, fp8", lambda: tg.fp8_matmul_nt(x8, w8, one, 1.0, True))
    piece("logits, bf16", lambda: x @ weight.T)
    if not DRY:  # the interpreter knows no inline assembly
        piece("row losses, hardware tanh", lambda: tg.row_losses(logits, targets, CAP, True), 2 * T * V / 1e9)
    piece("row losses, exact", lambda: tg.row_losses(logits, targets, CAP), 2 * T * V / 1e9)
    pointed = targets._replace(log_copy=torch.full((T,), -2.0, device=DEVICE), copy_token=V - 1)
    piece("row losses, exact, with a pointer", lambda: tg.row_losses(logits, pointed, CAP), 2 * T * V / 1e9)
    for K in (1, 3):
        several = targets._replace(weights=torch.ones(K, device=DEVICE))
        grad8 = lambda: tg.head_grad(logits, several, *rows, one / SCALES.grad, CAP, torch.float8_e5m2, not DRY)
        piece(f"gradient in FP8, both layouts, K = {K}", grad8, 4 * T * V / 1e9)
    copied = tg.row_losses(logits, pointed, CAP)[1:]
    grad8 = lambda: tg.head_grad(logits, pointed, *copied, one / SCALES.grad, CAP, torch.float8_e5m2, not DRY)
    piece("gradient in FP8, both layouts, K = 1, with a pointer", grad8, 4 * T * V / 1e9)
    grad16 = lambda: tg.head_grad(logits, targets, *rows, one, CAP, torch.bfloat16)
    piece("gradient to bf16", grad16, 4 * T * V / 1e9)

    def gradients_fp8(g8, g8_t):
        piece("dx, fp8", lambda: tg.fp8_matmul_nt(g8, w8_t, one, 1.0, False))
        piece("dW, fp8", lambda: tg.fp8_matmul_nt(g8_t, x8_t, one, 1.0, False))

    def gradients_bf16(g16, _):
        piece("dx, bf16", lambda: g16 @ weight)
        piece("dW, bf16", lambda: g16.T @ x)

    gradients_fp8(*grad8())  # a call each, so that only one of these large tensors is in memory
    gradients_bf16(*grad16())
    return table


def time_paths(operands, paths, exactly=True):
    """Prints a row a path, forward and what the backward adds; paths: {name: (function, scales)}."""
    x, weight, targets = operands
    T = len(x)
    P = V if targets.classes is None else targets.classes.shape[1]
    want = exact_head(*operands) if exactly else None
    for name, (function, scales) in paths.items():
        def both():
            loss = function(x, weight, targets, scales)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))
        if not DRY:
            torch.cuda.reset_peak_memory_stats()
        before = 0 if DRY else torch.cuda.memory_allocated()  # the operands, and what float64 gave
        got = both()
        peak = 0 if DRY else (torch.cuda.max_memory_allocated() - before) / 1e9
        errors = (
            [f"{((a.double() - b).norm() / b.norm()).item():.1e}" for a, b in zip(got, want)]
            if exactly
            else [""] * 3
        )
        del got
        with torch.no_grad():
            forward = milliseconds(lambda: function(x, weight, targets, scales))
        whole = milliseconds(both)
        product = 2 * T * P * D / 1e9 / CEILINGS["fp8 TFLOP/s" if scales else "bf16 TFLOP/s"]
        floors = [
            products * product + size * T * P / 1e6 / CEILINGS["GB/s"]
            for products, size in ((1, 2), (2, 4))  # the gradient reads 2 bytes, and writes 2, or 1 in both layouts
        ]
        times = (forward, floors[0], whole - forward, floors[1])
        cells = [T, P, len(targets.weights), name, *(f"{ms:.3f}" for ms in times), *errors, f"{peak:.1f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def time_embedding(T):
    """Prints a row a method: one table's gradient for Zipf-like ids."""
    ids = zipf(T)
    rows = V
    start = time.perf_counter()
    sort = tg.sort_ids(ids, rows)
    host = (time.perf_counter() - start) * 1e3
    tokens, order, starts = lookup = [torch.from_numpy(array.astype(np.int32)).to(DEVICE) for array in (ids, *sort)]
    grad = torch.randn(T, D, device=DEVICE).bfloat16()
    dense = torch.empty(rows, D, dtype=torch.bfloat16, device=DEVICE)
    exactly = tg.embedding_grad_reference(grad.double(), tokens, rows)
    counts = starts.diff()
    runs = {
        "ours": lambda: tg.embedding_grad(grad, lookup, dense),
        "torch embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(
            grad, tokens, rows, -1, False
        ),
    }
    case = f"{T} | {rows} ({int((counts > 0).sum())}, {int(counts.max())})"
    print(f"| {case} | sort_ids (host) | {host:.3f} | | | |")
    for name, run in runs.items():
        error = ((run().double() - exactly).norm() / exactly.norm()).item()
        timed = milliseconds if name == "ours" else host_milliseconds  # torch's waits for the device
        ms = timed(lambda: (run(), DRY or name == "ours" or torch.cuda.synchronize()))
        size = 2 * (T + rows) * D / 1e6
        print(
            f"| {case} | {name} | {ms:.3f} | {size / ms:.0f} | {size / CEILINGS['GB/s']:.3f} | {error:.1e} |",
            flush=True,
        )


def compile_plain():
    return {"torch.compile": (torch.compile(plain_loss, dynamic=False), None)}


def time_size(T, paths):
    """Prints the rows of all paths, every class in the softmax; returns the figures of the pieces."""
    operands = make_operands(T)
    time_paths(operands, paths)
    with torch.no_grad():
        table = time_pieces(T, *operands)
        evaluation = milliseconds(lambda: tg.head_loss_eval(*operands, CAP))
    table["evaluation, bf16"] = evaluation, 2 * T * V * D / 1e12, "bf16 TFLOP/s"
    return table


def print_pieces(columns):
    """A row a piece and a column a size, of {tokens: {piece: (ms, work, unit)}}."""
    def cell(ms, work, unit):
        rate = work / ms * 1e3
        return f"{ms:.3f} ({rate:.0f} {unit}, {100 * rate / CEILINGS[unit]:.0f} %)"

    print("\n| piece, ms (rate, share of the ceiling) |" + "".join(f" {T} |" for T in columns))
    print("|---|" + "---|" * len(columns))
    for piece in next(iter(columns.values())):
        print(f"| {piece} | " + " | ".join(cell(*table[piece]) for table in columns.values()) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=timing.token_count, nargs="+", default=TOKENS)
    parser.add_argument("--compiled", action="store_true", help="torch.compile too, at the first size")
    timing.add_options(parser)
    options = parser.parse_args()
    timing.require_gpu()

    columns = {}
    paths = {"**fp8**": (head_loss, SCALES), "bf16": (head_loss, None)}
    print(f"{timing.machine()}, V = {V}, D = {D}\n")
    print(
        "| tokens | columns | K | path | forward ms | ceiling | backward ms | ceiling "
        "| loss error | dx | dW | GB more at the peak |\n"
        + "|---" * 12
        + "|"
    )
    for T, count, weights in CHUNKS:
        time_paths(make_operands(T, count, weights), paths)
        time_paths(make_operands(T, None, weights), {"**fp8**": paths["**fp8**"]}, exactly=False)
    for T in options.tokens:
        compiled = options.compiled and T == options.tokens[0] and not DRY
        columns[T] = time_size(T, paths | compile_plain() if compiled else paths)
        print(f"{T} tokens done after {timing.seconds():.0f} s", file=sys.stderr)

    print_pieces(columns)
    print(
        "\n| tokens | rows (ids, most frequent) | embedding gradient | ms | GB/s | ceiling ms | error |\n"
        + "|---" * 7
        + "|"
    )
    for T in options.tokens:
        time_embedding(T)
    print(f"\n{timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
