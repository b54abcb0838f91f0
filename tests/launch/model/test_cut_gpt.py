"""A GPT that ranks hold or feed together, against one rank with everything: losses, gradients, parts of weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.ddp.torch_grads.over_ranks import whole_of_slices
from maingrad.launch import simulate
from maingrad.launch.config.mesh import Stage
from maingrad.launch.config.run import ModelConfig
from maingrad.launch.model.cut_gpt import cut_gpt
from maingrad.launch.model.gpt import GPT, build_model
from maingrad.launch.model.loss import find_padding
from maingrad.launch.parallelizing.exchanges import ContextRanks

SHAPE: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "context_length": 16,
    "vocab_size": 257,  # uneven over ranks
    "fuse_wgrad_accumulation": False,
}
LENGTH = 12
BORDERS = [0, 64, 65, 128, 129, 130, 194, 195, 256]
"""First and last words of two and of four ranks."""


def build(**changes: Any) -> GPT:
    return build_model(ModelConfig(**{**SHAPE, **changes}), seed=0)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and positions of two documents a row; equally many targets count in each half of a row."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(0, 257, (3, LENGTH), generator=draw) for _ in range(2))
    inputs[0, : len(BORDERS)] = targets[1, 2 : 2 + len(BORDERS)] = torch.tensor(BORDERS)
    targets[:, ::6] = -100
    return inputs, targets, torch.arange(LENGTH).remainder(7).expand(3, -1)


@pytest.mark.parametrize("within_documents", [False, True])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("changes", [{"fused_loss": True}, {"num_kv_heads": 4, "tie_embeddings": True}])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_losses_and_gradients_are_those_of_one_rank(
    changes: dict[str, Any], tp: int, cp: int, within_documents: bool, sequence_parallel: bool
):
    if tp == 4:
        changes = {**changes, "num_kv_heads": 4}
    whole = build(**changes)
    inputs, targets, positions = tokens()
    loss = whole(inputs, targets, positions if within_documents else None)
    loss.backward()

    def job() -> None:
        mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
        model, part = build(**changes), mesh.get_local_rank("cp")
        model.share_sequences(ContextRanks(mesh["cp"].get_group()))
        cut_gpt(model, mesh["tp"].get_group(), sequence_parallel=sequence_parallel and tp > 1)
        if tp > 1 and "fused_loss" in changes:
            model.head.chunk_tokens = 7
        own = [x.chunk(cp, dim=1)[part] for x in (inputs, targets)]
        own_loss = model(*own, positions if within_documents else None)
        own_loss.backward()
        mean = own_loss.detach().clone()
        dist.all_reduce(mean, group=mesh["cp"].get_group())
        torch.testing.assert_close(mean / cp, loss.detach(), rtol=1e-6, atol=0.0)
        for (name, param), (_, held) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
            total, slice_held = held.grad.clone(), model_slice_of(held)
            if slice_held is not None and slice_held.grad == "partial":
                dist.all_reduce(total, group=mesh["tp"].get_group())
            dist.all_reduce(total, group=mesh["cp"].get_group())
            torch.testing.assert_close(whole_of_slices(held, slice_held), param, rtol=0.0, atol=0.0, msg=name)
            torch.testing.assert_close(whole_of_slices(total / cp, slice_held), param.grad, rtol=1e-5, atol=1e-7)

    simulate(job, tp * cp)


def test_a_fused_loss_has_the_logits_of_one_chunk():
    inputs, targets, _ = tokens()

    def job() -> None:
        model, rows = build(fused_loss=True), list[int]()
        cut_gpt(model, dist.group.WORLD)
        model.head.chunk_tokens = 10
        model.head.register_forward_hook(lambda head, args, logits: rows.append(len(logits)))
        loss = model(inputs, targets)
        in_forward = list(rows)
        loss.backward()
        assert max(rows) == 10
        assert sum(in_forward) == inputs.numel()
        assert sum(rows) == 2 * inputs.numel(), "backward computes them again"

    simulate(job, 2)


def test_losses_of_bf16_logits_are_fp32():
    inputs, targets, _ = tokens()

    def job() -> list[float]:
        losses = []
        for fused_loss in (False, True):
            model = build(param_dtype="bfloat16", fused_loss=fused_loss, init_std=0.2)
            cut_gpt(model, dist.group.WORLD)
            losses.append(model(inputs, targets).detach())
            assert losses[-1].dtype is torch.float32
        return list(map(float, losses))

    for plain, fused in simulate(job, 2):
        assert fused == pytest.approx(plain, rel=1e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("ring", [False, True])
def test_a_prompt_may_be_on_an_earlier_rank(ring: bool):
    """Experts leave out what no later target attends to, on whichever rank the target is."""
    experts = {"num_experts": 2, "top_k": 1, "expert_ffn_dim": 16, "aux_loss_coefficient": 0.0}
    inputs, targets, _ = tokens()
    targets[0, :8] = targets[1, 3:] = targets[2, 5:9] = targets[2, 10:] = -100
    whole, counted = build(**experts), int((targets >= 0).sum())
    expected = whole(inputs, targets) * counted
    expected.backward()

    def job() -> None:
        model, context = build(**experts), ContextRanks(dist.group.WORLD, ring)
        model.share_sequences(context)
        own = [context.own(x, 1) for x in (inputs, targets)]
        loss = model(*own) * (own[1] >= 0).sum()
        loss.backward()
        for total, of_whole in [(loss.detach().clone(), expected), *zip(grads(model), grads(whole), strict=True)]:
            dist.all_reduce(total)
            torch.testing.assert_close(total, of_whole.detach(), rtol=1e-5, atol=1e-6)

    simulate(job, 2)


@pytest.mark.parametrize("ring", [False, True])
def test_other_samples_do_not_say_what_is_padding(ring: bool):
    """Of two pairs of ranks that each have a sequence, whose last targets are at other places."""

    def job() -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        context = ContextRanks(mesh["cp"].get_group(), ring)
        targets = torch.full((1, LENGTH), -100)
        targets[0, : (3, 10)[mesh.get_local_rank("dp")]] = 1
        padding = find_padding(context.own(targets, 1), context)
        dist.all_reduce(count := padding.sum(), group=mesh["cp"].get_group())
        return int(count)

    assert simulate(job, 4) == [LENGTH - 3] * 2 + [LENGTH - 10] * 2


def grads(model: GPT) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_a_rank_has_its_part_of_activations_and_logits():
    def job() -> tuple[tuple[int, ...], ...]:
        model, seen = build(), list[Tensor]()
        cut_gpt(model, dist.group.WORLD, sequence_parallel=True)
        model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        logits = model(tokens()[0])
        return tuple(seen[0].shape), tuple(logits.shape)

    (between, logits), (_, of_other) = simulate(job, 2)
    assert between == (3, LENGTH // 2, 32)
    assert (logits, of_other) == ((3, LENGTH, 129), (3, LENGTH, 128))


def test_a_rank_has_its_part_of_the_weights():
    model = build()
    assert model.embedding.weight.shape == (257, 32)
    cut_gpt(model, dist.ProcessGroup(0, 2), runs=False)
    shapes = {name: tuple(param.shape) for name, param in model.blocks[0].named_parameters()}
    assert shapes == {
        "attention_norm.weight": (32,),
        "attention.qkv.weight": (32, 32),
        "attention.out.weight": (32, 16),
        "ffn_norm.weight": (32,),
        "ffn.gate_up.weight": (48, 32),
        "ffn.down.weight": (32, 24),
    }
    assert model.embedding.weight.shape == model.head.weight.shape == (129, 32)
    block = model.blocks[0]
    layers = [block.attention.qkv, block.attention.out, block.ffn.gate_up, block.ffn.down, model.head]
    assert all((each.out_features, each.in_features) == each.weight.shape for each in layers)
    assert model.embedding.num_embeddings == 129
    assert block.attention.split == block.attention.qkv.matrix_rows == [16, 8, 8], "rows of query, key and value"
    assert (block.attention.num_heads, block.attention.num_kv_heads) == (2, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_embedding_of_two_stages_is_known_as_such(tied: bool):
    for index in (0, 1):
        model = GPT(ModelConfig(**SHAPE, tie_embeddings=tied), torch.device("meta"), Stage(index, 2))
        cut_gpt(model, dist.ProcessGroup(0, 2), runs=False)
        if model.embedding is not None:
            assert getattr(model.embedding.weight, "shared_embedding", False) is tied
        if tied and index == 1:
            assert model.head.weight is model.embedding.weight


def test_cut_weights_delay_their_gradients_as_whole_ones_do():
    model = build(delay_wgrad_layers=1)
    cut_gpt(model, dist.ProcessGroup(0, 2), runs=False)
    marked = {name for name, param in model.named_parameters() if getattr(param, "skip_backward_post_hook", False)}
    parts = ("attention.qkv", "attention.out", "ffn.gate_up", "ffn.down")
    assert marked == {"head.weight", *(f"blocks.1.{part}.weight" for part in parts)}
