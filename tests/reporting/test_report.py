"""Reports on hand-made records, the ledger, and the log line: nothing is compiled here."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import pickle
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tabulate import tabulate
from torch import nn

from fp8compile import logs
from fp8compile.ir.records import GraphReport, MatmulRecord, OpaqueRecord, TableRecord
from fp8compile.reporting import report as report_module
from fp8compile.reporting.columns import aligned
from fp8compile.reporting.report import Report
from fp8compile.runtime.ledger import Ledger
from tests.reporting.test_html import linear
from tests.support import hooks

ROOT = Path(__file__).resolve().parents[2]


def report_of(ledger: Ledger, model: nn.Module | None = None) -> Report:
    """The result of `report(model)` if `ledger` holds the compiled graphs."""
    with hooks.in_process(ledger):
        return report_module.report(model)


def gpt(blocks=2) -> GraphReport:
    records: list[MatmulRecord] = []
    for i in range(blocks):
        records += linear(f"h.{i}.attn.c_attn", 512, 768, 256) + linear(f"h.{i}.mlp.fc", 512, 1024, 256)
    records += linear("lm_head", 512, 4096, 256, "output head")
    records += linear("gate", 512, 64, 256, "under 128 wide (64)")[:1]
    attention = "scaled_dot_product_attention", "attention"
    opaque = tuple(OpaqueRecord(f"h.{i}.attn", *attention) for i in range(blocks))
    return GraphReport(7, "GPT, training", tuple(records), opaque)


# -- records and report --


def test_fraction_and_lists():
    graph = gpt()
    report = Report([graph, GraphReport(1, "f", tuple(linear("x", 16, 16, 16, "not a weight")))])
    fp8 = 2 * 3 * 2 * 512 * 256 * (768 + 1024)
    kept = 3 * 2 * 512 * 256 * 4096 + 2 * 512 * 256 * 64 + 3 * 2 * 16**3
    assert report.fp8_flop_fraction == pytest.approx(fp8 / (fp8 + kept), rel=1e-12)
    assert report.matmuls == [*graph.matmuls, *linear("x", 16, 16, 16, "not a weight")]
    assert report.opaque == list(graph.opaque)
    for matmuls in ((), tuple(linear("a", 0, 128, 128))):
        nothing = Report([GraphReport(0, "f", matmuls)])
        assert repr(nothing.fp8_flop_fraction) == "0.0" and str(nothing)


def summary(records) -> str:
    return Report([GraphReport(0, "GPT", tuple(records))]).summary()


def test_summaries():
    records = [r for i in range(28) for r in linear(f"h.{i}", 128, 128, 128)]
    records += linear("head", 128, 128, 85, "output head")[:2]
    records += linear("gate", 128, 85, 128, "under 128 wide: 85")[:1]
    kept = "3 kept: 2 output head, 1 under 128 wide"
    assert summary(records) == f"84 of 87 matmuls, 97.7% of matmul FLOPs; {kept}"
    assert summary(linear("a", 128, 128, 128)) == "3 of 3 matmuls, 100.0% of matmul FLOPs"
    note = "inference: compiled in high precision"
    for graphs in (1, 2):
        assert Report([GraphReport(0, "f", (), note=note)] * graphs).summary() == f"no matmuls; {note}"
    assert "not rewritten: 2 attention" in Report([gpt(2)]).summary()
    reasons = ["dtype: float64", "dtype (complex64)", "dtype; int8", "not a weight"]
    records = [MatmulRecord("a", "matmul", 2, 2, 2, "high_precision", reason) for reason in reasons]
    assert summary(records).endswith("4 kept: 3 dtype, 1 not a weight")
    # nearly all is not all
    for big, small, shown in (("fp8", "high_precision", "99.9%"), ("high_precision", "fp8", "0.1%")):
        records = [MatmulRecord("a", "fprop", 9999, 9999, 9999, big)]
        records += [MatmulRecord("b", "fprop", 16, 16, 16, small)]
        assert f"1 of 2 matmuls, {shown} of" in summary(records)


# -- the table --


def rows(text: str, name: str) -> list[list[str]]:
    """The cells of the table lines whose first cell is `name`."""
    return [cells for line in text.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))[0] == name]


def table(*records) -> str:
    return str(Report([GraphReport(0, "f", records)]))


def test_cells_of_a_table():
    """Sizes are those of the forward; uses are counted; a decision, a batch and a dynamic shape are shown."""
    fprop, dgrad, wgrad = linear("a", 48, 32, 16)
    for record in (fprop, dgrad, wgrad):
        assert rows(table(record), "a")[0][1:5] == [record.gemm, "48", "32", "16"]
    kept = linear("a", 48, 32, 16, "not a multiple of 16")[2]
    text = table(fprop, dgrad, kept, fprop, dgrad, kept)
    assert [row[1] for row in rows(text, "a")] == ["fprop (x2), dgrad (x2)", "wgrad (x2)"]
    sizes = dict(batch=8, dynamic=True, symbolic="mb")
    attention = MatmulRecord("", "matmul", 64, 64, 16, "high_precision", "not a weight", op="bmm", **sizes)
    text = table(attention, attention)
    assert rows(text, "(root)")[0][1:5] == ["matmul (x2)", "8* x 64*", "64", "16"]
    assert "* dynamic shape" in text
    assert "dynamic" not in str(Report([gpt()]))


def test_equal_layers_share_a_line():
    """A line shows the size of one layer, and the share of all."""
    report = Report([gpt(12)])
    text, every = str(report), report.table(collapse=False)
    for name in ("mlp.fc", "attn"):
        assert len(rows(text, f"h.0-11.{name} (x12)")) == 1
        assert all(len(rows(every, f"h.{i}.{name}")) == 1 for i in range(12))
    for line, layers in ((rows(every, "h.3.mlp.fc")[0], 1), (rows(text, "h.0-11.mlp.fc (x12)")[0], 12)):
        assert line[1:5] == ["fprop, dgrad, wgrad", "512", "1024", "256"]
        share = layers * 3 * 2 * 512 * 1024 * 256 / sum(record.flops for record in report.matmuls)
        assert float(line[5][:-1]) == pytest.approx(100 * share, abs=0.06) and line[6] == "FP8, delayed"
    widths = {"h.0.a": 32, "h.1.a": 64, "h.2.a": 32, "7": 32}
    text = table(*(record for name, width in widths.items() for record in linear(name, 32, width, 32)))
    assert rows(text, "h.0,2.a (x2)") and rows(text, "h.1.a") and rows(text, "7")


def test_layers_with_parts_kept_have_a_line_for_each_decision():
    layers = [linear(f"h.{i}.a", 64, 64, 64, kept=("wgrad",)) for i in range(3)]
    found = rows(table(*(record for layer in layers for record in layer)), "h.0-2.a (x3)")
    kept = ("wgrad", "high precision: kept by a rule")
    assert [(row[1], row[-1]) for row in found] == [("fprop, dgrad", "FP8, delayed"), kept]


def test_a_graph_for_evaluation_is_one_line():
    note = "compiled in high precision: the model is in eval mode"
    evaluation = GraphReport(1, "GPT, evaluation", gpt(3).matmuls, gpt(3).opaque, note=note)
    report = Report([gpt(3), evaluation])
    assert str(report) == f"{str(Report([gpt(3)]))}\n\ngraph 1: GPT, evaluation: 22 matmuls, {note}"
    both, one = (rows(x.table(collapse=False), "h.2.mlp.fc") for x in (report, Report([gpt(3)])))
    assert both == 2 * one
    assert len(report.to_dict()["graphs"][1]["matmuls"]) == 22


def test_hidden_operators_are_named_for_people():
    flash = [f"aten._scaled_dot_product_flash_attention_for_cpu{x}.default" for x in ("", "_backward")]
    hidden = [OpaqueRecord(f"h.{i}.attn", op, "attention") for i in range(4) for op in flash]
    hidden += [OpaqueRecord("patches", "aten.convolution.default", "convolution")] * 3
    unknown = "a third party's operator: what it computes is not visible"
    hidden += [OpaqueRecord("", "mylib.mix.default", unknown)]
    report = Report([GraphReport(0, "f", (), tuple(hidden))])
    assert report.summary() == "no matmuls; not rewritten: 8 attention, 3 convolution, 1 mylib.mix"
    assert rows(str(report), "h.0-3.attn (x4)") == [["h.0-3.attn (x4)", op, "attention"] for op in flash]
    assert rows(str(report), "patches (x3)") and rows(str(report), "(root)")


@dataclass(frozen=True)
class Pruned(TableRecord):
    """What a feature might say of a graph."""

    key, titles, sides = "pruned", ("pruned", "elements"), "<>"

    parameter: str
    elements: int

    @property
    def like(self) -> int:
        return self.elements

    @classmethod
    def cells(cls, alike):
        return (f"{sum(record.elements for record in alike):,}",)

    @classmethod
    def brief(cls, records):
        return f"pruned: {len(records)} weights"


def test_records_of_a_feature_are_in_every_form_of_the_report():
    found = tuple(Pruned(f"h.{i}.up.weight", 600) for i in range(2))
    ledger = Ledger()
    ledger.extend(ledger.add(gpt()), found)
    graph = ledger.graph(0)
    report = Report([graph, dataclasses.replace(gpt(), index=1)])
    assert graph.pruned == found and report.graphs[1].pruned == () == graph.added[2:]
    assert report.summary().endswith("; pruned: 2 weights")
    assert re.search(r"h\.0-1\.up\.weight \(x2\) +1,200$", str(report), re.MULTILINE)
    listed = [{"parameter": x.parameter, "elements": 600} for x in found]
    assert [x["pruned"] for x in report.to_dict()["graphs"]] == [listed, []]
    assert "<h3>Pruned</h3>" in report.to_html()
    assert pickle.loads(pickle.dumps(graph)) == copy.deepcopy(graph) == graph
    for of, key in ((graph, "prune"), (report, "pruned")):
        with pytest.raises(AttributeError, match=f"this report has no '{key}'"):
            getattr(of, key)


def test_empty_reports_say_why():
    assert "nothing was compiled yet" in repr(report_of(Ledger()))
    ledger = Ledger()
    ledger.attach(ledger.add(gpt()), nn.Linear(2, 2).parameters())
    said = str(report_of(ledger, nn.Linear(2, 2)))
    assert "none of the 1 compiled graphs reads a parameter of this Linear" in said


# -- the ledger --


def names(report: Report) -> list[tuple[int, str]]:
    return [(graph.index, graph.name) for graph in report.graphs]


def test_ledger_finds_a_models_graphs():
    ledger, one, two = Ledger(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    read = {"one": one.parameters(), "two": two.parameters(), "none": [], "buffer": one.buffers()}
    for name, tensors in read.items():
        ledger.attach(ledger.add(GraphReport(99, name, ())), tensors)
    assert names(report_of(ledger)) == [(0, "one"), (1, "two"), (2, "none"), (3, "buffer")]
    assert names(report_of(ledger, one)) == [(0, "one"), (3, "buffer")]
    for model in (two, torch.compile(two, backend="eager")):
        assert names(report_of(ledger, model)) == [(1, "two")]
    assert names(report_of(ledger, one[0])) == [(0, "one")]
    assert names(report_of(ledger, nn.Sequential(one, two))) == [(0, "one"), (1, "two"), (3, "buffer")]
    equal = nn.Linear(2, 2)
    equal.load_state_dict(two.state_dict())
    assert not report_of(ledger, equal).graphs
    with pytest.raises(TypeError, match="nn.Module or None, not function"):
        report_of(ledger, lambda x: x)
    ledger.clear()
    ledger.attach(0, one.parameters())
    assert not report_of(ledger).graphs and ledger.add(gpt()) == 4


# -- logs and dumps --


def stderr_of(code: str, **env: str) -> list[str]:
    set_here = ("TORCH_LOGS", "FP8COMPILE", "RANK")
    cleaned = {key: value for key, value in os.environ.items() if not key.startswith(set_here)}
    command = [sys.executable, "-c", f"import logging, sys\n{code}"]
    environment = cleaned | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "THE" in line]


SAY = """
from fp8compile.logs import get_logger
log = get_logger("fp8compile.backend")
log.debug("THE detail"), log.info("fp8: THE line"), log.warning("THE trouble")
"""


@pytest.mark.slow
def test_lines_on_stderr():
    """Information by default, the user's level, and no line twice where logging is configured."""
    everything = ["fp8: THE line", "warning: THE trouble"]
    start = SAY.index("log.debug")
    chosen = SAY[:start] + "logging.getLogger('fp8compile').setLevel('ERROR'); " + SAY[start:]
    configure = "logging.basicConfig(format='mine %(message)s')\n"
    assert stderr_of(SAY) == stderr_of(SAY, RANK="0") == everything
    assert stderr_of(SAY, RANK="1") == everything[1:]  # one rank says it
    assert stderr_of("logging.getLogger('fp8compile').setLevel('WARNING')\n" + SAY) == everything[1:]
    assert stderr_of(chosen) == []
    for code in (configure + SAY, SAY[:start] + configure + SAY[start:]):
        assert stderr_of(code) == ["mine fp8: THE line", "mine THE trouble"]


@pytest.mark.weekly
def test_torch_logs():
    """torch imports our packages while it is being imported, and ignores errors: nothing may stay half
    registered. The other settings are given to the same process, as at its start."""
    again = "import os\nfrom torch._logging import _internal\n"
    for setting in ("fp8compile", "-fp8compile"):
        again += f"print('THE next', file=sys.stderr)\nos.environ['TORCH_LOGS'] = {setting!r}\n"
        again += f"_internal._init_logs()\n{SAY}"
    imported = "import fp8compile.backend\nprint('THE', fp8compile.backend.fp8.__name__, file=sys.stderr)\n"
    lines = stderr_of("import torch\n" + SAY + again + imported, TORCH_LOGS="+fp8compile")
    said = [line.split("THE ")[1] for line in lines]
    assert said == "detail line trouble next line trouble next fp8".split()
    logged = [line for line in lines if line.endswith(("detail", "line", "trouble"))]
    assert all(re.match(r"[VIW]\d{4} ", line) for line in logged)


def test_say_once(caplog):
    loggers = [logs.get_logger(f"fp8compile.{name}") for name in "aab"]
    with caplog.at_level(logging.INFO, logger="fp8compile"):
        assert [logs.say_once(log, logging.INFO, "100%") for log in loggers] == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == ["100%", "100%"]


def test_dump_writes_numbered_files(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("FP8COMPILE_DUMP", str(tmp_path / "new" / "dir"))
    directory = logs.dump_dir()
    assert directory == tmp_path / "new" / "dir"
    logs.dump("fuse.txt", lambda: "one")
    logs.dump("kernel.py", lambda: "two")
    files = sorted(directory.iterdir())
    assert [file.read_text() for file in files] == ["one", "two"]
    assert [re.sub(r"^\d{4}", "", file.name) for file in files] == ["_fuse.txt", "_kernel.py"]
    monkeypatch.setattr(logs, "_numbers", iter([int(files[0].name[:4]), int(files[0].name[:4]) + 900]))
    logs.dump("fuse.txt", lambda: "three")  # like a second process: nothing is overwritten
    assert files[0].read_text() == "one" and len(list(directory.iterdir())) == 3
    monkeypatch.setenv("RANK", "3")
    assert logs.dump_dir() == directory / "rank3"


def test_dump_without_a_directory_does_nothing_and_one_that_cannot_be_written_is_a_warning(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FP8COMPILE_DUMP", raising=False)
    monkeypatch.setattr("torch._logging.trace_structured", lambda *args, **kwargs: None)
    assert logs.dump_dir() is None
    logs.dump("graph.txt", lambda: pytest.fail("nobody reads it"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP8COMPILE_DUMP", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="fp8compile"):
        logs.dump("graph.txt", str)
    assert "FP8COMPILE_DUMP" in caplog.text


def test_tables_are_those_of_tabulate() -> None:
    text = random.Random(0)
    for _ in range(200):
        width = text.randint(1, 5)
        cells = ["".join(text.choices("ab1., é", k=text.randint(0, 9))) for _ in range(4 * width)]
        head, *rows = (cells[i : i + width] for i in range(0, 4 * width, width))
        sides = "".join(text.choices("<>", k=width))
        theirs = [{"<": "left", ">": "right"}[side] for side in sides]
        assert aligned(head, rows, sides) == tabulate(rows, head, disable_numparse=True, colalign=theirs)
    assert aligned(("one", "two"), [(1, 2.5)]) == "one    two\n-----  -----\n1      2.5"


def test_tables_fit_a_terminal(monkeypatch) -> None:
    """Texts are wrapped between words and after dots, numbers and what goes into a file are not."""
    head = ("module", "m", "decision")
    row = ("blocks.0-11.mlp.up", "16384", "high precision: 0.86x at m 16384")
    monkeypatch.setenv("COLUMNS", "42")
    assert len(aligned(head, [row], "<><").splitlines()) == 3
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert aligned(head, [row], "<><").splitlines() == [
        "module                 m  decision",
        "-----------------  -----  ----------------",
        "blocks.0-11.mlp.   16384  high precision:",
        "up                        0.86x at m 16384",
    ]
