from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards.gym_scorer import NotPlainError, plain_data, plain_formula, plain_sum

DATA = ["[[0, 1], [2, 3]]", "['a', 'b']", "(1, -2.5)", '["_", "Q"]', "[]", "-12", "'it''s'"]
FORMULAS = ["x**3/3 + sin(2*x) + C", "exp(-x)*cos(x)", "log(x) - 0.5*x**2", "6*x**4 - 13*x**2", "x**(-1/2)", "log(x, 2)",
            "pi*x", "2**100", "(x + 1)**99", "x**1000"]  # fmt: skip
SUMS = ["(3 + 4) * 5 - 2/7", "-12", "1+2+3*4"]


@pytest.mark.parametrize("text", DATA)
def test_data_is_the_same_data_written_anew(text: str) -> None:
    written = plain_data(text)
    read = ast.literal_eval(text)
    assert ast.literal_eval(written) == (list(read) if isinstance(read, tuple) else read)
    assert plain_data(written) == written


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_have_the_same_tree_written_anew(text: str) -> None:
    written = plain_formula(text)
    assert ast.dump(ast.parse(written)) == ast.dump(ast.parse(text))
    assert plain_formula(written) == written


@pytest.mark.parametrize("text", SUMS)
def test_sums_are_formulas(text: str) -> None:
    assert plain_sum(text) == plain_formula(text)


@pytest.mark.parametrize("text", ["x", "2**3", "sqrt(4)", "1.5", "pi", "[1]", "'1'", "1 + True"])
def test_sums_are_of_whole_numbers_only(text: str) -> None:
    with pytest.raises(NotPlainError):
        plain_sum(text)


def test_a_name_is_a_letter_or_given_and_never_a_function() -> None:
    assert plain_formula("foo + 1", ["foo"]) == "foo + 1"
    for text in ("foo + 1", "sin + 1", "foo(1)", "x(1)"):
        with pytest.raises(NotPlainError):
            plain_formula(text, ["sin"])


PLAIN_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.BinOp, ast.UnaryOp, ast.Call, ast.operator, ast.unaryop
)  # fmt: skip


@given(st.text(st.sampled_from("x1[](){},.'\"+-*/#\n\\:=!_lambdfoexc\uff4f\u0435 "), max_size=40))
def test_nothing_but_plain_nodes_comes_out(text: str) -> None:
    for read in (plain_data, plain_formula, plain_sum):
        try:
            written = read(text)
        except NotPlainError:
            continue
        nodes = list(ast.walk(ast.parse(written, mode="eval")))
        assert all(isinstance(node, PLAIN_NODES) for node in nodes)
        assert written.isascii()
