"""Rows of experts that travel with split sizes on the device."""

from fault import Change, Fault

KERNELS = "maingrad.kernels.permutation.exchange_triton"
TESTS = "tests/kernels/test_exchange.py::"
AHEAD = TESTS + "test_a_rank_may_be_an_exchange_ahead"
BOUND = TESTS + "test_rows_behind_the_bound_are_dropped_and_come_back_as_zeros"
SENT = TESTS + "test_rows_go_to_their_experts_and_come_back"

FAULTS = [
    Fault(
        "78a-the-next-exchange-writes-where-others-still-read",
        sentence="All exchanges use one half of the buffer: a rank that is ahead overwrites rows that others still read.",
        tests=[AHEAD],
        changes=[
            Change(
                KERNELS,
                "_copy_kernel",
                "half = (tl.load(num_exchanges) - (0 if WRITE else 1)) & 1",
                "half = tl.load(num_exchanges) & 0",
            )
        ],
    ),
    Fault(
        "78b-rows-that-went-nowhere-hold-what-the-buffer-held",
        sentence="Rows of dropped copies come back as the buffer was, and are summed.",
        tests=[SENT],
        changes=[
            Change(KERNELS, "_copy_kernel", "is_source &= row < limit", "is_source &= (row < limit) | (not ROUTED)")
        ],
    ),
    Fault(
        "78c-rows-behind-the-last-expert-are-never-written",
        sentence="Received rows behind the last expert's hold what the memory held: 0 x Inf is NaN in a product.",
        tests=[SENT],
        changes=[
            Change(
                KERNELS,
                "_copy_kernel",
                "mask=is_target[:, None] & (column < W))",
                "mask=(is_source if ROUTED and not WRITE else is_target)[:, None] & (column < W))",
            )
        ],
    ),
    Fault(
        "78d-splits-count-rows-that-did-not-fit",
        sentence="Rows of an expert count those beyond the bound: products read behind the end.",
        tests=[BOUND],
        changes=[
            Change(KERNELS, "_meet_kernel", "tl.minimum(begin + of_expert, N) - tl.minimum(begin, N)", "of_expert")
        ],
    ),
]
