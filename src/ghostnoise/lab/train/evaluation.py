"""Score a network on the held-out images."""

import torch
import torch.nn.functional as F

from ghostnoise.lab.data import Source
from ghostnoise.lab.train.session import Session


@torch.no_grad()
def evaluate(session: Session, source: Source) -> tuple[float, float]:
    """Mean cross entropy, and accuracy in percent, over all processes' shares."""
    model, here = session.evaluated, session.here
    here.share(model.buffers())
    training = model.training
    model.eval()
    totals = torch.zeros(3, device=here.device)
    for images, labels in source.evaluation():
        with session.casting():
            scores = model(images)
        loss = F.cross_entropy(scores.float(), labels, reduction="sum")
        right = (scores.argmax(1) == labels).sum()
        totals += torch.stack([loss, right.float(), loss.new_tensor(len(labels))])
    model.train(training)
    loss_sum, hits, images_seen = here.add(totals).tolist()
    return loss_sum / images_seen, 100 * hits / images_seen
