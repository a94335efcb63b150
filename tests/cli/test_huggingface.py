"""``hf:`` targets, with a package in the place of transformers that does what that one does."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cli.huggingface import build
from autopar.errors import CaptureError, UsageError


class Small(nn.Module):
    """A causal language model as transformers makes them: token ids and labels by name, the loss in a dictionary."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True, **settings)
        self.embed = nn.Embedding(settings["vocab"], 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.embed(input_ids) @ self.embed.weight.T
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.fixture()
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration file, and transformers."""
    stands_in = ModuleType("transformers")
    stands_in.AutoConfig = SimpleNamespace(for_model=lambda kind, **settings: settings)  # type: ignore[attr-defined]
    stands_in.AutoModelForCausalLM = SimpleNamespace(from_config=Small)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", stands_in)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "small", "vocab": 32}))
    return str(file)


def test_a_configuration_is_a_model_without_weights(configuration: str) -> None:
    target = build(configuration, {"batch": "2", "seq": "4"}, "train")
    assert target.kwargs["input_ids"].shape == (2, 4) and target.kwargs["labels"] is target.kwargs["input_ids"]
    assert {parameter.device.type for parameter in target.model.parameters()} == {"meta"}
    assert not target.model.config.use_cache and target.loss is not None
    assert target.loss({"loss": 3}) == 3
    assert build(configuration, {}, "inference").loss is None


class SmallForImageClassification(nn.Module):
    """A model as transformers makes them of pictures."""

    main_input_name = "pixel_values"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.head = config, nn.Linear(2 * 4 * 4, 8)


class UnsizedForImageClassification(SmallForImageClassification):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del config.image_size


class SmallForSpeech(SmallForImageClassification):
    main_input_name = "spectrum"


class SmallModel(SmallForImageClassification):
    main_input_name = "input_ids"


@pytest.fixture()
def classes(configuration: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module] | str], str]:
    """Writes the configuration of a model of a class that transformers has, or of a name that it has not."""

    def write(kind: type[nn.Module] | str) -> str:
        stands_in, name = sys.modules["transformers"], kind if isinstance(kind, str) else kind.__name__
        if not isinstance(kind, str):
            monkeypatch.setattr(stands_in, name, kind, raising=False)
        settings = {"image_size": 4, "num_channels": 2, "is_encoder_decoder": name == "SmallModel", "dtype": torch.bfloat16}
        monkeypatch.setattr(stands_in.AutoConfig, "for_model", lambda kind, **given: SimpleNamespace(**settings))
        Path(configuration).write_text(json.dumps({"model_type": "small", "architectures": [name]}))
        return configuration

    return write


def test_the_class_says_what_a_model_is_given_and_told(classes: Callable[[type[nn.Module]], str]) -> None:
    target = build(classes(SmallForImageClassification), {"batch": "3"}, "train")
    assert target.kwargs["pixel_values"].shape == (3, 2, 4, 4) and target.kwargs["pixel_values"].dtype == torch.bfloat16
    assert target.kwargs["labels"].shape == (3,) and target.kwargs["labels"].dtype == torch.int64
    assert {value.device.type for value in (*target.kwargs.values(), *target.model.parameters())} == {"meta"}
    both = build(classes(SmallModel), {"batch": "3", "seq": "5"}, "inference").kwargs
    assert {name: value.shape for name, value in both.items()} == {"input_ids": (3, 5), "decoder_input_ids": (3, 5)}


@pytest.mark.parametrize(
    ("kind", "settings", "error", "words"),
    [
        (SmallForImageClassification, {"seq": "5"}, UsageError, "takes pictures, which have no seq"),
        (UnsizedForImageClassification, {}, UsageError, "does not say how large pixel_values are: it has no image_size"),
        (SmallForSpeech, {}, UsageError, r"no example of spectrum for SmallForSpeech\nhint: .*file.py:function"),
        (SmallModel, {}, UsageError, r"no labels for SmallModel, whose training needs a loss\nhint: .*file.py:function"),
        ("AbsentForMaskedLM", {}, CaptureError, "has no attribute 'AbsentForMaskedLM'"),
    ],
)
def test_a_class_that_is_not_known_is_refused(
    classes: Callable[[type[nn.Module] | str], str], kind: type[nn.Module] | str, settings: dict[str, str], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words):
        build(classes(kind), settings, "train")


@pytest.mark.parametrize("error", [ModuleNotFoundError, RuntimeError, ValueError, KeyError, AttributeError])
def test_what_transformers_cannot_build_is_said_in_words(configuration: str, error: type[Exception]) -> None:
    def broken(settings: Any) -> None:
        raise error("Could not import module 'SmallForCausalLM'")

    sys.modules["transformers"].AutoModelForCausalLM.from_config = broken
    with pytest.raises(CaptureError, match=r"(?s)Could not import module 'SmallForCausalLM'.*hint: .*causal language model"):
        build(configuration, {}, "train")


def test_what_a_failed_import_came_from_is_said(configuration: str) -> None:
    def broken(settings: Any) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as reason:
            raise ModuleNotFoundError("Could not import module 'SmallForCausalLM'") from reason

    sys.modules["transformers"].AutoModelForCausalLM.from_config = broken
    with pytest.raises(CaptureError, match=r"'SmallForCausalLM' \(RuntimeError: operator torchvision::nms does not exist\)"):
        build(configuration, {}, "train")


def test_of_a_model_that_is_none_of_hundreds_these_are_not_named(configuration: str) -> None:
    def unknown(settings: Any) -> None:
        raise ValueError("Unrecognized configuration class Small.\nModel type should be one of AConfig, BConfig, CConfig.")

    sys.modules["transformers"].AutoModelForCausalLM.from_config = unknown
    with pytest.raises(CaptureError, match="Unrecognized configuration class Small") as raised:
        build(configuration, {}, "train")
    assert "AConfig" not in str(raised.value)


def test_transformers_that_cannot_be_imported_is_another_matter_than_none(
    configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.delitem(sys.modules, "transformers")
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('tokenizers>=0.22 is required, but found tokenizers==0.21')")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"transformers cannot be imported: tokenizers>=0.22 is required(.*\n)+hint: make 'import transformers'"
    with pytest.raises(UsageError, match=words):
        build(configuration, {}, "train")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"which is not installed\nhint: pip install transformers"):
        build(configuration, {}, "train")
