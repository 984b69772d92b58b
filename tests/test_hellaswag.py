"""data/hellaswag.py: scores against one ending at a time, its files and their faults,
the fetch from an imitation of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest

import sample
from helpers import BOS, CPU, ROOT, tg
from test_fineweb import hub  # noqa: F401

sys.path.insert(0, str(ROOT / "data"))
import hellaswag

QUESTIONS = [
    {
        "ctx": f"A person {verb} the",
        "endings": ["x", "some words that follow", "b c", ending],
        "label": 0 if number % 2 else number % 4,
    }
    for number, (verb, ending) in enumerate(
        [("sees", "a"), ("takes", "zz"), ("opens", "a door"), ("leaves", "house.")] * 3
    )
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def saved(corpus, tiny, tmp_path, monkeypatch, capsys):
    """A trained model's file; bytes are tokens."""
    path = tmp_path / "model.pt"
    arguments = [
        "--preset", "tiny", "--data", str(corpus), "--seed", "4", "--log-dir",
        str(tmp_path / "logs"), "--save", str(path),
    ]
    assert tg.main(arguments) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        sample,
        "load_encoding",
        lambda spec: types.SimpleNamespace(encode_ordinary=lambda text: list(text.encode())),
    )
    return path


def total_loss(model, content, tokens):
    """The loss of all of a document but its start, from the model's own evaluation."""
    batch = tg.pack({0: [np.array(tokens, dtype=np.uint16)]}, model.config, pin=False)
    return float(model.evaluate(batch.to(CPU), sample.saved_geometry(content, model, 2 * len(tokens))))


@pytest.mark.parametrize("batch_tokens", [1, 90, 100_000])
def test_endings_are_scored_right(saved, tmp_path, monkeypatch, capsys, batch_tokens):
    """By the model's loss with the ending less its loss without, whatever documents share a batch."""
    model, content = sample.load_model(saved, CPU)
    chosen = []  # by the sum and by the mean of each ending's losses
    for question in QUESTIONS:
        context = [BOS, *question["ctx"].encode()]
        sums = [
            total_loss(model, content, [*context, *f" {ending}".encode()])
            - total_loss(model, content, context)
            for ending in question["endings"]
        ]
        means = [loss / (1 + len(ending)) for loss, ending in zip(sums, question["endings"])]
        chosen.append((np.argmin(sums), np.argmin(means)))
    right = np.sum(np.array(chosen) == [[question["label"]] for question in QUESTIONS], axis=0)
    monkeypatch.setattr(hellaswag, "BATCH_TOKENS", batch_tokens)
    assert hellaswag.main([str(saved), "--questions", str(write(tmp_path / "q.jsonl", QUESTIONS))]) == 0
    expected = "hellaswag, 12 questions: accuracy {:.4f}, acc_norm {:.4f}\n".format(*right / 12)
    assert capsys.readouterr().out == expected
    assert any(by_sum != by_mean for by_sum, by_mean in chosen), "the two are told apart"
    losses = hellaswag.ending_losses(model, content, [([BOS, 1, 2, 3], 2), ([BOS, 7, 8], 1)], CPU)
    assert len(losses) == 2
    assert losses[0] == pytest.approx(
        total_loss(model, content, [BOS, 1, 2, 3]) - total_loss(model, content, [BOS, 1]), rel=1e-5
    )


def test_limit_and_parquet(saved, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    path = tmp_path / "q.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**q, "label": str(q["label"]), "ind": 1} for q in QUESTIONS]), path)
    results = []
    lines = write(tmp_path / "q.jsonl", QUESTIONS)
    lines.write_text(lines.read_text().replace("\n", "\n\n", 2))
    for file in (path, lines):
        assert hellaswag.main([str(saved), "--questions", str(file), "--limit", "5"]) == 0
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]
    assert "5 questions" in results[0]
    with pytest.raises(SystemExit) as caught:
        hellaswag.main([str(saved), "--limit", "0"])
    assert caught.value.code == 2


GOOD = QUESTIONS[0]
BAD = {
    "no JSON": "{",
    "a list": "[1]",
    "nested": "[" * 5000,
    "no context": json.dumps({"endings": ["a"], "label": 0}),
    "label beyond": json.dumps({**GOOD, "label": 4}),
    "negative label": json.dumps({**GOOD, "label": -1}),
    "no label": json.dumps({**GOOD, "label": ""}),
    "label without end": json.dumps({**GOOD, "label": float("inf")}),
    "an ending of no text": json.dumps({**GOOD, "endings": ["a", ""], "label": 0}),
    "endings of numbers": json.dumps({**GOOD, "endings": [1, 2]}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_questions(tmp_path, name):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + BAD[name] + "\n")
    with pytest.raises(
        hellaswag.DataError,
        match=r"q.jsonl question 2: expected ctx, endings and the label of the right one, found \w+: .*; fix: ",
    ):
        hellaswag.read_questions(path)


def test_other_bad_files(saved, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    broken = tmp_path / "broken.parquet"
    empty.write_text("")
    broken.write_bytes(b"PAR1 no")
    (tmp_path / "model.txt").write_text("no model")
    os.mkfifo(tmp_path / "pipe")
    for arguments in (
        [saved, "--questions", empty],
        [saved, "--questions", broken],
        [saved, "--questions", tmp_path / "none"],
        [saved, "--questions", tmp_path / "pipe"],
        [saved, "--encoding", empty],
        [tmp_path / "model.txt"],
    ):
        assert hellaswag.main([str(argument) for argument in arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert re.search(": expected .*, found .*; fix: ", said)


@pytest.mark.parametrize("ranks", [b"a tokenizer", None])
def test_the_tokenizer_is_the_training_s(saved, tmp_path, monkeypatch, capsys, ranks):
    """Chosen, or refused, as by sample.py: GPT-2's ids would mean other texts to the model."""
    load_model = sample.load_model
    chosen = []

    def with_shards_of_ranks(path, device):
        model, content = load_model(path, device)
        content["validation"] = {"data": str(tmp_path), "encoding": hashlib.sha256(b"a tokenizer").hexdigest()}
        return model, content

    def load_encoding(spec):
        chosen.append(spec)
        return types.SimpleNamespace(encode_ordinary=lambda text: list(text.encode()))

    monkeypatch.setattr(sample, "load_model", with_shards_of_ranks)
    monkeypatch.setattr(sample, "load_encoding", load_encoding)
    if ranks:
        (tmp_path / "text.tiktoken").write_bytes(ranks)
    questions = write(tmp_path / "q.jsonl", QUESTIONS)
    assert hellaswag.main([str(saved), "--questions", str(questions)]) == (0 if ranks else 2)
    assert chosen == ([str(tmp_path / "text.tiktoken")] if ranks else [])
    assert ("--encoding: expected the training's, SHA-256 " in capsys.readouterr().err) == (not ranks)


def test_a_full_disk_behind_stdout_ends_nothing(saved, tmp_path, monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert hellaswag.main([str(saved), "--questions", str(write(tmp_path / "q.jsonl", QUESTIONS))]) == 0


def test_fetching(hub, tmp_path):
    """Only a file with the SHA-256 that the hub states gets its name."""
    hub.files[name := hellaswag.FILE.rpartition("/")[2]] = b"PAR1 imagine questions PAR1"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
    code = f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'data')!r}); "
    code += "import hellaswag; hellaswag.fetch(pathlib.Path('q.parquet'))"

    def fetch():
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    hub.stated[name] = "f" * 64
    assert "expected " + "f" * 64 in fetch().stderr
    assert not (tmp_path / "q.parquet").exists()
    hub.stated.clear()
    assert fetch().returncode == 0
    assert (tmp_path / "q.parquet").read_bytes() == hub.files[name]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["q.parquet"]
