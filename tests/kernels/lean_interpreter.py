"""Leaves out what Triton's interpreter computes again and again, and what it computes and throws away.

An operation of a kernel costs the interpreter about a hundred microseconds, hardly any of which is numpy's. What is
left out here is two thirds of that, and no number of a kernel depends on it.
"""

import dataclasses

import pytest
import triton.language as tl
from triton.runtime import interpreter


class _Kept:
    """What a launch calls at its end, to make Triton's language again what compilers need; here nothing compiles."""

    def restore(self):
        pass


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels of this process interpreted so, until ``monkeypatch`` is undone."""
    _leave_overflow_checks_out(monkeypatch)
    _patch_language_once(monkeypatch)
    _remember_types(monkeypatch)
    _compare_shapes_first(monkeypatch)


def _leave_overflow_checks_out(monkeypatch):
    """Of sums and products of integers: six more operations each, for an assertion that only the option debug makes."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the assertions are made"
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def _patch_language_once(monkeypatch):
    """Not at every launch, and at every call of a function within a kernel: that walks through whole modules."""
    inner, seen = interpreter._patch_lang, set()

    def patch_lang(fn):
        if id(fn.__globals__) not in seen:
            seen.add(id(fn.__globals__))
            inner(fn)
        return _Kept()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_lang)


def _remember_types(monkeypatch):
    """What follows from a type and a shape: each number, row and tile of a kernel is made with one anew."""
    numpy_types, blocks, tensors = {}, {}, {}
    get_np_dtype, make_block, make_tensor = interpreter._get_np_dtype, tl.block_type.__init__, tl.tensor.__init__

    def numpy_type(dtype):
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = get_np_dtype(dtype)
        return numpy_types[dtype.name]

    def init_block(block, element_ty, shape):
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key in blocks:
            vars(block).update(blocks[key], element_ty=element_ty)
        else:
            make_block(block, element_ty, shape)
            blocks[key] = dict(vars(block))

    def init_tensor(tensor, handle, type):  # noqa: A002 -- Triton's name
        if type.name in tensors:
            vars(tensor).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            make_tensor(tensor, handle, type)
            tensors[type.name] = vars(tensor) | {"handle": None}

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    monkeypatch.setattr(tl.block_type, "__init__", init_block)
    monkeypatch.setattr(tl.tensor, "__init__", init_tensor)


def _compare_shapes_first(monkeypatch):
    """Of two operands, most of which have the same, so that neither has to be broadcast."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_impl_value)
