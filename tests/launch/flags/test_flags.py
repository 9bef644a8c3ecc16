"""Flags and environment variables: every field of the config is one of each."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from tests.launch.conftest import Triptych
from triptych.launch.cli import app
from triptych.launch.flags.aliases import ALIASES, canonical
from triptych.launch.flags.derived import with_flags
from triptych.launch.gateway.config import GatewayConfig
from triptych.protocol.config import PipelineConfig
from triptych.protocol.sampling import SamplingParams

# For every field, a value that is not its default, as written on a command line and as parsed.
CONFIG_VALUES: dict[str, Any] = {
    "model": "hash-lm",
    "dtype": "float32",
    "device": "cuda:1",
    "submit": "ipc:///tmp/a",
    "follow": "ipc:///tmp/b",
    "journal": "/tmp/journal",
    "curve_keys": "/tmp/keys",
    "share_requests": True,
    "page_size": 32,
    "kv_dtype": "int8",
    "prefix_cache": False,
    "retain_kv": False,
    "recovery": "exact",
    "journal_flush": "step",
    "journal_flush_ms": 50.0,
    "fork_workers": False,
    "preemption": "swap",
    "num_speculative_tokens": 8,
    "draft_model": "/models/small",
    "chat_template": "/models/own.jinja",
    "decode_join_fill": 0.75,
    "trace": "/tmp/trace.jsonl",
    "backend": "native",
    "kernels": "avx2",
    "quantization": "int8",
    "deterministic": True,
    "cuda_graphs": False,
    "overlap": False,
    "kv_memory_fraction": 0.25,
    "safety_margin": 0.5,
    "tensor_parallel_size": 4,
    "lora_modules": ("chat=/adapters/chat",),
    "policy": "fifo",
    "max_pending_bytes": 1 << 30,
}
SAMPLING_VALUES: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["none"], None),
    "stop": (["a", "b c"], ("a", "b c")),
    "stop_token_ids": (["1", "2"], (1, 2)),
    "logit_bias": (["3=-1.5", "4=2"], {3: -1.5, 4: 2.0}),
    "ignore_eos": ([], True),
    "include_stop_str": ([], True),
    "skip_special_tokens": ([], False),
    "best_of": (["4"], 4),
    "num_beams": (["4"], 4),
    "early_stopping": (["never"], "never"),
}


def config_fields() -> Iterator[tuple[str, str, Any]]:
    """Owner and name of every field of the config, and a value for it."""
    for owner, part in get_type_hints(PipelineConfig).items():
        for item in dataclasses.fields(part):
            yield owner, item.name, CONFIG_VALUES.get(item.name, 7.0 if "float" in str(item.type) else 1 << 20)


@cache
def _command() -> Any:
    """A verb that accepts both kinds of options, and returns what it receives. Made once: that takes most of a call."""
    probe = typer.Typer(context_settings={"token_normalize_func": canonical})

    @probe.command()
    @with_flags
    def verb(*, config: PipelineConfig, params: SamplingParams) -> tuple[PipelineConfig, SamplingParams]:
        return config, params

    return typer.main.get_command(probe)


def parse(arguments: list[str], env: dict[str, str] | None = None) -> tuple[PipelineConfig, SamplingParams]:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (env or {}).items():
            patch.setenv(name, text)
        received: tuple[PipelineConfig, SamplingParams] = _command().main(arguments, standalone_mode=False)
    return received


def value_of(config: PipelineConfig, owner: str, name: str) -> Any:
    return getattr(getattr(config, owner), name)


FIELDS = [(owner, name, 64 if name in ("threads", "max_num_seqs") else value) for owner, name, value in config_fields()]


@pytest.mark.parametrize(("owner", "name", "value"), FIELDS, ids=[name for _, name, _ in FIELDS])
def test_every_config_field_is_a_flag_and_an_environment_variable(owner: str, name: str, value: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    switch = {True: [flag], False: [f"--no-{flag[2:]}"]}
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    by_flag, _ = parse(switch[value] if isinstance(value, bool) else [flag, text])
    by_env, _ = parse([], env={f"TRIPTYCH_{name.upper()}": text})
    assert value_of(by_flag, owner, name) == value_of(by_env, owner, name) == value


def test_flag_names_of_other_servers_are_accepted() -> None:
    for alias, name in ALIASES.items():
        if name not in ("drain-timeout", "tool-parser", "sampling-defaults", "ssl-certfile", "ssl-keyfile"):  # serve
            known = {"lora-modules": "a=b", "kv-dtype": "int8", "num-speculative-tokens": "3"}
            value = [] if name.startswith("no-") else [known.get(name, "64")]
            assert parse([f"--{alias}", *value]) == parse([f"--{name}", *value]) != parse([])


def test_integers_are_taken_as_vllm_takes_them() -> None:
    flags = "--max-model-len 4k --max-num-batched-tokens 2K --max-kv-bytes 8G --max-tokens 1k"
    config, sampling = parse(flags.split(), {"TRIPTYCH_NUM_PAGES": "1m"})
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (4000, 2048)
    assert (config.cache.max_kv_bytes, config.cache.num_pages, sampling.max_tokens) == (8 << 30, 1_000_000, 1000)


def test_short_form_of_tensor_parallelism_is_accepted() -> None:
    assert parse(["--model", "demo", "-tp", "2"])[0].model.tensor_parallel_size == 2


def test_without_flags_everything_has_its_default() -> None:
    assert parse([]) == (PipelineConfig(), SamplingParams())


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(SamplingParams)])
def test_every_sampling_parameter_is_a_flag(name: str) -> None:
    texts, value = SAMPLING_VALUES.get(name, (["1"], 1))
    flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
    arguments = [part for text in texts for part in (flag, text)] or [flag]
    _, params = parse(arguments)
    assert getattr(params, name) == value


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (":99999", "http is ':99999': port 99999, the limits are 0 and 65535"),
        ("0.0.0.0:" + "9" * 5000, "the limits are 0 and 65535"),
        ("localhost", "http is 'localhost', the form is"),
        ("http://localhost:80", "http is 'http://localhost:80', the form is"),
    ],
    ids=["port", "long", "form", "url"],
)
def test_impossible_address_is_refused_before_anything_starts(
    address: str, words: str, triptych: Triptych, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.driver.driver.Driver.start", lambda *_, **__: pytest.fail("the driver was started"))
    code, _, errors = triptych("serve", "--model", "hash-lm", "--http", address)
    assert (code, words in errors) == (2, True)


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "bench", "replay"])
def test_help_shows_complete_flag_names(
    verb: str, columns: int, triptych: Triptych, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = triptych(verb, "--help").out
    parameters = typer.main.get_command(app).commands[verb].params  # type: ignore[attr-defined]
    flags = {flag.strip() for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("-") and not re.search(rf"{flag}(?![\w-])", shown)} == set()
    assert "…" not in shown


def test_every_flag_has_a_help_text() -> None:
    for verb in ("serve", "generate", "chat", "info"):
        flags = typer.main.get_command(app).commands[verb].params  # type: ignore[attr-defined]
        assert [flag.name for flag in flags if not getattr(flag, "help", None)] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--page-size", "5"], "page_size is 5, it must be a power of two from 1 to 4096"),
        (["--page-size", "4097"], "page_size is 4097, it must be a power of two from 1 to 4096"),
        (["--max-model-len", "0"], "max_model_len is 0, the least is 2"),
        (["--num-pages", "1"], "num_pages is 1, the limits are 2 and 2147483647"),
        (["--dtype", "int3"], "dtype is 'int3', known are: auto, float32"),
        (["--policy", "lottery"], "policy is 'lottery', known are: fifo"),
        (["--submit", "tcp://*:1"], "give a single address, not a wildcard"),
        (["--submit", "tcp://127.0.0.1:5555"], "make them with triptych keys init"),
        (["--num-pages", "many"], "Invalid value for '--num-pages': 'many' is not an integer"),
        (["--num-pages", "k"], "Invalid value for '--num-pages': 'k' is not an integer"),
        (["--max-num-seqs", "16.0"], "Invalid value for '--max-num-seqs': '16.0' is not an integer"),
        (["--hang-s", "soon"], "Invalid value for '--hang-s': 'soon' is not a number"),
        (["--stop-token-ids", "x"], "Invalid value for '--stop-token-ids': 'x' is not an integer"),
        (["--max-tokens", "many"], "'many' is neither an integer nor none"),
        (["--no-such-flag"], "No such option"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) else "",
)
def test_wrong_value_is_refused_with_its_limits(triptych: Triptych, arguments: list[str], words: str) -> None:
    outcome = triptych("generate", "hi", "--model", "hash-lm", *arguments)
    assert outcome.code == 2
    assert words in outcome.err


def test_drain_timeout_that_is_not_a_number_is_refused(triptych: Triptych) -> None:
    outcome = triptych("serve", "--model", "hash-lm", "--drain-timeout", "soon")
    assert (outcome.code, "'--drain-timeout': 'soon' is not a number" in outcome.err) == (2, True)


@pytest.mark.parametrize("value", ["-1", "nan", "86401"])
def test_impossible_drain_timeout_is_refused(triptych: Triptych, value: str) -> None:
    outcome = triptych("serve", "--model", "hash-lm", "--drain-timeout", value)
    assert outcome.code == 2
    assert f"drain_timeout is {float(value)}, the limits are 0 and 86400" in outcome.err


def test_flag_wins_over_the_environment(triptych: Triptych, monkeypatch: pytest.MonkeyPatch, run_dir: str) -> None:
    monkeypatch.setenv("TRIPTYCH_MAX_TOKENS", "2")
    monkeypatch.setenv("TRIPTYCH_PAGE_SIZE", "64")  # a setting of the other pipeline is no reason to refuse --connect
    monkeypatch.setenv("TRIPTYCH_CONNECT", run_dir)
    by_env = json.loads(triptych("generate", "hi", "--format", "jsonl").out)
    by_flag = json.loads(triptych("generate", "hi", "--format", "jsonl", "--max-tokens", "3").out)
    assert [len(row["token_ids"]) for row in (by_env, by_flag)] == [2, 3]


def test_every_setting_of_the_gateway_is_a_flag_and_a_variable() -> None:
    seen: list[GatewayConfig] = []
    probe = typer.Typer()

    @probe.command()
    @with_flags
    def verb(*, gateway: GatewayConfig) -> None:
        seen.append(gateway)

    flags = {item.name: "--" + item.name.replace("_", "-") for item in dataclasses.fields(GatewayConfig)}
    values = dict.fromkeys(flags, "7") | {"tool_parser": "hermes", "log_format": "json", "max_body_bytes": "4096"}
    values |= {"reasoning_parser": "think", "allowed_origin": "http://a:3000", "otlp_traces_endpoint": "http://a:4318/"}
    values["sampling_defaults"] = "openai"
    arguments = [part for name, flag in flags.items() for part in (flag, values[name])]
    environment = {f"TRIPTYCH_{name.upper()}": value for name, value in values.items()}
    for result in (CliRunner().invoke(probe, arguments), CliRunner().invoke(probe, [], env=environment)):
        assert result.exit_code == 0, result.output
    assert seen[0] == seen[1]
    assert (seen[0].http, seen[0].served_model_name, seen[0].request_timeout_s) == ("7", ("7",), 7.0)
    assert all(getattr(seen[0], name) != item.default for name, item in GatewayConfig.__dataclass_fields__.items())
