"""The command line: exit statuses, stdout and stderr, and each command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8compile import cli
from fp8compile.cli import target
from fp8compile.cli.model_commands import talk_on_stderr
from fp8compile.cli.model_options import parse_option
from fp8compile.config.policy import BUILTIN
from fp8compile.devices import catalog
from fp8compile.dryrun.autocast import NOTE
from fp8compile.dryrun.explain import UNWEIGHED
from tests.support import hooks
from tests.support.times import Compiler

ROOT = Path(__file__).resolve().parents[2]


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
        ("explain", "Missing argument 'TARGET'"),
        ("explain x.py:build --devise h100", "--devise"),
        ("explian x.py:build", "No such command 'explian'"),
        ("explain x.py:build", "x.py does not exist"),
        ("explain my_model.py:build --device h1000", "Did you mean 'h100'"),
        ("estimate my_model.py:build --device a100", "a device with FP8 tensor cores"),
        ("explain my_model.py:build --option recipe", "is not KEY=VALUE"),
        ("explain my_model.py:build --option recipe=tensorwsie", "Did you mean 'tensorwise'"),
        ("explain my_model.py:build --html no/such/folder.html", "there is no folder no/such"),
        ("explain my_model.py:build --policy nope.toml", "nope.toml"),
        ("compare my_model.py:build --plot no/such/folder.png", "there is no folder no/such"),
        ("compare my_model.py:build --loss buildd", "no function 'buildd'. Did you mean 'build'"),
        ("tune my_model.py:build --out no/such/policy.toml", "there is no folder no/such"),
        ("tune my_model.py:build --max-error much", "not a valid float"),
        ("tune my_model.py:build --max-error 2", "max_error"),
        ("tune my_model.py:build --like my_model.py:biuld", "Did you mean 'build'"),
        ("bench my_model.py:build --device gpu0", "'gpu0' is not a device as torch names it"),
        ("bench my_model.py:build --option recipe=tensorwsie", "Did you mean 'tensorwise'"),
        ("bench my_model.py:build --device cpu --rounds 1", "--rounds"),
        ("policy check nope.toml", "nope.toml does not exist"),
        ("policy show nope", "there is no shipped policy 'nope'"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(model, run, arguments, says):
    out, err = run(arguments, 2)
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


def test_devices(run):
    out, _ = run("devices")
    assert all(key in out for key in catalog.shipped()) and "\x1b" not in out
    known = json.loads(run("devices --json")[0])
    h100 = next(device for device in known if device["key"] == "h100")
    assert h100["sustained"]["fp8"] == catalog.find("h100").sustained.fp8


def test_calibrate_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees none" in run("calibrate --no-write", 1)[1]
    assert "'gpu0' is not a device" in run("calibrate --device gpu0", 2)[1]


# -- compare --


@pytest.mark.slow
def test_compare(model, run):
    pytest.importorskip("matplotlib")
    out, err = run("compare my_model.py:tiny --json --plot compare.png --strict --option recipe=tensorwise")
    found = json.loads(out)
    layers = {row["name"] for row in found["rows"] if row["kind"] == "layer"}
    assert layers >= {"blocks.0.up.weight", "blocks.0.down.weight"}
    assert "wrote compare.png" in err and Path("compare.png").read_bytes()[:4] == b"\x89PNG"
    sys.modules.pop("my_model")
    out, err = run("compare my_model.py:tiny --loss half")
    assert f"loss {found['loss'] / 2:.6g} in high precision" in out and "blocks.0.up.weight" in out
    assert NOTE in err


# -- bench --


def test_where_there_is_nothing_to_time(model, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _, err = run("bench my_model.py:build", 1)
    assert "torch sees no cuda here. --device cpu tries the command" in err
    _, err = run("bench my_model.py:build --device meta", 1)
    assert "FP8 cannot pay here: meta devices have no FP8 matmuls" in err


@pytest.mark.slow
@pytest.mark.compiled
def test_bench(model, run):
    """On a CPU: all arms run; what they say of it; a model that was compiled in place is as before."""
    pytest.importorskip("torchao")
    net = target.load("my_model:in_place").model
    before = {name: value.clone() for name, value in net.state_dict().items()}
    options = "--device cpu --loss half --rounds 2 --steps 2 --warmup 2 --option recipe=delayed --json"
    out, err = run(f"bench my_model:in_place {options}")
    found = json.loads(out)
    assert [one["arm"] for one in found["rows"]] == ["bf16", "torchao-tensorwise", "fp8"]
    for one in found["rows"]:
        assert one["error"] is None and one["step_ms"]["total"] > 0 and one["kernels"] is one["peak"] is None
        assert len(one["tokens_per_s"]["rounds"]) == 2
        assert 0 < one["step_ms"]["optimizer"] < one["step_ms"]["total"]
        assert len(set(one["losses"][1:])) == 1  # the optimizer changes nothing; FP8's first call is cold
    bf16, *fp8 = (one["losses"][-1] for one in found["rows"])
    assert all(loss != bf16 and abs(loss - bf16) < 0.1 * bf16 for loss in fp8)
    decisions = {record["decision"] for graph in found["report"]["graphs"] for record in graph["matmuls"]}
    assert decisions == {"fp8", "high_precision"}  # the output head
    assert found["emulated"] and found["verdict"].startswith("no answer: FP8 is emulated")
    assert found["layers"] == []
    assert err.count("FP8 is emulated on a CPU") == 1 and "round 2 of 2" in err
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


# -- tune --


@pytest.mark.weekly
def test_tune(model, run):
    """The file, JSON on stdout, progress on stderr; an answer of no is one line and status 1."""
    command = "tune my_model.py:tiny --device h100 --like my_model.py:tiny"
    with hooks.tuning(Compiler, ["rowwise"]):
        out, err = run(f"{command} --max-error 0.4 --json --out tuned.toml")
        sys.modules.pop("my_model")
        assert "no FP8 policy" in run(f"{command} --max-error 1e-6", 1)[1].splitlines()[-1]
    found = json.loads(out)
    assert set(found["choice"]) == {"blocks.*.up", "blocks.*.down"} and found["error"] <= 0.4
    assert Path("tuned.toml").read_text() == found["toml"]
    assert "wrote tuned.toml" in err and "in high precision" in err and "rowwise: blocks.*.up" in err


# -- explain --


def test_explain(model, run):
    out, err = run("explain my_model.py:build --html report.html")
    lines = out.splitlines()
    assert lines[0].startswith("fp8: 11 of 14 matmuls, ") and lines[1:3] == [f"* {NOTE}", f"* {UNWEIGHED}"]
    assert "said while" not in out and "said while building" in err and "wrote report.html" in err
    assert re.search(r"^blocks\.0-1\.down \(x2\) +fprop, dgrad, wgrad +64 +256 +1024 ", out, re.MULTILINE)
    written = Path("report.html").read_text(encoding="utf-8")
    assert written.startswith("<!DOCTYPE html>") and 'data-name="blocks.0-1.down"' in written
    options = "--option=recipe=tensorwise --option=override_linear_precision=[false,false,true]"
    out, _ = run(f"explain my_model.py:alone --json --input=128x256 {options}")
    matmuls = json.loads(out)["graphs"][0]["matmuls"]
    up = {r["gemm"]: (r["m"], r["decision"], r["recipe"]) for r in matmuls if r["fqn"] == "blocks.1.up"}
    assert up["fprop"] == (128, "fp8", "tensorwise") and up["wgrad"][1] == "high_precision"


def test_explain_for_a_device(model, run):
    """With 64 tokens, FP8 is slower for all layers of this size on an H100; the default policy lets the
    description decide."""
    out, err = run("explain my_model.py:build --device h100 --full --strict", 1)
    assert out.startswith("fp8: 0 of 14 matmuls") and "slower in FP8" in out and "blocks.1.down" in out
    assert "strict: no matmul of my_model.py:build becomes FP8" in err


def test_a_model_that_cannot_be_traced(model, run):
    out, err = run("explain my_model.py:misshapen", 1)
    why = "error: Net of my_model.py:misshapen could not be traced: RuntimeError: a and b must have"
    assert out == "" and why in err.splitlines()[-1]
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
        ("compare", "mixed"),  # as tune
        ("bench --device cpu", "mixed"),
    ],
)
def test_the_cause_is_torchs_message(model, run, command, target):
    """Dynamo's own message is a heading. No traceback has frames of ours."""
    _, err = run(f"{command} my_model.py:{target}", 1)
    last = err.splitlines()[-1]
    assert CAUSES[target] in last and last.count("error: ") == 1
    assert "fp8compile/dryrun" not in err and (target == "backward" or "Traceback" in err)


# -- estimate --


@pytest.mark.slow
@pytest.mark.compiled
def test_estimate(model, run):
    out, err = run("estimate my_model.py:tiny --device h100 --json --html estimate.html")
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
def test_policy_check(model, run):
    Path("fp8.toml").write_text(POLICY)
    assert run("policy check fp8.toml")[0].startswith("fp8.toml: valid, 2 rules")
    out, _ = run("policy check fp8.toml --model my_model.py:build")
    rows = {line.split("  ")[0]: line.split()[-4:] for line in out.splitlines()}
    assert rows["ups"][:3] == ["5", "2", "5"] and rows["rule 2"][:3] == ["3", "1", "0"]
    Path("fp8.toml").write_text(POLICY.replace("blocks.0.*", "bloks.0.*"))
    _, err = run("policy check fp8.toml --model my_model.py:build", 1)
    line = "no matmul of my_model.py:build is matched by 'rule 2' (no module of the model has a name like"
    assert f"fp8.toml: {line} 'bloks.0.*'. Near: 'blocks." in err
    _, err = run("explain my_model.py:build --policy fp8.toml --strict", 1)
    assert "strict: no matmul of my_model.py:build is matched by 'rule 2'" in err
    out, _ = run("policy check llama --model my_model.py:build")  # may have rules for other models
    assert re.search(r"^down projection +0 +0 +0 ", out, re.MULTILINE)
    assert re.search(r"^output head +3 +1 +0 ", out, re.MULTILINE)


def test_a_policy_that_is_not_valid(model, run):
    Path("fp8.toml").write_text(POLICY.replace("recipe =", "recip ="))
    out, err = run("policy check fp8.toml", 1)
    assert out == "" and "fp8.toml, line 5" in err and "recip" in err
    assert "fp8.toml, line 5" in run("explain my_model.py:build --policy fp8.toml", 2)[1]


WINDOWS = """
[schedule]
warmup_steps = 200
total_steps = 10000
[[rules]]
name = "late forward"
gemm = "fprop"
during = "90%.."
"""


def test_policy_check_prints_the_timeline(model, run):
    Path("fp8.toml").write_text(WINDOWS)
    first, _, _, *rows, last = run("policy check fp8.toml")[0].splitlines()
    assert first == "fp8.toml: valid, 1 rule and 4 of what it extends"
    steps = [("0", "schedule (..200)"), ("200", "none"), ("9000", "late forward (90%..)")]
    assert [tuple(re.split("  +", row)) for row in rows] == steps
    assert last == "3 sets of rules: each graph of the model is compiled 3 times"
    by_hand = '[[rules]]\nname = "calm"\nmodule = "blocks.0.*"\nduring = "by hand"\n'
    Path("fp8.toml").write_text(WINDOWS + by_hand)
    *_, names, last = run("policy check fp8.toml")[0].splitlines()
    assert names == "switched by hand: 'calm'" and last.startswith("5 sets of rules")
    Path("fp8.toml").write_text(WINDOWS.replace("total_steps", "# total_steps"))
    out, err = run("policy check fp8.toml", 1)
    assert out == "" and "'90%..' is a share of all steps: write total_steps under [schedule]" in err


def test_policy_show_and_schema(model, run):
    """The shown text is a valid policy file."""
    Path("own.toml").write_text(run("policy show llama")[0])
    run("policy check own.toml")
    assert [line.split()[0] for line in run("policy show")[0].splitlines()[2:]] == sorted(BUILTIN)
    assert "rules" in json.loads(run("policy schema")[0])["properties"]


# -- pipes and terminals --


def test_a_reader_that_leaves():
    command = f"{sys.executable} -m fp8compile devices --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "[\n" and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_colour_on_terminals_only(run, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for terminal, no_color in ((True, ""), (True, "1"), (False, "")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setenv("NO_COLOR", no_color)
        assert ("\x1b[31merror:" in run("explain no.py:f", 2)[1]) == (terminal and not no_color)
