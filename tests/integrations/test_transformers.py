"""AutoparTrainer beside the Trainer of transformers: a tiny Llama on two gloo ranks, and on one process."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from autopar.errors import FileError, UsageError
from autopar.verify.launch import run_ranks
from tests.runtime.test_training import on_ranks, refused, whole

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which the Trainer of transformers needs")
own = pytest.importorskip("autopar.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SPLIT = {"mesh": "2", "hardware": "cpu-cluster", "constraints": {"input:input_ids": "S0 R"}}
TENSORS = {"mesh": "2", "hardware": "cpu-cluster", "constraints": {"*.mlp.gate_proj.weight": "S0 R", "input:input_ids": "R R"}}


class Rows(Dataset[Any]):
    """Rows of eight tokens. Up to three of a row have no label."""

    def __init__(self, count: int, labels: bool = True) -> None:
        self.ids = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))
        self.labels = labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = torch.where(torch.arange(8) < index % 4, -100, self.ids[index])
        return {"input_ids": self.ids[index]} | ({"labels": labels} if self.labels else {})


class Stream(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return (Rows(20)[index] for index in range(self.count))


def llama(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        use_cache=False, tie_word_embeddings=True, attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


ALL = {
    "num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "learning_rate": 1e-2, "weight_decay": 0.1,
    "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True,
    "include_num_input_tokens_seen": "all",
}  # fmt: skip
SHOWN = ("loss", "eval_loss", "train_loss", "grad_norm", "learning_rate", "eval_accuracy", "epoch", "num_input_tokens_seen", "total_flos")


def trainer_of(cls: Any, folder: Path, rows: int, args: Mapping[str, Any], **more: Any) -> Any:
    """A Trainer that takes ``rows`` rows a process, of 20: batches of 8, 8 and 4 where the processes take 8."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=rows, per_device_eval_batch_size=rows, **{**ALL, **args}
    )
    return cls(args=args, **{"model": llama(), "train_dataset": Rows(20), "eval_dataset": Rows(10), "compute_metrics": accuracy, **more})


def ours(folder: Path, args: Mapping[str, Any], **more: Any) -> Any:
    """On one of two ranks."""
    return trainer_of(own.AutoparTrainer, folder, 4, args, **({"planning": SPLIT} if "plan" not in more else {}) | more)


def theirs(folder: Path, args: Mapping[str, Any], **more: Any) -> Any:
    """On the one process."""
    return trainer_of(transformers.Trainer, folder, 8, args, **more)


def alone(function: Callable[[], Any]) -> Any:
    """What a function gives in a process of its own that no launcher has started."""
    def run(rank: int) -> Any:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        return function()

    return run_ranks(run, 1, alone=True)[0]


def history(trainer: Any, after: int = 0) -> list[tuple[str, float]]:
    return [(name, line[name]) for line in trainer.state.log_history if line["step"] > after for name in SHOWN if name in line]


def same(found: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> bool:
    names = [name for name, _ in found] == [name for name, _ in wanted]
    return names and all(math.isclose(one, other, rel_tol=2e-6) for (_, one), (_, other) in zip(found, wanted, strict=True))


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def train(trainer: Any) -> tuple[float, list[tuple[str, float]], torch.Tensor, list[str]]:
    """Evaluates, trains with evaluations, predicts without labels, and saves."""
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    predicted = trainer.predict(Rows(10, labels=False))
    trainer.save_model()
    return before, history(trainer), torch.tensor(predicted.predictions), sorted(predicted.metrics)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of the plain Trainer, with its checkpoints, and what it gave."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, alone(lambda: train(theirs(folder, {**EVALUATED, "save_strategy": "steps", "save_steps": 2})))


@pytest.mark.parametrize("planning", [SPLIT, TENSORS], ids=["batch split", "weights split"])
def test_it_trains_evaluates_and_predicts_as_one_process_does(planning: Any, one_process: tuple[Path, Any], tmp_path: Path) -> None:
    """Accumulation, clipping, decay, scheduler, a shorter last batch, unevenly masked labels, metrics, counts of tokens."""
    folder, (before, losses, logits, metrics) = one_process
    for found in on_ranks(lambda rank: train(ours(tmp_path, EVALUATED, planning=planning)), 2):
        assert found[0] == pytest.approx(before, rel=1e-6)
        assert same(found[1], losses), (found[1], losses)
        assert found[2].shape == (10, 8, 64) and torch.allclose(found[2], logits, atol=1e-4) and found[3] == metrics
    kept, wanted = (transformers.LlamaForCausalLM.from_pretrained(place).state_dict() for place in (tmp_path, folder))
    assert all(torch.allclose(kept[name], tensor, atol=1e-4) for name, tensor in wanted.items())
    assert (tmp_path / "training_args.bin").exists()


@pytest.mark.slow
def test_it_resumes_by_another_plan_and_loads_the_best_weights(one_process: tuple[Path, Any], tmp_path: Path) -> None:
    """A checkpoint between two epochs, read by ranks whose weights are split otherwise."""
    plain, (_, losses, *_) = one_process
    args = {**EVALUATED, "save_strategy": "steps", "save_steps": 2}

    def run(rank: int) -> tuple[Any, Any, list[bool], str | None]:
        first = ours(tmp_path / "first", args)
        first.train()
        first.plan.save(tmp_path / f"plan-{rank}.json")
        other = ours(tmp_path / "other", {**args, "load_best_model_at_end": True}, planning=TENSORS)
        other.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
        best = transformers.LlamaForCausalLM.from_pretrained(other.state.best_model_checkpoint).state_dict()
        loaded = [torch.equal(whole(tensor), best[name]) for name, tensor in other.model.state_dict().items()]
        foreign = ours(tmp_path / "foreign", args, plan=tmp_path / f"plan-{rank}.json")
        said = refused(lambda: foreign.train(resume_from_checkpoint=str(plain / "checkpoint-2")))
        return history(first), history(other, after=2), loaded, said

    for first, resumed, loaded, said in on_ranks(run, 2):
        after = [pair for pair in losses if pair[0] != "train_loss"][-len(resumed) + 1 :]
        assert same(first, losses) and same([pair for pair in resumed if pair[0] != "train_loss"], after), (resumed, after)
        assert all(loaded)
        assert "optimizer.pt of a plain Trainer" in said and "\nhint: " in said

    def one_process_resumes() -> Any:
        trainer = trainer_of(own.AutoparTrainer, tmp_path / "alone", 8, args, planning={"hardware": "cpu-cluster"})
        trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
        return [pair for pair in history(trainer, after=2) if pair[0] != "train_loss"]

    assert same(alone(one_process_resumes), after)


@pytest.mark.slow
def test_half_precision_is_the_plans(tmp_path: Path) -> None:
    def run() -> tuple[list[str], float, float]:
        trainer = trainer_of(
            own.AutoparTrainer, tmp_path, 8, {"max_steps": 2}, planning={"hardware": "cpu-cluster", "compute_dtype": "bfloat16"}
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return sorted({str(one.dtype) for one in trainer.model.parameters()}), before, trainer.state.log_history[0]["loss"]

    dtypes, before, loss = alone(run)
    wanted = alone(lambda: theirs(tmp_path, {}).evaluate()["eval_loss"])
    assert dtypes == ["torch.float32"] and before == pytest.approx(wanted, rel=5e-3) and before != wanted and 3 < loss < 5


@pytest.mark.slow
def test_dropout_goes_on_where_a_checkpoint_was(tmp_path: Path) -> None:
    args = {"save_strategy": "steps", "save_steps": 2}

    def run(rank: int) -> tuple[Any, Any]:
        first, other = (ours(tmp_path / name, args, model=llama(dropout=0.3)) for name in ("first", "other"))
        first.train()
        other.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
        return [pair for pair in history(first, after=2) if pair[0] != "train_loss"], history(other, after=2)

    for first, resumed in on_ranks(run, 2):
        assert same([pair for pair in resumed if pair[0] != "train_loss"], first) and len(first) > 4


def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss outside of the model."""
    targets = torch.nn.functional.one_hot(labels.clamp(min=0), 64)
    return (outputs["logits"] - targets).square().sum() / num_items_in_batch


OTHERS: dict[str, dict[str, Any]] = {
    "a loss of one's own": {"compute_loss_func": squared},
    "label smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "a stream of rows": {"args": {"max_steps": 4}, "train_dataset": Stream()},
    "rows by length": {"args": {"train_sampling_strategy": "group_by_length"}},
    "no scaling by tokens": {"args": {"average_tokens_across_devices": False}},
}


@pytest.mark.slow
def test_other_settings_train_as_one_process_does(tmp_path: Path) -> None:
    def losses(make: Callable[..., Any]) -> list[Any]:
        found = []
        for number, setting in enumerate(OTHERS.values()):
            trainer = make(tmp_path / str(number), setting.get("args", {}), **{k: v for k, v in setting.items() if k != "args"})
            trainer.train()
            found.append(history(trainer))
        return found

    wanted = alone(lambda: losses(theirs))
    for found in on_ranks(lambda rank: losses(ours), 2):
        for name, one, other in zip(OTHERS, found, wanted, strict=True):
            assert same(one, other), (name, one, other)


class Classes(Dataset[Any]):
    """Rows of eight tokens, each of one of three classes."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": Rows(20).ids[index], "labels": index % 3}


def test_a_loss_that_takes_no_count_of_labels_is_that_of_one_process(tmp_path: Path) -> None:
    """It was multiplied by the number of ranks, and its gradients too."""

    def losses(make: Callable[..., Any]) -> list[tuple[str, float]]:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        trainer = make(tmp_path, {"max_steps": 2}, model=model, train_dataset=Classes(), eval_dataset=Classes())
        trainer.train()
        return history(trainer)

    wanted = alone(lambda: losses(theirs))
    assert len(wanted) > 6 and all(same(found, wanted) for found in on_ranks(lambda rank: losses(ours), 2))


def test_a_single_process_trains_too(one_process: tuple[Path, Any], tmp_path: Path) -> None:
    _, losses, *_ = one_process[1]

    def run() -> Any:
        trainer = trainer_of(own.AutoparTrainer, tmp_path, 8, EVALUATED, planning={"hardware": "cpu-cluster"})
        trainer.train()
        return history(trainer)

    assert same(alone(run), losses)


WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "half precision": ({"args": {"bf16": True}}, "is asked for bf16"),
    "recomputation": ({"args": {"activation_checkpointing": True}}, "is asked for activation_checkpointing"),
    "noise": ({"args": {"neftune_noise_alpha": 1.0}}, "is asked for neftune_noise_alpha"),
    "batches by rank": ({"args": {"train_sampling_strategy": "batch_rebalance"}}, "is asked for batch_rebalance"),
    "parts of batches": ({"args": {"accelerator_config": {"split_batches": True}}}, "is asked for split_batches"),
    "no model of transformers": ({"model": torch.nn.Linear(8, 8)}, "a Linear cannot be planned by the Trainer"),
    "a factory of models": ({"model": None, "model_init": llama}, "cannot be planned by the Trainer"),
    "an unknown option": ({"planning": {"meshes": "2"}}, "planning has no option 'meshes'"),
    "a plan and how to plan": ({"plan": "plan.json", "planning": SPLIT}, "a plan is given, and how to plan too: mesh, hardware"),
    "nothing to plan for": ({"train_dataset": None}, "neither a plan nor a train_dataset"),
    "an empty stream": ({"args": {"max_steps": 2}, "train_dataset": Stream(0)}, "no batch to plan for"),
    "an unknown optimizer": ({"args": {"optim": "adafactor"}}, "the states of adafactor are not known"),
    "no such plan": ({"plan": "nowhere.json"}, "nowhere.json"),
}


def test_what_cannot_be_honoured_is_refused_in_words(tmp_path: Path) -> None:
    def run() -> list[str | None]:
        found = []
        for setting, _ in WORDS.values():
            more = {name: value for name, value in setting.items() if name != "args"}
            found.append(refused(lambda: trainer_of(own.AutoparTrainer, tmp_path, 8, setting.get("args", {}), **more)))  # noqa: B023
        return found

    for (name, (_, words)), found in zip(WORDS.items(), alone(run), strict=True):
        assert found is not None and words in found and found.count("\nhint: ") == 1 and len(found.splitlines()) == 2, (name, found)


LAUNCHES = [(("bf16", "NO", False), "mixed"), (("no", "INDUCTOR", False), "dynamo"), (("no", "NO", True), "FSDP")]


@pytest.mark.parametrize(("asked", "word"), LAUNCHES)
def test_what_a_launcher_asks_for_is_refused(asked: tuple[str, str, bool], word: str) -> None:
    with pytest.raises(UsageError, match=f"accelerate launch asks for {word}.*\nhint: start the script with torchrun"):
        own.refuse_launch(*asked)
    own.refuse_launch("no", "NO", False)


def test_what_is_overridden_is_there_with_the_same_arguments() -> None:
    """Most of it is named with an underscore, so that a release may change it."""
    base, added = transformers.Trainer, {"_find_plan", "_find_call", "_name_optimizer", "_states_of_optimizer", "_drop_padding"}
    for name, function in vars(own.AutoparTrainer).items():
        if inspect.isfunction(function) and name not in added | {"__init__"}:
            theirs, ours = (list(inspect.signature(one).parameters.values()) for one in (getattr(base, name), function))
            names = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
            assert names == [one.name for one in theirs][: len(names)], name
            assert len(names) == len(theirs) or ours[-1].kind is inspect.Parameter.VAR_KEYWORD, name
    loop = inspect.getsource(base.evaluation_loop) + inspect.getsource(base._run_epoch) + inspect.getsource(base._prepare_for_training)
    for word in ("self.gather_function(", 'plugin_kwargs.get("sync_each_batch"', "self.is_distributed_loading_by_transformers"):
        assert word in loop, word


def test_a_checkpoint_without_weights_is_named(tmp_path: Path) -> None:
    trainer = object.__new__(own.AutoparTrainer)
    with pytest.raises(FileError, match="holds no weights"):
        trainer._load_from_checkpoint(str(tmp_path))
