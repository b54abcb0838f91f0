"""All-gathers of updated parameters that run under the next forward, and every reader that must wait for them.

Imports ``collectives``. Knows parameters and modules, but no buckets and no gradients.
"""
