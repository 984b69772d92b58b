"""Times and errors of the n-gram table on one GPU, as a markdown table; not a test.

    python benchmarks/bench_ngram.py                    under 60 s on an H200
    python benchmarks/bench_ngram.py --rows 8388608     a smaller table
    python benchmarks/bench_ngram.py --cpu-dry-run      tiny, interpreted kernels: proves that it runs through

For a step of each stage: the lookup of the sums, the grouping of the ids (a sort and a search) alone, and the sparse
update, grouping included. Times are medians over replays of a CUDA graph; ceilings are bytes at 4.27 TB/s. The errors
are Frobenius norms relative to float64, of what an update adds to a table of zeros; rounding to bf16 alone leaves about
2^-9.2 = 0.0017.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY, milliseconds

D = 48 if DRY else tg.GPT_SMALL.width


def make_ids(tokens, rows, row_pieces):
    """Rows [T * pieces, lookups] of a step of documents of tokens as frequent as words are:
    the commonest pairs occur hundreds of times."""
    random = np.random.default_rng(0)
    pieces = [piece for seed in range(tg.CHUNKS) for piece in tg.generated_pieces(tokens // tg.CHUNKS, 3072, seed)]
    for piece in pieces:
        piece[1:] = tg.BOS * random.power(0.28, len(piece) - 1)
    model = replace(tg.GPT_SMALL, ngram_rows=rows, ngram_pieces=row_pieces)
    step = tg.pack({0: pieces}, model, pin=False)
    return step.to(DEVICE).ngrams, row_pieces * model.table_rows


def report(tokens, name, ms, size=0, error=""):
    print(
        f"| {tokens} | {name} | {ms:.3f} | "
        + (f"{size / ms / 1e6:.0f} | {size / 4.27e9:.3f}" if size else "|")
        + f" | {error} |",
        flush=True,
    )


def time_step(T, rows, pieces):
    """Prints a row for each part of one step of T tokens."""
    ids, rows = make_ids(T, rows, pieces)
    width = D // pieces
    found, group, counts = ids.flatten().unique(return_inverse=True, return_counts=True)

    table = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    sums = (lambda f: f) if DRY else tg.compile_dynamic
    sum_rows = sums(lambda ids, table: F.embedding(ids.long(), table).sum(1))
    with torch.no_grad():
        report(
            f"{T} ({len(found)} rows, {int(counts.max())} of one)",
            "lookup",
            milliseconds(lambda: sum_rows(ids, table)),
            2 * (ids.size(1) + 1) * T * D,  # rows read, and one written
        )
    report(T, "sort and searchsorted", milliseconds(lambda: tg.group_ids(ids)))

    grad = torch.randn(len(ids), width, device=DEVICE).bfloat16()
    square, last = (torch.zeros(rows, device=DEVICE) for _ in range(2))
    numbers = [torch.tensor(x, device=DEVICE) for x in (1.0, 0.1, 0.0)]  # step, rate, decay
    want = tg.embedding_grad_reference(grad.double().repeat_interleave(ids.size(1), 0), group, len(found))
    want *= -0.1 / (0.05 * want.square().mean(1, keepdim=True)).sqrt()

    def update():
        tg.sparse_adam(grad, tg.group_ids(ids), table, square, last, *numbers, 0.95, 1e-10, 1.0)

    for state in (table, square, last):
        state.zero_()
    update()
    error = ((table[found].double() - want).norm() / want.norm()).item()
    report(T, "update", milliseconds(update), (2 * ids.numel() + 4 * len(found)) * width, f"{error:.1e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=tg.within(int, 8), default=4096 if DRY else tg.GPT_SMALL.ngram_rows)
    pieces = range(1, len(tg.HASH_MULTIPLIERS) + 1)
    parser.add_argument("--pieces", type=int, choices=pieces, default=tg.GPT_SMALL.ngram_pieces)
    timing.add_options(parser)
    options = parser.parse_args()
    timing.require_gpu()
    print(f"{timing.machine()}, {options.rows} rows x {D} in {options.pieces} pieces\n")
    print("| tokens a step | part | ms | GB/s | ceiling ms | error |\n" + "|---" * 6 + "|")
    for T in [128] if DRY else [stage.batch_tokens for stage in tg.PRESETS["sprint"].stages[-4:-1]]:
        time_step(T, options.rows, options.pieces)
    print(f"\n{timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
