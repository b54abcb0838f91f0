"""The life of a unit's gradients in one iteration, from the first write of a backward to the sum over all ranks.

::

    IDLE ---- enter ----> WRITING ---- send, in a microbatch -------------> PARTIAL
      ^                   |  ^  |  <--- enter, in a later one ------------    |
      |              keep |  |  |                                             |
      |                   v  |  +----- send, in the last ----> REDUCED <------+
      |                   KEPT                                 ^  |    send, at the end
      |                     +------- send, at the end ---------+  |
      +---------------------------- end --------------------------+

``enter``    backward has come to the unit's outputs. The first write takes memory for whole gradients, and waits for a
             reduction of an earlier microbatch that still has it
``keep``     backward has passed the unit, and whole gradients stay: they are reduced once in an iteration, or some of
             them are delayed and come after backward. A later microbatch enters again, and adds
``send``     whole gradients are reduced inside the instance, in the last microbatch across instances as well, and added
             to ``.grad`` of the shards. Their memory goes back when somebody needs it, or the iteration ends. Backward
             enters again where it comes to the unit past what was sent
``end``      of the iteration: what is left was sent, in one order, and ``.grad`` is complete
``give_up``  from anywhere to IDLE: backward failed, and the next forward begins anew

Each move follows from the forwards and backwards that the program runs, which ranks run alike. What a rank has written
by then, whose graphs are alive and what ``.grad`` is decides what a rank adds, and never which moves there are: each
``send`` is a collective.

A unit has one round. Where some of its modules say that they delay weight gradients, theirs have another, whose life
ends later.
"""

import enum

__all__ = ["Round", "RoundPhase"]


class RoundPhase(enum.Enum):
    """Where a unit's gradients are in the current iteration."""

    IDLE = "idle"
    """No backward of this iteration has come to the unit."""
    WRITING = "writing"
    """A backward is in the unit."""
    KEPT = "kept"
    """Backward has passed; whole gradients wait for the iteration's last microbatch, or for delayed ones."""
    PARTIAL = "partial"
    """Reduced inside the instance; what is missing is the last microbatch, and the sum across instances."""
    REDUCED = "reduced"
    """Reduced over all ranks, or on the way."""

    __hash__ = object.__hash__  # enum's own runs Python code, twice for each move


_MOVES = {
    RoundPhase.IDLE: {RoundPhase.WRITING},
    RoundPhase.WRITING: {RoundPhase.KEPT, RoundPhase.PARTIAL, RoundPhase.REDUCED},
    RoundPhase.KEPT: {RoundPhase.WRITING, RoundPhase.REDUCED},
    RoundPhase.PARTIAL: {RoundPhase.WRITING, RoundPhase.REDUCED},
    RoundPhase.REDUCED: {RoundPhase.WRITING, RoundPhase.IDLE},
}


class Round:
    """The phase of one unit's gradients, and the only place where it changes.

    name     of the unit, for errors
    reduces_once  whole gradients stay from one microbatch to the next, and are reduced once in an iteration
    delayed  the modules said when they were wrapped that these gradients come after backward
    """

    __slots__ = ("_delayed", "_phase", "_reduces_once", "delays", "had_delays", "name", "was_kept")

    def __init__(self, name: str, *, reduces_once: bool, delayed: bool) -> None:
        self.name = name
        self._reduces_once = reduces_once
        self._delayed = delayed
        self._phase = RoundPhase.IDLE
        self.delays = delayed
        """In this iteration some gradients come after backward, or may do so on another rank: all of the round's are
        reduced once, in the round's turn, after the last backward."""
        self.was_kept = False
        """Whole gradients have stayed from an earlier microbatch."""
        self.had_delays = False
        """It did in the iteration that has ended, and no optimizer has stepped since."""

    @property
    def phase(self) -> RoundPhase:
        """Current phase."""
        return self._phase

    @property
    def under_way(self) -> bool:
        """The iteration has brought gradients, and is not at its end."""
        return self._phase is not RoundPhase.IDLE

    @property
    def is_left(self) -> bool:
        """Backward has passed, and what is missing is to be reduced at the iteration's end."""
        return self._phase in (RoundPhase.KEPT, RoundPhase.PARTIAL)

    def enter(self, *, delays: bool) -> None:
        """Backward has come to the unit; ``waits``: to a forward under ``delayed_wgrad``."""
        self.delays = self.delays or delays
        if self._phase is not RoundPhase.WRITING:
            self._move(RoundPhase.WRITING)

    def keeps_after(self, *, final: bool) -> bool:
        """Whether whole gradients stay when a backward, the iteration's last if ``final``, has passed."""
        return self.delays or (self._reduces_once and not final)

    def keep(self) -> None:
        """Backward has passed, and whole gradients stay."""
        self._move(RoundPhase.KEPT)
        self.was_kept = True

    def send(self, *, final: bool) -> None:
        """What is there is reduced, over all ranks if ``final``."""
        self._move(RoundPhase.REDUCED if final else RoundPhase.PARTIAL)
        self.was_kept = False

    def end(self) -> None:
        """The iteration is over."""
        if self._phase is not RoundPhase.IDLE:
            self._move(RoundPhase.IDLE)
            self.had_delays = self.delays
        self.delays = self._delayed

    def give_up(self) -> None:
        """The iteration is abandoned."""
        self._phase = RoundPhase.IDLE
        self.delays, self.was_kept, self.had_delays = self._delayed, False, False

    def _move(self, phase: RoundPhase) -> None:
        if phase not in _MOVES[self._phase]:
            raise RuntimeError(f"gradients of {self.name} cannot go from {self._phase.value} to {phase.value}")
        self._phase = phase
