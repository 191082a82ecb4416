import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from runtime import evaluate
from runtime.config import parse_config
from runtime.data.dataset import Dataset
from runtime.dflash.decoding import evaluation
from runtime.dflash.decoding.evaluation import evaluate_drafter
from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.folder.files import target_record
from runtime.dflash.folder.saved_drafter import save_published
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.initialise import drafter_config, initial_drafter, random_start
from runtime.errors import CheckpointError, NoSamplesError
from tests.runtime.tiny_llama import prompts, save_dataset, save_target

LAYER_IDS = (1, 2, 3)
BLOCK = 4
LIMIT = 20


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A target, its held-out data, a drafter made from it and a random one."""
    root = tmp_path_factory.mktemp("evaluate")
    target = save_target(root / "target")
    save_dataset(root / "data", target, LAYER_IDS)
    return root, target


def settings(root, **evaluation):
    return {
        "run": {"folder": str(root / "run")},
        "target": {"model": str(root / "target")},
        # The tiny target's answers are short loops.
        "data": {"folder": str(root / "data"), "min_distinct_4grams": 0.0},
        "evaluate": {"prompts": 24, "max_new_tokens": LIMIT, **evaluation},
    }


@pytest.fixture
def parts(workplace):
    root, target = workplace
    heldout = Dataset.open(root / "data", "heldout")
    network = drafter_config(
        target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=LAYER_IDS
    )
    train = Dataset.open(root / "data", "train")
    drafter = initial_drafter(target, train, parse_config(settings(root), DFlashConfig), network)
    untrained = random_start(network, torch.Generator().manual_seed(2))
    return target, drafter, heldout, untrained


def run(root, parts, **evaluation):
    target, drafter, heldout, untrained = parts
    config = parse_config(settings(root, **evaluation), DFlashConfig)
    return evaluate_drafter(target, drafter, heldout, config, untrained=untrained)


def test_scores_are_those_of_the_sessions(workplace, parts):
    target, drafter, _, untrained = parts
    result = run(workplace[0], parts)
    for score, which in ((result.trained, drafter), (result.untrained, untrained)):
        session = DraftSession(target, which)
        kept = [n for ids in prompts(4)[1:] for n in session.generate(ids, LIMIT).kept]
        assert score.kept == tuple(kept.count(n) for n in range(1, BLOCK + 1))
        assert score.target_calls == len(kept)
        assert score.new_tokens == sum(kept)
        assert score.tau == pytest.approx(sum(kept) / len(kept))
        assert score.mismatches == ()
        assert score.tokens_per_s > 0
    assert result.prompts == 3
    assert result.trained.tau > result.untrained.tau
    assert (result.device, result.dtype, result.exact) == ("cpu", "float32", True)


def test_acceptance_adds_up_to_tau(workplace, parts):
    score = run(workplace[0], parts).trained
    assert 1 + sum(score.acceptance) == pytest.approx(score.tau)
    assert list(score.acceptance) == sorted(score.acceptance, reverse=True)
    assert len(score.acceptance) == BLOCK - 1


def test_number_of_prompts(workplace, parts):
    assert run(workplace[0], parts, prompts=2).prompts == 2


@pytest.mark.parametrize(("compared", "both"), [(0, 3), (1, 1), (2, 2), (9, 3)])
def test_the_first_prompts_are_answered_by_all_three(workplace, parts, compared, both):
    """The trained drafter answers the others too, and its text is compared with greedy text."""
    whole = run(workplace[0], parts)
    result = run(workplace[0], parts, compared=compared)
    assert (result.prompts, result.compared) == (3, both)
    assert result.trained.kept == whole.trained.kept
    session = DraftSession(parts[0], parts[3])
    kept = [n for ids in prompts(4)[1:][:both] for n in session.generate(ids, LIMIT).kept]
    assert result.untrained.target_calls == len(kept)
    assert result.untrained.tau == pytest.approx(sum(kept) / len(kept))
    assert result.exact
    assert result.mismatches == ()
    assert min(result.greedy_tokens_per_s, result.trained.tokens_per_s) > 0


def test_texts_of_the_other_prompts_are_compared_too(workplace, parts, monkeypatch):
    real = evaluation.answer_all

    def answers(*arguments, **options):
        for found in real(*arguments, **options):
            yield {
                row: dataclasses.replace(a, token_ids=a.token_ids[:2]) for row, a in found.items()
            }

    monkeypatch.setattr(evaluation, "answer_all", answers)
    result = run(workplace[0], parts, compared=1)
    longer = [i for i in (1, 2) if len(greedy(parts[0], prompts(4)[i + 1], LIMIT).tokens) > 2]
    assert [found.prompt for found in result.trained.mismatches] == longer
    assert longer
    assert not result.exact


def test_repetitive_answers_of_the_others_are_left_out(workplace, parts, monkeypatch):
    """As many prompts are taken as are asked for, where there are enough."""
    real = evaluation.answer_all

    def answers(target, asked, limits, *, batch):
        for found in real(target, asked, limits, batch=batch):
            loops = {row: (7,) * LIMIT for row in found if asked[row] == prompts(4)[2]}
            yield {
                row: dataclasses.replace(answer, token_ids=list(loops.get(row, answer.token_ids)))
                for row, answer in found.items()
            }

    monkeypatch.setattr(evaluation, "answer_all", answers)
    config = settings(workplace[0], prompts=2, compared=1)
    config["data"]["min_distinct_4grams"] = 0.1
    target, drafter, heldout, untrained = parts
    found = evaluate_drafter(
        target, drafter, heldout, parse_config(config, DFlashConfig), untrained=untrained
    )
    assert (found.prompts, found.compared, found.repetitive) == (2, 1, 1)


def test_repetition_is_left_out_and_counted(workplace, parts, monkeypatch):
    root, target = workplace
    loops = [prompts(4)[2]]
    real = evaluation.greedy

    def answer(target, ids, limit):
        found = real(target, ids, limit)
        return dataclasses.replace(found, tokens=(7,) * limit) if ids in loops else found

    monkeypatch.setattr(evaluation, "greedy", answer)
    config = settings(root)
    config["data"]["min_distinct_4grams"] = 0.1
    _, drafter, heldout, untrained = parts
    result = evaluate_drafter(
        target, drafter, heldout, parse_config(config, DFlashConfig), untrained=untrained
    )
    assert (result.prompts, result.repetitive) == (2, 1)
    loops += prompts(4)
    with pytest.raises(NoSamplesError, match=r"prepare .*.repetitive answer: 3, without a prompt"):
        evaluate_drafter(
            target, drafter, heldout, parse_config(config, DFlashConfig), untrained=untrained
        )


def test_samples_without_a_prompt_are_counted(workplace, parts):
    root, _ = workplace
    parts[2]._arrays["prompt_lens"][0] = 0
    result = run(root, parts)
    assert (result.prompts, result.without_prompt) == (2, 1)


def test_a_difference_is_shown_with_its_place_and_gap(workplace, parts, monkeypatch):
    root, target = workplace
    ids = prompts(4)[1]
    real = evaluation.greedy

    def answer(target, ids_, limit):
        found = real(target, ids_, limit)
        if ids_ != ids:
            return found
        tokens = (*found.tokens[:3], (found.tokens[3] + 1) % 24)
        return dataclasses.replace(found, tokens=tokens)

    monkeypatch.setattr(evaluation, "greedy", answer)
    result = run(root, parts)
    own = greedy(target, ids, LIMIT).tokens
    for score in (result.trained, result.untrained):
        (mismatch,) = score.mismatches
        assert (mismatch.prompt, mismatch.position) == (0, 3)
        assert (mismatch.speculative, mismatch.greedy) == (own[3], (own[3] + 1) % 24)
        assert mismatch.gap == pytest.approx(0, abs=1e-4)
    assert "mismatch: prompt 0, token 3" in result.table()
    # The speculative text is the target's choice throughout, so only a tie can have parted them.
    assert result.exact
    wrong = dataclasses.replace(mismatch, gap=0.3)
    wrong = dataclasses.replace(score, mismatches=(wrong,))
    assert not dataclasses.replace(result, trained=wrong).exact
    assert dataclasses.replace(result, trained=wrong, dtype="bfloat16").exact


@pytest.mark.parametrize(("speed", "explained"), [(9.0, True), (11.0, False)])
def test_a_drafter_slower_than_the_target_is_explained(workplace, parts, speed, explained):
    result = run(workplace[0], parts)
    trained = dataclasses.replace(result.trained, tokens_per_s=speed)
    table = dataclasses.replace(result, trained=trained, greedy_tokens_per_s=10.0).table()
    assert ("drafts cost more time here than they save" in table) == explained


def test_a_text_that_ends_early_is_a_difference(workplace, parts, monkeypatch):
    real = evaluation.greedy

    def answer(target, ids, limit):
        return dataclasses.replace(real(target, ids, limit), tokens=real(target, ids, 4).tokens)

    monkeypatch.setattr(evaluation, "greedy", answer)
    found = run(workplace[0], parts).trained.mismatches
    longer = [i for i in range(3) if len(real(parts[0], prompts(4)[i + 1], 5).tokens) > 4]
    assert [m.prompt for m in found] == longer
    assert all(m.position == 4 and m.greedy is None for m in found)


@pytest.mark.parametrize("short", ["greedy", "speculative"])
def test_a_missing_token_is_no_tie(workplace, parts, monkeypatch, short):
    # What is there is the target's choice throughout, and yet the texts differ.
    ids = next(p for p in prompts(4)[1:] if len(greedy(parts[0], p, LIMIT).tokens) > 4)
    owner, name = (evaluation, "greedy") if short == "greedy" else (DraftSession, "generate")
    real = getattr(owner, name)

    def answer(self, ids_, limit):
        found = real(self, ids_, limit)
        return dataclasses.replace(found, tokens=found.tokens[:-1]) if ids_ == ids else found

    monkeypatch.setattr(owner, name, answer)
    result = run(workplace[0], parts)
    assert [m.gap for m in result.mismatches] == [None, None]
    assert not result.exact
    assert not dataclasses.replace(result, dtype="bfloat16").exact
    assert "one text is the beginning of the other" in result.table()
    document = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert document["exact"] is False
    assert document["trained"]["mismatches"][0]["gap"] is None


@pytest.fixture
def run_file(workplace, parts, tmp_path):
    root, _ = workplace
    _, drafter, heldout, _ = parts
    save_published(
        tmp_path / "run" / "drafter",
        drafter.config,
        drafter.state_dict(),
        feature_scale=torch.tensor(heldout.feature_scale),
        target=target_record(heldout.meta),
    )
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [run]
        folder = "{tmp_path}/run"
        seed = 4
        threads = 1
        [target]
        model = "{root}/target"
        [data]
        folder = "{root}/data"
        min_distinct_4grams = 0
        [evaluate]
        max_new_tokens = {LIMIT}
        """
    )
    return path


def test_command_writes_and_prints(run_file):
    result = CliRunner().invoke(evaluate.main, ["--config", str(run_file), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    saved = json.loads((run_file.parent / "run" / "evaluate.json").read_text())
    assert found == saved
    assert found["exact"] is True
    assert found["same_target"] is True
    assert found["prompts"] == 3
    assert found["trained"]["tau"] > 1
    # The untrained drafter is the run's own start, here rounded to bf16 by export alone.
    assert found["untrained"]["tau"] == pytest.approx(found["trained"]["tau"], abs=0.3)


@pytest.mark.parametrize(("record", "same"), [({"name": "b", "digest": "c"}, False), (None, None)])
def test_a_drafter_of_another_target_is_reported(run_file, parts, tmp_path, record, same):
    """Of another trainer's drafter, nothing is known and nothing said."""
    _, drafter, _, _ = parts
    folder = tmp_path / "theirs"
    save_published(folder, drafter.config, drafter.state_dict(), target=record)
    arguments = ["--config", str(run_file), "--drafter", str(folder), "--json"]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["same_target"] is same
    saved = json.loads((run_file.parent / "run" / "evaluate.json").read_text())
    assert saved["same_target"] is same
    warned = "trained for target 'b' (c), and this is" in result.stderr
    assert warned is (same is False)


def test_a_drafter_of_other_layers_is_measured(run_file, workplace, tmp_path):
    """Evaluation needs the data's prompts, not their features."""
    _, target = workplace
    network = drafter_config(target, num_layers=1, draft_block_size=3, target_layer_ids=(0, 4))
    drafter = random_start(network, torch.Generator().manual_seed(2))
    save_published(tmp_path / "theirs", network, drafter.state_dict())
    arguments = ["--config", str(run_file), "--drafter", f"{tmp_path}/theirs", "--json"]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["exact"], found["draft_block_size"], found["prompts"]) == (True, 3, 3)


def test_command_prints_a_table(run_file):
    folder = str(run_file.parent / "run" / "drafter")
    arguments = ["--config", str(run_file), "--drafter", folder, "--set", "evaluate.prompts=1"]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == 0, result.output
    assert "untrained    trained" in result.stdout
    assert "slot 3 kept" in result.stdout
    assert "1 held-out prompts" in result.stdout
    assert result.stderr.startswith("loading target ")


def test_command_exits_with_3_on_a_real_difference(run_file, monkeypatch):
    real = evaluation.greedy

    def answer(target, ids, limit):
        return dataclasses.replace(real(target, ids, limit), tokens=(5,) * limit)

    monkeypatch.setattr(evaluation, "greedy", answer)
    monkeypatch.setattr(evaluation, "choice_gap", lambda *_: 2.0)
    result = CliRunner().invoke(evaluate.main, ["--config", str(run_file)])
    assert result.exit_code == 3
    assert "2 below the best" in result.stdout


def test_command_without_a_drafter(run_file):
    arguments = ["--config", str(run_file), "--drafter", "nowhere"]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == CheckpointError.exit_code == 1
    assert "there is no drafter in nowhere (no config.json); name a folder" in result.stderr
    config = run_file.parent / "run" / "drafter" / "config.json"
    # As an export leaves it that was killed at its last file.
    config.unlink()
    result = CliRunner().invoke(evaluate.main, arguments[:2])
    assert f"in {config.parent.parent}; run: python -m runtime.train --config {run_file}\n" in (
        result.stderr
    )


def test_prompts_that_were_rendered_otherwise_are_refused(run_file, monkeypatch):
    monkeypatch.setattr("runtime.target.model.Target.load", None)
    arguments = ["--config", str(run_file), "--set", "data.template.enable_thinking=false"]
    result = CliRunner().invoke(evaluate.main, arguments)
    assert result.exit_code == 1
    assert 'was rendered with {"chat_template": "target", "keywords": {}}' in result.stderr
