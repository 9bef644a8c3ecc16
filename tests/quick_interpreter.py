"""Makes Triton's interpreter twice as fast, with the same results.

It interprets each program of a grid in Python, and most of its time goes to descriptions of types and shapes that it
makes anew for every operation, and to work without an effect.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

_SEMANTIC, _BUILDER = interpreter.interpreter_semantic, interpreter.interpreter_builder


def speed_up(patch: pytest.MonkeyPatch) -> None:
    _patch_language_once_per_launch(patch)
    _describe_each_type_once(patch)
    _look_up_numpy_types(patch)
    _leave_equal_shapes_alone(patch)
    # Overflows are computed, and then asserted only with the option ``debug``.
    assert not _BUILDER.options.debug
    patch.setattr(_SEMANTIC, "binary_op_sanitize_overflow_impl", lambda *_: None)


def _patch_language_once_per_launch(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches the language module at a kernel's launch, and again at each function call inside."""
    launch, patch_language = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()  # namespaces of the modules patched by the current launch
    builtins: dict[Any, dict[str, Any]] = {}  # of a namespace, as they are when interpreted

    def launch_patched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            patch_language(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        if namespace not in builtins:
            members = inspect.getmembers(namespace, tl.core.is_builtin)
            builtins[namespace] = {name: interpreted(member) for name, member in members}
        for name, member in builtins[namespace].items():
            scope.set_attr(namespace, name, member)

    def interpreted(member: Any) -> Any:
        body = getattr(member, "__wrapped__", member)  # without the check that there are semantics
        return lambda *args, **kwargs: body(*args, **{**kwargs, "_semantic": _SEMANTIC})

    patch.setattr(interpreter.GridExecutor, "__call__", launch_patched)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)


def _describe_each_type_once(patch: pytest.MonkeyPatch) -> None:
    """A type of blocks has a name and a size, and each tensor its shape as constants."""
    make_block_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    scalar = tl.tensor(None, tl.int32)

    def describe_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_block_type(self, element_ty, shape)
            make_tensor(tensor := object.__new__(tl.tensor), None, self)
            types[key] = {**vars(self), "as_constants": (tensor.shape, tensor.numel)}
        vars(self).update(types[key], element_ty=element_ty)

    def describe_tensor(self: Any, handle: Any, type_: Any) -> None:
        shape, numel = type_.as_constants if type_.is_block() else (scalar.shape, scalar.numel)
        vars(self).update(handle=handle, type=type_, dtype=type_.scalar, shape=shape, numel=numel)

    patch.setattr(tl.block_type, "__init__", describe_block_type)
    patch.setattr(tl.tensor, "__init__", describe_tensor)


def _look_up_numpy_types(patch: pytest.MonkeyPatch) -> None:
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def find_once(type_: Any) -> Any:
        element = type_.scalar
        if element.is_ptr():
            return np.dtype(np.uint64)
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    patch.setattr(interpreter, "_get_np_dtype", find_once)


def _leave_equal_shapes_alone(patch: pytest.MonkeyPatch) -> None:
    """Shapes were compared as a tuple with a list, so both sides of every operation were broadcast."""
    broadcast = _SEMANTIC.broadcast_impl_value

    def broadcast_others(lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.as_constants[0] is rhs.type.as_constants[0]:
            return lhs, rhs
        return broadcast(lhs, rhs)

    patch.setattr(_SEMANTIC, "broadcast_impl_value", broadcast_others)
