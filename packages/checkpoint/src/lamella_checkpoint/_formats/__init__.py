"""torch DCP as a `Source`, its writers, its verification; tensors in archives of `torch.save`."""
