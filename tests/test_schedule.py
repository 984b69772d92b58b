"""Schedule values at every border, against numbers worked out by hand from the record's description."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import helpers
from helpers import CPU, tg

pytestmark = pytest.mark.fast

SPEEDRUN = tg.PRESETS["speedrun"]
SPRINT = tg.PRESETS["sprint"]
# Two schedules whose values were worked out by hand; the presets' own may be tuned without touching them.
CONFIG = tg.OptimizerConfig(
    muon_momentum=(0.85, 0.95),
    momentum_warmup_fraction=300 / 2160,
    momentum_cooldown_fraction=50 / 2160,
    muon_learning_rate=0.023,
    adam_learning_rate=0.008,
    cooldown_fraction=0.55,
    final_learning_rate=0.1,
    rules=(
        ("matrix", tg.MuonRule(2.0)),
        ("table", tg.AdamRule(75.0, (0.65, 0.95), decay=0.025, sharded=True)),
        ("lm_head", tg.AdamRule(1.0, (0.5, 0.95), decay=0.75, sharded=True)),
        ("gate", tg.AdamRule(1.0, (0.9, 0.99))),
    ),
)
LONG = replace(SPEEDRUN, optimizer=CONFIG, stages=helpers.three_stages((707, 707, 706), 40))
SHORT_CONFIG = replace(CONFIG, momentum_warmup_fraction=300 / 340, momentum_cooldown_fraction=50 / 340)
SHORT = replace(SPEEDRUN, optimizer=SHORT_CONFIG, stages=helpers.three_stages((112, 111, 112), 5))
# 2120 scheduled steps in thirds and 40 more. Rate: 1, 1.51, 1.93 with the batch; from step 954 = .45 * 2120 a line down
# to .1 at 2120: step 1413 has (707 / 2120) / .55 = .6063465 of the way left, so 1.51 * .6063465 + .1 * .3936535 =
# .9549485. Momentum: .85 + .1 * step / 300; at the end .85 + .1 * (2160 - step) / 50.
AT = {
    # step: (stage, batch, windows, rate, momentum)
    0: (0, 131_072, (128, 384), 1.0, 0.85),
    150: (0, 131_072, (128, 384), 1.0, 0.90),
    299: (0, 131_072, (128, 384), 1.0, 0.9496667),
    300: (0, 131_072, (128, 384), 1.0, 0.95),
    706: (0, 131_072, (128, 384), 1.0, 0.95),
    707: (1, 262_144, (256, 896), 1.51, 0.95),
    954: (1, 262_144, (256, 896), 1.51, 0.95),
    955: (1, 262_144, (256, 896), 1.5087907, 0.95),
    1413: (1, 262_144, (256, 896), 0.9549485, 0.95),
    1414: (2, 393_216, (256, 1408), 1.2080446, 0.95),
    2110: (2, 393_216, (256, 1408), 0.1156947, 0.95),
    2111: (2, 393_216, (256, 1408), 0.1141252, 0.948),
    2119: (2, 393_216, (256, 1408), 0.1015695, 0.932),
    2120: (3, 393_216, (384, 1664), 0.1, 0.93),
    2159: (3, 393_216, (384, 1664), 0.1, 0.852),
}
# 335 scheduled steps (112, 111, 112) and 5 more; the cool-down begins at .45 * 335 = 150.75;
# 222 has (113 / 335) / .55 = .6132972 left.
SHORT_AT = {
    0: (0, 131_072, (128, 384), 1.0, 0.85),
    111: (0, 131_072, (128, 384), 1.0, 0.887),
    112: (1, 262_144, (256, 896), 1.51, 0.8873333),
    150: (1, 262_144, (256, 896), 1.51, 0.90),
    151: (1, 262_144, (256, 896), 1.5080868, 0.9003333),
    222: (1, 262_144, (256, 896), 0.9647490, 0.924),
    223: (2, 393_216, (256, 1408), 1.2124016, 0.9243333),
    290: (2, 393_216, (256, 1408), 0.5469471, 0.9466667),
    291: (2, 393_216, (256, 1408), 0.5370149, 0.947),
    293: (2, 393_216, (256, 1408), 0.5171506, 0.944),
    334: (2, 393_216, (256, 1408), 0.1099322, 0.862),
    335: (3, 393_216, (384, 1664), 0.1, 0.86),
    339: (3, 393_216, (384, 1664), 0.1, 0.852),
}


@pytest.mark.parametrize(
    "preset, step, expected",
    [(p, s, e) for p, table in ((LONG, AT), (SHORT, SHORT_AT)) for s, e in table.items()],
    ids=[f"{p}-{s}" for p, table in (("long", AT), ("short", SHORT_AT)) for s in table],
)
def test_borders(preset, step, expected):
    index, batch, windows, rate, momentum = expected
    assert tg.stage_index(preset, step) == index
    stage = preset.stages[index]
    assert stage.batch_tokens == batch
    assert stage.chunk_tokens * 8 == batch
    assert (stage.short_window_tokens, stage.long_window_tokens) == windows
    assert tg.learning_rate(preset, step) == pytest.approx(rate, abs=2e-7)
    assert tg.muon_momentum(preset, step) == pytest.approx(momentum, abs=2e-7)


def test_lengths():
    assert (LONG.steps, SHORT.steps) == (2160, 340)
    for preset in (SPEEDRUN, SPRINT):
        assert preset.val_attention_windows == (384, 2560)
        assert tg.stage_index(preset, preset.steps) == len(preset.stages)
    assert SPEEDRUN.val_tokens == 10_485_760
    assert SPRINT.val_tokens == 2_097_152
    assert SPRINT.train_tokens <= 95_000_000, "one pass over one shard"


@pytest.mark.parametrize("preset", tg.PRESETS.values(), ids=tg.PRESETS)
def test_every_preset_is_consistent(preset):
    """What holds between a preset's numbers, for the presets that nobody works out by hand."""
    model = preset.model
    assert model.padded_vocabulary % (128 if model.width >= 768 else tg.CHUNKS) == 0
    assert model.padded_vocabulary >= model.vocabulary
    for index, layer in enumerate(model.layers):
        assert layer.skip_from is None or layer.skip_from < index
        assert layer.window in ("short", "long")
    own = [layer.value_embedding for layer in model.layers]
    tables = [table for table in own if table not in (None, tg.NGRAMS)]
    all_tables = set(range(model.value_embeddings))
    assert set(tables) == all_tables or set(tables) < all_tables and model.final_values
    assert len(tables) == len(set(tables)) or preset.name == "seeds", "one table a use, but for the public records'"
    assert sum(stage.steps * stage.batch_tokens for stage in preset.stages) < preset.train_tokens
    for stage in preset.stages:
        assert stage.batch_tokens % (8 * 16) == 0  # 16: the FP8 products need that many tokens
        assert stage.short_window_tokens <= stage.long_window_tokens
        assert not (stage.short_window_tokens | stage.long_window_tokens) % 16, (
            "else Triton compiles another kernel for it"
        )
        assert (
            stage.sampled_classes is None
            or stage.sampled_classes % 128 == 0
            and stage.sampled_classes <= model.padded_vocabulary
        )
        assert len(stage.targets[0]) == len(stage.targets[1])
        assert stage.targets[0][0] == stage.targets[1][0] == 1.0
    assert not any(window % 16 for window in (*preset.val_attention_windows, model.pointer_window_tokens))
    assert preset.stages[-1].targets == ((1.0,), (1.0,)), "it ends on what is validated"
    assert preset.val_tokens % 8 == 0
    assert not any(
        a.extension and not b.extension for a, b in zip(preset.stages, preset.stages[1:])
    )
    rates = [tg.learning_rate(preset, step) for step in range(preset.steps)]
    assert min(rates) >= preset.optimizer.final_learning_rate > 0
    assert max(rates) <= max(s.learning_rate_multiplier for s in preset.stages)


def test_the_preset_itself_is_of_length_one():
    for preset in (LONG, SPEEDRUN, SPRINT):
        assert tg.scaled_preset(preset, 1.0) == preset


@pytest.mark.parametrize("name", tg.PRESETS)
def test_the_length_that_fits(name):
    """The largest in steps of a ten-thousandth; the smallest that --length takes where nothing fits."""
    preset = tg.PRESETS[name]

    def taken(length):
        return sum(stage.steps * stage.batch_tokens for stage in tg.scaled_preset(preset, length).stages)

    for tokens in (taken(0.001), 3_000_000, 243_000_000, taken(1.0), taken(1.0) - 1):
        length = tg.fitting_length(preset, tokens)
        if tokens < taken(0.001):
            assert length == 0.001
        else:
            assert taken(length) <= tokens
            assert length == 100 or taken(round(length + 1e-4, 4)) > tokens
    assert tg.fitting_length(preset, taken(100)) == 100
    assert tg.fitting_length(preset, 0) == 0.001


def test_a_scaled_preset():
    """Stages and extension by hand: 707, 707, 706 and 40 steps, times .1 and times 2."""
    for length, steps in (
        (0.1, [71, 71, 71, 4]),
        (2.0, [1414, 1414, 1412, 80]),
        (0.001, [1, 1, 1, 1]),
    ):
        scaled = tg.scaled_preset(LONG, length)
        assert [stage.steps for stage in scaled.stages] == steps
        assert scaled.optimizer == LONG.optimizer, "whose times are shares of the schedule"
        assert [replace(stage, steps=0) for stage in scaled.stages] == [
            replace(stage, steps=0) for stage in LONG.stages
        ], "nothing else of a stage"
    twice = tg.scaled_preset(LONG, 2.0)
    for fraction in (0, 0.25, 0.5, 0.75):
        step = int(fraction * LONG.steps)
        assert tg.learning_rate(twice, 2 * step) == pytest.approx(tg.learning_rate(LONG, step))
        assert tg.muon_momentum(twice, 2 * step) == pytest.approx(tg.muon_momentum(LONG, step))


@pytest.mark.parametrize("length", [0.001, 0.3337, 1.02, 7.77])
@pytest.mark.parametrize("preset", tg.PRESETS.values(), ids=tg.PRESETS)
def test_a_scaled_preset_opens_enough_shards(preset, length):
    """However its steps are rounded, train_tokens stay as far above what the schedule takes."""
    spare = [
        p.train_tokens - sum(stage.steps * stage.batch_tokens for stage in p.stages)
        for p in (preset, tg.scaled_preset(preset, length))
    ]
    assert spare[0] == spare[1] > 0


def test_the_speedrun_on_webmix():
    """The speedrun, its schedule scaled to nearly one pass over 24 shards, which hold 243.2 M tokens."""
    webmix = tg.PRESETS["speedrun-webmix"]
    assert webmix.model == SPEEDRUN.model
    assert webmix.val_attention_windows == SPEEDRUN.val_attention_windows
    assert [stage.steps for stage in webmix.stages] == [590, 590, 377, 17]
    assert [replace(stage, steps=0) for stage in webmix.stages] == [
        replace(stage, steps=0) for stage in SPEEDRUN.stages
    ]
    assert (
        sum(stage.steps * stage.batch_tokens for stage in webmix.stages)
        == 232_194_048
        < webmix.train_tokens
        <= 243_200_000
    )
    assert webmix.val_tokens == 4_194_304
    assert "webmix" in webmix.data
    assert not webmix.val_tokens % webmix.val_window_tokens


def test_the_narrow_speedrun_on_webmix():
    """Where tokens are free: the same corpus, validation and schedule but for its length, and a narrower model."""
    webmix = tg.PRESETS["speedrun-webmix"]
    narrow = tg.PRESETS["speedrun-webmix-free"]
    own = {name: getattr(webmix, name) for name in ("name", "status", "model", "stages")}
    assert replace(narrow, **own) == webmix
    assert [stage.steps for stage in narrow.stages] == [469, 469, 300, 12]
    for stage, other in zip(narrow.stages, webmix.stages, strict=True):
        assert replace(stage, steps=other.steps) == other
    assert narrow.model.width < webmix.model.width
    assert sum(stage.steps * stage.batch_tokens for stage in narrow.stages) <= 243_200_000
    working = [layer for layer in narrow.model.layers if layer != tg.EMPTY]
    assert working and len(working) < sum(layer != tg.EMPTY for layer in webmix.model.layers)


def test_the_stages_of_the_sprint():
    """Two stages share the first one's tokens: small batches take the first third, 74 of 224 steps' worth. There the
    targets have faded by a third: from .5 towards .3 by .2 / 3, from .25 towards 0 by .25 / 3."""
    small, large, *others = SPRINT.stages
    assert [
        (stage.steps, stage.batch_tokens, stage.learning_rate_multiplier, stage.sampled_classes)
        for stage in SPRINT.stages
    ] == [
        (148, 32_768, 0.55, 6144),
        (150, 65_536, 0.75, 6144),
        (224, 131_072, 1.13, 10_240),
        (215, 196_608, 1.45, 10_240),
        (10, 196_608, 1.45, 10_240),
    ]
    assert small.targets[0] == (1.0, 0.5, 0.25)
    assert small.targets[1] == large.targets[0] == pytest.approx((1.0, 0.5 - 0.2 / 3, 0.25 - 0.25 / 3))
    assert large.targets[1] == (1.0, 0.3, 0.0)
    assert [stage.targets for stage in others] == [
        ((1.0, 0.3), (1.0, 0.0)),
        ((1.0,), (1.0,)),
        ((1.0,), (1.0,)),
    ]


def test_layer_table_of_the_record():
    layers = tg.GPT_SMALL.layers
    assert [i for i, l in enumerate(layers) if l.attention] == [1, 2, 4, 5, 6, 9, 11]
    assert [i for i, l in enumerate(layers) if not l.mlp] == [0, 10]
    assert [i for i, l in enumerate(layers) if l.window == "long"] == [4, 11]
    assert {i: l.skip_from for i, l in enumerate(layers) if l.skip_from is not None} == {7: 4}
    sprint = tg.GPT_SPRINT.layers
    assert [i for i, l in enumerate(sprint) if l.attention] == [2, 4, 6, 9, 11]
    assert [i for i, l in enumerate(sprint) if not l.mlp] == [0, 3, 5, 8, 10]
    assert all(
        [i for i, l in enumerate(table) if l.value_embedding == tg.NGRAMS] == [4, 6]
        for table in (layers, sprint)
    )


def test_averaging():
    """540 steps, the last quarter from 405 on, every fourth: the first weights enter whole, later ones by .1;
    after step 539, at which none enter, 65 % of the way."""
    config = replace(
        CONFIG,
        averaging_fraction=0.25,
        averaging_interval_steps=4,
        averaging_lookback=40 / 540,
        averaged_share=0.65,
    )
    preset = replace(SPEEDRUN, optimizer=config, stages=helpers.three_stages((200, 200, 130), 10))
    found = {step: shares for step in range(540) if any(shares := tg.averaging(preset, step))}
    never = replace(preset, optimizer=replace(config, averaging_fraction=0.0))
    assert not any(any(tg.averaging(never, step)) for step in range(540)), (
        "an average of nothing moves nothing"
    )
    assert found == {405: (1.0, 0.0)} | {step: (0.1, 0.0) for step in range(409, 540, 4)} | {
        539: (0.0, 0.65)
    }


def test_drift_factor():
    """500 steps: from 60 on, and from 380 on a line to 0 after the last."""
    config = replace(CONFIG, drift_factor=0.3, drift_start_fraction=0.12, drift_cooldown_fraction=0.24)
    preset = replace(SPEEDRUN, optimizer=config, stages=helpers.three_stages((200, 200, 90), 10))
    expected = {0: 0.0, 59: 0.0, 60: 0.3, 380: 0.3, 440: 0.15, 499: 0.0025}
    assert {step: tg.drift_factor(preset, step) for step in expected} == pytest.approx(expected)
    for step in (58, 59, 200, 498):
        assert tg.step_rates(preset, step)["next drift"] == tg.step_rates(preset, step + 1)["drift"]
    assert tg.step_rates(preset, 499)["next drift"] == 0, "the weights end without it"


def test_step_rates():
    """Muon's rate is .023 times the schedule;
    Adam's carries .008, its role's multiplier and the bias corrections, the decay the square of the rate."""
    first = tg.step_rates(LONG, 0)
    assert first["muon"] == pytest.approx(0.023)
    assert first["momentum"] == pytest.approx(0.85)
    assert first["table"] == pytest.approx(0.008 * 75 * math.sqrt(1 - 0.95) / (1 - 0.65))
    assert first["table decay"] == pytest.approx(0.36 * 0.025)
    assert first["lm_head"] == pytest.approx(0.008 * math.sqrt(1 - 0.95) / (1 - 0.5))
    assert first["lm_head decay"] == pytest.approx(0.000064 * 0.75)
    assert first["gate"] == pytest.approx(0.008 * math.sqrt(1 - 0.99) / (1 - 0.9))
    assert first["gate decay"] == 0
    later = tg.step_rates(LONG, 707)  # at 1.51 times the rate; update number 708
    assert later["muon"] == pytest.approx(0.023 * 1.51)
    assert "matrix" not in later
    assert later["gate"] == pytest.approx(0.008 * 1.51 * math.sqrt(1 - 0.99**708) / (1 - 0.9**708))
    assert later["lm_head decay"] == pytest.approx((0.008 * 1.51) ** 2 * 0.75)
    assert tg.step_rates(LONG, 1)["table"] == pytest.approx(
        0.6 * math.sqrt(1 - 0.95**2) / (1 - 0.65**2)
    )


@pytest.mark.parametrize(
    "step, weights",
    [
        (0, [1, 0.5, 0.25]),
        (1, [1, 0.5 - 0.2 / 707, 0.25 * 706 / 707]),
        (706, [1, 0.3 + 0.2 / 707, 0.25 / 707]),
        (707, [1, 0.3]),
        (1413, [1, 0.3 / 707]),
        (1414, [1]),
        (2119, [1]),
        (2120, [1]),
        (2159, [1]),
    ],
)
def test_target_weights(step, weights):
    """The third token ahead fades in the first stage, the second in the first two;
    a stage begins where the one before would have ended."""
    assert tg.target_weights(LONG, step) == pytest.approx(weights, abs=1e-9)


def yarn(base, turning, windows):
    """The published formula, one frequency at a time, in exact windows and plain floats."""
    frequencies = [base ** (-j / (turning - 1)) for j in range(turning)]
    scale = 0.1
    for old, new in zip(windows, windows[1:]):
        ratio = Fraction(old, new)
        for j, frequency in enumerate(frequencies):
            rotations = old * frequency / (2 * math.pi)  # turns within the old window
            blend = min(1.0, max(0.0, (rotations - 1) / (32 - 1)))
            frequencies[j] = frequency * (blend + (1 - blend) * float(ratio))
        scale *= 1 + 0.2 * math.log(1 / ratio)
    return frequencies, scale


SCALES = {0: 0.1, 1: 0.11695, 2: 0.12752, 3: 0.13178}  # by stage


@pytest.mark.parametrize("index, scale", SCALES.items())
def test_rotary_geometry(index, scale):
    exact = replace(
        SPEEDRUN, model=replace(SPEEDRUN.model, dtype="float64", key_width=128, attention_scale=0.1)
    )
    tg.rotary_geometry(exact, index, 300, CPU)  # of a process's first cosines by several threads some are 7e-9 off
    geometry = tg.rotary_geometry(exact, index, 300, CPU)
    frequencies, expected_scale = yarn(1024.0, 32, (384, 896, 1408, 1664)[: index + 1])
    assert geometry.scale == pytest.approx(scale, abs=5e-6)
    assert geometry.scale == pytest.approx(expected_scale)
    assert geometry.cos.shape == geometry.sin.shape == (300, 64)
    angle = np.arange(300)[:, None] * np.array(frequencies + [0.0] * 32)
    assert np.abs(geometry.cos.numpy() - np.cos(angle)).max() < 1e-9
    assert np.abs(geometry.sin.numpy() - np.sin(angle)).max() < 1e-9
    stage = SPEEDRUN.stages[index]
    assert geometry.windows == {"short": stage.short_window_tokens, "long": stage.long_window_tokens}
    assert tg.rotary_geometry(SPEEDRUN, index, 10, CPU).cos.dtype == tg.torch.bfloat16


def test_validation_geometry_stretches_nothing():
    final, validation = (
        tg.rotary_geometry(SPEEDRUN, 3, 50, CPU, windows) for windows in (None, (768, 2560))
    )
    assert validation.windows == {"short": 768, "long": 2560}
    assert validation.scale == final.scale
    assert validation.cos.equal(final.cos)
    assert validation.sin.equal(final.sin)


def test_averaging_of_a_short_schedule():
    """39 steps: the last quarter, 9.75 steps, begins at step 30. A fourth step is more than what the average looks
    back over, 2.9: it then becomes the weights, and goes no further."""
    preset = replace(SPEEDRUN, optimizer=CONFIG, stages=helpers.three_stages((12, 12, 12), 3))
    shares = {step: tg.averaging(preset, step) for step in range(39)}
    assert {step: pair for step, pair in shares.items() if any(pair)} == {
        30: (1.0, 0.0),
        34: (1.0, 0.0),
        38: (1.0, 0.65),
    }
