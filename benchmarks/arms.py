"""Train variants ("arms") of a preset one after another on each GPU, and print a line of results for each; not a test, and no records.

    python benchmarks/arms.py arms.json --preset sprint --data FOLDER --gpus 0,1 --out arms.jsonl
    python benchmarks/arms.py arms.json --preset smoke --gpus cpu                  # on a CPU: proves that it runs through

arms.json is a list of objects. All keys but the name are optional:

    {"name": "larger-table", "seed": 1, "length": 1.0, "fp8": ["attention", "head", "mlp"],
     "model": {"ngram_rows": 33554432}, "optimizer": {"muon_learning_rate": 0.016}, "stages": {"batch_tokens": [65536, 131072, 196608, 196608]},
     "rules": {"embedding": {"learning_rate_multiplier": 50}}, "averages": [[0.03, 0.65]]}

`averages` are further running averages, [rate, share]: the run is validated with each of them besides the preset's own and none, so they cost no
run. While one arm trains, the next on that GPU compiles and warms up, which disturbs the first seconds of the timing: of `ms`, the later stages
count. The file of arms is read again before each arm, so arms may be appended while it runs. `--seconds` ends the search in time.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent))
import train_gpt as tg


def arm_preset(arm: dict, name: str) -> tg.Preset:
    """The preset with what the arm changes in it."""
    preset = tg.scaled_preset(tg.PRESETS[name], arm.get("length", 1.0))
    rules = [(role, dataclasses.replace(rule, **arm.get("rules", {}).get(role, {}))) for role, rule in preset.optimizer.rules]
    stages = list(preset.stages)
    for field, values in arm.get("stages", {}).items():
        stages = [dataclasses.replace(stage, **{field: value}) for stage, value in zip(stages, values, strict=True)]
    return dataclasses.replace(
        preset, stages=tuple(stages), model=dataclasses.replace(preset.model, **arm.get("model", {})),
        optimizer=dataclasses.replace(preset.optimizer, rules=tuple(rules), **arm.get("optimizer", {})))


class Averages:
    """Running averages with several rates, of all that the preset's own one averages."""

    def __init__(self, optimizer: tg.Optimizer, rates: list[float]):
        self.owners = optimizer.averaged
        self.rates = rates
        self.values = [[] for _ in rates]
        self.own = optimizer.average
        optimizer.average = self.update

    def exact(self, owner: tg.Owner) -> torch.Tensor:
        return owner.shard.float() if owner.low_bits is None else tg.join_float32(owner.shard, owner.low_bits)

    def update(self, rate: float, share: float = 0.0) -> None:
        self.own(rate, 0.0)  # shares are tried after the run
        for index, other in enumerate(self.rates):
            if rate == 1.0:
                self.values[index] = [self.exact(owner).clone() for owner in self.owners]
            elif rate:
                for average, owner in zip(self.values[index], self.owners):
                    average.lerp_(self.exact(owner), other)

    @torch.no_grad()
    def losses(self, trainer: tg.Trainer, shares: list[float]) -> dict[str, float]:
        """Validation loss without averages, with the preset's own, and with each other one and its share."""
        config = trainer.preset.optimizer
        last = [self.exact(owner).clone() for owner in self.owners]
        tried = {"none": (last, 0.0)}
        if self.owners:
            tried["preset"] = [owner.average for owner in self.owners], config.averaged_share
        tried |= {f"{rate} {share}": (values, share) for rate, values, share in zip(self.rates, self.values, shares)}
        found = {}
        for label, (averages, share) in tried.items():
            for owner, weights, average in zip(self.owners, last, averages):
                mixed = weights.lerp(average, share)
                norms = [torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30) for x in (weights, mixed)]
                owner.shard.copy_(mixed * (norms[0] / norms[1]))
            found[label] = round(trainer.validate(trainer.final_geometry), 5)
        return found


def train_arm(arm: dict, options: argparse.Namespace) -> dict:
    """One run, whose timed loop waits until the one before it on this GPU has ended."""
    preset = arm_preset(arm, options.preset)
    ranks = tg.Ranks.start()
    fp8 = arm.get("fp8", tg.FP8_PARTS) if preset.model.dtype == "bfloat16" else []
    ops = tg.select_ops(ranks.device, tg.capability(ranks.device) >= (8, 0), fp8=fp8)
    clock = tg.Clock(ranks.device)
    # Another run may hold much of the memory when this one starts: micro-batches must not depend on it.
    tg.torch.cuda.mem_get_info = lambda device: (10**12, 10**12)
    trainer = tg.Trainer(preset, ranks, ops, clock, options.data or Path(preset.data))
    rates = [rate for rate, _ in arm.get("averages", [])]
    trainer.initialise(arm.get("seed", 1))
    trainer.warm_up()
    trainer.initialise(arm.get("seed", 1))
    averages = Averages(trainer.optimizer, rates)

    with open(f"{options.out}.lock{os.environ.get('CUDA_VISIBLE_DEVICES', '')}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        Path(f"{options.out}.{arm['name']}.started").touch()
        log_path = Path(f"{options.out}.{arm['name']}.jsonl")
        log = tg.RunLog(log_path)
        try:
            tg.timed_loop(trainer, log, tg.RunOptions(preset.steps, None, None, Path(os.devnull)))
        finally:
            log.close()
        seconds = clock.milliseconds() / 1e3
        losses = averages.losses(trainer, [share for _, share in arm.get("averages", [])])

    times, stage = {}, -1
    for line in map(json.loads, log_path.read_text().splitlines()):
        stage += line["kind"] == "stage"
        if line["kind"] == "step":
            times.setdefault(stage, []).append(line["ms_per_step"])
    largest = {}
    for name, parameter in trainer.model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("qkv", "up", "down", "lm_head"):
            largest[kind] = max(largest.get(kind, 0.0), round(float(parameter.detach().abs().max()), 2))
    return {"name": arm["name"], "loss": losses, "seconds": round(seconds, 2), "ms": [round(statistics.median(t), 2) for t in times.values()],
            "mib": tg.peak_memory_mib(ranks), "largest_weights": largest}


def search(options: argparse.Namespace) -> None:
    """Give each GPU the next arm that nobody has taken, as soon as the one before it on that GPU trains."""
    end = time.monotonic() + options.seconds
    taken, running = set(), {gpu: [] for gpu in options.gpus}
    while time.monotonic() < end:
        for gpu, processes in running.items():
            names = [name for name, process in processes if process.poll() is None]
            if len(names) > 1 or names and not Path(f"{options.out}.{names[-1]}.started").exists():
                continue
            arm = next((a for a in json.loads(options.arms.read_text()) if a["name"] not in taken), None)
            if arm is None:
                continue
            taken.add(arm["name"])
            environment = os.environ | ({} if gpu == "cpu" else {"CUDA_VISIBLE_DEVICES": gpu})
            with open(f"{options.out}.{arm['name']}.txt", "w") as output:
                command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm["name"]]
                processes.append((arm["name"], subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)))
        if all(process.poll() is not None for processes in running.values() for _, process in processes):
            return
        time.sleep(0.5)
    for processes in running.values():
        for _, process in processes:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path)
    parser.add_argument("--preset", choices=tg.PRESETS, default="sprint")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--seconds", type=float, default=1e9, help="kill what still runs then")
    parser.add_argument("--out", default="arms.jsonl", help="results, a line an arm; logs beside it")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of a process that this script has started
    options = parser.parse_args()
    if options.arm is None:
        search(options)
    else:
        result = json.dumps(train_arm(next(a for a in json.loads(options.arms.read_text()) if a["name"] == options.arm), options))
        with open(options.out, "a") as results:
            results.write(result + "\n")
        print(result, flush=True)
        os._exit(0)  # graphs are not taken down one by one
