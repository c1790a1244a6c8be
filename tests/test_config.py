"""The "prt" section: what it means and how wrong ones are refused."""

import pytest

from deepspeed_prt.config import read_section
from deepspeed_prt.errors import PRTConfigError


def test_defaults():
    section = read_section({"prt": {}})
    assert section.model_dump() == {
        "enabled": True, "direction": "unidirectional", "reuse": "auto", "placement": "loop", "schedule": "auto",
        "split_backward": "auto", "max_in_flight": None, "partition": None, "trace": None,
    }


@pytest.mark.parametrize("config", [{}, {"prt": None}, {"prt": {"enabled": False}},
                                    {"prt": {"enabled": False, "reuse": "whatever is left of a config"}}])
def test_no_section_or_a_disabled_one_is_none(config):
    assert read_section(config) is None


@pytest.mark.parametrize("section", [
    {"reuse": 3}, {"reuse": "auto"}, {"placement": "wave"}, {"schedule": "gpipe"}, {"schedule": "a.b:c"},
    {"split_backward": False}, {"split_backward": True}, {"direction": "bidirectional"}, {"max_in_flight": 2.5},
    {"partition": "type:Block"}, {"partition": "uniform"},
    {"partition": [0, 2, 4]},
])
def test_right_values_are_kept(section):
    (key, value), = section.items()
    assert getattr(read_section({"prt": section}), key) == value


@pytest.mark.parametrize(("section", "message"), [
    ({"reus": 2}, 'unknown key "reus".*did you mean "reuse"'),
    ({"reuse": 0}, "greater than 0"),
    ({"reuse": -1}, "greater than 0"),
    ({"reuse": 2.5}, "integer"),
    ({"reuse": "aut"}, 'did you mean "auto"'),
    ({"placement": "lop"}, 'did you mean "loop"'),
    ({"direction": "unidirectionl"}, 'did you mean "unidirectional"'),
    ({"split_backward": "yes"}, "split_backward"),
    ({"partition": "profile"}, "partitioning by profile does not exist yet"),
    ({"partition": "unifrm"}, 'did you mean "uniform"'),
    ({"trace": {"path": "x"}}, "traces do not exist yet"),
    ({"schedule": "1f1"}, 'did you mean "1f1b"'),
    ({"schedule": "missing.csv"}, "no CSV file"),
    ({"max_in_flight": 0}, "greater than 0"),
    ({"enabled": "perhaps"}, "boolean"),
    ({"enabled": "false"}, "boolean"),
    ({"enabled": 0}, "boolean"),
    ({"reuse": True}, "integer"),
    ({"reuse": "2"}, "integer"),
    ({"reuse": 2.0}, "integer"),
    ({"max_in_flight": "4"}, "number"),
    (2, "must be a section"),
    ([], "must be a section"),
])
def test_wrong_values_are_refused(section, message):
    with pytest.raises(PRTConfigError, match=message):
        read_section({"prt": section})


def test_every_wrong_key_is_named():
    with pytest.raises(PRTConfigError) as failure:
        read_section({"prt": {"reuse": 0, "placement": "lop"}})
    assert '"reuse"' in str(failure.value) and '"placement"' in str(failure.value)
