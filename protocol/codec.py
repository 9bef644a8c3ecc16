"""Messages to bytes and back: MessagePack arrays ``[tag, version, epoch, seq, ...fields]``, no executable content.

``decode`` trusts nothing: size, depth, tag, version, number of fields and their types are checked before a message is
constructed; any violation is a ``BadFrame`` that states it.
"""

from __future__ import annotations

import types
import typing
import zlib
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from . import messages as m
from .errors import BadFrame

VERSION = 1
MAX_DEPTH = 64  # of nested arrays and maps; a JSON schema takes two or three per level
MAX_ITEMS = 1 << 16  # of one array; longer columns travel as bytes
MAX_FIELDS = 1 << 10  # of one map
MAX_VALUES = 400_000  # arrays, maps and their entries in one untrusted frame
PEEK_BYTES = 256

TAGS: dict[int, type[Any]] = {
    # client <-> prepare
    1: m.Submit,
    2: m.GetInfo,
    3: m.Accepted,
    4: m.Rejected,
    5: m.Info,
    # client <-> summarize
    10: m.Follow,
    11: m.Abort,
    12: m.Acknowledge,
    13: m.GetStatus,
    14: m.GetStats,
    15: m.GetRequests,
    20: m.Text,
    21: m.Finished,
    22: m.Failed,
    23: m.Status,
    24: m.Stats,
    25: m.Requests,
    # between the workers
    40: m.Prepared,
    41: m.StepDone,
    42: m.Release,
    43: m.Forgotten,
}


class Frame(NamedTuple):
    """A decoded message and its position in its sender's stream."""

    message: Any
    epoch: int  # of the sender; 0 for clients
    seq: int  # 0, 1, 2, ... on one channel


class _Schema(NamedTuple):
    make: type[Any]
    names: tuple[str, ...]
    types: tuple[tuple[type, ...], ...]


def _accepted_types(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(t for part in typing.get_args(hint) for t in _accepted_types(part))
    return (typing.get_origin(hint) or hint,)


def _schema(message: type[Any]) -> _Schema:
    hints = typing.get_type_hints(message)
    names = tuple(f.name for f in fields(message))
    return _Schema(message, names, tuple(_accepted_types(hints[name]) for name in names))


def _getter(message: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    names = [f.name for f in fields(message)]
    if not names:
        return lambda _: ()
    if len(names) == 1:
        return lambda value: (getattr(value, names[0]),)
    return attrgetter(*names)


_SCHEMAS = {tag: _schema(message) for tag, message in TAGS.items()}
_ENCODERS = {message: (tag, _getter(message)) for tag, message in TAGS.items()}


def encode(message: Any, *, epoch: int = 0, seq: int = 0) -> bytes:
    """The frame of one message."""
    tag, values = _ENCODERS[type(message)]
    return typing.cast(bytes, msgpack.packb((tag, VERSION, epoch, seq, *values(message))))


def pack(value: Any) -> bytes:
    """A plain value as MessagePack bytes, for records and status pages."""
    return typing.cast(bytes, msgpack.packb(value))


def unpack(frame: bytes | memoryview, *, max_values: int | None = None) -> Any:
    """A plain value from MessagePack bytes.

    ``max_values`` limits arrays, maps and their entries in total. One byte can encode a map, and a map takes 64 bytes
    of memory: without the limit a frame of a few megabytes takes seconds and gigabytes to decode.
    Raises:
        BadFrame: not MessagePack, trailing bytes, or beyond the limits of this module.
    """
    count = None if max_values is None else _counter(max_values)
    try:
        return msgpack.unpackb(
            frame,
            strict_map_key=False,
            max_str_len=len(frame),
            max_bin_len=len(frame),
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_FIELDS,
            max_ext_len=0,
            list_hook=count,
            object_hook=count,
            ext_hook=_refuse_extension,  # one of no bytes passes max_ext_len
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise BadFrame(f"not a message: {type(error).__name__}: {error}"[:200]) from error


def _counter(max_values: int) -> Callable[[Any], Any]:
    """A hook called with each complete array and map; it stops the decoding at the first one beyond the limit."""
    left = max_values

    def count(value: Any) -> Any:
        nonlocal left
        left -= 1 + len(value)
        if left < 0:
            raise BadFrame(
                f"a frame has {max_values - left} arrays, maps and entries or more, the limit is {max_values}"
            )
        return value

    return count


def _refuse_extension(code: int, _: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def decode(frame: bytes, *, max_bytes: int | None = None, max_values: int | None = None) -> Frame:
    """The message in a frame.

    Raises:
        BadFrame: the bytes are not exactly one message of this protocol version, with the reason.
    """
    if max_bytes is not None and len(frame) > max_bytes:
        raise BadFrame(f"the frame has {len(frame)} bytes, the limit is {max_bytes}")
    values = unpack(frame, max_values=max_values)
    if type(values) is not list or len(values) < 4 or not all(type(v) is int and v >= 0 for v in values[:4]):
        raise BadFrame("a frame is an array [tag, version, epoch, seq, ...fields]")
    tag, version, epoch, seq = values[:4]
    if version != VERSION:
        raise BadFrame(f"protocol version {version} is not supported, this service uses {VERSION}")
    schema = _SCHEMAS.get(tag)
    if schema is None:
        raise BadFrame(f"unknown tag {tag}")
    return Frame(_message(schema, values[4:]), epoch, seq)


def decode_public(frame: bytes, *, max_bytes: int) -> Frame:
    """``decode`` for untrusted frames: depth, the number of values and their contents are checked as well."""
    result = decode(frame, max_bytes=max_bytes, max_values=MAX_VALUES)
    match result.message:
        case m.Submit(_, request):
            _check_depth(request, MAX_DEPTH)
        case m.Follow(entries):
            _check_depth(entries, MAX_DEPTH)
            _check_follow(entries)
        case m.Acknowledge(request_ids):
            for request_id in request_ids:
                if type(request_id) is not str:
                    got = type(request_id).__name__
                    raise BadFrame(f"Acknowledge.request_ids must be str, got {got}", param="request_ids")
    return result


def _check_follow(entries: list[Any]) -> None:
    if (count := len(entries)) > m.MAX_FOLLOW_ENTRIES:
        raise BadFrame(f"a FOLLOW has {count} entries, the limit is {m.MAX_FOLLOW_ENTRIES}")
    for entry in entries:
        if type(entry) is not list or [type(value) for value in entry] != [str, int, bool]:
            raise BadFrame(f"a FOLLOW entry is [request id, tokens, again], got {entry!r:.100}")
        if entry[1] < 0:
            raise BadFrame(f"a FOLLOW entry for {entry[0]:.64} has {entry[1]} tokens, the least is 0", param="entries")


def peek_request_id(frame: bytes) -> str:
    """The request id at the start of a malformed SUBMIT, so that its client can be told; "" if it cannot be read."""
    unpacker = msgpack.Unpacker(max_buffer_size=PEEK_BYTES)
    unpacker.feed(frame[:PEEK_BYTES])
    try:
        unpacker.read_array_header()
        tag, *_ = (unpacker.unpack() for _ in range(4))
        request_id = unpacker.unpack()
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return ""
    is_submit = type(tag) is int and TAGS.get(tag) is m.Submit
    return request_id if is_submit and type(request_id) is str else ""


def content_key(frame: bytes) -> int:
    """CRC-32 of a frame's fields without its header: a resent message has the same key."""
    unpacker = msgpack.Unpacker(max_buffer_size=PEEK_BYTES)
    unpacker.feed(frame[:PEEK_BYTES])
    try:
        unpacker.read_array_header()
        for _ in range(4):
            unpacker.skip()
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return zlib.crc32(frame)
    return zlib.crc32(memoryview(frame)[unpacker.tell() :])


def _message(schema: _Schema, values: list[Any]) -> Any:
    name = schema.make.__name__
    if len(values) != len(schema.names):
        expected = f"{len(schema.names)}: {', '.join(schema.names)}" if schema.names else "none"
        raise BadFrame(f"{name} has {len(values)} fields, expected {expected}")
    for field, accepted, value in zip(schema.names, schema.types, values, strict=True):
        if type(value) not in accepted:
            expected = " or ".join(t.__name__ for t in accepted)
            raise BadFrame(f"{name}.{field} must be {expected}, got {type(value).__name__}", param=field)
    return schema.make(*values)


def _check_depth(value: Any, left: int) -> None:
    if isinstance(value, (list, dict)):
        if left == 0:
            raise BadFrame(f"arrays and maps are nested more than {MAX_DEPTH} deep")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, (list, dict)):
                _check_depth(item, left - 1)
