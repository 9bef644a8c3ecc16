"""The model card that execute publishes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cards import CARD
from triptych.protocol.errors import ConfigError
from triptych.protocol.model_card import CARD_FILE, LatestCard, ModelCard


def test_last_published_card_is_read(tmp_path: Path) -> None:
    assert ModelCard.read(tmp_path) is None
    for card in (CARD, replace(CARD, model="another", adapters={"a": "0" * 32})):
        card.publish(tmp_path)
        assert ModelCard.read(tmp_path) == card


@pytest.mark.parametrize("text", ["", "[]", '{"model": 5}', '{"model": "a"}'])
def test_damaged_card_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / CARD_FILE).write_text(text)
    with pytest.raises(ConfigError, match="the model card"):
        ModelCard.read(tmp_path)


def test_frequent_reader_sees_every_card_and_reads_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = list[str](), ModelCard.from_json

    def counted(text: str) -> ModelCard:
        reads.append(text)
        return read(text)

    monkeypatch.setattr(ModelCard, "from_json", counted)
    latest = LatestCard(tmp_path)
    assert latest.read() is None
    assert LatestCard(tmp_path, CARD).read() == CARD
    for card in (CARD, replace(CARD, model="another")):
        card.publish(tmp_path)
        assert [latest.read(), latest.read()] == [card, card]
    assert len(reads) == 2
