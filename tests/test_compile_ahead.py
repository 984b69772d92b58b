"""compile_ahead.py: that the trainer finds in torch's cache what it compiled. Its kernels: tests/test_fp8_machine_code.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from helpers import ROOT

# A step and a validation window on tensors with memory, as the trainer has them, but for a CPU and with few tokens:
# a region is compiled once for any number. Triton's kernels do nothing.
TRAINER = """
import json
import sys
from dataclasses import replace
import torch
from torch._dynamo.utils import counters

sys.path.append(sys.argv[1])
import compile_ahead as ahead
import torch._inductor.config
torch._inductor.config.compile_threads = 1

def compile_one(function, fullgraph):
    return dynamo_compile(function, fullgraph=fullgraph) if function.__name__ == "final_states" else function

dynamo_compile = torch.compile
torch.compile = compile_one
preset = ahead.tg.PRESETS["smoke-gpu"]
preset = replace(
    preset, model=replace(preset.model, ngram_rows=4096), val_window_tokens=4096,
    stages=[replace(stage, batch_tokens=8192) for stage in preset.stages])
batches = ahead.packed(preset, [0])
views = ahead.tg.HostBatch.views
ahead.tg.HostBatch.views = lambda batch, data: views(batch, data.zero_())
ahead.pretend((9, 0))
ahead.JITFunction.run = lambda *arguments, **options: None
ahead.train_and_validate(preset, batches, torch.device("cpu"))
print(json.dumps([counters["inductor"], counters["aot_autograd"]]))
"""


@pytest.mark.slow
def test_compiled_regions_are_found_again(tmp_path):
    """With the results of Inductor and of autograd's tracing: forward, backward and without gradients.

    Each process is a script of its own, since torch's keys depend on what was imported first."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    commands = ([ROOT / "benchmarks/compile_ahead.py", "--preset", "smoke-gpu", "--only", "final_states", "--device", "cpu"],
                [trainer, ROOT / "benchmarks"])
    for command in commands:
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
    inductor, autograd = json.loads(run.stdout.splitlines()[-1])
    assert inductor.get("fxgraph_cache_hit") == 3 and "fxgraph_cache_miss" not in inductor
    assert autograd.get("autograd_cache_hit") == 2 and "autograd_cache_miss" not in autograd
