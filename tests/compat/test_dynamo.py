"""From an input of a Dynamo graph to the module through which the compiled frame reaches it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fp8compile import OptionError, StrictError, compat

pytestmark = pytest.mark.compat


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a b": nn.Linear(4, 4, bias=False)})
        self.register_buffer("table", torch.ones(4))
        self.plain = torch.ones(4)  # as FSDP1 has a view instead of a parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["a b"](x) * self.table * self.plain


def test_the_root_of_each_input() -> None:
    found: dict[str, str] = {}
    models = {"teacher": Block()}
    student = Block()

    def backend(gm: Any, inputs: Any) -> Any:
        names = [compat.dynamo.source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
        attributes = [i for i, name in enumerate(names) if name.endswith(".plain")]
        for i, (module, source) in compat.dynamo.root_modules(gm, attributes).items():
            assert module is (student if "student" in names[i] else models["teacher"])
            found[names[i]] = source.name
        with_attributes = compat.dynamo.root_modules(gm, attributes).keys()
        assert compat.dynamo.root_modules(gm).keys() == with_attributes - {*attributes}
        return gm

    def both(x: torch.Tensor, student: nn.Module, models: dict[str, nn.Module]) -> torch.Tensor:
        return student(x) + models["teacher"](x)

    torch.compile(both, backend=backend)(torch.ones(4), student, models)
    assert Counter(found.values()) == {"L['student']": 3, "L['models']['teacher']": 3}


@pytest.mark.parametrize(
    "given", [{"recpie": "rowwise"}, {"policy": {"rules": [{"module": "nope"}]}, "strict": True}]
)
def test_an_error_of_ours_ends_where_we_end_it(given: dict[str, Any]) -> None:
    """Dynamo advises how to report a bug of its own."""
    with pytest.raises((OptionError, StrictError)) as caught:
        torch.compile(nn.Linear(32, 32), backend="fp8", options=given)(torch.ones(32, 32))
    text = str(caught.value)
    assert "TORCH_LOGS" not in text and "from user code" not in text
    assert text.endswith("(strict=True)" if "strict" in given else "Did you mean 'recipe'?")
