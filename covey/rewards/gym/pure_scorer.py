"""Decides whether a reasoning_gym scorer only reads and compares data, and so needs no sandbox.

Before a scorer runs, Covey inspects the bytecode of its method `score_answer`, and of all
functions, methods, lambdas and comprehensions that this method uses. A scorer is pure if it uses
only what this module lists: bytecode instructions, builtins, functions of `math` and `json`, regex
patterns, and names of methods. Any other scorer is impure, and runs in the sandbox.

A pure scorer finishes quickly, because it has no `while` loops, powers or shifts, and never
combines `range` with a function that parses whole numbers from text. A pure scorer keeps no state
between completions, because it sets no attributes and cannot change values that it shares with
other calls.

The inspection assumes that the dataset's entry and options are plain data, such as numbers, strings
and lists.
"""

from __future__ import annotations

import builtins
import decimal
import dis
import inspect
import json
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

MOST_CHARACTERS = 4_000
"""Maximum length of an answer for a pure scorer, in characters. Some scorers take time quadratic in
the length of the answer."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BUILTINS = _words(
    """
    abs all any bool chr complex dict enumerate filter float frozenset int isinstance len list map
    max min next ord range repr reversed set sorted str sum tuple zip AssertionError AttributeError
    Exception IndexError KeyError OverflowError TypeError ValueError ZeroDivisionError
    """
)
"""Builtins that a pure scorer may call. `print` is not allowed, nor are `round` and `pow`, which
can take long."""

FUNCTIONS = (
    decimal.Decimal, decimal.InvalidOperation, json.loads, json.dumps, json.JSONDecodeError,
    math.exp, math.gcd, math.isclose, math.isfinite, math.isinf, math.isnan, math.prod, math.sqrt,
)  # fmt: skip
"""Functions and classes that a pure scorer may use in addition to builtins.

`Fraction` is not allowed, because `Fraction("1e999999999")` never ends. A `Decimal` is allowed,
because `Decimal("1e999999999")` stores the exponent as a small integer.
"""

METHODS = _words(
    """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
    copy get items keys values append clear extend insert pop remove reverse setdefault sort update
    add difference discard intersection isdisjoint issubset issuperset union
    group groups is_integer
    """
)
"""Methods of strings, numbers, lists, dicts, sets and regex matches that a pure scorer may call.
`format` is not allowed, because it looks up attributes. Methods that take a size, such as `zfill`,
are not allowed, because a large size needs much memory."""

MATCHERS = (re.findall, re.fullmatch, re.match, re.search, re.split)
PATTERNS = frozenset({r",\s*", r"[A-C]", r"^([A-Z])(\d+)$", r"\b-?\d+(?:\.\d+)?\b"})
"""Regex patterns that a pure scorer may use, because matching them takes linear time on any
text."""

TOO_LONG = ({"range", "int"}, {"range", "loads"}, {"int", "Decimal"})
"""Sets of functions that a pure scorer may not use together, because a large number in the answer
could make the scorer run very long."""

OPERATORS = frozenset({"+", "-", "*", "/", "//", "&", "|", "^", "[]"})

STEPS = _words(
    """
    NOP RESUME CACHE EXTENDED_ARG NOT_TAKEN POP_TOP PUSH_NULL COPY SWAP PRECALL KW_NAMES CALL
    CALL_KW CALL_FUNCTION_EX CALL_INTRINSIC_1 DICT_MERGE
    LOAD_CONST LOAD_SMALL_INT LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_AND_CLEAR LOAD_FAST_LOAD_FAST
    LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW STORE_FAST STORE_FAST_LOAD_FAST
    STORE_FAST_STORE_FAST STORE_FAST_MAYBE_NULL DELETE_FAST LOAD_DEREF STORE_DEREF LOAD_CLOSURE
    MAKE_CELL COPY_FREE_VARS MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE
    BINARY_SUBSCR BINARY_SLICE STORE_SUBSCR STORE_SLICE DELETE_SUBSCR COMPARE_OP CONTAINS_OP IS_OP
    UNARY_NEGATIVE UNARY_NOT UNARY_POSITIVE TO_BOOL
    BUILD_LIST BUILD_TUPLE BUILD_SET BUILD_MAP BUILD_CONST_KEY_MAP BUILD_SLICE BUILD_STRING
    LIST_APPEND LIST_EXTEND LIST_TO_TUPLE SET_ADD SET_UPDATE MAP_ADD DICT_UPDATE UNPACK_SEQUENCE
    UNPACK_EX FORMAT_SIMPLE CONVERT_VALUE
    GET_ITER FOR_ITER END_FOR POP_ITER JUMP_FORWARD JUMP_BACKWARD JUMP_IF_FALSE_OR_POP
    JUMP_IF_TRUE_OR_POP POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE
    POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE
    POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE
    RETURN_VALUE RETURN_CONST RETURN_GENERATOR YIELD_VALUE
    PUSH_EXC_INFO CHECK_EXC_MATCH POP_EXCEPT RERAISE RAISE_VARARGS LOAD_ASSERTION_ERROR
    """
)
"""Allowed bytecode instructions of Python 3.11 to 3.14. No instruction in this list looks up a
global name."""

LOOKUPS = ("LOAD_ATTR", "LOAD_METHOD")

_KINDS = (
    str, bytes, int, float, complex, list, tuple, dict, set, frozenset, decimal.Decimal, re.Match,
    Exception, type, FunctionType, BuiltinFunctionType, GeneratorType,
)  # fmt: skip
"""The types of all objects that a pure scorer can reach, except the scorer itself."""
_ALLOWED = {id(thing): thing for thing in FUNCTIONS} | {
    id(thing): thing for thing in (getattr(builtins, name) for name in BUILTINS)
}
_NOTHING = object()


class ImpureError(Exception):
    """Raised if a scorer uses something that a pure scorer may not use."""


def is_pure(dataset: Any) -> bool:
    """Return whether a dataset's scorer is pure, that is, only reads and compares data."""
    scorer: Any = type(dataset)
    config: Any = type(getattr(dataset, "config", None))
    names = _names_if_pure(scorer, config)
    # An attribute of the dataset itself would hide the attribute of its class.
    return names is not None and names.isdisjoint(vars(dataset).keys() - {"config"})


@lru_cache(maxsize=256)
def _names_if_pure(scorer: type, config: type) -> frozenset[str] | None:
    try:
        return attributes_of(scorer, config)
    except ImpureError:
        return None


def attributes_of(scorer: type, config: type) -> frozenset[str]:
    """Return the attribute names that a scorer uses, or raise ImpureError if the scorer is
    impure."""
    proof = _Proof(scorer, config)
    proof.use(inspect.getattr_static(scorer, "score_answer"))
    for together in TOO_LONG:
        if together <= proof.used:
            raise ImpureError(f"{' with '.join(sorted(together))} may take long")
    return frozenset(proof.attributes)


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return value is None or type(value) in (str, bool, int, float, complex)


class _Proof:
    """Checks all functions of one scorer, and records the attributes that they use."""

    def __init__(self, scorer: type, config: type) -> None:
        self.scorer = scorer
        self.config = config
        self.attributes: set[str] = set()
        self.used: set[str] = set()
        self._seen: set[FunctionType] = set()

    def use(self, value: Any) -> None:
        """Check a value that a scorer uses. Raise ImpureError if the value is not allowed."""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if id(value) in _ALLOWED:
            self.used.add(value.__name__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif not _is_constant(value):
            raise ImpureError(f"{value!r:.100}")

    def _function(self, function: FunctionType) -> None:
        if function in self._seen:
            return
        self._seen.add(function)
        if function.__closure__:
            raise ImpureError(f"{function.__qualname__} has a closure")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.use(value)
        self._code(function.__code__, function.__globals__)

    def _code(self, code: CodeType, variables: dict[str, Any]) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, variables)
        steps = list(dis.get_instructions(code))
        loops = {step.offset for step in steps if step.opname == "FOR_ITER"}
        following = iter(steps)
        for step in following:
            if step.opname == "LOAD_GLOBAL":
                self._global(step.argval, variables, following)
            elif step.opname in LOOKUPS:
                self._attribute(step.argval, following)
            else:
                _check_step(step, loops)

    def _global(
        self, name: str, variables: dict[str, Any], following: Iterator[dis.Instruction]
    ) -> None:
        value = variables.get(name, getattr(builtins, name, _NOTHING))
        while isinstance(value, ModuleType):  # a module is allowed only for its attributes
            value = getattr(value, _looked_up(following), _NOTHING)
        if any(value is matcher for matcher in MATCHERS):
            pattern = next(following)
            if pattern.opname != "LOAD_CONST" or pattern.argval not in PATTERNS:
                raise ImpureError(f"re.{value.__name__} with an unknown pattern")
        else:
            self.use(value)

    def _attribute(self, name: str, following: Iterator[dis.Instruction]) -> None:
        known = name in METHODS
        if name.startswith("__") or (not known and any(hasattr(kind, name) for kind in _KINDS)):
            raise ImpureError(f"the attribute {name}")
        self.attributes.add(name)
        own = inspect.getattr_static(self.scorer, name, _NOTHING)
        if own is not _NOTHING:
            self.use(own)
        elif name == "config":  # the options are allowed, the config itself is not
            option = _looked_up(following)
            if not _is_constant(inspect.getattr_static(self.config, option, _NOTHING)):
                raise ImpureError(f"the option {option} has no constant for its default")
        elif not known:
            raise ImpureError(f"the attribute {name}")


def _looked_up(following: Iterator[dis.Instruction]) -> str:
    """Return the attribute that the next instruction looks up, or raise ImpureError."""
    step = next(following)
    if step.opname not in LOOKUPS:
        raise ImpureError("an object that is more than its attributes")
    return str(step.argval)


def _check_step(step: dis.Instruction, loops: set[int]) -> None:
    """Raise ImpureError if a bytecode instruction is not allowed in a pure scorer."""
    if step.opname == "BINARY_OP":
        known = step.argrepr == "[]" or step.argrepr.rstrip("=") in OPERATORS
    elif step.opname == "FORMAT_VALUE":
        known = not (step.arg or 0) & 4  # with a format, such as a width
    else:
        known = step.opname in STEPS and step.opcode not in dis.hasname
    jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    if not known or (jumps and step.argval <= step.offset and step.argval not in loops):
        raise ImpureError(f"the instruction {step.opname} {step.argrepr}")
