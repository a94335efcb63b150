"""``hf:CONFIG.json,batch=..,seq=..``: a Hugging Face model built from a local configuration, without weights and without a network.

The configuration says which class of transformers it is (``architectures``), the class what it is given (``main_input_name``), and the end
of its name what it is told of each example in training, as its ``labels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.errors import CaptureError, FileError, UsageError
from autopar.files import parse_json, read_text
from autopar.target import Target

if TYPE_CHECKING:
    from torch import nn

LISTED = "Model type should be one of"
"""Where transformers' error on an unknown model goes on to list hundreds of known names."""
_SIZES = {"batch": 1, "seq": 128}
CAUSAL = "ForCausalLM"
EACH_TOKEN = (CAUSAL, "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
EACH_EXAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
"""Ends of the names of classes whose labels are a number for each token, and for each example."""
OTHERS = "for others write a function: file.py:function returns (model, args, kwargs), or an object with loss and loss_args too"


def build(path: str, settings: Mapping[str, str], mode: Literal["train", "inference"]) -> Target:
    """The model of a configuration file on ``meta`` with its main input; in training with labels (of a language model its input), and its
    own loss.

    Raises:
        UsageError: no such file or key, transformers is not installed, or a class of which inputs or labels are not known. FileError: not a
            configuration. CaptureError: transformers cannot build it.
    """
    config_file = Path(path)
    if not config_file.is_file():
        hint = "write hf:CONFIG.json,batch=..,seq=.. of a local file; AutoConfig.from_pretrained(NAME).to_json_file('CONFIG.json') makes it"
        raise UsageError(f"there is no file {path}" if path else "no configuration file is named", hint)
    sizes = dict(_SIZES)
    for key, value in settings.items():
        if key not in sizes or not value.isdecimal() or int(value) < 1:
            raise UsageError(f"cannot use {key}={value} for a Hugging Face model", "the keys are batch and seq, whole numbers from 1 on")
        sizes[key] = int(value)
    hint = "give the model's config.json"
    data = parse_json(read_text(config_file, "the configuration", hint), path, hint)
    if not isinstance(data, dict) or "model_type" not in data:
        raise FileError(f"{path} has no key 'model_type'", hint)
    try:
        import transformers
    except Exception as error:  # it looks at the versions of what it needs, and raises what that raises
        if getattr(error, "name", None) != "transformers":
            hint = "make 'import transformers' work in this environment first"
            raise UsageError(f"transformers cannot be imported: {_reason(error)}", hint) from error
        raise UsageError("hf: targets need the package transformers, which is not installed", "pip install transformers") from error
    import torch

    kind = data.pop("model_type")
    role = next(iter(data.get("architectures") or ()), CAUSAL)
    try:
        config = transformers.AutoConfig.for_model(kind, **data)
        with torch.device("meta"):
            model = _made(transformers, role, config)
    except Exception as error:  # whatever transformers and what it imports raise
        raise CaptureError(
            f"transformers cannot build {path} (model_type {kind!r}): {_reason(error)}",
            "without 'architectures' it is built as a causal language model; what transformers imports must be installed for this torch",
        ) from error
    for part in model.modules():  # a decoder's may be its own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    with torch.device("meta"):
        return _with_examples(model, role, sizes, set(settings), mode)


def _made(transformers: Any, role: str, config: Any) -> nn.Module:
    """The model of a class of transformers."""
    if role.endswith(CAUSAL):
        causal: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return causal
    made: nn.Module = getattr(transformers, role)(config)
    return made if config.dtype is None else made.to(config.dtype)


def _with_examples(model: Any, role: str, sizes: Mapping[str, int], named: set[str], mode: Literal["train", "inference"]) -> Target:
    """The model with example inputs, and in training with labels.

    Args:
        role: the name of its class, or how such names end.

    Raises:
        UsageError: a class whose inputs or labels are none of those that are known, or a size that it does not have.
    """
    import torch

    config = model.config
    main = getattr(model, "main_input_name", "input_ids")
    if main not in _GIVEN:
        raise UsageError(f"hf: has no example of {main} for {role}", OTHERS)
    if main == "pixel_values" and "seq" in named:
        raise UsageError(f"{role} takes pictures, which have no seq", "the only key is batch; their size is that of the configuration")
    batch, seq = sizes["batch"], sizes["seq"]
    tokens = torch.empty(batch, seq, dtype=torch.int64)
    try:
        shape = _GIVEN[main](config, batch, seq)
    except AttributeError as error:
        raise UsageError(f"the configuration of {role} does not say how large {main} are: it has no {error.name}", OTHERS) from None
    given = torch.empty(shape, dtype=next(model.parameters()).dtype)
    inputs = {main: tokens if main == "input_ids" else given}
    if mode == "inference":
        decoding = {"decoder_input_ids": tokens} if getattr(config, "is_encoder_decoder", False) else {}
        return Target(model, (), inputs | decoding)
    if not role.endswith((*EACH_TOKEN, *EACH_EXAMPLE)):
        raise UsageError(f"hf: has no labels for {role}, whose training needs a loss", OTHERS)
    labels = tokens[:, 0] if role.endswith(EACH_EXAMPLE) else inputs.get("input_ids", tokens)
    return Target(model, (), inputs | {"labels": labels}, _own_loss)


def _picture(config: Any, batch: int, seq: int) -> tuple[int, ...]:
    size = config.image_size
    return batch, getattr(config, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size))


_GIVEN: Mapping[str, Callable[[Any, int, int], tuple[int, ...]]] = {
    "input_ids": lambda config, batch, seq: (batch, seq),
    "pixel_values": _picture,
    "input_features": lambda config, batch, seq: (batch, config.num_mel_bins, 2 * config.max_source_positions),
    "input_values": lambda config, batch, seq: (batch, seq),
}
"""The shape of what a model is given, by its name."""


def _reason(error: BaseException) -> str:
    """The error and its cause: of a failed import transformers says only that there was one."""
    first = error
    while (before := first.__cause__ or first.__context__) is not None:
        first = before
    said = str(error) if first is error else f"{error} ({type(first).__name__}: {first})"
    return said.partition(LISTED)[0].rstrip()


def _own_loss(outputs: Any) -> Any:
    return outputs["loss"]
