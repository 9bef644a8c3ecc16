"""Token ids as they come out of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def prompt_ids(summary: Mapping[str, Any]) -> list[int]:
    """The prompt's ids out of the summary of a request with ``return_prompt``."""
    return [int(token_id) for token_id in np.frombuffer(summary["prompt_token_ids"], "<i4")]
