"""torchtitan's Trainer on a CPU, which it knows no device module of: its tiny Llama, random rows, and what it logs.

Without a GPU torchtitan takes the device to be CUDA's, so what its modules have read of the device is replaced.
``torch.distributed.set_timeout``, which it calls after the first step, is newer than torch 2.13. Gloo lacks the reduction that its FSDP
asks for, so its own runs are of one process.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as distributed
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

ROWS, LENGTH, WORDS, STEPS = 8, 16, 2048, 4


class Cpu:
    """What torchtitan asks of ``torch.cuda``."""

    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=2**34))
    memory_stats = staticmethod(lambda device=None: defaultdict(int))
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = reset_peak_memory_stats = empty_cache = synchronize = staticmethod(lambda *_: None)


CPU = {"device_type": "cpu", "device_module": Cpu()}
for name, module in list(sys.modules.items()):
    if name.startswith("torchtitan"):
        vars(module).update({word: value for word, value in CPU.items() if word in vars(module)})


class Tokenizer(BaseTokenizer):
    """None is needed."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Loader(BaseDataLoader):
    """Each rank's rows of random ones, of two documents a row, some without labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.rows, self.ranks, self.rank, self.taken = local_batch_size, dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            every = self.rows * self.ranks
            drawn = torch.randint(0, WORDS, (every, LENGTH + 1), generator=torch.Generator().manual_seed(self.taken))
            positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(every, 1)
            labels = drawn[:, 1:].clone()
            labels[0, :9] = -100
            mine = slice(self.rows * self.rank, self.rows * (self.rank + 1))
            self.taken += 1
            yield {"input": drawn[mine, :-1], "positions": positions[mine]}, labels[mine]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def configuration(folder: Any, local_rows: int, half: str = "float32", **parallelism: int) -> Any:
    """Its own tiny Llama, two layers of it: four steps of eight rows, accumulated over calls of four, checkpoints after two."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.tokenizer, config.dataloader, config.dump_folder, config.debug.seed = Tokenizer.Config(), Loader.Config(), str(folder), 7
    config.training = replace(
        config.training, local_batch_size=local_rows, global_batch_size=ROWS, seq_len=LENGTH, steps=STEPS, max_norm=0.5,
        mixed_precision_param=half,
    )  # fmt: skip
    config.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    config.parallelism = replace(config.parallelism, **parallelism)
    return config


def losses_and_norms(config: Any) -> list[tuple[int, float, float]]:
    """Step, loss and norm of the gradients, summed in float64: torch's own sum in float32 is 1e-4 off where tensors are large."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: list[tuple[int, float, float]] = []
    norms: list[float] = []
    clip = distributed.clip_grad_norm_

    def record(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        whole = [one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad for one in parameters]
        norms.append(sum(one.double().square().sum().item() for one in whole) ** 0.5)
        return clip(parameters, *args, **kwargs)

    distributed.clip_grad_norm_ = record
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_: None
    trainer = Trainer(config)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: found.append((step, loss, norms[-1]))
    trainer.train()
    trainer.close()
    return found
