from __future__ import annotations

from typing import Any

import pytest

from triptych.workers.prepare.intake import INLINE_BYTES, digest_of, num_waiting_bytes

REQUEST = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 5}
REORDERED = {"max_tokens": 5, "messages": [{"content": [{"text": "a", "type": "text"}], "role": "user"}]}


def test_digest_does_not_depend_on_the_order_of_fields_at_any_depth() -> None:
    """A client that sends its request again may encode it differently; it must get the same answer."""
    assert digest_of(REQUEST) == digest_of(REORDERED)
    assert digest_of(REQUEST) != digest_of({**REQUEST, "messages": [{"role": "user", "content": "b"}]})


@pytest.mark.parametrize(
    ("request_", "num_bytes", "expected"),
    [
        ({"prompt": "x"}, INLINE_BYTES, 0),
        ({"prompt": "x"}, INLINE_BYTES + 1, INLINE_BYTES + 1),
        (REQUEST, 9, 9),
        ({"prompt": "x", "structured": {"regex": "a"}}, 9, 9),
    ],
    ids=["short", "long", "chat", "compiled"],
)
def test_bytes_wait_for_what_takes_long(request_: dict[str, Any], num_bytes: int, expected: int) -> None:
    assert num_waiting_bytes(request_, num_bytes) == expected
