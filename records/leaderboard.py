"""The tables of verified records, in records/README.md (all) and in README.md (the best of each class of hardware)."""

from __future__ import annotations

import csv
import functools

import stats
from codediff import changes, summary
from record import HOME, SCRIPT, TRACKS, Folder, all_folders, load, rank
from report import gain, read_block, write_block
from verify import verify

COLUMNS = ("date", "record", "time (s)", "val loss", "sd", "n", "p", "gain", "dense", "sparse", "script", "hardware", "kind")
SHORT = ("record", "time (s)", "val loss", "sd", "n", "p", "gain", "dense", "sparse", "script", "hardware")  # of the README
# Numbers of parameters by script, for the logs that do not tell: built once by each script itself, on torch's device `meta`.
COUNTED = HOME / "parameters.csv"


@functools.cache
def counted_parameters() -> dict[str, dict[str, int]]:
    with COUNTED.open() as file:
        return {row["script"]: {"dense": int(row["dense"]), "sparse": int(row["sparse"])} for row in csv.DictReader(file)}


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
    """Time against the parent's, negative if faster, in seconds and percent with 99 % intervals; empty without a parent."""
    if folder.parent is None:
        return ""
    time, base = gain(folder), folder.record["means"]["b"]["ms"]

    def interval(per_ms: float, digits: int, unit: str) -> str:
        middle, low, high = (f"{per_ms * ms:+.{digits}f}" for ms in (time.difference, time.low, time.high))
        return f"{middle} {unit} ({low} to {high})"

    return f"{interval(1e-3, 3, 's')}, {interval(100 / base, 2, '%')} against {folder.record['parent']}"


def missed_text(folder: Folder) -> str:
    """A remark where the record does not meet its track's target, as a baseline need not."""
    missed, _ = rank(folder)
    return "above the target" if missed else ""


def kind_text(folder: Folder, repeated: str | None) -> str:
    remarks = folder.record["kind"], f"retime of {repeated}" if repeated else "", missed_text(folder)
    return ", ".join(filter(None, remarks))


def leaderboard_row(folder: Folder, repeated: str | None, records: str, columns: tuple[str, ...]) -> str:
    """`repeated` names the record whose script this one ran again; `records` is what links start with."""
    record, name, target = folder.record, folder.path.name, folder.track.target_loss
    losses = [run.loss for run in folder.runs("a")]
    sizes, several = parameters(folder), len(losses) > 1
    cells = {
        "date": record["date"],
        "record": f"[{name.partition('_')[2]}]({records}{name}/)",
        "time (s)": f"{record['means']['a']['ms'] / 1e3:.2f}",
        "val loss": f"{record['means']['a']['loss']:.4f}",
        "sd": f"{stats.sd(losses):.4f}" if several else "",
        "n": str(len(losses)),
        "p": f"{stats.p_below(losses, target):.2g}" if several and target is not None else "",
        # The README has no column of kinds, and what misses its target has no gain to claim.
        "gain": gain_text(folder) or (missed_text(folder) if "kind" not in columns else ""),
        "dense": size_text(sizes.get("dense")),
        "sparse": size_text(sizes.get("sparse")),
        "script": f"`{record['scripts']['a'][:8]}`",
        "hardware": folder.hardware,
        "kind": kind_text(folder, repeated),
    }
    return f"| {' | '.join(cells[column] for column in columns)} |"


def leaderboard_table(folders: list[Folder], records: str, columns: tuple[str, ...]) -> str:
    """A table a track, oldest first, and the tracks that have none in a line; `folders` are records that verify."""
    parts, empty = [], []
    for name, track in TRACKS.items():
        rows, first_with = [], {}
        for folder in sorted((f for f in folders if f.record["track"] == name), key=lambda f: f.started):
            script = folder.record["scripts"]["a"]
            rows.append(leaderboard_row(folder, first_with.get(script), records, columns))
            first_with.setdefault(script, folder.path.name)
        if rows and not track.practice:
            target = f"target {track.target_loss:.4f}" if track.target_loss else "no target yet"
            head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
            parts.append("\n".join([f"**{name}** ({target})\n", head, *rows]))
        elif not track.practice:
            empty.append(name)
    return "\n\n".join(parts + ([f"No record yet: {', '.join(empty)}."] if empty else []))


def best_of_each_class(folders: list[Folder]) -> list[Folder]:
    """Of each track and hardware the fastest record that meets its target, or if none does the one with the lowest loss."""
    found: dict[tuple[str, str], Folder] = {}
    for folder in folders:
        place = folder.record["track"], folder.hardware
        if place not in found or rank(folder) < rank(found[place]):
            found[place] = folder
    return list(found.values())


def leaderboard(check: bool) -> int:
    """Rewrite the tables between the markers, or with `check` only say whether they are what the verified records say."""
    folders, broken = [], []
    for path in all_folders():
        (folders if all(c.ok for c in verify(path)) else broken).append(path)
    folders = [load(path) for path in folders]
    stale = []
    # Every record stands in records/README.md, the best of each hardware class in the README.
    tables = {
        HOME / "README.md": leaderboard_table(folders, "", COLUMNS),
        HOME.parent / "README.md": leaderboard_table(best_of_each_class(folders), f"{HOME.name}/", SHORT),
    }
    for path, table in tables.items():
        if not path.exists():
            continue
        if read_block(path, "leaderboard") != table:
            stale.append(path)
            if not check:
                write_block(path, "leaderboard", table)
    for path in broken:
        print(f"{path.name} does not verify, so it is not listed")
    print("\n".join(f"{path.name}: {'stale' if check else 'rewritten'}" for path in stale) or "tables are up to date")
    ranked = [folder for folder in folders if not folder.track.practice]
    if ranked and (HOME.parent / SCRIPT).exists():
        newest = max(ranked, key=lambda folder: folder.started)
        print(f"distance of {SCRIPT} from {newest.path.name}:\n{summary(changes((HOME.parent / SCRIPT).read_text(), newest.script('a').read_text()))}")
    return int(check and bool(stale))
