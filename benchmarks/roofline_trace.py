"""The kernels in a Chrome trace of torch.profiler, and what launched them, for roofline.py; no script."""

import re
from collections.abc import Iterator

import numpy as np

PART = "part: "  # opens the name of a range that names a part of the step
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Operators of torch that start no kernel.
VIEWS = set(
    "alias as_strided detach empty empty_like empty_strided expand flatten item _local_scalar_dense narrow permute "
    "real reshape resize_ _reshape_alias resolve_conj result_type select slice split squeeze t to transpose unbind "
    "unflatten unsqueeze _unsafe_view view".split()
)


class Trace:
    """What the host called inside what, and the kernels that it launched, from a Chrome trace of torch.profiler.

    Without a GPU the innermost operators of torch are taken for kernels.
    """

    def __init__(self, events: list[dict]):
        spans = [event for event in events if event.get("ph") == "X"]
        self.host = [event for event in spans if event.get("cat") in HOST]
        self.host.sort(key=lambda event: (str(event["tid"]), event["ts"], -event["dur"]))
        self.parent = []
        self.children = [[] for _ in self.host]
        # indices of host events
        self.launched = {}
        self.external = {}
        self.forward = {}
        stack = []  # the events that the next one may lie in
        for index, event in enumerate(self.host):
            while stack and (self.host[stack[-1]]["tid"] != event["tid"] or event["ts"] >= self.end(stack[-1])):
                stack.pop()
            self.parent.append(stack[-1] if stack else None)
            for outer in stack[-1:]:
                self.children[outer].append(index)
            stack.append(index)

            args = event.setdefault("args", {})
            if event["cat"].startswith("cuda") and "correlation" in args:
                self.launched[args["correlation"]] = index
            if event["cat"] == "cpu_op":
                self.external[args.get("External id", -1)] = index
                number = args.get("Sequence number")
                if number is not None and "Backward" not in event["name"] and "autograd" not in event["name"]:
                    # Of the operators with one number, the last has made the node in autograd's graph.
                    self.forward[number] = max(index, self.forward.get(number, index), key=lambda i: self.host[i]["ts"])

        # In the order of the launches.
        self.device = sorted(
            (event for event in spans if event.get("cat") in DEVICE),
            key=lambda e: (e["args"].get("correlation", 0), e["ts"]),
        )
        self.device = self.device or sorted(self.innermost(), key=lambda event: event["ts"])

    def inside(self, operator: dict) -> list[dict]:
        """What an operator called directly."""
        index = self.external.get(operator["args"].get("External id"))
        return [] if index is None else [self.host[child] for child in self.children[index]]

    def end(self, index: int) -> float:
        return self.host[index]["ts"] + self.host[index]["dur"]

    def innermost(self) -> list[dict]:
        kernels = []
        outer = set()
        for index in reversed(range(len(self.host))):  # children before their parents
            name = self.host[index]["name"]
            if index not in outer and name.startswith("aten::") and name.removeprefix("aten::") not in VIEWS:
                kernels.append(self.host[index])
                outer.add(index)
            if index in outer:
                outer.add(self.parent[index])
        return kernels

    def around(self, kernel: dict) -> Iterator[dict]:
        """What launched a kernel, then what that lies in, from inside out;
        in a backward pass, then what the forward pass lies in."""
        args = kernel["args"]
        index = self.launched.get(args.get("correlation"))
        number = None
        if index is None or self.parent[index] is None:
            index = self.external.get(args.get("External id"))
        while index is not None:
            event = self.host[index]
            yield event
            if event["name"].startswith("autograd::engine::evaluate_function"):
                number = event["args"].get("Sequence number")
            index = self.parent[index]
            if index is None:
                index = self.forward.get(number)
                number = None

    def part(self, kernel: dict) -> str:
        names = (event["name"] for event in self.around(kernel))
        return next((name.removeprefix(PART) for name in names if name.startswith(PART)), "")

    def operator(self, kernel: dict) -> dict | None:
        """The operator of torch, or launch of Inductor, that a kernel belongs to."""
        for event in self.around(kernel):
            if event["name"].startswith(("autograd", PART)):
                return None
            if event["name"].startswith("aten::") or "kernel_file" in event["args"]:
                return event
        return None

    def busy_us(self) -> tuple[float, float]:
        """(time from the first kernel to the end of the last, time in which at least one runs)."""
        starts, ends = np.array(sorted((event["ts"], event["ts"] + event["dur"]) for event in self.device)).T
        reached = np.maximum.accumulate(ends)  # not `ends`, as kernels of several streams overlap
        length = reached[-1] - starts[0]
        return float(length), float(length - np.maximum(starts[1:] - reached[:-1], 0).sum())


def kernel_key(kernel: dict) -> tuple:
    """What a kernel has in common with the same one in another trace."""
    return kernel["name"], *(str(kernel["args"].get(name)) for name in ("grid", "block", "bytes", "Input Dims"))


def base_name(name: str) -> str:
    """A kernel's name without types, namespaces and arguments."""
    return re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)", ""))[0].split("::")[-1]
