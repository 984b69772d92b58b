"""Times and errors of the head, the loss and the embedding gradient on one GPU, as markdown tables.

    python tests/bench_loss.py                       under 90 s on an H200
    python tests/bench_loss.py --tokens 16384        one size
    python tests/bench_loss.py --cpu-dry-run         tiny sizes, interpreted kernels: proves that it runs through

Medians of CUDA-event times. Errors are Frobenius norms relative to a float64 result of the same bf16 operands.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

DRY = "--cpu-dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parent.parent))
import train_gpt as tg

DEVICE = "cpu" if DRY else "cuda"
V, D = (160, 48) if DRY else (50304, 768)
CAP, SCALES = tg.Softcap(), tg.HeadScales()
REPEATS = 1 if DRY else 10


def milliseconds(run, prepare=lambda: None):
    """Median time of run(prepare()) after two warm-up calls; only `run` is timed."""
    times = []
    for repeat in range(REPEATS + 2):
        operand = prepare()
        arguments = () if operand is None else (operand,)
        if DRY:
            start = time.perf_counter()
            run(*arguments)
            times.append((time.perf_counter() - start) * 1e3)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def plain_loss(x, weight, targets):
    """What a compiler has to work with: no chunks, no custom function."""
    logits = (x @ weight.T).float()
    z = CAP.softcap * torch.sigmoid((logits + CAP.shift) / CAP.temperature)
    return F.cross_entropy(z, targets, reduction="sum")


def make_operands(T):
    """x as RMS-normed features that know a little about their target, so that probabilities are not all tiny."""
    generator = torch.Generator(DEVICE).manual_seed(T)
    weight = torch.randn(V, D, device=DEVICE, generator=generator) * 0.08
    targets = torch.randint(V, (T,), device=DEVICE, generator=generator)
    x = torch.randn(T, D, device=DEVICE, generator=generator) + 2 * weight[targets]
    x = F.rms_norm(x, (D,))
    return x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), targets


@torch.no_grad()
def exact_head(x, weight, targets):
    """Float64 (loss, dx, dW), 2048 rows at a time."""
    weight, loss, dx, dw = weight.double(), 0.0, [], torch.zeros(V, D, dtype=torch.float64, device=DEVICE)
    for rows, picks in zip(x.double().split(2048), targets.split(2048)):
        s = torch.sigmoid((rows @ weight.T + CAP.shift) / CAP.temperature)
        log_p = (CAP.softcap * s).log_softmax(1)
        index = torch.arange(len(rows), device=DEVICE)
        loss = loss - log_p[index, picks].sum()
        grad = log_p.exp_()
        grad[index, picks] -= 1
        grad *= s * (1 - s) * (CAP.softcap / CAP.temperature)
        dx.append(grad @ weight)
        dw.addmm_(grad.T, rows)
    return loss, torch.cat(dx), dw


def time_pieces(T, x, weight, targets):
    """{name: (ms, work, unit)} of every kernel and matrix product; work in 10^9 bytes or 10^12 operations."""
    x, weight = x.detach(), weight.detach()
    one = torch.ones((), device=DEVICE)
    logits = x @ weight.T
    _, lse = tg.row_losses(logits, targets, CAP)
    table = {}

    def piece(name, run, gigabytes=None):
        work, unit = (gigabytes, "GB/s") if gigabytes else (2 * T * V * D / 1e12, "TFLOP/s")
        table[name] = milliseconds(run), work, unit

    x8, x8_t = tg.quantize_both(x, SCALES.x)
    w8, w8_t = tg.quantize_both(weight, SCALES.weight)
    piece("quantise x, both layouts", lambda: tg.quantize_both(x, SCALES.x), 4 * T * D / 1e9)
    piece("quantise W, both layouts", lambda: tg.quantize_both(weight, SCALES.weight), 4 * V * D / 1e9)
    piece("logits, fp8", lambda: tg.fp8_matmul_nt(x8, w8, one, one, True))
    piece("logits, bf16", lambda: x @ weight.T)
    if not DRY:  # the interpreter knows no inline assembly
        piece("row losses, hardware tanh", lambda: tg.row_losses(logits, targets, CAP, True), 2 * T * V / 1e9)
    piece("row losses, exact", lambda: tg.row_losses(logits, targets, CAP), 2 * T * V / 1e9)
    grad8 = lambda: tg.head_grad(logits, targets, lse, one / SCALES.grad, CAP, torch.float8_e5m2, not DRY)
    grad16 = lambda: tg.head_grad(logits, targets, lse, one, CAP, torch.bfloat16)
    piece("gradient, fp8", grad8, 3 * T * V / 1e9)
    piece("gradient, bf16", grad16, 4 * T * V / 1e9)
    g8 = grad8()
    piece("its transposed copy", lambda: tg.transposed(g8), 2 * T * V / 1e9)
    g8_t = tg.transposed(g8)
    piece("dx, fp8", lambda: tg.fp8_matmul_nt(g8, w8_t, one, one, False))
    piece("dW, fp8", lambda: tg.fp8_matmul_nt(g8_t, x8_t, one, one, False))
    del g8, g8_t
    g16 = grad16()
    piece("dx, bf16", lambda: g16 @ weight)
    piece("dW, bf16", lambda: g16.T @ x)
    return table


def time_paths(T, x, weight, targets, compiled):
    """({name: (ms, None, None)}, {path: errors of loss, dx, dW}) of the whole operators, forward and backward."""
    paths = {"fp8": tg.Fp8HeadLoss.apply, "bf16": tg.HeadLoss.apply}
    if compiled is not None:
        paths["torch.compile"] = compiled
    exactly, table, errors = exact_head(x, weight, targets), {}, {}
    for name, apply in paths.items():
        def forward():
            x.grad = weight.grad = None
            return apply(x, weight, targets)
        if not DRY:
            torch.cuda.reset_peak_memory_stats()
        loss = forward()
        loss.backward()
        errors[name] = [((got.double() - want).norm() / want.norm()).item()
                        for got, want in zip((loss.detach(), x.grad, weight.grad), exactly)]
        errors[name].append(0 if DRY else torch.cuda.max_memory_allocated() / 1e9)
        table[f"**forward, {name}**"] = milliseconds(forward), None, None
        table[f"**backward, {name}**"] = milliseconds(lambda loss: loss.backward(), forward), None, None
    table["evaluation, bf16"] = milliseconds(lambda: tg.head_loss_eval(x, weight, targets, CAP)), None, None
    return table, errors


def time_embedding(T):
    """Rows (name, ms, GB/s, error) of one table's gradient for Zipf-like tokens, the commonest a few percent of all."""
    tokens = (V * np.random.default_rng(0).power(0.28, T)).astype(np.uint16)
    start = time.perf_counter()
    sort = tg.sort_tokens(tokens, V)
    host = (time.perf_counter() - start) * 1e3
    tokens, order, starts = (torch.from_numpy(array.astype(np.int32)).to(DEVICE) for array in (tokens, *sort))
    grad = torch.randn(T, D, device=DEVICE).bfloat16()
    exactly = tg.embedding_grad_reference(grad.double(), tokens, V)
    runs = {
        "ours": lambda: tg.embedding_grad(grad, tokens, order, starts, torch.bfloat16),
        "torch embedding_dense_backward": lambda: torch.ops.aten.embedding_dense_backward(grad, tokens, V, -1, False),
        "index_add_ float32": lambda: tg.embedding_grad_reference(grad, tokens, V),
    }
    rows = [("sort_tokens (host)", host, None, None)]
    for name, run in runs.items():
        ms = milliseconds(run)
        error = ((run().double() - exactly).norm() / exactly.norm()).item()
        rows.append((name, ms, (2 * T * D + 2 * V * D) / 1e6 / ms, error))
    return rows, starts.diff().max().item(), (starts.diff() > 0).sum().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64] if DRY else [16384, 32768, 49152, 65536])
    parser.add_argument("--compiled", type=int, nargs="*", default=[16384, 49152],
                        help="sizes at which to time torch.compile too (about 15 s each)")
    parser.add_argument("--cpu-dry-run", action="store_true")
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        sys.exit("needs a CUDA device; --cpu-dry-run proves that the benchmark runs through")

    begin, columns, errors = time.perf_counter(), {}, {}
    for T in options.tokens:
        operands = make_operands(T)
        torch._dynamo.reset()
        compiled = torch.compile(plain_loss, dynamic=False) if T in options.compiled and not DRY else None
        table, errors[T] = time_paths(T, *operands, compiled)
        columns[T] = table | time_pieces(T, *operands)
        del operands
        print(f"{T} tokens done after {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    embedding = {T: time_embedding(T) for T in options.tokens}

    name = "CPU, interpreted" if DRY else torch.cuda.get_device_name()
    print(f"\n{name}, torch {torch.__version__}, V = {V}, D = {D}; ms (rate)\n")
    print("| piece |" + "".join(f" {T} |" for T in columns) + "\n|---|" + "---|" * len(columns))
    for piece in dict.fromkeys(piece for table in columns.values() for piece in table):
        cells = []
        for table in columns.values():
            ms, work, unit = table.get(piece, (None, None, None))
            cells.append("" if ms is None else f"{ms:.3f}" + (f" ({work / ms * 1e3:.0f} {unit})" if work else ""))
        print(f"| {piece} | " + " | ".join(cells) + " |")

    print("\n| tokens | path | loss error | dx error | dW error | peak GB |\n|---|---|---|---|---|---|")
    for T, paths in errors.items():
        for path, (loss, dx, dw, peak) in paths.items():
            print(f"| {T} | {path} | {loss:.1e} | {dx:.2e} | {dw:.2e} | {peak:.1f} |")

    print("\n| tokens (ids, most frequent) | embedding gradient | ms | GB/s | error |\n|---|---|---|---|---|")
    for T, (rows, most, distinct) in embedding.items():
        for method, ms, rate, error in rows:
            cells = ["" if value is None else value for value in (rate and f"{rate:.0f}", error and f"{error:.1e}")]
            print(f"| {T} ({distinct}, {most}) | {method} | {ms:.3f} | " + " | ".join(cells) + " |")
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
