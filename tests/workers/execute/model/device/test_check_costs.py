"""What proposals cost is measured: a step with them is serial, and a decode is not."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.workers.execute.model.device.check_costs import measure_check_costs
from triptych.workers.execute.step import StepInputs


class Clocked:
    """Takes 1 ms to launch a step, and 4 to compute it: for one token; more for several, and for each of them."""

    def __init__(self, several_s: float, each_s: float, launch_s: float = 0.001) -> None:
        self.now = 0.0
        self._launch_s = launch_s
        self._several_s, self._each_s = several_s, each_s
        self._left_s = 0.0
        self.num_tokens: list[int] = []

    def launch(self, inputs: StepInputs) -> None:
        assert inputs.block_tables.shape[1] == 2, "a graph would not hold it"
        count = len(inputs.token_ids)
        self.num_tokens.append(count)
        self.now += self._launch_s
        self._left_s = 0.004 + (count > 1) * self._several_s + count * self._each_s

    def collect(self) -> None:
        self.now += self._left_s


def measure(monkeypatch: pytest.MonkeyPatch, *times: float, max_rows: int = 256, max_proposals: int = 3) -> Any:
    runner: Any = Clocked(*times)
    monkeypatch.setattr("time.perf_counter", lambda: runner.now)
    costs = measure_check_costs(runner, max_rows=max_rows, max_proposals=max_proposals, max_pages=2)
    return costs, set(runner.num_tokens)


def test_cost_of_a_step_includes_its_launch_and_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, sizes = measure(monkeypatch, 0.0006, 0.0)
    assert sizes == {1, 4, 128}
    assert costs.step == pytest.approx((1 + 0.6 + 0.2) / 4)
    assert costs.sequence == pytest.approx(0.03 / 4)
    assert (costs.token, costs.max_tokens, costs.beside_prompts) == (0.001, 128, False)


def test_cost_of_a_token_is_that_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, _ = measure(monkeypatch, 0.0, 0.0001)
    assert costs.token == pytest.approx(0.1 / 4.1)


def test_decode_that_waits_for_its_launches_takes_as_long_as_they(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs."""
    costs, _ = measure(monkeypatch, 0.0, 0.0, 0.01)
    assert costs.step == pytest.approx((4 + 0.2) / 10)


def test_costs_are_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as where one decode has no graph, or the second measurement happens to be faster."""
    costs, sizes = measure(monkeypatch, -0.003, 0.0, max_rows=1)
    assert (costs.step, costs.token) == (0.0, 0.001)
    assert sizes == {1, 4}
