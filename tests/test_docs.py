"""The documentation says what the code does."""

import inspect
import re
from pathlib import Path

import pytest

from covey.config import load_config
from covey.objective import ALGORITHMS
from covey.run.metrics import table

ROOT = Path(__file__).parent.parent


def test_the_metrics_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs/metrics.md").read_text().endswith(table())


def test_the_configuration_example_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL).group(1)
    (tmp_path / "example.toml").write_text(example)
    config = load_config(str(tmp_path / "example.toml"))
    assert config.rollout.samples == 8
    assert config.objective.options == {"low": 0.2, "high": 0.2, "beta": 0.0}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_has_a_page_with_its_defaults(name: str) -> None:
    page = (ROOT / f"docs/algorithms/{name}.md").read_text()
    for option, parameter in inspect.signature(ALGORITHMS[name]).parameters.items():
        assert f"`{option}`" in page
        assert f"{parameter.default:g}".replace("e-0", "e-") in page


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page}: {link}"
