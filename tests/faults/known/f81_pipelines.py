"""Stages of a pipeline in ``maingrad train``: what each has, how losses and norms cover all, one checkpoint."""

from fault import Change, Fault

TRAIN = "tests/launch/training/test_pipeline.py::"
SAME = TRAIN + "test_stages_train_the_same_model[join-zero1, dp 2]"
SHARDED = TRAIN + "test_stages_train_the_same_model[join-fsdp, dp 2]"
OWN = TRAIN + "test_each_stage_has_its_own_parameters[True]"
CHECKPOINTS = "tests/ddp/checkpoint/test_pipeline.py::"
PIPELINED = "maingrad.launch.training.pipelined"
SOURCE = "maingrad.ddp.checkpoint.source"

FAULTS = [
    Fault(
        "81a-stages-without-a-loss-count",
        sentence="The mean loss is over the ranks of all stages, of which only the last one has a loss.",
        tests=[SAME],
        changes=[Change(PIPELINED, "PipelinedTrainer._run_microbatches", " * runtime.mesh.pp", "")],
    ),
    Fault(
        "81b-microbatches-are-summed",
        sentence="The gradients of a step's microbatches are summed where their mean is asked for.",
        tests=[SAME],
        changes=[Change(PIPELINED, "_weighted", "loss * weight.squeeze().to(loss.dtype)", "loss * 1.0")],
    ),
    Fault(
        "81c-a-stage-clips-by-its-own-norm",
        sentence="Each stage clips its gradients by the norm of its own.",
        tests=[SAME],
        changes=[
            Change(
                "maingrad.launch.training.wrapping",
                "Wrapped.__init__",
                "pipeline_group=self.pipeline), None",
                "), None",
            )
        ],
    ),
    Fault(
        "81d-a-sharded-stage-clips-by-its-own-norm",
        sentence="Each fully sharded stage clips its gradients by the norm of its own.",
        tests=[SHARDED],
        changes=[Change("maingrad.launch.training.wrapping", "_clip_shards", "if pipeline is not None:", "if False:")],
    ),
    Fault(
        "81e-a-stage-draws-as-if-it-were-all",
        sentence="A stage's weights are the first that its seed gives, and not those of its blocks in the whole model.",
        tests=[OWN.replace("True", "False")],
        changes=[
            Change(
                "maingrad.launch.model.gpt",
                "GPT.reset_parameters",
                'self if self.stage.count == 1 else GPT(self.config, torch.device("meta"))',
                "self",
            )
        ],
    ),
    Fault(
        "81f-a-tied-embedding-is-two",
        sentence="First and last stage train their copies of a tied embedding apart.",
        tests=[OWN],
        changes=[
            Change(
                "maingrad.launch.model.gpt",
                "GPT.mark_shared_embedding",
                "self.embedding.weight.shared_embedding = True",
                "pass",
            ),
            Change("maingrad.launch.training.wrapping", "Wrapped.__init__", "= runtime.embedding_group", "= None"),
        ],
    ),
    Fault(
        "81g-rows-that-fill-a-microbatch-count",
        sentence="In a validation, rows that give the last microbatch its shape count in the loss.",
        tests=[SAME],
        changes=[Change(PIPELINED, "PipelinedTrainer._loss", "value=-100", "value=0")],
    ),
    Fault(
        "81h-stages-write-one-file",
        sentence="Ranks of different stages write to one file of a checkpoint.",
        tests=[CHECKPOINTS + "test_any_number_of_stages_goes_on[3-3-2-2-False]"],
        changes=[
            Change(SOURCE, "CheckpointRanks.place", "group.rank()", "(group is not self.pipeline) * group.rank()")
        ],
    ),
    Fault(
        "81i-whole-parameters-of-a-stage-are-left-to-another",
        sentence="A stage's whole parameters wait for their turn on a rank of another stage, which has others.",
        tests=[CHECKPOINTS + "test_any_number_of_stages_goes_on[3-3-2-2-False]"],
        changes=[Change("maingrad.ddp.checkpoint.checkpoint", "_look_at", " or ranks.pipeline is not None", "")],
    ),
    Fault(
        "81j-what-no-stage-has-is-skipped",
        sentence="A load into stages skips all that this stage lacks, also what no stage has.",
        tests=[CHECKPOINTS + "test_what_no_stage_has_is_missed"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "load_checkpoint",
                'elsewhere.isdisjoint(_and_its_module(name.rpartition("@")[2]))',
                "source.ranks.pipeline is None or name in dict(source.module.state_dict())",
            )
        ],
    ),
]
