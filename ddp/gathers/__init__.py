"""All-gathers of updated parameters that run under the next forward, and everybody who has to wait for them.

Imports ``collectives``. Knows parameters and modules, and neither buckets nor gradients.
"""
