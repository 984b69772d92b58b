"""Compile every kernel of a training step into Triton's cache, on all cores and without a GPU; not a test.

    python benchmarks/compile_kernels.py --preset sprint                     for an H100 or H200
    python benchmarks/compile_kernels.py --preset sprint --capability 10.0   for another GPU

`run.sh` starts it beside the trainer. While that one imports, builds the model and traces regions for Inductor, it
compiles kernels ahead of it, so that the trainer finds them in the cache where it would compile one after another.
A kernel that it does not foresee, for another number of GPUs or with other options, the trainer compiles as always.

The step runs on tensors without memory, so kernels are specialised as for pointers and sizes that are multiples of 16.
"""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parent.parent))
import train_gpt as tg


def compile_only(capability: tuple[int, int], found: Callable = lambda name, kernel: None) -> None:
    """From now on let launches compile and do nothing else, and tensors without memory pass for a GPU's.

    `found` is called with the name and the compiled kernel of each launch."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("meta")))
    launch = JITFunction.run

    def run(function, *arguments, grid, warmup, **options):
        kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
        found(function.__name__, kernel)
        return kernel

    def scaled_mm(left, right, *, out_dtype, out=None, **_):
        return left.new_empty(left.size(0), right.size(1), dtype=out_dtype) if out is None else out

    JITFunction.run = run
    torch._scaled_mm = scaled_mm
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_meta)
    tg.capability = lambda device: capability
    tg.multiprocessors = lambda device: 132


def documents(stage: tg.Stage, model: tg.ModelConfig) -> tg.Documents:
    def numbers(*shape):
        return torch.empty(*shape, dtype=torch.int32, device="meta")

    tokens, orders = stage.batch_tokens, len(tg.NGRAM_MULTIPLIERS) + model.longest_suffix_match
    sampled = (numbers(tg.CHUNKS, stage.sampled_classes), numbers(tg.CHUNKS)) if stage.sampled_classes else (None, None)
    return tg.Documents(
        numbers(tokens), numbers(tokens), numbers(model.padded_vocabulary + 1), numbers(tokens * model.ngram_pieces, orders),
        numbers(tokens), numbers(tokens), numbers(tokens), *sampled)


def train_and_validate(preset: tg.Preset, stages: list[int]) -> None:
    """A step of each stage and a validation window, on tensors without memory."""
    meta = torch.device("meta")
    ops = tg.select_ops(SimpleNamespace(type="cuda"), compile=False, graphs=False)
    model = tg.GPT(preset.model, ops, meta)
    optimizer = tg.Optimizer(model, preset.optimizer, tg.Ranks(0, 1, meta), ops)
    for index in stages:
        stage = preset.stages[index]
        batch = documents(stage, preset.model)
        geometry = tg.rotary_geometry(preset, index, stage.document_cap_tokens, meta)
        optimizer.start_step([batch.ngrams])
        model(batch, geometry, torch.empty(len(stage.targets[0]), device=meta)).backward()
        optimizer.step({name: torch.empty((), device=meta) for name in tg.step_rates(preset, 0)})
    with torch.no_grad():
        model.evaluate(replace(batch, classes=None, num_always=None), geometry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tg.PRESETS, default="sprint")
    parser.add_argument("--capability", default="9.0")
    options = parser.parse_args()
    preset = tg.PRESETS[options.preset]
    compiled = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: cache_hit or compiled.append(1)

    started = time.perf_counter()
    compile_only(tuple(map(int, options.capability.split("."))))
    with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
        train_and_validate(preset, list(range(len(preset.stages))))
    print(f"{len(compiled)} kernels compiled in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
