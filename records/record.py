"""A record folder: its closed schema, its plan, and `new`, which writes both before any run."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from runlog import Failure, Run, fail, read_run, sha256

HOME = Path(__file__).resolve().parent
SCRIPT = "train_gpt.py"
KINDS = ("ml", "systems", "baseline")
# A record whose first run began on this day or later has a parent, unless it is the first of its track on its hardware: only two arms in
# turns on one machine show a gain. The nineteen before it were run without parents; they stay as they are, since nothing can be added to them.
PARENTS_SINCE = "2026-11-24"


class Track(NamedTuple):
    """What a record must hold to; everything else is free."""
    preset: str
    corpus: str  # its shards are named CORPUS_train_000001.bin ... and CORPUS_val_000000.bin
    data: str  # where they are looked for
    shard_tokens: int  # training shards are listed in order until they hold this many
    val_tokens: int
    target_loss: float | None
    alpha: float | None  # level of the one-sided t-test against the target; None: the mean decides
    least_runs: int
    usual_runs: int
    practice: bool = False  # integrity is checked, success is not, no leaderboard


TRACKS = {
    "speedrun": Track("speedrun", "fineweb", "data/fineweb10B", 900_000_000, 10_485_760, 3.28, 0.01, 2, 8),
    "sprint-fineweb": Track("sprint", "fineweb", "data/fineweb10B", 100_000_000, 2_097_152, None, None, 3, 3),
    "sprint-small-fineweb": Track("sprint-small", "fineweb", "data/fineweb10B", 100_000_000, 2_097_152, None, None, 3, 3),
    "sprint-webtext": Track("sprint", "webtext", "data/webtext", 100_000_000, 2_097_152, 3.22, None, 3, 3),
    "sprint-small-webtext": Track("sprint-small", "webtext", "data/webtext", 100_000_000, 2_097_152, 3.22, None, 3, 3),
    "speedrun-webmix": Track("speedrun-webmix", "webmix", "data/webmix", 243_000_000, 4_194_304, 3.1029, None, 3, 3),
    "smoke": Track("smoke", "sample", "data/sample", 10_000_000, 8192, None, None, 1, 2, practice=True),
}


def hardware(run: Run) -> str:
    """The class that a run is ranked in: how many GPUs of which kind, or processes on which processor, and on how many nodes if not on one."""
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

    def script(self, arm: str) -> Path:
        return (self.path if arm == "a" else self.parent) / SCRIPT

    def runs(self, arm: str) -> list[Run]:
        """Finished runs of an arm, in the order of the seeds, so that equal places of both arms are a pair."""
        paths = [self.path / "runs" / f"{arm}-s{seed}.jsonl" for seed in self.record["plan"]["seeds"]]
        return [read_run(path) for path in paths if path.exists()]

    @property
    def started(self) -> str:
        """When the first run began, ISO 8601 in UTC, or the day of the plan: what orders records, those of one day too."""
        return min((str(run.head.get("started", "")) for run in self.runs("a")), default=self.record["date"])

    @property
    def hardware(self) -> str | None:
        """The class of its first run, None before there is one."""
        return next(map(hardware, self.runs("a")), None)


def many(item: str, brackets: str) -> str:
    """Pattern of a JSON array or object of one or more items."""
    return rf"\{brackets[0]}{item}(, {item})*\{brackets[1]}"


HEX, KEY = "[0-9a-f]", r"[ab]-s\d+"  # a run's key is its arm and seed
SEEDS, ORDER = many(r"\d+", "[]"), many(f'"{KEY}"', "[]")
# Each field of record.json and the form of its JSON text. Other fields are errors: nothing rides along unchecked.
SCHEMA = {
    "schema": "1",
    "track": f'"({"|".join(TRACKS)})"',
    "date": r'"20\d\d-[01]\d-[0-3]\d"',
    "parent": r'null|"[\w.-]+"',
    "kind": f'"({"|".join(KINDS)})"',
    "scripts": rf'\{{"a": "{HEX}{{64}}"(, "b": "{HEX}{{64}}")?\}}',
    "data": many(rf'"\w+_(train|val)_\d{{6}}\.bin": "{HEX}{{64}}"', "{}"),
    "plan": rf'\{{"id": "{HEX}{{16}}", "world": [1248], ("length": [\d.]+, )?"seeds": {SEEDS}, "order": {ORDER}\}}',
    "runs": r"\{\}|" + many(rf'"{KEY}\.jsonl": "{HEX}{{64}}"', "{}"),
    "means": r"\{\}|" + many(r'"[ab]": \{"loss": [\d.]+, "ms": [\d.]+\}', "{}"),
}


def schema_errors(record: Any) -> list[str]:
    """Everything that makes `record` no record, a sentence each."""
    if not isinstance(record, dict):
        return [f"expected an object, found {json.dumps(record)[:60]}"]
    errors = [f"{name}: expected no such field, found one" for name in record if name not in SCHEMA]
    errors += [f"{name}: expected {form}, found {json.dumps(record.get(name, 'nothing'))[:80]}" for name, form in SCHEMA.items()
               if name not in record or not re.fullmatch(form, json.dumps(record[name]))]
    if not errors and ("b" in record["scripts"]) != (record["parent"] is not None):
        errors.append(f"scripts: expected arm b exactly when there is a parent, found parent {record['parent']}")
    return errors


def find(path: Path, home: Path | None = None) -> Path:
    """The folder of a record: `path` itself if it is there, else what has that name in records/, with or without its date."""
    if path.exists():
        return path
    home = home or HOME
    dated = [folder for folder in all_folders(home) if folder.name.partition("_")[2] == path.name]
    return dated[0] if len(dated) == 1 else home / path.name


def load(path: Path) -> Folder:
    """The record in `path`, or of that name in records/, see `find`."""
    path = find(path).resolve()
    try:
        record = json.loads((path / "record.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        fail(f"record {path}", "a folder with record.json", error, "give a folder made by: python records new NAME")
    if errors := schema_errors(record):
        fail(f"{path}/record.json", "the schema of records/README.md", errors[0], "restore the file, or make the record again")
    return Folder(path, record)


def all_folders(home: Path = HOME) -> list[Path]:
    return sorted(path.parent for path in home.glob("*/record.json"))


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


def plan_seeds(script_hash: str, count: int) -> list[int]:
    """Seeds nobody chose: they follow from the script, so they are the same for everyone who retimes it."""
    seeds, draw = [], 0
    while len(seeds) < count:
        seed = int(sha256(f"{script_hash} {draw}")[:12], 16) % 1_000_000
        draw += 1
        if seed not in seeds:
            seeds.append(seed)
    return seeds


def plan_order(seeds: list[int], arms: str) -> list[str]:
    """Arms interleaved as a b, b a, a b ...: a linear drift of the machine cancels in the pairs."""
    return [f"{arm}-s{seed}" for i, seed in enumerate(seeds) for arm in (arms if i % 2 == 0 else arms[::-1])]


def plan_id(record: dict[str, Any]) -> str:
    """Names everything that is fixed before the first run. Each log carries it, so a plan cannot grow after a look at the results."""
    fixed = {key: record[key] for key in ("track", "parent", "kind", "scripts", "data")}
    fixed |= {key: record["plan"][key] for key in ("world", "length", "seeds", "order") if key in record["plan"]}
    return sha256(json.dumps(fixed, sort_keys=True))[:16]


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


def manifest_hash(manifest: dict[str, str], names: list[str]) -> str:
    """What a run logs for these files: the SHA-256 of what sha256sum prints for them."""
    return sha256("".join(f"{manifest[name]}  {name}\n" for name in names))


def query_gpus(query: str) -> list[str]:
    """Lines of an nvidia-smi query about the GPUs that a run would see; empty on a machine without it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={visible}"] if visible else []
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader", *chosen], capture_output=True, text=True, timeout=60)
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
    """`hardware` of the runs that this machine would make with `world` processes: named as train_gpt.py names it in its log."""
    gpus = query_gpus("--query-gpu=name")
    return f"{world} x {gpus[0].strip() if gpus else platform.machine()}"


def finished(home: Path, track: str) -> list[Folder]:
    """The records of a track whose runs are done, in the order in which they were run. What is no record is for `verify` to name."""
    found = []
    for path in all_folders(home):
        try:
            folder = load(path)
        except Failure:
            continue
        if folder.record["track"] == track and folder.record["means"]:
            found.append(folder)
    return sorted(found, key=lambda folder: folder.started)


def rank(folder: Folder) -> tuple[bool, float]:
    """Orders records of one track and class, the best first: those that meet the target by their time, then the others by their loss."""
    mean, target = folder.record["means"]["a"], folder.track.target_loss
    missed = target is not None and mean["loss"] > target
    return missed, mean["loss"] if missed else mean["ms"]


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
    repeated = [folder for folder in finished(home, record["track"]) if folder.record["scripts"] == record["scripts"]]
    if any(folder.started < started and folder.hardware == place for folder in repeated):
        return None
    return best(home, record["track"], place, started)


def choose_parent(home: Path, parent: str | None, kind: str | None, track: str, place: str, now: str) -> str | None:
    """`parent` as the user said it: a folder, "none", or nothing at all, which means the best record of the track on this hardware."""
    if parent == "none" or not parent and kind == "baseline":
        return None
    if parent:
        return find(home / Path(parent).name, home).name
    found = best(home, track, place, now)
    return found.path.name if found else None


def require_parent(home: Path, record: dict[str, Any], place: str, started: str) -> None:
    """Refuse a record, or a plan before anything has run, that lacks a parent and needs one."""
    if needed := missing_parent(home, record, place, started):
        name, track = needed.path.name, record["track"]
        fail("parent", f"a record to beat, since {name} is one of {track} on {place}", "none",
             f"python records new NAME --track {track} --parent {name}")


def require_parent_here(folder: Folder) -> None:
    """The same for a plan that is about to start: it may have been made on other hardware, or before the first record of the track."""
    if not folder.record["runs"]:
        require_parent(folder.path.parent, folder.record, hardware_here(folder.record["plan"]["world"]), utc_now())


def utc_now() -> str:
    """In the form in which logs say when a run started, so that both can be compared."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def least_runs(track: Track, kind: str) -> int:
    """A baseline claims nothing, so it may consist of fewer runs than a claim needs."""
    return 1 if kind == "baseline" else track.least_runs


def new(name: str, track_name: str | None, parent: str | None, kind: str | None, n: int | None, world: int | None, data: Path | None,
        retime: Path | None = None, length: float | None = None, home: Path = HOME) -> Path:
    """Make home/DATE_NAME with script, plan and hashes. `retime` repeats another record's plan. Returns the new folder.

    Every run of both arms gets the trainer's option --length `length`, by default the parent's. A plan does not note 1.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        fail("record name", "small letters, digits, - and .", name, "for example fp8-mlp-backward")
    source = home.parent / SCRIPT
    if retime is not None:
        old = load(retime)
        source, track_name, kind, n = old.path / SCRIPT, old.record["track"], old.record["kind"], len(old.record["plan"]["seeds"])
        parent, length = old.record["parent"] or "none", old.record["plan"].get("length", 1)
    if not track_name:
        named = parent not in (None, "none")
        track_name = load(find(home / Path(parent).name, home)).record["track"] if named else fail("track", f"one of {', '.join(TRACKS)}", "none", "add --track")
    if world is None:
        world = next(w for w in (8, 4, 2, 1) if w <= max(1, len(query_gpus("--query-gpu=name"))))
    place, now = hardware_here(world), utc_now()
    parent = choose_parent(home, parent, kind, track_name, place, now)
    base = load(home / parent).record if parent else None
    if base and base["track"] != track_name:
        fail(f"parent {parent}", f"a record of {track_name}", base["track"], "name another --parent")
    track = TRACKS[track_name]
    kind = kind or ("ml" if parent else "baseline")
    if kind == "baseline" and parent or kind == "systems" and not parent:
        fail(f"parent of kind {kind}", "none" if parent else "a record", parent or "none", "change --parent or --kind")
    if length is None:
        length = base["plan"].get("length", 1) if base else 1
    if not 0.001 <= length <= 100:
        fail("length", "a number from 0.001 to 100", length, "change --length")
    n, least = track.usual_runs if n is None else n, least_runs(track, kind)
    if not least <= n <= 1000:
        fail("runs an arm", f"{least} to 1000 on {track_name}", n, "change --n")
    date = datetime.date.today().isoformat()
    path = home / f"{date}_{name}"
    if path.exists():
        fail(f"record {path.name}", "a new name", "a folder", "choose another NAME or remove it")
    if not source.exists():
        fail("script", str(source), "none", "run this in a checkout of the repository")
    scripts = {"a": sha256(source.read_bytes())} | ({"b": sha256((home / parent / SCRIPT).read_bytes())} if parent else {})
    require_parent(home, {"track": track_name, "parent": parent, "scripts": scripts}, place, now)
    seeds = plan_seeds(scripts["a"], n)
    plan = {"world": world}
    if length != 1:
        plan["length"] = length
    plan |= {"seeds": seeds, "order": plan_order(seeds, "ab" if parent else "a")}
    record = {"schema": 1, "track": track_name, "date": date, "parent": parent, "kind": kind, "scripts": scripts,
              "data": data_manifest(track, data or home.parent / track.data), "plan": plan, "runs": {}, "means": {}}
    record["plan"] = {"id": plan_id(record), **plan}
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
    try:
        shutil.copy2(source, aside / SCRIPT)
        (aside / "README.md").write_text(TEMPLATE.format(title=name.replace("-", " "), parent=parent or "nothing before it"))
        write_record(aside, record)
        aside.chmod(0o755)
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return path
