"""What the verbs print."""

from __future__ import annotations

import pytest
from rich.console import Console

from triptych.launch.terminal.report import facts_table, model_line, number, say, statistics_line

WHY = "the modules of transformers run the model, which takes 3 to 10 times as long as the compiled kernels"
PATH = "/" + "x" * 70


def test_narrow_table_has_every_name_and_every_word() -> None:
    console = Console(width=60)
    with console.capture() as capture:
        console.print(facts_table("Model", {"max_model_len": 1024, "why_slow": WHY, "path": PATH, "none": ""}))
    names, values = zip(*((line[:16].strip(), line[16:].strip()) for line in capture.get().splitlines()), strict=True)
    assert {"max model len", "why slow", "path", "none"} <= set(names)
    assert WHY in " ".join(values)
    assert PATH in "".join(values)
    assert values[names.index("none")] == "-"


def test_lists_and_maps_are_shown_in_one_line() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(facts_table("", {"list": ["a", 2], "map": {"b": 1.5, "c": []}, "no_list": [], "no_map": {}}))
    lines = [
        line.strip().split(maxsplit=1) for line in capture.get().replace("no ", "no_").splitlines() if line.strip()
    ]
    assert lines[-4:] == [["list", "a, 2"], ["map", "b 1.5, c none"], ["no_list", "none"], ["no_map", "none"]]


def test_what_looks_like_markup_is_shown_as_it_is() -> None:
    console, texts = Console(width=80), ["a[int4].trace", "/models/b[int4]", "[/INST] :key:"]
    with console.capture() as capture:
        console.print(facts_table(texts[0], {"model": texts[1], "token": texts[2]}))
        say(console, "".join(texts))
    assert [text for text in (*texts, "".join(texts)) if text not in capture.get()] == []


def test_line_about_a_quantised_model_does_not_say_only_what_it_is_made_of() -> None:
    card = {
        "model": "m", "model_type": "llama", "num_parameters": 135e6, "dtype": "bfloat16", "device": "cpu",
        "backend": "native int8 on avx2", "max_model_len": 64, "num_pages": 9, "page_size": 16,
    }  # fmt: skip
    line = "m · llama, 135 M parameters, bfloat16 on cpu (native int8 on avx2) · context 64 · 9 pages of 16 tokens"
    assert model_line(card) == line


def test_work_on_prompts_alone_is_seen_in_the_statistics() -> None:
    execute = {"pages": 9, "pages_free": 5, "pages_cached": 1}
    stats = {"execute": execute, "prepare": {"live": 2, "waiting": 7}}
    line = statistics_line(stats, tokens_per_second=0.2, prompt_tokens_per_second=1560.4)
    assert line == "0 tok/s · 1560 prompt tok/s · 2 live · 7 waiting · 3/9 pages"


@pytest.mark.parametrize(("value", "shown"), [
    (0, "0"), (0.668, "0.668"), (73, "73"), (999.4, "999"), (999.6, "1 k"), (1020, "1.02 k"),
    (999_400, "999 k"), (999_600, "1 M"), (1.5e9, "1.5 G"),
])  # fmt: skip
def test_number_has_three_digits_and_a_unit(value: float, shown: str) -> None:
    assert number(value) == shown
