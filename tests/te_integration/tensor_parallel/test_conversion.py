"""Conversion of models that transformers has cut by their ``tp_plan``."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_llama import make_mesh
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.launch.simulation.simulate import simulate
from maingrad.te_integration import Linear, convert_linears, unconvert

pytest.importorskip("transformers")
from cut_transformers import cut, loss_of, make


def test_conversion_of_a_cut_model_may_be_undone() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = make("Llama")
        cut(model, mesh)
        loss = loss_of(model, 0)
        names = {name.rpartition(".")[2] for name in convert_linears(model).converted}
        assert names >= {"q_proj", "o_proj", "up_proj", "down_proj", "lm_head"}
        torch.testing.assert_close(loss_of(model, 0), loss)
        unconvert(model)
        assert type(model.lm_head) is nn.Linear
        torch.testing.assert_close(loss_of(model, 0), loss)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("order", ["convert first", "tp first"])
def test_a_head_that_is_cut_keeps_its_loss(order: str) -> None:
    """A fused loss reads the head's weight, of which each rank has a slice."""

    def on_each_rank() -> str:
        mesh = make_mesh(1, 2)
        model = make("Llama")
        if order == "tp first":
            cut(model, mesh)
        conversion = convert_linears(model, fused_loss=True)
        if order == "tp first":
            (reason,) = conversion.unfused_losses.values()
            return reason
        cut(model, mesh)
        with pytest.raises(ValueError, match="fused_loss") as raised:
            DistributedDataParallel(model, process_group=mesh["dp"])
        return str(raised.value)

    for text in simulate(on_each_rank, 2):
        assert "slice" in text


def test_an_unfused_layer_whose_weight_is_a_slice_is_converted() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(0)
        layer: Any = Linear(8, 16, parallel_mode="column", tp_group=dist.group.WORLD, bias=False)
        assert unconvert(layer) == () and type(layer) is not Linear
        assert convert_linears(layer).converted == ("",)
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        wrapped = DistributedDataParallel(layer, process_group=alone)
        wrapped(torch.ones(2, 8)).sum().backward()
        assert torch.equal(layer.weight.main_grad, torch.full((8, 8), 2.0))
        assert wrapped.records[0].num_fused_writes == 1

    simulate(on_each_rank, 2)


class Doubled(Linear):
    """May use its weight in another way, whether it is cut or not."""

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return 2 * super().forward(input)


def test_a_subclass_of_ours_that_is_cut_is_skipped_by_its_name() -> None:
    def on_each_rank() -> None:
        layer: Any = Doubled(8, 16, parallel_mode="column", tp_group=dist.group.WORLD)
        (reason,) = convert_linears(layer).skipped.values()
        assert "Doubled is a subclass of" in reason and not layer.fuse_wgrad_accumulation

    simulate(on_each_rank, 2)
