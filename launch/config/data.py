"""``[data]``: where tokens come from, how they become sequences, and which are used for validation only."""

from dataclasses import dataclass
from typing import Literal

from .error import require

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from, how they become sequences, and which are used for validation only."""

    source: Literal["stdlib", "text", "tokens", "megatron", "hugging_face"] = "stdlib"
    """``stdlib``: source files of the running Python's standard library, as bytes. ``text``: any files, as bytes, or
    with ``tokenizer`` as tokens. ``tokens``: files of token ids. ``megatron``: pairs ``PATH.bin`` and ``PATH.idx``.
    ``hugging_face``: folders that ``datasets.Dataset.save_to_disk`` has written."""
    paths: tuple[str, ...] = ()
    """Files, prefixes (``megatron``) or folders (``hugging_face``), in order. Relative to the working directory."""
    weights: tuple[float, ...] = ()
    """Share of each path in the training sequences, in any unit. Needs ``order = "epochs"``. Empty: the paths follow
    each other as one body of tokens."""
    validation_paths: tuple[str, ...] = ()
    """Validation files. Without them, the end of the training data (of each path, with ``weights``) is used."""
    tokenizer: str | None = None
    """File ``tokenizer.json`` of Hugging Face, for a ``text`` source. None: bytes."""
    cache_dir: str | None = None
    """Folder for the tokens of a ``tokenizer``, keyed by the contents of the files. None: ``train.out_dir``/tokens."""
    column: str = "input_ids"
    """Column of a ``hugging_face`` source with a list of token ids in each row. A row is a document."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the little-endian integers in a ``tokens`` file."""
    end_of_document: int | None = None
    """Token id that ends each document. Needed by ``documents``, where the source does not know its documents itself
    (``stdlib``, ``tokens``)."""
    documents: Literal["join", "mask", "pad"] = "join"
    """``join``: a sequence is a row of tokens, whatever documents they belong to. ``mask``: the same rows; attention
    does not cross documents, and the first token of a document is no target. ``pad``: a sequence is one document, or
    a piece of one, padded; padding counts nowhere."""
    order: Literal["random", "epochs"] = "random"
    """``random``: sequences begin at random places of the data. ``epochs``: each sequence once in each epoch, in an
    order that follows from ``train.seed`` and the epoch."""
    validation_fraction: float = 0.05
    """Fraction of the data for validation: of the files (``stdlib``), or of the tokens."""
    max_tokens: int | None = None
    """Use only the first ``max_tokens`` tokens of the training data (of each path, with ``weights``). None: all."""

    def __post_init__(self) -> None:
        if self.source == "stdlib":
            require(not self.paths, "data.paths", self.paths, 'source = "stdlib" finds its files itself; set "text"')
            require(
                not self.validation_paths,
                "data.validation_paths",
                self.validation_paths,
                'need source = "text"/"tokens"',
            )
        else:
            require(bool(self.paths), "data.paths", self.paths, f'source = "{self.source}" needs at least one file')
        require(
            0.0 < self.validation_fraction < 1.0,
            "data.validation_fraction",
            self.validation_fraction,
            "must lie between 0 and 1: the validation loss needs data of its own",
        )
        require(
            self.max_tokens is None or self.max_tokens >= 1, "data.max_tokens", self.max_tokens, "must be at least 1"
        )
        require(
            self.end_of_document is None or self.end_of_document >= 0,
            "data.end_of_document",
            self.end_of_document,
            "must not be negative; leave it out where no token ends a document",
        )
        require(
            self.tokenizer is None or self.source == "text",
            "data.tokenizer",
            self.tokenizer,
            f'reads text, and source = "{self.source}"; set source = "text", or leave it out',
        )
        require(
            self.column == "input_ids" or self.source == "hugging_face",
            "data.column",
            self.column,
            'has no effect without source = "hugging_face"; leave it out',
        )
        self._check_order()

    def _check_order(self) -> None:
        require(
            not self.weights or len(self.weights) == len(self.paths),
            "data.weights",
            self.weights,
            f"must be one number for each of the {len(self.paths)} data.paths",
        )
        require(
            all(0.0 < weight < float("inf") for weight in self.weights),
            "data.weights",
            self.weights,
            "must be positive; leave out a path that is not to be read",
        )
        require(
            not self.weights or self.order == "epochs",
            "data.weights",
            self.weights,
            'are kept sequence by sequence: set data.order = "epochs"',
        )
        require(
            self.documents != "pad" or self.order == "epochs",
            "data.documents",
            self.documents,
            'makes sequences of documents, which have no random places: set data.order = "epochs"',
        )
        require(
            self.documents == "join" or self.knows_documents,
            "data.documents",
            self.documents,
            f'source = "{self.source}" does not know where documents end: set data.end_of_document',
        )

    @property
    def knows_documents(self) -> bool:
        """Whether borders of documents are known."""
        return self.end_of_document is not None or self.source in ("text", "megatron", "hugging_face")

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self.source == "stdlib" or (self.source == "text" and self.tokenizer is None)
