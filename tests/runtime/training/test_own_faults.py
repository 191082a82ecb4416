"""A fault in a method of the user's own ends the command in a line that names the user's line."""

import json
import sys
from itertools import count

import pytest

from maskgen.cli import main as maskgen
from runtime.evaluate import main as evaluate
from runtime.prepare import main as prepare
from runtime.train import main as train
from tests.runtime.tiny_root import command, options
from tests.runtime.tiny_text import byte_target
from tests.runtime.training.test_third_method import EXAMPLES, RUN_FILE

EXAMPLE = (EXAMPLES / "next_token.py").read_text("utf-8")
FILL = '        tensors["learned"][row, :length] = sample.loss_mask\n'
_numbers = count()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run file with data and masks, and a folder of modules that Python finds."""
    folder = tmp_path_factory.mktemp("own")
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    lines = [{"prompt": f"say {i}", "completion": "abcd" * (3 + 4 * (i % 3))} for i in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "run.toml").write_text(RUN_FILE.format(root=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.syspath_prepend(str(folder))
        command(prepare, "--config", folder / "run.toml")
        command(maskgen, "build", folder / "run.toml")
        yield folder
        sys.modules.pop("next_token", None)


def last_line(root, text, code=1):
    """How training with a method of this text ends, and its module's name."""
    name = f"own_faults_{next(_numbers)}"
    (root / f"{name}.py").write_text(text)
    given = options(root, name, **{"run.method": f"{name}:METHOD"})
    try:
        ended = command(train, *given, code=code)
    finally:
        sys.modules.pop(name, None)
    assert ended.stdout == ""
    return ended.stderr.splitlines()[-1], f"{root}/{name}.py"


def place(file, text, what):
    """Where a line of a module's text is."""
    return f"{file}:{text[: text.index(what)].count(chr(10)) + 1}"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise SystemExit", "SystemExit"),
        ("raise GeneratorExit('enough')", "GeneratorExit: enough"),
        ("raise type('Own', (BaseException,), {})('it')", "Own: it"),
    ],
)
@pytest.mark.parametrize("where", ["fill", "first_weights"])
def test_what_would_end_the_program_fails_the_run(root, raised, said, where):
    line = {"fill": FILL, "first_weights": "        torch.manual_seed(self.seed)\n"}[where]
    text = EXAMPLE.replace(line, f"        {raised}\n")
    found, file = last_line(root, text)
    stopped = "training stopped after step 0: " if where == "fill" else ""
    at = place(file, text, raised)
    assert found == f"Error: {stopped}{said} ({at}) ended it before it was done"


@pytest.mark.parametrize("raised", ["raise SystemExit(0)", "import sys; sys.exit()", "1 / 0"])
def test_a_module_that_ends_the_program_is_not_imported(root, raised):
    found, file = last_line(root, f"x = 1\n\n{raised}\n{EXAMPLE}", code=2)
    assert found.startswith("Error: run.method = 'own_faults_")
    assert ": must be importable (" in found
    assert found.endswith(f", {file}:3)")


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        (FILL, '        tensors["learnt"][row]\n', "KeyError: 'learnt'"),
        (FILL, "        self.lengths[number]\n", "AttributeError: 'Predictor' object has no"),
        ("        return Predictor(", "        return Predictor(1, 2, ", "TypeError: "),
        # Raised in torch, which the user's line called.
        (FILL, "        torch.zeros(2) + torch.zeros(3)\n", "RuntimeError: The size of tensor a"),
    ],
)
def test_a_fault_in_the_users_code_is_the_users(root, line, instead, said):
    text = EXAMPLE.replace(line, instead)
    found, file = last_line(root, text)
    assert said in found
    assert f" ({place(file, text, instead)}), in code that the run file names" in found
    assert "this program" not in found


@pytest.mark.parametrize(
    ("line", "instead", "said"),
    [
        (
            "return Net(self.vocab_size).state_dict()",
            "return {'head.bias': torch.zeros(self.vocab_size)}",
            "and lacks embed.weight, head.weight",
        ),
        (
            "return Net(self.vocab_size).state_dict()",
            "return {**Net(self.vocab_size).state_dict(), 'scale': torch.ones(1)}",
            "and has beyond them scale",
        ),
        (
            "return Net(self.vocab_size).state_dict()",
            "return {k: w[..., :8] for k, w in Net(self.vocab_size).state_dict().items()}",
            "and differs in embed.weight [{V}, 8] instead of [{V}, 32], head.weight [{V}, 8] "
            "instead of [{V}, 32], head.bias [8] instead of [{V}]",
        ),
        (
            "return Net(self.vocab_size).to(device)",
            "net = Net(self.vocab_size); net.head.half(); return net",
            "the module's parameters must be float32, found head.weight float16, head.bias float16",
        ),
        (
            "torch.stack((loss.detach(), weight))",
            "torch.stack((loss.detach(), weight)).double()",
            "sums loss, weight must be float32 [2], found float64 [2]",
        ),
        (
            "torch.stack((loss.detach(), weight))",
            "weight",
            "sums loss, weight must be float32 [2], found float32 []",
        ),
        (
            "torch.stack((loss.detach(), weight))",
            "[loss.detach(), weight]",
            "sums loss, weight must be float32 [2], found list",
        ),
        ("return Predictor(config, inputs.dataset)", "pass", "what load returns must have "),
    ],
)
def test_what_is_not_as_the_contract_says_is_refused(root, line, instead, said):
    code = 1 if "sums" in said else 2
    found, file = last_line(root, EXAMPLE.replace(line, instead), code=code)
    vocab_size = json.loads((root / "target" / "config.json").read_text())["vocab_size"]
    name = file.split("/")[-1].removesuffix(".py")
    assert f"run.method = '{name}:METHOD': " in found
    assert said.replace("{V}", str(vocab_size)) in found


def test_a_trainee_that_lacks_a_member_is_refused_where_it_is_made(root):
    text = EXAMPLE.replace("    def fill(", "    def fills(")
    found, file = last_line(root, text)
    assert "abstract class Predictor" in found
    assert " fill (" in found.replace("'", "").replace("method ", "").replace("methods ", "")
    assert place(file, text, "        return Predictor(") in found


def test_a_fault_of_the_users_objective_names_its_line(root):
    text = EXAMPLE.replace('inputs["learned"])', 'inputs["learnt"])')
    found, file = last_line(root, text)
    at = place(file, text, 'inputs["learnt"])')
    assert found.startswith("Error: cannot warm up window")
    assert found.endswith(f"'learnt' (KeyError, {at})")


def test_an_evaluation_that_ends_the_program_fails_the_command(root):
    where = "        where = Path(folder or"
    text = EXAMPLE.replace(where, f"        raise SystemExit\n{where}")
    (root / "own_evaluation.py").write_text(text)
    given = options(root, "evaluation", **{"run.method": "own_evaluation:METHOD"})
    ended = command(evaluate, *given, code=1)
    assert ended.stdout == ""
    at = place(root / "own_evaluation.py", text, "        raise SystemExit")
    assert ended.stderr == f"Error: SystemExit ({at}) ended it before it was done\n"
