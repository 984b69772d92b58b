"""Head, loss and embedding gradient against float64 formulas.

On a CPU the Triton kernels run interpreted, in a process of their own: `pytest tests/test_loss.py`. On a GPU,
`TRITON_INTERPRET=0 pytest tests/test_loss.py` runs every test compiled, and those marked gpu at full size besides.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
import train_gpt as tg

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("compiled kernels need a CUDA device", allow_module_level=True)
full_size = pytest.mark.skipif(INTERPRETED, reason="full size: too slow interpreted")

CAPS = [tg.Softcap(), tg.Softcap(23.0, 5.0, 7.5)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def exact_cast(values, source, target, _):
    """Round to nearest even, by torch: the interpreter truncates to bf16 and to FP8 drops a carry (1.97 becomes 1)."""
    def torch_dtype(dtype):
        return getattr(torch, {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "bf16": "bfloat16",
                               "fp16": "float16", "fp32": "float32"}[str(dtype)])

    cast = torch.tensor(np.array(values, ndmin=1)).view(torch_dtype(source)).to(torch_dtype(target))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cast.itemsize]
    return cast.view(bits).numpy().reshape(values.shape)


@pytest.fixture(autouse=True)
def exact_casts(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", exact_cast)


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    """Every tensor a wrapper allocates starts as NaN between NaN guards, which no kernel may overwrite."""
    buffers = []

    original = torch.Tensor.new_empty

    def new_empty(self, *shape, dtype=None, **options):
        if options:  # the interpreter's own
            return original(self, *shape, dtype=dtype, **options)
        tensor, buffer = poisoned(shape, dtype or self.dtype)
        buffers.append(buffer)
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == 255).all() and (buffer[-GUARD:] == 255).all(), "a kernel wrote outside its tensor"


GUARD = 4096


def poisoned(shape, dtype):
    """An all-NaN tensor (all bits set is NaN in every float format) and the larger buffer of bytes it lies in."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = torch.full((size + 2 * GUARD,), 255, dtype=torch.uint8, device=DEVICE)
    return buffer[GUARD:GUARD + size].view(dtype).view(tuple(shape)), buffer


def guarded(values):
    """A copy of `values` with NaN, or for integers -1, on both sides: a read outside shows."""
    tensor, _ = poisoned(values.shape, values.dtype)
    return tensor.copy_(values)


def relative(got, want):
    """Error in the Frobenius norm, in float64; NaN if `got` holds one."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


def softcapped(logits, cap):
    return cap.softcap * torch.sigmoid((logits + cap.shift) / cap.temperature)


def exact(logits, targets, cap):
    """Float64 losses [T] and gradient [T, V] by torch's own cross-entropy."""
    logits = logits.detach().double().requires_grad_()
    losses = F.cross_entropy(softcapped(logits, cap), targets.long(), reduction="none")
    losses.sum().backward()
    return losses.detach(), logits.grad


def exact_head(x, weight, targets, cap):
    """Float64 (loss, dx, dW), 2048 rows at a time."""
    weight = weight.double()
    loss, dx, dw = 0.0, [], torch.zeros_like(weight)
    for rows, picks in zip(x.double().split(2048), targets.split(2048)):
        losses, grad = exact(rows @ weight.T, picks, cap)
        loss = loss + losses.sum()
        dx.append(grad @ weight)
        dw.addmm_(grad.T, rows)
    return loss, torch.cat(dx), dw


def make_logits(T, V, spread=8.0, dtype=torch.float32):
    """Logits with extreme entries, and targets that touch the first and the last column."""
    generator = torch.Generator().manual_seed(T * V)
    logits = torch.randn(T, V, generator=generator) * spread
    logits.view(-1)[::17] = torch.tensor([1e4, -1e4, 300.0, -300.0, 0.0]).repeat(T * V)[:len(logits.view(-1)[::17])]
    targets = torch.randint(V, (T,), generator=generator)
    targets[0], targets[-1] = V - 1, 0
    return guarded(logits.to(dtype)), guarded(targets)


def make_head(T, V, D, dtype=torch.float32, seed=0):
    """RMS-normed x, weights as in training, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = F.rms_norm(torch.randn(T, D, generator=generator), (D,))
    weight = torch.randn(V, D, generator=generator) * 0.1
    targets = torch.randint(V, (T,), generator=generator)
    targets[0], targets[-1] = V - 1, 0
    return guarded(x.to(dtype)).requires_grad_(), guarded(weight.to(dtype)).requires_grad_(), guarded(targets)


# ---- reference -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cap", CAPS)
def test_reference_is_cross_entropy(cap):
    x, weight, targets = (tensor.cpu() for tensor in make_head(7, 131, 24))
    want, _ = exact((x.double() @ weight.double().T), targets, cap)
    for chunk_rows in (3, 100):
        got = tg.head_loss_reference(x, weight, targets, cap, chunk_rows)
        assert got.dtype == torch.float32 and got.shape == ()
        assert relative(got.detach(), want.sum()) < 1e-6
    wide = [tensor.detach().double().requires_grad_() for tensor in (x[:, :3], weight[:9, :3])]
    assert torch.autograd.gradcheck(lambda x, w: tg.head_loss_reference(x, w, targets % 9, cap, 3), wide)


# ---- kernels ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("T, V", [(7, 131), (1, 1), (2, 2048), (3, 4099)])
def test_row_losses(T, V, cap):
    logits, targets = make_logits(T, V)
    want, _ = exact(logits, targets, cap)
    losses, lse = tg.row_losses(logits, targets, cap)
    torch.testing.assert_close(losses.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), softcapped(logits.double(), cap).logsumexp(1), rtol=0, atol=1e-5)
    again, _ = tg.row_losses(logits, targets.int(), cap)
    assert torch.equal(losses, again)


def test_row_losses_keep_nan():
    logits, targets = make_logits(3, 131)
    logits[1, 57] = float("nan")
    losses, _ = tg.row_losses(logits, targets, CAPS[0])
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("T, V", [(7, 131), (1, 1), (128, 64), (130, 70), (129, 193)])
def test_head_grad(T, V, cap):
    """In float32, scaled by the factor, with targets of either width."""
    logits, targets = make_logits(T, V)
    _, want = exact(logits, targets, cap)
    _, lse = tg.row_losses(logits, targets, cap)
    factor = torch.tensor(0.125, device=DEVICE)
    grad = tg.head_grad(logits, targets, lse, factor, cap, torch.float32)
    torch.testing.assert_close(grad.double(), want * 0.125, rtol=2e-5, atol=1e-7)
    assert torch.equal(tg.head_grad(logits, targets.int(), lse, factor, cap, torch.float32), grad)
    assert torch.equal(tg.transposed(grad), grad.T)


@pytest.mark.parametrize("T, V", [(7, 131), (130, 70)])
def test_head_grad_fp8(T, V):
    logits, targets = make_logits(T, V, dtype=torch.bfloat16)
    _, want = exact(logits, targets, CAPS[0])
    _, lse = tg.row_losses(logits, targets, CAPS[0])
    scale = tg.HeadScales().grad
    g8 = tg.head_grad(logits, targets, lse, torch.tensor(1 / scale, device=DEVICE), CAPS[0], E5M2)
    got = g8.double() * scale
    assert torch.equal(g8.double().T, tg.transposed(g8).double())
    # Half a step, which is 2^-2 of the value at most and the subnormal 2^-16 at least, and the float32 error.
    assert ((got - want).abs() <= 0.5 * (want.abs() * 2.0 ** -2).clamp_min(2.0 ** -16 * scale) * 1.001).all()


def test_head_grad_saturates():
    logits, targets = make_logits(7, 131)
    _, want = exact(logits, targets, CAPS[0])
    _, lse = tg.row_losses(logits, targets, CAPS[0])
    g8 = tg.head_grad(logits, targets, lse, torch.tensor(1e9, device=DEVICE), CAPS[0], E5M2)
    high = want.abs() * 1e9 > 57344
    assert high.any() and torch.equal(g8.double()[high], 57344 * want[high].sign())


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.float32])
@pytest.mark.parametrize("R, C", [(7, 131), (128, 64), (130, 70)])
def test_quantize_both(R, C, dtype):
    values = torch.randn(R, C, generator=torch.Generator().manual_seed(R)) * 100
    values[0, 0], values[-1, -1] = 1e8, -1e8
    values, limit, scale = guarded(values), torch.finfo(dtype).max, 0.25
    q, q_t = tg.quantize_both(values, scale, dtype)
    assert torch.equal(q.double().T, q_t.double())
    want = (values.double() / scale).clamp(-limit, limit)
    assert torch.equal(q.double(), want.float().to(dtype).double())


# ---- autograd --------------------------------------------------------------------------------------------------------

def run_head(apply, x, weight, targets, scale=1.0):
    """(loss, dx, dW) of apply(...) · scale."""
    x.grad = weight.grad = None
    loss = apply(x, weight, targets)
    (loss * scale).backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("T, V, D", [(7, 131, 24), (130, 70, 5)])
def test_head_loss(T, V, D, cap):
    head = make_head(T, V, D)
    want = exact_head(*(tensor.detach() for tensor in head), cap)
    got = run_head(lambda *head: tg.HeadLoss.apply(*head, cap), *head)
    plain = run_head(lambda *head: tg.head_loss_reference(*head, cap, 50), *head)
    assert got[0].dtype == torch.float32
    for a, b, exactly in zip(got, plain, want):
        assert relative(a, exactly) < 2e-6 and relative(b, exactly) < 2e-6


def test_incoming_gradient_scales_both():
    """A power of two commutes with every rounding, so the scaled gradients must agree to the bit."""
    for apply, dtype in ((tg.HeadLoss.apply, torch.float32), (tg.Fp8HeadLoss.apply, torch.bfloat16)):
        head = make_head(32, 160, 48, dtype)
        whole, eighth = run_head(apply, *head), run_head(apply, *head, scale=0.125)
        assert torch.equal(whole[0], eighth[0])
        assert torch.equal(whole[1] / 8, eighth[1]) and torch.equal(whole[2] / 8, eighth[2])


def fp8_model(x, weight, targets, cap, scales):
    """(loss, dx, dW) of the FP8 head with every rounding it prescribes and float64 arithmetic otherwise."""
    def rounded(values, scale, dtype):
        return (values.double() / scale).float().to(dtype).double() * scale

    x8, w8 = rounded(x, scales.x, E4M3), rounded(weight, scales.weight, E4M3)
    loss, dx, dw = 0.0, [], torch.zeros_like(w8)
    for rows, picks in zip(x8.split(2048), targets.split(2048)):
        losses, grad = exact((rows @ w8.T).bfloat16(), picks, cap)
        g8 = rounded(grad, scales.grad, E5M2)
        loss = loss + losses.sum()
        dx.append(g8 @ w8)
        dw.addmm_(g8.T, rows)
    return loss, torch.cat(dx), dw


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("T, V, D", [(32, 160, 48), (144, 208, 64), pytest.param(
    4096, 50304, 768, marks=[pytest.mark.gpu, full_size])])
def test_fp8_head_loss(T, V, D, cap):
    """As near to float64 as FP8 rounding allows: the error of an exact emulation is the yardstick, not a constant."""
    head = make_head(T, V, D, torch.bfloat16)
    values = [tensor.detach() for tensor in head]
    want, model = exact_head(*values, cap), fp8_model(*values, cap, tg.HeadScales())
    got = run_head(lambda *head: tg.Fp8HeadLoss.apply(*head, cap), *head)
    assert [tensor.dtype for tensor in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert relative(got[0], want[0]) <= 1.05 * relative(model[0], want[0]) + 5e-4
    for a, b, exactly in zip(got[1:], model[1:], want[1:]):
        assert relative(b, exactly) < 0.1  # the yardstick itself
        assert relative(a, exactly) <= 1.05 * relative(b, exactly) + 2.0 ** -9
        # Only bf16 results differ from the emulation; on a GPU tanh and fast accumulation flip some e5m2 roundings.
        assert relative(a, b) < 2.0 ** (-8 if INTERPRETED else -4)


@pytest.mark.gpu
@full_size
def test_bf16_head_loss_full_size():
    head = make_head(4096, 50304, 768, torch.bfloat16)
    want = exact_head(*(tensor.detach() for tensor in head), CAPS[0])
    got = run_head(tg.HeadLoss.apply, *head)
    assert relative(got[0], want[0]) < 1e-4
    # bf16 rounds logits of size 8 by up to 2^-6, the exponent by 4 times that, and then the gradient by 2^-9.
    assert relative(got[1], want[1]) < 0.02 and relative(got[2], want[2]) < 0.02


@pytest.mark.gpu
@full_size
def test_offsets_past_int32():
    """49152 · 50304 elements pass 2^31: the last rows of the gradient, in both layouts, against float64."""
    T, V, last = 49152, 50304, 128
    logits = torch.randn(T, V, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(V, (T,), device=DEVICE)
    losses, lse = tg.row_losses(logits, targets, CAPS[0], fast=True)
    want_losses, want = exact(logits[-last:], targets[-last:], CAPS[0])
    torch.testing.assert_close(losses[-last:].double(), want_losses, rtol=0, atol=5e-3)
    scale = tg.HeadScales().grad
    g8 = tg.head_grad(logits, targets, lse, torch.tensor(1 / scale, device=DEVICE), CAPS[0], E5M2, True)
    assert relative(g8[-last:].double() * scale, want) < 0.1
    assert torch.equal(g8.view(torch.uint8)[-last:].T, tg.transposed(g8).view(torch.uint8)[:, -last:])


@pytest.mark.parametrize("chunk_rows", [3, 7, 100])
def test_eval(chunk_rows):
    x, weight, targets = make_head(7, 131, 24)
    want, _, _ = exact_head(x.detach(), weight.detach(), targets, CAPS[1])
    got = tg.head_loss_eval(x, weight, targets, CAPS[1], chunk_rows)
    assert got.dtype == torch.float64 and not got.requires_grad
    assert relative(got, want) < 1e-6


# ---- embedding gradient ----------------------------------------------------------------------------------------------

def token_cases():
    """name: (tokens, vocab_rows)."""
    rng, run = np.random.default_rng(0), tg.RUN
    common = np.where(rng.random(500) < 0.6, 11, rng.integers(0, 40, 500))
    return {
        "repetitive": (common, 41), "one id": (np.full(7 * run + 3, 2), 4), "single": (np.array([3]), 4),
        "fewer than a run": (rng.integers(0, 3, run - 1), 3), "distinct": (rng.permutation(90), 90),
        "whole runs": (np.repeat([0, 1, 3], [run, 2 * run, run]), 4),
        "off by one": (np.repeat([0, 1, 2, 3], [run - 1, 2 * run + 1, run + 1, 2 * run - 1]), 5),
        "no first, no last": (rng.integers(5, 9, 300), 20),
    }


def embedding_inputs(name):
    tokens, vocab_rows = token_cases()[name]
    tokens = np.random.default_rng(1).permutation(tokens)
    order, starts = tg.sort_tokens(tokens.astype(np.uint16), vocab_rows)
    return [guarded(torch.from_numpy(array.astype(np.int32))) for array in (tokens, order, starts)]


@pytest.mark.parametrize("name", token_cases())
def test_sort_tokens(name):
    tokens, order, starts = (tensor.cpu().numpy() for tensor in embedding_inputs(name))
    for token in range(len(starts) - 1):
        assert (order[starts[token]:starts[token + 1]] == np.flatnonzero(tokens == token)).all()
    assert starts[0] == 0 and starts[-1] == len(tokens) == len(order)


@pytest.mark.parametrize("D", [5, 24])
@pytest.mark.parametrize("name", token_cases())
def test_embedding_grad(name, D):
    tokens, order, starts = embedding_inputs(name)
    grad = guarded(torch.randn(len(tokens), D, generator=torch.Generator().manual_seed(D)))
    got = tg.embedding_grad(grad, tokens, order, starts, torch.float32)
    want = tg.embedding_grad_reference(grad.double(), tokens, len(starts) - 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(got, tg.embedding_grad(grad, tokens, order, starts, torch.float32))
    assert (got[(starts.diff() == 0)] == 0).all()


def test_embedding_lookup():
    """Two tables share a sort, their hooks fire, and a table without a gradient gets none."""
    tokens, order, starts = embedding_inputs("repetitive")
    tables = [torch.randn(41, 24, device=DEVICE, requires_grad=True) for _ in range(3)]
    seen = []
    for table in tables:
        table.register_post_accumulate_grad_hook(lambda table: seen.append(id(table)))
    first, second, _ = (tg.EmbeddingLookup.apply(table, tokens, order, starts) for table in tables)
    ((first * second).sum() + first.sum()).backward()
    assert {id(table) for table in tables[:2]} <= set(seen) and tables[2].grad is None
    copies = [table.detach().clone().requires_grad_() for table in tables[:2]]
    a, b = (F.embedding(tokens, copy) for copy in copies)
    assert torch.equal(a, first) and torch.equal(b, second)
    ((a * b).sum() + a.sum()).backward()
    for table, copy in zip(tables, copies):
        torch.testing.assert_close(table.grad, copy.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@full_size
def test_embedding_grad_full_size():
    T, V, D = 65536, 50304, 768
    tokens = np.random.default_rng(0).zipf(1.2, T).clip(max=V) - 1
    sort = [torch.from_numpy(array.astype(np.int32)).to(DEVICE) for array in (tokens, *tg.sort_tokens(tokens, V))]
    grad = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16)
    want = tg.embedding_grad_reference(grad.double(), sort[0], V)
    got = tg.embedding_grad(grad, *sort, torch.bfloat16)
    torch.testing.assert_close(got.double(), want, rtol=2.0 ** -8, atol=1e-3)
