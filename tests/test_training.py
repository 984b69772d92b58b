"""Training steps: eager = compiled, 1 = 2 = 4 processes, accumulation, who sees whom, gradients, and when they leave."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import helpers
from helpers import BOS, CPU, MODEL, PRESET, L, only, read_log, relative, tg

DOUBLE = replace(MODEL, dtype="float64")


def packed(lengths, generator, borders=None):
    """A micro-batch of documents of random tokens."""
    pieces = [np.concatenate([[BOS], generator.integers(0, BOS, length)]).astype(np.uint16) for length in lengths]
    return tg.pack(pieces, borders or len(pieces), max(lengths), MODEL.padded_vocabulary, pin=False).to(CPU)


def random_model(config, ops=None):
    model = tg.GPT(config, ops or tg.select_ops(CPU), CPU)
    helpers.randomise(model)
    return model


# ---- who sees whom ---------------------------------------------------------------------------------------------------
def influence(model, documents, geometry):
    """seen[i, j]: whether the features at i change when token j does. One changed token at a time, in float64."""
    with torch.no_grad():
        base = model.features(documents, geometry)
        columns = []
        for j in range(len(documents.tokens)):
            tokens = documents.tokens.clone()
            tokens[j] = (tokens[j] + 1) % BOS
            changed = model.features(replace(documents, tokens=tokens, range_cache={}), geometry)
            columns.append((changed - base).abs().amax(1) > 0)
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("layers", [MODEL.layers, tg.LAYERS], ids=["tiny table", "record's table"])
def test_no_attention_across_documents_or_into_the_future(tiny, layers):
    """Two slots in one micro-batch, cut documents at both ends: exactly the earlier tokens of one's own document count."""
    model = random_model(replace(DOUBLE, layers=layers, value_embeddings=3))
    slots = [[13, 1, 18], [9, 2, 21]]  # the first document of slot 1 follows directly on the last of slot 0
    documents = packed(sum(slots, []), np.random.default_rng(0), borders=9)
    geometry = tg.rotary_geometry(replace(PRESET, model=DOUBLE), 0, 64, CPU, windows=(30, 40))
    seen = influence(model, documents, geometry)
    owner = torch.repeat_interleave(torch.arange(6), torch.tensor(sum(slots, [])))
    position = torch.arange(64)
    allowed = (owner[:, None] == owner[None]) & (position[:, None] >= position[None])
    assert not (seen & ~allowed).any(), "leaks from (to, from): " + str((seen & ~allowed).nonzero().tolist()[:5])
    assert seen.equal(allowed), "windows as wide as the documents, so all that is allowed is seen"


def test_windows_bound_what_is_seen(tiny):
    """The reach of the network is the sum of its layers' windows, and one for the smear."""
    layers = (L(value_embedding=0), L(window="long"), L(attention=False, skip_from=0), L(backout=True))
    model = random_model(replace(DOUBLE, layers=layers, value_embeddings=1))
    documents = packed([60], np.random.default_rng(1))
    geometry = tg.rotary_geometry(replace(PRESET, model=DOUBLE), 0, 60, CPU, windows=(3, 7))
    distance = torch.arange(60)[:, None] - torch.arange(60)[None]
    assert influence(model, documents, geometry).equal((distance >= 0) & (distance <= 3 + 7 + 3 + 1))


def test_layers_use_what_their_table_says(tiny):
    """Each entry of the table changes the features: nothing in it is ignored."""
    documents = packed([20, 12], np.random.default_rng(2))
    geometry = tg.rotary_geometry(PRESET, 0, 32, CPU, windows=(2, 9))
    def features(change=lambda model: None, **changes):
        layers = list(MODEL.layers)
        layers[5] = replace(layers[5], **changes)
        model = random_model(replace(MODEL, layers=tuple(layers)))
        change(model)
        with torch.no_grad():
            return model.features(documents, geometry)

    base = features()
    assert base.equal(features())
    for name, parameter in random_model(MODEL).named_parameters():
        if name == "head":
            continue

        def zero(model):
            dict(model.named_parameters())[name].detach().fill_(-50.0 if "skip_weight" in name else 0.0)  # a skip passes through a sigmoid

        assert not base.allclose(features(zero)), name
    assert not base.allclose(features(window="short"))


# ---- gradients -------------------------------------------------------------------------------------------------------
def gradients(trainer, monkeypatch, batches, geometry):
    """What one training_step leaves in every .grad before the optimizer would use it."""
    monkeypatch.setattr(trainer.optimizer, "step", lambda *_: None)
    for parameter in trainer.model.parameters():
        parameter.grad.zero_()
    loss = trainer.training_step(0, batches, False, geometry)
    return float(loss), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def plain_gradients(corpus):
    """Mean over the slots of each slot's summed loss, by plain autograd, one slot at a time in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "BOS", BOS)
        stream = tg.TokenStream(corpus, 8000, helpers.VOCABULARY)
        plan = tg.plan_batches(stream, PRESET.stages)
        model, losses = random_model(DOUBLE), []
        geometry = tg.rotary_geometry(replace(PRESET, model=DOUBLE), 0, 97, CPU)
        for slot in range(8):
            pieces = tg.slot_pieces(stream, plan, PRESET.stages[0], 0, slot)
            losses.append(model(tg.pack(pieces, len(pieces), 48, 512, pin=False).to(CPU), geometry))
        names, parameters = zip(*model.named_parameters())
        return float(sum(losses).detach()), dict(zip(names, torch.autograd.grad(sum(losses) / 8, parameters)))


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_accumulation_gives_the_same_gradients(corpus, tiny, monkeypatch, plain_gradients, slots):
    monkeypatch.setattr(tg, "micro_batch_slots", lambda *_: slots)
    trainer = helpers.make_trainer(corpus)
    helpers.randomise(trainer.model)
    batches = helpers.all_batches(trainer)[0]
    assert len(batches) == 8 // slots
    loss, found = gradients(trainer, monkeypatch, batches, trainer.geometries[0])
    expected_loss, expected = plain_gradients
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert max(relative(found[name], expected[name]) for name in expected) < 1e-5, {n: relative(found[n], expected[n]) for n in expected}
    assert min(float(g.norm()) for g in expected.values()) > 0


def test_head_chunks_do_not_matter(tiny):
    """Chunks of the loss are an implementation detail: the same loss and gradients for any size of them."""
    torch.manual_seed(0)
    results = []
    for rows in (7, 64, 4096):
        x, weight = (torch.randn(64, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64).requires_grad_() for i in (1, 2))
        loss = tg.head_loss_reference(x, weight, torch.arange(64) % 64, tg.Softcap(), rows)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    assert all(relative(a, b) < 1e-12 for result in results[1:] for a, b in zip(result, results[0]))


def test_every_parameter_gets_a_gradient_and_keeps_its_buffer(corpus, tiny):
    """From the zero initialisation it takes three updates until the signal has reached everything; no .grad is ever replaced."""
    trainer = helpers.make_trainer(corpus, replace(PRESET, optimizer=replace(PRESET.optimizer, adam_every_steps=1)))
    trainer.initialise(3)
    parameters = dict(trainer.model.named_parameters())
    storage = {name: (p.data_ptr(), p.grad.data_ptr()) for name, p in parameters.items()}
    reached, start = set(), {name: p.detach().clone() for name, p in parameters.items()}
    step_of = trainer.optimizer.step

    def look_and_step(*arguments):
        reached.update(name for name, p in parameters.items() if p.grad.abs().max() > 0)
        step_of(*arguments)

    trainer.optimizer.step = look_and_step
    for step, batches in enumerate(helpers.all_batches(trainer)[:3]):
        trainer.training_step(step, batches, True, trainer.geometries[tg.stage_index(PRESET, step)])
        assert not any(p.grad.any() for p in parameters.values()), "cleared after its use"
    assert reached == set(parameters)
    assert storage == {name: (p.data_ptr(), p.grad.data_ptr()) for name, p in parameters.items()}
    assert not [name for name, p in parameters.items() if p.detach().equal(start[name])]


def test_adam_gradients_wait_for_their_step(corpus, tiny):
    """On a step without Adam the matrices move and the rest stays; its gradients add up for the next step."""
    trainer = helpers.make_trainer(corpus)
    helpers.randomise(trainer.model)
    batches, rules = helpers.all_batches(trainer), dict(PRESET.optimizer.rules)
    matrices = {n for n, p in trainer.model.named_parameters() if isinstance(rules[p.role], tg.MuonRule)}
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.training_step(0, batches[0], False, trainer.geometries[0])
    assert {n for n, p in trainer.model.named_parameters() if not p.detach().equal(before[n])} == matrices
    assert {n for n, p in trainer.model.named_parameters() if p.grad.any()} == set(before) - matrices
    first = trainer.model.embedding.grad.clone()
    trainer.optimizer.step = lambda *_: None
    trainer.training_step(1, batches[1], True, trainer.geometries[0])
    both = trainer.model.embedding.grad.clone()
    trainer.model.embedding.grad.zero_()
    trainer.training_step(1, batches[1], True, trainer.geometries[0])
    assert relative(both, first + trainer.model.embedding.grad) < 1e-5


@pytest.mark.parametrize("slots", [2, 8])
def test_table_gradients_leave_once_during_the_backward_pass(corpus, tiny, monkeypatch, slots):
    """Only on the last micro-batch of an Adam step, each table once, complete, and while others are still being computed."""
    monkeypatch.setattr(tg, "micro_batch_slots", lambda *_: slots)
    trainer = helpers.make_trainer(corpus)
    helpers.randomise(trainer.model)
    events, passes, backward, reduce_, final = [], [], torch.Tensor.backward, tg.AdamTable.reduce_, {}

    def counted_backward(loss, *arguments, **options):
        passes.append("running")
        backward(loss, *arguments, **options)
        passes[-1] = "done"

    def counted_reduce(table):
        events.append((table, len(passes), passes[-1], trainer.model.embedding.grad.clone(), table.grads.clone()))
        reduce_(table)

    monkeypatch.setattr(torch.Tensor, "backward", counted_backward)
    monkeypatch.setattr(tg.AdamTable, "reduce_", counted_reduce)
    step_of = trainer.optimizer.step

    def keep_and_step(*arguments):
        final.update({table: table.grads.clone() for table in trainer.optimizer.tables})
        step_of(*arguments)

    trainer.optimizer.step = keep_and_step
    batches, micro = helpers.all_batches(trainer), 8 // slots
    for step in range(2):
        assert not events, "a step without Adam reduces no table"
        trainer.training_step(step, batches[step], step == 1, trainer.geometries[0])
    assert [(count, state) for _, count, state, _, _ in events] == [(2 * micro, "running")] * len(trainer.optimizer.tables)
    assert {id(table) for table, *_ in events} == {id(table) for table in trainer.optimizer.tables}
    assert all(grads.equal(final[table]) for table, _, _, _, grads in events), "what left was complete"
    (embedding,) = [table for table in final if table.role == "embedding"]
    assert events[0][0].role == "head" and not events[0][3].equal(final[embedding]), "the head's left before the embedding's was there"
    assert not trainer.optimizer.armed


# ---- eager = compiled ------------------------------------------------------------------------------------------------
def three_steps(corpus, ops, preset, validate):
    trainer = helpers.make_trainer(corpus, preset, ops)
    helpers.randomise(trainer.model)
    losses, counts = [], [tg.compiled_graphs()]
    for step, batches in enumerate(helpers.all_batches(trainer)):
        losses.append(trainer.training_step(step, batches, step != 1, trainer.geometries[tg.stage_index(preset, step)]))
        counts.append(tg.compiled_graphs())
    if validate:
        losses += [torch.tensor(trainer.validate(trainer.geometries[0])), torch.tensor(trainer.validate(trainer.final_geometry))]
    return losses, {name: t.clone() for name, t in trainer.optimizer.state().items()}, np.diff(counts).tolist()


def compare(corpus, preset, validate=False):
    """Three steps eager and compiled from the same weights: relative differences, and the graphs that each step compiled.

    The second step has twice the tokens of the first, other windows and other documents; the third begins with new weights.
    """
    torch._dynamo.reset()
    eager = tg.select_ops(CPU)
    expected_losses, expected, _ = three_steps(corpus, eager, preset, validate)
    losses, state, counts = three_steps(corpus, replace(eager, compile=tg.compile_dynamic, mlp=tg.compile_dynamic(tg.relu_squared_mlp)), preset, validate)
    torch._dynamo.reset()
    differences = {name: relative(state[name], expected[name]) for name in expected}
    differences |= {f"loss {i}": relative(a, b) for i, (a, b) in enumerate(zip(losses, expected_losses))}
    return {name: d for name, d in differences.items() if "weights" in name or "loss" in name}, counts


# Steps small beside the weights: orthogonalisation enlarges the rounding of a matrix's weakest directions a thousandfold, and
# Adam's first steps depend on a gradient's sign alone, so where one cancels to rounding noise they go either way.
SHORT = replace(PRESET, stages=(tg.Stage(1, 512, 48, 8, 16), tg.Stage(2, 1024, 32, 12, 32, 1.5)),
                optimizer=replace(PRESET.optimizer, muon_learning_rate=0.005, adam_learning_rate=1e-4))


def test_eager_is_compiled_and_nothing_recompiles(corpus, tiny, monkeypatch):
    """Every feature, traced and made functional, though not through the C++ compiler: one compilation a variant of a region."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="aot_eager", **options))
    differences, counts = compare(corpus, SHORT)
    assert max(differences.values()) < 1e-5, differences
    model = 1 + 4 + 1 + 1 + 1 + 1  # smear; before attention: with x0 as x, a value embedding, none, both it and a skip; after it; into the MLP without it; MLP; end
    optimizer = 2 + 2 + 2  # momentum and update for two shapes of matrices; Adam for two pairs of betas
    assert counts == [model + optimizer, 0, 0]


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
def test_eager_is_compiled_by_inductor(corpus, tiny, monkeypatch):
    """The same through inductor, validation too, for a model and an optimizer of few regions: each takes seconds of C++."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # no pool of workers, each of which would import torch
    layers = (L(value_embedding=0, backout=True), L(attention=False, skip_from=0))
    betas = tuple((role, replace(rule, betas=(0.7, 0.9)) if isinstance(rule, tg.AdamRule) else rule) for role, rule in PRESET.optimizer.rules)
    narrow = replace(SHORT, model=replace(MODEL, layers=layers, value_embeddings=1, mlp_width=32), optimizer=replace(SHORT.optimizer, rules=betas))
    differences, counts = compare(corpus, narrow)
    assert max(differences.values()) < 1e-5, differences
    assert counts == [6 + 3, 0, 0]


# ---- 1 = 2 = 4 processes ---------------------------------------------------------------------------------------------
def outcome(folder, world):
    return [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_processes_agree_with_one(ranked, world):
    """Five steps: weights alike everywhere, shards of the optimizer's state side by side equal to the state of one process."""
    alone, ranks = outcome(ranked, 1)[0], outcome(ranked, world)
    differences = {}
    for name, expected in alone["state"].items():
        parts = [rank["state"][name] for rank in ranks]
        if name.endswith("weights"):
            assert all(part.equal(parts[0]) for part in parts), f"{name} differs between ranks"
            found = parts[0]
        elif parts[0].shape != expected.shape:
            found = torch.cat(parts)
        elif name.endswith("grads"):
            found = sum(parts) / world  # the last step used none of Adam's: they have not been averaged yet
        else:
            found = parts[0]
        assert found.shape == expected.shape
        differences[name] = relative(found, expected)
    assert max(differences.values()) < 1e-5, differences
    assert sum("weights" in name for name in differences) >= 5


@pytest.mark.parametrize("world", [2, 4])
def test_processes_log_the_same_training(ranked, world):
    alone, together = (read_log(next((ranked / f"logs-{w}").glob("*.jsonl"))) for w in (1, world))
    assert [e["kind"] for e in alone] == [e["kind"] for e in together]
    assert [e["step"] for e in only(alone, "step")] == [e["step"] for e in only(together, "step")] == [1, 2, 4, 5]
    for a, b in zip(only(alone, "step"), only(together, "step")):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-5) and a["tokens"] == b["tokens"]
    end, other = alone[-1], together[-1]
    assert end["state"] == other["state"] == "ok"
    assert (end["train_hash"], end["val_hash"]) == (other["train_hash"], other["val_hash"])
    assert other["loss"] == pytest.approx(end["loss"], rel=1e-5)
    assert only(together, "head")[0]["world"] == world
    assert len(list((ranked / f"logs-{world}").iterdir())) == 1
    assert all(rank["loss"] == pytest.approx(end["loss"], abs=1e-6) for rank in outcome(ranked, world))


def test_one_rank_speaks(ranked):
    for world in (2, 4):
        said = [(ranked / f"{world}-{rank}.out").read_text() for rank in range(world)]
        assert "val loss" in said[0] and not any("loss" in text for text in said[1:])


def test_one_rank_communicates_nothing(corpus, tiny, monkeypatch):
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "init_process_group", "barrier", "broadcast"):
        monkeypatch.setattr(tg.dist, name, lambda *_, **__: pytest.fail("communicated with one rank"))
    trainer = helpers.make_trainer(corpus)
    trainer.initialise(0)
    trainer.training_step(1, helpers.all_batches(trainer)[1], True, trainer.geometries[0])
    trainer.validate(trainer.final_geometry)


def test_training_learns(corpus, tiny):
    """Forty steps on text where a token says much about the next: well below the entropy of single tokens (6.2)."""
    preset = replace(PRESET, train_tokens=12_000, stages=(tg.Stage(20, 256, 48, 16, 32), tg.Stage(6, 512, 48, 16, 32)))
    trainer = helpers.make_trainer(corpus, preset)
    trainer.initialise(0)
    start = trainer.validate(trainer.final_geometry)
    for step, batches in enumerate(helpers.all_batches(trainer)):
        trainer.training_step(step, batches, tg.is_adam_step(preset, step), trainer.geometries[tg.stage_index(preset, step)])
    assert start == pytest.approx(np.log(512), abs=0.01)
    assert trainer.validate(trainer.final_geometry) < start - 0.5


def test_equal_stages_share_the_larger_bound():
    """Stages are keys: a schedule may hold one twice, and its first part may have the batches with more documents."""
    trainer = object.__new__(tg.Trainer)
    stage = replace(PRESET.stages[0], steps=2)
    trainer.preset = replace(PRESET, stages=(stage, stage))
    trainer.micro_slots, trainer.warm_pieces = {stage: 2}, {stage: []}
    documents = np.array([[50] * 8] * 2 + [[1] * 8] * 2)
    trainer.plan = tg.Plan(np.zeros_like(documents), documents - 1, 0)
    assert trainer._borders()[stage] >= 2 * 50
