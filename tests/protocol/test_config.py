"""An invalid setting is refused when the config is made, with its value and the limits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from triptych.protocol.config import (
    CacheConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
    ServiceConfig,
    SupervisorConfig,
)
from triptych.protocol.errors import ConfigError

PARTS = (ModelConfig, CacheConfig, SchedulerConfig, ServiceConfig, SupervisorConfig)
# name, just below the limit, lowest, highest, just above the limit (None: there is no such limit)
LIMITS: list[tuple[str, Any, Any, Any, Any]] = [
    ("max_model_len", 1, 2, None, None),
    ("threads", 0, 1, 4096, 4097),
    ("hash_step_ms", -0.1, 0, 60_000, 60_001),
    ("hash_token_us", -0.1, 0, 1_000_000, 1_000_001),
    ("itl_target_ms", 0.09, 0.1, 60_000, 60_001),
    ("page_size", 0, 1, 4096, 8192),
    ("num_pages", 1, 2, 2**31 - 1, 2**31),
    ("host_pages", -1, 0, 2**31 - 1, 2**31),
    ("state_snapshots", -1, 0, 2**20, 2**20 + 1),
    ("kv_memory_fraction", 0, 0.001, 1, 1.001),
    ("max_kv_bytes", (1 << 20) - 1, 1 << 20, None, None),
    ("max_num_seqs", 0, 1, 65_536, 65_537),
    ("prefill_chunk", 0, 1, 1 << 20, (1 << 20) + 1),
    ("mixed_prefill_tokens", 0, 1, 1 << 20, (1 << 20) + 1),
    ("max_num_batched_tokens", 0, 1, 1 << 20, (1 << 20) + 1),
    ("safety_margin", -0.1, 0, 1, 1.1),
    ("max_prefill_skip", 0, 1, 1 << 20, (1 << 20) + 1),
    ("max_decode_skip", 0, 1, 1 << 20, (1 << 20) + 1),
    ("max_kv_reads", 0, 1, None, None),
    ("priority_ageing", 0, 1, 1 << 20, (1 << 20) + 1),
    ("num_speculative_tokens", -1, 0, 15, 16),
    ("decode_join_fill", -0.1, 0, 1, 1.1),
    ("skip_ahead", -1, 0, 1 << 20, (1 << 20) + 1),
    ("max_queue", 0, 1, 1 << 20, (1 << 20) + 1),
    ("max_frame_bytes", 1023, 1024, None, (1 << 30) + 1),
    ("max_pending_bytes", (8 << 20) - 1, 8 << 20, None, None),
    ("window_tokens", 0, 1, 1 << 20, (1 << 20) + 1),
    ("report_interval_ms", -0.1, 0, 1000, 1000.1),
    ("grammar_timeout_s", 0.04, 0.05, 60, 61),
    ("grammar_bytes", (1 << 20) - 1, 1 << 20, 1 << 40, (1 << 40) + 1),
    ("lease_s", 0.04, 0.05, 86_400.0, 86_401.0),
    ("max_client_requests", 0, 1, 1 << 20, (1 << 20) + 1),
    ("max_client_bytes", 0, 1, 1 << 40, (1 << 40) + 1),
    ("tokenize_timeout_s", 0.001, 0.01, 86_400, 86_401),
    ("max_records", 0, 1, 1 << 20, (1 << 20) + 1),
    ("arena_bytes", (1 << 16) - 1, 1 << 16, 1 << 40, (1 << 40) + 1),
    ("start_timeout_s", 0.09, 0.1, None, None),
    ("hang_s", 0.09, 0.1, None, None),
    ("tensor_parallel_size", 0, 1, None, None),
    ("max_restarts", -1, 0, None, None),
    ("degrade_after", -1, 0, None, None),
    ("journal_flush_ms", 0.5, 1, 60_000, 60_001),
    ("restart_window_s", 0.09, 0.1, None, None),
]
INSIDE = [(name, value) for name, _, low, high, _ in LIMITS for value in (low, high) if value is not None]
OUTSIDE = [(name, value) for name, below, _, _, above in LIMITS for value in (below, above) if value is not None]


def test_client_may_have_more_requests_where_the_queue_is_longer() -> None:
    assert [ServiceConfig(max_queue=size).client_requests for size in (8, 1024, 4000)] == [768, 768, 3000]
    assert ServiceConfig(max_queue=4000, max_client_requests=5).client_requests == 5


def options_of(config: PipelineConfig) -> dict[str, Any]:
    return {name: value for part in dataclasses.asdict(config).values() for name, value in part.items()}


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_value_at_its_limit_is_accepted(name: str, value: Any) -> None:
    assert options_of(PipelineConfig.from_options(**{name: value}))[name] == value


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_value_beyond_its_limit_is_refused_with_value_and_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        PipelineConfig.from_options(**{name: value})
    assert str(value) in caught.value.message
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["model", "kernels", "draft_model", "journal", "curve_keys", "trace"])
def test_empty_text_is_not_taken_for_a_setting_that_was_not_given(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is empty") as caught:
        PipelineConfig.from_options(**{name: ""})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("host_pages", "16", "host_pages must be int, got '16'"),
        ("page_size", 16.0, "page_size must be int | None, got 16.0"),
        ("max_num_seqs", True, "max_num_seqs must be int | None, got True"),
        ("kv_memory_fraction", "half", "kv_memory_fraction must be float | None, got 'half'"),
        ("fork_workers", 1, "fork_workers must be bool, got 1"),
        ("model", None, "model must be str, got None"),
        ("lora_modules", "a=b", "lora_modules must be tuple, got 'a=b'"),
        ("lora_modules", ["a=b", 5], "lora_modules must be str, got 5"),
    ],
)
def test_value_of_another_type_is_refused_with_its_name(name: str, value: Any, words: str) -> None:
    """Before a process starts: otherwise the workers refuse it, and the caller only sees that they died."""
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.from_options(**{name: value})
    assert caught.value.message == words
    assert caught.value.param == name


def test_path_may_be_given_as_a_string() -> None:
    config = PipelineConfig.from_options(model=Path("/models/own"), journal=Path("/disk/journal"))
    assert (config.model.model, config.service.journal) == ("/models/own", "/disk/journal")


@pytest.mark.parametrize("given", [["a=/b"], ("a=/b",)])
def test_list_of_names_may_be_a_tuple(given: Any) -> None:
    assert PipelineConfig.from_options(lora_modules=given).model.lora_modules == ("a=/b",)


@pytest.mark.parametrize("name", ["hang_s", "lease_s", "safety_margin", "kv_memory_fraction", "hash_step_ms"])
def test_nan_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PipelineConfig.from_options(**{name: float("nan")})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("dtype", "float8"),
        ("device", "tpu"),
        ("device", "cuda:"),
        ("device", "cuda:abc"),
        ("device", "cuda:-1"),
        ("backend", "onnx"),
        ("quantization", "int3"),
        ("policy", "lottery"),
        ("preemption", "shoot"),
        ("page_size", 24),
        ("submit", "tcp://127.0.0.1:5555"),  # without keys
        ("submit", "tcp://127.0.0.1:0"),
        ("follow", "tcp://*:5555"),
    ],
)
def test_unknown_name_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig.from_options(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    "host",
    ["*", "0.0.0.0", "0", "0.0", "0x0", "00.0.0.0", "[::]", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "[*]"],
)
def test_wildcard_addresses_are_refused_in_every_spelling(host: str) -> None:
    with pytest.raises(ConfigError, match="give a single address"):
        PipelineConfig.from_options(submit=f"tcp://{host}:5555", curve_keys="keys")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.0", "[::1]", "[fe80::1%eth0]", "example.org", "eth0", "0a.example"]
)
def test_single_address_is_accepted(host: str) -> None:
    assert PipelineConfig.from_options(submit=f"tcp://{host}:5555", curve_keys="keys").service.submit is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cuda:3"),
        ("device", "cpu"),
        ("backend", "native"),
        ("quantization", "int8"),
        ("dtype", "bfloat16"),
        ("submit", "ipc:///run/t/submit"),
    ],
)
def test_known_name_is_accepted(name: str, value: str) -> None:
    assert options_of(PipelineConfig.from_options(**{name: value}))[name] == value


def test_limits_of_every_numeric_setting_are_tested() -> None:
    named = {name for name, *_ in LIMITS}
    numeric = {
        field.name
        for part in PARTS
        for field in dataclasses.fields(part)
        if {"int", "float"} & set(str(field.type).split(" | "))
    }
    assert numeric == named


def test_unknown_option_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="unknown option 'x', known are: arena_bytes, ") as caught:
        PipelineConfig.from_options(x=16)
    assert caught.value.param == "x"
    with pytest.raises(ConfigError, match=r"unknown option 'page_sise'; did you mean page_size\?"):
        PipelineConfig.from_options(page_sise=16)


def test_no_two_parts_share_an_option_name() -> None:
    names = [field.name for part in PARTS for field in dataclasses.fields(part)]
    assert len(names) == len(set(names))


def test_pending_prompts_may_be_as_large_as_a_frame() -> None:
    with pytest.raises(ConfigError, match="max_pending_bytes"):
        PipelineConfig.from_options(max_frame_bytes=1 << 21, max_pending_bytes=1 << 20)


def test_config_survives_json() -> None:
    config = PipelineConfig.from_options(model="hash-lm", page_size=4, threads=2, journal="/x/journal", hang_s=0.5)
    assert PipelineConfig.from_json(config.to_json()) == config


def test_default_config_survives_json() -> None:
    assert PipelineConfig.from_json(PipelineConfig().to_json()) == PipelineConfig()


def test_config_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineConfig().cache.page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(("rows", "live"), [(1, 2), (2, 3), (32, 48), (256, 384)])
def test_max_live_defaults_to_one_and_a_half_times_the_rows(rows: int, live: int) -> None:
    assert SchedulerConfig(max_num_seqs=rows).max_live == live


@pytest.mark.parametrize(("given", "budget"), [(None, 104), (64, 64)])
def test_step_holds_a_chunk_and_a_token_for_each_row(given: int | None, budget: int) -> None:
    config = SchedulerConfig(max_num_seqs=4, prefill_chunk=100, max_num_batched_tokens=given)
    assert config.token_budget == budget


def test_pipeline_config_contains_every_part() -> None:
    assert set(get_type_hints(PipelineConfig).values()) == set(PARTS)
