"""A program as a script that stands alone: a maintainer runs it, and reads it as a user has written it."""

import inspect
import re

import vocabulary
from programs import Program
from sources import program_source, tolerance_of

IMPORTS = {
    "maingrad.ddp": (
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "DistributedOptimizer",
        "GradScaler",
        "clip_grad_norm",
        "load_checkpoint",
        "recorded_backward_order",
        "save_checkpoint",
    ),
    "maingrad.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "maingrad.launch": ("simulate",),
    "maingrad.te_integration": (
        "GroupedLinear",
        "GroupedMLP",
        "LayerNormLinear",
        "LayerNormMLP",
        "Linear",
        "WgradQueue",
        "convert_linears",
        "delayed_wgrad",
    ),
    "torch.distributed.device_mesh": ("init_device_mesh",),
}
"""All that programs use of the library, and what of torch is not in the vocabulary."""


_STDLIB = ("copy", "gc", "math", "tempfile", "zlib")
_TORCH = {
    "dist": "import torch.distributed as dist",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
}


def script(program: Program, title: str, *, compares: bool = True) -> str:
    """Python that runs the program and compares it with plain PyTorch; without ``compares``, that only runs it."""
    body = program_source(program)
    if not compares:
        body = re.sub(r"def make_plain.*?(?=\ndef )", "", body, flags=re.DOTALL)
        body = body[: body.index("def plain(")]
    body += "\n" + _main(program, compares)
    body = _definitions(body) + body
    head = [f'"""{title}"""', ""]
    head += [f"import {name}" for name in _STDLIB if _uses(body, name)] + ["", "import torch"]
    head += [line for name, line in _TORCH.items() if _uses(body, name)]
    for module, names in IMPORTS.items():
        used = [name for name in names if _uses(body, name)]
        head += [f"from {module} import {', '.join(used)}"] if used else []
    head += ["", f"torch.set_default_dtype(torch.{default_dtype(program)})", "", ""]
    return "\n".join(head) + re.sub(r"\n{4,}", "\n\n\n", body)


def default_dtype(program: Program) -> str:
    """Of tensors that nobody says anything about; bf16 parameters are rounded from it."""
    return "float32" if program.dtype in ("bfloat16", "autocast") else program.dtype


def _uses(body: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){name}\b", body) is not None


def _definitions(body: str) -> str:
    """Sources of what the body uses of the vocabulary, and of what these use."""
    sources = {
        name: inspect.getsource(value)
        for name, value in vars(vocabulary).items()
        if getattr(value, "__module__", "") == vocabulary.__name__
    }
    used: set[str] = set()
    waiting = [body]
    while waiting:
        text = waiting.pop()
        for name in [name for name in sources if name not in used and _uses(text, name)]:
            used.add(name)
            waiting.append(sources[name])
    return "".join(f"{source}\n\n" for name, source in sources.items() if name in used)


def _main(program: Program, compares: bool) -> str:
    lines = ['if __name__ == "__main__":']
    lines.append(f"    found = [[{{}} for rank in range(ranks)] for ranks in {[p.ranks for p in program.phases]}]")
    if compares:
        lines += ["    expected = [[{} for rank in ranks] for ranks in found]", "    plain(expected)"]
    with_folder = len(program.phases) > 1
    indent = "    "
    if with_folder:
        lines.append("    with tempfile.TemporaryDirectory() as folder:")
        indent += "    "
    for index, phase in enumerate(program.phases):
        lines += [indent + line for line in garbage_lines(phase.garbage)]
        folder = "folder" if with_folder else "None"
        lines.append(f"{indent}simulate(train_{index}, {phase.ranks}, found[{index}], {folder}, seed={program.order})")
        if compares:
            lines.append(f"{indent}compare(found[{index}], expected[{index}], tolerance={tolerance_of(program)})")
    return "\n".join(lines) + "\n"


def garbage_lines(garbage: str) -> list[str]:
    """Sets the collector."""
    return {"off": ["gc.disable()"], "often": ["gc.enable()", "gc.set_threshold(50, 2, 2)"]}[garbage]
