"""benchmarks/arms.py: what a screening says of its factors, how variants are made,
and the shares of channels that it watches."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import arms
import arms_file

NAMES = ["heads", "rows", "decay", "init", "beta"]
EFFECTS = np.array([0.010, -0.004, 0.0, 0.002, -0.001])


def write_results(path, outcomes):
    """A line of results for each run, by number, of a screening of NAMES. Returns the screening."""
    screening = {"base": {"name": "s"}, "factors": {name: {"model": {name: 1}} for name in NAMES}}
    lines = [
        {"name": f"s{number:02d}", "loss": {"preset": loss}, "seconds": 170.0}
        for number, loss in outcomes.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return screening


def printed_effects(output: str) -> dict[str, float]:
    return {line[:20].strip(): float(line[20:].split()[0]) for line in output.splitlines()[1:]}


@pytest.mark.fast
@pytest.mark.parametrize("factors", [3, 5, 11, 19, 20, 31, 40, 47])
def test_a_screening_is_balanced(factors):
    """Each factor is in half of the runs, and each two in a quarter; the last run has none."""
    signs = arms_file.design(factors)
    runs, columns = signs.shape
    assert columns == runs - 1 >= factors
    assert (signs[-1] == -1).all()
    assert (signs.T @ signs == runs * np.eye(columns)).all()
    assert (signs.sum(0) == 0).all()


@pytest.mark.fast
def test_effects_are_differences_of_means(tmp_path, capsys):
    losses = 3.1 + np.random.default_rng(1).normal(0, 0.002, 8)
    screening = write_results(tmp_path / "a.jsonl", dict(enumerate(losses)))
    arms.print_effects(screening, tmp_path / "a.jsonl")
    effects = printed_effects(capsys.readouterr().out)

    columns = [losses[sign > 0].mean() - losses[sign < 0].mean() for sign in arms_file.design(5).T]
    assert list(effects) == ["mean", *NAMES, "standard error"]
    assert list(effects.values())[1:-1] == pytest.approx(columns[:5], abs=6e-6)
    # The columns that no factor takes show chance alone.
    assert effects["standard error"] == pytest.approx(np.sqrt(np.mean(np.square(columns[5:]))), abs=6e-6)


@pytest.mark.fast
@pytest.mark.parametrize("lost", [(), (0,), (2, 5), (1, 3, 6), (7,)])
def test_effects_when_runs_are_lost(lost, tmp_path, capsys):
    outcomes = {
        number: 3.1 + row[:5] @ EFFECTS / 2
        for number, row in enumerate(arms_file.design(5))
        if number not in lost
    }
    screening = write_results(tmp_path / "a.jsonl", outcomes)
    if len(outcomes) < 6:
        with pytest.raises(arms.Mistake, match="expected 6 runs or more of the screening in .*, found 5"):
            arms.print_effects(screening, tmp_path / "a.jsonl")
        return
    arms.print_effects(screening, tmp_path / "a.jsonl")
    effects = printed_effects(capsys.readouterr().out)
    assert [effects[name] for name in NAMES] == pytest.approx(EFFECTS, abs=6e-6)
    assert effects["mean"] == pytest.approx(3.1, abs=6e-6)
    assert ("standard error" in effects) == (len(outcomes) > 6)


@pytest.mark.fast
def test_arms_of_a_screening_unite_their_factors():
    factors = {
        "heads": {"model": {"heads": 4}, "edits": [["a", "b"]]},
        "rows": {"model": {"ngram_rows": 8}, "edits": [["c", "d"]]},
        "seed": {"seed": 2},
    }
    found = arms.screening_arms({"base": {"name": "s", "seed": 1, "model": {"heads": 6}}, "factors": factors})
    assert found[0] == {
        "name": "s00",
        "seed": 1,
        "model": {"heads": 4, "ngram_rows": 8},
        "edits": [["a", "b"], ["c", "d"]],
    }
    assert found[1] == {"name": "s01", "seed": 2, "model": {"heads": 6, "ngram_rows": 8}, "edits": [["c", "d"]]}
    assert found[-1] == {"name": "s03", "seed": 1, "model": {"heads": 6}}


@pytest.mark.fast
@pytest.mark.parametrize("factors, told", [
    ({"a": {"optimizer": {"drift_decay": 0.9}}, "b": {"optimizer": {"drift_decay": 0.8}}},
     "settings of its own, found optimizer.drift_decay, which a changes"),
    ({"a": [{"seed": 1}, {"seed": 2}], "b": [{}, {"seed": 3}]}, "settings of its own, found seed, which a changes"),
    ({"a": {"name": "x"}}, "no name, found x"),
])
def test_factors_change_settings_of_their_own(tmp_path, capsys, factors, told):
    """Of two levels of one setting the last would stand, and both effects be wrong."""
    path = tmp_path / "arms.json"
    path.write_text(json.dumps({"base": {"name": "s"}, "factors": factors}))
    assert arms.told([str(path), "--effects", "--out", str(tmp_path / "out")]) == helpers.tg.EXIT_USAGE
    assert told in capsys.readouterr().err


@pytest.mark.fast
def test_a_factor_may_change_the_runs_without_it_too(tmp_path):
    screening = {"base": {"name": "s"}, "factors": {"rate": [{"length": 0.8}, {"length": 1.25}], "seed": {"seed": 2}}}
    path = tmp_path / "arms.json"
    path.write_text(json.dumps(screening))
    runs = {(arm["length"], arm.get("seed")) for arm in arms.read_arms(path)}
    assert runs == {(0.8, None), (0.8, 2), (1.25, None), (1.25, 2)}

    screening["factors"]["rate"].append({})
    path.write_text(json.dumps(screening))
    with pytest.raises(arms.Mistake, match="factor rate: expected a change, or two, found"):
        arms.read_arms(path)


@pytest.mark.fast
def test_in_a_mirrored_screening_interactions_add_nothing():
    factors = {str(number): {} for number in range(11)}
    signs = arms_file.screening_signs({"base": {}, "factors": factors, "mirrored": True})
    assert signs.shape == (24, 11)
    assert (signs.T @ signs == 24 * np.eye(11)).all()
    products = np.array([signs[:, a] * signs[:, b] for a in range(11) for b in range(a)])
    assert (products @ signs == 0).all()


@pytest.mark.fast
def test_effects_by_the_tokens_that_choose_come_first(tmp_path, capsys):
    screening = write_results(tmp_path / "a.jsonl", dict.fromkeys(range(8), 3.1))
    lines = [json.loads(line) | {"choose": {"preset": 3.2}} for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arms.print_effects(screening, tmp_path / "a.jsonl")
    head, mean, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-5:] == ["choose", "preset", "judge", "preset", "seconds"]
    assert mean.split()[1:3] == ["3.20000", "3.10000"]


@pytest.mark.fast
@pytest.mark.parametrize("old, count", [("no such text", 0), ("import", "[0-9]+")])
def test_an_edit_must_fit_once(old, count):
    with pytest.raises(arms.Mistake, match=f"expected once in train_gpt.py, found {count} times"):
        arms.load_trainer([[old, ""]])


@pytest.mark.fast
def test_largest_channels():
    """Channel 2 has .9 of three tokens in four, once negative; channel 0 has all of the fourth.
    The second layer's MLP adds to its stream."""
    a, b = 3.0, 1.0
    stream = torch.tensor([[b, 0, a, 0], [0, b, a, 0], [0, 0, -a, b], [a, 0, 0, 0]])

    class Layer(torch.nn.Module):
        def __init__(self, index, output):
            super().__init__()
            self.index = index
            self.output = output

        def forward(self):
            return self.output

    blocks = torch.nn.ModuleDict(
        {"0": Layer(0, (stream, None, None)), "3": Layer(3, (stream - 1, torch.ones(4, 4), None))}
    )
    head = torch.tensor([[0.0, 0, 2, 0], [0.0, 0, 4, 0], [9.0, 9, 9, 9]])  # the last row pads the vocabulary
    trainer = SimpleNamespace(
        model=SimpleNamespace(lm_head=head, blocks=blocks),
        preset=SimpleNamespace(model=SimpleNamespace(vocabulary=2)),
        validation=[None],
        final_geometry=None,
        evaluate=lambda *_: [block() for block in blocks.values()],
    )

    found = arms.largest_channels(trainer)
    expected = ((3 * 0.9 + 1) / 4, 2, 0.75, round(2 / 3, 4))
    assert found["stream.0"] == found["stream.3"] == pytest.approx(expected)
    assert found["head"] == pytest.approx((round(float(head[:2].std()), 4), 3.0, round(2**0.5, 4)))
    assert not any(block._forward_hooks for block in blocks.values())


@pytest.mark.fast
def test_a_misspelt_key_is_no_arm(tmp_path):
    path = tmp_path / "arms.json"
    path.write_text('[{"name": "a"}, {"name": "b", "modle": {"heads": 1}}]')
    with pytest.raises(arms.Mistake, match="arms.json: b: expected only .*, model, .*, found modle"):
        arms.read_arms(path)


@pytest.mark.fast
@pytest.mark.parametrize("text", ['[{"name": "a"}, {"name": "a"}]', '[{"seed": 1}]'])
def test_each_arm_has_a_name_of_its_own(tmp_path, text):
    """Else the second would not be started, or its results be taken for the first one's."""
    path = tmp_path / "arms.json"
    path.write_text(text)
    with pytest.raises(arms.Mistake, match="expected a name of its own for each arm, found"):
        arms.read_arms(path)


SCREENING = '"base": {"name": "a"}, "factors"'


@pytest.mark.fast
@pytest.mark.parametrize(
    "text, line",
    [
        ("", "expected a list of arms, found 'Expecting value"),
        ('[{"name": "a"}, {"na', "expected a list of arms, found"),
        ("[]", "expected arms, found none"),
        ("[3]", "expected an object, found 3"),
        ('{"name": "a", "seed": 1, "seed": 2}', "expected each once, found twice seed"),
        ('{"name": 7}', "name: expected a string without / .*, found 7"),
        ('{"name": "a/b"}', 'name: expected a string without / .*, found "a/b"'),
        ('{"name": "-a"}', "name: expected"),
        ('{"name": "a", "length": 0}', "a: length: expected a number from 0.001 to 100, found 0"),
        ('{"name": "a", "steps": 0}', "a: steps: expected an integer from 1 to inf, found 0"),
        ('{"name": "a", "steps": true}', "a: steps: expected .*, found true"),
        ('{"name": "a", "micro_batch_tokens": -1}', "a: micro_batch_tokens: expected"),
        ('{"name": "a", "seed": -1}', "a: seed: expected"),
        ('{"name": "a", "watch_every": 0}', "a: watch_every: expected"),
        ('{"name": "a", "model": 3}', "a: model: expected an object, found 3"),
        ('{"name": "a", "edits": [["b"]]}', "a: edits: expected a list of pairs"),
        ('{"name": "a", "edits": [[1, 2]]}', "a: edits: expected a list of pairs of strings"),
        ('{"name": "a", "averages": [[0.1, "x"]]}', "a: averages: expected a list of pairs of numbers"),
        ('{"name": "a", "rate_powers": [true]}', "a: rate_powers: expected a list of numbers"),
        ('{"name": "a", "fp8": [1]}', "a: fp8: expected a list of strings"),
        ('{"factors": {"b": {}}}', "expected base, factors and perhaps mirrored, found factors"),
        (f"{{{SCREENING}: 3}}", "factors: expected an object, found 3"),
        (f"{{{SCREENING}: {{}}}}", "factors: expected 1 to 47, found 0"),
        (f"{{{SCREENING}: {json.dumps({str(n): {} for n in range(48)})}}}", "factors: expected 1 to 47, found 48"),
        (f'{{{SCREENING}: {{"b": {{"modle": 1}}}}}}', "factor b: .*expected only"),
    ],
)
def test_what_is_no_list_of_arms_is_a_line(tmp_path, capsys, text, line):
    """Nothing is trained, and no value is taken for another one."""
    path = tmp_path / "arms.json"
    path.write_text(text)
    assert arms.told([str(path), "--preset", "smoke", "--out", str(tmp_path / "out")]) == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^arms: .*{line}.*; fix: ", found), found


@pytest.mark.fast
@pytest.mark.parametrize(
    "options, line",
    [
        (["no.json"], "no.json: expected a list of arms, found .*No such file"),
        (["arms.json", "--preset", "sprnit"], "--preset: expected one of .*sprint.*, found sprnit; fix: "),
        (["arms.json", "--out", "."], "expected to be there and to work, found .*; fix: "),
        (["arms.json", "--out", "no/where"], "expected to be there and to work, found .*; fix: "),
        (["arms.json", "--seconds", "0"], "time for a result, found none after 0 s; fix: "),
        (["arms.json", "--effects"], "expected a screening, found arms alone; fix: "),
        (["screening.json", "--effects"], "expected to be there and to work, found .*arms.jsonl.*; fix: "),
        (["screening.json", "--effects", "--out", "junk"], "junk, line 2: expected a line of results, found 'x'; fix"),
    ],
)
def test_options_that_would_train_nothing_or_lose_it(tmp_path, monkeypatch, capsys, options, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arms, "start", None)
    (tmp_path / "arms.json").write_text('[{"name": "a", "rate_powers": [0, 0.5]}]')
    (tmp_path / "screening.json").write_text('{"base": {"name": "a"}, "factors": {"b": {"seed": 2}}}')
    (tmp_path / "junk").write_text('{"name": "a00", "loss": {"none": 3}, "seconds": 1}\nx\n')
    assert arms.told(options) == 2
    found = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"^arms: .*{line}", found), found


@pytest.mark.fast
@pytest.mark.parametrize("value", ["-1", "nan", "x"])
def test_seconds_are_a_number(capsys, value):
    with pytest.raises(SystemExit) as error:
        arms.main(["arms.json", f"--seconds={value}"])
    assert error.value.code == 2
    assert "--seconds" in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(
    "arm, line",
    [
        ({"fp8": ["mlps"]}, "fp8: expected parts among attention, head, mlp, found mlps"),
        ({"rules": {"embeding": {}}}, "rules: expected roles among .*embedding.*, found embeding"),
        ({"layers": {"-1": {}}}, "layers: expected 0 to 5, found -1"),
        ({"layers": {"99": {}}}, "layers: expected 0 to 5, found 99"),
        ({"model": {"widht": 3}}, "settings: expected those of train_gpt.py, found .*widht"),
        ({"stages": {"steps": [1]}}, "settings: expected those of train_gpt.py, found"),
        ({"steps": 10**6}, "steps: expected at most the schedule's "),
        ({"model": {"ngram_orders": 0}}, "ngram_orders: expected 1 to "),
        ({"model": {"dtype": "float16"}}, "dtype: expected"),
        ({"layers": {"0": {"window": "longg"}}}, "layer 0: window: expected"),
        ({"preset": "sprnit"}, "preset: expected one of"),
    ],
)
def test_an_arm_that_no_run_can_train(arm, line):
    with pytest.raises((arms.Mistake, helpers.tg.Failure), match=line):
        arms.checked_preset(helpers.tg, arm, arm.get("preset", "smoke"))


@pytest.mark.fast
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_an_arm_for_a_gpu_does_not_train_on_the_cpu():
    """A sprint would take hours there, and nobody would know why."""
    with pytest.raises(arms.Mistake, match="--gpus: expected cpu, as torch sees no GPU, found 0,1; fix: --gpus cpu"):
        arms.train_arm(helpers.tg, {}, SimpleNamespace(preset="smoke", gpus=["0", "1"]))


@pytest.mark.fast
def test_an_arm_leaves_the_other_fields_of_a_layer():
    layers = helpers.tg.PRESETS["smoke"].model.layers
    assert layers[1] == helpers.tg.Layer(value_embedding=1, window="long", key_offset=True)
    changes = {"1": {"mlp": False}, "2": {"skip_from": None}}
    changed = arms.checked_preset(helpers.tg, {"layers": changes}, "smoke").model.layers
    assert changed[1] == helpers.tg.Layer(value_embedding=1, window="long", key_offset=True, mlp=False)
    assert changed[2] == helpers.tg.Layer(attention=False)
    assert (changed[0], changed[3:]) == (layers[0], layers[3:])


@pytest.mark.fast
def test_a_loss_that_is_no_number_is_no_result(tmp_path, monkeypatch, capsys):
    path = tmp_path / "arms.json"
    path.write_text('[{"name": "a"}]')
    (tmp_path / "out.a.arm.json").write_text(path.read_text())
    monkeypatch.setattr(arms, "load_trainer", lambda *_: helpers.tg)
    monkeypatch.setattr(arms, "train_arm", lambda *_: {"loss": {"none": float("nan")}, "choose": {}})
    assert arms.told([str(path), "--out", str(tmp_path / "out"), "--arm", "a"]) == helpers.tg.EXIT_NUMERICS
    assert "arms: losses: expected finite numbers, found [nan]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.fast
def test_tokens_that_choose_neither_train_nor_judge(tmp_path, monkeypatch):
    """Behind those that judge; where these are few, the last training tokens too, unless a step reads them."""
    tg = helpers.tg
    preset = tg.replace(tg.PRESETS["smoke"], val_tokens=2048, val_window_tokens=1536)
    used = sum(stage.steps * stage.batch_tokens for stage in preset.stages)
    validation = np.arange(2048 + 1200) % 1000
    helpers.write_shard(tmp_path / "a_val_000000.bin", [tg.BOS, *validation[1:]])

    def found(training_tokens):
        helpers.write_shard(tmp_path / "a_train_000001.bin", [tg.BOS, *np.arange(1, training_tokens) % 40_000])
        stream = tg.TokenStream(tmp_path, training_tokens, preset.model.vocabulary)
        trainer = SimpleNamespace(preset=preset, folder=tmp_path, stream=stream, ranks=tg.Ranks(0, 1, helpers.CPU))
        windows, count = arms.choosing_windows(tg, trainer)
        tokens = [window.views(window.data).tokens.tolist() for window in windows]
        assert sum(map(len, tokens)) == count
        return tokens

    behind = validation[2048:3072].tolist()
    last = (np.arange(used + 1, used + 2049) % 40_000).tolist()
    assert found(used + 2050) == [behind, last[:1536], last[1536:]]
    assert found(used + 2049) == [behind]
    monkeypatch.setattr(arms, "FEW_TOKENS", 1199)
    assert found(used + 2050) == [behind]


@pytest.mark.fast
def test_clock_and_power_are_sampled_and_their_medians_told(monkeypatch):
    lines = iter(["345 MHz, 120.00 W", "1755 MHz, [N/A]", "1980 MHz, 690.50 W", "1785 MHz, 699.00 W"])
    asked = []

    def query(text):
        asked.append(text)
        return [line for line in [next(lines, None)] if line]

    monkeypatch.setattr(arms, "query_gpus", query)
    with arms.sampled_clock(interval=0.001) as samples:
        while len(samples) < 4:
            time.sleep(0.01)
    after = len(asked)
    assert set(asked) == {"--query-gpu=clocks.sm,power.draw"}
    assert arms.medians(samples) == [1785, 690.5]
    assert arms.medians(["[N/A], [N/A]"]) == arms.medians([]) == []
    time.sleep(0.05)
    assert len(asked) == after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_arm_outlives_the_search(tmp_path, number):
    script = tmp_path / "train_gpt.py"
    mark = tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(mark)!r}, 'w').write(f'{{os.getpid()}} ')\ntime.sleep(300)\n")
    (tmp_path / "arms.json").write_text(json.dumps([{"name": "a", "script": str(script)}]))
    command = [sys.executable, arms.__file__, tmp_path / "arms.json", "--gpus", "cpu", "--out", tmp_path / "out"]
    search = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not mark.exists() or not mark.read_text().endswith(" "):
        assert search.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    search.send_signal(number)
    said = search.communicate(timeout=60)[1]
    assert search.returncode == 128 + number
    assert "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_screenings_are_spelt_well():
    for path in (helpers.ROOT / "benchmarks/screenings").glob("*.json"):
        assert arms.read_arms(path), path


@pytest.mark.fast
def test_on_a_cpu_arms_train_one_after_the_other(tmp_path, monkeypatch):
    """Two at once take longer there; and each with run.sh's settings, where the user has not set others."""
    path = tmp_path / "arms.json"
    path.write_text('[{"name": "a"}, {"name": "b"}]')
    runs = []

    class Run:
        returncode = 0

        def __init__(self, command, env, **_):
            assert all(run.ended for run in runs)
            assert env["MALLOC_TRIM_THRESHOLD_"] == "7"
            assert env["OMP_WAIT_POLICY"] == "PASSIVE"
            self.name, self.ended = command[-1], False
            (tmp_path / f"out.{self.name}.started").touch()
            runs.append(self)

        def poll(self):
            return 0 if self.ended else None

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(arms.subprocess, "Popen", Run)
    monkeypatch.setattr(arms.time, "sleep", lambda seconds: setattr(runs[-1], "ended", True))
    arms.search(SimpleNamespace(arms=path, gpus=["cpu"], seconds=60, out=tmp_path / "out"))
    assert [run.name for run in runs] == ["a", "b"]


def test_arms_may_be_appended_while_they_run(tmp_path, monkeypatch):
    """Also by who empties the file first, as `cp` does, or misspells a key, and is seen at that."""
    path = tmp_path / "arms.json"
    texts = iter(["", '[{"name": "a"}, {"na', '[{"name": "a"}, {"nmae": "b"}]', '[{"name": "a"}, {"name": "b"}]'])
    started = []

    class Run:
        returncode = 0

        def __init__(self, command, **_):
            started.append(command[-1])
            (tmp_path / f"out.{started[-1]}.started").touch()

        def poll(self):
            return None if started == ["a"] else 0

    path.write_text('[{"name": "a"}]')
    monkeypatch.setattr(arms.subprocess, "Popen", Run)
    monkeypatch.setattr(arms.time, "sleep", lambda seconds: path.write_text(next(texts)))
    arms.search(SimpleNamespace(arms=path, gpus=["0"], seconds=60, out=tmp_path / "out"))
    assert started == ["a", "b"]


@pytest.mark.fast
def test_an_arm_that_is_taken_out_is_stopped(tmp_path, monkeypatch):
    """Whether it trains or waits for that; those that stay end, and one that comes back starts again."""
    path = tmp_path / "arms.json"
    contents = iter(["b", "bc", "c", "ca"])
    started, killed, runs = [], [], []

    class Run:
        returncode = 0

        def __init__(self, command, **_):
            self.name, self.code = command[-1], None
            started.append(self.name)
            runs.append(self)
            (tmp_path / f"out.{self.name}.started").touch()

        def poll(self):
            return self.code

        def kill(self):
            killed.append(self.name)
            self.code = -9

        def wait(self):
            pass

    def write(names):
        path.write_text(json.dumps([{"name": name} for name in names]))

    def sleep(seconds):
        names = next(contents, None)
        if names is not None:
            write(names)
            return
        for run in runs:
            run.code = run.code or 0

    write("ab")
    monkeypatch.setattr(arms.subprocess, "Popen", Run)
    monkeypatch.setattr(arms.time, "sleep", sleep)
    arms.search(SimpleNamespace(arms=path, gpus=["0"], seconds=60, out=tmp_path / "out"))
    assert started == ["a", "b", "c", "a"]
    assert killed == ["a", "b"]


def test_an_arm_that_needs_the_gpu_alone_has_no_neighbour(tmp_path, monkeypatch):
    """Neither one before it nor one after it; and it reads no log of an earlier search for its own."""
    path = tmp_path / "arms.json"
    path.write_text('[{"name": "a"}, {"name": "big", "alone": true}, {"name": "c"}, {"name": "d"}]')
    (tmp_path / "out.big.jsonl").write_text("an earlier search's")
    beside = {}
    looks = []

    class Run:
        returncode = 0
        all = []

        def __init__(self, command, **_):
            self.name, self.ended = command[-1], False
            beside[self.name] = [run.name for run in Run.all if not run.ended]
            assert not (tmp_path / f"out.{self.name}.jsonl").exists()
            (tmp_path / f"out.{self.name}.started").touch()
            Run.all.append(self)

        def poll(self):
            return 0 if self.ended else None

    def end_the_first(seconds):
        looks.append(seconds)
        if len(looks) % 2 == 0:
            next(run for run in Run.all if not run.ended).ended = True

    monkeypatch.setattr(arms.subprocess, "Popen", Run)
    monkeypatch.setattr(arms.time, "sleep", end_the_first)
    arms.search(SimpleNamespace(arms=path, gpus=["0"], seconds=60, out=tmp_path / "out"))
    assert beside == {"a": [], "big": [], "c": [], "d": ["c"]}


@pytest.mark.fast
def test_effects_of_what_all_runs_have(tmp_path, capsys):
    """A factor may add averages, which the other half of the runs lacks."""
    screening = write_results(tmp_path / "a.jsonl", dict.fromkeys(range(8), 3.1))
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    lines[0]["loss"]["0.1 0.5"] = 3.0
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arms.print_effects(screening, tmp_path / "a.jsonl")
    assert "0.1 0.5" not in capsys.readouterr().out
