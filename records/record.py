"""A record folder: its closed schema, its plan, and `new`, which writes both before any run."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from runlog import Failure, Run, fail, read_run, sha256

HOME = Path(__file__).resolve().parent
SCRIPT = "train_gpt.py"
KINDS = ("ml", "systems", "baseline")


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
    "sprint-webtext": Track("sprint", "webtext", "data/webtext", 100_000_000, 2_097_152, 3.22, None, 3, 3),
    "smoke": Track("smoke", "sample", "data/sample", 10_000_000, 16_384, None, None, 1, 2, practice=True),
}


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


def is_hex(length: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{length}}}", value) is not None


def is_map(key: str, value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(re.fullmatch(key, k) and value(v) for k, v in found.items())


def is_list(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, list) and len(found) > 0 and all(map(item, found))


def is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value


SCHEMA: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "": {
        "schema": ("1", lambda v: v == 1),
        "track": (f"one of {', '.join(TRACKS)}", lambda v: v in TRACKS),
        "date": ("a date like 2026-12-03", lambda v: isinstance(v, str) and re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", v) is not None),
        "parent": ("the name of another record, or null", lambda v: v is None or isinstance(v, str) and re.fullmatch(r"[\w.-]+", v) is not None),
        "kind": (f"one of {', '.join(KINDS)}", lambda v: v in KINDS),
        "scripts": ("{arm: sha256}", is_map("[ab]", is_hex(64))),
        "data": ("{shard: sha256}", is_map(r"\w+_(train|val)_\d{6}\.bin", is_hex(64))),
        "plan": ("an object", lambda v: isinstance(v, dict)),
        "runs": ("{file: sha256}", is_map(r"[ab]-s\d+\.jsonl", is_hex(64))),
        "means": ("{arm: {loss, ms}}", is_map("[ab]", lambda v: isinstance(v, dict) and set(v) == {"loss", "ms"} and all(map(is_number, v.values())))),
    },
    "plan": {
        "id": ("16 hex digits", is_hex(16)),
        "world": ("1, 2, 4 or 8", lambda v: v in (1, 2, 4, 8)),
        "seeds": ("a list of seeds", is_list(is_whole)),
        "order": ("a list like a-s1, b-s1", is_list(lambda v: isinstance(v, str))),
    },
}


def schema_errors(record: Any) -> list[str]:
    """Everything that makes `record` no record, a sentence each. Unknown fields are errors: nothing rides along unchecked."""
    errors = []
    for section, fields in SCHEMA.items():
        part = record.get(section) if section and isinstance(record, dict) else record
        if not isinstance(part, dict):
            return [*errors, f"{section or 'record.json'}: expected an object, found {type(part).__name__}"]
        where = f"{section}." if section else ""
        errors += [f"{where}{name}: unknown field" for name in part if name not in fields]
        errors += [f"{where}{name}: missing" for name in fields if name not in part]
        errors += [f"{where}{name}: expected {text}, found {json.dumps(part[name])[:60]}"
                   for name, (text, good) in fields.items() if name in part and not good(part[name])]
    if not errors and ("b" in record["scripts"]) != (record["parent"] is not None):
        errors.append("scripts: expected arm b exactly when there is a parent")
    return errors


def load(path: Path) -> Folder:
    path = path if path.exists() else HOME / path.name
    try:
        record = json.loads((path / "record.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"record {path}", "a folder with record.json", error, "give a folder made by: python records new NAME")
    if errors := schema_errors(record):
        fail(f"{path}/record.json", "the schema of records/README.md", errors[0], "restore the file, or make the record again")
    return Folder(path, record)


def all_folders(home: Path = HOME) -> list[Path]:
    return sorted(path.parent for path in home.glob("*/record.json"))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """record.json, written aside and renamed, so that an interruption leaves the old or the new one."""
    aside = path / ".record.json"
    aside.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(aside, path / "record.json")


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
    fixed |= {key: record["plan"][key] for key in ("world", "seeds", "order")}
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
        fail("data", f"{folder}/{track.corpus}_train_*.bin and _val_*.bin", f"{len(train)} and {len(val)} files", "fetch them (data/README.md) or --data FOLDER")
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
    """Lines of an nvidia-smi query; empty on a machine without it."""
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
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


def newest(home: Path, track: str) -> str | None:
    """The latest record of a track whose runs are done."""
    folders = [load(path) for path in all_folders(home)]
    return max((f.path.name for f in folders if f.record["track"] == track and f.record["means"]), default=None)


def choose_parent(home: Path, parent: str | None, track_name: str | None) -> str | None:
    """`parent` as the user said it: a folder, "none", or nothing at all, which means the newest record of the track."""
    if parent == "none" or not (parent or track_name):
        return None
    return Path(parent).name if parent else newest(home, track_name)


def new(name: str, track_name: str | None, parent: str | None, kind: str | None, n: int | None, world: int | None, data: Path | None,
        retime: Path | None = None, home: Path = HOME) -> Path:
    """Make home/DATE_NAME with script, plan and hashes. `retime` repeats another record's plan. Returns the new folder."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        fail("record name", "small letters, digits, - and .", name, "for example fp8-mlp-backward")
    source = home.parent / SCRIPT
    if retime is not None:
        old = load(retime)
        source, track_name, kind, n = old.path / SCRIPT, old.record["track"], old.record["kind"], len(old.record["plan"]["seeds"])
        parent = old.record["parent"] or "none"
    parent = choose_parent(home, parent, track_name)
    base = load(home / parent).record if parent else None
    track_name = track_name or (base["track"] if base else fail("track", f"one of {', '.join(TRACKS)}", "none", "add --track"))
    if base and base["track"] != track_name:
        fail(f"parent {parent}", f"a record of {track_name}", base["track"], "name another --parent, or none")
    track = TRACKS[track_name]
    n = n or track.usual_runs
    if n < track.least_runs:
        fail("runs an arm", f"at least {track.least_runs} on {track_name}", n, "raise --n")
    if world is None:
        world = next(w for w in (8, 4, 2, 1) if w <= max(1, len(query_gpus("--query-gpu=name"))))
    date = datetime.date.today().isoformat()
    path = home / f"{date}_{name}"
    if path.exists():
        fail(f"record {path.name}", "a new name", "a folder", "choose another NAME or remove it")
    if not source.exists():
        fail("script", str(source), "none", "run this in a checkout of the repository")
    scripts = {"a": sha256(source.read_bytes())} | ({"b": sha256((home / parent / SCRIPT).read_bytes())} if parent else {})
    seeds = plan_seeds(scripts["a"], n)
    record = {"schema": 1, "track": track_name, "date": date, "parent": parent, "kind": kind or ("ml" if parent else "baseline"), "scripts": scripts,
              "data": data_manifest(track, data or home.parent / track.data),
              "plan": {"world": world, "seeds": seeds, "order": plan_order(seeds, "ab" if parent else "a")}, "runs": {}, "means": {}}
    record["plan"] = {"id": plan_id(record), **record["plan"]}
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
