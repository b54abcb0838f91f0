"""Documents whose lengths an int32 cannot hold."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "39w-the-length-of-a-long-document-wraps",
        sentence="An index has one sequence for each document: from 2^31 tokens on its int32 length is another number.",
        tests=["tests/launch/data/test_sources.py::test_a_document_longer_than_an_int32_is_several_sequences"],
        changes=[
            Change(
                "maingrad.launch.data.indexed",
                "_sequences_of",
                "return [_LONGEST] * full + [rest] * bool(rest)",
                "return [length]",
            )
        ],
    ),
]
