"""Train a GPT-2-small-class language model as fast as the machine allows, in one file.

    speedrun-webmix: validation loss 3.0890 in 134.5 s on one H200 (record drifting, n = 5, torch 2.11, Triton 3.6);
    public record 92 needs 181.6 s for 3.0924 there (n = 1).

Launch
    ./run.sh                                                the preset this machine can run, with what it has
    torchrun --standalone --nproc_per_node=8 train_gpt.py   one node; 4, 2 or 1 GPU accumulate, on the same tokens
    python train_gpt.py --preset smoke                      any computer, no network: a minute or two on two CPU cores
    python train_gpt.py --help                              all options; sample.py does what comes after a training

Model card: GPT-2-small class, 768 wide, GPT-2's 50,257 tokens
    input   x0 = norm(embedding[token]);  g = the rows of a table for the last two, three and four tokens, and for
            what followed the longest earlier match in the document, added up
    layer   x   <- r (x + mlp + σ(s) skip + a x0 + b g)         r, s, a, b are scalars, skip is an earlier layer's x
            x   <- x + |c| gate attention(norm(x)) W_out        q and k normed, half of them rotary; v += gate value
            mlp <- relu(taps(norm(x)) W_up)^2 W_down            taps mix in the two tokens before, by channel
    output  h = norm(x + mlp + w0 x0 + w1 g + ...)              w: linear in norm(x); in the speedrun all values follow
            p = softmax(23 σ((h W_head + 5) / 7.5)), where the share of one class goes where a pointer points
    sizes   speedrun: ten working layers, 6 heads (keys 64, values 128), MLPs of 2048; sprint: seven, 3 heads, MLPs of
            2304, no rows for four tokens; 2^25 rows each
    train   matrices by Muon, NorMuon and EMA-Nesterov, bf16 with 16 more bits; tables and scalars by Adam, rows by Adam
            without a first moment; steps of 32,768 to 294,912 tokens; sampled classes; FP8 products; averaged weights
    names   DistAdam is Adam with AdamTable; smear is taps; bigram hash is ngram; sparse attention gate is gate;
            backout and MUDD are final_states; YaRN is in rotary_frequencies; value embeddings keep their name

Map
    1 imports, constants     2 configuration, schedule     3 data           4 model        5 optimizer
    6 training               7 Triton kernels              8 operator selection            9 runtime
   10 main

Comments call the N-th public record of modded-nanogpt "record N".
"""


# ==== 1. Imports, constants ===========================================================================================
from __future__ import annotations

import argparse
import bisect
import collections
import contextlib
import functools
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import queue
import secrets
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TextIO

STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # a closed terminal, Ctrl-C, and Slurm or docker stop


def handle_stop_signals(handler: Callable | signal.Handlers) -> dict:
    """Set the handler of every stop signal, but leave alone those that are ignored already, as nohup does with SIGHUP.
    Returns the handlers before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, earlier in before.items():
        if earlier != signal.SIG_IGN:
            signal.signal(number, handler)
    return before


def end_at_once(number: int, _):
    """Handle a stop signal where there is nothing to put in order."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, b"train_gpt: interrupted\n")  # sys.stderr may be None
    os._exit(128 + number)


if __name__ == "__main__":  # the imports below take seconds
    handle_stop_signals(end_at_once)

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:  # in another Python than run.sh uses, the first that a newcomer would see
    if __name__ != "__main__":
        raise
    print(f"train_gpt: {error.name}: expected it installed, found none; fix: ./run.sh, which installs what is missing, "
          "or pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.distributed.nn  # torch would import it later, and then it would keep the process group: see Ranks.finish
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
    from triton.tools.tensor_descriptor import TensorDescriptor
    jit = triton.jit
except ImportError:  # the reference operators need no Triton
    triton = tl = None
    def jit(function):
        return function
    def constexpr(value):
        return value

# The header of llm.c's token files, see data/README.md.
SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 1024

BOS = 50256  # <|endoftext|>: opens every document
CHUNKS = 8  # batch chunks of a step, whatever the number of ranks, so that every world size sees the same tokens
NGRAMS = -1  # a layer's value embedding: no table of its own, but the embedding of the last few tokens
SUFFIX_LENGTHS = 3  # longest_suffix_match looks for suffixes of up to so many tokens
NEW_TOKEN_ROWS = 32  # rows that longest_suffix_match shares out among tokens without a match
# The orders of n-grams that hash_ngrams can look up, one row an order: pairs, triples and quadruples. A further row and
# a higher ModelConfig.ngram_orders are all that another order takes; ngram_rows are then shared by more of them. A row
# holds the multipliers of the token itself, of the one before it, and so on: different odd numbers below 2^16, as
# tokens are below 2^16 too, so that products fit into uint32. Which ones matters little. Models whose orders were saved
# with others are refused.
NGRAM_MULTIPLIERS = (
    (36313, 27191),
    (17351, 60961, 45259),
    (40503, 30011, 52711, 61979),
)
NORM_EPSILON = 1e-6  # added to a mean square
E4M3 = torch.float8_e4m3fn  # FP8 for weights and activations
E5M2 = torch.float8_e5m2  # FP8 for gradients: more range, less precision
E4M3_MAX = 448.0  # the largest number of each format
E5M2_MAX = 57_344.0
NEG_INF = -1e4  # as a logarithm: exp gives 0, and differences stay finite

LENGTHS = 0.001, 100  # what --length may be

EXIT_BUG, EXIT_USAGE, EXIT_NUMERICS, EXIT_HARDWARE = 1, 2, 3, 4
WARM_UP_PATIENCE = 5.0  # times the stall limit may pass between heartbeats where the host compiles or saves
STOP_LIMIT_S = 4.5  # within which ranks agree to stop: docker kills ten seconds after its signal, Slurm after thirty


class MlpScales(NamedTuple):
    """Static FP8 scales of the MLP and the QKV projection: value = fp8 * scale.

    The ranges: RMS-normed inputs reach sqrt(768) = 27.7 of 28, and those with taps may pass that;
    weights 7; hidden values relu² 1792 and no less than 2^-8, i.e. pre-activations of 42 and 0.06;
    gradients, in e5m2, 56 and 2^-27.
    """
    x: float = 2.0 ** -4
    weight: float = 2.0 ** -6
    hidden: float = 2.0 ** 2
    grad: float = 2.0 ** -10


class HeadScales(NamedTuple):
    """Static FP8 scales of the head: value = fp8 * scale.

    The default ranges: RMS-normed x reaches 28 (100 leaves room), weights stay under 3.2, and
    entries of the gradient of a summed loss under 1.75 * softcap / (4 * temperature) = 1.34; e5m2
    reaches 96.
    """
    x: float = 100 / E4M3_MAX
    weight: float = 3.2 / E4M3_MAX
    grad: float = 96 / E5M2_MAX


# The parts of the model whose matrix products can be FP8. Each maps the endings of its weights' names to the largest
# magnitude that their scale can hold.
FP8_PARTS = {
    "attention": {"qkv": E4M3_MAX * MlpScales().weight},
    "head": {"lm_head": E4M3_MAX * HeadScales().weight},
    "mlp": {"up": E4M3_MAX * MlpScales().weight, "down": E4M3_MAX * MlpScales().weight},
}


# ==== 2. Configuration, schedule ======================================================================================
@dataclass(frozen=True)
class Layer:
    """One layer of the network. The table of layers is the only place that knows which layer does what."""
    attention: bool = True
    mlp: bool = True
    window: str = "short"  # which of the stage's two windows its attention uses
    key_offset: bool = False  # K takes its stationary dims from the token before: induction in one layer (record 49)
    value_embedding: int | None = None  # the value-embedding table added to V, or NGRAMS
    skip_from: int | None = None  # U-Net: the index of an earlier layer whose output enters through a sigmoid gate
    attention_from: int | None = None  # of an earlier layer whose output its attention reads, not the present stream


class Softcap(NamedTuple):
    """z = softcap · σ((logit + shift) / temperature): bounded by (0, softcap), so softmax needs no running maximum."""
    softcap: float = 23.0
    shift: float = 5.0  # record 54
    temperature: float = 7.5


@dataclass(frozen=True)
class ModelConfig:
    width: int
    heads: int
    mlp_width: int
    layers: tuple[Layer, ...]
    value_embeddings: int
    # Rows of the table of hashed n-grams, whose embedding is added in every layer (records 62, 92). Each order that is
    # looked up has an equal part of them. 0: no hashed n-grams.
    ngram_rows: int
    ngram_orders: int = 2  # the first so many of NGRAM_MULTIPLIERS are looked up: pairs and triples; 3: quadruples too
    # Each row is cut into so many pieces, 1 to 4 (see HASH_MULTIPLIERS), and an n-gram takes each of its pieces from
    # another row: two n-grams that share one piece rarely share the others. The table's parameter has one row for each
    # piece.
    ngram_pieces: int = 1
    key_width: int = 128  # of a head's queries and keys
    head_width: int = 128  # of its values
    # The factor of products of normalised queries and keys, before YaRN. Narrower keys want a larger one.
    attention_scale: float = 0.1
    mlp_taps: bool = False  # whether the two tokens before are mixed into an MLP's input, see `mixed`
    # Whether value embeddings enter the final states too, see final_states; one that no layer reads does so alone.
    final_values: bool = False
    longest_suffix_match: bool = True  # also adds a row for what last followed the same tokens, see the function
    pointer_width: int = 128  # of the pointer's queries and keys, see pointer_reference; 0: no pointer
    pointer_scale: float = 0.1  # the factor of products of its normalised queries and keys
    # Channels that a gate reads, half of them of the value embedding if there is one (record 70).
    gate_inputs: int = 16
    vocabulary: int = 50257
    padded_vocabulary: int = 50304  # a multiple of 128: faster tiles, and divisible by 8 ranks
    softcap: Softcap = Softcap()
    pointer_window_tokens: int = 4096  # how far back it may point
    rotary_base: float = 1024.0  # as the public records
    dtype: str = "bfloat16"  # of weights and activations; scalars and gates are float32 always

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width

    @property
    def table_rows(self) -> int:
        """Whole rows of the n-gram table: hashed ones, then those of `longest_suffix_match`. 0: there is no table."""
        return self.ngram_rows + self.longest_suffix_match * (SUFFIX_LENGTHS * self.padded_vocabulary + NEW_TOKEN_ROWS)

    def lookup_shape(self, tokens: int) -> tuple[int, int]:
        """Of the rows that so many tokens read, see ngram_lookups."""
        return tokens * self.ngram_pieces, self.ngram_orders * bool(self.ngram_rows) + self.longest_suffix_match


# Each parameter declares a role, and each role has one rule: so the optimizer knows what to do with it.
@dataclass(frozen=True)
class MuonRule:
    """Hidden matrices, orthogonalised one by one; the parameter says which shape they have."""
    learning_rate_multiplier: float


@dataclass(frozen=True)
class AdamRule:
    learning_rate_multiplier: float
    betas: tuple[float, float]
    decay: float = 0.0  # share of a weight, times the square of the learning rate
    sharded: bool = False  # large tables: each rank updates a slice of the rows
    looked_up: bool = False  # sharded ones whose gradients all come from lookups: only rows that were read have one
    sparse: bool = False  # larger ones: only the rows that a step has read are updated; no first moment


@dataclass(frozen=True)
class OptimizerConfig:
    """What each constant was chosen from stands in records/LOG.md, and docs/systems.md compares the first six."""
    # How momentum becomes an update of a matrix: a key of ORTHOGONALIZATIONS, then NorMuon, or plain Muon without it.
    orthogonalization: str = "polar-express"
    nesterov: bool = True  # orthogonalise the momentum with the gradient once more, or the momentum itself
    normuon: bool = True
    # NorMuon keeps a variance for each row of a tall matrix and each column of a wide one, so along the long side;
    # False: the other way round.
    normuon_long_side: bool = True
    scale_tall_updates: bool = False  # Muon's first rule: times max(1, rows / columns)^0.5
    # Decay a weight only where its update shrinks it too (records 43, 50), or, in a matrix, leaves it as it is; False:
    # always, as AdamW. Of matrices and tables alike.
    cautious_decay: bool = True

    muon_learning_rate: float = 0.023
    muon_weight_decay: float = 2.4  # times rate^2 and the role's multiplier, so it fades early (record 43)
    # Momentum warms up from the first value to the second (record 9) and cools down at the end (record 39).
    muon_momentum: tuple[float, float] = (0.85, 0.93)
    momentum_warmup_fraction: float = 0.42  # of all steps
    momentum_cooldown_fraction: float = 0.07
    second_moment_decay: float = 0.95  # of NorMuon

    # EMA-Nesterov (arXiv 2605.25395): a matrix also moves so many times its drift, the running mean of its steps. 0: it
    # does not, and keeps none.
    drift_factor: float = 0.0
    drift_decay: float = 0.98
    drift_start_fraction: float = 0.12  # of all steps; these apply no drift
    drift_cooldown_fraction: float = 0.24  # of all steps; in these the factor falls to 0

    adam_learning_rate: float = 0.008  # as the public records; rules multiply it
    adam_epsilon: float = 1e-10  # record 20
    # An n-gram row's second moment is mixed with so much of the mean over the tokens of the step, so that rows of small
    # gradients move less.
    ngram_pooling: float = 0.5

    cooldown_fraction: float = 0.7  # of the scheduled steps
    final_learning_rate: float = 0.25  # multiplier after the cooldown, relative to the base rate, not the stage's

    # A running average of matrices and dense tables over the last steps (record 92); it wants the high final rate.
    averaging_fraction: float = 0.25  # of all steps
    averaging_interval_steps: int = 4
    averaging_lookback: float = 0.074  # the share of all steps that it looks back over: interval / rate steps
    averaged_share: float = 0.65  # of the final weights; 0: no averages are kept

    # Multipliers and betas by role. The multiplier of gates, and the first betas of scalars and gates, are record 52's,
    # the first betas of tables the public records'; n-grams have no first moment (record 92).
    rules: tuple[tuple[str, MuonRule | AdamRule], ...] = (
        ("attention", MuonRule(2.0)),
        ("pointer", MuonRule(2.0)),
        ("mlp_up", MuonRule(2.0)),
        ("mlp_down", MuonRule(4.0)),
        ("embedding", AdamRule(75.0, (0.65, 0.98), sharded=True, looked_up=True)),
        ("value_embedding", AdamRule(75.0, (0.75, 0.98), decay=0.025, sharded=True, looked_up=True)),
        ("ngram", AdamRule(30.0, (0.0, 0.95), sparse=True)),
        ("lm_head", AdamRule(1.0, (0.5, 0.98), decay=0.75, sharded=True)),
        ("scalar", AdamRule(10.0, (0.9, 0.9))),
        ("gate", AdamRule(1.0, (0.9, 0.9))))


@dataclass(frozen=True)
class Stage:
    """A stretch of the schedule with constant shapes."""
    steps: int
    batch_tokens: int
    document_cap_tokens: int
    short_window_tokens: int
    long_window_tokens: int
    learning_rate_multiplier: float = 1.0
    # Weights of the next, second next, ... token as targets, at the first and after the last step (record 53).
    targets: tuple[tuple[float, ...], tuple[float, ...]] = ((1.0,), (1.0,))
    sampled_classes: int | None = None  # of the softmax, for each batch chunk, its targets included; None: all classes
    extension: bool = False  # after the scheduled steps, at the final learning rate

    @property
    def chunk_tokens(self) -> int:
        return self.batch_tokens // CHUNKS

    @property
    def tokens(self) -> int:
        return self.steps * self.batch_tokens


@dataclass(frozen=True)
class Preset:
    name: str
    model: ModelConfig
    stages: tuple[Stage, ...]
    optimizer: OptimizerConfig = OptimizerConfig()
    data: str = "data/fineweb10B"  # folder with *_train_*.bin and *_val_*.bin
    _: KW_ONLY
    train_tokens: int  # shards are opened in order until they hold this many, and all that the schedule takes
    val_tokens: int
    val_window_tokens: int = 131_072  # contiguous tokens a forward pass of the validation sees
    val_attention_windows: tuple[int, int] = (384, 2560)  # (short, long) attention windows of the final validation
    fp8: tuple[str, ...] = tuple(FP8_PARTS)  # whose products are FP8 where the GPU can; weights in bfloat16 only
    status: str  # one line said at the start
    log_every_steps: int = 25

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def fp8_unit(self) -> int:
        """The sides of FP8 products are multiples of it."""
        return 16 if self.fp8 else 1


EMPTY = Layer(attention=False, mlp=False)
MLP_ONLY = Layer(attention=False)

# Layer 0 is empty, because the public records removed its MLP (record 30) and its attention (record 35); it stays here
# so that layers have the same numbers as there. Layer 10 is empty, because other layers gave more for its time
# (records/LOG.md).
LAYERS = (
    EMPTY,  # 0
    Layer(value_embedding=3),  # 1
    Layer(value_embedding=0),  # 2
    MLP_ONLY,  # 3
    Layer(value_embedding=NGRAMS, window="long", key_offset=True),  # 4
    Layer(),  # 5
    Layer(value_embedding=NGRAMS),  # 6
    Layer(attention=False, skip_from=4),  # 7
    MLP_ONLY,  # 8
    Layer(value_embedding=1, attention_from=7),  # 9
    EMPTY,  # 10
    Layer(value_embedding=2, window="long", key_offset=True, attention_from=7))  # 11

# For one pass over 243 M tokens and more (records/LOG.md). No layer reads the last value embedding, see final_values. A
# table of 2^25 rows takes 48 GiB.
GPT_SMALL = ModelConfig(
    width=768, heads=6, key_width=64, attention_scale=0.16, mlp_width=2048, layers=LAYERS, value_embeddings=5,
    ngram_rows=2**25, ngram_orders=3, ngram_pieces=4, mlp_taps=True, final_values=True)

# One pass over 94 M tokens wants less: half the heads, fewer tables, layers 3, 5 and 8 empty, but wider MLPs. Layer 1
# has no attention, which saves the time that 2^25 rows of n-grams cost. A card of 40 GB holds 2^24 rows in four pieces,
# with the same loss in 1 % more time.
GPT_SPRINT = replace(
    GPT_SMALL, heads=3, mlp_width=2304, value_embeddings=3, ngram_orders=2, ngram_pieces=1, final_values=False,
    layers=(
        EMPTY, MLP_ONLY, LAYERS[2], EMPTY, LAYERS[4], EMPTY, *LAYERS[6:8], EMPTY,
        replace(LAYERS[9], attention_from=None), EMPTY, replace(LAYERS[11], attention_from=None)))

# Where tokens are free, a narrow model reaches a loss first, with more of them (records/LOG.md).
GPT_NARROW = replace(
    GPT_SMALL, width=512, heads=3, value_embeddings=3, ngram_pieces=1,
    layers=(EMPTY, MLP_ONLY, LAYERS[2], EMPTY, LAYERS[4], EMPTY, *LAYERS[6:]))

# The U-Net of the public records up to 2025: the second half of the layers takes what the first half had, in the
# opposite order, and the last three layers share the value embeddings of the first three.
UNET_LAYERS = (
    Layer(value_embedding=0, window="long"),  # 0
    Layer(value_embedding=1),  # 1
    Layer(value_embedding=2),  # 2
    Layer(),  # 3
    Layer(window="long"),  # 4
    Layer(),  # 5
    Layer(skip_from=5),  # 6
    Layer(attention=False, skip_from=4),  # 7
    Layer(skip_from=3),  # 8
    Layer(skip_from=2, value_embedding=0),  # 9
    Layer(skip_from=1, value_embedding=1),  # 10
    Layer(skip_from=0, value_embedding=2, window="long"))  # 11

GPT_UNET = ModelConfig(
    width=768, heads=6, mlp_width=3072, layers=UNET_LAYERS, value_embeddings=3, ngram_rows=0,
    longest_suffix_match=False, pointer_width=0)

GPT_TINY = ModelConfig(
    width=128, heads=2, key_width=64, head_width=64, mlp_width=512, pointer_width=64, value_embeddings=3,
    ngram_rows=2**14, final_values=True, dtype="float32",
    layers=(
        Layer(value_embedding=0),
        Layer(value_embedding=1, window="long", key_offset=True),
        Layer(attention=False, skip_from=1), Layer(value_embedding=NGRAMS), Layer(value_embedding=NGRAMS),
        Layer(value_embedding=2, window="long", key_offset=True, attention_from=2)))


def three_stages(first_steps: int, second_steps: int, third_steps: int, extension_steps: int,
                 classes: Sequence[int | None] = (6144, 10_240, 10_240, None),
                 third_batch: tuple[int, float] = (196_608, 1.45)) -> tuple[Stage, ...]:
    """Batches, windows and learning rates grow by stage (record 46), while the second and third next token fade as
    targets (record 53). The extension follows (record 35). `classes` are those of each stage's sampled softmax, and
    `third_batch` the tokens of a step and the learning rate from the third stage on."""
    # In this order: steps, tokens of a batch, cap of a document, short window, long window, learning rate, targets.
    first = Stage(first_steps, 65_536, 3072, 128, 384, 0.75, ((1.0, 0.5, 0.25), (1.0, 0.3, 0.0)))
    second = Stage(second_steps, 131_072, 3072, 256, 896, 1.13, ((1.0, 0.3), (1.0, 0.0)))
    third_tokens, third_rate = third_batch
    third = Stage(third_steps, third_tokens, 3072, 256, 1408, third_rate)
    extension = replace(
        third, steps=extension_steps, short_window_tokens=384, long_window_tokens=1664, extension=True)
    stages = first, second, third, extension
    return tuple(replace(stage, sampled_classes=count) for stage, count in zip(stages, classes, strict=True))


def sprint_stages(third_classes: int) -> tuple[Stage, ...]:
    """The three stages, where the first third of the first one's tokens comes in batches half as large.

    That gains at this length (records/LOG.md) for half a percent more time on one GPU. On eight GPUs, whose small steps
    wait for each other, it would be a bad exchange."""
    first, *others = three_stages(224, 224, 215, 10, (6144, 10_240, third_classes, third_classes))
    small = replace(first, steps=148, batch_tokens=32_768, learning_rate_multiplier=0.55,
                    targets=(first.targets[0], (1.0, 13 / 30, 1 / 6)))
    return small, replace(first, steps=150, targets=(small.targets[1], first.targets[1])), *others


# Half as many tokens again in a step of the third stage: that pays at the speedrun's length (record late-batches), but
# not in the sprint. The average of the weights then has less noise to remove, and counts for less.
LATE_BATCH = 294_912, 1.85
SPEEDRUN_OPTIMIZER = OptimizerConfig(cooldown_fraction=0.9, averaged_share=0.5, drift_factor=0.3)

PRESETS = {preset.name: preset for preset in (
    Preset(
        "speedrun", GPT_SMALL, three_stages(990, 990, 660, 28, third_batch=LATE_BATCH), SPEEDRUN_OPTIMIZER,
        train_tokens=500_000_000,  # a shard more than the schedule needs, whose length is an estimate
        val_tokens=10_485_760, status="speedrun: not yet run on FineWeb"),
    # Nearly one pass over 243 M tokens, where FineWeb is not to be had.
    Preset(
        "speedrun-webmix", GPT_SMALL, three_stages(590, 590, 377, 17, third_batch=LATE_BATCH), SPEEDRUN_OPTIMIZER,
        data="data/webmix",
        train_tokens=243_000_000, val_tokens=4_194_304, status="speedrun-webmix: at most one pass over 24 shards"),
    Preset(
        "speedrun-webmix-free", GPT_NARROW, three_stages(469, 469, 300, 12, third_batch=LATE_BATCH), SPEEDRUN_OPTIMIZER,
        data="data/webmix",
        train_tokens=243_000_000, val_tokens=4_194_304,
        status="speedrun-webmix-free: for 3.2257, record 92's loss after 138 M tokens"),
    Preset(
        "sprint", GPT_SPRINT, sprint_stages(10_240), OptimizerConfig(drift_factor=0.3),
        train_tokens=94_000_000, val_tokens=2_097_152, status="sprint: at most one pass over one shard"),
    Preset(
        "smoke", GPT_TINY,
        (Stage(30, 512, 256, 64, 128, targets=((1.0, 0.5, 0.25), (1.0, 0.5, 0.0)), sampled_classes=4096),
         Stage(27, 1024, 256, 128, 256, sampled_classes=8192),
         Stage(3, 1024, 256, 128, 256, extension=True)),
        OptimizerConfig(cooldown_fraction=0.55, averaging_interval_steps=1), "data/sample",
        train_tokens=10_000_000, val_tokens=8192, val_window_tokens=2048,
        val_attention_windows=(128, 512), log_every_steps=10,
        status="smoke: practice on a small public-domain sample, never on a leaderboard"),
    Preset(
        "smoke-gpu", replace(GPT_SMALL, ngram_rows=2**20),
        (Stage(10, 65_536, 1024, 128, 384), Stage(10, 65_536, 1024, 384, 896)),
        data="data/sample", train_tokens=10_000_000, val_tokens=65_536, val_window_tokens=65_536,
        val_attention_windows=(384, 1408), log_every_steps=5,
        status="smoke-gpu: 20 steps at full width, never on a leaderboard"),
)}
# The sprint for 12 GB of memory: rows take 1.5 kB each, and a window of the validation 39 kB a token. It has a
# sixteenth of the rows, but keeps what the sprint gives up for them: the attention of layer 1, the MLP of layer 5, and
# more classes in the third stage.
PRESETS["sprint-small"] = replace(
    PRESETS["sprint"], name="sprint-small", stages=sprint_stages(14_336), val_window_tokens=65_536,
    model=replace(
        GPT_SPRINT, ngram_rows=2**21,
        layers=(EMPTY, Layer(), LAYERS[2], EMPTY, LAYERS[4], MLP_ONLY, *GPT_SPRINT.layers[6:])),
    status="sprint-small: the sprint with a sixteenth of its n-gram rows, run on no small card yet")

# The systems that this project began with, as their authors put them together, on the sprint's data and length:
# docs/systems.md. Nothing is sampled, hashed, copied or averaged, and no product is FP8.
PRESETS["seeds"] = replace(
    PRESETS["sprint"], name="seeds", model=GPT_UNET, fp8=(),
    stages=tuple(replace(stage, sampled_classes=None, targets=((1.0,), (1.0,))) for stage in sprint_stages(10_240)),
    optimizer=OptimizerConfig(orthogonalization="turbo", averaged_share=0.0),
    status="seeds: U-Net skips, value embeddings, NorMuon, DistAdam and Turbo-Muon alone")


# ---- schedule: its length, and pure functions of the step ------------------------------------------------------------
def scaled_preset(preset: Preset, length: float) -> Preset:
    """`preset` with `length` times the steps: one preset serves a longer or a shorter corpus (--length).

    Every stage and the extension keep their shares of the schedule, rounded, but take at least one step. Training
    tokens grow by what the schedule takes more, so that enough shards are opened.
    """
    used = [stage for stage in preset.stages if stage.steps]  # somebody leaves out those of 0 steps
    stages = tuple(replace(stage, steps=max(1, round(length * stage.steps))) for stage in used)
    more_tokens = sum(new.tokens - old.tokens for new, old in zip(stages, used))
    return replace(preset, stages=stages, train_tokens=preset.train_tokens + more_tokens)


def fitting_length(preset: Preset, tokens: int) -> float:
    """The largest --length, to four decimals, at which the steps of a preset take at most `tokens` training tokens;
    the smallest one if none does (--length auto)."""
    def taken(length):
        stages = scaled_preset(preset, length / 1e4).stages
        return sum(stage.tokens for stage in stages)

    lengths = range(int(1e4 * LENGTHS[0]), int(1e4 * LENGTHS[1]) + 1)
    fitting = bisect.bisect_right(lengths, tokens, key=taken)
    return lengths[max(fitting - 1, 0)] / 1e4


def scheduled_tokens(preset: Preset, steps: int) -> int:
    """How many tokens the first `steps` steps of the schedule train on, on all ranks together."""
    return sum(preset.stages[stage_index(preset, step)].batch_tokens for step in range(steps))


def stage_index(preset: Preset, step: int) -> int:
    """The index of the stage that holds a step (0-based); the number of stages after the last step."""
    return sum(end <= step for end in itertools.accumulate(stage.steps for stage in preset.stages))


def learning_rate(preset: Preset, step: int) -> float:
    """Learning rate relative to the base rate: the stage's multiplier, then a linear cooldown to the final rate, which
    the extension keeps."""
    config = preset.optimizer
    stage = preset.stages[stage_index(preset, step)]

    share = 0.0  # of the stage's multiplier in the mean with the final rate: 1 until the cooldown, then falling to 0
    if not stage.extension:
        scheduled = sum(s.steps for s in preset.stages if not s.extension)
        share = min((1 - step / scheduled) / config.cooldown_fraction, 1.0)
    return stage.learning_rate_multiplier * share + config.final_learning_rate * (1 - share)


def muon_momentum(preset: Preset, step: int) -> float:
    """Low at the start, while gradients turn quickly (record 9), and at the end, while weights are averaged (record
    39)."""
    config = preset.optimizer
    low, high = config.muon_momentum
    warm = step / preset.steps / config.momentum_warmup_fraction
    cool = (1 - step / preset.steps) / config.momentum_cooldown_fraction
    return low + (high - low) * min(warm, cool, 1.0)


def drift_factor(preset: Preset, step: int) -> float:
    """Zero at first, while weights often turn, and again at the end, where steps shrink and weights are averaged."""
    config = preset.optimizer
    passed = step / preset.steps
    if passed < config.drift_start_fraction:
        return 0.0
    return config.drift_factor * min(1.0, (1 - passed) / config.drift_cooldown_fraction)


def step_rates(preset: Preset, step: int) -> dict[str, float]:
    """What an optimizer step reads: its number; Muon's learning rate, momentum and, before and after the step, the
    factor of the drift; and for each role with an AdamRule the step size, bias corrections included, and the share of a
    weight that decays."""
    config = preset.optimizer
    scale = learning_rate(preset, step)
    rates = {"step": step + 1.0, "muon": config.muon_learning_rate * scale, "momentum": muon_momentum(preset, step),
             "drift": drift_factor(preset, step), "next drift": drift_factor(preset, step + 1)}

    for role, rule in config.rules:
        if isinstance(rule, AdamRule):
            beta1, beta2 = rule.betas
            bias_correction = math.sqrt(1 - beta2 ** (step + 1)) / (1 - beta1 ** (step + 1))
            rate = config.adam_learning_rate * rule.learning_rate_multiplier * scale
            rates[role] = rate * bias_correction
            rates[f"{role} decay"] = rate**2 * rule.decay
    return rates


def averaging(preset: Preset, step: int) -> tuple[float, float]:
    """(rate, share) for Optimizer.average after a step.

    The average moves the part `rate` of the way to the weights: 1 starts it, 0 leaves it as it is. Then the weights
    move the part `share` of the way to the average, which is above 0 only after the last step."""
    config = preset.optimizer
    since = step - math.ceil((1 - config.averaging_fraction) * preset.steps)  # steps since averaging began
    if since < 0:
        return 0.0, 0.0

    rate = 0.0
    if since == 0:
        rate = 1.0
    elif since % config.averaging_interval_steps == 0:
        rate = min(1.0, config.averaging_interval_steps / (config.averaging_lookback * preset.steps))
    share = config.averaged_share if step + 1 == preset.steps else 0.0
    return rate, share


def target_weights(preset: Preset, step: int) -> list[float]:
    """Weights of the coming tokens as targets: linear between the two ends of the stage."""
    index = stage_index(preset, step)
    stage = preset.stages[index]
    passed = (step - sum(earlier.steps for earlier in preset.stages[:index])) / stage.steps
    return [start + passed * (end - start) for start, end in zip(*stage.targets)]


# ==== 3. Data =========================================================================================================
# From disk to device: the shards are one TokenStream; stretches of it are the batch chunks; each
# chunk is cut into documents; `pack` makes a HostBatch of some chunks, and `views` makes Documents
# of its copy on the device. A thread does all of it up to HostBatch in NumPy, some batches ahead of
# the training.


@dataclass(frozen=True)
class Documents:
    """A packed batch of T tokens on the device; every tensor is int32."""
    tokens: Tensor  # [T], ids
    order: Tensor  # [T], positions in the batch grouped by id, see sort_ids
    starts: Tensor  # [ids + 1], where each id's group starts in `order`
    # [T * ngram_pieces, K], rows of the n-gram table's parameter for each token and piece: one for each order of
    # n-grams, then the longest suffix match
    ngrams: Tensor
    class_index: Tensor  # see Targets, as `classes` and `num_always`
    positions: Tensor  # [T], how many tokens of its document are before a token
    remaining: Tensor  # [T], how many are after it; the batch may hold only a part of a document, which then counts
    classes: Tensor | None
    num_always: Tensor | None


def open_shard(path: Path, vocabulary: int) -> np.ndarray:
    """Memory-map the tokens (uint16) of a shard, after checking its header, size and content (data/README.md)."""
    status = path.stat()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):  # to read a named pipe would wait for ever
        fail(f"{path}: kind of file", "a regular one", "a folder, a named pipe or a device",
             "remove it, and fetch this file again")
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) < 256:
        fail(f"{path}: header", f"{SHARD_HEADER_BYTES} bytes", f"{size} bytes", "fetch this file again")
    magic, version, count = map(int, header[:3])
    if magic != SHARD_MAGIC:
        fail(f"{path}: magic number", SHARD_MAGIC, magic, "fetch this file again")
    if version != SHARD_VERSION:
        fail(f"{path}: version", SHARD_VERSION, version, "fetch the llm.c version 1 shards")
    expected_size = SHARD_HEADER_BYTES + 2 * max(count, 1)
    if size != expected_size or count < 1:
        fail(f"{path}: size of {count} tokens", f"{expected_size} bytes", f"{size} bytes", "fetch this file again")

    tokens = np.asarray(np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES))
    largest = int(tokens.max())
    if largest >= vocabulary:
        fail(f"{path}: largest token", f"below {vocabulary}", largest,
             "tokenise with the GPT-2 vocabulary, or give the model a larger one")
    if BOS not in tokens:
        fail(f"{path}: documents", f"token {BOS} before each", "none", "tokenise with data/fineweb.py")
    return tokens


def find_shards(folder: Path, kind: str) -> list[Path]:
    """The shards of one kind ("train" or "val") in the order of their names. Fails if there are none."""
    paths = sorted(folder.glob(f"*_{kind}_*.bin"))
    if not paths:
        fail(f"{kind} shards", f"{folder}/*_{kind}_*.bin", "none",
             "python data/fineweb.py fetch (--shards 1 for a sprint), --data FOLDER, or --preset smoke")
    return paths


def tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer's ranks, which `data/fineweb.py tokenize --encoding` leaves beside the shards; None: GPT-2's."""
    return min(folder.glob("*.tiktoken"), default=None)


def check_order(path: Path, before: Path | None):
    """Fail unless a training shard follows the one `before` it or, if it is the first, has the number 0 or 1, of six
    digits.

    With other shards the tokens would not be those that a track fixes. After a name without a number, and if the first
    has none, anything goes."""
    name, _, number = (before or path).stem.rpartition("_")
    if not number.isdecimal():
        return
    following = (0, 1) if before is None else (int(number) + 1,)
    expected = [f"{name}_{each:06d}.bin" for each in following]
    if path.name not in expected:
        fail(f"{'first' if before is None else 'next'} training shard", " or ".join(expected), path,
             "python data/fineweb.py fetch, or one corpus a folder, numbered without a gap")


class TokenStream:
    """The training shards as one stream of tokens, which training reads from its first BOS on.

    offsets: where in the stream each shard begins, and where the last one ends. first: where the
    first BOS is. length: how many tokens the shards hold.
    """

    def __init__(self, folder: Path, tokens_wanted: int, vocabulary: int):
        """Open and check shards in order until they hold `tokens_wanted` tokens from the first BOS on."""
        self.vocabulary = vocabulary
        self.paths = []
        self.offsets = [0]
        self.length = 0
        for path in find_shards(folder, "train"):
            check_order(path, self.paths[-1] if self.paths else None)
            tokens = open_shard(path, vocabulary)
            if not self.paths:
                self.first = int((tokens == BOS).argmax())
            self.paths.append(path)
            self.length += len(tokens)
            self.offsets.append(self.length)
            if self.length - self.first >= tokens_wanted:
                break

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from position `start` on, across the borders of shards."""
        parts = []
        for path, (shard_start, shard_stop) in zip(self.paths, itertools.pairwise(self.offsets)):
            first = max(start, shard_start)
            wanted = min(start + count, shard_stop) - first
            if wanted <= 0:
                continue
            offset = first - shard_start
            # Not through the memory map: a file that was cut since it was checked would kill the process by a signal.
            part = np.fromfile(path, "<u2", wanted, offset=SHARD_HEADER_BYTES + 2 * offset)
            if len(part) != wanted:
                fail(f"{path}: reading at token {offset:,}", f"{wanted:,} tokens as when it was checked", "its end",
                     "fetch this file again")
            if part.max() >= self.vocabulary:  # another file since then
                fail(f"{path}: reading at token {offset:,}", f"tokens below {self.vocabulary} as when it was checked",
                     part.max(), "fetch this file again")
            parts.append(part)
        return np.concatenate(parts)

    def consumed(self, stages: tuple[Stage, ...]) -> int:
        """How many tokens of the stream the stages use up, those before the first BOS included."""
        return self.first + sum(stage.tokens for stage in stages)

    @property
    def usable(self) -> int:
        """How many tokens a training can read: those from the first BOS on, but the last, which is only a target."""
        return self.length - self.first - 1

    def require(self, preset: Preset):
        """Fail if the shards hold too few tokens for the schedule."""
        def missing(schedule):
            return self.consumed(schedule.stages) + 1 - self.length

        fix = "python data/fineweb.py fetch --shards N with a larger N, or tokenize more text"
        if missing(scaled_preset(preset, LENGTHS[0])) <= 0:
            factor = fitting_length(preset, self.usable)
            fix = f"--length auto (that is {factor} times this length), or {fix}"
        if missing(preset) > 0:
            fail("training tokens", f"{self.consumed(preset.stages) + 1:,} for the schedule",
                 f"{self.length:,} in {len(self.paths)} shards", fix)


def cut_documents(tokens: np.ndarray, cap: int) -> list[np.ndarray]:
    """Cut tokens before each BOS and after `cap` tokens. Each document carries one token more, its last target."""
    bounds = {0, *np.flatnonzero(tokens[:-1] == BOS).tolist(), len(tokens) - 1}
    documents = []
    for first, end in itertools.pairwise(sorted(bounds)):
        for start in range(first, end, cap):
            documents.append(tokens[start:min(start + cap, end) + 1])
    return documents


# Primes, and no divisors of a vocabulary: their multiples meet every class once before any again. The second is the
# golden section of 50,304, so that classes take turns evenly, however many of them a chunk has.
CLASS_STRIDE = 20_011
CLASS_STEP = 31_091


@functools.cache
def strided_classes(vocabulary: int) -> np.ndarray:
    """The classes in steps of CLASS_STRIDE, twice, so that a slice has all of them from any place on."""
    return np.tile(np.arange(vocabulary) * CLASS_STRIDE % vocabulary, 2)


def sample_classes(targets: np.ndarray, count: int, vocabulary: int, chunk_number: int,
                   always: Sequence[int] = ()) -> tuple[np.ndarray, int, np.ndarray]:
    """The classes of a batch chunk's sampled softmax: (classes [count], num_always, class_index [T]).

    The first num_always classes are always included: the ids in `always` (none of them a target),
    then the targets in ascending order. The others are sampled: they are the next free ones of a
    strided permutation of the vocabulary, whose offset moves on by CLASS_STEP from chunk to chunk, so
    the classes take turns. class_index says where in `classes` each of the targets [T] is, or -1 if
    there was no room for it.
    """
    taken = np.zeros(vocabulary, bool)
    taken[targets] = True
    included = np.concatenate([np.array(always, int), np.flatnonzero(taken)])[:count]
    taken[included] = True

    offset = chunk_number * CLASS_STEP % vocabulary
    permutation = strided_classes(vocabulary)[offset:offset + vocabulary]
    sampled = permutation[~taken[permutation]][:count - len(included)]

    index_of = np.full(vocabulary, -1)
    index_of[included] = np.arange(len(included))
    return np.concatenate([included, sampled]), len(included), index_of[targets]


# Odd numbers, one for each piece. They keep the parity of a key, and an even modulus would too, so that what collides
# in one piece would often collide in all.
HASH_MULTIPLIERS = 1, 2654435761, 2246822519, 3266489917


def hash_ngrams(tokens: np.ndarray, positions: np.ndarray, rows: int, pieces: int, orders: int) -> np.ndarray:
    """Rows of the n-gram table's parameter for the n-grams that end at each token: int32 [T * pieces, orders], of the
    first `orders` of NGRAM_MULTIPLIERS; see ModelConfig.ngram_pieces.

    There are `rows` rows for each piece, of which each order has an equal part. The hash is the xor of the
    multiplied tokens, times the piece's multiplier, modulo the largest odd number below the part's size. The last row
    of a part stands for an n-gram that would begin before the document.
    """
    part_rows = rows // orders
    last = part_rows - 1
    modulus = (last - 1) | 1
    tokens = tokens.astype(np.uint32)
    found = np.empty((len(tokens), pieces, orders), np.int32)
    for order, multipliers in enumerate(NGRAM_MULTIPLIERS[:orders]):
        key = np.zeros_like(tokens)
        for distance, multiplier in enumerate(multipliers):
            key[distance:] ^= multiplier * tokens[:max(len(tokens) - distance, 0)]
        incomplete = positions < len(multipliers) - 1
        for piece in range(pieces):
            hashes = key * np.uint32(HASH_MULTIPLIERS[piece]) % modulus
            hashes[incomplete] = last
            found[:, piece, order] = hashes + part_rows * (piece * orders + order)
    return found.reshape(-1, orders)


def longest_suffix_match(tokens: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """What followed when the document last held the last three tokens, or else the last two, or one.

    A suffix is the last one, two or three tokens up to and including a token. The result [T] is the
    token that followed plus vocabulary * (matched tokens - 1): a row of this feature's part of the
    n-gram table (ModelConfig.table_rows counts them). Tokens that are new to their document need a
    row too. A single one would collect up to half of all gradients, which one program sums, so they
    are spread over NEW_TOKEN_ROWS rows: by the position in the document, and not in the batch, so
    that a document reads the same rows wherever it lies.

    Algorithm: `by_suffix` lists all positions sorted by the suffix of 1, 2 or 3 tokens that ends
    there, and in text order where suffixes are equal; so neighbours in it with the same suffix are
    consecutive occurrences. Moved on by one position, it is sorted by the tokens before; a stable
    sort by the token itself then sorts the longer suffixes. Longer matches overwrite shorter
    ones.

    Example: in "a b c a b" the first round sorts the positions to [0 3] [1 4] [2], by a, b, c. Position
    3 (a) matches 0, which b followed; 4 (b) matches 1, which c followed. Moved on, they are 0 1
    4 2 3, and the second round sorts them to [0] [3] [1 4] [2]: position 4 matches 1 again, now by
    "a b".
    """
    count = len(tokens)
    tokens16 = tokens.astype(np.uint16)  # for keys of 16 bits NumPy's stable sort is a radix sort
    by_suffix = np.arange(count)
    rows = SUFFIX_LENGTHS * vocabulary + positions % NEW_TOKEN_ROWS
    id_before = np.zeros(count, int)  # of the `length_before` tokens before each position
    for length_before in range(SUFFIX_LENGTHS):
        # by_suffix is sorted by the `length_before` tokens before each position. With the token itself, which counts
        # first, this round's suffixes are one token longer.
        by_suffix = by_suffix[np.argsort(tokens16[by_suffix], kind="stable")]
        prev, cur = by_suffix[:-1], by_suffix[1:]
        same_suffix = (tokens16[prev] == tokens16[cur]) & (id_before[prev] == id_before[cur])
        document_start = cur - positions[cur]
        match = same_suffix & (prev - length_before >= document_start)  # the earlier suffix begins in this document
        rows[cur[match]] = tokens[prev[match] + 1].astype(int) + length_before * vocabulary

        # Number the suffixes in their sorted order, then move on by one position, to the tokens that
        # they precede. In the example the first round ends with longer_id [0 1 2 0 1], id_before
        # [-1 0 1 2 0] and by_suffix [0 1 4 2 3].
        longer_id = np.empty(count, int)
        longer_id[by_suffix] = np.cumsum(np.append(False, ~same_suffix))
        id_before = np.append(-1, longer_id[:-1])
        by_suffix = np.append(0, by_suffix[by_suffix < count - 1] + 1)
    return rows


def ngram_lookups(tokens: np.ndarray, positions: np.ndarray, model: ModelConfig) -> np.ndarray:
    """Rows of the n-gram table's parameter that each token reads: int32 [T * pieces, lookups], hashed n-grams first."""
    pieces = model.ngram_pieces
    lookups = np.empty((len(tokens) * pieces, 0), np.int32)
    if model.ngram_rows:
        lookups = hash_ngrams(tokens, positions, model.ngram_rows, pieces, model.ngram_orders)
    if model.longest_suffix_match:
        matches = longest_suffix_match(tokens, positions, model.padded_vocabulary)
        # Hashed rows lie by piece, then by order; behind them the pieces of a match lie side by side.
        first_pieces = pieces * (model.ngram_rows + matches)
        all_pieces = first_pieces[:, None] + np.arange(pieces)
        lookups = np.column_stack([lookups, all_pieces.ravel().astype(np.int32)])
    return lookups


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch on the host: the fields of Documents one after the other in one int32 array, pinned for a GPU."""
    data: Tensor
    shapes: dict[str, tuple[int, ...]]  # field -> shape, in the order of `data`; a field that is missing is None
    digest: int  # the sum of chunk_digest over the batch chunks

    def to(self, device: torch.device) -> Documents:
        return self.views(self.data.to(device, non_blocking=True))

    def views(self, data: Tensor) -> Documents:
        """The fields as views of `data`, which is self.data or a copy of it on some device."""
        views = dict.fromkeys(Documents.__annotations__)
        start = 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            views[name] = data[start:start + size].view(shape)
            start += aligned(size)
        return Documents(**views)


def sort_ids(ids: np.ndarray, vocab_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(order, starts): the positions of id v are order[starts[v]:starts[v + 1]], ascending; ids are below 2^16.

    With 16-bit keys NumPy's stable sort is a radix sort, half a millisecond for 65536 tokens. torch's embedding
    backward would sort again for every table.
    """
    order = np.argsort(ids.astype(np.uint16), kind="stable")
    return order, np.append(0, np.cumsum(np.bincount(ids, minlength=vocab_rows)))


def pack(chunks: dict[int, list[np.ndarray]], model: ModelConfig, pin: bool, sampled_classes: int | None = None,
         digest: int = 0) -> HostBatch:
    """Pack batch chunks one after the other; with `pin` in pinned memory, which asynchronous copies to a GPU need.

    `chunks` maps the number of each in the run to what cut_documents made of it. Without `sampled_classes` the softmax
    is over the whole vocabulary: `classes` and `num_always` are None.
    """
    documents = list(itertools.chain(*chunks.values()))
    lengths = [len(document) - 1 for document in documents]
    tokens = np.concatenate([document[:-1] for document in documents])
    positions = np.concatenate([np.arange(length) for length in lengths])
    remaining = np.repeat(lengths, lengths) - 1 - positions
    order, starts = sort_ids(tokens, model.padded_vocabulary)

    # What the head has to predict, see Targets: the next token's class, and a sampled softmax's classes.
    targets = [np.concatenate([document[1:] for document in own]) for own in chunks.values()]
    # The arrays of a chunk stay in the processor's cache; those of all chunks would not.
    ends = np.cumsum([len(ids) for ids in targets])[:-1]
    parts = zip(np.split(tokens, ends), np.split(positions, ends))
    ngrams = np.concatenate([ngram_lookups(*part, model) for part in parts])

    fields = {
        "tokens": tokens,
        "order": order,
        "starts": starts,
        "ngrams": ngrams,
        "class_index": np.concatenate(targets),
        "positions": positions,
        "remaining": remaining,
    }
    if sampled_classes:
        always = [model.vocabulary] if model.pointer_width else []  # the copy token
        samples = [sample_classes(ids, sampled_classes, model.padded_vocabulary, number, always)
                   for number, ids in zip(chunks, targets)]
        fields["classes"], fields["num_always"], class_index = map(np.array, zip(*samples))
        fields["class_index"] = class_index.ravel()

    # Each field, then what aligns the next one, in one pass on one core: torch.zeros would first use all of them.
    gap = np.zeros(3, np.int32)
    laid_out = [(array.ravel(), gap[:aligned(array.size) - array.size]) for array in fields.values()]
    data = torch.empty(sum(aligned(array.size) for array in fields.values()), dtype=torch.int32, pin_memory=pin)
    np.concatenate(list(itertools.chain(*laid_out)), out=data.numpy())
    return HostBatch(data, {name: array.shape for name, array in fields.items()}, digest)


def chunk_digest(number: int, tokens: np.ndarray) -> int:
    """64 bits that name the tokens of one batch chunk. A run's token hash is the sum over its chunks."""
    content = f"{number}:".encode() + tokens.astype("<u2").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def training_batches(stream: TokenStream, preset: Preset, micro_chunks: dict[Stage, int], ranks: Ranks,
                     first_step: int = 0) -> Iterator[HostBatch]:
    """This rank's micro-batches of the schedule from a step on, of micro_chunks[stage] batch chunks each.

    The batch chunks follow each other in the stream without a gap. Of each step the rank takes the chunks rank,
    rank + world, ... of CHUNKS. The shards must hold enough tokens (TokenStream.require).
    """
    own = range(ranks.rank, CHUNKS, ranks.world)
    start = stream.first + scheduled_tokens(preset, first_step)  # of a step's tokens in the stream
    number = first_step * CHUNKS  # of the step's first batch chunk in the whole run
    for step in range(first_step, preset.steps):
        stage = preset.stages[stage_index(preset, step)]
        size = micro_chunks[stage]
        for first in range(0, len(own), size):
            chunks = {}
            digest = 0
            for chunk in own[first:first + size]:
                tokens = stream.read(start + chunk * stage.chunk_tokens, stage.chunk_tokens + 1)
                chunks[number + chunk] = cut_documents(tokens, stage.document_cap_tokens)
                digest += chunk_digest(number + chunk, tokens)
            yield pack(chunks, preset.model, ranks.on_gpu, stage.sampled_classes, digest)
        start += stage.batch_tokens
        number += CHUNKS


def generated_pieces(tokens: int, cap: int, seed: int) -> list[np.ndarray]:
    """Random documents of log-normal lengths (median 400) up to `cap`, for warm-up: no training data before the clock.
    """
    random = np.random.default_rng(seed)
    pieces = []
    left = tokens
    while left:
        length = min(left, int(np.clip(random.lognormal(5.99, 1.04), 32, cap)))
        piece = random.integers(0, BOS, length + 1, dtype=np.uint16)
        piece[0] = BOS
        pieces.append(piece)
        left -= length
    return pieces


def validation_windows(path: Path, tokens: int, window: int, vocabulary: int) -> tuple[list[list[np.ndarray]], str]:
    """The first `tokens` + 1 tokens of a shard in contiguous windows, cut into documents, and their hash.

    Each but the first is a target once."""
    shard = open_shard(path, vocabulary)
    if len(shard) < tokens + 1:
        fail(f"{path}: validation tokens", f"at least {tokens + 1:,}", f"{len(shard):,}",
             "fetch this file again, or name the folder of another with --data")
    shard = shard[:tokens + 1]
    windows = [cut_documents(shard[start:start + window + 1], window) for start in range(0, tokens, window)]
    return windows, hashlib.sha256(shard).hexdigest()[:16]


def prefetched(items: Iterator, depth: int = 8) -> Iterator:
    """The items, which a thread makes up to `depth` ahead. An error in the thread is raised here, in its turn.

    Closing this generator, or its end, ends the thread.
    """
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = collections.deque(thread.submit(next, items, None) for _ in range(depth))
        while (item := ahead.popleft().result()) is not None:
            ahead.append(thread.submit(next, items, None))
            yield item
    finally:
        # This waits for the item in the making. If its disk hangs, the watchdog ends the process.
        thread.shutdown(cancel_futures=True)


# ==== 4. Model, its operators in plain PyTorch ========================================================================
class Targets(NamedTuple):
    """What the head has to predict for T tokens.

    A class index is a token's id or, in a sampled softmax, its place among its chunk's classes: with P = 4, one chunk
    and classes [[50257, 11, 262, 7]], of which num_always = [3], the next token 262 has class index 2.

    Sampled softmax: each of the batch's S chunks has P classes of its own. The first num_always are
    always included: copy token and targets. The others are sampled. A class that takes part in some
    chunks only, at a rate r, learns a logit that is too large, by -ln r: rare tokens take part when
    they are sampled, at about P / V, frequent ones always. So where all classes take part, as in the
    validation, inclusion_rates multiply the exponentials. Importance weights of the sampled classes,
    the usual correction, make the gradient noisy instead (records/LOG.md).

    Copying (pointer sentinel mixture, arXiv 1609.07843): what the softmax gives to the copy token,
    the pointer hands on to tokens that the document holds already, so p[next] gains p[copy_token]
    exp(log_copy). What the pointer gives its sentinel stays with the copy token, and padding has a
    share too, so the probabilities of the vocabulary sum to less than 1."""
    class_index: Tensor  # int32 [T], of the next token; -1: none
    positions: Tensor  # int32 [T], in the document, to find the tokens after the next in the same one
    weights: Tensor  # float32 [K], of the next token, the one after it, ...
    classes: Tensor | None = None  # int32 [S, P], ids of the sampled softmax; None: all
    num_always: Tensor | None = None  # int32 [S]
    log_copy: Tensor | None = None  # float32 [T], ln of the share that the pointer gives the next token
    copy_token: int = 0  # its class index
    inclusion_rates: Tensor | None = None  # float32 [V], where all classes take part; None: all were always included

    def ahead(self, k: int) -> Tensor:
        """Class index [T] of the token k further than the next, -1 where the document ends before."""
        def later(x):
            return F.pad(x[k:], (0, min(k, len(x))), value=-1)

        return torch.where(later(self.positions) == self.positions + k, later(self.class_index), -1)

    def parts(self, size: int | None = None) -> Iterator[tuple[slice, Targets]]:
        """The tokens and the targets of each chunk of a sampled softmax, with classes [P] and
        num_always [1]. Without sampling: of each `size` tokens, or of all."""
        tokens = len(self.class_index)
        size = size or tokens
        if self.classes is not None:
            size = tokens // len(self.classes)

        for chunk, start in enumerate(range(0, tokens, size)):
            span = slice(start, start + size)
            part = self._replace(class_index=self.class_index[span], positions=self.positions[span])
            if self.classes is not None:
                part = part._replace(classes=self.classes[chunk], num_always=self.num_always[chunk, None])
            if self.log_copy is not None:
                part = part._replace(log_copy=self.log_copy[span])
            yield span, part


@dataclass(frozen=True)
class Geometry:
    """What attention needs from the schedule."""
    windows: dict[str, int]  # "short" and "long", in tokens
    scale: float  # of the softmax
    cos: Tensor  # [positions, key_width / 2]
    sin: Tensor  # alike


class LayerScalars(NamedTuple):
    """A layer's learned scalars, each expanded to one value a token, [T].

    Because of that, a gradient is first summed over each row only. The kernel that makes the gradient of the
    activation does so on the way: it reads both operands anyway."""
    resid_lambda: Tensor  # of the residual stream
    x0_lambda: Tensor  # of the token embedding
    ngram_lambda: Tensor  # of the n-grams' embedding; unused without that table
    attn_scale: Tensor  # of attention's output


# ---- operators in plain PyTorch: the fast ones must compute the same -------------------------------------------------
def wide_dtype(x):
    """The dtype of sums over x: float32, or float64 for float64 operands, as tests use them."""
    return torch.promote_types(x.dtype, torch.float32)


def norm(x):
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPSILON)


def rotate(x, cos, sin):
    """Rotary embedding of x [T, H, D] by cos, sin [T, 1, D/2]: dims i and i + D/2 are a pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def split_heads_reference(qkv, value, value_gates, positions, cos, sin, heads, key_offset=False):
    """Queries, keys [T, H, Dk] and values [T, H, Dv] for attention from their projection qkv [T, H (2 Dk + Dv)].

    q and k are normalised and rotated; positions [T]; cos, sin [positions, Dk / 2]. v gains the
    value embedding, i.e. the first H Dv channels of value [T, H Dv or more], times value_gates
    [T, H]; both may be None. With key_offset the stationary dims of k, which do not rotate, come from the token
    before, if the document has one: induction in a single layer (record 49).
    """
    width = 2 * cos.size(1)
    parts = qkv.tensor_split((heads * width, 2 * heads * width), 1)
    q, k, v = (part.unflatten(1, (heads, -1)) for part in parts)
    if value is not None:
        value = value[:, :v[0].numel()].reshape(v.shape)
        v = v + value * value_gates[..., None]

    q, k = norm(q), norm(k)
    if key_offset:
        # Rotation leaves the stationary dims as they are, so they can be taken before it.
        stationary = torch.arange(width, device=k.device) % (width // 2) >= width // 4
        has_previous = positions[:, None, None] > 0
        k = torch.where(stationary & has_previous, k.roll(1, 0), k)
    cos, sin = cos[positions, None], sin[positions, None]
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def visible_blocks(positions, window, block_queries, nearest=0, first=0):
    """The mask of attention within documents, for `block_queries` queries at a time: (queries, keys, mask).

    A query sees the keys of its document that are `nearest` to `window` tokens before it. `keys`
    are those that the windows of these queries reach; mask [queries, keys] is True where a query
    sees a key. Queries are those of the tokens from `first` on, and counted from there.
    """
    index = torch.arange(len(positions), device=positions.device)
    first_visible = index - positions.clamp(max=window)
    for start in range(first, len(index), block_queries):
        queries = slice(start, start + block_queries)
        keys = slice(max(start - window, 0), queries.stop)
        not_too_far = index[keys] >= first_visible[queries, None]
        not_too_near = index[keys] <= index[queries, None] - nearest
        yield slice(start - first, queries.stop - first), keys, not_too_far & not_too_near


def attention_reference(q, k, v, positions, window, scale, gates=None, block_queries=512):
    """Softmax attention: q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv], times gates [T, H] if given.

    It takes a block of queries at a time, with the keys that their windows reach, so that the
    scores are block_queries * (block_queries + window) * H numbers. The mask is visible_blocks'.
    Any device and dtype. q and gates may also be of the last tokens only, and then so is the output.
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    blocks = []
    for queries, keys, visible in visible_blocks(positions, window, block_queries, first=k.size(1) - q.size(1)):
        block = F.scaled_dot_product_attention(q[:, queries], k[:, keys], v[:, keys], attn_mask=visible, scale=scale)
        blocks.append(block.transpose(0, 1))
    out = torch.cat(blocks)
    return out if gates is None else (out * gates[..., None]).to(out.dtype)


def pointer_reference(qk, ids, positions, window, scale, block_queries=512):
    """log_copy [T]: the log-probability of the next token under the pointer, one part of a mixture.

    This is the pointer sentinel mixture of arXiv 1609.07843. qk [T, 2, D] holds queries and keys;
    ids [T] are the class indices of the next tokens (-1: none, the loss does not ask there). They are
    numbered by batch chunk, and no document crosses one: equal ones are equal tokens. Token t points at
    tokens i of its document, t - window <= i < t, to copy what followed them: their scores are
    s[t, i] = scale q[t].k[i]. The sentinel, which copies nothing, has score 0. So log_copy[t] is
    the logarithm of sum_exp_match / sum_exp, where sum_exp = 1 + sum_i e^s[t, i], and sum_exp_match
    is the sum of e^s[t, i] over those i with ids[i] = ids[t]; NEG_INF if there are none. In
    float32, or float64 for float64 operands.
    """
    q, k = qk.to(wide_dtype(qk)).unbind(1)
    log_copy = []
    for queries, keys, visible in visible_blocks(positions, window, block_queries, nearest=1):
        scores = scale * (q[queries] @ k[keys].T)
        match = visible & (ids[keys] == ids[queries, None])
        visible_scores = scores.masked_fill(~visible, -torch.inf)
        log_sum_exp = F.pad(visible_scores, (0, 1)).logsumexp(1)  # with the sentinel's score, 0
        log_sum_exp_match = scores.masked_fill(~match, NEG_INF).logsumexp(1)
        log_copy.append(torch.where(match.any(1), log_sum_exp_match - log_sum_exp, NEG_INF))
    return torch.cat(log_copy)


def relu_squared_mlp(x, up, down):
    """relu(x up^T)^2 down, of x [T, width] and up, down [mlp_width, width]."""
    return F.linear(x, up).relu().square() @ down


class PeerRows(NamedTuple):
    """A table whose rows are dealt out to R ranks: row i is row i // R of the part of rank i % R. So neighbours, of
    which the longest suffix match reads some often, are with different ranks."""
    parts: list[Tensor]  # of all ranks, [rows / R, D], in memory that this rank can read
    addresses: Tensor  # int64 [R], where they begin


def dealt_rows(ids: Tensor, parts: list[Tensor]) -> Tensor:
    """The rows `ids` [N] of a table, given the parts of all ranks, see PeerRows."""
    rows = parts[0].new_empty(len(ids), parts[0].size(1))
    for rank, part in enumerate(parts):
        own = ids % len(parts) == rank
        rows[own] = part[ids[own] // len(parts)]
    return rows


def peer_rows_reference(ids, peers):
    """Sums [N, D] of the K rows that `ids` [N, K] names of a table of PeerRows."""
    return dealt_rows(ids.flatten().long(), peers.parts).view(*ids.shape, -1).sum(1)


def softcapped(logits, cap):
    """Logits bounded to (0, softcap) by a sigmoid, see Softcap."""
    return cap.softcap * torch.sigmoid((logits + cap.shift) / cap.temperature)


def head_loss_reference(x, weight, targets, cap, block_rows=4096):
    """Weighted sum of the cross-entropies (nats) of softcapped logits: 0-d float32 (float64 for float64 operands).

    x [T, D], weight [V, D]. Only targets.classes take part in the softmax; if that is None, all V
    do, padding too. The backward pass recomputes blocks of rows, so that few logits exist at a
    time.
    """
    def block_loss(weight, log_rates, x, class_index, log_copy=None):
        logits = x @ weight.T
        logits = softcapped(logits.to(wide_dtype(logits)), cap)
        log_p = (logits + log_rates).log_softmax(-1)
        log_p_targets = log_p.gather(1, class_index.clamp_min(0).long())
        if log_copy is not None:
            # The pointer gives a share of the copy token's probability to the next token.
            log_p_next = torch.logaddexp(log_p_targets[:, 0], log_p[:, targets.copy_token] + log_copy)
            log_p_targets = torch.cat([log_p_next[:, None], log_p_targets[:, 1:]], 1)
        return -(targets.weights.to(log_p.dtype) * log_p_targets * (class_index >= 0)).sum()

    if len(x) > block_rows:
        block_loss = functools.partial(checkpoint, block_loss, use_reentrant=False)
    total = 0.0
    for rows, part in targets.parts():
        part_weight = weight
        log_rates = 0.0 if targets.inclusion_rates is None else targets.inclusion_rates.log()
        if part.classes is not None:
            part_weight = weight[part.classes.long()]

        class_index = torch.stack([part.ahead(k) for k in range(len(targets.weights))], 1)  # [rows, K]
        operands = [x[rows], class_index]
        if part.log_copy is not None:
            operands.append(part.log_copy)
        for block in zip(*(operand.split(block_rows) for operand in operands)):
            total = total + block_loss(part_weight, log_rates, *block)
    return total


# ---- regions: what is compiled ---------------------------------------------------------------------------------------
# Plain functions of tensors, compiled as regions. Equal layers share one compilation, gradients become ready between
# regions (so hooks fire during the backward pass), and attention runs between them with its window as a run-time value.
# A region may return more tensors: nothing else has to know.
# The MLP's output, the n-grams' embedding, skip and value are None where a layer has none.
def add_mlp(x, mlp_out):
    """The residual stream after a layer. The next region that reads it adds the MLP's output: no kernel of its own."""
    return x if mlp_out is None else x + mlp_out


def scaled(scalar, x):
    """x [T, width] times one of LayerScalars [T], in float32."""
    return scalar[:, None] * x


def injections(x0, ngram, *lambdas):
    """What enters each layer from the two embeddings, that of the token and that of the last few tokens: a list.

    All layers are in one region, so that one kernel sums their gradients. `lambdas` are x0_lambda and ngram_lambda of
    one layer after the other, a flat list, in which compile_dynamic finds the tensors."""
    injected = []
    for x0_lambda, ngram_lambda in zip(lambdas[::2], lambdas[1::2]):
        total = scaled(x0_lambda, x0)
        if ngram is not None:
            total = total + scaled(ngram_lambda, ngram)
        injected.append(total.to(x0.dtype))
    return injected


def entrance(rows, ngram, *lambdas):
    """The normed embedding x0, of its rows, and what `injections` makes of it. In one region, so that the gradients of
    all that enters the layers are summed within."""
    x0 = norm(rows)
    return x0, *injections(x0, ngram, *lambdas)


class EnterStream(Function):
    """resid_lambda (x + injected), in the dtype of `injected`.

    Autograd would keep the sum for the gradient of resid_lambda, which costs 1.5 % of a step. This backward pass
    divides the result by resid_lambda, at first 1.1, instead; the norm's backward pass needs the result anyway. x and
    `injected` share one gradient."""
    @staticmethod
    def forward(ctx, resid_lambda, x, injected):
        x = scaled(resid_lambda, x + injected).to(injected.dtype)
        ctx.save_for_backward(resid_lambda, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        resid_lambda, x = ctx.saved_tensors
        grad_lambda = (scaled(1 / resid_lambda, x) * grad).sum(1)
        grad = scaled(resid_lambda, grad).to(grad.dtype)
        return grad_lambda, grad, grad


class LayerEntry(NamedTuple):
    """What enters a layer, see enter_layer."""
    x: Tensor  # the residual stream [T, width], as the next three
    mlp_out: Tensor | None  # of the layer before
    injected: Tensor
    skip: Tensor | None
    skip_weight: nn.Parameter | None
    resid_lambda: Tensor  # [T]


def enter_layer(entry):
    """The stream x = resid_lambda (x + mlp_out + σ(skip_weight) skip + injected), of a LayerEntry."""
    x = add_mlp(entry.x, entry.mlp_out)
    if entry.skip is not None:
        x = x + scaled(torch.sigmoid(entry.skip_weight).expand(len(x)), entry.skip)
    return EnterStream.apply(entry.resid_lambda, x, entry.injected)


def mixed(h, taps, positions):
    """h[t] + taps[0] h[t-1] + taps[1] h[t-2] + ... within a document, by channel; h [T, width], taps
    [K, width] or None, positions [T]."""
    if taps is None:
        return h
    total = h
    for distance, tap in enumerate(taps, 1):
        earlier = h.roll(distance, 0)
        total = total + torch.where(positions[:, None] >= distance, earlier, 0) * tap
    return total.to(h.dtype)


# The taps' gradient is that of every so many tokens, the last of each: 0.3 % of a step. Of every fourth it took 1.8 %.
TAP_STRIDE = 16


class Deferred(Function):
    """Stands for h [T, width] where the FP8 operators make it themselves, see NormedInput, so that no region writes it.

    It is one number expanded to h's shape, which nobody reads: it only carries the gradient of h back. The taps learn
    through sample [T / TAP_STRIDE, width] alone, which is what they add to every TAP_STRIDE-th row of h: TAP_STRIDE
    times the gradient of these rows estimates that of all. Without taps nobody asks for it."""
    @staticmethod
    def forward(ctx, h, sample):
        return h.new_empty(1).expand_as(h)

    @staticmethod
    def backward(ctx, grad):
        return grad, TAP_STRIDE * grad[TAP_STRIDE - 1::TAP_STRIDE]


class NormedInput(NamedTuple):
    """h = mixed(norm(x), taps, positions), which a matrix product reads, for the operators that hold this product.

    In bf16, in float32 and in validation h is written, and the operators read it. In FP8 training they read x: h only
    stands for the product's input and takes its gradient (see Deferred), and quantize_kernel makes the input from the
    rest."""
    h: Tensor  # [T, width]; in FP8 training it has no values, only a gradient
    x: Tensor  # the residual stream [T, width], detached
    inverse_rms: Tensor | None  # of x, [T]; None: h is written
    positions: Tensor | None = None  # [T]
    taps: Tensor | None = None  # of `mixed`, [K, width]
    made: list | None = None  # where several products read it: the copies, once they are made

    def fp8_copies(self, quantize: Callable, scale: float) -> tuple[Tensor, Tensor]:
        """The product's input divided by `scale`, in e4m3 and in both layouts; `quantize` is quantize_both."""
        if self.made:
            return self.made[0]
        copies = quantize(self.x, scale, E4M3, self.inverse_rms, self.positions, self.taps)
        if self.made is not None:
            self.made.append(copies)
        return copies


def product_input(x, h, positions=None, taps=None, *, fp8):
    """(h, inverse_rms) of a NormedInput, from the stream x [T, width] and its norm h.

    In FP8 training the returned h holds no values: reading it gives garbage without an error. What else needs the
    normed input, such as a gate, reads the norm before this call."""
    if not (fp8 and torch.is_grad_enabled()):
        return mixed(h, taps, positions), None
    inverse_rms = torch.rsqrt(x.detach().float().square().mean(-1) + NORM_EPSILON)
    sample = h.detach()  # without taps nothing uses its gradient
    if taps is not None:
        norms = x.detach() * inverse_rms[:, None]
        last = TAP_STRIDE - 1
        sampled = positions[last::TAP_STRIDE, None]
        sample = sum(torch.where(sampled >= distance, norms[last - distance::TAP_STRIDE][:len(sampled)], 0) * tap
                     for distance, tap in enumerate(taps, 1))
        h = mixed(h, taps.detach(), positions)
    return Deferred.apply(h, sample), inverse_rms


def few_outputs(x, weight):
    """F.linear(x, weight) for a `weight` of few rows, in the dtype of x.

    Zero rows fill it up to a multiple of 8, for which cuBLAS has faster kernels (benchmarks/bench_gates.py; H200). With
    8192 tokens the gradient of 12 rows takes 18.6 us, of 5 rows 149, of 16 rows 7.8. With 65,536 all three products
    take 30 us for 12 rows and 19 for 16.
    """
    rows = len(weight)
    padded = F.pad(weight.to(x.dtype), (0, 0, 0, -rows % 8))
    return F.linear(x, padded)[:, :rows]


def head_gates(h, value, gate, attn_scale):
    """The gates [T, H] of the heads' outputs, and those of the value embedding, which are None without one.

    They read the first channels of h, the norm of what attention reads. gate is [H, inputs], or [2 H, inputs] with a
    value embedding. attn_scale [T] multiplies the gates of the outputs: multiplied with weights, as in record 47, it
    would take passes over them. Attention's backward pass divides by these gates, so they are kept from zero.

    A further gate of the heads is H more rows of Block.gate, a chunk here, and a factor of `gates` before the clamp. It
    reads what the others read, so half of it of a value embedding. Beyond `inputs` an AttentionSource keeps no channel.
    """
    inputs = gate.size(1)
    if value is None:
        gate_inputs = h[:, :inputs]
    else:  # detached: a gradient through the gates would be a pass over the whole value embedding
        gate_inputs = torch.cat([h[:, :inputs // 2], value[:, :inputs // 2].detach()], dim=1)
    gates = torch.sigmoid(few_outputs(gate_inputs, gate))

    value_gates = None
    if value is not None:
        gates, value_gates = gates.chunk(2, dim=1)
        value_gates = 4 * value_gates  # 2 as long as `gate` is zero
    gates = scaled(attn_scale.abs(), gates).clamp(min=2.0 ** -20)
    return gates, value_gates


def attention_in(entry, value, gate, attn_scale, fp8):
    """A layer up to the projection of queries, keys and values: the stream, the two results of product_input, and those
    of head_gates."""
    x = enter_layer(entry)
    h = norm(x)
    return x, *product_input(x, h, fp8=fp8), *head_gates(h, value, gate, attn_scale)


class AttentionSource(NamedTuple):
    """An earlier state of the stream, for the layers whose attention reads it instead of the present one: normed once,
    and summed once are the gradients of its norm."""
    product: NormedInput
    gate_inputs: Tensor  # the norm's first channels, [T, inputs]


def attention_source(x, mlp_out, inputs, fp8):
    """The stream after a layer, and for an AttentionSource the two results of product_input and the gates' inputs."""
    x = add_mlp(x, mlp_out)
    h = norm(x)
    return x, *product_input(x, h, fp8=fp8), h[:, :inputs].clone()  # a view would keep all of h


def attention_in_from(entry, gate_inputs, value, gate, attn_scale):
    """attention_in where attention reads an AttentionSource, without what that has made already."""
    return enter_layer(entry), *head_gates(gate_inputs, value, gate, attn_scale)


def attention_out(x, y, out, positions, taps, fp8):
    """The stream after attention, x + y out, and product_input of it for the MLP; y [T, H, D] are the gated heads, out
    is [H D, width]."""
    x = x + (y.flatten(1) @ out)[None].squeeze(0)  # the views keep it from becoming an addmm, which first copies x
    return x, *product_input(x, norm(x), positions, taps, fp8=fp8)


def mlp_in(entry, positions, taps, fp8):
    """A layer without attention up to its MLP: the stream and product_input of it."""
    x = enter_layer(entry)
    return x, *product_input(x, norm(x), positions, taps, fp8=fp8)


def entry_tokens(entry, *_):
    """The number of tokens among the operands of a region that begins a layer, see compile_dynamic."""
    return len(entry.x)


def final_states(x, mlp_out, sources, gate):
    """Normalised final states [T, width]. The `sources`, embeddings that layers may have read, are added: each by a
    weight that the first channels of the normed stream give each token. gate is [sources, inputs]; a source that is
    narrower than the stream enters its first channels."""
    x = add_mlp(x, mlp_out)
    weights = few_outputs(norm(x)[:, :gate.size(1)], gate)
    for weight, source in zip(weights.split(1, dim=1), sources, strict=True):
        x = x + weight * F.pad(source, (0, x.size(1) - source.size(1)))
    return norm(x)


class PointerProjection(Function):
    """`PointerProjection.apply(h, weight)`: h [T, width] itself, and h times weight [3 W, width] transposed.

    The head reads the first. So its gradient comes back through here, and the product's is added to it by the product
    itself, in place: nothing else holds the gradient of what was handed on."""
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h.view_as(h), F.linear(h, weight)

    @staticmethod
    def backward(ctx, dh, grad):
        h, weight = ctx.saved_tensors
        return dh.addmm_(grad, weight), grad.T @ h


def pointer_in(projected):
    """The pointer's queries and keys [T, 2, W], normalised, from the projection [T, 3 W] of the final states.

    A key also reads the state after the token that would be copied. It may: token t points at earlier ones only. The
    last key has none after it, and that of a document's last token reads the next document's: nothing points there."""
    queries, states, next_states = projected.view(len(projected), 3, -1).unbind(1)
    keys = states + F.pad(next_states[1:], (0, 0, 0, 1))
    return norm(torch.stack((queries, keys), 1))


# ---- parameters, layers, the model -----------------------------------------------------------------------------------
class EmbeddingLookup(Function):
    """`EmbeddingLookup.apply(gather, table, ids, ...)` is gather(ids, table), [T, D].

    The gradient bypasses autograd, which would build a dense one for each lookup, in five passes over a mostly empty
    table: `backward` hands it to the table's owner, with all that follows `table`, and returns None. The table's
    post-accumulate hook (Optimizer._ready) fires nevertheless, once a backward pass, after the last lookup: autograd
    runs the hooks of a parameter that its graph reaches, even without a gradient to accumulate.
    """

    @staticmethod
    def forward(ctx, gather, table, *lookup):
        ctx.table, ctx.lookup = table, lookup
        return gather(lookup[0], table)

    @staticmethod
    def backward(ctx, grad):
        ctx.table.info.owner.receive_grad(grad, *ctx.lookup)
        return (None,) * (2 + len(ctx.lookup))


def gathered(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, once the other ranks' parts of its last update are here."""
    if parameter.info.owner:
        parameter.info.owner.wait_gather()
    return parameter


@dataclass
class ParamInfo:
    """What model, optimizer and kernels know of a parameter besides its values: `parameter.info`."""
    # A key of OptimizerConfig.rules: the update that the parameter gets, and its learning rate.
    role: str
    # Muon orthogonalises one matrix at a time: the shape of the matrices that the parameter stacks. None: not Muon's.
    matrix_shape: tuple[int, int] | None
    # The part of the optimizer that a backward hook tells of the gradient, see _ready; that of a table also takes the
    # gradients of lookups, see EmbeddingLookup. None: scalars have no hook.
    owner: Owner | None = None
    # The part of the optimizer's buffer that collects the gradient; kernels may write there, see memory_for_grad.
    grad_view: Tensor | None = None


def make_param(role: str, tensor: Tensor, matrix_shape: tuple[int, int] | None = None) -> nn.Parameter:
    """A parameter with its ParamInfo. Role and matrix shape are the model's; the optimizer fills in the rest."""
    if role in ("scalar", "gate"):  # float32, whatever the model's dtype
        tensor = tensor.float()
    parameter = nn.Parameter(tensor)
    parameter.info = ParamInfo(role, matrix_shape)
    return parameter


class Block(nn.Module):
    """The parameters of one layer and the order of its regions."""
    def __init__(self, index: int, layer: Layer, config: ModelConfig, empty: Callable, ops: Ops):
        super().__init__()
        self.index = index
        self.layer = layer
        self.ops = ops
        self.heads = heads = config.heads
        width = config.width

        self.scalars = make_param("scalar", empty(len(LayerScalars._fields)))
        self.skip_weight = None
        if layer.skip_from is not None:
            self.skip_weight = make_param("scalar", empty(()))
        if layer.attention:
            # One bank for q, k, v and out, which are all cut into matrices of this many rows: with keys narrower than
            # values, v and out are cut in two, and each half is orthogonalised by itself.
            matrix = heads * math.gcd(config.key_width, config.head_width), width
            qkv_width = 2 * heads * config.key_width + config.attention_width
            self.qkv = make_param("attention", empty(qkv_width, width), matrix)
            self.out = make_param("attention", empty(config.attention_width, width), matrix)
            gates = heads if layer.value_embedding is None else 2 * heads
            self.gate = make_param("gate", empty(gates, config.gate_inputs))
        self.mlp_taps = None  # of `mixed`
        if layer.mlp:
            shape = config.mlp_width, width
            self.up = make_param("mlp_up", empty(shape), shape)
            self.down = make_param("mlp_down", empty(shape), shape)
            if config.mlp_taps:
                self.mlp_taps = make_param("gate", empty(2, width))

        self.attention_in = ops.compile(attention_in, entry_tokens)
        self.attention_in_from = ops.compile(attention_in_from, entry_tokens)
        self.attention_out = ops.compile(attention_out)
        self.mlp_in = ops.compile(mlp_in, entry_tokens)

    @torch.no_grad()
    def reset(self, generator: torch.Generator):
        """Draw the initial weights. GPT.reset has set all to zero, and `out` and `down` stay so (record 5): at first a
        layer only injects."""
        for name, parameter in self.named_parameters():
            # A standard deviation of width^-1/2 / 2, as the public records.
            if name in ("qkv", "up"):
                bound = math.sqrt(3) * 0.5 * parameter.size(1) ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)

        # resid_lambda: record 45; x0_lambda: record 9; ngram_lambda: record 62; attn_scale: record 47, not tuned.
        self.scalars.copy_(torch.tensor((1.1, 0.0, 0.09, 0.5)))
        if self.skip_weight is not None:
            self.skip_weight.fill_(-1.5)  # σ(-1.5) = 0.18 (record 32)

    def forward(self, x: Tensor, mlp_out: Tensor | None, injected: Tensor, scalars: LayerScalars,
                skip: Tensor | None, source: AttentionSource | None, value: Tensor | None, documents: Documents,
                geometry: Geometry) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The stream x [T, width] after attention and, apart, the MLP's output, which the next
        region adds:

            x = resid_lambda (x + mlp_out + σ(skip_weight) skip + injected)
            x = x + |attn_scale| gates attention(norm(x)) out
            mlp_out = mlp(mixed(norm(x)))

        `skip` is an earlier state of the stream. Where attention reads another one and not x, that is the `source`.
        `value` [T, attention_width or more] is what attention adds to V, if anything. It is the third result, too: the
        next layer that reads the same value has to take it from there, see ProjectHeads.
        """
        layer = self.layer
        ops = self.ops
        positions = documents.positions
        entry = LayerEntry(x, mlp_out, injected, skip, self.skip_weight, scalars.resid_lambda)

        if layer.attention:
            if source is None:
                x, h, inverse_rms, gates, value_gates = self.attention_in(
                    entry, value, self.gate, scalars.attn_scale, ops.attention_fp8)
                product = NormedInput(h, x.detach(), inverse_rms)
            else:
                x, gates, value_gates = self.attention_in_from(
                    entry, source.gate_inputs, value, self.gate, scalars.attn_scale)
                product = source.product
            q, k, v, value = ops.project_heads(
                product, gathered(self.qkv), value, value_gates, positions, geometry.cos, geometry.sin,
                heads=self.heads, key_offset=layer.key_offset)
            y = ops.attention(q, k, v, documents, geometry.windows[layer.window], geometry.scale, gates)
            x, h, inverse_rms = self.attention_out(x, y, gathered(self.out), positions, self.mlp_taps, ops.mlp_fp8)
        else:
            x, h, inverse_rms = self.mlp_in(entry, positions, self.mlp_taps, ops.mlp_fp8)

        mlp_out = None
        if layer.mlp:
            mlp_input = NormedInput(h, x.detach(), inverse_rms, positions, self.mlp_taps)
            mlp_out = ops.mlp(mlp_input, gathered(self.up), gathered(self.down))
        return x, mlp_out, value


class GPT(nn.Module):
    """The language model. `forward` returns the summed cross-entropy (nats) of a packed batch.

    `ngram` holds one of `row_parts` equal parts of the n-gram table's rows, see PeerRows."""
    def __init__(self, config: ModelConfig, ops: Ops, device: torch.device, row_parts: int = 1):
        super().__init__()
        self.config = config
        self.ops = ops
        width = config.width
        pieces = config.ngram_pieces
        weight = functools.partial(torch.empty, device=device, dtype=getattr(torch, config.dtype))
        table = functools.partial(weight, config.padded_vocabulary)
        self.embedding = make_param("embedding", table(width))
        self.ngram = None
        if config.table_rows:
            rows = -(-pieces * config.table_rows // row_parts)
            self.ngram = make_param("ngram", weight(rows, width // pieces))

        self.blocks = nn.ModuleDict()
        for index, layer in enumerate(config.layers):
            if layer.value_embedding == NGRAMS and not config.ngram_rows:  # rows of suffix matches alone are no values
                layer = replace(layer, value_embedding=None)
            if layer.attention or layer.mlp:
                self.blocks[str(index)] = Block(index, layer, config, weight, ops)
        layers = [block.layer for block in self.blocks.values()]
        self.skip_layers = {layer.skip_from for layer in layers} - {None}  # whose output a later layer adds
        # Whose output a later layer's attention reads.
        self.source_layers = {layer.attention_from for layer in layers} - {None}
        self.value_embeddings = nn.ParameterList(
            make_param("value_embedding", table(config.attention_width)) for _ in range(config.value_embeddings))
        self.lm_head = make_param("lm_head", table(width))
        self.pointer = None
        if config.pointer_width:
            size = config.pointer_width
            self.pointer = make_param("pointer", weight(3 * size, width), (size, width))
        sources = 1 + bool(config.table_rows) + config.final_values * len(self.read_tables() + self.unread_tables())
        self.final_gate = make_param("gate", weight(sources, config.gate_inputs))

        # In how many batch chunks of this rank each class took part since stages have sampled as they do now.
        self.register_buffer(
            "inclusion_counts", torch.zeros(config.padded_vocabulary, device=device), persistent=False)
        # Counts of all ranks, plus a half, as a share of the largest: see Trainer.share_counts.
        self.register_buffer("inclusion_rates", torch.ones(config.padded_vocabulary, device=device))

        self.norm = ops.compile(norm)
        self.injections = ops.compile(injections)
        self.entrance = ops.compile(entrance)
        self.attention_source = ops.compile(attention_source)
        self.final_states = ops.compile(final_states)
        self.pointer_in = ops.compile(pointer_in)
        # Where rows are dealt out, the optimizer puts another function here. 64-bit ids: the table has more than 2^31
        # elements.
        self.sum_rows = ops.compile(lambda ids, table: F.embedding(ids.long(), table).sum(1))

    def read_tables(self) -> list[int]:
        """The value embeddings that attention reads, in the order of the layers."""
        tables = [block.layer.value_embedding for block in self.blocks.values() if block.layer.attention]
        return [table for table in tables if table not in (None, NGRAMS)]

    def unread_tables(self) -> list[int]:
        """The value embeddings that no attention reads, and only the final states do."""
        return sorted(set(range(self.config.value_embeddings)) - set(self.read_tables()))

    @torch.no_grad()
    def reset(self, seed: int):
        """Draw the initial weights: the same on every rank."""
        for parameter in self.parameters():
            parameter.zero_()  # what is not drawn or set below
        self.inclusion_counts.zero_()
        self.inclusion_rates.fill_(1)

        generator = torch.Generator(self.lm_head.device).manual_seed(seed)
        self.embedding.normal_(generator=generator)
        for table in self.value_embeddings:
            table.normal_(std=0.01, generator=generator)  # record 70
        for block in self.blocks.values():
            block.reset(generator)
        self.lm_head.normal_(std=0.005, generator=generator)  # as the public records

        if self.pointer is not None:  # keys as queries: from the first step on it points at states like its own
            queries, states, _ = self.pointer.chunk(3)
            queries.normal_(std=0.5 * self.config.width ** -0.5, generator=generator)
            states.copy_(queries)

    def in_order(self) -> Iterator[nn.Parameter]:
        """Parameters in the order in which the forward pass reads them, for what ranks gather. Some come twice."""
        yield self.embedding
        if self.ngram is not None:
            yield self.ngram
        for block in self.blocks.values():
            table = block.layer.value_embedding
            if table not in (None, NGRAMS):
                yield self.value_embeddings[table]
            yield from block.parameters()
        yield from self.value_embeddings  # and tables that no layer reads
        if self.pointer is not None:
            yield self.pointer
        yield self.lm_head

    def scalars_by_token(self, tokens: int) -> list[LayerScalars]:
        """Each layer's scalars, expanded to [tokens]. One stack for all, so that one kernel sums their gradients."""
        stacked = torch.cat([block.scalars for block in self.blocks.values()])
        rows = iter(stacked[:, None].expand(-1, tokens).unbind())
        return [LayerScalars(*itertools.islice(rows, len(LayerScalars._fields))) for _ in self.blocks]

    def features(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Normalised final states [T, width], ready for the head."""
        rows = self.ops.embed(gathered(self.embedding), documents)
        ngram = None
        # Autograd goes back in the opposite order, so the gradient of this lookup, which takes longest to reach its
        # table, comes before that of the embedding above.
        if self.ngram is not None:
            ngram = EmbeddingLookup.apply(self.sum_rows, gathered(self.ngram), documents.ngrams).view(len(rows), -1)

        scalars = self.scalars_by_token(len(rows))
        lambdas = [(s.x0_lambda, s.ngram_lambda) for s in scalars]
        if torch.is_grad_enabled():
            x0, *injected = self.entrance(rows, ngram, *itertools.chain(*lambdas))
        else:  # one layer at a time: windows of the validation are long
            x0 = self.norm(rows)
            injected = (self.injections(x0, ngram, *pair)[0] for pair in lambdas)

        x = x0
        mlp_out = None
        skips = {None: None}  # states of the stream by the index of the layer that left them
        sources = {None: None}
        values = []  # what attention has read of value embeddings, for final_states
        for block, own_injected, own_scalars in zip(self.blocks.values(), injected, scalars):
            layer = block.layer
            # Looked up here and not beforehand: autograd goes back through the layers in the opposite order, so a
            # table's gradient leaves while earlier layers still work.
            value = None
            if layer.value_embedding == NGRAMS:
                value = ngram
            elif layer.value_embedding is not None:
                value = self.ops.embed(gathered(self.value_embeddings[layer.value_embedding]), documents)

            x, mlp_out, value = block(x, mlp_out, own_injected, own_scalars, skips[layer.skip_from],
                                      sources[layer.attention_from], value, documents, geometry)
            if layer.value_embedding == NGRAMS:
                ngram = value  # the next reader takes it from this one, see ProjectHeads
            elif value is not None and layer.attention and self.config.final_values:
                values.append(value)
            if block.index not in self.skip_layers | self.source_layers:
                continue

            # Several will read the sum, so it and its gradient are made once.
            if block.index in self.source_layers:
                x, h, inverse_rms, gate_inputs = self.attention_source(
                    x, mlp_out, self.config.gate_inputs, self.ops.attention_fp8)
                product = NormedInput(h, x.detach(), inverse_rms, made=[])
                sources[block.index] = AttentionSource(product, gate_inputs)
            else:
                x = add_mlp(x, mlp_out)
            mlp_out = None
            skips[block.index] = x

        if self.config.final_values:
            tables = (self.value_embeddings[table] for table in self.unread_tables())
            values += [self.ops.embed(gathered(table), documents) for table in tables]
        embeddings = (x0,) if ngram is None else (x0, ngram)
        return self.final_states(x, mlp_out, (*embeddings, *values), self.final_gate)

    def predictions(self, documents: Documents, geometry: Geometry,
                    weights: Tensor) -> tuple[Tensor, Tensor, Targets, Softcap]:
        """The operands of the loss: final states, head, targets with their weights [K], softcap."""
        config = self.config
        h = self.features(documents, geometry)
        log_copy = None
        if self.pointer is not None:
            h, projected = PointerProjection.apply(h, gathered(self.pointer))
            qk = self.pointer_in(projected)
            log_copy = self.ops.pointer(qk, documents, config.pointer_window_tokens, config.pointer_scale)

        # The copy token is the first id past the vocabulary; among sampled classes it comes first.
        if documents.classes is None:
            copy_token = config.vocabulary
            inclusion_rates = self.inclusion_rates
        else:
            copy_token = 0
            inclusion_rates = None
        targets = Targets(documents.class_index, documents.positions, weights, documents.classes, documents.num_always,
                          log_copy, copy_token, inclusion_rates)
        return h, gathered(self.lm_head), targets, config.softcap

    def forward(self, documents: Documents, geometry: Geometry, target_weights: Tensor) -> Tensor:
        if documents.classes is not None:
            classes = documents.classes.flatten()
            self.inclusion_counts.index_add_(0, classes, torch.ones_like(classes, dtype=torch.float32))
        return self.ops.head_loss(*self.predictions(documents, geometry, target_weights))

    @torch.no_grad()
    def evaluate(self, documents: Documents, geometry: Geometry) -> Tensor:
        """Summed cross-entropy without gradients, full vocabulary, float32 log-probabilities."""
        return self.ops.head_loss_eval(
            *self.predictions(documents, geometry, torch.ones(1, device=self.lm_head.device)))


# ---- rotary embedding ------------------------------------------------------------------------------------------------
def rotary_frequencies(preset: Preset, index: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies [key_width / 4], in radians a position, and the softmax scale in a stage.

    Half of the channels are rotary dims, in pairs; the others are stationary. At each change of the
    long window YaRN stretches the slow frequencies (less than 32 turns in the window) and sharpens
    the softmax (arXiv 2309.00071)."""
    model = preset.model
    frequency = model.rotary_base ** -np.linspace(0, 1, model.key_width // 4)
    scale = model.attention_scale

    windows = [stage.long_window_tokens for stage in preset.stages[:index + 1]]
    for old, new in zip(windows, windows[1:]):
        turns = old * frequency / (2 * math.pi)
        keep = np.clip((turns - 1) / (32 - 1), 0, 1)
        frequency = frequency * (old / new + keep * (1 - old / new))
        scale *= 0.2 * math.log(new / old) + 1  # YaRN's 0.1 ln s + 1 for queries and again for keys, to first order
    return frequency, scale


def geometry_tables(frequency: np.ndarray, scale: float, windows: tuple[int, int], positions: int, dtype: torch.dtype,
                    device: torch.device) -> Geometry:
    """Geometry with cosines and sines for `positions` positions; the stationary dims get angle 0."""
    frequencies = torch.tensor(np.pad(frequency, (0, len(frequency))), device=device)
    angle = torch.arange(positions, device=device)[:, None] * frequencies
    return Geometry(dict(zip(("short", "long"), windows)), scale, angle.cos().to(dtype), angle.sin().to(dtype))


def rotary_geometry(preset: Preset, index: int, positions: int, device: torch.device,
                    windows: tuple[int, int] | None = None) -> Geometry:
    """Attention's geometry in a stage, or with other `windows`: the final validation looks further back (record 33)."""
    stage = preset.stages[index]
    windows = windows or (stage.short_window_tokens, stage.long_window_tokens)
    frequency, scale = rotary_frequencies(preset, index)
    return geometry_tables(frequency, scale, windows, positions, getattr(torch, preset.model.dtype), device)


# ==== 5. Optimizer: Muon and NorMuon for hidden matrices, Adam for the rest; most of it sharded =======================
# One step of several ranks. Each line is a queue that works by itself, from left to right. The host only
# fills the queues: it runs ahead and never waits for the device. "embed" stands for the tables that the
# model reads before any matrix.
#
#            start_step       forward pass                backward pass               step
#   host     phases 1, 2      wait_gather at a layer      phase 3, from hooks         phases 3, 4
#   compute                   embed  layer 1 .. lm_head   lm_head .. layer 1  embed   Adam: all else      wait
#   side 0                       sort last n-grams                                    NorMuon
#   side 1                                                                            Adam: embed
#   comm.    gather layer 1 .. lm_head, last n-grams           reduce lm_head .. layer 1, embed, scalars
#                                                                                                  gather embed
#
# What fires when, and what waits for what:
#   start_step  Each rank asks for the weights that others have updated, in the order in which the model reads
#               them, and then for the numbers of the n-gram rows that others read in the step before, and their
#               gradients. Side stream 0 waits for the numbers and sorts them.
#   forward     `gathered` makes the compute stream wait for the weights of a layer just before the layer.
#   backward    The hook `_ready` fires for each parameter of an owner (a table, or a group of matrices) and
#               counts gradients. When an owner has the last gradient of the last micro-batch, it reduces: the
#               communication stream waits for what the compute stream has queued so far. Earlier layers go on.
#   step        Scalars reduce, and so do groups with a layer that had no gradient. Then three updates run
#               beside each other, and each waits for the gradients that it uses:
#               - NorMuon. A rank has few of the matrices, so their products leave most of the GPU to updates
#                 that move memory.
#               - Adam of the embedding. Its gradient is complete last and the next step reads it first, so it
#                 is gathered at once.
#               - Adam of all else. N-grams' gradients are those of the step before: they are complete last of
#                 all, and many, so what waited for them would wait long.
#               Last, the compute stream waits for both side streams and for the embedding.
#
# One rank          Nothing is communicated. Both side streams remain.
# NCCL              It communicates on a stream of its own, and reduce-scatter brings the mean of the ranks.
# Shared memory     GPUs that can read each other's memory use copy engines on Ranks.copy_stream. Every rank's
#                   version of a gradient is copied, or of embeddings read where it is, and the kernel that reads
#                   them takes the mean. A barrier precedes each exchange; start_step has one for all its gathers
#                   of weights. Scalars use NCCL.
# CPU               There are no streams: everything happens as it is called.
#
# Five ways home: how a gradient comes to its update. "In place" is memory_for_grad: a kernel writes where the optimizer
# collects, so that nothing is copied.
#
#   of                 made by                     collected in         leaves                what a rank updates
#   matrices           autograd, FP8 in place      the group's buffer   hook, reduce-scatter  its own
#   embeddings         EmbeddingLookup.backward    RowGrads, in place   hook; others read it  its rows
#   head               HeadLoss, sampled in place  .grad                hook, reduce-scatter  its rows
#   rows of n-grams    EmbeddingLookup.backward    a list, late_grads   next step, all-gather its own of those read
#   scalars and gates  autograd                    a flat buffer a role step, all-reduce      all


# ---- Muon: orthogonalisation -----------------------------------------------------------------------------------------
class Orthogonalization(NamedTuple):
    """How singular values are driven to 1: scale the matrix, then apply a s + b s^3 + c s^5 in each round.

    The scale brings the largest singular value to 1 or below. With a `safety` it is 1 / (safety ||X||_F), where a
    safety above 1 leaves room for rounding. Without one it is AOL's, see aol_scale, whose factors come from the Gram
    matrix that the first round needs anyway. They are tighter, so that a polynomial fitted to small singular values is
    not needed."""
    coefficients: tuple[tuple[float, float, float], ...]  # (a, b, c) of each round
    safety: float | None


# Minimax on [1e-3, 1], each round fitted to the interval that the last one leaves (Polar Express, arXiv 2505.16932),
# with a margin of 2 % as in the public records.
POLAR_EXPRESS_FIVE = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# Another of this form is a row here, which reference and kernels take alike. docs/systems.md compares their errors and
# what they do to a training.
ORTHOGONALIZATIONS = {
    # The same for four rounds, on [3e-3, 1]. It diverges above 1.02.
    "polar-express": Orthogonalization((
        (8.089256959191, -22.297789245261, 15.747758400660),
        (3.943378132484, -2.784615046554, 0.503808707390),
        (3.472945650518, -2.500502056079, 0.478927524824),
        (2.552322205513, -1.886821974398, 0.442619509006),
    ), safety=1.02),
    "polar-express-5": Orthogonalization(POLAR_EXPRESS_FIVE, safety=1.02),
    # Turbo-Muon (modded-nanogpt PR 155): AOL takes the place of the first round.
    "turbo": Orthogonalization(POLAR_EXPRESS_FIVE[1:], safety=None),
    # Muon's first polynomial (Keller Jordan, 2024-10): steep at 0, it never settles at 1.
    "quintic": Orthogonalization(((3.4445, -4.7750, 2.0315),) * 5, safety=1.0),
}


def frobenius_scale(X, safety, dtype):
    """X / (safety ||X||_F) for each matrix of [..., M, N], cast to dtype last; a zero matrix stays zero.

    The norm is summed in float32 but divides in X's dtype: a common factor of 1 + 2^-8 does no
    harm, while a float32 copy of X would cost two passes over it.
    """
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=wide_dtype(X))
    divisor = (safety * norm).clamp_min(torch.finfo(X.dtype).tiny)
    return (X / divisor.to(X.dtype)).to(dtype)


def aol_scale(X, A):
    """D X and its Gram matrix D A D, where A = X X^T [..., M, M] and D_ii = (sum_j |A_ij|)^-1/2; zero rows stay zero.

    By Gershgorin's circles no singular value of D X is above 1 (almost orthogonal layers, arXiv 2208.03160). The
    second result takes no product. D is rounded to X's dtype first, so that both are of the same matrix."""
    sums = torch.linalg.vector_norm(A, ord=1, dim=-1, keepdim=True, dtype=wide_dtype(A))
    d = sums.clamp_min(torch.finfo(torch.float32).tiny).rsqrt().to(X.dtype)
    return d * X, A * (d * d.mT)  # d_i d_j is formed first, so that the result is symmetric


def orthogonalize_reference(matrices, method):
    """Near-orthogonal factor U V^T of each U S V^T in [..., M, N]; any device, computed and returned in their dtype."""
    if matrices.size(-2) > matrices.size(-1):  # then the other Gram matrix is the small one
        return orthogonalize_reference(matrices.mT, method).mT

    X = matrices
    if method.safety is not None:
        X = frobenius_scale(X, method.safety, X.dtype)
    for number, (a, b, c) in enumerate(method.coefficients):
        A = X @ X.mT
        if number == 0 and method.safety is None:
            X, A = aol_scale(X, A)
        X = a * X + (b * A + c * A @ A) @ X
    return X


# ---- Muon: momentum, NorMuon -----------------------------------------------------------------------------------------
def join_float32(high, low_bits):
    """The float32 that rounds to `high` (bfloat16); its other bits, a signed difference, are `low_bits` (int16).

    Without low bits it is `high`."""
    if low_bits is None:
        return high.float()
    return ((high.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)


def split_float32(value):
    """Inverse of join_float32. It rounds half up in magnitude, so that bfloat16 weights are not biased towards zero."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def mean_gradient(received):
    """Mean over the ranks, in float32, of what Ranks.reduce_scatter brings, [ranks, ...].

    The number of ranks is static, so that the compiler fuses the sum into the kernel that reads it.
    """
    return sum(part.float() for part in received.unbind()) / len(received)


# The next three are plain functions of tensors, compiled as regions; what changes with the step is a 0-d tensor.
def nesterov_momentum(momentum_buffer, received, momentum):
    """Update the float32 momentum [..., rows, columns] in place and return the look-ahead gradient in the dtype of the
    gradients, `received` [ranks, ..., rows, columns]."""
    g = mean_gradient(received)
    average = momentum_buffer + (1 - momentum) * (g - momentum_buffer)
    momentum_buffer.copy_(average)
    return (g + momentum * (average - g)).to(received.dtype)


def plain_momentum(momentum_buffer, received, momentum):
    """nesterov_momentum without the look-ahead: it returns the new momentum."""
    average = momentum_buffer + (1 - momentum) * (mean_gradient(received) - momentum_buffer)
    momentum_buffer.copy_(average)
    return average.to(received.dtype)


def normuon_update(update, weight, low_bits, second_moment, multiplier, lr, weight_decay, beta2, cautious,
                   drift=None, drift_decay=None, factor=None, next_factor=None):
    """Apply orthogonalised updates [..., rows, columns] to the weights, in place; for low_bits see join_float32.

    NorMuon divides each line of a matrix by the running root mean square of its updates, then restores the norm of the
    whole matrix. The lines are the rows if second_moment is [..., rows, 1], the columns if it is [..., 1, columns].
    Without a second moment this is Muon. Decay, if cautious, shrinks no weight that the update makes larger.

    With a `drift`, the running mean of the steps of weights w, the weights are w + factor * drift: there the gradient
    was taken and the update begins. They become w' + next_factor * drift', where w' - w is a step.
    Sources: Muon, Keller Jordan 2024-10; NorMuon, arXiv 2510.05491; public records 41-43 and 48; EMA-Nesterov, arXiv
    2605.25395.
    """
    update = update.float()
    if second_moment is not None:
        axis, other_axis = (-1, -2) if second_moment.size(-1) == 1 else (-2, -1)
        mean_square = update.square().mean(axis, keepdim=True)
        average = second_moment + (1 - beta2) * (mean_square - second_moment)
        second_moment.copy_(average)
        scale = average.clamp_min(1e-10).rsqrt()
        square_before = mean_square.sum(other_axis, keepdim=True)
        square_after = (mean_square * scale.square()).sum(other_axis, keepdim=True)
        update = update * (scale * (square_before / square_after.clamp_min(1e-30)).sqrt())

    value = join_float32(weight, low_bits)
    step_size = lr * multiplier
    wd = weight_decay * lr * step_size
    if cautious:
        wd = (update * value >= 0) * wd
    updated = value - value * wd - update * step_size
    if drift is not None:
        step = updated - (value - factor * drift)
        mean = drift + (1 - drift_decay) * (step - drift)
        drift.copy_(mean)
        updated = updated + next_factor * mean

    if low_bits is None:
        weight.copy_(updated)
    else:
        high, low = split_float32(updated)
        weight.copy_(high)
        low_bits.copy_(low)


# ---- Adam ------------------------------------------------------------------------------------------------------------
def embedding_grad_reference(grad, tokens, vocab_rows):
    """Dense gradient [vocab_rows, D] of `table[tokens]` from grad [T, D]: float32 (or wider) sums, rounded once."""
    wide = grad.to(wide_dtype(grad))
    return wide.new_zeros(vocab_rows, grad.shape[1]).index_add_(0, tokens.long(), wide).to(grad.dtype)


class RowGrads(NamedTuple):
    """What every rank has of the gradient of a table's rows: a row that no lookup has read may hold anything."""
    grads: list[Tensor]  # of all ranks, [rows, width], in memory that this rank can read
    present: list[Tensor]  # of all ranks, int8 [rows]: 1 where `grads` holds a gradient, else 0
    addresses: Tensor  # int64 [2, ranks]: where the tensors of both lists begin

    @staticmethod
    def of(grads: list[Tensor], present: list[Tensor]) -> RowGrads:
        places = [[tensor.data_ptr() for tensor in tensors] for tensors in (grads, present)]
        return RowGrads(grads, present, torch.tensor(places, device=grads[0].device))

    def dense(self) -> Tensor:
        """[ranks, rows, width], with zeros in the other rows."""
        return torch.stack([torch.where(present[:, None] > 0, grad, 0)
                            for grad, present in zip(self.grads, self.present)])


def adam_step(weights, grad, second_moment, lr, wd, epsilon, cautious):
    """The weights after one Adam step. `lr` is the learning rate with both bias corrections, see step_rates. The share
    `wd` of a weight decays: everywhere (AdamW), or if `cautious` only where the update shrinks the weight too (record
    50)."""
    update = lr * grad / (second_moment.sqrt() + epsilon)
    decay = wd * weights
    if cautious:
        decay = decay * (update * weights > 0)
    return weights - update - decay


def adam_reference(weights, received, exp_avg, exp_avg_sq, lr, wd, beta1, beta2, epsilon, *, cautious=True):
    """One Adam step in place, computed in float32, by the mean of the gradients `received` [ranks, ...] or RowGrads."""
    if isinstance(received, RowGrads):
        received = received.dense()
    g = received.float().mean(0)
    m = exp_avg.float().lerp(g, 1 - beta1)
    v = exp_avg_sq.float().lerp(g * g, 1 - beta2)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    weights.copy_(adam_step(weights.float(), m, v, lr, wd, epsilon, cautious))


def group_ids(ids):
    """(ids, order, starts, sorted ids) for sparse_adam, of ids [T, K]. `starts` is by sorted place, not by id.

    `order` sorts the flat ids. searchsorted gives every member of a group of equal ids the place of the first one, so
    starts[i] < starts[i + 1] holds for its last member alone: that one has the group, the others have an empty
    one. The GPU sorts, without a synchronise: each rank's host would need 6 / 12 / 34 ms for all ranks'
    n-grams.

    Example: of ids [[7, 3], [7, 7]] the sorted ids are 3 7 7 7, order is 1 0 2 3 and starts 0 1 1 1 4. So place 0 has
    the group of id 3, which is place 0 alone, and place 3 that of id 7, which is places 1 to 3.
    """
    sorted_ids, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_ids, sorted_ids, out_int32=True)
    return ids, order, F.pad(starts, (0, 1), value=len(sorted_ids)), sorted_ids


def sparse_adam_reference(grad, lookup, weights, exp_avg_sq, last_step, step, lr, wd, beta2, epsilon, scale, *,
                          rank=0, parts=1, pooling=0.0, cautious=True):
    """One Adam step without a first moment, in place, of those rows of weights [rows, D] that occur in ids.

    Of PeerRows only the part of `rank` is updated, to which weights, exp_avg_sq and last_step belong.

    ids [T, K] are the first of `lookup`, see group_ids; with a table in pieces, T counts each piece of a token.
    Reader t read the sum of the rows ids[t], and grad [T, D] is that of these sums. g, the gradient of a row, is
    `scale` times the sum of grad over the readers that read it. There is one second moment a row, v in exp_avg_sq
    [rows], which also decays over the steps since last_step [rows], the row's last update:

        v <- beta2^(step - last_step) v + (1 - beta2) mean(g^2)

    The step divides by the root of (1 - pooling) v + pooling (1 - beta2) mean((scale grad)^2), where the mean is
    over all readers: a row that is read rarely and with small gradients then takes small steps.

    lr, wd and cautious: see adam_step.
    """
    ids = lookup[0]
    rows, group = ids.flatten().unique(return_inverse=True)
    wide = wide_dtype(grad)
    wide_grad = grad.to(wide)
    g = scale * embedding_grad_reference(wide_grad.repeat_interleave(ids.size(1), 0), group, len(rows))
    own = rows % parts == rank % parts
    rows = rows[own].long() // parts
    g = g[own]

    v = beta2 ** (step - last_step[rows]) * exp_avg_sq[rows] + (1 - beta2) * g.square().mean(1)
    typical = (1 - beta2) * (scale * wide_grad).square().mean()
    pooled = (1 - pooling) * v + pooling * typical
    stepped = adam_step(weights[rows].to(wide), g, pooled[:, None], lr, wd, epsilon, cautious)
    weights[rows] = stepped.to(weights.dtype)
    exp_avg_sq[rows] = v.to(exp_avg_sq.dtype)
    last_step[rows] = step


# ---- owners: who holds, sends and updates which parameters -----------------------------------------------------------
def memory_for_grad(weight):
    """Where to write a gradient of a parameter: for a step's first backward pass, where the optimizer collects it.

    Other memory, if there is no such place or if it holds a gradient already. A backward pass may ask once for each
    parameter: until `weight.grad` is set, it would get the same memory again.
    """
    view = weight.info.grad_view if hasattr(weight, "info") else None  # tests pass plain tensors
    if view is None or weight.grad is not None:
        return torch.empty_like(weight)
    return view.view_as(weight)  # autograd copies a gradient of which somebody else holds the very tensor, not a view


class Owner:
    """Parameters that live in one tensor, `weights`, and travel together: their gradients, and their weights.

    Each step takes every owner through the same four phases. A phase only queues work, and an owner does without
    those that it does not need: only sharded weights are gathered, only sparse tables have a start_step.

    Tables and scalars are both an Owner, for they travel, and Updated, for they have a step. Matrices divide this: a
    MatrixGroup is an Owner only (phases 1 and 3), and the MatrixBank of several groups, which updates them at once
    (phase 4), is Updated only.

    Phase 1  gather_()        asks for the shards that other ranks have updated, on the communication stream: as a step
                              starts, or if the owner `gathers_at_once` after its update.
             wait_gather()    makes the current stream wait for them. The model calls it, through `gathered`.
    Phase 2  start_step(ids)  exchanges the numbers of the rows that the step before has read, and their gradients,
                              on the communication stream, and sorts the numbers on side stream 0.
                              Optimizer.start_step calls it.
    Phase 3  reduce_()        sends the gradient to the rank that needs it, on the communication stream. The hook
                              Optimizer._ready calls it, or else Optimizer.step.
    Phase 4  compute_(rates)  makes the current stream wait for the gradient, and updates: see Updated.
    """
    # Subclasses set `parameters`, `ranks` and `weights`. flatten needs `grads`, shaped as the weights. reduce_ leaves
    # in `pending_reduce` what compute_ waits for.
    gathers_at_once = False
    pending_gather = None  # the wait for what gather_ has asked for

    def flatten(self):
        """Move the `parameters` into the buffer `weights`, one after another, each at an aligned place.

        The same part of the buffer `grads` becomes the parameter's `info.grad_view`. Compiled code, perhaps another
        process's, takes it for granted that parameters are aligned as they were when it was compiled: so all are.
        Matrices follow one another without a gap, since their sizes are multiples of 4 (check_preset).
        """
        weights = self.weights.view(-1)
        grads = self.grads.view(-1)
        start = 0
        for parameter in self.parameters:
            part = slice(start, start + parameter.numel())
            weights[part].copy_(parameter.detach().view(-1))
            parameter.data = weights[part].view_as(parameter)
            parameter.info.grad_view = grads[part].view_as(parameter)
            start += aligned(parameter.numel())

    def gather_(self, barrier: bool = True):
        self.pending_gather = self.ranks.all_gather(self.weights, barrier)

    def wait_gather(self):
        if self.pending_gather:
            self.pending_gather()
            self.pending_gather = None


class Updated:
    """Weights that are updated at once, by compute_(rates), with the state that this takes.

    Subclasses set `weights`, and if a rank updates a part of them that part, `shard`.
    """
    side = None  # the side stream on which Optimizer.step queues compute_; None: the compute stream
    # The attributes that training changes; every one has some of them.
    state_names = ("weights", "low_bits", "momentum", "second_moment", "drift", "exp_avg", "exp_avg_sq", "last_step",
                   "late_ids", "late_grads", "average")
    low_bits = None  # of bfloat16 matrices: the rest of their float32 values, see join_float32
    average = None  # of matrices and dense tables, see average_

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items()
                if name in self.state_names and tensor is not None}

    def average_(self, rate: float, share: float):
        """Running average of the weights w of this rank's shard: average += rate * (w - average).

        A `share`, after the last step, also sets w = lerp(w, average, share), with the norm of each row restored.
        """
        w = join_float32(self.shard, self.low_bits)
        self.average.lerp_(w, rate)
        if share:
            blended = w.lerp(self.average, share)
            scale = w.norm(dim=-1, keepdim=True) / blended.norm(dim=-1, keepdim=True).clamp_min(1e-30)
            # The low bits stay those of the weights before: this is the last step, nothing reads them again.
            self.shard.copy_(blended * scale)


@dataclass(eq=False)
class MatrixGroup(Owner):
    """Matrices of a bank in neighbouring layers, which travel together: [ranks · per_rank, rows, columns].

    A group has phases 1 and 3; phase 4 is its bank's, for all groups at once.
    """
    parameters: list[nn.Parameter]
    weights: Tensor
    grads: Tensor
    received: Tensor  # see Ranks.reduce_scatter
    ranks: Ranks

    def __post_init__(self):
        self.flatten()

    def reduce_(self):
        for parameter in self.parameters:
            view = parameter.info.grad_view
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)  # nothing to copy if kernels wrote it there: autograd keeps their tensor
            parameter.grad = None
        self.pending_reduce = self.ranks.reduce_scatter(self.grads, self.received)


def group_size(counts: list[int], world: int) -> int:
    """How many matrices travel together, when the parameters of a bank stack `counts` of them. The smallest size wins.

    There are at most five groups, equally large, and with a single rank only one. Of each group every rank owns equally
    many matrices. No border between groups cuts a parameter.

    Example: four layers with qkv (3 matrices) and out (1), counts = [3, 1, 3, 1, 3, 1, 3, 1], on two ranks. Each rank
    owns 8 of the 16 matrices, which five groups do not divide. Four groups of 4 have their borders at 4, 8 and 12,
    where parameters start: the size is 4. With counts = [3, 3, 3, 3, 3, 1] the border at 4 would cut the second
    parameter and the one at 8 the third, so all 16 travel together.
    """
    starts = {0, *itertools.accumulate(counts)}
    total = sum(counts)
    per_rank = -(-total // world)
    for groups in range(5 if world > 1 else 1, 1, -1):
        size = per_rank * world // groups
        if per_rank % groups == 0 and starts.issuperset(range(size, total, size)):
            return size
    return per_rank * world


class MatrixBank(Updated):
    """All hidden matrices of one shape, in the order of the layers, with one update for all.

    Zero matrices fill them up to a multiple of the ranks. They lie as [groups, ranks, per_rank, rows, columns]: of each
    group a rank owns `per_rank` neighbours, so its shard is [groups, per_rank, rows, columns]. Groups travel on
    their own: gradients while earlier layers still work, weights shortly before they are used.

    Example: 15 matrices in 4 groups on 2 ranks are [4, 2, 2, rows, columns], the last one zero. Matrix 6 is the
    third of group 1, hence the first one there of rank 1.
    """
    side = 0

    def __init__(self, parameters: list[nn.Parameter], rules: dict[str, MuonRule], config: OptimizerConfig,
                 ranks: Ranks, ops: Ops):
        self.ranks = ranks
        self.ops = ops
        self.config = config
        rows, columns = parameters[0].info.matrix_shape
        counts = [parameter.numel() // (rows * columns) for parameter in parameters]
        size = group_size(counts, ranks.world)
        groups = -(-sum(counts) // size)
        self.axes = groups, ranks.world, size // ranks.world

        # Storage: of weights and gradients, which MatrixGroup fills, and of what the ranks send this one.
        zeros = torch.zeros(groups * size, rows, columns, dtype=parameters[0].dtype, device=ranks.device)
        self.weights = ranks.shared(zeros, groups)
        self.grads = ranks.shared(zeros.clone(), groups)
        self.shard = self.own_part(self.weights)
        self.received = self.own_part(self.grads)[None]
        if ranks.copy_stream:
            self.received = self.shard.new_empty(ranks.world, *self.shard.shape)

        # Groups: each parameter goes to one, and each matrix has the multiplier of its role (padding: 0).
        members = [[] for _ in range(groups)]
        multiplier = torch.zeros(len(zeros), 1, 1, device=ranks.device)
        shape_factor = max(1.0, rows / columns) ** 0.5 if config.scale_tall_updates else 1.0
        start = 0
        for parameter, count in zip(parameters, counts):
            members[start // size].append(parameter)
            multiplier[start:start + count] = rules[parameter.info.role].learning_rate_multiplier * shape_factor
            start += count
        self.multiplier = self.own_part(multiplier).clone()
        parts = zip(members, self.weights.split(size), self.grads.split(size), self.received.unbind(1))
        self.groups = [MatrixGroup(*part, ranks) for part in parts]

        # State of the update, for this rank's matrices only.
        if self.weights.dtype == torch.bfloat16:
            self.low_bits = torch.zeros_like(self.shard, dtype=torch.int16)
        self.momentum = torch.zeros_like(self.shard, dtype=torch.float32)
        self.second_moment = None
        if config.normuon:
            by_row = (rows >= columns) == config.normuon_long_side
            lines = (rows, 1) if by_row else (1, columns)
            self.second_moment = torch.zeros(*self.shard.shape[:2], *lines, device=ranks.device)
        self.drift = torch.zeros_like(self.momentum) if config.drift_factor else None
        self.look_ahead = ops.compile(nesterov_momentum if config.nesterov else plain_momentum)
        self.update = ops.compile(normuon_update)

    def own_part(self, full: Tensor) -> Tensor:
        """This rank's part [groups, per_rank, ...] of a tensor of all matrices, a view."""
        return full.unflatten(0, self.axes)[:, self.ranks.rank]

    def compute_(self, rates):
        for group in self.groups:
            group.pending_reduce()
        config = self.config
        update = self.look_ahead(self.momentum, self.received, rates["momentum"])
        update = self.ops.orthogonalize(update.flatten(0, 1), ORTHOGONALIZATIONS[config.orthogonalization])
        self.update(update.view(self.shard.shape), self.shard, self.low_bits, self.second_moment, self.multiplier,
                    rates["muon"], config.muon_weight_decay, config.second_moment_decay, config.cautious_decay,
                    self.drift, config.drift_decay, rates["drift"], rates["next drift"])


@dataclass(eq=False)
class Adam(Owner, Updated):
    """What tables and scalars share: Adam's update of `shard`, the part of the weights that this rank updates.

    With AdamTable it is what modded-nanogpt calls DistAdam: sharded Adam, whose gradients leave from backward hooks."""
    parameters: list[nn.Parameter]  # of one role
    rule: AdamRule
    config: OptimizerConfig
    ranks: Ranks
    ops: Ops

    def __post_init__(self):
        """Make the moments. Subclasses set `weights` and `shard` first."""
        self.exp_avg = torch.zeros_like(self.shard)
        self.exp_avg_sq = torch.zeros_like(self.shard)

    @property
    def role(self) -> str:
        return self.parameters[0].info.role

    def compute_(self, rates):
        wait, received = self.pending_reduce
        self.pending_reduce = None  # NCCL's handle and a view would keep the gradient alive
        wait()
        self.ops.adam(self.shard, received, self.exp_avg, self.exp_avg_sq, rates[self.role],
                      rates[f"{self.role} decay"], *self.rule.betas, self.config.adam_epsilon,
                      cautious=self.config.cautious_decay)
        for parameter in self.parameters:
            parameter.grad = None


class AdamTable(Adam):
    """One large table [rows, width]; each rank updates a slice of its rows.

    The moments have the dtype of the weights: bfloat16's rounding, 2^-8, is small against the 2 % and more of the
    way to a gradient, or its square, that a step moves them. So an update moves 14 bytes a weight instead of 22.
    """
    grads = None  # this rank's gradient, where it has memory of its own
    received = None  # copies of all ranks' gradients, if there is shared memory
    copies_grads = True

    def __post_init__(self):
        ranks = self.ranks
        parameter = self.parameter = self.parameters[0]
        self.weights = parameter.data = ranks.shared(parameter.data)
        self.shard = ranks.shard(self.weights)
        super().__post_init__()

        # A gradient that others read needs a fixed place in shared memory; otherwise it stays where it was made.
        if ranks.copy_stream:
            self.grads = ranks.shared(torch.zeros_like(self.weights))
            if self.copies_grads:
                self.received = self.shard.new_empty(ranks.world, *self.shard.shape)
        parameter.info.grad_view = self.grads

    def reduce_(self):
        grad = self.parameter.grad
        received = self.received
        if received is None:
            received = self.ranks.shard(grad)[None]
        else:
            grad = self.grads.copy_(grad)  # nothing to copy if kernels wrote it there
        self.pending_reduce = self.ranks.reduce_scatter(grad, received), received


class LookupTable(AdamTable):
    """A table whose gradients all come from lookups: few of its rows have one, all others are neither written nor read.

    Where memory is shared, the update reads those of other ranks where they are: copies would bring whole slices, and
    the tables whose gradients are the last ones would wait for them. Through NCCL or gloo whole tables travel.
    """
    copies_grads = False
    present = None  # see RowGrads, for all rows of this rank's gradient; None: a row without a gradient holds zeros
    row_grads = None  # of this rank's slice

    def __post_init__(self):
        super().__post_init__()
        ranks = self.ranks
        if not ranks.reads_all_memory:
            return
        self.present = ranks.shared(torch.zeros(len(self.weights), dtype=torch.int8, device=ranks.device))
        if self.grads is None:
            self.grads = self.parameter.info.grad_view = torch.empty_like(self.weights)
        grads, present = ranks.versions(self.grads), ranks.versions(self.present)
        self.row_grads = RowGrads.of(list(map(ranks.shard, grads)), list(map(ranks.shard, present)))

    def receive_grad(self, grad: Tensor, *lookup: Tensor):
        """Add the gradient [T, width] of a lookup to the table's. The first one of a step begins a new one."""
        table = self.parameter
        add = table.grad is not None
        if not add:
            table.grad = memory_for_grad(table)
        self.ops.embedding_grad(grad, lookup, table.grad, self.present, add)

    def reduce_(self):
        if self.row_grads is None:
            return super().reduce_()
        grad = self.parameter.grad
        if grad.data_ptr() != self.grads.data_ptr():  # autograd's, which plain operators leave it to: of all rows
            self.grads.copy_(grad)
            self.present.fill_(1)
        self.pending_reduce = self.ranks.meet(self.grads), self.row_grads


@dataclass
class SparseStep:
    """What a SparseTable knows between the start of a step and its end."""
    ids: list[Tensor]  # the rows that each micro-batch reads, [T * pieces, K]
    grads: list[Tensor]  # of the lookups so far, [T * pieces, columns] for each micro-batch
    lookup: tuple[Tensor, ...] | None = None  # of all ranks in the step before, see group_ids
    wait_sorted: Callable | None = None  # makes the current stream wait for it


@dataclass(eq=False)
class SparseTable(Adam):
    """One table [rows, columns] of which a step reads few rows, for the n-grams [table_rows * pieces, width / pieces].

    The ranks gather the gradients of all lookups: Adam without a first moment and with a second moment of one number a
    row (record 92). Where memory is shared, the rows are dealt out: each rank updates its own, and reads those of
    others from where they are. Else every rank has all rows and updates them alike.

    Updates are a step late: a step keeps its gradients, the next one brings them to the ranks while the model works.
    Those of the last step of a stage are dropped, for the next stage's steps have other sizes.
    """
    most_lookups: tuple[int, int]  # the shape of a rank's in the largest step, [T * pieces, K] of all micro-batches
    peers = None  # PeerRows, if rows are dealt out

    def __post_init__(self):
        ranks = self.ranks
        (parameter,) = self.parameters
        if ranks.deals_rows:
            # Rows are zero until a run trains or resumes. Beside their shared memory there may be no room for another.
            parameter.data = parameter.data.new_zeros(()).expand_as(parameter)
            parameter.data = ranks.shared(parameter.data)
            parts = ranks.versions(parameter.data)
            self.peers = PeerRows(parts, torch.tensor([part.data_ptr() for part in parts], device=ranks.device))
        self.weights = parameter.data
        self.exp_avg_sq = torch.zeros(len(parameter), device=ranks.device)
        self.last_step = torch.zeros_like(self.exp_avg_sq)  # the step that last updated each row
        # What this rank looked up in the step before, and the gradients; smaller steps use the first rows.
        self.late_ids = torch.zeros(self.most_lookups, dtype=torch.int32, device=ranks.device)
        self.late_grads = self.weights.new_zeros(self.most_lookups[0], self.weights.size(1))

        def new_buffer(rows, columns, dtype):
            return ranks.shared(torch.empty(rows, columns, dtype=dtype, device=ranks.device))

        # Shared memory is never freed, so each size is allocated once. Other memory is given back after a step.
        self.buffer = functools.cache(new_buffer) if ranks.copy_stream else new_buffer

    def gather_(self, barrier: bool = True):
        """Of rows that are dealt out nothing moves: others may read them once every rank has updated its own. So this
        is a barrier whatever `barrier` says."""
        self.pending_gather = self.ranks.meet(self.weights)

    def sum_rows(self, ids: Tensor, _: Tensor) -> Tensor:
        """What the model looks up, where rows are dealt out."""
        return self.ops.peer_rows(ids, self.peers)

    def receive_grad(self, grad: Tensor, *_: Tensor):
        self.under_way.grads.append(grad)

    def all_gather(self, parts: list[Tensor]) -> tuple[Tensor, Callable]:
        """What all ranks have for the micro-batches of a step, [its tokens * pieces, ...], and the wait for it."""
        full = parts[0]
        rows = self.ranks.world * sum(map(len, parts))
        if rows > len(full):  # else one rank with one micro-batch, which has all
            full = self.buffer(rows, full.size(1), full.dtype)
            torch.cat(parts, out=self.ranks.shard(full))
        return full, self.ranks.all_gather(full)

    def begin_stage(self, lookups: int):
        """Forget the last stage's gradients. Zeros take their place, for the `lookups` that a step of this rank makes.
        They change nothing, and are spread over rows: the sum of many that belong to one row would take long."""
        self.late_grads.zero_()
        ids = self.late_ids[:lookups]
        first = self.ranks.rank * ids.numel()
        numbers = torch.arange(first, first + ids.numel(), device=self.ranks.device)
        ids.copy_(numbers.remainder_(len(self.weights) * self.ranks.row_parts).view_as(ids))

    def late(self, ids: list[Tensor]) -> tuple[Tensor, Tensor]:
        """What the step before looked up, as many rows as `ids` are, and the gradients: views."""
        count = sum(map(len, ids))
        return self.late_ids[:count], self.late_grads[:count]

    def start_step(self, ids: list[Tensor]):
        """Start a step whose micro-batches will read the rows `ids` [T * pieces, K]: exchange what the step before
        looked up, and the gradients, and sort the rows while the model works."""
        step = self.under_way = SparseStep(ids, [])  # frees the last one's sorted rows before these are sorted
        late_ids, late_grads = self.late(ids)
        full, wait = self.all_gather([late_ids])

        def sort_rows():
            wait()
            step.lookup = group_ids(full)

        step.wait_sorted = self.ranks.on_side_stream(sort_rows)
        grads, wait_grads = self.all_gather([late_grads])
        self.pending_reduce = wait_grads, grads

    def keep(self):
        """At the end of a step, leave the next one what was looked up, and the gradients."""
        step = self.under_way
        late_ids, late_grads = self.late(step.ids)
        torch.cat(step.ids, out=late_ids)
        torch.cat(step.grads, out=late_grads)
        step.grads = []

    def compute_(self, rates):
        wait, grads = self.pending_reduce
        self.pending_reduce = None  # so that the memory of `grads` is given back
        wait()
        self.under_way.wait_sorted()
        self.ops.sparse_adam(grads, self.under_way.lookup, self.weights, self.exp_avg_sq, self.last_step, rates["step"],
                             rates[self.role], rates[f"{self.role} decay"], self.rule.betas[1],
                             self.config.adam_epsilon, 1 / self.ranks.world,  # the gradient is the mean of the ranks'
                             rank=self.ranks.rank, parts=self.ranks.row_parts,
                             pooling=self.config.ngram_pooling, cautious=self.config.cautious_decay)


class AdamScalars(Adam):
    """All small parameters of a role in one flat float32 buffer, which every rank updates alike after an all-reduce."""

    def __post_init__(self):
        size = sum(aligned(p.numel()) for p in self.parameters)
        self.weights = self.shard = torch.zeros(size, device=self.ranks.device)
        self.grads = torch.zeros_like(self.weights)
        self.flatten()
        super().__post_init__()

    def reduce_(self):
        views = [p.info.grad_view for p in self.parameters]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        torch._foreach_copy_(views, grads)
        self.pending_reduce = self.ranks.all_reduce_mean(self.grads), self.grads[None]


class Optimizer:
    """All owners, and the order of their phases: the timeline at the head of this section."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, ranks: Ranks, ops: Ops, most_tokens: int):
        """`most_tokens` is how many tokens of a step this rank has at most."""
        if config.orthogonalization not in ORTHOGONALIZATIONS:
            fail("orthogonalization", f"one of {', '.join(ORTHOGONALIZATIONS)}", config.orthogonalization,
                 "choose one of them in OptimizerConfig")

        self.ranks = ranks
        rules = dict(config.rules)
        matrices = collections.defaultdict(list)  # by their shape
        scalars = collections.defaultdict(list)  # by their role
        self.dense = []
        self.sparse = []
        for parameter in model.parameters():
            info = parameter.info
            if info.role not in rules:
                fail("rules", f"one for the role {info.role}", "none", "add it to OptimizerConfig.rules")
            rule = rules[info.role]
            if isinstance(rule, MuonRule):
                matrices[info.matrix_shape].append(parameter)
            elif rule.sharded:
                kind = LookupTable if rule.looked_up else AdamTable
                self.dense.append(kind([parameter], rule, config, ranks, ops))
            elif rule.sparse:
                table = SparseTable([parameter], rule, config, ranks, ops, model.config.lookup_shape(most_tokens))
                self.sparse.append(table)
                if table.peers:
                    model.sum_rows = table.sum_rows
            else:
                scalars[info.role].append(parameter)
        self.banks = [MatrixBank(parameters, rules, config, ranks, ops) for parameters in matrices.values()]
        self.scalars = [AdamScalars(members, rules[role], config, ranks, ops) for role, members in scalars.items()]
        self.updated = [*self.banks, *self.dense, *self.sparse, *self.scalars]
        self.averaged = [*self.banks, *self.dense] if config.averaged_share else []
        for owner in self.averaged:
            owner.average = torch.zeros_like(owner.shard, dtype=torch.float32)

        # What travels and hears from hooks during the backward pass: all but scalars and rows of n-grams.
        self.groups = [group for bank in self.banks for group in bank.groups]
        self.hooked = [*self.groups, *self.dense]
        for owner in (*self.hooked, *self.sparse):
            for parameter in owner.parameters:
                parameter.info.owner = owner
                if owner in self.hooked:
                    parameter.register_post_accumulate_grad_hook(self._ready)

        # What is gathered, in the order in which the model reads it. Tables that come before any matrix are updated on
        # a stream of their own and gathered at once, because the next step starts with them.
        in_order = dict.fromkeys(p.info.owner for p in model.in_order() if p.info.owner)
        self.sharded = [owner for owner in in_order if owner not in self.sparse or owner.peers]
        dense_and_matrices = [owner for owner in self.sharded if owner not in self.sparse]
        for table in itertools.takewhile(lambda owner: owner in self.dense, dense_and_matrices):
            table.side = 1
            table.gathers_at_once = True

    def start_step(self, ids: list[Tensor]):
        """Start a step, given the rows [T * pieces, K] of the sparse table that each of its micro-batches reads."""
        # How many gradients each owner still has to get: every micro-batch brings one of each parameter.
        self.pending_grads = {owner: len(owner.parameters) * len(ids) for owner in self.hooked}
        self.reduced = []  # the owners whose gradients have left, in that order

        # Phase 1: gather. Only the first needs a barrier: after it every rank has updated all its shards.
        waiting = [owner for owner in self.sharded if not owner.gathers_at_once]
        for number, owner in enumerate(waiting):
            owner.gather_(barrier=not number)

        # Phase 2: exchange the last step's row numbers and their gradients.
        for table in self.sparse:
            table.start_step(ids)

    def _ready(self, parameter: nn.Parameter):
        """Phase 3: a backward hook, which reduces an owner when its last gradient of the step is there."""
        owner = parameter.info.owner
        self.pending_grads[owner] -= 1
        if not self.pending_grads[owner]:
            owner.reduce_()
            self.reduced.append(owner)

    @torch.no_grad()
    def step(self, rates: dict[str, Tensor]):
        """Update everything after the last backward pass. `rates` holds 0-dimensional tensors, see step_rates."""
        # Phase 1 ends: no gather may stay under way. That of a table which no layer reads has not been waited for yet.
        for owner in self.sharded:
            owner.wait_gather()

        # Phase 3 ends: scalars have no hook, and a group is not complete if one of its layers had no gradient.
        for owner in (*self.scalars, *self.groups):
            if owner not in self.reduced:
                owner.reduce_()

        # Phase 4: update on three streams: banks in reverse order, and tables, if they had a gradient, in the order in
        # which these left. Rows of n-grams come last: no rank reads them any more when its head's gradient has left.
        tables = [owner for owner in self.reduced if owner in self.dense]
        due = [*reversed(self.banks), *tables, *self.scalars, *self.sparse]
        by_side = {side: [each for each in due if each.side == side] for side in (0, 1, None)}

        def update(side):
            for each in by_side[side]:
                each.compute_(rates)
                if each in tables and each.gathers_at_once:
                    each.gather_()

        # compute_ drops a table's gradient on the host before side stream 1 has read it. Without a reference, the
        # allocator would give its memory to the kernels that the compute stream gets next.
        grads_in_use = [table.parameter.grad for table in by_side[1]]
        waits = [self.ranks.on_side_stream(functools.partial(update, side), side) for side in (0, 1)]
        update(None)

        # The compute stream waits for the rest.
        for wait in waits:
            wait()
        for table in by_side[1]:
            table.wait_gather()
        del grads_in_use
        for table in self.sparse:
            table.keep()

    def begin_stage(self, lookups: int):
        for table in self.sparse:
            table.begin_stage(lookups)

    def gather(self):
        """Give every rank all weights, before anything but a training step reads them."""
        for owner in self.sharded:
            owner.gather_()
            owner.wait_gather()

    def average(self, rate: float, share: float = 0.0):
        for owner in self.averaged:
            owner.average_(rate, share)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, the model's parameters included."""
        return {f"{type(owner).__name__}{number}.{name}": tensor for number, owner in enumerate(self.updated)
                for name, tensor in owner.state().items()}


# ==== 6. Training =====================================================================================================
def state_hash(state: dict) -> str:
    """A checksum of named tensors, most of it computed on the device. It tells whether two states are equal: any change
    of one value shows, and so do two exchanged ones, but not changes that cancel in every sum of a row or a column."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        words = tensor.detach().reshape(-1).view(torch.uint8)
        if len(words) % 8 == 0:  # a conversion to int64 would need eight times the memory of the bytes
            words = words.view(torch.int64)

        table = words.view(-1, math.gcd(len(words), 4096))
        digest.update(name.encode())
        for axis in (0, 1):  # a change of one entry changes a sum of each kind, at its place
            digest.update(table.sum(axis, dtype=torch.int64).cpu().numpy())
    return digest.hexdigest()[:16]


# ---- memory and data -------------------------------------------------------------------------------------------------
# Memory of training in bytes a token of a micro-batch, by the operators of the MLP. With FP8 the speedrun takes
# 153,000, computed from what it took with wider MLPs, and the rest is for larger models; the other two were measured
# for one. Logits are not included: a stage's classes give their size.
PEAK_TOKEN_BYTES = {"fp8": 210_000, "bf16": 359_000, "reference": 849_000}
RECOMPUTED_TOKEN_BYTES = 61_000  # the same, where each layer is computed again in the backward pass
VALIDATION_TOKEN_BYTES = 39_000  # the same for a validation window, with its logits
LATER_BYTES = 7 * 2**28  # for gradients and exchanges, which are not there yet when the room is measured
USEFUL_MICRO_BATCH_TOKENS = 294_912  # the largest batch of a step; halves of 196,608 took 1 % longer


def micro_batch_chunks(stage: Stage, ranks: Ranks, most_tokens: int) -> int:
    """How many of a rank's batch chunks form one micro-batch.

    All micro-batches of a step have equally many: as many as fit into `most_tokens` tokens, and at least one."""
    chunks = CHUNKS // ranks.world
    while chunks > 1 and chunks * stage.chunk_tokens > most_tokens:
        chunks //= 2
    return chunks


def room_for_activations(ranks: Ranks) -> float:
    """Bytes that are left beside the model and its optimizer on the fullest GPU; infinite without a GPU."""
    if not ranks.on_gpu:
        return math.inf
    torch.cuda.empty_cache()  # of tensors that have moved to shared memory
    return min(ranks.gather_objects(0.95 * torch.cuda.mem_get_info(ranks.device)[0])) - LATER_BYTES


def memory_plan(preset: Preset, ops: Ops, room_bytes: float) -> tuple[bool, dict[Stage, int]]:
    """How training fits into what room_for_activations says: (recompute, tokens of a micro-batch at most, by stage).

    recompute: whether layers are computed again in the backward pass. That is chosen only where one batch chunk at a
    time would not fit otherwise. The batch of a step never changes. Fails if that does not fit either, or a window of
    the validation."""
    for recompute in (False, True):
        layer_bytes = RECOMPUTED_TOKEN_BYTES if recompute else PEAK_TOKEN_BYTES[ops.names["mlp"]]
        # Of each token: its logits in bfloat16, and their gradient.
        token_bytes = {stage: layer_bytes + 4 * (stage.sampled_classes or preset.model.padded_vocabulary)
                       for stage in preset.stages}
        needs = [(size * stage.chunk_tokens, f"one batch chunk of {stage.chunk_tokens:,} tokens")
                 for stage, size in token_bytes.items()]
        window = preset.val_window_tokens
        needs.append((VALIDATION_TOKEN_BYTES * window, f"a window of {window:,} tokens of the validation"))
        needed, what = max(needs)
        if needed <= room_bytes:
            return recompute, {stage: int(min(room_bytes / size, USEFUL_MICRO_BATCH_TOKENS))
                               for stage, size in token_bytes.items()}

    fail("GPU memory", f"{needed / 2**30:.1f} GiB beside the model for {what}",
         f"{room_bytes / 2**30:.1f} GiB",
         "end other programs on this GPU (nvidia-smi), --preset sprint-small, smoke-gpu or smoke, or "
         "--micro-batch-tokens, which goes without this estimate", EXIT_HARDWARE)


def open_corpus(preset: Preset, folder: Path) -> tuple[TokenStream, list, str, str]:
    """What a run reads, checked: training stream, validation windows, the hash of their tokens, that of all files."""
    vocabulary = preset.model.vocabulary
    wanted = max(preset.train_tokens, scheduled_tokens(preset, preset.steps) + 1)  # somebody edits stages alone
    stream = TokenStream(folder, wanted, vocabulary)
    stream.require(preset)
    shard = find_shards(folder, "val")[0]
    windows, digest = validation_windows(shard, preset.val_tokens, preset.val_window_tokens, vocabulary)
    return stream, windows, digest, files_hash([*stream.paths, shard])


def automatic_length(preset: Preset, folder: Path) -> float:
    """The --length that "auto" stands for: one pass over the training shards that are there."""
    return fitting_length(preset, TokenStream(folder, math.inf, preset.model.vocabulary).usable)


# ---- the trainer -----------------------------------------------------------------------------------------------------
class Uploads:
    """Where batches from the host arrive on the GPU. The host is a step ahead, so they come beside the last step, on a
    stream of their own. On the stream of the steps 196,608 tokens would take .25 ms."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.free = torch.cuda.Event()  # when the memory may be written again
        self.buffers = {}  # by index of the stage

    def allocate(self, index: int, likes: list[Tensor]):
        self.buffers[index] = [torch.empty_like(like) for like in likes]
        self.done()  # what is queued already may still use this memory, which had another owner

    def bring(self, index: int, sources: list[Tensor]) -> list[Tensor]:
        """Copies of `sources` for the current stream to read; then call `done`."""
        self.stream.wait_event(self.free)
        with torch.cuda.stream(self.stream):
            for buffer, source in zip(self.buffers[index], sources, strict=True):
                buffer.copy_(source, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.buffers[index]

    def done(self):
        self.free.record()


@dataclass(eq=False)
class Trainer:
    """One compiled model, its optimizer and its data."""
    preset: Preset
    ranks: Ranks
    ops: Ops
    clock: Clock
    folder: Path  # of the shards
    micro_batch_tokens: int | None = None  # at most so many; None: as many as fit into the GPU's memory and are of use

    def __post_init__(self):
        self.device = self.ranks.device
        self.ranks.agree("data", self._open_data, "copy the shards of one node to the others")
        self._build_model()
        self._prepare_schedule()

        # By index of the stage: (buffers on the device, the micro-batches in them), and (captured step, its loss).
        # The pool of the graphs' memory comes after these because it must outlive the graphs.
        self.inputs = {}
        self.graphs = {}
        self.uploads = Uploads() if self.ranks.on_gpu else None
        self.graph_pool = torch.cuda.MemPool() if self.ops.graphs else None

    def _open_data(self) -> str:
        """Open the training stream, and pack this rank's share of the validation windows. Returns the data's hash."""
        preset = self.preset
        self.stream, windows, self.validation_hash, self.data_hash = open_corpus(preset, self.folder)
        sizes = None if tokenizer_file(self.folder) else token_bytes(preset.model.vocabulary)
        self.validation_bytes = None
        if sizes is not None:
            self.validation_bytes = sum(int(sizes[piece[1:]].sum()) for piece in itertools.chain(*windows))
        self.validation = [pack({0: pieces}, preset.model, self.ranks.on_gpu)
                           for pieces in windows[self.ranks.rank::self.ranks.world]]
        return self.data_hash

    def _build_model(self):
        """Build the model and its optimizer, then choose micro-batches by the memory that is left."""
        preset = self.preset
        self.model = GPT(preset.model, self.ops, self.device, self.ranks.row_parts)
        self.model.reset(seed=0)
        most_tokens = max(stage.batch_tokens for stage in preset.stages) // self.ranks.world
        self.optimizer = Optimizer(self.model, preset.optimizer, self.ranks, self.ops, most_tokens)

        self.recompute = False
        most_tokens = dict.fromkeys(preset.stages, self.micro_batch_tokens)
        if self.micro_batch_tokens is None:
            room_bytes = room_for_activations(self.ranks)
            self.recompute, most_tokens = self.ranks.agree(
                "micro-batches", lambda: memory_plan(preset, self.ops, room_bytes), "use GPUs of one kind")
        self.micro_chunks = {stage: micro_batch_chunks(stage, self.ranks, most_tokens[stage])
                             for stage in preset.stages}
        if self.recompute:
            for block in self.model.blocks.values():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False,
                                                  preserve_rng_state=False)

    def sizes_of_micro_batches(self) -> str:
        """In words, for messages and checkpoints."""
        sizes = ", ".join(f"{self.micro_chunks[stage] * stage.chunk_tokens:,}" for stage in self.preset.stages)
        return f"{sizes} tokens by stage{', layers recomputed' if self.recompute else ''}"

    def _prepare_schedule(self):
        """Put what depends on the step on the device beforehand.

        So no step copies it or waits for it, and a value that changes does not recompile anything."""
        preset = self.preset
        stages = range(len(preset.stages))
        positions = max(preset.val_window_tokens, *(stage.document_cap_tokens for stage in preset.stages))
        self.geometries = [rotary_geometry(preset, index, positions, self.device) for index in stages]
        self.final_geometry = rotary_geometry(preset, stages[-1], positions, self.device, preset.val_attention_windows)

        steps = range(preset.steps)
        rates = [step_rates(preset, step) for step in steps]
        self.rate_names = list(rates[0])
        self.rates = torch.tensor([list(row.values()) for row in rates], device=self.device)
        self.target_weights = [torch.tensor(target_weights(preset, step), device=self.device) for step in steps]

    def training_step(self, step: int, batches: list[HostBatch]) -> Tensor:
        """Forward, backward and update over this rank's micro-batches; a replay where the stage's step is captured.

        Returns their summed loss in nats, each target times its weight: a scalar on the device that the next step may
        overwrite."""
        index = stage_index(self.preset, step)
        self._bring_inputs(index, batches, self.rates[step], self.target_weights[step])
        if index not in self.graphs:
            return self._run_step(index)
        graph, loss = self.graphs[index]
        graph.replay()
        return loss

    def _bring_inputs(self, index: int, batches: list[HostBatch], *numbers: Tensor):
        """Copy a step's batches, and its numbers, which are on the device, to where the step of a stage reads them."""
        sources = [batch.data for batch in batches]
        if index not in self.inputs:
            copies = [torch.empty_like(source, device=self.device) for source in (*sources, *numbers)]
            # zip ends with the batches: the copies of the numbers need no views.
            self.inputs[index] = copies, [batch.views(copy) for batch, copy in zip(batches, copies)]
            if self.uploads:
                self.uploads.allocate(index, copies[:len(sources)])

        if self.uploads:
            sources = self.uploads.bring(index, sources)
        for copy, source in zip(self.inputs[index][0], (*sources, *numbers)):
            copy.copy_(source, non_blocking=True)
        if self.uploads:
            self.uploads.done()

    def begin_stage(self, stage: Stage):
        """Before the first step of a stage: its lookups are of another number than the last one's."""
        lookups, _ = self.preset.model.lookup_shape(stage.batch_tokens // self.ranks.world)
        self.optimizer.begin_stage(lookups)

    def _run_step(self, index: int) -> Tensor:
        """One step of a stage, on the inputs in its buffers. It reads nothing else that changes within the stage.

        With graphs this code runs only twice a stage, in the warm-up and when its step is captured; replays run none
        of it. So it must not branch on a step or on a value."""
        (*_, rates, target_weights), micro_batches = self.inputs[index]
        total = torch.zeros((), device=self.device)

        self.optimizer.start_step([documents.ngrams for documents in micro_batches])
        for documents in micro_batches:
            loss = self.model(documents, self.geometries[index], target_weights)
            # The optimizer averages over the ranks: with this factor the gradient is the mean over all batch chunks.
            (loss * (self.ranks.world / CHUNKS)).backward()
            total += loss.detach()

        self.optimizer.step(dict(zip(self.rate_names, rates.unbind())))
        return total

    def capture(self, index: int):
        """Record the step of a stage, which must have run before, as a CUDA graph.

        To replay it costs the host next to nothing."""
        graph = torch.cuda.CUDAGraph()
        # Thread-local, so that other threads (NCCL's, the allocator of pinned memory) may go on talking to the device.
        with torch.cuda.graph(graph, pool=self.graph_pool.id, stream=torch.cuda.current_stream(),
                              capture_error_mode="thread_local"):
            loss = self._run_step(index)
        self.graphs[index] = graph, loss

    def evaluate(self, batch: HostBatch, geometry: Geometry) -> Tensor:
        """Summed cross-entropy of a window. It borrows the memory that captured steps need only while they run."""
        with torch.cuda.use_mem_pool(self.graph_pool) if self.graph_pool else contextlib.nullcontext():
            return self.model.evaluate(batch.to(self.device), geometry)

    @torch.no_grad()
    def validate(self, geometry: Geometry) -> float:
        """Mean cross-entropy in nats a token over the validation windows of all ranks, every token counted."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self.validation:
            self.ranks.heartbeat("the validation began")
            total += self.evaluate(batch, geometry)
        return float(self.ranks.sum(total)) / self.preset.val_tokens

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the training changes."""
        return self.optimizer.state() | dict(self.model.named_buffers())

    def gather(self):
        """Give every rank all weights and inclusion rates, before anything but a training step reads them."""
        self.optimizer.gather()
        self.share_counts()

    def share_counts(self):
        """Make inclusion rates of what all ranks have counted."""
        counts = self.ranks.sum(self.model.inclusion_counts.clone()) + 0.5  # a rate of 0 would make the loss infinite
        self.model.inclusion_rates.copy_(counts / counts.max())

    def change_classes(self, stage: Stage):
        """Begin a stage that samples otherwise than the one before: count anew, or use what was counted."""
        if stage.sampled_classes is None:
            self.share_counts()
        else:
            self.model.inclusion_counts.zero_()

    def initialise(self, seed: int) -> str:
        """Clear all state and draw the weights. Returns the hash of this initial state."""
        for tensor in self.state().values():
            tensor.zero_()
        self.model.reset(seed)
        self.model.zero_grad()
        return state_hash(self.state())

    def warm_up(self) -> int:
        """On generated documents, run and capture a step of every stage, and run the validation.

        Returns how many variants of the step there are."""
        preset = self.preset
        ranks = self.ranks
        first_step = 0
        for number, stage in enumerate(preset.stages):
            ranks.heartbeat(f"the warm-up of stage {number}", WARM_UP_PATIENCE)
            chunks = {chunk: generated_pieces(stage.chunk_tokens, stage.document_cap_tokens, seed=7 + chunk)
                      for chunk in range(self.micro_chunks[stage])}
            batch = pack(chunks, preset.model, ranks.on_gpu, stage.sampled_classes)
            count = CHUNKS // ranks.world // self.micro_chunks[stage]
            self.training_step(first_step, [batch] * count)
            first_step += stage.steps

        if self.ops.graphs:
            for index in reversed(self.inputs):  # the last stage first: the others fit into its memory
                ranks.heartbeat(f"the capture of stage {index}", WARM_UP_PATIENCE)
                self.capture(index)

        ranks.heartbeat("the warm-up of the validation", WARM_UP_PATIENCE)
        self.optimizer.average(1.0, 0.5)
        window = generated_pieces(preset.val_window_tokens, preset.val_window_tokens, seed=7)
        self.evaluate(pack({0: window}, preset.model, ranks.on_gpu), self.final_geometry)
        return len(self.inputs)


# ---- what a run reports ----------------------------------------------------------------------------------------------
def token_bytes(vocabulary: int) -> np.ndarray | None:
    """How many bytes of text each of GPT-2's tokens stands for, BOS for none. None without that vocabulary's file,
    which comes with data/sample: GPT-2's encoder.json, by the name that it has in tiktoken's cache."""
    path = Path(__file__).with_name("data") / "sample" / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    if not path.is_file():
        return None
    try:
        encoder = json.loads(path.read_text(encoding="utf-8"))  # text -> id, with a character for each byte
    except ValueError as error:  # no JSON, or no UTF-8
        fail(f"vocabulary {path}", "GPT-2's encoder.json", f"'{error}'", "git checkout data/sample, or remove it")
    if len(encoder) != vocabulary:
        return None
    sizes = np.zeros(vocabulary, int)
    for text, token in encoder.items():
        sizes[token] = len(text)
    sizes[BOS] = 0
    return sizes


def largest_weights(trainer: Trainer, log: RunLog) -> dict:
    """The largest magnitude of each kind of weights whose products are FP8. Also prints it beside the kind's range.

    Beyond the range FP8 saturates silently: there is a warning from 90 % of it on."""
    largest = {}
    for part, ranges in FP8_PARTS.items():
        for kind, limit in ranges.items():
            if "fp8" in trainer.ops.names[part]:
                weights = [weight.data for name, weight in trainer.model.named_parameters()
                           if name.rpartition(".")[2] == kind]
                largest[kind] = max((float(weight.abs().max()) for weight in weights), default=0.0)
                warning = " (WARNING: near saturation)" if largest[kind] >= 0.9 * limit else ""
                log.say(f"largest FP8 weight of {kind}: {largest[kind]:.2f} of {limit}{warning}")
    return largest


def require_finite(what: str, loss: float, found: str, ranks: Ranks):
    """Fail, on every rank alike, where a training has diverged."""
    if not math.isfinite(loss):
        fail(what, "a finite number", found, "lower the learning rate or report this seed", EXIT_NUMERICS,
             silent=ranks.rank > 0)


class Meter:
    """Losses and times of the logged steps.

    What is recorded is read only when the next record comes. The device has surely finished it by then, so that
    waiting for it returns at once. The time of a step is the mean over the interval since the record before."""

    def __init__(self, log: RunLog, trainer: Trainer, total_steps: int, first_step: int = 0):
        self.log = log
        self.ranks = trainer.ranks
        self.clock = trainer.clock
        self.total_steps = total_steps
        self.total_tokens = scheduled_tokens(trainer.preset, total_steps)
        self.step = first_step  # the last step in the log, counted from 1, and all tokens up to it
        self.tokens = scheduled_tokens(trainer.preset, first_step)
        self.pending = None  # recorded and not yet in the log: (step, stage, start, end, values)
        self.stops = False  # whether any rank had been asked to stop by the last step in the log

    def restart(self):
        """Start the interval now: the clock has just begun, or goes on after a pause.

        Now is an event in the device's stream, or milliseconds of the clock where there is no GPU."""
        self.start = self.clock.milliseconds()
        if self.ranks.on_gpu:
            self.start = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def record(self, step: int, loss: Tensor, stage: Stage):
        """End an interval with a step (counted from 1) and this rank's loss. A collective: losses are summed.

        Each stage's last step must be recorded, so that no interval spans two stages."""
        self.flush()
        values = torch.stack((loss, torch.full_like(loss, self.ranks.stop_signal)))
        values = self.ranks.sum(values).to("cpu", non_blocking=True)
        start = self.start
        self.restart()
        self.pending = step, stage, start, self.start, values

    def flush(self):
        """Log what was recorded last, and stop if any rank was asked to. Every rank comes to the same decision."""
        self.log_pending()
        if self.stops:
            raise Interrupted(max(self.ranks.gather_objects(self.ranks.stop_signal)), silent=self.ranks.rank > 0)

    def log_pending(self):
        """Log what was recorded last. Failure, on every rank, if the loss is not finite."""
        if self.pending is None:
            return
        step, stage, start, end, values = self.pending
        self.pending = None
        if self.ranks.on_gpu:
            end.synchronize()
            elapsed_ms = start.elapsed_time(end)
        else:
            elapsed_ms = end - start

        steps = step - self.step
        self.step = step
        self.tokens += steps * stage.batch_tokens

        total_loss, stop_signals = values.tolist()
        self.stops = stop_signals > 0
        loss = total_loss / stage.batch_tokens
        ms_per_step = elapsed_ms / steps
        tokens_per_ms = stage.batch_tokens / ms_per_step
        left_s = (self.total_tokens - self.tokens) / tokens_per_ms / 1e3
        share = self.tokens / self.total_tokens

        self.log.line("step", step=step, train_loss=round(loss, 6), tokens=self.tokens,
                      ms_per_step=round(ms_per_step, 3))
        self.log.say(f"step {step:5d}/{self.total_steps}   train loss {loss:7.4f}   {ms_per_step:8.2f} ms/step   "
                     f"{tokens_per_ms:6.1f} tokens/ms   {left_s:6.1f} s left",
                     f"[{'#' * int(40 * share):40}] {share:4.0%}, {left_s:.0f} s left")
        require_finite("training loss", loss, f"{loss} at step {step}", self.ranks)


def costs(ranks: Ranks, clock: Clock, price: float) -> str:
    """What a run has cost so far, at a price for an hour of one GPU."""
    def cost(seconds):
        return ranks.world * price * seconds / 3600

    return (f"cost at {price:g} an hour for each of {ranks.world} GPU(s): {cost(clock.since_start()):.4f} since the "
            f"start, {cost(clock.milliseconds() / 1e3):.4f} of it on the clock")


def compiled_graphs() -> int:
    """How many graphs and kernels have been compiled so far. A timed run must not move this number.

    No other function knows these internals of torch and Triton."""
    from torch._dynamo.utils import counters
    count = counters["stats"]["unique_graphs"]
    for kernel in globals().values():
        for cache in getattr(kernel, "device_caches", {}).values():  # of a Triton kernel
            count += len(cache[0])
    return count


def peak_memory_mib(ranks: Ranks) -> int | None:
    if not ranks.on_gpu:
        return None
    # The allocator does not count what this rank shares with others.
    shared = sum(parts[ranks.rank].nbytes for _, parts in ranks.peers.values())
    return (torch.cuda.max_memory_allocated(ranks.device) + shared) >> 20


# ---- checkpoints: a run that goes on after a stop --------------------------------------------------------------------
CHECKPOINT_FORMAT = "train_gpt checkpoint 2"


def checkpoint_seal(content: dict) -> str:
    """A hash of a checkpoint's facts, which are all but its tensors; of those the facts hold a hash."""
    facts = {name: value for name, value in content.items() if name not in ("state", "seal")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_checkpoint(path: Path) -> dict:
    """What Checkpoints.write wrote. Its tensors stay in the file, which is mapped into memory, until they are read."""
    if path.is_fifo():  # to read it would wait for ever
        fail(f"checkpoint {path}", "a file", "a named pipe", "name another")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        found = content["format"] if isinstance(content, dict) else type(content).__name__
        if found == CHECKPOINT_FORMAT and content["seal"] != checkpoint_seal(content):
            found = "a file with other facts than were written"
    except OSError:
        raise
    except Exception as error:  # a foreign or a cut file: torch's errors for them are of many kinds
        found = f"'{str(error).partition(chr(10))[0]}'"
    if found != CHECKPOINT_FORMAT:
        fail(f"checkpoint {path}", f"{CHECKPOINT_FORMAT}, as --checkpoint writes it", found,
             "name another file")
    return content


def to_disk(file: IO):
    """Before a file is renamed: the rename may reach the disk before the content does, and the power go between."""
    file.flush()
    os.fsync(file.fileno())


def problem_of_saving(content: dict, path: Path) -> str:
    """Write a checkpoint. Returns what the system or torch says where that fails, else nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        with path.open("rb+") as file:
            to_disk(file)
    except (OSError, RuntimeError) as error:  # the latter is torch's for a full disk
        return str(error).partition("\n")[0]
    return ""


@dataclass
class Checkpoints:
    """The state of a run in a file, and with several ranks in one for each: written every so many steps, and read once
    where a run goes on that was stopped."""
    path: Path | None = None  # to write to
    every: int | None = None  # steps
    seed: int = 0
    step: int = 0  # how many were done when this process began
    digest: int = 0  # of this rank's tokens in them
    begin: dict | None = None  # the checkpoint to go on from

    @staticmethod
    def own_path(path: Path, ranks: Ranks) -> Path:
        # `.` and `/` have no name, and are refused as the folders that they are.
        return path if ranks.world == 1 or not path.name else path.with_name(f"{path.name}.{ranks.rank}")

    @staticmethod
    def run_facts(trainer: Trainer) -> dict[str, str]:
        """What must be the same where a run goes on, so that it ends as without a stop."""
        preset = trainer.preset
        ranks = trainer.ranks
        return {
            "preset": f"{preset.name}, {preset.steps} steps, {hashlib.sha256(repr(preset).encode()).hexdigest()[:8]}",
            "script": script_hash(),
            "data": trainer.data_hash,
            "processes": f"{ranks.world}, n-gram rows in {ranks.row_parts} parts, rank {ranks.rank}",
            "operators": str(trainer.ops.names),
            "micro-batches": trainer.sizes_of_micro_batches(),  # follow from the memory that is free at a start
        }

    def read(self, path: Path, trainer: Trainer, steps: int, seed: int | None):
        """Take over a checkpoint of the same run, of at most `steps` steps: after all of them the validation is left.
        If a seed is given, it must be the checkpoint's. The state is restored later, by `restore`."""
        def found():
            content = read_checkpoint(self.own_path(path, trainer.ranks))
            for name, here in self.run_facts(trainer).items():
                if content["run"][name] != here:
                    fail(f"checkpoint {path}: {name}", content["run"][name], here, "go on with what the run began with")
            if seed not in (None, content["seed"]):
                fail(f"checkpoint {path}: seed", content["seed"], seed, "leave --seed out")
            if content["step"] > steps:
                fail(f"checkpoint {path}: step", f"at most {steps}, where the run ends", content["step"],
                     "leave --resume out, or a larger --stop-after")

            self.seed = content["seed"]
            self.step = content["step"]
            self.digest = int(content["digest"], 16)
            self.begin = content
            return f"step {self.step}, seed {self.seed}"

        trainer.ranks.agree("checkpoint", found, "take the files of all ranks from the same step")

    def restore(self, trainer: Trainer):
        """Put the state that was read in the place of the initial one."""
        state = trainer.state()
        here, written = ({name: tensor.shape for name, tensor in each.items()} for each in (state, self.begin["state"]))
        intact = here == written
        if intact:
            for name, tensor in state.items():
                tensor.copy_(self.begin["state"][name])
            intact = state_hash(state) == self.begin["hash"]
        fix = "take another copy of the file, or start again"
        trainer.ranks.agree(
            "checkpoint", lambda: intact or fail("checkpoint", "the values that were written", "others", fix), fix)
        self.begin = None

    def due(self, done: int) -> bool:
        return self.path is not None and done % self.every == 0

    def write(self, trainer: Trainer, done: int, digest: int):
        """Write the state after `done` steps aside, and rename it when every rank has written its own. A disk that is
        full costs the checkpoint, not the run. What ends the ranks while they rename leaves files of two steps, which
        `read` refuses."""
        ranks = trainer.ranks
        ranks.heartbeat(f"the checkpoint of step {done}", WARM_UP_PATIENCE)
        state = trainer.state()
        content = {"format": CHECKPOINT_FORMAT, "run": self.run_facts(trainer), "seed": self.seed, "step": done,
                   "digest": f"{digest:x}", "hash": state_hash(state), "state": state}
        content["seal"] = checkpoint_seal(content)
        path = self.own_path(self.path, ranks)
        aside = path.with_name(f".{path.name}.{os.getpid()}")

        try:
            problems = list(filter(None, ranks.gather_objects(problem_of_saving(content, aside))))
            if not problems:
                os.replace(aside, path)
            elif ranks.rank == 0:
                show(f"train_gpt: checkpoint {path}: expected a writable folder with space, found '{problems[0]}'; "
                     "fix: free or permit that folder. The run goes on, and the last checkpoint stays.\n", sys.stderr)
        finally:
            aside.unlink(missing_ok=True)


# ---- a run -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def off_the_clock(trainer: Trainer, meter: Meter, reason: str) -> Iterator[None]:
    """A pause between two steps, in which every rank has all weights."""
    trainer.gather()
    trainer.clock.switch(reason)
    meter.log_pending()  # a checkpoint of a training that has diverged would replace a good one
    yield
    trainer.clock.switch("training")
    meter.restart()


def resamples(preset: Preset, step: int) -> bool:
    """Whether a step is the first whose softmax samples so many classes for so many tokens."""
    def sampling(step):
        stage = preset.stages[stage_index(preset, step)]
        return stage.sampled_classes, stage.batch_tokens

    return step > 0 and sampling(step) != sampling(step - 1)


def timed_loop(trainer: Trainer, log: RunLog, steps: int, val_every: int | None,
               checkpoints: Checkpoints | None = None, samples: Any = None) -> int:
    """The first `steps` steps, on the clock; validations, checkpoints and samples are off it. Returns the digest of
    this rank's tokens."""
    checkpoints = checkpoints or Checkpoints()
    preset = trainer.preset
    ranks = trainer.ranks
    clock = trainer.clock
    first_step = checkpoints.step
    meter = Meter(log, trainer, steps, first_step)
    batches = prefetched(training_batches(trainer.stream, preset, trainer.micro_chunks, ranks, first_step))
    digest = checkpoints.digest
    ends_stage = True  # whether the step before ended one, so that this one begins the next

    clock.intervals.clear()
    ranks.stop_together = True
    clock.switch("training")
    meter.restart()
    with contextlib.closing(batches):
        for step in range(first_step, steps):
            index = stage_index(preset, step)
            stage = preset.stages[index]
            if ends_stage:
                log.line("stage", step=step, **asdict(stage), micro_batch_chunks=trainer.micro_chunks[stage])
            if step == 0 or stage_index(preset, step - 1) != index:
                trainer.begin_stage(stage)
            if resamples(preset, step):
                trainer.change_classes(stage)

            micro_batches = [next(batches) for _ in range(CHUNKS // ranks.world // trainer.micro_chunks[stage])]
            digest += sum(batch.digest for batch in micro_batches)

            loss = trainer.training_step(step, micro_batches)
            rate, share = averaging(preset, step)
            if rate or share:
                trainer.optimizer.average(rate, share)
            done = step + 1
            ranks.heartbeat(f"step {done}")

            ends_stage = done == steps or stage_index(preset, done) != index
            validates = val_every and done % val_every == 0 and done < steps
            keeps = checkpoints.due(done)
            shows = samples and samples.due(done)
            if step == first_step or ends_stage or validates or keeps or shows or done % preset.log_every_steps == 0:
                meter.record(done, loss, stage)

            if validates:
                with off_the_clock(trainer, meter, "validation"):
                    value = trainer.validate(trainer.geometries[index])
                    log.line("val", step=done, loss=round(value, 6), final=False)
                    log.say(f"step {done:5d}/{steps}   val loss {value:.4f} (windows of the moment)")
            if keeps:
                with off_the_clock(trainer, meter, "checkpoint"):
                    checkpoints.write(trainer, done, digest)
            if shows:
                with off_the_clock(trainer, meter, "sample"):
                    samples.show(trainer, log, done)

        trainer.gather()
        clock.switch(None)
        meter.flush()
    ranks.stop_together = False
    return digest


def prepare(trainer: Trainer, seed: int, log: RunLog):
    """Make the initial state of a seed, equal on all ranks, and warm up.

    The hashes before and after prove that the warm-up leaves no trace."""
    state = trainer.initialise(seed)
    trainer.ranks.agree("initial state", lambda: state, "use GPUs of one kind", EXIT_HARDWARE)

    started = trainer.clock.since_start()
    variants = trainer.warm_up()
    if trainer.initialise(seed) != state:
        raise AssertionError("warm-up changed the training state")
    log.line("warm", seconds=round(trainer.clock.since_start() - started, 3), variants=variants,
             graphs=compiled_graphs(), state=state, peak_memory_mib=peak_memory_mib(trainer.ranks))


def train(trainer: Trainer, seed: int, log: RunLog, steps: int, val_every: int | None, settings: dict,
          checkpoints: Checkpoints, samples: Any = None) -> float:
    """One run from a seed: warm-up, the timed loop, the final validation. All of it is logged.

    Returns the validation loss in nats a token."""
    preset = trainer.preset
    ranks = trainer.ranks
    clock = trainer.clock
    table = trainer.model.ngram
    dense = sum(p.numel() for p in trainer.model.parameters() if p is not table)
    sparse = preset.model.table_rows * preset.model.width  # of these a step updates a few
    log.say(f"{dense:,} dense parameters, {sparse:,} in rows of the n-gram table")
    log.line("head", started=clock.date(), preset=asdict(preset), seed=seed, world=ranks.world,
             nodes=len(set(ranks.nodes)), shared_memory=bool(ranks.copy_stream), ops=trainer.ops.names,
             script=script_hash(), data=trainer.data_hash,
             shards=[path.name for path in trainer.stream.paths], parameters={"dense": dense, "sparse": sparse},
             consumed_tokens=trainer.stream.consumed(preset.stages), first_step=checkpoints.step, settings=settings,
             **machine_facts())

    prepare(trainer, seed, log)
    if checkpoints.begin:
        checkpoints.restore(trainer)
        log.say(f"goes on after step {checkpoints.step}")
    compiled = compiled_graphs()
    gc.collect()
    gc.freeze()
    ranks.gather_objects(None)  # nobody's clock starts before the last rank has compiled
    ranks.heartbeat("the warm-up")

    log.say(f"first timed step {clock.since_start():.1f} s after the process started")
    digest = timed_loop(trainer, log, steps, val_every, checkpoints, samples)
    elapsed_ms = clock.milliseconds()
    recompiled = compiled_graphs() - compiled
    loss = trainer.validate(trainer.final_geometry)
    require_finite("validation loss", loss, str(loss), ranks)

    log.line("val", step=steps, loss=round(loss, 6), final=True)
    for interval in clock.intervals:
        log.line("clock", **interval)

    state = "ok"
    if recompiled:
        state = "no record: compiled in the timed run"
    elif checkpoints.step:
        state = "no record: resumed"
    elif steps < preset.steps:
        state = "no record: shortened"
    memory_mib = peak_memory_mib(ranks)
    log.line("end", state=state, loss=round(loss, 6), ms=round(elapsed_ms, 1), peak_memory_mib=memory_mib,
             val_bytes=trainer.validation_bytes,
             train_hash=f"{sum(ranks.gather_objects(digest)) % 2**64:016x}", val_hash=trainer.validation_hash,
             recompiled=recompiled, largest_weights=largest_weights(trainer, log))

    memory = f", peak memory {memory_mib} MiB" if memory_mib else ""
    tokens = scheduled_tokens(preset, steps) - scheduled_tokens(preset, checkpoints.step)
    bits = ""
    if trainer.validation_bytes:
        bits = f"{loss / math.log(2) * preset.val_tokens / trainer.validation_bytes:.4f} bits a byte of text; "
    log.say(f"val loss {loss:.4f} after {elapsed_ms / 1e3:.2f} s of training, {preset.name}, seed {seed}, "
            f"{ranks.world} rank(s){memory}; {state}\n"
            f"{bits}{1e3 * tokens / elapsed_ms:,.0f} tokens/s; "
            f"log: {log.path if log.file else 'none, UNLOGGED'}")
    return loss


# ==== 7. Triton kernels, each with its wrapper ========================================================================
# Kernels end in _kernel; device functions say what they do or return (load_tile, visible_reach). x_ptr is a pointer,
# x_desc a tensor descriptor (TMA), or a pointer on GPUs without TMA, and stride_x_row a stride in elements. Words in
# lower case are sizes (tokens, heads, depth). Words in upper case are constexprs, which only kernels have to declare:
# BLOCK_M, BLOCK_N and BLOCK_K are the rows, columns and depth of a tile, HEAD_DIM_QK and HEAD_DIM_V the widths of a
# head. A header has the formula or names its reference, and has shapes; where they count also operations or bytes, and
# times, of one H200 unless they say otherwise, by benchmarks/bench_*.py. tl.store rounds values to the dtype of the
# pointer.

# Kernels can read only those globals that are constexprs. Triton's interpreter accepts one only as the right operand of
# an expression with a tensor.
LOG2_E = constexpr(1.4426950408889634)  # log2(e): kernels use exp2, because the hardware computes powers of 2
RMS_EPSILON = constexpr(NORM_EPSILON)
LOG_ZERO = constexpr(NEG_INF)


@jit
def load_vector(x_ptr, index, size, row=0, other=0.0):
    """The values at `index`, of any shape, in one row of x [rows, size]; `other` past its end."""
    return tl.load(x_ptr + row * size + index, mask=index < size, other=other)


# ---- orthogonalisation -----------------------------------------------------------------------------------------------
# All three products of a round are written for wide matrices. A tall X is passed as its transposed view.
# Strides are arguments, and a stride of 1 is compiled in, so loads are contiguous along whichever axis is,
# and X^T X needs no copy. Five rounds of polar-express took 1059 us on 14 matrices of 2304 x 768 (a sprint's MLPs),
# where products at 790 TFLOP/s, with half of each symmetric one, would take 401 and torch's took 1189; on 36 of
# 192 x 768 they took 184, torch's 191. The default has four rounds now.


def product_tiles(batch, rows, columns, dtype, symmetric):
    """Fixed launch configuration (tile rows, columns, depth; warps, stages) for [batch, rows, columns].

    Large tiles reuse more of what they load. Small tiles are for batches that could not fill the GPU
    otherwise (three 768 x 768 Gram matrices are 63 large tiles), and for float32, whose large tiles exceed
    the shared memory.
    """
    tile_rows = -(-rows // 128)
    tile_columns = -(-columns // 128)
    tiles = batch * (tile_rows * (tile_rows + 1) // 2 if symmetric else tile_rows * tile_columns)
    if tiles >= 1.5 * 132 and dtype.itemsize == 2:  # an H100 and an H200 have 132 multiprocessors
        return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4)
    return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)


@jit
def product_tile(
    left_ptr, right_ptr, row, column, rows, columns, depth,
    stride_left_row, stride_left_col, stride_right_row, stride_right_col, BLOCK_K,
):
    """The tile of left [rows, depth] times right [depth, columns] at row [BLOCK_M, 1] and column [BLOCK_N], float32."""
    accumulator = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for start in range(0, depth, BLOCK_K):
        left_k = start + tl.arange(0, BLOCK_K)
        left_ptrs = left_ptr + row * stride_left_row + left_k * stride_left_col
        left = tl.load(left_ptrs, (row < rows) & (left_k < depth), other=0.0)

        right_k = left_k[:, None]
        right_ptrs = right_ptr + column * stride_right_col + right_k * stride_right_row
        right = tl.load(right_ptrs, (column < columns) & (right_k < depth), other=0.0)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
    return accumulator


@jit
def gram_kernel(
    x_ptr, out_ptr, rows, depth, stride_x_batch, stride_x_row, stride_x_col,
    stride_out_batch, stride_out_row, stride_out_col, scale, x_scale, factors_ptr,
    ADD_X: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):
    """out = scale X X^T, for each X of [batch, rows, depth]; with ADD_X, for symmetric X, plus x_scale X. Given factors
    [batch], each X counts times its own.

    It takes rows (rows + BLOCK_M) depth flops a matrix, half of a full product: the grid has only the tiles on and
    below the diagonal, and those below are stored twice. Sums are float32; out is not X. Reference: the first two
    products of a round in orthogonalize_reference.
    """
    tl.static_assert(BLOCK_M == BLOCK_N, "the mirrored tile must be a tile")
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    x_ptr += batch * stride_x_batch
    out_ptr += batch * stride_out_batch

    # Row i of the triangle starts at tile i (i + 1) / 2, where 8 tile + 1 = (2 i + 1)^2. Adding 5 instead of 1 stays
    # clear of rounding.
    i = ((tl.sqrt(8.0 * tile + 5.0) - 1.0) * 0.5).to(tl.int32)
    j = tile - i * (i + 1) // 2
    row = (i * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = j * BLOCK_N + tl.arange(0, BLOCK_N)
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + batch)
        scale *= factor * factor
        x_scale *= factor
    accumulator = scale * product_tile(
        x_ptr, x_ptr, row, column, rows, rows, depth,
        stride_x_row, stride_x_col, stride_x_col, stride_x_row, BLOCK_K)

    inside = (row < rows) & (column < rows)
    if ADD_X:
        x_ptrs = x_ptr + row * stride_x_row + column * stride_x_col
        accumulator += x_scale * tl.load(x_ptrs, inside, other=0.0).to(tl.float32)
    if i == j:
        # This makes the tile exactly symmetric, whatever the order of summation inside the product.
        accumulator = tl.where(row >= column, accumulator, tl.trans(accumulator))

    result = accumulator.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_row + column * stride_out_col, result, inside)
    if i != j:  # the same numbers at the mirrored places
        tl.store(out_ptr + column * stride_out_row + row * stride_out_col, result, inside)


@jit
def polynomial_kernel(
    p_ptr, x_ptr, out_ptr, rows, columns, stride_p_batch, stride_p_row, stride_p_col,
    stride_x_batch, stride_x_row, stride_x_col, stride_out_batch, stride_out_row, stride_out_col, x_scale, factors_ptr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):
    """out = P X + x_scale X, for P [batch, rows, rows] and X [batch, rows, columns]. Given factors [batch], each X
    counts times its own.

    It takes 2 rows^2 columns flops a matrix. Row tiles of one column panel are neighbours in the grid, so that panel
    of X comes from memory once, and P stays in the L2 cache. Sums are float32; out is not X. Reference: the last
    product of a round in orthogonalize_reference.
    """
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    p_ptr += batch * stride_p_batch
    x_ptr += batch * stride_x_batch
    out_ptr += batch * stride_out_batch

    row_tiles = tl.cdiv(rows, BLOCK_M)
    row = (tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = product_tile(
        p_ptr, x_ptr, row, column, rows, columns, rows,
        stride_p_row, stride_p_col, stride_x_row, stride_x_col, BLOCK_K)

    inside = (row < rows) & (column < columns)
    x_ptrs = x_ptr + row * stride_x_row + column * stride_x_col
    accumulator += x_scale * tl.load(x_ptrs, inside, other=0.0).to(tl.float32)
    if factors_ptr is not None:
        accumulator *= tl.load(factors_ptr + batch)
    tl.store(out_ptr + row * stride_out_row + column * stride_out_col, accumulator, inside)


def gram(X, out, scale=1.0, x_scale=None, tiles=None, factors=None):
    """out = scale X X^T [+ x_scale X, if X is symmetric]; X [batch, n, k], any strides. Returns out, which is not X.

    Given factors [batch] in float32, each X counts times its own."""
    batch, rows, depth = X.shape
    tiles = tiles or product_tiles(batch, rows, rows, X.dtype, symmetric=True)
    side = triton.cdiv(rows, tiles["BLOCK_M"])
    gram_kernel[side * (side + 1) // 2, batch](
        X, out, rows, depth, *X.stride(), *out.stride(), scale, x_scale or 0.0, factors,
        ADD_X=x_scale is not None, **tiles)
    return out


def add_product(P, X, x_scale, out, tiles=None, factors=None):
    """out = P X + x_scale X; P [batch, n, n], X [batch, n, k], any strides. Returns out, which is not X.

    Given factors [batch] in float32, each X counts times its own."""
    batch, rows, columns = X.shape
    tiles = tiles or product_tiles(batch, rows, columns, X.dtype, symmetric=False)
    count = triton.cdiv(rows, tiles["BLOCK_M"]) * triton.cdiv(columns, tiles["BLOCK_N"])
    polynomial_kernel[count, batch](
        P, X, out, rows, columns, *P.stride(), *X.stride(), *out.stride(), x_scale, factors, **tiles)
    return out


def frobenius_factors(A, safety):
    """1 / (safety ||X||_F) for each X, given A = X X^T [batch, M, M], whose trace is the square of that norm; [batch]
    in float32. frobenius_scale without a pass over X: products take the factors. safety ||X||_F counts as at least
    1e-9."""
    squared = A.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float32)
    return (safety * squared.sqrt()).clamp_min(1e-9).reciprocal()


def orthogonalize(matrices, method, dtype=torch.bfloat16):
    """Near-orthogonal factor of each matrix of [batch, M, N] (float32 or bf16), computed in dtype.

    It agrees with orthogonalize_reference up to rounding, and leaves the input as it is. The first Gram matrix is of
    unscaled entries in dtype, so in float16, whose range is small, they must be neither tiny nor large.
    """
    batch, rows, columns = matrices.shape
    if rows > columns:
        return orthogonalize(matrices.mT, method, dtype).mT
    A, P = matrices.new_empty((2, batch, rows, rows), dtype=dtype)  # A = X X^T and P = b A + c A A

    X = matrices.to(dtype)
    factors = squares = None  # of X and of A, in the first round
    gram(X, out=A)
    if method.safety is None:
        X, A = aol_scale(X, A)
    else:
        factors = frobenius_factors(A, method.safety)
        squares = factors.square()

    buffers = torch.empty_like(X), torch.empty_like(X)
    for number, (a, b, c) in enumerate(method.coefficients):
        if number:
            gram(X, out=A)
        gram(A, out=P, scale=c, x_scale=b, factors=squares)
        X = add_product(P, X, a, out=buffers[number % 2], factors=factors)
        factors = squares = None
    return X


# ---- attention over packed documents ---------------------------------------------------------------------------------
#     out[i] = sum_j p[i, j] v[j]                          p[i, j] = 2^(scale log2(e) q[i].k[j] - lse[i])
#     delta[i] = dgate[i] = dout[i].out[i] / gate[i]       lse[i] = log2 (sum_j 2^(scale log2(e) q[i].k[j]) / gate[i])
#     dv[j] = sum_i p[i, j] dout[i]                        ds[i, j] = p[i, j] (dout[i].v[j] - delta[i])
#     dk[j] = scale sum_i ds[i, j] q[i]                    dq[i] = scale sum_j ds[i, j] k[j]
# So p[i] is the softmax times gate[i], and its sum is gate[i]: the gate is part of lse.
#
# Tiles lie on the flat token axis, because documents (median 391 tokens) are hardly longer than a tile: one
# tile may hold many. A program owns BLOCK_M tokens of one head and visits the other side in steps of BLOCK_N
# tokens, from the first that any of its tokens sees to the last. The mask of a step compares the distance of
# two tokens, without its sign, to the own token's `visible_reach`: one comparison and one selection a score.
# Two bounds would be two of each (sm_90: 410 instructions a step of dq instead of 343, for keys of 64); to
# skip the mask where all is visible made the backward 7 % slower.
#
# A program loads its own tiles through pointers, all at once, and those of the steps through tensor
# descriptors (TMA), which spare the registers of the addresses: 138 registers instead of 242 for the forward;
# 248 without spills, and so two programs a multiprocessor, for the backward. The backward computes p twice
# (7 products instead of 5), so that every output has one writer: no atomics, bitwise reproducible. dq is a
# launch of its own, since it needs half the registers of dk and dv (122 and 232 with keys of 64): over the
# speedrun's layers one launch for all takes 1 % longer. It comes first and makes delta, of tiles that it has anyway.
#
# Operands of T H D values moved: forward 4, gradients 12 in two launches. With six heads of 128, gates and a window of
# 384, T = 16,384 | 32,768 | 49,152 take 52 | 93 | 143 us. When delta had a launch of its own, that and the gradients
# took 168 | 298 | 460 us.


@jit
def load_tile(source, row, head, stride_row, tokens, WIDTH, BLOCK):
    """Tokens row ... row + BLOCK - 1 of one head, [BLOCK, WIDTH]; zeros past the last token.

    source is the pointer or the descriptor of a tensor [T, H, WIDTH] whose heads lie side by side.
    """
    if source.dtype.is_ptr():
        rows = tl.arange(0, BLOCK)[:, None]
        source += tl.cast(row, tl.int64) * stride_row + head * WIDTH
        inside = row + rows < tokens
        return tl.load(source + rows * stride_row + tl.arange(0, WIDTH), inside, other=0.0)
    else:
        return source.load([row, head * WIDTH])


@jit
def store_tile(out_ptr, values, row, head, heads, tokens):
    """Store values [BLOCK, WIDTH] where load_tile reads them; the tensor is contiguous."""
    width: constexpr = values.shape[1]
    rows = tl.arange(0, values.shape[0])[:, None]
    stride_row = heads * width
    out_ptr += tl.cast(row, tl.int64) * stride_row + head * width
    inside = row + rows < tokens
    tl.store(out_ptr + rows * stride_row + tl.arange(0, width), values, inside)


@jit
def visible_reach(distances_ptr, token, tokens, window):
    """How many tokens the query `token` sees before itself; or how many queries after the key `token` see it.

    The distances are Documents.positions for queries, and Documents.remaining for keys. token - reach, or
    token + reach, never decreases along the tokens: that is all that the kernels know of documents and windows.
    Tokens past the last one have its reach.
    """
    return tl.minimum(tl.load(distances_ptr + tl.minimum(token, tokens - 1)), window)


@jit
def visible_range(distances_ptr, start, tokens, window, BLOCK_M, KEYS):
    """first, stop: the BLOCK_M own tokens from `start` on see, or are seen by, first ... stop - 1 at most."""
    if KEYS:
        last = tl.minimum(start + BLOCK_M, tokens) - 1
        return start, last + visible_reach(distances_ptr, last, tokens, window) + 1
    else:
        first = start - visible_reach(distances_ptr, start, tokens, window)
        return first, tl.minimum(start + BLOCK_M, tokens)


@jit
def pair_tokens(own, step, BLOCK_N, KEYS):
    """(query, key) of a step's scores [own, other]: the own tokens as a column, the others as a row."""
    other = (step + tl.arange(0, BLOCK_N))[None, :]
    if KEYS:
        return other, own[:, None]
    else:
        return own[:, None], other


@jit
def attention_forward_kernel(
    q_ptr, k_desc, v_desc, stride_q_row, stride_k_row, stride_v_row,
    out_ptr, lse_ptr, positions_ptr, window, tokens, scale_log2, gates_ptr,
    HEAD_DIM_QK: constexpr, HEAD_DIM_V: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """out [T, H, HEAD_DIM_V] and lse [H, T] of BLOCK_M queries of one head; no running maximum.

    q, k [T, H, HEAD_DIM_QK], v as out, gates [T, H]. The grid is [heads, tiles], so that the heads
    of a tile run side by side. A visible pair takes 2 (HEAD_DIM_QK + HEAD_DIM_V) flops.
    Reference: attention_reference.
    """
    head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    reach = visible_reach(positions_ptr, queries, tokens, window)[:, None]
    q = load_tile(q_ptr, start, head, stride_q_row, tokens, HEAD_DIM_QK, BLOCK_M)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM_V], tl.float32)

    first, stop = visible_range(positions_ptr, start, tokens, window, BLOCK_M, False)
    for step in tl.range(first, stop, BLOCK_N):
        k = load_tile(k_desc, step, head, stride_k_row, tokens, HEAD_DIM_QK, BLOCK_N)
        scores = tl.dot(q, tl.trans(k))
        query, key = pair_tokens(queries, step, BLOCK_N, False)
        visible = (query - key).to(tl.uint32) <= reach  # unsigned, so that no later key is within reach
        p = tl.where(visible, tl.exp2(scores * scale_log2), 0.0)  # masking before exp2 takes 202 instructions, not 188
        row_sum += tl.sum(p, 1)
        v = load_tile(v_desc, step, head, stride_v_row, tokens, HEAD_DIM_V, BLOCK_N)
        accumulator = tl.dot(p.to(v.dtype), v, accumulator)

    inside = queries < tokens
    heads = tl.num_programs(0)
    row_sum /= tl.load(gates_ptr + queries * heads + head, inside, other=1.0)
    tl.store(lse_ptr + head * tokens + queries, tl.log2(row_sum), inside)
    store_tile(out_ptr, accumulator / row_sum[:, None], start, head, heads, tokens)


@jit
def attention_backward_kernel(
    own_qk_ptr, own_v_ptr, other_qk_desc, other_v_desc,
    stride_own_qk_row, stride_own_v_row, stride_other_qk_row, stride_other_v_row,
    own_dqk_ptr, own_dv_ptr, lse_ptr, delta_ptr, distances_ptr, out_ptr, gates_ptr, dgates_ptr,
    window, tokens, scale, scale_log2,
    HEAD_DIM_QK: constexpr, HEAD_DIM_V: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """dq of the BLOCK_M queries, or dk and dv of the BLOCK_M keys, that a program owns in one head.

    Queries come first, for they write what keys read: delta[h, i] = out[i, h] . dout[i, h] / gates[i, h], [H, T], which
    is the gradient of gates [T, H], too.

    Names with qk stand for tensors [T, H, HEAD_DIM_QK], names with v for tensors [T, H, HEAD_DIM_V]:

                    own_qk  own_v  other_qk  other_v  own_dqk  own_dv  distances
            dq      q       dout   k         v        dq       None    positions
            dk, dv  k       v      q         dout     dk       dv      remaining

    For keys the scores are transposed, [keys, queries], so that the tensor cores take p and ds, which are
    left operands, from registers. The grid is [heads, tiles]. A visible pair takes 4 HEAD_DIM_QK + 2 HEAD_DIM_V
    flops for dq and 4 HEAD_DIM_QK + 4 HEAD_DIM_V for dk and dv. Reference: the gradients of attention_reference.
    """
    KEYS: constexpr = own_dv_ptr is not None
    head = tl.program_id(0)
    start = tl.program_id(1) * BLOCK_M
    own = start + tl.arange(0, BLOCK_M)
    reach = visible_reach(distances_ptr, own, tokens, window)[:, None]
    own_qk = load_tile(own_qk_ptr, start, head, stride_own_qk_row, tokens, HEAD_DIM_QK, BLOCK_M)
    own_v = load_tile(own_v_ptr, start, head, stride_own_v_row, tokens, HEAD_DIM_V, BLOCK_M)
    own_dqk = tl.zeros(own_qk.shape, tl.float32)
    own_dv = tl.zeros(own_v.shape, tl.float32)
    heads = tl.num_programs(0)
    if not KEYS:
        inside = own < tokens
        out = load_tile(out_ptr, start, head, heads * HEAD_DIM_V, tokens, HEAD_DIM_V, BLOCK_M).to(tl.float32)
        own_delta = tl.sum(out * own_v, 1) / tl.load(gates_ptr + own * heads + head, inside, other=1.0)
        tl.store(dgates_ptr + own * heads + head, own_delta, inside)
        tl.store(delta_ptr + head * tokens + own, own_delta, inside)

    first, stop = visible_range(distances_ptr, start, tokens, window, BLOCK_M, KEYS)
    for step in tl.range(first, stop, BLOCK_N):
        query, key = pair_tokens(own, step, BLOCK_N, KEYS)
        other_qk = load_tile(
            other_qk_desc, step, head, stride_other_qk_row, tokens, HEAD_DIM_QK, BLOCK_N)
        lse = load_vector(lse_ptr, query, tokens, head)
        scores = tl.dot(own_qk, tl.trans(other_qk))
        other_v = load_tile(
            other_v_desc, step, head, stride_other_v_row, tokens, HEAD_DIM_V, BLOCK_N)
        dp = tl.dot(own_v, tl.trans(other_v))
        visible = (query - key).to(tl.uint32) <= reach
        p = tl.where(visible, tl.exp2(scores * scale_log2 - lse), 0.0)
        if KEYS:
            own_dv = tl.dot(p.to(other_v.dtype), other_v, own_dv)
            delta = load_vector(delta_ptr, query, tokens, head)
        else:
            delta = own_delta[:, None]
        ds = p * (dp - delta)
        own_dqk = tl.dot(ds.to(other_qk.dtype), other_qk, own_dqk)

    store_tile(own_dqk_ptr, own_dqk * scale, start, head, heads, tokens)
    if KEYS:
        store_tile(own_dv_ptr, own_dv, start, head, heads, tokens)


def attention_tiles(device, head_dim_qk=128):
    """Fixed launch configurations of forward and backward: own tokens, tokens a step; warps, stages.

    benchmarks/bench_attention.py --sweep chose them, with keys of 128 and of 64 channels. Where shared memory is small
    or there is no TMA, steps have 32 tokens, because with more the backward pass would spill registers. Elsewhere they
    have 64, but in the forward pass of keys up to 64 channels 32.
    """
    tile = dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    if not hopper_class(device):
        return tile, tile
    forward = dict(tile, BLOCK_N=64 if head_dim_qk > 64 else 32, num_stages=3)
    return forward, dict(tile, BLOCK_N=64)


def with_aligned_rows(x):
    """x [T, H, D], copied if a descriptor cannot take it as it lies.

    A descriptor takes heads side by side, in rows that are aligned to 16 bytes and do not overlap.
    """
    stride_row, *rest = x.stride()
    dense = rest == [x.size(2), 1] and stride_row >= x[0].numel()
    aligned = x.data_ptr() % 16 == 0 and stride_row * x.element_size() % 16 == 0
    return x if dense and aligned else x.clone(memory_format=torch.contiguous_format)


def tile_descriptor(x, tile):
    """A descriptor of x [T, H, D], as [T, H D], for steps of BLOCK_N tokens of one head.

    ValueError unless D is a power of two. On GPUs without TMA it is x itself: Triton would turn descriptors
    into pointers there, but of unknown strides, so that it would load value by value and spill registers.
    """
    if x.is_cuda and capability(x.device) < (9, 0):
        return x
    return TensorDescriptor.from_tensor(x.flatten(1), [tile["BLOCK_N"], x.size(2)])


class PackedAttention(Function):
    """Causal attention within packed documents and a sliding window: attention_reference in kernels.

    q, k [T, H, Dk], v [T, H, Dv] -> [T, H, Dv]; bf16 or float32. Widths are powers of two up to 128. Views of
    one buffer need no copy. positions, remaining: see Documents. Another window recompiles nothing if it is a
    multiple of 16. gates [T, H] must be > 0, because lse and delta divide by them.

    The softmax has no running maximum, so |scale q.k| must stay below 60: e^60 is 2^87, or 2^107 over a gate
    of 2^-20, which both types hold. RMS-normed q and k have |q.k| <= Dk; ValueError unless that is enough.
    """

    @staticmethod
    def forward(ctx, q, k, v, positions, remaining, window, scale, gates):
        tokens, heads, key_width = q.shape
        if scale * key_width >= 60:
            raise ValueError(
                f"attention without running maximum: expected scale * key width < 60, found {scale:g} * {key_width}")
        q, k, v = map(with_aligned_rows, (q, k, v))
        gates = gates.contiguous()
        out = v.new_empty(v.shape)
        lse = q.new_empty(heads, tokens, dtype=torch.float32)

        tile, _ = attention_tiles(q.device, key_width)
        attention_forward_kernel[heads, triton.cdiv(tokens, tile["BLOCK_M"])](
            q_ptr=q, k_desc=tile_descriptor(k, tile), v_desc=tile_descriptor(v, tile),
            stride_q_row=q.stride(0), stride_k_row=k.stride(0), stride_v_row=v.stride(0),
            out_ptr=out, lse_ptr=lse, positions_ptr=positions, gates_ptr=gates,
            window=window, tokens=tokens, scale_log2=scale * LOG2_E.value,
            HEAD_DIM_QK=key_width, HEAD_DIM_V=v.size(2), **tile)
        ctx.save_for_backward(q, k, v, out, lse, positions, remaining, gates)
        ctx.window = window
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, positions, remaining, gates = ctx.saved_tensors
        tokens, heads, value_width = out.shape
        dout = with_aligned_rows(dout)  # it may be the expanded gradient of a sum
        delta = torch.empty_like(lse)
        dgates = torch.empty_like(gates)
        _, tile = attention_tiles(out.device)
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))

        def launch(own_qk, own_v, other_qk, other_v, own_dqk, own_dv, distances, **for_delta):
            attention_backward_kernel[heads, triton.cdiv(tokens, tile["BLOCK_M"])](
                own_qk_ptr=own_qk, own_v_ptr=own_v,
                other_qk_desc=tile_descriptor(other_qk, tile), other_v_desc=tile_descriptor(other_v, tile),
                stride_own_qk_row=own_qk.stride(0), stride_own_v_row=own_v.stride(0),
                stride_other_qk_row=other_qk.stride(0), stride_other_v_row=other_v.stride(0),
                own_dqk_ptr=own_dqk, own_dv_ptr=own_dv, lse_ptr=lse, delta_ptr=delta, distances_ptr=distances,
                window=ctx.window, tokens=tokens, scale=ctx.scale, scale_log2=ctx.scale * LOG2_E.value,
                HEAD_DIM_QK=q.size(2), HEAD_DIM_V=value_width, **for_delta, **tile)

        launch(q, dout, k, v, dq, None, positions, out_ptr=out, gates_ptr=gates, dgates_ptr=dgates)
        launch(k, v, q, dout, dk, dv, remaining, out_ptr=None, gates_ptr=None, dgates_ptr=None)
        return dq, dk, dv, None, None, None, None, dgates


# ---- pointer ---------------------------------------------------------------------------------------------------------
#     s[t, i] = scale q[t].k[i]                            match[t, i] = 1 if ids[i] = ids[t], else 0
#     lse[t] = ln (1 + sum_i e^s[t, i])                    log_copy[t] = ln (sum_i match[t, i] e^s[t, i]) - lse[t]
#     ds[t, i] = grad_log_copy[t] (match[t, i] e^(s[t, i] - lse[t] - log_copy[t]) - e^(s[t, i] - lse[t]))
#
# This is attention without values, and tiled like it. Queries and keys are the two heads of one tensor
# qk [T, 2, HEAD_DIM_QK], and the owners of a tile visit the others. A visible pair takes one product of
# 2 HEAD_DIM_QK flops in the forward, and two for each of dq and dk. With 128 channels, a window of 4096 and
# T = 16,384 | 65,536 the forward takes 31 | 55 us, the backward 120 | 208 us.


@jit
def pointer_scores(own_qk, qk_desc, ids_ptr, own, reach, step, tokens, scale_log2, BLOCK_N, KEYS):
    """What a step of BLOCK_N other tokens needs: their tile of qk, the queries of the scores, the scores [own, other]
    times log2(e), and where these are visible and where the ids match."""
    WIDTH: constexpr = own_qk.shape[1]
    other_qk = load_tile(qk_desc, step, 1 - KEYS, 2 * WIDTH, tokens, WIDTH, BLOCK_N)
    scores = tl.dot(own_qk, tl.trans(other_qk)) * scale_log2
    # Compared after the product: before it, two predicates a score would have to be kept in registers meanwhile.
    query, key = pair_tokens(own, step, BLOCK_N, KEYS)
    visible = (query - key - 1).to(tl.uint32) < reach
    match = load_vector(ids_ptr, query, tokens, other=-1) == load_vector(ids_ptr, key, tokens, other=-1)
    return other_qk, query, scores, visible, match


@jit
def pointer_forward_kernel(
    qk_ptr, qk_desc, ids_ptr, positions_ptr, log_copy_ptr, lse_ptr, window, tokens, scale_log2,
    HEAD_DIM_QK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """log_copy [T], and lse [T] in base 2, of BLOCK_M queries. Reference: pointer_reference.

    Where nothing matches, log_copy is LOG_ZERO, and lse is stored as infinite, so that those scores get no gradient.
    """
    start = tl.program_id(0) * BLOCK_M
    queries = start + tl.arange(0, BLOCK_M)
    reach = visible_reach(positions_ptr, queries, tokens, window)[:, None]
    q = load_tile(qk_ptr, start, 0, 2 * HEAD_DIM_QK, tokens, HEAD_DIM_QK, BLOCK_M)
    sum_exp = tl.full([BLOCK_M], 1.0, tl.float32)
    sum_exp_match = tl.zeros([BLOCK_M], tl.float32)

    first, stop = visible_range(positions_ptr, start, tokens, window, BLOCK_M, False)
    for step in tl.range(first, stop, BLOCK_N):
        _, _, scores, visible, match = pointer_scores(
            q, qk_desc, ids_ptr, queries, reach, step, tokens, scale_log2, BLOCK_N, False)
        p = tl.where(visible, tl.exp2(scores), 0.0)
        sum_exp += tl.sum(p, 1)
        sum_exp_match += tl.sum(tl.where(match, p, 0.0), 1)

    inside = queries < tokens
    log2_sum = tl.log2(sum_exp)
    log_copy = (tl.log2(sum_exp_match) - log2_sum) / LOG2_E
    tl.store(log_copy_ptr + queries, tl.maximum(log_copy, LOG_ZERO, tl.PropagateNan.ALL), inside)
    tl.store(lse_ptr + queries, tl.where(sum_exp_match > 0, log2_sum, float("inf")), inside)


@jit
def pointer_backward_kernel(
    qk_ptr, qk_desc, ids_ptr, distances_ptr, log_copy_ptr, lse_ptr, grad_log_copy_ptr, dqk_ptr,
    window, tokens, scale_log2,
    KEYS: constexpr, HEAD_DIM_QK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """The gradient dqk[:, 0] of BLOCK_M queries, or with KEYS dqk[:, 1] of BLOCK_M keys; dqk is like qk.

    log_copy, lse: of the forward. distances: see visible_reach. Reference: the gradient of pointer_reference.
    """
    start = tl.program_id(0) * BLOCK_M
    own = start + tl.arange(0, BLOCK_M)
    reach = visible_reach(distances_ptr, own, tokens, window)[:, None]
    own_qk = load_tile(qk_ptr, start, KEYS, 2 * HEAD_DIM_QK, tokens, HEAD_DIM_QK, BLOCK_M)
    own_dqk = tl.zeros(own_qk.shape, tl.float32)

    first, stop = visible_range(distances_ptr, start, tokens, window, BLOCK_M, KEYS)
    for step in tl.range(first, stop, BLOCK_N):
        other_qk, query, scores, visible, match = pointer_scores(
            own_qk, qk_desc, ids_ptr, own, reach, step, tokens, scale_log2, BLOCK_N, KEYS)
        grad_log_copy = load_vector(grad_log_copy_ptr, query, tokens)
        log2_copy = load_vector(log_copy_ptr, query, tokens) * LOG2_E
        lse = load_vector(lse_ptr, query, tokens)
        # With a = e^(s - lse) and the copied share c = e^log_copy, ds is grad_log_copy times a / c - a where ids
        # match, and times -a elsewhere. p is a / c where they match, else a: one factor serves both.
        p = tl.where(visible, tl.exp2(scores - tl.where(match, lse + log2_copy, lse)), 0.0)
        matching_grad = grad_log_copy - grad_log_copy * tl.exp2(log2_copy)
        ds = p * tl.where(match, matching_grad, -grad_log_copy)
        own_dqk = tl.dot(ds.to(other_qk.dtype), other_qk, own_dqk)

    store_tile(dqk_ptr, own_dqk * (scale_log2 / LOG2_E), start, KEYS, 2, tokens)


class PointerLogCopy(Function):
    """pointer_reference in kernels: apply(qk, ids, positions, remaining, window, scale) -> log_copy [T].

    ValueError unless |scale q.k| < 60 for RMS-normed q and k, as for PackedAttention.
    """

    @staticmethod
    def forward(ctx, qk, ids, positions, remaining, window, scale):
        tokens, _, width = qk.shape
        if scale * width >= 60:
            raise ValueError(f"pointer without running maximum: expected scale * width < 60, found {scale:g} * {width}")
        qk = qk.contiguous()
        log_copy = qk.new_empty(tokens, dtype=torch.float32)
        lse = torch.empty_like(log_copy)

        tile, _ = attention_tiles(qk.device)
        pointer_forward_kernel[(triton.cdiv(tokens, tile["BLOCK_M"]),)](
            qk_ptr=qk, qk_desc=tile_descriptor(qk, tile), ids_ptr=ids, positions_ptr=positions,
            log_copy_ptr=log_copy, lse_ptr=lse, window=window, tokens=tokens, scale_log2=scale * LOG2_E.value,
            HEAD_DIM_QK=width, **tile)
        ctx.save_for_backward(qk, ids, log_copy, lse, positions, remaining)
        ctx.window = window
        ctx.scale = scale
        return log_copy

    @staticmethod
    def backward(ctx, grad_log_copy):
        qk, ids, log_copy, lse, positions, remaining = ctx.saved_tensors
        tokens, _, width = qk.shape
        grad_log_copy = grad_log_copy.contiguous()
        dqk = torch.empty_like(qk)

        _, tile = attention_tiles(qk.device)
        for keys, distances in enumerate((positions, remaining)):
            pointer_backward_kernel[(triton.cdiv(tokens, tile["BLOCK_M"]),)](
                qk_ptr=qk, qk_desc=tile_descriptor(qk, tile), ids_ptr=ids, distances_ptr=distances,
                log_copy_ptr=log_copy, lse_ptr=lse, grad_log_copy_ptr=grad_log_copy, dqk_ptr=dqk,
                window=ctx.window, tokens=tokens, scale_log2=ctx.scale * LOG2_E.value,
                KEYS=keys, HEAD_DIM_QK=width, **tile)
        return dqk, None, None, None, None, None


# ---- FP8 copies and products -----------------------------------------------------------------------------------------
@jit
def convert_four(x, FORMAT):
    """The FP8 bits of four numbers in a word, by PTX written by hand: of four neighbours in one tensor, as int8, or of
    one entry in each of four tensors, as int32. See to_fp8_bits."""
    dtype = tl.int8 if len(x) == 1 else tl.int32
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; cvt.rn.satfinite." + FORMAT + "x2.f32 a, $2, $1; "
        "cvt.rn.satfinite." + FORMAT + "x2.f32 b, $4, $3; mov.b32 $0, {a, b};}",
        "=r,f,f,f,f", x, dtype, is_pure=True, pack=4 // len(x))


@jit
def to_fp8_bits(x, FORMAT, PTX):
    """x in FORMAT, "e4m3" or "e5m2", saturated, as int8; a NaN stays a NaN.

    Triton converts two numbers at once into a 16-bit register. Where the two bytes of such a pair are stored apart, as
    in a transposed store, ptxas 12.8 and 12.9 (of Triton 3.6 to 3.8, sm_90; 13.1 is right) can read one of them from
    the stack pointer, or from a register that nothing has written: whatever the last kernel left there (Triton's
    issue 11111). convert_four uses 32-bit registers instead; tests/test_fp8_machine_code.py looks for the fault.
    """
    if PTX:
        return convert_four((x,), FORMAT)
    else:
        limit: constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
        dtype: constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
        return tl.clamp(x, -limit, limit, tl.PropagateNan.ALL).to(dtype).to(tl.int8, bitcast=True)


@jit
def load_rows(x_ptr, inverse_rms_ptr, offsets, quad, quads, column, width, scale, TAPS):
    """Rows -TAPS to 3 of each quad, counted from its first row, which is at `offsets`: x times scale [/ rms].

    A tuple of [BLOCK_M, BLOCK_N]. The rows before the first one of x are zeros."""
    rows = ()
    for k in tl.static_range(-TAPS, 4):
        exists = (4 * quad + k >= 0) & (quad < quads)
        row = tl.load(x_ptr + offsets + k * width, exists[:, None] & (column < width), other=0.0)
        factor = scale
        if inverse_rms_ptr is not None:
            factor *= tl.load(inverse_rms_ptr + 4 * quad + k, exists, other=0.0)[:, None]
        rows += (row.to(tl.float32) * factor,)
    return rows


@jit
def mix_rows(rows, positions_ptr, taps_ptr, quad, quads, column, width, TAPS):
    """`mixed` of the four rows of each quad, given the TAPS rows before them as well."""
    mixed_rows = ()
    for k in tl.static_range(4):
        h = rows[TAPS + k]
        for distance in tl.static_range(1, TAPS + 1):
            begun = tl.load(positions_ptr + 4 * quad + k, quad < quads, other=0) >= distance
            earlier = tl.where(begun[:, None], rows[TAPS + k - distance], 0.0)
            h += earlier * load_vector(taps_ptr, column, width, distance - 1)
        mixed_rows += (h,)
    return mixed_rows


@jit
def pack_rows(rows, FORMAT, PTX):
    """The FP8 bits of four rows as int32 words: the first row's byte is the lowest."""
    if PTX:
        return convert_four(rows, FORMAT)
    else:
        words = tl.zeros(rows[0].shape, tl.int32)
        for k in tl.static_range(4):
            words |= (to_fp8_bits(rows[k], FORMAT, PTX).to(tl.int32) & 255) << 8 * k
        return words


@jit
def quantize_kernel(
    x_ptr, inverse_rms_ptr, positions_ptr, taps_ptr, out_ptr, out_t_ptr, quads, width, inverse_scale,
    TAPS: constexpr, FORMAT: constexpr, PTX: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    r"""out = h * inverse_scale as bits of FORMAT, saturated (a NaN stays a NaN), and out_t, its transposed copy.

    h is x or, with inverse_rms, mixed(x * inverse_rms, taps, positions). x and out are [4 quads, width], out_t is
    [width, quads] in words of 32 bits. A quad is four neighbouring rows, and one thread holds them in each column:

        x        4 q - 2   . . b . .  \  TAPS earlier rows, which the last two
                 4 q - 1   . . a . .  /   rows of the same quad are for the next
                 4 q       . . 0 . .  \
                 4 q + 1   . . 1 . .   \  out: bytes 0 1 2 3, below one another
                 4 q + 2   . . 2 . .   /  out_t[column, q]: the word 3210, side by side in memory
                 4 q + 3   . . 3 . .  /

    So every earlier row but the first TAPS is at hand, and only words change threads for the transposed copy. An entry
    of bf16 costs 2 bytes read and 2 written. With 4 BLOCK_M of 128 every tile writes whole cache lines of out_t.
    Reference: h * inverse_scale, clamped and cast.
    """
    quad = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (quad < quads)[:, None] & (column < width)
    offsets = 4 * quad[:, None].to(tl.int64) * width + column

    rows = load_rows(x_ptr, inverse_rms_ptr, offsets, quad, quads, column, width, inverse_scale, TAPS)
    rows = mix_rows(rows, positions_ptr, taps_ptr, quad, quads, column, width, TAPS)
    for k in tl.static_range(4):
        tl.store(out_ptr + offsets + k * width, to_fp8_bits(rows[k], FORMAT, PTX), inside)

    words = pack_rows(rows, FORMAT, PTX)
    tile_t_ptr = out_t_ptr + column[:, None].to(tl.int64) * quads + quad
    tl.store(tile_t_ptr, tl.trans(words), tl.trans(inside))


def quantize_both(x, scale, dtype=E4M3, inverse_rms=None, positions=None, taps=None):
    """FP8 copies of x / scale in both layouts, contiguous: [height, width] like x, and [width, height].

    Given x's inverse RMS: of mixed(norm(x), taps, positions) / scale. RuntimeError if height is no multiple of 4."""
    height, width = x.shape
    out = x.new_empty(height, width, dtype=dtype)
    out_t = out.new_empty(width, height)
    quantize_kernel[triton.cdiv(width, 64), triton.cdiv(height, 128)](
        x_ptr=x.contiguous(), inverse_rms_ptr=inverse_rms, positions_ptr=positions, taps_ptr=taps,
        out_ptr=out.view(torch.int8), out_t_ptr=out_t.view(torch.int32),
        quads=height // 4, width=width, inverse_scale=1.0 / scale,
        TAPS=0 if taps is None else len(taps), FORMAT="e4m3" if dtype == E4M3 else "e5m2", PTX=x.is_cuda,
        BLOCK_M=32, BLOCK_N=64, num_warps=8)
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


def linear_forward(x, weight, scales, copies=None):
    """x [T, D] times weight [N, D] transposed, and what linear_backward needs of x and weight.

    Without `scales` the product has the operands' dtype, and both are saved as they are. With them it is FP8, and the
    transposed copies [D, T] and [D, N] are saved; quantize_both has made those of x if `copies` are given.
    """
    if scales is None:
        return x @ weight.T, x, weight
    x8, x8_t = copies or quantize_both(x, scales.x)
    weight8, weight8_t = quantize_both(weight, scales.weight)
    return fp8_matmul_nt(x8, weight8, scales.x, scales.weight, fast_accum=True), x8_t, weight8_t


def linear_backward(grad, grad_t, saved_x, saved_weight, scales, out=None, dx=None):
    """(dx, dweight) of linear_forward, from the gradient of its first result and from what it saved.

    dx is written to `dx` if given. With `scales` the gradient is e5m2, in both layouts; dweight goes to `out` if
    given. These products do not accumulate fast, because fast accumulation in all of the backward pass raises the
    sprint's loss by .035.
    """
    if scales is None:
        return torch.mm(grad, saved_weight, out=dx), grad.T @ saved_x
    dx = fp8_matmul_nt(grad, saved_weight, scales.grad, scales.weight, fast_accum=False, out=dx)
    dweight = fp8_matmul_nt(grad_t, saved_x, scales.grad, scales.x, fast_accum=False, out=out)
    return dx, dweight


# ---- from the projection to attention --------------------------------------------------------------------------------
# The rotary embedding turns dim i of a head together with dim i + D / 2, so the kernels hold a head as its
# two halves.


@jit
def load_halves(x_ptr, token, valid, stride_x_row, DIM):
    """Both halves [BLOCK_M, DIM / 2] of the rows `token` of x, in float32; zeros where not valid."""
    first_ptr = x_ptr + token[:, None].to(tl.int64) * stride_x_row + tl.arange(0, DIM // 2)
    first = tl.load(first_ptr, valid[:, None], other=0.0).to(tl.float32)
    second = tl.load(first_ptr + DIM // 2, valid[:, None], other=0.0).to(tl.float32)
    return first, second


@jit
def store_halves(out_ptr, first, second, token, valid, stride_out_row, DIM):
    """The opposite of load_halves, in the dtype of `out_ptr`."""
    first_ptr = out_ptr + token[:, None].to(tl.int64) * stride_out_row + tl.arange(0, DIM // 2)
    tl.store(first_ptr, first, valid[:, None])
    tl.store(first_ptr + DIM // 2, second, valid[:, None])


@jit
def load_normed(x_ptr, token, valid, stride_x_row, DIM):
    """Both halves of RMS-normed rows, and 1 / rms [BLOCK_M, 1]."""
    first, second = load_halves(x_ptr, token, valid, stride_x_row, DIM)
    inverse_rms = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + RMS_EPSILON)[:, None]
    return first * inverse_rms, second * inverse_rms, inverse_rms


@jit
def load_positions(positions_ptr, cos_ptr, sin_ptr, tokens, DIM, BLOCK_M):
    """This program's tokens [BLOCK_M], which of them exist, their positions, and their rows of the rotary tables.

    The tables cos and sin are [positions, DIM / 2].
    """
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = token < tokens
    position = tl.load(positions_ptr + token, valid, other=0)
    offsets = position[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)
    # Nothing of what is made for tokens past the last is stored, so their rows may hold anything.
    cos = tl.load(cos_ptr + offsets, valid[:, None])
    sin = tl.load(sin_ptr + offsets, valid[:, None]).to(tl.float32)  # the interpreter cannot negate bfloat16
    return token, valid, position, cos, sin


@jit
def rotate_halves(first, second, cos, sin):
    """The rotary embedding; reference: rotate. With -sin it is the inverse, which is also the gradient."""
    return first * cos + second * sin, second * cos - first * sin


@jit
def split_heads_kernel(
    qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, tokens,
    HEADS: constexpr, HEAD_DIM_QK: constexpr, HEAD_DIM_V: constexpr,
    VALUE_WIDTH: constexpr, KEY_OFFSET: constexpr, BLOCK_M: constexpr,
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
    first, second = rotate_halves(first, second, cos, sin)
    store_halves(q_ptr + head * HEAD_DIM_QK, first, second, token, valid, q_width, HEAD_DIM_QK)

    first, second, _ = load_normed(k_in_ptr, token, valid, qkv_width, HEAD_DIM_QK)
    first, second = rotate_halves(first, second, cos, sin)
    if KEY_OFFSET:  # the stationary dims come from the token before, if the document has one
        stationary = tl.arange(0, HEAD_DIM_QK // 2) >= HEAD_DIM_QK // 4
        source = tl.where(position > 0, token - 1, token)
        first_before, second_before, _ = load_normed(k_in_ptr, source, valid, qkv_width, HEAD_DIM_QK)
        first = tl.where(stationary, first_before, first)
        second = tl.where(stationary, second_before, second)
    store_halves(k_ptr + head * HEAD_DIM_QK, first, second, token, valid, q_width, HEAD_DIM_QK)

    if value_ptr is not None:  # else v is a view of qkv
        first, second = load_halves(v_in_ptr, token, valid, qkv_width, HEAD_DIM_V)
        value_first, value_second = load_halves(
            value_ptr + head * HEAD_DIM_V, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        gate = tl.load(gates_ptr + token * HEADS + head, valid)[:, None]
        store_halves(v_ptr + head * HEAD_DIM_V, first + gate * value_first, second + gate * value_second,
                     token, valid, v_width, HEAD_DIM_V)


@jit
def norm_grad(x_ptr, first_grad, second_grad, token, valid, stride_x_row, DIM):
    """Gradient of RMSNorm's input x, as two halves, from that of its output; x is normalised again."""
    first, second, inverse_rms = load_normed(x_ptr, token, valid, stride_x_row, DIM)
    mean = ((tl.sum(first_grad * first, 1) + tl.sum(second_grad * second, 1)) / DIM)[:, None]
    return (first_grad - first * mean) * inverse_rms, (second_grad - second * mean) * inverse_rms


@jit
def store_qkv_grad(dqkv_ptr, dqkv_t_desc, first, second, token, valid, column, factor, qkv_width, DIM, PTX):
    """Store DIM columns of dqkv [tokens, qkv_width]; with a descriptor of dqkv_t [qkv_width, tokens], both in e5m2."""
    if dqkv_t_desc is not None:
        first = to_fp8_bits(first * factor, "e5m2", PTX)
        second = to_fp8_bits(second * factor, "e5m2", PTX)
        first_token = tl.program_id(1) * first.shape[0]
        dqkv_t_desc.store([column, first_token], tl.trans(first))
        dqkv_t_desc.store([column + DIM // 2, first_token], tl.trans(second))
    store_halves(dqkv_ptr + column, first, second, token, valid, qkv_width, DIM)


@jit
def split_heads_grad_kernel(
    qkv_ptr, value_ptr, gates_ptr, positions_ptr, cos_ptr, sin_ptr,
    dq_ptr, dk_ptr, dv_ptr,
    dqkv_ptr, dqk_t_desc, dv_t_desc, dvalue_ptr, dgates_ptr,
    factor, tokens,
    HEADS: constexpr, HEAD_DIM_QK: constexpr, HEAD_DIM_V: constexpr,
    VALUE_WIDTH: constexpr, KEY_OFFSET: constexpr, BLOCK_M: constexpr,
    ADD: constexpr, PTX: constexpr,
):
    """dqkv, and dvalue and dgates if there is a value, of BLOCK_M tokens of one head; shapes as in split_heads_kernel.

    With ADD, dvalue gains what is computed instead of becoming it.

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
    v_column = 2 * q_width + head * HEAD_DIM_V
    in_ptr = qkv_ptr + q_column

    for part in tl.static_range(2):  # q, then k
        grad_ptr = (dq_ptr, dk_ptr)[part] + q_column
        first, second = load_halves(grad_ptr, token, valid, q_width, HEAD_DIM_QK)
        if KEY_OFFSET and part == 1:
            # The stationary dims were read by the next token's key, and by a document's first key itself.
            stationary = tl.arange(0, HEAD_DIM_QK // 2) >= HEAD_DIM_QK // 4
            ends_document = tl.load(positions_ptr + token + 1, token + 1 < tokens, other=0) == 0
            has_next = valid & ~ends_document
            next_first, next_second = load_halves(grad_ptr, token + 1, has_next, q_width, HEAD_DIM_QK)
            starts_document = (position == 0)[:, None]
            first = tl.where(stationary, tl.where(starts_document, first, 0.0) + next_first, first)
            second = tl.where(stationary, tl.where(starts_document, second, 0.0) + next_second, second)
        first, second = rotate_halves(first, second, cos, -sin)
        first, second = norm_grad(in_ptr + part * q_width, first, second, token, valid, qkv_width, HEAD_DIM_QK)
        store_qkv_grad(
            dqkv_ptr, dqk_t_desc, first, second, token, valid, q_column + part * q_width,
            factor, qkv_width, HEAD_DIM_QK, PTX)

    first, second = load_halves(dv_ptr + head * HEAD_DIM_V, token, valid, v_width, HEAD_DIM_V)
    store_qkv_grad(
        dqkv_ptr, dv_t_desc, first, second, token, valid, v_column, factor, qkv_width, HEAD_DIM_V, PTX)

    if value_ptr is not None:
        value_first, value_second = load_halves(
            value_ptr + head * HEAD_DIM_V, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        gate = tl.load(gates_ptr + token * HEADS + head, valid)[:, None]
        dvalue_ptr += head * HEAD_DIM_V
        dvalue_first, dvalue_second = gate * first, gate * second
        if ADD:
            other_first, other_second = load_halves(dvalue_ptr, token, valid, VALUE_WIDTH, HEAD_DIM_V)
            dvalue_first += other_first
            dvalue_second += other_second
        store_halves(dvalue_ptr, dvalue_first, dvalue_second, token, valid, VALUE_WIDTH, HEAD_DIM_V)
        dgate = tl.sum(first * value_first, 1) + tl.sum(second * value_second, 1)
        tl.store(dgates_ptr + token * HEADS + head, dgate, valid)


class ProjectHeads(Function):
    """split_heads_reference of a projection, in kernels.

    `ProjectHeads.apply(h, weight, value, value_gates, positions, cos, sin, heads, key_offset, scales, *copies)`;
    h [T, width], weight [H (2 Dk + Dv), width]. With `scales` the products are FP8, with the limits of
    Fp8Mlp; else they are in the operands' dtype. ValueError if value has too few channels.

    After q, k and v it hands the value on. Where a later reader takes that, its gradient comes back through here, and
    the kernel adds to it in place: no tensor and no sum for each reader. That is safe because readers form a chain, so
    that nothing else holds this gradient: whoever reads the value has to take it from the reader before.
    """
    @staticmethod
    def launch(kernel, inputs, heads, key_offset, block_m=32, **operands):
        """Launch split_heads_kernel or its gradient: a program for `block_m` tokens of each head.

        Both read `inputs`: qkv, value, value_gates, positions, cos, sin. `operands` are the kernel's own, by name.
        """
        qkv, value, value_gates, positions, cos, sin = inputs
        tokens, qkv_width = qkv.shape
        qk_dim = 2 * cos.size(1)
        kernel[heads, triton.cdiv(tokens, block_m)](
            qkv_ptr=qkv, value_ptr=value, gates_ptr=value_gates, positions_ptr=positions, cos_ptr=cos, sin_ptr=sin,
            tokens=tokens, HEADS=heads, HEAD_DIM_QK=qk_dim, HEAD_DIM_V=qkv_width // heads - 2 * qk_dim,
            VALUE_WIDTH=0 if value is None else value.size(1), KEY_OFFSET=key_offset,
            BLOCK_M=block_m, num_warps=block_m // 8, **operands)

    @staticmethod
    def forward(ctx, h, weight, value, value_gates, positions, cos, sin, heads, key_offset=False, scales=None,
                *copies):
        ctx.parameter = weight
        ctx.scales = scales
        ctx.flags = dict(heads=heads, key_offset=key_offset)
        qkv, h, weight = linear_forward(h, weight, scales, copies)
        q = qkv.new_empty(len(qkv), heads, 2 * cos.size(1))
        k = torch.empty_like(q)
        v = qkv[:, 2 * q[0].numel():].unflatten(1, (heads, -1))
        if value is not None:
            if value.size(1) < v[0].numel():
                raise ValueError(f"value embedding: expected at least {v[0].numel()} channels, found {value.size(1)}")
            v = v.new_empty(*v.shape)
            value = value.contiguous()
            value_gates = value_gates.contiguous()
        inputs = qkv, value, value_gates, positions, cos, sin
        ProjectHeads.launch(split_heads_kernel, inputs, **ctx.flags, q_ptr=q, k_ptr=k, v_ptr=v)
        ctx.save_for_backward(h, weight, *inputs)
        ctx.shapes = [out.shape for out in (q, k, v)]
        ctx.set_materialize_grads(False)
        return q, k, v, value

    @staticmethod
    def backward(ctx, *grads):
        h, weight, *inputs = ctx.saved_tensors
        qkv, value, value_gates = inputs[:3]
        *grads, dvalue = grads
        add = dvalue is not None
        dgates = None
        if value is not None:
            dgates = torch.empty_like(value_gates)
            if add:
                dvalue = dvalue.contiguous()
            else:
                wider = value.size(1) > ctx.shapes[2][1:].numel()  # no head reads its last channels
                dvalue = torch.zeros_like(value) if wider else torch.empty_like(value)
        dq, dk, dv = (qkv.new_zeros(shape) if grad is None else grad.contiguous()
                      for grad, shape in zip(grads, ctx.shapes))

        scales = ctx.scales
        dqkv_t = dqk_t_desc = dv_t_desc = dweight = None
        block_m = 32
        if scales is None:
            dqkv = dqkv_bits = torch.empty_like(qkv)
        else:
            block_m = 64
            dweight = memory_for_grad(ctx.parameter)
            dqkv = torch.empty_like(qkv, dtype=E5M2)
            dqkv_bits = dqkv.view(torch.int8)
            dqkv_t = dqkv.new_empty(*qkv.T.shape)
            dqkv_t_bits = dqkv_t.view(torch.int8)
            dqk_t_desc = TensorDescriptor.from_tensor(dqkv_t_bits, [dk.size(2) // 2, block_m])
            dv_t_desc = TensorDescriptor.from_tensor(dqkv_t_bits, [dv.size(2) // 2, block_m])
        ProjectHeads.launch(
            split_heads_grad_kernel, inputs, **ctx.flags, block_m=block_m,
            dq_ptr=dq, dk_ptr=dk, dv_ptr=dv,
            dqkv_ptr=dqkv_bits, dqk_t_desc=dqk_t_desc, dv_t_desc=dv_t_desc, dvalue_ptr=dvalue, dgates_ptr=dgates,
            factor=1.0 if scales is None else 1.0 / scales.grad, ADD=add, PTX=scales is not None and qkv.is_cuda)
        dh, dweight = linear_backward(dqkv, dqkv_t, h, weight, scales, dweight)
        return dh, dweight, dvalue, dgates, *(None,) * 8


# ---- head and loss ---------------------------------------------------------------------------------------------------
#     z[j] = softcap / 2 (1 + t[j]),   t[j] = tanh((logit[j] + shift) / (2 temperature))
#     lse = softcap + ln sum_j rate[j] exp(z[j] - softcap)
# The columns j of the logits are classes: all V token ids, each with its inclusion rate, or P of them, where all rates
# are 1. Of these P, the first num_always are always included, among them every target and the copy token; see Targets.


@jit
def tanh_of_softcap(logits, shift, temperature, FAST):
    """t in float32. FAST uses the hardware's tanh, whose error of 2^-11 is an eighth of bf16's rounding."""
    half = logits.to(tl.float32) * (0.5 / temperature) + shift * (0.5 / temperature)
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 / (1.0 + tl.exp2(half * (-2.0 * LOG2_E))) - 1.0


@jit
def load_target(class_index_ptr, positions_ptr, token, tokens, AHEAD):
    """Targets.ahead in a kernel: the class index of the token AHEAD further than the next one, or -1 for none."""
    inside = token + AHEAD < tokens
    target = tl.load(class_index_ptr + token + AHEAD, inside, other=-1)
    if AHEAD > 0:
        position = tl.load(positions_ptr + token, inside, other=0)
        same_document = tl.load(positions_ptr + token + AHEAD, inside, other=-1) == position + AHEAD
        target = tl.where(same_document, target, -1)
    return target


@jit
def row_loss_kernel(
    logits_ptr, class_index_ptr, positions_ptr, target_weights_ptr, inclusion_rates_ptr,
    log_copy_ptr, loss_ptr, lse_ptr, copied_ptr,
    tokens, classes, copy_token, softcap, shift, temperature,
    TARGETS: constexpr, FAST: constexpr, BLOCK_N: constexpr,
):
    """loss = sum_k target_weights[k] (lse - z[target k]), and lse, of one token a program.

    With log_copy, target 0 gets `odds` times its own probability from the pointer, where odds =
    exp(z[copy_token] + log_copy - z[target 0]), and copied = odds / (1 + odds) is that part of the sum. The logarithms
    of inclusion_rates, if there are any, are added to z. Reads the logits [tokens, classes] once: 2 bytes each in bf16.
    Reference: head_loss_reference.
    """
    token = tl.program_id(0)
    logits_ptr += token.to(tl.int64) * classes
    half = 0.5 * softcap

    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, classes, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        logits = load_vector(logits_ptr, column, classes)
        t = tanh_of_softcap(logits, shift, temperature, FAST)
        exponential = tl.exp2(half * LOG2_E * t - half * LOG2_E)
        if inclusion_rates_ptr is not None:
            exponential *= load_vector(inclusion_rates_ptr, column, classes)
        total += tl.where(column < classes, exponential, 0.0)
    lse = softcap + tl.log(tl.sum(total))

    loss = 0.0
    for k in tl.static_range(TARGETS):
        target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
        logit = tl.load(logits_ptr + tl.maximum(target, 0))
        z = half + half * tanh_of_softcap(logit, shift, temperature, FAST)
        if inclusion_rates_ptr is not None:
            z += tl.log(tl.load(inclusion_rates_ptr + tl.maximum(target, 0)))
        if k == 0 and log_copy_ptr is not None:
            copy_logit = tl.load(logits_ptr + copy_token)
            copy_z = half + half * tanh_of_softcap(copy_logit, shift, temperature, FAST)
            if inclusion_rates_ptr is not None:
                copy_z += tl.log(tl.load(inclusion_rates_ptr + copy_token))
            log_odds = copy_z + tl.load(log_copy_ptr + token) - z
            odds = tl.where(target >= 0, tl.exp(log_odds), 0.0)
            z += tl.log(1.0 + odds)
            tl.store(copied_ptr + token, odds / (1.0 + odds))
        loss += tl.where(target >= 0, tl.load(target_weights_ptr + k) * (lse - z), 0.0)
    tl.store(loss_ptr + token, loss)
    tl.store(lse_ptr + token, lse)


@jit
def head_grad_kernel(
    logits_ptr, class_index_ptr, positions_ptr, target_weights_ptr, inclusion_rates_ptr, num_always_ptr,
    lse_ptr, copied_ptr, factor_ptr, out_ptr, out_t_desc,
    tokens, classes, copy_token, softcap, shift, temperature,
    TARGETS: constexpr, FAST: constexpr, PTX: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """out = factor * d loss / d logits, [tokens, classes], in tiles of BLOCK_M tokens and BLOCK_N classes.

        d loss / d logit[j] = sum_k target_weights[k] (rate[j] exp(z[j] - lse) - 1[j = target k])
                              * (1 - t[j]^2) / 4 * softcap / temperature
    With a pointer, of the indicator of target 0 the part `copied` [T] moves to the column of the copy token. A
    logit costs 2 bytes read and 2 written: out is bf16, or it is e5m2 and so is its transposed copy, which goes
    through the descriptor out_t_desc [classes, tokens]: with it Triton 3.6 computes the gradient once, not once a
    layout. Reference: the gradient of head_loss_reference.
    """
    first_column = tl.program_id(0) * BLOCK_N
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = (token < tokens)[:, None] & (column < classes)
    offsets = token[:, None].to(tl.int64) * classes + column
    half = 0.5 * softcap
    slope = 0.25 * softcap / temperature * tl.load(factor_ptr)

    row_weight = tl.zeros([BLOCK_M], tl.float32)
    for k in tl.static_range(TARGETS):
        target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
        row_weight += tl.where(target >= 0, tl.load(target_weights_ptr + k), 0.0)
    row_weight *= slope

    logits = tl.load(logits_ptr + offsets, inside, other=0.0)
    t = tanh_of_softcap(logits, shift, temperature, FAST)
    lse = load_vector(lse_ptr, token, tokens)
    grad = row_weight[:, None] * tl.exp2(half * LOG2_E * t + (half - lse)[:, None] * LOG2_E)
    if inclusion_rates_ptr is not None:
        grad *= load_vector(inclusion_rates_ptr, column, classes)
    num_always = classes if num_always_ptr is None else tl.load(num_always_ptr)
    if first_column < num_always:  # the other tiles hold sampled classes alone, none of them a target
        for k in tl.static_range(TARGETS):
            target = load_target(class_index_ptr, positions_ptr, token, tokens, k)
            weight = tl.where(target >= 0, slope * tl.load(target_weights_ptr + k), 0.0)
            if k == 0 and copied_ptr is not None:  # the copied share of the target is the copy token's
                copied = weight * load_vector(copied_ptr, token, tokens)
                grad -= tl.where(column == copy_token, copied[:, None], 0.0)
                weight -= copied
            grad -= tl.where(column == target[:, None], weight[:, None], 0.0)
    grad *= 1.0 - t * t

    if out_t_desc is not None:
        grad = to_fp8_bits(grad, "e5m2", PTX)
        out_t_desc.store([first_column, tl.program_id(1) * BLOCK_M], tl.trans(grad))
    tl.store(out_ptr + offsets, grad, inside)


@jit
def add_rows_kernel(rows_ptr, ids_ptr, table_ptr, width, BLOCK_N: constexpr):
    """table[ids] += rows, [N, width], for ids that differ: one program a row.

    It takes 8 us for 6144 rows of 768 on an H200, where index_add_, its reference, takes 45.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    table_ptr += tl.load(ids_ptr + row).to(tl.int64) * width
    total = load_vector(table_ptr, column, width).to(tl.float32)
    total += load_vector(rows_ptr, column, width, row)
    tl.store(table_ptr + column, total, column < width)


def head_operands(logits, targets, cap, fast):
    """What row_loss_kernel and head_grad_kernel both take, by name."""
    tokens, classes = logits.shape
    return dict(
        logits_ptr=logits, class_index_ptr=targets.class_index, positions_ptr=targets.positions,
        target_weights_ptr=targets.weights, inclusion_rates_ptr=targets.inclusion_rates,
        tokens=tokens, classes=classes, copy_token=targets.copy_token,
        softcap=cap.softcap, shift=cap.shift, temperature=cap.temperature,
        TARGETS=len(targets.weights), FAST=fast)


def row_losses(logits, targets, cap, fast=False):
    """(losses, lse, copied or None), [T] float32, of contiguous logits [T, classes]; see row_loss_kernel.

    `fast` uses the hardware's tanh, for bf16 logits on CUDA.
    """
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    lse = torch.empty_like(losses)
    copied = None if targets.log_copy is None else torch.empty_like(losses)
    row_loss_kernel[(len(logits),)](
        **head_operands(logits, targets, cap, fast),
        log_copy_ptr=targets.log_copy, loss_ptr=losses, lse_ptr=lse, copied_ptr=copied,
        BLOCK_N=2048, num_warps=4)
    return losses, lse, copied


def head_grad(logits, targets, lse, copied, factor, cap, dtype, fast=False):
    """The gradient [T, classes] of the summed loss times `factor` (0-d, float32), and its transposed copy or None.

    The copy is made for e5m2, which saturates and for which T is a multiple of 16.
    """
    tokens, classes = logits.shape
    out = out_bits = logits.new_empty(tokens, classes, dtype=dtype)
    out_t = out_t_desc = None
    block_m, block_n = 8, 512
    if dtype == E5M2:
        block_m, block_n = 32, 64  # the fastest of seven shapes
        out_bits = out.view(torch.int8)
        out_t = out.new_empty(classes, tokens)
        out_t_desc = TensorDescriptor.from_tensor(out_t.view(torch.int8), [block_n, block_m])
    head_grad_kernel[triton.cdiv(classes, block_n), triton.cdiv(tokens, block_m)](
        **head_operands(logits, targets, cap, fast),
        num_always_ptr=targets.num_always, lse_ptr=lse, copied_ptr=copied, factor_ptr=factor,
        out_ptr=out_bits, out_t_desc=out_t_desc,
        PTX=logits.is_cuda, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4)
    return out, out_t


class HeadLoss(Function):
    """head_loss_reference in kernels: `HeadLoss.apply(x, weight, log_copy, targets, cap, scales)`; x [T, D], weight
    [V, D]. log_copy is that of the targets, apart because autograd looks for tensors among the arguments alone.

    With `scales` the products are FP8, e4m3 by e4m3 forward and e5m2 by e4m3 backward; x, weight, dx and dweight are
    then bf16, and T, D, V and the number of sampled classes multiples of 16. Without, all is in the operands' own
    dtype: the path of GPUs without FP8.
    """
    @staticmethod
    def forward(ctx, x, weight, log_copy, targets, cap, scales):
        fast = scales is not None and x.is_cuda
        total = 0.0
        saved = []
        for rows, part in targets.parts():
            part_weight = weight if part.classes is None else weight[part.classes]
            logits, *operands = linear_forward(x[rows], part_weight, scales)
            losses, lse, copied = row_losses(logits, part, cap, fast)
            total = total + losses.sum()
            saved += [*operands, logits, lse, copied]
        ctx.constants = weight, targets, cap, scales, fast
        ctx.save_for_backward(*saved)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        weight, targets, cap, scales, fast = ctx.constants
        saved = iter(ctx.saved_tensors)
        dx = weight.new_empty(len(targets.class_index), weight.size(1))
        copied_parts = []
        dweight = None
        if scales is None:
            dtype = weight.dtype
            factor = grad_output
        else:
            # The incoming gradient becomes part of the products' scale: neither a synchronise nor a pass over grad.
            dtype = E5M2
            factor = scale_tensor(1.0 / scales.grad, weight.device)
            scales = scales._replace(grad=grad_output * scales.grad)

        for rows, part in targets.parts():
            *operands, logits, lse, copied = itertools.islice(saved, 5)  # as the forward pass saved them for this part
            grad, grad_t = head_grad(logits, part, lse, copied, factor, cap, dtype, fast)
            _, dweight_part = linear_backward(grad, grad_t, *operands, scales, dx=dx[rows])
            del grad, grad_t  # before those of the next part, which are as large, are made
            copied_parts.append(copied)

            if part.classes is None:
                dweight = dweight_part
                continue
            if dweight is None:  # cleared once, then the rows of every part are added
                dweight = memory_for_grad(weight).zero_()
            width = weight.size(1)
            add_rows_kernel[(len(dweight_part),)](
                dweight_part, part.classes, dweight, width, BLOCK_N=triton.next_power_of_2(width))

        dlog_copy = None
        if targets.log_copy is not None:
            dlog_copy = -targets.weights[0] * grad_output * torch.cat(copied_parts)
        return dx, dweight, dlog_copy, None, None, None


@torch.no_grad()
def head_loss_eval(x, weight, targets, cap, block_rows=8192):
    """Summed loss of the next tokens without FP8 or approximate functions, 0-d float64.

    It keeps 0.8 GB of bf16 logits alive at the default.
    """
    total = 0.0
    for rows, part in targets.parts(block_rows):
        losses, *_ = row_losses(x[rows] @ weight.T, part, cap)
        total = total + losses.sum(dtype=torch.float64)
    return total


# ---- MLP -------------------------------------------------------------------------------------------------------------
@jit
def column_halves(x):
    """The left and the right half of the columns of x."""
    height: constexpr = x.shape[0]
    half: constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [height, 2, half]), [0, 2, 1]))


@jit
def column_parts(x, PARTS):
    """The columns of x in 2 or 4 parts of the same width, from the left."""
    left, right = column_halves(x)
    if PARTS == 2:
        return left, right
    else:
        return column_halves(left) + column_halves(right)


@jit
def mlp_kernel(
    a_desc, b_desc, hidden_desc, out_desc, out_t_desc, tokens, mlp_width, factor,
    WIDTH: constexpr, LIMIT: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr, PARTS: constexpr,
):
    """out = f(a b^T) * factor, saturated at +-LIMIT, [tokens, mlp_width], and out_t, its transposed copy.

    Forward, without hidden: f(x) = relu(x)^2. Backward: f(x) = x sqrt(hidden). The root stands for
    relu(pre), which need not be kept: that is an error of at most 2^-5 where `hidden` is a normal number of
    e4m3, against 2^-3 of the result's own rounding. Descriptors of FP8 tensors: a [tokens, WIDTH],
    b [mlp_width, WIDTH], hidden [tokens, mlp_width], out in a's format, out_t as its bits.

    The kernel is persistent, so that the next tile's loads run under the epilogue, which takes a tile in PARTS. 49,152
    tokens with mlp_width 2048 take 149 us on a cool H200 (1038 TFLOP/s), backward 181 (854). It accumulates fast: exact
    accumulation takes 1.6 times as long. Reference: relu_squared_mlp.
    """
    tiles_across = tl.cdiv(mlp_width, BLOCK_N)
    tiles = tl.cdiv(tokens, BLOCK_M) * tiles_across
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row = tile // tiles_across * BLOCK_M
        column = tile % tiles_across * BLOCK_N
        x = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, WIDTH, BLOCK_K):
            x = tl.dot(a_desc.load([row, k]), b_desc.load([column, k]).T, x)

        parts = column_parts(x, PARTS)
        for part in tl.static_range(PARTS):
            y = parts[part]
            left = column + part * (BLOCK_N // PARTS)
            if hidden_desc is None:
                y *= tl.maximum(y, 0.0)
            else:
                y *= tl.sqrt(hidden_desc.load([row, left]).to(tl.float32))
            out = tl.clamp(y * factor, -LIMIT, LIMIT, tl.PropagateNan.ALL).to(out_desc.dtype)
            out_desc.store([row, left], out)
            # As integers, since ptxas loses some bits of transposed FP8 tiles.
            out_t_desc.store([left, row], tl.trans(out.to(tl.int8, bitcast=True)))


def mlp_tile(backward):
    """Fixed launch configuration of mlp_kernel, and how many programs share a multiprocessor.

    There are three, so that the epilogue of one runs beside the products of the others. Each may have 75 KB of shared
    memory, which is why a tile passes through the epilogue in parts. benchmarks/bench_mlp.py --sweep chose them.
    """
    tile = dict(BLOCK_M=128, BLOCK_N=128, num_warps=4)
    if backward:
        return dict(tile, BLOCK_K=64, num_stages=3, PARTS=2), 3
    return dict(tile, BLOCK_K=128, num_stages=2, PARTS=4), 3


def mlp_product(a, b, factor, hidden8=None):
    """What mlp_kernel makes of a [T, width] and b [H, width]: [T, H] and [H, T] in a's format.

    Operands are contiguous FP8, and all sizes are multiples of 16.
    """
    tokens, width = a.shape
    mlp_width = len(b)
    out = a.new_empty(tokens, mlp_width)
    out_t = a.new_empty(mlp_width, tokens)
    tile, programs = mlp_tile(backward=hidden8 is not None)
    block_m, block_n, block_k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    part_n = block_n // tile["PARTS"]
    describe = TensorDescriptor.from_tensor
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(mlp_width, block_n)
    mlp_kernel[(min(tiles, programs * multiprocessors(a.device)),)](
        a_desc=describe(a, [block_m, block_k]),
        b_desc=describe(b, [block_n, block_k]),
        hidden_desc=None if hidden8 is None else describe(hidden8, [block_m, part_n]),
        out_desc=describe(out, [block_m, part_n]),
        out_t_desc=describe(out_t.view(torch.int8), [part_n, block_m]),
        tokens=tokens, mlp_width=mlp_width, factor=factor, WIDTH=width, LIMIT=torch.finfo(a.dtype).max, **tile)
    return out, out_t


class Fp8Mlp(Function):
    """relu_squared_mlp with FP8 matrix products: `Fp8Mlp.apply(h, up, down, scales, h8, h8_t)`.

    h [T, D] stands for the input and only takes its gradient, see NormedInput; h8 and h8_t are copies of the input by
    quantize_both. up and down are [H, D]; all but the copies are bf16; T, D and H are multiples of 16. The products
    are e4m3 by e4m3 forward, e5m2 by e4m3 backward, and those of cuBLAS there do not accumulate fast. What takes part
    in two needs two layouts.
    """
    @staticmethod
    def forward(ctx, h, up, down, scales, h8, h8_t):
        # By the scales: pre = product of FP8 values * x * weight, and hidden8 = relu(pre)^2 / hidden.
        up8, up8_t = quantize_both(up, scales.weight)
        down8, down8_t = quantize_both(down, scales.weight)
        hidden8, hidden8_t = mlp_product(h8, up8, (scales.x * scales.weight) ** 2 / scales.hidden)
        ctx.parameters = up, down
        ctx.scales = scales
        ctx.save_for_backward(h8_t, hidden8, hidden8_t, up8_t, down8)
        return fp8_matmul_nt(hidden8, down8_t, scales.hidden, scales.weight, fast_accum=True)

    @staticmethod
    def backward(ctx, grad_output):
        h8_t, hidden8, hidden8_t, up8_t, down8 = ctx.saved_tensors
        scales = ctx.scales
        dup, ddown = map(memory_for_grad, ctx.parameters)
        grad8, grad8_t = quantize_both(grad_output, scales.grad, E5M2)
        # dpre = dhidden * 2 relu(pre), where dhidden8 = product * weight and relu(pre) = sqrt(hidden8 * hidden).
        factor = 2.0 * scales.weight * scales.hidden ** 0.5
        dpre8, dpre8_t = mlp_product(grad8, down8, factor, hidden8)
        dh, dup = linear_backward(dpre8, dpre8_t, h8_t, up8_t, scales, dup)
        fp8_matmul_nt(hidden8_t, grad8_t, scales.hidden, scales.grad, fast_accum=False, out=ddown)
        return dh, dup, ddown, None, None, None


# ---- embedding gradient, sparse update -------------------------------------------------------------------------------
# The gradient of a table's row is the sum over all positions that hold its id: sorted by id, a group of
# neighbours. Some ids are very frequent (the comma: thousands of positions) and would keep one program busy
# for long. So the sorted positions are cut into spans of SPAN positions, and every span that lies within a group
# is summed by a program of its own. At the two ends of a group at most 2 (SPAN - 1) positions are left.
SPAN = 32


@jit
def sum_rows(x_ptr, order_ptr, begin, end, width, IDS_PER_ROW, BLOCK_M, BLOCK_N):
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
        offsets = row[:, None].to(tl.int64) * width + column
        tile = tl.load(x_ptr + offsets, valid[:, None] & (column < width), other=0.0)
        total += tl.sum(tile.to(tl.float32), axis=0)
    return total


@jit
def span_sum_kernel(
    grad_ptr, ids_ptr, order_ptr, partial_ptr, width, rank,
    IDS_PER_ROW: constexpr, SPAN: constexpr, PARTS: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """partial[s] = the sum of the gradient rows of span s, [spans, width] float32, if all its positions hold one id.

    Each program has one span. Sums of other spans are not written, and sum_group does not read them.
    """
    begin = tl.program_id(0) * SPAN
    first_id = tl.load(ids_ptr + tl.load(order_ptr + begin))
    last_id = tl.load(ids_ptr + tl.load(order_ptr + begin + SPAN - 1))
    if PARTS > 1:
        last_id = tl.where(first_id % PARTS == rank, last_id, -1)  # of PeerRows only this rank's
    if first_id == last_id:
        total = sum_rows(grad_ptr, order_ptr, begin, begin + SPAN, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
        column = tl.arange(0, BLOCK_N)
        tl.store(partial_ptr + begin // SPAN * width + column, total, column < width)


@jit
def sum_group(grad_ptr, order_ptr, partial_ptr, begin, end, width, IDS_PER_ROW, SPAN, BLOCK_M, BLOCK_N):
    """The sum of the gradient rows of one id, at sorted positions begin ... end - 1.

    It adds the rows before the first whole span, the partial sums of the whole spans and the rows after
    the last.
    """
    first_span = tl.cdiv(begin, SPAN)
    end_span = end // SPAN  # no whole span if first_span >= end_span
    head_end = tl.minimum(first_span * SPAN, end)
    tail_begin = tl.maximum(end_span * SPAN, head_end)
    total = sum_rows(grad_ptr, order_ptr, begin, head_end, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    total += sum_rows(partial_ptr, None, first_span, end_span, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    total += sum_rows(grad_ptr, order_ptr, tail_begin, end, width, IDS_PER_ROW, BLOCK_M, BLOCK_N)
    return total


@jit
def embedding_grad_kernel(
    grad_ptr, order_ptr, starts_ptr, partial_ptr, vocab_rows, dense_ptr, present_ptr, width,
    IDS_PER_ROW: constexpr, SPAN: constexpr,
    BLOCK_M: constexpr, BLOCK_N: constexpr, ADD: constexpr,
):
    """dense[v] = the sum of the gradient rows of id v, for all v < vocab_rows; ADD: += instead.

    Rows without any become zeros, or, with `present` of RowGrads, stay what they are. There are no atomics and no
    memset. The ids of a program are far apart, since frequent ids are neighbours. It moves 2 T D + 2 V D bytes in bf16,
    with `present` 2 T D + 2 U D for U ids that occur. Reference: embedding_grad_reference.
    """
    column = tl.arange(0, BLOCK_N)
    for row in range(tl.program_id(0), vocab_rows, tl.num_programs(0)):
        begin = tl.load(starts_ptr + row)
        end = tl.load(starts_ptr + row + 1)
        total = sum_group(
            grad_ptr, order_ptr, partial_ptr, begin, end, width, IDS_PER_ROW, SPAN, BLOCK_M, BLOCK_N)
        row_ptr = dense_ptr + tl.cast(row, tl.int64) * width + column
        # How many columns are written: none of a row without a gradient, unless it becomes zeros. To combine a mask
        # with a scalar, `inside & (begin < end)`, makes integers of it in Triton's interpreter, which refuses them as a
        # mask from 3.9 on.
        written = tl.where(begin < end, width, 0)
        if ADD:
            held = written
            if present_ptr is not None:
                held = tl.where(tl.load(present_ptr + row) > 0, written, 0)
                # Every warp reads `present`, and one writes it below: not before all have read it. A warp that came
                # later would add to its columns what an earlier step has left in the row.
                tl.debug_barrier()
            total += tl.load(row_ptr, column < held, other=0.0)
        elif present_ptr is None:
            written = width
        tl.store(row_ptr, total, column < written)
        if present_ptr is not None:
            tl.store(present_ptr + row, 1 if ADD else (begin < end).to(tl.int8), begin < end if ADD else True)


def sum_spans(grad, ids, order, rank=0, parts=1):
    """(the sums of whole spans, options for kernels that call sum_group) of grad [T, D], whose rows belong to ids.

    ids are [T] or [T, K]; order is that of sort_ids or group_ids. Of PeerRows in several parts, only those of `rank`.
    """
    spans = len(order) // SPAN
    width = grad.size(1)
    shape = dict(width=width, IDS_PER_ROW=len(order) // len(grad), SPAN=SPAN, BLOCK_N=triton.next_power_of_2(width))
    partial = grad.new_empty(max(spans, 1), width, dtype=torch.float32)
    if spans:
        span_sum_kernel[(spans,)](
            grad, ids, order, partial, rank=rank, PARTS=parts, BLOCK_M=triton.cdiv(4096, shape["BLOCK_N"]), num_warps=2,
            **shape)
    return partial, shape


def embedding_grad(grad, lookup, dense, present=None, add=False):
    """Write the gradient of a table [vocab_rows, D] to `dense`, or add it, from grad [T, D]; see embedding_grad_kernel.

    lookup: the ids [T] that the rows of grad belong to, and their order and starts, see sort_ids. `present` is that of
    RowGrads.
    """
    ids, order, starts = lookup
    grad = grad.contiguous()
    partial, shape = sum_spans(grad, ids, order)
    embedding_grad_kernel[(triton.cdiv(len(dense), 8),)](
        grad, order, starts, partial, len(dense), dense, present, BLOCK_M=4, ADD=add, num_warps=2, **shape)
    return dense


@jit
def peer_rows_kernel(
    ids_ptr, addresses_ptr, out_ptr, size, width,
    IDS_PER_ROW: constexpr, PARTS: constexpr, ROWS: constexpr, BLOCK_N: constexpr,
):
    """out[n] = the sum of the rows ids[n] of PeerRows in PARTS parts; a program has ROWS rows of out [size, width].

    Rows come through NVLink, but for one in PARTS: 2 K N D (PARTS - 1) / PARTS bytes in bf16. Reference:
    peer_rows_reference.
    """
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = number < size
    number = number.to(tl.int64)
    column = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for k in tl.static_range(IDS_PER_ROW):
        row = tl.load(ids_ptr + number * IDS_PER_ROW + k, valid, other=0).to(tl.int64)
        part_ptr = tl.load(addresses_ptr + row % PARTS).to(out_ptr.dtype)
        part_ptr = tl.multiple_of(part_ptr[:, None], [16, 16])
        total += load_vector(part_ptr, column, width, (row // PARTS)[:, None]).to(tl.float32)
    tl.store(out_ptr + number[:, None] * width + column, total, valid[:, None] & (column < width))


def peer_rows(ids, peers):
    """peer_rows_reference in a kernel."""
    width = peers.parts[0].size(1)
    out = peers.parts[0].new_empty(len(ids), width)
    block = triton.next_power_of_2(width)
    rows = max(2048 // block, 1)
    peer_rows_kernel[(triton.cdiv(len(ids), rows),)](
        ids, peers.addresses, out, len(ids), width, IDS_PER_ROW=ids.size(1), PARTS=len(peers.parts), ROWS=rows,
        BLOCK_N=block)
    return out


@jit
def adam_step_tile(weights, grad, second_moment, lr_ptr, wd_ptr, epsilon, CAUTIOUS):
    """adam_step in registers."""
    update = tl.load(lr_ptr) * grad / (tl.sqrt(second_moment) + epsilon)
    decaying = weights
    if CAUTIOUS:
        decaying = tl.where(update * weights > 0, weights, 0.0)
    return weights - update - tl.load(wd_ptr) * decaying


@jit
def adam_kernel(
    weights_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, lr_ptr, wd_ptr, beta1, beta2, epsilon, rows, width,
    addresses_ptr,
    RANKS: constexpr, CAUTIOUS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """One Adam step of BLOCK_M x BLOCK_N of the weights [rows, width], whose gradients grad [RANKS, rows, width] are
    averaged; float32 inside. Or the gradients are RowGrads, given by their addresses, and in the weights' dtype.

    With one rank it moves 14 bytes a weight in bf16, 12 in rows without a gradient: 38.6 M weights take 184 us on an
    H100. Reference: adam_reference.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < width)
    index = row[:, None] * width + column
    weights = tl.load(weights_ptr + index, inside, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + index, inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + index, inside, other=0.0)
    grad = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if addresses_ptr is None:
        for rank in tl.static_range(RANKS):
            grad += tl.load(grad_ptr + rank * rows * width + index, inside, other=0.0) / RANKS
    else:
        present = ()  # what all ranks answer is under way together, before the first answer is needed
        for rank in tl.static_range(RANKS):
            present_ptr = tl.load(addresses_ptr + RANKS + rank).to(tl.pointer_type(tl.int8))
            present += (load_vector(present_ptr, row, rows, other=0) > 0,)
        for rank in tl.static_range(RANKS):
            rows_ptr = tl.multiple_of(tl.load(addresses_ptr + rank).to(weights_ptr.dtype), 16)
            held = present[rank][:, None] & (column < width)
            grad += tl.load(rows_ptr + index, held, other=0.0).to(tl.float32) / RANKS

    exp_avg += (1 - beta1) * (grad - exp_avg)
    exp_avg_sq += (1 - beta2) * (grad * grad - exp_avg_sq)
    weights = adam_step_tile(weights, exp_avg, exp_avg_sq, lr_ptr, wd_ptr, epsilon, CAUTIOUS)
    tl.store(exp_avg_ptr + index, exp_avg, inside)
    tl.store(exp_avg_sq_ptr + index, exp_avg_sq, inside)
    tl.store(weights_ptr + index, weights, inside)


def adam(weights, received, *arguments, cautious=True):
    """adam_reference in a kernel.

    Inductor, which made one before, chose between two configurations by timing it alone. Beside NorMuon one of them is
    slow: after three of eight cold starts steps took 0.9 ms longer, on an H100.
    """
    grads, addresses, ranks = received, None, len(received)
    if isinstance(received, RowGrads):
        grads, addresses, ranks = None, received.addresses, len(received.grads)
    rows, width = weights.shape if weights.dim() == 2 else (1, len(weights))
    block_m, block_n = (4, 256) if rows > 1 else (1, 1024)
    adam_kernel[triton.cdiv(rows, block_m), triton.cdiv(width, block_n)](
        weights, grads, *arguments, rows, width, addresses, RANKS=ranks, CAUTIOUS=cautious,
        BLOCK_M=block_m, BLOCK_N=block_n)


@jit
def list_groups_kernel(
    starts_ptr, sorted_ids_ptr, places_ptr, counts_ptr, size, rank,
    PARTS: constexpr, BLOCK: constexpr,
):
    """Appends the sorted place where each group of equal ids ends: to places[0] if the group has one position, else to
    places[1]. Of PeerRows in several PARTS, only this rank's groups count.

    `places` is [2, size]; `counts` [2], zero before, becomes how many places each of the two has. Blocks append in any
    order. That changes no result, for every group has a row of its own.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = load_vector(starts_ptr, place, size)
    end = tl.load(starts_ptr + 1 + place, place < size, other=0)
    length = tl.where(place < size, end - begin, 0)  # 0: another member follows
    if PARTS > 1:
        length = tl.where(load_vector(sorted_ids_ptr, place, size) % PARTS == rank, length, 0)
    for longer in tl.static_range(2):
        member = length > 1 if longer else length == 1
        number = tl.cumsum(member.to(tl.int32), 0)
        first = tl.atomic_add(counts_ptr + longer, tl.max(number, 0), sem="relaxed")
        tl.store(places_ptr + longer * tl.cast(size, tl.int64) + first + number - 1, place, member)


@jit
def sparse_adam_kernel(
    grad_ptr, order_ptr, starts_ptr, partial_ptr, sorted_ids_ptr, places_ptr, count_ptr,
    weights_ptr, exp_avg_sq_ptr, last_step_ptr, step_ptr, lr_ptr, wd_ptr, beta2, epsilon, grad_scale,
    mean_square_ptr, pooling, width,
    IDS_PER_ROW: constexpr, SPAN: constexpr, CAUTIOUS: constexpr, PARTS: constexpr,
    ROWS: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):
    """One Adam step of the rows whose groups are listed in `places`: see list_groups_kernel.

    ROWS > 0: all listed groups have one position, and a program takes so many at a time, with all their loads under
    way together. ROWS = 0: they have more, and a program sums one after the other.
    It moves 2 K T D + 4 U D bytes in bf16, for U rows and K ids a token. Formula and reference: sparse_adam_reference.
    """
    TILE: constexpr = max(ROWS, 1)
    column = tl.arange(0, BLOCK_N)[None, :]
    count = tl.load(count_ptr)
    for begin_listed in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
        listed = begin_listed + tl.arange(0, TILE)
        valid = listed < count
        place = tl.load(places_ptr + listed, valid, other=0)
        row = tl.load(sorted_ids_ptr + place).to(tl.int64) // PARTS
        # The weights, and what the second moment needs, are loaded before the sum: there is one wait for all.
        weights = load_vector(weights_ptr, column, width, row[:, None])
        step = tl.load(step_ptr)
        last_step = tl.load(last_step_ptr + row)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + row)
        if ROWS:
            position = tl.load(order_ptr + place).to(tl.int64) // IDS_PER_ROW
            grad = load_vector(grad_ptr, column, width, position[:, None]).to(tl.float32)
        else:
            last = tl.load(places_ptr + begin_listed)
            begin = tl.load(starts_ptr + last)
            grad = sum_group(
                grad_ptr, order_ptr, partial_ptr, begin, last + 1, width, IDS_PER_ROW, SPAN, BLOCK_M, BLOCK_N)[None, :]
        grad = grad_scale * grad

        beta2_power = tl.exp2((step - last_step) * tl.log2(beta2))  # makes up for the steps that did not read the row
        exp_avg_sq = beta2_power * exp_avg_sq + (1 - beta2) * tl.sum(grad * grad, 1) / width
        typical = (1 - beta2) * grad_scale * grad_scale * tl.load(mean_square_ptr)
        pooled = (1 - pooling) * exp_avg_sq + pooling * typical
        weights = adam_step_tile(weights, grad, pooled[:, None], lr_ptr, wd_ptr, epsilon, CAUTIOUS)

        inside = valid[:, None] & (column < width)
        tl.store(weights_ptr + row[:, None] * width + column, weights, inside)
        tl.store(exp_avg_sq_ptr + row, exp_avg_sq, valid)
        tl.store(last_step_ptr + row, tl.zeros_like(last_step) + step, valid)


UPDATE_PROGRAMS = 2**14  # several times as many as a GPU holds at once; they share out the rows


def sparse_adam(grad, lookup, *state, rank=0, parts=1, pooling=0.0, cautious=True):
    """sparse_adam_reference in kernels.

    It takes 0.58 | 1.05 | 1.54 ms for 65,536 | 131,072 | 196,608 tokens in four pieces on an H200, and 0.83 | 1.59 |
    2.34 when each row had a program of its own. group_ids takes 0.11 | 0.17 | 0.23 more.
    """
    ids, order, starts, sorted_ids = lookup
    grad = grad.contiguous()
    partial, shape = sum_spans(grad, ids, order, rank, parts)
    mean_square = torch.linalg.vector_norm(grad, dtype=torch.float32).square() / grad.numel()
    size = len(order)
    places = order.new_empty(2, size, dtype=torch.int32)
    counts = order.new_zeros(2, dtype=torch.int32)
    list_groups_kernel[(triton.cdiv(size, 1024),)](
        starts, sorted_ids, places, counts, size, rank, PARTS=parts, BLOCK=1024)
    tile_rows = max(2048 // shape["BLOCK_N"], 1)
    for longer, rows, num_warps in ((0, tile_rows, 4), (1, 0, 2)):
        programs = min(triton.cdiv(size, rows or 2), UPDATE_PROGRAMS)
        sparse_adam_kernel[(programs,)](
            grad, order, starts, partial, sorted_ids, places[longer], counts[longer:], *state, mean_square, pooling,
            CAUTIOUS=cautious, PARTS=parts, ROWS=rows, BLOCK_M=4, num_warps=num_warps, **shape)


# ==== 8. Operator selection ===========================================================================================
@dataclass(frozen=True, kw_only=True)
class Ops:
    """The operators of this run. Model and optimizer call them and never ask what hardware they are on.

    Shapes: T tokens, H heads, Dk the width of a head's queries and keys, Dv of its values, W of the pointer's."""
    attention: Callable  # (q, k [T, H, Dk], v [T, H, Dv], documents, window, scale, gates [T, H]) -> [T, H, Dv]
    head_loss: Callable  # (x [T, width], head's weight, targets, softcap) -> sum over tokens in nats
    head_loss_eval: Callable  # the same without a gradient; Triton's sums in float64
    pointer: Callable  # (queries and keys [T, 2, W], documents, window, scale) -> log_copy [T] of Targets
    embed: Callable  # (table [rows, width], documents) -> [T, width]
    # (grad [T, width], lookup, dense [rows, width], present, add): the gradient of a table becomes `dense`, or is added
    # to it. lookup: the ids [T], and their order and starts by sort_ids. present: see RowGrads, or None.
    embedding_grad: Callable
    adam: Callable  # see adam_reference
    sparse_adam: Callable  # see sparse_adam_reference
    peer_rows: Callable  # (ids [N, K], PeerRows) -> [N, D]: see peer_rows_reference
    project_heads: Callable  # (NormedInput, weight, value, ...) -> q, k, v, value: see split_heads_reference
    mlp: Callable  # (NormedInput, up, down [mlp_width, width]) -> [T, width]
    orthogonalize: Callable  # (matrices [N, rows, columns], Orthogonalization) -> the same shape
    compile: Callable  # (function of tensors, its `count`) -> the same function, faster: see compile_dynamic
    attention_fp8: bool  # whether project_heads multiplies in FP8
    mlp_fp8: bool
    graphs: bool  # whole steps as CUDA graphs
    names: dict[str, str]  # what was chosen, for the log


def first_length(first, *_):
    return len(first)


def compile_dynamic(function: Callable, count: Callable = first_length) -> Callable:
    """torch.compile with one compilation for all numbers of tokens.

    count(*arguments) is the number that differs between calls, such as that of the tokens. A dimension of this size
    is symbolic in every tensor among the arguments, or in a tuple among them, but for parameters."""
    compiled = torch.compile(function, fullgraph=True)

    def call(*arguments, **options):
        size = count(*arguments)
        for argument in arguments:
            for tensor in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and size in tensor.shape:
                    torch._dynamo.maybe_mark_dynamic(tensor, tensor.shape.index(size))
        return compiled(*arguments, **options)
    return call


def uncompiled(function: Callable, count: Callable = first_length) -> Callable:
    return function


def reference_ops() -> Ops:
    """Plain PyTorch operators for any device, neither compiled nor captured."""

    def attention(q, k, v, documents, *settings):
        return attention_reference(q, k, v, documents.positions, *settings)

    def pointer(qk, documents, *settings):
        return pointer_reference(qk, documents.class_index, documents.positions, *settings)

    def embed(table, documents):
        return F.embedding(documents.tokens, table)

    def embedding_grad(grad, lookup, dense, present, add):
        found = embedding_grad_reference(grad, lookup[0], len(dense)).to(dense.dtype)
        if present is not None:
            present.mul_(int(add)).index_fill_(0, lookup[0].long(), 1)
        return dense.add_(found) if add else dense.copy_(found)

    def project_heads(inputs, weight, value, *rest, **settings):
        return *split_heads_reference(F.linear(inputs.h, weight), value, *rest, **settings), value

    def mlp(inputs, up, down):
        return relu_squared_mlp(inputs.h, up, down)

    names = dict.fromkeys(("attention", "head", "mlp", "embedding", "orthogonalize"), "reference")
    names |= {"compile": "off", "graphs": "off"}
    return Ops(
        attention=attention,
        head_loss=head_loss_reference,
        head_loss_eval=head_loss_reference,
        pointer=pointer,
        embed=embed,
        embedding_grad=embedding_grad,
        adam=adam_reference,
        sparse_adam=sparse_adam_reference,
        peer_rows=peer_rows_reference,
        project_heads=project_heads,
        mlp=mlp,
        orthogonalize=orthogonalize_reference,
        compile=uncompiled,
        attention_fp8=False,
        mlp_fp8=False,
        graphs=False,
        names=names)


def fp8_operands(inputs: NormedInput) -> tuple:
    """The last operands of ProjectHeads and Fp8Mlp: scales and copies; none where h is written."""
    if inputs.inverse_rms is None:
        return ()
    scales = MlpScales()
    return scales, *inputs.fp8_copies(quantize_both, scales.x)


def select_ops(device: torch.device, fast: bool = True, compile: bool = True, fp8: Sequence[str] = tuple(FP8_PARTS),
               graphs: bool = True) -> Ops:
    """The fastest operators that this device and installation support.

    `fast`: Triton's, else the reference. `fp8`: the parts whose products may be FP8, where the GPU can do it."""
    if not fast or device.type != "cuda" or triton is None:
        return reference_ops()

    fits = {"attention": hopper_class(device), "head": capability(device) >= (8, 9), "mlp": hopper_class(device)}
    fp8 = [part for part in fp8 if fits[part]]
    precision = {part: "fp8" if part in fp8 else "bf16" for part in FP8_PARTS}
    head_scales = HeadScales() if "head" in fp8 else None
    region = compile_dynamic if compile else uncompiled
    torch._dynamo.config.recompile_limit = 64  # regions x (attention variants, gradients on or off)

    def attention(q, k, v, documents, *settings):
        return PackedAttention.apply(q, k, v, documents.positions, documents.remaining, *settings)

    def head_loss(x, weight, targets, cap):
        return HeadLoss.apply(x, weight, targets.log_copy, targets, cap, head_scales)

    def pointer(qk, documents, *settings):
        return PointerLogCopy.apply(qk, documents.class_index, documents.positions, documents.remaining, *settings)

    def embed(table, documents):
        return EmbeddingLookup.apply(F.embedding, table, documents.tokens, documents.order, documents.starts)

    def project_heads(inputs, weight, value, value_gates, positions, cos, sin, *, heads, key_offset=False):
        return ProjectHeads.apply(
            inputs.h, weight, value, value_gates, positions, cos, sin, heads, key_offset, *fp8_operands(inputs))

    bf16_mlp = region(relu_squared_mlp)

    def mlp(inputs, up, down):
        fp8_mlp = fp8_operands(inputs)
        if fp8_mlp:
            return Fp8Mlp.apply(inputs.h, up, down, *fp8_mlp)
        if torch.is_grad_enabled():
            return bf16_mlp(inputs.h, up, down)
        # In place, because windows of the validation are long.
        return F.linear(inputs.h, up).relu_().square_() @ down

    names = precision | {"attention": f"triton ({precision['attention']} projection)", "embedding": "triton",
                         "orthogonalize": "triton", "compile": "inductor" if compile else "off",
                         "graphs": "cuda" if graphs else "off"}
    return Ops(
        attention=attention,
        head_loss=head_loss,
        head_loss_eval=head_loss_eval,
        pointer=pointer,
        embed=embed,
        embedding_grad=embedding_grad,
        adam=adam,
        sparse_adam=sparse_adam,
        peer_rows=peer_rows,
        project_heads=project_heads,
        mlp=mlp,
        orthogonalize=orthogonalize,
        compile=region,
        attention_fp8="attention" in fp8,
        mlp_fp8="mlp" in fp8,
        graphs=graphs,
        names=names)


# ==== 9. Runtime: ranks, watchdog, clock, log =========================================================================
class Failure(Exception):
    """An error that the user can act on, in one line: what, expected, found and the fix. `code` is the exit status."""

    def __init__(self, what: str, expected: Any, found: Any, fix: str, code: int = EXIT_USAGE, silent: bool = False):
        super().__init__(f"{what}: expected {expected}, found {found}; fix: {fix}")
        self.code = code
        self.silent = silent  # another rank says the same


def fail(*arguments, silent: bool = False) -> NoReturn:
    """Raise Failure(what, expected, found, fix, code)."""
    raise Failure(*arguments, silent=silent)


class Interrupted(KeyboardInterrupt):
    """One of STOP_SIGNALS has come. The exit status is a shell's for it: 130 for Ctrl-C."""

    def __init__(self, number: int, silent: bool = False):
        super().__init__("interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}")
        self.code = 128 + number
        self.silent = silent


def interrupt(number: int, _) -> NoReturn:
    """Handle a stop signal by an exception."""
    raise Interrupted(number)


def open_streams():
    """In the place of standard streams that a shell has closed (`>&-`), some that lead nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def printable(text: str, stream: TextIO) -> str:
    """`text` in the characters that a stream has: a path may have others, which are escaped."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def show(text: str, stream: TextIO):
    """Write `text` in one piece, so that lines of several ranks stay apart.

    Where nobody reads any more, or the disk is full, the stream leads nowhere from then on."""
    try:
        stream.write(printable(text, stream))
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def torchrun_number(name: str, default: str = "0") -> int:
    """A variable of torchrun; without torchrun its value for a single process."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        fail(name, "a number, as torchrun sets it", text, "unset it, or start with torchrun")
    return int(text)


def under_torchrun() -> bool:
    """Whether torchrun started this process and others beside it; else variables may be left over from a job."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def pick_device(local_rank: int) -> torch.device:
    """The GPU of this process, made the current one and given a stream of its own; without any GPU the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        fail("GPUs on this machine", f"at least {local_rank + 1}", count, "start fewer processes", EXIT_HARDWARE,
             silent=local_rank > count and under_torchrun())

    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    if capability(device)[0] == 9:  # measured there: with a workspace cuBLASLt clears some bytes before each product
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured in a graph
    return device


class Ranks:
    """The processes of one run, one device each. With one rank every collective does nothing.

    Where GPUs reach each other's memory, copy engines fetch the tensors that are `shared`: NCCL's kernels would take
    multiprocessors from what runs at the same time.
    """

    def __init__(self, rank: int, world: int, device: torch.device):
        self.rank = rank
        self.world = world
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.nccl = world > 1 and self.on_gpu
        self.copy_stream = None  # on which `fetch` copies, where memory can be shared
        self.peers = {}  # address of a shared tensor or part -> its handle, and every rank's version of it
        self.side_streams = [torch.cuda.Stream(priority=-1) for _ in range(2)] if self.on_gpu else []
        self.store = None  # torch's key-value store, if there are several
        self.processes = []  # the process number of each rank, alike
        self.nodes = [""] * world  # on which node each rank is, in words for messages if there are several
        self.stop_signal = 0  # the last one that came
        self.stop_together = False  # whether the ranks agree when to stop, see ask_to_stop
        self.heartbeat = lambda *_: None  # the watchdog's, while one watches

    @staticmethod
    def start(stall_limit_s: float = 120) -> Ranks:
        """Read torchrun's variables, pick the device and join the process group.

        A rank that does not come within twice the limit is an error. So is a collective, outside of CUDA graphs, that
        takes six times the limit: the watchdog, once there is one, has its say before.
        """
        rank = torchrun_number("RANK")
        world = torchrun_number("WORLD_SIZE", "1")
        if world not in (1, 2, 4, 8):
            fail("number of processes", "1, 2, 4 or 8", world,
                 "torchrun --nproc_per_node=8 (or 4, 2, 1), on several nodes together",
                 silent=rank > 0 and under_torchrun())
        if rank >= world:
            fail("RANK", f"below WORLD_SIZE, {world}", rank, "unset both, or start with torchrun")
        ranks = Ranks(rank, world, pick_device(torchrun_number("LOCAL_RANK")))
        handle_stop_signals(ranks.ask_to_stop)
        if world == 1:
            return ranks
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                fail(name, f"a value, as WORLD_SIZE is {world}", "none",
                     "unset RANK, WORLD_SIZE and LOCAL_RANK, or start with torchrun")
        port = torchrun_number("MASTER_PORT", "none")  # torch reads it: here only for a line where it is wrong
        if not 0 < port < 2**16:
            fail("MASTER_PORT", "1 to 65535", port, "unset it, or start with torchrun")

        # All ranks exchange first where they run: NCCL would wait without a limit for one that never comes.
        timeout = timedelta(seconds=2 * stall_limit_s)
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        ranks.store = store
        # The process number, a space, and " on HOST (node N)", which follows "rank N" in messages.
        store.set(f"process {rank}", f"{os.getpid()}  on {platform.node()} (node {os.environ.get('GROUP_RANK', '?')})")
        ranks.processes, _, nodes = zip(*(store.get(f"process {other}").decode().partition(" ")
                                          for other in range(world)))
        if len(set(nodes)) > 1:
            ranks.nodes = nodes

        # Those of 2.11 are the only names that every version has.
        warnings.filterwarnings("ignore", ".*(all_gather_into|reduce_scatter)_tensor. is deprecated", FutureWarning)
        dist.init_process_group("nccl" if ranks.nccl else "gloo", store=store, rank=rank, world_size=world,
                                timeout=3 * timeout, device_id=ranks.device if ranks.nccl else None)
        if ranks.nccl and not any(ranks.nodes):
            ranks._share_memory()
        return ranks

    @property
    def deals_rows(self) -> bool:
        """Whether each rank has a part of a sparse table, and reads the others' from where they are, see PeerRows."""
        return bool(self.copy_stream)

    @property
    def reads_all_memory(self) -> bool:
        """Whether this rank can read every rank's memory: all share it, or there is no other rank."""
        return self.deals_rows or self.world == 1

    @property
    def row_parts(self) -> int:
        """In how many parts rows of sparse tables are dealt out."""
        return self.world if self.deals_rows else 1

    def _share_memory(self):
        """Set `copy_stream`, and keep it if a first shared tensor works on every rank."""
        self.copy_stream = torch.cuda.Stream()
        with contextlib.suppress(RuntimeError):  # the GPUs, the driver or the container may not allow it
            self.shared(torch.zeros(self.world, device=self.device))
        if not all(self.gather_objects(bool(self.peers))):
            self.copy_stream = None

    def shared(self, tensor: Tensor, parts: int = 1) -> Tensor:
        """`tensor`, moved to memory that the other ranks can read, if there is such memory.

        Every rank must call it. The memory is never freed. `fetch` takes each of the `parts` by itself.
        """
        if not self.copy_stream:
            return tensor
        torch.cuda.empty_cache()  # what torch's allocator holds is not to be had here
        # torch (to 2.13; its issue 181086) clears this memory, and writes the addresses that barriers read, on a stream
        # for which no other stream waits. So all queued work must end first, as it may still write to where the
        # addresses will be; then torch's own work must end, before any rank uses the memory or a barrier.
        memory = symmetric_memory.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        torch.cuda.synchronize(self.device)
        handle = symmetric_memory.rendezvous(memory, dist.group.WORLD.group_name)
        torch.cuda.synchronize(self.device)
        memory.copy_(tensor)

        for part in memory.chunk(parts):
            place = part.shape, part.dtype, part.storage_offset()
            versions = [handle.get_buffer(rank, *place).view(self.world, -1) for rank in range(self.world)]
            self.peers[part.data_ptr()] = handle, versions
        return memory

    def versions(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's version of a shared tensor, in the order of the ranks."""
        if self.world == 1:
            return [tensor]
        _, versions = self.peers[tensor.data_ptr()]
        return [version.view_as(tensor) for version in versions]

    def meet(self, tensor: Tensor) -> Callable:
        """Returns the wait until every rank is where this one is now on the current stream; `tensor` is shared."""
        if self.world == 1:
            return lambda: None
        handle, _ = self.peers[tensor.data_ptr()]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            handle.barrier()
        return self.copy_stream.record_event().wait

    def fetch(self, full: Tensor, received: Tensor | None, barrier: bool = True) -> Callable:
        """Copy from other ranks' versions of a shared tensor. Returns the wait, which blocks the stream, not the host.

        Without `received` this is an all-gather in place: each rank's own shard comes from that rank. With `received`
        [world, ...] it is the exchange of a reduce-scatter: every rank's version of this rank's shard goes there.
        All copies are on one stream, in one order on every rank. So once a barrier is passed, every rank has read
        what it fetched before that barrier.
        """
        handle, versions = self.peers[full.data_ptr()]
        first = int(received is None)  # an all-gather skips its own shard
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            if barrier:
                handle.barrier()
            for distance in range(first, self.world):
                other = (self.rank + distance) % self.world  # so no two ranks read from the same one at the same time
                if received is None:
                    versions[self.rank][other].copy_(versions[other][other], non_blocking=True)
                else:
                    received[other].view(-1).copy_(versions[other][self.rank], non_blocking=True)
        return self.copy_stream.record_event().wait

    def on_side_stream(self, work: Callable, side: int = 0) -> Callable:
        """Queue `work` on one of two side streams, whose kernels go first where room is scarce. Returns the wait."""
        if not self.side_streams:
            work()
            return lambda: None
        stream = self.side_streams[side]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        return stream.record_event().wait

    def shard(self, full: Tensor) -> Tensor:
        """This rank's equal part of `full` along its first dimension, a view."""
        return full.unflatten(0, (self.world, -1))[self.rank]

    def reduce_scatter(self, full: Tensor, received: Tensor) -> Callable:
        """Bring every rank's version of this rank's shard of `full` to `received`. Returns the wait.

        If `full` is shared, `received` is [world, ...] and the caller averages. Else it is [1, ...], a view of the
        shard, which is averaged already.
        """
        if full.data_ptr() in self.peers:
            return self.fetch(full, received)
        if self.nccl:
            return dist.reduce_scatter_tensor(received[0], full, op=dist.ReduceOp.AVG, async_op=True).wait
        return self.all_reduce_mean(full)

    def all_reduce_mean(self, tensor: Tensor) -> Callable:
        """Average `tensor` over the ranks, in place. Returns the wait."""
        if self.nccl:
            return dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True).wait
        if self.world > 1:  # gloo has no mean
            self.sum(tensor).div_(self.world)
        return lambda: None

    def all_gather(self, full: Tensor, barrier: bool = True) -> Callable:
        """Fill `full` from every rank's shard of it, in place. Returns the wait.

        No barrier is needed if there was one since the ranks wrote their shards.
        """
        if self.world == 1:
            return lambda: None
        if full.data_ptr() in self.peers:
            return self.fetch(full, None, barrier)
        shard = self.shard(full)
        if not self.nccl:
            shard = shard.clone()  # gloo reads its input while it writes the output; NCCL knows the in-place form
        return dist.all_gather_into_tensor(full, shard, async_op=True).wait

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def name(self, rank: int) -> str:
        """A rank in words for a message, with its node if there are several."""
        return f"rank {rank}{self.nodes[rank]}"

    def gather_objects(self, value: Any) -> list:
        """Every rank's `value`, in the order of the ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def agree(self, what: str, find: Callable, fix: str, code: int = EXIT_USAGE) -> Any:
        """What `find` returns. Unless that is the same on every rank, all of them fail and name one that differs.

        If `find` fails, the other ranks are told why instead of waiting for one that has ended.
        """
        try:
            found = find()
        except (Failure, OSError) as error:
            found = explained(error, self)
        failed = isinstance(found, Failure)
        everywhere = self.gather_objects(str(found))
        # Of the ranks of a node that would say the same, the first one speaks.
        messages = self.gather_objects((failed and str(found), self.nodes[self.rank]))
        silent = messages.index(messages[self.rank]) < self.rank
        if failed:
            found.silent = silent
            raise found

        for rank, other in enumerate(everywhere):
            if other != everywhere[0]:
                differing = f"'{everywhere[0]}' on {self.name(0)}, '{other}' on {self.name(rank)}"
                fail(what, "the same on every rank", differing, fix, code, silent=silent)
        return found

    def on_first(self, work: Callable):
        """Do `work` on the first rank, while the others wait: without the limit of a collective, as a disk may be slow.
        Once in a run, because the key of the store stays."""
        if self.rank > 0:
            self.store.wait(["done on the first rank"], timedelta(days=7))
            return
        try:
            work()
        finally:
            if self.store:
                self.store.set("done on the first rank", "")

    def ask_to_stop(self, number: int, _):
        """Handle a stop signal. In the timed loop the first one only asks, as ranks are between different collectives:
        they agree to stop when they flush a logged step (Meter.flush). A second one acts at once."""
        asked = self.stop_signal
        self.stop_signal = number
        if asked or self.world == 1 or not self.stop_together:
            raise Interrupted(number, silent=self.rank > 0)

    def lost(self) -> str:
        """Which ranks of this node have ended or stand still, in words for a message. Only Linux tells."""
        # A dying process closes its connections before it counts as ended. Only Clock uses `time`, so an event sleeps.
        threading.Event().wait(1.0)
        lost = [str(rank) for rank, process in enumerate(self.processes)
                if self.nodes[rank] == self.nodes[self.rank] and process_stopped(process)]
        if not lost or str(self.rank) in lost:  # in the latter case nothing tells here
            return ""
        return f" (rank {', '.join(lost)} has ended or stands still)"

    def finish(self, code: int):
        """Leave the process group, or after a failure end the process at once.

        Neither NCCL nor the end of the interpreter may wait for a rank that has failed. After a success, gloo's threads
        end with the group, if nothing else refers to it: one that lets go of a tensor while the interpreter ends aborts
        the process.
        """
        if self.world == 1:
            return
        if code == EXIT_BUG:
            traceback.print_exc()
        if code:
            os._exit(code)
        dist.destroy_process_group()


@dataclass
class Watchdog:
    """Ends this process with exit code 4 when its last heartbeat is older than `limit_s`.

    It is needed because a collective waits for a dead rank for ever. A heartbeat on a GPU counts once more when the
    device reaches the point queued at it: the host may be far ahead and then wait. While `patience` is above 1, as in
    the warm-up, where the host compiles, it may be so many times as old.

    A stop signal first asks the ranks to agree on an end (Ranks.ask_to_stop). If they have not done so within
    STOP_LIMIT_S, the thread sends the signal once more, which acts at once; and if nothing happens within twice that
    time, it ends the process.

    What stands still before or after watched_log escapes it, except collectives, which have a time limit of their own
    (see Ranks.start).
    """
    ranks: Ranks
    limit_s: float
    log: RunLog

    def __post_init__(self):
        self.events = collections.deque()
        self.done = threading.Event()
        self.ranks.heartbeat = self.heartbeat
        self.heartbeat("the start")
        # Python's handlers wait for the main thread, which may wait for a rank that has died. This pipe gets the number
        # of every signal at once.
        self.signals, pipe = os.pipe()
        os.set_blocking(self.signals, False)
        os.set_blocking(pipe, False)
        signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self):
        """Watch no longer."""
        self.done.set()
        pipe = signal.set_wakeup_fd(-1)
        if pipe != -1:
            os.close(pipe)

    def heartbeat(self, doing: str, patience: float = 1.0):
        """Say that this rank goes on, with something that may take `patience` times the limit."""
        self.doing = doing
        self.patience = patience
        self.age_s = 0.0
        if self.ranks.on_gpu and patience == 1:  # in the warm-up a query would break a graph's capture
            self.events.append(torch.cuda.current_stream().record_event())

    def _watch(self):
        wait_s = min(1.0, self.limit_s / 8)
        asked_s = math.inf  # to go until the ranks should have agreed to stop
        while self.age_s <= self.limit_s * self.patience:
            if self.done.wait(wait_s):
                os.close(self.signals)
                return
            asked_s -= wait_s
            with contextlib.suppress(BlockingIOError):
                numbers = [number for number in os.read(self.signals, 4096) if number in STOP_SIGNALS]
                if numbers and asked_s == math.inf:
                    asked_s = STOP_LIMIT_S
                    self.limit_s = min(self.limit_s, 2 * STOP_LIMIT_S)
                    self.patience = 1.0
                    self.age_s = 0.0
            if asked_s <= 0:
                asked_s = STOP_LIMIT_S
                os.kill(os.getpid(), self.ranks.stop_signal or signal.SIGTERM)
            self.age_s += wait_s  # counted and not measured, so that the time of a suspended process does not count
            with contextlib.suppress(RuntimeError):  # a broken device: the main thread meets the same error and says so
                while self.events and self.events[0].query():
                    self.events.popleft()
                    self.age_s = 0.0

        message = (f"rank {self.ranks.rank}: expected progress within {self.limit_s * self.patience:g} s, "
                   f"found none since {self.doing}{self.ranks.lost()}; "
                   "fix: see what the others said first; if the machine is only slow, --stall-limit SECONDS")
        show(f"train_gpt: {message}\n", sys.stderr)
        self.log.line("end", state=f"failed: {message}", code=EXIT_HARDWARE)
        self.log.close()
        os._exit(EXIT_HARDWARE)


class Clock:
    """The only reader of the host's time.

    It runs from the synchronise before the first step to the one after the last, minus named pauses.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.origin = time.perf_counter() - process_age_seconds()
        self.intervals = []  # dictionaries {"on": bool, "reason": str, "start_ms": float, "end_ms": float}

    def since_start(self) -> float:
        """Seconds since the process started; for messages, never for results."""
        return time.perf_counter() - self.origin

    def date(self) -> str:
        """Now, in UTC, to the millisecond: it tells in which order runs were made."""
        return f"{np.datetime64(time.time_ns() // 1_000_000, 'ms')}Z"

    def switch(self, reason: str | None):
        """Wait for the device. Then time passes for `reason`, and counts if that is "training"; None stops it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = 1e3 * self.since_start()
        if self.intervals:
            self.intervals[-1].setdefault("end_ms", now)
        if reason:
            self.intervals.append({"on": reason == "training", "reason": reason, "start_ms": now})

    def milliseconds(self) -> float:
        """Time on the clock, up to now if it still runs (then without a synchronise)."""
        now = 1e3 * self.since_start()
        return sum(i.get("end_ms", now) - i["start_ms"] for i in self.intervals if i["on"])


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of 4 numbers of 4 bytes, because compiled code may load 16 bytes at a time."""
    return -(-size // 4) * 4


def process_fields(process: str) -> list[str]:
    """Fields of Linux's /proc/PID/stat after the name: state at [0], start at [19]. OSError where there is none."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def process_stopped(process: str) -> bool:
    """Whether a process has ended or stands still: Linux calls it dead (X), zombie (Z), stopped (T) or traced (t)."""
    try:
        return process_fields(process)[0] in "XZTt"
    except OSError:
        return True


def process_age_seconds() -> float:
    """Age of this process, with the start of the interpreter and imports; 0 where /proc does not tell."""
    try:
        started = int(process_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return float(Path("/proc/uptime").read_text().split()[0]) - started
    except OSError:
        return 0.0


def explained(error: BaseException, ranks: Ranks | None) -> Failure | None:
    """The Failure that an error of a file, the device or another rank amounts to; None for a bug or an interruption."""
    if isinstance(error, Failure):
        return error
    text = str(error).partition("\n")[0]
    found = f"'{text}'"
    if isinstance(error, OSError):
        return Failure("file", "to be there and to work", found, "check the path, its permissions and the disk")
    if isinstance(error, torch.OutOfMemoryError):
        return Failure("GPU memory", "enough", found,
                       "end other programs on this GPU (nvidia-smi), or a smaller --micro-batch-tokens or --preset",
                       EXIT_HARDWARE)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return Failure("memory", "enough", found, "end other programs, or a smaller --preset", EXIT_HARDWARE)
    if isinstance(error, torch.AcceleratorError) or type(error).__name__ == "OutOfResources":  # the latter is Triton's
        return Failure("GPU", "to run this", found,
                       "start again; if it stays, --reference, and test the GPU", EXIT_HARDWARE)
    from_gloo = "gloo" in text or "Application timeout" in text
    if isinstance(error, dist.DistError) or from_gloo and ranks and ranks.world > 1:
        return Failure("other ranks", f"an answer{ranks.lost() if ranks else ''}", found,
                       "start all of them, and see what they said first", EXIT_HARDWARE)
    return None


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability (major, minor); (0, 0) on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def hopper_class(device: torch.device) -> bool:
    """Whether a GPU has TMA and the shared memory of Hopper's, for which kernels and tiles were chosen."""
    return (9, 0) <= capability(device) < (12, 0)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the GPU has; 4 on a CPU, where Triton's interpreter needs some number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


# ---- run log ---------------------------------------------------------------------------------------------------------
class RunLog:
    """One JSON line an event, with a hash of itself and the line before. A thread writes, so the clock never waits.

    Without a path, as on all ranks but the first, nothing is written and nothing is shown. `curves`, a SummaryWriter of
    TensorBoard, gets the numbers of steps and validations too.
    """

    def __init__(self, path: Path | None, curves: Any = None):
        self.path = path
        self.curves = curves
        self.file = None
        self.chain = ""
        self.terminal = sys.stdout.isatty()
        if path:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.file = path.open("x")
            except OSError as error:
                self._give_up(error)
        self.queue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="run log", daemon=True)
        self.thread.start()

    def line(self, kind: str, **fields: Any):
        """An event for the log."""
        self.queue.put({"kind": kind, **fields})

    def say(self, text: str, bar: str = ""):
        """Text for the person who watches; the log does not keep it. A terminal shows `bar` below until the next."""
        if self.path:
            self.queue.put(f"\r\033[K{text}\n{bar}" if self.terminal else f"{text}\n")

    def close(self):
        """Write what is queued, then end the thread."""
        self.queue.put(None)
        self.thread.join(timeout=10)
        if self.file:
            self.file.close()
        if self.curves:
            self.curves.close()

    def _work(self):
        for item in iter(self.queue.get, None):  # until `close` queues None
            if isinstance(item, dict):
                self._append(item)
                self._draw(item)
            else:
                show(item, sys.stdout)

    def _append(self, event: dict):
        if not self.file:
            return
        text = json.dumps(event)
        self.chain = hashlib.sha256((self.chain + text).encode()).hexdigest()[:16]
        try:
            self.file.write(f'{text[:-1]}, "chain": "{self.chain}"}}\n')
            self.file.flush()
        except OSError as error:
            self._give_up(error)

    def _draw(self, event: dict):
        if self.curves and event["kind"] in ("step", "val"):
            try:
                for name in event.keys() & {"loss", "train_loss", "ms_per_step", "tokens"}:
                    self.curves.add_scalar(f"{event['kind']}/{name}", event[name], event["step"])
            except Exception as error:  # another package's: whatever it is, the run and its log go on
                show(f"curves: expected to write them, found '{error}'; "
                     "fix: free or permit their folder. The run goes on without.\n", sys.stderr)
                self.curves = None

    def _give_up(self, error: OSError):
        show(f"run log: expected to write {self.path}, found '{error}'; "
             "fix: free or permit that folder. The run goes on UNLOGGED.\n", sys.stderr)
        self.file = None


def machine_hash(gpus: Sequence) -> str:
    """Equal on the same machine with the same GPUs, and does not tell which those are."""
    identity = [platform.node(), os.cpu_count(), *(gpu.uuid for gpu in gpus)]
    return hashlib.sha256(" ".join(map(str, identity)).encode()).hexdigest()[:16]


def machine_facts() -> dict:
    """Versions and hardware. By `host` and `gpu_ids` runs beside each other show that they share no GPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "device": gpus[0].name if gpus else platform.machine(),
        "gpus": [gpu.name for gpu in gpus],
        "machine": machine_hash(gpus),
        "host": machine_hash([]),
        "gpu_ids": [machine_hash([gpu]) for gpu in gpus],
    }


@functools.cache
def script_hash() -> str:
    """files_hash of this file, read once: it may be edited or gone before the run that it began ends."""
    return files_hash([Path(__file__)])


def files_hash(paths: Sequence[Path]) -> str:
    """SHA-256 over what `sha256sum` would print of files, in order: records need no more to check it.

    Fails if a file differs from what a SHA256SUMS beside it states, or has the content of another one.
    """
    combined = hashlib.sha256()
    files = {}  # by their digest
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        line = f"{digest}  {path.name}\n"
        combined.update(os.fsencode(line))  # a name may be no UTF-8
        if digest in files:
            fail(f"{path}: content", "another file's than the others'", f"that of {files[digest].name}",
                 "fetch both files again; without a fetch remove one, and number the others anew")
        files[digest] = path

        sums = path.with_name("SHA256SUMS")
        stated = sums.read_text(errors="replace").splitlines() if sums.is_file() else ()
        # sha256sum puts a second space before a name, or `*` where it read in binary mode.
        digests = [given.lower() for given, _, name in (one.partition(" ") for one in stated) if name[1:] == path.name]
        if digests and digest not in digests:
            fail(f"{path}: SHA-256", "what SHA256SUMS states", digest, "fetch this file again")
    return combined.hexdigest()


# ==== 10. Main ========================================================================================================
def within(kind: type, least: float, most: float = math.inf) -> Callable:
    """A reader of option values: numbers of a kind, from `least` to `most`."""
    def number(text):
        value = kind(text)
        if not least <= value <= most:  # so that nan is refused too
            raise argparse.ArgumentTypeError(f"expected a number from {least} to {most}, found {text}")
        return value
    return number


def length_option(text: str) -> float | str:
    """A reader of --length: a number, or "auto"."""
    return text if text == "auto" else within(float, *LENGTHS)(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    positive = within(int, 1)
    parser = argparse.ArgumentParser(description="Train a small GPT as fast as the machine allows.", allow_abbrev=False)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="speedrun")
    add("--data", type=Path, help="folder with *_train_*.bin and *_val_*.bin (default: the preset's)")
    add("--length", type=length_option, default=1.0,
        help="train so many times the preset's steps; auto: as many as fit into one pass over the shards")
    add("--seed", type=within(int, 0, 2**62), help="fixes the initial weights; drawn and logged without it")
    add("--val-every", type=positive, help="validate every so many steps too, off the clock")
    add("--sample-every", type=positive, metavar="N", help="show what the model writes every N steps, off the clock")
    add("--stop-after", type=positive, help="end after so many steps of the schedule; no record")
    add("--log-dir", type=Path, default=Path("logs"))
    add("--eager", action="store_true", help="without torch.compile")
    add("--no-graphs", action="store_true", help="launch every kernel of every step instead of replaying CUDA graphs")
    add("--no-fp8", action="append", nargs="?", choices=(*FP8_PARTS, "all"), const="all",
        help="bfloat16 QKV projections, head or MLPs, once for each; or all")
    add("--reference", action="store_true", help="plain PyTorch operators: what a machine without Triton uses")
    add("--stall-limit", type=within(float, 0.1, 1_000_000), default=120,
        help="exit code 4 if nothing progresses for so many seconds")
    add("--micro-batch-tokens", type=positive,
        help="at most so many tokens at a time, at least an eighth of a step's; as the memory allows without it")
    add("--save", type=Path, metavar="FILE", help="write the trained model, for sample.py")
    add("--gpu-hour-price", type=within(float, 0), metavar="P", help="say at the end what the run has cost")
    add("--tensorboard", type=Path, metavar="DIR", help="curves there too; needs the package tensorboard")
    add("--checkpoint", type=Path, metavar="FILE", help="keep the run's state there, for --resume; no record")
    add("--checkpoint-every", type=positive, metavar="N", help="every N steps, off the clock")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint of the same run; no record")
    add("--check", action="store_true", help="stop where the warm-up would begin")
    arguments = parser.parse_args(argv)
    if (arguments.checkpoint is None) != (arguments.checkpoint_every is None):
        parser.error("expected both --checkpoint FILE and --checkpoint-every N, or none of them")
    return arguments


def check_versions(ranks: Ranks):
    if torch.__version__ < "2.11.0a0":
        fail("torch", ">= 2.11", torch.__version__, "pip install -r requirements.txt")
    if torch.__version__ >= "2.16.0a0" and ranks.rank == 0:  # every test has passed with versions up to there, on a CPU
        print(f"train_gpt: torch {torch.__version__}: newer than any that was tried; if it fails: "
              "pip install -r requirements.txt", file=sys.stderr)


def writable_place(path: Path) -> Path:
    """The folder that is there already, in which a file is to be made."""
    place = path.absolute().parent
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        fail(f"saving {path}", f"permission to write in {place}", "none", "choose another place")
    return place


def check_whole_numbers(part: Any, require: Callable, what: str = ""):
    """What check_preset asks of the fields that are integers: half a size, 1024 / 2, is none."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.type == "int" or field.type == "int | None" and value is not None:
            require(isinstance(value, int), f"{what}{field.name}", "a whole number", value)


def check_layers(model: ModelConfig, require: Callable):
    """What check_preset asks of the table of layers: that nothing in it is ignored, and that what a layer reads is
    there."""
    require(any(layer.attention or layer.mlp for layer in model.layers), "layers", "one that is not empty", "none")
    tables = range(model.value_embeddings)
    earlier = []  # the layers so far that are not empty
    for index, layer in enumerate(model.layers):
        what = f"layer {index}"
        require(layer.window in ("short", "long"), f"{what}: window", "short or long", layer.window)
        for name in ("key_offset", "value_embedding", "attention_from"):
            unused = getattr(layer, name) is None or getattr(layer, name) is False
            require(layer.attention or unused, f"{what}: {name}", "attention in this layer", "none")
        empty = not (layer.attention or layer.mlp)
        require(not empty or layer.skip_from is None, f"{what}: skip_from", "attention or an MLP in this layer", "none")

        for name in ("skip_from", "attention_from"):
            source = getattr(layer, name)
            require(source in (None, *earlier), f"{what}: {name}",
                    f"an earlier layer that is not empty, of {', '.join(map(str, earlier)) or 'none'}", source)
        table = layer.value_embedding
        require(table in (None, NGRAMS, *tables), f"{what}: value_embedding",
                f"None, NGRAMS or below value_embeddings, {len(tables)}", table)
        if not empty:
            earlier.append(index)
    read = {layer.value_embedding for layer in model.layers}.intersection(tables)
    require(model.final_values or len(read) == len(tables), "value_embeddings",
            f"{len(read)}, as layers read no more and final_values is off", len(tables))


def check_model(preset: Preset, require: Callable):
    """What check_preset asks of the model."""
    model = preset.model
    require(model.key_width % 4 == 0, "key_width", "a multiple of 4", model.key_width)
    unit = preset.fp8_unit
    side = max(unit, 4)  # so that parameters that follow one another are aligned to 16 bytes
    sides = {
        "width": model.width,
        "mlp_width": model.mlp_width,
        "heads * key_width": model.heads * model.key_width,
        "heads * head_width": model.attention_width,
    }
    for name, size in sides.items():
        require(size > 0 and size % side == 0, name, f"a multiple of {side}", size)
    width = model.width  # values of n-grams are channels of the stream
    require(model.attention_width <= width, "heads * head_width", f"at most the width, {width}", model.attention_width)
    most = min(width, 2 * model.attention_width)  # half of them are a value embedding's
    require(model.gate_inputs % 2 == 0 and 0 < model.gate_inputs <= most, "gate_inputs", f"an even number up to {most}",
            model.gate_inputs)
    require(model.pointer_width >= 0, "pointer_width", "0 or more", model.pointer_width)
    window = model.pointer_window_tokens
    require(window >= 1, "pointer_window_tokens", "at least 1; pointer_width=0 switches it off", window)
    least = model.vocabulary + bool(model.pointer_width)  # the pointer's copy token follows the vocabulary
    padded = model.padded_vocabulary
    rows = max(unit, CHUNKS)  # each of eight ranks has as many
    require(padded >= least and padded % rows == 0, "padded_vocabulary", f"a multiple of {rows}, at least {least}",
            padded)
    require(model.dtype in ("bfloat16", "float32"), "dtype", "bfloat16 or float32", model.dtype)

    most = len(NGRAM_MULTIPLIERS)
    require(1 <= model.ngram_orders <= most, "ngram_orders", f"1 to {most}, rows of NGRAM_MULTIPLIERS",
            model.ngram_orders)
    fewest = 2 * model.ngram_orders  # of each order a row for incomplete n-grams, and one for others
    hashed = model.ngram_rows
    require(hashed == 0 or hashed >= fewest, "ngram_rows", f"0, or at least {fewest}", hashed)
    pieces = model.ngram_pieces
    require(pieces in range(1, 5) and model.width % (2 * pieces) == 0, "ngram_pieces",  # sample.py halves a piece
            f"1 to 4 that have even widths, of {model.width} together", pieces)

    check_layers(model, require)


def check_optimizer(config: OptimizerConfig, require: Callable):
    """What check_preset asks of the optimizer."""
    for name in ("cooldown_fraction", "momentum_warmup_fraction", "momentum_cooldown_fraction", "averaging_lookback",
                 "averaging_interval_steps", "drift_cooldown_fraction"):
        value = getattr(config, name)
        require(value > 0, name, "above 0; 1e-9 is as good as none", value)
    for name in ("drift_factor", "drift_decay", "second_moment_decay"):
        value = getattr(config, name)
        require(0 <= value < 1, name, "0 or more, and below 1", value)
    for name in ("averaging_fraction", "averaged_share", "ngram_pooling"):
        value = getattr(config, name)
        require(0 <= value <= 1, name, "0 to 1", value)
    for name in ("muon_learning_rate", "muon_weight_decay", "adam_learning_rate", "final_learning_rate"):
        value = getattr(config, name)
        require(value >= 0, name, "0 or more", value)
    require(config.adam_epsilon > 0, "adam_epsilon", "above 0", config.adam_epsilon)
    momenta = config.muon_momentum
    require(all(0 <= momentum < 1 for momentum in momenta), "muon_momentum", "two of 0 or more, and below 1", momenta)

    usual = dict(OptimizerConfig.rules)
    differing = usual.keys() ^ dict(config.rules)
    require(not differing, "rules", "one for each role", f"more or less of {', '.join(sorted(differing))}")
    for role, rule in config.rules:
        what = f"rule of {role}"
        other = usual[role]
        require(type(rule) is type(other), what, type(other).__name__, type(rule).__name__)
        multiplier = rule.learning_rate_multiplier
        require(multiplier >= 0, what, "a learning_rate_multiplier of 0 or more", multiplier)
        if isinstance(rule, MuonRule):
            continue
        require(rule.decay >= 0, what, "a decay of 0 or more", rule.decay)
        for name in ("sparse", "sharded", "looked_up"):  # they say of what kind the parameter is
            usual_value = getattr(other, name)
            require(getattr(rule, name) == usual_value, what, f"{name}={usual_value}", getattr(rule, name))
        require(all(0 <= beta < 1 for beta in rule.betas), what, "betas of 0 or more, and below 1", rule.betas)
        require(not rule.sparse or rule.betas[0] == 0, what, "a first beta of 0, as there is no first moment",
                rule.betas)


def check_scores(preset: Preset, require: Callable):
    """What check_preset asks of the scales of scores, whose softmax has no running maximum."""
    model = preset.model
    require(model.rotary_base > 0, "rotary_base", "above 0", model.rotary_base)
    scales = [rotary_frequencies(preset, index)[1] for index in range(len(preset.stages))]  # YaRN raises them
    require(min(scales) > 0, "attention_scale", "scales above 0, where windows shrink too", min(scales))
    largest = {"attention_scale": max(scales) * model.key_width,
               "pointer_scale": model.pointer_scale * model.pointer_width}
    for name, score in largest.items():
        require(score < 60, name, "scores below 60", f"up to {score:.1f} with a scale of {getattr(model, name)}")


def check_values(preset: Preset, require: Callable):
    """What check_preset asks of the whole preset, and of its stages."""
    for part in (preset, preset.model, preset.optimizer):
        check_whole_numbers(part, require)
    for index, layer in enumerate(preset.model.layers):
        check_whole_numbers(layer, require, f"layer {index}: ")
    for index, stage in enumerate(preset.stages):
        check_whole_numbers(stage, require, f"stage {index}: ")
        hash(stage)  # tables are by stage, and a list has no hash
    check_model(preset, require)
    check_optimizer(preset.optimizer, require)
    for name in ("steps", "val_tokens", "val_window_tokens", "log_every_steps"):
        require(getattr(preset, name) >= 1, name, "at least 1", getattr(preset, name))
    parts = ", ".join(FP8_PARTS)
    require(FP8_PARTS.keys() >= set(preset.fp8), "fp8", f"a tuple of some of {parts}", preset.fp8)
    windows = preset.val_attention_windows
    require(len(windows) == 2 and min(windows) >= 1, "val_attention_windows", "two, both at least 1", windows)
    softcap = preset.model.softcap
    require(isinstance(softcap, Softcap) and 0 < softcap.softcap < 60, "softcap",
            "a Softcap below 60, as the softmax has no running maximum", softcap)
    require(softcap.temperature > 0, "softcap", "a temperature above 0", softcap)
    unit = preset.fp8_unit
    for index, stage in enumerate(preset.stages):
        for name in ("steps", "learning_rate_multiplier"):
            require(getattr(stage, name) >= 0, f"stage {index}: {name}", "0 or more", getattr(stage, name))
        tokens = stage.batch_tokens
        require(tokens > 0 and tokens % (CHUNKS * unit) == 0, f"stage {index}: batch_tokens",
                f"a multiple of {CHUNKS * unit}", tokens)
        classes = stage.sampled_classes
        require(classes is None or classes > 0 and classes % unit == 0, f"stage {index}: sampled_classes",
                f"None, or a multiple of {unit}", classes)
        later = preset.stages[index + 1:]
        require(not stage.extension or all(each.extension for each in later), f"stage {index}: extension",
                "one at the end", "another stage after it")
        for name in ("document_cap_tokens", "short_window_tokens", "long_window_tokens"):
            require(getattr(stage, name) >= 1, f"stage {index}: {name}", "at least 1", getattr(stage, name))
        first, last = map(len, stage.targets)
        require(first == last > 0, f"stage {index}: targets", "as many at its end as at its start", stage.targets)
    check_scores(preset, require)
    step_rates(preset, 0)  # fails where one of its pairs is a number


def check_preset(preset: Preset):
    """Fail where a preset that somebody has edited asks for what would hang, crash or be ignored."""
    fix = f"change the preset {preset.name} in train_gpt.py"

    def require(good: bool, what: str, expected: str, found: Any):
        if not good:
            fail(what, expected, found, fix)

    try:
        check_values(preset, require)
    except (TypeError, ValueError, AttributeError) as error:  # a number for a pair, and the like
        fail(f"preset {preset.name}", "values of the kinds that the usual ones have", f"'{error}'", fix)


def here_or_beside(folder: Path) -> Path:
    """A folder below the working directory, or beside this script if it is only there."""
    beside = Path(__file__).parent / folder
    return beside if beside.is_dir() and not folder.is_dir() else folder


def data_folder(arguments: argparse.Namespace, preset: Preset) -> Path:
    """Where the shards are."""
    return arguments.data or here_or_beside(Path(preset.data))


def fast_operators(arguments: argparse.Namespace, ranks: Ranks) -> bool:
    """Whether Triton's kernels are to run: they and bfloat16 in hardware begin at capability (8, 0)."""
    return capability(ranks.device) >= (8, 0) and not arguments.reference


def check_start(arguments: argparse.Namespace, preset: Preset, ranks: Ranks):
    """Fail if a run cannot begin or keep what it should, as far as that shows before the data are there."""
    check_versions(ranks)
    if fast_operators(arguments, ranks):
        for name in ("key_width", "head_width", "pointer_width"):
            width = getattr(preset.model, name)
            if width & (width - 1):
                fail(name, "a power of two on a GPU", width, f"change the preset {preset.name} in train_gpt.py")
    kept = arguments.checkpoint
    if arguments.save:
        sibling("--save").check_place(arguments.save, preset.model)
        if kept and arguments.save.resolve() in (kept.resolve(), Checkpoints.own_path(kept, ranks).resolve()):
            fail("--save and --checkpoint", "two files", arguments.save, "give them different names")
    for option, path in (("--save", arguments.save), ("--checkpoint", kept)):
        if path and path.resolve() == arguments.log_dir.resolve():
            fail(f"{option} and --log-dir", "a file and a folder", path, "give them different names")
    if arguments.check and ranks.rank == 0:
        try:
            writable_place(arguments.log_dir / "log")
        except Failure as failure:
            show(f"train_gpt: {failure}. A run would go on UNLOGGED.\n", sys.stderr)
    if arguments.tensorboard:
        writable_place(arguments.tensorboard)
        summary_writer()
    samples_along(arguments, preset)
    if kept:
        path = Checkpoints.own_path(kept, ranks)
        writable_place(path)
        if path.exists():  # only what is a checkpoint may be replaced
            content = read_checkpoint(path)
            if ranks.rank == 0 and not (arguments.resume and arguments.resume.resolve() == kept.resolve()):
                show(f"{path} holds step {content['step']} of seed {content['seed']} and will be replaced: "
                     f"--resume {kept} would go on from it\n", sys.stderr)


def ready(trainer: Trainer) -> str:
    """What a start has found, in a line for --check."""
    stream = trainer.stream
    return (f"ok: {stream.consumed(trainer.preset.stages):,} of {stream.length:,} training tokens in "
            f"{len(stream.paths)} shards, SHA-256 {trainer.data_hash[:16]}; "
            f"micro-batches of {trainer.sizes_of_micro_batches()}")


def announce(preset: Preset, ranks: Ranks, ops: Ops):
    """Say what will be trained, on which devices and with which operators."""
    version = capability(ranks.device)
    gpu = f"capability {version}" if any(version) else "no GPU"
    if (0, 0) < version < (8, 0):  # where Triton's support and bfloat16 in hardware begin
        gpu += ", below the (8, 0) of the fast operators, so slow"
    nodes = len(set(ranks.nodes))
    place = f" on {nodes} nodes" if nodes > 1 else ""
    sharing = " that share memory" if ranks.copy_stream else ""
    chosen = ", ".join(f"{name}: {choice}" for name, choice in ops.names.items())
    show(f"{preset.status}\n{ranks.world} rank(s){place}{sharing}, {machine_facts()['device']}, "
         f"{gpu}, {chosen}\n", sys.stdout)


def build_trainer(arguments: argparse.Namespace, ranks: Ranks) -> Trainer:
    """The trainer that the options ask for. Whatever can be checked before the GPU works has then been checked."""
    preset = PRESETS[arguments.preset]
    if preset.name != arguments.preset:  # logs and records would have another's name
        fail("name of the preset", arguments.preset, preset.name, "give it as the field name", silent=ranks.rank > 0)
    ranks.agree("preset", lambda: check_preset(preset), "start every node with the same files")
    folder = data_folder(arguments, preset)
    here = f"{ranks.nodes.count(ranks.nodes[ranks.rank])} processes, {' '.join(sys.argv[1:])}"
    ranks.agree("nodes", lambda: f"{here}, torch {torch.__version__}, script {script_hash()[:8]}",
                "start every node with the same --nproc_per_node, options and files")
    if arguments.length == "auto":
        arguments.length = ranks.agree("length", lambda: automatic_length(preset, folder),
                                       "copy the shards of one node to the others")
        if ranks.rank == 0:
            show(f"--length auto: here --length {arguments.length}\n", sys.stdout)
    preset = scaled_preset(preset, arguments.length)

    bfloat16 = preset.model.dtype == "bfloat16"
    without = arguments.no_fp8 or []
    fp8 = [part for part in preset.fp8 if bfloat16 and part not in without and "all" not in without]
    ops = select_ops(ranks.device, fast_operators(arguments, ranks), compile=not arguments.eager, fp8=fp8,
                     graphs=not arguments.no_graphs)

    if ranks.rank == 0:
        announce(preset, ranks, ops)
    ranks.agree("start", lambda: check_start(arguments, preset, ranks), "start every node with the same files")
    return Trainer(preset, ranks, ops, Clock(ranks.device), folder, arguments.micro_batch_tokens)


def summary_writer() -> type:
    """TensorBoard's writer, which torch has for those who installed the rest."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fail("--tensorboard", "the package tensorboard", f"'{error}'",
             "pip install tensorboard, or without it python records export RUN --csv")
    return SummaryWriter


def sibling(option: str) -> Any:
    """sample.py, which writes models and continues texts: no run without such an option reads it."""
    sys.modules.setdefault("train_gpt", sys.modules[__name__])  # it reads this module, of which a script has one alone
    try:
        import sample
    except ImportError as error:
        fail(option, "sample.py and data/fineweb.py beside train_gpt.py", f"'{error}'",
             "start it in a whole clone, or leave the option out")
    return sample


def samples_along(arguments: argparse.Namespace, preset: Preset) -> Any:
    """What shows texts of the model along the way, if the options ask for it."""
    if not arguments.sample_every:
        return None
    samples = sibling("--sample-every").Samples
    return samples(arguments.sample_every, preset.model.vocabulary, data_folder(arguments, preset))


@contextlib.contextmanager
def watched_log(trainer: Trainer, name: str, arguments: argparse.Namespace) -> Iterator[RunLog]:
    """The log of a run, which says how it ended, while a watchdog watches."""
    ranks = trainer.ranks
    path = curves = None
    if ranks.rank == 0:
        path = arguments.log_dir / f"{name}.jsonl"
        curves = summary_writer()(arguments.tensorboard / name) if arguments.tensorboard else None
    log = RunLog(path, curves)
    watchdog = Watchdog(ranks, arguments.stall_limit, log)
    try:
        yield log
    except BaseException as error:
        handle_stop_signals(signal.SIG_IGN)  # the log gets its end
        cause = explained(error, ranks) or error
        state = "interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {cause}"
        log.line("end", state=state, code=getattr(cause, "code", None))
        raise
    finally:
        watchdog.end()
        log.close()


class Ending:
    """Ends a process: an error that a user can act on becomes a line and an exit code, and the ranks part.

    A bug goes on as the exception that it is. Until then a stop signal is such an error, and while it ends, none."""
    ranks: Ranks | None = None  # once they have met
    code = 0

    def __enter__(self) -> Ending:
        self.handlers = handle_stop_signals(interrupt)
        return self

    def __exit__(self, kind, error, _) -> bool:
        handle_stop_signals(signal.SIG_IGN)
        ranks = self.ranks
        cause = error
        if isinstance(error, Exception):
            cause = explained(error, ranks)
            self.code = cause.code if cause else EXIT_BUG
        elif isinstance(error, KeyboardInterrupt):
            cause = error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT)
            self.code = cause.code
        told = isinstance(cause, Failure | Interrupted)

        if told and not cause.silent:
            rank = f"{ranks.name(ranks.rank)}: " if ranks and ranks.world > 1 else ""
            show(f"train_gpt: {rank}{cause}\n", sys.stderr)
        if ranks:
            ranks.finish(self.code)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        return told


def main(argv: list[str] | None = None) -> int:
    """Train as the options say. Returns the exit code."""
    open_streams()
    arguments = parse_arguments(argv)
    with Ending() as ending:
        ranks = ending.ranks = Ranks.start(arguments.stall_limit)
        seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
        seed = ranks.gather_objects(seed)[0]  # each rank may have drawn its own
        trainer = build_trainer(arguments, ranks)
        preset = trainer.preset
        steps = min(preset.steps, arguments.stop_after or preset.steps)
        checkpoints = Checkpoints(arguments.checkpoint, arguments.checkpoint_every, seed)
        if (arguments.checkpoint_every or 0) > steps:
            fail("--checkpoint-every", f"at most {steps}, the steps of this run", arguments.checkpoint_every,
                 "a smaller one", silent=ranks.rank > 0)
        if arguments.resume:
            checkpoints.read(arguments.resume, trainer, steps, arguments.seed)
            seed = checkpoints.seed
        if arguments.check:
            if ranks.rank == 0:
                print(ready(trainer), flush=True)
            return ending.code

        defaults = vars(parse_arguments([]))
        settings = {option: str(value) for option, value in vars(arguments).items()
                    if value != defaults[option] and option != "gpu_hour_price"}
        name = f"{preset.name}-w{ranks.world}-s{seed}-{secrets.token_hex(3)}"
        with watched_log(trainer, name, arguments) as log:
            loss = train(trainer, seed, log, steps, arguments.val_every, settings, checkpoints,
                         samples_along(arguments, preset))
            if arguments.gpu_hour_price is not None:
                log.say(costs(ranks, trainer.clock, arguments.gpu_hour_price))

        if arguments.save:
            save = functools.partial(sibling("--save").save_model, arguments.save, trainer, loss, seed)
            # The others wait, since the first rank reads their rows, and end with it if it fails.
            ranks.agree("saved model", lambda: ranks.on_first(save), "see what the first rank says")
        trainer.graphs.clear()  # NCCL waits for ever to end a communicator that a graph still uses
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
