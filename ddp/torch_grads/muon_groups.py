"""``muon_groups``: which parameters of a model are matrices for Muon, and why the others are not."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..contract.module import DelayedWgradModule
from .muon import Muon, whole_shape

__all__ = ["MuonGroups", "muon_groups"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = nn.modules.conv._ConvNd
_LINEAR = (nn.Linear, DelayedWgradModule)
_HEADS = ("lm_head", "head", "output", "output_layer", "score", "classifier", "unembed", "embed_out")
"""Last parts of the names of heads' modules."""
_FUSED = ("qkv", "query_key_value", "c_attn", "gate_up")
"""Parts of names of modules or parameters whose weight is several matrices, one below the other."""
_INNER = ("lora_a", "lora_down")
"""Parts of names, in lower case, of a fused layer's adapters whose rows are not those of the layer."""


class MuonGroups(NamedTuple):
    """What ``muon_groups`` has found."""

    groups: list[dict[str, Any]]
    """For ``param_groups``: one group for each ``split``."""
    left_out: dict[str, str]
    """Name of each other trainable parameter -> why it is no matrix for Muon."""

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of all matrices: what ``keep_matrices_whole`` takes."""
        return tuple(name for group in self.groups for name in group["params"])

    @property
    def why_nothing(self) -> str:
        """The reason of an error where there are no groups."""
        reasons = "; ".join(dict.fromkeys(self.left_out.values())) or "nothing is trained"
        return f"finds no matrix for Muon, and the other optimizer would update all ({reasons}): leave Muon out"


def muon_groups(
    model: nn.Module, *, routers: bool = False, split: Mapping[str, int | Sequence[int]] | None = None, **options: Any
) -> MuonGroups:
    """Find the matrices of a model that Muon should update: weights of its linear layers and experts. ::

        muon = muon_groups(model, lr=0.02)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_matrices_whole=muon.matrices)
        optimizer = DistributedOptimizer(DistributedDataParallel(model, config), lr=3e-4, param_groups=muon.groups)

    Left out, for another class: embeddings, and heads, tied ones too; vectors, and matrices of one row or column;
    convolutions; routers; matrices of modules that are no linear layers.

    model    or its wrapper, or sharded; names are those of the model's parameters
    routers  take routers too
    split    pattern of names -> parts of fused matrices, as ``Muon`` takes them. Known without: equal halves of a
             ``gate_up`` linear layer, and of a gated ``LayerNormMLP``'s or ``GroupedMLP``'s first weight; thirds of a
             ``qkv`` whose rows are three times its columns; query, key and value of a ``qkv_proj`` of transformers; and
             what a linear layer says itself, in an attribute ``matrix_rows``: the rows of each part
    options  of ``Muon``, for all groups

    Raises ``ValueError`` for a fused matrix of which the parts are not known, and for a pattern that matches no matrix.
    """
    if hasattr(model, "bucket_params"):  # the wrapper: groups go by the names of its module
        model = model.get_submodule("module")
    heads = _heads_of(model)
    owners = {id(param): (path, owner) for path, owner, param in _owned(model)}
    embedded = {id(param) for _, owner, param in _owned(model) if isinstance(owner, _EMBEDDINGS)}
    left_out: dict[str, str] = {}
    parts: dict[str, int | Sequence[int]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        path, owner = owners[id(param)]
        is_linear = isinstance(owner, _LINEAR)
        if id(param) in embedded:
            why = "an embedding, or tied to one"
        elif param.dim() < 2 or param.is_complex() or 1 in whole_shape(param)[-2:]:
            why = "a vector"
        elif isinstance(owner, _CONVOLUTIONS):
            why = "of a convolution"
        elif "Conv1D" in type(owner).__name__:
            why = "of transformers' Conv1D, whose rows are inputs"
        elif param.dim() > 3 or not (is_linear or _is_of_experts(name, param, owner)):
            why = f"not of a linear layer, but of {type(owner).__name__}"
        elif id(param) in heads:
            why = "of the head"
        elif not routers and _is_router(model, path):
            why = "of a router: routers=True takes it"
        else:
            parts[name] = _parts_of(model, name, param, split or {}, owner if is_linear else None)
            continue
        left_out[name] = why
    for pattern in split or {}:
        if not fnmatch.filter(parts, pattern):
            raise ValueError(f"muon_groups: split has {pattern!r}, and no matrix is called so")
    alike: dict[Any, list[str]] = {}
    for name, each in parts.items():
        alike.setdefault(each if isinstance(each, int) else tuple(each), []).append(name)
    groups = [{**options, "params": names, "optimizer": Muon, "split": each} for each, names in alike.items()]
    return MuonGroups(groups, left_out)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Each module's path, the module, and each of its own parameters. The first owner of a tied one comes last."""
    found = [(path, owner, param) for path, owner in model.named_modules() for param in owner._parameters.values()]
    return ((path, owner, param) for path, owner, param in reversed(found) if param is not None)


def _heads_of(model: nn.Module) -> set[int]:
    """``id`` of parameters of heads: by their model, their names or what they are tied to; else by their rows."""
    finders: list[Any] = [getattr(each, "get_output_embeddings", None) for each in model.modules()]
    said = [find() for find in finders if find is not None]  # by Hugging Face's models
    found = {id(param) for head in said if isinstance(head, nn.Module) for param in head.parameters()}
    owned = list(_owned(model))
    tables = [owner for _, owner, _ in owned if isinstance(owner, _EMBEDDINGS)]
    linear = [
        (path, param)
        for path, owner, param in owned
        if isinstance(owner, _LINEAR)
        and param.dim() == 2
        and not (isinstance(owner, _EMBEDDINGS) or _is_router(model, path))
    ]
    found |= {id(param) for path, param in linear if path.rpartition(".")[2] in _HEADS}
    found |= {id(param) for _, param in linear} & {id(table.weight) for table in tables}
    if not found:  # as many rows as the largest table, but for one as long as a hidden layer is wide: of positions
        hidden = {whole_shape(param)[1] for _, param in linear}
        rows = max((each.num_embeddings for each in tables if each.num_embeddings not in hidden), default=0)
        found = {id(param) for _, param in linear if whole_shape(param)[0] == rows}
    return found


def _is_router(model: nn.Module, path: str) -> bool:
    """A gate is a router where experts are beside it."""
    above, _, last = path.rpartition(".")
    return "router" in path.split(".") or (last == "gate" and hasattr(model.get_submodule(above), "experts"))


def _is_of_experts(name: str, param: Tensor, owner: nn.Module) -> bool:
    """Whether a parameter is a matrix for each expert: no table [heads, tokens, tokens], no ``nn.Bilinear``."""
    said = f"{name} {type(owner).__name__}".lower()
    return param.dim() == 3 and ("expert" in said or "moe" in said)


def _rows_of_qkv(model: nn.Module, path: str) -> list[int]:
    """Rows of query, key and value, as the attention of a model of transformers says; none where it does not."""
    attention: Any = model.get_submodule(path.rpartition(".")[0])
    config, width = getattr(attention, "config", None), getattr(attention, "head_dim", None)
    heads, groups = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    return [heads * width, groups * width, groups * width] if heads and groups and width else []


def _parts_of(
    model: nn.Module, name: str, param: Tensor, split: Mapping[str, int | Sequence[int]], linear: nn.Module | None
) -> int | Sequence[int]:
    """linear: the layer, if it is a linear one."""
    given = next((parts for pattern, parts in split.items() if fnmatch.fnmatchcase(name, pattern)), None)
    if given is not None:
        return given
    said: Sequence[int] | None = getattr(linear, "matrix_rows", None)
    if said is not None:
        return said
    path, _, local = name.rpartition(".")
    shape = whole_shape(param)
    second = getattr(linear, local.replace("fc1", "fc2"), None) if local.startswith("fc1_weight") else None
    if second is not None and shape[-2] == 2 * whole_shape(second)[-1]:  # a gate, which halves what the second takes
        return 2
    what = next((each for each in _FUSED if each in name.lower()), None)
    if what is None or set(_INNER) & set(name.lower().split(".")):
        return 1
    by_rows = linear is not None and not getattr(linear, "transposed", False)
    if by_rows and what == "gate_up":
        return 2
    if by_rows and path.endswith("qkv_proj") and sum(rows := _rows_of_qkv(model, path)) == shape[0]:
        return rows
    if by_rows and what == "qkv" and shape[0] == 3 * shape[1]:
        return 3
    raise ValueError(
        f"muon_groups: '{name}' {list(shape)} seems to be several matrices in one, and the rows of each are not "
        f'known: say split={{"*{what}*": [rows of each part]}}, or split={{"*{what}*": 1}} for one matrix'
    )
