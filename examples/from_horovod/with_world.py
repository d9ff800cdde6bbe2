"""The same training with Paceline's API: see docs/how-to/run/from-horovod.md.

paceline run -n 2 examples/from_horovod/with_world.py
"""

import torch
from model import accuracy, build_model, load_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline

EPOCHS, BATCH, LR = 20, 64, 0.05

world = paceline.init(seed=0)
train, test = load_data()
loader = world.shard(DataLoader(train, BATCH, shuffle=True), global_batch=BATCH)

model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
model, optimizer = world.distribute(model, optimizer)

for _ in world.epochs(EPOCHS, checkpoint="digits-checkpoints"):
    for images, labels in world.batches(loader):
        loss = cross_entropy(model(images), labels)
        world.backward(loss)
        world.step(optimizer)
    world.log(loss=loss)
if world.rank == 0:
    print(f"test accuracy {accuracy(model, test):.3f}")
