"""Q-learning of CartPole without target networks, as CrossQ: batch renormalization of states and next states together.

Prints the mean length of an episode, of random actions and of the greedy ones after training.
"""

import argparse

import gymnasium
import torch
from torch import Tensor, nn

import ghostnoise


def critic() -> nn.Sequential:
    """Return a critic with batch renormalization."""
    layers = nn.BatchNorm1d(4, momentum=0.01), nn.Linear(4, 128), nn.ReLU(), nn.BatchNorm1d(128, momentum=0.01)
    return ghostnoise.convert(nn.Sequential(*layers, nn.Linear(128, 2)), "brn", warmup_steps=200, transition_steps=0)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Make a step of Q-learning: one pass over states and next states, which share the statistics."""
    state, following, action, ended = batch.split([4, 4, 1, 1], 1)
    now, later = model.train()(torch.cat([state, following])).chunk(2)
    target = 1 + 0.98 * later.detach().amax(1, keepdim=True) * (1 - ended)
    optimizer.zero_grad()
    nn.functional.smooth_l1_loss(now.gather(1, action.long()), target).backward()
    optimizer.step()


@torch.no_grad()
def episode(environment: gymnasium.Env, model: nn.Module, greed: float) -> Tensor:
    """Run an episode, whose actions are greedy with this probability, and return its moves."""
    state, moves, ended, truncated = torch.tensor(environment.reset()[0]), [], False, False
    while not (ended or truncated):
        scores = model.eval()(state[None])[0] if torch.rand(()) < greed else torch.rand(2)
        following, _, ended, truncated, _ = environment.step(int(scores.argmax()))
        moves.append(torch.cat([state, torch.tensor([*following, scores.argmax(), float(ended)])]))
        state = torch.tensor(following)
    return torch.stack(moves)


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    torch.manual_seed(0)
    environment, model = gymnasium.make("CartPole-v1", max_episode_steps=200), critic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
    memory = torch.cat([episode(environment, model, 0.0) for _ in range(20)])
    before = known = len(memory)
    while known < parser.parse_args().steps:
        memory = torch.cat([memory, episode(environment, model, 0.9)])
        for index in torch.randint(len(memory), (len(memory) - known, 128)):
            update(model, optimizer, memory[index])
        known = len(memory)
    after = sum(len(episode(environment, model, 1.0)) for _ in range(10)) / 10
    print(f"mean length of an episode {before / 20:.1f} -> {after:.1f}")


if __name__ == "__main__":
    main()
