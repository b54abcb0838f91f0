"""``convert_linears`` and embeddings: which become fused, and how Hugging Face's subclasses stay what they are."""

import copy
import os
import pickle
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.whisper.modeling_whisper import WhisperPositionalEmbedding

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Embedding, convert_linears, unconvert

TOKENS = torch.tensor([[1, 2, 0, 2], [5, 1, 0, 0]])
SUBCLASSES = {
    "Gemma's, which scales": lambda: Gemma3TextScaledWordEmbedding(7, 4, 0, embed_scale=3.0),
    "Bart's, which shifts": lambda: BartLearnedPositionalEmbedding(9, 4),
}


def grads_of(module: nn.Module) -> list[Tensor]:
    module(TOKENS).cos().sum().backward()
    return [param.grad.clone() for param in module.parameters()]


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_a_subclass_of_transformers_keeps_its_forward(kind: str) -> None:
    torch.manual_seed(0)
    module = SUBCLASSES[kind]()
    plain, cls = copy.deepcopy(module), type(module)
    assert convert_linears(module).converted == ("",)
    assert isinstance(module, cls) and isinstance(module, Embedding)
    assert convert_linears(module).skipped == {"": "already fused"}
    for copied in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(copied) is type(module)
        ddp = DistributedDataParallel(copied)
        assert torch.equal(ddp(TOKENS), plain(TOKENS))
        plain.zero_grad()
        for ours, theirs in zip(grads_of(ddp), grads_of(plain), strict=True):
            assert torch.equal(ours, theirs)
        assert [record.num_fused_writes for record in ddp.records] == [1]
        ddp.unwrap()
    assert unconvert(module) == ("",)
    assert type(module) is cls and vars(module).keys() == vars(plain).keys()


def test_a_subclass_of_transformers_without_a_forward_of_its_own() -> None:
    cls = type("OnlyInitialises", (nn.Embedding,), {"__module__": "transformers.models.any"})
    module, plain = cls(7, 4), nn.Embedding(7, 4)
    plain.load_state_dict(module.state_dict())
    assert convert_linears(module).converted == ("",) and isinstance(module, cls)
    ddp = DistributedDataParallel(module)
    for ours, theirs in zip(grads_of(ddp), grads_of(plain), strict=True):
        assert torch.equal(ours, theirs)
    assert [record.num_fused_writes for record in ddp.records] == [1]


def test_an_embedding_is_one_again_after_unconvert() -> None:
    module = nn.Embedding(7, 4, padding_idx=0)
    before = vars(module).keys()
    assert convert_linears(module).converted == ("",)
    assert type(module) is Embedding and module.fuse_wgrad_accumulation
    assert unconvert(module) == ("",)
    assert type(module) is nn.Embedding and vars(module).keys() == before
    ours = Embedding(7, 4, fuse_wgrad_accumulation=True)
    assert unconvert(ours) == ("",)
    assert type(ours) is Embedding and not ours.fuse_wgrad_accumulation


class ReadsItsWeight(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight.abs())


class Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class CallsTorchs(nn.Embedding):
    __module__ = "transformers.models.new"

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.Embedding.forward(self, tokens)


class CallsAbove(CallsTorchs):
    __module__ = "transformers.models.new"

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class AsksAbove(nn.Embedding):
    __module__ = "transformers.models.new"

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, super().__getattr__("weight").abs())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Embedding(7, 4, sparse=True), "Embedding has sparse=True, whose gradient autograd delivers"),
        (lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), "Embedding has scale_grad_by_freq=True, whose"),
        (lambda: ReadsItsWeight(7, 4), "ReadsItsWeight is a subclass of Embedding and may use its weight"),
        (lambda: Scaled(7, 4), "Scaled is a subclass of Embedding and may use its weight"),
        (lambda: WhisperPositionalEmbedding(7, 4), "WhisperPositionalEmbedding is a subclass of Embedding and may use"),
        *(
            (lambda cls=cls: cls(7, 4), f"{cls.__name__} is a subclass of Embedding and may use its weight")
            for cls in (CallsTorchs, CallsAbove, AsksAbove)
        ),
    ],
    ids=[
        *("sparse", "by frequency", "reads its weight", "a user's", "transformers' without super()", "calls torch's"),
        *("a class above calls torch's", "super() of another function"),
    ],
)
def test_what_is_left_to_autograd_is_named(make: Any, reason: str) -> None:
    module = make()
    cls = type(module)
    conversion = convert_linears(module)
    assert conversion.converted == () and reason in conversion.skipped[""]
    assert type(module) is cls


def test_lookups_take_no_part_of_the_flops() -> None:
    """A tied matrix counts once, as the head's."""
    model = nn.ModuleDict({"embedding": nn.Embedding(100, 4), "head": nn.Linear(4, 100, bias=False)})
    assert convert_linears(copy.deepcopy(model)).fused_share == 1.0
    model["head"].weight = model["embedding"].weight
    conversion = convert_linears(model)
    assert conversion.converted == ("embedding", "head") and conversion.fused_share == 1.0
    alone = nn.ModuleDict({"embedding": nn.Embedding(100, 4), "router": nn.Bilinear(4, 4, 5, bias=False)})
    assert convert_linears(alone).fused_share == 0.0 and list(convert_linears(alone).left_out) == ["router.weight"]
