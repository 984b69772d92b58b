"""Times of a step on one rank of several, on one GPU: what does not shrink with the number of ranks; not a test.

    python benchmarks/bench_ranks.py 8 --preset sprint --data FOLDER --stop-after 50   the steps of rank 0 of eight
    python benchmarks/bench_ranks.py 8 --preset smoke --stop-after 4                   on a CPU: it runs through

Takes the options of train_gpt.py. Collectives are left out, so times are those of a rank that never waits, and the
losses mean nothing: of each step this rank sees its own batch chunks alone. For the update of sparse tables the other
ranks' gradients are copies of its own, and their ids its own, moved along the table, so that about as many different
rows are updated as in truth.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg


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


def fill(table, full, wait):
    """What a SparseTable would have gathered."""
    own, *others = full.view(table.ranks.world, -1)
    for rank, other in enumerate(others, 1):
        torch.add(own, 0 if full.is_floating_point() else 7919 * rank, out=other)
    if not full.is_floating_point():
        full.remainder_(len(table.weights) * table.ranks.row_parts)
    return full, wait


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int, choices=(1, 2, 4, 8), help="how many ranks there would be")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    options = parser.parse_args()
    if tg.parse_arguments(options.training).stop_after is None:
        fix = "shorten the run, so that its log does not look like a record's"
        parser.error(f"expected --stop-after N, found none; fix: {fix}")
    world = options.world
    start = tg.Ranks.start
    gather = tg.SparseTable.all_gather

    def start_alone(*arguments):
        alone = start(*arguments)
        ranks = LoneRank(0, world, alone.device)
        ranks.processes = alone.processes * world
        return ranks

    tg.Ranks.start = staticmethod(start_alone)
    tg.SparseTable.all_gather = lambda table, parts: fill(table, *gather(table, parts))
    sys.exit(tg.main(options.training))


if __name__ == "__main__":
    main()
