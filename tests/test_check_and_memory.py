"""Before a run and around it: --check, what fits in which memory, the throughput it reports, what a terminal shows."""

from __future__ import annotations

import re
import shutil
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.torch_version import TorchVersion

import helpers
from helpers import CPU, PRESET, only, read_log, tg

GB = 10**9


# ---- --check ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def check(corpus, tiny, tmp_path, capsys):
    """check(options...) -> exit code, {item: (mark, text)}, standard error."""
    def call(*options, data=corpus):
        code = tg.main(["--check", "--preset", "tiny", "--data", str(data), "--log-dir", str(tmp_path / "logs"), *map(str, options)])
        out, err = capsys.readouterr()
        rows = [re.fullmatch(r"(ok|FAIL) +(\w+) +(.+)", line) for line in out.splitlines()[2:]]
        assert all(rows), out
        return types.SimpleNamespace(code=code, items={row[2]: (row[1], row[3]) for row in rows}, err=err, device=out.splitlines()[1])
    return call


@pytest.mark.parametrize("dtype, options, parts", [
    ("float32", (), []), ("bfloat16", (), ["attention", "head", "mlp"]), ("bfloat16", ("--no-fp8", "head"), ["attention", "mlp"])])
@pytest.mark.fast
def test_fp8_is_for_bfloat16_models(check, monkeypatch, dtype, options, parts):
    asked, select = [], tg.select_ops
    monkeypatch.setitem(tg.PRESETS, "tiny", replace(PRESET, model=replace(PRESET.model, dtype=dtype)))
    monkeypatch.setattr(tg, "select_ops", lambda *arguments, **named: asked.append(named["fp8"]) or select(*arguments, **named))
    assert check(*options).code == 0 and asked == [parts]


@pytest.mark.parametrize("version, fast", [((7, 5), False), ((8, 0), True)])
@pytest.mark.fast
def test_gpus_before_bfloat16_get_the_reference(check, monkeypatch, version, fast):
    """And a line says what that costs; on a CPU only the choice can be tested."""
    asked, select = [], tg.select_ops
    monkeypatch.setattr(tg, "capability", lambda device: version)
    monkeypatch.setattr(tg, "select_ops", lambda device, fast, **named: asked.append(fast) or select(device, fast, **named))
    found = check()
    assert found.code == 0 and asked == [fast]
    assert (f"capability {version}, below the (8, 0) of the fast operators, so slow, attention: " in found.device) != fast


@pytest.mark.fast
def test_check_says_a_line_an_item_and_does_nothing(check, tmp_path, monkeypatch):
    monkeypatch.setattr(tg, "Trainer", lambda *_: pytest.fail("started"))
    found = check("--save", tmp_path / "model.pt")
    assert found.code == 0 and found.err == ""
    assert list(found.items) == ["versions", "memory", "data", "log", "model"] and {mark for mark, _ in found.items.values()} == {"ok"}
    text = {name: text for name, (_, text) in found.items.items()}
    assert f"torch {torch.__version__}" in text["versions"] and re.fullmatch(r"1 rank\(s\), .*, no GPU, attention: reference, .*", found.device)
    assert "MB free" in text["log"] and re.match(r"[\d,]+ of [\d,]+ training tokens in 2 shards, SHA-256 [0-9a-f]{16}", text["data"])
    assert not (tmp_path / "logs").exists()


@pytest.mark.fast
def test_check_goes_on_after_a_failure(check, tmp_path):
    (tmp_path / "file").write_text("")
    found = check("--log-dir", tmp_path / "file" / "logs", data=tmp_path)
    assert found.code == 2 and {name for name, (mark, _) in found.items.items() if mark == "FAIL"} == {"log", "data"}
    assert all("; fix: " in text for mark, text in found.items.values() if mark == "FAIL")
    assert found.items["data"][1].startswith("train shards: expected ")


def test_check_goes_on_after_a_file_that_is_a_folder(check, tmp_path):
    """Not ours to explain, yet one line, and the other items follow."""
    for name in ("x_train_000001.bin", "x_val_000000.bin"):
        (tmp_path / "data" / name).mkdir(parents=True)
    found = check(data=tmp_path / "data")
    assert found.code == 2 and [mark for mark, _ in found.items.values()] == ["ok", "ok", "FAIL", "ok", "ok"]
    assert "Is a directory" in found.items["data"][1] and "; fix: " in found.items["data"][1]


def test_check_and_start_refuse_too_little_memory(check, corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tg, "memory_plan", partial(tg.memory_plan, room_bytes=1e6))
    found = check()
    assert found.code == 4 and found.items["memory"][0] == "FAIL" and "GPU memory: expected " in found.items["memory"][1]
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs")]) == 4
    assert capsys.readouterr().err == f"train_gpt: {found.items['memory'][1]}\n"


def test_check_and_start_refuse_older_versions_of_torch(check, corpus, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.1"))
    assert check().code == 2
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs")]) == 2
    assert capsys.readouterr().err == "train_gpt: torch: expected >= 2.11, found 2.10.1; fix: pip install -r requirements.txt\n"


@pytest.mark.parametrize("version, tried", [("2.11.0+cu130", True), ("2.15.1", True), ("2.16.0a0+git", False), ("3.0.0", False)])
def test_newer_versions_of_torch_get_a_warning_and_go_on(check, corpus, tiny, tmp_path, monkeypatch, capsys, version, tried):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    warning = f"train_gpt: torch {version}: newer than any that was tried; if it fails: pip install -r requirements.txt\n"
    found = check()
    assert (found.code, found.err) == (0, "" if tried else warning) and found.items["versions"][0] == "ok"
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--log-dir", str(tmp_path / "logs"), "--stop-after", "1", "--eager"]) == 0
    assert capsys.readouterr().err == ("" if tried else warning)
    assert "newer" not in tg.check_versions(tg.Ranks(1, 2, CPU)) + capsys.readouterr().err, "rank 0 says it for all"


def test_check_and_start_compare_sums(check, corpus, tiny, tmp_path, capsys):
    """A shard of the right form but other content than SHA256SUMS states."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    name = "tiny_train_000001.bin"
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  other.bin\n{tg.hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n")
    assert check(data=folder).code == 0
    raw = bytearray((folder / name).read_bytes())
    raw[-2] ^= 1
    (folder / name).write_bytes(raw)
    found = check(data=folder)
    assert found.code == 2 and re.fullmatch(rf".*{name}: SHA-256: expected what SHA256SUMS states, found [0-9a-f]{{64}}; fix: .*", found.items["data"][1])
    assert tg.main(["--preset", "tiny", "--data", str(folder), "--log-dir", str(tmp_path / "logs")]) == 2


def test_forced_reference_operators_are_what_a_cpu_has(corpus, tiny, tmp_path, capsys):
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--reference", "--log-dir", str(tmp_path)]) == 0
    (log,) = [read_log(path) for path in tmp_path.glob("*.jsonl")]
    assert log[0]["ops"] == tg.select_ops(CPU).names and log[0]["settings"]["reference"] == "True"
    assert "no GPU, attention: reference" in capsys.readouterr().out


@pytest.mark.fast
def test_errors_of_the_device_are_explained():
    ranks = tg.Ranks(0, 1, CPU)
    for error in (torch.OutOfMemoryError("CUDA out of memory.\nmore"), torch.AcceleratorError("an illegal memory access\n1"),
                  type("OutOfResources", (Exception,), {})("out of resource: shared memory")):  # Triton's
        failure = tg.explained(error, ranks)
        assert failure.code == 4 and re.fullmatch(r".+: expected .+, found '.+'; fix: .+", str(failure))
    assert tg.explained(RuntimeError("gloo: Connection closed by peer"), ranks) is None, "there is no peer"
    assert tg.explained(ValueError("a bug"), ranks) is None
    assert tg.explained(FileNotFoundError(2, "No such file or directory", "x.bin"), ranks).code == 2


# ---- memory ----------------------------------------------------------------------------------------------------------
FAST = replace(tg.select_ops(CPU), names={"attention": "triton", "mlp": "bf16"})
LARGE = replace(tg.PRESETS["sprint"], model=replace(tg.GPT_SPRINT, ngram_rows=2**20),
                stages=helpers.three_stages((2, 2, 2), 1, rates=(1.0, 1.0, 1.0)))


def state_bytes(world):
    """What memory_plan adds up for PRESET: less what its smallest micro-batch takes."""
    _, tokens, needed = tg.memory_plan(PRESET, tg.Ranks(0, world, CPU), FAST, 10 * GB)
    return needed - max(tokens * (359_000 + 4 * PRESET.model.padded_vocabulary), 39_000 * PRESET.val_window_tokens)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_state_is_summed_exactly(ranked, world):
    """Against the tensors that the ranks of a real run held, and what they do not keep from step to step."""
    state = torch.load(ranked / f"{world}-{world - 1}.pt")["state"]
    several = world > 1  # then memory may be shared: kept for each size of a batch, and received from each rank
    tokens = sum({stage.batch_tokens for stage in PRESET.stages}) if several else PRESET.stages[-1].batch_tokens
    gathered = 2 * PRESET.model.width * tokens + 4 * max(t.nbytes for name, t in state.items() if name.endswith("average"))
    dense = {name: tensor.nbytes for name, tensor in state.items() if name.endswith(".weights") and not name.startswith("SparseTable")}
    gradients = sum(size * (1 + 2 * several if name.startswith("AdamTable") else 2 + several) for name, size in dense.items())
    assert len(dense) == sum(name.endswith(".weights") for name in state) - 1 and gathered > 0
    assert state_bytes(world) == sum(tensor.nbytes for tensor in state.values()) + gathered + gradients


@pytest.mark.parametrize("card, free_bytes, recompute, slots", [
    ("141 GB", 149.5 * GB, False, [4, 2, 2, 2]), ("80 GB", 84 * GB, False, [4, 2, 2, 2]), ("48 GB", 47.5 * GB, False, [4, 2, 1, 1]),
    ("24 GB", 25.2 * GB, True, [4, 2, 1, 1]), ("20 GB", 21.2 * GB, True, [2, 1, 1, 1])])
@pytest.mark.fast
def test_what_fits_on_which_card(card, free_bytes, recompute, slots):
    """The whole schedule in each memory: fewer slots at a time, and below one slot layers recomputed. Never another batch."""
    preset, ranks = LARGE, tg.Ranks(0, 1, CPU)
    found, tokens, needed = tg.memory_plan(preset, ranks, FAST, 0.95 * free_bytes)
    assert found == recompute and needed <= 0.95 * free_bytes and tokens >= 393_216 // 8
    assert [tg.micro_batch_chunks(stage, ranks, tokens) for stage in preset.stages] == slots


@pytest.mark.fast
def test_a_sampled_softmax_needs_less():
    """Logits and their gradient take 4 bytes a column of the head that the batch uses, in whichever stage uses most."""
    sampled = replace(LARGE, stages=tuple(replace(stage, sampled_classes=n) for stage, n in zip(LARGE.stages, (1024, 20_480, 4096, 4096))))
    (_, tokens, full), (_, other, less) = (tg.memory_plan(preset, tg.Ranks(0, 1, CPU), FAST, 140 * GB) for preset in (LARGE, sampled))
    assert tokens == other and full - less == tokens * 4 * (50_304 - 20_480)


@pytest.mark.fast
def test_what_does_not_fit():
    with pytest.raises(tg.Failure, match=r"GPU memory: expected 1\d\.\d GiB for one batch chunk of 49,152 tokens at a time, found 10\.6 GiB; fix: ") as caught:
        tg.memory_plan(LARGE, tg.Ranks(0, 1, CPU), FAST, 0.95 * 12 * GB)
    assert caught.value.code == 4
    assert tg.memory_plan(tg.PRESETS["smoke-gpu"], tg.Ranks(0, 1, CPU), FAST, 0.95 * 12 * GB)[2] < 11.4 * GB


@pytest.mark.parametrize("mlp", ["bf16", "fp8"])
@pytest.mark.fast
def test_the_small_sprint_fits_a_card_of_12_gb(mlp):
    """The sprint but for a few settings, in 10.5 GiB; what docs/memory.md says of 11 and 15 GiB that are free."""
    preset, sprint, gib = tg.PRESETS["sprint-small"], tg.PRESETS["sprint"], 2**30
    model = replace(preset.model, ngram_rows=2**25, layers=sprint.model.layers)
    assert replace(preset, name="sprint", model=model, stages=sprint.stages, val_window_tokens=131_072, status=sprint.status) == sprint
    assert [i for i, (small, large) in enumerate(zip(preset.model.layers, sprint.model.layers)) if small != large] == [1, 5]
    assert [(stage.steps, stage.batch_tokens) for stage in preset.stages] == [(stage.steps, stage.batch_tokens) for stage in sprint.stages]
    ranks, ops = tg.Ranks(0, 1, CPU), replace(FAST, names={"mlp": mlp})
    for room, tokens, needed in ((10.5, 32_768, 9.7), (0.95 * 11, 32_768, 9.7), (0.95 * 15, 65_536, 13.3)):
        found = tg.memory_plan(preset, ranks, ops, room * gib)
        assert found[:2] == (True, tokens) and found[2] / gib == pytest.approx(needed, abs=0.05) and found[2] <= room * gib
    with pytest.raises(tg.Failure, match="or --preset sprint-small"):
        tg.memory_plan(sprint, ranks, ops, 0.95 * 15 * gib)


def test_recomputing_layers_changes_no_number(corpus, tiny, tmp_path, monkeypatch):
    ends = []
    for recompute in (False, True):
        monkeypatch.setattr(tg, "memory_plan", lambda *_: (recompute, 10**9, 0))
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
        monkeypatch.setattr(tg, "memory_plan", lambda *_: (recompute, 10**9, 0))
        trainer, saved = helpers.make_trainer(corpus), {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.setdefault(t.untyped_storage().data_ptr(), t), t)[1], lambda t: t):
            trainer.training_step(0, helpers.all_batches(trainer)[0])
        kept.append(sum(t.nbytes for t in saved.values()))
    assert kept[1] < 0.6 * kept[0]


# ---- throughput ------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_summary(corpus, tiny, monkeypatch):
    """6 operations a token and used weight: against the matrices, classes and visible keys counted by hand, of helpers.PRESET's layers and stages."""
    trainer = helpers.make_trainer(corpus)
    assert tg.speed(trainer, 500.0, 4) == "6,144 tokens/s", "no peak is known of a CPU"
    attention, mlp, pointer = 4 * 32 * 32, 2 * 32 * 64, 2 * 16 * 32
    hidden = sum(attention * layer.attention + mlp * layer.mlp for layer in PRESET.model.layers) + pointer
    sampled = [(2 * 512, 128), (2 * 1024, 192), (1 * 1024, 512)]  # tokens of each stage, classes of the head that they use

    def scores(stage):
        """Channels times keys, of a mean token of the stage's first step: 32 of a query and a value in each attention head, 16 of the pointer."""
        text = trainer.stream.read(trainer.stream.first, stage.batch_tokens).tolist()
        seen = {"short": [], "long": [], "pointer": []}
        for end in range(len(text)):
            begin = max(start for start in range(end + 1) if start == 0 or text[start] == tg.BOS)
            begin += (end - begin) // stage.document_cap_tokens * stage.document_cap_tokens
            seen["short"].append(min(end - begin, stage.short_window_tokens) + 1)
            seen["long"].append(min(end - begin, stage.long_window_tokens) + 1)
            seen["pointer"].append(min(end - begin, PRESET.model.pointer_window_tokens))
        mean = {name: sum(numbers) / len(numbers) for name, numbers in seen.items()}
        model = PRESET.model
        return sum(model.heads * (model.key_width + model.head_width) * mean[layer.window] for layer in model.layers if layer.attention) + 16 * mean["pointer"]

    for steps, stages in ((5, sampled), (4, sampled[:2]), (1, [(512, 128)])):
        operations = sum(6 * tokens * (hidden + 32 * classes + scores(stage)) for (tokens, classes), stage in zip(stages, PRESET.stages))
        assert tg.training_work(trainer, steps) == (sum(tokens for tokens, _ in stages), pytest.approx(operations, rel=1e-12))
    facts, milliseconds = tg.machine_facts(), 1e3 * tg.training_work(trainer, 5)[1] / 989e12 / 0.4
    monkeypatch.setattr(tg, "machine_facts", lambda: facts | {"device": "NVIDIA H200"})
    assert tg.speed(trainer, milliseconds, 5).endswith(" tokens/s, MFU 40.0% of 989 TFLOP/s a GPU (dense bf16; FP8 products: twice that)")
    trainer.ranks.world = 4
    assert " MFU 10.0% of 989 " in tg.speed(trainer, milliseconds, 5)


@pytest.mark.fast
def test_fp8_ranges_are_those_of_the_scales():
    scales = {"qkv": tg.MlpScales().weight, "up": tg.MlpScales().weight, "down": tg.MlpScales().weight, "lm_head": tg.HeadScales().weight}
    found = {kind: limit for ranges in tg.FP8_PARTS.values() for kind, limit in ranges.items()}
    assert found == {kind: pytest.approx(scale * torch.finfo(torch.float8_e4m3fn).max) for kind, scale in scales.items()}


SIZES = {"qkv": -3.14, "up": 6.5, "down": 0.5, "lm_head": -3.0}  # of one weight each; all others are below 0.1
WORDS = {"qkv": "3.14 of 7.0", "up": "6.50 of 7.0 (WARNING: near saturation)", "down": "0.50 of 7.0",
         "lm_head": "3.00 of 3.2 (WARNING: near saturation)"}


@pytest.mark.parametrize("parts, kinds", [((), []), (("head",), ["lm_head"]), (("attention",), ["qkv"]), (("mlp",), ["up", "down"]),
                                          (("attention", "head", "mlp"), ["qkv", "lm_head", "up", "down"])])
@pytest.mark.fast
def test_largest_weights(corpus, tiny, monkeypatch, parts, kinds):
    """Of the parts that are FP8, both signs, whichever layer has them; from 90 % of the range on, 6.3 and 2.88, with a warning."""
    monkeypatch.setattr(tg, "capability", lambda device: (9, 0))
    names, said = tg.select_ops(torch.device("cuda"), compile=False, fp8=parts).names, []
    trainer = helpers.make_trainer(corpus, ops=replace(tg.select_ops(CPU), names=names))
    helpers.randomise(trainer.model, size=0.01)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if name in ("blocks.1.qkv", "blocks.3.up", "blocks.6.down", "lm_head"):
                parameter[5, 7] = SIZES[name.split(".")[-1]]
            elif name == "embedding" or name.endswith("out"):
                parameter.fill_(9.0)  # never FP8
    assert tg.largest_weights(trainer, types.SimpleNamespace(say=said.append)) == {kind: pytest.approx(abs(SIZES[kind])) for kind in kinds}
    assert said == [f"largest FP8 weight of {kind}: {WORDS[kind]}" for kind in kinds]


@pytest.mark.fast
def test_largest_weights_are_logged_at_the_end(corpus, tiny, tmp_path, monkeypatch, capsys):
    """Of the final weights, past the clock; nothing where nothing is FP8."""
    ops = tg.select_ops(CPU)
    ends = []
    for names in (ops.names, ops.names | {"mlp": "fp8"}):
        monkeypatch.setattr(tg, "select_ops", lambda *_, names=names, **__: replace(ops, names=names))
        folder = tmp_path / str(len(ends))
        assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(folder), "--save", str(folder / "model.pt")]) == 0
        ends.append((helpers.read_log(next(folder.glob("*.jsonl")))[-1], capsys.readouterr().out))
    assert ends[0][0]["largest_weights"] == {} and "FP8" not in ends[0][1]
    weights = tg.load_model(folder / "model.pt", CPU)[0].state_dict()
    largest = {kind: max(float(w.abs().max()) for name, w in weights.items() if name.endswith(f".{kind}")) for kind in ("up", "down")}
    assert ends[1][0]["largest_weights"] == largest and min(largest.values()) > 0
    assert all(f"\nlargest FP8 weight of {kind}: {largest[kind]:.2f} of 7.0\n" in ends[1][1] for kind in ("up", "down"))
    assert ends[0][0]["loss"] == ends[1][0]["loss"]


# ---- what one sees ---------------------------------------------------------------------------------------------------
def test_a_terminal_gets_a_bar(corpus, tiny, tmp_path, monkeypatch, capsys):
    start = tg.RunLog.__init__
    monkeypatch.setattr(tg.RunLog, "__init__", lambda log, *arguments, **options: (start(log, *arguments, **options), setattr(log, "terminal", True))[0])
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    bars = re.findall(r"\n\[(#* *)\] +(\d+)%, (\d+) s left\r\033\[K", out)
    assert [(len(bar.rstrip()), len(bar), int(percent)) for bar, percent, _ in bars] == [(5, 40, 12), (10, 40, 25), (30, 40, 75), (40, 40, 100)]
    assert bars[-1][2] == "0" and out.endswith(".jsonl\n")


def test_no_bar_elsewhere_and_lines_are_aligned(corpus, tiny, tmp_path, capsys):
    assert tg.main(["--preset", "tiny", "--data", str(corpus), "--seed", "3", "--log-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert "\r" not in out and "\033" not in out and len(steps) == 4 and len({line.index("train loss") for line in steps}) == 1
    assert re.search(r"\nval loss \d\.\d{4} after .*\n[\d,]+ tokens/s; log: .*\.jsonl\n$", out)
