"""Which region of ``torch.utils.checkpoint`` a forward runs in, and whether it is the recompute.

Without reentrance a recompute serves nothing but its saved tensors: the first forward's backwards read them, one by one
in the order in which that forward saved its own. torch compares shapes and dtypes. A module must therefore save what it
saved the first time, whatever has changed around it since.
"""

from typing import Any

import torch
from torch.utils import checkpoint

__all__ = ["current_checkpoint"]


def current_checkpoint() -> tuple[Any, bool] | None:
    """The innermost region of this thread's forward, and whether it is being recomputed; None outside of regions.

    A region is an object that lives as long as the graph of its forward. torch tells nobody which one it is: it shows
    in the saved-tensor hooks, whose innermost ones are those of whoever gets what a module saves. ``RuntimeError``
    where it does not.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    pack: Any = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    if getattr(pack, "__module__", None) != checkpoint.__name__:
        return None
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "frame" in cells:
        return cells["frame"].cell_contents, False
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    raise RuntimeError(
        f"torch {torch.__version__} does not show which checkpointed region a forward belongs to, and its recompute "
        f"could not be told to delay weight gradients alike: use delay_wgrad_compute=True or fuse_wgrad_accumulation="
        f"True of each module inside, or use_reentrant=True, with delayed_wgrad"
    )
