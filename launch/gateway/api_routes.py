"""Routes that use the model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from starlette.requests import Request

from .anthropic.messages import count_tokens, create_message
from .decisions import create_decision
from .openai.chat import create_chat_completion
from .openai.completions import create_completion
from .openai.embeddings import create_embeddings
from .openai.responses import count_input_tokens, create_response
from .reranking import create_rerank, create_score
from .resume import POSITIONS, forget_request, resume_request
from .schemas.chat import ChatRequest
from .schemas.completions import CompletionRequest
from .schemas.embeddings import EmbeddingRequest
from .schemas.messages import CountRequest, MessageRequest
from .schemas.other import DecisionRequest, DetokenizeRequest, TokenizeRequest
from .schemas.reranking import RerankRequest, ScoreRequest
from .schemas.responses import InputTokensRequest, ResponseRequest
from .state import Gateway
from .token_routes import detokenize, tokenize

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "JSON, or a stream of events if stream is true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def api_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["model"])
    _add_answers(router, gateway)
    _add_scores(router, gateway)
    _add_kept_requests(router, gateway)
    _add_tokens(router, gateway)
    return router


# FastAPI evaluates annotations in the functions' scope, so replies are passed to it as plain ASGI applications.


def _add_answers(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/v1/completions", responses=_STREAM, summary="continue a text", response_class=Response)
    async def post_completions(body: CompletionRequest, request: Request) -> Any:
        return await create_completion(gateway, body, request)

    @router.post("/v1/chat/completions", responses=_STREAM, summary="answer a chat", response_class=Response)
    async def post_chat_completions(body: ChatRequest, request: Request) -> Any:
        return await create_chat_completion(gateway, body, request)

    @router.post(
        "/v1/responses", responses=_STREAM, summary="answer, in the format of Responses", response_class=Response
    )
    async def post_responses(body: ResponseRequest, request: Request) -> Any:
        return await create_response(gateway, body, request)

    @router.post(
        "/v1/messages", responses=_STREAM, summary="answer a chat, in Anthropic's format", response_class=Response
    )
    async def post_messages(body: MessageRequest, request: Request) -> Any:
        return await create_message(gateway, body, request)

    @router.post("/v1/embeddings", summary="texts as vectors")
    async def post_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await create_embeddings(gateway, body, request)


def _add_scores(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/v1/decisions", summary="answer short questions about a shared state by the options' probabilities")
    async def post_decisions(body: DecisionRequest, request: Request) -> Response:
        return await create_decision(gateway, body, request)

    @router.post("/rerank", include_in_schema=False)  # as vLLM, and Cohere's client
    @router.post("/v2/rerank", include_in_schema=False)
    @router.post("/v1/rerank", summary="texts in the order of their relevance to a query")
    async def post_rerank(body: RerankRequest, request: Request) -> Response:
        return await create_rerank(gateway, body, request)

    @router.post("/score", include_in_schema=False)
    @router.post("/v1/score", summary="the relevance of texts to queries")
    async def post_score(body: ScoreRequest, request: Request) -> Response:
        return await create_score(gateway, body, request)


def _add_kept_requests(router: APIRouter, gateway: Gateway) -> None:
    @router.get("/v1/requests/{request_id}", responses=_STREAM, summary="resume a request", response_class=Response)
    async def get_request(
        request_id: str,
        request: Request,
        offset: Annotated[
            str | None,
            Query(pattern=POSITIONS, description="tokens already received, of each choice, as in an event's id"),
        ] = None,
        stream: bool = True,
        last_event_id: Annotated[
            str | None,
            Header(description="sent by browsers instead of offset", json_schema_extra={"pattern": POSITIONS}),
        ] = None,
    ) -> Any:
        known = offset if offset is not None else last_event_id
        return await resume_request(gateway, request, request_id, known=known, stream=stream)

    @router.delete("/v1/requests/{request_id}", summary="abort a request, or forget its answer")
    async def delete_request(request_id: str) -> Response:
        return await forget_request(gateway, request_id)


def _add_tokens(router: APIRouter, gateway: Gateway) -> None:
    @router.post("/v1/responses/input_tokens", summary="count the tokens of a response's prompt")
    async def post_input_tokens(body: InputTokensRequest, request: Request) -> Response:
        return await count_input_tokens(gateway, body, request)

    @router.post("/v1/messages/count_tokens", summary="count the tokens of a chat's prompt")
    async def post_count_tokens(body: CountRequest, request: Request) -> Response:
        return await count_tokens(gateway, body, request)

    @router.post("/tokenize", summary="the token ids of a text or a chat")
    async def post_tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await tokenize(gateway, body, request)

    @router.post("/detokenize", summary="the text of token ids")
    async def post_detokenize(body: DetokenizeRequest) -> Response:
        return await detokenize(gateway, body)
