"""NorMuon and Adam against independent float64 formulas, the split weights, and how parameters are shared out."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import helpers
from helpers import CPU, MODEL, PRESET, relative, tg

pytestmark = pytest.mark.fast

RULES = dict(tg.OptimizerConfig().rules)
OPS = tg.select_ops(CPU)


def rates(rate=0.02, momentum=0.9, drift=0.0, next_drift=0.0):
    named = {"muon": rate, "momentum": momentum, "drift": drift, "next drift": next_drift}
    return {name: torch.tensor(value) for name, value in named.items()}


# ---- bfloat16 weights with their lower 16 bits -----------------------------------------------------------------------
SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, -1.1754942e-38, 3.3e38, -3.3e38,
    1.00390625, -1.00390625, 0.99999994, 1.9999999, 2**-126,
]


def bits(values):
    return values.view(torch.int32)


def test_split_and_join_are_inverse():
    generator = torch.Generator().manual_seed(0)
    random_bits = (
        torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
        .to(torch.int32)
        .view(torch.float32)
    )
    values = torch.cat(
        [
            torch.tensor(SPECIAL),
            random_bits[random_bits.isfinite()],
            torch.randn(1000, generator=generator) * 1e-40,
        ]
    )
    high, low = tg.split_float32(values)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    assert bits(tg.join_float32(high, low)).equal(bits(values))


def test_the_upper_half_is_the_nearest_bfloat16():
    generator = torch.Generator().manual_seed(1)
    values = torch.cat(
        [
            torch.tensor(SPECIAL),
            torch.randn(100_000, generator=generator)
            * torch.randn(100_000, generator=generator).mul(20).exp2(),
        ]
    )
    high, _ = tg.split_float32(values)
    # a tie may go either way
    assert (
        (high.double() - values.double())
        .abs()
        .equal((values.bfloat16().double() - values.double()).abs())
    )


def test_a_bfloat16_weight_alone_joins_to_itself():
    values = torch.randn(1000).bfloat16()
    assert tg.join_float32(values, torch.zeros(1000, dtype=torch.int16)).equal(values.float())


def test_tiny_updates_accumulate_as_in_float32():
    """600 updates of a thousandth of a bfloat16 step each:
    the pair moves like a float32 weight, bfloat16 alone not at all."""
    torch.manual_seed(0)
    weight = torch.randn(3, 20, 12).bfloat16()
    low = torch.zeros_like(weight, dtype=torch.int16)
    plain = weight.clone()
    exact = weight.float()
    start = exact.clone()
    moments = [torch.zeros(3, 20, 1) for _ in range(3)]
    multiplier = torch.full((3, 1, 1), 2.0)
    direction = torch.randn(3, 20, 12)
    for _ in range(600):
        update = direction + 0.3 * torch.randn(3, 20, 12)
        arguments = multiplier, torch.tensor(2e-6), 1.2, 0.95, True
        tg.normuon_update(update, weight, low, moments[0], *arguments)
        tg.normuon_update(update, exact, None, moments[1], *arguments)
        tg.normuon_update(update, plain, None, moments[2], *arguments)
    joined = tg.join_float32(weight, low)
    assert relative(joined, exact) < 1e-6
    assert (exact - start).abs().max() > 1e-3
    assert relative(joined - start, exact - start) < 1e-4
    assert (weight.float() - joined).abs().max() <= joined.abs().max() / 256
    assert relative(plain.float() - start, exact - start) > 0.2  # what the lower bits are for


# ---- Muon and NorMuon ------------------------------------------------------------------------------------------------
POLAR_EXPRESS = (
    (8.089256959191, -22.297789245261, 15.747758400660),
    (3.943378132484, -2.784615046554, 0.503808707390),
    (3.472945650518, -2.500502056079, 0.478927524824),
    (2.552322205513, -1.886821974398, 0.442619509006),
)
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5
FIRST_MUON = tg.OptimizerConfig(
    orthogonalization="quintic",
    nesterov=False,
    normuon=False,
    scale_tall_updates=True,
    cautious_decay=False,
)


class Written:
    """One matrix under the published update, written out for a single float64 matrix."""

    def __init__(self, weight, multiplier, config):
        self.p = weight.double().clone()
        self.multiplier = multiplier
        self.config = config
        self.m = torch.zeros_like(self.p)
        self.v = 0.0
        self.behind = self.p  # what p would be without its drift
        self.drift = torch.zeros_like(self.p)

    def step(self, gradient, rate, momentum, next_drift, decay=2.4, beta2=0.95):
        config = self.config
        g = gradient.double()
        self.m = momentum * self.m + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * self.m if config.nesterov else self.m

        first = config.orthogonalization == "quintic"
        x = x / (x.pow(2).sum().sqrt() * (1.0 if first else 1.02))
        for a, b, c in QUINTIC if first else POLAR_EXPRESS:
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x

        rows, columns = x.shape
        if config.normuon:
            along = 1 if (rows >= columns) == config.normuon_long_side else 0
            self.v = beta2 * self.v + (1 - beta2) * x.pow(2).mean(along, keepdim=True)
            scaled = x / self.v.clamp(min=1e-10).sqrt()
            x = scaled * (x.norm() / scaled.norm())

        eta = rate * self.multiplier
        if config.scale_tall_updates:
            eta *= max(1, rows / columns) ** 0.5
        decaying = (x * self.p >= 0) if config.cautious_decay else 1
        ahead = self.p - self.p * decaying * (decay * rate) * eta - x * eta
        self.drift = 0.98 * self.drift + 0.02 * (ahead - self.behind)
        self.behind = ahead
        self.p = ahead + next_drift * self.drift


@pytest.mark.parametrize(
    "shape", [(48, 16), (16, 48), (24, 24)], ids=["tall", "wide", "square"]
)
@pytest.mark.parametrize("config", [
    pytest.param(tg.OptimizerConfig(), id="default"),
    pytest.param(tg.OptimizerConfig(normuon_long_side=False), id="short lines"),
    pytest.param(tg.OptimizerConfig(cautious_decay=False), id="plain decay"),
    pytest.param(FIRST_MUON, id="first Muon"),
    pytest.param(tg.OptimizerConfig(drift_factor=0.9), id="drift"),
])
def test_matrix_bank_follows_the_formulas(config, shape):
    """Five steps of a bank with a stacked parameter and one of another rate, float32; rates, momentum and the factor of
    the drift change."""
    torch.manual_seed(1)
    stacked = tg.make_param("attention", torch.randn(3 * shape[0], shape[1]), shape)
    single = tg.make_param("mlp_down", torch.randn(shape), shape)
    bank = tg.MatrixBank([stacked, single], RULES, config, tg.Ranks(0, 1, CPU), OPS)
    assert bank.low_bits is None
    written = [Written(m, 2.0, config) for m in stacked.detach().view(3, *shape)]
    written.append(Written(single.detach(), 4.0, config))
    factors = [0.0, 0.3, 0.9, 0.5, 0.5, 0.2] if config.drift_factor else [0.0] * 6
    for step in range(5):
        gradients = torch.randn(4, *shape) * 10.0 ** (step - 2)
        stacked.grad = gradients[:3].view_as(stacked)
        single.grad = gradients[3]
        rate = 0.3 / (step + 1)
        momentum = 0.85 + 0.02 * step
        bank.groups[0].reduce_()
        bank.compute_(rates(rate, momentum, *factors[step:step + 2]))
        for one, gradient in zip(written, gradients):
            one.step(gradient, rate, momentum, factors[step + 1])
        assert stacked.grad is None, "the next gradient is not added to this one"
        assert single.grad is None, "the next gradient is not added to this one"
    found = [*stacked.detach().view(3, *shape), single.detach()]
    assert all(relative(f, w.p) < 2e-5 for f, w in zip(found, written)), [
        relative(f, w.p) for f, w in zip(found, written)
    ]
    assert len(bank.weights) == 4, "one rank needs no padding"


def test_a_matrix_without_gradient_has_a_gradient_of_zero():
    """Not that of the step before, which still lies where the gradients of its group come together."""
    parameters = [tg.make_param("mlp_up", torch.randn(8, 4), (8, 4)) for _ in range(2)]
    bank = tg.MatrixBank(parameters, RULES, tg.OptimizerConfig(), tg.Ranks(0, 1, CPU), OPS)
    for parameter in parameters:
        parameter.grad = torch.ones(8, 4)
    bank.groups[0].reduce_()
    parameters[0].grad = torch.full((8, 4), 2.0)
    bank.groups[0].reduce_()
    assert [float(parameter.info.grad_view.mean()) for parameter in parameters] == [2.0, 0.0]


def test_normuon_update_alone_in_float64():
    """Without orthogonalisation's rounding the formula holds to the last digits, padding matrices included."""
    torch.manual_seed(2)
    for shape, reduced in (((9, 4), (9, 1)), ((4, 9), (1, 9)), ((5, 5), (5, 1))):
        update = torch.randn(2, *shape)
        weight = torch.randn(2, *shape)
        update[1] = 0
        moment = torch.rand(2, *reduced) + 0.1
        expected = weight.double()
        v = 0.9 * moment.double() + 0.1 * update.double().pow(2).mean(
            -1 if reduced[1] == 1 else -2, keepdim=True
        )
        scaled = update.double() / v.sqrt()
        scaled[0] *= update[0].double().norm() / scaled[0].norm()
        multiplier = torch.tensor([0.5, 3.0])[:, None, None]
        expected = (
            expected
            - expected * (scaled * expected >= 0) * 1.5 * 0.1**2 * multiplier
            - scaled * 0.1 * multiplier
        )
        tg.normuon_update(
            update, weight, None, moment, multiplier, torch.tensor(0.1), 1.5, 0.9, True
        )
        assert relative(weight, expected) < 1e-6
        assert relative(moment, v) < 1e-6


def test_a_bfloat16_bank_keeps_the_lower_bits():
    """Rounded gradients aside, a bfloat16 bank moves its weights like the float32 bank:
    far below the step of bfloat16."""
    torch.manual_seed(3)
    start = torch.randn(32, 16).bfloat16()
    shape = (32, 16)
    parameters = [
        tg.make_param("mlp_up", start.clone(), shape),
        tg.make_param("mlp_up", start.float(), shape),
    ]
    half, full = (
        tg.MatrixBank([p], RULES, tg.OptimizerConfig(), tg.Ranks(0, 1, CPU), OPS)
        for p in parameters
    )
    for _ in range(30):
        gradient = torch.randn(32, 16).bfloat16()
        for bank, parameter in zip((half, full), parameters):
            parameter.grad = gradient.to(parameter.dtype)
            bank.groups[0].reduce_()
            bank.compute_(rates(1e-4))
    moved = tg.join_float32(half.weights[0], half.low_bits[0, 0]) - start.float()
    assert relative(moved, full.weights[0] - start.float()) < 0.05
    assert parameters[0].detach().equal(half.weights[0])
    assert parameters[0].dtype == torch.bfloat16


# ---- averages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_average(dtype):
    """Three weights enter, the first whole;
    then they move 65 % of the way, each row as long as before. A row of zeros stays."""
    torch.manual_seed(5)
    matrix = tg.make_param("mlp_up", torch.zeros(2 * 12, 8, dtype=dtype), (12, 8))
    table = tg.make_param("lm_head", torch.zeros(16, 8, dtype=dtype))
    bank = tg.MatrixBank([matrix], RULES, tg.OptimizerConfig(), tg.Ranks(0, 1, CPU), OPS)
    owners = (
        bank,
        tg.AdamTable([table], RULES["lm_head"], tg.OptimizerConfig(), tg.Ranks(0, 1, CPU), OPS),
    )
    for owner in owners:
        owner.average = torch.zeros_like(owner.shard, dtype=torch.float32)
    averages = [0.0, 0.0]
    for rate, share in ((1.0, 0.0), (0.2, 0.0), (0.3, 0.0), (0.0, 0.65)):
        for i, owner in enumerate(owners):
            values = torch.randn(owner.weights.shape)
            values[..., 3, :] = 0
            exact = values.double()
            if dtype == torch.bfloat16 and owner is bank:
                high, low = tg.split_float32(values)
                owner.weights.copy_(high)
                owner.low_bits.copy_(low)
            else:
                owner.weights.copy_(values)
                exact = owner.weights.double()
            averages[i] = averages[i] + rate * (exact - averages[i])
            owner.average_(rate, share)
            mixed = exact + share * (averages[i] - exact)
            length = mixed.norm(dim=-1, keepdim=True)
            want = mixed * (exact.norm(dim=-1, keepdim=True) / length.clamp(min=1e-20))
            assert relative(owner.average, averages[i]) < 1e-6
            assert relative(owner.weights, want) < (1e-6 if dtype == torch.float32 else 3e-3)
            assert not owner.weights[..., 3, :].any()


def test_what_is_averaged():
    """Matrices and dense tables. What every rank updates alike, scalars and the n-gram table, is left as it is."""
    model = tg.GPT(MODEL, OPS, CPU)
    helpers.randomise(model)
    optimizer = tg.Optimizer(model, PRESET.optimizer, tg.Ranks(0, 1, CPU), OPS, 8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.average(1.0)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p))
    moved = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.average(0.0, 0.5)
    optimizer.gather()
    for name, p in model.named_parameters():
        rule = RULES[p.info.role]
        averaged = not isinstance(rule, tg.AdamRule) or rule.sharded
        assert p.equal(moved[name]) != averaged, name
        assert not p.equal(before[name])


# ---- Adam ------------------------------------------------------------------------------------------------------------
def adam_owner(role, rule, config):
    """Parameters [16, 4] of a role, one table or three that count as small, and what updates them."""
    parameters = [
        tg.make_param(role, torch.randn(16, 4)) for _ in range(1 if rule.sharded else 3)
    ]
    ranks = tg.Ranks(0, 1, CPU)
    if not rule.sharded:
        return parameters, tg.AdamScalars(parameters, rule, config, ranks, OPS)
    return parameters, tg.AdamTable(parameters, rule, config, ranks, OPS)


def update(owner, parameters, preset, step):
    """One update with the gradients that are there."""
    owner.reduce_()
    owner.compute_(
        {name: torch.tensor(value) for name, value in tg.step_rates(preset, step).items()}
    )
    assert all(p.grad is None for p in parameters)


ADAM = replace(
    PRESET,
    stages=(tg.Stage(40, 512, 48, 8, 16),),
    optimizer=tg.OptimizerConfig(cooldown_fraction=0.5),
)


@pytest.mark.parametrize("role", ["embedding", "gate", "scalar"])
@pytest.mark.slow
def test_adam_is_torchs(role):
    """Seven updates at the rates of the schedule, bias corrections included, gradients of very different sizes."""
    torch.manual_seed(4)
    parameters, owner = adam_owner(role, RULES[role], ADAM.optimizer)
    reference = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    torchs = [
        torch.optim.Adam(
            [p], lr=0.008 * RULES[role].learning_rate_multiplier, betas=RULES[role].betas, eps=1e-10
        )
        for p in reference
    ]
    for step in range(7):
        for mine, theirs, adam in zip(parameters, reference, torchs):
            mine.grad = torch.randn(16, 4) * 10.0 ** torch.randint(-4, 3, (16, 4))
            theirs.grad = mine.grad.clone()
            adam.step()
        update(owner, parameters, ADAM, step)
    assert all(relative(mine, theirs) < 1e-5 for mine, theirs in zip(parameters, reference))


@pytest.mark.parametrize("role", ["lm_head", "value_embedding", "gate"])
def test_cautious_decay(role):
    """One number at a time in plain Python:
    the decay acts only where the update shrinks the weight, and with the rate squared."""
    torch.manual_seed(5)
    rules = {**RULES, role: replace(RULES[role], decay=40.0)}
    preset = replace(ADAM, optimizer=replace(ADAM.optimizer, rules=tuple(rules.items())))
    (parameter, *_), owner = adam_owner(role, rules[role], preset.optimizer)
    weights = parameter.flatten().tolist()
    means = [0.0] * 64
    squares = [0.0] * 64
    decayed = 0
    rate = 0.008 * rules[role].learning_rate_multiplier
    beta1, beta2 = rules[role].betas
    for count in range(1, 6):
        parameter.grad = torch.randn(16, 4)
        for i, g in enumerate(parameter.grad.flatten().tolist()):
            means[i] = beta1 * means[i] + (1 - beta1) * g
            squares[i] = beta2 * squares[i] + (1 - beta2) * g * g
            move = (
                rate
                * means[i]
                / (1 - beta1**count)
                / (math.sqrt(squares[i] / (1 - beta2**count)) + 1e-10)
            )
            shrink = 40.0 * rate**2 * weights[i] if move * weights[i] > 0 else 0.0
            weights[i] -= move + shrink
            decayed += shrink != 0
        update(owner, [parameter], preset, count - 1)
    assert relative(parameter.flatten(), torch.tensor(weights)) < 1e-5
    assert 50 < decayed < 270


# ---- who owns what ---------------------------------------------------------------------------------------------------
def owners(optimizer):
    """(owner, its weights, where its gradients come together) of every group; a table's are its parameter's: None."""
    return [(item, item.weights, getattr(item, "grads", None)) for item in optimizer.updated]


def collect(owner):
    for part in getattr(owner, "groups", [owner]):
        part.reduce_()


def test_every_parameter_is_in_exactly_one_group():
    """By storage: each parameter is a view of one owner's weights,
    its gradient comes to the same place among the same owner's, and views do not overlap."""
    model = tg.GPT(MODEL, OPS, CPU)
    model.reset(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = tg.Optimizer(model, PRESET.optimizer, tg.Ranks(0, 1, CPU), OPS, 8)
    claimed = {}
    for name, parameter in model.named_parameters():
        assert parameter.detach().equal(before[name]), f"{name} changed on its way into the bank"
        mine = [
            (o, g)
            for o, w, g in owners(optimizer)
            if w.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        ]
        assert len(mine) == 1, name
        owner, grads = mine[0]
        rule = RULES[parameter.info.role]
        kind = (
            tg.MatrixBank
            if isinstance(rule, tg.MuonRule)
            else (tg.LookupTable if rule.looked_up else tg.AdamTable)
            if rule.sharded
            else tg.SparseTable
            if rule.sparse
            else tg.AdamScalars
        )
        assert type(owner) is kind, name
        assert parameter.is_contiguous(), f"{name}: compiled code takes it for aligned"
        assert parameter.data_ptr() % 16 == 0, f"{name}: compiled code takes it for aligned"
        if grads is not None and kind is not tg.LookupTable:
            parameter.grad = torch.randn_like(parameter)
            place = grads.view(-1)[parameter.storage_offset() :][: parameter.numel()]
            gradient = parameter.grad.flatten()
            collect(owner)
            assert place.equal(gradient), name
            assert parameter.grad is None or kind is tg.AdamScalars, name
            parameter.grad = None  # where compute_ clears it
            collect(owner)
            assert not place.any(), "no gradient, so zeros"
        span = set(
            range(
                parameter.storage_offset(),
                parameter.storage_offset() + tg.aligned(parameter.numel()),
            )
        )
        assert not span & claimed.setdefault(id(owner), set()), f"{name} overlaps another"
        claimed[id(owner)] |= span
    muon = {
        name
        for name, p in model.named_parameters()
        if isinstance(RULES[p.info.role], tg.MuonRule)
    }
    assert muon == {
        name
        for name, p in model.named_parameters()
        if name.split(".")[-1] in ("qkv", "out", "up", "down", "pointer")
    }
    for owner, weights, _ in owners(optimizer):
        assert type(owner) is tg.MatrixBank or len(claimed[id(owner)]) == weights.numel(), (
            "weights without a parameter"
        )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "layers", [[3, 1] * 6, [1, 1] * 9, [2], [3, 1] * 10, [1, 1] * 11, [7, 1, 5]], ids=str
)
def test_groups_deal_matrices_to_ranks(world, layers):
    """Each matrix belongs to one rank, of each group as many to every rank, and each parameter to one group.
    `layers`: matrices of each parameter."""
    owners = 0
    for rank in range(world):
        parameters = [
            tg.make_param("mlp_up" if stacked == 1 else "mlp_down", torch.randn(stacked * 4, 2), (4, 2))
            for stacked in layers
        ]
        bank = tg.MatrixBank(
            parameters, RULES, tg.OptimizerConfig(), tg.Ranks(rank, world, CPU), OPS
        )
        given = torch.cat([p.detach().view(-1, 4, 2) for p in parameters])
        assert bank.weights[:len(given)].equal(given)
        assert not bank.weights[len(given):].any()
        assert len(bank.weights) - len(given) < world
        assert 1 <= len(bank.groups) <= 5
        assert world > 1 or len(bank.groups) == 1
        assert sum(len(g.weights) for g in bank.groups) == len(bank.weights)
        owner_of = {p: group for group in bank.groups for p in group.parameters}
        for p in parameters:
            first, last = (p.view(-1)[at].data_ptr() for at in (0, -1))
            assert owner_of[p].weights.data_ptr() <= first
            assert last <= owner_of[p].weights.view(-1)[-1].data_ptr()
        multipliers = torch.tensor(
            [
                RULES[p.info.role].learning_rate_multiplier
                for p, n in zip(parameters, layers)
                for _ in range(n)
            ]
        )
        bank.weights.zero_()
        bank.weights[:len(multipliers)] = multipliers[:, None, None]
        assert (bank.shard == bank.multiplier).all(), "rates follow matrices"
        bank.weights.zero_()
        bank.shard.fill_(1)
        assert all(
            group.weights.sum() == 8 * len(group.weights) // world for group in bank.groups
        )
        owners = owners + bank.weights
    assert (owners == 1).all()
    assert len(layers) < 4 or world < 4 or len(bank.groups) > 1, "several groups"


def test_multipliers_follow_their_matrices():
    model = tg.GPT(MODEL, OPS, CPU)
    model.reset(0)
    optimizer = tg.Optimizer(model, PRESET.optimizer, tg.Ranks(0, 1, CPU), OPS, 8)
    for parameter in model.parameters():
        if isinstance(rule := RULES[parameter.info.role], tg.MuonRule):
            bank = next(
                b
                for b in optimizer.banks
                if b.weights.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            )
            size = math.prod(parameter.info.matrix_shape)
            mine = slice(
                parameter.storage_offset() // size,
                (parameter.storage_offset() + parameter.numel()) // size,
            )
            assert (bank.multiplier[0, mine] == rule.learning_rate_multiplier).all()
            assert mine.stop - mine.start == parameter.numel() // size
    for owner in optimizer.scalars:
        assert owner.rule is RULES[owner.role]
        assert owner.parameters == [p for p in model.parameters() if p.info.role == owner.role]
        assert len(owner.weights) == sum(tg.aligned(p.numel()) for p in owner.parameters) > 0


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_share_out_everything_once(world):
    """The shards of all ranks, laid side by side, are the whole: nothing twice, nothing left."""
    full = torch.arange(64.0).view(16, 4)
    assert torch.cat([tg.Ranks(r, world, CPU).shard(full) for r in range(world)]).equal(full)
    assert tg.Ranks(1, world, CPU).shard(full).data_ptr() == full[16 // world :].data_ptr(), (
        "a view"
    )


@pytest.mark.slow
def test_the_state_is_complete(corpus, tiny):
    """Everything a training step changes is in Optimizer.state(), so that the hash and the restore see it."""
    trainer = helpers.make_trainer(corpus)
    first = trainer.initialise(1)
    held = {
        f"{type(owner).__name__}.{name}": t
        for owner, _, _ in owners(trainer.optimizer)
        for name, t in vars(owner).items()
        if isinstance(t, torch.Tensor)
    }
    before = {name: t.clone() for name, t in held.items()}
    state = trainer.optimizer.state()
    start = {name: t.clone() for name, t in state.items()}
    for step, batches in enumerate(helpers.all_batches(trainer)):
        trainer.training_step(step, batches)
    trainer.optimizer.average(1.0)
    known = {t.untyped_storage().data_ptr() for t in state.values()}
    changed = {
        name
        for name, t in held.items()
        if not t.equal(before[name]) and t.untyped_storage().data_ptr() not in known
    }
    assert all(name.endswith(("grads", "received", "present")) for name in changed), (
        "but for where gradients come together"
    )
    assert not [name for name, t in state.items() if t.equal(start[name])]
    assert tg.state_hash(state) != first
    assert trainer.initialise(2) != first
    assert trainer.initialise(1) == first


def test_state_hash_sees_values_and_places():
    state = {
        "a": torch.randn(4, 5),
        "b": torch.randn(6).bfloat16(),
        "c": torch.tensor(1.0),
        "long": torch.randn(70_000, 2),
    }
    digest = tg.state_hash(state)
    assert digest == tg.state_hash(dict(reversed(state.items())))
    for change in (
        lambda s: s["a"][2, 3:4].neg_(),
        lambda s: s["b"].copy_(s["b"].flip(0)),
        lambda s: s["c"].add_(1e-7),
        lambda s: s["long"].copy_(s["long"].roll(1 << 16, 0)),
        lambda s: s["long"][-1].neg_(),
        lambda s: s["a"].copy_(s["a"].flip(0)),
        lambda s: s["a"].copy_(s["a"].flip(1)),
    ):
        changed = {name: tensor.clone() for name, tensor in state.items()}
        change(changed)
        assert tg.state_hash(changed) != digest


# ---- sparse tables ---------------------------------------------------------------------------------------------------
def test_sparse_table():
    """Four steps, each of which updates by the gradients of the step before: each role's own rate, decay and second
    moment reach sparse_adam_reference; test_loss.py has that one's own test."""
    rule = tg.AdamRule(20.0, (0.0, 0.9), decay=0.3, sparse=True)
    parameter = tg.make_param("ngram", torch.randn(12, 4))
    want = parameter.detach().double().clone(), torch.zeros(12), torch.zeros(12)
    config = replace(tg.OptimizerConfig(), adam_epsilon=1e-3)
    table = tg.SparseTable([parameter], rule, config, tg.Ranks(0, 1, CPU), OPS, (7, 2))
    table.begin_stage(5)
    late_ids, late_grad = torch.arange(10, dtype=torch.int32).view(5, 2), torch.zeros(5, 4)
    for step in (1, 2, 3, 4):
        ids = torch.randint(12, (5, 2)).int()
        grad = torch.randn(5, 4)
        table.start_step([ids])
        table.receive_grad(grad)
        table.compute_(
            {
                "step": torch.tensor(float(step)),
                "ngram": torch.tensor(0.1 / step),
                "ngram decay": torch.tensor(0.02),
            }
        )
        table.keep()
        rates = float(step), 0.1 / step, 0.02, 0.9, 1e-3, 1.0
        tg.sparse_adam_reference(late_grad.double(), tg.group_ids(late_ids), *want, *rates, pooling=0.5)
        late_ids, late_grad = ids, grad
    assert relative(parameter, want[0]) < 1e-5
    assert table.exp_avg_sq.allclose(want[1])
    assert table.last_step.equal(want[2])


def test_every_gradient_of_a_lookup_updates_once(corpus, tiny, monkeypatch):
    """In their order, though each a step late; but those of a stage's last step are dropped."""
    monkeypatch.setattr(tg, "micro_batch_chunks", lambda *_: 4)
    received, used = [], []
    receive_grad = tg.SparseTable.receive_grad

    def sparse_adam(grad, lookup, *state, **options):
        if grad.any():
            used.append((lookup[0].clone(), grad.clone()))
        else:
            assert lookup[0].unique(return_counts=True)[1].max() <= 2, "no sum of many rows, which would take long"
        tg.sparse_adam_reference(grad, lookup, *state, **options)

    def kept(table, grad, *lookup):
        step = table.under_way
        received.append((step.ids[len(step.grads)].clone(), grad.clone()))
        receive_grad(table, grad, *lookup)

    monkeypatch.setattr(tg.SparseTable, "receive_grad", kept)
    trainer = helpers.make_trainer(corpus, ops=replace(OPS, sparse_adam=sparse_adam))
    trainer.initialise(1)
    helpers.randomise(trainer.model)
    log = tg.RunLog(None)
    tg.timed_loop(trainer, log, PRESET.steps, None)
    log.close()
    steps = list(zip(received[::2], received[1::2]))  # two micro-batches each
    last = {sum(stage.steps for stage in PRESET.stages[:index + 1]) - 1 for index in range(len(PRESET.stages))}
    wanted = [step for number, step in enumerate(steps) if number not in last]
    assert len(used) == len(wanted) > 0
    for (ids, grads), parts in zip(used, wanted):
        assert ids.equal(torch.cat([part for part, _ in parts]))
        assert grads.equal(torch.cat([part for _, part in parts]))


@pytest.mark.fast
def test_rows_that_are_dealt_out_are_not_there_twice(monkeypatch):
    """When their shared memory is made, that of the model's start is free: a rank's part takes most of a GPU."""
    start = np.zeros((8, 4), np.float32)
    reference = weakref.ref(start)
    parameter = tg.make_param("ngram", torch.from_numpy(start))
    del start
    ranks = tg.Ranks(0, 2, CPU)
    ranks.copy_stream = object()
    alive = []

    def shared(tensor):
        alive.append(reference() is not None)
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(ranks, "shared", shared)
    monkeypatch.setattr(ranks, "versions", lambda tensor: [tensor, tensor])
    config = tg.OptimizerConfig()
    table = tg.SparseTable([parameter], dict(config.rules)["ngram"], config, ranks, tg.select_ops(CPU), (7, 2))
    assert alive == [False]
    assert table.weights.data_ptr() == parameter.data_ptr()


def test_plain_decay_is_of_every_parameter(corpus, tiny):
    """cautious_decay reaches matrices, tables, sparse rows, gates and scalars: without it other entries decay, too."""
    moved = []
    rules = tuple(
        (role, replace(rule, decay=0.5) if isinstance(rule, tg.AdamRule) else rule)
        for role, rule in PRESET.optimizer.rules
    )
    for cautious in (True, False):
        config = replace(PRESET.optimizer, rules=rules, cautious_decay=cautious)
        trainer = helpers.make_trainer(corpus, replace(PRESET, optimizer=config))
        trainer.initialise(0)
        helpers.randomise(trainer.model, seed=1)
        trainer.training_step(0, helpers.all_batches(trainer)[0])
        helpers.update_rows(trainer, 0)
        moved.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
    for name, careful in moved[0].items():
        assert careful.numel() <= 4 or not careful.equal(moved[1][name]), name


@pytest.mark.parametrize("pooling", [0.0, 0.2])
def test_pooling_is_the_configurations(pooling):
    rule = tg.AdamRule(20.0, (0.0, 0.9), sparse=True)
    parameter = tg.make_param("ngram", torch.randn(12, 4))
    want = parameter.detach().double().clone()
    config = replace(tg.OptimizerConfig(), ngram_pooling=pooling)
    table = tg.SparseTable([parameter], rule, config, tg.Ranks(0, 1, CPU), OPS, (5, 2))
    ids = torch.randint(12, (5, 2)).int()
    grad = torch.randn(5, 4)
    table.start_step([ids])
    table.receive_grad(grad)
    table.keep()
    table.start_step([ids])
    rates = {"step": 1.0, "ngram": 0.1, "ngram decay": 0.0}
    table.compute_({name: torch.tensor(rate) for name, rate in rates.items()})
    tg.sparse_adam_reference(
        grad.double(), tg.group_ids(ids), want, torch.zeros(12), torch.zeros(12),
        *rates.values(), 0.9, config.adam_epsilon, 1.0, pooling=pooling,
    )  # fmt: skip
    assert relative(parameter, want) < 1e-5


def test_the_softcap_is_the_models(tiny):
    config = replace(MODEL, softcap=tg.Softcap(11.0, 2.0, 3.0))
    documents = tg.pack({0: [np.array([508, 1, 2, 3], np.uint16)]}, config, pin=False).to(CPU)
    model = tg.GPT(config, OPS, CPU)
    geometry = tg.rotary_geometry(PRESET, 0, 8, CPU)
    *_, softcap = model.predictions(documents, geometry, torch.ones(1))
    assert softcap == config.softcap
