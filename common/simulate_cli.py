"""The command `dapo simulate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from common.errors import ConfigError
from common.options import Sets

if TYPE_CHECKING:
    from learner.simulation import Setting


def simulate(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="TOML file for batch, generators, admission."),
    ] = None,
    set_: Sets = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Run directory: its recipe, response lengths, times and filter."
        ),
    ] = None,
    max_staleness: Annotated[
        str, typer.Option(metavar="N,N,…", help="Bounds S to try.")
    ] = "0,1,2,4,8",
    generators: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Numbers of generators to try; default: the recipe's."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(metavar="N", help="Samples that one generator runs at a time.")
    ] = None,
    sample_s: Annotated[
        float | None, typer.Option(metavar="X", min=1e-6, help="Mean seconds of one sample.")
    ] = None,
    sigma: Annotated[
        float | None,
        typer.Option(metavar="X", min=0.0, help="Deviation of the logarithm of these seconds."),
    ] = None,
    long_share: Annotated[
        float | None,
        typer.Option(metavar="X", min=0.0, max=1.0, help="Share of groups with a straggler."),
    ] = None,
    long_factor: Annotated[
        float | None,
        typer.Option(metavar="X", min=1.0, help="How many times longer a straggler takes."),
    ] = None,
    train_s: Annotated[
        float | None, typer.Option(metavar="X", min=1e-3, help="Seconds of training per batch.")
    ] = None,
    publish_s: Annotated[
        float | None, typer.Option(metavar="X", min=0.0, help="Seconds of a weight round.")
    ] = None,
    filter_rate: Annotated[
        float | None, typer.Option(metavar="X", min=0.0, max=0.99, help="Share of groups filtered.")
    ] = None,
    policy: Annotated[
        Literal["hold", "drop"] | None,
        typer.Option(metavar="hold|drop", help="As admission.policy."),
    ] = None,
    oversample: Annotated[
        float | None, typer.Option(metavar="X", min=1.0, help="As admission.oversample.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(metavar="N", min=20, help="Batches per run; default: by their size."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all that is drawn.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Advise on max_staleness and generators by simulated runs.

    The admission rule is the real one; lengths, filter and times are drawn. A bound of S lets S
    batches be made while one is trained, so slow groups are waited for less often, at the price
    of older tokens. The rate can never exceed the slower of learner and generators alone, and no
    rule without bias can train batches faster than (slowest group + training + publication) /
    (S + 1): the table shows how near each S comes to both.

    Start from a run that trained a few batches (--run RUN), or from a recipe and your own
    figures (--sample-s, --train-s, --publish-s, --filter-rate). Without either it is the
    reference setting, whose times are in mean sample lengths.

    \b
      dapo simulate --run runs/latest --generators 1,2,4
      dapo simulate --policy drop --max-staleness 0,1,4
    """
    from learner.advice import as_text, simulate_table

    setting = _base(recipe or (run / "config.toml" if run else None), set_)
    shape = _given(sigma=sigma, long_share=long_share, long_factor=long_factor)
    if run:
        setting = _measured(setting, run, sample_s, shape)
    else:
        setting = _drawn(setting, shape | _given(mean_s=sample_s))
    others = _given(
        slots=slots, train_s=train_s, publish_s=publish_s, filter_rate=filter_rate,
        policy=policy, oversample=oversample,
    )  # fmt: skip
    try:
        setting = replace(setting, **others)
    except ValueError as error:
        raise ConfigError(f"{error}; raise --slots") from None
    counts = _numbers("--generators", generators, 1) if generators else [setting.generators]
    bounds = _numbers("--max-staleness", max_staleness, 0)
    table = simulate_table(
        setting, bounds, counts, batches, seed, lambda text: typer.echo(text, err=True)
    )
    typer.echo(json.dumps(table.as_dict()) if json_ else as_text(table))


def _base(recipe: Path | None, sets: list[str] | None) -> Setting:
    """The reference setting, with a recipe's own batch, generators and rule."""
    from common.config import load_config
    from learner.simulation import REFERENCE

    if recipe is None:
        if sets:
            raise ConfigError("--set overrides keys of a recipe; name one")
        return REFERENCE
    config = load_config(recipe, sets)
    admission, generator = config.admission, config.generator
    return replace(
        REFERENCE,
        batch_groups=config.algorithm.groups_per_batch,
        group_size=config.algorithm.group_size,
        generators=generator.count,
        slots=max(generator.max_samples, config.algorithm.group_size),
        filter_rate=REFERENCE.filter_rate if config.algorithm.dynamic_sampling else 0.0,
        oversample=admission.oversample,
        policy=admission.policy,
        recycles=admission.recycles,
    )


def _drawn(setting: Setting, shape: dict[str, Any]) -> Setting:
    """With log-normal lengths."""
    from learner.durations import LogNormal

    assert isinstance(setting.durations, LogNormal)
    return replace(setting, durations=replace(setting.durations, **shape))


def _measured(
    setting: Setting, run: Path, sample_s: float | None, shape: dict[str, Any]
) -> Setting:
    """With the lengths, times and filter of a run."""
    from learner.observed import observe

    if shape:
        raise ConfigError("--run measures lengths: leave out --sigma and what is about stragglers")
    seen = observe(run, sample_s)
    return replace(
        setting,
        durations=seen.durations,
        train_s=seen.train_s,
        publish_s=seen.publish_s,
        filter_rate=seen.filter_rate,
    )


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _numbers(option: str, text: str, least: int) -> list[int]:
    """Integers between commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(f"{option} {text}: write numbers from {least} on, such as 1,2,4")
    return numbers
