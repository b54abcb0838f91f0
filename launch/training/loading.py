"""What a run trains, and on what: the model, the sampler of sequences, the validation set."""

from collections.abc import Callable
from pathlib import Path

import torch

from ..config.error import require
from ..config.run import Config
from ..data.batches import Batch, Corpus, validation_windows
from ..data.sequences import Sampler, concatenated
from ..model.hugging_face import HuggingFaceModel, LanguageModel, build_language_model, check_documents
from ..model.recompute import recompute_blocks

__all__ = ["check_model", "load_model", "make_sampler", "validation_batch"]


def check_model(config: Config, model: LanguageModel) -> None:
    """Raise ``ConfigError`` if a model of Hugging Face would be overwritten, is too short for the sequences, or would
    have padding in its routers' loss.

    model  may be on meta
    """
    source = config.model.hugging_face
    if source is None or not isinstance(model, HuggingFaceModel):
        return
    target = Path(config.train.out_dir) / "hugging_face"
    require(
        not config.model.save_hugging_face or Path(source).resolve() != target.resolve(),
        "model.hugging_face",
        source,
        "would be overwritten by the trained model; set another train.out_dir, or model.save_hugging_face = false",
    )
    require(
        config.data.documents != "pad" or not model.router_loss.counts_padding,
        "data.documents",
        "pad",
        "would have padding in the auxiliary loss of this model's routers, which its class computes in a way of its "
        'own; set "mask", or output_router_logits to false in config.json',
    )
    longest = model.context_length
    require(
        longest is None or config.train.sequence_length <= longest,
        "train.sequence_length",
        config.train.sequence_length,
        f"must be at most max_position_embeddings = {longest} of '{source}'",
    )


def load_model(config: Config, device: torch.device, say: Callable[[str], None]) -> LanguageModel:
    """The model on ``device``, recomputing and compiled as ``[train]`` says, not yet wrapped.

    A model of Hugging Face that is to be sharded has no values yet (``HuggingFaceModel.values``).

    say  called with a line for the screen

    Raises ``ConfigError`` if it does not fit the run.
    """
    model = build_language_model(config.model, seed=config.train.seed, device=device, deferred=config.fully_sharded)
    check_model(config, model)
    if isinstance(model, HuggingFaceModel):
        if model.whole_because is not None:
            say(f"each rank loads the whole model into host memory: {model.whole_because}")
        if config.data.documents == "mask" and not config.fully_sharded:
            check_documents(model, device)
    recompute_blocks(model.blocks, config)
    if config.train.compile:
        model.compile_blocks(config.train.compile_backend)
    return model


def make_sampler(config: Config, corpus: Corpus) -> Sampler:
    """The training sequences of the run."""
    return Sampler(
        corpus.bodies,
        config.data.weights,
        order=config.data.order,
        documents=config.data.documents,
        seed=config.train.seed,
        sequence_length=config.train.sequence_length,
        global_batch_size=config.train.global_batch_size,
    )


def validation_batch(config: Config, corpus: Corpus) -> Batch:
    """The validation set: with weights, each path has its share of the sequences, and one at least."""
    weights = config.data.weights if len(corpus.validation_bodies) > 1 else (1.0,)
    counts = [max(1, round(config.train.eval_sequences * weight / sum(weights))) for weight in weights]
    return concatenated(
        [
            validation_windows(
                body, count=count, sequence_length=config.train.sequence_length, documents=config.data.documents
            )
            for body, count in zip(corpus.validation_bodies, counts, strict=True)
        ]
    )
