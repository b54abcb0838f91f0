"""The layers that a block can have: how each is written with the library's modules, and in plain PyTorch.

To add one, add a function to ``KINDS`` that returns its source; what it needs goes into ``vocabulary.py``.
"""

from collections.abc import Callable, Iterator, Sequence

from programs import Block, Model

OUT_FEATURES = 3
IN_FEATURES = 5
NUM_EXPERTS = 3

Writer = Callable[[Block, int, bool], str]
"""Called with a block, the width, and whether plain PyTorch is wanted; returns an expression."""


def _call(name: str, *arguments: object, **options: object) -> str:
    given = [*map(repr, arguments), *(f"{key}={value!r}" for key, value in options.items())]
    return f"{name}({', '.join(given)})"


def linear(block: Block, ins: int, outs: int, plain: bool) -> str:
    bias = {} if block.bias else {"bias": False}
    if plain or not block.library:
        return _call("nn.Linear", ins, outs, **bias)
    return _call("Linear", ins, outs, **bias, **_wgrad(block))


def _wgrad(block: Block) -> dict[str, bool]:
    options = {}
    if block.fused:
        options["fuse_wgrad_accumulation"] = True
    if block.delayed:
        options["delay_wgrad_compute"] = True
    return options


def _square(block: Block, width: int, plain: bool) -> str:
    return linear(block, width, width, plain)


def _mlp(block: Block, width: int, plain: bool) -> str:
    up, down = linear(block, width, block.hidden, plain), linear(block, block.hidden, width, plain)
    return f"nn.Sequential({up}, nn.Tanh(), {down})"


def _norm_linear(block: Block, width: int, plain: bool) -> str:
    options = {} if block.bias else {"bias": False}
    options |= {"normalization": "RMSNorm"} if block.rms else {}
    if plain or not block.library:
        return _call("PlainLayerNormLinear", width, width, **options)
    return _call("LayerNormLinear", width, width, **options, **_wgrad(block))


def _norm_mlp(block: Block, width: int, plain: bool) -> str:
    options = {} if block.bias else {"bias": False}
    options |= {"normalization": "RMSNorm"} if block.rms else {}
    options |= {"activation": "swiglu"} if block.gated else {}
    if plain or not block.library:
        return _call("PlainLayerNormMLP", width, block.hidden, **options)
    return _call("LayerNormMLP", width, block.hidden, **options, **_wgrad(block))


def _grouped(block: Block, width: int, plain: bool) -> str:
    options = {} if block.bias else {"bias": False}
    options |= {"single_grouped_weight": True} if block.packed else {}
    if plain or not block.library:
        made = _call("PlainGroupedLinear", NUM_EXPERTS, width, width, **options)
    else:
        made = _call("GroupedLinear", NUM_EXPERTS, width, width, **options, **_wgrad(block))
    return _routed(block, made)


def _routed(block: Block, experts: str) -> str:
    return f"Routed({experts}, {NUM_EXPERTS}{', padded=True' if block.padded else ''})"


def _grouped_mlp(block: Block, width: int, plain: bool) -> str:
    options = {} if block.bias else {"bias": False}
    options |= {"single_grouped_weight": True} if block.packed else {}
    if plain or not block.library:
        made = _call("PlainGroupedMLP", NUM_EXPERTS, width, block.hidden, **options)
    else:
        made = _call("GroupedMLP", NUM_EXPERTS, width, block.hidden, **options, **_wgrad(block))
    return _routed(block, made)


def _hugging_face(name: str) -> Writer:
    def write(block: Block, width: int, plain: bool) -> str:
        drops = {"drops": True} if block.padded else {}
        made = _call("TopExperts", name, NUM_EXPERTS, width, block.hidden, **drops)
        return made if plain or not block.library else f"converted({made})"

    return write


def _branch(block: Block, width: int, plain: bool) -> str:
    return f"Branch({_square(block, width, plain)}, {_square(block, width, plain)})"


def _shared_branch(block: Block, width: int, plain: bool) -> str:
    """One way may be the library's, and the other is not."""
    return f"SharedBranch({_square(block, width, plain)}, {_square(Block(bias=block.bias), width, plain)})"


KINDS: dict[str, Writer] = {
    "linear": _square,
    "mlp": _mlp,
    "norm linear": _norm_linear,
    "norm mlp": _norm_mlp,
    "grouped linear": _grouped,
    "grouped mlp": _grouped_mlp,
    "experts": _mlp,
    "branch": _branch,
    "shared branch": _shared_branch,
    "idle": lambda block, width, plain: f"Idle({_square(block, width, plain)}, {width})",
    "counted": lambda block, width, plain: f"Counted({_square(block, width, plain)}, {width})",
    "scale": lambda block, width, plain: "Scale()",
    "clamped": lambda block, width, plain: _call("Clamped", width),
    "lookup": lambda block, width, plain: _call("Lookup", width, width),
    "attention": lambda block, width, plain: _call("Attention", width),
    "recurrent": lambda block, width, plain: _call("Recurrent", width),
    "convolution": lambda block, width, plain: "Convolution()",
    "layer norm": lambda block, width, plain: _call("nn.LayerNorm", width),
    "batch norm": lambda block, width, plain: _call("nn.BatchNorm1d", width),
    "weight norm": lambda block, width, plain: f"nn.utils.parametrizations.weight_norm(nn.Linear({width}, {width}))",
    "nothing": lambda block, width, plain: "nn.Identity()",
    "mixtral experts": _hugging_face("mixtral"),
    "gpt-oss experts": _hugging_face("gpt_oss"),
}

OURS = (
    "linear",
    "mlp",
    "norm linear",
    "norm mlp",
    "grouped linear",
    "grouped mlp",
    "experts",
    "branch",
    "shared branch",
    "idle",
    "mixtral experts",
    "gpt-oss experts",
)
"""Kinds that the library has modules for."""
HUGGING_FACE = ("mixtral experts", "gpt-oss experts")
"""Kinds whose modules are transformers', made the library's by ``convert_linears``."""
ONCE_DIFFERENTIABLE = ("attention", "recurrent", "grouped linear", "grouped mlp", *HUGGING_FACE)
"""Kinds of which torch has no second derivatives everywhere, or experts refuse them."""
IN_HALF = (*(kind for kind in OURS if kind != "experts"), "scale")
"""Kinds that programs in bf16 have."""


def layer(block: Block, width: int, plain: bool) -> str:
    """The expression of a block's layer."""
    made = KINDS[block.kind](block, width, plain)
    return f"Cast({made}, torch.float32)" if block.single else made


def _block(block: Block, width: int, plain: bool, prefix: str) -> str:
    options = "" if block.recompute == "no" else f', recompute="{block.recompute}"'
    options += ", penalty=True" if block.penalty else ""
    return f"{prefix}Residual({layer(block, width, plain)}{options})"


def paths(model: Model) -> list[str]:
    """Where each block is."""
    found = [f"blocks.{index}" for index in range(len(model.blocks))]
    if model.staged:
        stage = len(found) - 2
        found[-2:] = [f"blocks.{stage}.blocks.0", f"blocks.{stage}.blocks.1"]
    return found


def writes_in_forward(model: Model) -> bool:
    """Whether a forward writes parameters."""
    return any(block.kind == "clamped" for block in model.blocks)


def num_members(model: Model) -> int:
    """Of ``model.blocks``, without the one that comes twice."""
    return len(model.blocks) - model.staged


def block_order(model: Model) -> tuple[int, ...]:
    """In which they run."""
    members = num_members(model)
    return (*range(members + model.same_twice), *([0] * model.repeats))


def expert_paths(model: Model) -> list[str]:
    """Layers of which ranks have different ones."""
    return [f"{path}.layer" for path, block in zip(paths(model), model.blocks, strict=True) if block.kind == "experts"]


def tied_paths(model: Model) -> list[tuple[str, str]]:
    """Modules that share their weight."""
    if model.tie == "embedding":
        return [("stem.table", "head")]
    if model.tie == "blocks":
        square = [path for path, block in zip(paths(model), model.blocks, strict=True) if block.kind == "linear"]
        return [(f"{square[0]}.layer", f"{square[1]}.layer")]
    return []


def attribute(path: str) -> str:
    """``blocks.0.layer`` as Python has it."""
    found = "model"
    for part in filter(None, path.split(".")):
        found += f"[{part}]" if part.isdigit() else f".{part}"
    return found


def lines_of_model(model: Model, plain: bool, fails: bool) -> Iterator[str]:
    """The body of the function that makes it, without ``return``.

    fails  it can be made to raise
    """
    full = fails or model.recompute != "no" or any(block.recompute != "no" or block.penalty for block in model.blocks)
    prefix = "Full" if full else ""
    blocks = [_block(block, model.width, plain, prefix) for block in model.blocks]
    if model.staged:
        blocks[-2:] = [f"{prefix}Stage({blocks[-2]}, {blocks[-1]})"]
    stem = _call("nn.Linear", IN_FEATURES, model.width)
    if model.stem == "lookup":
        stem = _call("Lookup", IN_FEATURES, model.width)
    outs = IN_FEATURES if model.tie == "embedding" else OUT_FEATURES
    yield f"model = {prefix}Net("
    yield f"    stem={stem},"
    yield "    blocks=["
    yield from (f"        {block}," for block in blocks)
    yield "    ],"
    yield f"    head={_call('nn.Linear', model.width, outs)},"
    if model.repeats or model.same_twice:
        yield f"    order={block_order(model)},"
    if model.recompute != "no":
        yield f'    recompute="{model.recompute}",'
    yield ")"
    if model.same_twice:
        yield "model.blocks.append(model.blocks[0])"
    for first, second in tied_paths(model):
        yield f"{attribute(second)}.weight = {attribute(first)}.weight"
    yield from _frozen(model)
    if model.hooked:
        yield f"for param in {attribute(paths(model)[0])}.parameters():"
        yield "    if param.requires_grad:"
        yield "        param.register_hook(doubled)"
    if model.converted and not plain:
        yield "convert_linears(model)"


def _frozen(model: Model) -> Iterator[str]:
    if model.frozen_stem:
        yield "model.stem.requires_grad_(False)"
    for path, block in zip(paths(model), model.blocks, strict=True):
        if block.frozen == "all":
            yield f"{attribute(path)}.requires_grad_(False)"
        if block.frozen == "one way":
            branch = "layer.layer" if block.single else "layer"  # ``Cast`` is around it
            yield f"{attribute(path)}.{branch}.left.requires_grad_(False)"
        if block.frozen == "first":
            yield f"for param in [param for param in {attribute(path)}.parameters() if param.ndim > 1][:1]:"
            yield "    param.requires_grad_(False)"
        if block.frozen == "weights":
            yield f"for param in {attribute(path)}.parameters():"
            yield "    param.requires_grad_(param.ndim < 2)"


def all_paths(model: Model) -> Sequence[str]:
    """Modules that may be units, from the inside out."""
    inside = [
        f"{path}.layer" for path, block in zip(paths(model), model.blocks, strict=True) if block.kind != "nothing"
    ]
    stage = [f"blocks.{len(model.blocks) - 2}"] if model.staged else []
    return [*inside, *paths(model), *stage, "stem", "head"]
