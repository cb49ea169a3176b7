"""The networks of MNIST-1D in plain PyTorch: an implementation that shares no code with the library or its lab.

Written from the definitions: `make_dataset` of the package mnist1d, nn modules, and GBN and GNI as their equations.
"""

import math

import mnist1d.data
import torch
import torch.nn.functional as F
from torch import nn

EPOCHS, BATCH, WARMUP, RATE = 60, 256, 3, 0.1
CLASSES, WIDTH = 10, 64


def signals():
    """Return the signals and labels for training and for testing."""
    arguments = mnist1d.data.get_dataset_args()
    arguments.num_samples, arguments.seed, arguments.train_split = 10_000, 42, 0.2
    made = mnist1d.data.make_dataset(arguments)
    return [
        (torch.tensor(made[f"x{part}"], dtype=torch.float32).unsqueeze(1), torch.tensor(made[f"y{part}"]).long())
        for part in ("", "_test")
    ]


class Norm(nn.BatchNorm1d):
    """Batch norm, GBN or GNI of (B, C, S) in training, and batch norm at inference."""

    def __init__(self, channels, method, size):
        super().__init__(channels)
        self.method, self.size = method, size

    def forward(self, x):
        if not self.training or self.method == "BN":
            return super().forward(x)
        y = self._ghost_batch_norm(x) if self.method == "GBN" else self._ghost_noise(x)
        return y * self.weight[:, None] + self.bias[:, None]

    def _ghost_batch_norm(self, x):
        y, means, variances = [], [], []
        for ghost in x.split(self.size):
            mean, var = ghost.mean((0, 2), keepdim=True), ghost.var((0, 2), unbiased=False, keepdim=True)
            y.append((ghost - mean) / (var + self.eps).sqrt())
            means.append(mean.detach())
            variances.append(var.detach())
        self._update(torch.stack(means).mean(0), torch.stack(variances).mean(0))
        return torch.cat(y)

    def _ghost_noise(self, x):
        mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), unbiased=False, keepdim=True)
        values = x.shape[0] * x.shape[2]
        self._update(mean.detach(), var.detach() * values / (values - 1))
        y = (x - mean) / (var + self.eps).sqrt()
        with torch.no_grad():
            drawn = torch.randint(len(x), (len(x), self.size))  # a ghost batch for each sample
            first, second = (moment[drawn].mean(1).unsqueeze(2) for moment in (y.mean(2), y.square().mean(2)))
            shift = first - y.mean((0, 2), keepdim=True)
            scale = ((second - first.square() + 1e-3) / (y.var((0, 2), unbiased=False, keepdim=True) + 1e-3)).sqrt()
        return (y - shift) / scale

    def _update(self, mean, var):
        self.running_mean.lerp_(mean.flatten(), 0.1)
        self.running_var.lerp_(var.flatten(), 0.1)


def accuracy(method, size, seed, train, test):
    """Train a network and return its accuracy on the test signals, in percent."""
    torch.manual_seed(seed)
    layers, channels = [], 1
    for kernel in (5, 3, 3):
        conv = nn.Conv1d(channels, WIDTH, kernel, stride=2, padding=kernel // 2, bias=False)
        layers += [conv, Norm(WIDTH, method, size), nn.ReLU()]
        channels = WIDTH
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * WIDTH, CLASSES))
    weights, others = ([each for each in model.parameters() if (each.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    (x, labels), steps = train, len(train[0]) // BATCH
    warm, every = WARMUP * steps, EPOCHS * steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda at: at / warm if at < warm else (1 + math.cos(math.pi * (at - warm) / (every - warm))) / 2,
    )
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x))[: steps * BATCH].split(BATCH):
            loss = F.cross_entropy(model(x[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(test[0]).argmax(1) == test[1]).double().mean().item()
