"""Study files: what is refused, with which words; the command of a trial."""

import pytest
from played_trials import STUDY, X, write_study

from paceline.study.tune.study_file import changes, read_study_file
from paceline.study.tune.tune import load_spec

BASE = STUDY + X


def read(tmp_path, text):
    path = tmp_path / "study.toml"
    path.write_text(text)
    return load_spec(path)


def test_a_study_file_is_read(tmp_path):
    spec = read(tmp_path, BASE)
    assert spec.metrics == ("score",)
    assert spec.goals == ("max",)
    assert spec.command.words({"x": 0.5}, {"checkpoint": "there"}) == [
        *("train.py", "--x", "0.5", "--checkpoint", "there")
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{x}", "{z}", r"placeholder \{z\}, and there is no parameter.*HINT: .*\[parameters.z\]"),
        ("--x {x} ", "", r"parameters.x has no placeholder.*HINT: add \{x\}"),
        ("trials = 6", "trails = 6", "study.trails is not known. HINT: study.trials"),
        ("low = -3.0", "lo = -3.0", "parameters.x.lo is not known. HINT: parameters.x.low"),
        ("low = -3.0", "low = 9.0", "low = 9 and high = 3 are no range. HINT"),
        ("low = -3.0", "low = -3.0\nlog = true", "log needs a low above 0"),
        ('"max"', '"maximal"', "study.goal: 'maximal' is not known. HINT: 'min' or 'max'"),
        ('"max"', '["max", "most"]', r"study.goal\[1\]: .*'most'.* HINT: 'min' or 'max'"),
        (
            "trials = 6",
            'trials = 6\nvalue = "first"',
            "'first' .* HINT: 'last' or 'best'",
        ),
        ('goal = "max"', "", "has no goal"),
        ('"random"', '"rndom"', 'study.search = "rndom" is not known. HINT: random'),
        ("trials = 6", "trials = 0", "study.trials: Expected int >= 1; it is 0"),
        ("trials = 6", 'trials = 6\npruner = "promotion"', "needs the number of epochs"),
        ("trials = 6", 'trials = 6\npruner = "prommotion"', "HINT: promotion"),
        ("trials = 6", "trials = 6\nepochs = 9\ntotal_epochs = 3", "smaller than one trial"),
        ("trials = 6", "minutes = 1\ntrial_minutes = 2", "smaller than one trial"),
        ("train.py", "python train.py", "begins with python.*HINT: begin with the script: train"),
        ("high = 3.0", "high = 3.0\n[[known]]\ny = 1.0", "y is no parameter"),
        ("high = 3.0", "high = 3.0\n[[known]]\nx = 7.0", "x = 7.0 is outside of -3 to 3"),
        ("high = 3.0", "high = 3.0\n[patterns]\nscor = 'a'", "no metric of study.metric.*score"),
        ("high = 3.0", "high = 3.0\n[patterns]\nscore = '(a'", r"'\(a' is no regular expression"),
        ("trials = 6", "trials = 6\nrepeats = 3", r"has no \{seed\}"),
        ("[parameters.x]", "[search]\nsede = 1\n[parameters.x]", "search.sede is no option"),
        ("[parameters.x]", "[search]\nseed = 1\n[parameters.x]", "search.seed is study.seed"),
    ],
)
def test_mistakes_are_told_with_a_way_out(tmp_path, old, new, said):
    assert old in BASE
    with pytest.raises(ValueError, match=f"(?s){said}"):
        read(tmp_path, BASE.replace(old, new, 1))


def test_a_pattern_needs_the_step_if_trials_are_compared(tmp_path):
    text = BASE + r"[patterns]" + "\nscore = 'score: (.+)'\n"
    pruned = text.replace("trials = 6", 'trials = 6\npruner = "median"')
    assert read(tmp_path, text).patterns == {"score": "score: (.+)"}
    with pytest.raises(ValueError, match=r"HINT: '\(\?P<step>\\d\+\)'"):
        read(tmp_path, pruned)
    read(tmp_path, pruned.replace("score: ", r"epoch (?P<step>\d+): "))


def test_what_is_no_study_file(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.toml\. HINT: write a study file"):
        load_spec(tmp_path / "study.txt")
    with pytest.raises(ValueError, match=r"has no table \[study\]"):
        read(tmp_path, "[parameters.x]\nlow = 1\n")
    with pytest.raises(ValueError, match="is not TOML"):
        read(tmp_path, "study\n")


CONDITIONAL = """
[study]
command = "train.py --by {optimizer} [--momentum {momentum}] --lr {lr} '[a]'"
metric = "loss"
goal = "min"
[parameters.momentum]
low = 0.0
high = 0.9
when = { optimizer = "sgd" }
[parameters.optimizer]
choices = ["sgd", "adam"]
[parameters.lr]
low = 1e-4
high = 1.0
log = true
"""


def test_a_part_in_brackets_is_left_out_where_its_parameter_does_not_exist(tmp_path):
    spec = read(tmp_path, CONDITIONAL)
    assert [one.name for one in spec.parameters] == ["optimizer", "lr", "momentum"]
    some = {"optimizer": "sgd", "momentum": 0.5, "lr": 0.1}
    assert spec.command.words(some, {}) == [
        *("train.py", "--by", "sgd", "--momentum", "0.5", "--lr", "0.1", "[a]")
    ]
    some = {"optimizer": "adam", "lr": 0.1}
    assert spec.command.words(some, {}) == ["train.py", "--by", "adam", "--lr", "0.1", "[a]"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[--momentum {momentum}]", "--momentum {momentum}", "HINT: write that part in brackets"),
        ('"sgd" }', '"sdg" }', "optimizer is never 'sdg'"),
        ("{ optimizer =", "{ optimiser =", "names no parameter: optimiser. HINT: optimizer"),
        ('goal = "min"', 'goal = "min"\nsearch = "grid"', "depends on others"),
    ],
)
def test_mistakes_with_conditional_parameters(tmp_path, old, new, said):
    assert old in CONDITIONAL
    with pytest.raises(ValueError, match=said):
        read(tmp_path, CONDITIONAL.replace(old, new))


def test_changes_are_named(tmp_path):
    before = read_study_file(write_study(tmp_path)).identity
    free = read_study_file(write_study(tmp_path, trials=99, minutes=3.0)).identity
    assert changes(before, free) == []
    path = write_study(tmp_path, ranks=2)
    path.write_text(path.read_text().replace("high = 3.0", "high = 4.0"))
    assert changes(before, read_study_file(path).identity) == [
        "parameters.x.high was 3.0 and is 4.0",
        "study.ranks = 2 is new",
    ]


def test_a_value_that_is_empty_leaves_its_word_out(tmp_path):
    text = (
        BASE.replace("--x {x} ", "{x} ").replace(X, "") + '[parameters.x]\nchoices = ["", "-x"]\n'
    )
    spec = read(tmp_path, text)
    assert spec.command.words({"x": ""}, {"checkpoint": "c"}) == ["train.py", "--checkpoint", "c"]


LAYOUTS = """
[parameters.how]
choices = ["data", "zero3"]
knob = "layout"
"""


def test_a_knob_needs_no_placeholder(tmp_path):
    spec = read(tmp_path, BASE + LAYOUTS)
    point = {"x": 0.5, "how": "zero3"}
    assert spec.words(point, {"checkpoint": "there"}) == [
        *("train.py", "--x", "0.5", "--checkpoint", "there")
    ]
    assert spec.knobs(point) == {"layout": "zero3"}
    assert spec.knobs({"x": 0.5}) == {}


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            LAYOUTS.replace("zero3", "zero9"),
            "parameters.how: the knob layout can't be 'zero9'",
        ),
        (LAYOUTS.replace('"layout"', '"layot"'), "there is no knob of this name. HINT: use one of"),
        (LAYOUTS.replace("zero3", "dp3"), "parameters.how, with study.ranks = 1: .*needs 3 ranks"),
        (LAYOUTS + LAYOUTS.replace("how", "more"), "two parameters have the knob layout. HINT"),
    ],
)
def test_knobs_that_can_not_be_set_are_refused(tmp_path, new, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, BASE + new)
