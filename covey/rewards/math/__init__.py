"""The modules with which `MathAnswer` compares an answer with its target, in order of use.

    extract.py                     the final answer of the completion
    math/number.py                 both are numbers: compare exactly
    math/notation.py               one notation for signs, repeating decimals and bases
    math/equation.py               units, and the value that an equation states
    math/numeric_equality.py       formulas: evaluate both at a few points
    math/symbolic_equality.py      undecided: math-verify, in the sandbox
    math/math_verify_scorer.py     the module that runs there

`math/arithmetic_expression.py` evaluates the arithmetic that a model wrote as a countdown solution
or in a calculator call.
"""
