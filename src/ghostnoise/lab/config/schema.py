"""The settings of a run, section by section.

A section checks its own settings; `overrides.check` checks what concerns two sections. A setting that is added here
must have the default None, so that the identities of existing runs do not change.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from ghostnoise.lab.config import own
from ghostnoise.lab.config.methods import NormSettings
from ghostnoise.lab.config.section import Above0, Count, Least0, Section, Share, Tree

Arguments = Annotated[dict[str, Any] | None, BeforeValidator(lambda given: None if given == {} else given)]
"""Keyword arguments of the user's own function."""


class ModelSettings(Section):
    """The network."""

    name: str
    """One of `ghostnoise.lab.models`, "timm:NAME" for any of timm's, or "package.module:function" for your own."""
    width: Count | None = None
    """Channels of the first stage, or of the layers of a plain network; the network's own if unset."""
    widths: Annotated[list[Count], Field(min_length=1)] | None = None
    """Hidden layers of an MLP."""
    zero_init_last: bool | None = None
    """Initialize the gain of the last norm of each residual branch to 0 instead of 1, as timm does (false if unset)."""
    args: Arguments = None
    """Keyword arguments of your own function."""
    init: str | None = None
    """Set by --init-from: the SHA-256 of the weights that the training starts from."""

    @field_validator("zero_init_last")
    @classmethod
    def _unset_default(cls, value: bool | None) -> bool | None:
        """Unset false, the default, so that writing it makes no difference."""
        return value or None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in own.FOREIGN if own.named(self.name) else ("args",):
            if getattr(self, name) is not None:
                who = "the networks of this library" if own.named(self.name) else "your own networks"
                raise ValueError(f"{name}: a setting of {who}, and name is {self.name!r}; leave {name} out")
        return self


def _seed(value: object) -> object:
    """Accept a seed or "run"; a union of types would report two mistakes."""
    if value == "run" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise PydanticKnownError("literal_error", {"expected": "an integer of 0 or more, or 'run'"})


class DataSettings(Section):
    """The images and their augmentation."""

    TAG = "name"
    name: str
    """A data set of `ghostnoise.lab.data`, or "package.module:function" for your own."""
    evaluate: Literal["validation", "test"] = "validation"
    """"validation" trains on 90 % of the training set and scores the rest; "test" trains on all of it.
    MNIST-1D has separate signals for validation, so both train on all of the training set."""
    limit: Count | None = None
    """Use only this many training images, the first in a fixed random order, before the validation split."""
    test_limit: Count | None = None
    """Use only this many test images, the first in a fixed random order."""
    split_seed: Annotated[int | Literal["run"], PlainValidator(_seed)] = 0
    """Seed of the validation split: a number, so that all seeds are compared on the same images, or "run" for `seed`,
    so that each seed holds out other images."""
    augment: str = "none"
    """"flip-crop": random flip, zero padding, random crop; "resized-crop": random resized crop and flip."""
    stand_in: bool = False
    """Set by --smoke where the files are missing: use random images of the same shape."""

    @classmethod
    def kinds(cls) -> dict[str, type["DataSettings"]]:
        """Return the kinds by the names of the data sets."""
        return {"mnist1d": Signals, **dict.fromkeys(IMAGES, Images), "imagefolder": ImageFolder, own.NAME: OwnData}

    def of_any_machine(self) -> Tree:
        """Return the settings that identify a run wherever it is trained."""
        return self.identifying() | {"stand_in": False}


class Signals(DataSettings):
    """MNIST-1D."""

    name: Literal["mnist1d"]
    split_seed: Literal[0] = 0
    augment: Literal["none"] = "none"


class Images(DataSettings):
    """Images in memory."""

    name: str
    augment: Literal["none", "flip-crop"] = "none"
    padding: Annotated[int, Field(ge=0)] | None = None
    """Padding of "flip-crop" on each side (4 if unset)."""

    @model_validator(mode="before")
    @classmethod
    def _default_padding(cls, given: Any) -> Any:
        return {"padding": 4} | given if isinstance(given, dict) and given.get("augment") == "flip-crop" else given

    @model_validator(mode="after")
    def _padding_of_crops(self) -> Self:
        if self.padding is not None and self.augment != "flip-crop":
            raise ValueError(
                f"padding={self.padding}: a setting of flip-crop, and augment is {self.augment!r}; leave padding out"
            )
        return self


class OwnData(Images):
    """The images or signals that a function of the user returns."""

    args: Arguments = None
    """Keyword arguments of your own function."""


class ImageFolder(DataSettings):
    """Images in folders."""

    name: Literal["imagefolder"]
    augment: Literal["none", "resized-crop"] = "none"
    folder: str
    """Folder of "imagefolder" below the data folder, with train/ and val/ (or test/)."""
    image_size: Count = 224
    """Size of the images of "imagefolder" as the network gets them."""
    resize: Count = 256
    """Shorter side of the images of "imagefolder" before the center crop for evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.resize < self.image_size:
            raise ValueError(f"resize={self.resize}: must be image_size={self.image_size} or more; raise it")
        return self


IMAGES = ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100")


class OptimSettings(Section):
    """The optimizer and its learning rate, which warms up linearly and decays by a cosine, step by step.

    `warmup_lr`, `warmup_prefix` and `min_lr` have the names and the meaning of timm's.
    """

    TAG = "name"
    name: str = "sgd"
    """"sgd", "adamw", or "package.module:function" for your own."""
    lr: Above0
    weight_decay: Least0 = 0.0
    """Weight decay of weights; parameters with fewer than two dimensions (gains, biases) are not decayed."""
    warmup_epochs: Least0 = 0.0
    """Epochs in which the learning rate rises."""
    warmup_lr: Least0 | None = None
    """Learning rate of the first step, below `lr`; if unset, step k of the K steps of warm-up has `lr` · k/K."""
    warmup_prefix: bool | None = None
    """Whether the cosine starts after the warm-up (true if unset); if false, it is counted from the first step, and the
    warm-up replaces its beginning."""
    min_lr: Least0 | None = None
    """Learning rate that the cosine ends at (0 if unset)."""
    clip: Above0 | None = None
    """Maximum norm of the gradient."""

    @classmethod
    def kinds(cls) -> dict[str, type["OptimSettings"]]:
        """Return the kinds by the names of the optimizers."""
        return {"sgd": Sgd, "adamw": AdamW, own.NAME: OwnOptim}

    @field_validator("warmup_prefix", "min_lr")
    @classmethod
    def _unset_default(cls, value: float | None, info: ValidationInfo) -> float | None:
        """Unset a value that is the default, so that writing it makes no difference."""
        return None if value == {"warmup_prefix": True, "min_lr": 0}[str(info.field_name)] else value

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        for name in ("warmup_lr", "min_lr"):
            if (value := getattr(self, name)) is not None and value >= self.lr:
                raise ValueError(f"{name}={value:g}: must be below lr={self.lr:g}; lower it or leave it out")
        for name in ("warmup_lr", "warmup_prefix"):
            if getattr(self, name) is not None and not self.warmup_epochs:
                raise ValueError(f"{name} with warmup_epochs=0: there is no warm-up; leave {name} out")
        return self


class Sgd(OptimSettings):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: Share = 0.9
    """Momentum of sgd."""
    nesterov: bool = False
    """Nesterov momentum of sgd."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError(
                f"nesterov with momentum={self.momentum}: it needs momentum above 0; raise momentum "
                "or leave nesterov out"
            )
        return self


class AdamW(OptimSettings):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Betas of adamw."""
    eps: Above0 = 1e-8
    """Epsilon of adamw."""


class OwnOptim(OptimSettings):
    """The optimizer that a function or class of the user returns."""

    name: str
    args: Arguments = None
    """Keyword arguments of your own function."""


class TrainSettings(Section):
    """Length of the training, batch size, precision and device."""

    epochs: Count
    batch_size: Count
    """Samples in a step, over all processes."""
    accumulation_steps: Count | None = None
    """Micro-batches of equal size into which each process splits its part of a batch; the step uses the mean of their
    gradients (1 if unset). A batch norm uses the statistics of a micro-batch."""
    label_smoothing: Share = 0.0
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, updated every step and used for evaluation."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision."""
    channels_last: bool = False
    compile: bool = False
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """"auto" for the best available one."""
    deterministic: bool = False
    """On GPUs, use only deterministic algorithms."""
    processes: Count = 1
    """Set by torchrun."""
    evaluate_every: Count | None = None
    """Epochs between two evaluations (1 if unset); the last epoch is always evaluated. It changes no result, and is
    not part of the identity of a run."""
    smoke: bool = False
    """Set by --smoke: the run is shrunk to seconds, and its numbers mean nothing."""

    @field_validator("accumulation_steps")
    @classmethod
    def _unset_default(cls, value: int | None) -> int | None:
        """Unset 1, the default, so that writing it makes no difference."""
        return None if value == 1 else value

    def identifying(self) -> Tree:
        """Return the settings that identify a run: not how often it is evaluated, which changes no weights."""
        return {name: value for name, value in super().identifying().items() if name != "evaluate_every"}

    def of_any_machine(self) -> Tree:
        """Return the settings that identify a run wherever it is trained."""
        return self.identifying() | {"device": "auto", "processes": 1}


class MeterSettings(Section):
    """How often the noise in the network's layers is measured; training is not affected."""

    every: Count
    """Epochs between two measurements; the first and the last epoch have one too."""
    batches: Count = 8
    """Training batches to measure."""
    ghost_size: Count | None = None
    """Samples in a ghost batch: `norm.ghost_size` if unset, or else 32."""
    draws: Count = 256
    """Ghost batches to draw from each batch."""


class Settings(Section):
    """All settings that determine what a run computes."""

    model: ModelSettings
    norm: SerializeAsAny[NormSettings]
    data: SerializeAsAny[DataSettings]
    optim: SerializeAsAny[OptimSettings]
    train: TrainSettings
    meter: MeterSettings | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
