"""python records new NAME | run DIR | verify DIR | audit DIR | abandon DIR | guard BASE | compare A B | diff A B |
curve A B | export RUN | leaderboard | rule | plot."""

from __future__ import annotations

import argparse
import json
import locale
import os
import signal
import sys
from pathlib import Path

try:
    import numpy  # noqa: F401
except ImportError:
    print("numpy: expected it installed; fix: ./run.sh --check, then . .venv/bin/activate if it made that, or pip "
          "install -r requirements.txt", file=sys.stderr)
    sys.exit(2)

import record
from record import KINDS, TRACKS
from runlog import Failure, fail


def command_new(arguments: argparse.Namespace) -> int:
    fixed = ("track", "parent", "kind", "n", "margin", "length", "restart")
    given = [f"--{name}" for name in fixed if getattr(arguments, name) is not None]
    if arguments.retime and given:
        fail("new --retime", "the plan of that record", f"{', '.join(given)} too", "leave those options out")
    asked = {name: getattr(arguments, name) for name in (*fixed[1:], "world", "data", "retime")}
    path = record.new(arguments.name, track_name=arguments.track, **asked)
    made = record.load(path).record
    print(f"{os.path.relpath(path)}: {made['track']}, {made['kind']}, parent {made['parent'] or 'none'}, "
          f"{record.hardware_here(made['plan']['world'])}\n"
          f"plan {made['plan']['id']}, margin {made['plan']['margin']}: {' '.join(made['plan']['order'])}\nnext: "
          f"commit the plan, then python records run {os.path.relpath(path)}"
          + (f" --data {arguments.data}" if arguments.data else ""))
    return 0


def stop_as_by_ctrl_c() -> None:
    """So that what ends this process stops the training too, which is in a session of its own."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup asks
            signal.signal(number, signal.default_int_handler)


def command_run(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        from starts import duration
        print(duration(record.load(arguments.dir), arguments.at_once))
        return 0
    from runner import run_plan
    stop_as_by_ctrl_c()
    run_plan(arguments.dir, arguments.data, arguments.at_once)
    print(f"next: python records verify {arguments.dir}")
    return 0


def number_of_steps(text: str) -> int:
    """What `--steps` takes: no schedule is longer."""
    number = int(text)
    if not 1 <= number <= 10_000:
        raise argparse.ArgumentTypeError(f"expected 1 to 10,000 steps, found {number}")
    return number


def command_verify(arguments: argparse.Namespace) -> int:
    from verify import verify
    found = {str(path): verify(path) for path in arguments.dir or record.all_folders()}
    if arguments.json:
        print(json.dumps({path: [check._asdict() for check in checks] for path, checks in found.items()}, indent=1))
    else:
        for path, checks in found.items():
            print(path)
            for check in checks:
                print(f"  {'ok  ' if check.ok else 'FAIL'}  {check.name:<9} {check.text}")
    failed = sum(not all(check.ok for check in checks) for checks in found.values())
    if not arguments.json:
        print(f"{len(found) - failed} of {len(found)} records verify")
    return int(failed > 0)


def command_audit(arguments: argparse.Namespace) -> int:
    from audit import audit
    stop_as_by_ctrl_c()
    return audit(arguments.dir, arguments.data, arguments.seed, arguments.arm, arguments.steps)


def command_abandon(arguments: argparse.Namespace) -> int:
    from runner import close, gather, only_one
    with only_one(record.load(arguments.dir).path):  # a `run` under way would write over it
        gather(record.load(arguments.dir))  # what an interrupted `run` left is kept in sight too
        record.abandon(arguments.dir, arguments.why)
        folder = record.load(arguments.dir)
        close(folder)
    restart = "" if "restarts" in folder.record["plan"] else \
        f", and one restart may name it: new NAME --restart {arguments.dir}"
    print(f"{arguments.dir}: abandoned; it stays where it is{restart}")
    return 0


def command_guard(arguments: argparse.Namespace) -> int:
    from guard import guard
    return guard(arguments.base)


def command_rule(arguments: argparse.Namespace) -> int:
    from rule import rule_tables
    print(rule_tables())
    return 0


def command_compare(arguments: argparse.Namespace) -> int:
    from report import compare
    print(compare(arguments.a, arguments.b))
    return 0


def command_diff(arguments: argparse.Namespace) -> int:
    from codediff import changes, read_script, summary
    found = changes(read_script(arguments.a), read_script(arguments.b), arguments.code)
    print(summary(found), *("\n".join(change.lines) for change in found if change.lines), sep="\n\n")
    return 0


def command_leaderboard(arguments: argparse.Namespace) -> int:
    from leaderboard import leaderboard
    return leaderboard(arguments.check)


def command_plot(arguments: argparse.Namespace) -> int:
    from plots import plot_history, plot_log, plot_runs
    if arguments.log and arguments.runs:
        fail("plot --log", "one log", f"{len(arguments.runs)} other runs too", "leave out either")
    if arguments.readme:
        if arguments.log or arguments.runs:
            fail("plot --readme", "nothing else", "a log or runs too", "leave out either")
        from curve import draw_readme
        draw_readme(arguments.out)
    elif arguments.log:
        plot_log(arguments.log, arguments.out)
    elif arguments.runs:
        plot_runs(arguments.runs, arguments.out)
    else:
        plot_history(arguments.out)
    print(arguments.out)
    return 0


def command_curve(arguments: argparse.Namespace) -> int:
    from curve import draw, table
    print(table([arguments.a, arguments.b]))
    if arguments.out:
        draw([arguments.a, arguments.b], arguments.out)
        print(f"\n{arguments.out}")
    return 0


def command_export(arguments: argparse.Namespace) -> int:
    from export import csv_text, write_events
    if arguments.csv:
        print(csv_text(arguments.run), end="")
    else:
        print(write_events(arguments.run, arguments.tensorboard))
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python records",
                                  description="Records that prove themselves; see records/README.md.",
                                  allow_abbrev=False)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(function=function)
        return command

    new = add("new", command_new, "plan a record: copy train_gpt.py, fix seeds, order and hashes")
    new.add_argument("name")
    new.add_argument("--track", choices=TRACKS, help="default: the parent's")
    new.add_argument("--parent",
                     help="record to beat (default: the best of the track on this hardware), or none if there is none")
    new.add_argument("--kind", choices=KINDS, help="what changed (default: ml, or baseline without a parent)")
    new.add_argument("--n", type=int,
                     help="runs an arm, fixed from now on (default: what the margin needs, or the track's usual)")
    new.add_argument("--margin", type=float, metavar="NATS",
                     help="how far below the target the mean loss is expected: n follows from it")
    new.add_argument("--restart", metavar="RECORD", help="the abandoned plan of this idea, once, at half the level")
    new.add_argument("--length", type=float, metavar="F",
                     help="the trainer's --length in every run (default: the parent's, or 1)")
    new.add_argument("--world", type=int, choices=(1, 2, 4, 8), help="GPUs (default: as many as there are)")
    new.add_argument("--data", type=Path, help="folder with the shards (default: the track's)")
    new.add_argument("--retime", type=Path, metavar="RECORD",
                     help="repeat that record's script and plan on this machine")
    run = add("run", command_run, "carry the plan out; start it again after an interruption and it continues")
    run.add_argument("dir", type=Path)
    run.add_argument("--data", type=Path, help="folder with the shards (default: the track's)")
    run.add_argument("--at-once", type=int, choices=range(1, 9), default=1, metavar="N",
                     help="so many runs at the same time, each on GPUs of its own (default: 1)")
    run.add_argument("--dry-run", action="store_true", help="only say how long the rest of the plan will take")
    verify = add("verify", command_verify, "check records, one line a check; exit 1 if one fails")
    verify.add_argument("dir", type=Path, nargs="*", help="default: all")
    verify.add_argument("--json", action="store_true")
    audit = add("audit", command_audit,
                "run the first steps of one seed again with the record's script and compare the losses; on any machine")
    audit.add_argument("dir", type=Path)
    audit.add_argument("--data", type=Path, help="folder with the shards (default: the track's)")
    audit.add_argument("--seed", type=int, help="one of the plan (default: drawn now)")
    audit.add_argument("--arm", choices=("a", "b"), default="a")
    audit.add_argument("--steps", type=number_of_steps, default=50, metavar="N")
    abandon = add("abandon", command_abandon, "give a plan up; it stays and is listed with its reason")
    abandon.add_argument("dir", type=Path)
    abandon.add_argument("why", help="a short sentence")
    guard = add("guard", command_guard,
                "compare with a base commit: records as they were there, new plans committed before their runs")
    guard.add_argument("base", metavar="BASE", help="a branch or commit, for example origin/main")
    add("rule", command_rule, "the standard deviation of each track, and what the rule says of the records before it")
    compare = add("compare", command_compare,
                  "A against B: loss, time, stages, verdict; a record's arm is DIR:a or DIR:b, a log or a folder of "
                  "logs will do")
    diff = add("diff", command_diff, "what leads from the script of B to that of A, by section")
    curve = add("curve", command_curve,
                "loss at equal time and time at equal loss; A and B as for compare, or record-89, beside which a "
                "record has only its final validation")
    curve.add_argument("--out", type=Path, help="draw both too: a .svg or .png file")
    export = add("export", command_export, "a run's curve for other programs: every logged step, and the validations")
    export.add_argument("run", type=Path, metavar="RUN", help="a log, of a run in progress too")
    form = export.add_mutually_exclusive_group(required=True)
    form.add_argument("--csv", action="store_true", help="comma-separated values, on standard output")
    form.add_argument("--tensorboard", type=Path, metavar="DIR",
                      help="events for TensorBoard, in a folder of the log's name there; needs the package tensorboard")
    for command, kind in ((compare, str), (diff, Path), (curve, str)):
        command.add_argument("a", type=kind, metavar="A")
        command.add_argument("b", type=kind, metavar="B")
    diff.add_argument("--code", action="store_true", help="ignore comments, docstrings and blank lines")
    leaderboard = add("leaderboard", command_leaderboard, "rewrite the tables between the markers of README.md")
    leaderboard.add_argument("--check", action="store_true", help="write nothing, exit 1 if they are stale")
    plot = add("plot", command_plot, "loss and step times of runs, or without any the history of records")
    plot.add_argument("runs", nargs="*", metavar="RUNS", help="as for compare")
    plot.add_argument("--log", nargs="?", type=Path, const=Path("logs"), metavar="LOG",
                      help="instead one run, in progress too: loss, ms a step, learning rate; of a folder (default: "
                           "logs) the log written to last")
    plot.add_argument("--readme", action="store_true", help="instead the picture of README.md, docs/curve.svg")
    plot.add_argument("--out", type=Path, default=Path("plot.svg"), help="a .svg or .png file")
    return top


def drop_output() -> None:
    """Throw away what standard output still holds, if that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        status = arguments.function(arguments)
        sys.stdout.flush()  # at the exit nobody could say in a line that the reader is gone, or the disk full
        return status
    except Failure as failure:
        print(f"records: {failure}", file=sys.stderr, flush=True)
        return failure.code
    except BrokenPipeError:  # whoever read the output has seen enough; not all was checked, so it is no success
        drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        drop_output()
        where = f"{error.filename}: " if error.filename else ""
        print(f"records: {where}{error.strerror or error}; fix: check the path, its permissions and the free space",
              file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("records: interrupted; the same command continues", file=sys.stderr, flush=True)
        return 130


if __name__ == "__main__":
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):  # the files are in UTF-8
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    sys.exit(main())
