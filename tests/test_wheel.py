"""A wheel, installed outside the checkout: what is in it, and files of the user's beside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cache", "maskgen", "runtime")
RUN_FILE = """
[masks]
cache = "masks.zarr"
[[masks.entry]]
name = "eights"
mask_mod = "rules:eights"
Q_LEN = 128
"""
RULES = "def eights(b, h, q_idx, kv_idx):\n    return q_idx // 8 == kv_idx // 8\n"


def run(*command, folder, **env):
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    done = run(*build, folder=ROOT, **os.environ)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the packages, and the commands in bin/."""
    folder = tmp_path_factory.mktemp("installed")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    done = run(*install, "--target", folder, wheel, folder=folder, **os.environ)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def users(tmp_path):
    """A folder of the user's, and a function that puts a file of theirs there."""

    def write(name, text="raise SystemExit('imported')\n"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    return write


def test_a_wheel_has_every_module_and_the_license(wheel):
    modules = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.suffix == ".py" or file.name == "py.typed"
    }
    names = zipfile.ZipFile(wheel).namelist()
    about = {name for name in names if ".dist-info/" in name}
    assert set(names) - about == {*modules, "flex_mask_compiler.py"}
    assert {name.partition("/")[2] for name in about} >= {"licenses/LICENSE", "entry_points.txt"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cache.py", "maskgen list"),
        ("cache/__init__.py", "maskgen list"),
        ("cache.py", "runtime.prepare"),
        ("cache.py", "runtime.train"),
        ("cache.py", "runtime.evaluate"),
        ("cache.py", "runtime.export"),
        ("cache.py", "runtime.generate --drafter x --prompt y"),
        ("maskgen.py", "runtime.train"),
    ],
)
def test_python_m_says_in_one_line_what_hides_ours(installed, users, tmp_path, name, words):
    file = users(name)
    command = (sys.executable, "-m", *words.split())
    done = run(*command, folder=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{file} hides" in line
    assert "python -P -m" in line


@pytest.mark.parametrize("verb", ["prepare", "train", "evaluate", "generate", "export", "compare"])
def test_an_installed_command_starts_beside_files_of_our_names(installed, users, tmp_path, verb):
    for package in PACKAGES:
        users(f"{package}/__init__.py")
    command = installed / "bin" / f"runtime-{verb}"
    done = run(command, "--help", folder=tmp_path, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: runtime-{verb} ")


@pytest.mark.parametrize("module", ["maskgen", "runtime.train"])
def test_python_p_m_leaves_files_of_our_names_out(installed, users, tmp_path, module):
    for package in PACKAGES:
        users(f"{package}/__init__.py")
    command = (sys.executable, "-P", "-m", module, "--help")
    done = run(*command, folder=tmp_path, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: python -m {module} ")


def test_a_folder_that_is_no_package_hides_nothing(installed, tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    command = (sys.executable, "-m", "runtime.train", "--help")
    done = run(*command, folder=tmp_path, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (0, "")


def test_masks_are_built_outside_the_checkout_from_a_function_there(installed, users, tmp_path):
    users("cache.py")
    users("rules.py", RULES)
    users("run.toml", RUN_FILE)
    command = (installed / "bin" / "maskgen", "build", "--config", "run.toml")
    done = run(*command, folder=tmp_path, PYTHONPATH=str(installed), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "eights/q128-kv128" in done.stdout
    assert (tmp_path / "masks.zarr" / "zarr.json").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_installed_command_says_what_a_search_path_hides(installed, users, tmp_path, package):
    """An empty part of PYTHONPATH is the current folder, before ours."""
    file = users(f"{package}/__init__.py")
    command = (installed / "bin" / "runtime-train", "--help")
    done = run(*command, folder=tmp_path, PYTHONPATH=f"{os.pathsep}{installed}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {file} hides")
