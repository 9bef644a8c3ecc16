"""Rank 0's side of tensor parallelism: starts the other ranks, sends them its steps, and exits if one of them exits.

Orders go through a pipe to each rank, so an idle rank can wait without a timeout, and if rank 0 exits, the pipe closes.
Only the sums in the layers go through torch.distributed.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgpack
import torch

from .....protocol.config import CacheConfig, ModelConfig, PipelineConfig, SchedulerConfig
from .....protocol.system_calls import pidfd_open
from ...sampling.sampler import Sampler
from ...scheduling.moves import Moves
from ...step import StepInputs
from ..modules.forward import PagedForward
from ..modules.runner import TorchRunner
from .group import join_group
from .orders import encode_order

logger = logging.getLogger(__name__)

_RENDEZVOUS = "ranks-"  # a file in the run directory, read and written as long as the group lives
_LAST_WORDS_S = 5.0  # for a failed rank to log why and exit, before rank 0 reports the failure as seen here


class OutOfStep(Exception):
    """A rank failed in the middle of a step: the results of the others and the content of all pages are void."""


class Ranks:
    """Ranks 1 to size - 1, each a child of this process. All get the same orders in the same sequence."""

    def __init__(
        self,
        configs: tuple[ModelConfig, CacheConfig, SchedulerConfig],
        *,
        folder: Path,
        run_dir: Path,
        device: torch.device,
    ) -> None:
        """Start the ranks and wait until all have joined. If one exits before ``close``, this process ends too."""
        model, cache, scheduler = configs
        size = model.tensor_parallel_size
        for stale in run_dir.glob(f"{_RENDEZVOUS}*"):  # left by an earlier process that was killed
            stale.unlink(missing_ok=True)
        self._rendezvous = rendezvous = run_dir / f"{_RENDEZVOUS}{secrets.token_hex(8)}"
        self._children = [_start(rank, rendezvous) for rank in range(1, size)]
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()
        config = PipelineConfig(model=model, cache=cache, scheduler=scheduler).to_json()
        self._write(msgpack.packb({"config": config, "folder": str(folder), "device": str(device)}))
        self.group = join_group(device, rank=0, size=size, rendezvous=rendezvous)

    @contextmanager
    def computing(self, order: StepInputs | Moves) -> Iterator[None]:
        """Send ``order`` to the ranks; the block carries it out on this rank.

        Raises:
            OutOfStep: it failed on this rank or another.
        """
        try:
            self._write(encode_order(order))
            yield
        except Exception as error:
            self._watcher.join(_LAST_WORDS_S)
            raise OutOfStep("a tensor-parallel step failed") from error

    def close(self) -> None:
        """End the orders, so that the ranks exit, and wait for them."""
        self._closing = True
        for child in self._children:
            assert child.stdin is not None, "a pipe was asked for"
            with suppress(BrokenPipeError):  # from a rank that exited with an order in its pipe
                child.stdin.close()
        self._watcher.join()
        self.group.leave()
        self._rendezvous.unlink(missing_ok=True)

    def _write(self, order: bytes) -> None:
        for child in self._children:
            assert child.stdin is not None, "a pipe was asked for"
            child.stdin.write(order)
            child.stdin.flush()

    def _watch(self) -> None:
        """End this process with a rank that exits before ``close``; returns when all have exited."""
        with selectors.DefaultSelector() as selector:
            for rank, child in enumerate(self._children, start=1):
                selector.register(pidfd_open(child.pid), selectors.EVENT_READ, (rank, child))
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    rank, child = key.data
                    code = child.wait()
                    if not self._closing:
                        _end_with(rank, code)


class LeadingRunner(TorchRunner):
    """The runner of rank 0: all other ranks compute each of its steps too, but only rank 0 samples."""

    def __init__(self, ranks: Ranks, forward: PagedForward, sampler: Sampler, **sizes: int) -> None:
        """For all arguments but ``ranks``, see ``TorchRunner``."""
        super().__init__(forward, sampler, **sizes)
        self.ranks = ranks

    def is_fatal(self, error: Exception) -> bool:
        """Also True if ranks are out of step: the step may not be retried in halves then."""
        return isinstance(error, OutOfStep) or super().is_fatal(error)

    def move(self, moves: Moves) -> None:
        with self.ranks.computing(moves):
            super().move(moves)

    def compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        with self.ranks.computing(inputs):
            return super().compute_logits(inputs)


def _start(rank: int, rendezvous: Path) -> subprocess.Popen[bytes]:
    """Start the process of a rank. It logs to the same place as this one."""
    package = __package__.rsplit(".", 2)[0]
    command = [sys.executable, "-m", f"{package}.rank", "--rank", str(rank), "--rendezvous", str(rendezvous)]
    return subprocess.Popen([*command, "--parent", str(os.getpid())], stdin=subprocess.PIPE)


def _end_with(rank: int, code: int) -> None:
    """End this process the way its rank ended, so that the supervisor sees one death of execute, and its cause."""
    logger.error("tensor-parallel rank %d ended with exit code %d, and execute ends with it", rank, code)
    sys.stderr.flush()
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)
