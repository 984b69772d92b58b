"""Train a GPT-2-small-class language model as fast as the machine allows, in one file.

    sprint, webtext (one pass over 94 M tokens): validation loss 3.212 in 105.9 s on one H200 and in 30.8 s on four
    (n = 3 each), torch 2.11, Triton 3.6; the runs are records/2026-11-21_target-reached-1gpu and -4gpu.
    speedrun, FineWeb: not yet run.

Launch
    ./run.sh                                                     the preset this machine can run, with what it has
    torchrun --standalone --nproc_per_node=8 train_gpt.py        one node; 4, 2 or 1 GPU train on the same tokens, accumulated
    python train_gpt.py --preset smoke                           any computer, no network: a minute or two on two CPU cores

Options worth knowing: --seed N, --runs N (the compiled model is reused), --profile A:B (a trace of those steps), --val-every N,
--stop-after N, --check (what would a start find wrong?), --save FILE, --eval FILE, --sample FILE "text".

Map
    1 imports, constants      2 configuration          3 runtime             4 reference operators    5 Triton kernels
    6 operator selection      7 optimizer              8 model               9 data                  10 schedule
    11 run log               12 training              13 afterwards         14 main
"""

# ======================================================================================================================
# 1. Imports, constants
# ======================================================================================================================
from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import math
import os
import pickle
import platform
import queue
import secrets
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # the reference operators need no Triton
    triton = tl = None
    def jit(function):
        return function

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024  # llm.c's token files, see data/README.md
BOS = 50256  # <|endoftext|>: opens every document
SLOTS = 8  # a step's batch is packed into 8 slots whatever the number of ranks, so every world size sees the same tokens
EXIT_BUG, EXIT_USAGE, EXIT_NUMERICS, EXIT_HARDWARE = 1, 2, 3, 4
# Dense bfloat16 TFLOP/s as the vendors state them, by a part of the device's name.
PEAK_TFLOPS = (("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("A100", 312.0), ("L40S", 362.0))

# ======================================================================================================================
# 2. Configuration
# ======================================================================================================================
@dataclass(frozen=True)
class Layer:
    """One slot of the network. The table of layers is the only place that knows which layer does what."""
    attention: bool = True
    mlp: bool = True
    window: str = "short"  # which of the stage's two windows its attention uses
    paired: bool = False  # heads h and h + H/2 attend together, their tokens interleaved (record 58)
    key_offset: bool = False  # the channels of K that do not turn come from the token before: induction in one layer (record 49)
    exclusive: bool = False  # takes out of each head's output a learned share of what points along its own V (record 82)
    value_embedding: int | None = None  # the value-embedding table added to V
    skip_from: int | None = None  # U-Net: the earlier slot whose output enters here through a sigmoid gate
    backout: bool = False  # its output is subtracted again, scaled, before the head

class Softcap(NamedTuple):
    """z = softcap · σ((logit + shift) / temperature): bounded by (0, softcap), so softmax needs no running maximum."""
    softcap: float = 23.0
    shift: float = 5.0  # record 54
    temperature: float = 7.5

@dataclass(frozen=True)
class ModelConfig:
    width: int
    heads: int
    head_width: int
    mlp_width: int
    layers: tuple[Layer, ...]
    value_embeddings: int
    bigram_rows: int  # of the hashed table of token pairs, added in every layer (record 62); 0: none
    bigram_width: int  # how many leading channels of the stream it is added to
    gate_inputs: int = 12  # leading channels that the smear gate and the attention gates read
    vocabulary: int = 50257
    padded_vocabulary: int = 50304  # a multiple of 128: faster tiles, and divisible by 8 ranks
    softcap: Softcap = Softcap()
    rotary_base: float = 1024.0
    dtype: str = "bfloat16"  # of weights and activations; scalars and gates are float32 always

# Roles connect parameters to their optimizer: each parameter declares one, and each role has exactly one rule.
@dataclass(frozen=True)
class MuonRule:
    """Hidden matrices, orthogonalised one by one; the parameter says of which shape they are."""
    learning_rate_multiplier: float

@dataclass(frozen=True)
class AdamRule:
    learning_rate_multiplier: float
    betas: tuple[float, float]
    decay: float = 0.0  # cautious, times the rate squared
    sharded: bool = False  # large tables: each rank updates a slice of the rows

@dataclass(frozen=True)
class OptimizerConfig:
    muon_learning_rate: float = 0.023
    muon_weight_decay: float = 1.2  # cautious, times the rate twice: it fades with the square of the schedule
    muon_momentum: tuple[float, float] = (0.85, 0.95)  # warmed up from the first to the second, cooled down again at the end
    momentum_warmup_steps: int = 300
    momentum_cooldown_steps: int = 50
    second_moment_decay: float | None = 0.95  # None: plain Muon, the baseline arm
    orthogonalization: str = "polar-express"
    adam_learning_rate: float = 0.008
    adam_epsilon: float = 1e-10
    cooldown_fraction: float = 0.55
    final_learning_rate: float = 0.1  # relative to the peak
    rules: tuple[tuple[str, MuonRule | AdamRule], ...] = (
        ("attention", MuonRule(2.0)),
        ("mlp_up", MuonRule(2.0)),
        ("mlp_down", MuonRule(4.0)),
        ("embedding", AdamRule(75.0, (0.65, 0.95), sharded=True)),
        ("value_embedding", AdamRule(75.0, (0.75, 0.95), decay=0.025, sharded=True)),
        ("bigram", AdamRule(20.0, (0.75, 0.95), decay=0.025, sharded=True)),
        ("head", AdamRule(1.0, (0.5, 0.95), decay=0.75, sharded=True)),
        ("scalar", AdamRule(5.0, (0.9, 0.99))),
        ("gate", AdamRule(1.0, (0.9, 0.99))),
        ("smear_gate", AdamRule(0.01, (0.9, 0.99))),
    )

@dataclass(frozen=True)
class Stage:
    """A stretch of the schedule with constant shapes."""
    steps: int
    batch_tokens: int
    document_cap_tokens: int
    short_window_tokens: int
    long_window_tokens: int
    learning_rate_multiplier: float = 1.0
    # Weights of the next, second next, ... token as targets, at the first and after the last step of the stage (record 53).
    targets: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))
    candidates: int | None = None  # sampled softmax: columns of the head a slot uses, its targets among them; None: all
    extension: bool = False  # after the scheduled steps, at the final learning rate

    @property
    def slot_tokens(self) -> int:
        return self.batch_tokens // SLOTS

@dataclass(frozen=True)
class Preset:
    name: str
    model: ModelConfig
    stages: tuple[Stage, ...]
    optimizer: OptimizerConfig
    data: str  # folder with *_train_*.bin and *_val_*.bin
    train_tokens: int  # shards are opened in order until they hold this many
    val_tokens: int
    val_window_tokens: int  # contiguous tokens a forward pass of the validation sees
    val_windows_tokens: tuple[int, int]  # (short, long) attention windows of the final validation
    target_loss: float | None
    status: str  # one line said at the start
    log_every_steps: int = 25

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def scheduled_steps(self) -> int:
        return sum(stage.steps for stage in self.stages if not stage.extension)

# Slot 0 is empty: the public records removed its MLP (record 30) and its attention (35); the numbers stay comparable.
LAYERS = (
    Layer(attention=False, mlp=False),
    Layer(paired=True),
    Layer(value_embedding=0, exclusive=True),
    Layer(value_embedding=1, paired=True),
    Layer(window="long", key_offset=True, exclusive=True),
    Layer(exclusive=True),
    Layer(paired=True),
    Layer(attention=False, skip_from=4),
    Layer(backout=True, exclusive=True),
    Layer(value_embedding=2),
    Layer(value_embedding=3, paired=True),
    Layer(value_embedding=4, window="long", key_offset=True),
)
GPT_SMALL = ModelConfig(width=768, heads=6, head_width=128, mlp_width=3072, layers=LAYERS, value_embeddings=5, bigram_rows=5 * 50304,
                        bigram_width=768)
GPT_TINY = ModelConfig(width=128, heads=2, head_width=64, mlp_width=512, value_embeddings=3, bigram_rows=8192, bigram_width=96,
                       dtype="float32", layers=(
    Layer(value_embedding=0, paired=True),
    Layer(value_embedding=1, window="long", key_offset=True),
    Layer(attention=False, skip_from=1),
    Layer(backout=True, exclusive=True),
    Layer(),
    Layer(value_embedding=2, window="long", key_offset=True),
))

def three_stages(steps: tuple[int, int, int], extension_steps: int, batch_tokens: tuple[int, int, int], rates: tuple[float, float, float],
                 cap_tokens: int, candidates: tuple[int | None, int | None, int | None]) -> tuple[Stage, ...]:
    """Batches, windows and rates grow by stage (record 46) while the second and third next token fade as targets (53); then the extension (35)."""
    windows = (128, 384), (384, 896), (640, 1408)
    targets = ((1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), ((1.0, 0.5), (1.0, 0.0)), ((1.0,), (1.0,))
    return (*(Stage(n, batch, cap_tokens, *window, rate, target, drawn)
              for n, batch, window, rate, target, drawn in zip(steps, batch_tokens, windows, rates, targets, candidates)),
            Stage(extension_steps, batch_tokens[-1], cap_tokens, 768, 1664, rates[-1], extension=True))

PRESETS = {preset.name: preset for preset in (
    Preset("speedrun", GPT_SMALL, three_stages((500, 500, 500), 40, (131_072, 262_144, 393_216), (1.0, 1.51, 1.73), 3072, (10_240, 14_336, 28_672)),
           OptimizerConfig(), "data/fineweb10B",
           train_tokens=500_000_000, val_tokens=10_485_760, val_window_tokens=262_144, val_windows_tokens=(768, 2560),
           target_loss=3.28, status="speedrun: not yet run on FineWeb"),
    # One pass over 94 M tokens. Half the batch of the speedrun: twice the steps lower the loss by 0.05 at the same time on one GPU (records/LOG.md).
    Preset("sprint", GPT_SMALL, three_stages((239, 239, 228), 10, (65_536, 131_072, 196_608), (0.75, 1.13, 1.45), 3072, (8192, 12_288, 24_576)),
           OptimizerConfig(), "data/fineweb10B",
           train_tokens=94_000_000, val_tokens=2_097_152, val_window_tokens=262_144, val_windows_tokens=(768, 2560),
           target_loss=None, status="sprint: at most one pass over one shard"),
    Preset("smoke", GPT_TINY, (Stage(40, 512, 256, 64, 128, targets=((1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), candidates=4096),
                               Stage(36, 1024, 256, 128, 256, candidates=8192), Stage(4, 1024, 256, 128, 256, extension=True)),
           OptimizerConfig(momentum_warmup_steps=40, momentum_cooldown_steps=10), "data/sample",
           train_tokens=10_000_000, val_tokens=16_384, val_window_tokens=2048, val_windows_tokens=(128, 512),
           target_loss=None, status="smoke: practice on a small public-domain sample, never on a leaderboard", log_every_steps=10),
    Preset("smoke-gpu", GPT_SMALL, (Stage(10, 65_536, 1024, 128, 384), Stage(10, 65_536, 1024, 384, 896)),
           OptimizerConfig(momentum_warmup_steps=10, momentum_cooldown_steps=5), "data/sample",
           train_tokens=10_000_000, val_tokens=65_536, val_window_tokens=65_536, val_windows_tokens=(384, 1408),
           target_loss=None, status="smoke-gpu: 20 steps at full width, never on a leaderboard", log_every_steps=5),
)}

# ======================================================================================================================
# 3. Runtime
# ======================================================================================================================
class Failure(Exception):
    """An error the user can act on: one line that says what, expected, found and the fix; `code` is the exit status."""
    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code

def fail(what: str, expected: Any, found: Any, fix: str, code: int = EXIT_USAGE) -> None:
    raise Failure(f"{what}: expected {expected}, found {found}; fix: {fix}", code)

class Ranks:
    """The processes of one run, one device each. With one rank every collective is a no-op."""
    def __init__(self, rank: int, world: int, device: torch.device):
        self.rank, self.world, self.device = rank, world, device
        self.processes, self.stop_asked = [os.getpid()], False
        self.beat: Callable[..., None] = lambda *_: None  # the watchdog's while one watches

    @staticmethod
    def start() -> Ranks:
        """Read torchrun's variables, pick the device and join the process group."""
        rank, world, local = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
        if world not in (1, 2, 4, 8):
            fail("number of processes", "1, 2, 4 or 8", world, "torchrun --nproc_per_node=8 (or 4, 2, 1)")
        if torch.cuda.is_available():
            if local >= torch.cuda.device_count():
                fail("GPUs on this machine", f"at least {local + 1}", torch.cuda.device_count(), "start fewer processes", EXIT_HARDWARE)
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured in a graph
        else:
            device = torch.device("cpu")
        if world > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
        ranks = Ranks(rank, world, device)
        ranks.processes = ranks.gather_objects(os.getpid())
        if world > 1:
            signal.signal(signal.SIGINT, ranks.ask_to_stop)
        return ranks

    def shard(self, full: Tensor) -> Tensor:
        """This rank's equal part of `full` along its first dimension, a view."""
        return full.view(self.world, -1, *full.shape[1:])[self.rank]

    def reduce_scatter_mean(self, full: Tensor) -> Callable[[], None]:
        """Average `full` over the ranks into this rank's shard of it, in place. Returns the wait (it blocks the stream, not the host)."""
        if self.world == 1:
            return lambda: None
        if self.device.type == "cuda":
            return dist.reduce_scatter_tensor(self.shard(full), full, op=dist.ReduceOp.AVG, async_op=True).wait
        return self.all_reduce_mean(full)

    def all_reduce_mean(self, tensor: Tensor) -> Callable[[], None]:
        if self.world == 1:
            return lambda: None
        if self.device.type == "cuda":
            return dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True).wait
        dist.all_reduce(tensor)  # gloo has no mean
        tensor.div_(self.world)
        return lambda: None

    def all_gather(self, full: Tensor) -> Callable[[], None]:
        """Fill `full` from every rank's shard of it, in place."""
        if self.world == 1:
            return lambda: None
        # gloo reads its input while it writes the output, NCCL knows the in-place form
        shard = self.shard(full) if self.device.type == "cuda" else self.shard(full).clone()
        return dist.all_gather_into_tensor(full, shard, async_op=True).wait

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def ask_to_stop(self, *_: Any) -> None:
        """Ctrl-C finds ranks between different collectives: the first one only asks, and they agree at a flush; the second acts at once."""
        self.stop_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def lost(self) -> str:
        """Which ranks' processes have ended or stand still, in words for a message; only Linux tells."""
        for _ in range(10):  # a dying process closes its connections before it counts as ended
            states = {}
            for rank, process in enumerate(self.processes):
                with contextlib.suppress(OSError):
                    states[rank] = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            if lost := [str(rank) for rank in range(self.world) if states.get(rank, "X") in "XZTt"]:
                break
            threading.Event().wait(0.1)
        return f" (rank {', '.join(lost)} has ended or stands still)" if states and lost else ""

    def finish(self, code: int) -> None:
        if self.world > 1 and dist.is_initialized():
            if code:  # neither NCCL nor the end of the interpreter may wait for a rank that has failed
                if code == EXIT_BUG:
                    traceback.print_exc()
                os._exit(code)
            dist.destroy_process_group()

class Watchdog:
    """Ends this process with exit code 4 when nothing progresses for `limit_s`: a collective waits for a dead rank for ever.
    Progress is a beat, or the device reaching the point that was queued at one: the host may be far ahead and then wait."""
    def __init__(self, ranks: Ranks, limit_s: float, last_words: Callable[[str], None]):
        self.ranks, self.limit_s, self.last_words, self.events = ranks, limit_s, last_words, collections.deque()
        self.done, ranks.beat = threading.Event(), self.beat
        self.beat("the start")
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    def beat(self, doing: str, patience: float = 1.0) -> None:
        """This rank goes on, with something that may take `patience` times the limit."""
        self.doing, self.patience, self.idle_s = doing, patience, 0.0
        if self.ranks.device.type == "cuda" and patience == 1:  # not in the warm-up: a query while a graph is captured breaks it
            self.events.append(torch.cuda.Event())
            self.events[-1].record()

    def _work(self) -> None:
        wait_s = min(1.0, self.limit_s / 8)  # counted, so the time in which the process is suspended is none
        while not self.done.wait(wait_s):
            self.idle_s += wait_s
            while self.events and self.events[0].query():
                self.events.popleft()
                self.idle_s = 0.0
            if self.idle_s > (limit_s := self.limit_s * self.patience):
                message = (f"rank {self.ranks.rank}: expected progress within {limit_s:g} s, found none since {self.doing}{self.ranks.lost()}; "
                           "fix: see what the others said first; if the machine is only slow, --stall-limit SECONDS")
                print(f"train_gpt: {message}", file=sys.stderr, flush=True)
                self.last_words(message)
                os._exit(EXIT_HARDWARE)

class Clock:
    """The only reader of time. Runs from the synchronise before the first step to the one after the last, minus named pauses."""
    def __init__(self, device: torch.device):
        self.device = device
        self.origin = time.perf_counter() - process_age_seconds()
        self.intervals: list[dict[str, Any]] = []  # {"on": bool, "reason": str, "start_ms": float, "end_ms": float}

    def since_start(self) -> float:
        """Seconds since the process started; for messages, never for results."""
        return time.perf_counter() - self.origin

    def date(self) -> str:
        """Now, in UTC, to the millisecond: tells in which order runs were made."""
        now = time.time()
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"

    def _switch(self, on: bool | None, reason: str = "") -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = 1e3 * self.since_start()
        if self.intervals and "end_ms" not in self.intervals[-1]:
            self.intervals[-1]["end_ms"] = now
        if on is not None:
            self.intervals.append({"on": on, "reason": reason, "start_ms": now})

    def start(self) -> None:
        self.intervals.clear()
        self._switch(True, "training")

    def pause(self, reason: str) -> None:
        self._switch(False, reason)

    def resume(self) -> None:
        self._switch(True, "training")

    def stop(self) -> None:
        self._switch(None)

    def milliseconds(self) -> float:
        """Time on the clock, up to now if it still runs (then without a synchronise)."""
        now = 1e3 * self.since_start()
        return sum(i.get("end_ms", now) - i["start_ms"] for i in self.intervals if i["on"])

def aligned(size: int) -> int:
    """A multiple of 4 numbers of 4 bytes: compiled code may load 16 bytes at a time."""
    return -(-size // 4) * 4

def process_age_seconds() -> float:
    """Age of this process, interpreter start and imports included; 0 where /proc does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0

def explained(error: BaseException, ranks: Ranks | None) -> Failure | None:
    """The Failure that an error of a file, the device or another rank amounts to; None for a bug or an interruption."""
    code, found = EXIT_HARDWARE, str(error).partition("\n")[0]
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError):
        what, fix, code = "file: expected to be there and to work", "check the path, its permissions and the disk", EXIT_USAGE
    elif isinstance(error, torch.OutOfMemoryError):
        what, fix = "GPU memory: expected enough", "end other programs on this GPU (nvidia-smi)"
    elif isinstance(error, torch.AcceleratorError) or type(error).__name__ == "OutOfResources":  # the latter is Triton's
        what, fix = "GPU: expected to run this", "start again; if it stays, --reference, and test the GPU"
    elif ranks is not None and ranks.world > 1 and (isinstance(error, dist.DistError) or "gloo" in found):
        what, fix = f"other ranks: expected an answer{ranks.lost()}", "see what they said first"
    else:
        return None
    return Failure(f"{what}, found '{found}'; fix: {fix}", code)

def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)

# ======================================================================================================================
# 4. Reference operators: what the fast ones must compute, on any device and in any dtype
# ======================================================================================================================
class Lookup(NamedTuple):
    """The rows of a table that a batch reads, int32: ids [T], and those ids sorted, order [T] and starts [rows + 1], see sort_ids."""
    ids: Tensor
    order: Tensor
    starts: Tensor

class Targets(NamedTuple):
    """What the head has to predict, on the device; all int32 but the weights.

    columns [T]: where in the head the next token is (-1: nowhere). positions [T], to find the tokens after the next in the same document. weights
    [K] float32: of the next token, the one after it, ... candidates [S, P]: ids of the only columns of the head that the S equal parts of the batch
    use (the columns above index these); None: all. certain [S]: so many, the first, are there because they are targets; each of the others, met
    on a walk over the vocabulary, stands for (V - certain) / (P - certain) columns in the softmax."""
    columns: Tensor
    positions: Tensor
    weights: Tensor
    candidates: Tensor | None = None
    certain: Tensor | None = None

    def ahead(self, k: int) -> Tensor:
        """Columns [T] of the token k further than the next, -1 where the document ends before."""
        if k == 0:
            return self.columns
        columns, later = (F.pad(x[k:], (0, min(k, len(x))), value=-1) for x in (self.columns, self.positions))
        return torch.where(later == self.positions + k, columns, -1)

    def parts(self) -> list[tuple[slice, Targets]]:
        """Rows of each part of the batch, and its targets, with candidates [P] and certain [1]."""
        if self.candidates is None:
            return [(slice(None), self)]
        size = len(self.columns) // len(self.candidates)
        rows = [slice(i * size, (i + 1) * size) for i in range(len(self.candidates))]
        return [(r, Targets(self.columns[r], self.positions[r], self.weights, self.candidates[i], self.certain[i:i + 1])) for i, r in enumerate(rows)]

@dataclass(frozen=True)
class Documents:
    """A packed batch of T tokens on the device; every tensor is int32.

    tokens, bigrams: rows of the embedding tables. columns, positions [T], candidates, certain: see Targets; positions count from the first token of
    the document (or of the part of it that this batch holds). cu_seqlens [N + 1]: document borders, padded at the end with T; longest bounds a
    document's length."""
    tokens: Lookup
    bigrams: Lookup
    columns: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    candidates: Tensor | None
    certain: Tensor | None
    longest: int
    range_cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    def ranges(self, window: int, rows: int) -> tuple[Tensor, Tensor]:
        """visible_range of this batch for `rows` queries, a multiple of T; computed once for all layers with the same window."""
        if (window, rows) not in self.range_cache:
            self.range_cache[window, rows] = visible_range(self.borders(rows), window, rows)
        return self.range_cache[window, rows]

    def borders(self, rows: int) -> Tensor:
        return self.cu_seqlens * (rows // len(self.columns))

@dataclass(frozen=True)
class Geometry:
    """What attention needs from the schedule: windows in tokens, softmax scale, rotary tables [positions, head_width / 2]."""
    short_window: int
    long_window: int
    scale: float
    cos: Tensor
    sin: Tensor

    def window(self, kind: str) -> int:
        return self.long_window if kind == "long" else self.short_window

def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. x [T, H, D]; cos, sin [T, D/2]: channel i turns together with channel i + D/2."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

def split_heads_reference(qkv: Tensor, value: Tensor | None, value_gates: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor,
                          paired: bool = False, key_offset: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads, q, k, v [T, H, D], from their projection qkv [T, 3, H, D]: q and k normalised and rotated, v plus the gated value.

    value [T, H * D], value_gates [T, H]; positions [T]; cos, sin [positions, D / 2]. Paired: heads h and h + H / 2 take turns, [2 T, H / 2, D], at
    positions 2 t and 2 t + 1 (record 58). Key offset: the channels of k that do not turn come from the token before, if the document has one:
    induction in a single layer (record 49)."""
    q, k, v = qkv.unbind(1)
    tokens, heads, width = q.shape
    if value is not None:
        v = v + value.view_as(v) * value_gates[:, :, None]
    q, k = norm(q), norm(k)
    if key_offset:  # the channels that do not turn: whether before or after the rotation is the same
        still = torch.arange(width, device=k.device) % (width // 2) >= width // 4
        before = torch.where((positions > 0)[:, None, None], torch.cat([k[:1], k[:-1]]), k)
        k = torch.where(still, before, k)
    if paired:
        q, k, v = (x.reshape(2 * tokens, heads // 2, width) for x in (q, k, v))
        positions = (2 * positions[:, None] + torch.arange(2, device=q.device)).flatten()
    return rotate(q, cos[positions], sin[positions]), rotate(k, cos[positions], sin[positions]), v

def visible_range(cu_seqlens: Tensor, window: int | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Who sees whom, as two int32 [tokens] arrays: query i sees keys first_key[i] ... i, key j is seen by queries j ... last_query[j].

    Documents are cu_seqlens[n] ... cu_seqlens[n + 1] - 1 (int32 [N + 1], from 0 to tokens; empty documents are allowed anywhere, so the end may be
    padded with `tokens`). Inside one, query i sees key j when i - window <= j <= i. Both arrays never decrease: that is all the kernels need to
    know of documents and windows. `window` (>= 0) is an int or an int32 tensor of no dimensions; the host never waits, so the call can be captured
    in a CUDA graph. Compute it once a batch and share it among layers."""
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    next_document = torch.searchsorted(cu_seqlens, position, right=True)
    before = position - cu_seqlens[next_document - 1]
    after = cu_seqlens[next_document] - 1 - position
    return position - before.clamp(max=window), position + after.clamp(max=window)

def attention_reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float, chunk: int = 512) -> Tensor:
    """Plain PyTorch attention: q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv]; masks as in `visible_range`. Any device and dtype.

    Works on `chunk` queries at a time against the keys that their window can reach, so the scores need chunk * (chunk + window) * H."""
    tokens, window = q.size(0), min(int(window), q.size(0))
    first_key, _ = visible_range(cu_seqlens, window, tokens)
    position = torch.arange(tokens, device=q.device)
    outputs = []
    for start in range(0, tokens, chunk):
        rows = slice(start, min(start + chunk, tokens))
        keys = slice(max(start - window, 0), rows.stop)
        seen = (position[keys] >= first_key[rows, None]) & (position[keys] <= position[rows, None])
        heads_first = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
        outputs.append(F.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(outputs)

def relu_squared_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [T, width]; up, down [mlp_width, width]."""
    return F.linear(x, up).relu().square() @ down

class MlpScales(NamedTuple):
    """Static FP8 scales of the MLP, value = fp8 · scale. The ranges: RMS-normed inputs reach sqrt(768) = 27.7 of 28; weights
    3.5; hidden values relu² 1792 and no less than 2^-8, pre-activations of 42 and 0.06; gradients, in e5m2, 56 and 2^-27."""
    input: float = 2.0 ** -4
    weight: float = 2.0 ** -7
    hidden: float = 2.0 ** 2
    grad: float = 2.0 ** -10

class HeadScales(NamedTuple):
    """Static FP8 scales, value = fp8 · scale. The default ranges: RMS-normed x reaches 28 (100 leaves room), weights
    stay under 1.6, and entries of the gradient of a summed loss under softcap / (4 · temperature) = 1."""
    x: float = 100 / 448
    weight: float = 1.6 / 448
    grad: float = 0.75 / 448

def softcapped(logits: Tensor, cap: Softcap) -> Tensor:
    return cap.softcap * torch.sigmoid((logits + cap.shift) / cap.temperature)

def head_loss_reference(x: Tensor, weight: Tensor, targets: Targets, cap: Softcap = Softcap(), chunk_rows: int = 4096) -> Tensor:
    """Weighted sum of the cross-entropies (nats) of softcapped logits, 0-d float32 (float64 for float64 operands).

    x [T, D], weight [V, D]. Every column that is no candidate is left out of the softmax; without candidates all V take part, padding too. Chunks
    are recomputed in the backward, so that only `chunk_rows` rows of logits are ever alive."""
    def chunk_loss(x, weight, stands_for, *columns):
        logits = x @ weight.T
        log_p = (softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap) + stands_for).log_softmax(-1)
        picked = (log_p.gather(1, c.clamp_min(0).long()[:, None])[:, 0] * (c >= 0) for c in columns)
        return -sum(w * p.sum() for w, p in zip(targets.weights.to(log_p.dtype), picked))

    total = 0.0
    for rows, part in targets.parts():
        head, stands_for = weight, weight.new_zeros(())
        if part.candidates is not None:
            head = weight[part.candidates.long()]
            drawn = torch.arange(len(head), device=x.device) >= part.certain
            stands_for = torch.where(drawn, (len(weight) - part.certain) / (len(head) - part.certain).clamp_min(1), 1).log()
        columns = [part.ahead(k).split(chunk_rows) for k in range(len(targets.weights))]
        for chunk in zip(x[rows].split(chunk_rows), *columns):
            arguments = chunk[0], head, stands_for, *chunk[1:]
            total = total + (chunk_loss(*arguments) if len(x) <= chunk_rows else checkpoint(chunk_loss, *arguments, use_reentrant=False))
    return total

def embedding_grad_reference(grad, tokens, vocab_rows, dtype=None):
    """Dense gradient [vocab_rows, D] of `table[tokens]` from grad [T, D]: float32 (or wider) sums, rounded once."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    dense = wide.new_zeros(vocab_rows, grad.shape[1]).index_add_(0, tokens.long(), wide)
    return dense.to(dtype or grad.dtype)

@dataclass(frozen=True)
class OrthogonalizeRecipe:
    """How singular values are driven to 1: scale them into (0, 1], then one odd quintic a s + b s^3 + c s^5 per step.

    scaling: "frobenius" divides by safety * ||X||_F; "aol" scales every row i by (sum_j |G_ij|)^-1/2, G = X X^T, which also bounds the spectral
    norm by 1 but is tighter, and takes no pass over X (arXiv 2208.03160). It changes the polar factor a little: an equaliser of rows, not only a
    normalisation. coefficients: one (a, b, c) per step. safety: room for rounding, since a polynomial explodes above its interval."""
    name: str
    scaling: str
    coefficients: tuple[tuple[float, float, float], ...]
    safety: float = 1.0

# Error = ||X - UV^T||_F / ||UV^T||_F in float64 for gaussian 768 x 3072 | gaussian 768 x 768 | 768 x 3072 with singular
# values log-uniform in 1e-3..1: quintic .163 | .203 | .473, polar-express .096 | .123 | .354, turbo .034 | .094 | .434.
RECIPES = {recipe.name: recipe for recipe in (
    # Muon's first polynomial: steep at 0, never settles at 1 (singular values end in .68..1.20).
    OrthogonalizeRecipe("quintic", "frobenius", ((3.4445, -4.7750, 2.0315),) * 5),
    # Minimax on [1e-3, 1], each step fitted to the interval that the last one leaves (arXiv 2505.16932). Above an
    # input of 1.02 it diverges: keep the safety.
    OrthogonalizeRecipe("polar-express", "frobenius", (
        (8.156554524902461, -22.48329292557795, 15.878769915207462), (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393), (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)), safety=1.02),
    # Turbo-Muon (arXiv 2512.04632), coefficients of flash-newton-schulz. Of the published four-step tables the most
    # accurate on gaussian matrices (.034 | .094; the two of the speedrun's PR #155: .096 | .134 and .111 | .128),
    # and it stays within .94..1.05 from .01 up to 1.1. The later table of that PR gains 9 % on log-uniform spectra
    # but maps 1 to .35 and 1.003 to 0, and AOL does reach 1 on matrices near rank one, as momentum is.
    OrthogonalizeRecipe("turbo", "aol", ((4.6051, -9.6552, 5.6769), (4.7505, -6.0861, 2.1790), (2.7763, -2.3190, 0.5523), (2.4231, -2.2861, 0.8193))),
)}

def frobenius_scale(X: Tensor, safety: float, dtype: torch.dtype) -> Tensor:
    """X / (safety ||X||_F) for each matrix of [..., M, N], cast to dtype last; a zero matrix stays zero.

    The norm is summed in float32 but divides in X's dtype: a common factor of 1 + 2^-9 costs nothing, a float32 copy of X two passes over it."""
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    return (X / (safety * norm).clamp_min(torch.finfo(X.dtype).tiny).to(X.dtype)).to(dtype)

def aol_scale(X: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """diag(s) X and its Gram matrix diag(s) G diag(s), where G = X X^T [..., n, n] and s_i = (sum_j |G_ij|)^-1/2.

    So the Gram of the scaled matrix costs no product. s_i s_j is formed first: it keeps the result exactly symmetric."""
    wide = torch.promote_types(X.dtype, torch.float32)
    s = torch.linalg.vector_norm(G, ord=1, dim=-1, keepdim=True, dtype=wide).clamp_min(torch.finfo(wide).tiny).rsqrt()
    return (X * s).to(X.dtype), (G * (s * s.mT)).to(G.dtype)

def orthogonalize_reference(matrices: Tensor, recipe: OrthogonalizeRecipe) -> Tensor:
    """Near-orthogonal factor U V^T of each U S V^T in [..., M, N]; any device, computed and returned in that dtype."""
    tall = matrices.size(-2) > matrices.size(-1)
    X = matrices.mT if tall else matrices  # a view: from here on rows <= columns, and the Gram matrix is the small one
    if recipe.scaling == "frobenius":
        X = frobenius_scale(X, recipe.safety, X.dtype)
    A = X @ X.mT
    if recipe.scaling == "aol":
        X, A = aol_scale(X, A)
    for step, (a, b, c) in enumerate(recipe.coefficients):
        A = X @ X.mT if step else A
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X

# ======================================================================================================================
# 5. Triton kernels, each with its wrapper
# ======================================================================================================================

# ---- orthogonalisation -----------------------------------------------------------------------------------------------
# All three products of a step are written for wide matrices. A tall X is passed as its transposed view: strides are
# arguments, a stride of 1 is compiled in, so loads stay contiguous along whichever axis is, and X^T X needs no copy.
GPU_MULTIPROCESSORS = 132  # H100 and H200 SXM

def product_tiles(batch: int, rows: int, columns: int, dtype: torch.dtype, symmetric: bool) -> dict:
    """Fixed launch configuration (tile rows, columns, depth; warps, stages) for [batch, rows, columns] outputs.

    Large tiles reuse more of what they load; small ones are for batches that could not fill the GPU otherwise (three 768 x 768 Gram matrices are 63
    large tiles), and for fp32, whose large tiles exceed the shared memory. Gates with a handful of rows get tiny ones: their odd strides rule out
    wide loads, and bigger tiles of scalar loads would spill."""
    if rows <= 32:
        return dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3)
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 128)
    tiles = batch * (tile_rows * (tile_rows + 1) // 2 if symmetric else tile_rows * tile_columns)
    if tiles >= 1.5 * GPU_MULTIPROCESSORS and dtype.itemsize == 2:
        return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)

@jit
def symmetric_product_kernel(X, C, n, k, x_batch, x_row, x_column, c_batch, c_row, c_column, scale, plus,
                             ADD_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """C = scale X X^T, or scale X X^T + plus X (ADD_X: X square and symmetric).

    X [batch, n, k], C [batch, n, n], fp32 accumulation. n (n + BLOCK) k flops a matrix, half of a full product: only tiles on and below the
    diagonal are computed (the grid has no others), then stored twice. Bytes: X once (L2 holds a matrix) + C once. Reference:
    `A = X @ X.mT` and `b * A + c * A @ A` in orthogonalize_reference."""
    tl.static_assert(BLOCK_M == BLOCK_N, "the mirrored tile must be a tile")
    tile = tl.program_id(0)
    # Row i of the triangle starts at tile i (i + 1) / 2, where 8 tile + 1 = (2 i + 1)^2; + 5 stays clear of rounding.
    i = ((tl.sqrt(8.0 * tile + 5.0) - 1.0) * 0.5).to(tl.int32)
    j = tile - i * (i + 1) // 2
    batch = tl.program_id(1).to(tl.int64)
    X += batch * x_batch
    C += batch * c_batch
    rows = i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = j * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(X + rows[:, None] * x_row + depth[None, :] * x_column, (rows[:, None] < n) & (depth[None, :] < k), other=0.0)
        right = tl.load(X + columns[None, :] * x_row + depth[:, None] * x_column, (columns[None, :] < n) & (depth[:, None] < k), other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    accumulator *= scale
    inside = (rows[:, None] < n) & (columns[None, :] < n)
    if ADD_X:
        x = tl.load(X + rows[:, None] * x_row + columns[None, :] * x_column, mask=inside, other=0.0)
        accumulator += plus * x.to(tl.float32)
    if i == j:  # exactly symmetric, whatever the order of summation inside the product
        accumulator = tl.where(rows[:, None] >= columns[None, :], accumulator, tl.trans(accumulator))
    result = accumulator.to(C.dtype.element_ty)
    tl.store(C + rows[:, None] * c_row + columns[None, :] * c_column, result, mask=inside)
    if i != j:
        mirrored = C + columns[:, None] * c_row + rows[None, :] * c_column
        tl.store(mirrored, tl.trans(result), mask=(columns[:, None] < n) & (rows[None, :] < n))

@jit
def add_product_kernel(B, X, Y, n, m, b_batch, b_row, b_column, x_batch, x_row, x_column, y_batch, y_row, y_column, a,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Y = a X + B X.  B [batch, n, n], X and Y [batch, n, m], Y is not X; fp32 accumulation.

    2 n^2 m flops a matrix; bytes: X and Y once, B once. Row tiles of one column panel are neighbours in the grid: that panel of X comes from memory
    once, B stays in L2. Reference: `a * X + B @ X` in orthogonalize_reference."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(n, BLOCK_M)
    batch = tl.program_id(1).to(tl.int64)
    B += batch * b_batch
    X += batch * x_batch
    Y += batch * y_batch
    rows = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(B + rows[:, None] * b_row + depth[None, :] * b_column, (rows[:, None] < n) & (depth[None, :] < n), other=0.0)
        right = tl.load(X + depth[:, None] * x_row + columns[None, :] * x_column, (depth[:, None] < n) & (columns[None, :] < m), other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    inside = (rows[:, None] < n) & (columns[None, :] < m)
    x = tl.load(X + rows[:, None] * x_row + columns[None, :] * x_column, mask=inside, other=0.0)
    accumulator += a * x.to(tl.float32)
    tl.store(Y + rows[:, None] * y_row + columns[None, :] * y_column, accumulator.to(Y.dtype.element_ty), mask=inside)

def symmetric_product(X: Tensor, out: Tensor, scale: float = 1.0, plus: float | None = None, tiles: dict | None = None) -> Tensor:
    """out = scale X X^T [+ plus X, for symmetric X]; X [batch, n, k], out [batch, n, n], any strides. Returns out."""
    batch, n, k = X.shape
    tiles = tiles or product_tiles(batch, n, n, X.dtype, symmetric=True)
    side = -(-n // tiles["BLOCK_M"])
    symmetric_product_kernel[(side * (side + 1) // 2, batch)](X, out, n, k, *X.stride(), *out.stride(), scale, plus or 0.0, ADD_X=plus is not None, **tiles)
    return out

def add_product(B: Tensor, X: Tensor, a: float, out: Tensor, tiles: dict | None = None) -> Tensor:
    """out = a X + B X; B [batch, n, n], X and out [batch, n, m], any strides, out not X. Returns out."""
    batch, n, m = X.shape
    tiles = tiles or product_tiles(batch, n, m, X.dtype, symmetric=False)
    grid = (-(-n // tiles["BLOCK_M"]) * -(-m // tiles["BLOCK_N"]), batch)
    add_product_kernel[grid](B, X, out, n, m, *B.stride(), *X.stride(), *out.stride(), a, **tiles)
    return out

def orthogonalize(matrices: Tensor, recipe: OrthogonalizeRecipe, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Near-orthogonal factor of each matrix of [batch, M, N] (fp32 or bf16), computed and returned in dtype.

    Agrees with orthogonalize_reference up to rounding; the input is left as it is. Three launches a step after the scaling; buffers are taken once
    and swapped; nothing waits for the GPU, so a CUDA graph can capture it. "aol" squares unscaled entries in dtype: bf16 has the range of fp32, but
    in fp16 they must not be tiny."""
    tall = matrices.size(-2) > matrices.size(-1)
    X = matrices.mT if tall else matrices
    n = X.size(1)
    A, P = matrices.new_empty((2, X.size(0), n, n), dtype=dtype)
    if recipe.scaling == "frobenius":
        X = frobenius_scale(X, recipe.safety, dtype)
        symmetric_product(X, out=A)
    else:
        X = X.to(dtype)
        X, A = aol_scale(X, symmetric_product(X, out=A))
    spare = torch.empty_like(X)
    for step, (a, b, c) in enumerate(recipe.coefficients):
        if step:
            symmetric_product(X, out=A)
        symmetric_product(A, out=P, scale=c, plus=b)
        X, spare = add_product(P, X, a, out=spare), X
    return X.mT if tall else X

# ---- attention over packed documents ---------------------------------------------------------------------------------
#     out[i] = sum_j p[i, j] v[j],   p[i, j] = 2^(c q[i].k[j] - lse[i]),   lse[i] = log2 sum_j 2^(c q[i].k[j]),   c = scale log2(e)
#     delta[i] = dout[i].out[i],     ds[i, j] = p[i, j] (dout[i].v[j] - delta[i])
#     dv[j] = sum_i p[i, j] dout[i], dk[j] = scale sum_i ds[i, j] q[i], dq[i] = scale sum_j ds[i, j] k[j]
#
# Tiles lie on the flat token axis, because documents (median 391 tokens) are hardly longer than a tile: one tile may hold many. A program owns
# BLOCK_M tokens of one head and walks over the other side in steps of BLOCK_N tokens, from the first that any of its tokens sees to the last. Mask
# of a step: two comparisons with the monotone bounds of `visible_range`; to skip them where all is visible made the backward 7 % slower. Steps
# start where the range starts, not at a multiple of BLOCK_N: TMA and cp.async do not care, and it saves a step now and then. Of the scores executed
# at 64 x 64 four fifths are visible (49,152 tokens, window 640: 368 of 452 a query); 128 x 128 would execute 538.
#
# A program loads its own tiles through pointers, all at once, and the steps (`*_steps`) through tensor descriptors (TMA), which spare the
# registers of the addresses: 138 instead of 242 for the forward; 255 without spills, two programs a multiprocessor, for the backward.
#
# The backward recomputes p twice (7 products instead of 5) so that every output has one writer: no atomics, bitwise reproducible. One
# launch for all three gradients takes 280 us where two take 306 (mean of ten cells, H200): its programs find each other's operands in L2.
# Bytes moved, with one operand of T H D values as the unit: forward 4, delta 2, gradients 7 (11 without L2).

@jit
def load_rows(x, row, head, stride_t, stride_h, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr = False):
    """Rows row ... row + ROWS - 1 of one head of x [T, H, WIDTH]; zeros past the last token, and past WIDTH up to a power of two."""
    if TMA:
        values = x.load([row, head * WIDTH])
    else:
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
        x += tl.cast(row, tl.int64) * stride_t + tl.cast(head, tl.int64) * stride_h
        values = tl.load(x + rows * stride_t + columns, mask=(row + rows < tokens) & (columns < WIDTH), other=0.0)
    return values

@jit
def store_rows(out, values, row, head, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The opposite of load_rows, for a contiguous tensor; the grid's first dimension counts the heads."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    stride_t = tl.num_programs(0) * WIDTH
    out += tl.cast(row, tl.int64) * stride_t + head * WIDTH
    tl.store(out + rows * stride_t + columns, values.to(out.dtype.element_ty), mask=(row + rows < tokens) & (columns < WIDTH))

@jit
def attention_forward_kernel(
    q, k_steps, v_steps, out, lse, first_key, tokens, scale_log2, q_t, q_h, k_t, k_h, v_t, v_h,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """out and lse of BLOCK_M queries of one head. Grid [heads, tiles]: the heads of a tile run side by side. No running maximum."""
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    query_first = tl.load(first_key + queries, mask=queries < tokens, other=0)
    q_tile = load_rows(q, start, head, q_t, q_h, tokens, DK, BLOCK_M)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, triton.next_power_of_2(DV)], tl.float32)
    for step in tl.range(tl.load(first_key + start), tl.minimum(start + BLOCK_M, tokens), BLOCK_N):
        k_tile = load_rows(k_steps, step, head, k_t, k_h, tokens, DK, BLOCK_N, TMA)
        scores = tl.dot(q_tile, tl.trans(k_tile))
        keys = step + tl.arange(0, BLOCK_N)
        seen = (keys[None, :] >= query_first[:, None]) & (keys[None, :] <= queries[:, None])
        p = tl.exp2(tl.where(seen, scores, float("-inf")) * scale_log2)
        row_sum += tl.sum(p, 1)
        v_tile = load_rows(v_steps, step, head, v_t, v_h, tokens, DV, BLOCK_N, TMA)
        accumulator = tl.dot(p.to(v_tile.dtype), v_tile, accumulator)
    tl.store(lse + head * tokens + queries, tl.log2(row_sum), mask=queries < tokens)
    store_rows(out, accumulator / row_sum[:, None], start, head, tokens, DV, BLOCK_M)

@jit
def attention_delta_kernel(out, dout, delta, tokens, dout_t, dout_h, DV: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta[h, i] = out[i, h] . dout[i, h] for BLOCK_M queries of one head; grid [heads, tiles]."""
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    out_tile = load_rows(out, start, head, tl.num_programs(0) * DV, DV, tokens, DV, BLOCK_M)
    do_tile = load_rows(dout, start, head, dout_t, dout_h, tokens, DV, BLOCK_M)
    tl.store(delta + head * tokens + queries, tl.sum(out_tile.to(tl.float32) * do_tile.to(tl.float32), 1), mask=queries < tokens)

@jit
def attention_backward_kernel(
    q, k, v, dout, q_steps, k_steps, v_steps, dout_steps, lse, delta, dq, dk, dv, first_key, last_query, tokens, scale, scale_log2,
    q_t, q_h, k_t, k_h, v_t, v_h, dout_t, dout_h,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """dk and dv of BLOCK_M keys, or dq of BLOCK_M queries, of one head. Grid [heads, 2, tiles]: the two kinds alternate."""
    head, start = tl.program_id(0), tl.program_id(2) * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, tokens)
    lse += head * tokens
    delta += head * tokens
    if tl.program_id(1) == 0:  # scores are transposed, [keys, queries]: the tensor cores take p and ds, left operands, from registers
        keys = start + tl.arange(0, BLOCK_M)
        key_last = tl.load(last_query + keys, mask=keys < tokens, other=-1)
        k_tile = load_rows(k, start, head, k_t, k_h, tokens, DK, BLOCK_M)
        v_tile = load_rows(v, start, head, v_t, v_h, tokens, DV, BLOCK_M)
        dk_tile = tl.zeros(k_tile.shape, tl.float32)
        dv_tile = tl.zeros(v_tile.shape, tl.float32)
        for step in tl.range(start, tl.load(last_query + stop - 1) + 1, BLOCK_N):
            queries = step + tl.arange(0, BLOCK_N)
            q_tile = load_rows(q_steps, step, head, q_t, q_h, tokens, DK, BLOCK_N, TMA)
            lse_row = tl.load(lse + queries, mask=queries < tokens, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile))
            do_tile = load_rows(dout_steps, step, head, dout_t, dout_h, tokens, DV, BLOCK_N, TMA)
            dp = tl.dot(v_tile, tl.trans(do_tile))
            seen = (queries[None, :] >= keys[:, None]) & (queries[None, :] <= key_last[:, None])
            p = tl.where(seen, tl.exp2(scores * scale_log2 - lse_row[None, :]), 0.0)
            dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, dv_tile)
            delta_row = tl.load(delta + queries, mask=queries < tokens, other=0.0)
            ds = p * (dp - delta_row[None, :])
            dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile)
        store_rows(dk, dk_tile * scale, start, head, tokens, DK, BLOCK_M)
        store_rows(dv, dv_tile, start, head, tokens, DV, BLOCK_M)
    else:
        queries = start + tl.arange(0, BLOCK_M)
        query_first = tl.load(first_key + queries, mask=queries < tokens, other=0)
        lse_column = tl.load(lse + queries, mask=queries < tokens, other=0.0)
        delta_column = tl.load(delta + queries, mask=queries < tokens, other=0.0)
        q_tile = load_rows(q, start, head, q_t, q_h, tokens, DK, BLOCK_M)
        do_tile = load_rows(dout, start, head, dout_t, dout_h, tokens, DV, BLOCK_M)
        dq_tile = tl.zeros(q_tile.shape, tl.float32)
        for step in tl.range(tl.load(first_key + start), stop, BLOCK_N):
            keys = step + tl.arange(0, BLOCK_N)
            k_tile = load_rows(k_steps, step, head, k_t, k_h, tokens, DK, BLOCK_N, TMA)
            scores = tl.dot(q_tile, tl.trans(k_tile))
            v_tile = load_rows(v_steps, step, head, v_t, v_h, tokens, DV, BLOCK_N, TMA)
            dp = tl.dot(do_tile, tl.trans(v_tile))
            seen = (keys[None, :] >= query_first[:, None]) & (keys[None, :] <= queries[:, None])
            p = tl.where(seen, tl.exp2(scores * scale_log2 - lse_column[:, None]), 0.0)
            ds = p * (dp - delta_column[:, None])
            dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile)
        store_rows(dq, dq_tile * scale, start, head, tokens, DK, BLOCK_M)

class Tile(NamedTuple):
    """How an attention kernel is cut: tokens a program owns, tokens a step; warps, pipeline stages; steps through tensor descriptors."""
    own: int
    step: int
    warps: int
    stages: int
    tma: bool = True

    def source(self, x: Tensor) -> Any:
        """What a kernel walks over: x [T, H, D] itself, or a descriptor of it as [T, H * D]."""
        if not self.tma:
            return x
        from triton.tools.tensor_descriptor import TensorDescriptor
        return TensorDescriptor.from_tensor(x.view(x.size(0), -1), [self.step, x.size(2)])

    def launch(self, q: Tensor, v: Tensor) -> dict[str, int]:
        return dict(DK=q.size(2), DV=v.size(2), BLOCK_M=self.own, BLOCK_N=self.step, TMA=self.tma, num_warps=self.warps, num_stages=self.stages)

def attention_tiles(*operands: Tensor) -> tuple[Tile, Tile]:
    """The tiles of forward and backward for [T, H, D] operands. tests/bench_attention.py --sweep ranks others on the GPU at hand.

    Descriptors need Hopper, widths of a power of two, and heads side by side in rows aligned to 16 bytes. Steps through pointers are half as long,
    or the backward would spill and the forward need more shared memory than the consumer GPUs have."""
    device = operands[0].device
    tma = device.type != "cuda" or capability(device) >= (9, 0)  # Triton's interpreter knows descriptors too
    for x in operands:
        (row, head, _), (_, heads, width), size = x.stride(), x.shape, x.element_size()
        tma &= head == width == triton.next_power_of_2(width) and row >= heads * width and row * size % 16 == x.data_ptr() % 16 == 0
    return (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)) if tma else (Tile(64, 32, 4, 2, tma=False),) * 2

def attention_forward(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, tile: Tile) -> tuple[Tensor, Tensor]:
    """-> out [T, H, Dv], contiguous, in v's dtype; lse fp32 [H, T], base 2."""
    tokens, heads, _ = q.shape
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    attention_forward_kernel[heads, triton.cdiv(tokens, tile.own)](
        q, tile.source(k), tile.source(v), out, lse, first_key, tokens, scale * math.log2(math.e),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], **tile.launch(q, v))
    return out, lse

def attention_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, first_key: Tensor, last_query: Tensor,
                       scale: float, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, contiguous, from what attention_forward took and gave."""
    tokens, heads, _ = q.shape
    delta = torch.empty_like(lse)
    attention_delta_kernel[heads, triton.cdiv(tokens, 64)](out, dout, delta, tokens, *dout.stride()[:2], DV=v.size(2), BLOCK_M=64)
    operands = q, k, v, dout
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    attention_backward_kernel[heads, 2, triton.cdiv(tokens, tile.own)](
        *operands, *map(tile.source, operands), lse, delta, dq, dk, dv, first_key, last_query, tokens, scale, scale * math.log2(math.e),
        *(stride for x in operands for stride in x.stride()[:2]), **tile.launch(q, v))
    return dq, dk, dv

class PackedAttention(torch.autograd.Function):
    """Causal attention within packed documents and a sliding window; the result of attention_reference.

    q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv]; bf16 or fp32, widths up to 128, any strides (views of one buffer need no copy). first_key,
    last_query: visible_range, shared by the layers. Neither the documents nor the window recompile anything. The softmax has no running maximum, so
    |scale q.k| must stay below 60: 2^87 is far from the limits of bf16 and fp32. RMS-normed q and k have |q.k| <= Dk; ValueError unless that is
    enough."""
    @staticmethod
    def forward(ctx, q, k, v, first_key, last_query, scale):
        if scale * q.size(2) >= 60:
            raise ValueError(f"attention without running maximum: expected scale * head width < 60, found {scale:g} * {q.size(2)}")
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = attention_forward(q, k, v, first_key, scale, attention_tiles(k, v)[0])
        ctx.save_for_backward(q, k, v, out, lse, first_key, last_query)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, first_key, last_query = ctx.saved_tensors
        dout = dout if dout.stride(2) == 1 else dout.contiguous()  # e.g. the expanded gradient of a sum
        tile = attention_tiles(q, k, v, dout)[1]
        return *attention_backward(q, k, v, out, lse, dout, first_key, last_query, ctx.scale, tile), None, None, None

# ---- from the projection to attention --------------------------------------------------------------------------------
@jit
def _load_halves(in_ptr, rows, valid, stride, D: tl.constexpr):
    """Both halves [ROWS, D / 2] of rows, float32; zeros where not valid."""
    first = in_ptr + rows[:, None].to(tl.int64) * stride + tl.arange(0, D // 2)[None, :]
    return tl.load(first, valid[:, None], other=0.0).to(tl.float32), tl.load(first + D // 2, valid[:, None], other=0.0).to(tl.float32)

@jit
def _store_halves(out_ptr, first, second, rows, valid, stride, D: tl.constexpr):
    out = out_ptr + rows[:, None].to(tl.int64) * stride + tl.arange(0, D // 2)[None, :]
    tl.store(out, first.to(out_ptr.dtype.element_ty), valid[:, None])
    tl.store(out + D // 2, second.to(out_ptr.dtype.element_ty), valid[:, None])

@jit
def _load_normed(in_ptr, rows, valid, stride, D: tl.constexpr):
    """Both halves of RMS-normed rows, and 1 / rms [ROWS, 1]."""
    first, second = _load_halves(in_ptr, rows, valid, stride, D)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + 1e-6)[:, None]
    return first * scale, second * scale, scale

@jit
def _load_turn(cos_ptr, sin_ptr, position, valid, head, H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr):
    if PAIRED:
        position = 2 * position + (head >= H // 2).to(tl.int32)
    angle = position[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    return tl.load(cos_ptr + angle, valid[:, None], other=1.0).to(tl.float32), tl.load(sin_ptr + angle, valid[:, None], other=0.0).to(tl.float32)

@jit
def _split_heads_kernel(qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, T,
                        H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr):
    """q, k [T, H, D] (and v, with a value) of ROWS tokens of one head: 2 bytes read and 2 written an element. Reference: split_heads_reference."""
    head, rows = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = rows < T
    position = tl.load(positions_ptr + rows, valid, other=0)
    cos, sin = _load_turn(cos_ptr, sin_ptr, position, valid, head, H, D, PAIRED)
    qkv_ptr += head * D
    first, second, _ = _load_normed(qkv_ptr, rows, valid, 3 * H * D, D)
    _store_halves(q_ptr + head * D, first * cos + second * sin, second * cos - first * sin, rows, valid, H * D, D)
    first, second, _ = _load_normed(qkv_ptr + H * D, rows, valid, 3 * H * D, D)
    first, second = first * cos + second * sin, second * cos - first * sin
    if OFFSET:
        still = tl.arange(0, D // 2)[None, :] >= D // 4
        before, before2, _ = _load_normed(qkv_ptr + H * D, tl.where(position > 0, rows - 1, rows), valid, 3 * H * D, D)
        first, second = tl.where(still, before, first), tl.where(still, before2, second)
    _store_halves(k_ptr + head * D, first, second, rows, valid, H * D, D)
    if value_ptr is not None:
        first, second = _load_halves(qkv_ptr + 2 * H * D, rows, valid, 3 * H * D, D)
        more, more2 = _load_halves(value_ptr + head * D, rows, valid, H * D, D)
        gate = tl.load(gates_ptr + rows * H + head, valid, other=0.0).to(tl.float32)[:, None]
        _store_halves(v_ptr + head * D, first + gate * more, second + gate * more2, rows, valid, H * D, D)

@jit
def _store_norm_grad(out_ptr, in_ptr, first_grad, second_grad, rows, valid, stride, D: tl.constexpr):
    """Gradient of RMSNorm's input from that of its output."""
    first, second, scale = _load_normed(in_ptr, rows, valid, stride, D)
    mean = ((tl.sum(first_grad * first, 1) + tl.sum(second_grad * second, 1)) / D)[:, None]
    _store_halves(out_ptr, (first_grad - first * mean) * scale, (second_grad - second * mean) * scale, rows, valid, stride, D)

@jit
def _split_heads_grad_kernel(qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr,
                             dqkv_ptr, dvalue_ptr, dgates_ptr, T,
                             H: tl.constexpr, D: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr):
    """dqkv [T, 3, H, D] (and dvalue, dgates) of ROWS tokens of one head; q and k are normalised again rather than kept."""
    head, rows = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = rows < T
    position = tl.load(positions_ptr + rows, valid, other=0)
    cos, sin = _load_turn(cos_ptr, sin_ptr, position, valid, head, H, D, PAIRED)
    qkv_ptr += head * D
    dqkv_ptr += head * D
    first, second = _load_halves(dq_ptr + head * D, rows, valid, H * D, D)
    _store_norm_grad(dqkv_ptr, qkv_ptr, first * cos - second * sin, first * sin + second * cos, rows, valid, 3 * H * D, D)
    first, second = _load_halves(dk_ptr + head * D, rows, valid, H * D, D)
    if OFFSET:  # the still channels of a key are those of the next token
        still = tl.arange(0, D // 2)[None, :] >= D // 4
        last = tl.load(positions_ptr + rows + 1, rows + 1 < T, other=0) == 0
        after, after2 = _load_halves(dk_ptr + head * D, rows + 1, valid & ~last, H * D, D)
        own = (position == 0)[:, None]
        first = tl.where(still, tl.where(own, first, 0.0) + after, first)
        second = tl.where(still, tl.where(own, second, 0.0) + after2, second)
    _store_norm_grad(dqkv_ptr + H * D, qkv_ptr + H * D, first * cos - second * sin, first * sin + second * cos, rows, valid, 3 * H * D, D)
    first, second = _load_halves(dv_ptr + head * D, rows, valid, H * D, D)
    _store_halves(dqkv_ptr + 2 * H * D, first, second, rows, valid, 3 * H * D, D)
    if value_ptr is not None:
        more, more2 = _load_halves(value_ptr + head * D, rows, valid, H * D, D)
        gate = tl.load(gates_ptr + rows * H + head, valid, other=0.0).to(tl.float32)[:, None]
        _store_halves(dvalue_ptr + head * D, gate * first, gate * second, rows, valid, H * D, D)
        dgate = tl.sum(first * more, 1) + tl.sum(second * more2, 1)
        tl.store(dgates_ptr + rows * H + head, dgate.to(dgates_ptr.dtype.element_ty), valid)

class SplitHeads(torch.autograd.Function):
    """split_heads_reference in one kernel each way; inductor's code for it took eight times the time that the bytes need."""
    @staticmethod
    def launch(kernel, qkv, *arguments, paired, key_offset):
        T, _, H, D = qkv.shape
        kernel[(H, triton.cdiv(T, 32))](qkv, *arguments, T, H=H, D=D, PAIRED=paired, OFFSET=key_offset, ROWS=32, num_warps=4)

    @staticmethod
    def forward(ctx, qkv, value, value_gates, positions, cos, sin, paired=False, key_offset=False):
        qkv, (T, _, H, D) = qkv.contiguous(), qkv.shape
        q, k = (qkv.new_empty(T, H, D) for _ in range(2))
        v = qkv[:, 2] if value is None else torch.empty_like(q)
        value, value_gates = (None if x is None else x.contiguous() for x in (value, value_gates))
        SplitHeads.launch(_split_heads_kernel, qkv, value, value_gates, positions, cos, sin, q, k, v, paired=paired, key_offset=key_offset)
        ctx.save_for_backward(qkv, value, value_gates, positions, cos, sin)
        ctx.flags = dict(paired=paired, key_offset=key_offset)
        return tuple(x.reshape(2 * T, H // 2, D) if paired else x for x in (q, k, v))

    @staticmethod
    def backward(ctx, *grads):
        qkv, value, value_gates, *_ = saved = ctx.saved_tensors
        dqkv, dvalue, dgates = (None if x is None else torch.empty_like(x) for x in (qkv, value, value_gates))
        SplitHeads.launch(_split_heads_grad_kernel, *saved, *(g.contiguous() for g in grads), dqkv, dvalue, dgates, **ctx.flags)
        return dqkv, dvalue, dgates, *(None,) * 5

# ---- head and loss ---------------------------------------------------------------------------------------------------
@jit
def _softcap_sigmoid(logits, shift, temperature, FAST: tl.constexpr):
    """s = σ((logit + shift) / temperature) in float32. FAST is the hardware tanh: one special-function instruction
    instead of two, relative error 2^-11, a quarter of the rounding of the bf16 logit it is made from. With the exp2 of
    the softmax it halves the load on the unit that otherwise, not memory, would bound the forward kernel."""
    half = logits.to(tl.float32) * (0.5 / temperature) + shift * (0.5 / temperature)
    if FAST:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
        return 0.5 + 0.5 * tanh
    else:
        return 1.0 / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * half))

@jit
def _store_transposed(out_ptr, tile, rows, cols, R, C):
    """The tile of a [R, C] matrix into out [C, R]; with one-byte elements 128 rows make whole 128-byte lines of the store."""
    tl.store(out_ptr + cols[:, None].to(tl.int64) * R + rows[None, :], tl.trans(tile), (cols < C)[:, None] & (rows < R)[None, :])

@jit
def _quantize_kernel(in_ptr, out_ptr, out_t_ptr, R, C, inverse_scale, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out = in * inverse_scale, saturated at +-LIMIT, [R, C] in out's dtype; out_t [C, R] the same, if there is one."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    offsets = rows[:, None].to(tl.int64) * C + cols[None, :]
    tile = tl.load(in_ptr + offsets, inside, other=0.0).to(tl.float32) * inverse_scale
    tile = tl.clamp(tile, -LIMIT, LIMIT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, tile, inside)
    if out_t_ptr is not None:
        _store_transposed(out_t_ptr, tile, rows, cols, R, C)

@jit
def _transpose_kernel(in_ptr, out_ptr, R, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [C, R] = in [R, C] transposed."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tile = tl.load(in_ptr + rows[:, None].to(tl.int64) * C + cols[None, :], (rows < R)[:, None] & (cols < C)[None, :], other=0)
    _store_transposed(out_ptr, tile, rows, cols, R, C)

@jit
def _target_column(columns_ptr, positions_ptr, rows, T, AHEAD: tl.constexpr):
    """Targets.ahead in a kernel: the column of the token AHEAD further than the next, -1 for none."""
    inside = rows + AHEAD < T
    column = tl.load(columns_ptr + rows + AHEAD, inside, other=-1)
    if AHEAD > 0:
        position = tl.load(positions_ptr + rows, inside, other=0)
        column = tl.where(tl.load(positions_ptr + rows + AHEAD, inside, other=-1) == position + AHEAD, column, -1)
    return column

@jit
def _drawn_weight(certain_ptr, cols, V, vocabulary):
    """How many columns of the vocabulary each column stands for, see Targets; no pointer: 1."""
    if certain_ptr is None:
        return tl.full(cols.shape, 1.0, tl.float32)
    else:
        certain = tl.load(certain_ptr)
        return tl.where(cols < certain, 1.0, (vocabulary - certain) / tl.maximum(V - certain, 1).to(tl.float32))

@jit
def _row_loss_kernel(logits_ptr, columns_ptr, positions_ptr, weights_ptr, certain_ptr, loss_ptr, lse_ptr, T, V, vocabulary,
                     softcap, shift, temperature, K: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """loss = Σ_k w_k (lse - z[target k]), lse = softcap + ln Σ exp(z - softcap), z = softcap · s(logit); one program a row.
    Reads 2V bytes a row, once: 100 KB at V = 50304. Reference: head_loss_reference."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    bits = softcap * 1.4426950408889634  # the softcap in units of log 2
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + cols, cols < V, other=0.0)
        s = _softcap_sigmoid(logits, shift, temperature, FAST)
        total += tl.where(cols < V, tl.exp2(bits * s - bits) * _drawn_weight(certain_ptr, cols, V, vocabulary), 0.0)
    lse = softcap + tl.log(tl.sum(total, axis=0))
    loss = 0.0
    for k in tl.static_range(K):
        column = _target_column(columns_ptr, positions_ptr, row, T, k)
        picked = tl.load(logits_ptr + tl.maximum(column, 0))
        z = softcap * _softcap_sigmoid(picked, shift, temperature, FAST)
        loss += tl.where(column >= 0, tl.load(weights_ptr + k) * (lse - z), 0.0)
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)

@jit
def _head_grad_kernel(logits_ptr, columns_ptr, positions_ptr, weights_ptr, certain_ptr, lse_ptr, factor_ptr, out_ptr, T, V, vocabulary,
                      softcap, shift, temperature, K: tl.constexpr, FAST: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """d loss / d logit = Σ_k w_k (exp(z - lse) - 1[column = target k]) · s (1 - s) · softcap / temperature, times *factor.
    Per logit 2 bytes are read and 1 (FP8) or 2 (bf16) written. Reference: head_loss_reference."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (rows < T)[:, None] & (cols < V)[None, :]
    offsets = rows[:, None].to(tl.int64) * V + cols[None, :]
    lse = tl.load(lse_ptr + rows, rows < T, other=0.0)
    s = _softcap_sigmoid(tl.load(logits_ptr + offsets, inside, other=0.0), shift, temperature, FAST)
    probability = tl.exp2(softcap * 1.4426950408889634 * s - (lse * 1.4426950408889634)[:, None])
    probability *= _drawn_weight(certain_ptr, cols, V, vocabulary)[None, :]
    weight_sum, hits = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for k in tl.static_range(K):
        column = _target_column(columns_ptr, positions_ptr, rows, T, k)
        weight = tl.load(weights_ptr + k)
        weight_sum += tl.where(column >= 0, weight, 0.0)
        hits += tl.where(cols[None, :] == column[:, None], weight, 0.0)
    slope = softcap / temperature * tl.load(factor_ptr)
    grad = tl.clamp((weight_sum[:, None] * probability - hits) * (s * (slope - slope * s)), -LIMIT, LIMIT)
    tl.store(out_ptr + offsets, grad.to(out_ptr.dtype.element_ty), inside)

def _tiles(rows, cols, shape):
    return triton.cdiv(cols, shape["COLS"]), triton.cdiv(rows, shape["ROWS"])

def transposed(matrix):
    """A contiguous transposed copy [C, R] of a contiguous matrix [R, C].

    For the head's gradient a kernel of its own: Triton 3.6 computes every element once for each layout that is stored, and those with their two
    exponentials are dear (16,384 tokens: 1.31 ms at once against 1.03); where elements are cheap, one kernel stores both."""
    R, C = matrix.shape
    out, shape = matrix.new_empty(C, R), dict(ROWS=128, COLS=128)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[matrix.element_size()]
    _transpose_kernel[_tiles(R, C, shape)](matrix.view(bits), out.view(bits), R, C, **shape, num_warps=8)
    return out

def quantize(tensor, scale, dtype=torch.float8_e4m3fn):
    """FP8 copy of a matrix / scale, contiguous and saturated."""
    R, C = tensor.shape
    out, shape = tensor.new_empty(R, C, dtype=dtype), dict(ROWS=8, COLS=512)
    _quantize_kernel[_tiles(R, C, shape)](tensor.contiguous(), out, None, R, C, 1.0 / scale, LIMIT=torch.finfo(dtype).max, **shape, num_warps=4)
    return out

def quantize_both(tensor, scale, dtype=torch.float8_e4m3fn):
    """FP8 copies of tensor / scale in both layouts, contiguous: [R, C] and [C, R]."""
    R, C = tensor.shape
    out, out_t, shape = tensor.new_empty(R, C, dtype=dtype), tensor.new_empty(C, R, dtype=dtype), dict(ROWS=128, COLS=64)
    _quantize_kernel[_tiles(R, C, shape)](tensor.contiguous(), out, out_t, R, C, 1.0 / scale, LIMIT=torch.finfo(dtype).max, **shape, num_warps=8)
    return out, out_t

@functools.cache
def unit(scale, device):
    """A scale on the device, 0-d float32, with storage of its own: cuBLAS refuses one that is not 16-byte aligned. Made once, by the
    warm-up: a fill for each product was a twentieth of all launches."""
    return torch.full((), scale, device=device)

def row_losses(logits, targets, vocabulary, cap, fast=False):
    """(losses, log-sum-exp), both [T] float32, of contiguous logits [T, V]. `fast`: hardware tanh, bf16 on CUDA."""
    T, V = logits.shape
    losses, lse = (logits.new_empty(T, dtype=torch.float32) for _ in range(2))
    _row_loss_kernel[(T,)](logits, *targets[:3], targets.certain, losses, lse, T, V, vocabulary, *cap, K=len(targets.weights), FAST=fast,
                           BLOCK=2048, num_warps=4)
    return losses, lse

def head_grad(logits, targets, vocabulary, lse, factor, cap, dtype, fast=False):
    """Gradient [T, V], of `dtype` and saturated, of the summed loss with respect to the logits, times factor (0-d float32 tensor)."""
    T, V = logits.shape
    out, shape = logits.new_empty(T, V, dtype=dtype), dict(ROWS=8, COLS=512)
    _head_grad_kernel[_tiles(T, V, shape)](logits, *targets[:3], targets.certain, lse, factor, out, T, V, vocabulary, *cap, K=len(targets.weights), FAST=fast,
                                           LIMIT=torch.finfo(dtype).max, **shape, num_warps=4)
    return out

def fp8_matmul_nt(a, b, scale_a, scale_b, fast_accum):
    """a [M, K] times b [N, K] transposed, bf16 [M, N]: both row-major, the layout FP8 tensor cores want.

    Scales are numbers or 0-d float32 tensors."""
    scale_a, scale_b = (scale if isinstance(scale, Tensor) else unit(scale, a.device) for scale in (scale_a, scale_b))
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast_accum)

class HeadLoss(torch.autograd.Function):
    """head_loss_reference in kernels: `HeadLoss.apply(x, weight, *targets, cap, scales)`; x [T, D] and weight [V, D] bf16.

    With `scales` the products are FP8: T, D, V and the number of candidates multiples of 16; forward e4m3 · e4m3, backward e5m2 · e4m3 without fast
    accumulation, which has been reported to turn gradients into NaN; dx and dW are bf16. The peak is the bf16 logits and the gradient in both
    layouts, 4 bytes a logit. Without, everything is in the operands' own dtype: the path of GPUs without FP8."""
    @staticmethod
    def forward(ctx, x, weight, columns, positions, weights, candidates, certain, cap=Softcap(), scales=None):
        ctx.targets, ctx.cap, ctx.scales, ctx.shape = Targets(columns, positions, weights, candidates, certain), cap, scales, weight.shape
        if scales:
            weight = quantize(weight, scales.weight)
        saved, total = [], 0.0
        for rows, part in ctx.targets.parts():
            ids, head = part.candidates, weight
            if scales:
                head = weight if ids is None else weight.view(torch.int8)[ids].view(weight.dtype)
                x8, x8_t = quantize_both(x[rows], scales.x)
                logits = fp8_matmul_nt(x8, head, scales.x, scales.weight, fast_accum=True)
                operands = x8_t, transposed(head)
            else:
                head = weight if ids is None else weight[ids]
                logits, operands = x[rows] @ head.T, (x[rows], head)
            losses, lse = row_losses(logits, part, len(weight), cap, fast=scales is not None and logits.is_cuda)
            saved += [*operands, logits, lse]
            total = total + losses.sum()
        ctx.save_for_backward(*saved)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        cap, scales, saved = ctx.cap, ctx.scales, iter(ctx.saved_tensors)
        dxs, dw = [], None
        for rows, part in ctx.targets.parts():
            x, head, logits, lse = (next(saved) for _ in range(4))
            if scales:
                grad = head_grad(logits, part, ctx.shape[0], lse, unit(1.0 / scales.grad, lse.device), cap, torch.float8_e5m2, fast=logits.is_cuda)
                g_scale = grad_output.float() * scales.grad  # the incoming gradient rides on the scale: no sync, no pass
                dxs.append(fp8_matmul_nt(grad, head, g_scale, scales.weight, fast_accum=False))
                dw_part = fp8_matmul_nt(transposed(grad), x, g_scale, scales.x, fast_accum=False)
            else:
                grad = head_grad(logits, part, ctx.shape[0], lse, grad_output.float(), cap, logits.dtype)
                dxs.append(grad @ head)
                dw_part = grad.T @ x
            if part.candidates is None:
                dw = dw_part
            else:
                dw = dw_part.new_zeros(ctx.shape) if dw is None else dw
                dw.index_add_(0, part.candidates, dw_part)  # the ids of a part differ, so the order of summation is fixed
        return (dxs[0] if len(dxs) == 1 else torch.cat(dxs)), dw, *(None,) * 7

@torch.no_grad()
def head_loss_eval(x, weight, columns, cap=Softcap(), chunk_rows=8192):
    """Summed loss without FP8 or approximate functions, 0-d float64; 0.8 GB of bf16 logits alive at the default."""
    one = x.new_ones(1, dtype=torch.float32)
    return sum(row_losses(rows @ weight.T, Targets(picks, picks, one), len(weight), cap)[0].sum(dtype=torch.float64)
               for rows, picks in zip(x.split(chunk_rows), columns.split(chunk_rows)))

# ---- MLP -------------------------------------------------------------------------------------------------------------
@jit
def _relu_squared_kernel(pre_ptr, hidden_ptr, size, inverse_scale, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """hidden = relu(pre)² · inverse_scale, saturated: 2 bytes read and 1 written an element. Reference: relu_squared_mlp."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.maximum(tl.load(pre_ptr + offsets, offsets < size, other=0.0).to(tl.float32), 0.0)
    hidden = tl.minimum(positive * positive * inverse_scale, LIMIT)
    tl.store(hidden_ptr + offsets, hidden.to(hidden_ptr.dtype.element_ty), offsets < size)

@jit
def _relu_squared_grad_kernel(dhidden_ptr, hidden_ptr, dpre_ptr, size, hidden_scale, inverse_scale, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """dpre = dhidden · 2 sqrt(hidden · hidden_scale) · inverse_scale, saturated: 3 bytes read and 1 written an element.
    The root stands for relu(pre), which need not be kept: an error of 2^-5 at most, beside 2^-3 of dpre's own rounding."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    positive = tl.sqrt(tl.load(hidden_ptr + offsets, offsets < size, other=0.0).to(tl.float32) * hidden_scale)
    dhidden = tl.load(dhidden_ptr + offsets, offsets < size, other=0.0).to(tl.float32)
    dpre = tl.clamp(dhidden * (2.0 * inverse_scale) * positive, -LIMIT, LIMIT)
    tl.store(dpre_ptr + offsets, dpre.to(dpre_ptr.dtype.element_ty), offsets < size)

def flat_fp8(kernel, dtype, tensors, *scales):
    """What an elementwise kernel makes of contiguous tensors of one shape and its scales, in `dtype`."""
    out, size = tensors[0].new_empty(*tensors[0].shape, dtype=dtype), tensors[0].numel()
    kernel[(triton.cdiv(size, 2048),)](*tensors, out, size, *scales, LIMIT=torch.finfo(dtype).max, BLOCK=2048)
    return out

class Fp8Mlp(torch.autograd.Function):
    """relu_squared_mlp with FP8 matrix products: `Fp8Mlp.apply(h, up, down, scales)`.

    h [T, D] RMS-normed, up and down [H, D], all bf16; T, D and H multiples of 16. Forward e4m3 · e4m3, backward e5m2 · e4m3 without fast
    accumulation, results bf16. What takes part in two products needs two layouts: they sum over contiguous rows."""
    @staticmethod
    def forward(ctx, h, up, down, scales=MlpScales()):
        (h8, h8_t), (up8, up8_t), (down8, down8_t) = map(quantize_both, (h, up, down), (scales.input, scales.weight, scales.weight))
        pre = fp8_matmul_nt(h8, up8, scales.input, scales.weight, fast_accum=True)
        hidden8, ctx.scales = flat_fp8(_relu_squared_kernel, torch.float8_e4m3fn, [pre], 1.0 / scales.hidden), scales
        ctx.save_for_backward(h8_t, hidden8, up8_t, down8)
        return fp8_matmul_nt(hidden8, down8_t, scales.hidden, scales.weight, fast_accum=True)

    @staticmethod
    def backward(ctx, grad_output):
        (h8_t, hidden8, up8_t, down8), scales = ctx.saved_tensors, ctx.scales
        g8, g8_t = quantize_both(grad_output, scales.grad, torch.float8_e5m2)
        dhidden = fp8_matmul_nt(g8, down8, scales.grad, scales.weight, fast_accum=False)
        # Not with both transposed copies from one kernel, a fifth faster: Triton 3.6 stores wrong ones in most forms of it (records/LOG.md).
        dpre8 = flat_fp8(_relu_squared_grad_kernel, torch.float8_e5m2, [dhidden, hidden8], scales.hidden, 1.0 / scales.grad)
        dh = fp8_matmul_nt(dpre8, up8_t, scales.grad, scales.weight, fast_accum=False)
        dup = fp8_matmul_nt(transposed(dpre8), h8_t, scales.grad, scales.input, fast_accum=False)
        ddown = fp8_matmul_nt(transposed(hidden8), g8_t, scales.hidden, scales.grad, fast_accum=False)
        return dh, dup, ddown, None

def fp8_mlp(h, up, down):
    """Fp8Mlp in training; validation computes what the reference computes, as head_loss_eval does."""
    return Fp8Mlp.apply(h, up, down) if torch.is_grad_enabled() else relu_squared_mlp(h, up, down)

# ---- embedding gradient ----------------------------------------------------------------------------------------------
RUN = 32  # sorted positions summed by one program; a token's ragged ends are then at most 2 · (RUN - 1) rows

def sort_ids(ids, rows):
    """Positions of `ids` (NumPy, below rows) grouped by id: what embedding_grad reads, made by the loader.

    Returns (order, starts), int32 [T] and [rows + 1]: id v stands at positions order[starts[v]:starts[v + 1]], ascending. 16-bit keys make NumPy's
    stable sort a radix sort: 65536 tokens take half a millisecond on the host, where torch's embedding backward would sort them again on the GPU
    for every table."""
    low = np.argsort(ids.astype(np.uint16), kind="stable")  # the sort of the low 16 bits, then of the rest if there are any
    order = low if rows <= 1 << 16 else low[np.argsort((ids[low] >> 16).astype(np.uint16), kind="stable")]
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(ids, minlength=rows), out=starts[1:])
    return order.astype(np.int32), starts

@jit
def _sum_rows(in_ptr, order_ptr, begin, end, D, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Σ in[order[i]] over begin <= i < end in float32 (order None: the rows themselves), always in the same order."""
    cols = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = rows < end
        if order_ptr is not None:
            rows = tl.load(order_ptr + rows, valid, other=0)
        offsets = rows[:, None].to(tl.int64) * D + cols[None, :]
        tile = tl.load(in_ptr + offsets, valid[:, None] & (cols < D)[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    return total

@jit
def _run_sum_kernel(grad_ptr, tokens_ptr, order_ptr, partial_ptr, D, RUN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """partial[r] = Σ of the gradient rows of run r, the sorted positions r·RUN ... r·RUN + RUN - 1, if all hold one
    id; other runs are never read. The comma's thousands of rows are spread over the GPU this way."""
    begin = tl.program_id(0) * RUN
    first = tl.load(tokens_ptr + tl.load(order_ptr + begin))
    last = tl.load(tokens_ptr + tl.load(order_ptr + begin + RUN - 1))
    if first == last:
        total = _sum_rows(grad_ptr, order_ptr, begin, begin + RUN, D, ROWS, BLOCK_D)
        cols = tl.arange(0, BLOCK_D)
        tl.store(partial_ptr + begin // RUN * D + cols, total, cols < D)

@jit
def _embedding_grad_kernel(grad_ptr, order_ptr, starts_ptr, partial_ptr, dense_ptr, D,
                           RUN: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr):
    """dense[v] = rows before the first whole run of id v + its whole runs + rows after the last; zeros without rows. ADD: += instead.
    One program an id, so every element is written once: no atomics, no memset. Reference: embedding_grad_reference."""
    token = tl.program_id(0)
    begin, end = tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)
    first_run, last_run = tl.cdiv(begin, RUN), end // RUN  # last is exclusive; none when first >= last
    head_end = tl.minimum(first_run * RUN, end)
    tail_begin = tl.maximum(last_run * RUN, head_end)
    total = _sum_rows(grad_ptr, order_ptr, begin, head_end, D, ROWS, BLOCK_D)
    total += _sum_rows(partial_ptr, None, first_run, last_run, D, ROWS, BLOCK_D)
    total += _sum_rows(grad_ptr, order_ptr, tail_begin, end, D, ROWS, BLOCK_D)
    cols = tl.arange(0, BLOCK_D)
    dense_ptr, inside = dense_ptr + token.to(tl.int64) * D, cols < D
    if ADD:
        inside &= begin < end  # rows without a gradient are not touched
        total += tl.load(dense_ptr + cols, inside, other=0.0).to(tl.float32)
    tl.store(dense_ptr + cols, total.to(dense_ptr.dtype.element_ty), inside)

def embedding_grad(grad, tokens, order, starts, dense, add=False):
    """Write (or add) the gradient of `table[tokens]` into dense [V, D] from grad [T, D], in a fixed order of summation: bitwise repeatable.

    `order` and `starts` are sort_ids' on the device. Moves 2TD + 2VD bytes in bf16: 178 MB at T = 65536, D = 768. Returns dense."""
    (T, D), grad = grad.shape, grad.contiguous()
    partial = grad.new_empty(max(T // RUN, 1), D, dtype=torch.float32)
    shape = dict(RUN=RUN, ROWS=4, BLOCK_D=triton.next_power_of_2(D), num_warps=2)
    if T >= RUN:
        _run_sum_kernel[(T // RUN,)](grad, tokens, order, partial, D, **shape)
    _embedding_grad_kernel[(len(dense),)](grad, order, starts, partial, dense, D, ADD=add, **shape)
    return dense

@dataclass
class DirectGradient:
    """Set as a table's `direct`: EmbeddingLookup then writes the gradient where the optimizer keeps it, parameter.grad, and tells autograd of none;
    the parameter's hooks are called all the same, after the last lookup of a backward pass. Through autograd it would be written, added to zeros and
    read again: five passes over a mostly empty table."""
    begun: bool = False  # .grad holds a part of the sum already; else it is overwritten
    used: bool = False  # once written to, so overwritten in the next step: nothing else need clear it

class EmbeddingLookup(torch.autograd.Function):
    """`EmbeddingLookup.apply(table, *lookup)`: table[ids], [T, D] of a [V, D] table; one Lookup serves all tables of the same ids."""
    @staticmethod
    def forward(ctx, table, tokens, order, starts):
        ctx.save_for_backward(tokens, order, starts)
        ctx.table, ctx.direct = table, getattr(table, "direct", None)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx, grad):
        direct = ctx.direct
        if direct is None:
            return embedding_grad(grad, *ctx.saved_tensors, torch.empty_like(ctx.table)), None, None, None
        embedding_grad(grad, *ctx.saved_tensors, ctx.table.grad, add=direct.begun)
        direct.begun = direct.used = True
        return (None,) * 4

# ======================================================================================================================
# 6. Operator selection
# ======================================================================================================================
@dataclass(frozen=True)
class Ops:
    """The operators of this run; the model never asks what hardware it is on."""
    attention: Callable[[Tensor, Tensor, Tensor, Documents, int, float], Tensor]
    head_loss: Callable[[Tensor, Tensor, Targets, Softcap], Tensor]
    head_loss_eval: Callable[[Tensor, Tensor, Tensor, Softcap], Tensor]
    embed: Callable[[Tensor, Lookup], Tensor]
    split_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    mlp: Callable[[Tensor, Tensor, Tensor], Tensor]
    orthogonalize: Callable[[Tensor, OrthogonalizeRecipe], Tensor]
    compile: Callable[[Callable], Callable]
    graphs: bool  # whole steps as CUDA graphs
    names: dict[str, str]

def compile_dynamic(function: Callable) -> Callable:
    """torch.compile with the leading dimension of the first argument (tokens, matrices, elements) symbolic, in whichever
    arguments have it: one compilation serves every stage and every shard."""
    compiled = torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*args):
        leading = args[0].shape[0]
        for tensor in args:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and tensor.ndim and tensor.shape[0] == leading:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args)
    return call

def select_ops(device: torch.device, fast: bool = True, compile: bool = True, fp8: Sequence[str] = ("head", "mlp"), graphs: bool = True) -> Ops:
    """The fastest operators that this device and installation support; `names` tells which, for the log."""
    def eager(function):
        return function

    if not fast or device.type != "cuda" or triton is None:
        return Ops(
            attention=lambda q, k, v, documents, window, scale: attention_reference(q, k, v, documents.borders(len(q)), window, scale),
            split_heads=split_heads_reference, mlp=relu_squared_mlp, head_loss=head_loss_reference, orthogonalize=orthogonalize_reference,
            head_loss_eval=lambda x, weight, columns, cap: head_loss_reference(x, weight, Targets(columns, columns, x.new_ones(1)), cap).double(),
            embed=lambda table, lookup: F.embedding(lookup.ids, table), compile=eager, graphs=False,
            names={name: "reference" for name in ("attention", "head", "mlp", "embedding", "orthogonalize")} | {"compile": "off", "graphs": "off"})
    head, mlp = ("fp8" if part in fp8 and capability(device) >= (8, 9) else "bf16" for part in ("head", "mlp"))
    region, scales = compile_dynamic if compile else eager, HeadScales() if head == "fp8" else None
    if compile:
        torch._dynamo.config.recompile_limit = 64  # regions x (attention variants, gradients on or off)
    return Ops(
        attention=lambda q, k, v, documents, window, scale: PackedAttention.apply(q, k, v, *documents.ranges(window, len(q)), scale),
        split_heads=SplitHeads.apply, mlp=fp8_mlp if mlp == "fp8" else region(relu_squared_mlp), orthogonalize=orthogonalize,
        head_loss=lambda x, weight, targets, cap: HeadLoss.apply(x, weight, *targets, cap, scales), head_loss_eval=head_loss_eval,
        embed=lambda table, lookup: EmbeddingLookup.apply(table, *lookup), compile=region, graphs=graphs,
        names={"attention": "triton", "head": head, "mlp": mlp, "embedding": "triton", "orthogonalize": "triton",
               "compile": "inductor" if compile else "off", "graphs": "cuda" if graphs else "off"})

# ======================================================================================================================
# 7. Optimizer: NorMuon for the hidden matrices, Adam for the rest, both sharded over the ranks
# ======================================================================================================================

# Three kinds of state with the same phases: gather_ (collect what the other ranks last updated, asynchronous; `arrive` waits for it), reduce_
# (average gradients over ranks, asynchronous) and compute_ (wait, update this rank's shard, clear the gradient). Parameters and their gradients
# live in a few static buffers, of which the model's parameters are views, so a phase is one large call.
def rehome(parameters: list[nn.Parameter], weights: Tensor, grads: Tensor, align: int = 1) -> None:
    """Move the parameters into the flat order of `weights`, each at a multiple of `align`; their .grad become views of `grads`."""
    weights, grads, start = weights.view(-1), grads.view(-1), 0
    for parameter in parameters:
        part = slice(start, start + parameter.numel())
        weights[part].copy_(parameter.detach().view(-1))
        parameter.data = weights[part].view_as(parameter)
        parameter.grad = grads[part].view_as(parameter)
        start += -(-parameter.numel() // align) * align

def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """The float32 whose rounding to bfloat16 is `high` and whose remaining bits, a signed difference, are `low` (int16)."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)

def split_float32(value: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of join_float32. Rounds half up in magnitude, so the bfloat16 weights are not biased towards zero."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)

def nesterov_momentum(grad: Tensor, buffer: Tensor, momentum: Tensor) -> Tensor:
    """Update `buffer` (float32) in place and return the look-ahead gradient in the gradient's dtype."""
    g = grad.float()
    average = buffer + (1 - momentum) * (g - buffer)
    buffer.copy_(average)
    return (g + momentum * (average - g)).to(grad.dtype)

def normuon_update(update: Tensor, weight: Tensor, low: Tensor | None, second_moment: Tensor | None, multiplier: Tensor,
                   rate: Tensor, decay: float, beta2: float | None) -> None:
    """Apply orthogonalised updates [N, rows, columns] to the weights in place.

    NorMuon divides by a running root mean square per output (rows, or columns where a matrix is wide) and restores each matrix's norm; without
    `second_moment` this is Muon. The cautious decay shrinks weights only where the update does too. Sources: NorMuon arXiv 2510.05491; public
    records 41-43 and 48."""
    update = update.float()
    if second_moment is not None:
        axis = -1 if update.size(-2) >= update.size(-1) else -2
        square = update.square().mean(axis, keepdim=True)
        average = second_moment + (1 - beta2) * (square - second_moment)
        second_moment.copy_(average)
        scale = average.clamp_min(1e-10).rsqrt()
        other = -3 - axis  # the axis that is left sums to the matrix
        norm_ratio = (square.sum(other, keepdim=True) / (square * scale.square()).sum(other, keepdim=True).clamp_min(1e-30)).sqrt()
        update = update * (scale * norm_ratio)
    value = weight if low is None else join_float32(weight, low)
    step = rate * multiplier
    shrink = (update * value >= 0) * (decay * rate * step)
    value = value - value * shrink - update * step
    if low is None:
        weight.copy_(value)
    else:
        high, rest = split_float32(value)
        weight.copy_(high)
        low.copy_(rest)

def adam_update(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step_size: Tensor, shrink: Tensor,
                beta1: float, beta2: float, epsilon: float) -> None:
    """One Adam step in place on flat tensors, computed in float32; `step_size` carries rate and bias corrections.

    The decay, a share `shrink` of the weight, is cautious: only where the update shrinks the weight too (record 50)."""
    g = grad.float()
    m, v = torch.lerp(mean.float(), g, 1 - beta1), torch.lerp(square.float(), g * g, 1 - beta2)
    mean.copy_(m)
    square.copy_(v)
    update, value = step_size * m / (v.sqrt() + epsilon), weight.float()
    weight.copy_(value - update - shrink * value * (update * value > 0))

class Stateful:
    """Optimizer state by name; `kept` says which attributes belong to it."""
    kept: tuple[str, ...] = ("weights", "grads", "mean", "square")

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for name in self.kept if (tensor := getattr(self, name)) is not None}

    def reset(self) -> None:
        for name, tensor in self.state().items():
            if name != "weights":
                tensor.zero_()

    def gathered(self) -> None:
        """Overlaid by the wait of a gather that is under way."""

    def gather_(self) -> None:
        self.gathered = self.ranks.all_gather(self.weights)

    def arrive(self) -> None:
        self.gathered()
        vars(self).pop("gathered", None)

class MatrixBank(Stateful):
    """All hidden matrices of one shape: [N, rows, columns], N padded with zero matrices to a multiple of the slots."""
    kept = ("weights", "grads", "low", "momentum", "second_moment")

    def __init__(self, parameters: list[nn.Parameter], rules: dict[str, MuonRule], config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.ops, self.config = ranks, ops, config
        rows, columns = parameters[0].matrix
        counts = [p.numel() // (rows * columns) for p in parameters]
        matrices = -(-sum(counts) // SLOTS) * SLOTS
        self.weights = torch.zeros(matrices, rows, columns, dtype=parameters[0].dtype, device=ranks.device)
        self.grads = torch.zeros_like(self.weights)
        rehome(parameters, self.weights, self.grads)
        self.shard, self.grad_shard = ranks.shard(self.weights), ranks.shard(self.grads)
        self.low = torch.zeros_like(self.shard, dtype=torch.int16) if self.weights.dtype == torch.bfloat16 else None
        self.momentum = torch.zeros_like(self.shard, dtype=torch.float32)
        reduced = (rows, 1) if rows >= columns else (1, columns)
        self.second_moment = None if config.second_moment_decay is None else torch.zeros(len(self.shard), *reduced, device=ranks.device)
        multipliers = [rules[p.role].learning_rate_multiplier for p, count in zip(parameters, counts) for _ in range(count)]
        multipliers += [0.0] * (matrices - len(multipliers))
        self.multiplier = ranks.shard(torch.tensor(multipliers, device=ranks.device)[:, None, None]).clone()
        self.recipe = RECIPES[config.orthogonalization]
        self.nesterov, self.update = ops.compile(nesterov_momentum), ops.compile(normuon_update)

    def reduce_(self) -> None:
        self.reduced = self.ranks.reduce_scatter_mean(self.grads)

    def compute_(self, rates: dict[str, Tensor]) -> None:
        self.reduced()
        update = self.nesterov(self.grad_shard, self.momentum, rates["momentum"])
        self.grads.zero_()
        update = self.ops.orthogonalize(update, self.recipe)
        self.update(update, self.shard, self.low, self.second_moment, self.multiplier, rates["muon"],
                    self.config.muon_weight_decay, self.config.second_moment_decay)

class AdamTable(Stateful):
    """One large table [rows, width], each rank updating a slice of its rows. Its gradient leaves from a backward hook. The moments have the
    weights' dtype: bfloat16's 2^-9 is small beside the 5 % by which a step moves them, and an update moves 14 bytes a weight, not 22."""
    def __init__(self, parameter: nn.Parameter, rule: AdamRule, config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.config, self.rule, self.role = ranks, config, rule, parameter.role
        self.weights, self.grads, self.direct = parameter.data, torch.zeros_like(parameter), DirectGradient()
        parameter.grad = self.grads
        self.shard, self.grad_shard = ranks.shard(self.weights).view(-1), ranks.shard(self.grads).view(-1)
        self.mean, self.square = torch.zeros_like(self.shard), torch.zeros_like(self.shard)
        self.update = ops.compile(adam_update)

    def reduce_(self) -> None:
        with torch.profiler.record_function(f"reduce {self.role}"):
            self.reduced = self.ranks.reduce_scatter_mean(self.grads)

    def compute_(self, rates: dict[str, Tensor]) -> None:
        self.reduced()
        self.update(self.shard, self.grad_shard, self.mean, self.square, rates[self.role], rates[f"{self.role} decay"],
                    *self.rule.betas, self.config.adam_epsilon)
        if not self.direct.used:  # else the next gradient overwrites this one
            self.grads.zero_()

class AdamScalars(Stateful):
    """Every small parameter in one flat float32 buffer, updated alike on every rank: one all-reduce, nothing to gather."""
    def __init__(self, parameters: list[nn.Parameter], rules: dict[str, AdamRule], config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.config, self.rules = ranks, config, rules
        parameters = sorted(parameters, key=lambda p: p.role)  # each role becomes one contiguous part; the sort is stable
        # Compiled code takes it for granted, without a check, that parameters are aligned as they were when it was compiled (perhaps by
        # another process that filled the cache): so all are.
        size = {p: aligned(p.numel()) for p in parameters}
        self.weights = torch.zeros(sum(size.values()), device=ranks.device)
        self.grads, self.mean, self.square = (torch.zeros_like(self.weights) for _ in range(3))
        rehome(parameters, self.weights, self.grads, align=aligned(1))
        self.parts, start = {}, 0
        for role in dict.fromkeys(p.role for p in parameters):
            stop = start + sum(size[p] for p in parameters if p.role == role)
            self.parts[role], start = slice(start, stop), stop
        self.update = ops.compile(adam_update)

    def reduce_(self) -> None:
        self.reduced = self.ranks.all_reduce_mean(self.grads)

    def compute_(self, rates: dict[str, Tensor]) -> None:
        self.reduced()
        for role, part in self.parts.items():
            self.update(self.weights[part], self.grads[part], self.mean[part], self.square[part], rates[role], rates[f"{role} decay"],
                        *self.rules[role].betas, self.config.adam_epsilon)
        self.grads.zero_()

class Optimizer:
    """Owns the storage of every parameter and decides when each gradient leaves.

    Order of a step: the ranks gather what the last step updated, and the model waits for a table only where it reads it; tables reduce
    from hooks while the backward pass (of the last micro-batch) still runs; after it the rest reduces, and Adam's updates hide that. The tables
    that the next step reads before any matrix are gathered at once, behind the updates of the matrices."""
    def __init__(self, model: nn.Module, config: OptimizerConfig, ranks: Ranks, ops: Ops):
        rules = dict(config.rules)
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        tables, scalars = [], []
        for parameter in model.parameters():
            rule = rules[parameter.role]
            if isinstance(rule, MuonRule):
                by_shape.setdefault(parameter.matrix, []).append(parameter)
            else:
                (tables if rule.sharded else scalars).append(parameter)
        self.banks = [MatrixBank(parameters, rules, config, ranks, ops) for parameters in by_shape.values()]
        self.scalars = AdamScalars(scalars, rules, config, ranks, ops)
        self.tables = [AdamTable(parameter, rules[parameter.role], config, ranks, ops) for parameter in tables]
        owners = dict(zip(tables, self.tables)) | {p: bank for bank, group in zip(self.banks, by_shape.values()) for p in group}
        gathering = list(dict.fromkeys(owners[p] for p in model.in_order() if p in owners))
        first = next((at for at, item in enumerate(gathering) if item in self.banks), 0)
        self.early, self.late = gathering[:first], gathering[first:]
        for parameter, owner in owners.items():
            parameter.arrive = owner.arrive
        for parameter, table in zip(tables, self.tables):
            parameter.register_post_accumulate_grad_hook(lambda _, table=table: self._table_ready(table))
            parameter.direct = table.direct
        self.complete, self.left = False, []  # whether the next backward pass completes the gradients; the tables whose have left

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        self.complete, self.left = False, []
        for table in self.tables:
            table.direct.begun = False
        for item in self.late:
            item.gather_()

    def gather(self) -> None:
        """Every rank has all weights: before anything but a training step reads them."""
        for item in self.late:
            item.gather_()
            item.arrive()

    def _table_ready(self, table: AdamTable) -> None:
        if self.complete:
            table.reduce_()
            self.left.append(table)

    @torch.no_grad()
    def step(self, rates: dict[str, Tensor]) -> None:
        """Update everything; `rates` holds 0-dimensional tensors, see step_rates."""
        rest = [self.scalars, *self.banks]
        for item in self.late:
            item.arrive()  # a table that no layer reads: nothing may stay under way
        for item in rest:
            item.reduce_()
        for item in self.left:  # in the order in which the reductions left
            item.compute_(rates)
        for item in self.early:
            item.gather_()
        for item in rest:
            item.compute_(rates)
        for item in self.early:
            item.arrive()

    def reset(self) -> None:
        for item in (*self.banks, self.scalars, *self.tables):
            item.reset()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, the model's parameters included."""
        items = {"scalars": self.scalars, **{f"bank{i}": b for i, b in enumerate(self.banks)}, **{f"table{i}": t for i, t in enumerate(self.tables)}}
        return {f"{name}.{key}": tensor for name, item in items.items() for key, tensor in item.state().items()}

# ======================================================================================================================
# 8. Model
# ======================================================================================================================

# Plain functions of tensors, compiled as regions. Equal layers share one compilation, gradients become ready between
# regions (so hooks fire during the backward pass), and attention runs between them with its window as a run-time value.
def smear_and_norm(x: Tensor, positions: Tensor, gate: Tensor, smear: Tensor) -> Tensor:
    """Add a gated copy of the previous token's embedding within the document, then normalise. x [T, width]; gate [inputs]."""
    previous = torch.cat([torch.zeros_like(x[:1]), x[:-1]]) * (positions > 0)[:, None]
    amount = smear * torch.sigmoid((x[:, :len(gate)] * gate).sum(-1, keepdim=True))
    return norm(x + amount.to(x.dtype) * previous)

def enter_layer(x: Tensor, x0: Tensor, bigram: Tensor | None, skip: Tensor | None, skip_weight: Tensor | None, residual: Tensor) -> Tensor:
    """Residual stream at the start of a layer: the U-Net skip, then a mix with the normalised embedding x0 and that of the token pair."""
    if skip is not None:
        x = x + torch.sigmoid(skip_weight) * skip
    x = residual[0] * x + residual[1] * x0
    return x if bigram is None else x + residual[2] * F.pad(bigram, (0, x.size(1) - bigram.size(1)))

def attention_in(x: Tensor, x0: Tensor, bigram: Tensor | None, skip: Tensor | None, value: Tensor | None, skip_weight: Tensor | None,
                 residual: Tensor, scales: Tensor, qkv: Tensor, gate: Tensor, value_gate: Tensor | None):
    """Up to the projection: residual stream [T, width], qkv [T, 3, H, D], gates [T, H] of the heads' outputs and of the value embedding.

    scales[0] multiplies the weight instead of V (q and k are normalised anyway): 2304 rows instead of T (record 47)."""
    x = enter_layer(x, x0, bigram, skip, skip_weight, residual)
    h = norm(x)
    heads, inputs = gate.shape
    gates, value_gates = torch.sigmoid(F.linear(h[:, :inputs], gate.to(h.dtype))), None
    if value is not None:
        mixed = torch.cat([h[:, :inputs // 2], value[:, :inputs // 2].detach()], dim=1)  # no gradient: it would cost a pass over all of value
        value_gates = 2 * torch.sigmoid(F.linear(mixed, value_gate.to(h.dtype)))
    return x, F.linear(h, scales[0] * qkv).view(len(x), 3, heads, -1), gates, value_gates

def attention_out(x: Tensor, y: Tensor, v: Tensor | None, gates: Tensor, share: Tensor | None, scales: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Exclusive part, sparse gates, output projection, residual: the stream, and normalised for the MLP.

    y [T, H, D]; v [T, H, D] if `share` [H] of what is along it is taken out."""
    if share is not None:
        along = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(1e-8)
        y = y - (torch.tanh(share).to(y.dtype)[:, None] * along) * v
    x = x + F.linear((y * gates[:, :, None]).flatten(1), scales[1] * out)
    return x, norm(x)

def mlp_in(x: Tensor, x0: Tensor, bigram: Tensor | None, skip: Tensor | None, skip_weight: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A layer without attention up to its MLP: the stream, and normalised."""
    x = enter_layer(x, x0, bigram, skip, skip_weight, residual)
    return x, norm(x)

def leave_network(x: Tensor, backout: Tensor | None, amount: Tensor | None) -> Tensor:
    """Subtract what an earlier layer wrote for its successors but not for the head (record 40), then normalise."""
    return norm(x if backout is None else x - amount * backout)

def arrived(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, once the other ranks' parts of its last update are here."""
    if wait := getattr(parameter, "arrive", None):
        wait()
    return parameter

def declared(role: str, tensor: Tensor, matrix: tuple[int, int] | None = None) -> nn.Parameter:
    """A parameter with its role (a key of OptimizerConfig.rules) and, for Muon, the shape of the matrices it stacks."""
    parameter = nn.Parameter(tensor)
    parameter.role, parameter.matrix = role, matrix
    return parameter

class Block(nn.Module):
    """The parameters of one layer and the order of its regions."""
    def __init__(self, layer: Layer, config: ModelConfig, empty: Callable[..., Tensor], ops: Ops):
        super().__init__()
        self.layer, self.ops = layer, ops
        width, attention_width = config.width, config.heads * config.head_width
        self.residual = declared("scalar", empty(3, dtype=torch.float32))  # of the stream, x0, the token pair
        self.skip_weight = declared("scalar", empty((), dtype=torch.float32)) if layer.skip_from is not None else None
        if layer.attention:
            self.qkv = declared("attention", empty(3 * attention_width, width), (attention_width, width))
            self.out = declared("attention", empty(width, attention_width), (width, attention_width))
            self.scales = declared("scalar", empty(2, dtype=torch.float32))
            self.gate = declared("gate", empty(config.heads, config.gate_inputs, dtype=torch.float32))
            gated = layer.value_embedding is not None
            self.value_gate = declared("gate", empty(config.heads, config.gate_inputs, dtype=torch.float32)) if gated else None
            self.share = declared("gate", empty(config.heads, dtype=torch.float32)) if layer.exclusive else None
        if layer.mlp:
            self.up = declared("mlp_up", empty(config.mlp_width, width), (config.mlp_width, width))
            self.down = declared("mlp_down", empty(config.mlp_width, width), (config.mlp_width, width))
        self.attention_in = ops.compile(attention_in)
        self.attention_out, self.mlp_in = ops.compile(attention_out), ops.compile(mlp_in)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.residual.copy_(torch.tensor([1.1, 0.0, 0.1]))
        if self.skip_weight is not None:
            self.skip_weight.fill_(-1.5)
        if self.layer.attention:
            bound = math.sqrt(3) * 0.5 * self.qkv.size(1) ** -0.5
            self.qkv.uniform_(-bound, bound, generator=generator)
            self.out.zero_()
            self.scales.copy_(torch.tensor([0.5, 1.0]))
            for gate in (self.gate, self.value_gate, self.share):
                if gate is not None:
                    gate.zero_()
        if self.layer.mlp:
            bound = math.sqrt(3) * 0.5 * self.up.size(1) ** -0.5
            self.up.uniform_(-bound, bound, generator=generator)
            self.down.zero_()

    def forward(self, x: Tensor, x0: Tensor, bigram: Tensor | None, skip: Tensor | None, value: Tensor | None, documents: Documents,
                geometry: Geometry) -> Tensor:
        layer = self.layer
        if layer.attention:
            x, qkv, gates, value_gates = self.attention_in(x, x0, bigram, skip, value, self.skip_weight, self.residual, self.scales, self.qkv,
                                                           self.gate, self.value_gate)
            q, k, v = self.ops.split_heads(qkv, value, value_gates, documents.positions, geometry.cos, geometry.sin, layer.paired, layer.key_offset)
            y = self.ops.attention(q, k, v, documents, geometry.window(layer.window), geometry.scale).view_as(qkv[:, 0])
            x, h = self.attention_out(x, y, v.view_as(y) if layer.exclusive else None, gates, self.share, self.scales, self.out)
        else:
            x, h = self.mlp_in(x, x0, bigram, skip, self.skip_weight, self.residual)
        return x + self.ops.mlp(h, self.up, self.down) if layer.mlp else x

class GPT(nn.Module):
    """The language model. `forward` returns the summed cross-entropy (nats) of a packed batch."""
    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device):
        super().__init__()
        self.config, self.ops = config, ops
        empty = functools.partial(torch.empty, device=device)
        weight = functools.partial(empty, dtype=getattr(torch, config.dtype))
        table = functools.partial(weight, config.padded_vocabulary, config.width)
        self.embedding = declared("embedding", table())
        self.bigram = declared("bigram", weight(config.bigram_rows, config.bigram_width)) if config.bigram_rows else None
        self.smear_gate = declared("smear_gate", empty(config.gate_inputs))
        self.smear = declared("scalar", empty(()))
        def matrix(*shape, dtype=None):
            return weight(*shape) if dtype is None else empty(*shape, dtype=dtype)
        # An empty slot keeps its number, not its parameters.
        self.skip_sources = {layer.skip_from for layer in config.layers}
        self.blocks = nn.ModuleDict({str(slot): Block(layer, config, matrix, ops)
                                     for slot, layer in enumerate(config.layers) if layer.attention or layer.mlp})
        self.value_embeddings = nn.ParameterList([declared("value_embedding", table()) for _ in range(config.value_embeddings)])
        self.backout = declared("scalar", empty(())) if any(layer.backout for layer in config.layers) else None
        self.head = declared("head", table())
        self.smear_and_norm, self.leave_network = ops.compile(smear_and_norm), ops.compile(leave_network)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw the initial weights: the same on every rank."""
        generator = torch.Generator(self.head.device).manual_seed(seed)
        self.embedding.normal_(generator=generator)
        for parameter in self.value_embeddings:
            parameter.normal_(std=0.01, generator=generator)
        for block in self.blocks.values():
            block.reset(generator)
        for parameter in (self.smear_gate, self.smear, self.bigram):
            if parameter is not None:
                parameter.zero_()
        self.head.normal_(std=0.005, generator=generator)
        if self.backout is not None:
            self.backout.fill_(0.5)

    def in_order(self) -> list[nn.Parameter | None]:
        """The large parameters, as the forward pass comes to them."""
        return [self.embedding, self.bigram, *self.blocks.parameters(), *self.value_embeddings, self.head]

    def features(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Final hidden states [T, width], normalised, ready for the head."""
        bigram = None if self.bigram is None else self.ops.embed(arrived(self.bigram), documents.bigrams)
        x = x0 = self.smear_and_norm(self.ops.embed(arrived(self.embedding), documents.tokens), documents.positions, self.smear_gate, self.smear)
        for parameter in self.blocks.parameters():
            arrived(parameter)
        skips: dict[int | None, Tensor | None] = {None: None}
        backout = None
        for slot, block in self.blocks.items():
            layer = block.layer
            # Looked up here, not beforehand: autograd goes back in this order, and the table's gradient leaves while earlier layers still work.
            table = None if layer.value_embedding is None else arrived(self.value_embeddings[layer.value_embedding])
            value = None if table is None else self.ops.embed(table, documents.tokens)
            x = block(x, x0, bigram, skips[layer.skip_from], value, documents, geometry)
            if int(slot) in self.skip_sources:
                skips[int(slot)] = x
            if layer.backout:
                backout = x
        return self.leave_network(x, backout, self.backout)

    def forward(self, documents: Documents, geometry: Geometry, target_weights: Tensor) -> Tensor:
        targets = Targets(documents.columns, documents.positions, target_weights, documents.candidates, documents.certain)
        return self.ops.head_loss(self.features(documents, geometry), arrived(self.head), targets, self.config.softcap)

    @torch.no_grad()
    def evaluate(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Summed cross-entropy without gradients, full vocabulary, float32 log-probabilities."""
        return self.ops.head_loss_eval(self.features(documents, geometry), self.head, documents.columns, self.config.softcap)

# ======================================================================================================================
# 9. Data
# ======================================================================================================================
def open_shard(path: Path, vocabulary: int) -> np.ndarray:
    """Memory-map the tokens (uint16) of one shard after checking header, size and content against data/README.md."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256:
        fail(f"{path}: header", f"{SHARD_HEADER_BYTES} bytes", f"{size} bytes", "fetch this file again")
    if header[0] != SHARD_MAGIC:
        fail(f"{path}: magic number", SHARD_MAGIC, header[0], "fetch this file again")
    if header[1] != SHARD_VERSION:
        fail(f"{path}: version", SHARD_VERSION, header[1], "fetch the llm.c version 1 shards")
    count = int(header[2])
    if count < 1 or size != SHARD_HEADER_BYTES + 2 * count:
        fail(f"{path}: size of {count} tokens", f"{SHARD_HEADER_BYTES + 2 * max(count, 0)} bytes", f"{size} bytes", "fetch this file again")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(count,))
    if (largest := int(tokens.max())) >= vocabulary:
        fail(f"{path}: largest token", f"below {vocabulary}", largest, "tokenise with the GPT-2 vocabulary")
    return tokens

def find_shards(folder: Path, kind: str) -> list[Path]:
    paths = sorted(folder.glob(f"*_{kind}_*.bin"))
    if not paths:
        fail(f"{kind} shards", f"{folder}/*_{kind}_*.bin", "none", "python data/fineweb.py fetch (or --data FOLDER, or --preset smoke)")
    return paths

class TokenStream:
    """The training shards as one stream of tokens, from its first BOS on. `borders`: where its documents start."""
    def __init__(self, folder: Path, tokens_wanted: int, vocabulary: int):
        self.paths, self.shards, borders, length = [], [], [], 0
        for path in find_shards(folder, "train"):
            self.paths.append(path)
            self.shards.append(open_shard(path, vocabulary))
            borders.append(length + np.flatnonzero(np.asarray(self.shards[-1]) == BOS))
            length += len(self.shards[-1])
            if not len(borders[-1]):
                fail(f"{path}: documents", f"token {BOS} before each", "none", "tokenise with data/fineweb.py")
            if length >= tokens_wanted:
                break
        self.borders, self.length = np.concatenate(borders), length
        self.offsets = np.cumsum([0, *map(len, self.shards)]).tolist()
        self.files = [path.open("rb", buffering=0) for path in self.paths]

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start ... start + count - 1, across shards."""
        parts = []
        for path, file, first, stop in zip(self.paths, self.files, self.offsets, self.offsets[1:]):
            begin, wanted = max(start, first) - first, min(start + count, stop) - max(start, first)
            if wanted <= 0:
                continue
            # Not through the memory map: a file that was cut since it was checked would kill the process by a signal.
            raw = os.pread(file.fileno(), 2 * wanted, SHARD_HEADER_BYTES + 2 * begin)
            if len(raw) != 2 * wanted:
                fail(f"{path}: reading at token {begin:,}", f"{wanted:,} tokens as when it was checked", "its end", "fetch this file again")
            parts.append(np.frombuffer(raw, dtype="<u2"))
        return np.concatenate(parts)

    def consumed(self, stages: tuple[Stage, ...]) -> int:
        return int(self.borders[0]) + sum(stage.steps * stage.batch_tokens for stage in stages)

    def slot_starts(self, stages: tuple[Stage, ...]) -> list[np.ndarray]:
        """For each stage, the first token [steps, SLOTS] of each slot: they follow each other without a gap. Fails if tokens run out."""
        if (needed := self.consumed(stages) + 1) > self.length:  # the last target is one further
            fail("training tokens", f"{needed:,} for the schedule", f"{self.length:,} in {len(self.paths)} shards",
                 "python data/fineweb.py fetch --shards N with a larger N")
        return [self.consumed(stages[:index]) + stage.slot_tokens * np.arange(stage.steps * SLOTS).reshape(-1, SLOTS)
                for index, stage in enumerate(stages)]

def cut_documents(tokens: np.ndarray, cap: int) -> list[np.ndarray]:
    """Pieces of a stretch of tokens, cut before each BOS and after `cap` tokens; each carries its one following token."""
    bounds = [0, *(np.flatnonzero(tokens[1:-1] == BOS) + 1).tolist(), len(tokens) - 1]
    return [tokens[start:min(start + cap, stop) + 1] for first, stop in zip(bounds, bounds[1:]) for start in range(first, stop, cap)]

def sample_candidates(targets: np.ndarray, count: int, vocabulary: int, sweep: int) -> tuple[np.ndarray, int, np.ndarray]:
    """A sampled softmax: (ids [count], how many of them are targets, column of each target), see Targets.

    After the ids that are targets, ascending, comes the sweep-th stretch of a walk over the vocabulary in steps of 20011, which meets every id. A
    target that finds no room gets -1."""
    present = np.zeros(vocabulary, bool)
    present[targets] = True
    walk = (np.arange(vocabulary) + sweep * count) * 20011 % vocabulary
    certain = np.flatnonzero(present)[:count]
    ids = np.concatenate([certain, walk[~present[walk]][:count - len(certain)]])
    column = np.full(vocabulary, -1)
    column[certain] = np.arange(len(certain))
    return ids, len(certain), column[targets]

def hash_bigrams(tokens: np.ndarray, positions: np.ndarray, rows: int) -> np.ndarray:
    """Row of each token and the one before it, hashed; the last row where a document starts. Constants of public record 62."""
    wide = tokens.astype(np.int64)
    pair = (36313 * wide ^ 27191 * np.concatenate([wide[:1], wide[:-1]])) % (rows - 1)
    return np.where(positions == 0, rows - 1, pair)

@dataclass(frozen=True)
class HostBatch:
    """A micro-batch on the host: one int32 array, pinned for the GPU, and where its parts lie."""
    data: Tensor
    sizes: tuple[int, ...]
    longest: int
    candidates: int | None
    digest: int  # of the tokens, keyed by step and slot

    def to(self, device: torch.device) -> Documents:
        return self.views(self.data.to(device, non_blocking=True))

    def views(self, data: Tensor) -> Documents:
        """The parts of `data`, a copy on some device."""
        starts = np.cumsum([0, *map(aligned, self.sizes)])
        parts = [data[start:start + size] for start, size in zip(starts, self.sizes)]
        sampled = (parts[9].view(-1, self.candidates), parts[10]) if self.candidates else (None, None)
        return Documents(Lookup(*parts[:3]), Lookup(*parts[3:6]), *parts[6:9], *sampled, self.longest)

def pack(slots: dict[int, list[np.ndarray]], borders: int, longest: int, model: ModelConfig, pin: bool, candidates: int | None = None,
         digest: int = 0) -> HostBatch:
    """Pack the pieces of numbered slots, one slot after the other, into the layout of HostBatch; `borders` bounds the number of pieces."""
    pieces = [piece for slot in slots.values() for piece in slot]
    if len(pieces) > borders:
        raise AssertionError(f"{len(pieces)} documents in a batch planned for {borders}")
    lengths = np.array([len(piece) - 1 for piece in pieces])
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    tokens = np.concatenate([piece[:-1] for piece in pieces])
    positions = np.arange(total) - np.repeat(ends - lengths, lengths)
    cu_seqlens = np.concatenate([[0], ends, np.full(borders - len(ends), total)])
    columns, ids, certain = [np.concatenate([piece[1:] for piece in slot]) for slot in slots.values()], (), ()
    if candidates:
        ids, certain, columns = zip(*(sample_candidates(c, candidates, model.padded_vocabulary, number) for number, c in zip(slots, columns)))
    bigrams = ()
    if model.bigram_rows:
        pairs = hash_bigrams(tokens, positions, model.bigram_rows)
        bigrams = (pairs, *sort_ids(pairs, model.bigram_rows))
    parts = (tokens, *sort_ids(tokens, model.padded_vocabulary), *(bigrams or ((),) * 3), np.concatenate(columns), positions, cu_seqlens,
             np.concatenate([*ids, ()]), certain)
    data = torch.zeros(sum(aligned(len(part)) for part in parts), dtype=torch.int32, pin_memory=pin)
    view, start = data.numpy(), 0
    for part in parts:
        view[start:start + len(part)] = part
        start += aligned(len(part))
    return HostBatch(data, tuple(map(len, parts)), longest, candidates, digest)

def slot_digest(number: int, tokens: np.ndarray) -> int:
    """64 bits that name the tokens of one slot; a run's token hash is their sum, whatever rank held which slot."""
    digest = hashlib.blake2b(f"{number}:".encode(), digest_size=8)
    digest.update(tokens.astype("<u2").tobytes())
    return int.from_bytes(digest.digest(), "little")

def padded_borders(documents: int) -> int:
    return -(-documents // 32) * 32

def training_batches(stream: TokenStream, stages: tuple[Stage, ...], micro_slots: dict[Stage, int], borders: dict[Stage, int],
                     model: ModelConfig, ranks: Ranks) -> Iterator[HostBatch]:
    """This rank's micro-batches of the whole schedule: slots rank, rank + world, ... of each step, micro_slots at a time."""
    pin, number = ranks.device.type == "cuda", 0
    for stage, steps in zip(stages, stream.slot_starts(stages)):
        for starts in steps:
            mine = range(ranks.rank, SLOTS, ranks.world)
            for at in range(0, len(mine), micro_slots[stage]):
                tokens = {number + slot: stream.read(starts[slot], stage.slot_tokens + 1) for slot in mine[at:at + micro_slots[stage]]}
                digest = sum(slot_digest(*item) for item in tokens.items())
                slots = {slot: cut_documents(part, stage.document_cap_tokens) for slot, part in tokens.items()}
                yield pack(slots, borders[stage], stage.document_cap_tokens, model, pin, stage.candidates, digest)
            number += SLOTS

def generated_pieces(tokens: int, cap: int, seed: int) -> list[np.ndarray]:
    """Random documents of log-normal lengths (median 400, mean 690) for warm-up: no training data before the clock."""
    random, pieces, room = np.random.default_rng(seed), [], tokens
    while room:
        length = min(room, int(np.clip(random.lognormal(5.99, 1.04), 32, cap)))
        pieces.append(random.integers(0, BOS, length + 1, dtype=np.uint16))
        pieces[-1][0] = BOS
        room -= length
    return pieces

def validation_windows(path: Path, tokens: int, window: int, vocabulary: int) -> list[list[np.ndarray]]:
    """The first `tokens` tokens as contiguous windows, each cut into documents at its BOS tokens. Every token is a target once."""
    stream = open_shard(path, vocabulary)
    if len(stream) < tokens + 1:
        fail(f"{path}: validation tokens", f"at least {tokens + 1:,}", f"{len(stream):,}", "fetch this file again")
    return [cut_documents(np.asarray(stream[begin:min(begin + window, tokens) + 1]), window) for begin in range(0, tokens, window)]

class Prefetcher:
    """Runs an iterator in a thread, a few items ahead, and raises the thread's error where the items are used."""
    def __init__(self, items: Iterator, depth: int = 8):
        self.queue: queue.Queue = queue.Queue(depth)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._work, args=(items,), name="prefetch", daemon=True)
        self.thread.start()

    def _put(self, item: Any) -> bool:
        while not self.stopping.is_set():
            try:
                self.queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _work(self, items: Iterator) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            self._put(StopIteration())
        except BaseException as error:  # handed over, not swallowed
            self._put(error)

    def __next__(self) -> Any:
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self.stopping.set()
        self.thread.join(timeout=5)

# ======================================================================================================================
# 10. Schedule: pure functions of the step
# ======================================================================================================================
def stage_index(preset: Preset, step: int) -> int:
    for index, stage in enumerate(preset.stages):
        if step < stage.steps:
            return index
        step -= stage.steps
    raise IndexError("step beyond the schedule")

def learning_rate(preset: Preset, step: int) -> float:
    """Relative rate: the stage's multiplier, then a linear cool-down to the final rate, which the extension keeps."""
    config, stage = preset.optimizer, preset.stages[stage_index(preset, step)]
    if stage.extension:
        return config.final_learning_rate
    left = (1 - step / preset.scheduled_steps) / config.cooldown_fraction
    return stage.learning_rate_multiplier if left >= 1 else stage.learning_rate_multiplier * left + config.final_learning_rate * (1 - left)

def muon_momentum(preset: Preset, step: int) -> float:
    """Low while gradients still turn quickly (start) and while they are averaged anyway (end)."""
    config = preset.optimizer
    low, high = config.muon_momentum
    warm = min(step / config.momentum_warmup_steps, 1.0)
    cool = min((preset.steps - step) / config.momentum_cooldown_steps, 1.0)
    return low + (high - low) * min(warm, cool)

def step_rates(preset: Preset, step: int) -> dict[str, float]:
    """Everything an optimizer step reads: Muon's rate and momentum, and Adam's step size by role, bias corrections included."""
    config, scale = preset.optimizer, learning_rate(preset, step)
    rates = {"muon": config.muon_learning_rate * scale, "momentum": muon_momentum(preset, step)}
    for role, rule in config.rules:
        if isinstance(rule, AdamRule):
            beta1, beta2 = rule.betas
            correction = math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
            rate = config.adam_learning_rate * rule.learning_rate_multiplier * scale
            rates |= {role: rate * correction, f"{role} decay": rate**2 * rule.decay}
    return rates

def target_weights(preset: Preset, step: int) -> list[float]:
    """Weights of the coming tokens as targets: linear between the two ends of the stage."""
    index = stage_index(preset, step)
    stage = preset.stages[index]
    passed = (step - sum(s.steps for s in preset.stages[:index])) / stage.steps
    return [start + passed * (end - start) for start, end in zip(*stage.targets)]

def rotary_frequencies(preset: Preset, index: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies [head_width / 4], in radians a position, and the softmax scale in a stage.

    Half of the channels turn, in pairs. At each change of the long window YaRN stretches the slow frequencies (those that turn less than 32 times
    in the window) and sharpens the softmax. Sources: arXiv 2309.00071, public record 31."""
    frequency = preset.model.rotary_base ** -np.linspace(0, 1, preset.model.head_width // 4)
    scale, stages = 0.1, preset.stages[:index + 1]
    for old, new in zip(stages, stages[1:]):
        old, new = old.long_window_tokens, new.long_window_tokens
        if old != new:
            turns = old * frequency / (2 * math.pi)
            keep = np.clip((turns - 1) / (32 - 1), 0, 1)
            frequency = frequency * (old / new + keep * (1 - old / new))
            scale *= 0.2 * math.log(new / old) + 1
    return frequency, scale

def geometry_tables(frequency: np.ndarray, scale: float, windows: tuple[int, int], positions: int, dtype: torch.dtype,
                    device: torch.device) -> Geometry:
    """Geometry with cosines and sines for `positions` positions; the channels that do not turn get angle 0."""
    angle = np.zeros((positions, 2 * len(frequency)))
    angle[:, :len(frequency)] = np.arange(positions)[:, None] * frequency
    cos, sin = (torch.from_numpy(table).to(device, dtype) for table in (np.cos(angle), np.sin(angle)))
    return Geometry(*windows, scale, cos, sin)

def rotary_geometry(preset: Preset, index: int, positions: int, device: torch.device, windows: tuple[int, int] | None = None) -> Geometry:
    """Attention's geometry in a stage, or with other `windows`: the final validation looks further back (record 33)."""
    stage = preset.stages[index]
    windows = windows or (stage.short_window_tokens, stage.long_window_tokens)
    return geometry_tables(*rotary_frequencies(preset, index), windows, positions, getattr(torch, preset.model.dtype), device)

# ======================================================================================================================
# 11. Run log
# ======================================================================================================================
def chain_hash(previous: str, line: str) -> str:
    return hashlib.sha256((previous + line).encode()).hexdigest()[:16]

class RunLog:
    """One JSON line an event, each carrying a hash of itself and the line before. A thread writes, so the clock never waits."""
    def __init__(self, path: Path | None, quiet: bool = False):
        self.path, self.quiet, self.file, self.chain = path, quiet, None, ""
        self.terminal = sys.stdout.isatty()
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.file = path.open("x")
            except OSError as error:
                self._give_up(error)
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._write, name="run log", daemon=True)
        self.thread.start()

    def _give_up(self, error: OSError) -> None:
        print(f"run log: expected to write {self.path}, found '{error}'; fix: free or permit that folder. The run goes on UNLOGGED.",
              file=sys.stderr, flush=True)
        self.file = None

    def line(self, kind: str, **fields: Any) -> None:
        self.queue.put({"kind": kind, **fields})

    def say(self, text: str, bar: str = "") -> None:
        """Text for the person who watches; the log does not keep it. On a terminal the bar stays under it until the next text."""
        self.queue.put(f"\r\033[K{text}\n{bar}" if self.terminal else f"{text}\n")

    def _write(self) -> None:
        while (item := self.queue.get()) is not None:
            if isinstance(item, str):
                if not self.quiet:
                    print(item, end="", flush=True)
            elif self.file is not None:
                text = json.dumps(item)
                self.chain = chain_hash(self.chain, text)
                try:
                    self.file.write(f'{text[:-1]}, "chain": "{self.chain}"}}\n')
                    self.file.flush()
                except OSError as error:
                    self._give_up(error)

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join(timeout=10)
        if self.file is not None:
            self.file.close()

def machine_facts(device: torch.device) -> dict[str, Any]:
    """Versions and hardware. `machine` names the host and its devices without telling who they are: equal = same machine."""
    facts = {"python": platform.python_version(), "torch": str(torch.__version__), "triton": triton.__version__ if triton else None,
             "numpy": np.__version__, "platform": platform.platform(), "device": platform.processor() or platform.machine(), "gpus": []}
    names = [platform.node(), str(os.cpu_count())]
    if device.type == "cuda":
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts |= {"device": devices[0].name, "gpus": [d.name for d in devices], "cuda": torch.version.cuda}
        names += [str(getattr(d, "uuid", d.name)) for d in devices]
    return facts | {"machine": hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]}

def files_hash(paths: Sequence[Path]) -> str:
    """SHA-256 over what `sha256sum` would print of files, in order: a record can check it from the files' own sums. Where a
    SHA256SUMS lies beside a file and names it, they must agree."""
    lines = []
    for path in paths:
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
        sums = path.with_name("SHA256SUMS")
        if sums.exists() and f"  {path.name}\n" in (stated := sums.read_text()) and lines[-1] not in stated:
            fail(f"{path}: SHA-256", "what SHA256SUMS states", lines[-1][:64], "fetch this file again")
    return hashlib.sha256("".join(lines).encode()).hexdigest()

# ======================================================================================================================
# 12. Training
# ======================================================================================================================
def state_hash(state: dict[str, Tensor]) -> str:
    """A checksum of tensors that sees values and places, computed where they live; for equality only."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        words = tensor.detach().reshape(-1).view(torch.uint8)
        words = words.view(torch.int64) if len(words) % 8 == 0 else words  # a conversion would need four times the memory of the tensor
        table = words.view(-1, math.gcd(len(words), 4096))
        sums = [(x * torch.arange(1, len(x) + 1, device=x.device)).sum() for x in (table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64))]
        digest.update(f"{name}:{[int(x) for x in sums]};".encode())
    return digest.hexdigest()[:16]

def micro_batch_slots(stage: Stage, ranks: Ranks, most_tokens: int) -> int:
    """How many of a rank's slots form one micro-batch: as many as have at most so many tokens, in equal parts."""
    slots = SLOTS // ranks.world
    while slots > 1 and slots * stage.slot_tokens > most_tokens:
        slots //= 2
    return slots

def memory_plan(preset: Preset, ranks: Ranks, ops: Ops, room_bytes: float | None = None) -> tuple[bool, int, int]:
    """Whether layers are computed again in the backward pass, the most tokens of a micro-batch, and the bytes that a rank then needs
    at most: its very state, and peaks a token that were measured for GPT_SMALL on one H200. Fails if a single slot does not fit."""
    if room_bytes is None:
        if ranks.device.type != "cuda":
            return False, sys.maxsize, 0
        room_bytes = min(ranks.gather_objects(0.95 * torch.cuda.mem_get_info(ranks.device)[0]))
    meta = Ranks(ranks.rank, ranks.world, torch.device("meta"))
    state = sum(tensor.nbytes for tensor in Optimizer(GPT(preset.model, ops, meta.device), preset.optimizer, meta, ops).state().values())
    slot = max(stage.slot_tokens for stage in preset.stages)
    for recompute, per_token in ((False, {"fp8": 470_000, "bf16": 560_000}.get(ops.names["mlp"], 1_050_000)), (True, 245_000)):
        most = min(max(slot, int(room_bytes - state) // per_token), 98_304)  # more tokens need memory and save no time
        tokens = max(micro_batch_slots(stage, ranks, most) * stage.slot_tokens for stage in preset.stages)
        needed = state + max(tokens * per_token, 28_000 * preset.val_window_tokens)
        if needed <= room_bytes:
            return recompute, tokens, needed
    fail("GPU memory", f"{needed / 2**30:.1f} GiB for one slot of {slot:,} tokens at a time", f"{room_bytes / 2**30:.1f} GiB",
         "more GPUs, end other programs on this one (nvidia-smi), or --preset smoke", EXIT_HARDWARE)

def open_corpus(preset: Preset, folder: Path) -> tuple[TokenStream, list[np.ndarray], Path, list[list[np.ndarray]], str]:
    """What a run reads, checked: training stream, where its slots start, validation shard and windows, hash of the shards."""
    stream = TokenStream(folder, preset.train_tokens, preset.model.vocabulary)
    starts, shard = stream.slot_starts(preset.stages), find_shards(folder, "val")[0]
    windows = validation_windows(shard, preset.val_tokens, preset.val_window_tokens, preset.model.vocabulary)
    return stream, starts, shard, windows, files_hash([*stream.paths, shard])

class CapturedStep(NamedTuple):
    """A CUDA graph of a training step, its inputs and its output."""
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    loss: Tensor

class Trainer:
    """One compiled model, its optimizer and its data: what several runs of a process share."""
    def __init__(self, preset: Preset, ranks: Ranks, ops: Ops, clock: Clock, data: Path):
        self.preset, self.ranks, self.ops, self.clock = preset, ranks, ops, clock
        vocabulary, stages = preset.model.vocabulary, preset.stages
        self.stream, self.slot_starts, validation_shard, windows, self.data_hash = open_corpus(preset, data)
        recompute, micro_batch_tokens, _ = memory_plan(preset, ranks, ops)
        longest = max(len(piece) for pieces in windows for piece in pieces)
        pin = ranks.device.type == "cuda"
        borders = padded_borders(max(len(pieces) for pieces in windows))
        mine = windows[ranks.rank::ranks.world]
        self.validation = [pack({0: pieces}, borders, max(len(p) for p in pieces), preset.model, pin) for pieces in mine]
        validated = np.asarray(open_shard(validation_shard, vocabulary)[:preset.val_tokens + 1])
        self.validation_hash = hashlib.sha256(validated.tobytes()).hexdigest()[:16]
        self.micro_slots = {stage: micro_batch_slots(stage, ranks, micro_batch_tokens) for stage in stages}
        self.warm_slots = {stage: {slot: generated_pieces(stage.slot_tokens, stage.document_cap_tokens, seed=7 + slot)
                                   for slot in range(self.micro_slots[stage])} for stage in stages}
        self.borders = self._borders()
        self.warm = False
        self.graphs: dict[int, CapturedStep] = {}  # by stage
        self.graph_pool = torch.cuda.MemPool() if ops.graphs else None  # after the graphs: it must outlive them

        self.model = GPT(preset.model, ops, ranks.device)
        if recompute:
            for block in self.model.blocks.values():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        self.model.reset(seed=0)
        self.optimizer = Optimizer(self.model, preset.optimizer, ranks, ops)
        self.longest = longest
        positions = 2 * max(longest, *(stage.document_cap_tokens for stage in stages))  # paired heads count each twice
        self.geometries = [rotary_geometry(preset, index, positions, ranks.device) for index in range(len(stages))]
        self.final_geometry = rotary_geometry(preset, len(stages) - 1, positions, ranks.device, preset.val_windows_tokens)
        rates = [step_rates(preset, step) for step in range(preset.steps)]
        self.rate_names = list(rates[0])
        # On the device beforehand: a step reads its rates without a copy or a synchronise, and changing values never recompile.
        self.rates = torch.tensor([list(row.values()) for row in rates], dtype=torch.float32, device=ranks.device)
        self.target_weights = [torch.tensor(target_weights(preset, step), device=ranks.device) for step in range(preset.steps)]

    def _borders(self) -> dict[Stage, int]:
        """Documents to allow for in a micro-batch of each stage, the same on every rank: the most that plan and warm-up hold."""
        borders: dict[Stage, int] = {}
        for stage, starts in zip(self.preset.stages, self.slot_starts):
            first, last = (np.searchsorted(self.stream.borders, edge) for edge in (starts, starts + stage.slot_tokens))
            documents = int((last - first).max(initial=0)) + 2 + stage.slot_tokens // stage.document_cap_tokens
            warm = sum(map(len, self.warm_slots[stage].values()))
            # Two equal stages are one key: keep the larger bound.
            borders[stage] = max(borders.get(stage, 0), padded_borders(max(documents * self.micro_slots[stage], warm)))
        return borders

    def training_step(self, step: int, batches: list[HostBatch]) -> Tensor:
        """Forward, backward and update over this rank's micro-batches; returns their summed loss (on the device, no synchronise; the next
        step may overwrite it)."""
        sources = [*(batch.data for batch in batches), self.rates[step], self.target_weights[step]]
        captured = self.graphs.get(stage_index(self.preset, step))
        inputs = captured.inputs if captured else [torch.empty_like(source, device=self.ranks.device) for source in sources]
        for target, source in zip(inputs, sources):
            target.copy_(source, non_blocking=True)
        if captured is None:
            return self._step(step, batches, inputs)
        captured.graph.replay()
        return captured.loss

    def _step(self, step: int, batches: list[HostBatch], inputs: list[Tensor]) -> Tensor:
        """What a step does once its inputs are on the device: the data of each micro-batch, the rates, the weights of the targets."""
        *data, rates, weights = inputs
        total, geometry = torch.zeros((), device=self.ranks.device), self.geometries[stage_index(self.preset, step)]
        self.optimizer.begin()
        for number, (batch, buffer) in enumerate(zip(batches, data), 1):
            self.optimizer.complete = number == len(batches)
            loss = self.model(batch.views(buffer), geometry, weights)
            (loss * (self.ranks.world / SLOTS)).backward()  # ranks are averaged afterwards: the mean over slots for any world size
            total += loss.detach()
        self.optimizer.step(dict(zip(self.rate_names, rates.unbind())))
        return total

    def capture(self, step: int, batches: list[HostBatch]) -> None:
        """Record the step of a stage, which has run before, as a CUDA graph: replaying it costs the host next to nothing."""
        inputs = [source.to(self.ranks.device, copy=True) for source in (*(b.data for b in batches), self.rates[step], self.target_weights[step])]
        graph = torch.cuda.CUDAGraph()
        # Thread-local: other threads (NCCL's, the allocator of pinned memory) may go on talking to the device.
        with torch.cuda.graph(graph, pool=self.graph_pool.id, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            loss = self._step(step, batches, inputs)
        self.graphs[stage_index(self.preset, step)] = CapturedStep(graph, inputs, loss)

    def evaluate(self, batch: HostBatch, geometry: Geometry) -> Tensor:
        """Summed cross-entropy of a window, in the memory that captured steps need only while they run."""
        with torch.cuda.use_mem_pool(self.graph_pool) if self.graph_pool else contextlib.nullcontext():
            return self.model.evaluate(batch.to(self.ranks.device), geometry)

    @torch.no_grad()
    def validate(self, geometry: Geometry) -> float:
        """Mean cross-entropy in nats a token over the validation windows, every token counted."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for batch in self.validation:
            self.ranks.beat("the validation began")
            total += self.evaluate(batch, geometry).double()
        return float(self.ranks.sum(total)) / self.preset.val_tokens

    def initialise(self, seed: int) -> str:
        self.model.reset(seed)
        self.optimizer.reset()
        return state_hash(self.optimizer.state())

    def warm_up(self) -> int:
        """Run a step of every stage, and the validation, on generated documents. Returns the number of variants."""
        pin, first, variants = self.ranks.device.type == "cuda", 0, {}
        for stage in self.preset.stages:
            batch = pack(self.warm_slots[stage], self.borders[stage], stage.document_cap_tokens, self.preset.model, pin, stage.candidates)
            count = SLOTS // self.ranks.world // self.micro_slots[stage]
            self.ranks.beat("warm-up", 10)  # it compiles
            variants[first] = [batch] * count
            self.training_step(first, variants[first])
            first += stage.steps
        for step, batches in reversed(variants.items()) if self.ops.graphs else ():  # the largest first: the others fit into its memory
            self.ranks.beat("warm-up", 10)
            self.capture(step, batches)
        pieces = generated_pieces(self.preset.val_window_tokens, self.longest, seed=7)
        batch = pack({0: pieces}, padded_borders(len(pieces)), self.longest, self.preset.model, pin)
        self.evaluate(batch, self.final_geometry)
        return len(variants)

@dataclass(frozen=True)
class RunOptions:
    stop_after: int | None = None  # steps; a shortened run is no record
    val_every: int | None = None
    profile: tuple[int, int] | None = None  # first and last step of a trace; no record either
    profile_path: Path | None = None

class Meter:
    """Losses and times of the logged steps, read back one log interval later, when the device has surely finished them."""
    def __init__(self, log: RunLog, trainer: Trainer):
        self.log, self.trainer, self.cuda = log, trainer, trainer.ranks.device.type == "cuda"
        self.pending: tuple | None = None
        self.tokens, self.last_step = 0, 0
        self.restart()

    def _now(self) -> Any:
        if not self.cuda:
            return self.trainer.clock.milliseconds()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Begin a new interval (after a pause of the clock)."""
        self.last = self._now()

    def record(self, step: int, loss: Tensor, stage: Stage) -> None:
        """Note the loss of `step` (0-based). Every rank calls this at the same steps, of which each stage's last is one: it
        holds one all-reduce, and an interval never spans two stages."""
        self.flush()
        ranks = self.trainer.ranks
        sums = ranks.sum(torch.stack((loss, torch.full_like(loss, ranks.stop_asked))))
        host = torch.empty(2, pin_memory=self.cuda)
        host.copy_(sums, non_blocking=True)
        steps = step + 1 - self.last_step
        self.tokens += steps * stage.batch_tokens
        self.pending = (step + 1, host, self.last, self._now(), steps, stage, self.tokens)
        self.last, self.last_step = self.pending[3], step + 1

    def flush(self) -> None:
        """Log what was recorded last. On every rank at the same step, raises Failure (numerics) if its loss is not finite, and
        KeyboardInterrupt if a rank was asked to stop."""
        if self.pending is None:
            return
        step, host, before, after, steps, stage, tokens = self.pending
        self.pending = None
        if self.cuda:
            after.synchronize()
        elapsed = before.elapsed_time(after) if self.cuda else after - before
        loss, per_step, total = float(host[0]) / stage.batch_tokens, elapsed / steps, self.trainer.preset.steps
        all_tokens = sum(s.steps * s.batch_tokens for s in self.trainer.preset.stages)
        left_s = elapsed / 1e3 * (all_tokens - tokens) / (steps * stage.batch_tokens)
        bar = f"[{'#' * (40 * tokens // all_tokens):40}] {tokens / all_tokens:4.0%}, {left_s:.0f} s left"
        self.log.line("step", step=step, train_loss=round(loss, 6), tokens=tokens, ms_per_step=round(per_step, 3))
        self.log.say(f"step {step:5d}/{total}   train loss {loss:7.4f}   {per_step:8.2f} ms/step   {stage.batch_tokens / per_step:6.1f} tokens/ms"
                     f"   {left_s:6.1f} s left", bar)
        if not math.isfinite(loss):
            fail("training loss", "a finite number", f"{loss} at step {step}", "lower the learning rate or report this seed", EXIT_NUMERICS)
        if host[1]:
            raise KeyboardInterrupt

def compiled_graphs() -> int:
    """How many graphs and kernels have been compiled so far; a timed run must not move it. The one place that knows these internals."""
    from torch._dynamo.utils import counters
    kernels = [value for value in globals().values() if hasattr(value, "device_caches")]
    return counters["stats"]["unique_graphs"] + sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

def peak_memory_mib(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) >> 20 if device.type == "cuda" else None

def start_profiler(ranks: Ranks) -> torch.profiler.profile:
    ranks.sum(torch.zeros((), device=ranks.device))  # start together, or the first collective of the trace shows who was late
    profiler = torch.profiler.profile()
    profiler.start()
    return profiler

def stop_profiler(profiler: torch.profiler.profile, path: Path, log: RunLog) -> None:
    """Write the Chrome trace; say how busy the device was and the ten largest kernels."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if not torch.cuda.is_available():
        log.say(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))
        return
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in profiler.events()
                   if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation)
    totals: dict[str, float] = {}
    busy = end = 0.0
    for start, stop, name in spans:
        totals[name] = totals.get(name, 0.0) + stop - start
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    length = end - spans[0][0]
    log.say(f"trace in {path}: {length / 1e3:.1f} ms, device busy {100 * busy / length:.1f} %")
    for name, time_us in sorted(totals.items(), key=lambda item: -item[1])[:10]:
        log.say(f"{time_us / 1e3:10.2f} ms {100 * time_us / busy:5.1f} %  {name[:110]}")

def timed_loop(trainer: Trainer, log: RunLog, options: RunOptions) -> int:
    """All steps, on the clock. Returns the digest of this rank's training tokens."""
    preset, ranks, clock = trainer.preset, trainer.ranks, trainer.clock
    steps = min(preset.steps, options.stop_after or preset.steps)
    digest, profiler, index = 0, None, -1
    clock.start()
    batches = Prefetcher(training_batches(trainer.stream, preset.stages, trainer.micro_slots, trainer.borders, preset.model, ranks))
    meter = Meter(log, trainer)
    try:
        for step in range(steps):
            if options.profile and step == options.profile[0]:
                profiler = start_profiler(ranks)
            if stage_index(preset, step) != index:
                index = stage_index(preset, step)
                stage = preset.stages[index]
                log.line("stage", step=step, **dataclasses.asdict(stage), micro_batch_slots=trainer.micro_slots[stage])
            count = SLOTS // ranks.world // trainer.micro_slots[stage]
            micro = [next(batches) for _ in range(count)]
            digest += sum(batch.digest for batch in micro)
            loss = trainer.training_step(step, micro)
            ranks.beat(f"step {step + 1}")
            last_of_stage = step + 1 == steps or stage_index(preset, step + 1) != index
            if (step + 1) % preset.log_every_steps == 0 or step == 0 or last_of_stage:
                meter.record(step, loss, stage)
            if profiler and step == options.profile[1]:
                ranks.beat("the trace", 10)
                stop_profiler(profiler, options.profile_path, log)
                profiler = None
            if options.val_every and (step + 1) % options.val_every == 0 and step + 1 < steps:
                trainer.optimizer.gather()
                clock.pause("validation")
                value = trainer.validate(trainer.geometries[index])
                log.line("val", step=step + 1, loss=round(value, 6), final=False)
                log.say(f"step {step + 1:5d}/{preset.steps}   val loss {value:.4f} (windows of the moment)")
                clock.resume()
                meter.restart()
        trainer.optimizer.gather()
        clock.stop()
        meter.flush()
    finally:
        batches.close()
    return digest

def speed(trainer: Trainer, elapsed_ms: float, tokens: int) -> str:
    """Tokens a second and, where the GPU's peak is known, model-FLOP utilisation: 6 operations a matrix weight (the head's too) and token."""
    weights = sum(p.numel() for p in trainer.model.parameters() if p.matrix is not None) + trainer.model.head.numel()
    device = machine_facts(trainer.ranks.device)["device"]
    peak = next((tflops for name, tflops in PEAK_TFLOPS if name in device), math.nan)
    mfu = 6 * weights * tokens / elapsed_ms / 1e9 / peak / trainer.ranks.world
    return f"{1e3 * tokens / elapsed_ms:,.0f} tokens/s" + (f", MFU {mfu:.1%} of {peak:.0f} TFLOP/s a GPU" if math.isfinite(mfu) else "")

def train(trainer: Trainer, seed: int, log: RunLog, options: RunOptions, settings: dict[str, Any]) -> float:
    """One run from a seed: warm-up (once a process), the timed loop, the final validation. Logs everything; returns the loss."""
    preset, ranks, clock = trainer.preset, trainer.ranks, trainer.clock
    log.line("head", started=clock.date(), preset=dataclasses.asdict(preset), seed=seed, world=ranks.world, ops=trainer.ops.names,
             script=files_hash([Path(__file__)]), data=trainer.data_hash, shards=[path.name for path in trainer.stream.paths],
             consumed_tokens=trainer.stream.consumed(preset.stages), settings=settings, **machine_facts(ranks.device))
    before = trainer.initialise(seed)
    if len(set(ranks.gather_objects(before))) > 1:
        fail("initial state", "the same on every rank", "differences", "use GPUs of one kind", EXIT_HARDWARE)
    if not trainer.warm:
        started = clock.since_start()
        variants = trainer.warm_up()
        trainer.warm = True
        after = trainer.initialise(seed)
        if after != before:
            raise AssertionError("warm-up changed the training state")
        log.line("warm", seconds=round(clock.since_start() - started, 3), variants=variants, graphs=compiled_graphs(), state=after,
                 peak_memory_mib=peak_memory_mib(ranks.device))
    graphs = compiled_graphs()
    gc.collect()
    gc.freeze()
    ranks.gather_objects(None)  # nobody's clock starts before the last rank has compiled
    log.say(f"first timed step {clock.since_start():.1f} s after the process started")
    digest = timed_loop(trainer, log, options)
    elapsed = clock.milliseconds()
    recompiled = compiled_graphs() - graphs
    complete = not options.profile and options.stop_after is None
    value = trainer.validate(trainer.final_geometry)
    if not math.isfinite(value):
        fail("validation loss", "a finite number", value, "lower the learning rate or report this seed", EXIT_NUMERICS)
    log.line("val", step=min(preset.steps, options.stop_after or preset.steps), loss=round(value, 6), final=True)
    for interval in clock.intervals:
        log.line("clock", **interval)
    tokens = f"{sum(ranks.gather_objects(digest)) % 2**64:016x}"
    memory = peak_memory_mib(ranks.device)
    state = "ok" if complete and not recompiled else "no record: " + ("compiled in the timed run" if recompiled else "shortened or profiled")
    log.line("end", state=state, loss=round(value, 6), ms=round(elapsed, 1), peak_memory_mib=memory,
             train_hash=tokens, val_hash=trainer.validation_hash, recompiled=recompiled)
    log.say(f"val loss {value:.4f} after {elapsed / 1e3:.2f} s of training, {preset.name}, seed {seed}, {ranks.world} rank(s)"
            + (f", peak memory {memory} MiB" if memory else "") + (f"; {state}" if state != "ok" else ""))
    batches = [preset.stages[stage_index(preset, step)].batch_tokens for step in range(min(preset.steps, options.stop_after or preset.steps))]
    log.say(f"{speed(trainer, elapsed, sum(batches))}; log: {log.path if log.file else 'none, UNLOGGED'}")
    return value

# ======================================================================================================================
# 13. Afterwards: save, load, evaluate, sample
# ======================================================================================================================
def save_model(path: Path, trainer: Trainer, loss: float, seed: int) -> None:
    """One file with plain names: weights, configuration, how to validate, provenance. Written aside, then renamed."""
    preset = trainer.preset
    frequency, scale = rotary_frequencies(preset, len(preset.stages) - 1)
    content = {
        "weights": {name: parameter.detach().cpu() for name, parameter in trainer.model.named_parameters()},
        "model": json.dumps(dataclasses.asdict(preset.model)),
        "attention": {"frequency": frequency.tolist(), "scale": scale, "windows": preset.val_windows_tokens},
        "validation": {"data": preset.data, "tokens": preset.val_tokens, "window": preset.val_window_tokens},
        "provenance": {"val_loss": loss, "seed": seed, "preset": preset.name, "script": files_hash([Path(__file__)]),
                       **machine_facts(trainer.ranks.device)},
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter when the disk is full
        aside.unlink(missing_ok=True)
        fail(f"saving {path}", "a writable folder with space", error, "choose another place for --save")

def load_model(path: Path, device: torch.device) -> tuple[GPT, dict[str, Any]]:
    """A saved model with reference operators (so it runs on any device) and the rest of the file. Only tensors and plain data are read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__}")
        weights, config, *_ = (content[key] for key in ("weights", "model", "attention", "validation"))
        config = json.loads(config)
        # Before anything is allocated: a view of one element can claim any size.
        if sum(weight.nbytes for weight in weights.values()) > path.stat().st_size or config["value_embeddings"] > len(weights):
            raise ValueError("weights larger than the file")
        config = ModelConfig(**{**config, "layers": tuple(Layer(**layer) for layer in config["layers"]), "softcap": Softcap(*config["softcap"])})
        if device.type == "cpu":  # bfloat16 matrix products are slow there
            config = dataclasses.replace(config, dtype="float32")
        for place in (torch.device("meta"), device):  # first the shapes alone
            model = GPT(config, select_ops(device, fast=False), place)
            model.load_state_dict(weights, strict=True, assign=place != device)
    except (OSError, LookupError, TypeError, AttributeError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        fail(f"model file {path}", "a file written by --save", found, "train one with --save FILE")
    return model.requires_grad_(False), content

def saved_geometry(content: dict[str, Any], model: GPT, positions: int) -> Geometry:
    attention = content["attention"]
    return geometry_tables(np.array(attention["frequency"]), attention["scale"], tuple(attention["windows"]), positions,
                           model.head.dtype, model.head.device)

def evaluate_file(path: Path, data: Path | None, device: torch.device) -> float:
    """Validation loss of a saved model on the windows and tokens it was validated with."""
    model, content = load_model(path, device)
    config, validation, total = model.config, content["validation"], 0.0
    shard = find_shards(data or Path(validation["data"]), "val")[0]
    for pieces in validation_windows(shard, validation["tokens"], validation["window"], config.vocabulary):
        longest = max(len(piece) for piece in pieces)
        batch = pack({0: pieces}, len(pieces), longest, config, pin=False)
        total += float(model.evaluate(batch.to(device), saved_geometry(content, model, 2 * longest)))
    return total / validation["tokens"]

def sample_text(path: Path, prompt: str, device: torch.device, tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue `prompt` token by token; each step runs the whole prefix, which is fine for a paragraph."""
    import tiktoken
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except OSError as error:
        fail("tiktoken's gpt2 vocabulary", "a download or a copy in TIKTOKEN_CACHE_DIR", type(error).__name__, "connect to the network once")
    model, content = load_model(path, device)
    ids = [BOS, *encoding.encode_ordinary(prompt)]
    geometry = saved_geometry(content, model, 2 * (len(ids) + tokens))
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(tokens):
        batch = pack({0: [np.array([*ids, BOS], dtype=np.uint16)]}, 1, len(ids), model.config, pin=False).to(device)
        with torch.no_grad():
            logits = softcapped(F.linear(model.features(batch, geometry)[-1], model.head).float(), model.config.softcap)
        probabilities = torch.softmax(logits[:model.config.vocabulary] / temperature, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == BOS:
            break
    return encoding.decode(ids[1:])

# ======================================================================================================================
# 14. Main
# ======================================================================================================================
def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def span(text: str) -> tuple[int, int]:
        first, _, last = text.partition(":")
        return int(first), int(last or first)

    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(description="Train a small GPT as fast as the machine allows.", allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, default="speedrun")
    parser.add_argument("--data", type=Path, help="folder with *_train_*.bin and *_val_*.bin (default: the preset's)")
    parser.add_argument("--seed", type=int, help="fixes the initial weights; drawn and logged without it")
    parser.add_argument("--runs", type=positive, default=1, help="train this many times, seeds counting up, one log each")
    parser.add_argument("--val-every", type=positive, metavar="N", help="validate every N steps too, off the clock")
    parser.add_argument("--profile", type=span, metavar="A:B", help="write a Chrome trace of steps A to B; no record")
    parser.add_argument("--stop-after", type=positive, metavar="N", help="end after N steps of the schedule; no record")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of every step instead of replaying CUDA graphs")
    parser.add_argument("--no-fp8", nargs="?", choices=("head", "mlp", "all"), const="all", help="bfloat16 head, MLPs or (default) both")
    parser.add_argument("--reference", action="store_true", help="plain PyTorch operators: what a machine without Triton uses")
    parser.add_argument("--orthogonalize", choices=RECIPES, help="how Muon orthogonalises (default: the preset's)")
    parser.add_argument("--muon", action="store_true", help="plain Muon: no variance normalisation")
    parser.add_argument("--stall-limit", type=float, default=120.0, metavar="SECONDS", help="end with exit code 4 when nothing progresses for so long")
    parser.add_argument("--check", action="store_true", help="what a start would check, one line an item, then exit")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained model of the last run")
    parser.add_argument("--eval", type=Path, metavar="FILE", help="validation loss of a saved model, then exit")
    parser.add_argument("--sample", nargs=2, metavar=("FILE", "TEXT"), help="continue a text with a saved model, then exit")
    return parser.parse_args(argv)

def chosen_preset(arguments: argparse.Namespace) -> Preset:
    preset, optimizer = PRESETS[arguments.preset], {}
    if arguments.orthogonalize:
        optimizer["orthogonalization"] = arguments.orthogonalize
    if arguments.muon:
        optimizer["second_moment_decay"] = None
    return dataclasses.replace(preset, optimizer=dataclasses.replace(preset.optimizer, **optimizer))

def check_versions() -> str:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        fail("torch", ">= 2.11, < 2.14", torch.__version__, "pip install -r requirements.txt")
    return f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}, Triton {triton.__version__ if triton else 'none'}"

def check_folder(folder: Path, needed_mb: int) -> str:
    """Fails unless that much can be written to a folder, or to where it would be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_mb = shutil.disk_usage(there).free // 1_000_000
    if not (there.is_dir() and os.access(there, os.W_OK)) or free_mb < needed_mb:
        fail(f"saving in {folder}", f"a writable folder with {needed_mb} MB free", f"{there} with {free_mb:,} MB", "choose another place")
    return f"{free_mb:,} MB free for {folder}"

def preflight(arguments: argparse.Namespace, preset: Preset, ranks: Ranks, ops: Ops) -> int:
    """What a start checks, a line an item; returns the exit code of the first that fails."""
    def memory() -> str:
        recompute, tokens, needed = memory_plan(preset, ranks, ops)
        return (f"{needed / 2**30:.1f} of {torch.cuda.mem_get_info(ranks.device)[0] / 2**30:.1f} GiB that are free, micro-batches of up to {tokens:,} tokens"
                + ", layers recomputed" * recompute) if needed else "no GPU whose memory to fit"

    def data() -> str:
        stream, *_, digest = open_corpus(preset, arguments.data or Path(preset.data))
        return f"{stream.consumed(preset.stages):,} of {stream.length:,} training tokens in {len(stream.paths)} shards, SHA-256 {digest[:16]}"

    checks = {"versions": check_versions, "memory": memory, "data": data,
              "log": lambda: check_folder(arguments.log_dir, 10),
              "model": lambda: check_folder(arguments.save.parent, 1000) if arguments.save else "not kept"}
    code = 0
    for name, check in checks.items():
        try:
            line = f"ok    {name:<9}  {check()}"
        except Failure as failure:
            line, code = f"FAIL  {name:<9}  {failure}", code or failure.code
        if ranks.rank == 0:
            print(line, flush=True)
    return code

def train_all(arguments: argparse.Namespace, ranks: Ranks, clock: Clock) -> int:
    preset = chosen_preset(arguments)
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    seed = ranks.gather_objects(seed)[0]
    fast = not arguments.reference and capability(ranks.device) >= (8, 0)
    ops = select_ops(ranks.device, fast, compile=not arguments.eager, graphs=not arguments.no_graphs,
                     fp8=[part for part in ("head", "mlp") if arguments.no_fp8 not in (part, "all")])
    last = min(preset.steps, arguments.stop_after or preset.steps) - 1
    if arguments.profile and not 0 <= arguments.profile[0] <= arguments.profile[1] <= last:
        fail("--profile A:B", f"0 <= A <= B <= {last}", "{}:{}".format(*arguments.profile), "name steps that the run has")
    main_rank = ranks.rank == 0
    if main_rank:
        chosen, (major, minor) = ", ".join(f"{name}: {choice}" for name, choice in ops.names.items()), capability(ranks.device)
        device = machine_facts(ranks.device)["device"] + (f", capability {major}.{minor}" if major else ", no GPU")
        print(f"{preset.status}\n{ranks.world} rank(s), {device}, {chosen}", flush=True)
    if arguments.check:
        return preflight(arguments, preset, ranks, ops)
    check_versions()
    if arguments.save:
        check_folder(arguments.save.parent, 1000)
    trainer = Trainer(preset, ranks, ops, clock, arguments.data or Path(preset.data))
    defaults = parse_arguments([])
    settings = {key: str(value) for key, value in vars(arguments).items() if value != getattr(defaults, key)}
    for run in range(arguments.runs):
        name = f"{preset.name}-w{ranks.world}-s{seed + run}-{secrets.token_hex(3)}"
        options = RunOptions(arguments.stop_after, arguments.val_every, arguments.profile, arguments.log_dir / f"{name}-rank{ranks.rank}.trace.json")
        log = RunLog(arguments.log_dir / f"{name}.jsonl" if main_rank else None, quiet=not main_rank)
        watchdog = Watchdog(ranks, arguments.stall_limit, lambda message: (log.line("end", state=f"failed: {message}", code=EXIT_HARDWARE), log.close()))
        try:
            loss = train(trainer, seed + run, log, options, settings)
            ranks.beat("the end of the run", 10)
            if arguments.save and run == arguments.runs - 1 and main_rank:
                save_model(arguments.save, trainer, loss, seed + run)
        except BaseException as error:
            failure = explained(error, ranks) or error
            log.line("end", state="interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {failure}", code=getattr(failure, "code", None))
            raise
        finally:
            watchdog.done.set()
            log.close()
    trainer.graphs.clear()  # NCCL waits for ever to end a communicator that a graph still uses
    return 0

def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    ranks, code, message = None, EXIT_BUG, ""
    try:
        ranks = Ranks.start()
        if arguments.eval:
            print(f"val loss {evaluate_file(arguments.eval, arguments.data, ranks.device):.6f}")
        elif arguments.sample:
            print(sample_text(Path(arguments.sample[0]), arguments.sample[1], ranks.device))
        code = 0 if arguments.eval or arguments.sample else train_all(arguments, ranks, Clock(ranks.device))
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except Exception as error:
        failure = explained(error, ranks)
        if failure is None:
            raise
        code, message = failure.code, str(failure)
    finally:
        if message:
            rank = f"rank {ranks.rank}: " if ranks and ranks.world > 1 else ""
            print(f"train_gpt: {rank}{message}", file=sys.stderr, flush=True)
        if ranks is not None:
            ranks.finish(code)
    return code

if __name__ == "__main__":
    sys.exit(main())
