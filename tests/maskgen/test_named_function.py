"""`module:function` of a run file: found in depth, refused by name, its file's digest recorded."""

import hashlib
import sys
from itertools import count

import pytest

from maskgen.errors import MaskSpecError
from maskgen.named_function import imported_source, installed_source, load_function

_numbers = count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that nobody has imported yet, in a package if asked, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    written = []

    def write(text, package=""):
        name = f"named_function_{next(_numbers)}"
        folder = tmp_path / package
        folder.mkdir(exist_ok=True)
        if package:
            (folder / "__init__.py").write_text("raise_on_import = True\n")
        (folder / f"{name}.py").write_text(text)
        written.append(f"{package}.{name}" if package else name)
        return written[-1], folder / f"{name}.py"

    yield write
    for name in written:
        sys.modules.pop(name, None)


def refusal(path, *more):
    with pytest.raises(MaskSpecError) as caught:
        load_function(path, *more)
    return str(caught.value)


def test_a_function_may_stand_within_a_class(module):
    name, _ = module(
        "class A:\n    class B:\n        def mask(b, h, q, kv):\n            return q\n"
    )
    assert load_function(f"{name}:A.B.mask")(0, 0, 7, 0) == 7
    assert refusal(f"{name}:A.C.mask").startswith(
        f"mask_mod = '{name}:A.C.mask': must be importable ("
    )


@pytest.mark.parametrize(
    ("text", "attribute", "told"),
    [
        ("x = 3\n", "x", "must be a function (b, h, q_idx, kv_idx) -> bool"),
        ("raise ValueError('at import')\n", "x", "must be importable (ValueError('at import'), "),
        ("import no_such_module_at_all\n", "x", "must be importable (No module named 'no_such_"),
        ("", "y", "must be importable (module 'named_function_"),
    ],
)
def test_a_function_that_cannot_be_used_says_why(module, text, attribute, told):
    name, _ = module(text)
    assert refusal(f"{name}:{attribute}").startswith(f"mask_mod = '{name}:{attribute}': {told}")


def test_the_field_and_what_is_wanted_are_those_of_the_caller(module):
    name, _ = module("x = 3\n")
    assert refusal(f"{name}:x", "family", "a cat") == f"family = '{name}:x': must be a cat"


@pytest.mark.parametrize("package", ["", "package_of_functions"])
def test_the_digest_is_of_the_file_as_it_was_imported(module, package):
    text = "def mask(b, h, q, kv):\n    return q\n"
    name, file = module(text, package)
    old = hashlib.sha256(text.encode()).hexdigest()
    assert installed_source(f"{name}:mask") == old
    assert name not in sys.modules
    load_function(f"{name}:mask")
    assert imported_source(f"{name}:mask") == old
    file.write_text("changed = True\n")
    new = hashlib.sha256(b"changed = True\n").hexdigest()
    assert imported_source(f"{name}:mask") == old
    assert installed_source(f"{name}:mask") == new
    file.unlink()
    assert installed_source(f"{name}:mask") is None


def test_modules_without_a_file_have_no_digest():
    load_function("sys:exit")
    assert imported_source("sys:exit") is None
    assert installed_source("sys:exit") is None
    assert installed_source("no_such_module_at_all:x") is None
    assert installed_source("json.no_such_module:x") is None
