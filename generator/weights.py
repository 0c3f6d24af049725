"""How a vLLM worker takes new weights: the weight-transfer engine "dapo".

One round: `init_transfer_engine` (when the members changed), `start_weight_update`,
`update_weights`, `finish_weight_update`. The manifest is compared with the checkpoint that the
worker was started from before a byte is received, because vLLM accepts half an update in silence.

A failure is recorded and not raised. vLLM's multi-process executor stops reading the workers'
answers at the first error and takes the rest for answers to later calls, so an exception in one
of several workers would leave them out of step for good. Whoever drives the round finishes in
any case and then asks every worker for its `weight_failure`; a later full round heals.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from common.buckets import plan_buckets
from common.errors import RoundError
from common.transport import WeightGroup, join_store, local_address, receive_buckets

logger = init_logger(__name__)

Shapes = dict[str, tuple[int, ...]]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where and as whom the workers of one engine join a round's group."""

    host: str
    port: int
    prefix: str
    rank_offset: int
    """Rank of the engine's first tensor-parallel worker; rank 0 is the learner's."""
    world: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Deadline of forming the group and of each operation in it."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What is about to be sent: every tensor of the first load, in order, in one dtype."""

    manifest: list[tuple[str, list[int]]]
    dtype: str
    bucket_bytes: int
    version: str


class WeightReport:
    """Added to vLLM's worker class, so that a remote call can ask how an update went."""

    weight_transfer_engine: BroadcastEngine | None

    def weight_failure(self) -> str | None:
        """What went wrong since the update was started; None if nothing."""
        engine = self.weight_transfer_engine
        return engine.failure if engine is not None else "no weight transfer engine"


class BroadcastEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets from the learner and loads them layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.failure: str | None = None
        self._group: WeightGroup | None = None
        self._expected = checkpoint_shapes(Path(self.model_config.model))
        self._loading = False
        self._complete = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave the old group and form the new one."""
        self.shutdown()
        self.failure = None
        try:
            self._group = self._form(init_info)
        except Exception as error:
            self._fail(error)

    def _form(self, info: InitInfo) -> WeightGroup:
        store = join_store(info.host, info.port, info.timeout_s)
        rank = info.rank_offset + self.parallel_config.rank
        return WeightGroup.form(
            info.backend,
            store,
            info.prefix,
            rank,
            info.world,
            info.timeout_s,
            local_address(info.host, info.port),
        )

    def start_weight_update(self) -> None:
        """Nothing is touched yet: the weights stay whole until the first bucket is here."""
        self._complete = False
        if self._group is not None:
            self.failure = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load everything; a failure is recorded and the model left half-updated."""
        try:
            super().update_weights(update_info)
        except Exception as error:
            self._fail(error)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._group is None:
            raise RoundError(self.failure or "this worker is in no weight group")
        shapes: Shapes = {name: tuple(shape) for name, shape in update_info.manifest}
        if self._expected is None:
            self._expected = shapes  # no safetensors: the first manifest is the measure
        check_manifest(shapes, self._expected, self._optional())
        for bucket in self._buckets(self._group, update_info):
            if not self._loading:
                self._loading = True
                initialize_layerwise_reload(self.model)
            self.model.load_weights(bucket)
        self._complete = True

    def _buckets(
        self, group: WeightGroup, info: UpdateInfo
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Named views into each bucket. Buckets are not reused: the layerwise reload keeps the
        views of a layer until the layer is complete."""
        dtype = getattr(torch, info.dtype)
        sizes = [math.prod(shape) * dtype.itemsize for _, shape in info.manifest]
        plan = plan_buckets(sizes, info.bucket_bytes)
        byte_counts = [sum(sizes[i] for i in bucket) for bucket in plan]
        for number, octets in receive_buckets(group, byte_counts, self.device):
            named, start = [], 0
            for i in plan[number]:
                name, shape = info.manifest[i]
                part = octets[start : start + sizes[i]].view(dtype).view(*shape)
                named.append((name, part))
                start += sizes[i]
            yield named

    def finish_weight_update(self) -> None:
        """Put the model's tensors in place, also after a failure, so that a new round can start."""
        try:
            if self._loading:
                finalize_layerwise_reload(self.model, self.model_config)
                refresh_tied(self.model)
                self._loading = False
            if not self._complete and self.failure is None:
                raise RoundError("finished without an update")
        except Exception as error:
            self._fail(error)

    def shutdown(self) -> None:
        """Leave the group; the weights stay as they are."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _optional(self) -> set[str]:
        """Names that a checkpoint may hold and a manifest may lack, and the other way round."""
        tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        return {"lm_head.weight"} if tied else set()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, RoundError):
            logger.exception("weight update failed")
        self.failure = self.failure or f"{type(error).__name__}: {error}"


def refresh_tied(model: torch.nn.Module) -> None:
    """Have the layers that share another layer's weight take it up again.

    On a CPU a layer multiplies with a packed copy of its weight. The reload packs anew what it
    has loaded, and a tied output layer loads nothing: it would go on with the old weights.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        method = getattr(layer, "quant_method", None)
        if weight is not None and method is not None and id(weight) in seen:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))


def check_manifest(manifest: Shapes, expected: Shapes, optional: set[str]) -> None:
    """Refuse a manifest that is not exactly the checkpoint's tensors, but for `optional` ones.

    Raises:
        RoundError: naming tensors that are missing, unknown or of another shape.
    """
    missing = [name for name in expected if name not in manifest and name not in optional]
    unknown = [name for name in manifest if name not in expected and name not in optional]
    if missing or unknown:
        parts = [
            f"{what} {_some(names)}"
            for what, names in (("lacks", missing), ("has the unknown", unknown))
            if names
        ]
        raise RoundError(f"the manifest {' and '.join(parts)}; nothing was loaded")
    for name, shape in manifest.items():
        if expected.get(name, shape) != shape:
            raise RoundError(f"{name} has shape {list(expected[name])}, not {list(shape)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def checkpoint_shapes(folder: Path) -> Shapes | None:
    """Name and shape of every tensor of a folder's safetensors files; None if it has none.

    Only the headers are read. Rotary frequencies, which old checkpoints hold as buffers, are
    left out: they are computed and not loaded.
    """
    shapes: Shapes = {}
    for path in _weight_files(folder):
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        shapes.update(
            (name, tuple(entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__" and not name.endswith("rotary_emb.inv_freq")
        )
    return shapes or None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("*.safetensors"))
