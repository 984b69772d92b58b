"""What the tests themselves rely on: the limit on their time."""

from __future__ import annotations

import signal
import time

import pytest

from helpers import time_limit

pytestmark = pytest.mark.fast


def test_waiting_is_no_processor_time():
    """On a machine with much else to do a test waits for most of its time."""
    with time_limit(processor_seconds=0.2, seconds=600):
        time.sleep(0.5)


def test_computing_has_a_limit():
    with pytest.raises(TimeoutError, match=r"after 0.05 s of processor time"), time_limit(processor_seconds=0.05):
        while True:
            pass


def test_waiting_for_ever_has_one_too():
    with pytest.raises(TimeoutError, match=r"after 0.05 s$"), time_limit(seconds=0.05):
        time.sleep(600)


def test_the_limit_ends_with_the_test():
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGPROF)
    with time_limit(processor_seconds=0.1, seconds=0.1):
        pass
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
