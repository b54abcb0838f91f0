"""What users do with a microbatch: each pattern writes its forwards and backwards.

To add one, add a function to ``PATTERNS``; it must leave ``loss`` behind, and backward of everything in it.
"""

from collections.abc import Callable
from typing import NamedTuple

from pen import Pen
from programs import Iteration


class Place(NamedTuple):
    """Which microbatch is being written."""

    name: str
    """For what is noted of it."""
    data: str
    """The expression of its rows."""
    other: str
    """Of more rows."""
    divisor: str
    """What losses are divided by, " / 2" say."""
    hold: bool
    """Not the last of its iteration."""
    second: str = "together"
    """``Iteration.second``; or "hold" for one of which more gradients come."""


def _backward(pen: Pen, place: Place) -> None:
    pen.backward("loss", hold=place.hold)


def _plain(pen: Pen, place: Place) -> None:
    pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    _backward(pen, place)


def _named_output(pen: Pen, place: Place) -> None:
    pen(f"output = {pen.forward(place.data)}")
    pen(f"loss = {pen.loss('output')}{place.divisor}")
    _backward(pen, place)


def _offloaded(pen: Pen, place: Place) -> None:
    """What forward saves is copied, and backward gets other tensors."""
    with pen.inside("with torch.autograd.graph.save_on_cpu():"):
        pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    _backward(pen, place)


def _two_forwards(pen: Pen, place: Place) -> None:
    """One backward of a sum of two losses."""
    first, second = (pen.loss(pen.forward(data)) for data in (place.data, place.other))
    pen(f"loss = ({first} + {second}){place.divisor}")
    _backward(pen, place)


def _two_backwards(pen: Pen, place: Place) -> None:
    """Two forwards, and their backwards in the other order."""
    pen(f"first = {pen.loss(pen.forward(place.other))}{place.divisor}")
    pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    pen.backward("loss", hold=True)
    pen.backward("first", hold=place.hold)


def _both_reduced(pen: Pen, place: Place) -> None:
    """Two backwards for one step, neither under ``no_sync``: a program that has two losses and knows of no wrapper."""
    pen(f"first = {pen.loss(pen.forward(place.other))}{place.divisor}")
    pen.backward("first", hold=place.hold)
    pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    _backward(pen, place)


def _head_behind(pen: Pen, place: Place) -> None:
    """The program calls the head on what the wrapper has returned: backward meets its weights before the wrapper's."""
    owner = _write_hidden(pen, place)
    pen(f"loss = {pen.loss(f'{owner}.with_head(hidden)')}{place.divisor}")
    _backward(pen, place)


def _heads_behind(pen: Pen, place: Place) -> None:
    """Two losses of two calls of the head, with a backward each."""
    owner = _write_hidden(pen, place)
    pen(f"first = {pen.loss(f'{owner}.with_head(-hidden)')}{place.divisor}")
    pen.backward("first", "retain_graph=True", hold=place.hold)
    pen(f"loss = {pen.loss(f'{owner}.with_head(hidden)')}{place.divisor}")
    _backward(pen, place)


def _write_hidden(pen: Pen, place: Place) -> str:
    """``hidden``, what the model returns without its head; returns the expression of the head's owner."""
    owner = "model.module" if pen.ddp else "model"
    pen(f"{owner}.headless = True", f"hidden = {pen.forward(place.data)}", f"{owner}.headless = False")
    return owner


def _retained(pen: Pen, place: Place) -> None:
    """The same graph twice."""
    pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    pen.backward("loss", "retain_graph=True", hold=True)
    _backward(pen, place)


def _of_the_input(pen: Pen, place: Place) -> None:
    """The input's gradient comes along."""
    pen(f"x = {place.data}.detach().requires_grad_()")
    pen(f"loss = {pen.loss(pen.forward('x'))}{place.divisor}")
    _backward(pen, place)
    scale = " * size" if pen.plain and not pen.sums else ""
    scale += " / scaler.get_scale()" if pen.program.optimizer.scaled else ""
    pen.see(f"input's gradient {place.name}", f"x.grad{scale}")


def _asked_for(pen: Pen, place: Place) -> None:
    """``autograd.grad`` for the input, before backward."""
    pen(f"x = {place.data}.detach().requires_grad_()")
    pen(f"loss = {pen.loss(pen.forward('x'))}{place.divisor}")
    with pen.no_sync(_asks_early(pen, place)):
        pen("(gradient,) = torch.autograd.grad(loss, x, retain_graph=True)")
    pen.see(f"input's gradient {place.name}", "gradient")
    _backward(pen, place)


def _asks_early(pen: Pen, place: Place) -> bool:
    """Where what backward delays is sent behind an iteration's last one, ``autograd.grad`` may not look like that."""
    return place.hold and pen.fsdp is not None and pen.delays


def _penalty(pen: Pen, place: Place) -> None:
    """A penalty on the input's gradient: second derivatives."""
    pen(f"x = {place.data}.detach().requires_grad_()")
    pen(f"loss = {pen.loss(pen.forward('x'))}{place.divisor}")
    with pen.no_sync(_asks_early(pen, place)):
        pen("(gradient,) = torch.autograd.grad(loss, x, create_graph=True)")
    pen("loss = loss + gradient.square().sum()")
    _backward(pen, place)
    pen("del gradient")


def _siamese(pen: Pen, place: Place) -> None:
    """One backward through two forwards, each of which has to do with the other's gradient.

    The geometric mean of the losses: steps along their product grow until rounding decides.
    """
    pen(f"near, far = {pen.forward(place.data)}, {pen.forward(place.other)}")
    pen(f"loss = ({pen.loss('near')} * loss_of(far)).sqrt(){place.divisor}")
    _backward(pen, place)


def _hooked(pen: Pen, place: Place) -> None:
    """A hook on what forward has made."""
    pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
    pen("loss.register_hook(doubled)")
    _backward(pen, place)


def _method(pen: Pen, place: Place) -> None:
    """A method of the user's module computes the loss."""
    pen(f"loss = model.compute_loss({place.data}){' * rows' if pen.sums else ''}{place.divisor}")
    _backward(pen, place)


def _attack(pen: Pen, place: Place) -> None:
    """What a backward says about the input makes the batch worse; its gradients of parameters are thrown away."""
    pen(f"x = {place.data}.detach().requires_grad_()")
    pen(f"loss = {pen.loss(pen.forward('x'))}{place.divisor}")
    if pen.plain:  # where gradients are those of all ranks
        pen("(x.grad,) = torch.autograd.grad(loss, x)")
    else:
        with pen.no_sync():
            pen("loss.backward()")
        pen("model.zero_grad()")
    pen("attacked = (x + 0.1 * x.grad).detach()")
    pen(f"loss = {pen.loss(pen.forward('attacked'))}{place.divisor}")
    _backward(pen, place)


def _added(pen: Pen, place: Place) -> None:
    """Gradients of ``autograd.grad``, which somebody halves and adds by hand."""
    pen("params = [param for param in model.parameters() if param.requires_grad]")
    with pen.no_sync(place.hold):
        pen(f"loss = {pen.loss(pen.forward(place.data))}{place.divisor}")
        pen("gradients = torch.autograd.grad(loss, params, allow_unused=True)")
    with pen.inside("for param, gradient in zip(params, gradients):"), pen.inside("if gradient is not None:"):
        if pen.plain:
            pen(f"add_to_grad(param, 0.5 * gradient{'' if pen.sums else ' / size'})")
        else:
            pen("add_grad(param, 0.5 * gradient)")


def _judged(pen: Pen, place: Place) -> None:
    """The second model has a part in the loss."""
    frozen = place.second == "frozen"
    if frozen:
        pen("critic.requires_grad_(False)")
    pen(f"output = {pen.forward(place.data)}")
    pen(f"loss = ({pen.loss('output')} + F.softplus(-critic(y_of(output))).mean()){place.divisor}")
    held = place.second in ("through", "hold") and not pen.plain
    with pen.inside("with critic.no_sync():" if held else None):
        _backward(pen, place)
    if frozen:
        pen("critic.requires_grad_(True)")


PATTERNS: dict[str, Callable[[Pen, Place], None]] = {
    "plain": _plain,
    "named output": _named_output,
    "offloaded": _offloaded,
    "two forwards": _two_forwards,
    "two backwards": _two_backwards,
    "both reduced": _both_reduced,
    "head behind": _head_behind,
    "heads behind": _heads_behind,
    "retained": _retained,
    "input's gradient": _of_the_input,
    "autograd.grad": _asked_for,
    "penalty": _penalty,
    "siamese": _siamese,
    "hooked": _hooked,
    "method": _method,
    "attack": _attack,
    "added": _added,
    "judged": _judged,
}
"""What can be drawn."""
HEAD_BEHIND = ("head behind", "heads behind")
BOTH_REDUCED = ("both reduced", "heads behind")
BACKWARDS_TWICE = ("two backwards", "retained", *BOTH_REDUCED)
ASKS_FOR_INPUTS = ("autograd.grad", "penalty")
NO_GRADIENT_OF_LOSS = (*BACKWARDS_TWICE, "hooked", "attack", "added")
"""What backward has computed is another function's gradient than that of ``loss``."""
OF_TWO_BATCHES = ("two forwards", "two backwards", "both reduced", "siamese")
"""Those with more rows."""
UNDELAYED = ("attack", "added")
"""Backwards whose gradients of weights are wanted at once, or not at all."""


def write_micro(pen: Pen, iteration: Iteration, step: int | str, index: int) -> None:
    """One microbatch, on the ranks that have it.

    step  number of the iteration in the program; of a graphed step, what stands for it
    """
    micro = iteration.micros[index]
    count, last = len(iteration.micros), index == len(iteration.micros) - 1
    hold = (not last or iteration.outcome in ("given up", "fails")) and iteration.no_sync != "forgotten"
    divisor = "" if count == 1 or pen.sums else f" / {count}"
    if last and iteration.overflow:
        divisor += " * factor" if pen.captured else f" * {factor_of(iteration)}"
    data, other = (f"x{index}", f"other{index}") if pen.captured else batches_of(iteration, step, index)
    more = any(each.pattern == "judged" for each in iteration.micros[index + 1 :])
    second = "hold" if more and iteration.second == "together" else iteration.second
    place = Place(f"{step}.{index}", data, other, divisor, hold, second)
    with pen.inside(pen.on(micro.ranks)):
        with pen.no_sync(hold and iteration.no_sync == "all"):
            if pen.sums:
                pen(f"rows = {f'len({data})' if pen.captured else micro.rows}", "tokens += rows")
            if micro.skips is not None:
                pen("before = model.module.order" if pen.ddp else "before = model.order")
                pen.set_order(micro.skips)
            with pen.inside("try:" if micro.raises else None):
                with pen.inside("with delayed_wgrad(queue):" if pen.phase.queue and not pen.plain else None):
                    PATTERNS[micro.pattern](pen, place)
                if micro.raises:
                    with pen.inside(pen.on(micro.raises)):
                        pen("interrupt(loss)")
            if micro.raises:
                with pen.inside("except BadBatch as error:"):
                    pen("kept.append(error)")
        if micro.skips is not None:
            pen(f"model.{'module.' if pen.ddp else ''}order = before")
        pen.see(f"loss {step}.{index}", "loss.item()")
        if pen.searches:
            pen(f"total = total + loss.detach(){' / size' if pen.plain else ''}")
        if micro.keep != "nothing":
            with pen.inside(pen.on(micro.keepers)):
                pen(f"kept.append({micro.keep})")
        if pen.delays and iteration.drain == "each":
            pen.drain()


def batches_of(iteration: Iteration, step: int | str, index: int) -> tuple[str, str]:
    """Expressions of the rows of one microbatch, and of more rows."""
    micro = iteration.micros[index]
    rows = f", rows={micro.rows}" if micro.rows != 3 else ""
    first, second = (f"batch(rank, {step}, {number}{rows})" for number in (index, index + 50))
    return first, second


def factor_of(iteration: Iteration) -> str:
    """The expression of what makes a loss infinite, on some ranks."""
    return f"(math.inf if rank in {iteration.overflow} else 1.0)"


def write_failing(pen: Pen, step: int, keepers: tuple[int, ...]) -> None:
    """A microbatch whose backward raises on all ranks."""
    with pen.inside("try:"):
        call = pen.forward(f"batch(rank, {step}, 90)", "0", '"backward"')
        pen(f"loss = {pen.loss(call)}")
        pen.backward("loss")
    with pen.inside("except BadBatch as error:"), pen.inside(pen.on(keepers)):
        pen("kept.append(error)")
