"""What is checked before a run starts: each check is one line, and the text of a fault its remedy.

`dapo run RECIPE --dry-run` makes all checks; `require_sound`, at the start of a run and of a
learner, those that are cheap and certain. A check returns what it found, a `Note` if someone
should read it, and raises a `DapoError` where the run could only go wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from common.config import Config
from common.errors import ConfigError, DapoError
from common.machine import this_machine
from common.memory_checks import devices, engine_memory, learner_memory_check
from common.model_facts import model_facts, public_name
from common.own_checks import own_checkers
from common.startup import base_dir
from common.subject import Note, Subject
from common.tokenizer_checks import data_rows, end_of_responses, template, vocabulary

Check = Callable[[Subject], str]


def examine(config: Config) -> Subject:
    """What the checks need to know, gathered once."""
    return Subject(config, model_facts(Path(config.model.path)), this_machine())


def dry_run_text(config: Config) -> str:
    """One line per check: `ok`, `note` or `FAULT`, its name, and what was found.

    Raises:
        ConfigError: at least one check failed; the message names each and has all lines.
    """
    subject = examine(config)
    lines, faults = run_checks(subject, CHECKS)
    if faults:
        raise ConfigError("; ".join(faults) + "\n" + "\n".join(lines))
    return "\n".join(lines)


def require_sound(config: Config) -> None:
    """Refuse what is certain to go wrong.

    Raises:
        ConfigError: naming each fault, its keys and the remedy.
    """
    _, faults = run_checks(examine(config), CERTAIN)
    if faults:
        raise ConfigError("; ".join(faults))


def run_checks(subject: Subject, checks: Mapping[str, Check]) -> tuple[list[str], list[str]]:
    """The line of each check, and the texts of those that failed."""
    lines, faults = [], []
    for name, check in checks.items():
        try:
            found = check(subject)
            lines.append(f"{'note ' if isinstance(found, Note) else 'ok   '} {name}: {found}")
        except DapoError as error:
            faults.append(str(error))
            lines.append(f"FAULT {name}: {error}")
    return lines, faults


def model(subject: Subject) -> str:
    """Where the model is, or how to get it."""
    folder, base = subject.model_dir, base_dir(subject.config)
    if subject.facts is None and base is not None and not (base / "base.json").exists():
        return f"`dapo run` makes {base} first"
    if not subject.here:
        name = public_name(folder)
        if name is None:
            return Note(
                f"{folder} is not on this machine, and what depends on it is not checked; set "
                "model.path to a Hugging Face folder"
            )
        return Note(
            f"{folder} is not on this machine; checked by what {name} publishes. Get it with "
            f"`hf download {name} --local-dir {folder}`"
        )
    size = subject.architecture and f"{subject.architecture.parameters:,} parameters"
    assert subject.facts is not None
    return f"{folder}, {subject.facts.kind}, {size or 'of a kind whose size is not estimated'}"


def context(subject: Subject) -> str:
    """The run's length against the positions that the model was made for."""
    settings, facts = subject.config.model, subject.facts
    if facts is None or facts.positions is None:
        return "not checked: nothing is known of the model's positions"
    positions, raised = facts.positions, settings.max_positions
    if raised is not None and raised <= positions:
        raise ConfigError(
            f"model.max_positions = {raised} does not raise the model's max_position_embeddings "
            f"= {positions}; leave it out"
        )
    if settings.max_length > (raised or positions):
        raise ConfigError(
            f"model.max_length = {settings.max_length} is above the model's "
            f"max_position_embeddings = {raised or positions} ({facts.source}); lower it, or raise "
            f"the positions with model.max_positions = {settings.max_length}"
        )
    if raised is not None:
        return Note(
            f"{settings.max_length} of {raised} positions, raised from {positions}: the model has "
            "not seen those beyond"
        )
    return f"{settings.max_length} of {positions} positions"


def heads(subject: Subject) -> str:
    """Attention heads against the devices that an engine splits them over."""
    shape, parts = subject.architecture, subject.config.generator.tensor_parallel
    if subject.config.generator.engine == "simulated":
        return "not checked: a simulated engine has none"
    if shape is None:
        return "not checked: nothing is known of the model's heads"
    uneven = shape.kv_heads % parts and parts % shape.kv_heads
    if shape.heads % parts or uneven:
        raise ConfigError(
            f"generator.tensor_parallel = {parts} does not divide the model's {shape.heads} "
            f"attention heads with {shape.kv_heads} of keys and values; choose a common divisor"
        )
    return (
        f"{shape.heads} heads, {shape.kv_heads} of keys and values; generator.tensor_parallel = "
        f"{parts}"
    )


def data(subject: Subject) -> str:
    """Whether the data files are here, or how to make them."""
    config = subject.config
    base = base_dir(config)
    names = [*config.data.train, *(config.data.heldout or [])]
    missing = [name for name in names if not Path(name).exists()]
    if base is not None and any(name.startswith(str(base)) for name in missing):
        return f"`dapo run` makes {base} first"
    if missing:
        return Note(
            f"not on this machine: {', '.join(missing)}; `dapo data prepare INPUT... --out FILE` "
            "makes such a file"
        )
    return ", ".join(names)


def batch(subject: Subject) -> str:
    """How a batch divides into optimizer steps and ranks."""
    algorithm, ranks = subject.config.algorithm, subject.config.learner.ranks
    steps = algorithm.updates_per_batch
    groups = algorithm.groups_per_batch // steps
    found = (
        f"{algorithm.groups_per_batch} groups of {algorithm.group_size}; optimizer steps: {steps}, "
        f"each of {groups * algorithm.group_size} sequences"
    )
    if groups < ranks:
        return Note(
            f"{found}; {groups} groups a step leave {ranks - groups} of learner.ranks = {ranks} "
            "idle: lower algorithm.updates_per_batch or the ranks"
        )
    return f"{found}; groups for each rank and step: {groups / ranks:g}"


def room(subject: Subject) -> str:
    """Samples that may be under way against the engines' places."""
    config = subject.config
    algorithm, generator, admission = config.algorithm, config.generator, config.admission
    places = generator.count * generator.max_samples
    groups = (admission.max_staleness + 1) * algorithm.groups_per_batch
    started = int(groups * admission.oversample) * algorithm.group_size
    found = (
        f"{places} places (generator.count x generator.max_samples) for up to {started} samples "
        "under way"
    )
    if generator.max_samples < algorithm.group_size:
        return Note(
            f"{found}; a group of {algorithm.group_size} takes turns in generator.max_samples = "
            f"{generator.max_samples}: raise it"
        )
    if places >= 2 * started:
        return Note(
            f"{found}: half of the places stay empty; lower generator.max_samples or "
            "generator.count, or raise admission.max_staleness or algorithm.groups_per_batch"
        )
    return found


def timing(subject: Subject) -> str:
    """Engines are silent while a weight round has them paused."""
    silence = subject.config.admission.silence_s
    longest = subject.config.publish.round_timeout_s
    if silence < longest:
        raise ConfigError(
            f"admission.silence_s = {silence:g} is shorter than publish.round_timeout_s = "
            f"{longest:g}: a long weight round would pass for silence, and its groups would start "
            "anew; raise the first or lower the second"
        )
    return f"a group starts anew after {silence:g} s of silence, a round ends within {longest:g} s"


def evaluation(subject: Subject) -> str:
    """Whether the run's accuracy is measured on problems that it does not train on."""
    config = subject.config
    if config.data.heldout is None:
        return Note("no accuracy is measured: data.heldout names no file")
    both = sorted({*config.data.heldout} & {*config.data.train})
    if both:
        return Note(
            f"{', '.join(both)} is in data.train and in data.heldout: the accuracy will be that of "
            "problems trained on"
        )
    often = f"every {config.eval.every} batches" if config.eval.every else "before and after"
    limit = f"up to {config.eval.problems}" if config.eval.problems else "all"
    return f"{often}, {limit} problems of each file, {config.eval.samples} samples each"


CHECKS: dict[str, Check] = {
    "model": model,
    "context": context,
    "heads": heads,
    "template": template,
    "vocabulary": vocabulary,
    "end of responses": end_of_responses,
    "data": data,
    "checkers": own_checkers,
    "rows": data_rows,
    "batch": batch,
    "room": room,
    "timing": timing,
    "evaluation": evaluation,
    "devices": devices,
    "learner memory": learner_memory_check,
    "generator memory": engine_memory,
}

CERTAIN = {name: CHECKS[name] for name in ("context", "heads", "timing", "devices")}
"""Made at every start: they load nothing, and what they call a fault is one."""
