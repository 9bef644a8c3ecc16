"""The demo model's tokenizer: byte-level BPE, four special tokens and the chat template."""

from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .conversations import Conversation

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"  # ends every turn; at the end of the assistant's turn it is the EOS
SYSTEM_TOKEN = "<|system|>"
USER_TOKEN = "<|user|>"
ASSISTANT_TOKEN = "<|assistant|>"
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
{%- if role not in ('system', 'user', 'assistant') -%}
{{- raise_exception('the demo model knows the roles system, user and assistant, got ' ~ role) -}}
{%- endif -%}
{{- '<|' ~ role ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""


class EncodedConversation(NamedTuple):
    """Token ids of a conversation as the chat template renders it."""

    token_ids: list[int]
    is_answer: list[bool]  # per token: written by the assistant, END_TOKEN included


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer of at most ``vocab_size`` tokens, trained on ``texts``. It has all 256 bytes, so any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=[SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )


class ConversationEncoder:
    """Encodes conversations piece by piece and caches the pieces, as the same answers recur all the time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        special_ids = [tokenizer.vocab[token] for token in (END_TOKEN, SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN)]
        self._end, self._system, self._user, self._assistant = special_ids
        self._remembered: dict[str, list[int]] = {}

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """The same ids as from the chat template, with the answers marked."""
        encoded = EncodedConversation([], [])
        if conversation.system_prompt is not None:
            prompt = self._piece(conversation.system_prompt)
            _extend(encoded, [self._system, *prompt, self._end], is_answer=False)
        for question, answer in conversation.turns:
            _extend(encoded, [self._user, *self._piece(question), self._end, self._assistant], is_answer=False)
            _extend(encoded, [*self._piece(answer), self._end], is_answer=True)
        return encoded

    def _piece(self, text: str) -> list[int]:
        if text not in self._remembered:
            self._remembered[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._remembered[text]


def _extend(encoded: EncodedConversation, token_ids: list[int], *, is_answer: bool) -> None:
    encoded.token_ids.extend(token_ids)
    encoded.is_answer.extend([is_answer] * len(token_ids))
