"""Times and errors of SplitHeads on one GPU, against the bytes that must move and torch.compile of the reference.

    python tests/bench_split_heads.py                       under 40 s on an H200; no new torch.compile is begun after 20 s
    python tests/bench_split_heads.py --sweep               rows a program and warps of the kernels instead
    python tests/bench_split_heads.py --cpu-dry-run         tiny sizes, interpreted kernels: proves that it runs through

Microseconds, medians over replays of a CUDA graph; backward is what it adds to a forward. The ceiling is the time that the bytes need at
4.27 TB/s, in units of T H D elements: forward 4 (with a value 7, paired without one 6: v is interleaved), backward 8 (10).
Errors are Frobenius norms relative to float64, the largest of the outputs and the largest of the gradients.
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
HEADS, WIDTH, LONGEST = (2, 16, 20) if DRY else (6, 128, 3072)
BYTES_PER_MICROSECOND = 4.27e6
KINDS = {"plain": (), "paired": ("paired",), "key offset": ("key_offset",), "value": ("value",), "paired, value": ("paired", "value")}


def make_operands(T, kind):
    """([qkv, value, value_gates], [positions, cos, sin, paired, key_offset], gradients of q, k, v)."""
    generator = torch.Generator(DEVICE).manual_seed(T)
    random = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()  # noqa: E731
    flags = KINDS[kind]
    leaves = [random(T, 3, HEADS, WIDTH)]
    leaves += [random(T, HEADS * WIDTH), 2 * torch.sigmoid(random(T, HEADS))] if "value" in flags else [None, None]
    positions = torch.arange(T, device=DEVICE, dtype=torch.int32) % LONGEST % 391  # documents of 391 tokens and fewer
    frequency = 1024.0 ** -torch.linspace(0, 1, WIDTH // 4).double().numpy()
    turn = tg.geometry_tables(frequency, 0.1, (1, 1), 2 * LONGEST, torch.bfloat16, torch.device(DEVICE))
    shape = (2 * T, HEADS // 2, WIDTH) if "paired" in flags else (T, HEADS, WIDTH)
    return ([None if x is None else x.requires_grad_() for x in leaves],
            [positions, turn.cos, turn.sin, "paired" in flags, "key_offset" in flags], [random(*shape) for _ in range(3)])


def both(function, leaves, rest, grads):
    outs = function(*leaves, *rest)
    return *(out.detach() for out in outs), *torch.autograd.grad(outs, [x for x in leaves if x is not None], grads)


def needed_bytes(T, kind):
    """(forward, backward)."""
    value, element = "value" in KINDS[kind], 2 * T * HEADS * WIDTH
    forward = 7 if value else 6 if "paired" in KINDS[kind] else 4
    return forward * element + 4 * T, (10 if value else 8) * element + 4 * T


def errors(function, leaves, rest, grads):
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    tables = [rest[0], *(x.double() for x in rest[1:3]), *rest[3:]]
    want = both(tg.split_heads_reference, wide, tables, [g.double() for g in grads])
    found = [float((a.double() - b).norm() / b.norm()) for a, b in zip(both(function, leaves, rest, grads), want, strict=True)]
    return max(found[:3]), max(found[3:])


def row(name, T, kind, function):
    leaves, rest, grads = make_operands(T, kind)
    error = errors(function, leaves, rest, grads)
    with torch.no_grad():
        forward = 1e3 * bench_mlp.milliseconds(lambda: function(*leaves, *rest))
    whole = 1e3 * bench_mlp.milliseconds(lambda: both(function, leaves, rest, grads))
    cells = [str(T), kind, name]
    for us, size in zip((forward, whole - forward), needed_bytes(T, kind)):
        cells += [f"{us:.1f}", f"{size / us / 1e3:.0f}", f"{size / BYTES_PER_MICROSECOND:.1f}"]
    print("| " + " | ".join(cells) + " | {:.1e} | {:.1e} |".format(*error), flush=True)


def sweep(T):
    """Ours with other rows a program and warps."""
    for rows in (16, 32, 64):
        for warps in (4, 8):
            def launch(kernel, qkv, *arguments, paired, key_offset):
                T, _, H, D = qkv.shape
                kernel[H, tg.triton.cdiv(T, rows)](qkv, *arguments, T, H=H, D=D, PAIRED=paired, OFFSET=key_offset, ROWS=rows, num_warps=warps)  # noqa: B023
            tg.SplitHeads.launch = staticmethod(launch)
            for kind in ("key offset", "value"):
                row(f"{rows} rows, {warps} warps", T, kind, tg.SplitHeads.apply)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[45] if DRY else [16_384, 32_768, 49_152])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--cpu-dry-run", action="store_true")
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        sys.exit("needs a CUDA device; --cpu-dry-run proves that the benchmark runs through")
    begin = time.perf_counter()
    print(f"{'CPU, interpreted' if DRY else torch.cuda.get_device_name()}, torch {torch.__version__}, {HEADS} heads of {WIDTH}\n")
    print("| tokens | kind | path | forward us | GB/s | ceiling us | backward us | GB/s | ceiling us | error | of gradients |\n" + "|---" * 11 + "|")
    if options.sweep or DRY:
        original = tg.SplitHeads.launch
        sweep(options.tokens[-1])
        tg.SplitHeads.launch = staticmethod(original)
    if not options.sweep:
        for kind in KINDS:
            for T in options.tokens:
                row("**ours**", T, kind, tg.SplitHeads.apply)
        torch._dynamo.config.recompile_limit = 64
        compiled = (lambda function: function) if DRY else tg.compile_dynamic
        for kind in list(KINDS)[:4]:
            if time.perf_counter() - begin < 20:
                function = compiled(tg.split_heads_reference)
                for T in options.tokens[::2]:
                    row("torch.compile", T, kind, function)
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
