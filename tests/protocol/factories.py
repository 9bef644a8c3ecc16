"""Journals, records and field values for the tests of ``protocol``."""

from __future__ import annotations

import errno
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.requests import AcceptTimes, RequestView, RequestWriter, read_request
from triptych.protocol.record import RequestRecord
from triptych.protocol.record_key import Key

TIMES = AcceptTimes(
    received_ns=1_000_000, tokenize_start_ns=2_000_000, tokenize_end_ns=3_000_000, accepted_ns=4_000_000
)

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
_KEYS = st.text(max_size=4) | st.integers(0, 99)
PLAIN_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)


def fail_to_sync(file: int) -> None:
    """Stands in for os.fdatasync on a broken disk."""
    raise OSError(errno.EIO, "Input/output error")


def make_journal(folder: Path, *, num_records: int = 4, arena_bytes: int = 1 << 14) -> Journal:
    return Journal.create(folder / "journal", num_records=num_records, arena_bytes=arena_bytes)


def make_record(
    request_id: str = "a",
    *,
    num_prompt_tokens: int = 3,
    token_capacity: int = 8,
    digest: int = 7,
    embedding_size: int = 0,
    **sampling: Any,
) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        digest=digest,
        prompt=np.arange(num_prompt_tokens, dtype="<i4").tobytes(),
        num_truncated_tokens=0,
        token_capacity=token_capacity,
        seed=11,
        lease_s=10.0,
        sampling=sampling,
        embedding_size=embedding_size,
    )


def accept(writer: RequestWriter, journal: Journal, record: RequestRecord | None = None) -> RequestView:
    """Publish a request and read it back."""
    slot, generation = writer.accept(record or make_record(), TIMES)
    view = read_request(journal, slot)
    assert view is not None
    assert view.generation == generation
    return view


def filled(folder: Path, count: int = 4) -> Journal:
    """With so many requests, r0 and on."""
    journal = make_journal(folder)
    writer = RequestWriter(journal)
    for index in range(count):
        writer.accept(make_record(request_id=f"r{index}"), TIMES)
    return journal


def read(journal: Journal, key: Key) -> RequestView:
    """The request of this record, which must be sound."""
    view = read_request(journal, key[0])
    assert view is not None
    return view


def lose_tokens(journal: Journal, view: RequestView, column: str = "tokens_at") -> None:
    """The arena's page never reached the disk, but the records' page did."""
    journal.words[getattr(view.extent, column) : getattr(view.extent, column) + 2] = 0


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a message field, derived from its type hint."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint) or hint:
        case types.UnionType:
            return st.one_of([values_of(argument) for argument in arguments])
        case types.NoneType:
            return st.none()
        case typing.Any:
            return PLAIN_VALUES
        case origin if origin is list:
            return st.lists(values_of(arguments[0]), max_size=4)
        case origin if origin is dict:
            return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=4)
    by_type: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
    }
    return by_type[hint]
