"""Tensors on the device, and what arguments of operators hold of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class DeviceTensor(torch.Tensor):
    """A tensor on the device. ``raw`` has its numbers; the ``raw`` of a view shares memory with that of its base."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        with torch.inference_mode(False):  # else no view of a tensor from outside could be made inside
            tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
                device=torch.device("cuda:0"),
            )  # fmt: skip
        tensor.raw = raw
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.raw!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do in Python what torch does with device tensors in C++, below the modes that see operators."""
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            sent = tuple(torch.tensor(x, dtype=torch.int64).to("cuda") if isinstance(x, list) else x for x in index)
            args = (args[0], sent, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} without the device")


def leaves_of(tree: Any) -> Iterator[Any]:
    """What is in a tree of tuples, lists and maps. Torch's own function for this takes most of an operator's time."""
    if type(tree) in (tuple, list):
        for branch in tree:
            yield from leaves_of(branch)
    elif type(tree) is dict:
        yield from leaves_of(list(tree.values()))
    else:
        yield tree


def changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with its leaves changed."""
    if type(tree) in (tuple, list):
        return type(tree)([changed(branch, change) for branch in tree])
    if type(tree) is dict:
        return {name: changed(branch, change) for name, branch in tree.items()}
    return change(tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def raw_of(tree: Any) -> Any:
    return changed(tree, lambda leaf: leaf.raw if isinstance(leaf, DeviceTensor) else leaf)


def without_device(tree: Any) -> Any:
    """The arguments with the CPU in place of the device."""
    cpu = torch.device("cpu")
    return changed(tree, lambda leaf: cpu if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf)


def has_mask(args: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
