"""Everything in the package that decodes bytes, and the errors with which each may refuse them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tests.protocol.factories import make_record
from triptych.protocol import messages as m
from triptych.protocol.codec import decode, decode_public, encode, peek_request_id
from triptych.protocol.config import PipelineConfig
from triptych.protocol.errors import BadFrame, ConfigError, InvalidRequest, JournalError
from triptych.protocol.journal.layout import Journal
from triptych.protocol.journal.releases import ReleaseWriter, read_release
from triptych.protocol.journal.requests import AcceptTimes, RequestWriter, read_request
from triptych.protocol.journal.tokens import TokenWriter, read_finish, read_logprobs, read_times, read_tokens
from triptych.protocol.keys import ClientKeys
from triptych.protocol.model_card import ModelCard
from triptych.protocol.record import RequestRecord
from triptych.protocol.request_ids import check_request_id
from triptych.protocol.tokenizer_files import TokenizerFacts, load_facts
from triptych.workers.prepare.intake import digest_of
from triptych.workers.prepare.request import GenerationRequest

MAX_FRAME_BYTES = 1 << 20
REQUEST = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["a", "b"],
    "stop_token_ids": [1, 2],
    "logit_bias": {5: 1.5},
    "lease_s": 3.0,
    "truncation": "left",
}


@dataclass(frozen=True)
class Target:
    """``read`` decodes damaged bytes; it may raise only ``refusals``."""

    sources: tuple[bytes, ...]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]


def _public(frame: bytes) -> None:
    """What prepare does with a public frame before tokenisation."""
    peek_request_id(frame)
    message = decode_public(frame, max_bytes=MAX_FRAME_BYTES).message
    if isinstance(message, m.Submit):
        check_request_id(message.request_id)
        digest_of(message.request)
        GenerationRequest.from_wire(message.request)


def _public_frames() -> tuple[bytes, ...]:
    return (
        encode(m.Submit("id", REQUEST)),
        encode(m.Submit("id", {"prompt": "text", "seed": 5, "logprobs": 2})),
        encode(m.Submit("id", {"prompt_token_ids": b"\x01\x00\x00\x00"})),
        encode(m.Follow([["id", 5, True], ["other", 0, False]])),
        encode(m.Acknowledge(["id", "other"])),
        encode(m.Abort("id")),
        encode(m.GetInfo()),
    )


def _worker_frames() -> tuple[bytes, ...]:
    column = np.arange(3, dtype="<u4").tobytes()
    return (
        encode(m.Prepared(1, 2, make_record().to_bytes()), epoch=1, seq=5),
        encode(m.StepDone(column, column, column, column, b"\0\0\1"), epoch=3, seq=70000),
        encode(m.Release(column, column)),
        encode(m.Finished("id", 0, 0, column, "text", None, "stop", {"usage": {"prompt_tokens": 1}})),
        encode(m.Text([["id", 0, 0, column, "text", [[-0.5, [[1, -0.5]]]], 2.5]])),
    )


def _used_journal(path: Path) -> bytes:
    """A small journal with an ended, a running and a waiting request."""
    journal = Journal.create(path, num_records=4, arena_bytes=1 << 10)
    writer, tokens = RequestWriter(journal), TokenWriter(journal)
    for number, logprobs in enumerate((None, 1, None)):
        record = make_record(f"r{number}", token_capacity=4, **({} if logprobs is None else {"logprobs": logprobs}))
        slot, generation = writer.accept(record, AcceptTimes(1, 2, 3, 4))
        if number < 2:
            writer.dispatch(slot, generation, 5)
            view = read_request(journal, slot)
            assert view is not None
            tokens.adopt(view)
            tokens.publish(np.array([slot]), np.array([0]), np.array([9], np.int32), 50_000)
    tokens.finish(0, 1, "error", "code\nwhy")
    ReleaseWriter(journal).release(0, 1, num_tokens=1, reason="error")
    journal.close()
    return path.read_bytes()


def _journal_reader(path: Path) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        journal = Journal.open(path)
        try:
            _read_all(journal)
        finally:
            journal.close()

    return read


def _read_all(journal: Journal) -> None:
    """As the three workers read it at their start: damaged records are given up, and only those."""
    for slot in range(journal.num_records):
        try:
            view = read_request(journal, slot)
        except JournalError:
            continue
        if view is None:
            continue
        found = read_tokens(journal, view)
        read_finish(journal, slot, view.generation)
        read_release(journal, slot, view.generation)
        read_times(journal, view, 0 if found is None else len(found))
        if found is not None and "logprobs" in view.record.sampling:
            read_logprobs(journal, view, 0, len(found))
    writer = RequestWriter(journal)
    writer.past_ids()
    journal.release_states()


def _file_reader(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def reader(data: bytes) -> object:
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)

    return reader


def make_targets(folder: Path) -> dict[str, Target]:
    card = ModelCard(
        model="m", model_type="t", backend="b", num_parameters=1, dtype="d", device="cpu", vocab_size=9,
        max_model_len=9, eos_token_ids=(0,), page_size=4, num_pages=4, max_num_seqs=1, max_live=2, load_s=0.5,
    )  # fmt: skip
    facts = TokenizerFacts(vocab_size=9, chat_template=None, special_tokens={"a": "b"}, bos_token_id=None)
    keys = json.dumps({"name": "a", "server": "s" * 40, "public": "p" * 40, "secret": "x" * 40}).encode()
    config = PipelineConfig.from_options(model="hash-lm").to_json().encode()
    return {
        "public frames": Target(_public_frames(), _public, (BadFrame, InvalidRequest)),
        "worker frames": Target(_worker_frames(), decode, (BadFrame,)),
        "records": Target((make_record(logprobs=1).to_bytes(),), RequestRecord.from_bytes, (BadFrame, JournalError)),
        "journal": Target((_used_journal(folder / "source"),), _journal_reader(folder / "journal"), (JournalError,)),
        "config": Target((config,), lambda data: PipelineConfig.from_json(data.decode()), (ConfigError,)),
        "card": Target(
            (json.dumps(card.to_wire()).encode(),), lambda data: ModelCard.from_json(data.decode()), (ConfigError,)
        ),
        "facts": Target(
            (json.dumps(asdict(facts)).encode(),),
            _file_reader(folder / "tokenizer_facts.json", lambda path: load_facts(path.parent)),
            (ConfigError,),
        ),
        "keys": Target((keys,), _file_reader(folder / "keys.json", ClientKeys.read), (ConfigError,)),
    }
