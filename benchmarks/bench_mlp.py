"""Times and errors of the MLP on one GPU, FP8 against bf16, as markdown tables;
and the ranges its FP8 scales must cover.

    python benchmarks/bench_mlp.py                       under 40 s on an H200
    python benchmarks/bench_mlp.py --tokens 16384        one size
    python benchmarks/bench_mlp.py --cpu-dry-run         tiny sizes, interpreted kernels: proves that it runs through
    python benchmarks/bench_mlp.py --sweep               other launch configurations of mlp_kernel, instead
    python benchmarks/bench_mlp.py --diagnose 0,20,111,339 --preset sprint --data DIR --seed 1
        trains with the options that follow and prints, for the first micro-batch of those steps and every layer, how
        large what is rounded to FP8 is, in the QKV projections too (add --no-fp8 mlp or attention to see it in bf16)

Device times are those of CUDA graphs replayed (medians), which also proves that the operators can be captured; host
times are what it takes to enqueue the same work without a graph. Errors are Frobenius norms relative to a float64
result of the same bf16 operands. Ceilings: 4.27 TB/s (rates above it come from the L2 cache), 790 TFLOP/s in bf16 and
1500 in FP8. The bytes of a product with an epilogue are the epilogue's.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

import timing  # before train_gpt: it chooses between interpreter and GPU
import train_gpt as tg
from timing import DEVICE, DRY, host_milliseconds, milliseconds

D, H = (48, 64) if DRY else (tg.GPT_SMALL.width, tg.GPT_SMALL.mlp_width)
LAYERS = sum(layer.mlp for layer in tg.LAYERS)
SCALES = tg.MlpScales()
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
STEP_TOKENS = 131_072


def make_operands(T):
    """(h, up, down), gradient of the output: of the sizes that training has, roughly."""
    generator = torch.Generator(DEVICE).manual_seed(T)
    random = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator)
    operands = F.rms_norm(random(T, D), (D,)), random(H, D) * D ** -0.5, random(H, D) * D ** -0.5
    return [operand.bfloat16().requires_grad_() for operand in operands], (random(T, D) * 1e-3).bfloat16()


def time_pieces(T, operands, grad):
    """{name: (ms, {unit: work})} of every kernel and matrix product of Fp8Mlp, in its order, and for comparison."""
    h, up, down = (operand.detach() for operand in operands)
    table = {}
    one = torch.ones((), device=DEVICE)

    def piece(name, run, size=0, flop=0):
        table[name] = (
            milliseconds(run),
            {unit: work for unit, work in (("TFLOP/s", flop / 1e12), ("GB/s", size / 1e9)) if work},
        )
        return run()

    def product(name, run, size=0):
        return piece(name, run, size, 2 * T * D * H)

    def matmul(name, a, b, fast=False):
        return product(name, lambda: tg.fp8_matmul_nt(a, b, one, 1.0, fast))

    h8, h8_t = piece("quantise h, both layouts", lambda: tg.quantize_both(h, SCALES.x), 4 * T * D)
    up8, up8_t = piece(
        "quantise up, both layouts (down the same)", lambda: tg.quantize_both(up, SCALES.weight), 4 * H * D
    )
    down8, down8_t = tg.quantize_both(down, SCALES.weight)
    hidden = lambda: tg.mlp_product(h8, up8, (SCALES.x * SCALES.weight) ** 2 / SCALES.hidden)
    hidden8, hidden8_t = product("hidden = relu(h up^T)^2, both layouts", hidden, 2 * T * H)
    matmul("out = hidden down", hidden8, down8_t, True)
    g8, g8_t = piece("quantise g, both layouts", lambda: tg.quantize_both(grad, SCALES.grad, E5M2), 4 * T * D)
    gradient = lambda: tg.mlp_product(g8, down8, 2 * SCALES.weight * SCALES.hidden ** 0.5, hidden8)
    dpre8, dpre8_t = product("dpre = g down^T 2 relu(pre), both layouts", gradient, 3 * T * H)
    matmul("dh = dpre up", dpre8, up8_t)
    matmul("dup = dpre^T h", dpre8_t, h8_t)
    matmul("ddown = hidden^T g", hidden8_t, g8_t)
    out = grad.clone()
    piece("x + mlp", lambda: out + grad, 6 * T * D)
    matmul("(cuBLAS) h up^T in bf16", h8, up8, True)
    matmul("(cuBLAS) g down^T in bf16", g8, down8)
    pre = product("(bf16) pre", lambda: h @ up.T)
    product("(bf16) out", lambda: pre @ down)
    product("(bf16) dup", lambda: pre.T @ h)
    return table


def time_paths(paths, operands, grad):
    """{path: (forward ms, forward and backward ms, host ms, peak GB, errors of out, dh, dup, ddown)}."""
    def both(apply):
        out = apply(*operands)
        return out.detach(), *torch.autograd.grad(out, operands, grad)

    wide = [operand.detach().double().requires_grad_() for operand in operands]
    out = tg.relu_squared_mlp(*wide)
    exactly = [out.detach(), *torch.autograd.grad(out, wide, grad.double())]
    del out, wide
    rows = {}
    for name, apply in paths.items():
        both(apply)
        if not DRY:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        errors = [((got.double() - want).norm() / want.norm()).item() for got, want in zip(both(apply), exactly)]
        both(apply)
        peak = 0 if DRY else (torch.cuda.max_memory_allocated() - before) / 1e9
        forward = milliseconds(lambda: apply(*operands))
        whole = milliseconds(lambda: both(apply))
        rows[name] = forward, whole, host_milliseconds(lambda: both(apply)), peak, errors
    return rows


# ---- variants of mlp_kernel ------------------------------------------------------------------------------------------
class Variant(NamedTuple):
    """Sides of a tile, warps, stages of loads, programs a multiprocessor, and in how many parts a tile passes through
    the epilogue: more parts need less shared memory, so that more programs find room."""
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int
    parts: int

    def tile(self, backward):
        """In the place of tg.mlp_tile."""
        tile = dict(BLOCK_M=self.rows, BLOCK_N=self.columns, BLOCK_K=self.depth, PARTS=self.parts)
        return dict(tile, num_warps=self.warps, num_stages=self.stages), self.programs


HIDDEN_VARIANTS = (
    Variant(128, 128, 128, 4, 2, 3, 4),  # the present one
    Variant(128, 128, 128, 4, 3, 2, 2),
    Variant(128, 128, 64, 4, 3, 3, 2),
    Variant(128, 128, 64, 4, 4, 2, 2),
    Variant(128, 256, 128, 8, 3, 1, 2),
    Variant(128, 256, 128, 8, 4, 1, 2),
    Variant(128, 256, 64, 8, 5, 1, 2),
    Variant(256, 128, 128, 8, 3, 1, 2),
    Variant(64, 256, 64, 4, 3, 3, 2),
)
GRADIENT_VARIANTS = (
    Variant(128, 128, 64, 4, 3, 3, 2),  # the present one
    Variant(128, 128, 64, 4, 3, 3, 4),
    Variant(128, 128, 64, 4, 2, 3, 2),
    Variant(128, 128, 64, 4, 4, 2, 2),
    Variant(128, 128, 64, 8, 3, 2, 2),
    Variant(128, 128, 128, 4, 2, 3, 4),
    Variant(128, 256, 128, 8, 3, 1, 2),
    Variant(128, 64, 64, 4, 3, 4, 2),
    Variant(256, 128, 64, 8, 4, 1, 2),
)
TINY_VARIANTS = Variant(32, 32, 16, 4, 2, 2, 2), Variant(32, 64, 16, 4, 2, 2, 4)


@torch.no_grad()
def sweep(sizes):
    """A table of the variants' times for each number of tokens, and whether they give the same bits as today's.

    Decide by --hot: on a cool GPU gains are larger than in a training."""
    print(f"\n{timing.machine()}, triton {tg.triton.__version__}, D = {D}, H = {H}\n")
    print(f"| tokens | product | {', '.join(Variant._fields)} | us | today's us | same bits |\n" + "|---" * 6 + "|")
    for T in sizes:
        (h, up, down), grad = make_operands(T)
        h8, up8, down8 = (tg.quantize_both(x, scale)[0] for x, scale in (
            (h, SCALES.x), (up, SCALES.weight), (down, SCALES.weight)))
        g8, _ = tg.quantize_both(grad, SCALES.grad, E5M2)
        operands = h8, up8, (SCALES.x * SCALES.weight) ** 2 / SCALES.hidden
        hidden8, _ = tg.mlp_product(*operands)
        products = (
            ("hidden", operands, HIDDEN_VARIANTS),
            ("gradient", (g8, down8, 2 * SCALES.weight * SCALES.hidden ** 0.5, hidden8), GRADIENT_VARIANTS),
        )
        for name, operands, variants in products:
            product = lambda: tg.mlp_product(*operands)
            wanted = product()
            now = milliseconds(product)
            for variant in TINY_VARIANTS if DRY else variants:
                row = f"| {T} | {name} | {', '.join(map(str, variant))} |"
                with patch.object(tg, "mlp_tile", variant.tile):
                    try:
                        found = product()
                        ms = milliseconds(product)
                    except tg.triton.runtime.errors.OutOfResources:
                        print(f"{row} too much shared memory | | |")
                        continue
                same = all(torch.equal(*(x.view(torch.int8) for x in pair)) for pair in zip(found, wanted))
                print(f"{row} {1e3 * ms:.1f} | {1e3 * now:.1f} | {same} |", flush=True)


# ---- ranges ----------------------------------------------------------------------------------------------------------
def spread(values, scale, dtype):
    """(rms, 99.9th percentile, amax, fraction saturated,
    fraction of the non-zero flushed to zero, their share of the norm)."""
    values = values.detach().float().abs().flatten()
    sample = values[::max(1, len(values) // 2 ** 20)]
    percentile = sample.kthvalue(max(1, int(0.999 * len(sample)))).values
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal; half of it becomes 0
    flushed = (values > 0) & (values <= smallest / 2 * scale)
    norm = values.square().sum()
    return [
        number.item()
        for number in (
            (norm / len(values)).sqrt(),
            percentile,
            values.max(),
            (values > torch.finfo(dtype).max * scale).float().mean(),
            flushed.sum() / (values > 0).sum().clamp_min(1),
            (values[flushed].square().sum() / norm.clamp_min(1e-45)).sqrt(),
        )
    ]


def fp8_mlp(h, up, down):
    """Fp8Mlp of a norm h. In a training its two copies are made from the stream, which takes as many bytes."""
    return tg.Fp8Mlp.apply(h, up, down, SCALES, *tg.quantize_both(h.detach(), SCALES.x))


class Watch:
    """Stands in for ops.mlp and ops.project_heads, computes the same and,
    in chosen steps of the timed loop, what their FP8 scales would meet."""

    def __init__(self, steps):
        self.steps = steps
        self.step = None
        self.live = False
        self.calls = 0
        self.projections = 0
        self.rows = {}

    def note(self, layer, name, values, scale, dtype):
        self.rows[self.step, name, layer] = spread(values, scale, dtype), scale * torch.finfo(dtype).max

    def wrap(self, mlp, in_fp8):
        def watched(inputs, up, down):
            h = inputs.h
            if in_fp8 and torch.is_grad_enabled():
                out = fp8_mlp(h, up, down)
            else:
                out = mlp(inputs, up, down)
            layer = self.calls
            self.calls = self.calls + 1
            if self.live and self.step in self.steps and torch.is_grad_enabled() and layer < self.layers:
                h = h.detach()
                up = up.detach()
                down = down.detach()
                pre = h @ up.T
                for name, values, scale in (
                    ("h", h, SCALES.x),
                    ("up", up, SCALES.weight),
                    ("down", down, SCALES.weight),
                    ("hidden", pre.relu().square(), SCALES.hidden),
                ):
                    self.note(layer, name, values, scale, E4M3)

                def backward(grad):
                    self.note(layer, "g", grad, SCALES.grad, E5M2)
                    self.note(layer, "dpre", (grad @ down.T) * 2 * pre.relu(), SCALES.grad, E5M2)
                out.register_hook(backward)
            return out
        return watched

    def wrap_projection(self, project_heads, in_fp8):
        """In chosen steps the reference instead: its projection has a gradient that can be looked at."""
        def watched(inputs, weight, *rest, heads, key_offset):
            h = inputs.h
            layer = self.projections
            self.projections = self.projections + 1
            if not (self.live and self.step in self.steps and torch.is_grad_enabled() and layer < self.attentions):
                if in_fp8 and torch.is_grad_enabled():
                    copies = tg.quantize_both(h.detach(), SCALES.x)
                    return tg.ProjectHeads.apply(h, weight, *rest, heads, key_offset, SCALES, *copies)
                return project_heads(inputs, weight, *rest, heads=heads, key_offset=key_offset)

            def backward(grad):
                keys = 2 * rest[3].size(1) * heads  # rest[3] holds the cosines
                for name, part in zip("qkv", grad.tensor_split((keys, 2 * keys), 1)):
                    self.note(layer, f"d{name}", part, SCALES.grad, E5M2)
            self.note(layer, "qkv", weight, SCALES.weight, E4M3)
            qkv = F.linear(h, weight)
            qkv.register_hook(backward)
            return *tg.split_heads_reference(qkv, *rest, heads, key_offset), rest[0]
        return watched

    def train(self, arguments):
        """The trainer's own main with this in the place of its MLP; nothing else of it changes."""
        select_ops = tg.select_ops
        timed_loop = tg.timed_loop
        training_step = tg.Trainer.training_step

        def watched_ops(*args, **options):
            ops = select_ops(*args, **options)
            projection = self.wrap_projection(ops.project_heads, ops.attention_fp8)
            # Regions believe that nothing is FP8: so they write h, to look at.
            return replace(
                ops,
                mlp=self.wrap(ops.mlp, ops.mlp_fp8),
                project_heads=projection,
                attention_fp8=False,
                mlp_fp8=False,
            )

        def watched_loop(trainer, *rest):
            self.live = True
            self.layers = sum(layer.mlp for layer in trainer.preset.model.layers)
            self.attentions = sum(layer.attention for layer in trainer.preset.model.layers)
            return timed_loop(trainer, *rest)

        def watched_step(trainer, step, *rest):
            self.step = step
            self.calls = 0
            self.projections = 0
            return training_step(trainer, step, *rest)

        tg.select_ops = watched_ops
        tg.timed_loop = watched_loop
        tg.Trainer.training_step = watched_step
        return tg.main(arguments)

    def report(self):
        print(f"\nlayers count the MLPs, or the projections, from 0; scales {SCALES._asdict()}")
        print("lost: norm of what became 0 / norm of all\n")
        print(
            "| step | tensor | layer | rms | 99.9 % | amax | limit / amax | saturated | flushed to 0 | lost |\n"
            + "|---" * 10
            + "|"
        )
        for (step, name, layer), ((rms, percentile, amax, saturated, flushed, lost), limit) in sorted(
            self.rows.items()
        ):
            room = limit / amax if amax else float("inf")
            cells = [step, name, layer, f"{rms:.1e}", f"{percentile:.1e}", f"{amax:.2e}", f"{room:.3g}"]
            cells += [f"{share:.1e}" for share in (saturated, flushed, lost)]
            print("| " + " | ".join(map(str, cells)) + " |")
        print(
            "\n| tensor | largest amax (step, layer) | least limit / amax "
            "| most saturated | most lost (step, layer) |\n"
            + "|---" * 5
            + "|"
        )
        for name in dict.fromkeys(name for _, name, _ in self.rows):
            rows = {(step, layer): row for (step, other, layer), row in self.rows.items() if other == name}
            top, gone = (max(rows, key=lambda key: rows[key][0][column]) for column in (2, 5))
            amax = rows[top][0][2]
            limit = rows[top][1]
            saturated = max(row[0][3] for row in rows.values())
            room = limit / max(amax, 1e-45)
            lost = rows[gone][0][5]
            print(f"| {name} | {amax:.2e} {top} | {room:.3g} | {saturated:.1e} | {lost:.1e} {gone} |")


def print_tables(columns, paths):
    print(f"\n{timing.machine()}, triton {tg.triton.__version__}, D = {D}, H = {H}; ms (rate, share of the ceiling)\n")
    print("| piece |" + "".join(f" {T} |" for T in columns) + "\n|---|" + "---|" * len(columns))
    for piece in dict.fromkeys(piece for table in columns.values() for piece in table):
        cells = []
        for ms, works in (table[piece] for table in columns.values()):
            peaks = {"GB/s": 4270, "TFLOP/s": 790 if piece.startswith("(bf16)") else 1500}
            rates = (
                f"{work / ms * 1e3:.0f} {unit}, {100 * work / ms * 1e3 / peaks[unit]:.0f} %"
                for unit, work in works.items()
            )
            cells.append(f"{ms:.4f} ({'; '.join(rates)})")
        print(f"| {piece} | " + " | ".join(cells) + " |")
    print(
        f"\n| tokens | path | forward ms | forward + backward ms | {LAYERS} layers, {STEP_TOKENS} tokens "
        "| host ms | GB | out | dh | dup | ddown |\n"
        + "|---" * 11
        + "|"
    )
    for T, rows in paths.items():
        for path, (forward, whole, host, peak, errors) in rows.items():
            step = whole * LAYERS * STEP_TOKENS / T
            cells = [T, path, f"{forward:.3f}", f"{whole:.3f}", f"{step:.1f}", f"{host:.2f}", f"{peak:.2f}"]
            cells += [f"{error:.4f}" for error in errors]
            print("| " + " | ".join(map(str, cells)) + " |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=timing.token_count,
        nargs="+",
        default=[32, 64] if DRY else [16_384, 32_768, 49_152, STEP_TOKENS],
    )
    parser.add_argument("--diagnose", metavar="STEPS", type=lambda text: [int(step) for step in text.split(",")])
    parser.add_argument("--sweep", action="store_true", help="time variants of mlp_kernel instead")
    timing.add_options(parser)
    options, training = parser.parse_known_args()
    timing.require_gpu()
    if options.diagnose or DRY and not options.sweep:
        watch = Watch(options.diagnose or [0, 1])
        with tempfile.TemporaryDirectory() as folder:
            code = watch.train(
                [
                    *(training or ["--preset", "smoke", "--stop-after", "2", "--log-dir", folder]),
                    "--no-graphs",
                ]
            )  # a replay calls no hook
        watch.report()
        if code or not DRY:
            sys.exit(code)
    elif training:
        parser.error(f"unknown: {' '.join(training)}")
    if options.sweep:
        sweep(options.tokens)
        return

    compiled = (lambda function: function) if DRY else tg.compile_dynamic
    applies = {"bf16, compiled": compiled(tg.relu_squared_mlp), "**fp8**": fp8_mlp}
    columns, paths = {}, {}
    for T in options.tokens:
        operands, grad = make_operands(T)
        paths[T] = time_paths(applies, operands, grad)
        with torch.no_grad():
            columns[T] = time_pieces(T, operands, grad)
        del operands, grad
        print(f"{T} tokens done after {timing.seconds():.0f} s", file=sys.stderr)
    print_tables(columns, paths)
    print(f"\n{timing.seconds():.0f} s in all")


if __name__ == "__main__":
    main()
