"""The list of arms that arms.py trains, whose docstring says what may be in it: reading and screenings."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Runs of Plackett and Burman's designs (1946, Biometrika 33) that are made from a prime, which is one less.
DESIGNS = 4, 8, 12, 20, 24, 32, 44, 48


class Mistake(Exception):
    """A user's, in one line: what, expected, found and the fix. `code` is the exit status."""
    code = 2


class Unread(Mistake):
    """No file of arms, or one that is cut, as while somebody writes it."""


def require(good: bool, what: Any, expected: str, found: Any, fix: str = "change it there") -> None:
    if not good:
        raise Mistake(f"{what}: expected {expected}, found {found}; fix: {fix}")


def number(least: float, most: float = math.inf, kinds: tuple = (int,)) -> tuple[str, Callable]:
    """What a key of numbers may be: in words, and as a test of a value of it. JSON's true is no number."""
    words = "an integer" if kinds == (int,) else "a number"
    return f"{words} from {least} to {most}", lambda value: type(value) in kinds and least <= value <= most


def all_are(kinds: tuple, values: Any) -> bool:
    """Whether it is a list, of such values alone."""
    return isinstance(values, list) and all(type(value) in kinds for value in values)


def are_pairs(kinds: tuple, values: Any) -> bool:
    """Whether it is a list of pairs of such values."""
    return all_are((list,), values) and all(len(pair) == 2 and all_are(kinds, pair) for pair in values)


STRING = "a string", lambda value: isinstance(value, str)
OBJECT = "an object", lambda value: isinstance(value, dict)
NUMBERS = "a list of numbers", lambda value: all_are((int, float), value)
STRINGS = "a list of strings", lambda value: all_are((str,), value)
# Files are named by the name, and a process is given it as an option.
NAME = "a string without / that begins with another character than -", lambda value: (
    isinstance(value, str) and re.fullmatch(r"[^-/\0][^/\0]*", value))
KEYS = {
    "name": NAME,
    "seed": number(0, 2**62),
    "length": number(0.001, 100, (int, float)),
    "alone": ("true or false", lambda value: isinstance(value, bool)),
    "fp8": STRINGS,
    "rate_powers": NUMBERS,
    "averages": ("a list of pairs of numbers", lambda value: are_pairs((int, float), value)),
    "edits": ("a list of pairs of strings", lambda value: are_pairs((str,), value)),
    **dict.fromkeys(("val_tokens", "micro_batch_tokens", "steps", "watch_every"), number(1)),
    **dict.fromkeys(("model", "layers", "optimizer", "rules", "stages", "three_stages"), OBJECT),
    **dict.fromkeys(("preset", "data", "script"), STRING),
}


# ---- screenings ------------------------------------------------------------------------------------------------------
def design(factors: int) -> np.ndarray:
    """Plackett and Burman's smallest design with a column for each factor, entries +1 and -1, [runs, runs - 1].
    The last run has no factor; in the first one, those whose number is 0 or a square modulo the prime."""
    runs = next(n for n in DESIGNS if n > factors)
    prime = runs - 1
    first = -np.ones(prime, int)
    first[np.arange(prime) ** 2 % prime] = 1
    return np.array([*(np.roll(first, shift) for shift in range(prime)), -np.ones(prime, int)])


def merged(*arms: dict) -> dict:
    """One arm with the changes of all:
    objects are united, edits follow one another, and of other values the last one counts."""
    result = {}
    for arm in arms:
        for key, value in arm.items():
            if isinstance(value, dict):
                value = merged(result.get(key, {}), value)
            elif key == "edits":
                value = result.get(key, []) + value
            result[key] = value
    return result


def unique(pairs: list[tuple[str, Any]]) -> dict:
    """A JSON object, of which json would take the last value of a key that is there twice."""
    keys = [key for key, _ in pairs]
    twice = {key for key in keys if keys.count(key) > 1}
    require(not twice, "keys of an object", "each once", f"twice {', '.join(sorted(twice))}", "remove one of them")
    return dict(pairs)


def check_arm(arm: Any, where: str) -> None:
    """Refuse what would be ignored, or fail only in the midst of a run."""
    require(isinstance(arm, dict), where, "an object", json.dumps(arm))
    where = f"{where}: {arm.get('name', 'an arm without a name')}"
    unknown = arm.keys() - KEYS.keys()
    require(not unknown, where, f"only {', '.join(sorted(KEYS))}", ", ".join(sorted(unknown)))
    for key, value in arm.items():
        words, fits = KEYS[key]
        require(fits(value), f"{where}: {key}", words, json.dumps(value))


def settings_of(change: dict, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The settings that a change gives a value, each as its path; edits are not settings, they add up."""
    for key, value in change.items():
        if isinstance(value, dict):
            yield from settings_of(value, (*above, key))
        elif key != "edits":
            yield (*above, key)


def check_screening(screening: dict, where: str) -> None:
    keys = screening.keys() - {"mirrored"}
    require(keys == {"base", "factors"}, where, "base, factors and perhaps mirrored", ", ".join(screening))
    mirrored = screening.get("mirrored", False)
    require(isinstance(mirrored, bool), f"{where}: mirrored", "true or false", json.dumps(mirrored))
    factors = screening["factors"]
    most = max(DESIGNS) - 1
    require(isinstance(factors, dict), f"{where}: factors", "an object", json.dumps(factors))
    require(1 <= len(factors) <= most, f"{where}: factors", f"1 to {most}", len(factors))
    check_arm(screening["base"], f"{where}: base")
    owners = {}  # of each setting the factor that changes it: of two the second one's level would stand
    for name, factor in factors.items():
        pair = not isinstance(factor, list) or len(factor) == 2
        require(pair, f"{where}: factor {name}", "a change, or two", json.dumps(factor))
        for change in levels(factor).values():
            check_arm(change, f"{where}: factor {name}")
            require("name" not in change, f"{where}: factor {name}", "no name", change.get("name"), "name the base")
            for setting in settings_of(change):
                owner = owners.setdefault(setting, name)
                require(owner == name, f"{where}: factor {name}", "settings of its own",
                        f"{'.'.join(setting)}, which {owner} changes")


def read_entries(path: Path) -> list[dict]:
    try:
        document = json.loads(path.read_text(), object_pairs_hook=unique)
    except (OSError, ValueError) as error:
        raise Unread(f"{path}: expected a list of arms, found '{error}'; fix: name one, or mend its JSON") from error
    entries = document if isinstance(document, list) else [document]
    require(bool(entries), path, "arms", "none", "list one")
    for entry in entries:
        check = check_screening if isinstance(entry, dict) and "factors" in entry else check_arm
        check(entry, str(path))
    return entries


def screening_signs(screening: dict) -> np.ndarray:
    """Whether each run has each factor, +1, or not, -1: [runs, factors]. In a mirrored screening each run is followed
    by one with all signs turned round, so that interactions of two factors add nothing to the effects."""
    factors = len(screening["factors"])
    signs = design(factors)[:, :factors]
    if screening.get("mirrored"):
        signs = np.stack([signs, -signs], axis=1).reshape(-1, factors)
    return signs


def levels(factor: dict | list) -> dict[int, dict]:
    """What a run without the factor, -1, changes, and one with it, +1."""
    without, with_it = factor if isinstance(factor, list) else ({}, factor)
    return {-1: without, 1: with_it}


def screening_arms(screening: dict) -> list[dict]:
    arms = []
    for number, row in enumerate(screening_signs(screening)):
        chosen = [levels(factor)[sign] for sign, factor in zip(row, screening["factors"].values())]
        arms.append(merged(screening["base"], *chosen, {"name": f"{screening['base'].get('name', 'run')}{number:02d}"}))
    return arms


def read_arms(path: Path) -> list[dict]:
    """All arms of a file, those of its screenings included, in order."""
    arms = []
    for entry in read_entries(path):
        arms += screening_arms(entry) if "factors" in entry else [entry]
    names = [arm.get("name") for arm in arms]
    good = None not in names and len(set(names)) == len(names)  # results and logs are by name
    require(good, path, "a name of its own for each arm", ", ".join(map(str, names)), "name each")
    return arms
