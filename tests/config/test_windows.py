"""Rules in time: windows, sets of active rules, the timeline, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import pytest

from fp8compile.config.options import parse
from fp8compile.config.policy import Policy, PolicyError, Rule, Schedule, load, unmatched
from fp8compile.config.recipe import Recipe
from tests.support.policies import fp8, refusal, site

ALONE = {"extends": "none"}


def of(*rules: dict, **tables) -> Policy:
    return load({**ALONE, "rules": list(rules), **tables})


def names(policy: Policy) -> list[tuple[int, str]]:
    """The timeline, with the modules of its rules in place of their positions."""
    return [
        (step, "".join(policy.timed[i].module[0] if policy.timed[i].module else "*" for i in active))
        for step, active in policy.timeline
    ]


# -- windows --


@pytest.mark.parametrize(
    "during, expected",
    [
        ("1000..", [(0, ""), (1000, "a")]),
        ("..200", [(0, "a"), (200, "")]),
        ("1000..5000", [(0, ""), (1000, "a"), (5000, "")]),
        ("90%..", [(0, ""), (9009, "a")]),
        ("..2%", [(0, "a"), (200, "")]),  # of 10,010 steps, rounded down
        ("10%..12.5%", [(0, ""), (1001, "a"), (1251, "")]),
        ("100..2%", [(0, ""), (100, "a"), (200, "")]),
        (["..5", "90%.."], [(0, "a"), (5, ""), (9009, "a")]),
        (["5..9", "1..3", "3..5"], [(0, ""), (1, "a"), (9, "")]),  # neighbours are one
        ("0..", [(0, "a")]),
        ("by hand", [(0, "")]),
    ],
)
def test_windows(during, expected):
    rule = {"module": "a", "fp8": "off", "name": "mine", "during": during}
    policy = of(rule, schedule={"total_steps": 10_010})
    assert policy.varies and names(policy) == expected
    for step, letters in expected:
        assert bool(policy.active(step)) == bool(letters)
        assert fp8(policy.during(policy.active(step)), "a") == ("off" if letters else "auto")
    written = [during] if isinstance(during, str) else during
    assert policy.window_text(0) == ", ".join(written) and policy.rules[0].during == tuple(written)


def test_outside_of_its_windows_the_rules_after_it_decide():
    policy = of({"module": "a", "during": "10..20", "fp8": "off"}, {"module": "a", "recipe": "rowwise"})
    assert policy.sets == ((1,), (0, 1))
    before, within = map(policy.during, policy.sets)
    assert before.choose(site("a")).recipe == Recipe("rowwise") and fp8(within, "a") == "off"
    assert before.choose(site("a")).label == "rule 2"  # as in the file
    assert within.choose(site("a")).label == "rule 1"


def test_a_rule_without_conditions_hides_those_after_it():
    policy = of({"during": "5..", "fp8": "off"}, {"module": "a", "during": "..9"}, {"module": "b"})
    assert policy.timeline == ((0, (1, 2)), (5, (0,)))  # 9 changes nothing
    assert policy.active(100) == (0,)


def test_a_policy_that_does_not_vary():
    policy = load({"rules": [{"module": "a"}, {"fp8": "on"}]})
    everything = tuple(range(len(policy.rules)))
    assert not policy.varies and policy.sets == (everything,) and policy.timeline == ((0, everything),)
    assert policy.active(7) == policy.active(7, {"output head": False}) == everything
    assert policy.during(everything) == policy and policy.during(everything).key == policy.key


# -- the schedule --


def test_the_schedule_is_a_first_rule():
    policy = load({"rules": [{"module": "a"}], "schedule": {"warmup_steps": 3, "cooldown_at": 8}})
    schedule, others = policy.timed[0], tuple(range(1, len(policy.timed)))
    assert schedule == Rule(name="schedule", fp8="off", during=["..3", "8.."])
    assert policy.timed[1:] == policy.rules and policy.window_text(0) == "..3, 8.."
    assert policy.timeline == ((0, (0,)), (3, others), (8, (0,))) and policy.sets == ((0,), others)
    for step, on in itertools.product((0, 3, 8), (True, False)):
        assert policy.active(step, {"schedule": on}) == ((0,) if on else others)


def test_a_schedule_by_hand_and_one_that_only_counts():
    by_hand = of({"module": "a"}, schedule={})
    assert by_hand.timed[0].during == ("by hand",) and by_hand.sets == ((1,), (0,))
    counts = of({"module": "a"}, schedule={"total_steps": 10})
    assert not counts.varies and counts.timed == counts.rules and counts.sets == ((0,),)


def test_in_a_phase_of_the_schedule_nothing_is_kept_in_fp8():
    policy = of(schedule={"warmup_steps": 3}, save="fp8")
    assert [policy.during(each).save for each in policy.sets] == ["auto", "fp8"]


# -- by hand --


def test_switched_by_hand():
    rules = [{"name": name, "module": name, "during": "by hand"} for name in "ab"]
    policy = of(*rules, {"module": "c", "during": "..5", "name": "timed"}, {"module": "a", "name": "always"})
    assert policy.timeline == ((0, (2, 3)), (5, (3,)))
    assert policy.sets[:2] == ((2, 3), (3,)) and len(policy.sets) == 8
    assert policy.active(0, {"a": True}) == (0, 2, 3) and policy.active(9, {"b": True, "a": False}) == (1, 3)
    # a window, too; a rule that is always active has nothing to switch, and other policies have other names
    assert policy.active(9, {"timed": True, "always": False, "other": True}) == (2, 3)
    hidden = of({"name": "x", "during": "by hand"}, *rules, schedule={"warmup_steps": 2})
    assert set(hidden.sets) == {(0,), (1,), (), (2,), (3,), (2, 3)}


def test_a_switch_of_the_schedule_uncovers_windows():
    policy = of({"module": "a", "during": "2.."}, schedule={"warmup_steps": 4})
    assert policy.timeline == ((0, (0,)), (4, (1,)))  # without the one that only a switch shows
    assert policy.sets == ((0,), (1,), ())
    assert policy.active(0, {"schedule": False}) == () and policy.active(3, {"schedule": False}) == (1,)


def test_sixteen_sets_at_most():
    rules = [{"name": f"r{i}", "module": f"m{i}", "during": "by hand"} for i in range(4)]
    assert len(of(*rules).sets) == 16
    several = [{"module": "x", "during": ["..9"]}]
    says = refusal({**ALONE, "rules": rules + several})
    assert "each graph would be compiled for 32 sets of rules, and 16 are allowed: drop rules" in says
    assert "drop rules that are switched by hand ('r0', 'r1', 'r2', 'r3'), or windows." in says
    rules = [{"name": f"r{i}", "module": f"m{i}", "during": "by hand"} for i in range(60)]
    assert "for more than 256 sets" in refusal({**ALONE, "rules": rules})
    assert "'r4', and 55 more)" in refusal({**ALONE, "rules": rules})
    windows = [{"module": f"m{i}", "during": f"{i}.."} for i in range(1, 20)]
    assert "for 20 sets of rules, and 16 are allowed: drop windows" in refusal({**ALONE, "rules": windows})


# -- the policy of a set --


def test_the_policy_of_a_set_is_one_that_was_written_so():
    tables = {
        "recipes": {"mine": {"margin": 2}},
        "defaults": {"recipe": "delayed", "current_scaling": [True, False, False]},
        "save": "fp8",
    }
    late = {"module": "a", "recipe": "mine"}
    last = {"module": "b", "current_scaling": [False, True, False]}
    mine = [{**late, "during": "50%..", "name": "late"}, last]
    policy = load({"extends": "conservative", "rules": mine, "schedule": {"total_steps": 10}, **tables})
    early, full = map(policy.during, policy.sets)
    for made, rules in ((early, [last]), (full, [{**late, "name": "late"}, last])):
        written = load({"extends": "conservative", "rules": rules, **tables})
        assert made == written and hash(made) == hash(written) and made.key == written.key
        assert made.own == written.own == len(rules) and made.schedule is None and not made.varies
        sites = [site(name) for name in "abc"]
        assert [made.choose(x).recipe for x in sites] == [written.choose(x).recipe for x in sites]
        assert {made.choose(x).recipe for x in sites} <= set(policy.possible)
    assert early.labels[0] == "rule 2" and full.labels == policy.labels
    assert policy.during(policy.sets[0]) is early
    assert policy.key != full.key and "50%" in policy.key and "%" not in full.key


def test_of_the_schedules_rule_too():
    policy = load({"schedule": {"warmup_steps": 3}})
    written = Policy((Rule(name="schedule", fp8="off"),))
    made = policy.during((0,))
    assert made == written and made.key == written.key and made.labels == ("schedule",)
    assert made.choose(site()).label == "schedule" and not made.owns(0)


def test_copies_know_the_same():
    policy = of({"module": "a", "during": "5.."}, schedule={"warmup_steps": 2})
    assert [policy.during(each).rules for each in policy.sets]
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), dataclasses.replace(policy)):
        assert other == policy and other.sets == policy.sets and other.timeline == policy.timeline
    assert of({"module": "a", "during": ["5.."]}, schedule={"warmup_steps": 2}) == policy
    assert of({"module": "a", "during": "6.."}, schedule={"warmup_steps": 2}) != policy


def test_recipes_behind_a_window_are_possible():
    policy = of({"during": "..5", "recipe": "rowwise"}, {"module": "a", "recipe": "blockwise"}, {"fp8": "on"})
    assert set(policy.possible) == {Recipe("rowwise"), Recipe("blockwise"), Recipe()}
    fixed = of({"module": "a", "recipe": "blockwise"}, {"recipe": "rowwise"})
    assert set(fixed.possible) == {Recipe("blockwise"), Recipe("rowwise")}


def test_rules_that_decide_in_some_set_give_no_message():
    sites = [site("model.layers.0.mlp")]
    known = {"model.layers.0.mlp": "MLP"}
    rules = [{"module": "*.mlp", "during": "5.."}, {"module": "*.mlp"}, {"kind": "output head"}]
    for schedule in ({}, {"warmup_steps": 2}):
        policy = of(*rules, schedule=schedule)
        (message,) = unmatched(policy, sites, known, [], whole=True)
        assert "rule 3 of policy" in message
    policy = of({"module": "*.mlp"}, {"module": "model.*", "during": "5.."}, schedule={"warmup_steps": 9})
    (message,) = unmatched(policy, sites, known, [], whole=True)
    assert "rule 2 of policy" in message and "only what rule 1 decides about before it" in message


# -- extending --


def test_shares_are_of_the_steps_of_the_policy_that_extends(write):
    write('[[rules]]\nname = "late"\nmodule = "a"\nduring = "90%.."\nfp8 = "off"\n', "base.toml")
    schedule = "[schedule]\ntotal_steps = 50\n"
    path = write(f'extends = "base.toml"\n{schedule}[[rules]]\nmodule = "b"\nduring = "..10%"\n')
    policy = load(path)
    late = 1 + policy.labels.index("late")
    assert [step for step, active in policy.timeline if late - 1 in active] == [45]
    assert [step for step, _ in policy.timeline] == [0, 5, 45]
    # a callback of a trainer may say it later; only who trains has to know
    unknown = load(write('extends = "base.toml"\n', "unknown.toml"))
    assert dataclasses.replace(unknown, schedule=Schedule(total_steps=10)).timeline[1][0] == 9
    with pytest.raises(PolicyError, match="late: 'during': '90%..' is a share of all steps"):
        _ = unknown.timeline


def test_the_users_own_rules_may_hide_extended_ones(write):
    write('[[rules]]\nname = "late"\nmodule = "a"\nduring = "5.."\n', "base.toml")
    same = load(write('extends = "base.toml"\n[[rules]]\nmodule = "a"\nduring = "3.."\n'))
    assert same.sets == ((2, 3, 4, 5), (0, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5))
    assert load(write('extends = "base.toml"\n[[rules]]\nfp8 = "on"\n')).sets == ((0,),)
    path = write('eval = "fp8"\nextends = "base.toml"\n[schedule]\ntotal_steps = 5\n')
    says = f"policy {path}, line 2: late: 'during': '5..' never begins: total_steps is 5."
    assert refusal(path) == says
    path = write('extends = "base.toml"\n[[rules]]\nmodule = "x"\nname = "late"\n')
    assert "late: 'name': rule 1 is called 'late', too" in refusal(path)


# -- errors --

FILE = """\
[schedule]
total_steps = 1000

[[rules]]
name = "first"
module = "a"
during = "100..300"

[[rules]]
module = "b"
during = ["..20", "90%.."]
"""


FIRST, SECOND, TOTAL_STEPS = '"100..300"', '["..20", "90%.."]', "total_steps = 1000"
MODULE = 'module = "b"'


@pytest.mark.parametrize(
    "was, becomes, says",
    [
        (FIRST, '"5..5"', "line 7, rule 1 ('first'): 'during': '5..5' is empty: from step 5 to 5, of 1000."),
        (FIRST, '"300..100"', "'during': '300..100' is reversed: from step 300 to 100"),
        (FIRST, '"..0"', "'..0' is empty"),
        (FIRST, '"10%..100"', "'10%..100' is empty: from step 100 to 100, of 1000"),
        (FIRST, '"50%..100"', "'50%..100' is reversed: from step 500 to 100"),
        (FIRST, '"100..110%"', "line 7, rule 1 ('first'): 'during' must be a window of at most 100%"),
        (FIRST, '"1000.."', "line 7, rule 1 ('first'): 'during': '1000..' never begins: total_steps is 1000"),
        (FIRST, '"100%.."', "'100%..' never begins"),
        (FIRST, '"100"', "'during' must be a window, such as '1000..',"),
        (FIRST, '"100"', "got '100' (str). Did you mean '100..'?"),
        (FIRST, "100", "got 100 (int). Did you mean '100..'?"),
        (FIRST, '"100-300"', "Did you mean '100..300'?"),
        (FIRST, '"100...300"', "Did you mean '100..300'?"),
        (FIRST, '"1_000:2_000"', "Did you mean '1000..2000'?"),
        (FIRST, '"until 5%"', "Did you mean '..5%'?"),
        (FIRST, '"< 300"', "Did you mean '..300'?"),
        (FIRST, '".."', "'during' must be a window"),
        (FIRST, '"100 .. 300"', "Did you mean '100..300'?"),
        (FIRST, '"by_hand"', "Did you mean 'by hand'?"),
        (FIRST, "true", "got True (bool)."),
        (FIRST, "[]", "got [] (list)."),
        (FIRST, '["by hand", "3.."]', "line 7, rule 1 ('first'): 'during' must be 'by hand' alone"),
        (SECOND, '"by hand"', "line 11, rule 2: 'during': a rule that is switched by hand needs a name"),
        (SECOND, '["9..20", "1%.."]', "line 11, rule 2: 'during': '9..20' and '1%..' overlap: write one"),
        (
            MODULE,
            'module = "a"\nname = "second"\nfp8 = "off"\n[[rules]]\nmodule = "a"',
            "line 13, rule 3: this rule is never reached: second, before it, has the same conditions",
        ),
        (
            f"{MODULE}\nduring = {SECOND}",
            'module = "a"\nduring = "20%.."',
            "line 11, rule 2: 'during': '20%..' overlaps '100..300' of rule 1, which has the same conditions",
        ),
        (
            MODULE,
            f'{MODULE}\nname = "first"',
            "line 11, rule 2 ('first'): 'name': rule 1 is called 'first', too",
        ),
        (
            TOTAL_STEPS,
            f"{TOTAL_STEPS}\nwarmup_steps = 300",
            "line 8, rule 1 ('first'): 'during': '100..300': this rule never decides, because a rule without",
        ),
        (TOTAL_STEPS, f"{TOTAL_STEPS}\ncooldown_at = 1000", "line 3, [schedule]: 'cooldown_at' must be less"),
        (TOTAL_STEPS, "total_steps = 0", "line 2, [schedule]: 'total_steps' must be an integer >= 1"),
        (
            TOTAL_STEPS,
            "max_steps = 9",
            "line 2, [schedule]: unknown key 'max_steps' (value 9 (int)). Did you",
        ),
        (TOTAL_STEPS, "during = 'x'", "'during' goes into [[rules]]."),
    ],
)
def test_errors_name_the_place(write, was, becomes, says):
    assert load(write(FILE)).varies and FILE.count(was) == 1
    path = write(FILE.replace(was, becomes))
    message = refusal(path)
    assert says in message and message.startswith(f"policy {path}") and len(message.splitlines()) == 1


def test_the_name_of_the_schedules_rule_is_taken():
    rule = {"module": "a", "name": "schedule"}
    says = "rule 1 ('schedule'): 'name': the rule of [schedule] is called 'schedule', too; give this one"
    assert says in refusal({**ALONE, "rules": [rule], "schedule": {}})
    assert of(rule).rules[0].name == "schedule"


def test_what_is_right_beside_what_is_wrong():
    disjoint = [{"module": "a", "during": "..5"}, {"module": "a", "during": "5.."}]
    assert names(of(*disjoint)) == [(0, "a"), (5, "a")]
    assert of({"module": "a", "during": "3.."}, {"module": "a"}).sets == ((1,), (0, 1))
    hand = {"module": "a", "during": "by hand", "name": "mine"}
    assert len(of({"module": "a", "during": "3.."}, hand, {"module": "a"}).sets) == 4
    several = [{"module": "a", "during": ["5..5", "9..8"]}, {"module": "b", "during": "4..4"}]
    assert refusal({"rules": several}).splitlines()[0].endswith("3 errors:")


def test_shares_without_a_number_of_steps_are_refused_before_training():
    tables = {"rules": [{"module": "b"}, {"name": "late", "module": "a", "during": "90%.."}]}
    says = r"^policy given as a dict, rule 2 \('late'\): 'during': '90%..' is a share of all steps: write"
    with pytest.raises(PolicyError, match=says) as caught:
        parse({"policy": tables, "exclude": ["x"]})
    assert caught.value.path == ("rules", 1, "during") and caught.value.key == "during"
    assert parse({"policy": {**tables, "schedule": {"total_steps": 50}}}).policy.varies
