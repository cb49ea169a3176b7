import importlib
import json

import pytest
import torch

from ghostnoise import cli
from ghostnoise.bench import lab
from ghostnoise.lab.data.in_memory import Images

importlib.import_module("startup.sitecustomize")


@pytest.mark.slow
def test_the_trainer_beside_the_bare_step_and_a_plain_loop(tmp_path, capsys):
    assert cli.main(["bench", "lab", "--quick", "--threads", "1", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "lab.json").read_text())["records"]
    sweeps = [record for record in records if record["row"].startswith("sweep")]
    assert [(each["contender"], each["ratio_p50"] > 0) for each in sweeps] == 2 * [
        ("allowed", True),
        ("ghostnoise sweep", True),
    ]
    records = [record for record in records if record not in sweeps]
    assert {record["row"] for record in records} == {"resnet-20 batch 16 contiguous", "mlp batch 16 contiguous"}
    for record in records:
        assert record["images_per_second"] == pytest.approx(1e3 * 16 * record["steps"] / record["p50_ms"])
        assert record["speed_ratio"] == pytest.approx(1 / record["ratio_p50"])
    names = [record["contender"] for record in records[: len(records) // 2]]
    assert names[:3] == ["bare step", "ghostnoise train", "PIL loader"]
    assert "images" in capsys.readouterr().out
    assert (tmp_path / "lab.png").exists()


def test_one_image_at_a_time_is_the_set_normalized():
    """Crops and flips aside: the middle of an image of one color is that color, normalized."""
    pixels = torch.arange(0, 250, 50, dtype=torch.uint8)[:, None, None, None].expand(5, *lab.CIFAR.shape)
    images = lab.OneByOne(Images(pixels, torch.arange(5)), lab.by_hand)
    for index in range(5):
        image, label = images[index]
        assert label == index
        mean, std = torch.tensor(lab.CIFAR.mean), torch.tensor(lab.CIFAR.std)
        torch.testing.assert_close(image[:, 16, 16], (index * 50 / 255 - mean) / std)


def test_torchvisions_transforms_make_images_of_the_same_law():
    transform = lab.torchvision()
    assert transform is not None, "torchvision is among the packages that the tests need"
    torch.manual_seed(0)
    pixels = torch.randint(256, (1, *lab.CIFAR.shape), dtype=torch.uint8)
    theirs, ours = (lab.OneByOne(Images(pixels, torch.zeros(1)), each) for each in (transform, lab.by_hand))

    def looks(images):
        return {tuple(images[0][0].flatten().tolist()) for _ in range(400)}

    # 25 crops by 2 flips; each is missed with probability (49/50)^400 < 0.0004
    assert len(looks(theirs) | looks(ours)) == 50
