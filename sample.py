"""What comes after a training: write a model, for train_gpt.py --save FILE, and use it.

    python sample.py MODEL "Once upon a time"         continue a text, each token shown when it is drawn
    python sample.py MODEL                            the same for each line that you type; Ctrl-D ends it
    python sample.py MODEL --eval [--data FOLDER]     validation loss, beside the one that the training has logged
    python sample.py MODEL --export TO                a copy with 4 bits for a number of the n-gram table
    python sample.py MODEL --export TO --dense        the same without the hashed n-grams, for other programs
    python sample.py MODEL --export TO --megabytes N  a small copy, to try: the rows that text asks for most, as many
                                                      as N MB hold beside the rest, and all tables in 4 bits

And what train_gpt.py needs for --sample-every: a model continues texts while it is trained.

On a GPU if there is one, with plain PyTorch operators. The rows of the n-gram table stay in the file, which is mapped
into memory. Exit codes are those of train_gpt.py, but 130 after any signal, and every failure is a line: what,
expected, found, fix.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:  # in another Python than run.sh uses
    if __name__ != "__main__":
        raise
    print(f"sample: {error.name}: expected it installed, found none; fix: ./run.sh sample MODEL ..., or pip install -r "
          "requirements.txt", file=sys.stderr)
    sys.exit(2)
import torch.nn.functional as F
from torch import Tensor

import train_gpt as tg
from data.fineweb import DataError, encode_text, load_encoding, read_ranks, stop_as_by_ctrl_c
from train_gpt import BOS, fail

LARGEST_DIFFERENCE = 0.01  # in nats a token, between the loss here and the logged one: other kernels, and 4-bit rows
# What sampling takes where an option is not given. Given ones that do nothing are refused.
SAMPLING = {"seed": 0, "temperature": 0.8, "top_p": 1.0, "length": 256}
ALONG_LENGTH = 64  # tokens of a text of --sample-every, which must not delay a training by much
COUNTED_TOKENS = 10_000_000  # of the training, whose lookups tell the rows that text asks for most
COUNTED_WINDOW = 65_536  # so many at a time
HEADER_ROOM = 65_536  # bytes of a model file that are no tensor: fewer


# ---- model files: the weights and what they mean ---------------------------------------------------------------------
# A model file is a safetensors file: the length of a JSON header in 8 little-endian bytes, the header, the bytes of the
# tensors. The header's metadata are texts: the format, what a model is besides its weights, as JSON once more, the
# SHA-256 of each tensor, and that of the header, so that whoever reads it need not ask whether settings are possible.
#
# Rows of the n-gram table that no step has read are zero, and left out: `ngram.rows` are the others, in the order of
# their numbers, `ngram.ids` [N].
MODEL_FORMAT = "train_gpt model 5"
STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32, "U8": torch.uint8}


def lookups(model: tg.ModelConfig) -> str:
    """What decides, besides the configuration, which rows of the table a text reads: no weight's shape shows it."""
    return f"{tg.NGRAM_MULTIPLIERS[:model.ngram_orders]} {tg.HASH_MULTIPLIERS} {tg.SUFFIX_LENGTHS} {tg.NEW_TOKEN_ROWS}"


def header_hash(header: dict) -> str:
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


def model_header(form: str, content: dict, likes: dict[str, Tensor], digests: dict[str, str]) -> bytes:
    """The first bytes of a model file, of a format `form`, with the names, dtypes and shapes of `likes`."""
    names = {dtype: name for name, dtype in STORED_DTYPES.items()}
    metadata = {"format": form, "content": json.dumps(content), "tensors": json.dumps(digests)}
    header = {"__metadata__": metadata}
    end = 0
    for name, like in likes.items():
        start = end
        end += like.nbytes
        header[name] = {"dtype": names[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    metadata["sha256"] = header_hash(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


def give_name(aside: Path, path: Path) -> Path:
    """Give a finished file its name, which is returned. If another process has taken it meanwhile, a number is added,
    and a line says so: a link replaces nothing, as a rename would."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    for name in itertools.chain([path], numbered):
        try:
            os.link(aside, name)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            os.replace(aside, name)
        break
    if name != path:
        tg.show(f"saved as {name}, since {path} was made meanwhile\n", sys.stdout)
    return name


def write_model(path: Path, form: str, content: dict, likes: dict[str, Tensor],
                parts: Iterable[tuple[str, Tensor]]) -> Path:
    """Write a model file aside, then give it its name. `parts` are the tensors in the order of `likes`, (name, values),
    each whole or in pieces that follow each other, because a device may have no room for a large one once more."""
    sums = {name: hashlib.sha256() for name in likes}

    def header():
        return model_header(form, content, likes, {name: digest.hexdigest() for name, digest in sums.items()})

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(header())  # of the same length as the final one
            for name, part in parts:
                values = part.cpu().reshape(-1).view(torch.uint8).numpy()
                sums[name].update(values)
                file.write(values)
            file.seek(0)
            file.write(header())
            tg.to_disk(file)
        return give_name(aside, path)
    except OSError as error:
        fail(f"saving {path}", "a writable folder with space", error, "choose another place")
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def save_model(path: Path, trainer: tg.Trainer, loss: float, seed: int):
    """Write weights, configuration, the tokens and the loss of the validation, and provenance to one file."""
    preset = trainer.preset
    frequency, scale = tg.rotary_frequencies(preset, len(preset.stages) - 1)
    tokenizer = tg.tokenizer_file(trainer.folder)
    content = {
        "model": asdict(preset.model),
        "lookups": lookups(preset.model),
        "attention": {"frequency": frequency.tolist(), "scale": scale, "windows": preset.val_attention_windows},
        "validation": {
            "data": str(trainer.folder), "hash": trainer.validation_hash, "tokens": preset.val_tokens,
            "window": preset.val_window_tokens, "loss": loss,
            "encoding": tokenizer and hashlib.sha256(tokenizer.read_bytes()).hexdigest()},
        "provenance": {
            "seed": seed, "preset": preset.name, "script": tg.script_hash(), "data": trainer.data_hash,
            **tg.machine_facts()},
    }
    tensors = trainer.model.state_dict()
    table = tensors.pop("ngram", None)
    if table is None:
        parts = [torch.zeros(1, 2)]  # one row, which is zero and so not kept
    else:
        parts = trainer.ranks.versions(table) if trainer.ranks.deals_rows else [table]
    ids = torch.stack([part.any(1) for part in parts], 1).flatten().nonzero().flatten()  # row i // R of part i % R
    tensors["ngram.ids"] = ids.int()
    rows = (("ngram.rows", tg.dealt_rows(some, parts)) for some in ids.split(2**16))
    like = parts[0].new_empty(len(ids), parts[0].size(1), device="meta")
    write_model(path, MODEL_FORMAT, content, tensors | {"ngram.rows": like}, itertools.chain(tensors.items(), rows))


def check_place(path: Path, model: tg.ModelConfig):
    """Fail unless a model can be saved there. Its n-gram table takes most of the room."""
    if path.exists():
        fail(f"saving {path}", "a new file", "one that exists" if path.is_file() else "a folder or a device",
             "remove it, or choose another name")

    place = tg.writable_place(path)
    row_bytes = model.width * getattr(torch, model.dtype).itemsize + 4 * model.ngram_pieces  # with their ids
    needed_mb = 1000 + model.table_rows * row_bytes // 1_000_000
    free_mb = shutil.disk_usage(place).free // 1_000_000
    if free_mb < needed_mb:
        fail(f"saving {path}", f"{needed_mb:,} MB free", f"{free_mb:,} MB in {place}", "choose another place")


# ---- reading a model file --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredRows:
    """The rows of the n-gram table that a file holds, mapped into memory; all others are zero."""
    ids: Tensor  # int32 [N], their numbers in ascending order
    rows: Tensor  # [N, D], or [N, D / 2] bytes of quantize_rows
    scales: Tensor | None  # [N, D / 32] of quantize_rows; None: rows are numbers

    def sums(self, wanted: Tensor, table: Tensor) -> Tensor:
        """For each of T token pieces the sum of K rows of the table, [T, D], in its dtype; `wanted` [T, K] are their
        numbers. It takes the place of GPT.sum_rows, whose table has no values here."""
        asked = wanted.cpu()
        index = torch.searchsorted(self.ids, asked).clamp(max=len(self.ids) - 1)
        stored = (self.ids[index] == asked)[..., None].to(wanted.device)
        rows = self.rows[index].to(wanted.device)
        if self.scales is not None:  # unpacked where the model runs: two CPU cores take 74 ms for rows of 2400 tokens
            rows = unpack_rows(rows, self.scales[index].to(wanted.device))
        return (rows * stored).sum(1, dtype=table.dtype)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N, D] of any dtype in 4 bits a number: bytes [N, D / 2] and a bfloat16 scale for 32 numbers, [N, D / 32].

    A byte holds a number of the row's first half and, times 16, one of its second half, both from 1 to 15: 8 is zero.
    These 0.56 bytes a number cost 0.0003 of a sprint's loss (one model, measured); 1 byte in e4m3 costs 0.00002."""
    groups = rows.float().unflatten(1, (-1, math.gcd(rows.size(1), 32)))
    scales = (groups.abs().amax(2, keepdim=True) / 7).clamp_min(1e-20).bfloat16()
    low, high = (groups / scales + 8.5).byte().flatten(1).chunk(2, 1)
    return low + 16 * high, scales.flatten(1)


def unpack_rows(packed: Tensor, scales: Tensor) -> Tensor:
    """The numbers [..., D] of packed rows [..., D / 2] and their scales: what quantize_rows has rounded them to."""
    numbers = torch.cat([packed & 15, packed >> 4], -1).unflatten(-1, (scales.size(-1), -1)) - 8.0
    return (numbers * scales[..., None]).flatten(-2)


def read_content(metadata: dict[str, str]) -> tuple[dict, tg.ModelConfig]:
    """What a model is besides its weights, and its configuration. ValueError or another error where a part is missing.
    """
    content = json.loads(metadata["content"])
    stated = content["model"]
    layers = tuple(tg.Layer(**layer) for layer in stated["layers"])
    config = tg.ModelConfig(**stated | {"layers": layers, "softcap": tg.Softcap(*stated["softcap"])})
    if json.loads(json.dumps(asdict(config))) != stated:
        raise ValueError("settings missing")
    if content["lookups"] != lookups(config):
        raise ValueError("rows of other n-grams")
    return content, config


def read_tensors(path: Path, rows_too: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A model file's metadata, and its tensors by name, mapped into memory and compared with their SHA-256; those of
    the n-gram table, most of the file, only if `rows_too`. ValueError or another error where something is wrong."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    if path.is_fifo():  # to read it would wait for ever
        raise ValueError("a named pipe")
    file = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(file[:8], "little")
    if start > len(file):
        raise ValueError("no whole header: cut, or of another program or an older version")
    header = json.loads(file[8:start].tobytes())
    metadata = header["__metadata__"]
    if metadata["format"] != MODEL_FORMAT:
        raise ValueError(f"format {metadata['format']}")
    if metadata.pop("sha256") != header_hash(header):
        raise ValueError("a header that was changed")

    del header["__metadata__"]
    stop = start + max(entry["data_offsets"][1] for entry in header.values())
    if stop > len(file):
        raise ValueError(f"{len(file):,} of {stop:,} bytes: cut")
    digests = json.loads(metadata["tensors"])
    tensors = {}
    for name, entry in header.items():
        values = file[start:][slice(*entry["data_offsets"])]
        if rows_too or not name.startswith("ngram."):
            if hashlib.sha256(values).hexdigest() != digests[name]:
                raise ValueError(f"other values of {name} than were written")
        tensors[name] = torch.from_numpy(values).view(STORED_DTYPES[entry["dtype"]]).view(entry["shape"])
    return metadata, tensors


def continuing_model(config: tg.ModelConfig, tensors: dict[str, Tensor]) -> tg.GPT:
    """A model that continues texts, on any device, with `tensors` themselves as its parameters: none is copied. An
    n-gram table that is not among them stays on the meta device."""
    model = tg.GPT(config, replace(tg.reference_ops(), attention=attention), torch.device("meta"))
    if model.ngram is not None:
        tensors = {"ngram": model.ngram.detach()} | tensors
    parameters = dict(model.named_parameters())
    # assign=True puts these parameters in the place of the model's, so they need its roles.
    model.load_state_dict(
        {name: tg.make_param(parameters[name].info.role, tensor) if name in parameters else tensor
         for name, tensor in tensors.items()}, assign=True)
    return model.requires_grad_(False)


def read_model_file(path: Path, rows_too: bool = False) -> tuple[tg.GPT, dict, StoredRows]:
    """A saved model, with the dtypes of its file, the content of the file, and the rows of its n-gram table.

    All is mapped into memory, but for tables in 4 bits; the model itself has its n-gram table on the meta device.
    `rows_too`: see read_tensors.
    """
    try:
        metadata, tensors = read_tensors(path, rows_too)
        content, config = read_content(metadata)
        stored = StoredRows(tensors.pop("ngram.ids"), tensors.pop("ngram.rows"), tensors.pop("ngram.scales", None))
        for name in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
            tensors[name] = unpack_rows(tensors[name], tensors.pop(f"{name}.scales")).to(getattr(torch, config.dtype))
        return continuing_model(config, tensors), content, stored
    except Exception as error:  # a foreign file can raise anything
        fail(f"model file {path}", f"{MODEL_FORMAT}, as --save writes it", repr(error)[:200],
             "check the path, copy the file again, use the version that wrote it, or train one with --save FILE")


def load_model(path: Path, device: torch.device, rows_too: bool = False) -> tuple[tg.GPT, dict]:
    """A saved model with reference operators, so that it runs on any device, and the content of its file."""
    model, content, stored = read_model_file(path, rows_too)
    if device.type == "cpu":
        model.float()  # bfloat16 matrix products are slow there
    else:
        # A sprint's validation takes 49 s with one thread that looks up rows. With 64, which wait for each other in
        # busy loops, it took 97 s and kept 36 cores busy.
        torch.set_num_threads(1)
    for tensor in (*model.parameters(), model.inclusion_rates):
        if tensor is not model.ngram:
            tensor.data = tensor.to(device, copy=True)
    model.sum_rows = stored.sums
    return model, content


def shards_of(content: dict) -> Path:
    """The folder of a saved model's training, which may have been named from the repository."""
    return tg.here_or_beside(Path(content["validation"]["data"]))


def saved_geometry(content: dict, model: tg.GPT, positions: int) -> tg.Geometry:
    """The geometry with which a saved model was validated, for documents of up to `positions` tokens."""
    saved = content["attention"]
    return tg.geometry_tables(np.array(saved["frequency"]), saved["scale"], tuple(saved["windows"]), positions,
                              model.lm_head.dtype, model.lm_head.device)


def export_model(
        path: Path, target: Path, dense: bool = False, megabytes: float | None = None, data: Path | None = None):
    """Copy a model with its n-gram rows in 4 bits; `dense`: without those of hashed n-grams, which no lookup of this
    program can do without. With `megabytes` the file has at most so many: all tables are in 4 bits, and those rows go
    that are used least in the training's shards, which `data` may name."""
    model, content, stored = read_model_file(path, rows_too=True)
    if target.exists():  # perhaps the model itself
        fail(f"exporting to {target}", "a new file", "one that exists", "choose another name, or remove it")

    def packed(part):
        if stored.scales is not None:
            return stored.rows[part], stored.scales[part]
        return quantize_rows(stored.rows[part])

    config = model.config
    model.ngram = None
    tensors = dict(model.state_dict())
    kept = torch.arange(len(stored.ids))
    if dense:
        kept = kept[stored.ids >= config.ngram_pieces * config.ngram_rows]
    if megabytes is not None:
        tables = [name for name, tensor in tensors.items()
                  if tensor.dim() == 2 and len(tensor) == config.padded_vocabulary]
        for name in tables:
            tensors[name], tensors[f"{name}.scales"] = quantize_rows(tensors[name])
        row_bytes = stored.ids.itemsize + sum(part.nbytes for part in packed(kept[:1]))
        others = HEADER_ROOM + sum(tensor.nbytes for tensor in tensors.values())
        room = int((megabytes * 1e6 - others) // row_bytes)
        if room < 1:
            fail(f"exporting to {target}", "room for rows of the n-gram table", f"none in {megabytes:g} MB",
                 f"give --megabytes more than the {others / 1e6:.1f} of all other weights")
        uses = count_uses(config, stored.ids, data or shards_of(content))
        kept = uses.argsort(descending=True, stable=True)[:room].sort().values
        whole = content.get("rows_kept", [0, len(stored.ids)])[1]  # of the first export
        content["rows_kept"] = [len(kept), whole]

    tensors["ngram.ids"] = stored.ids[kept]
    sizes = [(len(kept), *like.shape[1:]) for like in packed(kept[:1])]
    rows, scales = (torch.empty(size, dtype=like.dtype, device="meta") for size, like in zip(sizes, packed(kept[:1])))
    parts = itertools.chain(
        tensors.items(),  # then all rows, then all scales
        (("ngram.rows", packed(part)[0]) for part in kept.split(2**16)),
        (("ngram.scales", packed(part)[1]) for part in kept.split(2**16)))
    form = f"dense part of {MODEL_FORMAT}" if dense else MODEL_FORMAT
    target = write_model(target, form, content, tensors | {"ngram.rows": rows, "ngram.scales": scales}, parts)
    size_mb = target.stat().st_size / 1e6
    print(tg.printable(f"{target}: {size_mb:.1f} MB, {len(kept):,} of {len(stored.ids):,} n-gram rows", sys.stdout))


def count_uses(config: tg.ModelConfig, ids: Tensor, folder: Path) -> Tensor:
    """How often the lookups of a folder's first training tokens, at most COUNTED_TOKENS, ask for each of the rows `ids`
    [N], ascending. Returns int64 [N]."""
    uses = torch.zeros(len(ids), dtype=torch.int64)
    left = COUNTED_TOKENS
    for shard in tg.find_shards(folder, "train"):
        tokens = min(left, len(tg.open_shard(shard, config.vocabulary)) - 1)
        windows, _ = tg.validation_windows(shard, tokens, COUNTED_WINDOW, config.vocabulary)
        for number, window in enumerate(windows):
            asked = tg.pack({number: window}, config, pin=False).to(ids.device).ngrams.flatten()
            index = torch.searchsorted(ids, asked).clamp(max=len(ids) - 1)
            uses += torch.bincount(index[ids[index] == asked], minlength=len(ids))
        left -= tokens
        if not left:
            break
    return uses


# ---- validation ------------------------------------------------------------------------------------------------------
def evaluate_model(model: tg.GPT, content: dict, folder: Path) -> tuple[float, str]:
    """Loss in nats a token on as many of a folder's validation tokens as the model was validated on, in the same
    windows; and the hash of these tokens."""
    validation = content["validation"]
    shard = tg.find_shards(folder, "val")[0]
    windows, digest = tg.validation_windows(shard, validation["tokens"], validation["window"], model.config.vocabulary)
    pieces = sum(windows, [])
    total = 0.0
    for start in range(0, len(pieces), 4):  # documents one by one take minutes on a GPU, a whole window gigabytes
        if sys.stderr.isatty():
            print(f"{start / len(pieces):4.0%}", end="\r", file=sys.stderr)
        group = pieces[start:start + 4]
        batch = tg.pack({0: group}, model.config, pin=False).to(model.lm_head.device)
        total += float(model.evaluate(batch, saved_geometry(content, model, max(map(len, group)))))
    return total / validation["tokens"], digest


def validate(path: Path, data: Path | None, device: torch.device):
    """Print the validation loss of a saved model. Fail if it is not the logged one, on the tokens of its training; of a
    copy with fewer rows another is expected."""
    model, content = load_model(path, device, rows_too=True)
    validation = content["validation"]
    folder = data or shards_of(content)
    loss, digest = evaluate_model(model, content, folder)
    logged = validation["loss"]
    same = digest == validation["hash"]
    kept = "; with {:,} of {:,} rows".format(*content["rows_kept"]) if "rows_kept" in content else ""
    others = "" if same else f" on other tokens, of {validation['data']}"
    print(tg.printable(f"val loss {loss:.6f} on {folder}; logged {logged:.6f}{others}{kept}", sys.stdout))
    if same and not kept and not abs(loss - logged) <= LARGEST_DIFFERENCE:
        fail("val loss", f"within {LARGEST_DIFFERENCE} of the logged {logged:.4f}", f"{loss:.4f}",
             "use the version that trained the model (its SHA-256 is in the file), and report this")


# ---- continuing a text -----------------------------------------------------------------------------------------------
@dataclass
class Cache:
    """What earlier passes over a growing document have computed: keys and values of every layer, and final states.

    Of each it keeps all tokens so far. A pass appends the new ones, and computes those before them that they read
    otherwise once more, from token `first` on: one, because key_offset takes a part of a key from there, and two a
    layer, as many as its MLP mixes in."""
    first: int = 0  # the first token of this pass
    positions: Tensor | None = None  # of all tokens, int32 [T]
    calls: int = 0  # of attention in this pass: its layers come in one order
    kept: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, documents: tg.Documents, reach: int) -> NewTokens:
        """Begin a pass over the whole document `documents`. Returns the part of it that the model has to see."""
        seen = 0 if self.positions is None else len(self.positions)
        self.first = max(0, seen - reach)
        self.positions = documents.positions
        self.calls = 0
        first = self.first
        pieces = len(documents.ngrams) // len(documents.tokens)
        return NewTokens(**vars(documents) | {
            "tokens": documents.tokens[first:], "positions": documents.positions[first:],
            "ngrams": documents.ngrams[first * pieces:]}, cache=self)

    def extended(self, name: str, part: Tensor) -> Tensor:
        """Append to what is kept under a name the new tokens of `part` [T, ...], which begins at `first`. Returns all.
        """
        kept = self.kept.get(name, part[:0])
        self.kept[name] = torch.cat([kept, part[len(kept) - self.first:]]) if len(kept) else part
        return self.kept[name]


@dataclass(frozen=True)
class NewTokens(tg.Documents):
    """The last tokens of a document whose earlier ones `cache` remembers. Its class_index has the targets of all."""
    cache: Cache | None = None


def attention(q: Tensor, k: Tensor, v: Tensor, documents: tg.Documents, *settings) -> Tensor:
    """Ops.attention by the reference; of NewTokens over the keys and values that their cache remembers, too."""
    positions = documents.positions
    if isinstance(documents, NewTokens):
        cache = documents.cache
        k = cache.extended(f"keys {cache.calls}", k)
        v = cache.extended(f"values {cache.calls}", v)
        cache.calls += 1
        positions = cache.positions
    return tg.attention_reference(q, k, v, positions, *settings)


@torch.no_grad()
def next_token(model: tg.GPT, documents: tg.Documents, geometry: tg.Geometry) -> Tensor:
    """Probabilities [padded vocabulary], float32, of what follows a single document, or NewTokens of it."""
    config = model.config
    h = model.features(documents, geometry)
    z = tg.softcapped(F.linear(h[-1], model.lm_head).float(), config.softcap)
    p = (z + model.inclusion_rates.log()).softmax(-1)
    if model.pointer is None:
        return p

    if isinstance(documents, NewTokens):  # of all tokens: a pointer's key reads the state after its own, too
        h = documents.cache.extended("final states", h)
    q, k = tg.pointer_in(F.linear(h[-1 - config.pointer_window_tokens:], model.pointer)).unbind(1)
    k = k.float()
    scores = config.pointer_scale * (k[:-1] @ q[-1].float())
    shares = F.pad(scores, (0, 1)).softmax(-1)  # the last one points nowhere: it stays with the copy token
    copy_token = config.vocabulary
    copied = F.pad(documents.class_index[-len(k):-1], (0, 1), value=copy_token)
    p_copy = p[copy_token].clone()
    p[copy_token] = 0
    return p.index_add(0, copied, p_copy * shares)


def next_tokens(model: tg.GPT, geometry: tg.Geometry, ids: list[int]) -> Iterator[Tensor]:
    """next_token of a document, time and again, while the caller appends tokens to its `ids`."""
    cache = Cache()
    reach = 1 + 2 * len(model.blocks)
    while True:
        document = np.array([*ids, BOS], dtype=np.uint16)  # the last token is only a target
        whole = tg.pack({0: [document]}, model.config, pin=False).to(model.lm_head.device)
        yield next_token(model, cache.begin(whole, reach), geometry)


def draw(p: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token by its probabilities p [V] to the power 1 / temperature, from the likeliest ones that have a share top_p
    of the whole together, and at least one."""
    p = (p.double() / p.max()) ** (1 / temperature)
    p = p / p.sum()
    likeliest, ids = p.sort(descending=True, stable=True)
    before = likeliest.cumsum(0) - likeliest
    likeliest[before >= max(top_p, 1e-9)] = 0  # the first one has nothing before it
    return int(ids[torch.multinomial(likeliest, 1, generator=generator)])


def drawn_tokens(model: tg.GPT, geometry: tg.Geometry, ids: list[int], options: argparse.Namespace,
                 generator: torch.Generator) -> Iterator[int]:
    """Tokens that follow those of `ids`, where each is appended, up to options.length or the end of the document."""
    for p in itertools.islice(next_tokens(model, geometry, ids), options.length):
        token = draw(p[:model.config.vocabulary], options.temperature, options.top_p, generator)
        ids.append(token)
        yield token
        if token == BOS:
            return


def continue_text(model: tg.GPT, content: dict, encoding, prompt: str, options: argparse.Namespace,
                  generator: torch.Generator):
    """Print `prompt` and what follows it, each token as it is drawn, up to the end of the document or --length tokens.

    On standard error, how many tokens a second that were."""
    ids = [BOS, *encode_text(encoding.encode_ordinary, prompt)]
    geometry = saved_geometry(content, model, len(ids) + options.length)
    sys.stdout.buffer.write(prompt.encode("utf-8", "surrogateescape"))  # what the terminal's encoding lacks too
    sys.stdout.flush()
    clock = tg.Clock(model.lm_head.device)
    start = clock.since_start()
    for count, token in enumerate(drawn_tokens(model, geometry, ids, options, generator), 1):
        sys.stdout.buffer.write(bytes_of(encoding, token))  # it may end within a character
        sys.stdout.flush()
    print()
    print(f"{count} tokens, {count / (clock.since_start() - start):.1f} a second", file=sys.stderr)


def bytes_of(encoding, token: int) -> bytes:
    """What a token says. A ranks file may lack some of the vocabulary's, which a model can draw all the same."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return "\N{REPLACEMENT CHARACTER}".encode()


def typed_lines() -> Iterator[str]:
    """The lines that a person types, up to Ctrl-D."""
    sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text, as in the arguments of a command
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def encoding_of(content: dict, given: Path | None):
    """The tokenizer of the training: GPT-2's, or that of the ranks file `given` or, without one, beside the shards."""
    validation = content["validation"]
    expected = validation.get("encoding")  # the file's SHA-256
    ranks = given or expected and tg.tokenizer_file(shards_of(content))
    found = hashlib.sha256(read_ranks(str(ranks))).hexdigest() if ranks else None
    if found != expected:
        fail("--encoding", f"the training's, SHA-256 {expected[:16]}" if expected else "none, as in the training",
             f"{ranks}, {found[:16]}" if found else "none", "give the ranks file of the shards, or leave it out")
    return load_encoding(str(ranks or "gpt2"))


def sample(options: argparse.Namespace, device: torch.device):
    """Continue the text of the options, or each that is typed, all from one generator."""
    model, content = load_model(options.model, device)
    encoding = encoding_of(content, options.encoding)
    generator = torch.Generator(device).manual_seed(options.seed)
    for prompt in typed_lines() if options.text is None else [options.text]:
        continue_text(model, content, encoding, prompt, options, generator)


# ---- texts along a training ------------------------------------------------------------------------------------------
def on_one_line(text: str) -> str:
    """A text in quotes, in characters that the terminal has; what would move its cursor is escaped."""
    return tg.printable(repr(text), sys.stdout)


@dataclass
class Samples:
    """What --sample-every of train_gpt.py shows: a document that the model writes by itself, always from one seed."""
    every: int  # steps
    vocabulary: int  # of the model
    folder: Path  # of the shards

    def __post_init__(self):
        """Load the tokenizer, or fail before the training begins."""
        try:
            self.encoding = load_encoding(str(tg.tokenizer_file(self.folder) or "gpt2"))
        except DataError as error:
            fail(*error.parts)
        except ImportError as error:
            fail("--sample-every", f"the package {error.name}", "none",
                 "pip install -r requirements.txt, or leave the option out")
        if self.encoding.n_vocab != self.vocabulary:
            fail("--sample-every", f"a model of GPT-2's {self.encoding.n_vocab} tokens", self.vocabulary,
                 "leave the option out")

    def due(self, done: int) -> bool:
        return done % self.every == 0

    def show(self, trainer: tg.Trainer, log: tg.RunLog, done: int):
        """Say and log the text after `done` steps. The first rank writes it, and the others wait."""
        ranks = trainer.ranks
        ranks.heartbeat(f"the sample of step {done}", tg.WARM_UP_PATIENCE)
        if ranks.rank == 0:
            text = self.text(trainer, done)
            log.line("sample", step=done, text=text)
            log.say(f"step {done:5d}   writes {on_one_line(text)}")
        ranks.gather_objects(None)  # no rank's clock goes on before

    def text(self, trainer: tg.Trainer, done: int) -> str:
        """With the weights and windows of the moment. Nothing that the training reads is touched."""
        preset = trainer.preset
        tensors = trainer.model.state_dict()
        dealt = trainer.ranks.deals_rows and "ngram" in tensors  # so this rank has some of the rows only
        if dealt:
            del tensors["ngram"]
        model = continuing_model(preset.model, tensors)
        if dealt:  # not by the kernel, which would be compiled for ids of this alignment
            peers = trainer.model.ngram.info.owner.peers
            model.sum_rows = lambda ids, _: tg.peer_rows_reference(ids, peers)
        index = tg.stage_index(preset, done - 1)
        geometry = tg.rotary_geometry(preset, index, 1 + ALONG_LENGTH, trainer.device)
        generator = torch.Generator(trainer.device).manual_seed(SAMPLING["seed"])
        options = argparse.Namespace(**SAMPLING | {"length": ALONG_LENGTH})

        tokens = drawn_tokens(model, geometry, [BOS], options, generator)
        return b"".join(bytes_of(self.encoding, token) for token in tokens).decode(errors="replace")


# ---- main ------------------------------------------------------------------------------------------------------------
def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The options. Those that do nothing beside the others are refused."""
    parser = argparse.ArgumentParser(description="Use a model that train_gpt.py has saved.", allow_abbrev=False)
    add = parser.add_argument
    add("model", type=Path, help="written by train_gpt.py --save, or by --export")
    add("text", nargs="?", help="what to continue; without it, each line that you type")
    add("--seed", type=tg.within(int, 0, 2**62), help="of what is drawn (0)")
    add("--temperature", type=tg.within(float, 0.01, 100), help="below 1 the likely tokens become likelier (0.8)")
    add("--top-p", type=tg.within(float, 0, 1), help="only the likeliest tokens, up to this share (1)")
    add("--length", type=tg.within(int, 1, 100_000), help="tokens at most (256)")
    add("--eval", action="store_true", help="validation loss, compared with the logged one")
    add("--data", type=Path, help="with --eval or --megabytes: the folder of other shards than the training's")
    add("--export", type=Path, metavar="TO", help="copy the model, its n-gram table in 4 bits a number")
    add("--dense", action="store_true", help="with --export: without the hashed n-grams")
    add("--megabytes", type=tg.within(float, 0, 1e6), metavar="N",
        help="with --export: at most so many MB, all tables in 4 bits, only the n-gram rows that are used most")
    add("--encoding", type=Path, metavar="FILE", help="the ranks file of the training's tokenizer, if not GPT-2's")
    options = parser.parse_intermixed_args(argv)  # options may stand before the text

    given = [name for name in ("text", "encoding", *SAMPLING) if getattr(options, name) is not None]
    if options.export and options.eval:
        parser.error("--eval and --export: one at a time")
    if given and (options.export or options.eval):
        option = "a text" if given[0] == "text" else f"--{given[0].replace('_', '-')}"
        parser.error(f"{option} does nothing with --eval or --export")
    if options.data and not options.eval and options.megabytes is None:
        parser.error("--data does nothing without --eval or --megabytes")
    for name in ("dense", "megabytes"):
        value = getattr(options, name)
        if value is not None and value is not False and not options.export:  # 0 megabytes too
            parser.error(f"--{name} does nothing without --export")
    if options.dense and options.megabytes is not None:
        parser.error("--dense and --megabytes: one at a time")
    for name, value in SAMPLING.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(argv: list[str] | None = None) -> int:
    tg.open_streams()
    options = parse_arguments(argv)
    stop_as_by_ctrl_c()
    try:
        if options.export:
            export_model(options.model, options.export, options.dense, options.megabytes, options.data)
            return 0
        device = tg.pick_device(0)
        if options.eval:
            validate(options.model, options.data, device)
        else:
            sample(options, device)
        return 0
    except KeyboardInterrupt:
        print("sample: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the text has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit does not meet it again
        return 128 + signal.SIGPIPE
    except DataError as error:
        print(f"sample: {error}", file=sys.stderr)
        return tg.EXIT_USAGE
    except ImportError as error:
        print(f"sample: {error.name}: expected it installed, found none; fix: pip install -r requirements.txt",
              file=sys.stderr)
        return tg.EXIT_USAGE
    except Exception as error:
        failure = tg.explained(error, None)
        if failure is None:
            raise
        print(f"sample: {failure}", file=sys.stderr)
        return failure.code


if __name__ == "__main__":
    sys.exit(main())
