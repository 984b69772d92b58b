"""Head, loss, embedding gradient and sparse Adam against float64 formulas.

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
import helpers
import train_gpt as tg

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("compiled kernels need a CUDA device", allow_module_level=True)
full_size = pytest.mark.skipif(INTERPRETED, reason="full size: too slow interpreted")

CAPS = [tg.Softcap(), tg.Softcap(15.0, 0.0, 10.0)]
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def exact_cast(values, source, target, _):
    """Round to nearest even, by torch: the interpreter truncates to bf16 and to FP8 drops a carry (1.97 becomes 1)."""
    def torch_dtype(dtype):
        return getattr(torch, {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2", "bf16": "bfloat16",
                               "fp16": "float16", "fp32": "float32"}[str(dtype)])

    cast = (
        torch.tensor(np.array(values, ndmin=1))
        .view(torch_dtype(source))
        .to(torch_dtype(target))
    )
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
        assert (buffer[:GUARD] == 255).all(), "a kernel wrote outside its tensor"
        assert (buffer[-GUARD:] == 255).all(), "a kernel wrote outside its tensor"


GUARD = 4096


def poisoned(shape, dtype):
    """An all-NaN tensor (all bits set is NaN in every float format) and the larger buffer of bytes it lies in."""
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = torch.full((size + 2 * GUARD,), 255, dtype=torch.uint8, device=DEVICE)
    return buffer[GUARD : GUARD + size].view(dtype).view(tuple(shape)), buffer


def guarded(values):
    """A copy of `values` with NaN, or for integers -1, on both sides: a read outside shows."""
    tensor, _ = poisoned(values.shape, values.dtype)
    return tensor.copy_(values)


def relative(got, want):
    """Error in the Frobenius norm, in float64; NaN if `got` holds one."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


# ---- exact results ---------------------------------------------------------------------------------------------------
# A head to test: x [T, D], weight [V, D], targets.
# `sampled` are its parts and their candidates, None for a full softmax.
WEIGHTS = 1.0, 0.5, 0.25
FULL = dict(K=1), dict(K=2), dict(K=3)
SAMPLED = dict(K=1, sampled=(1, 60)), dict(K=2, sampled=(2, 40)), dict(K=3, sampled=(3, 33))
POINTED = (
    dict(K=1, pointer=True),
    dict(K=3, pointer=True),
    dict(K=2, sampled=(2, 40), pointer=True),
)


def softcapped(logits, cap):
    return cap.softcap * torch.sigmoid((logits + cap.shift) / cap.temperature)


def make_targets(T, V, K=1, sampled=None, seed=0, width=torch.int32, pointer=False):
    """Documents of 1 to 9 tokens, one of them with a single one; first, last and missing columns; candidates as the
    loader orders them; a pointer that gives to some targets nothing and to some nearly all that column 1 has."""
    generator = torch.Generator().manual_seed(seed + T)
    parts, count = sampled or (1, V)
    borders = (
        torch.randint(1, 10, (T,), generator=generator).cumsum(0),
        torch.tensor([1, 2]),
        torch.arange(parts) * (T // parts),
    )
    starts = torch.isin(torch.arange(T), torch.cat(borders)).index_fill(
        0, torch.tensor([0]), True
    )
    positions = torch.arange(T) - torch.where(starts, torch.arange(T), 0).cummax(0).values
    certain = (
        torch.randint(count // 4, count // 2, (parts,), generator=generator)
        if sampled
        else torch.full((1,), V)
    )
    columns = torch.cat(
        [torch.randint(int(most), (T // parts,), generator=generator) for most in certain]
    )
    columns[torch.rand(T, generator=generator) < 0.1] = -1
    columns[0], columns[-1] = certain[0] - 1, 0
    ids = torch.stack([torch.randperm(V, generator=generator)[:count] for _ in range(parts)])
    extra = map(guarded, (ids.int(), certain.int())) if sampled else (None, None)
    if pointer:
        log_copy = -8 * torch.rand(T, generator=generator).square().index_fill(
            0, torch.tensor([T - 1]), 1e-3
        )
        extra = (
            *extra,
            guarded(torch.where(torch.arange(T) % 5 == 1, tg.NEG_INF, log_copy)).requires_grad_(),
            1,
        )
    return tg.Targets(
        *map(guarded, (columns.to(width), positions.int(), torch.tensor(WEIGHTS[:K]))), *extra
    )


def columns_ahead(targets, k):
    """Column of the token k further in the same document, or -1, from document numbers."""
    positions = targets.positions.cpu()
    T = len(targets.positions)
    document = (positions == 0).cumsum(0)
    later = torch.arange(T) + k
    inside = (later < T) & (document[later.clamp(max=T - 1)] == document)
    columns = targets.class_index.cpu().long()[later.clamp(max=T - 1)]
    return torch.where(inside, columns, -1).to(DEVICE)


def exact(logits, columns, weights, cap, log_copy=None, spare=0):
    """Float64 losses [T], log-sum-exp [T], gradient [T, P] of K targets a row, that of log_copy if there is one:
    columns is a list of [T]."""
    logits = logits.detach().double().requires_grad_()
    log_copy = None if log_copy is None else log_copy.detach().double().requires_grad_()
    z = softcapped(logits, cap)
    lse = z.logsumexp(1)
    picked = [z.gather(1, c.clamp_min(0)[:, None])[:, 0] for c in columns]
    if log_copy is not None:
        picked[0] = (picked[0].exp() + z[:, spare].exp() * log_copy.exp()).log()
    losses = sum(w * (c >= 0) * (lse - p) for w, c, p in zip(weights.double(), columns, picked))
    losses.sum().backward()
    return (
        losses.detach(),
        lse.detach(),
        logits.grad,
        *([] if log_copy is None else [log_copy.grad]),
    )


def exact_rows(logits, targets, cap):
    """`exact` of a single part."""
    return exact(
        logits,
        [columns_ahead(targets, k) for k in range(len(targets.weights))],
        targets.weights,
        cap,
        targets.log_copy,
        targets.copy_token,
    )


def exact_head(
    x, weight, targets, cap, logits_of=lambda x, head: x @ head.T, rounded=lambda grad: grad
):
    """Float64 (loss, dx, dW[, dlog_copy]), at most 2048 rows at a time;
    `logits_of` and `rounded` may emulate roundings."""
    x = x.detach().double()
    weight = weight.detach().double()
    columns = torch.stack([columns_ahead(targets, k) for k in range(len(targets.weights))], 1)
    log_copy = (
        torch.zeros(len(x), 0, device=DEVICE)
        if targets.log_copy is None
        else targets.log_copy[:, None]
    )
    loss = 0.0
    dx = []
    dw = torch.zeros_like(weight)
    dlog_copy = []
    size = len(x) if targets.classes is None else len(x) // len(targets.classes)
    for start in range(0, len(x), size):
        ids = torch.arange(len(weight), device=DEVICE)
        if targets.classes is not None:
            ids = targets.classes[start // size].long()
        head = weight[ids]
        for rows, picks, copy in zip(
            *(tensor[start : start + size].split(2048) for tensor in (x, columns, log_copy))
        ):
            losses, _, grad, *more = exact(
                logits_of(rows, head),
                picks.unbind(1),
                targets.weights,
                cap,
                *copy.unbind(1),
                spare=targets.copy_token,
            )
            dlog_copy += more
            grad = rounded(grad)
            loss = loss + losses.sum()
            dx.append(grad @ head)
            dw.index_add_(0, ids, grad.T @ rows)
    return loss, torch.cat(dx), dw, *([torch.cat(dlog_copy)] if dlog_copy else [])


def make_logits(T, V, spread=8.0, dtype=torch.float32):
    """Logits with extreme entries."""
    logits = torch.randn(T, V, generator=torch.Generator().manual_seed(T * V)) * spread
    logits.view(-1)[::17] = torch.tensor([1e4, -1e4, 300.0, -300.0, 0.0]).repeat(T * V)[
        : len(logits.view(-1)[::17])
    ]
    return guarded(logits.to(dtype))


def make_rows(T, V, K=1, sampled=None, vocabulary=1000, pointer=False, **options):
    """Logits [T, V] of one part, and its targets."""
    targets = make_targets(
        T, vocabulary if sampled else V, K, (1, V) if sampled else None, pointer=pointer
    )
    return make_logits(T, V, **options), targets


def make_head(T, V, D, dtype=torch.float32, seed=0, K=1, sampled=None, pointer=False):
    """RMS-normed x, weights as in training, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = F.rms_norm(torch.randn(T, D, generator=generator), (D,))
    weight = torch.randn(V, D, generator=generator) * 0.1
    return (
        guarded(x.to(dtype)).requires_grad_(),
        guarded(weight.to(dtype)).requires_grad_(),
        make_targets(T, V, K, sampled, pointer=pointer),
    )


each_head = pytest.mark.parametrize(
    "kind",
    [*FULL, *SAMPLED, *POINTED],
    ids=lambda kind: f"K={kind['K']}" + "-sampled" * ("sampled" in kind) + "-pointer" * ("pointer" in kind),
)
each_cap = pytest.mark.parametrize("cap", CAPS, ids=("default", "other"))


# ---- reference -------------------------------------------------------------------------------------------------------

@each_head
@pytest.mark.fast
def test_targets_ahead(kind):
    for T in (3, 66):
        sampled = kind.get("sampled") if T == 66 else None
        targets = make_targets(T, 131, kind["K"], sampled)
        found = [targets.ahead(k) for k in range(kind["K"])]
        assert all(
            torch.equal(got.long(), columns_ahead(targets, k)) for k, got in enumerate(found)
        )
        for k, got in enumerate(found):  # parts start with a document, so taking them apart changes nothing
            assert torch.equal(torch.cat([part.ahead(k) for _, part in targets.parts()]), got)
        for size in (None, 2, 5):
            parts = list(targets.parts(size))
            assert [len(part.class_index) for _, part in parts] == [
                len(targets.class_index[rows]) for rows, _ in parts
            ]
            assert torch.equal(
                torch.cat([part.class_index for _, part in parts]), targets.class_index
            )


@each_cap
@each_head
def test_reference_is_cross_entropy(kind, cap):
    head = make_head(66, 131, 24, **kind)
    want = exact_head(*head, cap)
    for block_rows in (5, 100):
        got = run_head(lambda *head: tg.head_loss_reference(*head, cap, block_rows), *head)
        assert got[0].dtype == torch.float32
        assert got[0].shape == ()
        assert max(map(relative, got, want)) < 2e-6
        *wide, log_copy = (
            tensor if tensor is None else tensor.detach().double().requires_grad_()
            for tensor in (*head[:2], head[2].log_copy)
        )
        got = run_head(
            lambda *head: tg.head_loss_reference(*head, cap, block_rows),
            *wide,
            head[2]._replace(log_copy=log_copy),
        )
        assert got[0].dtype == torch.float64
        assert max(map(relative, got, want)) < 1e-12


@pytest.mark.fast
def test_exact_is_cross_entropy():
    """The yardstick itself, where torch has the same function, and its gradient by finite differences."""
    logits, targets = make_rows(7, 131)
    columns = targets.class_index.long()
    losses, *_ = exact_rows(logits, targets, CAPS[0])
    want = F.cross_entropy(
        softcapped(logits.double(), CAPS[0]), columns, reduction="none", ignore_index=-1
    )
    torch.testing.assert_close(losses, want)
    x, weight, targets = make_head(6, 9, 3, K=3, pointer=True)
    wide = [
        tensor.detach().double().requires_grad_() for tensor in (x, weight, targets.log_copy)
    ]
    assert torch.autograd.gradcheck(
        lambda x, w, c: tg.head_loss_reference(x, w, targets._replace(log_copy=c), CAPS[0], 4), wide
    )


# ---- kernels ---------------------------------------------------------------------------------------------------------

@each_cap
@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize(
    "T, V, sampled", [(7, 131, False), (1, 2, False), (2, 2048, False), (9, 131, True), (3, 4099, True)]
)
@pytest.mark.fast
def test_row_losses(T, V, sampled, K, pointer, cap):
    logits, targets = make_rows(
        T, V, K, sampled, vocabulary=V + 1000, pointer=pointer
    )
    want, want_lse, _, *dlog_copy = exact_rows(logits, targets, cap)
    losses, lse, copied = tg.row_losses(logits, targets, cap)
    assert (copied is not None) == pointer
    if pointer:
        torch.testing.assert_close(
            -copied.double(), dlog_copy[0] / WEIGHTS[0], rtol=3e-5, atol=1e-7
        )
    # Values up to 23 with a rounding of 2^-20, twice; the sum of 4099 terms rounds far less.
    torch.testing.assert_close(losses.double(), want, rtol=0, atol=1e-5 * sum(WEIGHTS[:K]))
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    again, *_ = tg.row_losses(
        logits, targets._replace(class_index=guarded(targets.class_index.long())), cap
    )
    assert torch.equal(losses, again)


@pytest.mark.fast
def test_row_losses_keep_nan():
    logits, targets = make_rows(3, 131)
    logits[1, 57] = float("nan")
    losses, *_ = tg.row_losses(
        logits, targets._replace(class_index=targets.class_index.clamp_min(0)), CAPS[0]
    )
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize(
    "T, V, sampled", [(7, 131, False), (1, 2, False), (16, 512, False), (9, 700, True), (18, 70, True)]
)
def test_head_grad(T, V, sampled, K, pointer):
    """In float32, scaled by the factor, with targets of either width.
    Of 700 columns the last 188 are a program without targets."""
    cap = CAPS[K % 2]
    logits, targets = make_rows(T, V, K, sampled, pointer=pointer)
    _, _, want, *_ = exact_rows(logits, targets, cap)
    _, *rows = tg.row_losses(logits, targets, cap)
    factor = torch.tensor(0.125, device=DEVICE)
    grad, none = tg.head_grad(logits, targets, *rows, factor, cap, torch.float32)
    assert none is None
    torch.testing.assert_close(grad.double(), want * 0.125, rtol=2e-5, atol=1e-7)
    wide = targets._replace(class_index=guarded(targets.class_index.long()))
    assert torch.equal(
        tg.head_grad(logits, wide, *rows, factor, cap, torch.float32)[0], grad
    )


@each_head
@pytest.mark.parametrize("T, V", [(16, 131), (48, 64), (80, 200)])
def test_head_grad_fp8(T, V, kind):
    """In both layouts; at the edges of tiles and past them.
    Of 200 columns the last programs have none that is certain."""
    logits, targets = make_rows(
        T, V, kind["K"], "sampled" in kind, dtype=torch.bfloat16, pointer="pointer" in kind
    )
    _, _, want, *_ = exact_rows(logits, targets, CAPS[0])
    _, *rows = tg.row_losses(logits, targets, CAPS[0])
    scale = tg.HeadScales().grad
    g8, g8_t = tg.head_grad(
        logits, targets, *rows, torch.tensor(1 / scale, device=DEVICE), CAPS[0], E5M2
    )
    assert g8_t.is_contiguous()
    assert torch.equal(g8.double().T, g8_t.double())
    # Half a step, which is 2^-2 of the value at most and the subnormal 2^-16 at least,
    # and float32's error where a hit leaves next to nothing.
    assert (
        (g8.double() * scale - want).abs()
        <= 0.5 * (want.abs() * 2.0**-2).clamp_min(2.0**-16 * scale) * 1.001 + 1e-7
    ).all()


@pytest.mark.parametrize(
    "fast",
    [
        False,
        pytest.param(
            True,
            marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="the hardware's")],
        ),
    ],
)
@pytest.mark.fast
def test_head_grad_saturates(fast):
    logits, targets = make_rows(16, 131)
    _, _, want = exact_rows(logits, targets, CAPS[0])
    _, *rows = tg.row_losses(logits, targets, CAPS[0])
    g8, g8_t = tg.head_grad(
        logits, targets, *rows, torch.tensor(1e9, device=DEVICE), CAPS[0], E5M2, fast
    )
    high = want.abs() * 1e9 > 58000  # the hardware's tanh is right to a part in a thousand
    assert high.any()
    assert torch.equal(g8.double()[high], 57344 * want[high].sign())
    assert torch.equal(g8.double().T, g8_t.double())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    "R, C",
    [
        (8, 131),
        (4, 1),
        (128, 64),
        (132, 70),
        (12, 513),
        pytest.param(4096, 768, marks=[pytest.mark.gpu, full_size]),
    ],
)
@pytest.mark.fast
def test_quantize_both(R, C, dtype):
    values = torch.randn(R, C, generator=torch.Generator().manual_seed(R)) * 100
    values[0, 0], values[-1, -1] = 1e8, -1e8
    values = guarded(values)
    limit = torch.finfo(dtype).max
    scale = 0.25
    q, q_t = tg.quantize_both(values, scale, dtype)
    assert torch.equal(q.double().T, q_t.double())
    want = (values.double() / scale).clamp(-limit, limit)
    assert torch.equal(q.double(), want.float().to(dtype).double())
    # any strides
    assert torch.equal(
        tg.quantize_both(guarded(values.T.contiguous()).T, scale, dtype)[0].double(), q.double()
    )
    with pytest.raises(RuntimeError, match="divisible by 4"):
        tg.quantize_both(values[:3], scale, dtype)
    values[-1, 0], values[0, 0] = torch.inf, torch.nan
    q, q_t = tg.quantize_both(values, scale, dtype)
    for copy in (q, q_t.T):  # a run that diverges must show it
        assert copy.double().isnan().nonzero().tolist() == [[0, 0]]
        assert float(copy[-1, 0]) == limit


# ---- autograd --------------------------------------------------------------------------------------------------------

def head_loss(cap=CAPS[0], scales=None):
    return lambda x, weight, targets: tg.HeadLoss.apply(
        x, weight, targets.log_copy, targets, cap, scales
    )


def run_head(apply, x, weight, targets, scale=1.0):
    """(loss, dx, dW[, dlog_copy]) of apply(...) · scale."""
    leaves = [x, weight] if targets.log_copy is None else [x, weight, targets.log_copy]
    loss = apply(x, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * scale, leaves)


@each_head
@pytest.mark.parametrize("T, V, D", [(18, 131, 24), (24, 70, 5), (6, 64, 16)])
def test_head_loss(T, V, D, kind):
    head = make_head(T, V, D, **kind)
    cap = CAPS[T % 4 > 0]
    got = run_head(head_loss(cap), *head)
    want = exact_head(*head, cap)
    assert got[0].dtype == torch.float32
    assert max(map(relative, got, want)) < 2e-6


@pytest.mark.fast
def test_one_token():
    for kind in (dict(K=3), dict(K=3, sampled=(1, 8)), dict(K=3, pointer=True)):
        # a sum of few terms keeps the rounding of each: 23 · 2^-24 of the exponent
        head = make_head(1, 9, 4, **kind)
        assert (
            max(map(relative, run_head(head_loss(), *head), exact_head(*head, CAPS[0]))) < 1e-5
        )


@each_head
def test_half_precision(kind):
    """Logits below 4 round by 2^-10, which the softcap passes on by less than 1; gradients and results by 2^-11."""
    head = make_head(18, 131, 24, torch.float16, **kind)
    got = run_head(head_loss(), *head)
    want = exact_head(*head, CAPS[0])
    assert [tensor.dtype for tensor in got] == [
        torch.float32, torch.float16, torch.float16, torch.float32,
    ][: len(got)]
    assert max(map(relative, got, want)) < 2.0 ** -9


def test_incoming_gradient_scales_both():
    """A power of two commutes with every rounding, so the scaled gradients must agree to the bit."""
    for scales, dtype in ((None, torch.float32), (tg.HeadScales(), torch.bfloat16)):
        head = make_head(32, 160, 48, dtype, K=2, sampled=(2, 64), pointer=True)
        whole = run_head(head_loss(scales=scales), *head)
        eighth = run_head(head_loss(scales=scales), *head, scale=0.125)
        assert torch.equal(whole[0], eighth[0])
        assert len(whole) == 4
        assert all(torch.equal(a / 8, b) for a, b in zip(whole[1:], eighth[1:]))


@pytest.mark.parametrize(
    "scales, dtype", [(None, torch.float32), (tg.HeadScales(), torch.bfloat16)], ids=("float32", "fp8")
)
def test_sampled_gradient_comes_to_its_place(scales, dtype):
    x, weight, targets = make_head(32, 160, 48, dtype, K=2, sampled=(2, 64))
    helpers.check_grad_views(
        lambda: head_loss(scales=scales)(x, weight, targets).backward(), [weight]
    )


def test_nothing_to_predict():
    """Rows without a target, here all, have no loss and no gradient."""
    for scales, dtype in ((None, torch.float32), (tg.HeadScales(), torch.bfloat16)):
        x, weight, targets = make_head(32, 160, 48, dtype, K=3, pointer=True)
        loss, *grads = run_head(
            head_loss(scales=scales),
            x,
            weight,
            targets._replace(class_index=torch.full_like(targets.class_index, -1)),
        )
        assert loss == 0
        assert len(grads) == 3
        assert not any(grad.any() for grad in grads)


def fp8_model(x, weight, targets, cap, scales):
    """(loss, dx, dW[, dlog_copy]) of the FP8 head with every rounding it prescribes
    and float64 arithmetic otherwise."""
    def rounded(values, scale, dtype):
        return (values.detach().double() / scale).float().to(dtype).double() * scale

    return exact_head(
        rounded(x, scales.x, E4M3),
        rounded(weight, scales.weight, E4M3),
        targets,
        cap,
        lambda x, head: (x @ head.T).bfloat16(),
        lambda grad: rounded(grad, scales.grad, E5M2),
    )


@each_cap
@pytest.mark.parametrize(
    "T, V, D, kind",
    [
        (32, 160, 48, dict(K=1)),
        (48, 208, 64, dict(K=3)),
        (32, 208, 64, dict(K=1, pointer=True)),
        (48, 208, 64, dict(K=2, sampled=(3, 112), pointer=True)),
        *(
            pytest.param(T, 50304, 768, kind, marks=[pytest.mark.gpu, full_size])
            for T, kind in (
                (16_384, dict(K=3)),
                (49_152, dict(K=1)),
                (16_384, dict(K=3, sampled=(2, 8192))),
                (49_152, dict(K=2, sampled=(2, 24_576))),
                (16_384, dict(K=1, pointer=True)),
                (16_384, dict(K=3, sampled=(2, 8192), pointer=True)),
            )
        ),
    ],
)
def test_fp8_head_loss(T, V, D, kind, cap):
    """As near to float64 as FP8 rounding allows: the error of an exact emulation is the yardstick, not a constant."""
    head = make_head(T, V, D, torch.bfloat16, **kind)
    want = exact_head(*head, cap)
    model = fp8_model(*head, cap, tg.HeadScales())
    got = run_head(head_loss(cap, tg.HeadScales()), *head)
    assert [tensor.dtype for tensor in got] == [
        torch.float32, torch.bfloat16, torch.bfloat16, torch.float32,
    ][: len(got)]
    assert relative(got[0], want[0]) <= 1.05 * relative(model[0], want[0]) + 5e-4
    for a, b, exactly in zip(got[1:], model[1:], want[1:]):
        assert relative(b, exactly) < 0.1  # the yardstick itself
        assert relative(a, exactly) <= 1.05 * relative(b, exactly) + 2.0**-9
        # Only bf16 results differ from the emulation; on a GPU tanh and fast accumulation flip some e5m2 roundings.
        assert relative(a, b) < 2.0 ** (-8 if INTERPRETED else -4)


@pytest.mark.gpu
@full_size
@pytest.mark.parametrize(
    "T, kind",
    [(16_384, dict(K=3, pointer=True)), (49_152, dict(K=1)), (49_152, dict(K=2, sampled=(2, 24_576)))],
)
def test_bf16_head_loss_full_size(T, kind):
    head = make_head(T, 50304, 768, torch.bfloat16, **kind)
    want = exact_head(*head, CAPS[0])
    got = run_head(head_loss(), *head)
    assert relative(got[0], want[0]) < 1e-4
    # bf16 rounds logits of size 8 by up to 2^-6, the exponent by 4 times that, and then the gradient by 2^-9.
    assert max(map(relative, got[1:], want[1:])) < 0.02


@pytest.mark.gpu
@full_size
def test_offsets_past_int32():
    """49152 · 50304 elements pass 2^31: the last rows of the gradient, in both layouts, against float64."""
    T = 49152
    V = 50304
    last = 128
    logits = torch.randn(T, V, device=DEVICE, dtype=torch.bfloat16)
    targets = make_targets(T, V, 3)
    losses, *rows = tg.row_losses(logits, targets, CAPS[0], fast=True)
    columns = [columns_ahead(targets, k)[-last:] for k in range(3)]
    want_losses, _, want = exact(logits[-last:], columns, targets.weights, CAPS[0])
    torch.testing.assert_close(
        losses[-last:].double(), want_losses, rtol=0, atol=5e-3 * sum(WEIGHTS)
    )
    scale = tg.HeadScales().grad
    g8, g8_t = tg.head_grad(
        logits, targets, *rows, torch.tensor(1 / scale, device=DEVICE), CAPS[0], E5M2, True
    )
    assert relative(g8[-last:].double() * scale, want) < 0.1
    assert torch.equal(g8.view(torch.uint8)[-last:].T, g8_t.view(torch.uint8)[:, -last:])


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("block_rows", [3, 7, 100])
@pytest.mark.fast
def test_validation_loss_is_cross_entropy_whatever_the_blocks(block_rows, pointer):
    x, weight, targets = make_head(7, 131, 24, pointer=pointer)
    want, *_ = exact_head(x, weight, targets, CAPS[1])
    got = tg.head_loss_eval(x, weight, targets, CAPS[1], block_rows)
    assert got.dtype == torch.float64
    assert not got.requires_grad
    assert relative(got, want) < 1e-6


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.fast
def test_validation_loss_with_inclusion_rates(pointer):
    """They multiply the exponentials, also the target's and the copy token's: in the kernel and in the reference."""
    x, weight, targets = make_head(7, 131, 24, pointer=pointer)
    rates = torch.logspace(-3, 0, 131).to(DEVICE)[torch.randperm(131, generator=torch.Generator().manual_seed(2))]
    z = softcapped(x.double() @ weight.double().T, CAPS[1]) + rates.double().log()
    p = z.softmax(1)
    p_next = p.gather(1, targets.class_index.clamp_min(0).long()[:, None])[:, 0]
    if pointer:
        p_next = p_next + p[:, targets.copy_token] * targets.log_copy.detach().double().exp()
    want = -(p_next.log() * (targets.class_index >= 0)).sum()

    corrected = targets._replace(inclusion_rates=rates)
    assert relative(tg.head_loss_eval(x, weight, corrected, CAPS[1], 3), want) < 1e-6
    assert relative(tg.head_loss_reference(x, weight, corrected, CAPS[1], 3).detach(), want) < 1e-6
    plain = tg.head_loss_eval(x, weight, targets, CAPS[1])
    assert relative(plain, want) > 1e-3
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    if pointer:
        wide.append(targets.log_copy.detach().double().requires_grad_())
        exactly = corrected._replace(log_copy=wide[2])
    else:
        exactly = corrected
    want_grads = torch.autograd.grad(tg.head_loss_reference(*wide[:2], exactly, CAPS[1], 3), wide)
    assert max(map(relative, run_head(head_loss(CAPS[1]), x, weight, corrected), (want, *want_grads))) < 2e-6
    alike = targets._replace(inclusion_rates=torch.ones_like(rates))
    assert tg.head_loss_eval(x, weight, alike, CAPS[1]) == plain


# ---- sampled softmax -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("certain", [1, 40, 130])
@pytest.mark.parametrize("K", [1, 3])
def test_all_candidates_are_the_full_softmax(K, certain):
    """The whole vocabulary as candidates, in any order and however many of them are certain."""
    x, weight, full = make_head(18, 131, 24, K=K)
    full = full._replace(
        class_index=torch.where(full.class_index < certain, full.class_index, 0)
    )
    order = torch.randperm(131, generator=torch.Generator().manual_seed(1))
    ids = (
        torch.cat([torch.arange(certain), order[order >= certain]])
        .to(DEVICE, torch.int32)[None]
        .repeat(2, 1)
    )
    sampled = full._replace(
        classes=ids, num_always=torch.full((2,), certain, dtype=torch.int32, device=DEVICE)
    )
    full = full._replace(positions=torch.arange(18, dtype=torch.int32, device=DEVICE) % 9)
    sampled = sampled._replace(positions=full.positions)
    want = exact_head(x, weight, full, CAPS[0])
    for apply in (head_loss(), lambda *head: tg.head_loss_reference(*head, CAPS[0])):
        assert max(map(relative, run_head(apply, x, weight, sampled), want)) < 2e-6


def inclusions(vocabulary, targets, count, sweeps):
    """In how many of the sweeps each id takes part, [vocabulary]."""
    total = np.zeros(vocabulary, int)
    for sweep in range(sweeps):
        ids, certain, columns = tg.sample_classes(targets, count, vocabulary, sweep)
        assert len(set(ids)) == count
        assert (ids[columns] == targets).all()
        assert set(ids[:certain]) == set(targets)
        total[ids] += 1
    return total


@pytest.mark.fast
def test_classes_take_turns():
    """Over a whole round of the walk each id is drawn equally often where the targets lie evenly on it. Where they do
    not, an id is met as often as the stretch before it is long, targets included; the mean is the same."""
    walk = np.arange(55) * 20011 % 55
    even = inclusions(55, np.repeat(walk[::5], 3), 19, sweeps=55)
    assert set(even[walk[::5]]) == {55}
    assert set(np.delete(even, walk[::5])) == {55 * (19 - 11) // (55 - 11)}
    uneven = np.array([3, 3, 17, 20, 21, 22, 40, 9])
    certain = len(set(uneven))
    found = inclusions(55, uneven, 19, sweeps=55)
    drawn = np.delete(found, uneven)
    assert set(found[uneven]) == {55}
    assert drawn.sum() == 55 * (19 - certain)
    assert drawn.min() >= 19 - certain
    assert drawn.max() <= 19


@pytest.mark.parametrize("count, tokens", [(8192, 8192), (12_288, 16_384)])
def test_classes_take_turns_at_full_size(count, tokens):
    """In training how often a class is drawn is off by a few percent at worst."""
    random = np.random.default_rng(0)
    V = 50304
    targets = ((50257 * random.power(0.28, tokens)).astype(np.int64) * 31) % V
    sweeps = 393  # a fifth of the chunks of a sprint's stage: over fewer, chance decides how often a class is met
    certain = len(set(targets))
    drawn = np.delete(inclusions(V, targets, count, sweeps), targets)
    share = drawn / sweeps * (V - certain) / (count - certain)
    assert abs(share.mean() - 1) < 1e-9
    assert abs(share - 1).max() < 0.15


# ---- embedding gradient ----------------------------------------------------------------------------------------------
def token_cases():
    """name: (tokens, vocab_rows)."""
    rng = np.random.default_rng(0)
    span = tg.SPAN
    common = np.where(rng.random(300) < 0.6, 11, rng.integers(0, 40, 300))
    return {
        "repetitive": (common, 41),
        "one id": (np.full(7 * span + 3, 2), 4),
        "single": (np.array([3]), 4),
        "fewer than a span": (rng.integers(0, 3, span - 1), 3),
        "distinct": (rng.permutation(90), 90),
        "whole spans": (np.repeat([0, 1, 3], [span, 2 * span, span]), 4),
        "off by one": (np.repeat([0, 1, 2, 3], [span - 1, 2 * span + 1, span + 1, 2 * span - 1]), 5),
        "no first, no last": (rng.integers(5, 9, 300), 20),
    }


def embedding_inputs(name):
    tokens, vocab_rows = token_cases()[name]
    tokens = np.random.default_rng(1).permutation(tokens)
    arrays = tokens, *tg.sort_ids(tokens.astype(np.uint16), vocab_rows)
    return [guarded(torch.from_numpy(array.astype(np.int32))) for array in arrays]


@pytest.mark.parametrize("name", token_cases())
@pytest.mark.fast
def test_sort_ids(name):
    tokens, order, starts = (tensor.cpu().numpy() for tensor in embedding_inputs(name))
    for token in range(len(starts) - 1):
        assert (
            order[starts[token] : starts[token + 1]] == np.flatnonzero(tokens == token)
        ).all()
    assert starts[0] == 0
    assert starts[-1] == len(tokens) == len(order)


@pytest.mark.parametrize("name", token_cases())
def test_embedding_grad(name, D=24):
    ids, order, starts = lookup = embedding_inputs(name)
    grad = guarded(torch.randn(len(ids), D, generator=torch.Generator().manual_seed(D)))
    run = lambda: tg.embedding_grad(grad, lookup, grad.new_full((len(starts) - 1, D), torch.nan))
    got = run()
    want = tg.embedding_grad_reference(grad.double(), ids, len(starts) - 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert INTERPRETED or torch.equal(got, run()), "bitwise repeatable"
    empty = starts.diff() == 0
    assert (got[empty] == 0).all()
    before = guarded(
        torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).index_fill(
            0, empty.nonzero()[:1, 0].cpu(), torch.nan
        )
    )
    added = tg.embedding_grad(grad, lookup, before.clone(), add=True)
    torch.testing.assert_close(
        added[~empty].double(), (before.double() + want)[~empty], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(added[empty].nan_to_num(7), before[empty].nan_to_num(7))  # not touched


@pytest.mark.parametrize("name", token_cases())
def test_embedding_grad_of_the_rows_that_occur(name, D=24):
    """Two lookups of a step: the first writes the rows that occur, and says so of every row. The second adds to those,
    writes what is new to it, and leaves all others, which may hold anything."""
    ids, order, starts = lookup = embedding_inputs(name)
    occurs = starts.diff() > 0
    grad = guarded(torch.randn(len(ids), D, generator=torch.Generator().manual_seed(D)))
    want = tg.embedding_grad(grad, lookup, grad.new_empty(len(occurs), D))
    dense = torch.full_like(want, torch.nan)
    present = guarded(torch.full((len(occurs),), 7, dtype=torch.int8))
    tg.embedding_grad(grad, lookup, dense, present)
    assert torch.equal(present, occurs.to(torch.int8))
    assert torch.equal(dense[occurs], want[occurs])
    assert dense[~occurs].isnan().all()

    old = torch.zeros_like(present)
    old[::2] = 1
    present.copy_(old)
    dense[(old == 1) & ~occurs] = 5.0
    dense[(old == 0) & occurs] = torch.nan
    before = dense.clone()
    tg.embedding_grad(grad, lookup, dense, present, add=True)
    assert torch.equal(present, old | occurs.to(torch.int8))
    new = occurs & (old == 0)
    both = occurs & (old == 1)
    assert torch.equal(dense[new], want[new])
    torch.testing.assert_close(
        dense[both],
        before[both] + want[both],
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.equal(dense[~occurs].nan_to_num(7), before[~occurs].nan_to_num(7))


@pytest.mark.gpu
@full_size
def test_a_second_lookup_adds_to_no_row_of_an_earlier_step(V=50_304, D=768):
    """Where the rows without a gradient hold anything, two lookups give the same rows as where they hold zeros."""
    random = np.random.default_rng(0)
    lookups = []
    for _ in range(2):
        tokens = random.integers(0, V, 8192)
        arrays = tokens, *tg.sort_ids(tokens.astype(np.uint16), V)
        lookups.append([torch.from_numpy(array.astype(np.int32)).to(DEVICE) for array in arrays])
    grads = torch.randn(2, 8192, D, device=DEVICE, dtype=torch.bfloat16)

    def both(left_over):
        dense = grads.new_full((V, D), left_over)
        present = torch.zeros(V, dtype=torch.int8, device=DEVICE)
        for number, (grad, lookup) in enumerate(zip(grads, lookups)):
            tg.embedding_grad(grad, lookup, dense, present, add=number > 0)
        return dense.where(present[:, None] > 0, 0)

    want = both(0.0)
    for _ in range(50):
        assert torch.equal(both(1e3), want)


def test_embedding_lookup(monkeypatch):
    """Over two micro-batches, each with a table read twice: the first makes the gradient, the rest is added, the hooks
    hear of each once, though autograd itself has no gradient, and the next step begins anew. A table without a gradient
    gets none."""
    lookup = embedding_inputs("repetitive")
    called = []
    plain = (
        torch.randn(41, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    )
    table, idle = (tg.make_param("lm_head", plain.detach().clone()) for _ in range(2))
    for t in (table, idle):
        t.info.owner = tg.LookupTable(
            [t],
            tg.AdamRule(1.0, (0.5, 0.9)),
            tg.OptimizerConfig(),
            tg.Ranks(0, 1, plain.device),
            tg.select_ops(torch.device("cpu")),
        )
    owner = table.info.owner
    table.register_post_accumulate_grad_hook(lambda table: called.append(table.grad.clone()))
    # what memory may hold
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))
    for micro in range(2):
        tg.EmbeddingLookup.apply(F.embedding, idle, *lookup)
        first, second = (
            tg.EmbeddingLookup.apply(F.embedding, table, *lookup) for _ in range(2)
        )
        a, b = (F.embedding(lookup[0], plain) for _ in range(2))
        assert torch.equal(first, a)
        assert torch.equal(second, b)
        for x, y in ((first, second), (a, b)):
            (x.square().sum() + (x * y.sin()).sum()).backward()
        assert len(called) == micro + 1
        torch.testing.assert_close(called[micro], plain.grad, rtol=1e-5, atol=1e-5)
    assert idle.grad is None
    owner.reduce_()
    owner.compute_({"lm_head": torch.tensor(0.1), "lm_head decay": torch.tensor(0.0)})
    tg.EmbeddingLookup.apply(F.embedding, table, *lookup).sum().backward()
    torch.testing.assert_close(table.grad, lookup[2].diff()[:, None].expand(41, 24).float())


@pytest.mark.gpu
@full_size
@pytest.mark.parametrize("T", [16_384, 49_152])
def test_embedding_grad_full_size(T):
    D, V = 768, 50_304
    tokens = np.random.default_rng(0).zipf(1.2, T).clip(max=V) - 1
    lookup = [
        torch.from_numpy(array.astype(np.int32)).to(DEVICE)
        for array in (tokens, *tg.sort_ids(tokens, V))
    ]
    grad = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16)
    got = tg.embedding_grad(grad, lookup, grad.new_empty(V, D))
    torch.testing.assert_close(
        got.double(), tg.embedding_grad_reference(grad.double(), lookup[0], V), rtol=2.0**-8, atol=1e-3
    )


# ---- Adam ------------------------------------------------------------------------------------------------------------
ADAM = {"kernel": tg.adam, "reference": tg.adam_reference}
each_decay = pytest.mark.parametrize("cautious", [True, False], ids=("cautious", "plain"))


@pytest.mark.parametrize(
    "ranks, size", [(1, 1), (1, 4), (2, 1023), (1, 1024), (4, 3 * 1024 + 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_decay
@pytest.mark.parametrize("update", ADAM.values(), ids=ADAM)
@pytest.mark.fast
def test_adam(update, cautious, dtype, ranks, size):
    """Steps of plain Adam in float64, on the mean of what the ranks sent. Every other one decays the weights that it
    shrinks, or all of them. In bfloat16 each step starts from what the one before has rounded."""
    generator = torch.Generator().manual_seed(size)
    states = weights, mean, square = [guarded(torch.zeros(size, dtype=dtype)) for _ in range(3)]
    weights.copy_(torch.randn(size, generator=generator))
    for step in range(1, 5):
        grads = guarded((10.0**-step * torch.randn(ranks, size, generator=generator)).to(dtype))
        rate = 0.1 / step
        shrink = 0.3 * (step % 2)
        w, m, v = (state.double() for state in states)
        g = grads.double().mean(0)
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        move = rate * m / (v.sqrt() + 1e-8)
        shrinking = move * w > 0
        assert size < 100 or 0.2 * size < shrinking.sum() < 0.8 * size
        decays = shrinking if cautious else 1
        update(
            weights,
            grads,
            mean,
            square,
            *(torch.tensor(x, device=DEVICE) for x in (rate, shrink)),
            0.8,
            0.9,
            1e-8,
            cautious=cautious,
        )
        tolerance = 2.0 ** -8 if dtype == torch.bfloat16 else 1e-5
        for found, exact in zip(states, (w - move - shrink * w * decays, m, v)):
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("rows, width", [(1, 4), (70, 24), (9, 768)])
@pytest.mark.parametrize("update", ADAM.values(), ids=ADAM)
@pytest.mark.fast
def test_adam_of_row_grads(update, rows, width, ranks):
    """As with zeros in the rows that no lookup of a rank has read, whatever these hold. Ranks have rows of their own,
    and some rows have none."""
    generator = torch.Generator().manual_seed(rows)
    random = lambda *shape: torch.rand(*shape, generator=generator)
    dense = random(ranks, rows, width).to(DEVICE)
    missing = (random(ranks, rows, 1) < 0.6).to(DEVICE)
    dense[missing.expand_as(dense)] = 0
    grads = [
        guarded(part.masked_fill(gone, torch.nan))
        for part, gone in zip(dense, missing)
    ]
    present = [
        guarded((~gone).flatten().to(torch.int8))
        for gone in missing
    ]
    start = [random(rows, width) for _ in range(3)]
    rates = [torch.tensor(x, device=DEVICE) for x in (0.1, 0.3)]
    constants = *rates, 0.8, 0.9, 1e-8
    found, want = ([guarded(state) for state in start] for _ in range(2))
    update(found[0], tg.RowGrads.of(grads, present), *found[1:], *constants)
    update(want[0], dense, *want[1:], *constants)
    assert all(map(torch.equal, found, want))


# ---- sparse Adam -----------------------------------------------------------------------------------------------------
SPARSE = {"kernel": tg.sparse_adam, "reference": tg.sparse_adam_reference}


def on_device(ids):
    """Rows [T, K] as the loader sends them."""
    return guarded(torch.from_numpy(ids.astype(np.int32)))


@pytest.mark.parametrize("name", token_cases())
@pytest.mark.fast
def test_each_row_has_one_group_of_its_positions(name):
    """What the kernel is told: every row that occurs has one group of all the positions where it occurs, ascending;
    all other groups are empty."""
    tokens = np.random.default_rng(2).permutation(token_cases()[name][0])
    ids, order, starts, found = tg.group_ids(
        on_device(tokens[: len(tokens) // 2 * 2 or 1].reshape(-1, min(len(tokens), 2)))
    )
    groups = {
        int(row): order[begin:end].tolist()
        for row, begin, end in zip(found, starts, starts[1:])
        if begin < end
    }
    flat = ids.flatten().tolist()
    assert groups == {
        row: [at for at, other in enumerate(flat) if other == row] for row in set(flat)
    }
    assert len(starts) == len(flat) + 1
    assert starts[0] == 0
    assert starts[-1] == len(flat)
    assert (starts.diff() >= 0).all()
    assert int((starts.diff() > 0).sum()) == len(groups), "one group each"


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("name", token_cases())
@pytest.mark.fast
def test_groups_are_listed_by_length(name, parts):
    """Every group of one position once, and every longer one, by its last place: of this rank's rows alone."""
    _, _, starts, found = tg.group_ids(on_device(token_cases()[name][0][:, None]))
    size = len(found)
    rank = parts // 2
    places = torch.full((2, size), -1, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    tg.list_groups_kernel[(tg.triton.cdiv(size, 64),)](
        starts,
        found,
        places,
        counts,
        size,
        rank,
        PARTS=parts,
        BLOCK=64,
    )
    lengths = starts.diff() * (found % parts == rank)
    for listed, count, wanted in zip(places, counts, (lengths == 1, lengths > 1)):
        assert listed[:count].sort().values.tolist() == wanted.nonzero().flatten().tolist()
        assert (listed[count:] == -1).all()


def sparse_steps():
    """name: (rows, the ids [T, 2] of each step). Rows pause for a step or more; row 0 and the last occur and do not."""
    random = np.random.default_rng(0)
    span = tg.SPAN
    common = np.where(random.random((200, 2)) < 0.6, 7, random.integers(0, 90, (200, 2)))
    return {
        "few": (30, [random.integers(0, 30, (12, 2)) for _ in range(6)]),
        "one token": (5, [np.array([[4, 0]]), np.array([[1, 4]]), np.array([[4, 4]])]),
        "gaps": (
            60,
            [random.integers(60 * (step % 2) // 2, 30 + 30 * (step % 2), (24, 2)) for step in range(5)],
        ),
        "one row only": (
            3,
            [np.full((5 * span + 3, 2), 1), np.full((span // 2, 2), 2), np.full((span // 2 + 1, 2), 1)],
        ),
        "distinct": (200, [random.permutation(200)[:100].reshape(50, 2) for _ in range(2)]),
        "hundreds of one": (90, [common, np.where(random.random((300, 2)) < 0.95, 7, 8)]),
    }


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("update", SPARSE.values(), ids=SPARSE)
@pytest.mark.fast
def test_ranks_update_their_own_rows(update, parts):
    """Together what one rank with all rows does, to the bit (but for the reference's sums on a GPU, in any order);
    90 rows are no multiple of 8."""
    rows, (ids, _) = sparse_steps()["hundreds of one"]
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(96, 20, generator=generator), torch.rand(96, generator=generator), torch.zeros(96)]
    grad = guarded(torch.randn(len(ids), 20, generator=generator))
    lookup = tg.group_ids(on_device(ids))
    numbers = [torch.tensor(x, device=DEVICE) for x in (3.0, 0.1, 0.3)]

    def updated(state, **options):
        state = list(map(guarded, state))
        update(grad, lookup, *state, *numbers, 0.9, 1e-8, 0.25, pooling=0.5, **options)
        return state

    dealt = [updated([tensor[rank::parts] for tensor in whole], rank=rank, parts=parts) for rank in range(parts)]
    tolerance = 1e-5 if DEVICE == "cuda" and update is tg.sparse_adam_reference else 0.0
    for own, want in zip(zip(*dealt), updated(whole)):
        torch.testing.assert_close(torch.stack(own, 1).flatten(0, 1), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("dtype, width", [(torch.float32, 20), (torch.bfloat16, 192)])
@pytest.mark.fast
def test_sums_of_rows_of_all_ranks(dtype, width, parts):
    """Read from where they are; in bfloat16 a sum is rounded once by the kernel, twice by the reference."""
    generator = torch.Generator().manual_seed(parts)
    table = torch.randn(12 * parts, width, generator=generator).to(dtype)
    ids = torch.randint(len(table), (7, 3), generator=generator)
    own = [guarded(table[rank::parts]) for rank in range(parts)]
    peers = tg.PeerRows(own, torch.tensor([part.data_ptr() for part in own], device=DEVICE))
    want = table.double()[ids].sum(1).to(DEVICE)
    read = guarded(ids.int())
    assert relative(tg.peer_rows(read, peers), want) < torch.finfo(dtype).eps / 2
    assert relative(tg.peer_rows_reference(read, peers), want) < torch.finfo(dtype).eps


@pytest.mark.parametrize("name", sparse_steps())
@each_decay
@pytest.mark.parametrize("update", SPARSE.values(), ids=SPARSE)
def test_sparse_adam(update, cautious, name):
    """Steps of plain Adam over the whole table in float64, where every row's second moment decays at each: what rests
    is made up for. Every other step weights decay, those that it shrinks or all that it reads. Second moments are
    pooled with the tokens' mean not at all, by half, wholly."""
    rows, steps = sparse_steps()[name]
    D = 20
    beta2 = 0.9
    epsilon = 1e-8
    scale = 0.25
    generator = torch.Generator().manual_seed(1)
    weights = guarded(torch.randn(rows, D, generator=generator))
    square, last = (guarded(torch.zeros(rows)) for _ in range(2))
    exact = weights.double()
    moment = torch.zeros(rows, device=DEVICE, dtype=torch.float64)
    untouched = weights.clone()
    for step, ids in enumerate(steps, 1):
        grad = guarded(torch.randn(len(ids), D, generator=generator) * 10.0**-step)
        read = on_device(ids)
        rate = 0.1 / step
        shrink = 0.3 * (step % 2)
        options = {"pooling": (0.0, 0.5, 1.0)[step % 3], "cautious": cautious}
        again = weights.clone(), square.clone(), last.clone()
        numbers = [
            torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in (step, rate, shrink)
        ]
        update(
            grad,
            tg.group_ids(read),
            weights,
            square,
            last,
            *numbers,
            beta2,
            epsilon,
            scale,
            **options,
        )
        if not INTERPRETED and update is tg.sparse_adam:  # the reference adds in any order on a GPU
            update(grad, tg.group_ids(read), *again, *numbers, beta2, epsilon, scale, **options)
            assert all(torch.equal(a, b) for a, b in zip((weights, square, last), again)), (
                "bitwise repeatable"
            )
        g = scale * tg.embedding_grad_reference(
            grad.double().repeat_interleave(2, 0), read.flatten(), rows
        )
        moment = beta2 * moment + (1 - beta2) * g.square().mean(1)
        typical = (1 - beta2) * (scale * grad.double()).square().mean()
        pooled = (1 - options["pooling"]) * moment + options["pooling"] * typical
        move = rate * g / (pooled.sqrt() + epsilon)[:, None]
        touched = torch.from_numpy(np.unique(ids)).to(DEVICE)
        decays = move * exact > 0  # no move where nothing was read
        if not cautious:
            decays = torch.zeros_like(decays).index_fill(0, touched, True)
        exact = exact - move - shrink * exact * decays
        torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(square[touched].double(), moment[touched], rtol=1e-5, atol=0)
        assert (last[touched] == step).all()
        rest = torch.ones(rows, dtype=torch.bool, device=DEVICE).index_fill(0, touched, False)
        assert torch.equal(weights[rest], untouched[rest]), "rows that the step did not read"
        untouched = weights.clone()


def test_more_groups_than_programs(monkeypatch):
    """Programs share out the rows, so fewer of them do the same to the bit."""
    rows, (ids, _) = sparse_steps()["hundreds of one"]
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(rows, 20, generator=generator)
    grad = guarded(torch.randn(len(ids), 20, generator=generator))
    numbers = [torch.tensor(x, device=DEVICE) for x in (3.0, 0.1, 0.3)]
    ends = []
    for programs in (tg.UPDATE_PROGRAMS, 2):
        monkeypatch.setattr(tg, "UPDATE_PROGRAMS", programs)
        state = [
            guarded(start),
            guarded(torch.zeros(rows)),
            guarded(torch.zeros(rows)),
        ]
        tg.sparse_adam(
            grad,
            tg.group_ids(on_device(ids)),
            *state,
            *numbers,
            0.9,
            1e-8,
            0.25,
        )
        ends.append(state)
    assert all(map(torch.equal, *ends))


@each_decay
def test_sparse_adam_in_bfloat16(cautious):
    """Gradients are summed in float32 and weights rounded once:
    kernel and reference agree to the last step of bfloat16."""
    rows, steps = sparse_steps()["gaps"]
    generator = torch.Generator().manual_seed(2)
    states = {}
    start = torch.randn(rows, 24, generator=generator).bfloat16()
    grads = [torch.randn(len(ids), 24, generator=generator).bfloat16() for ids in steps]
    for name, update in SPARSE.items():
        weights, square, last = states[name] = [
            guarded(start),
            *(guarded(torch.zeros(rows)) for _ in range(2)),
        ]
        for step, (ids, grad) in enumerate(zip(steps, grads), 1):
            update(
                guarded(grad),
                tg.group_ids(on_device(ids)),
                weights,
                square,
                last,
                *(torch.tensor(x, device=DEVICE) for x in (float(step), 0.01, 0.1)),
                0.95,
                1e-10,
                1.0,
                cautious=cautious,
            )
    (a, b, c), (d, e, f) = states.values()
    torch.testing.assert_close(a.float(), d.float(), rtol=2.0**-7, atol=1e-4)
    assert (a == d).float().mean() > 0.98
    assert relative(b, e) < 1e-5
    assert torch.equal(c, f)


@pytest.mark.gpu
@full_size
@pytest.mark.parametrize("T", [65_536, 196_608])
def test_sparse_adam_full_size(T):
    """More than 2^31 elements in the table, the rows of its end among those read."""
    rows = 2**22
    D = 768
    random = np.random.default_rng(0)
    ids = on_device(
        np.stack(
            [rows - random.zipf(1.2, T).clip(max=rows), random.integers(rows // 2, rows, T)], axis=1
        )
    )
    grad = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16)
    weights, square, last = (
        torch.zeros(rows, D, device=DEVICE, dtype=torch.bfloat16),
        *(torch.zeros(rows, device=DEVICE) for _ in range(2)),
    )
    numbers = [torch.tensor(x, device=DEVICE) for x in (3.0, 0.1, 0.0)]
    tg.sparse_adam(grad, tg.group_ids(ids), weights, square, last, *numbers, 0.95, 1e-10, 1.0)
    found, group = ids.flatten().unique(return_inverse=True)
    g = tg.embedding_grad_reference(grad.double().repeat_interleave(2, 0), group, len(found))
    torch.testing.assert_close(
        square[found].double(), 0.05 * g.square().mean(1), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        weights[found].double(), -0.1 * g / square[found].double().sqrt()[:, None], rtol=2.0**-8, atol=1e-5
    )
    assert (last > 0).sum() == len(found)
    assert int(weights.any(1).sum()) == len(found)
