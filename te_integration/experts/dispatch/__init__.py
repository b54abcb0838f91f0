"""Experts over ranks: each rank holds some of the experts, and tokens travel to them and back.

``dispatcher.py`` is what a model calls, and where autograd is; ``transport.py`` says what moves rows, and the other
files are transports.
"""
