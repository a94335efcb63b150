"""What a model says to autograd in Python is in the captured gradients: they are those of the model as it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.errors import CaptureError, UsageError
from autopar.importer import capture
from tests.importer.test_capture import run


class Straight(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Reversed(torch.autograd.Function):
    """The identity with its gradient reversed and scaled; the two methods of the newer form."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        context.scale = inputs[1]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -context.scale * gradient, None


class Product(torch.autograd.Function):
    """A product whose backward saves tensors, has two results of which one is no tensor, and clips."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        context.save_for_backward(x, weight)
        return x @ weight.t(), 3

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = context.saved_tensors
        return (gradient @ weight).clamp(-0.1, 0.1), 2 * gradient.t() @ x


class Literal(torch.autograd.Function):
    """Tensors written down in the function, forward and backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.masked_fill(x < 0, torch.tensor(-0.5)) * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.tensor([0.6, 0.5, 0.4, 0.3, 0.2, 0.1]) + torch.tensor(0.5)


straight = Straight.apply  # as models write it: bound before any capture


class Again(torch.autograd.Function):
    """A function that is computed again in backward, and differentiated there."""

    @staticmethod
    def forward(context: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        context.function = function
        context.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = context.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            context.function(x).backward(gradient)  # here
        return x.grad, None


class Two(nn.Module):
    """Two layers with something between or around them."""

    def __init__(self, between: Callable[[Two, Tensor], Tensor] = lambda self, h: h) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.between(self, self.a(x))) * 3).square().mean()


def hooked(self: Two, h: Tensor) -> Tensor:
    before = h * 2
    h.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))  # sees what comes by `before` too
    return h + before


def penalty(self: Two, h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(self.b(h).tanh().sum(), h, create_graph=True)
    return h + (gradient.norm(dim=1, keepdim=True) - 1).square()


def frozen(self: Two, h: Tensor) -> Tensor:
    self.b.requires_grad_(False)
    h = self.b(h).relu()
    self.b.weight.requires_grad = True
    return h


def product(self: Two, h: Tensor) -> Tensor:
    h, three = Product.apply(h, self.b.weight)  # type: ignore[misc]
    return h * three


def product_of_zeros(self: Two, h: Tensor) -> Tensor:
    """Products of rows with no zero, one, and several, along a dim, and of everything, where there is none."""
    zeroed = h * (torch.arange(6) >= torch.arange(4)[:, None]).to(h.dtype)
    return h + zeroed.prod(1, keepdim=True) + zeroed.prod(0) + h.sigmoid().prod()


def ranked(self: Two, h: Tensor) -> Tensor:
    """Entries picked by their rank."""
    h = h + self.b(h).median(1, keepdim=True).values + h.nanmedian(0).values + h.kthvalue(2, 1).values[:, None]
    return h * h.mode(1, True).values + h.median() + h.median(0).indices


def functional(self: Two, h: Tensor) -> Tensor:
    """Derivatives of functions, mapped over rows, that take parameters from where they are written."""
    slope = torch.func.vmap(torch.func.grad(lambda row: self.b(row).tanh().sum() * h.mean()))
    _, rate = torch.func.jvp(lambda x: self.b(x).sin(), (h,), (torch.ones_like(h),))
    _, pull = torch.func.vjp(lambda x, scale: (self.b(x) * scale["s"]).cos(), h, {"s": h.sum()})
    pulled, by_scale = pull(rate)
    curved = torch.func.vmap(torch.func.hessian(lambda row: self.a(row).tanh().sum()))(h).sum(-1)
    return slope(h) + rate + pulled + by_scale["s"] + curved + torch.func.jacrev(lambda x: self.b(x).tanh().sum(0))(h).sum((0, 1))


def adapted(self: Two, h: Tensor) -> Tensor:
    """A step of learning inside of forward, with other weights in the place of a module's own."""
    weights = dict(self.b.named_parameters())
    steps, (value, _) = torch.func.grad_and_value(lambda w: (torch.func.functional_call(self.b, w, (h,)).square().mean(), h), has_aux=True)(
        weights
    )
    return torch.func.functional_call(self.b, {name: weights[name] - 0.1 * steps[name] for name in weights}, (h,)) * value


def remade(self: Two, h: Tensor) -> Tensor:
    """A module made anew while the model runs, of the weights that there were; data read past autograd."""
    layer = nn.Linear(6, 6)
    layer.weight, layer.bias = self.b.weight, self.b.bias
    return layer(h) * h.data + self.a.weight.data.sum()


BETWEEN: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "straight-through": lambda self, h: straight(h),
    "computed again": lambda self, h: Again.apply(h, lambda x: x.sin() * x),
    "reversal": lambda self, h: Reversed.apply(h, 0.5),
    "clipping": product,
    "literals": lambda self, h: Literal.apply(Literal.apply(h)),
    "tensor hook": hooked,
    "gradient penalty": penalty,
    "frozen for one use": frozen,
    "product": product_of_zeros,
    "picked by rank": ranked,
    "derivatives as functions": functional,
    "adapted weights": adapted,
    "made anew": remade,
    "reentrant checkpoint": lambda self, h: checkpoint(self.b, h, use_reentrant=True),
}


def halved(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in inputs)


def scaled(module: nn.Module, outputs: Any) -> Any:
    return tuple(gradient * 3 for gradient in outputs)


def with_hooks(register: Callable[[Two], Any]) -> Two:
    model = Two()
    register(model)
    return model


HOOKED: dict[str, Callable[[Two], Any]] = {
    "module": lambda model: model.b.register_full_backward_hook(halved),
    "module whose inputs need no gradient": lambda model: model.a.register_full_backward_pre_hook(scaled),
    "parameter": lambda model: model.a.weight.register_hook(lambda gradient: gradient.sign()),
    "whole model": lambda model: model.register_full_backward_pre_hook(scaled),
}


def check(model: nn.Module, x: Tensor) -> None:
    """Captured loss and gradients against autograd's."""
    captured = capture(model, (x,))
    found = run(captured, model, {"x": x})
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(found["output", "loss"], loss.detach())
    wanted = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert {name for kind, name in found if kind == "gradient"} == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found["gradient", name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore::autopar.importer.stand_ins.autograd_calls.CheckpointWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_gradients_are_those_of_the_model(between: Callable[[Two, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(Two(between), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("register", HOOKED.values(), ids=HOOKED)
def test_hooks_are_in_the_gradients(register: Callable[[Two], Any]) -> None:
    torch.manual_seed(0)
    check(with_hooks(register), torch.randn(4, 6))


class Critic(nn.Module):
    """A Wasserstein critic with gradient penalty over convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 1)

    def score(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.leaky_relu(self.first(x), 0.2)).tanh().mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = (x * 0.5).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.score(mixed).sum(), mixed, create_graph=True)
        return self.score(x).mean() + (gradient.flatten(1).norm(2, dim=1) - 1).square().mean()


def test_a_gradient_penalty_over_convolutions() -> None:
    torch.manual_seed(0)
    check(Critic(), torch.randn(2, 2, 8, 8))


class Forces(nn.Module):
    """An energy and its gradient by the input, which nobody differentiates again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 8), nn.Linear(8, 1), how

    def energy(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).sum()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.how == "function":
            slope, energy = torch.func.grad_and_value(self.energy)(x)
            return energy, slope
        with torch.enable_grad() if self.how == "said" else nullcontext():
            x = x.detach().requires_grad_()
            with torch.no_grad():
                fixed = self.energy(x)
            energy = self.energy(x) * fixed
            return energy, torch.autograd.grad(energy, x)[0]


@pytest.mark.parametrize("how", ["plain", "said", "function"])
def test_gradients_where_nothing_trains(how: str) -> None:
    torch.manual_seed(0)
    model, x = Forces(how), torch.randn(4, 3)
    found = run(capture(model, (x,), mode="inference"), model, {"x": x})
    energy, slope = model(x)
    torch.testing.assert_close(found["output", "0"], energy.detach())
    torch.testing.assert_close(found["output", "1"], slope.detach())


def test_a_parameter_that_only_gives_its_shape_needs_no_gradient() -> None:
    model, x = Two(lambda self, h: h + torch.func.jacrev(self.a)(h).sum((0, 1))), torch.randn(4, 6)
    model.b.bias.requires_grad_(False)
    graph = capture(model, (x,)).graph
    assert {output.name for output in graph.outputs if output.kind == "gradient"} == {"a.weight", "a.bias", "b.weight"}
    silent = Two(lambda self, h: h)
    silent.forward = lambda x: torch.func.jacrev(silent.a)(x).square().sum()  # type: ignore[method-assign]
    graph = capture(silent, (x,)).graph
    assert {output.name for output in graph.outputs if output.kind == "gradient"} == {"a.weight"}


def test_draws_in_a_backward_are_seeded() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * torch.rand_like(gradient)

    graph = capture(Two(lambda self, h: Noisy.apply(h)), (torch.randn(4, 6),)).graph
    (draw,) = [op for op in graph.ops if "uniform" in op.target or "rand" in op.target]
    assert (draw.target, draw.phase) == ("autopar.uniform.default", "backward")


def inner_backward(self: Two, h: Tensor) -> Tensor:
    h.sum().backward()
    return h


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        context.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "backward": (lambda: Two(inner_backward), "calls backward"),
    "backward of layers": (lambda: Two(lambda self, h: Again.apply(h, self.b)), r"backward\(\) here adds to the .grad(.*\n)+.*# here"),
    "in place": (lambda: Two(lambda self, h: InPlace.apply(h * 1)), "changes its input in place"),
    "old module hook": (lambda: with_hooks(lambda model: model.a.register_backward_hook(halved)), "register_backward_hook"),
    "accumulated": (
        lambda: with_hooks(lambda model: model.a.weight.register_post_accumulate_grad_hook(lambda parameter: None)), "accumulated",
    ),
    "attention": (
        lambda: Two(lambda self, h: h + torch.autograd.grad(F.scaled_dot_product_attention(h, h, h).sum(), h, create_graph=True)[0]),
        "no second derivative",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:.*non-full backward hooks")
def test_what_cannot_be_honoured_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(make(), (torch.randn(4, 6),))


def test_the_model_is_as_it_was() -> None:
    model = Two(frozen)
    apply = torch.autograd.Function.apply
    capture(model, (torch.randn(4, 6),))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.autograd.Function.apply == apply and Straight.apply(torch.ones(1)) == 1


def test_a_loss_with_parameters_is_refused_and_one_with_buffers_is_not() -> None:
    x, classes = torch.randn(4, 6), torch.randint(6, (4,))
    with pytest.raises(UsageError, match="parameters of its own: weight, bias"):
        capture(nn.Linear(6, 6), (x,), loss=nn.Linear(6, 1))
    loss = nn.CrossEntropyLoss(weight=torch.rand(6))
    captured = capture(nn.Linear(6, 6), (x,), loss=loss, loss_args=(classes,))
    assert ("constant", "loss.weight") in [(item.kind, item.name) for item in captured.graph.inputs]
    assert captured.constants["loss.weight"] is loss.weight
