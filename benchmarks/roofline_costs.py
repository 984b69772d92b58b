"""Bytes and operations of the kernels of a training step, for roofline.py; no script.

Bytes are those that must move if each tensor is read and written once. A pass that finds its operands in the L2 cache
takes less, and a gather of short rows more. Operations are those of tensor cores alone.
"""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# TB/s and TFLOP/s of one H200, measured. A copy of 4 GiB counts bytes read and written. Products of 8192^3 reach 790 in
# bf16 and 1500 in FP8; those of 49152 x 3072 x 768 reach 654 and 1079, because a tile ends soon after its pipeline is
# full: _short, for fewer than SHORT_DEPTH terms a sum.
CEILINGS = {"bandwidth": 4.27, "bf16": 790.0, "bf16_short": 654.0, "fp8": 1500.0, "fp8_short": 1079.0}
SHORT_DEPTH = 2048


class Cost(NamedTuple):
    bytes: float
    operations: float = 0
    rate: str = "bf16"  # a key of CEILINGS

    def roof(self, ceilings: dict[str, float]) -> float:
        """Microseconds that the bytes or the operations need, whichever take longer."""
        return max(self.bytes / ceilings["bandwidth"], self.operations / ceilings[self.rate]) / 1e6


def product_rate(itemsize: int, depth: int) -> str:
    return ("fp8" if itemsize == 1 else "bf16") + ("_short" if depth < SHORT_DEPTH else "")


class Array(NamedTuple):
    """What a formula needs of a tensor. Of indices it keeps the values; other tensors it does not keep alive."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    address: int = 0
    values: Tensor | None = None

    @property
    def distinct(self) -> int:
        """Elements in memory: fewer than the shape says if the tensor is an expanded view."""
        if 0 in self.shape:
            return 0
        return min(
            math.prod(self.shape),
            1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides)),
        )

    @property
    def nbytes(self) -> int:
        return self.distinct * self.itemsize


def described(argument: Any) -> Any:
    """A tensor, or that of a tensor descriptor, as an Array; other arguments as they are."""
    tensor = argument if isinstance(argument, Tensor) else getattr(argument, "base", None)
    if not isinstance(tensor, Tensor):
        return argument
    indices = tensor if tensor.dtype in (torch.int32, torch.int64) else None
    return Array(tuple(tensor.shape), tensor.stride(), tensor.element_size(), tensor.data_ptr(), indices)


# ---- kernels of train_gpt.py: `a` holds the arguments of a launch by name --------------------------------------------
def moved(a: dict[str, Any], *names: str) -> int:
    """Bytes of the tensors among the arguments, or of those with these names, each tensor once."""
    arrays = [a[name] for name in names or a if isinstance(a[name], Array)]
    return sum({(x.address, x.shape): x.nbytes for x in arrays}.values())


def once(a):
    return Cost(moved(a))


def visible_pairs(distances: Tensor, window: int, itself: bool = True) -> int:
    """Pairs of a query and a key that it sees, given Documents.positions;
    or of a key and its queries, given Documents.remaining."""
    return int(distances.clamp(max=window).sum(dtype=torch.int64)) + itself * len(distances)


def gram(a):
    """The lower half of the product is enough."""
    batch = a["x_ptr"].shape[0]
    rows = a["rows"]
    depth = a["depth"]
    return Cost(moved(a), batch * rows * (rows + 1) * depth, product_rate(a["x_ptr"].itemsize, depth))


def polynomial(a):
    batch = a["x_ptr"].shape[0]
    rows = a["rows"]
    columns = a["columns"]
    return Cost(moved(a), batch * 2 * rows * rows * columns, product_rate(a["x_ptr"].itemsize, rows))


def attention_forward(a):
    heads = a["q_ptr"].shape[1]
    pairs = visible_pairs(a["positions_ptr"].values, a["window"])
    return Cost(moved(a), 2 * heads * pairs * (a["HEAD_DIM_QK"] + a["HEAD_DIM_V"]))


def attention_backward(a):
    """Of dq, or of dk and dv:
    both compute p, so together 8 and 6 operations a channel where the results alone need 6 and 4."""
    heads = a["own_qk_ptr"].shape[1]
    pairs = visible_pairs(a["distances_ptr"].values, a["window"])
    of_v = 2 if a["own_dv_ptr"] is None else 4
    return Cost(moved(a), heads * pairs * (4 * a["HEAD_DIM_QK"] + of_v * a["HEAD_DIM_V"]))


def pointer_forward(a):
    pairs = visible_pairs(a["positions_ptr"].values, a["window"], itself=False)
    return Cost(moved(a), 2 * pairs * a["HEAD_DIM_QK"])


def pointer_backward(a):
    pairs = visible_pairs(a["distances_ptr"].values, a["window"], itself=False)
    size = moved(a) - a["dqk_ptr"].nbytes // 2  # one launch writes the queries' half, another the keys'
    return Cost(size, 4 * pairs * a["HEAD_DIM_QK"])


def split_heads(a, grad: bool):
    qkv = a["qkv_ptr"]
    value = a["value_ptr"]
    heads = a["tokens"] * a["HEADS"]
    outputs = ("dq_ptr", "dk_ptr", "dv_ptr", "dqkv_ptr", "dqk_t_desc", "dv_t_desc") if grad else ("q_ptr", "k_ptr")
    size = moved(a, "positions_ptr", "cos_ptr", "sin_ptr", *outputs)
    size += 2 * heads * a["HEAD_DIM_QK"] * qkv.itemsize  # q and k; v is read only to add the value embedding
    if value is not None:
        # Only the heads' channels of the value embedding: these, v and the sum; or these and their gradient, which is
        # read too where it adds to another reader's.
        size += (2 + a["ADD"] if grad else 3) * heads * a["HEAD_DIM_V"] * value.itemsize
        size += (2 if grad else 1) * a["gates_ptr"].nbytes
    return Cost(size)


def add_rows(a):
    return Cost(3 * a["rows_ptr"].nbytes + a["ids_ptr"].nbytes)  # the table's rows are read and written


def mlp(a):
    return Cost(moved(a), 2 * a["tokens"] * a["mlp_width"] * a["WIDTH"], product_rate(1, a["WIDTH"]))


def span_sum(a):
    span = a["SPAN"]
    order = a["order_ptr"]
    spans = order.shape[0] // span
    ids = a["ids_ptr"].values.flatten()[order.values[:spans * span].long()].view(spans, span)
    whole = int((ids[:, 0] == ids[:, -1]).sum())  # spans that hold a single id
    return Cost(whole * (span * (a["width"] * a["grad_ptr"].itemsize + order.itemsize) + a["width"] * 4) + 16 * spans)


def groups(a, chosen: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """(bytes that the sums of the groups read whose lengths are `chosen`, their number), where span_sum_kernel has
    summed the whole spans.

    A row of the gradient counts once for each of its ids: they are far apart, so no cache keeps it.
    """
    starts = a["starts_ptr"].values.long()
    span = a["SPAN"]
    order = a["order_ptr"]
    lengths = starts.diff()
    begin = starts[:-1][chosen(lengths)]
    end = starts[1:][chosen(lengths)]
    whole = int((end // span - (begin + span - 1) // span).clamp(min=0).sum())
    rows = int((end - begin).sum()) - whole * span
    size = rows * (a["width"] * a["grad_ptr"].itemsize + order.itemsize) + whole * a["width"] * 4
    return size, int((begin < end).sum())


def embedding_grad(a):
    size, count = groups(a, lambda lengths: lengths >= 0)
    dense = a["dense_ptr"]
    size += a["starts_ptr"].nbytes
    written = count * a["width"] * dense.itemsize
    if a["ADD"]:
        written *= 2  # read, too
    elif a["present_ptr"] is None:
        written = dense.nbytes
    else:
        written += a["present_ptr"].nbytes
    return Cost(size + written)


def adam(a):
    """Of RowGrads, which are given by their addresses, nothing is counted."""
    return Cost(moved(a) + moved(a, "weights_ptr", "exp_avg_ptr", "exp_avg_sq_ptr"))  # these are read and written


def list_groups(a):
    listed = int((a["starts_ptr"].values.diff() > 0).sum())
    return Cost(a["starts_ptr"].nbytes + 4 * listed)


def sparse_adam(a):
    size, count = groups(a, lambda lengths: lengths == 1 if a["ROWS"] else lengths > 1)
    # Of each group its place, id and start are read; weights, second moment and last step are read and written.
    return Cost(size + count * (12 + 2 * (a["width"] * a["weights_ptr"].itemsize + 8)))


def peer_rows(a):
    row_bytes = a["width"] * a["out_ptr"].itemsize
    ids = a["ids_ptr"]
    return Cost(ids.nbytes + ids.nbytes // ids.itemsize * row_bytes + a["out_ptr"].nbytes)


OWN: dict[str, Callable[[dict[str, Any]], Cost]] = {
    "gram_kernel": gram,
    "polynomial_kernel": polynomial,
    "attention_forward_kernel": attention_forward,
    "attention_backward_kernel": attention_backward,
    "pointer_forward_kernel": pointer_forward,
    "pointer_backward_kernel": pointer_backward,
    "quantize_kernel": once,
    "split_heads_kernel": functools.partial(split_heads, grad=False),
    "split_heads_grad_kernel": functools.partial(split_heads, grad=True),
    "row_loss_kernel": once,
    "head_grad_kernel": once,
    "add_rows_kernel": add_rows,
    "mlp_kernel": mlp,
    "span_sum_kernel": span_sum,
    "embedding_grad_kernel": embedding_grad,
    "adam_kernel": adam,
    "list_groups_kernel": list_groups,
    "sparse_adam_kernel": sparse_adam,
    "peer_rows_kernel": peer_rows,
}


# ---- operators of torch, kernels of Inductor: by the host's events in a trace ----------------------------------------
ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short int": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}


def operands(event: dict) -> list[Array | None]:
    """The inputs of an operator; None for those that are no tensors.
    Lists of tensors are flattened, and taken for bfloat16: no type is said."""
    args = event.get("args", {})
    found = []
    for shape, strides, kind in zip(
        args.get("Input Dims", ()), args.get("Input Strides", ()), args.get("Input type", ())
    ):
        if kind == "TensorList":
            found += [Array(tuple(one), tuple(step), 2) for one, step in zip(shape, strides)]
        else:
            found.append(Array(tuple(shape), tuple(strides), ITEM_BYTES[kind]) if kind in ITEM_BYTES else None)
    return found


def operator_cost(event: dict, children: list[dict]) -> Cost | None:
    """Of an operator of torch, given what it called; None if nothing is known of its operands."""
    name = event["name"].removeprefix("aten::")
    tensors = [x for x in operands(event) if x]
    if not tensors:
        return None

    size = sum(x.nbytes for x in tensors)
    first = tensors[0]
    if name in ("mm", "bmm", "addmm", "baddbmm", "_scaled_mm"):
        added = "add" in name
        a, b = tensors[added:added + 2]
        *batch, rows, depth = a.shape
        out = math.prod(batch) * rows * b.shape[-1]
        # the result of FP8 products is bf16
        size = a.nbytes + b.nbytes + added * first.nbytes + out * max(a.itemsize, 2)
        return Cost(size, 2 * out * depth, product_rate(a.itemsize, depth))
    if name in ("fill_", "zero_"):
        return Cost(first.nbytes)
    if name in ("copy_", "_foreach_copy_", "sum", "mean", "linalg_vector_norm", "amax"):
        return Cost(size)
    if name in ("cat", "stack", "constant_pad_nd"):
        return Cost(2 * size)
    if name == "sort":  # of a radix sort's passes only one counts: keys read and written, 64-bit indices written
        return Cost(first.distinct * (2 * first.itemsize + 8))
    if name in ("index", "index_select", "embedding"):
        # The trace does not show the indices of `index`, but it shows their views inside of it.
        views = [
            operands(child)[0]
            for child in children
            if child["args"].get("Input type", [""])[0] in ("int", "long int")
        ]
        rows = max((math.prod(x.shape) for x in tensors[1:] or views), default=None)
        return rows and Cost(
            (rows + min(rows, first.shape[0])) * math.prod(first.shape[1:]) * first.itemsize + 8 * rows
        )

    largest = max(math.prod(x.shape) for x in tensors)
    return Cost(size + (first.nbytes if name.endswith("_") else largest * first.itemsize))


@functools.cache
def kernel_source(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def inductor_cost(event: dict) -> Cost | None:
    """Of a kernel that Inductor generated,
    from its arguments and the loads and stores in its source; None if that is gone.

    A load moves as many values as the kernel has points, at most. So a lookup in a large table counts what it reads.
    """
    args = event["args"]
    source = kernel_source(args["kernel_file"])
    header = re.search(r"^def triton_\w*\((.*?)\):", source, re.MULTILINE | re.DOTALL)
    if header is None:
        return None

    names = [parameter.split(":")[0].strip() for parameter in header[1].split(",")]
    values = dict(zip(names, args.get("Concrete Inputs", ())))
    points = 1
    for name in names:
        if name.endswith("numel"):
            constant = re.search(rf"^\s+{name} = (\d+)$", source, re.MULTILINE)
            points *= int(constant[1] if constant else values[name])

    size = 0
    for name, x in zip(names, operands(event)):
        aliases = "|".join((name, *re.findall(rf"^\s+(\w+) = {name}$", source, re.MULTILINE)))
        for access in (r"tl\.load", r"tl\.(?:store|atomic_add)") if x else ():
            size += min(x.distinct, points * len(re.findall(rf"{access}\((?:{aliases}) \+", source))) * x.itemsize
    return Cost(size)
