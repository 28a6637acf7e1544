"""From a name and options to an objective: pieces, functions of one's own, bounds, configuration."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import run
from covey.config import load_config, to_toml
from covey.config.algorithm_names import PAIRED
from covey.config.resolve import objective_of, resolve
from covey.errors import ConfigError
from covey.functional import LossOutput, loss
from covey.objective import ALGORITHMS, Objective, build, find_algorithm
from covey.objective.build import PIECES, Correction, extended
from covey.objective.correction import CORRECTIONS
from covey.objective.options import OPTIONS, hints_of, options_of
from covey.objective.penalty import PENALTIES, Kl
from tests.objective.laws import NO_KL_IN_REWARD, OF_PAIRS

NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"length": 12},
    "maxrl": {"length": 12},
    "pkpo": {"length": 12, "k": 2},
}
SHARED = options_of(extended)


def step() -> dict[str, torch.Tensor]:
    """Return a random step, off policy: two groups of three completions, one of them without a token."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    old_logp = -noise[0].abs() - 0.5
    return {
        "logp": old_logp + 0.3 * noise[1],
        "old_logp": old_logp,
        "ref_logp": old_logp + 0.3 * noise[2],
        "sampler_logp": old_logp + 0.1 * noise[2],
        "entropy": noise[3].abs() / 3,
        "teacher_logp": old_logp + 0.2 * noise[3],
        "parts": noise[3][:, :2].abs(),
        "values": noise[3].abs() / 2,
        "tokens": torch.randint(0, 2, (6, 4), generator=generator),
        "turn": torch.tensor([0, 0, 1, 1]).expand(6, 4),
        "state": torch.tensor([7, 7, 8, 8]).expand(6, 4),
        "mask": torch.arange(4) < torch.tensor([4, 2, 3, 1, 0, 3])[:, None],
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 2.0], dtype=torch.float64),
        "group": torch.tensor([3, 8, 3, 8, 3, 8]),
    }


def descend(name: str, **options: Any) -> tuple[LossOutput, torch.Tensor]:
    given = step()
    logp = given["logp"].requires_grad_()
    out = loss(name, **given, **options)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    return out, gradient


def same_correction(objective: Objective, name: str) -> bool:
    """Whether an objective corrects as the registry does under this name."""
    named, built = CORRECTIONS[name], objective.correction
    return built.func is named.func and built.keywords["of"] is named.keywords["of"]


def refused(name: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build(name, **options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def from_toml(folder: Path, text: str, *overrides: str) -> Any:
    (folder / "own.toml").write_text(text)
    return resolve(load_config(str(folder / "own.toml"), overrides))


# Pieces


def check_pieces(pieces: dict[str, str]) -> None:
    length = {"length": 7} if pieces["weights"] == "sequence_mean_token_sum_norm" else {}
    length |= {"k": 2} if pieces["advantage"] == "best_of_k" else {}
    objective = build("composed", **pieces, **length)
    for kind, piece in pieces.items():
        chosen = getattr(objective, kind)
        assert getattr(chosen, "func", chosen) is PIECES[kind][piece]
    out, gradient = descend("composed", **pieces, **length)
    assert out.loss.isfinite(), pieces
    assert gradient.isfinite().all(), pieces
    assert gradient.any(), pieces


@pytest.mark.parametrize("surrogate", PIECES["surrogate"])
def test_ratios_surrogates_and_weights_all_go_together(surrogate: str) -> None:
    for ratio, weights in itertools.product(PIECES["ratio"], PIECES["weights"]):
        pieces = {"advantage": "standardized", "ratio": ratio, "surrogate": surrogate}
        check_pieces({**pieces, "weights": weights})


@pytest.mark.parametrize("advantage", PIECES["advantage"])
def test_an_advantage_goes_with_every_other_piece(advantage: str) -> None:
    """The other pieces see a tensor of advantages, whichever piece has computed it."""
    usual = {"ratio": "token", "surrogate": "clipped", "weights": "token_mean"}
    for kind in usual:
        for piece in PIECES[kind]:
            check_pieces({"advantage": advantage, **usual, kind: piece})


# Algorithms as pieces. Others mark tokens, or are more than pieces: they have a ratio to the sampler,
# a correction, privileged text, or a critic.
AS_PIECES: dict[str, dict[str, Any]] = {
    "grpo": {"weights": "sequence_mean_token_mean"},
    "dr_grpo": {"advantage": "centered", "weights": "sequence_mean_token_sum_norm", "length": 12},
    "dapo": {"clip_high": 0.28},
    "gspo": {"ratio": "sequence", "weights": "sequence_mean_token_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"ratio": "sequence_token", "weights": "sequence_mean_token_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "luspo": {"ratio": "sequence", "weights": "sequence_mean_token_sum", "clip_low": 2e-3, "clip_high": 2.5e-3},
    "gmpo": {"surrogate": "geometric_clipped", "weights": "sequence_mean_token_mean"},
    "rloo": {"advantage": "leave_one_out", "ratio": "product", "weights": "sequence_mean_token_mean"},
    "grpo_s": {"advantage": "entropy_shaped_sequences", "ratio": "sequence", "weights": "sequence_mean_token_mean", "clip_high": 0.28},
    "gtpo": {"advantage": "entropy_shaped_tokens", "clip_high": 0.28},
    "gtpo_trajectory": {"advantage": "without_conflicts", "ratio": "one", "surrogate": "unclipped", "weights": "sequence_mean_token_mean"},
    "reinforce_pp": {"advantage": "returns_whitened"},
    "reinforce_pp_baseline": {"advantage": "group_whitened"},
    "lite_ppo": {"advantage": "batch_standardized"},
    "opo": {"advantage": "length_weighted"},
    "gpg": {"advantage": "scaled_up", "surrogate": "log_likelihood"},
    "cispo": {"surrogate": "truncated_weight"},
    "sapo": {"surrogate": "soft_gate", "weights": "sequence_mean_token_mean"},
    "vespo": {"ratio": "product", "surrogate": "gamma_weight"},
    "gdpo": {"advantage": "parts_standardized", "weights": "sequence_mean_token_mean"},
    "maxrl": {"advantage": "divided_by_mean", "weights": "sequence_mean_token_sum_norm", "length": 12},
    "pkpo": {"advantage": "best_of_k", "weights": "sequence_mean_token_sum_norm", "length": 12, "k": 2},
    "gfpo": {"advantage": "kept_standardized"},
    "opd": {"advantage": "towards_teacher", "surrogate": "unclipped"},
    "gigpo": {"advantage": "by_state", "weights": "sequence_mean_token_mean"},
}  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("name", AS_PIECES)
def test_an_algorithm_is_its_pieces(name: str, beta: float) -> None:
    kl = {"kl": "k2", "kl_in": "loss" if name in NO_KL_IN_REWARD else "reward", "beta": beta}
    out, gradient = descend(name, **NEEDED.get(name, {}), **kl)
    composed, same = descend("composed", **AS_PIECES[name], **kl)
    assert torch.equal(composed.loss, out.loss)
    assert torch.equal(same, gradient)
    assert torch.equal(composed.weight, out.weight)
    assert composed.metrics == out.metrics
    one = build(name, **NEEDED.get(name, {}), **kl)
    assert one.needs == build("composed", **AS_PIECES[name], **kl).needs


def test_dppo_from_the_trainers_log_probs_is_its_pieces() -> None:
    out, gradient = descend("dppo", anchor="old_logp")
    composed, same = descend("composed", surrogate="trust_mask")
    assert torch.equal(composed.loss, out.loss)
    assert torch.equal(same, gradient)


def test_algorithms_that_mark_tokens_are_not_their_pieces() -> None:
    marking = {n for n in ALGORITHMS if build(n, **NEEDED.get(n, {})).marks is not None}
    assert marking >= {"clip_cov", "kl_cov", "bapo", "m2po", *OF_PAIRS}
    assert not marking & AS_PIECES.keys()


def another(value: Any, hint: Any) -> Any:
    """Return a value of an option that is not its default."""
    if typing.get_origin(hint) is typing.Literal:
        return next(choice for choice in typing.get_args(hint) if choice != value)
    if hint is int:
        return 7 if value is inspect.Parameter.empty else value + 1 if value > 1 else 1 - value
    return value / 2 if value else 3.0


@pytest.mark.parametrize(
    ("kind", "piece", "option"),
    [(k, p, o) for k, of in PIECES.items() for p, f in of.items() for o in options_of(f)],
)
def test_an_option_reaches_its_piece(kind: str, piece: str, option: str) -> None:
    function = PIECES[kind][piece]
    default, hint = options_of(function)[option].default, hints_of(function)[option]
    value = 0.5 if option == "discount" else another(default, hint)
    assert value != default
    objective = build("composed", **{kind: piece, option: value})
    assert getattr(objective, kind).func is function
    assert getattr(objective, kind).keywords[option] == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": "sequenc"}, "did you mean 'sequence'"),
        ({"advantage": "centred"}, "objective.advantage"),
        ({"surrogate": "clip"}, "objective.surrogate"),
        ({"weights": "mean"}, "objective.weights"),
        ({"ratio": "zzz"}, "objective.ratio"),
        ({"ratio": [1]}, "objective.ratio"),
        ({"weights": "sequence_mean_token_sum_norm"}, "algorithm composed needs the option 'length'"),
        ({"kl": "k9"}, "objective.kl"),
    ],
)  # fmt: skip
def test_a_piece_that_is_not_there(options: dict[str, Any], message: str) -> None:
    assert message in refused("composed", **options)


@pytest.mark.parametrize(
    ("option", "pieces"),
    [
        ("max_weight", {}),
        ("clip_low", {"surrogate": "unclipped"}),
        ("ddof", {"advantage": "centered"}),
        ("length", {"weights": "token_mean"}),
        ("dual", {"surrogate": "trust_mask"}),
    ],
)
def test_an_option_of_a_piece_that_was_not_chosen(option: str, pieces: dict[str, str]) -> None:
    message = refused("composed", **pieces, **{option: 1})
    start = f"algorithm composed has no option '{option}'; its options are advantage, ratio, surrogate, weights, "
    assert message.startswith(start)
    assert option not in message.removeprefix(start).split(", ")
    assert message.endswith(", ".join(SHARED))


# In the configuration


def test_pieces_need_no_name_in_a_file(tmp_path: Path) -> None:
    config = from_toml(
        tmp_path, '[objective]\nratio = "sequence"\nclip_low = 3e-4\nkl_in = "reward"\n'
    )
    assert config.objective.name == "composed"
    assert config.objective.options == {
        "advantage": "standardized", "ratio": "sequence", "surrogate": "clipped", "weights": "token_mean",
        "ddof": 1, "eps": 1e-6, "clip_low": 3e-4, "clip_high": 0.2, "dual": 0.0, "beta": 0.0, "kl": "k3",
        **{k: p.default for k, p in SHARED.items()}, "kl_in": "reward",
    }  # fmt: skip
    objective = objective_of(config)
    assert objective.ratio is PIECES["ratio"]["sequence"]
    assert objective.surrogate.keywords["clip_low"] == 3e-4
    # What is written out reads back as the same.
    again = from_toml(tmp_path, to_toml(config))
    assert again == config
    assert to_toml(again) == to_toml(config)
    assert load_config(None, ["objective.ratio=sequence"]).objective.name == "composed"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resolved_algorithm_reads_back_as_the_same(name: str, tmp_path: Path) -> None:
    teacher = {"opd": ["teacher.path=embedded"], "sdpo": ["teacher.policy=frozen"]}.get(name, [])
    config = resolve(load_config(None, [f"objective.name={name}", *teacher]))
    assert from_toml(tmp_path, to_toml(config)) == config
    assert set(config.objective.options) == {*options_of(ALGORITHMS[name]), *SHARED}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ratio = "sequenc"', "objective.ratio"),
        ("ratio = [1]", "objective.ratio"),
        ('ratio = "token"\nmin_weight = 1.0', "objective.min_weight"),
        ('ratio = "token"\nclip_low = "x"', "objective.clip_low"),
        ('name = "gspo"\nratio = "token"', "objective.ratio"),
        ('name = "gspo"\nclip_low = -0.1', "objective.clip_low"),
        ('name = "gspo"\ntop_entropy = 0.2', "objective.top_entropy"),
        ('name = "composd"', "did you mean 'composed'"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        from_toml(tmp_path, f"[objective]\n{text}\n")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        (["objective.name=dr_grpo", "rollout.max_tokens=37"], 37),
        (["objective.name=dr_grpo", "objective.length=50", "rollout.max_tokens=37"], 50),
        (["objective.weights=sequence_mean_token_sum_norm", "rollout.max_tokens=37"], 37),
    ],
)
def test_the_length_of_dr_grpo_is_the_budget_unless_given(settings: list[str], length: int) -> None:
    config = resolve(load_config(None, settings))
    assert config.objective.options["length"] == length
    assert objective_of(config).weights.keywords == {"length": length}


def test_print_config_shows_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "objective.name=dr_grpo", "--set", "rollout.max_tokens=37"]
    assert run(["train", *settings, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert '[objective]\nname = "dr_grpo"\nlength = 37\nclip_low = 0.2\n' in printed


# Functions of one's own

OWN = '''
from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from covey.objective import advantage, build, surrogate, weights
from covey.objective import Objective as Made

if TYPE_CHECKING:
    from covey.objective import Objective


@advantage.of_rewards
def scaled(rewards, group, *, strength: float = 1.0):
    return strength * advantage.standardized(rewards, group)


def whole(*, strength: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2, beta: float = 0.0):
    """An objective of its own functions."""
    return Made(
        advantage=partial(scaled, strength=strength),
        surrogate=partial(surrogate.clipped, clip_low=clip_low, clip_high=clip_high),
        weights=weights.sequence_mean_token_mean,
        beta=beta,
    )


def steady(*, strength: float = 0.5, mode: Literal["hot", "cold"] = "hot"):
    """Clip less."""
    return build("grpo", beta=0.0, clip_low=strength, clip_high=2 * strength)


def needy(*, strength: float):
    return build("dapo", clip_high=strength)


def bare(strength=0.5, other=None):
    return build("dapo", clip_high=strength)


def for_type_checkers(*, strength: float = 0.5) -> Objective:
    return build("dapo", clip_high=strength)


def corrected():
    return build("rloo", correction="token_mask", entropy_bonus=0.1, top_entropy=1.0)


def lenient(*, clip_low: float | None = None, dual: float = 3.0):
    return build("dapo", dual=dual)


def nothing():
    return "an objective"


def fails():
    raise RuntimeError("first line\\nsecond line")


def careless():
    return build("grpo", clip_low=-1.0)


def open_ended(**options):
    return build("grpo", **options)


def positional(strength, /):
    return build("grpo")


value = 5
'''
BROKEN = {
    "raises": "raise RuntimeError('first line\\nsecond line')",
    "unfinished": "def f(:",
    "leaves": "import sys\nsys.exit(3)",
    "missing": "import no_such_package",
    "key": "{}['k']",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with modules of a user's own, and forget them afterwards."""
    before, path = set(sys.modules), list(sys.path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/inner.py").write_text(OWN)
    (tmp_path / "own_module.py").write_text(OWN)
    for name, text in BROKEN.items():
        (tmp_path / f"own_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    assert sys.path == path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_a_function_in_the_working_folder_makes_an_objective_of_own_functions(own: Path) -> None:
    out, gradient = descend("own_module:whole", strength=3.0, clip_high=0.1)
    expected, same = descend("grpo", beta=0.0, clip_high=0.1)
    assert torch.allclose(out.loss, 3 * expected.loss)
    assert torch.allclose(gradient, 3 * same)
    config = from_toml(own, '[objective]\nname = "own_module:whole"\nstrength = 3\nbeta = 0.1\n')
    objective = objective_of(config)
    assert objective.advantage.keywords == {"strength": 3.0}
    assert objective.beta == 0.1


@pytest.mark.parametrize(
    "name",
    ["own_module:steady", "own_module.steady", "own_package.inner:steady", "own_package.inner.steady"],
)  # fmt: skip
def test_a_function_in_the_working_folder(name: str, own: Path) -> None:
    out, gradient = descend(name, strength=0.05)
    expected, same = descend("grpo", beta=0.0, clip_low=0.05, clip_high=0.1)
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(gradient, same)
    config = from_toml(own, f'[objective]\nname = "{name}"\nstrength = 1\nveto = 0.1\n')
    assert config.objective.options == {
        "strength": 1.0, "mode": "hot", **{k: p.default for k, p in SHARED.items()}, "veto": 0.1,
    }  # fmt: skip
    assert objective_of(config).surrogate.keywords["clip_high"] == 2.0
    assert objective_of(config).veto == 0.1
    assert from_toml(own, to_toml(config)) == config


@pytest.mark.parametrize("function", ["bare", "for_type_checkers", "lenient"])
def test_annotations_and_bare_stars_are_not_asked_for(function: str, own: Path) -> None:
    option = "dual" if function == "lenient" else "strength"
    text = f'[objective]\nname = "own_module:{function}"\n{option} = 1.5\n'
    config = from_toml(own, text)
    assert (
        objective_of(config).surrogate.keywords["dual" if option == "dual" else "clip_high"] == 1.5
    )
    assert from_toml(own, to_toml(config)) == config  # what is None is left out


def test_what_a_function_sets_itself_is_kept_unless_an_option_says_otherwise(own: Path) -> None:
    objective = build("own_module:corrected")
    assert (objective.kl_in, objective.beta, objective.entropy_bonus) == ("reward", 0.05, 0.1)
    assert same_correction(objective, "token_mask")
    other = build("own_module:corrected", correction="sequence_mask", entropy_bonus=0.2)
    assert (other.kl_in, other.entropy_bonus) == ("reward", 0.2)
    assert same_correction(other, "sequence_mask")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module:f", "objective.name"),
        ("own_module.f.g", "objective.name"),
        ("own_module:nope", "objective.name"),
        ("own_module:value", "objective.name"),
        ("own_module:", "objective.name"),
        (":f", "objective.name"),
        ("..f", "objective.name"),
        ("own_raises:f", "objective.name"),
        ("own_unfinished:f", "objective.name"),
        ("own_leaves:f", "objective.name"),
        ("own_missing:f", "objective.name"),
        ("own_key:f", "objective.name"),
        ("own_module:nothing", "objective.name"),
        ("own_module:fails", "objective.name"),
        ("own_module:careless", "objective.clip_low"),
        ("own_module:open_ended", "objective.name"),
        ("own_module:positional", "objective.name"),
        ("own_module:needy", "objective.strength"),
        (
            "builtins:int",
            "config: objective.name = 'builtins:int': Python cannot determine the parameters of this function; wrap the function in a Python function with named parameters",
        ),
    ],
)  # fmt: skip
def test_a_function_that_does_not_work_is_one_line(
    name: str, message: str, own: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trusted = ",".join(["no_module", "builtins", *(f"own_{name}" for name in BROKEN)])
    assert run(["plan", "--set", f"objective.name={name}", "--trust", trusted]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("covey: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stregnth = 1.0", "did you mean 'strength'"),
        ('strength = "much"', "objective.strength"),
        ('mode = "warm"', "objective.mode"),
    ],
)  # fmt: skip
def test_options_of_ones_own_are_checked(setting: str, message: str, own: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        from_toml(own, f'[objective]\nname = "own_module:steady"\n{setting}\n')
    assert message in str(raised.value)


# Options


def test_the_table_of_options_is_complete_and_has_nothing_else() -> None:
    functions = [
        *ALGORITHMS.values(),
        extended,
        *(f for of in PIECES.values() for f in of.values()),
    ]
    used = {option for function in functions for option in options_of(function)}
    assert used | PIECES.keys() == OPTIONS.keys()
    assert used & PIECES.keys() == set()
    for function in functions:
        assert hints_of(function).keys() == options_of(function).keys(), function


def test_every_option_says_what_it_means() -> None:
    meanings = [option.meaning for option in OPTIONS.values()]
    assert all(m.endswith(".") for m in meanings)
    assert all(m[0].isupper() for m in meanings)


def test_types_name_what_there_is() -> None:
    assert set(typing.get_args(Kl)) == PENALTIES.keys()
    assert set(typing.get_args(Correction)) == {"none", *CORRECTIONS}


def bounded() -> list[tuple[str, str, float]]:
    cases = []
    for name in ALGORITHMS:
        for key in inspect.signature(find_algorithm(name)).parameters:
            clip_low, clip_high = OPTIONS[key].at_least, OPTIONS[key].at_most
            cases += [(name, key, clip_low)] if clip_low > -math.inf else []
            cases += [(name, key, clip_high)] if clip_high < math.inf else []
    return cases


# The other bound of a pair, so that it is not the one that is refused.
WITH = {
    "low_start": {"low_end": 1.0},
    "low_end": {"low_start": 0.0},
    "high_end": {"high_start": 1.0},
}


@pytest.mark.parametrize(("name", "key", "bound"), bounded())
def test_a_bound_is_kept(name: str, key: str, bound: float) -> None:
    kind = hints_of(find_algorithm(name))[key]
    lowest = bound == OPTIONS[key].at_least
    beyond = kind(bound + (-1 if lowest else 1) * (1 if kind is int else max(1e-3, bound)))
    needed = {**NEEDED.get(name, {}), "beta": 0.1}
    message = refused(name, **{**needed, key: beyond})
    assert message.startswith(f"{name}: objective.{key} = {beyond} must be at least ")
    if key != "top_entropy" and name not in OF_PAIRS:  # these refuse more; see below
        assert build(name, **{**needed, **WITH.get(key, {}), key: kind(bound)}) is not None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_low": -0.1}, "objective.clip_low"),
        ("grpo", {"clip_low": math.nan}, "objective.clip_low"),
        ("grpo", {"ddof": 2}, "objective.ddof"),
        ("grpo", {"dual": 1.2}, "objective.dual"),
        ("dapo", {"dual": 1.25}, "objective.dual"),
        ("grpo", {"dual": -1.0}, "objective.dual"),
        ("dapo", {"top_entropy": 0.0}, "objective.top_entropy"),
        ("dapo", {"top_entropy": 1.1}, "objective.top_entropy"),
        ("reinforce_pp", {"gamma": 1.01}, "objective.gamma"),
        ("dr_grpo", {"length": 0}, "objective.length"),
        ("sapo", {"tau_pos": 0.0}, "objective.tau_pos"),
        ("cispo", {"min_weight": 6.0}, "objective.min_weight"),
        ("clip_cov", {"cov_low": 7.0}, "objective.cov_low"),
        ("grpo", {"correction": "token_mask", "correction_high": 0.9}, "objective.correction_low"),
        ("grpo", {"correction": "divergence_mask", "correction_low": 0.5}, "objective.correction_low"),
        ("gspo", {"correction_low": 3.0}, "objective.correction_low"),
        ("rloo", {"kl": "k3_sequence"}, "objective.kl"),
        ("dapo", {"veto": 1.5}, "objective.veto"),
        ("dapo", {"kl_target": 0.1}, "objective.kl_target"),
        ("dapo", {"clip_low": "0.2"}, "objective.clip_low"),
        ("dapo", {"clip_low": None}, "objective.clip_low"),
        ("dapo", {"clip_low": True}, "objective.clip_low"),
        ("dapo", {"ddof": 0.5}, "objective.ddof"),
        ("dapo", {"correction_mean_one": 1}, "objective.correction_mean_one"),
        ("dapo", {"kl": "k9"}, "objective.kl"),
        ("dapo", {"kl_in": "rewards"}, "objective.kl_in"),
        ("dapo", {"correction": "token"}, "objective.correction"),
        ("dapo", {"aggregation": "mean"}, "objective.aggregation"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    assert message in refused(name, **options)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp"])
def test_beta_adapts_where_there_is_one(name: str) -> None:
    assert build(name, kl_target=0.1).kl_target == 0.1
    assert refused(name, kl_target=0.1, beta=0.0).startswith(
        "objective.kl_target adapts objective.beta"
    )


@pytest.mark.parametrize("name", [*ALGORITHMS, "geometric pieces", "arithmetic pieces"])
def test_tokens_are_left_out_only_where_they_can_be(name: str) -> None:
    pieces = {
        "geometric pieces": {"surrogate": "geometric_clipped"},
        "arithmetic pieces": {"ratio": "arithmetic"},
    }
    options = {**pieces.get(name, NEEDED.get(name, {})), "top_entropy": 0.5}
    built = "composed" if name in pieces else name
    if name in {"gspo", "luspo", "gmpo", "rloo", "grpo_s", "vespo", *pieces}:
        assert refused(built, **options).startswith(
            f"objective.top_entropy selects single tokens, but the loss of {built} has only one term"
        )
    elif name in OF_PAIRS:
        assert "compares pairs of whole completions" in refused(built, **options)
    else:
        out, _ = descend(built, **options)
        whole, _ = descend(built, **{**options, "top_entropy": 1.0})
        left = step()["mask"] & (out.advantage != whole.advantage)
        assert 0 < left.sum() <= step()["mask"].sum() / 2
        assert not out.advantage[left].any()


@pytest.mark.parametrize("name", sorted(OF_PAIRS))
@pytest.mark.parametrize(
    "option",
    [{"correction": "token_mask"}, {"veto": 0.1}, {"off_policy_limit": 0.1}, {"kl_target": 1.0}],
)
def test_a_pair_has_no_ratio_and_no_penalty(name: str, option: dict[str, Any]) -> None:
    message = refused(name, **option)
    assert message.startswith(f"objective.{next(iter(option))} has no effect on {name}")
    assert "above 0" in refused(name, beta=0.0)
    assert "no KL penalty" in refused(name, kl_in="reward")


def test_the_names_of_algorithms_with_pairs_are_known_without_torch() -> None:
    built = {name: build(name, **NEEDED.get(name, {})) for name in ALGORITHMS}
    assert {name for name, objective in built.items() if objective.pairs} == PAIRED == OF_PAIRS
