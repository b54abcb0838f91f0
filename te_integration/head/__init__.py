"""The last layer of a language model with its loss, whose logits are never in memory as a whole.

Imports the files of ``te_integration`` itself.
"""
