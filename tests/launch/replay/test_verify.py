"""A recorded schedule is replayed step for step, whatever happened in it; and a difference is found."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.checks import assert_quiet, random_prompt
from tests.pipeline.conftest import hash_driver
from tests.pipeline.killing import kill
from tests.waiting import eventually
from tests.workers.execute.clients import crowd
from tests.workers.execute.factories import make_beams, make_engine, make_sequence, make_sequences, run
from tests.workers.execute.soak import Visitors
from triptych import Driver
from triptych.launch.replay.verify import verify
from triptych.protocol.config import DEMO_CHECKPOINT, POLICIES
from triptych.protocol.errors import ConfigError
from triptych.workers.execute.hash_lm import HashRunner
from triptych.workers.execute.step import StepInputs

LIVES = 4


@pytest.mark.parametrize("policy", POLICIES)
def test_random_schedules_are_replayed_exactly(policy: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    path = tmp_path / "trace"
    with path.open("w") as file:
        for life in range(LIVES):
            Visitors(random.Random(f"a/{policy}/{life}"), policy, counts, trace_file=file).live()
    verdict = verify(path)
    assert verdict.difference is None
    assert (verdict.num_lives, verdict.num_steps) == (LIVES, counts["steps"])
    names = ("num_preemptions", "num_swaps", "num_hit_tokens", "expired", "copies", "hypotheses")
    seen = {name: counts[name] for name in names}
    assert all(seen.values()), seen
    assert verdict.num_aborted > 0


@pytest.mark.parametrize("host_pages", [0, 40], ids=["from the prompt", "swapped"])
def test_preempted_beam_search_is_replayed_exactly(host_pages: int, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    beams = make_beams(0, 3, num_tokens=9, max_tokens=20)
    with path.open("w") as file:
        clients = crowd(beams, host_pages=host_pages, trace_file=file)
        clients.close()
    verdict = verify(path)
    assert (verdict.difference, verdict.num_requests) == (None, 5)
    assert clients.engine.stats.num_preemptions >= 3
    assert (clients.engine.stats.num_swaps > 0) == (host_pages > 0)
    assert '"choices":{"0":{"ends":["length","length","length"]}}' in path.read_text()


def test_failed_sequence_is_replayed_as_such(tmp_path: Path) -> None:
    class FailsOne(HashRunner):
        def launch(self, inputs: StepInputs) -> None:
            if any(sequence.key[0] == 2 for sequence in inputs.sampled):
                raise ValueError("bad luck")
            super().launch(inputs)

    path = tmp_path / "trace"
    with path.open("w") as file:
        run(make_engine(*make_sequences(4), runner=FailsOne, trace_file=file))
    assert '"failed":{"2":' in path.read_text()
    assert verify(path).is_exact


def test_trace_without_the_choices_of_a_beam_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("w") as file:
        run(make_engine(*make_beams(0, 2), trace_file=file))
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    path.write_text("\n".join(json.dumps({k: v for k, v in line.items() if k != "choices"}) for line in lines))
    with pytest.raises(ConfigError, match="has no choice for the beam search in slot 0"):
        verify(path)


def test_chunks_paced_by_their_cost_are_replayed_exactly(tmp_path: Path) -> None:
    path, rng = tmp_path / "trace", random.Random(5)
    clock = itertools.accumulate(rng.randrange(1_000_000, 3_000_000) for _ in itertools.count())
    with path.open("w") as file:
        engine = make_engine(
            *make_sequences(4, num_tokens=6, max_tokens=200),
            trace_file=file,
            clock=lambda: next(clock),
            itl_target_ms=4.0,
            max_num_seqs=8,
        )
        while len(engine.scheduler.rows) < 4:
            engine.step()
        engine.add(make_sequence(9, num_tokens=400, max_tokens=5))
        run(engine)
    assert verify(path).is_exact


def record(path: Path, model: str, **options: Any) -> None:
    """Shared prefixes, aborts, preemptions, a deadline, and stop strings of a whole pipeline."""
    rng = random.Random(11)
    prefixes = [random_prompt(rng, 60, 90) for _ in range(2)]
    special: list[dict[str, Any]] = [{"deadline_ms": 100}, {"cache_salt": "x"}, {"ignore_eos": False, "stop": "a"}]
    with Driver(model, lease_s=5.0, trace=str(path), **options) as driver:
        streams = [
            driver.submit(
                rng.choice(prefixes) + random_prompt(rng, 3, 30),
                **{"max_tokens": rng.randrange(4, 80), "ignore_eos": True, **own},
            )
            for own in [*([{}] * 40), *special]
        ]
        for stream in streams[::7]:
            next(iter(stream), None)
            stream.abort()
        for stream in streams:
            stream.wait(60)
        assert_quiet(driver)


def test_pipeline_is_replayed_exactly(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, "hash-lm", hash_step_ms=1.0, num_pages=40, max_num_seqs=8, prefill_chunk=32, safety_margin=0.0)
    verdict = verify(path)
    assert verdict.difference is None
    assert 40 <= verdict.num_requests <= 43  # some ended while they waited for a credit
    assert min(verdict.num_preemptions, verdict.num_cached_tokens, verdict.num_aborted) > 0


@pytest.mark.skipif(not DEMO_CHECKPOINT.exists(), reason="the demo checkpoint is not here")
def test_pipeline_with_a_real_model_is_replayed_exactly(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, "demo", num_pages=30, max_num_seqs=8, prefill_chunk=32, safety_margin=0.0)
    verdict = verify(path)
    assert verdict.difference is None
    assert 40 <= verdict.num_requests <= 43
    assert min(verdict.num_preemptions, verdict.num_cached_tokens) > 0


def test_trace_written_by_two_epochs_is_replayed_exactly(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with hash_driver(hash_step_ms=1.0, trace=str(path), lease_s=30.0) as driver:
        streams = [driver.submit([index, 7], max_tokens=300) for index in range(1, 6)]
        deltas = iter(streams[0])
        while next(deltas).num_tokens < 40:  # whole pages, which outlive execute without a trace
            pass
        kill(driver, "execute")
        for stream in streams:
            stream.result(60)
        eventually(lambda: driver.healthy, timeout=60)  # on a busy machine, all may have been answered before the kill
        assert_quiet(driver, timeout=60)
        num_lives = 1 + driver.stats()["restarts"]["execute"]
    verdict = verify(path)
    assert (verdict.difference, verdict.num_lives) == (None, num_lives)
    assert num_lives > 1


def a_trace(path: Path) -> list[str]:
    """Lines of a small recording."""
    with path.open("w") as file:
        run(make_engine(*make_sequences(3, num_tokens=12, max_tokens=9), trace_file=file, num_pages=12))
    return [line for line in path.read_text().splitlines() if line]


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another order": ("decodes", lambda line: line["decodes"].reverse()),
    "a page less": ("pages_free", lambda line: line.update(pages_free=line["pages_free"] - 1)),
    "another end": ("finished", lambda line: line.update(finished={"1": "stop"})),
    "a step left out": ("step", lambda line: line.update(step=line["step"] + 1)),
}


@pytest.mark.parametrize(("field", "change"), CHANGES.values(), ids=CHANGES)
def test_first_difference_is_named(field: str, change: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    lines = a_trace(tmp_path / "trace")
    index = next(i for i, line in enumerate(lines) if len(json.loads(line).get("decodes", [])) == 3)
    values = json.loads(lines[index])
    change(values)
    lines[index] = json.dumps(values)
    (tmp_path / "trace").write_text("\n".join(lines))
    difference = verify(tmp_path / "trace").difference
    assert difference is not None
    assert (difference.line, difference.field) == (index + 1, field)


def test_scheduler_with_other_settings_decides_differently(tmp_path: Path) -> None:
    lines = a_trace(tmp_path / "trace")
    header = json.loads(lines[0])
    header["scheduler"]["prefill_chunk"] = 5
    (tmp_path / "trace").write_text("\n".join([json.dumps(header), *lines[1:]]))
    assert verify(tmp_path / "trace").difference is not None


def test_line_truncated_by_a_kill_is_skipped(tmp_path: Path) -> None:
    lines = a_trace(tmp_path / "trace")
    (tmp_path / "trace").write_text("\n".join([*lines[:5], lines[5][:20], *lines, lines[-1][:9]]))
    assert (verify(tmp_path / "trace").is_exact, verify(tmp_path / "trace").num_lives) == (True, 2)


BAD: dict[str, tuple[str, str]] = {
    "nothing": ("", "has no steps"),
    "no header": ('{"step": 1, "planned_ns": 0}\n', "line 1: a trace must begin with"),
    "another format": ('{"trace": "", "format": 99}\n', "line 1: the trace has format 99"),
    "no JSON": ("{\nx\n", "line 1: not a JSON object"),
    "nested too deep": ("[" * 9999 + "\n", "line 1: not a JSON object"),
    "half a header": ('{"trace": "", "format": 1}\n', "line 1: it has no 'page_size'"),
}


@pytest.mark.parametrize(("text", "reason"), BAD.values(), ids=BAD)
def test_file_that_is_not_a_trace_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        verify(tmp_path / "trace")


def test_salts_separate_prefixes_in_the_replay_and_are_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("w") as file:
        engine = make_engine(trace_file=file, prefix_cache=True)
        for index, salt in enumerate(("", "a tenant", "a tenant", "another")):
            sequence = make_sequence(index, num_tokens=20, speaker=0)
            sequence.cache_salt = salt
            engine.add(sequence)
            run(engine)
    verdict = verify(path)
    assert (verdict.difference, verdict.num_cached_tokens) == (None, 19)
    assert "tenant" not in path.read_text()


def test_trace_contains_no_prompt_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with path.open("w") as file:
        engine = make_engine(trace_file=file)
        engine.add(make_sequence(0, num_tokens=40))
        engine.add(make_sequence(1, num_tokens=40, speaker=0))
        engine.add(make_sequence(2, num_tokens=40))
    adds = [json.loads(line)["tokens"] for line in path.read_text().splitlines() if "add" in line]
    assert adds[0] == adds[1] != adds[2]
    assert make_sequence(0, num_tokens=40).tokens[:40].tobytes().hex() not in path.read_text()
