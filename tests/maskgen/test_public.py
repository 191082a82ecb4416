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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'maskgen' has no attribute 'casual'"):
        maskgen.casual  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import maskgen, maskgen.errors, maskgen.gate", ["torch", "triton", "numpy"]),
        ("import maskgen; [getattr(maskgen, name) for name in maskgen.__all__]", ["triton"]),
    ],
)
def test_importing_loads_neither_torch_nor_triton_before_they_are_needed(code, absent):
    code += (
        f"; import sys; found = [m for m in {absent} if m in sys.modules]; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
