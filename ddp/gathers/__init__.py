"""All-gathers of updated parameters that run under the next forward, and every reader that must wait for them.

``ParamGather`` serves ``DistributedDataParallel`` after a step, and units of ``fsdp`` before a use. The collective is
``all_gather_shards`` (``collectives/in_flight.py``). ``buckets/copy_engines.py`` chooses whether copy engines run it.

Imports ``collectives``. Knows parameters and modules, but no buckets and no gradients.
"""
