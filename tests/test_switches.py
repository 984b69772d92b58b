"""The parts that a preset can leave out by one value: each trains without it, alone and all together."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import helpers
import sample
from helpers import BOS, CPU, MODEL, PRESET, relative, tg

SWITCHES = {
    "no pointer": {"pointer_width": 0},
    "no n-grams": {"ngram_rows": 0},
    "no longest suffix match": {"longest_suffix_match": False},
    "no averages": {"averaged_share": 0.0},
    "whole rows": {"ngram_pieces": 1},
    "no pooling": {"ngram_pooling": 0.0},
    "no taps": {"mlp_taps": False},
    "no final values": {"final_values": False},
    "Turbo-Muon": {"orthogonalization": "turbo"},
    "five-step Polar Express": {"orthogonalization": "polar-express-5"},
    "first Muon": {"orthogonalization": "quintic", "nesterov": False, "normuon": False, "scale_tall_updates": True},
    "NorMuon's short lines": {"normuon_long_side": False},
    "plain decay": {"cautious_decay": False},
}
SWITCHES["no table"] = SWITCHES["no n-grams"] | SWITCHES["no longest suffix match"]
SWITCHES["everything off"] = {
    name: value for switch in SWITCHES.values() for name, value in switch.items()
}


def switched(name, preset=PRESET, **more):
    """The preset with a switch, each value of it in whichever configuration has such a field."""
    def changed(config):
        fields = {field.name for field in dataclasses.fields(config)}
        return replace(
            config, **{key: value for key, value in SWITCHES[name].items() if key in fields}
        )

    return replace(preset, model=changed(preset.model), optimizer=changed(preset.optimizer), **more)


each_switch = pytest.mark.parametrize("name", SWITCHES)


def packed(preset, length=40, **options):
    random = np.random.default_rng(3)
    piece = np.concatenate([[BOS], random.integers(0, 9, length)]).astype(np.uint16)
    return tg.pack({0: [piece]}, preset.model, pin=False, **options).to(CPU)


def check(model):
    tg.check_preset(replace(tg.PRESETS["smoke"], model=model))


# ---- what is left out ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inputs", [-2, 0, 7, 34])
def test_gates_read_an_even_number_of_channels(inputs):
    """Of the stream, or half of them of the value embedding."""
    model = replace(MODEL, gate_inputs=inputs)
    with pytest.raises(tg.Failure, match="gate_inputs: expected an even number up to 32, found"):
        check(model)


@pytest.mark.parametrize("table", [-2, 2])
def test_a_value_embedding_that_there_is_not(table):
    model = replace(MODEL, layers=(*MODEL.layers[:-1], tg.Layer(value_embedding=table)))
    said = f"layer 6: value_embedding: expected None, NGRAMS or below value_embeddings, 2, found {table}"
    with pytest.raises(tg.Failure, match=said):
        check(model)


def test_heads_wider_than_the_stream_get_a_line():
    """No value embedding then has a channel for every head's value, which the kernels take for granted."""
    model = replace(MODEL, heads=MODEL.width // MODEL.head_width + 1)
    with pytest.raises(
        tg.Failure,
        match=f"heads .*at most the width, {MODEL.width}, found {model.attention_width}; fix: change the preset",
    ):
        check(model)


# U-Net skips from every layer of the first half to every layer of the second, and one layer that two others read.
SIX_SKIPS = tuple(
    tg.Layer(value_embedding=index % 3 if index < 3 else None) for index in range(6)
) + tuple(tg.Layer(attention=index != 7, skip_from=11 - index) for index in range(6, 12))


def test_six_skips_begin_at_minus_one_and_a_half_and_learn(corpus, tiny):
    """test_training.py has the formula; here every pair of layers reads and is read, in a step of training."""
    preset = replace(PRESET, model=replace(MODEL, layers=SIX_SKIPS, value_embeddings=3))
    trainer = helpers.make_trainer(corpus, preset)
    trainer.initialise(0)
    gates = {name: p for name, p in trainer.model.named_parameters() if name.endswith("skip_weight")}
    assert {name: float(gate) for name, gate in gates.items()} == {
        f"blocks.{index}.skip_weight": -1.5 for index in range(6, 12)}

    helpers.randomise(trainer.model, seed=1)
    before = {name: float(gate) for name, gate in gates.items()}
    trainer.training_step(0, helpers.all_batches(trainer)[0])
    assert all(float(gate) != before[name] for name, gate in gates.items())


@pytest.mark.parametrize(
    "source, found", [(0, "an empty layer"), (4, "itself"), (5, "a later layer"), (9, "no layer")]
)
def test_a_skip_from_nowhere_is_one_line(source, found):
    layers = (tg.EMPTY, tg.Layer(), tg.MLP_ONLY, tg.Layer(), tg.Layer(skip_from=source), tg.Layer())
    with pytest.raises(
        tg.Failure,
        match=f"layer 4: skip_from: expected an earlier layer that is not empty, of 1, 2, 3, found {source}; fix: ",
    ):
        check(replace(MODEL, layers=layers))


def test_an_unknown_orthogonalization_is_one_line():
    model = tg.GPT(MODEL, tg.select_ops(CPU), CPU)
    known = "polar-express, polar-express-5, turbo, quintic"
    with pytest.raises(tg.Failure, match=f"orthogonalization: expected one of {known}, found newton"):
        tg.Optimizer(model, tg.OptimizerConfig(orthogonalization="newton"), tg.Ranks(0, 1, CPU), tg.select_ops(CPU), 8)


def test_the_preset_of_the_ordered_systems():
    """It is made of values: what it names is on, and what came later is off."""
    preset = tg.PRESETS["seeds"]
    model = tg.GPT(preset.model, tg.select_ops(CPU), torch.device("meta"))
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert not names & {"ngram", "pointer", "mlp_taps"}
    assert sum(layer.skip_from is not None for layer in preset.model.layers) == 6
    assert sum(layer.value_embedding is not None for layer in preset.model.layers) == 6
    assert len(model.value_embeddings) == 3
    assert preset.model.dtype == "bfloat16"
    assert preset.fp8 == ()
    assert all(stage.sampled_classes is None for stage in preset.stages)
    config = preset.optimizer
    assert (config.orthogonalization, config.normuon, config.cautious_decay) == ("turbo", True, True)
    sprint = tg.PRESETS["sprint"]
    assert [s.batch_tokens * s.steps for s in preset.stages] == [
        s.batch_tokens * s.steps for s in sprint.stages
    ]


@each_switch
def test_parameters_and_state_are_gone(name):
    model = tg.GPT(switched(name).model, tg.select_ops(CPU), CPU)
    optimizer = tg.Optimizer(
        model, switched(name).optimizer, tg.Ranks(0, 1, CPU), tg.select_ops(CPU), 8
    )
    names = {n for n, _ in model.named_parameters()}
    off = SWITCHES[name]
    hashed = 0 if "ngram_rows" in off else 1024
    suffix = 0 if "longest_suffix_match" in off else 3 * 512 + 32
    assert ("pointer" in names) == ("pointer_width" not in off)
    assert ("ngram" in names) == (hashed + suffix > 0)
    assert model.config.table_rows == hashed + suffix
    pieces = off.get("ngram_pieces", 2)
    assert not hashed + suffix or model.ngram.shape == (pieces * (hashed + suffix), MODEL.width / pieces)
    assert {n.rpartition(".")[2] for n in names if n.endswith("taps")} == (
        set() if "mlp_taps" in off else {"mlp_taps"}
    )
    assert len(model.final_gate) == 1 + (hashed + suffix > 0) + 3 * off.get("final_values", True)
    # The last layer's values are the n-grams, where there are any: then it has a second gate for each head.
    assert len(model.blocks["6"].gate) == (MODEL.heads * 2 if hashed else MODEL.heads)
    assert any(key.endswith("average") for key in optimizer.state()) == ("averaged_share" not in off)
    banks = [bank for bank in optimizer.banks if bank.second_moment is not None]
    assert bool(banks) == off.get("normuon", True)
    assert bool(optimizer.averaged) == ("averaged_share" not in off)
    assert bool(optimizer.sparse) == (hashed + suffix > 0)


@each_switch
def test_the_loader_prepares_only_what_is_read(name):
    off = SWITCHES[name]
    full, part = [packed(preset, sampled_classes=128) for preset in (PRESET, switched(name))]
    orders = full.ngrams.shape[1] - 1  # in the columns before that of the longest suffix match
    kept = [] if "ngram_rows" in off else list(range(orders))
    kept += [] if "longest_suffix_match" in off else [orders]
    pieces = off.get("ngram_pieces", 2)
    shift = 1024 if "ngram_rows" in off else 0
    assert part.ngrams.shape == (pieces * 40, len(kept))
    for column, at in enumerate(kept):
        # of a hashed row, the first piece lies among the first pieces of others
        match = at == orders
        first = full.ngrams[::2, at] // (2 if match else 1)
        found = part.ngrams[::pieces, column]
        assert (found // pieces if match else found).equal(first - shift * match)
    assert (int(part.classes[0, 0]) == MODEL.vocabulary) == ("pointer_width" not in off), (
        "the copy token is a class only for a pointer"
    )
    assert int(full.num_always[0] - part.num_always[0]) == ("pointer_width" in off)
    assert part.classes[0, part.class_index.long()].equal(full.classes[0, full.class_index.long()])


# ---- training --------------------------------------------------------------------------------------------------------
@each_switch
def test_training_learns(corpus, tiny, name):
    preset = switched(
        name,
        train_tokens=12_000,
        stages=(tg.Stage(12, 256, 48, 16, 32, sampled_classes=256), tg.Stage(4, 512, 48, 16, 32)),
    )
    trainer = helpers.make_trainer(corpus, preset)
    trainer.initialise(0)
    start = trainer.validate(trainer.final_geometry)
    for step, batches in enumerate(helpers.all_batches(trainer)):
        assert math.isfinite(trainer.training_step(step, batches))
        if any(shares := tg.averaging(preset, step)):
            trainer.optimizer.average(*shares)
    trainer.optimizer.gather()
    assert trainer.validate(trainer.final_geometry) < start - 0.22
    assert all(tensor.isfinite().all() for tensor in trainer.optimizer.state().values())


@pytest.mark.skipif(bool(helpers.INDUCTOR_LACKS), reason=f"inductor needs {helpers.INDUCTOR_LACKS}")
def test_compiled_steps_are_eager_ones(corpus, tiny):
    """Everything off: regions without the table and the pointer, for a model of few of them, as each takes seconds of
    C++. Attention with and without a value embedding, and an MLP alone with a skip."""
    layers = (tg.Layer(value_embedding=0), tg.Layer(mlp=False), tg.Layer(attention=False, skip_from=0))
    preset = switched("everything off")
    preset = replace(preset, model=replace(preset.model, layers=layers, value_embeddings=1))
    losses = []
    for compile in (False, True):
        ops = tg.select_ops(CPU)
        if compile:
            ops = replace(ops, compile=tg.compile_dynamic)
        trainer = helpers.make_trainer(corpus, preset, ops)
        trainer.initialise(1)
        losses.append(
            [
                float(trainer.training_step(step, batches))
                for step, batches in enumerate(helpers.all_batches(trainer))
            ]
        )
        losses[-1].append(trainer.validate(trainer.final_geometry))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_two_ranks_train_as_one(corpus, tmp_path):
    """Everything off, through main(): logged, validated, the same parameters."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, __file__, str(corpus), str(tmp_path)],
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + "".join(
        path.read_text() for path in sorted(tmp_path.glob("*.out"))
    )
    alone, first, second = (torch.load(tmp_path / f"{ranks}.pt") for ranks in ("1-0", "2-0", "2-1"))
    assert alone["loss"] == pytest.approx(first["loss"], rel=1e-5)
    assert first["loss"] == second["loss"]
    compared = 0
    for name, expected in alone["state"].items():
        if name.endswith("weights"):
            found = first["state"][name][:len(expected)]
            # Gates begin at zero: all that they are is a few updates, with the rounding of these.
            assert relative(found, expected[:len(found)]) < 5e-5, name
            compared += 1
    assert compared >= 4


# ---- what a saved model says -----------------------------------------------------------------------------------------
@each_switch
def test_saved_loaded_and_sampled(corpus, tiny, tmp_path, name):
    """A file of such a model is read again, its loss is the trainer's,
    and next_token's probabilities are those of the loss and add up."""
    preset = switched(name)
    trainer = helpers.make_trainer(corpus, preset)
    trainer.initialise(2)
    helpers.randomise(trainer.model, size=0.1)
    loss = trainer.validate(trainer.final_geometry)
    sample.save_model(tmp_path / "model.pt", trainer, loss, seed=2)
    model, content = sample.load_model(tmp_path / "model.pt", CPU)
    assert sample.evaluate_model(model, content, corpus)[0] == pytest.approx(loss, rel=1e-5)

    geometry = sample.saved_geometry(content, model, 60)
    whole = packed(preset, 40)
    cut = packed(preset, 39)
    p = sample.next_token(model, whole, geometry)
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert (p >= 0).all()
    last = float(model.evaluate(whole, geometry) - model.evaluate(cut, geometry))  # the loss of the last target
    assert cut.tokens.equal(whole.tokens[:-1])
    assert math.exp(-last) == pytest.approx(float(p[int(whole.class_index[-1])]), rel=1e-3)


def growing(path, prompt, length):
    """(next_tokens', a recomputation's) probabilities of a document that grows from `prompt` tokens to `length`,
    its ids, a model and its geometry."""
    (model, content), (whole, _) = (sample.load_model(path, CPU) for _ in range(2))
    geometry = sample.saved_geometry(content, model, length + 1)
    random = np.random.default_rng(5)
    ids = [BOS, *random.integers(0, 9, prompt - 1).tolist()]
    pairs = []
    for p in sample.next_tokens(model, geometry, ids):
        document = tg.pack(
            {0: [np.array([*ids, BOS], dtype=np.uint16)]}, whole.config, pin=False
        ).to(CPU)
        pairs.append((p, sample.next_token(whole, document, geometry)))
        if len(ids) == length:
            return pairs, ids, whole, geometry
        # Every other token is the likeliest, the others keep the document from repeating one.
        ids.append(int(p[:BOS].argmax()) if len(ids) % 2 else int(random.integers(0, 9)))


def test_a_model_without_a_table_is_saved_where_rows_are_dealt_out(corpus, tiny, tmp_path, monkeypatch):
    """No rank has a part of a table then. This failed after the whole training."""
    model = replace(helpers.MODEL, ngram_rows=0, longest_suffix_match=False, layers=helpers.MODEL.layers[:-1])
    trainer = helpers.make_trainer(corpus, replace(helpers.PRESET, model=model))
    helpers.randomise(trainer.model, size=0.1)
    monkeypatch.setattr(tg.Ranks, "deals_rows", True)
    monkeypatch.delattr(tg.Ranks, "versions")
    sample.save_model(tmp_path / "model", trainer, 1.0, seed=2)
    loaded, _ = sample.load_model(tmp_path / "model", CPU)
    assert loaded.lm_head.equal(trainer.model.lm_head)


@each_switch
@pytest.mark.parametrize("prompt", [1, pytest.param(30, marks=pytest.mark.fast)])
def test_remembered_keys_and_values_change_nothing(corpus, tiny, tmp_path, monkeypatch, name, prompt):
    """next_tokens' probabilities are those of the whole document, computed again,
    past both windows of attention and the pointer's, and those of the loss."""
    monkeypatch.setattr(sample, "BOS", BOS)
    preset = switched(name)
    preset = replace(preset, model=replace(preset.model, pointer_window_tokens=37))
    trainer = helpers.make_trainer(corpus, preset)
    helpers.randomise(trainer.model, size=0.2)
    sample.save_model(tmp_path / "model", trainer, 1.0, seed=0)
    assert preset.val_attention_windows == (16, 48)
    length = 56
    pairs, ids, model, geometry = growing(tmp_path / "model", prompt, length)
    assert len(pairs) == length + 1 - prompt
    assert max(float(found.max()) for found, _ in pairs) > 0.01
    for found, expected in pairs:
        assert float((found - expected).abs().max()) < 1e-6
        assert found.argmax() == expected.argmax()

    def loss(stop):
        document = tg.pack(
            {0: [np.array(ids[:stop], dtype=np.uint16)]}, model.config, pin=False
        ).to(CPU)
        return float(model.evaluate(document, geometry))

    start = loss(prompt) if prompt > 1 else 0.0
    told = -sum(math.log(found[token]) for (found, _), token in zip(pairs, ids[prompt:]))
    assert told == pytest.approx(loss(length) - start, rel=1e-5)


# ---- decay -----------------------------------------------------------------------------------------------------------
def plain(weight, update, shrink):
    """AdamW's decoupled decay, where the share to shrink by may differ by weight."""
    return (1 - shrink) * weight - update


@pytest.mark.parametrize("cautious", [True, False])
def test_decay_of_adam(cautious):
    generator = torch.Generator().manual_seed(0)
    weight, gradient, mean, square = torch.randn(4, 8, 6, generator=generator)
    start = weight.clone()
    square = square.abs()
    m = 0.9 * mean + 0.1 * gradient
    v = 0.95 * square + 0.05 * gradient**2
    rate = torch.tensor(0.01)
    decay = torch.tensor(0.1)
    tg.adam_reference(
        weight, gradient[None], mean, square, rate, decay, 0.9, 0.95, 1e-8, cautious=cautious
    )
    update = 0.01 * m / (v.sqrt() + 1e-8)
    shrinking = update * start > 0
    expected = plain(start, update, 0.1 * shrinking if cautious else 0.1)
    assert relative(weight, expected) < 1e-6
    assert 10 < shrinking.sum() < 38


@pytest.mark.parametrize("cautious", [True, False])
def test_decay_of_normuon(cautious):
    generator = torch.Generator().manual_seed(1)
    weight, update = torch.randn(2, 3, 8, 6, generator=generator)
    start = weight.clone()
    multiplier = torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    moment = update.square().mean(-1, keepdim=True)  # as the update has it already: all lines are divided alike
    tg.normuon_update(
        update, weight, None, moment.clone(), multiplier, torch.tensor(0.02), 1.5, 0.9, cautious
    )
    eta = 0.02 * multiplier
    shrinking = update * start >= 0
    scaled = update / moment.sqrt()
    scaled *= update.norm(dim=(-2, -1), keepdim=True) / scaled.norm(dim=(-2, -1), keepdim=True)
    expected = plain(start, eta * scaled, 1.5 * 0.02 * eta * (shrinking if cautious else 1))
    assert relative(weight, expected) < 1e-6
    assert 30 < shrinking.sum() < 114


@pytest.mark.parametrize("cautious", [True, False])
def test_decay_of_sparse_adam(cautious):
    """The reference, by hand for one row; test_loss.py has the kernel against it."""
    weights = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    square = torch.tensor([4.0, 9.0])
    last = torch.tensor([1.0, 0.0])
    lookup = tg.group_ids(torch.tensor([[0], [0]], dtype=torch.int32))
    gradient = torch.tensor([[1.0, 1.0], [2.0, 3.0]])
    step = torch.tensor(3.0)
    rate = torch.tensor(0.5)
    shrink = torch.tensor(0.1)
    tg.sparse_adam_reference(
        gradient, lookup, weights, square, last, step, rate, shrink, 0.9, 1e-8, 1.0, cautious=cautious)
    v = 0.9**2 * 4.0 + 0.1 * (3.0**2 + 4.0**2) / 2
    update = [0.5 * g / math.sqrt(v) for g in (3.0, 4.0)]
    decay = [0.1 * 1.0, 0.0 if cautious else 0.1 * -2.0]  # the update shrinks the first weight, not the second
    assert weights[0].tolist() == pytest.approx(
        [1.0 - decay[0] - update[0], -2.0 - decay[1] - update[1]], rel=1e-5
    )
    assert weights[1].tolist() == [3.0, 4.0]
    assert square.tolist() == pytest.approx([v, 9.0])


def test_decay_of_every_parameter(corpus, tiny):
    """One step with decay and one without, of all roles:
    only entries that the update shrinks decay, in every parameter of many some."""
    start, moved = None, []
    for decay in (0.0, 0.5):
        rules = tuple(
            (role, replace(rule, decay=decay) if isinstance(rule, tg.AdamRule) else rule)
            for role, rule in PRESET.optimizer.rules
        )
        optimizer = replace(PRESET.optimizer, rules=rules, muon_weight_decay=decay)
        trainer = helpers.make_trainer(corpus, replace(PRESET, optimizer=optimizer))
        trainer.initialise(0)
        helpers.randomise(trainer.model, seed=1)
        start = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.training_step(0, helpers.all_batches(trainer)[0])
        helpers.update_rows(trainer, 0)
        moved.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
    for name, before in start.items():
        plain_step, decayed = (after[name] for after in moved)
        shrinking = (before - plain_step) * before > 0
        assert decayed[~shrinking].equal(plain_step[~shrinking]), name
        assert before.numel() <= 4 or not decayed.equal(plain_step), (
            f"{name}: matrices, tables, sparse rows, gates and scalars"
        )


if __name__ == "__main__":
    helpers.PRESET = switched("everything off")
    sys.exit(helpers.fork_worlds(Path(sys.argv[1]), Path(sys.argv[2]), "", (1, 2)))
