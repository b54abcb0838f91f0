"""A program as a script that stands alone: a maintainer runs it, and reads it as a user has written it."""

import re

import vocabulary
from mesh_programs import Meshes
from pipeline_programs import Pipeline
from programs import Program
from recipe_programs import Recipes
from run_programs import Run
from sources import program_source, tolerance_of


def script(program: Program | Pipeline | Run | Recipes | Meshes, title: str, *, compares: bool = True) -> str:
    """Python that runs the program and compares it with plain PyTorch; without ``compares``, that only runs it."""
    body = program_source(program)
    if not compares:
        body = re.sub(r"def make_plain.*?(?=\ndef )", "", body, flags=re.DOTALL)
        body = body[: body.index("def plain(")]
    body += "\n" + _main(program, compares, with_folder="{folder}" in body)
    body = vocabulary.definitions(body) + body
    head = [f'"""{title}"""', "", *vocabulary.imports(body)]
    head += ["", f"torch.set_default_dtype(torch.{default_dtype(program)})", "", ""]
    return "\n".join(head) + re.sub(r"\n{4,}", "\n\n\n", body)


def default_dtype(program: Program | Pipeline | Run | Recipes | Meshes) -> str:
    """Of tensors that nobody says anything about; bf16 parameters are rounded from it."""
    return "float32" if program.dtype in ("bfloat16", "autocast") else program.dtype


def _main(program: Program | Pipeline | Run | Recipes | Meshes, compares: bool, *, with_folder: bool) -> str:
    lines = ['if __name__ == "__main__":']
    lines.append(f"    found = [[{{}} for rank in range(ranks)] for ranks in {[p.ranks for p in program.phases]}]")
    if compares:
        lines += ["    expected = [[{} for rank in ranks] for ranks in found]", "    plain(expected)"]
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
