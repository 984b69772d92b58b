"""How the scripts bench_*.py time, and on what: one way, so that their figures can be compared.

Import this before train_gpt: with --cpu-dry-run on the command line it turns Triton's interpreter on,
which is chosen when a kernel is defined. It also puts the repository's root on the path, where train_gpt.py is.

A device time is the median over replays of a CUDA graph that holds a few calls. So no launch by the host is in it, the
operator is known to be capturable, and operands larger than the L2 cache do not warm it for the next call. In a dry run
all functions time a call on the CPU, in the interpreter, which says nothing about a GPU.

Such short times are those of a cool GPU at its highest clock. In a training it is at its limit of power, where what
counts is a kernel's energy: two tiles of mlp_kernel that differ by 6 to 9 % on a cool H200 took the same time there
within 2 %, at 1660 and 1410 MHz. With --hot each call is timed so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

DRY = "--cpu-dry-run" in sys.argv
HOT = "--hot" in sys.argv
DEVICE = "cpu" if DRY else "cuda"
STARTED = time.perf_counter()

if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes. Both are looked for above, as whole words, before the command line is read."""
    parser.allow_abbrev = False
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny sizes in Triton's interpreter")
    parser.add_argument("--hot", action="store_true", help="time at the limit of power: a second and a half each")


def require_gpu() -> None:
    """Ends a benchmark that has no GPU to run on, unless it is a dry run."""
    if not DRY and not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: needs a CUDA GPU, found none; --cpu-dry-run proves that it runs through")


def begin(description: str) -> None:
    """The start of a benchmark without options of its own: reads the command line and prints a headline."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.parse_args()
    require_gpu()
    print(f"{machine()}\n")


def token_count(text: str) -> int:
    """A reader of --tokens: FP8 products take multiples of 16."""
    value = int(text)
    if value < 16 or value % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16, at least 16, found {text}")
    return value


def machine() -> str:
    """What the figures are of, for a headline."""
    device = "CPU, interpreted" if DRY else torch.cuda.get_device_name()
    return f"{device}, torch {torch.__version__}{', hot' if HOT else ''}"


def seconds() -> float:
    """Since the benchmark began."""
    return time.perf_counter() - STARTED


def host_milliseconds(run: Callable, repeats: int = 5) -> float:
    """What it takes the host to enqueue one call,
    the device idle before each so that its queue never fills: a median."""
    times = []
    for _ in range(1 if DRY else repeats):
        if not DRY:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def graphed(run: Callable, calls: int) -> Callable:
    """The replay of a CUDA graph of so many calls, after two on a side stream,
    as capture demands; the first compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def median_milliseconds(run: Callable, repeats: int) -> float:
    """Median time between the ends of successive calls on the device, after one call that does not count."""
    run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairwise(events))


def hot_milliseconds(run: Callable, short_ms: float) -> float:
    """Mean time of a call over half a second, after a second in which the clock settles at the limit of power.

    `short_ms` is about what a call takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = max(1, round(500 / short_ms))
    for _ in range(2 * repeats):
        run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def milliseconds(run: Callable, calls: int = 3, replays: int = 10) -> float:
    """Device time of one call: the median over replays of a CUDA graph of `calls` of them; with --hot a mean."""
    if DRY:
        return host_milliseconds(run)
    replay = graphed(run, calls)
    short_ms = median_milliseconds(replay, replays)
    return (hot_milliseconds(replay, short_ms) if HOT else short_ms) / calls


def eager_milliseconds(run: Callable, repeats: int = 20) -> float:
    """Device time of one call with its launches, which no graph hides."""
    if DRY:
        return host_milliseconds(run)
    for _ in range(5):
        run()
    return median_milliseconds(run, repeats)
