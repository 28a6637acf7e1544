"""Code-like completions through every reward, in a process that watches itself.

    python tests/rewards/model_text.py COUNT [REWARD ...]

An audit hook counts what happens while a completion is scored. Nothing may: no code runs, no file
or socket is opened, no module is imported, no process started. Two things are told apart. Starting
a sandbox takes files and a process: what `covey/sandbox` itself does is counted by itself. And
`ast.parse` builds a tree without running anything; the hook sees it as compiling `<unknown>`.

A completion that ran would also leave a file: the folder that all of them aim at stays empty.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import covey.sandbox
from covey.config.schema import Named
from covey.rewards import Reward
from covey.rewards.registry import REWARDS, make_reward, reward_options
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.code import Code
from covey.tasks.countdown import Countdown
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.registry import make_task
from covey.tasks.tools import Tools
from covey.types import Prompt

SANDBOX = str(Path(covey.sandbox.__file__).parent)
PROGRAMS = ("code_tests", "code")
"""Rewards that start a sandbox for each completion."""
EVALUATING = (
    "binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24", "intermediate_integration",
    "polynomial_multiplication", "simple_integration",
)  # fmt: skip
OTHERS = (
    "chain_sum", "number_sorting", "bitwise_arithmetic", "coin_flip", "complex_arithmetic", "propositional_logic",
    "game_of_life", "polynomial_equations", "sudoku", "maze", "fraction_simplification", "prime_factorization",
)  # fmt: skip
TARGETS = ("42", r"\frac{x+1}{2}", "x > 3", r"\{1, 2\}", r"\sqrt{2}", "(1, 2)")

CODE = (
    "open('{path}','w')", "exec('open(\"{path}\",\"w\")')", "eval(\"open('{path}','w')\")", "__import__('os').system('touch {path}')",
    "exec(bytes.fromhex('{hex}'))", "[open][0]('{path}','w')", "(lambda: open('{path}','w'))()", "[x for x in [open('{path}','w')]]",
    "getattr(__builtins__,'open')('{path}','w')", "f\"{{open('{path}','w')}}\"", "(x := open('{path}','w'))",
    "().__class__.__base__.__subclasses__()", "globals()['__builtins__'].open('{path}','w')", "breakpoint()", "print(1)",
    "__import__('socket').socket()", "__import__('subprocess').run(['touch','{path}'])", "import os; os.system('touch {path}')",
    "type('x',(),{{'__eq__':lambda *a: True}})()", "'{{0.__class__}}'.format(open)", "compile('1','x','eval')",
)  # fmt: skip
SYMPY = (
    "Symbol('x').subs('x', {code})", "sympify(\"{code}\")", "S('{code}')", "N({code})", "lambdify(x, '{code}')(1)", "parse_expr('{code}')",
    "Function('f')({code})", "Integral(x, (x, 0, {code}))", "Matrix([[{code}]])", "sin({code})", "x.func.__globals__['open']('x')",
    "x**2/2 + {code}", "exp({code})*C",
)  # fmt: skip
LATEX = (
    r"\frac{{{code}}}{{2}}", r"\operatorname{{exec}}({code})", r"\text{{{code}}}", r"\sqrt{{{code}}}", r"x_{{{code}}}", r"\mathrm{{{code}}}",
    r"\{{1, {code}\}}", r"({code}, \infty)", r"x > {code}", r"\begin{{pmatrix}} {code} \\ 1 \end{{pmatrix}}", r"\left({code}\right)!",
    r"\int_0^1 {code} dx", r"f^{{-1}}({code})", r"\binom{{{code}}}{{2}}", r"3 = {code}", r"\log_{{{code}}} 3", "${code}$",
)  # fmt: skip
AROUND = (
    "{}",
    "[{}]",
    "[[0, 1], {}]",
    "({})",
    "({},)",
    "1 + {}",
    "{} or 1",
    "[*{}]",
    "'{}'",
    '"""{}"""',
    "{}.real",
    "3\n{}",
    "#\n{}",
)
FORMS = (
    "<answer>{}</answer>", "<think>I see.</think><answer>{}</answer>", r"\boxed{{{}}}", "#### {}", "{}", "<tool_call>{}</tool_call>",
    "```python\n{}\n```", '<tool_call>{{"name": "f", "arguments": "{}"}}</tool_call>',
)  # fmt: skip
HOMOGLYPHS = str.maketrans("aceopxy", "\u0430\u0441\u0435\u043e\u0440\u0445\u0443")
FULL_WIDTH = str.maketrans({chr(n): chr(n + 0xFEE0) for n in (*range(65, 91), *range(97, 123))})


def _commented(text: str, dice: random.Random) -> str:
    """Put comments, line ends and blanks where Python does not mind them."""
    gaps = ("#\n", "#x\n ", "\\\n", "\n", "\t", " ", "\f", "")
    return "".join(c + dice.choice(gaps) if c in ".(,[" else c for c in text)


def _letters(text: str, dice: random.Random) -> str:
    """Write some letters as their full-width twins, or as letters that look the same."""
    table = dice.choice((FULL_WIDTH, HOMOGLYPHS))
    return "".join(c.translate(table) if dice.random() < 0.5 else c for c in text)


def _nested(text: str, dice: random.Random) -> str:
    return dice.choice(("{!r}", "eval({!r})", "exec({!r})", "'''{}'''", "str({!r})")).format(text)


DISGUISES: tuple[Callable[[str, random.Random], str], ...] = (
    _commented, _letters, _nested, lambda text, dice: text, lambda text, dice: text[: dice.randrange(1, len(text) + 1)],
)  # fmt: skip


def completions(count: int, folder: Path, seed: int = 0) -> Iterator[str]:
    """Yield `count` texts that look like code, sympy or LaTeX, the same ones for a seed."""
    dice = random.Random(seed)
    for number in range(count):
        path = folder / f"ran-{number}"
        code = dice.choice(CODE).format(path=path, hex=f"open({str(path)!r},'w')".encode().hex())
        kind = dice.random()
        if kind < 0.6:
            code = dice.choice(SYMPY if kind < 0.3 else LATEX).format(code=code)
        for _ in range(dice.randrange(3)):
            code = dice.choice(DISGUISES)(code, dice)
        yield dice.choice(FORMS).format(dice.choice(AROUND).format(code))


class Watch:
    """The audit hook. It cannot be taken away again, only told to look or not to."""

    def __init__(self) -> None:
        self.looking = False
        self.outside: Counter[str] = Counter()
        self.parsed = self.sandbox = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.looking:
            return
        self.looking = False
        if event == "compile" and arguments[1] == "<unknown>":
            self.parsed += 1
        elif _in_sandbox_code():
            self.sandbox += 1
        else:
            self.outside[f"{event} {str(arguments)[:200]}"] += 1
        self.looking = True


def _in_sandbox_code() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(SANDBOX):
            return True
    return False


def made(name: str) -> Reward:
    parts = {
        "accuracy": {"name": "math_answer", "weight": 0.8},
        "format": {"name": "think_answer_form", "weight": 0.2},
    }
    options: dict[str, dict[str, Any]] = {
        "mix": {"parts": parts},
        "by_task": {"tasks": {"arithmetic": {"name": "lm_book"}}},
    }
    section = Named.model_validate({"name": name, **options.get(name, {})})
    return make_reward(name, reward_options(section))


def asked(name: str) -> list[Prompt]:
    """Return prompts that the reward can score."""
    if name == "reasoning_gym":
        names = [n for pair in zip(EVALUATING, OTHERS, strict=False) for n in pair] + [*OTHERS]
        return [ReasoningGym(dataset=n, train_size=2).train()[0] for n in names]
    if name in ("countdown", "nano_aha", "grpo_zero"):
        return [Countdown().held_out()[0]]
    if name in ("tool_call", "agent"):
        return [Tools().held_out()[0]]
    if name == "instructions":
        return make_task("instructions", {}).held_out()[:8]
    if name in PROGRAMS:
        return [Code().held_out()[0]]
    first = Arithmetic().held_out()[0]
    if name in ("math_answer", "math", "mix"):
        messages = first.messages
        return [Prompt(id=t, task="arithmetic", messages=messages, target=t) for t in TARGETS]
    return [first]


def watched(name: str, texts: list[str], watch: Watch) -> dict[str, Any]:
    """Score the texts, after a few that import what is imported late."""
    reward, prompts = made(name), asked(name)
    for number, prompt in enumerate(prompts):
        for form in FORMS[:1] if number else FORMS:
            for text in ("x", r"x < 5", r"\{3, x\}", prompt.target, str(prompt.info.get("call"))):
                reward(prompt, form.format(text))
    watch.outside.clear()
    watch.parsed = watch.sandbox = right = failed = 0
    slowest, started = 0.0, time.monotonic()
    for number, text in enumerate(texts):
        begun = time.monotonic()
        watch.looking = True
        try:
            score = reward(prompts[number % len(prompts)], text)
        except Exception:
            failed += 1
        finally:
            watch.looking = False
        right += score.success
        slowest = max(slowest, time.monotonic() - begun)
    return {
        "reward": name, "completions": len(texts), "outside": dict(watch.outside.most_common(5)), "events": watch.outside.total(),
        "parsed": watch.parsed, "sandbox": watch.sandbox, "success": right, "unscored": failed,
        "slowest": round(slowest, 2), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main(count: int, names: list[str]) -> None:
    watch = Watch()
    sys.addaudithook(watch)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)  # whoever runs may write here
        texts = list(completions(count, folder))
        for reward in names or [
            name for name in REWARDS if name not in ("judge", "environment", "sum")
        ]:
            fewer = max(1, count // 20) if reward in PROGRAMS and not names else count
            found = watched(reward, texts[:fewer], watch)
            print(json.dumps({**found, "files": len(list(folder.iterdir()))}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
