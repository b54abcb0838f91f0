"""Models that are made on the meta device, and become memory as their units are made."""

from typing import Any

import pytest
import torch
from modules import FEATURES, make
from sharded_twin import (
    KINDS,
    Net,
    assert_same_weights,
    batches_of,
    mean_loss,
    options_of,
    rank_and_size,
    shard_blocks,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


def on_meta(make_model: Any) -> Any:
    with torch.device("meta"):
        return make_model()


def ones(module: nn.Module) -> None:
    """Initialises a module's own parameters and buffers."""
    with torch.no_grad():
        for number, tensor in enumerate((*module.parameters(recurse=False), *module.buffers(recurse=False))):
            tensor.fill_(1.0 + number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_parameters_are_those_of_init_fn(kind: str) -> None:
    def on_each_rank() -> None:
        twin = Net()
        for module in twin.modules():
            ones(module)
        model = on_meta(Net)
        shard_blocks(
            model,
            device="cpu" if kind in ("alone", "zero1", "zero2", "zero3") else None,
            init_fn=ones,
            **options_of(kind),
        )
        assert_same_weights(model, twin)
        mean_loss(model(torch.ones(2, 5))).backward()

    if KINDS[kind]:
        simulate(on_each_rank, KINDS[kind])
    else:
        on_each_rank()


def test_parameters_are_those_of_reset_parameters_and_the_first_ranks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.scale = nn.Parameter(torch.empty(()))

        def reset_parameters(self) -> None:
            nn.init.constant_(self.scale, 0.5)

        def forward(self, x: Any) -> Any:
            return self.norm(self.linear(x)) * self.scale

    def on_each_rank() -> None:
        rank, _ = rank_and_size()
        model = on_meta(Scaled)
        torch.manual_seed(rank)
        fully_shard(model, device="cpu")
        torch.manual_seed(0)
        twin = nn.Linear(5, 4)
        with model.unsharded():
            assert torch.equal(model.linear.weight, twin.weight)
            assert model.scale == 0.5
        assert model.norm.running_var.tolist() == [1.0] * 4
        mean_loss(model(torch.ones(2, 5))).backward()

    simulate(on_each_rank, 2)


def test_a_module_that_nobody_initialises_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Net has parameters or buffers on the meta device and no reset_parameters\(\)"
    ):
        shard_blocks(on_meta(Net), device="cpu")
    linear = on_meta(lambda: nn.Linear(2, 2))
    linear.reset_parameters = None
    with pytest.raises(ValueError, match=r"Linear has parameters .* and no reset_parameters\(\)"):
        fully_shard(linear, device="cpu")


def test_without_a_device() -> None:
    with pytest.raises(
        ValueError, match="parameters on the meta device: say by device, or a DeviceMesh, where they are"
    ):
        fully_shard(on_meta(lambda: nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="parameters on the meta device: say by device"):
        fully_shard(on_meta(lambda: nn.Linear(2, 2, bias=False)))


def test_modules_are_initialised_in_the_order_of_their_construction() -> None:
    """With one seed they get the values of a model that was never on the meta device."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Linear(5, 5))

    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = fully_shard(on_meta(build), device="cpu")
    with model.unsharded():
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_tied_parameters_stay_one_and_keep_their_marks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5, bias=False)
            self.second = nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.first.weight.mark = "kept"

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x).tanh())

    def on_each_rank() -> None:
        model = fully_shard(on_meta(Tied), device="cpu")
        assert model.second.weight is model.first.weight
        assert model.first.weight.mark == "kept"
        assert len(list(model.parameters())) == 2
        mean_loss(model(torch.ones(2, 5))).backward()

    simulate(on_each_rank, 2)


def test_a_tied_parameter_is_initialised_once() -> None:
    """The program's own function leaves out the second place, as the first has given it its values."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5, bias=False)
            self.second = nn.Linear(5, 5, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x))

    model: Any = on_meta(Tied)
    initialised: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        if not initialised:
            nn.init.constant_(module.weight, 3.0)
        initialised.append(module)

    fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=initialise)
    assert len(initialised) == 2
    with model.unsharded():
        assert torch.equal(model.second.weight, torch.full((5, 5), 3.0))


def test_a_part_on_meta_and_a_part_with_values() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = nn.Linear(5, 5)
            self.fresh = on_meta(lambda: nn.Linear(5, 5))

        def forward(self, x: Any) -> Any:
            return self.fresh(self.loaded(x))

    model = Half()
    before = model.loaded.weight.detach().clone()
    fully_shard(model, device="cpu", init_fn=ones)
    with model.unsharded():
        assert torch.equal(model.loaded.weight, before)
        assert (model.fresh.weight == 1).all()


def test_frozen_parameters_stay_frozen_and_dtypes_what_they_are() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5, dtype=torch.bfloat16), nn.LayerNorm(5))
        return model.requires_grad_(False)

    model = fully_shard(on_meta(build), device="cpu")
    assert [param.dtype for param in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert not any(param.requires_grad for param in model.parameters())


def test_an_ignored_parameter_that_has_no_memory_is_named() -> None:
    """Torch would compute with it: ``linear`` reads where its memory would begin."""
    model = on_meta(lambda: nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"Linear.weight is ignored and on the meta device: materialise it first"):
        fully_shard(model, mesh=WORLD_OF_ONE, device="cpu", ignored_params={model.weight})


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "packed GroupedMLP"])
def test_our_modules(name: str) -> None:
    """Modules delay after ``fully_shard`` too: the marks on parameters are kept."""

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, FEATURES), nn.Identity())
        torch.manual_seed(0)
        inner = make(name, delay=True).to("meta")
        model[1] = inner
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert any(bucket.layout.delayed for unit in model.units for bucket in unit.buckets)
        mean_loss(model(batches_of(0, 1, dtype=torch.float32)[0])).backward()
        assert model[1].need_backward_dw()
        model[1].backward_dw()
        model.finish_grad_sync()
        assert all(param.grad is not None for param in model.parameters())

    simulate(on_each_rank, 2)


class Rotary(nn.Module):
    """Has what partial initialisers forget: buffers of several kinds, in no state dict or in one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("inv_freq", torch.ones(5), persistent=False)
        self.register_buffer("table", torch.ones(3, 5, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))

    def forward(self, x: Any) -> Any:
        return self.linear(x * self.inv_freq) * self.scale


OWN = ("scale", "inv_freq", "table", "count", "mask")


def writes_all_but(left_out: str, write: Any) -> Any:
    def initialise(module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name != left_out:
                write(module, name, tensor)

    return initialise


def through_data(module: nn.Module, name: str, tensor: Any) -> None:
    tensor.data.zero_()  # whose version counter is another


def in_place(module: nn.Module, name: str, tensor: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.zeros_like(tensor))


def by_another(module: nn.Module, name: str, tensor: Any) -> None:
    values = torch.zeros_like(tensor)
    setattr(module, name, nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values)


@pytest.mark.parametrize("write", [through_data, in_place, by_another])
@pytest.mark.parametrize("left_out", OWN)
@pytest.mark.sampled(6)
def test_what_nobody_writes_is_refused_by_name(left_out: str, write: Any) -> None:
    kind = "parameter" if left_out == "scale" else "buffer"
    model = nn.Sequential(nn.Linear(5, 5), on_meta(Rotary))
    with pytest.raises(
        ValueError, match=rf"{kind} '1\.{left_out}' of Sequential .* no value .* module\.{left_out}\.copy_"
    ):
        fully_shard(model, device="cpu", init_fn=writes_all_but(left_out, write))


@pytest.mark.parametrize("write", [through_data, in_place, by_another])
def test_what_is_written_in_any_way_is_taken(write: Any) -> None:
    model = fully_shard(on_meta(Rotary), device="cpu", init_fn=writes_all_but("", write))
    assert not any(buffer.any() for buffer in model.buffers())
    with model.unsharded():
        assert not any(param.any() for param in model.parameters())


def test_a_buffer_that_the_initialiser_takes_away_needs_no_values() -> None:
    def initialise(module: nn.Module) -> None:
        writes_all_but("mask", in_place)(module)
        if isinstance(module, Rotary):
            module.mask = None

    model = fully_shard(on_meta(Rotary), device="cpu", init_fn=initialise)
    assert model.mask is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_buffer_of_minus_ones_is_written(dtype: torch.dtype) -> None:
    """All bits of such an integer are set, as those of the NaN that marks unwritten floats."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("last_seen", torch.full((4,), -1, dtype=dtype))

        def reset_parameters(self) -> None:
            self.last_seen.fill_(-1)

        def forward(self, x: Any) -> Any:
            return self.linear(x)

    model = fully_shard(on_meta(Numbered), device="cpu", mesh=WORLD_OF_ONE)
    assert model.last_seen.tolist() == [-1] * 4


def test_the_remedy_of_the_message_helps() -> None:
    class Frequencies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(4), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.inv_freq

    def initialise(module: nn.Module) -> None:
        module.inv_freq.copy_(torch.arange(4.0))

    with pytest.raises(ValueError, match=r"no reset_parameters\(\)"):
        fully_shard(on_meta(Frequencies), device="cpu")
    model = fully_shard(on_meta(Frequencies), device="cpu", init_fn=initialise)
    assert model.inv_freq.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_part_that_nobody_writes_is_refused() -> None:
    def initialise(module: nn.Module) -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param[:2] = 1.0

    with pytest.raises(ValueError, match=r"'weight' of Linear .* no value in 15 of 25 elements"):
        fully_shard(on_meta(lambda: nn.Linear(5, 5)), device="cpu", init_fn=initialise)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.complex64])
def test_a_part_of_a_buffer_that_nobody_writes_is_refused(dtype: torch.dtype) -> None:
    """Whose elements have at least four bytes, or two that are NaN."""

    class Table(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("table", torch.ones(4, dtype=dtype))

    def initialise(module: nn.Module) -> None:
        module.reset_parameters()
        module.table[:3] = 1

    with pytest.raises(ValueError, match=r"buffer 'table' of Table .* no value in [12] of [48] elements"):
        fully_shard(on_meta(Table), device="cpu", init_fn=initialise)


@pytest.mark.parametrize("writer", [0, 1])
def test_with_init_sync_the_first_rank_alone_must_write(writer: int) -> None:
    def on_each_rank() -> float:
        rank, _ = rank_and_size()
        init_fn = ones if rank == writer else lambda module: None
        model = fully_shard(on_meta(lambda: nn.Linear(5, 5)), device="cpu", init_fn=init_fn)
        with model.unsharded():
            return model.weight.sum().item()

    if writer == 0:
        assert simulate(on_each_rank, 2) == [25.0, 25.0]
    else:
        with pytest.raises(Exception, match="'weight' of Linear was on the meta device"):
            simulate(on_each_rank, 2)


def test_without_init_sync_every_rank_must_write() -> None:
    def on_each_rank() -> None:
        rank, _ = rank_and_size()
        init_fn = ones if rank == 0 else lambda module: None
        fully_shard(on_meta(lambda: nn.Linear(5, 5)), device="cpu", init_fn=init_fn, init_sync=False)

    with pytest.raises(Exception, match="'weight' of Linear was on the meta device"):
        simulate(on_each_rank, 2)


class WithBuffer(nn.Module):
    """A linear layer with a buffer on the meta device."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("codes", buffer)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def fill_part(codes: torch.Tensor) -> None:
    codes.data.copy_(torch.tensor([0xA5, 0, 0xA5, 1]))


@pytest.mark.parametrize("write", [lambda codes: codes.fill_(0xA5), fill_part])
def test_bytes_that_look_unwritten_are_taken(write: Any) -> None:
    """Any value of a byte may be the program's own: whoever writes some other value, or counts, has written."""
    model = WithBuffer(torch.empty(4, dtype=torch.uint8, device="meta"))
    fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=lambda module: write(module.codes))
    assert model.codes[0] == 0xA5


@pytest.mark.parametrize(
    ("dtype", "bits", "mark"),
    [
        (torch.int8, torch.int8, -0x5B),
        (torch.int16, torch.int16, -0x5A5B),
        (torch.float8_e4m3fn, torch.uint8, 0xFF),
        (torch.float8_e5m2, torch.uint8, 0xFF),
    ],
)
def test_values_of_two_bytes_at_most_may_look_unwritten(dtype: torch.dtype, bits: torch.dtype, mark: int) -> None:
    """A table of all int16, and NaN in 8 bits."""
    model = WithBuffer(torch.empty(4, dtype=dtype, device="meta"))
    given = torch.tensor([mark, 0, mark, 1], dtype=bits)
    fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=lambda module: module.codes.data.view(bits).copy_(given))
    assert torch.equal(model.codes.view(bits), given)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_buffers_are_written_or_refused(dtype: torch.dtype) -> None:
    model = WithBuffer(torch.empty(4, dtype=dtype, device="meta"))
    with pytest.raises(ValueError, match=r"buffer 'codes' of WithBuffer .* no value after"):
        fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=lambda module: None)
    model = WithBuffer(torch.empty(4, dtype=dtype, device="meta"))
    fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=lambda module: module.codes.fill_(2 - 1j))
    assert model.codes.tolist() == [2 - 1j] * 4


def test_a_sparse_buffer_may_come_from_the_meta_device() -> None:
    model = WithBuffer(torch.sparse_coo_tensor(size=(3, 3), device="meta"))

    def initialise(module: nn.Module) -> None:
        module.codes = torch.eye(3).to_sparse()

    fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=initialise)
    assert torch.equal(model.codes.to_dense(), torch.eye(3))


def test_an_initialiser_that_leaves_a_tensor_on_meta_is_refused() -> None:
    def initialise(module: nn.Module) -> None:
        module.codes = torch.ones(4, device="meta")

    model = WithBuffer(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match="buffer 'codes' of WithBuffer was on the meta device, and is on it still"):
        fully_shard(model, WORLD_OF_ONE, device="cpu", init_fn=initialise)


def test_an_ignored_parameter_alone_in_its_module_may_wait_for_its_memory() -> None:
    """The program makes it later: nobody asks its module for a ``reset_parameters()``."""
    scale = nn.Module()
    scale.weight = nn.Parameter(torch.ones(3, device="meta"))
    model: Any = nn.Sequential(nn.Linear(3, 3))
    model.scale = scale
    model.forward = lambda x: model[0](x)
    fully_shard(model, WORLD_OF_ONE, device="cpu", ignored_params=[scale.weight])
    assert scale.weight.is_meta
    model(torch.ones(1, 3)).sum().backward()


def test_an_ignored_parameter_on_meta_says_nothing_of_the_device() -> None:
    model: Any = nn.Sequential(fully_shard(nn.Linear(3, 3), WORLD_OF_ONE))
    model.register_parameter("later", nn.Parameter(torch.ones(3, device="meta")))
    fully_shard(model, WORLD_OF_ONE, ignored_params=[model.later])
    assert model.later.is_meta
    model(torch.ones(1, 3)).sum().backward()


def test_a_llama_gets_its_frequencies() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)

    def parameters_alone(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param, std=0.02)

    def on_each_rank(init_fn: Any = None) -> Any:
        model = on_meta(lambda: transformers.LlamaForCausalLM(config))
        init_fn = init_fn or model._init_weights
        for layer in model.model.layers:
            fully_shard(layer, init_fn=init_fn, device="cpu")
        fully_shard(model, init_fn=init_fn, device="cpu")
        tokens = torch.arange(8)[None]
        model(tokens, labels=tokens).loss.backward()
        return model.model.rotary_emb.inv_freq

    plain = transformers.LlamaForCausalLM(config)
    for frequencies in simulate(on_each_rank, 2):
        assert torch.equal(frequencies, plain.model.rotary_emb.inv_freq)
    with pytest.raises(
        Exception, match=r"buffer 'model.rotary_emb.inv_freq' of LlamaForCausalLM was on the meta device"
    ):
        simulate(on_each_rank, 2, parameters_alone)
