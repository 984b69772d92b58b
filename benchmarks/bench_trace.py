"""Train a few steps and write a Chrome trace of some, one file a rank,
with the largest kernels on standard output; not a test.

    python benchmarks/bench_trace.py 20:24 --preset sprint --data FOLDER --stop-after 30   steps 20 to 24
    torchrun --standalone --nproc_per_node=8 benchmarks/bench_trace.py 20:24 --preset sprint --stop-after 30
    python benchmarks/bench_trace.py 1:2 --preset smoke --stop-after 4         on a CPU: proves that it runs through

Takes the first and last step, then the options of train_gpt.py. The traces are trace-rank0.trace.json and so on in the
current folder, for https://ui.perfetto.dev. Replayed CUDA graphs show kernels and collectives; with --no-graphs the
operators that launched them are there as well.
"""

import argparse
import sys
from pathlib import Path

import torch

from shortened import shortened_steps, tg


def finish(profiler: torch.profiler.profile, rank: int) -> None:
    """Write the trace, and print the ten largest kernels."""
    profiler.stop()  # waits for the device
    path = Path(f"trace-rank{rank}.trace.json")
    profiler.export_chrome_trace(str(path))
    print(
        f"trace in {path}"
        if path.exists()
        else f"trace: expected to write {path}, found no room there; fix: free or permit that folder"
    )
    Path(f"{path}.tmp").unlink(missing_ok=True)  # torch leaves it where there is no room, and says nothing
    if rank == 0:
        sort_by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=sort_by, row_limit=10))


def span(text: str) -> tuple[int, int]:
    first, last = map(int, text.split(":"))
    return first, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("span", metavar="A:B", type=span, help="first and last step of the trace, from 0")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    own = parser.parse_args()
    first, last = own.span
    steps = shortened_steps(parser, own.training)
    if not 0 <= first <= last < steps:
        parser.error(f"expected 0 <= A <= B <= {steps - 1}, found {first}:{last}; fix: name steps that the run has")

    timed_loop = tg.timed_loop
    training_step = tg.Trainer.training_step
    profiler = torch.profiler.profile()

    def named(reduce_):
        """A hook reduces a table in the midst of the backward pass: its own event shows when."""
        def named_reduce(table):
            with torch.profiler.record_function(f"reduce {table.role}"):
                reduce_(table)
        return named_reduce

    def traced_loop(trainer, *rest):
        """Only the steps of the timed loop count: the warm-up makes some too."""
        def traced_step(step, batches):
            if step == first:
                # All ranks start together. Otherwise the trace's first collective would show which of them was late.
                trainer.ranks.gather_objects(None)
                profiler.start()
            loss = training_step(trainer, step, batches)
            if step == last:
                trainer.ranks.heartbeat("the trace", 10)
                finish(profiler, trainer.ranks.rank)
            return loss

        trainer.training_step = traced_step
        return timed_loop(trainer, *rest)

    tg.timed_loop = traced_loop
    for kind in (tg.LookupTable, tg.AdamTable):
        kind.reduce_ = named(kind.reduce_)
    return tg.main(own.training)


if __name__ == "__main__":
    sys.exit(main())
