from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from triptych.driver.flag import Flag


def test_set_wakes_a_waiting_thread() -> None:
    flag = Flag()
    assert not flag.wait(0)
    thread = threading.Thread(target=flag.wait, daemon=True)
    thread.start()
    flag.set()
    thread.join(10)
    assert not thread.is_alive()
    assert flag.wait(0)


@pytest.mark.parametrize("handle", [Flag.set, lambda flag: flag.wait(0)])
def test_signal_handler_may_use_a_flag_whose_use_it_interrupted(handle: Callable[[Flag], object]) -> None:
    flag = Flag()

    def use() -> None:
        with flag._changed:  # as ``set`` and ``wait`` hold it
            handle(flag)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it deadlocked with itself"
