"""A record's key, as one number and in the columns of a message."""

from __future__ import annotations

from triptych.protocol.messages import Release
from triptych.protocol.record_key import Key, key_columns, key_of, keys_in, number_of

KEYS: list[Key] = [(0, 1), (3, 2**32 - 1), (2**32 - 1, 0)]


def test_key_survives_as_a_number() -> None:
    assert [key_of(number_of(key)) for key in KEYS] == KEYS
    assert all(number_of(key) < 2**64 for key in KEYS)


def test_keys_survive_as_columns() -> None:
    for keys in (KEYS, []):
        assert keys_in(Release(*key_columns(keys))) == keys
