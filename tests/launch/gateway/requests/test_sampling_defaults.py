"""What requests get that leave out how to sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.launch.gateway.conftest import site
from triptych import Driver
from triptych.protocol.model_card import ModelCard

ASKED: dict[str, Any] = {"model": "hash-lm", "prompt": "tell me", "max_tokens": 12, "seed": 5}


@pytest.fixture
def pipeline_that_recommends(pipeline: Driver) -> Iterator[Driver]:
    """Its model's files recommend to be greedy."""
    card = ModelCard.read(pipeline.run_dir)
    assert card is not None
    replace(card, sampling={"temperature": 0.0, "top_p": 0.5}).publish(pipeline.run_dir)
    yield pipeline
    card.publish(pipeline.run_dir)


@pytest.mark.parametrize("choice", ["model", "auto", "openai", "vllm"])
def test_request_gets_what_the_model_recommends_unless_the_server_does_not_ask_it(
    choice: str, pipeline_that_recommends: Driver
) -> None:
    with site(pipeline_that_recommends.run_dir, sampling_defaults=choice) as api:
        greedy, drawn, silent = (
            api.ask("/v1/completions", **ASKED, **given)["choices"][0]["text"]
            for given in ({"temperature": 0}, {"temperature": 1, "top_p": 1}, {})
        )
        reply = api.ask("/v1/responses", model="hash-lm", input="tell me", max_output_tokens=4)
    assert greedy != drawn
    is_asked = choice in ("model", "auto")
    assert silent == (greedy if is_asked else drawn)
    assert (reply["temperature"], reply["top_p"]) == ((0.0, 0.5) if is_asked else (1.0, 1.0))


def test_without_recommendations_the_temperature_is_that_of_openai(pipeline: Driver) -> None:
    with site(pipeline.run_dir) as api:
        assert api.gateway.sampling_defaults == {"temperature": 1.0}
