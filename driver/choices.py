"""A caller's view of a request with several choices: one stream per choice, and one for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from ..protocol.errors import TriptychError
from ..protocol.messages import Accepted
from ..protocol.request_ids import member_id
from ..protocol.sampling import MAX_SAMPLES
from .stream import Completion, Delta, Leave, Listener, Stream


class ChoiceListener:
    """Listens to one choice, and forwards its events to the whole request."""

    def __init__(self, index: int, choice: Listener, whole: Whole) -> None:
        self._index = index
        self._choice = choice
        self._whole = whole

    def on_accepted(self, accepted: Accepted) -> None:
        self._choice.on_accepted(accepted)

    def on_delta(self, delta: Delta) -> None:
        self._choice.on_delta(delta)
        self._whole.on_delta(delta)

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        self._choice.on_end(completion, error)
        self._whole.on_choice_end(self._index, completion, error)

    def is_for(self, reader: Listener) -> bool:
        return reader is self._choice or self._whole.is_for(reader)


class Whole:
    """Combines the ends of all choices into one, for the request's listener. It listens to the request's SUBMIT."""

    def __init__(self, request_id: str, listener: Listener, choices: Sequence[Listener]) -> None:
        self._request_id = request_id
        self._listener = listener
        self.choices = [ChoiceListener(index, choice, self) for index, choice in enumerate(choices)]
        self._completions: dict[int, Completion] = {}
        self._error: TriptychError | None = None

    def on_accepted(self, accepted: Accepted) -> None:
        for choice in self.choices:
            choice.on_accepted(accepted)
        self._listener.on_accepted(accepted)

    def on_delta(self, delta: Delta) -> None:
        self._listener.on_delta(delta)

    def on_end(self, completion: Completion, error: TriptychError | None) -> None:
        """The request was refused before it had choices."""
        for choice in self.choices:
            choice.on_end(completion, error)

    def on_choice_end(self, index: int, completion: Completion, error: TriptychError | None) -> None:
        self._completions[index] = completion
        self._error = self._error or error
        if len(self._completions) == len(self.choices):
            whole = combine(self._request_id, [self._completions[i] for i in range(len(self.choices))])
            self.choices = []  # which refer to this: only a search for garbage would find them all, with their texts
            if (error := copy(self._error)) is not None:  # the choice's own error keeps the partial answer of that
                error.partial = whole
            self._listener.on_end(whole, error)

    def is_for(self, reader: Listener) -> bool:
        return reader is self._listener


def is_read_by(listener: Listener, reader: Listener) -> bool:
    """Whether ``reader`` receives what ``listener`` receives: directly, or through the choices of a request."""
    return listener is reader or (isinstance(listener, (ChoiceListener, Whole)) and listener.is_for(reader))


def combine(request_id: str, completions: list[Completion]) -> Completion:
    """The first choice as the answer, with all choices attached. The usage counts the prompt once."""
    first, summary = completions[0], dict(completions[0].summary)
    if "usage" in summary:
        num_tokens = sum(c.summary.get("usage", {}).get("completion_tokens", 0) for c in completions)
        summary["usage"] = {**summary["usage"], "completion_tokens": num_tokens}
    return Completion(
        request_id,
        first.text,
        first.token_ids,
        first.finish_reason,
        first.logprobs,
        summary,
        tuple(completions),
    )


class GroupStream(Stream):
    """A running request with several choices: iterate over the deltas of all, or read each of ``choices``."""

    def __init__(self, request_id: str, num_choices: int, session: Leave) -> None:
        super().__init__(request_id, session)
        self._choices = [Stream(wire_id, session) for wire_id in choice_ids(request_id, num_choices)]

    @property
    def choices(self) -> list[Stream]:
        return self._choices

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """The ids by which the choices of a request are followed and aborted individually."""
    return [member_id(request_id, index, num_choices) for index in range(num_choices)]


def num_choices(request: Mapping[str, Any]) -> int:
    """The number of choices a request asks for; 1 for an invalid number, with which it will be refused."""
    n = request.get("n", 1)
    return n if type(n) is int and 1 < n <= MAX_SAMPLES else 1
