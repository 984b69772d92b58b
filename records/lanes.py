"""Lanes: on a machine with more GPUs than a run needs, several runs of a plan go at once, each on GPUs of its own."""

from __future__ import annotations

import os
from typing import NamedTuple

from record import Folder, lane_name, query_gpus
from runlog import EXIT_HARDWARE, Run, fail, span


class Lane(NamedTuple):
    """GPUs that one run at a time has for itself."""

    name: str = ""  # their numbers, as nvidia-smi counts them: "2", or "0.1"; empty for all that a run would see
    ids: tuple[str, ...] = ()  # unlike the numbers these do not depend on what is visible

    def shares(self, name: str) -> bool:
        """Whether a GPU of this lane may belong to the lane of that name too."""
        if not self.name or not name:
            return True
        return bool(set(self.name.split(".")) & set(name.split(".")))

    @property
    def label(self) -> str:
        """In front of what is said about a run."""
        if not self.name:
            return ""
        numbers = self.name.split(".")
        return f"GPU{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


EVERYTHING = Lane()


def lanes_here(world: int) -> list[Lane]:
    """The visible GPUs in groups of `world`; what is left over stays idle."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    rows = [row.partition(", ") for row in query_gpus("--query-gpu=index,uuid")]
    groups = [rows[first:first + world] for first in range(0, len(rows) - world + 1, world)]
    return [Lane(".".join(number for number, _, _ in group), tuple(uuid for _, _, uuid in group)) for group in groups]


def require_lanes(folder: Folder, at_once: int) -> list[Lane]:
    """The lanes of this machine; refuse more runs at once than it has GPUs for, and logs that could not tell that they
    were apart."""
    world = folder.record["plan"]["world"]
    here = lanes_here(world)
    if at_once > 1:
        if len(here) < at_once:
            fail("visible GPUs", f"{at_once * world} for {at_once} runs at once", f"enough for {len(here)}",
                 "change --at-once or CUDA_VISIBLE_DEVICES", EXIT_HARDWARE)
        if not any("gpu_ids" in folder.script(arm).read_text() for arm in folder.record["scripts"]):
            fail("scripts", "one whose log names its GPUs, in gpu_ids", "none",
                 "leave out --at-once: nothing would show that the runs shared no GPU")
    return here


class Schedule:
    """The runs of a plan that are left, and where each may start.

    Both arms of a seed run on one lane, one directly after the other, so that what differs between GPUs cancels in the
    pair. A new seed starts on the lane that is free first, but on no GPU that has had a later one: there the runs
    follow the plan, also after an interruption.
    """

    def __init__(self, folder: Folder, at_once: int, here: list[Lane]):
        order = folder.record["plan"]["order"]
        arms = len(folder.record["scripts"])
        self.at_once = at_once
        self.here = here
        self.place = {key: place for place, key in enumerate(order)}
        self.seed = {key: place // arms for key, place in self.place.items()}  # both arms of one stand side by side
        self.started = {run.path.stem: lane_name(run) for arm in folder.record["scripts"] for run in folder.runs(arm)}

        left = [key for key in order if f"{key}.jsonl" not in folder.record["runs"]]
        seeds = dict.fromkeys(self.seed[key] for key in left)
        self.waiting = [[key for key in left if self.seed[key] == seed] for seed in seeds]
        self.queues = {}  # of each lane that has a seed: its runs that have not started
        self.running = {}  # lane -> key

    def may_have(self, keys: list[str]) -> list[Lane]:
        """The lanes on which a seed may run: where its other arm has, or where the plan's order is kept."""
        known = [EVERYTHING, *self.here]
        partners = [name for key, name in self.started.items() if self.seed[key] == self.seed[keys[0]]]
        if partners:
            found = [lane for lane in known if lane.name == partners[0]]
            needed = f"{Lane(partners[0]).label}, where the other arm of its seed ran"
        else:
            usual = [EVERYTHING] if self.at_once == 1 else self.here[:self.at_once]
            found = [lane for lane in usual if self.in_turn(lane, keys)] or \
                    [lane for lane in known if self.in_turn(lane, keys)]
            needed = "a GPU without a later run of the plan"
        if not found:
            fail(f"GPUs for run {keys[0]}", needed, "others", "make visible those of the runs so far")
        return found

    def in_turn(self, lane: Lane, keys: list[str]) -> bool:
        """Whether all that has started on these GPUs comes before the seed in the plan."""
        return all(self.place[key] < self.place[keys[0]] for key, name in self.started.items() if lane.shares(name))

    def runs_on(self, lane: Lane) -> int:
        return sum(name == lane.name for name in self.started.values())

    def due(self) -> list[tuple[Lane, str]]:
        """The runs that start now, with their lanes. The seeds are asked in turn; what one has to wait for, none behind
        it may take."""
        promised = []
        for keys in list(self.waiting):
            if len(self.queues) == self.at_once:
                break
            lanes = self.may_have(keys)
            free = [lane for lane in lanes if not any(lane.shares(other.name) for other in [*self.queues, *promised])]
            if free:  # that with the fewest runs, so that the seeds of an arm come to more than one cache
                self.queues[min(free, key=self.runs_on)] = keys
                self.waiting.remove(keys)
            else:
                promised += lanes

        found = [(lane, keys.pop(0)) for lane, keys in self.queues.items() if lane not in self.running]
        self.running |= found
        self.started |= {key: lane.name for lane, key in found}
        return found

    def ended(self, lane: Lane) -> None:
        del self.running[lane]
        if not self.queues[lane]:
            del self.queues[lane]

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.queues)


class Place(NamedTuple):
    """Where a run was made."""

    machine: str | None
    host: str | None
    gpus: frozenset[str]

    def apart(self, other: Place) -> bool:
        """Whether both are shown to be different GPUs of one machine."""
        one_host = self.host is not None and self.host == other.host
        return one_host and bool(self.gpus) and bool(other.gpus) and not self.gpus & other.gpus


def places(runs: dict[str, Run]) -> dict[str, Place]:
    """Of each run, by its log, or where that names no GPU, as an older script's, by one with the same `machine`: that
    is a hash of the host and the GPUs."""
    known = {}
    for run in runs.values():
        if run.head.get("gpu_ids"):
            known[run.head.get("machine")] = run.head.get("host"), frozenset(run.head["gpu_ids"])
    machines = {key: run.head.get("machine") for key, run in runs.items()}
    return {key: Place(machine, *known.get(machine, (None, frozenset()))) for key, machine in machines.items()}


def most_at_once(runs: list[Run]) -> int:
    """How many of these runs went on at the same time, by their logs."""
    spans = [found for run in runs if (found := span(run))]
    return max((sum(start <= moment < end for start, end in spans) for moment, _ in spans), default=0)
