"""One of two processes that add up their numbers: `python -m common.collective_probe RANK FILE`.

Prints what torch is and has, as JSON, after an all-reduce over gloo on the loopback interface, and
over NCCL where each of the two has a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

WORLD = 2
LIMIT_S = 40.0


def main(rank: int, meeting: str) -> dict[str, Any]:
    """Facts of torch on this machine; raises whatever torch does if a collective fails."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=limit
    )
    facts: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "nccl": None,
        "gloo_sum": _sum(torch.tensor([rank + 1.0])), "nccl_sum": None,
    }  # fmt: skip
    if gpus:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if gpus >= WORLD:
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl", timeout=limit)
        facts["nccl_sum"] = _sum(torch.tensor([rank + 1.0], device=f"cuda:{rank}"), group)
    dist.destroy_process_group()
    return facts


def _sum(number: Any, group: Any = None) -> float:
    import torch.distributed as dist

    dist.all_reduce(number, group=group)
    return float(number.item())


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2])))
