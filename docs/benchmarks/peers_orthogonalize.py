"""Peers' orthogonalisations beside ours. ``python docs/benchmarks/peers_orthogonalize.py --wheels DIR --out DIR``.

Each peer runs in a process of its own with a limit of time. DIR holds wheels and tar.xz files of packages, which are
unpacked, not installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

PEERS = ("tree", "torch", "torch_compiled", "emerging", "emerging_cublas", "gram_torch", "gram_quack")
LIMIT_S = {"gram_quack": 170, "emerging": 120}
SIMPLE = (3.4445, -4.7750, 2.0315)


def unpack(wheels, folder):
    """Paths to add to sys.path."""
    for each in sorted(Path(wheels).iterdir()):
        if each.suffix == ".whl":
            zipfile.ZipFile(each).extractall(folder)
        elif each.name.endswith(".tar.xz"):
            with tarfile.open(each) as file:
                file.extractall(folder, filter="data")
    return [str(folder), str(folder / "nvidia_cutlass_dsl/python_packages"), str(folder / "nvidia_cutlass_dsl/dsl_packages")]


def contender(name):
    """A function of a batch [B, m, n] in fp32."""
    import torch
    from torch.optim import _muon as torch_muon

    if name == "tree":
        from maingrad.kernels.optimizer.orthogonal.orthogonalize import orthogonalize

        return orthogonalize
    if name.startswith("torch"):
        loop = partial(torch_muon._zeropower_via_newtonschulz, ns_coefficients=SIMPLE, ns_steps=5, eps=1e-7)
        if name == "torch_compiled":
            compiled = torch.compile(torch_muon._zeropower_via_newtonschulz, dynamic=False)
            loop = lambda each: compiled(each, SIMPLE, 5, 1e-7)  # noqa: E731
        return lambda matrices: [loop(each) for each in matrices]
    if name.startswith("emerging"):
        torch.set_float32_matmul_precision("medium")  # bf16: what its SYRK needs
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
        from emerging_optimizers.triton_kernels import syrk

        tuner = syrk.syrk_kernel_bf16
        tuner.configs = [  # its own list has 162 for a shape: minutes
            c for c in tuner.configs
            if (c.kwargs["TILE_M"], c.kwargs["TILE_N"], c.kwargs["TILE_K"], c.kwargs["GROUP_SIZE_M"])
            in ((128, 128, 64, 8), (128, 256, 64, 8)) and c.num_stages in (3, 4)
            and c.num_warps == (8 if c.kwargs["TILE_N"] == 256 else 4)
        ] + [
            c for c in tuner.configs
            if (c.kwargs["TILE_M"], c.kwargs["TILE_N"], c.kwargs["TILE_K"], c.kwargs["GROUP_SIZE_M"], c.num_warps)
            == (128, 128, 64, 8, 8) and c.num_stages in (3, 4)
        ]
        if name == "emerging":
            return lambda matrices: [newton_schulz(each, 5, "simple", use_syrk=True) for each in matrices]
        return lambda matrices: newton_schulz(matrices, 5, "simple")
    from gram_newton_schulz import GramNewtonSchulz

    whole = GramNewtonSchulz(
        ns_use_kernels=name == "gram_quack", ns_coefficients=[list(SIMPLE)] * 5, gram_newton_schulz_reset_iterations=[2]
    )
    return whole


def measure(name):
    import torch
    from tune_orthogonalize import in_turns

    from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS, newton_schulz_reference

    call = contender(name)
    batches = [(8, 4096, 4096), (8, 1024, 4096), (4, 14336, 4096), (4, 4096, 14336)]
    torch.manual_seed(0)
    data = []
    for shape in batches:
        began = time.time()
        matrices = torch.randn(*shape, device="cuda")
        row = {"peer": name, "matrices": shape[0], "rows": shape[1], "columns": shape[2]}
        try:
            with torch.no_grad():
                found = call(matrices)
                exact = newton_schulz_reference(matrices[:1].double(), COEFFICIENTS["simple"], torch.float64)
                row["error"] = float((found[0].double() - exact[0]).norm() / exact.norm())
                del found, exact
                row["ms"] = in_turns({"x": partial(call, matrices)}, rounds=5, budget_ms=80.0)["x"]
            data.append(matrices)
        except Exception as error:  # noqa: BLE001
            row["problem"] = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
        row["seconds"] = round(time.time() - began, 1)
        print(json.dumps(row), flush=True)
    if len(data) == len(batches):
        data.insert(2, torch.randn(*batches[2], device="cuda"))

        def everything():
            for matrices in data:
                call(matrices)

        with torch.no_grad():
            ms = in_turns({"x": everything}, rounds=5, budget_ms=400.0)["x"]
        print(json.dumps({"peer": name, "matrices": 28, "rows": "one rank", "ms": ms}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "runs/tune"))
    parser.add_argument("--wheels", default="")
    parser.add_argument("--peer", default="")
    options = parser.parse_args()
    if options.peer:
        return measure(options.peer)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    paths = unpack(options.wheels, folder) if options.wheels else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *paths])}
    lines = ""
    for name in PEERS:
        with open(out / f"peer_{name}.err", "w") as errors, open(out / f"peer_{name}.jsonl", "w") as file:
            command = [sys.executable, __file__, "--peer", name]
            try:
                code = subprocess.run(
                    command, stdout=file, stderr=errors, env=environment, timeout=LIMIT_S.get(name, 90), check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = "stopped: it took too long"
        text = (out / f"peer_{name}.jsonl").read_text()
        tail = (out / f"peer_{name}.err").read_text()[-300:] if code else ""
        print(f"== {name}: {code} {tail}\n{text}", flush=True)
        lines += text
    (out / "peers.jsonl").write_text(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
