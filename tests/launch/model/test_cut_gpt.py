"""A GPT that ranks hold or feed together, against one rank with everything: losses, gradients, parts of weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.launch import simulate
from maingrad.launch.config.run import ModelConfig
from maingrad.launch.model.cut_gpt import cut_gpt, whole_of
from maingrad.launch.model.gpt import GPT, build_model

SHAPE: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "context_length": 16,
    "fuse_wgrad_accumulation": False,
}
LENGTH = 12


def build(**changes: Any) -> GPT:
    return build_model(ModelConfig(**{**SHAPE, **changes}), seed=0)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and positions of two documents a row; equally many targets count in each half of a row."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(0, 256, (3, LENGTH), generator=draw) for _ in range(2))
    return inputs, targets, torch.arange(LENGTH).remainder(7).expand(3, -1)


@pytest.mark.parametrize("within_documents", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4, "tie_embeddings": True}])
def test_losses_and_gradients_are_those_of_one_rank(changes: dict[str, Any], tp: int, cp: int, within_documents: bool):
    whole = build(**changes)
    inputs, targets, positions = tokens()
    loss = whole(inputs, targets, positions if within_documents else None)
    loss.backward()

    def job() -> None:
        mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
        model, part = build(**changes), mesh.get_local_rank("cp")
        model.share_sequences(mesh["cp"].get_group())
        cut_gpt(model, mesh.get_local_rank("tp"), tp, mesh["tp"].get_group())
        own = [x.chunk(cp, dim=1)[part] for x in (inputs, targets)]
        own_loss = model(*own, positions if within_documents else None)
        own_loss.backward()
        mean = own_loss.detach().clone()
        dist.all_reduce(mean, group=mesh["cp"].get_group())
        torch.testing.assert_close(mean / cp, loss.detach(), rtol=1e-6, atol=0.0)
        for (name, param), (_, held) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
            total = held.grad.clone()
            dist.all_reduce(total, group=mesh["cp"].get_group())
            torch.testing.assert_close(whole_of(held, model_slice_of(held)), param, rtol=0.0, atol=0.0, msg=name)
            torch.testing.assert_close(whole_of(total / cp, model_slice_of(held)), param.grad, rtol=1e-5, atol=1e-8)

    simulate(job, tp * cp)


def test_a_rank_has_its_part_of_the_weights():
    model = build()
    cut_gpt(model, 0, 2, None)
    shapes = {name: tuple(param.shape) for name, param in model.blocks[0].named_parameters()}
    assert shapes == {
        "attention_norm.weight": (32,),
        "attention.qkv.weight": (32, 32),
        "attention.out.weight": (32, 16),
        "ffn_norm.weight": (32,),
        "ffn.gate_up.weight": (48, 32),
        "ffn.down.weight": (32, 24),
    }


def test_cut_weights_delay_their_gradients_as_whole_ones_do():
    model = build(delay_wgrad_layers=1)
    cut_gpt(model, 1, 2, None)
    marked = {name for name, param in model.named_parameters() if getattr(param, "skip_backward_post_hook", False)}
    parts = ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.down")
    assert marked == {"head.weight", *(f"blocks.1.{part}.weight" for part in parts)}


def test_a_parameter_is_whole_again_among_some_of_the_ranks():
    whole = build()

    def job() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = build()
        cut_gpt(model, mesh.get_local_rank("tp"), 2, mesh["tp"].get_group())
        for (name, param), (_, held) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(whole_of(held, model_slice_of(held)), param, rtol=0.0, atol=0.0, msg=name)

    simulate(job, 4)


def test_dropout_is_equal_on_what_every_rank_has_and_differs_between_heads():
    def job() -> tuple[Tensor, Tensor]:
        model = build(dropout=0.5)
        cut_gpt(model, dist.get_rank(), 2, dist.group.WORLD)
        torch.manual_seed(4)
        logits = model(tokens()[0])
        # Equal weights and inputs: only the masks can differ.
        attention = model.blocks[0].attention
        attention.qkv.weight.data.fill_(0.01)
        torch.manual_seed(4)
        seen: list[Tensor] = []
        attention.out.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
        attention(torch.ones(1, 8, 32), model.rotary_cos[:8], model.rotary_sin[:8])
        return logits.detach(), seen[0]

    (logits, mixed), (other_logits, other_mixed) = simulate(job, 2)
    assert torch.equal(logits, other_logits)
    assert not torch.equal(mixed, other_mixed)
