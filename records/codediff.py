"""Two scripts compared by section: a banner is a comment rule (# ==== or # ----) followed by a title."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

from record import find
from runlog import RULE, fail

RULE_LINE = re.compile(r"^#\s?[=-]{20,}\s*$")
BANNER = re.compile(r"^# =+ (.*\w.*?) =+$")
TITLE = re.compile(r"^#\s?(?:\d+\.\s*)?([^:,.(]*\w)")


def docstring_lines(source: str) -> set[int]:
    lines, documented = set(), (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
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


def section_starts(source: str) -> dict[int, str]:
    """{index of a banner's line: title}. A banner is a title in a rule, or below one; its number is no part of it."""
    rows, found, closing = source.splitlines(), {}, -1
    for number, row in enumerate(rows):
        following = rows[number + 1] if number + 1 < len(rows) else ""
        ruled = number != closing and RULE_LINE.match(row) and not RULE_LINE.match(following)
        line = BANNER.match(row)
        if match := TITLE.match(f"# {line[1]}" if line else following if ruled else ""):
            found[number] = match[1].strip()
            closing = number + 2 * bool(ruled)  # a comment right after the second rule is no title
    return found


def sections(source: str, code_only: bool = False) -> dict[str, list[str]]:
    """{title: lines} in the order of the script; what stands before the first banner is "top"."""
    kept = bare_lines(source) if code_only else source.splitlines()
    starts, title = section_starts(source), "top"
    found: dict[str, list[str]] = {title: []}
    for number, row in enumerate(kept):
        title = starts.get(number, title)
        found.setdefault(title, [])
        if row or not code_only:
            found[title].append(row)
    return found


def count_tokens(lines: list[str]) -> int:
    """Tokens of Python without comments, docstrings and line breaks.

    A section may end within no statement, so it parses alone.
    """
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    source = "\n".join(lines) + "\n"
    try:
        ignored = docstring_lines(source)
        found = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return 0
    return sum(token.type not in layout and token.start[0] not in ignored for token in found)


def title_words(title: str) -> set[str]:
    """The words that say what a section holds, without those that say nothing and without a plural's s."""
    words = re.findall(r"[a-z0-9]+", title.lower())
    saying_nothing = {"", "a", "and", "for", "in", "it", "of", "the", "their", "to", "with"}
    return {word.removesuffix("s") for word in words} - saying_nothing


def paired_titles(new: list[str], old: list[str]) -> dict[str, str]:
    """Which old section each new one continues: that of the same title, else the one that shares most of its words.

    Numbers say nothing.
    """
    pairs = {title: title for title in new if title in old}
    shared = sorted(((len(title_words(a) & title_words(b)), -new.index(a), a, b)
                     for a in new for b in old if a not in pairs and b not in pairs), reverse=True)
    for count, _, a, b in shared:
        if count and a not in pairs and b not in pairs.values():
            pairs[a] = b
    return pairs


# Sections that a systems record leaves as they are, by a word of their titles.
TRAINING_WORDS = {"configuration", "model", "data", "schedule"}


class BareTree(ast.NodeTransformer):
    """Removes what changes no number: docstrings and annotations.

    A field of a class keeps its place, as it needs its annotation.
    """

    def bare_body(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        fields = {id(part) for part in node.body if isinstance(part, ast.AnnAssign)}
        for part in node.body:
            if id(part) in fields:
                part.annotation = ast.Name("field", ast.Load())
                part.in_class = True
        return self.bare_body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.bare_body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if getattr(node, "in_class", False):
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else None


def constexpr_arguments(node: ast.AST) -> list[str]:
    """The one kind of annotation that changes what is compiled: a kernel's compile-time arguments."""
    return [part.arg for part in ast.walk(node) if isinstance(part, ast.arg) and part.annotation
            and "constexpr" in ast.unparse(part.annotation)]


def statement_names(node: ast.stmt) -> list[str]:
    """What a statement of the outermost level defines; its text where it defines nothing."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = getattr(node, "targets", [])
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    if not targets:  # an if, a loop or an import: whatever it binds
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        names += [part.name for part in ast.walk(node) if isinstance(part, (ast.FunctionDef, ast.ClassDef))]
        names += [part.asname or part.name for part in ast.walk(node) if isinstance(part, ast.alias)]
    return names or [ast.unparse(node)]


def definitions(source: str) -> dict[str, tuple[str, str]]:
    """{name: (title of its section, syntax tree without annotations, comments and docstrings)} of all that a script
    defines."""
    titles, title = [], "top"
    starts = section_starts(source)
    for number in range(len(source.splitlines())):
        title = starts.get(number, title)
        titles.append(title)

    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(source).body:
        place, compiled = titles[node.lineno - 1], constexpr_arguments(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring, or a comment as a text
        names, bare = statement_names(node), BareTree().visit(node)
        tree = ast.dump(bare) if bare is not None else ""
        for name in names:
            earlier = found.get(name, ("", ""))[1]  # what is defined twice, as by an if, counts with both
            found[name] = place, f"{earlier}{compiled or ''}{tree}"
    return found


def training_changes(new: str, old: str) -> list[str]:
    """What of configuration, data, model and schedule differs between two scripts, by name.

    A definition counts that either script has in such a section, wherever the other has it: moving it is no change.
    """
    a, b = definitions(new), definitions(old)
    watched = [name for found in (b, a) for name, (title, _) in found.items() if title_words(title) & TRAINING_WORDS]
    missing = ("", "")
    changed = [name for name in dict.fromkeys(watched) if a.get(name, missing)[1] != b.get(name, missing)[1]]
    titles = set().union(*map(title_words, section_starts(old).values()))
    lacking = [f"a section of {word}, which the parent lacks"
               for word in sorted({"configuration", "model", "data"} - titles)]
    return [*lacking, *changed]


class Change(NamedTuple):
    title: str
    added: int
    removed: int
    lines: list[str]  # unified diff
    tokens: int = 0  # of the newer script's section
    more_tokens: int = 0  # than the older one's has


def changes(a: str, b: str, code_only: bool = False) -> list[Change]:
    """What leads from b to a, a section each, in the order of a; sections that only b has come last."""
    new, old = sections(a, code_only), sections(b, code_only)
    pairs = paired_titles(list(new), list(old))
    result = []
    for title in [*new, *(t for t in old if t not in pairs.values())]:
        before = old.get(pairs.get(title, title), [])
        after = new.get(title, [])
        lines = list(difflib.unified_diff(before, after, f"B: {pairs.get(title, title)}", f"A: {title}", lineterm=""))
        body = lines[2:]
        tokens = count_tokens(after)
        result.append(Change(title, sum(x.startswith("+") for x in body), sum(x.startswith("-") for x in body), lines,
                             tokens, tokens - count_tokens(before)))
    return result


def summary(found: list[Change]) -> str:
    """Lines and tokens of each section that changed, and of all."""
    changed = [c for c in found if c.lines]
    rows = [(c.added, c.removed, c.tokens, c.more_tokens, c.title) for c in changed]
    rows.append((*(sum(c[column] for c in changed) for column in (1, 2)), sum(c.tokens for c in found),
                 sum(c.more_tokens for c in found), f"in {len(changed)} of {len(found)} sections"))
    head = f"{'lines':>6} {'':>6} {'tokens':>7} {'':>6}"
    return "\n".join([head,
                      *(f"{f'+{added}':>6} {f'-{removed}':>6} {tokens:>7} {more:>+6}  {title}"
                        for added, removed, tokens, more, title in rows)])


def read_script(path: Path) -> str:
    """The code behind a path: a script, a record's folder or name, a public text log or a folder of those."""
    path = find(path)
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
