"""Trains the demo model from ``entries.json`` and writes a transformers checkpoint.

``python -m triptych.launch.demo_model.training.train --out DIR`` reproduces the committed one on two CPU cores: the
same seed gives the same text in the same order; the weights may differ in the last bits between machines.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..entries import Entry, load_entries
from .conversations import Mixture, Turn, ordered_pairs, sample_epoch
from .evaluate import answer_margins, held_out_turns, print_table
from .tokenizer import ConversationEncoder, EncodedConversation, train_tokenizer

MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How the committed checkpoint was trained."""

    num_tokens: int = 12_000_000  # of all rows, including questions, without padding
    batch_tokens: int = 6144  # per optimizer step, padding included
    vocab_size: int = 1536
    muon_lr: float = 0.02
    adamw_lr: float = 0.004
    warmup: float = 0.02  # share of the training
    review_from: float = 0.4  # share of the training after which weak answers are repeated
    review_every: int = 4  # epochs
    wanted_margin: float = 4.0  # logits; answers below it are weak
    num_threads: int = 2
    seed: int = 0


class Batch(NamedTuple):
    """Rows of similar length, padded on the right."""

    token_ids: torch.Tensor  # int64 [rows, length]
    is_answer: torch.Tensor  # bool [rows, length]
    num_tokens: int  # without padding


class Trainer:
    """Trains for ``config.num_tokens``; after ``config.review_from``, weak answers are repeated more often."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.num_threads)
        torch.use_deterministic_algorithms(True)
        self._config = config
        self._rng = random.Random(config.seed)
        self._entries = tuple(load_entries())
        self.tokenizer = _fit_tokenizer(self._entries, config)
        self.model = build_model(self.tokenizer)
        self._encoder = ConversationEncoder(self.tokenizer)
        self._optimizers = _make_optimizers(self.model, config)
        self._num_seen = 0  # tokens
        self._weak: list[Turn] = []

    def run(self) -> None:
        """Train to the end, printing one line per epoch."""
        started = time.perf_counter()
        epoch = 0
        while self._progress < 1:
            loss = self._run_epoch()
            epoch += 1
            if self._progress >= self._config.review_from and epoch % self._config.review_every == 0:
                self._review()
            seen, elapsed_s = self._num_seen / 1e6, time.perf_counter() - started
            print(f"epoch {epoch:3} {seen:6.2f} M tokens {elapsed_s:5.0f} s  loss {loss:.5f}", flush=True)

    @property
    def _progress(self) -> float:
        return self._num_seen / self._config.num_tokens

    def _run_epoch(self) -> float:
        """Mean loss of the epoch."""
        conversations = sample_epoch(self._entries, upweighted=self._weak, mixture=Mixture(), rng=self._rng)
        encoded = [self._encoder.encode(conversation) for conversation in conversations]
        batches = make_batches(encoded, batch_tokens=self._config.batch_tokens, rng=self._rng)
        return sum(self._step(batch) for batch in batches) / len(batches)

    def _step(self, batch: Batch) -> float:
        factor = _learning_rate_factor(self._progress, self._config.warmup)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        loss = _answer_loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self._num_seen += batch.num_tokens
        return loss.item()

    def _review(self) -> None:
        """Find the pairs whose answers are wrong, or just barely correct, in bfloat16 arithmetic."""
        turns = ordered_pairs(self._entries)
        off_topic = held_out_turns()
        self.model.train(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            margins = answer_margins(self.model, self._encoder, turns)
            declined = answer_margins(self.model, self._encoder, off_topic)
        self.model.train()
        self._weak = [turn for turn, margin in zip(turns, margins, strict=True) if margin < self._config.wanted_margin]
        num_exact, num_declined = sum(margin > 0 for margin in margins), sum(margin > 0 for margin in declined)
        print(f"exact {num_exact}/{len(turns)}, weak {len(self._weak)}, off-topic {num_declined}/{len(off_topic)}")


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama of 1.2 million parameters: grouped-query attention, head_dim 64, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batches(rows: Sequence[EncodedConversation], *, batch_tokens: int, rng: random.Random) -> list[Batch]:
    """Batches of rows of similar length in random order, each of at most ``batch_tokens`` including padding."""
    batches = []
    waiting: list[EncodedConversation] = []
    for row in sorted(rows, key=lambda row: len(row.token_ids) + rng.random()):
        if waiting and (len(waiting) + 1) * len(row.token_ids) > batch_tokens:
            batches.append(_stack(waiting))
            waiting = []
        waiting.append(row)
    batches.append(_stack(waiting))
    rng.shuffle(batches)
    return batches


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16, greedy by default, and the tokenizer with its chat template to ``folder``."""
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def _fit_tokenizer(entries: tuple[Entry, ...], config: TrainConfig) -> PreTrainedTokenizerFast:
    conversations = sample_epoch(entries, upweighted=(), mixture=Mixture(), rng=random.Random(config.seed))
    texts = [text for conversation in conversations for turn in conversation.turns for text in turn]
    return train_tokenizer(texts, vocab_size=config.vocab_size, max_length=MAX_POSITIONS)


def _make_optimizers(model: LlamaForCausalLM, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding (tied to the output) and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _learning_rate_factor(progress: float, warmup: float) -> float:
    """Linear warm-up, then a half cosine down to zero."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def _answer_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the answer tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        # Only logits of positions before an answer token: the output layer is a third of the work.
        logits = model.lm_head(hidden[:, :-1][batch.is_answer[:, 1:]])
    return functional.cross_entropy(logits.float(), batch.token_ids[:, 1:][batch.is_answer[:, 1:]])


def _stack(rows: Sequence[EncodedConversation]) -> Batch:
    length = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    is_answer = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        is_answer[index, : len(row.token_ids)] = torch.tensor(row.is_answer)
    return Batch(token_ids, is_answer, sum(len(row.token_ids) for row in rows))


def _parse_arguments() -> tuple[Path, TrainConfig]:
    parser = argparse.ArgumentParser(description="Train the demo model and count its exact answers.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    for field in fields(TrainConfig):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    return arguments.pop("out"), TrainConfig(**arguments)


def main() -> None:
    """Train, save and evaluate."""
    out, config = _parse_arguments()
    trainer = Trainer(config)
    trainer.run()
    save_checkpoint(trainer.model, trainer.tokenizer, out)
    print_table(out)


if __name__ == "__main__":
    main()
