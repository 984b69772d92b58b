"""Times of a step on one rank of several, on one or two GPUs: what does not shrink with more ranks; not a test.

    python benchmarks/bench_ranks.py 8 --preset sprint --data FOLDER --stop-after 50   the steps of rank 0 of eight
    python benchmarks/bench_ranks.py 8 --preset smoke --stop-after 4                   on a CPU: it runs through
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_ranks.py 8 ...           ranks 0 and 1, on two GPUs

Takes the options of train_gpt.py. The losses mean nothing: of each step a rank sees its own batch chunks alone.

On one GPU collectives are left out, so times are those of a rank that never waits. For the update of sparse tables the
other ranks' gradients are copies of its own, and their ids its own, moved along the table, so that about as many
different rows are updated as in truth.

On two GPUs that share memory each rank takes the other GPU for the home of all others. So a rank fetches as many bytes
through NVLink as one of eight does, in as many copies, and waits for them; barriers and all-reduces are those of two.
Weights that none of the two owns stay as they were. Once the others' ids have come they are replaced as on one GPU.
"""

import argparse
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from shortened import shortened_steps, tg


class LoneRank(tg.Ranks):
    """Rank 0 of `world`, without the others. Rows of sparse tables are dealt out, as on GPUs that share memory; those
    of the other ranks are read here too, without NVLink."""
    deals_rows = True

    def shared(self, tensor, parts=1):
        return tensor.contiguous()

    def versions(self, tensor):
        return [tensor] * self.world

    def meet(self, tensor):
        return lambda: None

    def all_gather(self, full, barrier=True):
        return lambda: None

    all_reduce_mean = all_gather

    def reduce_scatter(self, full, received):
        return lambda: None

    def sum(self, tensor):
        return tensor

    def gather_objects(self, value):
        return [value] * self.world

    def finish(self, code):
        pass


def fill(table, full):
    """What a SparseTable would have gathered."""
    ranks = table.ranks
    parts = full.view(ranks.world, -1)
    for distance in range(1, ranks.world):
        other = parts[(ranks.rank + distance) % ranks.world]
        torch.add(parts[ranks.rank], 0 if full.is_floating_point() else 7919 * distance, out=other)
    if not full.is_floating_point():
        full.remainder_(len(table.weights) * ranks.row_parts)


class OneOfTwo(tg.Ranks):
    """Rank 0 or 1 of `world`; what the others have is the other one's."""

    def gather_objects(self, value):
        found = [None, None]
        dist.all_gather_object(found, value)
        return [found[self.rank if rank == self.rank else 1 - self.rank] for rank in range(self.world)]


class PairMemory:
    """A handle of shared memory, in which every other rank's is that of the other GPU."""

    def __init__(self, handle):
        self.handle = handle
        self.barrier = handle.barrier

    def get_buffer(self, rank, *place):
        own = dist.get_rank()
        return self.handle.get_buffer(own if rank == own else 1 - own, *place)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int, choices=(1, 2, 4, 8), help="how many ranks there would be")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    options = parser.parse_args()
    shortened_steps(parser, options.training)
    world = options.world
    start = tg.Ranks.start
    gather = tg.SparseTable.all_gather
    memory = tg.symmetric_memory

    def start_some(*arguments):
        ranks = start(*arguments)
        processes = ranks.processes
        if ranks.world == 1:
            ranks = LoneRank(0, world, ranks.device)
        elif ranks.world == 2 < world and ranks.copy_stream:
            ranks.__class__ = OneOfTwo
            ranks.world = world
        else:
            tg.fail("processes", "one, or for more than two ranks two on GPUs that share memory", ranks.world,
                    "leave torchrun out", silent=ranks.rank > 0)
        ranks.processes = [*processes, *processes[:1] * world][:world]
        ranks.nodes = [""] * world
        return ranks

    zeroed = set()

    def gather_for(table, parts):
        if isinstance(table.ranks, OneOfTwo):
            full = table.buffer(world * sum(map(len, parts)), parts[0].size(1), parts[0].dtype)
            if full.data_ptr() not in zeroed:  # nobody writes the other ranks' parts, which may hold anything
                full.zero_()
                zeroed.add(full.data_ptr())
        full, wait = gather(table, parts)
        if isinstance(table.ranks, LoneRank):
            fill(table, full)
        elif not full.is_floating_point():
            return full, lambda: (wait(), fill(table, full))
        return full, wait

    tg.Ranks.start = staticmethod(start_some)
    tg.SparseTable.all_gather = gather_for
    tg.symmetric_memory = SimpleNamespace(
        empty=memory.empty, rendezvous=lambda *arguments: PairMemory(memory.rendezvous(*arguments)))
    sys.exit(tg.main(options.training))


if __name__ == "__main__":
    main()
