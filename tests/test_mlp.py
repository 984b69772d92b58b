"""The FP8 MLP against float64 formulas, its errors against those of an exact emulation of its roundings.

On a CPU the Triton kernels run interpreted, in a process of their own: `pytest tests/test_mlp.py`. On a GPU,
`TRITON_INTERPRET=0 pytest tests/test_mlp.py` runs every test compiled, and those marked gpu at full size besides.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import helpers
import train_gpt as tg
from test_loss import DEVICE, E4M3, E5M2, INTERPRETED, exact_casts, full_size, guard, guarded, relative  # noqa: F401 (two are fixtures)

SCALES = tg.MlpScales()
SIZES = [1, 16, 7 * 131, 2048, 2 * 2048 + 1]


def relu_squared(pre, scale=SCALES.hidden, dtype=E4M3):
    return tg.flat_fp8(tg._relu_squared_kernel, dtype, [pre], 1 / scale)


def relu_squared_grad(dhidden, hidden8, scales=SCALES, dtype=E5M2):
    return tg.flat_fp8(tg._relu_squared_grad_kernel, dtype, [dhidden, hidden8], scales.hidden, 1 / scales.grad)


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_mlp(T, D, H, seed=0):
    """RMS-normed h, weights, and a gradient of the output, each of the size it has in training; bf16."""
    h = F.rms_norm(normal(T, D, seed=seed, dtype=torch.float32), (D,)).bfloat16()
    up, down = (normal(H, D, seed=seed + i, dtype=torch.float32) * D ** -0.5 for i in (1, 2))
    grad = normal(T, D, seed=seed + 3, dtype=torch.float32) * 1e-3
    return [guarded(t.bfloat16()).requires_grad_() for t in (h, up, down)], guarded(grad.bfloat16())


def run(apply, operands, grad):
    """(out, dh, dup, ddown)."""
    for tensor in operands:
        tensor.grad = None
    out = apply(*operands)
    out.backward(grad)
    return out.detach(), *(tensor.grad for tensor in operands)


def exact_mlp(operands, grad):
    """Float64 (out, dh, dup, ddown) by torch's own differentiation of the reference."""
    return run(tg.relu_squared_mlp, [tensor.detach().double().requires_grad_() for tensor in operands], grad.double())


def rounded(values, scale, dtype):
    limit = torch.finfo(dtype).max
    return (values.double() / scale).clamp(-limit, limit).float().to(dtype).double() * scale


def fp8_model(operands, grad, scales=SCALES):
    """(out, dh, dup, ddown) of the FP8 MLP with every rounding it prescribes and float64 arithmetic otherwise."""
    h, up, down = (rounded(tensor.detach(), scale, E4M3) for tensor, scale in zip(operands, (scales.input, scales.weight, scales.weight)))
    g = rounded(grad, scales.grad, E5M2)
    hidden = rounded((h @ up.T).bfloat16().double().relu().square(), scales.hidden, E4M3)
    dpre = rounded((g @ down.T).bfloat16().double() * 2 * hidden.sqrt(), scales.grad, E5M2)
    return hidden @ down, dpre @ up, dpre.T @ h, hidden.T @ g


# ---- kernels ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_relu_squared(size, dtype):
    """Squares of bf16 are exact in float32, and powers of two move no rounding: equal to the bit, saturated at both ends."""
    pre = normal(size, seed=size) * 3
    pre[::7] = torch.tensor([42.25, 43.0, 1e4, -1e4, 1e30, 0.0, -0.0, 0.0625, 0.06]).repeat(size)[:len(pre[::7])]
    pre = guarded(pre.to(dtype))
    want = (pre.double().relu().square() / SCALES.hidden).clamp(max=448)
    assert torch.equal(relu_squared(pre).double(), want.float().to(E4M3).double())
    assert torch.equal(relu_squared(pre, dtype=torch.float32), (pre.double().relu().square() / SCALES.hidden).clamp(max=torch.finfo(torch.float32).max).float())


@pytest.mark.parametrize("size", SIZES)
def test_relu_squared_grad(size):
    hidden8 = relu_squared(guarded(normal(size, seed=size) * 3))
    dhidden = guarded(normal(size, seed=size + 1) * 1e-3)
    want = dhidden.double() * 2 * (hidden8.double() * SCALES.hidden).sqrt()
    # Half a step, which is 2^-3 of the value at most and half the subnormal 2^-16 at least, and the float32 error.
    bound = (want.abs() * 2.0 ** -3).clamp_min(2.0 ** -17 * SCALES.grad) * 1.001
    assert ((relu_squared_grad(dhidden, hidden8).double() * SCALES.grad - want).abs() <= bound).all()
    torch.testing.assert_close(relu_squared_grad(dhidden, hidden8, dtype=torch.float32).double() * SCALES.grad, want, rtol=1e-6, atol=0)


def test_relu_squared_grad_saturates():
    dhidden = guarded(torch.tensor([1e6, -1e6, 1e30, -1e30, 1.0, 0.0]).bfloat16())
    got = relu_squared_grad(dhidden, relu_squared(guarded(torch.full((6,), 3.0).bfloat16())))
    assert got.double().tolist() == [57344, -57344, 57344, -57344, 6144, 0]


def test_derivative_is_that_of_relu_squared():
    """Both kernels together against 2 relu(pre) · dhidden. Where hidden values are normal numbers of e4m3, their rounding by
    2^-4 leaves 2^-5 in the root; e5m2 adds 2^-3. Below lies nothing that matters: less than a hundredth of the norm."""
    pre, dhidden = guarded(normal(20, 2048) * 2), guarded(normal(20, 2048, seed=1) * 1e-3)
    got = relu_squared_grad(dhidden, relu_squared(pre)).double() * SCALES.grad
    want = 2 * pre.double().relu() * dhidden.double()
    wide = (pre.double() ** 2 >= SCALES.hidden * 2.0 ** -6) & (pre > 0)
    bound = (want.abs() * (2.0 ** -3 * (1 + 2.0 ** -5) + 1.03 * 2.0 ** -5)).clamp_min(2.0 ** -17 * SCALES.grad)
    assert wide.double().mean() > 0.4 and ((got - want).abs() <= bound)[wide].all()
    assert (got - want)[~wide].norm() < 0.01 * want.norm() and (got[pre <= 0] == 0).all()
    assert relative(got, want) < 0.07  # rounding uniformly within steps of 2^-2 to 2^-3 would give 0.05


@pytest.mark.parametrize("width", [128, 768])
def test_input_scale_never_saturates(width):
    """The largest entry of an RMS-normed row is sqrt(width), where the row has no other."""
    h = tg.norm(torch.cat([torch.eye(width)[:4] * 100, normal(4, width, dtype=torch.float32)])).bfloat16()
    h8, _ = tg.quantize_both(guarded(h), SCALES.input)
    h = h.to(DEVICE).double()
    bound = (h.abs() * 2.0 ** -4).clamp_min(2.0 ** -10 * SCALES.input)
    assert ((h8.double() * SCALES.input - h).abs() <= bound).all() and h.max() > 0.99 * width ** 0.5


# ---- autograd --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("T, D, H", [(32, 48, 64), (144, 64, 208), *(
    pytest.param(T, 768, 3072, marks=[pytest.mark.gpu, full_size]) for T in (16_384, 49_152))])
def test_fp8_mlp(T, D, H):
    """As near to float64 as FP8 rounding allows: the error of an exact emulation is the yardstick, not a constant."""
    operands, grad = make_mlp(T, D, H)
    want, model, got = exact_mlp(operands, grad), fp8_model(operands, grad), run(tg.Fp8Mlp.apply, operands, grad)
    for name, a, b, exactly in zip(("out", "dh", "dup", "ddown"), got, model, want):
        assert a.dtype == torch.bfloat16 and a.shape == exactly.shape
        errors = relative(a, exactly), relative(b, exactly), relative(a, b)
        assert errors[1] < 0.13, (name, errors)  # the yardstick itself
        assert errors[0] <= 1.05 * errors[1] + 2.0 ** -9, (name, errors)
        # Only bf16 results differ from the emulation; on a GPU fast accumulation and an approximate root flip some roundings.
        assert errors[2] < 2.0 ** (-6 if INTERPRETED else -4), (name, errors)


def test_scales_are_arguments():
    """Other scales change the rounding and nothing else."""
    operands, grad = make_mlp(32, 48, 64)
    scales = tg.MlpScales(2.0 ** -3, 2.0 ** -6, 2.0 ** -1, 2.0 ** -8)
    got, model = run(lambda *mlp: tg.Fp8Mlp.apply(*mlp, scales), operands, grad), fp8_model(operands, grad, scales)
    assert max(relative(a, b) for a, b in zip(got, model)) < 2.0 ** (-6 if INTERPRETED else -4)
    assert min(relative(a, b) for a, b in zip(got, run(tg.Fp8Mlp.apply, operands, grad))) > 0


def test_zero_weights_start():
    """Training begins with down = 0: no output, no gradient but down's own, and no NaN."""
    operands, grad = make_mlp(32, 48, 64)
    operands[2].detach().zero_()
    out, dh, dup, ddown = run(tg.Fp8Mlp.apply, operands, grad)
    assert not out.any() and not dh.any() and not dup.any()
    assert relative(ddown, fp8_model(operands, grad)[3]) < 2.0 ** -6


def test_everything_saturates_and_stays_finite():
    operands, grad = make_mlp(32, 48, 64)
    operands[1].detach().mul_(1e4)
    operands[2].detach().mul_(1e4)
    results = run(tg.Fp8Mlp.apply, operands, (grad * 1e7).detach())
    assert all(result.isfinite().all() and result.any() for result in results)


def test_expanded_gradient():
    """A sum's gradient is one number with strides of zero."""
    operands, grad = make_mlp(32, 48, 64)
    tg.Fp8Mlp.apply(*operands).sum().backward()
    model = fp8_model(operands, torch.ones_like(grad))
    assert max(relative(tensor.grad, b) for tensor, b in zip(operands, model[1:])) < 2.0 ** (-6 if INTERPRETED else -4)


def test_validation_is_the_reference():
    operands, _ = make_mlp(32, 48, 64)
    with torch.no_grad():
        assert torch.equal(tg.fp8_mlp(*operands), tg.relu_squared_mlp(*operands))
    assert torch.equal(tg.fp8_mlp(*operands), tg.Fp8Mlp.apply(*operands))


# ---- in the model ----------------------------------------------------------------------------------------------------

def test_model_with_fp8_mlps():
    """Loss and gradients of the tiny network, whose layers have every shape, beside those with the reference MLP."""
    random, device = np.random.default_rng(0), torch.device(DEVICE)
    pieces = [random.integers(0, helpers.VOCABULARY, length).astype(np.uint16) for length in (33, 1 + 40, 1 + 56)]
    documents = tg.pack({0: pieces}, 3, 56, helpers.MODEL, pin=False).to(device)
    assert len(documents.positions) == 128  # a multiple of 16
    geometry = tg.rotary_geometry(helpers.PRESET, 0, 2 * 56, device)
    results = []
    for mlp in (tg.relu_squared_mlp, tg.fp8_mlp):
        model = tg.GPT(helpers.MODEL, replace(tg.select_ops(device, fast=False), mlp=mlp), device)
        helpers.randomise(model, size=0.15)
        loss = model(documents, geometry, torch.ones(1, device=device))
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.matrix}))
    (want_loss, want), (loss, got) = results
    assert relative(loss, want_loss) < 0.01
    errors = {name: relative(got[name], want[name]) for name in want}
    assert len(errors) == 4 * 2 + 4 * 2 + 1  # qkv and out, up and down, pointer
    assert max(errors.values()) < 0.35, errors  # .09 a layer adds up, a wrong kernel gives 1
    assert min(errors.values()) > 0  # FP8 was there
