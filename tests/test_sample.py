"""sample.py: a model that a training has saved evaluates to its loss, continues texts and is copied, or is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
import torch

import helpers
import sample
from helpers import CPU, MODEL, PRESET, ROOT, read_log, tg


class Stub:
    """A tokenizer that needs no files: bytes are tokens. It writes a token as its number."""

    def encode_ordinary(self, text):
        return list(text.encode())

    def decode_single_token_bytes(self, token):
        assert isinstance(token, int)
        assert 0 <= token < helpers.VOCABULARY
        return f" {token}".encode()


@pytest.fixture
def bytes_as_tokens(monkeypatch):
    monkeypatch.setattr(sample, "load_encoding", lambda spec: Stub())


@pytest.fixture
def small(tiny, monkeypatch):
    """sample.py in the small vocabulary of the tiny preset."""
    monkeypatch.setattr(sample, "BOS", helpers.BOS)


@pytest.fixture(scope="module")
def kept():
    """What one training has left for all tests."""
    return {}


@pytest.fixture
def saved(kept, corpus, small, tmp_path, capsys):
    """A saved model, which a test may change, and the log of its training."""
    path = tmp_path / "model.safetensors"
    if not kept:
        options = ["--preset", "tiny", "--data", corpus, "--seed", 3, "--log-dir", tmp_path / "logs", "--save", path]
        assert tg.main([str(option) for option in options]) == 0
        (log,) = (tmp_path / "logs").glob("*.jsonl")
        kept |= {"model": path.read_bytes(), "log": read_log(log)}
        capsys.readouterr()
    path.write_bytes(kept["model"])
    return path, kept["log"]


@pytest.fixture
def use(capsys):
    """use(arguments...) -> exit code of sample.py, standard output, standard error."""
    def call(*arguments):
        code = sample.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return types.SimpleNamespace(code=code, out=out, err=err)
    return call


def unpacked(rows, scales):
    """What stored bytes mean: numbers of a row's first half, then of its second, times the scale of their group."""
    numbers = np.concatenate([rows.numpy() % 16, rows.numpy() // 16], axis=1).astype("float32") - 8
    return torch.from_numpy(numbers) * scales.float().repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_the_tokenizer_is_the_trainings(monkeypatch, tmp_path):
    """Its ranks lie beside the shards, or are given where these are gone; those of others are refused."""
    monkeypatch.setattr(sample, "load_encoding", lambda spec: spec)
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in (shards / "text.tiktoken", tmp_path / "same", tmp_path / "other"):
        path.write_text(path.name)
    (tmp_path / "same").write_text("text.tiktoken")
    validation = {"data": str(shards), "encoding": hashlib.sha256(b"text.tiktoken").hexdigest()}
    own = {"validation": validation}
    gone = {"validation": validation | {"data": "gone"}}
    gpt2 = {"validation": validation | {"encoding": None}}
    old = {"validation": {"data": "gone"}}  # from before a file said so
    assert sample.encoding_of(own, None) == str(shards / "text.tiktoken")
    assert sample.encoding_of(gone, tmp_path / "same") == str(tmp_path / "same")
    assert sample.encoding_of(gpt2, None) == sample.encoding_of(old, None) == "gpt2"
    for content, given in ((own, tmp_path / "other"), (gone, None), (gpt2, tmp_path / "same")):
        with pytest.raises(tg.Failure, match="--encoding: expected .* training.*, found "):
            sample.encoding_of(content, given)


@pytest.mark.fast
def test_the_shards_of_a_training_in_the_repository(monkeypatch, tmp_path):
    """A model finds them from any folder, unless that has some of this name."""
    content = {"validation": {"data": "data/sample"}}
    monkeypatch.chdir(tmp_path)
    assert sample.shards_of(content) == helpers.ROOT / "data" / "sample"
    (tmp_path / "data" / "sample").mkdir(parents=True)
    assert str(sample.shards_of(content)) == "data/sample"


@pytest.mark.fast
def test_options_may_stand_before_the_text():
    for words in (["m", "--length", "3", "hi"], ["--length", "3", "m", "hi"], ["m", "hi", "--length", "3"]):
        options = sample.parse_arguments(words)
        assert (str(options.model), options.text, options.length) == ("m", "hi", 3)


@pytest.mark.parametrize("name", ["file/x", "x" * 254])
def test_a_place_where_nothing_can_be_written(saved, use, tmp_path, name):
    """A file for a folder, and a name that leaves no room for that of the file aside."""
    (tmp_path / "file").touch()
    result = use(saved[0], "--export", tmp_path / name)
    assert result.code == 2
    assert result.err.startswith(f"sample: saving {tmp_path / name}: expected a writable folder with space, found ")


# ---- validation ------------------------------------------------------------------------------------------------------
@pytest.mark.fast
def test_a_saved_model_evaluates_to_its_loss(saved, use, corpus):
    """On the folder that --data of the training named, without naming it again: its tokens are in the file."""
    path, log = saved
    found = use(path, "--eval")
    pattern = rf"val loss (\d\.\d{{6}}) on {re.escape(str(corpus))}; logged (\d\.\d{{6}})\n"
    loss, logged = map(float, re.fullmatch(pattern, found.out).groups())
    assert found.code == 0
    assert found.err == ""
    assert loss == pytest.approx(log[-1]["loss"], rel=1e-5)
    assert logged == pytest.approx(log[-1]["loss"], abs=1e-6)
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name], "nothing is left beside it"

    model, content = sample.load_model(path, CPU)
    assert content["provenance"]["seed"] == 3
    assert content["validation"]["hash"] == log[-1]["val_hash"]
    assert content["provenance"]["data"] == log[0]["data"]
    assert model.config == MODEL
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.fast
def test_other_tokens_are_told_from_those_of_the_training(saved, use, corpus, tmp_path):
    """Their loss is another one, and no failure."""
    path, _ = saved
    other = tmp_path / "other"
    other.mkdir()
    helpers.write_shard(other / "x_val_000000.bin", helpers.documents(1500, seed=31))
    found = use(path, "--eval", "--data", other)
    pattern = rf"val loss \d\.\d+ on {other}; logged \d\.\d+ on other tokens, of {re.escape(str(corpus))}\n"
    assert found.code == 0
    assert re.fullmatch(pattern, found.out)

    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "y_val_000000.bin").write_bytes(next(corpus.glob("*_val_*.bin")).read_bytes())
    assert "other tokens" not in use(path, "--eval", "--data", copy).out, "the same tokens under another name"


@pytest.mark.fast
def test_only_the_first_validation_shard_is_read(saved, use, corpus, tmp_path):
    """As in the training: neither its own shards nor a later one for validation, whose tokens would be others."""
    path, log = saved
    folder = tmp_path / "several"
    folder.mkdir()
    for shard in corpus.glob("*.bin"):
        (folder / shard.name).write_bytes(shard.read_bytes())
    helpers.write_shard(folder / "tiny_val_000001.bin", helpers.documents(1500, seed=32))
    assert "other tokens" not in use(path, "--eval", "--data", folder).out
    model, content = sample.load_model(path, CPU, rows_too=True)
    loss, digest = sample.evaluate_model(model, content, folder)
    assert digest == log[-1]["val_hash"]
    assert loss == pytest.approx(log[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("logged, code", [(0.009, 0), (0.011, 2), (-0.011, 2), (math.nan, 2)])
def test_another_loss_than_the_logged_one_fails(saved, use, logged, code):
    path, log = saved
    helpers.edit_model(path, lambda _, content: content["validation"].update(loss=log[-1]["loss"] + logged))
    found = use(path, "--eval")
    assert found.code == code
    pattern = r"sample: val loss: expected within 0.01 of the logged .*, found .*; fix: .*\n"
    assert not code or re.fullmatch(pattern, found.err)


def test_a_folder_that_is_gone(saved, use):
    path, _ = saved
    helpers.edit_model(path, lambda _, content: content["validation"].update(data="nowhere"))
    found = use(path, "--eval")
    assert found.code == 2
    assert found.err.startswith("sample: val shards: expected nowhere/*_val_*.bin, found none; fix: ")


# ---- continuing a text -----------------------------------------------------------------------------------------------
def test_sampling(saved, use, bytes_as_tokens, monkeypatch, capsys):
    path, _ = saved
    first, again = (use(path, "Once") for _ in range(2))
    assert first.out == again.out
    assert re.fullmatch(r"Once( \d+){1,256}\n", first.out)
    assert re.fullmatch(rf"{len(first.out.split()) - 1} tokens, \d+\.\d a second\n", first.err)

    with monkeypatch.context() as patch:  # where the terminal's encoding lacks a character
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
        assert sample.main([str(path), "café"]) == 0
        assert sys.stdout.buffer.getvalue().startswith("café ".encode())

    drawn = iter([5, 6, helpers.BOS, 7])
    shown = []

    def draw(*_):
        shown.append(capsys.readouterr().out)
        return next(drawn)

    monkeypatch.setattr(sample, "draw", draw)
    assert sample.main([str(path), "Once"]) == 0
    shown.append(capsys.readouterr().out)
    assert shown == ["Once", " 5", " 6", f" {helpers.BOS}\n"], "each as it is drawn, and a text ends with its document"


def test_options_of_sampling(saved, use, bytes_as_tokens):
    path, _ = saved

    def text(*options):
        return use(path, "Once", *options).out

    plain = text("--length", 40)
    assert len(plain.split()) <= 41
    assert text("--length", 40, "--seed", 0) == plain != text("--length", 40, "--seed", 1)

    likeliest = text("--length", 9, "--top-p", 0)
    assert likeliest == text("--length", 9, "--top-p", 0, "--seed", 5)
    assert plain.split()[:10] != likeliest.split() != text("--length", 9, "--temperature", 100).split()


@pytest.mark.fast
def test_tokens_are_drawn_as_often_as_they_are_likely():
    """By temperature, and from the likeliest that make up a share: the one that passes it is the last."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    cases = {(1.0, 1.0): p, (0.5, 1.0): p**2 / (p**2).sum(), (0.01, 1.0): torch.tensor([0.0, 1, 0, 0]),
             (1.0, 0.75): torch.tensor([0, 4, 2, 3]) / 9,
             (1.0, 0.65): torch.tensor([0, 4, 0, 3]) / 7, (1.0, 0.0): torch.tensor([0.0, 1, 0, 0])}
    for (temperature, top_p), expected in cases.items():
        generator = torch.Generator().manual_seed(1)
        drawn = [sample.draw(p, temperature, top_p, generator) for _ in range(3000)]
        found = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
        assert found.sub(expected).abs().max() < 0.03
        assert not found[expected == 0].any()


def typing(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))


def test_a_prompt_that_tiktoken_cannot_split(saved, use, monkeypatch):
    class Panicking(Stub):
        def encode_ordinary(self, text):
            raise type("PanicException", (BaseException,), {})

    monkeypatch.setattr(sample, "load_encoding", lambda spec: Panicking())
    found = use(saved[0], " " * 20_000 + "x")
    assert found.code == 2
    assert found.err == ("sample: document: expected a text that tiktoken can split, found 20,001 characters that it "
                         "cannot; fix: a shorter one\n")


def test_a_loop_of_prompts(saved, use, bytes_as_tokens, monkeypatch):
    """Each line begins a document of its own; the end of the input ends the loop."""
    path, _ = saved
    typing(monkeypatch, b"Once\n\nTwice\n")
    found = use(path, "--length", 3)
    assert found.code == 0
    assert re.fullmatch(r"Once( \d+){1,3}\n( \d+){1,3}\nTwice( \d+){1,3}\n", found.out)
    assert found.err.count(" a second\n") == 3
    assert found.out.startswith(use(path, "Once", "--length", 3).out)


def test_bytes_that_are_no_text_in_the_loop(monkeypatch):
    typing(monkeypatch, b"ab\xff\n")
    assert list(sample.typed_lines()) == ["ab\udcff"]


def test_no_standard_input_at_all(saved, use, bytes_as_tokens, monkeypatch):
    """As after `<&-` in a shell: nothing is typed."""
    monkeypatch.setattr("sys.stdin", None)
    found = use(saved[0])
    assert (found.code, found.out) == (0, "")


def test_ctrl_c_in_the_loop(saved, use, bytes_as_tokens, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    typing(monkeypatch, b"")
    monkeypatch.setattr("builtins.input", interrupted)
    found = use(saved[0])
    assert found.code == 130
    assert found.err == "sample: interrupted\n"


def test_a_reader_that_has_seen_enough():
    """As `| head` is: no error of the disk's."""
    code = ("import sys, sample\ndef read(*_): raise BrokenPipeError\nsample.sample = read\n"
            "sys.exit(sample.main(['model', 'text']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("options, told", [
    (["--eval", "--export", "x"], "one at a time"), (["--data", "x"], "--data does nothing"),
    (["--dense"], "--dense does nothing"), (["--megabytes", "9"], "--megabytes does nothing"),
    (["--megabytes", "0"], "--megabytes does nothing"),
    (["--export", "x", "--dense", "--megabytes", "9"], "one at a time"), (["text", "--eval"], "a text does nothing"),
    (["--seed", "1", "--eval"], "--seed does nothing"), (["--top-p", "1", "--export", "x"], "--top-p does nothing"),
    (["--length", "256", "--eval"], "--length does nothing"), (["--temperature", "nan"], "--temperature"),
    (["--temperature", "0"], "--temperature"), (["--top-p", "1.1"], "--top-p"), (["--length", "0"], "--length"),
    (["--seed", "-1"], "--seed"), (["a", "b"], "unrecognized"), (["--sed", "1"], "unrecognized")])
@pytest.mark.fast
def test_wrong_options_exit_with_2(capsys, options, told):
    """Options that would do nothing are refused, not ignored, also with the value that they have without."""
    with pytest.raises(SystemExit) as caught:
        sample.main(["model", *options])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("script, package", [("train_gpt", "torch"), ("train_gpt", "numpy"), ("sample", "torch")])
def test_without_a_package_one_line(tmp_path, script, package):
    """In a Python that lacks it, as the system's may: no traceback."""
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')\n")
    result = subprocess.run([sys.executable, str(ROOT / f"{script}.py"), "--help"], capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert re.fullmatch(rf"{script}: {package}: expected it installed, found none; fix: \./run\.sh.*\n", result.stderr)


def test_sampling_without_tiktoken(saved, use, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    found = use(saved[0], "Once")
    assert found.code == 2
    assert re.fullmatch(r"sample: tiktoken: expected it installed, found none; fix: pip install -r .*\n", found.err)


def test_the_vocabulary_needs_no_network(tmp_path):
    """In a process that has no cache and no network: both files are in data/sample, whatever the user's cache holds."""
    pytest.importorskip("tiktoken")
    code = f"""
import os, socket, sys
def refused(*_): raise OSError("no network")
socket.socket.connect = socket.getaddrinfo = refused
sys.path.insert(0, {str(ROOT)!r})
before = dict(os.environ)
from data.fineweb import load_encoding
encoding = load_encoding("gpt2")
assert os.environ == before
assert encoding.encode_ordinary("Once upon a time") == [7454, 2402, 257, 640] and encoding.n_vocab == 50257
"""
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    for cache in ({}, {"TIKTOKEN_CACHE_DIR": str(tmp_path / "empty")}):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment | cache, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


# ---- rows of the n-gram table ----------------------------------------------------------------------------------------
@pytest.mark.fast
def test_rows_that_were_not_trained_are_not_saved(saved):
    """The others are, in the order of their ids: all that the optimizer has ever updated."""
    path, _ = saved
    header, data = helpers.read_safetensors(path)
    assert "ngram.scales" not in header
    ids, rows = (header[f"ngram.{name}"]["shape"] for name in ("ids", "rows"))
    assert ids == rows[:1]
    assert rows[1] == MODEL.width / 2
    assert 0 < rows[0] < 0.9 * 2 * MODEL.table_rows
    model, _, stored = sample.read_model_file(path)
    assert (stored.ids.diff() > 0).all()
    assert stored.rows.any(1).all()
    assert model.ngram.is_meta
    sizes = [p.nbytes for p in (*model.parameters(), model.inclusion_rates) if p is not model.ngram]
    assert len(data) == sum(sizes) + stored.ids.nbytes + stored.rows.nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_stored_rows_are_those_of_the_table(saved, packed):
    """Of any ids, those below, between and above the stored ones included."""
    _, _, stored = sample.read_model_file(saved[0])
    ids = stored.ids[5:-5]
    rows = stored.rows[5:-5]
    scales = None
    values = rows
    if packed:
        rows, scales = sample.quantize_rows(rows)
        values = unpacked(rows, scales)
    wanted = torch.arange(2 * MODEL.table_rows, dtype=torch.int32).flip(0).view(-1, 4)
    table = torch.zeros(2 * MODEL.table_rows, MODEL.width // 2)
    table[ids.long()] = values
    found = sample.StoredRows(ids, rows, scales).sums(wanted, torch.empty(0, device="meta"))
    expected = torch.nn.functional.embedding(wanted.long(), table).sum(1)
    assert found.dtype == torch.float32
    assert found.allclose(expected, rtol=0, atol=1e-7)


@pytest.mark.fast
def test_a_row_has_a_scale_for_each_32_numbers():
    """A group of zeros among others stays so; the largest of a group is itself but for its scale's rounding."""
    sizes = torch.tensor([1e-30, 1e-4, 1e-2, 1.0, 1e2, 1e4]).repeat_interleave(32)
    rows = torch.randn(9, 192, generator=torch.Generator().manual_seed(1)) * sizes
    rows[3, 64:96] = 0
    packed, scales = sample.quantize_rows(rows)
    assert packed.shape == (9, 96)
    assert scales.shape == (9, 6)
    groups = rows.view(9, 6, 32)
    found = unpacked(packed, scales).view(9, 6, 32)
    assert sample.unpack_rows(packed, scales).equal(found.view(9, 192))
    assert (found[3, 2] == 0).all(), "numbers too small for a scale are zero"
    assert (found[:, 0] == 0).all(), "numbers too small for a scale are zero"
    largest = groups[:, 1:].abs().amax(2)
    assert found[:, 1:].abs().amax(2).allclose(largest, rtol=2**-8)
    room = 0.52 * largest[..., None] / 7 + 2**-8 * largest[..., None]
    assert ((found[:, 1:] - groups[:, 1:]).abs() <= room).all()


# ---- copies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_rows_are_rounded_to_four_bits(corpus, small, tmp_path, dtype):
    """Each number to the nearest of 15: within half a seventh of the largest of its 16; many parts are in place."""
    model = dataclasses.replace(MODEL, dtype=dtype, ngram_rows=2**16)
    trainer = helpers.make_trainer(corpus, dataclasses.replace(PRESET, model=model))
    table = trainer.model.ngram.detach()
    sizes = torch.logspace(-6, 1, len(table))[:, None]
    table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(0)) * sizes)
    table[::3] = 0
    table[7, 3] = -100
    sample.save_model(tmp_path / "model", trainer, 1.0, seed=0)
    _, _, whole = sample.read_model_file(tmp_path / "model", rows_too=True)
    assert whole.rows.dtype == table.dtype
    assert whole.rows.equal(table[whole.ids.long()])

    for source in ("model", "compact"):  # a copy of a copy is that copy
        sample.export_model(tmp_path / source, tmp_path / f"of {source}", dense=False)
        (tmp_path / f"of {source}").rename(tmp_path / "compact")
        _, _, stored = sample.read_model_file(tmp_path / "compact", rows_too=True)
        assert (stored.rows.dtype, stored.scales.dtype) == (torch.uint8, torch.bfloat16)
        assert stored.ids.tolist() == [i for i in range(len(table)) if i % 3]
        want = table[stored.ids.long()].float().unflatten(1, (-1, 16))
        largest = want.abs().amax(2, keepdim=True)
        found = unpacked(stored.rows, stored.scales).view_as(want)
        assert found.isfinite().all()
        assert ((found - want).abs() <= 1.02 * largest / 14 + 7 * largest * 2**-9).all()
        bytes_that_occur = {low + 16 * high for low in range(1, 16) for high in range(1, 16)}
        assert len(found.unique()) > 1000
        assert set(stored.rows.flatten().tolist()) <= bytes_that_occur


@pytest.mark.fast
def test_names_that_the_terminal_lacks(saved, corpus, tmp_path, monkeypatch):
    """They are said with escapes: no copy is made and then lost in a traceback."""
    shutil.copytree(corpus, tmp_path / "d\udcff")
    copy = tmp_path / "c\u2019"
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert sample.main([str(saved[0]), "--export", str(copy)]) == 0
    assert sample.main([str(copy), "--eval", "--data", str(tmp_path / "d\udcff")]) == 0
    out.flush()
    assert re.match(rb".*/c\\u2019: [\d.]+ MB, .*\nval loss [\d.]+ on .*/d\\udcff; logged", out.buffer.getvalue())


@pytest.mark.fast
def test_a_compact_copy_evaluates_to_the_loss(saved, use, bytes_as_tokens, tmp_path):
    path, log = saved
    assert use(path, "--export", tmp_path / "out" / "compact").code == 0
    header, _ = helpers.read_safetensors(tmp_path / "out" / "compact")
    assert header["ngram.rows"]["dtype"] == "U8"
    found = use(tmp_path / "out" / "compact", "--eval")
    assert found.code == 0
    assert float(found.out.split()[2]) == pytest.approx(log[-1]["loss"], abs=1e-3)
    assert use(tmp_path / "out" / "compact", "Once", "--length", 3).code == 0


def test_a_small_copy_keeps_the_rows_that_text_asks_for_most(saved, use, bytes_as_tokens, corpus, tmp_path):
    """As many as its megabytes hold; every table is in 4 bits, matrices stay; its loss is another one, and is said."""
    path, log = saved
    whole, _, stored = sample.read_model_file(path, rows_too=True)
    uses = np.zeros(int(stored.ids[-1]) + 1, int)
    for shard in sorted(corpus.glob("*_train_*.bin")):
        documents = tg.cut_documents(tg.open_shard(shard, MODEL.vocabulary), sample.COUNTED_WINDOW)
        lookups = tg.pack({0: documents}, MODEL, pin=False).to(CPU).ngrams.flatten().numpy()
        uses += np.bincount(lookups, minlength=len(uses))
    uses = uses[stored.ids]

    fits = tmp_path / "fits"
    assert use(path, "--export", fits, "--megabytes", 1000, "--data", corpus).code == 0, "a limit that is far"
    _, _, everything = sample.read_model_file(fits)
    assert everything.ids.equal(stored.ids)
    row_bytes = 4 + everything.rows[0].nbytes + everything.scales[0].nbytes

    target = tmp_path / "small"
    megabytes = (fits.stat().st_size + sample.HEADER_ROOM - row_bytes * len(stored.ids) * 2 // 3) / 1e6
    assert use(path, "--export", target, "--megabytes", megabytes).code == 0
    assert megabytes * 1e6 - sample.HEADER_ROOM <= target.stat().st_size <= megabytes * 1e6
    small_copy, content, few = sample.read_model_file(target, rows_too=True)
    number = len(few.ids)
    assert content["rows_kept"] == [number, len(stored.ids)]
    assert use(target, "--export", tmp_path / "again", "--megabytes", 1000, "--data", corpus).code == 0
    assert sample.read_model_file(tmp_path / "again")[1]["rows_kept"] == [number, len(stored.ids)], "of the first model"
    assert 0.4 < number / len(stored.ids) < 0.8
    is_kept = np.isin(stored.ids, few.ids)
    assert is_kept.sum() == number
    assert uses[is_kept].min() >= uses[~is_kept].max()
    assert few.rows.equal(sample.quantize_rows(stored.rows)[0][is_kept])
    for name, tensor in small_copy.state_dict().items():
        before = whole.state_dict()[name]
        assert tensor.dtype == before.dtype, name
        if name == "ngram":
            continue
        if tensor.dim() == 2 and len(tensor) == len(whole.lm_head):
            before = sample.unpack_rows(*sample.quantize_rows(before))
        assert tensor.equal(before), name

    found = use(target, "--eval")
    assert found.code == 0, "though the loss is not the logged one"
    assert re.fullmatch(rf"val loss .*; logged .*; with {number:,} of {len(stored.ids):,} rows\n", found.out)
    assert use(target, "Once", "--length", 3).code == 0

    found = use(path, "--export", tmp_path / "smaller", "--megabytes", 0.001)
    assert found.code == 2
    pattern = r"sample: exporting to .*: expected room for rows .*, found none in 0.001 MB; fix: .* the 0\.\d of .*\n"
    assert re.fullmatch(pattern, found.err)


def test_exported_weights(saved, use, tmp_path):
    """Every dense tensor to the bit, of the table only the suffix matches; the file is a safetensors file."""
    path, _ = saved
    target = tmp_path / "out" / "dense.safetensors"
    assert use(path, "--export", target, "--dense").code == 0
    before = path.read_bytes()
    assert use(path, "--export", path).code == 2, "never onto itself"
    assert path.read_bytes() == before, "never onto itself"

    header, data = helpers.read_safetensors(target)
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    model, _, stored = sample.read_model_file(path)
    suffixes = stored.ids >= 2 * MODEL.ngram_rows
    rows, scales = sample.quantize_rows(stored.rows[suffixes])
    expected = dict(model.state_dict())
    expected |= {"ngram.ids": stored.ids[suffixes], "ngram.rows": rows, "ngram.scales": scales}
    assert header.keys() == expected.keys() - {"ngram"}
    assert suffixes.any()
    assert not suffixes.all()
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        tensor = torch.frombuffer(bytearray(data[start:stop]), dtype=sample.STORED_DTYPES[entry["dtype"]])
        assert start == end, name
        assert tensor.view(entry["shape"]).float().equal(expected[name].float()), name
        end = stop
    assert end == len(data)


def test_the_safetensors_library_reads_it(saved, tmp_path, monkeypatch):
    """With the example of docs/options.md, to the letter."""
    pytest.importorskip("safetensors")
    sample.export_model(saved[0], tmp_path / "dense.safetensors", dense=True)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/options.md").read_text()
    example = re.search(r"((?:    .*\n)*    .*safe_open.*\n(?:    .*\n)*)", text)[1]
    found = {}
    exec(textwrap.dedent(example), found)
    model, _, stored = sample.read_model_file(saved[0])
    first = MODEL.ngram_pieces * MODEL.ngram_rows
    kept = stored.ids >= first
    assert found["head"].equal(model.lm_head)
    assert found["content"]["model"]["width"] == MODEL.width
    assert found["ids"].equal(stored.ids[kept] - first)
    assert found["ids"].min() >= 0
    assert found["rows"].equal(unpacked(*sample.quantize_rows(stored.rows[kept])))


def test_a_mapped_model_keeps_its_dtype_on_disk_only(corpus, small, tmp_path):
    """A bfloat16 model computes in float32 on a CPU, its rows too; its file stays as it is."""
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    trainer = helpers.make_trainer(corpus, dataclasses.replace(PRESET, model=model))
    helpers.randomise(trainer.model, size=0.1)
    sample.save_model(tmp_path / "model", trainer, 1.0, seed=0)
    header, _ = helpers.read_safetensors(tmp_path / "model")
    assert [header[name]["dtype"] for name in ("lm_head", "ngram.rows", "final_gate")] == ["BF16", "BF16", "F32"]
    model, content = sample.load_model(tmp_path / "model", CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.equal(trainer.model.lm_head.float())

    wide = tg.GPT(MODEL, tg.reference_ops(), CPU)
    wide.load_state_dict(trainer.model.state_dict())
    piece = torch.randint(508, (50,)).numpy().astype("uint16")
    batch = tg.pack({0: [piece]}, MODEL, pin=False).to(CPU)
    geometry = sample.saved_geometry(content, model, 50)
    assert float(model.evaluate(batch, geometry)) == pytest.approx(float(wide.evaluate(batch, geometry)), rel=1e-6)


def test_a_token_that_the_ranks_lack():
    """A model has all of the vocabulary, and may draw it: that is no reason to end a training."""
    class Ranks:
        @staticmethod
        def decode_single_token_bytes(token):
            return {5: b"five"}[token]

    assert [sample.bytes_of(Ranks, token) for token in (5, 6)] == [b"five", "\ufffd".encode()]


# ---- bad files -------------------------------------------------------------------------------------------------------
class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)


def edit(change, signed=True):
    return lambda path: helpers.edit_model(path, change, signed)


def cut(stop):
    return lambda path: path.write_bytes(path.read_bytes()[:stop])


def zeroed(name):
    """The first half of a tensor's bytes, as a disk or a network may lose them."""
    def zero(path):
        header, data = helpers.read_safetensors(path)
        start, stop = header[name]["data_offsets"]
        count = (stop - start) // 2
        assert any(data[start:start + count])
        begin = len(path.read_bytes()) - len(data) + start
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(bytes(count))
    return zero


def foreign(path):
    """Another program's safetensors file."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def a_dense_part(path):
    part = path.with_name("part")
    sample.export_model(path, part, dense=True)
    part.replace(path)


def another_format(name):
    return edit(lambda header, _: header["__metadata__"].update(format=name))


def without_a_setting(path):
    helpers.edit_model(path, lambda _, content: content["model"].pop("pointer_scale"))


def without_a_setting_of_a_layer(path):
    helpers.edit_model(path, lambda _, content: content["model"]["layers"][3].pop("skip_from"))


def other_ngrams(_, content):
    content["lookups"] = content["lookups"].replace("17351", "17353")


OLD_TORCH_FILE = {"weights": {"lm_head": torch.zeros(3)}, "model": "{}"}
UNSIGNED = (("model", "pointer_window_tokens", 3), ("model", "value_embeddings", 10**9), ("model", "ngram_rows", 2),
            ("attention", "scale", math.nan), ("attention", "windows", (0, 8)), ("validation", "window", -4),
            ("validation", "loss", 3.0))
BAD_MODELS = {  # the fault, and what the message tells of it
    "code": (
        lambda path: path.write_bytes(pickle.dumps({"model": Code()})),
        "no whole header"),
    "code in a torch file": (
        lambda path: torch.save({"model": Code()}, path),
        "no whole header"),
    "of an older version": (
        lambda path: torch.save(OLD_TORCH_FILE, path),
        "an older version"),
    "of the version before": (
        another_format("train_gpt model 3"),
        "format train_gpt model 3"),
    "of a newer version": (
        another_format("train_gpt model 6"),
        "format train_gpt model 6"),
    "a dense part": (
        a_dense_part,
        "format dense part of train_gpt model 5"),
    "cut in its header": (
        cut(1000),
        "no whole header"),
    "cut in its tensors": (
        cut(-1000),
        "bytes: cut"),
    "cut in its length": (
        cut(5),
        "found"),
    "empty": (
        cut(0),
        "cannot mmap an empty file"),
    "missing": (
        lambda path: path.unlink(),
        "No such file"),
    "a folder": (
        lambda path: (path.unlink(), path.mkdir()),
        "Is a directory"),
    "a named pipe": (
        lambda path: (path.unlink(), os.mkfifo(path)),
        "a named pipe"),
    "text": (
        lambda path: path.write_bytes((5).to_bytes(8, "little") + b"hello" * 9),
        "JSONDecodeError"),
    "a list": (
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
        "TypeError"),
    "another program's": (
        foreign,
        "KeyError('__metadata__')"),
    "missing a weight": (
        edit(lambda header, _: header.pop("lm_head")),
        "state_dict"),
    "of another shape": (
        edit(lambda header, _: header["lm_head"]["shape"].reverse()),
        "state_dict"),
    "claiming another size": (
        edit(lambda header, _: header["lm_head"].update(shape=[512, 10**12])),
        "RuntimeError("),
    "of another dtype": (
        edit(lambda header, _: header["lm_head"].update(dtype="Q4")),
        "KeyError('Q4')"),
    "without ids": (
        edit(lambda header, _: header.pop("ngram.ids")),
        "KeyError('ngram.ids')"),
    "without rows": (
        edit(lambda header, _: header.pop("ngram.rows")),
        "KeyError('ngram.rows')"),
    "with other n-grams": (
        edit(other_ngrams),
        "rows of other n-grams"),
    "without a setting": (
        without_a_setting,
        "settings missing"),
    "without a setting of a layer": (
        without_a_setting_of_a_layer,
        "settings missing"),
    "with a setting too many": (
        edit(lambda _, content: content["model"].update(depth=3)),
        "TypeError"),
    **{f"zeros in {name}": (zeroed(name), f"other values of {name} than were written")
       for name in ("embedding", "lm_head", "ngram.rows", "ngram.ids")},
    **{f"changed: {part} {key} = {value}": (
        edit(lambda _, content, part=part, key=key, value=value: content[part].update({key: value}), signed=False),
        "a header that was changed") for part, key, value in UNSIGNED},
}


@pytest.mark.parametrize("name", BAD_MODELS)
@pytest.mark.fast
def test_bad_model_files(saved, use, monkeypatch, tmp_path, name):
    path, _ = saved
    monkeypatch.chdir(tmp_path)
    fault, told = BAD_MODELS[name]
    fault(path)
    found = use(path, "--eval")
    assert found.code == 2
    assert found.err.count("\n") == 1
    assert told in found.err
    assert re.match(r"sample: model file .*: expected train_gpt model 5, .*, found .*; fix: ", found.err)
    assert not (tmp_path / "executed").exists()
    if name in ("missing", "zeros in lm_head"):
        for arguments in (("Once",), ("--export", tmp_path / "copy")):
            assert use(path, *arguments).code == 2
            assert not (tmp_path / "copy").exists()


@pytest.mark.fast
def test_wrong_weights_are_named(saved, use):
    path, _ = saved
    helpers.edit_model(path, lambda header, _: header.pop("lm_head"))
    assert 'Missing key(s) in state_dict: "lm_head"' in use(path, "--eval").err


def test_whole_numbers_in_the_softcap(saved):
    """As a fork may write them; JSON keeps them whole."""
    path, _ = saved
    helpers.edit_model(path, lambda _, content: content["model"].update(softcap=[30, 5, 7.5]))
    assert sample.load_model(path, CPU)[0].config.softcap == (30, 5, 7.5)
