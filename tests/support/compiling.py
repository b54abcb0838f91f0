"""What torch.compile imports at a process's first graph, for seconds: imported before processes are forked."""

import torch._dynamo.backends.common
import torch._functorch.aot_autograd
import torch._functorch.partitioners
import torch._inductor.pattern_matcher  # noqa: F401
