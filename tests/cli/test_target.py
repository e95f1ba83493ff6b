"""TARGET and --input: what they may be, and one line about each that cannot be used."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from fp8compile.cli import target
from fp8compile.cli.target import TargetError


def shapes(loaded: target.Target) -> tuple:
    args = tuple(tuple(x.shape) for x in loaded.args)
    return args, {k: getattr(v, "shape", v) for k, v in loaded.kwargs.items()}


@pytest.mark.parametrize(
    "spec, args, kwargs",
    [
        ("my_model.py:build", ((64, 256),), {}),
        ("my_model.py:mapping", ((32, 256),), {"scale": 2.0}),
        ("my_model.py:three", ((32, 256),), {"scale": 2.0}),
        ("my_model.py:tokenized", (), {"x": (32, 256)}),
        ("my_model:build", ((64, 256),), {}),
        ("{}:build", ((64, 256),), {}),
    ],
)
def test_what_a_target_may_be_and_return(model, spec, args, kwargs):
    loaded = target.load(spec.format(model))
    assert type(loaded.model).__name__ == "Net" and shapes(loaded) == (args, kwargs)


def test_modules_and_dotted_names(model):
    """A file that is called as a library is loaded, and the library stays unchanged."""
    Path("some_package").mkdir()
    Path("some_package/nets.py").write_text(
        "class Zoo:\n    def small():\n        return __import__('my_model').build()\n"
    )
    assert type(target.load("some_package.nets:Zoo.small").model).__name__ == "Net"
    Path("json.py").write_text("from torch import nn\ndef build():\n    return nn.Identity(), (1,)\n")
    target.load("json.py:build")
    assert sys.modules["json"] is json and hasattr(json, "dumps")


def test_inputs(model):
    loaded = target.load("my_model.py:net", ["8x256"])
    assert loaded.model is sys.modules["my_model"].net and shapes(loaded) == (((8, 256),), {})
    loaded = target.load("my_model.py:alone", ["8x256:bfloat16", "scale=1:float32"])
    assert loaded.args[0].dtype == torch.bfloat16 and loaded.kwargs["scale"].shape == (1,)
    args, kwargs = target.parse_inputs(["4x5:int64", "7", "mask=2x3x4:torch.bool", "0x16"])
    assert [tuple(x.shape) for x in args] == [(4, 5), (7,), (0, 16)] and args[0].dtype == torch.int64
    assert kwargs["mask"].dtype == torch.bool and not args[0].any()


@pytest.mark.parametrize(
    "text, says",
    [
        ("8,1024", "is not SHAPE"),
        ("", "is not SHAPE"),
        ("8x1024:itn64", "Did you mean 'int64'"),
        ("8x1024:nn", "no dtype 'nn'"),
        (f"{10**9}x{10**9}x{10**9}", "--input"),
    ],
)
def test_bad_inputs(text, says):
    with pytest.raises(TargetError, match=re.escape(says)) as caught:
        target.parse_inputs([text])
    assert "\n" not in str(caught.value) and not caught.value.details


@pytest.mark.parametrize(
    "spec, says",
    [
        ("my_model.py", "is not path.py:function or package.module:function, for example my_model.py:build"),
        ("my_modle.py:build", "my_modle.py does not exist. Did you mean 'my_model.py'?"),
        (".:build", ". is not a Python file"),
        ("no.such.module:build", "there is no module 'no.such.module'"),
        ("my_model.py:biuld", "has no function 'biuld'. Did you mean 'build'?"),
        ("my_model.py:xyzzy", "has no function 'xyzzy'. It defines build, alone, mapping"),
        ("my_model.py:limit", "my_model.py:limit is a int, not a function"),
        ("my_model.py:needs", "takes width, heads: give them defaults"),
        ("my_model.py:number", "number() returned (int); wanted is a torch.nn.Module, (model, args)"),
        ("my_model.py:pair", "pair() returned (Net, Net, Net, Net)"),
        (
            "my_model.py:unknown_key",
            "unknown_key() returned a dict with the keys 'model', 'inputs'; wanted is",
        ),
        (
            "my_model.py:alone",
            "a Net without inputs, and its forward takes x: return (model, args), or give --input",
        ),
        ("my_model.py:leaves", "ended the program with status 3"),
    ],
)
def test_bad_targets(model, spec, says):
    with pytest.raises(TargetError, match=re.escape(says)) as caught:
        target.load(spec)
    assert "\n" not in str(caught.value) and not caught.value.details


def test_a_target_that_raises_shows_its_own_traceback(model):
    """From the user's first frame on, and with the cause."""
    with pytest.raises(TargetError, match=r"fails\(\) of my_model.py raised ZeroDivisionError: ") as caught:
        target.load("my_model.py:fails")
    files = re.findall(r'File "([^"]*)", line \d+, in (\w+)', caught.value.details)
    assert {Path(file).name for file, _ in files} == {"my_model.py"}
    assert [function for _, function in files] == ["fails", "helper"]
    with pytest.raises(TargetError, match="raised ValueError: no width") as caught:
        target.load("my_model.py:chained")
    assert "ZeroDivisionError" in caught.value.details and "direct cause" in caught.value.details


def test_a_module_that_cannot_be_loaded(model):
    """An import that fails names the missing module, not the user's module, which exists."""
    model.write_text("import no_such_library\n")
    missing = "loading my_model raised ModuleNotFoundError: No module named 'no_such_library'"
    with pytest.raises(TargetError, match=missing):
        target.load("my_model:build")
    model.write_text("def build(:\n")
    with pytest.raises(TargetError, match="loading my_model.py raised SyntaxError") as caught:
        target.load("my_model.py:build")
    assert "line 1" in caught.value.details and "target.py" not in caught.value.details
