"""What imports what, what stays in one file, and which names are public."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import maingrad

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "ddp", "te_integration", "fsdp", "launch")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

# A folder may import the folders after it; te_integration and fsdp meet in ddp only.
MAY_IMPORT = {
    "launch": {"launch", "te_integration", "fsdp", "ddp", "kernels"},
    "te_integration": {"te_integration", "ddp", "kernels"},
    "fsdp": {"fsdp", "ddp", "kernels"},
    "ddp": {"ddp", "kernels"},
    "kernels": {"kernels"},
}
LIBRARY_MAY_IMPORT = {"torch", "triton", "einops", *sys.stdlib_module_names}
LAUNCH_ONLY = (
    "tyro",
    "rich",
    "matplotlib",
    "safetensors",
    "tensorboard",
    "transformers",
    "accelerate",
)

CONTRACT = {
    "main_grad",
    "get_main_grad",
    "__fsdp_param__",
    "grad_added_to_main_grad",
    "overwrite_main_grad",
    "zero_out_wgrad",
    "skip_backward_post_hook",
}

PUBLIC = {
    "maingrad.kernels": {
        "PerExpert",
        "embedding_wgrad_accumulate",
        "group_offsets",
        "grouped_bias_grad",
        "grouped_dgrad",
        "grouped_linear",
        "grouped_scale_grad",
        "grouped_wgrad_accumulate",
        "permute_rows",
        "glu_named",
        "scaled_glu",
        "scaled_glu_backward",
        "unpermute_rows",
        "wgrad_accumulate",
    },
    "maingrad.ddp": {
        "WORLD_OF_ONE",
        "CollectiveError",
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "DistributedOptimizer",
        "GradScaler",
        "GraphedTrainingStep",
        "Lion",
        "Muon",
        "MuonGroups",
        "PendingSave",
        "add_grad",
        "clip_grad_norm",
        "init_process_group",
        "load_checkpoint",
        "muon_groups",
        "prepare_background_saves",
        "recorded_backward_order",
        "save_checkpoint",
    },
    "maingrad.fsdp": {
        "PLACEMENTS",
        "AxisPlacement",
        "FSDPModule",
        "GraphedTrainingStep",
        "MixedPrecisionPolicy",
        "Placement",
        "Placements",
        "ShardedAdam",
        "ShardedAdamW",
        "fully_shard",
        "translate_state_dicts",
    },
    "maingrad.te_integration": {
        "DelayedScaling",
        "Embedding",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "GraphPool",
        "GroupedLinear",
        "GroupedMLP",
        "LayerNormLinear",
        "LayerNormMLP",
        "Linear",
        "LinearCrossEntropy",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "Recipe",
        "ScaledClampedQGeGLU",
        "ScaledSwiGLU",
        "Sequential",
        "SymmetricExchange",
        "TokenDispatcher",
        "TokenTransport",
        "WgradQueue",
        "autocast",
        "convert_linears",
        "delayed_wgrad",
        "graphed_chunks",
        "linear_cross_entropy",
        "make_graphed_callables",
        "moe_permute",
        "moe_permute_with_probs",
        "moe_unpermute",
        "unconvert",
    },
    "maingrad.launch": {"graphed", "make_optimizer", "parallelize", "simulate", "ulysses", "verify"},
}

NAMES = {
    "WORLD_OF_ONE",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FSDPModule",
    "GradScaler",
    "GraphedTrainingStep",
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MixedPrecisionPolicy",
    "Placements",
    "Sequential",
    "WgradQueue",
    "clip_grad_norm",
    "convert_linears",
    "delayed_wgrad",
    "fully_shard",
    "init_process_group",
    "load_checkpoint",
    "make_graphed_callables",
    "graphed",
    "make_optimizer",
    "parallelize",
    "save_checkpoint",
    "simulate",
    "verify",
}
"""Of ``maingrad`` itself. Where two folders have the name, it is that of the folder named first above."""

LIBRARY = [name for name in PUBLIC if name != "maingrad.launch"]

# One iteration with everything in it that the core offers: a fused layer, an unfused one, two microbatches, a step.
FUSED_STEP = """
import torch
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import Linear
torch.manual_seed(0)
net = torch.nn.Sequential(Linear(8, 16, fuse_wgrad_accumulation=True), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
model = DistributedDataParallel(net.to(torch.bfloat16), DistributedDataParallelConfig(overlap_grad_reduce=True))
optimizer = DistributedOptimizer(model, lr=0.1, max_grad_norm=1.0)
before = [parameter.detach().clone() for parameter in model.parameters()]
with model.no_sync():
    model(torch.randn(3, 8).bfloat16()).square().mean().backward()
model(torch.randn(3, 8).bfloat16()).square().mean().backward()
model.finish_grad_sync()
optimizer.step()
fused = {record.name: record.num_fused_writes for record in model.records if record.num_fused_writes}
assert fused == {"0.weight": 2}, fused
assert optimizer.grad_norm > 0
assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
"""


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def trees() -> list[tuple[str, str, ast.Module]]:
    """Room, label and syntax of each source file."""
    return [(room_of(path), label(path), ast.parse(path.read_text())) for path in SOURCES]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every import as (level, dotted name): level 0 is absolute, 2 is ``from ..room``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.level, node.module
            else:
                yield from ((node.level, alias.name) for alias in node.names)


def outside(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, where the packages ``blocked`` are as good as not installed."""
    preamble = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
    return subprocess.run([sys.executable, "-P", "-c", preamble + code], capture_output=True, text=True)


def of_all(*rooms: str) -> str:
    """Code that imports all public names of ``rooms``."""
    return "; ".join(f"from {room} import *" for room in rooms)


def test_the_root_module_imports_nothing_of_the_library() -> None:
    """pytest loads it under other names, so a relative import there would load the library twice."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    at_run_time = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))
    ]
    for level, name in imports(ast.Module(at_run_time, [])):
        assert level == 0 and name.partition(".")[0] in sys.stdlib_module_names, name


def test_public_names_of_the_root_are_pinned() -> None:
    assert set(maingrad.__all__) == NAMES
    assert not NAMES - set(dir(maingrad))
    for name in NAMES:
        homes = [importlib.import_module(room) for room in PUBLIC if name in PUBLIC[room]]
        assert getattr(maingrad, name) is getattr(homes[0], name)
    with pytest.raises(AttributeError, match="module 'maingrad' has no attribute 'paralelize'"):
        maingrad.paralelize  # noqa: B018


def test_type_checkers_see_the_names_of_the_root() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (shown,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    assert {alias.name for node in shown.body for alias in node.names} == NAMES


@pytest.mark.parametrize("room", ["ddp", "launch"])
def test_type_checkers_see_the_names_that_a_room_loads_when_asked(room: str) -> None:
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    (shown,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in shown.body for alias in node.names}
    loaded = importlib.import_module(f"maingrad.{room}")
    assert homes == loaded._HOMES and set(homes) == PUBLIC[f"maingrad.{room}"]
    with pytest.raises(AttributeError, match=f"module 'maingrad.{room}' has no attribute 'paralelize'"):
        loaded.paralelize  # noqa: B018


ROOT_ALONE = """
import maingrad, maingrad.hugging_face
assert "torch" not in sys.modules
maingrad.fsdp.fully_shard
from maingrad import parallelize, make_optimizer
assert "torch" in sys.modules
"""


@pytest.mark.in_turn
def test_the_root_loads_torch_for_a_name_and_core_dependencies_are_enough_to_train_a_fused_step() -> None:
    """No triton, and nothing from any extra."""
    done = outside(ROOT_ALONE + FUSED_STEP, "triton", *LAUNCH_ONLY)
    assert done.returncode == 0, done.stderr


def test_the_trainer_is_found_by_the_roots_name() -> None:
    from maingrad.hugging_face import Trainer
    from maingrad.launch.training import hugging_face

    assert Trainer is hugging_face.Trainer is maingrad.hugging_face.Trainer
    with pytest.raises(ImportError, match="cannot import name 'Trianer'"):
        from maingrad.hugging_face import Trianer  # noqa: F401


@pytest.mark.in_turn
def test_imports_follow_the_direction() -> None:
    for room, path, tree in trees():
        for level, name in imports(tree):
            first, where = name.partition(".")[0], f"{path}: {name}"
            if level == 0:
                assert first != "maingrad", f"{where}: between folders of the library, import relatively"
                assert room == "launch" or first in LIBRARY_MAY_IMPORT, f"{where} belongs in launch/"
            else:
                here = Path(path).parts[:-1]
                first = (*here[: len(here) - level + 1], *name.split("."))[0]
                assert first in {*MAY_IMPORT[room], "__version__"}, f"{where}: not from {room}"


@pytest.mark.in_turn
def test_the_contract_stays_in_one_file() -> None:
    for _, path, tree in trees():
        for node in ast.walk(tree) if path != "ddp/contract/main_grad.py" else ():
            if isinstance(node, ast.Attribute | ast.Constant):
                name = node.attr if isinstance(node, ast.Attribute) else node.value
                where = f"{path}, line {node.lineno}"
                assert name not in CONTRACT, f"{where}: {name} is for ddp/contract/main_grad.py; call what it offers"


@pytest.mark.in_turn
def test_folders_files_and_functions_stay_short() -> None:
    for folder in {path.parent for path in SOURCES}:
        entries = {path.relative_to(folder).parts[0] for path in SOURCES if folder in path.parents} - {"__init__.py"}
        assert len(entries) <= 12, f"{folder.relative_to(ROOT)}: look for the second concept"
    for _, path, tree in trees():
        assert (ROOT / path).read_text().count("\n") <= 600, f"{path}: look for the second concept"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 80, f"{path}: {node.name} has {length} lines"


@pytest.mark.in_turn
def test_docstrings_begin_with_what_they_are_about() -> None:
    """A reader of one docstring has not read the one above: "Of the parameter." says of what, and not what."""
    for _, path, tree in trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                first = node.value.value.split()[:1]
                assert first not in (["Of"], ["That"], ["None:"]), f"{path}, line {node.lineno}"


@pytest.mark.in_turn
def test_library_code_does_not_print_and_leaves_the_root_logger_alone() -> None:
    for room, path, tree in trees():
        for node in ast.walk(tree) if room != "launch" else ():
            if isinstance(node, ast.Call):
                called, where = ast.unparse(node.func), f"{path}, line {node.lineno}"
                assert called != "print", where
                assert called not in ("logging.basicConfig", "logging.info", "logging.warning"), where
                assert called != "logging.getLogger" or node.args, f"{where}: the root logger"


@pytest.mark.parametrize("module", PUBLIC)
@pytest.mark.sampled(len(PUBLIC))
def test_public_names_are_pinned(module: str) -> None:
    room = importlib.import_module(module)
    assert set(room.__all__) == PUBLIC[module]
    assert all(hasattr(room, name) for name in PUBLIC[module])


def test_every_room_has_its_names_pinned() -> None:
    assert set(PUBLIC) == {f"maingrad.{room_of(path)}" for path in SOURCES}


@pytest.mark.slow
def test_the_library_loads_nothing_of_launch() -> None:
    """Not even where it is installed. Only what our own import adds is looked at."""
    before = "import sys, torch, torch._dynamo; before = set(sys.modules)"
    done = outside(f"{before}; {of_all(*LIBRARY)}; print(*(set(sys.modules) - before))")
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & set(LAUNCH_ONLY)
    assert "maingrad.launch" not in done.stdout.split()


@pytest.mark.slow
def test_wrapping_loads_no_checkpoint_of_torchs() -> None:
    """A torch without torch.distributed has none, and others take a quarter of a second for it."""
    done = outside(f"import sys; {of_all(*LIBRARY)}; print('torch.distributed.checkpoint' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


@pytest.mark.in_turn
def test_imports_under_another_default_device() -> None:
    done = outside(f"import torch; torch.set_default_device('meta'); {of_all('maingrad.ddp', 'maingrad.fsdp')}")
    assert done.returncode == 0, done.stderr


def test_the_core_alone_tells_its_version() -> None:
    done = outside("from maingrad.__main__ import main; sys.exit(main(['--version']))", *LAUNCH_ONLY)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"maingrad {re.escape(maingrad.__version__)}, torch \S+\n", done.stdout)


def test_the_command_without_its_extra_names_the_remedy() -> None:
    """pip makes the command with the core alone, too."""
    done = outside("from maingrad.__main__ import main; sys.exit(main(['verify', 'x.py:f']))", *LAUNCH_ONLY)
    assert done.returncode == 2
    assert done.stderr.startswith("maingrad: error: the package tyro is missing; pip install '.[launch]'")
    assert done.stderr.count("\n") == 1, "no traceback"


def test_a_missing_package_would_be_noticed() -> None:
    """The tests above block imports for real."""
    done = outside("import einops", "einops")
    assert "ModuleNotFoundError: No module named 'einops'" in done.stderr
