"""The data path: shards and their faults, the plan, batches that nothing can disturb, and the thread that makes them."""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import helpers
from helpers import BOS, CPU, VOCABULARY, tg, write_shard

MARK = 59_999  # the BOS of the corpus whose other tokens are all different, so that a token tells its place
STAGES = (tg.Stage(3, 512, 40, 8, 16), tg.Stage(2, 1024, 100, 8, 16), tg.Stage(2, 768, 40, 8, 16))


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A stream of two shards in which every token but BOS occurs once, and the tokens of both shards in order."""
    monkeypatch.setattr(tg, "BOS", MARK)
    generator, ids, shards = np.random.default_rng(0), iter(range(MARK)), []
    for number in range(2):
        tokens = [next(ids) for _ in range(5 * number)]
        while len(tokens) < 6000:
            tokens += [MARK, *(next(ids) for _ in range(generator.integers(1, 150)))]
        shards.append(np.array(tokens))
        write_shard(tmp_path / f"marked_train_{number:06d}.bin", tokens)
    return tg.TokenStream(tmp_path, 11_000, 60_000), shards


def batches(stream, stages=STAGES, world=1, rank=0, micro=8, vocabulary=60_000):
    slots = {stage: min(micro, tg.SLOTS // world) for stage in stages}
    plan = tg.plan_batches(stream, stages)
    return tg.training_batches(stream, plan, stages, slots, dict.fromkeys(stages, 960), vocabulary, tg.Ranks(rank, world, CPU))


def unpacked(batch):
    return [part.numpy() for part in batch.data.split(batch.sizes)]


def by_slot(stream, world=1, micro=8):
    """(step, slot) -> its tokens, targets and document lengths, collected from every rank's micro-batches."""
    found = {}
    for rank in range(world):
        flat, step = batches(stream, world=world, rank=rank, micro=micro), 0
        for stage in STAGES:
            mine = range(rank, 8, world)
            for _ in range(stage.steps):
                for at in range(0, len(mine), micro):
                    slots = mine[at:at + micro]
                    tokens, targets, positions, _, _, cu_seqlens = unpacked(next(flat))
                    assert len(tokens) == stage.slot_tokens * len(slots)
                    for number, slot in enumerate(slots):
                        part = slice(number * stage.slot_tokens, (number + 1) * stage.slot_tokens)
                        assert part.start in cu_seqlens, "a slot starts a document"
                        found[step, slot] = tokens[part], targets[part], positions[part]
                step += 1
        assert next(flat, None) is None
    return found


# ---- the plan and its batches ----------------------------------------------------------------------------------------
def test_no_token_is_consumed_twice_and_all_come_in_order(marked):
    stream, _ = marked
    slots = by_slot(stream)
    assert sorted(slots) == [(step, slot) for step in range(7) for slot in range(8)]
    consumed = np.concatenate([slots[key][0] for key in sorted(slots)])
    ordinary = consumed[consumed != MARK]
    assert len(np.unique(ordinary)) == len(ordinary) and (np.diff(ordinary) > 0).all()


def test_slots_are_aligned_capped_and_whole(marked):
    """Each slot is a row of documents from their BOS, cut only at the cap or at the slot's end."""
    stream, shards = marked
    lengths = {int(shard[start + 1]): stop - start for shard in shards for starts in [[*np.flatnonzero(shard == MARK), len(shard)]]
               for start, stop in zip(starts, starts[1:])}  # first ordinary token -> length
    for (step, _), (tokens, _, positions) in by_slot(stream).items():
        cap = STAGES[(step > 2) + (step > 4)].document_cap_tokens
        starts = np.flatnonzero(tokens == MARK)
        assert starts[0] == 0 and (positions[starts] == 0).all()
        for start, stop in zip(starts, [*starts[1:], len(tokens)]):
            assert (positions[start:stop] == np.arange(stop - start)).all()
            if stop < len(tokens):
                assert stop - start == min(lengths[int(tokens[start + 1])], cap)
            assert stop - start <= cap


def test_targets_are_the_next_tokens_of_the_stream(marked):
    stream, shards = marked
    after = {int(a): int(b) for shard in shards for a, b in zip(shard, [*shard[1:], MARK])}  # a shard's end is followed by a BOS
    seen_end = 0
    for tokens, targets, _ in by_slot(stream).values():
        for i, (token, target) in enumerate(zip(tokens.tolist(), targets.tolist())):
            if token != MARK:
                assert after[token] == target
                seen_end += token == shards[0][-1]
            elif i + 1 < len(tokens) and tokens[i + 1] != MARK:
                assert target == tokens[i + 1]
    assert stream.read(int(np.flatnonzero(stream.shard_of == 0)[-1]), 10_000)[-1] == MARK


def test_what_a_document_is_followed_by(marked):
    stream, shards = marked
    for document in (0, 5, int(np.flatnonzero(stream.shard_of == 0)[-1]), int(np.flatnonzero(stream.shard_of == 1)[0])):
        length = int(stream.length[document])
        shard, start = shards[stream.shard_of[document]], stream.start[document]
        assert stream.read(document, 3).tolist() == shard[start:start + 4].tolist() if length > 3 else True
        assert stream.read(document, length)[:-1].tolist() == shard[start:start + length].tolist()
        assert stream.read(document, length)[-1] == MARK
    assert stream.start[stream.shard_of == 1][0] == 5, "what precedes the first BOS of a shard is skipped"


def test_packed_layout(marked):
    """cu_seqlens ends are padded, order and starts group equal tokens, `longest` bounds the documents."""
    stream, _ = marked
    for batch in batches(stream, micro=4):
        tokens, _, positions, order, starts, cu_seqlens = unpacked(batch)
        assert len(cu_seqlens) == 961 and cu_seqlens[0] == 0 and cu_seqlens[-1] == len(tokens) and (np.diff(cu_seqlens) >= 0).all()
        assert (np.unique(cu_seqlens)[:-1] == np.flatnonzero(positions == 0)).all()
        assert np.diff(cu_seqlens).max() <= batch.longest
        assert (tokens[order] == np.sort(tokens)).all() and len(starts) == 60_001
        assert (order[starts[MARK]:starts[MARK + 1]] == np.flatnonzero(tokens == MARK)).all()


@pytest.mark.parametrize("world, micro", [(1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_every_world_trains_on_the_same_slots(marked, world, micro):
    stream, _ = marked
    whole, parts = by_slot(stream), by_slot(stream, world, micro)
    assert whole.keys() == parts.keys()
    assert all((a == b).all() for key in whole for a, b in zip(whole[key], parts[key]))
    digest = sum(batch.digest for rank in range(world) for batch in batches(stream, world=world, rank=rank, micro=micro))
    assert digest == sum(batch.digest for batch in batches(stream))


def test_digest_names_tokens_and_places(marked):
    stream, _ = marked
    plan = tg.plan_batches(stream, STAGES)
    pieces = tg.slot_pieces(stream, plan, STAGES[0], 1, 2)
    digest = tg.slot_digest(1, 2, pieces)
    changed = [piece.copy() for piece in pieces]
    changed[-1][-1] ^= 1
    assert len({digest, tg.slot_digest(2, 1, pieces), tg.slot_digest(1, 3, pieces), tg.slot_digest(1, 2, changed)}) == 4
    assert digest == tg.slot_digest(1, 2, tg.slot_pieces(stream, plan, STAGES[0], 1, 2))


def test_plan_fails_before_tokens_run_out(marked):
    stream, shards = marked
    stages = (replace(STAGES[0], steps=40),)
    with pytest.raises(tg.Failure, match=r"training tokens: expected 20,480 and about 10 % more .*, found 12,\d\d\d in 2 shards; fix: python data/fineweb.py fetch") as caught:
        tg.plan_batches(stream, stages)
    assert caught.value.code == 2
    most = max(steps for steps in range(1, 40) if fits(stream, (replace(STAGES[0], steps=steps),)))
    plan = tg.plan_batches(stream, (replace(STAGES[0], steps=most),))
    assert sum(map(len, shards)) * 0.9 < plan.tokens_consumed <= int(stream.length.sum())
    assert plan.last.max() < len(stream.length)


def fits(stream, stages):
    try:
        return bool(tg.plan_batches(stream, stages))
    except tg.Failure:
        return False


def test_skipped_tokens_count_as_consumed(marked):
    stream, _ = marked
    plan = tg.plan_batches(stream, STAGES)
    assert plan.tokens_consumed == stream.length[:plan.last.max() + 1].sum() > sum(s.steps * s.batch_tokens for s in STAGES)


def test_only_the_shards_needed_are_opened(corpus, tiny, tmp_path):
    shutil.copytree(corpus, tmp_path / "c")
    (tmp_path / "c" / "tiny_train_000002.bin").write_bytes(b"not a shard")
    assert len(tg.TokenStream(tmp_path / "c", 8000, VOCABULARY).paths) == 2
    with pytest.raises(tg.Failure, match="tiny_train_000002"):
        tg.TokenStream(tmp_path / "c", 11_000, VOCABULARY)


# ---- validation windows ----------------------------------------------------------------------------------------------
def test_validation_counts_every_token_once(corpus, tiny):
    path = corpus / "tiny_val_000000.bin"
    stream = np.fromfile(path, "<u2", offset=1024)
    for tokens, window in ((1280, 256), (1000, 300), (77, 77), (5, 100)):
        windows = tg.validation_windows(path, tokens, window, VOCABULARY)
        assert [sum(len(p) - 1 for p in pieces) for pieces in windows] == [min(window, tokens - at) for at in range(0, tokens, window)]
        pieces = [piece for pieces in windows for piece in pieces]
        assert (np.concatenate([p[:-1] for p in pieces]) == stream[:tokens]).all()
        assert (np.concatenate([p[1:] for p in pieces]) == stream[1:tokens + 1]).all()
        assert all(BOS not in piece[1:-1] for piece in pieces)
        assert all(pieces[i][0] == BOS or i == 0 for pieces in windows for i in range(len(pieces)))


def test_generated_documents_are_not_the_training_data(tiny):
    pieces = tg.generated_pieces(5000, 300, seed=1)
    assert sum(len(p) - 1 for p in pieces) == 5000 and max(len(p) - 1 for p in pieces) <= 300
    assert all(p[0] == BOS and p[1:].max() < BOS for p in pieces)
    assert all((a == b).all() for a, b in zip(pieces, tg.generated_pieces(5000, 300, seed=1)))


# ---- the thread ------------------------------------------------------------------------------------------------------
def test_batches_are_the_same_whatever_the_thread_does(marked):
    stream, _ = marked
    expected = [batch.data for batch in batches(stream, micro=2)]
    generator = random.Random(0)

    def slowly(items):
        for item in items:
            time.sleep(generator.choice((0, 0, 0.002)))
            yield item

    for depth in (1, 3):
        fetcher = tg.Prefetcher(slowly(batches(stream, micro=2)), depth)
        for batch in expected:
            time.sleep(generator.choice((0, 0, 0.002)))
            assert next(fetcher).data.equal(batch)
        with pytest.raises(StopIteration):
            next(fetcher)
        fetcher.close()
        assert not fetcher.thread.is_alive()


def test_an_error_in_the_thread_is_raised_where_batches_are_used(tiny):
    def broken():
        yield 1
        yield 2
        raise ValueError("a disk went away")

    fetcher = tg.Prefetcher(broken())
    assert (next(fetcher), next(fetcher)) == (1, 2)
    with pytest.raises(ValueError, match="a disk went away"):
        next(fetcher)
    fetcher.close()


def test_closing_does_not_wait_for_a_full_queue(tiny):
    fetcher = tg.Prefetcher(iter(range(1000)), depth=2)
    assert next(fetcher) == 0
    started = time.monotonic()
    fetcher.close()
    assert not fetcher.thread.is_alive() and time.monotonic() - started < 2


def test_an_error_in_the_thread_ends_the_run(corpus, tiny, tmp_path, monkeypatch, capsys):
    slot_pieces = tg.slot_pieces

    def fails_later(stream, plan, stage, step, slot):
        if step == 2:
            raise OSError("input/output error")
        return slot_pieces(stream, plan, stage, step, slot)

    monkeypatch.setattr(tg, "slot_pieces", fails_later)
    assert tg.main(["--preset", "tiny", "--seed", "1", "--data", str(corpus), "--log-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train_gpt: file: expected ") and "found 'input/output error'; fix: " in said and said.count("\n") == 1
    events = helpers.read_log(next(tmp_path.glob("*.jsonl")))
    assert events[-1]["kind"] == "end" and events[-1]["state"].startswith("failed: file: ") and events[-1]["code"] == 2
    assert not [thread for thread in threading.enumerate() if thread.name in ("prefetch", "run log")]


# ---- bad shards, each through main() ---------------------------------------------------------------------------------
def truncate(folder):
    path = folder / "tiny_train_000001.bin"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder):
    path = folder / "tiny_train_000000.bin"
    path.write_bytes(path.read_bytes()[:700])


def rewrite(name, *changes, **header):
    """A fault: shard `name` written again with some tokens or header fields changed."""
    def fault(folder):
        path = folder / name
        tokens = np.fromfile(path, "<u2", offset=1024)
        for where, token in changes:
            tokens[tokens == where if where == BOS else where] = token
        write_shard(path, tokens, **header)
    return fault


def shorten(pattern, tokens):
    def fault(folder):
        for path in folder.glob(pattern):
            write_shard(path, np.fromfile(path, "<u2", offset=1024)[:tokens])
    return fault


def remove(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


TRAIN, VAL = "tiny_train_000001.bin", "tiny_val_000000.bin"
FAULTS = {
    "truncated": (truncate, rf"{TRAIN}: size of \d+ tokens: expected \d+ bytes, found \d+ bytes; fix: fetch this file again"),
    "too long": (rewrite(TRAIN, count=4000), rf"{TRAIN}: size of 4000 tokens: expected 9024 bytes, found \d+ bytes"),
    "negative count": (rewrite(TRAIN, count=-1), rf"{TRAIN}: size of -1 tokens"),
    "header only in part": (cut_header, r"tiny_train_000000.bin: .*expected .*found .*fetch this file again"),
    "empty file": (lambda folder: (folder / TRAIN).write_bytes(b""), rf"{TRAIN}: [a-z ]+: expected \d+.*, found (an empty file|0 bytes); fix: fetch this file again"),
    "wrong magic": (rewrite(TRAIN, magic=20240521), rf"{TRAIN}: magic number: expected 20240520, found 20240521"),
    "wrong version": (rewrite(TRAIN, version=2), rf"{TRAIN}: version: expected 1, found 2"),
    "token too large": (rewrite(TRAIN, (77, VOCABULARY)), rf"{TRAIN}: largest token: expected below {VOCABULARY}, found {VOCABULARY}"),
    "no documents": (rewrite(TRAIN, (BOS, 3)), rf"{TRAIN}: documents: expected token {BOS} before each, found none"),
    "no folder": (lambda folder: shutil.rmtree(folder), r"train shards: expected .*\*_train_\*\.bin, found none; fix: python data/fineweb.py"),
    "no training shards": (remove("*_train_*"), r"train shards: expected .*found none"),
    "no validation shard": (remove("*_val_*"), r"val shards: expected .*found none"),
    "too few tokens": (shorten("*_train_*", 900), r"training tokens: expected 4,096 .*, found 2,\d+ in 3 shards; fix: python data/fineweb.py fetch --shards"),
    "too little validation": (shorten("*_val_*", 1280), rf"{VAL}: validation tokens: expected at least 1,281, found 1,280"),
    "bad validation shard": (rewrite(VAL, version=7), rf"{VAL}: version: expected 1, found 7"),
    "validation token too large": (rewrite(VAL, (5, 60_000)), rf"{VAL}: largest token: expected below {VOCABULARY}, found 60000"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_shard_gives_its_message(corpus, tiny, tmp_path, capsys, monkeypatch, name):
    """One line, exit code 2, before a model exists and without a log of a run that never was."""
    fault, message = FAULTS[name]
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    fault(folder)
    monkeypatch.setattr(tg, "GPT", lambda *_: pytest.fail("built a model first"))
    assert tg.main(["--preset", "tiny", "--data", str(folder), "--log-dir", str(tmp_path / "logs")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train_gpt: ") and said.count("\n") == 1 and "; fix: " in said
    assert re.search(message, said), said
    assert not (tmp_path / "logs").exists()


def test_a_truncated_header_says_so(corpus, tiny, tmp_path, capsys):
    """The message must not claim that it expected what it found."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    cut_header(folder)
    tg.main(["--preset", "tiny", "--data", str(folder)])
    assert "expected 20240520, found 20240520" not in capsys.readouterr().err
