"""The command line: targets and their errors, exit statuses, stdout and stderr, and each command."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile import cli
from fp8compile.cli import target
from fp8compile.cli.model_commands import talk_on_stderr
from fp8compile.cli.model_options import parse_option
from fp8compile.cli.target import TargetError
from fp8compile.config.policy import BUILTIN
from fp8compile.devices import catalog
from fp8compile.dryrun.autocast import NOTE
from fp8compile.dryrun.explain import UNWEIGHED
from fp8compile.logs import VARIABLES
from tests.support import hooks
from tests.support.times import Compiler

env = importlib.import_module("fp8compile.cli.env")  # `cli.env` is the command
ROOT = Path(__file__).resolve().parents[2]

MODEL = """
from __future__ import annotations

import dataclasses
import os
import torch
from torch import nn

print("said while loading")

@dataclasses.dataclass
class Config:
    width: int = 256

class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=256, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(width) for _ in range(blocks))
        self.head = nn.Linear(width, 128)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x)
        return self.head(x * scale).float().logsumexp(-1).mean()

def build():
    print("said while building")
    return Net(Config().width), (torch.zeros(64, 256),)

def alone():
    return Net()

def mapping():
    return dict(model=Net(), args=[torch.zeros(32, 256)], kwargs={"scale": 2.0})

def three():
    return Net(), torch.zeros(32, 256), {"scale": 2.0}

def tokenized():
    return Net(), {"x": torch.zeros(32, 256)}

def needs(width, depth=2, *, heads):
    return Net()

def fails():
    return helper(0)

def helper(x):
    return 1 / x

def leaves():
    raise SystemExit(3)

def number():
    return 3

def pair():
    return Net(), Net(), Net(), Net()

def chained():
    try:
        helper(0)
    except ZeroDivisionError as error:
        raise ValueError("no width") from error

def unknown_key():
    return {"model": Net(), "inputs": ()}

def misshapen():
    return Net(), (torch.zeros(64, 255),)

class Mixed(torch.nn.Module):  # Dynamo shows the arguments of the operator in lines of their own
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(256, 256)

    def forward(self, x):
        q = self.qkv(x)[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q.float(), q.float(), q).sum()

def mixed():
    return Mixed().bfloat16(), torch.zeros(2, 64, 256, dtype=torch.bfloat16)

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:1]

class Backward(Mixed):
    def forward(self, x):
        return Wrong.apply(self.qkv(x)).sum()

def backward():
    return Backward(), torch.ones(64, 256)

def tiny():
    torch.manual_seed(0)
    return Net(128, 1), (torch.ones(64, 128),)

def half(loss):
    return loss / 2

def hidden():
    raise ValueError(repr([os.environ.get(x) for x in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")]))

net = Net()
limit = 5
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A file with targets, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "my_model.py"
    file.write_text(MODEL)
    yield file
    sys.modules.pop("my_model", None)


def shapes(loaded: target.Target) -> tuple:
    return tuple(tuple(x.shape) for x in loaded.args), {
        k: getattr(v, "shape", v) for k, v in loaded.kwargs.items()
    }


# -- targets --


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
    assert [(Path(file).name, function) for file, function in files] == [
        ("my_model.py", "fails"),
        ("my_model.py", "helper"),
    ]
    with pytest.raises(TargetError, match="raised ValueError: no width") as caught:
        target.load("my_model.py:chained")
    assert "ZeroDivisionError" in caught.value.details and "direct cause" in caught.value.details


def test_a_module_that_cannot_be_loaded(model):
    """An import that fails names the missing module, not the user's module, which exists."""
    model.write_text("import no_such_library\n")
    with pytest.raises(
        TargetError, match="loading my_model raised ModuleNotFoundError: No module named 'no_such_library'"
    ):
        target.load("my_model:build")
    model.write_text("def build(:\n")
    with pytest.raises(TargetError, match="loading my_model.py raised SyntaxError") as caught:
        target.load("my_model.py:build")
    assert "line 1" in caught.value.details and "target.py" not in caught.value.details


# -- the program --


def test_quick_commands_do_not_import_torch():
    """In one process, each command after the other."""
    code = """
import contextlib, io, sys
from fp8compile.cli import main
helps = ["--help", "explain --help", "compare --help", "bench --help", "tune --help"]
for command in (*helps, "devices", "policy show llama"):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(command.split())
    assert status == 0 and out.getvalue() and "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["explain"], "Missing argument 'TARGET'"),
        (["explain", "x.py:build", "--devise", "h100"], "--devise"),
        (["explian", "x.py:build"], "No such command 'explian'"),
        (["explain", "x.py:build"], "x.py does not exist"),
        (["explain", "my_model.py:build", "--device", "h1000"], "Did you mean 'h100'"),
        (["estimate", "my_model.py:build", "--device", "a100"], "a device with FP8 tensor cores"),
        (["explain", "my_model.py:build", "--option", "recipe"], "is not KEY=VALUE"),
        (["explain", "my_model.py:build", "--option", "recipe=tensorwsie"], "Did you mean 'tensorwise'"),
        (["explain", "my_model.py:build", "--html", "no/such/folder.html"], "there is no folder no/such"),
        (["explain", "my_model.py:build", "--policy", "nope.toml"], "nope.toml"),
        (["compare", "my_model.py:build", "--plot", "no/such/folder.png"], "there is no folder no/such"),
        (["compare", "my_model.py:build", "--loss", "buildd"], "no function 'buildd'. Did you mean 'build'"),
        (["tune", "my_model.py:build", "--out", "no/such/policy.toml"], "there is no folder no/such"),
        (["tune", "my_model.py:build", "--max-error", "much"], "not a valid float"),
        (["tune", "my_model.py:build", "--max-error", "2"], "max_error"),
        (["tune", "my_model.py:build", "--loss-budget", "0.2%"], "give --max-error"),
        (["tune", "my_model.py:build", "--like", "my_model.py:biuld"], "Did you mean 'build'"),
        (["policy", "check", "nope.toml"], "nope.toml does not exist"),
        (["policy", "show", "nope"], "there is no shipped policy 'nope'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(model, capsys, arguments, says):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    ours = [line for line in err.splitlines() if not line.startswith("said while")]
    assert out == "" and says in err and len(ours) == 1
    assert re.match(r"fp8compile( \w+)*: error: ", ours[0])


@pytest.mark.parametrize(
    "text, value",
    [
        ("margin=1", 1),
        ("strict=true", True),
        ("recipe=tensorwise", "tensorwise"),
        ("override_linear_precision=[false, false, true]", [False, False, True]),
        ("override_linear_precision=(False,False,True)", (False, False, True)),
        ("triton.cudagraphs=true", True),
        ("policy=a=b.toml", "a=b.toml"),
    ],
)
def test_option_values(text, value):
    assert parse_option(text) == (text.split("=")[0], value)


def test_stdout_is_the_result_only(capfd):
    with talk_on_stderr():
        print("from python")
        os.write(1, b"from below\n")
    os.write(1, b"the result\n")
    out, err = capfd.readouterr()
    assert out == "the result\n" and "from python" in err and "from below" in err


def test_devices(capsys):
    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert all(key in out for key in catalog.shipped()) and "\x1b" not in out
    assert cli.main(["devices", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    h100 = next(device for device in known if device["key"] == "h100")
    assert h100["sustained"]["fp8"] == catalog.find("h100").sustained.fp8


def test_calibrate_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate", "--no-write"]) == 1
    assert "torch sees none" in capsys.readouterr().err
    assert cli.main(["calibrate", "--device", "gpu0"]) == 2
    assert "'gpu0' is not a device" in capsys.readouterr().err


# -- env --


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A home folder, no environment variables except those that a test sets, and no GPU."""
    for name in [name for name in os.environ if name.startswith(env.PREFIXES) or name in env.OTHERS]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


def test_env(machine, monkeypatch, capsys):
    monkeypatch.setenv("FP8COMPILE_DUMP", f"{machine}/dumps")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{machine}-other/cache")
    monkeypatch.setenv("FP8COMPILE_POLCY", "llama")
    monkeypatch.setenv("SECRET", "not for others")
    assert cli.main(["env"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["fp8compile"] == fp8compile.__version__ and rows["torch"] == torch.__version__
    assert rows["policy"] == "default" and rows["GPU"].startswith("none that torch sees")
    assert (
        rows["FP8COMPILE_DUMP"] == "~/dumps" and rows["TORCHINDUCTOR_CACHE_DIR"] == f"{machine}-other/cache"
    )
    assert "Did you mean 'FP8COMPILE_POLICY'" in rows["FP8COMPILE_POLCY"] and "SECRET" not in rows


def test_env_as_json_and_of_what_fails(machine, monkeypatch, capsys):
    """A policy that is not valid, and a GPU that does not answer, are rows of the table."""

    def fail(device):
        raise RuntimeError("CUDA error: no device\nmore about it")

    monkeypatch.setenv("FP8COMPILE_POLICY", "~/fp8.toml")
    (machine / "fp8.toml").write_text('device = "h100"')
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"] == "~/fp8.toml, for the device 'h100'" and found["gpus"] == []
    assert found["environment"] == {"FP8COMPILE_POLICY": "~/fp8.toml"}
    assert found["versions"]["torch"] == torch.__version__
    (machine / "fp8.toml").unlink()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^policy +not valid: .*~/fp8.toml.* does not exist", out, re.MULTILINE)
    assert str(machine) not in out
    assert re.search(r"^GPU 0 +RuntimeError: CUDA error: no device$", out, re.MULTILINE)


@pytest.mark.parametrize(
    "key, says",
    [
        ("h200", ["NVIDIA H200, compute capability 9.0, 141 GiB", "blockwise; mxfp8 is emulated in bf16",
                  "'h200', shipped"]),
        ("b200", ["compute capability 10.0",
                  "FP8: delayed, tensorwise, rowwise, rowwise_with_gw_hp, blockwise, mxfp8\n"]),
        ("a100", ["compute capability 8.0", "no FP8: models are compiled in high precision"]),
        ("mi300x", ["architecture gfx942", "FP8: delayed", "mxfp8 is emulated in bf16\n"]),
    ],
)  # fmt: skip
def test_env_of_gpus(machine, monkeypatch, capsys, key, says):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: catalog.find(key).gpu)
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in says) and len(re.findall("^GPU 1 ", out, re.MULTILINE)) == 3


def test_every_variable_is_in_the_list_and_in_the_documentation():
    sources = [*ROOT.glob("fp8compile/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    named = {
        name
        for file in sources
        for name in re.findall(r"\bFP8COMPILE_[A-Z]+\b", file.read_text(encoding="utf-8"))
    }
    assert named == set(VARIABLES)
    documented = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in documented for name in VARIABLES)


# -- compare --


@pytest.mark.slow
def test_compare(model, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--json", "--plot", "compare.png", "--strict", "--option", "recipe=tensorwise"]
    assert cli.main(["compare", "my_model.py:tiny", *arguments]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert {row["name"] for row in found["rows"] if row["kind"] == "layer"} >= {
        "blocks.0.up.weight",
        "blocks.0.down.weight",
    }
    assert "wrote compare.png" in err and Path("compare.png").read_bytes()[:4] == b"\x89PNG"
    sys.modules.pop("my_model")
    assert cli.main(["compare", "my_model.py:tiny", "--loss", "half"]) == 0
    out, err = capsys.readouterr()
    assert f"loss {found['loss'] / 2:.6g} in high precision" in out and "blocks.0.up.weight" in out
    assert NOTE in err


def test_compare_with_a_batch_that_the_model_refuses(model, capsys):
    assert cli.main(["compare", "my_model.py:misshapen"]) == 1
    err = capsys.readouterr().err
    assert "in forward" in err.splitlines()[-1] and err.splitlines()[-1].count("refuses this batch") == 1
    assert "Traceback" in err and "fp8compile/dryrun" not in err


# -- tune --


@pytest.mark.weekly
def test_tune(model, capsys):
    """The file, JSON on stdout, progress on stderr; an answer of no is one line and status 1."""
    arguments = ["tune", "my_model.py:tiny", "--device", "h100", "--like", "my_model.py:tiny"]
    with hooks.tuning(Compiler, ["rowwise"]):
        assert cli.main([*arguments, "--max-error", "0.4", "--json", "--out", "tuned.toml"]) == 0
        out, err = capsys.readouterr()
        sys.modules.pop("my_model")
        assert cli.main([*arguments, "--max-error", "1e-6"]) == 1
        assert "no FP8 policy" in capsys.readouterr().err.splitlines()[-1]
    found = json.loads(out)
    assert set(found["choice"]) == {"blocks.*.up", "blocks.*.down"} and found["error"] <= 0.4
    assert Path("tuned.toml").read_text() == found["toml"]
    assert "wrote tuned.toml" in err and "in high precision" in err and "rowwise: blocks.*.up" in err


# -- explain --


def test_explain(model, capsys):
    assert cli.main(["explain", "my_model.py:build", "--html", "report.html"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("fp8: 11 of 14 matmuls, ") and lines[1:3] == [f"* {NOTE}", f"* {UNWEIGHED}"]
    assert "said while" not in out and "said while building" in err and "wrote report.html" in err
    assert re.search(r"^blocks\.0-1\.down \(x2\) +fprop, dgrad, wgrad +64 +256 +1024 ", out, re.MULTILINE)
    written = Path("report.html").read_text(encoding="utf-8")
    assert written.startswith("<!DOCTYPE html>") and 'data-name="blocks.0-1.down"' in written
    options = [
        "--input=128x256",
        "--option=recipe=tensorwise",
        "--option=override_linear_precision=[false,false,true]",
    ]
    assert cli.main(["explain", "my_model.py:alone", "--json", *options]) == 0
    matmuls = json.loads(capsys.readouterr().out)["graphs"][0]["matmuls"]
    up = {r["gemm"]: (r["m"], r["decision"], r["recipe"]) for r in matmuls if r["fqn"] == "blocks.1.up"}
    assert up["fprop"] == (128, "fp8", "tensorwise") and up["wgrad"][1] == "high_precision"


def test_explain_for_a_device(model, capsys):
    """With 64 tokens, FP8 is slower for all layers of this size on an H100; the default policy lets the
    description decide."""
    assert cli.main(["explain", "my_model.py:build", "--device", "h100", "--full", "--strict"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("fp8: 0 of 14 matmuls") and "slower in FP8" in out and "blocks.1.down" in out
    assert "strict: no matmul of my_model.py:build becomes FP8" in err


def test_a_model_that_cannot_be_traced(model, capsys):
    assert cli.main(["explain", "my_model.py:misshapen"]) == 1
    out, err = capsys.readouterr()
    said = err.splitlines()
    assert (
        out == ""
        and "error: Net of my_model.py:misshapen could not be traced: RuntimeError: a and b must have"
        in said[-1]
    )
    frames = re.findall(r'File "([^"]*)", line \d+, in (\w+)', err)
    assert [(Path(file).name, function) for file, function in frames] == [("my_model.py", "forward")] * 2
    with pytest.raises(RuntimeError, match="reduction dim"):
        cli.main(["--traceback", "explain", "my_model.py:misshapen"])


CAUSES = {"mixed": "Expected query, key, and value to have the same dtype", "backward": "an invalid gradient"}


@pytest.mark.filterwarnings("ignore:Error detected in ApplyTemplateBackward")
@pytest.mark.parametrize(
    "command, target",
    [
        ("explain", "mixed"),
        ("explain", "backward"),  # not while Dynamo traces: in AOTAutograd
        ("estimate", "mixed"),
        ("compare", "mixed"),
        ("tune", "mixed"),
        ("bench --device cpu", "mixed"),
    ],
)
def test_the_cause_is_torchs_message(model, capsys, command, target):
    """Dynamo's own message is a heading."""
    assert cli.main([*command.split(), f"my_model.py:{target}"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert CAUSES[target] in last and last.count("error: ") == 1


# -- estimate --


@pytest.mark.slow
@pytest.mark.compiled
def test_estimate(model, capsys):
    arguments = ["--device", "h100", "--json", "--html", "estimate.html"]
    assert cli.main(["estimate", "my_model.py:tiny", *arguments]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["device"].startswith("NVIDIA H100") and found["bf16"]["seconds"] > 0
    assert found["fp8"]["kernels"] > 0
    assert "said while loading" in err and "H100" in Path("estimate.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_estimate_hides_the_gpus(model):
    """GPUs are hidden before torch is imported, so that a GPU can be described on a machine with a GPU."""
    command = [sys.executable, "-m", "fp8compile", "estimate", "my_model.py:hidden"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 2 and "raised ValueError: ['', '']" in done.stderr


# -- policy --

POLICY = """
[[rules]]
name = "ups"
module = "blocks.*.up"
recipe = "tensorwise"

[[rules]]
module = "blocks.0.*"
fp8 = "off"
"""


@pytest.mark.slow
def test_policy_check(model, capsys):
    Path("fp8.toml").write_text(POLICY)
    assert cli.main(["policy", "check", "fp8.toml"]) == 0
    assert capsys.readouterr().out.startswith("fp8.toml: valid, 2 rules")
    assert cli.main(["policy", "check", "fp8.toml", "--model", "my_model.py:build"]) == 0
    rows = {line.split("  ")[0]: line.split()[-4:] for line in capsys.readouterr().out.splitlines()}
    assert rows["ups"][:3] == ["5", "2", "5"] and rows["rule 2"][:3] == ["3", "1", "0"]
    Path("fp8.toml").write_text(POLICY.replace("blocks.0.*", "bloks.0.*"))
    assert cli.main(["policy", "check", "fp8.toml", "--model", "my_model.py:build"]) == 1
    line = "no matmul of my_model.py:build is matched by 'rule 2' (no module of the model has a name like"
    assert f"fp8.toml: {line} 'bloks.0.*'. Near: 'blocks." in capsys.readouterr().err
    assert cli.main(["explain", "my_model.py:build", "--policy", "fp8.toml", "--strict"]) == 1
    assert "strict: no matmul of my_model.py:build is matched by 'rule 2'" in capsys.readouterr().err
    # may have rules for other models
    assert cli.main(["policy", "check", "llama", "--model", "my_model.py:build"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^down projection +0 +0 +0 ", out, re.MULTILINE)
    assert re.search(r"^output head +3 +1 +0 ", out, re.MULTILINE)


def test_a_policy_that_is_not_valid(model, capsys):
    Path("fp8.toml").write_text(POLICY.replace("recipe =", "recip ="))
    assert cli.main(["policy", "check", "fp8.toml"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "fp8.toml, line 5" in err and "recip" in err
    assert cli.main(["explain", "my_model.py:build", "--policy", "fp8.toml"]) == 2
    assert "fp8.toml, line 5" in capsys.readouterr().err


def test_policy_show_and_schema(model, capsys):
    """The shown text is a valid policy file."""
    assert cli.main(["policy", "show", "llama"]) == 0
    Path("own.toml").write_text(capsys.readouterr().out)
    assert cli.main(["policy", "check", "own.toml"]) == 0
    capsys.readouterr()
    assert cli.main(["policy", "show"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == sorted(BUILTIN)
    assert cli.main(["policy", "schema"]) == 0
    assert "rules" in json.loads(capsys.readouterr().out)["properties"]


# -- pipes and terminals --


def test_a_reader_that_leaves():
    command = f"{sys.executable} -m fp8compile devices --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[\n" and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_colour_on_terminals_only(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for terminal, no_color in ((True, ""), (True, "1"), (False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("NO_COLOR", no_color)
        assert cli.main(["explain", "no.py:f"]) == 2
        assert ("\x1b[31merror:" in capsys.readouterr().err) == (terminal and not no_color)
