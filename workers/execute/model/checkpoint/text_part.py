"""The text model inside a multimodal model: its config, and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families whose text part was compared with the whole model; others may store it differently.
_SEEING = {
    "apertus1p5", "gemma3", "idefics3", "internvl", "lfm2_vl", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "qwen3_5", "qwen3_5_moe", "smolvlm",
}  # fmt: skip
# As published, as saved by current transformers, and of models whose text part has the usual names.
_PREFIXES = (
    ("language_model.", ""),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
RENAMINGS = {"^" + re.escape(prefix): instead for prefix, instead in _PREFIXES}  # as transformers expects them
_OTHER_SENSES = ("visual.", "model.visual.", "vision_tower.", "multi_modal_projector.")
# Text models that differ from another one only in the positions of images; those of text are the usual ones.
_SAME_FOR_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def text_name(name: str) -> str:
    """The name, in a text-only model, of a tensor or module of the whole model."""
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the text model: name in a text-only model -> stored name."""
    names = {text_name(name): name for name in stored if not name.startswith(_OTHER_SENSES)}
    if all(name == as_stored for name, as_stored in names.items()):
        return names
    return {name: stored for name, stored in names.items() if name != stored or name == "lm_head.weight"}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text part; ``config`` itself for a text-only model, or if the family is not known here."""
    if config.model_type not in _SEEING:
        return config
    text: PretrainedConfig = config.get_text_config()
    if text.dtype is None:
        text.dtype = config.dtype
    text.tie_word_embeddings = config.tie_word_embeddings
    if (same := _SAME_FOR_TEXT.get(text.model_type)) is None:
        return text
    from transformers import AutoConfig

    values: dict[str, Any] = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
    alone: PretrainedConfig = AutoConfig.for_model(same, **values)
    return alone
