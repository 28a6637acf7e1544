"""Ports a TRL script to Covey, and keeps the user's reward functions and data."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field

from covey.compat.trl_source import assigned, called, parsed
from covey.errors import ConfigError

TRL_OBJECTS = ("GRPOConfig", "GRPOTrainer", "LoraConfig")


@dataclass(slots=True, kw_only=True)
class _Edits:
    """The statements to replace in a script, and the names that these statements define."""

    lines: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    """Maps a statement's first line number to its last line number and its replacement lines."""
    removed: set[str] = field(default_factory=set)
    trains: bool = False

    def replace(self, node: ast.stmt, *lines: str) -> None:
        """Replace a statement by the given lines, indented like the statement."""
        indented = [f"{' ' * node.col_offset}{line}" for line in lines]
        self.lines[node.lineno] = (node.end_lineno or node.lineno, indented)

    def apply(self, text: str) -> list[str]:
        """Return the lines of the script after all replacements."""
        found, skip = [], 0
        for number, line in enumerate(text.splitlines(), 1):
            if number in self.lines:
                skip, replacement = self.lines[number]
                found += replacement
            elif number > skip:
                found.append(line)
        return found


def covey_script(text: str, config: str, name: str = "script.py") -> str:
    """Return a script that trains with Covey on the data and the reward functions of a TRL script.

    `config` is the configuration file that `covey port` wrote. The returned script keeps all lines
    of the TRL script, except lines that import or create objects of TRL and peft. `trainer.train()`
    becomes a call of `covey.train`.
    """
    tree = parsed(text, name)
    trainer = next((c for c in ast.walk(tree) if _is_call(c, ("GRPOTrainer",))), None)
    if not isinstance(trainer, ast.Call):
        raise ConfigError(
            f"port: {name} creates no GRPOTrainer, so --script has nothing to convert"
        )
    edits, call = _Edits(), _train_call(tree, trainer, config)
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in statements:
        _import(edits, node)
        _object(edits, node)
    for node in statements:
        _use(edits, node, call)
        _attribute(edits, node)
    if not edits.trains:
        raise ConfigError(
            f"port: {name} never calls train() on its GRPOTrainer; add this call to the script"
        )
    lines = edits.apply(text)
    result = "\n".join([*_leftovers(lines, edits.removed), *lines]) + "\n"
    parsed(result, f"the ported {name}")
    return result


def _is_call(node: ast.AST | None, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and called(node) in names


def _import(edits: _Edits, node: ast.stmt) -> None:
    """Replace imports of TRL by `import covey`, and remove the import of LoraConfig."""
    if isinstance(node, ast.Import) and any(alias.name == "trl" for alias in node.names):
        others = [alias.name for alias in node.names if alias.name != "trl"]
        edits.replace(node, "import covey", *(f"import {other}" for other in others))
    if isinstance(node, ast.ImportFrom) and node.module in ("trl", "peft"):
        kept = [ast.unparse(alias) for alias in node.names if alias.name not in TRL_OBJECTS]
        lines = [f"from {node.module} import {', '.join(kept)}"] if kept else []
        edits.replace(node, *(["import covey"] if node.module == "trl" else []), *lines)


def _object(edits: _Edits, node: ast.stmt) -> None:
    """Remove a statement that creates a TRL object, and remember the name of its variable."""
    if isinstance(node, ast.Assign) and _is_call(node.value, TRL_OBJECTS):
        edits.removed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        edits.replace(node)


def _use(edits: _Edits, node: ast.stmt, call: list[str]) -> None:
    """Replace `trainer.train()` by a call of `covey.train`, and other trainer calls by comments."""
    value = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return
    owner = value.func.value
    if not _is_call(owner, ("GRPOTrainer",)) and not (
        isinstance(owner, ast.Name) and owner.id in edits.removed
    ):
        return
    if value.func.attr != "train":
        edits.replace(node, f"# {' '.join(ast.unparse(node).split())}  (TRL)")
        return
    target = f"{ast.unparse(node.targets[0])} = " if isinstance(node, ast.Assign) else "result = "
    edits.replace(node, f"{target}{call[0]}", *call[1:])
    edits.trains = True


def _attribute(edits: _Edits, node: ast.stmt) -> None:
    """Replace an assignment to an attribute of a TRL object by a comment."""
    targets = [target for target, _ in assigned(node)]
    if isinstance(node, ast.AugAssign):
        targets = [node.target]
    for target in targets:
        if isinstance(target, ast.Attribute):
            owner = ast.unparse(target).partition(".")[0]
            if owner in edits.removed:
                start = "pass  # " if node.col_offset else "# "
                edits.replace(node, f"{start}{' '.join(ast.unparse(node).split())}  (TRL)")


def _train_call(tree: ast.Module, trainer: ast.Call, config: str) -> list[str]:
    """Return the source lines of the call to `covey.train`."""
    given = {keyword.arg: keyword.value for keyword in trainer.keywords}
    names = {
        "train_dataset": "dataset",
        "eval_dataset": "held_out",
        "environment_factory": "environment",
    }
    arguments = [
        f"{ours}={ast.unparse(given[theirs])}" for theirs, ours in names.items() if theirs in given
    ]
    model = given.get("model", trainer.args[0] if trainer.args else None)
    if model is not None and not isinstance(model, ast.Constant):
        arguments.insert(0, f"model={ast.unparse(model)},  # a name or a folder, not an object")
    if "reward_funcs" in given:
        arguments.append(f"rewards={_rewards(tree, given['reward_funcs'])}")
    lines = [json.dumps(config), *arguments]
    return ["covey.train(", *(f"    {a}{'' if '  #' in a else ','}" for a in lines), ")"]


def _rewards(tree: ast.Module, functions: ast.expr) -> str:
    """Return the code of the argument `rewards`, with weights if `reward_weights` is a list."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    keywords = [k for call in calls if called(call) == "GRPOConfig" for k in call.keywords]
    weights = next((k.value for k in keywords if k.arg == "reward_weights"), None)
    if (
        not isinstance(weights, ast.List)
        or not isinstance(functions, ast.List)
        or len(weights.elts) != len(functions.elts)
    ):
        return ast.unparse(functions)
    pairs = zip(functions.elts, weights.elts, strict=True)
    return f"{{{', '.join(f'{ast.unparse(f)}: {ast.unparse(w)}' for f, w in pairs)}}}"


def _leftovers(lines: list[str], removed: set[str]) -> list[str]:
    """Return a comment for each name that the script still uses although its object was removed."""
    tree = parsed("\n".join(lines), "the ported script")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return [f"# {name} was an object of TRL: change the lines below that use it"
            for name in sorted(used & removed)]  # fmt: skip
