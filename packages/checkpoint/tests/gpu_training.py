"""What tests on GPUs share: a sharded model on one, and two steps of it."""

import torch


def build(kit, *, seed=0, **options):
    model, _ = kit.build(sharded=False, seed=seed)
    model.cuda()
    kit.shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def train(model, optimizer):
    inputs = torch.linspace(-1, 1, 20, device="cuda").reshape(4, 5)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
