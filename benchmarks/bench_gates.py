"""Time of products with few outputs, as of the gates: a weight of so many rows as it is, and filled up; not a test.

    python benchmarks/bench_gates.py                    a minute on an H200, by estimate
    python benchmarks/bench_gates.py --cpu-dry-run      few tokens: proves that it runs through

Microseconds, medians over replays of a CUDA graph: `x W` transposed, and the gradients of x [tokens, 16] and of the
weight W [rows, 16]. train_gpt.few_outputs fills weights up by what this shows.
"""

import torch

import timing  # before train_gpt: it chooses between interpreter and GPU
from timing import DEVICE, DRY, milliseconds

TOKENS = (64,) if DRY else (8192, 16_384, 36_864, 65_536, 131_072, 294_912)
INPUTS = 16
ROWS = (5, 8, 3, 6, 12, 16)  # of final states, of heads and their values: each beside the multiple of 8 that holds it


def products(tokens: int, rows: int) -> list[float]:
    """Microseconds of the product, the gradient of its input and that of its weight."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    x, weight, grad = (
        torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()
        for shape in ((tokens, INPUTS), (rows, INPUTS), (tokens, rows))
    )
    each = (lambda: x @ weight.T, lambda: grad @ weight, lambda: grad.T @ x)
    return [1e3 * milliseconds(run) for run in each]


def main():
    timing.begin(__doc__)

    columns = "tokens", "rows", "product", "gradient of x", "of the weight", "sum"
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for tokens in TOKENS:
        for rows in ROWS:
            found = products(tokens, rows)
            cells = [f"{tokens}", f"{rows}", *(f"{us:.1f}" for us in (*found, sum(found)))]
            print("| " + " | ".join(cells) + " |")
    print(f"\n{timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
