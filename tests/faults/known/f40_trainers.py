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
                "def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:",
                '''
                def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
                    """Divided by the number of microbatches."""
                    super().backward(loss / 2, **kwargs)

                def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
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
                "self.clipped_norm(model, self.args.max_grad_norm)",
                'self.clipped_norm(model, float("inf"))',
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
    Fault(
        "40d-a-fused-loss-gets-a-shard",
        sentence="The Trainer makes a unit of output embeddings whose weight a replaced forward takes.",
        tests=[
            "tests/launch/training/hugging_face/test_users_trainers.py::test_a_loss_that_is_fused_with_the_last_product",
            "tests/launch/training/hugging_face/test_users_trainers.py::test_output_embeddings_are_a_unit_unless_a_forward_may_take_their_weight",
        ],
        changes=[
            Change(
                "maingrad.launch.training.hugging_face.wrapping",
                "_ends",
                "ends = ends[:1]",
                "pass",
            ),
        ],
    ),
]
