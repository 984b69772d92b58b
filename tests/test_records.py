"""python records: a small repository with a stand-in for the trainer, which writes logs as the real one does, is planned, run and verified;
then every way to tamper with a record must be found."""

import hashlib
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import __main__ as _  # noqa: E402,F401  (pytest's own main; ours is loaded below)
import codediff  # noqa: E402
import record  # noqa: E402
import report  # noqa: E402
import runlog  # noqa: E402
import runner  # noqa: E402
import stats  # noqa: E402
import verify  # noqa: E402
from importlib import util  # noqa: E402

spec = util.spec_from_file_location("records_main", ROOT / "records" / "__main__.py")
main = util.module_from_spec(spec)
spec.loader.exec_module(main)

FAKE = '''"""Stand-in: writes the log of a run whose loss and time follow from the seed."""
# ====================================================================================
# 1. Imports, constants
# ====================================================================================
import argparse, hashlib, json, random, sys, time
from pathlib import Path

LOSS, MS = 5.0, 100.0

# ====================================================================================
# 2. Configuration
# ====================================================================================
STAGES = [{"steps": 40, "batch_tokens": 512}, {"steps": 40, "batch_tokens": 1024}]

# ====================================================================================
# 8. Model
# ====================================================================================
# ====================================================================================
# 9. Data
# ====================================================================================
# ====================================================================================
# 10. Schedule: pure functions
# ====================================================================================
RATE = 1.0

# ====================================================================================
# 14. Main
# ====================================================================================
def sums(paths):
    text = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\\n" for p in paths)
    return hashlib.sha256(text.encode()).hexdigest()

parser = argparse.ArgumentParser()
for name in ("preset", "data", "seed", "log-dir"):
    parser.add_argument("--" + name)
options = parser.parse_args()
chance, chain = random.Random(options.seed + str(LOSS)), ""
folder = Path(options.log_dir)
folder.mkdir(parents=True, exist_ok=True)
file = (folder / f"{options.preset}-w1-s{options.seed}-{chance.randrange(16**6):06x}.jsonl").open("x")

def line(kind, **fields):
    global chain
    text = json.dumps({"kind": kind, **fields})
    chain = hashlib.sha256((chain + text).encode()).hexdigest()[:16]
    file.write(text[:-1] + ', "chain": "' + chain + '"}\\n')
    file.flush()

data = Path(options.data)
train = sorted(data.glob("*_train_*.bin"))
line("head", started="%.9f" % time.time(), preset={"name": options.preset, "val_tokens": 16384, "stages": STAGES}, seed=int(options.seed), world=1,
     script=sums([Path(__file__)]), data=sums([*train, *data.glob("*_val_*.bin")]), shards=[p.name for p in train],
     settings=vars(options), machine="m1", gpus=[], device="fake", torch="2", triton=None, python="3")
ms, step, start = MS * (1 + 0.001 * chance.random()), 0, 1234.5
for stage in STAGES:
    line("stage", step=step, **stage, short_window_tokens=64, long_window_tokens=128, extension=False)
    for step in range(step + 10, step + stage["steps"] + 1, 10):
        line("step", step=step, train_loss=LOSS + 4 * 0.95**step, tokens=512 * step, ms_per_step=round(ms * stage["batch_tokens"] / 1024, 3))
loss = round(LOSS + 0.002 * chance.random(), 6)
total = round(sum(s["steps"] * s["batch_tokens"] for s in STAGES) * ms / 1024, 1)
middle = start + total / 4
if LOSS != LOSS:
    line("end", state="failed: training loss", code=3)
    sys.exit(3)
line("val", step=80, loss=loss, final=True)
line("clock", on=True, reason="training", start_ms=start, end_ms=middle)
line("clock", on=False, reason="validation", start_ms=middle, end_ms=middle + 7.25)
line("clock", on=True, reason="training", start_ms=middle + 7.25, end_ms=start + total + 7.25)
line("end", state="ok", loss=loss, ms=total, peak_memory_mib=None, train_hash="t1", val_hash="v1", recompiled=0)
'''


def shard(tokens):
    return struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + np.array(tokens, dtype="<u2").tobytes()


def plain_command(folder, key, data):
    """The planned command without torchrun, which needs seconds to start."""
    return [sys.executable, *(words := REAL_COMMAND(folder, key, data))[words.index(str(folder.script(key[0]))):]]


REAL_COMMAND = runner.command


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "command", plain_command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(runner, "query_gpus", lambda query: [])
    monkeypatch.setattr(record, "query_gpus", lambda query: [])


def make_repository(path):
    """A root with the stand-in, its data and an empty records/."""
    (path / "records").mkdir(parents=True)
    (path / "train_gpt.py").write_text(FAKE)
    (path / "data/sample").mkdir(parents=True)
    (path / "data/sample/sample_train_000001.bin").write_bytes(shard([50256, 1, 2, 3]))
    (path / "data/sample/sample_val_000000.bin").write_bytes(shard([50256, 4, 5]))
    return path


def make(root, name, **options):
    return record.new(name, **{"track_name": "smoke", "parent": None, "kind": None, "n": 3, "world": None, "data": None, **options}, home=root / "records")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A repository with a baseline and a child that is 2 % faster, both run."""
    patch = pytest.MonkeyPatch()
    quick.__wrapped__(patch) if hasattr(quick, "__wrapped__") else quick.__pytest_wrapped__.obj(patch)
    root = make_repository(tmp_path_factory.mktemp("finished"))
    base = make(root, "base")
    runner.run_plan(base, None)
    (root / "train_gpt.py").write_text(FAKE.replace("MS = 5.0, 100.0", "MS = 5.0, 98.0"))
    child = make(root, "child", parent=base.name)
    runner.run_plan(child, None)
    patch.undo()
    return root, base, child
