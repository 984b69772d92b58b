"""Compile a training step ahead of the trainer: its kernels into Triton's cache, its regions into torch's; not a test.

    python benchmarks/compile_ahead.py --preset sprint                     kernels, for an H100 or H200; needs no GPU
    python benchmarks/compile_ahead.py --preset sprint --capability 10.0   kernels, for another GPU
    python benchmarks/compile_ahead.py --preset sprint --regions           regions, too, for this machine's GPU

Regions are for a trainer on one GPU. They need 14 CPU cores, and half a GiB of the GPU for each of seven processes,
because torch opens a context there even for tensors without memory. They wait for the trainer, which plans its
micro-batches by the memory that is free, but not longer than a minute.

`run.sh` starts it beside the trainer. While that one imports and builds the model, this compiles on all cores what the
trainer would compile one after another, so that it finds most of it in the caches. What other options need besides, the
trainer compiles as always.

The step runs on tensors without memory. For kernels they are torch's meta tensors, for regions fake tensors of the GPU:
Inductor takes a region's code from its cache only if it was compiled for tensors that look the same.
"""

import argparse
import copy
import ctypes
import getpass
import hashlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

# The regions that each process compiles, by the names of their functions. The sum of n-gram rows is not among them,
# which the trainer needs first and compiles meanwhile, nor is norm, which only the validation needs.
REGIONS = [
    {"attention_in"}, {"mlp_in", "attention_source"}, {"attention_out"}, {"entrance", "injections", "final_states"},
    {"pointer_in", "relu_squared_mlp", "attention_in_from"}, {"normuon_update"}, {"nesterov_momentum"}]
TRAINER = Path(__file__).parent.parent / "train_gpt.py"


def inductor_cache() -> Path:
    """The folder of Inductor's cache, found without torch."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{user}"))


def find_mark() -> Path:
    """The file that says, once it is there, that the caches hold all that is compiled with these arguments."""
    facts = [importlib.metadata.version("torch"), os.environ.get("TRITON_CACHE_DIR"), sys.argv[1:],
             TRAINER.read_text(), Path(__file__).read_text()]
    return inductor_cache() / f"ahead_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


# To import torch takes seconds, in which the trainer imports it, too. What need not wait for it comes before.
PROCESSES = []
if __name__ == "__main__":
    MARK = find_mark()
    if MARK.exists():
        sys.exit()
    # End with the parent, which is the trainer, for run.sh becomes it. The next one needs the GPU's memory.
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if "--regions" in sys.argv and len(os.sched_getaffinity(0)) >= 2 * len(REGIONS):
        # Not by multiprocessing: a fork could not use the GPU's driver. And torch names a constant in the keys of its
        # cache after the first module that knows torch, which must be the same one as in the trainer.
        command = [sys.executable] + [argument for argument in sys.argv if argument != "--regions"]
        PROCESSES = [subprocess.Popen([*command, "--only", *sorted(names)]) for names in REGIONS]

import torch
import torch._inductor.config
import triton
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(TRAINER.parent))
import train_gpt as tg

META = torch.device("meta")
MODEL_MIB = 2048  # of a GPU: more than the driver takes for a process, less than a model with its optimizer
VALIDATION = -1  # beside the indices of stages: its window is seen with the last stage's geometry


def pretend(capability: tuple[int, int]) -> None:
    """From now on tensors without memory pass for a GPU's."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: META))

    def scaled_mm(left, right, *, out_dtype, out=None, **_):
        return left.new_empty(left.size(0), right.size(1), dtype=out_dtype) if out is None else out

    torch._scaled_mm = scaled_mm
    Tensor.is_cuda = property(lambda tensor: True)
    Tensor.data_ptr = lambda tensor: tensor.storage_offset() * tensor.element_size()  # tells how a view is aligned
    tg.capability = lambda device: capability
    tg.multiprocessors = lambda device: 132


def compile_only(capability: tuple[int, int], found: Callable = lambda name, kernel: None) -> None:
    """From now on let launches compile and do nothing else, on tensors without memory.

    `found` is called with the name and the compiled kernel of each launch."""
    pretend(capability)
    launch = JITFunction.run

    def run(function, *arguments, grid, warmup, **options):
        kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
        found(function.__name__, kernel)
        return kernel

    JITFunction.run = run


def packed(preset: tg.Preset, stages: list[int]) -> dict[int, tg.HostBatch]:
    """A micro-batch of generated documents for each stage, as large as on one GPU, and a window of the validation.

    Inductor tunes a region for the size that it is compiled with, which is the first stage's. Kernels are the same for
    all sizes."""
    ranks = SimpleNamespace(world=1)
    batches = {}
    for index in stages:
        stage = preset.stages[index]
        chunks = {chunk: tg.generated_pieces(stage.chunk_tokens, stage.document_cap_tokens, seed=chunk)
                  for chunk in range(tg.micro_batch_chunks(stage, ranks, tg.USEFUL_MICRO_BATCH_TOKENS))}
        batches[index] = tg.pack(chunks, preset.model, False, stage.sampled_classes)
    window = tg.generated_pieces(preset.val_window_tokens, preset.val_window_tokens, seed=0)
    return batches | {VALIDATION: tg.pack({0: window}, preset.model, False)}


def train_and_validate(preset: tg.Preset, batches: dict[int, tg.HostBatch], device: torch.device = META) -> None:
    """A step of each stage, in two micro-batches, and a validation window, on tensors without memory."""
    def documents(batch):
        return batch.views(torch.empty(len(batch.data), dtype=batch.data.dtype, device=device))

    def empty(count):
        return torch.empty(count, device=device)

    fp8 = preset.fp8 if preset.model.dtype == "bfloat16" else ()
    ops = tg.select_ops(SimpleNamespace(type="cuda"), compile=device != META, fp8=fp8, graphs=False)
    ranks = tg.Ranks(0, 1, META)  # which opens no stream on the GPU
    ranks.device = device
    model = tg.GPT(preset.model, ops, device)
    most_tokens = max(stage.batch_tokens for stage in preset.stages)
    optimizer = tg.Optimizer(model, preset.optimizer, ranks, ops, most_tokens)
    rates = tg.step_rates(preset, 0)
    for index, batch in batches.items():
        stage = preset.stages[index]
        geometry = tg.rotary_geometry(preset, index, stage.document_cap_tokens, device)
        if index != VALIDATION:
            micro_batches = [documents(batch), documents(batch)]
            optimizer.start_step([micro_batch.ngrams for micro_batch in micro_batches])
            for micro_batch in micro_batches:
                model(micro_batch, geometry, empty(len(stage.targets[0]))).backward()
            optimizer.step(dict(zip(rates, empty(len(rates)).unbind())))
        else:
            with torch.no_grad():
                model.evaluate(documents(batch), geometry)


# ---- regions ---------------------------------------------------------------------------------------------------------
def await_trainer(seconds: float = 60) -> None:
    """Wait until a trainer has planned and holds a model in the first GPU's memory, or until nobody seems to come."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + seconds
    while int(subprocess.check_output(command)) < MODEL_MIB and time.monotonic() < deadline:
        time.sleep(0.5)


def compile_regions(names: set[str], preset: tg.Preset, capability: tuple[int, int], device: torch.device) -> None:
    """Compile the regions whose functions have these names, and nothing else. For a process of its own."""
    torch._inductor.config.compile_threads = 1  # no pool of processes beside each of these; no part of the cache's keys
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compile_and_forget(graph, inputs):
        eager = copy.deepcopy(graph)  # compiling changes the graph, and what it makes needs tensors with memory
        for node in graph.graph.find_nodes(op="placeholder"):
            if node.type is fake_tensor.FakeTensor:  # as the trainer's tensors, for torch's cache tells them apart
                node.type = nn.Parameter if isinstance(node.meta["example_value"], nn.Parameter) else Tensor
        graph.recompile()
        compile_fx(graph, inputs)
        return eager.forward

    def compile_some(function, fullgraph):
        if function.__name__ not in names:
            return function
        return dynamo_compile(function, fullgraph=fullgraph, backend=compile_and_forget)

    dynamo_compile = torch.compile
    torch.compile = compile_some
    # Inductor would time on the GPU whether the gates' thin products gain by padding.
    # Beside the trainer that is chance, and what trainers find by themselves is nearly always that they do not.
    pad_mm.should_pad = lambda *arguments, **options: False
    # Inductor's kernels go into the caches, but not onto the GPU, where nothing runs.
    CachingAutotuner._make_launchers = CachingAutotuner._dynamic_scale_rblock = lambda kernel: None
    fake_tensor.init_gpu_context = lambda device: None
    pretend(capability)
    JITFunction.run = lambda *arguments, **options: None
    batches = packed(preset, [0])  # regions are the same in all stages
    if device.type == "cuda":
        await_trainer()
    with fake_tensor.FakeTensorMode():
        train_and_validate(preset, batches, device)


def capability_option(text: str) -> tuple[int, int]:
    """A reader of --capability."""
    if not re.fullmatch(r"[0-9]+\.[0-9]", text):
        raise argparse.ArgumentTypeError(f"expected two numbers as in 9.0, found {text}")
    major, minor = text.split(".")
    return int(major), int(minor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tg.PRESETS, default="sprint")
    parser.add_argument("--capability", type=capability_option, default="9.0")
    parser.add_argument("--regions", action="store_true")
    parser.add_argument("--only", nargs="+", help="these regions and no kernels, in this process")
    parser.add_argument("--device", default="cuda:0", help="of the regions; the tests take a CPU")
    options = parser.parse_args()
    preset = tg.PRESETS[options.preset]
    if options.only:
        compile_regions(set(options.only), preset, options.capability, torch.device(options.device))
        return

    started = time.perf_counter()
    compiled = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: cache_hit or compiled.append(1)
    compile_only(options.capability)
    with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads):
        train_and_validate(preset, packed(preset, list(range(len(preset.stages)))))
    print(f"{len(compiled)} kernels compiled in {time.perf_counter() - started:.1f} s")
    failed = [process.wait() for process in PROCESSES]
    if any(failed):
        sys.exit("regions: some were not compiled")
    if PROCESSES:
        print(f"regions compiled in {time.perf_counter() - started:.1f} s")
    MARK.parent.mkdir(parents=True, exist_ok=True)
    MARK.touch()


if __name__ == "__main__":
    main()
