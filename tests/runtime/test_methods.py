import sys

import pytest

from runtime.config import Config
from runtime.dflash.settings import DFlashConfig
from runtime.errors import ConfigError
from runtime.methods import METHODS, find_method, read_run

OWN = """
from dataclasses import dataclass, field
from runtime.config import Config, TrainConfig
from runtime.rules import setting
from runtime.training.method import Method

@dataclass(frozen=True, kw_only=True, slots=True)
class Train(TrainConfig):
    temperature: float = setting(1.0, above=0)

@dataclass(frozen=True, kw_only=True, slots=True)
class OwnConfig(Config):
    train: Train = field(default_factory=Train)

class Own(Method[OwnConfig]):
    name = "own"
    product = "product"
    config_type = OwnConfig
    load = evaluate = export_checkpoint = is_of = lambda self, *args, **kwargs: None

class Bare:
    name = "bare"
    config_type = OwnConfig
    load = specs = lambda self, *args, **kwargs: None

METHOD = Own()
KIND = Own
BARE = Bare()
NUMBER = 3
"""


PARTIAL = """
from runtime.config import Config
from runtime.training.method import Method
class Some(Method[Config]):
    name, product, config_type = "some", "product", Config
    load = export_checkpoint = is_of = lambda self: None

METHOD = Some()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(OWN)
    (tmp_path / "broken_method.py").write_text("import no_such_module")
    (tmp_path / "partial_method.py").write_text(PARTIAL)
    (tmp_path / "nameless_method.py").write_text(OWN.replace('    product = "product"\n', ""))
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_method:METHOD"
    for name in ("own_method", "partial_method", "nameless_method"):
        sys.modules.pop(name, None)


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\n")
    return path


@pytest.mark.parametrize("name", METHODS)
def test_each_name_is_that_of_its_method(name):
    method = find_method(name)
    assert method.name == name
    assert issubclass(method.config_type, Config)


def test_a_run_file_is_of_dflash_if_it_says_nothing(run_file):
    method, config = read_run(run_file)
    assert method.name == "dflash"
    assert isinstance(config, DFlashConfig)
    assert config.train.steps == 7


def test_a_method_of_ones_own(run_file, own):
    method, config = read_run(run_file, [f"run.method={own}", "train.temperature=0.5"])
    assert method.name == "own"
    assert (config.train.steps, config.train.temperature) == (7, 0.5)
    run_file.write_text(f"[run]\nmethod = '{own}'\n")
    assert read_run(run_file)[0] is method
    with pytest.raises(ConfigError, match=r"train\.gamma = 1: unknown key in \[train\]"):
        read_run(run_file, ["train.gamma=1"])
    with pytest.raises(ConfigError, match=r"drafter\.init=random': section is unknown; valid are"):
        read_run(run_file, ["drafter.init=random"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dflahs", "is unknown; did you mean 'dflash'"),
        ("nowhere:METHOD", r"must be importable \(No module named 'nowhere'\)"),
        ("broken_method:METHOD", r"must be importable \(No module named 'no_such_module'\)"),
        (":METHOD", "must be importable"),
        (".own:METHOD", "must be importable"),
        ("own_method:OTHER", "'OTHER' must be a method in own_method"),
        ("own_method:NUMBER", "'NUMBER' must be a method in own_method"),
        ("own_method:KIND", r"must be a method, found the class Own; write Own\(\)"),
        ("own_method:BARE", "must have product, .*evaluate, .*is_of, found Bare; see docs"),
        ("partial_method:METHOD", "must be importable .*abstract .*Some .*evaluate.*py:8"),
        ("nameless_method:METHOD", "the method must have product, found Own; see docs"),
        ("own_method:", "'' must be a method in own_method"),
    ],
)
@pytest.mark.usefixtures("own")
def test_a_method_that_is_not_there(run_file, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(run_file, [f"run.method={name}"])
    assert (caught.value.field, caught.value.value) == ("run.method", name)


def test_a_method_is_named_by_a_text(run_file):
    with pytest.raises(ConfigError, match=r"run\.method = 3: must be of type str"):
        read_run(run_file, ["run.method=3"])


def test_a_setting_of_no_section_is_refused(run_file):
    with pytest.raises(ConfigError, match="section is unknown; did you mean 'drafter'"):
        read_run(run_file, ["drafters.num_layers=2"])


def test_a_run_file_that_is_no_table_of_tables(run_file):
    run_file.write_text("run = 3\n")
    with pytest.raises(ConfigError, match=r"run = 3: must be a table, \[run\]"):
        read_run(run_file)
