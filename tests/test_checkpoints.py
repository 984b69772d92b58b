"""Runs that stop and go on: to the last digit as without a stop, and what cannot be gone on with is one line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import helpers
import sample
from helpers import only, read_log, tg

OPTIONS = ("--preset", "tiny", "--eager")


@pytest.fixture
def run(corpus, tiny, tmp_path, capsys, monkeypatch):
    """run(options...) -> exit code, log, standard error, and what train returned and left, exactly."""
    def call(*options):
        folder = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
        ends = []

        def train_and_keep(trainer, *arguments):
            loss = train(trainer, *arguments)
            ends.append((loss, {name: value.clone() for name, value in trainer.state().items()}))
            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "train", train_and_keep)
            code = tg.main([*OPTIONS, "--data", str(corpus), "--log-dir", str(folder), *map(str, options)])
        logs = [read_log(path) for path in folder.glob("*.jsonl")]
        return types.SimpleNamespace(
            code=code, log=logs[0] if logs else None, err=capsys.readouterr().err, end=ends[0] if ends else None)

    train = tg.train
    return call


@pytest.fixture
def keep(monkeypatch):
    """Keeps every checkpoint that is written, as FILE.STEP."""
    def write(checkpoints, trainer, done, digest):
        write_of(checkpoints, trainer, done, digest)
        shutil.copy(checkpoints.path, f"{checkpoints.path}.{done}")

    write_of = tg.Checkpoints.write
    monkeypatch.setattr(tg.Checkpoints, "write", write)


def same(end, other):
    """Whether two trainings ended with the same loss and the same state, to the bit."""
    assert end[0] == other[0]
    assert end[1].keys() == other[1].keys()
    return all(end[1][name].equal(other[1][name]) for name in end[1])


def test_a_resumed_run_ends_as_without_a_stop(run, keep, tmp_path):
    """From every step: in the middle and at the borders of stages, before and while weights are averaged."""
    file = tmp_path / "state"
    whole = run("--seed", 3)
    kept = run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 1)
    assert same(kept.end, whole.end), "to keep checkpoints changes nothing"
    assert kept.log[-1]["train_hash"] == whole.log[-1]["train_hash"]

    for step in range(1, helpers.PRESET.steps + 1):  # after the last one the validation is left
        resumed = run("--resume", f"{file}.{step}")
        assert resumed.code == 0
        assert same(resumed.end, whole.end), step
        head = resumed.log[0]
        end = resumed.log[-1]
        assert (head["seed"], head["first_step"]) == (3, step)
        assert end["state"] == "no record: resumed"
        assert (end["loss"], end["train_hash"]) == (whole.log[-1]["loss"], whole.log[-1]["train_hash"])
        losses = {line["step"]: line["train_loss"] for line in only(kept.log, "step")}
        found = {line["step"]: line["train_loss"] for line in only(resumed.log, "step")}
        assert found == {line: losses[line] for line in found}
        assert min(found, default=step + 1) == step + 1


def test_a_run_resumed_among_steps_with_all_classes(run, keep, tmp_path, monkeypatch):
    """They go on with the inclusion rates of the stage before."""
    *sampled, last = helpers.PRESET.stages
    preset = replace(helpers.PRESET, stages=(*sampled, replace(last, steps=2)))
    monkeypatch.setitem(tg.PRESETS, preset.name, preset)
    file = tmp_path / "state"
    kept = run("--checkpoint", file, "--checkpoint-every", preset.steps - 1)
    assert same(run("--resume", f"{file}.{preset.steps - 1}").end, kept.end)


def test_checkpoints_are_off_the_clock(run, tmp_path):
    log = run("--seed", 3, "--checkpoint", tmp_path / "state", "--checkpoint-every", 2).log
    reasons = [(interval["reason"], interval["on"]) for interval in only(log, "clock")]
    assert reasons == [("training", True), ("checkpoint", False)] * 2 + [("training", True)]
    assert "checkpoint" in log[0]["settings"], "so that no record can be made of it"


@contextlib.contextmanager
def before_step(number, action):
    """Meanwhile something is done right before step `number` of the timed loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg.Trainer, "training_step", helpers.step_after(number, action))
        yield


def test_a_terminated_run_goes_on(run, tmp_path):
    file = tmp_path / "state"
    with before_step(3, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)):
        stopped = run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 2)
    assert stopped.code == 143
    assert stopped.err == "train_gpt: interrupted by SIGTERM\n"
    assert stopped.log[-1]["state"] == "interrupted"
    resumed = run("--resume", file, "--checkpoint", file, "--checkpoint-every", 2)
    assert resumed.log[0]["first_step"] == 2
    assert same(resumed.end, run("--seed", 3).end)


def test_a_training_that_diverged_leaves_the_checkpoint_before(run, tmp_path):
    file = tmp_path / "state"
    with before_step(3, lambda trainer: trainer.model.embedding.data.fill_(math.nan)):
        diverged = run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 1)
    assert diverged.code == 3
    assert "found nan at step 4" in diverged.err
    assert run("--resume", file).log[0]["first_step"] == 3


def test_a_stop_comes_after_the_checkpoint_of_its_step(run, tmp_path):
    def asked(trainer):
        trainer.ranks.stop_signal = signal.SIGTERM  # as if another rank had been

    file = tmp_path / "state"
    with before_step(3, asked):
        assert run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 4).code == 143
    assert run("--resume", file).log[0]["first_step"] == 4


def test_a_steps_loss_stands_in_the_log_before_its_validation(run):
    log = run("--seed", 3, "--val-every", 2).log
    kinds = [(line["kind"], line.get("step")) for line in log]
    assert kinds.index(("val", 2)) == kinds.index(("step", 2)) + 1


def test_layers_that_are_recomputed_make_another_run(corpus, tiny):
    """Their rounding differs on a GPU, and memory decides whether they are."""
    trainer = helpers.make_trainer(corpus)
    before = tg.Checkpoints.run_facts(trainer)
    trainer.recompute = True
    after = tg.Checkpoints.run_facts(trainer)
    assert {name for name in before if before[name] != after[name]} == {"micro-batches"}


def test_a_resumed_log_counts_all_tokens(run, keep, tmp_path):
    """Tokens since the very first step, as in the run without a stop."""
    file = tmp_path / "state"
    run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 1)
    for step in (1, 3):
        log = run("--resume", f"{file}.{step}").log
        found = {line["step"]: line["tokens"] for line in only(log, "step")}
        assert found
        assert found == {done: tg.scheduled_tokens(helpers.PRESET, done) for done in found}


def test_rate_of_a_resumed_run(run, keep, tmp_path, monkeypatch):
    """Tokens a second are those of its own steps, here of one second each by a hand-turned clock."""
    shown = []
    monkeypatch.setattr(tg, "show", lambda text, stream: shown.append(text))
    helpers.hand_turned(monkeypatch, training_step=1.0)
    file = tmp_path / "state"
    run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 4)
    assert "\n819 tokens/s" in "".join(shown), "4096 in five seconds"
    shown.clear()
    run("--resume", f"{file}.4")
    assert "\n1,024 tokens/s" in "".join(shown), "those of the last step, in one"


def edited(change, seal=True):
    """A checkpoint with another content; without `seal`, damaged."""
    def edit(file):
        content = torch.load(file, weights_only=True)
        change(content)
        if seal:
            content["seal"] = tg.checkpoint_seal(content)
        torch.save(content, file)
    return edit


def renamed(content, name="AdamScalars9.exp_avg_sq"):
    """As by a flipped bit in the name of a tensor."""
    content["state"][name.upper()] = content["state"].pop(name)


BAD_FILES = {
    "missing": (os.unlink, (), r"file: expected to be there and to work, found '.*No such file"),
    "other operators": (edited(lambda content: content["run"].update(operators="{'head': 'fp8'}")), (),
                        r"checkpoint .*: operators: expected \{'head': 'fp8'\}, found \{'attention': "),
    "a named pipe": (lambda file: (file.unlink(), os.mkfifo(file)), (),
                     r"checkpoint .*: expected a file, found a named pipe"),
    "a text": (lambda file: file.write_text("a text"), (), r"checkpoint .*: expected train_gpt checkpoint 2, .*"),
    "empty": (lambda file: file.write_bytes(b""), (), r"checkpoint .*: expected train_gpt checkpoint 2, .*"),
    "cut": (lambda file: os.truncate(file, file.stat().st_size // 2), (),
            r"checkpoint .*: expected train_gpt checkpoint 2, as --checkpoint writes it, found '.*"),
    "weights of something else": (lambda file: torch.save({"weight": torch.zeros(3)}, file), (),
                                  r"checkpoint .*: expected train_gpt checkpoint 2, as .*, found ''format''"),
    "a tensor": (lambda file: torch.save(torch.zeros(3), file), (), r"checkpoint .*: expected train_gpt checkpoint 2"),
    "another version": (edited(lambda content: content.update(format="train_gpt checkpoint 0")), (),
                        r"checkpoint .*: expected train_gpt checkpoint 2, .*, found train_gpt checkpoint 0"),
    "another script": (edited(lambda content: content["run"].update(script="0" * 64)), (),
                       r"checkpoint .*: script: expected 0{64}, found \w{64}; fix: go on with what the run began with"),
    "other data": (edited(lambda content: content["run"].update(data="1" * 64)), (),
                   r"checkpoint .*: data: expected 1"),
    "several processes": (edited(lambda content: content["run"].update(processes="2")), (),
                          r"checkpoint .*: processes: expected 2, found 1"),
    "other micro-batches": (lambda file: None, ("--micro-batch-tokens", "64"),
                            r"checkpoint .*: micro-batches: expected [\d, ]+ tokens by stage, found 64, 128, 128 "),
    "rows dealt out": (edited(lambda content: content["run"].update(processes="1, n-gram rows in 2 parts")), (),
                       r"checkpoint .*: processes: expected 1, n-gram rows in 2 parts, found .* 1 parts"),
    "another length": (lambda file: None, ("--length", "2"),
                       r"checkpoint .*: preset: expected tiny, 5 steps, \w+, found tiny, 10 steps, \w+"),
    "another seed": (lambda file: None, ("--seed", "4"), r"checkpoint .*: seed: expected 3, found 4"),
    "another rank's": (edited(lambda content: content["run"].update(processes="1, n-gram rows in 1 parts, rank 1")),
                       (),
                       r"checkpoint .*: processes: expected 1, n-gram rows in 1 parts, rank 1, found .*, rank 0"),
    "a later step": (lambda file: None, ("--stop-after", "1"),
                     r"checkpoint .*: step: expected at most 1, where the run ends, found 2"),
    "another step in it": (edited(lambda content: content.update(step=3), seal=False), (),
                           r"checkpoint .*: expected train_gpt checkpoint 2, .*, found a file with other facts than "),
    "a fact less": (edited(lambda content: content["run"].pop("data"), seal=False), (),
                    r"checkpoint .*: expected train_gpt checkpoint 2, .*, found a file with other facts than "),
    "without a seal": (edited(lambda content: content.pop("seal"), seal=False), (),
                       r"checkpoint .*: expected train_gpt checkpoint 2, .*, found ''seal''"),
    "tensors by other names": (edited(renamed), (),
                               r"checkpoint: expected the values that were written, found others; fix: take another"),
    "tensors of other sizes": (edited(lambda content: content["state"].update(
        {name: tensor.flatten()[:-1] for name, tensor in content["state"].items() if tensor.numel() > 1})), (),
        r"checkpoint: expected the values that were written, found others; fix: take another copy"),
    "damaged": (edited(lambda content: content["state"]["MatrixBank0.weights"].view(-1)[7:8].add_(1)), (),
                r"checkpoint: expected the values that were written, found others; fix: take another copy"),
}


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    """The state of a run after two steps."""
    folder = tmp_path_factory.mktemp("checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "BOS", helpers.BOS)
        patch.setitem(tg.PRESETS, "tiny", helpers.PRESET)
        options = ["--seed", "3", "--stop-after", "2", "--checkpoint", str(folder / "state"), "--checkpoint-every", "2"]
        assert tg.main([*OPTIONS, "--data", str(corpus), "--log-dir", str(folder / "logs"), *options]) == 0
    return folder / "state"


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_cannot_be_gone_on_with(run, checkpoint, tmp_path, name):
    """One line, and exit code 2; before the warm-up, unless the file has to be read for it."""
    change, options, message = BAD_FILES[name]
    file = tmp_path / "state"
    shutil.copy(checkpoint, file)
    change(file)
    result = run("--resume", file, *options)
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "; fix: " in result.err
    assert re.match(f"train_gpt: {message}", result.err), result.err
    assert result.log is None or name == "damaged" or name.startswith("tensors")


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(run, tmp_path, monkeypatch):
    """The last checkpoint stays."""
    def save(content, path):
        if content["step"] > 2:
            Path(path).write_bytes(b"a part")
            raise RuntimeError("unexpected pos 1 vs 2\nmore")
        save_of(content, path)

    save_of = torch.save
    monkeypatch.setattr(tg.torch, "save", save)
    file = tmp_path / "state"
    result = run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 2)
    assert result.code == 0
    assert re.fullmatch(r"train_gpt: checkpoint .*: expected a writable folder with space, "
                        r"found 'unexpected pos 1 vs 2'; fix: .* The run goes on, and the last checkpoint stays.\n",
                        result.err)
    assert tg.read_checkpoint(file)["step"] == 2
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state"], "no part of a file"


def test_a_stop_while_it_is_written_leaves_the_last_one(run, tmp_path, monkeypatch):
    def save(content, path):
        if content["step"] > 2:
            Path(path).write_bytes(b"a part")
            os.kill(os.getpid(), signal.SIGTERM)
        save_of(content, path)

    save_of = torch.save
    monkeypatch.setattr(tg.torch, "save", save)
    file = tmp_path / "state"
    assert run("--seed", 3, "--checkpoint", file, "--checkpoint-every", 2).code == 143
    assert tg.read_checkpoint(file)["step"] == 2
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == ["state"]


def test_files_are_on_the_disk_before_they_take_their_names(run, tmp_path, monkeypatch):
    """Checkpoints and models. Else a power cut can leave an empty file in the place of the last one."""
    def replace_file(source, target):
        assert synced == [os.stat(source).st_ino]
        synced.clear()
        replace_of(source, target)

    synced = []
    replace_of = os.replace
    monkeypatch.setattr(tg.os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    monkeypatch.setattr(tg.os, "replace", replace_file)
    files = "--checkpoint", tmp_path / "state", "--checkpoint-every", 2, "--save", tmp_path / "model.safetensors"
    assert run("--seed", 3, *files).code == 0
    assert tg.read_checkpoint(tmp_path / "state")["step"] == 4
    assert (tmp_path / "model.safetensors").is_file()


def test_the_script_is_that_of_the_start(run, tmp_path, monkeypatch):
    """It is edited, and later gone, while it trains: the run goes on as what it began as."""
    def step(trainer, number, *arguments):
        if trainer.clock.intervals and number == 1:
            script.write_text("edited")
        if trainer.clock.intervals and number == 4:
            script.unlink()
        return step_of(trainer, number, *arguments)

    script = tmp_path / "train_gpt.py"
    shutil.copy(tg.__file__, script)
    digest = tg.files_hash([script])
    monkeypatch.setattr(tg, "__file__", str(script))
    tg.script_hash.cache_clear()
    step_of = tg.Trainer.training_step
    monkeypatch.setattr(tg.Trainer, "training_step", step)
    model = tmp_path / "model.safetensors"
    found = run("--seed", 3, "--checkpoint", tmp_path / "state", "--checkpoint-every", 2, "--save", model)
    tg.script_hash.cache_clear()
    assert found.code == 0, found.err
    assert found.log[0]["script"] == digest
    assert tg.read_checkpoint(tmp_path / "state")["run"]["script"] == digest
    content = json.loads(helpers.read_safetensors(model)[0]["__metadata__"]["content"])
    assert content["provenance"]["script"] == digest


def test_only_a_checkpoint_is_replaced(run, tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("of three years")
    result = run("--checkpoint", file, "--checkpoint-every", 2)
    assert result.code == 2
    assert re.match(r"train_gpt: checkpoint .*thesis.txt: expected train_gpt checkpoint 2, ", result.err)
    assert file.read_text() == "of three years"
    assert result.log is None


def test_a_model_does_not_replace_the_checkpoint(run, tmp_path):
    file = tmp_path / "state"
    found = run("--save", file, "--checkpoint", tmp_path / "logs/../state", "--checkpoint-every", 2)
    assert found.code == 2
    assert found.err.startswith("train_gpt: --save and --checkpoint: expected two files, found ")


def test_a_model_does_not_replace_a_ranks_checkpoint(tiny, tmp_path):
    options = tg.parse_arguments(["--save", str(tmp_path / "state.1"), "--checkpoint", str(tmp_path / "state"),
                                  "--checkpoint-every", "2"])
    with pytest.raises(tg.Failure, match="--save and --checkpoint: expected two files"):
        tg.check_start(options, tiny, tg.Ranks(1, 2, helpers.CPU))


@pytest.mark.parametrize("name", [".", "/"])
def test_a_folder_is_no_checkpoint_of_a_rank(tiny, monkeypatch, name):
    """It has no name that a rank's number could be added to."""
    monkeypatch.setattr(tg.os, "access", lambda *_: True)  # only root may write beside them
    options = tg.parse_arguments(["--checkpoint", name, "--checkpoint-every", "2"])
    with pytest.raises(IsADirectoryError):
        tg.check_start(options, tiny, tg.Ranks(1, 2, helpers.CPU))


@pytest.mark.parametrize("options", [["--checkpoint", "a"], ["--checkpoint-every", "2"]])
def test_a_place_and_a_number_go_together(tiny, capsys, options):
    with pytest.raises(SystemExit) as caught:
        tg.main(options)
    assert caught.value.code == 2
    assert "expected both --checkpoint FILE and --checkpoint-every N" in capsys.readouterr().err


# ---- two processes ---------------------------------------------------------------------------------------------------
def two_processes(corpus, folder):
    """The run without a stop, its first three steps, the rest of it, and the rest with each other's files, each by two
    processes that fork from here."""
    file = str(folder / "state")
    parts = {
        "whole": (),
        "first": ("--stop-after", "3", "--checkpoint", file, "--checkpoint-every", "3"),
        "rest": ("--resume", file),
        "exchanged": ("--resume", str(folder / "exchanged" / "state")),
        "longer": ("--resume", file, "--length", "2"),
    }
    codes = {}
    for name, options in parts.items():
        place = folder / name
        place.mkdir()
        if name == "exchanged":
            for rank in range(2):
                shutil.copy(f"{file}.{rank}", place / f"state.{1 - rank}")
        ranks = helpers.start_world(2, corpus, place, ("--eager", *options))
        for process in ranks:
            process.join(300)
        codes[name] = [process.exitcode for process in ranks]
    (folder / "codes.json").write_text(json.dumps(codes))


def test_two_processes_go_on(corpus, tmp_path):
    """Each has a file of its own, since most of the state is divided among them."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(corpus), str(tmp_path)], env=environment, timeout=900, check=True)
    said = "".join(path.read_text() for path in sorted(tmp_path.rglob("*.out")))
    codes = json.loads((tmp_path / "codes.json").read_text())
    refused = {"exchanged": [2, 2], "longer": [2, 2]}
    assert codes == {name: [0, 0] for name in ("whole", "first", "rest")} | refused, said
    assert "state: processes: expected 2, n-gram rows in 1 parts, rank 1, found 2, n-gram rows in 1 parts, " in said
    assert said.count("state: preset: expected tiny, 5 steps, ") == 1, "both ranks have met it"
    assert {path.name for path in tmp_path.glob("state*")} == {"state.0", "state.1"}
    for rank in range(2):
        whole, rest = (torch.load(tmp_path / name / f"2-{rank}.pt", weights_only=True) for name in ("whole", "rest"))
        assert same(tuple(rest.values()), tuple(whole.values()))


if __name__ == "__main__":
    two_processes(*map(Path, sys.argv[1:]))


def test_a_checkpoint_that_would_never_come(run, tmp_path):
    steps = helpers.PRESET.steps
    found = run("--checkpoint", tmp_path / "state", "--checkpoint-every", steps + 1, "--check")
    assert found.code == 2
    assert found.err == (f"train_gpt: --checkpoint-every: expected at most {steps}, the steps of this run, "
                         f"found {steps + 1}; fix: a smaller one\n")
    assert run("--checkpoint", tmp_path / "state", "--checkpoint-every", steps, "--check").code == 0


def test_a_checkpoint_that_will_be_replaced_is_named(run, tmp_path):
    """A command that is repeated without --resume begins anew, over what it could go on from."""
    file = tmp_path / "state"
    options = "--checkpoint", file, "--checkpoint-every", 2
    first = run("--seed", 3, "--stop-after", 3, *options)
    assert first.code == 0 and "replaced" not in first.err
    line = f"{file} holds step 2 of seed 3 and will be replaced: --resume {file} would go on from it\n"
    assert line in run(*options, "--check").err
    assert "replaced" not in run("--resume", file, *options, "--check").err


@pytest.mark.parametrize("options", [("--save",), ("--checkpoint-every", "2", "--checkpoint")])
def test_a_file_is_not_the_folder_of_the_logs(tiny, tmp_path, options):
    place = str(tmp_path / "kept")
    arguments = tg.parse_arguments([*options, place, "--log-dir", f"{tmp_path}/other/../kept"])
    with pytest.raises(tg.Failure, match=f"{options[-1]} and --log-dir: expected a file and a folder, found "):
        tg.check_start(arguments, tiny, tg.Ranks(0, 1, helpers.CPU))


@pytest.mark.parametrize("links", [True, False])
def test_a_model_replaces_none_that_was_made_meanwhile(tmp_path, monkeypatch, capsys, links):
    """Whoever is second gets another name, where the file system has links."""
    def no_link(*_):
        raise PermissionError("no links here")

    if not links:
        monkeypatch.setattr(sample.os, "link", no_link)
    path = tmp_path / "model.safetensors"
    for content in "abc":
        aside = tmp_path / "aside"
        aside.write_text(content)
        sample.give_name(aside, path)
        aside.unlink(missing_ok=True)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    if links:
        assert found == {"model.safetensors": "a", "model-2.safetensors": "b", "model-3.safetensors": "c"}
        second = tmp_path / "model-2.safetensors"
        assert f"saved as {second}, since {path} was made meanwhile\n" in capsys.readouterr().out
    else:
        assert found == {"model.safetensors": "c"}
