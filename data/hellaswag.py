"""HellaSwag: how often a model that train_gpt.py saved finds the right ending of a text among four.

    python data/hellaswag.py model.safetensors          the 10,042 validation questions, fetched once (needs pyarrow)
    python data/hellaswag.py FILE --questions QUESTIONS your own, JSON lines or parquet: ctx, endings, label

An ending's score is the model's loss on its tokens after the context, in nats: `accuracy` takes the ending with the
lowest sum, `acc_norm` the one with the lowest mean a token. Texts are used as they are, after a document start and
without examples before them ("completion style"; other harnesses clean and format them, which moves the numbers by a
point or two). Guessing gives 0.25.

Exit codes: 0 all is well; 2 usage or data, with one line that says what, expected, found and the fix; 130 interrupted.
Importing does nothing but finding train_gpt.py, sample.py and fineweb.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:  # in another Python than run.sh uses
    if __name__ != "__main__":
        raise
    print(f"hellaswag: {error.name}: expected it installed, found none; fix: the .venv that run.sh makes, or pip "
          "install -r requirements.txt", file=sys.stderr)
    sys.exit(2)

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import sample
import train_gpt as tg
from data.fineweb import DataError, download, encode_text, exit_status, find_on_hub, open_streams, say, whole_number

DATASET = "Rowan/hellaswag"
FILE = "data/validation-00000-of-00001.parquet"
BATCH_TOKENS = 16_384  # of a forward pass


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int


def fetch(path: Path) -> None:
    """The validation questions from the Hugging Face hub.
    The name appears when the SHA-256 that the hub states is right."""
    url, size, sha256 = find_on_hub(FILE, DATASET)
    part = path.with_name(f"{path.name}.part")
    download(part, path.name, url, size, sha256)
    part.replace(path)


def rows(path: Path) -> Iterator[Any]:
    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, filter(str.strip, file))
        return
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{path}",
            "pyarrow, to read parquet",
            "not installed",
            "pip install pyarrow, or give JSON lines with --questions",
        ) from None
    try:
        yield from parquet.read_table(path, columns=["ctx", "endings", "label"]).to_pylist()
    except ArrowException as error:
        raise DataError(
            f"{path}",
            "a parquet file",
            str(error).splitlines()[0],
            "give another, or delete the one that was fetched",
        ) from None


def read_questions(path: Path) -> list[Question]:
    """Every question of a file. Raises DataError at the first that is none, and for a pipe, where to open it would wait
    for somebody who writes into it."""
    if path.exists() and not path.is_file():
        raise DataError(path, "a file", "a folder, pipe, socket or device", "give a file with --questions")
    questions = []
    try:
        for row in rows(path):
            question = Question(row["ctx"], row["endings"], int(row["label"]))
            if not (
                isinstance(question.context, str)
                and isinstance(question.endings, list)
                and all(isinstance(e, str) and e for e in question.endings)
                and 0 <= question.label < len(question.endings)
            ):
                raise ValueError("fields of other types, or a label without ending")
            questions.append(question)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        found = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DataError(
            f"{path} question {len(questions) + 1}",
            "ctx, endings and the label of the right one",
            found,
            "repair or fetch the file",
        ) from None
    if not questions:
        raise DataError(f"{path}", "questions", "none", "give another file with --questions")
    return questions


@torch.no_grad()
def ending_losses(
    model: tg.GPT, content: dict[str, Any], documents: list[tuple[list[int], int]], device: torch.device
) -> list[float]:
    """For each (tokens, length of its ending) the summed loss of the ending's tokens, nats:
    one packed forward pass for all."""
    pieces = [np.array(tokens, dtype=np.uint16) for tokens, _ in documents]
    batch = tg.pack({0: pieces}, model.config, pin=False).to(device)
    features, head, targets, cap = model.predictions(
        batch, sample.saved_geometry(content, model, max(map(len, pieces))), torch.ones(1, device=device)
    )
    stops = np.cumsum([len(piece) - 1 for piece in pieces])  # a document's last token is only a target
    losses = []
    for stop, (_, length) in zip(stops.tolist(), documents):
        part = slice(stop - length, stop)
        own = {
            name: tensor[part]
            for name in ("class_index", "positions", "log_copy")
            if (tensor := getattr(targets, name)) is not None
        }
        own["inclusion_rates"] = model.inclusion_rates
        losses.append(float(tg.head_loss_reference(features[part], head, targets._replace(**own), cap)))
    return losses


def evaluate(
    model: tg.GPT, content: dict[str, Any], questions: list[Question], encode: Any, device: torch.device
) -> tuple[float, float]:
    """(accuracy by the sum, by the mean a token) over all questions."""
    documents = []
    for question in questions:
        context = [tg.BOS, *encode_text(encode, question.context)]
        for ending in question.endings:
            tokens = encode(" " + ending)
            documents.append(([*context, *tokens], len(tokens)))
    losses: list[float] = []
    while len(losses) < len(documents):
        stop = len(losses)
        room = BATCH_TOKENS
        while stop < len(documents) and (room := room - len(documents[stop][0])) >= 0 or stop == len(losses):
            stop += 1
        losses += ending_losses(model, content, documents[len(losses):stop], device)
        if sys.stderr.isatty():
            print(f"\r{len(losses) / len(documents):4.0%}", end="", file=sys.stderr, flush=True)
    right = np.zeros(2)
    at = 0
    for question in questions:
        own = slice(at, at := at + len(question.endings))
        sums = losses[own]
        lengths = [length for _, length in documents[own]]
        for rule, scores in enumerate((sums, [loss / length for loss, length in zip(sums, lengths)])):
            right[rule] += scores.index(min(scores)) == question.label
    return tuple((right / len(questions)).tolist())


def main(argv: list[str] | None = None) -> int:
    open_streams()
    parser = argparse.ArgumentParser(
        description="HellaSwag accuracy of a model saved by train_gpt.py.", allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="written by train_gpt.py --save")
    parser.add_argument(
        "--questions", type=Path, help="JSON lines or parquet (default: the validation set, fetched once)"
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="only the first N questions")
    parser.add_argument(
        "--encoding", type=Path, metavar="FILE", help="the ranks file of the training's tokenizer, if not GPT-2's"
    )
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def work() -> None:
        model, content = sample.load_model(arguments.model, device)
        encoding = sample.encoding_of(content, arguments.encoding)
        path = arguments.questions or FOLDER / "hellaswag_val.parquet"
        if not arguments.questions and not path.exists():
            fetch(path)
        questions = read_questions(path)[:arguments.limit]
        accuracy, acc_norm = evaluate(model, content, questions, encoding.encode_ordinary, device)
        say(f"hellaswag, {len(questions)} questions: accuracy {accuracy:.4f}, acc_norm {acc_norm:.4f}")

    return exit_status(work, errors=(DataError, tg.Failure))


if __name__ == "__main__":
    sys.exit(main())
