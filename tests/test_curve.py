"""python records curve: loss at equal time and time at equal loss, from logs whose curves are known."""

import datetime
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import curve
import record
import report
from runlog import Failure

pytestmark = pytest.mark.fast


def write_log(path, rows, kind="val"):
    """A public text log of (step, seconds, loss) rows."""
    total = rows[-1][0]
    path.write_text(
        "".join(
            f"step:{step}/{total} {kind}_loss:{loss} train_time:{1000 * seconds}ms\n"
            for step, seconds, loss in rows
        )
    )
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
    assert len(by_loss) > 5
    assert {float(row.split()[-1]) for row in by_loss[1:]} == {0.5}


def test_nothing_is_said_beyond_a_curve():
    rows = np.array([[10.0, 5.0], [20.0, 4.0]])
    assert np.isnan(curve.loss_after(rows, 9.9))
    assert np.isnan(curve.loss_after(rows, 20.1))
    assert curve.loss_after(rows, 15.0) == 4.5


@pytest.fixture
def trained(tmp_path):
    """A run that followed its training loss, as records do, and was validated at its end: 4.2 after 8 s."""
    path = tmp_path / "trained.txt"
    write_log(path, [(step, step, 5 - step / 10) for step in range(1, 9)], kind="train")
    path.write_text(path.read_text() + "step:8/8 val_loss:4.2 train_time:8000ms\n")
    return str(path)


def numbers(text):
    """The rows of both tables, without their headings."""
    return [[row.split() for row in part.splitlines()[1:]] for part in text.split("\n\n")[1:]]


def test_a_training_loss_leaves_the_final_validation_to_compare(sides, trained):
    """The fast side passes 4.4 after 8 s and 4.2 after 9; the slow one ends at 3.0, never lower."""
    text = curve.table([trained, sides[0]])
    assert numbers(text) == [[["8.0", "4.2000", "4.4000", "-0.2000"]], [["4.2000", "8.0", "9.0", "0.889"]]]
    assert "A  trained (n = 1)\n   validation loss, only at the end, 4.2000 after 8.0 s\n" in text
    assert "B  fast (n = 1)\n   validation loss, from 5.0000 after 5.0 s to 3.0000 after 20.0 s\n" in text
    assert numbers(curve.table([sides[0], trained])) == [
        [["8.0", "4.4000", "4.2000", "+0.2000"]],
        [["4.2000", "9.0", "8.0", "1.125"]],
    ]


def test_trainings_on_other_objectives_leave_their_final_validations():
    """The newest record's softmax has no importance weights, its parent's has."""
    name = "2026-11-28_pointer-keys"
    text = curve.table([f"{name}:a", f"{name}:b"])
    assert text.count("validation loss, only at the end, ") == 2
    assert numbers(text)[1][0] == ["3.0860", "155.3", "never", "-"]
    assert "   training loss (high at first" in curve.table([f"{name}:a", f"{name}:a"])


def test_what_the_other_side_never_reached_is_said(sides, trained):
    path = Path(trained)
    path.write_text(
        path.read_text().replace(
            "step:8/8 val_loss:4.2 train_time:8000ms", "step:8/8 val_loss:2.9 train_time:50000ms"
        )
    )
    assert numbers(curve.table([trained, sides[1]])) == [
        [["50.0", "2.9000", "-", "-"]],
        [["2.9000", "50.0", "never", "-"]],
    ]


@pytest.mark.parametrize(
    "path",
    sorted(
        folder.path.name
        for folder in map(record.load, record.all_folders())
        if folder.record["means"] and not folder.record.get("abandoned")
    ),
)
def test_every_record_on_webtext_compares_with_record_89(path):
    if "webtext" in (ROOT / "records" / path / "record.json").read_text():
        text = curve.table([path, "record-89"])
        assert "validation loss, from 4.9420 after 10.8 s to 3.2200 after 137.5 s" in text
        assert "perhaps not the same" in text
    else:
        corpus = record.load(ROOT / "records" / path).track.corpus
        with pytest.raises(
            Failure,
            match=f"the same validation tokens on every side, found .*corpus {corpus} against webtext; fix: ",
        ):
            curve.table([path, "record-89"])


def test_the_kind_of_loss_is_named():
    """The records of November 23 and 25 have further tokens as targets, the first one had not."""
    after = curve.table(["2026-11-25_short-windows-1gpu", "2026-11-23_sharper-pointer-1gpu"])
    before = curve.table(["2026-11-21_baseline-1gpu", "2026-11-21_baseline-4gpu"])
    assert after.count("training loss (high at first, with the second and third next token as targets), from 12.") == 2
    assert before.count("   training loss, from ") == 2
    assert "validation tokens: the same\n" in after


def test_other_validation_tokens_are_refused():
    with pytest.raises(Failure, match="validation hash 74f9a92a3c857c45 against 46a9a0a4ad58960e"):
        curve.load_curves(["2026-11-25_short-windows-1gpu", "2026-11-25_two-thirds-1gpu"])


def test_the_readme_says_what_its_picture_shows():
    """A run of another day's script than the one in the root, and a public one."""
    (_, (ours,)) = report.load_runs("sprint")
    (_, (theirs,)) = report.load_runs("record-89")
    day = datetime.datetime.fromisoformat(ours.head["started"])
    caption = f"A script of {day:%-d %B} ({ours.loss:.3f} in {ours.ms / 1e3:.0f} s, one run); "
    caption += f"record 89's end, {theirs.ms / 1e3:.0f} s, is computed."
    assert f"](docs/curve.svg)\n{caption}\n" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_command(sides, trained, tmp_path):
    pytest.importorskip("matplotlib")
    for name, first in (("curve.svg", sides[0]), ("curve.png", sides[0]), ("point.svg", trained)):
        done = subprocess.run(
            [sys.executable, "records", "curve", first, sides[1], "--out", str(tmp_path / name)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "time" not in done.stderr
        assert (tmp_path / name).stat().st_size > 5000
    refused = subprocess.run(
        [sys.executable, "records", "curve", *sides, "--out", str(tmp_path / "none" / "x.svg")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert "fix:" in refused.stderr
