"""A roofline of one training step:
the time of every kernel beside the time that its bytes or operations need; not a test.

    python benchmarks/roofline.py --preset sprint --out table.md     the stage before the extension; --stage N
    python benchmarks/roofline.py --preset sprint --data FOLDER --model ngram_rows=33554432 pointer_width=0
    python benchmarks/roofline.py --preset smoke --stage 1 --steps 2 on a CPU: proves that it runs through
    python benchmarks/roofline.py --preset sprint --ncu              a command for Nsight Compute, which fills ncu.csv
    python benchmarks/roofline.py --preset sprint --ncu-csv ncu.csv  the table with the DRAM bytes measured so

A step without CUDA graphs under torch.profiler gives each kernel its operator, shapes and part of the step. Replays of
the captured step on the same batch give the times: kernels of one name and grid come in the same order there. Bytes and
operations are computed, see roofline_costs.py:

- train_gpt.py's kernels: from the arguments of each launch;
the visible pairs of attention are those of the batch's documents.
- Inductor's kernels: from the arguments in the trace, and the loads and stores in the generated source.
- Matrix products and other operators of torch: from the operands in the trace. Where no rule fits, cells are empty.

This script wraps internals of train_gpt.py: its kernels, to record their launches, and its operators, to name the parts
of a step. Neither happens in the replays. What fails is said below the sums, and costs only the cells that it would
have filled.
"""

import argparse
import ast
import contextlib
import csv
import dataclasses
import functools
import json
import math
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roofline_costs import CEILINGS, OWN, Cost, described, inductor_cost, operands, operator_cost
from roofline_trace import PART, Trace, base_name, kernel_key

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg

# Dense bfloat16 TFLOP/s as the vendors state them. A key is a part of the device's name; the first that fits counts.
PEAK_TFLOPS = {
    "B200": 2250.0, "H200 NVL": 835.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "A100": 312.0}
METRICS = "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,sm__inst_executed_pipe_tensor.sum"

# The parts of a step: operators (fields of Ops), compiled functions, and classes of the optimizer.
THEMES = {
    "attention": ("attention",),
    "QKV and output projection": ("project_heads",),  # and the product in attention_out
    "MLP": ("mlp", "relu_squared_mlp"),
    "head and loss": ("head_loss",),
    "pointer": ("pointer", "pointer_in"),
    "embeddings and tables": ("embed", "LookupTable", "AdamTable"),
    "n-grams": ("sum_rows", "SparseTable", "sparse_adam"),
    "optimizer: matrices": ("MatrixBank", "MatrixGroup", "orthogonalize", "nesterov_momentum", "normuon_update"),
    "optimizer: Adam of tables and scalars": ("adam", "AdamScalars"),
    "elementwise": ("attention_in", "attention_in_from", "attention_source", "attention_out", "mlp_in", "entrance",
                    "injections", "final_states", "norm"),
    "copies": (),  # memcpy and memset
    "other": (),
}


# ---- what a step launches --------------------------------------------------------------------------------------------
class Recorded:
    """A Triton kernel that writes down the arguments of its launches."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            named = dict(zip(self.kernel.arg_names, arguments)) | options
            self.launches.append({name: described(value) for name, value in named.items()})
            return self.kernel[grid](*arguments, **options)
        return launch


@contextlib.contextmanager
def recorded_launches() -> Iterator[dict[str, Recorded]]:
    """The kernels of train_gpt.py, which record their launches meanwhile."""
    kernels = {name: Recorded(getattr(tg, name)) for name in OWN if hasattr(tg, name)}
    vars(tg).update(kernels)
    try:
        yield kernels
    finally:
        vars(tg).update({name: recorded.kernel for name, recorded in kernels.items()})


def named(function: Callable, name: str) -> Callable:
    """The function in a range of the trace."""
    @functools.wraps(function)
    def call(*arguments, **options):
        with torch.profiler.record_function(PART + name):
            return function(*arguments, **options)
    return call


def named_ops(ops: tg.Ops) -> tg.Ops:
    """Operators and compiled regions in ranges that bear their names.
    The phases of the optimizer get theirs, too, in the classes themselves."""
    for owner in (tg.MatrixGroup, tg.MatrixBank, tg.LookupTable, tg.AdamTable, tg.SparseTable, tg.AdamScalars):
        for phase in ("start_step", "receive_grad", "reduce_", "compute_"):
            if hasattr(owner, phase):
                setattr(owner, phase, named(getattr(owner, phase), owner.__name__))

    def region(function, *count):
        return named(ops.compile(function, *count), function.__name__.replace("<lambda>", "sum_rows"))

    fields = (
        "attention", "head_loss", "pointer", "embed", "adam", "sparse_adam", "project_heads",
        "mlp", "orthogonalize",
    )
    return dataclasses.replace(
        ops,
        compile=region,
        **{name: named(getattr(ops, name), name) for name in fields if hasattr(ops, name)},
    )


# ---- model FLOP utilisation ------------------------------------------------------------------------------------------
def training_work(trainer: tg.Trainer, stage: tg.Stage) -> float:
    """Floating-point operations of a step of a stage, on all ranks together.

    A token takes 6 operations (2 forward, 4 backward) for each weight of the hidden matrices, for each weight of the
    head's rows for the classes that the stage samples, and for each key that it sees, times the channels that attention
    and pointer multiply with it. How many keys that are is taken from the stream's first documents. The optimizer and
    what is computed again, in layers or in attention's backward pass, do not count."""
    model = trainer.preset.model
    hidden = sum(p.numel() for p in trainer.model.parameters() if p.info.matrix_shape)
    sample = trainer.stream.read(trainer.stream.first, stage.batch_tokens + 1)
    pieces = tg.cut_documents(sample, stage.document_cap_tokens)
    positions = np.concatenate([np.arange(len(piece) - 1) for piece in pieces])

    def earlier_keys(window):  # that a token sees, besides its own
        return np.minimum(positions, window).mean()

    classes = stage.sampled_classes or model.padded_vocabulary
    keys = sum(1 + earlier_keys(getattr(stage, f"{layer.window}_window_tokens"))
               for layer in model.layers if layer.attention)
    weights = hidden + classes * model.width + keys * model.heads * (model.key_width + model.head_width)
    weights += model.pointer_width * earlier_keys(model.pointer_window_tokens)
    return 6 * stage.batch_tokens * weights


def utilisation(trainer: tg.Trainer, stage: tg.Stage, step_us: float, device: str) -> str | None:
    """Model FLOP utilisation (MFU): training_work as a share of the GPU's peak, where that is known.

    That of bfloat16: no single peak holds for a step whose products are partly FP8."""
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device), None)
    if peak is None:
        return None
    achieved = training_work(trainer, stage) / step_us / 1e6 / trainer.ranks.world  # TFLOP/s of one GPU
    return f"MFU {achieved / peak:.1%} of {peak:.0f} TFLOP/s a GPU (dense bf16; FP8 products: twice that)"


# ---- kernels of a step
# ------------------------------------------------------------------------------------------------
@dataclasses.dataclass
class Call:
    """One kernel of a step."""
    key: tuple
    label: str  # its name, or that of its operator with the shapes
    part: str
    us: float
    cost: Cost | None = None
    dram_bytes: float | None = None  # by Nsight Compute

    @property
    def theme(self) -> str:
        if self.key[0].startswith(("Memcpy", "Memset")):
            return "copies"
        if self.part == "attention_out" and self.cost and self.cost.operations:
            return "QKV and output projection"
        return next((theme for theme, parts in THEMES.items() if self.part in parts), "other")


def step_calls(trace: Trace, launches: dict[str, list[dict[str, Any]]], warn: Callable[[str], None]) -> list[Call]:
    """The kernels of a step, in the order of their launches, with their costs.
    `launches`: arguments, by the kernel's name."""
    recorded = {}
    for name, arguments in launches.items():
        count = sum(kernel["name"] == name for kernel in trace.device)
        if count == len(arguments):
            recorded[name] = iter(arguments)
        else:
            warn(f"{name}: {len(arguments)} launches recorded, {count} in the trace: no bytes")

    # An operator may start several kernels. Its bytes and operations are shared out in proportion to their times.
    operators = [trace.operator(kernel) for kernel in trace.device]
    operator_us = Counter()
    for operator, kernel in zip(operators, trace.device):
        operator_us[id(operator)] += kernel["dur"]

    def described_call(kernel: dict, operator: dict | None) -> tuple[str, Callable[[], Cost | None]]:
        name = kernel["name"]
        if name in OWN:
            arguments = next(recorded[name]) if name in recorded else None
            return name, lambda: arguments and OWN[name](arguments)
        if kernel["cat"] in ("gpu_memcpy", "gpu_memset"):
            return name, lambda: Cost(kernel["args"]["bytes"] * (2 if "DtoD" in name else 1))
        if operator is None:
            return base_name(name), lambda: None
        if "kernel_file" in operator["args"]:
            return name, lambda: inductor_cost(operator)

        shapes = [list(x.shape) for x in operands(operator) if x]
        shapes = shapes[:2] if "mm" in operator["name"] else sorted(shapes, key=math.prod)[-1:]
        share = kernel["dur"] / max(operator_us[id(operator)], 1e-9)

        def part_of_operator():
            whole = operator_cost(operator, trace.inside(operator))
            return whole and whole._replace(bytes=whole.bytes * share, operations=whole.operations * share)
        return " ".join((operator["name"].removeprefix("aten::"), *map(str, shapes))), part_of_operator

    calls = []
    for kernel, operator in zip(trace.device, operators):
        label, cost = described_call(kernel, operator)
        call = Call(kernel_key(kernel), label, trace.part(kernel), kernel["dur"])
        try:
            call.cost = cost()
        except Exception as error:  # a rule that no longer fits must not cost the rest of the table
            warn(f"{label}: no bytes, because its rule fails: {error!r}")
        calls.append(call)
    return calls


def take_times(calls: list[Call], trace: Trace, steps: int, warn: Callable[[str], None]) -> None:
    """Give each call its mean time in a trace of several steps."""
    times = defaultdict(list)
    calls_of = defaultdict(list)
    for kernel in sorted(trace.device, key=lambda kernel: kernel["ts"]):  # a replayed graph is one launch
        times[kernel_key(kernel)].append(kernel["dur"])
    for call in calls:
        calls_of[call.key].append(call)
    for key, members in calls_of.items():
        if len(times[key]) == steps * len(members):
            for call, us in zip(members, np.reshape(times[key], (steps, -1)).mean(0)):
                call.us = float(us)
        else:
            warn(
                f"{members[0].label}: {len(members)} calls without graphs, {len(times[key])} in {steps} replays; "
                "its time is that without graphs"
            )
    unknown = sorted({base_name(key[0]) for key in times.keys() - calls_of.keys()})
    if unknown:
        warn(f"only in replays, so missing in the table: {', '.join(unknown)}")


# ---- Nsight Compute --------------------------------------------------------------------------------------------------
def ncu_command(arguments: list[str]) -> str:
    """Measures what runs between cudaProfilerStart and cudaProfilerStop: a step without graphs, kernel by kernel."""
    options = (
        f"--profile-from-start off --replay-mode kernel --cache-control none --clock-control none --metrics {METRICS} "
        "--csv --page raw --print-units base --log-file ncu.csv"
    ).split()
    return shlex.join(
        [
            "ncu",
            *options,
            "python",
            "benchmarks/roofline.py",
            *(a for a in arguments if a != "--ncu"),
            "--under-ncu",
        ]
    )


def merge_ncu(calls: list[Call], lines: list[str], warn: Callable[[str], None]) -> None:
    """Give calls the DRAM bytes of ncu's table,
    in which the kernels of one name come in the order of their launches."""
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        warn('not merged: expected a line that begins with "ID" in the file of ncu --csv --page raw')
        return
    measured = defaultdict(list)
    calls_of = defaultdict(list)
    for row in csv.DictReader(lines[start:]):
        if row["ID"]:  # the line after the header holds units
            size = sum(float(row[f"dram__bytes_{way}.sum"].replace(",", "")) for way in ("read", "write"))
            measured[base_name(row["Kernel Name"])].append(size)
    for call in calls:
        calls_of[base_name(call.key[0])].append(call)
    for name, members in calls_of.items():
        if len(measured[name]) == len(members):
            for call, size in zip(members, measured[name]):
                call.dram_bytes = size
        elif not name.startswith(("Memcpy", "Memset")):
            warn(f"{name}: {len(members)} calls in the trace, {len(measured[name])} in ncu's file: not merged")


# ---- tables ----------------------------------------------------------------------------------------------------------
def markdown(header: tuple[str, ...], rows: list[tuple]) -> str:
    def cell(value):
        return "" if value is None else f"{value:,.1f}" if isinstance(value, float) else str(value).replace("|", "/")

    lines = [header, ["---"] * len(header), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def total(values) -> float | None:
    """The sum, or None if a value is unknown."""
    values = list(values)
    return None if None in values else float(sum(values))


def kernel_rows(calls: list[Call], ceilings: dict[str, float], step_us: float) -> list[tuple]:
    """A row for all equal calls of a step."""
    groups = defaultdict(list)
    for call in calls:
        groups[
            call.label, call.part, call.cost and (round(call.cost.bytes, -4), round(call.cost.operations, -6))
        ].append(call)
    rows = []
    for (label, part, _), members in groups.items():
        us = total(call.us for call in members)
        roof = total(call.cost and call.cost.roof(ceilings) for call in members)
        rows.append(
            (
                label,
                part,
                len(members),
                us / len(members),
                us,
                f"{us / step_us:.2%}",
                total(call.cost and call.cost.bytes / 1e6 for call in members),
                total(call.cost and call.cost.operations / 1e9 for call in members),
                roof,
                None if roof is None else us - roof,
                total(call.dram_bytes and call.dram_bytes / 1e6 for call in members),
            )
        )
    return rows


def theme_rows(calls: list[Call], ceilings: dict[str, float], tokens: int) -> list[tuple]:
    rows = []
    for theme in (*THEMES, "sum"):
        members = [call for call in calls if theme in ("sum", call.theme)]
        us, roof = (
            total(values)
            for values in ((c.us for c in members), (c.cost.roof(ceilings) for c in members if c.cost))
        )
        unknown = total(call.us for call in members if not call.cost)
        rows.append(
            (
                theme, len(members), us, f"{us / tokens:.5f}", roof, f"{roof / tokens:.5f}",
                us - roof - unknown, unknown,
            )
        )
    return rows


def report(calls: list[Call], ceilings: dict[str, float], tokens: int, step_us: float) -> str:
    """The ten largest differences, the themes, and all kernels."""
    header = (
        "kernel", "part", "calls", "us a call", "us", "share", "MB", "GFLOP", "roof us",
        "difference us", "MB by ncu",
    )
    rows = kernel_rows(calls, ceilings, step_us)
    if all(call.dram_bytes is None for call in calls):
        header = header[:-1]
        rows = [row[:-1] for row in rows]
    largest = sorted((row for row in rows if row[9] is not None), key=lambda row: -row[9])[:10]
    themes = (
        "theme", "calls", "us a step", "us a token", "roof us a step", "roof us a token",
        "difference us", "us without a roof",
    )
    return "\n".join(
        (
            "## Ten largest differences\n",
            markdown(header, largest),
            "## By theme\n",
            markdown(themes, theme_rows(calls, ceilings, tokens)),
            "## All kernels\n",
            "From `us` on, columns are of all calls in a step.\n",
            markdown(header, sorted(rows, key=lambda row: -row[4])),
        )
    )


# ---- the step --------------------------------------------------------------------------------------------------------
def write_corpus(folder: Path, preset: tg.Preset) -> None:
    """Documents of generated lengths whose tokens are as frequent as words are,
    so that rows of tables recur as they do in text."""
    random = np.random.default_rng(0)
    for kind, tokens in (("train", preset.train_tokens), ("val", preset.val_tokens + 1)):
        pieces = tg.generated_pieces(tokens, max(stage.document_cap_tokens for stage in preset.stages), seed=7)
        for piece in pieces:
            piece[1:] = tg.BOS * random.power(0.28, len(piece) - 1)
        stream = np.concatenate([piece[:-1] for piece in pieces])
        header = np.zeros(tg.SHARD_HEADER_BYTES // 4, "<i4")
        header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, len(stream)
        (folder / f"generated_{kind}_000000.bin").write_bytes(header.tobytes() + stream.astype("<u2").tobytes())


def edited_preset(options: argparse.Namespace) -> tg.Preset:
    """The preset with --model's changes, or a line on those that no model can have."""
    preset = tg.PRESETS[options.preset]
    last = len(preset.stages) - 1
    if not -last - 1 <= options.stage <= last:
        tg.fail("--stage", f"{-last - 1} to {last}", options.stage, f"one that {preset.name} has")
    try:
        preset = dataclasses.replace(preset, model=dataclasses.replace(preset.model, **dict(options.model)))
        tg.check_preset(preset)
    except TypeError as error:  # no such field, or a value of another kind
        tg.fail("--model", "settings of ModelConfig in train_gpt.py", f"'{error}'", "name one that is there")
    return preset


def prepared(options: argparse.Namespace, folder: Path) -> tuple[tg.Trainer, Callable]:
    """A trainer and the step to measure.
    Each stage up to that one has run, as kernels are compiled for the first sizes that they meet."""
    preset = edited_preset(options)
    stages = tuple(dataclasses.replace(stage, steps=1) for stage in preset.stages)
    options.stage %= len(stages)  # a step of each stage: its number is the stage's index
    val_tokens = min(preset.val_window_tokens, 8192)
    preset = dataclasses.replace(
        preset,
        stages=stages,
        val_tokens=val_tokens,
        val_window_tokens=val_tokens,
        train_tokens=sum(stage.batch_tokens for stage in stages) + 1,
    )
    if options.data is None:
        write_corpus(folder, preset)

    ranks = tg.Ranks.start()
    fp8 = preset.fp8 if preset.model.dtype == "bfloat16" else ()
    ops = named_ops(tg.select_ops(ranks.device, tg.capability(ranks.device) >= (8, 0), fp8=fp8))
    trainer = tg.Trainer(preset, ranks, ops, tg.Clock(ranks.device), options.data or folder)
    trainer.initialise(1)
    batches = tg.training_batches(trainer.stream, preset, trainer.micro_chunks, ranks)
    for number, stage in enumerate(stages[:options.stage + 1]):
        micro_batches = [next(batches) for _ in range(tg.CHUNKS // ranks.world // trainer.micro_chunks[stage])]
        trainer.training_step(number, micro_batches)

    step = functools.partial(trainer.training_step, options.stage, micro_batches)
    for _ in range(options.warm):  # away from the zeros of the initialisation, which take less power
        step()
    return trainer, step


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profiled(step: Callable, steps: int, path: Path) -> Trace:
    wait()
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(steps):
            step()
        wait()
    profiler.export_chrome_trace(str(path))
    return Trace(json.loads(path.read_text())["traceEvents"])


def measure(options: argparse.Namespace, folder: Path) -> str:
    trainer, step = prepared(options, folder)
    stage = trainer.preset.stages[options.stage]
    tokens = stage.batch_tokens
    messages = []
    with recorded_launches() as kernels:
        eager = profiled(step, 1, folder / "eager.trace.json")
    calls = step_calls(eager, {name: kernel.launches for name, kernel in kernels.items()}, messages.append)

    if torch.cuda.is_available() and eager.device[0]["cat"] == "cpu_op":
        messages.append(
            "the profiler saw no kernels (may it use CUPTI?): these are the host's operators and their times there"
        )

    if trainer.ops.graphs:
        try:
            trainer.capture(options.stage)
        except Exception as error:
            messages.append(f"times are without graphs, because the capture fails: {error!r}")
    for _ in range(2):
        step()
    wait()
    started = time.perf_counter()
    for _ in range(options.steps):
        step()
    wait()
    step_us = (time.perf_counter() - started) / options.steps * 1e6
    replays = profiled(step, options.steps, folder / "replays.trace.json")
    take_times(calls, replays, options.steps, messages.append)
    if options.ncu_csv:
        try:
            merge_ncu(calls, options.ncu_csv.read_text().splitlines(), messages.append)
        except Exception as error:
            messages.append(f"{options.ncu_csv} is not merged: {error!r}")

    length, active = (us / options.steps for us in replays.busy_us())
    without = [call.us for call in calls if not call.cost]
    sums = [
        ("step, without the profiler", step_us),
        ("step in the trace", length),
        ("of it, at least one kernel runs", active),
        ("idle", length - active),
        ("times of all kernels, more than that if streams overlap", total(call.us for call in calls)),
        (
            f"roofs of all kernels but {len(without)}, of {sum(without):.1f} us, for which there is no rule",
            total(call.cost.roof(options.ceilings) for call in calls if call.cost),
        ),
    ]
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "CPU, reference operators: these figures mean nothing"
    )
    if share := utilisation(trainer, stage, step_us, device):
        messages.append(share)
    return "\n".join(
        (
            f"# Roofline of a step: {options.preset}, stage {options.stage} (from 0), {tokens} tokens\n",
            f"{device}; torch {torch.__version__}; {options.data or 'generated documents'}; "
            f"{dict(options.model) or 'the preset as it is'}. "
            f"Times are means over {options.steps} steps.\n",
            markdown(
                ("ceiling", "TB/s, TFLOP/s"), [(name, str(value)) for name, value in options.ceilings.items()]
            ),
            markdown(("of a step", "us"), sums),
            *(f"- {message}" for message in dict.fromkeys(messages)),
            "",
            report(calls, options.ceilings, tokens, step_us),
        )
    )


def assignment(text: str) -> tuple[str, Any]:
    name, value = text.split("=")
    try:
        return name, ast.literal_eval(value)
    except SyntaxError as error:
        raise ValueError(text) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tg.PRESETS, default="sprint")
    parser.add_argument("--stage", type=int, default=-2)
    parser.add_argument("--data", type=Path, help="folder of shards; by default documents are generated")
    parser.add_argument("--model", type=assignment, nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--ceilings",
        type=assignment,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="those of another GPU than an H200",
    )
    parser.add_argument("--steps", type=tg.within(int, 1), default=10, help="how many to measure")
    parser.add_argument("--warm", type=tg.within(int, 0), default=10, help="how many before")
    parser.add_argument("--out", type=Path, help="also write the tables there")
    parser.add_argument("--traces", type=Path, help="keep the traces in this folder")
    parser.add_argument("--ncu", action="store_true", help="only print the command for Nsight Compute")
    parser.add_argument("--ncu-csv", type=Path, help="what that command has measured")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tg.Ending() as ending:  # a mistake becomes a line
        print_tables(options)
    return ending.code


def print_tables(options: argparse.Namespace) -> None:
    edited_preset(options)
    unknown = dict(options.ceilings).keys() - CEILINGS.keys()
    if unknown:
        tg.fail("--ceilings", f"some of {', '.join(CEILINGS)}", ", ".join(sorted(unknown)), "name one of those")
    for name, ceiling in options.ceilings:
        if type(ceiling) not in (int, float) or ceiling <= 0:
            tg.fail(f"--ceilings {name}", "a number above 0", ceiling, "change it")
    options.ceilings = CEILINGS | dict(options.ceilings)
    if options.ncu:
        print(ncu_command(sys.argv[1:]))
        return

    if options.out:
        options.out.open("a").close()  # else the measurement would be lost where nothing can be written
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.traces or Path(temporary)
        folder.mkdir(exist_ok=True)
        if options.under_ncu:
            _, step = prepared(options, folder)
            wait()
            torch.cuda.profiler.start()
            step()
            wait()
            torch.cuda.profiler.stop()
            return
        text = measure(options, folder)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
