"""The GPT: its parts against plain references, its initial weights, its dtypes."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.launch.config.mesh import Stage
from maingrad.launch.config.run import ModelConfig
from maingrad.launch.model.gpt import GPT, Attention, build_model, rotary_tables, rotate
from maingrad.launch.parallelizing.exchanges import ContextRanks
from maingrad.te_integration import Embedding, Float8CurrentScaling, Linear, autocast

SHAPE: dict[str, Any] = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "context_length": 16,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **changes})


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_stage_has(tied: bool):
    """Its blocks, and the ends of the model; both copies of a tied embedding are known as such."""
    ends = ("embedding", "norm", "head")

    def parts(index: int, count: int) -> tuple[list[str], list[str], bool]:
        model = GPT(config(num_layers=4, tie_embeddings=tied), torch.device("meta"), Stage(index, count))
        marked = getattr(getattr(model.embedding, "weight", None), "shared_embedding", False)
        return [name for name, _ in model.blocks.named_children()], [e for e in ends if getattr(model, e)], marked

    assert parts(0, 1) == (["0", "1", "2", "3"], [*ends], False)
    assert parts(0, 3) == (["0", "1"], ["embedding"], tied)
    assert parts(1, 3) == (["2"], [], False)
    assert parts(2, 3) == (["3"], ["embedding"] * tied + ["norm", "head"], tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_begins_with_the_weights_of_the_whole(tied: bool):
    settings = config(num_layers=3, tie_embeddings=tied)
    whole, found = build_model(settings, seed=3), set[str]()
    for index in range(2):
        for name, param in build_model(settings, seed=3, stage=Stage(index, 2)).named_parameters():
            assert torch.equal(param, whole.get_parameter(name)), name
            found.add(name)
    assert found >= dict(whole.named_parameters()).keys()


def test_shapes_and_loss():
    model = build_model(config(), seed=0)
    x, y = tokens(3, 10), tokens(3, 10).flip(0)
    y[0, 0] = 0  # which counts as others do
    logits = model(x)
    assert logits.shape == (3, 10, 256)
    assert torch.allclose(model(x, y), F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    assert model(x, y).item() == pytest.approx(math.log(256), abs=0.1), "an untrained model knows nothing"


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@pytest.mark.parametrize("init_std", [1e-3, 0.3])
@torch.no_grad()
def test_the_whole_model_against_its_parts(init_std: float):
    """Weights so small that the norms' epsilon counts, and so large that every branch does."""
    model = build_model(config(init_std=init_std), seed=0)
    for norm in (model.norm, *(n for block in model.blocks for n in (block.attention_norm, block.ffn_norm))):
        norm.weight.uniform_(0.5, 1.5)
    inputs = tokens(3, 10)
    x = model.embedding.weight[inputs]
    for block in model.blocks:
        normed = rms_norm(x, block.attention_norm.weight)
        x = x + block.attention(normed, model.rotary_cos[:10], model.rotary_sin[:10])
        gate, up = (rms_norm(x, block.ffn_norm.weight) @ block.ffn.gate_up.weight.T).split([48, 48], dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ block.ffn.down.weight.T
    logits = rms_norm(x, model.norm.weight) @ model.head.weight.T
    torch.testing.assert_close(model(inputs), logits, rtol=1e-4, atol=1e-4 * float(logits.std()))


def test_a_checkpoint_has_the_parameters_alone():
    model = build_model(config(), seed=0)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not any(tensor.isnan().any() for tensor in model.buffers())


def test_too_long_a_sequence():
    with pytest.raises(ValueError, match=r"17 tokens is longer than model\.context_length = 16"):
        build_model(config(), seed=0)(tokens(1, 17))


def test_too_long_a_sequence_of_ranks_that_share_it():
    """The sum of their parts counts; the longest that fits is computed."""

    def job() -> None:
        model = build_model(config(), seed=0)
        model.share_sequences(ContextRanks(dist.group.WORLD, False))
        assert model(tokens(1, 8)).shape == (1, 8, 256)
        with pytest.raises(ValueError, match="18 tokens is longer"):
            model(tokens(1, 9), tokens(1, 9))

    simulate(job, 2)
    assert build_model(config(), seed=0)(tokens(1, 16)).shape == (1, 16, 256)


def test_parts_of_a_loss_are_those_of_the_last_training_forward():
    """With targets: neither a validation nor a forward for logits changes them. A dense model has none."""
    experts = build_model(config(num_experts=2, top_k=1, expert_ffn_dim=8), seed=0)
    dense = build_model(config(), seed=0)
    x, y = tokens(2, 8), tokens(2, 8).flip(0)
    for model in (experts, dense):
        assert model.loss_parts is None
        loss, parts = model(x, y), model.loss_parts
        model(x)
        model.eval()
        in_evaluation = model(x.flip(0), y.flip(0))
        assert model.loss_parts is parts and (parts is None) is (model is dense)
        model.train()(x, y)
        if parts is not None:
            assert float(in_evaluation) == pytest.approx(float(parts.cross_entropy), rel=1e-5) != float(loss.detach())
            assert model.loss_parts is not parts and not parts.cross_entropy.requires_grad
            assert all(each.shape == () and each.dtype is torch.float32 for each in parts)


@pytest.mark.parametrize("delayed", [0, 1, 2, 3])
def test_the_last_layers_and_the_head_delay_their_weight_gradients(delayed: int):
    model = build_model(config(num_layers=3, delay_wgrad_layers=delayed), seed=0)
    marked = {name for name, param in model.named_parameters() if getattr(param, "skip_backward_post_hook", False)}
    layers = {name.split(".")[1] for name in marked if name.startswith("blocks.")}
    assert layers == {str(index) for index in range(3 - delayed, 3)}
    assert ("head.weight" in marked) is (delayed > 0) and len(marked) == 4 * delayed + (delayed > 0)


def test_rotary_against_complex_numbers():
    cos, sin = rotary_tables(12, 8, base=100.0)
    x = torch.randn(2, 3, 12, 8)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angle = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(4) / 4)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(rotate(x, cos, sin), torch.cat((turned.real, turned.imag), dim=-1), atol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    cos, sin = rotary_tables(16, 8, base=100.0)
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(v.expand(1, 1, 16, 8), cos, sin)[0, 0] for v in (q, k))
    scores = turned_q @ turned_k.T
    for distance in range(16):
        assert torch.allclose(scores.diagonal(-distance), scores[distance, 0], atol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_query_attention_against_plain_softmax(num_kv_heads: int):
    attention = Attention(config(num_kv_heads=num_kv_heads, fuse_wgrad_accumulation=False), None).double()
    cos, sin = (table.double() for table in rotary_tables(10, 8, base=10_000.0))
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    q, k, v = attention.qkv(x).split([32, 8 * num_kv_heads, 8 * num_kv_heads], dim=-1)
    heads = []
    for head in range(4):
        mine = head // (4 // num_kv_heads)  # query heads share a key head in consecutive groups
        q_h, k_h, v_h = (part[..., 8 * i : 8 * i + 8] for part, i in ((q, head), (k, mine), (v, mine)))
        q_h, k_h = (rotate(part[:, None], cos, sin)[:, 0].double() for part in (q_h, k_h))
        scores = (q_h @ k_h.mT / math.sqrt(8)).masked_fill(torch.ones(10, 10).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v_h)
    expected = attention.out(torch.cat(heads, dim=-1))
    assert torch.allclose(attention(x, cos, sin), expected, atol=1e-5)


def test_no_position_sees_a_later_one():
    model = build_model(config(), seed=0)
    x = tokens(1, 12)
    changed = x.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 256
    same, other = model(x)[0], model(changed)[0]
    assert torch.allclose(same[:7], other[:7], atol=1e-6)
    assert not torch.allclose(same[7:], other[7:], atol=1e-3)


def test_no_position_of_a_document_sees_a_later_one_or_another_document():
    model = build_model(config(), seed=0)
    x, positions = tokens(1, 12), torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    plain = model(x, positions=positions)[0]
    for changed, seen_by in ((2, range(2, 5)), (8, range(8, 12))):
        other = x.clone()
        other[0, changed] = (other[0, changed] + 1) % 256
        moved = (model(other, positions=positions)[0] - plain).abs().amax(-1) > 1e-6
        assert [place for place in range(12) if moved[place]] == [*seen_by]


def test_dropout_acts_in_training_only_and_follows_the_seed():
    model = build_model(config(dropout=0.3), seed=0)
    x = tokens(2, 8)
    torch.manual_seed(5)
    first, second = model(x), model(x)
    torch.manual_seed(5)
    assert torch.equal(first, model(x))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(x), model(x))


def test_dropout_acts_on_the_embedding_on_each_branch_and_on_attention_weights():
    model, seen = build_model(config(dropout=0.4, num_layers=1), seed=0), dict[str, Tensor]()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: seen.update(embedded=args[0]))
    block.ffn_norm.register_forward_pre_hook(lambda module, args: seen.update(between=args[0]))
    block.register_forward_hook(lambda module, args, output: seen.update(after=output[0]))
    model(tokens(4, 16))
    embedded, between, after = seen["embedded"], seen["between"], seen["after"]
    for part in (embedded, between - embedded, after - between):
        assert float((part == 0).float().mean()) == pytest.approx(0.4, abs=0.1)
    given = torch.randn(1, 16, 32), model.rotary_cos, model.rotary_sin
    assert not torch.equal(block.attention(*given), block.attention(*given))
    model.eval()
    assert torch.equal(block.attention(*given), block.attention(*given))


def test_rotary_positions_have_the_base_of_the_configuration():
    model = build_model(config(rotary_base=100.0), seed=0)
    for table, wanted in zip((model.rotary_cos, model.rotary_sin), rotary_tables(16, 8, base=100.0), strict=True):
        assert torch.equal(table, wanted)


@pytest.mark.parametrize("fused_loss", [False, True])
def test_the_head_is_made_as_the_configuration_says(fused_loss: bool):
    for fuse, device in ((True, "cpu"), (False, "meta")):
        settings = config(fused_loss=fused_loss, fuse_wgrad_accumulation=fuse, param_dtype="bfloat16")
        head = GPT(settings, torch.device(device)).head
        assert (head.weight.dtype, head.weight.device.type) == (torch.bfloat16, device)
        assert head.fuse_wgrad_accumulation is fuse


def test_a_recipe_leaves_the_head_as_it_is():
    """Its errors are the loss's own; the layers before it are quantised."""
    model, uses = build_model(config(param_dtype="bfloat16"), seed=0), dict[str, Any]()
    for name, module in (("head", model.head), ("down", model.blocks[1].ffn.down)):
        module.register_forward_hook(lambda _, args, output, name=name: uses.update({name: (args[0], output)}))
    with autocast(recipe=Float8CurrentScaling()):
        model(tokens(2, 8))
    assert torch.equal(uses["head"][1], F.linear(uses["head"][0], model.head.weight))
    assert not torch.equal(uses["down"][1], F.linear(uses["down"][0], model.blocks[1].ffn.down.weight))


def test_initial_weights_follow_gpt2():
    model = build_model(config(dim=128, ffn_dim=256, num_layers=8, init_std=0.05), seed=0)
    block = model.blocks[3]
    for weight, std in (
        (model.embedding.weight, 0.05),
        (model.head.weight, 0.05),
        (block.attention.qkv.weight, 0.05),
        (block.ffn.gate_up.weight, 0.05),
        (block.attention.out.weight, 0.05 / 4),
        (block.ffn.down.weight, 0.05 / 4),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert torch.equal(block.ffn_norm.weight, torch.ones(128))


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(config(), seed=3)
    assert torch.equal(before, torch.get_rng_state()), "building a model must not move the dropout stream"
    torch.manual_seed(2)
    second, other = build_model(config(), seed=3), build_model(config(), seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_bf16_starts_from_the_rounded_fp32_weights():
    half, full = build_model(config(param_dtype="bfloat16"), seed=0), build_model(config(), seed=0)
    for a, b in zip(half.parameters(), full.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())
    assert half.rotary_cos.dtype == torch.float32
    assert half(tokens(1, 4)).dtype == torch.bfloat16
    assert half(tokens(1, 4), tokens(1, 4)).dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_tied_head_is_one_parameter_that_trains(tied: bool):
    model = build_model(config(tie_embeddings=tied), seed=0)
    assert (model.head.weight is model.embedding.weight) is tied
    wrapped = DistributedDataParallel(model)
    reference = build_model(config(tie_embeddings=tied, fuse_wgrad_accumulation=False), seed=0)
    x, y = tokens(2, 8), tokens(2, 8).flip(0)
    wrapped(x, y).backward()
    reference(x, y).backward()
    wrapped.finish_grad_sync()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert {record.name for record in wrapped.records} == set(expected)
    for record in wrapped.records:
        assert torch.allclose(record.view, expected[record.name], atol=1e-6), record.name


def test_every_matrix_is_fused():
    model = build_model(config(), seed=0)
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    fused = {
        f"{name}.weight"
        for name, m in model.named_modules()
        if isinstance(m, Linear | Embedding) and m.fuse_wgrad_accumulation
    }
    assert fused == matrices
    assert len(fused) == 4 * 2 + 2


def test_meta_device_allocates_nothing():
    model = GPT(config(), torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_tied_head_that_delays_marks_the_weight_of_both() -> None:
    """The head has got another weight than the one that it marked when it was made."""
    for tied in (False, True):
        model = build_model(ModelConfig(**SHAPE, tie_embeddings=tied, delay_wgrad_layers=1), seed=0)
        assert model.head.weight.skip_backward_post_hook
