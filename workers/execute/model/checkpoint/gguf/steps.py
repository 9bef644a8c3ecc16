"""What llama.cpp's converter does to weights, undone. All take a weight as the file has it, and the model's config."""

from __future__ import annotations

from typing import Any

import torch


def turned_back(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries or keys, [heads * channels, ...]: channels that turn together are neighbours in the file, halves here."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return stored.reshape(-1, head_dim // 2, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)


def minus_one(stored: torch.Tensor, config: Any) -> torch.Tensor:
    return stored - 1


def transposed(stored: torch.Tensor, config: Any) -> torch.Tensor:
    return stored.swapaxes(-1, -2)


def log_of_negated(stored: torch.Tensor, config: Any) -> torch.Tensor:
    return torch.log(-stored)


def flat(stored: torch.Tensor, config: Any) -> torch.Tensor:
    return stored.flatten()


def alternating(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of gates and of the rest by turns, [experts, 2 * rows, ...]; in the file, one after the other."""
    experts, rows = stored.shape[:2]
    return stored.reshape(experts, 2, rows // 2, *stored.shape[2:]).swapaxes(1, 2).reshape(stored.shape)


def alternating_columns(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """The same of weights that are stored with their inputs first, [experts, inputs, 2 * rows]."""
    return alternating(stored, config).swapaxes(1, 2)


def by_heads(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Queries, keys and values of each head together, [heads * 3 * channels, ...]; in the file, of all heads."""
    parts = stored.reshape(3, config.num_attention_heads, -1, *stored.shape[1:])
    return parts.swapaxes(0, 1).reshape(stored.shape)


def by_key_heads(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Of each head of keys: its queries, its key and its value; in the file, all queries, all keys, all values."""
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    key_heads = (stored.shape[0] // head_dim - heads) // 2
    parts = torch.split(stored, [heads * head_dim, key_heads * head_dim, key_heads * head_dim])
    grouped = [part.reshape(key_heads, -1, *stored.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(stored.shape)


def by_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts)


def by_experts(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of each expert together, [experts, rows, ...]."""
    return torch.cat(parts, dim=1)


def keys_and_values(parts: list[torch.Tensor]) -> torch.Tensor:
    """What maps latents to the keys and values of each head, [heads * channels, latent]; in the file, that of keys is
    transposed, and each head for itself.
    """
    keys, values = parts
    return torch.cat((keys.swapaxes(1, 2), values), dim=1).flatten(0, 1)


def by_delta_heads(stored: torch.Tensor, config: Any) -> torch.Tensor:
    """Of each head of keys of a delta rule: its query, key, values and gates; in the file, those of all heads."""
    heads, key_rows = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    value_rows = config.linear_num_value_heads * config.linear_value_head_dim
    parts = torch.split(stored, [key_rows, key_rows, value_rows, value_rows])
    return torch.cat([part.reshape(heads, -1, *stored.shape[1:]) for part in parts], dim=1).reshape(stored.shape)
