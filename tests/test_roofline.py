"""benchmarks/roofline.py: the rules for bytes and operations, and what it reads from traces, without a GPU.

Run in a process of its own, as test_attention.py: the launches of a step come from Triton's interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import argparse
import re
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import helpers
from helpers import CPU, tg

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import roofline
import roofline_costs as costs
from roofline_trace import PART, Trace, base_name

interpreted = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="needs TRITON_INTERPRET=1")


# ---- rules -----------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_every_kernel_has_a_rule():
    kernels = {
        name
        for name, value in vars(tg).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }
    assert kernels == costs.OWN.keys()


@pytest.mark.fast
@pytest.mark.parametrize("window", [1, 3, 16, 100])
def test_visible_pairs_are_those_of_the_mask(window):
    lengths = [1, 7, 30, 4, 18]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    remaining = torch.cat([torch.arange(length).flip(0) for length in lengths])
    query = torch.arange(len(document))[:, None]
    key = torch.arange(len(document))[None]
    visible = (document[:, None] == document[None]) & (key <= query) & (query - key <= window)
    assert costs.visible_pairs(positions, window) == visible.sum()
    assert costs.visible_pairs(positions, window, itself=False) == visible.sum() - len(document)
    assert costs.visible_pairs(remaining, window) == visible.sum()


def fp8_launches(corpus, monkeypatch):
    """What a step with the fast operators launches in bf16 and FP8, as on one GPU, and its batch."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tg, "multiprocessors", lambda device: 4)
    stage = replace(helpers.PRESET.stages[0], steps=1, batch_tokens=384, sampled_classes=192)
    # Without final values the gradient of a value embedding comes from attention alone; that of n-grams does not.
    model = replace(helpers.MODEL, dtype="bfloat16", final_values=False)
    preset = replace(
        helpers.PRESET, model=model, stages=(stage,), val_tokens=128, val_window_tokens=128
    )
    ops = tg.select_ops(torch.device("cuda"), compile=False, graphs=False)
    trainer = tg.Trainer(preset, tg.Ranks(0, 1, CPU), ops, tg.Clock(CPU), corpus)
    trainer.initialise(helpers.SEED)
    helpers.randomise(trainer.model, size=0.15)
    batch = next(tg.training_batches(trainer.stream, preset, trainer.micro_chunks, trainer.ranks))
    (table,) = trainer.optimizer.sparse
    table.late_ids.copy_(batch.views(batch.data).ngrams)  # as if the step before had looked up the same rows
    method = tg.ORTHOGONALIZATIONS["polar-express"]
    one_round = method._replace(coefficients=method.coefficients[:1])  # is enough
    monkeypatch.setitem(tg.ORTHOGONALIZATIONS, "polar-express", one_round)
    before = {name: getattr(tg, name) for name in costs.OWN}
    with roofline.recorded_launches() as kernels:
        trainer.training_step(0, [batch])
    assert before == {name: getattr(tg, name) for name in costs.OWN}
    return {name: kernel.launches for name, kernel in kernels.items()}, model, batch.to(CPU)


@interpreted
def test_rules_fit_the_launches_of_a_step(tiny, corpus, monkeypatch):
    """Arguments alone matter, so no kernel runs."""
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *arguments, **options: None)
    launches, model, documents = fp8_launches(corpus, monkeypatch)
    found = {
        name: [costs.OWN[name](a) for a in arguments] for name, arguments in launches.items()
    }
    assert [name for name, list_of_costs in found.items() if not list_of_costs] == ["peer_rows_kernel"], "one rank"
    assert all(
        cost.bytes > 0 and cost.operations >= 0
        for list_of_costs in found.values()
        for cost in list_of_costs
    )

    tokens = len(documents.tokens)
    heads = model.heads
    pairs = costs.visible_pairs(documents.positions, helpers.PRESET.stages[0].short_window_tokens)
    assert found["attention_forward_kernel"][0].operations == 4 * heads * pairs * 16
    queries, keys = found["attention_backward_kernel"][-2:]
    assert (keys.operations, queries.operations) == (
        8 * heads * pairs * 16,
        6 * heads * pairs * 16,
    )
    assert found["mlp_kernel"][0] == costs.Cost(
        tokens * 32 + 64 * 32 + 2 * tokens * 64, 2 * tokens * 64 * 32, "fp8_short")
    a = next(a for a in launches["split_heads_kernel"] if a["value_ptr"] is not None)
    # q and k read and written; v, value and sum; gates, positions and rotary tables
    entries = tokens * heads * 16
    assert (
        costs.OWN["split_heads_kernel"](a).bytes
        == 2 * 7 * entries + 2 * tokens * heads + 4 * tokens + 2 * a["cos_ptr"].nbytes
    )
    adding, alone = (
        next(
            costs.OWN["split_heads_grad_kernel"](a).bytes
            for a in launches["split_heads_grad_kernel"]
            if a["value_ptr"] is not None and a["ADD"] == add
        )
        for add in (True, False)
    )
    assert adding - alone == 2 * entries, "the gradient of n-grams' values is read besides"
    classes = 192
    chunk = tokens // tg.CHUNKS
    # bf16 read, e5m2 in two layouts written
    assert found["head_grad_kernel"][0].bytes == pytest.approx(4 * chunk * classes, rel=0.05)
    weights = [cost for cost in found["quantize_kernel"] if cost.bytes == 4 * 64 * 32]
    assert len(weights) == 2 * sum(layer.mlp for layer in model.layers)

    # Every row of the gradient is read once an id, whether span by span or in its group;
    # rows of the table are read and written.
    width = model.width // model.ngram_pieces
    ids = documents.ngrams
    rows = len(ids.unique())
    singles, others = (cost.bytes for cost in found["sparse_adam_kernel"])
    table = singles + others + found["span_sum_kernel"][-1].bytes
    assert table == pytest.approx(
        2 * width * ids.numel() + 4 * width * rows + 28 * rows + 8 * ids.numel(), rel=0.1
    )
    alone = int((ids.unique(return_counts=True)[1] == 1).sum())
    assert singles == alone * (6 * width + 36), "gradient, order, place, id, start; weights and two numbers twice"
    tables = [a for a in launches["adam_kernel"] if a["rows"] == model.padded_vocabulary]
    weights = model.padded_vocabulary * model.width
    looked_up, head = sorted({costs.OWN["adam_kernel"](a).bytes for a in tables})
    assert looked_up == 12 * weights + 16 + 8, "two addresses, and two rates"
    assert head == 14 * weights + 8
    read = len(documents.tokens.unique())
    last = found["embedding_grad_kernel"][-1].bytes
    assert last == pytest.approx(2 * model.width * (read + tokens) + 5 * model.padded_vocabulary, rel=0.25)


@pytest.mark.fast
def test_value_embedding_and_key_tiles_are_counted_once():
    def array(*shape, address, itemsize=2):
        strides = [1]
        for size in shape[:0:-1]:
            strides.insert(0, strides[0] * size)
        return costs.Array(shape, tuple(strides), itemsize, address)

    assert (
        costs.moved(
            {"a": array(4, 8, address=1), "a_again": array(4, 8, address=1), "n": 3, "none": None}
        )
        == 64
    )
    assert costs.Array((1000,), (0,), 4).nbytes == 4  # an expanded scalar
    launch = {"x_ptr": array(3, 64, 128, address=1), "out_ptr": array(3, 64, 64, address=2), "rows": 64, "depth": 128}
    assert costs.gram(launch) == costs.Cost(2 * 3 * 64 * (128 + 64), 3 * 64 * 65 * 128, "bf16_short")


def operator(name, dims, kinds, strides=None, **event):
    def contiguous(shape):
        return [torch.Size(shape[i + 1 :]).numel() for i in range(len(shape))]
    args = {
        "Input Dims": dims,
        "Input Strides": strides or [contiguous(shape) for shape in dims],
        "Input type": kinds,
    }
    return {
        "name": f"aten::{name}",
        "cat": "cpu_op",
        "args": args | event.pop("args", {}),
        **event,
    }


@pytest.mark.fast
def test_operators_of_torch():
    bf16, e4m3 = "c10::BFloat16", "c10::Float8_e4m3fn"
    cost = costs.operator_cost
    assert cost(operator("mm", [[64, 4096], [4096, 16]], [bf16] * 2), []) == costs.Cost(
        2 * (64 * 4096 + 4096 * 16 + 64 * 16), 2 * 64 * 4096 * 16, "bf16"
    )
    scaled = operator(
        "_scaled_mm",
        [[64, 32], [32, 16], [], []],
        [e4m3, e4m3, "float", "float"],
        [[32, 1], [1, 32], [], []],
    )
    assert cost(scaled, []) == costs.Cost(
        64 * 32 + 32 * 16 + 2 * 64 * 16, 2 * 64 * 32 * 16, "fp8_short"
    )
    added = operator(
        "baddbmm", [[3, 4, 5], [3, 4, 6], [3, 6, 5], []], ["float"] * 3 + ["Scalar"]
    )
    assert cost(added, []).operations == 2 * 3 * 4 * 6 * 5
    assert cost(added, []).bytes == 4 * (2 * 60 + 72 + 90)
    assert cost(operator("copy_", [[10, 4], [10, 4]], ["float", bf16]), []).bytes == 240
    assert cost(operator("zero_", [[7]], ["float"]), []).bytes == 28
    assert cost(operator("add", [[10, 4], [10, 4]], [bf16, bf16]), []).bytes == 240
    assert (
        cost(
            operator("cat", [[[8, 4], [8, 4]], []], ["TensorList", "Scalar"], [[[4, 1], [4, 1]], []]), []
        ).bytes
        == 4 * 2 * 32
    )
    looked_up = operator("index", [[100, 8], []], ["float", ""])
    assert (
        cost(looked_up, [operator("reshape", [[7]], ["long int"])]).bytes == 2 * 7 * 8 * 4 + 8 * 7
    )
    assert cost(looked_up, []) is None
    assert cost(operator("arange", [[]], ["Scalar"]), []) is None


@pytest.mark.fast
def test_inductor_counts_what_loads_and_stores_can_move(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("""
@triton.jit
def triton_per_fused_sum_0(in_ptr0, in_ptr1, in_out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    r0_numel = 8
    rnumel = r0_numel
    in_ptr2 = in_out_ptr0
    tmp0 = tl.load(in_ptr0 + (3*x1), xmask)
    tmp1 = tl.load(in_ptr0 + (1 + 3*x1), xmask)
    tmp2 = tl.load(in_ptr1 + (x0 + 8*tmp0), xmask)
    tmp3 = tl.load(in_ptr1 + (x0 + 8*tmp1), xmask)
    tmp4 = tl.load(in_ptr2 + (x2), xmask)
    tl.store(in_out_ptr0 + (x2), tmp2 + tmp3 + tmp4, xmask)
""")
    event = operator(
        "",
        [[10, 3], [1_000_000, 8], [10, 8], []],
        ["int", "c10::BFloat16", "float", "Scalar"],
        args={"kernel_file": str(path), "Concrete Inputs": ["", "", "", "10"]},
    )
    # Ids once; two rows of the large table for each of 10 results; the result read and written.
    assert costs.inductor_cost(event).bytes == 30 * 4 + 2 * 80 * 2 + 2 * 80 * 4
    event["args"]["kernel_file"] = str(tmp_path / "gone.py")
    assert costs.inductor_cost(event) is None


# ---- traces ----------------------------------------------------------------------------------------------------------
def host(name, ts, dur, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def kernel(name, ts, dur, correlation, grid=(1, 1, 1), cat="kernel", **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": 7,
        "args": {"correlation": correlation, "grid": list(grid), "block": [128, 1, 1], **args},
    }


PRODUCT = {
    "Input Dims": [[64, 32], [32, 16]],
    "Input Strides": [[32, 1], [16, 1]],
    "Input type": ["c10::BFloat16"] * 2,
}


def eager_trace():
    """A product of two kernels in the forward pass, one of the backward pass on another thread,
    an own kernel, a copy, and a stranger."""
    return [
        host(PART + "mlp", 0, 100, "user_annotation"),
        host("aten::matmul", 9, 42, **{"External id": 1, "Sequence number": 5}),
        host("aten::mm", 10, 40, **{"External id": 2, "Sequence number": 5}, **PRODUCT),
        host("cudaLaunchKernel", 20, 5, "cuda_runtime", correlation=11),
        host("cuLaunchKernelEx", 30, 5, "cuda_driver", correlation=12),
        host(
            "autograd::engine::evaluate_function: MmBackward0",
            200,
            50,
            tid=2,
            **{"External id": 3, "Sequence number": 5},
        ),
        host("aten::mm", 210, 30, tid=2, **{"External id": 4}, **PRODUCT),
        host("cudaLaunchKernel", 220, 5, "cuda_runtime", tid=2, correlation=13),
        host(PART + "orthogonalize", 300, 50, "user_annotation"),
        host("cuLaunchKernelEx", 310, 5, "cuda_driver", correlation=14),
        host("cudaMemcpyAsync", 400, 5, "cuda_runtime", correlation=15),
        kernel("void gemm<float>(int)", 1000, 30, 11),
        kernel("splitK", 1030, 10, 12),
        kernel("void gemm<float>(int)", 1050, 20, 13),
        kernel("gram_kernel", 1060, 20, 14, grid=(6, 2, 1)),  # on another stream
        kernel("Memcpy DtoD (Device -> Device)", 1100, 4, 15, cat="gpu_memcpy", bytes=1000),
        kernel("stranger", 1110, 6, 99),
    ]


def launches_of(*shapes):
    x, out = (
        {"shape": shape, "strides": (shape[1] * shape[2], shape[2], 1), "itemsize": 2}
        for shape in shapes
    )
    launch = {
        "x_ptr": costs.Array(**x, address=1),
        "out_ptr": costs.Array(**out, address=2),
        "rows": 64,
        "depth": 128,
    }
    return {"gram_kernel": [launch]}


@pytest.mark.fast
def test_a_trace_gives_parts_costs_times_and_sums():
    trace = Trace(eager_trace())
    messages = []
    calls = roofline.step_calls(trace, launches_of((3, 64, 128), (3, 64, 64)), messages.append)
    assert not messages
    assert [call.part for call in calls] == ["mlp", "mlp", "mlp", "orthogonalize", "", ""]
    assert [call.theme for call in calls] == ["MLP"] * 3 + ["optimizer: matrices", "copies", "other"]
    assert [call.label for call in calls[:3]] == ["mm [64, 32] [32, 16]"] * 3
    operations = 2 * 64 * 32 * 16
    assert [call.cost and call.cost.operations for call in calls] == [
        0.75 * operations, 0.25 * operations, operations, 3 * 64 * 65 * 128, 0, None,
    ]
    assert calls[4].cost.bytes == 2000
    assert trace.busy_us() == (116, 40 + 30 + 4 + 6)

    # Two replays of a captured step: one launch each, kernels of one name in the same order, slower ones in the second.
    replays = [
        kernel(
            e["name"],
            5000 + 500 * replay + e["ts"],
            e["dur"] + 2 * replay,
            70 + replay,
            e["args"]["grid"],
            e["cat"],
            **{k: v for k, v in e["args"].items() if k == "bytes"},
        )
        for replay in range(2)
        for e in eager_trace()
        if "grid" in e["args"] and e["name"] != "stranger"
    ]
    roofline.take_times(
        calls, Trace(replays + [kernel("newcomer", 9000, 1, 71)]), 2, messages.append
    )
    assert [call.us for call in calls] == [31, 11, 21, 21, 5, 6]
    assert len(messages) == 2
    assert "stranger" in messages[0]
    assert "newcomer" in messages[1]

    rows = roofline.kernel_rows(calls, costs.CEILINGS, 200.0)
    assert sum(row[2] for row in rows) == 6
    assert sum(row[4] for row in rows) == 95
    themes = {row[0]: row for row in roofline.theme_rows(calls, costs.CEILINGS, 1000)}
    assert themes["MLP"][1:3] == (3, 63)
    assert themes["sum"][1:3] == (6, 95)
    assert themes["sum"][7] == 6
    roofs = sum(call.cost.roof(costs.CEILINGS) for call in calls if call.cost)
    assert themes["sum"][4] == pytest.approx(roofs)
    assert themes["sum"][6] == pytest.approx(95 - 6 - roofs)
    assert costs.Cost(4.27e6, 0).roof(costs.CEILINGS) == pytest.approx(1)
    assert costs.Cost(1, 3e9, "fp8").roof(costs.CEILINGS) == pytest.approx(2)
    text = roofline.report(calls, costs.CEILINGS, 1000, 200.0)
    assert "| gram_kernel | orthogonalize | 1 | 21.0 | 21.0 | 10.50% |" in text
    assert "| stranger |  | 1 | 6.0 | 6.0 | 3.00% |  |  |  |  |" in text


@pytest.mark.fast
def test_what_does_not_fit_is_said_and_costs_only_its_own_cells(monkeypatch):
    messages = []
    twice = {
        name: arguments * 2 for name, arguments in launches_of((3, 64, 128), (3, 64, 64)).items()
    }
    calls = roofline.step_calls(Trace(eager_trace()), twice, messages.append)
    assert calls[3].cost is None
    assert calls[2].cost
    assert messages == ["gram_kernel: 2 launches recorded, 1 in the trace: no bytes"]
    monkeypatch.setitem(roofline.OWN, "gram_kernel", lambda a: a["no such argument"])
    calls = roofline.step_calls(
        Trace(eager_trace()), launches_of((3, 64, 128), (3, 64, 64)), messages.append
    )
    assert calls[3].cost is None
    assert calls[2].cost
    assert "no such argument" in messages[-1]


@pytest.mark.fast
def test_nsight_compute(monkeypatch):
    calls = roofline.step_calls(Trace(eager_trace()), {}, print)
    lines = [
        "==PROF== Connected",
        '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"',
        '"","","byte","byte"',
        '"0","gemm","1,000","24"',
        '"1","splitK","8","8"',
        '"2","gemm","5","5"',
        '"3","gram_kernel","7","0"',
    ]
    messages = []
    roofline.merge_ncu(calls, lines, messages.append)
    assert [call.dram_bytes for call in calls] == [1024, 16, 10, 7, None, None]
    assert messages == ["stranger: 1 calls in the trace, 0 in ncu's file: not merged"]
    roofline.merge_ncu(calls, lines[:1], messages.append)
    assert "not merged: expected" in messages[-1]
    assert "MB by ncu" in roofline.report(calls, costs.CEILINGS, 1000, 200.0)
    assert base_name("void at::native::(anonymous namespace)::fill<4, A<float> >(int, A<float>)") == "fill"
    command = roofline.ncu_command(["--preset", "sprint", "--ncu"])
    assert command.startswith("ncu --profile-from-start off")
    assert command.endswith("benchmarks/roofline.py --preset sprint --under-ncu")


def scores(trainer, stage):
    """Channels times keys, of a mean token of the stage's first step: those of a query and a value in each attention
    head, and those of the pointer."""
    text = trainer.stream.read(trainer.stream.first, stage.batch_tokens).tolist()
    model = trainer.preset.model
    seen = {"short": [], "long": [], "pointer": []}
    for end in range(len(text)):
        begin = max(start for start in range(end + 1) if start == 0 or text[start] == tg.BOS)
        begin += (end - begin) // stage.document_cap_tokens * stage.document_cap_tokens
        seen["short"].append(min(end - begin, stage.short_window_tokens) + 1)
        seen["long"].append(min(end - begin, stage.long_window_tokens) + 1)
        seen["pointer"].append(min(end - begin, model.pointer_window_tokens))
    mean = {name: sum(numbers) / len(numbers) for name, numbers in seen.items()}
    keys = sum(mean[layer.window] for layer in model.layers if layer.attention)
    return (
        model.heads * (model.key_width + model.head_width) * keys
        + model.pointer_width * mean["pointer"]
    )


@pytest.mark.fast
def test_model_flop_utilisation(corpus, tiny):
    """6 operations a token and used weight: against matrices, classes and visible keys counted by hand, by stage."""
    trainer = helpers.make_trainer(corpus)
    attention = 4 * 32 * 32
    mlp = 2 * 32 * 64
    pointer = 3 * 16 * 32
    hidden = (
        sum(attention * layer.attention + mlp * layer.mlp for layer in tiny.model.layers)
        + pointer
    )
    for stage, classes in zip(tiny.stages, (128, 192, 512)):
        operations = 6 * stage.batch_tokens * (hidden + 32 * classes + scores(trainer, stage))
        assert roofline.training_work(trainer, stage) == pytest.approx(operations, rel=1e-12)

    step_us = 1e6 * operations / 989e12 / 0.4
    assert roofline.utilisation(trainer, stage, step_us, "x86_64") is None, "no peak is known of a CPU"
    found = roofline.utilisation(trainer, stage, step_us, "NVIDIA H200")
    assert found == "MFU 40.0% of 989 TFLOP/s a GPU (dense bf16; FP8 products: twice that)"
    trainer.ranks.world = 4
    assert "MFU 10.0% of 989 " in roofline.utilisation(trainer, stage, step_us, "NVIDIA H200")


def test_a_step_on_the_cpu(tiny, tmp_path, monkeypatch):
    """From generated documents to the tables, with the reference operators."""
    for owner in (tg.MatrixGroup, tg.MatrixBank, tg.LookupTable, tg.AdamTable, tg.SparseTable, tg.AdamScalars):
        for phase in ("start_step", "receive_grad", "reduce_", "compute_"):
            if hasattr(owner, phase):
                monkeypatch.setattr(owner, phase, getattr(owner, phase))  # to be restored
    options = argparse.Namespace(
        preset=tiny.name,
        stage=1,
        data=None,
        model=[],
        ceilings=costs.CEILINGS,
        steps=2,
        warm=1,
        ncu_csv=None,
    )
    text = roofline.measure(options, tmp_path)
    calls = {
        line.split(" | ")[0].removeprefix("| "): int(line.split(" | ")[1])
        for line in text.split("## By theme")[1].splitlines()[4:16]
    }
    assert calls.keys() == roofline.THEMES.keys()
    assert not calls["copies"]
    assert all(count for theme, count in calls.items() if theme != "copies"), calls
    assert calls["other"] < 30, text


@pytest.mark.fast
@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--steps", "0"], "--steps: expected a number from 1"),
        (["--stage", "99"], "--stage: expected -4 to 3, found 99; fix: "),
        (["--model", "widht=3"], "--model: expected settings of ModelConfig .*widht.*; fix: "),
        (["--model", "ngram_orders=0"], "ngram_orders: expected 1 to .*; fix: "),
        (["--ceilings", "bandwith=8"], "--ceilings: expected some of bandwidth, .*, found bandwith; fix: "),
        (["--out", "/no/folder/table.md"], "file: expected to be there .*/no/folder/table.md.*; fix: "),
    ],
)
def test_a_mistake_is_a_line_before_the_measurement(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(roofline, "measure", None)
    monkeypatch.setattr(sys, "argv", ["roofline.py", "--preset", "speedrun", *arguments])
    try:
        code = roofline.main()
    except SystemExit as error:  # argparse's
        code = error.code
    assert code == tg.EXIT_USAGE
    assert re.search(line, capsys.readouterr().err.splitlines()[-1])
