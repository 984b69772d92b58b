"""Time and accuracy of Adam's kernel on the large tables of one rank; not a test.

    python benchmarks/bench_adam.py                    under 30 s on an H200
    python benchmarks/bench_adam.py --cpu-dry-run      tiny tables: proves that it runs through

Milliseconds, medians over replays of a CUDA graph. An element moves 14 bytes: a gradient read, a weight and two moments
read and written, all bf16; the ceiling is their time at 4.27 TB/s. Errors are Frobenius norms relative to float64 after
one step that starts from moments of training's size; each tensor's own rounding to bf16 leaves about 2^-9.2 = 0.0017.
"""

import torch

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY, milliseconds

TABLES = {"embedding, value embedding, head": (64, 48) if DRY else (50_304, 768)}
BYTES = 14  # that an element moves
BETAS = (0.75, 0.95)
EPSILON = 1e-10


def make_state(rows, width):
    """(weight, gradients [1, rows, width], mean, square). Of the gradient's rows only those of a batch are not zero."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    random = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator)
    in_batch = torch.rand(rows, 1, device=DEVICE, generator=generator) < 0.2
    weight = random(rows, width)
    grad = 1e-3 * random(rows, width) * in_batch
    mean = 3e-4 * random(rows, width)
    square = 4 * mean.square() + 1e-8
    return [x.bfloat16() for x in (weight, grad[None], mean, square)]


def errors(state, rates):
    """Of weight, mean and square after one step."""
    got = [x.clone() for x in state]
    tg.adam(*got, *rates, *BETAS, EPSILON)

    weight, (grad,), mean, square = want = [x.double() for x in state]
    mean += (1 - BETAS[0]) * (grad - mean)
    square += (1 - BETAS[1]) * (grad * grad - square)
    change = float(rates[0].double()) * mean / (square.sqrt() + EPSILON)
    shrinks = change * weight > 0
    weight -= change + float(rates[1].double()) * weight * shrinks
    return [float((got[i].double() - want[i]).norm() / want[i].norm()) for i in (0, 2, 3)]


def report(name, rows, width, rates):
    """Prints the row of one table."""
    state = make_state(rows, width)
    found = errors(state, rates)
    ms = milliseconds(lambda: tg.adam(*state, *rates, *BETAS, EPSILON))
    reference = milliseconds(lambda: tg.adam_reference(*state, *rates, *BETAS, EPSILON))
    size = BYTES * rows * width
    cells = [
        name, f"{rows} x {width}", f"{ms:.3f}", f"{size / ms / 1e6:.0f}",
        f"{size / 4.27e9:.3f}", f"{reference:.3f}",
    ]
    cells += [f"{error:.1e}" for error in found]
    print("| " + " | ".join(cells) + " |")


def main():
    timing.begin(__doc__)

    columns = "table", "rows x width", "ms", "GB/s", "ceiling ms", "reference ms", "error of weight", "mean", "square"
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    rates = [torch.full((), rate, device=DEVICE) for rate in (1e-2, 1e-4)]  # the step, the decay of what shrinks anyway
    with torch.no_grad():
        for name, (rows, width) in TABLES.items():
            report(name, rows, width, rates)
    print(f"\n{timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
