"""A model card for tests that need one without a model."""

from __future__ import annotations

from triptych.protocol.model_card import ModelCard

CARD = ModelCard(
    model="demo", model_type="llama", backend="fused", num_parameters=1, dtype="float32", device="cpu", vocab_size=100,
    max_model_len=32, eos_token_ids=(1, 2), page_size=4, num_pages=1000, max_num_seqs=4, max_live=6, load_s=0.5,
)  # fmt: skip
