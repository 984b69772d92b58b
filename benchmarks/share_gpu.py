"""Several ranks of train_gpt.py on one GPU: whether they run and agree, where there are not as many GPUs; not a test.

    python benchmarks/share_gpu.py 8 --preset speedrun-webmix --data FOLDER --length 0.02 --stop-after 30
    python benchmarks/share_gpu.py 2 --preset smoke --stop-after 4          on a CPU: it runs through

Takes the options of train_gpt.py. What ranks of a node do with each other happens: memory that they share, barriers in
CUDA graphs, NCCL. The GPU runs their kernels in turns, so times mean nothing, and a fault stays hidden that needs
kernels of two ranks at the same moment. Memory is shared too: `--micro-batch-tokens N` takes less.
"""

import argparse
import os
import sys

from torch.distributed import run

from shortened import shortened_steps, tg


def share_gpu(rank: int):
    """Have this rank use the first GPU, as the others do. To be called before NCCL or the GPU is used.

    NCCL refuses two ranks of a host that use the same GPU, so each poses as another host, and they talk through the
    loopback device. For symmetric memory torch has a switch.
    """
    os.environ |= {
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"host-of-rank-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int, choices=(1, 2, 4, 8), help="how many ranks")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    options = parser.parse_args()
    shortened_steps(parser, options.training)
    if tg.under_torchrun():
        share_gpu(tg.torchrun_number("RANK"))
        sys.exit(tg.main(options.training))
    run.main(["--standalone", f"--nproc_per_node={options.world}", *sys.argv])


if __name__ == "__main__":
    main()
