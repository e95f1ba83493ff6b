"""`python -m tests.project.settings_page` writes docs/reference/settings.md from `Recipe`'s settings."""

from __future__ import annotations

import re
from pathlib import Path

from fp8compile import Recipe
from fp8compile.config.recipe import RECIPES, SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
HEAD = """# Settings of a recipe

How tensors are scaled, and how matmuls run. \
Each setting is an option, `torch.compile(..., options={"margin": 1})`, a key of
rules, `[defaults]` and `[recipes.NAME]` in a [policy](../policy.md), and a field of `fp8compile.Recipe`. \
A setting that has
no effect with its recipe gives a warning; one that is impossible gives an error. \
[Options](../options.md#notes-on-settings)
says more about some of them.

| setting | values | meaning |
|---|---|---|
"""


def page() -> str:
    rows = []
    for name, setting in SETTINGS.items():
        default = Recipe.__dataclass_fields__[name].default
        looks = [recipe for recipe in RECIPES if setting.matters(Recipe(recipe))]
        named = ", ".join(f"`{recipe}`" for recipe in looks)
        which = "" if len(looks) == len(RECIPES) else f" Only for {named}."
        values = f"{setting.allowed.words}; default: {'by recipe' if default is None else repr(default)}"
        values = re.sub(r"'(\w+)'", r'`"\1"`', values)
        rows.append(f"| `{name}` | {values} | {setting.meaning}{which} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
