"""/v1/rerank and /v1/score: how relevant texts are to a query, as the probability of "yes" rather than "no".

Any model that chats can be asked. The prompt is the one with which Qwen3-Reranker was trained; it has the query first,
so its pages are shared by all texts.

Source: the model card of Qwen3-Reranker (Qwen team, 2025); the formats are those of Jina's, Cohere's and vLLM's APIs.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError, json_response
from .requests.option_scores import OptionScorer, softmax
from .requests.parameters import truncation
from .schemas.base import one_or_several
from .schemas.reranking import RerankRequest, ScoreRequest
from .serving.streaming import answered
from .state import Gateway

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the"
    ' answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
OPTIONS = ("yes", "no")


async def create_rerank(gateway: Gateway, body: RerankRequest, request: Request) -> Response:
    """The texts in the order of their relevance, the most relevant first.

    Raises:
        TriptychError: one of them was refused.
    """
    model = gateway.ready_model(body.model)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scorer = OptionScorer.of(gateway, request, "rerank", model, body, param="model")
    scores = await _scores(gateway, request, scorer, body, [(body.query, text) for text in texts])
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents is not False:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    return json_response({"id": scorer.request_id, "model": model, "results": results, "usage": _usage(scorer)})


async def create_score(gateway: Gateway, body: ScoreRequest, request: Request) -> Response:
    """The relevance of each pair, in their order.

    Raises:
        TriptychError: the texts are not pairs, or one was refused.
    """
    model = gateway.ready_model(body.model)
    scorer = OptionScorer.of(gateway, request, "score", model, body, param="model")
    scores = await _scores(gateway, request, scorer, body, _pairs(body))
    return json_response({
        "id": scorer.request_id, "object": "list", "created": int(time.time()), "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": _usage(scorer),
    })  # fmt: skip


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """
    Raises:
        ApiError: there are several queries, but another number of texts.
    """
    queries, texts = one_or_several(body.text_1), one_or_several(body.text_2)
    if len(queries) == 1:
        queries = queries * len(texts)
    if not texts or len(queries) != len(texts):
        text = f"text_1 has {len(queries)} entries and text_2 {len(texts)}: they must be as many, or text_1 one"
        raise ApiError(text, param="text_2")
    return list(zip(queries, texts, strict=True))


async def _scores(
    gateway: Gateway,
    request: Request,
    scorer: OptionScorer,
    body: RerankRequest | ScoreRequest,
    pairs: list[tuple[str, str]],
) -> list[float]:
    cut = _cut(scorer, gateway, body.truncate_prompt_tokens)
    asked = [(partial(_prompt, gateway, body.instruction, *pair, cut=cut), OPTIONS) for pair in pairs]
    logprobs = await answered(request, scorer.score_all(asked), timeout_s=gateway.config.request_timeout_s)
    return [softmax(each)[0] for each in logprobs]


def _cut(scorer: OptionScorer, gateway: Gateway, num_kept: int | None) -> dict[str, Any]:
    """Where each prompt is cut, so that it has room for the options behind it: in the middle of the text, as its
    beginning has the query, and its end is where the model answers.
    """
    cut = truncation(num_kept, where="middle")
    if cut:
        fits = gateway.card.max_model_len - scorer.longest(OPTIONS)
        cut["max_prompt_tokens"] = min(cut.get("max_prompt_tokens", fits), fits)
    return cut


def _prompt(gateway: Gateway, instruction: str | None, query: str, text: str, *, cut: dict[str, Any]) -> dict[str, Any]:
    question = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {text}"
    template = gateway.facts.chat_template
    if template is None:
        return {"prompt": f"{SYSTEM}\n\n{question}\nAnswer: ", **cut}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}, **cut}


def _usage(scorer: OptionScorer) -> dict[str, int]:
    return {"prompt_tokens": scorer.num_prompt_tokens, "total_tokens": scorer.num_prompt_tokens}
