"""compile_ahead.py: that the trainer finds in torch's cache what it compiled.
Its kernels, and what it need not do again: tests/test_fp8_machine_code.py."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")
from helpers import INDUCTOR_LACKS, ROOT

inductor = pytest.mark.skipif(bool(INDUCTOR_LACKS), reason=f"inductor needs {INDUCTOR_LACKS}")

# A step and a validation window on tensors with memory, as the trainer has them, but for a CPU and with few tokens:
# a region is compiled once for any number. Triton's kernels do nothing.
TRAINER = """
import json
import sys
from dataclasses import replace
import torch
from torch._dynamo.utils import counters

sys.path.insert(0, sys.argv[1])
import compile_ahead as ahead
import torch._inductor.config
torch._inductor.config.compile_threads = 1

names = set()

def compile_one(function, fullgraph):
    names.add(function.__name__)
    return dynamo_compile(function, fullgraph=fullgraph) if function.__name__ == "final_states" else function

dynamo_compile = torch.compile
torch.compile = compile_one
preset = ahead.tg.PRESETS["smoke-gpu"]
preset = replace(
    preset, model=replace(preset.model, ngram_rows=4096), val_window_tokens=1024,
    stages=[replace(stage, batch_tokens=1024) for stage in preset.stages])
batches = ahead.packed(preset, [0])
views = ahead.tg.HostBatch.views
ahead.tg.HostBatch.views = lambda batch, data: views(batch, data.zero_())
ahead.pretend((9, 0))
ahead.JITFunction.run = lambda *arguments, **options: None
ahead.train_and_validate(preset, batches, torch.device("cpu"))
print(json.dumps([counters["inductor"], counters["aot_autograd"], sorted(names - set.union(*ahead.REGIONS))]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Inductor's cache. What torch asks of the C++ compiler, and each kernel that it compiles, take seconds."""
    return tmp_path_factory.mktemp("cache")


@inductor
@pytest.mark.slow
def test_compiled_regions_are_found_again(tmp_path, cache):
    """With the results of Inductor and of autograd's tracing: forward, backward and without gradients.

    Each process is a script of its own, since torch's keys depend on what was imported first."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    commands = (
        [
            ROOT / "benchmarks/compile_ahead.py", "--preset", "smoke-gpu", "--only",
            "final_states", "--device", "cpu",
        ],
        [trainer, ROOT / "benchmarks"],
    )
    for command in commands:
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
    inductor, autograd, rest = json.loads(run.stdout.splitlines()[-1])
    assert inductor.get("fxgraph_cache_hit") == 3
    assert "fxgraph_cache_miss" not in inductor
    assert autograd.get("autograd_cache_hit") == 2
    assert "autograd_cache_miss" not in autograd
    assert rest == ["<lambda>", "norm"], (
        "of a step's regions only the sum of n-gram rows and norm are left to the trainer"
    )


# Compiles a region whose gates are thin products, which Inductor would pad if they were faster so.
PADDING = """
import sys
import torch
from torch._inductor import metrics
from torch._inductor.fx_passes import pad_mm

sys.path.insert(0, sys.argv[1])
import compile_ahead as ahead

def time_both(*arguments, **options):
    sys.exit("it was to time a padded product")

pad_mm.has_triton = lambda: True
pad_mm._should_pad = time_both
ahead.compile_regions({"final_states"}, ahead.tg.PRESETS["smoke-gpu"], (9, 0), torch.device("cpu"))
print(metrics.generated_kernel_count)
"""


@inductor
@pytest.mark.slow
def test_nothing_is_timed_beside_the_trainer(tmp_path, cache):
    """What Inductor finds faster on a GPU at work is chance, and the trainer would keep it. Here its passes run again
    whatever the cache holds, which spares the C++ compiler alone."""
    script = tmp_path / "padding.py"
    script.write_text(PADDING)
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    run = subprocess.run([sys.executable, script, ROOT / "benchmarks"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0, "something was compiled"


@pytest.mark.parametrize("preset", ["sprint", "speedrun"])
def test_first_micro_batch_is_as_large_as_the_trainers(monkeypatch, preset):
    """Which is all of a step. With half of it steps of the sprint became 5 % slower."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compile_ahead
    preset = compile_ahead.tg.PRESETS[preset]
    batch = compile_ahead.packed(preset, [0])[0]
    assert batch.views(batch.data).tokens.numel() == preset.stages[0].batch_tokens


@pytest.mark.parametrize("visible, first", [(None, "0"), ("2,3", "2"), ("GPU-a1b2", "GPU-a1b2")])
def test_regions_wait_for_the_trainers_model(tmp_path, monkeypatch, visible, first):
    """On the first GPU that is visible, whatever others hold; and where no model appears, not for ever."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compile_ahead
    asked = tmp_path / "asked"
    asked.write_text("")
    script = tmp_path / "nvidia-smi"
    place = shlex.quote(str(asked))
    script.write_text(f'#!/bin/sh\necho "$@" >> {place}\necho $((700 * $(wc -l < {place})))\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(compile_ahead.time, "sleep", lambda seconds: None)
    compile_ahead.await_trainer(seconds=0)
    assert len(asked.read_text().splitlines()) == 1
    compile_ahead.await_trainer()
    assert len(asked.read_text().splitlines()) == 3
    assert all(f"--id={first} " in line for line in asked.read_text().splitlines())


# Starts a process, tells which, and ends as soon as that one has asked for a signal.
PARENT = """
import subprocess
import sys
import time
from pathlib import Path

process = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
    time.sleep(0.01)
print(process.pid)
"""


def test_it_ends_with_the_trainer(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", PARENT, ROOT / "benchmarks/compile_ahead.py"],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    status = Path(f"/proc/{int(run.stdout)}/status")

    def runs():
        try:
            return "zombie" not in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 2  # without the signal it would take longer
    while runs() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs()


def test_cache_is_found_where_torch_has_it(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    import compile_ahead
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for variable in ("USER", "LOGNAME", "USERNAME", "LNAME"):
        monkeypatch.delenv(variable, raising=False)
    for user in (0, 4321):  # the second is of nobody
        monkeypatch.setattr(os, "getuid", lambda: user)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        found = compile_ahead.inductor_cache()
        assert str(found) == cache_dir()
        assert str(found).startswith(f"{tmp_path}/torchinductor_")
        assert str(compile_ahead.inductor_cache()) == os.environ["TORCHINDUCTOR_CACHE_DIR"]
