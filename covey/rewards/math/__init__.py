"""The modules with which `MathAnswer` compares an answer with its target, in order of use.

    extract.py                     the final answer of the completion
    math/number.py                 both are numbers: compare exactly, in one notation, without units
    math_answer.py                 the value that an equation states
    math/numeric_equality.py       formulas: evaluate both at a few points; if that leaves it open,
                                   ask math-verify, in the sandbox
    math/math_verify_scorer.py     the module that runs there

`math/arithmetic_expression.py` evaluates the arithmetic that a model wrote as a countdown solution
or in a calculator call.
"""
