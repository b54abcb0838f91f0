"""The phases of a unit's gradients in one iteration, from backward's first write to the sum over all ranks.

::

    IDLE ---- enter ----> WRITING ---- send, in a microbatch -------------> PARTIAL
      ^                   |  ^  |  <--- enter, in a later one ------------    |
      |              keep |  |  |                                             |
      |                   v  |  +----- send, in the last ----> REDUCED <------+
      |                   KEPT                                 ^  |    send, at the end
      |                     +------- send, at the end ---------+  |
      +---------------------------- end --------------------------+

``enter``    backward has reached the unit's outputs. The first write takes memory for whole gradients. If a reduction
             of an earlier microbatch still uses this memory, the first write waits for it
``keep``     backward has passed the unit, and the whole gradients stay: they are reduced once in an iteration, or
             some of them are delayed and computed after backward. A later microbatch enters again, and adds to them
``send``     the reduction of whole gradients is launched: inside the instance, and in the last microbatch also across
             instances. Results are added to ``.grad`` of the shards. The memory of whole gradients is freed when
             another bucket needs it, or at the end. Backward enters again if it reaches the unit after ``send``
``end``      the iteration is over: all gradients were sent, in the same order on all ranks, and ``.grad`` is complete
``give_up``  from any phase to IDLE: backward has failed, and the next forward begins a new iteration

Each move follows from the forwards and backwards that the program runs, and these are the same on all ranks. Each
``send`` is a collective. So no move may depend on what differs between ranks: which gradients a rank has written, which
graphs are alive, or what ``.grad`` is.

A unit has one round. If modules delay weight gradients, the delayed gradients have a second round, which ends later.
"""

import enum

__all__ = ["Round", "RoundPhase"]


class RoundPhase(enum.Enum):
    """The phase of a unit's gradients in the current iteration."""

    IDLE = "idle"
    """No backward of this iteration has reached the unit."""
    WRITING = "writing"
    """A backward has entered the unit and not passed it."""
    KEPT = "kept"
    """Backward has passed. Whole gradients stay until the last microbatch, or until delayed ones are computed."""
    PARTIAL = "partial"
    """Reduced inside the instance. The last microbatch and the sum across instances are missing."""
    REDUCED = "reduced"
    """The reduction over all ranks was launched, and perhaps has ended."""

    __hash__ = object.__hash__  # enum's own __hash__ is Python code, and each move calls it twice


_MOVES = {
    RoundPhase.IDLE: {RoundPhase.WRITING},
    RoundPhase.WRITING: {RoundPhase.KEPT, RoundPhase.PARTIAL, RoundPhase.REDUCED},
    RoundPhase.KEPT: {RoundPhase.WRITING, RoundPhase.REDUCED},
    RoundPhase.PARTIAL: {RoundPhase.WRITING, RoundPhase.REDUCED},
    RoundPhase.REDUCED: {RoundPhase.WRITING, RoundPhase.IDLE},
}


class Round:
    """The phase of one unit's gradients. Only this class changes the phase.

    name          of the unit, for errors
    reduces_once  whole gradients stay from one microbatch to the next, and are reduced once in an iteration
    delayed       the modules had said, when they were sharded, that these gradients are computed after backward
    """

    __slots__ = ("_delayed", "_phase", "_reduces_once", "delays", "had_delays", "name", "was_kept")

    def __init__(self, name: str, *, reduces_once: bool, delayed: bool) -> None:
        self.name = name
        self._reduces_once = reduces_once
        self._delayed = delayed
        self._phase = RoundPhase.IDLE
        self.delays = delayed
        """Some gradients of this iteration are delayed, here or perhaps on another rank. So the round is sent once,
        after the last backward."""
        self.was_kept = False
        """Whole gradients of an earlier microbatch are in memory."""
        self.had_delays = False
        """``delays`` in the iteration that has ended, until an optimizer steps."""

    @property
    def phase(self) -> RoundPhase:
        """The current phase."""
        return self._phase

    @property
    def under_way(self) -> bool:
        """Whether a backward of the iteration has reached the unit, and the iteration has not ended."""
        return self._phase is not RoundPhase.IDLE

    @property
    def is_left(self) -> bool:
        """Whether backward has passed, and a ``send`` is left for the end of the iteration."""
        return self._phase in (RoundPhase.KEPT, RoundPhase.PARTIAL)

    def enter(self, *, delays: bool) -> None:
        """Backward has reached the outputs of a forward; ``delays``: that forward ran under ``delayed_wgrad``."""
        self.delays = self.delays or delays
        if self._phase is not RoundPhase.WRITING:
            self._move(RoundPhase.WRITING)

    def keeps_after(self, *, final: bool) -> bool:
        """Whether whole gradients stay when a backward passes; ``final``: the iteration's last backward."""
        return self.delays or (self._reduces_once and not final)

    def keep(self) -> None:
        """Backward has passed, and the whole gradients stay."""
        self._move(RoundPhase.KEPT)
        self.was_kept = True

    def send(self, *, final: bool) -> None:
        """A reduction is launched: over all ranks if ``final``, else inside the instance."""
        self._move(RoundPhase.REDUCED if final else RoundPhase.PARTIAL)
        self.was_kept = False

    def end(self) -> None:
        """The iteration is over."""
        if self._phase is not RoundPhase.IDLE:
            self._move(RoundPhase.IDLE)
            self.had_delays = self.delays
        self.delays = self._delayed

    def give_up(self) -> None:
        """The iteration is given up."""
        self._phase = RoundPhase.IDLE
        self.delays, self.was_kept, self.had_delays = self._delayed, False, False

    def _move(self, phase: RoundPhase) -> None:
        if phase not in _MOVES[self._phase]:
            raise RuntimeError(f"gradients of {self.name} cannot go from {self._phase.value} to {phase.value}")
        self._phase = phase
