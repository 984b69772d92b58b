"""From the residual stream to attention:
ProjectHeads, its kernels alone and its FP8 products, against the float64 reference and its differentiation.

On a CPU the Triton kernels run interpreted, in a process of their own: `pytest tests/test_split_heads.py`. On a GPU,
`TRITON_INTERPRET=0 pytest tests/test_split_heads.py` runs every test compiled,
and those marked gpu at full size besides.
"""

import itertools
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
import helpers
import train_gpt as tg
from test_loss import (  # noqa: F401  # some are fixtures
    DEVICE,
    E4M3,
    E5M2,
    INTERPRETED,
    exact_casts,
    full_size,
    guard,
    guarded,
    poisoned,
    relative,
)
from test_mlp import rounded

NAMES = "q", "k", "v", "dqkv", "dvalue", "dgates"
# Lengths of the documents: single tokens at the ends and in between, tiles of 32 rows cut anywhere.
LAYOUTS = {
    "one token": [1],
    "single tokens": [1] * 35,
    "odd": [1, 5, 40, 2, 1, 30, 1],
    "a tile": [32],
    "tiles": [32, 31, 1, 64],
    "one document": [77],
}
FLAGS = {"plain": {}, "key offset": dict(key_offset=True)}
each_flag = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
with_value = pytest.mark.parametrize("value", [False, True], ids=("no value", "value"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poison(guard, monkeypatch):
    """empty_like as `guard` makes new_empty: NaN, so that what a kernel does not write shows."""
    original = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **options: original(x, **options) if options else x.new_empty(*x.shape)
    )


def make_inputs(
    lengths, heads=2, width=16, dtype=torch.float32, value=True, gate_dtype=None, seed=0, keys=None
):
    """([qkv, value, value_gates], [positions, cos, sin, heads], gradients of q, k, v); rows of very different size.
    Heads are `width` wide, their queries and keys `keys`, half of that if not given."""
    tokens = sum(lengths)
    keys = keys or width // 2
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    qkv = normal(tokens, heads * (2 * keys + width)) * 10 ** normal(tokens, 1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    frequency = 1024.0 ** -torch.linspace(0, 1, keys // 4).double().numpy()
    turn = tg.geometry_tables(frequency, 0.1, (1, 1), max(lengths), dtype, torch.device("cpu"))
    leaves = (
        [qkv, normal(tokens, heads * width), 2 * torch.sigmoid(normal(tokens, heads))]
        if value
        else [qkv]
    )
    leaves = [
        guarded(x.to(d or dtype)).requires_grad_() for x, d in zip(leaves, (None, None, gate_dtype))
    ] + [None, None] * (not value)
    grads = [guarded(normal(tokens, heads, size).to(dtype)) for size in (keys, keys, width)]
    return leaves, [*(guarded(x) for x in (positions.int(), turn.cos, turn.sin)), heads], grads


def parts_of(qkv, heads, keys):
    """Views of the queries, keys [T, H, keys] and values [T, H, width] in qkv."""
    return [
        part.unflatten(1, (heads, -1))
        for part in (
            qkv[:, : heads * keys],
            qkv[:, heads * keys : 2 * heads * keys],
            qkv[:, 2 * heads * keys :],
        )
    ]


def split_heads(qkv, *rest):
    """The kernels alone: the identity projects without changing a bit."""
    return tg.ProjectHeads.apply(
        qkv, torch.eye(qkv.size(1), dtype=qkv.dtype, device=qkv.device), *rest
    )[:3]


def run(function, leaves, turn, grads, **flags):
    """(q, k, v, dqkv, dvalue, dgates); the last two are None without a value."""
    outs = function(*leaves, *turn, *flags.values())
    found = [x for x in leaves if x is not None]
    results = torch.autograd.grad(outs, found, grads)
    return *(out.detach() for out in outs), *results, *[None] * (3 - len(found))


def exactly(leaves, turn, grads, **flags):
    """The same by torch's own differentiation of the reference in float64."""
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    return run(
        tg.split_heads_reference,
        wide,
        [turn[0], *(x.double() for x in turn[1:3]), turn[3]],
        [g.double() for g in grads],
        **flags,
    )


def compare(got, want):
    """Every output is rounded once, by half an epsilon;
    float32 arithmetic before that leaves some 16 roundings of the largest term."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            rows = (a.double() - b).flatten(1), b.flatten(1)
            largest = rows[1].abs().amax(1, keepdim=True)
            bound = (
                rows[1].abs() * torch.finfo(a.dtype).eps / 2
                + 16 * 2.0**-23 * largest
                + torch.finfo(a.dtype).tiny * torch.finfo(a.dtype).eps
            )
            excess = (rows[0].abs() / bound).max()
            assert a.shape == b.shape, (name, float(excess))
            assert excess <= 1, (name, float(excess))


def same(got, want):
    return all(a is b if a is None else torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- reference -------------------------------------------------------------------------------------------------------

@pytest.mark.fast
def test_reference_is_the_definition():
    """Token by token, head by head, from the words of its docstring."""
    for flags, keys in itertools.product(FLAGS.values(), (8, 4)):
        (qkv, value, gates), (positions, cos, sin, _), _ = make_inputs(
            [1, 3, 2], heads=2, width=8, dtype=torch.float64, keys=keys
        )
        outs = tg.split_heads_reference(qkv, value, gates, positions, cos, sin, 2, **flags)
        assert [out.shape for out in outs] == [(6, 2, keys), (6, 2, keys), (6, 2, 8)]
        columns = qkv.unbind(1)
        row = lambda t, start, size: torch.stack(
            [column[t] for column in columns[start : start + size]]
        )

        def turned(row, place):
            row = row / (row.square().mean() + 1e-6).sqrt()
            angle = torch.complex(cos[place], -sin[place])
            pair = torch.complex(row[:len(row) // 2], row[len(row) // 2:]) * angle
            return torch.cat([pair.real, pair.imag])

        for t, h in itertools.product(range(6), range(2)):
            place = int(positions[t])
            q = turned(row(t, keys * h, keys), place)
            k = turned(row(t, keys * (2 + h), keys), place)
            if flags and positions[t] > 0:
                before = turned(row(t - 1, keys * (2 + h), keys), place - 1)
                k = torch.where(
                    torch.arange(keys) % (keys // 2) >= keys // 4, before.to("cpu"), k.to("cpu")
                ).to(k)
            v = row(t, 4 * keys + 8 * h, 8) + gates[t, h] * value[t, 8 * h : 8 * h + 8]
            for out, want in zip(outs, (q, k, v)):
                torch.testing.assert_close(out[t, h], want)


@pytest.mark.fast
def test_channels_beyond_the_rotary_ones_have_angle_zero():
    """What the kernels rely on: the still channels have angle 0."""
    for preset in tg.PRESETS.values():
        for stage in range(len(preset.stages)):
            turn = tg.rotary_geometry(preset, stage, 64, torch.device("cpu"))
            still = slice(preset.model.key_width // 4, None)
            assert (turn.cos[:, still] == 1).all()
            assert (turn.sin[:, still] == 0).all()
            assert turn.cos.is_contiguous()
            assert turn.sin.is_contiguous()


# ---- kernels ---------------------------------------------------------------------------------------------------------

@each_flag
@with_value
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_is_the_reference_in_every_layout(layout, value, flags):
    inputs = make_inputs(LAYOUTS[layout], value=value)
    got = run(split_heads, *inputs, **flags)
    compare(got, exactly(*inputs, **flags))
    assert same(got, run(split_heads, *inputs, **flags))


@each_flag
@pytest.mark.parametrize("layout", ["odd", "tiles"])
def test_first_channels_of_a_wider_value(layout, flags):
    (qkv, value, gates), *rest = make_inputs(LAYOUTS[layout])
    wider = guarded(
        torch.cat([value.detach(), torch.full_like(value, torch.nan)[:, :5]], 1)
    ).requires_grad_()
    got = run(split_heads, (qkv, wider, gates), *rest, **flags)
    want = run(split_heads, (qkv, value, gates), *rest, **flags)
    assert got[4].shape == wider.shape
    assert not got[4][:, -5:].any()
    assert same((*got[:4], got[4][:, :-5].contiguous(), got[5]), want)
    compare(got, exactly((qkv, wider.detach().nan_to_num(), gates), *rest, **flags))
    for function in (split_heads, tg.split_heads_reference):
        with pytest.raises((ValueError, RuntimeError), match="channels|shape"):
            function(qkv, value[:, :-1], gates, *rest[0])


@each_flag
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("gate_dtype", [None, torch.float32], ids=str)
def test_half_precision(gate_dtype, dtype, flags):
    inputs = make_inputs(LAYOUTS["odd"], dtype=dtype, gate_dtype=gate_dtype)
    got = run(split_heads, *inputs, **flags)
    assert [x.dtype for x in got] == [dtype] * 5 + [gate_dtype or dtype]
    compare(got, exactly(*inputs, **flags))


@each_flag
@pytest.mark.parametrize(
    "heads, keys, width", [(2, 128, 128), (4, 64, 128), (6, 64, 64), (2, 32, 16), (8, 8, 8)]
)
def test_any_number_of_heads_and_widths(heads, keys, width, flags):
    inputs = make_inputs([33, 1, 12], heads, width, keys=keys)
    compare(run(split_heads, *inputs, **flags), exactly(*inputs, **flags))


@pytest.mark.fast
def test_zero_rows():
    """RMSNorm of zeros is zero; its slope there is that of x / sqrt(1e-6)."""
    (qkv, *rest), turn, grads = make_inputs([5, 3])
    qkv.detach()[2:4] = 0
    got = run(split_heads, (qkv, *rest), turn, grads)
    compare(got, exactly((qkv, *rest), turn, grads))
    assert got[3][2:4].isfinite().all()
    assert got[3][2, :16].any()


@each_flag
@with_value
@pytest.mark.fast
def test_documents_do_not_leak(value, flags):
    """NaN in all the other documents changes no bit of a document's outputs and gradients."""
    lengths = [13, 30, 21]
    own = slice(13, 43)
    leaves, turn, grads = make_inputs(lengths, value=value)
    clean = run(split_heads, leaves, turn, grads, **flags)

    def spoiled(x):
        other = torch.full_like(x, torch.nan)
        other[own] = x[own]
        return other

    leaves = [None if x is None else spoiled(x.detach()).requires_grad_() for x in leaves]
    found = run(split_heads, leaves, turn, [spoiled(g) for g in grads], **flags)
    for a, b in zip(clean, found):
        assert a is b is None or torch.equal(*(x.view(sum(lengths), -1)[own] for x in (a, b)))


@pytest.mark.parametrize("size, step", [(3, 1), (2, 2)])
@pytest.mark.fast
def test_key_offset_moves_the_still_channels_by_one_token(size, step):
    """A token's still channels reach the next key and its own query, never another document or the one after."""
    (qkv, *rest), turn, grads = make_inputs([size, size], heads=1, value=False, keys=16)
    changed = qkv.detach().clone()
    changed[1, 16 + 4:16 + 8] += 1
    keys = [split_heads(x, *rest, *turn, True)[1] for x in (qkv.detach(), changed)]
    differs = (keys[0] != keys[1])[:, 0]
    assert not differs[0].any()
    assert not differs[3:].any()
    still = torch.arange(16) % 8 >= 4
    assert not differs[1].cpu()[still].any()
    assert differs[1].cpu()[~still].any()
    if size == 3:
        assert differs[2].cpu()[still].any()
        assert not differs[2].cpu()[~still].any()


# ---- strides ---------------------------------------------------------------------------------------------------------

def strided(x):
    """The same values, every second element of a wider buffer of NaN along the last dimension."""
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


@each_flag
def test_strides_do_not_matter(flags):
    leaves, turn, grads = make_inputs(LAYOUTS["odd"])
    want = run(split_heads, leaves, turn, grads, **flags)
    views = [leaves[0], *(strided(x.detach()).requires_grad_() for x in leaves[1:])]
    assert same(run(split_heads, views, turn, grads, **flags), want)
    outs = split_heads(*leaves, *turn, *flags.values())
    found = torch.autograd.grad(outs, leaves, [strided(g) for g in grads])
    assert same(found, want[3:])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("extra", [0, 8])
def test_value_handed_on(extra, dtype):
    """Two projections and a sum read one value, the last ones what the one before hands on:
    the gradient is that of all."""
    (qkv, value, gates), turn, grads = make_inputs(LAYOUTS["odd"], dtype=dtype)
    value = torch.cat([value.detach(), value.detach()[:, :extra]], 1).requires_grad_()
    eye = torch.eye(qkv.size(1), dtype=dtype, device=DEVICE)
    scale = torch.linspace(-1, 1, value.size(1), dtype=dtype, device=DEVICE)

    def total(project, value):
        first = project(qkv, value, gates)
        second = project(qkv, first[3], 2 * gates)
        loss = sum((out * grad).sum() for outs in (first, second) for out, grad in zip(outs, grads))
        return loss + (second[3] * scale).sum()

    kernels = torch.autograd.grad(
        total(lambda x, *rest: tg.ProjectHeads.apply(x, eye, *rest, *turn), value), (qkv, value, gates)
    )
    apart = torch.autograd.grad(
        total(lambda x, value, gates: (*tg.split_heads_reference(x, value, gates, *turn), value), value),
        (qkv, value, gates),
    )
    for got, want in zip(kernels, apart):
        assert relative(got, want) < (1e-5 if dtype == torch.float32 else 5e-3)
    (later,) = torch.autograd.grad(
        (tg.ProjectHeads.apply(qkv, eye, value, gates, *turn)[3] * scale).sum(), value
    )
    assert same([later], [scale.expand_as(value).contiguous()]), (
        "no projection was used: the value's gradient passes"
    )
    eyes = [tg.ProjectHeads.apply(qkv, eye, value, gates, *turn) for _ in range(2)]
    of_a_sum, of_ones = (
        torch.autograd.grad([out[2], out[3]], value, [grads[2], grad])
        for out, grad in zip(eyes, (torch.ones_like(value[:1, :1]).expand_as(value), torch.ones_like(value)))
    )
    assert same(of_a_sum, of_ones), "an expanded gradient is one number of memory"


@each_flag
@with_value
def test_expanded_and_missing_gradients(value, flags):
    """A sum hands back one number with strides of zero; what is not used hands back nothing."""
    leaves, turn, _ = make_inputs(LAYOUTS["odd"], value=value)
    for pick in (slice(None), slice(0, 1), slice(2, 3)):
        found = []
        for function, wide in (
            (split_heads, leaves),
            (
                tg.split_heads_reference,
                [x if x is None else x.detach().double().requires_grad_() for x in leaves],
            ),
        ):
            tables = (
                turn if wide is leaves else [turn[0], turn[1].double(), turn[2].double(), turn[3]]
            )
            sum(out.sum() for out in function(*wide, *tables, *flags.values())[pick]).backward()
            found.append([None if x is None or x.grad is None else x.grad for x in wide])
        for x in leaves:
            if x is not None:
                x.grad = None
        for a, b in zip(*found):
            if a is not None:
                torch.testing.assert_close(
                    a.double(), torch.zeros_like(a).double() if b is None else b, rtol=1e-5, atol=1e-5
                )


# ---- FP8 -------------------------------------------------------------------------------------------------------------
SCALES = tg.MlpScales()
WIDTHS = [(2, 16, 16), (2, 128, 128), (4, 64, 128)]  # heads, width of one's keys, of its values


def gradients_of_qkv(leaves, turn, grads, scale=None, rows=64, key_offset=False):
    """What the kernel writes: (dqkv, None) in float32, or (dqkv / scale, transposed copy) in e5m2."""
    qkv, value, gates = (None if x is None else x.detach() for x in leaves)
    T, size = qkv.shape
    out = qkv.new_empty(T, size, dtype=E5M2 if scale else torch.float32)
    out_t = qkv.new_empty(size, T, dtype=E5M2) if scale else None
    describe = lambda grad: tg.TensorDescriptor.from_tensor(
        out_t.view(torch.int8), [grad.size(2) // 2, rows]
    )
    bits, dqk_t_desc, dv_t_desc = (
        (out.view(torch.int8), *map(describe, grads[1:])) if scale else (out, None, None)
    )
    dvalue, dgates = (None if x is None else torch.empty_like(x) for x in (value, gates))
    dq, dk, dv = grads
    tg.ProjectHeads.launch(
        tg.split_heads_grad_kernel,
        (qkv, value, gates, *turn[:3]),
        heads=turn[3],
        key_offset=key_offset,
        block_m=rows,
        dq_ptr=dq,
        dk_ptr=dk,
        dv_ptr=dv,
        dqkv_ptr=bits,
        dqk_t_desc=dqk_t_desc,
        dv_t_desc=dv_t_desc,
        dvalue_ptr=dvalue,
        dgates_ptr=dgates,
        factor=1.0 / (scale or 1.0),
        ADD=False,
        PTX=qkv.is_cuda,
    )
    return out, out_t


def compare_fp8(inputs, scale=SCALES.grad, **flags):
    """Both layouts equal to the bit, and each value the rounding of the float32 one;
    on a GPU of one as near to it as its own sums may lie."""
    got, got_t = gradients_of_qkv(*inputs, scale, **flags)
    want, _ = gradients_of_qkv(*inputs, **flags)
    assert torch.equal(got.view(torch.int8).T, got_t.view(torch.int8))
    heads = parts_of(want, inputs[1][3], inputs[2][0].size(2))
    slack = torch.cat(
        [
            (part.abs().amax(2, keepdim=True) * (0 if INTERPRETED else 16 * 2.0**-23))
            .expand_as(part)
            .flatten(1)
            for part in heads
        ],
        1,
    )
    low, high = (rounded(want + sign * slack, scale, E5M2) for sign in (-1, 1))
    got = got.double() * scale
    assert ((low <= got) & (got <= high)).all()
    return got


@each_flag
@with_value
@pytest.mark.parametrize("heads, keys, width", WIDTHS)
def test_gradient_in_fp8(heads, keys, width, value, flags):
    """Documents cut by tiles of 64 tokens anywhere; gradients from 1e-12 to 1e6, beyond both ends of e5m2's range."""
    leaves, turn, grads = make_inputs(
        [1, 40, 61, 2, 1, 38, 1], heads, width, torch.bfloat16, value, keys=keys
    )
    size = 10 ** torch.linspace(-12, 6, 144, device=DEVICE)[:, None, None]
    got = compare_fp8(
        (leaves, turn, [guarded((g * size).bfloat16()) for g in grads]), **flags
    ).abs()
    assert (got == 57344 * SCALES.grad).any()
    assert (got == 2.0 ** -16 * SCALES.grad).any()
    assert not got[0].any()


@pytest.mark.gpu
@full_size
@each_flag
@with_value
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("rows", [32, 64, 128])
def test_gradient_in_fp8_full_size(rows, keys, value, flags):
    lengths = [1, 2048, 391, 1, 1, 17] * 6
    compare_fp8(
        make_inputs([*lengths, 16_384 - sum(lengths)], 6, 128, torch.bfloat16, value, keys=keys),
        rows=rows,
        **flags,
    )


def make_projection(T, width, heads, head_width, value, seed=0, keys=None):
    """([h, weight, value, value_gates], [positions, cos, sin, heads], gradients of q,
    k, v), each of the size it has in training; bf16."""
    lengths = [1, T // 3, 7]
    (qkv, *others), turn, grads = make_inputs(
        [*lengths, T - sum(lengths)], heads, head_width, torch.bfloat16, value, seed=seed, keys=keys
    )
    generator = torch.Generator().manual_seed(seed)
    h = F.rms_norm(torch.randn(T, width, generator=generator), (width,))
    weight = torch.randn(qkv.size(1), width, generator=generator) * 0.5 * width ** -0.5
    return (
        [*(guarded(x.bfloat16()).requires_grad_() for x in (h, weight)), *others],
        turn,
        [(g * 1e-3).detach() for g in grads],
    )


def exact_projection(leaves, turn, grads, model=None, **flags):
    """(q, k, v, dh, dweight, dvalue, dgates) in float64;
    with scales as `model` every rounding that FP8 prescribes besides."""
    h, weight, *others = (None if x is None else x.detach().double() for x in leaves)
    if model:
        h = rounded(h, model.x, E4M3)
        weight = rounded(weight, model.weight, E4M3)
    qkv = h @ weight.T
    qkv = qkv.bfloat16().double() if model else qkv
    *outs, dqkv, dvalue, dgates = exactly([qkv, *others], turn, grads, **flags)
    dqkv = rounded(dqkv, model.grad, E5M2) if model else dqkv
    return *outs, dqkv @ weight, dqkv.T @ h, dvalue, dgates


def project(scales, h, *rest):
    """ProjectHeads of a norm h, in FP8 with `scales`."""
    copies = tg.quantize_both(h.detach(), scales.x) if scales else ()
    return tg.ProjectHeads.apply(h, *rest, scales, *copies)[:3]


def run_projection(leaves, turn, grads, scales=SCALES, **flags):
    outs = project(scales, *leaves, *turn, flags.get("key_offset", False))
    found = [x for x in leaves if x is not None]
    results = torch.autograd.grad(outs, found, grads)
    return *(out.detach() for out in outs), *results, *[None] * (4 - len(found))


@each_flag
@with_value
@pytest.mark.parametrize(
    "T, width, heads, keys, head_width",
    [
        (32, 48, 2, 16, 16),
        (144, 64, 2, 16, 32),
        *(
            pytest.param(T, 768, *shape, marks=[pytest.mark.gpu, full_size])
            for T in (16_384, 49_152)
            for shape in ((6, 128, 128), (4, 64, 128))
        ),
    ],
)
def test_fp8_projection(T, width, heads, keys, head_width, value, flags):
    """As near to float64 as FP8 rounding allows: the error of an exact emulation is the yardstick, not a constant."""
    inputs = make_projection(T, width, heads, head_width, value, keys=keys)
    results = (
        run_projection(*inputs, **flags),
        exact_projection(*inputs, SCALES, **flags),
        exact_projection(*inputs, **flags),
    )
    for name, a, b, want in zip(
        ("q", "k", "v", "dh", "dweight", "dvalue", "dgates"), *results, strict=True
    ):
        assert (a is None) == (want is None)
        if a is not None:
            assert a.dtype == torch.bfloat16
            assert a.shape == want.shape
            errors = relative(a, want), relative(b, want), relative(a, b)
            assert errors[1] < 0.1, (name, errors)  # the yardstick itself
            assert errors[0] <= 1.05 * errors[1] + 2.0 ** -8, (name, errors)
            # Only bf16 results differ from the emulation; on a GPU fast accumulation flips some roundings.
            assert errors[2] < 2.0 ** (-7 if INTERPRETED else -5), (name, errors)


@each_flag
@with_value
@pytest.mark.fast
def test_bf16_projection(value, flags):
    inputs = make_projection(48, 40, 2, 16, value)
    for a, want in zip(
        run_projection(*inputs, scales=None, **flags),
        exact_projection(*inputs, **flags),
        strict=True,
    ):
        assert (a is None) == (want is None)
        assert a is None or relative(a, want) < 2.0 ** -7


@pytest.mark.fast
def test_gradient_comes_to_its_place():
    leaves, turn, grads = make_projection(32, 48, 2, 16, True)
    helpers.check_grad_views(
        lambda: torch.autograd.backward(project(SCALES, *leaves, *turn, False), grads), leaves[1:2]
    )


@pytest.mark.parametrize("scales", [None, SCALES], ids=("bf16", "fp8"))
def test_strides_of_the_projection_do_not_matter(scales):
    (h, weight, *others), turn, grads = make_projection(32, 48, 2, 16, True)
    want = run_projection([h, weight, *others], turn, grads, scales)
    views = [
        view(x.detach()).requires_grad_()
        for x, view in zip((h, weight), (strided, lambda x: x.T.contiguous().T))
    ]
    assert same(run_projection([*views, *others], turn, grads, scales), want)


@with_value
def test_fp8_projection_of_extremes(value):
    """Zero weights and rows give zeros;
    what saturates stays finite, sums' gradients with strides of zero and missing ones are like others."""
    (h, weight, *others), turn, grads = make_projection(32, 48, 2, 16, value)
    weight.detach().zero_()
    h.detach()[3:6] = 0
    q, k, v, dh, dweight, *_ = run_projection([h, weight, *others], turn, grads)
    assert not q.any()
    assert not k.any()
    assert not dh.any()
    assert v.any() == value
    assert dweight.isfinite().all()
    assert dweight.any()
    weight.detach().add_(1e4)
    assert all(
        x is None or x.isfinite().all()
        for x in run_projection([h, weight, *others], turn, [g * 1e7 for g in grads])
    )
    outs = project(SCALES, h, weight, *others, *turn, False)
    found = torch.autograd.grad(outs[2].sum(), [h, weight])
    zeros = [torch.zeros_like(g) for g in grads[:2]]
    assert same(
        found, run_projection([h, weight, *others], turn, [*zeros, torch.ones_like(grads[2])])[3:5]
    )


@pytest.mark.parametrize("scales", [None, SCALES], ids=("bf16", "fp8"))
def test_recomputed_projection(scales):
    """Layers that are computed again in the backward pass hand out what was kept once."""
    leaves, turn, grads = make_projection(32, 48, 2, 16, True)
    outs = checkpoint(project, scales, *leaves, *turn, True, use_reentrant=False)
    assert same(
        torch.autograd.grad(outs, leaves, grads),
        run_projection(leaves, turn, grads, scales, key_offset=True)[3:],
    )


@pytest.mark.fast
def test_choice_of_operators(monkeypatch):
    """FP8 where a GPU has it and nobody forbids it, and never in validation."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    (h, *others), turn, _ = make_projection(32, 48, 2, 16, True)
    fp8, bf16 = (project(scales, h, *others, *turn, True) for scales in (SCALES, None))
    ones = torch.ones(len(h), device=DEVICE)

    def chosen(ops):
        """Of a stream h whose norm is h, if the operator makes it."""
        in_fp8 = ops.attention_fp8 and torch.is_grad_enabled()
        dummy = torch.full_like(h, torch.nan).requires_grad_()
        inputs = (
            tg.NormedInput(dummy, h.detach(), ones)
            if in_fp8
            else tg.NormedInput(h, h.detach(), None)
        )
        *tables, heads = turn
        return ops.project_heads(inputs, *others, *tables, heads=heads, key_offset=True)[:3]

    reference = chosen(tg.select_ops(torch.device("cuda"), fast=False))
    assert 0 < max(map(relative, bf16, reference)) < 2.0**-7 < min(map(relative, fp8, bf16))
    for parts, name, want in ((tg.FP8_PARTS, "fp8", fp8), (("head", "mlp"), "bf16", bf16)):
        ops = tg.select_ops(torch.device("cuda"), compile=False, fp8=parts)
        assert ops.names["attention"] == f"triton ({name} projection)"
        assert same(chosen(ops), want)
        with torch.no_grad():
            assert same(chosen(ops), bf16)
    assert tg.parse_arguments(["--no-fp8", "attention", "--no-fp8", "mlp"]).no_fp8 == ["attention", "mlp"]
    assert tg.parse_arguments(["--no-fp8"]).no_fp8 == ["all"]


def test_copies_that_several_products_read_are_made_once():
    made = []

    def quantize(*operands):
        made.append(operands)
        return len(made), -len(made)

    alone = tg.NormedInput(torch.zeros(1), torch.ones(1), torch.ones(1))
    assert [alone.fp8_copies(quantize, 1.0) for _ in range(2)] == [(1, -1), (2, -2)]
    shared = alone._replace(made=[])
    assert [shared.fp8_copies(quantize, 1.0) for _ in range(2)] == [(3, -3)] * 2


def test_model_with_fp8_projections():
    """Loss and gradients of the tiny network, whose layers have every shape,
    beside those with the reference operators."""
    random = np.random.default_rng(0)
    device = torch.device(DEVICE)
    pieces = [
        random.integers(0, helpers.VOCABULARY, length).astype(np.uint16)
        for length in (33, 1 + 40, 1 + 56)
    ]
    documents = tg.pack({0: pieces}, helpers.MODEL, pin=False).to(device)
    geometry = tg.rotary_geometry(helpers.PRESET, 0, 56, device)
    results = []
    reference = tg.select_ops(device, fast=False)

    def in_fp8(inputs, weight, *rest, heads, key_offset):
        copies = inputs.fp8_copies(tg.quantize_both, SCALES.x)
        outs = tg.ProjectHeads.apply(inputs.h, weight.bfloat16(), *rest, heads, key_offset, SCALES, *copies)
        return [x if x is None else x.float() for x in outs]

    for ops in (reference, replace(reference, attention_fp8=True, project_heads=in_fp8)):
        model = tg.GPT(helpers.MODEL, ops, device)
        helpers.randomise(model, size=0.15)
        # an optimizer's part
        model.ngram.info.owner = SimpleNamespace(receive_grad=lambda *_: None, wait_gather=lambda: None)
        loss = model(documents, geometry, torch.ones(1, device=device))
        loss.backward()
        results.append(
            (
                loss.detach(),
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            )
        )
    (want_loss, want), (loss, got) = results
    assert relative(loss, want_loss) < 0.01
    # Not of single numbers, alone or the four scalars of a layer:
    # sums over all tokens, which may cancel but for the noise of rounding.
    errors = {
        name: relative(got[name], want[name])
        for name in want
        if not name.endswith("scalars") and got[name].ndim
    }
    # FP8 is everywhere and wrong nowhere: that gives 1
    assert len(errors) > 30, errors
    assert 0 < min(errors.values()), errors
    assert max(errors.values()) < 0.2, errors


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
    got = run(split_heads, *inputs, **flags)
    compare(got, exactly(*inputs, **flags))
    assert same(got, run(split_heads, *inputs, **flags))


@pytest.mark.gpu
@full_size
@pytest.mark.parametrize("scales", [None, SCALES], ids=("bf16", "fp8"))
def test_graph_follows_the_documents(scales):
    """One captured graph replays with other documents, bitwise as an eager call gives them."""
    leaves, turn, grads = make_projection(512, 768, 6, 128, True)
    rows = len(turn[1])  # of the tables: no document may be longer
    first = [100, 200, 212]
    second = [rows, 512 - rows]
    step = lambda: run_projection(leaves, turn, grads, scales, key_offset=True)
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
        errors = {
            name: relative(got, want)
            for name, got, want in zip(
                ("q", "k", "v", "dh", "dweight", "dvalue", "dgates"), captured, step(), strict=True
            )
        }
        assert not any(errors.values()), errors


def test_gates_stay_above_zero():
    """Attention's backward pass divides by them, also where attn_scale passes through zero."""
    h = torch.randn(5, 16)
    gates, _ = tg.head_gates(h, None, torch.randn(2, 16), torch.zeros(5))
    assert (gates == 2.0**-20).all()
