"""Before a run and around it: --check, what fits in which memory, what is near saturation, what a terminal shows."""

from __future__ import annotations

import collections
import re
import shutil
import types
from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

import helpers
import sample
from helpers import CPU, PRESET, only, read_log, tg

GB = 10**9


# ---- --check ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def check(corpus, tiny, tmp_path, capsys):
    """check(options...) -> exit code, the line after those that announce the run, standard error."""
    def call(*options, data=corpus):
        options = "--preset", "tiny", "--data", data, "--log-dir", tmp_path / "logs", *options
        code = tg.main(["--check", *map(str, options)])
        out, err = capsys.readouterr()
        _, device, *rest = out.splitlines()
        assert len(rest) == (code == 0)
        assert not (tmp_path / "logs").exists()
        return types.SimpleNamespace(code=code, line="".join(rest), err=err, device=device)
    return call


@pytest.mark.parametrize(
    "dtype, options, parts",
    [
        ("float32", (), []),
        ("bfloat16", (), ["attention", "head", "mlp"]),
        ("bfloat16", ("--no-fp8", "head"), ["attention", "mlp"]),
        ("bfloat16", ("--no-fp8", "head", "--no-fp8", "mlp"), ["attention"]),
        ("bfloat16", ("--no-fp8",), []),
    ],
)
@pytest.mark.fast
def test_fp8_is_for_bfloat16_models(check, monkeypatch, dtype, options, parts):
    asked = []
    select = tg.select_ops
    monkeypatch.setitem(tg.PRESETS, "tiny", replace(PRESET, model=replace(PRESET.model, dtype=dtype)))
    monkeypatch.setattr(
        tg,
        "select_ops",
        lambda *arguments, **named: asked.append(named["fp8"]) or select(*arguments, **named),
    )
    assert check(*options).code == 0
    assert asked == [parts]


@pytest.mark.parametrize("parts", [(), ("attention",), ("mlp",), ("head",), ("attention", "head", "mlp")])
@pytest.mark.fast
def test_each_part_has_its_own_flag(monkeypatch, parts):
    """What a part's operator multiplies in FP8, the region before it must not write: see NormedInput."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    ops = tg.select_ops(torch.device("cuda"), compile=False, fp8=parts)
    assert (ops.attention_fp8, ops.mlp_fp8) == ("attention" in parts, "mlp" in parts)
    found = {part: "fp8" in ops.names[part] for part in tg.FP8_PARTS}
    assert found == {part: part in parts for part in tg.FP8_PARTS}


@pytest.mark.fast
def test_a_gpu_with_fp8_products_has_them_in_the_head(monkeypatch):
    """Also one without Hopper's TMA, which the other two parts' kernels need."""
    monkeypatch.setattr(tg, "capability", lambda device: (8, 9))
    names = tg.select_ops(torch.device("cuda"), compile=False).names
    assert (names["head"], names["mlp"]) == ("fp8", "bf16")


@pytest.mark.parametrize("version, fast", [((7, 5), False), ((8, 0), True)])
@pytest.mark.fast
def test_gpus_before_bfloat16_get_the_reference(check, monkeypatch, version, fast):
    """And a line says what that costs; on a CPU only the choice can be tested."""
    asked = []
    select = tg.select_ops
    monkeypatch.setattr(tg, "capability", lambda device: version)
    monkeypatch.setattr(
        tg, "select_ops", lambda device, fast, **named: asked.append(fast) or select(device, fast, **named)
    )
    found = check()
    assert found.code == 0
    assert asked == [fast]
    assert (
        f"capability {version}, below the (8, 0) of the fast operators, so slow, attention: " in found.device
    ) != fast


@pytest.mark.fast
def test_check_builds_what_a_start_builds_and_stops(check, tmp_path, monkeypatch):
    """One line; nothing is warmed up, trained or written."""
    made = []
    build = tg.Trainer
    monkeypatch.setattr(tg, "Trainer", lambda *arguments: made.append(build(*arguments)) or made[-1])
    monkeypatch.setattr(
        tg.Trainer if isinstance(tg.Trainer, type) else build, "warm_up", lambda *_: pytest.fail("started")
    )
    found = check("--save", tmp_path / "new" / "model.pt")
    assert found.code == 0
    assert found.err == ""
    assert len(made) == 1
    assert not (tmp_path / "new").exists()
    assert re.fullmatch(r"ok: [\d,]+ of [\d,]+ training tokens in 2 shards, SHA-256 [0-9a-f]{16}; "
                        r"micro-batches of 512, 1,024, 1,024 tokens by stage", found.line)
    assert re.fullmatch(r"1 rank\(s\), .*, no GPU, attention: reference, .*", found.device)


@pytest.mark.fast
def test_check_fails_as_a_start_does(check, corpus, tiny, tmp_path, capsys):
    """The same line and exit code, for what any of both may find."""
    for name in ("x_train_000001.bin", "x_val_000000.bin"):
        (tmp_path / "folders" / name).mkdir(parents=True)
    cases = {
        "train shards: expected ": ("--data", tmp_path),
        "saving ": ("--save", tmp_path),
        f"{tmp_path}/folders/x_train_000001.bin: kind of file: ": ("--data", tmp_path / "folders"),
    }
    for told, options in cases.items():
        found = check(*options)
        assert tg.main(["--preset", "tiny", "--data", str(corpus), *map(str, options)]) == found.code == 2
        assert capsys.readouterr().err == found.err
        assert found.err.startswith(f"train_gpt: {told}")
        assert "; fix: " in found.err
        assert found.err.count("\n") == 1


def test_check_and_start_refuse_too_little_memory(check, corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tg, "room_for_activations", lambda ranks: 1e6)
    found = check()
    assert found.code == 4
    assert found.err.startswith("train_gpt: GPU memory: expected ")
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs")]) == 4
    assert capsys.readouterr().err == found.err


def test_check_and_start_refuse_older_versions_of_torch(check, corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1"))
    assert check().code == 2
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs")]) == 2
    assert (
        capsys.readouterr().err
        == "train_gpt: torch: expected >= 2.11, found 2.10.1; fix: pip install -r requirements.txt\n"
    )


@pytest.mark.parametrize(
    "version, tried", [("2.11.0+cu130", True), ("2.15.1", True), ("2.16.0a0+git", False), ("3.0.0", False)]
)
def test_newer_versions_of_torch_get_a_warning_and_go_on(
    check, corpus, tiny, tmp_path, monkeypatch, capsys, version, tried
):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    fix = "if it fails: pip install -r requirements.txt"
    warning = f"train_gpt: torch {version}: newer than any that was tried; {fix}\n"
    found = check()
    assert (found.code, found.err) == (0, "" if tried else warning)
    arguments = [
        "--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs"),
        "--stop-after", "1", "--eager",
    ]
    assert tg.main(arguments) == 0
    assert capsys.readouterr().err == ("" if tried else warning)
    tg.check_versions(tg.Ranks(1, 2, CPU))
    assert "newer" not in capsys.readouterr().err, "rank 0 says it for all"


@pytest.mark.parametrize("digits", [str, str.upper])
@pytest.mark.parametrize("form", ["  {}\n", "  {}", " *{}\n"], ids=["text", "no newline", "binary"])
def test_check_and_start_compare_sums(check, corpus, tiny, tmp_path, capsys, form, digits):
    """A shard of the right form but other content than SHA256SUMS states."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    name = "tiny_train_000001.bin"
    (folder / "SHA256SUMS").write_text(
        f"{'0' * 64}  other.bin\n"
        f"{digits(tg.hashlib.sha256((folder / name).read_bytes()).hexdigest())}{form.format(name)}"
    )
    assert check(data=folder).code == 0
    raw = bytearray((folder / name).read_bytes())
    raw[-2] ^= 1
    (folder / name).write_bytes(raw)
    found = check(data=folder)
    pattern = rf"train_gpt: .*{name}: SHA-256: expected what SHA256SUMS states, found [0-9a-f]{{64}}; fix: .*\n"
    assert found.code == 2
    assert re.fullmatch(pattern, found.err)
    assert tg.main(["--preset", "tiny", "--data", str(folder), "--log-dir", str(tmp_path / "logs")]) == 2


def test_forced_reference_operators_are_what_a_cpu_has(corpus, tiny, tmp_path, capsys):
    arguments = [
        "--preset", "tiny", "--data", str(corpus), "--seed", "3", "--reference",
        "--log-dir", str(tmp_path),
    ]
    assert tg.main(arguments) == 0
    (log,) = [read_log(path) for path in tmp_path.glob("*.jsonl")]
    assert log[0]["ops"] == tg.select_ops(CPU).names
    assert log[0]["settings"]["reference"] == "True"
    assert "no GPU, attention: reference" in capsys.readouterr().out


@pytest.mark.fast
def test_errors_of_the_device_are_explained():
    ranks = tg.Ranks(0, 1, CPU)
    for error in (
        torch.OutOfMemoryError("CUDA out of memory.\nmore"),
        torch.AcceleratorError("an illegal memory access\n1"),
        type("OutOfResources", (Exception,), {})("out of resource: shared memory"),  # Triton's
        MemoryError("Unable to allocate 48 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ):
        failure = tg.explained(error, ranks)
        assert failure.code == 4
        assert re.fullmatch(r".+: expected .+, found '.+'; fix: .+", str(failure))
    assert tg.explained(RuntimeError("gloo: Connection closed by peer"), ranks) is None, "there is no peer"
    assert tg.explained(ValueError("a bug"), ranks) is None
    assert tg.explained(FileNotFoundError(2, "No such file or directory", "x.bin"), ranks).code == 2


# ---- memory ----------------------------------------------------------------------------------------------------------
FAST = replace(tg.select_ops(CPU), names={"attention": "triton", "mlp": "bf16"})
LARGE = replace(tg.PRESETS["sprint"], stages=helpers.three_stages((2, 2, 2), 1, rates=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("room_gb, recompute, chunks", [
    (900, False, [8, 8, 4, 4]), (90, False, [8, 4, 2, 2]), (60, False, [4, 2, 2, 2]),
    (40, False, [4, 2, 1, 1]), (28, False, [2, 1, 1, 1]),
    (26, True, [4, 2, 2, 2]), (13, True, [2, 1, 1, 1])])
@pytest.mark.fast
def test_what_fits_beside_the_model(room_gb, recompute, chunks):
    """The whole schedule in each memory: fewer batch chunks at a time, and below one chunk layers recomputed."""
    found, tokens = tg.memory_plan(LARGE, FAST, room_gb * GB)
    assert found == recompute
    assert all(393_216 // 8 <= most <= tg.USEFUL_MICRO_BATCH_TOKENS for most in tokens.values())
    assert [tg.micro_batch_chunks(stage, tg.Ranks(0, 1, CPU), most) for stage, most in tokens.items()] == chunks


@pytest.mark.fast
def test_a_sampled_softmax_needs_less():
    """Logits and their gradient take 4 bytes a column of the head that a stage's batch uses."""
    classes = zip(LARGE.stages, (1024, 20_480, 4096, 4096))
    sampled = replace(LARGE, stages=tuple(replace(stage, sampled_classes=count) for stage, count in classes))
    room = 70_000 * (359_000 + 4 * 20_480)
    fitting = [min(room // (359_000 + 4 * count), tg.USEFUL_MICRO_BATCH_TOKENS) for count in (1024, 20_480, 4096, 4096)]
    recompute, tokens = tg.memory_plan(sampled, FAST, room)
    assert not recompute and list(tokens.values()) == fitting and fitting[1] == 70_000
    recompute, tokens = tg.memory_plan(LARGE, FAST, room)
    assert not recompute and set(tokens.values()) == {room // (359_000 + 4 * 50_304)}


@pytest.mark.fast
def test_what_does_not_fit():
    pattern = (
        r"GPU memory: expected 12\.0 GiB beside the model for one batch chunk of 49,152 tokens, found 10\.2 GiB; "
        "fix: .*--preset sprint-small, .*--micro-batch-tokens"
    )
    with pytest.raises(tg.Failure, match=pattern) as caught:
        tg.memory_plan(LARGE, FAST, 11 * GB)
    assert caught.value.code == 4
    window = replace(LARGE, val_window_tokens=10**6)
    with pytest.raises(tg.Failure, match=r"expected 36\.3 GiB beside the model for a window of 1,000,000 tokens of"):
        tg.memory_plan(window, FAST, 38 * GB)


ORDERS = len(tg.NGRAM_MULTIPLIERS)
EDITS = [
    ("model", "key_width", 18), ("model", "padded_vocabulary", helpers.VOCABULARY), ("model", "dtype", "float64"),
    ("model", "padded_vocabulary", 520), ("stage", "batch_tokens", 1032), ("stage", "sampled_classes", 136),
    ("stage", "sampled_classes", 0),
    ("model", "ngram_rows", 3), ("model", "ngram_rows", -5), ("model", "ngram_orders", 0),
    ("model", "ngram_orders", ORDERS + 1),
    # more pieces than there are multipliers, none, and a third of a row of 32 numbers
    ("model", "ngram_pieces", 5), ("model", "ngram_pieces", 0), ("model", "ngram_pieces", 3),
    ("model", "width", 40), ("model", "mlp_width", 72), ("model", "heads", 0),
    ("model", "attention_scale", 4.0), ("model", "pointer_scale", 4.0),
    ("model", "attention_scale", 59.9 / helpers.MODEL.key_width),  # and more when YaRN has stretched it
    ("model", "pointer_width", -4), ("model", "pointer_window_tokens", 0),
    ("model", "layers", (tg.EMPTY,)), ("model", "layers", (tg.Layer(window="medium"),)),
    # of a layer without attention, what would be ignored
    *[("model", "layers", (tg.Layer(attention=False, **{name: 0}),)) for name in ("value_embedding", "attention_from")],
    ("model", "layers", (tg.Layer(attention=False, key_offset=True),)),
    ("model", "layers", (tg.Layer(), replace(tg.EMPTY, skip_from=0))),
    ("optimizer", "cooldown_fraction", 0.0), ("optimizer", "averaging_interval_steps", 0),
    ("optimizer", "averaging_fraction", 1.2),
    ("optimizer", "averaged_share", -0.5),
    ("optimizer", "ngram_pooling", 2.0),
    ("optimizer", "adam_epsilon", 0.0),
    ("optimizer", "second_moment_decay", 1.0),
    ("optimizer", "muon_momentum", (0.85, 1.5)),
    ("optimizer", "muon_learning_rate", -0.02),
    ("optimizer", "final_learning_rate", -1.0),
    ("model", "rotary_base", 0.0),
    ("stage", "learning_rate_multiplier", -1.0),
    ("optimizer", "drift_factor", 1.0), ("optimizer", "drift_cooldown_fraction", 0.0),
    ("optimizer", "rules", tg.OptimizerConfig.rules[1:]),
    *[("optimizer", "rules", (*tg.OptimizerConfig.rules, rule)) for rule in (
        ("ngram", tg.AdamRule(30.0, (0.9, 0.95), sparse=True)),
        ("ngram", tg.AdamRule(30.0, (0.0, 0.95), sharded=True)),
        ("lm_head", tg.AdamRule(1.0, (0.0, 0.95), sparse=True)),
        ("lm_head", tg.MuonRule(1.0)),
        ("lm_head", tg.AdamRule(1.0, (0.5, 0.95))),
        ("lm_head", tg.AdamRule(1.0, (0.5, 0.95), sharded=True, looked_up=True)),
        ("embedding", tg.AdamRule(1.0, (0.5, 0.95), sharded=True)),
        ("pointer", tg.AdamRule(1.0, (0.9, 0.95))),
        ("scalar", tg.AdamRule(1.0, (0.9, 0.95), sharded=True)),
        ("scalars", tg.AdamRule(1.0, (0.9, 0.95))),
        ("scalar", tg.AdamRule(-1.0, (0.9, 0.95))),
        ("scalar", tg.AdamRule(1.0, (0.9, 0.95), decay=-0.1)),
        ("pointer", tg.MuonRule(-2.0)))],
    ("preset", "fp8", ("mlps",)), ("preset", "fp8", "mlp"),
    ("preset", "stages", ()), ("preset", "stages", helpers.PRESET.stages[::-1]),
    ("preset", "val_attention_windows", (-5, -5)), ("preset", "val_tokens", 0), ("preset", "log_every_steps", 0),
    ("stage", "batch_tokens", 500), ("stage", "document_cap_tokens", 0), ("stage", "long_window_tokens", 0),
    ("stage", "targets", ((1.0, 0.5), (1.0,))), ("stage", "targets", ((), ())),
    ("preset", "stages", (replace(helpers.PRESET.stages[0], steps=-1), *helpers.PRESET.stages[1:])),
    # halves, which are no whole numbers
    ("stage", "batch_tokens", 1024 / 2),
    ("stage", "sampled_classes", 256 / 2),
    ("stage", "document_cap_tokens", 48 / 1),
    ("model", "mlp_width", 64 / 1), ("model", "ngram_rows", 1e3), ("model", "pointer_width", 32 / 2),
    ("preset", "val_tokens", 2e3), ("preset", "val_window_tokens", 2e3),
    ("model", "layers", (tg.Layer(), tg.Layer(skip_from=0.0))),
    # other kinds of values
    ("preset", "val_attention_windows", (8, 16, 32)), ("model", "softcap", (23.0, 5.0, 7.5)),
    ("model", "softcap", tg.Softcap(60.0)), ("model", "softcap", tg.Softcap(0.0)),
    ("model", "softcap", tg.Softcap(temperature=0.0)),
    ("model", "attention_scale", -1.0),
    *[("optimizer", "rules", (*tg.OptimizerConfig.rules, ("scalar", tg.AdamRule(1.0, betas))))
      for betas in ((1.0, 0.95), (0.9, 1.0), (0.9, 1.5), (-0.1, 0.9))],
]
TOLD = {
    "layers": "layers|layer [01]: [a-z_]+",
    "heads": r"heads \* key_width",
    "stages": "steps|extension",
    "rules": "rules|rule of [a-z_]+",
}


def test_pieces_of_rows_have_even_widths():
    """Exported rows have two numbers a byte."""
    preset = replace(
        helpers.PRESET,
        fp8=(),
        model=replace(helpers.MODEL, width=36, ngram_pieces=3),
    )
    tg.check_preset(preset)
    with pytest.raises(tg.Failure, match="ngram_pieces: expected 1 to 4 "):
        tg.check_preset(replace(preset, model=replace(preset.model, ngram_pieces=4)))


def edited(part, name, value):
    """The tests' preset with another value: of itself, of a part of it, or of each stage."""
    preset = helpers.PRESET
    change = {name: value}
    if part == "stage":
        change = {"stages": tuple(replace(stage, **change) for stage in preset.stages)}
    elif part != "preset":
        change = {part: replace(getattr(preset, part), **change)}
    return replace(preset, **change)


@pytest.mark.parametrize("part, name, value", EDITS)
def test_an_edited_preset_gets_a_line(monkeypatch, capsys, part, name, value):
    """Each of these hung, crashed, or was ignored."""
    monkeypatch.setitem(tg.PRESETS, "tiny", edited(part, name, value))
    assert tg.main(["--preset", "tiny", "--check"]) == 2
    what = TOLD.get(name, name)
    pattern = rf"train_gpt: (stage 0: )?({what}): expected .*, found .*; fix: change the preset tiny .*\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)


@pytest.mark.parametrize("part, name, value", [
    ("preset", "val_attention_windows", 128), ("stage", "targets", [[1.0, 0.5], [1.0, 0.0]]),
    ("stage", "targets", (1.0, 1.0)), ("optimizer", "rules", dict(tg.OptimizerConfig.rules)),
    ("optimizer", "muon_momentum", 0.9), ("model", "layers", (1, 2)), ("preset", "stages", 5),
])
def test_values_of_another_kind_get_a_line(part, name, value):
    with pytest.raises(tg.Failure, match="preset tiny: expected values of the kinds that the usual ones have, found '"):
        tg.check_preset(edited(part, name, value))


def test_scores_keep_their_sign_where_windows_shrink():
    first, *others = helpers.PRESET.stages
    stages = replace(first, long_window_tokens=4000), *(replace(stage, long_window_tokens=16) for stage in others)
    with pytest.raises(tg.Failure, match="attention_scale: expected scales above 0, where windows shrink too, found -"):
        tg.check_preset(replace(helpers.PRESET, stages=stages))


@pytest.mark.parametrize("name", ["key_width", "head_width", "pointer_width"])
def test_kernels_want_powers_of_two(monkeypatch, name):
    """But not where the reference runs: because it is asked for, or on a GPU that is too old."""
    monkeypatch.setattr(tg, "check_versions", lambda ranks: None)
    preset = replace(helpers.PRESET, model=replace(helpers.PRESET.model, **{name: 48}))
    ranks = types.SimpleNamespace(device=torch.device("cuda"))

    def start(version, *options):
        monkeypatch.setattr(tg, "capability", lambda device: version)
        tg.check_start(tg.parse_arguments(["--preset", "smoke", *options]), preset, ranks)

    with pytest.raises(tg.Failure, match=f"{name}: expected a power of two on a GPU, found 48; fix: change the preset"):
        start((9, 0))
    start((9, 0), "--reference")
    start((7, 5))


@pytest.mark.parametrize("change", [
    {"gate_inputs": 3},
    {"heads": 99},
    {"layers": (tg.Layer(skip_from=1), tg.Layer())},
    {"layers": (tg.Layer(value_embedding=9),)},
    {"value_embeddings": 3, "final_values": False},
])
def test_what_a_model_cannot_read_is_said_before_the_data_are_opened(change):
    preset = replace(helpers.PRESET, model=replace(helpers.PRESET.model, **change))
    names = "gate_inputs|heads . head_width|layer 0: (skip_from|value_emb)|value_embeddings: expected 2,"
    with pytest.raises(tg.Failure, match=names):
        tg.check_preset(preset)


def test_shards_beside_the_script_are_found_from_elsewhere(tmp_path, monkeypatch):
    """But those below the working directory come first, and those that are asked for before them."""
    def folder(*options):
        return tg.data_folder(tg.parse_arguments(["--preset", "smoke", *options]), tg.PRESETS["smoke"])

    beside = tmp_path / "repository" / "data" / "sample"
    beside.mkdir(parents=True)
    monkeypatch.setattr(tg, "__file__", str(tmp_path / "repository" / "train_gpt.py"))
    monkeypatch.chdir(tmp_path)
    assert folder() == beside
    (tmp_path / "data" / "sample").mkdir(parents=True)
    assert folder() == tg.Path("data/sample")
    assert folder("--data", "other") == tg.Path("other")


def test_a_preset_has_the_name_by_which_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setitem(tg.PRESETS, "mine", helpers.PRESET)
    assert tg.main(["--preset", "mine", "--check"]) == 2
    said = "train_gpt: name of the preset: expected mine, found tiny; fix: give it as the field name\n"
    assert capsys.readouterr().err == said


def test_a_role_of_ones_own_wants_a_rule():
    """A parameter that somebody has added, with a role that no rule knows."""
    model = tg.GPT(helpers.MODEL, tg.reference_ops(), torch.device("cpu"))
    model.extra = tg.make_param("extra", torch.zeros(4))
    with pytest.raises(tg.Failure, match="rules: expected one for the role extra, found none; fix: add it to "):
        tg.Optimizer(model, helpers.PRESET.optimizer, tg.Ranks(0, 1, torch.device("cpu")), tg.reference_ops(), 64)


def test_every_preset_passes():
    for preset in tg.PRESETS.values():
        tg.check_preset(preset)


def test_a_stage_of_no_steps_is_left_out():
    stages = helpers.PRESET.stages
    preset = replace(helpers.PRESET, stages=(*stages[:-1], replace(stages[-1], steps=0)))
    assert tg.scaled_preset(preset, 1.0).stages == stages[:-1]


@pytest.mark.fast
def test_the_fullest_gpu_decides(monkeypatch):
    """Of all ranks, which then choose alike; without a GPU there is no limit."""
    ranks = tg.Ranks(0, 3, CPU)
    assert tg.room_for_activations(ranks) == float("inf")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
    ranks.on_gpu = True
    for others, least in (((70 * GB, 40 * GB), 40 * GB), ((70 * GB, 80 * GB), 0.95 * 60 * GB)):
        ranks.gather_objects = lambda own: [own, *others]
        assert tg.room_for_activations(ranks) == pytest.approx(least - tg.LATER_BYTES)


@pytest.mark.fast
def test_the_small_sprint_is_the_sprint_with_fewer_rows():
    """But for a few settings; beside its state a card of 12 GB has 4 GiB left, one of 16 GB 8, one of 24 GB 15."""
    preset = tg.PRESETS["sprint-small"]
    sprint = tg.PRESETS["sprint"]
    model = replace(preset.model, ngram_rows=2**25, layers=sprint.model.layers)
    same = replace(preset, name="sprint", model=model, stages=sprint.stages, val_window_tokens=131_072)
    assert replace(same, status=sprint.status) == sprint
    layers = zip(preset.model.layers, sprint.model.layers)
    assert [i for i, (small, large) in enumerate(layers) if small != large] == [1, 5]
    sizes = [[(stage.steps, stage.batch_tokens) for stage in each.stages] for each in (preset, sprint)]
    assert sizes[0] == sizes[1]
    for room_gib, recompute, largest in ((4, True, 32_768), (8, True, 65_536), (15.8, False, 32_768)):
        found, tokens = tg.memory_plan(preset, FAST, room_gib * 2**30)
        chunks = [tg.micro_batch_chunks(stage, tg.Ranks(0, 1, CPU), most) * stage.chunk_tokens
                  for stage, most in tokens.items()]
        assert (found, max(chunks)) == (recompute, largest)


@pytest.mark.parametrize(
    "tokens, sizes",
    [(1, [64, 128, 128]), (128, [128, 128, 128]), (700, [512, 512, 512]), (10**6, [512, 1024, 1024])],
)
@pytest.mark.fast
def test_micro_batches_by_a_flag(check, monkeypatch, tokens, sizes):
    """At most so many tokens, at least a chunk, whatever the estimate would say."""
    monkeypatch.setattr(tg, "memory_plan", lambda *_: pytest.fail("estimated"))
    found = check("--micro-batch-tokens", tokens)
    assert found.code == 0
    assert found.line.endswith(f"; micro-batches of {', '.join(map('{:,}'.format, sizes))} tokens by stage")


def test_micro_batches_by_a_flag_change_no_token(corpus, tiny, tmp_path):
    ends = []
    for tokens in ("128", "1024"):
        options = ["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path / tokens)]
        assert tg.main([*options, "--micro-batch-tokens", tokens]) == 0
        ends.append(read_log(next((tmp_path / tokens).glob("*.jsonl")))[-1])
    assert ends[0]["train_hash"] == ends[1]["train_hash"]
    assert ends[0]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-5)


def test_recomputing_layers_changes_no_number(corpus, tiny, tmp_path, monkeypatch):
    ends = []
    for recompute in (False, True):
        monkeypatch.setattr(tg, "memory_plan", lambda *_: (recompute, collections.defaultdict(lambda: 10**9)))
        folder = tmp_path / str(recompute)
        assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(folder)]) == 0
        log = read_log(next(folder.glob("*.jsonl")))
        ends.append(([step["train_loss"] for step in only(log, "step")], log[-1]["loss"], log[-1]["train_hash"]))
    assert ends[0] == ends[1]


@pytest.mark.fast
def test_recomputing_keeps_less(corpus, tiny, monkeypatch):
    """Between forward and backward pass only what enters the layers is kept."""
    kept = []
    for recompute in (False, True):
        monkeypatch.setattr(tg, "memory_plan", lambda *_: (recompute, collections.defaultdict(lambda: 10**9)))
        trainer = helpers.make_trainer(corpus)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.setdefault(t.untyped_storage().data_ptr(), t), t)[1], lambda t: t
        ):
            trainer.training_step(0, helpers.all_batches(trainer)[0])
        kept.append(sum(t.nbytes for t in saved.values()))
    assert kept[1] < 0.6 * kept[0]


# ---- what a run reports
# -----------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_fp8_ranges_are_those_of_the_scales():
    scales = {
        "qkv": tg.MlpScales().weight,
        "up": tg.MlpScales().weight,
        "down": tg.MlpScales().weight,
        "lm_head": tg.HeadScales().weight,
    }
    found = {kind: limit for ranges in tg.FP8_PARTS.values() for kind, limit in ranges.items()}
    assert found == {
        kind: pytest.approx(scale * torch.finfo(torch.float8_e4m3fn).max) for kind, scale in scales.items()
    }


SIZES = {"qkv": -3.14, "up": 6.5, "down": 0.5, "lm_head": -3.0}  # of one weight each; all others are below 0.1
WORDS = {"qkv": "3.14 of 7.0", "up": "6.50 of 7.0 (WARNING: near saturation)", "down": "0.50 of 7.0",
         "lm_head": "3.00 of 3.2 (WARNING: near saturation)"}


@pytest.mark.parametrize(
    "parts, kinds",
    [
        ((), []),
        (("head",), ["lm_head"]),
        (("attention",), ["qkv"]),
        (("mlp",), ["up", "down"]),
        (("attention", "head", "mlp"), ["qkv", "lm_head", "up", "down"]),
    ],
)
@pytest.mark.fast
def test_largest_weights(corpus, tiny, monkeypatch, parts, kinds):
    """Of the parts that are FP8, both signs, whichever layer has them;
    from 90 % of the range on, 6.3 and 2.88, with a warning."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    names = tg.select_ops(torch.device("cuda"), compile=False, fp8=parts).names
    said = []
    trainer = helpers.make_trainer(corpus, ops=replace(tg.select_ops(CPU), names=names))
    helpers.randomise(trainer.model, size=0.01)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name in ("blocks.1.qkv", "blocks.3.up", "blocks.6.down", "lm_head"):
                parameter[5, 7] = SIZES[name.split(".")[-1]]
            elif name == "embedding" or name.endswith("out"):
                parameter.fill_(9.0)  # never FP8
    assert tg.largest_weights(trainer, types.SimpleNamespace(say=said.append)) == {
        kind: pytest.approx(abs(SIZES[kind])) for kind in kinds
    }
    assert said == [f"largest FP8 weight of {kind}: {WORDS[kind]}" for kind in kinds]


def test_largest_weights_are_logged_at_the_end(corpus, tiny, tmp_path, monkeypatch, capsys):
    """Of the final weights, past the clock; nothing where nothing is FP8."""
    ops = tg.select_ops(CPU)
    ends = []
    for names in (ops.names, ops.names | {"mlp": "fp8"}):
        monkeypatch.setattr(tg, "select_ops", lambda *_, names=names, **__: replace(ops, names=names))
        folder = tmp_path / str(len(ends))
        arguments = [
            "--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir",
            str(folder), "--save", str(folder / "model.pt"),
        ]
        assert tg.main(arguments) == 0
        ends.append((helpers.read_log(next(folder.glob("*.jsonl")))[-1], capsys.readouterr().out))
    assert ends[0][0]["largest_weights"] == {}
    assert "FP8" not in ends[0][1]
    weights = sample.load_model(folder / "model.pt", CPU)[0].state_dict()
    largest = {
        kind: max(float(w.abs().max()) for name, w in weights.items() if name.endswith(f".{kind}"))
        for kind in ("up", "down")
    }
    assert ends[1][0]["largest_weights"] == largest
    assert min(largest.values()) > 0
    assert all(f"\nlargest FP8 weight of {kind}: {largest[kind]:.2f} of 7.0\n" in ends[1][1] for kind in ("up", "down"))
    assert ends[0][0]["loss"] == ends[1][0]["loss"]


# ---- what one sees ---------------------------------------------------------------------------------------------------
def test_a_terminal_gets_a_bar(corpus, tiny, tmp_path, monkeypatch, capsys):
    start = tg.RunLog.__init__
    monkeypatch.setattr(
        tg.RunLog,
        "__init__",
        lambda log, *arguments, **options: (
            start(log, *arguments, **options),
            setattr(log, "terminal", True),
        )[0],
    )
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    bars = re.findall(r"\n\[(#* *)\] +(\d+)%, (\d+) s left\r\033\[K", out)
    assert [(len(bar.rstrip()), len(bar), int(percent)) for bar, percent, _ in bars] == [
        (5, 40, 12),
        (10, 40, 25),
        (30, 40, 75),
        (40, 40, 100),
    ]
    assert bars[-1][2] == "0"
    assert out.endswith(".jsonl\n")


def test_no_bar_elsewhere_and_lines_are_aligned(corpus, tiny, tmp_path, capsys):
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert "\r" not in out
    assert "\033" not in out
    assert len(steps) == 4
    assert len({line.index("train loss") for line in steps}) == 1
    assert re.search(r"\nval loss \d\.\d{4} after .*\n[\d,]+ tokens/s; log: .*\.jsonl\n$", out)
