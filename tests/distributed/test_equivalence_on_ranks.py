"""Training on several ranks: sharded, it is that of replicas whose gradients are averaged; with a feature, it
is that without.

A case is two trainings by one protocol (tests/equivalence/protocols.py, and ranks.py for a few more events),
on each rank: outputs, gradients, weights and scaling state have to be bitwise the same, or as near as
promised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fp8compile.reporting.outside import WHY_OUTSIDE
from tests.distributed.ranks import OnRanks, Way, facts, train
from tests.support import hooks
from tests.support.harness import sqnr
from tests.support.processes import on_ranks

BITWISE = float("inf")
Facts = dict[str, Any]
RESHARDED = "recast_weights=True: FSDP reshards weights after forward"
BROKEN = "FSDP's hooks break the graph of Net, and what is left of it runs eagerly"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """`ours` and `theirs` train `model`; `promise`: in dB. `check(ours, theirs, rank)`: what each rank shows
    beside."""

    ours: Way
    theirs: Way
    protocol: str
    model: str = "mlps"
    ranks: int = 2
    promise: float = BITWISE
    check: Callable[[Facts, Facts, int], None] = lambda ours, theirs, rank: None
    other: str = ""  # the protocol of `theirs`, if it is another one


# -- sharded, and replicas --


def same_decisions(ours: Facts, theirs: Facts, rank: int) -> None:
    assert ours["fp8"] == theirs["fp8"] and ours["fp8"]
    assert ours["state"] == theirs["state"] and ours["stats"] == theirs["stats"] and len(ours["stats"]) > 10


def outside(keeps: bool, why: str = WHY_OUTSIDE) -> Any:
    """Where FSDP2 reshards, no weight is kept in FP8: it would be a whole one. And what is in no graph."""

    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        same_decisions(ours, theirs, rank)
        assert ours["words"][-1]["alive"] == (6 * 128 * 256 if keeps else 0)
        assert (RESHARDED in ours["text"]) is not keeps and (RESHARDED in str(ours["remarks"])) is not keeps
        assert ours["outside"] == [("out.weight", why)]
        said = f"100.0% of matmul FLOPs of what was compiled; in no compiled graph: 1 linear (out): {why}"
        assert said in ours["summary"] and f"* {why}" in ours["text"]

    return check


def packed(keeps: bool = False, why: str = WHY_OUTSIDE) -> Any:
    """As `outside`, of FSDP1; and no weight at all is held from forward to backward. The checkpoint is that
    of one process."""

    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        outside(keeps, why)(ours, theirs, rank)
        assert ours["words"][-1]["held"] == ours["words"][-1]["alive"]
        assert ours["names"] == theirs["names"] and ours["checkpoint"].keys() == theirs["checkpoint"].keys()
        assert all(torch.equal(x, ours["checkpoint"][name]) for name, x in theirs["checkpoint"].items())

    return check


def cut(ours: Facts, theirs: Facts, rank: int) -> None:
    """DDP has cut the graph at its buckets."""
    assert len(ours["graphs"]) > len(theirs["graphs"]) and ours["fp8"] == theirs["fp8"] and ours["fp8"]


def with_replicas(way: Way, protocol: str, **more: Any) -> Case:
    options = {name: value for name, value in way.options.items() if name != "reduce_amax"}
    mesh = way.mesh if len(way.mesh) == 2 else ()
    twin = Way("replica", options, checkpoint=way.checkpoint, mesh=mesh)
    return Case(
        way, twin, protocol, more.pop("model", "gated"), check=more.pop("check", same_decisions), **more
    )


def recipe(name: str, **more: Any) -> dict[str, Any]:
    return {"recipe": name, **more}


WINDOWS = {
    "policy": {
        "defaults": {"recipe": "delayed"},
        "rules": [
            {"module": "*.down", "during": "1..3", "fp8": "off"},
            {"module": "*.up", "gemm": "dgrad", "during": "2..", "recipe": "rowwise"},
        ],
    }
}
CURRENT_WEIGHTS = recipe("delayed", current_scaling=(False, True, False))


def sent_in_fp8(ours: Facts) -> set[str]:
    """The weights that are gathered in FP8 at the end."""
    return {name for name, (dtype, _) in ours["words"][-1]["said"].items() if dtype == "e4m3"}


def in_fp8(ours: Facts, theirs: Facts, rank: int) -> None:
    assert sent_in_fp8(ours) == MLPS
    assert ours["fp8"] == theirs["fp8"] and ours["fp8"]


REPLICAS = {
    "gathered beside replicas": with_replicas(
        Way(options=recipe("tensorwise"), gather=True), "fbs fbs fxl fbs", model="mlps", check=in_fp8
    ),
    "blocks, delayed": with_replicas(Way(options=recipe("delayed")), "fbs fbs fbs", check=outside(False)),
    "kept": with_replicas(Way(options=recipe("tensorwise"), reshard=False), "afbs fbs", check=outside(True)),
    "wrapped, cast again": with_replicas(
        Way(options=recipe("rowwise", recast_weights=True), compiled="wrapped"), "fbs fbs"
    ),
    "whole": with_replicas(
        Way(options=recipe("blockwise"), compiled="whole"), "fbs fbs", check=outside(False, BROKEN)
    ),
    "mxfp8": with_replicas(
        Way(options=recipe("mxfp8"), compiled="after", reshard=True, checkpoint="outside"), "fbs afbs"
    ),
    "checkpoint inside": with_replicas(Way(options=recipe("delayed"), checkpoint="inside"), "fbs afbs"),
    "cached weights": with_replicas(
        Way(options=recipe("tensorwise", cache_weights=True), compiled="after"), "fbs afbs"
    ),
    "in any order": with_replicas(Way(options=recipe("delayed")), "fbs ffbzbz ffrzrz cbs obs d jbs fxfbs"),
    "over 2 x 2": with_replicas(Way(options=recipe("delayed"), mesh=(2, 2)), "afbs fbs", ranks=4),
    "to fewer ranks": with_replicas(
        Way(options=recipe("rowwise_with_gw_hp"), mesh=(4,), reshard=2), "fbs fbs", ranks=4, promise=100.0
    ),
    "fsdp1": with_replicas(
        Way("fsdp1", recipe("tensorwise"), "around"), "fbs afbs e l fbs", check=packed(why=BROKEN)
    ),
    "fsdp1, blocks": with_replicas(Way("fsdp1", recipe("delayed")), "fbs afbs mfbs fbs", check=packed()),
    "fsdp1, kept": with_replicas(
        Way("fsdp1", recipe("delayed"), reshard=False), "afbs fbs", check=packed(True)
    ),
    "fsdp1, bf16": Case(
        Way("fsdp1", recipe("delayed"), dtype=BF16), Way("fsdp", recipe("delayed"), dtype=BF16), "fbs fbs",
        check=same_decisions,
    ),
    "fsdp1 over 2 x 2": with_replicas(Way("fsdp1", recipe("blockwise"), mesh=(2, 2)), "afbs fbs", ranks=4),
    "ddp": Case(
        Way("ddp", recipe("delayed")), Way("replica", recipe("delayed"), compiled="around"), "fbs afbs",
        check=same_decisions,
    ),
    "ddp cuts": Case(
        Way("ddp", recipe("delayed")), Way("replica", recipe("delayed"), compiled="around"), "fbs fbs",
        "over buckets", check=cut,
    ),
    "ddp, windows": Case(
        Way("ddp", WINDOWS), Way("replica", WINDOWS, compiled="around"), "fbs fbs afbs fbs e fbs",
        "over buckets", check=cut,
    ),
    "ddp, blocks": Case(
        Way("ddp", recipe("rowwise"), "wrapped"), Way("replica", recipe("rowwise"), "wrapped"),
        "fbs afbs e cbs obs", check=same_decisions,
    ),
    # of the graphs that DDP has cut, each keeps its own copies
    "ddp, cached weights": Case(
        Way("ddp", recipe("tensorwise", cache_weights=True)), Way("ddp", recipe("tensorwise")), "afbs afbs",
        "over buckets",
    ),
}  # fmt: skip
# -- fp8_all_gather, and none --

MLPS = {f"blocks.{i}.{linear}.weight" for i in range(2) for linear in ("up", "down")}
ELEMENTS = {"mlps": 4 * 128 * 256, "square": 4 * 256 * 256}  # of the weights of blocks


def spares(
    *gathers: int, elements: int = ELEMENTS["mlps"] // 2, width: int = 1, blocks: int = 0, kept: bool = True
) -> Any:
    """In each word of the protocol, so many gathers are in FP8: each saves `width` bytes for each of a rank's
    elements, but for the scales of blocks. One all-reduce serves all weights before a forward with gradients.
    `kept`: else FSDP2 frees the weights that it has gathered in FP8, although backward reads them."""

    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        pairs = list(zip(ours["words"], theirs["words"], strict=True))
        spared = [b["sent"] - a["sent"] for a, b in pairs]
        assert all(
            n in (..., x / (elements * width - 4 * blocks)) for n, x in zip(gathers, spared, strict=True)
        ), spared
        assert {a["reduced"] - b["reduced"] for a, b in pairs} <= {0, 1}
        assert kept or not any(word["alive"] for word in ours["words"][1:])
        assert sent_in_fp8(ours) == (MLPS if gathers[-1] else set())
        assert ours["saved"] == theirs["saved"]
        assert ours["graphs"] == theirs["graphs"]

    return check


def reported(ours: Facts, theirs: Facts, rank: int) -> None:
    spares(0, 2, 2, 0, 1, 0, 2, 0, *[...] * 6, 2)(ours, theirs, rank)
    said = ours["words"][-1]["said"]
    assert len(said) == 12
    assert all(dtype == "bfloat16" and why or name in MLPS for name, (dtype, why) in said.items())
    assert said["norm.bias"][1] == "not a matrix"
    assert said["out.weight"][1] == "no compiled training graph has multiplied it yet"
    assert "all-gather: 4 of 5 matrices in FP8" in ours["text"]
    assert "blocks.0-1.up.weight (x2)" in ours["text"]


def said_in(steps: tuple[int, ...], first: str = "") -> Any:
    """Weights are gathered in FP8 in these words alone, and why not in the others."""

    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        spares(*(2 * (step in steps) for step in range(len(ours["words"]))))(ours, theirs, rank)
        for step, word in enumerate(ours["words"]):
            dtype, reason = word["said"]["blocks.0.up.weight"]
            assert (dtype, reason) == ("e4m3", "") if step in steps else dtype == "bfloat16" and reason, step
        assert ours["words"][0]["said"]["blocks.0.up.weight"][1] == first or not first

    return check


def overlapping(ours: Facts, theirs: Facts, rank: int) -> None:
    """What is gathered does not change while a backward is due: its graph has saved the weight as its forward
    got it."""
    spares(*[0] * 6, 2, 2, 2)(ours, theirs, rank)
    said = [word["said"]["blocks.0.up.weight"] for word in ours["words"]]
    assert "no backward has run" in said[4][1] and said[8] == ("e4m3", "")


def partly(why: str, dtype: str = "bfloat16") -> Any:
    """The first weight of each block has whole blocks on all ranks; the second one, not."""

    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        said = ours["words"][-1]["said"]
        assert said["blocks.0.up.weight"] == ("e4m3", "")
        assert said["blocks.1.down.weight"] == ((dtype, why) if why else ("e4m3", ""))

    return check


def tensor_parallel(ours: Facts, theirs: Facts, rank: int) -> None:
    assert [word["sent"] for word in ours["words"]] == [word["sent"] for word in theirs["words"]]
    why = "a tensor-parallel parameter"
    assert all(ours["words"][-1]["said"][name] == ("bfloat16", why) for name in MLPS)
    assert "all-gather: 0 of 5 matrices in FP8" in ours["text"] and why in ours["text"]


def gathered(
    protocol: str, check: Any, model: str = "mlps", ranks: int = 2, other: str = "", **way: Any
) -> Case:
    ours = Way(**{"options": recipe("tensorwise"), "dtype": BF16, "gather": True, **way})
    return Case(ours, replace(ours, gather=False), protocol, model, ranks, check=check, other=other)


def scheduled(given: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"policy": {"schedule": given}, "strict": True, **more}


FOREACH, FUSED = {"foreach": True}, {"fused": True}
ALL_GATHERS = {
    # evaluations, writes by hand, loaded weights, also after a forward without a backward; other shards
    "gathered": gathered("fbs fbsw fbs l fxl e fbs A efeb fbs M efeb Gfb Gefb fbs", reported, adam=FOREACH),
    "gathered, kept": gathered(
        "fbs fbs fx efeb fbs", partly(""), options=CURRENT_WEIGHTS, dtype=torch.float32, reshard=False,
        adam=FUSED,
    ),
    "gathered, accumulated": gathered("afbs afbs", spares(0, 4), options=CURRENT_WEIGHTS, adam=FOREACH),
    "gathered, checkpoint": gathered(
        "fbs fbs fbs", spares(0, 2, 2, kept=False), checkpoint="outside", adam=FUSED,
        options=recipe("tensorwise", power_of_2_scale=True, margin=(0, 1, 0)),
    ),
    "gathered in blocks": gathered(
        "fbs fbs e l fbs", spares(0, 2, 0, 0, 2, elements=ELEMENTS["square"] // 2, blocks=8, kept=False),
        "square", options=recipe("blockwise"), adam=FOREACH,
    ),
    "gathered in blocks, checkpoint": gathered(
        "fbs fbs fbs", spares(0, 2, 2, elements=ELEMENTS["square"] // 2, width=3, blocks=8), "square",
        dtype=torch.float32, checkpoint="around",
        options=recipe("blockwise", power_of_2_scale=False, margin=(0, 1, 0)),
    ),
    "gathered in tiles": gathered(
        "afbs afbs", spares(0, 2, elements=ELEMENTS["square"] // 2, blocks=4 * 64 // 2), "square",
        reshard=False, options=recipe("mxfp8", weight_tiles=True),
    ),
    "gathered by the whole": gathered(
        "afbs afbs", spares(0, 2, elements=ELEMENTS["square"] // 2), "square", reshard=False,
        options=recipe("rowwise", weight_tiles=True),
    ),
    "all rows on one": gathered("fbs fbs fbs", partly(""), "odd", 1, options=recipe("blockwise")),
    # 128 rows are 43, 43 and 42: the last one is padded
    "gathered by three": gathered("fbs fbs fbs", partly(""), ranks=3),
    "no whole blocks on two": gathered(
        "fbs fbs fbs", partly("blockwise: shards of 64 rows are no multiple of 128"),
        options=recipe("blockwise"),
    ),
    "no whole blocks on three": gathered(
        "fbs fbs fbs", partly("blockwise: shards are of different sizes, or by columns"), "wide", 3,
        options=recipe("blockwise"),
    ),
    "tensor parallel": gathered("fbs fbs fbs", tensor_parallel, ranks=4, kind="fsdp x tp", mesh=(2, 2)),
    "faults over 2 x 2": gathered(
        "fbs fbsB fbs jbs fbs k fbs fbs", partly(""), ranks=4, mesh=(2, 2), options=CURRENT_WEIGHTS,
        dtype=torch.float32,
    ),
    "schedule": gathered(
        "fbs fbs fbs fbs fbs fbs fbs fbs fbs fbs", said_in((6, 7, 8), "schedule"),
        options=scheduled({"warmup_steps": 5, "cooldown_at": 9}, **CURRENT_WEIGHTS),
    ),
    # where weights have arrived in FP8, a phase of high precision that is set by hand begins a step later
    "phases by hand": gathered(
        "fbs fbs fbs fbs Hfbs fbs Sfbs fbs", said_in((1, 2, 3, 4, 7)),
        options=scheduled({}) | recipe("tensorwise"), other="fbs fbs fbs fbs fbs Hfbs Sfbs fbs",
    ),
    # a rule with a window keeps half of the weights in high precision
    "windows": gathered(
        "fbs fbs fbs fbs fbs fbs fbs fbs fbs fbs", spares(0, 2, 2, 2, 1, 1, 1, 1, 1, 2),
        options={"policy": {"rules": [dict(name="late", module="*.down", during="4..8", fp8="off")]},
                 "strict": True, **recipe("tensorwise")},
    ),
    "overlapping": gathered("Nf fbz fbz fbz fbz bz fbz fbz fbz", overlapping),
}  # fmt: skip

# -- all-gathers inside of graphs, and without the pass --


def in_graph(check: Any, protocol: str = "fbs fbs jbs fbs", **way: Any) -> Case:
    ours = Way("sequence", **way)
    return Case(ours, replace(ours, skip="all_gathers"), protocol, "gated block", check=check)


def sequence(ours: Facts, theirs: Facts, rank: int) -> None:
    """The column-parallel linears' input in forward, and the row-parallel one's gradient in backward."""
    part, size = 2 * 12 * 128, ours["collectives"][0][2] // (2 * 12 * 128)
    assert {n for _, n in theirs["wire"]} == {part * size} and {n for _, n in ours["wire"]} == {part}
    assert len(ours["wire"]) == len(theirs["wire"]) >= 2 * 4
    names = ["mlp.gate (input)", "mlp.down (gradient)"]
    assert ours["collectives"] == [(name, part, part * size, "") for name in names]
    assert theirs["collectives"] == []


def weights_in_graph(ours: Facts, theirs: Facts, rank: int) -> None:
    """Weights that the model gathers are weights: three of each block in FP8, its norm not."""
    assert ours["fp8"] == sorted(
        (f"mlp.{x}", gemm) for x in ("gate", "up", "down") for gemm in ("fprop", "dgrad", "wgrad")
    )
    assert [r[0] for r in ours["collectives"]] == [f"mlp.{x} (weight)" for x in ("gate", "up", "down")]
    assert not any(reason for *_, reason in ours["collectives"])
    assert len(ours["wire"]) == len(theirs["wire"]) == 4 * 3
    assert sum(dtype == torch.uint8 for dtype, _ in ours["wire"]) == 3 * 3


def simple(ranks: int, **way: Any) -> Case:
    ours = Way("simple fsdp", **way)
    return Case(
        ours, replace(ours, skip="all_gathers"), "fbs fbs fbs", "gated block", ranks, check=weights_in_graph
    )


IN_GRAPHS = {
    "sequence": in_graph(sequence, "fbs cbs jbs fbs", options=recipe("delayed", reduce_amax=True)),
    "sequence, group": in_graph(sequence, options=recipe("tensorwise", amax_group="tp"), dtype=BF16),
    "simple fsdp by three": simple(3, options=recipe("delayed")),
    "simple fsdp by columns": simple(3, options=recipe("tensorwise"), dtype=BF16, dim=1),
}

# -- what else may be on --


def frozen(reason: str) -> Any:
    def check(ours: Facts, theirs: Facts, rank: int) -> None:
        bases = {why for name, why in ours["frozen"].items() if name.endswith(("up.weight", "down.weight"))}
        assert not theirs["frozen"], theirs["frozen"]
        assert len(bases) == 1 and all(why.startswith(reason) for why in bases), ours["frozen"]
        assert bool(reason) is bool(bases.pop())

    return check


def with_frozen(way: Way, reason: str, model: str = "adapted") -> Case:
    options = {"policy": {"rules": [{"where": "n >= 128 and k >= 128", "fp8": "on"}]}, **recipe("tensorwise")}
    ours = replace(way, options={**options, "frozen": "fp8"})
    return Case(ours, replace(way, options=options), "fbs fbs fbs", model, check=frozen(reason))


def smaller(ours: Facts, theirs: Facts, rank: int) -> None:
    assert [row["role"] for row in ours["stats"]].count("reduced") >= 1
    assert not [row for row in theirs["stats"] if row["role"] == "reduced"]


def compressed(way: Way) -> Case:
    """Gradients of 28 dB, and what a few steps make of them. A wrong mean is at 6 dB."""
    return Case(replace(way, compress=True), way, "fbs fbs afbs", "over buckets", promise=14.0, check=smaller)


OTHERS = {
    "frozen, ddp": with_frozen(Way("ddp"), ""),
    "frozen, ddp cuts": with_frozen(Way("ddp"), "DDP has cut the graph", "adapted over buckets"),
    "frozen, fsdp": with_frozen(Way(), "sharded by FSDP"),
    "frozen, fsdp1": with_frozen(Way("fsdp1"), "sharded by FSDP"),
    "frozen, tp": with_frozen(Way("tp"), "of another type: DTensor"),
    "compressed, ddp": compressed(Way("ddp", recipe("delayed"))),
    "compressed, fsdp": compressed(Way(options=recipe("delayed"))),
}
CASES = {**REPLICAS, **ALL_GATHERS, **IN_GRAPHS, **OTHERS}


def compared(ours: OnRanks, theirs: OnRanks, promise: float) -> list[str]:
    """What is not the same, or nearly."""
    if ours.seen.keys() != theirs.seen.keys():
        return [f"on one side only: {sorted(ours.seen.keys() ^ theirs.seen.keys())[:4]}"]
    found = {name: sqnr(x, ours.seen[name]) for name, x in theirs.seen.items()}
    wrong = {name: ratio for name, ratio in found.items() if not ratio >= promise}
    return [f"{name}: {ratio:.1f} dB" for name, ratio in wrong.items()][:4]


def _case(rank: int, name: str) -> Facts:
    case, found, runs = CASES[name], [], []
    for way in (case.ours, case.theirs):
        with hooks.sent("all_gather_into_tensor") as sent:
            runs.append(train(case.model, way, case.other if runs and case.other else case.protocol))
        found.append(facts(runs[-1], sent))
    return {"wrong": compared(*runs, case.promise), "ours": found[0], "theirs": found[1]}


@pytest.mark.cases(test=1, slow=5)
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    case = CASES[name]
    for rank, found in enumerate(on_ranks(case.ranks, _case, name)):
        assert not found["wrong"], (rank, found["wrong"])
        case.check(found["ours"], found["theirs"], rank)


COMPILED = ("ddp", "gathered, checkpoint", "gathered in blocks, checkpoint", "sequence")


@pytest.mark.weekly
@pytest.mark.parametrize("name", COMPILED)
def test_training_is_the_same_through_inductor(name: str) -> None:
    case = CASES[name]
    for rank, found in enumerate(on_ranks(case.ranks, _case, name, inductor=True)):
        assert not found["wrong"], (rank, found["wrong"])
