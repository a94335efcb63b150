"""The built-in models: plain torch, one file each, none of which imports autopar.

mlp, gpt2, llama3, resnet, moe: each has a function ``build``.

``build("gpt2", layers=4, batch=8)`` gives a ``Target``. Keys and defaults are tables here, so that listing them needs no
torch. Defaults are small: a test on a CPU takes about a second, and every dim that one would split divides by 8. Those of Llama's published
sizes are batches for 64, 256 and 512 devices: with one sequence there is little to split.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal

from autopar.errors import UsageError
from autopar.target import Target

Keys = Mapping[str, Any]

_LLAMA: Keys = {
    "batch": 8, "seq": 16, "layers": 2, "width": 128, "heads": 16, "kv_heads": 8, "hidden": 256, "vocab": 128,
    "rope_base": 500000.0, "dtype": "float32",
}  # fmt: skip

_MODELS: Mapping[str, tuple[str, Keys]] = {
    "mlp": ("mlp", {"batch": 16, "inputs": 32, "width": 64, "layers": 2, "outputs": 16, "dtype": "float32"}),
    "gpt2": (
        "gpt2",
        {"batch": 8, "seq": 16, "layers": 2, "width": 64, "heads": 8, "vocab": 128, "dropout": 0.0, "dtype": "float32"},
    ),
    "llama3": ("llama3", _LLAMA),
    "llama3-8b": (
        "llama3",
        {
            **_LLAMA, "batch": 16, "seq": 8192, "layers": 32, "width": 4096, "heads": 32, "hidden": 14336, "vocab": 128256,
            "dtype": "bfloat16",
        },
    ),
    "llama3-70b": (
        "llama3",
        {
            **_LLAMA, "batch": 64, "seq": 8192, "layers": 80, "width": 8192, "heads": 64, "hidden": 28672, "vocab": 128256,
            "dtype": "bfloat16",
        },
    ),
    "llama3-405b": (
        "llama3",
        {
            **_LLAMA, "batch": 512, "seq": 8192, "layers": 126, "width": 16384, "heads": 128, "hidden": 53248, "vocab": 128256,
            "dtype": "bfloat16",
        },
    ),
    "resnet": (
        "resnet",
        {"batch": 8, "image": 32, "width": 16, "blocks": "2-2", "bottleneck": False, "classes": 16, "dtype": "float32"},
    ),
    "moe": (
        "moe",
        {
            "batch": 8, "seq": 16, "layers": 2, "width": 64, "heads": 8, "hidden": 64, "experts": 8, "capacity_factor": 2.0,
            "dispatch": "dense", "vocab": 128, "dtype": "float32",
        },
    ),
}  # fmt: skip
"""Name to the module that builds it and its keys with defaults. The sizes of Llama 3 are those of its published configuration."""


def names() -> tuple[str, ...]:
    """The built-in models."""
    return tuple(_MODELS)


def keys(name: str) -> dict[str, Any]:
    """The keys of a model and their defaults.

    Raises:
        UsageError: no such model.
    """
    if name not in _MODELS:
        raise UsageError(f"no built-in model {name!r}", _nearest(name, _MODELS))
    return dict(_MODELS[name][1])


def build(name: str, *, mode: Literal["train", "inference"] = "train", device: str = "cpu", **given: Any) -> Target:
    """A built-in model with example inputs.

    Args:
        name: one of ``names()``.
        mode: ``train``: forward takes targets too and returns the loss; ``inference``: forward returns logits.
        device: ``meta`` builds without memory, for planning; ``materialize`` gives such a model its initial weights.
        given: sizes by key; text is read as the key's type (``layers="4"``).

    Raises:
        UsageError: an unknown model or key, or a value that cannot be read, with the nearest known names.
    """
    import torch

    settings = _settings(name, given)
    module = import_module(f"autopar.zoo.{_MODELS[name][0]}")
    settings["dtype"] = getattr(torch, settings["dtype"])
    with torch.device(device) if device != "cpu" else nullcontext():
        try:
            model, inputs = module.build(**settings)
        except (ValueError, RuntimeError) as error:  # sizes that do not fit one another, or no tensor
            raise UsageError(f"zoo:{name}: {error}", f"defaults are {_listed(keys(name))}") from None
    return Target(model, inputs if mode == "train" else inputs[:1])


def materialize(model: Any, seed: int = 0, device: str = "cpu") -> Any:
    """Give a model built on ``meta`` memory and its initial weights: every module's own ``reset_parameters``, then the model's
    ``initialize`` where it has one. Ties are kept. Returns the model."""
    import torch

    same: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(value), []).append(name)
    model.to_empty(device=device)
    for first, *others in same.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        if hasattr(model, "initialize"):
            model.initialize()
    return model


DTYPES = ("float32", "float64", "float16", "bfloat16")


def _settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    settings = keys(name)
    for key, value in given.items():
        if key not in settings:
            raise UsageError(f"zoo:{name} has no key {key!r}", _nearest(key, settings))
        settings[key] = _read(name, key, value, type(settings[key]))
    return settings


def _read(name: str, key: str, value: Any, kind: type) -> Any:
    if key == "dtype":
        text = str(value).removeprefix("torch.")
        if text not in DTYPES:
            raise UsageError(f"zoo:{name}: dtype {text!r} is not one of {', '.join(DTYPES)}", f"defaults are {_listed(keys(name))}")
        return text
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in words:
            raise UsageError(f"zoo:{name}: {key}={value!r} is not true or false", f"defaults are {_listed(keys(name))}")
        return words[str(value).lower()]
    if kind is str:
        return str(value)
    try:
        read = kind(value)
    except (TypeError, ValueError):
        raise UsageError(f"zoo:{name}: {key}={value!r} is not {kind.__name__}", f"defaults are {_listed(keys(name))}") from None
    if not (kind is int) <= read < 2**63:
        raise UsageError(f"zoo:{name}: {key}={value!r} must be positive and less than 2^63", f"defaults are {_listed(keys(name))}")
    return read


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
