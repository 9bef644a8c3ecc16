"""Builds the hash LM as a model to serve: every part of the pipeline is real except the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

from ...protocol.byte_level import BYTE_OF
from ...protocol.config import CacheConfig, ModelConfig, SchedulerConfig
from ...protocol.model_card import ModelCard
from ...protocol.tokenizer_files import TokenizerFacts, save_tokenizer
from .hash_lm import EMBEDDING_SIZE, HashRunner
from .kv_file import KvFile

# End of sequence, which the hash never yields, one token per byte, and a spare one, which makes the modulus prime: then
# every token of the context counts.
VOCAB_SIZE = 258
MAX_MODEL_LEN = 4096
NUM_PAGES = 4096
EOS, SPARE = "<|end|>", "<|spare|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


def build_hash_runner(
    model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig, *, run_dir: Path, kv_file: KvFile | None = None
) -> tuple[HashRunner, ModelCard]:
    """The runner and its card. Writes a byte tokenizer into the run directory."""
    num_pages = cache.num_pages or NUM_PAGES
    facts = TokenizerFacts(
        vocab_size=VOCAB_SIZE, chat_template=CHAT_TEMPLATE, special_tokens={"eos_token": EOS}, bos_token_id=None
    )
    save_tokenizer(run_dir, byte_tokenizer_json(), facts)
    card = ModelCard(
        model=model.model,
        model_type="hash-lm",
        backend="hash",
        num_parameters=0,
        dtype="int64",
        device="cpu",
        vocab_size=VOCAB_SIZE,
        max_model_len=min(model.max_model_len or MAX_MODEL_LEN, num_pages * cache.page_tokens),
        eos_token_ids=(0,),
        page_size=cache.page_tokens,
        num_pages=num_pages,
        max_num_seqs=scheduler.num_rows,
        max_live=scheduler.max_live,
        load_s=0.0,
        embedding_size=EMBEDDING_SIZE,
        prompts={"query": "find: ", "document": ""},
    )
    runner = HashRunner(
        VOCAB_SIZE,
        num_pages=num_pages,
        page_size=cache.page_tokens,
        num_host_pages=cache.host_pages,
        step_ms=model.hash_step_ms,
        token_us=model.hash_token_us,
        kv_file=kv_file,
    )
    return runner, card


def byte_tokenizer_json() -> str:
    """A byte-level tokenizer without merges: token ``1 + b`` is byte ``b``, token 0 ends a sequence."""
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 0, "content": EOS, **plain}, {"id": VOCAB_SIZE - 1, "content": SPARE, **plain}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {EOS: 0} | {character: 1 + byte for character, byte in BYTE_OF.items()}
    vocab[SPARE] = VOCAB_SIZE - 1
    model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": False, "byte_fallback": False}
    return json.dumps({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": model,
    })  # fmt: skip
