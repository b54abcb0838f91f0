"""What writes programs down: lines of Python, indented; the same words for the wrapped run and for plain PyTorch.

In plain PyTorch one process does what all ranks do, one after the other, in a loop over ``rank``. So most of a program
is spelt alike in both, and what differs is asked of the pen.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from layers import block_order
from programs import Ddp, Fsdp, Phase, Program, Ranks


class Pen:
    """Writes one function of a program.

    program  all of it
    phase    the phase that is being written
    number   of that phase
    plain    True: in plain PyTorch
    """

    def __init__(self, program: Program, phase: Phase, number: int, plain: bool, depth: int = 1) -> None:
        self.program, self.phase, self.number, self.plain = program, phase, number, plain
        self.lines: list[str] = []
        self._depth = depth
        self._held = False  # within no_sync
        self.captured = False
        """What is written is the body of a graphed step, which returns what it notes."""
        self.means: list[str] = []
        """What plain PyTorch has noted of each rank, and has to average over them."""

    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self._depth + line for line in lines]

    @contextmanager
    def inside(self, header: str | None) -> Iterator[None]:
        """A block of lines; without a header, the lines as they are."""
        if header is None:
            yield
            return
        self(header)
        self._depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self("pass")
        self._depth -= 1

    @contextmanager
    def for_each_rank(self) -> Iterator[None]:
        """What every rank does: in plain PyTorch, one after the other."""
        with self.inside("for rank, seen in enumerate(records):" if self.plain else None):
            if self.plain and self.program.model.variants > 1:
                self(f"model = models[rank % {self.program.model.variants}]")
            yield

    @property
    def ddp(self) -> Ddp | None:
        """The wrapper, where it is one; None in plain PyTorch."""
        return self.phase.wrapper if isinstance(self.phase.wrapper, Ddp) and not self.plain else None

    @property
    def exposes(self) -> bool:
        """torch's own optimizer steps, and the program says so to the wrapper."""
        return self.ddp is not None and self.ddp.stock and not self.ddp.plain_loop

    @property
    def fsdp(self) -> Fsdp | None:
        """Likewise."""
        return self.phase.wrapper if isinstance(self.phase.wrapper, Fsdp) and not self.plain else None

    @property
    def half(self) -> bool:
        """bf16 parameters under fp32 masters."""
        return self.program.dtype == "bfloat16"

    def on(self, ranks: Ranks | None) -> str | None:
        """The header of what only some ranks do; None where all do."""
        if ranks is None or len(ranks) == self.phase.ranks:
            return None
        return f"if rank == {ranks[0]}:" if len(ranks) == 1 else f"if rank in {ranks}:"

    @contextmanager
    def no_sync(self, wanted: bool = True) -> Iterator[None]:
        """Within ``no_sync``, where that is wanted, not written yet, and not plain."""
        if not wanted or self._held or self.plain:
            yield
            return
        self._held = True
        with self.inside("with model.no_sync():"):
            yield
        self._held = False

    def forward(self, data: str, *more: str) -> str:
        """An expression that calls the model."""
        if self.half and (self.plain or self.ddp):
            data = f"{data}.bfloat16()"
        if self.program.dtype == "autocast":
            return f"autocast(model, {', '.join([data, *more])})"
        return f"model({', '.join([data, *more])})"

    def set_order(self, without: int | None, *, between_steps: bool = False) -> None:
        """In which order blocks run from here on: all but one, where there are others.

        between_steps  in plain PyTorch, of the models of all ranks
        """
        order = block_order(self.program.model)
        order = tuple(index for index in order if index != without) or order
        if between_steps and self.plain and self.program.model.variants > 1:
            with self.inside("for each in models:"):
                self(f"each.order = {order}")
        else:
            self(f"model.{'module.' if self.ddp else ''}order = {order}")

    def loss(self, outputs: str) -> str:
        """Of one microbatch, with what the step as a whole does to it: ``per_token`` losses are sums."""
        return f"loss_of({outputs})" + (" * rows" if self.sums else "")

    def backward(self, loss: str, options: str = "", *, hold: bool = False) -> None:
        """Runs backward of ``loss``; ``hold``: it is not the iteration's last."""
        if self.plain and not self.sums:
            loss = f"{loss} / size"
        if self.program.optimizer.scaled:
            loss = f"scaler.scale({loss})"
        called = f"({loss})" if " " in loss and not loss.startswith("scaler") else loss
        with self.no_sync(hold):
            self(f"{called}.backward({options})")
        if self.plain and self.half:
            self("masters.take()")

    @property
    def sums(self) -> bool:
        """Losses are sums over tokens, and gradients are divided by all ranks' tokens."""
        return isinstance(self.phase.wrapper, Ddp) and self.phase.wrapper.per_token

    @property
    def searches(self) -> bool:
        """The optimizer looks at the loss that its closure returns."""
        return self.program.optimizer.name == "LBFGS"

    @property
    def delays(self) -> bool:
        """Something waits after backward."""
        blocks = self.program.model.blocks
        return not self.plain and (self.phase.queue or any(block.library and block.delayed for block in blocks))

    def drain(self) -> None:
        """Computes what backward has delayed."""
        if any(block.library and block.delayed for block in self.program.model.blocks):
            self("drain(model)")
        if self.phase.queue:
            self("queue.drain()")

    @property
    def owner(self) -> str:
        """Who has the parameters that are updated, all of them in plain PyTorch."""
        if not self.plain:
            return "model"
        return "everything" if self.program.model.variants > 1 else "masters" if self.half else "model"

    def write_means(self) -> None:
        """In plain PyTorch, when all ranks are through: the means of what was noted for it."""
        if self.means:
            with self.inside(f"for what in {self.means}:"):
                self("mean = sum(seen[what] for seen in records) / size")
                with self.inside("for seen in records:"):
                    self("seen[what] = mean")
            self.means = []

    def see_on_all(self, what: str, value: str) -> None:
        """``see`` between steps: in plain PyTorch for every rank."""
        with self.inside("for seen in records:" if self.plain else None):
            self.see(what, value)

    def see(self, what: str, value: str) -> None:
        """Notes a value under a name, to be compared."""
        if self.captured:
            self(f'noted["{what}"] = {value.removesuffix(".item()")}')
            return
        self(f'seen["{what}"] = {value}')
