"""Train variants ("arms") of a preset one after another on each GPU, and print a line of results for each;
not a test, and no records.

    python benchmarks/arms.py arms.json --preset sprint --data FOLDER --gpus 0,1 --out arms.jsonl
    python benchmarks/arms.py arms.json --effects --out arms.jsonl            # of a screening: what each factor changes
    python benchmarks/arms.py arms.json --preset smoke --gpus cpu             # on a CPU: proves that it runs through

arms.json is a list of arms. All keys but the name are optional:

    {"name": "larger-table", "seed": 1, "length": 1.0, "val_tokens": 4194304, "fp8": ["attention", "head", "mlp"],
     "model": {"ngram_rows": 33554432}, "layers": {"3": {"attention": false}},
     "optimizer": {"muon_learning_rate": 0.016}, "rules": {"embedding": {"learning_rate_multiplier": 50}},
     "stages": {"batch_tokens": [65536, 131072, 196608, 196608]},
     "averages": [[0.03, 0.65]], "edits": [["text of train_gpt.py that occurs once", "what stands there instead"]],
     "three_stages": {"first_steps": 618, "second_steps": 618, "third_steps": 592, "extension_steps": 25,
                      "classes": [6144, 10240, 14336, null]}, "micro_batch_tokens": 49152,
     "steps": 1000, "watch_every": 25, "rate_powers": [0, 0.5], "preset": "sprint", "data": "FOLDER",
     "script": "another/train_gpt.py"}

`preset`, `data` and `script` take the place of the options and of this repository's train_gpt.py. A result has the loss
on the track's validation tokens, which judge, and as `choose` that on `choosing tokens` others, by which constants are
chosen: those of the same shard behind them and, where these are few, the last training tokens.

`layers` changes layers by index, and leaves their other fields as they are; `three_stages` replaces all stages by those
that the function of that name makes; `edits` try what is no setting. `averages` are further running averages, [rate,
share]: the run is validated with each of them besides the preset's own and none, so they cost no run. With `steps` the
run ends early, and is validated without averages. With `watch_every` a line each so many steps in OUT.NAME.watch.jsonl
says which entry of each matrix of a layer is largest, as [magnitude, row, column], what the scalars are, and how much
of the stream lies in one channel (`largest_channels`). That takes time, which counts in the line of results. While one
arm trains, the next on that GPU compiles and warms up, which disturbs the first seconds of the timing: of `ms`, the
later stages count. `mhz, watts` are medians of what nvidia-smi says every two seconds, which tell a slower GPU from
slower kernels. On a CPU, with run.sh's settings for one, arms train one after the other: of smoke each takes half a
minute and more. With `"alone": true` an arm waits until the GPU is free, where two would not fit into its memory. The
file is read all the time, so arms may be appended while others train, and one that is taken out is stopped. `--seconds`
ends the search in time, and says which arms it leaves without a result. What would be ignored or lost is refused: the
keys by arms_file.py before anything trains, and settings that the preset cannot have when their arm starts, in
OUT.NAME.txt.

An entry may be a screening, which asks for several changes at once: {"base": {arm}, "factors": {"heads": {arm}, "rows":
{arm}, ...}}, each factor being what it changes, or [{arm}, {arm}], what the runs without it change and those with it: a
constant below and above its value. Its arms, named after the base's name and numbered, are a Plackett-Burman design: 4,
8, 12, 20, 24, 32, 44 or 48 runs for one factor less, half of the runs with a factor and half without, all else in
balance. So every effect is a difference of two means over all runs, where pairs of single runs would need several times
as many. Interactions of two factors are spread over the other effects, unless {"mirrored": true, ...} has each run a
second time with what the first one lacks. Fewer factors than there is room for show how large chance is. `--effects`
prints them by the choosing tokens, and by those that judge.
"""

import argparse
import bisect
import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

SCRIPT = Path(__file__).parent.parent / "train_gpt.py"
sys.path.insert(0, str(SCRIPT.parent / "records"))
from arms_file import Mistake, Unread, read_arms, read_entries, require, screening_arms, screening_signs
from record import query_gpus
from starts import CPU_SETTINGS


def load_trainer(edits: list[list[str]], path: Path = SCRIPT):
    """train_gpt.py, or another version of it, as a module, with each [old, new] of `edits` applied to its text."""
    text = path.read_text()
    for old, new in edits:
        count = text.count(old)
        require(count == 1, f"edit {old!r}", f"once in {path.name}", f"{count} times", "copy the text from there anew")
        text = text.replace(old, new)
    if edits:
        path = Path(tempfile.mkdtemp()) / SCRIPT.name
        path.write_text(text)
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- presets and effects ---------------------------------------------------------------------------------------------
def read_results(path: Path) -> dict[str, dict]:
    """Losses and seconds of each run that has ended, by its name."""
    ended = {}
    for count, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            kinds = [("", line["loss"])]
            if line.get("choose"):
                kinds = [("choose ", line["choose"]), ("judge ", line["loss"])]
            losses = {kind + label: float(loss) for kind, found in kinds for label, loss in found.items()}
            ended[line["name"]] = {"loss": losses, "seconds": float(line["seconds"])}
        except (ValueError, KeyError, TypeError, AttributeError):
            require(False, f"{path}, line {count}", "a line of results", repr(text[:60]), "remove that line")
    return ended


def print_effects(screening: dict, results: Path) -> None:
    """What each factor of a screening changes, a line each, by least squares over the runs that have ended.

    Over all runs that is the difference of the means with and without the factor. Where runs are lost,
    one more than there are factors still tell the effects, and each further one tells their standard error better."""
    factors = list(screening["factors"])
    ended = read_results(results)
    signs = screening_signs(screening)
    found = [(row, ended[arm["name"]]) for row, arm in zip(signs, screening_arms(screening)) if arm["name"] in ended]
    matrix = np.array([[1, *(row / 2)] for row, _ in found]).reshape(-1, len(factors) + 1)
    enough = np.linalg.matrix_rank(matrix) > len(factors)
    expected = f"{len(factors) + 1} runs or more of the screening in {results}"
    require(enough, "effects", expected, len(found), "train the others, or name the results by --out")

    labels = [label for label in found[0][1]["loss"] if all(label in line["loss"] for _, line in found)]
    outcomes = np.array([[*(line["loss"][label] for label in labels), line["seconds"]] for _, line in found])
    inverse = np.linalg.pinv(matrix)
    effects = inverse @ outcomes
    print(
        f"{f'{len(found)} of {len(signs)} runs':20}"
        + "".join(f"{label:>18}" for label in labels)
        + f"{'seconds':>10}"
    )
    for name, values in zip(["mean", *factors], effects):
        sign = "" if name == "mean" else "+"
        print(f"{name:20}" + "".join(f"{loss:{sign}18.5f}" for loss in values[:-1]) + f"{values[-1]:{sign}10.2f}")

    spare = len(found) - len(effects)
    if spare:
        scatter = np.sqrt(((outcomes - matrix @ effects) ** 2).sum(0) / spare)  # the standard deviation of a run
        # of the effect that the lost runs leave least certain
        errors = scatter * np.linalg.norm(inverse[1:], axis=1).max()
        print(f"{'standard error':20}" + "".join(f"{error:18.5f}" for error in errors[:-1]) + f"{errors[-1]:10.2f}")


def frozen(value):
    """JSON's lists as tuples, which a stage must consist of to be a key."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def arm_preset(tg, arm: dict, name: str):
    """The preset with what the arm changes in it."""
    require(name in tg.PRESETS, "preset", f"one of {', '.join(tg.PRESETS)}", name)
    whole = tg.PRESETS[name]
    if "three_stages" in arm:
        schedule = {key: frozen(value) for key, value in arm["three_stages"].items()}
        whole = dataclasses.replace(whole, stages=tg.three_stages(**schedule))
    preset = tg.scaled_preset(whole, arm.get("length", 1.0))
    roles = dict(preset.optimizer.rules).keys()
    unknown = arm.get("rules", {}).keys() - roles
    require(not unknown, "rules", f"roles among {', '.join(roles)}", ", ".join(sorted(unknown)))
    rules = [
        (role, dataclasses.replace(rule, **arm.get("rules", {}).get(role, {})))
        for role, rule in preset.optimizer.rules
    ]
    stages = list(preset.stages)
    for field, values in arm.get("stages", {}).items():
        stages = [
            dataclasses.replace(stage, **{field: frozen(value)})
            for stage, value in zip(stages, values, strict=True)
        ]
    layers = list(preset.model.layers)
    for index, fields in arm.get("layers", {}).items():
        require(index in map(str, range(len(layers))), "layers", f"0 to {len(layers) - 1}", index)
        layers[int(index)] = dataclasses.replace(layers[int(index)], **fields)
    return dataclasses.replace(
        preset, stages=tuple(stages), val_tokens=arm.get("val_tokens", preset.val_tokens),
        model=dataclasses.replace(preset.model, layers=tuple(layers), **arm.get("model", {})),
        optimizer=dataclasses.replace(preset.optimizer, rules=tuple(rules), **arm.get("optimizer", {})))


def checked_preset(tg, arm: dict, name: str):
    """The arm's preset, or a line on what it asks for and no run can do."""
    unknown = set(arm.get("fp8", ())) - tg.FP8_PARTS.keys()
    require(not unknown, "fp8", f"parts among {', '.join(tg.FP8_PARTS)}", ", ".join(sorted(unknown)))
    try:
        preset = arm_preset(tg, arm, name)
        if hasattr(tg, "check_preset"):  # an arm's own script may be older
            tg.check_preset(preset)
        steps = arm.get("steps", 1)
        require(steps <= preset.steps, "steps", f"at most the schedule's {preset.steps}", steps)
        return preset
    except (TypeError, ValueError) as error:  # no such field, a list of another length, a value of another kind
        raise Mistake(f"settings: expected those of train_gpt.py, found '{error}'; fix: change the arm") from error


# ---- one arm ---------------------------------------------------------------------------------------------------------
class Averages:
    """Running averages with several rates, of all that the preset's own one averages."""

    def __init__(self, tg, optimizer, rates: list[float]):
        self.join_float32 = tg.join_float32
        self.owners = optimizer.averaged
        self.rates = rates
        self.values = [[] for _ in rates]
        self.own = optimizer.average
        optimizer.average = self.update

    def exact(self, owner) -> torch.Tensor:
        return owner.shard.float() if owner.low_bits is None else self.join_float32(owner.shard, owner.low_bits)

    def update(self, rate: float, share: float = 0.0) -> None:
        self.own(rate, 0.0)  # shares are tried after the run
        for index, other in enumerate(self.rates):
            if rate == 1.0:
                self.values[index] = [self.exact(owner).clone() for owner in self.owners]
            elif rate:
                for average, owner in zip(self.values[index], self.owners):
                    average.lerp_(self.exact(owner), other)

    @torch.no_grad()
    def losses(self, validate, config, shares: list[float]) -> dict:
        """What `validate` finds without averages, with the preset's own, and with each other one and its share."""
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
            found[label] = validate()
        return found


FEW_TOKENS = 2**19  # on fewer a loss is no measure of changes of .001


def choosing_windows(tg, trainer) -> tuple[list, int]:
    """Tokens that neither train nor judge, packed, and how many: constants are chosen on these.

    They are the validation shard's behind those that judge, at most as many. Where they are few, the last training
    tokens, as many as judge, come besides, unless the schedule reaches them."""
    preset, stream = trainer.preset, trainer.stream
    shard = tg.open_shard(tg.find_shards(trainer.folder, "val")[0], preset.model.vocabulary)
    sources = [shard[preset.val_tokens:2 * preset.val_tokens + 1]]
    last = stream.length - preset.val_tokens - 1
    if len(sources[0]) <= FEW_TOKENS and last > stream.consumed(preset.stages):
        sources.append(stream.read(last, preset.val_tokens + 1))

    windows = []
    total = 0
    for tokens in sources:
        count = (len(tokens) - 1) // 1024 * 1024
        for start in range(0, count, preset.val_window_tokens):
            stop = min(start + preset.val_window_tokens, count)
            pieces = tg.cut_documents(tokens[start:stop + 1], preset.val_window_tokens)
            windows.append(tg.pack({0: pieces}, preset.model, trainer.ranks.on_gpu))
        total += max(count, 0)
    return windows, total


@torch.no_grad()
def both_losses(trainer, windows: list, count: int, rate_powers: list[float]) -> list[float]:
    """[loss on the tokens that judge, on those that choose]; the latter is left out where there are none. Then the
    latter with powers of the inclusion rates in their place."""
    judging = round(trainer.validate(trainer.final_geometry), 5)
    if not count:
        return [judging]

    def choosing():
        return round(sum(float(trainer.evaluate(window, trainer.final_geometry)) for window in windows) / count, 5)

    found = [judging, choosing()]
    if not rate_powers:
        return found
    rates = trainer.model.inclusion_rates
    counted = rates.clone()
    for power in rate_powers:
        rates.copy_(counted ** power)
        found.append(choosing())
    rates.copy_(counted)
    return found


def largest_entries(model: torch.nn.Module, kinds: set[str]) -> dict[str, tuple[float, int, int]]:
    """Of each matrix whose name ends with one of `kinds`, its largest magnitude, with row and column."""
    largest = {}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in kinds:
            magnitudes = parameter.detach().abs()
            row, column = divmod(int(magnitudes.argmax()), parameter.size(1))
            largest[name] = round(float(magnitudes[row, column]), 3), row, column
    return largest


@torch.no_grad()
def largest_channels(trainer) -> dict[str, tuple]:
    """How much of the stream after each layer lies in one channel, on the first window of the validation.

    Of a token, the share of the sum of squares that its largest channel has. Here the mean over the tokens, then the
    channel that is largest most often, with the share of the tokens where it is, and of those where it is positive.
    "head": the standard deviation of all weights of the head, then mean and standard deviation of those that read the
    last layer's channel.
    """
    found = {}
    head = trainer.model.lm_head[:trainer.preset.model.vocabulary].float()
    blocks = list(trainer.model.blocks.values())
    last = blocks[-1].index

    def measure(block, _, output):
        x, mlp_out, _ = output
        shares = []
        channels = []
        signs = []
        for start in range(0, len(x), 8192):
            rows = slice(start, start + 8192)
            stream = x[rows] if mlp_out is None else x[rows] + mlp_out[rows]
            squares = stream.float().square()
            largest = squares.max(1)
            shares.append(largest.values / squares.sum(1))
            channels.append(largest.indices)
            signs.append(stream.gather(1, largest.indices[:, None])[:, 0] > 0)
        channels = torch.cat(channels)
        channel = int(channels.bincount().argmax())
        here = channels == channel
        means = torch.cat(shares).mean(), here.float().mean(), torch.cat(signs)[here].float().mean()
        share, often, positive = (round(float(mean), 4) for mean in means)
        found[f"stream.{block.index}"] = share, channel, often, positive
        if block.index == last:
            weights = head[:, channel]
            found["head"] = tuple(round(float(value), 4) for value in (head.std(), weights.mean(), weights.std()))

    hooks = [block.register_forward_hook(measure) for block in blocks]
    trainer.evaluate(trainer.validation[0], trainer.final_geometry)
    for hook in hooks:
        hook.remove()
    return found


def watch(trainer, every: int, path: Path) -> None:
    """From now on write what largest_entries and largest_channels find, and all scalars, after each `every` steps."""
    training_step = trainer.training_step
    scalars = {
        name: parameter
        for name, parameter in trainer.model.named_parameters()
        if parameter.info.role == "scalar"
    }

    def watched(step, micro_batches):
        loss = training_step(step, micro_batches)
        if (step + 1) % every == 0:
            loss = loss.clone()  # it lies in memory that the evaluation borrows
            line = {"step": step + 1} | largest_entries(trainer.model, {"qkv", "out", "gate", "up", "down"})
            line |= {name: parameter.tolist() for name, parameter in scalars.items()}
            line |= largest_channels(trainer)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return loss

    trainer.training_step = watched


@contextlib.contextmanager
def sampled_clock(interval: float = 2.0) -> Iterator[list[str]]:
    """A list that meanwhile gets a line every `interval` seconds: the GPU's clock, and the power that it draws."""
    samples = []
    ended = threading.Event()

    def sample():
        while not ended.wait(interval):
            samples.extend(query_gpus("--query-gpu=clocks.sm,power.draw"))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def medians(samples: list[str]) -> list[float]:
    """Of each column of lines like "1980 MHz, 693.21 W"; lines in which something is not available do not count."""
    rows = [re.fullmatch(r"([0-9.]+) MHz, ([0-9.]+) W", line) for line in samples]
    return [statistics.median(map(float, column)) for column in zip(*(row.groups() for row in rows if row))]


def train_arm(tg, arm: dict, options: argparse.Namespace) -> dict:
    """One run, whose timed loop waits until the one before it on this GPU has ended."""
    preset = checked_preset(tg, arm, arm.get("preset", options.preset))
    ranks = tg.Ranks.start()
    gpus = ",".join(options.gpus)
    require(ranks.device.type == "cuda" or gpus == "cpu", "--gpus", "cpu, as torch sees no GPU", gpus, "--gpus cpu")
    fp8 = arm.get("fp8", preset.fp8) if preset.model.dtype == "bfloat16" else []
    ops = tg.select_ops(ranks.device, tg.capability(ranks.device) >= (8, 0), fp8=fp8)
    clock = tg.Clock(ranks.device)
    # Another run may hold much of the memory when this one starts: micro-batches must not depend on it.
    if torch.cuda.is_available():
        total = torch.cuda.mem_get_info(ranks.device)[1]
        torch.cuda.mem_get_info = lambda device: (total - torch.cuda.memory_reserved(device), total)
    folder = Path(arm.get("data") or options.data or preset.data)
    trainer = tg.Trainer(preset, ranks, ops, clock, folder, arm.get("micro_batch_tokens"))
    rates = [rate for rate, _ in arm.get("averages", [])]
    require(not rates or bool(trainer.optimizer.averaged), "averages", "an averaged_share above 0", "none")
    trainer.initialise(arm.get("seed", 1))
    trainer.warm_up()
    trainer.initialise(arm.get("seed", 1))
    averages = Averages(tg, trainer.optimizer, rates)
    if "watch_every" in arm:
        watch(trainer, arm["watch_every"], Path(f"{options.out}.{arm['name']}.watch.jsonl"))
    steps = arm.get("steps", preset.steps)

    with open(f"{options.out}.lock{os.environ.get('CUDA_VISIBLE_DEVICES', '')}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        Path(f"{options.out}.{arm['name']}.started").touch()
        log_path = Path(f"{options.out}.{arm['name']}.jsonl")
        log = tg.RunLog(log_path)
        try:
            with sampled_clock() as samples:
                tg.timed_loop(trainer, log, steps, None)
        finally:
            log.close()
        seconds = clock.milliseconds() / 1e3
        windows, count = choosing_windows(tg, trainer)
        validate = functools.partial(both_losses, trainer, windows, count, arm.get("rate_powers", []))
        if steps < preset.steps:
            losses = {"none": validate()}
        else:
            losses = averages.losses(validate, preset.optimizer, [share for _, share in arm.get("averages", [])])

    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    starts = [line["step"] for line in lines if line["kind"] == "stage"]
    times = [[] for _ in starts]
    for line in lines:
        # the first one waits for data; a stage's last is logged after the next has begun
        if line["kind"] == "step" and line["step"] > 1:
            times[bisect.bisect_left(starts, line["step"]) - 1].append(line["ms_per_step"])
    fp8_kinds = {kind for ranges in tg.FP8_PARTS.values() for kind in ranges}
    largest = {}
    for name, (magnitude, _, _) in largest_entries(trainer.model, fp8_kinds).items():
        kind = name.rpartition(".")[2]
        largest[kind] = max(largest.get(kind, 0.0), round(magnitude, 2))
    judging = {label: found[0] for label, found in losses.items()}
    choosing = {label: found[1] for label, found in losses.items() if len(found) > 1}
    return {
        "name": arm["name"],
        "loss": judging,
        "choose": choosing,
        "choosing tokens": count,
        "rate_powers": {label: found[2:] for label, found in losses.items()},
        "seconds": round(seconds, 2),
        "ms": [round(statistics.median(t), 2) if t else None for t in times],
        "mhz, watts": medians(samples) if ranks.on_gpu else [],
        "mib": tg.peak_memory_mib(ranks),
        "largest_weights": largest,
    }


def own_path(name: str, options: argparse.Namespace) -> Path:
    """The file of an arm alone. Its process reads that, for the list may be edited meanwhile."""
    return Path(f"{options.out}.{name}.arm.json")


def run_arm(options: argparse.Namespace) -> None:
    """Train the arm that this process is for, and add its line to the results. The loss must be a number for that."""
    (arm,) = read_arms(own_path(options.arm, options))
    tg = load_trainer(arm.get("edits", []), Path(arm.get("script", SCRIPT)))
    try:
        result = train_arm(tg, arm, options)
        text = json.dumps(result)
        print(text, flush=True)
        losses = [*result["loss"].values(), *result["choose"].values()]
        if not all(map(math.isfinite, losses)):
            tg.fail("losses", "finite numbers", losses, "lower the learning rate or report this seed", tg.EXIT_NUMERICS)
    except tg.Failure as failure:
        mistake = Mistake(str(failure))
        mistake.code = failure.code
        raise mistake from failure
    with open(options.out, "a") as results:
        results.write(text + "\n")


# ---- all arms --------------------------------------------------------------------------------------------------------
def start(arm: dict, gpu: str, options: argparse.Namespace) -> subprocess.Popen:
    name = arm["name"]
    own_path(name, options).write_text(json.dumps([arm]))
    for ending in ("started", "jsonl"):  # of an earlier search, whose log would be read for this one
        Path(f"{options.out}.{name}.{ending}").unlink(missing_ok=True)
    environment = CPU_SETTINGS | os.environ if gpu == "cpu" else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    with open(f"{options.out}.{name}.txt", "w") as output:
        command = [sys.executable, __file__, *sys.argv[1:], "--arm", name]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def conclude(arms: list[dict], processes: dict[str, subprocess.Popen], options: argparse.Namespace) -> None:
    """Say which arms have failed, and which --seconds has left without a result."""
    codes = {name: process.poll() for name, process in processes.items()}
    late = [arm["name"] for arm in arms if codes.get(arm["name"]) is None]
    if late:
        print(f"arms: no result of {', '.join(late)} within --seconds {options.seconds:g}", file=sys.stderr)
    failed = [name for name, code in codes.items() if code]
    found = f"{len(failed)} failed: {', '.join(failed)}"
    require(not failed, "results", "one of each arm", found, f"the end of {options.out}.NAME.txt says why")
    require(0 in codes.values(), "--seconds", "time for a result", f"none after {options.seconds:g} s", "give more")


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def search(options: argparse.Namespace) -> None:
    """Give each GPU the next arm that nobody has taken, as soon as the one before it on that GPU trains.
    However this ends, no arm goes on without it."""
    end = time.monotonic() + options.seconds
    arms = read_arms(options.arms)
    open(options.out, "a").close()  # else a whole run would be lost where nothing can be written
    said = ""
    processes = {}
    running = {gpu: [] for gpu in options.gpus}
    try:
        while time.monotonic() < end:
            try:
                arms = read_arms(options.arms)
            except Unread:
                pass  # somebody is writing it
            except Mistake as mistake:  # the arms under way go on
                if str(mistake) != said:
                    said = str(mistake)
                    print(f"arms: {said}", file=sys.stderr, flush=True)
            for name in processes.keys() - {arm["name"] for arm in arms}:
                stop(processes.pop(name))
            for gpu, taken in running.items():
                names = [name for name in taken if name in processes and processes[name].poll() is None]
                if gpu == "cpu" and names:  # two at once take longer than one after the other
                    continue
                if len(names) > 1 or names and not Path(f"{options.out}.{names[-1]}.started").exists():
                    continue
                if any(arm.get("alone") for arm in arms if arm["name"] in names):
                    continue
                arm = next((a for a in arms if a["name"] not in processes), None)
                if arm is None or arm.get("alone") and names:
                    continue
                taken.append(arm["name"])
                processes[arm["name"]] = start(arm, gpu, options)
            ended = all(process.poll() is not None for process in processes.values())
            if ended and all(arm["name"] in processes for arm in arms):
                break
            time.sleep(0.5)
        conclude(arms, processes, options)
    finally:
        for process in processes.values():
            stop(process)


def seconds(text: str) -> float:
    value = float(text)
    if not value >= 0:  # nan, too
        raise argparse.ArgumentTypeError(f"expected a number from 0, found {text}")
    return value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path)
    parser.add_argument("--preset", default="sprint")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"])
    parser.add_argument("--seconds", type=seconds, default=1e9, help="kill what still runs then")
    parser.add_argument("--out", default="arms.jsonl", help="results, a line an arm; logs beside it")
    parser.add_argument(
        "--effects",
        action="store_true",
        help="train nothing: what the results in --out say of a screening's factors",
    )
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of a process that this script has started
    options = parser.parse_args(argv)
    if options.effects:
        screenings = [entry for entry in read_entries(options.arms) if "factors" in entry]
        require(bool(screenings), options.arms, "a screening", "arms alone", "--effects is for base and factors")
        for screening in screenings:
            print_effects(screening, Path(options.out))
    elif options.arm is None:
        sys.path.insert(0, str(SCRIPT.parent))
        from train_gpt import PRESETS  # only here: an arm's process loads the arm's own version

        require(options.preset in PRESETS, "--preset", f"one of {', '.join(PRESETS)}", options.preset, "name one")
        search(options)
    else:
        run_arm(options)


def told(argv: list[str] | None = None) -> int:
    """The exit code of main. A mistake and an interruption become a line."""
    try:
        main(argv)
        return 0
    except Mistake as mistake:
        code, line = mistake.code, str(mistake)
    except OSError as error:
        code, line = 2, f"file: expected to be there and to work, found '{error}'; fix: check the path and permissions"
    except KeyboardInterrupt:
        code, line = 130, "interrupted"
    print(f"arms: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    code = told()
    if code == 0 and "--arm" in sys.argv:
        os._exit(0)  # graphs are not taken down one by one
    sys.exit(code)
