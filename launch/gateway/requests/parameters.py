"""Converts the fields of a request to the pipeline's, which validates them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....protocol.errors import TriptychError
from ....protocol.sampling import SamplingParams, bias_of_json
from ..errors import ApiError, unsupported
from ..schemas.sampling import PromptFields, SamplingFields

if TYPE_CHECKING:
    from ..state import Gateway

COMPLETION_TOKENS = 16  # the default of OpenAI's completions
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "min_tokens", "n",
)  # fmt: skip


def pipeline_options(
    body: SamplingFields,
    gateway: Gateway,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    """Arguments of ``AsyncClient.submit`` besides the prompt. ``max_tokens`` None: until the context is full.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.seed is not None:
        given["seed"] = body.seed % 2**63  # OpenAI allows signed 64-bit values, the pipeline only non-negative ones
    params = SamplingParams(
        **{
            **gateway.sampling_defaults,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "logit_bias": bias_of_json(body.logit_bias or {}),
            "include_stop_str": bool(body.include_stop_str_in_output),
        }
    )
    # to_wire leaves out the pipeline's defaults; max_tokens None is not one.
    options: dict[str, Any] = {**params.to_wire(), **prompt_options(body)}
    if body.resumable:
        options["lease_s"] = gateway.config.resume_s
    if body.return_token_ids:
        options["return_prompt"] = True
    return options


def prompt_options(body: PromptFields) -> dict[str, Any]:
    """Those of them that do not depend on what is done with the prompt."""
    return {**body.service_options(), **truncation(body.truncate_prompt_tokens, where="left")}


def truncation(num_kept: int | None, *, where: str) -> dict[str, Any]:
    """The options for ``truncate_prompt_tokens``.

    Raises:
        ApiError: it is 0.
    """
    if num_kept == 0:
        raise ApiError("truncate_prompt_tokens is 0, it must be -1 or at least 1", param="truncate_prompt_tokens")
    if num_kept is None:
        return {}
    return {"truncation": where, **({"max_prompt_tokens": num_kept} if num_kept > 0 else {})}


def check_stream(body: SamplingFields) -> None:
    """
    Raises:
        ApiError: incompatible fields.
    """
    if body.stream_options is not None and not body.stream:
        raise unsupported("stream_options", "stream_options requires stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs need a complete answer: they exclude stream")


def form_name(body: SamplingFields) -> str:
    """The field that specified the form of the answer."""
    return "response_format" if body.structured_outputs is None else "structured_outputs"


@contextmanager
def named_as(**names: str) -> Iterator[None]:
    """Errors about a field of the pipeline get the client's name of that field: ``named_as(max_tokens="...")``."""
    try:
        yield
    except TriptychError as error:
        name = names.get(error.param or "", error.param)
        # No client calls it that; the others read well as they are.
        if error.param == "structured" and name is not None:
            error.message = error.message.replace("structured", name, 1)
        error.param = name
        raise
