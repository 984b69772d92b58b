"""Repeat a step of a training, and say which tensors come out otherwise, to the bit; not a test.

    python benchmarks/repeats.py 2 --preset smoke-gpu --micro-batch-tokens 8192      step 2, on a GPU
    torchrun --standalone --nproc_per_node=2 benchmarks/repeats.py 2 --preset smoke-gpu
    python benchmarks/repeats.py --times 10 2 --preset smoke-gpu      ten times as often, for what is rare
    python benchmarks/repeats.py 2 --preset smoke                     on a CPU: proves that it runs through

Takes the number of the step, then the options of train_gpt.py, of which it sets --stop-after. Before each repetition
everything that training changes is set back to what it was. On a GPU the step then runs alone, beside copies and
products on streams of a low and a high priority, so that its kernels and their blocks come in other orders, and beside
another process, for which the GPU may leave them at any instruction. A line a repetition says what differs from the
first one, and by how many bytes. The exit code is 1 if anything does. Hashes of the state before and after the step
tell whether two runs of this script agree.

This finds kernels whose threads race: no interpreter shows these, and a comparison with a reference only by luck.
"""

import argparse
import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shortened import shortened_steps, tg

REPETITIONS = {"alone": 4, "copies": 6, "products": 6, "urgent copies": 4, "urgent products": 4, "process": 6}

OTHER_PROCESS = """
import torch
matrix = torch.randn(4096, 4096, device=torch.device("cuda", {index}), dtype=torch.bfloat16)
torch.cuda.synchronize()
print("at work", flush=True)
while True:
    for _ in range(100):
        matrix @ matrix
    torch.cuda.synchronize()
"""


def differing_bytes(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, int]:
    """How many bytes of each tensor differ, of those where some do."""
    counts = {}
    for name, tensor in found.items():
        pair = [x.contiguous().view(-1).view(torch.uint8) for x in (tensor, wanted[name])]
        count = int((pair[0] != pair[1]).sum())
        if count:
            counts[name] = count
    return counts


@contextlib.contextmanager
def load(kind: str, device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that queues some 50 ms of other work on a stream of its own; it does nothing beside a process."""
    if kind == "alone":
        yield lambda: None
        return
    if kind == "process":
        command = [sys.executable, "-c", OTHER_PROCESS.format(index=device.index)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            try:
                yield lambda: None
            finally:
                other.kill()
        return

    stream = torch.cuda.Stream(priority=-5 if "urgent" in kind else 0)
    gibibyte = torch.zeros(2**28, device=device)
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    work = functools.partial(gibibyte.add_, 1.0) if "copies" in kind else functools.partial(torch.mm, matrix, matrix)

    def queue():
        with torch.cuda.stream(stream):
            for _ in range(60):
                work()
    yield queue


def repeat(trainer: tg.Trainer, run: Callable[[], Tensor], times: int = 1) -> bool:
    """Run a step `times` REPETITIONS, print what differs, and set the state back. Whether all was the same."""
    ranks = trainer.ranks
    state = trainer.state()

    def meet():
        """Wait until no rank reads or writes any more: they may share memory."""
        if ranks.on_gpu:
            torch.cuda.synchronize()
        ranks.gather_objects(None)

    def copied_state():
        trainer.optimizer.gather()
        meet()
        return {name: tensor.clone() for name, tensor in state.items()}

    def tell(when, what):
        tg.show(f"rank {ranks.rank}, {when}: {what}\n", sys.stdout)

    before = copied_state()
    tell("before", tg.state_hash(before))

    def set_back():
        for name, tensor in state.items():
            tensor.copy_(before[name])
        trainer.model.zero_grad()
        meet()

    first = None
    same = True
    for kind, count in REPETITIONS.items():
        if kind != "alone" and not ranks.on_gpu:
            continue
        with load(kind, trainer.device) as queue:
            for _ in range(count * times):
                set_back()
                queue()
                after = {"loss": run().clone(), **copied_state()}
                if first is None:
                    first = after
                    tell("after", tg.state_hash(after))
                counts = differing_bytes(after, first)
                same = same and not counts
                tell(kind, ", ".join(f"{name} {count}" for name, count in counts.items()) or "the same")
    set_back()
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="how often to do all repetitions")
    parser.add_argument("step", type=int, help="the step to repeat, from 1")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    own = parser.parse_args()
    for name in ("step", "times"):
        if getattr(own, name) < 1:
            parser.error(f"{name}: expected at least 1, found {getattr(own, name)}")
    training = [*own.training, "--stop-after", str(own.step)]
    shortened_steps(parser, training)
    if tg.parse_arguments(training).check:
        parser.error("--check: trains nothing; fix: leave it out")
    training_step = tg.Trainer.training_step
    warm_up = tg.Trainer.warm_up
    results = []

    def repeated(trainer, step, batches):
        run = functools.partial(training_step, trainer, step, batches)
        if getattr(trainer, "warm", False) and step == own.step - 1:
            results.append(repeat(trainer, run, own.times))
        return run()

    def warmed_up(trainer):
        variants = warm_up(trainer)
        trainer.warm = True
        return variants

    tg.Trainer.training_step = repeated
    tg.Trainer.warm_up = warmed_up
    code = tg.main(training)
    if not results:
        print(f"step: expected one that the run reaches, found {own.step}; fix: a smaller one", file=sys.stderr)
        return code or tg.EXIT_USAGE
    return code or int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
