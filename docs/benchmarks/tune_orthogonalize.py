"""Chooses the products of orthogonalize on one GPU. ``python docs/benchmarks/tune_orthogonalize.py --out DIR``.

Phases, each of which writes its file at once: checks (each candidate in a process of its own), products, elementwise
passes, whole orthogonalisations, Muon's step, specialised kernels. A candidate that fails leaves its reason.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import torch

sys.path.insert(0, str(Path(__file__).parent))
import tuned_product as tp
from tuned_product import Config, tuned

from maingrad.kernels.optimizer.orthogonal import orthogonalize as tree
from maingrad.kernels.optimizer.orthogonal.product_triton import ProductConfig, product
from maingrad.kernels.optimizer.orthogonal.reference import COEFFICIENTS, inverse_norms, newton_schulz_reference

SIMPLE = COEFFICIENTS["simple"]
DEVICE = os.environ.get("TUNE_DEVICE", "cuda")
"""``cpu`` shows that the script runs."""
DIVIDE = int(os.environ.get("TUNE_DIVIDE", "1"))


def divided(*shapes):
    return [(count, rows // DIVIDE, columns // DIVIDE) for count, rows, columns in shapes]

BATCHES = divided((8, 4096, 4096), (8, 1024, 4096), (8, 14336, 4096), (4, 4096, 14336))
"""One rank's share of 8 layers of Llama-8B on two."""


def event():
    return torch.cuda.Event(enable_timing=True)


def timed(call, count):
    """Mean ms of calls one after the other."""
    if DEVICE == "cpu":
        call()
        return 1.0 + 1e-3 * time.time() % 1e-2
    start, end = event(), event()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def in_turns(calls, rounds=3, budget_ms=25.0):
    """Median ms by name; each round measures all in turn. A call that raises has its reason in place of a number."""
    counts, found = {}, {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize() if DEVICE == "cuda" else None
            counts[name] = max(1, min(50, int(budget_ms / max(timed(call, 2), 1e-3))))
            found[name] = []
        except Exception as error:  # noqa: BLE001
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[-150:]}"
    for _ in range(rounds):
        for name, count in counts.items():
            found[name].append(timed(calls[name], count))
    return {name: statistics.median(each) if isinstance(each, list) else each for name, each in found.items()}


def save(rows, path):
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)


def milliseconds(value):
    return value if isinstance(value, float) else float("inf")


# ---- Checks. ----


def check(config, symmetric, m=544, k=336, device=DEVICE):
    """Largest error over the largest number, of three forms of a product; raises where one is wrong."""
    g = torch.Generator(device=device).manual_seed(1)
    draw = lambda *shape: torch.randn(shape, device=device, generator=g).half()  # noqa: E731
    worst = 0.0
    forms = [(False, False), (False, True), (True, False)] if symmetric else [(False, False), (False, True)]
    for tall, with_addend in forms:
        if symmetric:
            a = draw(3, k, m) if tall else draw(3, m, k)
            b, out = a, torch.full((3, m, m), float("nan"), device=device, dtype=torch.float16)
            wanted = (a.mT if tall else a).double() @ (a if tall else a.mT).double()
        else:
            a, b = draw(3, m, m), draw(3, m, k)
            out = torch.full((3, m, k), float("nan"), device=device, dtype=torch.float16)
            wanted = a.double() @ b.double()
        addend = draw(*out.shape) if with_addend else None
        if with_addend and symmetric:
            addend = (addend + addend.mT).contiguous()
        tuned(config, a, b, out, symmetric=symmetric, tall=tall, alpha=0.5, beta=2.0, addend=addend)
        wanted = 0.5 * wanted + (2.0 * addend.double() if with_addend else 0.0)
        error = float((out.double() - wanted).abs().max() / wanted.abs().max())
        worst = max(worst, error)
        if not error < 1e-3:
            raise AssertionError(f"error {error} (tall {tall}, addend {with_addend})")
        if symmetric and not torch.equal(out, out.mT):
            raise AssertionError(f"not symmetric (tall {tall}, addend {with_addend})")
    return worst


def checked(jobs, parallel, limit_s=100):
    """Run ``check`` in forked processes: {(config, symmetric): error or reason}. This process has no context yet."""
    waiting, running, results = list(jobs), {}, {}
    while waiting or running:
        while waiting and len(running) < parallel:
            job = waiting.pop(0)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                signal.alarm(limit_s)
                os.close(reader)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                try:
                    answer = check(*job)
                except BaseException as error:  # noqa: BLE001
                    answer = f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
                os.write(writer, json.dumps(answer).encode())
                os._exit(0)
            os.close(writer)
            running[pid] = job, reader
        pid, status = os.waitpid(-1, 0)
        if pid in running:
            job, reader = running.pop(pid)
            text = os.read(reader, 65536).decode()
            os.close(reader)
            results[job] = json.loads(text) if text else f"died, status {status}"
    return results


# ---- Products. ----


def powers(count, m, n):
    """X as it is at the start, R of it and its addend, in fp16."""
    matrices = torch.randn(count, m, n, device=DEVICE)
    x, scale = tree._normalized(matrices)
    r = tree._matrices_like(x, m)
    product(x, x, r, symmetric=True, alpha=tree._GRAM_SCALE / scale**2)
    return x, r, 1 / scale**2


def measure_products(good_symmetric, good_full):
    rows = []

    def add(kind, count, flops, calls):
        for name, ms in in_turns(calls).items():
            tflops = flops / ms / 1e9 if isinstance(ms, float) else ""
            rows.append({"product": kind, "batch": count, "config": name, "ms": ms, "tflops": tflops})

    for count, m, n in divided((8, 4096, 4096), (4, 4096, 14336), (1, 4096, 14336), (8, 1024, 4096)):
        x, r, alpha = powers(count, m, n)
        tall = x.mT.contiguous()
        out, y, ty = torch.empty_like(r), torch.empty_like(x), torch.empty_like(tall)
        old = {"tree": partial(product, x, x, out, symmetric=True, alpha=alpha * 1024)}
        new = {c.name(): partial(tuned, c, x, x, out, symmetric=True, alpha=alpha * 1024) for c in good_symmetric}
        add(f"XX^T {m}x{n}", count, count * m * m * n, old | new)
        old = {"tree": partial(product, r, r, out, symmetric=True, alpha=1e-6, beta=1e-3, addend=r)}
        new = {
            c.name(): partial(tuned, c, r, r, out, symmetric=True, alpha=1e-6, beta=1e-3, addend=r)
            for c in good_symmetric
        }
        add(f"RR^T+R {m}", count, count * m**3, old | new)
        new = {c.name(): partial(tuned, c, tall, tall, out, symmetric=True, tall=True, alpha=1.0) for c in good_symmetric}
        add(f"Y^TY {n}x{m}", count, count * m * m * n, new)

        def mm(a, b, out, alpha=0.01):
            for one, other, into in zip(a, b, out, strict=True):
                torch.addmm(into, one, other, beta=0, alpha=alpha, out=into)

        def many(a, b, out, alpha=0.01):
            torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)

        old = {
            "tree": partial(product, r, x, y, symmetric=False, alpha=0.01),
            "tree, addend": partial(product, r, x, y, symmetric=False, alpha=0.01, beta=1.0, addend=x),
            "cublas addmm": partial(mm, r, x, y),
            "cublas baddbmm": partial(many, r, x, y),
        }
        new = {c.name(): partial(tuned, c, r, x, y, symmetric=False, alpha=0.01) for c in good_full}
        add(f"QX {m}x{n}", count, count * 2 * m * m * n, old | new)
        old = {"cublas addmm": partial(mm, tall, r, ty), "cublas baddbmm": partial(many, tall, r, ty)}
        new = {c.name(): partial(tuned, c, tall, r, ty, symmetric=False, alpha=0.01) for c in good_full}
        add(f"YQ {n}x{m}", count, count * 2 * m * m * n, old | new)
        del x, r, tall, out, y, ty
    return rows


def measure_passes():
    rows = []
    for count, m, n in divided((4, 14336, 4096), (8, 4096, 4096), (8, 1024, 4096)):
        matrices = torch.randn(count, m, n, device=DEVICE)
        inverse = inverse_norms(matrices, 2.0**12)
        half, turned = matrices.half(), matrices.mT.contiguous().half()
        buffer = torch.randn_like(matrices)
        calls = {
            "norm": lambda: inverse_norms(matrices, 2.0**12),
            "norm fp32": lambda: torch._foreach_norm(list(matrices), 2, torch.float32),
            "cast": lambda: torch.mul(matrices, inverse, out=half),
            "cast, transposed": lambda: torch.mul(matrices.mT, inverse, out=turned),
            "lerp into": lambda: torch.lerp(matrices, buffer, 0.95, out=buffer),
            "lerp and cat": lambda: torch.cat([each.lerp(other, 0.95)[None] for each, other in zip(matrices, buffer)]),
            "add": lambda: buffer.add_(half, alpha=1e-3),
            "add, transposed": lambda: buffer.add_(turned.mT, alpha=1e-3),
            "scale": lambda: buffer.mul_(0.999),
        }
        for name, ms in in_turns(calls).items():
            rows.append({"matrices": count, "rows": m, "columns": n, "pass": name, "ms": ms})
        del matrices, half, turned, buffer
    return rows


# ---- Whole orthogonalisations. ----


class Plan:
    """One way to orthogonalise: gram, square: configs; full: a config, "addmm" or "baddbmm"."""

    def __init__(self, gram, square, full, native):
        self.gram, self.square, self.full, self.native = gram, square, full, native

    def name(self):
        full = self.full if isinstance(self.full, str) else self.full.name()
        return f"gram[{self.gram.name()}] square[{self.square.name()}] full[{full}] {'native' if self.native else 'copy'}"

    def apply(self, q, x, out, alpha, tall):
        """out = alpha q x, of tall ones alpha x q."""
        a, b = (x, q) if tall else (q, x)
        if self.full == "addmm":
            for one, other, into in zip(a, b, out, strict=True):
                torch.addmm(into, one, other, beta=0, alpha=alpha, out=into)
        elif self.full == "baddbmm":
            torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
        else:
            tuned(self.full, a, b, out, symmetric=False, alpha=alpha)

    def __call__(self, matrices, steps=SIMPLE):
        is_tall = matrices.shape[1] > matrices.shape[2]
        tall = is_tall and self.native
        x, scale = tree._normalized(matrices.mT if is_tall and not tall else matrices)
        m, n = (x.shape[2], x.shape[1]) if tall else x.shape[1:]
        make = lambda: x.new_empty(len(x), m, m)  # noqa: E731
        other = torch.empty_like(x)
        square = partial(tuned, self.square, symmetric=True)
        if n < tree._GRAM_FROM * m:
            r, z = make(), make()
            for a, b, c in steps:
                tuned(self.gram, x, x, r, symmetric=True, tall=tall, alpha=1 / scale**2)
                square(r, r, z, alpha=c, beta=b, addend=r, gamma=a)
                self.apply(z, x, other, 1 / scale, tall)
                x, other, scale = other, x, 1.0
            return x.mT if is_tall and not tall else x
        r, q, z, spare = make(), make(), make(), make()
        begins = True
        gram = tree._GRAM_SCALE
        for index, (a, b, c) in enumerate(steps):
            if begins:
                tuned(self.gram, x, x, r, symmetric=True, tall=tall, alpha=gram / scale**2)
            square(r, r, z, alpha=c / gram**2, beta=b / gram, addend=r)
            if begins:
                q.copy_(z)
                q.diagonal(dim1=1, dim2=2).add_(a)
            else:
                square(q, z, spare, beta=a, addend=q)
                q, spare = spare, q
            ends = index + 1 in (tree._RESTART, len(steps))
            if ends:
                self.apply(q, x, other, 1 / scale, tall)
                x, other, scale = other, x, 1.0
            else:
                square(r, z, spare, beta=a, addend=r)
                square(spare, z, r, beta=a, addend=spare)
            begins = ends
        return x.mT if is_tall and not tall else x


def graphed(call):
    """The call as a CUDA graph: without the host's time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def best_of(rows, product_name, batch, allowed):
    found = [r for r in rows if r["product"] == product_name and r["batch"] == batch and r["config"] in allowed]
    return allowed[min(found, key=lambda row: milliseconds(row["ms"]))["config"]] if found else next(iter(allowed.values()))


def error_of(call, matrices, exact=None):
    if exact is None:
        exact = newton_schulz_reference(matrices[:1].double(), SIMPLE, torch.float64)
    return float((call(matrices[:1]).double() - exact).norm() / exact.norm())


def measure_whole(products, good_symmetric, good_full):
    rows, chosen = [], {}
    symmetric, full = ({c.name(): c for c in each} for each in (good_symmetric, good_full))
    for count, rows_, columns in divided(
        (8, 4096, 4096), (8, 1024, 4096), (4, 14336, 4096), (4, 4096, 14336), (1, 14336, 4096), (1, 4096, 14336)
    ):
        m, n = sorted((rows_, columns))
        matrices = torch.randn(count, rows_, columns, device=DEVICE)
        is_tall = rows_ > columns
        square = best_of(products, f"RR^T+R {m}", count, symmetric)
        plans = {}
        for native in (False, True) if is_tall else (False,):
            gram = best_of(products, f"Y^TY {n}x{m}" if native else f"XX^T {m}x{n}", count, symmetric)
            fastest = best_of(products, f"YQ {n}x{m}" if native else f"QX {m}x{n}", count, full)
            base = Config()
            for kind in (
                Plan(gram, square, fastest, native),
                Plan(gram, square, "addmm", native),
                Plan(gram, square, "baddbmm", native),
                Plan(base, base, fastest, native),
                Plan(base, base, "addmm", native),
            ):
                plans[kind.name()] = kind
        calls = {"tree": partial(tree.orthogonalize, matrices)}
        calls |= {name: partial(plan, matrices) for name, plan in plans.items()}
        if rows_ * DIVIDE == 1024 and DEVICE == "cuda":
            for name, call in list(calls.items()):
                try:
                    calls[f"graph: {name}"] = graphed(call)
                except Exception as error:  # noqa: BLE001
                    print("no graph of", name, error)
        times = in_turns(calls, rounds=5, budget_ms=60.0)
        exact = newton_schulz_reference(matrices[:1].double(), SIMPLE, torch.float64)
        for name, ms in times.items():
            call = calls[name]
            error = "" if name.startswith("graph") or not isinstance(ms, float) else error_of(
                tree.orthogonalize if name == "tree" else plans[name], matrices, exact
            )
            flops = count * tree.orthogonalize_flops(rows_, columns)
            rows.append({
                "matrices": count, "rows": rows_, "columns": columns, "plan": name, "ms": ms,
                "tflops": flops / ms / 1e9 if isinstance(ms, float) else "", "error": error,
            })
        usable = {name: plan for name, plan in plans.items() if isinstance(times[name], float)}
        if usable:
            chosen[count, rows_, columns] = usable[min(usable, key=lambda name: times[name])]
        del matrices, calls, plans
        torch.cuda.empty_cache()
    return rows, chosen


def measure_rank(chosen):
    """All matrices of one rank, one call after the other: ms a rank."""
    rows = []
    batches = divided((8, 4096, 4096), (8, 1024, 4096), (4, 14336, 4096), (4, 14336, 4096), (4, 4096, 14336))
    data = [torch.randn(*each, device=DEVICE) for each in batches]

    def before():
        for matrices in data:
            tree.orthogonalize(matrices)

    def after():
        for shape, matrices in zip(batches, data, strict=True):
            chosen[shape](matrices)

    singles = [one for matrices in data for one in (matrices.split(max(1, 2**26 // DIVIDE**2 // matrices[0].numel())))]

    def before_parts():
        for matrices in singles:
            tree.orthogonalize(matrices)

    def after_parts():
        for matrices in singles:
            key = (len(matrices) if len(matrices) == 1 else 8, *matrices.shape[1:])
            chosen[key](matrices)

    calls = {"before": before, "after": after, "before, in Muon's batches": before_parts, "after, in Muon's batches": after_parts}
    for name, ms in in_turns(calls, rounds=7, budget_ms=400.0).items():
        rows.append({"rank": name, "ms": ms})
    return rows


def measure_step(chosen):
    """Muon's and AdamW's step over one rank's matrices."""
    from maingrad.ddp.torch_grads import muon as muon_module

    shapes = [shape[1:] for shape in BATCHES for _ in range(shape[0])]
    params = [torch.nn.Parameter(torch.randn(*shape, device=DEVICE)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    rows = []
    adam = torch.optim.AdamW(params, fused=DEVICE == "cuda")
    calls = {"AdamW fused": adam.step}
    rows += [{"step": name, "ms": ms} for name, ms in in_turns(calls, budget_ms=200.0).items()]
    del adam
    torch.cuda.empty_cache()
    theirs = torch.optim.Muon(params)
    rows += [{"step": "torch Muon", "ms": ms} for ms in in_turns({"x": theirs.step}, rounds=2, budget_ms=300.0).values()]
    del theirs
    torch.cuda.empty_cache()
    ours = muon_module.Muon(params)
    original = muon_module.orthogonalize

    def fast(updates, steps):
        key = (len(updates), *updates.shape[1:])
        key = key if key in chosen else (8, *key[1:]) if (8, *key[1:]) in chosen else (4, *key[1:])
        return chosen[key](updates, steps) if key in chosen else original(updates, steps)

    def nothing(updates, steps):
        return torch.empty(updates.shape, device=DEVICE, dtype=torch.float16)

    def with_code(code, numel):
        def call():
            muon_module.orthogonalize, muon_module._BATCH_NUMEL = code, numel
            ours.step()

        return call

    calls = {}
    for numel in (2**26, 2**28, 2**30):
        calls[f"Muon, tree, batches {numel}"] = with_code(original, numel)
        calls[f"Muon, best, batches {numel}"] = with_code(fast, numel)
        calls[f"Muon without orthogonalisation, batches {numel}"] = with_code(nothing, numel)
    rows += [{"step": name, "ms": ms} for name, ms in in_turns(calls, budget_ms=250.0).items()]
    return rows


def specialised():
    """In a process of its own: {name: ms or reason} beside the tree's, printed as JSON line by line."""
    x, r, alpha = powers(4, 4096, 14336)
    out = torch.empty_like(r)
    for config in tp.specialized_configs():
        try:
            error = check(config, True)
            answer = in_turns({
                "tree": partial(product, r, r, out, symmetric=True, alpha=1e-6, beta=1e-3, addend=r),
                "RR^T+R 4096": partial(tuned, config, r, r, out, symmetric=True, alpha=1e-6, beta=1e-3, addend=r),
                "XX^T 4096x14336": partial(tuned, config, x, x, out, symmetric=True, alpha=alpha * 1024),
            })
            answer["error"] = error
        except Exception as error:  # noqa: BLE001
            answer = {"problem": " ".join(str(error).split())[-200:]}
        print(json.dumps({"config": config.name(), **answer}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "runs/tune"))
    parser.add_argument("--parallel", type=int, default=14)
    parser.add_argument("--specialised", action="store_true")
    options = parser.parse_args()
    if options.specialised:
        return specialised()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    smi = None
    try:
        smi = subprocess.Popen(
            ["nvidia-smi", "--query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader", "-lms", "200"],
            stdout=open(out / "power.csv", "w"), stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        print("no nvidia-smi:", error)

    def phase(name, run):
        try:
            found = run()
        except Exception as error:  # noqa: BLE001
            import traceback

            traceback.print_exc()
            print(f"## {name}: FAILED {type(error).__name__}: {error}", flush=True)
            found = None
        print(f"## {name} done, {time.time() - began:.0f} s since the start", time.strftime("%H:%M:%S"), flush=True)
        return found

    try:
        symmetric, full = list(tp.symmetric_configs()), list(tp.full_configs())
        jobs = [(c, True) for c in symmetric] + [(c, False) for c in full]
        results = phase("checks", lambda: checked(jobs, options.parallel)) or {}
        save([{"config": c.name(), "symmetric": s, "answer": a} for (c, s), a in results.items()], out / "checks.csv")
        for (config, is_symmetric), answer in results.items():
            if isinstance(answer, str):
                print("  failed:", config.name(), "symmetric" if is_symmetric else "full", answer)
        good_symmetric = [c for c in symmetric if isinstance(results.get((c, True)), float)]
        good_full = [c for c in full if isinstance(results.get((c, False)), float)]
        torch.manual_seed(0)
        print(torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE, torch.__version__, tp.triton.__version__)
        products = phase("products", lambda: measure_products(good_symmetric, good_full)) or []
        save(products, out / "products.csv")
        for kind, batch in dict.fromkeys((row["product"], row["batch"]) for row in products):
            mine = [row for row in products if (row["product"], row["batch"]) == (kind, batch)]
            mine.sort(key=lambda row: milliseconds(row["ms"]))
            shown = mine[:4] + [row for row in mine[4:] if row["config"].startswith(("tree", "cublas"))]
            print(f"{kind} x{batch}:", "; ".join(f"{r['config']} {r['ms']:.3f} ms {r['tflops']:.0f}" for r in shown if r["tflops"]))
        passes = phase("passes", measure_passes) or []
        save(passes, out / "passes.csv")
        for row in passes:
            print(" ", row)
        whole, chosen = phase("whole", lambda: measure_whole(products, good_symmetric, good_full)) or ([], {})
        save(whole, out / "whole.csv")
        for row in whole:
            ms = f"{row['ms']:.3f} ms {row['tflops']:.0f} TFLOP/s" if row["tflops"] else row["ms"]
            print(f"  {row['matrices']}x{row['rows']}x{row['columns']} {row['plan']}: {ms} error {row['error']}")
        rank = phase("rank", lambda: measure_rank(chosen)) or []
        save(rank, out / "rank.csv")
        print("MS A RANK:", rank)
        steps = phase("step", lambda: measure_step(chosen)) or []
        save(steps, out / "steps.csv")
        for row in steps:
            print(" ", row)
        torch.cuda.empty_cache()

        def last():
            command = [sys.executable, __file__, "--specialised"]
            with open(out / "specialised.jsonl", "w") as file, open(out / "specialised.err", "w") as errors:
                try:
                    subprocess.run(command, stdout=file, stderr=errors, timeout=60, check=False)
                except subprocess.TimeoutExpired:
                    print("specialised kernels: stopped after 60 s")
            print((out / "specialised.jsonl").read_text()[:3000])

        phase("specialised", last)
    finally:
        if smi is not None:
            smi.terminate()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
