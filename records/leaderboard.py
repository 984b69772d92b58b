"""The tables of verified records, in records/README.md (all) and in README.md (the best of each class of hardware)."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import stats
from codediff import changes, summary
from record import HOME, SCRIPT, TRACKS, Folder, all_folders, load, rank
from report import gain, read_block, write_block
from rule import equal_loss, losses, reached, rule_tables
from tracks import EARLIER, RULE_SINCE
from verify import verify

COLUMNS = ("date", "record", "time (s)", "val loss", "sd", "n", "margin", "gain", "dense", "sparse", "script",
           "hardware", "kind")
SHORT = ("record", "time (s)", "val loss", "n", "margin", "gain", "script", "hardware", "rule")  # of the README
# Numbers of parameters by script, for the logs that do not tell: built once by each script itself, on torch's device
# `meta`.
COUNTED = HOME / "parameters.csv"


@functools.cache
def counted_parameters() -> dict[str, dict[str, int]]:
    with COUNTED.open() as file:
        return {row["script"]: {"dense": int(row["dense"]), "sparse": int(row["sparse"])}
                for row in csv.DictReader(file)}


def parameters(folder: Folder) -> dict[str, int]:
    """How many dense and sparse ones the record's model has; empty where nobody has counted them."""
    return folder.runs("a")[0].head.get("parameters") or counted_parameters().get(folder.record["scripts"]["a"], {})


def size_text(count: int | None) -> str:
    """A number of parameters with three digits; empty for None."""
    if count is None:
        return ""
    unit, letter = next((pair for pair in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= pair[0]), (1, ""))
    return f"{count / unit:.3g} {letter}".strip()


def gain_text(folder: Folder) -> str:
    """Time against the parent's in percent, negative if faster, with its 99 % interval; since the rule at the parent's
    loss too."""
    if folder.parent is None:
        return ""
    time, base = gain(folder), folder.record["means"]["b"]["ms"]
    middle, low, high = (f"{100 * ms / base:+.2f}" for ms in (time.difference, time.low, time.high))
    text = f"{middle} % ({low} to {high})"
    if folder.under_rule:
        text += f", at equal loss {100 * equal_loss(folder, time).ms / base:+.2f} %"
    return f"{text} against {folder.record['parent']}"


def margin_text(folder: Folder) -> str:
    """How far the mean lies below the target, in standard errors by the track's sd; with p where p decided.

    Empty without a target.
    """
    values, target, track = losses(folder), folder.target, folder.track
    if target is None:
        return ""
    text = f"{stats.z_below(values, target, track.loss_sd):+.1f} se"
    decided = folder.under_rule and folder.record["kind"] != "baseline"
    return f"{text}, p = {reached(folder).p:.2g}" if decided else text


def missed_text(folder: Folder) -> str:
    """A remark where the record does not meet its target, as a baseline need not."""
    missed, *_ = rank(folder)
    return "above the target" if missed else ""


def rule_text(folder: Folder) -> str:
    return "" if folder.under_rule else f"before the rule of {RULE_SINCE}"


def kind_text(folder: Folder, repeated: str | None) -> str:
    remarks = folder.record["kind"], f"retime of {repeated}" if repeated else "", missed_text(folder), rule_text(folder)
    return ", ".join(filter(None, remarks))


def leaderboard_row(folder: Folder, repeated: str | None, records: str, columns: tuple[str, ...]) -> str:
    """`repeated` names the record whose script this one ran again; `records` is what links start with."""
    record, name = folder.record, folder.path.name
    values, sizes = losses(folder), parameters(folder)
    cells = {
        "date": record["date"],
        "record": f"[{name.partition('_')[2]}]({records}{name}/)",
        "time (s)": f"{record['means']['a']['ms'] / 1e3:.2f}",
        "val loss": f"{record['means']['a']['loss']:.4f}",
        "sd": f"{stats.sd(values):.4f}" if len(values) > 1 else "",
        "n": str(len(values)),
        "margin": margin_text(folder),
        "gain": gain_text(folder),
        "dense": size_text(sizes.get("dense")),
        "sparse": size_text(sizes.get("sparse")),
        "script": f"`{record['scripts']['a'][:8]}`",
        "hardware": folder.hardware,
        "kind": kind_text(folder, repeated),
        "rule": rule_text(folder) or f"rule of {RULE_SINCE}",
    }
    return f"| {' | '.join(cells[column] for column in columns)} |"


def target_text(name: str) -> str:
    """A track's target, and that of the records before the rule where it was another."""
    track, earlier = TRACKS[name], EARLIER.get(name)
    if track.target_loss is None:
        return "no target yet"
    text = f"target {track.target_loss:.4f}"
    if earlier and earlier.target_loss != track.target_loss:
        text += f"; {earlier.target_loss:.4f} before {RULE_SINCE}"
    return text


def abandoned_line(folder: Folder) -> str:
    """A plan that was given up, with what its runs said."""
    found, name = losses(folder), folder.path.name
    values = list(filter(math.isfinite, found))
    said = f", {len(found) - len(values)} diverged" if len(values) < len(found) else ""
    said += f", mean loss {stats.mean(values):.4f}" if values else ""
    return f"- {name}, {len(found)} of {len(folder.record['plan']['seeds'])} runs{said}: {folder.record['abandoned']}"


def leaderboard_table(folders: list[Folder], records: str, columns: tuple[str, ...]) -> str:
    """A table a track, oldest first, and the tracks that have none in a line; `folders` are records that verify."""
    parts, empty = [], []
    for name, track in TRACKS.items():
        rows, first_with, abandoned = [], {}, []
        for folder in sorted((f for f in folders if f.record["track"] == name), key=lambda f: f.started):
            if folder.record.get("abandoned"):
                abandoned.append(abandoned_line(folder))
                continue
            script = folder.record["scripts"]["a"]
            rows.append(leaderboard_row(folder, first_with.get(script), records, columns))
            first_with.setdefault(script, folder.path.name)
        if rows and not track.practice:
            head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
            parts.append("\n".join([f"**{name}** ({target_text(name)})\n", head, *rows]))
        elif not track.practice:
            empty.append(name)
        if abandoned and not track.practice:
            parts.append("\n".join([f"Abandoned plans of {name}:\n", *abandoned]))
    none = "No record yet" if columns == COLUMNS else "No leader yet"
    return "\n\n".join(parts + ([f"{none}: {', '.join(empty)}."] if empty else []))


def proven(folder: Folder) -> bool:
    """Whether a record met its target by the rule of its day; a baseline under the rule only if it passes the test."""
    if folder.record.get("abandoned") or rank(folder)[0]:  # a plan that was given up may have no means
        return False
    untested = folder.under_rule and folder.record["kind"] == "baseline" and folder.target is not None
    return not untested or reached(folder).ok


def best_of_each_class(folders: list[Folder]) -> list[Folder]:
    """Of each track and hardware the fastest record that meets its target; none where none does."""
    found: dict[tuple[str, str], Folder] = {}
    for folder in folders:
        if not proven(folder):
            continue
        place = folder.record["track"], folder.hardware
        if place not in found or rank(folder) < rank(found[place]):
            found[place] = folder
    return list(found.values())


def tables_of(folders: list[Folder]) -> list[tuple[Path, str, str]]:
    """(file, block, text): every record in records/README.md with what the rule says of the older ones, the best in the
    README."""
    whole = leaderboard_table(folders, "", COLUMNS)
    short = leaderboard_table(best_of_each_class(folders), f"{HOME.name}/", SHORT)
    older = rule_tables([folder for folder in folders if not folder.under_rule])
    return [(HOME / "README.md", "leaderboard", whole), (HOME / "README.md", "rule", older),
            (HOME.parent / "README.md", "leaderboard", short)]


def leaderboard(check: bool) -> int:
    """Rewrite the tables between the markers, or with `check` only say whether they are what the verified records say.
    """
    folders, broken = [], []
    for path in all_folders():
        (folders if all(c.ok for c in verify(path)) else broken).append(path)
    folders = [load(path) for path in folders]
    stale = []
    for path, block, text in tables_of(folders):
        found = read_block(path, block)
        if not path.exists() or (block == "rule" and found is None) or found == text:
            continue
        stale.append(f"{path.name}, {block}")
        if not check:
            write_block(path, block, text)
    for path in broken:
        print(f"{path.name} does not verify, so it is not listed")
    print("\n".join(f"{place}: {'stale' if check else 'rewritten'}" for place in stale) or "tables are up to date")
    ranked = [folder for folder in folders if not folder.track.practice and not folder.record.get("abandoned")]
    if ranked and (HOME.parent / SCRIPT).exists():
        newest = max(ranked, key=lambda folder: folder.started)
        found = changes((HOME.parent / SCRIPT).read_text(), newest.script("a").read_text())
        print(f"distance of {SCRIPT} from "
              f"{newest.path.name}:\n{summary(found)}")
    return int(check and bool(stale))
