"""Two scripts compared by section: a banner is a comment rule (# ==== or # ----) followed by a title."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from runlog import RULE, fail

RULE_LINE = re.compile(r"^#\s?[=-]{20,}\s*$")
BANNER = re.compile(r"^# =+ (.*\w.*?) =+$")
TITLE = re.compile(r"^#\s?(?:\d+\.\s*)?([^:,.(]*\w)")


def docstring_lines(source: str) -> set[int]:
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def bare_lines(source: str) -> list[str]:
    """The lines of `source` without comments and docstrings; as many lines as before, the emptied ones blank."""
    lines = source.splitlines()
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        for number in docstring_lines(source):
            lines[number - 1] = ""
    except (SyntaxError, tokenize.TokenError) as error:
        fail("code", "Python that parses", error, "diff without --code")
    return [line.rstrip() for line in lines]


def sections(source: str, code_only: bool = False) -> dict[str, list[str]]:
    """{title: lines} in the order of the script; what stands before the first banner is "top". A banner is a title in a rule, or below one."""
    rows, kept = source.splitlines(), bare_lines(source) if code_only else source.splitlines()
    found, title, closing = {"top": []}, "top", -1
    for number, row in enumerate(rows):
        following = rows[number + 1] if number + 1 < len(rows) else ""
        ruled = number != closing and RULE_LINE.match(row) and not RULE_LINE.match(following)
        if match := TITLE.match(f"# {line[1]}" if (line := BANNER.match(row)) else following if ruled else ""):
            title, closing = match[1].strip(), number + 2 * bool(ruled)  # a comment right after the second rule is no title
            found.setdefault(title, [])
        if kept[number] or not code_only:
            found[title].append(kept[number])
    return found


class Change(NamedTuple):
    title: str
    added: int
    removed: int
    lines: list[str]  # unified diff


def changes(a: str, b: str, code_only: bool = False) -> list[Change]:
    """What leads from b to a, a section each, in the order of a; sections that only b has come last."""
    new, old = sections(a, code_only), sections(b, code_only)
    result = []
    for title in [*new, *(t for t in old if t not in new)]:
        lines = list(difflib.unified_diff(old.get(title, []), new.get(title, []), f"B: {title}", f"A: {title}", lineterm=""))
        body = lines[2:]
        result.append(Change(title, sum(x.startswith("+") for x in body), sum(x.startswith("-") for x in body), lines))
    return result


def summary(found: list[Change]) -> str:
    changed = [c for c in found if c.lines]
    rows = [*((c.added, c.removed, c.title) for c in changed),
            (sum(c.added for c in changed), sum(c.removed for c in changed), f"in {len(changed)} of {len(found)} sections")]
    return "\n".join(f"{f'+{added}':>6} {f'-{removed}':>6}  {title}" for added, removed, title in rows)


def read_script(path: Path) -> str:
    """The code behind a path: a script, a record folder, a public text log or a folder of those."""
    if path.is_dir():
        logs = [path / "train_gpt.py", *sorted(path.rglob("*.txt"))]
        path = next((file for file in logs if file.is_file()), path / "train_gpt.py")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        fail(f"script {path}", "a record folder, a .py or a public .txt log", error, "check the path")
    if path.suffix == ".jsonl":
        fail(f"script in {path}", "a file with code", "a run log, which holds only its hash", "name the record folder")
    return text.partition(f"\n{RULE}\n")[0] if path.suffix == ".txt" else text
