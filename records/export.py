"""A run's curve for other programs: a table of comma-separated values, or TensorBoard's events."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

from runlog import Run, fail, read_run

COLUMNS = ("step", "seconds", "tokens", "train_loss", "val_loss", "val_bits_per_byte")


def bits_factor(run: Run) -> float | None:
    """What turns nats a token into bits a byte of text; None if the log does not tell how long the text is."""
    (end,) = run.of("end")[-1:] or [{}]
    size = end.get("val_bytes")
    tokens = run.head.get("preset", {}).get("val_tokens")
    return tokens / size / math.log(2) if size and tokens else None


def curve_rows(run: Run) -> list[dict[str, float]]:
    """A row for every step that the log tells something of, in their order; what it does not tell is missing."""
    rows: dict[int, dict[str, float]] = {}
    for step, seconds, loss in run.train:
        rows[int(step)] = {"step": int(step), "seconds": round(seconds, 4), "train_loss": loss}
    for line in run.of("step"):
        rows[line["step"]]["tokens"] = line["tokens"]

    factor = bits_factor(run)
    for step, seconds, loss in run.vals:
        row = rows.setdefault(int(step), {"step": int(step), "seconds": round(seconds, 4)})
        row["val_loss"] = loss
        if factor:
            row["val_bits_per_byte"] = round(factor * loss, 6)
    return [rows[step] for step in sorted(rows)]


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a log, which may be of a run in progress."""
    run = read_run(path)
    rows = curve_rows(run)
    if not rows:
        fail(f"export {path}", "a log with steps", run.broken or "none", "name a file of logs/ or of a record's runs/")
    return rows


def csv_text(path: Path) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(read(path))
    return text.getvalue()


def write_events(path: Path, folder: Path) -> Path:
    """Write TensorBoard's events of a log into a folder of its name in `folder`."""
    rows = read(path)
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        fail("export --tensorboard", "the packages torch and tensorboard", f"'{error}'",
             "pip install tensorboard, or --csv instead")
    place = folder / path.stem
    with SummaryWriter(place) as writer:
        for row in rows:
            for name in row.keys() - {"step"}:
                writer.add_scalar(name, row[name], row["step"])
    return place
