"""Train a GPT-2-small-class language model as fast as the machine allows, in one file.

    sprint, webtext (one pass over at most 94 M tokens): validation loss 3.215 in 45.1 s on one H200 (n = 3, torch 2.11, Triton 3.6); two states
    before in 14.3 s on four and, 3.216, in 26.7 s on two; four before, 3.216 in 9.28 s on eight. Their scripts are in the folders of records/.
    speedrun, FineWeb: not yet run.

Launch
    ./run.sh                                                     the preset this machine can run, with what it has
    torchrun --standalone --nproc_per_node=8 train_gpt.py        one node; 4, 2 or 1 GPU train on the same tokens, accumulated
    python train_gpt.py --preset smoke                           any computer, no network: a minute or two on two CPU cores

Options (--help): --seed N, --runs N, --profile A:B, --val-every N, --stop-after N, --check, --save FILE, --eval FILE, --sample FILE "text".

Map
    1 imports, constants      2 configuration          3 schedule            4 model                  5 optimizer
    6 training                7 data                   8 reference operators 9 Triton kernels        10 operator selection
   11 runtime                12 run log               13 afterwards         14 main
"""

# ==== 1. Imports, constants ===========================================================================================
from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
    jit = triton.jit
except ImportError:  # the reference operators need no Triton
    triton = tl = None
    def jit(function):
        return function

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024  # llm.c's token files, see data/README.md
BOS = 50256  # <|endoftext|>: opens every document
CHUNKS = 8  # a step's batch is packed into 8 slots whatever the number of ranks, so every world size sees the same tokens
FP8_PARTS = "attention", "head", "mlp"  # whose matrix products can be FP8
NGRAMS = -1  # as a layer's value embedding: none of its own, but what embeds the last few tokens
NEG_INF = -1e4  # as a logarithm: exp gives 0, and differences stay finite
EXIT_BUG, EXIT_USAGE, EXIT_NUMERICS, EXIT_HARDWARE = 1, 2, 3, 4
# Dense bfloat16 TFLOP/s as the vendors state them, by a part of the device's name.
PEAK_TFLOPS = (("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("A100", 312.0), ("L40S", 362.0))

# ==== 2. Configuration ================================================================================================
@dataclasses.dataclass(frozen=True)
class Layer:
    """One slot of the network. The table of layers is the only place that knows which layer does what."""
    attention: bool = True
    mlp: bool = True
    window: str = "short"  # which of the stage's two windows its attention uses
    key_offset: bool = False  # the channels of K that do not turn come from the token before: induction in one layer (record 49)
    value_embedding: int | None = None  # the value-embedding table added to V, or NGRAMS
    skip_from: int | None = None  # U-Net: the earlier slot whose output enters here through a sigmoid gate

class Softcap(NamedTuple):
    """z = softcap · σ((logit + shift) / temperature): bounded by (0, softcap), so softmax needs no running maximum."""
    softcap: float = 23.0
    shift: float = 5.0  # record 54
    temperature: float = 7.5

@dataclasses.dataclass(frozen=True)
class ModelConfig:
    width: int
    heads: int
    mlp_width: int
    layers: tuple[Layer, ...]
    value_embeddings: int
    ngram_rows: int  # of the hashed table of the last two and three tokens, added in every layer (records 62, 92)
    key_width: int = 128  # of a head's queries and keys
    head_width: int = 128  # of its values
    attention_scale: float = 0.1  # what multiplies normalised queries with keys, before YaRN; shorter ones want more
    pointer_width: int = 128  # of the head that copies an earlier token of the document, see pointer_reference
    pointer_scale: float = 0.1  # what multiplies its normalised queries with keys
    gate_inputs: int = 16  # channels that gates read: of a layer's input, or half of them of its value embedding; of the final state
    vocabulary: int = 50257
    padded_vocabulary: int = 50304  # a multiple of 128: faster tiles, and divisible by 8 ranks
    softcap: Softcap = Softcap()
    pointer_window_tokens: int = 4096  # how far back it may point
    rotary_base: float = 1024.0
    dtype: str = "bfloat16"  # of weights and activations; scalars and gates are float32 always

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width

    @property
    def table_rows(self) -> int:
        """Of the n-gram table: the hashed ones, then those of `longest_suffix_match`."""
        return self.ngram_rows + 3 * self.padded_vocabulary + 32

# Roles connect parameters to their optimizer: each parameter declares one, and each role has exactly one rule.
@dataclasses.dataclass(frozen=True)
class MuonRule:
    """Hidden matrices, orthogonalised one by one; the parameter says of which shape they are."""
    learning_rate_multiplier: float

@dataclasses.dataclass(frozen=True)
class AdamRule:
    learning_rate_multiplier: float
    betas: tuple[float, float]
    decay: float = 0.0  # cautious, times the rate squared
    sharded: bool = False  # large tables: each rank updates a slice of the rows
    sparse: bool = False  # larger ones: every rank updates the few rows that a step has read, without a first moment

@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    muon_learning_rate: float = 0.023
    muon_weight_decay: float = 1.2  # cautious, times the rate twice: it fades with the square of the schedule
    muon_momentum: tuple[float, float] = (0.85, 0.93)  # warmed up from the first to the second, cooled down again at the end
    momentum_warmup_steps: int = 300
    momentum_cooldown_steps: int = 50
    second_moment_decay: float | None = 0.95  # None: plain Muon, the baseline arm
    orthogonalization: str = "polar-express"
    adam_learning_rate: float = 0.008
    adam_epsilon: float = 1e-10
    cooldown_fraction: float = 0.7
    final_learning_rate: float = 0.25  # a multiplier like a stage's, no share of the peak; averaging does the rest
    averaging_fraction: float = 0.25  # of the steps, the last: a running average of matrices and dense tables (record 92)
    averaging_interval_steps: int = 4
    averaging_rate: float = 0.0755
    averaged_share: float = 0.5  # of the final weights
    rules: tuple[tuple[str, MuonRule | AdamRule], ...] = (
        ("attention", MuonRule(2.0)), ("pointer", MuonRule(2.0)), ("mlp_up", MuonRule(2.0)), ("mlp_down", MuonRule(4.0)),
        ("embedding", AdamRule(75.0, (0.65, 0.98), sharded=True)),
        ("value_embedding", AdamRule(75.0, (0.75, 0.98), decay=0.025, sharded=True)),
        ("ngram", AdamRule(30.0, (0.0, 0.95), sparse=True)),
        ("head", AdamRule(1.0, (0.5, 0.98), decay=0.75, sharded=True)),
        ("scalar", AdamRule(10.0, (0.9, 0.99))), ("gate", AdamRule(1.0, (0.9, 0.99))),
    )

@dataclasses.dataclass(frozen=True)
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
    sampled_classes: int | None = None  # sampled softmax: columns of the head a slot uses, its targets among them; None: all
    extension: bool = False  # after the scheduled steps, at the final learning rate

    @property
    def chunk_tokens(self) -> int:
        return self.batch_tokens // CHUNKS

@dataclasses.dataclass(frozen=True)
class Preset:
    name: str
    model: ModelConfig
    stages: tuple[Stage, ...]
    optimizer: OptimizerConfig = OptimizerConfig()
    data: str = "data/fineweb10B"  # folder with *_train_*.bin and *_val_*.bin
    _: dataclasses.KW_ONLY
    train_tokens: int  # shards are opened in order until they hold this many
    val_tokens: int
    val_window_tokens: int = 131_072  # contiguous tokens a forward pass of the validation sees
    val_windows_tokens: tuple[int, int] = (768, 2560)  # (short, long) attention windows of the final validation
    target_loss: float | None = None
    status: str  # one line said at the start
    log_every_steps: int = 25

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

# Slot 0 is empty: the public records removed its MLP (record 30) and its attention (35); the numbers stay comparable.
LAYERS = (
    Layer(attention=False, mlp=False),
    Layer(),
    Layer(value_embedding=0),
    Layer(value_embedding=1),
    Layer(value_embedding=NGRAMS, window="long", key_offset=True),
    Layer(),
    Layer(value_embedding=NGRAMS),
    Layer(attention=False, skip_from=4),
    Layer(),
    Layer(value_embedding=2),
    Layer(value_embedding=3),
    Layer(value_embedding=4, window="long", key_offset=True),
)
GPT_SMALL = ModelConfig(width=768, heads=6, mlp_width=3072, layers=LAYERS, value_embeddings=5, ngram_rows=2**23)
# One pass over 94 M tokens wants less (records/LOG.md): half the heads, narrower queries, keys and MLPs, three slots and one layer's attention fewer.
GPT_SPRINT = ModelConfig(width=768, heads=3, key_width=64, attention_scale=0.16, mlp_width=2560, value_embeddings=3, ngram_rows=2**23, layers=(
    LAYERS[0], LAYERS[1], LAYERS[2], LAYERS[0], LAYERS[4], Layer(attention=False), LAYERS[6], LAYERS[7], LAYERS[0],
    Layer(value_embedding=1), LAYERS[0], Layer(value_embedding=2, window="long", key_offset=True)))
GPT_TINY = ModelConfig(width=128, heads=2, key_width=64, head_width=64, mlp_width=512, pointer_width=64, value_embeddings=3, layers=(
    Layer(value_embedding=0), Layer(value_embedding=1, window="long", key_offset=True), Layer(attention=False, skip_from=1),
    *2 * [Layer(value_embedding=NGRAMS)], Layer(value_embedding=2, window="long", key_offset=True)), ngram_rows=2**14, dtype="float32")

def three_stages(steps: tuple[int, int, int], extension_steps: int, batch_tokens: tuple[int, int, int], rates: tuple[float, float, float],
                 cap_tokens: int, sampled_classes: tuple[int | None, int | None, int | None]) -> tuple[Stage, ...]:
    """Batches, windows and rates grow by stage (record 46) while the second and third next token fade as targets (53); then the extension (35)."""
    windows = (128, 384), (384, 896), (640, 1408)
    targets = ((1.0, 0.5, 0.25), (1.0, 0.3, 0.0)), ((1.0, 0.3), (1.0, 0.0)), ((1.0,), (1.0,))
    return (*(Stage(n, batch, cap_tokens, *window, rate, target, drawn)
              for n, batch, window, rate, target, drawn in zip(steps, batch_tokens, windows, rates, targets, sampled_classes)),
            Stage(extension_steps, batch_tokens[-1], cap_tokens, 768, 1664, rates[-1], sampled_classes=sampled_classes[-1], extension=True))

PRESETS = {preset.name: preset for preset in (
    Preset("speedrun", GPT_SMALL, three_stages((400, 400, 400), 40, (131_072, 262_144, 393_216), (1.0, 1.51, 1.73), 3072, (10_240, 14_336, 28_672)),
           train_tokens=500_000_000, val_tokens=10_485_760, target_loss=3.28, status="speedrun: not yet run on FineWeb"),
    # One pass over 94 M tokens. Half the batch of the speedrun: twice the steps lower the loss by 0.04 at the same time on one GPU (records/LOG.md).
    Preset("sprint", GPT_SPRINT, three_stages((239, 239, 229), 10, (65_536, 131_072, 196_608), (0.75, 1.13, 1.45), 3072, (6144, 10_240, 14_336)),
           train_tokens=94_000_000, val_tokens=2_097_152, status="sprint: at most one pass over one shard"),
    Preset("smoke", GPT_TINY, (Stage(30, 512, 256, 64, 128, targets=((1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), sampled_classes=4096),
                               Stage(27, 1024, 256, 128, 256, sampled_classes=8192), Stage(3, 1024, 256, 128, 256, extension=True)),
           OptimizerConfig(momentum_warmup_steps=30, momentum_cooldown_steps=8, cooldown_fraction=0.55, averaging_interval_steps=1), "data/sample",
           train_tokens=10_000_000, val_tokens=8192, val_window_tokens=2048, val_windows_tokens=(128, 512), log_every_steps=10,
           status="smoke: practice on a small public-domain sample, never on a leaderboard"),
    Preset("smoke-gpu", dataclasses.replace(GPT_SMALL, ngram_rows=2**20), (Stage(10, 65_536, 1024, 128, 384), Stage(10, 65_536, 1024, 384, 896)),
           OptimizerConfig(momentum_warmup_steps=10, momentum_cooldown_steps=5), "data/sample", train_tokens=10_000_000,
           val_tokens=65_536, val_window_tokens=65_536, val_windows_tokens=(384, 1408), log_every_steps=5,
           status="smoke-gpu: 20 steps at full width, never on a leaderboard"),
)}

# ==== 3. Schedule: pure functions of the step =========================================================================
def stage_index(preset: Preset, step: int) -> int:
    return [index for index, stage in enumerate(preset.stages) for _ in range(stage.steps)][step]

def learning_rate(preset: Preset, step: int) -> float:
    """Relative rate: the stage's multiplier, then a linear cool-down to the final rate, which the extension keeps."""
    config, stage = preset.optimizer, preset.stages[stage_index(preset, step)]
    left = 0.0 if stage.extension else min((1 - step / sum(s.steps for s in preset.stages if not s.extension)) / config.cooldown_fraction, 1.0)
    return stage.learning_rate_multiplier * left + config.final_learning_rate * (1 - left)

def muon_momentum(preset: Preset, step: int) -> float:
    """Low while gradients still turn quickly (start) and while they are averaged anyway (end)."""
    config, (low, high) = preset.optimizer, preset.optimizer.muon_momentum
    warm, cool = step / config.momentum_warmup_steps, (preset.steps - step) / config.momentum_cooldown_steps
    return low + (high - low) * min(warm, cool, 1.0)

def step_rates(preset: Preset, step: int) -> dict[str, float]:
    """Everything an optimizer step reads: its number, Muon's rate and momentum, and Adam's step size by role, bias corrections included."""
    config, scale = preset.optimizer, learning_rate(preset, step)
    rates = {"step": step + 1.0, "muon": config.muon_learning_rate * scale, "momentum": muon_momentum(preset, step)}
    for role, rule in config.rules:
        if isinstance(rule, AdamRule):
            beta1, beta2 = rule.betas
            correction = math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
            rate = config.adam_learning_rate * rule.learning_rate_multiplier * scale
            rates |= {role: rate * correction, f"{role} decay": rate**2 * rule.decay}
    return rates

def averaging(preset: Preset, step: int) -> tuple[float, float]:
    """What Optimizer.average takes after a step: a rate, 1 for the first weights that enter and 0 between two; a share, 0 until the last step."""
    config = preset.optimizer
    since = step - math.ceil((1 - config.averaging_fraction) * preset.steps)
    enters = since >= 0 and since % config.averaging_interval_steps == 0
    return (config.averaging_rate if since else 1.0) * enters, config.averaged_share * (since >= 0 and step + 1 == preset.steps)

def target_weights(preset: Preset, step: int) -> list[float]:
    """Weights of the coming tokens as targets: linear between the two ends of the stage."""
    stage = preset.stages[index := stage_index(preset, step)]
    passed = (step - sum(s.steps for s in preset.stages[:index])) / stage.steps
    return [start + passed * (end - start) for start, end in zip(*stage.targets)]

def rotary_frequencies(preset: Preset, index: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies [key_width / 4], in radians a position, and the softmax scale in a stage. Half of the channels turn, in pairs. At each
    change of the long window YaRN stretches the slow frequencies (less than 32 turns in the window) and sharpens the softmax (arXiv 2309.00071)."""
    frequency, scale = preset.model.rotary_base ** -np.linspace(0, 1, preset.model.key_width // 4), preset.model.attention_scale
    windows = [stage.long_window_tokens for stage in preset.stages[:index + 1]]
    for old, new in zip(windows, windows[1:]):
        turns = old * frequency / (2 * math.pi)
        keep = np.clip((turns - 1) / (32 - 1), 0, 1)
        frequency = frequency * (old / new + keep * (1 - old / new))
        scale *= 0.2 * math.log(new / old) + 1
    return frequency, scale

def geometry_tables(frequency: np.ndarray, scale: float, windows: tuple[int, int], positions: int, dtype: torch.dtype,
                    device: torch.device) -> Geometry:
    """Geometry with cosines and sines for `positions` positions; the channels that do not turn get angle 0."""
    angle = np.outer(np.arange(positions), np.pad(frequency, (0, len(frequency))))
    cos, sin = (torch.from_numpy(table).to(device, dtype) for table in (np.cos(angle), np.sin(angle)))
    return Geometry(dict(zip(("short", "long"), windows)), scale, cos, sin)

def rotary_geometry(preset: Preset, index: int, positions: int, device: torch.device, windows: tuple[int, int] | None = None) -> Geometry:
    """Attention's geometry in a stage, or with other `windows`: the final validation looks further back (record 33)."""
    stage = preset.stages[index]
    windows = windows or (stage.short_window_tokens, stage.long_window_tokens)
    return geometry_tables(*rotary_frequencies(preset, index), windows, positions, getattr(torch, preset.model.dtype), device)

# ==== 4. Model ========================================================================================================
class Targets(NamedTuple):
    """What the head has to predict, on the device; all int32 but weights and log_copy. columns [T]: where in the head the next token is
    (-1: nowhere). positions [T], to find the tokens after the next in the same document. weights [K] float32: of the next token, the one after it,
    ... candidates [S, P]: ids of the only columns of the head that the S equal parts of the batch use (the columns above index these); None: all.
    certain [S]: so many, the first, are targets; each other one, met on a walk over the vocabulary, stands for (V - certain) / (P - certain) columns.
    log_copy [T] float32, of pointer_reference, or None: the next token's share of column `spare`; p[next] gains p[spare] exp(log_copy)."""
    class_index: Tensor
    positions: Tensor
    weights: Tensor
    classes: Tensor | None = None
    num_always: Tensor | None = None
    log_copy: Tensor | None = None
    spare: int = 0

    def ahead(self, k: int) -> Tensor:
        """Columns [T] of the token k further than the next, -1 where the document ends before."""
        columns, later = (F.pad(x[k:], (0, min(k, len(x))), value=-1) for x in (self.class_index, self.positions))
        return torch.where(later == self.positions + k, columns, -1)

    def parts(self, size: int | None = None) -> list[tuple[slice, Targets]]:
        """Rows of each part of the batch, and its targets, with candidates [P] and certain [1]; without them parts of `size` rows, None: one part."""
        size = (size or len(self.class_index)) if self.classes is None else len(self.class_index) // len(self.classes)
        rows = [slice(start, start + size) for start in range(0, len(self.class_index), size)]
        sampled = [(None, None)] * len(rows) if self.classes is None else zip(self.classes, self.num_always[:, None])
        copies = [None if self.log_copy is None else self.log_copy[r] for r in rows]
        return [(r, Targets(self.class_index[r], self.positions[r], self.weights, *s, c, self.spare)) for r, s, c in zip(rows, sampled, copies)]

@dataclasses.dataclass(frozen=True)
class Documents:
    """A packed batch of T tokens on the device; every tensor is int32. tokens [T]: rows of the embedding tables; order [T] and starts [rows + 1]
    group them, see sort_ids. ngrams [T, 3]: rows of the n-gram table. columns, candidates, certain: see Targets. positions, remaining [T]: how many
    tokens of its document (or of the part of it that this batch holds) are before a token, and after it."""
    tokens: Tensor
    order: Tensor
    starts: Tensor
    ngrams: Tensor
    class_index: Tensor
    positions: Tensor
    remaining: Tensor
    classes: Tensor | None
    num_always: Tensor | None

@dataclasses.dataclass(frozen=True)
class Geometry:
    """What attention needs from the schedule: windows in tokens, softmax scale, rotary tables [positions, key_width / 2]."""
    windows: dict[str, int]  # "short" and "long"
    scale: float
    cos: Tensor
    sin: Tensor

# Plain functions of tensors, compiled as regions. Equal layers share one compilation, gradients become ready between
# regions (so hooks fire during the backward pass), and attention runs between them with its window as a run-time value.
def updated(x: Tensor, update: Tensor | None) -> Tensor:
    """The residual stream after a layer. Who reads it next adds the MLP's update: no kernel of its own."""
    return x if update is None else x + update

def scaled(weight: Tensor, x: Tensor) -> Tensor:
    """x [T, width] times a weight given by rows [T], float32: its gradient is then summed by rows, in the kernel of x's, which reads both anyway."""
    return weight[:, None] * x

def layer_inputs(x0: Tensor, ngram: Tensor, *weights: Tensor) -> list[Tensor]:
    """What each layer adds to its stream, of the embedding x0 and that of the last few tokens: at once, so that one kernel sums their gradients."""
    return [(scaled(w, x0) + scaled(v, ngram)).to(x0.dtype) for w, v in zip(weights[::2], weights[1::2])]

def enter_layer(x: Tensor, update: Tensor | None, mix: Tensor, weight: Tensor, skip: Tensor | None, skip_weight: Tensor | None) -> Tensor:
    """Residual stream at the start of a layer: the U-Net skip, then layer_inputs' mix."""
    x = updated(x, update)
    if skip is not None:
        x = x + scaled(torch.sigmoid(skip_weight).expand(len(x)), skip)
    return (scaled(weight, x) + mix).to(mix.dtype)

def attention_in(x: Tensor, update: Tensor | None, mix: Tensor, weight: Tensor, skip: Tensor | None, skip_weight: Tensor | None, value: Tensor | None,
                 scale: Tensor, gate: Tensor):
    """Up to the projection: residual stream and normalised [T, width], gates [T, H] of heads' outputs and value embedding. The layer's scale
    [T], by rows as `weight` is, is on the outputs' gates, which must be > 0: on the weights (record 47) it would take passes over them."""
    x = enter_layer(x, update, mix, weight, skip, skip_weight)
    h, inputs = norm(x), gate.size(1)  # value is read without a gradient, which would be a pass over all of it
    read = h[:, :inputs] if value is None else torch.cat([h[:, :inputs // 2], value[:, :inputs // 2].detach()], dim=1)
    gates, *value_gates = torch.sigmoid(F.linear(read, gate.to(h.dtype))).chunk(1 if value is None else 2, dim=1)
    return x, h, (scale.abs()[:, None] * gates).clamp(min=2.0 ** -20), 4 * value_gates[0] if value_gates else None  # attention divides by the former

def attention_out(x: Tensor, y: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Output projection, out [H D, width], of the gated heads' outputs y [T, H, D], residual: the stream, and normalised for the MLP."""
    x = x + (y.flatten(1) @ out)[None].squeeze(0)  # the views keep it from becoming an addmm, which first copies x
    return x, norm(x)

def mlp_in(x: Tensor, update: Tensor | None, mix: Tensor, weight: Tensor, skip: Tensor | None, skip_weight: Tensor | None):
    """A layer without attention up to its MLP: the stream, and normalised, both [T, width]."""
    x = enter_layer(x, update, mix, weight, skip, skip_weight)
    return x, norm(x)

def final_states(x: Tensor, update: Tensor | None, x0: Tensor, ngram: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm [T, width] of the stream, with embedding and n-grams once more, by weights that its first channels, normalised, give each token."""
    x = updated(x, update)
    weights = F.linear(norm(x)[:, :gate.size(1)], gate.to(x.dtype))
    return norm(x + weights[:, :1] * x0 + weights[:, 1:] * ngram)

def pointer_in(h: Tensor, weight: Tensor) -> Tensor:
    """The pointer's queries and keys [T, 2, W], normalised, from final states h; weight [2 W, width]."""
    return norm(F.linear(h, weight).view(len(h), 2, -1))

class EmbeddingLookup(torch.autograd.Function):
    """`EmbeddingLookup.apply(gather, table, ids, ...)`: gather(ids, table), [T, D]. The gradient goes, with what follows `table`, to table.receive;
    autograd, with five passes over a mostly empty table, is told of none, yet calls the table's hooks after the last lookup of a backward pass."""
    @staticmethod
    def forward(ctx, gather, table, *lookup):
        ctx.table, ctx.lookup = table, lookup
        return gather(lookup[0], table)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.receive(grad, *ctx.lookup)
        return (None,) * (2 + len(ctx.lookup))

def gathered(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, once the other ranks' parts of its last update are here."""
    if owner := getattr(parameter, "owner", None):
        owner.wait_gather()
    return parameter

def make_param(role: str, tensor: Tensor, matrix: tuple[int, int] | None = None) -> nn.Parameter:
    """A parameter with its role (a key of OptimizerConfig.rules) and, for Muon, the shape of the matrices it stacks."""
    parameter = nn.Parameter(tensor)
    parameter.role, parameter.matrix = role, matrix
    return parameter

class Block(nn.Module):
    """The parameters of one layer and the order of its regions. Gives the stream and, apart, the MLP's update, see `updated`."""
    def __init__(self, layer: Layer, config: ModelConfig, empty: Callable[..., Tensor], ops: Ops):
        super().__init__()
        self.layer, self.ops, self.heads = layer, ops, config.heads
        width, matrix = config.width, (config.heads * math.gcd(config.key_width, config.head_width), config.width)
        self.weights = make_param("scalar", empty(4, dtype=torch.float32))  # of the stream, x0, the n-grams, attention
        self.skip_weight = make_param("scalar", empty((), dtype=torch.float32)) if layer.skip_from is not None else None
        if layer.attention:
            self.qkv = make_param("attention", empty(2 * config.heads * config.key_width + config.attention_width, width), matrix)
            self.out = make_param("attention", empty(config.attention_width, width), matrix)  # as q, k, v lie: one bank for all
            gates = config.heads * (1 if layer.value_embedding is None else 2)  # of the heads' outputs, then of the value embedding
            self.gate = make_param("gate", empty(gates, config.gate_inputs, dtype=torch.float32))
        if layer.mlp:
            self.up = make_param("mlp_up", empty(config.mlp_width, width), (config.mlp_width, width))
            self.down = make_param("mlp_down", empty(config.mlp_width, width), (config.mlp_width, width))
        self.attention_in, self.attention_out, self.mlp_in = map(ops.compile, (attention_in, attention_out, mlp_in))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        initial = {"weights": (1.1, 0.0, 0.1, 0.5), "skip_weight": -1.5}  # the others 0
        for name, parameter in self.named_parameters():
            if name in ("qkv", "up"):
                bound = math.sqrt(3) * 0.5 * parameter.size(1) ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                parameter.copy_(torch.tensor(initial.get(name, 0.0)))

    def forward(self, x: Tensor, update: Tensor | None, mix: Tensor, weight: Tensor, scale: Tensor, skip: Tensor | None,
                value: Tensor | None, documents: Documents, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        if layer.attention:
            x, h, gates, value_gates = self.attention_in(x, update, mix, weight, skip, self.skip_weight, value, scale, self.gate)
            turn = documents.positions, geometry.cos, geometry.sin
            q, k, v = self.ops.project_heads(h, gathered(self.qkv), value, value_gates, *turn, self.heads, layer.key_offset)
            y = self.ops.attention(q, k, v, documents, geometry.windows[layer.window], geometry.scale, gates)
            x, h = self.attention_out(x, y, gathered(self.out))
        else:
            x, h = self.mlp_in(x, update, mix, weight, skip, self.skip_weight)
        return x, self.ops.mlp(h, gathered(self.up), gathered(self.down)) if layer.mlp else None

class GPT(nn.Module):
    """The language model. `forward` returns the summed cross-entropy (nats) of a packed batch."""
    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device):
        super().__init__()
        self.config, self.ops = config, ops
        if config.attention_width > config.width:  # values of n-grams are channels of the stream
            fail("heads * head_width", f"at most the model's width, {config.width}", config.attention_width, "fewer heads, or narrower ones")
        empty = functools.partial(torch.empty, device=device)
        weight = functools.partial(empty, dtype=getattr(torch, config.dtype))
        table = functools.partial(weight, config.padded_vocabulary)
        self.embedding = make_param("embedding", table(config.width))
        self.ngram = make_param("ngram", weight(config.table_rows, config.width))
        self.skip_sources = {layer.skip_from for layer in config.layers}
        self.blocks = nn.ModuleDict({str(slot): Block(layer, config, weight, ops)
                                     for slot, layer in enumerate(config.layers) if layer.attention or layer.mlp})
        self.value_embeddings = nn.ParameterList(make_param("value_embedding", table(config.attention_width)) for _ in range(config.value_embeddings))
        self.head = make_param("head", table(config.width))
        self.pointer = make_param("pointer", weight(2 * config.pointer_width, config.width), (config.pointer_width, config.width))
        self.final_gate = make_param("gate", empty(2, config.gate_inputs, dtype=torch.float32))
        self.norm, self.layer_inputs, self.final_states, self.pointer_in = map(ops.compile, (norm, layer_inputs, final_states, pointer_in))
        self.sum_rows = ops.compile(lambda ids, table: F.embedding(ids.long(), table).sum(1))  # 2^31 elements and more

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw the initial weights: the same on every rank."""
        generator = torch.Generator(self.head.device).manual_seed(seed)
        self.embedding.normal_(generator=generator)
        for parameter in self.value_embeddings:
            parameter.normal_(std=0.01, generator=generator)
        for block in self.blocks.values():
            block.reset(generator)
        self.ngram.zero_()
        self.final_gate.zero_()
        self.head.normal_(std=0.005, generator=generator)
        # Keys as queries: from the first step on the pointer points at states like its own.
        self.pointer.copy_(self.pointer.chunk(2)[0].normal_(std=0.5 * self.config.width ** -0.5, generator=generator).repeat(2, 1))

    def in_order(self) -> list[nn.Parameter]:
        """The parameters that ranks gather, as the forward pass comes to them."""
        tables = dict(enumerate(self.value_embeddings))
        layers = (p for block in self.blocks.values() for p in (tables.get(block.layer.value_embedding), *block.parameters()) if p is not None)
        return [*dict.fromkeys([self.embedding, *layers, *tables.values(), self.pointer, self.head])]

    def features(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Final hidden states [T, width], normalised, ready for the head."""
        x = x0 = self.norm(self.ops.embed(gathered(self.embedding), documents))
        ngram = EmbeddingLookup.apply(self.sum_rows, self.ngram, documents.ngrams)  # second: its gradient is first, and has the longest way
        skips: dict[int | None, Tensor | None] = {None: None}
        # Weights by rows: of all the gradients over the tokens one kernel makes the sums.
        rows = torch.cat([block.weights for block in self.blocks.values()])[:, None].expand(-1, len(x)).unbind()
        update, streams, inputs, scales = None, rows[::4], list(zip(rows[1::4], rows[2::4])), rows[3::4]
        # Without gradients a mix at a time: windows are long.
        mixes = self.layer_inputs(x0, ngram, *sum(inputs, ())) if torch.is_grad_enabled() else (self.layer_inputs(x0, ngram, *i)[0] for i in inputs)
        for (slot, block), mix, weight, scale in zip(self.blocks.items(), mixes, streams, scales):
            # Looked up here, not beforehand: autograd goes back in this order, and the table's gradient leaves while earlier layers still work.
            of = block.layer.value_embedding
            value = ngram if of == NGRAMS else None if of is None else self.ops.embed(gathered(self.value_embeddings[of]), documents)
            x, update = block(x, update, mix, weight, scale, skips[block.layer.skip_from], value, documents, geometry)
            if int(slot) in self.skip_sources:
                skips[int(slot)], update = (x := updated(x, update)), None  # one sum, and one gradient, for both that read it
        return self.final_states(x, update, x0, ngram, self.final_gate)

    def predictions(self, documents: Documents, geometry: Geometry, weights: Tensor) -> tuple[Tensor, Tensor, Targets, Softcap]:
        """What the loss takes. What the softmax gives to the first id past the vocabulary, the pointer may give to other tokens."""
        h, config = self.features(documents, geometry), self.config
        qk = self.pointer_in(h, gathered(self.pointer))
        log_copy = self.ops.pointer(qk, documents, config.pointer_window_tokens, config.pointer_scale)
        spare = config.vocabulary if documents.classes is None else 0
        targets = Targets(documents.class_index, documents.positions, weights, documents.classes, documents.num_always, log_copy, spare)
        return h, gathered(self.head), targets, config.softcap

    def forward(self, documents: Documents, geometry: Geometry, target_weights: Tensor) -> Tensor:
        return self.ops.head_loss(*self.predictions(documents, geometry, target_weights))

    @torch.no_grad()
    def evaluate(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Summed cross-entropy without gradients, full vocabulary, float32 log-probabilities."""
        return self.ops.head_loss_eval(*self.predictions(documents, geometry, torch.ones(1, device=self.head.device)))

    @torch.no_grad()
    def next_token(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Probabilities [padded vocabulary], float32, of what follows a single document."""
        h, spare = self.features(documents, geometry), self.config.vocabulary
        p = softcapped(F.linear(h[-1], self.head).float(), self.config.softcap).softmax(-1)
        q, k = pointer_in(h[-1 - self.config.pointer_window_tokens:], self.pointer).float().unbind(1)
        shares = F.pad(self.config.pointer_scale * (k[:-1] @ q[-1]), (0, 1)).softmax(-1)
        ids = F.pad(documents.class_index[-len(k):-1], (0, 1), value=spare)
        return p.index_fill(0, ids[-1:].long(), 0).index_add(0, ids, p[spare] * shares)

# ==== 5. Optimizer: NorMuon for hidden matrices, Adam for the rest; sharded, but for n-grams and scalars ==============
# Phases: begin (of sparse tables: exchange the rows to be read), gather_ (of the others: collect what ranks updated; `wait_gather` waits), reduce_
# (gradients to who needs them; nothing blocks), compute_ (update). Gradients of matrices and scalars meet in fixed buffers, of tables if GPUs share.
def flatten_into(parameters: list[nn.Parameter], weights: Tensor, grads: Tensor, align: int = 1) -> None:
    """Move the parameters into the flat order of `weights`, each at a multiple of `align`; its `grad_view` is the same part of `grads`."""
    weights, grads, start = weights.view(-1), grads.view(-1), 0
    for parameter in parameters:
        part = slice(start, start + parameter.numel())
        weights[part].copy_(parameter.detach().view(-1))
        parameter.data, parameter.grad_view = weights[part].view_as(parameter), grads[part].view_as(parameter)
        start += -(-parameter.numel() // align) * align

def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """The float32 whose rounding to bfloat16 is `high` and whose remaining bits, a signed difference, are `low` (int16)."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)

def split_float32(value: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of join_float32. Rounds half up in magnitude, so the bfloat16 weights are not biased towards zero."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)

def mean_gradient(received: Tensor) -> Tensor:
    """Mean over the ranks of what reduce_scatter brings, [n, ...], in float32: n is static, so the sum is fused into the kernel that reads it."""
    return sum(part.float() for part in received.unbind()) / len(received)

def nesterov_momentum(buffer: Tensor, received: Tensor, momentum: Tensor) -> Tensor:
    """Update `buffer` (float32) in place and return the look-ahead gradient in the gradients' dtype."""
    g = mean_gradient(received)
    average = buffer + (1 - momentum) * (g - buffer)
    buffer.copy_(average)
    return (g + momentum * (average - g)).to(received.dtype)

def normuon_update(update: Tensor, weight: Tensor, low: Tensor | None, second_moment: Tensor | None, multiplier: Tensor,
                   rate: Tensor, decay: float, beta2: float | None) -> None:
    """Apply orthogonalised updates [N, rows, columns] to the weights in place. NorMuon divides by a running root mean square per output (rows, or
    columns where a matrix is wide) and restores each matrix's norm; without `second_moment` this is Muon. The cautious decay shrinks weights only
    where the update does too. Sources: NorMuon arXiv 2510.05491; public records 41-43 and 48."""
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
    for target, part in zip((weight, low), [value] if low is None else split_float32(value)):
        target.copy_(part)

def adam_update(weight: Tensor, received: Tensor, mean: Tensor, square: Tensor, step_size: Tensor, shrink: Tensor,
                beta1: float, beta2: float, epsilon: float) -> None:
    """One Adam step in place, in float32. step_size: rate and bias corrections. A share `shrink` decays where the update shrinks too (record 50)."""
    g = mean_gradient(received)
    m, v = torch.lerp(mean.float(), g, 1 - beta1), torch.lerp(square.float(), g * g, 1 - beta2)
    mean.copy_(m)
    square.copy_(v)
    update, value = step_size * m / (v.sqrt() + epsilon), weight.float()
    weight.copy_(value - update - shrink * value * (update * value > 0))

class Stateful:
    """Optimizer state by name; `kept` says which attributes belong to it. `low`: see join_float32; `average`: see average_."""
    kept: tuple[str, ...] = ("weights", "mean", "square", "average")
    low: Tensor | None = None
    average: Tensor | None = None

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for name in self.kept if (tensor := getattr(self, name)) is not None}

    def reset(self) -> None:
        for tensor in (tensor for name, tensor in self.state().items() if name != "weights"):
            tensor.zero_()

    def average_(self, rate: float, share: float = 0.0) -> None:
        """Move the average of the weights a share `rate` of the way to them; at the end also them a `share` to it, rows as long as before."""
        exact = self.shard.float() if self.low is None else join_float32(self.shard, self.low)
        self.average.lerp_(exact, rate)
        if share:
            mixed = exact.lerp(self.average, share)
            lengths = [torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-30) for x in (exact, mixed)]
            self.shard.copy_(mixed * (lengths[0] / lengths[1]))

class Gathered:
    """Weights of which each rank updates a part; a parameter's `owner`, who asks for the other parts and waits for them."""
    def gather_(self, barrier: bool = True) -> None:
        self.gathered = self.ranks.all_gather(self.weights, barrier)

    def wait_gather(self) -> None:
        vars(self).pop("gathered", lambda: None)()

class MatrixGroup(Gathered):
    """Matrices of one shape in neighbouring layers, which travel together: [N, rows, columns], N a multiple of the ranks."""
    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks, weights: Tensor, grads: Tensor, received: Tensor):
        self.ranks, self.weights, self.grads, self.received, self.parameters = ranks, weights, grads, received, parameters
        flatten_into(parameters, weights, grads)
        for parameter in parameters:
            parameter.owner = self

    def reduce_(self) -> None:
        for parameter in self.parameters:
            parameter.grad_view.zero_() if parameter.grad is None else parameter.grad_view.copy_(parameter.grad)  # nothing to copy if it came there
            parameter.grad = None
        self.reduced = self.ranks.reduce_scatter(self.grads, self.received)

class MatrixBank(Stateful):
    """All hidden matrices of one shape, in the order of the layers, filled up with zero matrices to a multiple of the ranks. Up to five groups, if
    ranks and layers divide them, travel on their own: gradients while earlier layers still work, weights shortly before use. One update for all."""
    kept = ("weights", "low", "momentum", "second_moment", "average")

    def __init__(self, parameters: list[nn.Parameter], rules: dict[str, MuonRule], config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ops, self.config, (rows, columns) = ops, config, parameters[0].matrix
        starts = [0, *itertools.accumulate(p.numel() // (rows * columns) for p in parameters)]
        each = -(-starts[-1] // ranks.world)  # matrices of a rank
        sizes = [ranks.world * each // n for n in range(1, 6 if ranks.world - 1 else 2) if not each % n]
        size = min(size for size in sizes if {*starts}.issuperset(range(size, starts[-1], size)))  # of a group: none cuts a parameter
        shape = each * ranks.world // size, ranks.world, size // ranks.world, rows, columns
        empty = torch.zeros(each * ranks.world, rows, columns, dtype=parameters[0].dtype, device=ranks.device)
        self.weights, self.grads = ranks.shared(empty, shape[0]), ranks.shared(empty.clone(), shape[0])
        self.shard, grad_shard = (tensor.view(shape)[:, ranks.rank] for tensor in (self.weights, self.grads))
        self.received = grad_shard.new_empty(ranks.world, *grad_shard.shape) if ranks.copy_stream else grad_shard[None]
        self.groups = [MatrixGroup([p for p, start in zip(parameters, starts) if start // size == index], ranks, *parts)
                       for index, parts in enumerate(zip(self.weights.split(size), self.grads.split(size), self.received.unbind(1)))]
        self.low = torch.zeros_like(self.shard, dtype=torch.int16) if self.weights.dtype == torch.bfloat16 else None
        self.momentum, self.average = (torch.zeros_like(self.shard, dtype=torch.float32) for _ in range(2))
        reduced = (rows, 1) if rows >= columns else (1, columns)
        self.second_moment = None if config.second_moment_decay is None else torch.zeros(*self.shard.shape[:2], *reduced, device=ranks.device)
        multipliers = [rules[p.role].learning_rate_multiplier for p in parameters for _ in range(p.numel() // (rows * columns))]
        multipliers = F.pad(torch.tensor(multipliers, device=ranks.device), (0, len(empty) - starts[-1]))
        self.multiplier = multipliers.view(*shape[:3], 1, 1)[:, ranks.rank].clone()
        self.nesterov, self.update = ops.compile(nesterov_momentum), ops.compile(normuon_update)

    def compute_(self, rates: dict[str, Tensor]) -> None:
        for group in self.groups:
            group.reduced()
        update = self.nesterov(self.momentum, self.received, rates["momentum"])
        update = self.ops.orthogonalize(update.flatten(0, 1), RECIPES[self.config.orthogonalization]).view(self.shard.shape)
        self.update(update, self.shard, self.low, self.second_moment, self.multiplier, rates["muon"],
                    self.config.muon_weight_decay, self.config.second_moment_decay)

class AdamTable(Stateful, Gathered):
    """One large table [rows, width], each rank updating a slice of its rows. Its gradient leaves from a backward hook. The moments have the
    weights' dtype: bfloat16's 2^-9 is small beside the 5 % by which a step moves them, and an update moves 14 bytes a weight, not 22."""
    def __init__(self, parameter: nn.Parameter, rule: AdamRule, config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.config, self.rule, self.role, self.parameter = ranks, config, rule, parameter.role, parameter
        self.weights = parameter.data = ranks.shared(parameter.data)
        parameter.owner, parameter.receive = self, self.receive
        self.shard = ranks.shard(self.weights)
        parameter.grad_view = self.grads = ranks.shared(torch.zeros_like(self.weights)) if ranks.copy_stream else None
        self.received = self.shard.new_empty(ranks.world, *self.shard.shape) if ranks.copy_stream else None
        self.mean, self.square = torch.zeros_like(self.shard), torch.zeros_like(self.shard)
        self.average = torch.zeros_like(self.shard, dtype=torch.float32)
        self.update = ops.compile(adam_update)

    def receive(self, grad: Tensor, *lookup: Tensor) -> None:
        """Add the gradient of a lookup [T, width] to the table's; the first of a step writes all of it, so nothing is cleared before."""
        table, begun = self.parameter, self.parameter.grad is not None
        table.grad = table.grad if begun else torch.empty_like(table) if (view := unused_grad_view(table)) is None else view
        launch_groups(embedding_grad_kernel, grad, *lookup, len(table), table.grad, ADD=begun)

    def reduce_(self) -> None:
        with torch.profiler.record_function(f"reduce {self.role}"):
            grad = self.parameter.grad if self.grads is None else self.grads.copy_(self.parameter.grad)  # nothing to copy if it came there
            received = self.ranks.shard(grad)[None] if self.received is None else self.received
            self.reduced = self.ranks.reduce_scatter(grad, received), received

    def compute_(self, rates: dict[str, Tensor]) -> None:
        wait, received = vars(self).pop("reduced")  # not kept: NCCL's handle keeps the gradient alive
        wait()
        self.update(self.shard, received, self.mean, self.square, rates[self.role], rates[f"{self.role} decay"],
                    *self.rule.betas, self.config.adam_epsilon)
        self.parameter.grad = None

class SparseTable(Stateful):
    """A table [rows, width] of which a step reads few rows. The ranks gather the gradients of all lookups and make the same update of those rows,
    each in its copy of the table: Adam without a first moment, the second one number a row (record 92)."""
    kept = ("weights", "square", "last")

    def __init__(self, parameter: nn.Parameter, rule: AdamRule, config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.ops, self.config, self.rule, self.role = ranks, ops, config, rule, parameter.role
        self.weights, self.received = parameter.data, []  # of each micro-batch the gradient [T, width]
        self.square, self.last = (torch.zeros(len(parameter), device=ranks.device) for _ in range(2))
        room = lambda *shape, dtype: ranks.shared(torch.empty(shape, dtype=dtype, device=ranks.device))
        self.room = functools.cache(room) if ranks.copy_stream else room  # what is shared is kept, for each size of a batch
        parameter.owner, parameter.receive = self, lambda grad, *_: self.received.append(grad)

    def gather(self, parts: list[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """What all ranks have for the micro-batches of a step, [their tokens, ...], with the wait for it."""
        full, rows = parts[0], self.ranks.world * sum(map(len, parts))
        if rows > len(full):
            full = self.room(rows, full.size(1), dtype=full.dtype)
            torch.cat(parts, out=self.ranks.shard(full))
        return full, self.ranks.all_gather(full)

    def begin(self, ids: list[Tensor]) -> None:
        """Given the rows [T, K] that each micro-batch will read, of this table as of every sparse one. They are sorted while the model works."""
        full, wait = self.gather(ids)
        self.lookup = []
        self.grouped = self.ranks.on_side_stream(lambda: (wait(), self.lookup.extend(group_ids(full))))

    def reduce_(self) -> None:
        self.reduced, self.received = self.gather(self.received), []

    def compute_(self, rates: dict[str, Tensor]) -> None:
        grads, wait = vars(self).pop("reduced")  # not kept: memory for others
        wait()
        self.grouped()
        self.ops.sparse_adam(grads, self.lookup, self.weights, self.square, self.last, rates["step"], rates[self.role], rates[f"{self.role} decay"],
                             self.rule.betas[1], self.config.adam_epsilon, 1 / self.ranks.world)  # the mean over ranks

class AdamScalars(Stateful):
    """Every small parameter in one flat float32 buffer, updated alike on every rank: one all-reduce, nothing to gather."""
    def __init__(self, parameters: list[nn.Parameter], rules: dict[str, AdamRule], config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, self.config, self.rules = ranks, config, rules
        self.parameters = parameters = sorted(parameters, key=lambda p: p.role)  # each role becomes one contiguous part; the sort is stable
        # Compiled code, perhaps another process's, takes it for granted that parameters are aligned as when it was compiled: so all are.
        size = {p: aligned(p.numel()) for p in parameters}
        self.weights = torch.zeros(sum(size.values()), device=ranks.device)
        self.grads, self.mean, self.square = (torch.zeros_like(self.weights) for _ in range(3))
        flatten_into(parameters, self.weights, self.grads, align=aligned(1))
        stops = {p.role: stop for p, stop in zip(parameters, itertools.accumulate(size.values()))}  # that of a role's last parameter stays
        self.parts = {role: slice(start, stop) for (role, stop), start in zip(stops.items(), [0, *stops.values()])}
        self.update = ops.compile(adam_update)

    def reduce_(self) -> None:
        torch._foreach_copy_([p.grad_view for p in self.parameters], [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        self.reduced = self.ranks.all_reduce_mean(self.grads)

    def compute_(self, rates: dict[str, Tensor]) -> None:
        self.reduced()
        for role, part in self.parts.items():
            self.update(self.weights[part], self.grads[None, part], self.mean[part], self.square[part], rates[role], rates[f"{role} decay"],
                        *self.rules[role].betas, self.config.adam_epsilon)

class Optimizer:
    """Owns the storage of every parameter and decides when each gradient leaves. Order of a step: the ranks gather what the last step updated, in the
    order in which the model reads it, which waits only where it does; tables and groups of matrices reduce from hooks while the backward pass (of the
    last micro-batch) still runs, the rest after it. Three updates run beside each other: of matrices, whose products leave most of the GPU to what
    moves memory, since one rank of several has few; of the tables that the next step reads before any matrix, whose gradients are complete last and
    whose weights are gathered at once; of all else. Averages: see Stateful.average_."""
    def __init__(self, model: nn.Module, config: OptimizerConfig, ranks: Ranks, ops: Ops):
        self.ranks, rules, kinds = ranks, dict(config.rules), collections.defaultdict(list)  # tables, scalars, matrices by shape
        for p in model.parameters():
            kinds[p.matrix if isinstance(rule := rules[p.role], MuonRule) else "table" if rule.sharded or rule.sparse else "scalar"].append(p)
        tables, scalars = kinds.pop("table", []), kinds.pop("scalar", [])
        self.banks = [MatrixBank(parameters, rules, config, ranks, ops) for parameters in kinds.values()]
        self.scalars = AdamScalars(scalars, rules, config, ranks, ops)
        self.tables = [(SparseTable if (rule := rules[p.role]).sparse else AdamTable)(p, rule, config, ranks, ops) for p in tables]
        self.sparse, self.dense = ([table for table in self.tables if table.rule.sparse == sparse] for sparse in (True, False))
        self.averaged = [*self.banks, *self.dense]
        self.owners = [p.owner for p in model.in_order() if hasattr(p, "owner")]  # a group, once for each of its parameters
        first = next((at for at, owner in enumerate(self.owners) if owner not in self.dense), 0)
        self.early, self.late = self.owners[:first], [*dict.fromkeys(self.owners[first:])]
        for parameter in (p for p in model.parameters() if hasattr(p, "owner")):
            parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self, ids: list[Tensor]) -> None:
        """Before the first micro-batch of a step, given the rows [T, K] of sparse tables that each will read."""
        # Whether this backward pass is the step's last; how many gradients it still owes, by owner; the owners whose gradients have been sent.
        self.complete, self.missing, self.sent = False, collections.Counter([*self.owners, *self.sparse]), []
        for number, item in enumerate(self.late):
            item.gather_(barrier=not number)
        for table in self.sparse:
            table.begin(ids)

    def average(self, rate: float, share: float = 0.0) -> None:
        for item in self.averaged:
            item.average_(rate, share)

    def gather(self) -> None:
        """Every rank has all weights: before anything but a training step reads them."""
        for item in (*self.early, *self.late):
            item.gather_()
            item.wait_gather()

    def _ready(self, parameter: nn.Parameter) -> None:
        self.missing[parameter.owner] -= self.complete
        if self.complete and not self.missing[parameter.owner]:
            parameter.owner.reduce_()
            self.sent.append(parameter.owner)

    @torch.no_grad()
    def step(self, rates: dict[str, Tensor]) -> None:
        """Update everything; `rates` holds 0-dimensional tensors, see step_rates."""
        for item in self.late:
            item.wait_gather()  # a table that no layer reads: nothing may stay under way
        groups = [group for bank in self.banks for group in bank.groups if group not in self.sent]  # of layers that had no gradient
        for item in (self.scalars, *groups):
            item.reduce_()
        in_use = [item.parameter.grad for item in self.early]  # not freed before another stream is done with it
        waits = [self.ranks.on_side_stream(lambda: [bank.compute_(rates) for bank in reversed(self.banks)]),  # as the reductions left
                 self.ranks.on_side_stream(lambda: [(item.compute_(rates), item.gather_()) for item in self.sent if item in self.early], side=1)]
        for item in (*(item for item in self.sent if item in self.dense and item not in self.early), self.scalars, *self.sparse):
            item.compute_(rates)
        for wait in (*waits, *(item.wait_gather for item in self.early)):
            wait()

    def reset(self) -> None:
        for item in (*self.banks, self.scalars, *self.tables):
            item.reset()
        for table in self.sparse:
            table.received.clear()  # in a step that was broken off

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, the model's parameters included."""
        items = {"scalars": self.scalars, **{f"bank{i}": b for i, b in enumerate(self.banks)}, **{f"table{i}": t for i, t in enumerate(self.tables)}}
        return {f"{name}.{key}": tensor for name, item in items.items() for key, tensor in item.state().items()}

# ==== 6. Training =====================================================================================================
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

def micro_batch_chunks(stage: Stage, ranks: Ranks, most_tokens: int) -> int:
    """How many of a rank's slots form one micro-batch: as many as have at most so many tokens, in equal parts."""
    slots = CHUNKS // ranks.world
    while slots > 1 and slots * stage.chunk_tokens > most_tokens:
        slots //= 2
    return slots

def memory_plan(preset: Preset, ranks: Ranks, ops: Ops, room_bytes: float | None = None) -> tuple[bool, int, int]:
    """Whether layers are computed again in the backward pass, the most tokens of a micro-batch, and the bytes that a rank then needs
    at most: its very state, and peaks a token that were measured for GPT_SMALL on one H200. Fails if a single slot does not fit."""
    if room_bytes is None:
        if ranks.device.type != "cuda":
            return False, sys.maxsize, 0
        room_bytes = min(ranks.gather_objects(0.95 * torch.cuda.mem_get_info(ranks.device)[0]))
    meta, several = Ranks(ranks.rank, ranks.world, torch.device("meta")), ranks.world > 1
    optimizer = Optimizer(GPT(preset.model, ops, meta.device), preset.optimizer, meta, ops)
    state = sum(tensor.nbytes for tensor in optimizer.state().values())
    # Gradients, at most: where autograd leaves them, where they meet, what others sent; what SparseTable gathers. Then what average_ holds.
    state += sum(item.weights.nbytes for item in (2 + several) * [optimizer.scalars, *optimizer.banks] + (1 + 2 * several) * optimizer.dense)
    gathered = 2 * preset.model.width * (sum if several else max)({stage.batch_tokens for stage in preset.stages})
    state += gathered + 4 * max(item.average.nbytes for item in optimizer.averaged)
    slot = max(stage.chunk_tokens for stage in preset.stages)
    head = 4 * max(stage.sampled_classes or preset.model.padded_vocabulary for stage in preset.stages)  # logits and their gradient
    for recompute, per_token in ((False, head + {"fp8": 303_000, "bf16": 359_000}.get(ops.names["mlp"], 849_000)), (True, head + 61_000)):
        most = min(max(slot, int(room_bytes - state) // per_token), 98_304)  # more tokens need memory and save no time
        tokens = max(micro_batch_chunks(stage, ranks, most) * stage.chunk_tokens for stage in preset.stages)
        needed = state + max(tokens * per_token, 31_000 * preset.val_window_tokens)
        if needed <= room_bytes:
            return recompute, tokens, needed
    fail("GPU memory", f"{needed / 2**30:.1f} GiB for one slot of {slot:,} tokens at a time", f"{room_bytes / 2**30:.1f} GiB",
         "more GPUs, end other programs on this one (nvidia-smi), or --preset smoke", EXIT_HARDWARE)

def open_corpus(preset: Preset, folder: Path) -> tuple[TokenStream, Path, list[list[np.ndarray]], str]:
    """What a run reads, checked: training stream, validation shard and windows, hash of the shards."""
    stream, shard = TokenStream(folder, preset.train_tokens, preset.model.vocabulary), find_shards(folder, "val")[0]
    stream.chunk_starts(preset.stages)  # fails if there are not enough tokens
    windows = validation_windows(shard, preset.val_tokens, preset.val_window_tokens, preset.model.vocabulary)
    return stream, shard, windows, files_hash([*stream.paths, shard])

class Trainer:
    """One compiled model, its optimizer and its data: what several runs of a process share."""
    def __init__(self, preset: Preset, ranks: Ranks, ops: Ops, clock: Clock, data: Path):
        self.preset, self.ranks, self.ops, self.clock = preset, ranks, ops, clock
        stages, pin = preset.stages, ranks.device.type == "cuda"
        self.stream, validation_shard, windows, self.data_hash = open_corpus(preset, data)
        recompute, micro_batch_tokens, _ = memory_plan(preset, ranks, ops)
        self.warm, self.longest = False, max(len(piece) for pieces in windows for piece in pieces)
        self.validation = [pack({0: pieces}, preset.model, pin) for pieces in windows[ranks.rank::ranks.world]]
        validated = np.asarray(open_shard(validation_shard, preset.model.vocabulary)[:preset.val_tokens + 1])
        self.validation_hash = hashlib.sha256(validated.tobytes()).hexdigest()[:16]
        self.micro_chunks = {stage: micro_batch_chunks(stage, ranks, micro_batch_tokens) for stage in stages}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}  # of a step of each stage, with its inputs and its loss
        self.graph_pool = torch.cuda.MemPool() if ops.graphs else None  # after the graphs: it must outlive them
        self.model = GPT(preset.model, ops, ranks.device)
        if recompute:
            for block in self.model.blocks.values():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        self.model.reset(seed=0)
        self.optimizer = Optimizer(self.model, preset.optimizer, ranks, ops)
        positions = max(self.longest, *(stage.document_cap_tokens for stage in stages))
        self.geometries = [rotary_geometry(preset, index, positions, ranks.device) for index in range(len(stages))]
        self.final_geometry = rotary_geometry(preset, len(stages) - 1, positions, ranks.device, preset.val_windows_tokens)
        rates = [step_rates(preset, step) for step in range(preset.steps)]
        self.rate_names = list(rates[0])
        # On the device beforehand: a step reads its rates without a copy or a synchronise, and changing values never recompile.
        self.rates = torch.tensor([list(row.values()) for row in rates], dtype=torch.float32, device=ranks.device)
        self.target_weights = [torch.tensor(target_weights(preset, step), device=ranks.device) for step in range(preset.steps)]

    def training_step(self, step: int, batches: list[HostBatch]) -> Tensor:
        """Forward, backward and update over this rank's micro-batches; returns their summed loss, on the device until the next step."""
        sources = [*(batch.data for batch in batches), self.rates[step], self.target_weights[step]]
        if (index := stage_index(self.preset, step)) not in self.graphs:
            return self._step(step, batches, [source.to(self.ranks.device, copy=True, non_blocking=True) for source in sources])
        graph, inputs, loss = self.graphs[index]
        for target, source in zip(inputs, sources):
            target.copy_(source, non_blocking=True)
        graph.replay()
        return loss

    def _step(self, step: int, batches: list[HostBatch], inputs: list[Tensor]) -> Tensor:
        """What a step does once its inputs are on the device: the data of each micro-batch, the rates, the weights of the targets."""
        *data, rates, weights = inputs
        total, geometry = torch.zeros((), device=self.ranks.device), self.geometries[stage_index(self.preset, step)]
        micro_batches = [batch.views(buffer) for batch, buffer in zip(batches, data)]
        self.optimizer.begin([documents.ngrams for documents in micro_batches])
        for number, documents in enumerate(micro_batches, 1):
            self.optimizer.complete = number == len(micro_batches)
            loss = self.model(documents, geometry, weights)
            (loss * (self.ranks.world / CHUNKS)).backward()  # ranks are averaged afterwards: the mean over slots for any world size
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
        self.graphs[stage_index(self.preset, step)] = graph, inputs, loss

    def evaluate(self, batch: HostBatch, geometry: Geometry) -> Tensor:
        """Summed cross-entropy of a window, in the memory that captured steps need only while they run."""
        with torch.cuda.use_mem_pool(self.graph_pool) if self.graph_pool else contextlib.nullcontext():
            return self.model.evaluate(batch.to(self.ranks.device), geometry)

    @torch.no_grad()
    def validate(self, geometry: Geometry) -> float:
        """Mean cross-entropy in nats a token over the validation windows, every token counted."""
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for batch in self.validation:
            self.ranks.heartbeat("the validation began")
            total += self.evaluate(batch, geometry).double()
        return float(self.ranks.sum(total)) / self.preset.val_tokens

    def initialise(self, seed: int) -> str:
        self.model.reset(seed)
        self.model.zero_grad(set_to_none=True)
        self.optimizer.reset()
        return state_hash(self.optimizer.state())

    def warm_up(self) -> int:
        """Run a step of every stage, and the validation, on generated documents. Returns the number of variants."""
        pin, first, variants = self.ranks.device.type == "cuda", 0, {}
        for stage in self.preset.stages:
            slots = {slot: generated_pieces(stage.chunk_tokens, stage.document_cap_tokens, 7 + slot) for slot in range(self.micro_chunks[stage])}
            batch = pack(slots, self.preset.model, pin, stage.sampled_classes)
            self.ranks.heartbeat("warm-up", 10)  # it compiles
            variants[first] = [batch] * (CHUNKS // self.ranks.world // self.micro_chunks[stage])
            self.training_step(first, variants[first])
            first += stage.steps
        for step, batches in reversed(variants.items()) if self.ops.graphs else ():  # the largest first: the others fit into its memory
            self.ranks.heartbeat("warm-up", 10)
            self.capture(step, batches)
        self.optimizer.average(1.0, 0.5)
        self.evaluate(pack({0: generated_pieces(self.preset.val_window_tokens, self.longest, 7)}, self.preset.model, pin), self.final_geometry)
        return len(variants)

class RunOptions(NamedTuple):
    steps: int
    complete: bool  # neither shortened nor profiled: else it is no record
    val_every: int | None
    profile: tuple[int, int] | None  # first and last step of a trace
    profile_path: Path

class Meter:
    """Losses and times of the logged steps, read back one log interval later, when the device has surely finished them."""
    def __init__(self, log: RunLog, trainer: Trainer, total_steps: int):
        self.log, self.trainer, self.cuda, self.total_steps = log, trainer, trainer.ranks.device.type == "cuda", total_steps
        self.total_tokens = sum([stage.batch_tokens for stage in trainer.preset.stages for _ in range(stage.steps)][:total_steps])
        self.pending: tuple | None = None
        self.tokens, self.last_step, self.last = 0, 0, self.now()  # `last`: the start of the interval, which a pause of the clock moves

    def now(self) -> Any:
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)) if self.cuda else self.trainer.clock.milliseconds()

    def record(self, step: int, loss: Tensor, stage: Stage) -> None:
        """Note the loss of `step` (0-based), on every rank: it holds an all-reduce. Each stage's last step is among them: no interval spans two."""
        self.flush()
        ranks, steps = self.trainer.ranks, step + 1 - self.last_step
        host = ranks.sum(torch.stack((loss, torch.full_like(loss, ranks.stop_asked)))).to("cpu", non_blocking=True)
        self.tokens += steps * stage.batch_tokens
        self.pending = (step + 1, host, self.last, self.now(), steps, stage, self.tokens)
        self.last, self.last_step = self.pending[3], step + 1

    def flush(self) -> None:
        """Log what was recorded last. On every rank at the same step: Failure if its loss is not finite, KeyboardInterrupt if one shall stop."""
        if self.pending is None:
            return
        (step, host, before, after, steps, stage, tokens), self.pending = self.pending, None
        if self.cuda:
            after.synchronize()
        elapsed = before.elapsed_time(after) if self.cuda else after - before
        loss, per_step, share = float(host[0]) / stage.batch_tokens, elapsed / steps, tokens / self.total_tokens
        left_s = elapsed / 1e3 * (self.total_tokens - tokens) / (steps * stage.batch_tokens)
        bar = f"[{'#' * int(40 * share):40}] {share:4.0%}, {left_s:.0f} s left"
        self.log.line("step", step=step, train_loss=round(loss, 6), tokens=tokens, ms_per_step=round(per_step, 3))
        self.log.say(f"step {step:5d}/{self.total_steps}   train loss {loss:7.4f}   {per_step:8.2f} ms/step   "
                     f"{stage.batch_tokens / per_step:6.1f} tokens/ms   {left_s:6.1f} s left", bar)
        if not math.isfinite(loss):
            fail("training loss", "a finite number", f"{loss} at step {step}", "lower the learning rate or report this seed", EXIT_NUMERICS)
        if host[1]:
            raise KeyboardInterrupt

def compiled_graphs() -> int:
    """How many graphs and kernels have been compiled so far; a timed run must not move it. The one place that knows these internals."""
    from torch._dynamo.utils import counters
    kernels = [value for value in globals().values() if hasattr(value, "device_caches")]
    return counters["stats"]["unique_graphs"] + sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

def peak_memory_mib(ranks: Ranks) -> int | None:
    shared = sum(parts[ranks.rank].nbytes for _, parts in ranks.peers.values())  # not the allocator's
    return (torch.cuda.max_memory_allocated(ranks.device) + shared) >> 20 if ranks.device.type == "cuda" else None

def stop_profiler(profiler: torch.profiler.profile, path: Path, log: RunLog) -> None:
    """Write the Chrome trace; say how busy the device was and the ten largest kernels."""
    profiler.stop()  # waits for the device
    profiler.export_chrome_trace(str(path))
    if not path.exists():  # torch says nothing
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.tmp").unlink()
        log.say(f"trace: expected to write {path}, found no room there; fix: free or permit that folder")
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events()
                   if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation)
    log.say(profiler.key_averages().table(sort_by="self_device_time_total" if spans else "self_cpu_time_total", row_limit=10))
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    use = f": {(length := end - spans[0][0]) / 1e3:.1f} ms, device busy {100 * busy / length:.1f} %" if spans else ""
    log.say(f"trace{f' in {path}' * path.exists()}{use}")

def timed_loop(trainer: Trainer, log: RunLog, options: RunOptions) -> tuple[int, int]:
    """All steps, on the clock. Returns the digest of this rank's training tokens, and how many tokens all ranks have trained on."""
    preset, ranks, clock, digest = trainer.preset, trainer.ranks, trainer.clock, 0
    items = training_batches(trainer.stream, preset.stages, trainer.micro_chunks, preset.model, ranks)
    clock.intervals.clear()
    clock.switch("training")
    meter = Meter(log, trainer, options.steps)
    with contextlib.closing(prefetched(items)) as batches:
        for step in range(options.steps):
            if options.profile and step == options.profile[0]:
                ranks.sum(torch.zeros((), device=ranks.device))  # start together, or the first collective of the trace shows who was late
                profiler = torch.profiler.profile()
                profiler.start()
            stage = preset.stages[index := stage_index(preset, step)]
            if step == 0 or stage_index(preset, step - 1) != index:
                log.line("stage", step=step, **dataclasses.asdict(stage), micro_batch_chunks=trainer.micro_chunks[stage])
            micro = [next(batches) for _ in range(CHUNKS // ranks.world // trainer.micro_chunks[stage])]
            digest += sum(batch.digest for batch in micro)
            loss = trainer.training_step(step, micro)
            if any(shares := averaging(preset, step)):
                trainer.optimizer.average(*shares)
            ranks.heartbeat(f"step {step + 1}")
            validates = options.val_every and (step + 1) % options.val_every == 0 and step + 1 < options.steps
            if validates or step in (0, options.steps - 1) or (step + 1) % preset.log_every_steps == 0 or stage_index(preset, step + 1) != index:
                meter.record(step, loss, stage)
            if options.profile and step == options.profile[1]:
                ranks.heartbeat("the trace", 10)
                stop_profiler(profiler, options.profile_path, log)
            if validates:
                trainer.optimizer.gather()
                clock.switch("validation")
                value = trainer.validate(trainer.geometries[index])
                log.line("val", step=step + 1, loss=round(value, 6), final=False)
                log.say(f"step {step + 1:5d}/{options.steps}   val loss {value:.4f} (windows of the moment)")
                clock.switch("training")
                meter.last = meter.now()
        trainer.optimizer.gather()
        clock.switch(None)
        meter.flush()
    return digest, meter.tokens

def speed(trainer: Trainer, elapsed_ms: float, tokens: int) -> str:
    """Tokens a second and, where the peak is known, MFU: 6 operations a matrix weight and token, the whole head's too, though most is not sampled."""
    weights = sum(p.numel() for p in trainer.model.parameters() if p.matrix is not None) + trainer.model.head.numel()
    device = machine_facts(trainer.ranks.device)["device"]
    peak = next((tflops for name, tflops in PEAK_TFLOPS if name in device), math.nan)
    mfu = 6 * weights * tokens / elapsed_ms / 1e9 / peak / trainer.ranks.world
    return f"{1e3 * tokens / elapsed_ms:,.0f} tokens/s" + (f", MFU {mfu:.1%} of {peak:.0f} TFLOP/s a GPU" if math.isfinite(mfu) else "")

def train(trainer: Trainer, seed: int, log: RunLog, options: RunOptions, settings: dict[str, Any]) -> float:
    """One run from a seed: warm-up (once a process), the timed loop, the final validation. Logs everything; returns the loss."""
    preset, ranks, clock = trainer.preset, trainer.ranks, trainer.clock
    log.line("head", started=clock.date(), preset=dataclasses.asdict(preset), seed=seed, world=ranks.world, shared_memory=bool(ranks.copy_stream),
             ops=trainer.ops.names, script=files_hash([Path(__file__)]), data=trainer.data_hash, shards=[path.name for path in trainer.stream.paths],
             consumed_tokens=trainer.stream.consumed(preset.stages), settings=settings, **machine_facts(ranks.device))
    before = trainer.initialise(seed)
    if len(set(ranks.gather_objects(before))) > 1:
        fail("initial state", "the same on every rank", "differences", "use GPUs of one kind", EXIT_HARDWARE)
    if not trainer.warm:
        started = clock.since_start()
        variants, trainer.warm = trainer.warm_up(), True
        if trainer.initialise(seed) != before:
            raise AssertionError("warm-up changed the training state")
        log.line("warm", seconds=round(clock.since_start() - started, 3), variants=variants, graphs=compiled_graphs(), state=before,
                 peak_memory_mib=peak_memory_mib(ranks))
    graphs = compiled_graphs()
    gc.collect()
    gc.freeze()
    ranks.gather_objects(None)  # nobody's clock starts before the last rank has compiled
    log.say(f"first timed step {clock.since_start():.1f} s after the process started")
    digest, tokens = timed_loop(trainer, log, options)
    elapsed, recompiled = clock.milliseconds(), compiled_graphs() - graphs
    value = trainer.validate(trainer.final_geometry)
    if not math.isfinite(value):
        fail("validation loss", "a finite number", value, "lower the learning rate or report this seed", EXIT_NUMERICS)
    log.line("val", step=options.steps, loss=round(value, 6), final=True)
    for interval in clock.intervals:
        log.line("clock", **interval)
    train_hash, memory = f"{sum(ranks.gather_objects(digest)) % 2**64:016x}", peak_memory_mib(ranks)
    state = "ok" if options.complete and not recompiled else "no record: " + ("compiled in the timed run" if recompiled else "shortened or profiled")
    log.line("end", state=state, loss=round(value, 6), ms=round(elapsed, 1), peak_memory_mib=memory,
             train_hash=train_hash, val_hash=trainer.validation_hash, recompiled=recompiled)
    log.say(f"val loss {value:.4f} after {elapsed / 1e3:.2f} s of training, {preset.name}, seed {seed}, {ranks.world} rank(s)"
            + (f", peak memory {memory} MiB" if memory else "") + (f"; {state}" if state != "ok" else ""))
    log.say(f"{speed(trainer, elapsed, tokens)}; log: {log.path if log.file else 'none, UNLOGGED'}")
    return value

# ==== 7. Data =========================================================================================================
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
    if not (tokens == BOS).any():
        fail(f"{path}: documents", f"token {BOS} before each", "none", "tokenise with data/fineweb.py")
    return tokens

def find_shards(folder: Path, kind: str) -> list[Path]:
    paths = sorted(folder.glob(f"*_{kind}_*.bin"))
    if not paths:
        fail(f"{kind} shards", f"{folder}/*_{kind}_*.bin", "none", "python data/fineweb.py fetch (or --data FOLDER, or --preset smoke)")
    return paths

class TokenStream:
    """The training shards as one stream of tokens, from its first BOS on."""
    def __init__(self, folder: Path, tokens_wanted: int, vocabulary: int):
        self.paths, self.offsets, self.first = [], [0], 0  # offsets: of the shards, and the end; first: of the BOS
        for path in find_shards(folder, "train"):
            tokens = np.asarray(open_shard(path, vocabulary))
            self.first = self.first if self.paths else int((tokens == BOS).argmax())
            self.paths.append(path)
            self.offsets.append(self.offsets[-1] + len(tokens))
            if self.offsets[-1] >= tokens_wanted:
                break
        self.length, self.files = self.offsets[-1], [path.open("rb", buffering=0) for path in self.paths]

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
        return self.first + sum(stage.steps * stage.batch_tokens for stage in stages)

    def chunk_starts(self, stages: tuple[Stage, ...]) -> list[np.ndarray]:
        """For each stage, the first token [steps, CHUNKS] of each slot: they follow each other without a gap. Fails if tokens run out."""
        if (needed := self.consumed(stages) + 1) > self.length:  # the last target is one further
            fail("training tokens", f"{needed:,} for the schedule", f"{self.length:,} in {len(self.paths)} shards",
                 "python data/fineweb.py fetch --shards N with a larger N; for a longer schedule, also a larger train_tokens")
        return [self.consumed(stages[:index]) + stage.chunk_tokens * np.arange(stage.steps * CHUNKS).reshape(-1, CHUNKS)
                for index, stage in enumerate(stages)]

def cut_documents(tokens: np.ndarray, cap: int) -> list[np.ndarray]:
    """Pieces of a stretch of tokens, cut before each BOS and after `cap` tokens; each carries its one following token."""
    bounds = [0, *(np.flatnonzero(tokens[1:-1] == BOS) + 1).tolist(), len(tokens) - 1]
    return [tokens[start:min(start + cap, stop) + 1] for first, stop in zip(bounds, bounds[1:]) for start in range(first, stop, cap)]

def sample_classes(targets: np.ndarray, count: int, vocabulary: int, sweep: int, spare: Sequence[int] = ()) -> tuple[np.ndarray, int, np.ndarray]:
    """A sampled softmax: (ids [count], how many are certain, column of each target or -1: no room), see Targets. After the spare ids, no targets, and
    those of targets, ascending, comes the sweep-th stretch of a walk over the vocabulary in steps of 20011, which meets every id."""
    present = np.zeros(vocabulary, bool)
    present[targets] = True
    walk = (np.arange(vocabulary) + sweep * count) * 20011 % vocabulary
    certain = np.concatenate([np.array(spare, int), np.flatnonzero(present)])[:count]
    present[certain] = True
    ids = np.concatenate([certain, walk[~present[walk]][:count - len(certain)]])
    column = np.full(vocabulary, -1)
    column[certain] = np.arange(len(certain))
    return ids, len(certain), column[targets]

def hash_ngrams(tokens: np.ndarray, positions: np.ndarray, rows: int) -> np.ndarray:
    """Two rows of each token, [T, 2], hashed: its pair with the token before, in the first half of the table, and its triple with the two before; the
    last row of a half where the document has no such token. Products of two 16-bit numbers fit into uint32."""
    half, x = rows // 2, np.pad(tokens.astype(np.uint32), (2, 0))
    keys = 36313 * x[2:] ^ 27191 * x[1:-1], 17351 * x[2:] ^ 60961 * x[1:-1] ^ 45259 * x[:-2]
    return np.stack([np.where(positions > n, key % (half - 1), half - 1) + n * half for n, key in enumerate(keys)], axis=1).astype(np.int32)

def longest_suffix_match(tokens: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """What followed when the document last held the present three tokens, or else two, or one: [T], that token plus vocabulary times how many more
    than one they are. If the present token is new, one of the last 32 rows in turn: no program need sum half of all gradients."""
    found, keys = 3 * vocabulary + np.arange(len(tokens)) % 32, tokens.astype(np.uint16)  # 16 bits: a radix sort
    at, group = np.arange(len(tokens)), np.zeros(len(tokens), int)
    for more in range(3):  # from the ends of what is one token shorter, sorted, by one more token: those of more + 1 tokens, sorted
        at = at[np.argsort(keys[at], kind="stable")]
        last, now = at[:-1], at[1:]
        same = (keys[last] == keys[now]) & (group[last] == group[now])
        inside = same & (now - last <= positions[now] - more)
        found[now[inside]] = tokens[last[inside] + 1].astype(int) + more * vocabulary
        ids = np.empty(len(tokens), int)
        ids[at] = np.cumsum(np.append(False, ~same))
        group, at = np.append(-1, ids[:-1]), np.append(0, at[at < len(tokens) - 1] + 1)
    return found

@dataclasses.dataclass(frozen=True)
class HostBatch:
    """A micro-batch on the host: one int32 array, pinned for the GPU, and where its parts lie."""
    data: Tensor
    sizes: tuple[int, ...]
    digest: int  # of the tokens, keyed by step and slot

    def to(self, device: torch.device) -> Documents:
        return self.views(self.data.to(device, non_blocking=True))

    def views(self, data: Tensor) -> Documents:
        """The parts of `data`, a copy on some device."""
        parts = [room[:size] for room, size in zip(data.split([*map(aligned, self.sizes)]), self.sizes)]
        sampled = (parts[7].view(len(parts[8]), -1), parts[8]) if self.sizes[8] else (None, None)
        return Documents(*parts[:3], parts[3].view(-1, 3), *parts[4:7], *sampled)

def pack(slots: dict[int, list[np.ndarray]], model: ModelConfig, pin: bool, sampled_classes: int | None = None, digest: int = 0) -> HostBatch:
    """Pack the pieces of numbered slots, one slot after the other, into the layout of HostBatch."""
    pieces = [piece for slot in slots.values() for piece in slot]
    tokens, lengths = np.concatenate([piece[:-1] for piece in pieces]), np.array([len(piece) - 1 for piece in pieces])
    ends = np.repeat(np.cumsum(lengths), lengths)
    positions = np.arange(len(tokens)) - ends + np.repeat(lengths, lengths)
    columns, ids, certain = [np.concatenate([piece[1:] for piece in slot]) for slot in slots.values()], (), ()
    if sampled_classes:
        drawn = (sample_classes(c, sampled_classes, model.padded_vocabulary, number, [model.vocabulary]) for number, c in zip(slots, columns))
        ids, certain, columns = zip(*drawn)
    recalled = model.ngram_rows + longest_suffix_match(tokens, positions, model.padded_vocabulary)
    ngrams = np.column_stack([hash_ngrams(tokens, positions, model.ngram_rows), recalled])
    parts = (tokens, *sort_ids(tokens, model.padded_vocabulary), ngrams.ravel(),
             np.concatenate(columns), positions, ends - 1 - np.arange(len(tokens)), np.concatenate([*ids, ()]), certain)
    sizes = tuple(map(len, parts))
    data = torch.zeros(sum(map(aligned, sizes)), dtype=torch.int32, pin_memory=pin)
    for room, part in zip(data.split([*map(aligned, sizes)]), parts):
        room.numpy()[:len(part)] = part
    return HostBatch(data, sizes, digest)

def chunk_digest(number: int, tokens: np.ndarray) -> int:
    """64 bits that name the tokens of one slot; a run's token hash is their sum, whatever rank held which slot."""
    return int.from_bytes(hashlib.blake2b(f"{number}:".encode() + tokens.astype("<u2").tobytes(), digest_size=8).digest(), "little")

def training_batches(stream: TokenStream, stages: tuple[Stage, ...], micro_chunks: dict[Stage, int], model: ModelConfig,
                     ranks: Ranks) -> Iterator[HostBatch]:
    """This rank's micro-batches of the whole schedule: slots rank, rank + world, ... of each step, micro_chunks at a time."""
    pin, number, mine = ranks.device.type == "cuda", 0, range(ranks.rank, CHUNKS, ranks.world)
    for stage, steps in zip(stages, stream.chunk_starts(stages)):
        for starts in steps:
            for at in range(0, len(mine), micro_chunks[stage]):
                tokens = {number + slot: stream.read(starts[slot], stage.chunk_tokens + 1) for slot in mine[at:at + micro_chunks[stage]]}
                slots = {slot: cut_documents(part, stage.document_cap_tokens) for slot, part in tokens.items()}
                yield pack(slots, model, pin, stage.sampled_classes, sum(chunk_digest(*item) for item in tokens.items()))
            number += CHUNKS

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

def prefetched(items: Iterator, depth: int = 8) -> Iterator:
    """The items, made a few ahead by a thread, whose error is raised where the items are used. Closing it, or its end, ends the thread."""
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = collections.deque(thread.submit(next, items, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, items, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)  # waits for an item in the making: if its disk stands still, the watchdog does not

# ==== 8. Reference operators: what the fast ones must compute, on any device and in any dtype =========================
def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)

def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. x [T, H, D]; cos, sin [T, D/2]: channel i turns together with channel i + D/2."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

def split_heads_reference(qkv: Tensor, value: Tensor | None, value_gates: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor,
                          heads: int, key_offset: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads, q, k [T, H, Dk] and v [T, H, Dv], from their projection qkv [T, H (2 Dk + Dv)]: q and k normalised and rotated, v plus
    the first H Dv channels of value [T, H Dv or more], gated. value_gates [T, H]; positions [T]; cos, sin [positions, Dk / 2]. Key offset: the
    channels of k that do not turn come from the token before, if the document has one: induction in a single layer (record 49)."""
    width = 2 * cos.size(1)
    q, k, v = (x.unflatten(1, (heads, -1)) for x in qkv.tensor_split((heads * width, 2 * heads * width), 1))
    if value is not None:
        v = v + value[:, :v[0].numel()].reshape(v.shape) * value_gates[:, :, None]
    q, k = norm(q), norm(k)
    if key_offset:  # the channels that do not turn: whether before or after the rotation is the same
        still = torch.arange(width, device=k.device) % (width // 2) >= width // 4
        k = torch.where(still & (positions > 0)[:, None, None], torch.cat([k[:1], k[:-1]]), k)
    return rotate(q, cos[positions], sin[positions]), rotate(k, cos[positions], sin[positions]), v

def visible_chunks(positions: Tensor, window: int, chunk: int, least: int = 0) -> Iterator[tuple[slice, slice, Tensor]]:
    """Who sees whom: at most `chunk` queries at a time, the keys in their windows, and which each sees: of its document, `least` to `window` back."""
    at = torch.arange(len(positions), device=positions.device)
    first_key = at - positions.clamp(max=window)
    for start in range(0, len(at), chunk):
        rows = slice(start, min(start + chunk, len(at)))
        keys = slice(max(start - window, 0), rows.stop)
        yield rows, keys, (at[keys] >= first_key[rows, None]) & (at[keys] <= at[rows, None] - least)

def attention_reference(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int, scale: float, gates: Tensor | None = None,
                        chunk: int = 512) -> Tensor:
    """Plain PyTorch attention: q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv], times gates [T, H] if given; masks as in `visible_chunks`. Any device and
    dtype. Works on `chunk` queries at a time against the keys that their window can reach: the scores need chunk * (chunk + window) * H."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.cat([F.scaled_dot_product_attention(q[:, rows], k[:, keys], v[:, keys], attn_mask=seen, scale=scale).transpose(0, 1)
                     for rows, keys, seen in visible_chunks(positions, window, chunk)])
    return out if gates is None else (out * gates[:, :, None]).to(out.dtype)

def pointer_reference(qk: Tensor, ids: Tensor, positions: Tensor, window: int, scale: float, chunk: int = 512) -> Tensor:
    """Points from each token at earlier ones to copy what followed them: ln of the share [T] that the next token gets, NEG_INF for none. qk
    [T, 2, D]: queries and keys; ids [T] name the next tokens (-1: unnamed, the loss does not ask there). Token t points at i, t - window <= i < t in
    its document, with the weight a[t, i] = e^s[t, i] / (1 + sum_j e^s[t, j]), s[t, i] = scale q[t].k[i], and nowhere with what is left; the share is
    the sum of a[t, i] over the i with ids[i] = ids[t]. float32, or float64 for float64 operands."""
    (q, k), shares = qk.to(torch.promote_types(qk.dtype, torch.float32)).unbind(1), []
    for rows, keys, seen in visible_chunks(positions, window, chunk, least=1):
        scores, match = scale * (q[rows] @ k[keys].T), seen & (ids[keys] == ids[rows, None])
        everything = F.pad(scores.masked_fill(~seen, -torch.inf), (0, 1)).logsumexp(1)
        shares.append(torch.where(match.any(1), scores.masked_fill(~match, NEG_INF).logsumexp(1) - everything, NEG_INF))
    return torch.cat(shares)

def relu_squared_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """x [T, width]; up, down [mlp_width, width]."""
    return F.linear(x, up).relu().square() @ down

class MlpScales(NamedTuple):
    """Static FP8 scales of the MLP and the QKV projection, value = fp8 · scale. The ranges: RMS-normed inputs reach sqrt(768) = 27.7 of 28;
    weights 3.5; hidden values relu² 1792 and no less than 2^-8, pre-activations of 42 and 0.06; gradients, in e5m2, 56 and 2^-27."""
    input: float = 2.0 ** -4
    weight: float = 2.0 ** -7
    hidden: float = 2.0 ** 2
    grad: float = 2.0 ** -10

class HeadScales(NamedTuple):
    """Static FP8 scales, value = fp8 · scale. The default ranges: RMS-normed x reaches 28 (100 leaves room), weights
    stay under 1.6, and entries of the gradient of a summed loss under 1.75 · softcap / (4 · temperature) = 1.34; e5m2 reaches 96."""
    x: float = 100 / 448
    weight: float = 1.6 / 448
    grad: float = 96 / 57_344

def softcapped(logits: Tensor, cap: Softcap) -> Tensor:
    return cap.softcap * torch.sigmoid((logits + cap.shift) / cap.temperature)

def head_loss_reference(x: Tensor, weight: Tensor, targets: Targets, cap: Softcap = Softcap(), chunk_rows: int = 4096) -> Tensor:
    """Weighted sum of the cross-entropies (nats) of softcapped logits, 0-d float32 (float64 for float64 operands). x [T, D], weight [V, D]. Every
    column that is no candidate is left out; without candidates all V take part, padding too. The backward recomputes chunks: few logits at a time."""
    def chunk_loss(x, weight, stands_for, columns, log_copy=None):
        logits = x @ weight.T
        log_p = (softcapped(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap) + stands_for).log_softmax(-1)
        picked = log_p.gather(1, columns.clamp_min(0).long())
        if log_copy is not None:
            picked = torch.cat([torch.logaddexp(picked[:, 0], log_p[:, targets.spare] + log_copy)[:, None], picked[:, 1:]], 1)
        return -(targets.weights.to(log_p.dtype) * picked * (columns >= 0)).sum()

    total = 0.0
    for rows, part in targets.parts():
        head, stands_for = weight, weight.new_zeros(())
        if part.classes is not None:
            head = weight[part.classes.long()]
            drawn = torch.arange(len(head), device=x.device) >= part.num_always
            stands_for = torch.where(drawn, (len(weight) - part.num_always) / (len(head) - part.num_always).clamp_min(1), 1).log()
        columns = torch.stack([part.ahead(k) for k in range(len(targets.weights))], 1)
        for chunk in zip(*(tensor.split(chunk_rows) for tensor in (x[rows], columns, part.log_copy) if tensor is not None)):
            arguments = chunk[0], head, stands_for, *chunk[1:]
            total = total + (chunk_loss(*arguments) if len(x) <= chunk_rows else checkpoint(chunk_loss, *arguments, use_reentrant=False))
    return total

def embedding_grad_reference(grad, tokens, vocab_rows, dtype=None):
    """Dense gradient [vocab_rows, D] of `table[tokens]` from grad [T, D]: float32 (or wider) sums, rounded once."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return wide.new_zeros(vocab_rows, grad.shape[1]).index_add_(0, tokens.long(), wide).to(dtype or grad.dtype)

def sparse_adam_reference(grad, lookup, weights, square, last, step, rate, shrink, beta2, epsilon, scale):
    """One Adam step, in place, of the rows of weights [rows, D] that occur in ids [T, K] of `lookup` (group_ids). g = scale · Σ grad [T, D] of those
    that read a row; v ← β2^(step - last) v + (1 - β2) mean(g²), one number a row: square [rows]. last [rows]: when. rate, shrink: see adam_update."""
    rows, group = (ids := lookup[0]).flatten().unique(return_inverse=True)
    g = scale * embedding_grad_reference(grad.repeat_interleave(ids.size(1), 0), group, len(rows), torch.promote_types(grad.dtype, torch.float32))
    v = beta2 ** (step - last[rows]) * square[rows] + (1 - beta2) * g.square().mean(1)
    update, value = rate * g / (v.sqrt() + epsilon)[:, None], weights[rows].to(g.dtype)
    weights[rows] = (value - update - shrink * value * (update * value > 0)).to(weights.dtype)
    square[rows], last[rows] = v.to(square.dtype), step

@dataclasses.dataclass(frozen=True)
class OrthogonalizeRecipe:
    """How singular values are driven to 1: scale them into (0, 1], then one odd quintic a s + b s^3 + c s^5 per step. scaling: "frobenius" divides by
    safety * ||X||_F; "aol" scales every row i by (sum_j |G_ij|)^-1/2, G = X X^T, which also bounds the spectral norm by 1 but is tighter, and takes
    no pass over X (arXiv 2208.03160). It changes the polar factor a little: an equaliser of rows, not only a normalisation. coefficients: one (a, b,
    c) per step. safety: room for rounding, since a polynomial explodes above its interval."""
    name: str
    scaling: str
    coefficients: tuple[tuple[float, float, float], ...]
    safety: float = 1.0

# Error = ||X - UV^T||_F / ||UV^T||_F in float64 for gaussian 768 x 3072 | gaussian 768 x 768 | 768 x 3072 with singular
# values log-uniform in 1e-3..1: quintic .163 | .203 | .473, polar-express .096 | .123 | .354, turbo .034 | .094 | .434.
RECIPES = {recipe.name: recipe for recipe in (
    # Muon's first polynomial: steep at 0, never settles at 1 (singular values end in .68..1.20).
    OrthogonalizeRecipe("quintic", "frobenius", ((3.4445, -4.7750, 2.0315),) * 5),
    # Minimax on [1e-3, 1], each step fitted to the interval that the last one leaves (arXiv 2505.16932). Above 1.02 it diverges: keep the safety.
    OrthogonalizeRecipe("polar-express", "frobenius", (
        (8.156554524902461, -22.48329292557795, 15.878769915207462), (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393), (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)), safety=1.02),
    # Turbo-Muon (arXiv 2512.04632): of the published four-step tables the most accurate on gaussian matrices, within .94..1.05 from .01 up to 1.1.
    OrthogonalizeRecipe("turbo", "aol", ((4.6051, -9.6552, 5.6769), (4.7505, -6.0861, 2.1790), (2.7763, -2.3190, 0.5523), (2.4231, -2.2861, 0.8193))),
)}

def frobenius_scale(X: Tensor, safety: float, dtype: torch.dtype) -> Tensor:
    """X / (safety ||X||_F) for each matrix of [..., M, N], cast to dtype last; a zero matrix stays zero. The norm is summed in float32 but divides in
    X's dtype: a common factor of 1 + 2^-9 costs nothing, a float32 copy of X two passes over it."""
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(X.dtype, torch.float32))
    return (X / (safety * norm).clamp_min(torch.finfo(X.dtype).tiny).to(X.dtype)).to(dtype)

def aol_scale(X: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """diag(s) X and, without a product, its Gram matrix; G = X X^T [..., n, n], s_i = (sum_j |G_ij|)^-1/2. s_i s_j is formed first: symmetric."""
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

# ==== 9. Triton kernels, each with its wrapper ========================================================================
# ---- orthogonalisation -----------------------------------------------------------------------------------------------
# All three products of a step are written for wide matrices. A tall X is passed as its transposed view: strides are
# arguments, a stride of 1 is compiled in, so loads stay contiguous along whichever axis is, and X^T X needs no copy.

def product_tiles(batch: int, rows: int, columns: int, dtype: torch.dtype, symmetric: bool) -> dict:
    """Fixed launch configuration (tile rows, columns, depth; warps, stages) for [batch, rows, columns] outputs. Large tiles reuse more of what they
    load; small ones are for batches that could not fill the GPU otherwise (three 768 x 768 Gram matrices are 63 large tiles), and for fp32, whose
    large tiles exceed the shared memory; tiny ones for few rows: with odd strides bigger ones would spill."""
    if rows <= 32:
        return dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3)
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 128)
    tiles = batch * (tile_rows * (tile_rows + 1) // 2 if symmetric else tile_rows * tile_columns)
    if tiles >= 1.5 * 132 and dtype.itemsize == 2:  # the multiprocessors of an H100 or H200
        return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)

@jit
def product_kernel(B, X, C, n, m, k, b_batch, b_row, b_column, x_batch, x_row, x_column, c_batch, c_row, c_column, scale, plus,
                   ADD_X: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """C = B X [+ plus X: ADD_X]. B [batch, n, n], X and C [batch, n, m], k = n. Without a B: C = scale X X^T [+ plus X, square and symmetric]. X
    [batch, n, k], C [batch, n, n], m = n. C is not X; fp32 accumulation. Reference: the products in orthogonalize_reference. B X takes 2 n^2 m flops
    a matrix; row tiles of one column panel are neighbours in the grid: that panel of X comes from memory once, B stays in L2. X X^T takes n
    (n + BLOCK) k, half of a full product: only tiles on and below the diagonal are computed (the grid has no others), then stored twice."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    X += batch * x_batch
    C += batch * c_batch
    if B is None:
        tl.static_assert(BLOCK_M == BLOCK_N, "the mirrored tile must be a tile")
        # Row i of the triangle starts at tile i (i + 1) / 2, where 8 tile + 1 = (2 i + 1)^2; + 5 stays clear of rounding.
        i = ((tl.sqrt(8.0 * tile + 5.0) - 1.0) * 0.5).to(tl.int32)
        j = tile - i * (i + 1) // 2
        L, l_row, l_depth, r_depth, r_column = X, x_row, x_column, x_column, x_row
    else:
        i, j = tile % tl.cdiv(n, BLOCK_M), tile // tl.cdiv(n, BLOCK_M)
        L, l_row, l_depth, r_depth, r_column = B + batch * b_batch, b_row, b_column, x_row, x_column
    rows, columns = i * BLOCK_M + tl.arange(0, BLOCK_M), j * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(L + rows[:, None] * l_row + depth[None, :] * l_depth, (rows[:, None] < n) & (depth[None, :] < k), other=0.0)
        right = tl.load(X + columns[None, :] * r_column + depth[:, None] * r_depth, (columns[None, :] < m) & (depth[:, None] < k), other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    inside = (rows[:, None] < n) & (columns[None, :] < m)
    if B is None:
        accumulator *= scale
    if ADD_X:
        x = tl.load(X + rows[:, None] * x_row + columns[None, :] * x_column, mask=inside, other=0.0)
        accumulator += plus * x.to(tl.float32)
    if B is None and i == j:  # exactly symmetric, whatever the order of summation inside the product
        accumulator = tl.where(rows[:, None] >= columns[None, :], accumulator, tl.trans(accumulator))
    result = accumulator.to(C.dtype.element_ty)
    tl.store(C + rows[:, None] * c_row + columns[None, :] * c_column, result, mask=inside)
    if B is None and i != j:
        tl.store(C + columns[:, None] * c_row + rows[None, :] * c_column, tl.trans(result), mask=(columns[:, None] < n) & (rows[None, :] < n))

def symmetric_product(X: Tensor, out: Tensor, scale: float = 1.0, plus: float | None = None, tiles: dict | None = None) -> Tensor:
    """out = scale X X^T [+ plus X, for symmetric X]; X [batch, n, k], out [batch, n, n], any strides. Returns out."""
    batch, n, k = X.shape
    tiles = tiles or product_tiles(batch, n, n, X.dtype, symmetric=True)
    side = triton.cdiv(n, tiles["BLOCK_M"])
    product_kernel[side * (side + 1) // 2, batch](None, X, out, n, n, k, None, None, None, *X.stride(), *out.stride(), scale, plus or 0.0,
                                                  ADD_X=plus is not None, **tiles)
    return out

def add_product(B: Tensor, X: Tensor, a: float, out: Tensor, tiles: dict | None = None) -> Tensor:
    """out = a X + B X; B [batch, n, n], X and out [batch, n, m], any strides, out not X. Returns out."""
    batch, n, m = X.shape
    tiles = tiles or product_tiles(batch, n, m, X.dtype, symmetric=False)
    grid = triton.cdiv(n, tiles["BLOCK_M"]) * triton.cdiv(m, tiles["BLOCK_N"]), batch
    product_kernel[grid](B, X, out, n, m, n, *B.stride(), *X.stride(), *out.stride(), 1.0, a, ADD_X=True, **tiles)
    return out

def orthogonalize(matrices: Tensor, recipe: OrthogonalizeRecipe, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Near-orthogonal factor of each matrix of [batch, M, N] (fp32 or bf16), computed and returned in dtype. Agrees with orthogonalize_reference up
    to rounding; the input is left as it is. "aol" squares unscaled entries in dtype: in fp16, whose range is small, they must not be tiny."""
    tall = matrices.size(-2) > matrices.size(-1)
    X = matrices.mT if tall else matrices
    n = X.size(1)
    A, P = matrices.new_empty((2, X.size(0), n, n), dtype=dtype)
    X = frobenius_scale(X, recipe.safety, dtype) if recipe.scaling == "frobenius" else X.to(dtype)
    symmetric_product(X, out=A)
    if recipe.scaling == "aol":
        X, A = aol_scale(X, A)
    spare = torch.empty_like(X)
    for step, (a, b, c) in enumerate(recipe.coefficients):
        if step:
            symmetric_product(X, out=A)
        symmetric_product(A, out=P, scale=c, plus=b)
        X, spare = add_product(P, X, a, out=spare), X
    return X.mT if tall else X

# ---- attention over packed documents ---------------------------------------------------------------------------------
#     out[i] = sum_j p[i, j] v[j],   p[i, j] = 2^(c q[i].k[j] - lse[i]),   lse[i] = log2 (sum_j 2^(c q[i].k[j]) / gate[i]),   c = scale log2(e)
#     delta[i] = dgate[i] = dout[i].out[i] / gate[i],                      ds[i, j] = p[i, j] (dout[i].v[j] - delta[i])   (gate: 1 if none)
#     dv[j] = sum_i p[i, j] dout[i], dk[j] = scale sum_i ds[i, j] q[i],    dq[i] = scale sum_j ds[i, j] k[j]
# Tiles lie on the flat token axis, because documents (median 391 tokens) are hardly longer than a tile: one tile may hold many. A program owns
# BLOCK_M tokens of one head and walks over the other side in steps of BLOCK_N tokens, from the first that any of its tokens sees to the last. Mask
# of a step: comparisons with the token itself and with its `visible_bound`; to skip them where all is visible made the backward 7 % slower.
# A program loads its own tiles through pointers, all at once, and the steps (`*_steps`) through tensor descriptors (TMA), which spare the
# registers of the addresses: 138 instead of 242 for the forward; 255 without spills, two programs a multiprocessor, for the backward. That
# recomputes p twice (7 products instead of 5) so that every output has one writer: no atomics, bitwise reproducible. One launch for all three
# gradients takes 280 us where two take 306 (mean of ten cells, H200). Operands of T H D values moved: forward 4, delta 2, gradients 7.

@jit
def load_rows(x, row, head, stride, tokens, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows row ... row + ROWS - 1 of one head of x, [T, H, WIDTH] with heads side by side or its descriptor; zeros past the last token."""
    if x.dtype.is_ptr():
        rows = tl.arange(0, ROWS)[:, None]
        x += tl.cast(row, tl.int64) * stride + head * WIDTH
        return tl.load(x + rows * stride + tl.arange(0, WIDTH)[None, :], mask=row + rows < tokens, other=0.0)
    else:
        return x.load([row, head * WIDTH])

@jit
def store_rows(out, values, row, head, heads, tokens):
    """The opposite of load_rows, for a contiguous tensor."""
    rows, stride = tl.arange(0, values.shape[0])[:, None], heads * values.shape[1]
    out += tl.cast(row, tl.int64) * stride + head * values.shape[1]
    tl.store(out + rows * stride + tl.arange(0, values.shape[1])[None, :], values.to(out.dtype.element_ty), mask=row + rows < tokens)

@jit
def visible_bound(distances, at, tokens, window, KEYS: tl.constexpr):
    """The first key that each query in `at` sees, distances being Documents.positions; or (KEYS) the last query that sees each key, of remaining.
    Neither ever decreases along the tokens: that is all the kernels know of documents and windows. Past the last token it is that token's."""
    at = tl.minimum(at, tokens - 1)
    distance = tl.load(distances + at)  # the smaller one taken first costs 17 more instructions (of 422, sm_90) a step of dq
    return tl.minimum(at + distance, at + window) if KEYS else tl.maximum(at - distance, at - window)

@jit
def attention_forward_kernel(q, k_steps, v_steps, q_stride, k_stride, v_stride, out, lse, positions, window, tokens, scale_log2, gates,
                             DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out and lse of BLOCK_M queries of one head. Grid [heads, tiles]: the heads of a tile run side by side. No running maximum."""
    head, start = tl.program_id(0), tl.program_id(1) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    first_key, q_tile = visible_bound(positions, queries, tokens, window, False), load_rows(q, start, head, q_stride, tokens, DK, BLOCK_M)
    row_sum, accumulator = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, DV], tl.float32)
    for step in tl.range(visible_bound(positions, start, tokens, window, False), tl.minimum(start + BLOCK_M, tokens), BLOCK_N):
        scores = tl.dot(q_tile, tl.trans(load_rows(k_steps, step, head, k_stride, tokens, DK, BLOCK_N)))
        keys = (step + tl.arange(0, BLOCK_N))[None, :]
        p = tl.exp2(tl.where((keys >= first_key[:, None]) & (keys <= queries[:, None]), scores, float("-inf")) * scale_log2)
        row_sum += tl.sum(p, 1)
        v_tile = load_rows(v_steps, step, head, v_stride, tokens, DV, BLOCK_N)
        accumulator = tl.dot(p.to(v_tile.dtype), v_tile, accumulator)
    if gates is not None:
        row_sum /= tl.load(gates + queries * tl.num_programs(0) + head, mask=queries < tokens, other=1.0).to(tl.float32)
    tl.store(lse + head * tokens + queries, tl.log2(row_sum), mask=queries < tokens)
    store_rows(out, accumulator / row_sum[:, None], start, head, tl.num_programs(0), tokens)

@jit
def attention_delta_kernel(out, dout, gates, delta, dgates, tokens, dout_stride, DV: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta[h, i] = out[i, h] . dout[i, h], over gates[i, h] if given, then also as dgates, for BLOCK_M queries of one head; grid [heads, tiles]."""
    head, start, heads = tl.program_id(0), tl.program_id(1) * BLOCK_M, tl.num_programs(0)
    queries = start + tl.arange(0, BLOCK_M)
    out_tile = load_rows(out, start, head, heads * DV, tokens, DV, BLOCK_M).to(tl.float32)
    products = tl.sum(out_tile * load_rows(dout, start, head, dout_stride, tokens, DV, BLOCK_M).to(tl.float32), 1)
    if gates is not None:
        products /= tl.load(gates + queries * heads + head, mask=queries < tokens, other=1.0).to(tl.float32)
        tl.store(dgates + queries * heads + head, products.to(dgates.dtype.element_ty), mask=queries < tokens)
    tl.store(delta + head * tokens + queries, products, mask=queries < tokens)

@jit
def attention_gradients(a, b, x_steps, y_steps, a_stride, b_stride, x_stride, y_stride, da, db, lse, delta, distances, window, tokens, scale,
                        scale_log2, KEYS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dq of BLOCK_M queries: a, b, x, y are q, dout, k, v. Or (KEYS) dk and dv of BLOCK_M keys, with k, v, q, dout: their scores are transposed,
    [keys, queries], so that the tensor cores take p and ds, left operands, from registers."""
    head, start = tl.program_id(0), tl.program_id(2) * BLOCK_M
    own = start + tl.arange(0, BLOCK_M)
    bound = visible_bound(distances, own, tokens, window, KEYS)[:, None]
    a_tile, b_tile = load_rows(a, start, head, a_stride, tokens, DK, BLOCK_M), load_rows(b, start, head, b_stride, tokens, DV, BLOCK_M)
    da_tile, db_tile = tl.zeros(a_tile.shape, tl.float32), tl.zeros(b_tile.shape, tl.float32)
    end = visible_bound(distances, start + (BLOCK_M - 1 if KEYS else 0), tokens, window, KEYS)
    first, stop = (start, end + 1) if KEYS else (end, tl.minimum(start + BLOCK_M, tokens))
    for step in tl.range(first, stop, BLOCK_N):
        others = step + tl.arange(0, BLOCK_N)
        query, key = (others[None, :], own[:, None]) if KEYS else (own[:, None], others[None, :])
        x_tile = load_rows(x_steps, step, head, x_stride, tokens, DK, BLOCK_N)
        lse_query = tl.load(lse + head * tokens + query, mask=query < tokens, other=0.0)
        scores = tl.dot(a_tile, tl.trans(x_tile))
        y_tile = load_rows(y_steps, step, head, y_stride, tokens, DV, BLOCK_N)
        dp = tl.dot(b_tile, tl.trans(y_tile))
        seen = (key <= query) & (query <= bound if KEYS else key >= bound)
        p = tl.where(seen, tl.exp2(scores * scale_log2 - lse_query), 0.0)
        if KEYS:
            db_tile = tl.dot(p.to(y_tile.dtype), y_tile, db_tile)
        ds = p * (dp - tl.load(delta + head * tokens + query, mask=query < tokens, other=0.0))
        da_tile = tl.dot(ds.to(x_tile.dtype), x_tile, da_tile)
    store_rows(da, da_tile * scale, start, head, tl.num_programs(0), tokens)
    if KEYS:
        store_rows(db, db_tile, start, head, tl.num_programs(0), tokens)

@jit
def attention_backward_kernel(
    q, k, v, dout, q_stride, k_stride, v_stride, dout_stride, q_steps, k_steps, v_steps, dout_steps, dq, dk, dv, lse, delta, positions, remaining,
    window, tokens, scale, scale_log2, DK: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dk and dv of BLOCK_M keys, or dq of BLOCK_M queries, of one head. Grid [heads, 2, tiles]: the two kinds alternate."""
    if tl.program_id(1) == 0:
        attention_gradients(k, v, q_steps, dout_steps, k_stride, v_stride, q_stride, dout_stride, dk, dv, lse, delta, remaining, window,
                            tokens, scale, scale_log2, True, DK, DV, BLOCK_M, BLOCK_N)
    else:
        attention_gradients(q, dout, k_steps, v_steps, q_stride, dout_stride, k_stride, v_stride, dq, None, lse, delta, positions, window,
                            tokens, scale, scale_log2, False, DK, DV, BLOCK_M, BLOCK_N)

def attention_tiles(device: torch.device, keys: int = 128) -> tuple[dict[str, int], dict[str, int]]:
    """Fixed launch configurations of forward and backward: tokens a program owns, tokens a step; warps, stages. By tests/bench_attention.py --sweep,
    with keys of 128 and of 64. Where shared memory is small, or steps go through pointers, they are half as long, or the backward would spill."""
    steps_and_stages = ((64 if keys > 64 else 32, 3), (64, 2)) if (9, 0) <= capability(device) < (12, 0) else ((32, 2), (32, 2))
    return tuple(dict(BLOCK_M=64, BLOCK_N=step, num_warps=4, num_stages=stages) for step, stages in steps_and_stages)

def with_aligned_rows(x: Tensor) -> Tensor:
    """x [T, H, D], copied if a descriptor cannot take it as it lies: heads side by side in rows aligned to 16 bytes, and no row twice."""
    row, *rest = x.stride()
    fits = rest == [x.size(2), 1] and row >= x[0].numel() and (row * x.element_size() | x.data_ptr()) % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)

def steps_of(x: Tensor, tile: dict[str, int]) -> Tensor | TensorDescriptor:
    """What a kernel walks over: a descriptor of x [T, H, D] as [T, H D], in steps of one head; ValueError unless D is a power of two. On GPUs
    without TMA x itself: Triton would turn descriptors into pointers there, but of unknown strides: it loads value by value, and spills."""
    return x if x.is_cuda and capability(x.device) < (9, 0) else TensorDescriptor.from_tensor(x.flatten(1), [tile["BLOCK_N"], x.size(2)])

class PackedAttention(torch.autograd.Function):
    """Causal attention within packed documents and a sliding window; the result of attention_reference. q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv];
    bf16 or fp32, widths of a power of two up to 128; views of one buffer need no copy. positions, remaining: see Documents; another window recompiles
    nothing if it is a multiple of 16. gates [T, H] must be > 0: see lse, delta. The softmax has no running maximum, so |scale q.k| must stay below
    60: 2^87, or 2^107 over a gate of 2^-20, which both types hold. RMS-normed q, k have |q.k| <= Dk; ValueError unless that is enough."""
    @staticmethod
    def forward(ctx, q, k, v, positions, remaining, window, scale, gates=None):
        (tokens, heads, width), tile, ctx.window, ctx.scale = q.shape, attention_tiles(q.device, q.size(2))[0], window, scale
        if scale * width >= 60:
            raise ValueError(f"attention without running maximum: expected scale * head width < 60, found {scale:g} * {width}")
        q, k, v, gates = *map(with_aligned_rows, (q, k, v)), gates if gates is None else gates.contiguous()
        out, lse = v.new_empty(v.shape), q.new_empty(heads, tokens, dtype=torch.float32)  # lse: base 2
        attention_forward_kernel[heads, triton.cdiv(tokens, tile["BLOCK_M"])](
            q, steps_of(k, tile), steps_of(v, tile), q.stride(0), k.stride(0), v.stride(0), out, lse, positions, window, tokens,
            scale * math.log2(math.e), gates, DK=width, DV=v.size(2), **tile)
        ctx.save_for_backward(q, k, v, out, lse, positions, remaining, gates)
        return out

    @staticmethod
    def backward(ctx, dout):
        *operands, out, lse, positions, remaining, gates = ctx.saved_tensors
        (tokens, heads, width), tile, delta = out.shape, attention_tiles(out.device)[1], torch.empty_like(lse)
        grads, dgates = [x.new_empty(x.shape) for x in operands], gates if gates is None else gates.new_empty(gates.shape)
        operands.append(with_aligned_rows(dout))  # it may be the expanded gradient of a sum
        strides, steps = [x.stride(0) for x in operands], [steps_of(x, tile) for x in operands]
        attention_delta_kernel[heads, triton.cdiv(tokens, 64)](out, operands[3], gates, delta, dgates, tokens, strides[3], DV=width, BLOCK_M=64)
        attention_backward_kernel[heads, 2, triton.cdiv(tokens, tile["BLOCK_M"])](
            *operands, *strides, *steps, *grads, lse, delta, positions, remaining, ctx.window, tokens, ctx.scale, ctx.scale * math.log2(math.e),
            DK=operands[0].size(2), DV=width, **tile)
        return *grads, *(None,) * 4, dgates

# ---- pointer ---------------------------------------------------------------------------------------------------------
#     lse[t] = ln (1 + sum_i e^s[t, i]),   log_copy[t] = ln (sum_i match[t, i] e^s[t, i]) - lse[t],   match[t, i] = 1 if ids[i] = ids[t], else 0
#     ds[t, i] = omega[t] (match[t, i] e^(s[t, i] - lse[t] - log_copy[t]) - e^(s[t, i] - lse[t])),   omega = d loss / d log_copy
# Attention without values, and tiled like it; queries and keys are the two heads of one tensor, and the owners of a tile walk over the others. One
# kernel does all three passes. lse is kept as infinite where nothing matches, so that those scores get no gradient.

@jit
def pointer_kernel(qk, qk_steps, ids, log_copy, lse, distances, window, omega, dqk, tokens, scale_log2, NEG_INF: tl.constexpr,
                   KEYS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """log_copy, and lse in base 2, of BLOCK_M queries; with omega their gradient, or that of BLOCK_M keys, in dqk [T, 2, D]. distances: visible_bound."""
    start = tl.program_id(0) * BLOCK_M
    own = start + tl.arange(0, BLOCK_M)
    bound = visible_bound(distances, own, tokens, window, KEYS)[:, None]
    own_tile = load_rows(qk, start, KEYS, 2 * D, tokens, D, BLOCK_M)
    grad, everything, matching = tl.zeros(own_tile.shape, tl.float32), tl.full([BLOCK_M], 1.0, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    end = visible_bound(distances, start + (BLOCK_M - 1 if KEYS else 0), tokens, window, KEYS)
    first, stop = (start, end + 1) if KEYS else (end, tl.minimum(start + BLOCK_M, tokens))
    for step in tl.range(first, stop, BLOCK_N):
        others = step + tl.arange(0, BLOCK_N)
        query, key = (others[None, :], own[:, None]) if KEYS else (own[:, None], others[None, :])
        seen = (key < query) & (query <= bound if KEYS else key >= bound)
        match = tl.load(ids + query, mask=query < tokens, other=-1) == tl.load(ids + key, mask=key < tokens, other=-1)
        tile = load_rows(qk_steps, step, 1 - KEYS, 2 * D, tokens, D, BLOCK_N)
        bits = tl.where(seen, tl.dot(own_tile, tl.trans(tile)) * scale_log2, float("-inf"))
        if omega is None:
            p = tl.exp2(bits)
            everything += tl.sum(p, 1)
            matching += tl.sum(tl.where(match, p, 0.0), 1)
        else:
            weight = tl.load(omega + query, mask=query < tokens, other=0.0)
            copy = tl.load(log_copy + query, mask=query < tokens, other=0.0) * 1.4426950408889634
            p = tl.exp2(bits - tl.load(lse + query, mask=query < tokens, other=0.0) - tl.where(match, copy, 0.0))
            grad = tl.dot((p * tl.where(match, weight - weight * tl.exp2(copy), -weight)).to(tile.dtype), tile, grad)
    if omega is None:
        everything = tl.log2(everything)
        tl.store(log_copy + own, tl.maximum((tl.log2(matching) - everything) / 1.4426950408889634, NEG_INF), mask=own < tokens)
        tl.store(lse + own, tl.where(matching > 0, everything, float("inf")), mask=own < tokens)
    else:
        store_rows(dqk, grad * (scale_log2 / 1.4426950408889634), start, KEYS, 2, tokens)

class PointerLogCopy(torch.autograd.Function):
    """pointer_reference in kernels: `PointerLogCopy.apply(qk, ids, positions, remaining, window, scale)`; |scale q.k| < 60 as for PackedAttention."""
    @staticmethod
    def launch(tile, scale, qk, *operands, omega=None, dqk=None, keys=0):
        pointer_kernel[(triton.cdiv(len(qk), tile["BLOCK_M"]),)](
            qk, steps_of(qk, tile), *operands, omega, dqk, len(qk), scale * math.log2(math.e), NEG_INF, keys, D=qk.size(2), **tile)

    @staticmethod
    def forward(ctx, qk, ids, positions, remaining, window, scale):
        if scale * qk.size(2) >= 60:
            raise ValueError(f"pointer without running maximum: expected scale * width < 60, found {scale:g} * {qk.size(2)}")
        qk, ctx.window, ctx.scale = qk.contiguous(), window, scale
        operands = qk, ids, *(qk.new_empty(len(qk), dtype=torch.float32) for _ in range(2))  # log_copy, lse
        PointerLogCopy.launch(attention_tiles(qk.device)[0], scale, *operands, positions, window)
        ctx.save_for_backward(*operands, positions, remaining)
        return operands[2]

    @staticmethod
    def backward(ctx, omega):
        *operands, positions, remaining = ctx.saved_tensors
        tile, omega, dqk = attention_tiles(omega.device)[1], omega.contiguous(), torch.empty_like(operands[0])
        for keys, distances in enumerate((positions, remaining)):
            PointerLogCopy.launch(tile, ctx.scale, *operands, distances, ctx.window, omega=omega, dqk=dqk, keys=keys)
        return dqk, *(None,) * 5

# ---- FP8 copies and products -----------------------------------------------------------------------------------------

@jit
def to_e5m2_bits(x, PTX: tl.constexpr):
    """x in e5m2, saturated, as int8.

    Triton converts two numbers at once into a 16-bit register. Where the two bytes of such a pair are
    stored apart, as in a transposed store, ptxas (of Triton 3.6 and 3.7, sm_90) reads half of them from the
    stack pointer. The PTX written by hand here uses 32-bit registers instead; tests/test_compiled.py looks
    for the fault.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; "
            "mov.b32 $0, {a, b};}", "=r,f,f,f,f", [x], tl.int8, is_pure=True, pack=4)
    else:
        return tl.clamp(x, -57344.0, 57344.0).to(tl.float8e5).to(tl.int8, bitcast=True)


@jit
def quantize_kernel(
    x_ptr, out_ptr, out_t_ptr, height, width, inverse_scale,
    LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """out = x * inverse_scale, saturated at +-LIMIT (a NaN stays a NaN), and out_t, its transposed copy.

    x and out are [height, width], out_t is [width, height]. An entry of bf16 costs 2 bytes read and 2
    written. With a BLOCK_M of 128 every tile writes whole cache lines of out_t. Reference: x *
    inverse_scale, clamped and cast.
    """
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < height)[:, None] & (column < width)[None, :]
    offsets = row[:, None].to(tl.int64) * width + column[None, :]

    x = tl.load(x_ptr + offsets, inside, other=0.0).to(tl.float32) * inverse_scale
    out = tl.clamp(x, -LIMIT, LIMIT, tl.PropagateNan.ALL).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, inside)

    tile_t_ptr = out_t_ptr + column[:, None].to(tl.int64) * height + row[None, :]
    inside_t = (column < width)[:, None] & (row < height)[None, :]
    tl.store(tile_t_ptr, tl.trans(out), inside_t)


def quantize_both(x, scale, dtype=torch.float8_e4m3fn):
    """FP8 copies of x / scale in both layouts, contiguous: [height, width] like x, and [width, height]."""
    height, width = x.shape
    out = x.new_empty(height, width, dtype=dtype)
    out_t = x.new_empty(width, height, dtype=dtype)
    quantize_kernel[triton.cdiv(width, 64), triton.cdiv(height, 128)](
        x.contiguous(), out, out_t, height, width, 1.0 / scale,
        LIMIT=torch.finfo(dtype).max, BLOCK_M=128, BLOCK_N=64, num_warps=8)
    return out, out_t


@functools.cache
def scale_tensor(scale, device):
    """A 0-d float32 tensor of a scale, with storage of its own, because cuBLAS wants 16-byte alignment.

    It is made once: filling one for every product was a twentieth of all kernel launches.
    """
    return torch.full((), scale, device=device)


def fp8_matmul_nt(a, b, scale_a, scale_b, fast_accum, out=None):
    """a [M, K] times b [N, K] transposed: bf16 [M, N], written to `out` if given.

    Both operands are contiguous, which is the layout that FP8 tensor cores want. scale_a is a number or a
    0-d tensor, scale_b a number.
    """
    if not isinstance(scale_a, Tensor):
        scale_a = scale_tensor(scale_a, a.device)
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_tensor(scale_b, a.device),
                            out_dtype=torch.bfloat16, use_fast_accum=fast_accum, out=out)


def linear_forward(x, weight, scales):
    """x [T, D] times weight [N, D] transposed, and what linear_backward needs of x and weight.

    Without `scales` the product has the operands' dtype. With them it is FP8, and the backward pass needs
    only the transposed copies. The first two scales are those of x and weight.
    """
    if scales is None:
        return x @ weight.T, x, weight
    scale_x, scale_weight, *_ = scales
    x8, x8_t = quantize_both(x, scale_x)
    weight8, weight8_t = quantize_both(weight, scale_weight)
    return fp8_matmul_nt(x8, weight8, scale_x, scale_weight, fast_accum=True), x8_t, weight8_t


def linear_backward(grad, grad_t, x, weight, scales, out=None):
    """(dx, dweight) of linear_forward, from the gradient of its first result and from the other two.

    With `scales` the gradient is e5m2, in both layouts, and its scale is the last one; dweight goes to
    `out` if given. These products do not accumulate fast, because in all backward products that costs .035
    of the sprint's loss.
    """
    if scales is None:
        return grad @ weight, grad.T @ x
    scale_x, scale_weight, *_, scale_grad = scales
    dx = fp8_matmul_nt(grad, weight, scale_grad, scale_weight, fast_accum=False)
    dweight = fp8_matmul_nt(grad_t, x, scale_grad, scale_x, fast_accum=False, out=out)
    return dx, dweight


def unused_grad_view(weight):
    """A new view of where the optimizer collects a parameter's gradient, for a step's first backward pass to fill, or None. One reader a pass."""
    return weight.grad_view.view_as(weight) if weight.grad is None and getattr(weight, "grad_view", None) is not None else None


# ---- from the projection to attention --------------------------------------------------------------------------------
# The rotary embedding turns dim i of a head together with dim i + D / 2, so the kernels hold a head as its
# two halves.

@jit
def load_halves(x_ptr, token, valid, stride_x_row, DIM: tl.constexpr):
    """Both halves [BLOCK_M, DIM / 2] of the rows `token` of x, in float32; zeros where not valid."""
    first_ptr = x_ptr + token[:, None].to(tl.int64) * stride_x_row + tl.arange(0, DIM // 2)[None, :]
    first = tl.load(first_ptr, valid[:, None], other=0.0).to(tl.float32)
    second = tl.load(first_ptr + DIM // 2, valid[:, None], other=0.0).to(tl.float32)
    return first, second


@jit
def store_halves(out_ptr, first, second, token, valid, stride_out_row, DIM: tl.constexpr):
    """The opposite of load_halves, in the dtype of `out_ptr`."""
    first_ptr = out_ptr + token[:, None].to(tl.int64) * stride_out_row + tl.arange(0, DIM // 2)[None, :]
    tl.store(first_ptr, first.to(out_ptr.dtype.element_ty), valid[:, None])
    tl.store(first_ptr + DIM // 2, second.to(out_ptr.dtype.element_ty), valid[:, None])


@jit
def load_normed(x_ptr, token, valid, stride_x_row, DIM: tl.constexpr):
    """Both halves of RMS-normed rows, and 1 / rms [BLOCK_M, 1]."""
    first, second = load_halves(x_ptr, token, valid, stride_x_row, DIM)
    inverse_rms = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + 1e-6)[:, None]
    return first * inverse_rms, second * inverse_rms, inverse_rms


@jit
def load_positions(positions_ptr, cos_ptr, sin_ptr, tokens, DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's tokens [BLOCK_M], which of them exist, their positions, and their rows of the rotary tables.

    The tables cos and sin are [positions, DIM / 2].
    """
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = token < tokens
    position = tl.load(positions_ptr + token, valid, other=0)
    offsets = position[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :]
    cos = tl.load(cos_ptr + offsets, valid[:, None], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, valid[:, None], other=0.0).to(tl.float32)
    return token, valid, position, cos, sin


@jit
def rotate_halves(first, second, cos, sin):
    """The rotary embedding; reference: rotate."""
    return first * cos + second * sin, second * cos - first * sin


@jit
def rotate_back(first, second, cos, sin):
    """The inverse of rotate_halves, which is also its gradient."""
    return first * cos - second * sin, first * sin + second * cos


@jit
def split_heads_kernel(
    qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, tokens,
    HEADS: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, KEY_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """q and k, normalised and rotated, and v plus the gated value if there is one, of BLOCK_M tokens of one head.

    qkv [tokens, HEADS (2 HEAD_DIM_QK + HEAD_DIM_V)], value [tokens, VALUE_WIDTH], gates [tokens, HEADS]. q
    and k are [tokens, HEADS, HEAD_DIM_QK], v is [tokens, HEADS, HEAD_DIM_V]: 2 bytes an entry are read and
    2 written. Reference: split_heads_reference.
    """
    head = tl.program_id(0)
    token, valid, position, cos, sin = load_positions(
        positions_ptr, cos_ptr, sin_ptr, tokens, HEAD_DIM_QK, BLOCK_M)

    q_width = HEADS * HEAD_DIM_QK
    v_width = HEADS * HEAD_DIM_V
    qkv_width = 2 * q_width + v_width
    q_in_ptr = qkv_ptr + head * HEAD_DIM_QK
    v_in_ptr = qkv_ptr + 2 * q_width + head * HEAD_DIM_V
    k_in_ptr = q_in_ptr + q_width

    first, second, _ = load_normed(q_in_ptr, token, valid, qkv_width, HEAD_DIM_QK)
    q_ptr += head * HEAD_DIM_QK
    first, second = rotate_halves(first, second, cos, sin)
    store_halves(q_ptr, first, second, token, valid, q_width, HEAD_DIM_QK)

    first, second, _ = load_normed(k_in_ptr, token, valid, qkv_width, HEAD_DIM_QK)
    first, second = rotate_halves(first, second, cos, sin)
    if KEY_OFFSET:  # the stationary dims come from the token before, if the document has one
        stationary = tl.arange(0, HEAD_DIM_QK // 2)[None, :] >= HEAD_DIM_QK // 4
        source = tl.where(position > 0, token - 1, token)
        first_before, second_before, _ = load_normed(k_in_ptr, source, valid, qkv_width, HEAD_DIM_QK)
        first = tl.where(stationary, first_before, first)
        second = tl.where(stationary, second_before, second)
    store_halves(k_ptr + head * HEAD_DIM_QK, first, second, token, valid, q_width, HEAD_DIM_QK)

    if value_ptr is not None:  # else v is a view of qkv
        first, second = load_halves(v_in_ptr, token, valid, qkv_width, HEAD_DIM_V)
        value_first, value_second = load_halves(
            value_ptr + head * HEAD_DIM_V, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        gate = tl.load(gates_ptr + token * HEADS + head, valid, other=0.0).to(tl.float32)[:, None]
        store_halves(v_ptr + head * HEAD_DIM_V, first + gate * value_first, second + gate * value_second,
                     token, valid, v_width, HEAD_DIM_V)


@jit
def norm_grad(x_ptr, first_grad, second_grad, token, valid, stride_x_row, DIM: tl.constexpr):
    """Gradient of RMSNorm's input x, as two halves, from that of its output; x is normalised again."""
    first, second, inverse_rms = load_normed(x_ptr, token, valid, stride_x_row, DIM)
    mean = ((tl.sum(first_grad * first, 1) + tl.sum(second_grad * second, 1)) / DIM)[:, None]
    return (first_grad - first * mean) * inverse_rms, (second_grad - second * mean) * inverse_rms


@jit
def store_qkv_grad(
    dqkv_ptr, dqkv_t_desc, first, second, token, valid, column, factor, qkv_width,
    DIM: tl.constexpr, PTX: tl.constexpr,
):
    """Store DIM columns of dqkv [tokens, qkv_width]; with a descriptor of dqkv_t [qkv_width, tokens], both in e5m2."""
    if dqkv_t_desc is not None:
        first = to_e5m2_bits(first * factor, PTX)
        second = to_e5m2_bits(second * factor, PTX)
        first_token = tl.program_id(1) * first.shape[0]
        dqkv_t_desc.store([column, first_token], tl.trans(first))
        dqkv_t_desc.store([column + DIM // 2, first_token], tl.trans(second))
    store_halves(dqkv_ptr + column, first, second, token, valid, qkv_width, DIM)


@jit
def split_heads_grad_kernel(
    qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dv_ptr,
    dqkv_ptr, dqk_t_desc, dv_t_desc, dvalue_ptr, dgates_ptr, factor, PTX: tl.constexpr, tokens,
    HEADS: tl.constexpr, HEAD_DIM_QK: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, KEY_OFFSET: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """dqkv, and dvalue and dgates if there is a value, of BLOCK_M tokens of one head; shapes as in split_heads_kernel.

    dqkv has the layout of qkv. Given descriptors of its transposed copy (of tiles as high as half a head of
    q and k, and of v), it writes both in e5m2, times `factor`: two layouts then take the bytes of one in
    bf16. q and k are normalised again. Reference: the gradient of split_heads_reference.
    """
    head = tl.program_id(0)
    token, valid, position, cos, sin = load_positions(
        positions_ptr, cos_ptr, sin_ptr, tokens, HEAD_DIM_QK, BLOCK_M)

    q_width = HEADS * HEAD_DIM_QK
    v_width = HEADS * HEAD_DIM_V
    qkv_width = 2 * q_width + v_width
    q_column = head * HEAD_DIM_QK
    k_column = (HEADS + head) * HEAD_DIM_QK
    v_column = 2 * q_width + head * HEAD_DIM_V
    q_in_ptr = qkv_ptr + q_column
    k_in_ptr = q_in_ptr + q_width

    first, second = load_halves(dq_ptr + q_column, token, valid, q_width, HEAD_DIM_QK)
    first, second = rotate_back(first, second, cos, sin)
    first, second = norm_grad(q_in_ptr, first, second, token, valid, qkv_width, HEAD_DIM_QK)
    store_qkv_grad(
        dqkv_ptr, dqk_t_desc, first, second, token, valid, q_column, factor, qkv_width, HEAD_DIM_QK, PTX)

    first, second = load_halves(dk_ptr + q_column, token, valid, q_width, HEAD_DIM_QK)
    if KEY_OFFSET:  # the stationary dims were read by the next token's key, and by a document's first key itself
        stationary = tl.arange(0, HEAD_DIM_QK // 2)[None, :] >= HEAD_DIM_QK // 4
        ends_document = tl.load(positions_ptr + token + 1, token + 1 < tokens, other=0) == 0
        has_next = valid & ~ends_document
        next_first, next_second = load_halves(dk_ptr + q_column, token + 1, has_next, q_width, HEAD_DIM_QK)
        starts_document = (position == 0)[:, None]
        first = tl.where(stationary, tl.where(starts_document, first, 0.0) + next_first, first)
        second = tl.where(stationary, tl.where(starts_document, second, 0.0) + next_second, second)
    first, second = rotate_back(first, second, cos, sin)
    first, second = norm_grad(k_in_ptr, first, second, token, valid, qkv_width, HEAD_DIM_QK)
    store_qkv_grad(
        dqkv_ptr, dqk_t_desc, first, second, token, valid, k_column, factor, qkv_width, HEAD_DIM_QK, PTX)

    first, second = load_halves(dv_ptr + head * HEAD_DIM_V, token, valid, v_width, HEAD_DIM_V)
    store_qkv_grad(
        dqkv_ptr, dv_t_desc, first, second, token, valid, v_column, factor, qkv_width, HEAD_DIM_V, PTX)

    if value_ptr is not None:
        value_first, value_second = load_halves(
            value_ptr + head * HEAD_DIM_V, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        gate = tl.load(gates_ptr + token * HEADS + head, valid, other=0.0).to(tl.float32)[:, None]
        store_halves(
            dvalue_ptr + head * HEAD_DIM_V, gate * first, gate * second, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        dgate = tl.sum(first * value_first, 1) + tl.sum(second * value_second, 1)
        tl.store(dgates_ptr + token * HEADS + head, dgate.to(dgates_ptr.dtype.element_ty), valid)


class ProjectHeads(torch.autograd.Function):
    """split_heads_reference of a projection, in kernels.

    `ProjectHeads.apply(h, weight, value, value_gates, positions, cos, sin, heads, key_offset, scales)`; h
    [T, width], weight [H (2 Dk + Dv), width]. With `scales` the products are FP8, with the limits of
    Fp8Mlp; else they are in the operands' dtype. ValueError if value has too few channels.
    """
    @staticmethod
    def launch(kernel, qkv, value, value_gates, positions, cos, *arguments, heads, key_offset, block_m=32):
        """Launch the kernel or its gradient: a program for `block_m` tokens of each head."""
        tokens, qkv_width = qkv.shape
        qk_dim = 2 * cos.size(1)
        kernel[heads, triton.cdiv(tokens, block_m)](
            qkv, value, value_gates, positions, cos, *arguments, tokens,
            HEADS=heads, HEAD_DIM_QK=qk_dim, HEAD_DIM_V=qkv_width // heads - 2 * qk_dim,
            VALUE_WIDTH=0 if value is None else value.size(1),
            KEY_OFFSET=key_offset, BLOCK_M=block_m, num_warps=block_m // 8)

    @staticmethod
    def forward(ctx, h, weight, value, value_gates, positions, cos, sin, heads, key_offset=False, scales=None):
        ctx.parameter = weight
        ctx.scales = scales
        ctx.flags = dict(heads=heads, key_offset=key_offset)
        qkv, h, weight = linear_forward(h, weight, scales)
        q = qkv.new_empty(len(qkv), heads, 2 * cos.size(1))
        k = q.new_empty(*q.shape)
        v = qkv[:, 2 * q[0].numel():].unflatten(1, (heads, -1))
        if value is not None:
            if value.size(1) < v[0].numel():
                raise ValueError(f"value embedding: expected at least {v[0].numel()} channels, found {value.size(1)}")
            v = v.new_empty(*v.shape)
            value = value.contiguous()
            value_gates = value_gates.contiguous()
        inputs = qkv, value, value_gates, positions, cos, sin
        ProjectHeads.launch(split_heads_kernel, *inputs, q, k, v, **ctx.flags)
        ctx.save_for_backward(h, weight, *inputs)
        return q, k, v

    @staticmethod
    def backward(ctx, *grads):
        h, weight, *inputs = ctx.saved_tensors
        qkv, value, value_gates = inputs[:3]
        dvalue = dgates = None
        if value is not None:
            wider = value.size(1) > grads[2][0].numel()  # no head reads its last channels
            dvalue = torch.zeros_like(value) if wider else torch.empty_like(value)
            dgates = torch.empty_like(value_gates)
        grads = [grad.contiguous() for grad in grads]
        launch = functools.partial(ProjectHeads.launch, split_heads_grad_kernel, *inputs, *grads, **ctx.flags)

        scales = ctx.scales
        if scales is None:
            dqkv = qkv.new_empty(*qkv.shape)
            dqkv_t = view = None
            launch(dqkv, None, None, dvalue, dgates, 1.0, False)
        else:
            dqkv = qkv.new_empty(*qkv.shape, dtype=torch.float8_e5m2)
            dqkv_t = qkv.new_empty(*qkv.T.shape, dtype=torch.float8_e5m2)
            bits_t = dqkv_t.view(torch.int8)
            descriptors = [  # for q and k, and for v
                TensorDescriptor.from_tensor(bits_t, [grad.size(2) // 2, 64]) for grad in grads[1:]]
            launch(
                dqkv.view(torch.int8), *descriptors, dvalue, dgates, 1.0 / scales.grad, qkv.is_cuda, block_m=64)
            view = unused_grad_view(ctx.parameter)
        dh, dweight = linear_backward(dqkv, dqkv_t, h, weight, scales, view)
        return dh, dweight, dvalue, dgates, *(None,) * 6


# ---- head and loss ---------------------------------------------------------------------------------------------------
#     z[j] = softcap / 2 (1 + t[j]),   t[j] = tanh((logit[j] + shift) / (2 temperature))
#     lse = softcap + ln sum_j importance[j] exp(z[j] - softcap)
# The columns j of the logits are classes: all V token ids, or P of them. Of these P, the first num_always (n)
# are always included, among them every target and the copy token. The others are sampled and carry the
# importance weight (V - n) / (P - n), so that the partition function is unbiased; see Targets.

@jit
def tanh_of_softcap(logits, shift, temperature, FAST: tl.constexpr):
    """t in float32. FAST uses the hardware's tanh, whose error of 2^-11 is a quarter of bf16's rounding."""
    half = logits.to(tl.float32) * (0.5 / temperature) + shift * (0.5 / temperature)
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 / (1.0 + tl.exp2(-2.0 * 1.4426950408889634 * half)) - 1.0


@jit
def load_target(class_index_ptr, positions_ptr, token, tokens, AHEAD: tl.constexpr):
    """Targets.ahead in a kernel: the class index of the token AHEAD further than the next one, or -1 for none."""
    inside = token + AHEAD < tokens
    target = tl.load(class_index_ptr + token + AHEAD, inside, other=-1)
    if AHEAD > 0:
        position = tl.load(positions_ptr + token, inside, other=0)
        same_document = tl.load(positions_ptr + token + AHEAD, inside, other=-1) == position + AHEAD
        target = tl.where(same_document, target, -1)
    return target


@jit
def load_importance(num_always_ptr, classes, vocab_rows):
    """num_always and the importance weight of the sampled classes; without a pointer none is sampled."""
    num_always = classes if num_always_ptr is None else tl.load(num_always_ptr)
    return num_always, (vocab_rows - num_always) / tl.maximum(classes - num_always, 1).to(tl.float32)


@jit
def row_loss_kernel(
    logits_ptr, class_index_ptr, positions_ptr, target_weights_ptr, num_always_ptr,
    log_copy_ptr, loss_ptr, lse_ptr, copied_ptr,
    tokens, classes, vocab_rows, copy_token, softcap, shift, temperature,
    TARGETS: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """loss = sum_k target_weights[k] (lse - z[target k]), and lse, of one token a program.

    With log_copy, target 0 gets `odds` times its own probability from the pointer, where odds =
    exp(z[copy_token] + log_copy - z[target 0]), and copied = odds / (1 + odds) is that part of the sum.
    Reads the logits [tokens, classes] once: 2 bytes each in bf16. Reference: head_loss_reference.
    """
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * classes
    half = 0.5 * softcap
    log2e = 1.4426950408889634
    num_always, importance = load_importance(num_always_ptr, classes, vocab_rows)

    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, classes, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        logits = tl.load(logits_ptr + column, column < classes, other=0.0)
        t = tanh_of_softcap(logits, shift, temperature, FAST)
        exponential = tl.exp2(half * log2e * t - half * log2e)
        weighted = exponential * tl.where(column < num_always, 1.0, importance)
        total += tl.where(column < classes, weighted, 0.0)
    lse = softcap + tl.log(tl.sum(total, axis=0))

    loss = 0.0
    for k in tl.static_range(TARGETS):
        target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
        logit = tl.load(logits_ptr + tl.maximum(target, 0))
        z = half + half * tanh_of_softcap(logit, shift, temperature, FAST)
        if k == 0 and log_copy_ptr is not None:
            copy_logit = tl.load(logits_ptr + copy_token)
            copy_z = half + half * tanh_of_softcap(copy_logit, shift, temperature, FAST)
            log_odds = copy_z + tl.load(log_copy_ptr + token) - z
            odds = tl.where(target >= 0, tl.exp(log_odds), 0.0)
            z += tl.log(1.0 + odds)
            tl.store(copied_ptr + token, odds / (1.0 + odds))
        loss += tl.where(target >= 0, tl.load(target_weights_ptr + k) * (lse - z), 0.0)
    tl.store(loss_ptr + token, loss)
    tl.store(lse_ptr + token, lse)


@jit
def head_grad_kernel(
    logits_ptr, class_index_ptr, positions_ptr, target_weights_ptr, num_always_ptr,
    lse_ptr, copied_ptr, factor_ptr, out_ptr, out_t_desc,
    tokens, classes, vocab_rows, copy_token, softcap, shift, temperature,
    TARGETS: tl.constexpr, FAST: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """out = factor * d loss / d logits, [tokens, classes], in tiles of BLOCK_M tokens and BLOCK_N classes.

        d loss / d logit[j] = sum_k target_weights[k] (importance[j] exp(z[j] - lse) - 1[j = target k])
                              * (1 - t[j]^2) / 4 * softcap / temperature
    A logit costs 2 bytes read and 2 written: out is bf16, or it is e5m2 and so is its transposed copy,
    which goes through the descriptor out_t_desc [classes, tokens]: with it Triton 3.6 computes the gradient
    once, not once a layout. Reference: the gradient of head_loss_reference.
    """
    first_column = tl.program_id(0) * BLOCK_N
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = (token < tokens)[:, None] & (column < classes)[None, :]
    offsets = token[:, None].to(tl.int64) * classes + column[None, :]
    half = 0.5 * softcap
    log2e = 1.4426950408889634
    slope = 0.25 * softcap / temperature * tl.load(factor_ptr)
    num_always, importance = load_importance(num_always_ptr, classes, vocab_rows)

    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    for k in tl.static_range(TARGETS):
        target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
        weight_sum += tl.where(target >= 0, tl.load(target_weights_ptr + k), 0.0)
    weight_sum *= slope * tl.where(first_column < num_always, 1.0, importance)

    logits = tl.load(logits_ptr + offsets, inside, other=0.0)
    t = tanh_of_softcap(logits, shift, temperature, FAST)
    exponent = half * log2e * t
    lse = tl.load(lse_ptr + token, token < tokens, other=0.0)
    grad = weight_sum[:, None] * tl.exp2(exponent + (half - lse)[:, None] * log2e)
    if first_column < num_always:  # the other tiles hold sampled classes alone, and no targets
        grad *= tl.where(column < num_always, 1.0, importance)[None, :]
        for k in tl.static_range(TARGETS):
            target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
            weight = tl.where(target >= 0, slope * tl.load(target_weights_ptr + k), 0.0)
            if k == 0 and copied_ptr is not None:  # the copied share of the target is the copy token's
                copied = weight * tl.load(copied_ptr + token, token < tokens, other=0.0)
                grad -= tl.where(column[None, :] == copy_token, copied[:, None], 0.0)
                weight -= copied
            grad -= tl.where(column[None, :] == target[:, None], weight[:, None], 0.0)
    grad *= 1.0 - t * t

    if out_t_desc is not None:
        grad = to_e5m2_bits(grad, PTX)
        out_t_desc.store([first_column, tl.program_id(1) * BLOCK_M], tl.trans(grad))
    tl.store(out_ptr + offsets, grad.to(out_ptr.dtype.element_ty), inside)


@jit
def add_rows_kernel(rows_ptr, ids_ptr, table_ptr, width, BLOCK_N: tl.constexpr):
    """table[ids] += rows, [N, width], for ids that differ: one program a row.

    It takes 8 us for 6144 rows of 768 on an H200, where index_add_, its reference, takes 45.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    table_ptr += tl.load(ids_ptr + row).to(tl.int64) * width + column
    inside = column < width
    total = tl.load(table_ptr, inside, other=0.0).to(tl.float32)
    total += tl.load(rows_ptr + row * width + column, inside, other=0.0).to(tl.float32)
    tl.store(table_ptr, total.to(table_ptr.dtype.element_ty), inside)


def row_losses(logits, targets, vocab_rows, cap, fast=False):
    """(losses, lse, copied or None), [T] float32, of contiguous logits [T, classes]; see row_loss_kernel.

    `fast` uses the hardware's tanh, for bf16 logits on CUDA.
    """
    tokens, classes = logits.shape
    losses = logits.new_empty(tokens, dtype=torch.float32)
    lse = losses.new_empty(tokens)
    copied = None if targets.log_copy is None else losses.new_empty(tokens)
    row_loss_kernel[(tokens,)](
        logits, targets.class_index, targets.positions, targets.weights, targets.num_always,
        targets.log_copy, losses, lse, copied,
        tokens, classes, vocab_rows, targets.spare, *cap,
        TARGETS=len(targets.weights), FAST=fast, BLOCK_N=2048, num_warps=4)
    return losses, lse, copied


def head_grad(logits, targets, vocab_rows, lse, copied, factor, cap, dtype, fast=False):
    """The gradient [T, classes] of the summed loss times `factor` (0-d, float32), and its transposed copy or None.

    The copy is made for e5m2, which saturates and for which T is a multiple of 16.
    """
    tokens, classes = logits.shape
    out = out_bits = logits.new_empty(tokens, classes, dtype=dtype)
    out_t = out_t_desc = None
    block_m, block_n = 8, 512
    if dtype == torch.float8_e5m2:
        block_m, block_n = 32, 64  # the fastest of seven shapes
        out_bits = out.view(torch.int8)
        out_t = out.new_empty(classes, tokens)
        out_t_desc = TensorDescriptor.from_tensor(out_t.view(torch.int8), [block_n, block_m])
    head_grad_kernel[triton.cdiv(classes, block_n), triton.cdiv(tokens, block_m)](
        logits, targets.class_index, targets.positions, targets.weights, targets.num_always,
        lse, copied, factor, out_bits, out_t_desc,
        tokens, classes, vocab_rows, targets.spare, *cap,
        TARGETS=len(targets.weights), FAST=fast, PTX=logits.is_cuda,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4)
    return out, out_t


class HeadLoss(torch.autograd.Function):
    """head_loss_reference in kernels: `HeadLoss.apply(x, weight, *targets, cap, scales)`; x [T, D], weight [V, D] bf16.

    With `scales` the products are FP8, e4m3 by e4m3 forward and e5m2 by e4m3 backward; T, D, V and the
    number of sampled classes are then multiples of 16, dx and dweight are bf16. Without, all is in the
    operands' own dtype: the path of GPUs without FP8.
    """
    @staticmethod
    def forward(ctx, x, weight, *arguments):
        *targets, cap, scales = arguments
        targets = Targets(*targets)
        fast = scales is not None and x.is_cuda
        total = 0.0
        saved = []
        for rows, part in targets.parts():
            part_weight = weight if part.classes is None else weight[part.classes]
            logits, *operands = linear_forward(x[rows], part_weight, scales)
            losses, lse, copied = row_losses(logits, part, len(weight), cap, fast)
            total = total + losses.sum()
            saved += [*operands, logits, lse, copied]
        ctx.constants = weight, targets, cap, scales, fast
        ctx.save_for_backward(*saved)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        weight, targets, cap, scales, fast = ctx.constants
        saved = ctx.saved_tensors
        dx_parts = []
        dweight = None
        if scales is None:
            dtype = weight.dtype
            factor = grad_output
        else:
            # The incoming gradient becomes part of the products' scale: neither a synchronise nor a pass over grad.
            dtype = torch.float8_e5m2
            factor = scale_tensor(1.0 / scales.grad, weight.device)
            scales = scales._replace(grad=grad_output * scales.grad)

        for (_, part), start in zip(targets.parts(), range(0, len(saved), 5)):
            *operands, logits, lse, copied = saved[start:start + 5]
            grad, grad_t = head_grad(logits, part, len(weight), lse, copied, factor, cap, dtype, fast)
            dx_part, dweight_part = linear_backward(grad, grad_t, *operands, scales)
            del grad, grad_t  # before those of the next part, which are as large, are made
            dx_parts.append(dx_part)

            if part.classes is None:
                dweight = dweight_part
                continue
            if dweight is None:  # cleared once, then the rows of every part are added
                view = unused_grad_view(weight)
                dweight = dweight_part.new_zeros(weight.shape) if view is None else view.zero_()
            width = weight.size(1)
            add_rows_kernel[(len(dweight_part),)](
                dweight_part, part.classes, dweight, width, BLOCK_N=triton.next_power_of_2(width))

        dx = dx_parts[0] if len(dx_parts) == 1 else torch.cat(dx_parts)
        dlog_copy = None
        if ctx.needs_input_grad[7]:  # log_copy's
            dlog_copy = -targets.weights[0] * grad_output * torch.cat(saved[4::5])
        return dx, dweight, *(None,) * 5, dlog_copy, *(None,) * 3


@torch.no_grad()
def head_loss_eval(x, weight, targets, cap=Softcap(), chunk_rows=8192):
    """Summed loss of the next tokens without FP8 or approximate functions, 0-d float64.

    It keeps 0.8 GB of bf16 logits alive at the default.
    """
    total = 0.0
    for rows, part in targets.parts(chunk_rows):
        losses, *_ = row_losses(x[rows] @ weight.T, part, len(weight), cap)
        total = total + losses.sum(dtype=torch.float64)
    return total


# ---- MLP -------------------------------------------------------------------------------------------------------------

@jit
def mlp_kernel(
    a_desc, b_desc, hidden_desc, out_desc, out_t_desc, tokens, mlp_width, factor,
    WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out = f(a b^T) * factor, saturated at +-LIMIT, [tokens, mlp_width], and out_t, its transposed copy.

    Forward, without hidden: f(x) = relu(x)^2. Backward: f(x) = x sqrt(hidden). The root stands for
    relu(pre), which need not be kept: that is an error of at most 2^-5, against 2^-3 of the result's own
    rounding. Descriptors of FP8 tensors: a [tokens, WIDTH], b [mlp_width, WIDTH], hidden [tokens,
    mlp_width], out in a's format, out_t as its bits.

    The kernel is persistent, so that the next tile's loads run under the epilogue. 65,536 tokens with
    mlp_width 2560 take 0.26 ms on one H200 (1010 TFLOP/s), backward 0.32 (800). It accumulates fast: exact
    accumulation takes 1.6 times as long. Reference: relu_squared_mlp.
    """
    tiles_across = tl.cdiv(mlp_width, BLOCK_N)
    first_tile = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_M) * tiles_across
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), flatten=True):
        row = tile // tiles_across * BLOCK_M
        column = tile % tiles_across * BLOCK_N
        x = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, WIDTH, BLOCK_K):
            x = tl.dot(a_desc.load([row, k]), b_desc.load([column, k]).T, x)

        if hidden_desc is None:
            x *= tl.maximum(x, 0.0)
        else:
            x *= tl.sqrt(hidden_desc.load([row, column]).to(tl.float32))
        out = tl.clamp(x * factor, -LIMIT, LIMIT, tl.PropagateNan.ALL).to(out_desc.dtype)
        out_desc.store([row, column], out)
        out_t_desc.store([column, row], tl.trans(out.to(tl.int8, bitcast=True)))  # of FP8 tiles ptxas loses some bits


def mlp_product(a, b, factor, hidden8=None):
    """What mlp_kernel makes of a [T, width] and b [H, width]: [T, H] and [H, T] in a's format.

    Operands are contiguous FP8, and all sizes are multiples of 16.
    """
    # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages, programs a multiprocessor. In the backward pass two smaller programs
    # share a multiprocessor, so that the epilogue of one runs beside the products of the other.
    forward = 128, 256, 128, 8, 3, 1  # 208 KB of shared memory
    backward = 128, 128, 64, 4, 4, 2  # 2 x 112 KB
    block_m, block_n, block_k, warps, stages, programs = forward if hidden8 is None else backward

    tokens, width = a.shape
    mlp_width = len(b)
    out = a.new_empty(tokens, mlp_width)
    out_t = a.new_empty(mlp_width, tokens)
    describe = TensorDescriptor.from_tensor
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(mlp_width, block_n)
    mlp_kernel[(min(tiles, programs * multiprocessors(a.device)),)](
        describe(a, [block_m, block_k]),
        describe(b, [block_n, block_k]),
        None if hidden8 is None else describe(hidden8, [block_m, block_n]),
        describe(out, [block_m, block_n]),
        describe(out_t.view(torch.int8), [block_n, block_m]),
        tokens, mlp_width, factor, WIDTH=width, LIMIT=torch.finfo(a.dtype).max,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
    return out, out_t


class Fp8Mlp(torch.autograd.Function):
    """relu_squared_mlp with FP8 matrix products: `Fp8Mlp.apply(h, up, down, scales)`.

    h [T, D] is RMS-normed; up and down are [H, D]; all are bf16, and T, D and H are multiples of 16. The
    products are e4m3 by e4m3 forward, e5m2 by e4m3 without fast accumulation backward. What takes part in
    two needs two layouts.
    """
    @staticmethod
    def forward(ctx, h, up, down, scales=MlpScales()):
        h8, h8_t = quantize_both(h, scales.input)
        up8, up8_t = quantize_both(up, scales.weight)
        down8, down8_t = quantize_both(down, scales.weight)
        hidden8, hidden8_t = mlp_product(h8, up8, (scales.input * scales.weight) ** 2 / scales.hidden)
        ctx.parameters = up, down
        ctx.scales = scales
        ctx.save_for_backward(h8_t, hidden8, hidden8_t, up8_t, down8)
        return fp8_matmul_nt(hidden8, down8_t, scales.hidden, scales.weight, fast_accum=True)

    @staticmethod
    def backward(ctx, grad_output):
        h8_t, hidden8, hidden8_t, up8_t, down8 = ctx.saved_tensors
        scales = ctx.scales
        up_view, down_view = map(unused_grad_view, ctx.parameters)
        grad8, grad8_t = quantize_both(grad_output, scales.grad, torch.float8_e5m2)
        factor = 2.0 * scales.weight * scales.hidden ** 0.5
        dpre8, dpre8_t = mlp_product(grad8, down8, factor, hidden8)  # dhidden * 2 relu(pre)
        dh, dup = linear_backward(dpre8, dpre8_t, h8_t, up8_t, scales, up_view)
        ddown = fp8_matmul_nt(hidden8_t, grad8_t, scales.hidden, scales.grad, fast_accum=False, out=down_view)
        return dh, dup, ddown, None


def fp8_mlp(h, up, down):
    """Fp8Mlp in training; validation computes what the reference computes, as head_loss_eval does."""
    if torch.is_grad_enabled():
        return Fp8Mlp.apply(h, up, down)
    return F.linear(h, up).relu_().square_() @ down  # in place, because windows are long


# ---- embedding gradient, sparse update -------------------------------------------------------------------------------
# The gradient of a table's row is the sum over all positions that hold its id: sorted by id, a group of
# neighbours. Some ids are very frequent (the comma: thousands of positions) and would keep one program busy
# for long. So the sorted positions are cut into chunks of CHUNK_ROWS, and every chunk that lies within a group
# is summed by a program of its own. At the two ends of a group at most 2 (CHUNK_ROWS - 1) positions are left.
CHUNK_ROWS = 32


def sort_ids(ids, vocab_rows):
    """(order, starts), int32: the positions of id v are order[starts[v]:starts[v + 1]], ascending.

    For the loader: `ids` is a NumPy array, below vocab_rows and 2^16. With 16-bit keys NumPy's stable sort
    is a radix sort, half a millisecond for 65536 tokens. torch's embedding backward would sort again for
    every table.
    """
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    starts = np.zeros(vocab_rows + 1, np.int32)
    np.cumsum(np.bincount(ids, minlength=vocab_rows), out=starts[1:])
    return order.astype(np.int32), starts


@jit
def sum_rows(
    x_ptr, order_ptr, begin, end, width,
    IDS_PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The float32 sum of x[order[i] // IDS_PER_ROW] over begin <= i < end, always in the same order.

    Without an order it is the sum of x[i].
    """
    column = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        valid = row < end
        if order_ptr is not None:
            row = tl.load(order_ptr + row, valid, other=0) // IDS_PER_ROW
        offsets = row[:, None].to(tl.int64) * width + column[None, :]
        tile = tl.load(x_ptr + offsets, valid[:, None] & (column < width)[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    return total


@jit
def chunk_sum_kernel(
    grad_ptr, ids_ptr, order_ptr, partial_ptr, width,
    IDS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """partial[c] = the sum of the gradient rows of chunk c, [chunks, width] float32, if all its positions hold one id.

    Each program has one chunk. Sums of other chunks are not written, and sum_group does not read them.
    """
    begin = tl.program_id(0) * CHUNK_ROWS
    first_id = tl.load(ids_ptr + tl.load(order_ptr + begin))
    last_id = tl.load(ids_ptr + tl.load(order_ptr + begin + CHUNK_ROWS - 1))
    if first_id == last_id:
        total = sum_rows(grad_ptr, order_ptr, begin, begin + CHUNK_ROWS, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
        column = tl.arange(0, BLOCK_N)
        tl.store(partial_ptr + begin // CHUNK_ROWS * width + column, total, column < width)


@jit
def sum_group(
    grad_ptr, order_ptr, partial_ptr, begin, end, width,
    IDS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """The sum of the gradient rows of one id, at sorted positions begin ... end - 1.

    It adds the rows before the first whole chunk, the partial sums of the whole chunks and the rows after
    the last.
    """
    first_chunk = tl.cdiv(begin, CHUNK_ROWS)
    end_chunk = end // CHUNK_ROWS  # no whole chunk if first_chunk >= end_chunk
    head_end = tl.minimum(first_chunk * CHUNK_ROWS, end)
    tail_begin = tl.maximum(end_chunk * CHUNK_ROWS, head_end)
    total = sum_rows(grad_ptr, order_ptr, begin, head_end, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    total += sum_rows(partial_ptr, None, first_chunk, end_chunk, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    total += sum_rows(grad_ptr, order_ptr, tail_begin, end, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    return total


@jit
def embedding_grad_kernel(
    grad_ptr, order_ptr, starts_ptr, partial_ptr, vocab_rows, dense_ptr, width,
    IDS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ADD: tl.constexpr,
):
    """dense[v] = the sum of the gradient rows of id v, zeros without any, for all v < vocab_rows; ADD: += instead.

    There are no atomics and no memset. The ids of a program are far apart, since frequent ids are
    neighbours. It moves 2 T D + 2 V D bytes in bf16: 178 MB for T = 65536, D = 768. Reference:
    embedding_grad_reference.
    """
    column = tl.arange(0, BLOCK_N)
    for row in range(tl.program_id(0), vocab_rows, tl.num_programs(0)):
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
        total = sum_group(
            grad_ptr, order_ptr, partial_ptr, begin, end, width, IDS_PER_ROW, CHUNK_ROWS, BLOCK_M, BLOCK_N)
        row_ptr = dense_ptr + tl.cast(row, tl.int64) * width + column
        inside = column < width
        if ADD:
            inside &= begin < end  # rows without a gradient are not touched
            total += tl.load(row_ptr, inside, other=0.0).to(tl.float32)
        tl.store(row_ptr, total.to(dense_ptr.dtype.element_ty), inside)


def launch_groups(
    kernel, grad, ids, order, starts, *arguments, per_program=8, BLOCK_M=4, num_warps=2, **options,
):
    """Launch a kernel that sums the rows of grad [T, D] over each group of equal ids, in a fixed order.

    ids are [T] or [T, K]; order and starts are those of sort_ids or group_ids. `arguments` are the kernel's own,
    before the width. A program gets `per_program` groups.
    """
    chunks = len(order) // CHUNK_ROWS
    grad = grad.contiguous()
    width = grad.size(1)
    partial = grad.new_empty(max(chunks, 1), width, dtype=torch.float32)
    shape = dict(IDS_PER_ROW=len(order) // len(grad), CHUNK_ROWS=CHUNK_ROWS, BLOCK_M=BLOCK_M,
                 BLOCK_N=triton.next_power_of_2(width), num_warps=num_warps)
    if chunks:
        chunk_sum_kernel[(chunks,)](grad, ids, order, partial, width, **shape)
    programs = triton.cdiv(len(starts) - 1, per_program)
    kernel[(programs,)](grad, order, starts, partial, *arguments, width, **shape, **options)


@jit
def sparse_adam_kernel(
    grad_ptr, order_ptr, starts_ptr, partial_ptr, sorted_ids_ptr, weights_ptr, exp_avg_sq_ptr, last_step_ptr,
    step_ptr, lr_ptr, wd_ptr, beta2, epsilon, grad_scale, width,
    IDS_PER_ROW: tl.constexpr, CHUNK_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One Adam step of the rows that occur, a program a sorted id, idle unless that is the last of its group.

    It moves 4 T D + 4 U D bytes in bf16, for U rows. Formula and reference: sparse_adam_reference.
    """
    index = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)
    begin = tl.load(starts_ptr + index)
    end = tl.load(starts_ptr + index + 1)
    row = tl.load(sorted_ids_ptr + index).to(tl.int64)
    if begin < end:
        row_ptr = weights_ptr + row * width + column
        inside = column < width
        # The weights, and what the second moment needs, are loaded before the sum: there is one wait for all.
        weights = tl.load(row_ptr, inside, other=0.0).to(tl.float32)
        step = tl.load(step_ptr)
        last_step = tl.load(last_step_ptr + row)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + row)
        grad = sum_group(
            grad_ptr, order_ptr, partial_ptr, begin, end, width, IDS_PER_ROW, CHUNK_ROWS, BLOCK_M, BLOCK_N)
        grad = grad_scale * grad

        beta2_power = tl.exp2((step - last_step) * tl.log2(beta2))  # makes up for the steps that did not read the row
        exp_avg_sq = beta2_power * exp_avg_sq + (1 - beta2) * tl.sum(grad * grad, axis=0) / width
        update = tl.load(lr_ptr) * grad / (tl.sqrt(exp_avg_sq) + epsilon)
        # Weight decay is cautious: it applies where the update shrinks a weight, too.
        weights -= update + tl.load(wd_ptr) * tl.where(update * weights > 0, weights, 0.0)

        tl.store(row_ptr, weights.to(weights_ptr.dtype.element_ty), inside)
        tl.store(exp_avg_sq_ptr + row, exp_avg_sq)
        tl.store(last_step_ptr + row, step)


def group_ids(ids):
    """(ids, order, starts, sorted ids) for launch_groups, of ids [T, K].

    `order` sorts the flat ids. The last of a group of equal ids has the group, the others have an empty
    one. The GPU sorts, without a synchronise: each rank's host would need 6 / 12 / 34 ms for all ranks'
    n-grams.
    """
    sorted_ids, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_ids, sorted_ids, out_int32=True)
    return ids, order, F.pad(starts, (0, 1), value=len(sorted_ids)), sorted_ids


def sparse_adam(grad, lookup, *state, BLOCK_M=1, **options):
    """sparse_adam_reference in kernels. A larger BLOCK_M is slower.

    With group_ids (under 0.1 ms) it takes 0.33 / 0.56 / 0.78 ms for 65536 / 131072 / 196608 tokens on an H200.
    """
    launch_groups(sparse_adam_kernel, grad, *lookup, *state, per_program=1, BLOCK_M=BLOCK_M, **options)

# ==== 10. Operator selection ==========================================================================================
@dataclasses.dataclass(frozen=True)
class Ops:
    """The operators of this run; the model never asks what hardware it is on."""
    attention: Callable[[Tensor, Tensor, Tensor, Documents, int, float, Tensor], Tensor]
    head_loss: Callable[[Tensor, Tensor, Targets, Softcap], Tensor]
    head_loss_eval: Callable[[Tensor, Tensor, Targets, Softcap], Tensor]
    pointer: Callable[[Tensor, Documents, int, float], Tensor]
    embed: Callable[[Tensor, Documents], Tensor]
    sparse_adam: Callable[..., None]
    project_heads: Callable[..., tuple[Tensor, Tensor, Tensor]]
    mlp: Callable[[Tensor, Tensor, Tensor], Tensor]
    orthogonalize: Callable[[Tensor, OrthogonalizeRecipe], Tensor]
    compile: Callable[[Callable], Callable]
    graphs: bool  # whole steps as CUDA graphs
    names: dict[str, str]

def compile_dynamic(function: Callable) -> Callable:
    """torch.compile with the leading dimension of the first argument symbolic in all that have it: one compilation for every stage and shard."""
    compiled = torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*args):
        leading = args[0].shape[0]
        for tensor in args:
            if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and leading in tensor.shape:
                torch._dynamo.maybe_mark_dynamic(tensor, tensor.shape.index(leading))
        return compiled(*args)
    return call

def select_ops(device: torch.device, fast: bool = True, compile: bool = True, fp8: Sequence[str] = FP8_PARTS, graphs: bool = True) -> Ops:
    """The fastest operators that this device and installation support; `names` tells which, for the log."""
    if not fast or device.type != "cuda" or triton is None:
        return Ops(
            attention=lambda q, k, v, documents, *rest: attention_reference(q, k, v, documents.positions, *rest), sparse_adam=sparse_adam_reference,
            project_heads=lambda h, weight, *rest: split_heads_reference(F.linear(h, weight), *rest), mlp=relu_squared_mlp,
            head_loss=head_loss_reference, head_loss_eval=lambda *operands: head_loss_reference(*operands).double(),
            pointer=lambda qk, documents, window, scale: pointer_reference(qk, documents.class_index, documents.positions, window, scale), graphs=False,
            embed=lambda table, documents: F.embedding(documents.tokens, table), compile=lambda region: region, orthogonalize=orthogonalize_reference,
            names={name: "reference" for name in ("attention", "head", "mlp", "embedding", "orthogonalize")} | {"compile": "off", "graphs": "off"})
    able, hopper = capability(device) >= (8, 9), (9, 0) <= capability(device) < (12, 0)  # with TMA and 208 KB of shared memory, or more
    attention, head, mlp = ("fp8" if part in fp8 and fits else "bf16" for part, fits in zip(FP8_PARTS, (hopper, able, hopper)))
    region, scales = compile_dynamic if compile else lambda function: function, HeadScales() if head == "fp8" else None
    torch._dynamo.config.recompile_limit = 64  # regions x (attention variants, gradients on or off)
    return Ops(
        attention=lambda q, k, v, documents, *rest: PackedAttention.apply(q, k, v, documents.positions, documents.remaining, *rest),
        pointer=lambda qk, documents, *rest: PointerLogCopy.apply(qk, documents.class_index, documents.positions, documents.remaining, *rest),
        project_heads=lambda *operands: ProjectHeads.apply(*operands, MlpScales() if attention == "fp8" and torch.is_grad_enabled() else None),
        mlp=fp8_mlp if mlp == "fp8" else region(relu_squared_mlp), orthogonalize=orthogonalize, sparse_adam=sparse_adam,
        head_loss=lambda x, weight, targets, cap: HeadLoss.apply(x, weight, *targets, cap, scales), head_loss_eval=head_loss_eval,
        embed=lambda table, documents: EmbeddingLookup.apply(F.embedding, table, documents.tokens, documents.order, documents.starts),
        names={"attention": f"triton ({attention} projection)", "head": head, "mlp": mlp, "embedding": "triton", "orthogonalize": "triton",
               "compile": "inductor" if compile else "off", "graphs": "cuda" if graphs else "off"}, compile=region, graphs=graphs)

# ==== 11. Runtime =====================================================================================================
class Failure(Exception):
    """An error the user can act on: one line that says what, expected, found and the fix; `code` is the exit status."""
    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code

def fail(what: str, expected: Any, found: Any, fix: str, code: int = EXIT_USAGE) -> NoReturn:
    raise Failure(f"{what}: expected {expected}, found {found}; fix: {fix}", code)

class Ranks:
    """The processes of one run, one device each. With one rank every collective is a no-op. Tensors that are `shared` are fetched by copy engines,
    where GPUs reach each other's memory: NCCL's kernels would take multiprocessors from what runs beside them."""
    def __init__(self, rank: int, world: int, device: torch.device):
        self.rank, self.world, self.device = rank, world, device
        self.copy_stream, self.peers = None, {}  # where memory can be shared: stream of `fetch`; of each shared tensor, by address, all ranks' parts
        self.side_streams = [torch.cuda.Stream(priority=-1) for _ in range(2)] if device.type == "cuda" else []
        self.processes, self.stop_asked = [os.getpid()], False
        self.heartbeat: Callable[..., None] = lambda *_: None  # the watchdog's while one watches

    @staticmethod
    def start() -> Ranks:
        """Read torchrun's variables, pick the device and join the process group."""
        given = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))]
        if not all(text.isdecimal() for text in given):
            fail("RANK, WORLD_SIZE, LOCAL_RANK", "numbers, as torchrun sets them", given, "unset them, or start with torchrun")
        rank, world, local = map(int, given)
        if world not in (1, 2, 4, 8):
            fail("number of processes", "1, 2, 4 or 8", world, "torchrun --nproc_per_node=8 (or 4, 2, 1)")
        if world > 1 and "MASTER_ADDR" not in os.environ:
            fail("MASTER_ADDR", f"an address, as WORLD_SIZE is {world}", "none", "unset RANK, WORLD_SIZE and LOCAL_RANK, or start with torchrun")
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local >= torch.cuda.device_count():
                fail("GPUs on this machine", f"at least {local + 1}", torch.cuda.device_count(), "start fewer processes", EXIT_HARDWARE)
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
            if torch.cuda.get_device_capability(device)[0] == 9:  # measured there: with a workspace cuBLASLt clears some bytes before each product
                os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured in a graph
        if world > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
        ranks = Ranks(rank, world, device)
        ranks.processes = ranks.gather_objects(os.getpid())
        if world > 1:
            signal.signal(signal.SIGINT, ranks.ask_to_stop)
        if world > 1 and device.type == "cuda" and os.environ.get("LOCAL_WORLD_SIZE") == str(world):
            ranks.copy_stream = torch.cuda.Stream()
            with contextlib.suppress(RuntimeError):  # the GPUs, the driver or the container may not let them
                ranks.shared(torch.zeros(world, device=device))
            ranks.copy_stream = ranks.copy_stream if all(ranks.gather_objects(bool(ranks.peers))) else None
        return ranks

    def shared(self, tensor: Tensor, parts: int = 1) -> Tensor:
        """`tensor`, moved to memory that other ranks can read, if there is some. A collective; never freed; `fetch` takes each of its `parts`."""
        if self.copy_stream:
            # torch (to 2.13; its issue 181086) clears this memory, and writes the addresses that barriers read, on a stream that no other waits for:
            # first everything queued must end, as it may still write to where the addresses come; then that, before any rank uses either.
            given, tensor = tensor, symmetric_memory.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            torch.cuda.synchronize(self.device)
            handle = symmetric_memory.rendezvous(tensor, dist.group.WORLD.group_name)
            torch.cuda.synchronize(self.device)
            tensor.copy_(given)
            for part in tensor.chunk(parts):
                where = part.shape, part.dtype, part.storage_offset()
                self.peers[part.data_ptr()] = handle, [handle.get_buffer(r, *where).view(self.world, -1) for r in range(self.world)]
        return tensor

    def fetch(self, full: Tensor, received: Tensor | None = None, barrier: bool = True) -> Callable[[], None]:
        """Copy from other ranks' parts of a shared tensor: their own shards, in place (all-gather), or each one's version of this rank's shard, to
        `received`. All on one stream, in one order on every rank: past a barrier, all have read what was given before."""
        handle, peers = self.peers[full.data_ptr()]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            if barrier:
                handle.barrier()
            for other in ((self.rank + i) % self.world for i in range(received is None, self.world)):  # at no time do two read from the same rank
                target, part = (peers[self.rank], other) if received is None else (received, self.rank)
                target[other].view(-1).copy_(peers[other][part], non_blocking=True)
        return self.copy_stream.record_event().wait

    def on_side_stream(self, work: Callable[[], Any], side: int = 0) -> Callable[[], None]:
        """Queue `work` on one of two streams of their own, whose kernels go first where there is room for one only. Returns the wait for it."""
        if not self.side_streams:
            work()
            return lambda: None
        self.side_streams[side].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_streams[side]):
            work()
            return torch.cuda.current_stream().record_event().wait

    def shard(self, full: Tensor) -> Tensor:
        """This rank's equal part of `full` along its first dimension, a view."""
        return full.view(self.world, -1, *full.shape[1:])[self.rank]

    def reduce_scatter(self, full: Tensor, received: Tensor) -> Callable[[], None]:
        """Every rank's version of this rank's shard of `full`, for the caller to average: `received` is [world, ...] if `full` is shared, else
        [1, ...], a view of the shard, averaged already. Returns the wait (it blocks the stream, not the host)."""
        if full.data_ptr() in self.peers:
            return self.fetch(full, received)
        if self.world > 1 and self.device.type == "cuda":
            return dist.reduce_scatter_tensor(received[0], full, op=dist.ReduceOp.AVG, async_op=True).wait
        return self.all_reduce_mean(full)

    def all_reduce_mean(self, tensor: Tensor) -> Callable[[], None]:
        if self.world > 1 and self.device.type == "cuda":
            return dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True).wait
        if self.world > 1:  # gloo has no mean
            self.sum(tensor).div_(self.world)
        return lambda: None

    def all_gather(self, full: Tensor, barrier: bool = True) -> Callable[[], None]:
        """Fill `full` from every rank's shard of it, in place. No barrier is needed if there was one since the ranks wrote their shards."""
        if self.world == 1:
            return lambda: None
        if full.data_ptr() in self.peers:
            return self.fetch(full, None, barrier)
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
        self.done, ranks.heartbeat = threading.Event(), self.heartbeat
        self.heartbeat("the start")
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    def heartbeat(self, doing: str, patience: float = 1.0) -> None:
        """This rank goes on, with something that may take `patience` times the limit."""
        self.doing, self.patience, self.idle_s = doing, patience, 0.0
        if self.ranks.device.type == "cuda" and patience == 1:  # not in the warm-up: a query while a graph is captured breaks it
            self.events.append(torch.cuda.current_stream().record_event())

    def _work(self) -> None:
        wait_s = min(1.0, self.limit_s / 8)  # counted, so the time in which the process is suspended is none
        while not self.done.wait(wait_s):
            self.idle_s += wait_s
            with contextlib.suppress(RuntimeError):  # a broken device: the main thread meets the same error and says so
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

    def switch(self, reason: str | None) -> None:
        """From now on the time is for `reason`, and counts if that is "training"; None stops the clock. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = 1e3 * self.since_start()
        if self.intervals and "end_ms" not in self.intervals[-1]:
            self.intervals[-1]["end_ms"] = now
        if reason is not None:
            self.intervals.append({"on": reason == "training", "reason": reason, "start_ms": now})

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

def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

# ==== 12. Run log =====================================================================================================
class RunLog:
    """One JSON line an event, each carrying a hash of itself and the line before. A thread writes, so the clock never waits."""
    def __init__(self, path: Path | None, quiet: bool = False):
        self.path, self.quiet, self.file, self.chain, self.terminal = path, quiet, None, "", sys.stdout.isatty()
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
                try:
                    print("" if self.quiet else item, end="", flush=True)
                except OSError:  # nobody reads any more, or the disk is full: the log goes on
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            elif self.file is not None:
                text = json.dumps(item)
                self.chain = hashlib.sha256((self.chain + text).encode()).hexdigest()[:16]
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
    """SHA-256 over what `sha256sum` would print of files, in order: records need no more. A SHA256SUMS beside a file must agree, if it names it."""
    lines = []
    for path in paths:
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
        sums = path.with_name("SHA256SUMS")
        if sums.exists() and f"  {path.name}\n" in (stated := sums.read_text(errors="replace")) and lines[-1] not in stated:
            fail(f"{path}: SHA-256", "what SHA256SUMS states", lines[-1][:64], "fetch this file again")
    return hashlib.sha256("".join(lines).encode()).hexdigest()

# ==== 13. Afterwards: save, load, evaluate, sample ====================================================================
def save_model(path: Path, trainer: Trainer, loss: float, seed: int) -> None:
    """One file with plain names: weights, configuration, how to validate, provenance. Written aside, then renamed."""
    preset = trainer.preset
    frequency, scale = rotary_frequencies(preset, len(preset.stages) - 1)
    content = {
        "weights": {name: parameter.detach().cpu() for name, parameter in trainer.model.named_parameters()},
        "model": json.dumps(dataclasses.asdict(preset.model)),
        "attention": {"frequency": frequency.tolist(), "scale": scale, "windows": preset.val_windows_tokens},
        "validation": {"data": preset.data, "tokens": preset.val_tokens, "window": preset.val_window_tokens},
        "provenance": dict(val_loss=loss, seed=seed, preset=preset.name, script=files_hash([Path(__file__)]), **machine_facts(trainer.ranks.device))}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch's zip writer raises the latter when the disk is full
        aside.unlink(missing_ok=True)
        fail(f"saving {path}", "a writable folder with space", error, "choose another place for --save")

def settings_fit(config: ModelConfig, attention: dict[str, Any], validation: dict[str, Any]) -> bool:
    """Whether a model file's settings can be used, as far as the shapes of its weights do not prove it."""
    counts = *attention["windows"], validation["tokens"], validation["window"], config.pointer_window_tokens, config.vocabulary
    numbers = attention["scale"], *attention["frequency"], *config.softcap, config.pointer_scale
    used, values = [slot for slot, layer in enumerate(config.layers) if layer.attention or layer.mlp], (None, NGRAMS, *range(config.value_embeddings))
    return (len(counts) == 6 and all(type(n) is int and n > 0 for n in counts) and config.vocabulary < config.padded_vocabulary
            and len(numbers) == 5 + config.key_width // 4 and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
            and all(layer.skip_from in (None, *(s for s in used if s < slot)) and layer.value_embedding in values
                    for slot, layer in enumerate(config.layers)) and isinstance(validation["data"], str))

def load_model(path: Path, device: torch.device) -> tuple[GPT, dict[str, Any]]:
    """A saved model with reference operators (so it runs on any device) and the rest of the file. Only tensors and plain data are read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__}")
        weights, config, *settings = (content[key] for key in ("weights", "model", "attention", "validation"))
        stated = json.loads(config)
        # Before anything is allocated: a view of one element can claim any size.
        if sum(weight.nbytes for weight in weights.values()) > path.stat().st_size or stated["value_embeddings"] > len(weights):
            raise ValueError("weights larger than the file")
        config = ModelConfig(**{**stated, "layers": tuple(Layer(**layer) for layer in stated["layers"]), "softcap": Softcap(*stated["softcap"])})
        if json.loads(json.dumps(dataclasses.asdict(config))) != stated or not settings_fit(config, *settings):
            raise ValueError("settings missing or out of range")
        if device.type == "cpu":  # bfloat16 matrix products are slow there
            config = dataclasses.replace(config, dtype="float32")
        for place in (torch.device("meta"), device):  # first the shapes alone
            model = GPT(config, select_ops(device, fast=False), place)
            model.load_state_dict(weights, strict=True, assign=place != device)
    except (OSError, LookupError, TypeError, AttributeError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
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
        geometry = saved_geometry(content, model, max(map(len, pieces)))
        total += float(model.evaluate(pack({0: pieces}, config, pin=False).to(device), geometry))
    return total / validation["tokens"]

def sample_text(path: Path, prompt: str, device: torch.device, tokens: int = 64, temperature: float = 0.8, seed: int = 0) -> str:
    """Continue `prompt` token by token; each step runs the whole prefix, which is fine for a paragraph."""
    try:
        import tiktoken
        encoding = tiktoken.get_encoding("gpt2")
    except ImportError:
        fail("tiktoken", "an installed package", "none", "pip install tiktoken")
    except OSError as error:
        fail("tiktoken's gpt2 vocabulary", "a download or a copy in TIKTOKEN_CACHE_DIR", type(error).__name__, "connect to the network once")
    model, content = load_model(path, device)
    ids = [BOS, *encoding.encode_ordinary(prompt)]
    geometry = saved_geometry(content, model, len(ids) + tokens)
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(tokens):
        batch = pack({0: [np.array([*ids, BOS], dtype=np.uint16)]}, model.config, pin=False).to(device)
        probabilities = model.next_token(batch, geometry)[:model.config.vocabulary] ** (1 / temperature)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        if ids[-1] == BOS:
            break
    return encoding.decode(ids[1:])

# ==== 14. Main ========================================================================================================
def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def span(text: str) -> tuple[int, int]:
        first, _, last = text.partition(":")
        return int(first), int(last or first)

    def within(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
        def number(text: str) -> Any:
            if not least <= (value := kind(text)) <= most:
                raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, found {text}")
            return value
        return number

    parser = argparse.ArgumentParser(description="Train a small GPT as fast as the machine allows.", allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, default="speedrun")
    parser.add_argument("--data", type=Path, help="folder with *_train_*.bin and *_val_*.bin (default: the preset's)")
    parser.add_argument("--seed", type=within(int, 0, 2**62), help="fixes the initial weights; drawn and logged without it")
    parser.add_argument("--runs", type=within(int, 1), default=1, help="train this many times, seeds counting up, one log each")
    parser.add_argument("--val-every", type=within(int, 1), metavar="N", help="validate every N steps too, off the clock")
    parser.add_argument("--profile", type=span, metavar="A:B", help="write a Chrome trace of steps A to B; no record")
    parser.add_argument("--stop-after", type=within(int, 1), metavar="N", help="end after N steps of the schedule; no record")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel of every step instead of replaying CUDA graphs")
    parser.add_argument("--no-fp8", nargs="?", choices=(*FP8_PARTS, "all"), const="all", help="bfloat16 QKV projections, head, MLPs, or all")
    parser.add_argument("--reference", action="store_true", help="plain PyTorch operators: what a machine without Triton uses")
    parser.add_argument("--orthogonalize", choices=RECIPES, help="how Muon orthogonalises (default: the preset's)")
    parser.add_argument("--muon", action="store_true", help="plain Muon: no variance normalisation")
    parser.add_argument("--stall-limit", type=within(float, 0.1), default=120, metavar="SECONDS", help="exit code 4 if nothing progresses so long")
    parser.add_argument("--check", action="store_true", help="what a start would check, one line an item, then exit")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained model of the last run")
    parser.add_argument("--eval", type=Path, metavar="FILE", help="validation loss of a saved model, then exit")
    parser.add_argument("--sample", nargs=2, metavar=("FILE", "TEXT"), help="continue a text with a saved model, then exit")
    return parser.parse_args(argv)

def chosen_preset(arguments: argparse.Namespace) -> Preset:
    preset = PRESETS[arguments.preset]
    optimizer = dataclasses.replace(preset.optimizer, orthogonalization=arguments.orthogonalize or preset.optimizer.orthogonalization,
                                    second_moment_decay=None if arguments.muon else preset.optimizer.second_moment_decay)
    return dataclasses.replace(preset, optimizer=optimizer)

def check_versions() -> str:
    if not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        fail("torch", ">= 2.11, < 2.14", torch.__version__, "pip install -r requirements.txt")
    return f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}, Triton {triton.__version__ if triton else 'none'}"

def check_folder(folder: Path, needed_mb: int) -> str:
    """Fails unless that much can be written to a folder, or to where it would be made."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_mb = shutil.disk_usage(there).free // 1_000_000
    if not (there.is_dir() and os.access(there, os.W_OK)) or free_mb < needed_mb:
        fail(f"saving in {folder}", f"a writable folder with {needed_mb} MB free", f"{there} with {free_mb:,} MB", "choose another place")
    return f"{free_mb:,} MB free for {folder}"

def check_model_file(path: Path, model: ModelConfig) -> str:
    if path.is_dir():
        fail(f"saving {path}", "the name of a file", "a folder", "add a name")
    return check_folder(path.parent, 1000 + model.table_rows * model.width // 500_000)

def preflight(arguments: argparse.Namespace, preset: Preset, ranks: Ranks, ops: Ops) -> int:
    """What a start checks, a line an item; returns the exit code of the first that fails."""
    def memory() -> str:
        recompute, tokens, needed = memory_plan(preset, ranks, ops)
        return (f"{needed / 2**30:.1f} of {torch.cuda.mem_get_info(ranks.device)[0] / 2**30:.1f} GiB that are free, micro-batches of up to "
                f"{tokens:,} tokens" + ", layers recomputed" * recompute) if needed else "no GPU whose memory to fit"

    def data() -> str:
        stream, *_, digest = open_corpus(preset, arguments.data or Path(preset.data))
        return f"{stream.consumed(preset.stages):,} of {stream.length:,} training tokens in {len(stream.paths)} shards, SHA-256 {digest[:16]}"

    checks = {"versions": check_versions, "memory": memory, "data": data, "log": lambda: check_folder(arguments.log_dir, 10),
              "model": lambda: check_model_file(arguments.save, preset.model) if arguments.save else "not kept"}
    code = 0
    for name, check in checks.items():
        try:
            line = f"ok    {name:<9}  {check()}"
        except Exception as error:
            if (failure := explained(error, ranks)) is None:
                raise
            line, code = f"FAIL  {name:<9}  {failure}", code or failure.code
        if ranks.rank == 0:
            print(line, flush=True)
    return code

def train_all(arguments: argparse.Namespace, ranks: Ranks, clock: Clock) -> int:
    preset = chosen_preset(arguments)
    seed = ranks.gather_objects(secrets.randbelow(2**31) if arguments.seed is None else arguments.seed)[0]
    fast = not arguments.reference and capability(ranks.device) >= (8, 0)
    ops = select_ops(ranks.device, fast, compile=not arguments.eager, graphs=not arguments.no_graphs,
                     fp8=[part for part in FP8_PARTS if arguments.no_fp8 not in (part, "all") and preset.model.dtype == "bfloat16"])
    steps = min(preset.steps, arguments.stop_after or preset.steps)
    if arguments.profile and not 0 <= arguments.profile[0] <= arguments.profile[1] < steps:
        fail("--profile A:B", f"0 <= A <= B <= {steps - 1}", "{}:{}".format(*arguments.profile), "name steps that the run has")
    if main_rank := ranks.rank == 0:
        chosen, (major, minor) = ", ".join(f"{name}: {choice}" for name, choice in ops.names.items()), capability(ranks.device)
        device = machine_facts(ranks.device)["device"] + (f", capability {major}.{minor}" if major else ", no GPU")
        print(f"{preset.status}\n{ranks.world} rank(s){' that share memory' * bool(ranks.copy_stream)}, {device}, {chosen}", flush=True)
    if arguments.check:
        return preflight(arguments, preset, ranks, ops)
    check_versions()
    if arguments.save:
        check_model_file(arguments.save, preset.model)
    trainer = Trainer(preset, ranks, ops, clock, arguments.data or Path(preset.data))
    defaults = parse_arguments([])
    settings = {key: str(value) for key, value in vars(arguments).items() if value != getattr(defaults, key)}
    for run in range(arguments.runs):
        name = f"{preset.name}-w{ranks.world}-s{seed + run}-{secrets.token_hex(3)}"
        options = RunOptions(steps, not arguments.profile and arguments.stop_after is None, arguments.val_every, arguments.profile,
                             arguments.log_dir / f"{name}-rank{ranks.rank}.trace.json")
        log = RunLog(arguments.log_dir / f"{name}.jsonl" if main_rank else None, quiet=not main_rank)
        watchdog = Watchdog(ranks, arguments.stall_limit, lambda text: (log.line("end", state=f"failed: {text}", code=EXIT_HARDWARE), log.close()))
        try:
            loss = train(trainer, seed + run, log, options, settings)
        except BaseException as error:
            cause = explained(error, ranks) or error
            log.line("end", state="interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {cause}", code=getattr(cause, "code", None))
            raise
        finally:
            watchdog.done.set()
            log.close()
    if arguments.save and main_rank:
        save_model(arguments.save, trainer, loss, seed + arguments.runs - 1)
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
        if (failure := explained(error, ranks)) is None:
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
