"""Shards, logs and records are untrusted:
10,000 damaged ones, each read or refused by the designed error, and nothing else.

Cases are drawn from a fixed seed, so a failure repeats; its message has the bytes.
A case is one draw of hypothesis, the seed of what it holds: ten draws a case would take most of the time.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import BOS, CPU, PRESET, ROOT, VOCABULARY, tg

sys.path.insert(0, str(ROOT / "data"))
sys.path.insert(0, str(ROOT / "records"))
import fineweb
import record
import runlog


def made(make):
    """What make(random.Random) makes of any seed."""
    return st.randoms(use_true_random=True).map(make)


def some(random, choices, most):
    """Up to `most` of the choices, any of them more than once."""
    return random.choices(choices, k=random.randint(0, most))


def cut(random, raw, ends):
    """In a third of all cases cut somewhere; then perhaps an odd end."""
    return raw[:random.choice((None, None, random.randint(0, len(raw))))] + random.choice(ends)


def cases(count):
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "fuzz_train_000000.bin"


# ---- shards ----------------------------------------------------------------------------------------------------------
def int32(random):
    return random.choice(
        (
            random.randint(-3, 60),
            random.choice((2**31 - 1, -(2**31), 2**30, tg.SHARD_MAGIC, VOCABULARY)),
            random.randint(-(2**31), 2**31 - 1),
        )
    )


def shard(random):
    """Mostly almost right: a header of which some words are changed, tokens, then perhaps a cut or an odd byte."""
    tokens = some(random, random.choice(([BOS, 0, 1, VOCABULARY - 1], [BOS, 1, VOCABULARY, 65535], [0, 1])), 60)
    words = [tg.SHARD_MAGIC, tg.SHARD_VERSION, len(tokens)]
    for place in some(random, range(3), 2):
        words[place] = int32(random)
    raw = np.array(words + [0] * 253, dtype="<i4").tobytes() + np.array(tokens, dtype="<u2").tobytes()
    return cut(random, raw, (b"", b"", b"\0", b"\xff\xff"))


def judged(read, error):
    try:
        return read()
    except error as refusal:
        text = str(refusal)
        assert "\n" not in text
        assert ": expected " in text
        assert "; fix: " in text
        return None


@cases(4000)
@given(made(shard))
def test_the_trainer_reads_or_refuses_any_shard(path, raw):
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "BOS", BOS)
        tokens = judged(lambda: tg.open_shard(path, VOCABULARY), tg.Failure)
    expected = np.frombuffer(raw[1024:], "<u2") if len(raw) % 2 == 0 else np.empty(0)
    fine = (
        len(expected) > 0
        and np.frombuffer(raw[:12], "<i4").tolist() == [tg.SHARD_MAGIC, 1, len(expected)]
        and expected.max() < VOCABULARY
    )
    fine = fine and BOS in expected
    assert (tokens is not None) == fine
    if fine:
        assert tokens.tolist() == expected.tolist()


@cases(1000)
@given(made(shard), st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 1, 4, 40]))
def test_batches_from_any_shard(path, raw, chunk_tokens, steps, candidates):
    """The stream and every batch of it, which hold its tokens in their order, or the error."""
    path.write_bytes(raw)
    stage = tg.Stage(steps, tg.CHUNKS * chunk_tokens, 3, 4, 8, sampled_classes=candidates)
    preset = replace(PRESET, stages=(stage,))

    def read():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tg, "BOS", BOS)
            stream = tg.TokenStream(path.parent, 1, VOCABULARY)
            stream.require(preset)  # as open_corpus does
            return stream, [
                b.views(b.data)
                for b in tg.training_batches(
                    stream, preset, {stage: 8}, tg.Ranks(0, 1, CPU)
                )
            ]

    if found := judged(read, tg.Failure):
        stream, batches = found
        assert [token for batch in batches for token in batch.tokens.tolist()] == stream.read(
            stream.first, steps * stage.batch_tokens
        ).tolist()


@cases(1000)
@given(made(shard))
def test_the_data_tool_reads_or_refuses_any_shard(path, raw):
    path.write_bytes(raw)
    found = judged(lambda: fineweb.scan_shard(path), fineweb.DataError)
    assert found is None or (found.tokens == len(raw) // 2 - 512 and found.sha256 == hashlib.sha256(raw).hexdigest())


# ---- logs and records ------------------------------------------------------------------------------------------------
def json_value(random):
    odd = (
        None,
        True,
        -1,
        10**400,
        math.nan,
        -math.inf,
        1e308,
        "",
        "5",
        "\0\ud800",
        [],
        [[]],
        [None, 1],
        {},
        {"stages": 1},
        {"stages": [{}]},
    )
    return random.choice((random.randint(-2**70, 2**70), random.gauss(0, 1e3), random.choice(odd)))


def changed(random, event):
    """Up to two fields changed, up to one gone."""
    event = event | {key: json_value(random) for key in some(random, list(event), 2)}
    for key in some(random, list(event), 1):
        event.pop(key)
    return event


EVENTS = {
    "head": {"preset": {"name": "tiny", "stages": [{"steps": 2}]}, "world": 1, "gpus": []},
    "stage": {"step": 0, "batch_tokens": 512, "short_window_tokens": 8, "long_window_tokens": 16},
    "step": {"step": 1, "train_loss": 5.0, "tokens": 512, "ms_per_step": 3.0},
    "val": {"step": 2, "loss": 4.0, "final": True},
    "clock": {"on": True, "reason": "training", "start_ms": 0.0, "end_ms": 1.0},
    "end": {"state": "ok", "loss": 4.0, "ms": 6.0},
}


def log(random):
    """Events in any order, with fields changed or gone, under a good chain,
    so that every reader behind it is reached; or cut."""
    rows, chain = [], ""
    for kind in some(random, list(EVENTS), 5):
        body = json.dumps(changed(random, {"kind": kind, **EVENTS[kind]}))
        chain = runlog.sha256(chain + body)[:16]
        rows.append(f'{body[:-1]}, "chain": "{chain}"}}\n')
    return cut(random, "".join(rows).encode(), (b"", b"", b"\xff{", b"[" * 3000))


@cases(3000)
@given(made(log))
def test_any_log_is_read(path, raw):
    """Whatever it holds, a log is a run: complete, incomplete or broken. Only a good chain is not broken."""
    file = path.with_name("run.jsonl")
    file.write_bytes(raw)
    run = runlog.read_run(file)
    assert isinstance(run, runlog.Run)
    assert run.ok in (True, False)
    assert run.broken is not None or raw == b"" or raw.endswith(b'"}\n')


GOOD_RECORD = json.loads(next(ROOT.glob("records/*/record.json")).read_text())


@cases(1000)
@given(
    made(
        lambda random: cut(
            random, json.dumps(changed(random, GOOD_RECORD)).encode(), (b"", b"", b"\xff", b"[" * 3000)
        )
    )
)
def test_any_record_is_read_or_refused(path, raw):
    (path.parent / "record.json").write_bytes(raw)
    judged(lambda: record.load(path.parent), record.Failure if hasattr(record, "Failure") else runlog.Failure)
