"""From the projection to attention: the kernels of SplitHeads against the float64 reference and its differentiation.

On a CPU the Triton kernels run interpreted, in a process of their own: `pytest tests/test_split_heads.py`. On a GPU,
`TRITON_INTERPRET=0 pytest tests/test_split_heads.py` runs every test compiled, and those marked gpu at full size besides.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")
import train_gpt as tg
from test_loss import DEVICE, exact_casts, full_size, guard, guarded, poisoned  # noqa: F401 (two are fixtures)

NAMES = "q", "k", "v", "dqkv", "dvalue", "dgates"
# Lengths of the documents: single tokens at the ends and in between, tiles of 32 rows cut anywhere.
LAYOUTS = {"one token": [1], "single tokens": [1] * 35, "odd": [1, 5, 40, 2, 1, 30, 1], "a tile": [32], "tiles": [32, 31, 1, 64], "one document": [77]}
FLAGS = {"plain": {}, "paired": dict(paired=True), "key offset": dict(key_offset=True)}  # no layer has both, see test_tables
each_flag = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
with_value = pytest.mark.parametrize("value", [False, True], ids=("no value", "value"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poison(guard, monkeypatch):  # noqa: F811
    """empty_like as `guard` makes new_empty: NaN, so that what a kernel does not write shows."""
    original = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: original(x, **options) if options else x.new_empty(*x.shape))


def make_inputs(lengths, heads=2, width=16, dtype=torch.float32, value=True, gate_dtype=None, seed=0):
    """([qkv, value, value_gates], [positions, cos, sin], gradients of q, k, v); rows of very different size."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    qkv = normal(tokens, 3, heads, width) * 10 ** normal(tokens, 1, 1, 1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    frequency = 1024.0 ** -torch.linspace(0, 1, width // 4).double().numpy()
    turn = tg.geometry_tables(frequency, 0.1, (1, 1), 2 * max(lengths), dtype, torch.device("cpu"))
    leaves = [qkv, normal(tokens, heads * width), 2 * torch.sigmoid(normal(tokens, heads))] if value else [qkv]
    leaves = [guarded(x.to(d or dtype)).requires_grad_() for x, d in zip(leaves, (None, None, gate_dtype))] + [None, None] * (not value)
    return leaves, [guarded(x) for x in (positions.int(), turn.cos, turn.sin)], [guarded(normal(tokens, heads, width).to(dtype)) for _ in range(3)]


def run(function, leaves, turn, grads, **flags):
    """(q, k, v, dqkv, dvalue, dgates); the last two are None without a value."""
    outs = function(*leaves, *turn, flags.get("paired", False), flags.get("key_offset", False))
    found = [x for x in leaves if x is not None]
    results = torch.autograd.grad(outs, found, [g.view_as(out) for g, out in zip(grads, outs)])
    return *(out.detach() for out in outs), *results, *[None] * (3 - len(found))


def exactly(leaves, turn, grads, **flags):
    """The same by torch's own differentiation of the reference in float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    return run(tg.split_heads_reference, wide, [turn[0], *(x.double() for x in turn[1:])], [g.double() for g in grads], **flags)


def compare(got, want):
    """Every output is rounded once, by half an epsilon; float32 arithmetic before that leaves some 16 roundings of the largest term."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            rows = (a.double() - b).flatten(1), b.flatten(1)
            largest = rows[1].abs().amax(1, keepdim=True)
            bound = rows[1].abs() * torch.finfo(a.dtype).eps / 2 + 16 * 2.0 ** -23 * largest + torch.finfo(a.dtype).tiny * torch.finfo(a.dtype).eps
            excess = (rows[0].abs() / bound).max()
            assert a.shape == b.shape and excess <= 1, (name, float(excess))


def same(got, want):
    return all(a is b if a is None else torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- reference -------------------------------------------------------------------------------------------------------

def test_reference_is_the_definition():
    """Token by token, head by head, from the words of its docstring."""
    for flags in FLAGS.values():
        (qkv, value, gates), (positions, cos, sin), _ = make_inputs([1, 3, 2], heads=2, width=8, dtype=torch.float64)
        outs = tg.split_heads_reference(qkv, value, gates, positions, cos, sin, **flags)
        paired, offset = (flags.get(name, False) for name in ("paired", "key_offset"))

        def turned(row, place):
            row = row / (row.square().mean() + 1e-6).sqrt()
            angle = torch.complex(cos[place], -sin[place])
            pair = torch.complex(row[:4], row[4:]) * angle
            return torch.cat([pair.real, pair.imag])

        for t in range(6):
            for h in range(2):
                place = 2 * int(positions[t]) + h if paired else int(positions[t])
                q, k = turned(qkv[t, 0, h], place), turned(qkv[t, 1, h], place)
                if offset and positions[t] > 0:
                    before = turned(qkv[t - 1, 1, h], place - 1)
                    k = torch.where(torch.arange(8) % 4 >= 2, before.to("cpu"), k.to("cpu")).to(k)
                v = qkv[t, 2, h] + gates[t, h] * value[t, 8 * h:8 * h + 8]
                for out, want in zip(outs, (q, k, v)):
                    torch.testing.assert_close(out[2 * t + h, 0] if paired else out[t, h], want)


def test_tables():
    """What the kernels rely on: the still channels have angle 0, and no layer is paired and offset at once."""
    for preset in tg.PRESETS.values():
        for stage in range(len(preset.stages)):
            turn = tg.rotary_geometry(preset, stage, 64, torch.device("cpu"))
            still = slice(preset.model.head_width // 4, None)
            assert (turn.cos[:, still] == 1).all() and (turn.sin[:, still] == 0).all() and turn.cos.is_contiguous() and turn.sin.is_contiguous()
        assert not any(layer.paired and layer.key_offset for layer in preset.model.layers)


# ---- kernels ---------------------------------------------------------------------------------------------------------

@each_flag
@with_value
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, value, flags):
    inputs = make_inputs(LAYOUTS[layout], value=value)
    got = run(tg.SplitHeads.apply, *inputs, **flags)
    compare(got, exactly(*inputs, **flags))
    assert same(got, run(tg.SplitHeads.apply, *inputs, **flags))


@each_flag
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=str)
def test_half_precision(gate_dtype, dtype, flags):
    inputs = make_inputs(LAYOUTS["odd"], dtype=dtype, gate_dtype=gate_dtype)
    got = run(tg.SplitHeads.apply, *inputs, **flags)
    assert [x.dtype for x in got] == [dtype] * 5 + [gate_dtype or dtype]
    compare(got, exactly(*inputs, **flags))


@each_flag
@pytest.mark.parametrize("heads, width", [(2, 128), (6, 64), (8, 8)])
def test_shapes(heads, width, flags):
    inputs = make_inputs([33, 1, 12], heads, width)
    compare(run(tg.SplitHeads.apply, *inputs, **flags), exactly(*inputs, **flags))


def test_zero_rows():
    """RMSNorm of zeros is zero; its slope there is that of x / sqrt(1e-6)."""
    (qkv, *rest), turn, grads = make_inputs([5, 3])
    qkv.detach()[2:4] = 0
    got = run(tg.SplitHeads.apply, (qkv, *rest), turn, grads)
    compare(got, exactly((qkv, *rest), turn, grads))
    assert got[3][2:4].isfinite().all() and got[3][2, 0].any()


@each_flag
@with_value
def test_documents_do_not_leak(value, flags):
    """NaN in all the other documents changes no bit of a document's outputs and gradients."""
    lengths, own = [13, 30, 21], slice(13, 43)
    leaves, turn, grads = make_inputs(lengths, value=value)
    clean = run(tg.SplitHeads.apply, leaves, turn, grads, **flags)

    def spoiled(x):
        other = torch.full_like(x, torch.nan)
        other[own] = x[own]
        return other

    leaves = [None if x is None else spoiled(x.detach()).requires_grad_() for x in leaves]
    found = run(tg.SplitHeads.apply, leaves, turn, [spoiled(g) for g in grads], **flags)
    for a, b in zip(clean, found):
        assert a is b is None or torch.equal(*(x.view(sum(lengths), -1)[own] for x in (a, b)))


@pytest.mark.parametrize("size, step", [(3, 1), (2, 2)])
def test_key_offset_moves_the_still_channels_by_one_token(size, step):
    """A token's still channels reach the next key and its own query, never another document or the one after."""
    (qkv, *rest), turn, grads = make_inputs([size, size], heads=1, value=False)
    changed = qkv.detach().clone()
    changed[1, 1, 0, 4:8] += 1
    keys = [tg.SplitHeads.apply(x, *rest, *turn, False, True)[1] for x in (qkv.detach(), changed)]
    differs = (keys[0] != keys[1])[:, 0]
    assert not differs[0].any() and not differs[3:].any()
    still = torch.arange(16) % 8 >= 4
    assert not differs[1].cpu()[still].any() and differs[1].cpu()[~still].any()
    if size == 3:
        assert differs[2].cpu()[still].any() and not differs[2].cpu()[~still].any()


# ---- strides ---------------------------------------------------------------------------------------------------------

def strided(x):
    """The same values, every second element of a wider buffer of NaN along the last dimension."""
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


@each_flag
def test_strides_do_not_matter(flags):
    leaves, turn, grads = make_inputs(LAYOUTS["odd"])
    want = run(tg.SplitHeads.apply, leaves, turn, grads, **flags)
    views = [leaves[0], *(strided(x.detach()).requires_grad_() for x in leaves[1:])]
    assert same(run(tg.SplitHeads.apply, views, turn, grads, **flags), want)
    outs = tg.SplitHeads.apply(*leaves, *turn, *(flags.get(name, False) for name in ("paired", "key_offset")))
    found = torch.autograd.grad(outs, leaves, [strided(g.view_as(out)) for g, out in zip(grads, outs)])
    assert same(found, want[3:])


@pytest.mark.parametrize("view", [strided, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)], ids=("every second", "heads first"))
def test_strides_of_the_projection_do_not_matter(view):
    (qkv, *rest), turn, grads = make_inputs(LAYOUTS["odd"])
    want = run(tg.SplitHeads.apply, (qkv, *rest), turn, grads)
    assert same(run(tg.SplitHeads.apply, (view(qkv.detach()).requires_grad_(), *rest), turn, grads), want)


@each_flag
@with_value
def test_expanded_and_missing_gradients(value, flags):
    """A sum hands back one number with strides of zero; what is not used hands back nothing."""
    leaves, turn, _ = make_inputs(LAYOUTS["odd"], value=value)
    switches = [flags.get(name, False) for name in ("paired", "key_offset")]
    for pick in (slice(None), slice(0, 1), slice(2, 3)):
        found = []
        for function, wide in ((tg.SplitHeads.apply, leaves), (tg.split_heads_reference, [x if x is None else x.detach().double().requires_grad_() for x in leaves])):
            tables = turn if wide is leaves else [turn[0], turn[1].double(), turn[2].double()]
            sum(out.sum() for out in function(*wide, *tables, *switches)[pick]).backward()
            found.append([None if x is None or x.grad is None else x.grad for x in wide])
        for x in leaves:
            if x is not None:
                x.grad = None
        for a, b in zip(*found):
            if a is not None:
                torch.testing.assert_close(a.double(), torch.zeros_like(a).double() if b is None else b, rtol=1e-5, atol=1e-5)


# ---- at full size ----------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@full_size
@each_flag
@with_value
@pytest.mark.parametrize("tokens", [16_384, 49_152, 49_151])
def test_full_size(tokens, value, flags):
    """bf16, six heads of 128, documents of one token to 2,048."""
    lengths = [1, 2048, 391, 1, 1, 17] * (tokens // 2459)
    inputs = make_inputs([*lengths, tokens - sum(lengths)], 6, 128, torch.bfloat16, value)
    got = run(tg.SplitHeads.apply, *inputs, **flags)
    compare(got, exactly(*inputs, **flags))
    assert same(got, run(tg.SplitHeads.apply, *inputs, **flags))


@pytest.mark.gpu
@full_size
def test_graph_follows_the_documents():
    """One captured graph replays with other documents, bitwise as an eager call gives them."""
    first, second = [100, 200, 212], [512]
    leaves, turn, grads = make_inputs(second, 6, 128, torch.bfloat16)
    step = lambda: run(tg.SplitHeads.apply, leaves, turn, grads, key_offset=True)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in (first, second):
        turn[0].copy_(torch.cat([torch.arange(length) for length in lengths]))
        graph.replay()
        assert same(captured, step())
