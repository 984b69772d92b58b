"""The tables of verified records, in records/README.md (all) and in README.md (the best of each class of hardware)."""

from __future__ import annotations

import math

from codediff import changes, summary
from record import HOME, SCRIPT, TRACKS, Folder, all_folders, load
from report import gain, hardware, read_block, write_block
from verify import verify


def leaderboard_row(folder: Folder, first_with: dict[str, str], records: str) -> str:
    mean, record = folder.record["means"]["a"], folder.record
    if record["scripts"]["a"] in first_with:
        note = f"retime of {first_with[record['scripts']['a']]}"
    elif folder.parent:
        time = gain(folder)
        note = f"{time.difference / 1e3:+.3f} s ({100 * time.difference / record['means']['b']['ms']:+.2f} %) against {record['parent']}"
    else:
        note = "no parent" + (f"; above the target of {folder.track.target_loss}" if mean["loss"] > (folder.track.target_loss or math.inf) else "")
    name = folder.path.name
    return f"| {record['date']} | [{name.partition('_')[2]}]({records}{name}/) | {mean['ms'] / 1e3:.2f} | {mean['loss']:.4f} | {len(record['plan']['seeds'])} " \
           f"| {hardware(folder.runs('a')[0])} | {record['kind']} | {note} |"


def leaderboard_table(folders: list[Folder], records: str) -> str:
    """A table a track, oldest first; `folders` are records that verify."""
    parts = []
    for name, track in TRACKS.items():
        if track.practice:
            continue
        rows, first_with = [], {}
        for folder in sorted((f for f in folders if f.record["track"] == name), key=lambda f: f.started):
            rows.append(leaderboard_row(folder, first_with, records))
            first_with.setdefault(folder.record["scripts"]["a"], folder.path.name)
        head = "| date | record | time (s) | val loss | n | hardware | kind | gain |\n|---|---|---|---|---|---|---|---|"
        target = f"target {track.target_loss:.4f}" if track.target_loss else "no target yet"
        parts.append(f"**{name}** ({target})\n\n" + ("\n".join([head, *rows]) if rows else "No record yet."))
    return "\n\n".join(parts)


def fastest_of_each_class(folders: list[Folder]) -> list[Folder]:
    """Of each track and hardware the fastest record that meets its target, or if none does the one with the lowest loss."""
    best: dict[tuple[str, str], tuple[tuple[bool, float], Folder]] = {}
    for folder in folders:
        mean, target = folder.record["means"]["a"], folder.track.target_loss
        missed = target is not None and mean["loss"] > target
        rank = (missed, mean["loss"] if missed else mean["ms"])
        place = folder.record["track"], hardware(folder.runs("a")[0])
        if place not in best or rank < best[place][0]:
            best[place] = rank, folder
    return [folder for _, folder in best.values()]


def leaderboard(check: bool) -> int:
    """Rewrite the tables between the markers, or with `check` only say whether they are what the verified records say."""
    folders, broken = [], []
    for path in all_folders():
        (folders if all(c.ok for c in verify(path)) else broken).append(path)
    folders = [load(path) for path in folders]
    stale = []
    # Every record stands in records/README.md, the best of each hardware class in the README; with each, what links start with.
    for path, shown, records in ((HOME / "README.md", folders, ""), (HOME.parent / "README.md", fastest_of_each_class(folders), f"{HOME.name}/")):
        table = leaderboard_table(shown, records)
        if (found := read_block(path, "leaderboard")) is not None and found != table:
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
