"""Cross-entropy of logits that are already in memory, and its gradient in place of the logits.

Imports the files of ``kernels`` itself.
"""
