"""Cold and warm starts: where the compilers keep what they make, and how long a plan will hold the machine because of
it."""

from __future__ import annotations

import datetime
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from lanes import EVERYTHING, Lane, Schedule, lanes_here
from record import CACHES_AN_ARM, Folder, cache_part, finished, hardware_here, lane_name, query_gpus
from runlog import Run

# Two folders for each arm of a plan, outside of the records: what a start draws by chance, as Inductor's choice among
# configurations, is drawn once for a cache, so that one cache for all runs of an arm would be one draw. Where several
# runs go at once each arm has one on each lane instead: no two runs fill the same, and no two lanes share a draw.
# Temporary; removed with the plan's last run.
CACHES = Path(tempfile.gettempdir()) / f"train_gpt-compiled-{os.getuid()}"
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Variables that the rules forbid, but for places: the first letters of their names.
SETTINGS_OF_COMPILERS = "TORCHINDUCTOR_", "TORCH_COMPILE_", "TRITON_", "ENABLE_PERSISTENT_TMA_MATMUL"
# For runs without a GPU: those of cpu_settings in run.sh, which gives the reasons; a test holds both together. A run
# took 24 s with them for 84.
CPU_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "8589934592",
                "OMP_WAIT_POLICY": "PASSIVE"}
# From the last step of a run to the start of the next: the validation, the end of the process, torchrun. The records'
# took 3 to 12 s.
CLOSING_SECONDS, INTERRUPTION_SECONDS = 6.5, 600


def cache_name(folder: Folder, key: str, lane: Lane = EVERYTHING) -> str:
    return f"{folder.record['plan']['id']}-{key[0]}-{cache_part(folder, key, lane.name)}"


def caches(folder: Folder, key: str, lane: Lane = EVERYTHING) -> dict[str, Path]:
    """Where a run's compilers keep what they make; below the folders that the user has set, or below CACHES."""
    name = cache_name(folder, key, lane)
    return {variable: Path(os.environ[variable]) / name if variable in os.environ else CACHES / name / part
            for variable, part in VARIABLES.items()}


def environment(folder: Folder, key: str, lane: Lane = EVERYTHING) -> dict[str, str]:
    """The variables for a run. One of the settings for CPUs that the user has set is respected, but none of the
    compilers. PYTHONSAFEPATH: what lies beside a script cannot take the place of a module."""
    CACHES.mkdir(mode=0o700, parents=True, exist_ok=True)
    places = caches(folder, key, lane)
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    settings = {} if query_gpus("--query-gpu=name") else CPU_SETTINGS
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(lane.ids)} if lane.ids else {}
    own = {name: value for name, value in os.environ.items()
           if not name.startswith(SETTINGS_OF_COMPILERS) or name.endswith(("_DIR", "_PATH"))}
    compiled = {variable: str(place) for variable, place in places.items()}
    return settings | own | visible | compiled | {"PYTHONSAFEPATH": "1"}


def remove_caches(folder: Folder) -> None:
    """Of a plan that is done: of all its lanes."""
    for home in {CACHES, *(Path(os.environ[variable]) for variable in VARIABLES if variable in os.environ)}:
        for place in home.glob(f"{folder.record['plan']['id']}-*"):
            shutil.rmtree(place, ignore_errors=True)


def is_cold(folder: Folder, key: str, lane: Lane) -> bool:
    """Whether a run would find nothing compiled."""
    return not any(any(place.glob("*")) for place in caches(folder, key, lane).values())


def warm_starts(runs: list[Run]) -> list[float]:
    """The start-ups of an arm without its slowest ones, as many as it has caches: those compiled."""
    found = sorted(map(start_up, runs))
    caches_used = max(CACHES_AN_ARM, len(set(map(lane_name, runs))))
    return found[:len(found) - min(caches_used, (len(found) + 1) // 2)]


class Timing(NamedTuple):
    """What runs took, in seconds: `cold` and `warm` is all but the training, and `training` is that of the preset's
    length, by arm."""
    cold: float
    warm: float
    training: dict[str, float]
    compiles: bool  # without a GPU nothing does, so that every start is warm
    source: str


def began(run: Run) -> datetime.datetime | None:
    """When a run that ended well started; None if its log does not tell its times, as nobody has verified it here."""
    try:
        when = datetime.datetime.fromisoformat(run.head["started"])
        start_up(run)
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    return when if run.ok and when.tzinfo else None


def in_turn(runs: list[Run]) -> list[Run]:
    """The runs whose logs tell their times, in the order in which they were made."""
    return sorted(filter(began, runs), key=began)


def all_in_turn(folder: Folder) -> list[Run]:
    """Those of both arms."""
    return in_turn([run for arm in folder.record["scripts"] for run in folder.runs(arm)])


def by_lane(folder: Folder) -> list[list[Run]]:
    """Those of each lane, which followed each other."""
    runs = all_in_turn(folder)
    return [[run for run in runs if lane_name(run) == name] for name in sorted(set(map(lane_name, runs)))]


def start_up(run: Run) -> float:
    """From the start of the process to the first step on the clock."""
    return run.of("clock")[0]["start_ms"] / 1e3


def closing(runs: list[Run]) -> list[float]:
    """From the last step of each run to the start of the next, where no interruption came between. `runs` are of both
    arms, which take turns."""
    between = [(began(after) - began(run)).total_seconds() - start_up(run) - run.ms / 1e3
               for run, after in zip(runs, runs[1:])]
    return [max(0.0, seconds) for seconds in between if seconds < INTERRUPTION_SECONDS]


def training(runs: list[Run]) -> float | None:
    """Mean seconds of a training of the preset's length."""
    return statistics.fmean(run.ms / 1e3 / float(run.head["settings"].get("length", 1))
                            for run in runs) if runs else None


def timing(folder: Folder) -> Timing | None:
    """By the record's own runs so far and those of its parent, or else of the newest record of the track; one on this
    hardware comes first."""
    here = hardware_here(folder.record["plan"]["world"])
    others = [other for other in finished(folder.path.parent, folder.record["track"]) if other.path != folder.path]
    others.sort(key=lambda other: (other.hardware == here, other.path == folder.parent, other.started), reverse=True)
    own = {arm: in_turn(folder.runs(arm)) for arm in folder.record["scripts"]}
    together = all_in_turn(folder)
    logged = in_turn(others[0].runs("a")) if others else []

    arms = [runs for runs in (*own.values(), logged) if runs]
    if not arms:
        return None
    cold = max(start_up(run) for runs in arms for run in runs)
    warm = statistics.median([seconds for runs in arms for seconds in warm_starts(runs)] or [cold])
    in_turns = by_lane(folder) + (by_lane(others[0]) if others else [])
    between = [seconds for runs in in_turns for seconds in closing(runs)]
    rest = statistics.median(between) if between else CLOSING_SECONDS

    usual = training(together) or training(logged)
    source = (["its own runs"] if together else []) + ([f"{others[0].path.name}, {others[0].hardware}"] if logged
                                                       else [])
    compiles = any(line.get("graphs") for runs in arms for run in runs for line in run.of("warm"))
    return Timing(cold + rest, warm + rest, {arm: training(runs) or usual for arm, runs in own.items()}, compiles,
                  " and ".join(source))


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


class Forecast(NamedTuple):
    """What is left of a plan, if all goes as before."""
    cold: int
    warm: int
    seconds: float


def forecast(folder: Folder, at_once: int, found: Timing) -> Forecast:
    """Carry the plan out on paper. On a machine that lacks the GPUs others stand in for them."""
    here = lanes_here(folder.record["plan"]["world"])
    logged = {lane_name(run) for arm in folder.record["scripts"] for run in folder.runs(arm)}
    missing = sorted(logged - {lane.name for lane in here} - {""})
    here += [Lane(f"other{number}") for number in range(at_once)] + [Lane(name) for name in missing]
    schedule = Schedule(folder, at_once, here)
    compiled, ends, counts, now = set(), {}, [0, 0], 0.0
    while schedule.unfinished:
        for lane, key in schedule.due():
            name = cache_name(folder, key, lane)
            cold = found.compiles and name not in compiled and is_cold(folder, key, lane)
            compiled.add(name)
            counts[not cold] += 1
            training_seconds = found.training[key[0]] * folder.record["plan"].get("length", 1)
            ends[lane] = now + (found.cold if cold else found.warm) + training_seconds
        first = min(ends, key=ends.get)
        now = ends.pop(first)
        schedule.ended(first)
    return Forecast(*counts, now)


def duration(folder: Folder, at_once: int = 1) -> str:
    """How long what is left of a plan will take, in a sentence with its parts."""
    order = folder.record["plan"]["order"]
    left = [key for key in order if f"{key}.jsonl" not in folder.record["runs"]]
    runs = counted(len(order),
                   "run") if len(left) == len(order) else f"{len(left)} of {counted(len(order), 'run')} left"
    if not left:
        return f"{runs}: no device time"
    found = timing(folder)
    if found is None:
        return f"{runs}: how long they take is not known, as no run of {folder.record['track']} is logged yet"

    expected = forecast(folder, at_once, found)
    trainings = [found.training[key[0]] * folder.record["plan"].get("length", 1) for key in left]
    starts = [f"{counted(number, f'{word} start')} of about {seconds:.0f} s"
              for number, word, seconds in ((expected.cold, "cold", found.cold), (expected.warm, "warm", found.warm))
              if number]
    together = f", {at_once} at once" if at_once > 1 else ""
    return (f"{runs}{together}: {', '.join(starts)}, training {statistics.fmean(trainings):.0f} s each: about "
            f"{expected.seconds / 60:.1f} minutes, going by {found.source}")
