"""torchtitan's own Trainer trains its tiny Llama on gloo ranks, planned, as it does in one process."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.verify.launch import run_ranks
from tests.integrations.test_page import BLOCKS
from tests.runtime.test_training import on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
own = pytest.importorskip("autopar.integrations.torchtitan", exc_type=ImportError)
cpu = pytest.importorskip("tests.integrations.cpu_trainer", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's own

PLANNING = {"hardware": "cpu-cluster", "effort": "low"}


def unplanned(config: Any) -> Any:
    """Torchtitan's own parallelize_fn with the same attention: its FlexAttention takes compiled kernels."""
    parallelize = config.model_spec.parallelize_fn

    def numbered(model: Any, **settings: Any) -> Any:
        made = parallelize(model, **{**settings, "ac_config": None})
        made.get_attention_masks = own.number_documents
        return made

    config = own.plan_config(config)
    config.model_spec = replace(config.model_spec, parallelize_fn=numbered)
    return config


Steps = list[tuple[int, float, float]]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("plain")
    found: Steps = run_ranks(lambda rank: cpu.losses_and_norms(unplanned(cpu.configuration(folder, 4))), 1)[0]
    return found


def same(found: Steps, wanted: Steps) -> bool:
    return len(found) == len(wanted) and all(one == pytest.approx(other, rel=1e-6) for one, other in zip(found, wanted, strict=True))


def test_it_trains_as_one_process_does_and_resumes_on_another_mesh(one_process: Steps, tmp_path: Path) -> None:
    """Two ranks with rows of their own; then from the second step on two times two, with torchtitan's tensor parallel degree."""
    first = on_ranks(lambda rank: cpu.losses_and_norms(own.plan_config(cpu.configuration(tmp_path, 2), **PLANNING)), 2)
    assert len(one_process) == cpu.STEPS and all(same(found, one_process) for found in first), (first, one_process)
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")

    def resume(rank: int) -> Steps:
        return cpu.losses_and_norms(own.plan_config(cpu.configuration(tmp_path, 2, tensor_parallel_degree=2), **PLANNING))  # type: ignore[no-any-return]

    for found in on_ranks(resume, 4):
        assert same(found, one_process[2:]), (found, one_process)


@pytest.mark.slow
def test_a_mesh_of_ones_own_splits_weights_otherwise_than_rows(one_process: Steps, tmp_path: Path) -> None:
    """Rows go to all four ranks, by both axes; a weight is pinned to one of them."""
    planning = {**PLANNING, "mesh": "a=2,b=2", "constraints": {"lm_head.weight": "S1 R"}}

    def run(rank: int) -> Steps:
        return cpu.losses_and_norms(own.plan_config(cpu.configuration(tmp_path, 1), **planning))  # type: ignore[no-any-return]

    assert all(same(found, one_process) for found in on_ranks(run, 4))


@pytest.mark.slow
def test_half_precision_is_torchtitans_mixed_precision(tmp_path: Path) -> None:
    """Weights in float32, computed with in bfloat16: its FSDP's policy, also on one rank."""
    def half(name: str, rows: int) -> Any:
        return cpu.configuration(tmp_path / name, rows, half="bfloat16")

    wanted = run_ranks(lambda rank: cpu.losses_and_norms(unplanned(half("plain", 4))), 1)[0]
    for found in on_ranks(lambda rank: cpu.losses_and_norms(own.plan_config(half("ours", 2), **PLANNING)), 2):
        assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in wanted], rel=1e-3)


def test_attention_within_documents_is_torchtitans() -> None:
    from torchtitan.models.common.attention import create_attention_mask

    rows, length, heads, dim = 2, 12, 4, 8
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(rows, 1)
    documents = own.number_documents(positions)
    assert documents[0].tolist() == [1] * 5 + [2] * 7
    q, k, v = (torch.randn(rows, length, heads, dim) for _ in range(3))

    def seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[row, query] == documents[row, key])

    mask = create_attention_mask(seen, rows, None, length, length, device="cpu")
    wanted = torch.nn.attention.flex_attention.flex_attention(*(one.transpose(1, 2) for one in (q, k, v)), block_mask=mask).transpose(1, 2)
    found = own.DocumentAttention(own.DocumentAttention.Config())(q, k, v, attention_masks=documents)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_configuration_is_read_as_torchtitan_reads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's, by a module's and a function's name; the chunked loss calls a part by itself and gives way to the loss within."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import ConfigManager

    module = "\n".join(text for name, text in BLOCKS if name == "torchtitan")
    (tmp_path / "my_configs.py").write_text(module)
    monkeypatch.setattr(torch.distributed, "set_timeout", None, raising=False)  # the module sets it where it is not there
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ConfigManager().parse_args(["--module", "my_configs", "--config", "llama3_planned", "--training.steps", "3"])
    sys.modules.pop("my_configs", None)
    assert config.training.steps == 3 and isinstance(config.loss, CrossEntropyLoss.Config)
    assert config.model_spec.parallelize_fn.func is own.parallelize
    assert not any(type(found) is own.FlexAttention.Config for _, found, _, _ in config.model_spec.traverse(own.FlexAttention.Config))


def settings(**changed: Any) -> tuple[Any, ...]:
    given = {
        "pp": 1, "cp": 1, "ep": 1, "spmd_backend": "partial_dtensor", "enable_cpu_offload": False, "enable": False, "components": ["model"],
    } | changed  # fmt: skip
    both = SimpleNamespace(**given)
    return both, both, both, both


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"pp": 2}, "pipeline_parallel_degree.*\nhint: set it to 1; autopar.compile_pipeline"),
    "context": ({"cp": 2}, "context_parallel_degree.*\nhint: set it to 1: the planner splits sequences"),
    "experts": ({"ep": 2}, "expert_parallel_degree"),
    "another backend": ({"spmd_backend": "spmd_types"}, "spmd_backend.*\nhint: set it to partial_dtensor"),
    "offload": ({"enable_cpu_offload": True}, "enable_cpu_offload"),
    "compile": ({"enable": True}, "compile of the model.*\nhint: drop it, and pass execute='compiled' to plan_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_words(name: str) -> None:
    changed, words = REFUSED[name]
    with pytest.raises(UsageError, match=words):
        own.refuse_settings(*settings(**changed))
    own.refuse_settings(*settings())


def test_rows_are_split_over_the_first_axes_of_the_mesh() -> None:
    def axes(mesh: str, ways: int) -> Any:
        return own.row_axes(own.find_mesh(mesh, ways, 1), ways)

    assert (axes("dp=2,tp=4", 2), axes("a=2,b=4", 8), axes("tp=4", 1)) == ((0,), (0, 1), ())
    assert str(own.find_mesh(None, 4, 2)) == "dp=4,tp=2" and own.find_mesh(None, 1, 1).ranks == 1
    with pytest.raises(UsageError, match="to 4 ranks, which no first axes of the mesh dp=2,tp=4 make up\nhint: begin the mesh with axes"):
        axes("dp=2,tp=4", 4)


def test_models_that_cannot_be_planned_are_named() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_varlen_attn
    from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

    other = llama3_debugmodel()
    other.model_spec = replace(other.model_spec, model=own.DocumentAttention.Config())
    words_of = {"llama3 has VarlenAttention": llama3_debugmodel_varlen_attn(), "not a decoder": other, "has MoE layers": qwen3_moe_debug()}
    for words, config in words_of.items():
        with pytest.raises(UsageError, match=words):
            own.plan_config(config)
    with pytest.raises(UsageError, match="planning has no option 'inputs'"):
        own.plan_config(llama3_debugmodel(), inputs="global")


def test_the_functions_of_torchtitan_are_called_as_they_are() -> None:
    """What the Trainer passes to a parallelize_fn, and calls afterwards."""
    import inspect

    from torchtitan.models.llama3.parallelize import parallelize_llama

    theirs, ours = (inspect.signature(one).parameters for one in (parallelize_llama, own.parallelize))
    assert {name for name in ours if name not in ("planning", "_")} <= set(theirs)
    source = inspect.getsource(cpu.Trainer.__init__)
    for call in ("model.to_empty(device=init_device)", ".init_weights(buffer_device=buffer_device)"):
        assert call in source, call
