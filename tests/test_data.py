"""The data path: shards and their faults, batch chunks without a gap,
batches that nothing can disturb, and the thread that makes them."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import shutil
import time
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from helpers import BOS, CPU, VOCABULARY, tg, write_shard

pytestmark = pytest.mark.fast

MARK = 59_999  # the BOS of the corpus whose other tokens are all different, so that a token tells its place
STAGES = (tg.Stage(3, 512, 40, 8, 16, sampled_classes=128), tg.Stage(2, 1024, 100, 8, 16), tg.Stage(2, 768, 40, 8, 16))
MODEL = replace(helpers.MODEL, vocabulary=60_000, padded_vocabulary=60_032, ngram_rows=140_002)


@pytest.fixture
def marked(tmp_path, monkeypatch):
    """A stream of four shards in which every token but BOS occurs once, and all their tokens in order;
    a batch chunk holds the border of two shards."""
    monkeypatch.setattr(tg, "BOS", MARK)
    generator = np.random.default_rng(0)
    ids = iter(range(MARK))
    shards = []
    for number in range(4):
        tokens = [next(ids) for _ in range(5 + number)]  # the rest of a document
        while len(tokens) < 1700:
            tokens += [MARK, *(next(ids) for _ in range(generator.integers(0, 150)))]
        shards.append(tokens)
        write_shard(tmp_path / f"marked_train_{number:06d}.bin", tokens)
    return tg.TokenStream(tmp_path, 6_000, MODEL.vocabulary), np.concatenate(shards)


def batches(stream, world=1, rank=0, micro=8):
    chunks = {stage: min(micro, tg.CHUNKS // world) for stage in STAGES}
    return tg.training_batches(
        stream, replace(helpers.PRESET, model=MODEL, stages=STAGES), chunks, tg.Ranks(rank, world, CPU)
    )


def views(batch):
    return batch.views(batch.data)


def next_tokens(documents):
    """The token after each, from the columns of the head, which may be those of the candidates."""
    if documents.classes is None:
        return documents.class_index
    assert documents.class_index.min() >= 0
    return torch.cat(
        [
            ids[columns]
            for ids, columns in zip(
                documents.classes.long(), documents.class_index.view(len(documents.classes), -1)
            )
        ]
    )


def by_chunk(stream, world=1, micro=8):
    """(step, chunk) -> its tokens, targets and positions, collected from every rank's micro-batches."""
    found = {}
    for rank in range(world):
        flat = batches(stream, world, rank, micro)
        step = 0
        for stage in STAGES:
            mine = range(rank, tg.CHUNKS, world)
            for _ in range(stage.steps):
                for at in range(0, len(mine), micro):
                    chunks = mine[at:at + micro]
                    documents = views(next(flat))
                    assert len(documents.class_index) == stage.chunk_tokens * len(chunks)
                    assert not documents.positions[::stage.chunk_tokens].any(), "no document spans chunks"
                    parts = (
                        x.view(len(chunks), -1).numpy()
                        for x in (documents.tokens, next_tokens(documents), documents.positions)
                    )
                    found.update(zip(((step, chunk) for chunk in chunks), zip(*parts)))
                step += 1
        assert next(flat, None) is None
    return found


# ---- the stream and its chunks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("world, micro", [(1, 1), (1, 2), (1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_batch_chunks_side_by_side_are_the_stream(marked, world, micro):
    """No token twice and none skipped, whatever the number of ranks,
    from the first BOS across stages and shards; so with the targets."""
    stream, tokens = marked
    chunks = by_chunk(stream, world, micro)
    assert sorted(chunks) == [(step, chunk) for step in range(7) for chunk in range(8)]
    read, targets, _ = (np.concatenate(parts) for parts in zip(*(chunks[key] for key in sorted(chunks))))
    assert tokens[5] == MARK
    assert len(read) == sum(s.steps * s.batch_tokens for s in STAGES) == stream.consumed(STAGES) - 5
    assert (read == tokens[5:5 + len(read)]).all()
    assert (targets == tokens[6:6 + len(read)]).all()
    digest = sum(batch.digest for rank in range(world) for batch in batches(stream, world, rank, micro))
    spans = [
        (start, stage.chunk_tokens + 1)
        for stage, starts in zip(STAGES, helpers.chunk_starts(stream, STAGES))
        for start in starts.ravel()
    ]
    assert digest == sum(tg.chunk_digest(number, stream.read(*span)) for number, span in enumerate(spans))


def test_documents_begin_at_their_bos_and_end_at_the_cap(marked):
    """Positions count from a BOS, from the start of a batch chunk or from where the cap cut, and from nowhere else."""
    for (step, _), (tokens, _, positions) in by_chunk(marked[0]).items():
        cap = STAGES[(step > 2) + (step > 4)].document_cap_tokens
        run = -1
        for token, position in zip(tokens, positions):
            run = 0 if token == MARK or run + 1 == cap else run + 1
            assert position == run


def test_reading_across_shards(marked):
    stream, tokens = marked
    assert len(stream.paths) == 4
    assert stream.length == len(tokens)
    edges = {0, 1, stream.length - 1, *(edge + d for edge in stream.offsets[1:-1] for d in (-1, 0, 1))}
    for start, stop in itertools.combinations(sorted({*edges, stream.length}), 2):
        assert stream.read(start, stop - start).tolist() == tokens[start:stop].tolist()


def test_a_shard_cut_while_it_is_read(marked):
    """A memory map would die of a signal there."""
    stream, tokens = marked
    os.truncate(stream.paths[1], 1024 + 2 * 100)
    border = stream.offsets[1]
    assert stream.read(border - 10, 110).tolist() == tokens[border - 10:border + 100].tolist()
    with pytest.raises(
        tg.Failure,
        match=r"marked_train_000001.bin: reading at token 95: expected 6 tokens as when it was checked, "
              r"found its end; fix: ",
    ) as caught:
        stream.read(border + 95, 6)
    assert caught.value.code == 2


def test_a_shard_replaced_while_it_is_read(marked):
    """By a file as long, of another vocabulary."""
    stream, tokens = marked
    path = stream.paths[1]
    count = stream.offsets[2] - stream.offsets[1]
    helpers.write_shard(path, [60_000] * count)
    vocabulary = stream.vocabulary
    with pytest.raises(
        tg.Failure,
        match=rf"marked_train_000001.bin: reading at token 5: expected tokens below {vocabulary} as when it was "
              r"checked, found 60000; fix: ",
    ):
        stream.read(stream.offsets[1] + 5, 6)


def test_tokens_must_suffice_for_the_last_target(marked):
    stream, tokens = marked
    stage = tg.Stage(1, 8 * ((stream.length - 6) // 8), 40, 8, 16)
    preset = replace(helpers.PRESET, model=MODEL, stages=(stage,))
    stream.length = stream.consumed((stage,)) + 1
    stream.require(preset)
    *_, last = tg.training_batches(stream, preset, {stage: tg.CHUNKS}, tg.Ranks(0, 1, CPU))
    assert views(last).class_index[-1] == tokens[stream.length - 1]
    stream.length -= 1
    message = f"training tokens: expected {stream.length + 1:,} for the schedule, found {stream.length:,} in 4 shards; "
    message += "fix: python data/fineweb.py fetch"
    with pytest.raises(tg.Failure, match=message) as caught:
        stream.require(preset)
    assert caught.value.code == 2


def test_a_longer_schedule_opens_the_shards_that_it_needs(corpus, tiny):
    """Also where train_tokens, how many tokens to open, has not been raised with it."""
    longest = tg.scaled_preset(tiny, tg.automatic_length(tiny, corpus))
    opened, *_ = tg.open_corpus(replace(longest, train_tokens=1), corpus)
    assert len(opened.paths) == len(list(corpus.glob("*_train_*"))) > 1


def test_a_length_that_fits_leaves_out_what_is_before_the_first_document(tiny, tmp_path):
    """Tokens before the first BOS are in the shard, but no training reads them."""
    write_shard(tmp_path / "tiny_train_000000.bin", [7] * 900 + [*helpers.documents(9000, seed=0)])
    stream = tg.TokenStream(tmp_path, 10**9, VOCABULARY)
    assert stream.first == 900
    assert stream.usable == stream.length - 901
    stream.require(tg.scaled_preset(helpers.PRESET, tg.automatic_length(helpers.PRESET, tmp_path)))

    write_shard(tmp_path / "tiny_train_000001.bin", helpers.documents(9000, seed=1))
    for wanted, shards in ((stream.length - 900, 1), (stream.length - 899, 2)):
        assert len(tg.TokenStream(tmp_path, wanted, VOCABULARY).paths) == shards


def test_only_the_shards_needed_are_opened(corpus, tiny, tmp_path):
    shutil.copytree(corpus, tmp_path / "c")
    (tmp_path / "c" / "tiny_train_000002.bin").write_bytes(b"not a shard")
    assert len(tg.TokenStream(tmp_path / "c", 8000, VOCABULARY).paths) == 2
    with pytest.raises(tg.Failure, match="tiny_train_000002"):
        tg.TokenStream(tmp_path / "c", 11_000, VOCABULARY)


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(st.lists(st.sampled_from([tg.BOS, 1, 2, 3, 4]), min_size=2, max_size=60), st.integers(1, 20))
def test_cut_documents(tokens, cap):
    """Side by side the pieces are the stretch;
    each has the token that follows, at most `cap` others, a BOS only as its first, and no needless cut."""
    pieces = tg.cut_documents(np.array(tokens, dtype=np.uint16), cap)
    whole = [token for piece in pieces for token in piece[:-1].tolist()]
    assert whole == tokens[:-1]
    assert [piece[-1] for piece in pieces] == [*(piece[0] for piece in pieces[1:]), tokens[-1]]
    assert all(2 <= len(piece) <= cap + 1 and tg.BOS not in piece[1:-1] for piece in pieces)
    assert all(after[0] == tg.BOS or len(piece) == cap + 1 for piece, after in zip(pieces, pieces[1:]))
    assert len(pieces) <= whole.count(tg.BOS) + 1 + len(whole) // cap


def test_digest_names_tokens_and_places():
    tokens = np.arange(100, dtype=np.uint16)
    changed = tokens.copy()
    changed[-1] ^= 1
    assert (
        len(
            {
                tg.chunk_digest(1, tokens),
                tg.chunk_digest(2, tokens),
                tg.chunk_digest(1, changed),
                tg.chunk_digest(1, tokens[::-1]),
            }
        )
        == 4
    )
    assert tg.chunk_digest(1, tokens) == tg.chunk_digest(1, tokens.astype(np.int64)) < 2**64


# ---- what a batch holds ----------------------------------------------------------------------------------------------
def test_packed_layout(marked):
    """Positions and what remains agree, order and starts group equal rows,
    every part begins at a multiple of 16 bytes."""
    for batch in batches(marked[0], micro=4):
        documents = views(batch)
        positions = documents.positions.numpy()
        remaining = documents.remaining.numpy()
        starts = np.append(np.flatnonzero(positions == 0), len(positions))
        assert starts[0] == 0
        assert (positions + remaining + 1 == np.repeat(np.diff(starts), np.diff(starts))).all()
        assert (np.diff(positions)[positions[1:] > 0] == 1).all()
        ids = documents.tokens
        order = documents.order
        starts = documents.starts
        assert (order == torch.argsort(ids, stable=True)).all()
        assert len(starts) == MODEL.padded_vocabulary + 1
        assert (starts.diff() == torch.bincount(ids, minlength=MODEL.padded_vocabulary)).all()
        assert starts[0] == 0
        hashed = tg.hash_ngrams(ids.numpy(), positions, MODEL.ngram_rows, MODEL.ngram_pieces, MODEL.ngram_orders)
        assert (documents.ngrams[:, :-1].numpy() == hashed).all()
        recalled = tg.longest_suffix_match(ids.numpy(), positions, MODEL.padded_vocabulary)
        pieces = documents.ngrams[:, -1].view(-1, 2).numpy()
        assert (pieces == 2 * (MODEL.ngram_rows + recalled)[:, None] + [0, 1]).all()
        assert documents.ngrams.max() < 2 * MODEL.table_rows
        parts = [x for x in vars(documents).values() if isinstance(x, torch.Tensor)]
        assert all(part.dtype == torch.int32 and part.data_ptr() % 16 == 0 for part in parts)
        assert {name: tuple(x.shape) for name, x in vars(documents).items() if x is not None} == batch.shapes


@pytest.mark.parametrize("lengths", [(5, 1, 3), (1,), (2, 2, 7, 1, 1)])
def test_parts_of_odd_sizes_do_not_overlap(tiny, lengths):
    """Each part written is each part read."""
    pieces = [np.arange(length + 1, dtype=np.uint16) for length in lengths]
    documents = views(tg.pack({3: pieces}, helpers.MODEL, pin=False, sampled_classes=11))
    flat = [i for length in lengths for i in range(length)]
    assert documents.tokens.tolist() == documents.positions.tolist() == flat
    assert next_tokens(documents).tolist() == [i + 1 for i in flat]
    assert documents.remaining.tolist() == [length - 1 - i for length in lengths for i in range(length)]
    # the spare id's too
    assert documents.num_always.tolist() == [max(lengths) + 1]
    assert documents.classes.shape == (1, 11)
    assert documents.starts[-1] == len(flat)
    assert documents.ngrams.shape == (2 * len(flat), helpers.MODEL.ngram_orders + 1)


@pytest.mark.parametrize("rows", [1, 300, 65_536])
def test_sorted_ids(rows):
    ids = np.random.default_rng(rows).integers(0, rows, 20_000)
    order, starts = tg.sort_ids(ids, rows)
    assert (order == np.argsort(ids, kind="stable")).all()
    assert (starts == np.searchsorted(ids[order], np.arange(rows + 1))).all()


def ngram_rows_of(piece, rows, pieces, orders):
    """Rows of a piece's tokens by Python's integers, which cannot overflow."""
    part = rows // orders
    last = part - 1
    modulus = max(odd for odd in (last - 1, last) if odd % 2)
    x = [int(token) for token in piece]
    for i in range(len(x)):
        for n, multiplier in enumerate((1, 2654435761, 2246822519, 3266489917)[:pieces]):
            keys = [
                reduce(int.__xor__, (factor * x[i - distance] for distance, factor in enumerate(factors)))
                if i >= len(factors) - 1
                else None
                for factors in tg.NGRAM_MULTIPLIERS[:orders]
            ]
            yield [
                part * (orders * n + order) + (last if key is None else key * multiplier % 2**32 % modulus)
                for order, key in enumerate(keys)
            ]


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("rows", [3 * len(tg.NGRAM_MULTIPLIERS), 1024, 140_002, 2**19, 2**23])
@pytest.mark.parametrize("orders", range(1, 1 + len(tg.NGRAM_MULTIPLIERS)))
def test_ngrams(rows, pieces, orders):
    """The formula, across documents of all lengths, with the largest tokens there are."""
    random = np.random.default_rng(rows)
    texts = [random.integers(0, 65_536, length + 1).astype(np.uint16) for length in (1, 2, 3, 1, 40, 300)] + [
        np.full(5, 65_535, np.uint16)
    ]
    tokens = np.concatenate([text[:-1] for text in texts])
    positions = np.concatenate([np.arange(len(text) - 1) for text in texts])
    found = tg.hash_ngrams(tokens, positions, rows, pieces, orders)
    assert found.dtype == np.int32
    assert found.tolist() == [row for text in texts for row in ngram_rows_of(text[:-1], rows, pieces, orders)]


def test_multipliers_are_different_odd_numbers():
    """Even ones would lose a token's highest bits, equal ones the order of tokens, larger ones overflow."""
    multipliers = [number for row in tg.NGRAM_MULTIPLIERS for number in row if number]
    assert all(number % 2 and 1 < number < 2**16 for number in multipliers)
    assert len(set(multipliers)) == len(multipliers)
    assert all(row[0] and row[-1] for row in tg.NGRAM_MULTIPLIERS)


def test_ngrams_depend_on_their_tokens_alone():
    """The same rows for the same tokens anywhere, others for other or swapped ones;
    evenly spread over all parts, whose last rows are for starts."""
    tokens = np.array([7, 50_000, 8, 50_000, 8, 7, 50_000, 8])
    positions = np.array([0, 1, 2, 0, 1, 2, 3, 4])
    orders = len(tg.NGRAM_MULTIPLIERS)
    part = 2**20
    pair, triple, *_ = tg.hash_ngrams(tokens.astype(np.uint16), positions, orders * part, 1, orders).T
    assert pair[0] == pair[3] == part - 1
    assert pair[1] == pair[6]
    assert pair[2] == pair[4] == pair[7]
    assert len(set(pair)) == 4
    assert triple[0] == triple[1] == triple[3] == triple[4] == 2 * part - 1
    assert triple[2] == triple[7]
    assert len(set(triple)) == 4
    random_tokens = np.random.default_rng(0).integers(0, 50_257, 100_000).astype(np.uint16)
    columns = tg.hash_ngrams(random_tokens, np.arange(100_000), orders * 1002, 1, orders).T
    for column, (rows, multipliers) in enumerate(zip(columns, tg.NGRAM_MULTIPLIERS)):
        spread = np.bincount(rows - 1002 * column, minlength=1002)
        assert spread[1001] == len(multipliers) - 1
        assert spread[:1001].min() > 50
        assert spread[:1001].max() < 200


@pytest.mark.slow
def test_ngrams_that_share_one_piece_share_no_other():
    """The chance that a second one is the same too is that of any two n-grams: one in a thousand here."""
    tokens = np.random.default_rng(1).integers(0, 50_257, 40_000).astype(np.uint16)
    orders = len(tg.NGRAM_MULTIPLIERS)
    found = tg.hash_ngrams(tokens, np.arange(len(tokens)), orders * 1002, 4, orders).reshape(-1, 4, orders)
    for order, rows in enumerate(found[3:].transpose(2, 0, 1)):
        some = rows[:400]
        for first in range(4):
            shared = some[:, None, first] == rows[None, 400:, first]
            others = np.delete(some[:, None] == rows[None, 400:], first, axis=2)[shared]
            assert shared.sum() > 10_000, (order, first)
            assert (others.mean(0) < 3 / 1000).all(), (order, first)


def test_a_further_order_takes_one_more_row_of_multipliers(corpus, tiny, monkeypatch):
    """And a higher number of orders. All have an equal part of the table, and the model trains with them. A multiplier
    of 0 leaves its token out."""
    monkeypatch.setattr(tg, "NGRAM_MULTIPLIERS", (*tg.NGRAM_MULTIPLIERS[:2], (40_503, 0, 52_711, 61_979)))
    x = [7, 50_000, 8, 65_535, 9]
    columns = tg.hash_ngrams(np.array(x, np.uint16), np.arange(5), 3000, 1, 3).T
    assert columns.shape == (3, 5)
    assert all((columns[n] // 1000 == n).all() and (columns[n, :n + 1] == 1000 * n + 999).all() for n in range(3))
    assert columns[2, 3:].tolist() == [
        2000 + (40_503 * x[i] ^ 52_711 * x[i - 2] ^ 61_979 * x[i - 3]) % 999
        for i in (3, 4)
    ]
    preset = replace(helpers.PRESET, model=replace(helpers.MODEL, ngram_orders=3))
    trainer = helpers.make_trainer(corpus, preset)
    trainer.initialise(1)
    batches = helpers.all_batches(trainer)[0]
    assert views(batches[0]).ngrams.shape[1] == 4
    assert trainer.training_step(0, batches).isfinite()


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_texts_shorter_than_an_ngram(monkeypatch, length):
    """Of five tokens, of which four lie before the last one: its row is that of the incomplete ones."""
    monkeypatch.setattr(tg, "NGRAM_MULTIPLIERS", ((3, 5, 7, 11, 13),))
    found = tg.hash_ngrams(np.arange(length, dtype=np.uint16), np.arange(length), 100, 1, 1)
    assert (found == 99).all()


def recalled(piece, vocabulary):
    """By the words of longest_suffix_match's docstring, for one document."""
    for end in range(1, len(piece) + 1):
        for length in (3, 2, 1):
            before = [i for i in range(length, end) if length <= end and piece[i - length:i] == piece[end - length:end]]
            if before:
                yield piece[before[-1]] + (length - 1) * vocabulary
                break
        else:
            yield None


@pytest.mark.parametrize("kinds", [1, 2, 3, 8, 60])
def test_recall(kinds):
    """Documents of all lengths, of few and of many kinds of tokens; nothing of another document, nothing later."""
    random = np.random.default_rng(kinds)
    pieces = [random.integers(0, kinds, length) * 65_535 // max(kinds - 1, 1) for length in (1, 2, 3, 1, 70, 5, 200)]
    tokens = np.concatenate(pieces)
    positions = np.concatenate([np.arange(len(piece)) for piece in pieces])
    for dtype in (np.int32, np.uint16):
        found = tg.longest_suffix_match(tokens.astype(dtype), positions, 65_537).tolist()
        wanted = [x for piece in pieces for x in recalled(piece.tolist(), 65_537)]
        assert found == [3 * 65_537 + i % 32 if x is None else x for i, x in zip(positions.tolist(), wanted)]


def test_a_document_reads_the_same_rows_wherever_it_lies():
    """Alone, or behind others of any length:
    a table's rows are chosen by what the document holds and by nothing else."""
    random = np.random.default_rng(11)
    piece = np.concatenate([[BOS], random.integers(0, 40, 75)]).astype(np.uint16)
    alone = tg.pack({0: [piece]}, MODEL, pin=False).to(helpers.CPU).ngrams
    assert (alone[:, -1] >= 2 * (MODEL.table_rows - tg.NEW_TOKEN_ROWS)).sum() > tg.NEW_TOKEN_ROWS, "new tokens"
    before = [random.integers(0, 40, length + 1).astype(np.uint16) for length in (1, 7, 33)]
    for lead in range(1, 4):
        for chunks in ({0: [*before[:lead], piece, piece]}, {0: before[:lead], 1: [piece], 2: [piece]}):
            rows = tg.pack(chunks, MODEL, pin=False).to(helpers.CPU).ngrams
            assert rows[-2 * len(alone):-len(alone)].equal(alone)
            assert rows[-len(alone):].equal(alone)


def test_targets_further_ahead_stay_in_their_document(marked):
    """The token k + 1 further on where the document still has it, -1 elsewhere:
    at its end, where the cap cut it, at the end of a chunk."""
    for batch in itertools.islice(batches(marked[0], micro=2), 4, None, 5):
        documents = views(batch)
        for k in range(4):
            parts = tg.Targets(
                documents.class_index,
                documents.positions,
                torch.ones(4),
                documents.classes,
                documents.num_always,
            ).parts()
            found = torch.cat([part.ahead(k) for _, part in parts])
            expected = [
                documents.class_index[i + k] if k <= left else -1
                for i, left in enumerate(documents.remaining.tolist())
            ]
            assert found.tolist() == expected


# ---- sampled softmax -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("distinct", [1, 100, 299, 300, 301, 900])
def test_candidates(distinct):
    """Different ids, the targets first and ascending, then drawn ones;
    a column says where its target is, -1 only if there is no room."""
    generator = np.random.default_rng(distinct)
    targets = np.resize(generator.permutation(1000)[:distinct], 3000)
    present = np.unique(targets)
    ids, certain, columns = tg.sample_classes(targets, 300, 1000, chunk_number=7)
    assert len(ids) == 300 == len(set(ids))
    assert ids.min() >= 0
    assert ids.max() < 1000
    assert certain == min(len(present), 300)
    assert (ids[:certain] == present[:certain]).all()
    assert not set(ids[certain:]) & set(present)
    assert (ids[columns[columns >= 0]] == targets[columns >= 0]).all()
    assert (columns < 0).any() == (len(present) > 300)
    assert set(targets[columns < 0]) == set(present[300:])
    again = tg.sample_classes(targets, 300, 1000, chunk_number=7)
    assert all(np.array_equal(a, b) for a, b in zip((ids, certain, columns), again))


@pytest.mark.parametrize(
    "preset",
    [p for p in tg.PRESETS.values() if any(s.sampled_classes for s in p.stages)],
    ids=lambda p: p.name,
)
@pytest.mark.slow
def test_the_sweep_draws_every_id(preset):
    """Over the batch chunks of a stage no id is drawn much more rarely than another."""
    for stage in preset.stages:
        if stage.sampled_classes:
            vocabulary = preset.model.padded_vocabulary
            chunks = stage.steps * tg.CHUNKS
            drawn = np.zeros(vocabulary, int)
            targets = np.arange(stage.sampled_classes // 4)
            for sweep in range(chunks := min(chunks, 1500)):
                ids, certain, _ = tg.sample_classes(targets, stage.sampled_classes, vocabulary, sweep)
                drawn[ids[certain:]] += 1
            expected = chunks * (stage.sampled_classes - len(targets)) / (vocabulary - len(targets))
            assert drawn[len(targets):].min() > 0.5 * expected
            assert drawn.max() < 2 * expected


@pytest.mark.parametrize("count", [6144, 50304 // 4, 50304 // 3])
def test_every_id_is_drawn_whatever_the_count(count):
    """Counts that divide the vocabulary too: once they left a fifth and more of the ids out for ever."""
    drawn = np.zeros(50304, int)
    targets = np.arange(2000)
    for sweep in range(120):
        ids, certain, _ = tg.sample_classes(targets, count, 50304, sweep)
        drawn[ids[certain:]] += 1
    others = drawn[len(targets):]
    assert others.min() > 0.7 * others.mean()
    assert others.max() < 1.3 * others.mean()


def test_candidates_do_not_depend_on_the_ranks(marked):
    stream, _ = marked
    whole = torch.cat([views(batch).classes for batch in itertools.islice(batches(stream), STAGES[0].steps)])
    for world, micro in ((1, 2), (2, 4), (8, 1)):
        found = torch.empty_like(whole)
        for rank in range(world):
            count = STAGES[0].steps * tg.CHUNKS // world // micro
            found[rank::world] = torch.cat(
                [
                    views(batch).classes
                    for batch in itertools.islice(batches(stream, world, rank, micro), count)
                ]
            )
        assert found.equal(whole)
    assert len({tuple(ids) for ids in whole.tolist()}) == len(whole), "each chunk draws others"


# ---- validation windows ----------------------------------------------------------------------------------------------
def test_validation_counts_every_token_once(corpus, tiny):
    path = corpus / "tiny_val_000000.bin"
    stream = np.fromfile(path, "<u2", offset=1024)
    for tokens, window in ((1280, 256), (1000, 300), (77, 77), (5, 100)):
        windows, digest = tg.validation_windows(path, tokens, window, VOCABULARY)
        assert digest == hashlib.sha256(stream[:tokens + 1]).hexdigest()[:16]
        assert [sum(len(p) - 1 for p in pieces) for pieces in windows] == [
            min(window, tokens - at) for at in range(0, tokens, window)
        ]
        pieces = [piece for pieces in windows for piece in pieces]
        assert (np.concatenate([p[:-1] for p in pieces]) == stream[:tokens]).all()
        assert (np.concatenate([p[1:] for p in pieces]) == stream[1:tokens + 1]).all()
        assert all(BOS not in piece[1:-1] for piece in pieces)
        assert all(pieces[i][0] == BOS or i == 0 for pieces in windows for i in range(len(pieces)))


def test_the_first_validation_shard_is_read(corpus, tiny, tmp_path):
    """And no other, however many the folder has."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    write_shard(folder / "tiny_val_000001.bin", helpers.documents(1500, seed=10))
    _, windows, *hashes = tg.open_corpus(tiny, corpus)
    _, found, *others = tg.open_corpus(tiny, folder)
    assert hashes == others
    assert all(map(np.array_equal, itertools.chain(*windows), itertools.chain(*found)))


def test_generated_documents_are_not_the_training_data(tiny):
    pieces = tg.generated_pieces(5000, 300, seed=1)
    assert sum(len(p) - 1 for p in pieces) == 5000
    assert max(len(p) - 1 for p in pieces) <= 300
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
        fetcher = tg.prefetched(slowly(batches(stream, micro=2)), depth)
        for batch in expected:
            time.sleep(generator.choice((0, 0, 0.002)))
            assert next(fetcher).data.equal(batch)
        assert next(fetcher, None) is None
        assert not helpers.own_threads()


def test_an_error_in_the_thread_is_raised_where_batches_are_used(tiny):
    def broken():
        yield 1
        yield 2
        raise ValueError("a disk went away")

    fetcher = tg.prefetched(broken())
    assert (next(fetcher), next(fetcher)) == (1, 2)
    with pytest.raises(ValueError, match="a disk went away"):
        next(fetcher)
    assert not helpers.own_threads()


@pytest.mark.parametrize("seconds", [0, 0.3])
def test_closing_waits_for_one_item_only(tiny, seconds):
    """Neither for those that are planned nor for room."""
    made = []

    def items():
        for number in range(1000):
            made.append(number)
            yield number
            time.sleep(seconds)

    fetcher = tg.prefetched(items(), depth=8)
    assert next(fetcher) == 0
    assert len(helpers.own_threads()) == 1
    started = time.monotonic()
    fetcher.close()
    assert not helpers.own_threads()
    assert time.monotonic() - started < 2
    assert len(made) <= 9


@pytest.mark.slow
def test_an_error_in_the_thread_ends_the_run(corpus, tiny, tmp_path, monkeypatch, capsys):
    read = tg.TokenStream.read
    limit = tg.TokenStream(corpus, 8000, VOCABULARY).consumed(tiny.stages[:2])

    def fails_later(stream, start, count):
        if start >= limit:
            raise OSError("input/output error")
        return read(stream, start, count)

    monkeypatch.setattr(tg.TokenStream, "read", fails_later)
    assert tg.main(["--preset", "tiny", "--seed", "1", "--data", str(corpus), "--log-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("train_gpt: file: expected ")
    assert "found 'input/output error'; fix: " in said
    assert said.count("\n") == 1
    events = helpers.read_log(next(tmp_path.glob("*.jsonl")))
    assert events[-1]["kind"] == "end"
    assert events[-1]["state"].startswith("failed: file: ")
    assert events[-1]["code"] == 2
    assert not helpers.own_threads()


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
    "truncated": (
        truncate,
        rf"{TRAIN}: size of \d+ tokens: expected \d+ bytes, found \d+ bytes; fix: fetch this file again",
    ),
    "too long": (
        rewrite(TRAIN, count=4000),
        rf"{TRAIN}: size of 4000 tokens: expected 9024 bytes, found \d+ bytes",
    ),
    "no tokens": (
        lambda folder: [rewrite(TRAIN, count=0)(folder), os.truncate(folder / TRAIN, 1024)],
        rf"{TRAIN}: size of 0 tokens: expected 1026 bytes, found 1024 bytes",
    ),
    "negative count": (rewrite(TRAIN, count=-1), rf"{TRAIN}: size of -1 tokens"),
    "header only in part": (cut_header, r"tiny_train_000000.bin: .*expected .*found .*fetch this file again"),
    "empty file": (
        lambda folder: (folder / TRAIN).write_bytes(b""),
        rf"{TRAIN}: [a-z ]+: expected \d+.*, found (an empty file|0 bytes); fix: fetch this file again",
    ),
    "wrong magic": (
        rewrite(TRAIN, magic=20240521),
        rf"{TRAIN}: magic number: expected 20240520, found 20240521",
    ),
    "wrong version": (rewrite(TRAIN, version=2), rf"{TRAIN}: version: expected 1, found 2"),
    "token too large": (
        rewrite(TRAIN, (77, VOCABULARY)),
        rf"{TRAIN}: largest token: expected below {VOCABULARY}, found {VOCABULARY}",
    ),
    "no documents": (
        rewrite(TRAIN, (BOS, 3)),
        rf"{TRAIN}: documents: expected token {BOS} before each, found none",
    ),
    "no folder": (
        lambda folder: shutil.rmtree(folder),
        r"train shards: expected .*\*_train_\*\.bin, found none; fix: python data/fineweb.py",
    ),
    "no training shards": (remove("*_train_*"), r"train shards: expected .*found none"),
    "no validation shard": (remove("*_val_*"), r"val shards: expected .*found none"),
    "too few tokens": (
        shorten("*_train_*", 900),
        r"training tokens: expected 4,097 for the schedule, found 2,700 in 3 shards; "
        r"fix: --length auto \(that is 0.7499 times this length\), or python data/fineweb.py fetch --shards",
    ),
    "too little validation": (
        shorten("*_val_*", 1280),
        rf"{VAL}: validation tokens: expected at least 1,281, found 1,280",
    ),
    "named pipe": (
        lambda folder: [(folder / TRAIN).unlink(), os.mkfifo(folder / TRAIN)],
        rf"{TRAIN}: kind of file: expected a regular one, found a folder, a named pipe or a device",
    ),
    "validation in a folder": (
        lambda folder: [(folder / VAL).unlink(), (folder / VAL).mkdir()],
        rf"{VAL}: kind of file: expected a regular one",
    ),
    "one shard twice": (
        lambda folder: shutil.copy(folder / "tiny_train_000000.bin", folder / TRAIN),
        rf"{TRAIN}: content: expected another file's than the others', found that of tiny_train_000000.bin",
    ),
    "trains on the validation": (
        lambda folder: shutil.copy(folder / VAL, folder / "tiny_train_000000.bin"),
        rf"{VAL}: content: expected another file's than the others', found that of tiny_train_000000.bin",
    ),
    "first shards missing": (
        lambda folder: [path.rename(path.with_name(path.name.replace("_00000", "_00003")))
                        for path in folder.glob("*_train_*")],
        r"first training shard: expected tiny_train_000000.bin or tiny_train_000001.bin, found .*_000030.bin",
    ),
    "a shard missing between": (
        remove(TRAIN),
        r"next training shard: expected tiny_train_000001.bin, found .*/tiny_train_000002.bin; "
        r"fix: python data/fineweb.py fetch, or one corpus a folder, numbered without a gap",
    ),
    "two corpora": (
        lambda folder: (folder / "tiny_train_000000.bin").rename(folder / "other_train_000000.bin"),
        rf"next training shard: expected other_train_000001.bin, found .*/{TRAIN}",
    ),
    "bad validation shard": (rewrite(VAL, version=7), rf"{VAL}: version: expected 1, found 7"),
    "no documents in the validation": (
        rewrite(VAL, (BOS, 3)),
        rf"{VAL}: documents: expected token {BOS} before each, found none",
    ),
    "validation token too large": (
        rewrite(VAL, (5, 60_000)),
        rf"{VAL}: largest token: expected below {VOCABULARY}, found 60000",
    ),
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
    assert said.startswith("train_gpt: ")
    assert said.count("\n") == 1
    assert "; fix: " in said
    assert re.search(message, said), said
    assert not (tmp_path / "logs").exists()


def test_a_truncated_header_says_so(corpus, tiny, tmp_path, capsys):
    """The message must not claim that it expected what it found."""
    folder = tmp_path / "corpus"
    shutil.copytree(corpus, folder)
    cut_header(folder)
    tg.main(["--preset", "tiny", "--data", str(folder)])
    assert "expected 20240520, found 20240520" not in capsys.readouterr().err
