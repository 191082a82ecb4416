"""The pages: links lead somewhere, what they name is there, and their snippet runs."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ROOTS = ("benchmarks", "cache", "configs", "docs", "examples", "maskgen", "runtime", "tests")
FOLDERS = "|".join(ROOTS)
LONGEST = {"README.md": 110, "docs/tour.md": 90, "docs/methods.md": 100}
"""Lines of a page."""


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(params=PAGES, ids=name)
def page(request):
    return request.param


def found(pattern, page):
    return sorted(set(re.findall(pattern, page.read_text("utf-8"), re.MULTILINE)))


def anchors(page):
    """Of the headings of a page, as GitHub names them."""
    headings = found(r"^#+ (.+)$", page)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_links_lead_to_a_file_and_a_heading(page):
    broken = []
    for link in found(r"\]\(([^)\s]+)\)", page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_files_that_are_named_are_there(page):
    paths = found(rf"(?<![\w/.\-(])(?:{FOLDERS})/[\w./-]*\w/?", page)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_pages_that_the_code_names_are_there():
    code = [*ROOT.glob("*.toml"), *(file for part in ROOTS for file in (ROOT / part).rglob("*.py"))]
    named = {path for file in code for path in found(r"(?<![\w/.])(docs/[\w./-]*\w\.md)", file)}
    assert len(named) > 3
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_names_of_the_code_are_those_of_the_code(page):
    missing = []
    for dotted in found(r"`((?:cache|maskgen|runtime)(?:\.\w+)+)[`(]", page):
        if dotted.endswith((".md", ".py", ".toml", ".zarr")):
            continue
        try:
            pkgutil.resolve_name(dotted)
        except (ImportError, AttributeError):
            missing.append(dotted)
    assert missing == []


def test_commands_that_are_named_exist(page):
    modules = found(r"python3? (?:-\w+ )*-m ((?:maskgen|runtime|benchmarks|tests)[\w.]*)", page)
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(found(r"(?:^|`)make ([a-z]+)", page)) <= verbs


@pytest.mark.parametrize("path", [*LONGEST, "DESIGN.md", "docs/design"])
def test_pages_are_short_and_narrow(path):
    """Tables, code and pictures may be wider."""
    pages = [ROOT / path] if path.endswith(".md") else sorted((ROOT / path).glob("*.md"))
    for page in pages:
        lines = page.read_text("utf-8").splitlines()
        assert len(lines) <= LONGEST.get(path, 100), page
        prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL).splitlines()
        wide = [line for line in prose if len(line) >= 100 and not line.startswith(("|", "!"))]
        assert wide == [], page


def test_a_note_says_problem_choice_rejected_and_numbers():
    notes = sorted(ROOT.glob("docs/design/*.md"))
    for note in notes:
        headings = re.findall(r"^## (.+)$", note.read_text("utf-8"), re.MULTILINE)
        assert headings == ["Problem", "Choice", "Rejected", "Numbers"], note
    linked = set(found(r"\]\((docs/design/[^)]+)\)", ROOT / "DESIGN.md"))
    assert linked == {name(note) for note in notes}


def test_the_snippet_of_the_readme_builds_that_mask():
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(snippet, names)  # our own page
    ids = names["ids"]

    q, kv = torch.meshgrid(torch.arange(4096), torch.arange(4096), indexing="ij")
    seen = (ids[q] == ids[kv]) & (q >= kv) & (q - kv < 256)
    cells = seen.view(32, 128, 32, 128).sum((1, 3))
    block_mask = names["block_mask"]
    assert torch.equal(block_mask.to_dense()[0, 0], (cells > 0).int())
    assert torch.equal(block_mask.full_kv_num_blocks[0, 0], (cells == 128 * 128).sum(1).int())
