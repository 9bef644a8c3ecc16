"""What is expected of the compiled decoder's logits: those of transformers, and the same bits in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from tests.workers.execute.model.native.decoders import FEW_PAGES, PLAINLY, make_inputs, make_small_decoder, run_chunks
from triptych.protocol.arrays import Int32
from triptych.workers.execute.kernels.structures import Format

NUM_TOKENS = 150


def random_tokens(count: int = NUM_TOKENS, seed: int = 0) -> Int32:
    """Any but the special ones, of the smallest vocabulary."""
    return np.random.default_rng(seed).integers(8, 77, count, dtype=np.int32)


def exact_logits(checkpoint: Path, token_ids: Int32) -> npt.NDArray[np.float64]:
    """Logits [tokens, V] of transformers, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **PLAINLY)
    with torch.inference_mode():
        logits = model(torch.from_numpy(token_ids)[None].long(), use_cache=False).logits
    exact: npt.NDArray[np.float64] = logits[0].numpy()
    return exact


def assert_same_bits_in_every_step(checkpoint: Path, level: str, format_: Format) -> None:
    """A sequence has the same logits in any chunks, beside any others, and on any number of threads."""
    decoder, token_ids = make_small_decoder(checkpoint, level, format_), random_tokens()
    alone = run_chunks(decoder, token_ids, [NUM_TOKENS])
    ones = [1] * 18
    for sizes in ([*ones, 100, *ones, 14], [7] * 21 + [3], [64, 64, 22], [149, 1]):  # single tokens in two pages each
        assert np.array_equal(run_chunks(decoder, token_ids, sizes), alone), sizes
    mates = [(random_tokens(seed=seed), 0, 30 + seed) for seed in (1, 2)]
    first = decoder.run(make_inputs([(token_ids, 0, 60), *mates], num_pages=FEW_PAGES)).logits[:60]
    assert np.array_equal(first, alone[:60])
    single = make_small_decoder(checkpoint, level, format_, num_threads=1)
    assert np.array_equal(run_chunks(single, token_ids, [NUM_TOKENS]), alone)
