"""Text and chats to token ids, exactly like the checkpoint's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ...protocol.arrays import Int32
from ...protocol.errors import EmptyPrompt, InvalidRequest, TokenizationFailed, encodable
from ...protocol.reasoning import (
    CALL,
    CHANNEL,
    END,
    FINAL,
    MESSAGE,
    START,
    TO,
    TOOL_CALL,
    TURN,
    Calls,
    Channels,
    Reasoning,
    Tags,
)
from ...protocol.tokenizer_files import TokenizerFacts, load_facts, load_tokenizer_json
from .chat_template import ChatTemplate
from .request import GenerationRequest
from .structured import AFTER_REASONING, refusal
from .tool_fields import Message, chat_values

_NONE: Mapping[str, Any] = {}


class TextEncoder:
    """The tokenizer and chat template of one checkpoint. Stateless after construction: thread-safe."""

    def __init__(self, tokenizer: Tokenizer, facts: TokenizerFacts) -> None:
        # Padding and truncation in a checkpoint's file are meant for training batches.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._bos_token_id = facts.bos_token_id
        self._marks = {
            mark: int(ids[0])
            for mark in (START, END, TURN, CHANNEL, FINAL, MESSAGE, TO, CALL, TOOL_CALL)
            if len(ids := self._ids(mark, add_special_tokens=False)) == 1
        }
        added = tokenizer.get_added_tokens_decoder()  # not all that templates use are marked as special
        self._template_ids = frozenset(token_id for token_id, token in added.items() if token.content.strip())
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template = (
            ChatTemplate(facts.chat_template, facts.special_tokens) if facts.chat_template is not None else None
        )

    @classmethod
    def load(cls, folder: Path) -> TextEncoder | None:
        """The encoder for the run directory's two files; None until execute has written them."""
        facts = load_facts(folder)
        return None if facts is None else cls(Tokenizer.from_str(load_tokenizer_json(folder)), facts)

    def check_template(self) -> None:
        """
        Raises:
            ConfigError: the chat template is not valid Jinja.
        """
        if self._template is not None:
            self._template.check()

    def encode_request(self, request: GenerationRequest) -> Int32:
        """The prompt's ids, int32 [num_tokens], at least one.

        Raises:
            EmptyPrompt: there is no token, and the model has no token to begin with.
            InvalidRequest: a chat for a model without a chat template, or text in it that should be JSON and is not.
            TokenizationFailed: the tokenizer or the template raised.
        """
        messages, tools = chat_values(request.messages or (), request.tools)
        if request.messages is not None:
            return self.encode_chat(
                messages,
                tools=tools,
                variables=request.chat_template_kwargs,
                continue_final_message=request.continue_final_message,
            )
        if request.prompt is not None:
            return self.encode(request.prompt)
        assert request.prompt_token_ids is not None, "a request has one of three prompts"
        return self._at_least_one(request.prompt_token_ids, param="prompt_token_ids")

    def encode(self, text: str) -> Int32:
        """int32 [num_tokens], with the special tokens that the model expects around a text."""
        with _blaming("prompt", "the tokenizer"):
            ids = self._ids(text, add_special_tokens=True)
        return self._at_least_one(ids, param="prompt")

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] = _NONE,
        continue_final_message: bool = False,
    ) -> Int32:
        """int32 [num_tokens] of the rendered chat; special tokens come from the template."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template, send a prompt", param="messages")
        with _blaming("messages", "the chat template"):
            text = self._template.render(
                messages, tools=tools, variables=variables, continue_final_message=continue_final_message
            )
        with _blaming("messages", "the tokenizer"):
            # JSON can spell half of a surrogate pair, and so can the arguments of a call that a model wrote.
            ids = self._ids(encodable(text), add_special_tokens=False)
        return self._at_least_one(ids, param="messages")

    def is_continued(self, request: GenerationRequest, prompt: Int32) -> bool:
        """Whether the answer's text goes on where the prompt's ends. A turn of a chat is a text of its own."""
        is_turn = request.messages is not None and not request.continue_final_message
        return not is_turn and int(prompt[-1]) not in self._special_ids

    def reasoning_after(self, prompt: Int32, *, budget: int | None = None, or_call: bool = False) -> Reasoning | None:
        """How the answer to a prompt may begin with reasoning; None if it may not, as the prompt ends behind it.
        ``or_call``: in channels, a call may take the place of the form.

        Raises:
            InvalidRequest: this model has no tokens for the marks around reasoning, or none that a ``budget`` needs.
        """
        if {START, END} <= self._marks.keys():
            return self._tags_after(prompt, budget)
        if budget is not None:
            raise InvalidRequest(
                f"thinking_token_budget is {budget}, but {START} and {END} are not tokens of this model",
                param="thinking_token_budget",
            )
        if {TURN, CHANNEL, FINAL, MESSAGE} <= self._marks.keys():
            marks = [self._marks.get(mark) for mark in (TURN, TO, CALL)] if or_call else [None]
            calls = None if None in marks else Calls(*marks)
            channels = Channels(self._marks[CHANNEL], self._marks[FINAL], self._marks[MESSAGE], calls)
            turns = np.flatnonzero(prompt == self._marks[TURN])
            is_final = len(turns) and channels.find_form(prompt[turns[-1] :]) is not None
            return None if is_final else channels
        raise refusal(
            f".{AFTER_REASONING} is true, but neither {START} and {END} nor {CHANNEL} and {MESSAGE} are tokens of"
            " this model"
        )

    def _tags_after(self, prompt: Int32, budget: int | None) -> Tags | None:
        """Templates write an empty reasoning into the prompt for an answer without any.

        A start tag that a mark of the template follows is part of an earlier turn, whose author may write anything.
        """
        start, end = self._marks[START], self._marks[END]
        places = np.flatnonzero((prompt == start) | (prompt == end))
        last = int(places[-1]) if len(places) else -1
        tag, rest = (int(prompt[last]) if len(places) else None), prompt[last + 1 :].tolist()
        if tag == end and not self._tokenizer.decode(rest, skip_special_tokens=False).strip():
            return None
        is_open = tag == start and self._template_ids.isdisjoint(rest)
        return Tags(start, end, is_open, budget, None if budget is None else self._marks.get(TOOL_CALL))

    def _ids(self, text: str, *, add_special_tokens: bool) -> Int32:
        # Not encode(): it holds the GIL (half a second for a megabyte), while the batch form releases it. The fast
        # form omits character offsets, which are not needed. For short texts the cost is the same.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return np.array(encoding.ids, dtype=np.int32)

    def _at_least_one(self, ids: Int32, *, param: str) -> Int32:
        if len(ids):
            return ids
        if self._bos_token_id is None:
            raise EmptyPrompt(f"{param} has no tokens, and this model has no token to begin with", param=param)
        return np.array([self._bos_token_id], dtype=np.int32)


@contextmanager
def _blaming(param: str, culprit: str) -> Iterator[None]:
    """Turn anything raised inside into a failure of this request."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizer's Rust code is not an Exception
        raise TokenizationFailed(f"{culprit} raised {type(error).__name__}: {error!s:.200}", param=param) from error
