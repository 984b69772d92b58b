"""`guard BASE`: what a change must leave as it is in the records that BASE has, and that new plans were committed
before their runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from record import HOME
from runlog import fail, read_run

# Of a record that BASE has, only these may still be filled in: the runs and means of an unfinished plan, and why it was
# given up.
OPEN_FIELDS = ("runs", "means", "abandoned")


def git(root: Path, *words: str) -> str:
    """What git prints; a failure is an error of ours."""
    try:
        done = subprocess.run(["git", "-c", "log.showSignature=false", "-C", str(root), *words], capture_output=True,
                              text=True, errors="backslashreplace", env=os.environ | {"TZ": "UTC"})
    except FileNotFoundError:
        fail("git", "it installed", "none", "install git")
    if done.returncode:
        *_, last = "nothing", *done.stderr.strip().splitlines()
        fail(f"git {' '.join(words)}", "a repository with that commit", last, "fetch the base, or name another")
    return done.stdout


def record_of(text: str) -> dict[str, Any] | None:
    """What a record.json says; None where it is no JSON object with runs."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("runs", {}), dict) else None


def record_at(root: Path, commit: str, name: str) -> dict[str, Any] | None:
    """record.json of a commit, None where it is no JSON object."""
    try:
        return record_of(git(root, "show", f"{commit}:./records/{name}/record.json"))
    except ValueError:  # no text
        return None


def record_now(root: Path, name: str) -> dict[str, Any]:
    """record.json of the working tree; empty where there is none, or no JSON object."""
    try:
        return record_of((root / "records" / name / "record.json").read_text()) or {}
    except (OSError, ValueError):
        return {}


def fixed_part(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in OPEN_FIELDS}


def names_at(root: Path, commit: str) -> list[str]:
    """The records that a commit has."""
    files = git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", "records").split("\0")
    return sorted(file.split("/")[1] for file in files if file.count("/") == 2 and file.endswith("/record.json"))


def changed_files(root: Path, base: str, name: str) -> list[tuple[str, str]]:
    """(A, M, D or another letter of git's, file) for the script and the logs, with those that git does not know yet as
    A."""
    places = [f"records/{name}/{part}" for part in ("runs", "unfinished", "train_gpt.py")]
    changed = [row.split("\t") for row in git(root, "diff", "--relative", "--no-renames", "--name-status", base, "--",
                                              *places).splitlines()]
    added = git(root, "ls-files", "--others", "--exclude-per-directory=.gitignore", "--", *places).splitlines()
    return [(letter[0], file) for letter, file in changed] + [("A", file) for file in added]


def rewritten(root: Path, base: str, name: str) -> list[str]:
    """What was changed in a record that the base has."""
    old, new = record_at(root, base, name), record_now(root, name)
    if not new:
        return [f"{name}: expected the record, found it removed or unreadable: abandoned plans stay, see `abandon`"]
    if old is None:
        return []
    finished = bool(old.get("means")) or bool(old.get("abandoned"))
    bad = []
    if fixed_part(old) != fixed_part(new):
        bad.append(f"{name}: expected the plan of the base, found another")

    lost = [key for key, digest in old.get("runs", {}).items() if new.get("runs", {}).get(key) != digest]
    bad += [f"{name}: expected {key} as in the base, found another or none" for key in lost]
    if finished and (old.get("runs"), old.get("means")) != (new.get("runs"), new.get("means")):
        bad.append(f"{name}: expected its runs and means as in the base, found others")
    if old.get("abandoned") and new.get("abandoned") != old["abandoned"]:
        bad.append(f"{name}: expected it abandoned as in the base, found otherwise")
    if old.get("means") and new.get("abandoned") and not old.get("abandoned"):
        bad.append(f"{name}: expected a finished record to stay one, found it abandoned")
    for letter, file in changed_files(root, base, name):
        if letter != "A" or finished:
            bad.append(f"{name}: expected {file} as in the base, found it "
                       f"{'added' if letter == 'A' else 'changed or removed'}")
    if finished:
        return bad
    commit = plan_commit(root, base, name)
    return bad + started_early(root, commit, name) if commit else bad


def plan_commit(root: Path, commits: str, name: str) -> str | None:
    """The commit, of `commits`, in which a record's plan appears first."""
    found = git(root, "log", "--reverse", "--diff-filter=A", "--format=%H", commits, "--",
                f"records/{name}/record.json").split()
    return found[0] if found else None


def started_early(root: Path, commit: str, name: str) -> list[str]:
    """What is wrong if a run began before the plan was committed. Both times are what somebody's machine said; the
    commit's is the author's, which a rebase keeps."""
    made = git(root, "show", "-s", "--date=format-local:%Y-%m-%dT%H:%M:%S", "--format=%ad", commit).strip()
    logs = sorted((root / "records" / name / "runs").glob("*.jsonl"))
    first = min((str(read_run(path).head.get("started", "")) for path in logs), default="")
    if not first or first[:19] >= made:
        return []
    return [f"{name}: expected the plan's commit before its first run, found {made} after {first[:19]} (UTC)"]


def too_late(root: Path, base: str, name: str) -> list[str]:
    """What is wrong with a record that the base lacks: its plan has to be committed before its first run starts, and
    kept."""
    new = record_now(root, name)
    if not new.get("runs"):
        return []
    commit = plan_commit(root, f"{base}..HEAD", name)
    if commit is None:
        return [f"{name}: expected its plan in a commit of its own, found runs and no commit"]
    planned = record_at(root, commit, name) or {}
    files = git(root, "ls-tree", "-r", "--name-only", commit, "--", f"records/{name}/runs",
                f"records/{name}/unfinished").split()
    if planned.get("runs") != {} or files:
        return [f"{name}: expected the plan's commit before its runs, found both in {commit[:12]}"]
    bad = []
    if fixed_part(planned) != fixed_part(new):
        bad.append(f"{name}: expected the plan of {commit[:12]}, found another")
    return bad + started_early(root, commit, name)


def guard(base: str, root: Path = HOME.parent) -> int:
    """Compare the working tree and HEAD with the commit from which they branched off BASE. Returns the exit status."""
    start = git(root, "merge-base", base, "HEAD").strip()
    before = names_at(root, start)
    now = sorted(path.parent.name for path in (root / "records").glob("*/record.json"))
    bad = [text for name in before for text in rewritten(root, start, name)]
    if before and git(root, "diff", "--name-only", start, "--", "records/before-the-rule.sha256"):
        bad.append("before-the-rule.sha256: expected it as in the base, found another: nothing can be added to it")
    new = [name for name in now if name not in before]
    bad += [text for name in new for text in too_late(root, start, name)]
    if bad and git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        # Its first commit seems to add all that it has: plans would seem to come after their runs.
        fail("repository", "its whole history, as commits say when plans were made", "a shallow clone",
             "git fetch --unshallow")
    print("\n".join(bad) or f"{len(before)} records as in {start[:12]}, {len(new)} new ones planned before they ran")
    return int(bool(bad))
