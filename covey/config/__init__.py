"""The configuration of a run; each validation error names the invalid setting."""

from covey.config.load import (
    load_config,
    parse_config,
    plain_value,
    recipe_names,
    to_toml,
    toml_lines,
    toml_value,
)
from covey.config.schema import Config
from covey.config.smoke import load_smoke

__all__ = [
    "Config",
    "load_config",
    "load_smoke",
    "parse_config",
    "plain_value",
    "recipe_names",
    "to_toml",
    "toml_lines",
    "toml_value",
]
