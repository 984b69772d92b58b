"""Stop signals to one real process: while it imports, as process 1 of a container, and from a terminal that closes."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading

import pytest

import helpers
from helpers import ROOT, read_log, tg

# What happens at a step of the training before the signal comes.
READY = "it trains"
NAMESPACE = ["unshare", "--pid", "--fork"]  # whose first process is number 1 there


def stop_at_a_step(corpus, logs):
    """Train helpers.PRESET; at its third step say so, and wait for a signal."""
    def say_and_wait(trainer):
        # One write, a line of its own: the thread that shows the progress may print at the same moment.
        print(f"\n{READY} {os.getpid()}\n", end="", flush=True)
        threading.Event().wait(120)

    tg.Trainer.training_step = helpers.step_after(2, say_and_wait)
    tg.BOS = helpers.BOS
    tg.PRESETS["tiny"] = helpers.PRESET
    return tg.main(["--preset", "tiny", "--seed", "1", "--data", corpus, "--log-dir", logs])


def start(command, before=lambda: None, **options):
    """`before` runs in the child before the command, which heeds SIGHUP even if these tests were started by nohup."""
    def prepare():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        before()

    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=prepare, **options)


def training(corpus, tmp_path):
    return [sys.executable, __file__, str(corpus), str(tmp_path / "logs")]


def ended_log(tmp_path):
    """The last line of the only log."""
    (path,) = (tmp_path / "logs").glob("*.jsonl")
    return read_log(path)[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_imports(tmp_path, number):
    """One line and no traceback. The import that takes so long is a numpy of this test."""
    (tmp_path / "numpy.py").write_text(f"import threading\nprint({READY!r}, flush=True)\nthreading.Event().wait(120)\n")
    process = start([sys.executable, str(ROOT / "train_gpt.py")], env={"PYTHONPATH": str(tmp_path)},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == f"{READY}\n"
    process.send_signal(number)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number
    assert said == "train_gpt: interrupted\n"


def may_have_namespaces():
    return shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not may_have_namespaces(), reason="process 1 of a container needs a namespace of its own")
def test_process_1_is_terminated(corpus, tmp_path):
    """Linux gives process 1 no signal that it does not handle: `docker stop` would wait ten seconds, then kill it."""
    process = start([*NAMESPACE, *training(corpus, tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (line := process.stdout.readline()).startswith(READY):
        assert line, process.stderr.read()
    assert line == f"{READY} 1\n"
    (child,) = [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent(name) == process.pid]
    os.kill(child, signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 143
    assert said == "train_gpt: interrupted by SIGTERM\n"
    assert (ended_log(tmp_path)["state"], ended_log(tmp_path)["code"]) == ("interrupted", 143)


def parent(process):
    try:
        return int(tg.process_fields(process)[1])
    except OSError:  # it has ended meanwhile
        return None


def test_the_terminal_is_closed(corpus, tmp_path):
    """Nobody can read the line then, and that is no other failure."""
    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal, inside = pty.openpty()
    process = start(training(corpus, tmp_path), stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
                    before=take_terminal)
    os.close(inside)
    said = b""
    while READY.encode() not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(120) == 129
    assert (ended_log(tmp_path)["state"], ended_log(tmp_path)["code"]) == ("interrupted", 129)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_what_is_ignored_stays_ignored(monkeypatch, number):
    """nohup starts a training deaf to SIGHUP; the other signals get their handlers, and later those before."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with tg.Ending():
            assert signal.getsignal(number) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) == tg.interrupt
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(number, before)


if __name__ == "__main__":
    sys.exit(stop_at_a_step(*sys.argv[1:]))
