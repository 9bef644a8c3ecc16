"""Token ids equal those of transformers, and an error in a tokenizer or template fails one request."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.workers import tokenizer_zoo
from triptych.protocol.errors import EmptyPrompt, InvalidRequest, TokenizationFailed
from triptych.protocol.reasoning import (
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
    Tags,
    from_wire,
    to_wire,
)
from triptych.protocol.tokenizer_files import TokenizerFacts, save_tokenizer
from triptych.workers.prepare.request import GenerationRequest
from triptych.workers.prepare.text_encoder import TextEncoder
from triptych.workers.prepare.tool_fields import Message

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT: list[Message] = [
    {"role": "user", "content": "  What's <b>π</b>? 你好 👋🏽\n"},
    {"role": "assistant", "content": "3.14"},
    {"role": "user", "content": "More.</s>"},
]
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if strftime_now is defined %}{%- set year = strftime_now("%Y") %}{%- else %}{%- set year = "2024" %}{%- endif %}
{{- "<|header|>system\n\nYear " + year + ", tools " + (tools | tojson) + "\n" }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end|>\n\n' }}{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate') }}{% endif %}{% set role = message['role'] %}\
{% if role == 'assistant' %}{% set role = 'model' %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
ODDITIES = """{% set ns = namespace(n=0) %}
{% for message in messages %}
    {% if message.role == 'assistant' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% generation %}{{ message | tojson(indent=2) }}{% endgeneration %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{% endfor %}
{{ ns.n }} {{ documents }} {{ dict(a=1)['a'] }} {{ unknown }}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "oddities": ODDITIES}


def make_encoder(tokenizer: Tokenizer, template: str | None = None, bos_token_id: int | None = 0) -> TextEncoder:
    facts = TokenizerFacts(
        vocab_size=tokenizer.get_vocab_size(),
        chat_template=template,
        special_tokens=SPECIAL,
        bos_token_id=bos_token_id,
    )
    return TextEncoder(tokenizer, facts)


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return copy


def reference(tokenizer: Tokenizer, folder: Path, template: str | None = None) -> Any:
    """The same tokenizer as loaded by transformers from a checkpoint."""
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **SPECIAL)
    wrapped.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace", "word_piece"])
@pytest.mark.parametrize("text", [*tokenizer_zoo.SENTENCES, "<s>a</s> b", " ", "\0"], ids=ascii)
def test_text_has_the_ids_of_transformers(name: str, text: str, tmp_path: Path) -> None:
    tokenizer = with_bos(getattr(tokenizer_zoo, name)())
    expected = reference(tokenizer, tmp_path)(text)["input_ids"]
    ids = make_encoder(tokenizer).encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chat_has_the_ids_of_transformers(name: str, template: str, tmp_path: Path) -> None:
    tokenizer = with_bos(getattr(tokenizer_zoo, name)())
    theirs = reference(tokenizer, tmp_path, template).apply_chat_template(CHAT, add_generation_prompt=True)
    assert make_encoder(tokenizer, template).encode_chat(CHAT).tolist() == theirs["input_ids"]


@pytest.mark.parametrize("begun", ["So", " So\n", "a</s>b", "Hello", "<think>\nLet", ""], ids=ascii)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_continued_turn_has_the_ids_of_transformers(template: str, begun: str, tmp_path: Path) -> None:
    chat = [*CHAT, {"role": "assistant", "content": begun}]
    tokenizer = with_bos(tokenizer_zoo.byte_level())
    encoder = make_encoder(tokenizer, template)
    request = GenerationRequest.from_wire({"messages": chat, "continue_final_message": True})
    try:
        theirs = reference(tokenizer, tmp_path, template).apply_chat_template(chat, continue_final_message=True)
    except ValueError:  # the template shows less than the message
        with pytest.raises(TokenizationFailed, match="a part of the message that is to be continued"):
            encoder.encode_request(request)
    else:
        assert encoder.encode_request(request).tolist() == theirs["input_ids"]


BROKEN = {
    "refuses the role": (GEMMA, "System role not supported"),
    "does not parse": ("{% if %}", "TemplateSyntaxError"),
    "leaves the sandbox": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "changes the messages": ("{{ messages.append(1) }}", "SecurityError"),
    "divides by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
}


@pytest.mark.parametrize(("template", "reason"), BROKEN.values(), ids=BROKEN)
def test_template_that_raises_fails_the_request(template: str, reason: str) -> None:
    encoder = make_encoder(tokenizer_zoo.byte_level(), template)
    with pytest.raises(TokenizationFailed, match=reason) as caught:
        encoder.encode_chat([{"role": "system", "content": "Hello"}])
    assert caught.value.param == "messages"
    assert encoder.encode("still works").size > 0


def test_tokenizer_that_raises_fails_the_request() -> None:
    with pytest.raises(TokenizationFailed, match="the tokenizer raised") as caught:
        make_encoder(tokenizer_zoo.byte_level()).encode("half a pair: \ud800")
    assert caught.value.param == "prompt"


def test_half_a_surrogate_pair_in_an_earlier_call_is_what_the_model_wrote() -> None:
    """JSON can spell it, so a model can; every later turn was refused."""
    encoder = make_encoder(tokenizer_zoo.byte_level(), "{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud83d"}'}}
    request = GenerationRequest.from_wire({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert encoder.encode_request(request).tolist() == encoder.encode(r'{"a": "\ud83d"}').tolist()


def test_chat_template_gets_the_tools_and_variables_of_its_request() -> None:
    encoder = make_encoder(tokenizer_zoo.byte_level(), "{{ tools | length }}{{ name }}{{ messages[0].content }}")
    more = {"tools": '[{"type": "function"}]', "chat_template_kwargs": {"name": "b"}}
    request = GenerationRequest.from_wire({"messages": [{"role": "user", "content": "c"}], **more})
    assert encoder.encode_request(request).tolist() == encoder.encode("1bc").tolist()


def test_chat_for_a_model_without_a_template_is_invalid() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        make_encoder(tokenizer_zoo.byte_level()).encode_chat(CHAT)


@pytest.mark.parametrize("wire", [{"prompt": ""}, {"prompt_token_ids": []}], ids=["text", "ids"])
def test_empty_prompt_becomes_the_begin_token_or_is_refused(wire: dict[str, Any]) -> None:
    request = GenerationRequest.from_wire(wire)
    assert make_encoder(tokenizer_zoo.byte_level(), bos_token_id=0).encode_request(request).tolist() == [0]
    with pytest.raises(EmptyPrompt, match="has no tokens"):
        make_encoder(tokenizer_zoo.byte_level(), bos_token_id=None).encode_request(request)


def test_padding_and_truncation_of_the_file_are_not_applied() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_zoo.byte_level().to_str())
    expected = tokenizer.encode("a long enough text").ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    assert make_encoder(tokenizer).encode("a long enough text").tolist() == expected


def test_encoder_needs_only_the_run_directory(tmp_path: Path) -> None:
    assert TextEncoder.load(tmp_path) is None
    tokenizer = tokenizer_zoo.byte_level()
    facts = TokenizerFacts(
        vocab_size=1, chat_template="{{ messages[0].content }}", special_tokens={}, bos_token_id=None
    )
    save_tokenizer(tmp_path, tokenizer.to_str(), facts)
    encoder = TextEncoder.load(tmp_path)
    assert encoder is not None
    assert encoder.encode_chat([{"role": "user", "content": "fox"}]).tolist() == tokenizer.encode("fox").ids


def test_giant_prompt_does_not_block_other_threads() -> None:
    encoder = make_encoder(tokenizer_zoo.byte_level())
    thread = threading.Thread(target=encoder.encode, args=("The quick brown fox. " * 20_000,))
    num_turns = 0
    thread.start()
    started = time.monotonic()
    while thread.is_alive() and time.monotonic() - started < 30:
        thread.join(timeout=0.001)
        num_turns += 1
    assert not thread.is_alive()
    assert num_turns > 20  # encode() would allow one or two


HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("wire", "is_continued"),
    [
        ({"prompt": "The quick"}, True),
        ({"prompt": "The quick<|user|>"}, False),  # such as a chat that the client rendered
        ({"prompt": ""}, False),
        ({"messages": [HELLO]}, False),
        ({"messages": [HELLO, {"role": "assistant", "content": "The"}], "continue_final_message": True}, True),
    ],
    ids=["completion", "special token", "nothing", "chat", "turn begun"],
)
def test_answer_continues_a_text_but_not_a_chat(wire: dict[str, Any], is_continued: bool) -> None:
    encoder = make_encoder(tokenizer_zoo.llama2(), CHATML)
    request = GenerationRequest.from_wire(wire)
    assert encoder.is_continued(request, encoder.encode_request(request)) is is_continued


def with_tokens(tokenizer: Tokenizer, *tokens: str) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return copy


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("Hello", "as it likes"),
        ("Hello<think>", "inside"),
        ("Hello<think>\n", "inside"),
        ("<think>a</think>b Hello<think>So,", "inside"),
        ("Hello<think>\n\n</think>\n\n", "with the form"),
        ("<think>a</think>b Hello", "as it likes"),
        ("What is <think>?<turn>", "as it likes"),  # a turn before this one says it
        ("What is <think>?<turn><think>", "inside"),
    ],
)
@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_prompt_tells_whether_its_answer_may_begin_with_reasoning(name: str, prompt: str, begins: str) -> None:
    tokenizer = with_tokens(getattr(tokenizer_zoo, name)(), START, END, "<turn>")
    encoder = make_encoder(tokenizer)
    found = encoder.reasoning_after(encoder.encode(prompt))
    start, end = (tokenizer_zoo.id_of(tokenizer, tag) for tag in (START, END))
    assert found == (None if begins == "with the form" else Tags(start, end, is_open=begins == "inside"))


@pytest.mark.parametrize(
    ("prompt", "is_final"),
    [
        ("Hello<|start|>assistant", False),
        ("<|start|>assistant<|channel|>final<|message|>Hello<|start|>assistant", False),
        ("<|start|>assistant<|channel|>final<|message|>Hel", True),
        ("<|start|>assistant<|channel|>analysis<|message|>Hel", False),
    ],
)
def test_answers_in_channels_have_the_form_in_the_final_one(prompt: str, is_final: bool) -> None:
    marks = (TURN, CHANNEL, FINAL, MESSAGE)
    tokenizer = with_tokens(tokenizer_zoo.byte_level(), *marks)
    encoder = make_encoder(tokenizer)
    channel, final, message = (tokenizer_zoo.id_of(tokenizer, mark) for mark in marks[1:])
    channels = Channels(channel, final, message)
    assert encoder.reasoning_after(encoder.encode(prompt)) == (None if is_final else channels)


@pytest.mark.parametrize("marks", [(TURN, CHANNEL, FINAL, MESSAGE, TO, CALL), (TURN, CHANNEL, FINAL, MESSAGE)])
def test_answers_in_channels_may_end_with_a_call(marks: tuple[str, ...]) -> None:
    tokenizer = with_tokens(tokenizer_zoo.byte_level(), *marks)
    encoder = make_encoder(tokenizer)
    found = encoder.reasoning_after(encoder.encode("Hello<|start|>assistant"), or_call=True)
    assert isinstance(found, Channels)
    ids = [tokenizer_zoo.id_of(tokenizer, mark) for mark in (TURN, *marks[4:])]
    assert found.calls == (Calls(*ids) if CALL in marks else None)
    assert from_wire(to_wire(found)) == found


def test_budget_needs_tags() -> None:
    tokenizer = with_tokens(tokenizer_zoo.byte_level(), START, END, TOOL_CALL)
    tagged = make_encoder(tokenizer)
    found = tagged.reasoning_after(tagged.encode("Hello<think>"), budget=7)
    assert isinstance(found, Tags)
    assert (found.budget, found.call) == (7, tokenizer_zoo.id_of(tokenizer, TOOL_CALL))
    assert from_wire(to_wire(found)) == found
    for others in ((), (TURN, CHANNEL, FINAL, MESSAGE)):
        encoder = make_encoder(with_tokens(tokenizer_zoo.byte_level(), *others))
        with pytest.raises(InvalidRequest, match="thinking_token_budget is 7, but <think> and </think>") as refused:
            encoder.reasoning_after(encoder.encode("Hello"), budget=7)
        assert refused.value.param == "thinking_token_budget"


def test_reasoning_needs_tokens_for_its_marks() -> None:
    encoder = make_encoder(tokenizer_zoo.byte_level())
    with pytest.raises(
        InvalidRequest, match=r"neither <think> and </think> nor .* are tokens of this model"
    ) as refused:
        encoder.reasoning_after(encoder.encode("Hello"))
    assert refused.value.param == "structured"
