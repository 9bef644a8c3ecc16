"""/v1/decisions: short questions about one shared state, answered by the probabilities of their options.

Each option is a continuation of the same prompt, scored by the sum of its tokens' log-probabilities. A prompt has the
state first and the question last, so all questions share the state's pages through the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...driver.stream import Completion
from .errors import ApiError, json_response, required
from .requests.chat_messages import text_of, wire_messages
from .requests.option_scores import OptionScorer, softmax
from .requests.usage import response_usage
from .schemas.chat import ChatMessage
from .schemas.other import DecisionRequest, Question
from .serving.streaming import answered
from .state import Gateway

KIND = "dec"
PREDICATE = ("yes", "no")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question in the form in which it is asked."""

    number: int
    question: Question
    type: str
    values: list[str | bool]
    text: str  # what the model is asked


async def create_decision(gateway: Gateway, body: DecisionRequest, request: Request) -> Response:
    """The answers, in the order of the questions.

    Raises:
        TriptychError: a question is invalid or was refused.
    """
    model = gateway.ready_model(body.model)
    if (body.state is None) == (body.input is None):
        raise ApiError("exactly one of state and input is needed", param="state")
    asked = [_asked(number, question) for number, question in enumerate(body.questions)]
    scorer = OptionScorer.of(gateway, request, KIND, model, body, param="questions")
    prompts = [(partial(_prompt, gateway, body, each), list(map(_label, each.values))) for each in asked]
    scores = await answered(request, scorer.score_all(prompts), timeout_s=gateway.config.request_timeout_s)
    answers = [_answer(each, score) for each, score in zip(asked, scores, strict=True)]
    return json_response(
        {"object": "decision", "model": model, "answers": answers, "usage": _usage(scorer.completions)}
    )


def _asked(number: int, question: Question) -> _Asked:
    name = f"questions[{number}]"
    text = required(question.instructions or question.question or None, f"{name}.instructions")
    kind = question.type or "choice"
    if kind == "predicate":
        return _Asked(number, question, kind, list(PREDICATE), f"{text}\nAnswer yes or no.")
    values: list[tuple[str | bool, str | None]]
    if kind == "score":
        values = [(level.label, level.description) for level in question.levels or []]
    else:
        values = [(choice.value, choice.description) for choice in question.choices or []]
        values += [(option, None) for option in question.options or []]
    if len(values) < 2 or len({_label(value) for value, _ in values}) < len(values):
        field = "levels" if kind == "score" else "choices"
        raise ApiError(f"{name}.{field} must have at least 2 entries, all different", param=f"{name}.{field}")
    lines = [f"- {_label(value)}" + (f": {text}" if text else "") for value, text in values]
    return _Asked(
        number, question, kind, [value for value, _ in values], "\n".join([text, "Answer with one of:", *lines])
    )


def _label(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _prompt(gateway: Gateway, body: DecisionRequest, asked: _Asked) -> dict[str, Any]:
    """State, then question; in one user message if the state is one."""
    template = gateway.facts.chat_template
    state = body.state if body.state is not None else body.input
    if template is None:
        whole = state if isinstance(state, str) else "\n".join(text_of(message.content) for message in state or [])
        return {"prompt": f"{whole}\n\n{asked.text}\nAnswer: "}
    if isinstance(state, str):
        messages = [ChatMessage(role="user", content=f"{state}\n\n{asked.text}")]
    else:
        messages = list(state or [])
        if messages and messages[-1].role == "user":  # many templates reject two user messages in a row
            messages[-1] = ChatMessage(role="user", content=f"{text_of(messages[-1].content)}\n\n{asked.text}")
        else:
            messages.append(ChatMessage(role="user", content=asked.text))
    return {"messages": wire_messages(messages, template=template)}


def _answer(asked: _Asked, logprobs: list[float]) -> dict[str, Any]:
    shares = softmax(logprobs)
    common = {"type": asked.type, "name": asked.question.name}
    if asked.type == "predicate":
        return {**common, "probability": shares[0], "logprobs": dict(zip(PREDICATE, logprobs, strict=True))}
    best = max(range(len(shares)), key=shares.__getitem__)
    if asked.type == "score":
        rows = [
            {"value": value, "label": label, "probability": share, "logprob": logprob}
            for value, (label, share, logprob) in enumerate(zip(asked.values, shares, logprobs, strict=True))
        ]
        score = sum(value * share for value, share in enumerate(shares))
        return {**common, "score": score, "confidence": shares[best], "probabilities": rows}
    rows = [
        {"value": value, "probability": share, "logprob": logprob}
        for value, share, logprob in zip(asked.values, shares, logprobs, strict=True)
    ]
    return {**common, "choice": asked.values[best], "confidence": shares[best], "probabilities": rows}


def _usage(completions: list[Completion]) -> dict[str, Any]:
    usage = response_usage(completions)
    usage.pop("triptych")  # a ledger for each token of each option would tell nothing
    return {**usage, "triptych": {"num_requests": len(completions)}}
