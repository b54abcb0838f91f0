"""torch.compile without what it does besides: an eighth of the time of tests that compile."""

__all__ = ["compile_without_measuring_guards"]


def compile_without_measuring_guards() -> None:
    """Neither time the guards of each frame, with the processor's caches flushed, nor collect garbage behind it.

    The time goes into a line of dynamo's log. The garbage waits for the next collection, as everywhere else.
    """
    # Not above: dynamo imports Triton, which has to know by then whether kernels are interpreted.
    import torch._dynamo.config
    import torch._dynamo.guards

    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False
