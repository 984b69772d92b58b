"""What scripts have in common that run a training cut short: they must not leave a log that looks like a record's."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_gpt as tg


def shortened_steps(parser: argparse.ArgumentParser, training: list[str]) -> int:
    """How many steps a training has with these options of train_gpt.py, which must not be all of a record's."""
    options = tg.parse_arguments(training)
    if options.length == "auto":
        parser.error("--length: expected a number, found auto; fix: give what --check says it is")
    steps = tg.scaled_preset(tg.PRESETS[options.preset], options.length).steps
    last = steps - (options.length == 1)
    if options.stop_after is None or options.stop_after > last:
        fix = "shorten the run, so that its log does not look like a record's"
        parser.error(f"expected --stop-after N, at most {last}, found {options.stop_after or 'none'}; fix: {fix}")
    return options.stop_after
