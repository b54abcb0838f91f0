"""Checkpoints to which something has happened, as users find them. Scripts take sources from here."""

import copy
import os
import random
import shutil
import threading
import zlib

import torch
import torch.distributed as dist
from user_training import NotAsPromised

from maingrad.ddp import load_checkpoint


def load_damaged(kind, seed, path, model, optimizer=None, other=None):
    """Tries to load a damaged copy; returns whether it was loaded, and what a load returns."""
    damaged = f"{path} {kind} {seed}"
    if dist.get_rank() == 0:
        shutil.copytree(path, damaged)
        damage(damaged, kind, random.Random(seed), other)
    dist.barrier()
    before = everything_of(model, optimizer)
    extra, said = None, ""
    try:
        extra = load_checkpoint(damaged, model, optimizer)
    except (ValueError, FileNotFoundError) as error:
        said = f"{type(error).__name__}: {error}"
        # What does not fit the model is refused undamaged too, before tensors are read.
        if damaged not in said and said != refusal_of(path, model, optimizer):
            raise NotAsPromised(f"no file is named: {said}") from error
    if said and "the model is partly overwritten" not in said:
        check_same(before, everything_of(model, optimizer), said)
    numbers = torch.tensor([zlib.crc32(said.encode()), -zlib.crc32(said.encode())])
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    if int(numbers.sum()):
        raise NotAsPromised(f"ranks do not say the same: {said}")
    return not said, extra


def refusal_of(path, model, optimizer):
    """What the checkpoint is refused with; empty if it is not."""
    try:
        load_checkpoint(path, model, optimizer)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def busy_disk():
    """An event, the same for all ranks: nothing is written in the background before it is set."""
    if not hasattr(busy_disk, "free"):
        run = threading.Thread.run

        def run_later(thread):
            if thread.name.startswith("save of "):
                busy_disk.free.wait(20.0)
            run(thread)

        threading.Thread.run = run_later
    if not hasattr(busy_disk, "free") or busy_disk.free.is_set():
        busy_disk.free = threading.Event()
    return busy_disk.free


def damage(folder, kind, draw, other):
    """Damages one file of the folder."""
    names = sorted(os.listdir(folder))
    name = draw.choice(names)
    path = os.path.join(folder, name)
    if kind == "flipped":
        with open(path, "r+b") as file:
            place = draw.randrange(os.path.getsize(path))
            file.seek(place)
            (value,) = file.read(1)
            file.seek(place)
            file.write(bytes([value ^ 1 << draw.randrange(8)]))
    elif kind == "cut":
        os.truncate(path, draw.randrange(os.path.getsize(path)))
    elif kind == "swapped":
        first, second = (os.path.join(folder, each) for each in draw.sample(names, 2))
        os.rename(first, f"{folder}/swapped")
        os.rename(second, first)
        os.rename(f"{folder}/swapped", second)
    elif kind == "another step":
        name = draw.choice(sorted(set(names) & set(os.listdir(other))))
        shutil.copy(os.path.join(other, name), os.path.join(folder, name))
    elif kind == "gone":
        os.remove(path)
    else:
        shutil.rmtree(folder)


def everything_of(model, optimizer):
    """What this rank has of both."""
    state = {} if optimizer is None else copy.deepcopy(optimizer.state_dict())
    params = [param.detach().clone() for param in model.parameters()]
    return [*params, *(buffer.clone() for buffer in model.buffers()), state]


def check_same(first, second, said):
    if isinstance(first, dict):
        check_same(list(map(str, first)), list(map(str, second)), said)
        check_same(list(first.values()), list(second.values()), said)
    elif isinstance(first, list | tuple):
        if len(first) != len(second):
            raise NotAsPromised(f"something was changed: {said}")
        for each, other in zip(first, second, strict=True):
            check_same(each, other, said)
    elif not (torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second):
        raise NotAsPromised(f"something was changed: {first} became {second}: {said}")


DAMAGES = ("flipped", "cut", "swapped", "another step", "gone", "all gone")
