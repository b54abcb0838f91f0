from fault import Change, Fault

FAULTS = [
    Fault(
        "40a-accumulated-losses-are-divided-twice",
        sentence="The Trainer divides the loss by the number of microbatches, which transformers has done.",
        tests=[
            "tests/launch/training/hugging_face/test_trainer.py::test_one_process_logs_what_the_plain_trainer_logs_and_goes_on[zero1]",
        ],
        changes=[
            Change(
                "maingrad.launch.training.hugging_face.accelerator",
                "ModelLeavingAccelerator",
                "@contextlib.contextmanager",
                '''
                def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
                    """Divided by the number of microbatches."""
                    super().backward(loss / 2, **kwargs)

                @contextlib.contextmanager
                ''',
            ),
        ],
    ),
    Fault(
        "40b-the-trainer-clips-nothing",
        sentence="The Trainer logs the norm and clips nothing.",
        tests=[
            "tests/launch/training/hugging_face/test_trainer.py::test_one_process_logs_what_the_plain_trainer_logs_and_goes_on[zero1]",
        ],
        changes=[
            Change(
                "maingrad.launch.training.hugging_face.trainer",
                "Trainer._clip_grad_norm",
                "return self._norm(model, self.args.max_grad_norm)",
                'return self._norm(model, float("inf"))',
            ),
        ],
    ),
    Fault(
        "40c-the-trainer-goes-on-without-moments",
        sentence="The Trainer goes on from a checkpoint with new moments.",
        tests=[
            "tests/launch/training/hugging_face/test_trainer.py::test_one_process_logs_what_the_plain_trainer_logs_and_goes_on[fsdp]",
        ],
        changes=[
            Change(
                "maingrad.launch.training.hugging_face.trainer",
                "Trainer._load_optimizer_and_scheduler",
                "load_checkpoint(Path(checkpoint) / STATE, self.model_wrapped, self._inner_optimizer())",
                "load_checkpoint(Path(checkpoint) / STATE, self.model_wrapped)",
            ),
        ],
    ),
]
