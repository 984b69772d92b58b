"""Where the time from the start of the process to the first timed step goes; not a test.

    python benchmarks/bench_startup.py --preset sprint --data FOLDER    on a GPU; with empty caches a cold start
    python benchmarks/bench_startup.py --preset smoke                   on a CPU: proves that it runs through

Takes the options of train_gpt.py and ends after two steps. It prints when each milestone was reached, what
torch.compile and Triton did meanwhile (seconds add up over nested parts and over threads), and the functions that the
main thread spent most time in, by themselves. For a cold start name new folders in TORCHINDUCTOR_CACHE_DIR and
TRITON_CACHE_DIR.
"""

import time

STARTED = time.perf_counter()

import collections
import cProfile
import pstats
import sys
from pathlib import Path

import torch

TORCH_IMPORTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg

MILESTONES = [("import torch", TORCH_IMPORTED), ("import train_gpt", time.perf_counter())]
KERNELS = collections.Counter()  # seconds of Triton's compiler, by kernel
# of Trainer
METHODS = "_open_data", "_build_model", "_prepare_schedule", "initialise", "training_step", "capture", "evaluate"
SHOWN = 25


def note_calls(name: str) -> None:
    """Make a method of the trainer a milestone each time it returns, once the device is done."""
    own = getattr(tg.Trainer, name)

    def timed(self, *arguments, **options):
        result = own(self, *arguments, **options)
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        label = f"{name} {arguments[0]}" if name in ("training_step", "capture") else name
        MILESTONES.append((label, time.perf_counter()))
        return result

    setattr(tg.Trainer, name, timed)


def note_kernels() -> None:
    """Add up what Triton compiles in this process: its own kernels, as Inductor's are compiled by other processes."""
    def listener(*, src, metadata, metadata_group, times, cache_hit):
        if not cache_hit:
            KERNELS[metadata.get("name", "?") if isinstance(metadata, dict) else "?"] += times.total / 1e6

    tg.triton.knobs.compilation.listener = listener


def report(profile: cProfile.Profile) -> None:
    print("\nmilestone                       at s    took s")
    before = STARTED
    for label, moment in MILESTONES:
        print(f"{label:28} {moment - STARTED:7.2f}   {moment - before:7.2f}")
        before = moment

    print(f"\nTriton's compiler in this process: {sum(KERNELS.values()):.1f} s, {len(KERNELS)} kernels")
    for name, seconds in KERNELS.most_common(SHOWN):
        print(f"    {seconds:6.2f}  {name}")

    from torch._dynamo.utils import compilation_time_metrics
    print("\ntorch.compile (times of a part include those of its parts)")
    totals = {name: (sum(times), len(times)) for name, times in compilation_time_metrics.items()}
    for name, (seconds, calls) in sorted(totals.items(), key=lambda item: -item[1][0])[:SHOWN]:
        print(f"    {seconds:7.2f}  {calls:5d}  {name}")

    print()
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


if __name__ == "__main__":
    tg.parse_arguments(sys.argv[1:])  # help and mistakes end here
    for method in METHODS:
        note_calls(method)
    if tg.triton is not None:
        note_kernels()
    profile = cProfile.Profile()
    sys.argv += ["--stop-after", "2"]
    code = None
    try:
        code = profile.runcall(tg.main)
    finally:
        if code != tg.EXIT_USAGE:
            report(profile)
    sys.exit(code)
