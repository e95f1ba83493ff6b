"""Writes docs/reference/settings.md from the descriptions of `Recipe`'s settings: `python -m tests.project.settings_page`"""

from __future__ import annotations

import textwrap
from pathlib import Path

from fp8compile import Recipe
from fp8compile.config.recipe import RECIPES, SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
HEAD = """# Settings of a recipe

Each is an option, `torch.compile(..., options={"margin": 1})`, a key of rules, `[defaults]` and `[recipes.NAME]` in a
[policy](../policy.md), and a field of `fp8compile.Recipe`. A setting without effect gives a warning, one that is impossible
with a recipe an error. [Options](../options.md) explains some of them at length.
"""


def page() -> str:
    parts = [HEAD]
    for name, setting in SETTINGS.items():
        default = Recipe.__dataclass_fields__[name].default
        looks = [recipe for recipe in RECIPES if setting.matters(Recipe(recipe))]
        which = "all recipes" if len(looks) == len(RECIPES) else ", ".join(f"`{recipe}`" for recipe in looks)
        facts = [f"Takes {setting.values}", "default: the recipe's own" if default is None else f"default: `{default!r}`"]
        meaning = textwrap.fill(setting.meaning, 118, break_on_hyphens=False)
        parts.append(f"## {name}\n\n{meaning}\n\n{'; '.join(facts)}. For {which}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
