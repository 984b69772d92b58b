"""Curves for other programs, during a run and after it: the numbers are those of the log."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

import helpers
from helpers import PRESET, ROOT, only, read_log, tg

sys.path.insert(0, str(ROOT / "records"))
OPTIONS = ("--preset", "tiny", "--eager", "--seed", "3")


class Writer:
    """In place of torch's SummaryWriter, whose package need not be installed."""
    made = []

    def __init__(self, folder):
        self.folder = folder
        self.scalars = []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setattr(Writer, "made", [])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    return Writer


@pytest.fixture
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.fixture
def train(corpus, tiny, tmp_path, capsys):
    """train(options...) -> exit code, path of the log, what was said."""
    def call(*options):
        arguments = [*OPTIONS, "--data", corpus, "--log-dir", tmp_path / "logs", *options]
        code = tg.main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return types.SimpleNamespace(code=code, log=next((tmp_path / "logs").glob("*.jsonl"), None), out=out, err=err)
    return call


def export(*arguments):
    """`python records export`, in this process. Returns the exit code."""
    main = runpy.run_path(str(ROOT / "records/__main__.py"), run_name="records")["main"]
    return main(["export", *map(str, arguments)])


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


# ---- during a run ----------------------------------------------------------------------------------------------------
def test_tensorboard_gets_what_the_log_gets(train, writer, tmp_path):
    result = train("--tensorboard", tmp_path / "board", "--val-every", 2)
    assert result.code == 0
    (made,) = writer.made
    assert made.closed
    assert made.folder == tmp_path / "board" / result.log.stem
    log = read_log(result.log)
    expected = {("val/loss", event["loss"], event["step"]) for event in only(log, "val")}
    for event in only(log, "step"):
        expected |= {(f"step/{name}", event[name], event["step"]) for name in ("train_loss", "ms_per_step", "tokens")}
    assert set(made.scalars) == expected
    assert len(made.scalars) == len(expected)


def test_tensorboard_that_fails_costs_its_curves_only(train, writer, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("no space left")

    monkeypatch.setattr(Writer, "add_scalar", fail)
    result = train("--tensorboard", tmp_path / "board")
    assert result.code == 0
    assert result.err == ("curves: expected to write them, found 'no space left'; "
                          "fix: free or permit their folder. The run goes on without.\n")
    assert read_log(result.log)[-1]["state"] == "ok"


def test_tensorboard_is_optional(train, no_tensorboard, tmp_path):
    """One line before anything is built."""
    result = train("--tensorboard", tmp_path / "board")
    assert result.code == 2
    assert re.fullmatch(r"train_gpt: --tensorboard: expected the package tensorboard, found '.*'; "
                        r"fix: pip install tensorboard, or without it python records export RUN --csv\n", result.err)
    assert result.log is None
    assert not (tmp_path / "board").exists()


def test_a_price_tells_the_cost(train):
    """No option of the run: the same training may be a record."""
    result = train("--gpu-hour-price", 2.5)
    told = r"cost at 2.5 an hour for each of 1 GPU\(s\): 0.\d{4} since the start, 0.\d{4} of it on the clock"
    assert re.fullmatch(told, result.out.splitlines()[-1])
    assert "gpu_hour_price" not in read_log(result.log)[0]["settings"]


def test_all_ranks_cost():
    clock = types.SimpleNamespace(since_start=lambda: 7200.0, milliseconds=lambda: 1.8e6)
    told = "cost at 1.25 an hour for each of 8 GPU(s): 20.0000 since the start, 5.0000 of it on the clock"
    assert tg.costs(types.SimpleNamespace(world=8), clock, 1.25) == told


def test_bits_a_byte(train, corpus, monkeypatch):
    """Of the text of the validation's targets."""
    sizes = np.arange(helpers.VOCABULARY) % 7
    monkeypatch.setattr(tg, "token_bytes", lambda vocabulary: sizes)
    result = train()
    end = read_log(result.log)[-1]
    targets = np.fromfile(corpus / "tiny_val_000000.bin", "<u2", offset=1024)[1:PRESET.val_tokens + 1]
    assert end["val_bytes"] == sizes[targets].sum()
    bits = end["loss"] / math.log(2) * PRESET.val_tokens / end["val_bytes"]
    (found,) = re.findall(r"^([\d.]+) bits a byte of text; [\d,]+ tokens/s; log: ", result.out, re.MULTILINE)
    assert float(found) == pytest.approx(bits, abs=1e-4)


def test_no_bits_where_nobody_knows_the_bytes(train):
    result = train()
    assert "bits a byte" not in result.out
    assert read_log(result.log)[-1]["val_bytes"] is None


def test_no_bits_of_another_tokenizer(train, corpus, monkeypatch, tmp_path):
    """Whose tokens stand for other bytes than GPT-2's. Its ranks lie beside the shards."""
    monkeypatch.setattr(tg, "token_bytes", lambda vocabulary: np.ones(helpers.VOCABULARY, int))
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    (folder / "text.tiktoken").write_text("YQ== 0\n")
    assert "bits a byte" not in train("--data", folder).out


@pytest.mark.parametrize("text", ['{"a": 0, "b', "\\ud800".encode("utf-16")])
def test_a_damaged_vocabulary(tmp_path, monkeypatch, text):
    """No JSON, or no UTF-8."""
    sample = tmp_path / "data" / "sample"
    sample.mkdir(parents=True)
    file = sample / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(tg, "__file__", str(tmp_path / "train_gpt.py"))
    with pytest.raises(tg.Failure, match="vocabulary .*: expected GPT-2's encoder.json, found '.*'; fix: git checkout"):
        tg.token_bytes(50257)


def test_bytes_of_tokens():
    """Those of GPT-2's vocabulary beside the sample."""
    sizes = tg.token_bytes(50257)
    encoder = json.loads((ROOT / "data/sample/6c7ea1a7e38e3a7f062df639a5b80947f075ffe6").read_text(encoding="utf-8"))
    assert sizes[encoder["Ġhello"]] == len(b" hello")
    assert sizes[encoder["ÃŃ"]] == len("í".encode())
    assert sizes[tg.BOS] == 0
    assert sizes.min() == 0
    assert (sizes > 0).sum() == 50256
    assert tg.token_bytes(509) is None


# ---- after it --------------------------------------------------------------------------------------------------------
def test_a_table_of_a_run(train, capsys, monkeypatch):
    monkeypatch.setattr(tg, "token_bytes", lambda vocabulary: np.full(vocabulary, 4))
    path = train("--val-every", 2).log
    capsys.readouterr()
    assert export(path, "--csv") == 0
    rows = table(capsys.readouterr().out)
    log = read_log(path)
    steps = only(log, "step")
    assert [(int(row["step"]), float(row["train_loss"]), int(row["tokens"])) for row in rows] == [
        (line["step"], line["train_loss"], line["tokens"]) for line in steps]
    found = {int(row["step"]): float(row["val_loss"]) for row in rows if row["val_loss"]}
    assert found == {line["step"]: line["loss"] for line in only(log, "val")}
    assert float(rows[-1]["val_bits_per_byte"]) == pytest.approx(found[PRESET.steps] / math.log(2) / 4, abs=1e-6)
    assert [float(row["seconds"]) for row in rows] == sorted(float(row["seconds"]) for row in rows)


def test_a_table_of_a_run_in_progress(train, tmp_path, capsys):
    """And of one that was killed: its last line may be cut."""
    path = train().log
    part = tmp_path / "part.jsonl"
    part.write_text("".join(path.read_text().splitlines(keepends=True)[:5]) + '{"kind": "st')
    capsys.readouterr()
    assert export(part, "--csv") == 0
    assert [row["step"] for row in table(capsys.readouterr().out)] == ["1"]


def test_events_of_a_run(train, writer, tmp_path, capsys):
    path = train().log
    assert export(path, "--tensorboard", tmp_path / "board") == 0
    (made,) = writer.made
    assert made.closed
    assert made.folder == tmp_path / "board" / path.stem
    losses = {(value, step) for name, value, step in made.scalars if name == "train_loss"}
    assert losses == {(line["train_loss"], line["step"]) for line in only(read_log(path), "step")}


def test_what_cannot_be_exported(train, no_tensorboard, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("a text\n")
    path = train().log
    for arguments, told in (
        ((tmp_path / "none.jsonl", "--csv"), r"records: log .*none.jsonl: expected a readable file, found "),
        ((tmp_path / "a.jsonl", "--csv"), r"records: export .*: expected a log with steps, found line 1 is no event"),
        ((path, "--tensorboard", tmp_path), r"records: export --tensorboard: expected the packages torch and "),
    ):
        capsys.readouterr()
        assert export(*arguments) == 2
        said = capsys.readouterr().err
        assert re.match(told, said), said
        assert "; fix: " in said
        assert said.count("\n") == 1


def test_the_command():
    path = next((ROOT / "records").glob("2026-11-2*/runs/*.jsonl"))
    command = [sys.executable, "records", "export", str(path), "--csv"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = table(result.stdout)
    log = read_log(path)
    assert len(rows) >= len(only(log, "step"))
    assert float(rows[-1]["val_loss"]) == only(log, "val")[-1]["loss"]
