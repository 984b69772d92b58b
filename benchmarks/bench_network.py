"""How long exchanges between nodes take, and which rank or link is far slower than the rest; not a test.

    torchrun --nnodes=2 --nproc_per_node=4 --node_rank=N --master_addr=FIRST --master_port=29500 \\
        benchmarks/bench_network.py
    torchrun --standalone --nproc_per_node=2 benchmarks/bench_network.py     ranks of one node; CPU processes too

Every rank exchanges 4 MB both ways with every rank of the other nodes, four times, and the best time counts. At every
step of a training all wait for the slowest: the ranks of one node that are slow mean its card, cable or driver, two
slow ranks of different nodes the link between them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg

FLOATS = 1_000_000  # 4 MB
TRIES = 4


def exchange_ms(ranks: tg.Ranks, clock: tg.Clock, peer: int) -> float:
    """Milliseconds of one exchange with a rank, which must call this at the same time."""
    sent, received = torch.zeros(2, FLOATS, device=ranks.device)
    received[0].item()  # waits for the device
    started = clock.since_start()
    both_ways = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both_ways):
        work.wait()
    received[0].item()
    return 1e3 * (clock.since_start() - started)


def report(ranks: tg.Ranks) -> str:
    """A line on how long exchanges take, and a warning that names who is far slower than the rest.

    The number of ranks is a power of two. So in each round every rank has one peer: its own number xor the round's."""
    nodes = len(set(ranks.nodes))
    clock = tg.Clock(ranks.device)
    own_node = ranks.world // nodes if nodes > 1 else 1  # smaller rounds would pair ranks of one of several nodes
    rounds = range(own_node, ranks.world)
    best_ms = [min(exchange_ms(ranks, clock, ranks.rank ^ number) for _ in range(TRIES)) for number in rounds]
    table = np.array(ranks.gather_objects(best_ms))  # of each rank and round
    text = f"{nodes} nodes: 4 MB both ways in {table.min():.2f} to {table.max():.2f} ms"

    slow_links = (table > 5 * table.min() + 1).sum(1)  # of each rank: one that is slow itself has more than its peers
    if slow_links.any():
        names = ", ".join(map(ranks.name, np.flatnonzero(slow_links == slow_links.max())))
        text += f"\nWARNING: network far slower at {names}; fix: see its cards and cables, and NCCL_DEBUG=INFO"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    ranks = tg.Ranks.start()
    if ranks.world == 1:
        sys.exit("bench_network: expected several ranks, found one; fix: start it with torchrun, see its docstring")
    text = report(ranks)
    if ranks.rank == 0:
        print(text)
    ranks.finish(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
