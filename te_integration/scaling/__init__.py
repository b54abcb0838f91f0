"""Delayed scaling: the scales and amaxes of modules, which amaxes count, and when scales change."""
