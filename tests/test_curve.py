"""python records curve: loss at equal time and time at equal loss, from logs whose curves are known."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import curve  # noqa: E402
from runlog import Failure  # noqa: E402

pytestmark = pytest.mark.fast


def write_log(path, rows, kind="val"):
    """A public text log of (step, seconds, loss) rows."""
    total = rows[-1][0]
    path.write_text("".join(f"step:{step}/{total} {kind}_loss:{loss} train_time:{1000 * seconds}ms\n" for step, seconds, loss in rows))
    return str(path)


@pytest.fixture
def sides(tmp_path):
    slow = write_log(tmp_path / "slow.txt", [(1, 10, 5.0), (2, 20, 4.0), (3, 40, 3.0)])
    fast = write_log(tmp_path / "fast.txt", [(1, 5, 5.0), (2, 10, 4.0), (3, 20, 3.0)])
    return fast, slow


def test_one_side_twice_as_fast(sides):
    text = curve.table(list(sides))
    by_time, by_loss = (part.splitlines() for part in text.split("\n\n")[1:])
    seconds, fast, slow, difference = map(float, by_time[-1].split())
    assert (seconds, fast, slow, difference) == (20.0, 3.0, 4.0, -1.0)
    assert len(by_loss) > 5 and {float(row.split()[-1]) for row in by_loss[1:]} == {0.5}


def test_nothing_is_said_beyond_a_curve():
    rows = np.array([[10.0, 5.0], [20.0, 4.0]])
    assert np.isnan(curve.loss_after(rows, 9.9)) and np.isnan(curve.loss_after(rows, 20.1))
    assert curve.loss_after(rows, 15.0) == 4.5


def test_training_and_validation_losses_are_not_compared(sides, tmp_path):
    other = tmp_path / "other.txt"
    write_log(other, [(step, step, 5 - step / 10) for step in range(1, 9)], kind="train")
    other.write_text(other.read_text() + "step:8/8 val_loss:4.2 train_time:8000ms\n")
    with pytest.raises(Failure, match="on every side"):
        curve.table([sides[0], str(other)])


@pytest.mark.slow
def test_command(sides, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("curve.svg", "curve.png"):
        done = subprocess.run([sys.executable, "records", "curve", *sides, "--out", str(tmp_path / name)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "time" not in done.stderr and (tmp_path / name).stat().st_size > 5000
    refused = subprocess.run([sys.executable, "records", "curve", *sides, "--out", str(tmp_path / "none" / "x.svg")], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "fix:" in refused.stderr
