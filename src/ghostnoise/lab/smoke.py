"""Any recipe made small enough to run in seconds on two CPU cores."""

from typing import Any

from ghostnoise.lab.settings import CUTTING, Settings
from ghostnoise.lab.validation import validated

EPOCHS = 2
BATCH, LEAST = 32, 4  # of all processes, and of each
TIMM_BATCH = 8  # networks of timm keep their size
BATCHES, TEST_BATCHES = 5, 2
WIDTH, MLP_WIDTH = 16, 64  # 16 channels divide into heads and into quarters for bottlenecks
IMAGE_SIZE, RESIZE = 64, 72
METERED, DRAWS = 2, 32  # batches that the meter measures, and ghost batches that it draws from each


def shrink(settings: Settings) -> Settings:
    """The same experiment with fewer epochs, images and channels, and smaller batches; its numbers mean nothing.

    Two epochs of five batches of 32; ghost batches not larger than a process's batch; networks of 16 channels, images
    of 64 pixels from folders, warm-up in proportion; no compilation, and on a CPU bf16 in the place of fp16. Networks
    of timm keep their width and image size, and get batches of 8. What is smaller already stays. Shrinking twice is
    shrinking once.
    """
    tree = settings.model_dump(exclude_none=True)
    model, norm, data, optim, train = (tree[name] for name in ("model", "norm", "data", "optim", "train"))
    timm = model["name"].startswith("timm:")
    epochs = min(train["epochs"], EPOCHS)
    size, processes = train["batch_size"], train["processes"]
    share = max(min(LEAST, -(-size // processes)), min(size, TIMM_BATCH if timm else BATCH) // processes)
    batch = share * processes
    if norm["method"] in CUTTING and "ghost_size" in norm:
        norm["ghost_size"] = min(norm["ghost_size"], share)
    optim["warmup_epochs"] *= epochs / train["epochs"]
    data["limit"] = _least(data, "limit", BATCHES * batch)
    data["test_limit"] = _least(data, "test_limit", TEST_BATCHES * batch)
    if data["name"] == "imagefolder" and not timm:
        data["image_size"] = _least(data, "image_size", IMAGE_SIZE)
        data["resize"] = _least(data, "resize", RESIZE)
    if "widths" in model:
        model["widths"] = [min(width, MLP_WIDTH) for width in model["widths"]]
    elif not timm:
        model["width"] = _least(model, "width", MLP_WIDTH if model["name"] == "mlp" else WIDTH)
    if "meter" in tree:
        tree["meter"] |= {"every": 1, "batches": min(tree["meter"]["batches"], METERED), "draws": DRAWS}
    train |= {"epochs": epochs, "batch_size": batch, "compile": False, "smoke": True}
    if train["device"] == "cpu" and train["amp"] == "fp16":
        train["amp"] = "bf16"
    return validated(tree)


def _least(section: dict[str, Any], name: str, bound: int) -> int:
    return min(int(section.get(name, bound)), bound)
