"""The sections of a run's settings, a field an option of the command line."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

from lamella._settings.options import Option

Attention = Literal[
    "auto",
    "documents",
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]
"""The implementation of a model's attention: transformers' names, and attention within documents."""

Packing = Literal["documents", "stream", "none"]
"""How documents become the sequences of a batch."""

LossOn = Literal["answers", "all"]
"""The tokens of conversations, and of prompts with completions, that the loss is on."""

_WARMUP_STEPS: Final = 40
_FOREVER_S: Final = 1e7  # nanoseconds of longer times do not fit into the integers of torch's timeouts


class WaitLimits(NamedTuple):
    """Seconds without progress of any rank after which a run ends.

    Attributes:
        step_s: The limit in training.
        startup_s: The limit up to the end of the first step.
    """

    step_s: float
    startup_s: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    name: Annotated[
        str,
        Option(
            "llama-small (the default), llama-1b, llama-8b, qwen3.5-tiny; or a transformers config.json, or its "
            "folder: training starts from weights in the folder.",
            name="model",
        ),
    ]
    kernels: Annotated[
        Literal["none", "liger"],
        Option("Library of fused kernels for the model's layers and loss: liger, on GPUs (lamella[kernels])."),
    ] = "none"
    attention: Annotated[
        Attention,
        Option(
            "Implementation of attention: another of transformers' by its name; or (documents) torch's flash kernel "
            "within the documents of --packing documents, on GPUs in bf16; auto is documents there in layers that are "
            "not compiled, else transformers' choice."
        ),
    ] = "auto"
    lora_rank: Annotated[
        int | None,
        Option(
            "Train low-rank adapters of this rank in linear layers, and freeze the model (lamella[lora]).", at_least=1
        ),
    ] = None
    lora_alpha: Annotated[
        float | None, Option("Adapters are scaled by this over --lora-rank (default: twice --lora-rank).", above=0)
    ] = None
    lora_targets: Annotated[
        tuple[str, ...],
        Option(
            "Linear layers that get adapters: names or shell patterns, such as q_proj 'model.layers.3*' (default: all "
            "but the output head).",
            metavar="PATTERN",
        ),
    ] = ()
    dora: Annotated[bool, Option("Train a magnitude of each output beside the adapters.")] = False


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and its sequences of tokens."""

    paths: Annotated[
        tuple[str, ...],
        Option(
            "Files of text, JSON lines, a JSON array, CSV, Parquet or Arrow, folders of them, and hf:OWNER/NAME:SPLIT "
            "(default: the standard library's sources).",
            name="data",
        ),
    ] = ()
    validation_paths: Annotated[
        tuple[str, ...],
        Option(
            "Texts to validate on in place of a held-out share, as --data; NAME=PATH for several sets.",
            name="validation-data",
        ),
    ] = ()
    mixture: Annotated[
        tuple[str, ...],
        Option(
            "Weights of the sources that --data names, such as wiki=0.7 code=0.3 (default: all sequences alike).",
            metavar="NAME=X",
        ),
    ] = ()
    streaming: Annotated[
        bool,
        Option(
            "Read --data as the run goes, without token files: the first step comes in seconds, whatever the size. "
            "Needs --steps and --validation-data."
        ),
    ] = False
    shuffle_buffer: Annotated[
        int,
        Option(
            "Documents that --streaming reads, packs and shuffles together; one of more than 4,096 characters counts "
            "as several.",
            at_least=1,
        ),
    ] = 2048
    packing: Annotated[
        Literal["auto", "documents", "stream", "none"],
        Option(
            "Sequences of whole documents that do not see each other (documents), cut from one stream of all (stream), "
            "or of one document each (none); auto is stream for text alone, else documents, or none for models whose "
            "state crosses documents."
        ),
    ] = "auto"
    loss_on: Annotated[
        LossOn, Option("Tokens of conversations and completions to predict: the answers, or the prompts too.")
    ] = "answers"
    vocab_size: Annotated[
        int | None, Option("Tokens in the vocabulary, by byte pairs (default: the model's).", at_least=257)
    ] = None
    sequence_length: Annotated[int, Option("Tokens predicted in a sequence.", at_least=1)] = 128
    validation_fraction: Annotated[
        float, Option("Share of the bytes that is held out: whole files, or the end of one.", above=0, below=1)
    ] = 0.05


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Steps, batches, the optimizer, and the learning rate over the steps."""

    steps: Annotated[int, Option("Optimizer steps in all.", at_least=1)] = 500
    epochs: Annotated[float | None, Option("Passes over the training text, in place of --steps.", above=0)] = None
    batch_size: Annotated[int, Option("Sequences in a step, over all ranks.", at_least=1)] = 16
    accumulation: Annotated[int, Option("Microbatches a rank adds up in a step.", at_least=1)] = 1
    lr: Annotated[float, Option("Highest learning rate.", above=0)] = 5e-3
    warmup_steps: Annotated[
        int | None, Option("Steps of linear warm-up, at most --steps (default: 40, or all of fewer).", at_least=0)
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant", "wsd"],
        Option(
            "Learning rate after the warm-up: falls to the end by a cosine or a line, stays, or (wsd) stays and falls "
            "by a line in the last --decay-fraction."
        ),
    ] = "cosine"
    decay_fraction: Annotated[float, Option("Share of the steps in which wsd falls.", above=0, below=1)] = 0.2
    final_lr_fraction: Annotated[float, Option("Learning rate at the end, as a share of --lr.", at_least=0)] = 0.1
    optimizer: Annotated[
        str,
        Option(
            "adamw; muon for the layers' matrices, and adamw for all others, both at AdamW's --lr (Muon's updates are "
            "scaled to the size of AdamW's); or the import path of an elementwise optimizer, such as torch.optim:SGD.",
            metavar="NAME",
        ),
    ] = "adamw"
    optimizer_options: Annotated[
        tuple[str, ...],
        Option(
            "Arguments of muon or an optimizer by import path, such as momentum=0.9 nesterov=true.", metavar="NAME=X"
        ),
    ] = ()
    train: Annotated[
        tuple[str, ...],
        Option(
            "Shell patterns of the parameters to train, such as 'model.layers.3*'; others are frozen (default: all).",
            metavar="PATTERN",
        ),
    ] = ()
    states: Annotated[
        Literal["fp32", "bf16", "int8"],
        Option("Dtype of adamw's two states; bf16 and int8 (codes, a scale for 256 elements) by torchao."),
    ] = "fp32"
    weight_decay: Annotated[float, Option("Weight decay of matrices.", at_least=0)] = 0.1
    beta1: Annotated[float, Option("AdamW's first beta.", at_least=0, below=1)] = 0.9
    beta2: Annotated[float, Option("AdamW's second beta.", at_least=0, below=1)] = 0.95
    eps: Annotated[float, Option("AdamW's epsilon.", above=0)] = 1e-8
    clip_norm: Annotated[
        float, Option("Gradients are scaled down to this norm; inf leaves them.", above=0, may_be_infinite=True)
    ] = 1.0

    @property
    def num_warmup_steps(self) -> int:
        """Steps of linear warm-up: those given, or the default."""
        return min(_WARMUP_STEPS, self.steps) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Workers, their device, and the sharding of the model."""

    ranks: Annotated[int | None, Option("Workers (default: one a GPU; 2 on CPU).", at_least=1)] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Option("Device of the workers; auto takes the GPUs if there are any.")
    ] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16"], Option("Dtype of the forward; auto is bf16 on GPUs, else fp32.")
    ] = "auto"
    float8: Annotated[
        Literal["no", "tensor", "delayed", "row", "block"],
        Option(
            "Gather the layers' matrices and multiply in 8 bits, with a scale for each tensor (delayed: from earlier "
            "steps), row, or block of 128 x 128. Matrices whose sizes are no multiples of 16 (block: 128) are only "
            "gathered so; routers, and modules other than linear layers and stacks of experts, are left out."
        ),
    ] = "no"
    float8_except: Annotated[
        tuple[str, ...],
        Option(
            "Shell patterns of the names, in a layer, of parameters that --float8 leaves out, such as 'self_attn.*'.",
            metavar="PATTERN",
        ),
    ] = ()
    reshard_after_forward: Annotated[
        bool, Option("Free a layer's parameters after its forward; otherwise keep them until its backward.")
    ] = True
    stage: Annotated[
        int,
        Option(
            "ZeRO stage: 3 shards all; 2 keeps whole weights in the compute dtype on each rank; 1 whole gradients too.",
            at_least=1,
            below=4,
        ),
    ] = 3
    replicate: Annotated[
        int,
        Option(
            "Instances of the sharded model, such as one on each host: a step crosses between them once.", at_least=1
        ),
    ] = 1
    spread_states: Annotated[
        bool, Option("Spread main weights and optimizer states over the instances of --replicate too.")
    ] = False
    experts: Annotated[
        int,
        Option(
            "Ranks that share the experts of a layer, each with its part, to which tokens travel (expert parallelism).",
            at_least=1,
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Option(
            "Neighbouring ranks that work on the same sequences, each with its part of every layer's matrices, as "
            "transformers' plan for the model cuts them (tensor parallelism).",
            at_least=1,
        ),
    ] = 1
    context_parallel: Annotated[
        int,
        Option(
            "Neighbouring ranks that work on the same sequences, each on pieces of every sequence; attention gathers "
            "the keys and values of all pieces (context parallelism).",
            at_least=1,
        ),
    ] = 1
    keep_budget: Annotated[
        str | None,
        Option(
            "Bytes of gathered layers, such as 2GiB, that stay from forward to backward (default: none).",
            metavar="SIZE",
        ),
    ] = None
    reduce: Annotated[Literal["fp32", "bf16"], Option("Dtype of gradients between hosts, with --precision bf16.")] = (
        "fp32"
    )
    rest: Annotated[
        Literal["gpu", "cpu"],
        Option("Memory of main weights, gradients and optimizer states: the GPU's, or the host's, which steps there."),
    ] = "gpu"
    recompute: Annotated[
        Literal["no", "full", "selective"],
        Option("Run each layer's forward again in backward, all of it, or all but matrix products and attention."),
    ] = "no"
    recompute_layers: Annotated[
        int | None, Option("Number of layers that --recompute runs again, the first ones (default: all).", at_least=1)
    ] = None
    offload_activations: Annotated[
        bool, Option("Keep tensors that layers save for backward, except weights, in the host's memory.")
    ] = False
    compile: Annotated[
        bool | None,
        Option(
            "Compile each layer with torch's inductor: the first step takes longer, later ones less (default: on GPUs, "
            "for models whose compiled layers were measured, in 1,000 steps or more)."
        ),
    ] = None
    capture: Annotated[
        bool | None,
        Option(
            "Launch each step at once, as a CUDA graph of the fourth: faster where the host is the limit, for plain "
            "text in --packing stream. The graph keeps the memory of a step (default: on one or two GPUs of a host, "
            "for Llamas of up to 500 million parameters)."
        ),
    ] = None
    threads: Annotated[
        int | None, Option("Compute threads of a CPU worker (default: its share of the cores).", at_least=1, below=4097)
    ] = None

    @property
    def num_data_ranks(self) -> int:
        """Ranks with sequences of their own; `ranks` is decided."""
        return (self.ranks or 1) // self.num_neighbours

    @property
    def num_neighbours(self) -> int:
        """Neighbouring ranks with the same sequences, or pieces of the same sequences."""
        return self.tensor_parallel * self.context_parallel


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run's folder, and the intervals of reports, validations and checkpoints."""

    directory: Annotated[
        str | None,
        Option("Folder to write to and resume from (default: runs/<model>).", name="run-dir", metavar="FOLDER"),
    ] = None
    resume: Annotated[
        bool | None, Option("Insist on a checkpoint to go on from, or on none (default: go on if there is one).")
    ] = None
    from_step: Annotated[
        int | None, Option("Go on from the checkpoint of this step, and set later checkpoints aside.", at_least=0)
    ] = None
    seed: Annotated[int, Option("Seed of the weights, the data order and dropout.", at_least=0, below=2**32)] = 0
    deterministic: Annotated[
        bool, Option("Deterministic kernels alone: a run repeats bit for bit on as many equal devices, resumed or not.")
    ] = False
    log_interval: Annotated[int, Option("Steps between step lines.", at_least=1)] = 10
    validation_interval: Annotated[int, Option("Steps between validations.", at_least=1)] = 100
    validation_sequences: Annotated[int, Option("Sequences in a validation, at most.", at_least=1)] = 256
    checkpoint_interval: Annotated[int, Option("Steps between checkpoints.", at_least=1)] = 100
    keep_checkpoints: Annotated[int, Option("Number of newest checkpoints to keep.", at_least=1)] = 2
    checkpoints: Annotated[
        str | None,
        Option(
            "Folder of the checkpoints, which all hosts must share (default: checkpoints, in --run-dir).",
            metavar="FOLDER",
        ),
    ] = None
    sample: Annotated[
        tuple[str, ...], Option("Prompts that the model continues during training.", metavar="PROMPT")
    ] = ()
    sample_interval: Annotated[int, Option("Steps between samples.", at_least=1)] = 100
    sample_tokens: Annotated[int, Option("Tokens of a sample, at most.", at_least=1)] = 64
    sample_temperature: Annotated[
        float, Option("0 takes the likeliest token of a sample each time; above, choices are seeded.", at_least=0)
    ] = 0.0
    trackers: Annotated[
        tuple[str, ...],
        Option("Trackers of the records: tensorboard, wandb, mlflow, trackio (lamella[...]).", metavar="NAME"),
    ] = ()
    profile: Annotated[
        int | None, Option("Steps to profile, after three others, for a trace and an overlap report.", at_least=1)
    ] = None
    timeout: Annotated[
        float, Option("Seconds to wait for a rank, or for a save, before the run ends.", above=0, below=_FOREVER_S)
    ] = 600.0
    startup_timeout: Annotated[
        float, Option("The same up to the end of the first step, which may compile.", above=0, below=_FOREVER_S)
    ] = 3600.0

    @property
    def tracker_names(self) -> tuple[str, ...]:
        """The names of the trackers; `--trackers a,b` and `--trackers a b` are the same."""
        names = (name.strip() for text in self.trackers for name in text.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def wait_limits(self) -> WaitLimits:
        """The limits of the watch over the ranks."""
        return WaitLimits(self.timeout, self.startup_timeout)
