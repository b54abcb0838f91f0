"""What a run trains, and on what: the model, its recipe, the validation set."""

from pathlib import Path

import torch
import torch.distributed as dist

from ...te_integration.dense.quantized_linear import takes_recipe
from ...te_integration.recipes import Recipe, recipe_named
from ..config.error import ConfigError
from ..config.run import Config
from ..data.batches import Batch, Corpus, validation_windows
from ..data.sequences import concatenated
from ..model.cut_gpt import cut_gpt
from ..model.gpt import GPT
from ..model.hugging_face import HuggingFaceModel, LanguageModel, build_language_model
from ..model.recompute import recompute_blocks
from .runtime import Runtime

__all__ = ["check_model", "load_model", "load_recipe", "validation_batch"]


def check_model(config: Config, model: LanguageModel) -> None:
    """Raise ``ConfigError`` if a model of Hugging Face would be overwritten, is too short for the sequences, or would
    have padding in its routers' loss.

    model  may be on meta
    """
    source, settings = config.model.hugging_face, config.train
    if source is None or not isinstance(model, HuggingFaceModel):
        return
    overwrites = Path(source).resolve() == (Path(settings.out_dir) / "hugging_face").resolve()
    remedy = "would be overwritten by the trained model; set another train.out_dir, or model.save_hugging_face = false"
    config.model.require(not (config.model.save_hugging_face and overwrites), "hugging_face", remedy)
    remedy = (
        "would have padding in the auxiliary loss of this model's routers, which its class computes in a way of its "
        'own; set "mask", or output_router_logits to false in config.json'
    )
    config.data.require(config.data.documents != "pad" or not model.counts_padding, "documents", remedy)
    longest = model.context_length
    remedy = f"must be at most max_position_embeddings = {longest} of '{source}'"
    settings.require(longest is None or settings.sequence_length <= longest, "sequence_length", remedy)


def load_model(config: Config, runtime: Runtime) -> LanguageModel:
    """The model, recomputing and compiled as ``[train]`` says, not yet wrapped.

    A model of Hugging Face that is to be sharded has values on the first rank, in host memory. Elsewhere it is on
    meta.

    Raises ``ConfigError`` if it does not fit the run.
    """
    is_shared = config.fully_sharded and config.model.hugging_face is not None
    model = build_language_model(
        config.model,
        seed=config.train.seed,
        device=torch.device("cpu") if is_shared else runtime.device,
        placeholder=is_shared and runtime.rank > 0,
        pads=config.data.documents == "pad",
        stage=runtime.stage,
    )
    check_model(config, model)
    if isinstance(model, GPT):
        model.share_sequences(runtime.context)
        if dist.is_initialized():
            model.loss_group = runtime.loss_group or dist.group.WORLD
        if runtime.expert_mesh is not None:
            model.share_experts(runtime.expert_mesh, runtime.mesh.transport)
        if runtime.tensor_group is not None:
            cut_gpt(model, runtime.tensor_group, sequence_parallel=config.mesh.sequence_parallel)
    recompute_blocks(model.blocks, config)
    # The embedding, the last norm, the head and the loss stay eager. A graph break in a block of the GPT raises.
    whole = isinstance(model, GPT) and runtime.expert_mesh is None  # tokens that travel break a graph
    for block in model.blocks if config.train.compile else ():
        block.compile(fullgraph=whole, backend=config.train.compile_backend)
    return model


def load_recipe(config: Config, device: torch.device) -> Recipe | None:
    """``train.recipe``; None for "none". Raises ``ConfigError`` where the device has no kernels for the recipe."""
    settings = config.train
    recipe = recipe_named(settings.recipe, emulate=settings.emulate_recipe)
    try:
        if recipe is not None:
            takes_recipe(recipe, torch.empty(1, dtype=config.model.dtype("param_dtype"), device=device), "train.recipe")
    except RuntimeError as error:
        raise ConfigError(f"{error}; set train.emulate_recipe = true") from None
    return recipe


def validation_batch(config: Config, corpus: Corpus) -> Batch:
    """The validation set: with weights, each path has its share of the sequences, and one at least."""
    settings, documents = config.train, config.data.documents
    weights = config.data.weights if len(corpus.validation_bodies) > 1 else (1.0,)
    counts = [max(1, round(settings.eval_sequences * weight / sum(weights))) for weight in weights]
    return concatenated(
        [
            validation_windows(body, count=count, sequence_length=settings.sequence_length, documents=documents)
            for body, count in zip(corpus.validation_bodies, counts, strict=True)
        ]
    )
