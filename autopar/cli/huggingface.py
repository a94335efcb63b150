"""``hf:CONFIG.json,batch=..,seq=..``: a Hugging Face model built from a local configuration, without weights and without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.errors import CaptureError, FileError, UsageError
from autopar.files import parse_json, read_text
from autopar.target import Target

LISTED = "Model type should be one of"
"""What transformers goes on with when it does not know a model: the names of hundreds that it does."""
_SIZES = {"batch": 1, "seq": 128}


def build(path: str, settings: Mapping[str, str], mode: Literal["train", "inference"]) -> Target:
    """The model of a configuration file on ``meta``, with token ids as input; in training its own loss, labels = inputs.

    Raises:
        UsageError: no such file or key, or transformers is not installed. FileError: not a configuration.
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
    try:
        config = transformers.AutoConfig.for_model(kind, **data)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever transformers and what it imports raise
        raise CaptureError(
            f"transformers cannot build {path} (model_type {kind!r}): {_reason(error)}",
            "only causal language models are supported, and what transformers imports must be installed for this torch",
        ) from error
    model.config.use_cache = False
    tokens = torch.empty(sizes["batch"], sizes["seq"], dtype=torch.int64, device="meta")
    if mode == "inference":
        return Target(model, (), {"input_ids": tokens})
    return Target(model, (), {"input_ids": tokens, "labels": tokens}, _own_loss)


def _reason(error: BaseException) -> str:
    """What went wrong, and what that came from: transformers says of a failed import only that there was one."""
    first = error
    while (before := first.__cause__ or first.__context__) is not None:
        first = before
    said = str(error) if first is error else f"{error} ({type(first).__name__}: {first})"
    return said.partition(LISTED)[0].rstrip()


def _own_loss(outputs: Any) -> Any:
    return outputs["loss"]
