"""A CUDA graph without CUDA: recorded launches are repeated at the same addresses with the same numbers.

A tape holds the arguments of each operator and each Triton kernel. Replaying it runs no line of the recorded code: a
number that came from Python, or a tensor that has been moved since, keeps its recorded value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

Launch = Callable[[], None]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.results: list[torch.Tensor] = []  # in separate memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        self.results += [x for x in _tensors(result) if x.untyped_storage().data_ptr() not in given]

        def launch() -> None:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)

        self.launches.append(launch)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class TapeCapture:
    """A ``GraphCapture``. Recording also runs the code, so the tensors in ``kept`` are restored afterwards."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.num_captured = 0

    def __call__(self, run: Launch) -> Launch:
        before = [tensor.clone() for tensor in self.kept]
        recorder = _Recorder()
        original = InterpretedFunction.run

        def record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.launches.append(lambda: original(kernel, *args, **kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                return original(kernel, *args, **kwargs)

        with patch.object(InterpretedFunction, "run", record), recorder:
            run()
        for tensor, content in zip(self.kept, before, strict=True):
            tensor.copy_(content)
        self.num_captured += 1

        def replay() -> None:
            for result in recorder.results:  # memory of the graph, which others use between replays
                result.fill_(torch.nan if result.is_floating_point() else 99)
            for launch in recorder.launches:
                launch()

        return replay
