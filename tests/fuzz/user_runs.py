"""Runs of ``maingrad train`` as users start them. Scripts take sources from here."""

import random

import torch
import torch.distributed as dist

from maingrad.launch.config.file import structure
from maingrad.launch.data.indexed import write_indexed
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import train


class StopsAfter:
    """A screen, before which somebody presses Ctrl-C after a step."""

    def __init__(self, step, stop):
        self.step, self.stop = step, stop

    def update(self, status):
        if status.step == self.step:
            self.stop.receive(2, None)

    def message(self, text):
        pass

    def close(self):
        pass


def run_of(folder, configuration, resume="auto", interrupted_after=None):
    """One start of a run: the losses that it has logged, and that of its validation at the end.

    interrupted_after  Ctrl-C comes after this step, and the run ends at the next that is logged; 0: it comes at once
    """
    sections = {key: value for key, value in configuration.items() if key != "files"}
    paths = [f"{folder}/data {number}" for number in range(configuration["files"])]
    if dist.get_rank() == 0:
        for number, path in enumerate(paths):
            write_tokens(path, sections["data"]["source"], random.Random(number))
    dist.barrier()
    bookkeeping = {"sequence_length": 8, "eval_every": 100, "eval_sequences": 6, "save_every": 100, "device": "cpu"}
    bookkeeping |= {"out_dir": f"{folder}/run", "resume": resume}
    model = {"dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "context_length": 16}
    sections["model"] = sections["model"] | model
    sections["data"] = sections["data"] | {"paths": paths}
    sections["train"] = sections["train"] | bookkeeping
    stop = StopRequest()
    if interrupted_after == 0:
        stop.receive(2, None)
    result = train(structure(sections), stop=stop, display=StopsAfter(interrupted_after, stop))
    found = {"losses": torch.tensor(result.losses)}
    return found if interrupted_after is not None else found | {"validation": result.validation_loss}


def write_tokens(path, source, draw):
    """Documents of 1 to 20 tokens; 0 ends each. What follows a token is seldom another than it was before."""
    documents = []
    for _ in range(40):
        document = [draw.randrange(1, 60)]
        for _ in range(draw.randrange(20)):
            document.append(document[-1] * 7 % 59 + 1 if draw.random() < 0.9 else draw.randrange(1, 60))
        documents.append([*document, 0])
    if source == "megatron":
        write_indexed(path, documents, dtype="uint16")
        return
    size = 1 if source == "text" else 2
    with open(path, "wb") as file:
        file.write(b"".join(token.to_bytes(size, "little") for document in documents for token in document))
