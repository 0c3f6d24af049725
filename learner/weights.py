"""The weights of the policy, whatever ZeRO stage holds them: named, checked, gathered in buckets.

Every method is called on every rank, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.buckets import plan_buckets
from common.errors import NumericalError
from learner.runtime import agree, deepspeed

Shape = tuple[int, ...]


class Weights:
    """The parameters of a model; `partitioned` under ZeRO-3."""

    def __init__(self, model: Any, partitioned: bool) -> None:
        self.parameters: list[tuple[str, Any]] = list(model.named_parameters())
        self._partitioned = partitioned
        self._rank = dist.get_rank()

    def manifest(self) -> list[tuple[str, Shape]]:
        """Name (as in the Hugging Face checkpoint) and shape of every parameter; tied ones once."""
        return [(name, tuple(_whole(parameter))) for name, parameter in self.parameters]

    def buckets(
        self, bucket_bytes: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[tuple[str, Shape]], Tensor | None]]:
        """All weights in packs of whole tensors: (manifest entries, flat 1-D tensor).

        The flat tensor is on the device of rank 0 and None elsewhere. Iterate on all ranks in
        step; stopping early is allowed if all ranks stop at the same bucket. The cuts are
        `plan_buckets` of the sizes in `dtype`.

        Raises:
            NumericalError: before the first bucket, on all ranks, if a weight is not finite.
        """
        self._require_finite()
        manifest = self.manifest()
        sizes = [math.prod(shape) * dtype.itemsize for _, shape in manifest]
        for bucket in plan_buckets(sizes, bucket_bytes):
            parameters = [self.parameters[index][1] for index in bucket]
            yield [manifest[index] for index in bucket], self._gather(parameters, dtype)

    @torch.no_grad()
    def _gather(self, parameters: list[Any], dtype: torch.dtype) -> Tensor | None:
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._partitioned):
            if self._rank != 0:
                return None
            return torch.cat([parameter.flatten().to(dtype) for parameter in parameters])

    @torch.no_grad()
    def _require_finite(self) -> None:
        """Every rank checks what it owns, so that nothing has to be gathered for it."""
        owned = [self._owned(parameter) for _, parameter in self.parameters]
        finite = torch.stack([part.isfinite().all() for part in owned])
        bad = torch.arange(len(owned), device=finite.device).masked_fill(finite, len(owned)).min()
        (first,) = agree([int(bad)], dist.ReduceOp.MIN, finite.device)
        if first < len(owned):
            raise NumericalError(
                f"weight {self.parameters[first][0]} is not finite: nothing is published; "
                "resume from the last checkpoint"
            )

    def _owned(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter, without padding; all of it below ZeRO-3."""
        if not self._partitioned:
            return torch.as_tensor(parameter)
        part: Tensor = parameter.ds_tensor.flatten()
        rest = math.prod(_whole(parameter)) - self._rank * part.numel()
        return part[: max(0, rest)]


def _whole(parameter: Any) -> Shape:
    """Shape of a parameter before ZeRO-3 cut it."""
    return getattr(parameter, "ds_shape", parameter.shape)
