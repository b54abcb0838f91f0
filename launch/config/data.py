"""``[data]``: where tokens come from, how they become sequences, and which are used for validation only."""

from dataclasses import dataclass
from typing import Annotated, Literal

from .table import Count, Natural, Positive, Range, Table

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Table):
    """Where tokens come from, how they become sequences, and which are used for validation only."""

    source: Literal["stdlib", "text", "tokens", "megatron", "hugging_face"] = "stdlib"
    """``stdlib``: source files of the running Python's standard library, as bytes. ``text``: any files, as bytes.
    ``tokens``: files of token ids. ``megatron``: pairs ``PATH.bin`` and ``PATH.idx``, which ``maingrad tokenize``
    writes. ``hugging_face``: folders that ``datasets.Dataset.save_to_disk`` has written."""
    paths: tuple[str, ...] = ()
    """Files, prefixes (``megatron``) or folders (``hugging_face``), in order. Relative to the working directory."""
    weights: tuple[Positive, ...] = ()
    """Share of each path in the training sequences, in any unit. Needs ``order = "epochs"``. Empty: the paths follow
    each other as one body of tokens."""
    validation_paths: tuple[str, ...] = ()
    """Validation files. Without them, the end of the training data (of each path, with ``weights``) is used."""
    column: str = "input_ids"
    """Column of a ``hugging_face`` source with a list of token ids in each row. A row is a document."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the little-endian integers in a ``tokens`` file."""
    end_of_document: Natural | None = None
    """Token id that ends each document. Needed by ``documents``, where the source does not know its documents itself
    (``stdlib``, ``tokens``)."""
    documents: Literal["join", "mask", "pad"] = "join"
    """``join``: a sequence is a row of tokens, whatever documents they belong to. ``mask``: the same rows; attention
    does not cross documents, and the first token of a document is no target. ``pad``: a sequence is one document, or
    a piece of one, padded; padding counts nowhere."""
    order: Literal["random", "epochs"] = "random"
    """``random``: sequences begin at random places of the data. ``epochs``: each sequence once in each epoch, in an
    order that follows from ``train.seed`` and the epoch."""
    validation_fraction: Annotated[float, Range(lambda value: 0.0 < value < 1.0, "must lie between 0 and 1")] = 0.05
    """Fraction of the data for validation: of the files (``stdlib``), or of the tokens."""
    max_tokens: Count | None = None
    """Use only the first ``max_tokens`` tokens of the training data (of each path, with ``weights``). None: all."""

    def check(self) -> None:
        if self.source == "stdlib":
            self.require(not self.paths, "paths", 'source = "stdlib" finds its files itself; set "text"')
            self.require(not self.validation_paths, "validation_paths", 'need source = "text"/"tokens"')
        else:
            self.require(bool(self.paths), "paths", f'source = "{self.source}" needs at least one file')
        remedy = 'has no effect without source = "hugging_face"; leave it out'
        self.require(self.column == "input_ids" or self.source == "hugging_face", "column", remedy)
        if self.weights:
            remedy = f"must be one number for each of the {len(self.paths)} data.paths"
            self.require(len(self.weights) == len(self.paths), "weights", remedy)
            remedy = 'are kept sequence by sequence: set data.order = "epochs"'
            self.require(self.order == "epochs", "weights", remedy)
        remedy = 'makes sequences of documents, which have no random places: set data.order = "epochs"'
        self.require(self.documents != "pad" or self.order == "epochs", "documents", remedy)
        remedy = f'source = "{self.source}" does not know where documents end: set data.end_of_document'
        self.require(self.documents == "join" or self.knows_documents, "documents", remedy)

    @property
    def knows_documents(self) -> bool:
        """Whether borders of documents are known."""
        return self.end_of_document is not None or self.source in ("text", "megatron", "hugging_face")

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self.source in ("stdlib", "text")
