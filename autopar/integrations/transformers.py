"""A Trainer of transformers whose model is planned and compiled.

All ranks share one batch: each loads the whole of it, and the compiled module cuts it as planned. The batch is that of data parallelism on
as many processes, ``per_device_train_batch_size`` times their number, so that a script keeps its arguments. Dynamic padding, token counts
and predictions are then those of one process. The Trainer averages losses over ranks, as of batches of their own: equal ones stay as they
are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from autopar.api import compile as compile_model
from autopar.api import plan as plan_model
from autopar.errors import FileError, UsageError
from autopar.integrations.planning import check_planning
from autopar.plan import Plan
from autopar.recording import load
from autopar.rows import Outputs
from autopar.runtime import load_safetensors
from autopar.runtime.ranks.agreement import together
from autopar.runtime.ranks.groups import team_of
from autopar.torch_compat import map_only, map_tensors

try:
    import accelerate  # noqa: F401  the Trainer needs it, and says so only when it is made
    import transformers
except ImportError as error:
    raise ImportError(f"autopar.integrations.transformers: {error}\nhint: pip install 'autopar[integrations]'") from error

OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
"""Optimizers of ``TrainingArguments.optim`` whose states ``autopar.plan`` knows."""
OPTIMIZER_FOLDER, DRAWS_FILE, SCHEDULER_FILE, ARGUMENTS_FILE = "optimizer", "draws.json", "scheduler.pt", "training_args.bin"
"""What a checkpoint holds beside the weights: states of the optimizer in torch's distributed format, the place in the random numbers that
the module draws, and the Trainer's own two."""

REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fp16": (lambda args: args.fp16, "drop it, and pass planning={'compute_dtype': 'bfloat16'}, which needs no scaler"),
    "bf16": (lambda args: args.bf16, "drop it, and pass planning={'compute_dtype': 'bfloat16'}"),
    "fp16_full_eval, bf16_full_eval": (lambda args: args.fp16_full_eval or args.bf16_full_eval, "evaluate in the dtype of the plan"),
    "deepspeed": (lambda args: args.deepspeed, "drop it: the plan splits weights, gradients and optimizer states"),
    "fsdp": (lambda args: args.fsdp, "drop it: the plan splits weights, gradients and optimizer states"),
    "parallelism_config": (lambda args: args.parallelism_config is not None, "drop it: the plan's mesh says how ranks divide the work"),
    "torch_compile": (lambda args: args.torch_compile, "drop it, and pass planning={'execute': 'compiled'}"),
    "activation_checkpointing": (lambda args: args.activation_checkpointing, "drop it: the plan recomputes where memory is short"),
    "neftune_noise_alpha": (lambda args: args.neftune_noise_alpha is not None, "drop it: parts of a compiled module take no hooks"),
    "use_liger_kernel": (lambda args: args.use_liger_kernel, "drop it: its kernels have no rule of sharding"),
    "auto_find_batch_size": (lambda args: args.auto_find_batch_size, "set per_device_train_batch_size; autopar plan says what fits"),
    "split_batches": (lambda args: args.accelerator_config.split_batches, "drop it: all ranks load whole batches"),
    "dispatch_batches": (lambda args: args.accelerator_config.dispatch_batches, "drop it: all ranks load whole batches"),
    "batch_rebalance": (lambda args: args.train_sampling_strategy == "batch_rebalance", "choose another train_sampling_strategy"),
    "several GPUs in one process": (lambda args: args.n_gpu > 1, "start the script with torchrun, one process a GPU"),
}
"""Arguments of the Trainer that a compiled module cannot honour: when one is set, and what to do instead."""


class AutoparTrainer(transformers.Trainer):
    """``transformers.Trainer``, whose model runs as autopar plans it. Under torchrun, every rank makes one.

    Args:
        args, kwargs: those of ``transformers.Trainer``. The batch is ``per_device_train_batch_size`` times the number of ranks.
        plan: a plan or the path of its file. Without one the first rank plans, for the first batch of ``train_dataset``.
        planning: arguments of ``autopar.plan``: ``{"mesh": "dp=2,tp=4", "hardware": "h100-sxm", "memory": "70GiB"}``. Without a mesh the
            best one of all ranks is searched.

    Attributes:
        plan: the plan.
        model: the compiled module, with the model's own methods.

    Raises:
        UsageError: arguments that a compiled module cannot honour; a model that is not of transformers; nothing to plan for. Others as
            ``autopar.plan`` and ``autopar.compile``.
    """

    plan: Plan
    model: Any

    def __init__(
        self, *args: Any, plan: Plan | str | os.PathLike[str] | None = None, planning: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:  # fmt: skip
        options = check_planning(planning or {})
        if plan is not None and set(options) - {"execute"}:
            raise UsageError(f"a plan is given, and how to plan too: {', '.join(options)}", "pass plan= or planning=, not both")
        super().__init__(*args, **kwargs)
        if self.model_init is not None or not isinstance(self.model, transformers.PreTrainedModel):
            hint = "pass model=, a PreTrainedModel; merge adapters into it first"
            raise UsageError(f"a {type(self.model).__name__} cannot be planned by the Trainer", hint)
        self._set_signature_columns_if_needed()  # of the model's own forward
        if plan is None:
            plan = together(lambda: self._find_plan(options), team_of()) if dist.is_initialized() else self._find_plan(options)
        given = load(plan) if isinstance(plan, str | os.PathLike) else plan
        outputs: Outputs = "placed" if self.compute_loss_func is None and self.label_smoother is None else "full"
        module = compile_model(self.model, given, execute=options.get("execute"), device=self.args.device, outputs=outputs)
        name = type(self.model).__name__
        module.__dict__["_get_name"] = lambda: name  # label smoothing shifts the labels of classes that it knows by name
        self.plan, self.model, self.model_wrapped, self.callback_handler.model = module.plan, module, module, module
        self.is_distributed_loading_by_transformers = True  # the Trainer then neither wraps nor splits it

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's own. Raises UsageError: what a compiled module cannot honour is asked for."""
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        refuse_launch(state.mixed_precision, state.dynamo_plugin.backend.value, self.is_fsdp_enabled or self.is_deepspeed_enabled)
        self.accelerator.dataloader_config.dispatch_batches = False
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True  # gradients are reduced in each backward

    def _find_plan(self, options: Mapping[str, Any]) -> Plan | None:
        """The first rank's plan for the first batch of training; None on the others.

        Raises:
            UsageError: no training data, or an optimizer whose states are not known. Others as ``autopar.plan``.
        """
        if self.train_dataset is None:
            raise UsageError("there is neither a plan nor a train_dataset to plan for", "pass plan= or train_dataset=")
        with torch.random.fork_rng(devices=[]):  # the order of batches stays that of a plain Trainer
            batches, items = self.get_batch_samples(iter(self.get_train_dataloader()), 1, self.args.device)
        if not batches:
            raise UsageError("train_dataset has no batch to plan for", "pass plan= or a dataset with rows")
        if self.args.process_index != 0:
            return None
        call = self._find_call(self._prepare_inputs(batches[0]), items)
        chosen = {**options}
        if "optimizer" not in chosen:
            chosen["optimizer"] = self._name_optimizer()
        if "mesh" not in chosen:
            chosen.setdefault("devices", self.args.world_size)
        return plan_model(self.model, (), call, **chosen)

    def _find_call(self, inputs: dict[str, Any], items: Any) -> dict[str, Any]:
        """What ``compute_loss`` passes to the model."""
        try:
            self.compute_loss(_Recorder(), inputs, num_items_in_batch=items)
        except _Recorded as recorded:
            return recorded.inputs
        raise UsageError("compute_loss does not call the model that it is given", "call model(**inputs) in it once")

    def _name_optimizer(self) -> str:
        """Raises UsageError: ``autopar.plan`` does not know what the optimizer keeps."""
        own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        name = "an optimizer of your own" if own else str(self.args.optim.value)
        if name not in OPTIMIZERS:
            hint = "say what it keeps: planning={'optimizer': 'NAME:BYTES,ACCESSES'}, for each element"
            raise UsageError(f"the states of {name} are not known, which the plan has to make room for", hint)
        return OPTIMIZERS[name]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the model stays where it is until its parts are laid on the ranks."""

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """Whole batches, in the order that one process has them in."""
        with _one_process(self.accelerator.state):
            return super()._get_dataloader(dataset, description, batch_size * self.args.world_size, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, of this process: it has the whole batch."""
        with _counted_once(self.args):
            return super()._get_num_items_in_batch(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own. It multiplies by the number of ranks to undo their part in the count, which not every model divides by."""
        with _counted_once(self.args):
            return super().compute_loss(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch's operations: the Trainer sums them over the ranks."""
        return int(super().floating_point_ops(inputs)) // int(self.args.world_size)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """The Trainer's own, which sums over the ranks what they count of one batch."""
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.args.world_size

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own. Ranks have equal losses, labels and predictions, which are not gathered."""
        self.gather_function = self._drop_padding
        return super().evaluation_loop(*args, **kwargs)

    def _drop_padding(self, tensors: Any) -> Any:
        """What a batch gives, cut to its rows: the Trainer repeats the loss of a shorter last batch as often as those of others."""
        state = self.accelerator.gradient_state
        rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return map_tensors(lambda tensor: tensor[:rows], tensors)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """The loss, once for each rank, whole logits and labels. The Trainer repeats losses for the rows that a rank would have."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        losses = None if loss is None else loss.expand(self.args.world_size)
        return losses, map_only(DTensor, lambda tensor: tensor.full_tensor(), logits), labels

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Whole weights in the model's own format, written by the first process. Every rank calls it."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder, state_dict=state_dict, is_main_process=self.args.should_save)
        if self.args.should_save:
            if (written := self.processing_class or getattr(self.data_collator, "tokenizer", None)) is not None:
                written.save_pretrained(folder)
            torch.save(self.args, folder / ARGUMENTS_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Each rank reads its own parts of the weights. Raises FileError: there are none, or parts are missing."""
        files = sorted(Path(resume_from_checkpoint).glob("model*.safetensors"))
        if not files:
            raise FileError(f"{resume_from_checkpoint} holds no weights in safetensors", "name the folder of a checkpoint, checkpoint-N")
        if missing := load_safetensors(self.model, files):
            hint = "resume from a whole checkpoint of the same model"
            raise FileError(f"{resume_from_checkpoint} lacks {len(missing)} weights of the model: {', '.join(missing[:3])}", hint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _states_of_optimizer(self) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer without its wrapper, and its states by the parameters' names."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer, get_optimizer_state_dict(self.model, optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank writes its own parts of the optimizer's states, which any mesh can load."""
        _, states = self._states_of_optimizer()
        dcp.save({"optimizer": states}, checkpoint_id=Path(output_dir, OPTIMIZER_FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """What ``_save_optimizer_and_scheduler`` wrote; nothing where only the model was saved.

        Raises:
            FileError: the states are those of a plain Trainer.
        """
        if checkpoint is None or not Path(checkpoint, OPTIMIZER_FOLDER).is_dir():
            if checkpoint is not None and Path(checkpoint, "optimizer.pt").exists():
                hint = f"resume from a checkpoint of {type(self).__name__}, or remove the file to start with new states"
                raise FileError(f"{checkpoint} holds optimizer.pt of a plain Trainer, which knows its states by number, not by name", hint)
            return
        optimizer, states = self._states_of_optimizer()
        dcp.load({"optimizer": states}, checkpoint_id=Path(checkpoint, OPTIMIZER_FOLDER))
        set_optimizer_state_dict(self.model, optimizer, states)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_FILE), weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            draws = {"seed": self.model.dropout_seed, "step": self.model.dropout_step}
            Path(output_dir, DRAWS_FILE).write_text(json.dumps(draws), encoding="utf-8")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint, DRAWS_FILE)).is_file():
            draws = json.loads(path.read_text(encoding="utf-8"))
            self.model.dropout_seed, self.model.dropout_step = draws["seed"], draws["step"]


class _Recorded(Exception):
    """Arguments of a model that was called; ends the call."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__("recorded")
        self.inputs = inputs


class _Recorder:
    """Stands for a model: what it is called with is thrown."""

    def __call__(self, **inputs: Any) -> Any:
        raise _Recorded(inputs)


@contextmanager
def _counted_once(args: Any) -> Iterator[None]:
    """The Trainer takes what this process counts for all there is: ranks do not add up their counts of one batch."""
    asked, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    try:
        yield
    finally:
        args.average_tokens_across_devices = asked


@contextmanager
def _one_process(state: Any) -> Iterator[None]:
    """Accelerate's state says that this process is the only one: what it prepares within is not divided among ranks."""
    ranks, rank = state.num_processes, state.process_index
    state.num_processes, state.process_index = 1, 0
    try:
        yield
    finally:
        state.num_processes, state.process_index = ranks, rank


def refuse_arguments(args: Any) -> None:
    """Raises UsageError: the Trainer's arguments ask for what a compiled module cannot honour."""
    for name, (is_set, hint) in REFUSED.items():
        if is_set(args):
            raise UsageError(f"the Trainer is asked for {name}, which a compiled module cannot honour", hint)


def refuse_launch(mixed_precision: str, dynamo: str, wraps: bool) -> None:
    """Raises UsageError: ``accelerate launch``, by its file or the environment, asks for what a compiled module cannot honour.

    Args:
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        dynamo: the backend of ``torch.compile``, ``NO`` for none.
        wraps: whether FSDP or DeepSpeed is on.
    """
    for name, is_set in (("mixed precision", mixed_precision != "no"), ("dynamo", dynamo != "NO"), ("FSDP or DeepSpeed", wraps)):
        if is_set:
            hint = "start the script with torchrun; planning= takes compute_dtype and execute"
            raise UsageError(f"accelerate launch asks for {name}, which a compiled module cannot honour", hint)
