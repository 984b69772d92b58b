"""Time and accuracy of orthogonalisation on a CUDA GPU; not a test.

    python benchmarks/bench_orthogonalize.py                 times next to torch.bmm / baddbmm's, and polar errors
    python benchmarks/bench_orthogonalize.py --sweep         each kernel with every tile candidate, next to torch.bmm
    python benchmarks/bench_orthogonalize.py --compile       with the scaling compiled by torch.compile
    python benchmarks/bench_orthogonalize.py --method turbo  another of ORTHOGONALIZATIONS than the default
    python benchmarks/bench_orthogonalize.py --cpu-dry-run   tiny sizes in Triton's interpreter: proves that it runs

Times are medians of CUDA events around replayed CUDA graphs, so no launch overhead is in them; "eager" has it. TFLOP/s
count what the algorithm needs: 3 n^2 m + n^3 flops a step and matrix (n <= m), symmetric products at half;
the ceiling is their time at 790 TFLOP/s.
"""
import argparse
import collections
import math

import torch

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY

DTYPE = torch.float32 if DRY else torch.bfloat16  # the interpreter's tl.dot is wrong in bf16


def matrices_by_shape(config):
    """(how many, rows, columns) of what Muon orthogonalises in a model."""
    counts = collections.Counter()
    for parameter in tg.GPT(
        config, tg.select_ops(torch.device("cpu"), fast=False), torch.device("meta")
    ).parameters():
        if shape := parameter.info.matrix_shape:
            counts[shape] += parameter.numel() // math.prod(shape)
    return [(count, *shape) for shape, count in counts.items()]


BATCHES = (
    [(2, 24, 24), (1, 40, 24), (2, 8, 24)]
    if DRY
    else list(dict.fromkeys([*matrices_by_shape(tg.GPT_SPRINT), *matrices_by_shape(tg.GPT_SMALL)]))
)
RANKS = (1, 8) if DRY else (1, 4, 8)
SYMMETRIC_TILES = [(128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 128, 8, 3), (64, 64, 64, 4, 4),
                   (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4)]  # fmt: skip
PRODUCT_TILES = SYMMETRIC_TILES[:4] + [(64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3),
                                       (64, 256, 64, 4, 3)]  # fmt: skip


def microseconds(function, replays=30):
    return 1e3 * timing.milliseconds(function, calls=1, replays=replays)


def orthogonalize_torch(matrices, method):
    """The same polynomial through cuBLAS: full products, no kernels of ours."""
    tall = matrices.size(1) > matrices.size(2)
    X = matrices.mT if tall else matrices
    X = X.to(DTYPE) if method.safety is None else tg.frobenius_scale(X, method.safety, DTYPE)
    for number, (a, b, c) in enumerate(method.coefficients):
        A = torch.bmm(X, X.mT)
        if number == 0 and method.safety is None:
            X, A = tg.aol_scale(X, A)
        P = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, P, X, beta=a)
    return X.mT if tall else X


def spectra(rows, columns):
    """Two inputs with their exact polar factors, float64: gaussian, and singular values log-uniform in 1e-3..1."""
    gaussian, other = torch.randn(2, 2, rows, columns, dtype=torch.float64, device=DEVICE)
    U, _, Vh = torch.linalg.svd(gaussian, full_matrices=False)
    # any orthonormal columns and rows
    left = torch.linalg.qr(other[..., : min(rows, columns)])[0]
    right = Vh
    values = 10 ** (3 * torch.rand(2, 1, left.size(-1), dtype=torch.float64, device=DEVICE) - 3)
    return {"gaussian": (gaussian, U @ Vh), "log-uniform": ((left * values) @ right, left @ right)}


def table(titles, rows):
    print("\n| " + " | ".join(titles) + " |\n|" + "---|" * len(titles))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def bench_shapes(method):
    times, errors = [], []
    for full, rows, columns in BATCHES:
        for ranks in RANKS:
            batch = -(-full // ranks)
            matrices = torch.randn(batch, rows, columns, device=DEVICE)
            n, m = sorted((rows, columns))
            ours = lambda: tg.orthogonalize(matrices, method, DTYPE)
            fast = microseconds(ours)
            eager = 1e3 * timing.eager_milliseconds(ours, repeats=30)
            plain = microseconds(lambda: orthogonalize_torch(matrices, method))
            flops = batch * len(method.coefficients) * (3 * n * n * m + n**3)
            row = (
                f"{fast:.0f}", f"{flops / fast / 1e6:.0f}", f"{flops / 790e6:.0f}",
                f"{eager:.0f}", f"{plain:.0f}", f"{plain / fast:.2f}",
            )
            times.append((f"{batch}x{rows}x{columns}", *row))
        inputs = spectra(rows, columns)
        cells = []
        for matrices, polar in inputs.values():
            kernels = tg.orthogonalize(matrices.float(), method, DTYPE)
            plain = orthogonalize_torch(matrices.float(), method)
            for out in (kernels, plain, tg.orthogonalize_reference(matrices, method)):
                cells.append(f"{(out.double() - polar).norm() / polar.norm():.4f}")
        errors.append((f"{rows}x{columns}", *(" / ".join(cells[i : i + 3]) for i in (0, 3))))
    table(("batch", "us", "TFLOP/s", "ceiling us", "eager us", "torch us", "speed-up"), times)
    table(("polar error: kernels / torch / float64", *inputs), errors)


def as_tiles(candidate):
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), candidate))


def sweep():
    lines = []
    for full, rows, columns in BATCHES:
        for ranks in (RANKS[0], RANKS[-1]):
            batch = -(-full // ranks)
            X = torch.randn(batch, rows, columns, device=DEVICE, dtype=DTYPE)
            X, Y = (Z.mT if rows > columns else Z for Z in (X, torch.empty_like(X)))
            A, P = (
                torch.randn(batch, X.size(1), X.size(1), device=DEVICE, dtype=DTYPE)
                for _ in range(2)
            )
            # The random A is not symmetric: the time is the same.
            kernels = {
                "X X^T": (lambda t: tg.gram(X, P, tiles=t), lambda: torch.bmm(X, X.mT)),
                "bA + cAA": (lambda t: tg.gram(A, P, 0.5, 0.5, t), lambda: torch.bmm(A, A)),
                "aX + BX": (
                    lambda t: tg.add_product(A, X, 0.5, Y, tiles=t),
                    lambda: torch.bmm(A, X),
                ),
            }
            for name, (ours, plain) in kernels.items():
                candidates = PRODUCT_TILES if name == "aX + BX" else SYMMETRIC_TILES
                found = {}
                for candidate in [(32, 32, 32, 4, 2)] if DRY else candidates:
                    try:
                        found[candidate] = microseconds(
                            lambda: ours(as_tiles(candidate)), replays=20
                        )
                    except tg.triton.runtime.errors.OutOfResources:
                        continue
                best = sorted(found, key=found.get)[:5]
                ranked = ", ".join(f"{'.'.join(map(str, c))}: {found[c]:.0f}" for c in best)
                us = [f"{microseconds(f, replays=20):.0f}" for f in (plain, lambda: ours(None))]
                lines.append((f"{batch}x{rows}x{columns}", name, *us, ranked))
    table(("batch", "kernel", "torch.bmm us", "product_tiles us", "M.N.K.warps.stages: us, best five"), lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--sweep", "--compile"):
        parser.add_argument(flag, action="store_true")
    timing.add_options(parser)
    parser.add_argument("--method", choices=tg.ORTHOGONALIZATIONS, default="polar-express")
    options = parser.parse_args()

    timing.require_gpu()
    torch.manual_seed(0)
    if options.compile:
        for name in ("frobenius_scale", "frobenius_factors"):
            setattr(tg, name, torch.compile(getattr(tg, name), dynamic=False))
    with torch.no_grad():
        sweep() if options.sweep else bench_shapes(tg.ORTHOGONALIZATIONS[options.method])
    print(f"\n{timing.machine()}, {timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
