"""Triton's interpreter, without the work that it repeats in every operation of a kernel.

Kernels compute the same numbers; tests of them take less than half of the time.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch


def speed_up() -> None:
    """Let the interpreter do once what it does in every call and for every value."""
    from triton.runtime import interpreter

    _patch_functions_once(interpreter)
    _look_types_up(interpreter)
    _make_types_once(interpreter)
    _broadcast_where_shapes_differ(interpreter)
    _convert_where_types_differ(interpreter)
    _call_builtins_with_their_options(interpreter)
    _unwrap_only_what_is_wrapped(interpreter)
    _round_float8(interpreter)
    # The result of the check is not used without the option debug.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_functions_once(interpreter: Any) -> None:
    """Patch the names of the language once, and not in every function that a kernel calls."""
    tl, is_builtin = interpreter.tl, interpreter.tl.core.is_builtin
    patch_all = interpreter._patch_lang
    names: dict[Any, list[str]] = {}
    packages: dict[int, list[Any]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [n for n, m in inspect.getmembers(package) if is_builtin(m)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    def patch_once(function: Any) -> Any:
        scope = function.__globals__
        if id(scope) not in packages:
            packages[id(scope)] = [v for v in scope.values() if v is tl or v is tl.core]
        left = any(is_builtin(package.load) for package in packages[id(scope)])
        return patch_all(function) if left else interpreter._LangPatchScope()

    interpreter._patch_builtin = patch
    interpreter._patch_lang = patch_once


def _look_types_up(interpreter: Any) -> None:
    """Keep NumPy's type of each type, which is else looked up in a table made for it."""
    tl, find_dtype = interpreter.tl, interpreter._get_np_dtype
    dtypes: dict[Any, Any] = {}

    def np_dtype(kind: Any) -> Any:
        element = kind.scalar
        if isinstance(element, tl.pointer_type):
            return find_dtype(element)
        if element not in dtypes:
            dtypes[element] = find_dtype(element)
        return dtypes[element]

    interpreter._get_np_dtype = np_dtype


def _make_types_once(interpreter: Any) -> None:
    """Keep what the type of a block and of its values consist of, by element type and shape."""
    core = interpreter.tl.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(s.value if type(s) is core.constexpr else s for s in shape)
        key = (element.name, getattr(element, "address_space", ""), sizes)
        if key not in types:
            make_type(self, element, shape)
            example = core.tensor.__new__(core.tensor)
            make_tensor(example, None, self)
            types[key] = {**vars(self), "of_values": (example.numel, example.shape)}
        vars(self).update(types[key])

    single = core.tensor.__new__(core.tensor)
    make_tensor(single, None, core.int32)
    of_one_value = (single.numel, single.shape)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if type(kind) is core.block_type:
            self.handle, self.type, self.dtype = handle, kind, kind.element_ty
            self.numel, self.shape = kind.of_values
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.numel, self.shape = of_one_value

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _broadcast_where_shapes_differ(interpreter: Any) -> None:
    """Leave values of one shape as they are, and repeat a number without a type made for it."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, block = semantic.broadcast_impl_value, interpreter.tl.core.block_type

    def repeated(self: Any, number: Any, like: Any) -> Any:
        kind = like.with_element_ty(number.type.scalar)
        return self.make_tensor(self.builder.create_splat(kind, number.handle), kind)

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        blocks = type(left.type) is block, type(right.type) is block
        match blocks:
            case (True, False):
                return left, repeated(self, right, left.type)
            case (False, True):
                return repeated(self, left, right.type), right
            case (False, False):
                return left, right
        mine, theirs = left.type.shape.values, right.type.shape.values
        if mine == theirs:
            return left, right
        pairs = list(zip(mine, theirs, strict=False))
        if len(mine) != len(theirs) or any(1 not in (m, t) and m != t for m, t in pairs):
            return broadcast(self, left, right)
        both = [t if m == 1 else m for m, t in pairs]
        return stretched(self, left, both), stretched(self, right, both)

    def stretched(self: Any, value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        kind = block(value.type.scalar, shape)
        return self.make_tensor(self.builder.create_broadcast(value.handle, shape), kind)

    semantic.broadcast_impl_value = broadcast_impl_value


def _convert_where_types_differ(interpreter: Any) -> None:
    """Leave values of one type as they are, and find the type of others once."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    convert, find_type = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    same = {t.name for t in (core.float32, core.float64, core.int1, core.int32, core.int64)}
    found: dict[Any, Any] = {}

    def checked(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        if type(left) is type(right) is core.tensor:
            name = left.dtype.name
            if name == right.dtype.name and name in same:
                return self.broadcast_impl_value(left, right)
        return convert(self, left, right, *options, **named)

    def computation_type(
        self: Any, a: Any, a_single: bool, b: Any, b_single: bool, div: bool
    ) -> Any:
        key = (a.name, a_single, b.name, b_single, div)
        if key not in found:
            found[key] = find_type(self, a, a_single, b, b_single, div)
        return found[key]

    semantic.binary_op_type_checking_impl = checked
    semantic.computation_type_impl = computation_type


def _call_builtins_with_their_options(interpreter: Any) -> None:
    """Say to the functions of the language who interprets them, without a copy of their options."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*arguments, **options)

        scope.set_attr(package, name, call)

    interpreter._patch_attr = patch_attr


def _unwrap_only_what_is_wrapped(interpreter: Any) -> None:
    """Ask first whether a value is a tensor, or a type the same object: that is what most are."""
    core = interpreter.tl.core
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__

    def unwrapped(value: Any) -> Any:
        return value if type(value) is core.tensor else unwrap(value)

    def same_type(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = same_type


def _round_float8(interpreter: Any) -> None:
    """Carry into the exponent when a float8 number is rounded up, which the interpreter omits."""
    convert = interpreter._convert_float

    def rounded(values: Any, kind: Any, wanted: Any, mode: Any) -> Any:
        if wanted != interpreter.tl.float8e4nv or kind != interpreter.tl.float32:
            return convert(values, kind, wanted, mode)
        numbers = torch.from_numpy(values.astype("float32")).to(torch.float8_e4m3fn)
        return numbers.view(torch.uint8).numpy()

    interpreter._convert_float = rounded
