"""fp8compile.optim.AdamW beside torch.optim.AdamW, whose place it takes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from fp8compile.optim import AdamW
from fp8compile.optim.update import compiled as compiled_update

MASTERS = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "bf16+remainder"),
    (torch.bfloat16, "float32"),
]


def parameters(dtype=torch.float32, shapes=((64, 96), (100, 77), (33,)), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def gradients(of, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in of:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(of, optimizer, steps):
    for step in steps:
        gradients(of, step)
        optimizer.step()


def same(one, other):
    assert one.keys() == other.keys()
    for index in one:
        assert one[index].keys() == other[index].keys()
        for key, value in one[index].items():
            assert value.dtype == other[index][key].dtype
            assert torch.equal(value, other[index][key]), (index, key)


@pytest.mark.parametrize("decades", [0, 4])
def test_the_update_is_right_for_any_spread_of_gradients(decades):
    """Magnitudes spread over so many decades inside a block. The norm of an update's error, by that of
    float32 Adam's update, over the last 20 of 200 steps."""
    generator = torch.Generator().manual_seed(3)
    size = 10 ** (-decades * torch.rand(1, 64, 128, generator=generator))
    steps = torch.randn(200, 64, 128, generator=generator) * size
    mine, theirs = (torch.zeros(64, 128).requires_grad_() for _ in range(2))
    optimizer = AdamW([mine], lr=1.0, weight_decay=0, compiled=False)
    reference = torch.optim.Adam([theirs], lr=1.0)
    wrong = right = 0.0
    for index, gradient in enumerate(steps):
        with torch.no_grad():
            mine.zero_()
            theirs.zero_()
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
        if index >= 180:
            wrong += (mine - theirs).double().square().sum().item()
            right += theirs.double().square().sum().item()
    assert (wrong / right) ** 0.5 <= 0.06


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"weight_decay": 0.3}, {"betas": (0.8, 0.95), "eps": 1e-4}]
)
def test_parameters_are_updated_as_by_torch(options):
    """Those too small for packed moments exactly, and large ones nearly: also one that is not contiguous."""
    shapes = ((40, 90), (7,), (4095,), (4096,), (4097,), (3, 40, 50), (64, 96))
    mine, theirs, start = (parameters(shapes=shapes) for _ in range(3))
    mine[-1] = mine[-1].detach().t().contiguous().t().requires_grad_()
    train(mine, AdamW(mine, lr=0.01, compiled=False, **options), range(10))
    train(theirs, torch.optim.AdamW(theirs, lr=0.01, **options), range(10))
    for one, other, before in zip(mine, theirs, start, strict=True):
        if one.numel() < 4096:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert (one - other).norm() <= 0.05 * (other - before).norm()


@pytest.mark.parametrize("master", ["bf16+remainder", "float32"])
def test_a_master_is_the_float32_weight_to_the_bit(master):
    """Also across decades of steps: bf16 weights with a master take the way of float32 weights."""
    halves = parameters(torch.bfloat16)
    whole = [p.detach().float().requires_grad_() for p in halves]
    ours, plain = AdamW(halves, lr=1e-3, master=master, compiled=False), AdamW(whole, lr=1e-3, compiled=False)
    for step in range(20):
        gradients(halves, step)
        for p, q in zip(halves, whole, strict=True):
            q.grad = p.grad.float()
        ours.step()
        plain.step()
    saved = ours.state_dict()["state"]
    for index, (p, q) in enumerate(zip(halves, whole, strict=True)):
        assert torch.equal(saved[index]["master_param"], q.detach())
        # nearest; a half may go either way
        assert ((p.float() - q).abs() <= (q.bfloat16().float() - q).abs()).all()


@pytest.mark.parametrize("master", ["bf16+remainder", "float32"])
def test_a_weight_that_somebody_changes_is_what_he_made_it(master):
    weights = parameters(torch.bfloat16)
    optimizer = AdamW(weights, lr=0.0, master=master, compiled=False)
    train(weights, optimizer, range(2))
    with torch.no_grad():
        torch._foreach_zero_(weights)
    train(weights, optimizer, range(2))
    assert not any(p.any() for p in weights)


@pytest.mark.cases(slow=2)
@pytest.mark.compiled
@pytest.mark.compat
@pytest.mark.parametrize(("dtype", "master"), MASTERS)
def test_the_compiled_update_is_the_plain_one(dtype, master):
    found = []
    for compiled in (False, True):
        weights = parameters(dtype)
        optimizer = AdamW(weights, lr=0.01, master=master, compiled=compiled)
        train(weights, optimizer, range(6))
        found.append((weights, optimizer.state_dict()["state"]))
    (plain, states), (fast, theirs) = found
    for one, other in zip(plain, fast, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-2 if master is None and dtype != torch.float32 else 1e-5, atol=1e-5
        )
    for index, state in states.items():
        # a contracted multiply-add may move a moment over a border of rounding
        for key, value in state.items():
            differs = (value - theirs[index][key]).abs() > 1e-6 * value.abs().max()
            assert differs.float().mean() <= 1e-3, (index, key)


def test_no_value_compiles_again(monkeypatch):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    compiled_update.cache_clear()
    weights = parameters(shapes=((64, 96), (100, 77), (64, 128), (4096,)))
    optimizer = AdamW(weights, lr=0.01)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        train(weights, optimizer, [step])
    compiled_update.cache_clear()
    assert len(graphs) == 1


def test_the_bytes():
    for master, most in ((None, 3.1), ("bf16+remainder", 5.1), ("float32", 7.1)):
        weights = parameters(torch.bfloat16, ((512, 512), (100, 300)))
        optimizer = AdamW(weights, master=master, compiled=False)
        train(weights, optimizer, [0])
        size = sum(x.nbytes for p in weights for x in optimizer.state[p].values())
        assert size <= most * sum(p.numel() for p in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_go_to_torch_and_back(dtype):
    mine, theirs = parameters(dtype), parameters(dtype)
    ours, torchs = AdamW(mine, lr=0.01, compiled=False), torch.optim.AdamW(theirs, lr=0.01)
    train(mine, ours, range(3))
    train(theirs, torchs, range(3))
    saved, reference = ours.state_dict(), torchs.state_dict()
    assert saved["param_groups"] == reference["param_groups"]
    assert {k: {n: (v.shape, v.device) for n, v in s.items()} for k, s in saved["state"].items()} == {
        k: {n: (v.shape, v.device) for n, v in s.items()} for k, s in reference["state"].items()
    }
    assert all(v.dtype == torch.float32 for s in saved["state"].values() for v in s.values())
    torchs.load_state_dict(copy.deepcopy(saved))
    train(theirs, torchs, [3])
    ours.load_state_dict(torchs.state_dict())
    train(mine, ours, [4])
    assert all(state["step"] == 5 for state in ours.state_dict()["state"].values())


@pytest.mark.parametrize(("dtype", "master"), [*MASTERS, (torch.float16, "float32")])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(dtype, master, tmp_path):
    weights = parameters(dtype)
    optimizer = AdamW(weights, lr=0.01, master=master, compiled=False)
    train(weights, optimizer, range(4))
    torch.save((weights, optimizer.state_dict()), tmp_path / "saved.pt")
    train(weights, optimizer, range(4, 8))
    values, saved = torch.load(tmp_path / "saved.pt")
    resumed = [p.detach().clone().requires_grad_() for p in values]
    other = AdamW(resumed, lr=0.5, master=master, compiled=False)
    other.load_state_dict(saved)
    same(other.state_dict()["state"], saved["state"])
    train(resumed, other, range(4, 8))
    for one, two in zip(weights, resumed, strict=True):
        assert torch.equal(one, two)
    same(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_optimizers_are_copied_and_saved_whole_with_all_they_know(tmp_path):
    weights = parameters(torch.bfloat16)
    optimizer = AdamW(weights, lr=0.01, master="bf16+remainder", compiled=False)
    train(weights, optimizer, range(2))
    torch.save(optimizer, tmp_path / "optimizer.pt")
    for other in (copy.deepcopy(optimizer), torch.load(tmp_path / "optimizer.pt", weights_only=False)):
        assert other.master == "bf16+remainder"
        same(other.state_dict()["state"], optimizer.state_dict()["state"])
        other.step()


def test_groups_closures_schedules_and_missing_gradients():
    one, two, idle, empty = parameters(shapes=((64, 96), (64, 96), (64, 64), (0, 5000)))
    start = [p.detach().clone() for p in (one, two, idle)]
    groups = [{"params": [one, idle, empty]}, {"params": [two], "lr": 0.0, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=torch.tensor(0.1), compiled=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = one.square().mean() + two.square().mean() + empty.sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3) if schedule.step() is None]
    assert losses[2] < losses[0]
    assert not torch.equal(one, start[0])
    assert torch.equal(two, start[1]) and torch.equal(idle, start[2])
    saved = optimizer.state_dict()
    assert set(saved["state"]) == {0, 2, 3}
    optimizer.load_state_dict(saved)
    assert idle not in optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr must not be negative; got -1"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"amsgrad": True}, "no amsgrad"),
        ({"capturable": True}, "no capturable"),
        ({"differentiable": True}, "no differentiable"),
        ({"master": "fp16"}, "'bf16\\+remainder'"),
    ],
)
def test_options_that_it_does_not_take(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([torch.zeros(3, requires_grad=True)], **options)


def test_dtypes_that_it_does_not_take():
    optimizer = AdamW(parameters())
    for dtype in (torch.float64, torch.complex64, torch.int64):
        with pytest.raises(ValueError, match="parameter 1 of its group is"):
            optimizer.add_param_group({"params": [torch.zeros(3), torch.zeros(3, dtype=dtype)]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused_before_anything_is_updated():
    weights = parameters()
    start = [p.detach().clone() for p in weights]
    gradients(weights, 0)
    weights[-1].grad = weights[-1].grad.to_sparse()
    optimizer = AdamW(weights, compiled=False)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(weights, start, strict=True)) and not optimizer.state


def _of(make=lambda weights: AdamW(weights, compiled=False), **given):
    """The state of an optimizer after a step."""
    weights = parameters(**given)
    optimizer = make(weights)
    train(weights, optimizer, [0])
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda: _of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), "no betas"),
        (lambda: _of(lambda p: torch.optim.AdamW(p, amsgrad=True)), "no amsgrad"),
        (lambda: _of(lambda p: torch.optim.Adamax(p)), "no exp_avg_sq"),
        (
            lambda: _of(shapes=((64, 96), (77, 100), (33,))),
            r"parameter 1 of its group: exp_avg is \[77, 100\] in the checkpoint, "
            r"the parameter is \[100, 77\]",
        ),
        (lambda: _of(shapes=((64, 96), (100, 77))), r"other parameter groups: \[2\] and \[3\]"),
    ],
)
def test_a_wrong_checkpoint_changes_nothing(saved, message):
    weights = parameters()
    optimizer = AdamW(weights, lr=0.25, compiled=False)
    train(weights, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved())
    after = optimizer.state_dict()
    same(after["state"], before["state"])
    assert after["param_groups"] == before["param_groups"]


def test_hooks_of_others_see_torchs_keys():
    weights = parameters()
    optimizer = AdamW(weights, compiled=False)
    train(weights, optimizer, [0])
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [{"step", "exp_avg", "exp_avg_sq"}, 3]
