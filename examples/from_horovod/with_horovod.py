"""Digits with Horovod's interface, as Horovod's documentation recommends it.

paceline run -n 2 examples/from_horovod/with_horovod.py
"""

import horovod.torch as hvd
import torch
from model import accuracy, build_model, load_data
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, LR = 20, 64, 0.05

hvd.init()
torch.manual_seed(0)
train, test = load_data()
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=BATCH // hvd.size(), sampler=sampler)

model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss").item()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
        torch.save(model.state_dict(), "digits.pt")
if hvd.rank() == 0:
    print(f"test accuracy {accuracy(model, test):.3f}")
