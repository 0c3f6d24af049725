"""What start-up checks look at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import ConfigError
from common.machine import Machine
from common.model_facts import Architecture, ModelFacts
from common.startup import URL_VARIABLE


class Note(str):
    """A finding that is no fault, but that someone should read."""


@dataclass(frozen=True)
class Subject:
    """A configuration, what is known of its model, and the machine that looks at it.

    `facts` is None as long as nothing is known of the model.
    """

    config: Config
    facts: ModelFacts | None
    machine: Machine

    @property
    def model_dir(self) -> Path:
        return Path(self.config.model.path)

    @property
    def here(self) -> bool:
        """The model is on this machine, so that this is where it may be run."""
        return self.facts is not None and self.facts.here

    @property
    def architecture(self) -> Architecture | None:
        return self.facts.architecture if self.facts else None

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.config.model.dtype == "float32" else 2

    @property
    def devices(self) -> int:
        """GPUs that all roles together would use if each had its own."""
        generator, ranks = self.config.generator, self.config.learner.ranks
        if generator.engine == "simulated":
            return ranks
        return ranks + generator.count * generator.tensor_parallel

    @property
    def alone(self) -> bool:
        """No server is named: all roles of the run are on this machine."""
        return self.config.redis.url is None and URL_VARIABLE not in os.environ

    @property
    def shares_gpus(self) -> bool:
        """Learner and engines have to share the GPUs of this machine."""
        return self.alone and 0 < len(self.machine.gpus) < self.devices

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model; only where the model is here. Loading takes seconds."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the tokenizer in {self.model_dir} cannot be loaded ({error}); fetch the whole "
                "folder of model.path again"
            ) from None
