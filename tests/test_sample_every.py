"""--sample-every: texts along a training, off the clock, which change nothing of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import helpers
import sample
from helpers import PRESET, ROOT, only, read_log, tg

OPTIONS = ("--preset", "tiny", "--seed", "3")


class Stub:
    """A tokenizer that needs no files, of the tiny preset's vocabulary. It writes a token as its number."""
    n_vocab = helpers.VOCABULARY

    def encode_ordinary(self, text):
        return list(text.encode())

    def decode_single_token_bytes(self, token):
        assert isinstance(token, int)
        assert 0 <= token < helpers.VOCABULARY
        return f" {token}".encode()


@pytest.fixture
def small(tiny, monkeypatch):
    """sample.py in the vocabulary of the tiny preset."""
    monkeypatch.setattr(sample, "BOS", helpers.BOS)
    monkeypatch.setattr(sample, "load_encoding", lambda spec: Stub())


@pytest.fixture
def run(corpus, small, tmp_path, capsys):
    """run(options...) -> exit code, log, what was said, and what train returned and left, exactly."""
    def call(*options):
        folder = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
        ends = []

        def train_and_keep(trainer, *arguments):
            loss = train(trainer, *arguments)
            ends.append((loss, {name: value.clone() for name, value in trainer.optimizer.state().items()}))
            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "train", train_and_keep)
            code = tg.main([*OPTIONS, "--data", str(corpus), "--log-dir", str(folder), *map(str, options)])
        logs = [read_log(path) for path in folder.glob("*.jsonl")]
        out, err = capsys.readouterr()
        return types.SimpleNamespace(
            code=code, log=logs[0] if logs else None, out=out, err=err, end=ends[0] if ends else None)

    train = tg.train
    return call


def texts(log):
    return {line["step"]: line["text"] for line in only(log, "sample")}


def check_same_training(plain, sampled):
    """To the last bit: losses that are logged, the final one, every tensor, and the tokens."""
    losses = {line["step"]: line["train_loss"] for line in only(sampled.log, "step")}
    assert {line["step"]: line["train_loss"] for line in only(plain.log, "step")}.items() <= losses.items()
    assert plain.end[0] == sampled.end[0]
    assert plain.end[1].keys() == sampled.end[1].keys()
    assert all(plain.end[1][name].equal(sampled.end[1][name]) for name in plain.end[1])
    for name in ("train_hash", "val_hash", "loss", "recompiled", "state"):
        assert plain.log[-1][name] == sampled.log[-1][name], name


def test_samples_change_nothing(run):
    """Of the training, after every step; and the same training writes the same texts."""
    plain = run("--eager")
    sampled = run("--eager", "--sample-every", 1)
    check_same_training(plain, sampled)
    assert sampled.code == 0
    assert sampled.err == ""

    written = texts(sampled.log)
    assert list(written) == [1, 2, 3, 4, 5], "after the last step too"
    assert len(set(written.values())) == 5, "with the weights of the moment"
    for step, text in written.items():
        tokens = list(map(int, text.split()))
        assert len(tokens) == sample.ALONG_LENGTH or tokens[-1] == helpers.BOS
        assert f"step     {step}   writes {text!r}\n" in sampled.out
    assert texts(run("--eager", "--sample-every", 2).log) == {step: written[step] for step in (2, 4)}


def test_samples_compile_nothing(run, monkeypatch):
    """In a compiled training, whose steps stay the same to the bit too. Nobody counts a compilation."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="aot_eager", **options))
    plain = run()
    torch._dynamo.reset()
    sampled = run("--sample-every", 2)
    assert list(texts(sampled.log)) == [2, 4]
    assert sampled.log[-1]["recompiled"] == 0
    assert sampled.log[-1]["state"] == "ok"
    check_same_training(plain, sampled)


def test_samples_are_off_the_clock(run):
    log = run("--eager", "--sample-every", 2, "--val-every", 4).log
    reasons = [(interval["reason"], interval["on"]) for interval in only(log, "clock")]
    training = ("training", True)
    assert reasons == [training, ("sample", False), training, ("validation", False), training, ("sample", False),
                       training]
    assert log[0]["settings"]["sample_every"] == "2", "so that no record can be made of it"


def test_a_sample_is_what_the_saved_model_writes(run, monkeypatch, tmp_path, capsys):
    """sample.py continues an empty text with the same tokens, if it looks as far back as the last step."""
    *stages, last = PRESET.stages
    windows = (last.short_window_tokens, last.long_window_tokens)
    monkeypatch.setitem(tg.PRESETS, "tiny", replace(PRESET, val_attention_windows=windows))
    path = tmp_path / "model"
    log = run("--eager", "--sample-every", 5, "--save", path).log
    length = ["--length", str(sample.ALONG_LENGTH)]
    assert sample.main([str(path), "", *length]) == 0
    assert texts(log) == {5: capsys.readouterr().out.removesuffix("\n")}


@pytest.mark.fast
def test_a_text_moves_no_cursor(monkeypatch):
    """And its characters are some that the terminal has."""
    text = "\x1b[2J\r\u009b\n\u2019"
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(encoding="utf-8"))
    assert sample.on_one_line(text) == "'\\x1b[2J\\r\\x9b\\n\u2019'"
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(encoding="latin-1"))
    assert sample.on_one_line(text) == "'\\x1b[2J\\r\\x9b\\n\\u2019'"


# ---- what it cannot do without ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ["0", "-3", "1.5", "often"])
@pytest.mark.fast
def test_bad_numbers(tiny, capsys, number):
    with pytest.raises(SystemExit) as caught:
        tg.main(["--sample-every", number])
    assert caught.value.code == 2
    assert "argument --sample-every: " in capsys.readouterr().err


def no_vocabulary(monkeypatch, tmp_path):
    """Neither beside the sample data nor, as there is no network, anywhere else."""
    from data import fineweb
    tiktoken = types.ModuleType("tiktoken")

    def get_encoding(name):
        raise ConnectionError("no network")

    tiktoken.get_encoding = get_encoding
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    monkeypatch.setattr(sample, "load_encoding", fineweb.load_encoding)


def no_tiktoken(monkeypatch, tmp_path):
    from data import fineweb
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(sample, "load_encoding", fineweb.load_encoding)


def no_sample_script(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sample", None)


def another_vocabulary(monkeypatch, tmp_path):
    monkeypatch.setattr(Stub, "n_vocab", 50257)


@pytest.mark.parametrize("lack, told", [
    (no_vocabulary, r"GPT-2 vocabulary: expected its two files in .*, found ConnectionError; fix: git checkout .*"),
    (no_tiktoken, r"--sample-every: expected the package tiktoken, found none; fix: pip install .*"),
    (no_sample_script, r"--sample-every: expected sample.py and .* beside train_gpt.py, found .*; fix: start it in .*"),
    (another_vocabulary, r"--sample-every: expected a model of GPT-2's 50257 tokens, found \d+; fix: leave .*"),
])
@pytest.mark.parametrize("check", [(), ("--check",)])
@pytest.mark.fast
def test_what_is_missing_is_told_before_the_training(run, monkeypatch, tmp_path, lack, told, check):
    lack(monkeypatch, tmp_path)
    result = run("--eager", "--sample-every", 2, *check)
    assert result.code == 2
    assert re.fullmatch(f"train_gpt: {told}\n", result.err)
    assert result.log is None
    assert run("--check").code == 0, "without the option nothing is missing"


def test_a_script_has_one_trainer():
    """sample.py, which only this option imports, reads the script that runs, and no second copy of it."""
    command = [sys.executable, "-X", "importtime", "train_gpt.py", "--preset", "smoke", "--check"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for options, expected in (([], set()), (["--sample-every", "3"], {"sample"})):
        result = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr
        imported = set(re.findall(r"^import time:.*\| +(\S+)$", result.stderr, re.MULTILINE))
        assert "torch" in imported
        assert imported & {"sample", "train_gpt"} == expected


# ---- two processes ---------------------------------------------------------------------------------------------------
SAMPLED = "--sample-every", "2"


def two_processes(corpus, folder):
    """The run without samples, with some, and with some where ranks share memory and each holds a part of the rows, by
    two processes each that fork from here. They note heartbeats and texts."""
    def write(samples, trainer, done):
        (folder / f"text-{trainer.ranks.rank}-{done}").touch()
        return text_of(samples, trainer, done)

    def note(watchdog, doing, patience=1.0):
        with (folder / f"beats-{watchdog.ranks.rank}").open("a") as file:
            print(doing, patience, sep=": ", file=file)
        heartbeat(watchdog, doing, patience)

    heartbeat = tg.Watchdog.heartbeat
    tg.Watchdog.heartbeat = note
    text_of = sample.Samples.text
    sample.Samples.text = write
    sample.BOS = helpers.BOS
    sample.load_encoding = lambda spec: Stub()
    codes = {}
    for name, options in {"plain": (), "sampled": SAMPLED, "sharing": SAMPLED}.items():
        place = folder / name
        place.mkdir()
        ranks = helpers.start_world(2, corpus, place, ("--eager", *options), None, name == "sharing")
        for process in ranks:
            process.join(300)
        codes[name] = [process.exitcode for process in ranks]
    (folder / "codes.json").write_text(json.dumps(codes))


def test_one_of_two_processes_writes(corpus, tmp_path):
    """The other waits, and may do so for as long as a warm-up takes; both train as without."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(corpus), str(tmp_path)], env=environment, timeout=900, check=True)
    said = {rank: (tmp_path / "sampled" / f"2-{rank}.out").read_text() for rank in range(2)}
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == {name: [0, 0] for name in ("plain", "sampled", "sharing")}, said
    assert said[0].count(" writes ") == 2
    assert said[1] == ""
    assert {path.name for path in tmp_path.glob("text-*")} == {"text-0-2", "text-0-4"}
    written, shared = (
        texts(read_log(next((tmp_path / name).glob("logs-2/*.jsonl")))) for name in ("sampled", "sharing"))
    assert list(written) == [2, 4]
    assert shared == written
    for rank in range(2):
        beats = (tmp_path / f"beats-{rank}").read_text().splitlines()
        assert [beat for beat in beats if "sample" in beat] == [
            f"the sample of step {step}: {tg.WARM_UP_PATIENCE}" for step in (2, 4, 2, 4)]
        plain, sampled = (
            torch.load(tmp_path / name / f"2-{rank}.pt", weights_only=True) for name in ("plain", "sampled"))
        assert plain["loss"] == sampled["loss"]
        assert all(plain["state"][name].equal(sampled["state"][name]) for name in plain["state"])


if __name__ == "__main__":
    two_processes(*map(Path, sys.argv[1:]))
