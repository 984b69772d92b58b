"""Time and accuracy of Adam's kernel on the large tables of one rank; not a test.

    python benchmarks/bench_adam.py                    under 30 s on an H200
    python benchmarks/bench_adam.py --cpu-dry-run      tiny tables: proves that it runs through

Milliseconds, medians over replays of a CUDA graph. An element moves 14 bytes: a gradient read, a weight and two moments read and
written, all bf16; the ceiling is their time at 4.27 TB/s. Errors are Frobenius norms relative to float64 after one step that
starts from moments of training's size; each tensor's own rounding to bf16 leaves about 2^-9.2 = 0.0017.
"""

import argparse
import sys
import time
from pathlib import Path

import bench_mlp  # first: it chooses between interpreter and GPU
import torch

sys.path.append(str(Path(__file__).parent.parent))
import train_gpt as tg

DRY, DEVICE = bench_mlp.DRY, bench_mlp.DEVICE
TABLES = {"embedding, value embedding, head": (64, 48) if DRY else (50_304, 768)}
BYTES, BETAS, EPSILON = 14, (0.75, 0.95), 1e-10


def make_state(rows, width):
    """(weight, gradients [1, rows, width], mean, square). Of the gradient's rows only those of a batch are not zero."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    random = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator)  # noqa: E731
    grad = 1e-3 * random(rows, width) * (torch.rand(rows, 1, device=DEVICE, generator=generator) < 0.2)
    mean = 3e-4 * random(rows, width)
    return [x.bfloat16() for x in (random(rows, width), grad[None], mean, 4 * mean.square() + 1e-8)]


def errors(state, rates):
    """Of weight, mean and square after one step."""
    got, want = [x.clone() for x in state], [x.double() for x in state]
    tg.adam(*got, *rates, *BETAS, EPSILON)
    weight, (grad,), mean, square = want
    mean += (1 - BETAS[0]) * (grad - mean)
    square += (1 - BETAS[1]) * (grad * grad - square)
    change = float(rates[0].double()) * mean / (square.sqrt() + EPSILON)
    weight -= change + float(rates[1].double()) * weight * (change * weight > 0)
    return [float((got[i].double() - want[i]).norm() / want[i].norm()) for i in (0, 2, 3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-dry-run", action="store_true")
    parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        sys.exit("needs a CUDA device; --cpu-dry-run proves that the benchmark runs through")
    begin = time.perf_counter()
    print(f"{'CPU' if DRY else torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| table | rows x width | ms | GB/s | ceiling ms | reference ms | error of weight | mean | square |\n" + "|---" * 9 + "|")
    rates = [torch.full((), rate, device=DEVICE) for rate in (1e-2, 1e-4)]  # the step, the decay of an element that shrinks anyway
    with torch.no_grad():
        for name, (rows, width) in TABLES.items():
            state = make_state(rows, width)
            found = errors(state, rates)
            ms, size = bench_mlp.milliseconds(lambda: tg.adam(*state, *rates, *BETAS, EPSILON)), BYTES * rows * width  # noqa: B023
            reference = bench_mlp.milliseconds(lambda: tg.adam_reference(*state, *rates, *BETAS, EPSILON))  # noqa: B023
            print(f"| {name} | {rows} x {width} | {ms:.3f} | {size / ms / 1e6:.0f} | {size / 4.27e9:.3f} | {reference:.3f} | " + " | ".join(f"{e:.1e}" for e in found) + " |")
            del state
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
