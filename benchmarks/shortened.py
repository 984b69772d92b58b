"""What scripts have in common that run a training cut short: they must not leave a log that looks like a record's."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg


def scheduled_steps(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """How many steps a training with these options of train_gpt.py would have, if nothing cut it short."""
    if options.length == "auto":
        parser.error("--length: expected a number, found auto; fix: give what --check says it is")
    return tg.scaled_preset(tg.PRESETS[options.preset], options.length).steps


def shortened_options(parser: argparse.ArgumentParser, training: list[str]) -> argparse.Namespace:
    """The options of train_gpt.py in `training`, which have to end it early."""
    options = tg.parse_arguments(training)
    steps = scheduled_steps(parser, options)
    if options.stop_after is None or options.stop_after >= steps:
        fix = "shorten the run, so that its log does not look like a record's"
        parser.error(f"expected --stop-after N with N below {steps}, found {options.stop_after or 'none'}; fix: {fix}")
    return options
