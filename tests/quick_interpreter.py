"""Makes Triton's interpreter three times as fast, with the same results.

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
    _patch_language_once(patch)
    _describe_each_type_once(patch)
    _look_up_numpy_types(patch)
    _leave_equal_shapes_alone(patch)
    _check_each_pair_of_types_once(patch)
    _leave_values_alone(patch)
    # Overflows are computed, and then asserted only with the option ``debug``.
    assert not _BUILDER.options.debug
    patch.setattr(_SEMANTIC, "binary_op_sanitize_overflow_impl", lambda *_: None)


def _patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """The interpreter patches the language module at each launch of a kernel, and at each function call inside."""
    patch_language, patched = interpreter._patch_lang, set[int]()  # namespaces of the modules that use the language
    builtins: dict[Any, dict[str, Any]] = {}  # of a namespace, as they are when interpreted

    class Lasting:
        def set_attr(self, target: object, name: str, value: object) -> None:
            patch.setattr(target, name, value, raising=False)

        def restore(self) -> None:
            """``patch`` does it."""

    def patch_once(function: Any) -> Lasting:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch_language(function)
        return Lasting()

    def patch_builtin(namespace: Any, builder: Any, scope: Any) -> None:
        if namespace not in builtins:
            members = inspect.getmembers(namespace, tl.core.is_builtin)
            builtins[namespace] = {name: interpreted(member) for name, member in members}
        for name, member in builtins[namespace].items():
            scope.set_attr(namespace, name, member)

    def interpreted(member: Any) -> Any:
        body = getattr(member, "__wrapped__", member)  # without the check that there are semantics

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = _SEMANTIC
            return body(*args, **kwargs)

        return call

    patch.setattr(interpreter, "_LangPatchScope", Lasting)
    patch.setattr(interpreter, "_patch_lang", patch_once)
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
        self.handle, self.type, self.dtype, self.shape, self.numel = handle, type_, type_.scalar, shape, numel

    def describe_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    patch.setattr(tl.block_type, "__init__", describe_block_type)
    patch.setattr(tl.tensor, "__init__", describe_tensor)
    patch.setattr(interpreter.TensorHandle, "__init__", describe_handle)


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


def _check_each_pair_of_types_once(patch: pytest.MonkeyPatch) -> None:
    """Of two operands, one is converted to the type of the other and broadcast. Numpy broadcasts by itself."""
    check, cast, types = _SEMANTIC.binary_op_type_checking_impl, _SEMANTIC.cast, dict[Any, Any]()
    unchanged, unknown = object(), object()

    def check_once(lhs: Any, rhs: Any, *options: bool) -> Any:
        key = (kind_of(lhs), kind_of(rhs), options)
        if (both := types.get(key)) is None:
            checked = check(lhs, rhs, *options)
            types[key] = tuple(change(*pair) for pair in zip((lhs, rhs), checked, strict=True))
            return checked
        left, right = both
        if left is unknown or right is unknown:
            return check(lhs, rhs, *options)
        return changed(lhs, left), changed(rhs, right)

    def kind_of(operand: Any) -> Any:
        return operand.type.name if isinstance(operand, tl.tensor) else (type(operand), operand)

    def change(operand: Any, checked: Any) -> Any:
        """What is done with operands of this kind: the constant, or the type, or nothing."""
        if checked is operand:
            return unchanged
        if not isinstance(operand, tl.tensor):
            return checked
        return checked.type if checked.dtype == operand.dtype else unknown

    def changed(operand: Any, how: Any) -> Any:
        if how is unchanged:
            return operand
        return how if isinstance(how, tl.tensor) else tl.tensor(operand.handle, how)

    def cast_others(value: Any, target: Any, *rounding: Any) -> Any:
        return value if value.dtype.name == target.scalar.name else cast(value, target, *rounding)

    patch.setattr(_SEMANTIC, "binary_op_type_checking_impl", check_once)
    patch.setattr(_SEMANTIC, "cast", cast_others)


def _leave_values_alone(patch: pytest.MonkeyPatch) -> None:
    """Arguments of every operation might be constants, or tuples of them."""
    unwrap = tl.core._unwrap_if_constexpr

    def unwrap_others(value: Any) -> Any:
        if type(value) is tl.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, tl.core.tuple)) else value

    patch.setattr(tl.core, "_unwrap_if_constexpr", unwrap_others)
