"""Fixtures of the trainer's tests, and what all tests need to be quick and to be stopped."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# a shell starts what runs in the background deaf to it, and so would be all that tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
# a cluster's job has left them, and the trainer would wait for ranks that nobody starts
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
# torch would say more than the lines that tests expect
for name in ("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"):
    os.environ.pop(name, None)
# Triton keeps what it compiles in the home folder, which a container's user may lack
if not os.access(os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("TRITON_HOME", os.path.join(tempfile.gettempdir(), f"triton-{os.getuid()}"))
# no pool of Inductor's workers, each of which would import torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    """Three habits of Triton's interpreter take two thirds of its time, and no test needs them.

    For each sum and product of integers it computes whether it overflows, which only its debug mode looks at. At each
    launch, and at each call of a device function within, it looks through all of triton.language for what it has to
    replace; here it does so once for each module with kernels, and leaves that in place. And it fills a table of all
    types whenever it looks one up."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang
    patched = set()

    def patch_once(function):
        module = function.__globals__["__name__"]
        if module not in patched:
            patch(function)
            patched.add(module)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_once
    numpy_type_of = interpreter._get_np_dtype
    numpy_types = {}

    def look_up(kind):
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type_of(kind)
        return numpy_types[name]

    interpreter._get_np_dtype = look_up


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder with three training shards and one for validation, in the vocabulary of helpers.PRESET. Read only."""
    import helpers
    return helpers.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def tiny(monkeypatch):
    """The trainer as tiny as helpers.PRESET, on the CPU, outside torchrun, and nothing may hang."""
    import helpers
    tg = helpers.tg
    monkeypatch.setattr(tg, "BOS", helpers.BOS)
    monkeypatch.setitem(tg.PRESETS, helpers.PRESET.name, helpers.PRESET)
    monkeypatch.setattr(tg.torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    threads = tg.torch.get_num_threads()
    tg.torch.set_num_threads(1)  # these tensors are smaller than what it costs to wake a second thread
    with helpers.time_limit():
        yield helpers.PRESET
    tg.torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def ranked(corpus, tmp_path_factory):
    """helpers.PRESET trained through main() by 1, 2, 4 and 8 processes: the folder that helpers.launch filled."""
    import helpers
    return helpers.launch(corpus, tmp_path_factory.mktemp("ranked"), worlds=(1, 2, 4, 8))


@pytest.fixture(scope="session")
def on_nodes(corpus, tmp_path_factory):
    """The same as 4 processes on each of 2 nodes, 2 on 4, and 1 on 2, started as torchrun would start them there."""
    import helpers
    return helpers.launch(corpus, tmp_path_factory.mktemp("nodes"), worlds=("2x4", "4x2", "2x1"))


@pytest.fixture(scope="session")
def sharing(corpus, tmp_path_factory):
    """The same with ranks that read each other's memory."""
    import helpers
    return helpers.launch(corpus, tmp_path_factory.mktemp("sharing"), worlds=(2, 4, 8), share=True)
