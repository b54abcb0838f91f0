"""Fully sharded data parallelism: parameters, gradients and optimizer state over ranks, on the buckets of ddp/."""
