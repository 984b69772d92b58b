"""A record folder: its closed schema, its plan, and `new`, which writes both before any run."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from runlog import Failure, Run, fail, read_run, sha256
from tracks import EARLIER, PINS, TRACKS, Track

HOME = Path(__file__).resolve().parent
SCRIPT = "train_gpt.py"
LIST_BEFORE_THE_RULE = HOME / "before-the-rule.sha256"  # of each record.json; no other has the first schema
KINDS = ("ml", "systems", "baseline")
NEWEST_SCHEMA = 2  # 1 is that of the records before the rule
LEAST_RUNS, HIGH_END = 5, 0.004  # runs an arm at least; how far above the median a loss counts as one that ended high
# z of a one-sided level of .01 and of a power of .9, summed and squared: n = 13 sd^2 / margin^2 passes nine times in
# ten.
RUNS_FACTOR = 13
# A record whose first run began on this day or later has a parent, unless it is the first of its track on its hardware:
# only two arms in turns on one machine show a gain. The nineteen before it were run without parents; they stay as they
# are, since nothing can be added to them.
PARENTS_SINCE = "2026-11-24"


def hardware(run: Run) -> str:
    """The class that a run is ranked in: how many GPUs of which kind, or processes on which processor, and on how many
    nodes if not on one."""
    nodes = run.head.get("nodes", 1)  # logs had no such entry while all runs were on one
    return f"{run.head.get('world')} x {run.head.get('device')}" + (f" on {nodes} nodes" if nodes != 1 else "")


class Folder(NamedTuple):
    path: Path
    record: dict[str, Any]

    @property
    def track(self) -> Track:
        return TRACKS[self.record["track"]]

    @property
    def parent(self) -> Path | None:
        return self.path.parent / self.record["parent"] if self.record["parent"] else None

    @property
    def under_rule(self) -> bool:
        return self.record["schema"] >= 2

    @property
    def repeated(self) -> Folder | None:
        """The record whose plan this one carries out on another machine."""
        name = self.record["plan"].get("retimes")
        return load(self.path.parent / name) if name else None

    @property
    def target(self) -> float | None:
        """The loss to reach: the track's, of its day; a retime has that of the record it repeats."""
        if not self.under_rule:
            return EARLIER[self.record["track"]].target_loss
        if (repeated := self.repeated) is None:
            return self.track.target_loss
        if "retimes" in repeated.record["plan"]:
            fail(f"retime {self.path.name}", "the record that was planned first", repeated.path.name,
                 "name the record that this one retimes")
        return repeated.target

    def script(self, arm: str) -> Path:
        return (self.path if arm == "a" else self.parent) / SCRIPT

    def runs(self, arm: str) -> list[Run]:
        """Finished runs of an arm, in the order of the seeds, so that equal places of both arms are a pair."""
        paths = [self.path / "runs" / f"{arm}-s{seed}.jsonl" for seed in self.record["plan"]["seeds"]]
        return [read_run(path) for path in paths if path.exists()]

    @property
    def started(self) -> str:
        """When the first run began, ISO 8601 in UTC, or the day of the plan: what orders records, those of one day too.
        """
        return min((str(run.head.get("started", "")) for run in self.runs("a")), default=self.record["date"])

    @property
    def hardware(self) -> str | None:
        """The class of its first run, None before there is one."""
        return next(map(hardware, self.runs("a")), None)


def many(item: str, brackets: str) -> str:
    """Pattern of a JSON array or object of one or more items."""
    return rf"\{brackets[0]}{item}(, {item})*\{brackets[1]}"


NAME_FORM = r"[a-z0-9][a-z0-9.-]*"  # of a record, after its date
HEX, KEY, NAME = "[0-9a-f]", r"[ab]-s\d+", r'"20[\w.-]+"'  # a run's key is its arm and seed
SEEDS, ORDER = many(r"\d+", "[]"), many(f'"{KEY}"', "[]")
# Each field of record.json and the form of its JSON text. Other fields are errors: nothing rides along unchecked.
FIRST_SCHEMA = {
    "schema": "1",
    "track": f'"({"|".join(TRACKS)})"',
    "date": r'"20\d\d-[01]\d-[0-3]\d"',
    "parent": rf"null|{NAME}",
    "kind": f'"({"|".join(KINDS)})"',
    "scripts": rf'\{{"a": "{HEX}{{64}}"(, "b": "{HEX}{{64}}")?\}}',
    "data": many(rf'"\w+_(train|val)_\d{{6}}\.bin": "{HEX}{{64}}"', "{}"),
    "plan": rf'\{{"id": "{HEX}{{16}}", "world": [1248], ("length": [\d.]+, )?"seeds": {SEEDS}, "order": {ORDER}\}}',
    "runs": r"\{\}|" + many(rf'"{KEY}\.jsonl": "{HEX}{{64}}"', "{}"),
    "means": r"\{\}|" + many(r'"[ab]": \{"loss": [\d.]+, "ms": [\d.]+\}', "{}"),
}
SCHEMAS = {1: FIRST_SCHEMA, 2: FIRST_SCHEMA | {
    "schema": "2",
    "plan": rf'\{{"id": "{HEX}{{16}}", "world": [1248], ("length": [\d.]+, )?"margin": (null|0\.\d+), '
            rf'("(restarts|retimes)": {NAME}, )?"seeds": {SEEDS}, "order": {ORDER}\}}',
    "abandoned": r'null|"[^"\\\n|]{3,200}"',
}}


def schema_errors(record: Any) -> list[str]:
    """Everything that makes `record` no record, a sentence each."""
    if not isinstance(record, dict):
        return [f"expected an object, found {json.dumps(record)[:60]}"]
    version = record.get("schema")
    if type(version) is int and version > NEWEST_SCHEMA:
        return [f"schema: expected {NEWEST_SCHEMA} at most, found {version}: a newer version of this tool wrote it"]
    form_of = SCHEMAS[version if type(version) is int and version in SCHEMAS else NEWEST_SCHEMA]
    errors = [f"{name}: expected no such field, found one" for name in record if name not in form_of]
    for name, form in form_of.items():
        text = json.dumps(record.get(name, "nothing"))
        if name not in record or not re.fullmatch(form, text):
            errors.append(f"{name}: expected {form}, found {text[:80]}")
    if not errors and ("b" in record["scripts"]) != (record["parent"] is not None):
        errors.append(f"scripts: expected arm b exactly when there is a parent, found parent {record['parent']}")
    return errors


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which json would take the last value of a name that is there twice, unseen by any check."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the field {name} twice")
    return dict(pairs)


def find(path: Path, home: Path | None = None) -> Path:
    """The folder of a record: `path` itself if it is one, else what has that name in records/, with or without its
    date."""
    if (path / "record.json").exists():
        return path
    home = home or HOME
    dated = [folder for folder in all_folders(home) if folder.name.partition("_")[2] == path.name]
    if len(dated) > 1:
        fail(f"record {path.name}", "the name of one record", " and ".join(folder.name for folder in dated),
             "give the date too")
    return dated[0] if dated else path if path.exists() else home / path.name


def load(path: Path) -> Folder:
    """The record in `path`, or of that name in records/, see `find`."""
    try:
        place = find(path)
        if place.is_symlink():
            fail(f"record {path}", "a folder", "a link to one", "move the folder itself there")
        path = place.resolve()
    except (OSError, RuntimeError) as error:  # Python 3.11 and 3.12 call a loop of links the latter
        fail(f"record {path}", "a folder with record.json", error, "give a folder made by: python records new NAME")
    file, restore = path / "record.json", "restore the file, for example with git, or make the record again"
    try:
        record = json.loads(file.read_text(), object_pairs_hook=without_doubles)
    except OSError as error:
        fail(f"record {path}", "a folder with record.json", error, "give a folder made by: python records new NAME")
    except (ValueError, RecursionError) as error:
        cut = f", cut off after {file.stat().st_size} bytes" if not file.read_bytes().rstrip().endswith(b"}") else ""
        fail(f"{file}", "whole JSON", f"{error}{cut}", restore)
    if errors := schema_errors(record):
        newer = "a newer version" in errors[0]
        fail(f"{file}", "the schema of records/README.md", errors[0], "update this checkout: git pull" if newer
             else restore)
    return Folder(path, record)


def listed_before_the_rule(folder: Folder) -> bool:
    listed = dict(reversed(row.split()) for row in LIST_BEFORE_THE_RULE.read_text().splitlines() if row.strip())
    return listed.get(folder.path.name) == sha256((folder.path / "record.json").read_bytes())


def require_stated(path: Path, stated: str | None) -> None:
    """Refuse a log that is not the one of which a record states the SHA-256, if one does."""
    found = sha256(path.read_bytes()) if path.is_file() else "no file"
    if stated not in (None, found):
        fail(f"run {path}", f"sha256 {stated[:16]} as in record.json", found[:16],
             "restore the file, for example with git")


def require_runs(folder: Folder) -> None:
    """Refuse a record whose runs are not those that it lists: what they say would be said of others."""
    for name, stated in folder.record["runs"].items():
        require_stated(folder.path / "runs" / name, stated)


def text_of_records(home: Path) -> dict[Path, str]:
    """What is in each record.json, by its folder, also where that is no record: to be searched, and not to be judged.
    """
    found = {}
    for path in all_folders(home):
        with contextlib.suppress(OSError):
            found[path] = (path / "record.json").read_text(errors="replace")
    return found


def all_folders(home: Path = HOME) -> list[Path]:
    found = (path.parent for path in home.glob("*/record.json"))
    return sorted(folder for folder in found if not folder.name.startswith("."))  # `new` leaves these if it is killed


def write_whole(path: Path, content: str) -> None:
    """Write a file aside and rename it, so that an interruption or a full disk leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_record(path: Path, record: dict[str, Any]) -> None:
    write_whole(path / "record.json", json.dumps(record, indent=2) + "\n")


def plan_seeds(origin: str, count: int) -> list[int]:
    """Seeds nobody chose.

    They follow from the plan's id, so that a plan of fewer runs has others; before the rule from the script's hash.
    """
    seeds, draw = [], 0
    while len(seeds) < count:
        seed = int(sha256(f"{origin} {draw}")[:12], 16) % 1_000_000
        draw += 1
        if seed not in seeds:
            seeds.append(seed)
    return seeds


def plan_order(seeds: list[int], arms: str) -> list[str]:
    """Arms interleaved as a b, b a, a b ...: a linear drift of the machine cancels in the pairs."""
    return [f"{arm}-s{seed}" for i, seed in enumerate(seeds) for arm in (arms if i % 2 == 0 else arms[::-1])]


def plan_id(record: dict[str, Any], name: str = "") -> str:
    """Names everything that is fixed before the first run. Each log carries it, so a plan cannot grow after a look.

    `name` is the folder's. Since the rule it counts too, with the day and the number of runs; the seeds follow from it.
    """
    plan = record["plan"]
    fixed = {key: record[key] for key in ("track", "parent", "kind", "scripts", "data")}
    if record["schema"] == 1:
        fixed |= {key: plan[key] for key in ("world", "length", "seeds", "order") if key in plan}
    else:
        fixed |= {"name": name, "date": record["date"], "n": len(plan["seeds"])}
        fixed |= {key: plan[key] for key in ("world", "length", "margin", "restarts", "retimes") if key in plan}
    return sha256(json.dumps(fixed, sort_keys=True))[:16]


CACHES_AN_ARM = 2  # compiled anew as often, so that what a start draws by chance is sampled


def cache_number(folder: Folder, key: str) -> int:
    """Which of an arm's caches a run uses: the first for the first half of the seeds, the second for the others."""
    seeds = folder.record["plan"]["seeds"]
    place = seeds.index(int(key.partition("-s")[2]))
    return 1 + place * CACHES_AN_ARM // max(len(seeds), CACHES_AN_ARM)


def cache_part(folder: Folder, key: str, lane: str = "") -> str:
    """Which of its arm's caches a run uses: that of its seed's half, or where several runs go at once its lane's."""
    return f"g{lane}" if lane else f"c{cache_number(folder, key)}"


def log_name(folder: Folder, key: str, lane: str = "") -> str:
    """Name of a run's log folder. The log notes it, which ties it to plan, arm, seed, cache and lane."""
    name = f"{folder.record['plan']['id']}-{key}"
    return f"{name}-{cache_part(folder, key, lane)}" if folder.under_rule else name


def lane_name(run: Run) -> str:
    """The GPUs that a run had for itself, by the name of its log folder; empty where it was alone."""
    found = re.search(r"-g(\d+(?:\.\d+)*)$", str(run.head.get("settings", {}).get("log_dir", "")))
    return found[1] if found else ""


def shard_tokens(path: Path) -> int:
    with path.open("rb") as file:
        header = file.read(12)
    if len(header) < 12 or struct.unpack("<2i", header[:8]) != (20240520, 1):
        fail(f"shard {path}", "a header as in data/README.md", header[:8].hex() or "an empty file", "fetch it again")
    return struct.unpack("<i", header[8:])[0]


def data_manifest(track: Track, folder: Path) -> dict[str, str]:
    """SHA-256 of the track's training shards, in order, and of its validation shard."""
    train, val = (sorted(folder.glob(f"{track.corpus}_{kind}_*.bin")) for kind in ("train", "val"))
    if not train or not val:
        fail("data", f"{folder}/{track.corpus}_train_*.bin and _val_*.bin", f"{len(train)} and {len(val)} files",
             "python data/fineweb.py fetch (--shards 1 for a sprint) for FineWeb, else --data FOLDER")
    chosen, tokens = [], 0
    for path in train:
        if tokens < track.shard_tokens:
            chosen.append(path)
            tokens += shard_tokens(path)
    manifest = {}
    for path in [*chosen, val[0]]:
        with path.open("rb") as file:
            manifest[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return manifest


def planned_data(track: Track, folder: Path | None, home: Path) -> dict[str, str]:
    """`data_manifest` of the folder, by default the track's.

    Where that has no shards, what a record of a pinned corpus lists. So a plan can be made and committed on a machine
    without the corpus; `run` compares the shards before anything else.
    """
    default = home.parent / track.data
    pins = PINS.get(track.corpus)
    if folder is None and pins and not any(default.glob(f"{track.corpus}_train_*.bin")):
        for other in readable(home):
            manifest = other.record["data"]
            if other.track.corpus == track.corpus and manifest_hash(manifest, list(manifest)) == pins.manifest:
                return manifest
    return data_manifest(track, folder or default)


def manifest_hash(manifest: dict[str, str], names: list[str]) -> str:
    """What a run logs for these files: the SHA-256 of what sha256sum prints for them."""
    return sha256("".join(f"{manifest[name]}  {name}\n" for name in names))


def query_gpus(query: str, *ids: str) -> list[str]:
    """Lines of an nvidia-smi query about the GPUs of these ids, by default those that a run would see; empty on a
    machine without it."""
    visible = ",".join(ids) or os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":  # a run would see none
        return []
    chosen = [f"--id={visible}"] if visible else []
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader", *chosen], capture_output=True, text=True,
                              timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


TEMPLATE = """# {title}

**Idea.** One paragraph: what changed against {parent}, and why it should work.

**What it does.** Measurements that show the mechanism, not only the result.

**What failed.** What was tried on the way, with numbers; include runs that were not counted.

<!-- numbers: written by `python records run`, do not edit -->
No runs yet.
<!-- /numbers -->
"""


def hardware_here(world: int) -> str:
    """`hardware` of the runs that this machine would make with `world` processes: named as train_gpt.py names it in its
    log."""
    gpus = query_gpus("--query-gpu=name")
    return f"{world} x {gpus[0].strip() if gpus else platform.machine()}"


def readable(home: Path) -> Iterator[Folder]:
    """All records that can be read. What is no record is for `verify` to name."""
    for path in all_folders(home):
        with contextlib.suppress(Failure):
            yield load(path)


def finished(home: Path, track: str) -> list[Folder]:
    """The records of a track whose runs are done and that were not given up, in the order in which they were run."""
    found = [folder for folder in readable(home) if folder.record["track"] == track and folder.record["means"]
             and (folder.under_rule or listed_before_the_rule(folder))]
    return sorted((folder for folder in found if not folder.record.get("abandoned")), key=lambda folder: folder.started)


def rank(folder: Folder) -> tuple[bool, bool, float]:
    """Orders records of one track and class, the best first.

    Those that meet the target go by their time, then the others by their loss. Those under the rule come before those
    that were made before it, whose number of runs or target asked for less, and before retimes of these.
    """
    mean, target = folder.record["means"]["a"], folder.target
    missed = target is not None and mean["loss"] > target
    return missed, not (folder.repeated or folder).under_rule, mean["loss"] if missed else mean["ms"]


def best(home: Path, track: str, place: str, before: str) -> Folder | None:
    """The best record of a track on the hardware `place` whose runs began before a time; None if there is none."""
    earlier = [folder for folder in finished(home, track) if folder.started < before and folder.hardware == place]
    return min(earlier, key=rank, default=None)


def missing_parent(home: Path, record: dict[str, Any], place: str, started: str) -> Folder | None:
    """What a record should have had as its parent, by its runs' hardware and start; None if it has one or needs none.

    A retime on the hardware of the record it repeats claims nothing new, so it has no parent if that one has none.
    """
    if record["parent"] or started < PARENTS_SINCE:
        return None
    if "retimes" in record["plan"]:
        same = [folder for folder in finished(home, record["track"]) if folder.record["scripts"] == record["scripts"]]
        if any(folder.started < started and folder.hardware == place for folder in same):
            return None
    return best(home, record["track"], place, started)


def choose_parent(home: Path, parent: str | None, kind: str | None, track: str, place: str, now: str) -> str | None:
    """`parent` as the user said it: a folder, "none", or nothing at all, which means the best record of the track on
    this hardware."""
    if parent == "none" or not parent and kind == "baseline":
        return None
    if parent:
        return find(home / Path(parent).name, home).name
    for folder in finished(home, track):
        require_runs(folder)  # a damaged one may be the best
    found = best(home, track, place, now)
    return found.path.name if found else None


def require_parent(home: Path, record: dict[str, Any], place: str, started: str) -> None:
    """Refuse a record, or a plan before anything has run, that lacks a parent and needs one."""
    if needed := missing_parent(home, record, place, started):
        name, track = needed.path.name, record["track"]
        fail("parent", f"a record to beat, since {name} is one of {track} on {place}", "none",
             f"python records new NAME --track {track} --parent {name}")


def require_parent_here(folder: Folder) -> None:
    """The same for a plan that is about to start: it may have been made on other hardware, or before the first record
    of the track."""
    if not folder.record["runs"]:
        require_parent(folder.path.parent, folder.record, hardware_here(folder.record["plan"]["world"]), utc_now())


def utc_now() -> str:
    """In the form in which logs say when a run started, so that both can be compared."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def runs_for(margin: float, loss_sd: float) -> int:
    """How many runs an arm a plan needs that expects its mean loss `margin` below the target."""
    return max(LEAST_RUNS, math.ceil(RUNS_FACTOR * loss_sd ** 2 / margin ** 2 - 1e-9))


def margin_for(n: int, loss_sd: float) -> float:
    """The smallest margin, in steps of .0001, that n runs suffice for."""
    return next(margin for step in range(1, 10_000) if runs_for(margin := round(step * 1e-4, 4), loss_sd) <= n)


def claims(track: Track, kind: str) -> bool:
    """Whether a record must reach a loss: a baseline claims nothing, and neither does practice or a track without a
    target."""
    return kind != "baseline" and not track.practice and track.target_loss is not None


def least_runs(folder: Folder) -> int:
    """By the rule of the record's day."""
    kind, track, plan = folder.record["kind"], folder.track, folder.record["plan"]
    if kind == "baseline" or track.practice:
        return 1
    if not folder.under_rule:
        return EARLIER[folder.record["track"]].least_runs
    if repeated := folder.repeated:
        return len(repeated.record["plan"]["seeds"])
    return runs_for(plan["margin"], track.loss_sd) if plan["margin"] else LEAST_RUNS


def choose_runs(track: Track, kind: str, n: int | None, margin: float | None) -> tuple[int, float | None]:
    """Runs an arm and the margin that they are for: each follows from the other, and the track's usual number from
    neither."""
    if margin is not None and not 0.0001 <= margin < 1:
        fail("margin", "a number from 0.0001 to 1 nats", margin, "change --margin")
    if not claims(track, kind):
        if margin is not None:
            fail("margin", "none where no loss is claimed: in practice, of a baseline, without a target", margin,
                 "leave --margin out")
        least = 1 if kind == "baseline" or track.practice else LEAST_RUNS
        n, margin = track.usual_runs if n is None else n, None
    elif margin is None:
        least, n = LEAST_RUNS, track.usual_runs if n is None else n
        margin = margin_for(n, track.loss_sd) if n >= least else None
    else:
        least = runs_for(margin, track.loss_sd)
        n = least if n is None else n
    if not least <= n <= 1000:
        reason = f", {RUNS_FACTOR} x {track.loss_sd}^2 / {margin}^2" if margin else ""
        fail("runs an arm", f"{least} to 1000{reason}", n, "change --n or --margin")
    return n, margin


def restarted(home: Path, name: str, track: str) -> str:
    """The abandoned plan that a new one restarts: once an idea, at half the level."""
    folder = load(find(home / Path(name).name, home))
    why_not = restart_problem(folder, track)
    if why_not:
        fail(f"restart of {folder.path.name}", "an abandoned plan of this track, restarted never before", why_not,
             "leave out --restart")
    return folder.path.name


def retime_problem(folder: Folder) -> str | None:
    """What keeps a record from being repeated, or from being a parent; None if nothing does."""
    if folder.record.get("abandoned"):
        return "one that was abandoned"
    return None if folder.record["means"] else "one that is not finished"


def has_steps(folder: Folder) -> bool:
    """Whether a run of the plan has logged a step, in an attempt that was interrupted too."""
    return bool(folder.record["runs"]) or any(
        len(read_run(path).train) for path in (folder.path / "unfinished").glob("*.jsonl"))


def must_restart(home: Path, record: dict[str, Any], name: str, started: str) -> str | None:
    """The abandoned plan of the same script, of which steps of some run were seen before `started`: another plan of it,
    here `name`, is its restart."""
    if "retimes" in record["plan"]:
        return None
    named = record["plan"].get("restarts")
    for folder in readable(home):
        first = folder.record
        if "retimes" in first["plan"]:  # what it repeats is a record all the same
            continue
        seen = first.get("abandoned") and has_steps(folder) and folder.started < started
        same = first["track"] == record["track"] and first["scripts"]["a"] == record["scripts"]["a"]
        if seen and same and folder.path.name not in (name, named) and first["plan"].get("restarts") != name:
            return folder.path.name
    return None


def restart_problem(folder: Folder, track: str, by: str | None = None) -> str | None:
    """What keeps a plan from being restarted, by the record of the name `by` or a new one; None if nothing does."""
    if folder.record["track"] != track:
        return f"one of {folder.record['track']}"
    if not folder.record.get("abandoned"):
        return "one that is not abandoned"
    if "restarts" in folder.record["plan"]:
        return "a restart itself"
    for other in readable(folder.path.parent):
        if other.path.name != by and other.record["plan"].get("restarts") == folder.path.name:
            return f"one that {other.path.name} restarts"
    return None


def abandon(path: Path, why: str) -> None:
    """Give a plan up. It stays where it is, with its runs, and is listed."""
    folder = load(path)
    if not folder.under_rule:
        fail(f"record {folder.path.name}", "a plan under the rule", "one before it", "leave it as it is")
    folder.record["abandoned"] = " ".join(why.split())
    if errors := schema_errors(folder.record):
        fail("reason", "3 to 200 letters of ASCII without quotes, backslashes and |", errors[0],
             "say it in other words")
    write_record(folder.path, folder.record)


def new(name: str, *, track_name: str | None = None, parent: str | None = None, kind: str | None = None,
        n: int | None = None,
        margin: float | None = None, world: int | None = None, data: Path | None = None, retime: Path | None = None,
        restart: str | None = None, length: float | None = None, home: Path = HOME) -> Path:
    """Make home/DATE_NAME with script, plan and hashes. Returns the new folder.

    `retime` repeats another record's plan; `restart` names an abandoned plan of the same idea. `margin` is how far
    below the target, in nats a token, the mean loss is expected: the number of runs follows from it. Every run of both
    arms gets the trainer's option --length `length`, by default the parent's. A plan does not note 1.
    """
    if not re.fullmatch(NAME_FORM, name):
        fail("record name", "small letters, digits, - and .", name, "for example fp8-mlp-backward")
    source, seeds = home.parent / SCRIPT, None
    if retime is not None:
        old = load(retime)
        old = old.repeated or old
        if why_not := retime_problem(old):
            fail(f"retime of {old.path.name}", "a finished record", why_not, "name another record")
        source, seeds = old.path / SCRIPT, old.record["plan"]["seeds"]
        track_name, kind = old.record["track"], old.record["kind"]
        parent, length = old.record["parent"] or "none", old.record["plan"].get("length", 1)
    if not track_name:
        named = parent not in (None, "none")
        track_name = load(find(home / Path(parent).name, home)).record["track"] if named else \
            fail("track", f"one of {', '.join(TRACKS)}", "none", "add --track")
    if world is None:
        world = next(w for w in (8, 4, 2, 1) if w <= max(1, len(query_gpus("--query-gpu=name"))))
    place, now = hardware_here(world), utc_now()
    parent = choose_parent(home, parent, kind, track_name, place, now)
    base = load(home / parent).record if parent else None
    if base and base["track"] != track_name:
        fail(f"parent {parent}", f"a record of {track_name}", base["track"], "name another --parent")
    if base and (why_not := retime_problem(load(home / parent))):
        fail(f"parent {parent}", "a finished record", why_not, "name another --parent")
    track = TRACKS[track_name]
    kind = kind or ("ml" if parent else "baseline")
    if kind == "baseline" and parent or kind == "systems" and not parent:
        fail(f"parent of kind {kind}", "none" if parent else "a record", parent or "none", "change --parent or --kind")
    if length is None:
        length = base["plan"].get("length", 1) if base else 1
    if not 0.001 <= length <= 100:
        fail("length", "a number from 0.001 to 100", length, "change --length")

    plan = {"world": world} | ({"length": length} if length != 1 else {})
    if retime is not None:
        plan |= {"margin": old.record["plan"].get("margin"), "retimes": old.path.name}
    else:
        n, plan["margin"] = choose_runs(track, kind, n, margin)
        plan |= {"restarts": restarted(home, restart, track_name)} if restart else {}
    date = now[:10]
    path = home / f"{date}_{name}"
    if path.exists():
        fail(f"record {path.name}", "a new name", "a folder", "choose another NAME or remove it")
    if not source.exists():
        fail("script", str(source), "none", "run this in a checkout of the repository")
    scripts = {"a": sha256(source.read_bytes())} | ({"b": sha256((home / parent / SCRIPT).read_bytes())} if parent
                                                    else {})
    if retime is None and scripts["a"] == scripts.get("b"):
        fail("script", f"another than that of {parent}", "the same", f"change {SCRIPT} first, or --retime {parent}")
    require_parent(home, {"track": track_name, "parent": parent, "scripts": scripts, "plan": plan}, place, now)
    record = {"schema": NEWEST_SCHEMA, "track": track_name, "date": date, "parent": parent, "kind": kind,
              "scripts": scripts,
              "data": planned_data(track, data, home), "plan": plan, "runs": {}, "means": {}, "abandoned": None}
    if first := must_restart(home, record, path.name, now):
        again = restart_problem(load(home / first), track_name)
        fail("script", "another than that of an abandoned plan whose runs were seen", first,
             f"change {SCRIPT}: that plan was restarted once" if again else f"--restart {first}")
    record["plan"] = finished_plan(record, path.name, seeds or [0] * n, own_seeds=seeds is None)
    write_new(path, source, record)
    return path


def finished_plan(record: dict[str, Any], name: str, seeds: list[int], own_seeds: bool) -> dict[str, Any]:
    """The plan with its id, seeds and order.

    The id counts the seeds; those of its own follow from it, a retime's are given.
    """
    plan = record["plan"] | {"seeds": seeds}
    found = plan_id(record | {"plan": plan}, name)
    if own_seeds:
        plan["seeds"] = plan_seeds(found, len(seeds))
    return {"id": found, **plan, "order": plan_order(plan["seeds"], "".join(sorted(record["scripts"])))}


def write_new(path: Path, source: Path, record: dict[str, Any]) -> None:
    """The whole folder or nothing."""
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
    try:
        shutil.copy2(source, aside / SCRIPT)
        title, parent = path.name.partition("_")[2].replace("-", " "), record["parent"] or "nothing before it"
        (aside / "README.md").write_text(TEMPLATE.format(title=title, parent=parent))
        write_record(aside, record)
        aside.chmod(0o755)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
