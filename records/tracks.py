"""The tracks, what each of them fixes, and the rule by which a record reaches a track's target."""

from __future__ import annotations

from typing import NamedTuple

# Records dated from this day on stand under the one rule of all tracks (rule.py). The 27 before it keep the rules of
# their time, which `Earlier` holds, and the mark "before the rule": before-the-rule.sha256 lists them, so none can be
# added.
RULE_SINCE = "2026-11-28"


class Track(NamedTuple):
    """What a record must hold to; everything else is free."""

    preset: str
    corpus: str  # its shards are named CORPUS_train_000001.bin ... and CORPUS_val_000000.bin
    data: str  # where they are looked for
    shard_tokens: int  # training shards are listed in order until they hold this many
    most_tokens: int  # that a run may train on
    val_tokens: int
    target_loss: float | None
    loss_sd: float  # of the loss between runs of one script, fixed: what the z-test goes by
    usual_runs: int
    practice: bool = False  # integrity is checked, success is not, no leaderboard


class Earlier(NamedTuple):
    """What a track asked of records before the rule."""

    target_loss: float | None
    alpha: float | None  # level of the one-sided t-test against the target; None: the mean decided
    least_runs: int


# The standard deviations are pooled over the arms of all records before the rule, see `python records rule`: sprint
# .0021 (76 runs), sprint-small .0032 (3 runs). The speedrun's 19 runs give .0021, but such arms of three rarely hold
# one of the seeds that end high; with the runs of the lab book it is .0029, and the larger figure is fixed. FineWeb,
# where nothing has run, takes those of the same models.
SPEEDRUN_SD, SPRINT_SD, SMALL_SD = 0.0029, 0.0021, 0.0032
FINEWEB, WEBTEXT, WEBMIX = "data/fineweb10B", "data/webtext", "data/webmix"

TRACKS = {
    "speedrun": Track("speedrun", "fineweb", FINEWEB, 900_000_000, 900_000_000, 10_485_760, 3.28, SPEEDRUN_SD, 8),
    "sprint-fineweb": Track("sprint", "fineweb", FINEWEB, 100_000_000, 100_000_000, 2_097_152, None, SPRINT_SD, 5),
    "sprint-small-fineweb": Track("sprint-small", "fineweb", FINEWEB, 100_000_000, 100_000_000, 2_097_152, None,
                                  SMALL_SD, 5),
    "sprint-webtext": Track("sprint", "webtext", WEBTEXT, 100_000_000, 94_200_000, 2_097_152, 3.22, SPRINT_SD, 5),
    "sprint-small-webtext": Track("sprint-small", "webtext", WEBTEXT, 100_000_000, 94_200_000, 2_097_152, 3.22,
                                  SMALL_SD, 5),
    "speedrun-webmix": Track("speedrun-webmix", "webmix", WEBMIX, 243_000_000, 243_200_000, 4_194_304, 3.0924,
                             SPEEDRUN_SD, 8),
    "speedrun-webmix-free": Track("speedrun-webmix-free", "webmix", WEBMIX, 243_000_000, 243_200_000, 4_194_304,
                                  3.2257, SPEEDRUN_SD, 8),
    "smoke": Track("smoke", "sample", "data/sample", 10_000_000, 10_000_000, 8192, None, 0.01, 2, practice=True),
}

EARLIER = {
    "speedrun": Earlier(3.28, 0.01, 2),
    "sprint-webtext": Earlier(3.22, None, 3),
    "sprint-small-webtext": Earlier(3.22, None, 3),
    "speedrun-webmix": Earlier(3.1029, None, 3),
}


class Pins(NamedTuple):
    """What identifies a corpus, whatever its files are called."""

    manifest: str  # SHA-256 of what sha256sum prints for its training shards, in order, and its validation shard
    val_hash: dict[int, str]  # what a run logs for that many validation tokens


# FineWeb has none yet: its first record sets them. data/sample is for practice, where any text will do.
PINS = {
    "webtext": Pins("5d01161ab4e5334ffaaf5c7ab7e49c18cdb87289171cce5fd1d91535c4062c62",
                    {2_097_152: "74f9a92a3c857c45"}),
    "webmix": Pins("fe672168ba1e6ff88f21e6ce65bfca2fadf2103237a8fdb599204bdee1cf12bb", {4_194_304: "46a9a0a4ad58960e"}),
}
