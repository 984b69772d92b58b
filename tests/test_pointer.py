"""The pointer: log_copy and its gradient against a dense float64 formula (kernels interpreted on a CPU,
in fp32 and fp16), and the model with it.

Run in a process of its own, as test_attention.py. On a GPU: TRITON_INTERPRET=0 pytest -m gpu.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import helpers
import sample
from helpers import CPU, tg
from test_attention import (  # noqa: F401  # some are fixtures
    LAYOUTS,
    capability,
    distances,
    each_capability,
    each_tile,
    interpreted,
    needs_gpu,
    tiles,
)

# log2 of no match at all is -inf, as intended
pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:overflow:RuntimeWarning"),
]


def dense_log_copy(qk, ids, lengths, window, scale):
    """The definition in float64, over a dense matrix."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(qk.device)
    t = torch.arange(len(document), device=qk.device)
    seen = (document[:, None] == document) & (t[:, None] > t) & (t[:, None] - t <= window)
    q, k = qk.double().unbind(1)
    e = (scale * q @ k.T).exp() * seen
    copied = (e * (ids[:, None] == ids)).sum(1)
    return torch.where(copied > 0, copied.clamp_min(1e-300).log() - e.sum(1).log1p(), tg.NEG_INF)


def operands(tokens, width=16, names=5, dtype=torch.float32, device="cpu", seed=0):
    """qk, normalised; ids, one of them -1; the incoming gradient."""
    generator = torch.Generator().manual_seed(seed)
    qk = tg.norm(torch.randn(tokens, 2, width, generator=generator))
    omega = torch.randn(tokens, generator=generator)
    return (
        qk.to(device, dtype),
        torch.randint(-1, names, (tokens,), generator=generator).to(device, torch.int32),
        omega.to(device),
    )


def gradients(function, qk, omega):
    """log_copy, dqk"""
    leaf = qk.detach().requires_grad_()
    log_copy = function(leaf)
    return log_copy.detach(), torch.autograd.grad(log_copy, leaf, omega.to(log_copy.dtype))[0]


def kernels(ids, lengths, window, scale):
    return lambda qk: tg.PointerLogCopy.apply(qk, ids, *distances(lengths, qk.device), window, scale)


def compare(results, expected, tolerance):
    for name, x, y in zip(("log_copy", "dqk"), results, expected, strict=True):
        assert x.shape == y.shape
        found = y > tg.NEG_INF / 2
        assert torch.equal(x > tg.NEG_INF / 2, found) or name == "dqk"
        assert (
            not found.any()
            or (x.double() - y)[found].abs().max() / y[found].abs().max().clamp(min=1) < tolerance
        ), name


def check(lengths, window, tolerance=2e-6, scale=0.3, device="cpu", **shape):
    qk, ids, omega = operands(sum(lengths), device=device, **shape)
    results = gradients(kernels(ids, lengths, window, scale), qk, omega)
    assert results[0].dtype == torch.float32
    assert results[1].dtype == qk.dtype
    compare(
        results,
        gradients(lambda qk: dense_log_copy(qk, ids, lengths, window, scale), qk.double(), omega),
        tolerance,
    )
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [16, 512])
def test_reference_is_the_definition(layout, block):
    lengths, window = LAYOUTS[layout]
    qk, ids, omega = operands(sum(lengths), dtype=torch.float64)
    results = gradients(
        lambda qk: tg.pointer_reference(qk, ids, distances(lengths)[0], window, 0.3, block),
        qk,
        omega,
    )
    compare(results, gradients(lambda qk: dense_log_copy(qk, ids, lengths, window, 0.3), qk, omega), 1e-12)


# ---- kernels ---------------------------------------------------------------------------------------------------------
@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_is_the_dense_formula_in_every_layout(layout, tiles):
    check(*LAYOUTS[layout])


@interpreted
@each_tile
@pytest.mark.parametrize("layout", ["many_in_a_tile", "window_of_a_tile", "one_document"])
@pytest.mark.slow
def test_tile_shapes_do_not_matter(layout, tiles):
    check(*LAYOUTS[layout], width=32, names=50)


@interpreted
@each_tile
@pytest.mark.parametrize("window", [14, 15, 30, 46])
@pytest.mark.slow
def test_windows_that_end_beside_a_step(window, tiles):
    check([99], window)


@interpreted
@each_capability
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.slow
def test_tiles_chosen_for_a_gpu_are_right(width, capability):
    check([100, 1, 40], 48, width=width, scale=0.1)


@interpreted
def test_half_precision(tiles):
    check(*LAYOUTS["window_of_a_tile"], dtype=torch.float16, tolerance=3e-3)


@interpreted
@pytest.mark.parametrize("names, shares", [(1, "all"), (10**6, "none")])
def test_everything_or_nothing_matches(names, shares, tiles):
    """Where all earlier tokens are the same only the first of a document copies nothing;
    without a match gradients are exactly zero."""
    lengths, window = LAYOUTS["many_in_a_tile"]
    tokens = sum(lengths)
    qk, _, omega = operands(tokens)
    ids = torch.arange(tokens, dtype=torch.int32) % names
    log_copy, dqk = gradients(kernels(ids, lengths, window, 0.3), qk, omega)
    first = distances(lengths)[0] == 0
    assert torch.equal(log_copy == tg.NEG_INF, first if shares == "all" else torch.ones_like(first))
    assert not dqk[first, 0].any()
    assert bool(dqk.any()) == (shares == "all")
    assert dqk.isfinite().all()
    compare(
        (log_copy, dqk),
        gradients(lambda qk: dense_log_copy(qk, ids, lengths, window, 0.3), qk.double(), omega),
        2e-6,
    )


@interpreted
@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_scores(sign, tiles):
    """Every score at the bound, some at its negative, and a share of e^-120: no overflow, no NaN."""
    qk = torch.ones(40, 2, 16)
    qk[::3, 1] = -sign
    _, ids, omega = operands(40)
    results = gradients(kernels(ids, [40], 20, 59.9 / 16), qk, omega)
    compare(
        results,
        gradients(lambda qk: dense_log_copy(qk, ids, [40], 20, 59.9 / 16), qk.double(), omega),
        1e-4,
    )
    with pytest.raises(ValueError, match=r"expected scale \* width < 60, found 3.75 \* 16"):
        kernels(ids, [40], 20, 3.75)(qk)


@interpreted
def test_nan_is_handed_on(monkeypatch):
    """On a GPU the greater of NaN and a number is the number, unless NaN is asked for.

    Here the interpreter does so too."""
    monkeypatch.setattr(
        triton.runtime.interpreter.InterpreterBuilder,
        "create_maxnumf",
        lambda self, x, y: self.binary_op(x, y, np.fmax),
    )
    qk, ids, _ = operands(50)
    qk[20, 0] = torch.nan  # a query
    log_copy = kernels(ids, [50], 9, 0.3)(qk)
    assert log_copy.isnan().nonzero().tolist() == [[20]]


@interpreted
@each_tile
def test_documents_do_not_leak(tiles):
    """Other and large values in the other documents change no bit of a document's results,
    whatever the strides of qk."""
    lengths = [13, 30, 21]
    tokens = 64
    own = torch.zeros(tokens, dtype=torch.bool)
    own[13:43] = True
    clean = operands(tokens)
    poisoned = [
        torch.where(own.view(-1, *[1] * (x.ndim - 1)), x, y * size)
        for x, y, size in zip(clean, operands(tokens, seed=1), (1, 1, 1e6))
    ]
    poisoned[0] = poisoned[0].transpose(0, 2).contiguous().transpose(0, 2)
    for x, y in zip(
        *(
            gradients(kernels(ids, lengths, 25, 0.3), qk, omega)
            for qk, ids, omega in (clean, poisoned)
        )
    ):
        assert torch.equal(x[own], y[own])


# ---- the model -------------------------------------------------------------------------------------------------------
BOS = helpers.BOS
DOUBLE = replace(helpers.MODEL, dtype="float64")


def packed(pieces, **options):
    return tg.pack({0: pieces}, DOUBLE, pin=False, **options).to(CPU)


def document(length, seed, names=9):
    random = np.random.default_rng(seed)
    return np.concatenate([[BOS], random.integers(0, names, length)]).astype(np.uint16)


def random_model(config=DOUBLE):
    """With a good part of the softmax in the pointer's hands, or an error would not show."""
    model = tg.GPT(config, tg.select_ops(CPU), CPU)
    helpers.randomise(model)
    model.lm_head[config.vocabulary].detach().copy_(model.lm_head[:9].detach().mean(0))
    return model.requires_grad_(False)


def geometry_of(positions):
    return tg.rotary_geometry(replace(helpers.PRESET, model=DOUBLE), 0, 2 * positions, CPU)


def losses(model, pieces, **options):
    """The loss of each token: the first target weights of its position alone."""
    h, head, targets, cap = model.predictions(packed(pieces, **options), geometry_of(60), torch.ones(1))
    rows = [
        (targets._replace(class_index=torch.where(torch.arange(len(h)) == t, targets.class_index, -1)))
        for t in range(len(h))
    ]
    return torch.stack([tg.head_loss_reference(h, head, row, cap) for row in rows])


@pytest.mark.parametrize("window", [3, 2048])
def test_probabilities_add_up(tiny, window):
    """Over all ids that may come next:
    exp(-loss) is next_token's probability, and these sum to one over the padded vocabulary."""
    model = random_model(replace(DOUBLE, pointer_window_tokens=window))
    model.inclusion_rates.uniform_(0.01, 1, generator=torch.Generator().manual_seed(1))
    piece = document(30, seed=1)
    for stop in (1, 2, 17, 30):
        p = sample.next_token(model, packed([piece[:stop + 1]]), geometry_of(60))
        assert float(p.sum()) == pytest.approx(1, abs=1e-6)
        for token in (0, 3, 8, 400, BOS):
            pieces = np.append(piece[:stop], token).astype(np.uint16)
            last = model.evaluate(packed([pieces]), geometry_of(60)) - (
                model.evaluate(packed([pieces[:-1]]), geometry_of(60)) if stop > 1 else 0
            )
            assert float((-last).exp()) == pytest.approx(float(p[token]), rel=1e-5)
    model.pointer.zero_()
    assert not sample.next_token(model, packed([piece]), geometry_of(60)).allclose(p), "the pointer has a say"


def test_a_documents_loss_does_not_depend_on_its_place(tiny):
    """Evaluation of packed windows is what next_token says of each document by itself."""
    model = random_model(DOUBLE)
    first, second = (document(length, seed=2) for length in (45, 30))
    apart = sum(model.evaluate(packed([piece]), geometry_of(60)) for piece in (first, second))
    assert float(model.evaluate(packed([first, second]), geometry_of(60))) == pytest.approx(
        float(apart), rel=1e-12
    )


@pytest.mark.parametrize("candidates", [None, 200])
def test_loss_is_causal_and_stays_in_its_document(tiny, candidates):
    """A token changes its own loss and later ones of its document, none before and none of others;
    a cut piece knows its following token."""
    model = random_model()
    pieces = [document(length, seed) for seed, length in enumerate((12, 1, 20))]
    base = losses(model, pieces, sampled_classes=candidates)
    start = 0
    for number, piece in enumerate(pieces):
        for at in range(1, len(piece)):
            changed = [p.copy() for p in pieces]
            # Among the ids of all documents, so that the candidates stay the same.
            changed[number][at] = (piece[at] + 1) % 9
            if candidates and len({*np.concatenate(changed)}) != len({*np.concatenate(pieces)}):
                continue
            differs = (losses(model, changed, sampled_classes=candidates) - base).abs() > 1e-9
            first = start + at - 1
            stop = start + len(piece) - 1
            assert differs[first:stop].any(), (number, at)
            assert not differs[:first].any(), (number, at)
            assert not differs[stop:].any(), (number, at)
        start += len(piece) - 1


def test_no_token_sees_what_it_has_to_predict(tiny):
    """Each token's loss is what it is in a document that ends with its target, so with nothing behind to look at."""
    model = random_model()
    piece = document(24, seed=7, names=5)  # much to copy
    whole = losses(model, [piece])
    for t in range(len(piece) - 1):
        cut = losses(model, [piece[:t + 2]])
        assert float(cut[-1]) == pytest.approx(float(whole[t]), abs=1e-9), t


def test_the_spare_id_is_a_certain_candidate(tiny):
    documents = packed([document(40, 3)], sampled_classes=64)
    assert documents.classes[0, 0] == DOUBLE.vocabulary
    assert documents.num_always[0] == len(set(document(40, 3)[1:])) + 1
    assert (
        documents.classes[0, documents.class_index.long()]
        == torch.from_numpy(document(40, 3)[1:].astype(int))
    ).all()
    ids, certain, columns = tg.sample_classes(np.arange(9), 5, 512, 0, [509])
    assert ids.tolist() == [509, 0, 1, 2, 3]
    assert certain == 5
    assert columns.tolist() == [1, 2, 3, 4, -1, -1, -1, -1, -1]


def test_gradients_of_the_whole(tiny):
    """By finite differences, through pointer and softmax, into the pointer's matrix, the head and the trunk before
    both: several targets, candidates with one missing."""
    model = random_model()
    batch = packed([document(14, 5, names=4), document(6, 6)], sampled_classes=12)
    batch.class_index[7] = -1
    last = "blocks.6.down"
    trunk = model.get_parameter(last)
    values = [model.pointer.detach().clone(), model.lm_head.detach()[:, :3].clone(), trunk.detach().clone()]

    def loss(pointer, columns, down):
        head = torch.cat([columns, model.lm_head.detach()[:, 3:]], 1)
        pointer.info = model.pointer.info
        head.info = model.lm_head.info
        down.info = trunk.info
        values = {"pointer": pointer, "lm_head": head, last: down}
        return torch.func.functional_call(model, values, (batch, geometry_of(60), torch.tensor([1.0, 0.5])))

    assert torch.autograd.gradcheck(loss, [value.requires_grad_() for value in values], fast_mode=True)


@pytest.mark.parametrize("window, scale", [(3, 0.25), (2048, 0.7)])
def test_a_model_points_by_its_configuration(tiny, window, scale):
    """As far and as sharply as its configuration says: neither attention's scale nor YaRN enters."""
    model = random_model(replace(DOUBLE, pointer_window_tokens=window, pointer_scale=scale))
    documents = packed([document(30, seed=1), document(20, seed=2)])
    geometry = tg.rotary_geometry(replace(helpers.PRESET, model=model.config), 2, 60, CPU)
    h, _, targets, _ = model.predictions(documents, geometry, torch.ones(1))
    qk = tg.pointer_in(h @ model.pointer.T)
    want = tg.pointer_reference(qk, documents.class_index, documents.positions, window, scale)
    assert targets.log_copy.allclose(want)


def test_keys_start_as_queries(tiny):
    model = tg.GPT(helpers.MODEL, tg.select_ops(CPU), CPU)
    model.reset(3)
    queries, states, next_states = model.pointer.chunk(3)
    assert queries.equal(states)
    assert float(states.detach().std()) == pytest.approx(0.5 * states.size(1) ** -0.5, rel=0.1)
    assert not next_states.any()


def test_a_key_reads_its_state_and_the_next_one():
    """And nothing else; the last key, which nobody asks for, its own alone."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(9, 32, dtype=torch.float64, generator=generator)
    weight = torch.randn(3 * 16, 32, dtype=torch.float64, generator=generator)
    queries, states, next_states = weight.chunk(3)
    expected = [states @ h[t] + (next_states @ h[t + 1] if t < 8 else 0.0) for t in range(9)]
    q, k = tg.pointer_in(F.linear(h, weight)).unbind(1)
    assert q.allclose(tg.norm(h @ queries.T))
    assert k.allclose(tg.norm(torch.stack(expected)))


def test_the_projection_adds_its_gradient_to_the_heads():
    generator = torch.Generator().manual_seed(3)
    h, weight, head, other = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((9, 32), (48, 32), (32, 32), (9, 48))
    )
    h.requires_grad_()
    weight.requires_grad_()

    def found(handed_on, projected):
        return torch.autograd.grad((handed_on @ head).square().sum() + (projected * other).sum(), (h, weight))

    plain = found(h, h @ weight.T)
    for got, want in zip(found(*tg.PointerProjection.apply(h, weight)), plain, strict=True):
        assert got.allclose(want)


# ---- on a GPU, in bf16 -----------------------------------------------------------------------------------------------
@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "layout", ["one_document", "single_tokens", "window_0", "window_past_everything", "three_documents"]
)
def test_gpu_layouts(layout):
    check(*LAYOUTS[layout], dtype=torch.bfloat16, tolerance=2e-2, device="cuda", scale=128 ** -0.5, width=128)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens, window", [(65_536, 2048), (49_151, 640)])
def test_gpu_full_size(tokens, window, monkeypatch):
    """Documents of 1 to 2,048 tokens, Zipf-like ids, outputs full of NaN beforehand,
    against the reference in float64; bitwise repeatable."""
    lengths = [2048, 391, 1, 1, 17] * (tokens // 2458)
    lengths.append(tokens - sum(lengths))
    qk, _, omega = operands(tokens, 128, dtype=torch.bfloat16, device="cuda")
    ids = torch.from_numpy(
        (50_257 * np.random.default_rng(0).power(0.28, tokens)).astype(np.int32)
    ).cuda()
    scale = 128 ** -0.5
    expected = gradients(
        lambda qk: tg.pointer_reference(qk, ids, distances(lengths, "cuda")[0], window, scale),
        qk.double(),
        omega,
    )
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *x, **options: empty(*x, **options).fill_(torch.nan))
    run = lambda: gradients(kernels(ids, lengths, window, scale), qk, omega)
    compare(run(), expected, 2e-2)
    assert all(map(torch.equal, run(), run()))
