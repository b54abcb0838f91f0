"""The wrapped module's attributes are reached through the wrapper, and errors inside properties are not hidden."""

import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

from typing import Any

import pytest
import torch
from loops import assert_same, make_batches, make_model, plain_grads, plain_twin, wrap
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import Linear, Sequential


class Scaled(nn.Module):
    """As users write models: with a configuration, settings, properties, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.temperature = 1.0
        self.net = make_model(fuse=False)

    def __len__(self) -> int:
        return 7

    @property
    def broken(self) -> int:
        return self.net.no_such_attribute  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - 1).square().mean()


class Recording(DistributedDataParallel):
    """A subclass as users write them."""

    temperature = 2.0  # a default in the class, as models have it too

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, DistributedDataParallelConfig())
        self.history: list[float] = []

    @property
    def last(self) -> float:
        return self.no_history[-1]  # type: ignore[no-any-return, operator, index]


def test_attributes_and_methods_of_the_module() -> None:
    model = Scaled()
    ddp = wrap(model, overlap_grad_reduce=True)
    assert ddp.config is model.config
    assert ddp.net is model.net
    assert ddp.temperature == 1.0
    for name in ("_calls", "__calls", "calls__"):
        setattr(model, name, 3)
        assert getattr(ddp, name) == 3
    assert ddp.ddp_config.overlap_grad_reduce
    assert [hasattr(ddp, name) for name in ("net", "loss", "nothing", "broken")] == [True, True, False, False]
    assert getattr(ddp, "nothing", None) is None
    with pytest.raises(TypeError, match=r"has no len\(\)"):  # no container, and always true where tested
        len(ddp)
    assert bool(ddp)


def test_parameters_are_named_by_torchs_arguments() -> None:
    model = nn.Sequential(make_model(), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[2].weight = model[1].weight
    ddp = wrap(model)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in ddp.named_parameters("job", remove_duplicate=False)] == [
        f"job.module.{name}" for name in names
    ]
    assert len(list(ddp.named_parameters())) == len(names) - 1
    assert list(ddp.named_parameters(recurse=False)) == []


def test_an_attribute_is_set_where_it_is_read() -> None:
    model = Scaled()
    ddp = wrap(model)
    (x,) = make_batches(1)
    expected = model(x) / 4.0
    ddp.temperature = 4.0
    assert model.temperature == 4.0
    assert torch.equal(ddp(x), expected)
    ddp.mark = "new"  # neither has it: the wrapper's, as under torch's wrapper
    assert not hasattr(model, "mark")
    model.mark = "the module's"
    assert ddp.mark == "new"
    ddp.mark = "newer"
    assert model.mark == "the module's"
    model.module = "the module's"
    ddp.module, before = model, ddp.module
    assert ddp.module is before and model.module == "the module's", "as the names of torch's tables are"
    ddp.eval()  # both have it, and each its own
    assert (ddp.training, model.training) == (False, False)
    model.train()
    assert (ddp.training, model.training) == (False, True)


def test_an_attribute_of_the_wrapper_is_the_wrappers_whatever_the_module_has() -> None:
    model = make_model()
    for name in ("plan", "iteration", "_launched", "readiness", "_bucket_params"):
        setattr(model, name, name)
    twin = copy.deepcopy(model)
    ddp = wrap(model, overlap_grad_reduce=True)
    ddp(make_batches(1)[0]).sum().backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    assert (ddp.iteration, model.iteration) == (1, "iteration")
    assert vars(model).keys() == vars(twin).keys()
    recording = Recording(Scaled())
    recording.temperature = 3.0
    assert (recording.temperature, recording.module.temperature) == (3.0, 1.0)


def test_errors_are_those_of_whoever_failed() -> None:
    recording = Recording(Scaled())
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'nothing'"):
        recording.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="'broken'"):
        recording.broken  # noqa: B018
    for kind in (Recording, type("FurtherDown", (Recording,), {})):
        with pytest.raises(AttributeError, match="no_history"):  # and not 'last'
            kind(Scaled()).last  # noqa: B018
    bare = DistributedDataParallel.__new__(DistributedDataParallel)  # as pickle and copy make one
    with pytest.raises(AttributeError, match="'DistributedDataParallel' object has no attribute 'config'"):
        bare.config  # noqa: B018


def test_a_copy_is_plain_and_has_what_was_set() -> None:
    ddp = wrap(Scaled())
    ddp.temperature = 3.0
    twin = copy.deepcopy(ddp)
    assert type(twin) is Scaled
    assert twin.temperature == 3.0
    one, other = copy.deepcopy([ddp, ddp.module])
    assert one is other, "one model, whichever way it is held"


def test_hooks_that_a_program_has_put_on_layers_stay() -> None:
    net, seen = nn.Sequential(nn.Linear(2, 2)), []
    net[0].register_forward_pre_hook(lambda layer, args: seen.append(layer))
    ddp = wrap(net)
    ddp(torch.ones(1, 2))
    ddp.unwrap()(torch.ones(1, 2))
    assert seen == [net[0]] * 2


def test_training_through_a_method_of_the_module() -> None:
    """Its backward comes through no forward of the wrapper."""
    model = Scaled()
    twin = plain_twin(model)
    ddp = wrap(model, overlap_grad_reduce=True)
    batches = make_batches(2)
    with ddp.no_sync():
        ddp.loss(batches[0]).backward()
    ddp.loss(batches[1]).backward()
    ddp.finish_grad_sync()
    for batch in batches:
        twin.loss(batch).backward()
    assert_same({name: param.main_grad for name, param in model.named_parameters()}, plain_grads(twin))
    ddp.zero_grad_buffer()
    model.net[0].bias.requires_grad_(False)
    ddp.loss(batches[0]).backward()
    with pytest.raises(RuntimeError, match=r"'net\.0\.bias' was frozen .* after wrapping"):
        ddp.finish_grad_sync()


@pytest.mark.in_turn
def test_compiled_through_the_wrapper() -> None:
    model = Scaled()
    ddp = wrap(model)
    ddp.temperature = 2.0
    (x,) = make_batches(1)
    compiled = torch.compile(ddp, backend="eager")
    assert torch.equal(compiled(x), model(x))
    assert compiled.config is model.config
    torch.compiler.reset()


def test_a_wrapped_layer_among_others_is_drained_once() -> None:
    """The wrapper passes ``backward_dw`` through, and does not count as a second module that delays."""
    ddp = wrap(Linear(8, 8, fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
    chain = Sequential(ddp)
    x = torch.randn(2, 8)
    for _ in range(2):
        chain(x).sum().backward()
    chain.backward_dw()
    assert chain.need_backward_dw()  # the second microbatch's
    chain.backward_dw()
    assert not chain.need_backward_dw()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_code_written_for_hugging_face_models() -> None:
    model = gpt2()
    ddp = wrap(model, overlap_grad_reduce=True)
    assert ddp.config.n_layer == 2
    ddp.config.use_cache = False
    ddp.gradient_checkpointing_enable()
    tokens = torch.arange(8).unsqueeze(0)
    loss = ddp(input_ids=tokens, labels=tokens).loss
    loss.backward()
    ddp.finish_grad_sync()
    twin = gpt2()
    twin(input_ids=tokens, labels=tokens).loss.backward()
    for name, param in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).main_grad, param.grad)
    ours = ddp.generate(tokens, max_new_tokens=3, do_sample=False)
    assert torch.equal(ours, twin.generate(tokens, max_new_tokens=3, do_sample=False))


def test_the_wrappers_own_names_hide_nothing_of_a_hugging_face_model() -> None:
    model = gpt2()
    ddp = wrap(model)
    mine: set[str] = {name for name in (*vars(type(ddp)), *vars(ddp)) if not name.startswith("_")}
    modules: set[str] = mine & set(dir(nn.Module())) | {"device"}  # the wrapper's answer is the model's
    assert sorted(name for name in mine - modules if hasattr(model, name)) == []
    assert ddp.device == model.device
    names: dict[str, Any] = dict(ddp.named_parameters())
    assert list(names) == [f"module.{name}" for name, _ in model.named_parameters()]  # torch's wrapper's
