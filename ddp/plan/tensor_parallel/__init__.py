"""Models that torch's tensor parallelism has cut: DTensors become local parameters, and their modules run as before.

1. ``localize.py``    what becomes local, at wrapping; what is refused
2. ``layouts.py``     a local tensor as a part of the whole, and as a DTensor
3. ``forwards.py``    a module's forward sees DTensors of its local parameters
4. ``products.py``    a fused linear layer multiplies local tensors instead
5. ``state_dict.py``  state dicts have DTensors
6. ``optimizers.py``  those of optimizers have, too; and none steps over the DTensors of before
7. ``hugging_face.py``  how transformers replaces forwards

Only ``localize`` is imported by wrappers. The other files import torch.distributed.tensor, which takes seconds.
"""
