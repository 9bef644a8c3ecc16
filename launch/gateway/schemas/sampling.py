"""How tokens are chosen and when they end: the fields shared by completions, chats and responses."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from ....protocol.sampling import MAX_LOGIT_BIASES
from .base import ANYTHING, ApiModel, List, Neutral, few_entries, limited
from .structure import StructuredOutputs

# Fields of OpenAI, vLLM, SGLang and llama.cpp that have no effect with these values.
COMMON_NEUTRAL: Neutral = {
    "user": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "metadata": ANYTHING,
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "moderation": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "ebnf": (),
    "regex": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "lora_path": (),
    "session_params": (),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "custom_logit_processor": (),
    "custom_params": (),
    "rid": ANYTHING,
    "data_parallel_rank": (0,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "cache_prompt": (True,),
}


class StreamOptions(ApiModel):
    """What a stream reports besides its text."""

    NEUTRAL: ClassVar[Neutral] = {"include_obfuscation": (False,)}
    include_usage: bool | None = Field(None, description="send a last chunk, without choices, with the usage")
    continuous_usage_stats: bool | None = Field(None, description="every chunk of a choice has the usage so far")


def says_usage(options: StreamOptions | None) -> bool:
    """Whether every chunk of a stream has its usage so far."""
    return options is not None and bool(options.continuous_usage_stats)


class ServiceFields(ApiModel):
    """Who computes a request, and when."""

    SERVICE: ClassVar[tuple[str, ...]] = ("priority", "deadline_ms", "cache_salt")  # the pipeline's requests have them
    model: str | None = Field(None, description="as listed by /v1/models; by default the served model")
    priority: int | None = Field(None, ge=-1000, le=1000, description="lowest first (--policy priority)")
    deadline_ms: float | None = Field(None, gt=0, le=1e9, description="from receipt to the end, else 504")
    cache_salt: str | None = Field(None, max_length=256, description="prefixes are shared only with the same salt")

    def service_options(self) -> dict[str, Any]:
        """Those given, as the pipeline's requests have them."""
        return {name: value for name in self.SERVICE if (value := getattr(self, name)) is not None}


def kept_tokens(description: str) -> Any:
    """The field ``truncate_prompt_tokens``, as in vLLM."""
    return Field(
        None, ge=-1, le=2**31 - 1, json_schema_extra={"not": {"const": 0}}, description=description
    )  # fmt: skip


class PromptFields(ServiceFields):
    """Also how long a prompt may wait, and how much of it is computed."""

    SERVICE = (*ServiceFields.SERVICE, "max_queue_ms")
    max_queue_ms: float | None = Field(None, gt=0, le=1e9, description="from receipt to the first step, else 504")
    truncate_prompt_tokens: int | None = kept_tokens("keep this many of the prompt's last tokens; -1: as many as fit")


class SamplingFields(PromptFields):
    """Named as in OpenAI's and vLLM's APIs. Null means the default."""

    temperature: float | None = limited("temperature", description="0: greedy; the default is the model's, or 1")
    top_p: float | None = limited("top_p")
    top_k: int | None = limited("top_k", description="0 and -1: off")
    min_p: float | None = limited("min_p")
    repetition_penalty: float | None = limited("repetition_penalty")
    presence_penalty: float | None = limited("presence_penalty")
    frequency_penalty: float | None = limited("frequency_penalty")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="the same seed gives the same answer; negative seeds have 2**63 added"
    )
    logit_bias: dict[str, float] | None = Field(None, description="token id to bias, -100 to 100")
    stop: str | List[str] | None = Field(None, description="at most 16 strings of at most 256 characters")
    stop_token_ids: List[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = Field(None, description="continue after the end of sequence")
    min_tokens: int | None = limited("min_tokens")
    max_tokens: int | None = limited("max_tokens")
    n: int | None = limited("n", description="choices for each prompt")
    prompt_logprobs: int | None = limited(
        "prompt_logprobs", description="of the prompt's tokens and this many alternatives; not with stream"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = Field(None, description="return token ids of prompt and choices beside the text")
    request_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,40}$", description="the end of the reply's id; by default random"
    )
    resumable: bool | None = Field(
        None, description="a lost connection does not abort; GET /v1/requests/{id} continues where it stopped"
    )

    _few_biases = field_validator("logit_bias", mode="before")(few_entries(MAX_LOGIT_BIASES))
