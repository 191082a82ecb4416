import subprocess
import sys
from collections.abc import Mapping

import pytest

import maskgen


def test_every_public_name_resolves_and_the_list_is_sorted():
    assert len(set(maskgen.__all__)) == len(maskgen.__all__)
    constants = [n for n in maskgen.__all__ if n.isupper()]
    classes = [n for n in maskgen.__all__ if n[0].isupper() and not n.isupper()]
    functions = [n for n in maskgen.__all__ if n.islower()]
    assert maskgen.__all__ == [*sorted(constants), *sorted(classes), *sorted(functions)]
    for name in maskgen.__all__:
        assert getattr(maskgen, name) is not None
        assert name in dir(maskgen)


def test_every_family_is_a_function_of_the_package():
    for name in maskgen.families:
        assert name in maskgen.__all__
        assert callable(getattr(maskgen, name))


def test_families_is_the_mapping_also_after_its_package_is_imported():
    import maskgen.families.causal

    assert isinstance(maskgen.families, Mapping)
    assert maskgen.families["causal"].name == "causal"


@pytest.mark.parametrize(
    "code",
    [
        "import maskgen.families.causal; module = maskgen.families.causal",
        "import maskgen; maskgen.causal; import maskgen.families.causal as module",
    ],
)
def test_a_familys_module_is_imported_by_its_name(code):
    code += """
assert module.CAUSAL.name == "causal" and module.causal(4, 4).Q_LEN == 4
import maskgen, maskgen.families.tree as tree, maskgen.families.params as params
assert callable(maskgen.causal) and maskgen.families["tree"] is tree.TREE and params.RuntimeParam
from maskgen.families import causal, Family
assert causal is maskgen.causal and maskgen.families.Family is Family
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["slidingwindow", "Causal", "", 3, None, ["causal"]])
def test_a_missing_family_is_refused_with_the_nearest_name(name):
    with pytest.raises(KeyError, match="valid: ") as caught:
        maskgen.families[name]
    assert isinstance(caught.value, maskgen.MaskSpecError)
    assert str(caught.value).startswith(f"family = {name!r}: ")
    assert maskgen.families.get(name) is None
    assert name not in maskgen.families
    if name == "slidingwindow":
        assert "did you mean 'sliding_window'" in str(caught.value)


def test_the_families_are_a_mapping_that_reads_well():
    assert repr(maskgen.families).startswith("families: full, causal, sliding_window")
    assert list(maskgen.families) == [family.name for family in maskgen.families.values()]
    with pytest.raises(AttributeError, match="has no attribute 'casual'"):
        maskgen.families.casual  # noqa: B018


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'maskgen' has no attribute 'casual'"):
        maskgen.casual  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import maskgen, maskgen.errors, maskgen.host_builds", ["torch", "triton", "numpy"]),
        ("import maskgen; [getattr(maskgen, name) for name in maskgen.__all__]", ["triton"]),
    ],
)
def test_importing_loads_neither_torch_nor_triton_before_they_are_needed(code, absent):
    code += (
        f"; import sys; found = [m for m in {absent} if m in sys.modules]; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
