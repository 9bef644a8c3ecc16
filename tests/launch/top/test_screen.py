"""What ``triptych top`` draws, at every size."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from triptych.driver.standing import RequestLine, RequestList
from triptych.launch.top.draw import Part, age, bar, progress, sparkline
from triptych.launch.top.screen import frame
from triptych.launch.top.state import State
from triptych.launch.watch.watched import Sample

CARD = {"model": "m", "dtype": "bfloat16", "device": "cpu", "backend": "native int8 on avx2", "max_num_seqs": 8}
STATS: dict[str, Any] = {
    "prepare": {"phase": "ready", "epoch": 1, "waiting": 5, "live": 6, "max_live": 12, "rejected": {"overloaded": 3}},
    "execute": {
        "phase": "ready", "epoch": 1, "decoding": 4, "pages": 100, "pages_held": 40, "pages_limbo": 5,
        "pages_cached": 15, "pages_free": 40, "steps": 100, "step_ms_median": 12.5, "cache_hit_rate": 0.25,
        "host_pages": 10, "host_pages_free": 4,
    },
    "summarize": {"phase": "ready", "epoch": 1, "tokens_per_second": 321.0, "live": 11, "unread": 2},
}  # fmt: skip


def line(name: str, *, state: str = "decode", num_tokens: int = 50, tps: float | None = 10.0) -> RequestLine:
    return RequestLine(name, state, 20, num_tokens, 100, 16, 1, int(1e9), int(2e9), tps, 0, [1.0] * 11)


def sample(*lines: RequestLine, at_s: float = 1.0, left_out: int = 0, **execute: Any) -> Sample:
    stats = copy.deepcopy(STATS)
    stats["execute"] |= execute
    return Sample(at_s, stats, RequestList([*lines], left_out, int(5e9), []))


def state_of(*samples: Sample) -> State:
    state = State(Path("/run/x"), CARD, {"max_queue": 10})
    for one in samples:
        state.see(one)
    return state


def drawn(state: State, width: int = 80, height: int | None = 24) -> str:
    console = Console(width=width, height=height or 50, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    console.print(frame(state, width=width, height=height, now_s=10.0))
    console.file.close()
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("height", [16, 24, 50])
def test_frame_fits_the_terminal(width: int, height: int) -> None:
    text = drawn(state_of(sample(*(line(f"request-{i}" * 3) for i in range(100)))), width, height)
    assert len(text.splitlines()) <= height
    assert max(map(len, text.splitlines())) <= width
    for words in ("prepare", "execute", "summarize", "healthy", "more do not fit"):
        assert words in text


def test_shown_values_are_those_of_the_stages() -> None:
    text = drawn(state_of(sample()), 120)
    assert "m · bfloat16 on cpu (native int8 on avx2) · /run/x" in text
    for words in ("5/10", "6/12", "refused", "4/8", "40/100", "cached 15", "limbo 5", "hits 25%", "host 6/10", "321"):
        assert words in text


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_panel_shortens_labels_and_drops_no_value(width: int) -> None:
    busy = {"steps": 350, "pages": 3072, "pages_held": 1024, "pages_limbo": 16, "pages_cached": 1024}
    state = state_of(sample(), sample(at_s=2.0, **busy, step_ms_max=34.0))
    text = drawn(state, width, 50)
    for value in ("250/s", "12.5", "34", "1024/3072", "1.02 k", "16", "25%", "60%" if width == 60 else "6/10"):
        assert value in text
    for label in ("credits", "tokenizer", "records", "held", "abort", "bad"):
        assert re.search(rf"{label}[\w·]* .*\d", text)
    without = state_of(sample(host_pages=0, preemptions=12))
    assert re.search(r"hits 25% +(preempted|lost) 12", drawn(without, width, 50))


def test_request_is_a_line_with_its_progress() -> None:
    [row] = [text for text in drawn(state_of(sample(line("mine")))).splitlines() if text.startswith("mine")]
    assert row.split() == ["mine", "decode", "████████░░░░░░░░", "50/100", "20", "10", "4.0s"]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_long_id_leaves_room_for_the_numbers(width: int) -> None:
    shown = drawn(state_of(sample(line("chatcmpl-" + 32 * "0", num_tokens=1000))), width)
    assert re.search(r"chat\S*… .* 1000/100 +20 +10 +4\.0s", shown), shown
    assert re.search(r"tokens +prompt +tok/s +age", shown), shown


def test_ended_requests_come_last_and_the_order_can_be_chosen() -> None:
    state = state_of(
        sample(line("a", state="ended"), line("b", num_tokens=1, tps=9.0), line("c", num_tokens=9, tps=3.0))
    )
    names = {}
    for _ in range(3):
        names[state.order] = "".join(one.request_id for one in state.lines())
        state.next_order()
    assert names == {"arrival": "bca", "rate": "bca", "progress": "cba"}


def test_problems_are_shown_in_the_header() -> None:
    state = state_of(sample())
    assert state.sample is not None
    state.sample.stats["execute"].update(phase="loading", epoch=3)  # type: ignore[attr-defined]
    head = drawn(state, 120).splitlines()[0]
    assert "execute is loading" in head
    assert "2 restarts" in head
    state.miss(7.0)
    state.miss(9.0)
    assert "no answer for 3.0s" in drawn(state).splitlines()[0]
    state.see(sample())
    assert "healthy" in drawn(state).splitlines()[0]


def test_stage_without_statistics_is_not_an_error() -> None:
    state = state_of(sample())
    assert state.sample is not None
    for role in STATS:
        state.sample.stats[role].clear()  # type: ignore[attr-defined]
        state.sample.stats[role].update(phase="starting", epoch=1)  # type: ignore[attr-defined]
    assert "prepare is starting" in drawn(state)


def test_step_rate_is_computed_between_two_samples() -> None:
    state = state_of(sample(steps=100, at_s=1.0), sample(steps=140, at_s=3.0))
    assert state.steps_per_s == 20
    state.see(sample(steps=140, at_s=4.0))
    assert list(state.step_times_ms) == [12.5, 12.5, 0.0]
    state.see(sample(steps=2, at_s=5.0))  # execute was restarted
    assert state.steps_per_s == 0


def test_control_characters_of_a_request_id_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in drawn(state_of(sample(line("a\x1b[31m"))))


@pytest.mark.parametrize("name", ["[/]", "[red]x[/red]", "job[1]"])
def test_brackets_in_a_request_id_are_not_markup(name: str) -> None:
    assert name in drawn(state_of(sample(line(name))), 120)


def test_chart_column_is_proportional_to_its_value() -> None:
    assert sparkline([0, 1, 4, 8], 6) == "   ▂▅█"
    assert sparkline([], 3) == sparkline([0.0], 3) == "   "
    assert sparkline(range(100), 4)[-1] == "█"


@pytest.mark.parametrize(
    ("counts", "width", "expected"),
    [((1, 1), 4, "aabb"), ((99, 1), 4, "aaab"), ((0, 1), 3, "bbb"), ((0, 0), 3, "   "), ((1, 1000), 5, "abbbb")],
)
def test_nonzero_parts_are_visible_in_a_bar(counts: tuple[int, int], width: int, expected: str) -> None:
    assert bar([Part(counts[0], "a", ""), Part(counts[1], "b", "")], width).plain == expected


@pytest.mark.parametrize(
    ("done", "total", "expected"), [(0, 9, "░░░░"), (1, 999, "█░░░"), (5, 10, "██░░"), (12, 10, "████"), (0, 0, "░░░░")]
)
def test_bar_is_empty_only_for_zero(done: int, total: int, expected: str) -> None:
    assert progress(done, total, 4).plain == expected


@pytest.mark.parametrize(("seconds", "text"), [(0.42, "0.4s"), (12.3, "12s"), (187, "3m07"), (7260, "2h01")])
def test_age_is_short(seconds: float, text: str) -> None:
    assert age(seconds) == text
