"""Train on a large GPU as a smaller or older one would: whether a preset fits, with which loss; not a test.

    python benchmarks/bench_memory.py 11 8.6 --preset sprint-small --data FOLDER      11 GiB, operators of an RTX 3060
    python benchmarks/bench_memory.py 15 8.9 --preset sprint-small --data FOLDER      15 GiB, those of an RTX 4080
    python benchmarks/bench_memory.py 70 9.0 --preset speedrun-webmix --data FOLDER   what an H100 has free
    python benchmarks/bench_memory.py 1 8.6 --preset smoke --stop-after 2             on a CPU: it runs through

Takes the GiB that are free, a compute capability, and the options of train_gpt.py. The allocator refuses what lies
beyond the limit, as a full card does, and micro-batches are chosen by it. The kernels are those that train_gpt.py
chooses for that capability, compiled for the GPU that is there: so the time says how they compare on this GPU, and not
how long the other one takes. The last line has the largest memory in use, the largest that the allocator held, and how
often it had to give some back before it could go on.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg


def hold_to(limit_bytes: int) -> None:
    """From now on torch sees and gives no more GPU memory than this."""
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    of_all = torch.cuda.mem_get_info

    def mem_get_info(device=None):
        free, total = of_all(device)
        return min(free, limit_bytes - torch.cuda.memory_reserved(device)), min(total, limit_bytes)

    torch.cuda.mem_get_info = mem_get_info


def capability(text: str) -> tuple[int, int]:
    major, minor = map(int, text.split("."))
    return major, minor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gib", type=tg.within(float, 0.01), help="of memory that are free")
    parser.add_argument("capability", type=capability, help="such as 8.6")
    parser.add_argument("training", nargs=argparse.REMAINDER, help="options of train_gpt.py")
    options = parser.parse_args()
    if torch.cuda.is_available():
        hold_to(int(options.gib * 2**30))
        tg.capability = lambda device: options.capability
    code = tg.main(options.training)
    if torch.cuda.is_available():
        held = torch.cuda.memory_stats()
        used, reserved = (held[f"{kind}_bytes.all.peak"] / 2**30 for kind in ("allocated", "reserved"))
        retries = held["num_alloc_retries"]
        print(f"in use {used:.2f} GiB, held {reserved:.2f} of {options.gib:g} GiB, given back {retries} times")
    return code


if __name__ == "__main__":
    sys.exit(main())
