"""The FP8 MLP against float64 formulas, its errors against those of an exact emulation of its roundings.

On a CPU the Triton kernels run interpreted, in a process of their own: `pytest tests/test_mlp.py`. On a GPU,
`TRITON_INTERPRET=0 pytest tests/test_mlp.py` runs every test compiled, and those marked gpu at full size besides.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
    head_loss,
    make_head,
    relative,
    run_head,
)

pytestmark = pytest.mark.fast

SCALES = tg.MlpScales()
FULL = [
    pytest.param(T, 768, 3072, marks=[pytest.mark.gpu, full_size])
    for T in (16_384, 49_152)
]
# T, D, H: less than a tile; odd ends of tiles; several tiles a program
SIZES = [
    (16, 16, 144),
    (144, 64, 208),
    (4096 + 16, 48, 272),
    *FULL,
]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def hidden_product(h8, up8, scales=SCALES):
    return tg.mlp_product(h8, up8, (scales.x * scales.weight) ** 2 / scales.hidden)


def dpre_product(g8, down8, hidden8, scales=SCALES):
    return tg.mlp_product(g8, down8, 2 * scales.weight * scales.hidden**0.5, hidden8)


def quantized(tensor, scale, dtype):
    """FP8 of tensor / scale, saturated, and so much room around it that a read outside shows."""
    limit = torch.finfo(dtype).max
    values = (tensor.to(DEVICE).double() / scale).clamp(-limit, limit)
    return guarded(values.float().to(dtype))


def make_mlp(T, D, H, seed=0):
    """RMS-normed h, weights, and a gradient of the output, each of the size it has in training; bf16."""
    h = normal(T, D, seed=seed, dtype=torch.float32)
    h = F.rms_norm(h, (D,))
    up = normal(H, D, seed=seed + 1, dtype=torch.float32) * D**-0.5
    down = normal(H, D, seed=seed + 2, dtype=torch.float32) * D**-0.5
    grad = normal(T, D, seed=seed + 3, dtype=torch.float32) * 1e-3
    operands = [guarded(t.bfloat16()).requires_grad_() for t in (h, up, down)]
    return operands, guarded(grad.bfloat16())


def fp8_mlp(h, up, down, scales=SCALES):
    return tg.Fp8Mlp.apply(
        h, up, down, scales, *tg.quantize_both(h.detach(), scales.x)
    )


def run(apply, operands, grad):
    """(out, dh, dup, ddown)."""
    for tensor in operands:
        tensor.grad = None
    out = apply(*operands)
    out.backward(grad)
    return out.detach(), *(tensor.grad for tensor in operands)


def exact_mlp(operands, grad):
    """Float64 (out, dh, dup, ddown) by torch's own differentiation of the reference."""
    return run(
        tg.relu_squared_mlp,
        [tensor.detach().double().requires_grad_() for tensor in operands],
        grad.double(),
    )


def rounded(values, scale, dtype):
    return quantized(values, scale, dtype).double() * scale


def fp8_model(operands, grad, scales=SCALES):
    """(out, dh, dup, ddown) of the FP8 MLP with every rounding it prescribes and float64 arithmetic otherwise."""
    h, up, down = (tensor.detach() for tensor in operands)
    h = rounded(h, scales.x, E4M3)
    up = rounded(up, scales.weight, E4M3)
    down = rounded(down, scales.weight, E4M3)
    g = rounded(grad, scales.grad, E5M2)
    hidden = rounded((h @ up.T).relu().square(), scales.hidden, E4M3)
    dpre = rounded((g @ down.T) * 2 * hidden.sqrt(), scales.grad, E5M2)
    return hidden @ down, dpre @ up, dpre.T @ h, hidden.T @ g


# ---- kernels ---------------------------------------------------------------------------------------------------------

def check_layouts(result, result_t):
    assert result.is_contiguous()
    assert result_t.is_contiguous()
    assert result.dtype == result_t.dtype
    assert torch.equal(result.view(torch.int8).T, result_t.view(torch.int8))


def check_rounding(result, exactly):
    """`result` is `exactly`, rounded once and saturated;
    float32 sums, on a GPU of fewer bits, move few roundings, and those hardly."""
    limit = torch.finfo(result.dtype).max
    exactly = exactly.clamp(-limit, limit)
    nearest = exactly.float().to(result.dtype)
    assert result.dtype == nearest.dtype
    assert result.shape == nearest.shape
    moved = (result.double() != nearest.double()).double().mean()
    assert moved <= (1e-4 if INTERPRETED else 1e-2)
    factor = 1.0001 if INTERPRETED else 1.01
    assert relative(result, exactly) <= factor * relative(nearest, exactly)


@pytest.mark.parametrize("T, D, H", SIZES)
def test_products(T, D, H):
    """Each in both layouts, equal to the bit, against float64; gradients large enough that some results saturate."""
    (h, up, down), grad = make_mlp(T, D, H)
    h8 = quantized(h.detach(), SCALES.x, E4M3)
    up8 = quantized(up.detach(), SCALES.weight, E4M3)
    down8 = quantized(down.detach(), SCALES.weight, E4M3)
    g8 = quantized(grad * 1e4, SCALES.grad, E5M2)
    hidden8, hidden8_t = hidden_product(h8, up8)
    check_layouts(hidden8, hidden8_t)
    pre = h8.double() @ up8.double().T * SCALES.x * SCALES.weight
    check_rounding(hidden8, pre.relu().square() / SCALES.hidden)
    dpre8, dpre8_t = dpre_product(g8, down8, hidden8)
    check_layouts(dpre8, dpre8_t)
    dhidden = g8.double() @ down8.double().T * SCALES.weight
    check_rounding(dpre8, dhidden * 2 * (hidden8.double() * SCALES.hidden).sqrt())
    assert hidden8.view(torch.int8).any()
    assert T < 4096 or (dpre8.double().abs() == 57344).any()


def one_hot(values, dtype, width=16):
    """[T, width] whose row t holds values[t] at t mod width, so that a product with it is one term and exact."""
    rows = torch.arange(len(values))
    matrix = torch.zeros(len(values), width, dtype=torch.float64)
    matrix[rows, rows % width] = values.double()
    return quantized(matrix, 1.0, dtype)


def test_hidden_values_of_every_size():
    """Squares of exact products are exact in float32, and a power of two moves no rounding:
    equal to the nearest FP8 number, at both ends too."""
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float().nan_to_num(0.0)
    h8 = one_hot(2.0 ** torch.arange(-9, 7), E4M3)
    up8 = quantized(every[:, None].expand(256, 16), 1.0, E4M3)
    hidden8, hidden8_t = tg.mlp_product(h8, up8, 2.0 ** -8)
    check_layouts(hidden8, hidden8_t)
    pre = h8.double() @ up8.double().T
    want = pre.relu().square() * 2.0**-8
    assert (want > 448).any()
    assert ((want > 0) & (want <= 2.0**-10)).any()
    nearest = want.clamp(max=448).float().to(E4M3)
    assert torch.equal(hidden8.double(), nearest.double())


def test_gradients_of_every_size():
    """Every number of e4m3 as hidden value, gradients over the whole range of e5m2:
    half a step, which is 2^-3 of the value at most and half the subnormal 2^-16 at least, and the float32 error."""
    numbers = (torch.arange(64 * 1024) % 127).to(torch.uint8).view(E4M3)
    hidden8 = quantized(numbers.view(64, 1024).float(), 1.0, E4M3)
    sizes = 2.0 ** torch.linspace(-16, 15, 64)
    g8 = one_hot(sizes * (-1.0) ** torch.arange(64), E5M2)
    down8 = quantized(normal(1024, 16), 1.0, E4M3)
    dpre8, dpre8_t = tg.mlp_product(g8, down8, 0.5, hidden8)
    check_layouts(dpre8, dpre8_t)
    dhidden = g8.double() @ down8.double().T
    want = (dhidden * 0.5 * hidden8.double().sqrt()).clamp(-57344, 57344)
    assert (want.abs() == 57344).any()
    assert ((want != 0) & (want.abs() < 2.0**-16)).any()
    half_a_step = (want.abs() * 2.0**-3).clamp_min(2.0**-17)
    assert ((dpre8.double() - want).abs() <= half_a_step * 1.001).all()
    assert (dpre8.double().abs() == 57344)[want.abs() == 57344].all()


def test_derivative_is_that_of_relu_squared():
    """Both products together against 2 relu(pre) · dhidden. Where hidden values are normal numbers of e4m3, their
    rounding by 2^-4 leaves 2^-5 in the root; e5m2 adds 2^-3. Below lies nothing that matters: less than a hundredth of
    the norm."""
    h8 = one_hot(normal(144) * 3 / SCALES.x, E4M3)
    g8 = one_hot(normal(144, seed=1) * 1e-3 / SCALES.grad, E5M2)
    # pre stays below 42
    weights = (normal(2048, 16, seed=seed) * 2 for seed in (2, 3))
    up8, down8 = (
        quantized(weight.clamp(-3.5, 3.5), SCALES.weight, E4M3)
        for weight in weights
    )
    pre = h8.double() @ up8.double().T * SCALES.x * SCALES.weight
    dhidden = g8.double() @ down8.double().T * SCALES.grad * SCALES.weight
    hidden8, _ = hidden_product(h8, up8)
    dpre8, _ = dpre_product(g8, down8, hidden8)
    got = dpre8.double() * SCALES.grad
    want = 2 * pre.relu() * dhidden
    wide = (pre**2 >= SCALES.hidden * 2.0**-6) & (pre > 0)
    bound = want.abs() * (2.0**-3 * (1 + 2.0**-5) + 1.03 * 2.0**-5)
    bound = bound.clamp_min(2.0**-17 * SCALES.grad)
    assert wide.double().mean() > 0.4
    assert ((got - want).abs() <= bound)[wide].all()
    assert (got - want)[~wide].norm() < 0.01 * want.norm()
    assert (got[pre <= 0] == 0).all()
    # rounding uniformly within steps of 2^-2 to 2^-3 would give 0.05
    assert relative(got, want) < 0.07


@pytest.mark.parametrize("scale", [SCALES.x, tg.HeadScales().x], ids=("layers", "head"))
@pytest.mark.parametrize("width", [128, 768])
def test_input_scale_never_saturates(width, scale):
    """The largest entry of an RMS-normed row is sqrt(width), where the row has no other."""
    rows = [torch.eye(width)[:4] * 100, normal(4, width, dtype=torch.float32)]
    h = tg.norm(torch.cat(rows)).bfloat16()
    h8, _ = tg.quantize_both(guarded(h), scale)
    h = h.to(DEVICE).double()
    bound = (h.abs() * 2.0**-4).clamp_min(2.0**-10 * scale) * (1 + 1e-6)  # the head's is no power of two
    assert ((h8.double() * scale - h).abs() <= bound).all()
    assert h.max() > 0.99 * width ** 0.5


# ---- what the products read ------------------------------------------------------------------------------------------
def documents_of(*lengths):
    """Positions of tokens in documents of these lengths."""
    return torch.cat(
        [torch.arange(length, dtype=torch.int32) for length in lengths]
    ).to(DEVICE)


def slowly_mixed(h, taps, lengths):
    """A token's own row and, tap by tap, those of the tokens before it in its document."""
    rows = []
    for document in h.split(lengths):
        for t in range(len(document)):
            earlier = [
                tap * document[t - k]
                for k, tap in enumerate(taps, 1)
                if k <= t
            ]
            rows.append(document[t] + sum(earlier))
    return torch.stack(rows)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_mixed(count):
    """Results and gradients in float64; documents of 1 and 2 tokens are shorter than the taps."""
    lengths = [1, 5, 2, 1, 7]
    h, taps = (
        normal(*shape, seed=count, dtype=torch.float64).to(DEVICE).requires_grad_()
        for shape in ((16, 8), (count, 8))
    )
    positions = documents_of(*lengths)
    grad = normal(16, 8, seed=9, dtype=torch.float64).to(DEVICE)
    found = tg.mixed(h, taps, positions)
    want = slowly_mixed(h, taps, lengths)
    torch.testing.assert_close(found, want)
    gradients = torch.autograd.grad(found, (h, taps), grad)
    expected = torch.autograd.grad(want, (h, taps), grad)
    for a, b in zip(gradients, expected):
        torch.testing.assert_close(a, b)
    assert tg.mixed(h, None, positions) is h


inductor = pytest.mark.skipif(bool(helpers.INDUCTOR_LACKS), reason=f"inductor needs {helpers.INDUCTOR_LACKS}")


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[pytest.mark.slow, inductor])], ids=("eager", "compiled")
)
@pytest.mark.parametrize("count", [0, 2])
def test_an_input_that_its_operator_makes(monkeypatch, count, compiled):
    """The stream gets the gradient of mixed(norm(x)) exactly, the taps 16 times that of every 16th token;
    one compilation serves any number of tokens."""
    monkeypatch.undo()  # no kernel runs here, and guards cannot be compiled
    taps = (
        normal(count, 8, seed=1, dtype=torch.float32).to(DEVICE).requires_grad_()
        if count
        else None
    )
    region = tg.compile_dynamic(tg.product_input) if compiled else tg.product_input
    before = tg.compiled_graphs()
    for tokens in (32, 48, 79):
        x = (
            normal(tokens, 8, seed=tokens, dtype=torch.float32)
            .to(DEVICE)
            .requires_grad_()
        )
        positions = documents_of(1, 14, 2, tokens - 17)
        grad = normal(tokens, 8, seed=3, dtype=torch.float32).to(DEVICE)
        h, inverse_rms = region(x, tg.norm(x), positions, taps, fp8=True)
        assert h.shape == x.shape
        assert h.stride() == (0, 0)
        assert not inverse_rms.requires_grad
        torch.testing.assert_close(x * inverse_rms[:, None], tg.norm(x))

        want = tg.mixed(tg.norm(x), taps, positions)
        found = torch.autograd.grad(h, (x, taps) if count else x, grad)
        torch.testing.assert_close(
            found[0], torch.autograd.grad(want, x, grad, retain_graph=True)[0]
        )
        if count:
            sample = torch.zeros_like(grad)
            sample[15::16] = 16 * grad[15::16]
            torch.testing.assert_close(
                found[1], torch.autograd.grad(want, taps, sample)[0]
            )
    assert tg.compiled_graphs() - before == compiled
    with torch.no_grad():
        h, inverse_rms = tg.product_input(x, tg.norm(x), positions, taps, fp8=True)
    assert inverse_rms is None
    assert torch.equal(h, want)


@pytest.mark.parametrize("T, D", [(16, 16), (144, 64), (300, 80)])
@pytest.mark.parametrize("count", [0, 2])
def test_copies_of_the_mix(count, T, D):
    """What the kernel makes of the stream, to the last bit that float32 leaves certain,
    and its transpose; document by document."""
    x = guarded(normal(T, D))
    mean_square = x.float().square().mean(-1)
    inverse_rms = guarded((mean_square + tg.NORM_EPSILON).rsqrt())
    taps = guarded(normal(count, D, seed=1, dtype=torch.float32)) if count else None
    lengths = [1, 2, 7, T - 10]
    positions = documents_of(*lengths)
    h8, h8_t = tg.quantize_both(x, SCALES.x, E4M3, inverse_rms, positions, taps)
    assert torch.equal(h8.view(torch.int8).T, h8_t.view(torch.int8))
    normed = x.double() * inverse_rms.double()[:, None]
    taps = () if taps is None else taps.double()
    h = slowly_mixed(normed, taps, lengths)
    want = quantized(h, SCALES.x, E4M3)
    same = h8.view(torch.int8) == want.view(torch.int8)
    assert same.double().mean() > 0.999
    assert relative(h8.double(), want.double()) < 1e-3


# ---- autograd --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("T, D, H", [(32, 48, 64), *SIZES[1:]])
def test_fp8_mlp(T, D, H):
    """As near to float64 as FP8 rounding allows: the error of an exact emulation is the yardstick, not a constant."""
    operands, grad = make_mlp(T, D, H)
    want = exact_mlp(operands, grad)
    model = fp8_model(operands, grad)
    got = run(fp8_mlp, operands, grad)
    for name, a, b, exactly in zip(("out", "dh", "dup", "ddown"), got, model, want):
        assert a.dtype == torch.bfloat16
        assert a.shape == exactly.shape
        errors = relative(a, exactly), relative(b, exactly), relative(a, b)
        assert errors[1] < 0.13, (name, errors)  # the yardstick itself
        assert errors[0] <= 1.05 * errors[1] + 2.0**-9, (name, errors)
        # Only bf16 results differ from the emulation;
        # on a GPU fast accumulation and an approximate root flip some roundings.
        assert errors[2] < 2.0 ** (-8 if INTERPRETED else -4), (name, errors)


def test_only_forward_products_accumulate_fast(monkeypatch):
    """Of MLP and head: a product with a gradient, which is e5m2, must not, and a CPU knows no difference."""
    multiply = torch._scaled_mm
    products = []

    def watched(a, b, **options):
        products.append((E5M2 in (a.dtype, b.dtype), options["use_fast_accum"]))
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    run(fp8_mlp, *make_mlp(32, 48, 64))
    run_head(head_loss(scales=tg.HeadScales()), *make_head(32, 160, 48, torch.bfloat16))
    forward, backward = (False, True), (True, False)
    assert products == [forward, *[backward] * 3, forward, *[backward] * 2]


def test_scales_are_arguments():
    """Other scales change the rounding and nothing else."""
    operands, grad = make_mlp(32, 48, 64)
    scales = tg.MlpScales(2.0**-3, 2.0**-6, 2.0**-1, 2.0**-8)
    got = run(lambda *mlp: fp8_mlp(*mlp, scales), operands, grad)
    model = fp8_model(operands, grad, scales)
    limit = 2.0**-8 if INTERPRETED else 2.0**-4
    assert max(relative(a, b) for a, b in zip(got, model)) < limit
    usual = run(fp8_mlp, operands, grad)
    assert min(relative(a, b) for a, b in zip(got, usual)) > 0


def test_zero_weights_start():
    """Training begins with down = 0: no output, no gradient but down's own, and no NaN."""
    operands, grad = make_mlp(32, 48, 64)
    operands[2].detach().zero_()
    out, dh, dup, ddown = run(fp8_mlp, operands, grad)
    assert not out.any()
    assert not dh.any()
    assert not dup.any()
    assert relative(ddown, fp8_model(operands, grad)[3]) < 2.0 ** -6


def test_everything_saturates_and_stays_finite():
    operands, grad = make_mlp(32, 48, 64)
    operands[1].detach().mul_(1e4)
    operands[2].detach().mul_(1e4)
    results = run(fp8_mlp, operands, (grad * 1e7).detach())
    assert all(result.isfinite().all() and result.any() for result in results)


def test_expanded_gradient():
    """A sum's gradient is one number with strides of zero."""
    operands, grad = make_mlp(32, 48, 64)
    fp8_mlp(*operands).sum().backward()
    model = fp8_model(operands, torch.ones_like(grad))
    limit = 2.0**-8 if INTERPRETED else 2.0**-4
    errors = [relative(tensor.grad, b) for tensor, b in zip(operands, model[1:])]
    assert max(errors) < limit


def test_gradients_come_to_their_places():
    operands, grad = make_mlp(32, 48, 64)
    helpers.check_grad_views(lambda: fp8_mlp(*operands).backward(grad), operands[1:])


def test_validation_is_the_reference(monkeypatch):
    """In training it computes in FP8 from the stream and its inverse RMS; without gradients in bf16, from the norm."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    mlp = tg.select_ops(torch.device("cuda"), compile=False).mlp
    (x, *weights), _ = make_mlp(32, 48, 64)
    h = tg.norm(x).detach()
    mean_square = x.detach().float().square().mean(-1)
    inverse_rms = (mean_square + tg.NORM_EPSILON).rsqrt()
    with torch.no_grad():
        assert torch.equal(
            mlp(tg.NormedInput(h, x, None), *weights), tg.relu_squared_mlp(h, *weights)
        )
    empty = torch.full_like(h, torch.nan).requires_grad_()
    inputs = tg.NormedInput(
        empty, x.detach(), inverse_rms, positions=torch.arange(32, device=DEVICE)
    )
    assert relative(mlp(inputs, *weights), fp8_mlp(h, *weights)) < 0.05


@pytest.mark.parametrize(
    "capability, head, mlp",
    [
        ((8, 0), "bf16", "bf16"),
        ((8, 9), "fp8", "bf16"),
        ((9, 0), "fp8", "fp8"),
        ((10, 3), "fp8", "fp8"),
        ((12, 0), "fp8", "bf16"),
    ],
)
def test_which_gpus_take_it(monkeypatch, capability, head, mlp):
    """It needs TMA, which consumer GPUs have from capability 12 on: but nothing was tried there."""
    monkeypatch.setattr(tg, "capability", lambda device: capability)
    names = tg.select_ops(torch.device("cuda"), compile=False).names
    assert (names["head"], names["mlp"]) == (head, mlp)
    assert mlp in names["attention"]
    without = tg.select_ops(torch.device("cuda"), compile=False, fp8=()).names
    assert (without["head"], without["mlp"]) == ("bf16", "bf16")


# ---- in the model ----------------------------------------------------------------------------------------------------

def test_model_with_fp8_mlps():
    """Loss and gradients of the tiny network, whose layers have every shape, beside those with the reference MLP."""
    random = np.random.default_rng(0)
    device = torch.device(DEVICE)
    pieces = [
        random.integers(0, helpers.VOCABULARY, length).astype(np.uint16)
        for length in (33, 1 + 40, 1 + 56)
    ]
    documents = tg.pack({0: pieces}, helpers.MODEL, pin=False).to(device)
    assert len(documents.positions) == 128  # a multiple of 16
    geometry = tg.rotary_geometry(helpers.PRESET, 0, 56, device)
    results = []
    reference = tg.select_ops(device, fast=False)

    def in_fp8(inputs, *weights):
        copies = inputs.fp8_copies(tg.quantize_both, SCALES.x)
        return tg.Fp8Mlp.apply(
            inputs.h, *(weight.bfloat16() for weight in weights), SCALES, *copies
        )

    for ops in (reference, replace(reference, mlp_fp8=True, mlp=in_fp8)):
        model = tg.GPT(helpers.MODEL, ops, device)
        # where a draw's gradients nearly cancel, errors are up to .39 (seed 0)
        helpers.randomise(model, seed=1, size=0.15)
        # an optimizer's part
        model.ngram.info.owner = SimpleNamespace(receive_grad=lambda *_: None, wait_gather=lambda: None)
        loss = model(documents, geometry, torch.ones(1, device=device))
        loss.backward()
        results.append(
            (
                loss.detach(),
                {
                    name: p.grad
                    for name, p in model.named_parameters()
                    if p.info.matrix_shape
                },
            )
        )
    (want_loss, want), (loss, got) = results
    assert relative(loss, want_loss) < 0.01
    errors = {name: relative(got[name], want[name]) for name in want}
    assert len(errors) == 5 * 2 + 5 * 2 + 1  # qkv and out, up and down, pointer
    # .09 a layer adds up, a wrong kernel gives 1
    assert max(errors.values()) < 0.35, errors
    assert min(errors.values()) > 0  # FP8 was there
