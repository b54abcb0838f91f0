"""Faults of ``release_grads``: buckets of gradients that give their memory back."""

from fault import Change, Fault

TESTS = "tests/ddp/buckets/test_released.py"
SAME_BITS = f"{TESTS}::test_programs_have_the_same_bits"
RELEASED = "maingrad.ddp.buckets.released"

FAULTS = [
    Fault(
        "62a-memory-stays-after-the-reduction",
        sentence="A bucket that was reduced keeps its memory until the next iteration.",
        tests=[f"{TESTS}::test_memory_goes_back[2-1]"],
        changes=[Change(RELEASED, "ReleasedBucket.end_reduction", "self._release()", "")],
    ),
    Fault(
        "62b-taken-memory-is-not-zeroed",
        sentence="What autograd delivers, and padding, is added to what the memory held before.",
        tests=[f"{SAME_BITS}[one microbatch]"],
        changes=[Change(RELEASED, "ReleasedBucket.make_room", "torch._foreach_zero_(self._zeroed)", "pass")],
    ),
    Fault(
        "62c-no-bucket-waits-for-older-ones",
        sentence="At the end of a backward all buckets are in memory.",
        tests=[f"{TESTS}::test_memory_goes_back[2-1]"],
        changes=[
            Change(RELEASED, "ReleasedBucket.make_room", "self.pool.wait_for_all_but(NUM_UNDER_WAY)", "pass"),
        ],
    ),
    Fault(
        "62d-a-bucket-opens-again-without-memory",
        sentence="A second backward asks for memory before it opens the bucket, gets none, and writes to freed memory.",
        tests=[f"{SAME_BITS}[second backwards]"],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                """
                if self.closed is not None and not written_already:
                    self.reopen()
                if self.make_room is not None and (self.closed is not None or not self.written):
                    self.make_room()
                """,
                """
                if self.make_room is not None and (self.closed is not None or not self.written):
                    self.make_room()
                if self.closed is not None and not written_already:
                    self.reopen()
                """,
            ),
        ],
    ),
    Fault(
        "62e-a-rank-without-gradients-sends-freed-memory",
        sentence="A bucket that no gradient of this rank has reached is reduced without memory.",
        tests=[f"{TESTS}::test_a_bucket_that_nobody_uses_sends_zeros"],
        changes=[Change(RELEASED, "ReleasedBucket.begin_reduction", "self.make_room()", "")],
    ),
    Fault(
        "62f-the-shard-of-the-iteration-before-is-read",
        sentence="Between microbatches reduced_grads() gives the gradients of the iteration before.",
        tests=[f"{TESTS}::test_main_grad_is_there_until_the_reduction"],
        changes=[
            Change(
                RELEASED,
                "ReleasedBucket.check_readable",
                "if self.phase not in (Phase.REDUCING, Phase.REDUCED):",
                "if False:",
            ),
        ],
    ),
    Fault(
        "62h-given-up-gradients-keep-their-memory",
        sentence="Gradients that were given up stay in memory, and the next iteration adds to them.",
        tests=[f"{SAME_BITS}[gives up]"],
        changes=[Change(RELEASED, "ReleasedBucket.reset", "self._release()", "")],
    ),
    Fault(
        "62i-scaling-misses-what-was-reduced",
        sentence="scale_gradients() after the reduction scales memory that was freed, or nothing.",
        tests=[f"{SAME_BITS}[Megatron's verbs]"],
        changes=[
            Change(RELEASED, "ReleasedBucket.held", "if self.phase is Phase.REDUCED:", "if False:"),
        ],
    ),
    Fault(
        "62j-sums-go-into-the-bucket",
        sentence="The reduction leaves this rank's sum in the bucket, whose memory is freed, and the shard stays as it was.",
        tests=[f"{SAME_BITS}[one microbatch]"],
        changes=[
            Change(
                "maingrad.ddp.collectives.reduction",
                "GradReduction._stages",
                "self.inside(grads, into)",
                "self.inside(grads)",
            ),
        ],
    ),
    Fault(
        "62k-a-stage-waits-for-another-stage",
        sentence="Under a pipeline's schedule a bucket waits in backward for a reduction that needs a stage behind it.",
        tests=[f"{TESTS}::test_under_a_schedule_no_bucket_waits"],
        changes=[
            Change(RELEASED, "ReleasedBucket.make_room", "if parts is not None and not parts.num_open:", "if True:"),
        ],
    ),
]
