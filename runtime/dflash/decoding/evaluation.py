"""How well a drafter drafts: draft-and-verify on held-out prompts, trained against untrained.

tau is the mean number of tokens per target call, bonus included. The speculative text is compared
with the target's own greedy text token for token, and the speeds of both. All three decoders answer
the same prompts one at a time, or the first few (``evaluate.compared``): of the others the greedy
text is written for many prompts at once, which takes a fraction of the time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from maskgen.progress import Progress, say
from runtime.data.answer import Answer, distinct_share
from runtime.data.answers import answer_all
from runtime.data.dataset import Dataset, open_splits
from runtime.data.folder import PREPARE
from runtime.data.prepared import check_prepared
from runtime.dflash.capabilities import DECODING, Request, check_request
from runtime.dflash.decoding.confidence import check_confidence
from runtime.dflash.decoding.scores import DrafterScore, EvaluationResult, Mismatch
from runtime.dflash.decoding.speculate import Decoded, DraftSession, choice_gap, greedy
from runtime.dflash.folder.files import CONFIG_FILE, read_network, same_target
from runtime.dflash.folder.saved_drafter import load_published, servable
from runtime.dflash.network.drafter import Drafter, DrafterConfig
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.beginning import Beginning, find_beginning
from runtime.dflash.start.initialise import initial_drafter, random_start
from runtime.dflash.step.buckets import run_specs
from runtime.errors import CheckpointError, NoSamplesError
from runtime.ranks.devices import enter_thread, place
from runtime.target.model import Target
from runtime.training.checkpoint import TRAIN

WARM_UP_TOKENS = 4


def evaluate(config: DFlashConfig, drafter_folder: str | Path | None = None) -> EvaluationResult:
    """Measure the drafter of a run file.

    Args:
        config: The run file.
        drafter_folder: A published drafter; the run's own if left out.
    """
    run_folder = Path(config.run.folder)
    folder = Path(drafter_folder) if drafter_folder else run_folder / "drafter"
    placement = place(config.run.devices, dtype=config.target.dtype, threads=config.run.threads)
    # Another trainer's drafter has nothing to do with the run file's masks.
    specs = {} if drafter_folder or not config.masks else run_specs(config)
    check_request(Request(config=config, specs=specs, placement=placement), (DECODING,))
    device, dtype = placement.devices[0], placement.compute_dtype
    enter_thread(device, placement.threads)
    train, heldout = open_splits(config.data.folder)
    check_prepared(config.data, heldout)
    if not drafter_folder and not (folder / CONFIG_FILE).exists():
        raise CheckpointError(f"there is no drafter in {run_folder}; {TRAIN}")
    check_confidence(read_network(folder), config.evaluate.confidence, "evaluate.confidence")
    drafter = load_published(folder, device=device, dtype=dtype)
    say(f"loading target {config.target.model}")
    target = Target.load(config.target.model, device=device, dtype=dtype)
    heldout.check_target(target.digest, heldout.layer_ids)
    made_for = same_target(folder, target, say)
    untrained = _untrained(target, drafter.config, heldout, train, config)
    result = evaluate_drafter(target, drafter, heldout, config, untrained=untrained.to(dtype))
    return replace(result, same_target=made_for)


def _untrained(
    target: Target,
    network: DrafterConfig,
    heldout: Dataset,
    train: Dataset,
    config: DFlashConfig,
) -> Drafter:
    """Where a run's drafter starts from; of a drafter that reads other layers, a random start."""
    beginning = find_beginning(config)
    if beginning is not None:
        return _starting(target, network, beginning, config)
    if network.target_layer_ids == heldout.layer_ids:
        scale = torch.tensor(heldout.feature_scale, dtype=torch.float32, device=target.device)
        return servable(initial_drafter(target, train, config, network), scale)
    generator = torch.Generator(device="cpu").manual_seed(config.run.seed)
    return servable(random_start(network, generator, device=target.device))


def _starting(
    target: Target, network: DrafterConfig, beginning: Beginning, config: DFlashConfig
) -> Drafter:
    """The published drafter that a run began from, or a random one where it is gone."""
    reach = beginning.network.reach
    if not beginning.is_there or reach != network.reach:
        why = "is gone" if not beginning.is_there else f"drafts {reach - 1} tokens at once"
        say(f"the drafter in {beginning.folder} {why}: comparing with a random one")
        generator = torch.Generator(device="cpu").manual_seed(config.run.seed)
        return servable(random_start(network, generator, device=target.device))
    return load_published(beginning.folder, device=target.device)


def evaluate_drafter(
    target: Target,
    drafter: Drafter,
    dataset: Dataset,
    config: DFlashConfig,
    *,
    untrained: Drafter,
) -> EvaluationResult:
    """Decode held-out prompts greedily, and with both drafters.

    Args:
        target: The target.
        drafter: Takes raw features (``saved_drafter.servable``), on the target's device.
        dataset: The held-out split.
        config: Of ``evaluate`` all that is about decoding is read.
        untrained: Where the drafter started from; as ``drafter``. Its blocks are never cut.

    Raises:
        NoSamplesError: No held-out sample has a prompt and an answer that is not repetition.
        ConfigError: Blocks are to be cut, and the drafter has no confidence head.
    """
    prompts = {i: _prompt(dataset, i) for i in range(len(dataset))}
    usable = {i: prompt for i, prompt in prompts.items() if prompt}
    limit, wanted = config.evaluate.max_new_tokens, config.evaluate.prompts
    sessions = [
        DraftSession(target, drafter, confidence=config.evaluate.confidence),
        DraftSession(target, untrained),
    ]
    for prompt in list(usable.values())[:1]:
        # The first calls on a device pay for its set-up.
        greedy(target, prompt, min(limit, WARM_UP_TOKENS))
        for session in sessions:
            session.generate(prompt, min(limit, WARM_UP_TOKENS))
    compared = config.evaluate.compared or wanted
    own: dict[int, Decoded] = {}
    drafted: tuple[dict[int, Decoded], dict[int, Decoded]] = ({}, {})
    repetitive = 0
    with Progress("evaluate", min(wanted, len(usable))) as progress:
        for i, answer in _greedy_texts(target, usable, config, own):
            if distinct_share(answer.tokens) < config.data.min_distinct_4grams:
                repetitive += 1
                continue
            # The trained drafter answers all, the untrained one the first.
            answering = sessions if len(own) < compared else sessions[:1]
            own[i] = answer
            for session, answers in zip(answering, drafted, strict=False):
                answers[i] = session.generate(usable[i], limit)
            progress.advance()
    if not own:
        raise _no_prompts(dataset, len(prompts) - len(usable), repetitive)
    timed = drafted[1].keys()
    reach = drafter.config.reach
    scores = [_score(target, prompts, answers, own, reach, timed) for answers in drafted]
    return EvaluationResult(
        prompts=len(own),
        compared=len(timed),
        without_prompt=len(prompts) - len(usable),
        repetitive=repetitive,
        max_new_tokens=limit,
        draft_block_size=drafter.config.draft_block_size,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        greedy_tokens_per_s=_speed(own),
        trained=scores[0],
        untrained=scores[1],
        confidence=config.evaluate.confidence,
    )


def _greedy_texts(
    target: Target,
    prompts: Mapping[int, Sequence[int]],
    config: DFlashConfig,
    taken: Mapping[int, Decoded],
) -> Iterator[tuple[int, Decoded]]:
    """The target's own answers, until enough of them are ``taken``.

    The first ``evaluate.compared`` that are taken were decoded one at a time and are timed.
    """
    limit, wanted = config.evaluate.max_new_tokens, config.evaluate.prompts
    compared = config.evaluate.compared or wanted
    left = list(prompts)
    while left and len(taken) < wanted:
        if len(taken) < compared:
            i = left.pop(0)
            yield i, greedy(target, prompts[i], limit)
            continue
        rows, left = left[: wanted - len(taken)], left[wanted - len(taken) :]
        asked = [prompts[i] for i in rows]
        found: dict[int, Answer] = {}
        for answers in answer_all(target, asked, [limit] * len(rows), batch=config.data.batch):
            found |= answers
        for row, i in enumerate(rows):
            yield i, Decoded(tokens=tuple(found[row].token_ids), kept=(), seconds=0.0)


def _no_prompts(dataset: Dataset, without_prompt: int, repetitive: int) -> Exception:
    return NoSamplesError(
        f"{dataset.folder} must hold a held-out sample to evaluate on; set data.heldout and "
        f"{PREPARE}",
        {"without a prompt": without_prompt, "repetitive answer": repetitive},
    )


def _prompt(dataset: Dataset, i: int) -> list[int]:
    sample = dataset.sample(i)
    return [int(token) for token in sample.input_ids[: sample.prompt_len]]


def _score(
    target: Target,
    prompts: Mapping[int, Sequence[int]],
    answers: Mapping[int, Decoded],
    own: Mapping[int, Decoded],
    reach: int,
    timed: Collection[int],
) -> DrafterScore:
    kept = [count for answer in answers.values() for count in answer.kept]
    calls = max(len(kept), 1)
    found = (
        _compare(target, i, prompts[i], answer.tokens, own[i].tokens)
        for i, answer in answers.items()
    )
    slots = range(1, reach)
    return DrafterScore(
        tau=sum(kept) / calls,
        target_calls=len(kept),
        new_tokens=sum(kept),
        kept=tuple(kept.count(size) for size in (*slots, reach)),
        acceptance=tuple(sum(count > slot for count in kept) / calls for slot in slots),
        tokens_per_s=_speed({i: answers[i] for i in timed}),
        mismatches=tuple(mismatch for mismatch in found if mismatch is not None),
    )


def _compare(
    target: Target,
    i: int,
    prompt: Sequence[int],
    speculative: Sequence[int],
    greedy: Sequence[int],
) -> Mismatch | None:
    if tuple(speculative) == tuple(greedy):
        return None
    longest = max(len(speculative), len(greedy))
    tokens = [[*text, *[None] * (longest - len(text))] for text in (speculative, greedy)]
    position = next(at for at in range(longest) if tokens[0][at] != tokens[1][at])
    is_cut = position == min(len(speculative), len(greedy))
    return Mismatch(
        prompt=i,
        position=position,
        speculative=tokens[0][position],
        greedy=tokens[1][position],
        gap=None if is_cut else choice_gap(target, prompt, speculative),
    )


def _speed(answers: Mapping[int, Decoded]) -> float:
    seconds = sum(answer.seconds for answer in answers.values())
    tokens = sum(sum(answer.kept) for answer in answers.values())
    return tokens / seconds if seconds else 0.0
