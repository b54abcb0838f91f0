"""What plain PyTorch needs to do all ranks' work in one process."""

import torch
from torch import nn


def share(models, experts):
    """Models that differ in their experts alone."""
    first = models[0]
    for other in models[1:]:
        for (name, module), twin in zip(other.named_modules(), first.modules(), strict=True):
            for local in list(module._parameters):
                if not f"{name}.{local}".startswith(tuple(experts)):
                    module._parameters[local] = twin._parameters[local]


class AllOf(nn.Module):
    """Models as one, for its parameters."""

    def __init__(self, *models):
        super().__init__()
        self.models = nn.ModuleList(models)


class Masters(nn.Module):
    """fp32 copies of a bf16 model's parameters: gradients are summed in them, and optimizers step over them."""

    def __init__(self, model):
        super().__init__()
        self.model = [model]  # whose parameters are not ours
        for name, param in model.named_parameters():
            self.register_parameter(
                name.replace(".", "/"), nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
            )

    def named_parameters(self, *args, **kwargs):
        return [(name.replace("/", "."), param) for name, param in super().named_parameters(*args, **kwargs)]

    def pairs(self):
        return zip(self.model[0].parameters(), self.parameters(), strict=True)

    def take(self):
        """Add the model's gradients, and clear them."""
        for param, master in self.pairs():
            if param.grad is not None:
                master.grad = param.grad.float() if master.grad is None else master.grad + param.grad.float()
                param.grad = None

    def give(self):
        """Round to the model's parameters."""
        with torch.no_grad():
            for param, master in self.pairs():
                param.copy_(master)

    def follow(self):
        """Take what somebody changed in the model; what still is its master's rounding keeps all of its bits."""
        with torch.no_grad():
            for param, master in self.pairs():
                master.copy_(torch.where(master.bfloat16() == param, master, param))


def zeros_where_none(model):
    """A parameter that nobody has used has the gradient zero."""
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)


def add_to_grad(param, gradient):
    """What ``add_grad`` does."""
    param.grad = gradient if param.grad is None else param.grad + gradient
