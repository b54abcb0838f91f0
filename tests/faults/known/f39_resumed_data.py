from fault import Change, Fault

FAULTS = [
    Fault(
        "39a-masks-begin-one-token-late",
        sentence="The positions of a document begin one token late: attention looks into the document before.",
        tests=[
            "tests/launch/data/test_sources.py::test_masked_rows_show_documents",
        ],
        changes=[
            Change(
                "maingrad.launch.data.sequences",
                "SequenceSet.row_at",
                "first = np.maximum.accumulate(np.where(begins[:-1], places, 0))",
                "first = np.maximum.accumulate(np.where(np.roll(begins[:-1], 1), places, 0))",
            ),
        ],
    ),
    Fault(
        "39b-documents-of-what-is-held-back-lie-elsewhere",
        sentence="In tokens that are a part of a file, documents begin where they begin in the file.",
        tests=[
            "tests/launch/data/test_sources.py::test_documents_keep_their_borders_in_the_tokens_that_are_held_back",
        ],
        changes=[
            Change(
                "maingrad.launch.data.sequences",
                "Body.part",
                "inside = starts[(starts > start) & (starts < stop)] - start",
                "inside = starts[(starts > 0) & (starts < stop - start)]",
            ),
        ],
    ),
    Fault(
        "39c-a-resumed-run-repeats-a-batch",
        sentence="A resumed run repeats the last batch of the run before.",
        tests=[
            "tests/launch/training/test_resume.py::test_an_interrupted_run_goes_on_by_itself",
        ],
        changes=[
            Change(
                "maingrad.launch.training.run_state",
                "RunSaver.save",
                '"step": pace.step,',
                '"step": pace.step - 1,',
            ),
        ],
    ),
    Fault(
        "39d-targets-of-each-microbatch-count-alike",
        sentence="Microbatches with fewer targets count as much as those with more.",
        tests=[
            "tests/launch/data/test_sources.py::test_the_mean_is_over_all_counted_tokens[pad]",
        ],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._document_arguments",
                """
                shares = torch.stack([(each.targets >= 0).sum() for each in batches]).double()
                weights = shares * (self.runtime.loss_ranks / max(1, self.sampler.counted(step)))
                """,
                "weights = torch.full([len(batches)], 1 / len(batches), dtype=torch.float64)",
            ),
        ],
    ),
]
