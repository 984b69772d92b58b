"""Windowed document attention:
the Triton kernels against a dense float64 formula, in Triton's interpreter on a CPU (fp32, fp16).

Run in a process of its own: TRITON_INTERPRET is read when triton is first imported.
On a GPU: TRITON_INTERPRET=0 pytest -m gpu.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import helpers
from helpers import tg

pytestmark = pytest.mark.fast

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
# tokens a program owns, tokens a step; rectangular both ways, since a step longer than a tile takes other masks
TILES = {"wide": (32, 16), "long": (16, 32), "pointers": (32, 16)}
# lengths of the documents, window
LAYOUTS = {
    "one_document": ([77], 20),
    "single_tokens": ([1] * 19 + [30] + [1] * 3, 8),
    "many_in_a_tile": ([3, 5, 1, 7, 2, 2, 9, 4, 40], 6),
    "window_0": ([20, 21], 0),
    "window_1": ([20, 21, 9], 1),
    "window_past_everything": ([50, 30], 10_000),
    "window_of_a_tile": ([90, 6, 37], 32),
    "multiple_of_the_tile": ([64, 32, 32], 15),
    "three_documents": ([10, 33, 1], 12),
    "one_token": ([1], 3),
}


def distances(lengths, device="cpu"):
    """Of Documents: positions, remaining [T]."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    remaining = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths])
    return [x.to(device, torch.int32) for x in (positions, remaining)]


def dense_attention(q, k, v, lengths, window, scale, gates=None):
    """The definition, one softmax over a dense matrix in float64."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    i = torch.arange(len(document), device=q.device)
    seen = (document[:, None] == document) & (i[:, None] >= i) & (i[:, None] - i <= window)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    out = torch.einsum(
        "hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double()
    )
    return out if gates is None else out * gates.double()[:, :, None]


def operands(tokens, heads=2, dk=16, dv=16, dtype=torch.float32, device="cpu", seed=0):
    """q, k (normalised, as the kernels require), v, dout"""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(tokens, heads, width, generator=generator) for width in (dk, dk, dv, dv)
    )
    return [x.to(device, dtype) for x in (tg.norm(q), tg.norm(k), v, dout)]


def gates_of(tokens, heads=2, dtype=torch.float32, device="cpu", least=2.0**-20):
    """Gates [tokens, heads] of 0.05 to 2, a seventh of them `least`; half of a wider tensor, as a chunk is."""
    gates = torch.rand(tokens, 2 * heads, generator=torch.Generator().manual_seed(2)) * 1.95 + 0.05
    gates.view(-1)[::7] = least
    return gates.to(device, dtype)[:, :heads]


def attention(q, k, v, lengths, window, scale, *gates):
    """Without `gates` all are 1."""
    gates = gates or (torch.ones(q.shape[:2], dtype=q.dtype, device=q.device),)
    return tg.PackedAttention.apply(q, k, v, *distances(lengths, q.device), window, scale, *gates)


def gradients(function, q, k, v, dout, *gates):
    """out, dq, dk, dv; with gates also dgates"""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates)]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def compare(results, expected, tolerance, *gates):
    """Errors relative to the largest value;
    of out and dq, whose rows are as small as their gates, after division by them."""
    for name, x, y in zip(
        ("out", "dq", "dk", "dv", "dgates")[: 4 + len(gates)], results, expected, strict=True
    ):
        assert x.shape == y.shape
        if gates and name in ("out", "dq"):
            x = x.double() / gates[0].double()[:, :, None]
            y = y / gates[0].double()[:, :, None]
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=1)
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def check(
    lengths,
    window,
    dtype=torch.float32,
    tolerance=2e-6,
    device="cpu",
    scale=0.3,
    gates=None,
    **shape,
):
    q, k, v, dout = operands(sum(lengths), dtype=dtype, device=device, **shape)
    gates = [] if gates is None else [gates.to(device)]
    results = gradients(
        lambda q, k, v, *gates: attention(q, k, v, lengths, window, scale, *gates), q, k, v, dout, *gates
    )
    expected = gradients(
        lambda q, k, v, *gates: dense_attention(q, k, v, lengths, window, scale, *gates),
        q.double(),
        k.double(),
        v.double(),
        dout,
        *(x.double() for x in gates),
    )
    assert [x.dtype for x in results] == [dtype] * 4 + [x.dtype for x in gates]
    compare(results, expected, tolerance, *gates)


@pytest.fixture
def tiles(monkeypatch, request):
    """Tiles small enough for several in a test: by name through `indirect`, else the first."""
    name = getattr(request, "param", "wide")
    own, step = TILES[name]
    if name == "pointers":  # as on GPUs without TMA
        monkeypatch.setattr(tg, "tile_descriptor", lambda x, tile: x)
    monkeypatch.setattr(
        tg, "attention_tiles", lambda *_: (dict(BLOCK_M=own, BLOCK_N=step, num_warps=4, num_stages=2),) * 2
    )


each_tile = pytest.mark.parametrize("tiles", TILES, indirect=True)


@pytest.fixture
def capability(monkeypatch, request):
    monkeypatch.setattr(tg, "capability", lambda device: request.param)


each_capability = pytest.mark.parametrize("capability", [(8, 9), (9, 0)], indirect=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_sees_whom(layout):
    """The words of Documents, from both sides, about what a batch holds."""
    lengths, window = LAYOUTS[layout]
    batch = tg.pack(
        {0: [np.zeros(length + 1, np.uint16) for length in lengths]}, helpers.MODEL, pin=False
    ).to(helpers.CPU)
    assert all(map(torch.equal, (batch.positions, batch.remaining), distances(lengths)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i = torch.arange(sum(lengths))
    seen = (document[:, None] == document) & (i[:, None] >= i) & (i[:, None] - i <= window)
    first_key = i - batch.positions.clamp(max=window)
    last_query = i + batch.remaining.clamp(max=window)
    assert batch.positions.dtype == batch.remaining.dtype == torch.int32
    assert torch.equal(seen, (i >= first_key[:, None]) & (i <= i[:, None]))
    assert torch.equal(seen, (i[:, None] >= i) & (i[:, None] <= last_query))
    assert (first_key.diff() >= 0).all(), "the kernels walk from the first token's to the last one's"
    assert (last_query.diff() >= 0).all(), "the kernels walk from the first token's to the last one's"
    for rows, keys, part in tg.visible_blocks(batch.positions, window, 16):
        assert torch.equal(seen[rows, keys], part)
        assert seen[rows].sum() == part.sum()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [16, 512])
def test_reference_is_the_definition(layout, block):
    lengths, window = LAYOUTS[layout]
    q, k, v, dout = operands(sum(lengths), dk=16, dv=8, dtype=torch.float64)
    for gates in ((), (gates_of(sum(lengths), dtype=torch.float64),)):
        reference = lambda q, k, v, *gates: tg.attention_reference(
            q, k, v, distances(lengths)[0], window, 0.3, *gates, block_queries=block
        )
        results = gradients(reference, q, k, v, dout, *gates)
        dense = gradients(
            lambda q, k, v, *gates: dense_attention(q, k, v, lengths, window, 0.3, *gates),
            q,
            k,
            v,
            dout,
            *gates,
        )
        compare(results, dense, 1e-12, *gates)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_is_the_dense_formula_in_every_layout(layout, tiles):
    check(*LAYOUTS[layout])


@interpreted
@each_tile
@pytest.mark.parametrize("layout", ["many_in_a_tile", "window_of_a_tile", "one_document"])
@pytest.mark.slow
def test_tile_shapes_do_not_matter(layout, tiles):
    check(*LAYOUTS[layout], dk=32, dv=16)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_kernel_is_the_dense_formula(layout, tiles):
    """Twice the usual error: the logarithm of a tiny gate, up to 20, coarsens lse."""
    check(*LAYOUTS[layout], gates=gates_of(sum(LAYOUTS[layout][0])), tolerance=4e-6)


@interpreted
@each_tile
@pytest.mark.slow
def test_tile_shapes_do_not_matter_with_gates(tiles):
    check(*LAYOUTS["window_of_a_tile"], gates=gates_of(133), tolerance=4e-6, dk=32, dv=16)


@interpreted
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.slow
def test_gates_in_half_precision(kind, tiles):
    """No tiny ones: fp16 has no numbers for their outputs."""
    gates = gates_of(133, dtype=kind, least=2.0**-5)
    check(*LAYOUTS["window_of_a_tile"], dtype=torch.float16, tolerance=3e-3, gates=gates)


@interpreted
@pytest.mark.parametrize("gate", [1.0, 2.0**-20])
@pytest.mark.slow
def test_gates_all_alike(gate, tiles):
    """Against gates of 1: small ones make everything small, but for their own gradients."""
    lengths, window = LAYOUTS["many_in_a_tile"]
    q, k, v, dout = operands(sum(lengths))
    run = lambda *gates: gradients(
        lambda *x: attention(*x[:3], lengths, window, 0.3, *x[3:]), q, k, v, dout, *gates
    )
    plain = run()
    (*gated, dgates) = run(torch.full(q.shape[:2], gate))
    if gate == 1:
        assert all(map(torch.equal, plain, gated))
    compare([x / gate for x in gated], [x.double() for x in plain], 4e-6)
    torch.testing.assert_close(dgates, (plain[0] * dout).sum(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [0.5, -0.5, 1e-9, 0.0])
@pytest.mark.parametrize("embedded", [False, True])
def test_the_layers_gates_are_positive(embedded, scale):
    tokens = 5
    heads = 2
    width = 16
    inputs = 4
    generator = torch.Generator().manual_seed(0)
    x, value = torch.randn(2, tokens, width, generator=generator).to(torch.bfloat16)
    gate = torch.full((heads * (1 + embedded), inputs), -30.0)
    gate[1] = 1
    entry = tg.LayerEntry(
        x, None, injected=x, skip=None, skip_weight=None, resid_lambda=torch.ones(tokens)
    )
    *_, gates, value_gates = tg.attention_in(
        entry, value if embedded else None, gate, torch.full((tokens,), scale), fp8=False
    )
    assert gates.shape == (tokens, heads)
    assert (gates >= 2.0**-20).all()
    assert (value_gates is not None) == embedded


@pytest.mark.parametrize("rows", [1, 5, 8, 12])
@pytest.mark.fast
def test_few_outputs(rows):
    """The product and its gradients are those of the weight as it is, but made with a multiple of 8 rows."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 4), (rows, 4), (7, rows))
    )
    x.requires_grad_()
    weight.requires_grad_()
    found = tg.few_outputs(x, weight)
    assert found._base.shape == (7, rows + -rows % 8)
    torch.testing.assert_close(found, x @ weight.T)
    got = torch.autograd.grad(found, (x, weight), grad)
    torch.testing.assert_close(got, (grad @ weight, grad.T @ x))


@interpreted
@each_tile
@pytest.mark.parametrize("window", [14, 15, 30, 46])
@pytest.mark.slow
def test_windows_that_end_beside_a_step(window, tiles):
    check([100], window, heads=1)


@interpreted
@pytest.mark.parametrize("widths", [(16, 32), (32, 16)])
@pytest.mark.slow
def test_keys_and_values_of_different_widths(widths, tiles):
    check(*LAYOUTS["window_of_a_tile"], dk=widths[0], dv=widths[1])


@interpreted
@each_capability
@pytest.mark.parametrize("widths", [(128, 128), (64, 128), (128, 64), (64, 64)])
@pytest.mark.slow
def test_tiles_chosen_for_a_gpu_are_right(widths, capability):
    check([100, 1, 40], 48, heads=1, dk=widths[0], dv=widths[1], scale=0.1)


@interpreted
def test_half_precision(tiles):
    check(*LAYOUTS["window_of_a_tile"], dtype=torch.float16, tolerance=3e-3)


@interpreted
@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_scores(sign, tiles):
    """Without a running maximum: every score at the bound that q and k of width 16 can reach, and at its negative."""
    _, _, v, dout = operands(40)
    k = torch.ones(40, 2, 16)
    scale = 59.9 / 16
    results = gradients(lambda q, k, v: attention(q, k, v, [40], 20, scale), sign * k, k, v, dout)
    expected = gradients(
        lambda q, k, v: dense_attention(q, k, v, [40], 20, scale),
        sign * k.double(),
        k.double(),
        v.double(),
        dout,
    )
    compare(results, expected, 1e-4)


def test_scores_beyond_the_bound_are_refused():
    q, k, v, _ = operands(40)
    with pytest.raises(ValueError, match=r"expected scale \* key width < 60, found 3.75 \* 16"):
        attention(q, k, v, [40], 20, 3.75)


@pytest.mark.parametrize("reason, change", [
    ("", lambda x: x),
    ("", lambda x: F.pad(x.flatten(1), (0, 8))[:, :-8].unflatten(1, x.shape[1:])),
    ("heads apart", lambda x: F.pad(x, (0, 8))[..., :-8]),
    ("heads outside", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    ("channels outside", lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)),
    ("rows of 516 bytes", lambda x: F.pad(x.flatten(1), (0, 1))[:, :-1].unflatten(1, x.shape[1:])),
    ("start at byte 4", lambda x: F.pad(x.flatten(), (1, 3))[1:-3].view_as(x)),
    ("repeated rows", lambda x: x[:1].expand(x.shape)),
])
def test_copied_only_where_a_descriptor_cannot_take_it(reason, change):
    x = change(torch.randn(8, 4, 32))
    rows = tg.with_aligned_rows(x)
    assert (rows is not x) == bool(reason)
    assert torch.equal(rows, x)
    descriptor = tg.tile_descriptor(rows, dict(BLOCK_N=16))
    assert descriptor.base.data_ptr() == rows.data_ptr()
    assert descriptor.block_shape == [16, 32]
    assert list(descriptor.shape) == [8, 128]


def test_widths_other_than_powers_of_two_are_refused():
    q, k, v, _ = operands(40, dk=24)
    with pytest.raises(ValueError, match="power of 2"):
        attention(q, k, v, [40], 20, 0.3)


def test_tiles_follow_the_capability(monkeypatch):
    """Long steps on Hopper and data-centre Blackwell;
    short ones where shared memory (consumer Blackwell: 12.0) or TMA is missing."""
    for major, steps in ((8, 32), (9, 64), (10, 64), (12, 32)):
        monkeypatch.setattr(tg, "capability", lambda device: (major, 0))
        assert [tile["BLOCK_N"] for tile in tg.attention_tiles(torch.device("cuda"))] == [steps] * 2
        assert tg.attention_tiles(torch.device("cuda"), head_dim_qk=64)[0]["BLOCK_N"] == 32


@interpreted
@pytest.mark.parametrize("width", [16, 32])
def test_views_of_one_buffer(width):
    """q, k, v as slices of [T, 3, H, D], and the gradient of a transposed use, whose strides are odd."""
    lengths, window = LAYOUTS["window_of_a_tile"]
    tokens = sum(lengths)
    qkv = torch.stack(operands(tokens, dk=width, dv=width)[:3], 1)
    weight = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(1))
    losses = []
    for function in (
        lambda *x: attention(*x, lengths, window, 0.3),
        lambda *x: dense_attention(*x, lengths, window, 0.3),
    ):
        leaf = qkv.clone().requires_grad_()
        (function(*leaf.unbind(1)).transpose(0, 1) * weight).sum().backward()
        losses.append(leaf.grad.double())
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)


@interpreted
def test_expanded_gradient():
    """Sums hand back gradients with strides of zero."""
    lengths, window = LAYOUTS["many_in_a_tile"]
    q, k, v, _ = operands(sum(lengths))
    for ones in (torch.ones(()).expand(v.shape), torch.ones(v.shape[1:]).expand(v.shape)):
        results = gradients(lambda q, k, v: attention(q, k, v, lengths, window, 0.3), q, k, v, ones)
        compare(
            results,
            gradients(
                lambda q, k, v: dense_attention(q, k, v, lengths, window, 0.3), q, k, v, ones
            ),
            2e-6,
        )


@interpreted
def test_channels_need_not_be_adjacent(tiles):
    lengths, window = LAYOUTS["many_in_a_tile"]
    q, k, v, dout = operands(sum(lengths))
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v)]
    run = lambda *x: gradients(lambda *x: attention(*x, lengths, window, 0.3), *x, dout)
    assert all(torch.equal(x, y) for x, y in zip(run(q, k, v), run(*apart), strict=True))


@interpreted
@each_tile
def test_documents_do_not_leak(tiles):
    """Other and large (finite:
    0 * inf is NaN) values in the other documents change no bit of a document's output and gradients."""
    lengths = [13, 30, 21]
    tokens = 64
    clean = operands(tokens)
    own = torch.zeros(tokens, dtype=torch.bool)
    own[13:43] = True
    poisoned = [
        torch.where(own[:, None, None], x, y * size)
        for x, y, size in zip(clean, operands(tokens, seed=1), (1, 1, 1e6, 1e6))
    ]
    run = lambda q, k, v, dout: gradients(
        lambda q, k, v: attention(q, k, v, lengths, 25, 0.3), q, k, v, dout
    )
    for x, y in zip(run(*clean), run(*poisoned), strict=True):
        assert torch.equal(x[own], y[own])


@interpreted
def test_causal_and_windowed(tiles):
    """A token changes outputs from its own position to its position + window, and no other;
    gradients flow back the same way."""
    q, k, v, dout = operands(60)
    window, changed = 11, 23
    run = lambda k, v, dout: gradients(
        lambda q, k, v: attention(q, k, v, [60], window, 0.3), q, k, v, dout
    )
    out, *_ = run(k, v, dout)
    k2 = k.clone()
    v2 = v.clone()
    only = torch.zeros_like(dout)
    k2[changed], v2[changed], only[changed] = 3, 5, 1
    differs = (run(k2, v2, dout)[0] != out).flatten(1).any(1).nonzero().flatten()
    assert differs.tolist() == list(range(changed, changed + window + 1))
    _, dq, dk, dv = run(k, v, only)
    for gradient, rows in (
        (dq, [changed]),
        (dk, range(changed - window, changed + 1)),
        (dv, range(changed - window, changed + 1)),
    ):
        assert gradient.flatten(1).any(1).nonzero().flatten().tolist() == list(rows)


@interpreted
@pytest.mark.slow
def test_repeatable(tiles):
    lengths, window = LAYOUTS["many_in_a_tile"]
    q, k, v, dout = operands(sum(lengths))
    first, second = (
        gradients(lambda q, k, v: attention(q, k, v, lengths, window, 0.3), q, k, v, dout) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU, in bf16

needs_gpu = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU and TRITON_INTERPRET=0"
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("widths", [(128, 128), (64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize(
    "layout", ["one_document", "single_tokens", "window_0", "window_past_everything", "three_documents"]
)
@pytest.mark.parametrize("gated", [False, True])
def test_gpu_layouts(layout, widths, gated):
    # With window 0 the gradients of q and k are zero: what is left is the rounding of p to bf16 before its division by
    # the row sum. The same roundings emulated in float32 on these operands leave up to 0.040, with gates, of up to 2,
    # 0.057.
    tolerance = (0.08 if gated else 0.06) if layout == "window_0" else 2e-2
    gates = gates_of(sum(LAYOUTS[layout][0]), 6, torch.bfloat16) if gated else None
    check(
        *LAYOUTS[layout],
        dtype=torch.bfloat16,
        tolerance=tolerance,
        device="cuda",
        scale=0.1,
        heads=6,
        dk=widths[0],
        dv=widths[1],
        gates=gates,
    )


@pytest.mark.gpu
@needs_gpu
def test_gpu_long():
    check(
        [700, 3, 391, 128, 1, 1025],
        300,
        dtype=torch.bfloat16,
        tolerance=2e-2,
        device="cuda",
        scale=0.1,
        heads=6,
        dk=128,
        dv=128,
    )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "tokens, window, gated",
    [(16_384, 384, False), (16_384, 384, True), (49_152, 640, True), (49_151, 1408, True)],
)
def test_gpu_full_size(tokens, window, gated, monkeypatch):
    """Documents of 1 to 2,048 tokens, outputs full of NaN beforehand, against the reference in float64."""
    lengths = [2048, 391, 1, 1, 17] * (tokens // 2458)
    lengths.append(tokens - sum(lengths))
    q, k, v, dout = operands(tokens, 6, 128, 128, torch.bfloat16, "cuda")
    gates = [gates_of(tokens, 6, torch.bfloat16, "cuda")] if gated else []
    wide = lambda q, k, v, *gates: tg.attention_reference(
        q, k, v, distances(lengths, "cuda")[0], window, 0.1, *gates
    )
    expected = gradients(
        wide, q.double(), k.double(), v.double(), dout, *(x.double() for x in gates)
    )
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *shape, **options: empty(*shape, **options).fill_(torch.nan),
    )
    results = gradients(
        lambda q, k, v, *gates: attention(q, k, v, lengths, window, 0.1, *gates),
        q,
        k,
        v,
        dout,
        *gates,
    )
    compare(results, expected, 2e-2, *gates)


@pytest.mark.gpu
@needs_gpu
def test_gpu_graph_follows_documents():
    """One captured graph replays with other documents, bitwise as eager calls give them."""
    first = [100, 200, 212]
    second = [512]
    documents = distances(first, "cuda")
    q, k, v, dout = operands(512, 6, 128, 128, torch.bfloat16, "cuda")
    gates = gates_of(512, 6, torch.bfloat16, "cuda")
    run = lambda: gradients(
        lambda q, k, v: tg.PackedAttention.apply(q, k, v, *documents, 64, 0.1, gates), q, k, v, dout
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for lengths in (first, second):
        for place, values in zip(documents, distances(lengths)):
            place.copy_(values)
        graph.replay()
        eager = run()
        assert all(torch.equal(x, y) for x, y in zip(captured, eager, strict=True))
