"""The HTML page: its numbers by the markup, its looks and behaviour in a browser if there is one."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fp8compile.dryrun.estimate_result import Cost, Estimate, LayerCost
from fp8compile.ir.records import GraphReport, MatmulRecord, OpaqueRecord, TableRecord
from fp8compile.reporting import diagram
from fp8compile.reporting.html import section
from fp8compile.reporting.layer_rows import flops, microseconds
from fp8compile.reporting.outside import OutsideRecord
from fp8compile.reporting.report import Report

HOSTILE = "aux.<script>document.title='taken'</script>&\"'><img src=x onerror=alert(1)>"


def linear(
    fqn: str, m: int, n: int, k: int, reason: str = "", kept: tuple[str, ...] = (), rule: str = ""
) -> list[MatmulRecord]:
    """The gemms of a linear on m tokens; a rule keeps the gemms in `kept` in high precision."""
    records = []
    for gemm, sizes in {"fprop": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}.items():
        why = reason or ("kept by a rule" if gemm in kept else "")
        decision, recipe = ("high_precision", "") if why else ("fp8", "delayed")
        more = {"parameter": f"{fqn}.weight", "rule": rule}
        records.append(MatmulRecord(fqn, gemm, *sizes, decision, why, recipe, **more))
    return records


def gpt(blocks: int = 12, timed: bool = False) -> GraphReport:
    """A small Llama: q, k, v, the two matmuls of attention, o, gate, up and down in each block; a head."""
    records: list[MatmulRecord] = []
    edges: list[tuple[int, int]] = []

    def add(*args: Any, **more: Any) -> int:
        records.extend(linear(*args, **more))
        return len(records) - 3

    def product(fqn: str, m: int, n: int, k: int) -> int:
        decided = "high_precision", "not a weight"
        records.append(MatmulRecord(fqn, "matmul", m, n, k, *decided, batch=8, op="bmm"))
        return len(records) - 1

    stream: list[int] = []
    for b in range(blocks):
        at = f"blocks.{b}"
        q = add(f"{at}.attn.q", 4096, 512, 512)
        k, v = (add(f"{at}.attn.{x}", 4096, 128, 512, kept=("wgrad",), rule="thin") for x in "kv")
        scores, mixed = product(f"{at}.attn", 512, 512, 64), product(f"{at}.attn", 512, 64, 512)
        o = add(f"{at}.attn.o", 4096, 512, 512)
        gate, up = (add(f"{at}.mlp.{x}", 4096, 2048, 512) for x in ("gate", "up"))
        down = add(f"{at}.mlp.down", 4096, 512, 2048)
        edges += [(s, x) for s in stream for x in (q, k, v)]
        edges += [(q, scores), (k, scores), (v, mixed), (scores, mixed)]
        edges += [(mixed, o), (gate, down), (up, down), *((s, x) for s in (*stream, o) for x in (gate, up))]
        stream += [o, down]
    head = add("lm_head", 4096, 8192, 512, reason="output head: by its name")
    edges += [(s, head) for s in stream] + [(head, head + 1), (head, head + 2)]
    add(HOSTILE, 4096, 64, 512, reason="under 128 wide (64)")
    device = "h100" if timed else ""
    if timed:
        times = [{"bf16_us": r.flops / 7e8, "fp8_us": r.flops / 12e8, "cast_us": 1.0} for r in records]
        records = [dataclasses.replace(r, **given) for r, given in zip(records, times, strict=True)]
    opaque = tuple(OpaqueRecord(f"blocks.{b}.attn", "flex_attention", "attention") for b in range(blocks))
    return GraphReport(0, "GPT, training", tuple(records), opaque, edges=tuple(edges), device=device)


def graph(records: Iterable[MatmulRecord], edges: Sequence[tuple[int, int]] = ()) -> GraphReport:
    return GraphReport(0, "f", tuple(records), edges=tuple(edges))


class Markup(HTMLParser):
    """Every start tag with its attributes, and all text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("style", "script"):
            self.text.append(data)


# -- numbers --


def test_rows():
    rows = {row.name: row for row in section(gpt()).rows}
    parts = ("attn.q", "attn.k", "attn.v", "attn", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
    assert list(rows) == [*(f"blocks.0-11.{part}" for part in parts), "lm_head", HOSTILE]
    up, head, k = rows["blocks.0-11.mlp.up"], rows["lm_head"], rows["blocks.0-11.attn.k"]
    assert up.flops == 12 * 3 * 2 * 4096 * 2048 * 512 and len(up.members()) == 12
    assert float(up.width) == 100.0 and float(head.width) == pytest.approx(100 * 8192 / (12 * 2048), abs=1e-3)
    assert head.first.why == "high precision: output head: by its name" and up.first.why == "FP8, delayed"
    assert k.first.why == "partly FP8; wgrad: kept by a rule" and float(k.fp8_width) == pytest.approx(66.667)
    assert up.first.size == "4096 × 2048 × 512"
    assert "wgrad: high precision: kept by a rule" in k.hover and "rule: thin" in k.hover
    assert sum(row.flops for row in rows.values()) == sum(record.flops for record in gpt().matmuls)


@pytest.mark.parametrize("reason", ["ends", "policy: ends", "ends: 64 x 256, 4096 rows"])
def test_a_rule_is_named_once(reason):
    records = linear("a", 512, 256, 256, reason, rule="ends") + linear("b", 256, 256, 256, rule="ends")
    kept, fp8 = section(graph(records)).rows
    assert (kept.first.rules, fp8.first.rules) == ("", "ends") and kept.hover.count("ends") == 1


def test_what_shares_a_row():
    """Blocks that differ do not; experts do, and gaps in their numbers are said."""
    reasons = ["rule: ends", "", "", "", "", "rule: ends"]
    records = [r for b, reason in enumerate(reasons) for r in linear(f"h.{b}.fc", 256, 256, 256, reason)]
    rows = [(row.name, len(row.layers), row.first.css) for row in section(graph(records)).rows]
    assert rows == [("h.0,5.fc", 2, "high"), ("h.1-4.fc", 4, "fp8")]
    grid = [r for b in range(3) for e in range(4) for r in linear(f"h.{b}.experts.{e}.up", 256, 256, 256)]
    for experts, name in ((grid, "h.0-2.experts.0-3.up"), (grid[3:], "h.*.experts.*.up")):
        assert [row.name for row in section(graph(experts)).rows] == [name]


def test_times():
    found = section(gpt(2, timed=True))
    before, after = found.splits
    matmuls = gpt(2, timed=True).matmuls
    assert before.us == pytest.approx(sum(r.bf16_us for r in matmuls))
    parts = {part.name: part.us for part in after.parts}
    assert parts["FP8 matmuls"] == pytest.approx(sum(r.fp8_us for r in matmuls if r.decision == "fp8"))
    assert parts["casts"] == pytest.approx(sum(r.decision == "fp8" for r in matmuls))
    assert parts["other matmuls"] == pytest.approx(sum(r.bf16_us for r in matmuls if r.decision != "fp8"))
    widest = '<span class="piece high" style="width:100.000%" title="matmuls'
    assert widest in Report([gpt(2, timed=True)]).to_html()
    assert section(gpt(2)).splits == ()


def test_numbers_for_people():
    times = {0: "0 µs", 1.234: "1.23 µs", 12.34: "12.3 µs", 999.4: "999 µs"}
    times |= {999.6: "1.00 ms", 2.5e6: "2.50 s"}
    assert {us: microseconds(us) for us in times} == times
    work = {0: "0 kFLOP", 9.66e9: "9.66 GFLOP", 1.2e12: "1.20 TFLOP", 3e18: "3000 PFLOP"}
    assert {count: flops(count) for count in work} == work


# -- estimates --


def estimated() -> Estimate:
    """Two parts of a model and an empty one; times in seconds."""
    flops = {"bfloat16": 4e12}, {"bfloat16": 1e12, "fp8": 3e12}
    mlp = (
        Cost(10, 6e9, 2e9, flops[0], 0, 4e8, seconds=0.008, matmul_seconds=0.006),
        Cost(12, 4e9, 1e9, flops[1], 0, 3e8, seconds=0.005, matmul_seconds=0.004, fp8_matmul_seconds=0.003),
    )
    attention = Cost(4, 1e9, 1e9, {}, 1e12, 1e8, seconds=0.002, attention_seconds=0.0015)
    parts = LayerCost("h.0-11.mlp", *mlp), LayerCost("h.0-11.attn", attention, attention)
    parts += (LayerCost("h", Cost(), Cost()),)
    return Estimate("NVIDIA H200", parts, Report([gpt(2, timed=True)]), ("said by the estimate",))


def test_estimate():
    text = estimated().to_html()
    markup = Markup(text)
    words = " ".join(" ".join(markup.text).split())
    assert "1.43× on NVIDIA H200, estimated" in words and "said by the estimate" in words
    assert "kernels 14 → 16" in words and "3 GB → 2 GB" in words and "0.5 GB → 0.4 GB" in words
    titles = [a["title"] for _, a in markup.tags if a.get("class", "").startswith("piece") and "title" in a]
    before = ["matmuls: 6.00 ms", "attention: 1.50 ms", "other: 2.50 ms"]
    after = ["FP8 matmuls: 3.00 ms", "other matmuls: 1.00 ms"]
    after += ["attention: 1.50 ms", "casts and other: 1.50 ms"]
    assert titles[:7] == before + after
    parts = [a["title"] for _, a in markup.tags if a.get("class") == "timed-part"]
    assert len(parts) == 2 and parts[0] == (
        "h.0-11.mlp: 8.00 ms → 5.00 ms, 1.60×\nbf16: matmuls 6.00 ms, other 2.00 ms\n"
        "FP8: FP8 matmuls 3.00 ms, other matmuls 1.00 ms, casts and other 1.00 ms"
    )


# -- the graph --


def drawn(names: list[str], edges: list[tuple[int, int]], **kept: str) -> diagram.Diagram | None:
    """The picture of forward matmuls with these names; those in `kept` are in high precision."""
    records = [linear(name, 128, 128, 128, reason=kept.get(name.replace(".", "_"), ""))[0] for name in names]
    return section(graph(records, edges)).diagram


def labels(picture: diagram.Diagram | None) -> list[str]:
    assert picture is not None
    return [box.label for box in picture.boxes]


def ends(picture: diagram.Diagram) -> list[tuple[str, str, bool]]:
    """The labels of the boxes that each arrow joins, found by position, and whether it is implied."""
    width, height = picture.box
    at = {(round(box.x + width / 2, 3), box.y): box.label for box in picture.boxes}
    found = []
    for arrow in picture.arrows:
        (x0, y0), *_, (x1, y1) = arrow.points
        found.append((at[round(x0, 3), y0 - height], at[round(x1, 3), y1 + 1], arrow.implied))
    return found


def test_one_block_of_equal_ones_is_drawn():
    picture = section(gpt()).diagram
    block = "blocks.0-11."
    inside = (*(f"attn.{x}" for x in "qkvo"), "attn", "attn", *(f"mlp.{x}" for x in ("gate", "up", "down")))
    expected = [*(f"{block}{x} ×12" for x in inside), "lm_head", "…" + HOSTILE[-29:]]
    assert sorted(labels(picture)) == sorted(expected)
    # q, k, v -> matmuls of attention -> o -> gate, up -> down -> head; one more arrow, as o also adds to the
    # residual stream
    assert len(picture.arrows) == 4 + 1 + 2 + 2 + 1 + 1
    assert [arrow for arrow in ends(picture) if arrow[2]] == [(f"{block}attn.o ×12", "lm_head", True)]


def test_arrows_beside_residual_connections():
    """Each matmul that adds to the stream has an arrow to its next readers, and one to those after them."""
    names = [f"layer_{i}" for i in range(5)]
    picture = drawn(names, [(i, j) for i in range(5) for j in range(i + 1, 5)])
    expected = [(names[i], names[i + 1], False) for i in range(4)]
    expected += [(names[i], names[i + 2], True) for i in range(3)]
    assert sorted(ends(picture)) == sorted(expected)


def test_blocks_that_differ_are_drawn_apart():
    chain = [(i, i + 1) for i in range(5)]
    picture = drawn([f"h.{i}.fc" for i in range(6)], chain, h_0_fc="kept")
    assert labels(picture) == ["h.0.fc", "h.1-5.fc ×5"]
    assert ends(picture) == [("h.0.fc", "h.1-5.fc ×5", False)]
    assert [box.chips[0][1] for box in picture.boxes] == ["high", "fp8"]


def test_experts_are_one_box():
    """Beside each other; and in two blocks, below a router each."""
    names = ["gate", *(f"experts.{e}.{x}" for e in range(8) for x in ("up", "down")), "head"]
    edges = [e for i in range(8) for e in ((0, 1 + 2 * i), (1 + 2 * i, 2 + 2 * i), (2 + 2 * i, 17))]
    picture = drawn(names, edges)
    assert labels(picture) == ["gate", "experts.0-7.up ×8", "experts.0-7.down ×8", "head"]
    assert len(picture.arrows) == 3
    names = [f"h.{b}.{x}" for b in range(2) for x in ("router", *(f"experts.{e}.fc" for e in range(3)))]
    edges = [e for b in (0, 4) for i in range(1, 4) for e in ((b, b + i), *([(i, 4)] if b else []))]
    assert ends(drawn(names, edges)) == [("h.0-1.router ×2", "h.0-1.experts.0-2.fc ×6", False)]


def test_blocks_around_a_shared_layer_are_drawn_as_they_are():
    """h.0 -> shared -> h.1: one box for both blocks would make a cycle."""
    picture = drawn(["h.0.fc", "shared", "h.1.fc"], [(0, 1), (1, 2)])
    assert ends(picture) == [("h.0.fc", "shared", False), ("shared", "h.1.fc", False)]


def test_products_of_backward_are_not_drawn():
    """The diagram contains the forward matmul, but none of attention's backward, nor after them."""
    products = (MatmulRecord("", "matmul", 64, 64, 64, "high_precision") for _ in range(3))
    records = [*linear("a", 64, 64, 64), *products]
    picture = section(graph(records, [(0, 3), (1, 4), (4, 5), (3, 5)])).diagram
    assert ends(picture) == [("a", "(root)", False)]
    assert [box.weight for box in picture.boxes] == [True, False]
    assert [chip[0] for box in picture.boxes for chip in box.chips] == ["F", "D", "W", "M"]


def test_limits():
    many = [f"layer_{i}" for i in range(diagram.LIMIT + 5)]
    picture = drawn(many, [(i, i + 1) for i in range(len(many) - 1)])
    assert labels(picture) == many[: diagram.LIMIT] and picture.note == "the first 80 of 85 boxes are drawn"
    assert drawn(many, []) is None and drawn([], []) is None and drawn(many, [(0, 1), (1, 0)]) is None
    picture = drawn(["a" * 40 + ".proj", "b"], [(0, 1)])
    assert labels(picture)[0] == "…" + "a" * 24 + ".proj" and len(labels(picture)[0]) == diagram.MOST


def changing(blocks: int) -> GraphReport:
    """A model with different blocks: every second one keeps its last matmul in high precision."""
    equal = gpt(blocks)
    odd = {f"blocks.{b}.mlp.down" for b in range(1, blocks, 2)}
    high = {"decision": "high_precision", "reason": "kept", "recipe": ""}
    records = tuple(dataclasses.replace(r, **high) if r.fqn in odd else r for r in equal.matmuls)
    return dataclasses.replace(equal, matmuls=records)


@pytest.mark.parametrize(
    "model", [gpt(), gpt(1), changing(2), changing(8)], ids=["equal", "one", "two", "eight"]
)
def test_picture(model):
    """No two boxes overlap, arrows go down and cross no box, and everything is within the picture."""
    picture = section(model).diagram
    width, height = picture.box
    boxes = [(box.x, box.y, box.x + width, box.y + height) for box in picture.boxes]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left and right <= picture.width and 0 <= top and bottom <= picture.height
        assert not any(left < r and x < right and top < b and y < bottom for x, y, r, b in boxes[:i])
    assert len(ends(picture)) > len(boxes) - 3
    for arrow in picture.arrows:
        for (x0, y0), (x1, y1) in zip(arrow.points, arrow.points[1:], strict=False):
            assert y0 < y1 and 0 <= x0 <= picture.width and 0 <= x1 <= picture.width
            # a curve stays between its ends: it bends only between two rows, and is straight beside a box
            beside = [box for box in boxes if min(y1, box[3]) > max(y0, box[1])]
            assert not beside or (x0 == x1 and not any(box[0] <= x0 <= box[2] for box in beside))


# -- markup --


def test_page_is_self_contained_and_escaped():
    text = Report([gpt(), dataclasses.replace(gpt(1, True), index=1, note="eval mode")]).to_html()
    markup = Markup(text)
    tags = [tag for tag, _ in markup.tags]
    assert tags.count("script") == 1 and "img" not in tags
    for _, attributes in markup.tags:
        assert not {"src", "srcset", "onload", "onerror", "onclick"} & set(attributes)
        assert attributes.get("href", "data:").startswith("data:")
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text
    assert any(HOSTILE in piece for piece in markup.text)
    titles = [attributes.get("title", "") for tag, attributes in markup.tags if tag == "summary"]
    assert any(title.startswith(HOSTILE) for title in titles)


def test_page_of_nothing():
    assert "nothing was compiled yet" in Report(empty="nothing was compiled yet").to_html()
    assert "no matmuls" in Report([graph([])]).to_html()
    assert "0 × 128 × 128" in Report([graph(linear("a", 0, 128, 128))]).to_html()


@dataclass(frozen=True)
class GatheredAs(TableRecord):
    """What a feature might say of the parameters of a model."""

    of_model, titles, sides = True, ("all-gather in training", "as", "why not FP8"), "<<<"
    about = "Beside a table of this page."

    parameter: str
    dtype: str
    reason: str = ""

    @property
    def like(self) -> tuple[str, str]:
        return self.dtype, self.reason

    @classmethod
    def cells(cls, alike: Sequence[GatheredAs]) -> tuple[str, ...]:
        return alike[0].dtype, alike[0].reason

    @classmethod
    def brief(cls, records: Sequence[GatheredAs]) -> str:
        return f"all-gather: {sum(not record.reason for record in records)} matrices in FP8"


def test_what_is_in_no_graph_and_what_a_feature_says():
    """A percentage is of what was compiled. Equal layers share a row; a dot and reasons say what is FP8."""
    left = [OutsideRecord(f"h.{i}.fc", "Linear", f"h.{i}.fc.weight", 256, 128) for i in range(3)]
    left.append(OutsideRecord(HOSTILE, "Linear", f"{HOSTILE}.weight", 64, 32))
    gathered = [GatheredAs(f"h.{i}.up.weight", "e4m3") for i in range(3)]
    gathered += [GatheredAs(f"h.{i}.down.weight", "bfloat16", "40 rows") for i in range(3)]
    gathered.append(GatheredAs(HOSTILE, "float32", HOSTILE))
    remarked = dataclasses.replace(gpt(1), remarks=("weights are cast again in backward",))
    text = Report([remarked], outside=left, added=gathered).to_html()
    whole, part = (" ".join(Markup(page).text) for page in (Report([remarked]).to_html(), text))
    for words in ("of what was compiled", "In no compiled graph", "All-gather in training"):
        assert words in part and words not in whole
    said = ("4 weights", "256 x 128", "64 x 32", "3 matrices in FP8", "Beside a table", "40 rows")
    for words in (*said, *remarked.remarks):
        assert words in part, words
    for name in ("fc", "up", "down"):
        assert f'h.<wbr>0-2.<wbr>{name}.<wbr>weight</td><td class="n">3</td>' in text
    for css, name in (("fp8", "up"), ("high", "down")):
        assert f'<i class="dot {css}"></i>h.<wbr>0-2.<wbr>{name}.' in text
    assert HOSTILE in part and "<script>document" not in text


# -- in a browser --

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
 --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage""".split()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if not BROWSER or not DRIVER:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Browser:
    """A page in the browser."""

    def __init__(self, driver: Any, file: Path) -> None:
        self.driver, self.url = driver, file.as_uri()

    def open(self, width: int = 1280) -> Browser:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(self.url)
        return self

    def __call__(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *args)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def browser(chromium: Any, tmp_path: Path) -> Browser:
    note = "the model is in eval mode"
    evaluation = dataclasses.replace(gpt(2), index=1, name="GPT, evaluation", note=note)
    file = tmp_path / "report.html"
    file.write_text(Report([gpt(timed=True), evaluation]).to_html(), encoding="utf-8")
    return Browser(chromium, file)


ROW = "#graph-0 .layer[data-order='%d']"


@pytest.mark.slow
@pytest.mark.browser
def test_expander_and_sorting(browser):
    browser.open()
    member = browser.find(ROW % 6 + " .member:last-child .name")
    assert not member.is_displayed()
    browser.find(ROW % 6 + " summary").click()
    assert member.is_displayed() and member.text == "blocks.11.mlp.up"
    shown = browser.find(ROW % 6).text
    assert "4096 512 2048" in shown.replace("\n", " ") and "blocks.0.mlp.up.weight" in shown
    browser.find(ROW % 6 + " summary").click()
    assert not member.is_displayed()
    names = "Array.from(document.querySelectorAll('#graph-0 .layer')).map(row => row.dataset.name)"
    rows = section(gpt(timed=True)).rows
    model = [row.name for row in rows]
    assert browser(names) == model
    browser.find("#graph-0 [data-sort=flops]").click()
    assert browser(names) == [row.name for row in sorted(rows, key=lambda row: -row.flops)]
    browser.find("#graph-0 [data-sort=name]").click()
    assert browser(names)[0] == HOSTILE and browser(names)[-1] == "lm_head"
    browser.find("#graph-0 [data-sort=order]").click()
    assert browser(names) == model
    browser.find("#graph-0 .all").click()
    assert browser("document.querySelectorAll('#graph-0 .layer[open]').length") == len(rows)


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows(browser, width):
    browser.open(width)
    sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    assert browser(sizes)[0] == browser(sizes)[1]
    browser("document.querySelectorAll('details').forEach(d => d.open = true)")
    seen, room = browser(sizes)
    assert seen == room and width - 20 <= room <= width  # minus a scroll bar
    outside = """Array.from(document.querySelectorAll('main *')).filter(e => !e.closest('.scroll')
        && e.getBoundingClientRect().right > arguments[0] + 0.5).map(e => e.className)"""
    assert browser(outside, room) == []
    # every box of the graph is within the drawing, and every text within its box
    beyond = """(() => { const svg = document.querySelector('#graph-0 svg').getBoundingClientRect();
        const within = (a, b) =>
            a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
        return Array.from(document.querySelectorAll('#graph-0 svg .node')).filter(n => {
            const box = n.querySelector('rect').getBoundingClientRect();
            const texts = Array.from(n.querySelectorAll('text')).map(t => t.getBoundingClientRect());
            return !within(box, svg) || texts.some(text => !within(text, box));
        }).map(n => n.textContent) })()"""
    assert browser("document.querySelectorAll('svg.graph').length") == 2 and browser(beyond) == []
    # names are text, and run nothing
    assert browser("document.title") == "fp8compile report: GPT, training"
    assert browser("document.images.length") == 0
    assert HOSTILE in browser.find(ROW % 9 + " .name").text
    assert browser.errors() == []
